"""Whether something fits into the memory of a device, asked before it is made there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.errors import UserError
from harness.files import available_memory

GIB = 2**30


def available_bytes(home: torch.device) -> int:
    """What a new allocation in the memory of device `home` may use, droppable caches included."""
    if home.type != "cuda":
        return available_memory()
    unused = torch.cuda.memory_reserved(home) - torch.cuda.memory_allocated(home)
    return torch.cuda.mem_get_info(home)[0] + unused


def require_room(what: str, num_weights: int, dtype: torch.dtype, devices: Sequence[torch.device]) -> None:
    """Raise UserError where so many weights do not fit into the free memory of all `devices` together."""
    needed, available = num_weights * dtype.itemsize, sum(map(available_bytes, devices))
    if needed <= available:
        return
    word = str(dtype).removeprefix("torch.")
    halved = ", or model.dtype=bfloat16" if dtype == torch.float32 and needed <= 2 * available else ""
    raise UserError(
        f"{what} needs {needed / GIB:.1f} GiB of {devices[0].type} memory for its weights in {word} and "
        f"{available / GIB:.1f} GiB are available; choose a smaller model{halved}"
    )

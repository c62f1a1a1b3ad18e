"""Whether something fits into the memory of a device, asked before it is made there."""

from __future__ import annotations

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


def require_room(what: str, num_weights: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UserError where so many weights do not fit into the free memory of `device`."""
    needed, available = num_weights * dtype.itemsize, available_bytes(device)
    if needed <= available:
        return
    word = str(dtype).removeprefix("torch.")
    halved = ", or model.dtype=bfloat16" if dtype == torch.float32 and needed <= 2 * available else ""
    raise UserError(
        f"{what} needs {needed / GIB:.1f} GiB of {device.type} memory for its weights in {word} and "
        f"{available / GIB:.1f} GiB are available; choose a smaller model{halved}"
    )

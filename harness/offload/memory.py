"""Whether a cache fits, asked before it is made."""

from __future__ import annotations

import torch

from harness.errors import UserError
from harness.files import available_memory


def require_memory(num_bytes: int, home: torch.device) -> None:
    """Refuses a cache that does not fit into the memory of device `home`.

    Raises UserError with the bytes needed and available and the settings to lower.
    """
    available = available_bytes(home)
    if num_bytes > available:
        raise UserError(
            f"the KV cache needs {num_bytes / 2**30:.1f} GiB of {home.type} memory and "
            f"{available / 2**30:.1f} GiB are available; lower batch_size, prompt_len or gen_len, "
            "or choose a codec of fewer bits"
        )


def available_bytes(home: torch.device) -> int:
    """What a new allocation in the memory of device `home` may use, droppable caches included."""
    if home.type != "cuda":
        return available_memory()
    unused = torch.cuda.memory_reserved(home) - torch.cuda.memory_allocated(home)
    return torch.cuda.mem_get_info(home)[0] + unused

"""From masks of slots to lists of them, without asking the device how many there are.

Shapes: masks bool [batch, heads, slots]; lists int64 [batch, heads, n], filled up with -1. Under CUDA one kernel does
each (`kernels.compact`), a program a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.offload.request import Chosen, num_true


def indices(mask: Tensor, cap: int) -> Tensor:
    """Slots where `mask` [batch, heads, slots] holds, in order: int64 [batch, heads, cap], -1 behind the last.

    At most `cap` may hold in a head. No device sync.
    """
    if mask.is_cuda:
        from harness.offload.kernels import compact as kernels

        return kernels.indices(mask, cap)
    order = torch.where(mask, mask.cumsum(-1) - 1, cap)
    slots = torch.arange(mask.shape[-1], device=mask.device).expand_as(order)
    found = order.new_full((*mask.shape[:-1], cap + 1), -1)
    return found.scatter_(-1, order, slots)[..., :cap]


def places(mask: Tensor, resident: Tensor) -> tuple[Chosen, Tensor]:
    """Where the selected slots go in a kept buffer, those that are there already staying.

    mask: bool [batch, heads, slots]; resident: int64 [batch, heads, places], the slot in each place, -1 for none.
    Returns the slots to fetch with their places, those of a head first, and the new `resident`, which holds exactly the
    selection.
    """
    if mask.is_cuda:
        from harness.offload.kernels import compact as kernels

        missing, free, after = kernels.places(mask, resident)
        return Chosen(missing, num_true(missing >= 0), free), after
    stays = (resident >= 0) & mask.gather(-1, resident.clamp(min=0))
    room = resident.shape[-1]
    missing, free = indices(mask & ~_held(mask, resident, stays), room), indices(~stays, room)
    fetch = Chosen(missing, num_true(missing >= 0), free)
    return fetch, torch.where(stays, resident, fetch.by_place())


def warm(device: torch.device, *, reuse: bool) -> None:
    """Under CUDA compile and load the kernel for lists of slots, or with `reuse` of places."""
    if device.type == "cuda":
        nothing = torch.zeros((1, 1, 1), dtype=torch.bool, device=device)
        if reuse:
            places(nothing, torch.full((1, 1, 1), -1, device=device))
        else:
            indices(nothing, 1)


def _held(mask: Tensor, resident: Tensor, stays: Tensor) -> Tensor:
    """Slots that stay in the buffer, bool shaped like `mask`."""
    slots = mask.shape[-1]
    padded = mask.new_zeros((*mask.shape[:-1], slots + 1))
    return padded.scatter_(-1, torch.where(stays, resident, slots), True)[..., :slots]

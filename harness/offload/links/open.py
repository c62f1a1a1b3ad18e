"""The link of a device."""

from __future__ import annotations

import torch

from harness.errors import UserError
from harness.offload.links.link import Link
from harness.offload.tuning import DEFAULT_TUNING, Tuning


def open_link(
    device: torch.device,
    *,
    bytes_per_s: float | None = None,
    overlap: bool = True,
    tuning: Tuning = DEFAULT_TUNING,
) -> Link:
    """The link of a device: the real one under CUDA, an emulated one of `bytes_per_s` on the CPU.

    bytes_per_s: None emulates `default_bytes_per_s(measure_copy_rate())`. tuning: of the real one. Raises UserError
    for a rate that is not positive, or one given under CUDA.
    """
    if device.type == "cuda":
        from harness.offload.links.cuda import CudaLink

        if bytes_per_s is not None:
            raise UserError(f"link_gbps={bytes_per_s / 1e9} sets the emulated link of a CPU: leave it null under cuda")
        return CudaLink(device, overlap=overlap, tuning=tuning)
    from harness.offload.links.emulated import EmulatedLink, default_bytes_per_s, measure_copy_rate

    if bytes_per_s is None:
        bytes_per_s = default_bytes_per_s(measure_copy_rate())
    return EmulatedLink(bytes_per_s, overlap=overlap)

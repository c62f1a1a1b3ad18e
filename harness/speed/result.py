"""What timing a cell gives: raw seconds and counts, and the columns of a table made of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from harness.offload.timeline import SEGMENTS
from harness.settings.speed import LatencyConfig


@dataclass(frozen=True)
class LatencyResult:
    """Raw times and counts of a cell; h2d_bytes, d2h_bytes and device_read_bytes are what the timed steps used, wrote
    and read in device memory (`harness.offload.reads`).

    weight_bytes: of streamed weights, in the timed steps; weights_on_device: the share of the decoder layers' bytes
    that stays there. None where all do.
    transferred_bytes, link_busy_s: of all steps, warm-up included: how much crossed, and how long the link was busy.

    dense_s: the dense pass, where it was shared; begin_s: the rest of the prefill. step_s: seconds, [repeats] of
    [timed steps]. segments: by step. link_busy_s: how long the link was occupied. size, device_frac: over all
    steps. h2d_bytes and d2h_bytes are None where the driver moves pages that nobody counts.
    device_kv_bytes: what the cache and the method keep on the device, buffers included. pinned_bytes: page-locked host
    memory for the cache. peak_device_bytes: while decoding; on the CPU the weights that are there, buffers of streamed
    ones included, and device_kv_bytes.
    """

    shape: LatencyConfig
    dense_s: float
    begin_s: float
    step_s: list[list[float]]
    segments: list[dict[str, float]]
    h2d_bytes: int | None
    d2h_bytes: int | None
    device_read_bytes: int
    weight_bytes: int | None
    weights_on_device: float | None
    transferred_bytes: int
    link_busy_s: float
    device_kv_bytes: int
    pinned_bytes: int
    peak_device_bytes: int
    size: float
    device_frac: float
    num_layers: int
    predicts: bool

    @property
    def timed(self) -> list[float]:
        """Seconds of every timed step."""
        return [seconds for block in self.step_s for seconds in block]

    @property
    def decode_s(self) -> float:
        """Seconds of gen_len - 1 steps."""
        return self._of_all_steps(sum(self.timed))

    @property
    def link_bytes_per_s(self) -> float | None:
        """Payload bytes/s while the link was occupied; None where nothing crossed it."""
        return self.transferred_bytes / self.link_busy_s if self.link_busy_s else None

    def metrics(self) -> dict[str, Any]:
        """The columns of a latency table that are measured here. Segments are medians, of one block of the model."""
        shape, prefill_s = self.shape, self.dense_s + self.begin_s
        p50, p95 = torch.tensor(self.timed, dtype=torch.float64).quantile(torch.tensor([0.5, 0.95]).double()).tolist()
        return {
            "batch_size": shape.batch_size,
            "prompt_len": shape.prompt_len,
            "gen_len": shape.gen_len,
            "num_timed_steps": len(self.timed),
            "prefill_s": prefill_s,
            "decode_s": self.decode_s,
            "total_s": prefill_s + self.decode_s,
            "tokens_per_s": shape.batch_size * shape.gen_len / (prefill_s + self.decode_s),
            "step_p50_s": p50,
            "step_p95_s": p95,
            "h2d_bytes": self._bytes_of_all_steps(self.h2d_bytes),
            "d2h_bytes": self._bytes_of_all_steps(self.d2h_bytes),
            "weight_bytes": self._bytes_of_all_steps(self.weight_bytes),
            "weights_on_device": self.weights_on_device,
            "device_read_bytes": self._bytes_of_all_steps(self.device_read_bytes),
            "device_kv_bytes": self.device_kv_bytes,
            "exposed_transfer_s": self._exposed_transfer_s(),
            "link_bytes_per_s": self.link_bytes_per_s,
            "peak_device_bytes": self.peak_device_bytes,
            "size": self.size,
            "device_frac": self.device_frac,
            **{f"{name}_s": self._of_a_block(name) for name in SEGMENTS},
        }

    def samples(self) -> dict[str, Any]:
        """Everything raw."""
        sums = ("h2d_bytes", "d2h_bytes", "weight_bytes", "device_read_bytes", "transferred_bytes")
        names = ("dense_s", "begin_s", "step_s", "segments", *sums, "pinned_bytes", "link_busy_s")
        return {name: getattr(self, name) for name in names}

    def _of_all_steps(self, timed: float) -> float:
        return timed / len(self.timed) * (self.shape.gen_len - 1)

    def _bytes_of_all_steps(self, timed: int | None) -> int | None:
        return None if timed is None else round(self._of_all_steps(timed))

    def _exposed_transfer_s(self) -> float | None:
        if self.h2d_bytes is None:
            return None
        return self._of_all_steps(sum(step["transfer"] for step in self.segments) if self.link_busy_s else 0.0)

    def _of_a_block(self, segment: str) -> float | None:
        absent = {"prediction": not self.predicts, "transfer": self.h2d_bytes is None}
        if absent.get(segment):
            return None
        return statistics.median(step[segment] for step in self.segments) / self.num_layers

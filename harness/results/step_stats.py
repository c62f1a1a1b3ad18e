"""What a serving engineer reads of decode steps. Timed runs, generated texts, the usage of an
attached model and the cost model report these numbers, under these names.

ttft_s: time to first token: from the prompts to the logits of the first new token.
decode_s: all steps together.
tokens_per_s: of the batch: its new tokens / (ttft_s + decode_s).
decode_tokens_per_s: of the batch, prompt left out: batch / mean TPOT.
sequence_tokens_per_s: of one sequence, prompt left out: 1 / mean TPOT.
tpot_p50_s, tpot_p95_s, tpot_p99_s, tpot_std_s: of the time per output token (TPOT), one value a
  step: from the logits of the step before to its own. Percentiles are interpolated linearly. The
  standard deviation has n - 1 below; None for a single step. Serving benchmarks that call a
  request's mean TPOT call these values inter-token latencies.
link_utilisation: seconds in which the link was busy / seconds of the steps; None without a link.
hit_rate: rows that were on the device when their layer selected them / rows read. 0 without a
  GPU cache; None without a link. A row is of one token and KV head in a layer that sees every
  token, dense layers included. Rows that have no place behind the link (windows, the last tokens of
  a codec with `residual`, tokens that a method keeps itself) are not among them.
host_kv_bytes: of the cache in host memory; None where the driver moves it. device_kv_bytes: of the
  cache, method and buffers on the device, without pages that the driver moves. disk_kv_bytes: of
  the cache's file; disk_read_bytes: read there by the steps, in whole blocks. Both None without a
  disk.
tokens_evicted: cached tokens that a KV head no longer holds, mean over steps, sequences and the
  layers under the method; 0 where the budget never bites, None of a method that does not evict.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from harness.decode.session import LiveSession


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """The numbers of the module; of seconds None where there is no step."""

    ttft_s: float | None = None
    decode_s: float | None = None
    tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    sequence_tokens_per_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p95_s: float | None = None
    tpot_p99_s: float | None = None
    tpot_std_s: float | None = None
    link_utilisation: float | None = None
    hit_rate: float | None = None
    host_kv_bytes: int | None = None
    device_kv_bytes: int | None = None
    disk_kv_bytes: int | None = None
    disk_read_bytes: int | None = None
    tokens_evicted: float | None = None


def times_of(
    ttft_s: float, step_s: Sequence[float], *, batch_size: int, num_steps: int | None = None
) -> dict[str, Any]:
    """The numbers of steps that took `step_s`, by name. num_steps: of the whole text, if only some
    were timed; decode_s is then their mean times this number."""
    if not step_s:
        return {"ttft_s": ttft_s, "decode_s": 0.0}
    num_steps, mean_s = num_steps or len(step_s), statistics.fmean(step_s)
    median, p95, p99 = np.quantile(step_s, (0.5, 0.95, 0.99)).tolist()
    return {
        "ttft_s": ttft_s,
        "decode_s": num_steps * mean_s,
        "tokens_per_s": ratio(batch_size * (num_steps + 1), ttft_s + num_steps * mean_s),
        "decode_tokens_per_s": ratio(batch_size, mean_s),
        "sequence_tokens_per_s": ratio(1, mean_s),
        "tpot_p50_s": median,
        "tpot_p95_s": p95,
        "tpot_p99_s": p99,
        "tpot_std_s": deviation(step_s),
    }


def stats_of(session: LiveSession) -> StepStats:
    """The numbers of all steps of a live session so far. Waits until nothing is under way."""
    session.drain()
    clock, is_on_disk = session.clock, session.placement == "disk"
    use = session.link_use
    is_replayed = session.graphs is not None and session.graphs.recorded
    timed = None if is_replayed else use  # no event lies around a replayed step's transfers
    rows = session.rows_found, session.rows_read
    return StepStats(
        **times_of(clock.ttft_s, clock.step_s, batch_size=len(session.batch.prompts)),
        link_utilisation=None if timed is None else ratio(timed.busy_s, timed.span_s),
        hit_rate=None if use is None else ratio(*map(float, rows)),
        host_kv_bytes=session.host_bytes,
        device_kv_bytes=session.device_bytes,
        disk_kv_bytes=session.disk_bytes if is_on_disk else None,
        disk_read_bytes=session.traffic.block_bytes if is_on_disk else None,
        tokens_evicted=session.reads.tokens_evicted,
    )


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None where the whole is 0."""
    return part / whole if whole else None


def deviation(values: Sequence[float]) -> float | None:
    """The sample standard deviation; None of fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None

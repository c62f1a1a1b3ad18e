"""Times one run: a method, a placement, a codec and a link at one shape. Everything that is timed
is listed here.

prefill_s: from the prompts to the logits of the first new token: the dense pass, and the method's
  work on the prompt. With a `SharedPrompt` the dense pass is timed once for all runs of its shape
  (dense_s), the rest in each (begin_s). Rows that are still on their way to the host at the end of
  the prompt are not waited for: in a prefill of its own they travel beside the dense pass.
step_s: one decode step: choosing the token, the forward pass, and every wait for the link, up to
  the logits. Steps follow one another without a pause; under CUDA each ends with a wait for the
  compute stream, not for the link. The first `warmup_steps` are not timed. [repeats] of [timed
  steps].
decode_s, bytes, exposed_transfer_s: of gen_len - 1 steps: the mean of the timed ones times their
  number. With `time_limit_s`, no further step is timed after that many seconds of decoding.
segments: seconds of a timed step by `harness.live.timeline.SEGMENTS`; they sum to it.
  exposed_transfer_s is `transfer`. Under managed placement the driver moves pages: a fault stalls
  the kernel that meets it, no byte is counted, and peak_device_bytes, torch's, leaves out the
  cache.
h2d_bytes, d2h_bytes: rows that the steps took from the link, and wrote back; late_bytes: those of
  h2d_bytes that a layer asked for by its own query, for which it waits. device_read_bytes: read in
  device memory. weight_bytes: streamed weights; weights_on_device: the share of the decoder layers'
  bytes that stays there.
transferred_bytes, link_busy_s: payload and busy seconds of the link in all steps, warm-up and
weights included. device_kv_bytes: device memory of cache, method and buffers. pinned_bytes:
page-locked host memory of the cache. peak_device_bytes: while decoding; on the CPU the weights that
are there, buffers of streamed ones included, and
  device_kv_bytes. size, device_frac: over all steps, see `harness.model.sizes`.

    with attach(model) as attached, open_link(attached.device) as link:
        prompt = run_shared_prompt(attached, ids)
        metrics, samples = time_run(attached, prompt, run, link=link, calibration=calibration)
"""

from __future__ import annotations

import math
import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.live.links import Links, Transfer
from harness.live.session import LiveSession
from harness.live.timeline import SEGMENTS, Timeline
from harness.live.weights import StreamedWeights, streamed_weights
from harness.model.attached import Attached
from harness.model.dense_prompts import PrefilledPrompt
from harness.model.prompts import run_prompt
from harness.settings.config import BEHIND_LINK, LatencyConfig, Placement
from methods.base import Calibration, Method
from methods.codec import AnyCodec


@dataclass(frozen=True)
class TimedRun:
    """The settings of a timed run. The fields are those of `LiveSession`; `shape` says how long and
    how often.

    weights_on_device: as `on_device` of `streamed_weights`.
    """

    method: Method
    shape: LatencyConfig
    placement: Placement = "host"
    codec: AnyCodec | None = None
    device_rows: float = 0
    prefetch: bool = False
    pinned: bool = True
    weights_on_device: float = 1.0


class SharedPrompt(NamedTuple):
    """A prompt that ran densely once for all timed runs of its shape, in `dense_s` seconds."""

    prompt: PrefilledPrompt
    dense_s: float


class Timing(NamedTuple):
    """metrics: the columns of a latency table that are measured here; None for what has no meaning.
    Segments are medians, of one block of the model. samples: raw numbers for the record; bytes of
    the timed steps alone are called `timed_...`."""

    metrics: dict[str, Any]
    samples: dict[str, Any]


def run_shared_prompt(attached: Attached, ids: Tensor) -> SharedPrompt:
    """Run prompts ids [batch, prompt] densely, timed. Their queries, keys and values stay in
    memory."""
    real = torch.ones_like(ids, dtype=torch.bool)
    run_prompt(attached, ids[:, :1], real[:, :1])  # the first pass of a process finds cold weights
    began = _now(attached.device)
    prompt = run_prompt(attached, ids, real)
    return SharedPrompt(prompt, _now(attached.device) - began)


def time_run(
    attached: Attached,
    prompt: SharedPrompt | Tensor,
    run: TimedRun,
    *,
    link: Links | None = None,
    calibration: Calibration | None = None,
) -> Timing:
    """Time a run from its prompt on.

    prompt: shared, or ids [batch, prompt], which then run twice, the first time as a warm-up. With
    streamed weights it must be ids, as the prefill streams them too. link: needed under host
    placement; its earlier transfers must have been taken. Raises UserError where the cache does not
    fit into memory, ValueError for combinations without meaning.
    """
    if isinstance(prompt, SharedPrompt) and run.weights_on_device < 1:
        raise ValueError(
            f"weights_on_device={run.weights_on_device}: a shared prompt ran with all weights there"
        )
    timeline = Timeline(attached.device)

    def open_session() -> LiveSession:
        return LiveSession(
            attached,
            run.method,
            max_new_tokens=run.shape.gen_len,
            codec=run.codec,
            placement=run.placement,
            link=link if run.placement in BEHIND_LINK else None,
            calibration=calibration,
            device_rows=run.device_rows,
            prefetch=run.prefetch,
            pinned=run.pinned,
            timeline=timeline,
        )

    streamed = streamed_weights(
        attached, link, run.weights_on_device, timeline=timeline, pinned=run.pinned
    )
    with streamed as weights:
        if isinstance(prompt, Tensor):
            with closing(open_session()) as warm_up:
                _begin(warm_up, prompt)
        with closing(open_session()) as session:
            return _time(session, weights, prompt, run)


def _time(
    session: LiveSession,
    weights: StreamedWeights | None,
    prompt: SharedPrompt | Tensor,
    run: TimedRun,
) -> Timing:
    # 1. The prompt.
    device, shape = session.attached.device, run.shape
    began = _now(device)
    logits = _begin(session, prompt)
    begin_s = _now(device) - began
    for link in session.links:
        link.take_transfers()  # waits for the prompt's; recorded are those that follow
    for used in session.attached.devices:
        if used.type == "cuda":
            # Memory that a link was still reading when it was freed counts until the next
            # allocation.
            torch.empty(1, device=used)
            torch.cuda.reset_peak_memory_stats(used)

    # 2. The steps. The link is not waited for after the warm-up: the rows of the first timed step
    # are under way already, as for every other step.
    until = _now(device) + (shape.time_limit_s or math.inf)
    for _ in range(shape.warmup_steps):
        logits = session.decode_step(logits.argmax(-1))
    counts_before = _counts(session, weights, run)
    step_s: list[list[float]] = []
    before = _now(device)
    for step in range(shape.repeats * shape.block_steps):
        if step and before > until:
            break
        if step % shape.block_steps == 0:
            step_s.append([])
        session.timeline.begin_step()
        logits = session.decode_step(logits.argmax(-1))
        after = _now(device)
        step_s[-1].append(after - before)
        before = after
    segments = session.timeline.take()
    by_link = [link.take_transfers() for link in session.links]
    num_bytes: dict[str, int | None] = {}
    for name, count in _counts(session, weights, run).items():
        num_bytes[name] = None if count is None else round(float(count - counts_before[name]))

    # 3. The columns.
    timed: list[float] = []
    for block in step_s:
        timed += block
    num_steps = shape.gen_len - 1
    quantiles = torch.tensor([0.5, 0.95]).double()
    p50, p95 = torch.tensor(timed, dtype=torch.float64).quantile(quantiles).tolist()
    dense_s = prompt.dense_s if isinstance(prompt, SharedPrompt) else 0.0
    prefill_s, decode_s = dense_s + begin_s, sum(timed) / len(timed) * num_steps
    link_busy_s = sum(map(_busy, by_link))
    transferred_bytes = 0
    for transfers in by_link:
        transferred_bytes += sum(transfer.num_bytes for transfer in transfers)
    waited_s = sum(step["transfer"] for step in segments) if link_busy_s else 0.0
    metrics: dict[str, Any] = {
        "batch_size": shape.batch_size,
        "prompt_len": shape.prompt_len,
        "gen_len": shape.gen_len,
        "num_timed_steps": len(timed),
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "total_s": prefill_s + decode_s,
        "tokens_per_s": shape.batch_size * shape.gen_len / (prefill_s + decode_s),
        "step_p50_s": p50,
        "step_p95_s": p95,
    }
    for name, moved in num_bytes.items():
        metrics[name] = None if moved is None else round(moved / len(timed) * num_steps)
    crosses = run.placement != "managed"
    metrics |= {
        "weights_on_device": weights.on_device if weights else None,
        "device_kv_bytes": session.device_bytes,
        "exposed_transfer_s": waited_s / len(timed) * num_steps if crosses else None,
        "link_bytes_per_s": transferred_bytes / link_busy_s if link_busy_s else None,
        "peak_device_bytes": _peak_device_bytes(session, weights),
        "size": session.reads.size,
        "device_frac": session.reads.device_frac,
    }
    num_layers = session.attached.geometry.num_layers
    for name in SEGMENTS:
        of_step = statistics.median(step[name] for step in segments)
        metrics[f"{name}_s"] = of_step / num_layers
    if not run.method.names_rows:
        metrics["prediction_s"] = None
    if not crosses:
        metrics["transfer_s"] = None
    samples = {
        "dense_s": dense_s,
        "begin_s": begin_s,
        "step_s": step_s,
        "segments": segments,
        "transferred_bytes": transferred_bytes,
        "pinned_bytes": session.pinned_bytes,
        "link_busy_s": link_busy_s,
    }
    for name, moved in num_bytes.items():
        samples[f"timed_{name}"] = moved
    return Timing(metrics, samples)


def _counts(session: LiveSession, weights: StreamedWeights | None, run: TimedRun) -> dict[str, Any]:
    """Bytes up to now, which a GPU may still count; None for bytes that do not cross the link, or
    that the driver moves."""
    crosses = run.placement != "managed"
    return {
        "h2d_bytes": session.loaded_bytes if crosses else None,
        "d2h_bytes": session.written_bytes if crosses else None,
        "late_bytes": session.late_bytes if crosses else None,
        "disk_read_bytes": session.disk_read_bytes if run.placement == "disk" else None,
        "weight_bytes": weights.num_bytes if weights else None,
        "device_read_bytes": session.reads.num_bytes,
    }


def _peak_device_bytes(session: LiveSession, weights: StreamedWeights | None) -> int:
    """The peak while decoding; on the CPU the weights that are there and `device_bytes`."""
    attached = session.attached
    if attached.device.type == "cuda":
        return sum(map(torch.cuda.max_memory_allocated, attached.devices))
    away = weights.host_bytes - weights.device_bytes if weights else 0
    whole = sum(weight.nbytes for weight in attached.model.parameters())
    return whole - away + session.device_bytes


def _begin(session: LiveSession, prompt: SharedPrompt | Tensor) -> Tensor:
    if isinstance(prompt, SharedPrompt):
        return session.start(prompt.prompt)
    return session.prefill(prompt, torch.ones_like(prompt, dtype=torch.bool))


def _busy(transfers: list[Transfer]) -> float:
    """Seconds in which at least one transfer of a link was under way."""
    busy = end = 0.0
    for transfer in sorted(transfers, key=lambda transfer: transfer.start_s):
        busy += max(0.0, transfer.end_s - max(end, transfer.start_s))
        end = max(end, transfer.end_s)
    return busy


def _now(device: torch.device) -> float:
    """perf_counter once the compute stream is idle; the link's own stream may still be busy."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()

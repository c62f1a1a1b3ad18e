"""Times one run: a method, a placement, a codec and a link at one shape. Everything that is timed
is listed here; `harness.results.step_stats` defines the numbers that other runs report too.

A run is repeated `repeats` times. Each repeat has a session of its own and begins with the same
prompt, so its timed steps have the same cached tokens. Percentiles, means and sums are over the
steps of all repeats. `ttft_spread_s` and `tpot_spread_s` are what the steps of one session do not
show: the standard deviation from repeat to repeat of TTFT and of a repeat's median TPOT; None of
one repeat.

ttft_s: from the prompts to the logits of the first new token: the dense pass, and the method's work
  on the prompt; mean over the repeats. With a `SharedPrompt` the dense pass is timed `repeats`
  times for all runs of its shape (dense_s), the rest in each repeat (begin_s). Rows that are still
  on their way to the host at the end of the prompt are not waited for: in a prefill of its own they
  travel beside the dense pass.
step_s: one decode step: choosing the token, the forward pass, and every wait for the link, up to
  the logits. Steps follow one another without a pause; under CUDA each ends with a wait for the
  compute stream, not for the link. The first `warmup_steps` are not timed. By repeat.
decode_s, bytes, exposed_transfer_s: of gen_len - 1 steps: the mean of the timed ones times their
  number. tokens_per_s: of gen_len tokens, likewise.
segments: seconds of a timed step by `harness.decode.timeline.SEGMENTS`; they sum to it.
  exposed_transfer_s is `transfer`. Replayed steps have no events within them: their segments and
  the link's use are those of `MARKED_STEPS` more, None where gen_len has no room for these. Under
  managed placement the driver moves pages: a fault stalls the kernel that meets it, no byte is
  counted, and peak_device_bytes, torch's, leaves out the cache.
h2d_bytes, d2h_bytes: rows that the steps took from the link, and wrote back; late_bytes: those of
  h2d_bytes that a layer asked for by its own query, for which it waits. device_read_bytes: read in
  device memory. weight_bytes: streamed weights; weights_on_device: the share of the decoder layers'
  bytes that stays there.
disk_read_bytes: read from a disk, in whole blocks, for the rows of h2d_bytes; read_amplification:
  how many times as much that is. disk_kv_bytes: of the cache's file. None without a disk.
link_utilisation, hit_rate: of the timed steps. link_bytes_per_s: the bytes of the timed steps
  (h2d_bytes, or disk_read_bytes of a disk, d2h_bytes and weight_bytes) / the seconds of them in
  which the link was busy.
pinned_bytes: page-locked host memory of the cache. peak_device_bytes: while decoding, the largest
  of the repeats; on the CPU the weights that are there, buffers of streamed ones included, and
  device_kv_bytes. budget, device_frac: over all steps, see `harness.model.budgets`. tokens_evicted:
  of the first repeat; None of a method that does not evict.

    with attach(model) as attached, open_link(attached.device) as link:
        prompt = run_shared_prompt(attached, ids, shape.repeats)
        metrics, samples = time_run(attached, prompt, run, link=link)
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.decode.graphs import Marked
from harness.decode.links import Link
from harness.decode.memory import PinnedSlab
from harness.decode.session import LiveSession
from harness.decode.timeline import SEGMENTS, Timeline
from harness.decode.weights import StreamedWeights, streamed_weights
from harness.model.attached import Attached
from harness.model.passes import PrefilledPrompt, launching_on
from harness.model.prompts import run_prompt
from harness.replay.session import Setup
from harness.results.step_stats import deviation, ratio, times_of
from harness.settings.config import LatencyConfig, Placement

REPLAYED = "CUDA graphs"
MARKED_STEPS = 2
"""Steps of a repeat after those that are timed, whose parts stand for theirs, if these are
replayed."""


class TimedRun(NamedTuple):
    """How a run is timed. shape: how long and how often. placement, pinned: as of `LiveSession`.
    weights_on_device: as `on_device` of `streamed_weights`. graphs: decode steps are replayed as
    CUDA graphs where they can be."""

    setup: Setup
    shape: LatencyConfig
    placement: Placement = "host"
    pinned: bool = True
    weights_on_device: float = 1.0
    graphs: bool = False


class SharedPrompt(NamedTuple):
    """A prompt that ran densely for all timed runs of its shape. dense_s: seconds of each pass, one
    for each repeat."""

    prompt: PrefilledPrompt
    dense_s: Sequence[float]


class Timing(NamedTuple):
    """metrics: the columns of a latency table that are measured here; None for what has no meaning.
    Segments are medians, of one block of the model. samples: raw numbers for the record; what the
    timed steps alone moved or read is called `timed_...`."""

    metrics: dict[str, Any]
    samples: dict[str, Any]


class _Repeat(NamedTuple):
    """One repeat: a session from its prompt to its last timed step.

    decoding_s: of all num_steps steps, warm-up included. counts: by name, what the timed steps
    moved and read; None for what has no meaning. segments: of timed or marked steps. timed_busy_s,
    timed_span_s: of the timed steps, seconds in which the link was busy, and all. steps_by: see
    `_steps_by`.
    kept: the cache's bytes, and tokens evicted, by column.
    """

    begin_s: float
    decoding_s: float
    step_s: list[float]
    segments: list[dict[str, float]]
    counts: dict[str, int | None]
    timed_busy_s: float
    timed_span_s: float
    steps_by: str
    kept: dict[str, Any]
    pinned_bytes: int
    peak_device_bytes: int
    budget: float
    device_frac: float
    num_steps: int


def run_shared_prompt(attached: Attached, ids: Tensor, repeats: int = 1) -> SharedPrompt:
    """Run prompts ids [batch, prompt] densely `repeats` times, timed. The queries, keys and values
    of the last pass stay in memory."""
    real = torch.ones_like(ids, dtype=torch.bool)
    run_prompt(attached, ids[:, :1], real[:, :1])  # the first pass of a process finds cold weights
    dense_s: list[float] = []
    while True:
        began = _now(attached.device)
        prompt = run_prompt(attached, ids, real)
        dense_s.append(_now(attached.device) - began)
        if len(dense_s) == repeats:
            return SharedPrompt(prompt, dense_s)
        del prompt  # there is memory for one


def time_run(
    attached: Attached,
    prompt: SharedPrompt | Tensor,
    run: TimedRun,
    *,
    link: Link | None = None,
) -> Timing:
    """Time a run from its prompt on, `repeats` times.

    prompt: shared, or ids [batch, prompt], which then run once more before the first repeat, as a
    warm-up. With streamed weights it must be ids, as the prefill streams them too. link: needed
    under host placement. Raises UserError where the cache does not fit into memory, ValueError for
    combinations without meaning.
    """
    shape, pinned = run.shape, run.pinned
    timeline = Timeline(attached.device)
    slabs: list[PinnedSlab] = []
    open_session = partial(
        run.setup.live,
        attached,
        shape.gen_len,
        placement=run.placement,
        link=link,
        pinned=pinned,
        slabs=slabs,
        timeline=timeline,
        bucket=shape.gen_len if run.graphs else 0,
        graphs=run.graphs,
    )
    share = run.weights_on_device
    repeats: list[_Repeat] = []
    left_s = shape.time_limit_s or math.inf
    with streamed_weights(attached, link, share, timeline=timeline, pinned=pinned) as weights:
        try:
            if isinstance(prompt, Tensor):
                with closing(open_session()) as session:
                    _begin(session, prompt)
                del session  # and its memory, before the next is opened
            while len(repeats) < shape.repeats and left_s > 0:
                repeats.append(_time_repeat(open_session, weights, prompt, run, left_s))
                left_s -= repeats[-1].decoding_s
        finally:
            with launching_on(attached.device):
                for slab in slabs:
                    slab.close()
    dense_s = [0.0] * len(repeats)
    if isinstance(prompt, SharedPrompt) and not run.setup.method.needs_inputs:  # else it runs anew
        dense_s = list(prompt.dense_s[: len(repeats)])
    return _timing(run, repeats, dense_s, weights, attached.geometry.num_layers)


def _time_repeat(
    open_session: Callable[[], LiveSession],
    weights: StreamedWeights | None,
    prompt: SharedPrompt | Tensor,
    run: TimedRun,
    limit_s: float,
) -> _Repeat:
    """Time one repeat; its session is closed and gone at the end. limit_s: seconds of decoding
    after which no further step is timed, except for the first."""
    with closing(open_session()) as session:
        # 1. The prompt.
        device, shape = session.attached.device, run.shape
        began = _now(device)
        logits = _begin(session, prompt)
        begin_s = _now(device) - began
        session.drain()  # of the prompt's rows
        if device.type == "cuda":
            # Memory that a link was still reading when it was freed counts until the next
            # allocation.
            torch.empty(1, device=device)
            torch.cuda.reset_peak_memory_stats(device)

        # 2. The steps. The link is not waited for after the warm-up: the rows of the first timed
        # step are under way already, as for every other step.
        decoding_began = _now(device)
        for _ in range(shape.warmup_steps):
            logits = session.decode_step(logits.argmax(-1))
        counts_before = _counts(session, weights, run)
        use = session.link_use
        if use is not None:
            use.begin()
        step_s: list[float] = []
        before = _now(device)
        for step in range(shape.steps_per_repeat):
            if step and before - decoding_began > limit_s:
                break
            session.timeline.begin_step()
            logits = session.decode_step(logits.argmax(-1))
            after = _now(device)
            step_s.append(after - before)
            before = after
        segments = session.timeline.take()
        timed_busy_s = 0.0 if use is None else use.busy_s
        timed_span_s = 0.0 if use is None else use.span_s

        # 3. What they took.
        counts: dict[str, int | None] = {}
        for name, count in _counts(session, weights, run).items():
            counts[name] = None if count is None else round(float(count - counts_before[name]))
        steps_by, peak_device_bytes = _steps_by(session, run), _peak_device_bytes(session, weights)
        if steps_by == REPLAYED:  # each marked step takes memory for a graph of its own
            marked = _marked_steps(session, logits)
            segments = [step.segments for step in marked]
            if marked:
                timed_busy_s = statistics.fmean(step.busy_s for step in marked) * len(step_s)
                timed_span_s = statistics.fmean(step.span_s for step in marked) * len(step_s)
        return _Repeat(
            begin_s=begin_s,
            decoding_s=before - decoding_began,
            step_s=step_s,
            segments=segments,
            counts=counts,
            timed_busy_s=timed_busy_s,
            timed_span_s=timed_span_s,
            steps_by=steps_by,
            kept={
                "host_kv_bytes": session.host_bytes,
                "disk_kv_bytes": session.disk_bytes or None,
                "device_kv_bytes": session.device_bytes,
                "tokens_evicted": session.reads.tokens_evicted,
            },
            pinned_bytes=session.pinned_bytes,
            peak_device_bytes=peak_device_bytes,
            budget=session.reads.budget,
            device_frac=session.reads.device_frac,
            num_steps=session.steps,
        )


def _timing(
    run: TimedRun,
    repeats: Sequence[_Repeat],
    dense_s: Sequence[float],
    weights: StreamedWeights | None,
    num_layers: int,
) -> Timing:
    """The columns of a run, and its raw numbers. dense_s: of each repeat."""
    shape = run.shape
    num_steps = shape.gen_len - 1
    crosses = run.placement != "managed"
    steps_by = repeats[0].steps_by
    timed = [seconds for repeat in repeats for seconds in repeat.step_s]
    segments = [step for repeat in repeats for step in repeat.segments]
    is_marked = bool(segments)  # else no event lies within a step
    ttft_s = [of_pass + repeat.begin_s for of_pass, repeat in zip(dense_s, repeats, strict=True)]
    medians = [statistics.median(repeat.step_s) for repeat in repeats]
    counts: dict[str, int | None] = {}
    for name in repeats[0].counts:
        known = [count for repeat in repeats if (count := repeat.counts[name]) is not None]
        counts[name] = sum(known) if known else None
    timed_busy_s = sum(repeat.timed_busy_s for repeat in repeats)
    timed_span_s = sum(repeat.timed_span_s for repeat in repeats)
    all_steps = sum(repeat.num_steps for repeat in repeats)
    times = times_of(
        statistics.fmean(ttft_s), timed, batch_size=shape.batch_size, num_steps=num_steps
    )
    rows_read, rows_found = counts.pop("rows_read"), counts.pop("rows_found")
    waited_s = 0.0  # in a step
    if timed_busy_s and is_marked:
        waited_s = statistics.fmean(step["transfer"] for step in segments)
    metrics: dict[str, Any] = {
        "batch_size": shape.batch_size,
        "prompt_len": shape.prompt_len,
        "gen_len": shape.gen_len,
        "num_timed_steps": len(timed),
        **times,
        "total_s": times["ttft_s"] + times["decode_s"],
        "ttft_spread_s": deviation(ttft_s),
        "tpot_spread_s": deviation(medians),
    }
    for name, moved in counts.items():
        metrics[name] = None if moved is None else round(moved / len(timed) * num_steps)
    from_disk, wanted = counts["disk_read_bytes"], counts["h2d_bytes"]
    loaded = wanted if from_disk is None else from_disk
    crossed = (loaded or 0) + (counts["d2h_bytes"] or 0) + (counts["weight_bytes"] or 0)
    metrics |= {
        "read_amplification": None if from_disk is None else ratio(from_disk, wanted or 0),
        "weights_on_device": weights.on_device if weights else None,
        "link_utilisation": ratio(timed_busy_s, timed_span_s) if is_marked else None,
        "hit_rate": None if rows_read is None else ratio(rows_found or 0, rows_read),
        **repeats[0].kept,  # all repeats keep the same bytes
        "exposed_transfer_s": waited_s * num_steps if crosses and is_marked else None,
        "link_bytes_per_s": ratio(crossed, timed_busy_s) if is_marked else None,
        "peak_device_bytes": max(repeat.peak_device_bytes for repeat in repeats),
        "budget": sum(repeat.num_steps * repeat.budget for repeat in repeats) / all_steps,
        "device_frac": sum(repeat.num_steps * repeat.device_frac for repeat in repeats) / all_steps,
    }
    for name in SEGMENTS:
        metrics[f"{name}_s"] = None
        if is_marked:
            of_step = statistics.median(step[name] for step in segments)
            metrics[f"{name}_s"] = of_step / num_layers
    if not run.setup.method.names_rows:
        metrics["prediction_s"] = None
    if not crosses:
        metrics["transfer_s"] = None
    samples = {
        "dense_s": dense_s,
        "begin_s": [repeat.begin_s for repeat in repeats],
        "step_s": [repeat.step_s for repeat in repeats],
        "segments": segments,
        "pinned_bytes": repeats[0].pinned_bytes,
        "steps_by": steps_by,
        "timed_rows_read": rows_read,
        "timed_rows_found": rows_found,
    }
    for name, moved in counts.items():
        samples[f"timed_{name}"] = moved
    return Timing(metrics, samples)


def _counts(session: LiveSession, weights: StreamedWeights | None, run: TimedRun) -> dict[str, Any]:
    """Bytes and rows up to now, which a GPU may still count; None for bytes that the driver moves,
    and for rows without a link."""
    crosses, has_link = run.placement != "managed", session.link is not None
    return {
        "h2d_bytes": session.traffic.loaded.num_bytes if crosses else None,
        "d2h_bytes": session.traffic.written.num_bytes if crosses else None,
        "late_bytes": session.traffic.late.num_bytes if crosses else None,
        "disk_read_bytes": session.traffic.block_bytes if run.placement == "disk" else None,
        "weight_bytes": weights.num_bytes if weights else None,
        "device_read_bytes": session.reads.num_bytes.clone(),  # it grows in place
        "rows_read": session.rows_read if has_link else None,
        "rows_found": session.rows_found if has_link else None,
    }


def _peak_device_bytes(session: LiveSession, weights: StreamedWeights | None) -> int:
    """The peak while decoding; on the CPU the weights that are there and `device_bytes`."""
    attached = session.attached
    if attached.device.type == "cuda":
        return torch.cuda.max_memory_allocated(attached.device)
    away = weights.host_bytes - weights.device_bytes if weights else 0
    whole = sum(weight.nbytes for weight in attached.model.parameters())
    return whole - away + session.device_bytes


def _marked_steps(session: LiveSession, logits: Tensor) -> list[Marked]:
    """Replayed steps with their parts, after those that are timed. logits: of the last of these."""
    marked: list[Marked] = []
    assert session.graphs is not None, "steps were replayed"
    while len(marked) < MARKED_STEPS and session.steps + 1 < session.max_new_tokens:
        step = session.graphs.marked_step(logits.argmax(-1))
        if step is None:
            break
        marked.append(step)
        logits = step.logits
    return marked


def _steps_by(session: LiveSession, run: TimedRun) -> str:
    """What ran the decode steps: `REPLAYED`, or Python, and why if graphs were asked for."""
    if not run.graphs:
        return "Python"
    why_not = session.why_eager() if session.graphs is None else session.graphs.failure
    return REPLAYED if why_not is None else f"Python: {why_not}"


def _begin(session: LiveSession, prompt: SharedPrompt | Tensor) -> Tensor:
    if isinstance(prompt, SharedPrompt):
        return session.start(prompt.prompt)
    return session.prefill(prompt, torch.ones_like(prompt, dtype=torch.bool))


def _now(device: torch.device) -> float:
    """perf_counter once the compute stream is idle; the link's own stream may still be busy."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()

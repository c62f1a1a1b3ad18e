"""A decode step under torch's profiler."""

from __future__ import annotations

import gzip
import json
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from harness.decode.session import LiveSession
from harness.model.attach import attach
from harness.model.resources import Resources
from harness.replay.setup import prepare
from harness.run.runner import users_faults
from harness.settings.config import BEHIND_LINK, RunConfig
from harness.speed.latency import decode_rows, prompt_ids, require_length, two_memories
from harness.speed.link_rate import idle_s

WARM_UP = 3
"""Steps before the profiled one; the last of them is timed without the profiler."""
SHOWN = 30
"""Kernels of the table."""
STEP = "decode step"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a Chrome trace that are work of the device."""
GIB = 2**30


def trace_step(config: RunConfig, path: Path) -> None:
    """Profile a decode step of the run that `config` describes. Writes a Chrome trace to `path`, compressed where it
    ends with .gz, and prints the step's time without the profiler, its kernels, and how busy each stream was.

    Raises UserError for what a run of these settings would refuse.
    """
    with users_faults(config):
        _trace_step(config, path)


def _trace_step(config: RunConfig, path: Path) -> None:
    loaded = Resources().model(config.model)
    require_length(config.latency, loaded)
    with attach(loaded.model) as attached, two_memories(config, attached) as (_, link):
        setup = prepare(config, loaded, attached, lambda: decode_rows(config.latency))
        session = LiveSession(
            attached,
            setup.method,
            max_new_tokens=config.latency.gen_len,
            codec=setup.codec,
            placement=config.placement,
            link=link if config.placement in BEHIND_LINK else None,
            calibration=setup.calibration,
            gpu_cache=config.gpu_cache,
            pinned=config.platform.pinned,
        )
        with closing(session):
            ids = prompt_ids(config, loaded).to(attached.device)
            found = _profiled(session, ids)
            pinned_gib = session.pinned_bytes / GIB
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(path))
    is_cuda = attached.device.type == "cuda"
    if is_cuda:
        peak_gib = torch.cuda.max_memory_allocated() / GIB
        print(f"peak of the device {peak_gib:.2f} GiB, page-locked {pinned_gib:.2f} GiB")
    order = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=SHOWN, max_name_column_width=90))
    print(render_streams(read_trace(path)))


def _profiled(session: LiveSession, ids: torch.Tensor) -> profile:
    """Run the prompt and some steps; returns the profile of the last one."""
    device = session.attached.device
    began = idle_s(device)
    logits = session.prefill(ids, torch.ones_like(ids, dtype=torch.bool))
    prompt_s = idle_s(device) - began
    for _ in range(WARM_UP):
        began = idle_s(device)
        logits = session.decode_step(logits.argmax(-1))
        queued_s = time.perf_counter() - began
        step_s = idle_s(device) - began
    print(
        f"prompt {prompt_s:.2f} s; a step without the profiler {1e3 * step_s:.2f} ms, "
        f"of which the host queues for {1e3 * queued_s:.2f} ms"
    )
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for _ in range(2):  # the first profile of a process is slow
        with profile(activities=activities) as found, record_function(STEP):
            logits = session.decode_step(logits.argmax(-1))
            idle_s(device)
    return found


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as stream:
        events: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return events


def render_streams(events: list[dict[str, Any]]) -> str:
    """A line for each CUDA stream of a trace: its pieces of work, and how long it was busy and idle between them."""
    streams: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") in ON_DEVICE:
            streams.setdefault(event["args"]["stream"], []).append(event)
    if not streams:
        return "no work of a GPU in the trace"
    lines = []
    for stream, work in sorted(streams.items()):
        work.sort(key=lambda event: event["ts"])
        gaps = []
        for one, following in zip(work, work[1:], strict=False):
            gaps.append(max(0.0, following["ts"] - one["ts"] - one["dur"]))
        busy_ms = sum(event["dur"] for event in work) / 1e3
        idle_ms = sum(gaps) / 1e3
        median_us = statistics.median(gaps) if gaps else 0.0
        lines.append(
            f"stream {stream}: {len(work)} kernels and copies, busy {busy_ms:.2f} ms, "
            f"idle between them {idle_ms:.2f} ms (median gap {median_us:.1f} us)"
        )
    return "\n".join(lines)

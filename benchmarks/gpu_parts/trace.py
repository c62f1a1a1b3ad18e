"""A decode step under torch's profiler."""

from __future__ import annotations

import gzip
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from harness.decode.session import LiveSession
from harness.model.resources import Resources
from harness.settings.config import RunConfig
from harness.speed.generate import live
from harness.speed.latency import decode_rows, prompt_ids
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
    """
    loaded, shape = Resources().model(config.model), config.latency
    with (
        live(config, loaded, lambda: decode_rows(shape)) as (open_session, _),
        closing(open_session(shape.gen_len)) as session,
    ):
        device = session.attached.device
        found = _profiled(session, prompt_ids(config, loaded, shape.batch_size).to(device))
        pinned_gib = session.pinned_bytes / GIB
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(path))
    order = "self_cpu_time_total"
    if device.type == "cuda":
        order = "self_device_time_total"
        peak_gib = torch.cuda.max_memory_allocated() / GIB
        print(f"peak of the device {peak_gib:.2f} GiB, page-locked {pinned_gib:.2f} GiB")
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
    work = pd.DataFrame([event | event["args"] for event in events if event.get("cat") in ON_DEVICE])
    if work.empty:
        return "no work of a GPU in the trace"
    lines = []
    for stream, pieces in work.sort_values("ts").groupby("stream"):
        ends = pieces["ts"] + pieces["dur"]
        gaps = (pieces["ts"] - ends.shift()).iloc[1:].clip(lower=0)
        median_us = gaps.median() if len(gaps) else 0.0
        lines.append(
            f"stream {stream}: {len(pieces)} kernels and copies, busy {pieces['dur'].sum() / 1e3:.2f} ms, "
            f"idle between them {gaps.sum() / 1e3:.2f} ms (median gap {median_us:.1f} us)"
        )
    return "\n".join(lines)

"""Decode steps of the systems at the shapes of a plan, in one process: a model is built once, a prompt runs once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.plan import Plan, Shape
from benchmarks.gpu.report import Report
from benchmarks.live import measure, random_model, render, rows_of
from harness.errors import UserError
from harness.model.attach import Attached, attach
from harness.model.calibration import Calibration, calibrate
from harness.offload.memory import tensor_bytes
from harness.resources import Kept
from harness.settings.speed import LatencyConfig
from harness.settings.systems import LABELS
from harness.speed.cell import SharedPrompt, run_shared_prompt
from harness.speed.link_rate import LinkRate
from harness.speed.result import LatencyResult
from harness.speed.run import require_shared_prompt
from methods.infinigen import InfiniGen

CALIBRATION_TOKENS = 128
"""As a head has elements: random weights teach no more, and the SVD of each of 1,600 heads takes milliseconds."""

Attempt = Callable[[str, float, Callable[[], None]], None]
"""Does something of that name and estimated seconds, unless the time left is less; reports what fails."""


class Steps:
    """Times the cells of shapes. rate: of the link, emulated or not, and so of the bound.

    The time that a label's cell takes grows with the bytes of the cache; at the first shape it is found out how.
    """

    def __init__(self, plan: Plan, report: Report, attempt: Attempt, rate: LinkRate) -> None:
        self.plan, self.report, self.attempt = plan, report, attempt
        self.rate = rate
        self.device = report.device
        self._models: Kept = Kept(limit=1)
        self._calibrations: Kept[Calibration] = Kept(limit=1)
        self._s_per_byte: dict[str, float] = {}

    def time_shape(self, shape: Shape) -> None:
        """Time all cells of a shape, and print them."""
        results: dict[str, LatencyResult] = {}
        with attach(self._models.get(shape.model, partial(self._build, shape.model))) as attached:
            cache_bytes = shape.batch * (shape.prompt + self.plan.gen_len) * _token_bytes(attached)
            calibration = self._calibrations.get(shape.model, partial(self._calibrate, attached))
            prompt = self._prompt(attached, shape)

            def time_label(label: str) -> None:
                began = time.perf_counter()
                results[label] = self._time(attached, prompt, shape, label, calibration)
                self._s_per_byte[label] = (time.perf_counter() - began) / cache_bytes
                self._record(shape, label, results)

            for label in shape.labels:
                self.attempt(f"{shape.title} {label}", self._estimate(label, cache_bytes), partial(time_label, label))
        if results:
            print(f"{shape.title} + {self.plan.gen_len}\n{render(rows_of(results, self.rate.bytes_per_s))}", flush=True)

    def _build(self, name: str) -> object:
        model = self.plan.models[name]
        return random_model(model.shape, self.device, dict(model.changes))

    def _calibrate(self, attached: Attached) -> Calibration:
        return calibrate(attached, InfiniGen(), self._ids(attached, 1, CALIBRATION_TOKENS)[0].tolist())

    def _ids(self, attached: Attached, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        vocabulary = attached.model.config.vocab_size
        return torch.randint(vocabulary, (batch, length), generator=generator).to(self.device)

    def _prompt(self, attached: Attached, shape: Shape) -> SharedPrompt | Tensor:
        """Run for all labels, the second time timed; its ids, which each label runs, where it cannot stay in memory."""
        ids = self._ids(attached, shape.batch, shape.prompt)
        try:
            require_shared_prompt(attached, shape.batch, shape.prompt, self.plan.gen_len)
        except UserError:
            return ids
        run_shared_prompt(attached, ids)  # kernels of this shape are chosen and loaded
        return run_shared_prompt(attached, ids)

    def _cell_shape(self, shape: Shape, label: str) -> LatencyConfig:
        plan = self.plan
        warmup, timed = (plan.warmup_steps, plan.timed_steps) if LABELS[label].pinned else (1, 1)
        return LatencyConfig(shape.batch, shape.prompt, plan.gen_len, warmup, timed, repeats=2)

    def _estimate(self, label: str, cache_bytes: int) -> float:
        """Seconds: as the label took before, else as if all that is cached were pinned and moved in every step."""
        num_steps = self.plan.warmup_steps + 2 * self.plan.timed_steps
        supposed = 1 / self.plan.pin_bytes_per_s + (1 + num_steps) / self.rate.bytes_per_s
        return cache_bytes * self._s_per_byte.get(label, supposed)

    def _time(
        self, attached: Attached, prompt: SharedPrompt | Tensor, shape: Shape, label: str, calibration: Calibration
    ) -> LatencyResult:
        cell_shape = self._cell_shape(shape, label)
        result = measure(attached, prompt, label, cell_shape, rate=self.rate, calibration=calibration)
        if self.device.type == "cuda" and isinstance(prompt, SharedPrompt):  # measured there, with the prompt
            beside = tensor_bytes(tuple(prompt.prompt.layers))
            result = replace(result, peak_device_bytes=result.peak_device_bytes - beside)
        return result

    def _record(self, shape: Shape, label: str, results: dict[str, LatencyResult]) -> None:
        result = results[label]
        cell = {"model": shape.model, "batch_size": shape.batch, "prompt_len": shape.prompt, "label": label}
        known = {name: results[name] for name in ("ideal", label) if name in results}
        row, metrics = rows_of(known, self.rate.bytes_per_s)[-1], result.metrics()
        add = partial(self.report.add, "steps", cell)
        add("step", "s", result.timed)
        add("link a step", "B", [row.h2d_bytes])
        add("best step", "s", [row.best_s])
        add("step / best step", "1", [seconds / row.best_s for seconds in result.timed])
        add("prefill", "s", [metrics["prefill_s"]])
        add("transfer that nothing hides", "s", [step["transfer"] for step in result.segments])
        add("on device beside the weights", "B", [metrics["device_kv_bytes"]])
        if row.link_bytes_per_s is not None:
            add("link while busy", "B/s", [row.link_bytes_per_s])
        self.report.add_cell(shape.model, label, metrics)


def _token_bytes(attached: Attached) -> int:
    """Of a token's K and V in all layers, in the compute dtype."""
    geometry = attached.geometry
    return 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * attached.dtype.itemsize

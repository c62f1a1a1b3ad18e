"""`batch_size=largest`: the largest batch that a device holds, and tokens/s at that batch and below
it.

`platform=cpu`: the device is emulated, and its memory (`platform.device_gib`) is limited for real:
a session that does not fit beside the weights is refused. The largest batch is found by arithmetic
(`harness.decode.capacity`). On a CPU host and device are one RAM; the limit counts what would lie
on the device. All sequences of a batch are one text, whose dense pass runs once: bytes and time
depend on lengths, not on words.

`platform=cuda`: the device is a GPU. Its prompts pass each layer together. The arithmetic gives the
batch to begin with, of the memory that is free, or of `platform.device_gib`. It does not count what
a method needs while it reads a prompt and what the allocator loses. Where memory does not suffice,
batches between are tried until the largest that runs is found.

    python run.py experiment=capacity method=h2o placement=device platform.device_gib=0.75
    python run.py experiment=capacity platform=cuda model=opt-13b model.weights=random system=ideal
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from harness.decode.capacity import Capacity, Wall, points
from harness.decode.memory import GIB, NoRoomError
from harness.decode.needs import Plan, sizes_of
from harness.errors import UserError
from harness.files import available_bytes, available_memory
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.load import LoadedModel
from harness.model.resources import Memo
from harness.replay.setup import Setup, prepare
from harness.settings.config import RunConfig
from harness.settings.kinds import Outcome
from harness.speed.latency import (
    Prompts,
    compute_threads,
    decode_rows,
    prompt_ids,
    require_length,
    require_shared_prompt,
    source_of,
    two_memories,
)
from harness.speed.timed_run import SharedPrompt, TimedRun, Timing, run_shared_prompt, time_run


def run_capacity(config: RunConfig, loaded: LoadedModel, prompts: Prompts | None = None) -> Outcome:
    """The largest batch of the run that `config` describes, and its speed. prompts: kept prompts of
    this model.

    Raises UserError for sequences longer than the model's limit, weights that the device does not
    hold, and a batch that does not fit into this machine's memory.
    """
    shape, platform = config.latency, config.platform
    require_length(shape, loaded)
    timings: dict[int, Timing] = {}
    ran_out_at: list[int] = []
    with attach(loaded.model) as attached, compute_threads(attached.device) as num_threads:
        if attached.decoder.recurrent:
            raise UserError(
                f"model={loaded.name}: it has recurrent layers, whose states batch_size=largest "
                "does not size; choose a model with attention layers alone"
            )
        setup = prepare(config, loaded, attached, lambda: decode_rows(shape))
        capacity = _by_arithmetic(config, setup, attached)
        with two_memories(config, attached) as (rate, link):
            prompt_of = _prompts(config, loaded, attached, capacity, prompts)

            def attempt(batch: int) -> Wall | None:
                """Time a batch. Returns the memory that does not suffice, if any."""
                of_batch = replace(shape, batch_size=batch)
                run = TimedRun(
                    setup.method, of_batch, config.placement, setup.codec, config.gpu_cache
                )
                wall: Wall | None = None
                known = setup.calibration
                try:
                    prompt = prompt_of(batch)
                    timings[batch] = time_run(attached, prompt, run, link=link, calibration=known)
                except torch.OutOfMemoryError:
                    wall = "device memory"
                except NoRoomError as error:
                    if platform.name != "cuda":  # where arithmetic is exact
                        raise
                    wall = "host memory" if error.is_host else "device memory"
                if wall is not None:
                    ran_out_at.append(batch)
                    gc.collect()  # after the handler: the error's frames held the batch's tensors
                torch.cuda.empty_cache()
                return wall

            capacity = largest_that_runs(capacity, config.capacity.curve, attempt)
    samples: dict[str, Any] = {"copy_bytes_per_s": rate.copy_bytes_per_s}
    if platform.name == "cuda":
        samples["ran_out_at"] = ran_out_at
    samples["num_compute_threads"] = num_threads
    speeds: dict[int, dict[str, Any]] = {}
    for batch, (metrics, raw) in sorted(timings.items()):
        speeds[batch] = {name: metrics[name] for name in TIMED}
        peak = {"peak_device_bytes": metrics["peak_device_bytes"]}
        samples[f"batch_{batch}"] = raw | peak
    marks = {"platform": platform.name, "source": source_of(config)}
    rows = points(capacity, speeds, marks)
    metrics = {"source": marks["source"], "points": rows}
    return Outcome(metrics, samples, {"capacity": asdict(setup.method)})


TIMED = ("tpot_p50_s", "sequence_tokens_per_s", "decode_tokens_per_s", "num_timed_steps", "budget")
"""Columns of a batch that are timed, as in `experiment=latency`."""


STEP_BYTES = GIB // 4
"""The memory of a GPU is counted in such steps: a few MiB more or less are free from run to run,
and runs on one card are compared."""


def _by_arithmetic(config: RunConfig, setup: Setup, attached: Attached) -> Capacity:
    """The capacity of the memory that the settings give; of a GPU without any, of what is free."""
    gib, host_gib = config.platform.device_gib, config.capacity.host_gib
    is_gpu = config.platform.name == "cuda"
    device = f"platform.device_gib={gib:g}" if gib is not None else "platform=cuda"
    if gib is not None:
        device_bytes = int(gib * GIB)
    else:
        torch.cuda.empty_cache()
        weights = sum(weight.nbytes for weight in attached.model.parameters())
        whole = weights + available_bytes(attached.device)
        device_bytes = whole // STEP_BYTES * STEP_BYTES
    host_bytes = None if host_gib is None else int(host_gib * GIB)
    if is_gpu:
        free = available_memory()
        host_bytes = free if host_bytes is None else min(free, host_bytes)
    method = setup.method
    plan = Plan(
        sizes_of(attached, method),
        method,
        setup.codec,
        config.placement,
        config.gpu_cache,
        setup.calibration,
    )
    shape = config.latency
    return Capacity(
        device,
        plan,
        shape.prompt_len,
        shape.gen_len,
        device_bytes,
        host_bytes,
        config.capacity.max_batch,
        in_one_pass=is_gpu,
    )


def _prompts(
    config: RunConfig,
    loaded: LoadedModel,
    attached: Attached,
    capacity: Capacity,
    prompts: Prompts | None,
) -> Callable[[int], SharedPrompt | Tensor]:
    """The prompts of a batch: on a GPU the first of the largest batch's, else one that ran densely
    before, so many times. prompts: kept prompts of this model."""
    shape = config.latency
    if config.platform.name == "cuda":
        largest = replace(shape, batch_size=max(1, capacity.largest))
        ids = prompt_ids(replace(config, latency=largest), loaded)
        return lambda batch: ids[:batch].to(attached.device)

    def run_densely() -> SharedPrompt:
        require_shared_prompt(attached, 1, shape.prompt_len, shape.gen_len)
        one = replace(config, latency=replace(shape, batch_size=1))
        return run_shared_prompt(attached, prompt_ids(one, loaded))

    key = attached.decoder.digest, 1, shape.prompt_len, config.seed, config.calibration
    kept = Memo() if prompts is None else prompts
    return lambda batch: _repeated(kept.get(key, run_densely), batch, shape.repeats)


def largest_that_runs(
    capacity: Capacity, curve: bool, attempt: Callable[[int], Wall | None]
) -> Capacity:
    """Run the batches of a capacity from the smallest on. Where memory does not suffice for one
    that should fit, run batches between it and the largest that ran, until they are neighbours.

    attempt: runs a batch, and returns the memory that does not suffice, if any. Returns the
    capacity with what it has found.
    """
    ran, failed = 0, None
    for batch in capacity.batches(curve):
        wall = attempt(batch)
        if wall is not None:
            failed, of_failed = batch, wall
            break
        ran = batch
    if failed is None:
        return capacity
    while failed - ran > 1:
        middle = (ran + failed) // 2
        wall = attempt(middle)
        if wall is None:
            ran = middle
        else:
            failed, of_failed = middle, wall
    return replace(capacity, ran_out_at=failed, ran_out_of=of_failed)


def _repeated(shared: SharedPrompt, batch: int, repeats: int) -> SharedPrompt:
    """The prompt of one sequence as that of `batch` equal ones, without copies of its states. Its
    own time, which is that of one sequence, stands for each of the repeats and is not reported."""
    prompt = shared.prompt
    layers = []
    for layer in prompt.layers:
        of_batch = [tensor.expand(batch, *tensor.shape[1:]) for tensor in layer.tensors()]
        layers.append(layer.with_tensors(of_batch))
    repeated = replace(
        prompt,
        ids=prompt.ids.expand(batch, -1),
        real=prompt.real.expand(batch, -1),
        layers=layers,
        hidden=prompt.hidden.expand(batch, -1),
    )
    return SharedPrompt(repeated, [shared.dense_s[0]] * repeats)

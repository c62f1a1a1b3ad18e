"""`batch_size=largest`: the largest batch that a device holds, and tokens/s at that batch and below
it.

`platform=cpu`: the device is emulated, and its memory (`platform.device_gib`) is limited for real:
a session that does not fit beside the weights is refused. The largest batch is found by arithmetic
(`harness.decode.capacity`), opened, and timed as in `experiment=latency`. On a CPU host and device
are one RAM; the limit counts what would lie on the device. All sequences of a batch are one text,
whose dense pass runs once: bytes and time depend on lengths, not on words.

`platform=cuda`: the device is a GPU. Each batch is timed as in `experiment=latency`, its prompts
included, which pass each layer together. The arithmetic gives the batch to begin with, of the
memory that is free, or of `platform.device_gib`. It does not count what a method needs while it
reads a prompt and what the allocator loses. Where memory does not suffice, batches between are
tried until the largest that runs is found.

    python run.py experiment=capacity method=h2o placement=device platform.device_gib=0.75
    python run.py experiment=capacity platform=cuda model=opt-13b model.weights=random system=ideal
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

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
    require_length(config.latency, loaded)
    with attach(loaded.model) as attached, compute_threads(attached.device) as num_threads:
        setup = _setup(config, loaded, attached)
        if config.platform.name == "cuda":
            capacity, timings, samples = _on_a_gpu(config, loaded, setup, attached)
        else:
            shared = Memo() if prompts is None else prompts
            capacity, timings, samples = _emulated(config, loaded, setup, attached, shared)
    samples["num_compute_threads"] = num_threads
    speeds: dict[int, dict[str, Any]] = {}
    for batch, (metrics, raw) in sorted(timings.items()):
        speeds[batch] = {name: metrics[name] for name in TIMED}
        peak = {"peak_device_bytes": metrics["peak_device_bytes"]}
        samples[f"batch_{batch}"] = raw | peak
    marks = {"platform": config.platform.name, "source": source_of(config)}
    rows = points(capacity, speeds, marks)
    metrics = {"source": marks["source"], "points": rows}
    return Outcome(metrics, samples, {"capacity": asdict(setup.method)})


Timings = dict[int, Timing]
"""By batch."""
TIMED = ("tpot_p50_s", "sequence_tokens_per_s", "decode_tokens_per_s", "num_timed_steps", "budget")
"""Columns of a batch that are timed, as in `experiment=latency`."""


# On an emulated device


def _emulated(
    config: RunConfig, loaded: LoadedModel, setup: Setup, attached: Attached, prompts: Prompts
) -> tuple[Capacity, Timings, dict[str, Any]]:
    """The capacity, what was timed, and samples. prompts: kept prompts of this model."""
    shape, gib = config.latency, config.platform.device_gib
    assert gib is not None, "asked for when the settings were checked"
    capacity = _capacity(config, setup, attached, f"platform.device_gib={gib:g}", int(gib * GIB))
    batches = capacity.batches(config.capacity.curve)
    key = attached.decoder.digest, 1, shape.prompt_len, config.seed, config.calibration
    one = replace(config, latency=replace(shape, batch_size=1))

    def run_densely() -> SharedPrompt:
        require_shared_prompt(attached, 1, shape.prompt_len, shape.gen_len)
        return run_shared_prompt(attached, prompt_ids(one, loaded))

    shared = prompts.get(key, run_densely) if batches else None
    timings: Timings = {}
    with two_memories(config, attached) as (rate, link):
        for batch in batches:
            assert shared is not None, "there is a batch"
            timings[batch] = time_run(
                attached,
                _repeated(shared, batch, shape.repeats),
                _timed_run(config, setup, batch),
                link=link,
                calibration=setup.calibration,
            )
    return capacity, timings, {"copy_bytes_per_s": rate.copy_bytes_per_s}


# On a GPU

STEP_BYTES = GIB // 4
"""The memory of a GPU is counted in such steps: a few MiB more or less are free from run to run,
and runs on one card are compared."""


def _on_a_gpu(
    config: RunConfig, loaded: LoadedModel, setup: Setup, attached: Attached
) -> tuple[Capacity, Timings, dict[str, Any]]:
    """The capacity, what was timed, and samples: `ran_out_at`, batches for which memory did not
    suffice."""
    timings: Timings = {}
    ran_out_at: list[int] = []
    with two_memories(config, attached) as (rate, link):
        capacity = _capacity_of_gpu(config, setup, attached)
        largest = replace(config.latency, batch_size=max(1, capacity.largest))
        ids = prompt_ids(replace(config, latency=largest), loaded)

        def attempt(batch: int) -> Wall | None:
            """Time a batch. Returns the memory that does not suffice, if any."""
            wall: Wall | None = None
            run = _timed_run(config, setup, batch)
            prompts = ids[:batch].to(attached.device)
            known = setup.calibration
            try:
                timings[batch] = time_run(attached, prompts, run, link=link, calibration=known)
            except torch.OutOfMemoryError:
                wall = "device memory"
            except NoRoomError as error:
                wall = "host memory" if error.is_host else "device memory"
            if wall is not None:
                ran_out_at.append(batch)
                gc.collect()  # after the handler: the error's frames held the batch's tensors
            torch.cuda.empty_cache()
            return wall

        capacity = largest_that_runs(capacity, config.capacity.curve, attempt)
    samples = {"copy_bytes_per_s": rate.copy_bytes_per_s, "ran_out_at": ran_out_at}
    return capacity, timings, samples


def _capacity_of_gpu(config: RunConfig, setup: Setup, attached: Attached) -> Capacity:
    """Of the memory that is free beside the weights, on the device and the host."""
    gib = config.platform.device_gib
    torch.cuda.empty_cache()
    if gib is None:
        weights = sum(weight.nbytes for weight in attached.model.parameters())
        whole = weights + available_bytes(attached.device)
        device, num_bytes = "platform=cuda", whole // STEP_BYTES * STEP_BYTES
    else:
        device, num_bytes = f"platform.device_gib={gib:g}", int(gib * GIB)
    capacity = _capacity(config, setup, attached, device, num_bytes)
    host_bytes = available_memory()
    if capacity.host_bytes is not None:
        host_bytes = min(host_bytes, capacity.host_bytes)
    return replace(capacity, host_bytes=host_bytes, in_one_pass=True)


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


# Both


def _setup(config: RunConfig, loaded: LoadedModel, attached: Attached) -> Setup:
    if attached.decoder.recurrent:
        raise UserError(
            f"model={loaded.name}: it has recurrent layers, whose states batch_size=largest does "
            "not size; choose a model with attention layers alone"
        )
    return prepare(config, loaded, attached, lambda: decode_rows(config.latency))


def _capacity(
    config: RunConfig, setup: Setup, attached: Attached, device: str, device_bytes: int
) -> Capacity:
    """device: the setting that gives the device."""
    host_gib = config.capacity.host_gib
    plan = Plan(
        sizes_of(attached, setup.method),
        setup.method,
        setup.codec,
        config.placement,
        config.gpu_cache,
        setup.calibration,
    )
    return Capacity(
        device,
        plan,
        config.latency.prompt_len,
        config.latency.gen_len,
        device_bytes,
        None if host_gib is None else int(host_gib * GIB),
        config.capacity.max_batch,
    )


def _timed_run(config: RunConfig, setup: Setup, batch: int) -> TimedRun:
    shape = replace(config.latency, batch_size=batch)
    return TimedRun(setup.method, shape, config.placement, setup.codec, config.gpu_cache)


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

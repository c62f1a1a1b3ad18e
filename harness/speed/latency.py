"""`experiment=latency`: a timed run. `harness.speed.timed_run` says what the numbers contain.

On the CPU, where a prefill takes up to a minute, the dense passes of a shape, one for each repeat,
run once in a process for all its runs, and one core is left to the link. Under CUDA every run
prefills for itself, as does a run that streams weights.

    python run.py experiment=latency system=infinigen batch_size=8

`batch_size=largest`: the largest batch that a device holds, and tokens/s at that batch and below
it. All sequences of a batch are one text, whose dense pass runs once: bytes and time depend on
lengths, not on words.

`platform=cpu`: the device is emulated, and its memory (`platform.device_gib`) is limited for real:
a session that does not fit beside the weights is refused. The largest batch is found by arithmetic
(`harness.decode.needs`). On a CPU host and device are one RAM; the limit counts what would lie
on the device.

`platform=cuda`: the device is a GPU. Its prompts pass each layer together. The arithmetic gives the
batch to begin with, of the memory that is free, or of `platform.device_gib`. It does not count what
a method needs while it reads a prompt and what the allocator loses. Where memory does not suffice,
batches between are tried until the largest that runs is found.

    python run.py experiment=capacity sweep=null system=offload platform.device_gib=0.75
    python run.py experiment=capacity sweep=null system=ideal platform=cuda model=llama3.1-8b
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.data.text import named_text, start_ids, token_ids
from harness.decode.memory import GIB, NoRoomError, require_memory
from harness.decode.needs import Capacity, Plan, Wall, sizes_of
from harness.errors import UserError
from harness.files import available_bytes, available_memory
from harness.model.attached import Attached
from harness.model.load import LoadedModel, Memo
from harness.model.passes import LayerPrompt
from harness.model.prompts import kept_bytes, prompt_bytes
from harness.replay.setup import Setup
from harness.settings.config import LatencyConfig, RunConfig
from harness.settings.kinds import Outcome
from harness.speed.memories import opened, source_of
from harness.speed.timed_run import (
    SharedPrompt,
    TimedRun,
    Timing,
    run_shared_prompt,
    time_run,
)
from methods.base import TokenCounts

Prompts = Memo[SharedPrompt]
"""The dense pass of a shape's prompt, for the runs that follow."""
TIMED = ("tpot_p50_s", "sequence_tokens_per_s", "decode_tokens_per_s", "budget")
"""Columns of a batch that are timed, as in `experiment=latency`."""
STEP_BYTES = GIB // 4
"""The memory of a GPU is counted in such steps: a few MiB more or less are free from run to run,
and runs on one card are compared."""


def run_latency(config: RunConfig, loaded: LoadedModel, prompts: Prompts | None = None) -> Outcome:
    """Time the run that `config` describes, with `batch_size=largest` for each batch of
    `time_largest`. prompts: kept prompts of this model; the run's own is added.

    Raises UserError for a sequence longer than the model's limit, or a batch that does not fit into
    memory.
    """
    shape, platform = config.latency, config.platform
    if shape.prompt_len + shape.gen_len > loaded.max_length:
        raise UserError(
            f"prompt_len={shape.prompt_len} and gen_len={shape.gen_len}: {loaded.name} takes "
            f"at most {loaded.max_length} tokens"
        )
    with opened(config, loaded, lambda: decode_rows(shape)) as (attached, setup, rate, link):

        def timed(batch_size: int, prompt: SharedPrompt | Tensor) -> Timing:
            run = TimedRun(
                setup,
                replace(shape, batch_size=batch_size),
                config.placement,
                platform.pinned,
                platform.weights_on_device,
                graphs=platform.replays_steps,
            )
            return time_run(attached, prompt, run, link=link)

        prompt_of = partial(_prompt, config, loaded, attached, prompts or Memo())
        marks = {"platform": platform.name, "source": source_of(config)}
        if shape.largest:
            metrics, raw = time_largest(config, attached, setup, marks, prompt_of, timed)
        else:
            metrics, raw = timed(shape.batch_size, prompt_of(shape.batch_size, shape.repeats))
            metrics = marks | metrics | {"link_ceiling_bytes_per_s": rate.bytes_per_s}
        num_threads = torch.get_num_threads()
    samples = {"num_compute_threads": num_threads, "copy_bytes_per_s": rate.copy_bytes_per_s}
    return Outcome(metrics, samples | raw, {"latency": asdict(setup.method)})


def decode_rows(shape: LatencyConfig) -> list[TokenCounts]:
    """The decode rows of a timed run, on which a budget is met."""
    total = shape.prompt_len + shape.gen_len
    rows = range(shape.prompt_len, total - 1)
    return [TokenCounts(cached, shape.prompt_len, total) for cached in rows]


def prompt_ids(config: RunConfig, loaded: LoadedModel, batch_size: int) -> Tensor:
    """Prompts int64 [batch, prompt]: each the tokenizer's start, then offline text after the tokens
    that calibrate, repeated where it ends."""
    length = config.latency.prompt_len
    start = torch.tensor(start_ids(loaded.reader), dtype=torch.long)[:length]
    text = token_ids(named_text(config.calibration.name), loaded.reader)
    of_text, first = length - len(start), config.calibration.num_tokens
    ids = [text[place % len(text)] for place in range(first, first + batch_size * of_text)]
    of_prompts = torch.tensor(ids, dtype=torch.long).view(batch_size, of_text)
    return torch.cat([start.expand(batch_size, -1), of_prompts], 1)


def _prompt(
    config: RunConfig,
    loaded: LoadedModel,
    attached: Attached,
    kept: Prompts,
    batch_size: int,
    repeats: int,
) -> SharedPrompt | Tensor:
    """The prompts of a batch: ids where each session runs them itself, else after their dense
    pass."""
    shape = config.latency
    if config.platform.name == "cuda" or config.platform.weights_on_device < 1:
        return prompt_ids(config, loaded, batch_size).to(attached.device)

    def run_densely() -> SharedPrompt:
        require_shared_prompt(attached, batch_size, shape.prompt_len, shape.gen_len)
        return run_shared_prompt(attached, prompt_ids(config, loaded, batch_size), repeats)

    lengths = batch_size, shape.prompt_len, repeats
    return kept.get(
        (attached.decoder.digest, lengths, config.seed, config.calibration), run_densely
    )


def require_shared_prompt(attached: Attached, batch: int, prompt: int, gen: int) -> None:
    """UserError where the states of the shared prompt, its pass and the uncompressed cache do not
    fit into memory. A session that runs its prompt itself checks its own memory
    (`harness.decode.memory`)."""
    geometry = attached.geometry
    shared = kept_bytes(attached, batch * prompt) + prompt_bytes(attached, batch * prompt)
    elements = geometry.num_layers * 2 * geometry.num_kv_heads * geometry.head_dim
    cache = batch * (prompt + gen) * elements * attached.dtype.itemsize
    require_memory(shared + cache, attached.device, "the shared prompt with a cache")


# The largest batch


def time_largest(
    config: RunConfig,
    attached: Attached,
    setup: Setup,
    marks: dict[str, Any],
    prompt_of: Callable[[int, int], SharedPrompt | Tensor],
    timed: Callable[[int, SharedPrompt | Tensor], Timing],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics and samples of the largest batch of the run that `config` describes.

    marks: columns of every row. prompt_of: takes a batch's size and the number of its dense passes;
    timed: times a batch. Raises UserError for weights that the device does not hold, and a batch
    that does not fit into this machine's memory.
    """
    is_gpu, repeats = config.platform.name == "cuda", config.latency.repeats
    if attached.decoder.recurrent:
        raise UserError(
            f"model={config.model.name}: it has recurrent layers, whose states batch_size=largest "
            "does not size; choose a model with attention layers alone"
        )
    capacity = _by_arithmetic(config, setup, attached)
    prompt = prompt_of(max(1, capacity.largest) if is_gpu else 1, 1)
    timings: dict[int, Timing] = {}
    ran_out_at: list[int] = []

    def attempt(batch: int) -> Wall | None:
        """Time a batch. Returns the memory that does not suffice, if any."""
        wall: Wall | None = None
        try:
            if isinstance(prompt, Tensor):
                timings[batch] = timed(batch, prompt[:batch])
            else:
                timings[batch] = timed(batch, _repeated(prompt, batch, repeats))
        except torch.OutOfMemoryError:
            wall = "device memory"
        except NoRoomError as error:
            if not is_gpu:  # where arithmetic is exact
                raise
            wall = "host memory" if error.is_host else "device memory"
        if wall is not None:
            ran_out_at.append(batch)
            gc.collect()  # after the handler: the error's frames held the batch's tensors
        torch.cuda.empty_cache()
        return wall

    capacity = largest_that_runs(capacity, config.capacity.curve, attempt)
    samples: dict[str, Any] = {"ran_out_at": ran_out_at} if is_gpu else {}
    speeds: dict[int, dict[str, Any]] = {}
    for batch, (metrics, raw) in sorted(timings.items()):
        speeds[batch] = {name: metrics[name] for name in TIMED}
        samples[f"batch_{batch}"] = raw | {"peak_device_bytes": metrics["peak_device_bytes"]}
    return {"source": marks["source"], "points": capacity.rows(speeds, marks)}, samples


def _by_arithmetic(config: RunConfig, setup: Setup, attached: Attached) -> Capacity:
    """The capacity of the memory that the settings give; of a GPU without any, of what is free."""
    gib = config.platform.device_gib
    device = f"platform.device_gib={gib:g}" if gib is not None else "platform=cuda"
    if gib is not None:
        device_bytes = int(gib * GIB)
    else:
        torch.cuda.empty_cache()
        weights = sum(weight.nbytes for weight in attached.model.parameters())
        whole = weights + available_bytes(attached.device)
        device_bytes = whole // STEP_BYTES * STEP_BYTES
    is_gpu = config.platform.name == "cuda"
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
        available_memory() if is_gpu else None,
        config.capacity.max_batch,
        in_one_pass=is_gpu,
    )


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
        query = layer.query.expand(batch, -1, -1, -1)
        key = layer.key.expand(batch, -1, -1, -1)
        value = layer.value.expand(batch, -1, -1, -1)
        layers.append(LayerPrompt(query, key, value))
    repeated = replace(
        prompt,
        ids=prompt.ids.expand(batch, -1),
        real=prompt.real.expand(batch, -1),
        layers=layers,
        hidden=prompt.hidden.expand(batch, -1),
    )
    return SharedPrompt(repeated, [shared.dense_s[0]] * repeats)

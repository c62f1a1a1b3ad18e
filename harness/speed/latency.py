"""`experiment=latency`: a timed run. `harness.speed.timed_run` says what the numbers contain.

On the CPU, where a prefill takes up to a minute, the dense passes of a shape, one for each repeat,
run once in a process for all its runs, and one core is left to the link. Under CUDA every run
prefills for itself, as does a run that streams weights.

    python run.py experiment=latency system=infinigen batch_size=8
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from harness.data.text import named_text, start_ids, token_ids
from harness.decode.memory import require_memory
from harness.errors import UserError
from harness.model.attached import Attached
from harness.model.load import LoadedModel, Memo
from harness.model.prompts import kept_bytes, prompt_bytes
from harness.settings.config import LatencyConfig, RunConfig
from harness.settings.kinds import Outcome
from harness.speed.capacity import time_largest
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


def run_latency(config: RunConfig, loaded: LoadedModel, prompts: Prompts | None = None) -> Outcome:
    """Time the run that `config` describes, with `batch_size=largest` for each batch of
    `harness.speed.capacity`. prompts: kept prompts of this model; the run's own is added.

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
                graphs=platform.graphs == "auto" and platform.weights_on_device == 1,
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

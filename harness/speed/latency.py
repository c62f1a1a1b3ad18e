"""`experiment=latency`: a timed run. `harness.speed.timed_run` says what the numbers contain.

On the CPU, where a prefill takes up to a minute, the dense passes of a shape, one for each repeat,
run once in a process for all its runs, and one core is left to the link. Under CUDA every run
prefills for itself, as does a run that streams weights.

    python run.py experiment=latency system=infinigen batch_size=8
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from harness.data.text import named_text, start_ids, token_ids
from harness.decode.disk import Disk
from harness.decode.links import DiskLink, Link, open_link
from harness.decode.memory import emulated_device, require_memory, smaller_card
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.load import LoadedModel
from harness.model.prompts import kept_bytes, prompt_bytes
from harness.model.resources import Memo
from harness.replay.setup import prepare
from harness.results.environment import num_cores
from harness.settings.config import LatencyConfig, RunConfig
from harness.settings.kinds import Outcome
from harness.speed.link_rate import LinkRate, disk_rate, link_rate
from harness.speed.timed_run import SharedPrompt, TimedRun, run_shared_prompt, time_run
from methods.base import TokenCounts


def source_of(config: RunConfig) -> str:
    """What the times of a run are. On a CPU the link is emulated, unless it leads to a disk, or
    nothing waits for it."""
    is_real = config.platform.name == "cuda" or config.placement == "disk"
    return "measured" if is_real or not waits_for_link(config) else "emulated"


def waits_for_link(config: RunConfig) -> bool:
    """Whether the rows of a run on a CPU take as long as over the emulated link: where the run is
    there for its times, or its user sets the link's rate. Elsewhere they move at memory's speed."""
    return config.kind == "latency" or config.platform.link_gbps is not None


Prompts = Memo[SharedPrompt]
"""The dense pass of a shape's prompt, for the runs that follow."""


def run_latency(config: RunConfig, loaded: LoadedModel, prompts: Prompts | None = None) -> Outcome:
    """Time the run that `config` describes. prompts: kept prompts of this model; the run's own is
    added.

    Raises UserError for a sequence longer than the model's limit, or a batch that does not fit into
    memory.
    """
    shape, platform = config.latency, config.platform
    require_length(shape, loaded)
    with attach(loaded.model) as attached, compute_threads(attached.device) as num_threads:
        setup = prepare(config, loaded, attached, lambda: decode_rows(shape))
        run = TimedRun(
            setup.method,
            shape,
            config.placement,
            setup.codec,
            config.gpu_cache,
            platform.pinned,
            platform.weights_on_device,
        )

        def run_densely() -> SharedPrompt:
            require_shared_prompt(attached, shape.batch_size, shape.prompt_len, shape.gen_len)
            return run_shared_prompt(attached, prompt_ids(config, loaded), shape.repeats)

        with two_memories(config, attached) as (rate, link):
            prompt: SharedPrompt | Tensor
            if attached.device.type == "cuda" or run.weights_on_device < 1:
                prompt = prompt_ids(config, loaded).to(attached.device)
            else:
                key = (
                    attached.decoder.digest,
                    shape.batch_size,
                    shape.prompt_len,
                    shape.repeats,
                    config.seed,
                    config.calibration,
                )
                prompt = (Memo() if prompts is None else prompts).get(key, run_densely)
            metrics, raw = time_run(attached, prompt, run, link=link, calibration=setup.calibration)
    marks = {"platform": platform.name, "source": source_of(config)}
    samples = {"num_compute_threads": num_threads, "copy_bytes_per_s": rate.copy_bytes_per_s}
    link_facts = {"link_ceiling_bytes_per_s": rate.bytes_per_s}
    return Outcome(marks | metrics | link_facts, samples | raw, {"latency": asdict(setup.method)})


@contextmanager
def two_memories(
    config: RunConfig, attached: Attached
) -> Iterator[tuple[LinkRate, dict[torch.device, Link] | None]]:
    """Device memory of the size that `platform.device_gib` gives, and a link from each device to
    host memory or the disk.

    Yields the rate of the links, and the link of each device; None where the cache lies on the
    device. They close at the end.
    """
    platform = config.platform
    if config.placement == "disk":
        folder = Path(platform.disk_dir or config.results_dir)
        folder.mkdir(parents=True, exist_ok=True)
        disk = Disk(folder)
        disk_link = DiskLink(disk, overlap=platform.overlap)
        with disk_link, _device_memory(config, attached):
            yield disk_rate(disk), {attached.device: disk_link}
        return
    if attached.device.type == "cpu" and not waits_for_link(config):
        rate = LinkRate(math.inf, None)
    else:
        rate = link_rate(config.results_dir, attached.device, platform.link_gbps)
    bytes_per_s = rate.bytes_per_s if attached.device.type == "cpu" else None
    devices = attached.devices if config.placement == "host" else []
    links = {}
    with _device_memory(config, attached), ExitStack() as stack:
        for device in devices:
            link = open_link(
                device, bytes_per_s=bytes_per_s, overlap=platform.overlap, tuning=rate.tuning
            )
            links[device] = stack.enter_context(link)
        yield rate, links or None


def _device_memory(config: RunConfig, attached: Attached) -> AbstractContextManager[None]:
    """A device of `platform.device_gib`: a smaller card, or, on a CPU, an emulated device."""
    gib = config.platform.device_gib
    if gib is None or config.platform.name == "cuda":
        return smaller_card(attached.device, gib)
    return emulated_device(gib, sum(weight.nbytes for weight in attached.model.parameters()))


@contextmanager
def compute_threads(device: torch.device) -> Iterator[int]:
    """On the CPU, compute on all cores but one, which the link has; yields the number of threads.

    Every label has the same number, ideal included.
    """
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(max(1, num_cores() - 1))
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def require_length(shape: LatencyConfig, loaded: LoadedModel) -> None:
    """Raise UserError for sequences longer than the model's limit."""
    if shape.prompt_len + shape.gen_len > loaded.max_length:
        raise UserError(
            f"prompt_len={shape.prompt_len} and gen_len={shape.gen_len}: {loaded.name} takes "
            f"at most {loaded.max_length} tokens"
        )


def decode_rows(shape: LatencyConfig) -> list[TokenCounts]:
    """The decode rows of a timed run, on which a budget is met."""
    total = shape.prompt_len + shape.gen_len
    rows = range(shape.prompt_len, total - 1)
    return [TokenCounts(cached, shape.prompt_len, total) for cached in rows]


def prompt_ids(config: RunConfig, loaded: LoadedModel) -> Tensor:
    """Prompts int64 [batch, prompt]: each the tokenizer's start, then offline text after the tokens
    that calibrate, repeated where it ends."""
    batch, length = config.latency.batch_size, config.latency.prompt_len
    start = torch.tensor(start_ids(loaded.reader), dtype=torch.long)[:length]
    text = token_ids(named_text(config.calibration.name), loaded.reader)
    of_text, first = length - len(start), config.calibration.num_tokens
    ids = [text[place % len(text)] for place in range(first, first + batch * of_text)]
    of_prompts = torch.tensor(ids, dtype=torch.long).view(batch, of_text)
    return torch.cat([start.expand(batch, -1), of_prompts], 1)


def require_shared_prompt(attached: Attached, batch: int, prompt: int, gen: int) -> None:
    """UserError where the states of the shared prompt, its pass and the uncompressed cache do not
    fit into memory. A session that runs its prompt itself checks its own memory
    (`harness.decode.memory`)."""
    geometry = attached.geometry
    shared = kept_bytes(attached, batch * prompt) + prompt_bytes(attached, batch * prompt)
    elements = geometry.num_layers * 2 * geometry.num_kv_heads * geometry.head_dim
    cache = batch * (prompt + gen) * elements * attached.dtype.itemsize
    require_memory(shared + cache, attached.device, "the shared prompt with a cache")

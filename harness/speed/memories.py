"""The two memories of a live run, and what joins them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from harness.decode.disk import Disk
from harness.decode.links import DiskLink, Link, open_link
from harness.decode.memory import emulated_device, smaller_card
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.load import LoadedModel
from harness.replay.setup import Setup, prepare
from harness.results.environment import num_cores
from harness.settings.config import RunConfig
from harness.speed.link_rate import LinkRate, disk_rate, link_rate
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


@contextmanager
def opened(
    config: RunConfig, loaded: LoadedModel, decode_rows: Callable[[], Sequence[TokenCounts]]
) -> Iterator[tuple[Attached, Setup, LinkRate, Link | None]]:
    """A run's method on its model and in its memories; the last two as of `two_memories`.
    decode_rows: those on which a budget is met."""
    with attach(loaded.model) as attached, compute_threads(attached.device):
        setup = prepare(config, loaded, attached, decode_rows)
        with two_memories(config, attached) as (rate, link):
            yield attached, setup, rate, link


@contextmanager
def two_memories(config: RunConfig, attached: Attached) -> Iterator[tuple[LinkRate, Link | None]]:
    """Device memory of the size that `platform.device_gib` gives, and a link from each device to
    host memory or the disk.

    Yields the rate of the link, and the link; None where the cache lies on the device. It closes at
    the end.
    """
    platform = config.platform
    if config.placement == "disk":
        folder = Path(platform.disk_dir or config.results_dir)
        folder.mkdir(parents=True, exist_ok=True)
        disk = Disk(folder)
        disk_link = DiskLink(disk, overlap=platform.overlap)
        with disk_link, _device_memory(config, attached):
            yield disk_rate(disk), disk_link
        return
    if attached.device.type == "cpu" and not waits_for_link(config):
        rate = LinkRate(math.inf, None)
    else:
        rate = link_rate(config.results_dir, attached.device, platform.link_gbps)
    bytes_per_s = rate.bytes_per_s if attached.device.type == "cpu" else None
    with _device_memory(config, attached):
        if config.placement != "host":
            yield rate, None
            return
        overlap = platform.overlap
        with open_link(attached.device, bytes_per_s=bytes_per_s, overlap=overlap) as link:
            yield rate, link


def _device_memory(config: RunConfig, attached: Attached) -> AbstractContextManager[None]:
    """A device of `platform.device_gib`: a smaller card, or, on a CPU, an emulated device."""
    gib = config.platform.device_gib
    if gib is None or config.platform.name == "cuda":
        return smaller_card(attached.device, gib)
    return emulated_device(gib, sum(weight.nbytes for weight in attached.model.parameters()))


@contextmanager
def compute_threads(device: torch.device) -> Iterator[None]:
    """On the CPU, compute on all cores but one, which the link has; every label alike, ideal
    included."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(max(1, num_cores() - 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""The settings of live decoding: the platform, the shape of a timed cell, and what makes no sense together.

Imports neither Hydra nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from harness.errors import UserError
from harness.settings.schema import check_range

if TYPE_CHECKING:
    from methods.base import Method

Device = Literal["cpu", "cuda"]
Placement = Literal["device", "host", "managed"]
"""Where the cache lies: in the device's memory, in the host's, or in managed memory, which CUDA's driver pages."""
SLOWEST_GBPS = 1e-3
"""Of an emulated link: at a megabyte a second a step of the smallest model takes a minute."""


@dataclass(frozen=True)
class PlatformConfig:
    """The machine, on which all of a run computes. Only `cpu` and `cuda` run; any other is the cost model's.

    link_gbps: rate of the emulated link in 10^9 bytes/s; None: from this machine's copy rate. overlap: transfers run
    beside the computation. pinned: the host memory is page-locked (CUDA). weights_on_device: the share of the decoder
    layers' weights that stays on the device; the rest lies in host memory and crosses the link in each pass.
    device_gib: under CUDA, what a smaller card would have for weights and all else, in GiB; None: all that there is.
    """

    name: Device
    link_gbps: float | None = None
    overlap: bool = True
    pinned: bool = True
    weights_on_device: float = 1.0
    device_gib: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weights_on_device <= 1:
            raise UserError(f"platform.weights_on_device={self.weights_on_device}: must be above 0 and at most 1")
        self._check("link_gbps", "cpu", "sets the emulated link", SLOWEST_GBPS)
        self._check("device_gib", "cuda", "makes a smaller card", 0)

    def _check(self, setting: str, platform: Device, does: str, low: float) -> None:
        value = getattr(self, setting)
        if value is None:
            return
        if self.name != platform:
            raise UserError(f"platform.{setting}={value}: {does} of platform={platform}; leave it null")
        check_range(f"platform.{setting}", value, low, above=True)


@dataclass(frozen=True)
class LatencyConfig:
    """The shape of a timed cell, and how often it is timed.

    A prompt of `prompt_len` tokens and `gen_len` new ones for each of `batch_size` sequences. Of the gen_len - 1
    decode steps, the first `warmup_steps` are not timed and then `repeats` blocks of `timed_steps` are; None times
    as many as there are. Once decoding has taken `time_limit_s` seconds, no further step is timed, but one at least is.
    """

    batch_size: int = 4
    prompt_len: int = 1024
    gen_len: int = 32
    warmup_steps: int = 2
    timed_steps: int | None = 8
    repeats: int = 2
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        low = {"warmup_steps": 0, "gen_len": 2}
        for field in fields(self):
            check_range(field.name, getattr(self, field.name), low.get(field.name, 1))
        needed = self.warmup_steps + self.repeats * (self.timed_steps or 1)
        if needed > self.gen_len - 1:
            raise UserError(
                f"gen_len={self.gen_len}: has {self.gen_len - 1} decode steps; warmup_steps + repeats * timed_steps "
                f"are {needed}"
            )

    @property
    def block_steps(self) -> int:
        """Timed steps in a repeat."""
        return self.timed_steps or (self.gen_len - 1 - self.warmup_steps) // self.repeats


def check_combination(method: Method, placement: str, reuse: bool) -> None:
    """Raise UserError for settings that make no sense together in live decoding."""
    if placement not in get_args(Placement):
        raise UserError(f"placement={placement}: must be one of {', '.join(get_args(Placement))}")
    if method.replay_only:
        raise UserError(method.replay_only)
    if placement == "host" and method.when == "true_scores":
        raise UserError(f"placement=host: {method.title} selects by the true scores of all keys; use placement=device")
    if reuse and not (placement == "host" and method.names_rows):
        raise UserError("reuse=true: only fetched selections can be reused; use method=infinigen and placement=host")


def check_live(method: Method, placement: str, reuse: bool, platform: PlatformConfig) -> None:
    """Raise UserError for a combination of settings that cannot be decoded live."""
    check_combination(method, placement, reuse)
    if placement == "managed" and platform.name != "cuda":
        raise UserError(f"placement=managed: needs platform=cuda; allowed on {platform.name}: device, host")
    if placement != "host" and not platform.overlap:
        raise UserError(f"platform.overlap=false: placement={placement} uses no link; use placement=host")
    if placement != "host" and platform.weights_on_device < 1:
        share = f"platform.weights_on_device={platform.weights_on_device}"
        raise UserError(f"{share}: placement={placement} uses no link; use placement=host")
    if placement != "managed" and platform.device_gib is not None:
        raise UserError(f"platform.device_gib={platform.device_gib:g}: is for placement=managed; leave it null")


def refuse_modelled(platform: Mapping[str, Any]) -> None:
    """Raise UserError for the settings of a platform of the cost model's."""
    if platform.get("kind") == "modelled":
        raise UserError(f"platform={platform['name']}: is modelled, nothing runs there; allowed here: cpu, cuda")


def group_latency(settings: dict[str, Any]) -> dict[str, Any]:
    """Take the settings of `LatencyConfig`, which stand at the top, out of `settings`."""
    return {field.name: settings.pop(field.name) for field in fields(LatencyConfig) if field.name in settings}

"""The systems that speed runs compare: one word each, and the settings it stands for.

All get what InfiniGen gets: pinned memory, overlap, append-only write-back, the same batch. Only offload-pageable,
named so, runs as the InfiniGen artifact ran its FlexGen baseline; and uvm leaves the transfers to CUDA's driver.
Imports no torch.

    python run.py experiment=latency label=offload+int4
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from harness.errors import UserError, nearest, question
from harness.settings.config import Placement, PlatformConfig, RunConfig

if TYPE_CHECKING:
    from methods.base import Method


@dataclass(frozen=True)
class System:
    """A method where it runs. overlap, pinned: of the link's transfers, and of the host memory behind it."""

    method: str
    placement: Placement = "host"
    codec: str | None = None
    reuse: bool = False
    overlap: bool = True
    pinned: bool = True

    def settings(self) -> dict[str, Any]:
        """The same as settings of a run, in the words of the command line."""
        return {
            "method": self.method,
            "placement": self.placement,
            "codec": self.codec,
            "value_codec": None,
            "rotation": None,
            "key_groups": "token",
            "residual": 0,
            "reuse": self.reuse,
            "platform.overlap": self.overlap,
            "platform.pinned": self.pinned,
        }


LABELS = {
    "ideal": System("full", "device"),
    "uvm": System("full", "managed"),
    "uvm+h2o": System("h2o", "managed"),
    "offload": System("full"),
    "offload-pageable": System("full", overlap=False, pinned=False),
    "offload+int4": System("full", codec="int4"),
    "offload+h2o": System("h2o"),
    "infinigen": System("infinigen"),
    "infinigen+reuse": System("infinigen", reuse=True),
    "infinigen+int4": System("infinigen", codec="int4"),
}
COUNTED = tuple(label for label, system in LABELS.items() if system.placement != "managed")
"""Those whose transfers are ours, and counted, on any platform. Managed memory is CUDA's, whose driver moves pages."""


def apply(settings: dict[str, Any], given: set[str], method_node: Callable[[str], Any]) -> None:
    """Give `settings`, a composed run, what its label stands for where it names a system; any other changes nothing.

    given: names of the settings on the command line. method_node: reads the YAML of a method by name. Raises UserError
    where a given setting says something else than the label.
    """
    label = settings.get("label")
    if label in LABELS:
        _apply(str(label), settings, given, method_node)
    elif label and (not any(name.partition(".")[0] == "method" for name in given) or question(label, LABELS, 0.8)):
        raise UserError(
            f"label={label}: is no system; {nearest(label, LABELS)}; or give method= and a label of its own"
        )


def _apply(label: str, settings: dict[str, Any], given: set[str], method_node: Callable[[str], Any]) -> None:
    method = LABELS[label].method
    for name, wanted in LABELS[label].settings().items():
        if name in given and _get(settings, name) != wanted:
            value = _get(settings, name)
            raise UserError(f"{name}={value}: label={label} stands for {name}={wanted}; give one of them")
    if settings["method"]["name"] != method:
        for name in given:
            if name.startswith("method."):
                raise UserError(f"{name}: label={label} stands for method={method}; leave one of them out")
        settings["method"] = method_node(method)
    for name, wanted in LABELS[label].settings().items():
        if name != "method":
            group, _, key = name.rpartition(".")
            (settings[group] if group else settings)[key] = wanted


def name_of(method: str, config: RunConfig, *, is_own: bool = False) -> str:
    """The label of a run: its system, else its settings in words. method: of a preset, the one behind it."""
    platform = config.platform
    system = System(method, config.placement, config.codec_name, config.reuse, platform.overlap, platform.pinned)
    known = next((label for label, each in LABELS.items() if each == system), None)
    if known is not None:
        return known
    parts = [method, config.codec_name, "reuse" if config.reuse else None, None if platform.overlap else "no overlap"]
    words = "+".join(part for part in parts if part)
    return words if is_own and config.placement == "host" else f"{words} ({config.placement})"


def _get(settings: Mapping[str, Any], name: str) -> Any:
    if name == "method":
        return settings["method"]["name"]
    group, _, key = name.rpartition(".")
    return (settings[group] if group else settings)[key]


def check_combination(method: Method, placement: str, reuse: bool) -> None:
    """Raise UserError for settings that make no sense together in live decoding."""
    if placement not in get_args(Placement):
        raise UserError(f"placement={placement}: must be one of {', '.join(get_args(Placement))}")
    if method.replay_only:
        raise UserError(method.replay_only)
    if placement == "host" and method.when == "true_scores":
        raise UserError(f"placement=host: {method.title} selects by the true scores of all keys; use placement=device")
    if reuse and not (placement == "host" and method.names_rows):
        why = f"{method.title} selects none" if placement == "host" else f"placement={placement} fetches none"
        raise UserError(f"reuse=true: reuses selected tokens, {why}; needs placement=host and a method that retrieves")


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

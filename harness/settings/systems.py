"""The systems that speed runs compare: `conf/system` makes them, and each has a name here.

All get what InfiniGen gets: pinned memory, overlap, append-only write-back, the same batch. Only
offload-pageable runs as the InfiniGen artifact ran its FlexGen baseline, infinigen-artifact as the
artifact's device-wide wait after each layer has it (snu-comparch/InfiniGen#9), and uvm leaves the
transfers to CUDA's driver. disk and what begins so read a local disk. Imports no torch.

    python run.py experiment=latency system=offload+int4
    python run.py experiment=disk system=offload+int4       # disk+int4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from harness.errors import UserError
from harness.settings.config import BEHIND_LINK, Placement, RunConfig

if TYPE_CHECKING:
    from methods.base import Method


@dataclass(frozen=True)
class System:
    """A method where it runs. overlap, pinned: of the link's transfers, and of the host memory
    behind it."""

    method: str
    placement: Placement = "host"
    codec: str | None = None
    gpu_cache: float = 0
    overlap: bool = True
    pinned: bool = True


LABELS = {
    "ideal": System("full", "device"),
    "uvm": System("full", "managed"),
    "uvm+h2o": System("h2o", "managed"),
    "offload": System("full"),
    "offload-pageable": System("full", overlap=False, pinned=False),
    "offload+int4": System("full", codec="int4"),
    "offload+h2o": System("h2o"),
    "infinigen": System("infinigen"),
    "infinigen-artifact": System("infinigen", overlap=False),
    "infinigen+reuse": System("infinigen", gpu_cache=1),
    "infinigen+int4": System("infinigen", codec="int4"),
    "infinigen2": System("infinigen2"),
    "infinigen2+rows": System("infinigen2", gpu_cache=2),
    "disk": System("full", "disk"),
    "disk+int4": System("full", "disk", codec="int4"),
    "disk+infinigen": System("infinigen", "disk"),
    "disk+infinigen2": System("infinigen2", "disk"),
    "disk+infinigen2+rows": System("infinigen2", "disk", gpu_cache=2),
}
OF_EVERY_METHOD = "method.dense_layers"
"""The setting that every method has, which may be given beside any system."""
COUNTED = tuple(label for label, system in LABELS.items() if system.placement != "managed")
"""Systems whose transfers are counted. In managed memory CUDA's driver moves pages, which are not
counted."""
ON_A_DISK = tuple(label for label, system in LABELS.items() if system.placement == "disk")
"""Systems that a GPU does not have."""


def check_label(label: str, made: str) -> None:
    """Raise UserError where a run would have the name of a system that it is not. made: the name
    of what it is."""
    if label in LABELS and label != made:
        chosen = f"a system is chosen by system=NAME, and this run is {made}"
        raise UserError(f"label={label}: names a system; {chosen}")


def name_of(method: str, config: RunConfig, *, is_own: bool = False) -> str:
    """The label of a run: its system, else its settings in words. method: of a preset, the method
    behind it."""
    ran = System(
        method,
        config.placement,
        config.codec_name,
        config.gpu_cache,
        config.platform.overlap,
        config.platform.pinned,
    )
    for label, system in LABELS.items():
        if system == ran:
            return label
    words = method
    if config.codec_name:
        words += f"+{config.codec_name}"
    if config.gpu_cache:
        words += f"+rows{config.gpu_cache:g}"
    if not config.platform.overlap:
        words += "+no overlap"
    if is_own and config.placement == "host":
        return words
    return f"{words} ({config.placement})"


def check_combination(method: Method, placement: str, gpu_cache: float) -> None:
    """Raise UserError for settings that make no sense together in live decoding."""
    if placement not in get_args(Placement):
        raise UserError(f"placement={placement}: must be one of {', '.join(get_args(Placement))}")
    if method.replay_only is not None:
        raise UserError(method.replay_only)
    if placement in BEHIND_LINK and method.when == "true_scores":
        scores = "selects by the true scores of all keys; use placement=device"
        raise UserError(f"placement={placement}: {method.title} {scores}")
    check_gpu_cache(method, gpu_cache)
    if gpu_cache and placement not in BEHIND_LINK:
        no_rows = f"placement={placement} fetches no rows; needs placement=host or disk"
        raise UserError(f"gpu_cache={gpu_cache:g}: {no_rows}")


def check_gpu_cache(method: Method, gpu_cache: float) -> None:
    """Raise UserError where a method has no rows for a GPU cache."""
    setting = f"gpu_cache={gpu_cache:g}"
    if gpu_cache and gpu_cache < 1:
        raise UserError(f"{setting}: must be 0, or 1 and more, times the rows that a step reads")
    if gpu_cache and not method.names_rows:
        retrieves = "selects no rows; needs a method that retrieves"
        raise UserError(f"{setting}: {method.title} {retrieves}")

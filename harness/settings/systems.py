"""The systems that speed runs compare: files of `conf/system`. A run that is one has its name.

All get what InfiniGen gets: pinned memory, overlap, append-only write-back, the same batch, but
where a file of `conf/system` says otherwise. disk and what begins so read a local disk. Imports no
torch.

    python run.py experiment=latency system=offload+int4
    python run.py experiment=disk system=offload+int4       # disk+int4
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from harness.errors import UserError
from harness.settings.config import BEHIND_LINK, Placement, RunConfig
from harness.settings.schema import conf_file, options

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


def _systems() -> dict[str, System]:
    """The systems of `conf/system` by name, and beside each that transfers as it can the same on a
    local disk."""
    found = {}
    for name in options("system"):
        said = conf_file("system", name)
        said |= said.pop("platform", {})
        found[name] = System(**said | {"method": said["method"]["name"]})
    for name, system in tuple(found.items()):
        if system == replace(system, placement="host", overlap=True, pinned=True):
            on_disk = "disk" + f"+{name}".removeprefix("+offload")
            found[on_disk] = replace(system, placement="disk")
    return found


LABELS = _systems()
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
    """The label of a run: its system, else its settings in words. method: of a named format, the
    full cache."""
    transfers = {name: getattr(config.platform, name) for name in ("overlap", "pinned")}
    ran = System(method, config.placement, config.codec_name, config.gpu_cache, **transfers)
    for label, system in LABELS.items():
        if system == ran:
            return label
    words = method
    if ran.codec:
        words += f"+{ran.codec}"
    if ran.gpu_cache:
        words += f"+rows{ran.gpu_cache:g}"
    if not ran.overlap:
        words += "+no overlap"
    if is_own and ran.placement == "host":
        return words
    return f"{words} ({ran.placement})"


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

"""The systems that speed runs compare: files of `conf/system`. A run that is one has its name.

All get what InfiniGen gets: pinned memory, overlap, append-only write-back, the same batch, but
where a file of `conf/system` says otherwise. disk and what begins so read a local disk. Imports no
torch.

    python run.py experiment=latency system=offload+int4
    python run.py experiment=disk system=offload+int4       # disk+int4
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.settings.config import Placement, RunConfig
from harness.settings.schema import conf_file, options


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

"""A run to predict: the machine by its data sheet, the system as published, the model and its sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from harness.errors import UserError, nearest
from harness.model.shape import ModelShape, read_yaml
from harness.settings.schema import CONF_DIR, build
from harness.settings.systems import LABELS, System

if TYPE_CHECKING:
    from methods.base import Method, Row

WEIGHTS_FRAC = 0.9
"""Share of device memory that weights may take; the rest is for buffers and activations, which are not counted."""
PAPER_LENGTHS, PAPER_COUNTS = (512, 1024, 1536, 2048), (37.0, 60.0, 66.0, 73.0)
"""Mean tokens above InfiniGen's threshold by length, OPT-13B (paper, section 5.3). The model takes straight lines in
between and constants outside, capped like any selection."""

Overlap = Literal["none", "ffn", "block"]
"""How early the next block's transfer starts: after this block, after its attention, or with it."""


@dataclass(frozen=True)
class Platform:
    """A machine by its data sheets. `source` names them.

    flops_per_s: fp16 matrix products, dense. memory_bytes_per_s: device memory. device_bytes: its size.
    link_bytes_per_s: host to device from pinned memory, as achieved. host_channel_bytes_per_s: one channel of host
    memory, which limits the one core that stages a copy from pageable memory.

    Raises:
        UserError: a rate or size that is not positive.
    """

    name: str
    kind: Literal["modelled"]
    source: str
    flops_per_s: float
    memory_bytes_per_s: float
    device_bytes: float
    link_bytes_per_s: float
    host_channel_bytes_per_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and value <= 0:
                raise UserError(f"platform.{field.name}={value:g} of {self.name}: must be above 0")

    @property
    def pageable_bytes_per_s(self) -> float:
        """Host to device from pageable memory: the driver copies into a pinned buffer (a read and a write of the
        channel per byte), then transfers."""
        return 1 / (1 / self.link_bytes_per_s + 2 / self.host_channel_bytes_per_s)


def load_platform(name: str) -> Platform:
    """`conf/platform/<name>.yaml`; UserError for one that is unknown, or measured instead of modelled."""
    known = {path.stem: read_yaml(path) for path in sorted((CONF_DIR / "platform").glob("*.yaml"))}
    modelled = [stem for stem, node in known.items() if node.get("kind") == "modelled"]
    if name not in modelled:
        why = "is measured, the cost model predicts others; " if name in known else ""
        raise UserError(f"platform={name}: {why}{nearest(name, modelled)}")
    return build(Platform, known[name], "platform")


@dataclass(frozen=True)
class Efficiency:
    """Achieved share of a data-sheet rate, in (0, 1]: the only fitted numbers of the cost model.

    matmul: of `flops_per_s` by matrix products too large to be limited by memory, which is prefill.
    memory: of `memory_bytes_per_s` by kernels that stream weights or cached tokens.
    row_fetch: of `link_bytes_per_s` when tokens are fetched one by one, 256 bytes a head, instead of in one piece.
    """

    matmul: float
    memory: float
    row_fetch: float


FITTED = Efficiency(matmul=0.36, memory=0.81, row_fetch=0.83)
"""`published.fit` over all published numbers, to two digits."""


@dataclass(frozen=True)
class Scheme:
    """A system as published: where the cache lies, which method reads it, in which format, and how much transfer it
    hides. The number of tokens read is asked of the method with its default settings, which are the paper's."""

    system: System
    overlap: Overlap

    @property
    def placement(self) -> Literal["device", "pinned", "pageable", "managed"]:
        """Where the cache lies; managed: all memory is CUDA's managed memory."""
        if self.system.placement != "host":
            return self.system.placement
        return "pinned" if self.system.pinned else "pageable"

    @property
    def predicts(self) -> bool:
        """True if a layer predicts the tokens of the next one (InfiniGen), which are then fetched one by one."""
        return self.system.method == "infinigen"

    @property
    def int4(self) -> bool:
        """True if the cache is stored in 4 bits."""
        return self.system.codec == "int4"

    @property
    def num_exempt_layers(self) -> int:
        """First layers that read the full cache, for every method that selects or quantizes."""
        return _method(self.system.method).num_exempt_layers if self.system.method != "full" or self.int4 else 0

    def tokens_read(self, cached: int, final_len: int) -> float:
        """Tokens of `cached` that a decode step reads in a non-exempt layer; T = `final_len`."""
        method, row, layer = self._asked(cached, final_len)
        read = method.tokens_read(row, layer)
        if read is not None:
            return read
        return min(float(np.interp(cached, PAPER_LENGTHS, PAPER_COUNTS)), method.max_tokens_read(row, layer))

    def tokens_kept(self, cached: int, final_len: int) -> int:
        """Tokens of `cached` that a non-exempt layer keeps."""
        method, row, layer = self._asked(cached, final_len)
        return method.tokens_kept(row, layer)

    def _asked(self, cached: int, final_len: int) -> tuple[Method, Row, int]:
        from methods.base import Row  # loads torch

        method = _method(self.system.method)
        return method, Row(cached, prompt=cached, final=final_len), method.num_exempt_layers


def _published(system: System) -> Scheme:
    """FlexGen loads the cache of the next attention during the FFN. InfiniGen's artifact gathers on the host behind a
    device sync (speedup/infinigen/infinigen/kv_selection_controller.py), and a page fault stalls: they hide nothing."""
    hides = system.overlap and system.method != "infinigen" and system.placement != "managed"
    return Scheme(system, "ffn" if hides else "none")


PUBLISHED = ("uvm", "uvm+h2o", "offload", "offload-pageable", "offload+int4", "offload+h2o", "infinigen", "ideal")
SCHEMES = {label: _published(LABELS[label]) for label in PUBLISHED}


def partial_weight_ratio() -> float:
    """Share of the columns with which InfiniGen predicts."""
    from methods.infinigen import InfiniGen

    return InfiniGen.partial_weight_ratio


@cache
def _method(name: str) -> Method:
    from methods.full import Full
    from methods.h2o import H2O
    from methods.infinigen import InfiniGen

    return {"full": Full, "h2o": H2O, "infinigen": InfiniGen}[name]()


@dataclass(frozen=True)
class Case:
    """A run to predict. label: one of `SCHEMES`."""

    platform: Platform
    shape: ModelShape
    label: str
    batch_size: int
    prompt_len: int
    gen_len: int
    efficiency: Efficiency = FITTED

    @property
    def scheme(self) -> Scheme:
        """The system of the label."""
        return SCHEMES[self.label]

    @property
    def final_len(self) -> int:
        """T: tokens of a sequence at its end."""
        return self.prompt_len + self.gen_len

    @property
    def host_block_bytes(self) -> float:
        """Bytes of a block's weights that lie in host memory and cross the link in each pass: the least share that
        makes the rest fit, in tenths (0.3 for the paper's OPT-30B, as there). Managed memory and `ideal` have none."""
        if self.scheme.placement in ("managed", "device"):
            return 0.0
        excess = self.shape.weight_bytes - WEIGHTS_FRAC * self.platform.device_bytes
        least = max(0.0, excess / (self.shape.num_layers * self.shape.block_bytes))
        return self.shape.block_bytes * min(1.0, math.ceil(10 * least) / 10)

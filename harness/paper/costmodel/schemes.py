"""The systems that the cost model predicts: those of a speed comparison, and what their publications add.

`harness.settings.systems` says where the cache lies, which method reads it and in which format it crosses the link.
Added here is how much of the transfer the published systems hide. FlexGen schedules attention and FFN as two stages and
loads the cache of the next attention during the FFN. InfiniGen's artifact gathers on the host
behind a device sync (speedup/infinigen/infinigen/kv_selection_controller.py), so nothing hides. A page fault stalls as
well. How many tokens are read is asked of the method, whose defaults are the paper's settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from harness.paper.costmodel.overlap import Overlap
from harness.settings.systems import LABELS, System

if TYPE_CHECKING:
    from methods.base import Method, Row

PAPER_LENGTHS, PAPER_COUNTS = (512, 1024, 1536, 2048), (37.0, 60.0, 66.0, 73.0)
"""Mean tokens above the threshold by length, OPT-13B (paper, section 5.3). The model takes straight lines in between
and constants outside, capped like any selection."""


@dataclass(frozen=True)
class Scheme:
    """A system as published: under managed placement all memory is CUDA's managed memory. overlap: of the next
    transfer."""

    system: System
    overlap: Overlap

    @property
    def placement(self) -> Literal["device", "pinned", "pageable", "managed"]:
        """Where the cache lies."""
        if self.system.placement != "host":
            return self.system.placement
        return "pinned" if self.system.pinned else "pageable"

    @property
    def reads(self) -> str:
        """The method by name, which says what cached tokens a decode row reads in non-exempt layers."""
        return self.system.method

    @property
    def int4(self) -> bool:
        """Whether the cache is stored in 4 bits."""
        return self.system.codec == "int4"

    @property
    def name(self) -> str:
        """The word for it in a table's column `method`."""
        return self.system.codec or self.reads

    @property
    def num_exempt_layers(self) -> int:
        """The first layers read the full cache, for every method that selects or quantizes."""
        return _method(self.reads).num_exempt_layers if self.reads != "full" or self.int4 else 0


def _published(system: System) -> Scheme:
    hides = system.overlap and system.method != "infinigen" and system.placement != "managed"
    return Scheme(system, "ffn" if hides else "none")


PUBLISHED = ("uvm", "uvm+h2o", "offload", "offload-pageable", "offload+int4", "offload+h2o", "infinigen", "ideal")
SCHEMES = {label: _published(LABELS[label]) for label in PUBLISHED}


def tokens_read(scheme: Scheme, cached: int, final_len: int, counts: float | None = None) -> float:
    """Cached tokens that a decode row reads in a non-exempt layer, out of `cached`, T = `final_len`.

    counts: InfiniGen's measured mean at this step, for a method whose reads depend on the data; None takes the paper's.
    """
    method, row, layer = _asked(scheme, cached, final_len)
    read, most = method.tokens_read(row, layer), method.max_tokens_read(row, layer)
    if read is not None:
        return read
    above = np.interp(cached, PAPER_LENGTHS, PAPER_COUNTS) if counts is None else counts
    return min(max(float(above), 1.0), most)


def tokens_kept(scheme: Scheme, cached: int, final_len: int) -> int:
    """Tokens of `cached` that a non-exempt layer keeps."""
    method, row, layer = _asked(scheme, cached, final_len)
    return method.tokens_kept(row, layer)


def _asked(scheme: Scheme, cached: int, final_len: int) -> tuple[Method, Row, int]:
    """The method, and of which row and layer it is asked; none of these methods heeds the prompt's length."""
    from methods.base import Row

    method = _method(scheme.reads)
    return method, Row(cached, prompt=cached, final=final_len), method.num_exempt_layers


def partial_weight_ratio() -> float:
    """Share of the columns in which InfiniGen rehearses."""
    from methods.infinigen import InfiniGen

    return InfiniGen.partial_weight_ratio


@cache
def _method(name: str) -> Method:
    """The method called `name`, as it is by default. Imported late: methods load torch."""
    from methods.full import Full
    from methods.h2o import H2O
    from methods.infinigen import InfiniGen

    return {"full": Full, "h2o": H2O, "infinigen": InfiniGen}[name]()

"""Machines and systems of the cost model: rates of data sheets with their fitted shares, and what
the paper's systems read, move and keep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from harness.model.shape import read_yaml
from harness.settings.schema import CONF_DIR, build
from harness.settings.systems import LABELS, System

if TYPE_CHECKING:
    from methods.base import Method

WEIGHTS_FRAC = 0.9
"""Share of device memory that weights may take; the rest is for buffers and activations, which are
not counted."""
PAPER_LENGTHS, PAPER_COUNTS = (512, 1024, 1536, 2048), (37.0, 60.0, 66.0, 73.0)
"""Mean tokens above InfiniGen's threshold by length, OPT-13B (paper, section 5.3). The model takes
straight lines in between and constants outside, capped like any selection."""
INT4_SHARE = (4 + 32 / 64) / 16
"""Of fp16, with an fp16 scale and minimum per group of 64."""
DEQUANTIZE_BYTES = 13
"""Device traffic per element of FlexGen's five passes: both halves of a byte are shifted or masked
(0.5 read, 0.5 written) and converted (0.5 read, 1 written), then divided and added to (2 read, 2
written each)."""
EAGER_SCORE_BYTES = 12
"""Device traffic per score of eager fp16 attention: product, mask (in, out), softmax (in, out),
product."""
UVM_SCORE_BYTES = 24
"""Managed memory that the artifact's uvm/selfattention.py allocates per score of the prompt: scores
and weights in fp16; ones, mask, scaled mask, masked scores and softmax in fp32."""
UVM_SCORE_PEAK_BYTES = 14
"""The part of it that lives at once: mask, masked scores and softmax in fp32, weights in fp16."""
Overlap = Literal["none", "ffn", "block"]
"""How early the next block's transfer starts: after this block, after its attention, or with it."""
Rate = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Platform:
    """A machine by its data sheets. `source` names them.

    flops_per_s: fp16 matrix products, dense. memory_bytes_per_s: device memory. device_bytes: its
    size. link_bytes_per_s: host to device from pinned memory, as achieved.
    host_channel_bytes_per_s: one channel of host memory, which limits the one core that stages a
    copy from pageable memory. cards: among which a model's heads are split; rates and size are of
    one, which has a link of its own.
    """

    name: str
    kind: Literal["modelled"]
    source: str
    flops_per_s: Rate
    memory_bytes_per_s: Rate
    device_bytes: Rate
    link_bytes_per_s: Rate
    host_channel_bytes_per_s: Rate
    cards: Annotated[int, Field(ge=1)] = 1

    @property
    def pageable_bytes_per_s(self) -> float:
        """Host to device from pageable memory: the driver copies into a pinned buffer (a read and a
        write of the channel per byte), then transfers."""
        return 1 / (1 / self.link_bytes_per_s + 2 / self.host_channel_bytes_per_s)

    @property
    def together(self) -> Platform:
        """All cards as one: their rates and memories added."""
        return replace(
            self,
            flops_per_s=self.cards * self.flops_per_s,
            memory_bytes_per_s=self.cards * self.memory_bytes_per_s,
            device_bytes=self.cards * self.device_bytes,
            link_bytes_per_s=self.cards * self.link_bytes_per_s,
        )


def load_platform(name: str) -> Platform:
    """`conf/platform/<name>.yaml` of a machine that is modelled."""
    return build(Platform, read_yaml(CONF_DIR / "platform" / f"{name}.yaml"), "platform")


class Efficiency(NamedTuple):
    """Achieved share of a data-sheet rate, in (0, 1]: the only fitted numbers of the cost model.

    matmul: of `flops_per_s` by matrix products too large to be limited by memory, which is prefill.
    memory: of `memory_bytes_per_s` by kernels that stream weights or cached tokens.
    row_fetch: of `link_bytes_per_s` when tokens are fetched one by one, 256 bytes a head, instead
    of in one piece.
    """

    matmul: float
    memory: float
    row_fetch: float


FITTED = Efficiency(matmul=0.36, memory=0.81, row_fetch=0.83)
"""`published.fit` over all published numbers, to two digits."""
DENSE_LAYERS = 2
"""First layers that InfiniGen's artifact leaves to the full cache under every method (`layer_id >
1` in `speedup/flexgen`, `i >= 2` in `accuracy/lm_eval`), whatever their own code does."""


@dataclass(frozen=True)
class Scheme:
    """A system as published: where the cache lies, which method reads it, in which format, and how
    much transfer it hides. The number of tokens read is asked of the method with its default
    settings, which are the paper's."""

    system: System
    overlap: Overlap

    @property
    def placement(self) -> Literal["device", "pinned", "pageable", "managed"]:
        """Where the cache lies; managed: all memory is CUDA's managed memory."""
        placement = self.system.placement
        assert placement != "disk", "the paper's systems have none"
        if placement != "host":
            return placement
        return "pinned" if self.system.pinned else "pageable"

    @property
    def predicts(self) -> bool:
        """True if a layer predicts the tokens of the next one (InfiniGen), which are then fetched
        one by one."""
        return self.system.method == "infinigen"

    @property
    def int4(self) -> bool:
        """True if the cache is stored in 4 bits."""
        return self.system.codec == "int4"

    @property
    def dense_layers(self) -> int:
        """First layers that read the full cache."""
        reads_all = self.system.method == "full" and not self.int4
        return 0 if reads_all else DENSE_LAYERS

    def tokens(self, cached: int, final_len: int) -> tuple[float, int]:
        """Tokens of `cached` that a decode step reads in a layer under the method, and those it
        keeps. T: `final_len`."""
        from methods.base import TokenCounts  # loads torch

        method = _method(self.system.method)
        row, layer = TokenCounts(cached, prompt=cached, final=final_len), DENSE_LAYERS
        read = method.tokens_read(row, layer)
        if read is None:
            read = min(
                float(np.interp(cached, PAPER_LENGTHS, PAPER_COUNTS)),
                method.max_tokens_read(row, layer),
            )
        return read, method.tokens_kept(row, layer)


def _published(system: System) -> Scheme:
    """FlexGen loads the cache of the next attention during the FFN. InfiniGen's artifact gathers on
    the host behind a device sync (speedup/infinigen/infinigen/kv_selection_controller.py), and a
    page fault stalls: they hide nothing."""
    hides = system.overlap and system.method != "infinigen" and system.placement != "managed"
    return Scheme(system, "ffn" if hides else "none")


PUBLISHED = (
    "uvm",
    "uvm+h2o",
    "offload",
    "offload-pageable",
    "offload+int4",
    "offload+h2o",
    "infinigen",
    "ideal",
)
SCHEMES = {label: _published(LABELS[label]) for label in PUBLISHED}


@cache
def _method(name: str) -> Method:
    from methods.full import Full
    from methods.h2o import H2O
    from methods.infinigen import InfiniGen

    return {"full": Full, "h2o": H2O, "infinigen": InfiniGen}[name]()

"""From counts to seconds: a run's prefill and decode walked block by block, and its row of the latency table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any

import numpy as np

from harness.errors import UserError, nearest
from harness.paper.costmodel.counts import (
    INT4_SHARE,
    SCHEMES,
    BlockWork,
    Scheme,
    Work,
    decode_block,
    layers_of,
    managed_bytes,
    prefill_block,
    tokens_read,
)
from harness.paper.costmodel.hardware import WEIGHT_BYTES, Efficiency, ModelShape, Platform
from harness.paper.costmodel.timeline import BlockTimes, Overlap, block_ends

FITTED = Efficiency(matmul=0.36, memory=0.81, row_fetch=0.83)
"""Least squares of log(predicted / published) over all numbers of `published`, to two digits."""
WEIGHTS_FRAC = 0.9
"""Share of device memory that weights may take; the rest is for buffers and activations, which are not counted."""


@dataclass(frozen=True)
class Setup:
    """A run to predict.

    label: one of `SCHEMES`.
    host_weight_frac: share of every block's weights that lies in host memory and crosses the link in each pass; None
        takes the least that makes the rest fit, in tenths (0.3 for the paper's OPT-30B, as there).
    trace: InfiniGen's mean tokens per decode step, gen_len - 1 of them; None takes the paper's counts.
    overlap: instead of the label's own.

    Raises:
        UserError: an unknown label, a size below its minimum, a trace of another length, or weights that do
            not fit.
    """

    platform: Platform
    shape: ModelShape
    label: str
    batch_size: int
    prompt_len: int
    gen_len: int
    host_weight_frac: float | None = None
    trace: tuple[float, ...] | None = None
    overlap: Overlap | None = None
    efficiency: Efficiency = field(default=FITTED)

    def __post_init__(self) -> None:
        if self.label not in SCHEMES:
            raise UserError(f"label={self.label}: {nearest(self.label, SCHEMES)}")
        for name, low in (("batch_size", 1), ("prompt_len", 1), ("gen_len", 2)):
            if getattr(self, name) < low:
                raise UserError(f"{name}={getattr(self, name)}: must be at least {low}")
        if self.trace is not None and len(self.trace) != self.gen_len - 1:
            raise UserError(f"trace: {len(self.trace)} steps, must be gen_len - 1 = {self.gen_len - 1}")
        given, least = self.host_weight_frac, self._least_host_weight_frac
        if given is not None and not least <= given <= 1:
            where = f"{self.shape.name} on {self.platform.name}"
            raise UserError(
                f"host_weight_frac={given:g}: must be in [{math.ceil(100 * least) / 100:.2f}, 1] for {where}"
            )

    @property
    def _least_host_weight_frac(self) -> float:
        """Managed memory and `ideal` hold everything, whatever its size."""
        if self.scheme.placement in ("managed", "device"):
            return 0.0
        excess = self.shape.weight_bytes - WEIGHTS_FRAC * self.platform.device_bytes
        return max(0.0, excess / (self.shape.num_layers * self.shape.block_bytes))

    @property
    def host_block_bytes(self) -> float:
        """Bytes of a block's weights that cross the link in each pass."""
        given, least = self.host_weight_frac, self._least_host_weight_frac
        return self.shape.block_bytes * (min(1.0, math.ceil(10 * least) / 10) if given is None else given)

    @property
    def scheme(self) -> Scheme:
        """What the label stands for, with this setup's overlap."""
        scheme = SCHEMES[self.label]
        return replace(scheme, overlap=self.overlap) if self.overlap else scheme

    @property
    def final_len(self) -> int:
        """T: tokens of a sequence at its end."""
        return self.prompt_len + self.gen_len


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds and bytes of a run.

    step_s: seconds of each decode step. block: seconds of one non-exempt block in the last step by segment, where
    transfer is what compute waits for. h2d_bytes, d2h_bytes: prefill included.
    """

    setup: Setup
    prefill_s: float
    step_s: tuple[float, ...]
    block: dict[str, float]
    exposed_transfer_s: float
    link_bytes_per_s: float | None
    h2d_bytes: float
    d2h_bytes: float
    kv_frac: float

    @property
    def decode_s(self) -> float:
        """Seconds of all decode steps."""
        return sum(self.step_s)

    @property
    def total_s(self) -> float:
        """Prefill and decode."""
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the total, as the paper counts them."""
        return self.setup.batch_size * self.setup.gen_len / self.total_s

    @property
    def block_s(self) -> float:
        """Seconds of one non-exempt block in the last step (Fig 18)."""
        return sum(self.block.values())

    def row(self, experiment: str) -> dict[str, Any]:
        """A row of the latency table, the block's segments included; None is what the model does not know."""
        setup = self.setup
        return {
            "experiment": experiment,
            "platform": setup.platform.name,
            "source": "modelled",
            "model": setup.shape.name,
            "method": setup.scheme.method,
            "label": f"{setup.label} (overlap {setup.overlap})" if setup.overlap else setup.label,
            "batch_size": setup.batch_size,
            "prompt_len": setup.prompt_len,
            "gen_len": setup.gen_len,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
            "step_p50_s": median(self.step_s),
            "step_p95_s": float(np.percentile(self.step_s, 95)),
            "h2d_bytes": round(self.h2d_bytes),
            "d2h_bytes": round(self.d2h_bytes),
            "exposed_transfer_s": self.exposed_transfer_s,
            "link_bytes_per_s": self.link_bytes_per_s,
            "peak_device_bytes": None,
            "kv_frac": self.kv_frac,
            "run_id": "",
        } | {f"{segment}_s": seconds for segment, seconds in self.block.items()}


def predict(setup: Setup) -> Prediction:
    """Seconds and bytes of `setup`: prefill, then gen_len - 1 decode steps, one walk each."""
    layers, overlap = setup.shape.num_layers, setup.scheme.overlap
    head_s = _seconds(setup, (_head(setup),))
    prompt, rows = _prefill_work(setup), _decode_work(setup)
    distinct = {work: _times(setup, work) for work in set(rows)}  # most layers of a step are alike
    times = [distinct[work] for work in rows]
    times[layers - 1 :: layers] = [last._replace(other=head_s) for last in times[layers - 1 :: layers]]
    ends = block_ends(times, overlap)
    link_s = sum(block.load for block in times)
    loaded, h2d_bytes = _loaded(setup, rows), _loaded(setup, prompt) + _loaded(setup, rows)
    return Prediction(
        setup=setup,
        prefill_s=block_ends([_times(setup, work) for work in prompt], overlap)[-1] + head_s,
        step_s=tuple(np.diff([0.0, *ends[layers - 1 :: layers]]).tolist()),
        block=_segments(times[-2], ends[-2] - ends[-3]),
        exposed_transfer_s=_exposed(ends[-1], times),
        link_bytes_per_s=loaded / link_s if link_s else None,
        h2d_bytes=h2d_bytes,
        d2h_bytes=sum(work.store_bytes for work in (*prompt, *rows)),
        kv_frac=_kv_frac(setup),
    )


def _prefill_work(setup: Setup) -> list[BlockWork]:
    """The blocks of prefill."""
    scheme, prompt_len = setup.scheme, setup.prompt_len
    kept = _kept(setup, prompt_len)
    sizes = {"batch_size": setup.batch_size, "prompt_len": prompt_len}
    held = managed_bytes(setup.shape, tokens=_by_layer(setup, prompt_len, kept), **sizes)
    paged = held > setup.platform.device_bytes
    layers = layers_of(scheme, setup.shape)
    return [prefill_block(scheme, setup.shape, layer, kept=kept, paged=paged, **sizes) for layer in layers]


def _decode_work(setup: Setup) -> list[BlockWork]:
    """The blocks of all decode steps, one step after the other."""
    scheme, shape, batch_size = setup.scheme, setup.shape, setup.batch_size
    held = _by_layer(setup, setup.final_len, _kept(setup, setup.final_len))
    paged = managed_bytes(shape, batch_size=batch_size, tokens=held, prompt_len=0) > setup.platform.device_bytes
    layers = layers_of(scheme, shape)
    blocks: list[BlockWork] = []
    for cached, read in _reads(setup):
        sizes: dict[str, Any] = {"batch_size": batch_size, "cached": cached, "read": read, "paged": paged}
        distinct = {layer: decode_block(scheme, shape, layer, **sizes) for layer in set(layers)}
        blocks += [distinct[layer] for layer in layers]
    return blocks


def _reads(setup: Setup) -> list[tuple[int, float]]:
    """Of each decode step, the cached tokens and how many of them a non-exempt layer reads."""
    trace = setup.trace or [None] * (setup.gen_len - 1)
    steps = [(setup.prompt_len + step, counts) for step, counts in enumerate(trace)]
    return [(cached, tokens_read(setup.scheme, cached, setup.final_len, counts)) for cached, counts in steps]


def _kept(setup: Setup, cached: int) -> float:
    """Tokens of `cached` that a non-exempt layer keeps: H2O evicts, the others select without forgetting."""
    evicts = setup.scheme.reads == "h2o"
    return tokens_read(setup.scheme, cached, setup.final_len) if evicts else cached


def _by_layer(setup: Setup, full: float, kept: float) -> list[float]:
    """Cached tokens of a sequence in each layer."""
    return [full if layer.exempt else kept for layer in layers_of(setup.scheme, setup.shape)]


def _times(setup: Setup, work: BlockWork) -> BlockTimes:
    """Seconds of a block when nothing waits."""
    platform = setup.platform
    pageable = setup.scheme.placement == "pageable"
    link = platform.pageable_bytes_per_s if pageable else platform.link_bytes_per_s
    in_one_piece = work.load_bytes + setup.host_block_bytes
    return BlockTimes(
        load=in_one_piece / link + work.row_bytes / (link * setup.efficiency.row_fetch),
        attention=_seconds(setup, work.attention),
        ffn=_seconds(setup, work.ffn),
        prediction=_seconds(setup, work.prediction),
        store=work.store_bytes / link,
    )


def _seconds(setup: Setup, works: Sequence[Work]) -> float:
    """Each kernel takes as long as the slower of its arithmetic and its memory traffic."""
    flops_per_s = setup.platform.flops_per_s * setup.efficiency.matmul
    bytes_per_s = setup.platform.memory_bytes_per_s * setup.efficiency.memory
    return sum(max(work.flops / flops_per_s, work.bytes / bytes_per_s) for work in works)


def _head(setup: Setup) -> Work:
    """The output head, for one token of each sequence."""
    weights = setup.shape.vocab_size * setup.shape.hidden_size
    return Work(2 * setup.batch_size * weights, WEIGHT_BYTES * weights)


def _loaded(setup: Setup, works: Sequence[BlockWork]) -> float:
    """Bytes that the blocks bring to the device."""
    return sum(work.load_bytes + work.row_bytes for work in works) + len(works) * setup.host_block_bytes


def _segments(block: BlockTimes, elapsed: float) -> dict[str, float]:
    """Where the `elapsed` seconds of a block went."""
    own = {name: getattr(block, name) for name in ("attention", "ffn", "prediction", "other")}
    return own | {"transfer": _exposed(elapsed, [block])}


def _exposed(elapsed: float, blocks: Sequence[BlockTimes]) -> float:
    """Seconds in which compute had nothing to do; rounding may not make it negative."""
    return max(0.0, elapsed - math.fsum(block.compute for block in blocks))


def _kv_frac(setup: Setup) -> float:
    """What is read / the full cache, mean over decode rows, as `harness.reads` counts it."""
    exempt = mean(layer.exempt for layer in layers_of(setup.scheme, setup.shape))
    width = INT4_SHARE if setup.scheme.int4 else 1.0
    return mean(exempt + (1 - exempt) * width * read / cached for cached, read in _reads(setup))

"""From counts to seconds: a run's prefill and decode walked block by block, and its row of the latency table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np

from harness.model.shape import WEIGHT_BYTES
from harness.paper.costmodel.case import Case
from harness.paper.costmodel.counts import (
    INT4_SHARE,
    BlockWork,
    Work,
    decode_block,
    layers_of,
    managed_bytes,
    prefill_block,
)
from harness.paper.costmodel.overlap import BlockTimes, block_ends
from harness.paper.costmodel.schemes import tokens_kept, tokens_read


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds and bytes of a run.

    step_s: seconds of each decode step. block: seconds of one non-exempt block in the last step by segment, where
    transfer is what compute waits for. h2d_bytes, d2h_bytes: prefill included.
    """

    case: Case
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
        return self.case.batch_size * self.case.gen_len / self.total_s

    @property
    def block_s(self) -> float:
        """Seconds of one non-exempt block in the last step (Fig 18)."""
        return sum(self.block.values())

    def row(self, experiment: str) -> dict[str, Any]:
        """A row of the latency table, the block's segments included; None is what the model does not know."""
        case = self.case
        return {
            "experiment": experiment,
            "platform": case.platform.name,
            "source": "modelled",
            "model": case.shape.name,
            "method": case.scheme.name,
            "label": f"{case.label} (overlap {case.overlap})" if case.overlap else case.label,
            "batch_size": case.batch_size,
            "prompt_len": case.prompt_len,
            "gen_len": case.gen_len,
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


def predict(case: Case) -> Prediction:
    """Seconds and bytes of `case`: prefill, then gen_len - 1 decode steps, one walk each."""
    layers, overlap = case.shape.num_layers, case.scheme.overlap
    head_s = _seconds(case, (_head(case),))
    prompt, rows = _prefill_work(case), _decode_work(case)
    distinct = {work: _times(case, work) for work in set(rows)}  # most layers of a step are alike
    times = [distinct[work] for work in rows]
    times[layers - 1 :: layers] = [last._replace(other=head_s) for last in times[layers - 1 :: layers]]
    ends = block_ends(times, overlap)
    link_s = sum(block.load for block in times)
    loaded = _loaded(case, rows)
    return Prediction(
        case=case,
        prefill_s=block_ends([_times(case, work) for work in prompt], overlap)[-1] + head_s,
        step_s=tuple(np.diff([0.0, *ends[layers - 1 :: layers]]).tolist()),
        block=_segments(times[-2], ends[-2] - ends[-3]),
        exposed_transfer_s=_exposed(ends[-1], times),
        link_bytes_per_s=loaded / link_s if link_s else None,
        h2d_bytes=_loaded(case, prompt) + loaded,
        d2h_bytes=sum(work.store_bytes for work in (*prompt, *rows)),
        kv_frac=_kv_frac(case),
    )


def _prefill_work(case: Case) -> list[BlockWork]:
    """The blocks of prefill."""
    scheme, prompt_len = case.scheme, case.prompt_len
    kept = tokens_kept(case.scheme, prompt_len, case.final_len)
    sizes = {"batch_size": case.batch_size, "prompt_len": prompt_len}
    held = managed_bytes(case.shape, tokens=_by_layer(case, prompt_len, kept), **sizes)
    paged = held > case.platform.device_bytes
    layers = layers_of(scheme, case.shape)
    return [prefill_block(scheme, case.shape, layer, kept=kept, paged=paged, **sizes) for layer in layers]


def _decode_work(case: Case) -> list[BlockWork]:
    """The blocks of all decode steps, one step after the other."""
    scheme, shape, batch_size = case.scheme, case.shape, case.batch_size
    kept = tokens_kept(case.scheme, case.final_len, case.final_len)
    held = _by_layer(case, case.final_len, kept)
    paged = managed_bytes(shape, batch_size=batch_size, tokens=held, prompt_len=0) > case.platform.device_bytes
    layers = layers_of(scheme, shape)
    blocks: list[BlockWork] = []
    for cached, read in _reads(case):
        sizes: dict[str, Any] = {"batch_size": batch_size, "cached": cached, "read": read, "paged": paged}
        distinct = {layer: decode_block(scheme, shape, layer, **sizes) for layer in set(layers)}
        blocks += [distinct[layer] for layer in layers]
    return blocks


def _reads(case: Case) -> list[tuple[int, float]]:
    """Of each decode step, the cached tokens and how many of them a non-exempt layer reads."""
    trace = case.trace or [None] * (case.gen_len - 1)
    steps = [(case.prompt_len + step, counts) for step, counts in enumerate(trace)]
    return [(cached, tokens_read(case.scheme, cached, case.final_len, counts)) for cached, counts in steps]


def _by_layer(case: Case, full: float, kept: float) -> list[float]:
    """Cached tokens of a sequence in each layer."""
    return [full if layer.exempt else kept for layer in layers_of(case.scheme, case.shape)]


def _times(case: Case, work: BlockWork) -> BlockTimes:
    """Seconds of a block when nothing waits."""
    platform = case.platform
    pageable = case.scheme.placement == "pageable"
    link = platform.pageable_bytes_per_s if pageable else platform.link_bytes_per_s
    in_one_piece = work.load_bytes + case.host_block_bytes
    return BlockTimes(
        load=in_one_piece / link + work.row_bytes / (link * case.efficiency.row_fetch),
        attention=_seconds(case, work.attention),
        ffn=_seconds(case, work.ffn),
        prediction=_seconds(case, work.prediction),
        store=work.store_bytes / link,
    )


def _seconds(case: Case, works: Sequence[Work]) -> float:
    """Each kernel takes as long as the slower of its arithmetic and its memory traffic."""
    flops_per_s = case.platform.flops_per_s * case.efficiency.matmul
    bytes_per_s = case.platform.memory_bytes_per_s * case.efficiency.memory
    return sum(max(work.flops / flops_per_s, work.bytes / bytes_per_s) for work in works)


def _head(case: Case) -> Work:
    """The output head, for one token of each sequence."""
    weights = case.shape.vocab_size * case.shape.hidden_size
    return Work(2 * case.batch_size * weights, WEIGHT_BYTES * weights)


def _loaded(case: Case, works: Sequence[BlockWork]) -> float:
    """Bytes that the blocks bring to the device."""
    return sum(work.load_bytes + work.row_bytes for work in works) + len(works) * case.host_block_bytes


def _segments(block: BlockTimes, elapsed: float) -> dict[str, float]:
    """Where the `elapsed` seconds of a block went."""
    own = {name: getattr(block, name) for name in ("attention", "ffn", "prediction", "other")}
    return own | {"transfer": _exposed(elapsed, [block])}


def _exposed(elapsed: float, blocks: Sequence[BlockTimes]) -> float:
    """Seconds in which compute had nothing to do; rounding may not make it negative."""
    return max(0.0, elapsed - math.fsum(block.compute for block in blocks))


def _kv_frac(case: Case) -> float:
    """What is read / the full cache, mean over decode rows, as `harness.reads` counts it."""
    exempt = mean(layer.exempt for layer in layers_of(case.scheme, case.shape))
    width = INT4_SHARE if case.scheme.int4 else 1.0
    return mean(exempt + (1 - exempt) * width * read / cached for cached, read in _reads(case))

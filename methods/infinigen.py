"""InfiniGen (Lee et al., OSDI 2024): rehearse the next layer's attention on few columns, fetch only what matters.

Steps as in section 4 of the paper. Offline, per KV head, A = V of the SVD of the queries concentrates the scores in
few columns ("skewing"). After the prompt, the columns of largest magnitude are kept of every key ("partial keys").
While layer l - 1 computes, its attention input stands in for layer l's: the rehearsed scores of those columns decide
what layer l fetches. A pool of limited size (section 4.4) chooses its victims as `methods.pool` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.balanced import balanced, moments
from methods.base import Calibration, Geometry, Lengths, PromptRows, Rows, Selection, State, When
from methods.checks import require_fraction, require_one_of
from methods.pool import Pooled, PoolState
from methods.projected import ProjectedState, require_index_bits, right_vectors

COLUMN_RULES = ("sum", "query", "union")


@dataclass(frozen=True)
class InfiniGen(Pooled):
    """InfiniGen's settings beside its pool's; defaults are the paper's (section 5.1).

    partial_weight_ratio: share of the columns that rehearse. round_columns: `up`, or `down` as the artifact's int().
    columns: importance of a column: `sum` of |q A| and |k A| (the paper), `query` alone (the artifact's speed code),
        or the `union` of the best by either (its accuracy code).
    skew: rotate by A first; False uses the identity.
    index: the `columns` of the paper, or the `balanced` projections to as many (`methods.balanced`), by `statistics` of
        the `prompt`, of the `calibration` text, or `both` added.
    index_bits: in so many bits it is kept, with scales as in `methods.codec`; None keeps it as the keys are.
    """

    partial_weight_ratio: float = 0.3
    round_columns: str = "up"
    columns: str = "sum"
    skew: bool = True
    index: str = "columns"
    statistics: str = "both"
    index_bits: int | None = None

    when: When = "previous_layer"  # type: ignore[misc]

    title = "InfiniGen"
    needs_prompt = True
    calibration_settings = ("index",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("partial_weight_ratio", self.partial_weight_ratio)
        require_one_of("round_columns", self.round_columns, ("up", "down"))
        require_one_of("columns", self.columns, COLUMN_RULES)
        require_one_of("index", self.index, ("columns", "balanced"))
        require_one_of("statistics", self.statistics, ("prompt", "calibration", "both"))
        require_index_bits(self.index_bits)

    @property
    def label(self) -> str:
        """Skewing is half of the method; another index makes another."""
        kinds = ["balanced"] * (self.index == "balanced") + ["coded"] * (self.index_bits is not None)
        skewing = "" if self.skew or self.index == "balanced" else " without skewing"
        return self.title + skewing + (f", {' '.join(kinds)} index" if kinds else "")

    @property
    def needs_calibration(self) -> bool:
        """The rotation is measured, the identity is not; so are moments that are not the prompt's own."""
        return self.skew if self.index == "columns" else self.statistics != "prompt"

    def calibrate(self, query: Tensor, key: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        """rotation: A of each KV head, fp32 [num_kv_heads, head_dim, head_dim], columns by falling singular value.

        A = V of the SVD of the group's stacked queries, not centred (section 4.1). A balanced index takes `moments`.
        """
        if self.index == "balanced":
            real = torch.ones_like(key[:1, :, 0], dtype=torch.bool)
            return {name: found[0] for name, found in moments(query[None], key[None], real).items()}
        stacked = query.reshape(len(key), -1, query.shape[-1]).float()
        return {"rotation": right_vectors(stacked)}

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> State:
        """`calibration` is required where `needs_calibration`."""
        if self.needs_calibration and calibration is None:
            columns = self.index == "columns"
            cause, instead = ("skew=true", "skew=false") if columns else ("index=balanced", "statistics=prompt")
            raise ValueError(f"method.{cause}: needs a calibration; calibrate first, or set {instead}")
        self.check_lengths(lengths)
        state = PooledState if self.limited else InfiniGenState
        return state(self, geometry, lengths, calibration if self.needs_calibration else None)

    def num_columns(self, head_dim: int) -> int:
        """Columns that rehearse."""
        round_to = math.ceil if self.round_columns == "up" else math.floor
        return max(1, round_to(self.partial_weight_ratio * head_dim))


class InfiniGenState(ProjectedState):
    """The projection is A restricted to the sequence's own columns, or the balanced one; the query is rehearsed."""

    def __init__(self, method: InfiniGen, geometry: Geometry, lengths: Lengths, measured: Calibration | None) -> None:
        super().__init__(method, geometry, lengths)
        self.measured = measured

    def project(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> Tensor:
        """Step 2."""
        if self.method.index == "balanced":
            return self._balanced(layer, query, key, rows)
        if self.measured is None:
            basis = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device).expand(key.shape[1], -1, -1)
        else:
            basis = self.measured["rotation"][layer].to(key)
        return choose_columns(query, key, rows.real, basis, self.method).unsqueeze(1)

    def _balanced(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> Tensor:
        known = [] if self.measured is None else [{name: each[layer] for name, each in self.measured.items()}]
        if self.method.statistics != "calibration":
            known.append(moments(query, key, rows.real))
        pair = balanced(known, self.method.num_columns(key.shape[-1])).to(key)
        return pair.expand(len(key), -1, -1, -1, -1)

    def select(self, layer: int, rows: Rows) -> Selection:
        """Steps 3 and 4."""
        selection = self.method.select(self.scores(layer, rows), rows, self.lengths.final, self.geometry)
        return selection._replace(side=self.index_read(layer, rows.positions))


class PooledState(InfiniGenState, PoolState):
    """InfiniGen's state over a pool."""

    sequence_tensors = (*InfiniGenState.sequence_tensors, *PoolState.sequence_tensors)
    slot_tensors = {**InfiniGenState.slot_tensors, **PoolState.slot_tensors}

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> None:
        """The prompt fills the pool."""
        super().prompt(layer, query, key, value, rows)
        self.enter_prompt(layer, rows)

    def select(self, layer: int, rows: Rows) -> Selection:
        """Steps 3 and 4, a row after the other."""
        candidates = self.candidates(rows.positions)
        selection = self.choose(layer, rows, self.scores(layer, rows), candidates)
        return selection._replace(side=self.index_read(layer, candidates))


def choose_columns(query: Tensor, key: Tensor, real: Tensor, basis: Tensor, method: InfiniGen) -> Tensor:
    """Step 2: the columns of A with the largest importance over the prompt, summed in fp32.

    query: [batch, heads, prompt, head_dim]; key: [batch, num_kv_heads, prompt, head_dim]; real: [batch, prompt];
    basis: [num_kv_heads, head_dim, head_dim]. Returns [batch, num_kv_heads, head_dim, columns].
    """
    batch, num_kv_heads, prompt, head_dim = key.shape
    weight = real[:, None, :, None].to(key.dtype)
    grouped = query.reshape(batch, num_kv_heads, -1, head_dim)
    in_basis = (grouped @ basis).abs().view(batch, num_kv_heads, -1, prompt, head_dim)
    by_query = (in_basis * weight.unsqueeze(2)).sum(3, dtype=torch.float32).mean(2)  # [batch, kv, head_dim]
    by_key = ((key @ basis).abs() * weight).sum(2, dtype=torch.float32)
    wanted = method.num_columns(head_dim)
    if method.columns == "union":
        chosen = torch.zeros_like(by_key).scatter_(-1, by_query.topk(wanted).indices, 1.0)
        chosen.scatter_(-1, by_key.topk(wanted).indices, 1.0)
        kept = chosen.topk(min(2 * wanted, head_dim))  # equal width; the surplus columns are zeroed
    else:
        kept = (by_query if method.columns == "query" else by_query + by_key).topk(wanted)
    index = kept.indices[:, :, None].expand(-1, -1, head_dim, -1)
    projection = basis.expand(batch, -1, -1, -1).gather(-1, index)
    return projection * kept.values[:, :, None].ne(0) if method.columns == "union" else projection

"""InfiniGen (Lee et al., OSDI 2024): rehearse the next layer's attention on few columns, fetch only
the best tokens.

This file follows the design of the paper, step by step:
- Skewing, offline: per KV head, A = V of the SVD of the queries concentrates the scores in few
  columns (`skewing`).
- Partial weights, after the prompt (prefill stage): the columns of largest magnitude are kept of
  every key (`choose_columns`, `InfiniGenState`).
- Rehearsal and selection, in each step (decoding stage): while layer l - 1 computes, a query made
  from its attention input is scored on the partial keys. These scores choose the tokens that l
  fetches (`ScoreSelecting`).

The pool of limited size (KV cache pool management) is in `methods/infinigen_pool.py`.

The rule, and where it differs (made into docs/methods.md):

**infinigen**, by the steps of the paper:

1. **Calibrate**, once per model and text: A = V of the SVD of a KV head's stacked queries.
   `skew=false` takes the identity. The artifact folds A into the weights; here it is applied when
   scoring, which changes no score.
2. **Prompt**: the importance of a column is the sum over the prompt of |q A| and |k A|. The best
   `partial_weight_ratio` of the columns are kept of every key, on the device. `columns=query` (the
   first term) is the artifact's speed code, `columns=union` its accuracy code. `round_columns=down`
   rounds as the artifact does.
3. **Rehearse**: the query of layer l is made from the attention input of layer l - 1 and scored on
   the partial keys.
4. **Select** tokens within `alpha` of the head's best score. Their mean number over the KV heads,
   between 1 and the cap, is what each KV head reads. `alpha=null` is the paper's 4 for OPT and 5
   otherwise; `alpha=inf` always takes the cap.

The **cap** is floor(`budget` · cached), or of T with `cap_of=final`, as in the artifact's
accuracy code. `fixed_fetch=N` reads N tokens instead, as the artifact's speed code does.

**infinigen-coded** has another index, which is not of the paper: all columns in 4 bits
(`partial_weight_ratio=1 index_bits=4`). It takes 0.141 of a token at head_dim 64, where the paper's
20 columns take 0.156.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Self

import torch
from torch import Tensor

from methods.attention import num_true
from methods.base import (
    Calibration,
    Geometry,
    Method,
    PromptRows,
    QueryRows,
    Selection,
    TokenCounts,
    When,
    floor_frac,
    require,
)
from methods.compiled import kernels_for
from methods.projection import BITS_MEANING, INDEX_BITS, ProjectedState, right_vectors
from methods.selection import Selecting, SelectingBy, at_least, hide, largest
from methods.settings import Allowed, least, one_of, setting, share

ALPHA, ALPHA_OTHER = {"opt": 4.0}, 5.0
"""The paper's alpha, by family (section 5.1)."""


# Skewing, offline


def skewing(query: Tensor, num_kv_heads: int) -> Tensor:
    """A = V of the SVD of each KV head's stacked queries, not centred: fp32 [num_kv_heads,
    head_dim, head_dim], columns by falling singular value. query: [heads, tokens, head_dim]."""
    stacked = query.reshape(num_kv_heads, -1, query.shape[-1]).float()
    return right_vectors(stacked)


# Prefill stage: partial weights


def choose_columns(
    query: Tensor, key: Tensor, real: Tensor, basis: Tensor, method: InfiniGen
) -> Tensor:
    """The columns of A with the largest importance over the prompt, summed in fp32.

    query: [batch, heads, prompt, head_dim]; key: [batch, num_kv_heads, prompt, head_dim]; real:
    [batch, prompt]; basis: [num_kv_heads, head_dim, head_dim]. Returns [batch, num_kv_heads,
    head_dim, columns].
    """
    batch, num_kv_heads, prompt, head_dim = key.shape
    weight = real[:, None, :, None].to(key.dtype)
    grouped = query.reshape(batch, num_kv_heads, -1, head_dim)
    in_basis = (grouped @ basis).abs().view(batch, num_kv_heads, -1, prompt, head_dim)
    in_basis = in_basis * weight.unsqueeze(2)
    by_query = in_basis.sum(3, dtype=torch.float32).mean(2)  # [batch, kv, head_dim]
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


# Decoding stage: rehearsal


class InfiniGenState(ProjectedState):
    """The projection is A restricted to the sequence's own columns; the query is rehearsed.

    measured[layer]: the rotation A of a layer whose prompt has not come yet.
    """

    replayable = True

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        self.measured = by_layer(calibration, self.method, self.geometry)

    def project(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> Tensor:
        """The columns, after the prompt. Nothing needs the layer's calibration afterwards, so it
        is dropped."""
        measured = self.measured.pop(layer, None)
        if measured is None:
            identity = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device)
            basis = identity.expand(key.shape[1], -1, -1)
        else:
            basis = measured["rotation"].to(key)
        return choose_columns(query, key, rows.real, basis, self.method).unsqueeze(1)

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """The rehearsal and the choice, for a query that is made one layer ahead."""
        scores = self.scores(layer, rows)
        selection = self.method.choose(scores, rows, self.lengths.final, self.geometry)
        return selection._replace(side=self.index_read(layer, rows.positions))


def by_layer(
    calibration: Calibration | None, method: Method, geometry: Geometry
) -> dict[int, Calibration]:
    """The calibration of each layer under the method, apart, so that a layer's can be dropped."""
    if calibration is None:
        return {}
    measured: dict[int, Calibration] = {}
    for layer in range(method.dense_layers, geometry.num_layers):
        measured[layer] = {name: tensor[layer].clone() for name, tensor in calibration.items()}
    return measured


# Decoding stage: selection


@dataclass(frozen=True)
class Capped(Method):
    """A number of tokens that is known from the lengths: a share of the cache, or so many.

    The paper's text ("up to 20 % of the KV cache") leaves open what the cap is a share of. The
    artifact's accuracy code takes T, its speed code a fixed number of tokens.
    """

    budget: float = setting(0.2, "cap: the largest share that a row reads", share())
    cap_of: str = setting(
        "cached",
        "the cap is a share of the tokens cached at a row, or of T, the final number",
        one_of("cached", "final"),
    )
    fixed_fetch: int | None = setting(
        None, "this many tokens in place of what the cap says", least(1, null=True)
    )

    def tokens_read(self, counts: TokenCounts, layer: int) -> float | None:
        return self.max_tokens_read(counts, layer)

    def max_tokens_read(self, counts: TokenCounts, layer: int) -> int:
        if self.fixed_fetch is not None:
            return min(self.fixed_fetch, counts.cached)
        whole = counts.cached if self.cap_of == "cached" else counts.final
        return min(counts.cached, max(1, int(self.budget * whole)))

    def with_budget(self, frac: float) -> Self:
        return replace(self, budget=frac, fixed_fetch=None)

    def artifact_budget(self) -> float:
        return self.budget if self.fixed_fetch is None else 1.0

    def limits(self, cached: Tensor, final: Tensor) -> tuple[float, int, Tensor]:
        """The cap as max(least, floor(frac * whole)): frac, least, and whole, int [batch, rows].

        cached: int [batch, rows]; final: int [batch], T.
        """
        if self.fixed_fetch is not None:
            return 0.0, self.fixed_fetch, cached
        whole = cached if self.cap_of == "cached" else final[:, None].expand_as(cached)
        return self.budget, 1, whole

    def cap(self, cached: Tensor, final: Tensor) -> Tensor:
        """Tokens that a row reads at most, int [batch, rows]; arguments of `limits`."""
        frac, least, whole = self.limits(cached, final)
        return torch.minimum(floor_frac(frac, whole).clamp(min=least), cached)

    def best(self, values: Tensor, cached: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """The mask of the largest values, as many as the cap says, and their number, fp64 [batch,
        rows]."""
        if kernels := kernels_for(values):
            frac, least, whole = self.limits(cached, final)
            return kernels.largest(values, frac=frac, least=least, whole=whole, cached=cached)
        count = self.cap(cached, final)
        return largest(values, count), count.double()


@dataclass(frozen=True)
class ScoreSelecting(Capped, Selecting):
    """The count rule: tokens within `alpha` of the best score, at most the cap."""

    alpha: float | None = setting(
        None,
        "distance to the best score, in scaled logits; null: 4 for OPT, 5 otherwise (section 5.1); "
        "inf: always the cap",
        Allowed("a number >= 0, inf or null", lambda value: value is None or value >= 0),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        one_scale = self.group == "best" or self._counts_by_cap
        by_group = f"inf with group={self.group}, or set group=best"
        require(one_scale or self.alpha is None, "alpha", self.alpha, by_group)
        by_alpha = "best, the distance that alpha bounds; or set alpha=inf"
        require(one_scale, "group", self.group, by_alpha)

    @property
    def _counts_by_cap(self) -> bool:
        return self.fixed_fetch is not None or self.alpha == math.inf

    def tokens_read(self, counts: TokenCounts, layer: int) -> float | None:
        known = self._counts_by_cap and self.group != "union"
        return self.max_tokens_read(counts, layer) if known else None

    def max_tokens_read(self, counts: TokenCounts, layer: int) -> int:
        return counts.cached if self.group == "union" else super().max_tokens_read(counts, layer)

    def with_budget(self, frac: float) -> Self:
        """Set by the cap alone: alpha becomes inf."""
        return replace(super().with_budget(frac), alpha=math.inf)

    def kernels(self, scores: Tensor) -> ModuleType | None:
        """The kernels that choose by these scores and leave them as they are; None where torch
        chooses."""
        fused = self.group in ("best", "sum_probs") and not self.num_sinks and not self.recent_frac
        return kernels_for(scores) if fused else None

    def choose(
        self, scores: Tensor, rows: QueryRows, final: Tensor, geometry: Geometry,
        cached: Tensor | None = None, order: Tensor | None = None,
    ) -> Selection:  # fmt: skip
        """Each KV head's best tokens.

        scores: [batch, num_kv_heads, group, rows, slots], scaled; overwritten, but by `kernels`.
        Those of slots that are not visible may be anything. final: int [batch], T; cached: int
        [batch, rows], number of visible tokens, if it is not the rows' position. order: int64
        [batch, num_kv_heads, slots], the order in which equal scores are taken; None: by slot.
        """
        cached = rows.positions if cached is None else cached
        alpha = ALPHA.get(geometry.family, ALPHA_OTHER) if self.alpha is None else self.alpha
        if kernels := self.kernels(scores):
            if self.group == "sum_probs":
                relative, within = kernels.summed_probs(scores, rows), None
            else:
                relative, within = kernels.relative(scores, rows, alpha)
            within = None if self._counts_by_cap else within
            frac, least, whole = self.limits(cached, final)
            sizes = {"frac": frac, "least": least, "whole": whole, "cached": cached}
            return Selection(*kernels.largest(relative, within, order, **sizes))
        hide(scores, rows)
        count, relative = self.cap(cached, final), None
        if not self._counts_by_cap:
            relative = self.reduced(scores)
            # [batch, sets, rows]
            above = num_true(at_least(relative, relative.new_full((), -alpha)))
            mean = above.sum(1) // above.shape[1]
            count = torch.minimum(mean.clamp(min=1), count)
        tokens = rows.slot_positions
        forced = self.forced(tokens, tokens, rows.positions, count)
        if relative is None or forced is not None:  # relative scores stay what they are
            relative = self.reduced(scores, forced)
        return Selection(*self.joined(largest(relative, count, order), count, geometry))


@dataclass(frozen=True)
class InfiniGen(ScoreSelecting, SelectingBy):
    """InfiniGen's settings beside the count rule's; defaults are the paper's (section 5.1).

    Source: InfiniGen (OSDI 2024)
    Keeps: every token; partial keys
    Reads: the best by a rehearsal one layer ahead
    """

    partial_weight_ratio: float = setting(0.3, "share of the columns that rehearse", share())
    round_columns: str = setting(
        "up", "how their number is rounded; down as in the artifact", one_of("up", "down")
    )
    columns: str = setting(
        "sum",
        "importance of a column: sum of |q A| and |k A| (the paper), query alone (the artifact's "
        "speed code), union of the best by either (its accuracy code)",
        one_of("sum", "query", "union"),
    )
    skew: bool = setting(True, "rotate queries and keys by A first; false: the identity")
    index_bits: int | None = setting(None, BITS_MEANING, INDEX_BITS)

    when: When = "previous_layer"
    dense_layers: int = 2  # `layer_id > 1` in the artifact: layer 1 is the first that predicts

    state = InfiniGenState

    @property
    def title(self) -> str:
        """Skewing is half of the method; another index is another method."""
        skewing = "" if self.skew else " without skewing"
        index = "" if self.index_bits is None else ", coded index"
        return "InfiniGen" + skewing + index

    @property
    def needs_calibration(self) -> bool:
        """True for a rotation, which the identity is not."""
        return self.skew

    def calibrate(
        self, query: Tensor, key: Tensor, geometry: Geometry, earlier: Sequence[Calibration]
    ) -> Calibration:
        """rotation: A of each KV head, as `skewing` makes it."""
        return {"rotation": skewing(query, len(key))}

    def num_columns(self, head_dim: int) -> int:
        """Columns that rehearse."""
        round_to = math.ceil if self.round_columns == "up" else math.floor
        return max(1, round_to(self.partial_weight_ratio * head_dim))

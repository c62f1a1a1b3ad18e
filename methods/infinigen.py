"""InfiniGen (Lee et al., OSDI 2024): rehearse the next layer's attention on few columns, fetch only
the best tokens.

Steps as in section 4 of the paper:
1. Offline, per KV head, A = V of the SVD of the queries concentrates the scores in few columns
("skewing").
2. After the prompt, the columns of largest magnitude are kept of every key ("partial keys").
3. While layer l - 1 computes, a query made from its attention input is scored on the partial keys
("rehearsal").
4. These scores choose the tokens that layer l fetches (`ScoreSelecting`).
A pool of limited size (section 4.4) chooses its victims as `PooledState` says.

`Oracle` is step 4 with the true scores: the upper bound of any selection of that size.

`index=balanced` replaces steps 1 and 2 by the best pair of projections to as few numbers: query .
key is nearly (W_q^T query) . (W_k^T key). Scores q^T A k with A = W_q W_k^T differ from q^T k by an
expected square of |L_q^T (I - A) L_k|^2 (Frobenius), where L_q L_q^T = E[q q^T] and L_k L_k^T =
Cov(k). Keys are centred: a number that all scores of a query share changes no choice. With the SVD
L_q^T L_k = P S R^T, the best A of rank r is the one whose L_q^T A L_k is that SVD cut to r (Eckart
and Young): W_q = L_k R_r S_r^(-1/2), W_k = L_q P_r S_r^(-1/2). This is balanced truncation of
control theory in its square-root form.

The rule, and where it differs (made into docs/methods.md):

**oracle** selects as InfiniGen by the true scores: the upper bound of any selection of that size.
It needs every key on the device (`placement=device`).

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

The **cap** is floor(`max_fetch_frac` · cached), or of T with `cap_of=final`, as in the artifact's
accuracy code. `fixed_fetch=N` reads N tokens instead, as the artifact's speed code does.

The **pool** (section 4.4) holds `pool_tokens` tokens, or `pool_frac` of T, for each layer, sequence
and KV head. A token that enters a full pool replaces one: the oldest (`pool_policy=fifo`), the one
fetched longest ago (`lru`) or least often (`counter`), among the floor((1 - `protect_recent`) ·
capacity) oldest. `eviction=artifact` follows the artifact's simulation: a victim stays a candidate
and stays the worst, so `lru` and `counter` evict the same token again and again. It frees no slot,
so it can only be scored.

Two presets have another **index**; neither is of the paper. **infinigen-coded** keeps all columns
in 4 bits (`partial_weight_ratio=1 index_bits=4`): 0.141 of a token at head_dim 64, where the
paper's 20 columns are 0.156. **infinigen-balanced** keeps as many numbers as the paper, by the pair
of projections with the least expected squared error of q · k, from second moments of queries and
keys (`statistics`: of the prompt, the calibration text, or both). `columns` and `skew` then play no
part. `methods/infinigen.py` has the formulas. **infinigen2** goes further: no exempt layer, the
layer's own query, the sum of a group's probabilities, and a balanced index in 4 bits with
projections in 4 bits ([what changed](results.md#infinigen2)).

A balanced index in few bits (`index_bits`) takes the mean of the prompt's keys off before it codes
them, and scales its columns to variance 1. The projections are a sequence's own and stay on the
device with its index. `projection_bits` codes them once, after the prompt: each row of numbers,
which one channel of a query or key meets, has its own minimum and step, since channels differ a
hundredfold where queries and keys have biases. W_k is coded first. W_q is then the one that makes
the most of that W_k, and is coded too.

With `rest=sampled` (the preset **infinigen2-sampled**) a row reads as many tokens, but not only the
best ones. Let p be a token's estimated probability, summed over the group, times the distance of
its value from the prompt's mean value: how much the output would miss it. A byte a token holds that
distance. Let u be the token's random number in (0, 1). The tokens with the largest p / u are read,
and c is the largest p / u of the others. A token with p >= c counts once, and any other counts
c / p times in the softmax, so that numerator and denominator of the attention are right on average
for every query head (priority sampling). The numbers u are hashes of `seed`, layer, KV head and
token. They stay the same from row to row, so that a step draws nearly what the step before drew,
and rows that stay on the device are found there. The sample needs `group=sum_probs`, a fixed number
of tokens (`alpha=inf` or `fixed_fetch`) and an unlimited pool. `method=oracle` has it, too, by the
true probabilities alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Self

import torch
from torch import Tensor

from methods.attention import num_true
from methods.base import (
    EMPTY,
    Calibration,
    Geometry,
    PromptRows,
    QueryRows,
    Selection,
    State,
    TokenCounts,
    When,
    floor_frac,
    require,
)
from methods.compiled import kernels_for
from methods.evicting import EvictingState
from methods.projected import (
    BITS_MEANING,
    INDEX_BITS,
    ProjectedState,
    right_vectors,
    tokens_of,
)
from methods.sampling import lasting_numbers, log_weights, sampled
from methods.selection import Selecting, SelectingBy, at_least, largest
from methods.settings import Allowed, least, one_of, setting, share

ALPHA, ALPHA_OTHER = {"opt": 4.0}, 5.0
"""The paper's alpha, by family (section 5.1)."""
SATURATED = 255
"""A fetch counter of a pool that reaches this halves all counters of its head."""
STEPS_OF_TWO = 8
"""Steps of a coded distance in which it doubles."""
NEVER = torch.iinfo(torch.int64).max
RIDGE = 1e-4
"""Added to the diagonals of the moments, as a share of their mean, growing to twice as much along
the diagonal: no two directions tie that few tokens do not span."""
MOMENT_TOKENS = 1024
"""Tokens of all sequences whose queries and keys are in fp64 at a time, as the moments are summed.
Of OPT-13B they take 0.2 GB, where a prompt of 8 x 1,920 tokens would take 3."""
TIE = 1e-9
"""Added to the diagonal of the partial keys' covariance, as a share of its mean."""


@dataclass(frozen=True)
class ScoreSelecting(Selecting):
    """The count rule: tokens within `alpha` of the best score, at most `max_fetch_frac` of the
    cache.

    The paper's text ("up to 20 % of the KV cache") leaves open what the cap is a share of. The
    artifact's accuracy code takes T, its speed code a fixed number of tokens.
    """

    alpha: float | None = setting(
        None,
        "distance to the best score, in scaled logits; null: 4 for OPT, 5 otherwise (section 5.1); "
        "inf: always the cap",
        Allowed("a number >= 0, inf or null", lambda value: value is None or value >= 0),
    )
    max_fetch_frac: float = setting(0.2, "cap: the largest share that a row reads", share())
    cap_of: str = setting(
        "cached",
        "the cap is a share of the tokens cached at a row, or of T, the final number",
        one_of("cached", "final"),
    )
    fixed_fetch: int | None = setting(
        None, "this many tokens instead of alpha and the cap", least(1, null=True)
    )
    rest: str = setting(
        "dropped",
        "tokens that are not read: dropped, or sampled: the likely ones are read, and a weighted "
        "sample stands for the others",
        one_of("dropped", "sampled"),
    )
    seed: int = setting(0, "of the sample", least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        by_probs = self.rest == "dropped" or self.group == "sum_probs"
        require(by_probs, "rest", self.rest, f"dropped with group={self.group}, or set sum_probs")
        none_forced = self.rest == "dropped" or not (self.num_sinks or self.recent_frac)
        require(none_forced, "rest", self.rest, "dropped with num_sinks or recent_frac")
        one_scale = self.group == "best" or self._counts_by_cap
        alpha_given = self.alpha is not None
        require(
            one_scale or not alpha_given,
            "alpha",
            self.alpha,
            f"inf with group={self.group}, or set group=best",
        )
        require(
            one_scale, "group", self.group, "best, the distance that alpha bounds; or set alpha=inf"
        )

    @property
    def _counts_by_cap(self) -> bool:
        return self.fixed_fetch is not None or self.alpha == math.inf

    def tokens_read(self, counts: TokenCounts, layer: int) -> float | None:
        return (
            self.max_tokens_read(counts, layer)
            if self._counts_by_cap and self.group != "union"
            else None
        )

    def max_tokens_read(self, counts: TokenCounts, layer: int) -> int:
        if self.group == "union":
            return counts.cached
        if self.fixed_fetch is not None:
            return min(self.fixed_fetch, counts.cached)
        whole = counts.cached if self.cap_of == "cached" else counts.final
        return min(counts.cached, max(1, int(self.max_fetch_frac * whole)))

    def with_size(self, frac: float) -> Self:
        """Sized by the cap alone: alpha becomes inf."""
        return replace(self, alpha=math.inf, max_fetch_frac=frac, fixed_fetch=None)

    def artifact_budget(self) -> float:
        return self.max_fetch_frac

    @property
    def full_title(self) -> str:
        """A sampled rest makes another method."""
        return self.title + (", sampled rest" if self.rest == "sampled" else "")

    def choose(
        self, scores: Tensor, rows: QueryRows, final: Tensor, geometry: Geometry,
        cached: Tensor | None = None, order: Tensor | None = None, layer: int = 0,
        distances: Tensor | None = None,
    ) -> Selection:  # fmt: skip
        """Each KV head's best tokens, or a sample by their worth (`rest`).

        scores: [batch, num_kv_heads, group, rows, slots], scaled; overwritten. Those of slots that
        are not visible may be anything. final: int [batch], T; cached: int [batch, rows], number of
        visible tokens, if it is not the rows' position. order: int64 [batch, num_kv_heads, slots],
        the order in which equal scores are taken; None: by slot. For a sample, layer: decides the
        numbers; distances: factors of the tokens' worth, fp32 [batch, num_kv_heads, slots], above
        0; None: all are 1.
        """
        cached = rows.positions if cached is None else cached
        whole = cached if self.cap_of == "cached" else final[:, None].expand_as(cached)
        frac, least = (
            (self.max_fetch_frac, 1) if self.fixed_fetch is None else (0.0, self.fixed_fetch)
        )
        alpha = ALPHA.get(geometry.family, ALPHA_OTHER) if self.alpha is None else self.alpha
        fused = self.group in ("best", "sum_probs") and not self.num_sinks and not self.recent_frac
        if fused and (kernels := kernels_for(scores)):
            if self.group == "sum_probs":
                relative, within = kernels.summed_probs(self.by_set(scores), rows), None
            else:
                relative, within = kernels.relative(self.by_set(scores), rows, alpha)
            within = None if self._counts_by_cap else within
            is_sample = self.rest == "sampled"
            if distances is not None:
                relative = relative * self._of_sets(distances)
            ranked = kernels.ranked(relative, rows, self.seed, layer) if is_sample else relative
            mask, num_read = kernels.largest(
                ranked, within, order, frac=frac, least=least, whole=whole, cached=cached
            )
            if not is_sample:
                return Selection(mask, num_read)
            return Selection(mask, num_read, bias=log_weights(relative, ranked, mask).unsqueeze(2))
        first = 0
        if scores.device.type == "cpu":
            # In replay all rows see most slots: those before the first hidden one.
            hidden = rows.slot_positions.numpy() >= int(rows.positions.min())
            first = int(hidden.any((0, 1)).argmax())
        positions = rows.positions[:, None, :, None]
        visible = rows.slot_positions[:, :, None, first:] < positions
        scores[..., first:].masked_fill_(~visible.unsqueeze(2), -math.inf)
        count = torch.minimum(floor_frac(frac, whole).clamp(min=least), cached)
        tokens = rows.slot_positions
        relative = self.reduced(scores, self.forced(tokens, tokens, rows.positions, count))
        if self.rest == "sampled":
            if distances is not None:
                relative *= self._of_sets(distances)
            numbers = lasting_numbers(self.seed, layer, rows, relative.shape[1])
            sample = sampled(relative, numbers, count)
            return Selection(sample.mask, count.double(), bias=sample.log_weights.unsqueeze(2))
        if not self._counts_by_cap:
            above = num_true(at_least(relative, relative.new_tensor(-alpha)))  # [batch, sets, rows]
            mean = above.sum(1) // above.shape[1]
            count = torch.minimum(mean.clamp(min=1), count)
        return Selection(*self.joined(largest(relative, count, order), count, geometry))

    def _of_sets(self, distances: Tensor) -> Tensor:
        """Distances of each set, [batch, sets, 1, slots]: of a KV head, or the layer's mean."""
        if self.covers == "layer":
            distances = distances.mean(1, keepdim=True)
        return distances.unsqueeze(2)


class OracleState(State):
    """Step 4 over the true scores of the cached tokens."""

    def select(self, layer: int, rows: QueryRows) -> Selection:
        scores = rows.true_scores().clone()
        selection = self.method.choose(scores, rows, self.lengths.final, self.geometry, layer=layer)
        every_key = rows.positions * (self.geometry.head_dim / self.geometry.elements)
        return selection._replace(side=every_key.double())


@dataclass(frozen=True)
class Oracle(ScoreSelecting):
    """Selects by the true scores. They need every key on the device, so this is no offloading
    method."""

    when = "true_scores"  # they are known no earlier

    title = "Oracle"
    state = OracleState


class InfiniGenState(ProjectedState):
    """The projection is A restricted to the sequence's own columns, or the balanced one; the query
    is rehearsed.

    centre[layer]: [batch, num_kv_heads, 1, columns], what a balanced index in few bits takes off
    every key before it is coded: the mean of the prompt's. All scores of a query lose the same, so
    the choice stays.
    measured[layer]: the calibration of a layer whose prompt has not come yet.
    """

    sequence_tensors = (*ProjectedState.sequence_tensors, "centre")
    centre: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        self.measured: dict[int, Calibration] = {}
        if calibration is not None:
            for layer in range(self.method.num_exempt_layers, self.geometry.num_layers):
                of_layer = {name: tensor[layer].clone() for name, tensor in calibration.items()}
                self.measured[layer] = of_layer

    def project(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> Tensor:
        """Step 2. Nothing needs the layer's calibration afterwards, so it is dropped."""
        measured = self.measured.pop(layer, None)
        if self.method.index == "balanced":
            return self._balanced(layer, query, key, rows, measured)
        if measured is None:
            basis = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device).expand(
                key.shape[1], -1, -1
            )
        else:
            basis = measured["rotation"].to(key)
        return choose_columns(query, key, rows.real, basis, self.method).unsqueeze(1)

    def _balanced(
        self, layer: int, query: Tensor, key: Tensor, rows: PromptRows, measured: Calibration | None
    ) -> Tensor:
        """The balanced pair, and the centre of an index in few bits."""
        known = [] if measured is None else [measured]
        if self.method.statistics != "calibration":
            known.append(moments(query, key, rows.real))
        is_coded = self.method.index_bits is not None
        pair = balanced(known, self.method.num_columns(key.shape[-1]), white_keys=is_coded)
        pair = pair.expand(len(key), -1, -1, -1, -1)
        codec, columns = self.projection_codec, pair.shape[-1]
        if codec is None:
            pair = pair.to(key)
        else:
            key_side = codec.encode(pair[:, 1] @ mixing(columns, key.device))
            as_read = codec.decode(key_side, columns, torch.float32)
            pair = torch.stack([codec.encode(fitted_query_side(known, as_read)), key_side], 1)
        if is_coded:
            real = rows.real[:, None, :, None]
            total = (key * real).sum(2, keepdim=True, dtype=torch.float32)
            mean = total / real.sum(2, keepdim=True)
            self.centre[layer] = self.times(mean.to(key), pair[:, 1])
        return pair

    def partial_key(self, layer: int, key: Tensor) -> Tensor:
        partial = super().partial_key(layer, key)
        return partial - self.centre[layer] if layer in self.centre else partial

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """The partial keys, the projection, and the mean that its coded index takes off."""
        read = super().index_read(layer, positions)
        if layer in self.centre:
            read = read + tokens_of(self.centre[layer][0, 0], self.geometry)
        return read

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """Steps 3 and 4."""
        scores = self.scores(layer, rows)
        selection = self.method.choose(scores, rows, self.lengths.final, self.geometry, layer=layer)
        return selection._replace(side=self.index_read(layer, rows.positions))


class SampledState(InfiniGenState):
    """InfiniGen's state that draws a sample (`rest=sampled`).

    mean_value[layer]: [batch, num_kv_heads, 1, value_dim], of the prompt. distances[layer]: uint8
    [batch, num_kv_heads, slots], how far each token's value lies from it, in steps of a logarithm
    (`coded_distances`).
    """

    sequence_tensors = (*InfiniGenState.sequence_tensors, "mean_value")
    slot_tensors = {**InfiniGenState.slot_tensors, "distances": 0}
    mean_value: dict[int, Tensor]
    distances: dict[int, Tensor]

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        real = rows.real[:, None, :, None]
        total = (value * real).sum(2, keepdim=True, dtype=torch.float32)
        self.mean_value[layer] = (total / real.sum(2, keepdim=True)).to(value)
        shape = (*value.shape[:2], rows.num_slots)
        self.distances[layer] = torch.zeros(shape, dtype=torch.uint8, device=value.device)
        super().prompt(layer, query, key, value, rows)  # it calls `append`

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice
    ) -> None:
        super().append(layer, key, value, positions, slots)
        distances = (value.float() - self.mean_value[layer].float()).norm(dim=-1)
        self.distances[layer][:, :, slots] = coded_distances(distances)

    def select(self, layer: int, rows: QueryRows) -> Selection:
        scores = self.scores(layer, rows)
        distances = decoded_distances(self.distances[layer][..., : scores.shape[-1]])
        selection = self.method.choose(
            scores, rows, self.lengths.final, self.geometry, layer=layer, distances=distances
        )
        return selection._replace(side=self.index_read(layer, rows.positions))

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """The index, a byte a token, and the mean value, which a row's own value is compared
        with."""
        of_bytes = positions.double() / (2 * self.geometry.elements)
        mean = tokens_of(self.mean_value[layer][0, 0], self.geometry)
        return super().index_read(layer, positions) + of_bytes + mean


def coded_distances(distances: Tensor) -> Tensor:
    """Numbers from 2^-16 to 2^15.9 as bytes, in steps of an eighth of a power of 2; others as the
    nearest of them."""
    steps = distances.clamp(min=2.0**-16).log2_().mul_(STEPS_OF_TWO).round_()
    return steps.add_(128).clamp_(max=255).to(torch.uint8)


def decoded_distances(codes: Tensor) -> Tensor:
    """What `coded_distances` coded, times 2^16, so that none is below 1: fp32."""
    return codes.float().div_(STEPS_OF_TWO).exp2_()


# A pool with a limit


class PooledState(InfiniGenState, EvictingState):
    """InfiniGen's state over a pool that has a limit (section 4.4).

    `fifo` evicts the lowest position, `lru` the oldest last fetch, `counter` the smallest number of
    fetches; ties go to the lowest position. Victims come from the floor((1 - protect_recent) *
    capacity) lowest positions present.

    `eviction: artifact` follows the artifact's simulation (accuracy/src/modeling_*_ours_prune.py):
    candidates are all tokens of the sequence's first half, evicted ones included, and the dense
    rows of the prompt count as fetches. An evicted token is never fetched again, so it stays the
    worst one: LRU and counter evict the same token again and again, so almost nothing is evicted.
    Its FIFO takes token t - capacity and really evicts.

    capacities: tokens that each sequence's pool holds, int [batch]; unprotected: number of the
    oldest of them, which may leave. fetches[layer], last_fetch[layer]: int32, shaped like
    tokens[layer]: how often, and in which row last, a token was selected; a token that enters has 0
    and its own position.
    """

    sequence_tensors = (*InfiniGenState.sequence_tensors, "capacities", "unprotected")
    slot_tensors = {
        **InfiniGenState.slot_tensors,
        **EvictingState.slot_tensors,
        "fetches": 0,
        "last_fetch": 0,
    }
    selects_without_own = False
    fetches: dict[int, Tensor]
    last_fetch: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        method, final = self.method, self.lengths.final
        self.simulates = method.eviction == "artifact"
        by_share = method.pool_tokens is None
        self.capacities = (
            floor_frac(method.pool_frac, final) if by_share else final.clamp(max=method.pool_tokens)
        )
        self.unprotected = floor_frac(1 - method.protect_recent, self.capacities).clamp(min=1)
        least = f"larger, to hold at least 1 of {int(final.min())} tokens"
        require(bool((self.capacities >= 1).all()), "pool_frac", method.pool_frac, least)

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        """The prompt enters in order. No token was fetched yet, so every policy evicts the lowest
        position."""
        super().prompt(layer, query, key, value, rows)
        self.enter_prompt(layer, rows)
        tokens, lengths = self.tokens[layer], rows.lengths[:, None, None].int()
        self.fetches[layer], self.last_fetch[layer] = torch.zeros_like(tokens), tokens.clone()
        if self.simulates:  # each dense row is a fetch of all tokens up to its own
            self.fetches[layer] = (lengths - tokens).clamp(min=0)
        if not self.simulates or self.method.pool_policy == "fifo":
            tokens.masked_fill_(tokens < lengths - self.capacities[:, None, None], EMPTY)

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """Steps 3 and 4, one row after the other: each selects, then its own token enters."""
        scores = self.scores(layer, rows)
        num_candidates = rows.positions
        if not self.simulates:
            num_candidates = torch.minimum(num_candidates, self.capacities[:, None])
        own = self.enter(layer, rows)
        held = self.tokens[layer][..., : scores.shape[-1]]
        masks, counts = [], []
        for row in range(scores.shape[3]):
            by_age = held.sort(-1)
            this = slice(row, row + 1)
            one = replace(
                rows,
                positions=rows.positions[:, this],
                real=rows.real[:, this],
                own_slots=own[..., this],
            )
            given = (
                scores[:, :, :, this],
                replace(one, slot_positions=held),
                self.lengths.final,
                self.geometry,
            )
            # Live slots are reused; ties go to the lowest token.
            chosen = self.method.choose(
                *given, cached=num_candidates[:, this], order=by_age.indices
            )
            self.use(layer, one, chosen.mask[:, :, 0], by_age.values)
            masks.append(chosen.mask)
            # The artifact's cap is a share of all tokens, of which its FIFO may hold fewer.
            counts.append(
                chosen.mask.sum(-1).double().mean(1) if self.simulates else chosen.num_read
            )
        if len(masks) > 1:  # `torch.cat` would copy a single mask
            masks, counts = [torch.cat(masks, 2)], [torch.cat(counts, 1)]
        return Selection(masks[0], counts[0], self.index_read(layer, num_candidates))

    def use(self, layer: int, row: QueryRows, mask: Tensor, ascending: Tensor) -> None:
        """Count the slots that a row fetched (`mask`, bool [batch, num_kv_heads, slots]), and evict
        from full pools.

        ascending: the tokens in the slots, sorted.
        """
        slots, positions, tokens = mask.shape[-1], row.positions[:, 0], self.tokens[layer]
        if row.padded:
            mask, positions = (
                mask & row.real[:, :, None],
                positions.masked_fill(~row.real[:, 0], -1),
            )
        kernels = kernels_for(tokens)
        if kernels is not None and not self.simulates:
            data = tokens, self.fetches[layer], self.last_fetch[layer]
            limits = self.capacities, self.unprotected
            kernels.use(mask, ascending, data, positions, limits, self.method.pool_policy)
            return
        position = positions[:, None, None]
        fetches, last_fetch = (data[layer][..., :slots] for data in (self.fetches, self.last_fetch))
        fetches.scatter_(-1, row.own_slots, 0)
        last_fetch.scatter_(-1, row.own_slots, position.int().expand_as(row.own_slots))
        fetches += mask
        torch.where(mask, position.int(), last_fetch, out=last_fetch)
        if not self.simulates:
            fetches >>= (fetches >= SATURATED).any(-1, keepdim=True).int()
        worth = {"fifo": torch.zeros_like(fetches), "lru": last_fetch, "counter": fetches}[
            self.method.pool_policy
        ]
        if self.simulates:
            seen = row.slot_positions.expand(worth.shape)
            leaving = artifact_victim(
                seen, self.method.pool_policy, worth, self.capacities, position
            )
        else:
            held = tokens[..., :slots]
            rank = (self.unprotected.clamp(max=slots) - 1)[:, None, None].expand(*held.shape[:2], 1)
            protected = held > ascending.gather(-1, rank)
            leaving = _order(worth, held).masked_fill(protected, NEVER).argmin(-1, keepdim=True)
        stays = position < self.capacities[:, None, None]
        tokens.scatter_(-1, leaving.masked_fill_(stays, tokens.shape[-1] - 1), EMPTY)  # the dump


def artifact_victim(
    positions: Tensor, policy: str, worth: Tensor, capacities: Tensor, position: Tensor
) -> Tensor:
    """The slot that the artifact frees after the row at `position` [batch, 1, 1]: int64 [batch,
    num_kv_heads, 1].

    positions: int [batch, num_kv_heads, slots], of every token that ever entered; worth: same
    shape, the smallest leaves, of equal ones the lowest position; capacities: int [batch].
    """
    if policy == "fifo":
        return (positions == position - capacities[:, None, None]).int().argmax(-1, keepdim=True)
    return (
        _order(worth, positions)
        .masked_fill(positions >= position // 2, NEVER)
        .argmin(-1, keepdim=True)
    )


def _order(worth: Tensor, positions: Tensor) -> Tensor:
    """One number to order by: worth, then position."""
    return (worth.long() << 31) + positions


# The settings


@dataclass(frozen=True)
class InfiniGen(ScoreSelecting, SelectingBy):
    """InfiniGen's settings beside the count rule's; defaults are the paper's (section 5.1).

    At most one of `pool_tokens` and `pool_frac` limits the pool of each layer, sequence and KV
    head. `PooledState` says which token leaves a full pool.
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
    index: str = setting(
        "columns",
        "what the rehearsal keeps of the keys: columns (the paper), or balanced projections",
        one_of("columns", "balanced"),
    )
    statistics: str = setting(
        "both",
        "text that a balanced index follows",
        one_of("prompt", "calibration", "both"),
    )
    index_bits: int | None = setting(None, BITS_MEANING, INDEX_BITS)
    projection_bits: int | None = setting(
        None,
        "bits of each number of a balanced index's projections, of which every sequence has its "
        "own; null keeps the dtype of the keys",
        INDEX_BITS,
    )
    pool_tokens: int | None = setting(
        None, "limit of the pool in tokens; null: no limit", least(1, null=True)
    )
    pool_frac: float | None = setting(None, "limit of the pool as a share of T", share(null=True))
    pool_policy: str = setting(
        "counter", "the token that leaves a full pool", one_of("fifo", "lru", "counter")
    )
    protect_recent: float = setting(
        0.5, "share of the pool, its most recent tokens, that cannot leave", share(zero=True)
    )
    eviction: str = setting(
        "corrected",
        "artifact: evicted tokens stay candidates, as in the artifact's code",
        one_of("corrected", "artifact"),
    )

    when: When = "previous_layer"
    num_exempt_layers: int = 2  # `layer_id > 1` in the artifact: layer 1 is the first that predicts

    title = "InfiniGen"
    needs_prompt = True
    calibration_settings = ("index",)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_limit = self.pool_tokens is None or self.pool_frac is None
        require(one_limit, "pool_frac", self.pool_frac, "null with pool_tokens")
        has_pair = self.projection_bits is None or self.index == "balanced"
        require(has_pair, "projection_bits", self.projection_bits, "null, or set index=balanced")
        of_all = not self.limited or self.rest == "dropped"
        require(of_all, "rest", self.rest, "dropped in a limited pool")
        one_set = not self.limited or (self.covers, self.group) == ("kv_head", "best")
        require(
            one_set,
            "covers, method.group",
            f"{self.covers}, {self.group}",
            "kv_head, best in a limited pool",
        )

    @property
    def full_title(self) -> str:
        """Skewing is half of the method; another index is another method."""
        kinds = ["balanced"] * (self.index == "balanced") + ["coded"] * (
            self.index_bits is not None
        )
        skewing = "" if self.skew or self.index == "balanced" else " without skewing"
        index = f", {' '.join(kinds)} index" if kinds else ""
        return self.title + skewing + index + super().full_title.removeprefix(self.title)

    @property
    def limited(self) -> bool:
        """True if the pool has a limit."""
        return self.pool_tokens is not None or self.pool_frac is not None

    def prefetches(self, layer: int) -> bool:
        """Not in a limited pool, in which each selection counts."""
        return not self.limited and super().prefetches(layer)

    @property
    def replay_only(self) -> str | None:
        """The artifact's victims stay candidates, so their slots are never free."""
        if not self.limited or self.eviction == "corrected":
            return None
        why = "frees no slot, so it can only be scored (replay), not decoded live"
        return f"method.eviction={self.eviction}: {why}"

    @property
    def needs_calibration(self) -> bool:
        """True for a rotation (not for the identity), and for moments that are not the prompt's
        alone."""
        return self.skew if self.index == "columns" else self.statistics != "prompt"

    def calibrate(
        self, query: Tensor, key: Tensor, geometry: Geometry, earlier: Sequence[Calibration]
    ) -> Calibration:
        """rotation: A of each KV head, fp32 [num_kv_heads, head_dim, head_dim], columns by falling
        singular value.

        A = V of the SVD of the group's stacked queries, not centred (section 4.1). A balanced index
        takes `moments`.
        """
        if self.index == "balanced":
            real = torch.ones_like(key[:1, :, 0], dtype=torch.bool)
            return {name: found[0] for name, found in moments(query[None], key[None], real).items()}
        stacked = query.reshape(len(key), -1, query.shape[-1]).float()
        return {"rotation": right_vectors(stacked)}

    @property
    def state(self) -> type[State]:  # type: ignore[override]  # elsewhere the same for all settings
        if self.rest == "sampled":
            return SampledState
        return PooledState if self.limited else InfiniGenState

    def num_columns(self, head_dim: int) -> int:
        """Columns that rehearse."""
        round_to = math.ceil if self.round_columns == "up" else math.floor
        return max(1, round_to(self.partial_weight_ratio * head_dim))

    def max_tokens_read(self, counts: TokenCounts, layer: int) -> int:
        return super().max_tokens_read(
            counts._replace(cached=self.tokens_kept(counts, layer)), layer
        )

    def tokens_kept(self, counts: TokenCounts, layer: int) -> int:
        if not self.limited or self.eviction == "artifact":
            return counts.cached
        return min(counts.cached, self.pool_tokens or int((self.pool_frac or 1) * counts.final))


def choose_columns(
    query: Tensor, key: Tensor, real: Tensor, basis: Tensor, method: InfiniGen
) -> Tensor:
    """Step 2: the columns of A with the largest importance over the prompt, summed in fp32.

    query: [batch, heads, prompt, head_dim]; key: [batch, num_kv_heads, prompt, head_dim]; real:
    [batch, prompt]; basis: [num_kv_heads, head_dim, head_dim]. Returns [batch, num_kv_heads,
    head_dim, columns].
    """
    batch, num_kv_heads, prompt, head_dim = key.shape
    weight = real[:, None, :, None].to(key.dtype)
    grouped = query.reshape(batch, num_kv_heads, -1, head_dim)
    in_basis = (grouped @ basis).abs().view(batch, num_kv_heads, -1, prompt, head_dim)
    by_query = (
        (in_basis * weight.unsqueeze(2)).sum(3, dtype=torch.float32).mean(2)
    )  # [batch, kv, head_dim]
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


def moments(query: Tensor, key: Tensor, real: Tensor) -> dict[str, Tensor]:
    """query: E[q q^T] over tokens and the group; key: Cov(k); fp64 [batch, num_kv_heads, head_dim,
    head_dim] each.

    query: [batch, heads, tokens, head_dim]; key: [batch, num_kv_heads, tokens, head_dim]; real:
    bool [batch, tokens].
    """
    batch, num_kv_heads, tokens, head_dim = key.shape
    num_real = real.sum(-1)[:, None, None, None].double()
    is_real = real[:, None, :, None]
    mean = (key * is_real).sum(2, keepdim=True, dtype=torch.float64) / num_real
    of_query = key.new_zeros((batch, num_kv_heads, head_dim, head_dim), dtype=torch.float64)
    of_key = torch.zeros_like(of_query)
    at_once = max(1, MOMENT_TOKENS // batch)
    for first in range(0, tokens, at_once):
        part = slice(first, first + at_once)
        queries = query[:, :, part].double() * is_real[:, :, part]
        queries = queries.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
        centred = (key[:, :, part].double() - mean) * is_real[:, :, part]
        of_query += queries.mT @ queries
        of_key += centred.mT @ centred
    group = query.shape[1] // num_kv_heads
    return {"query": of_query / (num_real * group), "key": of_key / num_real}


def balanced(
    known: Sequence[Mapping[str, Tensor]], columns: int, *, white_keys: bool = False
) -> Tensor:
    """W_q and W_k, fp64 [batch, 2, num_kv_heads, head_dim, columns], by the sum of the `known`
    moments. Moments without a batch axis count for all sequences.

    white_keys: W_q S^(1/2) and W_k S^(-1/2) in their place. Their products are the same, and every
    column of the keys has variance 1. Coded in steps that all columns share, with an error of e^2
    in units of the keys' variance, the scores then err by e^2 sum S^2 in place of e^2 max S sum S.

    R are the eigenvectors of M^T M for M = L_q^T L_k, and P S = M R. This is faster than an SVD of
    M, and in fp64 as exact as a selection needs: on models the projections are the same to 1e-12.
    """
    left = _factor(reduce(torch.add, (measured["query"].double() for measured in known)))
    right = _factor(reduce(torch.add, (measured["key"].double() for measured in known)))
    between = left.mT @ right  # P S R^T
    _, directions = torch.linalg.eigh(between.mT @ between)  # R; S^2 rises
    strongest = _with_fixed_signs(directions.flip(-1)[..., :columns])
    images = between @ strongest  # P S
    strength = images.norm(dim=-2, keepdim=True)
    if white_keys:
        of_query, of_key = right @ strongest, left @ images / strength.square()
    else:
        of_query = right @ strongest / strength.sqrt()
        of_key = left @ images / strength.pow(1.5)
    return torch.stack([of_query, of_key], -4)


def _with_fixed_signs(vectors: Tensor) -> Tensor:
    """The columns of `vectors`, each with the sign that makes its largest element positive. The
    sign decides how a column is coded, and libraries choose it differently."""
    largest = vectors.abs().argmax(-2, keepdim=True)
    return vectors * vectors.gather(-2, largest).sign()


def mixing(columns: int, device: torch.device) -> Tensor:
    """The cosine transform, an orthogonal matrix, fp64 [columns, columns]. Columns of variance 1
    that it mixes keep variance 1, and none is much larger than another, so that one step serves a
    row of them."""
    number = torch.arange(columns, dtype=torch.float64, device=device)
    waves = torch.cos(math.pi / columns * torch.outer(number, number + 0.5))
    return waves / waves.norm(dim=1, keepdim=True)


def fitted_query_side(known: Sequence[Mapping[str, Tensor]], of_key: Tensor) -> Tensor:
    """The best W_q for a given W_k, both [batch, num_kv_heads, head_dim, columns], fp64:
    C W_k (W_k^T C W_k)^-1 with C = Cov(k), by the sum of the `known` moments.

    W_q W_k^T key is then the least-squares estimate of a centred key from its index. So
    W_q^T query . W_k^T key is that of query . key, whatever the query.
    """
    factor = _factor(reduce(torch.add, (measured["key"].double() for measured in known)))
    index = factor.mT @ of_key.double()
    # Codes may be so coarse that two columns are one.
    ridge = TIE * (index * index).sum(-2).mean(-1)[..., None, None]
    identity = torch.eye(index.shape[-1], dtype=index.dtype, device=index.device)
    covariance = index.mT @ index + ridge * identity
    return factor @ torch.linalg.solve(covariance, index.mT).mT


def _factor(moment: Tensor) -> Tensor:
    """L, lower triangular, with L L^T = moment."""
    ridge = RIDGE * moment.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp(min=RIDGE)
    unlike = torch.linspace(1, 2, moment.shape[-1], dtype=moment.dtype, device=moment.device)
    return torch.linalg.cholesky(moment + torch.diag_embed(ridge * unlike))

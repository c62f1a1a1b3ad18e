"""InfiniGen2: InfiniGen without dense layers, by each layer's own query, on a balanced index in
few bits. `InfiniGen2Sampled` reads a weighted sample in place of the best tokens. Not of the paper.

The index is the best pair of projections to as few numbers: query . key is nearly (W_q^T query) .
(W_k^T key). Scores q^T A k with A = W_q W_k^T differ from q^T k by an expected square of |L_q^T (I
- A) L_k|^2 (Frobenius), where L_q L_q^T = E[q q^T] and L_k L_k^T = Cov(k). Keys are centred: a
number that all scores of a query share changes no choice. With the SVD L_q^T L_k = P S R^T, the
best A of rank r is the one whose L_q^T A L_k is that SVD cut to r (Eckart and Young): W_q = L_k R_r
S_r^(-1/2), W_k = L_q P_r S_r^(-1/2). This is balanced truncation of control theory in its square-
root form.

The rule, and where it differs (made into docs/methods.md):

**infinigen2** differs from the paper in four things ([which](results.md#infinigen2)) and always
reads the cap (`alpha=inf`). `partial_weight_ratio` · head_dim numbers are kept of a key, by
the pair of projections with the least expected squared error of q · k, from second moments of
queries and keys (`statistics`: of the prompt, the calibration text, or both).
**infinigen-balanced** is the same index under InfiniGen's
settings: it predicts a query, as many numbers as the paper's columns, uncoded.

An index in few bits (`index_bits`) takes the mean of the prompt's keys off before it codes them,
and scales its columns to variance 1. `projection_bits` codes a sequence's projections after the
prompt: each row of numbers, which one channel of a query or key meets, has its own minimum and
step. W_k is coded first, then the W_q that makes the most of it.

**infinigen2-sampled** reads as many tokens, but not only the best ones. Let p be a token's
estimated probability, summed over the group, times the distance of its value from the prompt's mean
value. A byte a token holds that distance. Let u be the token's random number in (0, 1). The tokens
with the largest p / u are read, and c is the largest p / u of the others. A token with p >= c
counts once, and any other counts c / p times in the softmax, so that numerator and denominator of
the attention are right on average for every query head (priority sampling). The numbers u are
hashes of `seed`, layer, KV head and token. They stay the same from row to row, so that a GPU cache
has most of what a step draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from methods.base import Calibration, Geometry, PromptRows, QueryRows, Selection
from methods.codecs.integers import IntegerCodec
from methods.compiled import kernels_for
from methods.infinigen import Capped, ScoreSelecting, by_layer
from methods.projection import BITS_MEANING, INDEX_BITS, ProjectedState, tokens_of
from methods.sampling import log_weights, ranked
from methods.selection import ChoosingBy, hide, summed_probs
from methods.settings import least, one_of, setting, share

STEPS_OF_TWO = 8
"""Steps of a coded distance in which it doubles."""
RIDGE = 1e-4
"""Added to the diagonals of the moments, as a share of their mean, growing to twice as much along
the diagonal: no two directions tie that few tokens do not span."""
MOMENT_TOKENS = 1024
"""Tokens of all sequences whose queries and keys are in fp64 at a time, as the moments are summed.
Of OPT-13B they take 0.2 GB, where a prompt of 8 x 1,920 tokens would take 3."""
MOMENT_PARTS = 8
"""Parts in which a GPU sums a longer prompt, for fewer launches: in fp64 an eighth of its queries
and keys takes no more than its packed rows, which come later. A CPU keeps its order of sums."""
TIE = 1e-9
"""Added to the diagonal of the partial keys' covariance, as a share of its mean."""


@dataclass(frozen=True)
class BalancedIndex(ChoosingBy):
    """Settings of the index."""

    partial_weight_ratio: float = setting(
        0.5, "numbers of the index a key, as a share of head_dim, rounded up", share()
    )
    statistics: str = setting(
        "both", "text that the index follows", one_of("prompt", "calibration", "both")
    )
    index_bits: int | None = setting(4, BITS_MEANING, INDEX_BITS)
    projection_bits: int | None = setting(
        4,
        "bits of each number of the projections, of which every sequence has its own; null keeps "
        "the dtype of the keys",
        INDEX_BITS,
    )

    @property
    def needs_calibration(self) -> bool:
        """True for moments that are not the prompt's alone."""
        return self.statistics != "prompt"

    def calibrate(
        self, query: Tensor, key: Tensor, geometry: Geometry, earlier: Sequence[Calibration]
    ) -> Calibration:
        """Moments of one layer, as `moments` without the batch."""
        real = torch.ones_like(key[:1, :, 0], dtype=torch.bool)
        return {name: found[0] for name, found in moments(query[None], key[None], real).items()}

    def num_columns(self, head_dim: int) -> int:
        """Numbers of a key that are scored."""
        return max(1, math.ceil(self.partial_weight_ratio * head_dim))


class InfiniGen2State(ProjectedState):
    """The projection is the balanced pair.

    projection[layer]: as in `ProjectedState`, two sides. With `projection_bits` it is coded, each
    row of `columns` numbers by itself: uint8 [batch, 2, num_kv_heads, head_dim, bytes of a row].
    centre[layer]: [batch, num_kv_heads, 1, columns], what an index in few bits takes off every key
    before it is coded: the mean of the prompt's. All scores of a query lose the same, so the choice
    stays.
    measured[layer]: the moments of the calibration text, of a layer whose prompt has not come yet.
    """

    sequence_tensors = (*ProjectedState.sequence_tensors, "centre")
    replayable = True
    centre: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        self.measured = by_layer(calibration, self.method, self.geometry)
        bits = self.method.projection_bits
        self.projection_codec: IntegerCodec | None = None
        if bits is not None:  # a row is one group, as `coded_product` needs
            columns = self.method.num_columns(self.geometry.head_dim)
            self.projection_codec = IntegerCodec(f"int{bits}", group_size=columns)

    def project(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> Tensor:
        """The balanced pair, and the centre of an index in few bits. Nothing needs the layer's
        calibration afterwards, so it is dropped."""
        measured = self.measured.pop(layer, None)
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

    def index_size(self, layer: int) -> tuple[float, float]:
        """The partial keys, the projection, and the mean that its coded index takes off."""
        token_size, once = super().index_size(layer)
        if layer in self.centre:
            once += tokens_of(self.centre[layer][0, 0], self.geometry)
        return token_size, once

    def times(self, rows: Tensor, side: Tensor) -> Tensor:
        if self.projection_codec is None:
            return super().times(rows, side)
        return coded_product(rows, side, self.projection_codec).to(rows.dtype)

    def partial_query(self, layer: int, query: Tensor) -> Tensor:
        if self.projection_codec is None:
            return super().partial_query(layer, query)
        side, stacked = self.projection[layer][:, 0], query.flatten(2, 3)
        scaled = stacked.float() * self.geometry.scale
        return coded_product(scaled, side, self.projection_codec).unflatten(2, query.shape[2:4])

    def select(self, layer: int, rows: QueryRows) -> Selection:
        selection = self.choose(layer, self.scores(layer, rows), rows)
        return selection._replace(side=self.index_read(layer, rows.positions))

    def choose(self, layer: int, scores: Tensor, rows: QueryRows) -> Selection:
        """The tokens that are read, by their scaled scores."""
        return self.method.choose(scores, rows, self.lengths.final, self.geometry)


@dataclass(frozen=True)
class InfiniGen2(BalancedIndex, ScoreSelecting):
    """Reads the best tokens: by default always as many as the cap says.

    Keeps: every token; its key in few numbers of 4 bits
    Reads: the best by the layer's own query; `infinigen-balanced`: by a predicted query
    """

    budget: float = 0.1
    alpha: float | None = math.inf
    group: str = "sum_probs"

    title = "InfiniGen2"
    state = InfiniGen2State


# The sampled rest


@dataclass(frozen=True)
class SampledRest(Capped):
    """Tokens are drawn by their score. The likely ones are read, and a weighted sample stands for
    the others. A token's score is its probability, summed over the heads that choose together."""

    seed: int = setting(0, "of the sample", least(0))

    def draw(
        self,
        layer: int,
        scores: Tensor,
        rows: QueryRows,
        final: Tensor,
        distances: Tensor | None = None,
    ) -> Selection:
        """A sample of as many tokens as the cap says, and the logarithms of their weights as a
        bias.

        scores: as for `ScoreSelecting.choose`; final: int [batch], T. distances: factors of the
        tokens' score, as `coded_distances` codes them, [batch, num_kv_heads, slots]; None: all are
        1. The layer decides the random numbers.
        """
        if kernels := kernels_for(scores):
            score = kernels.summed_probs(scores, rows, distances)
        else:
            hide(scores, rows)
            score = summed_probs(scores)
            if distances is not None:
                score *= decoded_distances(distances).unsqueeze(2)
        ranks = ranked(score, self.seed, layer, rows)
        mask, num_read = self.best(ranks, rows.positions, final)
        return Selection(mask, num_read, bias=log_weights(score, ranks, mask).unsqueeze(2))


class InfiniGen2SampledState(InfiniGen2State):
    """InfiniGen2's state that draws a sample.

    mean_value[layer]: [batch, num_kv_heads, 1, value_dim], of the prompt. distances[layer]: uint8
    [batch, num_kv_heads, slots], how far each token's value lies from it, in steps of a logarithm
    (`coded_distances`).
    """

    sequence_tensors = (*InfiniGen2State.sequence_tensors, "mean_value")
    slot_tensors = {**InfiniGen2State.slot_tensors, "distances": 0}
    replayable = True
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
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice | Tensor
    ) -> None:
        super().append(layer, key, value, positions, slots)
        mean, codes = self.mean_value[layer], self.distances[layer][:, :, slots]
        kernels = kernels_for(value)
        if kernels and value.shape[2] <= kernels.MOST_ROWS:
            kernels.code_distances(value, mean, codes)
        else:
            codes.copy_(coded_distances((value.float() - mean.float()).norm(dim=-1)))
        if isinstance(slots, Tensor):  # `codes` is a copy then
            self.distances[layer][:, :, slots] = codes

    def choose(self, layer: int, scores: Tensor, rows: QueryRows) -> Selection:
        distances = self.distances[layer][..., : scores.shape[-1]]
        return self.method.draw(layer, scores, rows, self.lengths.final, distances)

    def index_size(self, layer: int) -> tuple[float, float]:
        """The index, a byte a token, and the mean value, which a row's own value is compared
        with."""
        token_size, once = super().index_size(layer)
        byte_size = 1 / (2 * self.geometry.elements)
        mean = tokens_of(self.mean_value[layer][0, 0], self.geometry)
        return token_size + byte_size, once + mean


def coded_distances(distances: Tensor) -> Tensor:
    """Numbers from 2^-16 to 2^15.9 as bytes, in steps of an eighth of a power of 2; others as the
    nearest of them."""
    steps = distances.clamp(min=2.0**-16).log2_().mul_(STEPS_OF_TWO).round_()
    return steps.add_(128).clamp_(max=255).to(torch.uint8)


def decoded_distances(codes: Tensor) -> Tensor:
    """Distances that `coded_distances` coded, times 2^16, so that none is below 1: fp32."""
    return codes.float().div_(STEPS_OF_TWO).exp2_()


@dataclass(frozen=True)
class InfiniGen2Sampled(BalancedIndex, SampledRest):
    """Reads a sample by the estimated probabilities, times the distance of a token's value from the
    prompt's mean value.

    Keeps: as `infinigen2`
    Reads: a weighted sample by the layer's own query
    """

    budget: float = 0.1

    title = "InfiniGen2, sampled rest"
    state = InfiniGen2SampledState


# The balanced pair


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
    query_moment = key.new_zeros((batch, num_kv_heads, head_dim, head_dim), dtype=torch.float64)
    key_moment = torch.zeros_like(query_moment)
    at_once = max(1, MOMENT_TOKENS // batch)
    if kernels_for(key):
        at_once = max(at_once, math.ceil(tokens / MOMENT_PARTS))
    for first in range(0, tokens, at_once):
        part = slice(first, first + at_once)
        queries = query[:, :, part].double() * is_real[:, :, part]
        queries = queries.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
        centred = (key[:, :, part].double() - mean) * is_real[:, :, part]
        query_moment += queries.mT @ queries
        key_moment += centred.mT @ centred
    group = query.shape[1] // num_kv_heads
    return {"query": query_moment / (num_real * group), "key": key_moment / num_real}


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
    directions = eigenvectors(between.mT @ between)  # R; S^2 rises
    strongest = _with_fixed_signs(directions.flip(-1)[..., :columns])
    images = between @ strongest  # P S
    strength = images.norm(dim=-2, keepdim=True)
    if white_keys:
        query_side, key_side = right @ strongest, left @ images / strength.square()
    else:
        query_side = right @ strongest / strength.sqrt()
        key_side = left @ images / strength.pow(1.5)
    return torch.stack([query_side, key_side], -4)


def eigenvectors(matrices: Tensor) -> Tensor:
    """Eigenvectors of positive definite matrices [..., n, n] as columns, by rising eigenvalue.

    On a CPU as many matrices at a time as torch has threads: LAPACK with more threads for one
    matrix is slower.
    """
    if kernels := kernels_for(matrices):
        return kernels.eigenvectors(matrices)
    num_threads = torch.get_num_threads()
    parts = matrices.flatten(0, -3).tensor_split(num_threads)
    try:
        with ThreadPoolExecutor(num_threads, initializer=partial(torch.set_num_threads, 1)) as pool:
            found = list(pool.map(torch.linalg.eigh, parts))
    finally:
        torch.set_num_threads(num_threads)  # it is what later threads begin with
    return torch.cat([each.eigenvectors for each in found]).view_as(matrices)


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


def fitted_query_side(known: Sequence[Mapping[str, Tensor]], key_side: Tensor) -> Tensor:
    """The best W_q for a given W_k, both [batch, num_kv_heads, head_dim, columns], fp64:
    C W_k (W_k^T C W_k)^-1 with C = Cov(k), by the sum of the `known` moments.

    W_q W_k^T key is then the least-squares estimate of a centred key from its index. So
    W_q^T query . W_k^T key is that of query . key, whatever the query.
    """
    factor = _factor(reduce(torch.add, (measured["key"].double() for measured in known)))
    index = factor.mT @ key_side.double()
    # Codes may be so coarse that two columns are one.
    ridge = TIE * (index * index).sum(-2).mean(-1)[..., None, None]
    identity = torch.eye(index.shape[-1], dtype=index.dtype, device=index.device)
    covariance = index.mT @ index + ridge * identity
    return factor @ torch.linalg.solve_ex(covariance, index.mT).result.mT


def _factor(moment: Tensor) -> Tensor:
    """L, lower triangular, with L L^T = moment. With the ridge there is one, unless a number is not
    finite, which a pass refuses: a check would have the host wait for the device."""
    ridge = RIDGE * moment.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp(min=RIDGE)
    unlike = torch.linspace(1, 2, moment.shape[-1], dtype=moment.dtype, device=moment.device)
    return torch.linalg.cholesky_ex(moment + torch.diag_embed(ridge * unlike)).L


def coded_product(rows: Tensor, side: Tensor, codec: IntegerCodec) -> Tensor:
    """`rows` [batch, num_kv_heads, n, head_dim] times a coded matrix: fp32 [batch, num_kv_heads, n,
    columns].

    side: uint8 [batch, num_kv_heads, head_dim, row bytes]. A row is one group of the codec, so that
    it has one lo and one step. The codes are multiplied as they are: rows @ side = (rows * step) @
    codes + rows @ lo.
    """
    kernels = kernels_for(rows)
    if kernels and rows.shape[2] <= kernels.MOST_ROWS:
        return kernels.coded_product(rows, side, codec.bits, codec.group_size)
    codes, lo, step = codec.unpack(side, codec.group_size, torch.float32)
    lo, step = lo.squeeze(-1).float(), step.squeeze(-1).float()
    rows = rows.float()
    return (rows * step.mT) @ codes + rows @ lo

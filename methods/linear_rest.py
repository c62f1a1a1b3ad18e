"""InfiniGen2 whose unread tokens are estimated by a linear fit on the index. Not of the paper.

The rule, and where it differs (made into docs/methods.md):

**infinigen2-linear** reads as `infinigen2` and estimates the unread tokens from the index. A
token's index score s gives its weight exp(s), and its numbers i in the index its value b + M^T i.
So the unread tokens add sum exp(s) to the denominator and b sum exp(s) + M^T sum exp(s) i to the
numerator. M, in `projection_bits`, and b are fitted to the prompt by least squares, for each layer,
KV head and sequence. The estimate is biased and has no sampling error. **oracle-linear** selects by
the true scores and estimates the others so: what the index loses as it selects.

Kin: SparQ gives the unread mass one mean value. AQUA-KV (2501.19392) predicts keys and values
linearly, trained beforehand, and stores what is left; SpeCache (2503.16163) fetches the best rows
by a low-bit copy of both. LESS (2402.09398), LoLA (2505.23666), MomentKV (2606.01563) and top-k
with linear completion (2604.05438) keep for the other tokens a state of fixed size. New: the index
that selects scores each unread token, and an untrained fit on the prompt gives its value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.base import Calibration, PromptRows, QueryRows, Rest, Selection, When
from methods.codecs.integers import IntegerCodec
from methods.infinigen2 import InfiniGen2, InfiniGen2State, coded_product
from methods.projection import tokens_of
from methods.settings import one_of, setting

RIDGE = 0.05
"""Added to the diagonal of the partial keys' covariance in the fit, as a share of its mean."""

LEAST_RIDGE = 1e-12
"""One token alone has no covariance."""


class LinearRestState(InfiniGen2State):
    """InfiniGen2's state and the fit of values on partial keys.

    slope[layer]: M, [batch, num_kv_heads, columns, value_dim]. With `projection_bits` each row is
    coded by itself: uint8 [batch, num_kv_heads, columns, bytes of a row]. intercept[layer]: b,
    [batch, num_kv_heads, 1, value_dim]. unscored_key[layer]: the prompt's mean key without
    the part that the index scores, [batch, num_kv_heads, 1, head_dim]. Its product with a query is
    what index scores lack, since an index in few bits holds centred keys.
    """

    sequence_tensors = (*InfiniGen2State.sequence_tensors, "slope", "intercept", "unscored_key")
    replayable = True
    slope: dict[int, Tensor]
    intercept: dict[int, Tensor]
    unscored_key: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        bits = self.method.projection_bits
        self.slope_codec: IntegerCodec | None = None
        if bits is not None:  # a row is one group, as `coded_product` needs
            value_dim = self.geometry.value_dim or self.geometry.head_dim
            self.slope_codec = IntegerCodec(f"int{bits}", group_size=value_dim)

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        super().prompt(layer, query, key, value, rows)
        real = rows.real[:, None, :, None]
        num_real = real.sum(2, keepdim=True)
        partial = self.index_numbers(layer, slice(0, key.shape[2]), rows.real[:, None]).double()
        mean_partial = partial.sum(2, keepdim=True) / num_real
        mean_value = (value * real).sum(2, keepdim=True, dtype=torch.float64) / num_real
        slope = ridge_fit((partial - mean_partial) * real, (value - mean_value) * real)
        stored = slope.to(value) if self.slope_codec is None else self.slope_codec.encode(slope)
        self.slope[layer] = stored
        predicted_mean = self.predicted(mean_partial.float(), stored)
        self.intercept[layer] = (mean_value - predicted_mean).to(value)
        mean_key = (key * real).sum(2, keepdim=True, dtype=torch.float64) / num_real
        indexed = mean_partial @ self.query_side(layer).double().mT
        self.unscored_key[layer] = (mean_key - indexed).to(key)

    def choose(self, layer: int, scores: Tensor, rows: QueryRows) -> Selection:
        index_scores = scores if self.method.kernels(scores) else scores.clone()
        selection = super().choose(layer, scores, rows)
        return selection._replace(rest=self.estimated_rest(layer, index_scores, selection, rows))

    def estimated_rest(
        self, layer: int, scores: Tensor, selection: Selection, rows: QueryRows
    ) -> Rest:
        """Mass and mean value of the visible tokens that a row does not read. scores: of the index,
        [batch, num_kv_heads, group, rows, slots]; overwritten."""
        assert selection.mask is not None
        log_mass, mean_partial = self.index_of_rest(layer, scores, selection.mask, rows)
        predicted = self.predicted(mean_partial.flatten(2, 3), self.slope[layer])
        value = predicted + self.intercept[layer]
        return Rest(None, value.unflatten(2, mean_partial.shape[2:4]), log_mass)

    def index_of_rest(
        self, layer: int, scores: Tensor, read: Tensor, rows: QueryRows
    ) -> tuple[Tensor, Tensor]:
        """Log-mass of the visible tokens that a row does not read, the logarithm of the sum of
        exp(score), [batch, num_kv_heads, group, rows], and the mean of their index by these
        weights, [..., columns]. read: bool [batch, num_kv_heads, rows, slots]."""
        softmax, slots = self.geometry.softmax(layer), slice(0, scores.shape[-1])
        kernels = self.method.kernels(scores)
        is_few = kernels is not None and scores.shape[2] * scores.shape[3] <= kernels.MOST_ROWS
        if kernels and is_few and self.codec is not None and softmax.softcap is None:
            keys = self.partial_keys[layer][:, :, slots]
            codec, given = self.codec, (scores, self.unscored_key[layer], read, rows, keys)
            sizes = {"columns": self.columns, "bits": codec.bits, "group_size": codec.group_size}
            return kernels.index_of_rest(*given, **sizes, scale=self.geometry.scale)
        query = rows.query.unflatten(1, (-1, self.geometry.group)).float()
        unscored = self.unscored_key[layer].float().unsqueeze(2)
        scores += self.geometry.scale * (query * unscored).sum(-1, keepdim=True)
        scores = softmax.capped(scores)
        visible = rows.visible()
        is_rest = visible & ~read
        scores.masked_fill_(~is_rest.unsqueeze(2), -torch.inf)
        log_mass = scores.logsumexp(-1)
        weights = (scores - log_mass.unsqueeze(-1)).exp_().nan_to_num_(0.0)  # where nothing is left
        partial = self.index_numbers(layer, slots, visible.any(2))
        mean_partial = weights.flatten(2, 3) @ partial
        return log_mass, mean_partial.unflatten(2, scores.shape[2:4])

    def query_side(self, layer: int) -> Tensor:
        """W_q as it is read, [batch, num_kv_heads, head_dim, columns]."""
        side = self.projection[layer][:, 0]
        if self.projection_codec is None:
            return side
        return self.projection_codec.decode(side, self.columns, torch.float32)

    def index_numbers(self, layer: int, slots: slice, seen: Tensor) -> Tensor:
        """The index as it is read, fp32 [batch, num_kv_heads, slots, columns], 0 where not `seen`
        (bool [batch, 1 or num_kv_heads, slots]): other slots may hold anything."""
        keys = self.partial_keys[layer][:, :, slots]
        if self.codec is None:
            numbers = keys.float()
        else:
            numbers = self.codec.decode(keys.contiguous(), self.columns, torch.float32)
        return numbers.masked_fill(~seen.unsqueeze(-1), 0.0)

    def predicted(self, partial: Tensor, slope: Tensor) -> Tensor:
        """M^T of partial keys [batch, num_kv_heads, n, columns]: fp32 [..., n, value_dim]."""
        if self.slope_codec is None:
            return partial @ slope.float()
        return coded_product(partial, slope, self.slope_codec)

    def index_size(self, layer: int) -> tuple[float, float]:
        """The index twice, for the scores and for the sum, and once all that the fit needs."""
        token_size, once = InfiniGen2State.index_size(self, layer)
        for tensors in (self.slope, self.intercept, self.unscored_key):
            once += tokens_of(tensors[layer][0, 0], self.geometry)
        return 2 * token_size, once


def ridge_fit(inputs: Tensor, outputs: Tensor) -> Tensor:
    """M [..., columns, value_dim] with the least squares of outputs - inputs M over the tokens and
    a ridge. inputs: fp64 [..., tokens, columns]; outputs: fp64 [..., tokens, value_dim]."""
    covariance = inputs.mT @ inputs
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    ridge = (RIDGE * mean).clamp(min=LEAST_RIDGE)
    identity = torch.eye(covariance.shape[-1], dtype=inputs.dtype, device=inputs.device)
    return torch.linalg.solve(covariance + ridge * identity, inputs.mT @ outputs)


@dataclass(frozen=True)
class InfiniGen2Linear(InfiniGen2):
    """Reads the best tokens, and estimates the others by a linear fit of values on the index.

    Keeps: as `infinigen2`, and a fit of the values
    Reads: the best by the layer's own query; the others are estimated
    """

    weighs_rest = True

    title = "InfiniGen2, linear rest"
    state = LinearRestState


class OracleLinearState(LinearRestState):
    """The true scores select, and the index estimates what they leave."""

    replayable = True

    def select(self, layer: int, rows: QueryRows) -> Selection:
        true_scores = rows.true_scores().clone()
        selection = self.method.choose(true_scores, rows, self.lengths.final, self.geometry)
        rest = self.estimated_rest(layer, self.scores(layer, rows), selection, rows)
        every_key = self.geometry.every_key(rows.positions)
        side = every_key + self.index_read(layer, rows.positions)
        return selection._replace(rest=rest, side=side)


@dataclass(frozen=True)
class OracleLinear(InfiniGen2Linear):
    """Selects by the true scores, and estimates the others by the linear fit.

    Keeps: as `infinigen2-linear`
    Reads: the best by the true scores; the others are estimated
    """

    when: When = setting("true_scores", "the scores that select", one_of("true_scores"))

    title = "Oracle, linear rest"
    state = OracleLinearState

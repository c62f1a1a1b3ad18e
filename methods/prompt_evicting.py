"""Methods that evict once, after the prompt, and keep all that is generated.

A state scores the prompt's tokens (`prompt_score`). The base decides how many tokens
stay, how layers and KV heads share them, and which tokens stay whatever their score.

Here are SnapKV (Li et al., NeurIPS 2024), with PyramidKV (Cai et al., 2024) and Ada-KV (Feng et
al., 2024) as settings: the original chooses a set for each query head, here the query heads of a KV
head share one set; Expected Attention (Devoto et al., 2025); KeyDiff (Park et al., NeurIPS 2025);
and key norm (Devoto et al., EMNLP 2024): shorter keys tend to receive more attention.

The rule, and where it differs (made into docs/methods.md):

**snapkv**: the attention of the prompt's last `window` (32) rows, summed over rows and group, is
smoothed along the tokens (`pooling`, `kernel`). The best tokens stay, with the window and
`num_sinks` first tokens, so that `budget` of the prompt or `kept_tokens` are kept. A maximum
makes a peak's neighbours equal to it; the attention before smoothing decides between them, so that
the peak itself stays. The official code leaves that to `topk`. A small budget needs a prompt that
is most of the sequence. Results depend on whether the question is in the window; `prefill=` says
so.

- `layers=pyramid` (`pyramidkv`, `window` 8): the budget falls from layer to layer, from 2 · mean -
  floor(mean / 20) to as much below the mean. PyramidKV's code rounds the step down and uses equal
  budgets for short prompts; here the sum over layers is exact.
- `heads=adaptive` (`adakv`): the best tokens of a layer over all its KV heads stay; each head has a
  fifth of the uniform budget for certain. Memory is reserved for the most that a head could hold;
  empty slots are not fetched.

**keydiff**, **knorm**, **expected** follow kvpress. Their scores: minus the cosine between a key
and the mean of the prompt's normalised keys; minus the key's length; the expected attention of
coming queries, times the value's length. Coming queries are taken to be normal,
with mean and covariance of the prompt's, rotated to the next 512 positions; the `num_sinks` (4)
first tokens are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, cosine_similarity, max_pool1d, normalize

from methods.attention import received_attention
from methods.base import (
    EMPTY,
    Calibration,
    Geometry,
    Lengths,
    PromptRows,
    QueryRows,
    Selection,
    TokenCounts,
    checked,
    require,
    share_above,
)
from methods.evicting import INF, Evicting, EvictingState, lowest_scores
from methods.settings import least, odd, one_of, setting, share

STEEPNESS = 20
"""PyramidKV's beta: the last layer of a pyramid has about a 20th of the mean, if the prompt is long
enough."""
FLOOR = 5
"""A KV head has a fifth of the uniform budget for certain: Ada-KV's floor alpha of 0.2."""
HORIZON = 512
"""Positions after the prompt whose mean rotation Expected Attention gives to the coming queries, as
in kvpress."""


class PromptEvictingState(EvictingState):
    """The prompt tokens of the largest score stay in each KV head; of two equal ones the later,
    unless the score says.

    shares: int [selecting layers, batch], number of competing tokens that stay. Computed once: the
    prompts' lengths are on the device.
    """

    evicts_in_steps = False

    def start(self, calibration: Calibration | None) -> None:
        prompts = self.lengths.prompt
        selecting = self.geometry.num_layers - self.method.dense_layers
        shares = [self.method.shares(prompt, selecting) for prompt in prompts.tolist()]
        self.shares = torch.tensor(shares, dtype=prompts.dtype, device=prompts.device).T

    def prompt_score(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Score of each prompt token, fp32 [batch, num_kv_heads, prompt]; anything in the padding.

        A second tensor, if returned, decides between tokens of equal score.
        """
        raise NotImplementedError

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        self.enter_prompt(layer, rows)
        tokens = self.tokens[layer][:, :, : key.shape[2]]
        before = (rows.lengths - self.method.window)[:, None, None]
        competes = (tokens >= self.method.num_sinks) & (tokens < before)
        axes, sizes = "batch, KV heads, tokens", competes.shape
        found = self.prompt_score(layer, query, key, value, rows)
        score, tie_score = found if isinstance(found, tuple) else (found, None)
        score = checked(self.prompt_score, score, axes, *sizes)
        if tie_score is not None:
            checked(self.prompt_score, tie_score, axes, *sizes)
        stay = self.stay(layer, score.masked_fill(~competes, -INF))
        checked(self.stay, stay, "batch, KV heads or 1", sizes[0], (sizes[1], 1))
        score = self.second_score(layer, score, tie_score, competes, stay, value)
        checked(self.second_score, score, axes, *sizes)
        gone = lowest_scores(score, competes, competes.sum(-1) - stay, tie_score)
        tokens.masked_fill_(gone, EMPTY)

    def second_score(
        self,
        layer: int,
        score: Tensor,
        tie_score: Tensor | None,
        competes: Tensor,
        stay: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Score by which tokens stay once each head's number is known; by default the same.

        score, tie_score: as `prompt_score` returned them. competes: bool [batch, num_kv_heads,
        prompt], tokens that may leave. stay: of these the number that stays, int [batch,
        num_kv_heads or 1]. value: [batch, num_kv_heads, prompt, value_dim].
        """
        return score

    def stay(self, layer: int, score: Tensor) -> Tensor:
        """Number of competing tokens that stay, int [batch, num_kv_heads or 1]. score: -inf where
        none competes."""
        share = self.shares[layer - self.method.dense_layers, :, None]
        return adaptive(score, share) if self.method.heads == "adaptive" else share

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """All that is left of the prompt, and all that was generated."""
        self.enter(layer, rows)
        tokens = self.tokens[layer][:, :, None, : rows.slot_positions.shape[-1]]
        mask = tokens < rows.positions[:, None, :, None]
        return Selection(mask, mask.sum(-1).double().mean(1))


@dataclass(frozen=True)
class EvictingOnce(Evicting):
    """Keeps a share of the prompt, as the mean over the layers' KV heads; the budget counts the
    tokens that always stay."""

    budget: float = setting(0.2, "share of the prompt that is kept", share())
    kept_tokens: int | None = setting(None, "this many tokens instead of the share")

    @property
    def num_sinks(self) -> int:
        """First tokens that always stay."""
        return 0

    @property
    def window(self) -> int:
        """Last tokens of the prompt that always stay."""
        return 0

    @property
    def layers(self) -> str:
        """How the layers share the budget: `uniform`, `pyramid` or `adaptive`."""
        return "uniform"

    @property
    def heads(self) -> str:
        """How a layer's KV heads share it: `uniform` or `adaptive`."""
        return "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        enough = self.kept_tokens is None or self.kept_tokens > self.safe
        above = f"above num_sinks + window={self.safe}, or null"
        require(enough, "kept_tokens", self.kept_tokens, above)

    @property
    def safe(self) -> int:
        """Tokens of a prompt that stay whatever their score."""
        return self.num_sinks + self.window

    def budget_in_tokens(self, prompt: int) -> int:
        """Tokens of a prompt that are kept, mean over layers and KV heads."""
        wanted = int(self.budget * prompt) if self.kept_tokens is None else self.kept_tokens
        return min(prompt, wanted)

    def shares(self, prompt: int, num_layers: int) -> list[int]:
        """Number of competing tokens that stay, for each of `num_layers` selecting layers; their
        mean is exact."""
        mean = max(0, self.budget_in_tokens(prompt) - self.safe)
        if self.layers == "pyramid":
            return pyramid(mean, self._most(prompt), num_layers)
        return [mean] * num_layers

    def _most(self, prompt: int) -> int:
        """The largest share of any layer."""
        mean = max(0, self.budget_in_tokens(prompt) - self.safe)
        if self.layers != "pyramid":
            return mean
        return min(2 * mean - mean // STEEPNESS, max(0, prompt - self.safe))

    def check(self, geometry: Geometry, lengths: Lengths) -> None:
        """ValueError where the budget of a prompt does not exceed the tokens that always stay."""
        shortest = int(lengths.prompt.min())
        kept, safe = self.budget_in_tokens(shortest), self.safe
        least = f"at least {(safe + 1) / shortest:.3g} for a prompt of {shortest} tokens"
        allowed = f"{least}, to keep more than num_sinks + window={safe}"
        require(kept > safe or kept == shortest, "budget", self.budget, allowed)

    def tokens_read(self, counts: TokenCounts, layer: int) -> float:
        return self.budget_in_tokens(counts.prompt) + counts.cached - counts.prompt

    def tokens_kept(self, counts: TokenCounts, layer: int) -> int:
        """The same, in the KV head and the layer that keep most."""
        share, generated = self._most(counts.prompt), counts.cached - counts.prompt
        if self.heads == "adaptive":
            share = -(-(share + (FLOOR - 1) * max(0, counts.prompt - self.safe)) // FLOOR)
        return min(counts.prompt, self.safe + share) + generated

    def with_budget(self, frac: float) -> Self:
        return replace(self, budget=frac, kept_tokens=None)

    def min_budget(self, counts: TokenCounts) -> float:
        """The least share that keeps one token more than always stay."""
        below = f"below {counts.prompt}, the shortest prompt"
        require(self.safe < counts.prompt, "num_sinks + method.window", self.safe, below)
        return share_above(self.safe, counts.prompt)


@dataclass(frozen=True)
class PromptEvicting(EvictingOnce):
    """Settings of tokens that always stay, and of budgets that layers and heads share by need."""

    num_sinks: int = setting(0, "first tokens that always stay; the budget counts them", least(0))
    window: int = setting(0, "last tokens of the prompt that always stay", least(0))
    layers: str = setting(
        "uniform",
        "how the layers share the budget: pyramid gives less from layer to layer (PyramidKV)",
        one_of("uniform", "pyramid"),
    )
    heads: str = setting(
        "uniform",
        "how a layer's KV heads share it: adaptive, by where the score is (Ada-KV)",
        one_of("uniform", "adaptive"),
    )


def pyramid(mean: int, high: int, num_layers: int) -> list[int]:
    """Whole numbers on a line that falls from `high` to 2 * mean - high, and sum to num_layers *
    mean.

    PyramidKV's code rounds the step down and so keeps more than the budget; here the line's running
    sum is rounded.
    """
    gaps = max(1, num_layers - 1)
    fall = high - mean if num_layers > 1 else 0
    until = [
        (count * (mean + fall) * gaps - fall * count * (count - 1)) // gaps
        for count in range(num_layers + 1)
    ]
    return [after - before for before, after in zip(until, until[1:], strict=False)]


def adaptive(score: Tensor, share: Tensor) -> Tensor:
    """Number of tokens that each KV head keeps so that a layer keeps its best ones: int [batch,
    num_kv_heads].

    score: [batch, num_kv_heads, prompt], -inf for tokens that do not compete; share: int [batch,
    1], the mean over the KV heads, of which a `FLOOR`th is certain. Rounded along the heads, so
    that their sum is exact.
    """
    until = ((FLOOR - 1) * won(score, score.shape[1] * share) + share).cumsum(-1) // FLOOR
    return until.diff(dim=-1, prepend=torch.zeros_like(share))


def won(score: Tensor, count: Tensor) -> Tensor:
    """Number of each head's tokens among the `count` best over all heads: int [batch, heads].

    score: [batch, heads, prompt]; count: int [batch, 1].
    """
    best = score.flatten(1).argsort(dim=-1, descending=True, stable=True)
    wins = torch.arange(best.shape[-1], device=score.device) < count
    return torch.zeros_like(wins).scatter_(-1, best, wins).view(score.shape).sum(-1)


# The methods


class SnapKVState(PromptEvictingState):
    """Score: the smoothed attention that a token received from the window."""

    replayable = True

    def prompt_score(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> tuple[Tensor, Tensor]:
        """The tokens of the window itself are not smoothed, nor do they enter the smoothing.

        A maximum makes a peak's neighbours equal to it. The unsmoothed attention decides between
        them, so that the peak itself stays where few tokens do.
        """
        before = max(0, key.shape[2] - self.method.window)
        softmax = self.geometry.softmax(layer)
        received = received_attention(query, key, rows.real, softmax, first=before)
        score = received.clone()
        if before:
            pool = max_pool1d if self.method.pooling == "max" else avg_pool1d
            width = self.method.kernel
            score[..., :before] = pool(received[..., :before], width, stride=1, padding=width // 2)
        return score, received


@dataclass(frozen=True)
class SnapKV(PromptEvicting):
    """Defaults are those of the paper's LongBench runs.

    Source: SnapKV (NeurIPS 2024), PyramidKV (2024), Ada-KV (2024)
    Keeps: the prompt's tokens with the most attention from its last rows; all generated tokens
    """

    window: int = setting(32, "last tokens, whose attention is the score; they stay", least(1))
    kernel: int = setting(7, "width of the smoothing", odd())
    pooling: str = setting("max", "kind of the smoothing", one_of("max", "avg"))

    state = SnapKVState

    @property
    def title(self) -> str:
        """Shared budgets have names of their own."""
        pyramid, adaptive = self.layers == "pyramid", self.heads == "adaptive"
        if pyramid and adaptive:
            return "Ada-PyramidKV"
        return "PyramidKV" if pyramid else "Ada-KV" if adaptive else "SnapKV"


class ComingQueriesState(PromptEvictingState):
    """A score by the coming queries, which are taken to be as the prompt's, at the positions that
    follow."""

    def past_sinks(self, rows: PromptRows) -> Tensor:
        """Rows whose queries count, bool [batch, prompt]: those of the sinks are unlike all
        others."""
        return rows.real & (rows.positions >= self.method.num_sinks)

    def plain_queries(
        self, layer: int, query: Tensor, rows: PromptRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries without positions, fp32 [batch, heads, prompt, head_dim]; 1 for those that count,
        [batch, 1, prompt, 1]; their mean, [batch, heads, 1, head_dim]."""
        positions = rows.positions.masked_fill(~rows.real, 0)
        plain = self.geometry.rotate(query, positions, inverse=True, layer=layer).float()
        counted = self.past_sinks(rows)[:, None, :, None].float()
        number = counted.sum(2, keepdim=True).clamp(min=1)
        return plain, counted, (plain * counted).sum(2, keepdim=True) / number

    def rotation_ahead(self, layer: int) -> Tensor:
        """Mean rotation of the positions that follow, [batch, 1, head_dim, head_dim]: each row is a
        unit vector rotated."""
        device = self.lengths.prompt.device
        units = torch.eye(self.geometry.head_dim, device=device)
        units = units[None, :, None].expand(-1, -1, HORIZON, -1)
        ahead = self.lengths.prompt[:, None] + torch.arange(HORIZON, device=device)
        rotations = []
        for positions in ahead:
            turned = self.geometry.rotate(units, positions[None], layer=layer)
            rotations.append(turned.mean(2))
        return torch.stack(rotations)


class ExpectedState(ComingQueriesState):
    """Score: the expectation of exp(query . key) over all tokens but the sinks, times |value|; the
    group's mean."""

    replayable = True

    def prompt_score(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> Tensor:
        batch, num_kv_heads, prompt, head_dim = key.shape
        mean, cov = self._statistics(layer, query, rows)
        mean = mean.view(batch, num_kv_heads, -1, *mean.shape[2:])
        cov = cov.view(batch, num_kv_heads, -1, *cov.shape[2:])
        keys = key.float().unsqueeze(2) * self.geometry.scale  # [batch, kv, 1, prompt, head_dim]
        scores = (keys @ mean.unsqueeze(-1)).squeeze(-1) + ((keys @ cov) * keys).sum(-1) / 2
        past_sinks = self.past_sinks(rows)[:, None, None]
        probs = scores.masked_fill_(~past_sinks, -INF).softmax(-1).mean(2)
        return probs * value.float().norm(dim=-1)

    def _statistics(self, layer: int, query: Tensor, rows: PromptRows) -> tuple[Tensor, Tensor]:
        """Mean [batch, heads, head_dim] and covariance of the queries that count, rotated to what
        follows."""
        plain, counted, mean = self.plain_queries(layer, query, rows)
        centred = (plain - mean) * counted
        rotation = self.rotation_ahead(layer)
        number = counted.sum(2, keepdim=True).clamp(min=1)
        cov = rotation.mT @ (centred.mT @ centred / number) @ rotation
        return (mean @ rotation).squeeze(2), cov


@dataclass(frozen=True)
class ExpectedAttention(PromptEvicting):
    """The sinks stay, and their queries, which are unlike all others, do not count.

    Source: Expected Attention (2025)
    Keeps: the prompt's tokens that coming queries should attend to; all generated tokens
    """

    num_sinks: int = 4

    title = "Expected Attention"
    state = ExpectedState


class KeyDiffState(PromptEvictingState):
    """Score: minus the cosine between the key and the mean of the prompt's normalised keys."""

    replayable = True

    def prompt_score(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> Tensor:
        directions = normalize(key.float(), dim=-1).masked_fill_(~rows.real[:, None, :, None], 0)
        total = directions.sum(2, keepdim=True)  # it points as the mean
        return -cosine_similarity(key.float(), total, dim=-1)


@dataclass(frozen=True)
class KeyDiff(PromptEvicting):
    """Nothing is safe by default, as in kvpress.

    Source: KeyDiff (NeurIPS 2025)
    Keeps: the prompt's keys least like the others; all generated tokens
    """

    title = "KeyDiff"
    state = KeyDiffState


class KnormState(PromptEvictingState):
    """Score: minus the key's length."""

    replayable = True

    def prompt_score(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> Tensor:
        return -key.float().norm(dim=-1)


@dataclass(frozen=True)
class Knorm(PromptEvicting):
    """Nothing is safe by default, as in the paper.

    Source: Devoto et al. (EMNLP 2024)
    Keeps: the prompt's shortest keys; all generated tokens
    """

    dense_layers: int = 2  # `skip_layers=[0, 1]` in l2compress's README

    title = "Key norm"
    state = KnormState

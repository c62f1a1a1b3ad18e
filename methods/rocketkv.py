"""RocketKV (Behnam et al., ICML 2025): evict once, then select among what is left.

The rule is the paper's: two stages share a compression c. What it leaves open, which of the two
bounds of a channel is read and the scale of the scores, is as in TensorRT-LLM's free implementation
(Apache-2.0, `tensorrt_llm/_torch/attention_backend/sparse/rocket`). Of the authors' code, which is
not free, its configurations and the size of what stays were looked at, and no more.

The rule, and where it differs (made into docs/methods.md):

**rocketkv** has a `budget` (0.2) as a share of the prompt, or `budget_tokens`. With c = prompt /
budget and a = min(0.2 + 0.06 log2 c, 0.8), floor(prompt / c^a) tokens of the prompt stay: its last
`window` (32), and the best by the attention from these, smoothed by a maximum `kernel` (63) wide.
All that is generated stays. With c' = kept / budget, the tokens that a KV head keeps are cut in
their order into chunks of min(floor c', ceil sqrt c') tokens, which have the elementwise minimum
and maximum of their keys. A step takes the head_dim · chunk / c' channels in which |q|, summed over
the group, is largest. In each it reads the chunks' maxima, or their minima where the group's sum of
q is not positive. A chunk's score for a query head is the product with them, divided by the root of
the share of |q| that the channels hold (SparQ's scale). A group adds its heads' probabilities.
budget / 2 tokens of the best chunks are read, the last chunk in part.

- The prompt alone decides how many tokens stay and are read, chunk and channels. They do not
  change while tokens are generated. The authors' code has room for floor(T / c^a) tokens with
  c = T / budget, the generated ones among them. Of a prompt of 960 tokens with 64 new ones it keeps
  510 and 328 at budgets of 192 and 96; here 556 and 382 stay.
- Its configurations leave two first layers of LongChat and Llama-2 to the full cache
  (`skip_layers`), and none of Llama-3.1 and Mistral, as here (`dense_layers`).
- The unfinished chunk is always read, and counts in the budget. In TensorRT-LLM it competes, and
  so does the row's current token.
- `budget=` is the share of tokens that is read, half of `method.budget`. At
  `method.budget=2` nothing is left out.
- The paper's variant for several turns, which evicts nothing, is not here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from methods.base import (
    EMPTY,
    Calibration,
    Geometry,
    Lengths,
    PromptRows,
    QueryRows,
    Selection,
    TokenCounts,
    least_number,
    require,
)
from methods.prompt_evicting import SnapKVState
from methods.selection import SelectingBy, largest
from methods.settings import Allowed, least, odd, setting


class Plan(NamedTuple):
    """Numbers that a prompt's length decides. kept: tokens of the prompt that stay. chunk: tokens
    of a chunk. channels: of a chunk's bounds that a query reads. read: tokens that a row reads."""

    kept: int
    chunk: int
    channels: int
    read: int


class RocketKVState(SnapKVState):
    """lowest[layer], highest[layer]: elementwise extremes of each chunk's keys, [batch,
    num_kv_heads, chunks + 1, head_dim]; the last one is for tokens that are in none.

    plans: int64 [batch, 4], the `Plan` of each sequence. Chunks are counted among the tokens that a
    KV head keeps, in the order of their positions, which is that of their slots.
    """

    sequence_tensors = ("lowest", "highest", "plans")
    selects_without_own = True
    replayable = True
    lowest: dict[int, Tensor]
    highest: dict[int, Tensor]
    plans: Tensor

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        prompts, finals = (part.tolist() for part in self.lengths)
        plans, chunks = [], []
        for prompt, final in zip(prompts, finals, strict=True):
            plan = self.method.plan(prompt, self.geometry.head_dim)
            plans.append(plan)
            chunks.append(-(-(plan.kept + final - prompt) // plan.chunk))
        self.num_chunks = max(chunks)
        self.plans = torch.tensor(plans, device=self.lengths.final.device)

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        """Evict, and bound the keys of the chunks of what is left."""
        super().prompt(layer, query, key, value, rows)
        shape = (*key.shape[:2], self.num_chunks + 1, key.shape[-1])
        limit = torch.finfo(key.dtype).max
        self.lowest[layer] = key.new_full(shape, limit)
        self.highest[layer] = key.new_full(shape, -limit)
        is_kept = self.tokens[layer][:, :, : key.shape[2]] != EMPTY
        self._widen(layer, key, is_kept.cumsum(-1) - 1, is_kept)

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice | Tensor
    ) -> None:
        self.tokens[layer][:, :, slots] = positions[:, None].int()
        kept = self.plans[:, 0]
        number = (positions - self.lengths.prompt[:, None] + kept[:, None])[:, None]
        self._widen(layer, key, number, (positions != EMPTY)[:, None])

    def _widen(self, layer: int, key: Tensor, number: Tensor, is_kept: Tensor) -> None:
        """Widen the extremes of chunks by keys [batch, num_kv_heads, n, head_dim]. number: of each
        token among those that its head keeps, int [batch, num_kv_heads or 1, n]."""
        chunk = number // self.plans[:, 1, None, None]
        chunk = chunk.masked_fill(~is_kept, self.num_chunks)
        index = chunk.unsqueeze(-1).expand_as(key)
        self.lowest[layer].scatter_reduce_(2, index, key, "amin")
        self.highest[layer].scatter_reduce_(2, index, key, "amax")

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """The tokens of the best chunks among those that the layer's heads keep."""
        method, positions = self.method, rows.positions
        kept, chunk, channels, read = self.plans.unsqueeze(-1).unbind(1)  # [batch, 1] each
        tokens = self.tokens[layer][..., : rows.slot_positions.shape[-1]]
        held = (kept + positions - self.lengths.prompt[:, None]).clamp(min=0)  # [batch, rows]
        full = held // chunk
        count = torch.minimum(read, held)
        # A token's number among those that its head keeps, and its chunk
        number = (tokens != EMPTY).cumsum(-1) - 1
        in_chunk = (number // chunk.unsqueeze(-1)).clamp(0, self.num_chunks - 1)
        scores = self._chunk_scores(layer, rows.query, channels)
        index = in_chunk[:, :, None, None].expand(*scores.shape[:4], -1)
        token_scores = scores.gather(-1, index)
        # Tokens of the unfinished chunk have no score and are read
        visible = tokens.unsqueeze(2) < positions[:, None, :, None]
        unfinished = visible & (in_chunk.unsqueeze(2) >= full[:, None, :, None])
        token_scores.masked_fill_(unfinished.unsqueeze(2), 0.0)
        token_scores.masked_fill_(~visible.unsqueeze(2), -math.inf)
        always = method.forced(tokens, tokens, positions, count)
        forced = unfinished if always is None else unfinished | (always & visible)
        chosen = largest(method.reduced(token_scores, forced), count)
        mask, num_read = method.joined(chosen, count, self.geometry)
        side = (full * channels).double() / self.geometry.elements
        return Selection(mask, num_read, side)

    def _chunk_scores(self, layer: int, query: Tensor, channels: Tensor) -> Tensor:
        """Scaled scores of chunks by their bounds: fp32 [batch, num_kv_heads, group, rows, chunks];
        anything for a chunk that is not full.

        query: [batch, heads, rows, head_dim]; channels: int [batch, 1], how many are read.
        """
        grouped = query.float().unflatten(1, (self.geometry.num_kv_heads, -1))
        magnitude = grouped.abs()
        order = magnitude.sum(2).argsort(dim=-1, descending=True, stable=True)
        is_first = torch.arange(query.shape[-1], device=query.device) < channels
        is_first = is_first[:, None, None].expand_as(order)
        is_read = torch.zeros_like(is_first).scatter(-1, order, is_first).unsqueeze(2)
        is_up = grouped.sum(2, keepdim=True) > 0
        partial = grouped * is_read
        share = partial.abs().sum(-1, keepdim=True) / magnitude.sum(-1, keepdim=True)
        partial = partial * (self.geometry.scale / share.sqrt())
        highest = self.highest[layer][:, :, :-1].float().mT
        lowest = self.lowest[layer][:, :, :-1].float().mT
        by_highest = (partial * is_up).flatten(2, 3) @ highest
        by_lowest = (partial * ~is_up).flatten(2, 3) @ lowest
        return (by_highest + by_lowest).unflatten(2, grouped.shape[2:4])


@dataclass(frozen=True)
class RocketKV(SelectingBy):
    """Keeps a part of the prompt and all generated tokens, and reads the best chunks of them.

    Source: RocketKV (ICML 2025)
    Keeps: the prompt's tokens with the most attention from its last rows, all generated tokens;
        bounds of chunks of keys
    Reads: the chunks with the best bounds in the query's largest channels
    """

    budget: float = setting(
        0.2,
        "budget of a step, half of it tokens and half bounds of keys, as a share of the prompt",
        Allowed("in (0, 2]", lambda value: 0 < value <= 2),
    )
    budget_tokens: int | None = setting(
        None, "this many tokens instead of the share", least(2, null=True)
    )
    window: int = setting(32, "last tokens, whose attention is the score; they stay", least(1))
    kernel: int = setting(63, "width of the maximum that smooths the attention", odd())

    group: str = "sum_probs"

    title = "RocketKV"
    state = RocketKVState

    pooling: ClassVar[str] = "max"
    heads: ClassVar[str] = "uniform"

    def budget_in_tokens(self, prompt: int) -> int:
        """Tokens whose bytes a row is to read."""
        if self.budget_tokens is not None:
            return self.budget_tokens
        return max(1, int(self.budget * prompt))

    def kept(self, prompt: int) -> int:
        """Tokens of a prompt that stay."""
        compression = max(1.0, prompt / self.budget_in_tokens(prompt))
        first_share = min(0.2 + 0.06 * math.log2(compression), 0.8)
        return int(prompt / compression**first_share)

    def plan(self, prompt: int, head_dim: int) -> Plan:
        kept, budget = self.kept(prompt), self.budget_in_tokens(prompt)
        compression = max(1.0, kept / budget)
        chunk = min(math.floor(compression), math.ceil(math.sqrt(compression)))
        channels = max(1, int(head_dim * chunk / compression))
        return Plan(kept, chunk, channels, self._read(prompt))

    def _read(self, prompt: int) -> int:
        return max(1, self.budget_in_tokens(prompt) // 2)

    @property
    def safe(self) -> int:
        """Tokens of a prompt that stay whatever their score."""
        return self.num_sinks + self.window

    def shares(self, prompt: int, num_layers: int) -> list[int]:
        """Number of competing tokens that stay, in each of `num_layers` layers."""
        return [max(0, self.kept(prompt) - self.safe)] * num_layers

    def check(self, geometry: Geometry, lengths: Lengths) -> None:
        """ValueError where what stays of a prompt does not exceed the tokens that always do."""
        shortest = int(lengths.prompt.min())
        kept, safe = self.kept(shortest), self.safe
        name = "budget" if self.budget_tokens is None else "budget_tokens"
        found = f"more: it keeps {kept} of {shortest} tokens"
        allowed = f"{found}, which must exceed num_sinks + window={safe}"
        require(kept > safe or kept == shortest, name, getattr(self, name), allowed)
        super().check(geometry, lengths)

    def set_size(self, counts: TokenCounts) -> int:
        return min(self.tokens_kept(counts, self.dense_layers), self._read(counts.prompt))

    def tokens_kept(self, counts: TokenCounts, layer: int) -> int:
        return self.kept(counts.prompt) + counts.cached - counts.prompt

    def with_budget(self, frac: float) -> Self:
        """A row reads tokens for half of the budget."""
        return replace(self, budget=2 * frac, budget_tokens=None)

    def min_budget(self, counts: TokenCounts) -> float:
        """The least number that keeps one token more than always stay."""
        below = f"below {counts.prompt}, the shortest prompt"
        require(self.safe < counts.prompt, "num_sinks + method.window", self.safe, below)
        smallest = least_number(lambda frac: self.with_budget(frac).kept(counts.prompt) > self.safe)
        return max(smallest, super().min_budget(counts))

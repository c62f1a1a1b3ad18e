"""Methods that evict tokens for good. Live decoding reuses their slots and reads all that is kept.

`EvictingState` records which token lies in which slot. `ScoreState` is the easy base for methods
that evict after the prompt and after every row: each token has a score, and the tokens of the least
score leave. A subclass gives a budget, how many recent tokens are safe, and the score
(`prompt_score`, `observe`). Methods that evict after the prompt alone have their own base,
`methods.prompt_evicting`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from methods.attention import mask_bias
from methods.base import (
    EMPTY,
    Method,
    PromptRows,
    QueryRows,
    Selection,
    State,
    TokenCounts,
    checked,
    floor_frac,
)
from methods.compiled import kernels_for
from methods.settings import least, setting, share

INF = float("inf")
LEAST_ROWS = 16
"""Rows of a block from which on the slots in use are gathered."""
GATHERED_SHARE = 0.75
"""The largest share of the slots that is gathered."""


@dataclass(frozen=True)
class Evicting(Method):
    """Reads all that it keeps, so `tokens_kept` gives all three shares."""

    def tokens_read(self, counts: TokenCounts, layer: int) -> float:
        return self.tokens_kept(counts, layer)

    def max_tokens_read(self, counts: TokenCounts, layer: int) -> int:
        return self.tokens_kept(counts, layer)


@dataclass(frozen=True)
class EvictingToBudget(Evicting):
    """Evicts down to floor(budget * T) tokens, at least 1, or to `kept_tokens`."""

    budget: float = setting(0.2, "share of T, the final tokens, that is kept", share())
    kept_tokens: int | None = setting(
        None, "this many tokens instead of the share", least(1, null=True)
    )

    def budget_in_tokens(self, final: int) -> int:
        """Tokens that are kept of a sequence of T = `final`."""
        if self.kept_tokens is not None:
            return self.kept_tokens
        return max(1, int(self.budget * final))

    def budgets_in_tokens(self, final: Tensor) -> Tensor:
        """`budget_in_tokens` of each sequence, int [batch]."""
        if self.kept_tokens is not None:
            return torch.full_like(final, self.kept_tokens)
        return floor_frac(self.budget, final).clamp(min=1)

    @property
    def budget_setting(self) -> tuple[str, str]:
        """The setting that says the budget, and its value in words."""
        if self.kept_tokens is not None:
            return "kept_tokens", str(self.kept_tokens)
        return "budget", f"{self.budget:.4g}"

    def tokens_kept(self, counts: TokenCounts, layer: int) -> int:
        return min(counts.cached, self.budget_in_tokens(counts.final))

    def with_budget(self, frac: float) -> Self:
        return replace(self, budget=frac, kept_tokens=None)

    def artifact_budget(self) -> float:
        return self.budget if self.kept_tokens is None else 1.0


class EvictingState(State):
    """Tokens leave the cache for good; `select` sets their slot in `tokens` to `EMPTY`.

    tokens[layer]: int32 [batch, num_kv_heads, slots + 1], the token in each slot, `EMPTY` where
    there is none. The last slot is a dump: writes that must have no effect go there. It holds no
    token, so that `fork` may make it a slot like any other. In live decoding the slot behind all
    those in use belongs to the current token during a step.
    """

    slot_tensors = {"tokens": EMPTY}
    evicts_in_steps = True
    """False if no decode step takes the slot of a prompt's token."""
    tokens: dict[int, Tensor]

    def enter_prompt(self, layer: int, rows: PromptRows) -> None:
        """Write the prompt's tokens into their slots."""
        positions = rows.positions.int()
        shape = (len(positions), self.geometry.num_kv_heads, rows.num_slots + 1)
        tokens = self.tokens[layer] = positions.new_full(shape, EMPTY)
        tokens[:, :, : positions.shape[1]] = positions[:, None]

    def enter(self, layer: int, rows: QueryRows) -> Tensor:
        """Write each row's current token into its slot. Returns these slots, int64 [batch,
        num_kv_heads, rows]."""
        tokens = self.tokens[layer]
        own = rows.own_slots.expand(-1, tokens.shape[1], -1)
        entering = rows.positions.masked_fill(~rows.real, EMPTY) if rows.padded else rows.positions
        tokens.scatter_(-1, own, entering.int()[:, None].expand_as(own))
        return own

    def compact(self, layer: int, capacity: int) -> Tensor:
        """Live, after the prompt: move the kept tokens to the first `capacity` slots, oldest first.

        Returns the prompt column of each slot, int64 [batch, num_kv_heads, capacity], -1 where
        there is none.
        """
        tokens = self.tokens[layer][..., :-1]
        kept = tokens.argsort(dim=-1, stable=True)[..., :capacity]
        columns = kept.masked_fill(tokens.gather(-1, kept) == EMPTY, -1)
        for name, empty in self.slot_tensors.items():
            by_layer = getattr(self, name)
            old = by_layer[layer]
            shape = (*old.shape[:2], capacity + 2, *old.shape[3:])
            new = by_layer[layer] = old.new_full(shape, empty)
            new[:, :, : kept.shape[-1]] = old.gather(2, _like(kept, old))
        return pad(columns, (0, capacity - columns.shape[-1]), value=-1)

    def place_own(self, layer: int, own: int) -> Tensor:
        """Live, after a step's selection: move the current token from slot `own`, behind all in
        use, to the first free one.

        Returns that slot, int64 [batch, num_kv_heads, 1]; -1 where the current token itself was
        evicted.
        """
        tokens = self.tokens[layer]
        if kernels := kernels_for(tokens):
            data = {name: getattr(self, name)[layer] for name in self.slot_tensors}
            return kernels.place_own(data, self.slot_tensors, own)
        free = tokens[..., : own + 1] == EMPTY
        gone = free[..., own:].clone()
        free[..., own] = True
        first = free.int().argmax(-1, keepdim=True)
        target = first.masked_fill(gone, tokens.shape[-1] - 1)  # the dump
        for name, empty in self.slot_tensors.items():
            slots = getattr(self, name)[layer]
            row = slots[:, :, own : own + 1].clone()
            slots[:, :, own] = empty
            slots.scatter_(2, _like(target, slots), row)
        return first.masked_fill(gone, -1)


class ScoreState(EvictingState):
    """Keeps the tokens of the largest score, and the `recent` last ones whatever their score.

    score[layer]: fp32, shaped like tokens[layer], 0 in a slot that was never used; anything in a
    slot that was freed. limits[layer]: `budget` and `recent` as they were at the prompt, int
    [batch, 2].
    """

    sequence_tensors = ("limits",)
    slot_tensors = {**EvictingState.slot_tensors, "score": 0}
    limits: dict[int, Tensor]
    score: dict[int, Tensor]

    def budget(self, layer: int) -> Tensor:
        """Tokens kept, int [batch]; may differ by layer."""
        raise NotImplementedError

    @property
    def recent(self) -> Tensor:
        """Number of most recent tokens that never leave, int [batch]."""
        raise NotImplementedError

    def prompt_score(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> Tensor:
        """Score of each prompt token, fp32 [batch, num_kv_heads, prompt]; anything in the
        padding."""
        raise NotImplementedError

    def observe(self, score: Tensor, probs: Tensor) -> None:
        """Update `score` [batch, num_kv_heads, slots] by a row's attention [batch, num_kv_heads,
        group, slots]."""
        raise NotImplementedError

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        """Evict down to the budget."""
        self.enter_prompt(layer, rows)
        budget, recent = self.budget(layer), self.recent
        self.limits[layer] = torch.stack((budget, recent), -1)
        prompt = slice(0, key.shape[2])
        self.score[layer] = torch.zeros_like(self.tokens[layer], dtype=torch.float32)
        tokens, score = self.tokens[layer][:, :, prompt], self.score[layer][:, :, prompt]
        found = self.prompt_score(layer, query, key, value, rows)
        score.copy_(checked(self.prompt_score, found, "batch, KV heads, tokens", *tokens.shape))
        old = tokens < (rows.lengths - recent)[:, None, None]
        gone = lowest_scores(score, old, (rows.lengths - budget)[:, None]) | ~rows.real[:, None]
        score.masked_fill_(gone, 0.0)
        tokens.masked_fill_(gone, EMPTY)

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """Each row reads all that is kept, is observed, and evicts a token if more than the budget
        are kept."""
        self.enter(layer, rows)
        positions = rows.positions.masked_fill(~rows.real, -1) if rows.padded else rows.positions
        if kernels := kernels_for(self.tokens[layer]):
            mask = self._scan_by_kernels(kernels, layer, rows, positions)
        else:
            mask = self._scan(layer, rows, positions)
        return Selection(mask, torch.minimum(rows.positions, self.limits[layer][:, :1]))

    def _scan(self, layer: int, rows: QueryRows, positions: Tensor) -> Tensor:
        """The mask of the tokens that each row reads: bool [batch, num_kv_heads, rows, slots].

        positions: int [batch, rows], -1 for padding, which evicts nothing. The loop runs for every
        row of a text, so it has few operations, on the slots in use alone: it updates `hidden` and
        the score; `tokens` and the mask follow after the last row.
        """
        scores, softmax = rows.true_scores(), self.geometry.softmax(layer)
        num_rows, slots = scores.shape[3:]
        held = self.tokens[layer][..., :slots]
        score_of_slots = score = self.score[layer][..., :slots]
        budget, recent = self.limits[layer].split(1, -1)
        evicts = (positions >= budget)[:, None]
        used = _used_slots(held, num_rows)
        tokens = held
        if used is not None:
            tokens, score = held.gather(-1, used), score_of_slots.gather(-1, used)
            scores = scores.gather(-1, used[:, :, None, None].expand(*scores.shape[:4], -1))
        loss = mask_bias(~evicts).unsqueeze(-1).expand(-1, held.shape[1], -1, -1)
        is_old = tokens.unsqueeze(2) <= (positions - recent)[:, None, :, None]
        safe = -mask_bias(is_old)  # inf for a recent token
        hidden = mask_bias(tokens != EMPTY)
        victims = torch.empty((num_rows, *held.shape[:2], 1), dtype=torch.int64, device=held.device)
        visible_scores = scores.new_empty((*scores.shape[:3], 1, scores.shape[-1]))
        standing = torch.empty_like(score)
        is_real = rows.real.float().unbind(1)
        hidden_of_head = hidden[:, :, None, None]
        # Parts of all rows at once: an index in the loop takes as long as an operation.
        row_parts = scores.split(1, 3), safe.unbind(2), loss.unbind(2), victims.unbind(), is_real
        for row_scores, is_safe, lost, victim, real in zip(*row_parts, strict=True):
            torch.add(row_scores, hidden_of_head, out=visible_scores)
            probs = softmax.weights(visible_scores).squeeze(3)
            if rows.padded:
                probs = probs * real[:, None, None, None]
            self.observe(score, probs)
            torch.sub(score, hidden, out=standing).add_(is_safe)
            torch.argmin(standing, -1, keepdim=True, out=victim)
            hidden.scatter_add_(-1, victim, lost)
        victim = victims.movedim(0, -2).squeeze(-1)
        if used is not None:
            victim = used.gather(-1, victim)
        # The row after which each slot's token leaves. One more slot takes the victims of rows that
        # evict nothing.
        order = torch.arange(num_rows, dtype=torch.int32, device=held.device)
        leaves_after = held.new_full((*held.shape[:2], slots + 1), num_rows)
        targets = victim.masked_fill_(~evicts, slots)
        leaves_after.scatter_(-1, targets, order.expand(*held.shape[:2], -1))
        visible = held.unsqueeze(2) < rows.positions[:, None, :, None]
        mask = visible & (leaves_after[..., None, :slots] >= order[:, None])
        tokens.masked_fill_(hidden == -INF, EMPTY)
        if used is not None:  # what was gathered goes back
            held.scatter_(-1, used, tokens)
            score_of_slots.scatter_(-1, used, score)
        return mask

    def _scan_by_kernels(
        self, kernels: ModuleType, layer: int, rows: QueryRows, positions: Tensor
    ) -> Tensor:
        """The same result as `_scan`."""
        scores, softmax = rows.true_scores(), self.geometry.softmax(layer)
        num_rows, slots = scores.shape[3:]
        tokens, score = self.tokens[layer], self.score[layer]
        held = tokens[..., :slots]
        mask = torch.empty((*held.shape[:2], num_rows, slots), dtype=torch.bool, device=held.device)
        for row in range(num_rows):
            torch.lt(held, rows.positions[:, row, None, None], out=mask[:, :, row])
            is_free = (held == EMPTY)[:, :, None, None]
            row_scores = scores[:, :, :, row : row + 1].masked_fill(is_free, -INF)
            probs = softmax.weights(row_scores)[:, :, :, 0]
            if rows.padded:
                probs = probs * rows.real[:, None, row, None, None]
            self.observe(score[..., :slots], probs)
            kernels.evict_least(score, tokens, slots, positions[:, row], self.limits[layer])
        return mask


def lowest_scores(
    score: Tensor, competes: Tensor, count: Tensor, tie_score: Tensor | None = None
) -> Tensor:
    """Mask of the `count` tokens of the least `score` among those that compete.

    Of equal ones those of the least `tie_score`, if given, and then the earlier.
    score, competes, tie_score: [batch, num_kv_heads, tokens], oldest first; count: int [batch,
    num_kv_heads or 1].
    """
    score = score.masked_fill(~competes, INF)
    if tie_score is None:
        ascending = score.argsort(dim=-1, stable=True)
    else:
        second = tie_score.argsort(dim=-1, stable=True)
        ascending = second.gather(-1, score.gather(-1, second).argsort(dim=-1, stable=True))
    first = torch.arange(score.shape[-1], device=score.device) < count.unsqueeze(-1)
    return torch.zeros_like(competes).scatter_(-1, ascending, first.expand_as(competes))


def _used_slots(tokens: Tensor, num_rows: int) -> Tensor | None:
    """The slots that hold a token, in ascending order: int64 [batch, num_kv_heads, most of a head].
    A head with fewer has free ones behind them.

    None where so few of the `tokens` [batch, num_kv_heads, slots] are free, or so few rows read
    them, that a gather costs more than it saves.
    """
    if num_rows < LEAST_ROWS:
        return None
    is_free = tokens == EMPTY
    most = int((~is_free).sum(-1).max())
    if most > GATHERED_SHARE * tokens.shape[-1]:
        return None
    return is_free.byte().argsort(dim=-1, stable=True)[..., :most]


def _like(index: Tensor, data: Tensor) -> Tensor:
    """`index` [batch, kv, n] shaped to gather or scatter along the slots of `data` [batch, kv,
    slots, ...]."""
    return index.view(*index.shape, *([1] * (data.dim() - 3))).expand(*index.shape, *data.shape[3:])

"""Methods that keep every token, score tokens or pages, and read the best of them.

`Selecting` and `ChoosingBy` have the settings that they share, `largest` is the choice itself.
`Retrieving` and `RetrievingState` are the easy base: a state says what it keeps of the keys
(`append`) and how a query scores each token, or each page of `page_size` tokens (`scores`). The
page that is not full yet is always read, so an index of pages needs full pages only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from methods.attention import num_true
from methods.base import (
    Calibration,
    Geometry,
    Lengths,
    Method,
    PromptRows,
    QueryRows,
    Rest,
    Selection,
    State,
    TokenCounts,
    When,
    checked,
    floor_frac,
    least_number,
    require,
)
from methods.compiled import kernels_for
from methods.settings import least, one_of, setting, share

GROUPS = ("best", "max_logits", "sum_logits", "max_probs", "sum_probs", "union")


@dataclass(frozen=True)
class Selecting(Method):
    """Settings of all methods that read the best by their scores. With group=union the number read
    depends on the data."""

    group: str = setting(
        "best",
        "how the scores of a KV head's query heads become one; union: the best of each query head",
        one_of(*GROUPS),
    )
    num_sinks: int = setting(0, "first tokens that are always read", least(0))
    recent_frac: float = setting(
        0.0, "share of the tokens read that are the most recent", share(zero=True)
    )

    def min_budget(self, counts: TokenCounts) -> float:
        """The least number that reads a token beside the sinks at the first row."""
        if not self.num_sinks:
            return super().min_budget(counts)
        first = counts._replace(cached=counts.prompt)

        def is_enough(frac: float) -> bool:
            read = self.with_budget(frac).max_tokens_read(first, self.dense_layers)
            return read > self.num_sinks

        return least_number(is_enough)

    def tokens_read(self, counts: TokenCounts, layer: int) -> float | None:
        """Tokens of a set; None for a union, whose size the data decides."""
        return None if self.group == "union" else self.max_tokens_read(counts, layer)

    def max_tokens_read(self, counts: TokenCounts, layer: int) -> int:
        """Tokens of a set at most; for a union all that are kept."""
        if self.group == "union":
            return self.tokens_kept(counts, layer)
        return self.set_size(counts)

    def set_size(self, counts: TokenCounts) -> int:
        """Tokens of each set that is chosen, at most."""
        raise NotImplementedError

    def check(self, geometry: Geometry, lengths: Lengths) -> None:
        """ValueError where the sinks leave nothing to select in the shortest prompt, unless all of
        it is read."""
        prompt = int(lengths.prompt.min())
        shortest = TokenCounts(prompt, prompt, int(lengths.final.min()))
        read = self.max_tokens_read(shortest, self.dense_layers)
        enough = not self.num_sinks or read > self.num_sinks or read == shortest.cached
        below = f"below {read}, what is read of a prompt of {prompt} tokens"
        require(enough, "num_sinks", self.num_sinks, below)

    def forced(
        self, first: Tensor, last: Tensor, positions: Tensor, num_read: Tensor
    ) -> Tensor | None:
        """Candidates that are read whatever their score: sinks and recent tokens; None for none.

        first, last: int [batch, num_kv_heads or 1, n], first and last token of each candidate;
        positions: int [batch, rows]; num_read: int [batch, rows], tokens read in all. Returns bool
        [batch, 1 or num_kv_heads, rows, n].
        """
        if not self.num_sinks and not self.recent_frac:
            return None
        recent = (positions - floor_frac(self.recent_frac, num_read))[:, None, :, None]
        return (first.unsqueeze(2) < self.num_sinks) | (last.unsqueeze(2) >= recent)

    def reduced(self, scores: Tensor, forced: Tensor | None = None) -> Tensor:
        """One score per candidate for each set that is chosen: [batch, sets, rows, n], inf where
        `forced`.

        There is a set for each KV head; for `union`, for each query head. `best`
        is InfiniGen's r: the maximum over the group of (score - the head's best score).
        Probabilities are over the candidates that compete, without those that are read whatever
        their score. Means rank as sums do.
        scores: [batch, num_kv_heads, group, rows, n], -inf where nothing may be read; overwritten.
        A candidate that may not be read is not forced.
        """
        group = self.group
        if forced is not None:
            forced = forced & (scores[:, :, 0] != -math.inf)
        if group.endswith("probs") and forced is not None:
            scores = scores.masked_fill(forced.unsqueeze(2), -math.inf)
        if group == "sum_probs":
            score = summed_probs(scores)
        elif group == "sum_logits":
            score = scores.sum(2)
        elif group == "union":
            score = scores.flatten(1, 2)
        else:
            if group == "best":
                scores -= scores.amax(-1, keepdim=True)
            elif group == "max_probs":
                scores = scores.log_softmax(-1)  # log: same order, and -inf stays where hidden
                if forced is not None:  # where nothing competes
                    scores.nan_to_num_(nan=-math.inf, neginf=-math.inf)
            score = scores[:, :, 0] if scores.shape[2] == 1 else scores.amax(2)
        if forced is not None:
            sets = score.shape[1] // forced.shape[1]  # a union has one set for each query head
            score.masked_fill_(forced.repeat_interleave(sets, 1), math.inf)
        return score

    def joined(self, mask: Tensor, count: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """The chosen sets as one mask per KV head, and the number chosen in it.

        mask: bool [batch, sets, rows, n]; count: [batch, rows], chosen in each set. Returns bool
        [batch, num_kv_heads, rows, n] and the mean over the heads, fp64 [batch, rows].
        """
        if self.group != "union":
            return mask, count.double()
        joint = mask.unflatten(1, (-1, geometry.group)).any(2)
        return joint, joint.sum(-1).double().mean(1)


@dataclass(frozen=True)
class ChoosingBy(Method):
    """A method whose query is a setting. By a query that is known one layer ahead, rows
    cross the link while the previous layer computes."""

    when: When = setting(
        "own_query",
        "the query that selects; in the previous_layer it is predicted",
        one_of("previous_step", "previous_layer", "own_query"),
    )


@dataclass(frozen=True)
class SelectingBy(ChoosingBy, Selecting):
    """A method that reads the best by a query that is a setting."""


# The choice


def hide(scores: Tensor, rows: QueryRows) -> None:
    """Set the scores [batch, num_kv_heads, group, rows, slots] of slots that a row does not see to
    -inf."""
    first = 0
    if scores.device.type == "cpu":
        # In replay all rows see most slots: those before the first hidden one.
        hidden = rows.slot_positions.numpy() >= int(rows.positions.min())
        first = int(hidden.any((0, 1)).argmax())
    positions = rows.positions[:, None, :, None]
    visible = rows.slot_positions[:, :, None, first:] < positions
    scores[..., first:].masked_fill_(~visible.unsqueeze(2), -math.inf)


def summed_probs(scores: Tensor) -> Tensor:
    """Probabilities of each head, summed over the group: [batch, sets, rows, n], -inf where the
    scores [batch, sets, group, rows, n] are. The smallest float stands for anything less, so that
    what a row may read is above what is hidden from it. Overwrites the scores."""
    hidden = scores[:, :, 0] == -math.inf
    total = torch.softmax(scores, -1, out=scores).sum(2)
    return total.clamp_(min=torch.finfo(total.dtype).tiny).masked_fill_(hidden, -math.inf)


def _is_numpys(values: Tensor) -> bool:
    """True if numpy sorts, partitions and compares them in place of torch, in less time."""
    return values.device.type == "cpu" and values.dtype == torch.float32


def ascending(values: Tensor) -> Tensor:
    """Sorted along the last axis. On the CPU numpy's sort is the faster one."""
    if _is_numpys(values):
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(-1).values


def at_least(values: Tensor, least: Tensor) -> Tensor:
    """`values` >= `least`, which is broadcast. numpy compares in half of torch's time."""
    if _is_numpys(values):
        return torch.from_numpy(np.greater_equal(values.numpy(), least.numpy()))
    return values >= least


def at_rank(values: Tensor, rank: Tensor) -> Tensor:
    """The value that has `rank` smaller or equal ones before it in ascending order.

    values: [batch, num_kv_heads, rows, slots]; rank: int [batch, rows], below slots. Returns
    [batch, num_kv_heads, rows, 1]. On the CPU numpy partitions the rows, in half the time of its
    sort and an eighth of that of `topk`. Elsewhere values are sorted, without a sync.
    """
    if not _is_numpys(values):
        index = rank[:, None, :, None].expand(*values.shape[:-1], 1)
        return values.sort(-1).values.gather(-1, index)
    found = values.new_empty(*values.shape[:-1], 1)
    for sequence, ranks, into in zip(values.numpy(), rank.numpy(), found.numpy(), strict=True):
        # Neighbouring rows often have one rank: a call for all of them
        borders = np.flatnonzero(np.diff(ranks)) + 1
        for start, stop in itertools.pairwise([0, *borders.tolist(), len(ranks)]):
            at = int(ranks[start])
            parted = np.partition(sequence[:, start:stop], at, axis=-1)
            into[:, start:stop, 0] = parted[..., at]
    return found


def largest(values: Tensor, count: Tensor, order: Tensor | None = None) -> Tensor:
    """Mask of the `count` largest values; equal values are taken from the lowest slots. No device
    sync.

    values: [batch, num_kv_heads, rows, slots]; count: int [batch, rows]; where it exceeds the
    number of finite values, all of them are taken; order: int64 [batch, num_kv_heads, slots], the
    order in which equal values are taken, if not by slot.
    """
    if kernels := kernels_for(values):
        return kernels.largest(values, order=order, frac=1.0, least=0, whole=count, cached=count)[0]
    if order is not None:
        order_of_rows = order.unsqueeze(2).expand_as(values)
        mask = largest(values.gather(-1, order_of_rows), count)
        return torch.empty_like(mask).scatter_(-1, order_of_rows, mask)
    if _is_numpys(values) and values.shape[2] == 1:
        return _largest_of_one_row(values, count[:, 0].tolist())
    slots = values.shape[-1]
    least = at_rank(values, (slots - count).clamp(0, slots - 1))
    least = least.clamp(min=torch.finfo(values.dtype).min)  # -inf is not taken
    least = least.masked_fill((count == 0)[:, None, :, None], math.nan)  # nothing compares to it
    mask = at_least(values, least)
    # Ties at the last place are common: each head of a group has r = 0 at its best token.
    if values.device.type != "cpu":
        return _keep_lowest(mask, values == least, count[:, None, :, None])
    tied = num_true(mask) > count[:, None]
    if bool(tied.any()):
        where = tied.nonzero(as_tuple=True)
        wanted = count[:, None].expand(mask.shape[:-1])[where].unsqueeze(-1)
        mask[where] = _keep_lowest(mask[where], values[where] == least[where], wanted)
    return mask


def _largest_of_one_row(values: Tensor, counts: Sequence[int]) -> Tensor:
    """`largest` on a CPU for one row of each sequence, without a sort: values [batch, num_kv_heads,
    1, slots], a count for each sequence."""
    slots = values.shape[-1]
    if len(set(counts)) > 1:
        parts = zip(values.split(1), counts, strict=True)
        return torch.cat([_largest_of_one_row(own_values, [count]) for own_values, count in parts])
    count = min(counts[0], slots)
    if count <= 0:
        return torch.zeros_like(values, dtype=torch.bool)
    numbers = values.numpy()
    least = np.partition(numbers, slots - count, -1)[..., slots - count, None]
    least = np.maximum(least, np.finfo(numbers.dtype).min)  # hidden values are below
    taken = numbers >= least
    mask = torch.from_numpy(taken)
    if (np.count_nonzero(taken, -1) > count).any():  # several are equal to the least one
        mask = _keep_lowest(mask, values == torch.from_numpy(least), count)
    return mask


def _keep_lowest(mask: Tensor, equal: Tensor, count: Tensor | int) -> Tensor:
    """Drop from `mask` the equal values of the highest slots until `count` (with a last axis of 1)
    are left."""
    above = mask & ~equal
    return above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def largest_of_each(values: Tensor, count: Tensor) -> Tensor:
    """`largest` with a count for each set: values [batch, sets, rows, slots], count int [batch,
    sets, rows]."""
    return largest(values.flatten(0, 1).unsqueeze(1), count.flatten(0, 1)).view_as(values)


# The easy base


@dataclass(frozen=True)
class Retrieving(SelectingBy):
    """Reads `budget` of the cached tokens, or `read_tokens` of them."""

    budget: float = setting(0.2, "share of the cached tokens that a row reads", share())
    read_tokens: int | None = setting(
        None, "this many tokens instead of the share", least(1, null=True)
    )

    @property
    def page_size(self) -> int:
        """Tokens that have one score and are read together."""
        return 1

    def budget_in_tokens(self, cached: int) -> int:
        """Tokens that the settings ask for with `cached` tokens."""
        if self.read_tokens is not None:
            return min(self.read_tokens, cached)
        return int(self.budget * cached)

    def pages_read(self, cached: int) -> int:
        """Full pages that a row with `cached` tokens reads beside the last, unfinished one."""
        wanted = (self.budget_in_tokens(cached) - cached % self.page_size) // self.page_size
        return min(cached // self.page_size, max(1, wanted))

    def set_size(self, counts: TokenCounts) -> int:
        cached = counts.cached
        return self.pages_read(cached) * self.page_size + cached % self.page_size

    def with_budget(self, frac: float) -> Self:
        return replace(self, budget=frac, read_tokens=None)

    def artifact_budget(self) -> float:
        return self.budget if self.read_tokens is None else 1.0


@dataclass(frozen=True)
class RetrievingPages(Retrieving):
    """Reads them in pages."""

    page_size: int = setting(1, "tokens of a page, which are read together", least(1))


class RetrievingState(State):
    """Reads the tokens or pages that score best.

    paged: True if `scores` are of pages, counted from position 0; else of slots.
    """

    paged: ClassVar[bool] = False

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        self.num_tokens = int(self.lengths.final.max())
        counts = [self.method.pages_read(cached) for cached in range(self.num_tokens + 1)]
        self.pages_read = torch.tensor(counts, device=self.lengths.final.device)

    @property
    def num_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.num_tokens // self.method.page_size)

    def scores(self, layer: int, rows: QueryRows) -> Tensor:
        """Scaled scores of `rows.query`, fp32 [batch, num_kv_heads, group, rows, slots or pages].

        The scores of slots that are not visible, and of pages that are not full, may be anything.
        """
        raise NotImplementedError

    def scored(self, layer: int, rows: QueryRows) -> Tensor:
        """The `scores`, of the right shape."""
        batch, num_rows = rows.positions.shape
        kv_heads, group = self.geometry.num_kv_heads, self.geometry.group
        number = self.num_pages if self.paged else rows.slot_positions.shape[-1]
        axes = f"batch, KV heads, group, rows, {'pages' if self.paged else 'slots'}"
        found = self.scores(layer, rows)
        return checked(self.scores, found, axes, batch, kv_heads, group, num_rows, number)

    def index_read(self, layer: int, positions: Tensor) -> Tensor | None:
        """Size of the index that `scores` reads, in tokens (`Geometry.elements`), [batch, rows];
        None for no index."""
        return None

    def rest(self, layer: int, rows: QueryRows, scores: Tensor, mask: Tensor) -> Rest | None:
        """Replacement for the tokens that are not read, by the scores and the mask of those read;
        None for none."""
        return None

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        self.append(layer, key, value, rows.positions, slice(0, key.shape[2]))

    def best(self, rows: QueryRows, scores: Tensor) -> Tensor:
        """The tokens or full pages that each set reads, by their `scores`: bool [batch, sets, rows,
        slots or pages]."""
        size, positions = self.method.page_size, rows.positions
        first = last = rows.slot_positions  # of each candidate the first and the last token
        if self.paged:
            first = torch.arange(self.num_pages, device=positions.device)[None, None] * size
            last = first + size - 1
        pages, unfinished = self.pages_read[positions], positions % size
        cached = last.unsqueeze(2) < positions[:, None, :, None]
        forced = self.method.forced(first, last, positions, pages * size + unfinished)
        score = self.method.reduced(scores.masked_fill(~cached.unsqueeze(2), -math.inf), forced)
        return largest(score, pages)

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """The best pages and the unfinished one."""
        size, positions = self.method.page_size, rows.positions
        scores = self.scored(layer, rows)
        pages, unfinished = self.pages_read[positions], positions % size
        mask, num_pages = self.method.joined(self.best(rows, scores), pages, self.geometry)
        tokens = self.tokens_of(mask, rows) if self.paged else mask
        side, rest = self.index_read(layer, positions), self.rest(layer, rows, scores, tokens)
        if side is not None:
            checked(self.index_read, side, "batch, rows", *positions.shape)
        return Selection(tokens, num_pages * size + unfinished, side, rest=rest)

    def tokens_of(self, pages: Tensor, rows: QueryRows) -> Tensor:
        """The slots of the chosen `pages` [batch, sets, rows, pages], and those of the unfinished
        one."""
        size = self.method.page_size
        page = (rows.slot_positions // size).clamp(max=self.num_pages - 1).long().unsqueeze(2)
        chosen = pages.gather(-1, page.expand(*pages.shape[:3], -1))
        first_unfinished = rows.positions - rows.positions % size
        unfinished = rows.slot_positions.unsqueeze(2) >= first_unfinished[:, None, :, None]
        return (chosen | unfinished) & rows.visible()

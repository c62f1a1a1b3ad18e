"""Windows over the first tokens ("sinks") and the most recent ones: StreamingLLM (Xiao et al., ICLR
2024) in every KV head, DuoAttention (Xiao et al., ICLR 2025) in those with the smallest gates.

The rule, and where it differs (made into docs/methods.md):

**streaming** keeps floor(`budget` · T) tokens or `kept_tokens`, the `num_sinks` (4) first ones
among them, at their own positions, and drops a token at every row. StreamingLLM's code renumbers
them. kvpress's StreamingLLMPress evicts once, after the prompt, and keeps all that is generated:
`method=kvpress:StreamingLLMPress`.

**duo**: round(`sparsity` · number) of the KV heads under the method, those with the smallest gates,
keep only `num_sinks` (64) first and `num_recent` (256) last tokens. `pattern` is a file of gates as
the authors publish them: a line per layer, a tab between KV heads. Without it gates are measured on
the calibration text, as kvpress does: how much of the mean query's attention to the mean key at 500
positions falls on early ones. OPT, without rotary positions, needs a file. `budget=` sets
`sparsity` and is met to half a head; the least is that of the windows. The prompt is dense, as in
the official code where it is one pass; in chunks, the official streaming heads see their window
alone from the second chunk on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from methods.base import (
    EMPTY,
    Calibration,
    Geometry,
    Lengths,
    Method,
    PromptRows,
    QueryRows,
    Selection,
    TokenCounts,
    checked,
    require,
    share_above,
)
from methods.evicting import EvictingState, EvictingToBudget
from methods.settings import least, setting, share


class WindowState(EvictingState):
    """KV heads that stream keep the method's `num_sinks` first tokens and the `recent` last ones;
    others keep all."""

    @property
    def recent(self) -> Tensor:
        """Recent tokens of the window, int [batch]."""
        raise NotImplementedError

    def streams(self, layer: int) -> Tensor:
        """Mask of the KV heads of a layer that stream, bool [num_kv_heads, 1, 1], or [1, 1, 1]
        where all are alike."""
        raise NotImplementedError

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        self.enter_prompt(layer, rows)
        self._leave(layer, rows.lengths)

    def select(self, layer: int, rows: QueryRows) -> Selection:
        mask = rows.visible() & self._stays(layer, rows.slot_positions.unsqueeze(2), rows.positions)
        self.enter(layer, rows)
        self._leave(layer, torch.where(rows.real, rows.positions + 1, 0).amax(-1))
        window = torch.minimum(rows.positions, (self.method.num_sinks + self.recent)[:, None])
        # [num_kv_heads or 1, batch, rows]
        read = torch.where(self.streams(layer), window, rows.positions)
        return Selection(mask, read.double().mean(0))

    def _stays(self, layer: int, token: Tensor, cached: Tensor) -> Tensor:
        """Mask of the tokens in the window, bool [batch, num_kv_heads or 1, rows, slots].

        token: [batch, 1 or num_kv_heads, 1, slots]; cached: [batch, rows].
        """
        oldest = (cached - self.recent[:, None])[:, None, :, None]
        streams, kv_heads = self.streams(layer), self.geometry.num_kv_heads
        checked(self.streams, streams, "KV heads or 1, 1, 1", (kv_heads, 1), 1, 1)
        return (token < self.method.num_sinks) | (token >= oldest) | ~streams

    def _leave(self, layer: int, cached: Tensor) -> None:
        stays = self._stays(layer, self.tokens[layer].unsqueeze(2), cached[:, None]).squeeze(2)
        self.tokens[layer].masked_fill_(~stays, EMPTY)


class StreamingState(WindowState):
    """All KV heads stream; the window is a share of T, or a number of tokens."""

    replayable = True

    @property
    def recent(self) -> Tensor:
        return self.method.budgets_in_tokens(self.lengths.final) - self.method.num_sinks

    def streams(self, layer: int) -> Tensor:
        return torch.ones(1, 1, 1, dtype=torch.bool, device=self.lengths.final.device)


@dataclass(frozen=True)
class Streaming(EvictingToBudget):
    """Keeps floor(budget * T) cached tokens or `kept_tokens`: the `num_sinks` first and the most
    recent, at their own positions.

    Source: StreamingLLM (ICLR 2024)
    Keeps: the first and the most recent tokens
    """

    num_sinks: int = setting(4, "first tokens that always stay", least(0))

    title = "Streaming"
    state = StreamingState

    def check(self, geometry: Geometry, lengths: Lengths) -> None:
        """ValueError where a sequence's budget does not exceed the first tokens."""
        shortest = int(lengths.final.min())
        kept = self.budget_in_tokens(shortest)
        found = f"it keeps {kept} of {shortest} tokens"
        more = f"more: {found}, which must exceed method.num_sinks={self.num_sinks}"
        require(kept > self.num_sinks, *self.budget_setting, more)

    def min_budget(self, counts: TokenCounts) -> float:
        """The least share that keeps one token more than the first ones."""
        below = f"below {counts.final}, the shortest sequence"
        require(self.num_sinks < counts.final, "num_sinks", self.num_sinks, below)
        return share_above(self.num_sinks, counts.final)


class DuoState(WindowState):
    """heads: bool [num_layers, num_kv_heads], True for the heads that stream."""

    replayable = True

    def start(self, calibration: Calibration | None) -> None:
        method = self.method
        gates = method.gates(self.geometry, calibration).to(self.lengths.final.device)
        selecting = gates[method.dense_layers :].flatten()
        first = selecting.argsort(stable=True)[: round(method.sparsity * len(selecting))]
        self.heads = torch.zeros_like(gates, dtype=torch.bool)
        self.heads.view(-1)[first + gates.shape[1] * method.dense_layers] = True

    @property
    def recent(self) -> Tensor:
        return torch.full_like(self.lengths.final, self.method.num_recent)

    def streams(self, layer: int) -> Tensor:
        return self.heads[layer, :, None, None]


@dataclass(frozen=True)
class DuoAttention(Method):
    """Share `sparsity` of the KV heads of the layers that are not dense stream, rounded to heads.
    Defaults are those that the authors deploy.

    Source: DuoAttention (ICLR 2025)
    Keeps: a window in some KV heads, every token in the others
    """

    sparsity: float = setting(0.5, "share of the KV heads that stream", share(zero=True))
    num_sinks: int = setting(64, "first tokens that a streaming head keeps", least(0))
    num_recent: int = setting(256, "last tokens that a streaming head keeps", least(1))
    pattern: str | None = setting(
        None, "file of gates, a line a layer, a tab between KV heads; null measures them"
    )

    title = "DuoAttention"
    state = DuoState

    def __post_init__(self) -> None:
        super().__post_init__()
        is_there = self.file is None or Path(self.file).is_file()
        require(is_there, "pattern", self.pattern, "a file that exists, or null")

    @property
    def file(self) -> str | None:
        return None if self.pattern is None else str(Path(self.pattern).expanduser())

    @property
    def needs_calibration(self) -> bool:
        return self.pattern is None

    def calibrate(
        self, query: Tensor, key: Tensor, geometry: Geometry, earlier: Sequence[Calibration]
    ) -> Calibration:
        """gates: fp32 [num_kv_heads], mean over the group."""
        layer = len(earlier)
        text = torch.arange(query.shape[1], device=query.device)[None]
        ahead = torch.arange(500, device=query.device)[None]

        def mean_ahead(states: Tensor) -> Tensor:
            plain = geometry.rotate(states[None], text, inverse=True, layer=layer).float()
            mean = plain.mean(2, keepdim=True).expand(-1, -1, ahead.shape[1], -1)
            return geometry.rotate(mean, ahead, layer=layer)

        mean_query, mean_key = mean_ahead(query), mean_ahead(key)
        softmax = geometry.softmax(layer)
        probs = softmax.weights(softmax.scores(mean_query[:, :, -1:], mean_key))
        return {"gates": probs[0, :, :, 0].cumsum(-1).mean((1, 2))}

    def gates(self, geometry: Geometry, calibration: Calibration | None) -> Tensor:
        """fp32 [num_layers, num_kv_heads]. ValueError for a file of another shape, or gates that
        are all equal."""
        if self.file is None:
            assert calibration is not None, "new_state asks for it"
            gates = calibration["gates"]
            differ = bool((gates != gates[0, 0]).any())
            needed = f"a file: {geometry.family} has no rotary positions to measure gates by"
            require(differ, "pattern", None, needed)
            return gates
        shape = (geometry.num_layers, geometry.num_kv_heads)
        try:
            gates = torch.from_numpy(np.loadtxt(self.file, delimiter="\t", ndmin=2)).float()
        except (OSError, ValueError) as error:
            wrong = f"method.pattern={self.pattern}: must be numbers separated by tabs ({error})"
            raise ValueError(wrong) from error
        fits = tuple(gates.shape) == shape and bool(gates.isfinite().all())
        allowed = f"{shape[0]} lines of {shape[1]} finite numbers, one for each KV head"
        require(fits, "pattern", self.pattern, allowed)
        return gates

    def tokens_read(self, counts: TokenCounts, layer: int) -> float:
        """Tokens as if exactly `sparsity` of the heads streamed; whole heads differ by half a head
        at most."""
        window = min(counts.cached, self.num_sinks + self.num_recent)
        return (1 - self.sparsity) * counts.cached + self.sparsity * window

    def with_budget(self, frac: float) -> Self:
        """The share of heads that retrieve. The budget grows with it, from that of the windows
        alone."""
        return replace(self, sparsity=1 - frac)

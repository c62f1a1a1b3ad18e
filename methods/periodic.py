"""Methods that evict now and then while a text is generated: R-KV, TriAttention, Random Attention.

After the prompt, and after every `divide_length` generated tokens, each KV head goes back to its
budget ("compression"). Between two compressions it keeps all that is generated. A state
scores the tokens (`PeriodicState.score`); the base decides when a sequence compresses, how
many tokens stay, and which stay whatever their score: the last `window`, and the prompt's with
`protect_prompt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

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
from methods.evicting import INF, EvictingState, EvictingToBudget
from methods.settings import least, setting


class Held(NamedTuple):
    """The tokens that the KV heads of a layer hold before a compression, oldest first.

    tokens: int32 [batch, num_kv_heads, n], `EMPTY` behind the last. slots: int64 like tokens, where
    they lie. competes: bool like tokens, False for those that stay whatever their score. cached:
    int [batch], tokens of each sequence so far.
    """

    tokens: Tensor
    slots: Tensor
    competes: Tensor
    cached: Tensor


class PeriodicState(EvictingState):
    """Keeps the tokens of the largest score; of two equal ones the earlier.

    generated[layer]: int [batch] on the host, so that no step asks the device whether a compression
    is due. most: upper bound of the tokens that a KV head holds while a text is generated.
    """

    def start(self, calibration: Calibration | None) -> None:
        self.generated: dict[int, np.ndarray] = {}
        budget = self.method.budget_in_tokens(int(self.lengths.final.max()))
        self.most = budget + self.method.divide_length

    def score(self, layer: int, held: Held) -> Tensor:
        """Score of each token, fp32 [batch, num_kv_heads, n]; anything for one that does not
        compete."""
        raise NotImplementedError

    def take_in(self, layer: int, query: Tensor, real: Tensor) -> None:
        """Take in the rows since the last call, query [batch, heads, n, head_dim], real bool
        [batch, n], before the compression that follows them."""

    def fork(self, index: Tensor, num_slots: int) -> PeriodicState:
        child = super().fork(index, num_slots)
        assert isinstance(child, PeriodicState)
        chosen = index.cpu().numpy()
        child.generated = {layer: counts[chosen] for layer, counts in self.generated.items()}
        return child

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        self.enter_prompt(layer, rows)
        self.generated[layer] = np.zeros(len(key), dtype=np.int64)
        due = torch.ones_like(rows.lengths, dtype=torch.bool)
        self._compress(layer, rows.lengths, due, max(key.shape[2], self.most))

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """Read all that is kept, block by block from one compression to the next."""
        self.enter(layer, rows)
        divide_length = self.method.divide_length
        masks, begin = [], 0
        for end in self._ends(layer, rows):
            masks.append(self._visible(layer, rows, slice(begin, end)))
            self.take_in(layer, rows.query[:, :, begin:end], rows.real[:, begin:end])
            cached = rows.positions[:, end - 1] + 1
            is_multiple = (cached - self.lengths.prompt) % divide_length == 0
            self._compress(layer, cached, rows.real[:, end - 1] & is_multiple, self.most)
            begin = end
        masks.append(self._visible(layer, rows, slice(begin, None)))
        self.take_in(layer, rows.query[:, :, begin:], rows.real[:, begin:])
        mask = torch.cat(masks, 2)
        return Selection(mask, mask.sum(-1).double().mean(1))

    def _visible(self, layer: int, rows: QueryRows, block: slice) -> Tensor:
        tokens = self.tokens[layer][:, :, None, : rows.slot_positions.shape[-1]]
        return tokens < rows.positions[:, None, block, None]

    def _ends(self, layer: int, rows: QueryRows) -> list[int]:
        """Rows, counted from 1, after which a sequence compresses. Only a replayed, padded block
        asks the device."""
        real = rows.real.cpu().numpy() if rows.padded else np.ones(rows.real.shape, dtype=bool)
        generated = self.generated[layer][:, None] + real.cumsum(-1)
        self.generated[layer] = generated[:, -1]
        due = real & (generated % self.method.divide_length == 0)
        return [end for end, compresses in enumerate(due.any(0).tolist(), 1) if compresses]

    def _compress(self, layer: int, cached: Tensor, due: Tensor, most: int) -> None:
        """Go back to the budget in the sequences that are `due`, bool [batch], with `cached`
        [batch] tokens so far.

        most: upper bound of the tokens that a KV head holds.
        """
        method, tokens = self.method, self.tokens[layer]
        so_far = tokens.masked_fill(tokens >= cached[:, None, None], EMPTY)
        oldest_first = so_far.sort(dim=-1, stable=True)
        kept, slots = oldest_first.values[..., :most], oldest_first.indices[..., :most]
        rank = torch.arange(kept.shape[-1], device=kept.device)
        competes = rank < (kept != EMPTY).sum(-1, keepdim=True) - method.window
        safe = torch.full_like(self.lengths.prompt, method.window)
        if method.protect_prompt:
            competes &= kept >= self.lengths.prompt[:, None, None]
            safe = safe + self.lengths.prompt
        score = self.score(layer, Held(kept, slots, competes, cached))
        checked(self.score, score, "batch, KV heads, n", *kept.shape)
        best = score.masked_fill(~competes, -INF).argsort(dim=-1, descending=True, stable=True)
        room = (method.budgets_in_tokens(self.lengths.final) - safe)[:, None, None]
        loses = (rank >= room) & due[:, None, None]
        gone = competes & torch.zeros_like(competes).scatter_(-1, best, loses.expand_as(best))
        tokens.scatter_(-1, slots, tokens.gather(-1, slots).masked_fill(gone, EMPTY))


class KeyedState(PeriodicState):
    """A state whose scores are of the keys: it keeps a second copy of them on the device.

    kept_keys[layer]: shaped like `tokens`, [..., head_dim].
    """

    slot_tensors = {**PeriodicState.slot_tensors, "kept_keys": 0}
    kept_keys: dict[int, Tensor]

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        unused = rows.num_slots + 1 - key.shape[2]  # the dump among them
        self.kept_keys[layer] = pad(key, (0, 0, 0, unused))
        super().prompt(layer, query, key, value, rows)

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice | Tensor
    ) -> None:
        self.kept_keys[layer][:, :, slots] = key

    def keys_of(self, layer: int, held: Held) -> Tensor:
        """The keys of the tokens held, [batch, num_kv_heads, n, head_dim]."""
        head_dim = self.kept_keys[layer].shape[-1]
        index = held.slots.unsqueeze(-1).expand(-1, -1, -1, head_dim)
        return self.kept_keys[layer].gather(2, index)


@dataclass(frozen=True)
class Periodic(EvictingToBudget):
    """Goes back to its budget now and then. The budget counts the window, and the prompt with
    `protect_prompt`."""

    divide_length: int = setting(128, "generated tokens from one compression to the next", least(1))
    window: int = setting(0, "last tokens that stay", least(0))
    protect_prompt: bool = setting(False, "the prompt's tokens stay; the budget counts them")

    def safe(self, prompt: int) -> int:
        """Tokens that stay whatever their score, in a sequence with a prompt of so many."""
        return self.window + (prompt if self.protect_prompt else 0)

    def check(self, geometry: Geometry, lengths: Lengths) -> None:
        """ValueError where a sequence's budget does not exceed the tokens that always stay."""
        name, value = self.budget_setting
        for prompt, final in zip(lengths.prompt.tolist(), lengths.final.tolist(), strict=True):
            budget = self.budget_in_tokens(final)
            more = f"more: it keeps {budget} of {final} tokens, which must exceed "
            more += f"method.window={self.window}"
            if self.protect_prompt:
                more += f" and the {prompt} tokens of the prompt; or method.protect_prompt=false"
            require(budget > self.safe(prompt), name, value, more)

    def tokens_read(self, counts: TokenCounts, layer: int) -> float:
        """The tokens that the last compression left, and those generated since."""
        since = (counts.cached - counts.prompt) % self.divide_length
        return min(self.budget_in_tokens(counts.final), counts.cached - since) + since

    def tokens_kept(self, counts: TokenCounts, layer: int) -> int:
        """The most that a compression finds: its slots are taken again one by one."""
        return min(counts.cached, self.budget_in_tokens(counts.final) + self.divide_length - 1)

    def min_budget(self, counts: TokenCounts) -> float:
        """The least share that keeps one token more than always stay."""
        safe = self.safe(counts.prompt)
        if self.protect_prompt:
            why = f"false: prompt and window have {safe} of {counts.final} tokens"
            require(safe < counts.final, "protect_prompt", "true", why)
        below = f"below {counts.final}, the shortest sequence"
        require(safe < counts.final, "window", self.window, below)
        return share_above(safe, counts.final)

"""R-KV (Cai et al., NeurIPS 2025): for long generations, drop now and then tokens that are
unattended and redundant.

After the prompt, and after every `divide_length` generated tokens, each KV head goes back to its
budget. A token's worth grows with the attention of the last rows and falls with the similarity of
its key to the other keys, as a reasoning text says much twice. The state keeps these rows' queries,
and a second copy of the kept keys on the device.

The rule, and where it differs (made into docs/methods.md):

**rkv**: after the prompt and after every `divide_length` (128) generated tokens, each KV head goes
back to floor(`kept_frac` · T) tokens or `kept_tokens`, the last `window` (8) among them. Worth is
`mix_lambda` (0.07) · attention - (1 - `mix_lambda`) · similarity: the attention of the last
`window` rows, smoothed by a maximum `kernel` (7) wide, and the softmax of the key's mean cosine
with the other kept keys; of the keys with a cosine above 0.5 the latest does not count. The size
includes the tokens between compressions. Each sequence of a batch has its own schedule. The
official code differs in four points. It compresses where the length of prompt and answer is a
multiple of `divide_length`, and one step later, with the next token. A compression leaves its cache
in the order of worth, so that later "the latest" and the smoothing follow that order instead of the
text. Where no cosine exceeds 0.5, its first key does not count. Its serving code waits until the
budget and a whole `buffer` (128) are there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize, pad

from methods.attention import PROMPT_CHUNK
from methods.base import EMPTY, Calibration, PromptRows, QueryRows, Selection, TokenCounts, require
from methods.evicting import INF, EvictingState, EvictingToBudget
from methods.settings import least, odd, setting, share

ALIKE = 0.5
"""Keys with a larger cosine say the same. The latest of them does not count as similar."""


class RKVState(EvictingState):
    """kept_keys[layer]: like `tokens`, [..., head_dim]. queries[layer]: last ones, [batch, heads,
    window, head_dim].

    generated[layer]: int [batch] on the host, so that no step asks the device whether a compression
    is due.
    """

    slot_tensors = {**EvictingState.slot_tensors, "kept_keys": 0}
    sequence_tensors = ("queries",)
    kept_keys: dict[int, Tensor]
    queries: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        self.generated: dict[int, np.ndarray] = {}
        self.most = self.method.budget(int(self.lengths.final.max())) + self.method.divide_length

    def fork(self, index: Tensor, num_slots: int) -> RKVState:
        child = super().fork(index, num_slots)
        assert isinstance(child, RKVState)
        child.generated = {
            layer: counts[index.cpu().numpy()] for layer, counts in self.generated.items()
        }
        return child

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        self.enter_prompt(layer, rows)
        prompt, window = key.shape[2], self.method.window
        self.kept_keys[layer] = pad(key, (0, 0, 0, rows.num_slots + self.spare_slots - prompt))
        self.queries[layer] = pad(query, (0, 0, max(0, window - prompt), 0))[:, :, -window:]
        self.generated[layer] = np.zeros(len(key), dtype=np.int64)
        due = torch.ones_like(rows.lengths, dtype=torch.bool)
        self._compress(layer, self.queries[layer], rows.lengths, due, max(prompt, self.most))

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice
    ) -> None:
        self.kept_keys[layer][:, :, slots] = key

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """Read all that is kept, block by block from one compression to the next."""
        self.enter(layer, rows)
        real = pad(rows.real, (self.method.window, 0), value=True)
        queries = torch.cat([self.queries[layer], rows.query], 2)
        masks, begin = [], 0
        for end in self._ends(layer, rows):
            masks.append(self._visible(layer, rows, slice(begin, end)))
            after = rows.positions[:, end - 1] + 1
            due = rows.real[:, end - 1] & (
                (after - self.lengths.prompt) % self.method.divide_length == 0
            )
            self._compress(layer, self._last(queries, real, end), after, due, self.most)
            begin = end
        masks.append(self._visible(layer, rows, slice(begin, None)))
        self.queries[layer] = self._last(queries, real, rows.positions.shape[1])
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

    def _last(self, queries: Tensor, real: Tensor, rows: int) -> Tensor:
        """Queries of the last `window` real rows among the earlier ones and the first `rows` of
        this block."""
        window = self.method.window
        column = torch.arange(window + rows, device=real.device)
        last = torch.where(real[:, : window + rows], column, -1).sort(-1).values[:, -window:]
        return queries.gather(
            2, last[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[-1])
        )

    def _compress(
        self, layer: int, queries: Tensor, cached: Tensor, due: Tensor, most: int
    ) -> None:
        """Go back to the budget in the sequences that are `due`, bool [batch], with `cached`
        [batch] tokens so far.

        most: upper bound of the tokens that a KV head holds.
        """
        tokens, window = self.tokens[layer], self.method.window
        oldest_first = tokens.masked_fill(tokens >= cached[:, None, None], EMPTY).sort(
            dim=-1, stable=True
        )
        held, slots = oldest_first.values[..., :most], oldest_first.indices[..., :most]
        keys = self.kept_keys[layer].gather(
            2, slots.unsqueeze(-1).expand(-1, -1, -1, self.geometry.head_dim)
        )
        rank = torch.arange(held.shape[-1], device=held.device)
        competes = rank < (held != EMPTY).sum(-1, keepdim=True) - window
        attention = self._attention(layer, queries, keys, competes)
        worth = self.method.mix_lambda * attention - (1 - self.method.mix_lambda) * similarity(
            keys, held != EMPTY
        )
        best = worth.masked_fill(~competes, -INF).argsort(dim=-1, descending=True, stable=True)
        loses = (rank >= (self.method.budgets(self.lengths.final) - window)[:, None, None]) & due[
            :, None, None
        ]
        gone = competes & torch.zeros_like(competes).scatter_(-1, best, loses.expand_as(best))
        tokens.scatter_(-1, slots, tokens.gather(-1, slots).masked_fill(gone, EMPTY))

    def _attention(self, layer: int, queries: Tensor, keys: Tensor, competes: Tensor) -> Tensor:
        """Mean attention of the last rows, by a group's largest scores, smoothed: [batch,
        num_kv_heads, n]."""
        scores = self.geometry.softmax(layer).scores(queries, keys).amax(2)
        probs = scores.masked_fill_(~competes.unsqueeze(2), -INF).softmax(-1).nan_to_num_().mean(2)
        return max_pool1d(probs, self.method.kernel, stride=1, padding=self.method.kernel // 2)


@dataclass(frozen=True)
class RKV(EvictingToBudget):
    """The attention of the window's rows counts; the window is part of the budget."""

    divide_length: int = setting(128, "generated tokens from one compression to the next", least(1))
    window: int = setting(8, "last tokens that stay", least(1))
    mix_lambda: float = setting(
        0.07, "share of attention in a token's worth; the rest is similarity", share(zero=True)
    )
    kernel: int = setting(7, "width of the maximum that smooths the attention", odd())

    always_kept = "window"

    title = "R-KV"
    state = RKVState

    def __post_init__(self) -> None:
        super().__post_init__()
        above = f"above window={self.window}, or null"
        require(
            self.kept_tokens is None or self.kept_tokens > self.window,
            "kept_tokens",
            self.kept_tokens,
            above,
        )

    def tokens_read(self, counts: TokenCounts, layer: int) -> float:
        """The tokens that the last compression left, and those generated since."""
        since = (counts.cached - counts.prompt) % self.divide_length
        return min(self.budget(counts.final), counts.cached - since) + since

    def tokens_kept(self, counts: TokenCounts, layer: int) -> int:
        """The most that a compression finds: its slots are taken again one by one."""
        return min(counts.cached, self.budget(counts.final) + self.divide_length - 1)


def similarity(keys: Tensor, present: Tensor) -> Tensor:
    """Similarity of each key to the others: softmax of the mean cosine with them, fp32 [batch,
    num_kv_heads, n].

    keys: [batch, num_kv_heads, n, head_dim], oldest first; present: bool [batch, num_kv_heads, n].
    Of the keys whose cosine with a given key exceeds `ALIKE`, the latest is left out.
    """
    directions = normalize(keys.float(), dim=-1).masked_fill_(~present.unsqueeze(-1), 0)
    column = torch.arange(keys.shape[2], device=keys.device)
    total = torch.zeros(present.shape, device=keys.device)
    for rows in column.split(PROMPT_CHUNK):
        cosine = directions[:, :, rows] @ directions.mT
        cosine.masked_fill_(column == rows[:, None], 0)
        latest = torch.where(cosine > ALIKE, column, -1).amax(-1, keepdim=True)
        total += cosine.masked_fill_(column == latest, 0).sum(2)
    mean = total / present.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill_(~present, -INF).softmax(-1)

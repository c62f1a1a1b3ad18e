"""KVzip (Kim et al., NeurIPS 2025; https://github.com/snu-mllab/KVzip, attention/score.py): keeps
the prompt's tokens that the model needs to repeat the prompt. KVzip+ is of KVzap (Jegou & Jeblick,
2026; kvpress' `kvzip_plus_normalization`).

The rule, and where it differs (made into docs/methods.md):

**kvzip**: after the dense pass, each chunk of `chunk_size` (2,048) tokens is read again, with the
whole prompt in the cache: the model gets `instruction` and `suffix`, or from the second chunk on
`continuation`, the last 8 tokens of the chunk before and `suffix`, and then the chunk. A token's
score in a KV head is the largest probability that any row of that pass gives it, over the group's
heads; the softmax is over the `num_sinks` (4) first tokens, the chunk, and the pass's own rows up
to that row. The best tokens over all layers and KV heads stay, so that a head may keep only the
sinks, or everything (`layers=adaptive`); `layers=uniform heads=uniform` is the official code's
`pair-uniform`. The second reading is part of the prefill, which takes about 3.4 times as long
(SmolLM2, 1,024 tokens, one CPU core). What stays does not depend on a question behind the prompt.

- **kvzip-plus** (`value_weighted`) multiplies a probability by |W_O v| / |h|: the length of what
  the layer's output projection makes of the token's value, over that of the row's attention input.
  The projection is found by running the layer's own code on unit vectors; a layer with an output
  gate has none, and is refused.
- The official code (snu-mllab/KVzip) has a system prompt in the place of the first tokens, and the
  chat template's text before an answer for `suffix`; "\\n" is kvpress' for a model without a
  template. Its `continuation` ends in a space, which kvpress and this project leave out. Its chunks
  are 2,000 tokens in `model/wrapper.py` and 2,048 in the paper and in kvpress, whose first chunk
  begins with the sinks where there is no template. A model without a tokenizer takes token ids
  (`method.instruction=[5,6]`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from methods.attention import PROMPT_CHUNK, Softmax
from methods.base import Geometry, Lengths, PromptRows, Repetition, RereadRows, require
from methods.evicting import INF
from methods.prompt_evicting import PromptEvicting, PromptEvictingState, won
from methods.settings import least, one_of, setting

NUM_LEADING = 8
"""Last tokens of the chunk before, which lead into the next one. As in the official code."""


class KVzipState(PromptEvictingState):
    """score: by layer, until its prompt is taken in, fp32 [batch, num_kv_heads, prompt]. counts: by
    layer, number of competing tokens that stay where the layers share one budget, int [batch,
    num_kv_heads]."""

    replayable = True

    def take_scores(self, score: Mapping[int, Tensor], rows: PromptRows) -> None:
        device = rows.real.device
        self.score = {layer: each for layer, each in score.items() if each.device == device}
        self.counts: dict[int, Tensor] = {}
        if self.method.layers != "adaptive":
            return
        layers = range(self.method.dense_layers, self.geometry.num_layers)
        tokens = rows.positions[:, None, None]
        before = (rows.lengths - self.method.window)[:, None, None, None]
        # [batch, layers, num_kv_heads, prompt]
        stacked = torch.stack([score[layer].to(device) for layer in layers], 1)
        stacked = stacked.masked_fill((tokens < self.method.num_sinks) | (tokens >= before), -INF)
        budget = self.shares.sum(0)[:, None] * self.geometry.num_kv_heads
        counts = won(stacked.flatten(1, 2), budget)
        by_layer = dict(zip(layers, counts.unflatten(1, stacked.shape[1:3]).unbind(1), strict=True))
        self.counts = {layer: by_layer[layer] for layer in self.score}

    def prompt_score(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> Tensor:
        return self.score.pop(layer)

    def stay(self, layer: int, score: Tensor) -> Tensor:
        return self.counts.pop(layer) if self.counts else super().stay(layer, score)


@dataclass(frozen=True)
class KVzip(PromptEvicting):
    """The sinks play the part of the system prompt in the official code: they stay, and are not
    repeated. Texts may be token ids, for a model without a tokenizer.

    Source: KVzip (NeurIPS 2025), KVzip+ (KVzap, 2026)
    Keeps: the prompt's tokens that the model needs to repeat the prompt; all generated tokens
    """

    num_sinks: int = 4
    layers: str = setting(
        "adaptive",
        "how the layers share the budget; adaptive: all layers' KV heads share one",
        one_of("adaptive", "uniform", "pyramid"),
    )
    heads: str = "adaptive"
    chunk_size: int = setting(2048, "tokens that are repeated in one pass", least(1))
    instruction: str | tuple[int, ...] = setting(
        "\n\nRepeat the previous context exactly.", "text that asks for the first chunk"
    )
    continuation: str | tuple[int, ...] = setting(
        "\n\nRepeat the part of the previous context exactly, starting with",
        "text that asks for a later chunk, before the last 8 tokens of the chunk before",
    )
    suffix: str | tuple[int, ...] = setting(
        "\n", "text behind both; officially what the chat template has before the answer"
    )
    value_weighted: bool = setting(False, "KVzip+: the score is weighted by the value's length")

    state = KVzipState

    def __post_init__(self) -> None:
        super().__post_init__()
        together = self.layers != "adaptive" or self.heads == "adaptive"
        require(together, "heads", self.heads, "adaptive where method.layers=adaptive")

    @property
    def title(self) -> str:
        return "KVzip+" if self.value_weighted else "KVzip"

    @property
    def needs_norms(self) -> bool:
        return self.value_weighted

    def tokenized(self, encode: Callable[[str], Sequence[int]]) -> Self:
        texts = {name: getattr(self, name) for name in ("instruction", "continuation", "suffix")}
        ids = {name: tuple(encode(text)) for name, text in texts.items() if isinstance(text, str)}
        return replace(self, **ids)  # type: ignore[arg-type]

    def check(self, geometry: Geometry, lengths: Lengths) -> None:
        super().check(geometry, lengths)
        for name in ("instruction", "continuation", "suffix"):
            text = getattr(self, name)
            ids = "token ids where there is no tokenizer, such as [5,6]"
            require(not isinstance(text, str), name, repr(text), ids)

    def repetitions(self, prompt: int) -> list[Repetition]:
        passes = []
        for begin in range(self.num_sinks, prompt, self.chunk_size):
            chunk = slice(begin, min(begin + self.chunk_size, prompt))
            before = slice(max(self.num_sinks, begin - NUM_LEADING), begin)
            parts = [self.instruction] if begin == self.num_sinks else [self.continuation, before]
            passes.append(Repetition([*parts, self.suffix, chunk], chunk))  # type: ignore[list-item]
        return passes

    def reread(self, rows: RereadRows, softmax: Softmax) -> Tensor:
        num_rows, num_kv_heads = rows.query.shape[2], rows.key.shape[1]
        begin, stop = rows.chunk.start, rows.chunk.stop
        sinks = rows.prompt_key[:, :, : self.num_sinks]
        key = torch.cat([sinks, rows.prompt_key[:, :, begin:stop], rows.key], 2)
        num_cached, order = key.shape[2] - num_rows, torch.arange(num_rows, device=key.device)
        score = torch.zeros(num_kv_heads, stop - begin, device=key.device)
        for first in range(0, num_rows, PROMPT_CHUNK):
            part = slice(first, first + PROMPT_CHUNK)
            scores = softmax.scores(rows.query[:, :, part], key)
            scores[..., num_cached:].masked_fill_(order > order[part, None], -INF)
            in_chunk = slice(self.num_sinks, num_cached)
            probs = softmax.weights(scores)[0, ..., in_chunk]  # [kv, group, rows, chunk]
            if rows.input_norms is not None and rows.value_norms is not None:
                values = rows.value_norms.view(num_kv_heads, -1, 1, stop - begin)
                probs = probs * values / rows.input_norms[part, None]
            score = torch.maximum(score, probs.amax((1, 2)))
        return score

    def _most(self, prompt: int) -> int:
        """Every token, where the layers share one budget: a head may keep them."""
        return max(0, prompt - self.safe) if self.layers == "adaptive" else super()._most(prompt)

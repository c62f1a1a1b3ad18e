"""Decoding as the semantics say it, one token, layer and KV head at a time, with Python lists as the cache.

Only a method's settings and the model's own modules are used: selections, accumulated attention, quantization
and sizes are written out plainly, in double precision. Slow, so for tiny models only.

`Trace.margin` is the smallest gap by which any choice was made (last token taken to first one left, r to
-alpha, victim to the next). Where it is far above fp32's rounding, a disagreement is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from methods.base import Method
from methods.h2o import H2O
from methods.infinigen import InfiniGen, ScoreSelecting
from methods.oracle import Oracle
from methods.streaming import Streaming

Vector = np.ndarray


@dataclass
class Trace:
    """What a decoded sequence gave.

    logits: [decode rows, vocab]. reads[layer][KV head]: for each decode row the set of cached tokens it read.
    recall: per decode row the share of attention on them and itself, mean over layers under the method and heads.
    """

    prefill_len: int
    length: int
    dense_layers: int
    logits: Tensor
    reads: list[list[list[set[int]]]]
    recall: list[float]
    margin: float

    @property
    def rows(self) -> range:
        """Positions of the decode rows."""
        return range(self.prefill_len, self.length)

    @property
    def counts(self) -> list[float]:
        """Tokens read by each decode row in a layer under the method, mean over layers and KV heads."""
        kept = self.reads[self.dense_layers :]
        rows = range(len(self.rows))
        return [float(np.mean([[len(head[row]) for head in heads] for heads in kept])) for row in rows]


def budget(traces: Sequence[Trace], bits: float = 16) -> float:
    """Elements read / elements of the full cache, mean over all decode rows that have any."""
    shares = []
    for trace in traces:
        for index, cached in enumerate(trace.rows):
            per_layer = [
                np.mean([len(head[index]) for head in heads]) * (1 if layer < trace.dense_layers else bits / 16)
                for layer, heads in enumerate(trace.reads)
            ]
            if cached:
                shares.append(np.mean(per_layer) / cached)
    return float(np.mean(shares))


def budget_artifact(traces: Sequence[Trace], code_bits: int = 16) -> float:
    """1 - sqrt(1 - density) over all rows, current tokens and the dense prompt included, times bits / 16."""
    read = causal = 0.0
    for trace in traces:
        causal += trace.length * (trace.length + 1) / 2
        read += trace.prefill_len * (trace.prefill_len + 1) / 2
        read += sum(count + 1 for count in trace.counts)
    return (1 - math.sqrt(1 - read / causal)) * code_bits / 16


def attention_recall(traces: Sequence[Trace]) -> float:
    """Mean over all decode rows."""
    return float(np.mean([share for trace in traces for share in trace.recall]))


def softmax(scores: Vector) -> Vector:
    """Of a vector."""
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def plain_hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix of the largest power of two that divides `size`, once for each block."""
    block = np.ones((1, 1))
    while size % (2 * len(block)) == 0:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(size // len(block)), block) / math.sqrt(len(block))


def quantized(row: Vector, bits: int, group_size: int) -> Vector:
    """A row as it reads back from integer codes."""
    out = []
    for start in range(0, len(row), group_size):
        group = row[start : start + group_size]
        step = float(np.float16((group.max() - group.min()) / (2**bits - 1)))
        low = float(np.float16(group.min()))
        for x in group:
            code = min(max(round((x - low) / step), 0), 2**bits - 1) if step else 0
            out.append(code * step + low)
    return np.array(out)


@dataclass
class Head:
    """One KV head of one layer of one sequence: all its tokens, and what a method keeps about them."""

    keys: list[Vector] = field(default_factory=list)  # exact, post-position
    values: list[Vector] = field(default_factory=list)
    stored_keys: list[Vector] = field(default_factory=list)  # as later rows read them
    stored_values: list[Vector] = field(default_factory=list)
    prompt_queries: list[list[Vector]] = field(default_factory=list)  # [prompt][group]
    columns: Vector | None = None  # [head_dim, columns], the chosen columns of A
    mass: dict[int, float] = field(default_factory=dict)  # accumulated attention of the kept tokens


class Reference:
    """Decodes one sequence under a method.

    rotation: A per layer and KV head [layers, num_kv_heads, head_dim, head_dim], for InfiniGen with `skew`.
    codec: how a row cached in a layer under the method reads back.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        final_length: int,
        prefill_len: int,
        rotation: Tensor | None = None,
        codec: Callable[[Vector], Vector] | None = None,
    ) -> None:
        self.method = method
        self.dense_layers = method.dense_layers
        self.final_length = final_length
        self.prefill_len = prefill_len
        self.codec = codec
        self.family = BLOCKS.get(model.config.model_type, LlamaBlocks)(model)
        skewed = isinstance(method, InfiniGen) and method.skew
        self.rotation = rotation.double().numpy() if skewed and rotation is not None else None
        self.margin = math.inf
        kv_heads = range(self.family.num_kv_heads)
        self.heads = [[Head() for _ in kv_heads] for _ in self.family.layers]
        self.reads: list[list[list[set[int]]]] = [[[] for _ in kv_heads] for _ in self.family.layers]
        self.recall: list[float] = []
        self.last_queries: dict[int, list[Vector]] = dict.fromkeys(range(len(self.family.layers)), [])

    def run(self, ids: Sequence[int]) -> Trace:
        """Teacher-forced over `ids`, whose first `prefill_len` are the prompt."""
        logits = []
        for position, token in enumerate(ids):
            if position == self.prefill_len:
                self._finish_prompt()
            logits.append(self._token(token, position))
        decoded = torch.stack(logits[self.prefill_len :])
        return Trace(self.prefill_len, len(ids), self.dense_layers, decoded, self.reads, self.recall, self.margin)

    def _token(self, token: int, position: int) -> Tensor:
        family = self.family
        hidden = family.embed(token, position)
        previous_input = None
        shares = []
        for layer in range(len(family.layers)):
            attention_input = family.attention_input(layer, hidden)
            queries, keys, values = family.states(layer, attention_input, position)  # each [heads][head_dim]
            predicted = None if layer == 0 else family.states(layer, previous_input, position)[0]
            outputs = []
            selected = None
            if position >= self.prefill_len and layer >= self.dense_layers:
                selected = self._select(layer, position, predicted, queries)
            for g, head in enumerate(self.heads[layer]):
                group = queries[g * family.group : (g + 1) * family.group]
                tokens = sorted(selected[g]) if selected is not None else list(range(position))
                if position >= self.prefill_len:
                    self.reads[layer][g].append(set(tokens))
                outputs += self._attend(head, layer, position, group, tokens, keys[g], values[g], shares)
                self._store(head, layer, keys[g], values[g])
                if position < self.prefill_len:
                    head.prompt_queries.append(group)
            self.last_queries[layer] = queries
            hidden = family.after_attention(layer, hidden, np.concatenate(outputs))
            previous_input = attention_input
        if position >= self.prefill_len:
            self.recall.append(float(np.mean(shares)))
        return family.logits(hidden)

    def _attend(self, head, layer, position, group, tokens, key, value, shares) -> list[Vector]:
        """Attention of a KV head's queries over `tokens` and the own one; H2O's sums grow, a token may go."""
        in_prompt = position < self.prefill_len
        exact = in_prompt or layer < self.dense_layers
        keys, values = (head.keys, head.values) if exact else (head.stored_keys, head.stored_values)
        received = dict.fromkeys([*tokens, position], 0.0)
        outputs = []
        for query in group:
            scores = [self.family.scale * query @ keys[j] for j in range(position)]
            scores.append(self.family.scale * query @ key)
            probs = softmax(np.array([scores[j] for j in received]))
            values_read = [values[j] for j in tokens] + [value]
            outputs.append(sum(p * v for p, v in zip(probs, values_read, strict=True)))
            for j, probability in zip(received, probs, strict=True):
                received[j] += probability
            if not in_prompt and layer >= self.dense_layers:
                everything = softmax(np.array(scores))
                shares.append(sum(everything[j] for j in received))
        if isinstance(self.method, H2O) and layer >= self.dense_layers:
            for j, amount in received.items():
                head.mass[j] = head.mass.get(j, 0.0) + amount
            if not in_prompt:
                self._evict(head, position + 1)
        return outputs

    def _store(self, head: Head, layer: int, key: Vector, value: Vector) -> None:
        head.keys.append(key)
        head.values.append(value)
        coded = self.codec is not None and layer >= self.dense_layers
        head.stored_keys.append(self.codec(key) if coded else key)
        head.stored_values.append(self.codec(value) if coded else value)

    def _finish_prompt(self) -> None:
        for layer, heads in enumerate(self.heads):
            for g, head in enumerate(heads):
                if layer < self.dense_layers:
                    continue
                if isinstance(self.method, H2O):
                    self._evict(head, self.prefill_len)
                if isinstance(self.method, InfiniGen):
                    head.columns = self._columns(head, layer, g)

    def _columns(self, head: Head, layer: int, g: int) -> Vector:
        """Step 2."""
        size = self.family.head_dim
        basis = np.eye(size) if self.rotation is None else self.rotation[layer, g]
        by_query = np.zeros(size)
        for row in head.prompt_queries:
            for query in row:
                by_query += np.abs(query @ basis) / self.family.group
        by_key = sum(np.abs(key @ basis) for key in head.keys)
        rounded = {"up": math.ceil, "down": math.floor}[self.method.round_columns]
        wanted = max(1, rounded(self.method.partial_weight_ratio * size))
        importances = {"sum": [by_query + by_key], "query": [by_query], "union": [by_query, by_key]}
        chosen: set[int] = set()
        for importance in importances[self.method.columns]:
            chosen |= self._largest(dict(enumerate(importance)), wanted)
        return basis[:, sorted(chosen)]

    def _select(self, layer, position, predicted, queries) -> list[set[int]]:
        """The cached tokens that each KV head of a layer reads."""
        cached = range(position)
        method = self.method
        if isinstance(method, H2O):
            return [set(head.mass) for head in self.heads[layer]]
        if isinstance(method, Streaming):
            window = method.kept_tokens or math.floor(method.budget * self.final_length)
            oldest = position - (window - method.num_sinks)
            kept = {j for j in cached if j < method.num_sinks or j >= oldest}
            return [kept for _ in self.heads[layer]]
        if not isinstance(method, ScoreSelecting):
            return [set(cached) for _ in self.heads[layer]]
        asking = {"previous_layer": predicted, "previous_step": self.last_queries[layer]}.get(method.when, queries)
        scores = []  # [KV head][query head of its group][token]
        for g, head in enumerate(self.heads[layer]):
            oracle = isinstance(method, Oracle)
            basis, keys = (np.eye(self.family.head_dim), head.stored_keys) if oracle else (head.columns, head.keys)
            group = asking[g * self.family.group : (g + 1) * self.family.group]
            scores.append([[self.family.scale * (q @ basis) @ (keys[j] @ basis) for j in cached] for q in group])
        relative = [dict(enumerate(self._reduced(np.array(heads)))) for heads in scores]
        count = self._count(relative, position)
        recent = position - math.floor(method.recent_frac * count)
        for each in relative:
            each.update({j: math.inf for j in cached if j < method.num_sinks or j >= recent})
        return [self._largest(each, count) for each in relative]

    def _reduced(self, scores: Vector) -> Vector:
        """One score a token from those of several heads, [heads, tokens]."""
        if self.method.group == "best":
            return (scores - scores.max(1, keepdims=True)).max(0)
        assert self.method.group == "max_probs"
        return np.array([softmax(head) for head in scores]).max(0)

    def _count(self, relative: list[dict[int, float]], cached: int) -> int:
        """Step 4."""
        method = self.method
        if method.fixed_fetch is not None:
            return min(method.fixed_fetch, cached)
        alpha = method.alpha
        if alpha is None:
            alpha = 4 if self.family.name == "opt" else 5
        for scores in relative:
            for r in scores.values():
                self._decided(abs(r + alpha))
        counts = [sum(r >= -alpha for r in scores.values()) for scores in relative]
        count = math.floor(sum(counts) / len(counts))
        whole = {"cached": cached, "final": self.final_length}[method.cap_of]
        return min(max(count, 1), max(1, math.floor(method.budget * whole)), cached)

    def _evict(self, head: Head, num_tokens: int) -> None:
        """H2O, once row `num_tokens - 1` has run."""
        heavy = math.floor(self.method.heavy_frac * self.final_length)
        recent = math.floor(self.method.recent_frac * self.final_length)
        if self.method.kept_tokens is not None:
            recent = self.method.kept_tokens // 2
            heavy = self.method.kept_tokens - recent
        while len(head.mass) > max(1, heavy + recent):
            candidates = sorted(j for j in head.mass if j < num_tokens - recent)
            victim = min(candidates, key=lambda j: head.mass[j])
            for other in candidates:
                if other != victim:
                    self._decided(head.mass[other] - head.mass[victim])
            del head.mass[victim]

    def _largest(self, scores: dict[int, float], count: int) -> set[int]:
        ranked = sorted(scores, key=lambda j: (-scores[j], j))
        if 0 < count < len(ranked) and scores[ranked[count - 1]] != 0:  # at 0 the group's heads tie, exactly
            self._decided(scores[ranked[count - 1]] - scores[ranked[count]])
        return set(ranked[:count])

    def _decided(self, gap: float) -> None:
        self.margin = min(self.margin, gap)


class LlamaBlocks:
    """Pieces of a Llama-like decoder for one token; queries come before the softmax scale."""

    name = "llama"

    def __init__(self, model: nn.Module) -> None:
        config = model.config
        self.model = model
        self.decoder = model.get_decoder()
        self.layers = self.decoder.layers
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = getattr(config, "num_key_value_heads", self.num_heads)
        self.group = self.num_heads // self.num_kv_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        self.scale = 1 / math.sqrt(self.head_dim)

    def embed(self, token: int, position: int) -> Tensor:
        return self.model.get_input_embeddings()(torch.tensor(token))

    def attention_input(self, layer: int, hidden: Tensor) -> Tensor:
        return self.layers[layer].input_layernorm(hidden)

    def states(self, layer: int, attention_input: Tensor, position: int) -> tuple[list[Vector], ...]:
        """Queries, keys and values, each [heads][head_dim]."""
        of = self.layers[layer].self_attn
        parts = (of.q_proj, of.k_proj, of.v_proj)
        queries, keys, values = (each(attention_input).view(-1, self.head_dim) for each in parts)
        return self._placed(queries, position), self._placed(keys, position), list(values.double().numpy())

    def _placed(self, heads: Tensor, position: int) -> list[Vector]:
        """Rotary positions: the halves of a head turn against each other."""
        cos, sin = self.decoder.rotary_emb(heads[None], torch.tensor([[position]]))
        first, second = heads.chunk(2, -1)
        turned = heads * cos[0, 0] + torch.cat([-second, first], -1) * sin[0, 0]
        return list(turned.double().numpy())

    def after_attention(self, layer: int, hidden: Tensor, output: Vector) -> Tensor:
        block = self.layers[layer]
        hidden = hidden + block.self_attn.o_proj(torch.from_numpy(output).float())
        return hidden + block.mlp(block.post_attention_layernorm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        norm = getattr(self.decoder, "norm", None) or self.decoder.final_layer_norm
        return self.model.get_output_embeddings()(norm(hidden))


class OPTBlocks(LlamaBlocks):
    """The same of OPT: biases, learned positions from row 2 of their table on, a norm before each half."""

    name = "opt"

    def embed(self, token: int, position: int) -> Tensor:
        return super().embed(token, position) + self.decoder.embed_positions.weight[position + 2]

    def attention_input(self, layer: int, hidden: Tensor) -> Tensor:
        return self.layers[layer].self_attn_layer_norm(hidden)

    def _placed(self, heads: Tensor, position: int) -> list[Vector]:
        return list(heads.double().numpy())

    def after_attention(self, layer: int, hidden: Tensor, output: Vector) -> Tensor:
        block = self.layers[layer]
        hidden = hidden + block.self_attn.out_proj(torch.from_numpy(output).float())
        return hidden + block.fc2(block.activation_fn(block.fc1(block.final_layer_norm(hidden))))


BLOCKS = {"opt": OPTBlocks}

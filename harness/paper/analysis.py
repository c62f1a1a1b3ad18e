"""Why the method works: statistics of a model's attention, hidden states and sizes (Figs 2, 4, 5,
7, 20, Table 1).

Each comes from one dense pass, in chunks of query tokens. Memory is linear in the length.

    python run.py experiment=fig5 analysis.num_tokens=4096 analysis.layers=[0,10,20]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.data.text import calibration_ids, corpus_ids, first_window_offset, start_ids
from harness.errors import UserError
from harness.files import cache_dir
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.attention import ROWS, SCORES_PER_CHUNK
from harness.model.load import LoadedModel, model_config
from harness.model.passes import LayerPrompt
from harness.model.prompts import PromptPass, cached_calibration
from harness.model.shape import FFN_MATRICES, WEIGHT_BYTES, ModelShape, count_weights
from harness.settings.config import RunConfig
from harness.settings.kinds import Outcome
from methods.attention import Softmax
from methods.base import Geometry, Lengths, Method, PromptRows, QueryRows, TokenCounts
from methods.infinigen import InfiniGen
from methods.oracle import Oracle

MASS = 0.9
SMALL = 0.01
"""Share of the keys that counts as few."""
SIMILARITY_LAYERS, SPARSITY_LAYERS = (0, 8, 16, 24), (0, 12, 24, 30)
KEY_TOKENS_LAYERS = COLUMN_LAYERS = (0, 18)
"""Of the paper's 32 layers. For the similarity it shows several, layer 0 among them, and does not
say which others."""
WATCHED_LAYER, WATCHED_HEAD, PAPER_NUM_HEADS = (18,), 30, 32
QUERIES = (500, 998, 999, 1000, 1001, 1002, 1500, 2000)
"""Queries whose numbers the paper gives, as far as the text goes."""
SIMILARITY_BINS, HISTOGRAM_BINS, WATCHED_BINS = 100, 64, 128
MIN_LENGTH = 256
NUM_SAMPLED, NUM_SHOWN = 64, 4
INPUTS = ("block_input_prev", "attn_out_prev", "ffn_out_prev")
BATCH_SIZE, SEQ_LEN = 16, 2048
SEQ_LENS = (256, 512, 1024, 2048, 4096, 8192)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


# The dense pass, and the points that statistics make of it


class Point(NamedTuple):
    """A number of series `series` at `x`, a value of the quantity `x_name`: one row of an analysis
    table.

    layer: None for the whole model. stderr: standard error over the num_samples heads or layers of
    which `value` is the mean; None for a single one.
    """

    series: str
    metric: str
    value: float
    x_name: str | None = None
    x: float | None = None
    layer: int | None = None
    stderr: float | None = None
    num_samples: int = 1


def mean_point(
    values: Tensor,
    series: str,
    metric: str,
    x_name: str | None = None,
    x: float | None = None,
    layer: int | None = None,
) -> Point:
    """The mean of `values` [heads or layers] as a point."""
    known = values.double()
    stderr = float(known.std()) / math.sqrt(len(known)) if len(known) > 1 else None
    return Point(series, metric, float(known.mean()), x_name, x, layer, stderr, len(known))


def binned(values: Tensor, first: int, num_bins: int) -> Iterator[tuple[float, Tensor]]:
    """Means over at most `num_bins` runs of tokens: the middle token of each, and the means [n].

    values: [n, tokens], of the tokens from `first` on.
    """
    width = -(-values.shape[-1] // num_bins)
    for index, part in enumerate(values.split(width, -1)):
        yield first + index * width + (part.shape[-1] - 1) / 2, part.double().mean(-1)


class Block(NamedTuple):
    """Query tokens `start` to `stop` of a layer, over the keys before `stop`. Valid during the call
    only.

    query: [1, heads, tokens, head_dim], before the softmax scale; key, value: [1, num_kv_heads,
    stop, head_dim]; scores: scaled, fp32 [1, num_kv_heads, group, tokens, stop], -inf for later
    keys; read-only.
    """

    layer: int
    start: int
    stop: int
    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    softmax: Softmax

    def probs(self) -> Tensor:
        """Attention weights by query head: fp32 [heads, tokens, stop]."""
        return self.softmax.weights(self.scores.clone()).flatten(1, 2)[0]


@dataclass(frozen=True)
class Subject:
    """An attached model with a text, ids [1, num_tokens] on the model's device. Valid while
    `attached` is."""

    config: RunConfig
    loaded: LoadedModel
    attached: Attached
    ids: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return self.ids.shape[1]

    def layers(self, paper_layers: tuple[int, ...]) -> tuple[int, ...]:
        """The layers to look at, `paper_layers` unless set; see `AnalysisConfig.layers_of`."""
        num_layers = self.attached.geometry.num_layers
        return self.config.analysis.layers_of(num_layers, paper_layers, self.loaded.name)

    def run(self, keep: Callable[[int, LayerPrompt], None] | None = None) -> None:
        """One dense pass. keep: takes the number and the rows of each layer that sees every token,
        the layers that methods number."""

        def numbered(layer: int, prompt: LayerPrompt) -> None:
            number = self.attached.numbers[layer]
            if keep is not None and number is not None:
                keep(number, prompt)

        positions = torch.arange(self.num_tokens, device=self.ids.device)[None]
        self.attached.forward(self.ids, positions, PromptPass(self.attached, keep=numbered))

    def observe(self, layers: Collection[int], see: Callable[[Block], None]) -> None:
        """One dense pass that shows `see` these layers, block by block."""
        softmaxes = {
            number: traced.softmax
            for number, traced in zip(self.attached.numbers, self.attached.layers, strict=True)
        }

        def show(layer: int, rows: LayerPrompt) -> None:
            if layer not in layers:
                return
            softmax, tokens = softmaxes[layer], self.num_tokens
            size = max(1, min(ROWS, SCORES_PER_CHUNK // (rows.query.shape[1] * tokens)))
            for start in range(0, tokens, size):
                stop = min(start + size, tokens)
                query, key = rows.query[:, :, start:stop], rows.key[:, :, :stop]
                scores = softmax.scores(query, key)
                column = torch.arange(start, stop, device=scores.device)
                later = column > column[:, None]  # the whole block sees the keys before `start`
                scores[..., start:].masked_fill_(later, float("-inf"))
                value = rows.value[:, :, :stop]
                see(Block(layer, start, stop, query, key, value, scores, softmax))

        self.run(show)


# Attention: similarity under a smaller cache (Fig 4), key tokens (Fig 5), sparsity (Fig 20)


def similarity(subject: Subject) -> Iterator[Point]:
    """Figure 4: cosine similarity of attention weights to the full cache's, token by token, under a
    method that evicts and under the oracle (the paper's "Optimal"), which picks as many tokens anew
    from the whole history at every step.

    Queries and keys are the full cache's own, so only the choice of tokens is compared. Leaving
    tokens out of a softmax scales the remaining weights alike; with a the full cache's weights and
    S the tokens read, current token included, the cosine is therefore sqrt(sum over S of a^2 / sum
    of a^2).

    Raises UserError where `analysis.budget` of the text is too small for the method.
    """
    kept, num_tokens = subject.config.analysis.budget, subject.num_tokens
    method = subject.config.method.with_budget(kept)
    budget = method.tokens_read(TokenCounts(num_tokens, 1, num_tokens), method.dense_layers)
    assert budget is not None, "a method that evicts has a budget"
    methods, geometry = (method, Oracle(fixed_fetch=int(budget))), subject.attached.geometry
    layers = subject.layers(SIMILARITY_LAYERS)
    try:
        of_layer = {
            layer: [Similarity(compared, geometry, subject.ids) for compared in methods]
            for layer in layers
        }
    except ValueError as error:  # of the method, as a session would raise it
        raise UserError(f"analysis.budget={kept}: {error}") from error

    def see(block: Block) -> None:
        for compared in of_layer[block.layer]:
            compared.see(block)

    subject.observe(layers, see)
    for layer, pair in of_layer.items():
        for compared, seen in zip(methods, pair, strict=True):
            for x, heads in binned(seen.cosines[:, 1:], 1, SIMILARITY_BINS):
                yield mean_point(heads, compared.title, "cosine_similarity", "token", x, layer)


class Similarity:
    """`cosines`, fp32 [heads, tokens], of a layer under `method`, which starts with the first
    token."""

    def __init__(self, method: Method, geometry: Geometry, ids: Tensor) -> None:
        self.num_tokens = ids.shape[1]
        final = torch.tensor([self.num_tokens], device=ids.device)
        self.state = method.new_state(geometry, Lengths(torch.ones_like(final), final))
        self.cosines = torch.ones(geometry.num_heads, self.num_tokens)

    def see(self, block: Block) -> None:
        """Select for the block's queries and compare."""
        if block.start == 0:  # the first token has nothing to leave out: it is the prompt
            real = torch.ones(1, 1, dtype=torch.bool, device=block.query.device)
            prompt = PromptRows(real, self.num_tokens)
            query, key, value = (part[:, :, :1] for part in (block.query, block.key, block.value))
            self.state.prompt(block.layer, query, key, value, prompt)
        first = max(block.start, 1)
        if first == block.stop:
            return
        scores = block.scores[:, :, :, first - block.start :]
        own = torch.arange(first, block.stop, device=scores.device)
        rows = QueryRows(  # a slot is a token's position
            query=block.query[:, :, -len(own) :],
            positions=own[None],
            real=torch.ones_like(own, dtype=torch.bool)[None],
            slot_positions=torch.arange(block.stop, device=own.device)[None, None],
            own_slots=own[None, None],
            true_scores=lambda: scores,
        )
        mask = self.state.select(block.layer, rows).mask
        assert mask is not None, "a method that evicts names what it reads"
        read = mask.clone()
        read.diagonal(first, -2, -1).fill_(True)
        squares = scores.softmax(-1).square()
        cosines = ((squares * read.unsqueeze(2)).sum(-1) / squares.sum(-1)).sqrt()
        self.cosines[:, first : block.stop] = cosines.flatten(1, 2)[0].cpu()


def key_tokens(subject: Subject) -> Iterator[Point]:
    """Figure 5: how many key tokens hold 0.9 of a query's attention weight, current token included.

    A histogram over all queries and heads, and the mean over heads at single queries: the number
    differs by layer, head and query, even from one query to the next.
    """
    counts = counts_of(subject, KEY_TOKENS_LAYERS)
    subject.observe(counts, lambda block: count(block, counts))
    width = 2 ** max(0, (subject.num_tokens // HISTOGRAM_BINS).bit_length() - 1)
    for layer, of_layer in counts.items():
        series, metric = f"layer {layer}", "share_of_queries"
        num_bins = max(2, int(of_layer.max()) // width + 1)
        bins = torch.stack([torch.bincount(head // width, minlength=num_bins) for head in of_layer])
        for index, share in enumerate((bins.double() / subject.num_tokens).unbind(-1)):
            yield mean_point(share, series, metric, "key_tokens", index * width, layer)
        for at in QUERIES:
            if at < subject.num_tokens:
                number, metric = of_layer[:, at], f"key_tokens_for_{MASS:g}"
                yield mean_point(number, series, metric, "query_token", at, layer)


def counts_of(subject: Subject, layers: tuple[int, ...]) -> dict[int, Tensor]:
    """By layer, room for `tokens_for_mass` of every query: int32 [heads, tokens]."""
    shape = subject.attached.geometry.num_heads, subject.num_tokens
    return {layer: torch.zeros(shape, dtype=torch.int32) for layer in subject.layers(layers)}


def count(block: Block, counts: Mapping[int, Tensor]) -> None:
    """Fill in the numbers of a block's queries."""
    counts[block.layer][:, block.start : block.stop] = tokens_for_mass(block.probs()).int()


def tokens_for_mass(probs: Tensor, mass: float = MASS) -> Tensor:
    """The fewest key tokens that hold `mass` of each query's attention.

    probs: [..., keys], summing to 1 along the last axis; returns int64 [...] on the CPU.
    """
    ascending = np.sort(probs.cpu().numpy(), axis=-1)  # vectorised, unlike torch's on the CPU
    dropped = np.cumsum(ascending, axis=-1, dtype=np.float64) <= 1 - mass
    return torch.from_numpy(ascending.shape[-1] - dropped.sum(-1))


def sparsity(subject: Subject) -> Iterator[Point]:
    """Figure 20: longer sequences attend to a smaller share of their keys, and the important keys
    change.

    (a) By layer and length, the share of queries that need less than 1 % of the keys for 0.9 of
    their attention weight (as in Fig 5). A sequence's first tokens are those of a longer one, so
    one pass gives all lengths.
    (b) Attention weight of sampled keys over the last quarter of the queries, in the layer and head
    at the place of the paper's; of the keys whose weight varies most.
    """
    num_tokens = subject.num_tokens
    counts = counts_of(subject, SPARSITY_LAYERS)
    watched_layer = subject.layers(WATCHED_LAYER)[-1]
    head = WATCHED_HEAD * subject.attached.geometry.num_heads // PAPER_NUM_HEADS
    first = num_tokens - max(1, num_tokens // 4)
    generator = torch.Generator().manual_seed(subject.config.seed)
    keys = torch.randperm(first, generator=generator)[:NUM_SAMPLED].sort().values
    weights = torch.zeros(len(keys), num_tokens - first)

    def see(block: Block) -> None:
        if block.layer in counts:
            count(block, counts)
        begin = max(block.start, first)
        if block.layer == watched_layer and begin < block.stop:
            probs = block.probs()[head, begin - block.start :].cpu()
            weights[:, begin - first : block.stop - first] = probs[:, keys].T

    subject.observe({*counts, watched_layer}, see)
    lengths = [num_tokens]
    while lengths[0] // 2 >= MIN_LENGTH:
        lengths.insert(0, lengths[0] // 2)
    for layer, of_layer in counts.items():
        few = of_layer < SMALL * torch.arange(1, num_tokens + 1)
        for length in lengths:
            shares, metric = few[:, :length].double().mean(-1), "share_of_sparse_queries"
            yield mean_point(shares, f"layer {layer}", metric, "seq_len", length, layer)
    varying = weights.std(-1, correction=0).argsort(descending=True)[:NUM_SHOWN].sort().values
    for x, means in binned(weights[varying], first, WATCHED_BINS):
        for key, mean in zip(keys[varying].tolist(), means.tolist(), strict=True):
            series, metric = f"key {key}", "attention_weight"
            yield Point(series, metric, mean, "query_token", x, watched_layer)


# Hidden states: columns of Q and K before and after skewing (Fig 7), layer inputs (Table 1)


def columns(subject: Subject) -> list[Point]:
    """Figure 7: magnitude of the columns of Q and K, in the model's own basis and in that of the
    calibrated rotation.

    A column's magnitude is the mean over tokens of its absolute values; Q's is the mean over the
    group's heads. The columns of a KV head are ordered by |q| + |k|, as InfiniGen chooses partial
    columns, which are the leftmost.
    """
    loaded = subject.loaded
    ids = calibration_ids(subject.config.calibration, loaded.reader)
    folder = cache_dir() / "calibration"
    calibration = cached_calibration(subject.attached, InfiniGen(), ids, folder)
    layers = subject.layers(COLUMN_LAYERS)
    points: list[Point] = []

    def keep_magnitudes(layer: int, rows: LayerPrompt) -> None:
        if layer not in layers:
            return
        query, key = rows.query, rows.key
        rotation = calibration["rotation"][layer].to(query.device)  # [KV heads, size, size]
        own_basis = torch.eye(query.shape[-1], device=query.device).expand_as(rotation)
        stacked = query[0].reshape(key.shape[1], -1, query.shape[-1])  # [KV heads, group * tokens]
        for series, basis in (("before skewing", own_basis), ("after skewing", rotation)):
            of_query, of_key = ((part.float() @ basis).abs().mean(1) for part in (stacked, key[0]))
            order = (of_query + of_key).argsort(-1, descending=True)
            for metric, found in (("query_magnitude", of_query), ("key_magnitude", of_key)):
                for rank, heads in enumerate(found.gather(-1, order).unbind(-1)):
                    points.append(mean_point(heads, series, metric, "column_rank", rank, layer))

    subject.run(keep_magnitudes)
    return points


def layer_inputs(subject: Subject) -> Iterator[Point]:
    """Table 1: cosine similarity of a layer's block input to the previous layer's block input,
    attention output and FFN output. The first is why the attention input of one layer can stand in
    for the next one's.

    Mean over tokens; by layer, and over layers with their standard error; layers from the second
    on, unless `analysis.layers` names some. The FFN output is the gain of the residual stream
    beyond the attention output, so no family's module names are needed.

    Raises UserError for layer 0, which has none before it, and for a model whose blocks do not add
    both outputs to their input as they are.
    """
    family, described = subject.attached.geometry.family, subject.loaded.model.config
    if family not in FFN_MATRICES or not getattr(described, "do_layer_norm_before", True):
        needed = f"blocks that norm their inputs alone, as those of {', '.join(FFN_MATRICES)}"
        raise UserError(f"model {subject.loaded.name}: Table 1 needs {needed}")
    layers = subject.attached.decoder.layers
    chosen = subject.layers(()) or tuple(range(1, len(layers)))
    if 0 in chosen:
        raise UserError("analysis.layers: layer 0 has no layer before it; name layers from 1 on")
    # Of each layer from the second on, [3] in the order of `INPUTS`
    similarities: list[Tensor] = []
    earlier: list[Tensor] = []  # the block's input, and its attention's output

    def enter(module: Any, args: tuple[Any, ...], call: Mapping[str, Any]) -> None:
        hidden = (args[0] if args else call["hidden_states"])[0].float()  # [tokens, hidden_size]
        if earlier:
            before, attn_out = earlier
            parts = (before, attn_out, hidden - before - attn_out)
            cosines = [torch.cosine_similarity(hidden, part, dim=-1).mean() for part in parts]
            similarities.append(torch.stack(cosines).cpu())
        earlier[:] = [hidden]

    def attended(module: Any, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        earlier.append(output[0][0].float())

    with ExitStack() as hooks:
        for layer in layers:
            entering = layer.block.register_forward_pre_hook(enter, with_kwargs=True)
            hooks.enter_context(entering)
            hooks.enter_context(layer.module.register_forward_hook(attended))
        subject.run()
    of_chosen = torch.stack([similarities[layer - 1] for layer in chosen])  # [layers, 3]
    metric = "cosine_similarity"
    for name, found in zip(INPUTS, of_chosen.T, strict=True):
        yield mean_point(found, name, metric)
    for number, row in zip(chosen, of_chosen.tolist(), strict=True):
        for name, value in zip(INPUTS, row, strict=True):
            yield Point(name, metric, value, "layer", number, number)


# Runs

STATISTICS: Mapping[str, Callable[[Subject], Iterable[Point]]] = {
    "similarity": similarity,
    "key_tokens": key_tokens,
    "columns": columns,
    "layer_inputs": layer_inputs,
    "sparsity": sparsity,
}
"""By `analysis.statistic`; `memory` is `run_memory`, which needs no weights."""


def run_analysis(config: RunConfig, loaded: LoadedModel) -> Outcome:
    """The statistic of `config`, as points.

    Raises UserError for a text or a model shorter than `analysis.num_tokens`, a layer that the
    model does not have, or a model that the statistic is not defined for.
    """
    num_tokens = config.analysis.num_tokens
    asked = f"analysis.num_tokens={num_tokens}"
    if num_tokens > loaded.max_length:
        raise UserError(f"{asked}: {loaded.name} takes at most {loaded.max_length} tokens")
    offset = first_window_offset(config.corpus, config.calibration)
    text = corpus_ids(config.corpus, config.data, loaded.reader)[offset:]
    ids = [*start_ids(loaded.reader), *text]
    if len(ids) < num_tokens:
        has = f"the text has {len(ids)} tokens from token {offset} on"
        raise UserError(f"{asked}: {has}; choose a longer one")
    assert config.analysis.statistic is not None, "RunConfig checks it"
    with attach(loaded.model) as attached:
        attached.require_length(num_tokens)
        tokens = torch.tensor([ids[:num_tokens]], device=attached.device)
        found = STATISTICS[config.analysis.statistic](Subject(config, loaded, attached, tokens))
        points = [point._asdict() for point in found]
    return Outcome({"source": "measured", "points": points})


def run_memory(config: RunConfig) -> Outcome:
    """Figure 2: bytes of the KV cache beside those of the weights, in fp16: (a) against the
    sequence length at batch 16, (b) against the batch size at 2,048 tokens, as in the paper.

    No weights are read: the model is built without memory to count them. UserError where its layers
    are not all alike.
    """
    name, described = config.model.name, model_config(config.model)
    weights = WEIGHT_BYTES * count_weights(f"model {name}", described)
    shape = ModelShape.from_config(name, described.to_dict())
    cells = [("seq_len", seq_len, BATCH_SIZE, seq_len) for seq_len in SEQ_LENS]
    cells += [("batch_size", batch_size, batch_size, SEQ_LEN) for batch_size in BATCH_SIZES]
    points = []
    for x_name, x, batch_size, seq_len in cells:
        cached = batch_size * seq_len * shape.num_layers * shape.token_bytes
        points.append(Point("KV cache", "bytes", cached, x_name, x))
        points.append(Point("weights", "bytes", weights, x_name, x))
    return Outcome({"source": "modelled", "points": [point._asdict() for point in points]})

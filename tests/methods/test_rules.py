"""Every method against a plain rule of its own, one token at a time.

A rule gets the queries, keys and values that a layer's attention was given of one sequence, and says which cached
tokens each decode row of each KV head reads. What the attention makes of these tokens, and how many they are, is
checked for all rules alike. InfiniGen by columns, its pool and Oracle are in `test_infinigen.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from fractions import Fraction
from functools import cache, partial
from itertools import product
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pytest
import torch

from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.budgets import ReadStats
from harness.model.prompts import PromptPass
from harness.replay import decode_pass as passes
from methods.base import Geometry, TokenCounts
from methods.codecs.split import codec_at
from methods.doublesparsity import DoubleSparsity
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.infinigen2 import InfiniGen2, balanced, mixing
from methods.loki import Loki
from methods.pariskv import LEVELS, ParisKV, random_signs
from methods.pqcache import PQCache
from methods.prompt_evicting import ExpectedAttention, KeyDiff, Knorm, PromptEvicting, SnapKV
from methods.quest import Quest
from methods.random_attention import RandomAttention
from methods.rkv import RKV
from methods.rocketkv import RocketKV
from methods.shadowkv import ShadowKV
from methods.socket import Socket, plane_normals
from methods.sparq import SparQ
from methods.streaming import DuoAttention, Streaming
from methods.tova import TOVA
from methods.triattention import TriAttention
from methods.twilight import Twilight
from methods.vattention import VAttention
from methods.yakv import GRID_FILE, YAKV, grid, nearest_points
from tests import reference as plain
from tests.cases import CASES, Case, preset
from tests.living import calibration, tiny
from tests.reference import plain_hadamard, softmax
from tests.replaying import LENGTH, PROMPT, attention_of, calibrated, run, token_ids, watched

BATCH = ((PROMPT, LENGTH), (11, 40), (14, 33))
"""(prompt, length) of the sequences of a padded batch."""
REPLAYING = (PromptPass, passes.DecodePass)
Read = list[list[set[int]]]
"""By KV head and decode row, the tokens read."""


class Sequence(NamedTuple):
    """One sequence in one layer, without its padding.

    query: [heads, tokens, head_dim], scaled; key, value: [num_kv_heads, tokens, head_dim]; output: like query. side: of
    each decode row, tokens read of an index. rest: of each decode row, share [num_kv_heads, group] and value
    [num_kv_heads, head_dim]. stored: keys and values as later rows read them. predicted: the query that the layer would
    make of the attention input of the layer before, like query; None where the method predicts none.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    output: np.ndarray
    read: Read
    num_read: list[float]
    side: list[float]
    rest: list[tuple[np.ndarray, np.ndarray]]
    stored: tuple[np.ndarray, np.ndarray]
    predicted: np.ndarray | None


class Of(NamedTuple):
    """One KV head of a sequence, and where it is: what a rule of a single head needs.

    query: [group, tokens, head_dim], scaled; key, stored_key: [tokens, head_dim].
    """

    geometry: Geometry
    layer: int
    head: int
    prompt: int
    query: np.ndarray
    key: np.ndarray
    stored_key: np.ndarray


Rule = Callable[..., Read]
"""rule(method, geometry, layer, sequence, prompt): the tokens that the heads of a sequence read."""
Found = dict[int, list[Sequence]]
"""By layer, the sequences of a batch."""


def replayed(model, case: Case) -> tuple[Geometry, Found]:
    """By layer, what the layer's attention was given of each sequence, and what the method made it read."""
    geometry, found, _ = replayed_and_counted(model, case)
    return geometry, found


def replayed_and_counted(model, case: Case, **options) -> tuple[Geometry, Found, ReadStats]:
    """The same, and what the session counted."""
    seen: dict[int, list[tuple]] = {}
    selected: dict[int, list[tuple]] = {}
    inputs: dict[int, list[torch.Tensor]] = {}

    def note(layer, query, key, value, output):
        parts = query.double(), key.double(), value.double(), output.transpose(1, 2).double()
        seen.setdefault(layer, []).append(parts)

    def select(block, exact):
        selection = original(block, exact)
        mask = selection.mask
        if mask is None:
            mask = block.tokens[:, None, None, : block.stop] < block.positions[:, None, :, None]
        mask = mask.clone().expand(-1, block.key.shape[1], -1, -1)
        found = mask, block.tokens[:, : block.stop], block.real[:, block.rows], selection
        selected.setdefault(block.layer, []).append(found)
        return selection

    sequences = [token_ids(length, seed) for seed, (_, length) in enumerate(BATCH)]
    with (
        pytest.MonkeyPatch.context() as patch,
        attach(model) as attached,
        watched(note, REPLAYING),
        ExitStack() as hooks,
    ):
        original = passes._Block._choose_tokens
        patch.setattr(passes._Block, "_choose_tokens", select)
        for layer in range(attached.geometry.num_layers):
            note_input = partial(take_input, attached, inputs.setdefault(layer, []))
            hook = attention_of(model, layer).register_forward_pre_hook(note_input, with_kwargs=True)
            hooks.callback(hook.remove)
        reads = run(attached, case, sequences, [prompt for prompt, _ in BATCH], calls=CALLS, **options).reads
        geometry = attached.geometry
    found: Found = {}
    for layer, blocks in selected.items():
        query, key, value, output = (torch.cat(parts, 2) for parts in zip(*seen[layer], strict=True))
        for b, (prompt, length) in enumerate(BATCH):
            read: Read = [[] for _ in range(key.shape[1])]
            num_read: list[float] = []
            sides: list[float] = []
            rest = []
            for masks, tokens, rows, selection in blocks:
                side, of_unread = selection.side, selection.rest
                for row in rows[b].nonzero().flatten().tolist():
                    num_read.append(float(selection.num_read[b, row]))
                    sides.append(0.0 if side is None else float(side[b, row]))
                    if of_unread is not None and of_unread.share is not None:
                        rest.append((of_unread.share[b, :, :, row].numpy(), of_unread.value[b, :, 0, row].numpy()))
                    for head, mask in enumerate(masks[b, :, row]):
                        read[head].append(set(tokens[b][mask].tolist()))
            columns = slice(PROMPT - prompt, PROMPT - prompt + length)  # padded before the prompt and behind the rows
            own = [part[b][:, columns].numpy() for part in (query * geometry.scale, key, value, output)]
            stored = own[1:3]
            if case.codec is not None:
                parts = zip(halves(codec_at(case.codec, layer)), stored, strict=True)
                stored = [coded_by(half, part) for half, part in parts]
            predicted = None
            if case.method.when == "previous_layer":
                predicted = plain_query(model, geometry, layer, torch.cat(inputs[layer - 1], 1)[b, columns])
            sequence = Sequence(*own, read, num_read, sides, rest, tuple(stored), predicted)
            found.setdefault(layer, []).append(sequence)
    assert sorted(found) == list(range(case.method.dense_layers, 4))
    return geometry, found, reads


def take_input(attached: Attached, taken: list[torch.Tensor], _: torch.nn.Module, args: tuple, kwargs: dict) -> None:
    """A hook before an attention module, which takes note of its input [batch, tokens, hidden]."""
    hidden = args[0] if args else kwargs["hidden_states"]
    taken.append(hidden if attached.packing is None else attached.packing.padded(hidden))


def plain_query(model, geometry: Geometry, layer: int, hidden: torch.Tensor) -> np.ndarray:
    """The query that a layer makes of an attention input [tokens, hidden], as `Sequence.query`."""
    with torch.inference_mode():
        rows = attention_of(model, layer).q_proj(hidden).unflatten(-1, (geometry.num_heads, -1)).double().numpy()
    placed = [rope(geometry, heads, position) for position, heads in enumerate(rows)]
    return np.stack(placed, 1) * geometry.scale


def of_heads(rule: Callable[..., Callable[[int], set[int]]]):
    """A rule of whole sequences from one of heads: rule(method, of) gives the tokens that row t reads."""

    def whole(method, geometry: Geometry, layer: int, sequence: Sequence, prompt: int) -> Read:
        read = []
        for head, key in enumerate(sequence.key):
            query = sequence.query[head * geometry.group : (head + 1) * geometry.group]
            row = rule(method, Of(geometry, layer, head, prompt, query, key, sequence.stored[0][head]))
            read.append([row(t) for t in range(prompt, len(key))])
        return read

    return whole


def norm(vectors: np.ndarray) -> np.ndarray:
    return np.sqrt((vectors * vectors).sum(-1))


def best(score, count: int) -> list[int]:
    """The `count` largest, ties to the lowest."""
    return sorted(range(len(score)), key=lambda each: (-score[each], each))[:count]


def measured(name: str, of: Of) -> np.ndarray:
    """A part of the tests' calibration."""
    return calibration(of.geometry.num_kv_heads, of.geometry.head_dim)[name][of.layer, of.head].double().numpy()


def rope(geometry: Geometry, states: np.ndarray, position: int) -> np.ndarray:
    """Llama's rotation of states [..., head_dim], base 10000; OPT has none."""
    if geometry.family == "opt":
        return states
    half = geometry.head_dim // 2
    angle = position / 10000 ** (np.arange(half) / half)
    first, second = states[..., :half], states[..., half:]
    turned = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
    return np.concatenate(turned, -1)


# Pages and tokens by an index


def quest(method: Quest, of: Of):
    """Bounds of each full page from its keys; the best pages, and the unfinished one.

    With `sum_probs`, FreeKV's rule: the pages that sinks and recent tokens are in, and the best of the others.
    """
    page = method.page_size

    def row(t: int) -> set[int]:
        pages = [of.key[begin : begin + page] for begin in range(0, t // page * page, page)]
        queries = of.query[:, t - (method.when == "previous_step")]
        if method.page_score == "deviation":
            bounds = np.array([[q @ keys.mean(0) + np.abs(q) @ keys.std(0) for keys in pages] for q in queries])
        else:
            bounds = np.array([[np.maximum(q * keys.min(0), q * keys.max(0)).sum() for keys in pages] for q in queries])
        others = len(pages)
        if method.budget < 1:
            others = min(others, max(3, math.floor(method.budget * t / page)) - 1)
        if method.group == "sum_probs":
            recent = t - math.floor(method.recent_frac * (others * page + t % page))
            competing = [i for i in range(len(pages)) if i * page >= method.num_sinks and (i + 1) * page <= recent]
            score = np.full(len(pages), np.inf)
            score[competing] = sum(softmax(bound) for bound in bounds[:, competing]) if competing else []
        else:
            score = (bounds - bounds.max(1, keepdims=True)).max(0) if pages else []
        chosen = {*best(score, others), len(pages)}
        return {token for token in range(t) if token // page in chosen}

    return row


def plain_kmeans(points: np.ndarray, count: int, iterations: int) -> np.ndarray:
    """Lloyd's algorithm from evenly spaced points."""
    centroids = np.array([points[number * len(points) // count] for number in range(count)])
    for _ in range(iterations):
        labels = np.array([plain_nearest(point, centroids) for point in points])
        for number in set(labels):
            centroids[number] = points[labels == number].mean(0)
    return centroids


def plain_nearest(point: np.ndarray, centroids: np.ndarray) -> int:
    return int(((centroids - point) ** 2).sum(1).argmin())


def pqcache(method: PQCache, of: Of):
    """The sinks, the most recent tokens, and those of the largest summed probability of the coded keys."""
    parts = []
    for part in np.split(of.key, of.key.shape[1] // method.part_size, axis=1):
        centroids = plain_kmeans(
            part[min(method.num_sinks, of.prompt - 1) : of.prompt], 2**method.bits, method.iterations
        )
        parts.append([centroids[plain_nearest(point, centroids)] for point in part])
    coded = np.concatenate(parts, axis=1)

    def row(t: int) -> set[int]:
        size = max(1, int(method.budget * t))
        recent = int(method.recent_frac * max(0, size - method.num_sinks))
        competing = range(min(t, method.num_sinks), t - recent)
        probs = np.full(t, np.inf)
        scores = coded[competing.start : competing.stop]
        probs[competing.start : competing.stop] = sum(softmax(scores @ query) for query in of.query[:, t]).round(12)
        return set(best(probs, size))  # equal codes tie

    return row


def yakv(method: YAKV, of: Of):
    """First and recent tokens, and those of the largest probability of a head, by keys of the nearest points."""
    points = np.loadtxt(GRID_FILE, delimiter=",")
    block = of.key.shape[1] & -of.key.shape[1]
    rotation, size = plain_hadamard(block), math.sqrt(block)
    coded = []
    for key in of.key:
        blocks = []
        for part in key.reshape(-1, block):
            fours = (part @ rotation / norm(part) * size).reshape(-1, 4)
            direction = np.concatenate([points[plain_nearest(four, points)] for four in fours]) / size
            blocks.append(float(np.float16(norm(part))) * direction @ rotation)
        coded.append(np.concatenate(blocks))
    keys = np.array(coded)

    def row(t: int) -> set[int]:
        size = max(1, int(method.budget * t))
        competing = slice(min(t, method.num_sinks), t - int(method.recent_frac * size))
        probs = np.full(t, np.inf)
        probs[competing] = np.max([softmax(keys[:t][competing] @ query) for query in of.query[:, t]], axis=0)
        return set(best(probs, size))

    return row


def test_the_points_of_yakv_code_normal_numbers_as_well_as_the_official_ones():
    """Their mean squared error is 0.0965; that of four numbers by Lloyd-Max, of the same bits, 0.1175."""
    numbers = torch.randn(2**16, 4, generator=torch.Generator().manual_seed(7))
    points = grid(numbers.device)
    coded = points[nearest_points(numbers, points).long()]
    assert float((coded - numbers).square().mean()) == pytest.approx(0.0965, rel=0.01)


def pariskv(method: ParisKV, of: Of):
    """Patterns in the query's order give their keys votes; the candidates' keys in 4 bits rank them."""
    head_dim, count = of.key.shape[1], of.key.shape[1] // 8
    rotation = np.diag(random_signs(head_dim, method.seed).double().numpy()) @ plain_hadamard(head_dim)
    levels = np.array(LEVELS)
    patterns, coded_keys = [], []
    for parts in (of.key @ rotation).reshape(-1, count, 8):
        patterns.append([tuple(np.where(part >= 0, 1, -1)) for part in parts])
        coded_key = []
        for part in parts:
            direction = part / norm(part)
            nearest = levels[np.abs(np.abs(direction)[:, None] - levels).argmin(1)]
            weight = np.float16(norm(part) / (nearest @ np.abs(direction)))
            coded_key.append(nearest * np.where(part >= 0, 1, -1) * float(weight))
        coded_keys.append(np.concatenate(coded_key))

    def votes(zone: range, query: np.ndarray, share: float) -> dict[int, int]:
        found = dict.fromkeys(zone, 0)
        for part, of_query in enumerate(query.reshape(count, 8)):
            score = {pattern: np.dot(pattern, of_query) for pattern in {patterns[token][part] for token in zone}}
            before = 0
            for pattern in sorted(score, key=score.__getitem__, reverse=True):
                tokens = [token for token in zone if patterns[token][part] == pattern]
                tiers = sum(before < math.ceil(len(zone) * share * tier) for tier in (0.05, 0.15, 0.3, 0.5, 0.75, 1))
                for token in tokens:
                    found[token] += tiers
                before += len(tokens)
        return found

    def row(t: int) -> set[int]:
        size = min(t, method.read_tokens or max(1, math.floor(method.budget * t)))
        recent = math.floor(method.recent_frac * size)
        zone = range(min(t, method.num_sinks), max(min(t, method.num_sinks), t - recent))
        others = size - (t - len(zone))
        found = votes(zone, of.query[:, t].mean(0) @ rotation, 0.5)
        number = max(others, math.ceil(len(zone) * (method.candidate_frac or 0.5)))
        candidates = sorted(sorted(zone, key=lambda token: (-found[token], token))[:number])
        scores = of.query[:, t] @ rotation @ np.array([coded_keys[token] for token in candidates]).T
        score = sum(map(softmax, scores)) if method.group == "sum_probs" else scores.sum(0)
        chosen = {candidates[number] for number in best(score, others)}
        return chosen | set(range(t)) - set(zone)

    return row


def socket(method: Socket, geometry: Geometry, layer: int, sequence: Sequence, prompt: int) -> Read:
    """Each corner of each table's cube gets a probability, the softmax over all corners."""
    normals = plane_normals(method.tables * method.planes, geometry.head_dim, method.seed).double().numpy()
    tables = normals.reshape(method.tables, method.planes, -1)
    corners = [*product((-1, 1), repeat=method.planes)]
    read = []
    for head, key in enumerate(sequence.key):
        queries = sequence.query[head * geometry.group : (head + 1) * geometry.group] / geometry.scale
        lengths = norm(sequence.value[head]).astype(np.float16).astype(float)
        sides = [[corners.index(tuple(side)) for side in np.where(key @ planes.T >= 0, 1, -1)] for planes in tables]
        of_head = []
        for t in range(prompt, len(key)):
            score = np.zeros(t)
            for query in queries[:, t]:
                for planes, of_table in zip(tables, sides, strict=True):
                    lean = np.tanh(planes @ query) / (method.tau * math.sqrt(geometry.head_dim))
                    score += softmax(np.array(corners) @ lean)[of_table[:t]]
            score *= lengths[:t] if method.value_weighted else 1
            size = min(t, method.read_tokens or max(1, math.floor(method.budget * t)))
            score[: method.num_sinks] = np.inf
            score[t - math.floor(method.recent_frac * size) :] = np.inf
            of_head.append(set(best(score.round(12), size)))  # equal hashes tie
        read.append(of_head)
    return read


def rocketkv(method: RocketKV, geometry: Geometry, layer: int, sequence: Sequence, prompt: int) -> Read:
    """SnapKV's tokens, and then chunks of them by one bound in each of the query's largest channels."""
    size = geometry.head_dim
    budget = method.budget_tokens or math.floor(method.budget * prompt)
    first = max(1, prompt / budget)
    kept = math.floor(prompt / first ** min(0.2 + 0.06 * math.log2(first), 0.8))
    second = max(1, kept / budget)
    length = min(math.floor(second), math.ceil(math.sqrt(second)))
    evicted = once(snapkv)(SnapKV(kept_tokens=kept, num_sinks=method.num_sinks, window=method.window,
                                  kernel=method.kernel), geometry, layer, sequence, prompt)  # fmt: skip
    read = []
    for head, key in enumerate(sequence.key):
        of_head = []
        queries = sequence.query[head * geometry.group : (head + 1) * geometry.group]
        for t in range(prompt, len(key)):
            tokens, query = sorted(evicted[head][t - prompt]), queries[:, t]
            assert len(tokens) == kept + t - prompt
            channels = best(np.abs(query).sum(0), max(1, math.floor(size * length / second)))
            share = np.abs(query[:, channels]).sum(1) / np.abs(query).sum(1)
            is_up = query.sum(0) > 0
            full = len(tokens) // length * length
            first_tokens = [token for token in tokens if token < method.num_sinks]
            score = np.full((len(query), len(tokens)), -np.inf)
            for begin in range(0, full, length):
                keys = key[tokens[begin : begin + length]]
                bound = np.where(is_up, keys.max(0), keys.min(0))[channels]
                score[:, begin : begin + length] = (query[:, channels] @ bound / np.sqrt(share))[:, None]
            score[:, : len(first_tokens)] = -np.inf
            probs = sum(map(softmax, score)) if np.isfinite(score).any() else np.zeros(len(tokens))
            probs[full:] = np.inf
            probs[: len(first_tokens)] = np.inf
            of_head.append({tokens[i] for i in best(probs.round(12), min(len(tokens), max(1, budget // 2)))})
        read.append(of_head)
    return read


def selectable(method: ShadowKV, key: np.ndarray, prompt: int) -> dict[int, np.ndarray]:
    """Landmarks of the chunks that do not stay on the device."""
    size = method.page_size
    landmarks, alike = {}, {}
    for chunk in range(max(0, prompt // size - method.local_chunks)):
        keys = key[chunk * size : (chunk + 1) * size]
        mean = landmarks[chunk] = keys.mean(0)
        alike[chunk] = (keys @ mean / norm(keys) / norm(mean)).min()
    stay = sorted(alike, key=alike.__getitem__)[: math.ceil(method.outlier_frac * len(alike))]
    return {chunk: mean for chunk, mean in landmarks.items() if chunk not in stay}


def shadowkv(method: ShadowKV, of: Of):
    """The chunks whose landmark is the most probable for any head of the group."""
    landmarks = selectable(method, of.key, of.prompt)

    def row(t: int) -> set[int]:
        probs = np.max([softmax(np.array([*landmarks.values()]) @ query) for query in of.query[:, t]], axis=0)
        budget = int(method.budget * t) if method.read_tokens is None else min(method.read_tokens, t)
        chunks = [[*landmarks][index] for index in best(probs, max(1, budget // method.page_size))]
        return {token for token in range(of.prompt) if token // method.page_size in chunks}

    return row


def coded(keys: np.ndarray, bits: int | None) -> np.ndarray:
    """Each row as it reads back, one group of numbers."""
    return keys if bits is None else np.array([coded_row(tuple(row), bits) for row in keys])


@cache
def coded_row(row: tuple[float, ...], bits: int) -> np.ndarray:
    """Every later token asks for it again."""
    return plain.quantized(np.array(row), bits, len(row))


def root(matrix: np.ndarray, power: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return vectors * values**power @ vectors.T


def balanced_product(of_query: np.ndarray, of_key: np.ndarray, rank: int) -> np.ndarray:
    """W_q W_k^T as the SVD of C_q^(1/2) C_k^(1/2) gives it, inverses and all."""
    ridges = [1e-4 * np.trace(each) / len(each) * np.diag(np.linspace(1, 2, len(each))) for each in (of_query, of_key)]
    of_query, of_key = of_query + ridges[0], of_key + ridges[1]
    left, strength, right = np.linalg.svd(root(of_query, 0.5) @ root(of_key, 0.5))
    return root(of_query, -0.5) @ (left[:, :rank] * strength[:rank] @ right[:rank]) @ root(of_key, -0.5)


def partial_scores(method, of: Of, t: int) -> np.ndarray:
    """Scores [group, t] on a few numbers per key."""
    query, key, size = of.query[:, t], of.key[:t], of.key.shape[1]
    if isinstance(method, DoubleSparsity):
        channels = best(measured("magnitude", of), math.ceil(method.rank * size))
        return query[:, channels] @ coded(key[:, channels], method.index_bits).T
    if isinstance(method, Loki):
        first = measured("rotation", of)[:, : math.ceil(method.rank * size)]
        return query @ first @ coded(key @ first, method.index_bits).T
    if isinstance(method, SparQ):
        magnitude = np.abs(query)
        channels = best(magnitude.sum(0), math.ceil(method.rank * size))
        share = magnitude[:, channels].sum(1) / magnitude.sum(1)
        return query[:, channels] @ key[:, channels].T / np.sqrt(share)[:, None]
    if isinstance(method, InfiniGen):
        basis = measured("rotation", of) if method.skew else np.eye(size)
        return query @ basis @ coded(key @ basis, method.index_bits).T
    of_query, of_key = np.zeros((size, size)), np.zeros((size, size))
    if method.statistics != "calibration":
        rows = of.query[:, : of.prompt].reshape(-1, size) / of.geometry.scale
        of_query, of_key = of_query + rows.T @ rows / len(rows), of_key + np.cov(of.key[: of.prompt].T, bias=True)
    if method.statistics != "prompt":
        of_query, of_key = of_query + measured("query", of), of_key + measured("key", of)
    rank = math.ceil(method.partial_weight_ratio * size)
    if method.projection_bits is None:
        return query @ balanced_product(of_query, of_key, rank) @ key.T
    # The columns of a projection are unique but for their signs, which decide codes: these are the method's own.
    known = {"query": torch.from_numpy(of_query)[None], "key": torch.from_numpy(of_key)[None]}
    _, key_side = balanced([known], rank).squeeze(1).numpy()
    key_side = coded(key_side @ mixing(rank, torch.device("cpu")).numpy(), method.projection_bits)
    of_key = of_key + 1e-4 * np.trace(of_key) / size * np.diag(np.linspace(1, 2, size))
    inverse = np.linalg.inv(key_side.T @ of_key @ key_side)
    query_side = coded(of_key @ key_side @ inverse, method.projection_bits)
    return query @ query_side @ key_side.T @ key.T


def check_mean_value(method: SparQ, geometry: Geometry, layer: int, sequence: Sequence, prompt: int) -> None:
    """The mean of all values so far has the weight of what is not read."""
    for t, (shares, means) in enumerate(sequence.rest, prompt):
        for head, key in enumerate(sequence.key):
            query = sequence.query[head * geometry.group : (head + 1) * geometry.group, [t] * (t + 2)]
            scores = partial_scores(method, Of(geometry, layer, head, prompt, query, key, key), t + 1)
            unread = [token not in sequence.read[head][t - prompt] for token in range(t)] + [False]
            assert shares[head] == pytest.approx([softmax(each)[unread].sum() for each in scores], abs=1e-6)
            assert np.allclose(means[head], sequence.value[head, : t + 1].mean(0), atol=1e-6)


def projected(method, of: Of):
    def row(t: int) -> set[int]:
        if isinstance(method, InfiniGen | InfiniGen2):
            count = max(1, math.floor(method.budget * t))
        else:
            count = min(t, method.read_tokens or max(1, math.floor(method.budget * t)))
        scores = partial_scores(method, of, t)
        score = scores.sum(0) if method.group == "sum_logits" else (scores - scores.max(1, keepdims=True)).max(0)
        recent = math.floor(method.recent_frac * count)
        score[t - recent :] = np.inf
        return set(best(score, count))

    return row


def twilight(method: Twilight, of: Of):
    """Of Quest's pages, in falling order of the coded keys' probability, tokens until their sum is p."""
    keys, page = coded(of.key, method.index_bits), method.page_size

    def candidates(t: int) -> list[set[int]]:
        """Of the group, or with a union of each query head."""
        pages = [of.key[begin : begin + page] for begin in range(0, t // page * page, page)]
        bounds = [[np.maximum(q * each.min(0), q * each.max(0)).sum() for each in pages] for q in of.query[:, t]]
        if method.group == "union":
            scores = [np.array(row) for row in bounds]
        else:
            scores = [sum(softmax(np.array(row)) for row in bounds)] * len(bounds)
        number = len(pages)
        if method.candidate_frac < 1:
            number = max(3, math.floor(method.candidate_frac * t / page)) - 1
        found = []
        for score in scores:
            chosen = {len(pages), *best(score, number)}
            found.append({token for token in range(t) if token // page in chosen})
        return found

    def row(t: int) -> set[int]:
        cap, of_heads, probs = max(1, math.floor(method.budget * t)), candidates(t), []
        for allowed, query in zip(of_heads, of.query[:, t], strict=True):
            hidden = [token not in allowed for token in range(t)]
            probs.append(softmax(np.where(hidden, -np.inf, keys[:t] @ query)))
        if method.group != "union":
            of_heads, probs = of_heads[:1], [sum(probs) / len(probs)]
        read: set[int] = set()
        for allowed, weights in zip(of_heads, probs, strict=True):
            first = allowed & {*range(method.num_sinks), *range(t - int(method.recent_frac * cap), t)}
            order = sorted(allowed, key=lambda token: (token not in first, -weights[token]))[:cap]
            mass = 0.0
            for token in order:
                if token in first or mass < method.p or method.p == 1:
                    read.add(token)
                    mass += weights[token]
        return read

    return row


def plain_hash(number: int) -> int:
    for _ in range(2):
        number = ((number ^ (number >> 16)) % 2**32 * 0x45D9F3B) % 2**32
    return number ^ (number >> 16)


def sampled(method: VAttention, of: Of, t: int) -> tuple[set[int], list[int], int]:
    """The fixed set, the sample of the others, and the number of the others."""
    keys = of.key if method.when == "true_scores" else coded(of.key, method.index_bits)
    scores = of.query[:, t] @ keys[: t + 1].T  # the own one last
    size = min(t, max(1, math.floor(method.fixed_frac * t)))
    forced = {*range(method.num_sinks), *range(t - math.floor(method.recent_frac * size), t)}
    competing = np.array([token not in forced for token in range(t)])
    probs = sum(softmax(np.where(competing, head[:t], -np.inf)) for head in scores)
    fixed = set(best(np.where(competing, probs, np.inf), size))
    others = [token for token in range(t) if token not in fixed]

    def in_drawn_order(first: int) -> list[int]:
        of_row = plain_hash(plain_hash(plain_hash(first) + method.seed) + t)
        return sorted(others, key=lambda token: plain_hash(of_row + token) >> 8)

    of_head = of.head + of.layer * 2**16
    others, base_order = in_drawn_order(of_head), in_drawn_order(of_head + 2**31)
    number = wanted = len(others)
    if method.epsilon:
        base = min(number, max(2, math.floor(method.base_frac * number)))
        z, wanted = NormalDist().inv_cdf(1 - method.delta), base
        for head in np.exp(scores - scores.max(1, keepdims=True)):
            found = head[base_order[:base]]
            total = head[[*fixed, t]].sum() + number * found.mean()
            wanted = max(wanted, int((z * found.std(ddof=1) * number / (method.epsilon * total)) ** 2))
    cap = min(t, max(1, math.floor(method.budget * t)))
    return fixed, others[: min(number, wanted, cap - len(fixed))], number


def vattention(method: VAttention, of: Of):
    def row(t: int) -> set[int]:
        fixed, sample, _ = sampled(method, of, t)
        return fixed | set(sample)

    return row


# Eviction after the prompt


def pyramid_shares(mean: int, competing: int, num_layers: int) -> list[int]:
    """The line of PyramidKV, its running sum rounded down."""
    high = Fraction(min(2 * mean - mean // 20, competing))
    line = [high - layer * 2 * (high - mean) / max(1, num_layers - 1) for layer in range(num_layers)]
    until = [math.floor(sum(line[:count], Fraction())) for count in range(num_layers + 1)]
    return [after - before for before, after in zip(until, until[1:], strict=False)]


def shared_counts(score, tokens: range, share: int) -> list[int]:
    """Ada-KV: four fifths of a head's places by the layer's best tokens, a fifth for certain."""
    pairs = sorted((-score[head][token], head) for head in range(len(score)) for token in tokens)
    wins = [sum(head == h for _, head in pairs[: share * len(score)]) for h in range(len(score))]
    blend = [Fraction(4, 5) * won + Fraction(share, 5) for won in wins]
    until = [math.floor(sum(blend[:count], Fraction())) for count in range(len(score) + 1)]
    return [after - before for before, after in zip(until, until[1:], strict=False)]


def snapkv(method: SnapKV, geometry: Geometry, sequence: Sequence, prompt: int) -> tuple[np.ndarray, np.ndarray]:
    score = np.zeros((geometry.num_kv_heads, prompt))
    before, half = max(0, prompt - method.window), method.kernel // 2
    for head, query in enumerate(sequence.query):
        for row in range(before, prompt):
            probs = softmax(sequence.key[head // geometry.group, : row + 1] @ query[row])
            score[head // geometry.group, :before] += probs[:before]
    smoothed = score.copy()
    for token in range(before):
        around = score[:, max(0, token - half) : min(before, token + half + 1)]
        smoothed[:, token] = around.max(1) if method.pooling == "max" else around.sum(1) / method.kernel
    return smoothed, score


def knorm(method: Knorm, geometry: Geometry, sequence: Sequence, prompt: int) -> np.ndarray:
    return -norm(sequence.key[:, :prompt])


def keydiff(method: KeyDiff, geometry: Geometry, sequence: Sequence, prompt: int) -> np.ndarray:
    directions = sequence.key[:, :prompt] / norm(sequence.key[:, :prompt])[..., None]
    anchors = directions.mean(1)
    return -(directions @ anchors[..., None])[..., 0] / norm(anchors)[:, None]


def expected(method: ExpectedAttention, geometry: Geometry, sequence: Sequence, prompt: int) -> np.ndarray:
    score, sinks = np.zeros((geometry.num_kv_heads, prompt)), method.num_sinks
    units = np.eye(geometry.head_dim)
    ahead = sum(rope(geometry, units, position) for position in range(prompt, prompt + 512)) / 512  # of e_i in row i
    for head, query in enumerate(sequence.query):
        kv = head // geometry.group
        turned = np.array([rope(geometry, query[token] / geometry.scale, -token) for token in range(sinks, prompt)])
        mean, cov = turned.mean(0) @ ahead, ahead.T @ np.cov(turned.T, bias=True) @ ahead
        keys = sequence.key[kv, sinks:prompt] * geometry.scale
        score[kv, sinks:] += softmax(keys @ mean + ((keys @ cov) * keys).sum(1) / 2) / geometry.group
    return score * norm(sequence.value[:, :prompt])


def once(score_of):
    """A rule from `score_of(method, geometry, sequence, prompt)`, [num_kv_heads, prompt], or two: of equals too."""

    def rule(method: PromptEvicting, geometry: Geometry, layer: int, sequence: Sequence, prompt: int) -> Read:
        found = score_of(method, geometry, sequence, prompt)
        score, of_equals = found if isinstance(found, tuple) else (found, np.zeros_like(found))
        size = math.floor(method.budget * prompt) if method.kept_tokens is None else method.kept_tokens
        tokens = range(method.num_sinks, prompt - method.window)
        share, selecting = size - method.num_sinks - method.window, geometry.num_layers - method.dense_layers
        if method.layers == "pyramid":
            share = pyramid_shares(share, len(tokens), selecting)[layer - method.dense_layers]
        shares = [share] * len(score)
        if method.heads == "adaptive":
            shares = shared_counts(score, tokens, share)
        read = []
        for row, second, count in zip(score, of_equals, shares, strict=True):
            stays = sorted(tokens, key=lambda token: (-row[token], -second[token], -token))[:count]
            kept = set(range(prompt)) if size >= prompt else {*stays, *range(prompt)} - (set(tokens) - set(stays))
            read.append([kept | set(range(prompt, t)) for t in range(prompt, sequence.key.shape[1])])
        return read

    return rule


# Eviction while decoding


def h2o(method: H2O, of: Of):
    """The tokens with the most attention so far, from all rows and the group, and the most recent ones."""
    recent = math.floor(method.recent_frac * len(of.key))
    budget = max(1, math.floor(method.heavy_frac * len(of.key)) + recent)
    if method.kept_tokens is not None:
        budget, recent = method.kept_tokens, method.kept_tokens // 2
    mass: dict[int, float] = {}

    def attend(t: int, keys: np.ndarray, tokens: list[int]) -> None:
        for query in of.query[:, t]:
            probs = softmax(np.array([*keys[tokens], of.key[t]]) @ query)
            for token, prob in zip([*tokens, t], probs, strict=True):
                mass[token] = mass.get(token, 0.0) + prob

    def evict(num_tokens: int) -> None:
        while len(mass) > budget:
            candidates = sorted(token for token in mass if token < num_tokens - recent)
            del mass[min(candidates, key=mass.__getitem__)]

    for t in range(of.prompt):
        attend(t, of.key, [*range(t)])
    evict(of.prompt)
    read = []
    for t in range(of.prompt, len(of.key)):
        read.append(set(mass))
        attend(t, of.stored_key, sorted(mass))
        evict(t + 1)
    return lambda t: read[t - of.prompt]


def streaming(method: Streaming, of: Of):
    window = method.kept_tokens or max(1, math.floor(method.budget * len(of.key)))
    recent = window - method.num_sinks
    return lambda t: {token for token in range(t) if token < method.num_sinks or token >= t - recent}


def tova(method: TOVA, geometry: Geometry, layer: int, sequence: Sequence, prompt: int) -> Read:
    length = sequence.key.shape[1]
    budget = method.kept_tokens or max(1, math.floor(method.budget * length))

    def evict(row: int, tokens: list[int]) -> set[int]:
        attention = sum(
            softmax(sequence.key[head // geometry.group, tokens] @ query[row])
            for head, query in enumerate(sequence.query)
        )
        score = dict(zip(tokens, attention, strict=True))
        may_leave = [token for token in tokens if not method.protect_last or token < row]
        return set(tokens) - set(sorted(may_leave, key=score.__getitem__)[: max(0, len(tokens) - budget)])

    kept, read = evict(prompt - 1, list(range(prompt))), []
    for t in range(prompt, length):
        read.append(kept)
        kept = evict(t, sorted(kept | {t}))
    return [read] * geometry.num_kv_heads


def now_and_then(method, of: Of, score: Callable[[list[int], list[int]], list[float]]):
    """A rule that compresses. score(tokens, competing): of each competing one of the tokens that are held."""
    budget = method.kept_tokens or math.floor(method.budget * len(of.key))

    def compress(tokens: list[int]) -> set[int]:
        if len(tokens) <= budget:
            return set(tokens)
        safe = set(tokens[len(tokens) - method.window :])
        safe |= set(range(of.prompt if method.protect_prompt else 0))
        competing = [token for token in tokens if token not in safe]
        stay = best(score(tokens, competing), budget - len(safe))
        return safe | {competing[place] for place in stay}

    kept, read = compress(list(range(of.prompt))), []
    for t in range(of.prompt, len(of.key)):
        read.append(kept)
        kept = kept | {t}
        if (t + 1 - of.prompt) % method.divide_length == 0:
            kept = compress(sorted(kept))
    return lambda t: read[t - of.prompt]


def rkv(method: RKV, of: Of):
    def score(tokens: list[int], competing: list[int]) -> list[float]:
        last, half = tokens[-1], method.kernel // 2
        rows = range(last + 1 - method.window, last + 1)
        attention = np.mean([softmax((of.query[:, row] @ of.key[competing].T).max(0)) for row in rows], 0)
        smooth = [attention[max(0, i - half) : i + half + 1].max() for i in range(len(competing))]
        directions = of.key[tokens] / norm(of.key[tokens])[:, None]
        cosine = directions @ directions.T
        for i, row in enumerate(cosine):
            row[i] = 0
            alike = [j for j, value in enumerate(row) if value > 0.5]
            row[alike[-1:]] = 0
        similar = dict(zip(tokens, softmax(cosine.mean(0)), strict=True))
        share = method.mix_lambda
        return [share * smooth[i] - (1 - share) * similar[token] for i, token in enumerate(competing)]

    return now_and_then(method, of, score)


def random_attention(method: RandomAttention, of: Of):
    def score(tokens: list[int], competing: list[int]) -> list[float]:
        of_head = plain_hash(plain_hash(of.head + of.layer * 2**16) + method.seed)
        of_draw = plain_hash(of_head + tokens[-1] + 1)
        return [plain_hash(of_draw + token) >> 8 for token in competing]

    return now_and_then(method, of, score)


def triattention(method: TriAttention, of: Of):
    """By the paper's formula over complex numbers: every key is turned back to where it has no position, and the
    distances are averaged one by one."""
    measures = calibration(of.geometry.num_kv_heads, of.geometry.head_dim)
    half, group = of.geometry.head_dim // 2, of.geometry.group
    angle = measures["turn"][of.layer, half:].numpy()
    distances = [2**power for power in range(40) if 2**power <= method.offset_max_length]

    def score(tokens: list[int], competing: list[int]) -> list[float]:
        following = tokens[-1] + 1
        of_heads = []
        for head in range(of.head * group, (of.head + 1) * group):
            centre = measures["centre"][of.layer, head].numpy()
            centre = centre[:half] + 1j * centre[half:]
            spread = measures["spread"][of.layer, head, :half].double().numpy()
            scores = []
            for token in competing:
                key = (of.key[token, :half] + 1j * of.key[token, half:]) * np.exp(-1j * angle * token)
                phase, size = np.angle(centre * key.conj()), np.abs(centre) * np.abs(key)
                terms = [size * np.cos(angle * (following - token + ahead) + phase) for ahead in distances]
                scores.append(np.mean(terms, 0).sum() + (spread * np.abs(key)).sum())
            scores = np.array(scores)
            of_heads.append((scores - scores.mean()) / scores.std())
        return list(np.max(of_heads, 0))

    return now_and_then(method, of, score)


def duo(method: DuoAttention, of: Of):
    gates = calibration(of.geometry.num_kv_heads, of.geometry.head_dim)["gates"].tolist()
    heads = [(gate, i, head) for i, row in enumerate(gates) for head, gate in enumerate(row)]
    selecting = sorted(each for each in heads if each[1] >= method.dense_layers)
    streaming = [each[1:] for each in selecting[: round(method.sparsity * len(selecting))]]

    def row(t: int) -> set[int]:
        window = {*range(min(t, method.num_sinks)), *range(max(0, t - method.num_recent), t)}
        return window if (of.layer, of.head) in streaming else set(range(t))

    return row


def halves(codec) -> tuple:
    """What codes keys, and what codes values."""
    return codec.keys, codec.values


def coded_by(half, rows: np.ndarray) -> np.ndarray:
    """Rows [num_kv_heads, tokens, size] as they read back."""
    return half.roundtrip(torch.from_numpy(rows).float()).double().numpy()


def as_read(codec, half, rows: np.ndarray, t: int) -> np.ndarray:
    """The first `t` rows as row t reads them: the last ones exact, groups of tokens until there are `residual`."""
    num_coded = t
    if codec.residual:
        num_coded = t - t % codec.residual if half.span > 1 else max(0, t - codec.residual)
    return np.concatenate([coded_by(half, rows[:, :num_coded]), rows[:, num_coded:t]], 1)


def check_output(geometry: Geometry, sequence: Sequence, prompt: int, codec=None) -> None:
    """A decode row attends to the tokens that it reads, as they are stored, and to its own as it is."""
    for row, t in enumerate(range(prompt, sequence.query.shape[1])):
        keys, values = sequence.key, sequence.value
        if codec is not None:
            parts = zip(halves(codec), (keys, values), strict=True)
            keys, values = (as_read(codec, half, part, t) for half, part in parts)
        for head, query in enumerate(sequence.query[:, t]):
            kv = head // geometry.group
            tokens = sorted(sequence.read[kv][row])
            weights = softmax(np.array([*keys[kv, tokens], sequence.key[kv, t]]) @ query)
            wanted = weights @ np.array([*values[kv, tokens], sequence.value[kv, t]])
            if sequence.rest:
                shares, means = sequence.rest[row]
                share = shares[kv, head % geometry.group]
                wanted = (1 - share) * wanted + share * means[kv]
            assert np.abs(sequence.output[head, t] - wanted).max() < 1e-4, f"head {head}, row {t}"


INDEX = {"alpha": math.inf, "budget": 0.3, "when": "own_query"}
PLAIN = {
    Quest: of_heads(quest), PQCache: of_heads(pqcache), ShadowKV: of_heads(shadowkv), SnapKV: once(snapkv),
    Knorm: once(knorm), KeyDiff: once(keydiff), ExpectedAttention: once(expected), TOVA: tova, RKV: of_heads(rkv),
    RandomAttention: of_heads(random_attention), TriAttention: of_heads(triattention),
    H2O: of_heads(h2o), Streaming: of_heads(streaming), DuoAttention: of_heads(duo), Twilight: of_heads(twilight),
    VAttention: of_heads(vattention),
    ParisKV: of_heads(pariskv), YAKV: of_heads(yakv), Socket: socket, RocketKV: rocketkv,
}  # fmt: skip
"""The rule of each method; others score on a few numbers per key."""
OF_CASES = (
    "h2o", "h2o-recent", "h2o-fills", "h2o-tokens", "streaming", "quest", "freekv", "pqcache", "pariskv", "socket",
    "yakv", "rocketkv", "shadowkv", "doublesparsity", "loki", "sparq", "snapkv", "snapkv-both", "knorm", "keydiff",
    "expected",
    "tova", "rkv", "rkv-prompt", "random-all", "triattention-all", "duo", "twilight", "twilight-pages", "vattention",
    "vattention-true",
)  # fmt: skip
OTHER_SETTINGS = {
    "streaming-tokens": Streaming(kept_tokens=7, num_sinks=0, dense_layers=0),
    "quest-token": Quest(budget=0.3, page_size=1, dense_layers=0),
    "unique": Quest(budget=0.4, page_size=3, page_score="deviation", dense_layers=0),
    "freekv-forced": Quest(
        budget=0.7, page_size=3, when="previous_step", group="sum_probs", num_sinks=6, recent_frac=0.9
    ),
    "pqcache-fine": PQCache(budget=0.3, num_sinks=1, part_size=2, bits=2, iterations=0, dense_layers=0),
    "pariskv-as-read": ParisKV(budget=0.6, num_sinks=0, recent_frac=0.0, candidate_frac=0.1, dense_layers=0),
    "pariskv-probs": ParisKV(read_tokens=6, num_sinks=0, group="sum_probs"),
    "socket-fine": Socket(read_tokens=5, num_sinks=0, tables=3, planes=7, tau=0.1, seed=5, dense_layers=0),
    "socket-bits": Socket(budget=0.3, num_sinks=0, tables=20, planes=3, value_weighted=False),
    "rocketkv-chunks": RocketKV(budget_tokens=6, window=2, kernel=5, dense_layers=0),
    "rocketkv-one": RocketKV(budget_tokens=2, window=2, kernel=3),
    "rocketkv-sinks": RocketKV(budget_tokens=7, window=1, num_sinks=2),
    "rocketkv-wide": RocketKV(budget=1.5, window=3, kernel=3),
    "shadowkv-tokens": ShadowKV(read_tokens=5, page_size=3, local_chunks=0, outlier_frac=0.0, dense_layers=0),
    "doublesparsity-coded": DoubleSparsity(budget=0.3, rank=0.5, index_bits=2),
    "loki-tokens": Loki(read_tokens=7, rank=0.3, dense_layers=0),
    "sparq-best": SparQ(read_tokens=9, rank=0.1, recent_frac=0.5, group="best"),
    "infinigen-coded": InfiniGen(partial_weight_ratio=1.0, index_bits=4, **INDEX),
    "balanced": preset("infinigen-balanced", **INDEX),
    "balanced-prompt": preset("infinigen-balanced", statistics="prompt", **INDEX),
    "balanced-text": preset("infinigen-balanced", statistics="calibration", **INDEX),
    "balanced-pair": preset("infinigen-balanced", projection_bits=4, **INDEX),
    "snapkv-avg": SnapKV(kept_tokens=9, window=2, kernel=5, pooling="avg", dense_layers=0),
    "snapkv-peak": SnapKV(kept_tokens=6, window=4, kernel=7),
    "pyramid": SnapKV(kept_tokens=10, num_sinks=1, window=2, layers="pyramid", dense_layers=1),
    "adaptive": SnapKV(budget=0.5, window=3, heads="adaptive"),
    "keydiff-sinks": KeyDiff(kept_tokens=6, num_sinks=2, window=1, dense_layers=0),
    "tova-last": TOVA(kept_tokens=6, protect_last=True, dense_layers=0),
    "tova-one": TOVA(kept_tokens=1),
    "rkv-share": RKV(budget=0.3, divide_length=5, window=1, mix_lambda=0.7, dense_layers=0),
    "random": RandomAttention(kept_tokens=None, budget=0.6, divide_length=4),
    "triattention": TriAttention(kept_tokens=None, budget=0.6, divide_length=5),
    "twilight-all": Twilight(p=0.9, candidate_frac=1.0, page_size=3, index_bits=2, dense_layers=0),
    "twilight-first": Twilight(p=0.5, candidate_frac=1.0, page_size=3, num_sinks=2, recent_frac=0.2, budget=0.4),
    "twilight-cap": Twilight(candidate_frac=0.7, page_size=2).with_budget(0.3),
    "vattention-cap": VAttention(num_sinks=1, seed=7, dense_layers=0).with_budget(0.4),
    "vattention-capped": VAttention(budget=0.5, num_sinks=0, base_frac=0.2, index_bits=None),
    "vattention-whole": VAttention(epsilon=0.0, budget=0.5, num_sinks=1, fixed_frac=0.2),
}
RULES = {name: CASES[name].method for name in OF_CASES} | OTHER_SETTINGS
OPT = ("balanced", "expected", "shadowkv", "duo", "snapkv-both", "h2o")
"""Rules that a model without rotary positions may change, and one of several layers."""
RUNS = [(name, "gqa") for name in RULES] + [(name, "opt") for name in OPT]
CALLS = (1, 2, 9, 20)
"""The rows after which replay's calls end: inside a page or a group."""


@pytest.mark.parametrize(("name", "model"), RUNS)
def test_a_method_reads_what_its_plain_rule_reads(name, model, monkeypatch):
    monkeypatch.setattr("methods.rkv.PROMPT_CHUNK", 5)
    check_rule(RULES[name], tiny(model), PLAIN.get(type(RULES[name]), of_heads(projected)))


def check_rule(method, model, rule: Rule) -> None:
    """A method reads what its rule says, and as many tokens as its closed form says, of the layers' mean where they
    differ."""
    of_layers = isinstance(method, DuoAttention) or getattr(method, "layers", "uniform") == "pyramid"
    by_data = isinstance(method, Twilight) and (method.p < 1 or method.group == "union")
    by_data |= isinstance(method, VAttention) and method.epsilon > 0
    geometry, found = replayed(model, Case(method))
    for layer, sequences in found.items():
        for (prompt, length), sequence in zip(BATCH, sequences, strict=True):
            wanted = rule(method, geometry, layer, sequence, prompt)
            assert sequence.key.shape[1] == length and sequence.read == wanted, f"layer {layer}, prompt of {prompt}"
            sizes = np.array([[*map(len, rows)] for rows in wanted])
            assert sequence.num_read == pytest.approx(sizes.mean(0))
            assert len(sequence.rest) == (length - prompt) * isinstance(method, SparQ)
            check_mean_value(method, geometry, layer, sequence, prompt)
            if not isinstance(method, ShadowKV | VAttention):  # they have checks of their own
                check_output(geometry, sequence, prompt)
            for t, of_heads_read in zip(range(prompt, length), sizes.T, strict=True):
                at, mean = TokenCounts(t, prompt, length), of_heads_read.mean()
                assert mean <= method.max_tokens_read(at, layer) <= at.cached
                assert of_heads_read.max() <= method.tokens_kept(at, layer) <= at.cached
                wanted_size = None if by_data else pytest.approx(mean)
                assert of_layers or method.tokens_read(at, layer) == wanted_size


CODED = (
    "full+smooth", "int4", "kivi", "kvarn", "residual-groups", "residual-fills", "residual-tiles", "layers",
    "layers-residual", "h2o+smooth",
)  # fmt: skip


@pytest.mark.parametrize("name", CODED)
def test_rows_are_read_as_the_codec_stores_them_but_the_own_one(name):
    case = CASES[name]
    geometry, found = replayed(tiny("gqa"), case)
    for layer, sequences in found.items():
        for (prompt, _), sequence in zip(BATCH, sequences, strict=True):
            check_output(geometry, sequence, prompt, codec_at(case.codec, layer))
            if name == "h2o+smooth":
                assert sequence.read == of_heads(h2o)(case.method, geometry, layer, sequence, prompt)


@pytest.mark.parametrize("name", ["h2o", "infinigen", "quest-union", "full+smooth", "infinigen+smooth"])
def test_budgets_and_recall_are_the_plain_ones(name):
    """Of a padded batch whose sequences count several times."""
    case, times = CASES[name], [2, 1, 3]
    options = {"multiplicity": torch.tensor(times), "measure_recall": True}
    geometry, found, reads = replayed_and_counted(tiny("gqa"), case, **options)
    width = 1 if case.codec is None else case.codec.bits_per_element(geometry.head_dim) / 16
    shares, recalls, num_read, num_causal = [], [], 0, 0
    for at, ((prompt, length), number) in enumerate(zip(BATCH, times, strict=True)):
        layers = [sequences[at] for sequences in found.values()]
        by_head = [[len(tokens) for tokens in head] for layer in layers for head in layer.read]
        read, cached = np.mean(by_head, 0), np.arange(prompt, length)
        share = (case.method.dense_layers + len(layers) * width * read / cached) / geometry.num_layers
        shares += number * [*share]
        num_read += number * (prompt * (prompt + 1) / 2 + (read + 1).sum())  # with the dense prompt and the own tokens
        num_causal += number * length * (length + 1) / 2
        recalls += number * [np.mean([recalled(geometry, layer, t, prompt) for layer in layers]) for t in cached]
    assert reads.rows == len(shares) and reads.budget == pytest.approx(np.mean(shares), abs=1e-9)
    density = num_read / num_causal
    code_bits = 16 if case.codec is None else case.codec.bits
    # Below the root, rounding of the sums counts by its square root.
    assert reads.budget_artifact == pytest.approx((1 - math.sqrt(1 - density)) * code_bits / 16, abs=1e-7)
    if case.codec is None:
        assert reads.attention_recall == pytest.approx(np.mean(recalls), abs=1e-5)
    else:
        assert reads.attention_recall is None
    reads.check_fired()


def recalled(geometry: Geometry, sequence: Sequence, t: int, prompt: int) -> float:
    """Share of a row's attention to the tokens that it reads and itself, mean over the heads."""
    found = []
    for head, query in enumerate(sequence.query):
        kv = head // geometry.group
        weights = softmax(sequence.key[kv, : t + 1] @ query[t])
        found.append(weights[[*sequence.read[kv][t - prompt], t]].sum())
    return float(np.mean(found))


# Parts that the rules above do not see


@pytest.mark.parametrize("model", ["gqa", "opt"])
def test_shadowkv_attends_to_rebuilt_keys_and_to_exact_ones_that_stay(model):
    method = ShadowKV(budget=0.3, page_size=2, local_chunks=1, outlier_frac=0.2, rank_frac=0.2)
    _, found = replayed(tiny(model), Case(method))
    query, key, value, output, *_ = found[3][0]
    with attach(tiny(model)) as attached:
        geometry, positions = attached.geometry, torch.arange(PROMPT)[None]
        heads, _, head_dim = key.shape
        bare = geometry.rotate(torch.tensor(key[:, :PROMPT]).float()[None], positions, inverse=True)[0].double().numpy()
        left, scale, right = np.linalg.svd(bare.transpose(1, 0, 2).reshape(PROMPT, -1), full_matrices=False)
        rank = min(PROMPT, math.ceil(method.rank_frac * heads * head_dim))
        product = ((left * scale)[:, :rank] @ right[:rank]).reshape(PROMPT, heads, head_dim).transpose(1, 0, 2)
        low = geometry.rotate(torch.tensor(product).float()[None], positions)[0].double().numpy()
    assert np.abs(low - key[:, :PROMPT]).max() > 0.1
    for head, own in enumerate(query):
        kv = head // geometry.group
        group = query[kv * geometry.group : (kv + 1) * geometry.group]
        chunks, row = (
            selectable(method, key[kv], PROMPT),
            shadowkv(method, Of(geometry, 3, kv, PROMPT, group, key[kv], key[kv])),
        )
        for t in range(PROMPT, len(own)):
            fetched = row(t)
            read = [token for token in range(t + 1) if token in fetched or token // method.page_size not in chunks]
            keys = np.array([low[kv, token] if token in fetched else key[kv, token] for token in read])
            assert np.abs(output[head, t] - softmax(keys @ own[t]) @ value[kv, read]).max() < 1e-4


@pytest.mark.parametrize("name", ["vattention", "vattention-true"])
def test_a_sampled_token_counts_as_many_times_as_it_was_unlikely_to_be_drawn(name):
    method, sizes = RULES[name], set()
    geometry, found = replayed(tiny("gqa"), Case(method))
    query, key, value, output, *_ = found[3][0]
    for head, own in enumerate(query):
        kv = head // geometry.group
        of = Of(geometry, 3, kv, PROMPT, query[kv * geometry.group : (kv + 1) * geometry.group], key[kv], key[kv])
        for t in range(PROMPT, LENGTH):
            fixed, sample, number = sampled(method, of, t)
            read = [*fixed, t, *sample]
            times = [1] * (len(fixed) + 1) + [number / max(1, len(sample))] * len(sample)
            weights = np.exp(key[kv, read] @ own[t]) * times
            assert np.abs(output[head, t] - weights @ value[kv, read] / weights.sum()).max() < 1e-4
            sizes.add(times[-1])
    assert max(sizes) > 2


@pytest.mark.parametrize("model", ["llama", "gqa"])
def test_duos_gates_are_early_attention_at_the_mean(model):
    with attach(tiny(model)) as attached:
        measured, seen = calibrated(attached, DuoAttention(), token_ids(40, 3))
        gates, geometry = measured["gates"], attached.geometry
    assert gates.shape == (geometry.num_layers, geometry.num_kv_heads)
    for layer, states in enumerate(seen):
        queries, keys = (
            [np.mean([rope(geometry, row, -t) for t, row in enumerate(head)], 0) for head in heads] for heads in states
        )
        for kv, key in enumerate(keys):
            turned = np.array([rope(geometry, key, t) for t in range(500)])
            group = queries[kv * geometry.group : (kv + 1) * geometry.group]
            probs = [softmax(turned @ rope(geometry, query, 499) * geometry.scale) for query in group]
            wanted = np.mean([np.cumsum(each).mean() for each in probs])
            assert float(gates[layer, kv]) == pytest.approx(wanted, abs=1e-4)


def test_channels_and_components_are_measured_on_the_calibration():
    generator = torch.Generator().manual_seed(4)
    query, key = (torch.randn(heads, 30, 16, generator=generator) for heads in (4, 2))
    key = key * torch.linspace(0.5, 3, 16) + 5
    geometry = Geometry(1, 4, 2, 16, 0.25, "llama")
    magnitude = DoubleSparsity().calibrate(query, key, geometry, [])["magnitude"]
    rotation = Loki().calibrate(query, key, geometry, [])["rotation"].double().numpy()
    for head in range(2):
        group, keys = query[2 * head : 2 * head + 2].double().numpy(), key[head].double().numpy()
        assert np.allclose(magnitude[head], np.abs(group * keys).mean((0, 1)), rtol=1e-5)
        variances = np.diag(rotation[head].T @ np.cov(keys.T) @ rotation[head])
        assert np.allclose(variances, np.linalg.eigvalsh(np.cov(keys.T))[::-1], rtol=1e-4)

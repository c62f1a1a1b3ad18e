"""Choices of the methods here against the authors' own code, on queries and keys of a real model.

    python -m benchmarks.parity --source ~/SnapKV --source ~/R-KV     folders of checkouts; any number of them
    python -m benchmarks.parity                                       says what can be compared, and where it is found

No code of others is part of this project: a comparison imports the authors' function from a folder that is given, and
is skipped where there is none. All run on a CPU. The queries and keys are those of the first 600 tokens of the
offline text. An agreement is the mean share of the tokens that both keep (or pages, or numbers that both give), over
layers and heads. benchmarks/PARITY.md has the results, and those that took more than a script.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.data.text import offline_text, token_ids
from harness.errors import UserError, exit_code, reason
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.load import load_model
from harness.model.prompts import calibrate
from harness.run.compose import load
from methods.base import EMPTY, Calibration, Geometry, Lengths, Method, PromptRows, QueryRows, RereadRows
from methods.codecs.integers import ChannelCodec
from methods.evicting import EvictingState
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen, choose_columns, skewing
from methods.kvzip import KVzip
from methods.prompt_evicting import SnapKV
from methods.quest import Quest
from methods.rkv import RKV
from methods.socket import Socket, plane_normals
from methods.tova import TOVA
from methods.triattention import TriAttention, planes

TOKENS, LAYERS = 600, 8
"""First tokens of the offline text, and layers at even distances."""
ROWS = 32
"""Last tokens whose queries select, where a method selects for each row."""
FREEKV = "rooikeee/FreeKV accuracy/kvc/patch/dynamic_attention.py"
SNAPKV = "FasterDecoding/SnapKV snapkv/monkeypatch/snapkv_utils.py"
INFINIGEN = "snu-comparch/InfiniGen speedup/infinigen/infinigen/"
SOCKET = (
    "skylight-org/sparse-attention-hub "
    "sparse_attention_hub/sparse_attention/research_attention/maskers/fixed/implementations/utils/socket_utils.py"
)


class Layer(NamedTuple):
    """One layer of the model: query [1, heads, tokens, head_dim], key [1, num_kv_heads, tokens, head_dim]."""

    geometry: Geometry
    query: Tensor
    key: Tensor


class Comparison(NamedTuple):
    """source: GitHub's name of a repository, and a module in it. what: the things that agree. agreement: 0 to 1, of the
    module with ours in a layer."""

    source: str
    what: str
    agreement: Callable[[ModuleType, Layer], float]


COMPARISONS: dict[str, Comparison] = {}


def compared(name: str, source: str, what: str, **settings: Any) -> Callable[[Callable], Callable]:
    """Makes a function of a module and a layer a comparison. settings: of the function."""

    def register(agreement: Callable) -> Callable:
        COMPARISONS[name] = Comparison(source, what, partial(agreement, **settings))
        return agreement

    return register


# What is compared: ours, theirs


def kept(method: Method, layer: Layer, calibration: Calibration | None = None) -> Tensor:
    """Prompt tokens that an evicting method keeps: bool [num_kv_heads, tokens]."""
    tokens = layer.key.shape[2]
    lengths = torch.tensor([tokens])
    state = method.new_state(layer.geometry, Lengths(lengths, lengths), calibration)
    assert isinstance(state, EvictingState)
    real = torch.ones(1, tokens, dtype=torch.bool)
    state.prompt(method.dense_layers, layer.query, layer.key, layer.key, PromptRows(real, tokens))
    return state.tokens[method.dense_layers][0, :, :tokens] != EMPTY


def numbered(layer: Layer) -> Tensor:
    """Values that are the tokens' numbers, so that what a function returns says which tokens it kept."""
    return torch.arange(layer.key.shape[2], dtype=torch.float32)[:, None].expand_as(layer.key).contiguous()


def marked(numbers: Tensor, layer: Layer) -> Tensor:
    """Numbers of tokens [heads, kept] as bool [heads, tokens]."""
    mask = torch.zeros(len(numbers), layer.key.shape[2], dtype=torch.bool)
    return mask.scatter_(1, numbers.round().long(), True)


def shared(ours: Tensor, theirs: Tensor) -> float:
    """Share of the tokens that they keep and ours keeps too."""
    assert ours.sum() == theirs.sum(), "the two keep different numbers of tokens"
    return float((ours & theirs).sum() / theirs.sum())


def a_set_per_query_head(layer: Layer) -> Layer:
    """The same layer with a KV head for each query head, as code that repeats keys has it."""
    key = layer.key.repeat_interleave(layer.geometry.group, 1)
    geometry = Geometry(1, key.shape[1], key.shape[1], key.shape[3], layer.geometry.scale, "llama")
    return Layer(geometry, layer.query, key)


@compared("snapkv, average", SNAPKV, "kept tokens of each query head", pooling="avg")
@compared("snapkv, maximum", SNAPKV, "kept tokens of each query head", pooling="max")
def snapkv(module: Any, layer: Layer, pooling: str) -> float:
    layer, budget = a_set_per_query_head(layer), layer.key.shape[2] // 5
    cluster = module.SnapKVCluster(32, budget, 7, f"{pooling}pool")
    values = cluster.update_kv(layer.key, layer.query, numbered(layer), None, 1)[1]
    ours = kept(SnapKV(0, kept_tokens=budget, window=32, kernel=7, pooling=pooling), layer)
    return shared(ours, marked(values[0, :, :, 0], layer))


@compared("rkv", "Zefan-Cai/R-KV rkv/compression/r1_kv.py", "kept tokens of the prompt")
def rkv(module: Any, layer: Layer) -> float:
    budget = layer.key.shape[2] // 5
    theirs = module.R1KV(budget=budget, window_size=8, kernel_size=7, mix_lambda=0.07)
    values = theirs.update_kv(layer.key, layer.query[:, :, -8:], numbered(layer))[1]
    return shared(kept(RKV(0, kept_tokens=budget), layer), marked(values[0, :, :, 0], layer))


@compared("triattention", "WeianMao/triattention triattention/methods/pruning_utils.py", "kept tokens of the prompt")
def triattention(module: Any, layer: Layer) -> float:
    """Each measures the centres of the layer's queries, scores its keys, and keeps a fifth."""
    geometry, tokens = layer.geometry, layer.key.shape[2]
    budget = tokens // 5
    method = TriAttention(0, kept_tokens=budget, protect_prompt=False)
    measured = method.calibrate(layer.query[0], layer.key[0], geometry, [])
    ours = kept(method, layer, {name: tensor[None] for name, tensor in measured.items()})
    positions = torch.arange(tokens)
    bare = [geometry.rotate(states, positions[None], inverse=True)[0] for states in (layer.query, layer.key)]
    _, turn = planes(geometry, 0, layer.key)
    half = geometry.head_dim // 2
    offsets = module.build_geometric_offsets(method.offset_max_length, positions.device)
    chosen = []
    for head, key in enumerate(bare[1]):
        scores = []
        for query in bare[0][head * geometry.group : (head + 1) * geometry.group]:
            as_complex = module.to_complex_pairs(query)
            means = as_complex.mean(0), as_complex.abs().mean(0)
            size, phase, more = module.compute_frequency_statistics_from_means(*means, key)
            scored = module.score_keys_for_round(
                positions, tokens, size, phase, turn[half:].float(), more, offsets, "mean", torch.ones(half)
            )
            scores.append((scored - scored.mean()) / scored.std(unbiased=False))
        chosen.append(torch.stack(scores).amax(0).topk(budget).indices)
    return shared(ours, marked(torch.stack(chosen), layer))


@compared("tova", "schwartz-lab-NLP/TOVA src/tova_cache.py", "kept tokens of the prompt")
def tova(module: Any, layer: Layer) -> float:
    budget = layer.key.shape[2] // 5
    keys = layer.key.repeat_interleave(layer.geometry.group, 1)
    weights = (layer.query[:, :, -1:] @ keys.mT * layer.geometry.scale).softmax(-1)
    cache = SimpleNamespace(cache_size=budget, key_cache=[layer.key], value_cache=[numbered(layer)])
    module.TOVACache.reduce(cache, 0, weights)
    return shared(kept(TOVA(0, kept_tokens=budget), layer), marked(cache.value_cache[0][0, :, :, 0], layer))


@compared("kvzip", "snu-mllab/KVzip attention/score.py", "scores of the prompt's tokens")
def kvzip(module: Any, layer: Layer) -> float:
    """Scores within 1e-6. The first half of the tokens is the prompt, and the second half stands for its repetition."""
    num_sinks, half = 4, layer.key.shape[2] // 2
    query, key = layer.query[:, :, half:], layer.key[:, :, half:]
    score = module.KVScore()
    score.n_layers, score.n_heads_kv, score.dtype, score.device = 1, key.shape[1], key.dtype, key.device
    score.sink, score.start_idx, score.end_idx = num_sinks, num_sinks, half
    score.init_score()
    score._get_score(query, layer.key, 0)
    rows = RereadRows(query, key, layer.key[:, :, :half], slice(num_sinks, half))
    ours = KVzip(num_sinks=num_sinks).reread(rows, layer.geometry.softmax(0))
    return float(((ours - score.score[0][0]).abs() <= 1e-6).float().mean())


def selected(method: Method, layer: Layer, t: int, calibration: Calibration | None = None) -> Tensor:
    """Which of the first t tokens row t reads by its own query: bool [num_kv_heads, t]. The keys stand for values."""
    lengths, position = torch.tensor([t]), torch.tensor([[t]])
    state = method.new_state(layer.geometry, Lengths(lengths, lengths + 1), calibration)
    keys = layer.key[:, :, :t]
    state.prompt(0, layer.query[:, :, :t], keys, keys, PromptRows(torch.ones(1, t, dtype=torch.bool), t + 1))
    query = layer.query[:, :, t : t + 1]
    rows = QueryRows(query, position, position >= 0, torch.arange(t)[None, None], position[None], None)
    selection = state.select(0, rows)
    assert selection.mask is not None
    return selection.mask[0, :, 0]


def kept_by_step(method: Method, layer: Layer, prompt: int) -> Iterator[Tensor]:
    """What an evicting method keeps after the prompt and after each row behind it: bool [num_kv_heads, tokens]."""
    tokens = layer.key.shape[2]
    state = method.new_state(layer.geometry, Lengths(torch.tensor([prompt]), torch.tensor([tokens])))
    assert isinstance(state, EvictingState)
    keys, real = layer.key[:, :, :prompt], torch.ones(1, prompt, dtype=torch.bool)
    state.prompt(0, layer.query[:, :, :prompt], keys, keys, PromptRows(real, tokens))
    slots = torch.arange(tokens)[None, None]
    for t in range(prompt, tokens):
        is_kept = state.tokens[0][:, :, :tokens] != EMPTY
        yield is_kept[0]
        own = torch.tensor([[t]])
        query = layer.query[:, :, t : t + 1]
        readable = is_kept | (slots == t)
        scores = query @ layer.key.mT * layer.geometry.scale
        hidden = scores.masked_fill(~readable[:, :, None], -torch.inf).unsqueeze(2)
        state.select(0, QueryRows(query, own, own >= 0, slots, own[None], partial(torch.Tensor.clone, hidden)))
    yield state.tokens[0][0, :, :tokens] != EMPTY


@compared("socket", SOCKET, "best tokens of each query head", num_sinks=0, recent_frac=0.0)
@compared("socket, first and recent", SOCKET, "tokens read for each query head", num_sinks=4, recent_frac=0.08)
def socket(module: Any, layer: Layer, num_sinks: int, recent_frac: float) -> float:
    """Tokens read for each of the last rows by the same planes, a set for each query head: the share of ours that the
    official rule reads, too. Its best tokens may be among those that are always read."""
    layer, end, found = a_set_per_query_head(layer), layer.key.shape[2], []
    method = Socket(0, budget=0.1, num_sinks=num_sinks, recent_frac=recent_frac)
    normals = plane_normals(method.num_bits, layer.key.shape[3], method.seed)
    planes = normals.unflatten(0, (method.tables, method.planes))
    corners = module.get_protos_T({}, method.planes, normals.device, normals.dtype)
    buckets, lengths = module.hard_hash(layer.key, planes), layer.key.norm(dim=-1)
    for t in range(end - ROWS, end):
        ours = selected(method, layer, t)
        num_read = int(ours[0].sum())
        num_recent = int(recent_frac * num_read)
        best = module.topk_soft_collision_scores_blockwise(
            q_probs=module.soft_hash(layer.query[:, :, t : t + 1], planes, corners, tau=method.tau),
            key_buckets=buckets[..., :t],
            v_mag=lengths[..., :t],
            allowed_bool=torch.ones(1, len(ours), 1, t, dtype=torch.bool),
            M=num_read - num_sinks - num_recent,
        )[0]
        theirs = torch.zeros_like(ours)
        theirs[:, :num_sinks] = theirs[:, t - num_recent :] = True
        theirs.scatter_(1, best[0, :, 0], True)
        found.append(float((ours & theirs).sum() / ours.sum()))
    return sum(found) / len(found)


@compared("freekv, unscaled", FREEKV, "pages that compete", policy="avgSM")
@compared("freekv, scaled", FREEKV, "pages that compete", policy="avgSdM")
def freekv(module: Any, layer: Layer, policy: str) -> float:
    """Pages that compete, chosen for each of the last rows by the row's own query."""
    geometry, size, end = layer.geometry, 32, layer.key.shape[2]
    method = Quest(0, budget=0.5, page_size=size, group="sum_probs", num_sinks=size, recent_frac=0.25)
    found = []
    for t in range(end - ROWS, end):
        tokens = selected(method, layer, t)
        keys, query = layer.key[:, :, :t], layer.query[:, :, t : t + 1]
        pages = t // size
        mask = tokens[:, : pages * size].unflatten(1, (pages, size)).all(-1)
        recent = t - int(0.25 * float(tokens[0].sum()))
        competing = torch.tensor([p for p in range(1, pages) if (p + 1) * size - 1 < recent])
        ours = mask[:, competing]
        paged = keys[:, :, : pages * size].unflatten(2, (pages, size))[:, :, competing].transpose(1, 2)
        asked = query.transpose(1, 2), paged.amin(3), paged.amax(3), policy
        score = module.quest_sel(*asked, geometry.num_heads, geometry.num_kv_heads)
        best = score[0].topk(int(ours[0].sum())).indices
        found.append(shared(ours, torch.zeros_like(ours).scatter_(1, best, True)))
    return sum(found) / len(found)


@compared("infinigen, skewing", INFINIGEN + "skewing_controller.py", "columns of A")
def infinigen_skewing(module: Any, layer: Layer) -> float:
    """Columns of the authors' A, which is rounded to fp16, that are columns of ours but for sign and order. It is read
    from identities, which the authors' function multiplies with it in the place of weights."""
    layer = a_set_per_query_head(layer)
    heads, head_dim = layer.geometry.num_heads, layer.geometry.head_dim
    identity = torch.eye(heads * head_dim, dtype=torch.float16)
    states = layer.query.transpose(1, 2), layer.key.transpose(1, 2)
    folded, _ = module.skew(*states, identity, identity.clone(), heads, head_dim)
    blocks = folded.view(heads, head_dim, heads, head_dim).diagonal(dim1=0, dim2=2).movedim(-1, 0).float()
    return same_directions(blocks.mT, skewing(layer.query[0], heads))


@compared("infinigen, columns", INFINIGEN + "partial_weight_generation_controller.py", "columns that rehearse")
def infinigen_columns(module: Any, layer: Layer) -> float:
    """By the magnitude of the query's columns alone, and as many as the speed code takes."""
    layer = a_set_per_query_head(layer)
    heads, head_dim = layer.geometry.num_heads, layer.geometry.head_dim
    basis = skewing(layer.query[0], heads)
    skewed = (layer.query @ basis).transpose(1, 2).flatten(2)
    numbers = module.partial_weight_index_generation(skewed, heads, head_dim, SPEED_CODE.partial_weight_ratio)[0]
    theirs = basis.gather(-1, numbers[:, None].expand(-1, head_dim, -1))
    return same_directions(theirs, partial_columns(layer, basis, layer.key.shape[2]))


@compared("infinigen, tokens", INFINIGEN + "kv_selection_controller.py", "tokens that are fetched")
def infinigen_tokens(module: Any, layer: Layer) -> float:
    """Tokens for each of the last rows, by the same columns: those within alpha of the best score, as many for a head
    as the mean over the heads says, at most a fifth."""
    layer, end, found = a_set_per_query_head(layer), layer.key.shape[2], []
    heads, basis = layer.geometry.num_heads, skewing(layer.query[0], layer.geometry.num_heads)
    for t in range(end - ROWS, end):
        ours = selected(SPEED_CODE, layer, t, {"rotation": basis[None]})
        columns = partial_columns(layer, basis, t)
        keys = (layer.key[0, :, :t] @ columns).transpose(0, 1).contiguous()
        query = layer.query[0, :, t : t + 1] @ columns * layer.geometry.scale
        hidden = query.view(1, 1, -1)
        most = int(SPEED_CODE.budget * t)
        best = module.speculate_attention(hidden, torch.eye(hidden.shape[-1]), keys, heads, SPEED_CODE.alpha, most)
        found.append(shared(ours, torch.zeros_like(ours).scatter_(1, best[:, 0].mT, True)))
    return sum(found) / len(found)


@compared("h2o", "FMInference/H2O h2o_hf/utils_real_drop/modify_llama.py", "kept tokens of the prompt and of each step")
def h2o(module: Any, layer: Layer) -> float:
    """Tokens that a query head keeps after the prompt and after each of the last rows, half of them recent."""
    layer, end = a_set_per_query_head(layer), layer.key.shape[2]
    prompt, budget = end - ROWS, end // 5
    cache = module.H2OKVCache_LayerWise(hh_size=budget - budget // 2, recent_size=budget // 2)
    causal = torch.ones(prompt, prompt, dtype=torch.bool).tril()
    scores = layer.query[:, :, :prompt] @ layer.key[:, :, :prompt].mT * layer.geometry.scale
    probs = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    numbers, found = numbered(layer), []
    kept_keys, kept_numbers = cache((layer.key[:, :, :prompt], numbers[:, :, :prompt]), probs)
    for t, ours in enumerate(kept_by_step(H2O(0, kept_tokens=budget), layer, prompt), prompt):
        found.append(shared(ours, marked(kept_numbers[0, :, :, 0], layer)))
        if t == end:
            break
        keys = torch.cat([kept_keys, layer.key[:, :, t : t + 1]], 2)
        values = torch.cat([kept_numbers, numbers[:, :, t : t + 1]], 2)
        probs = (layer.query[:, :, t : t + 1] @ keys.mT * layer.geometry.scale).softmax(-1)
        kept_keys, kept_numbers = cache((keys, values), probs)
    return sum(found) / len(found)


@compared("kivi", "jy-yuan/KIVI quant/new_pack.py", "coded keys")
def kivi(module: Any, layer: Layer) -> float:
    """Numbers that read back within a quarter of a step of one another: keys in 2 bits, per channel of 32 tokens."""
    keys = layer.key[:, :, : layer.key.shape[2] // 32 * 32]
    packed = module.quant_and_pack_kcache(keys.contiguous(), 32, 2)
    theirs = module.unpack_and_dequant_kcache(*packed, 32, 2).float()
    step = packed[1].expand(*packed[1].shape[:3], 32, -1).flatten(2, 3)
    return float(((ChannelCodec("int2", 32).roundtrip(keys) - theirs).abs() <= step / 4).float().mean())


SPEED_CODE = InfiniGen(0, partial_weight_ratio=0.3, alpha=5.0, columns="query", round_columns="down")
"""InfiniGen as the artifact's speed code has it, but for the cap, which is a number of tokens there."""


def partial_columns(layer: Layer, basis: Tensor, prompt: int) -> Tensor:
    """Columns of A that rehearse after a prompt: [heads, head_dim, columns]."""
    real = torch.ones(1, prompt, dtype=torch.bool)
    return choose_columns(layer.query[:, :, :prompt], layer.key[:, :, :prompt], real, basis, SPEED_CODE)[0]


def same_directions(theirs: Tensor, ours: Tensor) -> float:
    """Share of their columns [heads, head_dim, n], of length 1, that are columns of ours but for the sign."""
    cosines = (theirs.mT @ ours).abs().amax(-1)
    return float((cosines > 0.999).float().mean())


# A run


@dataclass(frozen=True)
class Recorder(Full):
    """A calibration that is the queries and keys themselves."""

    def calibrate(self, query: Tensor, key: Tensor, geometry: Geometry, earlier: Sequence[Any]) -> dict[str, Tensor]:
        return {"query": query, "key": key}


def layers_of(attached: Attached, ids: Sequence[int], count: int) -> list[Layer]:
    """Queries and keys of `count` layers at even distances."""
    seen = calibrate(attached, Recorder(), ids)
    chosen = sorted({number * len(seen["key"]) // count for number in range(count)})
    return [Layer(attached.geometry, seen["query"][layer][None], seen["key"][layer][None]) for layer in chosen]


def official(file: str, sources: Sequence[Path]) -> ModuleType:
    """The authors' module, from the first folder in which it lies at any depth, with the modules beside it.

    The packages around it are not run: they ask for a GPU or old libraries, which no comparison needs. Raises
    UserError where there is none, or where it cannot be imported.
    """
    found = [path for source in sources for path in source.rglob(file)]
    if not found:
        raise UserError(f"{file} is in no --source")
    package = ModuleType(str(found[0].parent).replace(".", "_"))
    package.__path__ = [str(found[0].parent)]
    sys.modules[package.__name__] = package
    try:
        return importlib.import_module(f"{package.__name__}.{found[0].stem}")
    except Exception as error:
        raise UserError(f"cannot be imported: {reason(error)}") from error


def compare(sources: Sequence[Path], layers: Sequence[Layer]) -> Iterator[str]:
    """Lines of the table: a comparison each, or why it cannot be made."""
    yield "| compared | with | agreement (%) |"
    yield "|---|---|---|"
    for name, comparison in COMPARISONS.items():
        repository, file = comparison.source.split()
        try:
            module = official(file, sources)
        except UserError as error:
            yield f"| {name} | https://github.com/{repository} | skipped: {error} |"
            continue
        shares = [100 * comparison.agreement(module, layer) for layer in layers]
        shown = f"{sum(shares) / len(shares):.2f}, worst layer {min(shares):.2f}"
        yield f"| {name}: {comparison.what} | {comparison.source} | {shown} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=str(__doc__).splitlines()[0])
    parser.add_argument("--source", type=Path, action="append", default=[], help="a checkout; may be given repeatedly")
    parser.add_argument("settings", nargs="*", help="of the model, as on run.py's command line")
    options = parser.parse_intermixed_args(argv)

    def act() -> None:
        loaded = load_model(load(options.settings).model)
        ids = token_ids(offline_text(), loaded.tokenizer)[:TOKENS]
        with attach(loaded.model) as attached:
            layers = layers_of(attached, ids, LAYERS)
        for line in compare(options.source, layers):
            print(line, flush=True)

    return exit_code(act)


if __name__ == "__main__":
    sys.exit(main())

"""Choices of the methods here against the authors' own code, on queries and keys of a real model.

    python -m benchmarks.parity --source ~/SnapKV --source ~/R-KV     folders of checkouts; any number of them
    python -m benchmarks.parity                                       says what can be compared, and where it is found

No code of others is part of this project: a comparison imports the authors' function from a folder that is given, or
from an installed package, and is skipped where there is none. All run on a CPU. The queries and keys are those of the
first `--tokens` tokens of the offline text. An agreement is the mean share of the tokens that both keep (or pages, or
numbers that both give), over layers and heads. benchmarks/PARITY.md has the results,
and those that took more than a script.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from harness.data.text import offline_text, token_ids
from harness.errors import UserError, exit_code
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.calibration import calibrate
from harness.model.load import load_model
from harness.run.compose import load
from methods.base import EMPTY, Calibration, Geometry, Lengths, Method, PromptRows, QueryRows
from methods.codecs.base import hadamard
from methods.codecs.blockgtq import allocated
from methods.codecs.channel import ChannelCodec
from methods.codecs.ggml import GGML_BITS, GGML_BLOCK, GgmlCodec
from methods.codecs.kvarn import balancing_scales
from methods.codecs.nvfp4 import Nvfp4Codec
from methods.codecs.turbo import lloyd_max
from methods.evicting import EvictingState
from methods.extras import RereadRows
from methods.full import Full
from methods.kvzip import KVzip
from methods.prompt_evicting import KeyDiff, Knorm, SnapKV
from methods.quest import Quest
from methods.rkv import RKV
from methods.socket import Socket, plane_normals
from methods.tova import TOVA
from methods.triattention import TriAttention, planes

ROWS = 32
"""Last tokens whose queries select, where a method selects for each row."""


class Layer(NamedTuple):
    """One layer of the model: query [1, heads, tokens, head_dim], key [1, num_kv_heads, tokens, head_dim]."""

    geometry: Geometry
    query: Tensor
    key: Tensor


class Comparison(NamedTuple):
    """file: the module below one of `roots`, folders of a checkout. is_package: it is imported by that name, as it
    imports its neighbours."""

    repository: str
    file: str
    agreement: Callable[[Any, Layer], float]
    what: str
    is_package: bool = False
    roots: tuple[str, ...] = ("",)


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


def snapkv(pooling: str) -> Callable[[Any, Layer], float]:
    def compare(module: Any, layer: Layer) -> float:
        layer, budget = a_set_per_query_head(layer), layer.key.shape[2] // 5
        cluster = module.SnapKVCluster(32, budget, 7, f"{pooling}pool")
        values = cluster.update_kv(layer.key, layer.query, numbered(layer), None, 1)[1]
        ours = kept(SnapKV(0, kept_tokens=budget, window=32, kernel=7, pooling=pooling), layer)
        return shared(ours, marked(values[0, :, :, 0], layer))

    return compare


def rkv(module: Any, layer: Layer) -> float:
    budget = layer.key.shape[2] // 5
    theirs = module.R1KV(budget=budget, window_size=8, kernel_size=7, mix_lambda=0.07)
    values = theirs.update_kv(layer.key, layer.query[:, :, -8:], numbered(layer))[1]
    return shared(kept(RKV(0, kept_tokens=budget), layer), marked(values[0, :, :, 0], layer))


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


def tova(module: Any, layer: Layer) -> float:
    budget = layer.key.shape[2] // 5
    keys = layer.key.repeat_interleave(layer.geometry.group, 1)
    weights = (layer.query[:, :, -1:] @ keys.mT * layer.geometry.scale).softmax(-1)
    cache = SimpleNamespace(cache_size=budget, key_cache=[layer.key], value_cache=[numbered(layer)])
    module.TOVACache.reduce(cache, 0, weights)
    return shared(kept(TOVA(0, kept_tokens=budget), layer), marked(cache.value_cache[0][0, :, :, 0], layer))


def press(name: str, method: Callable[..., Method]) -> Callable[[Any, Layer], float]:
    def compare(module: Any, layer: Layer) -> float:
        budget = layer.key.shape[2] // 5
        scores = getattr(module, name)().score(None, None, layer.key, layer.key, None, {})
        ours = kept(method(0, kept_tokens=budget), layer)
        return shared(ours, marked(scores[0].topk(budget).indices, layer))

    return compare


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


def no_scores() -> Tensor:
    raise NotImplementedError


def selected(method: Method, layer: Layer, t: int) -> Tensor:
    """Which of the first t tokens row t reads by its own query: bool [num_kv_heads, t]. The keys stand for values."""
    lengths, position = torch.tensor([t]), torch.tensor([[t]])
    state = method.new_state(layer.geometry, Lengths(lengths, lengths + 1))
    keys = layer.key[:, :, :t]
    state.prompt(0, layer.query[:, :, :t], keys, keys, PromptRows(torch.ones(1, t, dtype=torch.bool), t + 1))
    query = layer.query[:, :, t : t + 1]
    rows = QueryRows(query, position, position >= 0, torch.arange(t)[None, None], position[None], no_scores)
    selection = state.select(0, rows)
    assert selection.mask is not None
    return selection.mask[0, :, 0]


def socket(num_sinks: int, recent_frac: float) -> Callable[[Any, Layer], float]:
    """Tokens read for each of the last rows by the same planes, a set for each query head: the share of ours that the
    official rule reads, too. Its best tokens may be among those that are always read."""

    def compare(module: Any, layer: Layer) -> float:
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

    return compare


def freekv(policy: str) -> Callable[[Any, Layer], float]:
    """Pages that compete, chosen for each of the last rows by the row's own query."""

    def compare(module: Any, layer: Layer) -> float:
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

    return compare


def kivi(module: Any, layer: Layer) -> float:
    """Numbers that read back within a quarter of a step of one another: keys in 2 bits, per channel of 32 tokens."""
    keys = layer.key[:, :, : layer.key.shape[2] // 32 * 32]
    packed = module.quant_and_pack_kcache(keys.contiguous(), 32, 2)
    theirs = module.unpack_and_dequant_kcache(*packed, 32, 2).float()
    step = packed[1].expand(*packed[1].shape[:3], 32, -1).flatten(2, 3)
    return float(((ChannelCodec("int2", 32).roundtrip(keys) - theirs).abs() <= step / 4).float().mean())


def nvfp4(module: Any, layer: Layer) -> float:
    """Numbers that read back within 1e-6 of their size: keys, a row at a time with its own scale."""
    rows = layer.key.flatten(0, 2)
    scale = 6 * 448 / rows.abs().amax(-1)[:, None, None]  # of all codes and all scales of a row
    codes, of_blocks = module.ref_nvfp4_quant(rows, scale, 16)
    theirs = codes.unflatten(-1, (-1, 16)) * (of_blocks.unsqueeze(-1) / scale)
    close = torch.isclose(Nvfp4Codec().roundtrip(rows), theirs.flatten(1), rtol=1e-6, atol=0)
    return float(close.float().mean())


def q8_0(module: Any, layer: Layer) -> float:
    """Bytes of the cache types of llama.cpp that are equal: keys in blocks, without the rotation."""
    blocks = layer.key.reshape(-1, GGML_BLOCK)
    equal = []
    for name in GGML_BITS:
        theirs = module.quantize(blocks.numpy(), GGMLQuantizationType[name.upper()])
        equal.append(GgmlCodec(name).encode(blocks).flatten() == torch.tensor(theirs).flatten())
    return float(torch.cat(equal).float().mean())


def kvarn(module: Any, layer: Layer) -> float:
    """Codes that are equal: keys in 4 bits, in tiles of 128 tokens, with the scales of each side."""
    whole = layer.key[0, :, : layer.key.shape[2] // 128 * 128]
    tiles = hadamard(whole).unflatten(1, (-1, 128)).flatten(0, 1).mT.contiguous()
    of_columns, of_rows = balancing_scales(tiles)
    codes = []
    for balanced in (tiles / of_columns / of_rows, module.variance_normalize_batched(tiles)[0]):
        minimum = balanced.amin(-1, keepdim=True)
        step = (balanced.amax(-1, keepdim=True) - minimum) / 15
        codes.append(((balanced - minimum) / step).round())
    return float((codes[0] == codes[1]).float().mean())


def blockgtq(module: Any, layer: Layer) -> float:
    """Widths of the rotary pairs that are equal, by the score of keys and queries, at means of 2 and 3 bits."""
    queries = layer.query[0].unflatten(0, (layer.geometry.num_kv_heads, -1)).flatten(1, 2)
    scores = [states.square().unflatten(-1, (2, -1)).sum(-2).mean(1) / 2 for states in (queries, layer.key[0])]
    equal = []
    for score in scores[0] + scores[1]:
        for bits in (2, 3):
            theirs = module.greedy_bit_allocation(score, bits * len(score), 1, bits + 3)
            equal.append(allocated(score, bits, bits + 3) == theirs)
    return float(torch.cat(equal).float().mean())


def turboquant(module: Any, layer: Layer) -> float:
    """Centroids for 2, 3 and 4 bits within 0.5 % of the distribution's standard deviation."""
    close = []
    for bits in (2, 3, 4):
        theirs = module.solve_lloyd_max(layer.geometry.head_dim, bits)[0] * layer.geometry.head_dim**0.5
        close.append((torch.tensor(lloyd_max(bits)) - theirs).abs() < 0.005)
    return float(torch.cat(close).float().mean())


COMPARISONS = {
    "snapkv, average": Comparison(
        "FasterDecoding/SnapKV", "snapkv/monkeypatch/snapkv_utils.py", snapkv("avg"), "kept tokens of each query head"
    ),
    "snapkv, maximum": Comparison(
        "FasterDecoding/SnapKV", "snapkv/monkeypatch/snapkv_utils.py", snapkv("max"), "kept tokens of each query head"
    ),
    "rkv": Comparison(
        "Zefan-Cai/R-KV", "rkv/compression/r1_kv.py", rkv, "kept tokens of the prompt", True, ("", "HuggingFace")
    ),
    "triattention": Comparison(
        "WeianMao/triattention", "triattention/methods/pruning_utils.py", triattention, "kept tokens of the prompt"
    ),
    "kvzip": Comparison("snu-mllab/KVzip", "attention/score.py", kvzip, "scores of the prompt's tokens"),
    "tova": Comparison("schwartz-lab-NLP/TOVA", "src/tova_cache.py", tova, "kept tokens of the prompt"),
    "keydiff": Comparison(
        "NVIDIA/kvpress", "kvpress/presses/keydiff_press.py", press("KeyDiffPress", KeyDiff), "kept tokens", True
    ),
    "knorm": Comparison(
        "NVIDIA/kvpress", "kvpress/presses/knorm_press.py", press("KnormPress", Knorm), "kept tokens", True
    ),
    "freekv, unscaled": Comparison(
        "rooikeee/FreeKV", "accuracy/kvc/patch/dynamic_attention.py", freekv("avgSM"), "pages that compete"
    ),
    "freekv, scaled": Comparison(
        "rooikeee/FreeKV", "accuracy/kvc/patch/dynamic_attention.py", freekv("avgSdM"), "pages that compete"
    ),
    "socket": Comparison(
        "skylight-org/sparse-attention-hub",
        "sparse_attention_hub/sparse_attention/research_attention/maskers/fixed/implementations/utils/socket_utils.py",
        socket(0, 0.0),
        "best tokens of each query head",
    ),
    "socket, first and recent": Comparison(
        "skylight-org/sparse-attention-hub",
        "sparse_attention_hub/sparse_attention/research_attention/maskers/fixed/implementations/utils/socket_utils.py",
        socket(4, 0.08),
        "tokens read for each query head",
    ),
    "kivi": Comparison("jy-yuan/KIVI", "quant/new_pack.py", kivi, "coded keys"),
    "nvfp4": Comparison(
        "vllm-project/vllm",
        "vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py",
        nvfp4,
        "coded keys",
        True,
    ),
    "q8_0": Comparison(
        "ggml-org/llama.cpp", "gguf/quants.py", q8_0, "bytes of keys, q5_1 and q4_0 too", True, ("gguf-py",)
    ),
    "kvarn": Comparison(
        "vllm-project/vllm",
        "vllm/model_executor/layers/quantization/kvarn/sinkhorn.py",
        kvarn,
        "codes of keys in 4 bits",
    ),
    "blockgtq3": Comparison("JIA-Lab-research/blockgtq", "blockgtq/allocator.py", blockgtq, "bits of rotary pairs"),
    "turboquant": Comparison(
        "vllm-project/vllm",
        "vllm/model_executor/layers/quantization/turboquant/centroids.py",
        turboquant,
        "centroids of 2, 3 and 4 bits",
    ),
}


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


def official(comparison: Comparison, sources: Sequence[Path]) -> ModuleType | str:
    """The authors' module, from the first folder that has it, else installed; else why there is none."""
    package = comparison.file.partition("/")[0]
    roots = [source / root for source in sources for root in comparison.roots]
    installed = importlib.util.find_spec(package) if comparison.is_package else None
    if installed is not None:
        roots += [Path(folder).parent for folder in installed.submodule_search_locations or ()]
    root = next((root for root in roots if (root / comparison.file).is_file()), None)
    if root is None:
        return f"{comparison.file} is in no --source; it is part of https://github.com/{comparison.repository}"
    try:
        if comparison.is_package:
            return imported_from_package(root, comparison.file)
        path = root / comparison.file
        spec = importlib.util.spec_from_file_location(f"official_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:  # whatever it needs that is not here
        return f"cannot be imported: {type(error).__name__}: {str(error).splitlines()[0]}"
    return module


def imported_from_package(root: Path, file: str) -> ModuleType:
    """The module `file` of the package that lies in `root`.

    The package's own `__init__` does not run: R-KV's asks for an old transformers, and no comparison needs it.
    """
    name = file.removesuffix(".py").replace("/", ".")
    package = name.partition(".")[0]
    if package not in sys.modules:
        spec = ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(root / package)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(name)


def compare(sources: Sequence[Path], layers: Callable[[], list[Layer]]) -> Iterator[str]:
    """Lines of the table, for the comparisons that can be made, and then of those that cannot.

    layers: called once, if there is anything to compare.
    """
    modules = {name: official(comparison, sources) for name, comparison in COMPARISONS.items()}
    given = {name: module for name, module in modules.items() if not isinstance(module, str)}
    if given:
        of_model = layers()
        yield "| compared | with | agreement (%) |"
        yield "|---|---|---|"
        for name, module in given.items():
            each = COMPARISONS[name]
            shares = [each.agreement(module, layer) for layer in of_model]
            shown = f"{100 * sum(shares) / len(shares):.2f}, worst layer {100 * min(shares):.2f}"
            yield f"| {name}: {each.what} | {each.repository} {each.file} | {shown} |"
    for name, module in modules.items():
        if isinstance(module, str):
            yield f"skipped {name}: {module}"


def run(arguments: argparse.Namespace) -> None:
    """Print the table for the default model."""
    for folder in arguments.source:
        if not folder.is_dir():
            raise UserError(f"--source {folder}: no such folder")

    def layers() -> list[Layer]:
        config = load([f"model={arguments.model}"])
        loaded = load_model(config.model)
        ids = token_ids(offline_text(), loaded.tokenizer)[: arguments.tokens]
        with attach(loaded.model) as attached:
            return layers_of(attached, ids, arguments.layers)

    for line in compare(arguments.source, layers):
        print(line)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=str(__doc__).splitlines()[0])
    parser.add_argument("--source", type=Path, action="append", default=[], help="a checkout; may be given repeatedly")
    parser.add_argument("--model", default="smollm2-135m", help="an entry of conf/model")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args(argv)
    return exit_code(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())

"""Each statistic of the analyses against a direct computation on a tiny model."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.errors import UserError
from harness.model.attach import attach
from harness.model.attention import dense_attention
from harness.model.load import LoadedModel, Resources
from harness.model.passes import Handler
from harness.model.prompts import calibrate
from harness.paper import analysis
from harness.paper.analysis import run_analysis, run_memory
from harness.run.compose import load
from harness.settings.config import RunConfig
from methods.attention import Softmax
from methods.infinigen import InfiniGen
from tests.living import tiny
from tests.runs import letters, start
from tests.tiny_models import MAX_LENGTH, tiny_model
from tests.tokens import ByteTokenizer

NUM_TOKENS = 60
Points = dict[tuple[str, int | None, str, float | None], dict]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks that do not divide the length."""
    monkeypatch.setattr(analysis, "ROWS", 7)


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    """A text, and beside it a copy: methods are calibrated there, so that windows begin at its first token."""
    text = letters(tmp_path, monkeypatch, 900)
    text.with_name("copy.txt").write_bytes(text.read_bytes())
    return text


def loaded(model) -> LoadedModel:
    return LoadedModel(model, ByteTokenizer(), "tiny", MAX_LENGTH)


def settings(text: Path, experiment: str, *overrides: str, num_tokens: int = NUM_TOKENS) -> RunConfig:
    calibration = [f"calibration.path={text.with_name('copy.txt')}", "calibration.num_tokens=80"]
    files = [f"corpus.path={text}", *calibration]
    return load([f"experiment={experiment}", *files, f"analysis.num_tokens={num_tokens}", *overrides])


def measured(model, config: RunConfig) -> Points:
    """The points by series, layer, metric and x."""
    points = run_analysis(config, loaded(model)).metrics["points"]
    found = {(each["series"], each["layer"], each["metric"], each["x"]): each for each in points}
    assert len(found) == len(points)
    return found


def ids_of(text: Path, num_tokens: int = NUM_TOKENS) -> Tensor:
    return torch.tensor([list(text.read_bytes())[:num_tokens]])


def attention_weights(model, ids: Tensor) -> list[np.ndarray]:
    """Of transformers' own eager attention: by layer, fp64 [heads, tokens, tokens]."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            output = model(ids, output_attentions=True)
    finally:
        model.set_attn_implementation(before)
    return [weights[0].double().numpy() for weights in output.attentions]


def num_needed(weights: np.ndarray) -> int:
    """Key tokens that hold 0.9 of one query's attention."""
    held = np.cumsum(sorted(weights, reverse=True))
    return int(np.flatnonzero(held >= 0.9)[0]) + 1


def check_mean(point: dict, values) -> None:
    values = np.asarray(values, dtype=float)
    assert point["value"] == pytest.approx(values.mean(), rel=1e-4)
    assert point["stderr"] == pytest.approx(values.std(ddof=1) / math.sqrt(len(values)), rel=1e-3, abs=1e-7)
    assert point["num_samples"] == len(values)


def test_key_tokens_are_the_direct_ones(tiny_gqa, text, monkeypatch):
    monkeypatch.setattr(analysis, "QUERIES", (17, 50, NUM_TOKENS))
    points = measured(tiny_gqa, settings(text, "fig5", "analysis.layers=[0,3]"))
    weights = attention_weights(tiny_gqa, ids_of(text))
    for layer in (0, 3):
        counts = [[num_needed(row[: t + 1]) for t, row in enumerate(head)] for head in weights[layer]]
        shares, single = (
            {key[3]: point for key, point in points.items() if key[1:3] == (layer, metric)}
            for metric in ("share_of_queries", "key_tokens_for_0.9")
        )
        assert max(map(max, counts)) == max(shares), "the last bin is the largest count"
        for x, point in shares.items():
            check_mean(point, [np.mean([count == x for count in head]) for head in counts])
        assert list(single) == [17, 50], "the third lies behind the text"
        for query, point in single.items():
            check_mean(point, [head[query] for head in counts])


def direct_similarities(weights: np.ndarray, num_kv_heads: int, heavy: int, recent: int) -> dict[str, np.ndarray]:
    """Cosines by series [heads, tokens], one token at a time; weights: [heads, tokens, tokens]."""
    heads, tokens, _ = weights.shape
    found = {name: np.ones((heads, tokens)) for name in ("H2O", "Oracle")}
    for members in np.arange(heads).reshape(num_kv_heads, -1):
        mass: dict[int, float] = defaultdict(float)
        for t in range(tokens):
            with np.errstate(divide="ignore"):
                scores = np.log(weights[members, t, :t])
            relative = (scores - scores.max(-1, keepdims=True)).max(0) if t else np.zeros(0)
            best = np.argsort(-relative, kind="stable")[: heavy + recent]
            for name, read in (("H2O", sorted(mass)), ("Oracle", list(best))):
                kept = np.zeros(tokens)
                kept[[*read, t]] = 1
                for head in members:
                    full = weights[head, t]
                    partial = full * kept / (full * kept).sum()
                    cosine = full @ partial / np.linalg.norm(full) / np.linalg.norm(partial)
                    found[name][head, t] = cosine
            visible = [*mass, t]
            for head in members:
                total = weights[head, t, visible].sum()
                for token in visible:
                    mass[token] += weights[head, t, token] / total
            if len(mass) > heavy + recent:
                del mass[min((token for token in mass if token <= t - recent), key=mass.__getitem__)]
    return found


def test_similarities_are_the_direct_ones(tiny_gqa, text):
    points = measured(tiny_gqa, settings(text, "fig4", "analysis.layers=[0,2]", "analysis.budget=0.2"))
    weights = attention_weights(tiny_gqa, ids_of(text))
    num_kv_heads = getattr(tiny_gqa.config, "num_key_value_heads", 4)
    for layer in (0, 2):
        direct = direct_similarities(weights[layer], num_kv_heads, heavy=6, recent=6)
        for name, cosines in direct.items():
            assert cosines.min() < 0.999, "something is left out"
            for t in range(1, NUM_TOKENS):
                check_mean(points[name, layer, "cosine_similarity", t], cosines[:, t])


def test_tokens_are_binned():
    bins = list(analysis.binned(torch.arange(1.0, 252)[None], 1, 100))
    assert len(bins) == 84 and bins[1] == (5, 5), "three tokens a bin, its middle one as x"


def direct_layer_inputs(model, ids: Tensor) -> dict[str, list[Tensor]]:
    """Cosines [tokens] for each layer from the second on, from the modules' own outputs."""
    kept: dict[str, list[Tensor]] = {"attn": [], "ffn": []}
    hooks = []
    for layer in model.get_decoder().layers:
        ffn = layer.mlp if hasattr(layer, "mlp") else layer.fc2
        attention = layer.attention if hasattr(layer, "attention") else layer.self_attn
        hooks.append(attention.register_forward_hook(lambda m, a, out: kept["attn"].append(out[0][0])))
        hooks.append(ffn.register_forward_hook(lambda m, a, out: kept["ffn"].append(out.reshape(ids.shape[1], -1))))
    with torch.inference_mode():
        inputs = [hidden[0] for hidden in model(ids, output_hidden_states=True).hidden_states]
    for hook in hooks:
        hook.remove()
    earlier = {"block_input_prev": inputs, "attn_out_prev": kept["attn"], "ffn_out_prev": kept["ffn"]}
    layers = range(1, len(kept["attn"]))
    return {
        name: [torch.cosine_similarity(inputs[layer], source[layer - 1], dim=-1) for layer in layers]
        for name, source in earlier.items()
    }


def num_hooks(model) -> int:
    return sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules())


@pytest.mark.parametrize("family", ["gqa", "opt", "gpt_neox"])
def test_layer_inputs_are_the_direct_ones(family, text):
    model = tiny(family)
    before = num_hooks(model)
    points = measured(model, settings(text, "table1"))
    assert num_hooks(model) == before
    for name, layers in direct_layer_inputs(model, ids_of(text)).items():
        means = [float(cosines.mean()) for cosines in layers]
        assert len(means) == 3
        check_mean(points[name, None, "cosine_similarity", None], means)
        for layer, mean in enumerate(means, start=1):
            assert points[name, layer, "cosine_similarity", layer]["value"] == pytest.approx(mean, abs=1e-5)
    one = measured(model, settings(text, "table1", "analysis.layers=[2]"))
    key = ("ffn_out_prev", 2, "cosine_similarity", 2)
    assert one[key] == points[key] and len(one) == 6


def test_sparse_queries_are_the_direct_ones(tiny_gqa, text, monkeypatch):
    monkeypatch.setattr("harness.paper.analysis.SMALL", 0.75)  # 1 % of so few keys is none
    points = measured(tiny_gqa, settings(text, "fig20", "analysis.layers=[0,3]", num_tokens=MAX_LENGTH))
    weights = attention_weights(tiny_gqa, ids_of(text, MAX_LENGTH))
    for layer in (0, 3):
        few = [[num_needed(row[: t + 1]) < 0.75 * (t + 1) for t, row in enumerate(head)] for head in weights[layer]]
        for length in (256, 512):
            shares = [np.mean(head[:length]) for head in few]
            assert 0 < np.mean(shares) < 1
            check_mean(points[f"layer {layer}", layer, "share_of_sparse_queries", length], shares)


def test_watched_keys_have_their_weights(tiny_gqa, text):
    points = measured(tiny_gqa, settings(text, "fig20", "analysis.layers=[1]", num_tokens=80))
    weights = attention_weights(tiny_gqa, ids_of(text, 80))[1][30 * 4 // 32]
    watched = {key: point for key, point in points.items() if key[2] == "attention_weight"}
    assert {x for *_, x in watched} == set(range(60, 80))
    spread = weights[60:, :60].std(0)
    names = {name for name, *_ in watched}
    assert names == {f"key {key}" for key in np.argsort(spread)[-4:]}, "all 60 are sampled, the 4 that vary most shown"
    for (name, _, _, x), point in watched.items():
        assert point["value"] == pytest.approx(weights[int(x), int(name.removeprefix("key "))], rel=1e-4, abs=1e-7)


class Capture(Handler):
    """Keeps queries and keys by layer."""

    def __init__(self, softmax: Softmax) -> None:
        self.softmax, self.rows = softmax, {}

    def attention(self, layer, query, key, value):
        self.rows[layer] = query[0].double(), key[0].double()
        return dense_attention(query, key, value, self.softmax)


def test_column_magnitudes_are_the_direct_ones(tiny_gqa, text):
    points = measured(tiny_gqa, settings(text, "fig7", "analysis.layers=[2]"))
    with attach(tiny_gqa) as attached:
        rotation = calibrate(attached, InfiniGen(), list(text.read_bytes())[:80])["rotation"][2].double()
        capture = Capture(attached.geometry.softmax(0))
        attached.forward(ids_of(text), torch.arange(NUM_TOKENS)[None], capture)
    query, key = capture.rows[2]
    group = len(query) // len(key)
    identity = torch.eye(key.shape[-1]).double()
    for series in ("before skewing", "after skewing"):
        heads = []
        for head in range(len(key)):
            basis = identity if series.startswith("before") else rotation[head]
            of_query = (query[head * group : (head + 1) * group] @ basis).abs().mean((0, 1))
            of_key = (key[head] @ basis).abs().mean(0)
            order = (of_query + of_key).argsort(descending=True)
            heads.append((of_query[order], of_key[order]))
        for rank in range(key.shape[-1]):
            for index, metric in enumerate(("query_magnitude", "key_magnitude")):
                check_mean(points[series, 2, metric, rank], [float(head[index][rank]) for head in heads])


TOKEN_ELEMENTS = {  # layers x key and value x KV heads x head_dim
    "llama3.1-8b": 32 * 2 * 8 * 128,
    "opt-30b": 48 * 2 * 7168,
}


@pytest.mark.parametrize("name", TOKEN_ELEMENTS)
def test_the_cache_grows_with_tokens_and_sequences_and_the_weights_do_not(name):
    points = run_memory(load(["experiment=fig2", f"model={name}"])).metrics["points"]
    found = {(each["series"], each["x_name"], each["x"]): each["value"] for each in points}
    assert found["KV cache", "seq_len", 8192] == 16 * 8192 * TOKEN_ELEMENTS[name] * 2
    assert found["KV cache", "batch_size", 16] == found["KV cache", "seq_len", 2048]
    assert found["KV cache", "batch_size", 64] == 64 * found["KV cache", "batch_size", 1]
    assert len({value for (series, *_), value in found.items() if series == "weights"}) == 1
    with pytest.raises(UserError, match="model=gemma3-270m: .* and not gemma3_text"):
        run_memory(load(["experiment=fig2", "model=gemma3-270m"]))


def test_the_sizes_need_no_weights(tmp_path):
    none = Resources(lambda config: pytest.fail("a model is loaded"))
    start(["experiment=fig2", "model=opt-30b", f"results_dir={tmp_path}"], none)


@pytest.mark.parametrize("word", ["method=infinigen", "corpus.spread=true", "analysis.layers=[]"])
def test_refuses_settings(word):
    with pytest.raises(UserError, match=f"^{re.escape(word)}: "):
        load(["experiment=fig4", word])


@pytest.mark.parametrize(
    ("experiment", "overrides", "message"),
    [
        ("fig5", ["analysis.layers=[0,4]"], r"analysis.layers=\[0,4\]: tiny has layers 0 to 3"),
        ("table1", ["analysis.layers=[0]"], "layer 0 has no layer before it"),
        ("fig5", ["analysis.num_tokens=513"], "analysis.num_tokens=513: tiny takes at most 512 tokens"),
        ("fig4", ["analysis.budget=0.01", "method=streaming"], "budget=0.01: .* must exceed method.num_"),
    ],
)
def test_refuses_what_the_model_or_the_text_lacks(experiment, overrides, message, tiny_gqa, text):
    with pytest.raises(UserError, match=message):
        run_analysis(settings(text, experiment, *overrides), loaded(tiny_gqa))
    post_norm = tiny_model("opt", word_embed_proj_dim=64, do_layer_norm_before=False)
    with pytest.raises(UserError, match="Table 1 needs blocks that norm their inputs alone, as those of opt, "):
        run_analysis(settings(text, "table1"), loaded(post_norm))
    text.write_text("a" * 50)
    with pytest.raises(UserError, match=r"analysis.num_tokens=60: the text has 50 tokens from token 0 on"):
        run_analysis(settings(text, "fig5"), loaded(tiny_gqa))

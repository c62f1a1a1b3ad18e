"""Texts under a method, scored in windows and decoded freely, against direct computations on a tiny model."""

from __future__ import annotations

import math
import shutil
import statistics
from dataclasses import replace
from functools import cache

import pytest
import torch

from harness.model.attach import attach
from harness.model.load import LoadedModel
from harness.replay.session import ReplaySession
from harness.run.compose import load
from harness.scoring import perplexity
from harness.scoring.perplexity import (
    CHUNK,
    Pair,
    RowScores,
    Text,
    curve,
    repetition,
    run_perplexity,
    summarize_texts,
)
from harness.settings.config import CalibrationConfig, CorpusConfig, RunConfig, SamplingConfig
from harness.settings.kinds import Outcome
from methods.base import Method
from methods.full import Full
from methods.h2o import H2O
from methods.streaming import Streaming
from tests.cases import Case
from tests.living import tiny
from tests.replaying import run_one
from tests.runs import letters
from tests.tokens import byte_tokenizer

PROMPT, STEPS, MAX_LENGTH = 20, 24, 512
METRICS = {
    "perplexity", "perplexity_full", "kl_nats", "top1_agreement", "attention_recall", "budget", "budget_artifact",
    "device_frac", "resident_frac", "attention_error", "attention_error_p95",
}  # fmt: skip
OF_EVICTING = METRICS | {"tokens_evicted"}
FULL = Full(dense_layers=2)
SINKS = Streaming(budget=0.2, num_sinks=2, dense_layers=2)
SHORT = {"perplexity": {"seq_len": 60}, "long_decode": {"max_new_tokens": STEPS}}
"""Lengths of the runs, by their kind."""

two_methods = pytest.mark.parametrize("method", [SINKS, H2O(dense_layers=2)], ids=["streaming", "h2o"])


@pytest.fixture
def text(tmp_path, monkeypatch) -> str:
    return str(letters(tmp_path, monkeypatch, 1500, others=""))


@pytest.fixture
def loaded() -> LoadedModel:
    return LoadedModel(tiny("gqa"), byte_tokenizer(), "tiny", MAX_LENGTH)


defaults = cache(lambda kind: load([f"experiment={kind}"]))


def settings(kind: str, text: str, method: Method, **changes) -> RunConfig:
    """Settings of a run of three windows or prompts of the text."""
    about = {"method": method, "method_name": type(method).__name__.lower(), "num_windows": 3, "prefill_len": PROMPT}
    copy = shutil.copyfile(text, f"{text}.calibration")  # another text, so that windows begin at its first token
    files = {"corpus": CorpusConfig("offline", path=text), "calibration": CalibrationConfig(path=copy, num_tokens=64)}
    return replace(defaults(kind), **(about | files | SHORT[kind] | changes))


def run(kind: str, loaded: LoadedModel, text: str, method: Method, references=None, **changes) -> Outcome:
    config = settings(kind, text, method, **changes)
    return run_perplexity(config, loaded, references)


def metrics_of(outcome: Outcome) -> dict:
    (metrics,) = outcome.metrics.values()
    return metrics


def measure(*about, **changes) -> dict:
    """The metrics of `run`."""
    return metrics_of(run(*about, **changes))


def absent_of(metrics: dict) -> set[str]:
    return {name for name, value in metrics.items() if value is None}


def stderr_of(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def pieces(text: str, length: int, num: int = 3, start: int = 0) -> list[list[int]]:
    """Tokens of the windows or prompts of a run."""
    with open(text) as file:
        ids = byte_tokenizer()(file.read(), add_special_tokens=False)["input_ids"]
    return [ids[first : first + length] for first in range(start, start + num * length, length)]


def log_probs_of_model(model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def log_probs_of_method(model, method: Method, ids: list[int], prompt: int) -> torch.Tensor:
    """Of the rows after the prompt, by a replay of this text alone."""
    return run_one(model, Case(method), ids, prompt).logits[0].double().log_softmax(-1)


def nll_of(log_probs: torch.Tensor, ids: list[int], first: int) -> list[float]:
    """Of the tokens after rows first, first + 1, ...; the last row predicts nothing."""
    return [-float(log_probs[t, ids[t + 1]]) for t in range(first, len(ids) - 1)]


# Windows


@pytest.mark.parametrize("prefill_len", [0, 20, 57])
@two_methods
def test_metrics_of_windows_are_the_direct_ones(loaded, text, method, prefill_len):
    metrics = measure("perplexity", loaded, text, method, prefill_len=prefill_len)
    scored = {"perplexity": [], "perplexity_full": [], "kl_nats": [], "top1_agreement": []}
    for window in pieces(text, 60):
        prompt, full = max(1, prefill_len), log_probs_of_model(loaded.model, window)
        ours = torch.cat([full[:prompt], log_probs_of_method(loaded.model, method, window, prompt)])
        scored["perplexity"].append(nll_of(ours, window, prefill_len))
        scored["perplexity_full"].append(nll_of(full, window, prefill_len))
        rows = list(zip(full[prefill_len:-1], ours[prefill_len:-1], strict=True))
        scored["kl_nats"].append([float((p.exp() * (p - q)).sum()) for p, q in rows])
        scored["top1_agreement"].append([float(p.argmax() == q.argmax()) for p, q in rows])
    for name, by_window in scored.items():
        unit = math.exp if name.startswith("perplexity") else float
        assert metrics[name] == pytest.approx(unit(statistics.mean(sum(by_window, []))), rel=1e-4, abs=1e-5), name
        means = [unit(statistics.mean(rows)) for rows in by_window]
        assert metrics[f"{name}_stderr"] == pytest.approx(stderr_of(means), rel=1e-3, abs=1e-5), name
    assert metrics["num_samples"] == 3
    assert set(metrics) == OF_EVICTING | {f"{name}_stderr" for name in OF_EVICTING} | {"num_samples"}
    assert metrics["kl_nats"] > 0 and metrics["top1_agreement"] < 1, "the method changed nothing"


def test_samples_are_of_each_window_and_say_its_place(loaded, text):
    """Spread over a text of 1,500 tokens."""
    corpus, places = CorpusConfig("offline", path=text, spread=True), [0, 1 / 3, 2 / 3]
    outcome = run("perplexity", loaded, text, SINKS, corpus=corpus)
    samples = outcome.samples["windows"]
    assert [sample["place"] for sample in samples] == places
    for sample, first in zip(samples, (0, 500, 1000), strict=True):
        (window,) = pieces(text, 60, num=1, start=first)
        full = nll_of(log_probs_of_model(loaded.model, window), window, PROMPT)
        assert sample["nll_full"] == pytest.approx(statistics.mean(full), rel=1e-4)
    assert statistics.mean(sample["kl_nats"] for sample in samples) == pytest.approx(metrics_of(outcome)["kl_nats"])
    prompts = run("long_decode", loaded, text, SINKS, corpus=corpus).samples["prompts"]
    assert [prompt["place"] for prompt in prompts] == places


@pytest.mark.parametrize(
    "prefill_len, seq_len, expected",
    [
        (0, 300, [(0, 0, 256), (1, 256, 43)]),
        (255, 258, [(0, 255, 1), (1, 256, 1)]),
        (256, 258, [(1, 256, 1)]),
        (10, 257, [(0, 10, 246)]),  # row 256 is the last one
    ],
)
def test_chunks_hold_the_rows_of_their_range(loaded, text, prefill_len, seq_len, expected):
    """(chunk, first row, rows of a window)"""
    assert CHUNK == 256
    lengths = {"prefill_len": prefill_len, "seq_len": seq_len, "num_windows": 2}
    chunks = run("perplexity", loaded, text, FULL, **lengths).chunks
    counted = [(row["first"], row["stop"], row["num_tokens"] / 2) for row in chunks]
    assert counted == [(256 * chunk, 256 * (chunk + 1), rows) for chunk, _, rows in expected]
    nll = [nll_of(log_probs_of_model(loaded.model, window), window, 0) for window in pieces(text, seq_len, 2)]
    for row, (_, first, count) in zip(chunks, expected, strict=True):
        parts = [rows[first : first + count] for rows in nll]
        assert row["metrics"]["perplexity"] == pytest.approx(math.exp(statistics.mean(sum(parts, []))), rel=1e-4)
        means = [statistics.mean(part) for part in parts]
        assert row["metrics"]["perplexity_stderr"] == pytest.approx(stderr_of([*map(math.exp, means)]), rel=1e-3)
        for name in ("nll", "nll_full"):  # the method is the full cache
            assert [window[name] for window in row["windows"]] == pytest.approx(means, rel=1e-4)


# Texts that are decoded


def test_texts_are_drawn_by_the_same_random_numbers(loaded, text):
    """So the full cache's text is its own, and a method's parts from it where their predictions do."""
    sampling = SamplingConfig(temperature=1.0)
    for method, never in ((FULL, 3), (SINKS, 0)):
        outcome = run("long_decode", loaded, text, method, sampling=sampling)
        assert metrics_of(outcome)["never_diverged"] == never
        full = [sample["tokens_full"] for sample in outcome.samples["prompts"]]
        greedy = run("long_decode", loaded, text, method).samples["prompts"]
        assert full != [sample["tokens_full"] for sample in greedy] and len({*map(tuple, full)}) == 3


@two_methods
def test_metrics_of_texts_are_those_of_two_plain_forwards(loaded, text, method, monkeypatch):
    outcome = run("long_decode", loaded, text, method)
    metrics, samples = metrics_of(outcome), outcome.samples["prompts"]
    kl, nll = [], []
    for prompt, sample in zip(pieces(text, PROMPT), samples, strict=True):
        written = [*prompt, *sample["tokens"]]
        ours = log_probs_of_method(loaded.model, method, written, PROMPT)[:-1]
        full = log_probs_of_model(loaded.model, written)
        assert ours.argmax(-1).tolist() == written[PROMPT + 1 :], "what the method finds most likely"
        kl.append(float((full[PROMPT:-1].exp() * (full[PROMPT:-1] - ours)).sum(-1).mean()))
        nll.append(nll_of(full, written, PROMPT))
        assert sample["nll"] == pytest.approx(statistics.mean(nll[-1]), rel=1e-4)
        assert sample["text"] == byte_tokenizer().decode(sample["tokens"])
    assert metrics["kl_nats"] == pytest.approx(statistics.mean(kl), abs=1e-5) and metrics["kl_nats"] > 0
    assert metrics["kl_nats_stderr"] == pytest.approx(stderr_of(kl), abs=1e-5)
    assert metrics["text_perplexity"] == pytest.approx(math.exp(statistics.mean(sum(nll, []))), rel=1e-4)
    differences = [sample["nll"] - sample["nll_full"] for sample in samples]
    assert metrics["text_nll_difference"] == pytest.approx(statistics.mean(differences))
    assert metrics["text_nll_difference_stderr"] == pytest.approx(stderr_of(differences))
    monkeypatch.setattr(perplexity, "BATCH", 2)
    apart = run("long_decode", loaded, text, method)
    assert metrics_of(apart) == pytest.approx(metrics, abs=1e-5), "prompts come in batches"
    assert [prompt["tokens"] for prompt in apart.samples["prompts"]] == [prompt["tokens"] for prompt in samples]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3], None),
        ([1, 2, 3, 4], 0),
        ([1, 2, 3, 4, 1, 2, 3, 4], 1 / 5),
    ],
)
def test_repetition_is_the_share_of_4_grams_seen_before(tokens, expected):
    assert repetition(tokens) == (None if expected is None else pytest.approx(expected))


def pair_of(tokens: list[int], others: list[int]) -> Pair:
    rows = torch.arange(1, len(tokens), dtype=torch.float64)
    return Pair(Text(tokens, rows / 10), Text(others, rows / 20), RowScores(rows, rows, rows % 2))


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (2, [(1, 2, 1)]),
        (5, [(1, 2, 1), (2, 3, 1), (3, 4, 1), (4, 5, 1)]),
        (17, [(0, 2, 1), *((first, first + 2, 2) for first in range(2, 16, 2)), (16, 17, 1)]),
    ],
)
def test_a_curve_has_at_most_sixteen_ranges_of_the_tokens_after_the_first(num_tokens, expected):
    """(first, stop, scored tokens of a text)"""
    tokens = list(range(num_tokens))
    chunks = list(curve([pair_of(tokens, tokens)] * 3, num_tokens))
    assert [(chunk["first"], chunk["stop"], chunk["num_tokens"] / 3) for chunk in chunks] == expected
    for chunk in chunks:  # the kl of `pair_of` is the token's number
        scored = range(max(chunk["first"], 1), chunk["stop"])
        assert chunk["metrics"]["kl_nats"] == pytest.approx(statistics.mean(scored))
        assert chunk["metrics"]["text_perplexity"] == pytest.approx(math.exp(statistics.mean(scored) / 10))


def test_where_two_texts_part():
    entries = summarize_texts([pair_of([1, 2, 3, 4], [1, 2, 3, 4]), pair_of([1, 2, 3, 4], [1, 2, 9, 4])])
    assert (entries["first_divergence"], entries["never_diverged"], entries["num_samples"]) == (3, 1, 2)


def test_the_errors_of_attention_outputs_by_layer_and_window(loaded, text):
    """From those of each window's own session; the percentile is of all rows and heads together."""
    outcome = run("perplexity", loaded, text, SINKS)
    errors = []
    with attach(loaded.model) as attached, torch.inference_mode():
        for ids in pieces(text, 60):
            tokens, final = torch.tensor([ids]), torch.tensor([60])
            session = ReplaySession(attached, SINKS, final_lengths=final, num_columns=60, measure_errors=True)
            session.prefill(tokens[:, :PROMPT], torch.ones(1, PROMPT, dtype=torch.bool))
            session.decode(tokens[:, PROMPT:-1], torch.ones(1, 59 - PROMPT, dtype=torch.bool))
            errors.append(session.attention_errors.double())
    metrics, layers = metrics_of(outcome), outcome.samples["layers"]
    together = torch.stack(errors)[:, 2:]
    assert metrics["attention_error"] == pytest.approx(float(together.mean())) and metrics["attention_error"] > 0.1
    p95 = statistics.quantiles(together.flatten().tolist(), n=20, method="inclusive")[-1]
    assert metrics["attention_error_p95"] == pytest.approx(p95)
    means = [float(of_window[2:].mean()) for of_window in errors]
    assert metrics["attention_error_stderr"] == pytest.approx(stderr_of(means))
    assert [sample["attention_error"] for sample in outcome.samples["windows"]] == pytest.approx(means)
    assert [layer["layer"] for layer in layers] == [0, 1, 2, 3]
    for layer in layers:
        of_layer = torch.stack(errors)[:, layer["layer"]]
        assert layer["attention_error"] == pytest.approx(float(of_layer.mean()))
        assert (layer["attention_error"] == 0) == (layer["layer"] < 2), "dense layers read everything"
        assert layer["attention_error_p95"] >= layer["attention_error"] and "attention_error_stderr" in layer


# Both


@pytest.mark.parametrize("kind", SHORT)
def test_the_full_cache_is_at_no_distance_from_itself(kind, loaded, text):
    metrics = measure(kind, loaded, text, FULL)
    assert metrics["kl_nats"] == pytest.approx(0, abs=1e-6)
    shares = ("top1_agreement", "budget", "budget_artifact", "device_frac", "resident_frac")
    assert [metrics[name] for name in shares] == [1, 1, 1, 1, 0]
    if kind == "perplexity":
        assert metrics["perplexity"] == pytest.approx(metrics["perplexity_full"], rel=1e-6)
        assert metrics["attention_recall"] == 1
        assert metrics["attention_error"] == metrics["attention_error_p95"] == 0
    else:
        assert all(metrics[name] == metrics[f"{name}_full"] for name in ("text_perplexity", "repetition"))
        assert (metrics["text_nll_difference"], metrics["repetition_difference"]) == (0, 0)
        assert (metrics["first_divergence"], metrics["never_diverged"]) == (STEPS, 3)


READ = statistics.mean(12 / cached for cached in range(20, 59))
"""Share of a window of 60 that SINKS reads: 59 rows are run, T is 60, floor(0.2 * 60) = 12 tokens in 2 of 4 layers."""
WRITTEN = statistics.mean(8 / cached for cached in range(PROMPT, PROMPT + STEPS - 1))
"""The same of a text: T is 44, and the last token is not fed."""
BITS = {"int2": 2 + 32 / 16, "int4": 4 + 32 / 16}


@pytest.mark.parametrize(
    ("kind", "method", "changes", "expected"),
    [
        ("perplexity", SINKS, {}, (2 + 2 * READ) / 4),
        ("perplexity", SINKS, {"codec": "int4"}, (2 + 2 * READ * BITS["int4"] / 16) / 4),
        ("perplexity", FULL, {"codec": "fp32", "value_codec": "int2"}, (2 + 2 * (16 + BITS["int2"]) / 2 / 16) / 4),
        ("perplexity", H2O(dense_layers=1), {"codec": "int4", "budget": 0.30}, 0.30),
        ("long_decode", SINKS, {}, (2 + 2 * WRITTEN) / 4),
        ("long_decode", H2O(dense_layers=2), {"budget": 0.7}, 0.7),
    ],
)
def test_budgets_are_those_of_the_decode_rows_and_their_bits(kind, method, changes, expected, loaded, text):
    metrics = measure(kind, loaded, text, method, **changes)
    assert metrics["budget"] == pytest.approx(expected, abs=0.01 if "budget" in changes else 1e-6)
    if kind == "perplexity":
        assert metrics["budget_stderr"] == pytest.approx(0, abs=1e-12)
        if not changes:
            density = (20 * 21 / 2 + 39 * 13) / (59 * 60 / 2)
            assert metrics["budget_artifact"] == pytest.approx(1 - math.sqrt(1 - density))


def test_what_cannot_be_measured_is_none(loaded, text):
    one_window = measure("perplexity", loaded, text, H2O(dense_layers=2), num_windows=1)
    assert absent_of(one_window) == {f"{name}_stderr" for name in OF_EVICTING}
    quantized = measure("perplexity", loaded, text, FULL, codec="int2")
    assert absent_of(quantized) == {"attention_recall", "attention_recall_stderr"}
    assert quantized["budget"] == pytest.approx((2 + 2 * BITS["int2"] / 16) / 4)
    assert quantized["budget_artifact"] == pytest.approx(2 / 16) and quantized["kl_nats"] > 0
    one_text = measure("long_decode", loaded, text, H2O(dense_layers=2), num_windows=1, max_new_tokens=3)
    errors = {name for name in one_text if name.endswith("_stderr")}
    repeated = {"repetition", "repetition_full", "repetition_difference"}  # three tokens have no 4-gram
    assert absent_of(one_text) == errors | repeated and "kl_nats_stderr" in errors


REFUSED = {
    r"seq_len=513: tiny takes at most 512": ("perplexity", FULL, {"seq_len": 513, "num_windows": 1}),
    r"method\.budget=0\.05: .*keeps 3 of 60.*num_sinks=4": ("perplexity", Streaming(budget=0.05, dense_layers=2), {}),
    "^prefill_len=20 and max_new_tokens=493: tiny takes at most 512": ("long_decode", FULL, {"max_new_tokens": 493}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message, loaded, text):
    kind, method, changes = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        run(kind, loaded, text, method, **changes)

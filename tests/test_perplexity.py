"""Perplexity and fidelity of windows, against direct computations on a tiny model."""

from __future__ import annotations

import math
import statistics

import pytest
import reference as plain
import torch

from harness.accuracy import perplexity
from harness.accuracy.evaluation import _lm_eval
from harness.accuracy.perplexity import CHUNK, as_perplexity, run_perplexity
from harness.errors import UserError
from harness.model.load import LoadedModel
from harness.model.tiny import tiny_model
from harness.resources import Memo
from harness.settings.config import CorpusConfig, RunConfig
from harness.settings.experiment import find
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.streaming import Streaming
from tests.windows import ByteTokenizer, absent_of, calls_of, letters, metrics_of, on_text, stderr_of

MAX_LENGTH = 512
METRICS = {
    "perplexity", "perplexity_full", "kl_nats", "top1_agreement", "attention_recall", "size", "size_artifact",
    "device_frac", "resident_frac",
}  # fmt: skip


@pytest.fixture
def text(tmp_path, monkeypatch) -> str:
    return str(letters(tmp_path, monkeypatch, 1500))


@pytest.fixture
def loaded(tiny_gqa) -> LoadedModel:
    return LoadedModel(tiny_gqa, ByteTokenizer(), "tiny", MAX_LENGTH, "f" * 64)


def settings(text: str, method=None, **changes) -> RunConfig:
    return on_text("perplexity", text, method or Full(), **({"seq_len": 60, "prefill_len": 20} | changes))


def windows(text: str, config: RunConfig) -> list[list[int]]:
    with open(text, "rb") as file:
        ids = list(file.read())
    start = config.corpus.offset_tokens or 0
    stop = start + config.num_windows * config.seq_len
    return [ids[first : first + config.seq_len] for first in range(start, stop, config.seq_len)]


def log_probs_of_model(model, window) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([window])).logits[0].double().log_softmax(-1)


def log_probs_of_method(model, config: RunConfig, window) -> torch.Tensor:
    """Of all rows, by the reference; those of the prompt are the model's own."""
    prompt = max(1, config.prefill_len)
    with torch.inference_mode():
        reference = plain.Reference(model, config.method, final_length=len(window), prefill_len=prompt)
        decoded = reference.run(window).logits.double().log_softmax(-1)
    return torch.cat([log_probs_of_model(model, window)[:prompt], decoded])


def nll_of(log_probs: torch.Tensor, window, first: int) -> list[float]:
    """Of the tokens after rows first, first + 1, ...; the last row predicts nothing."""
    return [-float(log_probs[t, window[t + 1]]) for t in range(first, len(window) - 1)]


@pytest.mark.parametrize("prefill_len", [0, 20, 57])
@pytest.mark.parametrize("method", [Streaming(kept_frac=0.2, num_sinks=2), H2O()], ids=["streaming", "h2o"])
def test_metrics_are_the_direct_ones(loaded, text, method, prefill_len):
    corpus = CorpusConfig("offline", path=text, offset_tokens=700)
    config = settings(text, method, prefill_len=prefill_len, corpus=corpus)
    metrics = metrics_of(run_perplexity(config, loaded))
    scored = {"perplexity": [], "perplexity_full": [], "kl_nats": [], "top1_agreement": []}
    for window in windows(text, config):
        ours = log_probs_of_method(loaded.model, config, window)
        full = log_probs_of_model(loaded.model, window)
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
    assert set(metrics) == METRICS | {f"{name}_stderr" for name in METRICS} | {"num_samples"}
    assert metrics["kl_nats"] > 0 and metrics["top1_agreement"] < 1, "the method changed nothing"


@pytest.mark.parametrize("prefill_len", [0, 20])
def test_the_full_cache_is_at_no_distance_from_itself(loaded, text, prefill_len):
    metrics = metrics_of(run_perplexity(settings(text, prefill_len=prefill_len), loaded))
    assert metrics["kl_nats"] == pytest.approx(0, abs=1e-6)
    assert metrics["perplexity"] == pytest.approx(metrics["perplexity_full"], rel=1e-6)
    shares = ("top1_agreement", "attention_recall", "size", "size_artifact", "device_frac", "resident_frac")
    assert [metrics[name] for name in shares] == [1, 1, 1, 1, 1, 0]


def test_what_cannot_be_measured_is_none(loaded, text):
    one_window = metrics_of(run_perplexity(settings(text, H2O(), num_windows=1), loaded))
    assert absent_of(one_window) == {f"{name}_stderr" for name in METRICS}
    quantized = metrics_of(run_perplexity(settings(text, codec="int2"), loaded))
    assert absent_of(quantized) == {"attention_recall", "attention_recall_stderr"}
    assert quantized["size"] == pytest.approx((2 + 2 * (2 + 32 / 16) / 16) / 4)
    assert quantized["size_artifact"] == pytest.approx(2 / 16)
    assert quantized["kl_nats"] > 0


@pytest.mark.parametrize(
    "prefill_len, seq_len, expected",
    [
        (0, 300, [(0, 0, 256), (1, 256, 43)]),
        (100, 300, [(0, 100, 156), (1, 256, 43)]),
        (256, 300, [(1, 256, 43)]),
        (255, 258, [(0, 255, 1), (1, 256, 1)]),
        (10, 257, [(0, 10, 246)]),  # row 256 is the last one
    ],
)
def test_chunks_hold_the_rows_of_their_range(loaded, text, prefill_len, seq_len, expected):
    """(chunk, first row, rows of a window)"""
    assert CHUNK == 256
    config = settings(text, prefill_len=prefill_len, seq_len=seq_len, num_windows=2)
    outcome = run_perplexity(config, loaded)
    counted = [(row["first"], row["stop"], row["num_tokens"] / 2) for row in outcome.chunks]
    assert counted == [(256 * chunk, 256 * (chunk + 1), rows) for chunk, _, rows in expected]
    nll = [nll_of(log_probs_of_model(loaded.model, window), window, 0) for window in windows(text, config)]
    for row, (_, first, count) in zip(outcome.chunks, expected, strict=True):
        parts = [rows[first : first + count] for rows in nll]
        assert row["metrics"]["perplexity"] == pytest.approx(math.exp(statistics.mean(sum(parts, []))), rel=1e-4)
        means = [statistics.mean(part) for part in parts]
        assert row["metrics"]["perplexity_stderr"] == pytest.approx(stderr_of([*map(math.exp, means)]), rel=1e-3)
        for name in ("nll", "nll_full"):  # the method is the full cache
            assert [window[name] for window in row["windows"]] == pytest.approx(means, rel=1e-4)


def test_a_dense_pass_is_shared_by_all_methods_of_a_window(loaded, text, monkeypatch):
    passes = calls_of(monkeypatch, perplexity, "full_pass")
    references = Memo()
    first = metrics_of(run_perplexity(settings(text, H2O()), loaded, references))
    second = metrics_of(run_perplexity(settings(text, Streaming(kept_frac=0.2)), loaded, references))
    assert len(passes) == 3 and first["perplexity_full"] == second["perplexity_full"]
    metrics_of(run_perplexity(settings(text, H2O(), prefill_len=30), loaded, references))
    assert len(passes) == 6, "other rows are scored"


def test_infinigen_is_calibrated_once_and_a_target_size_is_met(loaded, text, tmp_path):
    method = InfiniGen(alpha=math.inf)
    outcome = metrics_of(run_perplexity(settings(text, method, size=0.7), loaded))
    assert outcome["size"] == pytest.approx(0.7, abs=0.01)
    (file,) = (tmp_path / "cache" / "calibration").iterdir()
    stamp = file.stat().st_mtime_ns
    index = 2 / 4 * 5 / (2 * 16)  # ceil(0.3 * 16) columns in two of four layers
    assert outcome["device_frac"] - outcome["size"] == pytest.approx(index)
    again = metrics_of(run_perplexity(settings(text, method, size=0.7), loaded))
    assert again == outcome and file.stat().st_mtime_ns == stamp


SINKS = Streaming(kept_frac=0.2, num_sinks=2)
READ = [12 / cached for cached in range(20, 59)]
"""Share of a window of 60 that SINKS reads: 59 rows are run, T is 60, floor(0.2 * 60) = 12 tokens in 2 of 4 layers."""
BITS = {"int2": 2 + 32 / 16, "int4": 4 + 32 / 16}


@pytest.mark.parametrize(
    ("method", "codecs", "expected"),
    [
        (SINKS, {}, statistics.mean((2 + 2 * read) / 4 for read in READ)),
        (SINKS, {"codec": "int4"}, statistics.mean((2 + 2 * read * BITS["int4"] / 16) / 4 for read in READ)),
        (Full(), {"codec": "fp32", "value_codec": "int2"}, (2 + 2 * (16 + BITS["int2"]) / 2 / 16) / 4),
        (H2O(num_exempt_layers=1), {"codec": "int4", "size": 0.30}, 0.30),
    ],
)
def test_sizes_are_those_of_the_decode_rows_and_their_bits(loaded, text, method, codecs, expected):
    metrics = metrics_of(run_perplexity(settings(text, method, **codecs), loaded))
    assert metrics["size"] == pytest.approx(expected, abs=0.01 if "size" in codecs else 1e-6)
    assert metrics["size_stderr"] == pytest.approx(0, abs=1e-12)
    if not codecs:
        density = (20 * 21 / 2 + 39 * 13) / (59 * 60 / 2)
        assert metrics["size_artifact"] == pytest.approx(1 - math.sqrt(1 - density))


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (Full(), {"seq_len": 513, "num_windows": 1}, r"seq_len=513: tiny takes at most 512"),
        (Full(), {"seq_len": 501}, r"seq_len=501.*1503 tokens.*1500"),
        (Streaming(kept_frac=0.05), {}, r"method\.kept_frac=0\.05: .*keeps 3 of 60.*num_sinks=4"),
        (H2O(num_exempt_layers=4), {}, r"num_exempt_layers=4"),
        (H2O(), {"size": 0.1}, r"size=0\.1.*2 of 4 layers"),
    ],
)
def test_refused(loaded, text, method, changes, message):
    with pytest.raises(ValueError, match=message):
        run_perplexity(settings(text, method, **changes), loaded)


def test_the_longest_windows_fit(loaded, text):
    run_perplexity(settings(text, seq_len=512, num_windows=1), loaded)
    run_perplexity(settings(text, seq_len=500), loaded)
    for seq_len, prefill_len in ((60, 59), (2, 0), (2, 1)):  # no decode row
        with pytest.raises(UserError, match=f"prefill_len={prefill_len}|seq_len={seq_len}"):
            find("perplexity").check(settings(text, H2O(), seq_len=seq_len, prefill_len=prefill_len))


def test_a_perplexity_that_overflows_names_its_window(text):
    model = tiny_model("llama", num_key_value_heads=2)
    model.lm_head.weight.data.mul_(1e4)
    loaded = LoadedModel(model, ByteTokenizer(), "tiny", MAX_LENGTH, "f" * 64)
    message = r"^window 1: perplexity overflows, .* is [\d.e+]+ nats a token \(at most 300\)"
    with pytest.raises(UserError, match=message):
        run_perplexity(settings(text), loaded)
    assert as_perplexity(300.0, "") == math.exp(300)
    for nll in (300.5, math.nan, math.inf):
        with pytest.raises(UserError, match="window 2, rows 0 to 255: perplexity overflows"):
            as_perplexity(nll, "window 2, rows 0 to 255")
    overflows = "^task wikitext: a metric overflows .math range error."
    with pytest.raises(UserError, match=overflows), _lm_eval("task wikitext"):
        math.exp(1e3)  # as lm-eval does with the mean of a text

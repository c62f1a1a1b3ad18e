"""Texts decoded freely, against live decoding and direct computations on a tiny model."""

from __future__ import annotations

import math
import statistics
from contextlib import closing

import pytest
import reference as plain
import torch
from cases import CASES
from living import open_live, setup_of, tiny
from tokens import byte_tokenizer

from harness.accuracy import long_decode
from harness.accuracy.long_decode import Pair, Text, curve, decode_freely, repetition, run_long_decode, summarize
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.load import LoadedModel
from harness.offload.live import generate
from harness.resources import Memo
from harness.settings.config import RunConfig
from harness.settings.experiment import find
from methods.full import Full
from methods.h2o import H2O
from methods.streaming import Streaming
from tests.composed import load
from tests.windows import absent_of, calls_of, letters, metrics_of, on_text, stderr_of

PROMPT, STEPS, MAX_LENGTH = 20, 24, 128


@pytest.fixture
def text(tmp_path, monkeypatch) -> str:
    return str(letters(tmp_path, monkeypatch, 300, "abcdefghijklmnopqrstuvwxyz"))


@pytest.fixture
def loaded() -> LoadedModel:
    return LoadedModel(tiny("gqa"), byte_tokenizer(), "tiny", MAX_LENGTH, "f" * 64)


def settings(text: str, method=None, **changes) -> RunConfig:
    lengths = {"prefill_len": PROMPT, "max_new_tokens": STEPS}
    return on_text("long_decode", text, method or Full(), **(lengths | changes))


def prompts_of(text: str, num: int = 3) -> list[list[int]]:
    with open(text) as file:
        ids = byte_tokenizer()(file.read(), add_special_tokens=False)["input_ids"]
    return [ids[first : first + PROMPT] for first in range(0, num * PROMPT, PROMPT)]


@pytest.mark.parametrize("name", ["full", "h2o", "infinigen", "quest", "kivi", "shadowkv"])
def test_the_text_is_that_of_live_decoding(name):
    with attach(tiny("gqa")) as attached:
        prompts = torch.randint(3, 256, (2, PROMPT), generator=torch.Generator().manual_seed(0))
        ours = decode_freely(attached, setup_of(attached, CASES[name]), prompts.tolist(), STEPS)
        with closing(open_live(attached, CASES[name], STEPS)) as session:
            logits = session.prefill(prompts, torch.ones_like(prompts, dtype=torch.bool))
            live = torch.stack([each.argmax(-1) for each in generate(session, logits)], 1)
            size = session.reads.size
    assert ours.tokens.tolist() == live.tolist()
    assert ours.hidden.shape[:2] == (2, STEPS - 1)
    assert ours.reads.rows == 2 * (STEPS - 1) and ours.reads.size == pytest.approx(size)


def test_prompts_come_in_batches(loaded, text, monkeypatch):
    config = settings(text, H2O())
    together = run_long_decode(config, loaded)
    monkeypatch.setattr(long_decode, "BATCH", 2)
    apart = run_long_decode(config, loaded)
    assert metrics_of(apart) == pytest.approx(metrics_of(together), abs=1e-5)
    tokens = [[prompt["tokens"] for prompt in outcome.samples["prompts"]] for outcome in (together, apart)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 3


def test_the_full_cache_is_at_no_distance_from_itself(loaded, text):
    outcome = run_long_decode(settings(text), loaded)
    metrics = metrics_of(outcome)
    assert metrics["kl_nats"] == pytest.approx(0, abs=1e-6) and metrics["top1_agreement"] == 1
    assert (metrics["first_divergence"], metrics["never_diverged"]) == (STEPS, 3)
    assert metrics["text_perplexity"] == metrics["text_perplexity_full"]
    assert metrics["repetition"] == metrics["repetition_full"]
    assert not any(metrics[name] for name in ("text_nll_difference", "repetition_difference", "resident_frac"))
    assert metrics["size"] == 1 and metrics["seq_len"] == PROMPT + STEPS
    assert all(chunk["metrics"]["kl_nats"] == pytest.approx(0, abs=1e-6) for chunk in outcome.chunks)


@pytest.mark.parametrize("method", [Streaming(kept_frac=0.2, num_sinks=2), H2O()], ids=["streaming", "h2o"])
def test_metrics_are_those_of_two_plain_forwards(loaded, text, method):
    outcome = run_long_decode(settings(text, method), loaded)
    metrics, samples = metrics_of(outcome), outcome.samples["prompts"]
    kl, nll = [], []
    for prompt, sample in zip(prompts_of(text), samples, strict=True):
        written = torch.tensor([*prompt, *sample["tokens"]])
        with torch.inference_mode():
            whole = plain.Reference(loaded.model, method, final_length=len(written), prefill_len=PROMPT)
            ours = whole.run(written.tolist()).logits[:-1].double().log_softmax(-1)
            full = loaded.model(written[None]).logits[0, PROMPT:-1].double().log_softmax(-1)
        following = written[PROMPT + 1 :]
        assert ours.argmax(-1).tolist() == following.tolist(), "what is decoded is what the method finds most likely"
        kl.append((full.exp() * (full - ours)).sum(-1))
        nll.append(-full.gather(-1, following[:, None])[:, 0])
        assert sample["nll"] == pytest.approx(float(nll[-1].mean()), rel=1e-4)
        assert sample["text"] == byte_tokenizer().decode(sample["tokens"])
    means = [float(each.mean()) for each in kl]
    assert metrics["kl_nats"] == pytest.approx(statistics.mean(means), abs=1e-5) and metrics["kl_nats"] > 0
    assert metrics["kl_nats_stderr"] == pytest.approx(stderr_of(means), abs=1e-5)
    assert metrics["text_perplexity"] == pytest.approx(math.exp(float(torch.cat(nll).mean())), rel=1e-4)
    differences = [sample["nll"] - sample["nll_full"] for sample in samples]
    assert metrics["text_nll_difference"] == pytest.approx(statistics.mean(differences))
    assert metrics["text_nll_difference_stderr"] == pytest.approx(stderr_of(differences))


def test_sizes_are_those_of_the_decode_rows(loaded, text):
    """T is 44, of which floor(0.2 * 44) = 8 tokens a row are kept in two of four layers; the last token is not fed."""
    metrics = metrics_of(run_long_decode(settings(text, Streaming(kept_frac=0.2, num_sinks=2)), loaded))
    shares = [(2 + 2 * 8 / cached) / 4 for cached in range(PROMPT, PROMPT + STEPS - 1)]
    assert metrics["size"] == pytest.approx(statistics.mean(shares))
    target = metrics_of(run_long_decode(settings(text, H2O(), size=0.7), loaded))
    assert target["size"] == pytest.approx(0.7, abs=0.01)


def test_the_full_caches_texts_are_decoded_once_for_all_methods(loaded, text, monkeypatch):
    decoded = calls_of(monkeypatch, long_decode, "decode_freely")
    references: Memo = Memo()
    first = metrics_of(run_long_decode(settings(text, H2O()), loaded, references))
    second = metrics_of(run_long_decode(settings(text, Streaming(kept_frac=0.2)), loaded, references))
    assert len(decoded) == 3, "the full cache's once"
    assert first["repetition_full"] == second["repetition_full"]
    assert first["text_perplexity_full"] == second["text_perplexity_full"]
    run_long_decode(settings(text, H2O(), max_new_tokens=STEPS + 1), loaded, references)
    assert len(decoded) == 5, "longer texts"


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3], None),
        ([1, 2, 3, 4], 0),
        ([1, 1, 1, 1, 1], 1 / 2),
        ([1, 2, 3, 4, 1, 2, 3, 4], 1 / 5),
        ([7] * 103, 99 / 100),
    ],
)
def test_repetition_is_the_share_of_4_grams_seen_before(tokens, expected):
    assert repetition(tokens) == (None if expected is None else pytest.approx(expected))


def pair_of(tokens: list[int], others: list[int]) -> Pair:
    rows = torch.arange(1, len(tokens), dtype=torch.float64)
    return Pair(Text(tokens, rows / 10), Text(others, rows / 20), rows, rows % 2)


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


def test_single_prompts_and_short_texts(loaded, text):
    metrics = metrics_of(run_long_decode(settings(text, H2O(), num_windows=1, max_new_tokens=3), loaded))
    errors = {name for name in metrics if name.endswith("_stderr")}
    repeated = {"repetition", "repetition_full", "repetition_difference"}  # three tokens have no 4-gram
    assert absent_of(metrics) == errors | repeated and "kl_nats_stderr" in errors
    entries = summarize([pair_of([1, 2, 3, 4], [1, 2, 3, 4]), pair_of([1, 2, 3, 4], [1, 2, 9, 4])])
    assert (entries["first_divergence"], entries["never_diverged"], entries["num_samples"]) == (3, 1, 2)
    pair = pair_of([1, 2], [1, 2])
    with pytest.raises(UserError, match="^prompt 2: perplexity overflows"):
        summarize([pair, pair._replace(own=Text([1, 2], torch.tensor([400.0])))])


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (Full(), {"max_new_tokens": 109}, "^prefill_len=20 and max_new_tokens=109: .* at most 128, the limit"),
        (Full(), {"num_windows": 16}, r"^num_windows=16 of prefill_len=20 .* need 320 tokens, .* 300"),
        (Streaming(kept_frac=0.05), {}, r"method\.kept_frac=0\.05"),
    ],
)
def test_refused(loaded, text, method, changes, message):
    with pytest.raises(ValueError, match=message):
        run_long_decode(settings(text, method, **changes), loaded)


def test_bounds(loaded, text):
    run_long_decode(settings(text, max_new_tokens=MAX_LENGTH - PROMPT, num_windows=1), loaded)
    for setting, value in (("prefill_len", 0), ("max_new_tokens", 1)):
        with pytest.raises(UserError, match=rf"^{setting}={value}: must be at least {value + 1} in kind=long_decode$"):
            load(["experiment=long_decode", f"{setting}={value}"])
        load(["experiment=long_decode", f"{setting}={value + 1}"])
    hints = find("long_decode").memory_hints(load(["experiment=long_decode"]))
    assert hints == {"max_new_tokens": 256, "prefill_len": 256}

"""Differences to the full cache: against plain references, and which run of the full cache they are taken from."""

import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest, ttest_1samp

from harness.results import sheet as sheets
from harness.results import stats
from harness.results import write as tables
from harness.results.columns import read_table
from harness.results.samples import (
    Baselines,
    Difference,
    Measured,
    clustered_stderr,
    is_full,
    paired,
    perplexity,
)
from tests.results.test_tables import TEXT_METRICS, answers, save, sheet

# The numbers

COMPARED = ("difference", "difference_stderr", "p", "gained", "lost", "detectable")


def test_what_no_context_showed_is_as_rare_as_a_binomial_test_says():
    for number in (1, 2, 6, 48):
        interval = binomtest(0, number, alternative="less").proportion_ci(0.95)
        assert stats.unseen_rate(number) == pytest.approx(interval.high)


def test_the_error_of_a_perplexity_is_that_of_a_jackknife():
    draw = random.Random(0)
    full = [draw.gauss(2.5, 0.4) for _ in range(400)]
    windows = [{"nll": 1.05 * nll + draw.gauss(0.1, 0.02), "nll_full": nll} for nll in full]

    def gap(windows: Sequence[dict[str, float]]) -> float:
        own, full = (statistics.fmean(window[name] for window in windows) for name in ("nll", "nll_full"))
        return math.exp(own) - math.exp(full)

    left = [gap(windows[:out] + windows[out + 1 :]) for out in range(len(windows))]
    jackknife = math.sqrt((len(left) - 1) * statistics.pvariance(left))
    found = perplexity(windows)
    assert found.value == pytest.approx(gap(windows)) and found.stderr == pytest.approx(jackknife, rel=0.01)
    assert found.num_contexts == 400 and found.gained is None
    assert found.detectable == pytest.approx((1.966 + 0.843) * found.stderr, rel=1e-3)
    one = [{"nll": 2.5, "nll_full": 1.5}]
    assert perplexity(one) == (pytest.approx(gap(one)), *[None] * 2, 1, 1, *[None] * 2), "one window has no error"


def questions(own: Sequence[Any], full: Sequence[Any], metric: str = "acc") -> Difference | None:
    """The difference of the means."""
    each = [Measured(statistics.fmean(one.get(metric) or 0 for one in some or [{}]), some) for some in (own, full)]
    return paired(*each, metric)


@pytest.mark.parametrize("metric", ["acc", "exact_match", "2048"])
def test_questions_are_paired_and_clustered_by_context(metric):
    own, full = [0, 0, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 1, 0, 0]
    found = questions(answers(own, metric), answers(full, metric), metric)
    assert found is not None and found[3:] == (8, 4, 1, 3) and found.value == -0.25
    less = [one - other for one, other in zip(own, full, strict=True)]
    sums = [sum(less[at : at + 2]) for at in range(0, 8, 2)]  # equal clusters: the error of their mean
    assert found.stderr == pytest.approx(statistics.stdev(sums) / 2 / math.sqrt(4))
    assert found.stderr == clustered_stderr(less, [0, 0, 1, 1, 2, 2, 3, 3])
    assert found.p == pytest.approx(ttest_1samp(sums, 0).pvalue), "of the contexts, which are 4"
    assert found.detectable == pytest.approx((3.182 + 0.978) * found.stderr, rel=1e-3), "of 4 contexts"


def test_questions_without_flips_or_right_in_part():
    whole = answers([1, 0, 1])
    found = questions(whole, whole)
    assert found == (0, 0, pytest.approx(1 - 0.05**0.5), 3, 2, 0, 0) and found.p == 1, "of 2 contexts"
    lost = questions(answers([0, 0, 0, 0]), answers([1, 1, 1, 1]))
    assert lost is not None and lost.stderr == 0 and lost.p is None, "all contexts alike: t has no value"
    found = questions(answers([0.5, 1.0], per_context=1), answers([1.0, 1.0], per_context=1))
    assert found is not None and found.gained is None and found.value == -0.25 and found.stderr == pytest.approx(0.25)
    scores = answers([30.0, 70.0], "bleu", per_context=1)
    assert questions(scores, scores, "bleu") == (0, 0, None, 2, 2, None, None), "no share of questions"


@pytest.mark.parametrize(
    ("own", "full"),
    [
        (answers([1, 0]), answers([1, 0, 1])),
        (answers([1, 0, 1]), answers([1, 0, 1], first=1)),  # as many, but other questions
        (answers([None]), answers([1])),
    ],
)
def test_unlike_questions_are_not_paired(own, full):
    assert questions(own, full) is None


# Few windows


def test_the_critical_value_has_one_degree_of_freedom_less_than_contexts():
    assert stats.critical_value(3.0) == stats.critical_value(3) == stats.quantile(2, 0.975)
    assert stats.critical_value(1) == math.inf
    assert stats.critical_value(None) == pytest.approx(1.95996, abs=1e-4)


@pytest.mark.parametrize(
    ("num_windows", "cell"),
    [
        (1, "10.00; +0.30 (1 window: no interval)"),
        (2, "10.00; +0.30 (2 windows: no interval)"),
        (3, "10.00; +0.30 (95 %: -0.13 to +0.73)"),
        (8, "10.00; +0.30 (95 %: +0.06 to +0.54)"),
        (None, "10.00; +0.30 (95 %: +0.10 to +0.50)"),
    ],
)
def test_a_difference_of_three_errors_counts_with_many_windows_alone(num_windows, cell):
    row = {
        "metric": "perplexity", "value": 10.0, "stderr": 1.0, "difference": 0.3, "difference_stderr": 0.1,
        "num_contexts": num_windows,
    }  # fmt: skip
    assert sheets.show_score(row) == cell
    interval = sheets.interval_of(row)
    assert (interval is not None and interval.is_certain) == (num_windows in (8, None))


@pytest.mark.parametrize(
    ("change", "cell"),
    [
        ({"value": 487.54, "difference": 475.09, "difference_stderr": 256.95, "num_contexts": 8},
         "487.5; +475 (95 %: -133 to +1,083)"),
        ({"value": 341486.192}, "341,486 ± 1"),
        ({"metric": "acc", "value": 0.0, "stderr": 0.0, "num_samples": 3}, "0 of 3"),
        ({"metric": "acc", "value": 1.0, "stderr": 0.0, "num_samples": 48}, "48 of 48"),
        ({"metric": "acc", "value": 0.5, "stderr": 0.1, "num_samples": 48}, "50.0 ± 10.0"),
        ({"metric": "acc", "value": 0.3, "stderr": 0.1, "num_samples": 3}, "30.0 ± 10.0"),  # right in part
        ({"metric": "acc", "value": 0.5, "difference": 0.0, "difference_stderr": 0.0, "num_contexts": 8},
         "50.0; the same"),
        ({"metric": "1024", "value": 0.0, "difference": -1.0, "difference_stderr": 0.0}, "0.0; -100 on each"),
        ({"metric": "top1_agreement", "value": 1.0, "stderr": 0.0}, "100.0"),
    ],
)  # fmt: skip
def test_a_score_in_words(change, cell):
    row: dict[str, Any] = {"metric": "perplexity", "value": 12.0, "stderr": 1.0, "num_contexts": 8}
    assert sheets.show_score(row | change) == cell


# The full cache's run

TASK = {"acc_stderr": 0.1, "num_samples": 4, "num_fewshot": 0, "budget": 0.2}
HITS = {"method=full": "1110", "method=h2o": "1001", "method=int4": "1110"}


def save_answers(results: Path, *overrides: str, hits: str, **fields: Any) -> dict[str, Any]:
    metrics = {"passkey": TASK | {"acc": hits.count("1") / len(hits)}}
    chosen = ["experiment=fig11", "tasks=[passkey]", *overrides]
    return save(results, chosen, metrics, samples={"passkey": answers([float(hit) for hit in hits])}, **fields)


def difference(record: dict[str, Any], *others: dict[str, Any], metric: str = "acc") -> float | None:
    found = Baselines(others).difference(record, "passkey", metric)
    return None if found is None else found.value


def test_a_run_is_compared_with_the_full_cache_whatever_code_made_it(tmp_path):
    full, own = (save_answers(tmp_path, f"method={name}", hits=HITS[f"method={name}"]) for name in ("full", "h2o"))
    inputs = {"model": "a", "passkey": "b"}
    full |= {"inputs": inputs | {"code:method": "1", "kv_recall": "c"}}
    own |= {"inputs": inputs | {"code:method": "2", "calibration": "d"}}
    assert difference(own, own, full) == -0.25 and difference(full, full) is None
    assert is_full(full) and not is_full(own)
    assert difference(own) is None, "no run of the full cache"
    assert difference(own | {"inputs": inputs | {"passkey": "other rows"}}, full) is None


@pytest.mark.parametrize(
    ("own", "full", "expected"),
    [
        *(
            (f"method=h2o {change}", "method=full", None)
            for change in ("num_samples=8", "prefill=dense", "model=opt-125m", "seed=1")
        ),
        ("method=infinigen codec=int4 budget=nearest:0.2", "method=full tasks=[kv_recall,passkey]", -0.25),
        ("method=full codec=int4", "method=full", -0.25),
        ("method=full label=mine", "method=full", None),
    ],
)
def test_the_settings_in_which_a_run_and_its_full_cache_may_differ(own, full, expected, tmp_path):
    other = save_answers(tmp_path, *full.split(), hits="1110")
    assert difference(save_answers(tmp_path, *own.split(), hits="1001"), other) == expected


def test_the_newest_run_of_the_full_cache_counts(tmp_path):
    full = save_answers(tmp_path, "method=full", hits="1110")
    older, newer = full | {"started": "2025"}, save_answers(tmp_path, "method=full", hits="0000", started="2026")
    own = save_answers(tmp_path, "method=h2o", hits="1001")
    assert difference(own, newer, older) == difference(own, older, newer) == 0.5


def test_samples_that_do_not_give_the_metric_have_no_difference(tmp_path):
    own, full = (save_answers(tmp_path, name, hits=HITS[name]) for name in ("method=h2o", "method=full"))
    assert difference(own | {"samples": {}}, full) is None
    assert difference(own | {"samples": {"windows": [{"kl": 1}]}}, full, metric="perplexity") is None
    own["metrics"]["passkey"]["acc"] = 0.9
    assert difference(own, full) is None, "not their mean"


def test_a_question_has_no_say_in_the_metric_of_another_length(tmp_path):
    def save_lengths(name: str, hits: str) -> dict[str, Any]:
        lengths = ("1024", "1024", "2048", "2048")
        asked = [{"question": at, "context": at, lengths[at]: float(hit)} for at, hit in enumerate(hits)]
        shares = {name: sum(each.get(name, 0) for each in asked) / 2 for name in lengths}
        return save(tmp_path, ["experiment=fig11", name], {"passkey": TASK | shares}, samples={"passkey": asked})

    own, full = save_lengths("method=h2o", "1001"), save_lengths("method=full", "1111")
    found = [Baselines([full]).difference(own, "passkey", metric) for metric in ("1024", "2048", "acc")]
    assert [each and (each.value, each.num_pairs) for each in found] == [(-0.5, 2), (-0.5, 2), None]


def test_the_full_cache_of_another_experiment_counts_where_its_own_has_none(tmp_path):
    def save_other(method: str, hits: str) -> dict[str, Any]:
        return save_answers(tmp_path, "experiment=fig13", "kind=tasks", method, hits=hits, inputs={"model": "a"})

    def first(name: str) -> float | None:
        (row,) = [row for row in read_table(tables.update(tmp_path, "fig13")) if row["label"] == name]
        return row["difference"]

    elsewhere = save_answers(tmp_path, "method=full", hits="1110", inputs={"model": "a"})
    own = save_other("method=h2o", "1001")
    assert first("H2O") == -0.25 and difference(own, own) is None
    nearer = save_other("method=full", "0000")
    assert first("H2O") == 0.5 and first("Full cache") is None
    found = Baselines([], lambda: [elsewhere, nearer]).difference(own, "passkey", "acc")
    assert found is not None and found.value == 0.5


# The tables


def test_a_table_has_the_difference_and_a_page_and_a_terminal_say_it(tmp_path):
    saved = {overrides: save_answers(tmp_path, overrides, hits=hits) for overrides, hits in HITS.items()}
    path = tables.update(tmp_path, "fig11")
    rows = {row["label"]: row for row in read_table(path)}
    stderr = clustered_stderr([0, -1, -1, 1], [0, 0, 1, 1])
    assert stderr is not None and {name: rows["H2O"][name] for name in COMPARED} == {
        "difference": -0.25, "difference_stderr": pytest.approx(stderr), "gained": 1, "lost": 2,
        "p": pytest.approx(ttest_1samp([-0.5, 0.0], 0).pvalue),
        "detectable": pytest.approx((12.706 + 1.376) * stderr, rel=1e-3),
    }  # fmt: skip
    assert [rows[label]["num_contexts"] for label in ("Full cache", "H2O")] == [2, 2]
    assert not any(rows["Full cache"][name] for name in COMPARED)
    cells = {line["label"]: line["passkey acc (%)"] for line in sheet(path)}
    assert cells == {
        "Full cache": "3 of 4", "H2O": "2 of 4; -25 (2 contexts: no interval)", "INT4": "3 of 4; the same",
    }  # fmt: skip
    own, full = saved["method=int4"], saved["method=full"]
    assert "3 of 4; the same" in tables.summary([own], lambda: [full, own])
    assert "the same" not in tables.summary([own]) and "INT4" in tables.summary([own])


def test_a_text_and_its_chunks_are_compared_with_the_full_cache_of_the_run(tmp_path):
    pairs = [{"nll": 2.5, "nll_full": 2.0}, {"nll": 3.0, "nll_full": 2.2}]
    values = {"perplexity": 9.0, "perplexity_stderr": 1.0}
    chunks = [{"first": 256, "stop": 512, "metrics": values, "windows": pairs[:1]}]
    metrics = {"offline": TEXT_METRICS | {"budget": 0.2}}
    for name in ("full", "h2o"):
        measured = {"samples": {"windows": pairs}, "chunks": chunks}
        save(tmp_path, ["experiment=perplexity", f"method={name}"], metrics, **measured)
    rows = read_table(tables.update(tmp_path, "perplexity"))
    found = {(row["task"], row["metric"]): row["difference"] for row in rows if row["label"] == "H2O"}
    first = math.exp(2.5) - math.exp(2.0)
    expected = {("offline", "perplexity"): perplexity(pairs).value, ("offline[256:512]", "perplexity"): first}
    assert {key: value for key, value in found.items() if value is not None} == pytest.approx(expected)
    assert not any(row["difference"] for row in rows if row["label"] == "Full cache")

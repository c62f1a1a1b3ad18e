"""Differences to the full cache: against plain references, and which run of the full cache they are taken from."""

import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from scipy.stats import binomtest, ttest_1samp

from harness.results import sheet as sheets
from harness.results import stats
from harness.results import write as tables
from harness.results.columns import read_frame, with_columns
from harness.results.samples import clustered_stderr, differences_of, frames_of, is_full
from tests.results.test_tables import TEXT_METRICS, answers, save, sheet

# The numbers

COMPARED = ("difference", "difference_stderr", "p", "gained", "lost")


def compared(own: Sequence[float], full: Sequence[float], metric: str = "acc", per_context: int = 2) -> pd.Series:
    """The difference of one run, by default with two questions a context."""
    contexts = [at // per_context for at in range(len(own))]
    key = {"run_id": "r", "task": "t", "first": math.nan, "metric": metric}
    pairs = pd.DataFrame({"context": contexts, "value": own, "full": full}, dtype=float).assign(**key)
    (found,) = differences_of(pairs).to_dict("records")
    return pd.Series(found, dtype=object)


def test_what_no_context_showed_is_as_rare_as_a_binomial_test_says():
    for number in (1, 2, 6, 48):
        interval = binomtest(0, number, alternative="less").proportion_ci(0.95)
        assert stats.unseen_rate(number) == pytest.approx(interval.high)


def test_the_error_of_a_perplexity_is_that_of_a_jackknife():
    draw = random.Random(0)
    full = [draw.gauss(2.5, 0.4) for _ in range(400)]
    own = [1.05 * nll + draw.gauss(0.1, 0.02) for nll in full]
    gap = math.exp(statistics.fmean(own)) - math.exp(statistics.fmean(full))

    def without(values: list[float], out: int) -> float:
        return math.exp(statistics.fmean(values[:out] + values[out + 1 :]))

    left = [without(own, out) - without(full, out) for out in range(len(own))]
    jackknife = math.sqrt((len(left) - 1) * statistics.pvariance(left))
    found = compared(own, full, "perplexity", per_context=1)
    assert found.difference == pytest.approx(gap) and found["mean"] == pytest.approx(math.exp(statistics.fmean(own)))
    assert found.difference_stderr == pytest.approx(jackknife, rel=0.01)
    assert found.num_contexts == 400 and math.isnan(found.gained)
    one = compared([2.5], [1.5], "perplexity")
    assert one.difference == pytest.approx(math.exp(2.5) - math.exp(1.5)) and one.num_contexts == 1
    assert one[["difference_stderr", "p"]].isna().all(), "one window has no error"


@pytest.mark.parametrize("metric", ["acc", "exact_match", "2048"])
def test_questions_are_paired_and_clustered_by_context(metric):
    own, full = [0, 0, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 1, 0, 0]
    found = compared(own, full, metric)
    assert (found.num_pairs, found.num_contexts, found.gained, found.lost, found.difference) == (8, 4, 1, 3, -0.25)
    less = [one - other for one, other in zip(own, full, strict=True)]
    sums = [sum(less[at : at + 2]) for at in range(0, 8, 2)]  # equal clusters: the error of their mean
    assert found.difference_stderr == pytest.approx(statistics.stdev(sums) / 2 / math.sqrt(4))
    assert found.difference_stderr == clustered_stderr(less, [0, 0, 1, 1, 2, 2, 3, 3])
    assert found.p == pytest.approx(ttest_1samp(sums, 0).pvalue), "of the contexts, which are 4"


def test_questions_without_flips_or_right_in_part():
    found = compared([1, 0, 1], [1, 0, 1])
    assert [*found[[*COMPARED]]] == [0, 0, 1, 0, 0]
    lost = compared([0, 0, 0, 0], [1, 1, 1, 1])
    assert lost.difference_stderr == 0 and lost.lost == 4 and math.isnan(lost.p), "all contexts alike: t has no value"
    found = compared([0.5, 1.0], [1.0, 1.0], per_context=1)
    assert math.isnan(found.gained) and found.difference == -0.25 and found.difference_stderr == pytest.approx(0.25)


# Few windows


def test_the_critical_value_has_one_degree_of_freedom_less_than_contexts():
    assert stats.critical_value(3.0) == stats.critical_value(3) == pytest.approx(4.3027, abs=1e-4)
    assert stats.critical_value(1) == math.inf
    assert stats.critical_value(None) == pytest.approx(1.95996, abs=1e-4)


def scored(**fields: Any) -> pd.Series:
    """A row of a table of accuracy, of a perplexity where the fields say nothing else."""
    row = {"metric": "perplexity", "value": 12.0, "stderr": 1.0, "num_contexts": 8} | fields
    return sheets.with_intervals(with_columns(pd.DataFrame([row]), "accuracy")).iloc[0]


@pytest.mark.parametrize(
    ("change", "cell"),
    [
        ({"value": 487.54, "difference": 475.09, "difference_stderr": 256.95, "num_contexts": 8},
         "487.5 (-133 to +1,083)"),
        ({"difference": 0.3, "difference_stderr": 0.1, "num_contexts": 2}, "12.00 (+0.30)"),
        ({"difference": 0.3, "difference_stderr": 0.1, "num_contexts": 3}, "12.00 (-0.13 to +0.73)"),
        ({"difference": 0.3, "difference_stderr": 0.1, "num_contexts": None}, "12.00 (+0.10 to +0.50)"),
        ({"num_contexts": 2}, "12.00"),
        ({"value": 341486.192}, "341,486 ± 1"),
        ({"metric": "acc", "value": 0.0, "stderr": 0.0, "num_samples": 3}, "0 of 3"),
        ({"metric": "acc", "value": 1.0, "stderr": 0.0, "num_samples": 48}, "48 of 48"),
        ({"metric": "acc", "value": 0.5, "stderr": 0.1, "num_samples": 48}, "50.0 ± 10.0"),
        ({"metric": "acc", "value": 0.3, "stderr": 0.1, "num_samples": 3}, "30.0 ± 10.0"),  # right in part
        ({"metric": "acc", "value": 0.5, "difference": 0.0, "difference_stderr": 0.0, "num_contexts": 8},
         "50.0 (same)"),
        ({"metric": "1024", "value": 0.0, "difference": -1.0, "difference_stderr": 0.0}, "0.0 (-100 to -100)"),
        ({"metric": "top1_agreement", "value": 1.0, "stderr": 0.0}, "100.0"),
    ],
)  # fmt: skip
def test_a_score_in_words(change, cell):
    assert sheets.show_cell(scored(**change)) == cell


# The full cache's run

TASK = {"acc_stderr": 0.1, "num_samples": 4, "num_fewshot": 0, "budget": 0.2}
HITS = {"method=full": "1110", "method=h2o": "1001", "method=int4": "1110"}


def save_answers(results: Path, *overrides: str, hits: str, first: int = 0, **fields: Any) -> dict[str, Any]:
    metrics = {"passkey": TASK | {"acc": hits.count("1") / len(hits)}}
    chosen = ["experiment=fig11", "tasks=[passkey]", *overrides]
    samples = {"passkey": answers([float(hit) for hit in hits], first=first)}
    return save(results, chosen, metrics, samples=samples, **fields)


def difference(record: dict[str, Any], *others: dict[str, Any], metric: str = "acc") -> float | None:
    rows = frames_of([record], lambda: others)["accuracy"]
    (found,) = rows.loc[rows["metric"] == metric, "difference"]
    return None if math.isnan(found) else found


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
    older, newer = (
        save_answers(tmp_path, "method=full", hits=hits, started=year, text=year)
        for hits, year in (("1110", "2025"), ("0000", "2026"))
    )
    own = save_answers(tmp_path, "method=h2o", hits="1001")
    assert difference(own, newer, older) == difference(own, older, newer) == 0.5


def test_other_questions_and_samples_that_do_not_give_the_metric_have_no_difference(tmp_path):
    own, full = (save_answers(tmp_path, name, hits=HITS[name]) for name in ("method=h2o", "method=full"))
    others = [save_answers(tmp_path, "method=full", text="others", **more) for more in OTHER_QUESTIONS]
    assert difference(own, full) == -0.25 and [difference(own, other) for other in others] == [None, None]
    assert difference(own | {"samples": {}}, full) is None
    own["metrics"]["passkey"]["acc"] = 0.9
    assert difference(own, full) is None, "not their mean"


OTHER_QUESTIONS: tuple[dict[str, Any], ...] = ({"hits": "111"}, {"hits": "1110", "first": 1})
"""Of the four that a run answered the first three, and the last three and another."""


def test_a_question_has_no_say_in_the_metric_of_another_length(tmp_path):
    def save_lengths(name: str, hits: str) -> dict[str, Any]:
        lengths = ("1024", "1024", "2048", "2048")
        asked = [{"question": at, "context": at, lengths[at]: float(hit)} for at, hit in enumerate(hits)]
        shares = {name: sum(each.get(name, 0) for each in asked) / 2 for name in lengths}
        return save(tmp_path, ["experiment=fig11", name], {"passkey": TASK | shares}, samples={"passkey": asked})

    own, full = save_lengths("method=h2o", "1001"), save_lengths("method=full", "1111")
    assert [difference(own, full, metric=metric) for metric in ("1024", "2048")] == [-0.5, -0.5]


def test_the_full_cache_of_another_experiment_counts_where_its_own_has_none(tmp_path):
    def save_other(method: str, hits: str) -> dict[str, Any]:
        return save_answers(tmp_path, "experiment=fig13", "kind=tasks", method, hits=hits, inputs={"model": "a"})

    def first(name: str) -> float | None:
        rows = read_frame(tables.update(tmp_path, "fig13")).set_index("label")
        return rows["difference"][name]

    elsewhere = save_answers(tmp_path, "method=full", hits="1110", inputs={"model": "a"})
    own = save_other("method=h2o", "1001")
    assert first("H2O") == -0.25 and difference(own, own) is None
    nearer = save_other("method=full", "0000")
    assert first("H2O") == 0.5 and math.isnan(first("Full cache"))
    assert difference(own, elsewhere, nearer) == 0.5


# The tables


def test_a_table_has_the_difference_and_a_page_says_it(tmp_path):
    for overrides, hits in HITS.items():
        save_answers(tmp_path, overrides, hits=hits)
    path = tables.update(tmp_path, "fig11")
    rows = read_frame(path).set_index("label")
    assert [*rows.loc["H2O", ["difference", "gained", "lost"]]] == [-0.25, 1, 2]
    assert [*rows["num_contexts"]] == [2, 2, 2] and rows.loc["Full cache", [*COMPARED]].isna().all()
    cells = {line["label"]: line["passkey acc (%)"] for line in sheet(path)}
    assert cells == {
        "Full cache": "3 of 4", "H2O": "2 of 4 (-25)", "INT4": "3 of 4 (same)",
    }  # fmt: skip


def test_a_text_and_its_chunks_are_compared_with_the_full_cache_of_the_run(tmp_path):
    pairs = [{"nll": 2.5, "nll_full": 2.0}, {"nll": 3.0, "nll_full": 2.2}]
    first, whole = math.exp(2.5) - math.exp(2.0), math.exp(2.75) - math.exp(2.1)
    chunks = [{"first": 256, "stop": 512, "metrics": {"perplexity": math.exp(2.5)}, "windows": pairs[:1]}]
    metrics = {"offline": TEXT_METRICS | {"budget": 0.2, "perplexity": math.exp(2.75)}}
    for name in ("full", "h2o"):
        measured = {"samples": {"windows": pairs}, "chunks": chunks}
        save(tmp_path, ["experiment=perplexity", f"method={name}"], metrics, **measured)
    rows = read_frame(tables.update(tmp_path, "perplexity"))
    of_h2o = rows[rows["label"] == "H2O"].dropna(subset="difference")
    assert dict(zip(of_h2o["stop"].fillna(0), of_h2o["difference"], strict=True)) == pytest.approx(
        {0: whole, 512: first}
    )
    assert rows.loc[rows["label"] == "Full cache", "difference"].isna().all()

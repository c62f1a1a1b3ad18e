"""The board: its statistics against plain references and SciPy, and tables of known truth."""

import itertools
import math
import random
import re
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text
from scipy.stats import t

from harness.results import board
from harness.results import write as tables
from harness.results.board import ANSWERS, SHAPES, STEPS, TEXTS, first_board
from harness.results.columns import csv_of, read_frame
from harness.results.metrics import MISSING
from harness.results.pages import sheets_of
from harness.results.samples import clustered_stderr
from harness.results.stats import estimates, holm
from plots import style
from plots.drawing import figure_of
from tests.results.test_tables import LATENCY_METRICS, TEXT_METRICS, answers, save, shares
from tests.runs import refusal_of

Rows = list[dict[str, Any]]

# Means and their errors


def plain_estimate(windows: pd.DataFrame) -> tuple[float, float, float]:
    """Mean, variance and degrees of freedom, as docs/results.md writes them, one window after another."""
    rows = list(zip(windows.model, windows.part, windows.place, windows.value, strict=True))
    texts_of = {model: {text for m, text, _, _ in rows if m == model} for model in windows.model}
    of_stratum = defaultdict(list)
    for model, text, _, value in rows:
        of_stratum[model, text].append(value)
    theta = 0.0
    for model in texts_of:
        of_texts = [statistics.fmean(of_stratum[model, text]) for text in texts_of[model]]
        theta += statistics.fmean(of_texts) / len(texts_of)
    z: dict[Any, float] = defaultdict(float)
    w: dict[Any, float] = defaultdict(float)
    for model, text, place, value in rows:
        n = len(of_stratum[model, text])
        weight = 1 / (len(texts_of) * len(texts_of[model]) * n)
        residual = (value - statistics.fmean(of_stratum[model, text])) * math.sqrt(n / (n - 1))
        z[text, place] += weight * residual
        w[text, place] += weight
    variance = below = 0.0
    for text in sorted(set(windows.part)):
        of_text = sum(z[key] ** 2 for key in z if key[0] == text)
        weights = [w[key] for key in w if key[0] == text]
        effective = sum(weights) ** 2 / sum(weight**2 for weight in weights)
        variance += of_text
        below += of_text**2 / (effective - 1)
    return theta, variance, variance**2 / below


def wide(windows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """The values as `estimates` takes them."""
    return windows.pivot(index=["model", "part", "place"], columns=list(columns) or "all", values="value")


def layout(places_of_models: Sequence[int], num_texts: int = 3) -> pd.DataFrame:
    """Windows: with fewer places every second of the others', as experiment=board lays them."""
    found: Rows = []
    most = max(places_of_models)
    for (number, count), text in itertools.product(enumerate(places_of_models), range(num_texts)):
        for place in range(count):
            found.append({"model": f"m{number}", "part": f"t{text}", "place": place * most // count})
    return pd.DataFrame(found).assign(all=0)


@pytest.mark.parametrize(
    ("places_of_models", "num_texts"), [((8, 8, 4, 4), 3), ((5, 5, 5), 3), ((6,), 3), ((2, 7), 3), ((8,), 1)]
)
def test_an_estimate_is_the_plain_reference(places_of_models, num_texts):
    windows = layout(places_of_models, num_texts)
    windows = windows[(windows.model != "m1") | (windows.part != "t2")]  # one model lacks a text
    rng = np.random.default_rng(0)
    windows = windows.assign(value=rng.normal(0.3, 1 + windows.part.str[1:].astype(int)))
    others = windows.assign(all=1, value=rng.normal(size=len(windows)))
    found = estimates(wide(pd.concat([windows, others]))).loc[0]
    theta, variance, degrees = plain_estimate(windows)
    assert found["mean"] == pytest.approx(theta) and found.stderr == pytest.approx(math.sqrt(variance))
    assert found.degrees == int(degrees + 1e-9)
    assert (found.low, found.high) == pytest.approx(t.interval(0.95, found.degrees, theta, math.sqrt(variance)))
    assert found.p == pytest.approx(2 * t.sf(abs(theta) / math.sqrt(variance), found.degrees))
    assert found.num_places == len(windows[["part", "place"]].drop_duplicates())


def test_over_models_the_models_are_the_sample():
    windows = layout((8, 8, 4))
    rng = np.random.default_rng(1)
    shifts = windows.model.map({"m0": -1.0, "m1": 0.2, "m2": 0.5})
    windows["value"] = shifts + 0.01 * rng.normal(size=len(windows))
    means = windows.groupby("model").value.mean()  # of equally long texts
    found, within = (estimates(wide(windows), over_models=over).loc[0] for over in (True, False))
    assert found["mean"] == pytest.approx(means.mean()) == pytest.approx(within["mean"])
    assert found.stderr == pytest.approx(means.std() / 3**0.5) and found.degrees == 2
    assert found.stderr > 5 * within.stderr, "models that differ"
    alone = wide(windows[windows.model == "m0"])
    pd.testing.assert_frame_equal(estimates(alone), estimates(alone, over_models=True), check_dtype=False)


def test_questions_weigh_as_many_as_there_are():
    right, asked = np.array([8, 4, 1, 0]), np.array([8, 8, 4, 4])
    contexts = pd.DataFrame({"model": "m", "part": "task", "place": range(4), "all": 0, "value": right / asked})
    found = estimates(wide(contexts), pd.Series(asked, wide(contexts).index)).loc[0]
    assert found["mean"] == pytest.approx(13 / 24)
    clusters = np.repeat(range(4), asked)  # each question by itself, questions of a context in one cluster
    values = np.concatenate([np.arange(total) < count for count, total in zip(right, asked, strict=True)])
    expected = clustered_stderr(values.astype(float).tolist(), clusters.tolist())
    assert found.stderr == pytest.approx(expected), "the error of tables of questions"


def test_holm_corrects_as_its_definition_says():
    def corrected(*p_values: float) -> Any:
        return pytest.approx(holm(pd.Series(p_values, dtype=float)).tolist(), nan_ok=True)

    assert corrected(0.01, 0.04, 0.03, 0.005) == [0.03, 0.06, 0.06, 0.02]
    assert [0.04, math.nan, 0.03] == corrected(0.02, math.nan, 0.01), "an untested pair counts"
    assert corrected(0.9, 0.8) == [1, 1] and corrected() == []


# Tables of known truth

MODELS = {"": ("big", 8), "second": ("small", 8), "third": ("slow", 4)}
"""By folder within the results: a model and its windows of each text."""
FACTORS = {"Oracle": 1.0, "Near": 0.5, "Alike": 0.51, "Far": 4.0}
METHODS = {"Oracle": "oracle", "Near": "infinigen2", "Alike": "twilight", "Far": "h2o", "Full cache": "full"}
RIGHT = {"Oracle": 7, "Near": 8, "Alike": 8, "Far": 2, "Full cache": 8}
"""Of 8 questions on a context."""
FULL = {"asked_budget": None, "dense_layers": None, "budget": 1.0}


def row_of(model: str, label: str, **columns: Any) -> dict[str, Any]:
    """What all tables of the board have."""
    return {
        "experiment": "board", "model": model, "method": METHODS.get(label, "quest"), "codec": "", "label": label,
        "settings": "budget=0.1", "asked_budget": 0.1, "dense_layers": 0, "budget": 0.1, "device_frac": 0.15,
        "resident_frac": 0.05, "source": "measured", "shipped": "yes", "run_id": "0" * 16,
    } | columns  # fmt: skip


def window_rows(model: str, count: int, labels: Iterable[str] = FACTORS, **columns: Any) -> Rows:
    """Windows whose KL is `FACTORS` times the oracle's, but for noise of a hundredth that differs by place."""
    found = []
    for label, text, place in itertools.product(labels, ("book", "code"), range(count)):
        rng = random.Random(f"{text}/{place * 8 // count}")
        base = 0.01 * math.exp(rng.gauss(0, 1)) * (1 + 0.1 * len(model))
        noise = random.Random(f"{label}/{text}/{place * 8 // count}/{model}").gauss(0, 0.01)
        window = {"family": "retrieves", "seq_len": 1024, "text": text, "window": place, "place": place / count}
        window["kl_nats"] = base * FACTORS.get(label, 2.0) * math.exp(noise)
        found.append(row_of(model, label) | window | columns)
    return found


def answer_rows(model: str, labels: Iterable[str] = RIGHT, contexts: int = 4, **columns: Any) -> Rows:
    found = []
    for label, task, context in itertools.product(labels, ("kv_recall", "passkey"), range(contexts)):
        right = RIGHT[label] - (context % 2 if label == "Far" else 0)
        asked = {"task": task, "context_id": context, "right": right, "asked": 8, "prompt_len": 340}
        found.append(row_of(model, label) | asked | (FULL if label == "Full cache" else {}) | columns)
    return found


def put(folder: Path, name: str, rows: Rows | pd.DataFrame) -> None:
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    (folder / "tables" / f"{name}.csv").write_text(csv_of(pd.DataFrame(rows), SHAPES[name]))


def add(folder: Path, name: str, rows: Rows) -> None:
    """Further rows in a table that is there."""
    put(folder, name, pd.concat([read_frame(folder / "tables" / f"{name}.csv"), pd.DataFrame(rows)]))


def add_windows(results: Path, labels: Iterable[str] = FACTORS, **columns: Any) -> None:
    """Further windows of every model."""
    for folder, (model, count) in MODELS.items():
        add(results / folder, TEXTS, window_rows(model, count, labels, **columns))


@pytest.fixture
def results(tmp_path) -> Path:
    for name, (model, count) in MODELS.items():
        of_full = window_rows(model, count, ["Full cache"], kl_nats=0.0, **FULL)
        put(tmp_path / name, TEXTS, [*window_rows(model, count), *of_full])
        put(tmp_path / name, ANSWERS, answer_rows(model))
    return tmp_path


def made(results: Path, name: str = "board-methods") -> pd.DataFrame:
    """The rows of a table by label; of `board-methods` those of the first board."""
    board.write(results)
    rows = read_frame(results / "tables" / f"{name}.csv")
    rows = first_board(rows) if name == "board-methods" else rows
    return rows.set_index("label", drop=False)


def lines_of(page: str, label: str) -> list[list[str]]:
    """The cells of the lines of a page that begin with a label."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    return [line for line in cells if line[0] == label]


def test_the_table_finds_what_is_known(results):
    rows = made(results)
    assert list(rows.label) == ["Near", "Alike", "Oracle", "Far", "Full cache"]
    compared = rows.loc[list(FACTORS)]
    assert compared.ratio.to_dict() == pytest.approx(FACTORS, rel=0.02) and set(compared.num_windows) == {40}
    assert {(row.num_places, row.num_models, row.model) for row in compared.itertuples()} == {
        (16, 3, "big, small, slow")
    }
    assert set(compared[["budget_low", "budget_high"]].stack()) == {0.1} and set(compared.device_frac_high) == {0.15}
    others = compared.drop("Oracle")
    assert (others.ratio_low < others.ratio).all() and (others.ratio < others.ratio_high).all()
    assert (others.ratio_high < 1.05 * others.ratio).all() and set(others.degrees) == {2}, "models less one"
    assert rows.ratio["Oracle"] == 1 and math.isnan(rows.ratio_low["Oracle"])
    ranks = rows[["rank", "rank_low", "rank_high"]]
    assert ranks.drop("Full cache").to_numpy().tolist() == [[1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4]]
    assert ranks.loc["Full cache"].isna().all() and "full cache itself" in rows.apart["Full cache"]
    near, far, full = rows.loc["Near"], rows.loc["Far"], rows.loc["Full cache"]
    unseen = pytest.approx(1 - 0.05 ** (1 / 8))
    assert (near.answers_difference, near.answers_difference_high) == (0, unseen), "of 8 contexts"
    assert far.answers_difference == pytest.approx(-6.5 / 8) and near.num_questions == 192
    wider = far.answers_difference - far.answers_difference_low
    assert wider > 9 / 192, "three models lose alike, and their contexts do not"
    assert far.num_contexts == 8, "contexts of one task on three models are one cluster each"
    assert math.isnan(full.ratio) and full.answers == pytest.approx(1) and math.isnan(full.answers_difference)
    without_steps = (results / "board.md").read_text().partition("\n## ")[2]
    assert math.isnan(near.step_s) and "decode step" not in without_steps


def test_each_model_has_a_board_like_that_of_its_own_results(results, tmp_path_factory):
    board.write(results)
    rows = read_frame(results / "tables" / "board-methods.csv")
    assert list(rows.over.unique()) == ["all models", "big", "small", "slow"]
    for folder, (model, _) in MODELS.items():
        alone = tmp_path_factory.mktemp("alone")
        shutil.copytree(results / folder / "tables", alone / "tables")
        own = made(alone).reset_index(drop=True)
        assert set(own.over) == {model}, "one board, not two"
        pd.testing.assert_frame_equal(own, rows[rows.over == model].reset_index(drop=True))
    titles = [sheet.title for sheet in sheets_of(rows)]
    assert titles[2].startswith("big, budget 10 %") and len(titles) == 8
    assert "small, budget 10 %" not in (results / "board.md").read_text()


def step_row(model: str, label: str, **columns: Any) -> dict[str, Any]:
    step = {"platform": "cpu", "batch_size": 4, "prompt_len": 1024, "gen_len": 24, "source": "emulated"}
    return row_of(model, label) | step | {"step_s": 0.0151, "budget": 0.08} | columns


def test_a_step_is_the_timed_one(results):
    """Of the model with the most timed steps, at windows as long as its prompts, with as many dense layers and the same
    groups."""
    steps = [step_row("small", "Near"), step_row("small", "Near", batch_size=8, step_s=8.0)]
    steps += [step_row("small", "Alike", dense_layers=1), step_row("small", "Far", step_s=0.02)]
    put(results, STEPS, [step_row("big", "Near", step_s=9.0)])
    put(results / "second", STEPS, steps)
    add_windows(results, ["Oracle", "Near"], seq_len=4096)
    add_windows(results, ["Oracle", "Near"], asked_budget=0.05, budget=0.04)
    coded = {"label": "Far + int8", "codec": "int8"}
    add_windows(results, ["Far"], settings="budget=0.1, group_size=16", **coded)
    add(results, STEPS, [step_row("small", "Far", step_s=0.007) | coded])
    rows = made(results)
    assert set(rows.step_on) == {"", "small (cpu), batch 4, prompts of 1,024 tokens"}
    found = {(row.label, row.asked_budget, row.seq_len): (row.step_s, row.step_source) for row in rows.itertuples()}
    assert found["Near", 0.1, 1024] == (0.0151, "emulated") and found["Far", 0.1, 1024] == (0.02, "emulated")
    others = [("Near", 0.05, 1024), ("Far + int8", 0.1, 1024), ("Alike", 0.1, 1024), ("Oracle", 0.1, 1024)]
    for key in (*others, ("Near", 0.1, 4096)):
        assert math.isnan(found[key][0]) and found[key][1] == "", "not timed like this"
    page = (results / "board.md").read_text()
    assert "15.1" in page and "Decode step: small (cpu), batch 4, prompts of 1,024 tokens, over an" in page


def test_pairs_say_who_is_closer(results):
    rows = made(results, "board-pairs")
    assert len(rows) == 6 == len({(row.label, row.other) for row in rows.itertuples()})
    for row in rows.itertuples():
        expected = FACTORS[row.label] / FACTORS[row.other]
        assert row.ratio == pytest.approx(expected, rel=0.03) and row.p_holm >= row.p
        closest = min(row.label, row.other, key=FACTORS.__getitem__)
        assert row.closer == closest or {row.label, row.other} == {"Near", "Alike"}


def page_of(results: Path) -> str:
    path, _ = board.write(results)
    return path.read_text()


def test_the_page_has_all_methods_and_the_ratio_on_each_model(results):
    add(results, TEXTS, window_rows("big", 8, ["Paged"], method="quest", budget=0.13))
    page = page_of(results)
    titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
    setting = "budget 10 %, windows of 1,024 tokens"
    assert titles == [setting, f"{setting}: not compared"]
    (oracle, *_) = lines_of(page, "Oracle")
    assert oracle[1:3] == ["3 (3 to 3)", "1.00"] and oracle[-3:] == ["1.00"] * 3, "over all models and on each"
    assert "40 windows at 16 places of the texts, on 3 models (big, small, slow)" in page
    paged, *_ = lines_of(page, "Paged")
    assert paged[1] == "cannot have this budget: reads 13.0 %; lacks 24 of 40 windows"
    assert float(paged[-3]) == pytest.approx(2, rel=0.02) and paged[-2:] == [MISSING] * 2
    full, *_ = lines_of(page, "Full cache")
    assert "100.0" in full and "192" in full, "right answers and questions"
    add_windows(results, seq_len=4096)
    add_windows(results, ["Near"], asked_budget=None, budget=0.3, kl_nats=1.0)
    page = page_of(results)
    assert "budget 10 %, windows of 4,096 tokens" in page
    (near, far, _) = lines_of(page, "Near")
    assert float(near[-1]) == pytest.approx(0.5, rel=0.05) and float(far[-1]) > 10, "of two budgets"


@pytest.mark.parametrize(
    ("changed", "apart"),
    [
        ({"budget": 0.111}, "cannot have this budget: reads "),
        ({"budget": 0.089}, "cannot have this budget: reads "),
        ({"codec": "int4", "asked_budget": None, "budget": 0.28}, "reads at a budget of its own"),
    ],
)
def test_a_method_at_another_budget_is_not_compared(results, changed, apart):
    before = made(results, "board-pairs")
    for folder, (model, count) in MODELS.items():
        same = {} if "codec" in changed or model == "slow" else {"budget": 0.1}
        add(results / folder, TEXTS, window_rows(model, count, ["Paged"], **changed | same))
    row = made(results).loc["Paged"]
    assert row.apart.startswith(apart) and math.isnan(row["rank"]) and row.asked_budget == 0.1
    assert row.ratio == pytest.approx(2, rel=0.02), "shown, not compared"
    assert changed["budget"] in (row.budget_low, row.budget_high)
    pd.testing.assert_frame_equal(made(results, "board-pairs"), before)


# Odd tables


def test_a_method_on_one_further_model_leaves_the_table_as_it_was(results):
    add_windows(results, ["Paged"])
    before = made(results)
    put(results / "own", TEXTS, window_rows("own", 8, ["Oracle", "Mine"], shipped=""))
    put(results / "own", ANSWERS, answer_rows("own", ["Full cache"]))
    put(results / "asked", TEXTS, [])
    put(results / "asked", ANSWERS, answer_rows("asked"))
    after = made(results)
    pd.testing.assert_frame_equal(after, before)
    assert re.search("Not in the means: (own, asked|asked, own)", (results / "board.md").read_text())
    rows = read_frame(results / "tables" / "board-methods.csv")
    assert set(rows[rows.over == "own"].label) == {"Oracle", "Mine"}, "a board of its own"


def test_a_model_with_few_methods_that_comes_first_is_no_first_board(tmp_path):
    put(tmp_path, TEXTS, window_rows("own", 8, ["Near"]))
    put(tmp_path / "other", TEXTS, window_rows("big", 8))
    rows = made(tmp_path)
    assert set(rows.over) == {"big"} and list(rows.label) == ["Near", "Alike", "Oracle", "Far"]


def test_one_text_and_one_window_have_no_interval(tmp_path):
    put(tmp_path, TEXTS, [row for row in window_rows("big", 1) if row["text"] == "book"])
    rows = made(tmp_path)
    assert rows.ratio["Near"] == pytest.approx(0.5, rel=0.05) and rows.ratio_low.isna().all()
    assert set(rows.rank_low) == {1} and set(rows.rank_high) == {4}, "nothing is told apart"
    assert rows.answers.isna().all()
    assert "1 windows at 1 places of the texts, on one model (big)" in (tmp_path / "board.md").read_text()
    pairs = read_frame(tmp_path / "tables" / "board-pairs.csv")
    assert pairs.p.isna().all() and set(pairs.closer) == {""}


def test_equal_kl_is_a_ratio_of_one_and_no_difference(results):
    add_windows(results, ["Near"], label="Twin", method="loki")
    rows = made(results)
    assert rows.ratio["Twin"] == rows.ratio["Near"] and rows["rank"]["Twin"] == rows["rank"]["Near"] == 1
    ranks = rows[["rank", "rank_low", "rank_high"]].to_numpy().tolist()
    assert ranks[:2] == [[1, 1, 2], [1, 1, 2]], "one may be ahead of the other"
    pairs = read_frame(results / "tables" / "board-pairs.csv")
    (pair,) = pairs[(pairs.label == "Near") & (pairs.other == "Twin")].itertuples()
    assert (pair.ratio, pair.ratio_low, pair.p, pair.closer) == (1, 1, 1, "")


def test_a_kl_below_rounding_counts_as_the_least(results):
    """A better method is not left out for it, and gains nothing by what is less than rounding."""
    rows = read_frame(results / "tables" / f"{TEXTS}.csv")
    is_one = (rows.label == "Near") & (rows.window == 3) & (rows.text == "book")
    found = []
    for kl in (-1e-9, 0.0, 1e-7, 1e-6):
        put(results, TEXTS, rows.assign(kl_nats=rows.kl_nats.mask(is_one, kl)))
        near = made(results).loc["Near"]
        found.append((near.apart, near.ratio, near.ratio_high))
    assert set(found) == {("", *found[-1][1:])} and 0 < found[0][1] < 1


def test_without_the_oracle_nothing_is_compared(tmp_path, capsys):
    put(tmp_path, TEXTS, window_rows("big", 4, ["Near", "Far"]))
    assert board.main([str(tmp_path)]) == 0
    assert "not compared" in (printed := capsys.readouterr().out) and printed.endswith(f"{tmp_path / 'board.md'}\n")
    rows = made(tmp_path)
    assert set(rows.apart) == {"the oracle has no windows here"} and len(rows) == 2
    assert read_frame(tmp_path / "tables" / "board-pairs.csv").empty


def test_two_methods_of_one_label_are_refused(tmp_path, capsys):
    put(tmp_path, TEXTS, [*window_rows("big", 4), *window_rows("big", 4, ["Far"], method="tova", run_id="2")])
    said = refusal_of(board.main, [str(tmp_path)], capsys)
    assert "label=Far: two methods have it (h2o, tova); give each its own" in said


def test_two_numbers_of_dense_layers_are_two_lines(tmp_path):
    put(tmp_path, TEXTS, [*window_rows("big", 4), *window_rows("big", 4, ["Far"], dense_layers=2)])
    rows = made(tmp_path)
    assert {"Far, 0 dense layers", "Far, 2 dense layers"} <= set(rows.label)
    assert rows.dense_numbers["Far, 2 dense layers"] == "2"


# Records, shipped tables, figure and report


def save_windows(results: Path, *overrides: str, kl: Sequence[float] = (0.1, 0.3), **fields: Any) -> None:
    metrics = TEXT_METRICS | shares(0.1)
    windows = [{"place": at / len(kl), "kl_nats": value, "budget": 0.1} for at, value in enumerate(kl)]
    settings = ["experiment=board", "corpus=code", *overrides]
    save(results, settings, {"code": metrics}, samples={"windows": windows}, **fields)


def test_records_become_windows_and_answers(tmp_path):
    chosen = ["method=h2o", "budget=nearest:0.1"]
    save_windows(tmp_path, *chosen, kl=(9, 9), started="2025")
    save_windows(tmp_path, *chosen, "seed=1")  # the newer one counts
    save_windows(tmp_path, "method=full", kl=(0.0, 0.0))
    given = answers([1, 0, 1, 1])
    task = {"acc": 0.75, "acc_stderr": 0.1, "num_samples": 4, "num_fewshot": 0} | shares(0.1)
    save(
        tmp_path, ["experiment=board", "kind=tasks", *chosen], {"passkey": task},
        samples={"passkey": [sample | {"context_tokens": 300 - at} for at, sample in enumerate(given)]},
    )  # fmt: skip
    tables.update(tmp_path, "board")
    rows = read_frame(tmp_path / "tables" / f"{TEXTS}.csv")
    assert rows[["label", "window", "place", "kl_nats"]].to_numpy().tolist() == [
        ["Full cache", 0, 0, 0], ["Full cache", 1, 0.5, 0], ["H2O", 0, 0, 0.1], ["H2O", 1, 0.5, 0.3],
    ]  # fmt: skip
    h2o = rows.loc[2]
    assert (h2o.text, h2o.seq_len, h2o.asked_budget, h2o.resident_frac) == ("code", 1024, 0.1, 0.02)
    assert h2o.model == "smollm2-135m" and "budget=0.1" in h2o.settings and h2o.shipped == ""
    rows = read_frame(tmp_path / "tables" / f"{ANSWERS}.csv")
    assert rows[["task", "context_id", "right", "asked", "prompt_len"]].to_numpy().tolist() == [
        ["passkey", 0, 1, 2, 300], ["passkey", 1, 2, 2, 298],
    ]  # fmt: skip


def test_a_timed_record_becomes_a_step_under_the_name_of_its_method(tmp_path):
    chosen = ["method=infinigen2", "budget=nearest:0.1", "codec=int8"]
    save_windows(tmp_path, *chosen)
    save_windows(tmp_path, *chosen, "group_size=16", "label=other groups")
    timed = LATENCY_METRICS | {"gen_len": 11, "decode_s": 0.1, "budget": 0.09}
    save(tmp_path, ["experiment=board", "kind=latency", *chosen], timed)
    save(tmp_path, ["experiment=board", "kind=latency", "method=full"], timed | {"h2d_bytes": None})
    tables.update(tmp_path, "board")
    (row,) = read_frame(tmp_path / "tables" / f"{STEPS}.csv").itertuples()
    assert (row.label, row.method, row.codec, row.asked_budget) == ("InfiniGen2 + int8", "infinigen2", "int8", 0.1)
    assert row.step_s == pytest.approx(0.01) and row.budget == 0.09


def test_a_run_replaces_its_shipped_windows_and_no_others(tmp_path):
    shipped: Rows = []
    for label, method in (("H2O", "h2o"), ("Near", "infinigen2")):
        shipped += window_rows("smollm2-135m", 4, [label], method=method, settings="")
    put(tmp_path, TEXTS, [row for row in shipped if row["text"] == "code"])
    save_windows(tmp_path, "method=h2o", "budget=nearest:0.1", "method.dense_layers=0")
    tables.update(tmp_path, "board")
    rows = read_frame(tmp_path / "tables" / f"{TEXTS}.csv")
    assert rows[rows.label == "H2O"].kl_nats.tolist() == [0.1, 0.3]
    assert rows[rows.label == "Near"].shipped.tolist() == ["yes"] * 4


def drawn(results: Path, name: str) -> Any:
    """A figure of the results' board."""
    board.write(results)
    with style.applied():
        figure = figure_of(results, name)
        if figure is not None:
            figure.draw_without_rendering()
    return figure


def test_the_figure_has_a_panel_a_budget_and_a_line_a_method(results):
    add_windows(results, seq_len=4096)
    add_windows(results, asked_budget=0.05, budget=0.05)
    add_windows(results, ["Paged"], budget=0.2)
    figure = drawn(results, "board")
    assert [axes.get_title() for axes in figure.axes] == ["budget 5 %", "budget 10 %"]
    large = figure.axes[1]
    labels = [tick.get_text() for tick in large.get_yticklabels()]
    assert labels == ["Paged", "Far", "Oracle", "Alike", "Near"], "the closest on top, below what is not compared"
    xs = sorted(float(bar.lines[0].get_xdata()[0]) for bar in large.containers)
    assert xs == pytest.approx([0.5, 0.5, 0.51, 0.51, 1, 1, 2, 4, 4], rel=0.03)
    notes = " ".join(text.get_text() for text in figure.findobj(Text))
    assert "3 models, 40 windows of 1,024 tokens, 40 windows of 4,096 tokens" in notes


def test_the_figure_of_ten_methods_has_a_line_each_over_all_models(results, monkeypatch):
    monkeypatch.setitem(style.REGISTRY, "budget", ["Oracle", "Near", "Far"])
    assert drawn(results, "budget") is None, "of one budget there is no line"
    add_windows(results, asked_budget=0.05, budget=0.05)
    (axes,) = drawn(results, "budget").axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["5", "10"]
    lines = [each for each in axes.containers if not each.get_label().startswith("_")]
    assert {line.get_label() for line in lines} == {"Oracle", "Near", "Far"}
    rows = first_board(read_frame(results / "tables" / "board-methods.csv")).set_index(["label", "asked_budget"])
    for bars in lines:
        kl = [rows.kl_nats[bars.get_label(), budget] for budget in (0.05, 0.1)]
        assert list(bars.lines[0].get_ydata()) == pytest.approx(kl)
        assert list(bars.lines[0].get_xdata()) == [5, 10], "at its budgets"
    assert len(axes.containers) - len(lines) == 2, "the oracle's ratio to itself has no interval"

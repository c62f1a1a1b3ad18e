"""The board: its statistics against plain references and simulation, and tables of known truth."""

import itertools
import math
import random
import re
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.text import Text

from harness import report
from harness.errors import UserError
from harness.results import board, columns
from harness.results import write as tables
from harness.results.board_page import first_board
from harness.results.board_rows import COSTS, ORACLES, with_fronts
from harness.results.board_sources import ANSWERS, SHAPES, STEPS, TEXTS
from harness.results.columns import TableRow, read_table, shape_of
from harness.results.samples import clustered_stderr
from harness.results.stats import Design, Estimate, compare_all, holm, ranks
from harness.run.compose import compose, load
from harness.settings.schema import CONF_DIR
from plots import data, style
from plots.board import budget, draw
from tests.report.test_report import Page
from tests.results.test_tables import LATENCY_METRICS, TEXT_METRICS, answers, save, shares
from tests.runs import refusal_of

# The mean and its error


def plain_estimate(
    models: Sequence[str], texts: Sequence[str], places: Sequence[int], values: Sequence[float]
) -> tuple[float, float, float]:
    """Mean, variance and degrees of freedom, as docs/results.md writes them, one window after another."""
    windows = list(zip(models, texts, places, values, strict=True))
    texts_of = {model: {text for m, text, _, _ in windows if m == model} for model in models}
    of_stratum = defaultdict(list)
    for model, text, _, value in windows:
        of_stratum[model, text].append(value)
    theta = 0.0
    for model in texts_of:
        of_texts = [statistics.fmean(of_stratum[model, text]) for text in texts_of[model]]
        theta += statistics.fmean(of_texts) / len(texts_of)
    z: dict[Any, float] = defaultdict(float)
    w: dict[Any, float] = defaultdict(float)
    for model, text, place, value in windows:
        n = len(of_stratum[model, text])
        weight = 1 / (len(texts_of) * len(texts_of[model]) * n)
        residual = (value - statistics.fmean(of_stratum[model, text])) * math.sqrt(n / (n - 1))
        z[text, place] += weight * residual
        w[text, place] += weight
    variance = below = 0.0
    for text in sorted(set(texts)):
        of_text = sum(z[key] ** 2 for key in z if key[0] == text)
        weights = [w[key] for key in w if key[0] == text]
        effective = sum(weights) ** 2 / sum(weight**2 for weight in weights)
        variance += of_text
        below += of_text**2 / (effective - 1)
    return theta, variance, variance**2 / below


def layout(places_of_models: Sequence[int], num_texts: int = 3) -> tuple[list[str], list[str], list[int]]:
    """Models, texts and places: with fewer places every second of the others', as experiment=board lays them."""
    found = []
    most = max(places_of_models)
    for (number, count), text in itertools.product(enumerate(places_of_models), range(num_texts)):
        found += [(f"m{number}", f"t{text}", place * most // count) for place in range(count)]
    models, texts, places = zip(*found, strict=True)
    return list(models), list(texts), list(places)


@pytest.mark.parametrize(
    ("places_of_models", "num_texts"), [((8, 8, 4, 4), 3), ((5, 5, 5), 3), ((6,), 3), ((2, 7), 3), ((8,), 1)]
)
def test_an_estimate_is_the_plain_reference(places_of_models, num_texts):
    draw_number = random.Random(str(places_of_models))
    models, texts, places = layout(places_of_models, num_texts)
    keep = [at for at in range(len(models)) if (models[at], texts[at]) != ("m1", "t2")]  # one model lacks a text
    models, texts, places = ([column[at] for at in keep] for column in (models, texts, places))
    values = [draw_number.gauss(0.3, 1 + int(text[1:])) for text in texts]
    found = Design(models, texts, places).estimate(values)
    theta, variance, degrees = plain_estimate(models, texts, places, values)
    assert found.value == pytest.approx(theta) and found.stderr == pytest.approx(math.sqrt(variance))
    assert found.degrees == int(degrees)
    assert found.num_clusters == len(set(zip(texts, places, strict=True)))


def test_over_models_the_models_are_the_sample():
    models, texts, places = layout((8, 8, 4))
    rng = np.random.default_rng(1)
    shifts = dict(zip(dict.fromkeys(models), (-1.0, 0.2, 0.5), strict=True))
    values = [shifts[model] + 0.01 * rng.normal() for model in models]
    design = Design(models, texts, places)
    of_models = columns.grouped(zip(models, values, strict=True), lambda pair: pair[0])
    means = [statistics.fmean(value for _, value in pairs) for pairs in of_models.values()]  # of equally long texts
    found = design.over_models(values)
    assert found.value == pytest.approx(statistics.fmean(means)) == pytest.approx(design.mean(values))
    assert found.stderr == pytest.approx(statistics.stdev(means) / 3**0.5) and found.degrees == 2
    assert found.stderr > 5 * design.estimate(values).stderr, "models that differ"
    alone = Design(models[:24], texts[:24], places[:24])
    assert alone.over_models(values[:24]) == alone.estimate(values[:24]), "one model"


def test_questions_weigh_as_many_as_there_are():
    right, asked = [8, 4, 1, 0], [8, 8, 4, 4]
    found = Design(["m"] * 4, ["task"] * 4, [0, 1, 2, 3], asked).estimate(np.divide(right, asked))
    assert found.value == pytest.approx(13 / 24)
    single = []  # each question by itself, questions of a context in one cluster
    for context, (count, total) in enumerate(zip(right, asked, strict=True)):
        single += [(context, float(number < count)) for number in range(total)]
    clusters, values = zip(*single, strict=True)
    assert found.stderr == pytest.approx(clustered_stderr(values, clusters)), "the error of tables of questions"


def simulated(
    rng: np.random.Generator, models: Sequence[str], texts: Sequence[str], places: Sequence[int], shared: float
) -> np.ndarray:
    """Values with mean 0: of one place correlated by `shared` over models, of larger variance in later texts."""
    common = {key: rng.normal() for key in dict.fromkeys(zip(texts, places, strict=True))}
    offsets = {key: rng.normal() for key in dict.fromkeys(zip(models, texts, strict=True))}
    mean = statistics.fmean(
        statistics.fmean(offsets[model, text] for text in dict.fromkeys(texts)) for model in dict.fromkeys(models)
    )
    values = []
    for model, text, place in zip(models, texts, places, strict=True):
        noise = math.sqrt(shared) * common[text, place] + math.sqrt(1 - shared) * rng.normal()
        values.append(offsets[model, text] - mean + (1 + int(text[1:])) * noise)
    return np.array(values)


@pytest.mark.parametrize("shared", [0.0, 0.7])
def test_intervals_cover_the_mean_of_correlated_models(shared):
    rng = np.random.default_rng(1)
    layout_of = layout((8, 8, 4, 4))
    design, independent = Design(*layout_of), Design(*layout_of[:2], range(len(layout_of[0])))
    covered = covered_if_independent = 0
    draws = 1500
    for _ in range(draws):
        values = simulated(rng, *layout_of, shared)
        covered += contains_zero(design.estimate(values))
        covered_if_independent += contains_zero(independent.estimate(values))
    assert 0.935 <= covered / draws <= 0.985, covered / draws
    if shared:
        assert covered_if_independent / draws < 0.88, "windows of one place are not independent"


def contains_zero(estimate: Estimate) -> bool:
    assert estimate.half_width is not None
    return abs(estimate.value) <= estimate.half_width


# Pairs and ranks


def test_holm_corrects_as_its_definition_says():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.02, None, 0.01]) == [pytest.approx(0.04), None, pytest.approx(0.03)], "an untested pair counts"
    assert holm([0.9, 0.8]) == [1, 1] and holm([]) == []
    rng = random.Random(0)
    p_values = [rng.random() ** 4 for _ in range(30)]
    corrected = holm(p_values)
    for level in (0.05, 0.2):  # step down: reject until the first that is too large
        rejected = set()
        for step, index in enumerate(sorted(range(30), key=p_values.__getitem__)):
            if p_values[index] > level / (30 - step):
                break
            rejected.add(index)
        assert {index for index in range(30) if corrected[index] <= level} == rejected


def test_equal_methods_are_seldom_told_apart():
    rng = np.random.default_rng(2)
    layout_of = layout((8, 8, 4, 4))
    design = Design(*layout_of)
    draws = 300
    wrong = 0
    for _ in range(draws):
        logs = [simulated(rng, *layout_of, 0.5) for _ in range(5)]
        means = [design.estimate(values).value for values in logs]
        assert max(map(abs, means)) < 5
        wrong += any(pair.closer is not None for pair in compare_all(design, logs))
    assert wrong / draws <= 0.08, "at most 5 % of tables, all pairs together"


def test_a_rank_counts_those_that_are_certainly_better_and_worse():
    layout_of = layout((8, 8))
    design = Design(*layout_of)
    rng = np.random.default_rng(4)
    hard = rng.normal(size=len(layout_of[0]))
    logs = [hard + shift + 0.3 * rng.normal(size=len(hard)) for shift in (0, 0.01, 1, 3)]
    pairs = compare_all(design, logs)
    found = {(pair.first, pair.second): pair.closer for pair in pairs}
    assert found == {(0, 1): None, (0, 2): 0, (0, 3): 0, (1, 2): 1, (1, 3): 1, (2, 3): 2}
    places = ranks([0, 0.01, 1, 3], pairs)
    assert places == [(1, 1, 2), (2, 1, 2), (3, 3, 3), (4, 4, 4)]


# Tables of known truth

MODELS = {"": ("big", 8), "second": ("small", 8), "third": ("slow", 4)}
"""By folder within the results: a model and its windows of each text."""
FACTORS = {"Oracle": 1.0, "Near": 0.5, "Alike": 0.51, "Far": 4.0}
METHODS = {"Oracle": "oracle", "Near": "infinigen2", "Alike": "twilight", "Far": "h2o", "Full cache": "full"}
RIGHT = {"Oracle": 7, "Near": 8, "Alike": 8, "Far": 2, "Full cache": 8}
"""Of 8 questions on a context."""


def row_of(model: str, label: str, **columns: Any) -> TableRow:
    """What all tables of the board have."""
    return {
        "experiment": "board", "model": model, "method": METHODS.get(label, "quest"), "codec": "", "label": label,
        "settings": "budget=0.1", "asked_budget": 0.1, "dense_layers": 0, "budget": 0.1, "device_frac": 0.15,
        "resident_frac": 0.05, "source": "measured", "shipped": "yes", "run_id": "0" * 16,
    } | columns  # fmt: skip


def window_rows(model: str, count: int, labels: Iterable[str] = FACTORS, **columns: Any) -> list[TableRow]:
    """Windows whose KL is `FACTORS` times the oracle's, but for noise of a hundredth that differs by place."""
    found = []
    for label, text, place in itertools.product(labels, ("book", "code"), range(count)):
        rng = random.Random(f"{text}/{place * 8 // count}")
        base = 0.01 * math.exp(rng.gauss(0, 1)) * (1 + 0.1 * len(model))
        noise = random.Random(f"{label}/{text}/{place * 8 // count}/{model}").gauss(0, 0.01)
        window = {"seq_len": 1024, "text": text, "window": place, "place": place / count}
        window["kl_nats"] = base * FACTORS.get(label, 2.0) * math.exp(noise)
        found.append(row_of(model, label) | window | columns)
    return found


FULL = {"asked_budget": None, "dense_layers": None, "budget": 1.0}


def answer_rows(model: str, labels: Iterable[str] = RIGHT, contexts: int = 4, **columns: Any) -> list[TableRow]:
    found = []
    for label, task, context in itertools.product(labels, ("kv_recall", "passkey"), range(contexts)):
        right = RIGHT[label] - (context % 2 if label == "Far" else 0)
        asked = {"task": task, "context_id": context, "right": right, "asked": 8, "prompt_len": 340}
        found.append(row_of(model, label) | asked | (FULL if label == "Full cache" else {}) | columns)
    return found


def put(folder: Path, name: str, rows: Sequence[TableRow]) -> None:
    shape = columns.TABLES[SHAPES[name]]
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    (folder / "tables" / f"{name}.csv").write_text(columns.render_csv(shape, rows))


def add(folder: Path, name: str, rows: Sequence[TableRow]) -> None:
    """Further rows in a table that is there."""
    put(folder, name, [*read_table(folder / "tables" / f"{name}.csv"), *rows])


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


def made(results: Path, name: str = "board-methods") -> list[TableRow]:
    """The rows of a table; of `board-methods` those of the first board."""
    board.write(results)
    rows = read_table(results / "tables" / f"{name}.csv")
    return first_board(rows) if name == "board-methods" else rows


def by_label(rows: Iterable[TableRow]) -> dict[str, TableRow]:
    return {row["label"]: row for row in rows}


def test_the_table_finds_what_is_known(results):
    rows = by_label(made(results))
    assert list(rows) == ["Near", "Alike", "Oracle", "Far", "Full cache"]
    for label, factor in FACTORS.items():
        row = rows[label]
        assert row["ratio"] == pytest.approx(factor, rel=0.02) and row["num_windows"] == 40
        assert row["num_places"] == 16 and row["num_models"] == 3 and row["model"] == "big, small, slow"
        assert (row["budget_low"], row["budget_high"], row["device_frac_high"]) == (0.1, 0.1, 0.15)
        if label != "Oracle":
            assert row["ratio_low"] < row["ratio"] < row["ratio_high"] < 1.05 * row["ratio"]
            assert row["degrees"] == 2, "models less one"
    assert rows["Oracle"]["ratio"] == 1 and rows["Oracle"]["ratio_low"] is None
    assert [(row["rank"], row["rank_low"], row["rank_high"]) for row in rows.values()][2:] == [
        (3, 3, 3), (4, 4, 4), (None, None, None),
    ]  # fmt: skip
    near = rows["Near"]
    unseen = pytest.approx(1 - 0.05 ** (1 / 8))
    assert (near["answers_difference"], near["answers_difference_high"]) == (0, unseen), "of 8 contexts"
    far = rows["Far"]
    assert far["answers_difference"] == pytest.approx(-6.5 / 8) and near["num_questions"] == 192
    wider = far["answers_difference"] - far["answers_difference_low"]
    assert wider > 9 / 192, "three models lose alike, and their contexts do not"
    assert rows["Far"]["num_contexts"] == 8, "contexts of one task on three models are one cluster each"
    full = rows["Full cache"]
    assert full["ratio"] is None and full["answers"] == pytest.approx(1) and "full cache itself" in full["apart"]
    without_steps = (results / "board.md").read_text().partition("\n## ")[2]
    assert near["step_s"] is None and "decode step" not in without_steps


def test_each_model_has_a_board_like_that_of_its_own_results(results, tmp_path_factory):
    board.write(results)
    rows = read_table(results / "tables" / "board-methods.csv")
    boards = columns.grouped(rows, lambda row: row["over"])
    assert list(boards) == ["all models", "big", "small", "slow"]
    for folder, (model, _) in MODELS.items():
        alone = tmp_path_factory.mktemp("alone")
        shutil.copytree(results / folder / "tables", alone / "tables")
        assert made(alone) == boards[model]
        rows = read_table(alone / "tables" / "board-methods.csv")
        assert {row["over"] for row in rows} == {model}, "one board, not two"
    assert "small, budget 10 %" in (results / "tables" / "board-methods.md").read_text()
    assert "small, budget 10 %" not in (results / "board.md").read_text()


def step_row(model: str, label: str, **columns: Any) -> TableRow:
    """A timed step of 10 ms compute and 1 MB over a link of 100 MB/s, which waits for half of the bytes."""
    step = {"platform": "cpu", "batch_size": 4, "prompt_len": 1024, "gen_len": 24, "source": "emulated"}
    step |= {"compute_s": 0.010, "link_bytes": 1e6, "late_bytes": 5e5, "link_bytes_per_s": 1e8, "step_s": 0.0151}
    return row_of(model, label) | step | {"budget": 0.08} | columns


def test_a_step_is_the_timed_one_or_follows_from_it(results):
    """Of the model with the most timed steps, at windows as long as its prompts, with as many dense layers."""
    steps = [step_row("small", "Near"), step_row("small", "Near", batch_size=8, step_s=8.0)]
    steps += [step_row("small", "Alike", dense_layers=1), step_row("small", "Far", step_s=0.02)]
    put(results, STEPS, [step_row("big", "Near", step_s=9.0)])
    put(results / "second", STEPS, steps)
    add_windows(results, ["Oracle", "Near"], seq_len=4096)
    add_windows(results, ["Oracle", "Near"], asked_budget=0.05, budget=0.04)
    coded = {"label": "Far + int8", "codec": "int8"}
    add_windows(results, ["Far"], settings="budget=0.1, group_size=16", **coded)
    add(results, STEPS, [step_row("small", "Far", step_s=0.007) | coded])
    found = {}
    for row in made(results):
        found[row["label"], row["asked_budget"], row["seq_len"]] = row["step_s"], row["step_source"]
        assert row["step_on"] in ("", "small (cpu), batch 4, prompts of 1,024 tokens")
    assert found["Near", 0.1, 1024] == (0.0151, "emulated") and found["Far", 0.1, 1024] == (0.02, "emulated")
    assert found["Far + int8", 0.1, 1024] == (0.007, "modelled"), "in groups of another length"
    half_late = 0.0025  # of half the bytes, 5 ms, half are waited for
    assert found["Near", 0.05, 1024] == (pytest.approx(0.0151 + (0.010 + half_late) - (0.010 + 0.005)), "modelled")
    for key in (("Alike", 0.1, 1024), ("Oracle", 0.1, 1024), ("Near", 0.1, 4096)):
        assert found[key] == (None, ""), "not timed like this"
    page = (results / "board.md").read_text()
    assert "12.6‡" in page and "Decode step: small (cpu), batch 4, prompts of 1,024 tokens, over an" in page


def test_a_front_has_the_methods_that_none_beats_at_a_cost():
    """Against a plain search over all pairs, with what counts as equal."""
    rng = random.Random(0)
    rows = []
    for number in range(60):
        budget = rng.choice([0.05, 0.1, 0.104])
        costs = {"budget": budget, "device_frac": rng.random(), "resident_frac": rng.random()}
        row = {f"{name}_{end}": value for name, value in costs.items() for end in ("low", "high")}
        row |= {"method": rng.choice(["quest", "h2o", *ORACLES]), "apart": rng.choice(["", "", "lacks x"])}
        row["family"] = "evicts" if row["method"] == "h2o" else "retrieves"
        step = rng.choice([None, rng.uniform(0.1, 0.11)])
        rows.append(row | {"kl_nats": rng.random(), "seq_len": rng.choice([1, 2]), "step_s": step, "label": number})
    margins = {"link": (0.01, 0), "link + device": (0, 0), "resident": (0, 0), "step time": (0, 0.01)}
    assert list(margins) == list(COSTS)

    def cost(row: TableRow, name: str) -> float:
        step = row["step_s"] or math.inf
        link, device, resident = row["budget_low"], row["device_frac_low"], row["resident_frac_low"]
        moved = device if row["family"] == "evicts" else link + device  # what is kept lies on the device
        return dict(zip(COSTS, (link, moved, resident, step), strict=True))[name]

    found = with_fronts(rows)
    assert any("link, link + device" in row["front"] for row in found)
    possible = [row for row in rows if not row["apart"] and row["method"] not in ORACLES]
    for row, of_row in zip(found, rows, strict=True):
        closer = [
            other for other in possible
            if other["seq_len"] == of_row["seq_len"] and other["kl_nats"] < of_row["kl_nats"]
        ]  # fmt: skip
        expected = []
        for name, (absolute, relative) in margins.items():
            own = cost(of_row, name)
            if of_row in possible and own < math.inf:
                limit = own * (1 + relative) + absolute
                expected += [name] if all(cost(other, name) > limit for other in closer) else []
        assert row["front"] == ", ".join(expected), of_row["label"]


def test_pairs_say_who_is_closer(results):
    rows = made(results, "board-pairs")
    assert len(rows) == 6 == len({(row["label"], row["other"]) for row in rows})
    for row in rows:
        expected = FACTORS[row["label"]] / FACTORS[row["other"]]
        assert row["ratio"] == pytest.approx(expected, rel=0.03) and row["p_holm"] >= row["p"]
        closest = min(row["label"], row["other"], key=FACTORS.__getitem__)
        assert row["closer"] == closest or {row["label"], row["other"]} == {"Near", "Alike"}


def test_numbers_of_each_model_and_text_have_their_counts(results):
    rows = made(results, "board-models")
    (row,) = (row for row in rows if (row["model"], row["label"], row["domain"]) == ("slow", "Far", "book"))
    own = [row for row in window_rows("slow", 4) if row["label"] == "Far" and row["text"] == "book"]
    assert row["value"] == pytest.approx(statistics.fmean(row["kl_nats"] for row in own)) and row["count"] == 4
    assert row["versus"] == pytest.approx(4, rel=0.05) and row["versus_low"] < 4 < row["versus_high"]
    of_far = {(row["model"], row["domain"]): row for row in rows if row["label"] == "Far"}
    assert of_far["all models", "all texts"]["count"] == 40 and of_far["big", "all tasks"]["count"] == 64
    assert of_far["big", "kv_recall"]["versus"] == pytest.approx(-6.5 / 8)
    text = (results / "tables" / "board-models.md").read_text()
    assert "## slow, budget 10 %, windows of 1,024 tokens" in text and ", 64 |" in text


def test_the_page_has_readmes_rows_all_methods_and_the_claims(results):
    add(results, TEXTS, window_rows("big", 8, ["Paged"], method="quest", budget=0.13))
    page = board.write(results).read_text()
    titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
    setting = "budget 10 %, windows of 1,024 tokens"
    by_memory = "by memory, windows of 1,024 tokens"
    assert titles == [f"README rows: {setting}", setting, f"{setting}: not compared", by_memory, "claims"]
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines[2:4]] == ["Full cache", "Oracle"], "in README's order"
    assert "40 windows at 16 places of the texts, on 3 models (big, small, slow)" in page
    assert "192 questions on 8 contexts; the full cache has 100.0 % right" in page
    (paged,) = (line for line in lines if line.startswith("| Paged"))
    assert "cannot have this budget: reads 13.0 %; lacks small, slow" in paged
    add_windows(results, seq_len=4096)
    page = board.write(results).read_text()
    assert page.count("## README rows") == 2 and "windows of 4,096 tokens" in page
    assert page.count("questions on") == 2 and "was not asked" not in page, "those of the shorter windows too"


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
    row = by_label(made(results))["Paged"]
    assert row["apart"].startswith(apart) and row["rank"] is None and row["asked_budget"] == 0.1
    assert row["ratio"] == pytest.approx(2, rel=0.02), "shown, not compared"
    assert changed["budget"] in (row["budget_low"], row["budget_high"])
    assert read_table(results / "tables" / "board-pairs.csv") == before


# Odd tables


def test_a_model_that_lacks_a_method_or_windows_is_named(results):
    for folder, (model, count) in MODELS.items():
        own = window_rows(model, count, ["Paged"])
        if model == "small":
            own = []
        if model == "slow":
            own = [row for row in own if row["text"] == "code" or row["window"] != 1]
        add(results / folder, TEXTS, own)
    row = by_label(made(results))["Paged"]
    assert row["apart"] == "lacks small, 1 of 4 of book on slow" and row["num_windows"] == 23
    assert row["model"] == "big, slow" and row["ratio"] == pytest.approx(2, rel=0.02)


def test_a_method_on_one_further_model_leaves_the_table_as_it_was(results):
    add_windows(results, ["Paged"])
    before = made(results)
    put(results / "own", TEXTS, window_rows("own", 8, ["Oracle", "Mine"], shipped=""))
    put(results / "own", ANSWERS, answer_rows("own", ["Full cache"]))
    put(results / "asked", TEXTS, [])
    put(results / "asked", ANSWERS, answer_rows("asked"))
    after = by_label(made(results))
    for row in before:
        assert after[row["label"]] == row
    assert after["Mine"]["apart"] == "lacks big, small, slow"
    assert re.search("Not in the means: (own, asked|asked, own)", (results / "board.md").read_text())
    of_models = read_table(results / "tables" / "board-models.csv")
    of_own, of_asked = ([row for row in of_models if row["model"] == model] for model in ("own", "asked"))
    assert {row["label"] for row in of_own} >= {"Oracle", "Mine"} and {row["count"] for row in of_own} >= {8, 16}
    assert {row["measure"] for row in of_asked} == {"answers"} and len(of_asked) > 3, "a model without texts"


def test_one_text_and_one_window_have_no_interval(tmp_path):
    one = [row for row in window_rows("big", 1) if row["text"] == "book"]
    put(tmp_path, TEXTS, one)
    rows = by_label(made(tmp_path))
    assert rows["Near"]["ratio"] == pytest.approx(0.5, rel=0.05) and rows["Near"]["ratio_low"] is None
    assert {(row["rank_low"], row["rank_high"]) for row in rows.values()} == {(1, 4)}, "nothing is told apart"
    assert {row["answers"] for row in rows.values()} == {None}
    page = (tmp_path / "board.md").read_text()
    assert "the full cache was not asked" in page and "1 windows at 1 places" in page
    pairs = read_table(tmp_path / "tables" / "board-pairs.csv")
    assert {row["p"] for row in pairs} == {None} and {row["closer"] for row in pairs} == {""}
    claims = read_table(tmp_path / "tables" / "board-claims.csv")
    assert {row["verdict"] for row in claims} == {"not measured"}


def test_equal_kl_is_a_ratio_of_one_and_no_difference(results):
    add_windows(results, ["Near"], label="Twin", method="loki")
    rows = by_label(made(results))
    assert rows["Twin"]["ratio"] == rows["Near"]["ratio"] and rows["Twin"]["rank"] == rows["Near"]["rank"] == 1
    pairs = read_table(results / "tables" / "board-pairs.csv")
    (pair,) = (row for row in pairs if {row["label"], row["other"]} == {"Near", "Twin"})
    assert (pair["ratio"], pair["ratio_low"], pair["p"], pair["closer"]) == (1, 1, 1, "")


def test_a_kl_of_zero_has_no_ratio(results):
    rows = read_table(results / "tables" / f"{TEXTS}.csv")
    for row in rows:
        if row["label"] == "Near" and row["window"] == 3 and row["text"] == "book":
            row["kl_nats"] = -1e-9
    put(results, TEXTS, rows)
    row = by_label(made(results))["Near"]
    assert row["apart"] == "its KL is 0 in 1 of 40 windows, which has no ratio" and row["ratio"] is None
    for row in rows:
        if row["label"] == "Oracle":
            row["kl_nats"] = 0.0
    put(results, TEXTS, rows)
    rows_of_page = made(results)
    assert {row["ratio"] for row in rows_of_page} == {None}, "no oracle to compare with"
    assert {row["apart"] for row in rows_of_page} == {"the oracle's KL is 0 in 16 of 40 windows"}


def test_without_the_oracle_nothing_is_compared(tmp_path):
    put(tmp_path, TEXTS, window_rows("big", 4, ["Near", "Far"]))
    rows = made(tmp_path)
    assert {row["apart"] for row in rows} == {"the oracle has no windows here"} and len(rows) == 2
    assert read_table(tmp_path / "tables" / "board-pairs.csv") == []
    assert "Nothing was compared yet" in (tmp_path / "tables" / "board-pairs.md").read_text()


def test_two_numbers_of_dense_layers_are_two_lines(tmp_path):
    put(tmp_path, TEXTS, [*window_rows("big", 4), *window_rows("big", 4, ["Far"], dense_layers=2)])
    rows = by_label(made(tmp_path))
    assert {"Far, 0 dense layers", "Far, 2 dense layers"} <= set(rows)
    assert rows["Far, 2 dense layers"]["dense_numbers"] == "2"


def of_text(**columns: Any) -> tuple[str, list[TableRow]]:
    return TEXTS, window_rows("big", 1, ["Far"], text="a", **columns)


def of_answers(**columns: Any) -> tuple[str, list[TableRow]]:
    return ANSWERS, answer_rows("big", ["Far"], 1, **columns)


IMPOSSIBLE = {
    "kl_nats=-0.5: must be from 0 to inf": of_text(kl_nats=-0.5),
    "asked_budget=16: must be from 0 to 1": of_text(asked_budget=16.0),
    "right=999 of asked=8": of_answers(right=999),
    "asked=0: must be from 1 to inf": of_answers(right=0, asked=0),
    "two rows of Far on big are the same": of_answers(task="one"),
}


@pytest.mark.parametrize("said", IMPOSSIBLE)
def test_a_number_that_cannot_be_is_refused(said, tmp_path, capsys):
    put(tmp_path, TEXTS, window_rows("big", 4))
    put(tmp_path, *IMPOSSIBLE[said])
    error = refusal_of(board.main, [str(tmp_path)], capsys)
    assert error.startswith(f"{tmp_path}/tables/board-") and said in error


def test_what_cannot_be_read_is_one_line(tmp_path, capsys):
    def refused(said: str) -> None:
        assert re.search(said, refusal_of(board.main, [str(tmp_path)], capsys))

    refused(r"no tables/board-texts.csv in it or in a folder within it; `.*experiment=board` makes one")
    put(tmp_path, TEXTS, [*window_rows("big", 4), *window_rows("big", 4, ["Far"], method="tova", run_id="2")])
    refused(r"label=Far: two methods have it \(h2o, tova\); give each its own")
    path = tmp_path / "tables" / f"{TEXTS}.csv"
    path.write_text(path.read_text().replace("0.15", "much", 1))
    refused(r"board-texts.csv: not a table of results")
    path.write_text(columns.render_csv(columns.BOARD_ANSWERS, answer_rows("big")))
    refused(r"board-texts.csv: not a table of experiment=board \(it has other columns\)")
    assert "no tables/board-texts.csv" in refusal_of(board.main, [str(tmp_path / "none")], capsys)
    assert not (tmp_path / "board.md").exists()


# Claims


def claim(**fields: Any) -> dict[str, Any]:
    return {"claim": "it is so", "of": "KL", "label": "Near", "other": "Oracle", "budgets": [0.1]} | fields


@pytest.fixture
def judged(results, monkeypatch, tmp_path) -> Callable[..., list[TableRow]]:
    """Asks for the verdicts of a claim."""
    says = tmp_path / "says.yaml"
    monkeypatch.setattr(board, "SAYS", says)

    def judge(**fields: Any) -> list[TableRow]:
        says.write_text(yaml.safe_dump({"readme": {"budget": 0.1, "methods": []}, "claims": [claim(**fields)]}))
        return made(results, "board-claims")

    return judge


@pytest.mark.parametrize(
    ("fields", "verdicts"),
    [
        ({}, {"holds"}),
        ({"at_most": 0.4}, {"does not hold"}),
        ({"at_most": 0.5}, {"not told apart"}),
        ({"label": "Far"}, {"does not hold"}),
        ({"label": "Nobody"}, {"not measured"}),
        ({"budgets": [0.2]}, {"not measured"}),
        ({"of": "answers", "other": "Full cache"}, {"not told apart"}),
        ({"of": "answers", "other": "Full cache", "less": 0.35}, {"holds"}),
        ({"of": "answers", "label": "Far", "other": "Full cache", "less": 0.05}, {"does not hold"}),
    ],
)
def test_a_claim_is_judged_on_each_model(results, judged, fields, verdicts):
    rows = judged(**fields)
    assert {row["verdict"] for row in rows} == verdicts
    if verdicts != {"not measured"}:
        assert [row["model"] for row in rows] == ["big", "small", "slow", "all models"]
        page = (results / "board.md").read_text()
        assert f"{min(verdicts)}: " in page and re.search(r"\| +all 3 models +\|", page)


@pytest.mark.parametrize("others", [{"asked": 16}, {"prompt_len": 950}])
def test_a_claim_at_another_budget_and_other_questions_are_not_judged(results, others):
    put(results, TEXTS, [*window_rows("big", 8, ["Oracle"]), *window_rows("big", 8, ["InfiniGen2"], budget=0.2)])
    put(results, ANSWERS, [*answer_rows("big", ["Full cache"]), *answer_rows("big", ["Far"], **others)])
    rows = made(results, "board-claims")
    beside_oracle = (row for row in rows if row["label"] == "InfiniGen2" and row["other"] == "Oracle")
    assert {row["verdict"] for row in beside_oracle} == {"another budget", "not measured"}
    of_far = [row for row in read_table(results / "tables" / "board-models.csv") if row["label"] == "Far"]
    assert not [row for row in of_far if row["model"] == "big" and row["measure"] == "answers"]


def test_a_claim_that_fails_on_one_model_names_the_others(results, judged):
    rows = read_table(results / "third" / "tables" / f"{TEXTS}.csv")
    for row in rows:
        row["kl_nats"] *= 3 if row["label"] == "Near" else 1
    put(results / "third", TEXTS, rows)
    verdicts = {row["model"]: row["verdict"] for row in judged()}
    assert verdicts == {"big": "holds", "small": "holds", "slow": "does not hold", "all models": "not told apart"}
    (line,) = (line for line in (results / "board.md").read_text().splitlines() if line.startswith("| it is so"))
    assert [cell.strip() for cell in line.split("|")][6:9] == ["big, small", "-", "slow"]


@pytest.mark.parametrize(
    "entries",
    ["text", [3], [{"claim": "a"}], [claim(of="speed")], [claim(at_most=0)], [claim(less=1)], [claim(budgets=1)],
     [claim(of="answers", at_most=2)]],
)  # fmt: skip
def test_claims_that_are_none_are_refused(entries):
    with pytest.raises(UserError, match="claims: "):
        board.claims_of(entries)


def test_the_claims_of_the_project_name_methods_that_there_are():
    says = yaml.safe_load(board.SAYS.read_text())
    named = set(says["readme"]["methods"])
    for found in board.claims_of(says["claims"]):
        named |= {found.label, found.other}
    labels = {load([f"method={path.stem}"]).label for path in (CONF_DIR / "method").glob("*.yaml")}
    over_int8 = compose(["experiment=board"]).sweep.over_int8
    labels |= {load([f"method={name}", "codec=int8", "group_size=16"]).label for name in over_int8}
    assert named <= labels


# Records, shipped tables, figure and report


def save_windows(results: Path, *overrides: str, kl: Sequence[float] = (0.1, 0.3), **fields: Any) -> None:
    metrics = TEXT_METRICS | shares(0.1)
    windows = [{"place": at / len(kl), "kl_nats": value, "budget": 0.1} for at, value in enumerate(kl)]
    settings = ["experiment=board", "corpus=code", *overrides]
    save(results, settings, {"code": metrics}, samples={"windows": windows}, **fields)


def test_records_become_windows_and_answers(tmp_path):
    save_windows(tmp_path, "method=h2o", "budget=nearest:0.1")
    save_windows(tmp_path, "method=full", kl=(0.0, 0.0))
    given = answers([1, 0, 1, 1])
    task = {"acc": 0.75, "acc_stderr": 0.1, "num_samples": 4, "num_fewshot": 0} | shares(0.1)
    save(
        tmp_path, ["experiment=board", "kind=tasks", "method=h2o", "budget=nearest:0.1"], {"passkey": task},
        samples={"passkey": [sample | {"context_tokens": 300 - at} for at, sample in enumerate(given)]},
    )  # fmt: skip
    tables.update(tmp_path, "board")
    rows = read_table(tmp_path / "tables" / f"{TEXTS}.csv")
    assert [(row["label"], row["window"], row["place"], row["kl_nats"]) for row in rows] == [
        ("Full cache", 0, 0, 0), ("Full cache", 1, 0.5, 0), ("H2O", 0, 0, 0.1), ("H2O", 1, 0.5, 0.3),
    ]  # fmt: skip
    h2o = rows[2]
    assert (h2o["text"], h2o["seq_len"], h2o["asked_budget"], h2o["resident_frac"]) == ("code", 1024, 0.1, 0.02)
    assert h2o["model"] == "smollm2-135m" and "budget=0.1" in h2o["settings"] and h2o["shipped"] == ""
    rows = read_table(tmp_path / "tables" / f"{ANSWERS}.csv")
    assert [(row["task"], row["context_id"], row["right"], row["asked"], row["prompt_len"]) for row in rows] == [
        ("passkey", 0, 1, 2, 300), ("passkey", 1, 2, 2, 298),
    ]  # fmt: skip


def test_a_timed_record_becomes_a_step_under_the_name_of_its_method(tmp_path):
    chosen = ["method=infinigen2", "budget=nearest:0.1", "codec=int8"]
    save_windows(tmp_path, *chosen)
    save_windows(tmp_path, *chosen, "group_size=16", "label=other groups")
    timed = {"gen_len": 11, "decode_s": 0.1, "exposed_transfer_s": 0.02, "h2d_bytes": 10_000, "late_bytes": 5_000}
    timed = LATENCY_METRICS | {"link_bytes_per_s": 1e9, "budget": 0.09} | timed
    save(tmp_path, ["experiment=board", "kind=latency", *chosen], timed)
    save(tmp_path, ["experiment=board", "kind=latency", "method=full"], timed | {"h2d_bytes": None})
    tables.update(tmp_path, "board")
    (row,) = read_table(tmp_path / "tables" / f"{STEPS}.csv")
    assert (row["label"], row["method"], row["codec"], row["asked_budget"]) == (
        "InfiniGen2 + int8", "infinigen2", "int8", 0.1,
    )  # fmt: skip
    assert row["step_s"] == pytest.approx(0.01) and row["compute_s"] == pytest.approx(0.008)
    assert (row["link_bytes"], row["late_bytes"], row["budget"]) == (1000, 500, 0.09)


def test_a_record_that_is_damaged_is_left_out_and_named(tmp_path, caplog):
    save_windows(tmp_path, "method=h2o")
    save_windows(tmp_path, "method=streaming", kl=("much",))
    tables.update(tmp_path, "board")
    assert {row["label"] for row in read_table(tmp_path / "tables" / f"{TEXTS}.csv")} == {"H2O"}
    assert "damaged record" in caplog.text and "left out of board-texts" in caplog.text


def test_a_run_replaces_its_shipped_windows_and_no_others(tmp_path):
    shipped = [
        window_rows("smollm2-135m", 4, [label], method=method, settings="")
        for label, method in (("H2O", "h2o"), ("Near", "infinigen2"))
    ]
    put(tmp_path, TEXTS, [row | {"text": "code"} for row in itertools.chain(*shipped) if row["text"] == "code"])
    save_windows(tmp_path, "method=h2o", "budget=nearest:0.1", "method.dense_layers=0")
    tables.update(tmp_path, "board")
    rows = read_table(tmp_path / "tables" / f"{TEXTS}.csv")
    assert [row["kl_nats"] for row in rows if row["label"] == "H2O"] == [0.1, 0.3]
    assert sum(row["label"] == "Near" and row["shipped"] == "yes" for row in rows) == 4


def test_shipping_marks_what_was_measured(results):
    for name in (TEXTS, ANSWERS):
        path = results / "tables" / f"{name}.csv"
        put(results, name, [row | {"shipped": ""} for row in read_table(path)])
    board.write(results)
    before = (results / "tables" / "board-methods.csv").read_bytes()
    tables.ship(results)
    for name in (TEXTS, ANSWERS):
        assert {row["shipped"] for row in read_table(results / "tables" / f"{name}.csv")} == {"yes"}
    assert (results / "tables" / "board-methods.csv").read_bytes() == before, "made anew by the board"


def test_each_table_is_read_as_it_was_written(results):
    board.write(results)
    for name, shape in board.SHAPES.items():
        path = results / "tables" / f"{name}.csv"
        assert shape_of(path.read_text().splitlines()[0].split(",")) == shape
        rows = read_table(path)
        assert columns.render_csv(columns.TABLES[shape], rows) == path.read_text()
    first = {path: path.read_bytes() for path in results.rglob("board*")}
    board.write(results)
    assert all(path.read_bytes() == content for path, content in first.items())


def test_the_figure_has_a_panel_a_budget_and_a_line_a_method(results):
    add_windows(results, seq_len=4096)
    add_windows(results, asked_budget=0.05, budget=0.05)
    add_windows(results, ["Paged"], budget=0.2)
    board.write(results)
    with style.applied():
        figure = draw(data.Tables(results / "tables"), "board")
        assert figure is not None
        figure.draw_without_rendering()
    small, large = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["budget 5 %", "budget 10 %"]
    labels = [tick.get_text() for tick in large.get_yticklabels()]
    assert labels == ["Paged", "Far", "Oracle", "Alike", "Near"], "the closest on top, below what is not compared"
    xs = sorted(float(bar.lines[0].get_xdata()[0]) for bar in large.containers)
    assert xs == pytest.approx([0.5, 0.5, 0.51, 0.51, 1, 1, 2, 4, 4], rel=0.03)
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} >= {"windows of 1,024 tokens", "not compared"}
    notes = " ".join(text.get_text() for text in figure.findobj(Text))
    assert "3 models, 40 windows of 1,024 tokens, 40 windows of 4,096 tokens" in notes
    assert draw(data.Tables(results / "nothing" / "tables"), "board") is None


def test_the_figure_of_ten_methods_has_a_line_each_over_all_models(results, monkeypatch):
    monkeypatch.setitem(style.REGISTRY, "budget", ["Oracle", "Near", "Far"])
    board.write(results)
    assert budget(data.Tables(results / "tables"), "budget") is None, "of one budget there is no line"
    add_windows(results, asked_budget=0.05, budget=0.05)
    board.write(results)
    table = read_table(results / "tables" / "board-methods.csv")
    with style.applied():
        figure = budget(data.Tables(results / "tables"), "budget")
        assert figure is not None
        figure.draw_without_rendering()
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == (style.BUDGET_AXIS, style.KL_AXIS)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["5", "10"]
    lines = [each for each in axes.containers if not each.get_label().startswith("_")]
    assert {line.get_label() for line in lines} == {"Oracle", "Near", "Far"}
    for bars in lines:
        of_all = [row for row in table if row["over"] == table[0]["over"] and row["label"] == bars.get_label()]
        kl = {row["asked_budget"]: row["kl_nats"] for row in of_all}
        assert list(bars.lines[0].get_ydata()) == pytest.approx([kl[0.05], kl[0.1]])
        assert list(bars.lines[0].get_xdata()) == [5, 10], "at its budgets"
    intervals = [each for each in axes.containers if each not in lines]
    assert len(intervals) == 2, "the oracle's ratio to itself has none"
    for interval in intervals:
        for x, share in zip(interval.lines[0].get_xdata(), (5, 10), strict=True):
            assert 0 < abs(math.log(x / share)) <= 0.1, "beside its budget"


def test_the_report_has_a_section_of_it_and_the_library_of_its_explorer(results):
    board.write(results)
    report.write_report(results)
    page = Page((results / "report.html").read_text())
    assert "vegaEmbed" in page.packed["library"]
    text = page.text("board")
    assert "Every method beside the oracle" in text and "Table board-claims" in text and "In second" in text

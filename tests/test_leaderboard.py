"""The leaderboard: its sweep, its rows, its pages and marks, and the fronts."""

import math
import re
import shutil
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from test_own_codec import HEAD as CODEC_HEAD
from test_own_codec import MINE as CODEC
from test_tables import LATENCY_METRICS, answers, save

from harness.errors import UserError
from harness.model.tiny import tiny_model
from harness.results import tuned
from harness.results import write as tables
from harness.results.columns import BOARD, TableRow, names, read_table
from harness.results.fronts import REFERENCES, fronts
from harness.results.leaderboard import complete
from harness.results.leaderboard import write as write_leaderboard
from harness.results.metrics import BOARD_METRICS
from harness.results.pages import sheets_of
from harness.results.samples import clustered_stderr
from harness.results.step_time import step_of, step_seconds
from harness.run import cli, new_method
from harness.run.compose import choices, compose
from harness.run.sweep import read_plan
from harness.settings.config import RunConfig
from harness.settings.schema import CONF_DIR, options
from plots import data, style
from plots.leaderboard import draw as draw_leaderboard
from tests.composed import load
from tests.runs import letters
from tests.tokens import byte_tokenizer

ROOT = Path(__file__).resolve().parent.parent

COMMON = ["num_windows=2", "num_samples=4", "tasks=[kv_recall,passkey]"]
OF_TASKS = ("tasks", "num_samples", "experiment")
WHEN = {"full": "kept", "int4": "kept", "streaming": "kept", "infinigen": "previous_layer", "oracle": "true_scores"}


def save_method(results: Path, method: str, asked: float | None, *, kl: float, hits: str, **step: Any) -> None:
    """Records of a method at a size: a text, four questions of each task (`hits`, two to a context), a step."""
    chosen = [*COMMON, f"method={method}", *([] if asked is None else [f"size=nearest:{asked}"])]
    about = {"when": WHEN[method], "text": method}
    read = (1.0 if method == "full" else 0.33) if asked is None else asked
    shares = {"size": step.pop("size", read), "device_frac": 0.3, "resident_frac": 0.1}
    windows = 4 * [{"nll": 2.5 + kl, "nll_full": 2.5}, {"nll": 3.5 + 2 * kl, "nll_full": 3.5}]
    fidelity = {"kl_nats": kl, "kl_nats_stderr": kl / 4, "top1_agreement": 1 - kl, "top1_agreement_stderr": 0.01}
    fidelity |= {"attention_error": kl / 2, "attention_error_stderr": 0.01}
    text = fidelity | shares | {"perplexity": 12.0, "num_samples": 8}
    scores = ["experiment=leaderboard-scores", *chosen]
    save(results, scores, {"offline": text}, samples={"windows": windows}, **about)
    task = shares | {"acc": hits.count("1") / len(hits), "acc_stderr": 0.125, "num_samples": len(hits)}
    both = dict.fromkeys(("kv_recall", "passkey"), task)
    sampled = dict.fromkeys(both, answers([float(hit) for hit in hits]))
    save(results, [*scores, "kind=tasks"], both, samples=sampled, **about)
    if step:
        metrics = LATENCY_METRICS | {"late_bytes": 0, "link_bytes_per_s": 1e9, "size": read} | step
        save(results, ["experiment=leaderboard-times", *chosen], metrics, **about)


STEP = {"gen_len": 11, "decode_s": 0.1, "exposed_transfer_s": 0.02, "h2d_bytes": 10 * 2**20}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Full cache, INT4, and three methods at a size: one above the upper reference in KL, one that missed its size."""
    folder = tmp_path_factory.mktemp("results")
    save_method(folder, "full", None, kl=0.0, hits="1111", **STEP)
    save_method(folder, "int4", None, kl=0.2, hits="1110", **STEP | {"decode_s": 0.05, "exposed_transfer_s": 0.0})
    save_method(folder, "oracle", 0.16, kl=0.15, hits="1110")
    save_method(folder, "streaming", 0.16, kl=0.5, hits="1000", **STEP | {"decode_s": 0.03})
    save_method(folder, "infinigen", 0.16, kl=0.05, hits="1000", **STEP | {"decode_s": 0.04})
    save_method(folder, "infinigen", 0.25, kl=0.04, hits="1100", size=0.3)
    for experiment in ("leaderboard-scores", "leaderboard-times"):
        tables.update(folder, experiment)
    return folder


@pytest.fixture
def other(results, tmp_path) -> Path:
    """A copy of the results, to be changed."""
    return Path(shutil.copytree(results, tmp_path / "other"))


def board(results: Path, name: str = "leaderboard") -> list[TableRow]:
    return read_table(results / "tables" / f"{name}.csv")


def row_of(rows: list[TableRow], label: str, size: float | None = 0.16) -> TableRow:
    (row,) = (row for row in rows if (row["label"], row["asked_size"]) == (label, size))
    return row


# The sweep


@contextmanager
def choosing(*few: str):
    """Sweeps over all methods with a few of them, as composing all takes a while."""
    OmegaConf.register_new_resolver("choices", lambda _, *without: [x for x in few if x not in without], replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("choices", choices, replace=True)


@pytest.fixture
def plan():
    """The leaderboard's plan with a few of the methods."""
    with choosing("full", "int4", "oracle", "quest"):
        yield read_plan(compose(["experiment=leaderboard"]).sweep, ["experiment=leaderboard"])


def test_every_method_is_in_the_sweep_and_the_frontier_measures_as_it_does():
    experiments = CONF_DIR / "experiment"
    names = "frontier", "leaderboard", "leaderboard-tasks"
    frontier, leaderboard, tasks = (OmegaConf.load(experiments / f"{name}.yaml").sweep for name in names)
    cells = OmegaConf.to_container(leaderboard)["runs"]
    assert [cell["method"] for cell in cells] == ["full", "${sweep.methods}"]
    asked = OmegaConf.to_container(leaderboard)
    assert asked["methods"] == "${choices:method,full,dsa,random,triattention}"
    assert choices("method") == options("method") and set(REFERENCES.values()) <= set(options("method"))
    assert choices("method", "full", "h2o") == [name for name in options("method") if name not in ("full", "h2o")]
    own = {name: value for name, value in {**leaderboard.settings, **tasks.settings}.items() if name not in OF_TASKS}
    assert dict(frontier.settings) == own | {"method.num_exempt_layers": 0}


OF_OFFICIAL_CODE = {"freekv": 1} | dict.fromkeys(
    ("doublesparsity", "infinigen", "infinigen-balanced", "infinigen-coded", "knorm", "quest", "turboquant2",
     "turboquant3", "turboquant4", "twilight"), 2,
)  # fmt: skip


@pytest.mark.parametrize("method", choices("method"))
def test_a_method_exempts_as_many_layers_as_its_official_code(method):
    default, given = (load([f"method={method}", *more]) for more in ([], ["method.num_exempt_layers=3"]))
    assert default.method.num_exempt_layers == OF_OFFICIAL_CODE.get(method, 0)
    assert given.method.num_exempt_layers == 3, "the command line wins"


def test_a_method_without_a_size_runs_once_a_number_of_exempt_layers(plan):
    cells = [(cell.method_name, cell.size, cell.method.num_exempt_layers) for cell in plan.cells]
    sized = product(("oracle", "quest"), (0.05, 0.1, 0.16), range(3))
    assert cells == [("full", None, 0), *product(["int4"], [None], range(3)), *sized]
    assert {cell.kind for cell in plan.cells} == {"perplexity"}


def test_tasks_and_steps_are_of_the_best_and_the_papers_number_of_exempt_layers(results, other):
    rows = board(results)
    quest = row_of(rows, "InfiniGen") | {"method": "quest", "label": "Quest", "asked_size": 0.1, "size": 0.1}
    far = {"size": 0.2, "asked_size": 0.05}
    rows += [exempt(quest, 0, 0.1), exempt(quest, 1, 0.2), exempt(quest, 2, 0.3)]
    rows += [exempt(quest, 0, 0.1, asked_size=0.05, size=0.05), exempt(quest, 2, 0.3, **far)]
    write_leaderboard(other, rows)
    asked = ["experiment=leaderboard-tasks", f"results_dir={other}"]
    plan = read_plan(compose(asked).sweep, asked)

    def of(kind: str) -> list[tuple[Any, ...]]:
        cells = [cell for cell in plan.cells if cell.kind == kind]
        return [(cell.method_name, cell.size, cell.method.num_exempt_layers) for cell in cells]

    asked = of("tasks")
    assert [cell for cell in asked if cell[0] == "quest"] == [("quest", 0.05, 0), ("quest", 0.1, 0), ("quest", 0.1, 2)]
    assert asked[0] == ("full", None, 0) and {("int4", None, 0), ("oracle", 0.16, 0)} <= {*asked}
    timed = [("full", None, 0), ("quest", 0.1, 0), ("quest", 0.1, 2), ("infinigen", 0.1, 2), ("streaming", 0.1, 0)]
    assert of("latency") == [*timed, ("int4", None, 0)], "each once, whatever its sizes"


def test_dense_layers_are_the_best_of_each_model_and_size(results, other, monkeypatch, tmp_path):
    """Those with the least KL of the numbers with which a method has the size; of a codec's rows none."""
    quest = row_of(board(results), "InfiniGen") | {"method": "quest", "label": "Quest", "asked_size": 0.1, "size": 0.1}
    rows = [exempt(quest, 0, 0.2), exempt(quest, 1, 0.1), exempt(quest, 2, 0.3)]
    rows += [exempt(quest, 2, 0.1, asked_size=0.05, size=0.05), exempt(quest, 1, 0.2, asked_size=0.05, size=0.05)]
    rows += [exempt(quest, 0, 0.01, model="gemma3-270m"), exempt(quest, 0, 0.01, codec="int8")]
    rows += [exempt(quest, layers, 1 / (1 + layers), method="kascade", size=0.3) for layers in (0, 1, 2)]
    write_leaderboard(other, rows)
    file = tmp_path / "tuned.yaml"
    file.write_text("mine: {h2o: {0.1: 1}}\nsmollm2-135m: {h2o: {0.1: 2}, quest: {0.16: 1}}\n")
    monkeypatch.setattr(tuned, "FILE", file)
    assert tuned.write([other]) == file
    model = quest["model"]
    assert tuned.read() == {
        "gemma3-270m": {"quest": {0.1: 0}},
        "mine": {"h2o": {0.1: 1}},
        model: {"h2o": {0.1: 2}, "quest": {0.05: 2, 0.1: 1, 0.16: 1}},
    }, "what the folder lacks stays"
    small, large = "nearest:0.05", "nearest:0.1"
    assert tuned.as_tuned(["quest"], [0.05, 0.1], model) == [["quest", small, 2], ["quest", large, 1]]
    assert tuned.as_tuned(["quest", "sparq"], [0.1], "gemma3-270m") == [["quest", large, 0], ["sparq", large, 0]]
    assert tuned.as_tuned(["h2o"], [0.1], "unknown") == [["h2o", large, 0]]
    with pytest.raises(UserError, match="no tables/leaderboard.csv"):
        tuned.write([tmp_path])


def test_evidence_runs_each_model_with_its_own_numbers(monkeypatch, tmp_path):
    file = tmp_path / "tuned.yaml"
    file.write_text("qwen2.5-coder-0.5b: {quest: {0.05: 2, 0.1: 1}}\nsmollm2-135m: {sparq: {0.1: 2}}\n")
    monkeypatch.setattr(tuned, "FILE", file)
    asked = ["experiment=evidence", "model=qwen2.5-coder-0.5b", "sweep.data_root=.", "sweep.methods=[quest]"]
    asked += ["sweep.long.methods=[quest]", "sweep.over_int8=[oracle,quest]", "sweep.long_over_int8=[quest]"]
    asked += ["sweep.tasks_over_int8=[oracle]"]
    with choosing("full", "quest", "int4", "sparq"):
        cells = read_plan(compose(asked).sweep, asked).cells
    quest = [("quest", 0.05, 2), ("quest", 0.1, 1)]
    oracle = [("oracle", 0.05, 0), ("oracle", 0.1, 0)]
    plain = [*quest, ("int4", None, 0), ("sparq", 0.05, 0), ("sparq", 0.1, 0)]
    full = ("full", None, 0)
    expected = [("code", 1024, *cell) for cell in [full, *plain, *oracle, *quest]]
    for of_length in ([full], plain, [*oracle, *quest]):
        expected += [(text, 1024, *cell) for text in ("book", "wikitext2") for cell in of_length]
    expected += [("tasks", 1024, *cell) for cell in [full, *quest, *oracle]]
    expected += [("code", 4096, *cell) for cell in [full, *quest, *quest]]
    for of_length in ([full], quest, quest):
        expected += [(text, 4096, *cell) for text in ("book", "wikitext2") for cell in of_length]
    assert [what_runs(cell) for cell in cells] == expected
    coded = [what_runs(cell)[2:] for cell in cells if cell.codec == "int8"]
    assert coded == [*oracle, *quest] * 3 + oracle + quest * 3, "the number of the plain row"
    assert {cell.group_size for cell in cells if cell.codec == "int8"} == {16}
    assert {cell.task.num_sentences for cell in cells} == {40}, "as long as the shorter windows"
    assert all(cell.corpus.spread for cell in cells) and {cell.seq_len - cell.prefill_len for cell in cells} == {64}


def test_the_shipped_numbers_are_those_of_the_shipped_leaderboards():
    found = tuned.read()
    for folder in ("results", "results/qwen2.5-coder-0.5b"):
        for model, methods in tuned.best_of(read_table(Path(folder) / "tables" / "leaderboard.csv")).items():
            for method, sizes in methods.items():
                assert found[model][method] == sizes, f"{method} on {model}"


def what_runs(cell: RunConfig) -> tuple[Any, ...]:
    text = cell.corpus.name if cell.kind == "perplexity" else cell.kind
    return text, cell.seq_len, cell.method_name, cell.size, cell.method.num_exempt_layers


@pytest.mark.parametrize(
    ("model", "counts"),
    [("smollm2-135m", (8, 128)), ("qwen2.5-coder-0.5b", (4, 64)), ("qwen2.5-coder-1.5b", (4, 32))],
)
def test_slower_models_get_fewer_windows_and_questions(model, counts):
    sweep = compose(["experiment=evidence", f"model={model}"]).sweep
    assert (sweep.windows, sweep.questions) == counts
    assert compose(["experiment=evidence", f"model={model}", "sweep.windows=3"]).sweep.windows == 3


def test_an_entry_is_lenient_only_where_it_says_so():
    cell = {"method": ["full", "oracle"], "experiment": "latency"}
    with pytest.raises(UserError, match="Oracle selects by the true scores"):
        read_plan(OmegaConf.create({"runs": [cell]}), [])
    unknown = cell | {"method": "full", "method.none": 1}
    lenient = read_plan(OmegaConf.create({"runs": [each | {"where_allowed": True} for each in (cell, unknown)]}), [])
    assert [each.method_name for each in lenient.cells] == ["full"] and len(lenient.left_out) == 2


def test_the_full_cache_runs_as_it_is_and_under_nearest_so_does_a_method_without_a_size():
    as_it_is = load(["method=full"])
    for size in ("0.1", "nearest:0.1"):
        assert load(["method=full", f"size={size}"]) == as_it_is, "one record for all sizes"
    assert load(["method=int4", "size=nearest:0.1"]).size is None
    assert load(["method=h2o", "size=nearest:0.1"]).size == 0.1
    with pytest.raises(UserError, match="has no size to set"):
        load(["method=int4", "size=0.1"])


# Rows


def test_a_row_joins_text_tasks_and_step(results):
    row = row_of(board(results), "InfiniGen")
    error = clustered_stderr([0, -1, -1, -1], [0, 0, 1, 1])
    expected = {
        "method": "infinigen", "family": "retrieves", "codec": "", "shipped": "",
        "size": 0.16, "device_frac": 0.3, "resident_frac": 0.1,
        "kl_nats": 0.05, "kl_nats_stderr": 0.0125, "top1_agreement": 0.95,
        "nll_difference": pytest.approx(0.075), "nll_difference_stderr": pytest.approx(0.025 / math.sqrt(7)),
        "step_s": pytest.approx(0.004), "step_source": "emulated", "compute_s": pytest.approx(0.002),
        "link_bytes": 2**20, "kv_recall": 0.25, "kv_recall_difference": -0.75, "kv_recall_size": 0.16,
        "kv_recall_stderr": pytest.approx(error), "num_windows": 8, "kv_recall_num_contexts": 2,
        "kv_recall_detectable": pytest.approx((12.706 + 1.376) * error, rel=1e-3),
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    families = {row["label"]: row["family"] for row in board(results)}
    assert (families["Oracle"], families["Streaming"], families["INT4"]) == ("oracle", "evicts", "codes")
    full = row_of(board(results), "Full cache", None)
    assert (full["kv_recall_difference"], full["kv_recall_stderr"], full["family"]) == (None, 0.125, "reads all")


def test_a_step_at_another_size_is_modelled_from_the_timed_one(results):
    row = row_of(board(results), "InfiniGen", 0.25)
    assert row["step_source"] == "modelled" and row["link_bytes"] == pytest.approx(2**20 * 0.3 / 0.16)
    assert row["step_s"] == pytest.approx(0.004)  # 2 ms of compute hide either
    late = {"asked_size": None, "size": 0.3, "exempt_layers": 0}
    metrics = dict.fromkeys(("platform", "batch_size", "prompt_len", "source"), 0) | STEP
    metrics |= {"size": 0.1, "late_bytes": 5 * 2**20, "link_bytes_per_s": 2**20}
    timed = {"config": {"size": 0.1}, "metrics": metrics}
    step = step_of(late, timed)
    assert (step["link_bytes"], step["late_bytes"]) == (pytest.approx(3 * 2**20), pytest.approx(1.5 * 2**20))
    step = step_of(late | {"exempt_layers": 1}, timed)
    assert step["late_bytes"] == pytest.approx(2.5 * 2**20), "the exempt layer's bytes, which are hidden, do not grow"
    late = {"compute_s": 1.0, "link_bytes": 3.0, "late_bytes": 1.0}
    assert step_seconds(late, 1.0) == 3.0 and step_seconds(late, 10.0) == pytest.approx(1.1)


def test_an_older_run_gives_way_and_other_questions_are_not_compared(other):
    chosen = ["experiment=leaderboard-scores", *COMMON, "num_windows=1", "method=streaming", "size=nearest:0.16"]
    about = {"when": "kept", "started": "2025-01-01", "samples": {"windows": [{"nll": 2, "nll_full": 1}]}}
    save(other, chosen, {"offline": {"perplexity": 1.0, "size": 0.16, "kl_nats": 9.0}}, **about)
    save_method(other, "oracle", 0.1, kl=0.1, hits="111111")
    tables.update(other, "leaderboard-scores")
    assert row_of(board(other), "Streaming")["kl_nats"] == 0.5
    row = row_of(board(other), "Oracle", 0.1)
    assert row["kv_recall"] == 1 and row["kv_recall_difference"] is None


def test_a_method_of_ones_own_joins_the_shipped_leaderboard_and_its_front(other):
    tables.ship(other)
    shutil.rmtree(other / "runs")
    before = len(board(other))
    save_method(other, "streaming", 0.16, kl=0.01, hits="1111")
    tables.update(other, "leaderboard-scores")
    rows = board(other)
    assert len(rows) == before and [row["label"] for row in rows if not row["shipped"]] == ["Streaming"]
    assert row_of(rows, "Streaming")["kl_nats"] == 0.01 and row_of(rows, "Streaming")["front"] == "size"
    assert row_of(rows, "InfiniGen")["front"] == "step time", "its size is beaten by one's own run"
    page = (other / "leaderboard.md").read_text()
    assert "| Streaming \\*" in page and "One's own run" in page and "| InfiniGen" in page
    assert "Streaming" in {row["label"] for row in board(other, "frontier")}


def exempt(row: TableRow, layers: int, kl: float, **cells: Any) -> TableRow:
    return row | {"exempt_layers": layers, "kl_nats": kl, "settings": f"num_exempt_layers={layers}"} | cells


def test_the_papers_number_of_exempt_layers_and_the_best_are_told_apart(results):
    row = row_of(board(results), "InfiniGen")
    rows = complete([exempt(row, 0, 0.3), exempt(row, 1, 0.01), exempt(row, 2, 0.05)])
    assert [each["exempt_choice"] for each in rows] == ["", "best", "paper's"]
    assert [each["front"] for each in rows] == ["", "size, step time", ""]
    (sheet,) = sheets_of(rows)
    assert [line[:2] for line in sheet.lines] == [["InfiniGen", "1, best"], ["InfiniGen", "2, paper's"]]
    missed = complete([exempt(row, 1, 0.01, size=0.2), exempt(row, 2, 0.05)])
    assert [each["exempt_choice"] for each in missed] == ["", "both"], "the best of those that have the size"
    own = complete([exempt(row, 0, 0.3, method="mine"), exempt(row, 2, 0.05, method="mine")])
    assert [each["exempt_choice"] for each in own] == ["", "best"], "a method of one's own has no paper"


def test_only_a_methods_best_is_compared_with_the_references(results):
    oracle, own = row_of(board(results), "Oracle"), row_of(board(results), "InfiniGen")
    rows = complete([exempt(oracle, 0, 0.15), exempt(oracle, 2, 0.9), exempt(own, 0, 0.3), exempt(own, 2, 0.5)])
    assert not any("Oracle" in row["outside"] and "KL" in row["outside"] for row in rows)


# Pages


def test_a_table_per_size_is_sorted_by_kl_with_its_best_in_bold(results):
    first, second, own = sheets_of(board(results))
    titles = ["m, size 16 %", "m, size 25 %", "m, sizes of their own"]
    assert [sheet.title.replace("smollm2-135m", "m") for sheet in (first, second, own)] == titles
    labels = [line[0] for line in first.lines]
    assert labels == ["InfiniGen†", "Oracle", "Streaming"]
    bold = {(labels[line], first.header[column]) for line, column in first.bold}
    assert ("InfiniGen†", "KL (nats)") in bold and {label for label, _ in bold} == {"InfiniGen†"}
    assert "**0.0500 ± 0.0125**" in (results / "leaderboard.md").read_text() and not own.bold
    assert first.lines[0][first.header.index("kv_recall (%)")] == "25.0 (no difference ≥ 352.1)", "of two contexts"


def test_a_metric_stands_wherever_its_declaration_says(results):
    rows = board(results)
    sheet, *_ = sheets_of(rows)
    for metric in BOARD_METRICS:
        assert set(names(metric.columns)) <= set(names(BOARD))
        assert (metric.column.heading in sheet.header) == metric.on_page


def test_only_what_is_certain_is_outside_the_references(results):
    """InfiniGen's KL is 0.10 below Oracle's, 2.5 standard errors of 0.0395; of eight windows 2.36 are enough. Its tasks
    are worse, by fewer than the 12.7 of two contexts."""
    rows = board(results)
    assert row_of(rows, "InfiniGen")["outside"].split("; ") == [
        "KL better than Oracle by 0.1000 ± 0.0395", "top-1 agreement better than Oracle by 10.0 ± 1.4",
    ]  # fmt: skip
    assert {row["outside"] for row in rows if row["asked_size"] != 0.16} == {""}
    near = [row | {"kl_nats": 0.063} if row["label"] == "InfiniGen" else row for row in rows]
    assert "KL" not in row_of(complete(near), "InfiniGen")["outside"], "2.20 standard errors"
    older = [{name: value for name, value in row.items() if name != "num_windows"} for row in near]
    assert "KL" in row_of(complete(older), "InfiniGen")["outside"], "a table that does not say the windows: 1.96"


def test_a_method_at_another_size_is_in_no_comparison_and_on_no_front(results):
    _, sheet, _ = sheets_of(board(results))
    assert sheet.lines[0][0] == "InfiniGen§" and sheet.lines[0][2] == "30.0" and not sheet.bold
    assert [note[0] for note in sheet.notes] == ["§", "‡"]
    assert sheet.lines[0][sheet.header.index("decode step (ms)")] == "4.0‡"
    rows = board(results)
    row_of(rows, "InfiniGen")["asked_size"] = 0.1  # it reads 16 % and would be better than the oracle of that size
    row = row_of(complete(rows), "InfiniGen", 0.1)
    assert (row["outside"], row["front"]) == ("", "")


# The fronts


def points(
    *values: tuple[float, float, float | None], stderr: float = 0.0, windows: int | None = None
) -> list[TableRow]:
    return [
        {"model": "m", "size": size, "kl_nats": kl, "kl_nats_stderr": stderr, "num_windows": windows, "step_s": step}
        for size, kl, step in values
    ]


def test_a_front_is_what_no_other_beats():
    rows = points((0.1, 0.5, 3), (0.2, 0.1, 2), (0.3, 0.1, 1), (0.3, 0.2, None))
    both = "size, step time"
    assert fronts([*rows, {**rows[0], "model": "other"}]) == ["size", "size", "step time", "", both]


@pytest.mark.parametrize(
    ("values", "stderr", "expected"),
    [
        (((0.09964, 0.57, None), (0.1, 0.07, None)), 0.0, ["", "size"]),  # .036 points of size are no lead
        (((0.1, 0.09, None), (0.1, 0.07, None)), 0.01, ["", "size"]),  # the difference has an error of .014
        (((0.1, 0.08, None), (0.1, 0.07, None)), 0.01, ["size", "size"]),
        (((0.1, 0.08, None), (0.08, 0.085, None)), 0.01, ["", "size"]),
        (((0.1, 0.5, 1.0), (0.2, 0.1, 1.009)), 0.0, ["size", "size, step time"]),
    ],
)
def test_a_front_does_not_reward_noise(values, stderr, expected):
    assert fronts(points(*values, stderr=stderr)) == expected


@pytest.mark.parametrize(("windows", "expected"), [(2, "size"), (4, ""), (None, "")])
def test_of_few_windows_a_front_takes_a_larger_difference_for_noise(windows, expected):
    """0.02 of KL is 1.41 standard errors: two windows leave 1.84 of them open, four 1.20."""
    own, _ = fronts(points((0.1, 0.09, None), (0.1, 0.07, None), stderr=0.01, windows=windows))
    assert own == expected
    assert fronts(points((0.1, 0.09, None), (0.1, 0.07, None), windows=1))[0] == "", "without an error numbers decide"


def test_a_row_with_a_large_error_excludes_no_other():
    """The first two cannot be told apart. The third is certainly closer than the closest of them, if not than the other
    one, whose own error is large."""
    rows = points((0.05, 0.019, None), (0.05, 0.033, None), (0.27, 0.001, None), (0.3, 0.0009, None), windows=2)
    for row, stderr in zip(rows, (0.003, 0.02, 0.0007, 0.0007), strict=True):
        row["kl_nats_stderr"] = stderr
    assert fronts(rows) == ["size", "size", "size", ""]


def test_the_upper_reference_is_on_no_front(results):
    labels = {row["label"]: row["front"] for row in board(results, "frontier")}
    assert "Oracle" not in labels and labels["Full cache"] == "size, step time"
    (sheet,) = sheets_of(board(results, "frontier"))
    assert sheet.title.endswith("not beaten in size or in step time")


# One's own method or codec beside the shipped ones

SMALL = [
    "seq_len=200", "prefill_len=150", "num_windows=1", "num_samples=2", "tasks=[passkey]", "too_long=truncate",
    "calibration.num_tokens=64", "batch_size=1", "prompt_len=24", "gen_len=6", "warmup_steps=1", "timed_steps=1",
    "platform.link_gbps=1",
]  # fmt: skip


def test_an_own_method_and_codec_stand_beside_the_shipped_rows(own_folder, shipped_beside, monkeypatch, capsys):
    """As `make leaderboard METHOD=` and `CODEC=` start them, on a toy that has the shipped rows' model's name."""
    file = letters(own_folder, monkeypatch, 1000)
    tiny_model("llama", num_key_value_heads=2, max_position_embeddings=2048).save_pretrained("smollm2-135m")
    byte_tokenizer().save_pretrained("smollm2-135m")
    shipped = board(ROOT / "results")
    assert new_method.main(["page_means"]) == 0
    Path("mine.py").write_text(CODEC_HEAD + CODEC)
    settings = ["model.path=smollm2-135m", f"corpus.path={file}", f"calibration.path={file}", *SMALL]
    for experiment, own in product(
        ("leaderboard", "leaderboard-tasks"), (["method=full"], ["method=./page_means.py", "codec=./mine.py"])
    ):
        assert cli.main([f"experiment={experiment}", *settings, *own]) == 0, capsys.readouterr().err
    rows = [row for row in board(Path("outputs")) if row["model"] == "smollm2-135m"]
    mine = {row["label"]: row for row in rows if row["shipped"] != "yes"}
    label = "Page means + mine"
    assert set(mine) == {"Full cache", label} and mine[label]["codec"] == "mine"
    others = {row["label"] for row in shipped if row["model"] == "smollm2-135m"}
    assert {row["label"] for row in rows} == {*mine, *others} and len(others) > 25
    asked = [(row["asked_size"], row["exempt_layers"]) for row in rows if row["label"] == label]
    sizes = [None, 0.05, 0.1, 0.16]  # None: as it is
    assert len(asked) == 12 and {*asked} == {*product(sizes, range(3))}
    assert mine[label]["step_s"] > 0 and mine[label]["passkey_difference"] is not None
    page = Path("outputs/leaderboard.md").read_text()
    assert "One's own run; the other rows are shipped" in page and "InfiniGen, coded index" in page
    of_mine = [line for line in page.splitlines() if re.match(r"\| \W*Page means \+ mine \W*\*", line)]
    assert len(of_mine) == 4, "one is of its own size"
    with style.applied():
        figure = draw_leaderboard(data.Tables(Path("outputs/tables")), "frontier")
    ticks = {tick.get_text(): tick.get_color() for tick in figure.axes[0].get_yticklabels()}
    assert ticks[label] not in {ticks["InfiniGen"], ticks["Quest"], ticks["H2O"]}
    assert {label, "retrieves"} <= {text.get_text() for text in figure.legends[0].get_texts()}

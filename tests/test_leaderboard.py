"""The leaderboard: what is in its grid, what its rows say of the records, what is marked, what is answered."""

import csv
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from test_tables import LATENCY_METRICS, save

from harness.errors import UserError
from harness.launch import cli
from harness.launch.plan import read_plan
from harness.paper.report import write_report
from harness.records.samples import clustered_stderr
from harness.settings.compose import choices, compose
from harness.settings.schema import options
from harness.tables import write as tables
from harness.tables.board import sheets
from harness.tables.columns import BOARD, TableRow, names, shape_of, typed
from harness.tables.frontier import fastest, fronts, step_seconds
from harness.tables.leaderboard import BOUNDS, GRID
from harness.tables.sheets import render_markdown, sheets_of
from tests.composed import load

TASKS = "tasks=[kv_recall,passkey]"
COMMON = ["num_windows=2", "num_samples=4", TASKS]
RAN = {"environment": {}, "seconds": 1.0, "error": None}
KINDS = {"full": "kept", "int4": "kept", "streaming": "kept", "infinigen": "previous_layer", "oracle": "true_scores"}


def save_method(results: Path, method: str, asked: float | None, *, kl: float, hits: str, **step: Any) -> None:
    """Records of a method at a size: a text, four questions of each task (`hits`, two to a context), a step."""
    chosen = [*COMMON, f"method={method}", *([] if asked is None else [f"size=nearest:{asked}"])]
    about = {"when": KINDS[method], "started": "2026-01-01T00:00:00+00:00", "text": method, "methods": {}} | RAN
    read = (1.0 if method == "full" else 0.33) if asked is None else asked
    shares = {"size": step.pop("size", read), "device_frac": 0.3, "resident_frac": 0.1}
    windows = [{"nll": 2.5 + kl, "nll_full": 2.5}, {"nll": 3.5 + 2 * kl, "nll_full": 3.5}]
    fidelity = {"kl_nats": kl, "kl_nats_stderr": kl / 4, "top1_agreement": 1 - kl, "top1_agreement_stderr": 0.01}
    text = fidelity | shares | {"perplexity": 12.0, "num_samples": 2}
    scores = ["experiment=leaderboard-scores", *chosen]
    save(results, scores, {"offline": text}, samples={"windows": windows}, **about)
    answers = [{"question": at, "context": at // 2, "acc": float(hit == "1")} for at, hit in enumerate(hits)]
    task = shares | {"acc": hits.count("1") / len(hits), "acc_stderr": 0.125, "num_samples": len(hits)}
    both = dict.fromkeys(("kv_recall", "passkey"), task)
    save(results, [*scores, "kind=tasks"], both, samples=dict.fromkeys(both, answers), **about)
    if step:
        metrics = LATENCY_METRICS | {"late_frac": 0.0, "link_bytes_per_s": 1e9, "size": read} | step
        save(results, ["experiment=leaderboard-times", *chosen], metrics, **about)


STEP = {"gen_len": 11, "decode_s": 0.1, "exposed_transfer_s": 0.02, "h2d_bytes": 10 * 2**20}


@pytest.fixture
def results(tmp_path) -> Path:
    """Full cache, INT4, and three methods at a size: one above the upper bound in KL, one that missed its size."""
    save_method(tmp_path, "full", None, kl=0.0, hits="1111", **STEP)
    save_method(tmp_path, "int4", None, kl=0.2, hits="1110", **STEP | {"decode_s": 0.05, "exposed_transfer_s": 0.0})
    save_method(tmp_path, "oracle", 0.16, kl=0.1, hits="1110")
    save_method(tmp_path, "streaming", 0.16, kl=0.5, hits="1000", **STEP | {"decode_s": 0.03})
    save_method(tmp_path, "infinigen", 0.16, kl=0.05, hits="1000", **STEP | {"decode_s": 0.04})
    save_method(tmp_path, "infinigen", 0.25, kl=0.04, hits="1100", size=0.3)
    for experiment in ("leaderboard-scores", "leaderboard-times"):
        tables.update(tmp_path, experiment)
    return tmp_path


def board(results: Path, name: str = "leaderboard") -> list[TableRow]:
    with (results / "tables" / f"{name}.csv").open(newline="") as stream:
        return list(map(typed, csv.DictReader(stream)))


def row_of(rows: list[TableRow], label: str, size: float | None = 0.16) -> TableRow:
    (row,) = (row for row in rows if (row["label"], row["asked_size"]) == (label, size))
    return row


# The grid


@pytest.fixture
def plan():
    """The leaderboard's plan with a few of the methods, as composing all takes a while."""
    few = ["full", "int4", "oracle", "quest"]
    OmegaConf.register_new_resolver("choices", lambda group: few, replace=True)
    yield read_plan(compose(["grid=leaderboard"]).grid, ["grid=leaderboard"])
    OmegaConf.register_new_resolver("choices", choices, replace=True)


def test_every_method_is_in_the_grid() -> None:
    cells = OmegaConf.to_container(OmegaConf.load(GRID))["cells"]
    assert [cell["method"] for cell in cells] == ["${choices:method}"] * 2
    assert choices("method") == options("method") and set(BOUNDS.values()) <= set(options("method"))
    assert choices("method", "full", "h2o") == [name for name in options("method") if name not in ("full", "h2o")]


def test_what_the_frontier_adds_is_measured_as_the_leaderboard_is() -> None:
    grids = [OmegaConf.load(GRID.with_stem(name)) for name in ("frontier", "leaderboard")]
    added, own = (dict(grid.settings) for grid in grids)
    assert added == {name: value for name, value in own.items() if name not in ("tasks", "num_samples")}


def test_a_method_without_a_size_runs_once_and_a_refused_step_is_left_out(plan) -> None:
    scores = [cell for cell in plan.cells if cell.experiment == "leaderboard-scores"]
    sizes = [(cell.method_name, cell.size) for cell in scores if cell.kind == "perplexity"]
    sized = [(name, size) for name in ("oracle", "quest") for size in (0.1, 0.16, 0.25)]
    assert sizes == [("full", None), ("int4", None), *sized]
    assert [cell.method_name for cell in plan.cells if cell.kind == "latency"] == ["full", "int4", "quest"]
    assert [experiment for experiment, _ in plan.left_out] == ["leaderboard-times"]
    assert "Oracle selects by the true scores" in plan.gaps()[0]


def test_an_entry_is_lenient_only_where_it_says_so() -> None:
    cell = {"method": ["full", "oracle"], "experiment": "latency"}
    with pytest.raises(UserError, match="Oracle selects by the true scores"):
        read_plan(OmegaConf.create({"cells": [cell]}), [])
    unknown = cell | {"method": "full", "method.none": 1}
    lenient = read_plan(OmegaConf.create({"cells": [each | {"where_allowed": True} for each in (cell, unknown)]}), [])
    assert [each.method_name for each in lenient.cells] == ["full"] and len(lenient.left_out) == 2


def test_nearest_takes_a_method_without_a_size_as_it_is() -> None:
    assert load(["method=full", "size=nearest:0.1"]).size is None
    assert load(["method=h2o", "size=nearest:0.1"]).size == 0.1
    with pytest.raises(UserError, match="has no size to set"):
        load(["method=full", "size=0.1"])


# Rows


def test_a_row_joins_text_tasks_and_step(results) -> None:
    row = row_of(board(results), "InfiniGen")
    assert (row["method"], row["family"], row["codec"]) == ("infinigen", "retrieves", "")
    assert (row["size"], row["device_frac"], row["resident_frac"]) == (0.16, 0.3, 0.1)
    assert (row["kl_nats"], row["kl_nats_stderr"], row["top1_agreement"]) == (0.05, 0.0125, 0.95)
    assert row["nll_difference"] == pytest.approx(0.075) and row["nll_difference_stderr"] == pytest.approx(0.025)
    assert row["step_s"] == pytest.approx(0.004) and row["step_source"] == "emulated"
    assert row["compute_s"] == pytest.approx(0.002) and row["link_bytes"] == 2**20


def test_a_task_is_compared_with_the_full_cache_question_by_question(results) -> None:
    row = row_of(board(results), "InfiniGen")
    assert (row["kv_recall"], row["kv_recall_difference"]) == (0.25, -0.75)
    assert row["kv_recall_stderr"] == pytest.approx(clustered_stderr([0, -1, -1, -1], [0, 0, 1, 1]))
    assert row["kv_recall_detectable"] == pytest.approx(2.8 * row["kv_recall_stderr"])
    full = row_of(board(results), "Full cache", None)
    assert (full["kv_recall_difference"], full["kv_recall_stderr"], full["family"]) == (None, 0.125, "reads all")


def test_other_questions_are_not_compared(results) -> None:
    save_method(results, "oracle", 0.1, kl=0.1, hits="111111")
    tables.update(results, "leaderboard-scores")
    row = row_of(board(results), "Oracle", 0.1)
    assert row["kv_recall"] == 1 and row["kv_recall_difference"] is None


def test_a_step_at_another_size_is_modelled_from_the_timed_one(results) -> None:
    row = row_of(board(results), "InfiniGen", 0.25)
    assert row["step_source"] == "modelled" and row["link_bytes"] == pytest.approx(2**20 * 0.3 / 0.16)
    assert row["step_s"] == pytest.approx(0.004)  # 2 ms of compute hide either
    late = {"compute_s": 1.0, "link_bytes": 3.0, "late_bytes": 1.0}
    assert step_seconds(late, 1.0) == 3.0 and step_seconds(late, 10.0) == pytest.approx(1.1)


def test_an_older_run_of_the_same_cell_gives_way(results) -> None:
    old = {"perplexity": 1.0, "size": 0.16, "kl_nats": 9.0}
    chosen = ["experiment=leaderboard-scores", *COMMON, "num_windows=1", "method=streaming", "size=nearest:0.16"]
    about = {"when": "kept", "started": "2025-01-01", "samples": {"windows": [{"nll": 2, "nll_full": 1}]}}
    save(results, chosen, {"offline": old}, **about)
    tables.update(results, "leaderboard-scores")
    assert row_of(board(results), "Streaming")["kl_nats"] == 0.5


def test_the_csv_gives_the_page_that_the_records_gave(results) -> None:
    for name in ("leaderboard", "frontier"):
        header = (results / "tables" / f"{name}.csv").read_text().splitlines()[0].split(",")
        assert shape_of(header) == "board" and header == list(names(BOARD)) and not {*header} & {"timed_size"}
        assert render_markdown(name, board(results, name)) == (results / f"{name}.md").read_text()


# The page


def test_a_table_per_size_has_its_best_in_bold_and_marks_what_is_outside(results) -> None:
    first, second, own = sheets("m", board(results))
    assert [sheet.title.partition(", ")[2] for sheet in (first, second, own)] == [
        "16 % of the link's bytes", "25 % of the link's bytes", "at a size of their own",
    ]  # fmt: skip
    labels = [line[0] for line in first.lines]
    assert labels == ["InfiniGen†", "Oracle", "Streaming"]
    bold = {(labels[line], first.header[column]) for line, column in first.bold}
    assert ("InfiniGen†", "KL (nats)") in bold and {label for label, _ in bold} == {"InfiniGen†"}
    assert first.notes == [
        "† InfiniGen: KL above Oracle by 0.0500 ± 0.0280; top-1 agreement above Oracle by 5.0 ± 1.4."
    ]
    assert "size=0.16" in first.details[0] and not own.bold


def test_a_method_at_another_size_is_in_no_comparison(results) -> None:
    _, sheet, _ = sheets("m", board(results))
    assert sheet.lines[0][0] == "InfiniGen§" and sheet.lines[0][1] == "30.0" and not sheet.bold
    assert sheet.notes[0].startswith("§ Cannot have this size") and sheet.notes[1].startswith("‡ Modelled")
    assert sheet.lines[0][sheet.header.index("decode step (ms)")] == "4.0‡"


def test_the_report_has_settings_a_click_away_and_bold(results) -> None:
    text = write_report(results).read_text()
    section = text.partition('<section id="leaderboard">')[2].partition("</section>")[0]
    assert "<details><summary>InfiniGen†</summary>" in section and "size=0.16" in section
    assert "<strong>0.0500 ± 0.0125</strong>" in section and "† InfiniGen: KL above Oracle" in section
    assert "**0.0500 ± 0.0125**" in (results / "leaderboard.md").read_text()


# The frontier


def test_a_front_is_what_no_other_beats() -> None:
    points = [(0.1, 0.5, 3), (0.2, 0.1, 2), (0.3, 0.1, 1), (0.3, 0.2, None)]
    rows = [{"model": "m", "size": size, "kl_nats": kl, "step_s": step} for size, kl, step in points]
    both = "link bytes, step time"
    assert fronts([*rows, {**rows[0], "model": "other"}]) == ["link bytes", "link bytes", "step time", "", both]


def test_the_upper_bound_is_on_no_front(results) -> None:
    labels = {row["label"]: row["front"] for row in board(results, "frontier")}
    assert "Oracle" not in labels and labels["Full cache"] == "link bytes, step time"
    (sheet,) = sheets_of(board(results, "frontier"))
    assert sheet.title.endswith("the fronts")


def ask(results: Path, *asked: str) -> int:
    return cli.main(["experiment=frontier", f"results_dir={results}", *asked])


def test_the_fastest_that_holds_the_bound_is_one_line(results, capsys) -> None:
    assert ask(results, "link_gbps=25", "max_kl=0.1") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("InfiniGen (method=infinigen size=0.16): 2.0 ms a step over 25 GB/s, modelled")
    assert "measured compute (2.0 ms) and bytes (1.00 MiB); KL 0.0500 ± 0.0125 nats, measured" in line
    assert ask(results, "link_gbps=25", "max_kl=0.01") == 0
    assert capsys.readouterr().out.startswith("Full cache (method=full): 8.0 ms")


def test_what_cannot_be_answered_is_one_line(results, tmp_path, capsys) -> None:
    for asked, message in (
        (["max_kl=0.1"], "link_gbps=null: must be above 0"),
        (["link_gbps=1", "max_kl=0"], "max_kl=0: must be above 0"),
        (["link_gbps=1", "max_kl=1", "model=opt-125m"], "no timed method of opt-125m in it; make leaderboard"),
    ):
        assert ask(results, *asked) == 2
        assert message in capsys.readouterr().err
    assert ask(tmp_path / "none", "link_gbps=1", "max_kl=1") == 2
    assert "there is none yet; make leaderboard makes it" in capsys.readouterr().err
    (results / "tables" / "leaderboard.csv").write_text("a,b\n1,2\n")
    assert ask(results, "link_gbps=1", "max_kl=1") == 2
    assert "not a leaderboard" in capsys.readouterr().err


def test_a_bound_that_nothing_holds_names_the_closest() -> None:
    row = {"label": "H2O", "size": 0.25, "kl_nats": 0.3, "compute_s": 1.0, "link_bytes": 1.0, "late_bytes": 0.0}
    with pytest.raises(UserError, match=r"max_kl=0.1: nothing holds it; the closest, H2O reading 25.0%, has 0.3000"):
        fastest([row, row | {"label": "Streaming", "kl_nats": 0.5}], 1.0, 0.1)

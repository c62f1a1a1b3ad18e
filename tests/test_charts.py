"""What the report's charts show of the tables, how that is drawn, and that words of a table stay words."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness.paper.catalogue import ENTRIES
from harness.paper.costmodel.published import figure_rows
from harness.paper.report.beside import side_by_side
from harness.paper.report.charts import CHARTS
from harness.paper.report.charts.chart import Axis, Chart, Level, Point
from harness.paper.report.charts.slim import slim
from harness.paper.report.charts.vega import COLORS, SHAPES, draw
from harness.tables.columns import ACCURACY, BOARD, names, typed

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "results" / "tables"
FOLDERS = (TABLES, ROOT / "results" / "qwen2.5-coder-0.5b" / "tables")
CHARTED = [
    (entry, folder)
    for entry in ENTRIES
    for folder in FOLDERS
    if entry.chart and (folder / f"{entry.tables[0]}.csv").exists()
]
HOSTILE = "</script><svg onload='alert(1)'><!-- \u2028 \" datum['x'] ${alert(1)} {{7*7}} \\u003c a.b[0] \n'];alert(1)//"


def score(label: str, size: float | None, value: float, **fields: Any) -> dict[str, str]:
    """A line of an accuracy table's CSV."""
    row = dict.fromkeys(names(ACCURACY), "") | {
        "experiment": "fig11", "model": "tiny", "label": label, "task": "passkey", "metric": "acc", "value": value,
        "stderr": 0.05, "num_samples": 48, "size": "" if size is None else size, "source": "measured",
    }  # fmt: skip
    return {name: str(cell) for name, cell in (row | fields).items()}


def place(label: str, **fields: Any) -> dict[str, str]:
    """A line of the leaderboard's CSV."""
    row = dict.fromkeys(names(BOARD), "") | {
        "experiment": "leaderboard", "model": "tiny", "label": label, "family": "evicts", "asked_size": 0.1,
        "size": 0.1,
        "kl_nats": 0.5, "kl_nats_stderr": 0.1, "source": "measured", "step_s": 0.25, "step_source": "emulated",
        "link_bytes": 2**20, "settings": "a=1",
    }  # fmt: skip
    return {name: str(cell) for name, cell in (row | fields).items()}


def charts(kind: str, rows: list[Mapping[str, str]]) -> list[Chart]:
    return list(CHARTS[kind](rows))


def test_a_point_has_value_error_method_bytes_and_settings_as_the_table_has_them() -> None:
    rows = [
        score("Full", 1.0, 0.875),
        score("A", 0.16, 0.75, difference=-0.125, difference_stderr=0.03, device_frac=0.2, settings="alpha=4"),
        score("A", 0.1, 0.5),
        score("A", None, 0.5),
        score("A", 0.1, 0.01, metric="kl_nats", task="text"),
        score("A", 0.1, 0.01, metric="attention_recall", task="text"),
        score("A", 0.1, 0.01, metric="kl_nats", task="text[0:16]"),
    ]
    text, task = charts("size", rows)
    assert (text.pane, text.y.log, task.y, task.x) == (
        "text: KL (nats)",
        True,
        Axis("acc (%)"),
        Axis("KV read (%)", zero=True),
    )
    assert task.title == "tiny, measured, n = 48" and task.levels == [Level("y", 87.5, "Full")]
    first, second = task.points
    assert (first.x, first.y, first.stderr, first.line) == (16.0, 75.0, 3.0, "A")
    assert first.details == {
        "label": "A", "acc (%)": "75.0 ± 5.0", "less the full cache's": "-12.5 ± 3.0", "KV read (%)": "16.0",
        "device read (%)": "20.0", "samples": "48", "settings": "alpha=4", "source": "measured",
    }  # fmt: skip
    assert second.stderr == 5.0, "of the value, where nothing is compared"
    (along,) = charts("step", rows)
    assert along.points[0].x == 8 and along.points[0].series == "A, 10%" and along.y.log


def test_setups_are_never_in_one_chart_and_one_pane_has_them_side_by_side() -> None:
    rows = [score("A", 0.1, 0.5), score("A", 0.1, 0.6, model="other"), score("A", 0.1, 0.7, num_samples=9)]
    found = charts("size", rows)
    assert [chart.title for chart in found] == [
        "tiny, measured, n = 48",
        "other, measured, n = 48",
        "tiny, measured, n = 9",
    ]
    domains = [drawn.spec["layer"][-1]["encoding"]["y"]["scale"]["domain"] for drawn in draw(found)]
    assert domains[0] == domains[1] == domains[2] and domains[0][0] < 45 and domains[0][1] > 75


def test_the_frontier_names_its_front_and_marks_what_is_modelled() -> None:
    rows = [
        place("A", front="link bytes, step time"),
        place("B", front="link bytes", step_source="modelled", size=0.2),
        place("C", family="codes", asked_size=""),
        place("Full", kl_nats=1e-9, size=1.0, family="reads all"),
    ]
    link, step = charts("frontier", rows)
    assert [point.name for point in link.points] == ["A 10%", "B 20%", ""]
    assert [point.hollow for point in step.points] == [False, True, False] and not any(p.hollow for p in link.points)
    assert [(point.name, point.x) for point in step.points] == [("A 10%", 250), ("", 250), ("", 250)]
    assert step.levels == [Level("x", 250, "Full")] and step.x.title == "decode step (ms), emulated" and step.y.log
    assert link.points[0].details["link a step (MiB)"] == "1.00" and link.points[0].details["settings"] == "a=1"
    fronts = [row | {"experiment": "frontier"} for row in rows[:1]]
    assert [len(chart.points) for chart in charts("frontier", fronts + rows)] == [3, 3], "not twice"


def test_a_task_of_the_leaderboard_has_the_size_that_it_ran_at() -> None:
    rows = [place("A", passkey=0.5, passkey_stderr=0.1, passkey_size=0.3)]
    kl, passkey = charts("leaderboard", rows)
    assert (kl.points[0].x, passkey.points[0].x, passkey.points[0].y, passkey.points[0].stderr) == (10, 30, 50, 10)


def test_times_have_speedups_and_the_papers_points_where_the_setup_is_the_papers() -> None:
    rows = [
        {key: "" if value is None else str(value) for key, value in row.items()}
        for row in figure_rows("fig15", "a6000-pcie3")
    ]
    rates, *_, speedups = charts("times", rows)
    hollow = [point for point in rates.points if point.hollow]
    assert {(point.series, point.x, point.y) for point in hollow} >= {("infinigen", 20, 41.99)}
    assert all(point.details["source"] == "published" and not point.line for point in hollow)
    (ours,) = (point for point in speedups.points if point.series == "infinigen" and point.x == 20)
    seconds = {row["label"]: float(row["total_s"]) for row in rows if row["batch_size"] == "20"}
    assert ours.y == pytest.approx(seconds["offload"] / seconds["infinigen"]) and speedups.levels == [
        Level("y", 1, "offload")
    ]
    emulated = [row | {"source": "emulated"} for row in rows]
    assert not any(point.hollow for chart in charts("times", emulated) for point in chart.points)
    one_size = [row for row in rows if row["batch_size"] == "4"]
    assert not charts("times", one_size), "nothing to draw against"


def test_every_figure_of_the_results_that_compares_methods_has_charts() -> None:
    tabled = {entry.name for entry in ENTRIES if (TABLES / f"{entry.tables[0]}.csv").exists()}
    assert {entry.name for entry, folder in CHARTED if folder == TABLES} == {
        entry.name for entry in ENTRIES if entry.name in tabled and entry.page != "analysis"
    } - {"perplexity", "latency"}, "these two are of all that the others chart"


def test_skewing_is_compared_within_its_experiment_and_with_the_full_cache_asked_the_same() -> None:
    rows = [
        score("A", 0.25, 0.5, experiment="fig13"),
        score("A without skewing", 0.25, 0.4, experiment="fig13"),
        score("A", 0.1, 0.1),
        score("Full", 1.0, 0.9),
        score("Full", 1.0, 0.8, task="other"),
        score("Full", 1.0, 0.7, num_samples=9),
    ]
    (chart,) = charts("pairs", rows)
    assert [(point.series, point.x, point.y) for point in chart.points] == [
        ("A", 50, "passkey"), ("A without skewing", 40, "passkey"), ("Full", 90, "passkey"),
    ]  # fmt: skip
    assert chart.points[0].stderr == 5 and chart.value_axis == "x"


def test_changes_are_named_by_what_they_add_and_perplexity_has_the_full_caches() -> None:
    text = {"metric": "perplexity", "task": "text"}
    labels = ("A", "A, pool 80 %, lru")
    rows = [score(label, 0.2, 20 + i, **text) for i, label in enumerate(labels)]
    rows += [score(label, 0.2, 18, **text | {"metric": "perplexity_full"}) for label in labels]
    (chart,) = charts("changes", rows)
    assert [(point.series, point.y, point.x) for point in chart.points] == [
        ("A", "default", 20), ("A", "pool 80 %, lru", 21),
    ]  # fmt: skip
    assert chart.levels == [Level("x", 18, "full cache")]


def test_sweeps_run_along_the_setting_the_length_and_the_depth() -> None:
    setting, *_ = charts("setting", [score(f"alpha={x}", 0.2, x / 10, method="m") for x in (5, 1)] + [score("F", 1, 1)])
    assert [(point.x, point.y, point.line) for point in setting.points] == [(1, 10, "m"), (5, 50, "m")]
    assert setting.x.title == "alpha (scaled logits)" and setting.levels == [Level("y", 100, "F")]
    kept = [
        score("A with 64 tokens", 0.1, value, task="text", metric=metric, seq_len=length)
        for length in (2048, 1024)
        for metric, value in (("perplexity", 30), ("perplexity_full", 20))
    ]
    (length,) = charts("length", kept)
    assert {(point.series, point.x, point.y) for point in length.points} == {
        (name, x, y) for name, y in (("A", 30), ("full cache", 20)) for x in (1024, 2048)
    } and length.title.endswith("64 tokens kept")
    needle = [score("A", 0.1, 0.5, task=f"n[512, {at}-{at + 20} %]", metric="512") for at in (40, 0)]
    by_length, by_depth = charts("needles", [score("A", 0.1, 0.5, task="n", metric="512"), *needle])
    assert [(point.x, point.y) for point in by_length.points] == [(512, 50)]
    assert [(point.x, point.y) for point in by_depth.points] == [(10, 50), (50, 50)] and "512 tokens" in by_depth.title


def modelled(figure: str) -> list[dict[str, str]]:
    rows = figure_rows(figure, "a6000-pcie3")
    return [{key: "" if value is None else str(value) for key, value in row.items()} for row in rows]


@pytest.mark.parametrize(("kind", "figure", "total"), [("run", "fig14", "total_s"), ("block", "fig18", None)])
def test_parts_of_a_time_sum_to_it_and_the_papers_total_is_hollow(kind, figure, total) -> None:
    rows = modelled(figure)
    whole, near = charts(kind, rows)
    ours = sum(point.x for point in whole.points if point.y == "infinigen" and not point.hollow)
    (row,) = (row for row in rows if row["label"] == "infinigen")
    parts = 1e3 * sum(float(row[f"{name}_s"] or 0) for name in ("attention", "ffn", "prediction", "transfer", "other"))
    assert whole.stacked and ours == pytest.approx(float(row[total]) if total else parts)
    (paper,) = (point for point in whole.points if point.hollow and point.y == "infinigen")
    assert paper.x == {"fig14": 60.97, "fig18": 2.29}[figure] and paper.details["source"] == "published"
    assert "offload-pageable" not in {point.y for point in near.points} and near.pane.endswith("offload and faster")
    for drawn in draw([near]):
        least, most = drawn.spec["layer"][0]["encoding"]["x"]["scale"]["domain"]
        offload = sum(point.x for point in near.points if point.y == "offload" and not point.hollow)
        assert least == 0 and most > offload
        parts_of = {each["part"] for each in drawn.spec["data"]["values"]}
        assert {0, 1, None} <= parts_of, "bars and points"


def test_speedups_by_model_have_the_papers_where_it_has_some() -> None:
    whole, decode = charts("models", modelled("fig16b"))
    assert whole.title.startswith("3 models, modelled") and whole.levels == [Level("x", 1, "offload")]
    assert {(point.series, point.y, point.x) for point in whole.points if point.hollow} >= {
        ("infinigen", "opt-30b", 1.34)
    }
    assert not any(point.hollow for point in decode.points) and decode.points


def test_a_drawing_loses_digits_and_groups_but_no_words() -> None:
    drawing = """<svg xmlns="http://www.w3.org/2000/svg"><g class="a"><g transform="translate(1.23456,7)" fill="red">
    <text x="0.123456" fill="blue">1.23456</text><text fill="blue">b</text></g><g></g></g></svg>"""
    text = slim(drawing)
    assert 'transform="translate(1.2,7)"' in text and ">1.23456<" in text and text.count("<g") == 2
    assert text.count("blue") == 1 and "red" not in text, "what all children say stands once"


@pytest.mark.parametrize(("entry", "folder"), CHARTED, ids=[f"{each.name}-{of.parent.name}" for each, of in CHARTED])
def test_every_chart_of_the_results_has_titled_axes_and_a_source(entry, folder) -> None:
    rows = []
    for path in (path for table in entry.tables if (path := folder / f"{table}.csv").exists()):
        with path.open(encoding="utf-8", newline="") as lines:
            rows += csv.DictReader(lines)
    found = charts(entry.chart, rows)
    assert found and len({(chart.pane, chart.title) for chart in found}) == len(found)
    for chart in found:
        assert chart.points and chart.x.title and chart.y.title and chart.note
        assert chart.title.split(", ")[1] in ("measured", "emulated", "modelled")
        assert all(point.details["label"] and len(point.details) > 2 for point in chart.points)


# How it is drawn


def points(count: int, **fields: Any) -> list[Point]:
    return [Point(f"s{i}", i + 1, i + 1, {"label": f"s{i}"}, line=f"s{i}")._replace(**fields) for i in range(count)]


def test_series_are_told_apart_by_colour_and_shape() -> None:
    count = len(COLORS) * len(SHAPES)
    (drawn,) = draw([Chart("pane", "setup", Axis("x"), Axis("y"), points(count))])
    (encoding,) = (layer["encoding"] for layer in drawn.spec["layer"] if "shape" in layer["encoding"])
    looks = set(zip(encoding["fill"]["scale"]["range"], encoding["shape"]["scale"]["range"], strict=True))
    assert len(looks) == count == len(encoding["fill"]["scale"]["domain"])


def test_what_no_axis_has_a_place_for_is_left_out() -> None:
    odd = [Point("s", x, y, {}) for x, y in ((1, float("nan")), (float("inf"), 1), (1, -1), (1, 0), (1e308, 1))]
    fine = [Point("s", 1, 1, {}, stderr=float("nan")), Point("s", 2, 0.1, {}, stderr=5.0)]
    log, empty = (
        Chart("a", "", Axis("x"), Axis("y", log=True), odd + fine),
        Chart("b", "", Axis("x"), Axis("y"), odd[:2]),
    )
    (drawn,) = draw([log, empty])
    first, second = drawn.spec["data"]["values"]
    assert first["low"] is None and 0 < second["low"] < 0.1 and second["high"] == 5.1
    json.dumps(drawn.spec, allow_nan=False)


def test_names_beside_points_do_not_cover_each_other() -> None:
    close = [Point("s", 1, 1 + i / 100, {}, name=f"n{i}") for i in range(5)] + [
        Point("s", 1, 50, {}),
        Point("s", 1, 0, {}),
    ]
    (drawn,) = draw([Chart("pane", "setup", Axis("x"), Axis("y"), close)])
    heights = sorted(value["named"] for value in drawn.spec["data"]["values"] if value["name"])
    assert len(heights) == 5 and min(b - a for a, b in zip(heights, heights[1:], strict=False)) > 50 * 11 / 300 * 0.99


def test_words_of_a_table_are_data_and_text() -> None:
    """Neither the drawing nor the specification has anything of a label but where labels stand."""
    labels = ("two\nlines", HOSTILE)
    scores = [[score(label, share, 0.5, settings=label) for share in (0.1, 0.2)] for label in labels]
    harmless, hostile = (draw(charts("size", rows))[0] for rows in scores)
    elements = [[*ElementTree.fromstring(drawn.svg).iter()] for drawn in (harmless, hostile)]
    plain, other = ([(each.tag, sorted(each.attrib)) for each in own] for own in elements)
    assert plain == other, "no element or attribute more than with a harmless label"
    assert "</script><svg onload=" in "".join(ElementTree.fromstring(hostile.svg).itertext()), "it is there, as text"
    as_harmless = json.dumps(hostile.spec).replace(json.dumps(HOSTILE), json.dumps(labels[0]))
    assert json.loads(as_harmless) == harmless.spec, "whole words, and nowhere within another"


def test_models_are_compared_where_both_have_a_number() -> None:
    ours = [
        score("A", 0.1, 0.5),
        score("B", 0.1, 0.6),
        score("A", 0.1, 0.02, metric="kl_nats"),
        score("A", 0.1, 2, task="x"),
    ]
    theirs = [score("A", 0.1, 0.25), score("C", 0.1, 0.6)]
    row = side_by_side({"m": typed_all(ours), "n": typed_all(theirs)})
    assert row.header == ["label", "settings", "passkey acc (%), m", "passkey acc (%), n"]
    assert row.lines == [["A", "-", "50.0 ± 5.0", "25.0 ± 5.0"]] and row.title == "m and n"
    assert side_by_side({"m": typed_all(ours)}) is None
    board = side_by_side({name: typed_all([place("A"), place("B", asked_size="")]) for name in ("m", "n")})
    assert [line[:2] for line in board.lines] == [["A", "10 %"], ["B", "-"]] and board.lines[0][2] == "0.5000 ± 0.1000"


def typed_all(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    return [typed(row) for row in rows]

"""Every figure from a small table made up here: what is drawn, what is left out, equal bytes on a rerun."""

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure

import plots
from harness.errors import UserError
from harness.paper.costmodel import published as costmodel
from harness.results import columns
from plots import analysis, drawing, style
from plots.drawing import DRAWINGS, figure_of
from tests.runs import Row

TABLES = """\
fig11
label,method,budget,kv_recall:acc,passkey:acc
Full cache,full,1,0.85,0.85
InfiniGen,,0.1,0.6,0.6
InfiniGen,,0.16,0.675,0.675
InfiniGen,,0.25,0.72,0.72
H2O,,0.1,0.4,0.4
H2O,,0.16,0.44,0.44
H2O,,0.25,0.46,0.46
INT8,,0.53,0.48,0.48
INT4,,0.28,0.46,0.46
INT2,,0.16,0.44,0.44

perplexity seq_len=1024 num_samples=3
label,budget,offline:kl_nats,offline:top1_agreement
Full cache,,0,
Full cache,1,,1
InfiniGen,0.1,0.1,0.9
InfiniGen,0.2,0.05,0.95
H2O,0.25,0.2,0.8

fig12 seq_len=1024 num_samples=3 stderr=1
label,budget,offline[256:512]:perplexity,offline[512:768]:perplexity,offline[768:1024]:perplexity
Full cache,1,15,12,11
InfiniGen,0.16,15.5,12.5,11.7
H2O,0.163,21,,22

fig13
label,budget,num_samples,seq_len,kv_recall:acc,passkey:acc,offline:kl_nats
InfiniGen,0.2,,,0.8,0.8,
InfiniGen,0.4,,,0.83,0.83,
InfiniGen without skewing,0.21,,,0.6,0.6,
InfiniGen,0.16,3,1024,,,0.1
InfiniGen without skewing,0.16,3,1024,,,0.3

fig17
label,budget,winogrande:acc
alpha=1,0.1,0.5
alpha=3,0.1,0.5
alpha=9,0.1,0.5
alpha=inf,0.1,0.5
partial_weight_ratio=0.1,0.1,0.5
Full cache,1,0.8

fig17-latency
label,decode_s
alpha=1,2
alpha=3,2.1
alpha=9,2.4
partial_weight_ratio=0.1,2

table2 seq_len=2048
label,budget,wikitext2:perplexity,wikitext2:perplexity_full,wikitext2[256:512]:perplexity
"InfiniGen, pool 80 % lru",0.2,12,10,500
"InfiniGen, pool 100 %",0.2,11,10,
"InfiniGen, pool 80 % fifo",0.2,40,10,
InfiniGen,0.2,500,,

fig19 seq_len=2048
label,budget,seq_len,num_samples,stderr,wikitext2:perplexity,wikitext2:perplexity_full
INT4,0.33,,,,11,10
InfiniGen,0.4,,,,15,10
H2O,0.4,,,,16,10
H2O,0.1,,,,50,10
H2O,0.2,,,,30,10
InfiniGen with 64 tokens,0.0078125,8192,1,-,16,8
H2O with 64 tokens,0.0078125,8192,1,-,200,8
InfiniGen with 64 tokens,0.0625,1024,8,0.5,28,14
H2O with 64 tokens,0.0625,1024,8,0.5,200,14

choices seq_len=2048
label,budget,wikitext2:perplexity,wikitext2:perplexity_full,wikitext2:kl_nats,wikitext2[256:512]:perplexity
InfiniGen,0.2,12,10,0.06,500
"InfiniGen, pool_frac=0.5, eviction=artifact",0.2,14,10,0.07,

index
label,budget,resident_frac,run_id,offline:kl_nats,kv_recall:acc,passkey:acc
columns,0.16,0.05,a,0.2,0.33,0.33
columns,0.16,0.15,b,0.07,0.4,0.4
"coded, 4 bits",0.16,0.025,d,0.1,0.37,0.37
"coded, 4 bits",0.16,0.075,e,0.03,0.5,0.5

long stderr=0.1
label,budget,seq_len,offline:kl_nats,niah_single_1:4096,niah_multikey_2:4096,niah_single_1:8192,niah_multikey_2:8192
Full cache,1,4096,0,1,0.5,,
InfiniGen2,0.05,4096,0.02,1,0.4,,
H2O,0.05,4096,0.5,0.2,0,,
Full cache,1,8192,0,,,0.9,0.5
InfiniGen2,0.05,8192,0.03,,,0.9,0.4
H2O,0.05,8192,0.6,,,0.1,0
"""
"""Tables between blank lines. The first line has the name and the cells that all rows share; CSV follows. A column
`task:metric` makes a row of each value in it. An empty cell takes the shared or the common value, `-` stands for an
empty one."""


def parsed(block: str) -> tuple[str, list[Row]]:
    """Name and rows of one of the tables."""
    head, *lines = block.splitlines()
    name, *shared = head.split()
    found: list[Row] = []
    for cells in csv.DictReader(lines):
        own = {key: "" if value == "-" else value for key, value in cells.items() if value}
        row = dict(each.split("=") for each in shared) | own
        wide = {key: row.pop(key) for key in [*row] if ":" in key}
        for key, value in wide.items():
            task, _, metric = key.rpartition(":")
            task, *part = re.split(r"\[|:|\]", task)
            of_part = dict(zip(("first", "stop"), part, strict=False))
            found.append(row | of_part | {"task": task, "metric": metric, "value": value})
        found += [] if wide else [row]
    return name, found


def ruler_rows() -> Iterator[Row]:
    for label, prefill, value in (("Full cache", "", 1), ("H2O", "dense", 0.75), ("H2O", "question", 0.25)):
        settings = f"alpha=4, prefill={prefill}, num_samples=9" if prefill else None
        common = {"label": label, "settings": settings, "budget": 0.16 if prefill else 1, "task": "niah_single_1"}
        yield common | {"metric": "512", "value": value}
        yield common | {"metric": "2048", "value": value / 2}
        yield common | {"metric": "2048", "value": 0.9, "depth": 0.2}


TIMES = {  # prefill and decode seconds
    "ideal": (1.0, 1.0),
    "offload": (1.2, 9.0),
    "offload-pageable": (1.2, 12.0),
    "offload+int4": (1.3, 3.4),
    "offload+h2o": (1.2, 3.0),
    "infinigen": (1.3, 1.9),
    "infinigen+reuse": (1.3, 1.7),
    "infinigen+int4": (1.4, 1.6),
}
PAPER_SHAPE = {"model": "opt-13b", "platform": "cuda", "source": "measured", "prompt_len": 1920, "gen_len": 128}
SEGMENTS, PREDICTS = {"attention_s": 0.001, "ffn_s": 0.0008, "other_s": 0.0001}, {"prediction_s": 0.0003}


def time_rows(labels: Iterable[str] = TIMES, scale: float = 1.0, **shape: Any) -> list[Row]:
    times = [(label, scale * TIMES[label][0], scale * TIMES[label][1]) for label in labels]
    return [{"label": at, "ttft_s": pre, "decode_s": post, "total_s": pre + post} | shape for at, pre, post in times]


TIMED = {
    "fig14": time_rows(),
    "fig15": [*time_rows(batch_size=1), *time_rows(["ideal", "offload"], batch_size=8)],
    "fig16a": [*time_rows(), *time_rows(["infinigen"], prompt_len=512)],  # no offload at 512
    "fig16b": [row for each in ("13b", "30b", "6.7b") for row in time_rows(model=f"opt-{each}")],
    "fig18": [
        row | SEGMENTS | {"transfer_s": row["decode_s"] / 1000} | (PREDICTS if row["label"] == "infinigen+int4" else {})
        for row in time_rows()
    ],
    "disk": [
        {"label": label, "source": of, "prompt_len": length, "tpot_p50_s": ms * length / 1e6, "disk_read_bytes": read}
        for label, of, ms, read in (
            ("ideal", "emulated", 50, None), ("disk", "measured", 200, 7e9), ("disk+quest", "measured", 80, 14e8)
        )
        for length in (1024, 2048)
    ],
}  # fmt: skip

SHARES, COUNTS = {0: 0.5, 32: 0.25, 64: 0.0, 96: 0.25}, {500: 80.0, 1000: 140.0, 1500: 150.0}
SPARSE = {2048: 0.1, 4096: 0.2, 8192: 0.4}
SKEWED = {"before skewing": {0: 2.0, 1: 1.5, 2: 1.0}, "after skewing": {0: 4.0, 1: 0.5, 2: 0.2}}
CURVES: dict[str, list[tuple]] = {  # series, metric, x_name, value by x, layer
    "fig2": [
        (name, "bytes", x_name, {x: slope * x + offset for x in xs}, None)
        for x_name, xs in {"seq_len": (1024, 2048, 4096), "batch_size": (1, 4, 16)}.items()
        for name, slope, offset in (("KV cache", 2**24, 0), ("weights", 0, 2**31))
    ],
    "fig5": [
        *((f"layer {at}", "share_of_queries", "key_tokens", SHARES, at) for at in (0, 18)),
        *((f"layer {at}", "key_tokens_for_0.9", "query_token", COUNTS, at) for at in (0, 18)),
    ],
    "fig7": [(name, f"{of}_magnitude", "column_rank", SKEWED[name], 18) for of in ("query", "key") for name in SKEWED],
    "attention_error": [
        (series, metric, "layer, offline", {layer: scale * (layer - 1) for layer in (1, 2, 3)}, None)
        for metric, scale in (("attention_error", 0.1), ("attention_error_p95", 0.2))
        for series in ("H2O, 10 %", "H2O, 25 %", "INT8, 53 %")
    ],
    "fig20": [
        *((f"layer {at}", "share_of_sparse_queries", "seq_len", SPARSE, at) for at in (0, 18)),
        ("key 7", "attention_weight", "query_token", {6000: 0.01, 7000: 0.02}, 18),
        ("key 1200", "attention_weight", "query_token", {6000: 0.02, 7000: 0.04}, 18),
    ],
}


def curve_rows(name: str) -> list[Row]:
    common = {"stderr": None, "source": "modelled"} if name == "fig2" else {}
    return [
        common | {"series": series, "metric": metric, "x_name": x_name, "layer": layer, "x": x, "value": value}
        for series, metric, x_name, values, layer in CURVES[name]
        for x, value in values.items()
    ]


ROWS: dict[str, list[Row]] = {
    **dict(map(parsed, TABLES.split("\n\n"))),
    **TIMED,
    **{name: curve_rows(name) for name in CURVES},
    "ruler": [*ruler_rows()],
}
ROWS["ablation"] = ROWS["index"]
ROWS["long_decode"] = [row | {"metric": "kl_nats"} for row in ROWS["fig12"]]
SHAPES = {
    **dict.fromkeys((*TIMED, "fig17-latency"), "latency"),
    **dict.fromkeys(CURVES, "analysis"),
    "board-methods": "board",
}
"""Shapes of the tables that are not of accuracy."""
COMMON = {
    "model": "tiny", "num_samples": 48, "num_fewshot": 0, "stderr": 0.03, "run_id": "0" * 16, "platform": "cpu",
    "batch_size": 4, "prompt_len": 1024, "gen_len": 8,
}  # fmt: skip


def write(results: Path, name: str, rows: Iterable[Row] | None = None, **cells: Any) -> None:
    """One of the tables, with other rows or with `cells` in all of them."""
    shape = SHAPES.get(name, "accuracy")
    common = COMMON | {"experiment": name, "source": "emulated" if shape == "latency" else "measured"}
    path = results / "tables" / f"{name}.csv"
    path.parent.mkdir(exist_ok=True, parents=True)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns.TABLES[shape], restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(common | row | cells for row in (ROWS[name] if rows is None else rows))


# What a figure shows


def draw(name: str, results: Path) -> Figure:
    with style.applied():
        figure = figure_of(results, name)
        assert figure is not None
        figure.draw_without_rendering()  # lays it out; ticks take their style when drawn
    return figure


def drawn(name: str, results: Path, rows: Iterable[Row], **cells: Any) -> Figure:
    """The figure of other rows, its own table alone."""
    write(results, name, rows, **cells)
    return draw(name, results)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """All tables."""
    folder = tmp_path_factory.mktemp("results")
    for table in ROWS:
        write(folder, table)
    return folder


@pytest.fixture(scope="module")
def shown(results) -> Callable[[str], Figure]:
    """The figure of one of the tables, drawn once."""
    return cache(lambda name: draw(name, results))


def note(figure: Figure) -> str:
    return figure.get_supxlabel().replace("\n", " ")


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def bar_heights(axes: Axes) -> dict[str, list[float]]:
    """Heights by label; a legend entry without bars is left out."""
    bars = [container for container in axes.containers if isinstance(container, BarContainer) and container.patches]
    return {str(bar.get_label()): [patch.get_height() for patch in bar.patches] for bar in bars}


def tick_labels(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_xticklabels()]


def lines(axes: Axes) -> dict[str, ErrorbarContainer]:
    containers = [container for container in axes.containers if isinstance(container, ErrorbarContainer)]
    return {str(container.get_label()): container for container in containers}


def xy(axes: Axes, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The points of the line of a name."""
    found = lines(axes)[name].lines[0] if name in lines(axes) else None
    line = found or next(line for line in axes.lines if line.get_label() == name)
    return np.asarray(line.get_xdata(orig=False)), np.asarray(line.get_ydata(orig=False))


def bar_of(axes: Axes, name: str, at: int = 0) -> np.ndarray:
    """The ends of an error bar of the line of a name."""
    _, _, (bars,) = lines(axes)[name]
    return bars.get_segments()[at][:, 1]


def hollow_points(axes: Axes, of: str = style.OF_PAPER) -> list[tuple[float, float]]:
    marks = [line for line in axes.lines if str(line.get_label()).startswith(of)]
    return [(float(mark.get_xdata()[0]), float(mark.get_ydata()[0])) for mark in marks]


def levels(axes: Axes, name: str = style.FULL) -> list[float]:
    """The heights of the level lines of a name."""
    return [line.get_ydata()[0] for line in axes.lines if line.get_label() == name]


UNITS = ("%", "(s)", "(ms)", "(x)", "(nats)", "perplexity", "(GiB)", "(tokens)", "cosine similarity", "mean |")


@pytest.mark.parametrize("name", ["fig11", "fig16b", "fig17", "fig18", "table2", "choices", "fig5"])
def test_a_figure_has_units_and_nothing_overlaps(name: str, shown) -> None:
    figure = shown(name)
    for axes in figure.axes:
        quantity = axes.get_ylabel() or axes.get_xlabel()
        assert any(unit in quantity for unit in UNITS), quantity
    assert len(set(legend(figure))) == len(legend(figure)) > 0
    assert all(figure.legends[0].get_window_extent().y0 >= axes.bbox.y1 for axes in figure.axes)
    with style.applied():  # a tick takes its font when it is made
        boxes = [part.get_tightbbox() for part in (*figure.axes, figure._supxlabel, *figure.legends)]
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, "cut off"


def test_reruns_give_equal_bytes(results, monkeypatch) -> None:
    monkeypatch.setattr(drawing, "DRAWINGS", {"fig18": DRAWINGS["fig18"]})  # bars, hatches, parts
    monkeypatch.setattr(drawing, "DPI", 40)  # takes a fraction of the time
    paths = plots.main(results)
    assert {path.name for path in paths} == {f"fig18.{kind}" for kind in drawing.FORMATS}
    before = {path: path.read_bytes() for path in paths}
    assert not any(b"CreationDate" in content or b"dc:date" in content for content in before.values())
    assert all(path.read_bytes() == before[path] for path in plots.main(results))


LINES = {  # by figure: the panel, a name, x and y of its line
    "fig11": [(0, "InfiniGen", [10, 16, 25], [60, 67.5, 72]), (0, "INT8/4/2", [16, 28, 53], [44, 46, 48])],
    "fig12": [(0, "H2O, 16 %", [384, 640, 896], [21, np.nan, 22])],  # a missing chunk is a gap
    "attention_error": [(0, "H2O, 10 %", [2, 3], [10, 20]), (1, "INT8, 53 %", [2, 3], [20, 40])],
    "fig17": [(0, "accuracy", [1, 3, 9], [50, 50, 50]), (1, "latency", [1, 3, 9], [2, 2.1, 2.4])],
    "fig19": [
        (0, "H2O", [10, 20, 40], [50, 30, 16]),
        (1, "Full cache", [1024, 8192], [14, 8]),
        (1, "InfiniGen", [1024, 8192], [28, 16]),
    ],
    "index": [(0, "coded, 4 bits", [2.5, 7.5], [0.1, 0.03]), (1, "columns", [5, 15], [33, 40])],
    "fig2": [(0, "KV cache", [1024, 2048, 4096], [16, 32, 64]), (1, "weights", [1, 4, 16], [2, 2, 2])],
    "fig5": [(1, "layer 0", [500, 1000, 1500], [80, 140, 150])],
    "fig7": [(1, "after skewing", [0, 1, 2], [4, 0.5, 0.2])],
    "fig20": [(0, "layer 0", [2048, 4096, 8192], [10, 20, 40]), (1, "key 1200", [6000, 7000], [2, 4])],
}
LEGENDS = {
    "fig11": ["Full cache", "InfiniGen", "H2O", "INT8/4/2", "chance"],
    "fig12": ["Full cache", "InfiniGen, 16 %", "H2O, 16 %"],
    "long_decode": ["InfiniGen, 16 %", "H2O, 16 %"],  # the full cache has no distance from itself
    "fig17": ["Full cache", "accuracy", "latency", "chance"],
    "fig19": ["Full cache", "InfiniGen", "H2O", "INT4"],
    "index": ["columns", "coded, 4 bits"],
    "long": ["texts of 4,096 tokens", "texts of 8,192 tokens"],
    "attention_error": ["H2O, 10 %", "INT8, 53 %"],  # the budget nearest to 10 %
    "table2": ["Full cache", "InfiniGen", f"{style.OF_PAPER}, quoted"],
}
SCALES = {  # of y
    "fig11": ["linear", "linear", "log", "linear"],
    "attention_error": ["log", "log"],
    "fig19": ["linear", "log"],
    "ablation": ["log", "linear"],
}
BARS = {  # by figure: the panel, and heights by label
    "fig13": [(0, {"InfiniGen": [80, 80], "InfiniGen without skewing": [60, 60]})]
    + [(1, {"InfiniGen": [0.1], "InfiniGen without skewing": [0.3]})],
    "table2": [(0, {"InfiniGen": [11, 40, 12]})],
    "choices": [(0, {"InfiniGen": [0.06, 0.07]}), (1, {"InfiniGen": [12, 14]})],
    "fig15": [(0, {"infinigen": [1.9, np.nan]})],
    "fig16a": [(0, {"infinigen": [np.nan, 10.2 / 3.2]}), (1, {"infinigen": [np.nan, 9.0 / 1.9]})],
    "disk": [(0, {"disk": [204.8, 409.6]}), (1, {"disk+quest": [200, 200]})],  # MB, in each of 7 steps
}
TICKS = {
    "fig13": [[f"{task}\nread 20 / 21 %\nn = 48" for task in ("kv_recall", "passkey")]],
    "table2": [["100 %", "80 %\nfifo", "80 %\nlru"]],
    "choices": 2 * [["default", "pool_frac=0.5,\neviction=artifact"]],
    "fig14": [list(TIMES)],
    "fig15": [["1", "8"]],
    "fig16a": [["520", "1,032"]],
    "fig16b": [["opt-6.7b", "opt-13b", "opt-30b"]],
    "disk": [["1,024", "2,048"]],
}
LEVELS = {  # panel and name of a level line, and its heights
    "fig11": [(0, "Full cache", {85}), (0, "chance", {25}), (2, "Full cache", set())],
    "fig13": [(0, "Full cache", {85})],
    "fig17": [(0, "Full cache", {80}), (2, "Full cache", {80}), (2, "chance", {50})],
    "fig19": [(0, "Full cache", {10})],
    "choices": [(1, "Full cache", {10})],
}


@pytest.mark.parametrize("name", {**LINES, **LEGENDS, **SCALES, **BARS, **TICKS})
def test_a_figure_has_the_numbers_of_its_table(name, shown) -> None:
    figure = shown(name)
    panels = figure.axes
    if name == "fig17":  # each setting has two axes
        panels = sorted(panels, key=lambda axes: (axes.bbox.x0, axes.get_ylabel()))
    for panel, label, *expected in LINES.get(name, []):
        np.testing.assert_allclose(xy(panels[panel], label), expected)
    for panel, heights in BARS.get(name, []):
        found = bar_heights(panels[panel])
        for label, expected in heights.items():
            np.testing.assert_allclose(found[label], expected)
    for panel, label, heights in LEVELS.get(name, []):
        assert set(levels(panels[panel], label)) == heights
    assert legend(figure) == LEGENDS.get(name, legend(figure))
    scales = [axes.get_yscale() for axes in panels]
    assert scales == SCALES.get(name, scales)
    for axes, ticks in zip(panels, TICKS.get(name, []), strict=False):
        assert tick_labels(axes) == ticks


def test_a_line_joins_runs_of_one_kind(tmp_path) -> None:
    row = {"label": "InfiniGen", "task": "copa", "metric": "acc", "value": 0.5}
    by_budget = [row | {"budget": budget, "settings": f"rank=3, budget={budget}"} for budget in (0.1, 0.2)]
    by_setting = [row | {"budget": 0.15, "settings": "alpha=4, max_size=3"}]
    (axes,) = drawn("fig11", tmp_path, by_budget + by_setting).axes
    found = {name: list(xy(axes, name)[0]) for name in lines(axes)}
    assert found == {"InfiniGen": [10, 20], "InfiniGen, budget not set": [15]}
    assert {line.lines[0].get_color() for line in lines(axes).values()} == {style.LOOKS["InfiniGen"].color}


def test_bars_are_errors_of_the_difference_where_the_table_has_it(shown, tmp_path) -> None:
    np.testing.assert_allclose(bar_of(shown("fig11").axes[0], "InfiniGen"), [57, 63])
    np.testing.assert_allclose(bar_of(shown("fig12").axes[0], "H2O, 16 %"), [20, 22])
    of_mean = bar_of(shown("index").axes[1], "columns")
    np.testing.assert_allclose(np.diff(of_mean), 2 * 3 / 2**0.5, err_msg="of two tasks")
    of_difference = {"difference": -0.2, "difference_stderr": 0.01}
    rows = [row if row.get("method") else row | of_difference for row in ROWS["fig11"] if row["task"] == "kv_recall"]
    figure = drawn("fig11", tmp_path, rows)
    np.testing.assert_allclose(bar_of(figure.axes[0], "InfiniGen"), [59, 61])
    assert not figure.axes[0].patches, "no band of the full cache's own error, which the differences do not have"
    assert note(figure).endswith("bars: standard error of the difference to the full cache")
    figure = drawn("fig11", tmp_path, [*rows, *(row for row in ROWS["fig11"] if row["task"] == "passkey")])
    assert [len(axes.patches) for axes in figure.axes] == [0, 1]
    assert note(figure).endswith("to the full cache, else of the value")


@pytest.mark.parametrize(
    ("name", "changes", "titles"),
    [
        ("fig12", [{"model": "other"}, {"num_samples": 8}], ["tiny, n = 3", "other, n = 3", "tiny, n = 8"]),
        ("fig14", [{"source": "modelled"}], ["source: emulated", "source: modelled"]),
        ("fig7", [{"run_id": "1" * 16}], [f"run {number * 16}" for number in "0011"]),
    ],
)
def test_models_numbers_of_samples_sources_and_runs_share_no_panel(name, changes, titles, tmp_path) -> None:
    figure = drawn(name, tmp_path, [row | change for change in ({}, *changes) for row in ROWS[name]])
    assert [axes.get_title() for axes in figure.axes] == titles


def test_a_run_without_skewing_has_no_partner_of_other_questions(tmp_path) -> None:
    row = {"task": "passkey", "metric": "acc", "budget": 0.2, "value": 0.6}
    rows = [row | {"label": "InfiniGen without skewing"}, row | {"label": "InfiniGen", "num_samples": 8}]
    (axes, *_) = drawn("fig13", tmp_path, rows).axes
    assert list(bar_heights(axes)) == ["InfiniGen without skewing"], "a gap"


def test_table2_has_a_panel_per_model_and_the_papers_numbers_hollow(shown) -> None:
    ours, *others = shown("table2").axes
    assert ours.get_title() == "tiny" and not hollow_points(ours)
    names = ["opt-6.7b", "opt-13b", "opt-30b", "llama2-7b", "llama2-13b"]
    assert [axes.get_title() for axes in others] == [f"{name}, published" for name in names]
    assert all(np.isnan(bar_heights(axes)["InfiniGen"]).all() for axes in others), "no bars"
    assert hollow_points(others[0]) == [(0, 11.68), (1, 19.64), (2, 11.68), (3, 11.68)], "WikiText-2 alone"


def test_long_contexts_are_drawn_by_method_and_length(shown) -> None:
    for axes, right in zip(shown("long").axes, ([0.02, 0.03], [70, 65]), strict=True):
        assert [tick.get_text() for tick in axes.get_yticklabels()][:2] == ["H2O", "InfiniGen2"], "the closest on top"
        own = [line.lines[0] for line in axes.containers if round(line.lines[0].get_ydata()[0]) == 1]
        assert [line.get_xdata()[0] for line in own] == pytest.approx(right)
        assert [line.get_markerfacecolor() for line in own] == [style.look("InfiniGen2").color, "white"]


def test_rulers_tasks_have_a_panel_for_each_prefill_and_bars_by_length(shown) -> None:
    panels = {axes.get_title(): axes for axes in shown("ruler").axes}
    assert list(panels) == ["", "prefill=dense", "prefill=question"]
    heights = {title: [bar.get_height() for bar in axes.patches] for title, axes in panels.items()}
    assert heights == {"": [100, 50], "prefill=dense": [75, 37.5], "prefill=question": [25, 12.5]}
    assert tick_labels(panels[""]) == ["512", "2,048"], "no row of a depth"


def test_fig5_has_a_histogram_and_series_have_looks_of_their_own(shown) -> None:
    (steps,) = [patch for patch in shown("fig5").axes[0].patches if patch.get_label() == "layer 18"]
    np.testing.assert_allclose(steps.get_data().values, [50, 25, 0, 25])
    np.testing.assert_allclose(steps.get_data().edges, [0, 32, 64, 96, 128])
    looks = [(line.get_color(), line.get_marker()) for axes in shown("fig20").axes for line in axes.lines]
    assert len(set(looks)) == len(looks) == 4
    assert "layer 18" in shown("fig20").axes[1].get_xlabel()


@pytest.mark.parametrize(("series", "num_shown"), [("layer 18", 8), ("layer 17", 0)])
def test_published_counts_only_of_the_same_layer(series, num_shown, tmp_path) -> None:
    figure = drawn("fig5", tmp_path, ROWS["fig5"], model="opt-6.7b", series=series)
    found = [point for axes in figure.axes for point in hollow_points(axes, analysis.OF_PG19)]
    assert len(found) == num_shown and {*found} >= ({(500, 80), (1001, 154)} if num_shown else set())


def test_times_are_stacked(shown) -> None:
    figure, offload = shown("fig14"), list(TIMES).index("offload")
    decode = [bar.patches[0] for bar in figure.axes[0].containers if bar.get_label() == "_decode"][offload]
    assert decode.get_y() == 1.2 and decode.get_height() == 9.0
    assert note(figure) == "tiny, cpu, source: emulated, batch 4, prompt 1,024, 8 generated"
    heights = bar_heights(shown("fig18").axes[0])
    assert list(heights) == ["attention", "FFN", "prediction", "transfer", "other"]
    assert sum(segment[offload] for segment in heights.values()) == pytest.approx(1 + 0.8 + 9 + 0.1)


def test_systems_that_others_are_compared_with_have_no_bar(shown) -> None:
    assert "offload" not in bar_heights(shown("fig16a").axes[0])
    times, read = shown("disk").axes
    assert "ideal" not in bar_heights(times) | bar_heights(read)
    assert 51.2 in {line.get_segments()[0][0][1] for line in times.collections}, "a line"


def test_modelled_figures_have_their_own_rows_and_the_published_numbers(tmp_path) -> None:
    costmodel.write_tables(tmp_path)
    for name in costmodel.FIGURES:
        assert "source: modelled" in note(draw(f"{name}-modelled", tmp_path))
        assert figure_of(tmp_path, name) is None, "a prediction is no timed run"
    kinds = [f"{style.OF_PAPER}, {kind}" for kind in ("derived", "approximate")]
    assert legend(draw("fig14-modelled", tmp_path))[-2:] == kinds
    speedup, decode = draw("fig16b-modelled", tmp_path).axes
    assert {point[1] for point in hollow_points(speedup)} == {1.18, 1.28, 1.34} and not hollow_points(decode)
    centres = {patch.get_center()[0] for bar in speedup.containers for patch in bar.patches}
    assert all(any(abs(x - centre) < 1e-9 for centre in centres) for x, _ in hollow_points(speedup))


@pytest.mark.parametrize(
    ("name", "batch", "expected"),
    [
        ("fig14", 20, {182.6, 99.6, 60.97}),
        ("fig15", 20, {20 * 128 / 14.02, 20 * 128 / 25.70, 20 * 128 / 41.99}),
        ("fig16a", 8, {1.92, 3.40, 5.28}),
        ("fig18", 8, {1.51, 28.0, 5.89, 2.29}),
    ],
)
def test_published_points_only_where_the_setup_matches(name, batch, expected, tmp_path) -> None:
    shape = PAPER_SHAPE | {"batch_size": batch}
    figure = drawn(name, tmp_path, TIMED["fig18"], **shape)
    assert any(text.startswith(style.OF_PAPER) for text in legend(figure))
    assert {y for _, y in hollow_points(figure.axes[0])} == expected
    for change in {"source": "modelled", "model": "opt-6.7b", "prompt_len": 1024, "batch_size": batch + 1}.items():
        figure = drawn(name, tmp_path, TIMED["fig18"], **shape | dict([change]))
        assert not any(map(hollow_points, figure.axes)), change


# Looks, damage, files


def test_labels_that_are_not_listed_have_looks_of_their_own() -> None:
    with style.applied():
        looks = {style.look(f"method {number}") for number in range(len(style.OTHERS))}
    assert len(looks) == len(style.OTHERS) and not looks & {*style.LOOKS.values()}


def test_two_rows_for_one_bar_are_refused_and_others_still_drawn(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(drawing, "rendered", lambda figure: {"png": b"x"})  # rendering takes seconds
    write(tmp_path, "fig14", [*time_rows(), *time_rows(["ideal"])])
    write(tmp_path, "fig12")
    with pytest.raises(UserError, match=r"^fig14: several rows with label=ideal at tiny, batch 4[^;]*$"):
        plots.main(tmp_path)
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["fig12.png"]


def test_no_table_and_another_file_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="tables: no table of a figure; `python run.py experiment=fig11`"):
        plots.main(tmp_path)
    write(tmp_path, "fig11", [])
    (tmp_path / "tables" / "fig11.csv").write_text("model,label\na,b\n")
    with pytest.raises(UserError, match=r"^[^\n]*fig11\.csv: not a table of results"):
        plots.main(tmp_path)

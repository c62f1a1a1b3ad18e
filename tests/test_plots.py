"""Every figure from a small table made up here: what is drawn, what is left out, equal bytes on a rerun."""

import ast
import csv
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import analysis_tables
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure

import plots
from harness.errors import UserError
from harness.paper.costmodel import published as costmodel
from harness.tables import columns
from plots import accuracy, data, drawing, speed, style
from plots.drawing import DRAWINGS

ROOT = Path(__file__).resolve().parent.parent
READ = ("harness.errors", "harness.files", "harness.tables")
"""What plots import of the harness; of the tables their columns alone, which test_layers holds."""
Rows = Iterable[Mapping[str, Any]]

SIZES = {
    "InfiniGen": (0.10, 0.16, 0.25),
    "H2O": (0.10, 0.16, 0.25),
    "INT8": (0.53,),
    "INT4": (0.28,),
    "INT2": (0.16,),
}
TIMES = {  # prefill and decode seconds at batch 1
    "ideal": (1.0, 1.0),
    "offload": (1.2, 9.0),
    "offload-pageable": (1.2, 12.0),
    "offload+int4": (1.3, 3.4),
    "offload+h2o": (1.2, 3.0),
    "infinigen": (1.3, 1.9),
    "infinigen+reuse": (1.3, 1.7),
    "infinigen+int4": (1.4, 1.6),
}


def write(results: Path, name: str, columns: Iterable[str], rows: Rows) -> None:
    path = results / "tables" / f"{name}.csv"
    path.parent.mkdir(exist_ok=True, parents=True)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(columns), restval="")
        writer.writeheader()
        writer.writerows({"experiment": name, **row} for row in rows)


def write_accuracy(results: Path, name: str, rows: Rows) -> None:
    common = {"model": "tiny", "source": "measured", "num_samples": 48, "num_fewshot": 0, "stderr": 0.03}
    write(results, name, columns.names(columns.ACCURACY), (common | dict(row) for row in rows))


def write_latency(results: Path, name: str, rows: Rows) -> None:
    shape = {"batch_size": 4, "prompt_len": 1024, "gen_len": 8}
    common = {"model": "tiny", "platform": "cpu", "source": "emulated"} | shape
    write(results, name, columns.names(columns.LATENCY), (common | dict(row) for row in rows))


def task_rows(task: str) -> list[dict[str, Any]]:
    rows = [{"method": "full", "label": "Full cache", "task": task, "metric": "acc", "value": 0.85, "size": 1}]
    for label, sizes in SIZES.items():
        for size in sizes:
            value = 0.8 - 0.02 / size if label == "InfiniGen" else 0.5 - 0.01 / size
            rows.append({"label": label, "task": task, "metric": "acc", "value": value, "size": size})
    return rows


def fidelity_rows() -> list[dict[str, Any]]:
    common = {"task": "offline", "seq_len": 1024, "num_samples": 3, "num_fewshot": None}
    full = {"label": "Full cache", "method": "full", "size": 1, "stderr": 0}
    rows = [full | {"metric": "kl_nats", "value": 0}, full | {"metric": "top1_agreement", "value": 1}]
    for label, sizes in SIZES.items():
        for size in sizes:
            kl = (0.01 if label == "InfiniGen" else 0.05) / size
            rows.append({"label": label, "size": size, "metric": "kl_nats", "value": kl, "stderr": kl / 5})
            rows.append({"label": label, "size": size, "metric": "top1_agreement", "value": 1 - kl, "stderr": 0.01})
    return [common | row for row in rows]


def chunk_rows(label: str, size: float, values: Mapping[int, float]) -> list[dict[str, Any]]:
    common = {
        "label": label,
        "size": size,
        "metric": "perplexity",
        "seq_len": 1024,
        "num_samples": 3,
        "stderr": 1,
    }
    return [common | {"task": f"offline[{256 * i}:{256 * i + 256}]", "value": value} for i, value in values.items()]


def time_rows(labels: Iterable[str] = TIMES, scale: float = 1.0, **shape: Any) -> list[dict[str, Any]]:
    rows = []
    for label in labels:
        prefill, decode = (scale * seconds for seconds in TIMES[label])
        times = {"prefill_s": prefill, "decode_s": decode, "total_s": prefill + decode}
        rows.append({"label": label, "method": label.split("+")[0]} | times | shape)
    return rows


def write_fig11(results: Path) -> None:
    write_accuracy(results, "fig11", [*task_rows("kv_recall"), *task_rows("passkey")])
    write_accuracy(results, "perplexity", fidelity_rows())


def write_fig12(results: Path) -> None:
    rows = chunk_rows("Full cache", 1, {1: 15.0, 2: 12.0, 3: 11.0})
    rows += chunk_rows("InfiniGen", 0.16, {1: 15.5, 2: 12.5, 3: 11.7})
    rows += chunk_rows("H2O", 0.163, {1: 21.0, 3: 22.0})  # a chunk is missing
    write_accuracy(results, "fig12", rows)


def write_long_decode(results: Path) -> None:
    rows = []
    for label, size, kl in (("Full cache", 1, 0.0), ("InfiniGen", 0.16, 0.05), ("H2O", 0.16, 0.8)):
        for step in range(4):
            common = {"label": label, "size": size, "task": f"offline[{32 * step}:{32 * (step + 1)}]"}
            common |= {"seq_len": 640, "num_samples": 4, "num_fewshot": None}
            rows.append(common | {"metric": "kl_nats", "value": kl * (1 + step), "stderr": kl / 4})
            rows.append(common | {"metric": "text_perplexity", "value": 1.5 + kl, "stderr": 0.1})
    whole = {"task": "offline", "seq_len": 640, "metric": "first_divergence", "value": 12.0}
    write_accuracy(results, "long_decode", [*rows, whole | {"label": "H2O", "size": 0.16}])


def write_fig13(results: Path) -> None:
    rows = []
    for task in ("kv_recall", "passkey"):
        common = {"task": task, "metric": "acc"}
        rows.append(common | {"label": "Full cache", "method": "full", "size": 1, "value": 0.85})
        rows.append(common | {"label": "InfiniGen", "size": 0.2, "value": 0.8})
        rows.append(common | {"label": "InfiniGen", "size": 0.4, "value": 0.83})
        rows.append(common | {"label": "InfiniGen without skewing", "size": 0.21, "value": 0.6})
    full = [row for row in rows if row["label"] == "Full cache"]
    text = {"task": "offline", "seq_len": 1024, "num_samples": 3, "num_fewshot": None, "metric": "kl_nats"}
    rows.append(text | {"label": "InfiniGen", "size": 0.16, "value": 0.1, "stderr": 0.02})
    rows.append(text | {"label": "InfiniGen without skewing", "size": 0.16, "value": 0.3, "stderr": 0.02})
    write_accuracy(results, "fig13", [row for row in rows if row not in full])
    write_accuracy(results, "fig11", full)


def write_fig15(results: Path) -> None:
    write_latency(results, "fig15", (row for batch in (1, 4, 8) for row in time_rows(scale=batch, batch_size=batch)))


def write_fig16a(results: Path) -> None:
    lengths = (512, 1024, 2048)
    write_latency(results, "fig16a", (row for n in lengths for row in time_rows(scale=n / 512, prompt_len=n)))


def write_fig16b(results: Path) -> None:
    models = ("opt-13b", "opt-30b", "opt-6.7b")
    write_latency(results, "fig16b", (row for model in models for row in time_rows(model=model)))


def write_fig17(results: Path) -> None:
    accuracy, latency = [], []
    for name, numbers in (("alpha", (1, 3, 5, 7, 9)), ("partial_weight_ratio", (0.1, 0.3, 0.6, 1.0))):
        for index, number in enumerate(numbers):
            row = {"label": f"{name}={number}"}
            accuracy.append(row | {"task": "winogrande", "metric": "acc", "value": 0.5 + 0.03 * index, "size": 0.1})
            latency.append(row | {"prefill_s": 1, "decode_s": 2 + 0.1 * index, "total_s": 3 + 0.1 * index})
    accuracy.append({"label": "alpha=inf", "task": "winogrande", "metric": "acc", "value": 0.7, "size": 0.2})
    accuracy.append({"label": "Full cache", "task": "winogrande", "metric": "acc", "value": 0.8, "size": 1})
    write_accuracy(results, "fig17", accuracy)
    write_latency(results, "fig17-latency", latency)


def write_fig18(results: Path) -> None:
    rows = []
    for row in time_rows():
        waited = 0.0 if row["label"] == "ideal" else row["decode_s"] / 1000
        rows.append(row | {"attention_s": 0.001, "ffn_s": 0.0008, "transfer_s": waited, "other_s": 0.0001})
    rows[-1]["prediction_s"] = 0.0003
    write_latency(results, "fig18", rows)


def text_rows(label: str, size: float, value: float, full: float = 10.0, **shape: Any) -> list[dict[str, Any]]:
    common = {"label": label, "task": "wikitext2", "size": size, "seq_len": 2048, "num_fewshot": None} | shape
    values = {"perplexity": value, "perplexity_full": full}
    return [common | {"metric": metric, "value": number} for metric, number in values.items()]


def write_table2(results: Path, **shape: Any) -> None:
    values = {"80 % lru": 12.0, "100 %": 11.0, "80 % fifo": 40.0}  # in another order than drawn, one missing
    rows = [row for pool, value in values.items() for row in text_rows(f"InfiniGen, pool {pool}", 0.2, value, **shape)]
    rows.append(rows[0] | {"task": "wikitext2[256:512]", "value": 500.0})
    rows.append(rows[0] | {"label": "InfiniGen", "value": 500.0})
    write_accuracy(results, "table2", rows)


def write_fig19(results: Path) -> None:
    rows = text_rows("INT4", 0.33, 11.0) + text_rows("INT8", 0.56, 10.1)
    for size in (0.4, 0.1, 0.2):
        rows += text_rows("InfiniGen", size, 10 + 1 / size) + text_rows("H2O", size, 10 + 2 / size)
    for length, full in ((8192, 8.0), (1024, 14.0)):
        shape = {"seq_len": length, "num_samples": 8192 // length}
        rows += text_rows("InfiniGen with 64 tokens", 64 / length, 2 * full, full, **shape)
        rows += text_rows("H2O with 64 tokens", 64 / length, 200.0, full, **shape)
    write_accuracy(results, "fig19", rows)


def write_board(results: Path) -> None:
    """Methods of every family at three sizes, the step timed at the middle one, and what has a size of its own."""
    common = {"model": "tiny", "source": "measured"}
    rows: list[dict[str, Any]] = [{"label": "Full cache", "family": "reads all", "size": 1, "kl_nats": 0}]
    rows.append({"label": "INT4", "family": "codes", "size": 0.33, "kl_nats": 0.1})
    for label, family, scale in (("InfiniGen", "retrieves", 1), ("H2O", "evicts", 4), ("Oracle", "bound", 0.3)):
        for size in (0.10, 0.16, 0.25):
            sized = {
                "label": label,
                "family": family,
                "asked_size": size,
                "size": size,
                "kl_nats": 0.002 * scale / size**2,
            }
            front = {"front": "link bytes, step time" if size > 0.1 else "link bytes"} if scale == 1 else {}
            rows.append(sized | front | {"step_source": "emulated" if size == 0.16 else "modelled"})
    for row in rows:
        row["step_s"] = None if row["family"] == "bound" else 0.02 + 0.1 * row["size"]
    write(results, "leaderboard", columns.names(columns.BOARD), (common | row for row in rows))


def write_index(results: Path) -> None:
    rows = []
    for kind, gain in (("columns", 1.0), ("balanced", 0.8), ("coded, 4 bits", 0.5)):
        for ratio in (0.1, 0.3, 0.5):
            common = {"label": kind, "size": 0.16, "resident_frac": gain * ratio / 2, "run_id": f"{kind}{ratio}"}
            rows.append(
                common | {"task": "offline", "metric": "kl_nats", "value": gain * 0.02 / ratio, "seq_len": 1024}
            )
            rows[-1] |= {"num_samples": 3, "num_fewshot": None, "stderr": 0.005}
            for task in ("kv_recall", "passkey"):
                rows.append(common | {"task": task, "metric": "acc", "value": 0.3 + ratio / gain / 3})
    write_accuracy(results, "index", rows)


def write_choices(results: Path) -> None:
    choices = {"": (12, 0.06), ", columns=query": (11, 0.05), ", pool_frac=0.5, eviction=artifact": (14, 0.07)}
    rows = []
    for choice, (perplexity, kl) in choices.items():
        rows += text_rows(f"InfiniGen{choice}", 0.2, perplexity)
        rows.append(rows[-1] | {"metric": "kl_nats", "value": kl})
    rows.append(rows[0] | {"task": "wikitext2[256:512]", "value": 500.0})
    write_accuracy(results, "choices", rows)


def write_needles(results: Path) -> None:
    rows = []
    for label, prefill in (("Full cache", ""), ("H2O", "dense"), ("H2O", "question")):
        # The cells show these by themselves: no band of their own.
        shown = f"num_samples={len(prefill)}, metadata.max_seq_lengths=[512, 2048]"
        settings = f"alpha=4, {shown}, prefill={prefill}" if prefill else None
        common = {"label": label, "settings": settings, "size": 1 if label == style.FULL else 0.16, "num_samples": 3}
        rows.append(common | {"task": "niah_single_1", "metric": "2048", "value": 0.5})
        for part in range(5 if label == style.FULL else 4):
            cell = {"task": f"niah_single_1[2048, {20 * part}-{20 * part + 20} %]", "metric": "2048"}
            rows.append(common | cell | {"value": part / 4})
    write_accuracy(results, "ruler", rows)


WRITERS = {
    "fig11": write_fig11,
    "fig12": write_fig12,
    "fig13": write_fig13,
    "fig14": lambda results: write_latency(results, "fig14", time_rows()),
    "fig15": write_fig15,
    "fig16a": write_fig16a,
    "fig16b": write_fig16b,
    "fig17": write_fig17,
    "fig18": write_fig18,
    "fig19": write_fig19,
    "table2": write_table2,
    "choices": write_choices,
    "long_decode": write_long_decode,
    "frontier": write_board,
    "index": write_index,
    "ruler": write_needles,
    **analysis_tables.WRITERS,
    **{f"{name}-modelled": costmodel.write_tables for name in costmodel.FIGURES},
}


def draw(name: str, results: Path) -> Figure:
    with style.applied():
        figure = DRAWINGS[name](data.Tables(results / "tables"), name)
        assert figure is not None
        figure.draw_without_rendering()  # lays it out; ticks take their style when drawn
    return figure


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


def hollow_points(axes: Axes) -> list[tuple[float, float]]:
    marks = [line for line in axes.lines if str(line.get_label()).startswith(style.OF_PAPER)]
    return [(float(mark.get_xdata()[0]), float(mark.get_ydata()[0])) for mark in marks]


def test_every_figure_has_a_made_up_table() -> None:
    assert set(WRITERS) == set(DRAWINGS)


def nothing_is_cut_off(figure: Figure) -> None:
    """All parts lie within the paper's edges."""
    note = figure._supxlabel  # only its text has a public getter
    with style.applied():  # a tick takes its font when it is made
        boxes = [part.get_tightbbox() for part in (*figure.axes, note, *figure.legends)]
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "ruler"])
def test_axes_say_quantity_and_unit_and_nothing_overlaps(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    figure = draw(name, tmp_path)
    units = ("%", "(s)", "(ms)", "(x)", "(nats)", "perplexity", "(GiB)", "(tokens)", "cosine similarity", "mean |")
    for axes in figure.axes:
        assert any(unit in axes.get_ylabel() for unit in units), axes.get_ylabel()
    assert len(set(legend(figure))) == len(legend(figure)) > 0
    nothing_is_cut_off(figure)
    assert all(figure.legends[0].get_window_extent().y0 >= axes.bbox.y1 for axes in figure.axes)


@pytest.mark.parametrize("name", WRITERS)
def test_reruns_give_equal_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "DRAWINGS", {name: DRAWINGS[name]})  # the tables may be those of many
    monkeypatch.setattr(drawing, "DPI", 40)  # takes a fraction of the time
    WRITERS[name](tmp_path)
    paths = plots.main(tmp_path)
    assert {path.name for path in paths} == {f"{name}.png", f"{name}.pdf", f"{name}.svg"}
    before = {path: path.read_bytes() for path in paths}
    assert b"CreationDate" not in before[tmp_path / "figures" / f"{name}.pdf"]
    again = {"png": drawing.FORMATS["png"]} if name != "fig12" else drawing.FORMATS  # a PDF takes long
    monkeypatch.setattr(drawing, "FORMATS", again)
    assert all(path.read_bytes() == before[path] for path in plots.main(tmp_path))


def test_fig11_draws_lines_full_cache_chance_and_errors(tmp_path: Path) -> None:
    write_fig11(tmp_path)
    figure = draw("fig11", tmp_path)
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "accuracy (%)", "accuracy (%)", "KL(full || method) (nats)", "top-1 agreement (%)",
    ]  # fmt: skip
    assert legend(figure) == ["Full cache", "InfiniGen", "H2O", "INT8/4/2/1", "chance"]
    recall, kl = figure.axes[0], figure.axes[2]
    full = next(line for line in recall.lines if line.get_label() == "Full cache")
    assert full.get_linestyle() == "--" and list(full.get_ydata()) == [85, 85]
    chance = next(line for line in recall.lines if line.get_label() == "chance")
    assert chance.get_linestyle() == ":" and list(chance.get_ydata()) == [25, 25]
    line, _, (error,) = lines(recall)["InfiniGen"]
    np.testing.assert_allclose(line.get_xdata(orig=False), [10, 16, 25])
    np.testing.assert_allclose(line.get_ydata(orig=False), [60, 67.5, 72])
    np.testing.assert_allclose(error.get_segments()[0], [[10, 57], [10, 63]])
    np.testing.assert_allclose(lines(recall)["INT8/4/2/1"][0].get_xdata(orig=False), [16, 28, 53])
    assert kl.get_yscale() == "log" and not any(text.get_label() == "Full cache" for text in kl.lines)


def paired(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as a table has it today: all but the full cache's with a difference to it."""
    return dict(row) | ({} if row.get("method") == "full" else {"difference": -0.2, "difference_stderr": 0.01})


def test_bars_are_errors_of_the_difference_where_the_table_has_it(tmp_path: Path) -> None:
    rows = task_rows("kv_recall")
    write_accuracy(tmp_path, "fig11", map(paired, rows))
    figure = draw("fig11", tmp_path)
    _, _, (error,) = lines(figure.axes[0])["InfiniGen"]
    np.testing.assert_allclose(error.get_segments()[0], [[10, 59], [10, 61]])
    assert not figure.axes[0].patches, "no band of the full cache's own error, which the differences do not have"
    assert (
        figure.get_supxlabel().replace("\n", " ").endswith("bars: standard error of the difference to the full cache")
    )
    write_accuracy(tmp_path, "fig11", [*map(paired, rows), *task_rows("passkey")])
    figure = draw("fig11", tmp_path)
    assert [len(axes.patches) for axes in figure.axes] == [0, 1]
    assert figure.get_supxlabel().replace("\n", " ").endswith("to the full cache, else of the value")


def test_a_table_of_an_older_version_has_no_differences(tmp_path: Path) -> None:
    write_fig11(tmp_path)
    path = tmp_path / "tables" / "fig11.csv"
    before = data.Tables(path.parent).accuracy("fig11")
    pd.read_csv(path).drop(columns=list(columns.names(columns.COMPARED))).to_csv(path, index=False)
    pd.testing.assert_series_equal(data.Tables(path.parent).accuracy("fig11").stderr, before.stderr)
    assert "bars: one standard error" in draw("fig11", tmp_path).get_supxlabel()


def test_fig11_parts_models_and_sample_numbers(tmp_path: Path) -> None:
    small = [row | {"model": "other"} for row in task_rows("copa")]
    few = [row | {"num_samples": 8} for row in task_rows("copa")]
    write_accuracy(tmp_path, "fig11", [*task_rows("copa"), *small, *few])
    titles = [axes.get_title() for axes in draw("fig11", tmp_path).axes]
    assert titles == ["tiny, n = 48", "other, n = 48", "tiny, n = 8"]


def test_fig12_breaks_the_line_at_a_missing_chunk(tmp_path: Path) -> None:
    write_fig12(tmp_path)
    figure = draw("fig12", tmp_path)
    assert legend(figure) == ["Full cache", "InfiniGen, 16 %", "H2O, 16 %"]
    (axes,) = figure.axes
    line, _, _ = lines(axes)["H2O, 16 %"]
    np.testing.assert_allclose(line.get_xdata(orig=False), [384, 640, 896])
    np.testing.assert_allclose(line.get_ydata(orig=False), [21, np.nan, 22])
    assert list(axes.get_xticks()) == [256, 512, 768, 1024]
    assert lines(axes)["Full cache"][0].get_linestyle() == "--"


def test_long_decode_draws_both_curves_and_no_distance_of_the_full_cache(tmp_path: Path) -> None:
    write_long_decode(tmp_path)
    figure = draw("long_decode", tmp_path)
    kl, perplexity = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "KL(full || method) (nats)", "full cache's perplexity of the text",
    ]  # fmt: skip
    assert set(lines(kl)) == {"InfiniGen, 16 %", "H2O, 16 %"}
    assert set(lines(perplexity)) == {"Full cache", "InfiniGen, 16 %", "H2O, 16 %"}
    line, _, (error,) = lines(kl)["H2O, 16 %"]
    np.testing.assert_allclose(line.get_xdata(orig=False), [16, 48, 80, 112])
    np.testing.assert_allclose(line.get_ydata(orig=False), [0.8, 1.6, 2.4, 3.2])
    np.testing.assert_allclose(error.get_segments()[1], [[48, 1.4], [48, 1.8]])
    assert (kl.get_yscale(), perplexity.get_yscale()) == ("log", "linear") and kl.get_xlabel() == "decoded token"
    assert "640 tokens" in figure.get_supxlabel()


def test_long_decode_of_the_full_cache_alone_is_one_panel(tmp_path: Path) -> None:
    row = {"label": "Full cache", "size": 1, "task": "offline[0:32]", "value": 0.0}
    rows = [row | {"metric": "kl_nats"}, row | {"metric": "text_perplexity", "value": 1.5}]
    write_accuracy(tmp_path, "long_decode", rows)
    (axes,) = draw("long_decode", tmp_path).axes
    assert "perplexity" in axes.get_ylabel()


def test_fig13_pairs_a_run_with_the_skewed_one_nearest_in_size(tmp_path: Path) -> None:
    write_fig13(tmp_path)
    accuracy, kl = draw("fig13", tmp_path).axes
    assert bar_heights(accuracy) == {"InfiniGen": [80, 80], "InfiniGen without skewing": [60, 60]}
    names = [text.get_text() for text in accuracy.get_xticklabels()]
    assert names == ["kv_recall\nKV 20 / 21 %\nn = 48", "passkey\nKV 20 / 21 %\nn = 48"]
    dashed = [line for line in accuracy.lines if line.get_label() == "Full cache"]
    assert [list(line.get_ydata()) for line in dashed] == [[85, 85], [85, 85]]
    assert bar_heights(kl) == {"InfiniGen": [0.1], "InfiniGen without skewing": [0.3]}
    assert len(accuracy.containers) == 4  # bars and their errors, two labels


def test_fig13_without_a_partner_leaves_a_gap(tmp_path: Path) -> None:
    row = {"task": "passkey", "metric": "acc", "size": 0.2, "value": 0.6}
    rows = [row | {"label": "InfiniGen without skewing"}, row | {"label": "InfiniGen", "num_samples": 8}]
    write_accuracy(tmp_path, "fig13", rows)
    assert list(bar_heights(draw("fig13", tmp_path).axes[0])) == ["InfiniGen without skewing"]


def test_fig14_stacks_decode_on_prefill(tmp_path: Path) -> None:
    write_latency(tmp_path, "fig14", time_rows())
    figure = draw("fig14", tmp_path)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == list(TIMES)
    (decode,) = [bar for bar in axes.containers if bar.get_label() == "_offload"]
    assert decode.patches[0].get_y() == 1.2 and decode.patches[0].get_height() == 9.0
    note = figure.get_supxlabel()
    assert note.replace("\n", " ") == "tiny, cpu, source: emulated, batch 4, prompt 1,024, 8 generated"


def test_sources_never_share_a_panel(tmp_path: Path) -> None:
    write_latency(tmp_path, "fig14", [*time_rows(), *time_rows(source="modelled")])
    titles = [axes.get_title() for axes in draw("fig14", tmp_path).axes]
    assert titles == ["source: emulated", "source: modelled"]


def test_fig15_groups_by_batch_and_leaves_gaps(tmp_path: Path) -> None:
    rows = [*time_rows(batch_size=1), *time_rows(["ideal", "offload"], batch_size=8)]
    write_latency(tmp_path, "fig15", rows)
    (axes,) = draw("fig15", tmp_path).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "8"]
    np.testing.assert_allclose(bar_heights(axes)["infinigen"], [1.9, np.nan])


def test_fig16_divides_offload_by_the_label(tmp_path: Path) -> None:
    rows = [*time_rows(), *time_rows(["infinigen"], prompt_len=512)]  # no offload at 512
    write_latency(tmp_path, "fig16a", rows)
    total, decode = draw("fig16a", tmp_path).axes
    np.testing.assert_allclose(bar_heights(total)["infinigen"], [np.nan, 10.2 / 3.2])
    np.testing.assert_allclose(bar_heights(decode)["infinigen"], [np.nan, 9.0 / 1.9])
    assert "offload" not in bar_heights(total)


def test_fig16b_orders_models_by_size(tmp_path: Path) -> None:
    write_fig16b(tmp_path)
    names = [text.get_text() for text in draw("fig16b", tmp_path).axes[0].get_xticklabels()]
    assert names == ["opt-6.7b", "opt-13b", "opt-30b"]


def test_fig17_has_two_axes_a_setting(tmp_path: Path) -> None:
    write_fig17(tmp_path)
    figure = draw("fig17", tmp_path)
    assert legend(figure) == ["Full cache", "accuracy", "latency", "chance"]
    alpha, alpha_right, ratio, _ = sorted(figure.axes, key=lambda axes: (axes.bbox.x0, axes.get_ylabel()))
    np.testing.assert_allclose(lines(alpha)["accuracy"][0].get_xdata(orig=False), [1, 3, 5, 7, 9])
    np.testing.assert_allclose(lines(alpha_right)["latency"][0].get_ydata(orig=False), [2, 2.1, 2.2, 2.3, 2.4])
    assert ratio.get_xlabel() == "partial weight ratio"
    for axes in (alpha, ratio):
        flat = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
        assert flat["Full cache"] == [80, 80] and flat["chance"] == [50, 50]


def test_fig17_draws_what_there_is(tmp_path: Path) -> None:
    write_fig17(tmp_path)
    (tmp_path / "tables" / "fig17-latency.csv").unlink()
    assert legend(draw("fig17", tmp_path)) == ["Full cache", "accuracy", "chance"]


def test_fig19_has_sizes_and_lengths_apart(tmp_path: Path) -> None:
    write_fig19(tmp_path)
    figure = draw("fig19", tmp_path)
    assert legend(figure) == ["Full cache", "InfiniGen", "H2O", "INT8/4/2/1"]
    sizes, lengths = figure.axes
    np.testing.assert_allclose(lines(sizes)["H2O"][0].get_data(orig=False), [[10, 20, 40], [30, 20, 15]])
    np.testing.assert_allclose(lines(sizes)["INT8/4/2/1"][0].get_xdata(orig=False), [33, 56])
    (full,) = {tuple(line.get_ydata()) for line in sizes.lines if line.get_label() == "Full cache"}
    assert full == (10, 10) and sizes.get_yscale() == "linear"
    np.testing.assert_allclose(lines(lengths)["Full cache"][0].get_data(orig=False), [[1024, 8192], [14, 8]])
    np.testing.assert_allclose(lines(lengths)["InfiniGen"][0].get_data(orig=False), [[1024, 8192], [28, 16]])
    assert lengths.get_yscale() == "log" and tick_labels(lengths) == ["1,024", "8,192"]
    assert "64 tokens kept" in figure.get_supxlabel() and "2,048 tokens" in figure.get_supxlabel()


def test_table2_has_a_panel_per_model_and_the_papers_numbers_hollow(tmp_path: Path) -> None:
    write_table2(tmp_path)
    figure = draw("table2", tmp_path)
    assert legend(figure) == ["Full cache", "InfiniGen", f"{style.OF_PAPER}, quoted"]
    ours, *others = figure.axes
    assert ours.get_title() == "tiny" and not hollow_points(ours)
    assert tick_labels(ours) == ["100 %", "80 %\nfifo", "80 %\nlru"]
    assert bar_heights(ours) == {"InfiniGen": [11, 40, 12]}
    names = ["opt-6.7b", "opt-13b", "opt-30b", "llama2-7b", "llama2-13b"]
    assert [axes.get_title() for axes in others] == [f"{name}, published" for name in names]
    assert not any(map(bar_heights, others))
    assert hollow_points(others[0]) == [(0, 11.68), (1, 19.64), (2, 11.68), (3, 11.68)], "WikiText-2 alone"


@pytest.mark.parametrize(("change", "count"), [({}, 3), ({"task": "ptb"}, 0), ({"seq_len": 1024}, 0)])
def test_table2_of_the_papers_model_has_them_on_its_bars(change, count: int, tmp_path: Path) -> None:
    write_table2(tmp_path, model="opt-13b", **change)
    ours, *others = draw("table2", tmp_path).axes
    assert len(others) == 4
    assert hollow_points(ours) == [(0, 10.55), (1, 30.99), (2, 10.55)][:count]


def test_bars_of_a_text_are_errors_of_the_difference_too(tmp_path: Path) -> None:
    rows = text_rows("InfiniGen, pool 80 % lru", 0.2, 12.0)
    rows[0] |= {"difference": 2.0, "difference_stderr": 0.5}
    write_accuracy(tmp_path, "table2", rows)
    figure = draw("table2", tmp_path)
    bar, *band = figure.axes[0].patches
    assert bar.get_height() == 12 and not band
    (errors,) = figure.axes[0].collections
    np.testing.assert_allclose(errors.get_segments()[0][:, 1], [11.5, 12.5])
    assert "difference to the full cache. Published" in figure.get_supxlabel().replace("\n", " ")


def test_choices_have_a_bar_each(tmp_path: Path) -> None:
    write_choices(tmp_path)
    kl, perplexity = draw("choices", tmp_path).axes
    assert bar_heights(kl) == {"InfiniGen": [0.06, 0.05, 0.07]}
    assert bar_heights(perplexity) == {"InfiniGen": [12, 11, 14]}
    assert (
        tick_labels(kl) == tick_labels(perplexity) == ["default", "columns=query", "pool_frac=0.5,\neviction=artifact"]
    )
    assert [list(line.get_ydata()) for line in perplexity.lines if line.get_label() == "Full cache"] == [[10, 10]]


def test_a_front_is_a_line_with_the_names_of_its_points(tmp_path: Path) -> None:
    write_board(tmp_path)
    sizes, times = draw("frontier", tmp_path).axes
    assert [text.get_text() for text in sizes.texts] == ["InfiniGen 10 %", "InfiniGen 16 %", "InfiniGen 25 %"]
    assert [text.get_text() for text in times.texts] == ["InfiniGen 16 %", "InfiniGen 25 %"]
    (front,) = (line for line in sizes.lines if line.get_label() == "front")
    assert list(front.get_xdata()) == pytest.approx([10, 16, 25])
    (full,) = (line for line in times.lines if line.get_label() == "Full cache")
    assert full.get_xdata() == pytest.approx([120, 120])
    assert legend(draw("frontier", tmp_path)) == ["Full cache", "retrieves", "evicts", "codes", "bound", "front"]


def test_an_index_is_drawn_at_its_size_on_the_device(tmp_path: Path) -> None:
    write_index(tmp_path)
    kl, accuracy = draw("index", tmp_path).axes
    coded = lines(kl)["coded, 4 bits"].lines[0]
    assert list(coded.get_xdata()) == pytest.approx([2.5, 7.5, 12.5]) and coded.get_ydata()[0] == pytest.approx(0.1)
    assert len(lines(accuracy)["columns"].lines[0].get_xdata()) == 3
    assert legend(draw("index", tmp_path)) == ["columns", "balanced", "coded, 4 bits"]


def test_fig18_segments_sum_to_the_block(tmp_path: Path) -> None:
    write_fig18(tmp_path)
    (axes,) = draw("fig18", tmp_path).axes
    heights = bar_heights(axes)
    assert list(heights) == ["attention", "FFN", "prediction", "transfer", "other"]
    offload = list(TIMES).index("offload")
    assert sum(segment[offload] for segment in heights.values()) == pytest.approx(1 + 0.8 + 9 + 0.1)


PAPER_SHAPE = {
    "model": "opt-13b",
    "platform": "cuda",
    "source": "measured",
    "prompt_len": 1920,
    "gen_len": 128,
}


def test_modelled_figures_take_their_own_rows_and_say_so(tmp_path: Path) -> None:
    costmodel.write_tables(tmp_path)
    tables = data.Tables(tmp_path / "tables")
    for name, cells in costmodel.FIGURES.items():
        assert list(tables.latency(f"{name}-modelled").label) == [cell.label for cell in cells]
        assert "source: modelled" in draw(f"{name}-modelled", tmp_path).get_supxlabel().replace("\n", " ")
        assert DRAWINGS[name](tables, name) is None, "what is modelled is no timed cell"


def test_modelled_figures_stand_beside_the_published_numbers(tmp_path: Path) -> None:
    costmodel.write_tables(tmp_path)
    kinds = [f"{style.OF_PAPER}, {kind}" for kind in ("derived", "approximate")]
    assert legend(draw("fig14-modelled", tmp_path))[-2:] == kinds
    speedup, decode = draw("fig16b-modelled", tmp_path).axes
    assert {point[1] for point in hollow_points(speedup)} == {1.18, 1.28, 1.34} and not hollow_points(decode)
    centres = {patch.get_center()[0] for bar in speedup.containers for patch in bar.patches}
    assert all(any(abs(x - centre) < 1e-9 for centre in centres) for x, _ in hollow_points(speedup))
    costmodel.write_tables(tmp_path, "h100-pcie5")
    for name in costmodel.FIGURES:
        assert not any(map(hollow_points, draw(f"{name}-modelled", tmp_path).axes)), name


def test_a_close_up_shows_what_slow_labels_dwarf(tmp_path: Path) -> None:
    slow = time_rows(["offload-pageable"], scale=4)
    write_latency(tmp_path, "fig14", [*time_rows(["offload", "infinigen", "ideal"]), *slow])
    everything, close_up = draw("fig14", tmp_path).axes
    assert "offload-pageable" in tick_labels(everything)
    assert close_up.get_title() == "offload and faster"
    assert tick_labels(close_up) == ["ideal", "offload", "infinigen"]


@pytest.mark.parametrize(
    ("name", "batch", "expected"),
    [
        ("fig14", 20, {182.6, 99.6, 60.97}),
        ("fig15", 20, {20 * 128 / 14.02, 20 * 128 / 25.70, 20 * 128 / 41.99}),
        ("fig16a", 8, {1.92, 3.40, 5.28}),
        ("fig18", 8, {1.51, 28.0, 5.89, 2.29}),
    ],
)
def test_published_points_only_where_the_setup_matches(
    name: str, batch: int, expected: set[float], tmp_path: Path
) -> None:
    segments = dict.fromkeys(columns.names(columns.SEGMENTS), 0.001)
    rows = time_rows(batch_size=batch, **(PAPER_SHAPE | (segments if name == "fig18" else {})))
    write_latency(tmp_path, name, rows)
    figure = draw(name, tmp_path)
    assert any(text.startswith(style.OF_PAPER) for text in legend(figure))
    assert {y for _, y in hollow_points(figure.axes[0])} == expected
    for change in (
        {"source": "emulated"},
        {"source": "modelled"},
        {"model": "opt-6.7b"},
        {"prompt_len": 1024},
        {"batch_size": batch + 1},
    ):
        write_latency(tmp_path, name, [row | change for row in rows])
        assert not any(map(hollow_points, draw(name, tmp_path).axes)), change


@pytest.mark.parametrize(("share", "expected"), [(0.7004, {1.18, 1.28, 1.34}), (1.0, set()), (None, set())])
def test_fig16b_published_points_stand_beside_timed_runs_with_the_papers_share_of_weights(
    share: float | None, expected: set[float], tmp_path: Path
) -> None:
    shape = PAPER_SHAPE | {"batch_size": 4}
    largest = [row | {"weights_on_device": share} for row in time_rows(**shape | {"model": "opt-30b"})]
    write_latency(tmp_path, "fig16b", [*time_rows(**shape), *largest])
    assert {y for _, y in hollow_points(draw("fig16b", tmp_path).axes[0])} == expected


def test_a_published_point_stands_on_its_bar(tmp_path: Path) -> None:
    write_latency(tmp_path, "fig15", (r for b in (4, 20) for r in time_rows(batch_size=b, **PAPER_SHAPE)))
    (axes,) = draw("fig15", tmp_path).axes
    (bars,) = [bar for bar in axes.containers if bar.get_label() == "infinigen"]
    x, _ = min(hollow_points(axes), key=lambda point: abs(point[1] - 20 * 128 / 41.99))
    assert bars.patches[1].get_center()[0] == pytest.approx(x)


def test_looks_are_distinct_in_colour_and_in_black_and_white() -> None:
    accuracy = [label for label in style.LOOKS if label[0].isupper()]
    for family in (accuracy, [*TIMES, "uvm", "uvm+h2o"]):
        marks = [(style.look(label).marker, style.look(label).hatch) for label in family if label != "INT8"]
        assert len(set(marks)) == len(marks), marks


def test_labels_that_are_not_listed_have_looks_of_their_own_in_all_figures_of_a_folder() -> None:
    labels = [f"method {number}" for number in range(len(style.OTHERS))]
    with style.applied():
        first = [style.look(label) for label in labels]
        assert [style.look(label) for label in reversed(labels)] == first[::-1]
        assert len({*first}) == len(labels) and not {*first} & {*style.LOOKS.values()}
        assert style.look("one more") in style.OTHERS
    with style.applied():
        assert style.look(labels[0]) == first[0]


def test_two_rows_for_one_bar_are_refused_and_others_still_drawn(tmp_path: Path) -> None:
    write_latency(tmp_path, "fig14", [*time_rows(), *time_rows(["ideal"])])
    write_fig12(tmp_path)
    with pytest.raises(UserError, match=r"^fig14: several rows with label=ideal at tiny, batch 4[^;]*$"):
        plots.main(tmp_path)
    assert [path.name for path in sorted((tmp_path / "figures").iterdir())] == ["fig12.pdf", "fig12.png", "fig12.svg"]


def test_a_table_without_rows_is_no_figure(tmp_path: Path) -> None:
    write_accuracy(tmp_path, "fig11", [])
    with pytest.raises(UserError, match=r"make accuracy"):
        plots.main(tmp_path)


@pytest.mark.parametrize("text", ["", "model,label\na,b\n", "\x00\x01", "experiment,size\nfig11,much\n"])
def test_a_damaged_table_is_named(text: str, tmp_path: Path) -> None:
    write_accuracy(tmp_path, "fig11", [])
    (tmp_path / "tables" / "fig11.csv").write_text(text)
    with pytest.raises(UserError, match=r"fig11\.csv: (not a table|no column)") as refusal:
        plots.main(tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_table_of_an_older_version_has_no_settings(tmp_path: Path) -> None:
    write_fig12(tmp_path)
    path = tmp_path / "tables" / "fig12.csv"
    frame = pd.read_csv(path)
    before = data.Tables(path.parent).accuracy("fig12")
    frame.drop(columns="settings").to_csv(path, index=False)
    after = data.Tables(path.parent).accuracy("fig12")
    assert after.settings.isna().all() and set(after.columns) == set(before.columns)
    assert legend(draw("fig12", tmp_path)) == ["Full cache", "InfiniGen, 16 %", "H2O, 16 %"]


def test_needles_say_share_and_number(tmp_path: Path) -> None:
    write_needles(tmp_path)
    figure = draw("ruler", tmp_path)
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels[:2]] == ["Full cache\nKV 100 %", "H2O\nKV 16 %"]
    words = [axes.get_ylabel() for axes in panels]
    assert words == ["depth (%)", "", "prefill=dense\ndepth (%)", "", "prefill=question\ndepth (%)", ""]
    full, nothing, _, h2o, *_ = panels
    assert [text.get_text() for text in full.texts] == [
        text for share in (0, 25, 50, 75, 100) for text in (str(share), "n = 3")
    ]
    assert {text.get_color() for text in full.texts[:4]} == {"white"} and full.texts[-1].get_color() == style.BLACK
    nothing_is_cut_off(figure)
    assert not nothing.texts, "the full cache's runs differ in no setting"
    assert np.isnan(h2o.images[0].get_array().filled(np.nan)[4, 0]), "a depth without questions stays empty"


def test_drawing_loads_what_it_needs_when_it_draws() -> None:
    program = "import sys, plots; sys.exit(bool({'matplotlib', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    write_fig18(tmp_path)
    (tmp_path / "figures").write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"cannot write .*figures"):
        plots.main(tmp_path)


def test_command_line(tmp_path: Path) -> None:
    """One process shows both: an error of one line, and that no model library is loaded."""
    program = (
        "import runpy, sys\n"
        "try:\n    runpy.run_module('plots', run_name='__main__')\n"
        "finally:\n    assert not {'torch', 'transformers', 'hydra', 'harness.records.record'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--results-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_plots_import_nothing_that_reads_records() -> None:
    allowed = {"matplotlib", "pandas", "numpy", "yaml", "plots", *sys.stdlib_module_names}
    for path in (ROOT / "plots").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in allowed or name in READ, f"{path.name} imports {name}"


def test_names_and_labels_agree_with_the_tables() -> None:
    assert tuple(speed.SEGMENTS) == columns.names(columns.SEGMENTS)
    assert {*accuracy.AXES} <= set(columns.METRICS)
    assert f"InfiniGen{accuracy.UNSKEWED}" in style.LOOKS
    assert {*TIMES, *costmodel.COMPARED} <= set(style.LOOKS)
    assert data.PAPER_PLATFORM == costmodel.PAPER_PLATFORM
    assert set(accuracy.CHANCE.values()) == {0.25, 0.5}

"""Figures of the analyses from made-up tables: what is drawn, and where published numbers stand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from analysis_tables import WRITERS, fig5_rows, points, write_analysis
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import analysis, data, style
from plots.drawing import DRAWINGS


def draw(name: str, results: Path) -> Figure:
    with style.applied():
        figure = DRAWINGS[name](data.Tables(results / "tables"), name)
        assert figure is not None
        figure.draw_without_rendering()
    return figure


def line(axes: Axes, name: str) -> tuple[np.ndarray, np.ndarray]:
    (found,) = [each for each in axes.lines if each.get_label() == name]
    return np.asarray(found.get_xdata()), np.asarray(found.get_ydata())


def hollow(figure: Figure) -> list[tuple[float, float]]:
    marks = [mark for axes in figure.axes for mark in axes.lines if str(mark.get_label()).startswith(analysis.OF_PG19)]
    return [(float(mark.get_xdata()[0]), float(mark.get_ydata()[0])) for mark in marks]


def test_fig2_draws_gib_by_length_and_by_batch(tmp_path: Path) -> None:
    WRITERS["fig2"](tmp_path)
    by_length, by_batch = draw("fig2", tmp_path).axes
    np.testing.assert_allclose(line(by_length, "KV cache"), [[1024, 2048, 4096], [16, 32, 64]])
    np.testing.assert_allclose(line(by_batch, "weights"), [[1, 4, 16], [2, 2, 2]])
    assert "batch 16" in by_length.get_xlabel() and "2,048 tokens" in by_batch.get_xlabel()


def test_fig4_has_a_panel_per_layer(tmp_path: Path) -> None:
    WRITERS["fig4"](tmp_path)
    figure = draw("fig4", tmp_path)
    assert [axes.get_title() for axes in figure.axes] == ["layer 0", "layer 18"]
    for axes in figure.axes:
        np.testing.assert_allclose(line(axes, "H2O"), [[10, 500, 1990], [1, 0.9, 0.7]])
        np.testing.assert_allclose(line(axes, "Oracle")[1], [1, 0.99, 0.98])


def test_fig5_draws_histogram_and_counts(tmp_path: Path) -> None:
    WRITERS["fig5"](tmp_path)
    figure = draw("fig5", tmp_path)
    histogram, counts = figure.axes
    (steps,) = [patch for patch in histogram.patches if patch.get_label() == "layer 18"]
    np.testing.assert_allclose(steps.get_data().values, [50, 25, 0, 25])
    np.testing.assert_allclose(steps.get_data().edges, [0, 32, 64, 96, 128])
    np.testing.assert_allclose(line(counts, "layer 0"), [[500, 1000, 1500], [80, 140, 150]])
    assert not hollow(figure)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"model": "opt-6.7b"}, True),
        ({"model": "opt-6.7b", "source": "modelled"}, False),
        ({"model": "opt-13b"}, False),
        ({"model": "opt-6.7b", "layer": 17}, False),
    ],
)
def test_published_counts_only_of_the_same_layer_and_model(change, shown: bool, tmp_path: Path) -> None:
    write_analysis(tmp_path, "fig5", [row | change for row in fig5_rows()])
    found = hollow(draw("fig5", tmp_path))
    expected = {(500, 80), (1000, 146), (1500, 160), (2000, 164), (998, 172), (999, 164), (1001, 154), (1002, 140)}
    assert set(found) == (expected if shown else set())


def test_fig7_parts_queries_from_keys(tmp_path: Path) -> None:
    WRITERS["fig7"](tmp_path)
    query, key = draw("fig7", tmp_path).axes
    assert "|Q|" in query.get_ylabel() and "|K|" in key.get_ylabel()
    np.testing.assert_allclose(line(key, "after skewing"), [[0, 1, 2], [4, 0.5, 0.2]])


def test_fig20_draws_shares_and_weights(tmp_path: Path) -> None:
    WRITERS["fig20"](tmp_path)
    shares, weights = draw("fig20", tmp_path).axes
    np.testing.assert_allclose(line(shares, "layer 0"), [[2048, 4096, 8192], [10, 20, 40]])
    np.testing.assert_allclose(line(weights, "key 1200"), [[6000, 7000], [2, 4]])
    assert "layer 18" in weights.get_xlabel()


def test_runs_of_one_model_share_no_panel(tmp_path: Path) -> None:
    rows = points("H2O", "cosine_similarity", "token", {1: 1.0, 2: 0.9}, 0)
    write_analysis(tmp_path, "fig4", [*rows, *(row | {"run_id": "1" * 16} for row in rows)])
    assert [axes.get_title() for axes in draw("fig4", tmp_path).axes] == ["run " + "0" * 16, "run " + "1" * 16]

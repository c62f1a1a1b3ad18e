"""Grids: cells, overrides, going on where an interrupted one stopped, and what is reported in the end."""

from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import plots
from harness import inputs, records
from harness.cli import main
from harness.config import CONF_DIR, compose
from harness.errors import UserError
from harness.grid import cells
from tests.runs import outcome, stand_in

EVERY = sorted(path.stem for path in (CONF_DIR / "grid").glob("*.yaml"))


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Stand-ins for model, experiments and figures, in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plots, "main", lambda folder: [folder / "figures" / "fig11.png"])
    return stand_in(monkeypatch)


@pytest.fixture
def small(monkeypatch):
    """`grid=accuracy` cut down to three cells; composing its 49 takes seconds."""
    node = {
        "settings": {"num_windows": 2},
        "cells": [{"method": ["full", "h2o", "int4"], "experiment": "fig12"}],
    }

    def cells_of_small(_, overrides):
        return cells(OmegaConf.create(node), overrides)

    monkeypatch.setattr("harness.grid.cells", cells_of_small)


def made(grid, *overrides):
    return cells(OmegaConf.create(grid), overrides)


def test_alternatives_are_combined_and_the_last_key_varies_fastest():
    entry = {"method": ["full", "h2o"], "seq_len": 512, "experiment": ["fig11", "fig12"]}
    configs = made({"cells": [entry]})
    assert [(c.method_name, c.experiment, c.seq_len) for c in configs] == [
        ("full", "fig11", 512),
        ("full", "fig12", 512),
        ("h2o", "fig11", 512),
        ("h2o", "fig12", 512),
    ]


def test_settings_named_together_vary_together():
    entry = {"method": "h2o", "method.heavy_frac method.recent_frac": [[0.25, 0.5], [0.125, 0.0]]}
    assert [(c.method.heavy_frac, c.method.recent_frac) for c in made({"cells": [entry]})] == [
        (0.25, 0.5),
        (0.125, 0.0),
    ]


def test_values_of_every_type_arrive():
    entry = {
        "method.alpha": float("inf"),
        "method.skew": False,
        "label": None,
        "tasks": [["kv_recall"], ["passkey", "kv_recall"]],
    }
    first, second = made({"cells": [entry]})
    assert (first.method.alpha, first.method.skew, first.label, first.tasks) == (
        float("inf"),
        False,
        None,
        ("kv_recall",),
    )
    assert second.tasks == ("passkey", "kv_recall")


GRID = {
    "settings": {"num_windows": 3},
    "cells": [{"method": ["full", "h2o"]}, {"method": "int4", "seq_len": 2048}],
}


def test_the_command_line_wins_over_what_the_grid_does_not_vary():
    configs = made(GRID, "grid=x", "num_windows=1", "seq_len=300", "results_dir=/r")
    assert {(c.num_windows, c.seq_len, c.results_dir) for c in configs} == {(1, 300, "/r")}
    assert [c.seq_len for c in made(GRID)] == [1024, 1024, 2048]


def test_what_the_grid_varies_cannot_be_given():
    with pytest.raises(UserError, match="method=oracle: the grid varies method itself"):
        made(GRID, "method=oracle")


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "grid.cells: must be a list"),
        ({"cells": []}, "grid.cells: must be a list"),
        ({"cells": ["method"]}, "grid.cells=method: must map settings to values"),
        ({"settings": [1], "cells": [{"method": "full"}]}, "grid.settings=.* must map settings to values"),
        (
            {"cells": [{"seq_len prefill_len": [512, 64]}]},
            "seq_len prefill_len needs a list of lists of 2 values",
        ),
        ({"cells": [{"method": "full"}, {"num_windows": 0}]}, "num_windows=0: must be at least 1"),
    ],
)
def test_refuses_a_malformed_grid(grid, message):
    with pytest.raises(UserError, match=message):
        made(grid)


@pytest.mark.parametrize("grid", EVERY)
def test_every_grid_composes_and_repeats_nothing(grid):
    configs = cells(compose([f"grid={grid}", "data=hub"]).grid, ["data=hub"])
    digests = inputs.digests(configs[0])
    ids = Counter((config.experiment, records.run_id(config, digests)) for config in configs)
    assert max(ids.values()) == 1
    experiments = {config.experiment for config in configs}
    assert experiments == {"latency"} or {"fig11", "fig12", "fig13"} <= experiments


LLAMA = [(5, 0.2), (7, 0.2), (7, 0.6), (9, 0.6)], [(4096, 5.2)]
OPT = [(2, 0.2), (4, 0.2), (5, 0.4), (7, 0.6)], [(2048, 4)]


@pytest.mark.parametrize(("model", "expected"), [("llama2-7b", LLAMA), ("opt-6.7b", OPT), ("qwen2.5-0.5b", LLAMA)])
def test_paper_grid_follows_the_family(model, expected):
    data = [f"model={model}", "data=hub"]
    chosen = [c for c in cells(compose(["grid=paper", *data]).grid, data) if c.method_name == "infinigen"]
    fig11 = [(c.method.alpha, c.method.max_fetch_frac) for c in chosen if c.experiment == "fig11"]
    fig12 = [(c.seq_len, c.method.alpha) for c in chosen if c.experiment == "fig12"]
    assert (fig11, fig12) == expected


def test_a_grid_ends_with_one_table_and_the_figures(runs, small, capsys):
    assert main(["grid=accuracy"]) == 0
    assert [config.method_name for config in runs.configs] == ["full", "h2o", "int4"]
    assert {config.num_windows for config in runs.configs} == {2}
    printed = capsys.readouterr()
    assert printed.out.count("KV read") == 1
    assert printed.out.endswith("results/figures/fig11.png\n")
    assert "3/3" in printed.err, "the progress bar"
    assert Path("results/tables/fig12.csv").exists()


def test_an_interrupted_grid_goes_on_where_it_stopped(runs, small, capsys):
    def interrupt(config):
        if config.method_name == "h2o":
            raise KeyboardInterrupt
        return outcome(config)

    runs.measure = interrupt
    assert main(["grid=accuracy"]) == 130
    assert "Full cache" in Path("results/tables/fig12.md").read_text()
    runs.measure = outcome
    runs.configs.clear()
    assert main(["grid=accuracy"]) == 0
    assert [config.method_name for config in runs.configs] == ["h2o", "int4"]
    printed = capsys.readouterr().out
    assert "1 of 3 cells were finished before, skipped" in printed and "interrupted before, run again" in printed
    assert "Full cache" in printed


def test_a_failing_cell_does_not_stop_the_grid(runs, small, capsys):
    def fail(config):
        if config.method_name == "h2o":
            raise UserError("h2o is not well")
        return outcome(config)

    runs.measure = fail
    assert main(["grid=accuracy"]) == 2
    assert [config.method_name for config in runs.configs] == ["full", "h2o", "int4"]
    printed = capsys.readouterr()
    assert "failed: fig12 h2o: h2o is not well" in printed.out
    assert printed.err.endswith("error: 1 of 3 cells failed; the first, fig12 h2o: h2o is not well\n")
    assert "INT4" in printed.out and "fig11.png" in printed.out

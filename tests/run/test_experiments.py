"""Every experiment of conf/ runs, on one tiny model in this process; every sweep's labels are those its figure reads.

A new file in conf/experiment is a new test by itself.
"""

import csv
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from omegaconf import OmegaConf

from harness.model.load import LoadedModel
from harness.results.columns import PUBLISHED_CSV, TABLES
from harness.run.cli import main
from harness.run.compose import compose
from harness.run.sweep import read_plan
from harness.settings.config import RunConfig
from harness.settings.kinds import find
from harness.settings.schema import CONF_DIR
from methods.base import TokenCounts
from plots.drawing import DRAWINGS, figure_of
from tests.plots.test_plots import bar_heights, draw, drawn, legend, lines, write
from tests.runs import reading, tiny_loaded

FILES = {
    path.stem: file
    for path in sorted((CONF_DIR / "experiment").glob("*.yaml"))
    if "kind" in (file := OmegaConf.load(path))
}
"""Those that may be one run; the others list runs of these."""
KINDS = {name: node.kind for name, node in FILES.items()}
NUM_QUESTIONS = 8
TOY = {
    "tasks": ["tasks=[kv_recall]", f"num_samples={NUM_QUESTIONS}"],
    "perplexity": ["seq_len=400", "prefill_len=150", "num_windows=2"],
    "long_decode": ["prefill_len=60", "max_new_tokens=24", "num_windows=2"],
    "latency": ["batch_size=2", "prompt_len=24", "gen_len=8", "warmup_steps=1", "timed_steps=2"],
    "capacity": [
        "prompt_len=24", "gen_len=8", "timed_steps=2", "platform.device_gib=0.002", "method=full", "placement=device",
    ],
    "analysis": ["analysis.num_tokens=300"],
}  # fmt: skip
"""By experiment, else by kind."""
COLUMNS = {
    "latency": ("latency", "total_s"), "capacity": ("latency", "decode_tokens_per_s"),
    "analysis": ("analysis", "value"),
}  # fmt: skip
"""By experiment, else by kind: its shape of table, and what was measured. Any other kind is of accuracy."""
SOURCES = {name: "emulated" for name, kind in KINDS.items() if kind == "latency"} | {
    "fig2": "modelled",
    "disk": "measured",
}
OF_SEVERAL_RUNS = ("board", "fig13", "fig16b", "fig17", "ruler", "table2")
"""Figures that a single run without a label, and without questions, does not draw."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded()


@pytest.fixture
def texts(loaded, monkeypatch, tmp_path) -> list[str]:
    return reading(monkeypatch, tmp_path, loaded)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if find(kind).keeps_record])
def test_every_experiment_makes_its_table_and_figure(name, texts, capsys):
    rate = ["platform.link_gbps=1"] if KINDS[name] == "latency" and name != "disk" else []
    toy = TOY.get(name) or TOY[KINDS[name]]
    assert main([f"experiment={name}", "sweep=null", *texts, *rate, *toy]) == 0
    assert "smollm2-135m" in capsys.readouterr().out.splitlines()[0]
    shape, value = COLUMNS.get(name) or COLUMNS.get(KINDS[name], ("accuracy", "value"))
    experiment = FILES[name].experiment  # the figures of speed share one
    table = "capacity" if name == "capacity" else experiment
    with Path(f"outputs/tables/{table}.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == TABLES[shape]
    assert {(row["experiment"], row["source"]) for row in rows} == {(experiment, SOURCES.get(name, "measured"))}
    assert all(math.isfinite(float(row[value])) for row in rows)
    in_paper = {line.partition(",")[0] for line in PUBLISHED_CSV.read_text().splitlines()}
    assert ("## published numbers" in Path(f"outputs/tables/{table}.md").read_text()) == (table in in_paper)
    drawn = figure_of(Path("outputs"), name) if name in DRAWINGS else None
    assert (drawn is not None) == (name in DRAWINGS and name not in OF_SEVERAL_RUNS)


# Sweeps and the figures made for them


@cache
def runs_of(experiment: str) -> tuple[RunConfig, ...]:
    root = ["sweep.data_root=."] if "data_root" in compose([f"experiment={experiment}"]).sweep else []
    given = [f"experiment={experiment}", *root]
    return read_plan(given).runs


def row_of(config: RunConfig, **values: Any) -> dict[str, Any]:
    """A made-up row of a run, under the label that its record would have."""
    return {"label": config.label, "budget": config.budget or 0.3, **values}


def score_of(config: RunConfig, metric: str, task: str = "wikitext2") -> dict[str, Any]:
    shape = {"seq_len": config.seq_len, "num_samples": config.num_windows}
    return row_of(config, task=task, metric=metric, value=0.5, **shape)


def drawn_x(axes: Axes) -> dict[str, list[float]]:
    return {name: list(line[0].get_xdata(orig=False)) for name, line in lines(axes).items()}


def test_table2_has_a_bar_for_every_run_of_its_sweep(tmp_path):
    configs = runs_of("table2")
    ours, *_ = drawn("table2", tmp_path, [score_of(config, "perplexity") for config in configs]).axes
    assert bar_heights(ours) == {"InfiniGen": [0.5] * len(configs)}
    pools = [text.get_text().replace("\n", " ") for text in ours.get_xticklabels()]
    policies = ["80 % fifo", "80 % lru", "80 % counter"]
    assert pools == ["100 %", *policies, *(f"{each} (artifact)" for each in policies)]
    for config, pool in zip(configs, pools, strict=True):
        if config.method_name == "infinigen":
            assert pool == "100 %"
            continue
        assert f"{100 * config.method.pool_frac:.0f} %" in pool and config.method.pool_policy in pool
        assert ("artifact" in pool) == (config.method.eviction == "artifact")


def test_fig17_has_both_halves_of_every_setting_of_its_sweep(tmp_path):
    tasks, timed = ([config for config in runs_of("fig17") if config.kind == kind] for kind in ("tasks", "latency"))
    write(tmp_path, "fig17", [score_of(config, "acc", "kv_recall") for config in tasks])
    write(tmp_path, "fig17-latency", [row_of(config, decode_s=1.0) for config in timed])
    figure = draw("fig17", tmp_path)
    assert legend(figure) == ["Full cache", "accuracy", "latency", "chance"]
    for configs in ([config for config in tasks if config.label_given], timed):
        assert {config.method_name for config in configs} == {"infinigen"}
        for config in configs:
            setting, _, value = config.label.partition("=")
            assert getattr(config.method, setting) == float(value)
    scores = [axes for axes in figure.axes if "accuracy (%)" in axes.get_ylabel()]
    seconds = [axes for axes in figure.axes if axes not in scores]
    for left, right, name in zip(scores, seconds, ("alpha", "partial_weight_ratio"), strict=True):
        values = [getattr(config.method, name) for config in timed if config.label.startswith(name)]
        assert len(values) == 5 and drawn_x(left) == {"accuracy": values} and drawn_x(right) == {"latency": values}


def test_every_method_of_fig19_keeps_64_tokens_of_the_same_text():
    for config in (config for config in runs_of("fig19") if config.label_given):
        assert config.method.tokens_read(TokenCounts(config.seq_len - 1, 256, config.seq_len), 2) == 64
        assert config.seq_len * config.num_windows == 8192

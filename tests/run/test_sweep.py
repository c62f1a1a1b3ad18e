"""Sweeps: runs, overrides, going on where an interrupted one stopped, and what is reported in the end."""

from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.errors import STOPPED, UserError, describe
from harness.results import record as records
from harness.run import cli
from harness.run.compose import load
from harness.run.runner import digests_of
from harness.run.sweep import Plan, read_plan
from harness.run.words import values_of
from harness.settings.schema import CONF_DIR
from tests.runs import outcome, own_experiments


def main(argv):
    """As run.py calls it, but for the drawing."""
    return cli.main(argv, draw=lambda folder: [folder / "figures" / "fig11.png"])


def made(sweep, *overrides):
    return read_plan(values_of(overrides) | {"sweep": sweep}).runs


def read(*overrides) -> Plan:
    return read_plan(overrides)


def test_alternatives_are_combined_and_the_last_key_varies_fastest():
    """Settings that are named together vary together."""
    pairs = {"method": "h2o", "method.heavy_frac method.recent_frac": [[0.25, 0.5], [0.125, 0.0]]}
    first, second = made({"runs": [pairs]})
    assert (first.method.heavy_frac, first.method.recent_frac) == (0.25, 0.5)
    assert (second.method.heavy_frac, second.method.recent_frac) == (0.125, 0.0)
    entry = {"method": ["full", "h2o"], "seq_len": 512, "tasks": [["kv_recall"], ["passkey", "kv_recall"]]}
    assert [(c.method_name, c.seq_len, c.tasks) for c in made({"runs": [entry]})] == [
        ("full", 512, ("kv_recall",)),
        ("full", 512, ("passkey", "kv_recall")),
        ("h2o", 512, ("kv_recall",)),
        ("h2o", 512, ("passkey", "kv_recall")),
    ]


def test_a_users_experiment_keeps_its_settings_of_a_method(monkeypatch, tmp_path):
    own_experiments(monkeypatch, tmp_path / "conf")
    text = "# @package _global_\nexperiment: mine\nkind: perplexity\nmethod: {dense_layers: 2}\n"
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(text)
    for words, method in ([], "infinigen"), (["method=h2o"], "h2o"):
        one = load(["experiment=mine", *words])
        assert (one.method_name, one.method.dense_layers) == (method, 2)
    (one,) = made({"settings": {"experiment": "mine"}, "runs": [{"method": ["h2o"]}]})
    assert one.method_name == "h2o" and one.method.dense_layers == 2


SWEEP = {"settings": {"num_windows": 3}, "runs": [{"method": ["full", "h2o"]}, {"method": "int4", "seq_len": 2048}]}


def test_the_command_line_wins_over_what_the_grid_does_not_vary():
    configs = made(SWEEP, "experiment=perplexity", "num_windows=1", "seq_len=300", "results_dir=/r")
    assert {(c.num_windows, c.seq_len, c.results_dir) for c in configs} == {(1, 300, "/r")}
    assert [c.seq_len for c in made(SWEEP)] == [1024, 1024, 2048]
    with pytest.raises(UserError, match="seq_len=7: the sweep varies seq_len itself"):
        made({"runs": [{"seq_len": [300, 400]}]}, "seq_len=7")


def test_a_method_limits_a_grid_of_methods_to_itself():
    named = made(SWEEP, "method=int4")
    assert [(config.method_name, config.seq_len) for config in named] == [("int4", 2048)]
    entries = [{"method": ["full", "h2o"]}, {"method": "infinigen", "method.alpha": [4, 5]}]
    assert [config.method_name for config in made({"runs": entries}, "method=quest")] == ["quest"]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"experiments": ["acuracy"]}, "experiment=acuracy: did you mean 'accuracy'"),
        *(({"runs": [{}], "share": share}, f"sweep.share={share}: must be K/N") for share in ("9/8", "0/2", "2")),
    ],
)
def test_refuses_a_malformed_sweep(sweep, message):
    with pytest.raises(UserError, match=message):
        made(sweep)


FILES = {path.stem: OmegaConf.load(path) for path in sorted((CONF_DIR / "experiment").glob("*.yaml"))}
SWEEPS = {name: file.sweep for name, file in FILES.items() if "sweep" in file}


ALONE = [name for name, sweep in SWEEPS.items() if "experiments" not in sweep]
PART = {"board confirm": ["sweep.part=confirm", "sweep.confirm.texts=[README.md]"]}  # files of its own


@pytest.mark.parametrize("name", [*ALONE, *PART])
def test_every_sweep_composes_and_repeats_nothing(name, monkeypatch):
    """With the hub's data, so that no entry is left out. A sweep of sweeps is tested by its parts, and one of all
    methods at the smallest budget, which asks most of them."""
    monkeypatch.setattr("harness.data.rows.revision", lambda *_, **__: "1")
    monkeypatch.setattr("harness.data.ruler.packages", lambda task: [])  # ruler13's are optional
    part = PART.get(name, [])
    name = name.partition(" ")[0]
    root = ["sweep.data_root=hub"] if "data_root" in SWEEPS[name] else []
    given = {"accuracy": ["sweep.every_row=true"]}
    given |= {"tune": ["sweep.budgets=[nearest:0.05]"], "board": ["sweep.budgets=[0.05]"]}
    plan = read(f"experiment={name}", "data=hub", "data.root=null", *root, *given.get(name, []), *part)
    digests = digests_of(plan.runs[0])
    ids = Counter((config.experiment, records.run_id(config, digests)) for config in plan.runs)
    assert max(ids.values()) == 1 and not any("is not given" in reason for _, reason in plan.left_out)


LLAMA = [(5, 0.2), (7, 0.2), (7, 0.6), (9, 0.6)], [(4096, 5.2)]
OPT = [(2, 0.2), (4, 0.2), (5, 0.4), (7, 0.6)], [(2048, 4)]


@pytest.mark.parametrize(("model", "expected"), [("llama2-7b", LLAMA), ("opt-6.7b", OPT)])
def test_paper_grid_follows_the_family(model, expected):
    every = read("experiment=accuracy", "sweep.scale=paper", f"model={model}", "data=hub").runs
    chosen = [c for c in every if c.method_name == "infinigen"]
    fig11 = [(c.method.alpha, c.method.budget) for c in chosen if c.experiment == "fig11"]
    fig12 = [(c.seq_len, c.method.alpha) for c in chosen if c.experiment == "fig12"]
    assert (fig11, fig12) == expected


# sweeps of sweeps


@pytest.fixture
def library(monkeypatch, tmp_path):
    return own_experiments(monkeypatch, tmp_path / "conf")


def test_a_sweep_may_consist_of_sweeps(library):
    library("inner", "runs: [{method: infinigen, method.alpha: '${sweep.alpha}'}]\nalpha: 4")
    library("other", "runs: [{method: [full, h2o], num_windows: '${sweep.windows}'}]\nwindows: 2")
    library("outer", "runs: [{method: oracle}]\nexperiments: [inner, other]\nalpha: 5")
    for given, alpha in ([], 5), (["sweep.alpha=9"], 9):
        plan = read("experiment=outer", "seed=3", *given)
        assert [config.method_name for config in plan.runs] == ["oracle", "infinigen", "full", "h2o"]
        assert plan.runs[1].method.alpha == alpha and {config.seed for config in plan.runs} == {3}
        assert [config.num_windows for config in plan.runs[2:]] == [2, 2]


NEEDY = """
settings: {experiment: fig11, tasks: [passkey]}
runs:
  - when: data_root
    method: [full, h2o]
  - method: int4
    experiment: fig12
data_root: null
"""


def test_an_entry_without_what_it_needs_is_left_out(library, runs, capsys, tmp_path):
    library("needy", NEEDY)
    library("outer", "experiments: [needy]\ndata_root: null")
    plan = read("experiment=outer")
    assert [config.method_name for config in plan.runs] == ["int4"]
    gap = "left out, as sweep.data_root is not given: runs of fig11 (2)"
    assert plan.gaps() == [gap]
    given = read("experiment=outer", "sweep.data_root=DIR")
    assert [config.method_name for config in given.runs] == ["full", "h2o", "int4"] and not given.gaps()
    assert main(["experiment=outer"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[-1] == gap and lines.count(gap) == 2


def test_shares_are_disjoint_and_make_the_whole():
    entries = [{"method": ["full", "h2o", "int4", "oracle", "infinigen"]}]
    shares = [[c.method_name for c in made({"runs": entries, "share": f"{k}/3"})] for k in (1, 2, 3)]
    assert shares == [["full", "oracle"], ["h2o", "infinigen"], ["int4"]]
    assert made({"runs": entries, "share": "7/7"}) == []
    entry = {"experiment": "latency", "system": ["ideal", "offload"], "batch_size": [1, 2, 3]}
    for k in (1, 2):
        labels = Counter(config.latency.batch_size for config in made({"runs": [entry], "share": f"{k}/2"}))
        assert set(labels.values()) == {2}, "runs timed at one shape stay in one share"


# a sweep from start to end


def test_an_interrupted_grid_goes_on_where_it_stopped(runs, small, capsys):
    def interrupt(config):
        if config.method_name == "h2o":
            raise KeyboardInterrupt
        return outcome(config)

    runs.measure = interrupt
    assert main(["experiment=accuracy"]) == STOPPED
    page, printed = Path("outputs/tables/fig12.md").read_text(), capsys.readouterr()
    assert "Full cache" in page and "H2O" not in page and "Full cache" in printed.out
    assert "figures are in" not in printed.out, "drawing takes longer than who stops a process may wait"
    assert "interrupted; the same command repeats only what is not finished" in printed.err.splitlines()
    statuses = Counter(record["status"] for record in records.read_records("outputs", "fig12"))
    assert statuses == {"finished": 1, "interrupted": 1}
    runs.measure = outcome
    runs.configs.clear()
    assert main(["experiment=accuracy"]) == 0
    assert [(config.method_name, config.num_windows) for config in runs.configs] == [("h2o", 2), ("int4", 2)]
    out = capsys.readouterr().out
    assert "1 of 3 runs were finished before, skipped" in out and "interrupted before, run again" in out
    assert "Full cache" in out and out.count("| label") == 1, "one table"


def test_a_failing_run_does_not_stop_the_grid_and_is_named(runs, small, capsys):
    error = KeyError("a")

    def fail(config):
        if config.method_name == "full":
            return outcome(config)
        raise error if config.method_name == "int4" else UserError("h2o is not well")

    runs.measure = fail
    assert main(["experiment=accuracy"]) == 2
    printed = capsys.readouterr()
    failed = ["failed: fig12 H2O: h2o is not well", f"failed: fig12 INT4: {describe(error)}"]
    said = [line for line in printed.out.splitlines() if line.startswith("failed")]
    assert said == failed
    assert "in fail" in printed.err, "the traceback of a bug"
    assert printed.err.endswith("error: 2 of 3 runs failed; the first, fig12 H2O: h2o is not well\n")
    assert "Full cache" in printed.out and "figures are in outputs" in printed.out
    ends = {record["error"] for record in records.read_records("outputs", "fig12")}
    assert ends == {None, "h2o is not well", describe(error)}

"""The command line, in-process: usage that must work, exit codes, a line for every failure, no litter."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.errors import UserError
from harness.results.record import flat
from harness.run.cli import main
from harness.run.compose import compose, load, resolved
from tests.runs import outcome, refusal_of

ROOT = Path(__file__).resolve().parents[2]


def test_a_sweep_has_one_table_and_goes_on_where_a_job_fails(runs, capsys):
    def fail_h2o(config):
        if config.method_name == "h2o":
            raise UserError("h2o is not well")
        return outcome(config)

    runs.measure = fail_h2o
    assert main(["-m", "method=full,h2o,int4"]) == 2
    assert [config.method_name for config in runs.configs] == ["full", "h2o", "int4"]
    assert runs.loads == ["smollm2-135m"]
    printed = capsys.readouterr()
    assert printed.err == "error: method=h2o: h2o is not well\n" and printed.out.count("| label ") == 1
    assert "INT4" in printed.out and "H2O" not in printed.out
    assert {path.name for path in Path().iterdir()} == {"outputs"}


def test_a_sweep_with_a_budget_runs_the_full_cache_as_it_is(runs, capsys):
    assert main(["-m", "method=full,infinigen,h2o", "budget=0.1"]) == 0
    assert [(config.method_name, config.budget) for config in runs.configs] == [
        ("full", None), ("infinigen", 0.1), ("h2o", 0.1),
    ]  # fmt: skip
    assert main(["method=full", "budget=0.1"]) == main(["method=full"]) == 0
    assert len(runs.configs) == 3, "one run, whatever budget is given"
    assert main(["-m", "method=int4,h2o", "budget=0.2"]) == 2
    assert "budget=0.2: method=int4: it has no budget to set, as" in capsys.readouterr().err
    assert main(["-m", "method=full,int4,h2o", "budget=nearest:0.2"]) == 0
    assert [(config.method_name, config.budget) for config in runs.configs[4:]] == [("int4", None), ("h2o", 0.2)]


def test_a_sweep_over_methods_takes_a_setting_that_all_of_them_have(runs, capsys):
    of_both = ["-m", "method=quest,freekv", "method.page_size=8", "budget=0.2,0.3"]
    assert main(of_both) == 0
    assert [(config.method_name, config.method.page_size, config.budget) for config in runs.configs] == [
        ("quest", 8, 0.2), ("quest", 8, 0.3), ("freekv", 8, 0.2), ("freekv", 8, 0.3),
    ]  # fmt: skip
    capsys.readouterr()
    assert main(["-m", "method=quest,h2o", "method.page_size=16"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: method=h2o") and "unknown setting method.page_size" in said
    assert [config.method.page_size for config in runs.configs[4:]] == [16], "the other job runs"


def test_help_lists_methods_and_systems(runs, capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "keydiff, kivi, kivi4, knorm" in printed and "system: ideal, infinigen" in printed
    for name in flat(resolved(compose())).keys() - {"experiment", "kind"}:
        assert f"{name.rpartition('.')[2]}:" in printed, name
    assert "\nalpha: null  " in printed, "of InfiniGen, the default"
    assert runs.configs == [] and list(Path().iterdir()) == []


REFUSED = {
    "experiment=fig14": "experiment=fig14: type experiment=speedup sweep.part=fig14",
    "--cfg job method=h2": "method=h2: did you mean 'h2o'",
    "h2o": "h2o: must be NAME=VALUE; type method=h2o",
    "Qwen/Qwen3-8B": "Qwen/Qwen3-8B: must be NAME=VALUE; type model.hub_id=Qwen/Qwen3-8B",
    "--method h2o": "--method: must be NAME=VALUE; type method=h2o",
    "experiment=generate prompt=The capital of method=h2o": (
        "capital: must be NAME=VALUE; type 'prompt=The capital of'"
    ),
    "prompt=Hello method=h2o": "prompt=Hello: needs experiment=generate",
    "model=Qwen/Qwen3-8B": "model=Qwen/Qwen3-8B: chooses a file of conf/model; type model.hub_id=Qwen/Qwen3-8B",
    "dtype=bfloat16": "unknown setting dtype: did you mean 'model.dtype'",
    "tasks=kv_recall,passkey": (
        "tasks=kv_recall,passkey: is a sweep, which needs -m; as a list: tasks=[kv_recall,passkey]"
    ),
    "method=full,h2o": "method=full,h2o: is a sweep, which needs -m before it: -m method=full,h2o",
    "experiment=./nothing.yaml": "experiment=./nothing.yaml: allowed: ablation",
    "system=offlod+int4 experiment=latency": "system=offlod+int4: did you mean 'offload+int4'",
    "label=offload experiment=latency": "label=offload: names a system; a system is chosen by system=NAME",
    "method=infinigen method.alpha=4 budget=0.16": "method.alpha=4.0: budget=0.16 sets it; leave one of them out",
    "experiment=latency method=full gpu_cache=2": "gpu_cache=2: Full cache selects no rows; needs a method that",
}
"""What Hydra would misread, or refuse in words that do not help, and settings that do not go together."""


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_refused_is_one_line(command, runs, capsys):
    said = refusal_of(main, command.split(" "), capsys)
    assert said.startswith(REFUSED[command]) and len(said) < 900
    assert runs.configs == []
    assert list(Path().iterdir()) == []


TEXTS = [
    'It\'s "fine" (2), a=[b] {c}',
    "${nothing}",
    r"C:\\${HOME}\${seed}",
    '$${seed}}, it\'s "${oc.env:HOME}"',
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_text_and_no_other_settings_value(text, runs):
    Path(text).mkdir(parents=True)
    assert main(["method=full", "experiment=tasks", f"system_instruction={text}", f"results_dir={text}"]) == 0
    (config,) = runs.configs
    assert (config.task.system_instruction, config.results_dir) == (text, text)
    assert main(["-m", "method=full", "experiment=tasks", "system_instruction='${a}','b, ${seed}'"]) == 0
    assert [config.task.system_instruction for config in runs.configs[1:]] == ["${a}", "b, ${seed}"]
    in_python = load({"system_instruction": text, "tasks": [text, "passkey"]})
    assert (in_python.task.system_instruction, in_python.tasks) == (text, (text, "passkey"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("experiment", ["perplexity", "latency", "generate"])
def test_a_platform_that_is_not_here_is_refused_before_anything_else(experiment, runs, capsys):
    said = refusal_of(main, [f"experiment={experiment}", "platform=cuda"], capsys)
    assert said == "platform=cuda: torch finds no CUDA device here; allowed: cpu"
    assert runs.loads == runs.configs == [] == list(Path().iterdir())


def test_a_bug_shows_its_traceback_and_ends_with_1(runs, capsys):
    def break_down(config):
        raise AttributeError("not there")

    runs.measure = break_down
    assert main([]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error, a bug:\nTraceback") and "in break_down" in said
    assert main(["-m", "seed=1,2"]) == 1
    assert capsys.readouterr().err.count("error, a bug of seed=") == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "error: method=h2: did you mean 'h2o'"),
        (["-S"], "needs the Python package yaml, which is not installed; `make setup`"),  # without site-packages
    ],
)
def test_the_entry_point_refuses_in_one_line_with_and_without_the_environment(options, said, tmp_path):
    command = [sys.executable, *options, ROOT / "run.py", "method=h2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert said in done.stderr

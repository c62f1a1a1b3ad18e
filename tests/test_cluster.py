"""`cluster=slurm`, in-process: a stand-in for Slurm's programs runs each job as soon as it is submitted, and answers in
the words of Slurm 22.05; the script of a job is run by bash."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from harness.errors import UserError
from harness.launch import cluster
from harness.launch.cli import main
from tests.runs import own_grids, stand_in

ROOT = Path(__file__).resolve().parent.parent
PAIR = "cells: [{method: [full, h2o]}]"
UNKNOWN = "slurm_load_jobs error: Invalid job id specified\n"
UNREACHABLE = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"


@dataclass
class FakeSlurm:
    """Slurm's programs. scripts: what was submitted, as array 1, 2, ... refusal: what sbatch says instead.

    answers: what squeue says next, before it tells the truth: words by number of the job, or an error.
    """

    scripts: list[str] = field(default_factory=list)
    ends: dict[str, dict[int, str]] = field(default_factory=dict)
    answers: list[dict[int, str] | str] = field(default_factory=list)
    refusal: str = ""
    kills: bool = False

    def __call__(self, program: str, *arguments: str) -> CompletedProcess:
        if program == "squeue":
            return self._squeue(next(word for word in arguments if word.startswith("--jobs=")).removeprefix("--jobs="))
        assert program == "sbatch"
        if self.refusal:
            return CompletedProcess([], 1, "", self.refusal)
        return CompletedProcess([], 0, self._sbatch(Path(arguments[-1])) + "\n", "")

    def _sbatch(self, path: Path) -> str:
        self.scripts.append(path.read_text())
        array = str(len(self.scripts))
        self.ends[array] = {}
        for number, words in re.findall(r"^(\d+)\) set -- (.*) ;;$", self.scripts[-1], re.MULTILINE):
            python, run, *argv = shlex.split(words)
            assert (python, run) == (sys.executable, str(ROOT / "run.py"))
            with (path.parent / f"{array}_{number}.log").open("a") as log, redirect_stdout(log), redirect_stderr(log):
                code = 9 if self.kills else main(argv)
            word = "CANCELLED" if self.kills else "FAILED" if code else "COMPLETED"
            self.ends[array][int(number)] = f"{word} {code << 8}"
        return array

    def _squeue(self, array: str) -> CompletedProcess:
        answer = self.answers.pop(0) if self.answers else self.ends.get(array, UNKNOWN)
        if isinstance(answer, str):
            return CompletedProcess([], 1, "", answer)
        lines = [f"{number:<12}{words} node7\n" for number, words in answer.items()]
        return CompletedProcess([], 0, "".join(lines), "")


@pytest.fixture
def fake(monkeypatch, tmp_path) -> FakeSlurm:
    """In an empty current folder, with a grid `pair` of two cells and stand-ins for model and experiments."""
    own_grids(monkeypatch, tmp_path / "conf")("pair", PAIR)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    fake = FakeSlurm()
    monkeypatch.setattr(cluster, "_call", fake)
    monkeypatch.setattr(cluster, "POLL_S", 0)
    return fake


@pytest.fixture
def runs(monkeypatch):
    return stand_in(monkeypatch)


COMPOSING = "grid=pair: composing its cells\n"


def jobs_of(*more: str) -> int:
    return main(["cluster=slurm", "cluster.jobs=2", "grid=pair", *more])


def logs() -> Path:
    (folder,) = Path("results/jobs").iterdir()
    return folder.resolve()


def test_a_grid_is_dealt_to_jobs_and_reported_as_one(fake, runs, capsys):
    assert jobs_of("num_windows=2") == 0
    assert [config.method_name for config in runs.configs] == ["full", "h2o"]
    assert {config.num_windows for config in runs.configs} == {2}
    (script,) = fake.scripts
    assert "grid.share=1/2 ;;" in script and "grid.share=2/2 ;;" in script and "cluster" not in script
    printed = capsys.readouterr()
    logs_line = f"job 1, 2 of 2 parts; scancel 1 ends it; logs: {logs()}/1_*.log\n"
    _, end = printed.out.split(logs_line)
    assert "job 1_1: completed\njob 1_2: completed\n" in end, "states, then one table"
    assert end.count("size (%)") == 1 and "Full cache" in end and "H2O" in end and printed.err == COMPOSING


def test_what_is_finished_is_not_submitted(fake, runs, capsys):
    assert main(["method=full"]) == 0
    assert jobs_of() == 0
    assert re.findall(r"^(\d+)\) set", fake.scripts[0], re.MULTILINE) == ["2"], "of the second share alone"
    capsys.readouterr()
    assert jobs_of() == 0, "the same command once more only merges"
    printed = capsys.readouterr().out
    assert printed.startswith("all 2 runs were finished before: no job\n") and "H2O" in printed
    assert len(fake.scripts) == 1 and len(runs.configs) == 2


def test_each_combination_of_a_sweep_is_a_job(fake, runs, capsys):
    assert main(["-m", "cluster=slurm", "method=full,h2o,int4", "label='it\\'s $HOME'"]) == 0
    assert [config.method_name for config in runs.configs] == ["full", "h2o", "int4"]
    assert {config.label for config in runs.configs} == {"it's $HOME"}
    assert len(fake.scripts) == 1 and "--job-name=kv-perplexity\n" in fake.scripts[0]
    assert capsys.readouterr().out.count("size (%)") == 1


def test_every_failing_job_is_named_and_has_failed_for_slurm(fake, runs, capsys):
    def fail(config):
        raise UserError(f"{config.method_name} is not well")

    runs.measure = fail
    fake.answers = [{1: "RUNNING 0", 2: "PENDING 0"}]
    assert jobs_of() == 2
    assert fake.ends["1"] == {1: "FAILED 512", 2: "FAILED 512"}
    _, first, second, end = capsys.readouterr().err.splitlines()
    for number, line, method in (1, first, "full"), (2, second, "h2o"):
        log = f"{logs()}/1_{number}.log"
        assert line.startswith(f"error: job 1_{number}: failed, exit code 2; error: ")
        assert line.endswith(f"{method} is not well; log: {log}")
        assert f"{method} is not well" in Path(log).read_text()
    assert end == "error: 2 of 2 jobs did not finish; the same command goes on"


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("TIMEOUT 0", 75, "timeout; log: "),
        ("OUT_OF_MEMORY 0", 2, "out of memory; log: "),
        ("FAILED 19200", 75, "failed, exit code 75; log: "),
    ],
)
def test_how_a_job_ends_decides_the_exit_code(fake, runs, capsys, end, code, said):
    fake.answers, fake.kills = [{1: end}], True
    assert main(["cluster=slurm", "method=h2o"]) == code
    assert f"error: job 1_1: {said}" in capsys.readouterr().err


def test_slurm_may_not_answer_for_a_while_and_forget_what_has_ended(fake, runs, capsys):
    fake.answers = [UNREACHABLE, {1: "RUNNING 0", 2: "PENDING 0"}, UNREACHABLE, {2: "COMPLETED 0"}, UNKNOWN]
    assert jobs_of() == 0, "the records say that all was done"
    assert capsys.readouterr().out.count("Slurm knows it no more") == 1
    fake.answers, fake.kills = [{1: "RUNNING 0"}, UNKNOWN], True
    assert main(["cluster=slurm", "method=int4"]) == 2
    assert "error: job 2_1: Slurm knows it no more; " in capsys.readouterr().err


def test_ctrl_c_leaves_the_jobs_and_the_same_command_waits_for_them(fake, runs, capsys, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    alive = {1: "RUNNING 0", 2: "PENDING 0"}
    fake.answers, fake.kills = [alive], True
    with monkeypatch.context() as patch:
        patch.setattr(cluster.time, "sleep", interrupt)
        assert jobs_of() == 130
    said = "interrupted; job 1 runs on (scancel 1 ends it) and the same command waits for it again\n"
    assert capsys.readouterr().err == COMPOSING + said
    fake.answers = [UNREACHABLE, alive]
    assert jobs_of("cluster.partition=other") == 2, "its jobs were cancelled meanwhile"
    printed = capsys.readouterr()
    assert printed.out.startswith("job 1 of this command is alive: waiting for it; scancel 1 ends it\n")
    assert "error: job 1_2: cancelled; log: " in printed.err and len(fake.scripts) == 1
    fake.ends["1"] = {1: "COMPLETING 0", 2: "CANCELLED 9"}
    assert jobs_of("num_windows=2") == 2 and len(fake.scripts) == 2, "another command does not wait for it"
    fake.ends["1"] = {1: "CANCELLED 9"}
    assert jobs_of() == 2 and len(fake.scripts) == 3, "what has ended begins again"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("cluster=slrm", "cluster=slrm: did you mean 'slurm'?"),
        ("cluster=slurm cluster.jobs=0", "cluster.jobs=0: must be at least 1"),
        ("cluster=slurm cluster.minutes=4", "cluster.minutes=4: must be at least 5"),
        ("cluster=slurm cluster.minute=9", "unknown setting cluster.minute: did you mean 'minutes'?"),
        ("cluster=slurm method.heavy_frac=2 method=h2o", "method.heavy_frac=2"),
        ("cluster=slurm grid=pair grid.share=1/2", "grid.share=1/2: cluster=slurm deals the cells itself"),
        ("cluster=slurm experiment=generate prompt=hi", "experiment=generate: writes no record"),
    ],
)
def test_refuses_before_anything_is_submitted(fake, runs, capsys, command, message):
    assert main(command.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {message}") and len(printed.err.splitlines()) == 1
    assert fake.scripts == [] and runs.configs == []


def test_one_command_has_one_cluster(fake, runs, capsys):
    assert main(["-m", "cluster=slurm", "cluster.cpus=1,2", "method=h2o"]) == 2
    assert "error: cluster: its settings are those of all jobs of a sweep" in capsys.readouterr().err


def test_what_sbatch_refuses_is_one_line(fake, runs, capsys):
    fake.refusal = (
        "sbatch: error: invalid partition specified: nope\n"
        "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
    )
    assert main(["cluster=slurm", "cluster.partition=nope"]) == 2
    said = "invalid partition specified: nope; Batch job submission failed: Invalid partition name specified"
    assert capsys.readouterr().err == f"error: cluster=slurm: sbatch refuses: {said}\n"


def test_a_gpu_is_asked_for_where_the_platform_has_one(fake, runs):
    fake.kills = True
    for given in "platform=cuda", "platform=cpu", "platform=cuda cluster.gpus=0 cluster.partition=big":
        main(["cluster=slurm", *given.split(), "+cluster.options.exclusive=true", "+cluster.options.mem=0"])
    assert ["--gpus-per-node=1\n" in script for script in fake.scripts] == [True, False, False]
    assert "#SBATCH --partition=big\n" in fake.scripts[2] and "partition" not in fake.scripts[0]
    for script in fake.scripts:
        assert "#SBATCH --exclusive\n" in script and "#SBATCH --mem=0\n" in script and "--mem=64G" not in script
        assert f"#SBATCH --chdir={Path.cwd()}\n" in script


# The script of a job


def start_job(folder: Path, *command: str, minutes: int = 5, **variables: object) -> CompletedProcess:
    """As Slurm starts job 2 of an array, whose programs are a note of what they were asked."""
    note = folder / "scontrol"
    note.write_text('#!/bin/bash\necho "$@" >> asked\n')
    note.chmod(0o755)
    text = cluster.script({"job-name": "a b"}, {1: ["false"], 2: command}, minutes=minutes, restarts=3)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "2", "SLURM_CPUS_PER_TASK": "3"}
    environment |= {name: str(value) for name, value in variables.items()}
    return subprocess.run(["bash"], input=text, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_job_ends_as_its_command_does(tmp_path):
    done = start_job(tmp_path, "bash", "-c", 'echo "$0 $OMP_NUM_THREADS"; exit 7', "it's $HOME")
    assert (done.returncode, done.stdout, done.stderr) == (7, "it's $HOME 3\n", "")
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("restarts", [2, 3])
def test_a_job_whose_time_is_over_begins_again(tmp_path, restarts):
    """Slurm tells the script, which tells the command to end: it can write down what it has."""
    command = ("bash", "-c", "trap 'echo ending; exit 143' TERM; kill -USR1 $PPID; while :; do sleep 0.05; done")
    done = start_job(tmp_path, *command, SLURM_RESTART_COUNT=restarts, SLURM_JOB_ID=12)
    assert done.returncode == 75 and done.stdout.startswith("ending\nunfinished: the job's 5 minutes are over")
    assert (tmp_path / "asked").exists() == (restarts < 3)
    assert restarts == 3 or (tmp_path / "asked").read_text() == "requeue 12\n"

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
from harness.run import cluster
from harness.run.cli import main
from harness.run.cluster import Cluster, Job, JobArray
from tests.runs import own_experiments

ROOT = Path(__file__).resolve().parent.parent
UNKNOWN = "slurm_load_jobs error: Invalid job id specified\n"
UNREACHABLE = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
COMPOSING = "experiment=pair: composing its runs\n"


@dataclass
class FakeSlurm:
    """Slurm's programs. scripts: what was submitted, as array 1, 2, ... refusal: what sbatch says instead.

    answers: what squeue says next of jobs that live, or its error; then none does. log: in place of running a job.
    """

    scripts: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    refusal: str = ""
    log: str | None = None

    def __call__(self, program: str, *arguments: str) -> CompletedProcess:
        if program == "squeue":
            answer = self.answers.pop(0) if self.answers else ""
            is_error = answer.startswith("slurm_load_jobs error")
            return CompletedProcess([], int(is_error), "" if is_error else answer, answer if is_error else "")
        assert program == "sbatch"
        if self.refusal:
            return CompletedProcess([], 1, "", self.refusal)
        path = Path(arguments[-1])
        self.scripts.append(path.read_text())
        for number, words in re.findall(r"^(\d+)\) set -- (.*) ;;$", self.scripts[-1], re.MULTILINE):
            python, run, *argv = shlex.split(words)
            assert (python, run) == (sys.executable, str(ROOT / "run.py"))
            to = path.parent / f"{len(self.scripts)}_{number}.log"
            with to.open("a") as log, redirect_stdout(log), redirect_stderr(log):
                print(self.log) if self.log is not None else main(argv)
        return CompletedProcess([], 0, f"{len(self.scripts)}\n", "")


@pytest.fixture
def fake(runs, monkeypatch, tmp_path_factory) -> FakeSlurm:
    """With a sweep `pair` of two cells."""
    own_experiments(monkeypatch, tmp_path_factory.mktemp("conf") / "conf")("pair", "runs: [{method: [full, h2o]}]")
    fake = FakeSlurm()
    monkeypatch.setattr(cluster, "call", fake)
    monkeypatch.setattr(cluster, "POLL_S", 0)
    return fake


def jobs_of(*more: str) -> int:
    return main(["cluster=slurm", "cluster.jobs=2", "experiment=pair", *more])


def logs() -> Path:
    (folder,) = Path("outputs/jobs").iterdir()
    return folder.resolve()


def test_a_grid_is_dealt_to_jobs_and_reported_as_one(fake, runs, capsys):
    fake.answers = ["1_[1-2]: PENDING (Priority)\n", UNREACHABLE, "1_1: RUNNING node7\n1_2: RUNNING node7\n", UNKNOWN]
    assert jobs_of("num_windows=2") == 0
    assert [(config.method_name, config.num_windows) for config in runs.configs] == [("full", 2), ("h2o", 2)]
    (script,) = fake.scripts
    assert "sweep.share=1/2 ;;" in script and "sweep.share=2/2 ;;" in script and "cluster" not in script
    printed = capsys.readouterr()
    begin = f"job 1, 2 of 2 parts; scancel 1 ends it; logs: {logs()}/1_*.log\n"
    assert f"{begin}job 1_[1-2]: PENDING (Priority)\njob 1_1: RUNNING node7\njob 1_2: RUNNING node7\n" in printed.out
    assert printed.out.count("size (%)") == 1 and "Full cache" in printed.out and "H2O" in printed.out
    assert printed.err == COMPOSING


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


def test_every_job_that_does_not_finish_is_named_with_its_error(fake, runs, capsys):
    def fail(config):
        raise UserError("not well") if config.method_name == "full" else KeyError("a")

    runs.measure = fail
    assert jobs_of() == 1, "a bug is among them"
    _, first, second, end = capsys.readouterr().err.splitlines()
    for number, line, said in (1, first, "not well"), (2, second, "'a' (KeyError, a bug)"):
        log = f"{logs()}/1_{number}.log"
        assert line.startswith(f"error: job 1_{number}: error: ") and said in line and line.endswith(f"; log: {log}")
        assert said in Path(log).read_text()
    assert end == "error: 2 of 2 jobs did not finish; the same command goes on"


@pytest.mark.parametrize(
    ("log", "code", "said"),
    [
        ("", 2, "did not finish"),
        ("error: before\nunfinished: the job's 720 minutes are over", 75, "unfinished: the job's 720 minutes are over"),
        ("slurmstepd: error: *** JOB 1 ON a CANCELLED AT 0 DUE TO TIME LIMIT ***\nbye", 75, "slurmstepd: error: *** "),
        ("slurmstepd: error: Detected 1 oom_kill event", 2, "slurmstepd: error: Detected 1 oom_kill event"),
    ],
)
def test_how_a_job_ends_decides_the_exit_code(fake, runs, capsys, log, code, said):
    fake.log = log
    assert main(["cluster=slurm", "method=h2o"]) == code
    assert f"error: job 1_1: {said}" in capsys.readouterr().err


def test_ctrl_c_leaves_the_jobs_and_the_same_command_waits_for_them(fake, runs, capsys, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    alive = "1_1: RUNNING node7\n"
    fake.answers, fake.log = [alive], "slurmstepd: error: *** JOB 1 ON node7 CANCELLED ***"
    with monkeypatch.context() as patch:
        patch.setattr(cluster.time, "sleep", interrupt)
        assert jobs_of() == 130
    said = "interrupted; job 1 runs on (scancel 1 ends it) and the same command waits for it again\n"
    assert capsys.readouterr().err == COMPOSING + said
    fake.answers = [UNREACHABLE, alive]
    assert jobs_of("cluster.partition=other") == 2, "its jobs were cancelled meanwhile"
    printed = capsys.readouterr()
    assert printed.out.startswith("job 1 of this command is alive: waiting for it; scancel 1 ends it\n")
    assert "error: job 1_2: slurmstepd: " in printed.err and len(fake.scripts) == 1
    fake.answers = [UNKNOWN]
    assert jobs_of() == 2 and len(fake.scripts) == 2, "what has ended begins again"
    fake.answers = [alive]
    assert jobs_of("num_windows=2") == 2 and len(fake.scripts) == 3, "another command does not wait for it"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("cluster=slrm", "cluster=slrm: did you mean 'slurm'?"),
        ("cluster=slurm cluster.jobs=0", "cluster.jobs=0: must be at least 1"),
        ("cluster=slurm cluster.minutes=4", "cluster.minutes=4: must be at least 5"),
        ("cluster=slurm cluster.minute=9", "unknown setting cluster.minute: did you mean 'minutes'?"),
        ("cluster=slurm method.heavy_frac=2 method=h2o", "method.heavy_frac=2"),
        ("cluster=slurm experiment=pair sweep.share=1/2", "sweep.share=1/2: cluster=slurm deals the cells itself"),
        ("cluster=slurm experiment=generate prompt=hi", "experiment=generate: writes no record"),
        ("-m cluster=slurm cluster.cpus=1,2 method=h2o", "cluster.cpus=2: cluster: its settings are those of"),
        ("cluster=slurm cluster.partition=no", "cluster=slurm: sbatch refuses: invalid partition: no; Batch failed"),
    ],
)
def test_what_is_refused_is_one_line(fake, runs, capsys, command, message):
    fake.refusal, fake.log = "sbatch: error: invalid partition: no\nsbatch: error: Batch failed\n", ""
    if "cpus" in command:  # the first job of the sweep is run
        fake.refusal = ""
    assert main(command.split()) == 2
    printed = capsys.readouterr().err.removeprefix(COMPOSING)
    assert printed.startswith(f"error: {message}") and (printed.count("\n") == 1 or fake.scripts)
    assert runs.configs == []


def test_a_gpu_is_asked_for_where_the_platform_has_one(fake, runs):
    fake.log = ""
    for given in "platform=cuda", "platform=cpu", "platform=cuda cluster.gpus=0 cluster.partition=big":
        main(["cluster=slurm", *given.split(), "+cluster.options.exclusive=true", "+cluster.options.mem=0"])
    assert ["--gpus-per-node=1\n" in script for script in fake.scripts] == [True, False, False]
    assert "#SBATCH --partition=big\n" in fake.scripts[2] and "partition" not in fake.scripts[0]
    for script in fake.scripts:
        assert "#SBATCH --exclusive\n" in script and "#SBATCH --mem=0\n" in script and "--mem=64G" not in script
        assert f"#SBATCH --chdir={Path.cwd()}\n" in script


# The script of a job


def start_job(folder: Path, monkeypatch, text: str, *words: str, **variables: object) -> CompletedProcess:
    """As Slurm starts job 2 of an array, whose programs are a note of what they were asked. text: bash for run.py."""
    (folder / "scontrol").write_text('#!/bin/bash\necho "$@" >> asked\n')
    (folder / "scontrol").chmod(0o755)
    (folder / "run").write_text(text)
    monkeypatch.setattr(cluster, "RUN", (str(folder / "run"),))
    monkeypatch.setattr(sys, "executable", "bash")
    jobs = {1: Job(("x",), ()), 2: Job(words, ())}
    script = JobArray(Cluster("slurm", minutes=5), "a b", folder, on_gpu=False).script(folder, jobs)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "2", "SLURM_CPUS_PER_TASK": "3"}
    environment |= {name: str(value) for name, value in variables.items()}
    return subprocess.run(["bash"], input=script, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_job_ends_as_its_command_does(tmp_path, monkeypatch):
    done = start_job(tmp_path, monkeypatch, 'echo "$1 $OMP_NUM_THREADS"; exit 7', "it's $HOME")
    assert (done.returncode, done.stdout, done.stderr) == (7, "it's $HOME 3\n", "")
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("restarts", [2, 3])
def test_a_job_whose_time_is_over_begins_again(tmp_path, monkeypatch, restarts):
    """Slurm tells the script, which tells the command to end: it can write down what it has."""
    command = "trap 'echo ending; exit 143' TERM; kill -USR1 $PPID; while :; do sleep 0.05; done"
    done = start_job(tmp_path, monkeypatch, command, SLURM_RESTART_COUNT=restarts, SLURM_JOB_ID=12)
    assert done.returncode == 75 and done.stdout.startswith("ending\nunfinished: the job's 5 minutes are over")
    assert (tmp_path / "asked").exists() == (restarts < 3)
    assert restarts == 3 or (tmp_path / "asked").read_text() == "requeue 12\n"

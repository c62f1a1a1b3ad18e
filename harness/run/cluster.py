"""A command as jobs of a cluster: `cluster=slurm` submits its runs, waits, and reports as here.

    python run.py cluster=slurm cluster.jobs=8 experiment=paper model=opt-6.7b platform=cuda

A job is one share of a sweep, or one combination of `-m`. Finished ones are not submitted.
`outputs/jobs` has a folder for each command: `job.sh`, which anybody can read and submit, `array`,
the number that Slurm gave it, and a log for each job. Started again while its jobs live, the
command waits for them.

`squeue` says which jobs live. A job's records say what it has done, and its log says why it did not
finish.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from harness.errors import BUG, UNFINISHED, USERS, UserError
from harness.files import text_sha256, write_atomic
from harness.run.runner import Run, relabel
from harness.run.sweep import share_of
from harness.settings.config import RunConfig
from harness.settings.kinds import find
from harness.settings.paths import INSTALLED, PACKAGES_DIR, PROGRAM
from harness.settings.schema import MOST, Count, Natural, as_typed, build, group

END_S = 120
"""How long before its time is over a job is told to end, in seconds; Slurm may say so a minute
earlier."""
POLL_S = 10.0
"""Between two questions to Slurm, in seconds."""
RUN = ("-P", "-m", "harness") if INSTALLED else (str(PACKAGES_DIR / PROGRAM),)
"""What Python starts in a job. -P: as for `kv-harness`, packages are not looked for in the working
folder."""
SHARE = "sweep.share="
REASONS = ("error: ", "unfinished: ", "slurmstepd: error: ")
"""How lines of a log begin that say why a job ended."""


@dataclass(frozen=True)
class Cluster:
    """The settings of `conf/cluster/slurm.yaml`, which explains them. Raises UserError for a value
    out of range."""

    name: Literal["slurm"]
    jobs: Count = 1
    partition: str | None = None
    account: str | None = None
    minutes: Annotated[int, Field(ge=5, le=MOST)] = 720
    restarts: Natural = 3
    cpus: Count = 8
    mem_gib: Count = 64
    gpus: Natural | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Job(NamedTuple):
    """The settings of one job's command line, and its runs."""

    overrides: tuple[str, ...]
    runs: tuple[Run, ...]

    @property
    def is_done(self) -> bool:
        """True if all its runs are finished."""
        return all(run.is_finished() for run in self.runs)


@dataclass
class JobArray:
    """The jobs of one command, submitted together as an array of Slurm's. title: names them there.
    on_gpu: they compute on one."""

    cluster: Cluster
    title: str
    results_dir: Path
    on_gpu: bool
    jobs: list[Job] = field(default_factory=list)

    @classmethod
    def of(cls, config: DictConfig, title: str) -> JobArray:
        """An empty one, as a composed command line asks for; UserError where a setting is wrong."""
        node = group({"cluster": OmegaConf.to_container(config.cluster, resolve=True)}, "cluster")
        on_gpu = config.platform.name == "cuda"
        return cls(build(Cluster, node, "cluster"), title, Path(config.results_dir), on_gpu)

    def add(self, overrides: Sequence[str], configs: Sequence[RunConfig]) -> None:
        """Add runs as one job; UserError for one of a kind that only prints what it finds."""
        for config in configs:
            if not find(config.kind).keeps_record:
                no_record = "writes no record, so it is nothing for cluster=slurm"
                raise UserError(f"experiment={config.experiment}: {no_record}")
        typed = tuple(map(as_typed, overrides))
        self.jobs.append(Job(typed, tuple(map(Run.of, configs))))

    def deal(self, overrides: Sequence[str], cells: Sequence[RunConfig]) -> None:
        """Add a sweep as `cluster.jobs` jobs."""
        for number in range(1, self.cluster.jobs + 1):
            share = f"{number}/{self.cluster.jobs}"
            self.add([*overrides, SHARE + share], share_of(cells, share))

    def finished(self) -> list[Run]:
        """All runs that are finished."""
        return [run for job in self.jobs for run in job.runs if run.is_finished()]

    def run(self) -> int:
        """Submit the jobs that are not finished, and wait for them; returns the exit code of the
        command.

        Raises:
            UserError: there is no Slurm here, or it refuses.
            KeyboardInterrupt: Ctrl-C or SIGTERM. The jobs run on, and the message says how to end
            them.
        """
        finished = self.finished()
        for run in finished:
            relabel(run)
        todo = {number: job for number, job in enumerate(self.jobs, start=1) if not job.is_done}
        if not todo:
            print(f"all {len(finished)} runs were finished before: no job")
            return 0
        folder = self._folder()
        array = self._living_or_submitted(folder, todo)
        try:
            wait(array)
        except KeyboardInterrupt as stop:
            ends = f"scancel {array} ends it"
            stop.args = (f"job {array} runs on ({ends}) and the same command waits for it again",)
            raise
        codes = []
        for number, job in todo.items():
            if job.is_done:
                continue
            log = folder / f"{array}_{number}.log"
            why, code = why_ended(log)
            codes.append(code)
            print(f"error: job {array}_{number}: {why}; log: {log}", file=sys.stderr)
        if codes:
            unfinished = f"{len(codes)} of {len(todo)} jobs did not finish"
            print(f"error: {unfinished}; the same command goes on", file=sys.stderr)
        return next((code for code in (BUG, USERS, UNFINISHED) if code in codes), 0)

    def _folder(self) -> Path:
        """The command's folder: it goes by its settings and the folder in which it starts, not by
        the number of its jobs."""
        words: dict[str, None] = {}
        for job in self.jobs:
            for override in job.overrides:
                if not override.startswith(SHARE):
                    words[override] = None
        command = text_sha256(str(Path.cwd()), *words)
        return self.results_dir.resolve() / "jobs" / f"{self.title}-{command[:8]}"

    def _living_or_submitted(self, folder: Path, todo: Mapping[int, Job]) -> str:
        """The number of the array that computes the jobs: of an earlier start, or a new one."""
        number_file = folder / "array"
        array = number_file.read_text().strip() if number_file.is_file() else ""
        if array and living(array):
            alive = f"job {array} of this command is alive"
            print(f"{alive}: waiting for it; scancel {array} ends it", flush=True)
            return array
        write_atomic(folder / "job.sh", self.script(folder, todo))
        array = submit(folder / "job.sh")
        write_atomic(number_file, array + "\n")
        ends = f"scancel {array} ends it; logs: {folder / f'{array}_*.log'}"
        print(f"job {array}, {len(todo)} of {len(self.jobs)} parts; {ends}", flush=True)
        return array

    def script(self, folder: Path, jobs: Mapping[int, Job]) -> str:
        """A script for `sbatch` with an element of an array for each of `jobs`, by its number. Logs
        go to `folder`.

        Slurm ends a job after `minutes`. Its command gets SIGTERM before, and begins again up to
        `restarts` times, those after a preemption included, which are Slurm's own.
        """
        asked = self.cluster
        gpus = int(self.on_gpu) if asked.gpus is None else asked.gpus
        options = {
            "array": ",".join(map(str, jobs)),
            "time": asked.minutes,
            "signal": f"B:USR1@{END_S}",
            "requeue": True,
            "open-mode": "append",
            "job-name": f"kv-{self.title}",
            "partition": asked.partition,
            "account": asked.account,
            "cpus-per-task": asked.cpus,
            "mem": f"{asked.mem_gib}G",
            "gpus-per-node": gpus or None,
            "chdir": Path.cwd(),
            "output": folder / "%A_%a.log",
            **asked.options,
        }
        lines = ["#!/bin/bash"]
        for name, value in options.items():
            if value is True:
                lines.append(f"#SBATCH --{name}")
            elif value is not None:
                lines.append(f"#SBATCH --{name}={shlex.quote(str(value))}")
        lines += ["", "case $SLURM_ARRAY_TASK_ID in"]
        for number, job in jobs.items():
            command = shlex.join([sys.executable, *RUN, *job.overrides])
            lines.append(f"{number}) set -- {command} ;;")
        lines += ["esac", ""]
        threads = "OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}"
        over = f"unfinished: the job's {asked.minutes} minutes are over"
        return "\n".join(lines) + (
            f"""
export PYTHONUNBUFFERED=1 TQDM_MININTERVAL=60 {threads}
trap : TERM  # Slurm sends it to the command as well, which this script has to outlive
trap 'late=1; kill -TERM $!' USR1
"$@" &
until wait $!; code=$?; ! kill -0 $! 2>/dev/null; do :; done
if [ -n "$late" ] && [ $code -ne 0 ]; then
  if [ ${{SLURM_RESTART_COUNT:-0}} -lt {asked.restarts} ]; then
    echo "{over}; it begins again and goes on"
    scontrol requeue $SLURM_JOB_ID
  else
    echo "{over} after {asked.restarts} restarts; the same command goes on"
  fi
  code={UNFINISHED}
fi
exit $code
"""
        )


def call(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of Slurm."""
    try:
        return subprocess.run([program, *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        missing = f"{program} is not on the PATH; start this on a machine of the cluster"
        raise UserError(f"cluster=slurm: {missing}") from None


def submit(path: Path) -> str:
    """Hand a script to Slurm; returns the number of its array. UserError with Slurm's words where
    it refuses."""
    answer = call("sbatch", "--parsable", str(path))
    if answer.returncode != 0:
        refusals = []
        for line in answer.stderr.splitlines():
            refusal = line.removeprefix("sbatch: ").removeprefix("error: ")
            if refusal:
                refusals.append(refusal)
        words = "; ".join(refusals) or answer.returncode
        raise UserError(f"cluster=slurm: sbatch refuses: {words}")
    return answer.stdout.strip().partition(";")[0]


def living(array: str) -> list[str]:
    """The jobs of an array that have not ended, a line each: number, state, and where it runs or
    why it does not."""
    while True:
        answer = call("squeue", "--noheader", f"--jobs={array}", "--format=%i: %T %R")
        is_forgotten = "Invalid job id" in answer.stderr  # some minutes after its end
        if answer.returncode == 0 or is_forgotten:
            return answer.stdout.splitlines()
        time.sleep(POLL_S)  # Slurm does not answer now


def wait(array: str) -> None:
    """Return once no job of an array lives. Prints the state of each job when it changes."""
    before: list[str] = []
    while lines := living(array):
        for line in lines:
            if line not in before:
                print(f"job {line}", flush=True)
        before = lines
        time.sleep(POLL_S)


def why_ended(log: Path) -> tuple[str, int]:
    """Why a job did not finish, from its log, and the exit code that stands for it."""
    why = "did not finish"
    if log.is_file():
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(REASONS):
                why = line  # the last one counts
    if why.startswith("unfinished: ") or "TIME LIMIT" in why:
        return why, UNFINISHED
    return why, BUG if "HYDRA_FULL_ERROR=1" in why else USERS

"""A command as jobs of a cluster: `cluster=slurm` submits what it would run, waits, and reports as if it had run here.

python run.py cluster=slurm cluster.jobs=8 grid=paper model=opt-6.7b platform=cuda data=hub

A job is one share of a grid, or one combination of a sweep; what is finished is not submitted. In `results/jobs`,
a folder for each command has `job.sh`, which anybody can read and submit, `array`, the number that Slurm gave it, and
a log for each job. Started again while jobs of it are alive, the command waits for those.

Slurm is asked by its own programs, and needs no accounting database. `squeue` knows ended jobs for some minutes
(`MinJobAge`), so it is asked more often.
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

import harness
from harness.errors import BUG, UNFINISHED, USERS, UserError
from harness.files import text_sha256, write_atomic
from harness.launch.grid import share_of
from harness.launch.runner import Run, relabel
from harness.settings.config import RunConfig
from harness.settings.experiment import find
from harness.settings.schema import MOST, Count, Natural, build, group, setting_of

END_S = 120
"""How long before its time is over a job is told to end, in seconds; Slurm may say so a minute earlier."""
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip
GONE = "GONE"
"""In place of the state of a job that Slurm no longer knows."""


class State(NamedTuple):
    """Of one job: Slurm's word, the exit code of its script, and where it runs or why it does not."""

    word: str
    exit_code: int = 0
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it has ended and does not begin again."""
        return self.word in ENDED or self.word == GONE


def script(options: Mapping[str, Any], jobs: Mapping[int, Sequence[str]], minutes: int, restarts: int) -> str:
    """A script for `sbatch` with one element of an array for each of `jobs`, by its number.

    Args:
        options: of `sbatch`, by name; True for one without a value, None for one left out.
        jobs: words of the command of each.
        minutes: after which Slurm ends a job. Its command gets SIGTERM before, and then begins again.
        restarts: how often. Those after a preemption, which are Slurm's own, count.
    """
    array = {
        "array": ",".join(map(str, jobs)),
        "time": minutes,
        "signal": f"B:USR1@{END_S}",
        "requeue": True,
        "open-mode": "append",
    }
    given = ((name, value) for name, value in (array | dict(options)).items() if value is not None)
    flags = [f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}") for name, value in given]
    commands = [f"{number}) set -- {shlex.join(words)} ;;" for number, words in jobs.items()]
    return "\n".join(["#!/bin/bash", *flags, "", "case $SLURM_ARRAY_TASK_ID in", *commands, "esac", ""]) + (
        f"""
export PYTHONUNBUFFERED=1 TQDM_MININTERVAL=60 OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}}
trap : TERM  # Slurm sends it to the command as well, which this script has to outlive
trap 'late=1; kill -TERM $!' USR1
"$@" &
until wait $!; code=$?; ! kill -0 $! 2>/dev/null; do :; done
if [ -n "$late" ] && [ $code -ne 0 ]; then
  if [ ${{SLURM_RESTART_COUNT:-0}} -lt {restarts} ]; then
    echo "unfinished: the job's {minutes} minutes are over; it begins again and goes on"
    scontrol requeue $SLURM_JOB_ID
  else
    echo "unfinished: the job's {minutes} minutes are over after {restarts} restarts; the same command goes on"
  fi
  code={UNFINISHED}
fi
exit $code
"""
    )


def submit(path: Path) -> str:
    """Hand a script to Slurm; returns the number of its array. UserError with Slurm's words where it refuses."""
    answer = _call("sbatch", "--parsable", str(path))
    if answer.returncode != 0:
        said = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in answer.stderr.splitlines()]
        raise UserError(f"cluster=slurm: sbatch refuses: {'; '.join(filter(None, said)) or answer.returncode}")
    return answer.stdout.strip().partition(";")[0]


def states(array: str) -> dict[int, State] | None:
    """The jobs of an array that Slurm knows, by number; None where it does not answer now."""
    fields = "ArrayTaskID:12,State:20,exit_code:12,ReasonList:200"
    answer = _call("squeue", "--noheader", "--array", "--states=all", f"--jobs={array}", f"--Format={fields}")
    if answer.returncode != 0:
        return {} if "Invalid job id" in answer.stderr else None
    found = {}
    for line in answer.stdout.splitlines():
        number, word, status, *reason = line.split(None, 3)
        why = " ".join(reason).strip().strip("()")
        found[int(number)] = State(word, int(status) >> 8, "" if why == "None" else why)
    return found


def _call(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([program, *arguments], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError(
            f"cluster=slurm: {program} is not on the PATH; start this on a machine of the cluster"
        ) from error


# The command's jobs


POLL_S = 10.0
"""Between two questions to Slurm, in seconds."""
RUN = Path(harness.__file__).resolve().parents[1] / "run.py"
SHARE = "grid.share="


@dataclass(frozen=True)
class Cluster:
    """The settings of `conf/cluster/slurm.yaml`, which says what each of them is.

    Raises:
        UserError: a value out of range.
    """

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


@dataclass(frozen=True)
class Job:
    """What one job is to do: the settings of its command line, and its runs."""

    overrides: tuple[str, ...]
    runs: tuple[Run, ...]

    @property
    def is_done(self) -> bool:
        """Whether all that it would run is finished."""
        return all(run.is_finished() for run in self.runs)


@dataclass
class Batch:
    """The jobs of one command, to be submitted together.

    title: names them in Slurm. on_gpu: they compute on one.
    """

    cluster: Cluster
    title: str
    results_dir: Path
    on_gpu: bool
    jobs: list[Job] = field(default_factory=list)

    @classmethod
    def of(cls, config: DictConfig, title: str) -> Batch:
        """An empty one, as a composed command line asks for; UserError where a setting is wrong."""
        node = group({"cluster": OmegaConf.to_container(config.cluster, resolve=True)}, "cluster")
        on_gpu = config.platform.name == "cuda"
        return cls(build(Cluster, node, "cluster"), title, Path(config.results_dir), on_gpu)

    def add(self, overrides: Sequence[str], configs: Sequence[RunConfig]) -> None:
        """Some runs, as one job; UserError for one of a kind that only prints what it finds."""
        for config in configs:
            if not find(config.kind).keeps_record:
                raise UserError(f"experiment={config.experiment}: writes no record, so it is nothing for cluster=slurm")
        self.jobs.append(Job(tuple(overrides), tuple(map(Run.of, configs))))

    def deal(self, overrides: Sequence[str], cells: Sequence[RunConfig]) -> None:
        """A grid, as `cluster.jobs` jobs."""
        for share in (f"{number}/{self.cluster.jobs}" for number in range(1, self.cluster.jobs + 1)):
            self.add([*overrides, SHARE + share], share_of(cells, share))

    def run(self) -> int:
        """Submit the jobs that are not finished, and wait for them; returns the exit code of the command.

        Raises:
            UserError: there is no Slurm here, or it refuses.
            KeyboardInterrupt: Ctrl-C or SIGTERM. The jobs run on, and the message says how to end them.
        """
        finished = [run for job in self.jobs for run in job.runs if run.is_finished()]
        for run in finished:
            relabel(run)
        array = self._alive()
        if array is not None:
            print(f"job {array} of this command is alive: waiting for it; scancel {array} ends it", flush=True)
        else:
            todo = {number: job for number, job in enumerate(self.jobs, start=1) if not job.is_done}
            if not todo:
                print(f"all {len(finished)} runs were finished before: no job")
                return 0
            array = self._submit(todo)
        try:
            return self._ends(array, self._wait(array))
        except KeyboardInterrupt as stop:
            stop.args = (f"job {array} runs on (scancel {array} ends it) and the same command waits for it again",)
            raise

    def finished(self) -> list[Path]:
        """The records that are finished."""
        return [run.path for job in self.jobs for run in job.runs if run.is_finished()]

    @property
    def _folder(self) -> Path:
        """Of this command: the same settings, started in the same folder, in however many jobs."""
        words = (word for job in self.jobs for word in job.overrides if not word.startswith(SHARE))
        command = text_sha256(str(Path.cwd()), *dict.fromkeys(words))
        return self.results_dir.resolve() / "jobs" / f"{self.title}-{command[:8]}"

    def _alive(self) -> str | None:
        """The array of an earlier start, where jobs of it are to run still."""
        note = self._folder / "array"
        array = note.read_text().strip() if note.is_file() else None
        return array if array and any(not state.is_over for state in _states(array).values()) else None

    def _submit(self, todo: Mapping[int, Job]) -> str:
        """Write the script, hand it to Slurm, and note its number."""
        asked, folder = self.cluster, self._folder
        gpus = int(self.on_gpu) if asked.gpus is None else asked.gpus
        options = {
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
        words = {number: [sys.executable, str(RUN), *job.overrides] for number, job in todo.items()}
        path = folder / "job.sh"
        write_atomic(path, script(options, words, asked.minutes, asked.restarts))
        array = submit(path)
        write_atomic(folder / "array", array + "\n")
        logs = folder / f"{array}_*.log"
        print(f"job {array}, {len(todo)} of {len(self.jobs)} parts; scancel {array} ends it; logs: {logs}", flush=True)
        return array

    def _wait(self, array: str) -> dict[int, State]:
        """The last state of each job; says when one changes."""
        last: dict[int, State] = {}
        while True:
            gone = {number: State(GONE) for number, state in last.items() if not state.is_over}
            now = gone | _states(array)
            for number, state in sorted(now.items()):
                if state != last.get(number):
                    print(f"job {array}_{number}: {_said(state)}", flush=True)
            last |= now
            if all(state.is_over for state in last.values()):
                return last
            time.sleep(POLL_S)

    def _ends(self, array: str, ends: Mapping[int, State]) -> int:
        """The exit code for what became of the jobs; says of each that failed why."""
        is_well = {"COMPLETED"} | ({GONE} if all(job.is_done for job in self.jobs) else set())
        failed = {number: state for number, state in sorted(ends.items()) if state.word not in is_well}
        for number, state in failed.items():
            log = self._folder / f"{array}_{number}.log"
            why = _last_error(log) if state.word == "FAILED" else ""
            print(f"error: job {array}_{number}: {_said(state)}; {why}log: {log}", file=sys.stderr)
        if failed:
            again = f"error: {len(failed)} of {len(ends)} jobs did not finish; the same command goes on"
            print(again, file=sys.stderr)
        codes = set(map(_exit_code, failed.values()))
        return next((code for code in (BUG, USERS, UNFINISHED) if code in codes), 0)


def own_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides of what a job runs: those without the cluster's."""
    return [each for each in overrides if setting_of(each).partition(".")[0] != "cluster"]


def _states(array: str) -> dict[int, State]:
    """The jobs of an array that Slurm knows, once it answers."""
    while (known := states(array)) is None:
        time.sleep(POLL_S)
    return known


def _exit_code(state: State) -> int:
    """What the end of a job is to its command: its own exit code, or something that the user can put right."""
    if state.word == "TIMEOUT":
        return UNFINISHED
    return state.exit_code if state.word == "FAILED" and state.exit_code in (BUG, UNFINISHED) else USERS


def _said(state: State) -> str:
    """A state in words."""
    if state.word == GONE:
        return "Slurm knows it no more"
    words = state.word.lower().replace("_", " ")
    if state.word == "FAILED":
        return f"{words}, exit code {state.exit_code}"
    if state.is_over or not state.reason:
        return words
    return f"{words} on {state.reason}" if state.word in ("RUNNING", "COMPLETING") else f"{words} ({state.reason})"


def _last_error(log: Path) -> str:
    """What a job said last was wrong, from its log."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    said = [line for line in lines if line.startswith(("error: ", "unfinished: "))]
    return f"{said[-1]}; " if said else ""

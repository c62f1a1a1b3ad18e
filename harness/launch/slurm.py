"""Slurm, as its own programs speak: an array of jobs as a script for `sbatch`, and what `squeue` says of it.

Needs no accounting database. `squeue` knows ended jobs for some minutes (`MinJobAge`), so it is asked more often.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import UNFINISHED, UserError

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

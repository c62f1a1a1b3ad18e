"""Kill a grid at random moments, and start it again until it ends: are its tables those of an undisturbed start?

Each start is a copy of this process, which has run it once, and runs and reports the cells as the command line
does; SIGKILL comes after a random part of the time that a whole grid takes. After every kill, all records that were
finished before must be there unchanged. Once a start ends by itself its tables are compared, the results removed, and
all begins anew, until `--kills` starts were killed.

    python -m benchmarks.kills --kills 100

Exit code 1 where a finished record was lost or changed, or a table differs.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from harness.launch import grid, runner
from harness.records.record import read_all, record_path
from harness.resources import Resources
from harness.settings.compose import load
from harness.settings.run import RunConfig

METHODS = ("full", "h2o", "int4", "quest")
SIZES = ["seq_len=32", "prefill_len=16", "num_windows=1"]


def run_all(cells: Sequence[RunConfig], resources: Resources) -> None:
    """Run and report cells."""
    runner.report(list(grid.run_cells(cells, resources=resources)))


def begin(cells: Sequence[RunConfig], resources: Resources) -> int:
    """Start the grid in a copy of this process; returns its id."""
    copy = os.fork()
    if not copy:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            run_all(cells, resources)
            code = 0
        finally:
            os._exit(code)
    return copy


def exit_code(process: int) -> int:
    """Wait for a process; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def tables(folder: Path) -> dict[str, bytes]:
    """Every table by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("tables/[!.]*"))}


def finished(folder: Path) -> dict[Path, bytes]:
    """Every finished record."""
    found = [each for each in read_all(folder) if each["status"] == "finished"]
    paths = [record_path(folder, each["experiment"], each["run_id"]) for each in found]
    return {path: path.read_bytes() for path in paths}


def lost(before: dict[Path, bytes], folder: Path) -> list[Path]:
    """Finished records that are not as they were."""
    after = finished(folder)
    return [path for path, content in before.items() if after.get(path) != content]


def run_kills(number: int, seed: int, folder: Path) -> bool:
    """Whether all held."""
    moments, resources = random.Random(seed), Resources()
    cells = [load([f"method={method}", *SIZES, f"results_dir={folder}"]) for method in METHODS]
    run_all(cells, resources)
    expected = tables(folder)
    shutil.rmtree(folder)
    start = time.perf_counter()
    code = exit_code(begin(cells, resources))
    whole_s = time.perf_counter() - start
    print(f"a whole grid: {len(finished(folder))} cells in {whole_s:.1f} s, exit code {code}", flush=True)
    code = code or tables(folder) != expected
    shutil.rmtree(folder)
    killed = ended = wrong = 0
    while killed < number or folder.exists():
        before = finished(folder)
        process = begin(cells, resources)
        if killed < number:
            time.sleep(moments.uniform(0, whole_s))
            os.kill(process, signal.SIGKILL)
        stopped = exit_code(process) == -signal.SIGKILL
        wrong += bool(lost(before, folder)) + (not stopped and tables(folder) != expected)
        killed, ended = killed + stopped, ended + (not stopped)
        if not stopped:
            shutil.rmtree(folder)
    print(f"{killed} kills, {ended} starts that ended by themselves, {wrong} wrong")
    return not code and not wrong


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a copy of this process has none of its threads
    with tempfile.TemporaryDirectory() as folder:
        return 0 if run_kills(arguments.kills, arguments.seed, Path(folder) / "results") else 1


if __name__ == "__main__":
    sys.exit(main())

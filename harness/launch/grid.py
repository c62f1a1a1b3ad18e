"""A grid: many runs in one process, one after another, as `plan` reads them from `conf/grid/<name>.yaml`.

A cell that fails does not stop the others; one that is finished is not run again; one whose experiment has used up its
minutes is put off to the next start. Processes that run the same grid share its cells: what one of them is at, the
others leave to it, and wait for in the end.

python run.py grid=accuracy results_dir=/tmp/results
"""

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from harness.errors import BugError, UnfinishedError, UserError, is_users, told
from harness.files import HeldError
from harness.launch import tracking
from harness.launch.child import process_of, run_apart
from harness.launch.plan import counted, groups
from harness.launch.runner import Run, is_held, relabel, require_devices, run, wait_for
from harness.resources import Resources
from harness.settings.config import RunConfig


def run_cells(
    configs: Sequence[RunConfig], minutes: Mapping[str, float | None] | None = None, resources: Resources | None = None
) -> Iterator[Path]:
    """Run the cells one after another; yields the path of each finished record, those finished before first.

    Args:
        configs: the cells.
        minutes: by experiment, after which no further cell of it begins.
        resources: what the cells of this process share.

    Raises:
        UserError: at the end, where cells failed: how many, and the first error. The others have run. At the start,
            where nothing can run here.
        BugError: likewise at the end, where a bug was among them.
        UnfinishedError: at the end, where none failed and some were put off; each is named.
    """
    require_devices(configs)
    start = Start(minutes or {}, resources or Resources())
    todo: list[Run] = []
    for each in map(Run.of, tqdm(configs, "looking at cells", unit="cell", leave=False, disable=None)):
        if each.is_finished():
            relabel(each)
            yield each.path
        else:
            todo.append(each)
    tracking.require(each.config.tracker for each in todo)
    _announce(todo, len(configs))
    failures: list[tuple[str, Exception]] = []
    put_off: list[Run] = []
    with tqdm(total=len(todo), unit="cell", dynamic_ncols=True) as progress:
        for each, outcome in _outcomes(todo, start, progress):
            progress.update()
            if outcome is None:
                put_off.append(each)
            elif isinstance(outcome, Path):
                yield outcome
            else:
                failures.append((f"{each.title}: {told(outcome)}", outcome))
                tqdm.write(f"failed: {failures[-1][0]}")
    _raise_at_the_end(len(configs), failures, put_off)


def _announce(todo: Sequence[Run], total: int) -> None:
    """Say which cells begin again and why, and how many do not."""
    for each in todo:
        reason = f"{each.title}: another process is at it" if is_held(each.path) else each.why_again()
        if reason:
            tqdm.write(reason)
    if len(todo) < total:
        tqdm.write(f"{total - len(todo)} of {total} cells were finished before, skipped")


@dataclass
class Start:
    """One start of a grid.

    minutes: by experiment, after which no further cell of it begins; spent: in seconds. resources: what the cells of
    this process share. began: in seconds since the epoch.
    """

    minutes: Mapping[str, float | None]
    resources: Resources
    began: float = field(default_factory=time.time)
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def allows(self, config: RunConfig) -> bool:
        """Whether a further cell of `config`'s experiment may begin."""
        limit = self.minutes.get(config.experiment)
        return limit is None or self.spent[config.experiment] < 60 * limit

    def outcomes(self, cells: Sequence[Run]) -> Iterator[Path | Exception]:
        """Run cells that share a process of their own, or one that needs none."""
        if process_of(cells[0].config) is not None:
            return run_apart(cells, self.began)
        return (self._run_here(each) for each in cells)

    def _run_here(self, todo: Run) -> Path | Exception:
        try:
            return run(todo, self.resources, since=self.began)
        except Exception as error:
            return error


def _outcomes(todo: Sequence[Run], start: Start, progress: tqdm) -> Iterator[tuple[Run, Path | Exception | None]]:
    """Each cell with its record's path, with its error, or with None where it is put off; at the end those that other
    processes are at."""
    while todo:
        held: list[Run] = []
        for each, outcome in _in_turn(todo, start, progress):
            if isinstance(outcome, HeldError):
                held.append(each)
            else:
                yield each, outcome
        if held:
            progress.set_description(f"waiting for another process: {held[0].title}")
            wait_for(held[0].path)
        todo = held


def _in_turn(todo: Sequence[Run], start: Start, progress: tqdm) -> Iterator[tuple[Run, Path | Exception | None]]:
    for group in groups(todo, lambda each: each.config):
        begins = [start.allows(each.config) or each.is_finished() for each in group]  # by another process
        yield from ((each, None) for each, may in zip(group, begins, strict=True) if not may)
        begun = list(itertools.compress(group, begins))
        outcomes = start.outcomes(begun) if begun else iter(())
        for each in begun:
            progress.set_description(each.title)
            began = time.perf_counter()
            outcome = next(outcomes)
            start.spent[each.config.experiment] += time.perf_counter() - began
            yield each, outcome


def _raise_at_the_end(total: int, failures: Sequence[tuple[str, Exception]], put_off: Sequence[Run]) -> None:
    for each in put_off:
        tqdm.write(f"put off: {each.title}")
    for said, _ in failures if len(failures) > 1 else ():
        tqdm.write(f"failed: {said}")
    counts = counted(Counter(each.config.experiment for each in put_off))
    later = f"put off, as their minutes are spent: {counts}; the same command goes on"
    if failures:
        bugs = [failure for failure in failures if not is_users(failure[1])]
        said, first = (bugs or failures)[0]
        more = f"; {later}" if put_off else ""
        kind, which = (BugError, "first bug") if bugs else (UserError, "first")
        raise kind(f"{len(failures)} of {total} cells failed; the {which}, {said}{more}") from first
    if put_off:
        raise UnfinishedError(later)

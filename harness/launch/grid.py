"""A grid: many runs in one process, one after another, as `plan` reads them from `conf/grid/<name>.yaml`.

A cell that fails does not stop the others; one that is finished is not run again; one whose experiment has used up its
minutes is put off to the next start.

python run.py grid=accuracy results_dir=/tmp/results
"""

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from harness.errors import UnfinishedError, UserError
from harness.launch import tracking
from harness.launch.child import process_of, run_apart
from harness.launch.plan import counted, groups
from harness.launch.runner import Run, require_devices, run
from harness.resources import Resources
from harness.settings.run import RunConfig


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
        UnfinishedError: at the end, where none failed and some were put off; each is named.
    """
    require_devices(configs)
    resources = resources or Resources()
    todo: list[Run] = []
    for each in map(Run.of, configs):
        if each.is_finished():
            yield run(each, resources, _silent)
        else:
            todo.append(each)
    tracking.require(each.config.tracker for each in todo)
    _announce(todo, len(configs))
    failures: list[tuple[str, Exception]] = []
    put_off: list[Run] = []
    with tqdm(total=len(todo), unit="cell", dynamic_ncols=True) as progress:
        for each, outcome in _outcomes(todo, minutes or {}, resources, progress):
            progress.update()
            if outcome is None:
                put_off.append(each)
            elif isinstance(outcome, Path):
                yield outcome
            else:
                failures.append((f"{each.title}: {str(outcome) or type(outcome).__name__}", outcome))
                tqdm.write(f"failed: {failures[-1][0]}")
    _raise_at_the_end(len(configs), failures, put_off)


def _announce(todo: Sequence[Run], total: int) -> None:
    """Say which cells begin again and why, and how many do not."""
    for reason in filter(None, (each.why_again() for each in todo)):
        tqdm.write(reason)
    if len(todo) < total:
        tqdm.write(f"{total - len(todo)} of {total} cells were finished before, skipped")


def _outcomes(
    todo: Sequence[Run], minutes: Mapping[str, float | None], resources: Resources, progress: tqdm
) -> Iterator[tuple[Run, Path | Exception | None]]:
    """Each cell with its record's path, with its error, or with None where it is put off."""
    spent: defaultdict[str, float] = defaultdict(float)
    for group in groups(todo, lambda each: each.config):
        begins = [spent[each.config.experiment] < _seconds(minutes, each.config) for each in group]
        yield from ((each, None) for each, now in zip(group, begins, strict=True) if not now)
        now = list(itertools.compress(group, begins))
        alone = now and process_of(now[0].config) is not None
        outcomes = run_apart(now) if alone else (_run_here(each, resources) for each in now)
        for each in now:
            progress.set_description(each.title)
            start = time.perf_counter()
            outcome = next(outcomes)
            spent[each.config.experiment] += time.perf_counter() - start
            yield each, outcome


def _seconds(minutes: Mapping[str, float | None], config: RunConfig) -> float:
    """What all cells of `config`'s experiment together may take."""
    limit = minutes.get(config.experiment)
    return math.inf if limit is None else 60 * limit


def _raise_at_the_end(total: int, failures: Sequence[tuple[str, Exception]], put_off: Sequence[Run]) -> None:
    for each in put_off:
        tqdm.write(f"put off: {each.title}")
    counts = counted(Counter(each.config.experiment for each in put_off))
    later = f"put off, as their minutes are spent: {counts}; the same command goes on"
    if failures:
        said, first = failures[0]
        more = f"; {later}" if put_off else ""
        raise UserError(f"{len(failures)} of {total} cells failed; the first, {said}{more}") from first
    if put_off:
        raise UnfinishedError(later)


def _run_here(todo: Run, resources: Resources) -> Path | Exception:
    try:
        return run(todo, resources, _silent)
    except Exception as error:
        return error


def _silent(line: str) -> None:
    """The progress bar says enough."""

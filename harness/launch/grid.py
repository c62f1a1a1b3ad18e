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
from harness.launch.child import run_apart, shape_of
from harness.launch.plan import counted, groups
from harness.launch.runner import is_finished, run, title
from harness.settings.run import RunConfig


def run_cells(configs: Sequence[RunConfig], minutes: Mapping[str, float | None] | None = None) -> Iterator[Path]:
    """Run the cells one after another; yields the path of each finished record, those finished before first.

    Args:
        configs: the cells.
        minutes: by experiment, after which no further cell of it begins.

    Raises:
        UserError: at the end, where cells failed: how many, and the first error. The others have run.
        UnfinishedError: at the end, where none failed and some were put off; each is named.
    """
    finished = [is_finished(config, tqdm.write) for config in configs]
    for config in itertools.compress(configs, finished):
        yield run(config, say=_silent)
    todo = [config for config, done in zip(configs, finished, strict=True) if not done]
    if len(todo) < len(configs):
        tqdm.write(f"{len(configs) - len(todo)} of {len(configs)} cells were finished before, skipped")
    failures: list[tuple[str, Exception]] = []
    put_off: list[RunConfig] = []
    with tqdm(total=len(todo), unit="cell", dynamic_ncols=True) as progress:
        for config, outcome in _outcomes(todo, minutes or {}, progress):
            progress.update()
            if outcome is None:
                put_off.append(config)
            elif isinstance(outcome, Path):
                yield outcome
            else:
                failures.append((f"{title(config)}: {str(outcome) or type(outcome).__name__}", outcome))
                tqdm.write(f"failed: {failures[-1][0]}")
    _raise_at_the_end(len(configs), failures, put_off)


def _outcomes(
    todo: Sequence[RunConfig], minutes: Mapping[str, float | None], progress: tqdm
) -> Iterator[tuple[RunConfig, Path | Exception | None]]:
    """Each cell with its record's path, with its error, or with None where it is put off."""
    spent: defaultdict[str, float] = defaultdict(float)
    for group in groups(todo):
        begins = [spent[config.experiment] < _seconds(minutes, config) for config in group]
        yield from ((config, None) for config, now in zip(group, begins, strict=True) if not now)
        now = list(itertools.compress(group, begins))
        outcomes = run_apart(now) if now and shape_of(now[0]) else map(_run_here, now)
        for config in now:
            progress.set_description(title(config))
            start = time.perf_counter()
            outcome = next(outcomes)
            spent[config.experiment] += time.perf_counter() - start
            yield config, outcome


def _seconds(minutes: Mapping[str, float | None], config: RunConfig) -> float:
    """What all cells of `config`'s experiment together may take."""
    limit = minutes.get(config.experiment)
    return math.inf if limit is None else 60 * limit


def _raise_at_the_end(total: int, failures: Sequence[tuple[str, Exception]], put_off: Sequence[RunConfig]) -> None:
    for config in put_off:
        tqdm.write(f"put off: {title(config)}")
    counts = counted(Counter(config.experiment for config in put_off))
    later = f"put off, as their minutes are spent: {counts}; the same command goes on"
    if failures:
        said, first = failures[0]
        more = f"; {later}" if put_off else ""
        raise UserError(f"{len(failures)} of {total} cells failed; the first, {said}{more}") from first
    if put_off:
        raise UnfinishedError(later)


def _run_here(config: RunConfig) -> Path | Exception:
    try:
        return run(config, say=_silent)
    except Exception as error:
        return error


def _silent(line: str) -> None:
    """The progress bar says enough."""

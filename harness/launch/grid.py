"""A grid: many runs in one process, one after another, from `conf/grid/<name>.yaml` or a file of one's own.

    python run.py grid=accuracy results_dir=/tmp/results

A cell that fails does not stop the others; one that is finished is not run again; one whose experiment has used up its
minutes is put off to the next start. Processes that run the same grid share its cells: a cell that one of them runs is
left to it, and waited for in the end.

settings: {num_windows: 3}            # for every cell of this file, unless the command line says otherwise
cells:
  - method: infinigen                 # one value, or
    method.alpha: [4, 5, 6]           # a list of alternatives: a cell for each combination of them
    experiment: [fig11, fig12]        # the last key varies fastest
  - method: h2o                       # settings named together vary together
    method.heavy_frac method.recent_frac: [[0.25, 0.25], [0.125, 0.125]]
  - when: ${grid.data_root}           # where this is null, the entry is left out, and that is said
    data: local
    data.root: ${grid.data_root}
  - method: ${choices:method,full}    # every file of a group but those named
    where_allowed: true               # a cell whose settings are refused is left out, and that is said
data_root: null                       # a setting of the grid's own: grid.data_root=DIR
grids: [speedup, table2]              # further grids, whose cells follow; a setting of this grid's own replaces theirs
minutes: {fig11: 12}                  # by experiment, for one start: what would begin later is put off

A run that a file names twice is one cell. `grid.share=K/N` is the K-th of N shares of any grid, for as many processes
that know nothing of one another. The cells timed at one shape stay together, as they share a process and its prefill.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from tqdm import tqdm

from harness.errors import BugError, UnfinishedError, UserError, is_users, nearest, told
from harness.files import HeldError
from harness.launch import tracking
from harness.launch.child import process_of, run_apart
from harness.launch.runner import Run, is_held, relabel, require_devices, run, wait_for
from harness.model.load import shape_mapping
from harness.resources import Resources
from harness.settings.compose import Composer, chosen_model, compose, load
from harness.settings.config import RunConfig
from harness.settings.experiment import find
from harness.settings.schema import options, setting_of

T = TypeVar("T")

KEYWORDS = {"settings", "cells", "grids", "minutes", "share"}
"""What every grid may have; any other key is a setting of the grid's own."""


@dataclass(frozen=True)
class Plan:
    """cells: checked, none has run. left_out: experiment and reason of each cell that `when` or `where_allowed` leaves
    out. minutes: by experiment, what its cells may take in one start; None, or not named: as long as it takes."""

    cells: tuple[RunConfig, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    minutes: Mapping[str, float | None] = field(default_factory=dict)

    def gaps(self) -> list[str]:
        """What is left out, a line for each reason."""
        by_reason: dict[str, Counter[str]] = {}
        for experiment, reason in self.left_out:
            by_reason.setdefault(reason, Counter())[experiment] += 1
        return [f"left out, as {reason}: {counted(found)}" for reason, found in by_reason.items()]


def counted(cells: Mapping[str, int]) -> str:
    """Numbers of cells by experiment, in words."""
    return "cells of " + ", ".join(f"{name} ({number})" for name, number in cells.items())


def read_plan(node: DictConfig, overrides: Sequence[str]) -> Plan:
    """All cells of a grid and of the grids in it, or a share of them, checked before the first of them runs.

    Args:
        node: the chosen `conf/grid/*.yaml`, composed.
        overrides: the user's; they hold for every cell, and win over what a grid sets without varying it.

    Raises:
        UserError: a malformed grid, one with every cell left out, a wrong setting in any cell, or an override of what
                the cells vary.
    """
    plan = _read(node, overrides, (), Composer())
    if not plan.cells:
        raise UserError(f"nothing to run: {'; '.join(plan.gaps())}")
    known = {config.experiment: None for config in plan.cells} | dict(plan.left_out)
    for name in plan.minutes:
        if name not in known:
            raise UserError(f"grid.minutes.{name}={plan.minutes[name]}: {nearest(name, known)}")
    share = node.get("share")
    return plan if share is None else replace(plan, cells=share_of(plan.cells, str(share)))


def groups(cells: Sequence[T], config_of: Callable[[T], RunConfig]) -> list[list[T]]:
    """The cells that share a process of their own, in the order of the first of each; any other cell is alone."""
    found: dict[Any, list[T]] = {}
    for index, cell in enumerate(cells):
        process = process_of(config_of(cell))
        found.setdefault(index if process is None else process, []).append(cell)
    return list(found.values())


def share_of(cells: Sequence[RunConfig], share: str) -> tuple[RunConfig, ...]:
    """The K-th of N shares of cells, `share` being "K/N": their groups dealt out in turn.

    So neighbours, which cost about the same, go to different shares. UserError where `share` is none.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", share)
    number, shares = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= shares:
        raise UserError(f"grid.share={share}: must be K/N with K from 1 to N, such as 2/8")
    return tuple(itertools.chain.from_iterable(groups(cells, lambda config: config)[number - 1 :: shares]))


def _read(node: DictConfig, overrides: Sequence[str], within: tuple[str, ...], composer: Composer) -> Plan:
    """The cells of one file, then those of the grids in it. within: the names of the grids around it."""
    written = OmegaConf.to_container(node, resolve=False)
    if "${model.shape." in str(written):
        _take_shape(node._get_root(), overrides)
    grid = OmegaConf.to_container(node, resolve=True)
    assert isinstance(grid, dict) and isinstance(written, dict)
    parts = [_part(str(name), grid, overrides, within, composer) for name in _list(grid, "grids")]
    entries = [_group(entry, "grid.cells") for entry in _list(grid, "cells")]
    if not entries and not parts:
        raise UserError("grid.cells: must be a list of cells; see harness/launch/grid.py")
    settings = _group(grid.get("settings") or {}, "grid.settings")
    conditions = [entry.pop("when", True) for entry in entries]
    kept = [entry for entry, condition in zip(entries, conditions, strict=True) if condition is not None]
    left_out = [
        (str((settings | cell).get("experiment", "perplexity")), str(source["when"]).strip("${}") + " is not given")
        for entry, source, condition in zip(entries, written.get("cells") or [], conditions, strict=True)
        for cell in (_combinations(entry) if condition is None else ())
    ]
    cells, refused = _cells(kept, settings, overrides, composer)
    minutes = {name: limit for part in parts for name, limit in part.minutes.items()}
    return Plan(
        cells=(*cells, *(cell for part in parts for cell in part.cells)),
        left_out=(*left_out, *refused, *(cell for part in parts for cell in part.left_out)),
        minutes=minutes | _minutes(grid.get("minutes")),  # the outer grid's word holds
    )


def _take_shape(config: Any, overrides: Sequence[str]) -> None:
    """Put the shape of a source that the user gave in the place of the chosen entry's, for grids that go by it."""
    model = chosen_model(config, overrides)
    if model.shape is None:
        with open_dict(config):
            config.model.shape = shape_mapping(model)


def _part(
    name: str, outer: Mapping[Any, Any], overrides: Sequence[str], within: tuple[str, ...], composer: Composer
) -> Plan:
    """A grid within a grid, with the user's overrides; settings of its own that `outer` has too are as there."""
    if name not in options("grid"):
        raise UserError(f"grid.grids={name}: {nearest(name, options('grid'))}")
    if name in within:
        raise UserError(f"grid.grids={name}: contains itself")
    node = compose([f"grid={name}", *(override for override in overrides if not _of_grid(override))]).grid
    for key in outer.keys() & node.keys() - KEYWORDS:
        node[key] = outer[key]
    return _read(node, overrides, (*within, name), composer)


def _cells(
    entries: Sequence[dict[str, Any]], settings: dict[str, Any], overrides: Sequence[str], composer: Composer
) -> tuple[list[RunConfig], list[tuple[str, str]]]:
    """The cells of one file, and what its entries leave out where it is refused."""
    given = {setting_of(override): override for override in overrides if not _of_grid(override)}
    lenient = [entry.pop("where_allowed", False) for entry in entries]
    every = [(cell, may) for entry, may in zip(entries, lenient, strict=True) for cell in _combinations(entry)]
    if "method" in given:
        every = _of_method(every, given["method"].partition("=")[2])
    for key in given:
        if len({str(cell[key]) for cell, _ in every if key in cell}) > 1:
            raise UserError(f"{given[key]}: the grid varies {key} itself; leave one of them out")
    configs: list[RunConfig] = []
    refused: list[tuple[str, str]] = []
    for cell, may_be_refused in every:
        fixed = {key: value for key, value in (settings | cell).items() if key not in given}
        try:
            config = load([*itertools.starmap(_override, fixed.items()), *given.values()], composer)
        except (UserError, HydraException) as error:
            if not may_be_refused:
                raise
            refused.append((str(fixed.get("experiment", "perplexity")), str(error).splitlines()[0].rstrip(".")))
            continue
        if not find(config.kind).keeps_record:
            raise UserError(f"grid.cells: experiment={config.experiment} writes no record, so it is no cell")
        if config not in configs:
            configs.append(config)
    return configs, refused


def _of_method(every: list[tuple[dict[str, Any], bool]], method: str) -> list[tuple[dict[str, Any], bool]]:
    """The cells of one method, of a grid that varies it. Another method takes the place of each that stands alone."""
    names = {str(cell["method"]) for cell, _ in every if "method" in cell}
    if len(names) < 2:
        return every
    if method in names:
        return [(cell, may) for cell, may in every if cell.get("method") == method]
    alone = [(cell, may) for cell, may in every if not any(key.startswith("method.") for key in cell)]
    return [({**cell, "method": method}, may) for cell, may in alone]


def _minutes(node: Any) -> dict[str, float | None]:
    minutes = _group(node or {}, "grid.minutes")
    for name, limit in minutes.items():
        number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if limit is not None and not (number and limit > 0):
            raise UserError(f"grid.minutes.{name}={limit}: must be a number above 0, or null for no limit")
    return minutes


def _combinations(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The cells of one entry: setting to value, for each combination of the alternatives."""
    axes = []
    for key, value in entry.items():
        names = key.split()
        alternatives = value if isinstance(value, list) else [value]
        rows = [item if len(names) > 1 else [item] for item in alternatives]
        if any(not isinstance(row, list) or len(row) != len(names) for row in rows):
            raise UserError(f"grid.cells: {key} needs a list of lists of {len(names)} values, not {value}")
        axes.append([dict(zip(names, row, strict=True)) for row in rows])
    for chosen in itertools.product(*axes):
        yield {name: value for part in chosen for name, value in part.items()}


def _list(grid: Mapping[Any, Any], name: str) -> list[Any]:
    value = grid.get(name) or []
    if not isinstance(value, list):
        raise UserError(f"grid.{name}: must be a list of {name}; see harness/launch/grid.py")
    return value


def _group(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}={value}: must map settings to values")
    return {str(key): item for key, item in value.items()}


def _of_grid(override: str) -> bool:
    """Whether an override chooses the grid or a setting of its own."""
    return setting_of(override).partition(".")[0] == "grid"


def _override(key: str, value: Any) -> str:
    """`key=value` as Hydra reads it on a command line."""
    if value is None or isinstance(value, bool):
        value = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, list):
        value = f"[{','.join(map(str, value))}]"
    elif isinstance(value, str):  # quoted, as a label or a folder may hold what the command line reads as syntax
        value = QuotedString(value, Quote.single).with_quotes()
    return f"{key}={value}"


# Running the cells


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

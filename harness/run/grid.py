"""A grid is many runs, its cells, from `conf/grid/<name>.yaml` or a file of one's own.

    python run.py grid=accuracy results_dir=/tmp/results

settings: {num_windows: 3}            # for every cell of this file; the command line wins
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
    where_allowed: true               # a refused cell is left out, and that is said
data_root: null                       # a setting of the grid's own: grid.data_root=DIR
grids: [speedup, table2]              # further grids, whose cells follow; `data_root` replaces
                                      # a setting of that name there
minutes: {fig11: 12}                  # by experiment, for one start: later cells are put off

A run that a file names twice is one cell. `grid.share=K/N` is the K-th of N shares of any grid, for
as many processes that know nothing of one another. The cells timed at one shape stay together, as
they share a process and its prefill.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from harness.errors import UserError, nearest
from harness.model.load import shape_mapping
from harness.results.board_cells import cells_of_tasks
from harness.results.tuned import as_tuned
from harness.run.cells import counted, groups
from harness.run.compose import Composer, compose, load, override
from harness.run.parse import chosen_model
from harness.settings.config import RunConfig
from harness.settings.kinds import find
from harness.settings.schema import Positive, Text, build, is_group, options, setting_of
from harness.settings.systems import OF_EVERY_METHOD


@dataclass(frozen=True)
class Keywords:
    """What every grid may have; any other key is a setting of the grid's own."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    cells: tuple[Mapping[str, Any], ...] = ()
    grids: tuple[str, ...] = ()
    minutes: Mapping[str, Positive | None] = field(default_factory=dict)
    share: Text | None = None


KEYWORDS = Keywords.__dataclass_fields__.keys()


OmegaConf.register_new_resolver("as_tuned", as_tuned, replace=True)
OmegaConf.register_new_resolver("on_the_leaderboard", cells_of_tasks, replace=True)


@dataclass
class Plan:
    """cells: checked, none has run. left_out: experiment and reason of each cell that `when` or
    `where_allowed` leaves out. minutes: by experiment, what its cells may take in one start; None,
    or not named: as long as it takes."""

    cells: list[RunConfig] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    minutes: dict[str, float | None] = field(default_factory=dict)

    def gaps(self) -> list[str]:
        """What is left out, a line for each reason."""
        reasons: dict[str, list[str]] = {}
        for experiment, reason in self.left_out:
            reasons.setdefault(reason, []).append(experiment)
        lines = []
        for reason, experiments in reasons.items():
            lines.append(f"left out, as {reason}: {counted(experiments)}")
        return lines


def read_plan(node: DictConfig, overrides: Sequence[str]) -> Plan:
    """All cells of a grid and of the grids in it, or a share of them, checked before the first of
    them runs.

    Args:
        node: the chosen `conf/grid/*.yaml`, composed.
        overrides: the user's; they hold for every cell, and win over what a grid sets without
        varying it.

    Raises:
        UserError: a malformed grid, one with every cell left out, a wrong setting in any cell, or
                an override of what the cells vary.
    """
    plan = Plan()
    _read(plan, node, overrides, (), Composer())
    if not plan.cells:
        raise UserError(f"nothing to run: {'; '.join(plan.gaps())}")
    known = {config.experiment: None for config in plan.cells} | dict(plan.left_out)
    for name in plan.minutes:
        if name not in known:
            raise UserError(
                f"grid.minutes.{name}: no cell is of that experiment; {nearest(name, known)}"
            )
    if (share := node.get("share")) is not None:
        plan.cells = share_of(plan.cells, str(share))
    return plan


def share_of(cells: Sequence[RunConfig], share: str) -> list[RunConfig]:
    """The K-th of N shares of cells, `share` being "K/N": their groups dealt out in turn.

    So neighbours, which cost about the same, go to different shares. UserError where `share` is
    none.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", share)
    number, shares = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= shares:
        raise UserError(f"grid.share={share}: must be K/N with K from 1 to N, such as 2/8")
    own_groups = groups(cells, lambda config: config)[number - 1 :: shares]
    return list(itertools.chain.from_iterable(own_groups))


def _read(
    plan: Plan,
    node: DictConfig,
    overrides: Sequence[str],
    within: tuple[str, ...],
    composer: Composer,
) -> None:
    """Add the cells of one file to `plan`, then those of the grids in it. within: the names of the
    grids around it."""
    written: Any = OmegaConf.to_container(node, resolve=False)
    if "${model.shape." in str(written):
        # A model of the user's own has its shape, not the chosen entry's.
        config: Any = node._get_root()
        model = chosen_model(config, overrides)
        if model.shape is None:
            with open_dict(config):
                config.model.shape = shape_mapping(model)
    grid: Any = OmegaConf.to_container(node, resolve=True)
    keywords = {name: grid[name] for name in KEYWORDS & grid.keys() if grid[name] is not None}
    asked = build(Keywords, keywords, "grid")
    if not asked.cells and not asked.grids:
        raise UserError("grid.cells: must be a list of cells; see harness/run/grid.py")

    given: dict[str, str] = {}
    for word in overrides:
        name = setting_of(word)
        if name.partition(".")[0] != "grid":
            given[name] = word
    cells: list[tuple[dict[str, Any], bool]] = []  # with whether it may be refused
    for entry, source in zip(asked.cells, written.get("cells") or (), strict=True):
        settings = dict(entry)
        condition, where_allowed = settings.pop("when", True), settings.pop("where_allowed", False)
        for cell in _combinations(settings):
            if condition is None:
                experiment = _experiment_of({**asked.settings, **cell})
                missing = str(source["when"]).strip("${}")
                plan.left_out.append((experiment, f"{missing} is not given"))
            else:
                cells.append((cell, where_allowed))
    if "method" in given:
        cells = _of_method(cells, given["method"].partition("=")[2])
    for key in given:
        values = {str(cell[key]) for cell, _ in cells if key in cell}
        if len(values) > 1:
            raise UserError(f"{given[key]}: the grid varies {key} itself; leave one of them out")
    configs: list[RunConfig] = []
    for cell, where_allowed in cells:
        settings = {**asked.settings, **cell}
        for key, value in settings.items():
            if is_group(key) and not isinstance(value, str):
                raise UserError(f"grid.cells: {key}={value}: must be one name")
        fixed = {key: value for key, value in settings.items() if key not in given}
        try:
            words = [override(key, value) for key, value in fixed.items()]
            config = load([*words, *given.values()], composer)
        except (UserError, HydraException) as error:
            if not where_allowed:
                raise
            plan.left_out.append((_experiment_of(fixed), str(error).splitlines()[0].rstrip(".")))
            continue
        if not find(config.kind).keeps_record:
            no_record = f"experiment={config.experiment} writes no record"
            raise UserError(f"grid.cells: {no_record}, so it is no cell")
        if config not in configs:
            configs.append(config)
    plan.cells += configs

    for name in asked.grids:
        if name not in options("grid"):
            raise UserError(f"grid.grids={name}: {nearest(name, options('grid'))}")
        if name in within:
            raise UserError(f"grid.grids={name}: contains itself")
        part = compose([f"grid={name}", *given.values()]).grid
        for key in grid.keys() & part.keys() - KEYWORDS:
            part[key] = grid[key]
        _read(plan, part, overrides, (*within, name), composer)
    plan.minutes |= asked.minutes  # the outer grid's word holds


def _experiment_of(settings: Mapping[str, Any]) -> str:
    return str(settings.get("experiment", "perplexity"))


def _of_method(
    cells: list[tuple[dict[str, Any], bool]], method: str
) -> list[tuple[dict[str, Any], bool]]:
    """The cells of one method, of a grid that varies it. Another method takes the place of each
    that has no setting of its own, but for the number of exempt layers, which every method has."""
    names = {str(cell["method"]) for cell, _ in cells if "method" in cell}
    if len(names) < 2:
        return cells
    if method in names:
        return [entry for entry in cells if entry[0].get("method") == method]
    replaced: list[tuple[dict[str, Any], bool]] = []
    for cell, where_allowed in cells:
        if any(map(_is_of_one_method, cell)):
            continue
        entry = {**cell, "method": method}, where_allowed
        if entry not in replaced:
            replaced.append(entry)
    return replaced


def _is_of_one_method(key: str) -> bool:
    return key.startswith("method.") and key != OF_EVERY_METHOD


def _combinations(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The cells of one entry: setting to value, for each combination of the alternatives."""
    axes = []
    for key, value in entry.items():
        names = key.split()
        alternatives = value if isinstance(value, list) else [value]
        axis = []
        for item in alternatives:
            values = item if len(names) > 1 else [item]
            if not isinstance(values, list) or len(values) != len(names):
                needed = f"{key} needs a list of lists of {len(names)} values"
                raise UserError(f"grid.cells: {needed}, not {value}")
            axis.append(dict(zip(names, values, strict=True)))
        axes.append(axis)
    for chosen in itertools.product(*axes):
        cell: dict[str, Any] = {}
        for settings in chosen:
            cell |= settings
        yield cell

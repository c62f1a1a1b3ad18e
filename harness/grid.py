"""A grid: many runs in one process, described by `conf/grid/<name>.yaml`.

settings: {num_windows: 3}            # for every cell, unless the command line says otherwise
cells:
  - method: infinigen                 # one value, or
    method.alpha: [4, 5, 6]           # a list of alternatives: a cell for each combination of them
    experiment: [fig11, fig12]        # the last key varies fastest
  - method: h2o                       # settings named together vary together
    method.heavy_frac method.recent_frac: [[0.25, 0.25], [0.125, 0.125]]

python run.py grid=accuracy results_dir=/tmp/results
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from harness.apart import run_apart, shape_of
from harness.config import RunConfig, load
from harness.errors import UserError
from harness.runner import is_finished, run, title


def cells(node: DictConfig, overrides: Sequence[str]) -> list[RunConfig]:
    """All cells of a grid, checked before the first of them runs.

    Args:
        node: the chosen `conf/grid/*.yaml`, composed.
        overrides: the user's; they hold for every cell, and win over what the grid sets without varying it.

    Raises:
        UserError: a malformed grid, a wrong setting in any cell, or an override of what the cells vary.
    """
    grid = OmegaConf.to_container(node, resolve=True)
    assert isinstance(grid, dict)
    given = {override.split("=", 1)[0]: override for override in overrides}
    given = {key: override for key, override in given.items() if key.partition(".")[0] != "grid"}
    settings = _group(grid.get("settings") or {}, "grid.settings")
    entries = grid.get("cells")
    if not isinstance(entries, list) or not entries:
        raise UserError("grid.cells: must be a list of cells; see harness/grid.py")
    every = [cell for entry in entries for cell in _combinations(_group(entry, "grid.cells"))]
    for key in given:
        if len({str(cell[key]) for cell in every if key in cell}) > 1:
            raise UserError(f"{given[key]}: the grid varies {key} itself; leave one of them out")
    fixed = [{key: value for key, value in (settings | cell).items() if key not in given} for cell in every]
    configs = [load([*itertools.starmap(_override, cell.items()), *given.values()]) for cell in fixed]
    if any(config.kind == "generate" for config in configs):
        raise UserError("grid.cells: experiment=generate writes no record, so it is no cell")
    return configs


def run_cells(configs: Sequence[RunConfig]) -> Iterator[Path]:
    """Run the cells one after another; yields the path of each finished record, those finished before first.

    Raises:
        UserError: at the end, where cells failed: how many, and the first error. The others have run.
    """
    finished = [is_finished(config, tqdm.write) for config in configs]
    for config in itertools.compress(configs, finished):
        yield run(config, say=_silent)
    todo = [config for config, done in zip(configs, finished, strict=True) if not done]
    if len(todo) < len(configs):
        tqdm.write(f"{len(configs) - len(todo)} of {len(configs)} cells were finished before, skipped")
    failures: list[tuple[str, Exception]] = []
    with tqdm(total=len(todo), unit="cell", dynamic_ncols=True) as progress:
        for group in _groups(todo):
            outcomes = run_apart(group) if shape_of(group[0]) else map(_run_here, group)
            for config in group:
                progress.set_description(title(config))
                outcome = next(outcomes)
                progress.update()
                if isinstance(outcome, Path):
                    yield outcome
                    continue
                failures.append((f"{title(config)}: {str(outcome) or type(outcome).__name__}", outcome))
                tqdm.write(f"failed: {failures[-1][0]}")
    if failures:
        said, first = failures[0]
        raise UserError(f"{len(failures)} of {len(configs)} cells failed; the first, {said}") from first


def _groups(todo: Sequence[RunConfig]) -> list[list[RunConfig]]:
    """The cells that share a process of their own, in the order of the first of each; any other cell is alone."""
    groups: dict[Any, list[RunConfig]] = {}
    for index, config in enumerate(todo):
        groups.setdefault(shape_of(config) or index, []).append(config)
    return list(groups.values())


def _run_here(config: RunConfig) -> Path | Exception:
    try:
        return run(config, say=_silent)
    except Exception as error:
        return error


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


def _group(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}={value}: must map settings to values")
    return {str(key): item for key, item in value.items()}


def _override(key: str, value: Any) -> str:
    """`key=value` as Hydra reads it on a command line."""
    if value is None or isinstance(value, bool):
        value = {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        value = f"[{','.join(map(str, value))}]"
    return f"{key}={value}"


def _silent(line: str) -> None:
    """The progress bar says enough."""

"""An experiment may be a sweep: many runs, in the `sweep:` of `conf/experiment/NAME.yaml`.

    python run.py experiment=ablation results_dir=/tmp/results
    python run.py experiment=ablation sweep=null        # one run, with the file's other settings

seq_len: 2048                         # settings of the file hold for runs of this experiment
sweep:
  settings: {num_windows: 3}          # for all runs, of others too; the command line wins
  runs:
    - method: infinigen               # one value, or
      method.alpha: [4, 5, 6]         # a list of alternatives: a run for each combination of them
      experiment: [fig11, fig12]      # the last key varies fastest; left out: this experiment
    - method: h2o                     # settings named together vary together
      method.heavy_frac method.recent_frac: [[0.25, 0.25], [0.125, 0.125]]
    - when: data_root                 # left out where sweep.data_root is null, and that is said
      data: local
      data.root: ${sweep.data_root}
    - method: ${choices:method,full}  # every file of a group but those named
      where_allowed: true             # a refused run is left out, and that is said
  data_root: null                     # a setting of the sweep's own: sweep.data_root=DIR
  experiments: [speedup, table2]      # further sweeps, whose runs follow; `data_root` replaces a
                                      # setting of that name there

A run that is named twice is one run. `sweep.share=K/N` is the K-th of N shares of any sweep,
for as many processes that know nothing of one another. The runs timed at one shape stay together,
as they share a process and its prefill.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from harness.errors import UserError
from harness.model.load import shape_mapping
from harness.run import runner
from harness.run.all_runs import counted, groups
from harness.run.compose import chosen_model, compose, load, resolved
from harness.run.words import Values, values_of
from harness.settings.config import RunConfig
from harness.settings.paths import CONF_DIR
from harness.settings.systems import OF_EVERY_METHOD

TUNED = CONF_DIR / "tuned.yaml"


def as_tuned(methods: Sequence[str], budgets: Sequence[float], model: str) -> list[list[Any]]:
    """`${as_tuned:${sweep.methods},[0.05,0.10],${model.name}}` in a sweep: [method, budget, dense
    layers] of each method at each budget, by the file `TUNED`."""
    of_model = yaml.safe_load(TUNED.read_text(encoding="utf-8")).get(model, {})
    found = []
    for method in methods:
        for budget in budgets:
            found.append([method, f"nearest:{budget}", of_model.get(method, {}).get(budget, 0)])
    return found


OmegaConf.register_new_resolver("as_tuned", as_tuned, replace=True)


@dataclass
class Plan:
    """runs: checked, none of which has begun. left_out: experiment and reason of each that `when`
    or `where_allowed` leaves out."""

    runs: list[RunConfig] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def gaps(self) -> list[str]:
        """What is left out, a line for each reason."""
        reasons: dict[str, list[str]] = {}
        for experiment, reason in self.left_out:
            reasons.setdefault(reason, []).append(experiment)
        lines = []
        for reason, experiments in reasons.items():
            lines.append(f"left out, as {reason}: {counted(experiments)}")
        return lines


def is_sweep(config: DictConfig) -> bool:
    """Whether the `sweep` of a composed experiment says that it is many runs. Raises UserError
    where it is no mapping."""
    node = config.get("sweep")
    if node is None:
        return False
    if not isinstance(node, DictConfig):
        raise UserError(f"sweep={node}: must be a group of settings, or null for one run")
    return bool(node.keys() & {"runs", "experiments"})


def read_plan(given: Iterable[str] | Values) -> Plan:
    """All runs of a sweep and of the sweeps in it, or a share of them, checked before the first of
    them begins.

    Args:
        given: the user's settings, `experiment` among them; they hold for every run, and win over
            what a sweep sets without varying it.

    Raises:
        UserError: every run is left out, a wrong setting in any run, or a setting of the user's
            that the runs vary.
    """
    plan, values = Plan(), values_of(given)
    config = compose(values)
    own = {}
    for name, value in values.items():
        if name.partition(".")[0] not in ("sweep", "experiment"):
            own[name] = value
    _read(plan, config, own, values.get("experiment", ""))
    if not plan.runs:
        raise UserError(f"nothing to run: {'; '.join(plan.gaps())}")
    if (share := config.sweep.get("share")) is not None:
        plan.runs = share_of(plan.runs, str(share))
    return plan


def share_of(runs: Sequence[RunConfig], share: str) -> list[RunConfig]:
    """The K-th of N shares of runs, `share` being "K/N": their groups dealt out in turn.

    So neighbours, which cost about the same, go to different shares. UserError where `share` is
    none.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", share)
    number, shares = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= shares:
        raise UserError(f"sweep.share={share}: must be K/N with K from 1 to N, such as 2/8")
    own_groups = groups(runs, lambda config: config)[number - 1 :: shares]
    return list(itertools.chain.from_iterable(own_groups))


def _read(plan: Plan, config: DictConfig, given: Values, experiment: str) -> None:
    """Add the runs of one file to `plan`, then those of the sweeps in it.

    given: the user's settings of runs. experiment: the name of the file; "" for a sweep of Python.
    """
    written: Any = OmegaConf.to_container(config.sweep, resolve=False)
    if "${model.shape." in str(written):
        # A model of the user's own has its shape, not the chosen entry's.
        model = chosen_model(resolved(OmegaConf.masked_copy(config, ["model"])), given)
        if model.shape is None:
            config.model.shape = shape_mapping(model)
    sweep: Any = resolved(config)["sweep"]

    # Its runs are of this experiment, if it is more than a list of runs of others.
    own = experiment if config.get("kind") is not None and experiment else "perplexity"
    settings_of_all = {"experiment": own, **(sweep.get("settings") or {})}

    combinations: list[dict[str, Any]] = []
    for entry in sweep.get("runs") or ():
        settings = dict(entry)
        needed = settings.pop("when", None)
        for combination in _combinations(settings):
            if needed is None or sweep[needed] is not None:
                combinations.append(combination)
            else:
                of_run = settings_of_all | combination
                plan.left_out.append((of_run["experiment"], f"sweep.{needed} is not given"))
    if "method" in given:
        combinations = _of_method(combinations, str(given["method"]))
    for key, value in given.items():
        values = {str(combination[key]) for combination in combinations if key in combination}
        if len(values) > 1:
            instead = "leave it out, or sweep=null for one run"
            raise UserError(f"{key}={value}: the sweep varies {key} itself; {instead}")
    for combination in combinations:
        settings = {**settings_of_all, **combination, **given}
        where_allowed = settings.pop("where_allowed", False)
        try:
            run = load(settings)
            runner.check(run)
        except UserError as error:
            if not where_allowed:
                raise
            plan.left_out.append((settings["experiment"], str(error).rstrip(".")))
            continue
        if run not in plan.runs:
            plan.runs.append(run)

    for name in sweep.get("experiments") or ():
        part = compose({**given, "experiment": name})
        of_sweep = sweep.keys() - {"settings", "runs", "experiments", "share"}
        for key in of_sweep & part.sweep.keys():
            part.sweep[key] = sweep[key]
        _read(plan, part, given, name)


def _of_method(combinations: list[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    """The combinations of one method, of a sweep that varies it. Another method takes the place of
    each that has no setting of its own, but for the number of dense layers, which every method has.

    Where each method has one number of dense layers, its own (`as_tuned`), the other method has
    that of its class.
    """
    names = {str(settings["method"]) for settings in combinations if "method" in settings}
    if len(names) < 2:
        return combinations
    if method in names:
        return [settings for settings in combinations if settings.get("method") == method]
    replaced: list[dict[str, Any]] = []
    for settings in combinations:
        if any(key.startswith("method.") and key != OF_EVERY_METHOD for key in settings):
            continue
        but_dense = {**settings, OF_EVERY_METHOD: None}
        alike = [one for one in combinations if {**one, OF_EVERY_METHOD: None} == but_dense]
        taken = {**settings, "method": method}
        if all(one == settings for one in alike):
            taken.pop(OF_EVERY_METHOD, None)
        if taken not in replaced:
            replaced.append(taken)
    return replaced


def _combinations(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Setting to value, for each combination of the alternatives of one entry."""
    axes = []
    for key, value in entry.items():
        names = key.split()
        alternatives = value if isinstance(value, list) else [value]
        axis = []
        for item in alternatives:
            values = item if len(names) > 1 else [item]
            if not isinstance(values, list) or len(values) != len(names):
                needed = f"{key} needs a list of lists of {len(names)} values"
                raise UserError(f"sweep.runs: {needed}, not {value}")
            axis.append(dict(zip(names, values, strict=True)))
        axes.append(axis)
    for chosen in itertools.product(*axes):
        yield {name: value for settings in chosen for name, value in settings.items()}

"""One run: settings, lock, measurement, record, table.

    path = run(Run.of(load(["method=h2o", "experiment=tasks"])), Resources())

A run whose record is finished is not repeated. One that fails leaves a record that says why, and is
repeated at the next start. `Resources` keep the model for the next run of the process, so that a
sweep loads it once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from harness.data.text import named_text
from harness.errors import UserError, describe, printable
from harness.files import holding, stated_memory, text_sha256
from harness.model.load import Resources
from harness.results import environment, inputs
from harness.results import record as records
from harness.results.metrics import BUDGET, DEVICE_FRAC, TOKENS_EVICTED
from harness.scoring.progress import say
from harness.settings.config import OFFLINE_TASKS, TASKS, RunConfig
from harness.settings.kinds import Outcome, find
from harness.settings.schema import is_unmet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run and where its record lies, made once. inputs: sha256 by name. Looking at it changes
    nothing."""

    config: RunConfig
    inputs: Mapping[str, str]
    path: Path

    @classmethod
    def of(cls, config: RunConfig, resources: Resources | None = None) -> Run:
        """Digest all that the run of `config` reads. Raises UserError where something is
        missing."""
        check(config)
        digests = digests_of(config)
        in_memory = None if resources is None else resources.digest_in_memory()
        if in_memory is not None:
            digests["model"] = in_memory
        run_id = records.run_id(config, digests)
        path = records.record_path(config.results_dir, config.experiment, run_id)
        return cls(config, digests, path)

    @property
    def title(self) -> str:
        """A few words for a progress line, in one line: experiment, shape, label, budget."""
        config = self.config
        words = [config.experiment, shape(config), config.label]
        if config.budget is not None and not config.label_given:
            words.append(f"at {config.budget:g}")
        return printable(" ".join(filter(None, words)))

    def is_finished(self) -> bool:
        """True if there is a finished record of it."""
        record = self.found()
        return record is not None and record["status"] == "finished"

    def why_again(self) -> str | None:
        """Why a run that was started before is to run again, in words for the user; None where it
        is new."""
        record = self.found()
        if record is None:
            settings = records.settings_of(self.path.parent.name)
            same = self.path.parents[1].glob(f"{settings}-*/record.json")
            made = records.current(map(records.read_record, same))
            if not made:
                return None
            return f"{self.title}: made by other code (record {made[0]['run_id']}), run again"
        error = f" ({record['error']})" if record["error"] else ""
        return f"{self.title}: {record['status']} before{error}, run again"

    def found(self) -> dict[str, Any] | None:
        """The record; None where there is none. Raises UserError where it is damaged."""
        return records.read_record(self.path) if self.path.is_file() else None


def require_devices(configs: Iterable[RunConfig]) -> None:
    """Raise UserError where a run's platform is not here. Asked before anything else, once for many
    runs."""
    if any(config.platform.name == "cuda" for config in configs):
        import torch

        if not torch.cuda.is_available():
            raise UserError("platform=cuda: torch finds no CUDA device here; allowed: cpu")


def run(
    todo: Run,
    resources: Resources,
    *,
    waits: bool = True,
    tell: Callable[[str], object] = print,
) -> Path:
    """Do one run, unless its record is finished. One process at a time does. Returns the record's
    path.

    waits: for another process that does this run. tell: prints a line.

    Raises:
        UserError: wrong input, an unwritable results folder, or too little memory (which setting
            to lower). The record then says `failed`, as for any other exception; after Ctrl-C it
            says `interrupted`.
        HeldError: another process does this run.
    """
    if todo.is_finished():  # asked before there is a lock, whose import takes a tenth of a second
        return _skip(todo, tell)
    if waits and todo.path.with_name(".lock").exists():
        tell(f"{todo.title}: waiting, if another process is at it")
    with holding(todo.path.parent, wait=waits):
        if todo.is_finished():  # by another process meanwhile
            return _skip(todo, tell)
        why = todo.why_again()
        if why:
            tell(why)
        _record(todo, resources)
    return todo.path


def _skip(todo: Run, tell: Callable[[str], object]) -> Path:
    relabel(todo)
    _warn_of_budgets(todo, records.read_record(todo.path)["metrics"])
    tell(f"{todo.title}: finished before, skipped; delete {todo.path.parent} to repeat")
    return todo.path


def relabel(finished: Run) -> None:
    """Write the user's label into a finished record: the same measurement under another name."""
    record = records.read_record(finished.path) if finished.config.label_given else None
    if record is not None and finished.config.label != record["config"]["label"]:
        record["config"]["label"] = finished.config.label
        records.write_record(finished.path, record)


def report(paths: Sequence[Path]) -> str:
    """Bring the tables of the records' experiments up to date. Returns these records as a table to
    print, and where their tables lie."""
    # Here, as a command's help needs no pandas.
    from harness.results import write as tables
    from harness.results.samples import full_runs

    folders = dict.fromkeys(path.parent.parent for path in paths)
    places: dict[Path, list[str]] = {}
    for folder in folders:
        table = tables.update(folder.parent.parent, folder.name)
        places.setdefault(table.parent, []).append(f"{table.stem}.csv and {table.stem}.md")
    everywhere = partial(full_runs, *dict.fromkeys(folder.parent.parent for folder in folders))
    records_of = (records.read_record(path) for path in dict.fromkeys(paths))
    lines = [tables.summary(records_of, everywhere)]
    for place, names in places.items():
        lines.append(f"results are in {place}: {', '.join(names)}")
    return "\n".join(lines)


def _record(todo: Run, resources: Resources) -> None:
    """Measure, and write the record, whichever way it ends."""
    record, config = _unfinished(todo), todo.config
    reads_weights = find(config.kind).needs_weights(config)
    # Before any work, so that an unwritable folder costs nothing.
    records.write_record(todo.path, record)
    start = time.perf_counter()
    try:
        with users_faults(config):
            outcome = measure(config, resources)
            _warn_of_budgets(todo, outcome.metrics)
            devices = [str(resources.model(config.model).model.device)] if reads_weights else []
            measured = asdict(outcome) | {"methods": records.jsonable(outcome.methods)}
            measured["environment"] = environment.describe(devices)
        seconds = time.perf_counter() - start  # loading the model included, where it was not loaded
        finished = {"status": "finished", "seconds": seconds}
        records.write_record(todo.path, record | measured | finished)
    except Exception as error:
        seconds = time.perf_counter() - start
        failure = {"status": "failed", "error": describe(error), "seconds": seconds}
        records.write_record(todo.path, record | failure)
        raise


def _warn_of_budgets(todo: Run, metrics: Mapping[str, Any]) -> None:
    """Say of which tasks or texts the method has read the whole cache, whose numbers are then the
    full cache's, or another budget than was asked for."""
    asked = todo.config.budget
    parts = {f": {name}": part for name, part in metrics.items()}
    for name, entries in ({"": metrics} | parts).items():
        where = todo.title + name
        if not isinstance(entries, Mapping):
            continue
        idle = _idle_budget(todo.config, entries)
        if idle is not None:
            log.warning("%s: %s", where, idle)
        budget = entries.get(BUDGET.name)
        if is_unmet(asked, budget):
            log.warning("%s: budget=%g was asked for, %.3f was read", where, asked, budget)


def _idle_budget(config: RunConfig, entries: Mapping[str, Any]) -> str | None:
    """How the metrics of a task or text say that a budget was never reached; None if it was."""
    codec = "" if config.codec is None else f" under codec={config.codec_name}"
    numbers = f"the budget is never reached, so these are the full cache's numbers{codec}"
    if entries.get(TOKENS_EVICTED.name) == 0:
        return f"no token was evicted: {numbers}"
    budget, on_device = entries.get(BUDGET.name), entries.get(DEVICE_FRAC.name)
    if budget is None or on_device is None:
        return None
    # Tokens that stay on the device count there alone: of such a method a budget of 0 says that all
    # do, and of a codec that all are exact.
    if not config.method.reads_all:
        if budget >= 1 or (budget == 0 and on_device >= 1):
            return f"every decode row read the whole cache: {numbers}"
    elif config.codec is not None and config.residual and on_device >= 1:
        return (
            f"residual={config.residual}: no group of tokens was coded whole, so these are the "
            "full cache's numbers or next to them"
        )
    return None


def _unfinished(todo: Run) -> dict[str, Any]:
    """The record of a run that has not ended: what a killed one leaves."""
    config = todo.config
    module = type(config.method).__module__
    file = inputs.own_file(module)
    return {
        "schema": records.SCHEMA,
        "run_id": todo.path.parent.name,
        "settings_id": records.settings_of(todo.path.parent.name),
        "experiment": config.experiment,
        "kind": config.kind,
        "table": "capacity" if config.latency.largest else find(config.kind).table,
        "status": "interrupted",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": records.plain(config),
        "settings": records.changed_settings(config),
        "method_module": module,
        "method_file": str(file) if file else None,
        "when": config.method.when,
        "inputs": dict(todo.inputs),
        "environment": environment.describe(),
        **asdict(Outcome(metrics={})),
        "seconds": None,
        "error": None,
    }


@contextmanager
def users_faults(config: RunConfig) -> Iterator[None]:
    """Raise as a `UserError` what a user can put right: too little memory, and what a method says
    of its settings. The memory of the host is as large as the settings say."""
    try:
        with stated_memory(config.platform.host_gib):
            yield
    except Exception as error:
        text = str(error)
        # "OutOfMemoryError" is CUDA's, "DefaultCPUAllocator" the CPU's.
        of_torch = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text
        if of_torch or isinstance(error, MemoryError):
            said = f"out of memory: lower {to_lower(config)}, or choose a smaller model"
            raise UserError(said) from error
        if isinstance(error, ValueError) and text.startswith("method."):
            raise UserError(text) from error  # `methods` knows no UserError
        raise


# The kinds of run: how each is measured, beside `harness.settings.kinds`, and what is asked before


def measure(config: RunConfig, resources: Resources) -> Outcome:
    """What a run measures; nothing where it only prints. resources: what the runs of this process
    share."""
    match config.kind:
        case "perplexity":
            from harness.scoring.perplexity import run_perplexity

            return run_perplexity(config, resources.model(config.model), resources.references)
        case "tasks":
            from harness.scoring.evaluation import run_tasks, run_turns

            if not resources.has_model(config.model):
                say(f"{config.experiment} {config.label}: loading model {config.model.name}")
            score = run_turns if config.prefill == "both" else run_tasks
            return score(config, resources.model(config.model))
        case "latency":
            from harness.speed.latency import run_latency

            return run_latency(config, resources.model(config.model), resources.prompts)
        case "analysis":
            from harness.paper.analysis import run_analysis, run_memory

            if config.analysis.statistic == "memory":
                return run_memory(config)
            return run_analysis(config, resources.model(config.model))
        case "generate":
            from harness.speed.generate import run_generate

            write = partial(print, end="", flush=True)
            made = run_generate(config, resources.model(config.model), write)
            print(f"\n\n{made.summary()}")
        case "contract":
            from harness.checks.contract import run_contract
            from harness.checks.trust import run_trust
            from harness.run.compose import load

            run_contract(config)
            if config.thorough:
                run_trust(config, resources.model(config.model), load)
        case "advise":
            from harness.run.advise import advise

            print(advise(config))
    return Outcome({})


def check(config: RunConfig) -> None:
    """Raise UserError for tasks that are not known, which `harness.settings.kinds` cannot see."""
    if config.kind != "tasks":
        return
    is_offline = config.data.name == "offline"
    known = OFFLINE_TASKS if is_offline else TASKS
    if set(config.tasks).issubset(known):
        return  # spares loading lm-eval
    from harness.data.tasks import check_names, plan

    check_names(config.tasks, config.task.include_path)
    if is_offline:
        plan(config)


def digests_of(config: RunConfig) -> dict[str, str]:
    """sha256 by name of every input of a run, taken before a model loads.

    Raises:
        UserError: a file or folder is missing or cannot be read, or a model cannot be fetched.
    """
    kind = find(config.kind)
    needs_weights = kind.needs_weights(config)
    reads = kind.reads if needs_weights else ()
    found = inputs.common(config, weights=needs_weights)
    if "corpus" in reads:
        found |= inputs.corpus(config.corpus, config.data)
    if "tasks" in reads:
        found |= inputs.tasks(config)
    if "prompt" in reads:
        found["prompt"] = text_sha256(named_text(config.calibration.name))
    if "calibration" in reads:
        found |= inputs.calibration(config.calibration)
    return found


def shape(config: RunConfig) -> str:
    """A word for a progress line that tells timed runs of one label apart."""
    if not find(config.kind).timed:
        return ""
    batch = "largest " if config.latency.largest else config.latency.batch_size
    return f"{batch}x{config.latency.prompt_len}"


def process(config: RunConfig) -> Hashable:
    """What runs must have in common to share a process of their own; None where a run needs none:
    only those that are timed do."""
    if not find(config.kind).timed:
        return None
    return repr(config.model), config.platform.name, shape(config)


def to_lower(config: RunConfig) -> str:
    """The settings on which a run's memory depends most, with their values."""
    words = []
    for name in find(config.kind).sizes(config):
        words.append(name if config.value(name) is None else config.typed(name))
    return " or ".join(words)

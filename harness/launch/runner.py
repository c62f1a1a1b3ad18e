"""One run: model, method, experiment, record.

    path = run(Run.of(load(["method=h2o", "experiment=tasks"])), Resources())

A run whose record is finished is not repeated. One that fails leaves a record that says why, and is repeated
at the next start. The resources keep the model for the next run of the process, so a sweep or a grid loads it once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from harness.errors import UserError, again, line_in, reason, recorded
from harness.files import HeldError, until_settled
from harness.launch import lock, tracking
from harness.records import code, environment, inputs
from harness.records import record as records
from harness.records.baseline import full_runs
from harness.resources import Resources
from harness.settings.config import RunConfig
from harness.settings.experiment import Outcome, find
from harness.tables import write as tables


@dataclass(frozen=True)
class Run:
    """A run and where its record lies, made once. inputs: sha256 by name. Looking at it changes nothing."""

    config: RunConfig
    inputs: Mapping[str, str]
    path: Path

    @classmethod
    def of(cls, config: RunConfig) -> Run:
        """Look at all that the run of `config` reads; UserError where something is missing."""
        digests = inputs.digests(config)
        run_id = records.run_id(config, digests)
        return cls(config, digests, records.record_path(config.results_dir, config.experiment, run_id))

    @property
    def title(self) -> str:
        """A few words for a progress line: experiment, shape, label, size."""
        config = self.config
        size = f"at {config.size:g}" if config.size is not None and not config.label_given else ""
        return " ".join(filter(None, [config.experiment, find(config.kind).shape(config), config.label, size]))

    def is_finished(self) -> bool:
        """Whether there is a finished record of it."""
        record, _ = self._found()
        return record is not None and record["status"] == "finished"

    def failed_since(self, time_s: float) -> str | None:
        """The error of a run of it that failed after `time_s`, seconds since the epoch."""
        record, _ = self._found()
        failed = record is not None and record["status"] == "failed" and self.path.stat().st_mtime > time_s
        return record["error"] if record is not None and failed else None

    def is_damaged(self) -> bool:
        """Whether there is a record that cannot be read."""
        return self._found()[1] is not None

    def why_again(self) -> str | None:
        """Why a run that was started before is to run again, in words for the user; None where it is new."""
        record, damage = self._found()
        if damage is not None:
            return f"{damage}; kept as {records.aside(self.path).name}, run again"
        if record is None:
            other = records.made_by_other_code(self.path)
            return f"{self.title}: made by other code (record {other}), run again" if other else None
        reason = f" ({record['error']})" if record["error"] else ""
        return f"{self.title}: {record['status']} before{reason}, run again"

    def _found(self) -> tuple[dict[str, Any] | None, UserError | None]:
        """The record, or what is wrong with it; neither where there is none."""
        try:
            return records.read_record(self.path), None
        except FileNotFoundError:
            return None, None
        except UserError as error:
            return None, error


def require_devices(configs: Iterable[RunConfig]) -> None:
    """Raise UserError where a run's platform is not here; asked before anything else, once for many runs."""
    if any(config.platform.name == "cuda" for config in configs):
        import torch

        if not torch.cuda.is_available():
            raise UserError("platform=cuda: torch finds no CUDA device here; allowed: cpu")


def run(todo: Run, resources: Resources, *, since: float | None = None) -> Path:
    """Do one run, unless its record is finished; one process at a time does. Returns the record's path.

    since: of a cell, when its grid began, in seconds since the epoch. What another process is at is not waited for
    then, what failed in one since has failed here, and nothing is printed.

    Raises:
        UserError: wrong input, an unwritable results folder, or out of memory (which setting to lower).
            The record then says `failed`, as for any other exception; after Ctrl-C it says `interrupted`.
        DefectError: a defect has ended it in another process.
        HeldError: another process is at this cell.
    """
    is_cell = since is not None
    if _is_done(todo, is_cell):
        return todo.path
    if not is_cell and lock.is_held(todo.path):
        print(f"{todo.title}: another process is at it; waiting")
    with lock.holding(todo.path, wait=not is_cell):
        if _is_done(todo, is_cell):  # meanwhile
            return todo.path
        if since is not None and (failure := todo.failed_since(since)):
            raise again("failed in another process: ", failure)
        if not is_cell and (reason := todo.why_again()):
            print(reason)
        if todo.is_damaged():
            records.set_aside(todo.path)
        _record(todo, resources)
    return todo.path


def _is_done(todo: Run, is_cell: bool) -> bool:
    """Whether its record is finished, which then has the user's label."""
    if not todo.is_finished():
        return False
    relabel(todo)
    if not is_cell:
        print(f"{todo.title}: finished before, skipped; delete {todo.path.parent} to repeat")
    return True


def fail(todo: Run, error: Exception) -> None:
    """Record why a run failed whose process died, unless another process has taken it up."""
    with suppress(HeldError), lock.holding(todo.path, wait=False):
        if not todo.is_finished():
            _end(todo, _unfinished(todo) | _failure(error))


def relabel(finished: Run) -> None:
    """Write the user's label into a finished record: the same measurement under another name."""
    record = records.read_record(finished.path) if finished.config.label_given else None
    if record is not None and finished.config.label != record["config"]["label"]:
        record["config"]["label"] = finished.config.label
        records.write_record(finished.path, record)


def show(config: RunConfig, resources: Resources) -> None:
    """Do a run that keeps no record and prints what it finds. Raises as `run`."""
    with _in_users_words(config):
        find(config.kind).run(config, resources)


def report(paths: Sequence[Path]) -> str:
    """Bring the tables of the records' experiments up to date; returns these records as a table to print."""
    folders = dict.fromkeys(path.parent.parent for path in paths)
    for folder in folders:
        update = partial(tables.update, folder.parent.parent, folder.name)
        until_settled(folder, "*/record.json", update)
    everywhere = partial(full_runs, *dict.fromkeys(folder.parent.parent for folder in folders))
    return tables.summary((records.read_record(path) for path in dict.fromkeys(paths)), everywhere)


def _record(todo: Run, resources: Resources) -> None:
    """Measure, and write the record, whichever way it ends."""
    record = _unfinished(todo)
    records.write_record(todo.path, record)  # before any work, so that an unwritable folder costs nothing
    start = time.perf_counter()
    try:
        with _in_users_words(todo.config):
            measured = _measure(todo.config, resources)
        seconds = time.perf_counter() - start  # loading the model included, where it was not loaded
        _end(todo, record | measured | {"status": "finished", "seconds": seconds})
    except Exception as error:
        _end(todo, record | _failure(error) | {"seconds": time.perf_counter() - start})
        raise


def _end(todo: Run, record: Mapping[str, Any]) -> None:
    records.write_record(todo.path, record)
    tracking.send(todo.config.tracker, todo.path)


def _failure(error: Exception) -> dict[str, Any]:
    return {"status": "failed", "error": recorded(error)}


def _unfinished(todo: Run) -> dict[str, Any]:
    """The record of a run that has not ended: what a killed one leaves."""
    config = todo.config
    module = type(config.method).__module__
    file = code.own_file(module)
    return {
        "schema": records.SCHEMA,
        "run_id": todo.path.parent.name,
        "settings_id": records.settings_of(todo.path.parent.name),
        "experiment": config.experiment,
        "kind": config.kind,
        "table": find(config.kind).table,
        "status": "interrupted",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": records.plain(config),
        "method_module": module,
        "method_file": str(file) if file else None,
        "when": config.method.when,
        "inputs": dict(todo.inputs),
        "environment": environment.describe(),
        **asdict(Outcome(metrics={})),
        "seconds": None,
        "error": None,
    }


def _measure(config: RunConfig, resources: Resources) -> dict[str, Any]:
    """The part of the record that the run itself makes."""
    experiment = find(config.kind)
    outcome = experiment.run(config, resources)
    devices: list[str] = []
    if experiment.needs_weights(config):
        model = resources.model(config.model).model
        spread = dict.fromkeys(f"cuda:{index}" for index in getattr(model, "hf_device_map", {}).values())
        devices = [*spread] or [str(model.device)]
    described = environment.describe(devices)
    return asdict(outcome) | {"methods": records.jsonable(outcome.methods), "environment": described}


@contextmanager
def _in_users_words(config: RunConfig) -> Iterator[None]:
    """Raise what a user can put right as a `UserError`."""
    try:
        yield
    except Exception as error:
        said = _as_user_error(error, config)
        if said is error:
            raise
        raise said from error


def _as_user_error(error: Exception, config: RunConfig) -> Exception:
    """What a user can put right as a `UserError`; anything else as it is."""
    said = str(error)
    torch_says = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in said  # CUDA, CPU
    if isinstance(error, MemoryError) or torch_says:
        values = find(config.kind).lower(config).items()
        lower = " or ".join(name if value is None else f"{name}={value}" for name, value in values)
        return UserError(f"out of memory: lower {lower}, or choose a smaller model")
    if isinstance(error, ValueError) and said.startswith("method."):
        return UserError(said)  # `methods` knows no UserError
    own = code.own_file(type(config.method).__module__)
    if own is not None and not isinstance(error, UserError) and (line := line_in(error, {str(own)})):
        return UserError(f"method={config.method_name}: {line}: {reason(error)}")
    return error

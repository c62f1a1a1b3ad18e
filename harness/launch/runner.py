"""One run: model, method, experiment, record.

    path = run(load(["method=h2o", "experiment=tasks"]))

A run whose record is finished is not repeated. One that fails leaves a record that says why, and is repeated
at the next start. The model stays loaded for the next run of the process, so a sweep or a grid loads it once.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError
from harness.records import environment, inputs
from harness.records import record as records
from harness.settings.run import ModelConfig, RunConfig
from harness.tables import write as tables

if TYPE_CHECKING:
    from harness.model.load import LoadedModel

_loaded: "tuple[ModelConfig, LoadedModel] | None" = None
"""The model of the last run; a cache, nothing else depends on it."""

LOWER = {
    "tasks": ("num_fewshot",),
    "perplexity": ("seq_len", "num_windows"),
    "latency": ("batch_size", "prompt_len"),
    "analysis": ("num_tokens",),
    "generate": ("max_new_tokens",),
}
"""The settings on which the memory of each kind of run depends most."""


def run(config: RunConfig, say: Callable[[str], None] = print) -> Path:
    """Do one run, unless its record is finished.

    Args:
        config: what to run.
        say: takes a line for the user.

    Returns:
        The path of the record.

    Raises:
        UserError: wrong input, an unwritable results folder, or out of memory (which setting to lower).
            The record then says `failed`, as for any other exception; after Ctrl-C it says `interrupted`.
    """
    digests = inputs.digests(config)
    path = _path(config, digests)
    if is_finished(config, say):
        say(f"{title(config)}: finished before, skipped; delete {path.parent} to repeat")
        return path
    record = _unfinished(config, digests, path.parent.name)
    records.write_record(path, record)  # before any work, so that an unwritable folder costs nothing
    start = time.perf_counter()
    try:
        with _in_users_words(config):
            measured = _measure(config)
        seconds = time.perf_counter() - start  # loading the model included, where it was not loaded
        records.write_record(path, record | measured | {"status": "finished", "seconds": seconds})
    except Exception as error:
        failure = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        records.write_record(path, record | failure | {"seconds": time.perf_counter() - start})
        raise
    return path


def generate(config: RunConfig) -> None:
    """Print text as the model of `config` writes it; no record. Raises as `run`."""
    from harness.speed.generate import run_generate

    with _in_users_words(config):
        run_generate(config, loaded_model(config.model), partial(print, end="", flush=True))


def is_finished(config: RunConfig, say: Callable[[str], None] = print) -> bool:
    """Whether there is a finished record of this run.

    A damaged record is named and moved aside. A new label is written into a finished one: the same
    measurement under another name.
    """
    path = _path(config, inputs.digests(config))
    try:
        record = records.read_record(path)
    except FileNotFoundError:
        return False
    except UserError as error:
        say(f"{error}; kept as {records.set_aside(path).name}, run again")
        return False
    if record["status"] != "finished":
        reason = f" ({record['error']})" if record["error"] else ""
        say(f"{title(config)}: {record['status']} before{reason}, run again")
        return False
    if config.label not in (None, record["config"]["label"]):
        record["config"]["label"] = config.label
        records.write_record(path, record)
    return True


def report(paths: Sequence[Path]) -> str:
    """Bring the tables of the records' experiments up to date; returns these records as a table to print."""
    for folder in dict.fromkeys(path.parent.parent for path in paths):
        update = partial(tables.update, folder.parent.parent, folder.name)
        records.until_settled(folder, "*/record.json", update)
    return tables.summary(records.read_record(path) for path in dict.fromkeys(paths))


def title(config: RunConfig) -> str:
    """A few words for a progress line."""
    size = f" at {config.target_kv_frac:g}" if config.target_kv_frac is not None else ""
    shape = f" {config.latency.batch_size}x{config.latency.prompt_len}" if config.kind == "latency" else ""
    return f"{config.experiment}{shape} {config.label or config.method_name + size}"


def _path(config: RunConfig, digests: dict[str, str]) -> Path:
    return records.record_path(config.results_dir, config.experiment, records.run_id(config, digests))


def _unfinished(config: RunConfig, digests: dict[str, str], run_id: str) -> dict[str, Any]:
    """The record of a run that has not ended: what a killed one leaves."""
    return {
        "schema": records.SCHEMA,
        "run_id": run_id,
        "experiment": config.experiment,
        "kind": config.kind,
        "status": "interrupted",
        "config": records.plain(config),
        "inputs": digests,
        "environment": environment.describe(),
        **asdict(records.Outcome(metrics={})),
        "seconds": None,
        "error": None,
    }


def _measure(config: RunConfig) -> dict[str, Any]:
    """The part of the record that the run itself makes."""
    if config.kind == "analysis" and config.analysis.statistic == "memory":
        from harness.paper.analysis.memory import run_memory

        return asdict(run_memory(config)) | {"environment": environment.describe()}
    loaded = loaded_model(config.model)
    if config.kind == "analysis":
        from harness.paper.analysis.study import run_analysis as measure
    elif config.kind == "tasks":
        from harness.accuracy.tasks import run_tasks as measure
    elif config.kind == "latency":
        from harness.speed.run import run_latency as measure
    else:
        from harness.accuracy.perplexity import run_perplexity as measure
    outcome = measure(config, loaded)
    return asdict(outcome) | {"environment": environment.describe(str(loaded.model.device))}


def loaded_model(config: ModelConfig) -> "LoadedModel":
    """The model, loaded once for all runs of the process that follow with the same settings."""
    global _loaded
    if _loaded is None or _loaded[0] != config:
        from harness.model.load import load_model

        _loaded = None  # frees the last model before the next one comes
        _loaded = (config, load_model(config))
    return _loaded[1]


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
        settings = {"latency": config.latency, "analysis": config.analysis}.get(config.kind, config)
        values = {name: getattr(settings, name) for name in LOWER[config.kind]}
        group = "analysis." if config.kind == "analysis" else ""
        lower = " or ".join(group + (name if value is None else f"{name}={value}") for name, value in values.items())
        return UserError(f"out of memory: lower {lower}, or choose a smaller model")
    if isinstance(error, ValueError) and said.startswith("method."):
        return UserError(said)  # `methods` knows no UserError
    return error

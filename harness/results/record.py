"""Records: what one run did, in `outputs/runs/<experiment>/<run_id>/record.json`.

A record is written whole or not at all. `digest` is the sha256 of all other fields, so a number
that was changed later is found. `run_id` is `<settings_id>-<code>`: a hash of the settings and
input data, and one of the code. A finished run is found by it and not repeated.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from harness.errors import UserError, reason
from harness.files import text_sha256, write_atomic
from harness.results.inputs import CODE
from harness.settings.config import CPU_DTYPE, RunConfig, prompt_of_window
from harness.settings.kinds import find, foreign_settings
from harness.settings.schema import conf_file, options

SCHEMA = 5
DIGEST = "digest"
DELETE = "delete it, and its run is done again"
LOCATIONS = {"model.path", "data.root", "corpus.path", "calibration.path", "task.include_path"}
"""Settings that say where a file lies. The sha256 of its content enters a run's identity
instead."""
IN_COLUMNS = {
    "experiment", "kind", "label", "label_given", "method_name", "model", "tasks", "budget_rule",
    "results_dir", "corpus.name", "corpus.path", "platform.name", "data.name",
    "data.root", "task.include_path", "latency.batch_size", "latency.largest", "latency.prompt_len",
    "latency.gen_len",
}  # fmt: skip
"""Settings that `changed_settings` leaves out: a table has a column for them, or they decide no
number."""
OF_SHEET = "platform.sheet."
"""The data sheet of a modelled machine, which its name stands for."""
GROUPS = ("method", "task", "latency", "sampling")
"""Groups whose settings are named without the group on the command line or in a table, but for one
that has the name of a setting of the run, such as `method.budget`."""
Record = Mapping[str, Any]
"""`harness.run.runner` makes it: who ran what (run_id, settings_id, experiment, kind, config,
inputs, environment), how it ended (status, error, seconds), and what was measured: the fields of
`Outcome`."""


# Identity


def plain(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as JSON holds it; an infinite number is written "inf"."""
    settings = asdict(config)
    del settings["label_given"]
    return jsonable(settings)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with names such as `method.alpha`."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def changed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that differ from their defaults: for a method, from its file in `conf/method`,
    or its class.

    They tell apart the table rows of one method and label. Settings with a column of their own are
    left out.
    """
    left_out = _unread(config) | IN_COLUMNS
    if config.prefill_len == prompt_of_window(config.seq_len):
        left_out |= {"prefill_len"}
    defaults = _defaults(config)
    for name, value in _file_of("method", config.method_name).items():
        defaults |= {known: value for known in (name, f"method.{name}") if known in defaults}
    defaults = flat(jsonable(defaults))
    of_run = {field.name for field in fields(config)}
    found = {}
    for name, value in flat(plain(config)).items():
        group, _, rest = name.partition(".")
        if {name, group} & left_out or name.startswith(OF_SHEET) or value == defaults.get(name):
            continue
        shown = name.replace("own_codec.", "codec_settings.")
        if group in GROUPS and rest not in of_run:  # else a setting of the run has this name
            shown = rest
        found[shown] = value
    dtype = config.model.dtype
    if dtype != CPU_DTYPE and dtype != _file_of("model", config.model.name).get("dtype"):
        found["model.dtype"] = dtype
    if config.budget_is_measured:
        found["budget met on"] = "calibration text"
    return found


def _file_of(group: str, name: str) -> dict[str, Any]:
    """The settings in a shipped file of a group of `conf`; {} where there is no such file."""
    return conf_file(group, name) if name in options(group) else {}


def _defaults(group: Any, prefix: str = "") -> dict[str, Any]:
    """Those of the dataclasses, with names as of `flat`."""
    found: dict[str, Any] = {}
    for field in fields(group):
        name, value = f"{prefix}{field.name}", getattr(group, field.name)
        if is_dataclass(value):
            found |= _defaults(value, f"{name}.")
        else:
            found[name] = None if field.default is MISSING else field.default
    return found


def _unread(config: RunConfig) -> set[str]:
    """Settings that play no part in a run."""
    return foreign_settings(config.kind) | find(config.kind).unread(config)


def in_words(settings: Mapping[str, Any]) -> str:
    """Settings as tables show them, `a=[1, 2], b=3`."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def settings_id(config: RunConfig, inputs: Mapping[str, str]) -> str:
    """Sixteen hex digits of the settings that decide numbers and of the data, whatever the code and
    where files lie. inputs: sha256 of every input by name."""
    left_out, deciding = _unread(config) | LOCATIONS, {}
    for name, value in flat(plain(config)).items():
        if not {name, name.partition(".")[0]} & left_out:
            deciding[name] = value
    read = {name: digest for name, digest in inputs.items() if not name.startswith(CODE)}
    return _digest_of({"config": deciding, "inputs": read})[:16]


def run_id(config: RunConfig, inputs: Mapping[str, str]) -> str:
    """The `settings_id`, and eight hex digits of the code among the inputs."""
    made_by = {name: digest for name, digest in inputs.items() if name.startswith(CODE)}
    return f"{settings_id(config, inputs)}-{_digest_of(made_by)[:8]}"


def _digest_of(content: Mapping[str, Any]) -> str:
    return text_sha256(json.dumps(content, sort_keys=True))


def settings_of(run: str) -> str:
    """The `settings_id` in a `run_id`."""
    return run.partition("-")[0]


def record_path(results_dir: str | Path, experiment: str, run: str) -> Path:
    """Path of the record of run `run`."""
    return Path(results_dir) / "runs" / experiment / run / "record.json"


# Files


def read_record(path: Path) -> dict[str, Any]:
    """The record at `path`.

    Raises:
        OSError: there is none, or it cannot be read.
        UserError: it is damaged, changed since it was written, or of another version; the message
        names the file.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: damaged record ({reason(error)}); {DELETE}") from error
    if record.get("schema") != SCHEMA:
        raise UserError(f"{path}: no record of this version (schema {SCHEMA}); {DELETE}")
    if record.get(DIGEST) != _digest(record) or record["run_id"] != path.parent.name:
        raise UserError(f"{path}: damaged record (changed since it was written); {DELETE}")
    return record


def read_records(results_dir: str | Path, experiment: str) -> list[dict[str, Any]]:
    """All records of an experiment, by run_id."""
    folder = Path(results_dir) / "runs" / experiment
    return [read_record(path) for path in sorted(folder.glob("*/record.json"))]


def read_all(results_dir: str | Path) -> Iterator[dict[str, Any]]:
    """Every record of a results folder, by experiment and run."""
    for folder in sorted(Path(results_dir).glob("runs/*")):
        yield from read_records(results_dir, folder.name)


def write_record(path: Path, record: Record) -> None:
    """Write a record atomically, with its digest.

    Raises:
        UserError: the folder cannot be written, or a number is not finite.
    """
    try:
        content = json.loads(json.dumps(record, allow_nan=False))  # as it will be read
    except ValueError as error:
        raise UserError("a metric is NaN or infinite, by the model or the method") from error
    write_atomic(path, json.dumps(content | {DIGEST: _digest(content)}, indent=1) + "\n")


def _digest(record: Record) -> str:
    return _digest_of({name: value for name, value in record.items() if name != DIGEST})


def current(records: Iterable[Record]) -> list[Record]:
    """The newest finished record of each run of settings and data, whatever code made it."""
    newest: dict[tuple[str, str], Record] = {}
    for record in records:
        key = record["experiment"], record["settings_id"]
        if record["status"] != "finished":
            continue
        if key not in newest or record["started"] > newest[key]["started"]:
            newest[key] = record
    return list(newest.values())


def jsonable(value: Any) -> Any:
    """Mappings and lists as JSON holds them; an infinite setting is written "inf"."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return value

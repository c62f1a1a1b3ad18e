"""Records: what one run did, kept for good in `results/runs/<experiment>/<run_id>/record.json`.

A record is written whole or not at all. Its folder's name is a hash of all that decides the numbers, so a finished run
is found again and not repeated. Schema 3:

    {"schema", "run_id", "settings_id", "experiment", "kind", "table": "accuracy" | "latency" | "analysis",
     "status": "finished" | "failed" | "interrupted", "started", "config", "method_module", "method_file", "when",
     "inputs": {name: sha256}, "environment", "metrics", "samples", "methods", "chunks", "seconds", "error", "digest"}

`method_file` is where a user's own method lay, None of a shipped one. `digest` is of all the rest, so that a number
that was changed later is found; records of schema 2, which are read as well, have none.

`run_id` is `<settings_id>-<code>`: what was asked of which data, and the digest of the code that answered.
"""

import itertools
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.errors import UserError, reason
from harness.files import text_sha256, write_atomic
from harness.records import code
from harness.records.form import flaw
from harness.settings.config import RunConfig
from harness.settings.experiment import find, foreign_settings

SCHEMA, WITHOUT_DIGEST = 3, 2
DIGEST = "digest"
IDENTITY = 2
"""Raised where the same settings and data are to make another run."""
LOCATIONS = {
    "model": ("path",), "data": ("root",), "corpus": ("path",), "calibration": ("path",), "task": ("include_path",),
}  # fmt: skip
"""Where things lie; the sha256 of what lies there enters a run's identity instead."""
CODE = "code:"
"""How the names of inputs begin that are code."""

log = logging.getLogger(__name__)

Record = Mapping[str, Any]


def plain(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as JSON can hold it; an infinite number is written "inf"."""
    return jsonable({name: value for name, value in asdict(config).items() if name != "label_given"})


def deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a `plain` configuration that decides numbers: without what its kind of run does not heed, and where
    inputs lie."""
    foreign = foreign_settings(config["kind"])
    settings = {name: value for name, value in config.items() if name not in foreign}
    for group, names in LOCATIONS.items():
        if group in settings:
            settings[group] = {name: value for name, value in settings[group].items() if name not in names}
    return settings


def flat(settings: Mapping[str, Any], separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """What nested mappings hold, by one name: `method.alpha`."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        found |= flat(value, separator, name + separator) if isinstance(value, Mapping) else {name: value}
    return found


def settings_id(config: RunConfig, inputs: Mapping[str, str]) -> str:
    """Sixteen hex digits, the same for the same settings and contents of the input files, whatever the code.

    config: its label, where the results go and where inputs lie play no part, nor what its kind of run does not heed.
    inputs: sha256 of every input by name.
    """
    settings = deciding(plain(config))
    read = {name: digest for name, digest in inputs.items() if not name.startswith(CODE)}
    return text_sha256(json.dumps({"schema": IDENTITY, "config": settings, "inputs": read}, sort_keys=True))[:16]


def run_id(config: RunConfig, inputs: Mapping[str, str]) -> str:
    """What names a run: its `settings_id`, and eight hex digits of the code among its inputs."""
    return f"{settings_id(config, inputs)}-{_code_id(inputs)}"


def settings_of(run: str) -> str:
    """The `settings_id` in a `run_id`."""
    return run.partition("-")[0]


def _code_id(inputs: Mapping[str, str]) -> str:
    made_by = {name: digest for name, digest in inputs.items() if name.startswith(CODE)}
    return text_sha256(json.dumps(made_by, sort_keys=True))[:8]


def record_path(results_dir: str | Path, experiment: str, run: str) -> Path:
    """Where the record of run `run` lies."""
    return Path(results_dir) / "runs" / experiment / run / "record.json"


def read_record(path: Path) -> dict[str, Any]:
    """The record at `path`.

    Raises:
        FileNotFoundError: there is none.
        UserError: it is damaged, changed since it was written, or of another schema; the message names the file.
    """
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        damage = _damage(record, path.parent.name)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged record ({reason(error)})") from error
    if damage is not None:
        raise UserError(f"{path}: damaged record ({damage})")
    return dict(record)


def _damage(record: Any, run: str) -> str | None:
    """What is wrong with what should be the record of `run`, in words; ValueError where a number is not finite."""
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema not in (SCHEMA, WITHOUT_DIGEST):
        return f"not of schema {SCHEMA}"
    digest = _digest(record)
    if record.get(DIGEST, digest if schema == WITHOUT_DIGEST else None) != digest:
        return "changed since it was written"
    if (found := flaw(record)) is not None:
        return found
    return None if record["run_id"] == run else f"of another run, {record['run_id']}"


def _digest(record: Record) -> str:
    """sha256 of all of a record but its digest, as JSON of sorted names without a number that is not finite."""
    content = {name: value for name, value in record.items() if name != DIGEST}
    return text_sha256(json.dumps(content, sort_keys=True, allow_nan=False))


def read_records(results_dir: str | Path, experiment: str) -> list[dict[str, Any]]:
    """All records of an experiment, by run_id; a damaged one is named in a warning and left out."""
    return list(_readable((Path(results_dir) / "runs" / experiment).glob("*/record.json")))


def read_all(results_dir: str | Path) -> Iterator[dict[str, Any]]:
    """Every readable record of a results folder, by experiment and run."""
    for folder in sorted((Path(results_dir) / "runs").glob("*")):
        yield from read_records(results_dir, folder.name)


def made_by_other_code(path: Path) -> str | None:
    """The run_id of a finished record of the same settings and data as the run whose record `path` is to be.

    A reader of `current` records is shown only one of the two.
    """
    others = sorted(set(path.parents[1].glob(f"{settings_of(path.parent.name)}-*/record.json")) - {path})
    finished = [record for record in _readable(others) if record["status"] == "finished"]
    return max(finished, key=_started)["run_id"] if finished else None


def current(records: Iterable[Record]) -> list[Record]:
    """Finished records, one for each run of settings and data: the one made by the code that is here, else the newest.

    In the order in which they came.
    """
    best: dict[tuple[str, str], Record] = {}
    for record in (record for record in records if record["status"] == "finished"):
        key = (record["experiment"], record["settings_id"])
        if key not in best or _rank(record) > _rank(best[key]):
            best[key] = record
    return list(best.values())


def _rank(record: Record) -> tuple[bool, str]:
    return _is_of_this_code(record), _started(record)


def _started(record: Record) -> str:
    return str(record.get("started") or "")


def _is_of_this_code(record: Record) -> bool:
    """Whether the sources here are those that made a record; False where its method or kind is no more."""
    try:
        here = code.digests(record["method_module"], find(record["kind"]).code)
        return here.items() <= record["inputs"].items()
    except (UserError, OSError, KeyError):
        return False


def aside(path: Path) -> Path:
    """Where a damaged record is kept: the first `record.damaged-N.json` beside it that is free."""
    places = (path.with_name(f"record.damaged-{number}.json") for number in itertools.count(1))
    return next(place for place in places if not place.exists())


def set_aside(path: Path) -> Path:
    """Move a damaged record to `aside(path)`, overwriting nothing, whoever else does so; returns the new path."""
    while True:
        place = aside(path)
        try:
            place.open("x").close()
        except FileExistsError:
            continue  # another process has just taken it
        try:
            return path.replace(place)
        except FileNotFoundError:  # another process has just moved the record
            place.unlink()
            raise


def write_record(path: Path, record: Record) -> None:
    """Write a record atomically, with its digest.

    Raises:
        UserError: the folder cannot be written.
        ValueError: a number is not finite, so it is no measurement.
    """
    content = json.loads(json.dumps(record, allow_nan=False))  # as it will be read
    write_atomic(path, json.dumps(content | {DIGEST: _digest(content)}, indent=1) + "\n")


def _readable(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in sorted(paths):
        try:
            yield read_record(path)
        except (UserError, OSError) as error:
            log.warning("%s; left out of tables and figures", error)


def jsonable(value: Any) -> Any:
    """Mappings and lists as JSON can hold them; an infinite setting is written "inf"."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value

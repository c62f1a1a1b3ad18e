"""Records: what one run did, in `outputs/runs/<experiment>/<run_id>/record.json`.

A record is written whole or not at all. `_Record` below is its schema. `digest` is the sha256 of
all other fields, so a number that was changed later is found. `run_id` is `<settings_id>-<code>`: a
hash of the settings and input data, and one of the code. A finished run is found by it and not
repeated.
"""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from harness.errors import UserError, reason
from harness.files import free_path, text_sha256, write_atomic
from harness.results.inputs import CODE, code
from harness.settings.config import CPU_DTYPE, RunConfig, prompt_of_window
from harness.settings.kinds import find, foreign_settings
from harness.settings.schema import CONF_DIR

SCHEMA = 5
DIGEST = "digest"
LOCATIONS = {
    "model": "path",
    "data": "root",
    "corpus": "path",
    "calibration": "path",
    "task": "include_path",
}
"""By group, the setting that says where a file lies. The sha256 of its content enters a run's
identity instead."""
IN_COLUMNS = {
    "experiment", "kind", "label", "label_given", "method_name", "model", "tasks", "budget_rule",
    "results_dir", "corpus.name", "corpus.path", "platform.name", "data.name",
    "data.root", "task.include_path", "latency.batch_size", "latency.prompt_len", "latency.gen_len",
}  # fmt: skip
"""Settings that `changed_settings` leaves out: a table has a column for them, or they decide no
number."""
OF_SHEET = "platform.sheet."
"""The data sheet of a modelled machine, which its name stands for."""
GROUPS = ("method", "task", "latency", "sampling")
"""Groups whose settings are named without the group on the command line or in a table, but for one
that has the name of a setting of the run, such as `method.budget`."""
HOST_DECIDES = "capacity"
"""The kind of run of which `platform.host_gib` decides numbers: the largest batch. Elsewhere it
decides whether a run is refused."""
BUDGET_MET_ON = "budget met on"
"""Beside the settings of a run whose budget was met by a search: on what."""
BAD_VALUE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What code raises when a record holds values that no run writes."""
log = logging.getLogger(__name__)

Record = Mapping[str, Any]


class _Part(BaseModel):
    """Part of a record. Further fields are allowed, other types are not."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class _Model(_Part):
    name: str


class _Config(_Part):
    kind: str
    label: str
    method_name: str
    method: dict[str, Any]
    model: _Model
    codec: str | None
    budget: float | None


class _Record(_Part):
    """The schema of a record.

    settings: those that differ from their defaults. when: when the method selects. samples: raw
    values behind the metrics. methods: the method's settings as it ran, by task. chunks: metrics by
    range of tokens.
    """

    run_id: str
    settings_id: str
    experiment: str
    kind: str
    table: Literal["accuracy", "latency", "analysis", "capacity"]
    status: Literal["finished", "failed", "interrupted"]
    started: str
    config: _Config
    settings: dict[str, Any]
    method_module: str
    method_file: str | None
    when: str
    inputs: dict[str, str]
    environment: dict[str, Any]
    metrics: dict[str, Any]
    samples: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    chunks: list[dict[str, Any]]
    seconds: float | None
    error: str | None


# Identity


def plain(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as JSON holds it; an infinite number is written "inf"."""
    settings = asdict(config)
    del settings["label_given"]
    return jsonable(settings)


def deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a `plain` configuration that decide numbers, without paths.

    They are those that its kind of run depends on.
    """
    foreign = foreign_settings(config["kind"])
    found = without_paths({name: value for name, value in config.items() if name not in foreign})
    if "platform" in found and config["kind"] != HOST_DECIDES:
        found["platform"] = {**found["platform"]}
        found["platform"].pop("host_gib", None)
    return found


def without_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without `LOCATIONS`."""
    found = dict(settings)
    for group, location in LOCATIONS.items():
        if group in found:
            found[group] = dict(found[group])
            found[group].pop(location, None)
    return found


def flat(settings: Mapping[str, Any], separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with names such as `method.alpha`."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, separator, name + separator)
        else:
            found[name] = value
    return found


def changed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that differ from their defaults: for a method, from its file in `conf/method`,
    or its class.

    They tell apart the table rows of one method and label. Settings with a column of their own are
    left out.
    """
    left_out = foreign_settings(config.kind) | IN_COLUMNS
    defaults = _defaults(config)
    of_run = {field.name for field in fields(config)}
    found = {}
    for name, value in flat(plain(config)).items():
        group, _, rest = name.partition(".")
        if name in left_out or group in left_out or value == defaults.get(name):
            continue
        if name.startswith(OF_SHEET):
            continue
        if name == "prefill_len" and value == prompt_of_window(config.seq_len):
            continue
        if name == "platform.host_gib" and config.kind != HOST_DECIDES:
            continue
        shown = name.replace("own_codec.", "codec_settings.")
        if group in GROUPS and rest not in of_run:  # else a setting of the run has this name
            shown = rest
        found[shown] = value
    dtype = config.model.dtype
    if dtype != CPU_DTYPE and dtype != _file_of("model", config.model.name).get("dtype"):
        found["model.dtype"] = dtype
    if config.budget_is_measured:
        found[BUDGET_MET_ON] = "calibration text"
    return found


def _file_of(group: str, name: str) -> dict[str, Any]:
    """The settings in a shipped file of a group of `conf`; {} where there is no such file."""
    path = CONF_DIR / group / f"{name}.yaml"
    if not path.is_file():
        return {}
    settings: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return settings


def in_words(settings: Mapping[str, Any]) -> str:
    """Settings as tables show them, `a=[1, 2], b=3`."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _defaults(config: RunConfig) -> dict[str, Any]:
    """By flat name: of the dataclasses, and for a shipped method of its file in `conf/method`."""
    found = _defaults_of(config)
    for name in found:
        group = getattr(config, name)
        if is_dataclass(group):
            found[name] = _defaults_of(group)
    for name, value in _file_of("method", config.method_name).items():
        if name in found:
            found[name] = value
        if name in found["method"]:
            found["method"][name] = value
    return flat(jsonable(found))


def _defaults_of(group: Any) -> dict[str, Any]:
    found = {}
    for field in fields(group):
        found[field.name] = None if field.default is MISSING else field.default
    return found


def settings_id(config: RunConfig, inputs: Mapping[str, str]) -> str:
    """Sixteen hex digits of the settings that decide numbers and of the data, whatever the code.

    inputs: sha256 of every input by name.
    """
    read = {name: digest for name, digest in inputs.items() if not name.startswith(CODE)}
    return _digest_of({"config": deciding(plain(config)), "inputs": read})[:16]


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


# Reading


def read_record(path: Path) -> dict[str, Any]:
    """The record at `path`.

    Raises:
        FileNotFoundError: there is none.
        UserError: it is damaged, changed since it was written, or of another schema; the message
        names the file.
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
    """In words, the first thing wrong with a record; ValueError where a number is not finite."""
    if not isinstance(record, dict):
        return "no record"
    if record.get("schema") != SCHEMA:
        return f"not of schema {SCHEMA}: another version wrote it; delete it and run again"
    if record.get(DIGEST) != _digest(record):
        return "changed since it was written"
    try:
        _Record.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return None if record["run_id"] == run else f"of another run, {record['run_id']}"


def _digest(record: Record) -> str:
    content = {name: value for name, value in record.items() if name != DIGEST}
    return text_sha256(json.dumps(content, sort_keys=True, allow_nan=False))


def read_records(results_dir: str | Path, experiment: str) -> list[dict[str, Any]]:
    """All records of an experiment, by run_id; a damaged one is named in a warning and left out."""
    return list(_readable((Path(results_dir) / "runs" / experiment).glob("*/record.json")))


def read_all(results_dir: str | Path) -> Iterator[dict[str, Any]]:
    """Every readable record of a results folder, by experiment and run."""
    for folder in sorted((Path(results_dir) / "runs").glob("*")):
        yield from read_records(results_dir, folder.name)


def _readable(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in sorted(paths):
        try:
            yield read_record(path)
        except (UserError, OSError) as error:
            log.warning("%s; left out of tables and figures", error)


@contextmanager
def damage_told(record: Record, lost: str) -> Iterator[None]:
    """Within it, values that no run writes end the block with a warning that names the record.

    lost: what becomes of it, in words.
    """
    try:
        yield
    except BAD_VALUE_ERRORS as error:
        path = f"{record['experiment']}/{record['run_id']}/record.json"
        log.warning("%s: damaged record (%r); %s", path, error, lost)


def made_by_other_code(path: Path) -> str | None:
    """The run_id of the newest finished record of the run at `path`, made by other code."""
    same_settings = path.parents[1].glob(f"{settings_of(path.parent.name)}-*/record.json")
    others = _readable(set(same_settings) - {path})
    finished = [record for record in others if record["status"] == "finished"]
    newest = max(finished, key=lambda record: record["started"], default=None)
    return None if newest is None else newest["run_id"]


def current(records: Iterable[Record]) -> list[Record]:
    """Finished records, in order, one for each run of settings and data.

    The one made by the present code counts, else the newest.
    """
    best: dict[tuple[str, str], Record] = {}
    for record in records:
        if record["status"] == "finished":
            key = (record["experiment"], record["settings_id"])
            if key not in best or _rank(record) > _rank(best[key]):
                best[key] = record
    return list(best.values())


def _rank(record: Record) -> tuple[bool, str]:
    """Sort key of records of one run: whether the present code made it, and when."""
    try:
        here = code(record["method_module"], find(record["kind"]).code)
    except (UserError, OSError):  # its method or kind no longer exists
        return False, record["started"]
    return here.items() <= record["inputs"].items(), record["started"]


# Writing


def aside(path: Path) -> Path:
    """Path for keeping a damaged record: the first free `record.damaged-N.json` beside it."""
    return free_path(path.with_name("record.damaged-*.json"))


def write_record(path: Path, record: Record) -> None:
    """Write a record atomically, with its digest.

    Raises:
        UserError: the folder cannot be written, or a number is not finite; the message names the
        metric.
    """
    require_finite(record)
    content = json.loads(json.dumps(record))  # as it will be read
    write_atomic(path, json.dumps(content | {DIGEST: _digest(content)}, indent=1) + "\n")


def require_finite(value: Any, name: str = "") -> None:
    """Raise UserError, naming the metric, for a NaN or infinite number in mappings and lists."""
    if isinstance(value, float) and not math.isfinite(value):
        metric = name.removeprefix("metrics/")
        raise UserError(
            f"{metric}={value}: is not finite; the model or the method computes NaN or infinite "
            "numbers"
        )
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            require_finite(item, f"{name}/{key}".removeprefix("/"))


def jsonable(value: Any) -> Any:
    """Mappings and lists as JSON holds them; an infinite setting is written "inf"."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return value

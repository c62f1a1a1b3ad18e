"""Records: what one run did, kept for good in `results/runs/<experiment>/<run_id>/record.json`.

A record is written whole or not at all (a temporary file, flushed to the disk, then renamed). Its folder's
name is a hash of all that decides the numbers, so a finished run is found again and not repeated. Schema 1:

    {"schema", "run_id", "experiment", "kind", "status": "finished" | "failed" | "interrupted", "config",
     "inputs": {name: sha256}, "environment", "metrics", "samples", "chunks", "seconds", "error"}
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from harness.errors import UserError
from harness.settings.run import RunConfig

T = TypeVar("T")

SCHEMA = 1
STATUSES = ("finished", "failed", "interrupted")
LOCATIONS = {"model": ("path",), "data": ("root",), "corpus": ("path",), "calibration": ("path",)}
"""Where things lie; the sha256 of what lies there enters a run's identity instead."""
DISPLAY = ("label",)
"""Settings that change how a run is shown, not what it measures."""
ONLY_OF_KIND = {
    "tasks": ("tasks", "num_samples", "num_fewshot", "prefill", "scoring"),
    "perplexity": ("corpus", "seq_len", "prefill_len", "num_windows"),
    "latency": ("platform", "placement", "reuse", "latency"),
    "generate": ("prompt", "max_new_tokens"),
    "analysis": ("analysis", "corpus"),
}
"""Settings that change the numbers of these kinds of run only."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a run measured.

    metrics: by task or corpus: acc, perplexity, kl_nats, kv_frac, ...; an absent measurement is None.
    samples: raw values behind the metrics, by task.
    chunks: perplexity by chunk: {"chunk", "perplexity", "perplexity_stderr", "num_tokens"}.
    """

    metrics: dict[str, Any]
    samples: dict[str, Any] = field(default_factory=dict)
    chunks: list[dict[str, Any]] = field(default_factory=list)


def plain(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as JSON can hold it; an infinite number is written "inf"."""
    return _jsonable(asdict(config))


def run_id(config: RunConfig, inputs: Mapping[str, str]) -> str:
    """Sixteen hex digits that name a run: the same for the same settings and contents of the input files.

    Args:
        config: its label, where the results go and where inputs lie play no part.
        inputs: sha256 of every input by name.
    """
    settings = plain(config)
    for name in ("results_dir", *DISPLAY):
        settings.pop(name)
    for name in foreign_settings(config.kind):
        settings.pop(name)
    for group, names in LOCATIONS.items():
        for name in names if group in settings else ():
            settings[group].pop(name)
    canonical = json.dumps({"schema": SCHEMA, "config": settings, "inputs": dict(inputs)}, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def foreign_settings(kind: str) -> set[str]:
    """Settings that play no part in a run of this kind."""
    return {name for names in ONLY_OF_KIND.values() for name in names}.difference(ONLY_OF_KIND[kind])


def record_path(results_dir: str | Path, experiment: str, run: str) -> Path:
    """Where the record of run `run` lies."""
    return Path(results_dir) / "runs" / experiment / run / "record.json"


def read_record(path: Path) -> dict[str, Any]:
    """The record at `path`.

    Raises:
        FileNotFoundError: there is none.
        UserError: it is damaged or of another schema; the message names the file.
    """
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: damaged record ({error})") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA or record.get("status") not in STATUSES:
        raise UserError(f"{path}: damaged record (not of schema {SCHEMA})")
    if record.get("run_id") != path.parent.name:
        raise UserError(f"{path}: damaged record (of another run, {record.get('run_id')})")
    return record


def read_records(results_dir: str | Path, experiment: str) -> list[dict[str, Any]]:
    """All records of an experiment, by run_id; a damaged one is named in a warning and left out."""
    return list(_readable(Path(results_dir) / "runs" / experiment))


def set_aside(path: Path) -> Path:
    """Move a damaged record to `record.damaged-N.json` beside it; nothing is lost. Returns the new path."""
    taken = len(list(path.parent.glob("record.damaged-*.json")))
    return path.rename(path.with_name(f"record.damaged-{taken + 1}.json"))


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record atomically.

    Raises:
        UserError: the folder cannot be written.
        ValueError: a number is not finite, so it is no measurement.
    """
    write_atomic(path, json.dumps(record, allow_nan=False, indent=1) + "\n")


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: a reader, or a run cut short, sees the old file or the new one.

    Raises:
        UserError: the folder cannot be written.
    """
    scratch = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(scratch, 0o644)  # mkstemp makes it readable by its owner only
        os.replace(scratch, path)
    except OSError as error:
        raise UserError(f"results_dir: {path} cannot be written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(scratch)  # there only where something failed


def until_settled(folder: Path, pattern: str, derive: Callable[[], T]) -> T:
    """Do `derive` until no file matching `pattern` under `folder`, all that it reads, has changed meanwhile.

    Where several processes write the same table or figure, the last to write then has read what all of them left.
    """
    while True:
        before = _stamps(folder, pattern)
        derived = derive()
        if _stamps(folder, pattern) == before:
            return derived


def _stamps(folder: Path, pattern: str) -> dict[Path, tuple[int, int]]:
    """Inode and time of change: every atomic write makes a new inode."""
    stats = ((path, path.stat()) for path in folder.glob(pattern))
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats}


def _readable(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*/record.json")):
        try:
            yield read_record(path)
        except UserError as error:
            log.warning("%s; left out of tables and figures", error)


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value

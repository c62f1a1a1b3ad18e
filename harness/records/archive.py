"""A results folder as one file to share: a zip archive that says of every member, and of every input, its sha256.

    runs/<experiment>/<run_id>/record.json   finished and failed runs
    tables/*.csv, tables/*.md, figures/*.png, *.md, findings.yaml
    environment.json                         {"export": here and now, "runs": [{"environment", "runs"}]}
    MANIFEST.json                            {"schema", "members": {name: {"sha256", "size"}},
                                              "inputs": {name: {sha256: [experiment/run_id]}}}

`inputs` holds the digests of the code as well, under the names that records give them. What is read comes from
strangers: `harness.records.unpack` takes it as data alone, and refuses it where a member is not as the manifest says.
Schema 1.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from harness.errors import UserError
from harness.files import content_sha256, replacing
from harness.records import environment
from harness.records.record import read_record

SCHEMA = 1
MANIFEST, ENVIRONMENT = "MANIFEST.json", "environment.json"
RECORDS = "runs/*/*/record.json"
DERIVED = ("tables/*.csv", "tables/*.md", "figures/*.png", "*.md", "findings.yaml")
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of every member, the earliest that a zip archive knows."""
log = logging.getLogger(__name__)

Record = Mapping[str, Any]
Inputs = dict[str, dict[str, list[str]]]
"""Runs by the sha256 of an input, by its name."""


class Packed(NamedTuple):
    """What was written. left_out: records of interrupted runs, and damaged ones."""

    path: Path
    sha256: str
    num_records: int
    num_files: int
    left_out: int


def pack(results_dir: Path, target: Path) -> Packed:
    """Write a results folder into the archive `target`, in one step; one file at a time is in memory.

    The same results give the same bytes, exported by the same environment with the same zlib.

    Raises:
        UserError: there is nothing to share, or `target` cannot be written.
    """
    paths = sorted(results_dir.glob(RECORDS))
    derived = sorted(path for pattern in DERIVED for path in results_dir.glob(pattern) if path.is_file())
    records: list[Record] = []
    try:
        with replacing(target) as scratch, zipfile.ZipFile(scratch, "w") as archive:
            writer = _Writer(results_dir, archive)
            for path in tqdm(paths, unit="record", delay=1, leave=False, dynamic_ncols=True):
                record = _shared(path)
                if record is not None:
                    writer.copy(path)
                    records.append(origin(record))
            for path in derived:
                writer.copy(path)
            if not writer.members:
                raise UserError(f"results_dir={results_dir}: nothing to share, neither finished run nor table")
            writer.add(ENVIRONMENT, as_json({"export": environment.describe(), "runs": _environments(records)}))
            writer.add(MANIFEST, as_json({"schema": SCHEMA, "members": writer.members, "inputs": inputs_of(records)}))
    except OSError as error:
        raise UserError(f"export={target}: {error.filename or target}: {error.strerror or error}") from error
    return Packed(target, content_sha256(target), len(records), len(derived), len(paths) - len(records))


def inputs_of(records: Iterable[Record]) -> Inputs:
    """Which runs read what: every input that the records name, their code included."""
    found: Inputs = {}
    for record in sorted(records, key=_run):
        for name, sha256 in record["inputs"].items():
            found.setdefault(name, {}).setdefault(sha256, []).append(_run(record))
    return found


def origin(record: Record) -> Record:
    """Of a record which run it is and what it came from, without what it measured."""
    return {name: record[name] for name in ("experiment", "run_id", "inputs", "environment")}


@dataclass(frozen=True)
class _Writer:
    """Adds members to an archive, with no trace of when and by whom, and keeps their digests."""

    results_dir: Path
    archive: zipfile.ZipFile
    members: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, data: bytes) -> None:
        info = zipfile.ZipInfo(name, EPOCH)
        info.compress_type = zipfile.ZIP_DEFLATED
        info.create_system, info.external_attr = 3, 0o644 << 16  # a plain file of Unix, wherever it is written
        self.archive.writestr(info, data)
        self.members[name] = digest(data)

    def copy(self, path: Path) -> None:
        self.add(path.relative_to(self.results_dir).as_posix(), path.read_bytes())


def _shared(path: Path) -> Record | None:
    """The record at `path`; None where it is damaged, which is said, or its run has not ended."""
    try:
        record = read_record(path)
    except UserError as error:
        log.warning("%s; left out of the archive", error)
        return None
    return None if record["status"] == "interrupted" else record


def _environments(records: Iterable[Record]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for record in sorted(records, key=_run):
        where = record["environment"]
        own = found.setdefault(json.dumps(where, sort_keys=True), {"environment": where, "runs": []})
        own["runs"].append(_run(record))
    return list(found.values())


def _run(record: Record) -> str:
    return f"{record['experiment']}/{record['run_id']}"


def digest(data: bytes) -> dict[str, Any]:
    """What the manifest says of a member."""
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def as_json(value: Any) -> bytes:
    """A member of JSON: the same value gives the same bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()

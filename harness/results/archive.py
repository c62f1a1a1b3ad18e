"""A results folder as one file to share: a zip archive with the sha256 of its members.

    runs/<experiment>/<run_id>/record.json   finished and failed runs, with their inputs' sha256
    tables/*.csv, tables/*.md, figures/*.png, figures/*.svg, *.md, findings.yaml
    MANIFEST.json                            {"schema", "sha256": {name: hex digits}}

    with opened(Path("results.zip")) as folder:
        ...    # as in a results folder

An archive may come from a stranger. `opened` trusts no name, link or size in it, and refuses a
member that differs from the manifest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISLNK

from tqdm import tqdm

from harness.errors import UserError
from harness.files import content_sha256, replacing
from harness.results.record import BAD_VALUE_ERRORS, read_record
from harness.settings.paths import shipped_beside
from harness.settings.schema import path_text

SCHEMA = 2
MANIFEST = "MANIFEST.json"
RECORDS = "runs/*/*/record.json"
DERIVED = ("tables/*.csv", "tables/*.md", "figures/*.png", "figures/*.svg", "*.md", "findings.yaml")
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of every member: the earliest that a zip archive can hold."""
MAX_BYTES = 2 * 2**30
"""Limit of all members unpacked, far above any results of ours."""
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, UnicodeDecodeError)
"""What zipfile raises for a damaged archive; RuntimeError for an encrypted one."""
log = logging.getLogger(__name__)


def export(results_dir: Path, setting: object) -> str:
    """Write a results folder as `export=FILE.zip`, or into `export=DIR` under its own name.

    Returns what is in the archive, in a line. Raises UserError for a wrong setting, and as `pack`
    does.
    """
    if not results_dir.is_dir():
        raise UserError(f"results_dir={results_dir}: no such folder")
    if not isinstance(setting, str) or not setting:
        raise UserError(f"export={setting}: must be a folder, or a file whose name ends with .zip")
    path, real = Path(path_text(setting, "export")), Path(os.path.realpath(results_dir))
    target = path if path.suffix == ".zip" and not path.is_dir() else path / f"{real.name}.zip"
    if Path(os.path.realpath(target)).is_relative_to(real):
        inside = f"export={setting}: lies inside results_dir={results_dir}"
        raise UserError(f"{inside}; choose a place outside of it")
    return pack(results_dir, target)


def pack(results_dir: Path, target: Path) -> str:
    """Write a results folder into the archive `target` in one step, one file in memory at a time.

    The same results give the same bytes with the same zlib. Interrupted runs and damaged records
    are left out. Returns what is in the archive, in a line.

    Raises:
        UserError: there is nothing to share, or `target` cannot be written.
    """
    derived: list[Path] = []
    for pattern in DERIVED:
        derived += filter(Path.is_file, results_dir.glob(pattern))
    derived = sorted(path for path in derived if not _leads_out(path, results_dir))
    records = []
    num_left_out = 0
    for path in tqdm(sorted(results_dir.glob(RECORDS)), unit="record", delay=1, leave=False):
        if _is_shared(path) and not _leads_out(path, results_dir):
            records.append(path)
        else:
            num_left_out += 1
    if not records and not derived:
        nothing = "nothing to share, neither finished run nor table"
        raise UserError(f"results_dir={results_dir}: {nothing}")
    digests: dict[str, str] = {}
    try:
        with replacing(target) as scratch, zipfile.ZipFile(scratch, "w") as archive:
            for path in (*records, *derived):
                name, data = path.relative_to(results_dir).as_posix(), path.read_bytes()
                _add(archive, name, data)
                digests[name] = sha256(data)
            manifest = {"schema": SCHEMA, "sha256": digests}
            text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
            _add(archive, MANIFEST, text.encode())
    except OSError as error:
        where = error.filename or target
        raise UserError(f"export={target}: {where}: {error.strerror or error}") from error
    left_out = f" ({num_left_out} interrupted or damaged left out)" if num_left_out else ""
    return (
        f"{target}: {len(records)} records{left_out}, {len(derived)} tables, figures and pages, "
        f"{target.stat().st_size / 2**20:.1f} MiB, sha256 {content_sha256(target)}"
    )


def _leads_out(path: Path, results_dir: Path) -> bool:
    """Whether a file of the folder lies elsewhere, behind a link; a warning says so."""
    leads_out = not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(results_dir))
    if leads_out:
        log.warning("%s: a link out of the folder; left out of the archive", path)
    return leads_out


def _is_shared(record: Path) -> bool:
    """Whether a record goes into an archive: it is whole, and its run came to an end."""
    try:
        return bool(read_record(record)["status"] != "interrupted")
    except UserError as error:
        log.warning("%s; left out of the archive", error)
        return False


def sha256(data: bytes) -> str:
    """A member's digest in the manifest, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.create_system, info.external_attr = 3, 0o644 << 16  # a plain Unix file on every system
    archive.writestr(info, data)


@contextmanager
def opened(source: Path) -> Iterator[Path]:
    """A results folder to read: `source` itself, or the archive `source` unpacked for the block.

    The folder of one's own results need not exist, since the shipped ones stand beside it.

    Raises:
        UserError: there is nothing, or not an archive as `pack` writes it; also any raised in the
            block, with the archive's name instead of the temporary folder's.
    """
    if source.is_dir() or (shipped_beside(source) is not None and not source.exists()):
        yield source
        return
    if not source.is_file():
        raise UserError(f"{source}: no such results folder or archive")
    with tempfile.TemporaryDirectory(prefix="results-") as name:
        folder = Path(name)
        try:
            _unpack(source, folder)
            yield folder
        except UserError as error:
            raise UserError(str(error).replace(str(folder), str(source))) from error
        except BAD_VALUE_ERRORS as error:
            raise UserError(f"{source}: holds values that no run writes ({error!r})") from error


def _unpack(source: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(source) as archive:
            _check_members(source, archive)
            for name, expected in _manifest(source, archive).items():
                data = _read(source, archive, name)
                if sha256(data) != expected:
                    raise UserError(f"{source}: {name} is not what the manifest says")
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                if path.match(RECORDS):
                    read_record(path)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"{source}: cannot be unpacked into {folder} ({why})") from error
    except DAMAGE as error:
        raise UserError(f"{source}: not an archive of results, or damaged ({error})") from error


def _check_members(source: Path, archive: zipfile.ZipFile) -> None:
    """Raise UserError for a member that must not be unpacked, or occurs twice, and for too many
    bytes in all."""
    names: set[str] = set()
    for info in archive.infolist():
        name = info.filename
        stays_below = not {"", ".", ".."} & {*name.split("/")} and "\\" not in name
        if not stays_below or not name.isprintable() or name != info.orig_filename:
            raise UserError(f"{source}: unsafe name of a member, {info.orig_filename!r}")
        if info.compress_type not in COMPRESSIONS:
            raise UserError(f"{source}: {name} is compressed in another way than by deflate")
        if S_ISLNK(info.external_attr >> 16):
            words = "is a link; an archive of results has plain files only"
            raise UserError(f"{source}: {name} {words}")
        if name in names:
            raise UserError(f"{source}: {name} is in it twice")
        names.add(name)
    unpacked = sum(info.file_size for info in archive.infolist())
    if unpacked > MAX_BYTES:
        limit = f"more than the {MAX_BYTES:,} that are read"
        raise UserError(f"{source}: {unpacked:,} bytes unpacked, {limit}")


def _manifest(source: Path, archive: zipfile.ZipFile) -> dict[str, str]:
    """sha256 by name, of exactly the members of the archive."""
    names = set(archive.namelist())
    if MANIFEST not in names:
        raise UserError(f"{source}: not an archive of results, it has no {MANIFEST}")
    try:
        manifest = json.loads(_read(source, archive, MANIFEST))
        schema, digests = manifest["schema"], dict(manifest["sha256"])
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise UserError(f"{source}: {MANIFEST} is damaged") from error
    if schema != SCHEMA:
        raise UserError(f"{source}: of schema {schema!r}; this version reads {SCHEMA}")
    different = {*digests, MANIFEST} ^ names
    if different:
        name = min(different)
        what = "missing" if name in digests else "not in the manifest"
        raise UserError(f"{source}: {name} is {what}")
    return digests


def _read(source: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    """A member, of which zipfile unpacks no more bytes than its header says."""
    try:
        return archive.read(name)
    except DAMAGE as error:
        raise UserError(f"{source}: {name} is damaged ({error})") from error

"""A results folder as one file to share: a zip archive of its records, tables, figures and pages,
and of those of other models in folders within it.

    with opened(Path("results.zip")) as folder:
        ...    # as in a results folder

An archive may come from a stranger. `opened` writes no member outside of its temporary folder, and
no more bytes than `MAX_BYTES`.
"""

from __future__ import annotations

import itertools
import logging
import lzma
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from harness.errors import UserError
from harness.files import content_sha256, replacing
from harness.results.record import BAD_VALUE_ERRORS, read_record
from harness.settings.paths import models_beside, shipped_beside
from harness.settings.schema import path_text

RECORDS = "runs/*/*/record.json"
DERIVED = ("tables/*.csv", "tables/*.md", "figures/*.png", "figures/*.svg", "*.md", "findings.yaml")
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of every member: the earliest that a zip archive can hold."""
MAX_BYTES = 2 * 2**30
"""Limit of all members unpacked, far above any results of ours."""
DAMAGE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, RuntimeError,
    UnicodeDecodeError,
)  # fmt: skip
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
    folders = [results_dir, *(results_dir / name for name in models_beside(results_dir))]
    found = _inside(results_dir, folders, [RECORDS])
    records = list(filter(_is_shared, tqdm(found, unit="record", delay=1, leave=False)))
    derived = _inside(results_dir, folders, DERIVED)
    if not records and not derived:
        nothing = "nothing to share, neither finished run nor table"
        raise UserError(f"results_dir={results_dir}: {nothing}")
    try:
        with replacing(target) as scratch, zipfile.ZipFile(scratch, "w") as archive:
            for path in (*records, *derived):
                info = zipfile.ZipInfo(path.relative_to(results_dir).as_posix(), EPOCH)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.create_system, info.external_attr = 3, 0o644 << 16  # a plain file of Unix
                archive.writestr(info, path.read_bytes())
    except OSError as error:
        where = error.filename or target
        raise UserError(f"export={target}: {where}: {error.strerror or error}") from error
    num_left_out = len(found) - len(records)
    left_out = f" ({num_left_out} interrupted or damaged left out)" if num_left_out else ""
    return (
        f"{target}: {len(records)} records{left_out}, {len(derived)} tables, figures and pages, "
        f"{target.stat().st_size / 2**20:.1f} MiB, sha256 {content_sha256(target)}"
    )


def _inside(results_dir: Path, folders: Sequence[Path], patterns: Sequence[str]) -> list[Path]:
    """The files of the patterns in `folders`, but those behind a link out of the results folder; a
    warning names these."""
    inside = []
    for folder, pattern in itertools.product(folders, patterns):
        for path in sorted(filter(Path.is_file, folder.glob(pattern))):
            if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(results_dir)):
                inside.append(path)
            else:
                log.warning("%s: a link out of the folder; left out of the archive", path)
    return inside


def _is_shared(record: Path) -> bool:
    try:
        return bool(read_record(record)["status"] != "interrupted")
    except UserError as error:
        log.warning("%s; left out of the archive", error)
        return False


@contextmanager
def opened(source: Path) -> Iterator[Path]:
    """A results folder to read: `source` itself, or the archive `source` unpacked for the block.

    The folder of one's own results need not exist, since the shipped ones stand beside it.

    Raises:
        UserError: there is nothing, or no archive, or a damaged one; also any raised in the block,
            with the archive's name instead of the temporary folder's.
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
    """Write the members into the folder. zipfile drops "..", drives and the root from names, writes
    a link as a plain file, and unpacks no more bytes of a member than its header says."""
    try:
        with zipfile.ZipFile(source) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
            if unpacked > MAX_BYTES:
                limit = f"more than the {MAX_BYTES:,} that are read"
                raise UserError(f"{source}: {unpacked:,} bytes unpacked, {limit}")
            archive.extractall(folder)
        for pattern in (RECORDS, f"*/{RECORDS}"):
            for record in sorted(folder.glob(pattern)):
                read_record(record)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"{source}: cannot be unpacked into {folder} ({why})") from error
    except DAMAGE as error:
        raise UserError(f"{source}: not an archive of results, or damaged ({error})") from error

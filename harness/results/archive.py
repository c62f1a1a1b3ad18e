"""A results folder as one file to share: a zip archive of its records, tables, figures and pages,
and of those of other models in folders within it.

    with opened(Path("results.zip")) as folder:
        ...    # as in a results folder

An archive may come from a stranger: `opened` writes no member outside of its temporary folder.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from harness.errors import UserError, one_line
from harness.files import content_sha256, replacing
from harness.results.record import read_record
from harness.settings.paths import models_beside, shipped_beside
from harness.settings.schema import path_text

RECORDS = "runs/*/*/record.json"
DERIVED = ("tables/*.csv", "tables/*.md", "figures/*.png", "figures/*.svg", "*.md", "findings.yaml")
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of every member: the earliest that a zip archive can hold."""
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
    path, real = Path(path_text(setting, "export")), results_dir.resolve()
    target = path if path.suffix == ".zip" and not path.is_dir() else path / f"{real.name}.zip"
    if target.resolve().is_relative_to(real):
        inside = f"export={setting}: lies inside results_dir={results_dir}"
        raise UserError(f"{inside}; choose a place outside of it")
    return pack(results_dir, target)


def pack(results_dir: Path, target: Path) -> str:
    """Write a results folder into the archive `target` in one step, one file in memory at a time.

    The same results give the same bytes with the same zlib. Interrupted runs are left out, and
    files behind a link out of the folder, each with a warning. Returns what is in the archive, in a
    line.

    Raises:
        UserError: there is nothing to share, a record is damaged, or `target` cannot be written.
    """
    folders = [results_dir, *(results_dir / name for name in models_beside(results_dir))]
    found = _inside(results_dir, folders, (RECORDS,))
    bar = tqdm(found, unit="record", delay=1, leave=False)
    records = [path for path in bar if read_record(path)["status"] != "interrupted"]
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
        raise UserError(f"export={target}: {one_line(error)}") from error
    num_left_out = len(found) - len(records)
    left_out = f" ({num_left_out} interrupted left out)" if num_left_out else ""
    return (
        f"{target}: {len(records)} records{left_out}, {len(derived)} tables, figures and pages, "
        f"{target.stat().st_size / 2**20:.1f} MiB, sha256 {content_sha256(target)}"
    )


def _inside(results_dir: Path, folders: list[Path], patterns: tuple[str, ...]) -> list[Path]:
    """The files of the patterns in `folders`, but those behind a link out of the results folder; a
    warning names these."""
    inside = []
    for folder, pattern in itertools.product(folders, patterns):
        for path in sorted(filter(Path.is_file, folder.glob(pattern))):
            if path.resolve().is_relative_to(results_dir.resolve()):
                inside.append(path)
            else:
                log.warning("%s: a link out of the folder; left out of the archive", path)
    return inside


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
    with tempfile.TemporaryDirectory(prefix="results-") as folder:
        try:
            with zipfile.ZipFile(source) as archive:
                archive.extractall(folder)  # which keeps every member inside the folder
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise UserError(f"{source}: no archive of results, or damaged ({error})") from error
        try:
            yield Path(folder)
        except UserError as error:
            raise UserError(str(error).replace(folder, str(source))) from error

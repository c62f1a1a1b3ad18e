"""A results folder as one file to share: a zip archive of its records, tables, figures and pages,
and of those of other models in folders within it. It may come from a stranger: `opened` writes no
member outside of its temporary folder."""

from __future__ import annotations

import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import UserError, one_line
from harness.files import replacing
from harness.results.record import read_record
from harness.settings.paths import models_beside, shipped_beside
from harness.settings.schema import path_text

DERIVED = ("tables/*.csv", "tables/*.md", "figures/*.png", "figures/*.svg", "*.md", "findings.yaml")


def export(results_dir: Path, setting: object) -> str:
    """Write a results folder as `export=FILE.zip`, or into `export=DIR` under its own name, without
    interrupted runs. Returns what is in the archive, in a line.

    Raises:
        UserError: there is nothing to share, a record is damaged, or the file cannot be written.
    """
    if not isinstance(setting, str) or not setting:
        raise UserError(f"export={setting}: must be a folder, or a file whose name ends with .zip")
    target = Path(path_text(setting, "export"))
    if target.suffix != ".zip" or target.is_dir():
        target /= f"{results_dir.resolve().name}.zip"
    records, derived = [], []
    for folder in (results_dir, *(results_dir / name for name in models_beside(results_dir))):
        for path in sorted(folder.glob("runs/*/*/record.json")):
            if read_record(path)["status"] != "interrupted":
                records.append(path)
        derived += [path for pattern in DERIVED for path in sorted(folder.glob(pattern))]
    if not records and not derived:
        nothing = "nothing to share, neither finished run nor table"
        raise UserError(f"results_dir={results_dir}: {nothing}")
    try:
        with replacing(target) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in (*records, *derived):
                archive.write(path, path.relative_to(results_dir))
    except OSError as error:
        raise UserError(f"export={target}: {one_line(error)}") from error
    counts = f"{len(records)} records, {len(derived)} tables, figures and pages"
    return f"{target}: {counts}, {target.stat().st_size / 2**20:.1f} MiB"


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

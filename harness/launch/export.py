"""`python run.py export=DIR_OR_FILE [results_dir=DIR]`: the results in one file to share, instead of a run.

`export` names the archive, a `.zip` file, or a folder in which it gets the name of the results folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError
from harness.records import archive
from harness.settings.schema import path_text, setting_of

TAKES = ("export", "results_dir")
MIB = 2**20


def export(setting: object, results_dir: str, overrides: Sequence[str]) -> str:
    """Write the archive; returns what is in it, in a line for the user.

    Raises:
        UserError: a setting that belongs to a run, nothing to export, or a place that it cannot be written to.
    """
    foreign = [override for override in overrides if setting_of(override) not in TAKES]
    if foreign:
        raise UserError(f"{foreign[0]}: export={setting} runs nothing; beside it only results_dir= is allowed")
    results = Path(path_text(results_dir, "results_dir"))
    if not results.is_dir():
        raise UserError(f"results_dir={results}: no such folder")
    packed = archive.pack(results, _target(setting, results))
    left_out = f" ({packed.left_out} interrupted or damaged left out)" if packed.left_out else ""
    return (
        f"{packed.path}: {packed.num_records} records{left_out}, {packed.num_files} tables, figures and pages, "
        f"{packed.path.stat().st_size / MIB:.1f} MiB, sha256 {packed.sha256}"
    )


def _target(setting: object, results: Path) -> Path:
    """Where the archive is to lie."""
    if not isinstance(setting, str) or not setting:
        raise UserError(f"export={setting}: must be a folder, or a file whose name ends with .zip")
    path = Path(path_text(setting, "export"))
    target = path if path.suffix == ".zip" and not path.is_dir() else path / f"{_real(results).name}.zip"
    if _real(target).is_relative_to(_real(results)):
        raise UserError(f"export={setting}: lies inside results_dir={results}; choose a place outside of it")
    return target


def _real(path: Path) -> Path:
    """`path` without links; one that leads round in a circle stays as it is."""
    return Path(os.path.realpath(path))

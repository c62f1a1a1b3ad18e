"""A figure as files whose bytes depend on the drawing alone."""

import io
import os
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from harness.errors import UserError

DPI = 160
FORMATS: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}


def rendered(figure: Figure) -> dict[str, bytes]:
    """The figure by format, without dates, so that a rerun gives the same bytes."""
    return {kind: _rendered(figure, kind) for kind in FORMATS}


def _rendered(figure: Figure, kind: str) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format=kind, dpi=DPI, metadata=FORMATS[kind])
    return data.getvalue()


def save(formats: Mapping[str, bytes], stem: Path) -> list[Path]:
    """Write what `rendered` gives as `stem`.png and `stem`.pdf.

    Raises:
        UserError: the folder cannot be written.
    """
    paths = []
    for kind, data in formats.items():
        path = stem.with_name(f"{stem.name}.{kind}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_name(f".{path.name}.{os.getpid()}")
            scratch.write_bytes(data)
            scratch.replace(path)  # whole or not at all, whoever else draws it
        except OSError as error:
            raise UserError(f"results_dir: cannot write {path} ({error.strerror})") from error
        paths.append(path)
    return paths

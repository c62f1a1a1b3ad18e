"""Rows that the project ships: they stay until a run of one's own replaces them.

The project ships tables without their records; those rows have `shipped=yes`. A shipped row stands
in a table of one's own until a run has the same identity (`IDENTITY`). A damaged table is set
aside.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.files import free_path
from harness.results.columns import ANEW, IDENTITY, NO_TABLE, TableRow, read_table, shape_of
from harness.settings.paths import shipped_beside

log = logging.getLogger(__name__)

SHIPPED_LINE = re.compile(r'(^|[,;\t"])yes($|[,;\t"])')
"""A line with the mark of a shipped row, whatever a spreadsheet put between the values."""


def merged(path: Path, shape: str, own: Sequence[TableRow]) -> list[TableRow]:
    """One's own rows, and the shipped rows that they do not replace.

    The shipped rows are those of the results beside the folder of `path` (`shipped_beside`), else
    those in the table at `path`. Raises UserError for a damaged table that cannot be set aside.
    """
    replaced = {_identity(shape, row) for row in own}
    kept = []
    for row in _rows_at(path, shape):
        if row.get("shipped") and _identity(shape, row) not in replaced:
            kept.append(row)
    return [*kept, *own]


def _identity(shape: str, row: TableRow) -> tuple[Any, ...]:
    whole = row
    if "task" in row:
        whole = row | {"task": row["task"].partition("[")[0]}
    return tuple(whole.get(name) or "" for name in IDENTITY[shape])


def _rows_at(path: Path, shape: str) -> list[TableRow]:
    """The rows of the shipped table beside that at `path`, or of that at `path` where none is.

    A table that is damaged or of another shape is set aside. A warning says so and what is lost.
    """
    beside = shipped_beside(path.parents[1])
    shipped = None if beside is None else beside / "tables" / path.name
    has_shipped = shipped is not None and shipped.exists()
    rows: list[TableRow] = []
    if path.exists():
        damage = _damage(path, shape)
        if damage:
            _set_aside(path, damage, "" if has_shipped else _lost_rows(path))
        else:
            rows = read_table(path)
    if shipped is None or not has_shipped:
        return rows
    damage = _damage(shipped, shape)
    if damage:
        raise UserError(f"{damage}; install the project again")
    return read_table(shipped)


def _damage(path: Path, shape: str) -> str:
    """What is wrong with a table, in words; "" for nothing."""
    try:
        rows = read_table(path)
    except UserError as error:
        return str(error).removesuffix(f"; {ANEW}")
    if rows and shape_of(rows[0]) != shape:
        return f"{path}: {NO_TABLE} (it is of another kind of run)"
    return ""


def _set_aside(path: Path, damage: str, lost: str) -> None:
    # The end of the name keeps everything from taking it for a table.
    kept = free_path(path.with_name(f"{path.name}.damaged-*"))
    try:
        path.replace(kept)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"{damage}; it cannot be renamed to {kept.name} ({why})") from error
    log.warning("%s; kept as %s, written anew from the records%s", damage, kept.name, lost)


def _lost_rows(path: Path) -> str:
    """Words on the shipped rows that a damaged table loses; they have no records."""
    try:
        text = path.read_bytes().replace(b"\0", b"").decode(errors="replace")  # NULs: of UTF-16
    except OSError:
        text = ""
    count = len(list(filter(SHIPPED_LINE.search, text.splitlines())))
    if count:
        return (
            f"; {count} shipped rows, which have no records, are lost: take the file from the "
            "project again"
        )
    return "" if "shipped" in text else "; rows that the project ships in it, if it does, are lost"

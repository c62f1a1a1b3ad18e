"""Files of rows as data sets, each value as it stands in its file.

`datasets` gives a column of JSON lines or of CSV one type: 12 beside 7.5 becomes 12.0, a column of
dates becomes times of day, 007 becomes 7. Such values then stand in prompts and right answers. Here
a value is compared with the file's once it is in the data set. What changed there is kept as JSON,
or, of CSV, as text.
"""

from __future__ import annotations

import codecs
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError, shortened

if TYPE_CHECKING:
    from datasets import Dataset

KINDS = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}
"""Types of JSON values but null, in words."""
MAX_FIELDS = 1000
"""Fields of a file's rows: with 100,000 a data set takes minutes."""
SHOWN = 40
"""Letters of a value that a refusal repeats at most."""


def read_json(
    paths: Sequence[Path], fields: Sequence[str] = (), inside: str | None = None
) -> Dataset:
    """The rows of one or several files: JSON lines, or a list of objects.

    fields: that no row may lack. inside: the key of a file's one object under which the list is.

    Raises:
        UserError: a file is missing or empty; a line or row (named by number) is no JSON object
        with all of `fields`, has too many fields, holds something else in a field than those before
        it, or a value that no data set holds unchanged.
    """
    import datasets

    rows: list[dict[str, Any]] = []
    places: list[str] = []
    for path in paths:
        numbered = _checked(path, fields, inside)
        places += numbered
        rows += numbered.values()
    names = dict.fromkeys(name for row in rows for name in row)
    if not names:
        raise UserError(f"{paths[0]}: its rows have no fields")
    columns = [_column(name, [row.get(name) for row in rows], places) for name in names]
    return datasets.concatenate_datasets(columns, axis=1)


def _checked(path: Path, fields: Sequence[str], inside: str | None) -> dict[str, dict[str, Any]]:
    """The rows of a file of JSON by their places in words. Raises UserError as `read_json`."""
    try:
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8).rstrip()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not text:
        raise UserError(f"{path}: the file is empty")
    is_whole = inside is not None or text.startswith(b"[")
    unit = "row" if is_whole else "line"
    if is_whole:
        found = _parsed(text, f"{path}")
        found = found.get(inside) if isinstance(found, dict) else found
        if not isinstance(found, list) or not found:
            raise UserError(f"{path}: expected a list of objects{f' as {inside}' * bool(inside)}")
    else:
        lines = text.split(b"\n")
        found = [_parsed(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    rows: dict[str, dict[str, Any]] = {}
    kinds: dict[str, tuple[str, int]] = {}
    for number, row in enumerate(found, 1):
        place = f"{path}, {unit} {number}"
        if not isinstance(row, dict):
            raise UserError(f"{place}: expected an object")
        for field in fields:
            if row.get(field) is None:
                raise UserError(f"{place}: field {field!r} is missing")
        for field, value in row.items():
            if value is None:
                continue
            kind = KINDS[type(value)]
            first, at = kinds.setdefault(field, (kind, number))
            if kind != first:
                raise UserError(
                    f"{place}: field {field!r} holds {kind}, but {first} in {unit} {at}"
                )
        if len(kinds) > MAX_FIELDS:
            raise UserError(f"{place}: {len(kinds):,} fields; allowed: up to {MAX_FIELDS:,}")
        rows[place] = row
    return rows


def _parsed(text: bytes, place: str) -> Any:
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON, {error}") from None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"which has no {word}")


def _column(name: str, values: Sequence[Any], places: Sequence[str]) -> Dataset:
    """One field of all rows. Raises UserError for a value that changes in a data set."""
    from datasets import Features, Json

    as_json = [value if value is None else json.dumps(value) for value in values]
    column = _unchanged(name, values, values, None)
    if column is None:
        column = _unchanged(name, values, as_json, Features({name: Json()}))
    if column is not None:
        return column
    changed = next(
        number
        for number, text in enumerate(as_json)
        if _unchanged(name, [values[number]], [text], Features({name: Json()})) is None
    )
    shown = shortened(str(as_json[changed]), SHOWN)
    raise UserError(
        f"{places[changed]}: field {name!r} holds {shown}, which changes on its way to a prompt; "
        "write the field as plain text in every row"
    )


def _unchanged(name: str, values: Sequence[Any], given: Sequence[Any], types: Any) -> Any:
    """The data set of one field, made of `given`; None where its values are then not `values`."""
    from datasets import Dataset

    with contextlib.suppress(Exception):  # of Arrow, which has many
        column = Dataset.from_dict({name: given}, features=types)
        if json.dumps(column[name][:]) == json.dumps(values):  # which tells 12 from 12.0
            return column
    return None


def read_csv(paths: Sequence[Path], options: Mapping[str, Any]) -> Dataset:
    """The rows of one or several files of CSV. options: of pandas' `read_csv`.

    A column has a type where that writes each of its values as the file does, else it is text. An
    empty cell is None.
    """
    import datasets
    import pandas as pd

    given: dict[str, Any] = {name: each for name, each in options.items() if name != "chunksize"}
    given |= {"keep_default_na": False, "na_values": given.get("na_values") or [""]}

    def read(**how: Any) -> pd.DataFrame:
        frames = [pd.read_csv(path, **given, **how) for path in paths]
        return pd.concat(frames, ignore_index=True)

    typed, written = read(dtype_backend="numpy_nullable"), read(dtype="string")
    columns: dict[str, list[Any]] = {}
    for name in written:
        is_same = typed[name].astype("string").equals(written[name])
        column = (typed if is_same else written)[name].astype(object)
        columns[str(name)] = column.where(column.notna(), None).tolist()
    return datasets.Dataset.from_dict(columns)

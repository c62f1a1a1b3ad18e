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

from harness.errors import UserError, refused

if TYPE_CHECKING:
    from datasets import Dataset


def read_json(
    paths: Sequence[Path], fields: Sequence[str] = (), inside: str | None = None
) -> Dataset:
    """The rows of one or several files: JSON lines, or a list of objects.

    fields: that no row may lack, since a prompt would say None. inside: the key of a file's one
    object under which the list is. Raises UserError for a file that is missing, empty or no JSON
    (line by number), and a row that lacks a field or holds a value that no data set holds
    unchanged.
    """
    import datasets

    rows: list[dict[str, Any]] = []
    for path in paths:
        for number, row in enumerate(_parsed(path, inside), 1):
            lacking = [field for field in fields if row.get(field) is None]
            if lacking:
                raise UserError(f"{path}, row {number}: field {lacking[0]!r} is missing")
            rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [_column(f"{paths[0]}", name, [row.get(name) for row in rows]) for name in names]
    return datasets.concatenate_datasets(columns, axis=1)


def _parsed(path: Path, inside: str | None) -> list[dict[str, Any]]:
    with refused(f"{path}: cannot be read as a list of objects"):
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8).rstrip()
        if inside is not None or text.startswith(b"["):
            whole = json.loads(text)
            return [dict(row) for row in (whole if inside is None else whole[inside])]
    rows = []
    for number, line in enumerate(text.split(b"\n"), 1):
        with refused(f"{path}, line {number}: expected an object of JSON"):
            rows.append(dict(json.loads(line)))
    return rows


def _column(place: str, name: str, values: Sequence[Any]) -> Dataset:
    """One field of all rows. Raises UserError where a data set changes a value."""
    from datasets import Dataset, Features, Json

    written = json.dumps(values)  # tells 12 from 12.0
    texts = [value if value is None else json.dumps(value) for value in values]
    for given, types in ((values, None), (texts, Features({name: Json()}))):
        with contextlib.suppress(Exception):  # of Arrow, which has many
            column = Dataset.from_dict({name: given}, features=types)
            if json.dumps(column[name][:]) == written:
                return column
    raise UserError(
        f"{place}: field {name!r} holds a value that changes on its way to a prompt; write the "
        "field as plain text in every row"
    )


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

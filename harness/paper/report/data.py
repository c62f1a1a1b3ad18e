"""What a report reads from a results folder: tables as people read them, gaps in them, and the runs behind them."""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from harness.errors import UserError, nearest
from harness.tables.columns import GIB, MISSING, column, shape_of, typed
from harness.tables.sheets import sheets_of
from harness.tables.text import WORDS, Sheet

Record = Mapping[str, Any]

SHAPE_HEADINGS = tuple(column(name).heading for name in ("batch_size", "prompt_len", "gen_len"))


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table's CSV as they stand there.

    Raises:
        UserError: a file that is no table of results.
    """
    try:
        lines = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline=""), strict=True)
        rows = list(lines)
    except (ValueError, csv.Error) as error:
        raise _not_a_table(path) from error
    if shape_of(lines.fieldnames or ()) is None or any(None in (*row, *row.values()) for row in rows):
        raise _not_a_table(path)
    return rows


def sheets(path: Path, rows: Sequence[Mapping[str, str]]) -> list[Sheet]:
    """The rows of a table as people read them. Raises UserError for a file that is no table of results."""
    try:
        return list(sheets_of([typed(row) for row in rows]))
    except (ValueError, TypeError) as error:  # a number that is none, or is missing
        raise _not_a_table(path) from error


def findings(path: Path, names: Sequence[str]) -> Mapping[str, str]:
    """The sentences of `findings.yaml`, by figure or table; none where there is no file.

    Raises:
        UserError: another kind of file, or a name that is not among `names`.
    """
    try:
        said: Any = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(said, dict) or not all(isinstance(sentence, str) for sentence in said.values()):
        raise UserError(f"{path}: must map names of figures to sentences")
    for name in said:
        if name not in names:
            raise UserError(f"{path}: {name}: {nearest(name, names)}")
    return said


def gaps(sheets: Sequence[Sheet]) -> list[str]:
    """The cells that a table lacks, in words: scores of a line, and shapes that another label was timed at."""
    return [f"{sheet.title}: {gap}" for sheet in sheets for gap in _gaps(sheet)]


def unfinished(records: Iterable[Record]) -> list[str]:
    """The runs without numbers, and why."""
    return [
        f"{record['experiment']} {record['config']['label']} ({record['run_id']}): {record['status']}"
        + (f", {record['error']}" if record["error"] else "")
        for record in records
        if record["status"] != "finished"
    ]


def environment(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Where the finished runs ran, as (name, value); a value that not all runs share says how many had it."""
    finished = [record for record in records if record["status"] == "finished"]
    if not finished:
        return []
    flat = [dict(_readable(record["environment"])) for record in finished]
    minutes = sum(record["seconds"] for record in finished) / 60
    said = [("finished runs", f"{len(finished)}, {minutes:.0f} minutes in total")]
    for name in dict.fromkeys(name for values in flat for name in values):
        counts = Counter(values.get(name, "unknown") for values in flat)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        parts = [f"{value} ({count} of {len(flat)} runs)" if count < len(flat) else value for value, count in ranked]
        said.append((name, "; ".join(parts)))
    return said


def _not_a_table(path: Path) -> UserError:
    return UserError(f"{path}: not a table of results; make it anew")


def _gaps(sheet: Sheet) -> Iterator[str]:
    lines = [dict(zip(sheet.header, line, strict=True)) for line in sheet.lines]
    for line in lines:
        name = ", ".join(line[word] for word in WORDS if line.get(word, MISSING) != MISSING)
        for heading, cell in line.items():
            if cell == MISSING and heading in sheet.scores:
                yield f"{name}: {heading}"
    if set(SHAPE_HEADINGS) <= set(sheet.header):
        timed = [(line["label"], tuple(f"{heading} {line[heading]}" for heading in SHAPE_HEADINGS)) for line in lines]
        labels, shapes = (dict.fromkeys(cell[part] for cell in timed) for part in (0, 1))
        for label, shape in product(labels, shapes):
            if (label, shape) not in timed:
                yield f"{label}: {', '.join(shape)}"


def _readable(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields of a record's environment for people; what is unknown is left out."""
    for name, value in environment.items():
        if name == "packages":
            yield from ((package, version) for package, version in value.items() if version)
        elif name == "memory_bytes" and value:
            yield "memory", f"{value / GIB:.0f} GiB"
        elif name == "commit" and value:
            yield "commit", value + (" and changes" if environment.get("dirty") else "")
        elif name not in ("dirty", "memory_bytes") and value is not None:
            yield name.replace("_", " "), str(value)

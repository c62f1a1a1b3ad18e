"""What a report reads from a results folder: tables as people read them, gaps in them, and the runs behind them."""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.records.record import read_records
from harness.tables.text import GIB, LATENCY, METRICS, MISSING, WORDS, Sheet
from harness.tables.write import label_of

Record = Mapping[str, Any]

SHAPE = tuple(LATENCY[name].heading for name in ("batch_size", "prompt_len", "gen_len"))
SCORES = tuple(METRICS[name].heading for name in ("acc", "perplexity"))
"""What every run on a task or text measures, so that a cell without it is a gap and not a quantity that it lacks."""


def read_sheets(path: Path) -> list[Sheet]:
    """The tables of a Markdown file that `harness.tables.text` wrote; none where there is no file.

    Raises:
        UserError: a file that is something else.
    """
    if not path.exists():
        return []
    sheets: list[Sheet] = []
    for block in _text(path).split("\n## ")[1:]:
        title, *rest = block.splitlines()
        header, *lines = [_cells(line) for line in rest if line.startswith("|")] or [[]]
        sheets.append(Sheet(title, header, lines[1:]))  # below the header, a row of dashes
    if not sheets or any(len(line) != len(sheet.header) for sheet in sheets for line in sheet.lines):
        raise UserError(f"{path}: not a table of results; make it anew")
    return sheets


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table's CSV; none where there is no file. Raises UserError for one that is no text."""
    return list(csv.DictReader(_text(path).splitlines())) if path.exists() else []


def gaps(sheets: Sequence[Sheet]) -> list[str]:
    """The cells that a table lacks, in words: scores of a line, and shapes that another label was timed at."""
    return [f"{sheet.title}: {gap}" for sheet in sheets for gap in _gaps(sheet)]


def all_records(results_dir: Path) -> list[Record]:
    """Every readable record, by experiment and run."""
    folders = sorted(path for path in (results_dir / "runs").glob("*") if path.is_dir())
    return [record for folder in folders for record in read_records(results_dir, folder.name)]


def unfinished(records: Iterable[Record]) -> list[str]:
    """The runs without numbers, and why."""
    return [
        f"{record['experiment']} {label_of(record['config'])} ({record['run_id']}): {record['status']}"
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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise UserError(f"{path}: not a table of results; make it anew") from error


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _gaps(sheet: Sheet) -> Iterator[str]:
    lines = [dict(zip(sheet.header, line, strict=True)) for line in sheet.lines]
    for line in lines:
        name = ", ".join(line[word] for word in WORDS if line.get(word, MISSING) != MISSING)
        for heading, cell in line.items():
            if cell == MISSING and heading.partition(" ")[2] in SCORES:
                yield f"{name}: {heading}"
    if set(SHAPE) <= set(sheet.header):
        timed = [(line["label"], tuple(f"{heading} {line[heading]}" for heading in SHAPE)) for line in lines]
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

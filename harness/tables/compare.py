"""Two results, folders or archives: which numbers moved, and by how many standard errors.

A number of one is that of the other where experiment, machine, model, method, label, settings, and task, shape or point
agree; of several such runs the newest counts. How far two are apart is `harness.tables.pairing`'s to say; speed is
compared by ratio.

    python -m harness.tables.compare before.zip after.zip --csv moved.csv
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import UserError, exit_code
from harness.files import replacing
from harness.records.record import read_records
from harness.records.unpack import opened
from harness.tables.accuracy import is_part
from harness.tables.columns import DEVICE_FRAC, LATENCY, RESIDENT_FRAC, SIZE, TableRow
from harness.tables.lines import tell_apart
from harness.tables.moved import distance, text_of
from harness.tables.pairing import NAMES, Change, Key, Number, change
from harness.tables.write import with_rows

SIZES = (SIZE, DEVICE_FRAC, RESIDENT_FRAC)
Numbers = dict[Key, Number]


class Comparison(NamedTuple):
    """changes: of numbers in both. only: the keys of numbers in one of them alone, by its name."""

    changes: Sequence[Change]
    only: Mapping[str, Sequence[Key]]


def compare(before: Path, after: Path) -> Comparison:
    """Match the numbers of two results folders or archives. Raises UserError where one cannot be read or has none."""
    with opened(before) as one, opened(after) as two:
        sides = _numbers(one, two)
    for source, numbers in zip((before, after), sides, strict=True):
        if not numbers:
            raise UserError(f"{source}: no finished run in it, and tables alone do not say what was run")
    old, new = sides
    only = {"A": [key for key in old if key not in new], "B": [key for key in new if key not in old]}
    return Comparison([change(old[key], new[key]) for key in old if key in new], only)


def _numbers(*folders: Path) -> list[Numbers]:
    """The numbers of each folder; the settings that tell rows apart are told over all of them."""
    found: list[Numbers] = [{} for _ in folders]
    for experiment in sorted({path.name for folder in folders for path in (folder / "runs").glob("*")}):
        sides = [with_rows(read_records(folder, experiment)) for folder in folders]
        tell_apart([pair for side in sides for pair in side], weights=False)  # what may have changed, as code may
        for numbers, side in zip(found, sides, strict=True):
            for record, rows in sorted(side, key=lambda pair: str(pair[0].get("started"))):
                for row in rows:
                    numbers |= {number.key: number for number in _of_row(row, record)}
    return found


def _of_row(row: TableRow, record: Mapping[str, Any]) -> Iterator[Number]:
    """The numbers of a row: of a timed run each of its columns, of any other its value and what was read for it."""
    if isinstance(row.get("value"), int | float):
        yield Number(row["value"], row.get("stderr"), row["metric"], row, record)
    is_whole = "task" in row and not is_part(row)
    columns = LATENCY if "metric" not in row else SIZES if is_whole else ()
    for each in columns:
        if each.digits is not None and each.name not in NAMES and isinstance(row.get(each.name), int | float):
            yield Number(row[each.name], None, each.name, row, record)


def write_csv(path: Path, comparison: Comparison) -> None:
    """Every number in both, equal ones included, a row each. Raises UserError where the file cannot be written."""
    values = ("before", "after", "difference", "stderr", "standard_errors", "pairs", "ratio")
    try:
        with replacing(path) as scratch, scratch.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow([*NAMES, "metric", *values, "differs"])
            for each in sorted(comparison.changes, key=distance, reverse=True):
                numbers = (each.before.value, each.after.value, each.difference, each.stderr, each.sigmas)
                tail = (each.num_pairs or None, each.ratio, " ".join(each.causes))
                writer.writerow([*each.before.key, *numbers, *tail])
    except OSError as error:
        raise UserError(f"--csv {path}: cannot be written ({error.strerror or error})") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Print what moved; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m harness.tables.compare", description="What moved from A to B.")
    parser.add_argument("before", metavar="A", help="a results folder or an archive")
    parser.add_argument("after", metavar="B", help="another")
    parser.add_argument("--csv", metavar="FILE", help="write every number that both have")
    args = parser.parse_args(argv)

    def command() -> None:
        for name in ("before", "after"):
            if not getattr(args, name):
                raise UserError(f"{'A' if name == 'before' else 'B'}=: name a results folder or an archive")
        comparison = compare(Path(args.before), Path(args.after))
        if args.csv:
            write_csv(Path(args.csv), comparison)
        print(text_of(*comparison))

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())

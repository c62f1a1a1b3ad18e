"""Two results, folders or archives: which numbers moved, and by how many standard errors.

A number of one is that of the other where experiment, machine, model, method, label, settings, and task, shape or point
agree; of several such runs the newest counts. How far two are apart is `harness.tables.pairing`'s to say; speed is
compared by ratio.

    python -m harness.tables.compare before.zip after.zip --csv moved.csv
"""

import argparse
import csv
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import UserError, exit_code
from harness.files import replacing
from harness.records.record import read_records
from harness.records.unpack import opened
from harness.tables.accuracy import is_chunk
from harness.tables.columns import (
    DEVICE_FRAC,
    KV_FRAC,
    LABEL,
    LATENCY,
    MISSING,
    RESIDENT_FRAC,
    Column,
    TableRow,
    column,
    quantity,
)  # fmt: skip
from harness.tables.lines import tell_apart
from harness.tables.pairing import Change, Number, change
from harness.tables.text import Sheet, aligned
from harness.tables.write import with_rows

NAMES = (
    "experiment", "platform", "source", "model", "method", "label", "settings", "task",
    "batch_size", "prompt_len", "gen_len", "series", "layer", "x_name", "x",
)  # fmt: skip
"""The columns of a row that say what its numbers are of."""
SIZES = (KV_FRAC, DEVICE_FRAC, RESIDENT_FRAC)
SETTINGS_AT = NAMES.index("settings")
SAID = (
    "label", "task", "series", "batch_size", "prompt_len", "gen_len", "layer", "x", "settings", "experiment", "model",
)  # fmt: skip
"""Those by which people know a row."""
MAX_SHOWN, MAX_NAMED, MAX_NAME = 40, 3, 90
FAR = 2
"""Standard errors beyond which one number of twenty lies by chance."""

Key = tuple[Any, ...]
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
        tell_apart([pair for side in sides for pair in side])
        for numbers, side in zip(found, sides, strict=True):
            for record, rows in sorted(side, key=lambda pair: str(pair[0].get("started"))):
                for row in rows:
                    numbers |= {_key(number): number for number in _of_row(row, record)}
    return found


def _of_row(row: TableRow, record: Mapping[str, Any]) -> Iterator[Number]:
    """The numbers of a row: of a timed run each of its columns, of any other its value and what was read for it."""
    if "metric" in row:
        yield Number(row["value"], row["stderr"], row["metric"], row, record)
    is_whole = "task" in row and not is_chunk(row)
    columns = LATENCY if "metric" not in row else SIZES if is_whole else ()
    for each in columns:
        if each.digits is not None and each.name not in NAMES and row.get(each.name) is not None:
            yield Number(row[each.name], None, each.name, row, record)


def _key(number: Number) -> Key:
    return (*(number.row.get(name) for name in NAMES), number.metric)


def text_of(comparison: Comparison) -> str:
    """What a reader looks for first, in a terminal: the most significant of what moved, and what is in one alone."""
    changes, only = comparison
    moved = [each for each in changes if not each.is_equal]
    far = [each for each in moved if each.sigmas is not None and each.sigmas > FAR]
    lines = [
        f"{len(changes)} numbers in both: {len(changes) - len(moved)} equal, {len(moved)} moved, "
        f"{len(far)} of these by more than {FAR} standard errors (of many pairs 1 in 20 does by chance)"
    ]
    lines += [f"only in {name}: {_listed(keys)}" for name, keys in only.items() if keys]
    causes = Counter(cause for each in moved for cause in each.causes)
    if causes:
        lines.append(f"of what moved differ: {', '.join(f'{cause} ({count})' for cause, count in causes.items())}")
    kinds = {
        "moved, by standard errors": [each for each in moved if each.sigmas is not None],
        "moved, without a standard error": [each for each in moved if each.sigmas is None and not each.is_of_speed],
        "of speed, by ratio": [each for each in moved if each.is_of_speed],
    }
    for title, own in kinds.items():
        lines += ["", *_table(title, sorted(own, key=_distance, reverse=True))] if own else []
    return "\n".join(lines)


def _listed(keys: Sequence[Key]) -> str:
    """How many numbers, and the first of what they are of."""
    owners = list(dict.fromkeys(_owner(key) for key in keys))
    return f"{len(keys)} numbers of {'; '.join(owners[:MAX_NAMED])}{'; ...' if len(owners) > MAX_NAMED else ''}"


def _table(title: str, changes: Sequence[Change]) -> Iterator[str]:
    """The first of them, with the names cut so that a terminal shows a line as one."""
    of_speed = changes[0].is_of_speed
    header = ["B / A", "A", "B"] if of_speed else ["standard errors", "A", "B", "B less A", "pairs"]
    lines = [[*(_ratio if of_speed else _difference)(each), _name(each)] for each in changes[:MAX_SHOWN]]
    yield aligned(Sheet(title, [*header, LABEL.heading], lines))
    if len(changes) > MAX_SHOWN:
        yield f"and {len(changes) - MAX_SHOWN} that moved less; --csv FILE has all"


def _ratio(each: Change) -> list[str]:
    return [MISSING if each.ratio is None else f"{each.ratio:.3g}", *_values(each)]


def _difference(each: Change) -> list[str]:
    factor = _column(each).factor
    spread = "" if each.stderr is None else f" ± {factor * each.stderr:.2g}"
    sigmas = MISSING if each.sigmas is None else f"{each.sigmas:.1f}"
    return [sigmas, *_values(each), f"{factor * each.difference:+.3g}{spread}", str(each.num_pairs or MISSING)]


def _values(each: Change) -> list[str]:
    return [f"{_column(each).factor * number.value:.5g}" for number in (each.before, each.after)]


def _column(each: Change) -> Column:
    """How people read the number."""
    number = each.before
    return quantity(number.metric) if number.metric == number.row.get("metric") else column(number.metric)


def _name(each: Change) -> str:
    """What the number is and of what, what else differs, then the settings, which may be cut."""
    key = _key(each.before)
    causes = f" [{', '.join(each.causes)}]" if each.causes else ""
    words = f"{_column(each).heading}, {_owner((*key[:SETTINGS_AT], None, *key[SETTINGS_AT + 1 :]))}{causes}"
    return _printable(" ".join(filter(None, [words, key[SETTINGS_AT]])), MAX_NAME)


def _owner(key: Key) -> str:
    """What a number is of."""
    named = dict(zip(NAMES, key, strict=False))
    said = [column(name).phrase.format(named[name]) for name in SAID if named[name] not in (None, "")]
    return _printable(", ".join(said))


def _printable(text: str, width: int | None = None) -> str:
    """Words of a stranger's records as one line that a terminal takes as text."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in text)
    return plain if width is None or len(plain) <= width else f"{plain[: width - 3]}..."


def _distance(each: Change) -> float:
    """How much a number moved, to sort by: in standard errors, else as a ratio; below 0 where it did not."""
    if each.is_equal:
        return -1
    if each.sigmas is not None:
        return each.sigmas
    return math.inf if each.ratio is None else abs(math.log(each.ratio))


def write_csv(path: Path, comparison: Comparison) -> None:
    """Every number in both, equal ones included, a row each. Raises UserError where the file cannot be written."""
    values = ("before", "after", "difference", "stderr", "standard_errors", "pairs", "ratio")
    try:
        with replacing(path) as scratch, scratch.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow([*NAMES, "metric", *values, "differs"])
            for each in sorted(comparison.changes, key=_distance, reverse=True):
                numbers = (each.before.value, each.after.value, each.difference, each.stderr, each.sigmas)
                tail = (each.num_pairs or None, each.ratio, " ".join(each.causes))
                writer.writerow([*_key(each.before), *numbers, *tail])
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
        print(text_of(comparison))

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())

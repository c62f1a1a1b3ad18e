"""Compare two results, folders or archives: which numbers moved, and by how many standard errors.

`harness.results.matched` matches the numbers; here they are shown.

    python -m harness.results.compare before.zip after.zip --csv moved.csv
"""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import UserError, exit_code, printable
from harness.files import replacing
from harness.results.columns import MISSING, as_cell, column, quantity
from harness.results.matched import (
    KEYS,
    MAX_NAMED,
    MAX_WIDTH,
    OTHER_SETTINGS,
    VALUES,
    compare,
)
from harness.results.pages import pairs_of_settings
from harness.results.sheet import aligned

WORDS = (
    "label", "task", "series", "batch_size", "prompt_len", "gen_len", "layer", "x",
    "experiment", "settings",
)  # fmt: skip
"""The columns of `NAMES` that people read; also the model if there are several."""
MAX_SHOWN = 40
OUTSIDE_MARK = "*"

Change = Mapping[Any, Any]
"""A row of the frame."""


def text_of(frame: pd.DataFrame) -> str:
    """For a terminal: the most significant changes, and the numbers of one of the two alone."""
    both = frame[frame["_merge"] == "both"]
    moved = both[both.distance >= 0]
    names = (*WORDS, "model") if both.model.nunique() > 1 else WORDS
    lines = [f"{len(both)} numbers in both: {len(both) - len(moved)} equal, {len(moved)} moved"]
    lines += _lines_on_settings(both)
    for name, side in (("A", "left_only"), ("B", "right_only")):
        alone = frame[frame["_merge"] == side]
        if len(alone):
            lines.append(f"only in {name}: {len(alone)} numbers, of")
            lines += _lines_on_owners(alone, names)
    if len(moved):
        outside = f"beyond the 95 % interval, marked {OUTSIDE_MARK}: {int(moved.outside.sum())}"
        lines.append(f"{outside} (of many numbers 1 in 20 by chance)")
    causes = Counter(itertools.chain.from_iterable(moved.causes))
    if causes:
        words = ", ".join(f"{cause} ({count})" for cause, count in causes.items())
        lines.append(f"of what moved differ: {words}")
    everywhere = {cause for cause, count in causes.items() if count == len(moved)}
    known = moved.standard_errors.notna()
    of_speed = moved.of_speed.astype(bool)
    for title, changes in (
        ("moved, by standard errors", moved[known]),
        ("moved, without a standard error", moved[~known & ~of_speed]),
        ("of speed, by ratio", moved[~known & of_speed]),
    ):
        if len(changes):
            lines += ["", *_table(title, changes.to_dict("records"), names, everywhere)]
    return "\n".join(lines)


def _lines_on_settings(both: pd.DataFrame) -> Iterator[str]:
    """How many numbers were matched across settings, and which settings changed."""
    by_settings = both[[OTHER_SETTINGS in causes for causes in both.causes]]
    if len(by_settings):
        pairs = itertools.chain.from_iterable(map(pairs_of_settings, by_settings.settings))
        changed = dict.fromkeys(pair for pair in pairs if " -> " in pair)
        words = f"with other settings: {len(by_settings)} ({', '.join(changed)})"
        yield _cut(printable(words))


def _lines_on_owners(alone: pd.DataFrame, names: Sequence[str]) -> Iterator[str]:
    """The first runs and places of numbers, but for parts of texts and tasks."""
    owners = {}
    for number in alone.to_dict("records"):
        if "[" not in str(number["task"]):
            owners[_owner(number, names)] = True
    for owner in itertools.islice(owners, MAX_NAMED):
        yield _cut(f"  {owner}")
    if len(owners) > MAX_NAMED:
        yield "  ..."


def _owner(number: Change, names: Iterable[str]) -> str:
    """The run and place of a number, as one line that a terminal shows as text, whoever wrote
    it."""
    words: list[str] = []
    for name in names:
        if not pd.isna(number[name]) and number[name] != "":
            words.append(column(name).phrase.format(number[name]))
    return printable(", ".join(words))


def _table(
    title: str, changes: Sequence[Change], names: Sequence[str], everywhere: set[str]
) -> Iterator[str]:
    """The first of the changes, a line each. everywhere: causes of all changes, which are not
    repeated."""
    header = ["standard errors", "A", "B", "B minus A", "pairs", "of"]
    if changes[0]["of_speed"]:
        header = ["B / A", "A", "B", "of"]
    lines = []
    for change in changes[:MAX_SHOWN]:
        words = f"{_heading(change, everywhere)}: {_owner(change, names)}"
        lines.append([*_numbers(change), words])
    yield from map(_cut, aligned(title, header, lines, words=["of"]).splitlines())
    if len(changes) > MAX_SHOWN:
        yield f"and {len(changes) - MAX_SHOWN} that moved less; --csv FILE has all"


def _heading(change: Change, everywhere: set[str]) -> str:
    """The quantity of a change, and what caused it."""
    causes = [cause for cause in change["causes"] if cause not in everywhere]
    heading = _quantity(change).heading
    return f"{heading} [{', '.join(causes)}]" if causes else heading


def _quantity(change: Change) -> Any:
    shown = column(change["metric"])
    return quantity(change["metric"]) if shown.digits is None else shown


def _numbers(change: Change) -> list[str]:
    """The numbers of a change as text, in the order of the header."""
    factor = _quantity(change).factor
    sides = [f"{factor * change['before']:.5g}", f"{factor * change['after']:.5g}"]
    if change["of_speed"]:
        return [_or_missing(change["ratio"], ".3g"), *sides]
    sigmas = _or_missing(change["standard_errors"], ".1f")
    if change["outside"]:
        sigmas += OUTSIDE_MARK
    difference = f"{factor * change['difference']:+.3g}"
    if not pd.isna(change["stderr"]):
        difference += f" ± {factor * change['stderr']:.2g}"
    return [sigmas, *sides, difference, _or_missing(change["pairs"], ".0f")]


def _or_missing(number: float | None, form: str) -> str:
    return MISSING if number is None or pd.isna(number) else format(number, form)


def _cut(line: str) -> str:
    line = line.rstrip()
    if len(line) <= MAX_WIDTH:
        return line
    is_rule = set(line) <= {"-", " "}
    return line[: MAX_WIDTH - 3] + ("---" if is_rule else "...")


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Every number in both, equal ones included, a row each.

    Raises UserError if the file cannot be written.
    """
    both = frame[frame["_merge"] == "both"]
    both = both[[*KEYS, *VALUES]].assign(differs=both.causes.map(" ".join))
    for name in KEYS:
        both[name] = [as_cell(key) if isinstance(key, str) else key for key in both[name]]
    try:
        with replacing(path) as scratch:
            both.to_csv(scratch, index=False, lineterminator="\n")
    except OSError as error:
        raise UserError(f"--csv {path}: cannot be written ({error.strerror or error})") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Print what moved; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.compare", description="What moved from A to B."
    )
    parser.add_argument("before", metavar="A", help="a results folder or an archive")
    parser.add_argument("after", metavar="B", help="another")
    parser.add_argument("--csv", metavar="FILE", help="write every number that both have")
    args = parser.parse_args(argv)

    def command() -> None:
        for name, place in (("A", args.before), ("B", args.after)):
            if not place:
                raise UserError(f"{name}=: name a results folder or an archive")
        frame = compare(Path(args.before), Path(args.after))
        if args.csv:
            write_csv(Path(args.csv), frame)
        print(text_of(frame))

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())

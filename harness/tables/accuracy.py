"""Accuracy for people: a line per method and its settings, a column per task and metric.

Runs of the same method and settings on different tasks join in one line. What else they were run with stands in their
settings where runs on the same task differ in it, and in the headings where the columns do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from harness.tables.columns import (
    DETECTABLE,
    DEVICE_FRAC,
    DIFFERENCE,
    DIFFERENCE_STDERR,
    LABEL,
    METRICS,
    MISSING,
    NUM_FEWSHOT,
    NUM_SAMPLES,
    OF_SOME_MODELS,
    RESIDENT_FRAC,
    SEQ_LEN,
    SETTINGS,
    SIZE,
    Column,
    TableRow,
    has_any,
    quantity,
    rank,
)
from harness.tables.depths import is_depth
from harness.tables.differences import show
from harness.tables.text import Sheet

SCORES = ("acc", "exact_match", "perplexity")
"""What every run on a task or text measures, as it does any metric of lm-eval's that `METRICS` does not list."""
BRIEF = (*SCORES, "kl_nats", "top1_agreement", "text_perplexity", "first_divergence", "repetition")
"""Those of `METRICS` that are shown in a terminal."""
BESIDE = (*OF_SOME_MODELS, DEVICE_FRAC, RESIDENT_FRAC)
"""Sizes that stand beside the one under which methods are compared, where a table has them."""
TOLD_IN_HEADINGS = (NUM_SAMPLES, NUM_FEWSHOT, SEQ_LEN)

Key = tuple[str, str]
"""Task and metric: a column."""


def sheets(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """The table of whole tasks and texts, that of the chunks of texts, and for each task of needles one by depth."""
    whole = [row for row in rows if not is_part(row)]
    chunks = [row for row in rows if is_part(row) and not is_depth(row)]
    depths = [row for row in rows if is_depth(row)]
    if whole:
        yield _sheet(title, whole)
    if chunks:
        yield _sheet(f"{title}, by range of tokens", chunks)
    for task in dict.fromkeys(row["task"].partition("[")[0] for row in depths):
        own = [row for row in depths if row["task"].startswith(f"{task}[")]
        yield _sheet(f"{title}, {task}: right answers (%) by length and depth of the needle", own, _place)


def is_part(row: TableRow) -> bool:
    """Whether a row is of a chunk of its text, or of some depths of its task."""
    return str(row["task"]).endswith("]")


def is_brief(row: TableRow) -> bool:
    """Whether a row is shown in a terminal."""
    return not is_part(row) and _is_among(BRIEF, row["metric"])


def _is_among(names: Sequence[str], metric: str) -> bool:
    """Whether a metric is one of `names`, whatever its filter, or not in `METRICS` at all."""
    name = metric.partition(",")[0]
    return name in names or name not in METRICS


class _Line(NamedTuple):
    """A line in the making. identity: method, label and settings."""

    identity: tuple[Any, ...]
    cells: dict[Key, TableRow]

    @property
    def order(self) -> tuple[Any, ...]:
        """The full cache first, then by label, size and length."""
        rows = self.cells.values()
        sizes = [row["size"] or 0 for row in rows]
        _, label, settings, *_ = self.identity
        return (min(sizes) < 1, label, min(sizes), max(row["seq_len"] or 0 for row in rows), settings or "")

    def texts(self, sizes: Sequence[Column], columns: Sequence[Key]) -> list[str]:
        """The cells as they are read; two numbers of a size are the range over the line."""
        _, label, settings, *_ = self.identity
        rows = [self.cells.get(key) for key in columns]
        ranges = [_range(column, [row for row in rows if row is not None]) for column in sizes]
        values = (MISSING if row is None else _value(row) for row in rows)
        return [label, settings or MISSING, *ranges, *values]


def _value(row: TableRow) -> str:
    difference = row.get(DIFFERENCE.name)
    stderr = row["stderr"] if difference is None else row.get(DIFFERENCE_STDERR.name)
    return show(quantity(row["metric"]), row["value"], stderr, difference, row.get(DETECTABLE.name))


def _range(column: Column, rows: Sequence[TableRow]) -> str:
    """A size, or the least and the largest where they differ as they are read."""
    sizes = [row[column.name] for row in rows if row.get(column.name) is not None]
    return "-".join(dict.fromkeys(map(column.show, (min(sizes), max(sizes))))) if sizes else MISSING


def _heading(task: str, metric: str) -> str:
    return f"{task} {quantity(metric).heading}"


def _place(task: str, metric: str) -> str:
    """Of some depths of a task: which."""
    return f"{int(metric):,} tokens, {task.partition(', ')[2].removesuffix(']')}"


def _sheet(title: str, rows: Sequence[TableRow], heading: Callable[[str, str], str] = _heading) -> Sheet:
    lines = sorted(_lines(rows), key=lambda line: line.order)
    cells: dict[Key, list[TableRow]] = {}
    for row in rows:
        cells.setdefault((row["task"], row["metric"]), []).append(row)
    columns = sorted(cells, key=lambda key: rank(key[1]))
    conditions = _conditions(cells)
    headings = {key: heading(*key) + conditions[key] for key in columns}
    counted = (size for size in BESIDE if has_any(rows, size))
    sizes = [SIZE, *counted]
    header = [*(column.heading for column in (LABEL, SETTINGS, *sizes)), *headings.values()]
    scores = [heading for (_, metric), heading in headings.items() if _is_among(SCORES, metric)]
    return Sheet(title, header, [line.texts(sizes, columns) for line in lines], scores)


def _lines(rows: Sequence[TableRow]) -> list[_Line]:
    """A run joins the first line of its method and settings in which its cells are free. Where a table says no
    settings, as those of an older version do not, each run is a line of its own."""
    runs: dict[tuple[Any, ...], dict[Key, TableRow]] = {}
    for row in rows:
        settings = row.get("settings")
        identity = (row["method"], row["label"], settings, row["run_id"] if settings is None else None)
        runs.setdefault((identity, row["run_id"]), {})[row["task"], row["metric"]] = row
    lines: list[_Line] = []
    for (identity, _), cells in runs.items():
        free = (line for line in lines if line.identity == identity and line.cells.keys().isdisjoint(cells))
        line = next(free, None)
        if line is None:
            lines.append(line := _Line(identity, {}))
        line.cells.update(cells)
    return lines


def _conditions(cells: Mapping[Key, Sequence[TableRow]]) -> dict[Key, str]:
    """Words for the columns' headings: conditions that all cells of a column share, where columns differ in them."""
    words = dict.fromkeys(cells, "")
    for condition in TOLD_IN_HEADINGS:
        values = {key: {row.get(condition.name) for row in rows} for key, rows in cells.items()}
        shared = {key: found.pop() for key, found in values.items() if len(found) == 1 and found != {None}}
        if len(set(shared.values())) > 1:
            for key, value in shared.items():
                words[key] += f", {condition.phrase.format(value)}"
    return words

"""Numbers beside numbers: the paper's beside ours, one model's beside another's, and the main
results of all."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from typing import TypeVar

from harness.paper.costmodel.published import FIGURES as TIMED_FIGURES
from harness.paper.costmodel.published import PaperBar, quantity
from harness.results import board_page, columns, metrics
from harness.results.board_rows import ORACLES
from harness.results.columns import TableRow
from harness.results.metrics import ASKED_SIZE, MISSING
from harness.results.pages import is_brief
from harness.results.sheet import Sheet

T = TypeVar("T")
POINT = ("model", "series", "x_name", "x", "metric")
"""What names a published number, and a row of an analysis table."""
HEADER = (
    "model", "series", "setup", "metric", "published", "kind", "ours", "ours / published", "note",
)  # fmt: skip
"""Headings of published numbers; a column without any number is left out."""
MAIN_SIZE = 0.10
"""Of the board, the size that the overview shows, or the nearest."""
BEST = 5
"""So many methods of that size the overview shows, the closest to the full cache first; then
these:"""
ALWAYS = ("infinigen", "h2o", "streaming")
BASE = "offload"
SYSTEMS = (BASE, "offload+int4", "offload+h2o", "infinigen", "ideal")
"""Systems of which the overview shows times."""

Key = tuple[str, str]
"""A label, and the settings that tell its runs apart."""


# The paper's


def published_sheet(figure: str, rows: Sequence[TableRow]) -> Sheet | None:
    """The paper's numbers for a figure, with ours beside them where `rows` holds that setup.

    None where nothing is known. Numbers of speed are made of timed runs by the same arithmetic as
    the cost model's calibration.
    """
    lines = []
    for number in columns.published_rows():
        if number["figure"] == figure:
            lines.append(_published_line(number, rows))
    if not lines:
        return None
    known = [not {MISSING, ""}.issuperset(column) for column in zip(*lines, strict=True)]
    shown = [list(compress(line, known)) for line in lines]
    return Sheet("published", list(compress(HEADER, known)), shown)


def _published_line(number: Mapping[str, str], rows: Sequence[TableRow]) -> list[str]:
    series, metric = number["series"].replace("_", " "), number["metric"].replace("_", " ")
    setup = f"{number['x_name']} {number['x']}".strip().replace("_", " ") or "all"
    value = f"{number['value']} {number['unit']}".strip()
    ours = our_value(number, rows)
    beside = [MISSING, MISSING]
    if ours is not None:
        beside = [f"{ours:.4g}", f"{ours / float(number['value']):.2f}"]
    named = [number["model"], series, setup, metric]
    return [*named, value, number["kind"], *beside, number["note"]]


def our_value(number: Mapping[str, str], rows: Sequence[TableRow]) -> float | None:
    """The published quantity from our rows.

    None where a row that it needs is absent, emulated, or there twice.
    """
    try:
        if number["figure"] in TIMED_FIGURES:
            return quantity(number, lambda cell: _timed_row(rows, cell))
        point = columns.typed({name: number[name] for name in POINT})
        (row,) = (row for row in rows if _holds(row, point))
        value: float | None = row["value"]
        return value
    except ValueError:  # no row or several
        return None


def _timed_row(rows: Sequence[TableRow], bar: PaperBar) -> TableRow:
    """The row of a bar of the paper; ValueError where there is none, or several."""
    wanted = {"model": bar.model, "label": bar.label, "batch_size": bar.batch_size}
    found = []
    for row in rows:
        total_len = row["prompt_len"] + row["gen_len"]
        is_alike = row["source"] != "emulated" and total_len == bar.total_len
        if is_alike and _holds(row, wanted):
            found.append(row)
    (row,) = found
    return row


def _holds(row: TableRow, wanted: TableRow) -> bool:
    """Whether a row has all of these values."""
    return all(row.get(name) == value for name, value in wanted.items())


# Models side by side


def side_by_side(models: Mapping[str, Sequence[TableRow]]) -> Sheet | None:
    """The runs and quantities that more than one model has, a line per method; None
    without any.

    models: by name, the rows of accuracy tables.
    """
    scores: dict[str, dict[str, dict[Key, str]]] = {}
    for model, rows in models.items():
        scores[model] = {}
        for name, key, text in _scores(rows):
            scores[model].setdefault(name, {})[key] = text
    quantities = _shared(scores.values())
    keys_of_models: list[list[Key]] = []
    for of_model in scores.values():
        found: list[Key] = []
        for name in quantities:
            found += of_model.get(name, ())
        keys_of_models.append(found)
    keys = _shared(keys_of_models)
    if not keys:
        return None
    header = [metrics.LABEL.heading, metrics.SETTINGS.heading]
    lines = list(map(list, keys))
    for name in quantities:
        for model, of_model in scores.items():
            header.append(f"{name}, {model}")
            texts = of_model.get(name, {})
            for key, line in zip(keys, lines, strict=True):
                line.append(texts.get(key, MISSING))
    return Sheet(" and ".join(scores), header, lines)


def _shared(lists: Collection[Iterable[T]]) -> list[T]:
    """The items of more than one list, in their order."""
    counts = Counter(chain.from_iterable(map(set, lists)))
    return [item for item in dict.fromkeys(chain.from_iterable(lists)) if counts[item] > 1]


def _scores(rows: Sequence[TableRow]) -> Iterator[tuple[str, Key, str]]:
    """(quantity, key, text) of every score."""
    scored = [row for row in rows if "task" in row and "metric" in row and is_brief(row)]
    for row in sorted(scored, key=lambda row: metrics.rank(row["metric"])):
        shown = metrics.quantity(row["metric"])
        key = row["label"], row.get("settings") or MISSING
        yield f"{row['task']} {shown.heading}", key, shown.show(row["value"], row["stderr"])


# Main results


def main_scores(rows: Sequence[TableRow]) -> Sheet | None:
    """The overview's table of a board's rows. None without a compared method.

    It has the oracle, the methods closest to the full cache at `MAIN_SIZE` and on the shortest
    windows, and those of the paper.
    """
    compared = [row for row in board_page.first_board(rows) if not row["apart"]]
    if not compared:
        return None
    seq_len = min(columns.values(compared, "seq_len"))
    of_length = [row for row in compared if row["seq_len"] == seq_len]
    sizes = set(columns.values(of_length, ASKED_SIZE.name))
    main_size = min(sizes, key=lambda size: abs(size - MAIN_SIZE))
    shown = []
    count = 0
    for row in of_length:  # the closest first
        if row[ASKED_SIZE.name] != main_size:
            continue
        is_oracle = row["method"] in ORACLES
        count += not is_oracle
        is_first_oracle = row["method"] == ORACLES[0] and row["ratio"] == 1
        if is_first_oracle or (not is_oracle and (count <= BEST or row["method"] in ALWAYS)):
            shown.append(row)
    words = f"closest to the full cache at a size of {ASKED_SIZE.show(main_size)} %"
    return board_page.methods_sheet(f"{compared[0]['over']}: {words}", shown)


def main_times(tables: Iterable[Sequence[TableRow]]) -> Sheet | None:
    """The overview's table of times: seconds of a run, and the speedup over offload."""
    lines = []
    for rows in tables:
        timed = {row["label"]: row for row in columns.having(rows, "total_s")}
        if BASE not in timed:
            continue
        for label in SYSTEMS:
            if label in timed:
                row = timed[label]
                tokens = f"{row['prompt_len']:,.0f} + {row['gen_len']:.0f} tokens"
                run = f"{row['model']}, batch {row['batch_size']:.0f}, {tokens}, {row['source']}"
                speedup = timed[BASE]["total_s"] / row["total_s"]
                lines.append([label, run, f"{row['total_s']:.1f}", f"{speedup:.1f}"])
    header = ["system", "run", "prefill and decode (s)", "speedup over offload"]
    return Sheet("Time of a run", header, lines) if lines else None

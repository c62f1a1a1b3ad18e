"""Numbers beside numbers: the paper's beside ours, one model's beside another's, and the main
results of all."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import TypeVar

from harness.paper.costmodel.published import FIGURES as TIMED_FIGURES
from harness.paper.costmodel.published import PaperCell, quantity
from harness.results import columns
from harness.results.columns import ASKED_SIZE, BOARD_TASKS, KL, MISSING, SIZE, STEP, TOP1, TableRow
from harness.results.leaderboard import REFERENCES, is_best
from harness.results.pages import Sheet, is_brief

T = TypeVar("T")
POINT = ("model", "series", "x_name", "x", "metric")
"""What names a published number, and a row of an analysis table."""
MAIN_SIZE = 0.16
"""Of the leaderboard, the size that the overview shows, or the nearest."""
BEST = 5
"""So many methods of that size the overview shows, the closest to the full cache first; then
these:"""
ALWAYS = ("infinigen", "h2o", "streaming")
SYSTEMS = ("offload", "offload+int4", "offload+h2o", "infinigen", "ideal")
"""Systems of which the overview shows times."""

Key = tuple[str, str]
"""A label, and the size or the settings that tell its runs apart."""


def published_sheet(figure: str, rows: Sequence[TableRow]) -> Sheet | None:
    """The paper's numbers for a figure, with ours beside them where `rows` holds that model and
    setup; None where nothing is known. Numbers of speed are made of timed runs by the same
    arithmetic as the cost model's calibration."""
    lines = []
    for line in columns.published_rows():
        if line["figure"] == figure:
            setup = f"{line['x_name']} {line['x']}".strip() or "all"
            value = f"{line['value']} {line['unit']}".strip()
            ours = our_value(line, rows)
            beside = (
                [MISSING, MISSING]
                if ours is None
                else [f"{ours:.4g}", f"{ours / float(line['value']):.2f}"]
            )
            words = [each.replace("_", " ") for each in (line["series"], setup, line["metric"])]
            lines.append([line["model"], *words, value, line["kind"], *beside, line["note"]])
    header = [
        "model",
        "series",
        "setup",
        "metric",
        "published",
        "kind",
        "ours",
        "ours / published",
        "note",
    ]
    known = [
        any(line[column] not in (MISSING, "") for line in lines) for column in range(len(header))
    ]
    kept = [list(compress(line, known)) for line in (header, *lines)]
    return Sheet("published", kept[0], kept[1:]) if lines else None


def our_value(line: Mapping[str, str], rows: Sequence[TableRow]) -> float | None:
    """The published quantity from our rows; None where a row that it needs is absent, emulated, or
    there twice."""

    def timed(cell: PaperCell) -> TableRow:
        wanted = {"model": cell.model, "label": cell.label, "batch_size": cell.batch_size}
        (row,) = (
            row
            for row in rows
            if row["source"] != "emulated"
            and wanted.items() <= row.items()
            and row["prompt_len"] + row["gen_len"] == cell.total_len
        )
        return row

    try:
        if line["figure"] in TIMED_FIGURES:
            return quantity(line, timed)
        point = columns.typed({name: line[name] for name in POINT})
        (row,) = (row for row in rows if all(row.get(name) == point[name] for name in POINT))
        return row["value"]
    except ValueError:  # no row or several
        return None


def side_by_side(models: Mapping[str, Sequence[TableRow]]) -> Sheet | None:
    """The runs and quantities that more than one model has, a line per method and size; None
    without any.

    models: by name, the rows of accuracy tables or of leaderboards.
    """
    scores: dict[str, dict[str, dict[Key, str]]] = {name: {} for name in models}
    for model, rows in models.items():
        for name, key, cell in _cells(rows):
            scores[model].setdefault(name, {})[key] = cell
    quantities = _shared([list(own) for own in scores.values()])
    keys = _shared(
        [[key for name in quantities for key in own.get(name, ())] for own in scores.values()]
    )
    if not keys:
        return None
    header = [columns.LABEL.heading, columns.SETTINGS.heading]
    header += [f"{name}, {model}" for name in quantities for model in scores]
    lines = [
        [
            *key,
            *(
                own.get(name, {}).get(key, MISSING)
                for name in quantities
                for own in scores.values()
            ),
        ]
        for key in keys
    ]
    return Sheet(" and ".join(scores), header, lines)


def _shared(lists: Sequence[Sequence[T]]) -> list[T]:
    """The items of more than one list, in their order."""
    distinct = dict.fromkeys(item for items in lists for item in items)
    return [item for item in distinct if sum(item in items for items in lists) > 1]


def _cells(rows: Sequence[TableRow]) -> Iterator[tuple[str, Key, str]]:
    """(quantity, key, cell) of every score."""
    for row in rows:
        if ASKED_SIZE.name in row and is_best(row):
            size = (
                MISSING
                if row[ASKED_SIZE.name] is None
                else f"{ASKED_SIZE.show(row[ASKED_SIZE.name])} %"
            )
            for shown in (KL, TOP1, *BOARD_TASKS):
                if row.get(shown.name) is not None:
                    stderr = row.get(f"{shown.name}_stderr")
                    yield shown.heading, (row["label"], size), shown.show(row[shown.name], stderr)
    scored = [row for row in rows if "task" in row and is_brief(row)]
    for row in sorted(scored, key=lambda row: columns.rank(row["metric"])):
        shown = columns.quantity(row["metric"])
        key = row["label"], row.get(columns.SETTINGS.name) or MISSING
        yield f"{row['task']} {shown.heading}", key, shown.show(row["value"], row["stderr"])


def main_scores(rows: Sequence[TableRow]) -> Sheet | None:
    """The overview's table of a leaderboard: the full cache, the upper bound, the methods closest
    to the full cache at `MAIN_SIZE`, and those of the paper. None without a row of some size."""
    scored = [row for row in rows if row.get(KL.name) is not None and row[SIZE.name] is not None]
    known = [row for row in scored if is_best(row)]
    sizes = {row[ASKED_SIZE.name] for row in known} - {None}
    if not sizes:
        return None
    size = min(sizes, key=lambda each: abs(each - MAIN_SIZE))
    sized = sorted(
        (row for row in known if row[ASKED_SIZE.name] == size), key=lambda row: row[KL.name]
    )
    full = [row for row in known if row["method"] == "full"][:1]
    bound = [row for row in sized if row["method"] == REFERENCES["upper"]]
    methods = [row for row in sized if row not in bound and abs(row[SIZE.name] - size) < 0.01]
    paper = [row for row in methods[BEST:] if row["method"] in ALWAYS]
    shown = [column for column in (SIZE, KL, *BOARD_TASKS, STEP) if columns.has_any(sized, column)]
    lines = [
        [row["label"], *(column.show(row.get(column.name)) for column in shown)]
        for row in (*full, *bound, *methods[:BEST], *paper)
    ]
    title = f"{known[0]['model']}: closest to the full cache at a size of {ASKED_SIZE.show(size)} %"
    return Sheet(title, ["method", *(column.heading for column in shown)], lines)


def main_times(tables: Iterable[Sequence[TableRow]]) -> Sheet | None:
    """The overview's table of times: seconds of a run and the speedup over offload, of each
    table."""
    lines = []
    for rows in tables:
        seconds = {row["label"]: row for row in rows if row.get("total_s") is not None}
        for row in (seconds[label] for label in SYSTEMS if {label, SYSTEMS[0]} <= set(seconds)):
            shape = f"batch {row['batch_size']:.0f}, {row['prompt_len']:,.0f} + {row['gen_len']:.0f} tokens"
            speedup = seconds[SYSTEMS[0]]["total_s"] / row["total_s"]
            run = f"{row['model']}, {shape}, {row['source']}"
            lines.append([row["label"], run, f"{row['total_s']:.1f}", f"{speedup:.1f}"])
    header = ["system", "run", "prefill and decode (s)", "speedup over offload"]
    return Sheet("Time of a run", header, lines) if lines else None

"""Rows as people read them: rounded, with units and standard errors, in Markdown, in a terminal, or in the report.

Rows of a record and those read from a CSV give the same sheets. Seconds become ms and bytes GiB here, and only here.
"""

from collections.abc import Iterator, Sequence

from harness.tables import accuracy, analysis, board, speed
from harness.tables.columns import MISSING, TableRow, published_rows
from harness.tables.differences import NOTE
from harness.tables.text import Sheet, aligned, folded, markdown

SETTINGS_NOTE = (
    "Settings are those of a method that three quarters of its runs do not share, and of a run those that three "
    "quarters of the runs on its task do not."
)
NOTES = {
    "accuracy": f"± is one standard error, over questions or windows. {NOTE} "
    "KV read is the share of the full cache that a decode row reads, which crosses the link where the cache is "
    "offloaded; device read is what it reads in device memory, an index included; on device is what the method keeps "
    "there, as a share of the full cache at the end. Two numbers are a range over a line's columns. "
    f"{SETTINGS_NOTE} What columns differ in stands in the headings.",
    "latency": "KV read is the share of the full cache that a decode row reads, device read (%) what it reads in "
    "device memory, an index included. To device and to host is what crossed the link in all decode steps, device read "
    "(GiB) what was read in device memory in them. On device is what the cache and the method keep there, buffers for "
    f"fetched rows included. {SETTINGS_NOTE}",
    "board": "All at the same share of the full cache's bytes over the link, as far as they can; link (%) is what was "
    "read, device read what was read in device memory, on device what the method keeps there. Bold is the best of that "
    "size, bounds aside. ± is one standard error, over windows or contexts, of what is compared with the full cache on "
    f"the same windows or questions: KL, agreement, and the differences. {NOTE} "
    "The decode step runs over an emulated link.",
    "analysis": "± is one standard error over heads (over layers, where a number is of the whole model). Of many "
    "values of x a few are shown; the CSV has all.",
}
"""By shape of row, what the columns of its tables mean."""
MODELLED_NOTE = (
    "Predicted by the cost model (`harness/paper/costmodel`), not measured. KV read is the share of the full cache "
    "that a decode row reads. The segments (attention to other) are those of one block in the last decode step."
)
SHAPES = {"latency": speed.sheets, "accuracy": accuracy.sheets, "analysis": analysis.sheets, "board": board.sheets}


def sheets_of(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """A table per model, source and shape of row; chunks of texts below, each quantity of an analysis apart."""
    groups: dict[tuple[str, str], list[TableRow]] = {}
    for row in rows:
        groups.setdefault((_title(row), _shape(row)), []).append(row)
    for title in dict.fromkeys(title for title, _ in groups):
        for shape, make in SHAPES.items():
            if (title, shape) in groups:
                yield from make(title, groups[title, shape])


def render_markdown(experiment: str, rows: Sequence[TableRow]) -> str:
    """The whole `.md` file; what the paper gives stands at its end."""
    note = NOTES[_shape(rows[0]) if rows else "accuracy"]
    return markdown(experiment, note, [*sheets_of(rows), *_published(experiment)])


def render_modelled(figure: str, rows: Sequence[TableRow]) -> str:
    """The whole `.md` file of what the cost model predicts of a figure: a table per platform and model."""
    return markdown(f"{figure}, modelled", MODELLED_NOTE, sheets_of(rows))


def render_terminal(rows: Sequence[TableRow]) -> str:
    """The same tables in columns aligned by blanks, of what matters most; "" without rows."""
    shown = [
        speed.brief(row) if _shape(row) == "latency" else row
        for row in rows
        if _shape(row) != "accuracy" or accuracy.is_brief(row)
    ]
    return "\n\n".join(aligned(part) for sheet in sheets_of(shown) for part in folded(sheet))


def _title(row: TableRow) -> str:
    where = (
        f"{row['model']} on {row['platform']}" if row["source"] == "modelled" and "platform" in row else row["model"]
    )
    return f"{where}, {row['source']}"


def _shape(row: TableRow) -> str:
    marks = {"series": "analysis", "metric": "accuracy", "asked_size": "board"}
    return next((shape for mark, shape in marks.items() if mark in row), "latency")


def _published(experiment: str) -> Iterator[Sheet]:
    """What is known of the paper's figure or table of this name."""
    rows = [row for row in published_rows() if row["figure"] == experiment]
    if rows:
        header = ["model", "series", "x_name", "x", "metric", "value", "kind"]
        yield Sheet("published", header, [[row[name] or MISSING for name in header] for row in rows])

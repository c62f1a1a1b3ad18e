"""`${on_the_leaderboard:...}`: runs of sweeps that measure further what the leaderboard has
found."""

from typing import Any

from harness.results.columns import TableRow, read_table
from harness.results.fronts import has_its_size_on_text
from harness.results.leaderboard import NAME, is_best
from harness.settings.paths import table_to_read
from harness.settings.schema import options


def cells_of_tasks(results_dir: str, size: float | None = None) -> list[list[Any]]:
    """`${on_the_leaderboard:${results_dir}}` in a sweep: [method, size, exempt layers] of each row
    that a page shows.

    size: takes the place of every asked size. A number of exempt layers that is not a method's
    best, and with which it cannot have its size, is left out. UserError for a damaged table.
    """
    path = table_to_read(results_dir, f"{NAME}.csv")
    rows = read_table(path) if path else []
    methods = options("method")
    cells = []
    for row in rows:
        if row["method"] in methods and _is_measured_further(row):
            asked = row["asked_size"]
            if asked is not None:
                asked = f"nearest:{size or asked}"
            cell = [row["method"], asked, row["exempt_layers"]]
            if cell not in cells:
                cells.append(cell)
    return cells


def _is_measured_further(row: TableRow) -> bool:
    if not _is_of_a_preset(row):
        return False
    return is_best(row) or bool(row["exempt_choice"] and has_its_size_on_text(row))


def _is_of_a_preset(row: TableRow) -> bool:
    """Whether a row is of a file of `conf/method` as it is, with a number of exempt layers."""
    if row["exempt_layers"] is None:
        return False
    return row["asked_size"] is None or not row["codec"]  # a codec's preset has no size to ask for

"""A value against the full cache's, for people: the difference in brackets, or that none was seen."""

from harness.records.samples import TWO_SIDED_5
from harness.tables.columns import Column

NOTE = (
    "In brackets stands the difference to the full cache on the same questions or windows, ± its standard error; "
    "*no difference ≥ x* where its 95 % interval holds zero: one of x would have been seen, four times in five. The CSV "
    "has it in numbers, and the answers that flipped."
)


def show(
    column: Column, value: float | None, stderr: float | None, difference: float | None, detectable: float | None
) -> str:
    """`value` with its difference, as in "37.5 (-50.0 ± 6.1)" or "62.5 (no difference ≥ 8.2)".

    stderr: of the difference; where there is none, of the value.
    """
    if difference is None:
        return column.show(value, stderr)
    if stderr is not None and detectable is not None and abs(difference) <= TWO_SIDED_5 * stderr:
        return f"{column.show(value)} (no difference ≥ {column.show(detectable)})"
    return f"{column.show(value)} ({'+' * (difference > 0)}{column.show(difference, stderr)})"

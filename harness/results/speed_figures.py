"""The rows of each figure of speed. One timed cell serves several figures.

Each model and machine has a sweep of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from harness.results.columns import TableRow, grouped, values

TableRows = Sequence[TableRow]
MACHINE = ("model", "platform", "source")
SHAPE = (*MACHINE, "batch_size", "prompt_len", "gen_len")


def _without(names: Sequence[str], axis: str) -> Callable[[TableRow], Any]:
    return itemgetter(*(name for name in names if name != axis))


def _widest_sweep(rows: TableRows, axis: str, least: int = 1) -> TableRows:
    """The rows of the setups with the most values of `axis` on their machine, and `least`.

    A setup is all of a shape but `axis`.
    """
    setup_of, machine_of = _without(SHAPE, axis), _without(MACHINE, axis)
    num_values, most = {}, {}
    for setup, of_setup in grouped(rows, setup_of).items():
        num_values[setup] = len(set(values(of_setup, axis)))
    for machine, of_machine in grouped(rows, machine_of).items():
        most[machine] = max(num_values[setup_of(row)] for row in of_machine)
    found = []
    for row in rows:
        wanted = max(least, most[machine_of(row)])
        if num_values[setup_of(row)] == wanted:
            found.append(row)
    return found


def _largest(rows: TableRows, axis: str) -> TableRows:
    """The rows with the largest value of `axis` in each setup."""
    setup_of = _without(SHAPE, axis)
    largest = {}
    for setup, of_setup in grouped(rows, setup_of).items():
        largest[setup] = max(values(of_setup, axis))
    return [row for row in rows if row[axis] == largest[setup_of(row)]]


OF_FIGURE: Mapping[str, Callable[[TableRows], TableRows]] = {
    "fig14": lambda rows: _largest(_widest_sweep(rows, "batch_size"), "batch_size"),
    "fig15": lambda rows: _widest_sweep(rows, "batch_size"),
    "fig16a": lambda rows: _widest_sweep(rows, "prompt_len"),
    "fig16b": lambda rows: _widest_sweep(rows, "model", least=2),
    "fig18": lambda rows: _largest(_widest_sweep(rows, "prompt_len"), "prompt_len"),
}
"""By figure, the rows of `latency` that it draws. As in the paper, 14 has the largest batch of 15,
18 the longest prompt of 16a."""

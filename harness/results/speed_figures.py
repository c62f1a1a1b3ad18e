"""The rows of each figure of speed. One timed cell serves several figures.

Each model and machine has a sweep of its own.
"""

from collections.abc import Iterator, Sequence

import pandas as pd

from harness.results.columns import TableRow

MACHINE = ("model", "platform", "source")
SHAPE = (*MACHINE, "batch_size", "prompt_len", "gen_len")


def _widest_sweep(cells: pd.DataFrame, axis: str, least: int = 1) -> pd.DataFrame:
    """The cells of the setups with the most values of `axis` on their machine, and `least`.

    A setup is all of a shape but `axis`.
    """
    setup = [name for name in SHAPE if name != axis]
    machine = [cells[name] for name in MACHINE if name != axis]
    num_values = cells.groupby(setup, dropna=False)[axis].transform("nunique")
    most = num_values.groupby(machine, dropna=False).transform("max")
    return cells[num_values == most.clip(lower=least)]


def _largest(cells: pd.DataFrame, axis: str) -> pd.DataFrame:
    """The cells with the largest value of `axis` in each setup."""
    setup = [name for name in SHAPE if name != axis]
    return cells[cells[axis] == cells.groupby(setup, dropna=False)[axis].transform("max")]


def figures(rows: Sequence[TableRow]) -> Iterator[tuple[str, list[TableRow]]]:
    """Each figure with the rows of `latency` that it draws. As in the paper, 14 has the largest
    batch of 15, 18 the longest prompt of 16a."""
    cells = pd.DataFrame(rows, columns=list(SHAPE))
    batches = _widest_sweep(cells, "batch_size")
    prompts = _widest_sweep(cells, "prompt_len")
    models = _widest_sweep(cells, "model", least=2)
    for figure, found in (
        ("fig14", _largest(batches, "batch_size")),
        ("fig15", batches),
        ("fig16a", prompts),
        ("fig16b", models),
        ("fig18", _largest(prompts, "prompt_len")),
    ):
        yield figure, [rows[number] for number in found.index]

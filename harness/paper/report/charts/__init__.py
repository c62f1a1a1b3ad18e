"""The charts that entries of `plots/registry.yaml` name: each makes them of the rows of the entry's tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from harness.paper.report.charts import bars, boards, named, scores, sweeps, times
from harness.paper.report.charts.chart import Chart
from harness.tables.columns import TableRow, typed

Rows = Sequence[Mapping[str, str]]
"""As a CSV has them."""


def _of_numbers(make: Callable[[list[TableRow]], Iterator[Chart]]) -> Callable[[Rows], Iterator[Chart]]:
    return lambda rows: make([typed(row) for row in rows])


CHARTS: Mapping[str, Callable[[Rows], Iterator[Chart]]] = {
    "size": _of_numbers(scores.by_size),
    "index": _of_numbers(scores.by_index),
    "step": _of_numbers(scores.by_step),
    "decoded": _of_numbers(scores.decoded),
    "leaderboard": _of_numbers(boards.leaderboard),
    "frontier": _of_numbers(boards.frontier),
    "pairs": _of_numbers(named.pairs),
    "changes": _of_numbers(named.changes),
    "setting": _of_numbers(sweeps.by_setting),
    "length": _of_numbers(sweeps.by_length),
    "needles": _of_numbers(sweeps.needles),
    "times": times.times,
    "run": bars.run_times,
    "block": bars.block_times,
    "models": bars.by_model,
}

"""The share of right answers by the depth at which a needle lies, a fifth of the prompt each, and by length in tokens.

A row's task says both, such as `niah_single_1[2048, 20-40 %]`; its metric is that of the length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.records.samples import clustered_stderr
from harness.tables.columns import TableRow

PARTS = 5
WIDTH = 100 // PARTS


def depth_rows(task: str, samples: Sequence[Mapping[str, Any]]) -> Iterator[TableRow]:
    """A row for each length and fifth of which there are questions; none for a task without needles."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in samples:
        if sample.get("depth") is not None:
            part = min(int(PARTS * sample["depth"]), PARTS - 1)
            found[sample["length"], part].append(sample[str(sample["length"])])
    for (length, part), values in sorted(found.items()):
        yield {
            "task": f"{task}[{length}, {WIDTH * part}-{WIDTH * (part + 1)} %]",
            "metric": str(length),
            "value": sum(values) / len(values),
            "stderr": clustered_stderr(values, range(len(values))),
            "num_samples": len(values),
        }


def is_depth(row: TableRow) -> bool:
    """Whether a row is of some depths only."""
    return str(row["task"]).endswith(" %]")

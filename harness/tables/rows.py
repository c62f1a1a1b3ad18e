"""The rows of one record: of latency one, of an analysis its points, else one for each task and metric."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from harness.records.baseline import Baselines, of_windows
from harness.records.samples import Difference
from harness.settings.experiment import foreign_settings
from harness.tables.columns import OF_SOME_MODELS, TableRow, todays_names
from harness.tables.depths import depth_rows

Record = Mapping[str, Any]

OLDER_CHUNK = 256
ROUND = str.maketrans("[]", "()")
CONDITIONS = (
    "num_samples", "num_fewshot", "seq_len", "size", "size_artifact", "device_frac", "resident_frac",
    *(column.name for column in OF_SOME_MODELS),
)  # fmt: skip
"""What a record keeps beside the metrics of a task and the table has columns for."""


def rows_of(record: Record, full: Baselines) -> list[TableRow]:
    """The rows of one finished record: one for latency, an analysis' points, else one per task and metric, compared
    with `full`, and one per chunk or depth. What tells them from the rows of other records, `settings`, is
    `lines.tell_apart`'s to say.

    A chunk's row has its range of tokens in the task, such as `offline[256:512]`; that of a depth is `depth_rows`'.
    A metric that was not measured (None) has no row.
    """
    config = record["config"]
    common = {
        "experiment": record["experiment"],
        "model": config["model"]["name"],
        "method": config["method_name"],
        "label": config["label"],
        "run_id": record["run_id"],
    }
    makers = ROWS | {"accuracy": partial(_accuracy_rows, full=full)}
    return list(makers[record["table"]](record, common))


def _latency_rows(record: Record, common: TableRow) -> Iterator[TableRow]:
    yield common | todays_names(record["metrics"])


def _analysis_rows(record: Record, common: TableRow) -> Iterator[TableRow]:
    for point in record["metrics"]["points"]:
        yield common | {"source": record["metrics"]["source"]} | dict(point)


def _accuracy_rows(record: Record, common: TableRow, full: Baselines) -> Iterator[TableRow]:
    for name, entries in record["metrics"].items():
        context = _context(record, name, entries)
        for values in _values(entries):
            yield common | context | values | _compared(full.difference(record, name, values["metric"]))
        for row in depth_rows(context["task"], record.get("samples", {}).get(name, ())):
            yield common | context | row
    yield from _chunk_rows(record, common)


def _values(entries: Mapping[str, Any]) -> Iterator[TableRow]:
    for metric, value in entries.items():
        if _is_metric(metric) and isinstance(value, int | float):
            yield {"metric": metric, "value": value, "stderr": entries.get(f"{metric}_stderr")}


def _chunk_rows(record: Record, common: TableRow) -> Iterator[TableRow]:
    if not record.get("chunks"):
        return
    ((name, entries),) = record["metrics"].items()
    context = _context(record, name, entries)
    for chunk in map(_as_today, record["chunks"]):
        task = {"task": f"{context['task']}[{chunk['first']}:{chunk['stop']}]"}
        for values in _values(chunk["metrics"]):
            paired = chunk.get("windows", ()) if values["metric"] == "perplexity" else ()
            yield common | context | task | values | _compared(of_windows(record, paired))


def _as_today(chunk: Mapping[str, Any]) -> Mapping[str, Any]:
    """A chunk of a text; older records number those of 256 tokens and have their perplexity alone."""
    if "first" in chunk:
        return chunk
    first = OLDER_CHUNK * chunk["chunk"]
    metrics = {name: chunk[name] for name in ("perplexity", "perplexity_stderr")}
    return {"first": first, "stop": first + OLDER_CHUNK, "metrics": metrics}


ROWS: dict[str, Callable[[Record, TableRow], Iterator[TableRow]]] = {
    "latency": _latency_rows, "analysis": _analysis_rows,
}  # fmt: skip
"""The rows of a record, by its shape of table, where nothing is compared."""


def _compared(difference: Difference | None) -> TableRow:
    """The cells of `columns.COMPARED`."""
    if difference is None:
        return {}
    value, stderr, flips = difference.value, difference.stderr, difference.flips
    cells = {"difference": value, "difference_stderr": stderr, "detectable": difference.detectable}
    return cells if flips is None else cells | {"gained": flips.gained, "lost": flips.lost, "mcnemar_p": flips.p}


def _context(record: Record, name: str, entries: Mapping[str, Any]) -> TableRow:
    """Task, or file name of a text, and the conditions under which its values hold. Brackets of the name are round in
    the table, where square ones say which part of a text or task a row is of."""
    config = record["config"]
    seq_len = None if "seq_len" in foreign_settings(config["kind"]) else config["seq_len"]
    shared = {"seq_len": seq_len, "source": "measured"}
    conditions = {key: entries.get(key, shared.get(key)) for key in CONDITIONS}
    return shared | {"task": Path(name).name.translate(ROUND)} | conditions


def _is_metric(name: str) -> bool:
    """Shares of the cache are none, those of an older version included, nor is the number of truncated questions."""
    return name not in (*CONDITIONS, "num_truncated") and not name.endswith(("_frac", "_stderr"))

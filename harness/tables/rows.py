"""Table rows of records: one per timed cell, one per point of an analysis, else one per task and metric."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.records.record import BAD_VALUE_ERRORS, Record, current
from harness.records.samples import Baselines, Difference, clustered_stderr, of_windows
from harness.settings.experiment import foreign_settings
from harness.tables.columns import OF_SOME_MODELS, TABLES, TableRow, check, grouped

Pairs = list[tuple[Record, list[TableRow]]]
"""Records, each with its rows."""

ROUND = str.maketrans("[]", "()")
CONDITIONS = (
    "num_samples", "num_fewshot", "seq_len", "size", "size_artifact", "device_frac", "resident_frac",
    *(column.name for column in OF_SOME_MODELS),
)  # fmt: skip
"""Entries beside the metrics of a task that have columns."""
NUM_DEPTHS = 5
DEPTH_PERCENT = 100 // NUM_DEPTHS
log = logging.getLogger(__name__)


def with_rows(
    records: Iterable[Record], elsewhere: Callable[[], Iterable[Record]] = tuple, *, weights: bool = True
) -> Pairs:
    """The current finished records with their rows, compared with the full cache.

    The full cache's run is looked for among the records, then among those that `elsewhere` returns. weights: different
    weights of one model count as a setting.
    """
    chosen = current(records)
    full = Baselines(chosen, elsewhere)
    pairs = []
    for record in chosen:
        try:
            rows = rows_of(record, full)
            check(TABLES[record["table"]], rows)
        except BAD_VALUE_ERRORS as error:
            path = f"{record['experiment']}/{record['run_id']}/record.json"
            log.warning("%s: damaged record (%r); left out of tables and figures", path, error)
            continue
        if rows:
            pairs.append((record, rows))
    if weights:
        _add_weights(pairs)
    return pairs


def rows_of(record: Record, full: Baselines) -> list[TableRow]:
    """The rows of one finished record. A metric that was not measured (None) has no row.

    The row of a chunk has its range of tokens in the task, such as `offline[256:512]`; the row of a needle's depth, a
    fifth of the prompt, has length and depth, such as `niah_single_1[2048, 20-40 %]`.
    """
    config = record["config"]
    common = {
        "experiment": record["experiment"],
        "model": config["model"]["name"],
        "method": config["method_name"],
        "label": config["label"],
        "settings": ", ".join(f"{name}={value}" for name, value in record["settings"].items()),
        "run_id": record["run_id"],
    }
    metrics = record["metrics"]
    if record["table"] == "latency":
        return [common | metrics]
    if record["table"] == "analysis":
        return [common | {"source": metrics["source"]} | point for point in metrics["points"]]
    return [common | row for row in _accuracy_rows(record, full)]


def is_part(row: TableRow) -> bool:
    """Whether a row is of a chunk of its text, or of some depths of its task."""
    return str(row["task"]).endswith("]")


def is_depth(row: TableRow) -> bool:
    """Whether a row is of some depths of its task."""
    return str(row["task"]).endswith(" %]")


def _add_weights(pairs: Pairs) -> None:
    """Add the weights to the settings if runs of one model name have different ones, as a model may be replaced."""
    for of_model in grouped(pairs, lambda pair: pair[0]["config"]["model"]["name"]).values():
        if len({record["inputs"].get("model") for record, _ in of_model} - {None}) > 1:
            for record, rows in of_model:
                if digest := record["inputs"].get("model"):
                    for row in rows:
                        row["settings"] = ", ".join(filter(None, [row["settings"], f"weights={digest[:8]}"]))


def _accuracy_rows(record: Record, full: Baselines) -> Iterator[TableRow]:
    for name, entries in record["metrics"].items():
        context = _context(record, name, entries)
        for values in _values(entries):
            yield context | values | _compared(full.difference(record, name, values["metric"]))
        for row in depth_rows(context["task"], record["samples"].get(name, ())):
            yield context | row
    if record["chunks"]:
        ((name, entries),) = record["metrics"].items()
        context = _context(record, name, entries)
        for chunk in record["chunks"]:
            task = {"task": f"{context['task']}[{chunk['first']}:{chunk['stop']}]"}
            for values in _values(chunk["metrics"]):
                windows = chunk.get("windows", ()) if values["metric"] == "perplexity" else ()
                yield context | task | values | _compared(of_windows(record, windows))


def _values(entries: Mapping[str, Any]) -> Iterator[TableRow]:
    for metric, value in entries.items():
        is_metric = metric not in (*CONDITIONS, "num_truncated") and not metric.endswith("_stderr")
        if is_metric and isinstance(value, int | float):
            yield {"metric": metric, "value": value, "stderr": entries.get(f"{metric}_stderr")}


def depth_rows(task: str, samples: Sequence[Mapping[str, Any]]) -> Iterator[TableRow]:
    """A row for each length in tokens and depth of the needle; none for a task without needles."""

    def place(sample: Mapping[str, Any]) -> tuple[int, int]:
        return sample["length"], min(int(NUM_DEPTHS * sample["depth"]), NUM_DEPTHS - 1)

    needles = (sample for sample in samples if sample.get("depth") is not None)
    for (length, part), own in sorted(grouped(needles, place).items()):
        values = [sample[str(length)] for sample in own]
        yield {
            "task": f"{task}[{length}, {DEPTH_PERCENT * part}-{DEPTH_PERCENT * (part + 1)} %]",
            "metric": str(length),
            "value": sum(values) / len(values),
            "stderr": clustered_stderr(values, range(len(values))),
            "num_samples": len(values),
        }


def _compared(difference: Difference | None) -> TableRow:
    """The cells of `columns.COMPARED`."""
    if difference is None:
        return {}
    cells = {"difference": difference.value, "difference_stderr": difference.stderr}
    return cells | {name: getattr(difference, name) for name in ("detectable", "gained", "lost", "mcnemar_p")}


def _context(record: Record, name: str, entries: Mapping[str, Any]) -> TableRow:
    """Task, or file name of a text, and the conditions of its values. Square brackets in the name become round."""
    config = record["config"]
    seq_len = None if "seq_len" in foreign_settings(config["kind"]) else config["seq_len"]
    shared = {"seq_len": seq_len, "source": "measured"}
    conditions = {key: entries.get(key, shared.get(key)) for key in CONDITIONS}
    return shared | {"task": Path(name).name.translate(ROUND)} | conditions

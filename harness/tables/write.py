"""Records of an experiment as one tidy table: `results/tables/<experiment>.csv`, and a `.md` for people.

The CSV is what figures and users read: fixed columns, one row per (run, task, metric) for accuracy and one
per run for latency, seconds and bytes, fractions in [0, 1], an empty cell where nothing was measured. The
order depends on the rows alone, so the same records give the same bytes. Imports no torch.

    python -c "from harness.tables.write import update; update('results', 'fig11')"
"""

import csv
import io
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.records.record import read_records, write_atomic
from harness.tables import analysis as analysis_text
from harness.tables import speed as speed_tables
from harness.tables.text import rank, render_markdown, render_terminal

log = logging.getLogger(__name__)

Record = Mapping[str, Any]
Row = dict[str, Any]

ACCURACY_COLUMNS = (
    "experiment", "model", "method", "label", "task", "metric", "value", "stderr", "num_samples",
    "num_fewshot", "seq_len", "kv_frac", "kv_frac_artifact", "source", "run_id",
)  # fmt: skip
LATENCY_COLUMNS = (
    "experiment", "platform", "source", "model", "method", "label", "batch_size", "prompt_len", "gen_len",
    "prefill_s", "decode_s", "total_s", "tokens_per_s", "step_p50_s", "step_p95_s", "h2d_bytes", "d2h_bytes",
    "exposed_transfer_s", "link_bytes_per_s", "peak_device_bytes", "kv_frac", "run_id",
)  # fmt: skip
BLOCK_SEGMENTS = ("attention_s", "ffn_s", "prediction_s", "transfer_s", "other_s")
BLOCK_COLUMNS = (*LATENCY_COLUMNS, *BLOCK_SEGMENTS)
"""Latency tables add the seconds of one block in one decode step by segment (Fig 18); transfer is the wait that no
compute hides."""
ANALYSIS_COLUMNS = (
    "experiment", "model", "series", "layer", "x_name", "x", "metric", "value", "stderr", "num_samples", "source",
    "run_id",
)  # fmt: skip
"""Analysis tables: `value` of `series` at `x`, in the unit that `metric` says (harness.tables.analysis.METRICS)."""

TIMED_CELLS = "latency"
"""The experiment whose records are the cells of all figures of speed."""
CHUNK_TOKENS = 256
CONDITIONS = ("num_samples", "num_fewshot", "kv_frac", "kv_frac_artifact")
"""What a record keeps beside the metrics of a task and the table has columns for."""
LABELS = {
    "full": "Full cache",
    "oracle": "Oracle",
    "infinigen": "InfiniGen",
    "h2o": "H2O",
    "streaming": "Streaming",
    "int8": "INT8",
    "int4": "INT4",
    "int2": "INT2",
    "int1": "INT1",
}


def update(results_dir: str | Path, experiment: str) -> Path:
    """Write `tables/<experiment>.csv` and `.md` anew from the experiment's finished records; from those of `latency`
    also the tables of the figures that show some of its rows.

    A damaged record is skipped with a warning that names it, a failed or interrupted one silently: it has no
    numbers.

    Returns:
        The path of the CSV.

    Raises:
        UserError: the folder cannot be written.
    """
    pairs = _with_rows(read_records(results_dir, experiment))
    path = Path(results_dir) / "tables" / f"{experiment}.csv"
    points = _points_of(pairs)
    if points:
        write_atomic(path, render_csv(ANALYSIS_COLUMNS, points))
        write_atomic(path.with_suffix(".md"), analysis_text.render_markdown(experiment, points))
        return path
    _write(path, pairs)
    if experiment == TIMED_CELLS:
        _write_figures(path.parent, pairs)
    return path


def summary(records: Iterable[Record]) -> str:
    """The records as a small table for a terminal: a line per method and setting, a column per metric.

    Returns:
        Aligned text, without a final newline; "" where no record is finished.
    """
    pairs = _with_rows(records)
    others = [(record, rows) for record, rows in pairs if not _is_analysis(record)]
    parts = [render_terminal(others), analysis_text.render_terminal(_points_of(pairs))]
    return "\n\n".join(filter(None, parts))


def render_csv(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """The rows under `columns` as CSV: an empty cell where a row has none, other keys left out."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write(path: Path, pairs: Sequence[tuple[Record, list[Row]]]) -> None:
    columns = BLOCK_COLUMNS if any(_is_latency(record) for record, _ in pairs) else ACCURACY_COLUMNS
    rows = sorted((row for _, rows in pairs for row in rows), key=_sort_key)
    write_atomic(path, render_csv(columns, rows))
    write_atomic(path.with_suffix(".md"), render_markdown(path.stem, pairs))


def _write_figures(folder: Path, pairs: Sequence[tuple[Record, list[Row]]]) -> None:
    """The table of each figure of speed; one that has no rows any more is removed."""
    every = [row for _, rows in pairs for row in rows]
    for figure, choose in speed_tables.FIGURES.items():
        chosen = {row["run_id"] for row in choose(every)}
        own = [(record, [row | {"experiment": figure} for row in rows]) for record, rows in pairs]
        own = [(record, rows) for record, rows in own if rows[0]["run_id"] in chosen]
        path = folder / f"{figure}.csv"
        if own:
            _write(path, own)
        else:
            path.unlink(missing_ok=True)
            path.with_suffix(".md").unlink(missing_ok=True)


def rows_of(record: Record) -> list[Row]:
    """The rows of one finished record: one for latency, an analysis' points, else one per task and metric, and one per
    chunk.

    A chunk's row has the metric `perplexity` and its range of tokens in the task, such as `offline[256:512]`.
    A metric that was not measured (None) has no row.
    """
    config = record["config"]
    common = {
        "experiment": record["experiment"],
        "model": config["model"]["name"],
        "method": config["method_name"],
        "label": label_of(config),
        "run_id": record["run_id"],
    }
    if _is_latency(record):
        return [common | dict(record["metrics"])]
    if _is_analysis(record):
        metrics = record["metrics"]
        return [common | {"source": metrics["source"]} | dict(point) for point in metrics["points"]]
    return [*_task_rows(record, common), *_chunk_rows(record, common)]


def label_of(config: Mapping[str, Any]) -> str:
    """A run's name in legends: its `label`, else what it is. Runs on one line of a figure share it."""
    if config.get("label"):
        return str(config["label"])
    name = LABELS.get(config["method_name"], config["method_name"])
    if not config["method"].get("skew", True):
        name += " without skewing"
    codec = config.get("codec")
    return name if codec in (None, config["method_name"]) else f"{name} + {codec}"


def _is_latency(record: Record) -> bool:
    return record.get("kind") == "latency"


def _is_analysis(record: Record) -> bool:
    return record.get("kind") == "analysis"


def _points_of(pairs: Sequence[tuple[Record, list[Row]]]) -> list[Row]:
    """The rows of the analyses among `pairs`, in the order in which they were made. Two kinds share no table."""
    return [row for record, rows in pairs if _is_analysis(record) for row in rows]


def _task_rows(record: Record, common: Row) -> Iterator[Row]:
    for name, entries in record["metrics"].items():
        context = _context(record, name, entries)
        for metric, value in entries.items():
            if _is_metric(metric) and isinstance(value, int | float):
                values = {"metric": metric, "value": value, "stderr": entries.get(f"{metric}_stderr")}
                yield common | context | values


def _chunk_rows(record: Record, common: Row) -> Iterator[Row]:
    if not record.get("chunks"):
        return
    ((name, entries),) = record["metrics"].items()
    context = _context(record, name, entries)
    for chunk in record["chunks"]:
        start = CHUNK_TOKENS * chunk["chunk"]
        task = f"{context['task']}[{start}:{start + CHUNK_TOKENS}]"
        values = {"value": chunk["perplexity"], "stderr": chunk["perplexity_stderr"]}
        yield common | context | {"task": task, "metric": "perplexity"} | values


def _context(record: Record, name: str, entries: Mapping[str, Any]) -> Row:
    """Task, or file name of a text, and the conditions under which its values hold."""
    config = record["config"]
    shared = {"seq_len": config["seq_len"] if config["kind"] == "perplexity" else None, "source": "measured"}
    return shared | {"task": Path(name).name} | {key: entries.get(key) for key in CONDITIONS}


def _is_metric(name: str) -> bool:
    return name not in CONDITIONS and not name.endswith("_stderr")


def _sort_key(row: Row) -> tuple[Any, ...]:
    """By what a reader looks for; chunks by their position, a missing number first, the run's id last."""
    task, _, chunk = str(row.get("task", "")).partition("[")
    position = int(chunk.split(":")[0]) if chunk else -1
    words = (row["model"], row["label"], task)
    sizes = ("batch_size", "prompt_len", "gen_len", "seq_len", "kv_frac")
    shape = tuple(row.get(name) or 0 for name in sizes)
    return (*words, *shape, position, rank(str(row.get("metric", ""))), row["run_id"])


def _with_rows(records: Iterable[Record]) -> list[tuple[Record, list[Row]]]:
    """Finished records that have rows, with their rows, in the order in which people read methods."""
    pairs = []
    for record in records:
        if record["status"] != "finished":
            continue
        try:
            rows = rows_of(record)
        except (KeyError, TypeError, AttributeError) as error:
            path = f"{record.get('experiment')}/{record.get('run_id')}/record.json"
            log.warning("%s: damaged record (%r); left out of tables and figures", path, error)
            continue
        if rows:
            pairs.append((record, rows))
    methods = {method: index for index, method in enumerate(LABELS)}
    return sorted(pairs, key=lambda pair: (methods.get(pair[1][0]["method"], len(methods)), *_sort_key(pair[1][0])))

"""The table rows of records: one per timed run, one per point of an analysis, else one per task
and metric, compared with the full cache."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.results import columns
from harness.results.columns import TableRow
from harness.results.metrics import ATTENTION_ERROR, ATTENTION_ERROR_P95, LAYER, OF_SOME_RUNS
from harness.results.record import Record, current, in_words
from harness.results.samples import (
    LAYERS,
    Baselines,
    Difference,
    Sample,
    clustered_stderr,
    num_contexts,
    of_windows,
    samples_of,
)
from harness.settings.kinds import foreign_settings
from harness.settings.schema import is_unmet

Pairs = list[tuple[Record, list[TableRow]]]
"""Records, each with its rows."""
ROUND = str.maketrans("[]", "()")
CONDITIONS = (
    "num_samples", "num_fewshot", "seq_len",
    "budget", "budget_artifact", "device_frac", "resident_frac",
    *(column.name for column in OF_SOME_RUNS),
)  # fmt: skip
"""Entries beside the metrics of a task that have columns."""
OF_LAYERS = (
    ATTENTION_ERROR.name, f"{ATTENTION_ERROR.name}_stderr",
    ATTENTION_ERROR_P95.name, f"{ATTENTION_ERROR_P95.name}_stderr",
)  # fmt: skip
"""Entries of a layer of a run on a text."""
NO_METRICS = {*CONDITIONS, "num_truncated", "num_dense", "num_contexts"}
NUM_DEPTHS = 5
DEPTH_PERCENT = 100 // NUM_DEPTHS


def with_rows(
    records: Iterable[Record],
    elsewhere: Callable[[], Iterable[Record]] = tuple,
    *,
    weights: bool = True,
) -> Pairs:
    """The current finished records with their rows, compared with the full cache.

    The full cache's run is looked for among the records, then among those that `elsewhere` returns.
    weights: different weights of one model count as a setting.
    """
    finished = current(records)
    full = Baselines(finished, elsewhere)
    pairs = []
    for record in finished:
        rows = rows_of(record, full)
        if rows:
            pairs.append((record, rows))
    if weights:
        _add_weights(pairs)
    return pairs


def rows_of(record: Record, full: Baselines) -> list[TableRow]:
    """The rows of one finished record. A metric that was not measured (None) has no row.

    The row of a chunk has its range of tokens in the task, such as `offline[256:512]`; the row of a
    needle's depth, a fifth of the prompt, has length and depth, such as `niah_single_1[2048, 20-40
    %]`.
    """
    config, metrics = record["config"], record["metrics"]
    common = {
        "experiment": record["experiment"],
        "model": config["model"]["name"],
        "method": config["method_name"],
        "label": config["label"],
        "settings": in_words(record["settings"]),
        "run_id": record["run_id"],
    }
    rows: Iterable[TableRow]
    if record["table"] == "latency":
        rows = [metrics]
    elif record["table"] == "accuracy":
        rows = [*_whole_rows(record, full), *_chunk_rows(record)]
    else:
        rows = metrics["points"]
        if record["table"] == "analysis":
            common["source"] = metrics["source"]
    if record["table"] != "analysis":
        rows = [row | {"unmet_budget": _unmet_budget(config, row)} for row in rows]
    return [common | row for row in rows]


def layer_rows(record: Record) -> Iterator[TableRow]:
    """The errors of attention outputs by layer, as points of an analysis; none of an older record,
    which has none.

    A series is a label and its budget, `H2O, 10 %`. x_name names the text.
    """
    layers = record["samples"].get(LAYERS, ())
    for name, entries in record["metrics"].items():
        context = _context(record, name, entries)
        for of_layer in layers:
            for value in _values(columns.picked(of_layer, OF_LAYERS)):
                yield value | {
                    "experiment": ATTENTION_ERROR.name,
                    "model": record["config"]["model"]["name"],
                    "series": f"{record['config']['label']}, {100 * context['budget']:.0f} %",
                    "layer": None,
                    "x_name": f"{LAYER.name}, {context['task']}",
                    "x": of_layer[LAYER.name],
                    "num_samples": context["num_samples"],
                    "source": context["source"],
                    "run_id": record["run_id"],
                }


def _add_weights(pairs: Pairs) -> None:
    """Add the weights to the settings if runs of one model name have different ones.

    A model may be replaced under its name.
    """
    by_model = columns.grouped(pairs, lambda pair: pair[0]["config"]["model"]["name"])
    for of_model in by_model.values():
        digests = {record["inputs"].get("model") for record, _ in of_model}
        if len(digests - {None}) < 2:
            continue
        for record, rows in of_model:
            digest = record["inputs"].get("model")
            if not digest:
                continue
            for row in rows:
                settings = [row["settings"]] if row["settings"] else []
                row["settings"] = ", ".join([*settings, f"weights={digest[:8]}"])


def _whole_rows(record: Record, full: Baselines) -> Iterator[TableRow]:
    for name, entries in record["metrics"].items():
        context = _context(record, name, entries)
        samples = samples_of(record, name)
        for value in _values(entries):
            metric = value["metric"]
            row = context | value | {"num_contexts": num_contexts(samples, metric)}
            yield row | _compared(full.difference(record, name, metric))
        for row in depth_rows(context["task"], record["samples"].get(name, ())):
            yield context | row


def _chunk_rows(record: Record) -> Iterator[TableRow]:
    if not record["chunks"]:
        return
    ((name, entries),) = record["metrics"].items()
    context = _context(record, name, entries)
    for chunk in record["chunks"]:
        task = f"{context['task']}[{chunk['first']}:{chunk['stop']}]"
        for value in _values(chunk["metrics"]):
            row = context | {"task": task} | value | {"num_contexts": context["num_samples"]}
            windows = chunk.get("windows", ()) if value["metric"] == "perplexity" else ()
            yield row | _compared(of_windows(record, windows))


def _values(entries: Mapping[str, Any]) -> Iterator[TableRow]:
    for metric, value in entries.items():
        if metric in NO_METRICS or metric.endswith("_stderr"):
            continue
        if isinstance(value, int | float):
            yield {
                "metric": metric,
                "value": value,
                "stderr": entries.get(f"{metric}_stderr"),
                "repeats_stderr": entries.get(f"{metric}_repeats_stderr"),
            }


def depth_rows(task: str, samples: Sequence[Sample]) -> Iterator[TableRow]:
    """A row for each length in tokens and depth of the needle; none for a task without needles."""

    def length_and_part(sample: Sample) -> tuple[int, int]:
        return sample["length"], min(int(NUM_DEPTHS * sample["depth"]), NUM_DEPTHS - 1)

    needles = columns.having(samples, "depth")
    for (length, part), of_part in sorted(columns.grouped(needles, length_and_part).items()):
        scores = columns.values(of_part, str(length))
        first = DEPTH_PERCENT * part
        yield {
            "task": f"{task}[{length}, {first}-{first + DEPTH_PERCENT} %]",
            "metric": str(length),
            "value": sum(scores) / len(scores),
            "stderr": clustered_stderr(scores, range(len(scores))),
            "num_samples": len(scores),
            "num_contexts": len(scores),
        }


def _compared(difference: Difference | None) -> TableRow:
    """The columns of a difference to the full cache, and the contexts that it was measured on."""
    if difference is None:
        return {}
    found = difference._asdict()
    value, stderr = found.pop("value"), found.pop("stderr")
    del found["num_pairs"]
    return found | {"difference": value, "difference_stderr": stderr, "p": difference.p}


def _context(record: Record, name: str, entries: Mapping[str, Any]) -> TableRow:
    """Task, or file name of a text, and the conditions of its values.

    Square brackets in the name become round.
    """
    config = record["config"]
    seq_len = None if "seq_len" in foreign_settings(config["kind"]) else config["seq_len"]
    row = columns.picked(entries, CONDITIONS)
    row["seq_len"] = entries.get("seq_len", seq_len)
    row["source"] = "measured"
    row["task"] = Path(name).name.translate(ROUND)
    return row


def _unmet_budget(config: Mapping[str, Any], entries: Mapping[str, Any]) -> float | None:
    """The budget that was asked for, where the one that ran is another."""
    asked: float | None = config.get("budget")
    return asked if is_unmet(asked, entries.get("budget")) else None

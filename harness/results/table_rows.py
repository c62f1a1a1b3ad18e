"""Records as frames: a row per timed run, per point of an analysis, else per task and metric,
compared with the full cache."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.results.columns import with_columns
from harness.results.metrics import (
    ATTENTION_ERROR,
    ATTENTION_ERROR_P95,
    DENSE_LAYERS,
    LAYER,
    NUM_DEPTHS,
    OF_SOME_RUNS,
)
from harness.results.record import Record, current, in_words
from harness.results.samples import (
    DIFFERENCE,
    DIFFERENCES,
    KEY,
    LAYERS,
    Samples,
    clustered_stderr,
    differences_of,
    is_scored,
    over_tasks,
    parts_of,
    samples_of,
    task_of,
    with_full,
)
from harness.settings.kinds import foreign_settings
from harness.settings.schema import is_unmet

CONDITIONS = (
    "num_samples", "num_fewshot", "seq_len",
    "budget", "budget_artifact", "device_frac", "resident_frac",
    *(column.name for column in OF_SOME_RUNS),
)  # fmt: skip
"""Entries beside the metrics of a task that have columns."""
NO_METRICS = {*CONDITIONS, "num_truncated", "num_dense", "num_contexts"}
IN_BUDGET = ("budget", DENSE_LAYERS.name)
"""Settings of a method that the budget in the name of a series says: it counts dense layers."""
SHAPES = {name: name for name in ("accuracy", "latency", "analysis")} | {"capacity": "latency"}
"""The shape of each table that records name."""
STDERRS = ("stderr", "repeats_stderr")
Row = dict[str, Any]


def frames_of(
    records: Iterable[Record], elsewhere: Callable[[], Iterable[Record]] = tuple
) -> dict[str, pd.DataFrame]:
    """The rows of the newest finished records by the field `table`, with all columns of its shape.

    The full cache's run is looked for among the records, then among those that `elsewhere` returns.
    """
    finished = current(records)
    rows: dict[str, list[Row]] = {name: [] for name in SHAPES}
    for record in finished:
        of_run = {
            "experiment": record["experiment"],
            "model": record["config"]["model"]["name"],
            "method": record["config"]["method_name"],
            "label": record["config"]["label"],
            "settings": in_words(record["settings"]),
            "run_id": record["run_id"],
        }
        for row in _rows_of(record):
            rows[record["table"]].append(of_run | row)
    frames = {}
    for table, found in rows.items():
        frames[table] = with_columns(pd.DataFrame(found), SHAPES[table])
    scored = list(filter(is_scored, finished))
    frames["accuracy"] = _compared(frames["accuracy"], scored, elsewhere)
    return frames


def layers_of(records: Iterable[Record]) -> pd.DataFrame:
    """The errors of attention outputs by layer, as points of an analysis; none of an older record,
    which has none.

    A series is a label, its budget, and other settings of its method: `InfiniGen, 16 %, alpha=4.0`.
    x_name names the text.
    """
    rows = []
    for record in records:
        config, settings = record["config"], record["settings"]
        of_method = {*config["method"]}.difference(IN_BUDGET)
        own = in_words({name: value for name, value in settings.items() if name in of_method})
        for name, entries in record["metrics"].items():
            budget = f"{100 * entries['budget']:.0f} %"
            of_run = {
                "experiment": ATTENTION_ERROR.name,
                "model": config["model"]["name"],
                "series": ", ".join(filter(None, (config["label"], budget, own))),
                "x_name": f"{LAYER.name}, {task_of(name)}",
                "num_samples": entries.get("num_samples"),
                "source": "measured",
                "run_id": record["run_id"],
            }
            for layer in record["samples"].get(LAYERS, ()):
                for metric in (ATTENTION_ERROR.name, ATTENTION_ERROR_P95.name):
                    value, stderr = (layer.get(each) for each in (metric, f"{metric}_stderr"))
                    point = {"metric": metric, "x": layer[LAYER.name], "value": value}
                    if value is not None:
                        rows.append(of_run | point | {"stderr": stderr})
    frame = with_columns(pd.DataFrame(rows), "analysis")
    return frame.sort_values(["model", "series", "x_name"], kind="stable")


# Rows


def _rows_of(record: Record) -> Iterator[Row]:
    """The rows of a record. A metric that was not measured (None) has no row."""
    metrics, asked = record["metrics"], record["config"].get("budget")
    if record["table"] == "analysis":
        yield from ({"source": metrics["source"]} | point for point in metrics["points"])
        return
    rows = _scores(record) if is_scored(record) else metrics.get("points", [metrics])
    for row in rows:
        yield row | {"unmet_budget": asked if is_unmet(asked, row.get("budget")) else None}


def _scores(record: Record) -> Iterator[Row]:
    """A row for each task and metric, those of ranges of a text's tokens, and those of lengths and
    depths of needles."""
    config = record["config"]
    seq_len = None if "seq_len" in foreign_settings(config["kind"]) else config["seq_len"]
    for name, place, entries, samples in parts_of(record):
        of_task = {"source": "measured", "seq_len": seq_len, "task": task_of(name)} | place
        conditions = record["metrics"][name]
        of_task |= {each: conditions[each] for each in CONDITIONS if each in conditions}
        if place:
            of_task["num_contexts"] = of_task.get("num_samples")
        for metric, value in entries.items():
            is_other = metric in NO_METRICS or metric.endswith("_stderr")
            if isinstance(value, int | float) and not is_other:
                stderrs = {each: entries.get(f"{metric}_{each}") for each in STDERRS}
                yield of_task | {"metric": metric, "value": value} | stderrs
        for depth in _depths(() if place else samples):
            yield of_task | depth


def _depths(samples: Samples) -> Iterator[Row]:
    """A row for each length in tokens and depth of the needle; none for a task without needles."""
    needles = pd.DataFrame([sample for sample in samples if sample.get("depth") is not None])
    if needles.empty:
        return
    needles["fifth"] = (NUM_DEPTHS * needles["depth"]).astype(int).clip(upper=NUM_DEPTHS - 1)
    for _, found in needles.groupby(["length", "fifth"], sort=False):
        length, fifth = found[["length", "fifth"]].iloc[0].tolist()
        scores = found[str(length)].tolist()
        yield {
            "depth": fifth / NUM_DEPTHS,
            "metric": str(length),
            "value": sum(scores) / len(scores),
            "stderr": clustered_stderr(scores, range(len(scores))),
            "num_samples": len(scores),
            "num_contexts": len(scores),
        }


# Beside the full cache


def _compared(
    scores: pd.DataFrame, records: Sequence[Record], elsewhere: Callable[[], Iterable[Record]]
) -> pd.DataFrame:
    """The scores with their differences to the full cache, and the number of contexts."""
    samples, of_all = samples_of(records), scores[scores["depth"].isna()]
    differences = _of_means(differences_of(with_full(records, elsewhere)), of_all)
    of_groups = _of_means(_of_groups(records, differences), of_all)
    differences = pd.concat([differences, of_groups])[[*KEY, *DIFFERENCE, "num_contexts"]]
    counted = samples.groupby(KEY, dropna=False)["context"].nunique().rename("counted")
    numbers = differences.merge(counted.reset_index(), how="outer", on=KEY).assign(depth=math.nan)
    found = scores.drop(columns=DIFFERENCE).rename(columns={"num_contexts": "of_run"})
    found = found.merge(numbers, how="left", on=[*KEY, "depth"])
    contexts = found["num_contexts"].fillna(found.pop("counted")).fillna(found.pop("of_run"))
    return found.assign(num_contexts=contexts)


def _of_means(differences: pd.DataFrame, scores: pd.DataFrame) -> pd.DataFrame:
    """The differences of values that are the mean of their samples."""
    values = differences[KEY].merge(scores[[*KEY, "value"]], how="left", on=KEY)["value"]
    is_mean = np.isclose(differences["mean"], values, rtol=1e-6, atol=1e-9)
    return differences[is_mean]


def _of_groups(records: Iterable[Record], differences: pd.DataFrame) -> pd.DataFrame:
    """Differences of groups of tasks, paired by question, where each task has one and all have
    equally many questions."""
    rows = []
    for record in records:
        of_run = differences[differences["run_id"] == record["run_id"]]
        for name, entries in record["metrics"].items():
            tasks = entries.get("tasks", ())
            of_tasks = of_run[of_run["task"].isin(tasks)]
            for metric, parts in of_tasks.groupby("metric"):
                if len(parts) == len(tasks) and parts["num_pairs"].nunique() == 1:
                    key = {"run_id": record["run_id"], "task": task_of(name), "metric": metric}
                    rows.append(key | {"first": math.nan} | over_tasks(parts))
    return pd.DataFrame(rows, columns=DIFFERENCES).astype({"first": float})

"""Records as frames: a row per timed run, per point of an analysis, else per task and metric,
compared with the full cache on the same windows or questions (formulas: `docs/results.md`)."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
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
from harness.results.record import LOCATIONS, Record, current, flat, in_words, read_all
from harness.results.stats import two_sided_p
from harness.settings.kinds import COMMON, find, foreign_settings
from harness.settings.schema import is_unmet

EXPONENTIAL = {
    "perplexity": "nll",
    "perplexity_full": "nll_full",
    "text_perplexity": "nll",
    "text_perplexity_full": "nll_full",
}
"""Metrics that are exp of a mean over windows or prompts, and the sample field that is averaged."""
FULL = "full"
"""Name of the method that is the full cache, if no codec is set."""
LAYERS = "layers"
"""In the samples of a run on a text, the errors of attention outputs by layer."""
OF_METHODS = {"calibration", "method"}
"""Inputs that a method may read and the full cache does not."""
MAY_DIFFER = {*COMMON, *OF_METHODS, "tasks"} - {"kind", "model"}
"""Settings in which a run and its full cache may differ: the method's own, and further tasks of the
same run."""

KEY = ["run_id", "task", "first", "metric"]
SAMPLES = [*KEY, "asked", "question", "context", "value", "full"]
DIFFERENCE = ["difference", "difference_stderr", "p", "gained", "lost"]
DIFFERENCES = [*KEY, *DIFFERENCE, "mean", "num_pairs", "num_contexts"]
"""gained, lost: questions that only the run, or only the full cache, answers correctly; none unless
every answer is right or wrong. mean: of the run's own values, exp of it for a perplexity.
num_pairs: questions, windows or prompts. num_contexts: those whose errors are independent."""

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
Samples = Sequence[Mapping[str, Any]]
Numbers = dict[str, float | None]


# Tables


def _settings(records: Sequence[Record]) -> dict[str, str]:
    """The settings of runs in words, by run_id; with the weights if runs of one model name have
    different ones. A model may be replaced under its name."""
    digests: dict[str, set[str | None]] = defaultdict(set)
    for record in records:
        digests[record["config"]["model"]["name"]].add(record["inputs"].get("model"))
    found = {}
    for record in records:
        settings, digest = dict(record["settings"]), record["inputs"].get("model")
        if digest and len(digests[record["config"]["model"]["name"]] - {None}) > 1:
            settings["weights"] = digest[:8]
        found[record["run_id"]] = in_words(settings)
    return found


def frames_of(
    records: Iterable[Record], elsewhere: Callable[[], Iterable[Record]] = tuple
) -> dict[str, pd.DataFrame]:
    """The rows of the newest finished records by the field `table`, with all columns of its shape.

    The full cache's run is looked for among the records, then among those that `elsewhere` returns.
    """
    finished = current(records)
    settings = _settings(finished)
    rows: dict[str, list[Row]] = {name: [] for name in SHAPES}
    for record in finished:
        of_run = {
            "experiment": record["experiment"],
            "model": record["config"]["model"]["name"],
            "method": record["config"]["method_name"],
            "label": record["config"]["label"],
            "settings": settings[record["run_id"]],
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


# Samples


def parts_of(record: Record) -> Iterator[tuple[str, dict[str, Any], Mapping[str, Any], Samples]]:
    """The texts and tasks of a record, each before its ranges of tokens: its name, first and stop
    of a range ({} for the whole), the metrics, and the windows, prompts or questions."""
    for name, entries in record["metrics"].items():
        kept = [key for key in (name, "windows", "prompts") if key in record["samples"]]
        yield name, {}, entries, record["samples"][kept[0]] if kept else ()
        for chunk in record["chunks"]:
            place = {"first": chunk["first"], "stop": chunk["stop"]}
            yield name, place, chunk["metrics"], chunk.get("windows", ())


def samples_of(records: Iterable[Record]) -> pd.DataFrame:
    """A row per run on texts or tasks, task, metric, and question, window or prompt, with the
    columns `SAMPLES`.

    first: of a range of a text's tokens; NaN for all of it. question: its number. context: samples
    of one context are one cluster of errors. value: of the metric; of a perplexity the mean
    negative log-likelihood. full: of the full cache where the run itself measured it, on windows.
    asked: on questions, what decides them; None on windows and prompts.
    """
    rows = []
    for record in records:
        for name, place, metrics, samples in parts_of(record) if is_scored(record) else ():
            run = record["run_id"], task_of(name), place.get("first")
            asked = _asked(record, name)
            for metric in metrics:
                field = EXPONENTIAL.get(metric, metric)
                for number, sample in enumerate(samples):
                    if isinstance(sample.get(field), int | float):
                        at = sample.get("question", number), sample.get("context", number)
                        full = sample.get("nll_full") if metric == "perplexity" else None
                        rows.append((*run, metric, asked, *at, sample[field], full))
    frame = pd.DataFrame(rows, columns=SAMPLES)
    return frame.astype({"first": float, "value": float, "full": float})


def is_scored(record: Record) -> bool:
    """Whether a run is of texts or tasks."""
    return bool(record["table"] == "accuracy")


def task_of(name: str) -> str:
    """A task, or the file name of a text."""
    return Path(name).name


# Differences


def differences_of(pairs: pd.DataFrame) -> pd.DataFrame:
    """Differences of means: a row per run, task, range and metric, with the columns `DIFFERENCES`.

    pairs: as `samples_of`, with the full cache's value in `full`. A task without its answer to one
    of the questions has no row.
    """
    rows = []
    for values, of_key in pairs.groupby(KEY, dropna=False):
        if of_key["full"].notna().all():
            key = dict(zip(KEY, values, strict=True))
            rows.append(key | _difference(str(key["metric"]), of_key))
    numbers = dict.fromkeys(["first", *DIFFERENCES[len(KEY) :]], float)
    return pd.DataFrame(rows, columns=DIFFERENCES).astype(numbers)


def _difference(metric: str, pairs: pd.DataFrame) -> Numbers:
    """The columns of a difference behind its key.

    The error of a difference of exponentials is the delta method's: a window changes the difference
    by its change of the two means, times the slope of exp there.
    """
    own, full = pairs["value"].to_numpy(), pairs["full"].to_numpy()
    mean, change = own.mean(), own - full
    difference, is_share = change.mean(), metric not in EXPONENTIAL
    if not is_share:
        mean, mean_full = math.exp(mean), math.exp(full.mean())
        difference, change = mean - mean_full, mean * own - mean_full * full
    contexts, values = pairs["context"].tolist(), {*own, *full}
    found = _tested(difference, clustered_stderr(change.tolist(), contexts), len({*contexts}))
    found |= {"mean": mean, "num_pairs": len(pairs)}
    if is_share and values <= {0, 1}:
        found |= {"gained": (change == 1).sum(), "lost": (change == -1).sum()}
    return found


def _tested(difference: float, stderr: float | None, num_contexts: float) -> Numbers:
    """A difference with the two-sided p-value of 0, by the paired t-test of its contexts."""
    return {
        "difference": difference,
        "difference_stderr": stderr,
        "p": two_sided_p(difference, stderr, num_contexts - 1),
        "num_contexts": num_contexts,
    }


def over_tasks(parts: pd.DataFrame) -> Numbers:
    """The mean of tasks' differences. Tasks are strata: their errors are independent, and the tasks
    themselves are not drawn. With one context a task its error is not known; tasks then stand for
    one another, which gives too large an error rather than too small a one (collapsed strata,
    Cochran 1977, 5A.12). num_contexts: one more than the degrees of freedom."""
    values, stderrs = parts["difference"], parts["difference_stderr"]
    stderr: float | None = math.hypot(*stderrs) / len(parts)
    num_contexts = parts["num_contexts"].sum() - len(parts) + 1
    if stderrs.isna().any():
        stderr, num_contexts = clustered_stderr(values.tolist(), range(len(parts))), len(parts)
    return _tested(values.mean(), stderr, num_contexts) | {"mean": parts["mean"].mean()}


def clustered_stderr(values: Sequence[float], clusters: Sequence[Any]) -> float | None:
    """Standard error of the mean of `values` whose errors are independent only between clusters.

    None for one cluster. If every value is a cluster of its own, it is lm-eval's: sample standard
    deviation / sqrt(n). Questions on one context are a cluster (Liang and Zeger 1986, with the
    G / (G - 1) correction).
    """
    mean = sum(values) / len(values)
    residuals: dict[Any, float] = defaultdict(float)
    for value, cluster in zip(values, clusters, strict=True):
        residuals[cluster] += value - mean
    groups = len(residuals)
    if groups < 2:
        return None
    squares = sum(residual * residual for residual in residuals.values())
    return (squares * groups / (groups - 1)) ** 0.5 / len(values)


# The full cache


def is_full(record: Record) -> bool:
    """Whether a run is of the full cache."""
    config = record["config"]
    has_codec = config["codec"] is not None or config.get("value_codec") is not None
    return config["method_name"] == FULL and not has_codec


def full_runs(*results_dirs: str | Path) -> list[Record]:
    """The full cache's finished runs in results folders, of all experiments."""
    return [run for folder in results_dirs for run in current(filter(is_full, read_all(folder)))]


def with_full(
    records: Iterable[Record], elsewhere: Callable[[], Iterable[Record]] = tuple
) -> pd.DataFrame:
    """The samples of runs of methods, with the full cache's value on a question in `full`: of its
    newest run, whatever code made it.

    elsewhere: returns further records; called only if runs of methods answer questions.
    """
    records = list(records)
    own = samples_of(record for record in records if not is_full(record))
    if own["asked"].isna().all():
        return own
    newest = sorted(filter(is_full, [*records, *elsewhere()]), key=lambda record: record["started"])
    same = [*KEY[1:], "asked", "question"]
    answers = samples_of(newest).dropna(subset="asked").drop_duplicates(same, keep="last")
    answers = answers[[*same, "value"]]
    pairs = own.merge(answers, how="left", on=same, suffixes=("", "_of_full"))
    return own.assign(full=own["full"].fillna(pairs["value_of_full"]))


def _asked(record: Record, name: str) -> str | None:
    """What decides the questions of a task: its data, the model and settings; None on a text."""
    if name not in record["samples"]:
        return None
    names = {"kind", "model", *find(record["kind"]).depends_on} - MAY_DIFFER
    settings = flat({each: record["config"].get(each) for each in names})
    for location in LOCATIONS:
        settings.pop(location, None)
    data = [record["inputs"].get(each) for each in ("model", "include_path", name)]
    return json.dumps([settings, data], sort_keys=True)

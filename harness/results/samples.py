"""Samples of records as a long frame, and differences between a method and the full cache on the
same windows or questions (formulas: `docs/results.md`)."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.results.record import LOCATIONS, Record, current, flat, read_all
from harness.results.stats import two_sided_p
from harness.settings.kinds import COMMON, find

Sample = Mapping[str, Any]
Samples = Sequence[Sample]
Numbers = dict[str, float | None]

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
SAMPLES = ["experiment", *KEY, "asked", "question", "context", "value", "full"]
DIFFERENCE = ["difference", "difference_stderr", "p", "gained", "lost"]
DIFFERENCES = [*KEY, *DIFFERENCE, "mean", "num_pairs", "num_contexts"]
"""gained, lost: questions that only the run, or only the full cache, answers correctly; none unless
every answer is right or wrong. mean: of the run's own values, exp of it for a perplexity.
num_pairs: questions, windows or prompts. num_contexts: those whose errors are independent."""


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
            run = record["experiment"], record["run_id"], task_of(name), place.get("first")
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
    newest run, whatever code made it. `full_run`: the id of this run.

    elsewhere: returns further records; called only if runs of methods answer questions.
    """
    records = list(records)
    own = samples_of(record for record in records if not is_full(record)).assign(full_run=None)
    if own["asked"].isna().all():
        return own
    newest = sorted(filter(is_full, [*records, *elsewhere()]), key=lambda record: record["started"])
    same = [*KEY[1:], "asked", "question"]
    answers = samples_of(newest).dropna(subset="asked").drop_duplicates(same, keep="last")
    answers = answers[["run_id", *same, "value"]]
    pairs = own.merge(answers, how="left", on=same, suffixes=("", "_of_full"))
    full = own["full"].fillna(pairs["value_of_full"])
    return own.assign(full=full, full_run=pairs["run_id_of_full"])


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

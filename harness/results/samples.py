"""Samples of records as a long frame, and differences between a method and the full cache, or
between two runs, on the same windows or questions.

Hard questions are hard for both, so the paired difference is known far better than either value.
Each difference has its standard error and the smallest difference that would have been detected;
see `docs/results.md`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from harness.results.inputs import CODE
from harness.results.record import Record, current, read_all, without_paths
from harness.results.stats import detectable, two_sided_p, unseen_rate
from harness.settings.kinds import COMMON, find

Sample = Mapping[str, Any]
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
SAMPLES = [*KEY, "question", "context", "value", "full"]
DIFFERENCE = ["difference", "difference_stderr", "p", "gained", "lost", "detectable"]
DIFFERENCES = [*KEY, *DIFFERENCE, "mean", "num_pairs", "num_contexts"]
"""gained, lost: questions that only the run, or only the other, answers correctly; none unless
every answer is right or wrong. mean: of the run's own values, exp of it for a perplexity.
num_pairs: questions, windows or prompts. num_contexts: those whose errors are independent."""
NOT_ASKED = {"windows", "prompts"}
"""Samples of a run on a text. All others are questions, by task."""


# Samples


def samples_of(records: Iterable[Record]) -> pd.DataFrame:
    """A row per run, task, metric, and question, window or prompt, with the columns `SAMPLES`.

    first: of a range of a text's tokens; NaN for all of it. question: its number. context: samples
    of one context are one cluster of errors. value: of the metric; of a perplexity the mean
    negative log-likelihood. full: of the full cache where the run itself measured it, on windows.
    """
    rows: list[tuple[Any, ...]] = []
    for record in records:
        run = record["run_id"]
        for name, entries in record["metrics"].items():
            task = run, task_of(name)
            rows += _rows((*task, math.nan), entries, _raw_samples(record, name))
            for chunk in record["chunks"]:
                rows += _rows((*task, chunk["first"]), chunk["metrics"], chunk.get("windows", ()))
    frame = pd.DataFrame(rows, columns=SAMPLES)
    return frame.astype({"first": float, "value": float, "full": float})


def task_of(name: str) -> str:
    """A task, or the file name of a text."""
    return Path(name).name


def _raw_samples(record: Record, name: str) -> Sequence[Sample]:
    """The questions of a task, or the windows or prompts of a text; none if the run keeps none."""
    for key in (name, "windows", "prompts"):
        if key in record["samples"]:
            found: Sequence[Sample] = record["samples"][key]
            return found
    return ()


def _rows(
    key: tuple[Any, ...], metrics: Iterable[str], samples: Sequence[Sample]
) -> Iterator[tuple[Any, ...]]:
    for metric in metrics:
        field = EXPONENTIAL.get(metric, metric)
        for number, sample in enumerate(samples):
            if isinstance(sample.get(field), int | float):
                place = sample.get("question", number), sample.get("context", number)
                full = sample.get("nll_full") if metric == "perplexity" else None
                yield *key, metric, *place, sample[field], full


# Differences


def differences_of(pairs: pd.DataFrame) -> pd.DataFrame:
    """Differences of means: a row per run, task, range and metric, with the columns `DIFFERENCES`.

    pairs: as `samples_of`, with the other run's value in `full`. A task without the other's answer
    to one of its questions has no row.
    """
    rows = []
    for values, of_key in pairs.groupby(KEY, dropna=False):
        if of_key["full"].notna().all():
            key = dict(zip(KEY, values, strict=True))
            rows.append(key | _difference(key["metric"], of_key))
    numbers = dict.fromkeys(["first", *DIFFERENCES[len(KEY) :]], float)
    return pd.DataFrame(rows, columns=DIFFERENCES).astype(numbers)


def _difference(metric: str, pairs: pd.DataFrame) -> Numbers:
    """The columns of a difference behind its key.

    The error of a difference of exponentials is the delta method's: a window changes the difference
    by its change of the two means, times the slope of exp there.
    """
    own, full = pairs["value"].to_numpy(), pairs["full"].to_numpy()
    mean, change = own.mean(), own - full
    difference = change.mean()
    if metric in EXPONENTIAL:
        mean, mean_full = math.exp(mean), math.exp(full.mean())
        difference, change = mean - mean_full, mean * own - mean_full * full
    contexts = pairs["context"].tolist()
    found = _tested(difference, clustered_stderr(change.tolist(), contexts), len({*contexts}))
    found |= {"mean": mean, "num_pairs": len(pairs)}
    values = {*own, *full}
    if metric in EXPONENTIAL:
        return found
    if found["difference_stderr"] == 0 and min(values) >= 0 and max(values) <= 1:
        found["detectable"] = unseen_rate(len({*contexts}))
    if values <= {0, 1}:
        found |= {"gained": (change == 1).sum(), "lost": (change == -1).sum()}
    return found


def _tested(difference: float, stderr: float | None, num_contexts: float) -> Numbers:
    """A difference with the two-sided p-value of 0, by the paired t-test of its contexts, and the
    smallest difference that a test at 5 % detects four times in five."""
    return {
        "difference": difference,
        "difference_stderr": stderr,
        "p": two_sided_p(difference, stderr, num_contexts - 1),
        "detectable": detectable(num_contexts) * stderr if stderr else None,
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
    found: list[Record] = []
    for folder in results_dirs:
        found += current(filter(is_full, read_all(folder)))
    return found


class Baselines:
    """The full cache's runs.

    A run is compared with the newest one on the same questions, whatever code made it; one of its
    own experiment comes first.

    records: finished records. elsewhere: returns further ones; called once, and only if `records`
    has no match.
    """

    def __init__(
        self, records: Iterable[Record], elsewhere: Callable[[], Iterable[Record]] = tuple
    ) -> None:
        self._here = _newest_first(records)
        self._elsewhere = cache(lambda: _newest_first(elsewhere()))

    def runs_for(self, record: Record) -> Iterator[Record]:
        """The full cache's runs on the same questions, the own experiment's first, those from
        elsewhere last."""
        for full_runs in (lambda: self._here, self._elsewhere):
            known = sorted(full_runs(), key=lambda run: run["experiment"] != record["experiment"])
            for full in known:
                if same_questions(record, full):
                    yield full


def with_full(samples: pd.DataFrame, records: Iterable[Record], full: Baselines) -> pd.DataFrame:
    """The samples of runs of methods, with the full cache's value on a question in `full`: that of
    the first of its runs which has one."""
    matches, runs = [], {}
    for record in records:
        is_asked = not record["samples"].keys() & NOT_ASKED
        for run in full.runs_for(record) if is_asked and not is_full(record) else ():
            runs[run["run_id"]] = run
            matches.append((record["run_id"], run["run_id"]))
            if record["samples"].keys() <= run["samples"].keys():
                break
    answer = [*KEY[1:], "question"]
    answers = samples_of(runs.values())[["run_id", *answer, "value"]]
    answers = answers.rename(columns={"run_id": "full_run", "value": "answer"})
    found = pd.DataFrame(matches, columns=["run_id", "full_run"]).merge(answers, on="full_run")
    found = found.drop_duplicates(["run_id", *answer]).drop(columns="full_run")
    of_methods = {record["run_id"] for record in records if not is_full(record)}
    pairs = samples[samples["run_id"].isin(of_methods)]
    pairs = pairs.merge(found, how="left", on=["run_id", *answer])
    return pairs.assign(full=pairs["full"].fillna(pairs["answer"]))


def _newest_first(records: Iterable[Record]) -> list[Record]:
    return sorted(filter(is_full, records), key=lambda record: record["started"], reverse=True)


def same_questions(record: Record, full: Record) -> bool:
    """Whether two runs were asked the same questions of the same model.

    Each may have read further tasks.
    """
    names = {"kind", "model", *find(record["kind"]).depends_on} - MAY_DIFFER
    of_own, of_full = ({name: run["config"].get(name) for name in names} for run in (record, full))
    if without_paths(of_own) != without_paths(of_full):
        return False
    own, other = record["inputs"], full["inputs"]
    for name in own.keys() & other.keys() - OF_METHODS:
        if not name.startswith(CODE) and own[name] != other[name]:
            return False
    return True

"""Rows of the board: each method's KL beside the oracle's, and its answers.

`Setting` is one asked size and one length of windows. The oracle's windows are what is compared. A
method that lacks some of them, or cannot have the size, is shown apart and not compared.
`harness/results/board_stats.py` has the statistics.
"""

import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from harness.results import columns
from harness.results.board_sources import Series
from harness.results.board_stats import (
    Design,
    Estimate,
    Pair,
    compare_all,
    ranks,
)
from harness.results.columns import TableRow
from harness.results.metrics import CACHE, EQUAL, SIZE, Metric
from harness.results.samples import RULE_OF_THREE
from harness.results.sheet import show_range
from harness.results.step_time import BoardSteps

LEAST_KL = 1e-6
"""Nats: a smaller KL is rounding, and has no logarithm to speak of."""
ALL_MODELS, ALL_TEXTS, ALL_TASKS = "all models", "all texts", "all tasks"
OF_KL, OF_ANSWERS = "KL", "answers"
RULE_OF_PAPER = "oracle-infinigen"
"""The oracle by the paper's rule for a group."""
ORACLES = ("oracle", RULE_OF_PAPER)
"""Methods that select by the true scores, so they are upper bounds."""
OWN_SIZE = "reads at a size of its own"
"""Why a method without a size is not compared."""

Window = tuple[str, str, float]
"""Model, text and place of a window."""
Context = tuple[str, str, int]
"""Model, task and number of a context of questions."""
Key = TypeVar("Key", Window, Context)


def rows_at(rows: Mapping[Key, TableRow], keys: Iterable[Key]) -> list[TableRow]:
    """The rows of windows or contexts."""
    return [rows[key] for key in keys]


def in_both(keys: Iterable[Key], others: Container[Key]) -> list[Key]:
    """The windows or contexts that are among the others too."""
    return [key for key in keys if key in others]


def on_models(keys: Iterable[Key], models: Container[str]) -> list[Key]:
    """The windows or contexts on these models."""
    return [key for key in keys if key[0] in models]


# KL: windows of one length


class Measured(NamedTuple):
    """A series on the windows of one length. rows: by window."""

    series: Series
    rows: Mapping[Window, TableRow]

    def kl(self, windows: Iterable[Window]) -> list[float]:
        """KL of these windows in nats."""
        return columns.values(rows_at(self.rows, windows), "kl_nats")

    def logs(self, windows: Iterable[Window]) -> list[float]:
        """Logarithms of the KL of these windows, which must be positive."""
        return list(map(math.log, self.kl(windows)))

    def num_zeros(self, windows: Iterable[Window]) -> int:
        """How many of these windows have a KL without a logarithm."""
        return sum(kl <= LEAST_KL for kl in self.kl(windows))


def _measured(series: Series, seq_len: int) -> Measured:
    rows = {}
    for row in series.windows:
        if row["seq_len"] == seq_len:
            rows[row["model"], row["text"], float(row["place"])] = row
    return Measured(series, rows)


def _design(windows: Sequence[Window]) -> Design:
    models, texts, places = zip(*windows, strict=True)
    return Design(models, texts, places)


def log_ratio(own: Measured, other: Measured, windows: Sequence[Window]) -> Estimate | None:
    """The mean logarithm of the ratio of two methods' KL, over the models of the windows; None
    where a KL has no logarithm."""
    if not windows:
        return None
    if own.num_zeros(windows) or other.num_zeros(windows):
        return None
    return _design(windows).over_models(np.subtract(own.logs(windows), other.logs(windows)))


def exponential(estimate: Estimate) -> tuple[float, float | None, float | None]:
    """A ratio and its 95 % interval, from its logarithm."""
    half = estimate.half_width
    ratio = math.exp(estimate.value)
    if half is None:
        return ratio, None, None
    return ratio, math.exp(estimate.value - half), math.exp(estimate.value + half)


class Models(NamedTuple):
    """The models of all results, and those over which the table's means go.

    A model is among the latter if at least half as many methods ran at a size on it as on the model
    with the most. So a method that ran on one more model stays comparable with the others.
    """

    all: Sequence[str]
    together: Sequence[str]

    @property
    def left_out(self) -> list[str]:
        """Those over which no mean goes."""
        return [model for model in self.all if model not in self.together]


def models_of(series: Iterable[Series]) -> Models:
    """The models in the order in which they come."""
    counts: dict[str, int] = {}
    for one in series:
        for model in dict.fromkeys(columns.values(one.windows, "model")):
            counts.setdefault(model, 0)
            counts[model] += one.asked_size is not None
        for model in columns.values(one.answers, "model"):  # of which there may be no windows
            counts.setdefault(model, 0)
    most = max(counts.values(), default=0)
    return Models(list(counts), [model for model in counts if 2 * counts[model] >= most])


def of_one_model(series: Iterable[Series], model: str) -> list[Series]:
    """The series with the windows and answers of one model, where there are any."""
    found = []
    for one in series:
        windows = [row for row in one.windows if row["model"] == model]
        answers = [row for row in one.answers if row["model"] == model]
        if windows or answers:
            found.append(one._replace(windows=windows, answers=answers))
    return found


class Setting:
    """A size and a length: the methods that ran there, and which of them are compared.

    reference: the oracle. windows: those of the oracle on the models of the table. compared:
    methods at this size with a KL in all of these windows, the oracle among them. apart: the
    others, with the reason in words.
    """

    def __init__(
        self, asked_size: float, seq_len: int, found: Sequence[Measured], models: Models
    ) -> None:
        self.asked_size = asked_size
        self.seq_len = seq_len
        self.found = found
        self.reference = _reference(found)
        of_oracle = self.reference.rows if self.reference else {}
        self.windows = on_models(of_oracle, models.together)
        self.compared: list[Measured] = []
        self.apart: list[tuple[Measured, str]] = []
        for measured in found:
            reason = "; ".join(self._reasons(measured))
            if reason:
                self.apart.append((measured, reason))
            else:
                self.compared.append(measured)

    def _reasons(self, measured: Measured) -> Iterator[str]:
        """In words, why a method is not compared with the others; nothing if it is."""
        if self.reference is None:
            yield "the oracle has no windows here"
            return
        num_zeros = self.reference.num_zeros(self.windows)
        if num_zeros:
            yield f"the oracle's KL is 0 in {num_zeros} of {len(self.windows)} windows"
            return
        if measured.series.is_full:
            yield "the full cache itself, whose KL is 0"
            return
        if measured.series.asked_size is None:
            yield OWN_SIZE
        elif not has_size(measured.rows.values(), self.asked_size):
            yield f"cannot have this size: reads {_size_in_words(measured.rows.values())} %"
        missing = set(self.windows) - measured.rows.keys()
        if missing:
            yield f"lacks {_named(in_both(self.windows, missing), self.windows)}"
        shared = self.shared(measured)
        num_zeros = measured.num_zeros(shared)
        if num_zeros:
            yield f"its KL is 0 in {num_zeros} of {len(shared)} windows, which has no ratio"

    def shared(self, measured: Measured) -> list[Window]:
        """The windows that a method and the oracle have."""
        return in_both(self.windows, measured.rows)

    def to_oracle(self, measured: Measured, windows: Sequence[Window]) -> Estimate | None:
        """The logarithm of a method's KL over the oracle's, on windows that both have."""
        if self.reference is None:
            return None
        return log_ratio(measured, self.reference, windows)


def _reference(found: Iterable[Measured]) -> Measured | None:
    """The oracle at the asked size; where it did not run, the oracle by InfiniGen's rule."""
    by_method: dict[str, Measured] = {}
    for measured in found:
        if measured.series.asked_size is not None and not measured.series.codec:
            by_method.setdefault(measured.series.method, measured)
    for method in ORACLES:
        if method in by_method:
            return by_method[method]
    return None


def has_size(rows: Iterable[TableRow], asked: float | None) -> bool:
    """Whether a method reads its asked size on each model, and each text or task of it."""
    for of_part in columns.grouped(rows, _model_and_part).values():
        if asked is not None and abs(_mean(of_part, "size") - asked) > EQUAL:
            return False
    return True


def _model_and_part(row: TableRow) -> tuple[str, str]:
    return row["model"], row.get("text") or row["task"]


def _mean(rows: Sequence[TableRow], name: str) -> float:
    return math.fsum(columns.values(rows, name)) / len(rows)  # of equal values exactly theirs


def _range_over_models(rows: Iterable[TableRow], name: str) -> tuple[Any, Any]:
    """The least and the largest of the models' means; None where none is known."""
    known = columns.having(rows, name)
    means = []
    for of_model in columns.grouped(known, lambda row: row["model"]).values():
        means.append(_mean(of_model, name))
    return min(means, default=None), max(means, default=None)


def _size_in_words(rows: Iterable[TableRow]) -> str:
    """The size that is read, in percent, or its range over models."""
    return show_range(SIZE, _range_over_models(rows, "size"), " to ")


def _named(missing: Sequence[Key], all_of_them: Sequence[Key]) -> str:
    """In words, what of all windows or contexts is missing: whole models, whole texts of a model,
    or so many."""
    words = []
    of_models = columns.grouped(all_of_them, lambda key: key[0])
    of_parts = columns.grouped(all_of_them, lambda key: key[:2])
    for model, of_model in columns.grouped(missing, lambda key: key[0]).items():
        if len(of_model) == len(of_models[model]):
            words.append(model)
            continue
        for (_, part), of_part in columns.grouped(of_model, lambda key: key[:2]).items():
            total = len(of_parts[model, part])
            count = "" if len(of_part) == total else f"{len(of_part)} of {total} of "
            words.append(f"{count}{part} on {model}")
    return ", ".join(words)


def settings_of(series: Sequence[Series], models: Models) -> list[Setting]:
    """Each asked size at each length, the largest size first."""
    asked: set[float] = set()
    lengths: set[int] = set()
    for one in series:
        if one.asked_size is not None:
            asked.add(one.asked_size)
        lengths.update(columns.values(one.windows, "seq_len"))
    found = []
    for size, seq_len in itertools.product(sorted(asked, reverse=True), sorted(lengths)):
        here = []
        sized = False
        for one in series:
            measured = _measured(one, seq_len)
            if measured.rows and one.asked_size in (size, None):
                here.append(measured)
                sized = sized or one.asked_size is not None
        if sized:
            found.append(Setting(size, seq_len, here, models))
    return found


# Answers


Answers = Mapping[Context, TableRow]
"""The rows of a series by context."""


class Gap(NamedTuple):
    """The share of right answers of a method and its difference to another's on the same
    questions, with the 95 % interval."""

    share: float
    difference: float
    low: float | None
    high: float | None
    num_questions: int
    num_contexts: int


def answers_of(series: Series) -> dict[Context, TableRow]:
    """The rows of a series by context."""
    rows = {}
    for row in series.answers:
        rows[row["model"], row["task"], row["context_id"]] = row
    return rows


def gap_of(own: Answers, other: Answers, contexts: Sequence[Context]) -> Gap | None:
    """The difference of the answers to the questions on these contexts; None without any."""
    if not contexts:
        return None
    shares, shares_of_other, asked = [], [], []
    for context in contexts:
        count = own[context]["asked"]
        asked.append(count)
        shares.append(own[context]["right"] / count)
        shares_of_other.append(other[context]["right"] / count)
    models, tasks, numbers = zip(*contexts, strict=True)
    design = Design(models, tasks, numbers, asked)
    found = design.over_models(np.subtract(shares, shares_of_other))
    half = found.half_width
    if half == 0:  # no answer differs, which a few questions do not make impossible
        half = RULE_OF_THREE / sum(asked)
    return Gap(
        share=design.mean(shares),
        difference=found.value,
        low=None if half is None else found.value - half,
        high=None if half is None else found.value + half,
        num_questions=sum(asked),
        num_contexts=found.num_clusters,
    )


def same_contexts(own: Answers, other: Answers) -> list[Context]:
    """The contexts on which both were asked the same questions: as many, in prompts of one length.

    A context is known by its number alone, which other questions of the task have too.
    """
    found = []
    for context, row in own.items():
        others_row = other.get(context)
        if others_row is None:
            continue
        if (row["asked"], row["prompt_len"]) == (others_row["asked"], others_row["prompt_len"]):
            found.append(context)
    return found


def full_answers(series: Iterable[Series]) -> dict[Context, TableRow]:
    """The full cache's rows by context; {} where it was not asked."""
    for one in series:
        if one.is_full:
            return answers_of(one)
    return {}


# Rows


def pairs_of(setting: Setting) -> list[Pair]:
    """The tests of all pairs of compared methods, by their numbers among `setting.compared`."""
    if len(setting.compared) < 2:
        return []
    logs = [measured.logs(setting.windows) for measured in setting.compared]
    return compare_all(_design(setting.windows), logs)


def pair_rows(setting: Setting, pairs: Iterable[Pair]) -> Iterator[TableRow]:
    """The rows of the tests."""
    labels = [measured.series.label for measured in setting.compared]
    for pair in pairs:
        ratio, low, high = exponential(pair.estimate)
        yield {
            "model": _models_of(setting.windows),
            "asked_size": setting.asked_size,
            "seq_len": setting.seq_len,
            "label": labels[pair.first],
            "other": labels[pair.second],
            "ratio": ratio,
            "ratio_low": low,
            "ratio_high": high,
            "degrees": pair.estimate.degrees,
            "p": pair.estimate.p,
            "p_holm": pair.p_holm,
            "closer": "" if pair.closer is None else labels[pair.closer],
        }


def _models_of(keys: Iterable[tuple[str, Any, Any]]) -> str:
    """The names of the models of windows or contexts."""
    return ", ".join(dict.fromkeys(key[0] for key in keys))


def method_rows(
    setting: Setting, pairs: Sequence[Pair], full: Answers, steps: BoardSteps
) -> Iterator[TableRow]:
    """The rows of a size and a length: the compared methods by their ratio, then the others."""
    estimates = []
    for measured in setting.compared:
        estimate = setting.to_oracle(measured, setting.windows)
        assert estimate is not None, "compared methods have a ratio"
        estimates.append(estimate)
    places = ranks([estimate.value for estimate in estimates], pairs)
    found = []
    for measured, estimate, rank in zip(setting.compared, estimates, places, strict=True):
        row = _method_row(setting, measured, estimate, full, steps)
        row |= {"rank": rank.value, "rank_low": rank.low, "rank_high": rank.high, "apart": ""}
        found.append(row | {"num_compared": len(setting.compared)})
    for measured, reason in setting.apart:
        estimate_apart = None
        if not measured.series.is_full:
            estimate_apart = setting.to_oracle(measured, setting.shared(measured))
        row = _method_row(setting, measured, estimate_apart, full, steps)
        found.append(row | {"apart": reason})
    yield from sorted(found, key=_by_ratio)


def _by_ratio(row: TableRow) -> tuple[bool, float]:
    ratio = row["ratio"]
    return bool(row["apart"]), math.inf if ratio is None else ratio


def _method_row(
    setting: Setting,
    measured: Measured,
    estimate: Estimate | None,
    full: Answers,
    steps: BoardSteps,
) -> TableRow:
    series = measured.series
    windows = setting.shared(measured) or list(measured.rows)
    here = rows_at(measured.rows, windows)
    is_shipped = all(columns.values((*here, *series.answers), "shipped"))
    row: TableRow = {
        "model": _models_of(windows),
        "method": series.method,
        "family": here[0].get("family"),
        "label": series.label,
        "asked_size": setting.asked_size,
        "seq_len": setting.seq_len,
        "kl_nats": _geometric_mean(measured, windows),
        "ratio": None,
        "num_models": len({window[0] for window in windows}),
        "num_windows": len(windows),
        "num_places": len({window[1:] for window in windows}),
        "exempt_numbers": _exempt_numbers(here),
        "shipped": "yes" if is_shipped else "",
    }
    if estimate is not None:
        row["ratio"], row["ratio_low"], row["ratio_high"] = exponential(estimate)
        row["degrees"] = estimate.degrees
    if measured is setting.reference:  # 1 by its meaning
        row["ratio_low"] = row["ratio_high"] = None
    for name in ("size", "device_frac", "resident_frac"):
        row[f"{name}_low"], row[f"{name}_high"] = _range_over_models(here, name)
    return row | _answer_columns(series, full) | steps.step_of(list(measured.rows.values()))


def _geometric_mean(measured: Measured, windows: Sequence[Window]) -> float | None:
    """The geometric mean of the KL of windows; None where one has no logarithm."""
    if measured.num_zeros(windows):
        return None
    return math.exp(_design(windows).mean(measured.logs(windows)))


def _exempt_numbers(rows: Iterable[TableRow]) -> str:
    numbers = set(columns.values(rows, "exempt_layers")) - {None}
    return " or ".join(map(columns.EXEMPT_LAYERS.show, sorted(numbers)))


def _answer_columns(series: Series, full: Answers) -> TableRow:
    """The share of right answers, its difference to the full cache, and what to know of it."""
    own = answers_of(series)
    found = gap_of(own, full, same_contexts(own, full))
    if found is None:
        return {"answers_note": ""}
    row: TableRow = {
        "answers": found.share,
        "num_questions": found.num_questions,
        "num_contexts": found.num_contexts,
    }
    if not series.is_full:
        row["answers_difference"] = found.difference
        row["answers_difference_low"] = found.low
        row["answers_difference_high"] = found.high
    notes = []
    if not has_size(series.answers, series.asked_size):
        notes.append(f"reads {_size_in_words(series.answers)} % on the tasks")
    missing = full.keys() - own.keys()
    if missing:
        notes.append(f"lacks {_named(in_both(full, missing), list(full))}")
    return row | {"answers_note": "; ".join(notes)}


# Fronts


def traffic(row: TableRow) -> float:
    """Bytes that a step moves over the link and reads on the device, of the full cache's; the mean
    of the models' least and largest."""
    return _middle(row, "size") + _middle(row, "device_frac")


def _middle(row: TableRow, name: str) -> float:
    middle: float = (row[f"{name}_low"] + row[f"{name}_high"]) / 2
    return middle


TRAFFIC = Metric("traffic", "link + device", CACHE, 1, "less", logarithmic=True)
COSTS: Mapping[str, Callable[[TableRow], float | None]] = {
    "link": lambda row: _middle(row, "size"),
    "link + device": traffic,
    "kept on device": lambda row: row["resident_frac_high"],
    "step time": lambda row: row.get("step_s"),
}
"""What a step of a method costs, by the name of the front. Kept on the device: on the model with
the largest share."""
SAME_STEP = 0.01
"""Step times that differ by at most this share count as equal."""


def on_a_front(row: TableRow) -> bool:
    """Whether a row may be on a front: measured in all windows, at its size or at one of its own,
    and no oracle."""
    has_all = not row["apart"] or row["apart"] == OWN_SIZE
    return has_all and row["kl_nats"] is not None and row["method"] not in ORACLES


def with_fronts(rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows with `front`: the costs at which no method is closer to the full cache for no more.

    Rows of one length of windows are compared, of all sizes.
    """
    found = []
    by_length = columns.grouped(filter(on_a_front, rows), lambda row: row["seq_len"])
    for row in rows:
        names = []
        if on_a_front(row):
            others = by_length[row["seq_len"]]
            names = [name for name in COSTS if _is_unbeaten(row, others, name)]
        found.append(row | {"front": ", ".join(names)})
    return found


def _is_unbeaten(row: TableRow, others: Iterable[TableRow], name: str) -> bool:
    cost_of = COSTS[name]
    cost = cost_of(row)
    if cost is None:
        return False
    if name == "link":
        cost += EQUAL
    if name == "step time":
        cost *= 1 + SAME_STEP
    for other in others:
        others_cost = cost_of(other)
        is_closer = other["kl_nats"] < row["kl_nats"]
        if is_closer and others_cost is not None and others_cost <= cost:
            return False
    return True


# By model and domain


def kl_by_model(setting: Setting, models: Models) -> Iterator[TableRow]:
    """KL and its ratio to the oracle's, on each model and on all, on each text and on all."""
    reference = setting.reference
    for measured in setting.found:
        if measured.series.is_full or reference is None:
            continue
        shared = in_both(reference.rows, measured.rows)
        for model, domain, windows in _parts(shared, models, ALL_TEXTS):
            row = {
                "model": model,
                "method": measured.series.method,
                "label": measured.series.label,
                "asked_size": setting.asked_size,
                "seq_len": setting.seq_len,
                "domain": domain,
                "measure": OF_KL,
                "value": _design(windows).mean(measured.kl(windows)),
                "count": len(windows),
                "num_contexts": len({window[1:] for window in windows}),
            }
            estimate = setting.to_oracle(measured, windows)
            if estimate is not None and measured is not reference:
                row["versus"], row["versus_low"], row["versus_high"] = exponential(estimate)
            yield row


def answers_by_model(series: Iterable[Series], models: Models, full: Answers) -> Iterator[TableRow]:
    """The share of right answers and its difference to the full cache, likewise."""
    for one in series:
        own = answers_of(one)
        for model, domain, contexts in _parts(same_contexts(own, full), models, ALL_TASKS):
            found = gap_of(own, full, contexts)
            assert found is not None, "parts are not empty"
            row = {
                "model": model,
                "method": one.method,
                "label": one.label,
                "asked_size": one.asked_size,
                "seq_len": None,
                "domain": domain,
                "measure": OF_ANSWERS,
                "value": found.share,
                "count": found.num_questions,
                "num_contexts": found.num_contexts,
            }
            if not one.is_full:
                row["versus"] = found.difference
                row["versus_low"], row["versus_high"] = found.low, found.high
            yield row


def _parts(keys: Sequence[Key], models: Models, words: str) -> Iterator[tuple[str, str, list[Key]]]:
    """(model, domain, its windows or contexts): each model and all, each domain and all of them.

    words: for all domains. What would say the same twice is left out.
    """
    for model, of_model in by_model(keys, models):
        domains = columns.grouped(of_model, lambda key: key[1])
        for domain, of_domain in domains.items():
            yield model, domain, of_domain
        if len(domains) > 1:
            yield model, words, of_model


def by_model(keys: Sequence[Key], models: Models) -> Iterator[tuple[str, list[Key]]]:
    """The windows or contexts of each model, then those of all models of the table; what is empty
    is left out."""
    for model in models.all:
        of_model = on_models(keys, [model])
        if of_model:
            yield model, of_model
    together = on_models(keys, models.together)
    if together and len(models.together) > 1:
        yield ALL_MODELS, together

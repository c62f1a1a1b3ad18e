"""Rows of the board: each method's KL beside the oracle's, and its answers.

`Setting` is one asked budget and one length of windows. The oracle's windows are what is compared.
A method that lacks some of them, or cannot have the budget, is shown apart and not compared.
`harness/results/stats.py` has the statistics.

A window is known by its model, text and place, a context of questions by model, task and number.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from harness.results.board_sources import (
    BoardSteps,
    Key,
    Models,
    Rows,
    Series,
    in_both,
    models_at,
    on_models,
    rows_at,
)
from harness.results.columns import TableRow, grouped, having, values, where
from harness.results.metrics import BUDGET, CACHE, DENSE_LAYERS, EQUAL, Metric
from harness.results.sheet import show_range
from harness.results.stats import Design, Estimate, Pair, compare_all, ranks, unseen_rate

Keys = Sequence[Key]
LEAST_KL = 1e-6
"""Nats: a smaller KL is rounding, and has no logarithm to speak of."""
ALL_MODELS, ALL_TEXTS, ALL_TASKS = "all models", "all texts", "all tasks"
OF_KL, OF_ANSWERS = "KL", "answers"
HOLDS, UNSURE, FAILS = VERDICTS = ("holds", "not told apart", "does not hold")
"""Of claims."""
ORACLES = ("oracle", "oracle-infinigen")
"""Methods that select by the true scores: upper bounds of hard selection of rows; the second by the
paper's rule for a group."""
OWN_BUDGET = "reads at a budget of its own"
"""Why a method without a budget is not compared."""


def design_of(keys: Keys, counts: Sequence[float] | None = None) -> Design:
    """The design of values that were measured there."""
    models, parts, clusters = zip(*keys, strict=True)
    return Design(models, parts, clusters, counts)


# KL: windows of one length


class Measured(NamedTuple):
    """A series on the windows of one length."""

    series: Series
    rows: Rows

    def kl(self, windows: Keys) -> list[float]:
        """KL of these windows in nats."""
        return values(rows_at(self.rows, windows), "kl_nats")

    def logs(self, windows: Keys) -> list[float]:
        """Logarithms of the KL of these windows, which must be positive."""
        return list(map(math.log, self.kl(windows)))

    def num_zeros(self, windows: Keys) -> int:
        """How many of these windows have a KL without a logarithm."""
        return sum(kl <= LEAST_KL for kl in self.kl(windows))


def log_ratio(own: Measured, other: Measured, windows: Keys) -> Estimate | None:
    """The mean logarithm of the ratio of two methods' KL, over the models of the windows; None
    where a KL has no logarithm."""
    if not windows or own.num_zeros(windows) or other.num_zeros(windows):
        return None
    return design_of(windows).over_models(np.subtract(own.logs(windows), other.logs(windows)))


def exponential(name: str, estimate: Estimate | None) -> TableRow:
    """The columns of a ratio and its 95 % interval, from its logarithm; {} without one."""
    if estimate is None:
        return {}
    half = estimate.half_width
    low = None if half is None else math.exp(estimate.value - half)
    high = None if half is None else math.exp(estimate.value + half)
    return {name: math.exp(estimate.value), f"{name}_low": low, f"{name}_high": high}


class Setting:
    """A budget and a length: the methods that ran there, and which of them are compared.

    reference: the oracle at the asked budget; where it did not run, that by InfiniGen's rule.
    windows: those of the oracle on the models of the table. compared: methods at this budget with a
    KL in all of these windows, the oracle among them. apart: the others, with the reason in words.
    """

    def __init__(
        self, asked_budget: float, seq_len: int, found: Sequence[Measured], models: Models
    ) -> None:
        self.asked_budget = asked_budget
        self.seq_len = seq_len
        self.found = found
        with_budget = [one for one in found if one.series.asked_budget is not None]
        by_method = {one.series.method: one for one in with_budget[::-1] if not one.series.codec}
        self.reference = next((by_method[name] for name in ORACLES if name in by_method), None)
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
        if measured.series.asked_budget is None:
            yield OWN_BUDGET
        elif not has_budget(measured.rows.values(), self.asked_budget):
            yield f"cannot have this budget: reads {_budget_in_words(measured.rows.values())} %"
        shared = self.shared(measured)
        if len(shared) < len(self.windows):
            missing = [window for window in self.windows if window not in measured.rows]
            yield f"lacks {_named(missing, self.windows)}"
        num_zeros = measured.num_zeros(shared)
        if num_zeros:
            yield f"its KL is 0 in {num_zeros} of {len(shared)} windows, which has no ratio"

    def shared(self, measured: Measured) -> Keys:
        """The windows that a method and the oracle have."""
        return in_both(self.windows, measured.rows)

    def to_oracle(self, measured: Measured, windows: Keys) -> Estimate | None:
        """The logarithm of a method's KL over the oracle's, on windows that both have."""
        if self.reference is None or measured.series.is_full:
            return None
        return log_ratio(measured, self.reference, windows)


def settings_of(series: Sequence[Series], models: Models) -> list[Setting]:
    """Each asked budget at each length, the largest budget first."""
    asked = {one.asked_budget for one in series if one.asked_budget is not None}
    lengths = set(itertools.chain.from_iterable(one.windows for one in series))
    found = []
    for budget, seq_len in itertools.product(sorted(asked, reverse=True), sorted(lengths)):
        here = []
        for one in series:
            if seq_len in one.windows and one.asked_budget in (budget, None):
                here.append(Measured(one, one.windows[seq_len]))
        if any(measured.series.asked_budget is not None for measured in here):
            found.append(Setting(budget, seq_len, here, models))
    return found


def has_budget(rows: Iterable[TableRow], asked: float | None) -> bool:
    """Whether a method reads its asked budget on each model, and each text or task of it."""
    parts = grouped(rows, lambda row: (row["model"], row.get("text") or row["task"]))
    means = [statistics.fmean(values(of_part, "budget")) for of_part in parts.values()]
    return asked is None or all(abs(mean - asked) <= EQUAL for mean in means)


def _range_over_models(rows: Iterable[TableRow], name: str) -> tuple[float | None, float | None]:
    """The least and the largest of the models' means; None where none is known."""
    models = grouped(having(rows, name), itemgetter("model"))
    means = [statistics.fmean(values(of_model, name)) for of_model in models.values()]
    return min(means, default=None), max(means, default=None)


def _budget_in_words(rows: Iterable[TableRow]) -> str:
    return show_range(BUDGET, _range_over_models(rows, "budget"), " to ")


def _named(missing: Keys, every: Keys) -> str:
    """In words, what of all windows or contexts is missing: whole models, whole texts of a model,
    or so many."""
    words = []
    for model, of_model in grouped(missing, lambda key: key[0]).items():
        if len(of_model) == len(on_models(every, [model])):
            words.append(model)
            continue
        for part, of_part in grouped(of_model, lambda key: key[1]).items():
            total = sum(key[:2] == (model, part) for key in every)
            count = "" if len(of_part) == total else f"{len(of_part)} of {total} of "
            words.append(f"{count}{part} on {model}")
    return ", ".join(words)


# Answers


class Gap(NamedTuple):
    """The share of right answers of a method and its difference to another's on the same
    questions, with the 95 % interval."""

    share: float
    difference: float
    low: float | None
    high: float | None
    num_questions: int
    num_contexts: int

    def columns(self, name: str) -> TableRow:
        """The columns of the difference."""
        return {name: self.difference, f"{name}_low": self.low, f"{name}_high": self.high}


def gap_of(own: Rows, other: Rows, contexts: Keys) -> Gap | None:
    """The difference of the answers to the questions on these contexts; None without any."""
    if not contexts:
        return None
    asked = values(rows_at(own, contexts), "asked")
    shares = np.divide(values(rows_at(own, contexts), "right"), asked)
    shares_of_other = np.divide(values(rows_at(other, contexts), "right"), asked)
    differences = shares - shares_of_other
    design = design_of(contexts, asked)
    found = design.over_models(differences)
    half = found.half_width
    if half == 0 and differences.any():  # the models differ alike, and their contexts need not
        half = design.estimate(differences).half_width
    if half == 0:  # no context differs from another, which a few contexts do not make impossible
        half = unseen_rate(found.num_clusters)
    return Gap(
        share=design.mean(shares),
        difference=found.value,
        low=None if half is None else found.value - half,
        high=None if half is None else found.value + half,
        num_questions=sum(asked),
        num_contexts=found.num_clusters,
    )


def same_contexts(own: Rows, other: Rows) -> Keys:
    """The contexts on which both were asked the same questions: as many, in prompts of one length.

    A context is known by its number alone, which other questions of the task have too.
    """
    asked_of = itemgetter("asked", "prompt_len")
    both = in_both(own, other)
    return [context for context in both if asked_of(own[context]) == asked_of(other[context])]


def full_answers(series: Iterable[Series]) -> Rows:
    """The full cache's rows; none where it was not asked."""
    return next((one.answers for one in series if one.is_full), {})


# Rows


def pairs_of(setting: Setting) -> list[Pair]:
    """The tests of all pairs of compared methods, by their numbers among `setting.compared`."""
    if len(setting.compared) < 2:
        return []
    logs = [measured.logs(setting.windows) for measured in setting.compared]
    return compare_all(design_of(setting.windows), logs)


def pair_rows(setting: Setting, pairs: Iterable[Pair]) -> Iterator[TableRow]:
    """The rows of the tests."""
    labels = [measured.series.label for measured in setting.compared]
    for pair in pairs:
        yield exponential("ratio", pair.estimate) | {
            "model": ", ".join(models_at(setting.windows)),
            "asked_budget": setting.asked_budget,
            "seq_len": setting.seq_len,
            "label": labels[pair.first],
            "other": labels[pair.second],
            "degrees": pair.estimate.degrees,
            "p": pair.estimate.p,
            "p_holm": pair.p_holm,
            "closer": "" if pair.closer is None else labels[pair.closer],
        }


def method_rows(
    setting: Setting, pairs: Sequence[Pair], full: Rows, steps: BoardSteps
) -> list[TableRow]:
    """The rows of a budget and a length: the compared methods by their ratio, then the others."""
    found = []
    for measured in setting.compared:
        row = _method_row(setting, measured, setting.windows, full, steps)
        found.append(row | {"apart": "", "num_compared": len(setting.compared)})
    for row, rank in zip(found, ranks(values(found, "ratio"), pairs), strict=True):
        row |= {"rank": rank.value, "rank_low": rank.low, "rank_high": rank.high}
    for measured, reason in setting.apart:
        row = _method_row(setting, measured, setting.shared(measured), full, steps)
        found.append(row | {"apart": reason})

    def order(row: TableRow) -> tuple[bool, float]:
        return bool(row["apart"]), math.inf if row["ratio"] is None else row["ratio"]

    return sorted(found, key=order)


def _method_row(
    setting: Setting, measured: Measured, shared: Keys, full: Rows, steps: BoardSteps
) -> TableRow:
    series = measured.series
    windows = shared or list(measured.rows)
    here = rows_at(measured.rows, windows)
    numbers = sorted(set(values(here, "dense_layers")) - {None})
    is_shipped = all(values([*here, *series.answers.values()], "shipped"))
    estimate = setting.to_oracle(measured, shared)
    mean_kl = None
    if not measured.num_zeros(windows):
        mean_kl = math.exp(design_of(windows).mean(measured.logs(windows)))
    row: TableRow = {
        "model": ", ".join(models_at(windows)),
        "method": series.method,
        "codec": here[0].get("codec"),
        "family": here[0].get("family"),
        "label": series.label,
        "asked_budget": setting.asked_budget,
        "seq_len": setting.seq_len,
        "kl_nats": mean_kl,
        "ratio": None,
        "degrees": None if estimate is None else estimate.degrees,
        "num_models": len(models_at(windows)),
        "num_windows": len(windows),
        "num_places": len({window[1:] for window in windows}),
        "dense_numbers": " or ".join(map(DENSE_LAYERS.show, numbers)),
        "shipped": "yes" if is_shipped else "",
    } | exponential("ratio", estimate)
    if measured is setting.reference:  # 1 by its meaning
        row["ratio_low"] = row["ratio_high"] = None
    for name in ("budget", "device_frac", "resident_frac"):
        row[f"{name}_low"], row[f"{name}_high"] = _range_over_models(here, name)
    return row | _answer_columns(series, full) | steps.step_of(measured.rows.values())


def _answer_columns(series: Series, full: Rows) -> TableRow:
    """The share of right answers, its difference to the full cache, and what to know of it."""
    own = series.answers
    found = gap_of(own, full, same_contexts(own, full))
    if found is None:
        return {"answers_note": ""}
    notes = []
    if not has_budget(own.values(), series.asked_budget):
        notes.append(f"reads {_budget_in_words(own.values())} % on the tasks")
    missing = [context for context in full if context not in own]
    if missing:
        notes.append(f"lacks {_named(missing, list(full))}")
    row: TableRow = {
        "answers": found.share,
        "num_questions": found.num_questions,
        "num_contexts": found.num_contexts,
        "answers_note": "; ".join(notes),
    }
    return row if series.is_full else row | found.columns("answers_difference")


# Fronts


def traffic(row: TableRow) -> float:
    """Bytes that a step moves over the link and reads on the device, of the full cache's; the mean
    of the models' least and largest. What is left after an eviction is small and lies on the
    device."""
    over_link = 0.0 if row.get("family") == "evicts" else _middle(row, "budget")
    return over_link + _middle(row, "device_frac")


def _middle(row: TableRow, name: str) -> float:
    return float(row[f"{name}_low"] + row[f"{name}_high"]) / 2


TRAFFIC = Metric("traffic", "link + device", CACHE, 1, logarithmic=True)
COSTS: Mapping[str, Callable[[TableRow], float | None]] = {
    "link": lambda row: _middle(row, "budget"),
    "link + device": traffic,
    "resident": lambda row: row["resident_frac_high"],
    "step time": lambda row: row.get("step_s"),
}
"""What a step of a method costs, by the name of the front. Resident: on the model with
the largest share."""
SAME_STEP = 0.01
"""Step times that differ by at most this share count as equal."""


def is_whole(row: TableRow) -> bool:
    """Whether a row was measured in all windows, at its budget or at one of its own."""
    return row["apart"] in ("", None, OWN_BUDGET) and row["kl_nats"] is not None


def with_fronts(rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows with `front`: the costs at which no method is closer to the full cache for no more.

    Rows of one length of windows are compared, of all budgets. Oracles are on no front.
    """
    rivals = [row for row in rows if is_whole(row) and row["method"] not in ORACLES]
    found = []
    for row in rows:
        names = []
        if row in rivals:
            of_length = where(rivals, "seq_len", row["seq_len"])
            closer = [other for other in of_length if other["kl_nats"] < row["kl_nats"]]
            names = [name for name in COSTS if _is_unbeaten(row, closer, name)]
        found.append(row | {"front": ", ".join(names)})
    return found


def _is_unbeaten(row: TableRow, closer: Iterable[TableRow], name: str) -> bool:
    cost = COSTS[name](row)
    if cost is None:
        return False
    if name == "link":
        cost += EQUAL
    if name == "step time":
        cost *= 1 + SAME_STEP
    costs = [COSTS[name](other) for other in closer]
    return all(other is None or other > cost for other in costs)


# By model and domain


def kl_by_model(setting: Setting, models: Models) -> Iterator[TableRow]:
    """KL and its ratio to the oracle's, on each model and on all, on each text and on all."""
    reference = setting.reference
    for measured in setting.found:
        if measured.series.is_full or reference is None:
            continue
        shared = in_both(reference.rows, measured.rows)
        for model, domain, windows in _parts(shared, models, ALL_TEXTS):
            estimate = None
            if measured is not reference:
                estimate = setting.to_oracle(measured, windows)
            yield exponential("versus", estimate) | {
                "model": model,
                "method": measured.series.method,
                "label": measured.series.label,
                "asked_budget": setting.asked_budget,
                "seq_len": setting.seq_len,
                "domain": domain,
                "measure": OF_KL,
                "value": design_of(windows).mean(measured.kl(windows)),
                "count": len(windows),
                "num_contexts": len({window[1:] for window in windows}),
            }


def answers_by_model(series: Iterable[Series], models: Models, full: Rows) -> Iterator[TableRow]:
    """The share of right answers and its difference to the full cache, likewise."""
    for one in series:
        contexts_of_all = same_contexts(one.answers, full)
        for model, domain, contexts in _parts(contexts_of_all, models, ALL_TASKS):
            found = gap_of(one.answers, full, contexts)
            assert found is not None, "parts are not empty"
            row = {
                "model": model,
                "method": one.method,
                "label": one.label,
                "asked_budget": one.asked_budget,
                "seq_len": None,
                "domain": domain,
                "measure": OF_ANSWERS,
                "value": found.share,
                "count": found.num_questions,
                "num_contexts": found.num_contexts,
            }
            yield row if one.is_full else row | found.columns("versus")


def _parts(keys: Keys, models: Models, words: str) -> Iterator[tuple[str, str, Keys]]:
    """(model, domain, its windows or contexts): each model and all, each domain and all of them.

    words: for all domains. What would say the same twice is left out.
    """
    for model, of_model in by_model(keys, models):
        domains = grouped(of_model, lambda key: key[1])
        for domain, of_domain in domains.items():
            yield model, domain, of_domain
        if len(domains) > 1:
            yield model, words, of_model


def by_model(keys: Keys, models: Models) -> Iterator[tuple[str, Keys]]:
    """The windows or contexts of each model, then those of all models of the table; what is empty
    is left out."""
    parts = [(model, on_models(keys, [model])) for model in models.all]
    if len(models.together) > 1:
        parts.append((ALL_MODELS, on_models(keys, models.together)))
    yield from (part for part in parts if part[1])

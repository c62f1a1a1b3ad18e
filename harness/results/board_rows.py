"""Rows of the board: each method's KL beside the oracle's, its rank, answers, memory and step.

Methods are compared at a setting: a board, an asked budget and a length of windows. A board is over
all models or of one. The oracle's windows are what is compared: a method that lacks some of them,
or cannot have the budget, stands apart. A window is known by model, text and place, a context of
questions by model, task and number. `harness/results/stats.py` has the statistics.
"""

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from harness.results.board_evidence import step_at
from harness.results.metrics import BUDGET, DENSE_LAYERS, EQUAL
from harness.results.samples import FULL
from harness.results.sheet import show_range
from harness.results.stats import LEVEL, estimates, holm, unseen_rate

SETTING, WINDOW = ["over", "asked_budget", "seq_len"], ["model", "part", "place"]
METHOD = ["label", "own_budget"]
"""A method at the budget that was asked for, which is NaN where it has none to set."""
ENDS = ["mean", "low", "high"]
ALL_MODELS = "all models"
LEAST_KL = 1e-6
"""Nats: a smaller KL is rounding, and has no logarithm to speak of."""
ORACLES = ("oracle", "oracle-infinigen")
"""Methods that select by the true scores: upper bounds of hard selection of rows; the second by the
paper's rule for a group. The first of them that ran is what is compared with."""
OWN_BUDGET = "reads at a budget of its own"
"""Why a method without a budget is not compared."""
MODELLED = "modelled"
"""`step_source` of a step that was timed at another budget, or over other codes."""


def board_of(
    windows: pd.DataFrame, answers: pd.DataFrame, steps: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """The board over all models, then one of each, from the evidence of `board_evidence.read`.

    A model counts in the means over all if at least half as many methods ran at a budget on it as
    on the model with the most. So a method that ran on one more model stays comparable with the
    others.

    Returns rows of `columns.BOARD`, those of `columns.BOARD_PAIRS` for the first board, and the
    models over which no mean goes.
    """
    models = pd.concat([windows["model"], answers["model"]]).unique()
    methods = windows.dropna(subset="own_budget").drop_duplicates(["model", *METHOD])
    num_methods = methods["model"].value_counts().reindex(models, fill_value=0)
    together = list(models[2 * num_methods >= num_methods.max()])
    first = ALL_MODELS if len(together) > 1 else together[0]
    boards = {first: together} | {model: [model] for model in models if model != first}
    windows, answers, steps = (_by_board(rows, boards) for rows in (windows, answers, steps))

    windows = _beside_oracle(_at_budgets(windows))
    lines, shown = _lines(windows)
    lines["apart"] = _reasons(lines, shown)
    compared = lines[lines["apart"] == ""]
    pairs = _pairs(compared, shown)
    lines = lines.join(_ranks(compared, pairs)).join(_steps(windows, steps))
    answers["line"] = answers.groupby(["over", *METHOD], dropna=False).ngroup()
    answers["is_missed"] = _misses_budget(answers)
    lines = lines.merge(_beside_full(answers), on=["over", *METHOD], how="left")
    lines["front"] = fronts(lines)

    has_own = lines["has_own_windows"] | lines["has_own_answers"].eq(True)
    lines["shipped"] = np.where(has_own, "", "yes")
    lines = lines.assign(is_apart=lines["apart"] != "", source="measured")
    lines = lines.fillna(dict.fromkeys(["answers_note", "step_source", "step_on"], ""))
    lines = _sorted(lines, "is_apart", "ratio", "label")
    pairs = _sorted(pairs[pairs["over"] == first], "line", "line_of_other")
    left_out = [model for model in models if model not in together]
    return lines, pairs, left_out


def _by_board(rows: pd.DataFrame, boards: Mapping[str, list[str]]) -> pd.DataFrame:
    """The rows of each board. counts: whether means go over their model. What the first board has
    on other models only says what a method lacks."""
    words = pd.CategoricalDtype(list(boards))
    parts: list[pd.DataFrame] = []
    for over, models in boards.items():
        here = rows.assign(
            over=pd.Series(over, rows.index, words), counts=rows["model"].isin(models)
        )
        parts.append(here[here["counts"] | (not parts)])
    return pd.concat(parts, ignore_index=True)


def _at_budgets(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows by `asked_budget`; those of a method without one stand at each."""
    asked = rows["own_budget"].dropna().unique()
    every = pd.DataFrame({"asked_budget": asked}, dtype=float).merge(rows, how="cross")
    return every[every["own_budget"].isna() | (every["own_budget"] == every["asked_budget"])]


def _sorted(rows: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Rows by board, the largest budget first, then by length and `by`."""
    names = [*SETTING, *by]
    ascending = [name != "asked_budget" for name in names]
    return rows.sort_values(names, ascending=ascending, ignore_index=True)


def _misses_budget(rows: pd.DataFrame) -> pd.Series:
    """Whether a line reads another budget than it was asked for on any model and text or task.
    False where none was asked for."""
    read = rows.groupby(["line", "model", "part"])["budget"].transform("mean")
    is_off = (read - rows["own_budget"]).abs() > EQUAL
    return is_off.groupby(rows["line"]).transform("any")


def _beside_oracle(windows: pd.DataFrame) -> pd.DataFrame:
    """Windows at the settings at which a method has the budget, beside the oracle's.

    line: the number of a method at a setting. reference: the oracle's label, "" without one.
    is_shared: whether the oracle has the window too, on a model that counts. log, oracle_log:
    the logarithms of the two KL, NaN where it is rounding.
    """
    windows = windows[windows.groupby(SETTING)["own_budget"].transform("count") > 0]
    windows = windows.assign(
        line=windows.groupby([*SETTING, *METHOD], sort=False, dropna=False).ngroup(),
        log=np.log(windows["kl_nats"].where(windows["kl_nats"] > LEAST_KL)),
        order=windows["method"].map({name: place for place, name in enumerate(ORACLES)}),
        weight=1,
    )
    windows["is_missed"] = _misses_budget(windows)
    has_budget = windows["own_budget"].notna() & (windows["codec"] == "")
    oracles = windows[windows["order"].notna() & has_budget & windows["counts"]]
    oracles = oracles.sort_values("order", kind="stable")
    first = oracles.drop_duplicates(SETTING)
    oracle = oracles.loc[oracles["line"].isin(first["line"]), [*SETTING, *WINDOW, "log"]]
    reference = first[[*SETTING, "label"]].rename(columns={"label": "reference"})
    windows = windows.merge(reference, on=SETTING, how="left").fillna({"reference": ""})
    oracle = oracle.rename(columns={"log": "oracle_log"}).assign(is_shared=True)
    windows = windows.merge(oracle, on=[*SETTING, *WINDOW], how="left")
    return windows.assign(is_shared=windows["is_shared"].eq(True))


def _lines(windows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A line for each method at a setting: what it is, its KL, its ratio and its shares; and the
    windows that it shows, which are those that the oracle has too, or all if there are none."""
    has_shared = windows.groupby("line")["is_shared"].transform("any")
    shown = windows[windows["is_shared"] | ~has_shared]
    of_lines = shown.groupby("line")
    same = [*SETTING, *METHOD, "method", "codec", "family", "reference", "is_missed"]
    lines = of_lines[same].first()
    lines["model"] = of_lines["model"].agg(lambda models: ", ".join(models.unique()))
    lines["num_models"], lines["num_windows"] = of_lines["model"].nunique(), of_lines.size()
    lines["dense_numbers"] = of_lines["dense_layers"].agg(_in_words)
    lines["has_own_windows"] = shown["shipped"].ne("yes").groupby(shown["line"]).any()
    shares = ["budget", "device_frac", "resident_frac"]
    of_models = shown.groupby(["line", "model"])[shares].mean().groupby("line")
    lines = lines.join(of_models.min().add_suffix("_low")).join(of_models.max().add_suffix("_high"))
    kl = estimates(shown.assign(value=shown["log"]), ["line"])
    lines["kl_nats"], lines["num_places"] = np.exp(kl["mean"]), kl["num_places"]
    shared = shown[shown["is_shared"]]
    beside = shared.assign(value=shared["log"] - shared["oracle_log"])
    lines = lines.join(_ratios(estimates(beside, ["line"], over_models=True)))
    ends = ["ratio_low", "ratio_high"]
    lines[ends] = lines[ends].mask(lines["label"] == lines["reference"])  # 1 by its meaning
    return lines, shown


def _in_words(dense_layers: pd.Series) -> str:
    return " or ".join(map(DENSE_LAYERS.show, sorted(dense_layers.dropna().unique())))


def _ratios(found: pd.DataFrame) -> pd.DataFrame:
    """The columns of a ratio, from estimates of its logarithm."""
    ends = found[ENDS].set_axis(["ratio", "ratio_low", "ratio_high"], axis=1)
    return ends.apply(np.exp).join(found["degrees"])


# Why a method is not compared


def _reasons(lines: pd.DataFrame, shown: pd.DataFrame) -> list[str]:
    """In words, why each line is not compared with the others; "" if it is."""
    is_oracle = (shown["label"] == shown["reference"]) & shown["own_budget"].notna()
    oracle = shown.loc[is_oracle, [*SETTING, *WINDOW, "log"]]
    due = lines[SETTING].reset_index().merge(oracle, on=SETTING)
    due_logs, logs = due.groupby("line")["log"], shown.groupby("line")["log"]
    facts = lines.assign(
        num_due=due_logs.size(),
        num_zeros_due=due_logs.size() - due_logs.count(),
        num_zeros=logs.size() - logs.count(),
        lacks=_lacking(due, shown),
    )
    return ["; ".join(_why_apart(line)) for line in facts.itertuples()]


def _why_apart(line: Any) -> Iterator[str]:
    if not line.reference:
        yield "the oracle has no windows here"
    elif line.num_zeros_due:
        yield f"the oracle's KL is 0 in {line.num_zeros_due:.0f} of {line.num_due:.0f} windows"
    elif line.method == FULL and not line.codec:
        yield "the full cache itself, whose KL is 0"
    else:
        if pd.isna(line.own_budget):
            yield OWN_BUDGET
        elif line.is_missed:
            read = show_range(BUDGET, (line.budget_low, line.budget_high), " to ")
            yield f"cannot have this budget: reads {read} %"
        if pd.notna(line.lacks):
            yield f"lacks {line.lacks}"
        if line.num_zeros:
            of_all = f"{line.num_zeros} of {line.num_windows} windows"
            yield f"its KL is 0 in {of_all}, which has no ratio"


def _lacking(due: pd.DataFrame, own: pd.DataFrame) -> pd.Series:
    """In words, by `line`, which due windows or contexts are missing: whole models, whole texts of
    a model, or so many. Lines that lack nothing are left out."""
    on_model, on_part = due.groupby(["line", "model"]), due.groupby(["line", "model", "part"])
    due = due.assign(on_model=on_model["place"].transform("size"))
    due = due.assign(on_part=on_part["place"].transform("size"))
    key = ["line", *WINDOW]
    missing = due.merge(own[key], on=key, how="left", indicator="side")
    missing = missing[missing["side"] == "left_only"]
    found = {}
    for line, rows in missing.groupby("line"):
        words = []
        for model, of_model in rows.groupby("model", sort=False):
            if len(of_model) == of_model["on_model"].iloc[0]:
                words.append(str(model))
                continue
            for part, of_part in of_model.groupby("part", sort=False):
                total = of_part["on_part"].iloc[0]
                count = "" if len(of_part) == total else f"{len(of_part)} of {total} of "
                words.append(f"{count}{part} on {model}")
        found[line] = ", ".join(words)
    return pd.Series(found, dtype=object)


# Pairs and ranks


def _pairs(compared: pd.DataFrame, shown: pd.DataFrame) -> pd.DataFrame:
    """The tests of all pairs of compared lines, with Holm's correction at each setting."""
    windows = shown.loc[shown["line"].isin(compared.index), ["line", *SETTING, *WINDOW, "log"]]
    both = windows.merge(windows, on=[*SETTING, *WINDOW], suffixes=("", "_of_other"))
    both = both[both["line"] < both["line_of_other"]]
    both = both.assign(value=both["log"] - both["log_of_other"], weight=1)
    found = estimates(both, ["line", "line_of_other"])
    pairs = _ratios(found).join(found["p"]).reset_index()
    pairs = pairs.join(compared[["model", *SETTING, "label"]], on="line")
    pairs = pairs.join(compared["label"].rename("other"), on="line_of_other")
    pairs["p_holm"] = pairs.groupby(SETTING)["p"].transform(holm)
    closer = pairs["label"].where(pairs["ratio"] < 1, pairs["other"])
    pairs["closer"] = closer.where(pairs["p_holm"] <= LEVEL, "")
    return pairs.assign(source="measured")


def _ranks(compared: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """Places of the compared lines by their ratio; equal ratios share one. A method may have any
    from 1 + the methods certainly closer to all less those certainly farther."""
    certain = pairs[pairs["closer"] != ""]
    is_first = certain["closer"] == certain["label"]
    first, second = certain["line"], certain["line_of_other"]
    times_closer = first.where(is_first, second).value_counts()
    times_farther = second.where(is_first, first).value_counts()
    of_setting = compared.groupby(SETTING)
    count = of_setting["label"].transform("size")
    ranks = {
        "num_compared": count,
        "rank": of_setting["ratio"].rank(method="min"),
        "rank_low": 1 + times_farther.reindex(compared.index, fill_value=0),
        "rank_high": count - times_closer.reindex(compared.index, fill_value=0),
    }
    return pd.DataFrame(ranks)


# Answers


def _gaps(own: pd.DataFrame, other: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Estimates of the difference of two methods' shares of right answers, by group.

    Contexts count on which both were asked the same questions: as many, in prompts of one length. A
    context is known by its number alone, which other questions of the task have too. With `share`,
    the own one, `num_questions`, and whether either budget `is_missed`. Where no context differs
    from another, which a few contexts do not make impossible, the interval is that of the largest
    unseen rate.
    """
    same = ["over", *WINDOW, "asked", "prompt_len", *(name for name in by if name in other)]
    both = own.merge(other, on=list(dict.fromkeys(same)), suffixes=("", "_of_other"))
    share = both["right"] / both["asked"]
    both = both.assign(weight=both["asked"], value=share - both["right_of_other"] / both["asked"])
    found = estimates(both, by, over_models=True)
    unseen, is_alike = found["num_places"].map(unseen_rate), found["low"] == found["high"]
    found["low"] = found["low"].mask(is_alike, found["mean"] - unseen)
    found["high"] = found["high"].mask(is_alike, found["mean"] + unseen)
    found["share"] = estimates(both.assign(value=share), by)["mean"]
    groups = both.assign(is_missed=both["is_missed"] | both["is_missed_of_other"]).groupby(by)
    found["num_questions"], found["is_missed"] = groups["asked"].sum(), groups["is_missed"].any()
    return found


def _beside_full(answers: pd.DataFrame) -> pd.DataFrame:
    """The share of right answers of each board's methods, its difference to the full cache's, and
    what to know of it."""
    is_full = (answers["method"] == FULL) & (answers["codec"] == "")
    full = answers[is_full & answers["counts"]]
    full = full[full["line"].isin(full.drop_duplicates("over")["line"])].drop(columns="line")
    found = _gaps(answers, full, ["line"])
    of_lines = answers.groupby("line")
    methods = of_lines[["over", *METHOD, "is_missed"]].first()
    methods["has_own_answers"] = answers["shipped"].ne("yes").groupby(answers["line"]).any()
    counts = ["num_questions", "num_contexts"]
    methods[["answers", *counts]] = found[["share", "num_questions", "num_places"]]
    others = found[~found.index.isin(answers.loc[is_full, "line"])]
    methods[[f"answers_difference{end}" for end in ("", "_low", "_high")]] = others[ENDS]
    read = answers.groupby(["line", "model"])["budget"].mean().groupby("line")
    reads = read.agg(lambda budgets: f"reads {show_range(BUDGET, budgets, ' to ')} % on the tasks")
    due = methods["over"].reset_index().merge(full[["over", *WINDOW]], on="over")
    words = {"reads": reads[methods["is_missed"]], "lacks": "lacks " + _lacking(due, answers)}
    notes = pd.DataFrame(words, index=found.index)
    methods["answers_note"] = notes.apply(lambda parts: "; ".join(parts.dropna()), axis=1)
    return methods.drop(columns="is_missed")


# Decode steps


def _steps(windows: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """`step_s`, `step_source` and `step_on` of the lines whose method was timed.

    All steps of a board are of one model, machine, batch and prompt length, so that they compare:
    that where most were timed. Lines of other lengths of windows have none.
    """
    setup = ["over", "model", "platform", "batch_size", "prompt_len"]
    steps = steps[steps["counts"]].rename(columns={"label": "run_label"})
    most = steps.groupby(setup, sort=False).size().sort_values(ascending=False, kind="stable")
    steps = steps.merge(most.reset_index()[setup].drop_duplicates("over"), on=setup)
    read = windows.groupby(["line", "model"])["budget"].transform("mean")
    here = windows.assign(budget=read, prompt_len=windows["seq_len"])
    same = ["over", "model", "prompt_len", "method", "codec", "run_label", "dense_layers"]
    timed = here.drop_duplicates(["line", "model"]).merge(steps, on=same, suffixes=("", "_timed"))
    timed["is_timed"] = timed["own_budget"].fillna(0) == timed["own_budget_timed"].fillna(0)
    timed = timed.sort_values("is_timed", ascending=False, kind="stable").drop_duplicates("line")
    modelled = step_at(timed, timed["budget"] / timed["budget_timed"], timed["dense_layers"])
    timed["step_s"] = timed["step_s"].where(timed["is_timed"], modelled)
    own, other = (
        timed[name].str.extract(r"\b(group_size=\w+)", expand=False).fillna("")
        for name in ("settings", "settings_timed")
    )
    is_as_timed = timed["is_timed"] & (own == other)  # else as many bytes, of other tokens
    timed["step_source"] = timed["source_timed"].where(is_as_timed, MODELLED)
    place = "{0.model} ({0.platform}), batch {0.batch_size:.0f}, prompts of {0.prompt_len:,.0f}"
    timed["step_on"] = [f"{place.format(step)} tokens" for step in timed.itertuples()]
    timed = timed.dropna(subset="step_s").set_index("line")
    return timed[["step_s", "step_source", "step_on"]]


# Fronts


def traffic(rows: Any) -> Any:
    """Bytes that a step moves over the link and reads on the device, of the full cache's; the mean
    of the models' least and largest. What is left after an eviction is small and lies on the
    device."""
    is_over_link = rows["family"] != "evicts"
    return is_over_link * _middle(rows, "budget") + _middle(rows, "device_frac")


def _middle(rows: Any, name: str) -> Any:
    return (rows[f"{name}_low"] + rows[f"{name}_high"]) / 2


COSTS: Mapping[str, Callable[[Any], Any]] = {
    "link": lambda rows: _middle(rows, "budget"),
    "link + device": traffic,
    "resident": itemgetter("resident_frac_high"),
    "step time": itemgetter("step_s"),
}
"""What a step of a method costs, by the name of the front. Resident: on the model with
the largest share."""
SAME_STEP = 0.01
"""Step times that differ by at most this share count as equal."""


def is_whole(rows: pd.DataFrame) -> pd.Series:
    """Whether rows were measured in all windows, at their budget or at one of their own."""
    return rows["apart"].isin(["", OWN_BUDGET]) & rows["kl_nats"].notna()


def fronts(lines: pd.DataFrame) -> pd.Series:
    """The costs at which no method is closer to the full cache for no more.

    Lines of a board and length are compared, of all budgets. Oracles are on no front.
    """
    front = pd.Series("", lines.index)
    rivals = lines[is_whole(lines) & ~lines["method"].isin(ORACLES)]
    for _, rows in rivals.groupby(["over", "seq_len"]):
        kl = rows["kl_nats"].to_numpy()
        is_closer = kl < kl[:, None]
        for name, cost in COSTS.items():
            costs = cost(rows).to_numpy()
            limits = costs + EQUAL * (name == "link")
            limits *= 1 + SAME_STEP * (name == "step time")
            is_beaten = (is_closer & (costs <= limits[:, None])).any(axis=1)
            front[rows.index[~is_beaten & ~np.isnan(costs)]] += f", {name}"
    return front.str.removeprefix(", ")

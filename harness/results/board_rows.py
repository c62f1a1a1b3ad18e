"""Frames of the board: its evidence, and what follows from it.

The evidence of `experiment=board` is a row for each window of a text, each context of a task and
each timed decode step. The board is made of these tables alone, so results without their records
can be shipped, joined and extended.

Methods are compared at a setting, which is an asked budget and a length of windows. The oracle's
windows there are what is compared: a method that lacks some of them, or cannot have the budget,
stands apart. A window is known by model, text and place, a context of questions by model, task and
number (`WINDOW`). `harness/results/stats.py` has the statistics.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from harness.errors import UserError
from harness.results.columns import IDENTITY, TABLES, WORDS, names, picked, read_frame
from harness.results.metrics import BUDGET, DENSE_LAYERS, EQUAL
from harness.results.record import Record, in_words
from harness.results.samples import FULL, is_full
from harness.results.sheet import show_range
from harness.results.stats import LEVEL, estimates, holm, unseen_rate
from harness.settings.kinds import OF_CODECS
from harness.settings.paths import COMMAND, models_beside, table_to_read

TEXTS, ANSWERS, STEPS = "board-texts", "board-answers", "board-steps"
SHAPES = {TEXTS: "board_texts", ANSWERS: "board_answers", STEPS: "board_steps"}
"""The tables of evidence."""
POSSIBLE = {
    TEXTS: "kl_nats > -1e-6 and 0 <= place <= 1 and not asked_budget > 1",
    ANSWERS: "asked >= 1 and 0 <= right <= asked and not asked_budget > 1",
    STEPS: "step_s > 0 and budget > 0",
}
"""What is true of each row of a table."""
NUMBER = {TEXTS: ["place"], ANSWERS: ["context_id"], STEPS: []}
"""The columns that tell apart the rows of a run."""
WINDOW, SETTING = ["model", "part", "place"], ["board", "asked_budget", "seq_len"]
METHOD = ["label", "own_budget"]
"""A method at the budget that was asked for, which is NaN where it has none to set."""
LINE = [*SETTING, *METHOD]
"""A line of the board. A method without a budget stands at every one."""
ALL_MODELS = "all models"
LEAST_KL = 1e-6
"""Nats: a smaller KL is rounding, and has no logarithm to speak of."""
ORACLES = ("oracle", "oracle-infinigen")
"""Methods that select by the true scores: upper bounds of hard selection of rows; the second by the
paper's rule for a group. The first of them that ran is what is compared with."""
OWN_BUDGET = "reads at a budget of its own"
"""Why a method without a budget is not compared."""


# Evidence of records


def evidence_of(records: Iterable[Record]) -> dict[str, pd.DataFrame]:
    """The tables of finished records, by name; of two runs of one identity the newer counts."""
    labels: dict[str, str] = {}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SHAPES}
    by_age = sorted(records, key=itemgetter("started"))
    for record in by_age:
        if record["kind"] != "latency":
            labels[_method_in_words(record)] = record["config"]["label"]
    for record in by_age:
        if record["kind"] == "tasks":
            rows[ANSWERS] += _answers(record)
        elif record["kind"] == "latency":
            rows[STEPS] += _step(record, labels)
        else:
            rows[TEXTS] += _windows(record)
    found = {}
    for name, shape in SHAPES.items():
        frame = pd.DataFrame(rows[name], columns=names(TABLES[shape]))
        runs = frame.groupby(list(IDENTITY[shape]), dropna=False)["run_id"]
        found[name] = frame[frame["run_id"] == runs.transform("last")]
    return found


def ordered(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table of evidence by label, budget, length, text or task, and number."""
    keys = [
        "model", "label", "asked_budget", "seq_len", "text", "task", "dense_layers", "run_id",
        "window", "context_id",
    ]  # fmt: skip
    filled = rows.fillna({"asked_budget": 1, "dense_layers": 0})
    return rows.loc[filled.sort_values([key for key in keys if key in rows]).index]


def _run(record: Record) -> dict[str, Any]:
    """The columns that say what a run is of."""
    config = record["config"]
    return {
        "experiment": record["experiment"],
        "model": config["model"]["name"],
        "method": config["method_name"],
        "codec": "/".join(filter(None, (config["codec"], config.get("value_codec")))),
        "label": config["label"],
        "settings": in_words(record["settings"]),
        "asked_budget": config["budget"],
        "dense_layers": None if is_full(record) else config["method"].get("dense_layers"),
        "source": "measured",
        "run_id": record["run_id"],
    }


def _windows(record: Record) -> Iterator[dict[str, Any]]:
    """The windows of a run on a text. A window without a place is its number among them."""
    ((text, entries),) = record["metrics"].items()
    windows = record["samples"]["windows"]
    common = _run(record) | picked(entries, ("device_frac", "resident_frac"))
    common |= {"text": Path(text).name, "seq_len": record["config"]["seq_len"]}
    common["family"] = _family(record, entries["budget"])
    for number, window in enumerate(windows):
        place = window.get("place", number / len(windows))
        yield common | picked(window, ("kl_nats", "budget")) | {"window": number, "place": place}


def _family(record: Record, budget: float) -> str:
    """In a word, how the method of a run reads less than the full cache."""
    if record["when"] != "kept":
        return "oracle" if record["when"] == "true_scores" else "retrieves"
    if record["config"]["budget"] is not None:
        return "evicts"
    return "reads all" if budget == 1 else "codes"


def _answers(record: Record) -> Iterator[dict[str, Any]]:
    """The contexts of the tasks that are scored by `acc`."""
    for task, entries in record["metrics"].items():
        shares = picked(entries, ("budget", "device_frac", "resident_frac"))
        samples = pd.DataFrame(record["samples"].get(task, ()))
        answered = samples.reindex(columns=["acc", "context", "context_tokens"]).dropna(subset="acc")
        for context, questions in answered.groupby("context"):
            measured = {
                "task": task,
                "context_id": context,
                "right": questions["acc"].sum(),
                "asked": len(questions),
                "prompt_len": questions["context_tokens"].max(),
            }
            yield _run(record) | shares | measured


def _step(record: Record, labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The step of a timed run, under the label of the same method's run on texts and tasks: timed
    runs are labelled by their system."""
    step = timed_step(record["metrics"])
    if step:
        run = _run(record)
        run["label"] = labels.get(_method_in_words(record), run["label"])
        yield run | step | picked(record["metrics"], ("gen_len", "budget", "source"))


def _method_in_words(record: Record) -> str:
    config = record["config"]
    codecs = picked(config, OF_CODECS).values()
    settings = [config["model"]["name"], config["method_name"], config.get("method"), *codecs]
    return json.dumps(settings, sort_keys=True)


# Seconds of a decode step: of a timed run, and a model of them at another budget. Seconds of
# compute stay as timed, bytes over the link grow with the budget. As in live decoding, tokens that
# are selected a layer ahead are transferred during compute; `late_bytes`, selected by a layer's own
# query, are waited for.

MODELLED = "modelled"
"""`step_source` of a step that was timed at another budget, or over other codes."""


def step_seconds(compute_s: Any, link_bytes: Any, late_bytes: Any, bytes_per_s: Any) -> Any:
    """Seconds of decode steps, numbers or columns of them."""
    late_s = late_bytes / bytes_per_s
    return np.maximum(compute_s, link_bytes / bytes_per_s - late_s) + late_s


def timed_step(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The decode step of a timed run, the mean over its steps; {} if no transfer was counted."""
    if metrics["h2d_bytes"] is None:
        return {}
    steps = metrics["gen_len"] - 1
    step = picked(metrics, ("platform", "batch_size", "prompt_len", "link_bytes_per_s"))
    step["compute_s"] = (metrics["decode_s"] - metrics["exposed_transfer_s"]) / steps
    step["link_bytes"] = metrics["h2d_bytes"] / steps
    step["late_bytes"] = metrics["late_bytes"] / steps
    step["step_s"] = metrics["decode_s"] / steps
    return step


def step_at(step: Any, ratio: Any, dense_layers: Any) -> Any:
    """Seconds of a timed step, or of a frame of them, where it reads `ratio` times as much; NaN
    where the rate of the link is not known.

    The bytes of the dense layers, where there are any the only ones that a late method transfers
    ahead, are the same at any budget.
    """
    compute_s, rate = step["compute_s"], step["link_bytes_per_s"]
    link_bytes, late_bytes = step["link_bytes"], step["late_bytes"]
    of_dense_layers = np.where((dense_layers > 0) & (late_bytes > 0), link_bytes - late_bytes, np.nan)
    scaled_late = np.maximum(0, link_bytes * ratio - of_dense_layers)
    scaled_late = np.where(np.isnan(of_dense_layers), late_bytes * ratio, scaled_late)
    scaled = step_seconds(compute_s, link_bytes * ratio, scaled_late, rate)
    return step["step_s"] + scaled - step_seconds(compute_s, link_bytes, late_bytes, rate)


# Reading the evidence


class Evidence(NamedTuple):
    """Evidence of a results folder.

    `own_budget` is the asked one, `part` a text or task, `place` that of a window or the number of
    a context. `label` tells apart methods by their dense layers too, where a model has one with
    several numbers; `run_label` does not.
    """

    windows: pd.DataFrame
    answers: pd.DataFrame
    steps: pd.DataFrame


def read(results: Path) -> Evidence:
    """Evidence of a results folder, and of the folders within it.

    Of two runs of one identity that of the earlier folder counts. Raises UserError where there are
    no windows, for a damaged table, and for two methods with one label.
    """
    folders = [results, *(results / name for name in models_beside(results))]
    windows, answers, steps = (_read(folders, name) for name in SHAPES)
    if windows.empty:
        none = f"no tables/{TEXTS}.csv in it or in a folder within it"
        raise UserError(f"{results}: {none}; `{COMMAND} experiment=board` makes one")
    windows = windows.rename(columns={"text": "part"})
    answers = answers.rename(columns={"task": "part", "context_id": "place"})
    measured = pd.concat([windows, answers])
    for label, rows in measured.groupby("label"):
        kinds = (rows["method"] + " " + rows["codec"]).str.strip().unique()
        if len(kinds) > 1:
            two = f"two methods have it ({', '.join(sorted(kinds))})"
            raise UserError(f"label={label}: {two}; give each its own")
    on = ["label", "model", "own_budget", "seq_len", measured["part"].where(measured["kl_nats"].isna())]
    numbers = measured.groupby(on, dropna=False)["dense_layers"].nunique(dropna=False)
    several = numbers[numbers > 1].index.unique("label")
    return Evidence(_with_dense_layers(windows, several), _with_dense_layers(answers, several), steps)


def _with_dense_layers(rows: pd.DataFrame, labels: pd.Index) -> pd.DataFrame:
    """Rows whose labels, if among `labels`, say the number of dense layers."""
    numbers = rows["dense_layers"].fillna(0).astype(int).astype(str)
    whole = rows["label"] + ", " + numbers + " dense layers"
    is_told = rows["label"].isin(labels)
    return rows.assign(run_label=rows["label"], label=rows["label"].mask(is_told, whole))


def _read(folders: Sequence[Path], name: str) -> pd.DataFrame:
    """A table of all folders, its `asked_budget` as `own_budget`."""
    columns, identity = names(TABLES[SHAPES[name]]), list(IDENTITY[SHAPES[name]])
    dtypes = {column: "str" if column in WORDS else float for column in columns}
    frames = [pd.DataFrame(columns=[*columns, "folder"]).astype({**dtypes, "folder": int})]
    for number, folder in enumerate(folders):
        path = table_to_read(folder, f"{name}.csv")
        if path is None:
            continue
        frame = read_frame(path)
        wrong = frame[~frame.eval(POSSIBLE[name])]
        if len(wrong):
            of_row = " ".join(wrong[["label", "model"]].iloc[0])
            raise UserError(f"{path}: {of_row}: must have {POSSIBLE[name]}")
        if frame.duplicated([*identity, *NUMBER[name]]).any():
            raise UserError(f"{path}: two rows are the same in {', '.join(identity)}")
        frames.append(frame.assign(folder=number))
    rows = pd.concat(frames, ignore_index=True)
    first = rows.groupby(identity, dropna=False)["folder"].transform("min")
    return rows[rows["folder"] == first].rename(columns={"asked_budget": "own_budget"})


# The boards


class Board(NamedTuple):
    """The board over all models, then one of each.

    methods, pairs: rows of `columns.BOARD`, and of `columns.BOARD_PAIRS` for the first board.
    claims: of `judged`. left_out: models over which no mean goes.
    """

    methods: pd.DataFrame
    pairs: pd.DataFrame
    claims: pd.DataFrame
    left_out: list[str]


def board_of(evidence: Evidence, claims: Any) -> Board:
    """The boards of evidence. claims: of `board.yaml`.

    A model counts in the means over all if at least half as many methods ran at a budget on it as
    on the model with the most. So a method that ran on one more model stays comparable with the
    others.
    """
    models = pd.concat([evidence.windows["model"], evidence.answers["model"]]).unique()
    methods = evidence.windows.dropna(subset="own_budget").drop_duplicates(["model", *METHOD])
    num_methods = methods["model"].value_counts().reindex(models, fill_value=0)
    together = list(models[2 * num_methods >= num_methods.max()])
    over = ALL_MODELS if len(together) > 1 else together[0]
    boards = {over: together} | {model: [model] for model in models if model != over}

    def of_boards(rows: pd.DataFrame) -> pd.DataFrame:
        """The rows of each board. counts: whether the model is one of the board's means; a method
        on any other is shown in the first, as not compared."""
        parts = []
        for number, of_board in enumerate(boards.values()):
            counts = rows["model"].isin(of_board)
            parts.append(rows.assign(board=number, counts=counts)[counts | (number == 0)])
        return pd.concat(parts, ignore_index=True)

    windows, answers, steps = map(of_boards, evidence)
    every = _beside_oracle(at_budgets(windows))
    has_shared = every.groupby("line")["is_shared"].transform("any")
    shown = every[every["is_shared"] | ~has_shared]
    lines = _lines(shown)
    lines["apart"] = _reasons(lines, shown)
    compared = lines[lines["apart"] == ""]
    pairs = _pairs(compared, shown)
    lines = lines.join(_ranks(compared, pairs)).join(_steps(every, steps))
    lines = lines.merge(_beside_full(answers), on=["board", *METHOD], how="left")
    has_own = lines.pop("has_own_windows") | lines.pop("has_own_answers").eq(True)
    lines["shipped"] = np.where(has_own, "", "yes")
    lines["front"] = _fronts(lines)
    lines["over"], lines["source"] = lines["board"].map(dict(enumerate(boards))), "measured"
    lines = lines.fillna(dict.fromkeys(["answers_note", "step_source", "step_on"], ""))
    lines["is_apart"] = lines["apart"] != ""
    by = [*SETTING, "is_apart", "ratio", "label"]
    is_ascending = [name != "asked_budget" for name in by]
    lines = lines.sort_values(by, ascending=is_ascending, ignore_index=True)
    left_out = [model for model in models if model not in together]
    verdicts = judged(claims, windows[windows["counts"]], answers[answers["counts"]])
    verdicts["over"] = verdicts["board"].map(dict(enumerate(boards)))
    return Board(lines, pairs[pairs["board"] == 0], verdicts, left_out)


def at_budgets(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows by `asked_budget`, the largest first: those of a method without one stand at each."""
    asked = sorted(rows["own_budget"].dropna().unique(), reverse=True)
    every = pd.DataFrame({"asked_budget": asked}, dtype=float).merge(rows, how="cross")
    return every[every["own_budget"].isna() | (every["own_budget"] == every["asked_budget"])]


def logarithm(kl: pd.Series) -> pd.Series:
    """NaN where the KL is rounding."""
    return np.log(kl.where(kl > LEAST_KL))


def misses_budget(rows: pd.DataFrame, by: Sequence[str], asked: str) -> pd.Series:
    """Whether the budget of rows differs from that in column `asked` on any model and text or task,
    by group. NaN, for which nobody asked, is never missed."""
    parts = rows.groupby([*by, "model", "part"])
    gap = parts["budget"].mean() - parts[asked].first()
    return (gap.abs() > EQUAL).groupby(list(by)).any()


def _beside_oracle(every: pd.DataFrame) -> pd.DataFrame:
    """Windows at the settings at which a method has the budget, beside the oracle's.

    line: its number, by `LINE`. reference: the oracle's label, "" without one. is_shared: whether
    the oracle has the window too, on a model that counts. log, oracle_log: of the two KL.
    """
    every = every[every.groupby(SETTING)["own_budget"].transform("count") > 0]
    number = every.groupby(LINE, sort=False, dropna=False).ngroup()
    every = every.assign(line=number, log=logarithm(every["kl_nats"]), weight=1)
    place = every["method"].map({name: place for place, name in enumerate(ORACLES)})
    is_oracle = place.notna() & (every["codec"] == "") & every["own_budget"].notna()
    oracles = every.assign(place_of_oracle=place)[is_oracle & every["counts"]]
    first = oracles.sort_values("place_of_oracle", kind="stable").drop_duplicates(SETTING)
    oracle = oracles.loc[oracles["line"].isin(first["line"]), [*SETTING, *WINDOW, "label", "log"]]
    oracle = oracle.rename(columns={"label": "reference", "log": "oracle_log"})
    reference = oracle[[*SETTING, "reference"]].drop_duplicates()
    every = every.merge(oracle.drop(columns="reference"), on=[*SETTING, *WINDOW], how="left", indicator="is_shared")
    every = every.merge(reference, on=SETTING, how="left").fillna({"reference": ""})
    return every.assign(is_shared=every["is_shared"] == "both")


def _lines(shown: pd.DataFrame) -> pd.DataFrame:
    """A line for each method at a setting: what it is, its KL, its ratio and its shares."""
    of_lines = shown.groupby("line")
    lines = of_lines[[*LINE, "method", "codec", "family", "reference"]].first()
    lines["model"] = of_lines["model"].agg(lambda models: ", ".join(models.unique()))
    lines["num_models"] = of_lines["model"].nunique()
    lines["num_windows"] = of_lines.size()
    lines["dense_numbers"] = of_lines["dense_layers"].agg(_in_words)
    lines["has_own_windows"] = (shown["shipped"] != "yes").groupby(shown["line"]).any()
    shares = ["budget", "device_frac", "resident_frac"]
    of_models = shown.groupby(["line", "model"])[shares].mean().groupby("line")
    lines = lines.join(of_models.min().add_suffix("_low")).join(of_models.max().add_suffix("_high"))
    kl = estimates(shown.assign(value=shown["log"]), ["line"])
    lines["kl_nats"], lines["num_places"] = np.exp(kl["mean"]), kl["num_places"]
    shared = shown[shown["is_shared"]]
    beside = shared.assign(value=shared["log"] - shared["oracle_log"])
    lines = lines.join(_ratio(estimates(beside, ["line"], over_models=True)))
    ends = ["ratio_low", "ratio_high"]
    lines[ends] = lines[ends].mask(lines["label"] == lines["reference"])  # 1 by its meaning
    return lines


def _in_words(dense_layers: pd.Series) -> str:
    return " or ".join(map(DENSE_LAYERS.show, sorted(dense_layers.dropna().unique())))


def _ratio(found: pd.DataFrame) -> pd.DataFrame:
    """The columns of a ratio, from estimates of its logarithm."""
    ends = found[["mean", "low", "high"]].set_axis(["ratio", "ratio_low", "ratio_high"], axis=1)
    return np.exp(ends).join(found["degrees"])


# Why a method is not compared


def _reasons(lines: pd.DataFrame, shown: pd.DataFrame) -> list[str]:
    """In words, why each line is not compared with the others; "" if it is."""
    is_oracle = (shown["label"] == shown["reference"]) & shown["own_budget"].notna()
    oracle = shown.loc[is_oracle, [*SETTING, *WINDOW, "log"]]
    due = lines[SETTING].reset_index().merge(oracle, on=SETTING)
    due_log, shared = due.groupby("line")["log"], shown[shown["is_shared"]].groupby("line")["log"]
    facts = lines.assign(
        num_due=due_log.size(),
        num_zeros_due=due_log.size() - due_log.count(),
        num_shared=shared.size(),
        num_zeros=shared.size() - shared.count(),
        is_missed=misses_budget(shown, ["line"], "own_budget"),
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
        if isinstance(line.lacks, str):
            yield f"lacks {line.lacks}"
        if line.num_zeros > 0:
            of_all = f"{line.num_zeros:.0f} of {line.num_shared:.0f} windows"
            yield f"its KL is 0 in {of_all}, which has no ratio"


def _lacking(due: pd.DataFrame, own: pd.DataFrame) -> pd.Series:
    """In words, by `line`, which due windows or contexts are missing: whole models, whole texts of
    a model, or so many. Lines that lack nothing are left out."""
    of_model, of_part = (due.groupby(["line", *names])["place"] for names in (["model"], ["model", "part"]))
    due = due.assign(due_of_model=of_model.transform("size"), due_of_part=of_part.transform("size"))
    missing = due.merge(own[["line", *WINDOW]], on=["line", *WINDOW], how="left", indicator="side")
    missing = missing[missing["side"] == "left_only"]
    found = {}
    for line, rows in missing.groupby("line"):
        words = []
        for model, of_model in rows.groupby("model", sort=False):
            if len(of_model) == of_model["due_of_model"].iloc[0]:
                words.append(str(model))
                continue
            for part, of_part in of_model.groupby("part", sort=False):
                total = of_part["due_of_part"].iloc[0]
                count = "" if len(of_part) == total else f"{len(of_part)} of {total} of "
                words.append(f"{count}{part} on {model}")
        found[line] = ", ".join(words)
    return pd.Series(found, dtype=str)


# Pairs and ranks


def _pairs(compared: pd.DataFrame, shown: pd.DataFrame) -> pd.DataFrame:
    """The tests of all pairs of compared lines, with Holm's correction at each setting."""
    windows = shown.loc[shown["line"].isin(compared.index), ["line", *SETTING, *WINDOW, "log"]]
    both = windows.merge(windows, on=[*SETTING, *WINDOW], suffixes=("", "_of_other"))
    both = both[both["line"] < both["line_of_other"]]
    both = both.assign(value=both["log"] - both["log_of_other"], weight=1)
    found = estimates(both, ["line", "line_of_other"])
    pairs = _ratio(found).join(found["p"]).reset_index()
    pairs = pairs.join(compared[["model", *SETTING, "label"]], on="line")
    pairs = pairs.join(compared["label"].rename("other"), on="line_of_other")
    pairs["p_holm"] = pairs.groupby(SETTING)["p"].transform(holm)
    closer = pairs["label"].where(pairs["ratio"] < 1, pairs["other"])
    pairs["closer"] = closer.where(pairs["p_holm"] <= LEVEL, "")
    pairs["source"] = "measured"
    return pairs.sort_values(SETTING, ascending=[True, False, True], kind="stable", ignore_index=True)


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


def same_questions(own: pd.DataFrame, other: pd.DataFrame, by: str) -> pd.DataFrame:
    """Contexts on which both were asked the same questions: as many, in prompts of one length.

    A context is known by its number alone, which other questions of the task have too.
    """
    same = ["board", by, *WINDOW, "asked", "prompt_len"]
    return own.merge(other, on=list(dict.fromkeys(same)), suffixes=("", "_of_other"))


def gaps(both: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Estimates of the difference of two methods' shares of right answers, by group.

    With `share`, the own one, and `num_questions`. Where no context differs from another, which a
    few contexts do not make impossible, the interval is that of the largest unseen rate.
    """
    share = both["right"] / both["asked"]
    both = both.assign(weight=both["asked"], value=share - both["right_of_other"] / both["asked"])
    found = estimates(both, by, over_models=True)
    unseen, is_alike = found["num_places"].map(unseen_rate), found["low"] == found["high"]
    found["low"] = found["low"].mask(is_alike, found["mean"] - unseen)
    found["high"] = found["high"].mask(is_alike, found["mean"] + unseen)
    found["share"] = estimates(both.assign(value=share), by)["mean"]
    found["num_questions"] = both.groupby(list(by))["asked"].sum()
    return found


def _beside_full(answers: pd.DataFrame) -> pd.DataFrame:
    """The share of right answers of each board's methods, its difference to the full cache's, and
    what to know of it."""
    key = ["board", *METHOD]
    answers = answers.assign(line=answers.groupby(key, dropna=False).ngroup())
    is_full = (answers["method"] == FULL) & (answers["codec"] == "")
    full = answers[is_full & answers["counts"]]
    full = full[full["line"].isin(full.drop_duplicates("board")["line"])]
    full = full[["board", *WINDOW, "asked", "prompt_len", "right"]]
    found = gaps(same_questions(answers, full, "board"), ["line"])
    methods = answers.groupby("line")[key].first()
    methods["has_own_answers"] = (answers["shipped"] != "yes").groupby(answers["line"]).any()
    counts = ["num_questions", "num_contexts"]
    methods[["answers", *counts]] = found[["share", "num_questions", "num_places"]]
    others = found[~found.index.isin(answers.loc[is_full, "line"])]
    ends = [f"answers_difference{end}" for end in ("", "_low", "_high")]
    methods[ends] = others[["mean", "low", "high"]]
    is_missed = misses_budget(answers, ["line"], "own_budget")
    read = answers[answers["line"].isin(is_missed.index[is_missed])]
    read = read.groupby(["line", "model"])["budget"].mean().groupby("line")
    reads = read.agg(lambda budgets: f"reads {show_range(BUDGET, budgets, ' to ')} % on the tasks")
    lacks = "lacks " + _lacking(methods["board"].reset_index().merge(full, on="board"), answers)
    notes = pd.DataFrame({"reads": reads, "lacks": lacks}, index=found.index)
    methods["answers_note"] = notes.apply(lambda words: "; ".join(words.dropna()), axis=1)
    return methods


# Decode steps


def _steps(every: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """`step_s`, `step_source` and `step_on` of the lines whose method was timed.

    All steps of a board are of one model, machine, batch and prompt length, so that they compare:
    that where most were timed. Lines of other lengths of windows have none.
    """
    setup = ["board", "model", "platform", "batch_size", "prompt_len"]
    steps = steps[steps["counts"]].rename(columns={"label": "run_label"})
    most = steps.groupby(setup, sort=False).size().sort_values(ascending=False, kind="stable")
    steps = steps.merge(most.reset_index()[setup].drop_duplicates("board"), on=setup)
    here = every.assign(budget=every.groupby(["line", "model"])["budget"].transform("mean"))
    here = here.drop_duplicates(["line", "model"]).rename(columns={"seq_len": "prompt_len"})
    same = ["board", "model", "prompt_len", "method", "codec", "run_label", "dense_layers"]
    timed = here.merge(steps, on=same, suffixes=("", "_timed"))
    timed["is_timed"] = timed["own_budget"].fillna(0) == timed["own_budget_timed"].fillna(0)
    timed = timed.sort_values("is_timed", ascending=False, kind="stable").drop_duplicates("line")
    modelled = step_at(timed, timed["budget"] / timed["budget_timed"], timed["dense_layers"])
    timed["step_s"] = timed["step_s"].where(timed["is_timed"], modelled)
    groups = timed[["settings", "settings_timed"]].apply(_group_size)
    is_same = groups["settings"] == groups["settings_timed"]  # else as many bytes, of other tokens
    timed["step_source"] = timed["source_timed"].where(timed["is_timed"] & is_same, MODELLED)
    words = "{0.model} ({0.platform}), batch {0.batch_size:.0f}, prompts of {0.prompt_len:,.0f} tokens"
    timed["step_on"] = [words.format(step) for step in timed.itertuples()]
    timed = timed.dropna(subset="step_s").set_index("line")
    return timed[["step_s", "step_source", "step_on"]]


def _group_size(settings: pd.Series) -> pd.Series:
    return settings.str.extract(r"\b(group_size=\w+)", expand=False).fillna("")


# Fronts


def traffic(rows: pd.DataFrame) -> pd.Series:
    """Bytes that a step moves over the link and reads on the device, of the full cache's; the mean
    of the models' least and largest. What is left after an eviction is small and lies on the
    device."""
    over_link = _middle(rows, "budget").where(rows["family"] != "evicts", 0)
    return over_link + _middle(rows, "device_frac")


def _middle(rows: pd.DataFrame, name: str) -> pd.Series:
    return (rows[f"{name}_low"] + rows[f"{name}_high"]) / 2


COSTS: Mapping[str, Callable[[pd.DataFrame], pd.Series]] = {
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


def _fronts(lines: pd.DataFrame) -> pd.Series:
    """The costs at which no method is closer to the full cache for no more.

    Lines of a board and length are compared, of all budgets. Oracles are on no front.
    """
    front = pd.Series("", lines.index)
    rivals = lines[is_whole(lines) & ~lines["method"].isin(ORACLES)]
    for _, rows in rivals.groupby(["board", "seq_len"]):
        kl = rows["kl_nats"].to_numpy()
        is_closer = kl < kl[:, None]
        for name, cost in COSTS.items():
            costs = cost(rows).to_numpy()
            limits = costs + EQUAL * (name == "link")
            limits *= 1 + SAME_STEP * (name == "step time")
            is_beaten = (is_closer & (costs <= limits[:, None])).any(axis=1)
            front[rows.index[~is_beaten & ~np.isnan(costs)]] += f", {name}"
    return front.str.removeprefix(", ")


# Claims

HOLDS, UNSURE, FAILS = VERDICTS = ("holds", "not told apart", "does not hold")
NOT_MEASURED, OTHER_BUDGET = "not measured", "another budget"


def judged(claims: Any, windows: pd.DataFrame, answers: pd.DataFrame) -> pd.DataFrame:
    """The claims of `board.yaml` at each of their budgets and each length, by board.

    A claim holds where the whole 95 % interval of its number is on the claimed side. One about
    methods that did not run has one line. Columns: those of a claim; `mean`, `low` and `high` of the
    logarithm of the ratio of KL, or of the difference of answers; `count` of windows or questions;
    `verdict`.
    """
    of_claim = ["claim", "of", "label", "other", "budgets", "at_most", "less"]
    said = pd.DataFrame(claims, columns=of_claim).explode("budgets", ignore_index=True)
    said = said.rename(columns={"budgets": "asked_budget"}).astype({"asked_budget": float})
    said = said.fillna({"at_most": 1.0, "less": 0.0}).reset_index(names="number")
    by = ["number", "seq_len", "board"]
    own, other = _sides(said[said["of"] == "KL"], windows.assign(log=logarithm(windows["kl_nats"])))
    kl = own.merge(other, on=[*by, *WINDOW], suffixes=("", "_of_other"))
    kl = kl.assign(value=kl["log"] - kl["log_of_other"], weight=1)
    own, other = _sides(said[said["of"] == "answers"], answers)
    asked = same_questions(own, other, "number")
    asked = asked.assign(weight=asked["asked"], seq_len=0)
    both = pd.concat([kl, asked])
    of_other = both.assign(budget=both["budget_of_other"], met=both["met_of_other"])
    found = pd.concat([estimates(kl, by, over_models=True), gaps(asked, by)])
    found["count"] = both.groupby(by)["weight"].sum()
    found["is_missed"] = misses_budget(both, by, "met") | misses_budget(of_other, by, "met")

    rows = said.merge(found.reset_index(), on="number", how="left")
    rows = rows.sort_values(by, kind="stable").fillna({"board": 0})
    is_kl = rows["of"] == "KL"
    least, most = rows["low"].where(is_kl, -rows["high"]), rows["high"].where(is_kl, -rows["low"])
    bound = np.log(rows["at_most"]).where(is_kl, rows["less"])  # of answers, of what is lost
    cases = {
        NOT_MEASURED: rows["mean"].isna(),
        OTHER_BUDGET: rows["is_missed"].eq(True),
        HOLDS: most <= bound,
        FAILS: least > bound,
    }
    return rows.assign(verdict=np.select([*cases.values()], [*cases], UNSURE))


def _sides(said: pd.DataFrame, rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The rows of both methods of each claim, at its budget or at none. met: the budget that they
    should have."""
    for name in ("label", "other"):
        claims = said[["number", "of", "asked_budget", name]].rename(columns={name: "label"})
        side = claims.merge(rows, on="label")
        is_asked = side["own_budget"] == side["asked_budget"]
        is_only = side["own_budget"].isna() & ~is_asked.groupby(side["number"]).transform("any")
        met = side["asked_budget"].where(side["of"] == "KL", side["own_budget"])
        yield side.assign(met=met)[is_asked | is_only]

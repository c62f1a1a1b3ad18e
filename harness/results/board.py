"""The board: each method's KL beside the oracle's, its rank, answers, memory and decode step.

    python -m harness.results.board results

The evidence is three tables that `experiment=board` writes: a row for each window of a text, each
context of a task and each timed decode step. The board is made of these alone, of the named results
and of the folders within them, so results without their records can be shipped, joined and
extended. A method or a model of one's own needs no more than its own run of `experiment=board`.

A board is over all models or of one. Methods are compared at a setting, which is an asked budget
and a length of windows. The oracle's windows are what is compared: a method that lacks some of
them, or cannot have the budget, stands apart. A window is known by model, text and place, a context
of questions by model, task and number. `harness/results/stats.py` has the statistics.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from harness.errors import UserError, exit_code
from harness.files import holding, write_atomic
from harness.results import metrics
from harness.results.columns import IDENTITY, TABLES, csv_of, read_frame, with_columns
from harness.results.metrics import COLUMNS, MISSING
from harness.results.record import Record, in_words
from harness.results.samples import FULL, is_full
from harness.results.sheet import (
    OWN,
    Sheet,
    mark_own,
    markdown,
    note,
    show_range,
    terminal,
)
from harness.results.stats import LEVEL, estimates, holm, unseen_rate
from harness.settings.kinds import OF_CODECS
from harness.settings.paths import COMMAND, models_beside, table_to_read

METHODS, PAIRS = "board-methods", "board-pairs"
TEXTS, ANSWERS, STEPS = "board-texts", "board-answers", "board-steps"
SHAPES = {TEXTS: "board_texts", ANSWERS: "board_answers", STEPS: "board_steps"}
"""The tables of evidence."""
WINDOW = ["model", "part", "place"]
OF_SHARES = ["budget", "device_frac", "resident_frac"]
OF_STEP = ("batch_size", "prompt_len", "gen_len")
ENDS = ["mean", "low", "high"]
ALL_MODELS = "all models"
LEAST_KL = 1e-6
"""Nats: a smaller KL is rounding, and counts as this much."""
ORACLES = ("oracle", "oracle-infinigen")
"""Methods that select by the true scores: upper bounds of hard selection of rows; the second by the
paper's rule for a group. The first of them that ran is what is compared with."""
OWN_BUDGET = "reads at a budget of its own"
"""Why a method without a budget is not compared."""
SETTING = ["asked_budget", "seq_len"]
ANSWER_MARKS = {
    "§": ("reads ", "The method cannot have this budget on the tasks."),
    "¶": ("lacks ", "Some of the full cache's questions were not asked."),
}
"""Behind answers: by mark, what their note says, and what it means."""


# The evidence of records


def evidence_of(records: Iterable[Record]) -> dict[str, pd.DataFrame]:
    """The tables of finished records, by name; of two runs of one identity the newer counts."""
    parts = {name: [pd.DataFrame(columns=[*TABLES[SHAPES[name]], "ran"])] for name in SHAPES}
    for record in sorted(records, key=itemgetter("started")):
        table = {"tasks": ANSWERS, "latency": STEPS}.get(record["kind"], TEXTS)
        parts[table].append(MEASURED[table](record).assign(**_run(record)))
    tables = {name: pd.concat(frames) for name, frames in parts.items()}
    # Timed runs are labelled by their system; here by the same method's run on texts or tasks.
    others = pd.concat([tables[TEXTS], tables[ANSWERS]]).drop_duplicates("ran", keep="last")
    steps = tables[STEPS]
    steps["label"] = steps["ran"].map(others.set_index("ran")["label"]).fillna(steps["label"])
    found = {name: _once(frame, name, "run_id", "last") for name, frame in tables.items()}
    return {name: frame.fillna({"source": "measured"}) for name, frame in found.items()}


def _once(rows: pd.DataFrame, table: str, of: str, which: Literal["last", "min"]) -> pd.DataFrame:
    """Rows of a table, of each identity those of one run or folder. of: the column of this."""
    same = rows.groupby(list(IDENTITY[SHAPES[table]]), dropna=False)[of]
    return rows[rows[of] == same.transform(which)]


def _run(record: Record) -> dict[str, Any]:
    """The columns that say what a run is of."""
    config = record["config"]
    ran = [config["model"]["name"], config["method_name"], config.get("method")]
    ran += [config.get(name) for name in OF_CODECS]
    return {
        "experiment": record["experiment"],
        "model": config["model"]["name"],
        "method": config["method_name"],
        "codec": "/".join(filter(None, (config["codec"], config.get("value_codec")))),
        "label": config["label"],
        "settings": in_words(record["settings"]),
        "asked_budget": config["budget"],
        "dense_layers": None if is_full(record) else config["method"].get("dense_layers"),
        "run_id": record["run_id"],
        "ran": json.dumps(ran, sort_keys=True),
    }


def _windows(record: Record) -> pd.DataFrame:
    """The windows of a run on a text."""
    ((text, entries),) = record["metrics"].items()
    if record["when"] != "kept":
        family = "oracle" if record["when"] == "true_scores" else "retrieves"
    elif record["config"]["budget"] is not None:
        family = "evicts"
    else:
        family = "reads all" if entries["budget"] == 1 else "codes"
    windows = pd.DataFrame(record["samples"]["windows"], columns=["place", "kl_nats", "budget"])
    of_run = {"text": Path(text).name, "seq_len": record["config"]["seq_len"], "family": family}
    of_run |= {name: entries.get(name) for name in OF_SHARES[1:]}
    return windows.assign(window=windows.index, **of_run)


def _answers(record: Record) -> pd.DataFrame:
    """The contexts of the tasks that are scored by `acc`."""
    parts = []
    for task, entries in record["metrics"].items():
        samples = record["samples"].get(task, ())
        answers = pd.DataFrame(samples, columns=["acc", "context", "context_tokens"])
        of_contexts = answers.dropna(subset="acc").groupby("context")
        right, asked = of_contexts["acc"].sum(), of_contexts.size()
        prompt_len, shares = of_contexts["context_tokens"].max(), map(entries.get, OF_SHARES)
        of_task = {"task": task, "context_id": right.index, "right": right, "asked": asked}
        of_task |= {"prompt_len": prompt_len} | dict(zip(OF_SHARES, shares, strict=True))
        parts.append(pd.DataFrame(of_task))
    return pd.concat(parts)


def _steps(record: Record) -> pd.DataFrame:
    """The step of a timed run, the mean over its steps; no row if no transfer was counted."""
    metrics = record["metrics"]
    step = {name: metrics[name] for name in ("source", "platform", *OF_STEP, "budget")}
    step["step_s"] = metrics["decode_s"] / (metrics["gen_len"] - 1)
    return pd.DataFrame([step] if metrics["h2d_bytes"] is not None else [])


MEASURED = {TEXTS: _windows, ANSWERS: _answers, STEPS: _steps}
"""What a run measured, by table."""


# The evidence of a results folder


def read(results: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Windows, answers and steps of a results folder, and of the folders within it.

    `own_budget` is the asked one, `part` a text or task, `place` that of a window or the number of
    a context, `line` the number of a method at its own budget. `label` says the number of dense
    layers where a model has a method with several. Of two runs of one identity that of the earlier
    folder counts. Raises UserError where no window has a budget, for a damaged table, and for two
    methods with one label.
    """
    folders = [results, *(results / name for name in models_beside(results))]
    windows, answers, steps = (_read(folders, name) for name in SHAPES)
    if windows["own_budget"].isna().all():
        none = f"no tables/{TEXTS}.csv with a budget in it or in a folder within it"
        raise UserError(f"{results}: {none}; `{COMMAND} experiment=board` makes one")
    windows = windows.rename(columns={"text": "part"})
    answers = answers.rename(columns={"task": "part", "context_id": "place"})
    rows = pd.concat([windows, answers], ignore_index=True)
    methods = (rows["method"] + " " + rows["codec"]).str.strip()
    for label, found in methods.groupby(rows["label"]):
        if found.nunique() > 1:
            two = f"two methods have it ({', '.join(sorted(found.unique()))})"
            raise UserError(f"label={label}: {two}; give each its own")
    same = ["label", "model", "own_budget", "seq_len", "part"]
    numbers = rows.groupby(same, dropna=False)["dense_layers"].transform("nunique", dropna=False)
    several = rows.loc[numbers > 1, "label"].unique()
    for frame in (rows, steps):
        layers = frame["dense_layers"].fillna(0).astype(int).astype(str)
        whole = frame["label"] + ", " + layers + " dense layers"
        frame["label"] = frame["label"].mask(frame["label"].isin(several), whole)
    rows["line"] = rows.groupby(["label", "own_budget"], dropna=False).ngroup()
    is_window = rows["kl_nats"].notna()
    return rows[is_window], rows[~is_window], steps


def _read(folders: Sequence[Path], name: str) -> pd.DataFrame:
    """A table of all folders, its `asked_budget` as `own_budget`."""
    frames = [with_columns(pd.DataFrame(), SHAPES[name]).assign(folder=0)]
    for number, folder in enumerate(folders):
        path = table_to_read(folder, f"{name}.csv")
        if path is not None:
            frames.append(read_frame(path).assign(folder=number))
    rows = _once(pd.concat(frames, ignore_index=True), name, "folder", "min")
    return rows.rename(columns={"asked_budget": "own_budget"})


# The boards


def board_of(
    windows: pd.DataFrame, answers: pd.DataFrame, steps: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """The board over all models, then one of each, from the evidence of `read`.

    A model counts in the means over all if at least half as many methods ran at a budget on it as
    on the model with the most. So a method that ran on one more model stays comparable with the
    others.

    Returns rows of the shape `board`, those of `board_pairs` for the first board, and the
    models over which no mean goes.
    """
    itself = windows["method"].eq(FULL) & windows["codec"].eq("")  # has no distance to itself
    windows = windows.assign(log=np.log(windows["kl_nats"].clip(lower=LEAST_KL)).mask(itself))
    models = pd.concat([windows["model"], answers["model"]]).unique()
    methods = windows.dropna(subset="own_budget").drop_duplicates(["model", "line"])
    num_methods = methods["model"].value_counts().reindex(models, fill_value=0)
    together = list(models[2 * num_methods >= num_methods.max()])
    first = ALL_MODELS if len(together) > 1 else together[0]
    boards = {first: together} | {model: [model] for model in models if num_methods[model]}
    lines, pairs = [], []
    for over, on in boards.items():
        here = (rows[rows["model"].isin(on)] for rows in (windows, answers, steps))
        of_board, of_pairs = _board(*here)
        lines.append(of_board.assign(over=over))
        pairs.append(of_pairs)
    left_out = [model for model in models if model not in together]
    return pd.concat(lines, ignore_index=True), pairs[0], left_out


def _board(
    windows: pd.DataFrame, answers: pd.DataFrame, steps: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Lines and pairs of a board at each setting: the largest budget first, then by length; the
    compared methods before the others, the closest first."""
    beside_full, timed = _beside_full(answers), _timed_alike(steps)
    lines, pairs = [], []
    for budget in sorted(windows["own_budget"].dropna().unique(), reverse=True):
        at_budget = windows[windows["own_budget"].isin([budget, math.nan])]
        for seq_len, here in at_budget.groupby("seq_len"):
            if here["own_budget"].isna().all():
                continue
            setting = {"asked_budget": budget, "seq_len": seq_len}
            found, tested = _beside_oracle(here)
            found = found.join(_step_of_lines(here, timed)).join(beside_full)
            order = found.assign(is_apart=found["apart"] != "")
            order = order.sort_values(["is_apart", "ratio", "label"])
            lines.append(found.loc[order.index].assign(**setting))
            pairs.append(tested.assign(**setting))
    found = pd.concat(lines, ignore_index=True)
    has_own = found["has_own_windows"] | found["has_own_answers"].eq(True)
    found = found.assign(source="measured", shipped=np.where(has_own, "", "yes"))
    return found, pd.concat(pairs, ignore_index=True)


def _misses_budget(rows: pd.DataFrame) -> pd.Series:
    """By line, whether it reads another budget than it was asked for on any model and text or task.
    Lines without a budget are left out."""
    read = rows.groupby(["line", "own_budget", "model", "part"])["budget"].mean()
    is_off = (read - read.index.get_level_values("own_budget")).abs() > metrics.EQUAL
    return is_off.groupby("line").any()


def _beside_oracle(here: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Lines and pairs of a setting, from the windows of its methods."""
    is_oracle = here["method"].isin(ORACLES) & here["codec"].eq("") & here["own_budget"].notna()
    oracles = here[is_oracle].sort_values("method", kind="stable")
    reference = oracles["line"].head(1)
    oracle = oracles[oracles["line"].isin(reference)].set_index(WINDOW)["log"]
    is_shared = pd.Series(pd.MultiIndex.from_frame(here[WINDOW]).isin(oracle.index), here.index)
    # A line shows the windows that the oracle has too, or all if there are none.
    shown = here[is_shared | ~is_shared.groupby(here["line"]).transform("any")]
    of_lines = shown.groupby("line", sort=False)
    lines = of_lines[["label", "own_budget", "method", "codec", "family"]].first()
    lines["model"] = of_lines["model"].agg(lambda models: ", ".join(models.unique()))
    lines["num_models"], lines["num_windows"] = of_lines["model"].nunique(), of_lines.size()
    places = shown.drop_duplicates(["line", "part", "place"])
    lines["num_places"] = places.groupby("line").size()
    lines["dense_numbers"] = of_lines["dense_layers"].agg(_in_words)
    lines["has_own_windows"] = shown["shipped"].ne("yes").groupby(shown["line"]).any()
    of_models = shown.groupby(["line", "model"])[OF_SHARES].mean().groupby("line")
    lines = lines.join(of_models.min().add_suffix("_low")).join(of_models.max().add_suffix("_high"))

    logs = shown.pivot(index=WINDOW, columns="line", values="log")
    lines["kl_nats"] = np.exp(estimates(logs)["mean"])
    logs = logs.reindex(oracle.index)
    lines = lines.join(_ratios(estimates(logs.sub(oracle, axis=0), over_models=True)))
    lines.loc[reference, ["ratio_low", "ratio_high"]] = math.nan  # its ratio is 1 by its meaning
    lacks = _lacking(shown, oracle.index)
    facts = lines.assign(is_missed=_misses_budget(here), lacks=lacks)
    lines["apart"] = ["; ".join(_why_apart(line, oracle.empty)) for line in facts.itertuples()]
    compared = lines[lines["apart"] == ""]
    pairs = _pairs(compared, logs)
    return lines.join(_ranks(compared, pairs)), pairs


def _in_words(dense_layers: pd.Series) -> str:
    return " or ".join(map(metrics.DENSE_LAYERS.show, sorted(dense_layers.dropna().unique())))


def _ratios(found: pd.DataFrame) -> pd.DataFrame:
    """The columns of a ratio, from estimates of its logarithm."""
    ends = found[ENDS].set_axis(["ratio", "ratio_low", "ratio_high"], axis=1)
    return ends.apply(np.exp).join(found["degrees"])


def _why_apart(line: Any, no_oracle: bool) -> Iterator[str]:
    """In words, why a line is not compared with the others; nothing if it is."""
    if no_oracle:
        yield "the oracle has no windows here"
    elif line.method == FULL and not line.codec:
        yield "the full cache itself, whose KL is 0"
    else:
        if pd.isna(line.own_budget):
            yield OWN_BUDGET
        elif line.is_missed:
            read = show_range(metrics.BUDGET, (line.budget_low, line.budget_high))
            yield f"cannot have this budget: reads {read} %"
        if line.lacks:
            yield f"{line.lacks} windows"


def _lacking(rows: pd.DataFrame, due: pd.Index) -> pd.Series:
    """By line, how many of the due windows or contexts are not among its rows, in words; "" where
    all are there."""
    is_due = pd.MultiIndex.from_frame(rows[WINDOW]).isin(due)
    missing = len(due) - pd.Series(is_due, rows["line"]).groupby(level=0).sum()
    return missing.map(lambda count: f"lacks {count} of {len(due)}" if count else "")


def _pairs(compared: pd.DataFrame, logs: pd.DataFrame) -> pd.DataFrame:
    """The tests of all pairs of compared lines, with Holm's correction."""
    first, other = (compared.index[places] for places in np.triu_indices(len(compared), 1))
    differences = pd.DataFrame(logs[first].to_numpy() - logs[other].to_numpy(), logs.index)
    found = estimates(differences)
    pairs = _ratios(found).assign(p=found["p"], p_holm=holm(found["p"]), source="measured")
    pairs["model"] = compared["model"][first].to_numpy()
    pairs["label"] = compared["label"][first].to_numpy()
    pairs["other"] = compared["label"][other].to_numpy()
    closer = pairs["label"].where(pairs["ratio"] < 1, pairs["other"])
    return pairs.assign(closer=closer.where(pairs["p_holm"] <= LEVEL, ""))


def _ranks(compared: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """Places of the compared lines by their ratio; equal ratios share one. A method may have any
    from 1 + the methods certainly closer to all less those certainly farther."""
    certain = pairs[pairs["closer"] != ""]
    closer = certain["closer"]
    farther = certain["other"].where(closer == certain["label"], certain["label"])
    num_farther, num_closer = (
        compared["label"].map(labels.value_counts()).fillna(0) for labels in (closer, farther)
    )
    ranks = {
        "num_compared": len(compared),
        "rank": compared["ratio"].rank(method="min"),
        "rank_low": 1 + num_closer,
        "rank_high": len(compared) - num_farther,
    }
    return pd.DataFrame(ranks, compared.index)


# Answers


def _beside_full(answers: pd.DataFrame) -> pd.DataFrame:
    """By line: the share of right answers, its difference to the full cache's, and what to know of
    it.

    Contexts count on which both were asked the same questions: as many, in prompts of one length. A
    context is known by its number alone, which other questions of the task have too. Where no
    context differs from another, which a few contexts do not make impossible, the interval is that
    of the largest unseen rate.
    """
    is_full = (answers["method"] == FULL) & (answers["codec"] == "")
    full = answers[is_full]
    full = full[full["line"].isin(full["line"].head(1))]
    same = [*WINDOW, "asked", "prompt_len"]
    both = answers.merge(full[[*same, "right"]], on=same, suffixes=("", "_of_full"))
    share = both["right"] / both["asked"]
    both = both.assign(share=share, difference=share - both["right_of_full"] / both["asked"])
    shares, differences = (
        both.pivot(index=same, columns="line", values=name) for name in ("share", "difference")
    )
    asked = shares.index.to_frame()["asked"]
    found = estimates(differences, asked, over_models=True)
    unseen, is_alike = found["num_places"].map(unseen_rate), found["low"] == found["high"]
    found["low"] = found["low"].mask(is_alike, found["mean"] - unseen)
    found["high"] = found["high"].mask(is_alike, found["mean"] + unseen)

    has_own = answers["shipped"].ne("yes").groupby(answers["line"]).any()
    lines = pd.DataFrame({"has_own_answers": has_own})
    lines["answers"] = estimates(shares, asked)["mean"]
    lines["num_questions"] = both.groupby("line")["asked"].sum()
    lines["num_contexts"] = found["num_places"]
    others = found[~found.index.isin(answers.loc[is_full, "line"])]
    lines[[f"answers_difference{end}" for end in ("", "_low", "_high")]] = others[ENDS]
    missed = _misses_budget(answers)
    read = answers.groupby(["line", "model"])["budget"].mean()
    lacking = _lacking(answers, pd.MultiIndex.from_frame(full[WINDOW]))
    notes = {}
    for line in found.index:
        reads = f"reads {show_range(metrics.BUDGET, read[line], ' to ')} % on the tasks"
        lacks = lacking[line] and f"{lacking[line]} contexts"
        notes[line] = "; ".join(filter(None, (missed.get(line) and reads, lacks)))
    return lines.assign(answers_note=pd.Series(notes, dtype=object))


# Decode steps


def _timed_alike(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps of one model, machine, batch and prompt length, so that they compare: that where
    most were timed."""
    setup = ["model", "platform", "batch_size", "prompt_len"]
    most = steps.groupby(setup, sort=False).size().nlargest(1)
    return steps.merge(most.reset_index()[setup])


def _step_of_lines(here: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """`step_s`, `step_source` and `step_on` of the lines that were timed: their method at their
    budget, over the same codes. Lines of other lengths of windows than the prompts have none."""
    here = here.assign(prompt_len=here["seq_len"]).drop_duplicates(["line", "model"])
    here, steps = (
        rows.assign(groups=rows["settings"].str.extract(r"\b(group_size=\w+)", expand=False))
        for rows in (here, steps)
    )
    same = ["model", "prompt_len", "method", "codec", "groups", "label", "dense_layers"]
    timed = here.merge(steps, on=[*same, "own_budget"], suffixes=("", "_timed"))
    timed = timed.drop_duplicates("line").set_index("line")
    place = "{0.model} ({0.platform}), batch {0.batch_size:.0f}, prompts of {0.prompt_len:,.0f}"
    on = [f"{place.format(step)} tokens" for step in timed.itertuples()]
    return timed[["step_s"]].assign(step_source=timed["source_timed"], step_on=on)


# Pages


def show_ratio(ratio: float) -> str:
    """Two digits after the point, or two digits of a small ratio."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _show_points(difference: float) -> str:
    """A difference of answers, with its sign."""
    shown = metrics.ANSWERS_DIFFERENCE.show(difference)
    return f"+{shown}" if difference > 0 else shown


def _cells(row: Any) -> dict[str, str]:
    """A row's cells by column. A difference of answers is marked where its note says more."""
    cells = {name: row[name] or MISSING for name in ("label", "apart", "dense_numbers")}
    for name in ("answers", "num_questions", "num_windows", "step_s"):
        cells[name] = COLUMNS[name].show(row[name])
    for name in OF_SHARES:
        cells[name] = show_range(COLUMNS[name], (row[f"{name}_low"], row[f"{name}_high"]))
    cells["rank"] = f"{row['rank']:.0f} ({row['rank_low']:.0f} to {row['rank_high']:.0f})"
    for name, show in (("ratio", show_ratio), ("answers_difference", _show_points)):
        value, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
        cells[name] = MISSING if math.isnan(value) else show(value)
        if not math.isnan(value + low):
            cells[name] += f" ({show(low)} to {show(high)})"
    if cells["answers_difference"] != MISSING:
        marks = [mark for mark, (said, _) in ANSWER_MARKS.items() if said in row["answers_note"]]
        cells["answers_difference"] += "".join(marks)
    return cells


def first_board(methods: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first board, which is over all models if there are several."""
    return methods[methods["over"].isin(methods["over"].head(1))]


def sheets_of_boards(methods: pd.DataFrame) -> Iterator[Sheet]:
    """The sheets of all boards; those after the first are named by their model."""
    for number, (over, rows) in enumerate(methods.groupby("over", sort=False)):
        for sheet in _sheets(rows, methods):
            yield sheet._replace(title=f"{over}, {sheet.title}" if number else sheet.title)


def _sheets(board: pd.DataFrame, methods: pd.DataFrame) -> Iterator[Sheet]:
    """For each budget and length of a board the compared methods, then the others. methods: of all
    boards; a board over all models has a column with the ratio on each."""
    rows, of_own = mark_own(board, "label")
    is_over_all = board["over"].iloc[0] == ALL_MODELS
    of_models = methods[methods["over"].ne(ALL_MODELS)] if is_over_all else methods.head(0)
    for _, found in rows.groupby([*SETTING, rows["apart"].ne("")], sort=False):
        alike = of_models[SETTING].eq(found[SETTING].iloc[0]).all(axis=1)
        sheet = _sheet(found, of_models[alike])
        yield sheet._replace(notes=[*sheet.notes, *of_own])


def _sheet(rows: pd.DataFrame, on_models: pd.DataFrame) -> Sheet:
    """The compared methods of a setting, the closest first, or the others. on_models: the boards of
    single models at this setting."""
    first = rows.iloc[0]
    budget = metrics.ASKED_BUDGET.show(first["asked_budget"])
    title = f"budget {budget} %, windows of {first['seq_len']:,.0f} tokens"
    on = f"on {first['num_models']:.0f} models" if first["num_models"] > 1 else "on one model"
    windows = f"{first['num_windows']:.0f} windows at {first['num_places']:.0f} places of the texts"
    notes = [f"KL: {windows}, {on} ({first['model']})."]
    begin = ["label", "rank", "ratio"]
    if first["apart"]:
        title, notes, begin = f"{title}: not compared", [], ["label", "apart", "ratio"]
    cells = pd.DataFrame([_cells(row) for row in rows.to_dict("records")], rows.index)
    table = cells[begin].rename(columns=lambda name: COLUMNS[name].heading)
    for name in ("num_windows", "answers_difference", "answers", "num_questions", *OF_SHARES):
        if name != "num_windows" or first["apart"]:
            table[COLUMNS[name].heading] = cells[name]
    if rows["step_s"].notna().any():  # all were timed in one place
        table[metrics.STEP.heading] = cells["step_s"]
        place = rows.loc[rows["step_s"].notna(), "step_on"].iloc[0]
        notes.append(f"Decode step: {place}, over an emulated link.")
    if not first["apart"]:
        table = table.rename(columns={COLUMNS["rank"].heading: f"rank of {len(rows)}"})
        table[COLUMNS["dense_numbers"].heading] = cells["dense_numbers"]
    for model, of_model in on_models.groupby("over", sort=False):
        ratios = of_model["ratio"].map(show_ratio, na_action="ignore").set_axis(_keys(of_model))
        ratios = ratios[~ratios.index.duplicated()]
        table[f"on {model}"] = _keys(rows).map(ratios).fillna(MISSING)
    marked = rows.loc[rows["answers_difference"].notna(), "answers_note"]
    for mark, (said, words) in ANSWER_MARKS.items():
        if marked.str.contains(said).any():
            notes.append(f"{mark} {words}")
    return Sheet(title, table, notes)


def _keys(rows: pd.DataFrame) -> pd.Series:
    """What tells the lines of a setting apart: a label may have one at a budget of its own, too."""
    labels = rows["label"].str.removesuffix(f" {OWN}")
    return labels + rows["apart"].str.contains(OWN_BUDGET).map({True: OWN_BUDGET, False: ""})


# The command


def write(results: Path) -> tuple[Path, pd.DataFrame]:
    """Write `board.md` and the tables into a results folder; returns the page's path, and the
    methods as a frame of the shape `board`.

    Raises UserError: see `read`; or the folder cannot be written.
    """
    methods, pairs, left_out = board_of(*read(results))
    words = note("board")
    if left_out:
        few = "fewer than half of the methods ran there"
        words += f" Not in the means: {', '.join(left_out)}, since {few}."
    # As the CSV gives it back.
    methods = with_columns(methods, "board")
    folder, path = results / "tables", results / "board.md"
    with holding(folder, wait=True):
        write_atomic(folder / f"{METHODS}.csv", csv_of(methods, "board"))
        write_atomic(folder / f"{PAIRS}.csv", csv_of(pairs, "board_pairs"))
        sheets = _sheets(first_board(methods), methods)
        write_atomic(path, markdown("board", words, sheets))
    return path, methods


def main(argv: Sequence[str] | None = None) -> int:
    """Write the board, print the compared methods of its first setting, and its path; returns the
    exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.board", description="Write the board."
    )
    parser.add_argument(
        "results", type=Path, metavar="RESULTS", help="a results folder; folders within it count"
    )
    args = parser.parse_args(argv)
    return exit_code(lambda: print(_written(args.results)))


def _written(results: Path) -> str:
    path, methods = write(results)
    first = next(_sheets(first_board(methods), methods))
    return f"{terminal(first)}\n\n{path}"


if __name__ == "__main__":
    sys.exit(main())

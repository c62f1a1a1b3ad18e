"""Pages of the board.

`page` is `board.md`, `boards` the sheets of all boards, `printed` what a terminal shows and `said`
the board in sentences. All take the methods as a frame of `columns.BOARD`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from harness.results import metrics
from harness.results.board_rows import (
    ALL_MODELS,
    COSTS,
    MODELLED,
    SAME_STEP,
    is_whole,
    traffic,
)
from harness.results.metrics import COLUMNS, EQUAL, MISSING, Metric
from harness.results.sheet import (
    MAX_ROWS,
    SHARES,
    Sheet,
    alike_in_title,
    mark_own,
    markdown,
    note,
    show_range,
    terminal,
    wrapped,
)

SAYS = yaml.safe_load(Path(__file__).with_name("board.yaml").read_text(encoding="utf-8"))
"""README's rows and budget, and the claims."""
OF_ANSWERS = "answers_difference answers num_questions"
OF_SHARES = "budget device_frac resident_frac"
ANSWER_MARKS = {
    "§": ("reads ", "The method cannot have this budget on the tasks."),
    "¶": ("lacks ", "Some of the full cache's questions were not asked."),
}
"""Behind answers: by mark, what their note says, and what it means."""
MODELLED_MARK = "‡"
TRAFFIC = Metric("traffic", "link + device", metrics.PERCENT, 1)
SETTING = ["asked_budget", "seq_len"]


# Words of rows


def show_ratio(ratio: float) -> str:
    """Two digits after the point, or two digits of a small ratio."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def show_points(difference: float) -> str:
    """A difference of answers, with its sign."""
    shown = metrics.ANSWERS_DIFFERENCE.show(difference)
    return f"+{shown}" if difference > 0 else shown


def show_interval(show: Callable[[float], str], value: float, low: float, high: float) -> str:
    """A number, with its interval where it has one."""
    if pd.isna(value):
        return MISSING
    return show(value) if pd.isna(low) else f"{show(value)} ({show(low)} to {show(high)})"


def _ratios(rows: pd.DataFrame) -> list[str]:
    ends = rows[["ratio", "ratio_low", "ratio_high"]].itertuples(index=False)
    return [show_interval(show_ratio, *each) for each in ends]


def _differences(rows: pd.DataFrame) -> list[str]:
    """Differences of answers, marked where their notes say more."""
    name, found = "answers_difference", []
    ends = rows[[name, f"{name}_low", f"{name}_high"]].itertuples(index=False)
    for words, each in zip(rows["answers_note"], ends, strict=True):
        shown = show_interval(show_points, *each)
        marks = [mark for mark, (said, _) in ANSWER_MARKS.items() if said in words]
        found.append(shown if shown == MISSING else shown + "".join(marks))
    return found


def _places(rows: pd.DataFrame, between: str = " to ") -> list[str]:
    ranks = rows[["rank", "rank_low", "rank_high"]].itertuples(index=False)
    return [f"{rank:.0f} ({low:.0f}{between}{high:.0f})" for rank, low, high in ranks]


def _steps(rows: pd.DataFrame) -> pd.Series:
    marks = np.where(rows["step_source"] == MODELLED, MODELLED_MARK, "")
    return rows["step_s"].map(metrics.STEP.show) + marks


def _ranges(rows: pd.DataFrame, column: Metric, between: str = " to ") -> list[str]:
    """The least and the largest of the models, once where they are equal when rounded."""
    ends = rows[[f"{column.name}_low", f"{column.name}_high"]].itertuples(index=False)
    return [show_range(column, each, between) for each in ends]


SHOWN: Mapping[str, Callable[[pd.DataFrame], Any]] = {
    "rank": _places, "ratio": _ratios, "answers_difference": _differences, "step_s": _steps,
}  # fmt: skip
"""By column, what shows it together with others; any other column is shown by itself, or as the
range of its ends."""


def _table(rows: pd.DataFrame, names: str) -> pd.DataFrame:
    """Columns as words under their headings; no decode steps where none was timed."""
    table = pd.DataFrame(index=rows.index)
    for name in names.split():
        column = TRAFFIC if name == TRAFFIC.name else COLUMNS[name]
        if name in SHOWN:
            table[column.heading] = SHOWN[name](rows)
        elif f"{name}_low" in rows:
            table[column.heading] = _ranges(rows, column)
        elif column.digits is None:
            table[column.heading] = rows[name].replace("", MISSING)
        else:
            table[column.heading] = rows[name].map(column.show)
    if rows["step_s"].notna().any():
        return table
    return table.drop(columns=metrics.STEP.heading, errors="ignore")


def _budget(budget: float) -> str:
    return f"budget {metrics.ASKED_BUDGET.show(budget)} %"


def _setting(row: pd.Series) -> str:
    return f"{_budget(row['asked_budget'])}, windows of {row['seq_len']:,.0f} tokens"


def _counts(row: pd.Series) -> str:
    models = "one model" if row["num_models"] == 1 else f"{row['num_models']:.0f} models"
    return (
        f"KL: {row['num_windows']:.0f} windows at {row['num_places']:.0f} places of the texts, on "
        f"{models} ({row['model']})."
    )


def _notes_on_answers(rows: pd.DataFrame) -> list[str]:
    """The meaning of the marks of answers."""
    notes = rows.loc[rows["answers_difference"].notna(), "answers_note"]
    marks = ANSWER_MARKS.items()
    return [f"{mark} {words}" for mark, (said, words) in marks if notes.str.contains(said).any()]


def _notes_on_steps(rows: pd.DataFrame) -> list[str]:
    """Where steps were timed, which is one place of a board, and the meaning of their mark."""
    timed = rows[rows["step_s"].notna()]
    places = timed["step_on"].head(1)
    notes = [f"Decode step: {place}, over an emulated link." for place in places]
    if timed["step_source"].eq(MODELLED).any():
        notes.append(f"{MODELLED_MARK} {note('modelled_step')}")
    return notes


# The pages


def first_board(methods: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first board, which is over all models if there are several."""
    return methods[methods["over"].isin(methods["over"].head(1))]


def boards(methods: pd.DataFrame) -> Iterator[Sheet]:
    """The sheets of all boards; those after the first are named by their model."""
    for number, (over, rows) in enumerate(methods.groupby("over", sort=False)):
        for sheet in _of_settings(rows):
            yield sheet._replace(title=f"{over}, {sheet.title}" if number else sheet.title)


def _of_settings(rows: pd.DataFrame) -> Iterator[Sheet]:
    """For each budget and length the compared methods, the closest first, then the others."""
    rows, of_own = mark_own(rows, "label")
    for _, of_setting in rows.groupby(SETTING, sort=False):
        title, is_apart = _setting(of_setting.iloc[0]), of_setting["apart"] != ""
        compared, apart = of_setting[~is_apart], of_setting[is_apart]
        if len(compared):
            shown = f"label rank ratio {OF_ANSWERS} {OF_SHARES} step_s dense_numbers"
            table = _table(compared, shown).rename(columns={"rank": f"rank of {len(compared)}"})
            notes = [*_notes_on_answers(compared), *_notes_on_steps(compared), *of_own]
            yield Sheet(title, table, [_counts(compared.iloc[0]), *notes])
        if len(apart):
            table = _table(apart, f"label apart ratio num_windows {OF_ANSWERS} {OF_SHARES} step_s")
            notes = [*_notes_on_answers(apart), *_notes_on_steps(apart)]
            yield Sheet(f"{title}: not compared", table, notes)


def page(methods: pd.DataFrame, left_out: Sequence[str]) -> str:
    """`board.md`. left_out: models over which no mean goes."""
    first = first_board(methods)
    words = f"{note('board')} {note('board_claims')}"
    if left_out:
        few = "fewer than half of the methods ran there"
        words += f" Not in the means: {', '.join(left_out)}, since {few}."
    sheets = [*_readme(methods), *_of_settings(first), *_by_memory(first)]
    return markdown("board", words, [*sheets, *_claims(methods)])


def _readme(methods: pd.DataFrame) -> Iterator[Sheet]:
    """README's table at each length: its methods in its order, a ratio for each model, and answers
    where questions were asked."""
    methods = methods[methods["asked_budget"] == SAYS["readme"]["budget"]]
    first = first_board(methods)
    full = first[(first["method"] == "full") & first["answers"].notna()]
    of_answers = "Answers: the full cache was not asked."
    if len(full):  # answers do not depend on the length of windows
        asked = full.iloc[0]
        of_answers = (
            f"Answers: {asked['num_questions']:.0f} questions on {asked['num_contexts']:.0f} "
            f"contexts; the full cache has {metrics.ANSWERS.show(asked['answers'])} % right."
        )
    for _, of_length in methods.groupby("seq_len"):
        by_label = of_length.drop_duplicates(["over", "label"]).set_index("label", drop=False)
        here = first_board(by_label)
        compared = here[here["apart"] == ""]
        rows = here.loc[[label for label in SAYS["readme"]["methods"] if label in here.index]]
        if rows.empty or compared.empty:
            continue
        table = _table(rows, f"label {OF_SHARES} ratio")
        notes = [_counts(compared.iloc[0]), of_answers]
        of_models = by_label[by_label["over"] != ALL_MODELS]
        for model, of_model in of_models.groupby("over", sort=False):
            ratios = of_model["ratio"].reindex(rows.index).map(show_ratio, na_action="ignore")
            table[f"on {model}"] = ratios.fillna(MISSING)
        coded = compared.reindex(rows["label"] + " + int8")
        table[f"over rows of 8 bits: {metrics.RATIO.heading}"] = _ratios(coded)
        if rows["answers"].notna().any():
            table[metrics.ANSWERS_DIFFERENCE.heading] = _differences(rows)
            notes += _notes_on_answers(rows)
        yield Sheet(f"README rows: {_setting(rows.iloc[0])}", table, notes)


def _by_memory(rows: pd.DataFrame) -> Iterator[Sheet]:
    """At each length all methods and budgets by the bytes that a step moves, over the link and on
    the device, with the fronts."""
    whole = rows[is_whole(rows)].assign(traffic=traffic)
    for seq_len, found in whole.sort_values("traffic", kind="stable").groupby("seq_len"):
        table = _table(found, "label traffic resident_frac step_s kl_nats front")
        table.insert(1, "asked", found["asked_budget"].map(_budget))
        limits = {"equal": 100 * EQUAL, "same_step": 100 * SAME_STEP}
        words = note("memory", costs=", ".join(COSTS), **limits)
        title = f"by memory, windows of {seq_len:,.0f} tokens"
        yield Sheet(title, table, [words, *_notes_on_steps(found)])


def _claims(methods: pd.DataFrame) -> Iterator[Sheet]:
    """One table: a line for each claim, budget and length, with the models on which it holds."""
    lines = []
    for claim in SAYS["claims"]:
        is_kl = "ratio" in claim
        name = "ratio" if is_kl else "answers_difference"
        rows = methods[methods["label"].eq(claim["label"]) & methods["apart"].eq("")]
        rows = rows.dropna(subset=name)
        if not is_kl:  # which does not depend on the length of windows
            rows = rows.assign(seq_len=math.nan).drop_duplicates(["over", *SETTING])
        low, high = rows[f"{name}_low"], rows[f"{name}_high"]
        if is_kl:
            holds, fails = high <= claim[name], low > claim[name]
        else:
            holds, fails = low >= claim[name], high < claim[name]
        verdicts = np.select([holds, fails], ["holds", "does not hold"], "not told apart")
        shown = _ratios(rows) if is_kl else _differences(rows)
        rows = rows.assign(verdict=verdicts, shown=shown)
        for _, found in rows.groupby(SETTING, dropna=False):
            together = found.iloc[0]  # over all models
            line = {
                "claim": claim["claim"],
                "budget (%)": metrics.ASKED_BUDGET.show(together["asked_budget"]),
                "windows (tokens)": metrics.SEQ_LEN.show(together["seq_len"]),
                f"{ALL_MODELS} together": f"{together['verdict']}: {together['shown']}",
                "count": f"{together['num_windows' if is_kl else 'num_questions']:.0f}",
            }
            of_models = found[found["over"] != ALL_MODELS]
            for verdict in ("holds", "not told apart", "does not hold"):
                models = of_models.loc[of_models["verdict"] == verdict, "over"]
                is_all = len(models) == len(of_models) > 1
                listed = f"all {len(models)} models" if is_all else ", ".join(models)
                line[f"{verdict} on"] = listed or MISSING
            lines.append(line)
    if lines:
        yield Sheet("claims", pd.DataFrame(lines))


# A terminal, and the sentence of the report


def printed(methods: pd.DataFrame) -> str:
    """The first board at README's budget (else at its smallest) for a terminal: the methods that
    are the closest on the shortest windows, one's own, and what the table says. "" without any."""
    found = shortest(methods)
    if found.empty:
        return ""
    is_own = found["shipped"] != "yes"
    closest = found[~is_own].index[: max(0, MAX_ROWS - is_own.sum())]
    shown = found[is_own | found.index.isin(closest)]
    marked, of_own = mark_own(shown, "label")
    table = pd.DataFrame({"method": marked["label"], "rank": _places(shown, "-")})
    table[metrics.RATIO.heading], table["answers"] = _ratios(shown), _differences(shown)
    for heading, share in SHARES.items():
        table[heading] = _ranges(shown, share, "-")
    words = "Brackets: 95 % intervals. Answers: minus the full cache's, in points."
    notes = [words, _counts(found.iloc[0]), *_notes_on_answers(shown), *of_own]
    if len(shown) < len(found):
        which = ", the closest and one's own" if 0 < is_own.sum() < len(found) else ", the closest"
        notes.append(f"{len(shown)} of {len(found)} methods{which}.")
    sheet = Sheet(f"board, {_setting(found.iloc[0])}", table, notes)
    return f"{terminal(alike_in_title(sheet))}\n\n{wrapped(said(methods))}"


def shortest(methods: pd.DataFrame) -> pd.DataFrame:
    """The compared methods of the first board on its shortest windows, at README's budget or else
    at the smallest."""
    compared = first_board(methods)
    compared = compared[compared["apart"] == ""]
    asked = SAYS["readme"]["budget"]
    if not compared["asked_budget"].eq(asked).any():
        asked = compared["asked_budget"].min()
    at_budget = compared[compared["asked_budget"] == asked]
    return at_budget[at_budget["seq_len"] == at_budget["seq_len"].min()]


def said(methods: pd.DataFrame) -> str:
    """What the methods of `shortest` show, in sentences; "" without any."""
    found = shortest(methods)
    if found.empty:
        return ""
    near, ratios, is_own = found.iloc[0], _ratios(found), found["shipped"] != "yes"
    models = f"{near['num_models']:.0f} models" if near["num_models"] > 1 else near["model"]
    sentences = [
        f"Of {len(found)} methods ({_setting(near)}, {models}) {near['label']} is closest to "
        f"the full cache: its KL is {ratios[0]} times that of the oracle, which selects by the "
        f"exact scores. {(found['ratio_high'] < 1).sum()} are certainly (95 %) closer than the "
        f"oracle, {(found['ratio_low'] > 1).sum()} certainly farther."
    ]
    table = pd.DataFrame({"label": found["label"], "place": _places(found), "ratio": ratios})
    for row in table[is_own].itertuples() if not is_own.all() else ():
        sentences.append(f"{row.label}: rank {row.place}, KL {row.ratio} times the oracle's.")
    return " ".join(sentences)

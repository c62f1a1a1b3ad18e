"""Pages of the board's tables.

`page` is `board.md`. The pages of the tables and the report show the same sheets. All take the
methods as a frame of `columns.BOARD`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from harness.results import metrics
from harness.results.board_rows import (
    ALL_MODELS,
    COSTS,
    MODELLED,
    SAME_STEP,
    VERDICTS,
    is_whole,
    traffic,
)
from harness.results.metrics import COLUMNS, EQUAL, MISSING, Metric
from harness.results.sheet import OWN, OWN_NOTE, Sheet, markdown, note, show_range

SAYS = yaml.safe_load(Path(__file__).with_name("board.yaml").read_text(encoding="utf-8"))
"""README's rows and budget, and the claims."""
ANSWER_MARKS = {
    "§": ("reads ", "The method cannot have this budget on the tasks."),
    "¶": ("lacks ", "Some of the full cache's questions were not asked."),
}
"""Behind answers: by mark, what their note says, and what it means."""
MODELLED_MARK = "‡"
TRAFFIC = Metric("traffic", "link + device", metrics.PERCENT, 1, logarithmic=True)
SETTING = ["asked_budget", "seq_len"]
Cells = dict[str, Iterable[str]]
"""The columns of a sheet, by heading."""


# Columns of sheets


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
    name = "answers_difference"
    ends = rows[[name, f"{name}_low", f"{name}_high"]].itertuples(index=False)
    return [show_interval(show_points, *each) for each in ends]


def _answers(rows: pd.DataFrame) -> Cells:
    """Differences of answers, marked where their notes say more, beside the shares."""
    marked = []
    for shown, words in zip(_differences(rows), rows["answers_note"], strict=True):
        marks = [mark for mark, (said, _) in ANSWER_MARKS.items() if said in words]
        marked.append(shown if shown == MISSING else shown + "".join(marks))
    shares = _shown(rows, metrics.ANSWERS, COLUMNS["num_questions"])
    return {metrics.ANSWERS_DIFFERENCE.heading: marked} | shares


def _ranges(rows: pd.DataFrame, column: Metric, between: str = " to ") -> list[str]:
    """The least and the largest of the models, once where they are equal when rounded."""
    ends = rows[[f"{column.name}_low", f"{column.name}_high"]].itertuples(index=False)
    return [show_range(column, each, between) for each in ends]


def _shares(rows: pd.DataFrame) -> Cells:
    columns = (metrics.BUDGET, metrics.DEVICE_FRAC, metrics.RESIDENT_FRAC)
    return {column.heading: _ranges(rows, column) for column in columns}


def _places(rows: pd.DataFrame, between: str = " to ") -> list[str]:
    ranks = rows[["rank", "rank_low", "rank_high"]].itertuples(index=False)
    return [f"{rank:.0f} ({low:.0f}{between}{high:.0f})" for rank, low, high in ranks]


def _steps(rows: pd.DataFrame) -> Cells:
    """The decode steps, where any was timed."""
    if rows["step_s"].isna().all():
        return {}
    marks = np.where(rows["step_source"] == MODELLED, MODELLED_MARK, "")
    return {metrics.STEP.heading: rows["step_s"].map(metrics.STEP.show) + marks}


def _shown(rows: pd.DataFrame, *columns: Metric) -> Cells:
    """The rows' own numbers or words."""
    found: Cells = {}
    for column in columns:
        values, is_words = rows[column.name], column.digits is None
        found[column.heading] = values.replace("", MISSING) if is_words else values.map(column.show)
    return found


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


def _notes(rows: pd.DataFrame) -> list[str]:
    """The meaning of the marks of answers, and as `_notes_on_steps`."""
    return _notes_on_answers(rows) + _notes_on_steps(rows)


def _notes_on_answers(rows: pd.DataFrame) -> list[str]:
    notes = rows.loc[rows["answers_difference"].notna(), "answers_note"]
    marks = ANSWER_MARKS.items()
    return [f"{mark} {words}" for mark, (said, words) in marks if notes.str.contains(said).any()]


def _notes_on_steps(rows: pd.DataFrame) -> list[str]:
    """Where steps were timed, and the meaning of the mark."""
    timed = rows[rows["step_s"].notna()]
    # All steps of a board are of one model and machine.
    places = timed["step_on"].head(1)
    notes = [f"Decode step: {place}, over an emulated link." for place in places]
    if timed["step_source"].eq(MODELLED).any():
        notes.append(f"{MODELLED_MARK} {note('modelled_step')}")
    return notes


def _sheet(title: str, cells: Cells, notes: Sequence[str] = ()) -> Sheet:
    table = pd.DataFrame(cells)
    return Sheet(title, list(table), table.to_numpy().tolist(), notes)


def _mark_own(rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Rows with one's own runs marked where others are shipped, and a note on it."""
    is_own = rows["shipped"] != "yes"
    if is_own.all() or not is_own.any():
        return rows, []
    return rows.assign(label=rows["label"].mask(is_own, rows["label"] + f" {OWN}")), [OWN_NOTE]


# The pages of the tables


def first_board(methods: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first board, which is over all models if there are several."""
    return methods[methods["over"].isin(methods["over"].head(1))]


def boards(methods: pd.DataFrame) -> Iterator[Sheet]:
    """The sheets of all boards; those after the first are named by their model."""
    for number, (over, rows) in enumerate(methods.groupby("over", sort=False)):
        for sheet in methods_sheets(rows):
            yield sheet._replace(title=f"{over}, {sheet.title}" if number else sheet.title)


def methods_sheets(rows: pd.DataFrame) -> Iterator[Sheet]:
    """For each budget and length the compared methods, the closest first, then the others."""
    rows, of_own = _mark_own(rows)
    for _, of_setting in rows.groupby(SETTING, sort=False):
        title, is_apart = _setting(of_setting.iloc[0]), of_setting["apart"] != ""
        compared, apart = of_setting[~is_apart], of_setting[is_apart]
        if len(compared):
            ranks = {f"rank of {len(compared)}": _places(compared)}
            cells = _shown(compared, metrics.LABEL) | ranks
            cells |= {metrics.RATIO.heading: _ratios(compared)} | _answers(compared)
            cells |= _shares(compared) | _steps(compared) | _shown(compared, metrics.DENSE_NUMBERS)
            yield _sheet(title, cells, [_counts(compared.iloc[0]), *_notes(compared), *of_own])
        if len(apart):
            cells = _shown(apart, metrics.LABEL, metrics.APART)
            cells |= {metrics.RATIO.heading: _ratios(apart)}
            cells |= _shown(apart, COLUMNS["num_windows"]) | _answers(apart)
            cells |= _shares(apart) | _steps(apart)
            yield _sheet(f"{title}: not compared", cells, _notes(apart))


# The page of the board


def page(methods: pd.DataFrame, claims: pd.DataFrame, left_out: Sequence[str]) -> str:
    """`board.md`. claims, left_out: as of `board_rows.Board`."""
    first = first_board(methods)
    words = f"{note('board')} {note('board_claims')}"
    if left_out:
        few = "fewer than half of the methods ran there"
        words += f" Not in the means: {', '.join(left_out)}, since {few}."
    sheets = [*_readme(methods), *methods_sheets(first), *_by_memory(first)]
    claims = claims[claims["asked_budget"].isin(first["asked_budget"])]
    return markdown("board", words, [*sheets, *_claims(claims)])


def _readme(methods: pd.DataFrame) -> Iterator[Sheet]:
    """README's table at each length: its methods in its order, a ratio for each model, and answers
    where questions were asked."""
    budget, labels = SAYS["readme"]["budget"], SAYS["readme"]["methods"]
    methods = methods[methods["asked_budget"] == budget]
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
        here = first_board(of_length).drop_duplicates("label").set_index("label", drop=False)
        compared = here[here["apart"] == ""]
        rows = here.loc[[label for label in labels if label in here.index]]
        if rows.empty or compared.empty:
            continue
        cells = _shown(rows, metrics.LABEL) | _shares(rows) | {metrics.RATIO.heading: _ratios(rows)}
        for model, of_model in of_length[of_length["over"] != ALL_MODELS].groupby(
            "over", sort=False
        ):
            ratios = of_model.drop_duplicates("label").set_index("label")["ratio"]
            shown = ratios.reindex(rows.index).map(show_ratio, na_action="ignore")
            cells[f"on {model}"] = shown.fillna(MISSING)
        coded = here.reindex([f"{label} + int8" for label in rows.index])
        cells[f"over rows of 8 bits: {metrics.RATIO.heading}"] = _ratios(coded)
        if rows["answers"].notna().any():
            cells[metrics.ANSWERS_DIFFERENCE.heading] = _differences(rows)
        title = f"README rows: {_setting(rows.iloc[0])}"
        yield _sheet(title, cells, [_counts(compared.iloc[0]), of_answers])


def _by_memory(rows: pd.DataFrame) -> Iterator[Sheet]:
    """At each length all methods and budgets by the bytes that a step moves, over the link and on
    the device, with the fronts."""
    whole = rows[is_whole(rows)].assign(traffic=traffic)
    for seq_len, found in whole.sort_values("traffic", kind="stable").groupby("seq_len"):
        cells = _shown(found, metrics.LABEL)
        cells["asked"] = found["asked_budget"].map(_budget)
        cells |= _shown(found, TRAFFIC)
        cells[metrics.RESIDENT_FRAC.heading] = _ranges(found, metrics.RESIDENT_FRAC)
        cells |= _steps(found) | _shown(found, metrics.KL, COLUMNS["front"])
        limits = {"equal": 100 * EQUAL, "same_step": 100 * SAME_STEP}
        words = note("memory", costs=", ".join(COSTS), **limits)
        title = f"by memory, windows of {seq_len:,.0f} tokens"
        yield _sheet(title, cells, [words, *_notes_on_steps(found)])


def _claims(claims: pd.DataFrame) -> Iterator[Sheet]:
    """One table: a line for each claim, budget and length, with the models on which it holds."""
    lines = []
    for _, rows in claims.groupby(["number", "seq_len"], sort=False, dropna=False):
        together = rows.iloc[0]  # over all models
        is_kl, ends = together["of"] == "KL", together[["mean", "low", "high"]].astype(float)
        number = (
            show_interval(show_ratio, *np.exp(ends)) if is_kl else show_interval(show_points, *ends)
        )
        is_judged = together["verdict"] in VERDICTS
        line = {
            "claim": together["claim"],
            "budget (%)": metrics.ASKED_BUDGET.show(together["asked_budget"]),
            "windows (tokens)": metrics.SEQ_LEN.show(together["seq_len"] or math.nan),
            f"{ALL_MODELS} together": together["verdict"] + (f": {number}" if is_judged else ""),
            "count": COLUMNS["count"].show(together["count"]),
        }
        of_models = rows[rows["over"] != ALL_MODELS]
        of_models = of_models if len(of_models) else rows
        for verdict in VERDICTS:
            models = of_models.loc[of_models["verdict"] == verdict, "over"]
            is_all = len(models) == len(of_models) > 1
            words = f"all {len(models)} models" if is_all else ", ".join(models)
            line[f"{verdict} on"] = words or MISSING
        lines.append(line)
    if lines:
        table = pd.DataFrame(lines)
        yield _sheet("claims", table.to_dict("list"))


# A terminal, and the sentence of the report


def printed(methods: pd.DataFrame) -> str:
    """The first board at README's budget (else at its smallest) for a terminal: the methods that
    are the closest on the shortest windows, one's own, and what the table says. "" without any."""
    from harness.results.summary import MAX_ROWS, SHARES, printed_sheet, wrapped

    found = shortest(methods)
    if found.empty:
        return ""
    is_own = found["shipped"] != "yes"
    closest = found[~is_own].index[: max(0, MAX_ROWS - is_own.sum())]
    shown = found[is_own | found.index.isin(closest)]
    marked, of_own = _mark_own(shown)
    cells: Cells = {
        "method": marked["label"],
        "rank": _places(shown, "-"),
        metrics.RATIO.heading: _ratios(shown),
        "answers": _answers(shown)[metrics.ANSWERS_DIFFERENCE.heading],
    }
    cells |= {heading: _ranges(shown, share, "-") for heading, share in SHARES.items()}
    words = "Brackets: 95 % intervals. Answers: minus the full cache's, in points."
    notes = [words, _counts(found.iloc[0]), *_notes_on_answers(shown), *of_own]
    if len(shown) < len(found):
        which = ", the closest and one's own" if 0 < is_own.sum() < len(found) else ", the closest"
        notes.append(f"{len(shown)} of {len(found)} methods{which}.")
    sheet = _sheet(f"board, {_setting(found.iloc[0])}", cells, notes)
    return f"{printed_sheet(sheet)}\n\n{wrapped(said(methods))}"


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
    for row in table[is_own & ~is_own.all()].itertuples():
        sentences.append(f"{row.label}: rank {row.place}, KL {row.ratio} times the oracle's.")
    return " ".join(sentences)

"""Pages of the board's tables.

`page` is `board.md`. The pages of the tables and the report show the same sheets.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

from harness.results import metrics
from harness.results.board_rows import (
    ALL_MODELS,
    ALL_TEXTS,
    COSTS,
    OF_ANSWERS,
    OF_KL,
    SAME_STEP,
    TRAFFIC,
    VERDICTS,
    is_whole,
    traffic,
)
from harness.results.board_sources import MODELLED
from harness.results.columns import TableRow, column, grouped, having, named, values, where
from harness.results.metrics import EQUAL, MISSING, Metric
from harness.results.sheet import (
    MAX_ROWS,
    SHARES,
    Sheet,
    Shown,
    alike_in_title,
    mark_own_rows,
    markdown,
    note,
    sheet_of,
    sheet_of_lines,
    show_range,
    shown_as_is,
    terminal,
    wrapped,
)

OTHER_BUDGET, LACKS, MODELLED_MARK = "§", "¶", "‡"
ANSWER_MARKS = {
    OTHER_BUDGET: "The method cannot have this budget on the tasks.",
    LACKS: "Some of the full cache's questions were not asked.",
}


def show_interval(show: Callable[[Any], str], row: TableRow, name: str) -> str:
    """A number of a row and its interval where it has one."""
    value, low, high = (row.get(part) for part in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return MISSING
    if low is None or high is None:
        return show(value)
    return f"{show(value)} ({show(low)} to {show(high)})"


def show_ratio(ratio: float) -> str:
    """Two digits after the point, or two digits of a small ratio."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _show_points(difference: float) -> str:
    shown = metrics.ANSWERS_DIFFERENCE.show(difference)
    return f"+{shown}" if difference > 0 else shown


def _ratio(row: TableRow, name: str = "ratio") -> str:
    return show_interval(show_ratio, row, name)


def _difference(row: TableRow, name: str = "answers_difference") -> str:
    return show_interval(_show_points, row, name)


def _range(column: Metric, row: TableRow, between: str = " to ") -> str:
    """The least and the largest of the models, once where they are equal when rounded."""
    ends = row.get(f"{column.name}_low"), row.get(f"{column.name}_high")
    return show_range(column, ends, between)


def _budget_words(budget: float | None) -> str:
    return (
        "budgets of their own"
        if budget is None
        else f"budget {metrics.ASKED_BUDGET.show(budget)} %"
    )


def _setting_words(row: TableRow) -> str:
    return f"{_budget_words(row['asked_budget'])}, windows of {row['seq_len']:,.0f} tokens"


# The page of the board


def page(
    rows: Sequence[TableRow],
    claims: Sequence[TableRow],
    of_models: Sequence[TableRow],
    readme: Mapping[str, Any],
    *,
    left_out: Sequence[str] = (),
) -> str:
    """`board.md`.

    rows, claims, of_models: of the tables `board-methods`, `board-claims`, `board-models`. readme:
    budget and labels of README's table. left_out: models over which no mean goes.
    """
    first = first_board(rows)
    words = f"{note('board')} {note('board_claims')}"
    if left_out:
        few = "fewer than half of the methods ran there"
        words += f" Not in the means: {', '.join(left_out)}, since {few}."
    budgets = {row["asked_budget"] for row in first}
    of_budgets = [claim for claim in claims if claim["asked_budget"] in budgets]
    sheets = [*_readme(first, of_models, readme), *methods_sheets(first)]
    return markdown("board", words, [*sheets, *by_memory(first), *claims_sheets(of_budgets)])


def printed(rows: Sequence[TableRow], budget: float) -> str:
    """The first board at a budget (else at its smallest) for a terminal: the methods that are the
    closest on the shortest windows, one's own, and what the table says. "" without any."""
    found = shortest(rows, budget)
    if not found:
        return ""
    own = [row for row in found if not row.get("shipped")]
    has_shipped = len(own) < len(found)
    closest = [row for row in found if row not in own][: max(0, MAX_ROWS - len(own))]
    shown = [row for row in found if row in own or row in closest]
    marked, notes = mark_own_rows(shown, "label")
    headings: Shown = {
        "method": itemgetter("label"),
        "rank": lambda row: _place(row).replace(" to ", "-"),
        metrics.RATIO.heading: _ratio,
        "answers": _marked_difference,
    }
    for heading, share in SHARES.items():
        headings[heading] = partial(_range, share, between="-")
    if len(shown) < len(found):
        which = ", the closest and one's own" if own and has_shipped else ", the closest"
        notes = [*notes, f"{len(shown)} of {len(found)} methods{which}."]
    words = "Brackets: 95 % intervals. Answers: minus the full cache's, in points."
    notes = [words, _counts(found[0]), *_notes_on_answers(shown), *notes]
    title = f"board, {_setting_words(found[0])}"
    sheet = sheet_of(title, marked, headings, notes=notes)

    return f"{terminal(alike_in_title(sheet))}\n\n{wrapped(said_of(found))}"


def shortest(rows: Sequence[TableRow], budget: float) -> list[TableRow]:
    """The compared methods of the first board on its shortest windows, at a budget or else at the
    smallest."""
    compared = where(first_board(rows), "apart", "")
    budgets = {row["asked_budget"] for row in compared}
    if not budgets:
        return []
    at_budget = where(compared, "asked_budget", budget if budget in budgets else min(budgets))
    return where(at_budget, "seq_len", min(row["seq_len"] for row in at_budget))


def said_of(found: Sequence[TableRow]) -> str:
    """What the compared methods of one board show, the closest first, in sentences."""
    near, ends = found[0], [row for row in found if row.get("ratio_low") is not None]
    closer = [row for row in ends if row["ratio_high"] < 1]
    farther = [row for row in ends if row["ratio_low"] > 1]
    models = f"{near['num_models']} models" if near["num_models"] > 1 else near["model"]
    said = [
        f"Of {len(found)} methods ({_setting_words(near)}, {models}) {near['label']} is closest to "
        f"the full cache: its KL is {_ratio(near)} times that of the oracle, which selects by the "
        f"exact scores. {len(closer)} are certainly (95 %) closer than the oracle, {len(farther)} "
        "certainly farther."
    ]
    own = [row for row in found if not row.get("shipped")]
    for row in own if len(own) < len(found) else ():
        said.append(f"{row['label']}: rank {_place(row)}, KL {_ratio(row)} times the oracle's.")
    return " ".join(said)


def first_board(rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows of the first board, which is over all models if there are several."""
    return where(rows, "over", rows[0]["over"]) if rows else []


def boards(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """The sheets of all boards; those after the first are named by their model."""
    for number, (over, of_board) in enumerate(grouped(rows, itemgetter("over")).items()):
        for sheet in methods_sheets(of_board):
            name = f"{over}, " if number else ""
            yield sheet._replace(title=name + sheet.title)


def methods_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """For each budget and length the compared methods, the closest first, then the others."""
    marked, own_notes = mark_own_rows(rows, "label")
    for words, of_setting in grouped(marked, _setting_words).items():
        compared = where(of_setting, "apart", "")
        apart = [row for row in of_setting if row["apart"]]
        if compared:
            sheet = methods_sheet(words, compared)
            yield sheet._replace(notes=[_counts(compared[0]), *sheet.notes, *own_notes])
        if apart:
            why, count = shown_as_is(named("apart")), shown_as_is(named("num_windows"))
            shown = _LABEL | why | _RATIO | count | _ANSWERS | _SHARES_SHOWN | _step(apart)
            title = f"{words}: not compared"
            yield sheet_of(title, apart, shown, notes=_notes(apart))


def _counts(row: TableRow) -> str:
    models = "one model" if row["num_models"] == 1 else f"{row['num_models']} models"
    return (
        f"KL: {row['num_windows']} windows at {row['num_places']} places of the texts, on "
        f"{models} ({row['model']})."
    )


def methods_sheet(title: str, rows: Sequence[TableRow]) -> Sheet:
    """A line a compared method, in the order of the rows."""

    ranks: Shown = {f"rank of {rows[0]['num_compared']}": _place}
    dense = shown_as_is(named("dense_numbers"))
    shown = _LABEL | ranks | _RATIO | _ANSWERS | _SHARES_SHOWN | _step(rows) | dense
    return sheet_of(title, rows, shown, notes=_notes(rows))


def _place(row: TableRow) -> str:
    return f"{row['rank']:.0f} ({row['rank_low']:.0f} to {row['rank_high']:.0f})"


def _step(rows: Iterable[TableRow]) -> Shown:
    return {metrics.STEP.heading: _shown_step} if having(rows, "step_s") else {}


def _shown_step(row: TableRow) -> str:
    shown = metrics.STEP.show(row.get("step_s"))
    return shown + MODELLED_MARK if row.get("step_source") == MODELLED else shown


def _notes(rows: Sequence[TableRow]) -> list[str]:
    """The meaning of the marks of answers, and as `_notes_on_steps`."""
    return _notes_on_answers(rows) + _notes_on_steps(rows)


def _notes_on_answers(rows: Sequence[TableRow]) -> list[str]:
    marks = set(chain.from_iterable(map(_marks, having(rows, "answers_difference"))))
    return [f"{mark} {words}" for mark, words in ANSWER_MARKS.items() if mark in marks]


def _notes_on_steps(rows: Iterable[TableRow]) -> list[str]:
    """Where steps were timed, and the meaning of the mark."""
    timed = having(rows, "step_s")
    notes = []
    if timed:  # all steps of a table are of one model and machine
        notes.append(f"Decode step: {timed[0]['step_on']}, over an emulated link.")
    if where(timed, "step_source", MODELLED):
        notes.append(f"{MODELLED_MARK} {note('modelled_step')}")
    return notes


def _marks(row: TableRow) -> list[str]:
    answers_note = row.get("answers_note") or ""
    words = {OTHER_BUDGET: "reads ", LACKS: "lacks "}
    return [mark for mark, said in words.items() if said in answers_note]


def _marked_difference(row: TableRow) -> str:
    difference = _difference(row)
    return difference if difference == MISSING else difference + "".join(_marks(row))


_LABEL = shown_as_is(named("label"))
_RATIO: Shown = {metrics.RATIO.heading: _ratio}
_ANSWERS: Shown = {
    metrics.ANSWERS_DIFFERENCE.heading: _marked_difference,
    **shown_as_is(named("answers num_questions")),
}
_OF_BUDGET = (metrics.BUDGET, metrics.DEVICE_FRAC, metrics.RESIDENT_FRAC)
_SHARES_SHOWN: Shown = {column.heading: partial(_range, column) for column in _OF_BUDGET}


def _readme(
    rows: Sequence[TableRow], of_models: Sequence[TableRow], readme: Mapping[str, Any]
) -> Iterator[Sheet]:
    """README's table at each length: its methods in its order, a ratio for each model, and answers
    where questions were asked."""
    here = where(rows, "asked_budget", readme["budget"])
    for seq_len, of_length in grouped(here, itemgetter("seq_len")).items():
        by_label = {row["label"]: row for row in of_length}
        compared = where(of_length, "apart", "")
        methods = [by_label[label] for label in readme["methods"] if label in by_label]
        if not methods or not compared:
            continue
        shown = _LABEL | _SHARES_SHOWN | _RATIO
        of_texts = where(of_models, "domain", ALL_TEXTS)
        at_budget = where(where(of_texts, "asked_budget", readme["budget"]), "seq_len", seq_len)
        for model, of_model in grouped(at_budget, itemgetter("model")).items():
            if model != ALL_MODELS:
                ratios = {row["label"]: row.get("versus") for row in of_model}
                shown |= {f"on {model}": partial(_ratio_there, ratios)}
        shown |= {f"over rows of 8 bits: {metrics.RATIO.heading}": partial(_ratio_coded, by_label)}
        if having(methods, "answers"):
            shown |= {metrics.ANSWERS_DIFFERENCE.heading: _difference}
        title = f"README rows: {_budget_words(readme['budget'])}, windows of {seq_len:,.0f} tokens"
        notes = [_counts(compared[0]), _counts_of_answers(here)]
        yield sheet_of(title, methods, shown, notes=notes)


def _ratio_there(ratios: Mapping[str, float | None], row: TableRow) -> str:
    ratio = ratios.get(row["label"])
    return MISSING if ratio is None else show_ratio(ratio)


def _ratio_coded(by_label: Mapping[str, TableRow], row: TableRow) -> str:
    return _ratio(by_label.get(f"{row['label']} + int8", {}))


def _counts_of_answers(rows: Sequence[TableRow]) -> str:
    """How many questions the full cache answered, and how many right, beside windows of any length:
    answers do not depend on it."""
    answered = having(where(rows, "method", "full"), "answers")
    if not answered:
        return "Answers: the full cache was not asked."
    row = answered[0]
    return (
        f"Answers: {row['num_questions']} questions on {row['num_contexts']} contexts; the "
        f"full cache has {metrics.ANSWERS.show(row['answers'])} % right."
    )


def by_memory(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """At each length all methods and budgets by the bytes that a step moves, over the link and on
    the device, with the fronts."""
    whole = filter(is_whole, rows)
    for seq_len, found in grouped(whole, itemgetter("seq_len")).items():
        shown = _LABEL | {
            "asked": lambda row: _budget_words(row["asked_budget"]),
            TRAFFIC.heading: lambda row: TRAFFIC.show(traffic(row)),
            metrics.RESIDENT_FRAC.heading: _SHARES_SHOWN[metrics.RESIDENT_FRAC.heading],
            **_step(found),
            **shown_as_is(named("kl_nats front")),
        }
        title = f"by memory, windows of {seq_len:,.0f} tokens"
        limits = {"equal": 100 * EQUAL, "same_step": 100 * SAME_STEP}
        words = note("memory", costs=", ".join(COSTS), **limits)
        notes = [words, *_notes_on_steps(found)]
        yield sheet_of(title, sorted(found, key=traffic), shown, notes=notes)


def claims_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """One table: a line for each claim, budget and length, with the models on which it holds."""
    claims = []
    for of_claim in grouped(rows, _claim_of).values():
        models = [row for row in of_claim if row["model"] != ALL_MODELS] or of_claim
        last = of_claim[-1]
        words = str(last["verdict"])
        if last.get("value") is not None:
            show = _difference if last["measure"] == OF_ANSWERS else _ratio
            words += f": {show(last, 'value')}"
        together = {"together": words, "count": last.get("count"), "models": models}
        claims.append({"seq_len": None} | of_claim[0] | together)
    shown: Shown = {
        **shown_as_is(named("claim")),
        "budget (%)": lambda row: metrics.ASKED_BUDGET.show(row["asked_budget"]),
        "windows (tokens)": lambda row: metrics.SEQ_LEN.show(row["seq_len"]),
        f"{ALL_MODELS} together": itemgetter("together"),
        "count": lambda row: column("count").show(row["count"]),
        **{f"{verdict} on": partial(_models_with, verdict) for verdict in VERDICTS},
    }
    if claims:
        yield sheet_of("claims", claims, shown)


def _claim_of(row: TableRow) -> tuple[Any, ...]:
    return row["claim"], row["asked_budget"], row.get("seq_len")


def _models_with(verdict: str, claim: TableRow) -> str:
    models = claim["models"]
    found = values(where(models, "verdict", verdict), "model")
    if len(found) == len(models) > 1:
        return f"all {len(models)} models"
    return ", ".join(found) or MISSING


def models_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """For each model, budget and length a line a method, the closest first, a column a domain."""
    of_texts, of_tasks = where(rows, "measure", OF_KL), where(rows, "measure", OF_ANSWERS)
    for (model, budget, _), group in grouped(of_texts, _model_and_setting).items():
        at_budget = [row for row in of_tasks if row["asked_budget"] in (budget, None)]
        answers = where(at_budget, "model", model)
        texts = list(dict.fromkeys(values(group, "domain")))
        tasks = list(dict.fromkeys(values(answers, "domain")))
        header = [metrics.LABEL.heading]
        header += [f"{text}: KL (nats), ratio, windows" for text in texts]
        header += [f"{task}: right (%), difference, questions" for task in tasks]
        cells = {(row["label"], row["domain"]): _cell(row) for row in (*group, *answers)}
        by_kl = sorted(where(group, "domain", texts[-1]), key=itemgetter("value"))
        lines = []
        for label in dict.fromkeys(values([*by_kl, *group], "label")):
            line = [cells.get((label, domain), MISSING) for domain in (*texts, *tasks)]
            lines.append([label, *line])
        yield sheet_of_lines(f"{model}, {_setting_words(group[0])}", header, lines)


_model_and_setting = itemgetter("model", "asked_budget", "seq_len")


def _cell(row: TableRow) -> str:
    shown, versus = metrics.KL.show(row["value"]), _ratio(row, "versus")
    if row["measure"] == OF_ANSWERS:
        shown, versus = metrics.ANSWERS.show(row["value"]), _difference(row, "versus")
    return f"{shown}, {versus}, {row['count']:.0f}"


def pairs_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """For each budget and length a line a method, the closest first: which others it is told apart
    from."""
    for words, of_setting in grouped(rows, _setting_words).items():
        found = []
        for label in dict.fromkeys([of_setting[0]["label"], *values(of_setting, "other")]):
            pairs = [row for row in of_setting if label in (row["label"], row["other"])]
            closer = where(pairs, "closer", label)
            farther = [row for row in pairs if row["closer"] not in (label, "")]
            alike = []
            for row in where(pairs, "closer", ""):
                alike.append(row["other"] if row["label"] == label else row["label"])
            found.append((label, len(closer), len(farther), ", ".join(alike) or MISSING))
        found.sort(key=lambda line: line[2] - line[1])
        header = ["label", "certainly closer than", "certainly farther than", "not told apart from"]
        yield sheet_of_lines(words, header, [list(map(str, line)) for line in found])


SHEETS: Mapping[str, Callable[[Sequence[TableRow]], Iterator[Sheet]]] = {
    "board": boards,
    "board_claims": claims_sheets,
    "board_models": models_sheets,
    "board_pairs": pairs_sheets,
}
"""The tables of a page, by shape."""

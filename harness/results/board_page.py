"""Pages of the board's tables, and of the tables of `experiment=board` behind them.

`page` is `board.md`. `page_of_table` is the page of one table; the report shows the same sheets.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from harness.results import columns, metrics
from harness.results.board_claims import VERDICTS
from harness.results.board_rows import (
    ALL_MODELS,
    ALL_TEXTS,
    COSTS,
    OF_ANSWERS,
    OF_KL,
    OWN_SIZE,
    SAME_STEP,
    TRAFFIC,
    traffic,
)
from harness.results.board_stats import Design
from harness.results.columns import TableRow
from harness.results.metrics import EQUAL, MISSING, Metric
from harness.results.sheet import (
    SIZE_NOTE,
    Sheet,
    Shown,
    mark_own,
    markdown,
    sheet_of,
    show_range,
    shown_as_is,
)
from harness.results.step_time import MODELLED
from harness.settings.paths import COMMAND

OTHER_SIZE, LACKS, MODELLED_MARK = "§", "¶", "‡"
MODELLED_WORDS = (
    "Modelled from the compute and the bytes of a step that was timed at another size, or over "
    "codes in groups of another length."
)
INTERVAL = (
    "Brackets hold 95 % intervals (Student's t): of one model over places of its texts or contexts "
    "of its questions, of several models over the models, as drawn from many."
)
NOTE = (
    f"Each method beside the oracle of its size. {SIZE_NOTE} *KL / oracle's* is the ratio of the "
    "two KL on the same window: the geometric mean over windows of a text, texts, and models, each "
    "of which weighs alike. *Rank* is the place by that ratio. Its brackets go from 1 + the "
    "methods that are certainly closer to the full cache to the number of methods less those that "
    "are certainly farther, by tests of all pairs on these models and texts, with Holm's "
    "correction at 5 %. *Answers minus full cache* is the mean over models and tasks, on the same "
    "questions (chance is 25 %), which do not depend on the length of the windows. Each method has "
    "the number of exempt layers that is best for its size on the model's calibration text "
    "(`conf/tuned.yaml`). *Read on device* and *kept on device* are shares of the full cache, as "
    "ranges over the models; the oracle keeps all of it there and reads every key. Where it did "
    "not run, the oracle by InfiniGen's rule stands in its place. The decode step is of one model, "
    "with the link and device of the note below a table; a method that was not timed there, or not "
    "with this number of exempt layers, has none. "
    f"{INTERVAL} By model and text: "
    "`tables/board-models.md`; all pairs: `tables/board-pairs.csv`; the formulas: "
    "`docs/results.md`."
)
MODELS_NOTE = (
    "Each model and text by itself. Of a text: mean KL in nats, its ratio to the oracle's KL "
    "(geometric mean over windows), and the number of windows. Of a task: right answers in %, the "
    f"difference to the full cache in points, and the number of questions. {INTERVAL}"
)
PAIRS_NOTE = (
    "A line a method: how many methods it is certainly closer to the full cache than, how many it "
    "is certainly farther than, and which it is not told apart from. The tests are on the ratio of "
    "KL on the same windows, with Holm's correction at 5 % over all pairs of the size and length. "
    "The CSV has every pair."
)
CLAIMS_NOTE = (
    "Claims on each model by itself: a claim *holds* if its whole 95 % interval is on the claimed "
    "side, *does not hold* if all of it is on the other, and else is *not told apart*. Numbers are "
    "of all models together, with the windows or questions behind them."
)
MEMORY_NOTE = (
    "Link + device is what a step moves over the link and reads on the device, where it reads "
    "the fetched rows and the index. KL is the geometric mean over windows. Not beaten in: the "
    f"costs ({', '.join(COSTS)}) at which no other method is closer for no more. Sizes within "
    f"{100 * EQUAL:.0f} point count as equal, and step times within {100 * SAME_STEP:.0f} %. "
    "Oracles, which cannot be built, are on no front and keep no method off one."
)
TEXTS_NOTE = (
    f"KL(full cache || method) by text. {SIZE_NOTE} ± is one standard error over places of a text. "
    "The CSV has every window."
)
ANSWERS_NOTE = (
    "Right answers by task, when the question is not known while the cache is reduced. A question "
    "has four choices, so chance is 25 %. "
    f"{SIZE_NOTE} ± is one standard error, clustered by context. The CSV has every context."
)
STEPS_NOTE = (
    f"A decode step of each method, the mean of a timed run. {SIZE_NOTE} Compute is the step "
    "without the transfers that it waited for. *Of which not hidden* are bytes that a layer's own "
    "query selects, which the layer waits for. Other sizes follow from these by "
    "`harness/results/step_time.py`."
)
ANSWER_MARKS = {
    OTHER_SIZE: "The method cannot have this size on the tasks.",
    LACKS: "Some of the full cache's questions were not asked.",
}


def _where(rows: Iterable[TableRow], name: str, value: Any) -> list[TableRow]:
    """The rows with this value of a column."""
    return [row for row in rows if row[name] == value]


def show_interval(show: Callable[[Any], str], value: Any, low: Any, high: Any) -> str:
    """A number and its interval where it has one."""
    if value is None:
        return MISSING
    if low is None or high is None:
        return show(value)
    return f"{show(value)} ({show(low)} to {show(high)})"


def show_ratio(ratio: float) -> str:
    """Two digits after the point, or two digits of a small ratio."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _show_points(difference: float) -> str:
    """A difference in points with its sign."""
    shown = columns.ANSWERS_DIFFERENCE.show(difference)
    return f"+{shown}" if difference > 0 else shown


def _ratio(row: TableRow, name: str = "ratio") -> str:
    return show_interval(show_ratio, row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high"))


def _difference(row: TableRow, name: str = "answers_difference") -> str:
    return show_interval(
        _show_points, row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high")
    )


def _range(column: Metric, row: TableRow) -> str:
    """The least and the largest of the models, once where they are equal when rounded."""
    ends = row.get(f"{column.name}_low"), row.get(f"{column.name}_high")
    return show_range(column, ends, " to ")


def _size_words(size: float | None) -> str:
    return "sizes of their own" if size is None else f"size {metrics.ASKED_SIZE.show(size)} %"


def _setting_words(row: TableRow) -> str:
    return f"{_size_words(row['asked_size'])}, windows of {row['seq_len']:,.0f} tokens"


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
    size and labels of README's table. left_out: models over which no mean goes.
    """
    first = first_board(rows)
    note = f"{NOTE} {CLAIMS_NOTE}"
    if left_out:
        few = "fewer than half of the methods ran there"
        note += f" Not in the means: {', '.join(left_out)}, since {few}."
    sheets = [*_readme(first, of_models, readme), *methods_sheets(first)]
    sizes = {row["asked_size"] for row in first}
    of_sizes = [claim for claim in claims if claim["asked_size"] in sizes]
    sheets += [*by_memory(first), *claims_sheets(of_sizes)]
    return markdown("board", note, sheets)


def first_board(rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows of the first board, which is over all models if there are several."""
    return _where(rows, "over", rows[0]["over"]) if rows else []


def boards(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """The sheets of all boards; those after the first are named by their model."""
    for number, of_board in enumerate(columns.grouped(rows, lambda row: row["over"]).values()):
        for sheet in methods_sheets(of_board):
            name = f"{of_board[0]['over']}, " if number else ""
            yield sheet._replace(title=name + sheet.title)


def methods_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """For each size and length the compared methods, the closest first, then the others."""
    marked, own_notes = mark_own(list(rows), "label")
    for words, of_setting in columns.grouped(marked, _setting_words).items():
        compared = _where(of_setting, "apart", "")
        apart = [row for row in of_setting if row["apart"]]
        if compared:
            sheet = methods_sheet(words, compared)
            yield sheet._replace(notes=[_counts(compared[0]), *sheet.notes, *own_notes])
        if apart:
            yield _apart(f"{words}: not compared", apart)


def _counts(row: TableRow) -> str:
    """What the numbers of a table are of."""
    models = "one model" if row["num_models"] == 1 else f"{row['num_models']} models"
    return (
        f"KL: {row['num_windows']} windows at {row['num_places']} places of the texts, on "
        f"{models} ({row['model']})."
    )


def methods_sheet(title: str, rows: Sequence[TableRow]) -> Sheet:
    """A line a compared method, in the order of the rows."""
    rank = {f"rank of {rows[0]['num_compared']}": _rank}
    exempt = shown_as_is([columns.EXEMPT_NUMBERS])
    shown = _LABEL | rank | _RATIO | _ANSWERS | _SIZES | _step(rows) | exempt
    return sheet_of(title, rows, shown, notes=[*_notes_on_answers(rows), *_notes_on_steps(rows)])


def _apart(title: str, rows: Sequence[TableRow]) -> Sheet:
    why, count = shown_as_is([columns.APART]), shown_as_is([columns.NUM_WINDOWS])
    shown = _LABEL | why | _RATIO | count | _ANSWERS | _SIZES | _step(rows)
    return sheet_of(title, rows, shown, notes=[*_notes_on_answers(rows), *_notes_on_steps(rows)])


def _step(rows: Iterable[TableRow]) -> Shown:
    """The column of the decode step; none where no step was timed."""
    return {metrics.STEP.heading: _shown_step} if columns.having(rows, "step_s") else {}


def _shown_step(row: TableRow) -> str:
    shown = metrics.STEP.show(row.get("step_s"))
    return shown + MODELLED_MARK if row.get("step_source") == MODELLED else shown


def _notes_on_steps(rows: Iterable[TableRow]) -> list[str]:
    """Where steps were timed, and the meaning of the mark."""
    timed = columns.having(rows, "step_s")
    notes = []
    for row in timed[:1]:  # all steps of a table are of one model and machine
        notes.append(f"Decode step: {row['step_on']}, over an emulated link.")
    if any(row["step_source"] == MODELLED for row in timed):
        notes.append(f"{MODELLED_MARK} {MODELLED_WORDS}")
    return notes


def _rank(row: TableRow) -> str:
    return f"{row['rank']:.0f} ({row['rank_low']:.0f} to {row['rank_high']:.0f})"


def _marked_difference(row: TableRow) -> str:
    difference = _difference(row)
    return difference if difference == MISSING else difference + "".join(_marks(row))


_LABEL = shown_as_is([columns.LABEL])
_RATIO: Shown = {columns.RATIO.heading: _ratio}
_ANSWERS: Shown = {
    columns.ANSWERS_DIFFERENCE.heading: _marked_difference,
    **shown_as_is([columns.ANSWERS, columns.NUM_QUESTIONS]),
}
_OF_SIZE = (metrics.SIZE, metrics.DEVICE_FRAC, metrics.RESIDENT_FRAC)
_SIZES: Shown = {column.heading: partial(_range, column) for column in _OF_SIZE}


def _marks(row: TableRow) -> list[str]:
    """The marks of a row's answers."""
    note = row.get("answers_note") or ""
    marks = []
    if "reads " in note:
        marks.append(OTHER_SIZE)
    if "lacks " in note:
        marks.append(LACKS)
    return marks


def _notes_on_answers(rows: Iterable[TableRow]) -> list[str]:
    found: set[str] = set()
    for row in rows:
        if row.get("answers_difference") is not None:
            found.update(_marks(row))
    return [f"{mark} {words}" for mark, words in ANSWER_MARKS.items() if mark in found]


def _readme(
    rows: Sequence[TableRow], of_models: Sequence[TableRow], readme: Mapping[str, Any]
) -> Iterator[Sheet]:
    """README's table at each length: its methods in its order, a ratio for each model, and answers
    where questions were asked."""
    here = _where(rows, "asked_size", readme["size"])
    for seq_len, of_length in columns.grouped(here, lambda row: row["seq_len"]).items():
        by_label = {row["label"]: row for row in of_length}
        compared = _where(of_length, "apart", "")
        methods = [by_label[label] for label in readme["methods"] if label in by_label]
        if not methods or not compared:
            continue
        shown = _LABEL | _SIZES | _RATIO
        for model, ratios in _ratios_by_model(of_models, readme["size"], seq_len).items():
            shown |= {f"on {model}": partial(_ratio_there, ratios)}
        shown |= {f"over rows of 8 bits: {columns.RATIO.heading}": partial(_ratio_coded, by_label)}
        if any(row.get("answers") is not None for row in methods):
            shown |= {columns.ANSWERS_DIFFERENCE.heading: _difference}
        title = f"README rows: {_size_words(readme['size'])}, windows of {seq_len:,.0f} tokens"
        notes = [_counts(compared[0]), _counts_of_answers(here)]
        yield sheet_of(title, methods, shown, notes=notes)


def _ratio_there(ratios: Mapping[str, float | None], row: TableRow) -> str:
    ratio = ratios.get(row["label"])
    return MISSING if ratio is None else show_ratio(ratio)


def _ratio_coded(by_label: Mapping[str, TableRow], row: TableRow) -> str:
    """Of the same method over rows of 8 bits, where it ran."""
    return _ratio(by_label.get(f"{row['label']} + int8", {}))


def _ratios_by_model(
    of_models: Iterable[TableRow], size: float, seq_len: int
) -> dict[str, dict[str, float | None]]:
    """By model and label the ratio to the oracle's KL over all texts at a size and a length."""
    found: dict[str, dict[str, float | None]] = {}
    for row in of_models:
        is_here = (row["asked_size"], row["seq_len"]) == (size, seq_len)
        if is_here and row["domain"] == ALL_TEXTS and row["model"] != ALL_MODELS:
            found.setdefault(row["model"], {})[row["label"]] = row.get("versus")
    return found


def _counts_of_answers(rows: Sequence[TableRow]) -> str:
    """How many questions the full cache answered, and how many right, beside windows of any length:
    answers do not depend on it."""
    for row in rows:
        if row["method"] == "full" and row.get("answers") is not None:
            return (
                f"Answers: {row['num_questions']} questions on {row['num_contexts']} contexts; the "
                f"full cache has {columns.ANSWERS.show(row['answers'])} % right."
            )
    return "Answers: the full cache was not asked."


# By memory


def by_memory(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """At each length all methods and sizes by the bytes that a step moves, over the link and on the
    device, with the fronts."""
    for seq_len, of_length in columns.grouped(rows, lambda row: row["seq_len"]).items():
        found = []
        for row in of_length:
            has_all = not row["apart"] or row["apart"] == OWN_SIZE
            if has_all and row["kl_nats"] is not None:
                found.append(row)
        if not found:
            continue
        shown = _LABEL | {
            "asked": lambda row: _size_words(row["asked_size"]),
            TRAFFIC.heading: lambda row: TRAFFIC.show(traffic(row)),
            metrics.RESIDENT_FRAC.heading: _SIZES[metrics.RESIDENT_FRAC.heading],
            **_step(found),
            **shown_as_is([metrics.KL, columns.FRONT]),
        }
        title = f"by memory, windows of {seq_len:,.0f} tokens"
        notes = [MEMORY_NOTE, *_notes_on_steps(found)]
        yield sheet_of(title, sorted(found, key=traffic), shown, notes=notes)


# Claims


def claims_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """One table: a line for each claim, size and length, with the models on which it holds."""
    if not rows:
        return
    header = [
        columns.CLAIM.heading, "size (%)", "windows (tokens)", f"{ALL_MODELS} together", "count",
        *(f"{verdict} on" for verdict in VERDICTS),
    ]  # fmt: skip
    lines = []
    for of_claim in columns.grouped(rows, _claim_of).values():
        first, together = of_claim[0], of_claim[-1]
        models = [row for row in of_claim if row["model"] != ALL_MODELS] or of_claim
        length = first.get("seq_len")
        line = [
            first["claim"],
            metrics.ASKED_SIZE.show(first["asked_size"]),
            columns.SEQ_LEN.show(length),
            _together(together),
            columns.COUNT.show(together.get("count")),
        ]
        for verdict in VERDICTS:
            line.append(_names(models, verdict))
        lines.append(line)
    yield Sheet("claims", header, lines)


def _claim_of(row: TableRow) -> tuple[Any, ...]:
    return row["claim"], row["asked_size"], row.get("seq_len")


def _together(row: TableRow) -> str:
    if row.get("value") is None:
        return str(row["verdict"])
    number = _difference(row, "value") if row["measure"] == OF_ANSWERS else _ratio(row, "value")
    return f"{row['verdict']}: {number}"


def _names(models: Sequence[TableRow], verdict: str) -> str:
    """The models on which a claim has this verdict."""
    named = columns.values(_where(models, "verdict", verdict), "model")
    if len(named) == len(models) > 1:
        return f"all {len(models)} models"
    return ", ".join(named) or MISSING


# By model


def models_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """For each model, size and length a line a method, the closest first, a column a domain."""
    of_texts = _where(rows, "measure", OF_KL)
    of_tasks = _where(rows, "measure", OF_ANSWERS)
    for (model, size, _), group in columns.grouped(of_texts, _model_and_setting).items():
        answers = []
        for row in _where(of_tasks, "model", model):
            if row["asked_size"] in (size, None):
                answers.append(row)
        texts = list(dict.fromkeys(columns.values(group, "domain")))
        tasks = list(dict.fromkeys(columns.values(answers, "domain")))
        header = [columns.LABEL.heading]
        header += [f"{text}: KL (nats), ratio, windows" for text in texts]
        header += [f"{task}: right (%), difference, questions" for task in tasks]
        cells = {(row["label"], row["domain"]): _cell(row) for row in (*group, *answers)}
        lines = []
        by_kl = sorted(_where(group, "domain", texts[-1]), key=lambda row: row["value"])
        labels = [*columns.values(by_kl, "label"), *columns.values(group, "label")]
        for label in dict.fromkeys(labels):
            line = [cells.get((label, domain), MISSING) for domain in (*texts, *tasks)]
            lines.append([label, *line])
        yield Sheet(f"{model}, {_setting_words(group[0])}", header, lines)


def _model_and_setting(row: TableRow) -> tuple[Any, ...]:
    return row["model"], row["asked_size"], row["seq_len"]


def _cell(row: TableRow) -> str:
    shown, versus = metrics.KL.show(row["value"]), _ratio(row, "versus")
    if row["measure"] == OF_ANSWERS:
        shown, versus = columns.ANSWERS.show(row["value"]), _difference(row, "versus")
    return f"{shown}, {versus}, {row['count']:.0f}"


def pairs_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """For each size and length a line a method, the closest first: which others it is told apart
    from."""
    for words, of_setting in columns.grouped(rows, _setting_words).items():
        labels = [of_setting[0]["label"], *columns.values(of_setting, "other")]
        found = []
        for label in dict.fromkeys(labels):
            found.append((label, *_verdicts_on(label, of_setting)))
        lines = []
        for label, closer, farther, alike in sorted(found, key=lambda entry: entry[2] - entry[1]):
            lines.append([label, f"{closer}", f"{farther}", ", ".join(alike) or MISSING])
        header = ["label", "certainly closer than", "certainly farther than", "not told apart from"]
        yield Sheet(words, header, lines)


def _verdicts_on(label: str, rows: Iterable[TableRow]) -> tuple[int, int, list[str]]:
    """How many methods one is closer and farther than, and the names of the others."""
    closer = farther = 0
    alike = []
    for row in rows:
        if label not in (row["label"], row["other"]):
            continue
        if row["closer"] == label:
            closer += 1
        elif row["closer"]:
            farther += 1
        else:
            alike.append(row["other"] if row["label"] == label else row["label"])
    return closer, farther, alike


# The tables of `experiment=board`


def texts_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """KL of each model at a size and a length, by text."""
    marked, notes = mark_own(list(rows), "label")
    for setting, group in columns.grouped(marked, _model_and_setting).items():
        shown = {}
        texts = columns.grouped(group, lambda row: row["text"])
        for text in sorted(texts):
            windows = set(columns.values(texts[text], "window"))
            shown[f"{text} {metrics.KL.heading}, {len(windows)} windows"] = partial(_mean_kl, text)
        if len(texts) > 1:
            shown[f"all texts {metrics.KL.heading}"] = partial(_mean_kl, None)
        title = f"{setting[0]}, {_setting_words(group[0])}"
        yield sheet_of(title, _runs(group), _OF_RUN | shown, notes=notes)


def answers_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """Right answers of each model at a size, by task."""
    marked, notes = mark_own(list(rows), "label")
    shown = {}
    for task in sorted(set(columns.values(rows, "task"))):
        shown[f"{task} (%), questions"] = partial(_mean_answers, task)
    groups = columns.grouped(marked, lambda row: (row["model"], row["asked_size"]))
    for (model, size), group in groups.items():
        title = f"{model}, {_size_words(size)}"
        yield sheet_of(title, _runs(group), _OF_RUN | shown, notes=notes)


def _runs(rows: Iterable[TableRow]) -> Iterable[list[TableRow]]:
    """The rows of each run; a label may have several numbers of exempt layers."""
    identity = itemgetter("label", "method", "codec", "exempt_layers")
    return columns.grouped(rows, identity).values()


def _label_of_run(run: Sequence[TableRow]) -> str:
    label, number = run[0]["label"], run[0]["exempt_layers"]
    return str(label) if number is None else f"{label} ({number:.0f} exempt)"


def _mean(column: Metric, run: Sequence[TableRow]) -> str:
    known = columns.values(columns.having(run, column.name), column.name)
    return column.show(sum(known) / len(known) if known else None)


def _mean_kl(text: str | None, run: Sequence[TableRow]) -> str:
    """Of a text; None: of all."""
    rows = run if text is None else _where(run, "text", text)
    if not rows:
        return MISSING
    places = [columns.values(rows, name) for name in ("model", "text", "place")]
    found = Design(*places).estimate(columns.values(rows, "kl_nats"))
    return metrics.KL.show(found.value, found.stderr)


def _mean_answers(task: str, run: Sequence[TableRow]) -> str:
    rows = _where(run, "task", task)
    if not rows:
        return MISSING
    names = ("model", "task", "context_id", "asked")
    models, tasks, contexts, asked = (columns.values(rows, name) for name in names)
    shares = [row["right"] / row["asked"] for row in rows]
    found = Design(models, tasks, contexts, asked).estimate(shares)
    return f"{columns.ANSWERS.show(found.value, found.stderr)}, {sum(asked):.0f}"


_OF_RUN: dict[str, Callable[[list[TableRow]], str]] = {
    columns.LABEL.heading: _label_of_run,
    **{column.heading: partial(_mean, column) for column in _OF_SIZE},
}


def steps_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """The timed decode steps of each model, the shortest first."""
    marked, notes = mark_own(list(rows), "label")
    shown = [columns.EXEMPT_LAYERS, metrics.ASKED_SIZE, metrics.SIZE, columns.BATCH_SIZE]
    shown += [columns.PROMPT_LEN, *columns.OF_A_STEP]
    groups = columns.grouped(marked, lambda row: (row["model"], row["platform"], row["source"]))
    for (model, platform, source), group in groups.items():
        by_time = sorted(group, key=lambda row: row["step_s"])
        title = f"{model} on {platform}, {source}"
        yield sheet_of(title, by_time, _LABEL | shown_as_is(shown), notes=notes)


SHEETS: Mapping[str, Callable[[Sequence[TableRow]], Iterator[Sheet]]] = {
    "board": boards,
    "board_claims": claims_sheets,
    "board_models": models_sheets,
    "board_pairs": pairs_sheets,
    "board_texts": texts_sheets,
    "board_answers": answers_sheets,
    "board_steps": steps_sheets,
}
"""The tables of a page, by shape."""
NOTES = {
    "board": NOTE,
    "board_claims": CLAIMS_NOTE,
    "board_models": MODELS_NOTE,
    "board_pairs": PAIRS_NOTE,
    "board_texts": TEXTS_NOTE,
    "board_answers": ANSWERS_NOTE,
    "board_steps": STEPS_NOTE,
}


def page_of_table(name: str, rows: Sequence[TableRow]) -> str:
    """The page of a table of the board; without rows it says so."""
    if not rows:
        return markdown(
            name, f"Nothing was compared yet; `{COMMAND} experiment=board` measures it.", []
        )
    shape = columns.shape_of(rows[0])
    return markdown(name, NOTES[shape], SHEETS[shape](rows))

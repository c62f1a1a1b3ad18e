"""Pages of the board's tables, and of the tables of `experiment=board` behind them.

`page` is `board.md`. The pages of the tables and the report show the same sheets.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

from harness.results import metrics
from harness.results.board_claims import VERDICTS
from harness.results.board_rows import (
    ALL_MODELS,
    ALL_TEXTS,
    COSTS,
    EQUAL,
    OF_ANSWERS,
    OF_KL,
    SAME_STEP,
    TRAFFIC,
    is_whole,
    traffic,
)
from harness.results.board_stats import Design
from harness.results.columns import TableRow, column, grouped, having, named, values, where
from harness.results.metrics import MISSING, Metric
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
    "`docs/statistics.md`."
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
    """A difference in points with its sign."""
    shown = metrics.ANSWERS_DIFFERENCE.show(difference)
    return f"+{shown}" if difference > 0 else shown


def _ratio(row: TableRow, name: str = "ratio") -> str:
    return show_interval(show_ratio, row, name)


def _difference(row: TableRow, name: str = "answers_difference") -> str:
    return show_interval(_show_points, row, name)


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
    sizes = {row["asked_size"] for row in first}
    of_sizes = [claim for claim in claims if claim["asked_size"] in sizes]
    sheets = [*_readme(first, of_models, readme), *methods_sheets(first)]
    return markdown("board", note, [*sheets, *by_memory(first), *claims_sheets(of_sizes)])


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
    """For each size and length the compared methods, the closest first, then the others."""
    marked, own_notes = mark_own(rows, "label")
    for words, of_setting in grouped(marked, _setting_words).items():
        compared = where(of_setting, "apart", "")
        apart = [row for row in of_setting if row["apart"]]
        if compared:
            sheet = methods_sheet(words, compared)
            yield sheet._replace(notes=[_counts(compared[0]), *sheet.notes, *own_notes])
        if apart:
            why, count = shown_as_is(named("apart")), shown_as_is(named("num_windows"))
            shown = _LABEL | why | _RATIO | count | _ANSWERS | _SIZES | _step(apart)
            title = f"{words}: not compared"
            yield sheet_of(title, apart, shown, notes=_notes(apart))


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
    exempt = shown_as_is(named("exempt_numbers"))
    shown = _LABEL | rank | _RATIO | _ANSWERS | _SIZES | _step(rows) | exempt
    return sheet_of(title, rows, shown, notes=_notes(rows))


def _rank(row: TableRow) -> str:
    return f"{row['rank']:.0f} ({row['rank_low']:.0f} to {row['rank_high']:.0f})"


def _step(rows: Iterable[TableRow]) -> Shown:
    """The column of the decode step; none where no step was timed."""
    return {metrics.STEP.heading: _shown_step} if having(rows, "step_s") else {}


def _shown_step(row: TableRow) -> str:
    shown = metrics.STEP.show(row.get("step_s"))
    return shown + MODELLED_MARK if row.get("step_source") == MODELLED else shown


def _notes(rows: Sequence[TableRow]) -> list[str]:
    """The meaning of the marks of answers, and as `_notes_on_steps`."""
    marks = set(chain.from_iterable(map(_marks, having(rows, "answers_difference"))))
    on_answers = [f"{mark} {words}" for mark, words in ANSWER_MARKS.items() if mark in marks]
    return on_answers + _notes_on_steps(rows)


def _notes_on_steps(rows: Iterable[TableRow]) -> list[str]:
    """Where steps were timed, and the meaning of the mark."""
    timed = having(rows, "step_s")
    notes = []
    if timed:  # all steps of a table are of one model and machine
        notes.append(f"Decode step: {timed[0]['step_on']}, over an emulated link.")
    if where(timed, "step_source", MODELLED):
        notes.append(f"{MODELLED_MARK} {MODELLED_WORDS}")
    return notes


def _marks(row: TableRow) -> list[str]:
    """The marks of a row's answers."""
    note = row.get("answers_note") or ""
    words = {OTHER_SIZE: "reads ", LACKS: "lacks "}
    return [mark for mark, said in words.items() if said in note]


def _marked_difference(row: TableRow) -> str:
    difference = _difference(row)
    return difference if difference == MISSING else difference + "".join(_marks(row))


_LABEL = shown_as_is(named("label"))
_RATIO: Shown = {metrics.RATIO.heading: _ratio}
_ANSWERS: Shown = {
    metrics.ANSWERS_DIFFERENCE.heading: _marked_difference,
    **shown_as_is(named("answers num_questions")),
}
_OF_SIZE = (metrics.SIZE, metrics.DEVICE_FRAC, metrics.RESIDENT_FRAC)
_SIZES: Shown = {column.heading: partial(_range, column) for column in _OF_SIZE}


def _readme(
    rows: Sequence[TableRow], of_models: Sequence[TableRow], readme: Mapping[str, Any]
) -> Iterator[Sheet]:
    """README's table at each length: its methods in its order, a ratio for each model, and answers
    where questions were asked."""
    here = where(rows, "asked_size", readme["size"])
    for seq_len, of_length in grouped(here, itemgetter("seq_len")).items():
        by_label = {row["label"]: row for row in of_length}
        compared = where(of_length, "apart", "")
        methods = [by_label[label] for label in readme["methods"] if label in by_label]
        if not methods or not compared:
            continue
        shown = _LABEL | _SIZES | _RATIO
        of_texts = where(of_models, "domain", ALL_TEXTS)
        at_size = where(where(of_texts, "asked_size", readme["size"]), "seq_len", seq_len)
        for model, of_model in grouped(at_size, itemgetter("model")).items():
            if model != ALL_MODELS:
                ratios = {row["label"]: row.get("versus") for row in of_model}
                shown |= {f"on {model}": partial(_ratio_there, ratios)}
        shown |= {f"over rows of 8 bits: {metrics.RATIO.heading}": partial(_ratio_coded, by_label)}
        if having(methods, "answers"):
            shown |= {metrics.ANSWERS_DIFFERENCE.heading: _difference}
        title = f"README rows: {_size_words(readme['size'])}, windows of {seq_len:,.0f} tokens"
        notes = [_counts(compared[0]), _counts_of_answers(here)]
        yield sheet_of(title, methods, shown, notes=notes)


def _ratio_there(ratios: Mapping[str, float | None], row: TableRow) -> str:
    ratio = ratios.get(row["label"])
    return MISSING if ratio is None else show_ratio(ratio)


def _ratio_coded(by_label: Mapping[str, TableRow], row: TableRow) -> str:
    """Of the same method over rows of 8 bits, where it ran."""
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
    """At each length all methods and sizes by the bytes that a step moves, over the link and on the
    device, with the fronts."""
    whole = filter(is_whole, rows)
    for seq_len, found in grouped(whole, itemgetter("seq_len")).items():
        shown = _LABEL | {
            "asked": lambda row: _size_words(row["asked_size"]),
            TRAFFIC.heading: lambda row: TRAFFIC.show(traffic(row)),
            metrics.RESIDENT_FRAC.heading: _SIZES[metrics.RESIDENT_FRAC.heading],
            **_step(found),
            **shown_as_is(named("kl_nats front")),
        }
        title = f"by memory, windows of {seq_len:,.0f} tokens"
        notes = [MEMORY_NOTE, *_notes_on_steps(found)]
        yield sheet_of(title, sorted(found, key=traffic), shown, notes=notes)


def claims_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """One table: a line for each claim, size and length, with the models on which it holds."""
    claims = []
    for of_claim in grouped(rows, _claim_of).values():
        models = [row for row in of_claim if row["model"] != ALL_MODELS] or of_claim
        together = {"together": _together(of_claim[-1]), "count": of_claim[-1].get("count")}
        claims.append({"seq_len": None} | of_claim[0] | together | {"models": models})
    shown: Shown = {
        **shown_as_is(named("claim")),
        "size (%)": lambda row: metrics.ASKED_SIZE.show(row["asked_size"]),
        "windows (tokens)": lambda row: metrics.SEQ_LEN.show(row["seq_len"]),
        f"{ALL_MODELS} together": itemgetter("together"),
        "count": lambda row: column("count").show(row["count"]),
        **{f"{verdict} on": partial(_models_with, verdict) for verdict in VERDICTS},
    }
    if claims:
        yield sheet_of("claims", claims, shown)


def _claim_of(row: TableRow) -> tuple[Any, ...]:
    return row["claim"], row["asked_size"], row.get("seq_len")


def _together(row: TableRow) -> str:
    if row.get("value") is None:
        return str(row["verdict"])
    number = _difference(row, "value") if row["measure"] == OF_ANSWERS else _ratio(row, "value")
    return f"{row['verdict']}: {number}"


def _models_with(verdict: str, claim: TableRow) -> str:
    """The models on which a claim has this verdict."""
    models = claim["models"]
    found = values(where(models, "verdict", verdict), "model")
    if len(found) == len(models) > 1:
        return f"all {len(models)} models"
    return ", ".join(found) or MISSING


def models_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """For each model, size and length a line a method, the closest first, a column a domain."""
    of_texts, of_tasks = where(rows, "measure", OF_KL), where(rows, "measure", OF_ANSWERS)
    for (model, size, _), group in grouped(of_texts, _model_and_setting).items():
        at_size = [row for row in of_tasks if row["asked_size"] in (size, None)]
        answers = where(at_size, "model", model)
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
        yield Sheet(f"{model}, {_setting_words(group[0])}", header, lines)


_model_and_setting = itemgetter("model", "asked_size", "seq_len")


def _cell(row: TableRow) -> str:
    shown, versus = metrics.KL.show(row["value"]), _ratio(row, "versus")
    if row["measure"] == OF_ANSWERS:
        shown, versus = metrics.ANSWERS.show(row["value"]), _difference(row, "versus")
    return f"{shown}, {versus}, {row['count']:.0f}"


def pairs_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """For each size and length a line a method, the closest first: which others it is told apart
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
        yield Sheet(words, header, [list(map(str, line)) for line in found])


# The tables of `experiment=board`


def texts_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """KL of each model at a size and a length, by text."""
    for (model, *_), group in grouped(rows, _model_and_setting).items():
        shown = {}
        texts = grouped(group, itemgetter("text"))
        for text in sorted(texts):
            windows = set(values(texts[text], "window"))
            shown[f"{text} {metrics.KL.heading}, {len(windows)} windows"] = partial(_mean_kl, text)
        if len(texts) > 1:
            shown[f"all texts {metrics.KL.heading}"] = partial(_mean_kl, None)
        title = f"{model}, {_setting_words(group[0])}"
        yield sheet_of(title, _runs(group), _OF_RUN | shown)


def answers_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """Right answers of each model at a size, by task."""
    shown = {}
    for task in sorted(set(values(rows, "task"))):
        shown[f"{task} (%), questions"] = partial(_mean_answers, task)
    for (model, size), group in grouped(rows, itemgetter("model", "asked_size")).items():
        yield sheet_of(f"{model}, {_size_words(size)}", _runs(group), _OF_RUN | shown)


def _runs(rows: Iterable[TableRow]) -> Iterable[list[TableRow]]:
    """The rows of each run; a label may have several numbers of exempt layers."""
    return grouped(rows, itemgetter("label", "method", "codec", "exempt_layers")).values()


def _label_of_run(run: Sequence[TableRow]) -> str:
    label, number = run[0]["label"], run[0]["exempt_layers"]
    return str(label) if number is None else f"{label} ({number:.0f} exempt)"


def _mean(column: Metric, run: Sequence[TableRow]) -> str:
    known = values(having(run, column.name), column.name)
    return column.show(sum(known) / len(known) if known else None)


def _mean_kl(text: str | None, run: Sequence[TableRow]) -> str:
    """Of a text; None: of all."""
    rows = run if text is None else where(run, "text", text)
    if not rows:
        return MISSING
    places = [values(rows, name) for name in ("model", "text", "place")]
    found = Design(*places).estimate(values(rows, "kl_nats"))
    return metrics.KL.show(found.value, found.stderr)


def _mean_answers(task: str, run: Sequence[TableRow]) -> str:
    rows = where(run, "task", task)
    if not rows:
        return MISSING
    contexts = [values(rows, name) for name in ("model", "task", "context_id", "asked")]
    found = Design(*contexts).estimate([row["right"] / row["asked"] for row in rows])
    num_questions = sum(values(rows, "asked"))
    return f"{metrics.ANSWERS.show(found.value, found.stderr)}, {num_questions:.0f}"


_OF_RUN: dict[str, Callable[[list[TableRow]], str]] = {
    metrics.LABEL.heading: _label_of_run,
    **{column.heading: partial(_mean, column) for column in _OF_SIZE},
}


def steps_sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """The timed decode steps of each model, the shortest first."""
    shown = shown_as_is(
        named(
            "label exempt_layers asked_size size batch_size prompt_len compute_s link_bytes "
            "late_bytes link_bytes_per_s step_s"
        )
    )
    groups = grouped(rows, itemgetter("model", "platform", "source"))
    for (model, platform, source), group in groups.items():
        by_time = sorted(group, key=itemgetter("step_s"))
        yield sheet_of(f"{model} on {platform}, {source}", by_time, shown)


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

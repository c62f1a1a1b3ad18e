"""The plain tables of `experiment=board`: a row for each window of a text, for each context of a
task, and for each timed decode step.

`harness.results.board` makes the board of these alone. Results without their records
can thus be shipped, joined and extended. `rows_of_records` makes the tables, `read` reads those of
several results, and `series_of` parts them by method and size.
"""

import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import UserError
from harness.results import columns
from harness.results.archive import opened
from harness.results.columns import TableRow, read_table, shape_of
from harness.results.record import BAD_VALUE_ERRORS, Record, in_words
from harness.results.samples import FULL
from harness.results.shipped import IDENTITY
from harness.results.step_time import timed_step
from harness.settings.kinds import OF_CODECS
from harness.settings.paths import COMMAND, models_beside, table_to_read

log = logging.getLogger(__name__)

TEXTS, ANSWERS, STEPS = "board-texts", "board-answers", "board-steps"
"""The tables."""
SHAPES = {TEXTS: "board_texts", ANSWERS: "board_answers", STEPS: "board_steps"}
TABLE_OF_KIND = {"tasks": ANSWERS, "latency": STEPS}
"""The table of a kind of run; of a run on a text, `TEXTS`."""
ACC = "acc"
READS_ALL = "reads all"
"""The family of the full cache."""


def rows_of_records(records: Iterable[Record]) -> dict[str, list[TableRow]]:
    """The rows of finished records, by table; of two runs of one identity the newer counts.

    A damaged record is left out with a warning that names it.
    """
    runs: dict[str, dict[tuple[Any, ...], list[TableRow]]] = {name: {} for name in SHAPES}
    by_age = sorted(records, key=lambda record: record["started"])
    labels = _labels_of_methods(by_age)
    for record in by_age:
        table = TABLE_OF_KIND.get(record["kind"], TEXTS)
        try:
            if table == STEPS:
                rows = list(_steps(record, labels))
            else:
                rows = list(_answers(record) if table == ANSWERS else _windows(record))
            columns.check(columns.TABLES[SHAPES[table]], rows)
        except BAD_VALUE_ERRORS as error:
            named = f"{record['experiment']}/{record['run_id']}"
            log.warning("%s: damaged record (%r); left out of %s", named, error, table)
            continue
        runs[table] |= columns.grouped(rows, partial(identity, SHAPES[table]))
    found = {}
    for table, of_table in runs.items():
        found[table] = list(itertools.chain.from_iterable(of_table.values()))
    return found


def identity(shape: str, row: TableRow) -> tuple[Any, ...]:
    """What was measured: all rows of one identity come from one run."""
    return tuple(columns.picked(row, IDENTITY[shape]).values())


def ordered(rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows of a table by label, size, length, text or task, and window or context."""
    return sorted(rows, key=_order)


def _order(row: TableRow) -> tuple[Any, ...]:
    size, length = row["asked_size"] or 1, row.get("seq_len") or 0
    names = row["model"], row["label"]
    part = row.get("text") or row.get("task") or ""
    number = row.get("window", row.get("context_id", 0))
    return (*names, size, length, part, row["exempt_layers"] or 0, row["run_id"], number)


def _windows(record: Record) -> Iterator[TableRow]:
    """The windows of a run on a text. A window without a place is its number among them."""
    ((text, entries),) = record["metrics"].items()
    windows = record["samples"]["windows"]
    common = _of_run(record) | columns.picked(entries, ("device_frac", "resident_frac"))
    common |= {"text": Path(text).name, "seq_len": record["config"]["seq_len"]}
    common["family"] = family_of(record)
    for number, window in enumerate(windows):
        place = window.get("place", number / len(windows))
        measured = columns.picked(window, ("kl_nats", "size"))
        yield common | measured | {"window": number, "place": place}


def family_of(record: Record) -> str:
    """In a word, how the method of a run reads less than the full cache."""
    if record["when"] != "kept":
        return "oracle" if record["when"] == "true_scores" else "retrieves"
    if record["config"]["size"] is not None:
        return "evicts"
    sizes = set(columns.values(record["metrics"].values(), "size"))
    return READS_ALL if sizes <= {1} else "codes"


def _answers(record: Record) -> Iterator[TableRow]:
    """The contexts of each task whose answers are right or wrong."""
    for task, entries in record["metrics"].items():
        sizes = columns.picked(entries, ("size", "device_frac", "resident_frac"))
        common = _of_run(record) | sizes | {"task": task}
        answered = columns.having(record["samples"].get(task, ()), ACC)
        by_context = columns.grouped(answered, lambda sample: sample["context"])
        for context, questions in by_context.items():
            lengths = columns.values(columns.having(questions, "context_tokens"), "context_tokens")
            yield common | {
                "context_id": context,
                "right": sum(columns.values(questions, ACC)),
                "asked": len(questions),
                "prompt_len": max(lengths, default=None),
            }


def _labels_of_methods(records: Iterable[Record]) -> dict[str, str]:
    """By method, in all its settings, the label of its runs on texts and tasks."""
    labels = {}
    for record in records:
        if TABLE_OF_KIND.get(record["kind"]) != STEPS:
            labels[_method_in_words(record)] = record["config"]["label"]
    return labels


def _method_in_words(record: Record) -> str:
    """Model, method and codec with all their settings, as words that compare."""
    config = record["config"]
    codecs = columns.picked(config, OF_CODECS).values()
    settings = [config["model"]["name"], config["method_name"], config.get("method"), *codecs]
    return json.dumps(settings, sort_keys=True)


def _steps(record: Record, labels: Mapping[str, str]) -> Iterator[TableRow]:
    """The decode step of a timed run; none if no transfer was counted.

    A timed run is labelled by its system, so `labels` has the name of its method on a text.
    """
    metrics = record["metrics"]
    step = timed_step(metrics)
    if step:
        of_run = _of_run(record)
        of_run["label"] = labels.get(_method_in_words(record), of_run["label"])
        read = columns.picked(metrics, ("gen_len", "size", "source"))
        yield of_run | step | read


def _of_run(record: Record) -> TableRow:
    """What all rows of a run have."""
    config = record["config"]
    codec = "/".join(filter(None, (config["codec"], config.get("value_codec"))))
    is_full = config["method_name"] == FULL and not codec
    return {
        "experiment": record["experiment"],
        "model": config["model"]["name"],
        "method": config["method_name"],
        "codec": codec,
        "label": config["label"],
        "settings": in_words(record["settings"]),
        "asked_size": config["size"],
        "exempt_layers": None if is_full else config["method"].get("num_exempt_layers"),
        "source": "measured",
        "run_id": record["run_id"],
    }


# Reading them


class Sources(NamedTuple):
    """The rows of all results: `columns.BOARD_TEXTS`, `BOARD_ANSWERS`, `BOARD_STEPS`."""

    windows: list[TableRow]
    answers: list[TableRow]
    steps: list[TableRow]


def read(sources: Sequence[Path]) -> Sources:
    """The rows of results folders or archives, and of the folders within them.

    Raises UserError where there is no such table, or a damaged one.
    """
    runs: dict[str, dict[tuple[Any, ...], list[TableRow]]] = {name: {} for name in SHAPES}
    for source in sources:
        with opened(source) as results:
            for folder, name in itertools.product(_folders(results), runs):
                for key, of_run in _runs_in(folder, name).items():
                    runs[name].setdefault(key, of_run)
    if not runs[TEXTS]:
        named = ", ".join(map(str, sources))
        none = f"no tables/{TEXTS}.csv in it or in a folder within it"
        raise UserError(f"{named}: {none}; `{COMMAND} experiment=board` makes one")
    joined = []
    for of_table in runs.values():
        joined.append(list(itertools.chain.from_iterable(of_table.values())))
    return Sources(*joined)


def _folders(results: Path) -> list[Path]:
    """A results folder and those within it that have tables, also shipped ones."""
    return [results, *(results / name for name in models_beside(results))]


def _runs_in(folder: Path, name: str) -> dict[tuple[Any, ...], list[TableRow]]:
    """The rows of a table by their run; none where there is no such table."""
    path = table_to_read(folder, f"{name}.csv")
    rows = [] if path is None else read_table(path)
    if rows and shape_of(rows[0]) != SHAPES[name]:
        made = f"`{COMMAND} experiment=board` makes it anew"
        raise UserError(f"{path}: not a table of experiment=board (it has other columns); {made}")
    return columns.grouped(rows, partial(identity, SHAPES[name]))


class Series(NamedTuple):
    """A method at an asked size, on all models. method: its preset."""

    label: str
    method: str
    codec: str
    asked_size: float | None
    windows: Sequence[TableRow]
    answers: Sequence[TableRow]

    @property
    def is_full(self) -> bool:
        """Whether it is the full cache."""
        return self.method == FULL and not self.codec


def series_of(sources: Sources) -> list[Series]:
    """The methods by label and asked size.

    A label that one model has with several numbers of exempt layers, at one length of windows or on
    one task, is one series of each. Raises UserError if two methods or codecs have one label.
    """
    rows = [*sources.windows, *sources.answers]
    labels_of_several = _with_several_exempt_numbers(rows)
    found = []
    for (label, asked), of_series in columns.grouped(
        rows, partial(_series_key, labels_of_several)
    ).items():
        kinds = {(row["method"], row["codec"]) for row in of_series}
        if len(kinds) > 1:
            names = ", ".join(sorted(" ".join(filter(None, kind)) for kind in kinds))
            raise UserError(f"label={label}: two methods have it ({names}); give each its own")
        ((method, codec),) = kinds
        windows = [row for row in of_series if "text" in row]
        answers = [row for row in of_series if "task" in row]
        found.append(Series(label, method, codec, asked, windows, answers))
    return found


def _with_several_exempt_numbers(rows: Iterable[TableRow]) -> set[str]:
    numbers: dict[tuple[Any, ...], set[Any]] = {}
    for row in rows:
        measured_on = row.get("seq_len") if "text" in row else row["task"]
        key = row["label"], row["model"], row["asked_size"], measured_on
        numbers.setdefault(key, set()).add(row["exempt_layers"])
    return {label for (label, *_), found in numbers.items() if len(found) > 1}


def _series_key(labels_of_several: set[str], row: TableRow) -> tuple[str, float | None]:
    label = row["label"]
    if label in labels_of_several:
        label += f", {row['exempt_layers'] or 0:.0f} exempt layers"
    return label, row["asked_size"]

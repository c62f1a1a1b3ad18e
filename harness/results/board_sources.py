"""The plain tables of `experiment=board`: a row for each window of a text, for each context of a
task, and for each timed decode step.

`harness.results.board` makes the board of these alone. Results without their records
can thus be shipped, joined and extended. `rows_of_records` makes the tables, `read` reads those of
a results folder, and `series_of` parts them by method and budget.
"""

import itertools
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import UserError
from harness.results import columns
from harness.results.columns import (
    IDENTITY,
    TableRow,
    grouped,
    picked,
    read_table,
    shape_of,
    values,
    where,
)
from harness.results.record import Record, in_words
from harness.results.samples import FULL, is_full
from harness.settings.kinds import OF_CODECS
from harness.settings.paths import COMMAND, models_beside, table_to_read

TEXTS, ANSWERS, STEPS = "board-texts", "board-answers", "board-steps"
"""The tables."""
SHAPES = {TEXTS: "board_texts", ANSWERS: "board_answers", STEPS: "board_steps"}
TABLE_OF_KIND = {"tasks": ANSWERS, "latency": STEPS}
"""The table of a kind of run; of a run on a text, `TEXTS`."""
ACC = "acc"


def rows_of_records(records: Iterable[Record]) -> dict[str, list[TableRow]]:
    """The rows of finished records, by table; of two runs of one identity the newer counts."""
    runs: dict[str, dict[tuple[Any, ...], list[TableRow]]] = {name: {} for name in SHAPES}
    by_age = sorted(records, key=lambda record: record["started"])
    labels = {}
    for record in by_age:
        if record["kind"] != "latency":
            labels[_method_in_words(record)] = record["config"]["label"]
    for record in by_age:
        table = TABLE_OF_KIND.get(record["kind"], TEXTS)
        shape = SHAPES[table]
        rows = list(_rows(record, table, labels))
        runs[table] |= grouped(rows, partial(identity, shape))
    found = {}
    for table, of_table in runs.items():
        found[table] = list(itertools.chain.from_iterable(of_table.values()))
    return found


def identity(shape: str, row: TableRow) -> tuple[Any, ...]:
    """What was measured: all rows of one identity come from one run."""
    return tuple(row.get(name) for name in IDENTITY[shape])


def ordered(rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows of a table by label, budget, length, text or task, and window or context."""
    return sorted(rows, key=_order)


def _order(row: TableRow) -> tuple[Any, ...]:
    budget, length = row["asked_budget"] or 1, row.get("seq_len") or 0
    part = row.get("text") or row.get("task") or ""
    number = row.get("window", row.get("context_id", 0))
    dense_layers = row["dense_layers"] or 0
    return row["model"], row["label"], budget, length, part, dense_layers, row["run_id"], number


def _rows(record: Record, table: str, labels: Mapping[str, str]) -> Iterator[TableRow]:
    """The rows of a record. labels: of the runs on texts and tasks, by their method in words."""
    config = record["config"]
    dense_layers = config["method"].get("dense_layers")
    of_run = {
        "experiment": record["experiment"],
        "model": config["model"]["name"],
        "method": config["method_name"],
        "codec": "/".join(filter(None, (config["codec"], config.get("value_codec")))),
        "label": config["label"],
        "settings": in_words(record["settings"]),
        "asked_budget": config["budget"],
        "dense_layers": None if is_full(record) else dense_layers,
        "source": "measured",
        "run_id": record["run_id"],
    }
    if table == TEXTS:
        yield from _windows(record, of_run)
    elif table == ANSWERS:
        yield from _answers(record, of_run)
    else:
        step = timed_step(record["metrics"])
        if step:
            # A timed run is labelled by its system, the board by the method.
            of_run["label"] = labels.get(_method_in_words(record), of_run["label"])
            read = picked(record["metrics"], ("gen_len", "budget", "source"))
            yield of_run | step | read


def _windows(record: Record, of_run: TableRow) -> Iterator[TableRow]:
    """The windows of a run on a text. A window without a place is its number among them."""
    ((text, entries),) = record["metrics"].items()
    windows = record["samples"]["windows"]
    common = of_run | picked(entries, ("device_frac", "resident_frac"))
    common |= {"text": Path(text).name, "seq_len": record["config"]["seq_len"]}
    common["family"] = family_of(record)
    for number, window in enumerate(windows):
        place = window.get("place", number / len(windows))
        measured = picked(window, ("kl_nats", "budget"))
        yield common | measured | {"window": number, "place": place}


def family_of(record: Record) -> str:
    """In a word, how the method of a run reads less than the full cache."""
    if record["when"] != "kept":
        return "oracle" if record["when"] == "true_scores" else "retrieves"
    if record["config"]["budget"] is not None:
        return "evicts"
    read = set(values(record["metrics"].values(), "budget"))
    return "reads all" if read <= {1} else "codes"


def _answers(record: Record, of_run: TableRow) -> Iterator[TableRow]:
    for task, entries in record["metrics"].items():
        shares = picked(entries, ("budget", "device_frac", "resident_frac"))
        answered = columns.having(record["samples"].get(task, ()), ACC)
        by_context = grouped(answered, lambda sample: sample["context"])
        for context, questions in by_context.items():
            lengths = values(columns.having(questions, "context_tokens"), "context_tokens")
            measured = {
                "task": task,
                "context_id": context,
                "right": sum(values(questions, ACC)),
                "asked": len(questions),
                "prompt_len": max(lengths, default=None),
            }
            yield of_run | shares | measured


def _method_in_words(record: Record) -> str:
    config = record["config"]
    codecs = picked(config, OF_CODECS).values()
    settings = [config["model"]["name"], config["method_name"], config.get("method"), *codecs]
    return json.dumps(settings, sort_keys=True)


# Reading them


class Sources(NamedTuple):
    """The rows of a results folder: `columns.BOARD_TEXTS`, `BOARD_ANSWERS`, `BOARD_STEPS`."""

    windows: list[TableRow]
    answers: list[TableRow]
    steps: list[TableRow]


def read(results: Path) -> Sources:
    """The rows of a results folder, and of the folders within it.

    Of two runs of one identity that of the earlier folder counts. Raises UserError where there is
    no such table, or a damaged one.
    """
    found: dict[str, list[TableRow]] = {name: [] for name in SHAPES}
    folders = [results, *(results / name for name in models_beside(results))]
    for folder, (name, shape) in itertools.product(folders, SHAPES.items()):
        known = {identity(shape, row) for row in found[name]}
        for row in _rows_in(folder, name):
            if identity(shape, row) not in known:
                found[name].append(row)
    if not found[TEXTS]:
        none = f"no tables/{TEXTS}.csv in it or in a folder within it"
        raise UserError(f"{results}: {none}; `{COMMAND} experiment=board` makes one")
    return Sources(*found.values())


def _rows_in(folder: Path, name: str) -> list[TableRow]:
    """The rows of a table; none where there is no such table."""
    path = table_to_read(folder, f"{name}.csv")
    rows = [] if path is None else read_table(path)
    if rows and shape_of(rows[0]) != SHAPES[name]:
        made = f"`{COMMAND} experiment=board` makes it anew"
        raise UserError(f"{path}: not a table of experiment=board (it has other columns); {made}")
    return rows


Key = tuple[str, str, float]
"""Model, text and place of a window; or model, task and number of a context of questions."""
Rows = Mapping[Key, TableRow]


class Series(NamedTuple):
    """A method at an asked budget, on all models. method: its preset. windows: by length."""

    label: str
    method: str
    codec: str
    asked_budget: float | None
    windows: Mapping[int, Rows]
    answers: Rows

    @property
    def is_full(self) -> bool:
        """Whether it is the full cache."""
        return self.method == FULL and not self.codec


def series_of(sources: Sources, models: Container[str] | None = None) -> list[Series]:
    """The methods by label and asked budget, on all models or some.

    A label that one model has with several numbers of dense layers, at one length of windows or on
    one task, is one series of each. Raises UserError if two methods or codecs have one label.
    """
    rows = [*sources.windows, *sources.answers]
    numbers: dict[tuple[Any, ...], set[Any]] = {}
    for row in rows:
        measured_on = row["seq_len"] if "text" in row else row["task"]
        key = row["label"], row["model"], row["asked_budget"], measured_on
        numbers.setdefault(key, set()).add(row["dense_layers"])
    of_several = {label for (label, *_), found in numbers.items() if len(found) > 1}

    def label_and_budget(row: TableRow) -> tuple[str, float | None]:
        label = row["label"]
        if label in of_several:
            label += f", {row['dense_layers'] or 0:.0f} dense layers"
        return label, row["asked_budget"]

    series = []
    for (label, asked), of_series in grouped(rows, label_and_budget).items():
        kinds = {(row["method"], row["codec"]) for row in of_series}
        if len(kinds) > 1:
            names = ", ".join(sorted(" ".join(filter(None, kind)) for kind in kinds))
            raise UserError(f"label={label}: two methods have it ({names}); give each its own")
        ((method, codec),) = kinds
        windows: dict[int, dict[Key, TableRow]] = {}
        answers: dict[Key, TableRow] = {}
        for row in of_series:
            if models is not None and row["model"] not in models:
                continue
            if "text" in row:
                window = row["model"], row["text"], float(row["place"])
                windows.setdefault(row["seq_len"], {})[window] = row
            else:
                answers[row["model"], row["task"], row["context_id"]] = row
        if windows or answers:
            series.append(Series(label, method, codec, asked, windows, answers))
    return series


class Models(NamedTuple):
    """The models of all results, and those over which the table's means go.

    A model is among the latter if at least half as many methods ran at a budget on it as on the
    model with the most. So a method that ran on one more model stays comparable with the others.
    """

    all: Sequence[str]
    together: Sequence[str]


def models_of(series: Iterable[Series]) -> Models:
    """The models in the order in which they come."""
    counts: dict[str, int] = {}
    for one in series:
        for model in models_at(itertools.chain.from_iterable(one.windows.values())):
            counts[model] = counts.get(model, 0) + (one.asked_budget is not None)
        for model in models_at(one.answers):  # of which there may be no windows
            counts.setdefault(model, 0)
    most = max(counts.values(), default=0)
    return Models(list(counts), [model for model in counts if 2 * counts[model] >= most])


def in_both(keys: Iterable[Key], others: Container[Key]) -> list[Key]:
    """The windows or contexts that are among the others too."""
    return [key for key in keys if key in others]


def on_models(keys: Iterable[Key], models: Container[str]) -> list[Key]:
    """The windows or contexts on these models."""
    return [key for key in keys if key[0] in models]


def models_at(keys: Iterable[Key]) -> list[str]:
    """The models of windows or contexts, each once."""
    return list(dict.fromkeys(model for model, _, _ in keys))


def rows_at(rows: Rows, keys: Iterable[Key]) -> list[TableRow]:
    """The rows of windows or contexts."""
    return [rows[key] for key in keys]


# Seconds of a decode step: of a timed run, and a model of them at another budget. Seconds of
# compute stay as timed, bytes over the link grow with the budget. As in live decoding, tokens that
# are selected a layer ahead are transferred during compute; `late_bytes`, selected by a layer's own
# query, are waited for.

AS_TIMED = ("platform", "batch_size", "prompt_len", "link_bytes_per_s")
MODELLED = "modelled"
"""`step_source` of a step that was timed at another budget, or over other codes."""
GROUP_SIZE = re.compile(r"\bgroup_size=\w+")


def step_seconds(row: Mapping[str, float], bytes_per_s: float) -> float:
    """Seconds of a decode step of `row` over a link of that rate."""
    late_s = row["late_bytes"] / bytes_per_s
    return max(row["compute_s"], row["link_bytes"] / bytes_per_s - late_s) + late_s


def timed_step(metrics: Mapping[str, Any]) -> TableRow:
    """The decode step of a timed run, the mean over its steps; {} if no transfer was counted."""
    if metrics["h2d_bytes"] is None:
        return {}
    steps = metrics["gen_len"] - 1
    step = picked(metrics, AS_TIMED)
    step["compute_s"] = (metrics["decode_s"] - metrics["exposed_transfer_s"]) / steps
    step["link_bytes"] = metrics["h2d_bytes"] / steps
    step["late_bytes"] = metrics["late_bytes"] / steps
    step["step_s"] = metrics["decode_s"] / steps
    return step


def step_at(
    step: TableRow, timed_budget: float, budget: float | None, dense_layers: int | None
) -> TableRow:
    """A timed step at another budget; its `step_s` is None if the budget or the link is not known.

    The bytes of the dense layers, where there are any the only ones that a late method transfers
    ahead, are the same at any budget.
    """
    bytes_per_s = step["link_bytes_per_s"]
    if budget is None or not bytes_per_s:
        return step | {"step_s": None}
    ratio = budget / timed_budget
    link_bytes, late_bytes = step["link_bytes"] * ratio, step["late_bytes"] * ratio
    if dense_layers and late_bytes:
        of_dense_layers = step["link_bytes"] - step["late_bytes"]
        late_bytes = max(0.0, link_bytes - of_dense_layers)
    scaled = step | {"link_bytes": link_bytes, "late_bytes": late_bytes}
    change = step_seconds(scaled, bytes_per_s) - step_seconds(step, bytes_per_s)
    return scaled | {"step_s": step["step_s"] + change}


class BoardSteps:
    """The timed steps of the table: all of one model, machine, batch and prompt length, so that
    they compare.

    That is where most steps were timed, of the models of the table. timed: rows of
    `columns.BOARD_STEPS`.
    """

    def __init__(self, timed: Iterable[TableRow], models: Container[str]) -> None:
        by_setup = grouped(timed, itemgetter("model", "platform", "batch_size", "prompt_len"))
        setups = {setup: rows for setup, rows in by_setup.items() if setup[0] in models}
        setup: tuple[Any, ...] = max(setups, key=lambda setup: len(setups[setup]), default=())
        self.rows = grouped(setups.get(setup, ()), _METHOD)
        """By method, codec, label and dense layers."""
        self.model, self.prompt_len, self.timed_on = "", 0, ""
        if setup:
            self.model, platform, batch_size, self.prompt_len = setup
            prompts = f"prompts of {self.prompt_len:,.0f} tokens"
            self.timed_on = f"{self.model} ({platform}), batch {batch_size:.0f}, {prompts}"

    def step_of(self, windows: Iterable[TableRow]) -> TableRow:
        """`step_s`, `step_source` and `step_on` of a method at a budget, at windows of one length.

        windows: its rows of `columns.BOARD_TEXTS`, of any models. {} where no step of it was
        timed, and for windows that are not as long as the timed prompts.
        """
        of_model = where(windows, "model", self.model)
        here = where(of_model, "seq_len", self.prompt_len)
        timed = self.rows.get(_METHOD(here[0]), []) if here else []
        if not timed:
            return {}
        row = here[0]
        as_timed = where(timed, "asked_budget", row["asked_budget"])
        if as_timed:
            seconds, source = as_timed[0]["step_s"], as_timed[0]["source"]
            if _group_size(as_timed[0]) != _group_size(row):  # as many bytes, of other tokens
                source = MODELLED
        else:
            budget = sum(values(here, "budget")) / len(here)
            step = step_at(timed[0], timed[0]["budget"], budget, row["dense_layers"])
            seconds, source = step["step_s"], MODELLED
        if seconds is None:
            return {}
        return {"step_s": seconds, "step_source": source, "step_on": self.timed_on}


_METHOD = itemgetter("method", "codec", "label", "dense_layers")


def _group_size(row: TableRow) -> str:
    """The length of a codec's groups in the words of the settings; "" for the default."""
    found = GROUP_SIZE.search(row["settings"] or "")
    return found[0] if found else ""

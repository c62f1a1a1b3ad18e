"""The shapes of tables: the columns of each, what identifies a row, and their CSV files.

Columns are declared in `harness/results/metrics.py`. The numbers that the paper gives are a table
as well. Imports neither torch nor pandas.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UserError, reason
from harness.results.metrics import (
    COLUMNS,
    DECODE_RATE,
    IN_GIB,
    OF_SOME_RUNS,
    SEGMENTS,
    SERVING,
    Metric,
    Unit,
)

if TYPE_CHECKING:
    import pandas as pd

PUBLISHED_CSV = Path(__file__).parent / "published.csv"


def names(columns: Iterable[Metric]) -> tuple[str, ...]:
    """The header of a CSV of these columns."""
    return tuple(column.name for column in columns)


def named(words: str) -> tuple[Metric, ...]:
    """The columns of these names. `NAME..` stands for the ends of a number's interval."""
    found = []
    for word in words.split():
        column = COLUMNS[word.removesuffix("..")]
        if word == column.name:
            found.append(column)
            continue
        unit = Unit("", column.factor)
        for end, where in (("low", "from"), ("high", "to")):
            heading = f"{column.words}, {where}"
            found.append(Metric(f"{column.name}_{end}", heading, unit, column.digits))
    return tuple(found)


def _split(shapes: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {shape: tuple(words.split()) for shape, words in shapes.items()}


_RUN = "experiment model method codec label settings asked_budget dense_layers"
_TIMED = "experiment platform source model method label settings batch_size prompt_len gen_len"
ACCURACY = (
    *named(
        "experiment model method label settings task first stop depth metric value stderr "
        "difference difference_stderr p gained lost detectable num_samples num_contexts "
        "num_fewshot seq_len budget unmet_budget budget_artifact device_frac resident_frac"
    ),
    *OF_SOME_RUNS,
    *named("repeats_stderr source shipped run_id"),
)
"""`difference` to `detectable` are to the full cache on the same questions or windows.
`first`, `stop`, `depth`: of a range of a text's tokens, or of needles at some depth; empty for a
whole text or task. `repeats_stderr`: of a mean over several answers to each question, over repeats
of the same questions. `shipped`: `yes` for a row that came with the project
(`results/write.py`)."""
LATENCY = (
    *named(_TIMED),
    *SERVING,
    *named("budget unmet_budget device_frac tokens_evicted shipped run_id"),
    *SEGMENTS,
)
CAPACITY = (
    *named(f"{_TIMED} context memory_bytes largest_batch kv_tokens wall"),
    DECODE_RATE._replace(words="tokens/s"),
    *named(
        "sequence_tokens_per_s tpot_p50_s num_timed_steps equal_batch equal_tokens_per_s "
        "model_bytes row_bytes buffer_bytes state_bytes workspace_bytes device_kv_bytes"
    ),
    Metric("host_kv_bytes", "KV on host", IN_GIB, 3),
    *named("budget unmet_budget shipped run_id"),
)
"""A batch of a method on a device of `memory_bytes`. `largest_batch` fits; `wall` is the bound that
one sequence more breaks. `equal_batch` is the largest of the full cache on the device; its rate
stands in the row of the largest batch. Bytes are of the row's batch; of one sequence where none
fits (`batch_size` 0)."""
ANALYSIS = named(
    "experiment model series layer x_name x metric value stderr num_samples source shipped run_id"
)
"""`value` of `series` at `x`, in the unit of `metric`."""
BOARD_TEXTS = named(
    f"{_RUN} family seq_len text window place kl_nats budget device_frac resident_frac source "
    "shipped run_id"
)
"""A window of a text under a method. `family`: in a word, how the method reads less than the full
cache. `place`: the share of the text before the window; equal places are about the same words on
every model. The shares on the device are of all windows of its run."""
BOARD_ANSWERS = named(
    f"{_RUN} task context_id right asked prompt_len budget device_frac resident_frac source "
    "shipped run_id"
)
"""The questions on one context of a task under a method. `prompt_len`: of the longest."""
BOARD_STEPS = named(
    f"{_RUN} platform batch_size prompt_len gen_len compute_s link_bytes late_bytes "
    "link_bytes_per_s step_s budget source shipped run_id"
)
"""The decode step of a method, the mean of a timed run. `label`: that of the same method's run on a
text. Seconds and bytes are of one step (`results/board_rows.py`)."""
BOARD = named(
    "over model method codec family label asked_budget seq_len rank rank.. num_compared kl_nats "
    "ratio ratio.. degrees num_models num_windows num_places answers answers_difference "
    "answers_difference.. num_questions num_contexts answers_note budget.. device_frac.. "
    "resident_frac.. dense_numbers step_s step_source step_on front apart source shipped"
)
"""A method at a budget and a length, over `model`, the names of the models that have it. `over`:
the board it is compared on, over all models or of one of them. `kl_nats` is the
geometric mean over its windows, `ratio` that of its KL to the oracle's. `rank_low` and `rank_high`
are the places that it may have. `_low` and `_high` of `ratio` and `answers_difference` are 95 %
intervals, of budgets and shares the least and the largest of the models. `step_s` is of the one
model in `step_on`; `step_source` says whether it was timed or modelled. `front`: the costs at which
no method is closer. `apart` says why a method has no rank."""
BOARD_PAIRS = named(
    "model asked_budget seq_len label other ratio ratio.. degrees p p_holm closer source"
)
"""Two methods: `ratio` is that of the KL of `label` to that of `other`. `closer` is the label of
the one that is certainly closer to the full cache; empty where they are not told apart."""
TABLES: Mapping[str, Sequence[Metric]] = {
    "accuracy": ACCURACY, "latency": LATENCY, "analysis": ANALYSIS,
    "capacity": CAPACITY, "board_texts": BOARD_TEXTS, "board_answers": BOARD_ANSWERS,
    "board_steps": BOARD_STEPS,
    "board": BOARD, "board_pairs": BOARD_PAIRS,
}  # fmt: skip
"""The shapes of table. The field `table` of a record names its own."""
_OF_BOARD = "model method codec label asked_budget dense_layers"
IDENTITY = _split({
    "accuracy": "model method label settings task",
    "latency": "model platform source method label settings batch_size prompt_len gen_len",
    "capacity": "model platform source method label settings memory_bytes prompt_len gen_len",
    "analysis": "model source metric series x_name num_samples",
    "board_texts": f"{_OF_BOARD} seq_len text",
    "board_answers": f"{_OF_BOARD} task",
    "board_steps": f"{_OF_BOARD} platform batch_size prompt_len",
})  # fmt: skip
"""Columns that identify what was measured, by shape of table."""
_EVERY = {column.name: column for columns in TABLES.values() for column in columns}
WORDS = {name for name, column in _EVERY.items() if column.digits is None}
"""Columns of words. All other columns are of numbers."""
FORMULA = re.compile(r"'*[=+\-@\t\r]")
"""How words begin that a spreadsheet takes for a formula. A CSV has them behind an apostrophe."""
MARKED = re.compile(f"^'(?={FORMULA.pattern})")
NO_TABLE = "not a table of results"


def whole_tasks(rows: pd.DataFrame) -> pd.DataFrame:
    """The accuracy rows that are of no range of tokens and no depth."""
    return rows[rows["first"].isna() & rows["depth"].isna()]


def column(name: str) -> Metric:
    """The column of this name in any table; a user's own column has only a name."""
    return _EVERY.get(name) or Metric(name)


MARKS = {
    "text": "board_texts", "context_id": "board_answers", "compute_s": "board_steps",
    "apart": "board", "closer": "board_pairs",
    "series": "analysis", "metric": "accuracy", "largest_batch": "capacity",
}  # fmt: skip
"""By the first of these columns that a row has, its shape of table; by none, `latency`."""


def shape_of(names: Collection[str]) -> str:
    """The key of `TABLES` of a row with columns of these names."""
    return next((shape for mark, shape in MARKS.items() if mark in names), "latency")


def read_frame(path: Path) -> pd.DataFrame:
    """A table's CSV as a frame: "" where words are missing, NaN where a number is.

    An older table may lack columns of its shape, which are empty then. Raises UserError for a file
    that is no table of results: it cannot be parsed, lacks what identifies a row, or has words
    among numbers.
    """
    import pandas as pd  # here, as a command's help needs no pandas

    try:
        frame = pd.read_csv(
            path,
            encoding="utf-8-sig",
            dtype=dict.fromkeys(WORDS, str),
            keep_default_na=False,
            na_values=[""],
        )
        shape = shape_of(frame.columns)
        missing = {*IDENTITY.get(shape, ("model",))} - {*frame}
        if missing:
            raise ValueError(f"lacks {', '.join(sorted(missing))}")
        frame = with_columns(frame, shape)
        words = [name for name in frame if name in WORDS]
        frame[words] = frame[words].replace(MARKED, "", regex=True)
    except (OSError, ValueError) as error:
        anew = "delete it, and repeat a run of its experiment, which writes it anew"
        raise UserError(f"{path}: {NO_TABLE} ({reason(error)}); {anew}") from error
    return frame


def with_columns(frame: pd.DataFrame, shape: str) -> pd.DataFrame:
    """The frame with the columns of a shape first: "" where words are missing, NaN where a number
    is. Raises ValueError for words among numbers."""
    table = frame.reindex(columns=list(dict.fromkeys([*names(TABLES[shape]), *frame])))
    words = [name for name in table if name in WORDS]
    numbers = [name for name in table if name in _EVERY and name not in WORDS]
    table = table.astype(dict.fromkeys(words, object) | dict.fromkeys(numbers, float))
    return table.fillna(dict.fromkeys(words, ""))


def csv_of(frame: pd.DataFrame, shape: str) -> str:
    """A frame of a shape as CSV: all columns of the shape, and no other. Numbers of a column that
    are all whole have no point."""
    table = with_columns(frame, shape)[list(names(TABLES[shape]))]
    for name in table:
        if name in WORDS:
            table[name] = table[name].mask(table[name].str.match(FORMULA), "'" + table[name])
        elif table[name].dropna().mod(1).eq(0).all():
            table[name] = table[name].astype("Int64")
    return table.to_csv(index=False, lineterminator="\n")


def published() -> pd.DataFrame:
    """Numbers that papers and other projects give, all as words."""
    import pandas as pd  # here, as a command's help needs no pandas

    return pd.read_csv(PUBLISHED_CSV, dtype=str, keep_default_na=False)

"""The shapes of tables: the columns of each, what identifies a row, and their CSV files.

Columns are declared in `harness/results/metrics.py`. The numbers that the paper gives are a table
as well. Imports neither torch nor pandas.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harness.errors import UserError, reason
from harness.results.metrics import (
    ATTENTION_ERROR,
    COLUMNS,
    DECODE_RATE,
    IN_GIB,
    METRICS,
    NEWER_OF_SERVING,
    OF_SOME_RUNS,
    SEGMENTS,
    SERVING,
    VALUE,
    Metric,
)

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
K = TypeVar("K")
R = TypeVar("R", bound=Mapping[str, Any])
TableRow = dict[str, Any]
"""A table row by column name: numbers, words, or None where nothing was measured."""

MAX_DIGITS = 18
"""Digits of an integer in a table: it fits into 64 bits."""
PUBLISHED_CSV = Path(__file__).parent / "published.csv"


def names(columns: Iterable[Metric]) -> tuple[str, ...]:
    """The header of a CSV of these columns."""
    return tuple(column.name for column in columns)


def named(words: str) -> tuple[Metric, ...]:
    """The columns of these names. `NAME..` stands for the ends of a number's interval."""
    found = []
    for word in words.split():
        column = COLUMNS[word.removesuffix("..")]
        if word != f"{column.name}..":
            found.append(column)
            continue
        least = 0 if column.unit.least == 0 else -math.inf
        found.append(column.part("low", "from", least=least))
        found.append(column.part("high", "to", least=least))
    return tuple(found)


def _split(shapes: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {shape: tuple(words.split()) for shape, words in shapes.items()}


_RUN = "experiment model method codec label settings asked_budget dense_layers"
_TIMED = "experiment platform source model method label settings batch_size prompt_len gen_len"
ACCURACY = (
    *named(
        "experiment model method label settings task metric value stderr difference "
        "difference_stderr p gained lost detectable num_samples num_contexts num_fewshot "
        "seq_len budget unmet_budget budget_artifact device_frac resident_frac"
    ),
    *OF_SOME_RUNS,
    *named("repeats_stderr source shipped run_id"),
)
"""`difference` to `detectable` are to the full cache on the same questions or windows.
`repeats_stderr`: of a mean over several answers to each question, over repeats of the same
questions. `shipped`: `yes` for a row that came with the project (`results/write.py`)."""
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
text. Seconds and bytes are of one step (`results/board_sources.py`)."""
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
BOARD_MODELS = named(
    "model method label asked_budget seq_len domain measure value versus versus.. count "
    "num_contexts source"
)
"""A method on a model (or all models) and a domain, which is a text, a task, or all of them.
`value`: mean KL in nats, or the share of right answers. `versus`: the ratio to the oracle's KL,
or the difference to the full cache's answers, with its interval. `count`: windows or questions;
`num_contexts`: places or contexts."""
BOARD_CLAIMS = named(
    "model claim measure label other asked_budget seq_len bound value value.. count verdict source"
)
"""A claim on a model, or on all of them together. `value`: the ratio of the two methods' KL, or the
difference of their answers; `bound`: the largest ratio or the least difference that the claim
allows."""
TABLES: Mapping[str, Sequence[Metric]] = {
    "accuracy": ACCURACY, "latency": LATENCY, "analysis": ANALYSIS,
    "capacity": CAPACITY, "board_texts": BOARD_TEXTS, "board_answers": BOARD_ANSWERS,
    "board_steps": BOARD_STEPS,
    "board": BOARD, "board_pairs": BOARD_PAIRS, "board_models": BOARD_MODELS,
    "board_claims": BOARD_CLAIMS,
}  # fmt: skip
"""The shapes of table. The field `table` of a record names its own."""
NEEDED = _split({
    "accuracy": "model label task metric",
    "latency": "model label batch_size prompt_len gen_len",
    "analysis": "model series metric",
    "capacity": "model label batch_size prompt_len gen_len",
    "board_texts": "model label seq_len text window place kl_nats budget",
    "board_answers": "model label task context_id right asked budget",
    "board_steps": "model label batch_size prompt_len step_s budget",
    "board": "model label asked_budget seq_len",
    "board_pairs": "model label other asked_budget seq_len ratio",
    "board_models": "model label domain measure value",
    "board_claims": "model claim measure asked_budget verdict",
})  # fmt: skip
"""By shape of table, the columns that no row of it leaves empty."""
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
"""Columns that identify what was measured, by shape of table. A chunk or a depth has the identity
of its task."""
ONCE = {
    "board_texts": (*IDENTITY["board_texts"], "window"),
    "board_answers": (*IDENTITY["board_answers"], "context_id"),
    "board_steps": IDENTITY["board_steps"],
}
"""By shape of table, the columns in which no two rows are equal."""
ROUNDING = 1e-6
"""By so much a share or a KL may lie outside of its range."""
SHARES = {"budget", "device_frac", "resident_frac"}
"""Columns that are at most 1 beside an asked budget. Elsewhere a codec of more than 16 bits has
more."""
OPTIONAL = (
    *names((*OF_SOME_RUNS, *NEWER_OF_SERVING)),
    "repeats_stderr", "unmet_budget", "num_contexts", "num_windows", "family",
    ATTENTION_ERROR.name, f"{ATTENTION_ERROR.name}_stderr",
)  # fmt: skip
"""Columns that a table may lack; an older table lacks the numbers of contexts, and what serving
engineers read beyond percentiles of a step."""
_EVERY = {column.name: column for columns in TABLES.values() for column in columns}


def picked(row: Mapping[str, Any], names: Iterable[str]) -> TableRow:
    """The values of these columns; None for a column that the row lacks."""
    return {name: row.get(name) for name in names}


def values(rows: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """The values of one column."""
    return [row[name] for row in rows]


def where(rows: Iterable[R], name: str, value: Any) -> list[R]:
    """The rows with this value of a column."""
    return [row for row in rows if row[name] == value]


def having(rows: Iterable[R], *names: str) -> list[R]:
    """The rows that have a value in each of these columns."""
    return [row for row in rows if all(row.get(name) is not None for name in names)]


def with_values(columns: Iterable[Metric], rows: Sequence[TableRow]) -> list[Metric]:
    """The columns, each once, in which any row has a value."""
    return [column for column in dict.fromkeys(columns) if having(rows, column.name)]


def grouped(rows: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The rows by key, in the order in which the keys and the rows come."""
    groups: dict[K, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def is_part(row: TableRow) -> bool:
    """Whether a row is of a chunk of its text, or of some depths of its task."""
    return str(row["task"]).endswith("]")


def is_depth(row: TableRow) -> bool:
    """Whether a row is of some depths of its task."""
    return str(row["task"]).endswith(" %]")


def column(name: str) -> Metric:
    """The column of this name in any table; a user's own column has only a name."""
    return _EVERY.get(name) or Metric(name)


MARKS = {
    "text": "board_texts", "context_id": "board_answers", "apart": "board",
    "claim": "board_claims", "closer": "board_pairs", "domain": "board_models",
    "series": "analysis", "metric": "accuracy",
    "compute_s": "board_steps", "largest_batch": "capacity",
}  # fmt: skip
"""By the first of these columns that a row has, its shape of table; by none, `latency`."""


def shape_of(names: Collection[str]) -> str:
    """The key of `TABLES` of a row with columns of these names."""
    return next((shape for mark, shape in MARKS.items() if mark in names), "latency")


def typed(row: Mapping[str, str]) -> TableRow:
    """A line of a CSV as a table row; an empty number is None.

    A number without a point stays an int, so the row is written as it was read. One of very many
    digits is a float, or infinite, which `check` refuses. Raises ValueError for other words in a
    column of numbers.
    """
    found: TableRow = {}
    for name, text in row.items():
        if column(name).digits is None:
            is_marked = text.startswith("'") and FORMULA.match(text)
            found[name] = text[1:] if is_marked else text
        elif not text:
            found[name] = None
        else:
            is_integer = text.isdecimal() and len(text) <= MAX_DIGITS
            found[name] = int(text) if is_integer else float(text)
    return found


WORDS = {name for name, column in _EVERY.items() if column.digits is None}
"""Columns of words. All other columns are of numbers."""
MARKED = r"^'(?='*[=+\-@\t\r])"
"""The apostrophe before words that a spreadsheet takes for a formula."""
FORMULA = re.compile(r"'*[=+\-@\t\r]")
"""How words begin that a spreadsheet takes for a formula. A CSV has them behind an apostrophe."""


def as_cell(words: str) -> str:
    """Words as a cell of a CSV that no spreadsheet computes."""
    return f"'{words}" if FORMULA.match(words) else words


NO_TABLE = "not a table of results"
ANEW = (
    "delete it, or repeat a run of its experiment, which keeps it under another name and "
    "writes it anew"
)


def read_table(path: Path) -> list[TableRow]:
    """The rows of a table's CSV. Raises UserError for a file that is no table of results.

    A byte order mark, which spreadsheets write, is no damage.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        lines = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        header = lines.fieldnames or ()
        rows = list(lines)
        shape = shape_of(header)
        has_all = {*header, *OPTIONAL}.issuperset(names(TABLES[shape]))
        # As `csv.DictReader` shows a line that is longer or shorter than the header.
        has_other_length = any(None in row or None in row.values() for row in rows)
        if has_all and not has_other_length:
            table = [typed(row) for row in rows]
            check(TABLES[shape], table)
            _check_rows(shape, table)
            return table
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: {NO_TABLE} ({reason(error)}); {ANEW}") from error
    raise UserError(f"{path}: {NO_TABLE} (other columns, or a line of another length); {ANEW}")


def read_frame(path: Path) -> pd.DataFrame:
    """A table's CSV as a frame: "" where words are missing, NaN where a number is.

    Raises UserError for a file that is no table of results: it cannot be parsed, lacks a column of
    its shape, or has words among numbers.
    """
    import pandas as pd  # here, as a command's help needs no pandas

    try:
        frame = pd.read_csv(
            path,
            encoding="utf-8-sig",
            dtype=dict.fromkeys(WORDS, str),
            keep_default_na=False,
            na_values=[""],
            float_precision="round_trip",
        )
        words = [name for name in frame if name in WORDS]
        numbers = [name for name in frame if name in _EVERY and name not in WORDS]
        frame[words] = frame[words].fillna("").replace(MARKED, "", regex=True)
        frame[numbers] = frame[numbers].astype(float)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {NO_TABLE} ({reason(error)}); {ANEW}") from error
    missing = {*names(TABLES[shape_of(frame.columns)])} - {*frame, *OPTIONAL}
    if missing:
        lacks = f"lacks {', '.join(sorted(missing))}"
        raise UserError(f"{path}: {NO_TABLE} ({lacks}); {ANEW}")
    return frame


def _check_rows(shape: str, rows: Iterable[TableRow]) -> None:
    key, found = ONCE.get(shape, ()), set()
    for row in rows:
        for name in NEEDED[shape]:
            if row[name] in (None, ""):
                raise ValueError(f"a row without {name}")
        identity = tuple(row.get(name) for name in key)
        if key and identity in found:
            raise ValueError(f"two rows of {row['label']} on {row['model']} are the same")
        found.add(identity)


def check(columns: Sequence[Metric], rows: Iterable[TableRow]) -> None:
    """Raise ValueError for words among numbers, or the reverse, and for a number that its column
    cannot have."""
    for row in rows:
        for column in columns:
            value, is_word = row.get(column.name), column.digits is None
            if value is None:
                continue
            if isinstance(value, str) != is_word or not (is_word or math.isfinite(value)):
                raise ValueError(f"{column.name}={value!r}"[:60])
            if is_word:
                continue
            name, unit = column.name, column.unit
            if column is VALUE and "metric" in row:
                name = row["metric"]
                unit = METRICS.get(name, column).unit
            if name in SHARES and "asked_budget" in row:
                unit = unit._replace(most=1)
            if not unit.least - ROUNDING <= value <= unit.most + ROUNDING:
                limits = f"from {unit.least:g} to {unit.most:g}"
                raise ValueError(f"{name}={value:g}: must be {limits}")
        if (row.get("right") or 0) > row.get("asked", math.inf):
            raise ValueError(f"right={row['right']} of asked={row['asked']}")


def render_csv(columns: Sequence[Metric], rows: Sequence[TableRow]) -> str:
    """The rows under `columns` as CSV. Other keys, and columns of `OPTIONAL` without any value, are
    left out."""
    import pandas as pd  # here, as a command's help needs no pandas

    shown = [name for name in names(columns) if name not in OPTIONAL or having(rows, name)]
    frame = pd.DataFrame(rows, columns=shown, dtype=object)  # which leaves an int an int
    for column in columns:
        if column.digits is None and column.name in shown:
            frame[column.name] = frame[column.name].map(as_cell, na_action="ignore")
    return frame.to_csv(index=False, lineterminator="\n")


def csv_of(frame: pd.DataFrame, shape: str) -> str:
    """A frame of a shape as CSV. Other columns, and those of `OPTIONAL` without any value, are left
    out; numbers of a column that are all whole have no point."""
    shown = []
    for name in names(TABLES[shape]):
        if name not in OPTIONAL or (name in frame and frame[name].notna().any()):
            shown.append(name)
    table = frame.reindex(columns=shown)
    for name in shown:
        if name in WORDS:
            words = table[name].fillna("").astype(str)
            table[name] = words.mask(words.str.match(FORMULA), "'" + words)
        else:
            numbers = table[name].astype(float)
            is_whole = numbers.dropna().mod(1).eq(0).all()
            table[name] = numbers.astype("Int64") if is_whole else numbers
    return table.to_csv(index=False, lineterminator="\n")


def published_rows() -> list[dict[str, str]]:
    """Numbers that papers and other projects give."""
    with PUBLISHED_CSV.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))

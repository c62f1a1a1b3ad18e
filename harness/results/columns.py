"""The shapes of tables: the columns of each, what identifies a row, and their CSV files.

Numbers are declared in `harness/results/metrics.py`. The numbers that the paper gives are a table
as well. Imports neither torch nor pandas.
"""

import csv
import io
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from harness.errors import UserError, reason
from harness.results.metrics import (
    ASKED_SIZE,
    ATTENTION_ERROR,
    DECODE_RATE,
    DEVICE_FRAC,
    DEVICE_KV_BYTES,
    DIFFERENCE,
    IN_GIB,
    IN_MIB,
    KL,
    LINK_BYTES_PER_S,
    METRICS,
    MS,
    NEWER_OF_SERVING,
    NUM_CONTEXTS,
    NUMBER,
    OF_SOME_RUNS,
    POSITIVE,
    PROBABILITY,
    RESIDENT_FRAC,
    SEGMENTS,
    SEQUENCE_RATE,
    SERVING,
    SHARE,
    SIZE,
    SIZE_ARTIFACT,
    STEP,
    TOKENS,
    TOKENS_EVICTED,
    TPOT,
    UNMET_SIZE,
    Metric,
    Unit,
)

T = TypeVar("T")
K = TypeVar("K")
R = TypeVar("R", bound=Mapping[str, Any])
TableRow = dict[str, Any]
"""A table row by column name: numbers, words, or None where nothing was measured."""

MAX_DIGITS = 18
"""Digits of an integer in a table: it fits into 64 bits."""
PUBLISHED_CSV = Path(__file__).parent / "published.csv"

EXPERIMENT, MODEL, METHOD = Metric("experiment"), Metric("model"), Metric("method")
PLATFORM, SOURCE = Metric("platform"), Metric("source", phrase="source: {}")
RUN_ID = Metric("run_id", phrase="run {}")
SHIPPED = Metric("shipped")
"""`yes` for a row that came with the project; empty for one's own runs (`results/shipped.py`)."""
LABEL, SETTINGS = Metric("label", "label"), Metric("settings", "settings")
METRIC, X_NAME = Metric("metric", phrase=""), Metric("x_name", phrase="")
VALUE, STDERR = Metric("value", "value", NUMBER, 3), Metric("stderr", "standard error", POSITIVE, 3)
COMPARED = (
    Metric("difference", "minus full cache", NUMBER, 3),
    Metric("difference_stderr", "standard error of the difference", POSITIVE, 3),
    Metric("mcnemar_p", "McNemar's p", PROBABILITY, 4),
    Metric("gained", "right, full cache wrong", POSITIVE, 0),
    Metric("lost", "wrong, full cache right", POSITIVE, 0),
    Metric("detectable", "smallest detectable difference", POSITIVE, 3),
)
"""Difference to the full cache on the same questions or windows."""
NUM_SAMPLES = Metric("num_samples", "samples", POSITIVE, 0, phrase="n = {:,.0f}")
NUM_FEWSHOT = Metric("num_fewshot", "shots", POSITIVE, 0, phrase="{:.0f}-shot")
SEQ_LEN = Metric("seq_len", "length", TOKENS, 0, phrase="{:,.0f} tokens")
REPEATS_STDERR = Metric("repeats_stderr", "standard error over repeats", POSITIVE, 3)
"""Of a mean over several answers to each question: its standard error over repeats of the same
questions."""
LAYER = Metric("layer", "layer", NUMBER, 0, phrase="layer {:.0f}")
BATCH_SIZE = Metric("batch_size", "batch", POSITIVE, 0, phrase="batch {:.0f}")
PROMPT_LEN = Metric("prompt_len", "prompt", POSITIVE, 0, phrase="prompt {:,.0f}")
GEN_LEN = Metric("gen_len", "generated", POSITIVE, 0, phrase="{:,.0f} generated")

ACCURACY = (
    EXPERIMENT, MODEL, METHOD, LABEL, SETTINGS,
    Metric("task"),
    METRIC, VALUE, STDERR, *COMPARED,
    NUM_SAMPLES, NUM_CONTEXTS, NUM_FEWSHOT, SEQ_LEN, SIZE, UNMET_SIZE, SIZE_ARTIFACT,
    DEVICE_FRAC, RESIDENT_FRAC, *OF_SOME_RUNS, REPEATS_STDERR, SOURCE, SHIPPED, RUN_ID,
)  # fmt: skip
LATENCY = (
    EXPERIMENT, PLATFORM, SOURCE, MODEL, METHOD, LABEL, SETTINGS,
    BATCH_SIZE, PROMPT_LEN, GEN_LEN, *SERVING,
    SIZE, UNMET_SIZE, DEVICE_FRAC, TOKENS_EVICTED, SHIPPED, RUN_ID, *SEGMENTS,
)  # fmt: skip
RENAMED = {"prefill_s": "ttft_s", "step_p50_s": "tpot_p50_s", "step_p95_s": "tpot_p95_s"}
"""Columns of latency tables and records by their former names, under which they are still read."""
CAPACITY = (
    EXPERIMENT, PLATFORM, SOURCE, MODEL, METHOD, LABEL, SETTINGS,
    BATCH_SIZE, PROMPT_LEN, GEN_LEN,
    Metric("context", "context", POSITIVE, 0, phrase="{:,.0f} tokens each"),
    Metric("memory_bytes", "device memory", IN_GIB, 2, phrase=""),
    Metric("largest_batch", "sequences that fit", POSITIVE, 0),
    Metric("kv_tokens", "KV tokens", POSITIVE, 0),
    Metric("wall"),
    DECODE_RATE._replace(words="tokens/s"), SEQUENCE_RATE, TPOT,
    Metric("num_timed_steps", "timed steps", POSITIVE, 0),
    Metric("equal_batch", "equal batch", POSITIVE, 0),
    Metric("equal_tokens_per_s", "tokens/s at the equal batch", POSITIVE, 2),
    Metric("model_bytes", "weights", IN_GIB, 3),
    Metric("row_bytes", "rows on device", IN_MIB, 1),
    Metric("buffer_bytes", "buffers", IN_MIB, 1),
    Metric("state_bytes", "state", IN_MIB, 1),
    Metric("workspace_bytes", "activations", IN_MIB, 1),
    DEVICE_KV_BYTES,
    Metric("host_kv_bytes", "KV on host", IN_GIB, 3),
    SIZE, UNMET_SIZE, SHIPPED, RUN_ID,
)  # fmt: skip
"""A batch of a method on a device of `memory_bytes`. `largest_batch` fits; `wall` is the bound that
one sequence more breaks. `equal_batch` is the largest of the full cache on the device; its rate
stands in the row of the largest batch. Bytes are of the row's batch; of one sequence where none
fits (`batch_size` 0)."""
ANALYSIS = (
    EXPERIMENT, MODEL, Metric("series"), LAYER, X_NAME, Metric("x", "x", NUMBER, 3),
    METRIC, VALUE, STDERR, NUM_SAMPLES, SOURCE, SHIPPED, RUN_ID,
)  # fmt: skip
"""`value` of `series` at `x`, in the unit of `metric`."""
EXEMPT_LAYERS = Metric("exempt_layers", "exempt layers", POSITIVE, 0)
EXEMPT_NUMBERS = Metric("exempt_numbers", "exempt layers")
"""Of several models."""
NUM_WINDOWS = Metric("num_windows", "windows", POSITIVE, 0)
STEP_SOURCE = Metric("step_source")
FRONT = Metric("front", "not beaten in")
OF_A_STEP = (
    Metric("compute_s", "compute", MS, 1),
    Metric("link_bytes", "link per step", IN_MIB, 2),
    Metric("late_bytes", "of which not hidden", IN_MIB, 2),
    LINK_BYTES_PER_S,
    STEP,
)
FAMILY = Metric("family", "family")
"""In a word, how a method reads less than the full cache."""
TEXT, WINDOW = Metric("text"), Metric("window", "window", POSITIVE, 0)
PLACE = Metric("place", "place in the text", SHARE, 1)
"""Share of a text before a window: equal places of a text are about the same words on every
model."""
CONTEXT_ID = Metric("context_id", "context", POSITIVE, 0)
RIGHT = Metric("right", "right answers", POSITIVE, 1)
ASKED = Metric("asked", "questions", Unit(least=1), 0)
_OF_A_RUN = (
    EXPERIMENT, MODEL, METHOD, Metric("codec"), LABEL, SETTINGS, ASKED_SIZE, EXEMPT_LAYERS,
)  # fmt: skip
_READ = (SIZE, DEVICE_FRAC, RESIDENT_FRAC, SOURCE, SHIPPED, RUN_ID)
BOARD_TEXTS = (*_OF_A_RUN, FAMILY, SEQ_LEN, TEXT, WINDOW, PLACE, KL, *_READ)
"""A window of a text under a method. The sizes on the device are of all windows of its run."""
BOARD_ANSWERS = (*_OF_A_RUN, Metric("task"), CONTEXT_ID, RIGHT, ASKED, PROMPT_LEN, *_READ)
"""The questions on one context of a task under a method. `prompt_len`: of the longest."""
BOARD_STEPS = (
    *_OF_A_RUN, PLATFORM, BATCH_SIZE, PROMPT_LEN, GEN_LEN, *OF_A_STEP,
    SIZE, SOURCE, SHIPPED, RUN_ID,
)  # fmt: skip
"""The decode step of a method, the mean of a timed run. `label`: that of the same method's run on a
text. Seconds and bytes are of one step (`results/step_time.py`)."""
RATIO = Metric("ratio", "KL / oracle's", POSITIVE, 2)
ANSWERS = Metric("answers", "right answers", SHARE, 1)
ANSWERS_DIFFERENCE = Metric("answers_difference", "answers minus full cache", DIFFERENCE, 1)
NUM_QUESTIONS = Metric("num_questions", "questions", POSITIVE, 0)
NUM_MODELS = Metric("num_models", "models", POSITIVE, 0)
NUM_PLACES = Metric("num_places", "places", POSITIVE, 0)
APART = Metric("apart", "why it is not compared")
STEP_ON = Metric("step_on", "step timed on")
OVER = Metric("over")
DOMAIN, MEASURE = Metric("domain", "domain"), Metric("measure")
DEGREES = Metric("degrees", "degrees of freedom", POSITIVE, 0)
OTHER = Metric("other", "other method")
P = Metric("p", "p", PROBABILITY, 4)
P_HOLM = Metric("p_holm", "p after Holm's correction", PROBABILITY, 4)
CLAIM, VERDICT = Metric("claim", "claim"), Metric("verdict")
VERSUS = Metric("versus", "ratio to the oracle, or minus the full cache", NUMBER, 3)
COUNT = Metric("count", "windows or questions", POSITIVE, 0)
BOUND = Metric("bound", "bound", NUMBER, 3)
RANK = Metric("rank", "rank", POSITIVE, 0)


def _interval(metric: Metric) -> tuple[Metric, Metric]:
    """The ends of the 95 % interval of a number."""
    least = 0 if metric.unit.least == 0 else -math.inf
    return metric.part("low", "from", least=least), metric.part("high", "to", least=least)


BOARD = (
    OVER, MODEL, METHOD, FAMILY, LABEL, ASKED_SIZE, SEQ_LEN, RANK, *_interval(RANK),
    Metric("num_compared", "methods compared", POSITIVE, 0),
    KL, RATIO, *_interval(RATIO), DEGREES, NUM_MODELS, NUM_WINDOWS, NUM_PLACES,
    ANSWERS, ANSWERS_DIFFERENCE, *_interval(ANSWERS_DIFFERENCE), NUM_QUESTIONS, NUM_CONTEXTS,
    Metric("answers_note"),
    *_interval(SIZE), *_interval(DEVICE_FRAC), *_interval(RESIDENT_FRAC),
    EXEMPT_NUMBERS, STEP, STEP_SOURCE, STEP_ON, FRONT, APART, SOURCE, SHIPPED,
)  # fmt: skip
"""A method at a size and a length, over `model`, the names of the models that have it. `over`: the
board it is compared on, over all models or of one of them. `kl_nats` is the
geometric mean over its windows, `ratio` that of its KL to the oracle's. `rank_low` and `rank_high`
are the places that it may have. `_low` and `_high` of `ratio` and `answers_difference` are 95 %
intervals, of sizes the least and the largest of the models. `step_s` is of the one
model in `step_on`; `step_source` says whether it was timed or modelled. `front`: the costs at which
no method is closer. `apart` says why a method has no rank."""
BOARD_PAIRS = (
    MODEL, ASKED_SIZE, SEQ_LEN, LABEL, OTHER, RATIO, *_interval(RATIO), DEGREES, P, P_HOLM,
    Metric("closer"), SOURCE,
)  # fmt: skip
"""Two methods: `ratio` is that of the KL of `label` to that of `other`. `closer` is the label of
the one that is certainly closer to the full cache; empty where they are not told apart."""
BOARD_MODELS = (
    MODEL, METHOD, LABEL, ASKED_SIZE, SEQ_LEN, DOMAIN, MEASURE, VALUE,
    VERSUS, *_interval(VERSUS), COUNT, NUM_CONTEXTS, SOURCE,
)  # fmt: skip
"""A method on a model (or all models) and a domain, which is a text, a task, or all of them.
`value`: mean KL in nats, or the share of right answers. `versus`: the ratio to the oracle's KL,
or the difference to the full cache's answers, with its interval. `count`: windows or questions;
`num_contexts`: places or contexts."""
BOARD_CLAIMS = (
    MODEL, CLAIM, MEASURE, LABEL, OTHER, ASKED_SIZE, SEQ_LEN,
    BOUND, VALUE, *_interval(VALUE), COUNT, VERDICT, SOURCE,
)  # fmt: skip
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
NEEDED = {
    "accuracy": ("model", "label", "task", "metric"),
    "latency": ("model", "label", "batch_size", "prompt_len", "gen_len"),
    "analysis": ("model", "series", "metric"),
    "capacity": ("model", "label", "batch_size", "prompt_len", "gen_len"),
    "board_texts": ("model", "label", "seq_len", "text", "window", "place", "kl_nats", "size"),
    "board_answers": ("model", "label", "task", "context_id", "right", "asked", "size"),
    "board_steps": ("model", "label", "batch_size", "prompt_len", "step_s", "size"),
    "board": ("model", "label", "asked_size", "seq_len"),
    "board_pairs": ("model", "label", "other", "asked_size", "seq_len", "ratio"),
    "board_models": ("model", "label", "domain", "measure", "value"),
    "board_claims": ("model", "claim", "measure", "asked_size", "verdict"),
}  # fmt: skip
"""By shape of table, the columns that no row of it leaves empty."""
IDENTITY = {
    "accuracy": ("model", "method", "label", "settings", "task"),
    "latency": (
        "model", "platform", "source", "method", "label", "settings",
        "batch_size", "prompt_len", "gen_len",
    ),
    "capacity": (
        "model", "platform", "source", "method", "label", "settings",
        "memory_bytes", "prompt_len", "gen_len",
    ),
    "analysis": ("model", "source", "metric", "series", "x_name", "num_samples"),
    "board_texts": (
        "model", "method", "codec", "label", "asked_size", "exempt_layers", "seq_len", "text",
    ),
    "board_answers": (
        "model", "method", "codec", "label", "asked_size", "exempt_layers", "task",
    ),
    "board_steps": (
        "model", "method", "codec", "label", "asked_size", "exempt_layers",
        "platform", "batch_size", "prompt_len",
    ),
}  # fmt: skip
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
SIZES = {"size", "device_frac", "resident_frac"}
"""Columns that are at most 1 beside an asked size. Elsewhere a codec of more than 16 bits has
more."""


def _optional() -> Iterator[str]:
    for column in (*OF_SOME_RUNS, REPEATS_STDERR, UNMET_SIZE, NUM_CONTEXTS, NUM_WINDOWS):
        yield column.name
    yield from names(NEWER_OF_SERVING)
    yield from (FAMILY.name, ATTENTION_ERROR.name, f"{ATTENTION_ERROR.name}_stderr")


def names(columns: Iterable[Metric]) -> tuple[str, ...]:
    """The header of a CSV of these columns."""
    return tuple(column.name for column in columns)


OPTIONAL = tuple(_optional())
"""Columns that a table may lack; an older table lacks the numbers of contexts, and what serving
engineers read beyond percentiles of a step."""


def renamed(row: Mapping[str, T]) -> dict[str, T]:
    """The values under the present names of columns."""
    return {RENAMED.get(name, name): value for name, value in row.items()}


def picked(row: Mapping[str, Any], names: Iterable[str]) -> TableRow:
    """The values of these columns; None for a column that the row lacks."""
    return {name: row.get(name) for name in names}


def values(rows: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """The values of one column."""
    return [row[name] for row in rows]


def headings(columns: Iterable[Metric]) -> list[str]:
    """The headings of columns, for people."""
    return [column.heading for column in columns]


def texts(columns: Iterable[Metric], row: TableRow) -> list[str]:
    """A row's numbers of these columns as text."""
    return [column.show(row.get(column.name)) for column in columns]


def having(rows: Iterable[R], *names: str) -> list[R]:
    """The rows that have a value in each of these columns."""
    found = []
    for row in rows:
        if all(row.get(name) is not None for name in names):
            found.append(row)
    return found


def with_values(columns: Iterable[Metric], rows: Sequence[TableRow]) -> list[Metric]:
    """The columns, each once, in which any row has a value."""
    distinct = dict.fromkeys(columns)
    return [column for column in distinct if having(rows, column.name)]


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
    return _EVERY.get(name, Metric(name))


MARKS = {
    "text": "board_texts", "context_id": "board_answers", "apart": "board",
    "claim": "board_claims", "closer": "board_pairs", "domain": "board_models",
    "series": "analysis", "metric": "accuracy",
    "compute_s": "board_steps", "largest_batch": "capacity",
}  # fmt: skip
"""By the first of these columns that a row has, its shape of table; by none, `latency`."""


def shape_of(names: Collection[str]) -> str:
    """The key of `TABLES` of a row with columns of these names."""
    for mark, shape in MARKS.items():
        if mark in names:
            return shape
    return "latency"


def _number(text: str) -> float | None:
    if not text:
        return None
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else float(text)


def typed(row: Mapping[str, str]) -> TableRow:
    """A line of a CSV as a table row; an empty number is None.

    A number without a point stays an int, so the row is written as it was read. One of very many
    digits is a float, or infinite, which `check` refuses. Raises ValueError for other words in a
    column of numbers.
    """
    found: TableRow = {}
    for name, text in row.items():
        found[name] = _words(text) if column(name).digits is None else _number(text)
    return found


FORMULA = re.compile(r"'*[=+\-@\t\r]")
"""How words begin that a spreadsheet takes for a formula. A CSV has them behind an apostrophe."""


def as_cell(words: str) -> str:
    """Words as a cell of a CSV that no spreadsheet computes."""
    return f"'{words}" if FORMULA.match(words) else words


def _words(cell: str) -> str:
    """The words that `as_cell` wrote."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


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
        lines.fieldnames = [RENAMED.get(name, name) for name in lines.fieldnames or ()]
        rows = list(lines)
        shape = shape_of(lines.fieldnames)
        has_all = {*lines.fieldnames, *OPTIONAL}.issuperset(names(TABLES[shape]))
        if has_all and not any(map(_has_other_length, rows)):
            table = [typed(row) for row in rows]
            check(TABLES[shape], table)
            _check_needed(NEEDED[shape], table)
            _check_once(ONCE.get(shape, ()), table)
            return table
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: {NO_TABLE} ({reason(error)}); {ANEW}") from error
    raise UserError(f"{path}: {NO_TABLE} (other columns, or a line of another length); {ANEW}")


def _has_other_length(row: Mapping[str | None, Any]) -> bool:
    """Whether a line was longer or shorter than the header, as `csv.DictReader` shows it."""
    return None in row or None in row.values()


def _check_needed(needed: Iterable[str], rows: Iterable[TableRow]) -> None:
    for row in rows:
        for name in needed:
            if row[name] in (None, ""):
                raise ValueError(f"a row without {name}")


def _check_once(key: Sequence[str], rows: Iterable[TableRow]) -> None:
    """Raise ValueError for two rows of one identity: the second would count twice."""
    found = set()
    for row in rows:
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
            if not is_word:
                unit = column.unit
                if column is VALUE and row.get("metric") in METRICS:
                    unit = METRICS[row["metric"]].unit
                if column.name in SIZES and "asked_size" in row:
                    unit = unit._replace(most=1)
                name = row["metric"] if column is VALUE and "metric" in row else column.name
                _check_range(name, value, unit)
        if (row.get("right") or 0) > row.get("asked", math.inf):
            raise ValueError(f"right={row['right']} of asked={row['asked']}")


def _check_range(name: str, value: float, unit: Unit) -> None:
    """Raise ValueError for a number that is outside of its unit's range."""
    if not unit.least - ROUNDING <= value <= unit.most + ROUNDING:
        raise ValueError(f"{name}={value:g}: must be from {unit.least:g} to {unit.most:g}")


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


def published_rows() -> list[dict[str, str]]:
    """The numbers that the paper gives."""
    with PUBLISHED_CSV.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


_EVERY = {column.name: column for columns in TABLES.values() for column in columns}

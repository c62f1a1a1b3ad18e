"""The columns of the tables, each told once: its name, how people read it, the factor to that unit, and the digits.

Whatever makes, shows or draws a table reads it here. The numbers that the paper gives are a table as well. One page
however long, so that all columns are seen together. Imports neither torch nor pandas.
"""

import csv
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TableRow = dict[str, Any]
"""A row by the names of its columns: numbers, words, or None where nothing was measured."""

PUBLISHED_CSV = Path(__file__).parent / "published.csv"
MISSING = "-"
MIB, GIB = 2**20, 2**30


class Column(NamedTuple):
    """A column, or the quantity that a metric names.

    heading: with the unit. factor: from what the table holds to that unit. digits: after the point; None for words.
    phrase: how a value reads within a sentence; "" where the sentence says it already.
    """

    name: str
    heading: str = ""
    factor: float = 1
    digits: int | None = None
    phrase: str = "{}"

    def show(self, value: float | None, stderr: float | None = None) -> str:
        """The number in this unit, without the sign of -0, with its standard error where there is one."""
        if value is None:
            return MISSING
        spread = "" if stderr is None else f" ± {self.factor * stderr:.{self.digits}f}"
        return f"{self.factor * value:z.{self.digits}f}{spread}"

    @property
    def words(self) -> str:
        """The heading without its unit."""
        return self.heading.partition(" (")[0]


EXPERIMENT, MODEL, METHOD, RUN_ID = (
    Column("experiment"),
    Column("model"),
    Column("method"),
    Column("run_id", phrase="run {}"),
)
PLATFORM = Column("platform")
SOURCE = Column("source", phrase="source: {}")
LABEL = Column("label", "label")
SETTINGS = Column("settings", "settings")
METRIC = Column("metric", phrase="")
VALUE = Column("value", "value", 1, 3)
STDERR = Column("stderr", "standard error", 1, 3)
DIFFERENCE = Column("difference", "less the full cache's", 1, 3)
DIFFERENCE_STDERR = Column("difference_stderr", "standard error of the difference", 1, 3)
DETECTABLE = Column("detectable", "smallest difference that would have been seen", 1, 3)
COMPARED = (
    DIFFERENCE, DIFFERENCE_STDERR,
    Column("mcnemar_p", "McNemar's p", 1, 4),
    Column("gained", "right, unlike the full cache", 1, 0),
    Column("lost", "wrong, unlike the full cache", 1, 0),
    DETECTABLE,
)  # fmt: skip
"""A value against the full cache's on the same questions or windows; empty where there is none."""
NUM_SAMPLES = Column("num_samples", "samples", 1, 0, "n = {:,.0f}")
NUM_FEWSHOT = Column("num_fewshot", "shots", 1, 0, "{:.0f}-shot")
SEQ_LEN = Column("seq_len", "length (tokens)", 1, 0, "{:,.0f} tokens")
SIZE = Column("size", "KV read (%)", 100, 1)
DEVICE_FRAC = Column("device_frac", "device read (%)", 100, 1)
RESIDENT_FRAC = Column("resident_frac", "on device (%)", 100, 1)
OF_SOME_MODELS = (
    Column("window_frac", "of it in windows (%)", 100, 1),
    Column("recurrent_bytes", "recurrent state (MiB)", 1 / MIB, 2),
    Column("latent_bytes", "latent of a token (KiB)", 1 / 1024, 2),
)
"""A table has them where one of its models has local layers, recurrent ones, or stores latents."""
DEVICE_READ_BYTES = Column("device_read_bytes", "device read (GiB)", 1 / GIB, 3)
DEVICE_KV_BYTES = Column("device_kv_bytes", "KV on device (MiB)", 1 / MIB, 1)
LAYER = Column("layer", "layer", 1, 0, "layer {:.0f}")
X_NAME = Column("x_name", phrase="")
BATCH_SIZE = Column("batch_size", "batch", 1, 0, "batch {:.0f}")
PROMPT_LEN = Column("prompt_len", "prompt", 1, 0, "prompt {:,.0f}")
LINK_BYTES_PER_S = Column("link_bytes_per_s", "link (GiB/s)", 1 / GIB, 2)
KL = Column("kl_nats", "KL (nats)", 1, 4)
TOP1 = Column("top1_agreement", "top-1 agreement (%)", 100, 1)

ACCURACY = (
    EXPERIMENT, MODEL, METHOD, LABEL, SETTINGS,
    Column("task"),
    METRIC, VALUE, STDERR, *COMPARED, NUM_SAMPLES, NUM_FEWSHOT, SEQ_LEN, SIZE,
    Column("size_artifact", "KV read as the artifact counts (%)", 100, 1),
    DEVICE_FRAC, RESIDENT_FRAC, *OF_SOME_MODELS, SOURCE, RUN_ID,
)  # fmt: skip
SEGMENTS = (
    Column("attention_s", "attention (ms)", 1e3, 3),
    Column("ffn_s", "FFN (ms)", 1e3, 3),
    Column("prediction_s", "prediction (ms)", 1e3, 3),
    Column("transfer_s", "transfer (ms)", 1e3, 3),
    Column("other_s", "other (ms)", 1e3, 3),
)
"""Seconds of one block in one decode step (Fig 18); transfer is the wait that no compute hides."""
WEIGHTS = (
    Column("weights_on_device", "weights on the device (%)", 100, 1),
    Column("weight_bytes", "weights to device (GiB)", 1 / GIB, 3),
)
"""Where weights are streamed: the share of the decoder layers' that stays there, and bytes over the link."""
LATENCY = (
    EXPERIMENT, PLATFORM, SOURCE, MODEL, METHOD, LABEL, SETTINGS,
    BATCH_SIZE, PROMPT_LEN,
    Column("gen_len", "generated", 1, 0, "{:,.0f} generated"),
    Column("prefill_s", "prefill (ms)", 1e3, 1),
    Column("decode_s", "decode (ms)", 1e3, 1),
    Column("total_s", "total (ms)", 1e3, 1),
    Column("tokens_per_s", "tokens/s", 1, 2),
    Column("step_p50_s", "step p50 (ms)", 1e3, 2),
    Column("step_p95_s", "step p95 (ms)", 1e3, 2),
    Column("h2d_bytes", "to device (GiB)", 1 / GIB, 3),
    Column("d2h_bytes", "to host (GiB)", 1 / GIB, 3),
    *WEIGHTS,
    DEVICE_READ_BYTES, DEVICE_KV_BYTES,
    Column("exposed_transfer_s", "exposed transfer (ms)", 1e3, 1),
    LINK_BYTES_PER_S,
    Column("peak_device_bytes", "device peak (GiB)", 1 / GIB, 3),
    SIZE, DEVICE_FRAC, RUN_ID, *SEGMENTS,
)  # fmt: skip
ANALYSIS = (
    EXPERIMENT, MODEL,
    Column("series"),
    LAYER, X_NAME,
    Column("x", "x", 1, 3),
    METRIC, VALUE, STDERR, NUM_SAMPLES, SOURCE, RUN_ID,
)  # fmt: skip
"""`value` of `series` at `x`, in the unit that `metric` says."""
ASKED_SIZE = Column("asked_size", "size asked (%)", 100, 0)
NLL = Column("nll_difference", "NLL less the full cache's (nats)", 1, 4)
BOARD_TASKS = (Column("kv_recall", "kv_recall (%)", 100, 1), Column("passkey", "passkey (%)", 100, 1))
COMPUTE, STEP = Column("compute_s", "compute (ms)", 1e3, 1), Column("step_s", "decode step (ms)", 1e3, 1)
LINK_BYTES = Column("link_bytes", "link a step (MiB)", 1 / MIB, 2)
LATE_BYTES = Column("late_bytes", "of which nothing hides (MiB)", 1 / MIB, 2)
STEP_SOURCE = Column("step_source")
FAMILY, CODEC = Column("family"), Column("codec")
FRONT = Column("front", "on the front of")


def _and(shown: Column, name: str, words: str) -> Column:
    """A further column of what `shown` is of."""
    return Column(f"{shown.name}_{name}", f"{shown.words}, {words}", shown.factor, shown.digits)


BOARD = (
    EXPERIMENT, MODEL, METHOD, CODEC, FAMILY, LABEL, SETTINGS, ASKED_SIZE, SIZE, DEVICE_FRAC, RESIDENT_FRAC,
    *(column for shown in (KL, TOP1, NLL) for column in (shown, _and(shown, "stderr", "standard error"))),
    *(
        column
        for task in BOARD_TASKS
        for column in (
            task, _and(task, "difference", DIFFERENCE.heading), _and(task, "stderr", "standard error of that"),
            _and(task, "detectable", DETECTABLE.heading), _and(task, "size", "KV read"),
        )
    ),
    PLATFORM, BATCH_SIZE, PROMPT_LEN, COMPUTE, LINK_BYTES, LATE_BYTES, LINK_BYTES_PER_S, STEP, STEP_SOURCE,
    FRONT, SOURCE,
)  # fmt: skip
"""All that was measured of a method at a size. Seconds and bytes are of a decode step; `step_source` says of `step_s`
whether it was timed at this size or follows from the other size's (`harness.tables.frontier`)."""
TABLES: Mapping[str, Sequence[Column]] = {
    "accuracy": ACCURACY, "latency": LATENCY, "analysis": ANALYSIS, "board": BOARD,
}  # fmt: skip
"""The shapes of table; a record says in `table` which is its own."""
OPTIONAL = (
    *(column.name for column in (SETTINGS, *COMPARED, DEVICE_FRAC, RESIDENT_FRAC, DEVICE_READ_BYTES, DEVICE_KV_BYTES)),
    *(column.name for column in (*WEIGHTS, *OF_SOME_MODELS)),
    *(f"{task.name}_{DETECTABLE.name}" for task in BOARD_TASKS),
)
"""Columns that a table may lack: those of some models, and those that an older version did not write."""
FORMER_NAMES = {"device_bytes": DEVICE_KV_BYTES.name}
"""What an older version's records and tables call a column."""

METRICS = {
    metric.name: metric
    for metric in (
        Column("acc", "acc (%)", 100, 1),
        Column("acc_norm", "acc_norm (%)", 100, 1),
        Column("exact_match", "exact_match (%)", 100, 1),
        Column("perplexity", "perplexity", 1, 3),
        Column("perplexity_full", "full cache's perplexity", 1, 3),
        KL,
        TOP1,
        Column("attention_recall", "attention recall (%)", 100, 1),
        Column("text_perplexity", "the full cache's perplexity of the text", 1, 3),
        Column("text_perplexity_full", "the full cache's perplexity of its own text", 1, 3),
        Column("text_nll_difference", "NLL of the text less that of the full cache's text (nats)", 1, 4),
        Column("first_divergence", "tokens before the texts part", 1, 1),
        Column("never_diverged", "texts that never part", 1, 0),
        Column("repetition", "repeated 4-grams (%)", 100, 1),
        Column("repetition_full", "full cache's repeated 4-grams (%)", 100, 1),
        Column("repetition_difference", "repeated 4-grams less the full cache's (points)", 100, 1),
        Column("bytes", "GiB", 1 / GIB, 2),
        Column("cosine_similarity", "cosine similarity", 1, 3),
        Column("key_tokens_for_0.9", "key tokens for 0.9 of the attention weight", 1, 1),
        Column("share_of_queries", "queries (%)", 100, 1),
        Column("share_of_sparse_queries", "queries that attend to < 1 % of the keys (%)", 100, 1),
        Column("attention_weight", "attention weight (%)", 100, 3),
        Column("query_magnitude", "mean magnitude of a column of Q", 1, 3),
        Column("key_magnitude", "mean magnitude of a column of K", 1, 3),
    )
}
"""What `value` is, by `metric`, in the order in which people read them."""


WITHOUT_SKEWING = " without skewing"
"""The end of a label."""
SETTING_LABEL = r"^(?P<setting>\w+)=(?P<x>[\d.]+)$"
KEPT_LABEL = r"^(?P<name>.+) with (?P<kept>\d+) tokens$"
CHUNK_TASK = r"^(?P<corpus>.*)\[(?P<start>\d+):(?P<end>\d+)\]$"
NEEDLE_TASK = r"^(?P<needle>.+)\[(?P<length>\d+), (?P<begin>\d+)-(?P<end>\d+) %\]$"
"""What a label or a task of some figures says: the setting that is varied, the tokens kept, the tokens of a text or the
depths of a needle that a score is of."""
SWEPT = {"alpha": "alpha (scaled logits)", "partial_weight_ratio": "partial weight ratio"}
"""Settings of `SETTING_LABEL` as an axis says them."""


def quantity(metric: str) -> Column:
    """How the values of a metric read: one with a filter, such as `exact_match,strict-match`, as without it; RULER's is
    named by a length in tokens; any other stands as it is."""
    if metric.isdecimal():
        return Column(metric, f"right at {int(metric):,} tokens (%)", 100, 1)
    name, _, filtered = metric.partition(",")
    if name not in METRICS:
        return Column(metric, metric.replace(",", ", "), 1, 3)
    known = METRICS[name]
    heading = known.heading.replace(known.words, f"{known.words}, {filtered}") if filtered else known.heading
    return known._replace(name=metric, heading=heading)


def rank(metric: str) -> tuple[int, int, str]:
    """The order of metrics: as `METRICS` lists them, RULER's by length, then the others by name."""
    known = [*METRICS, metric.partition(",")[0]]
    return (known.index(known[-1]), int(metric) if metric.isdecimal() else sys.maxsize, metric)


def names(columns: Sequence[Column]) -> tuple[str, ...]:
    """The header of a CSV of these columns."""
    return tuple(column.name for column in columns)


def has_any(rows: Iterable[TableRow], column: Column) -> bool:
    """Whether any row has something in a column."""
    return any(row.get(column.name) is not None for row in rows)


def column(name: str) -> Column:
    """The column of this name, whatever table it is of; one of the user's own has a name alone."""
    return _EVERY.get(name, Column(name))


def shape_of(header: Sequence[str]) -> str | None:
    """Which of `TABLES` has this header; None for another file."""
    fitting = (shape for shape, columns in TABLES.items() if {*names(columns)} <= {*header, *OPTIONAL})
    return next(fitting, None)


def typed(row: Mapping[str, str]) -> TableRow:
    """A line of a CSV as the row that it was made of: an empty cell of a number is None. Raises ValueError for a cell
    that should be a number and is none."""
    named = todays_names(row).items()
    return {name: text if column(name).digits is None else float(text) if text else None for name, text in named}


def check(columns: Sequence[Column], rows: Iterable[TableRow]) -> None:
    """Raise ValueError for a cell of words where a number should stand, or the reverse, and for an infinite number."""
    for row in rows:
        for column in columns:
            value, is_word = row.get(column.name), column.digits is None
            if value is not None and (isinstance(value, str) != is_word or not (is_word or math.isfinite(value))):
                raise ValueError(f"{column.name}={value!r}"[:60])


def todays_names(row: Mapping[str, Any]) -> TableRow:
    """A row of an older version by the names that columns have today."""
    return {FORMER_NAMES.get(name, name): value for name, value in row.items()}


def published_rows() -> list[dict[str, str]]:
    """All that the paper is known to say, as it stands in `PUBLISHED_CSV`."""
    with PUBLISHED_CSV.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


_EVERY = {column.name: column for columns in TABLES.values() for column in columns}

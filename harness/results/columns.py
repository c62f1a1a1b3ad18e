"""All columns of the tables: name, heading, unit and digits; and their CSV files, read and written.

Code that makes, shows or draws a table reads the columns here. A new metric of the leaderboard is
one entry of `BOARD_METRICS`. The numbers that the paper gives are a table as well. Imports neither
torch nor pandas.
"""

import csv
import io
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from harness.errors import UserError, reason

T = TypeVar("T")
K = TypeVar("K")
R = TypeVar("R", bound=Mapping[str, Any])
TableRow = dict[str, Any]
"""A table row by column name: numbers, words, or None where nothing was measured."""

MAX_DIGITS = 18
"""Digits of an integer in a table: it fits into 64 bits."""
PUBLISHED_CSV = Path(__file__).parent / "published.csv"
MISSING = "-"
MIB, GIB = 2**20, 2**30


class Column(NamedTuple):
    """A column, or the quantity of a metric.

    heading: with the unit. factor: from the table's unit to the heading's. digits: after the point;
    None for words. phrase: a value within a sentence; "" to leave it out.
    """

    name: str
    heading: str = ""
    factor: float = 1
    digits: int | None = None
    phrase: str = "{}"

    def show(self, value: float | None, stderr: float | None = None) -> str:
        """The number in the heading's unit, never as -0, and its standard error if given."""
        if value is None:
            return MISSING
        spread = "" if stderr is None else f" ± {self.factor * stderr:.{self.digits}f}"
        return f"{self.factor * value:z.{self.digits}f}{spread}"

    @property
    def words(self) -> str:
        """The heading without its unit."""
        return self.heading.partition(" (")[0]


EXPERIMENT, MODEL, METHOD = Column("experiment"), Column("model"), Column("method")
PLATFORM, SOURCE = Column("platform"), Column("source", phrase="source: {}")
RUN_ID = Column("run_id", phrase="run {}")
SHIPPED = Column("shipped")
"""`yes` for a row that came with the project; empty for one's own runs (`results/shipped.py`)."""
LABEL, SETTINGS = Column("label", "label"), Column("settings", "settings")
METRIC, X_NAME = Column("metric", phrase=""), Column("x_name", phrase="")
VALUE, STDERR = Column("value", "value", 1, 3), Column("stderr", "standard error", 1, 3)
COMPARED = (
    Column("difference", "minus full cache", 1, 3),
    Column("difference_stderr", "standard error of the difference", 1, 3),
    Column("mcnemar_p", "McNemar's p", 1, 4),
    Column("gained", "right, full cache wrong", 1, 0),
    Column("lost", "wrong, full cache right", 1, 0),
    Column("detectable", "smallest detectable difference", 1, 3),
)
"""Difference to the full cache on the same questions or windows."""
NUM_SAMPLES = Column("num_samples", "samples", 1, 0, "n = {:,.0f}")
NUM_CONTEXTS = Column("num_contexts", "contexts", 1, 0)
"""Windows, prompts, or contexts of questions, whose errors are independent: one more than the
degrees of freedom of the standard errors."""
NUM_FEWSHOT = Column("num_fewshot", "shots", 1, 0, "{:.0f}-shot")
SEQ_LEN = Column("seq_len", "length (tokens)", 1, 0, "{:,.0f} tokens")
SIZE = Column("size", "size (%)", 100, 1)
"""Share of the full cache that a decode step reads. Under offloading it crosses the link."""
UNMET_SIZE = Column("unmet_size", "size asked for (%)", 100, 1)
"""The size that was asked for, where the run's own differs from it by more than a tenth."""
DEVICE_FRAC = Column("device_frac", "read on device (%)", 100, 1)
RESIDENT_FRAC = Column("resident_frac", "kept on device (%)", 100, 1)
TOKENS_EVICTED = Column("tokens_evicted", "tokens evicted", 1, 1)
"""Cached tokens that a KV head no longer holds at a decode row, of a method that evicts. 0: its
budget never bites."""
OF_SOME_RUNS = (
    TOKENS_EVICTED,
    Column("link_frac", "over the link (%)", 100, 1),
    Column("hit_frac", "found on device (%)", 100, 1),
    Column("window_frac", "whole cache in local windows (%)", 100, 1),
    Column("recurrent_bytes", "recurrent state (MiB)", 1 / MIB, 2),
    Column("latent_bytes", "latent per token (KiB)", 1 / 1024, 2),
)
"""Columns of tables with runs of a method that evicts, or in which rows stay on the device, or
whose models have local layers, recurrent layers or latents."""
REPEATS_STDERR = Column("repeats_stderr", "standard error over repeats", 1, 3)
"""Of a mean over several answers to each question: its standard error over repeats of the same
questions."""
LAYER = Column("layer", "layer", 1, 0, "layer {:.0f}")
BATCH_SIZE = Column("batch_size", "batch", 1, 0, "batch {:.0f}")
PROMPT_LEN = Column("prompt_len", "prompt", 1, 0, "prompt {:,.0f}")
GEN_LEN = Column("gen_len", "generated", 1, 0, "{:,.0f} generated")
LINK_BYTES_PER_S = Column("link_bytes_per_s", "link (GiB/s)", 1 / GIB, 2)
KL = Column("kl_nats", "KL (nats)", 1, 4)
TOP1 = Column("top1_agreement", "top-1 agreement (%)", 100, 1)
ATTENTION_ERROR = Column("attention_error", "attention error (%)", 100, 1)
ATTENTION_ERROR_P95 = Column("attention_error_p95", "attention error, p95 (%)", 100, 1)

ACCURACY = (
    EXPERIMENT, MODEL, METHOD, LABEL, SETTINGS,
    Column("task"),
    METRIC, VALUE, STDERR, *COMPARED,
    NUM_SAMPLES, NUM_CONTEXTS, NUM_FEWSHOT, SEQ_LEN, SIZE, UNMET_SIZE,
    Column("size_artifact", "size as the artifact counts it (%)", 100, 1),
    DEVICE_FRAC, RESIDENT_FRAC, *OF_SOME_RUNS, REPEATS_STDERR, SOURCE, SHIPPED, RUN_ID,
)  # fmt: skip
SEGMENTS = (
    Column("attention_s", "attention (ms)", 1e3, 3),
    Column("ffn_s", "FFN (ms)", 1e3, 3),
    Column("prediction_s", "prediction (ms)", 1e3, 3),
    Column("transfer_s", "transfer (ms)", 1e3, 3),
    Column("other_s", "other (ms)", 1e3, 3),
)
"""Seconds of one block in one decode step (Fig 18); transfer is the time that no compute hides."""
OF_DECODING = (
    Column("decode_tokens_per_s", "decode tokens/s", 1, 2),
    Column("sequence_tokens_per_s", "tokens/s of a sequence", 1, 2),
)
OF_SPREAD = (
    Column("tpot_p99_s", "TPOT p99 (ms)", 1e3, 2),
    Column("tpot_std_s", "TPOT std (ms)", 1e3, 2),
    Column("ttft_spread_s", "TTFT std over repeats (ms)", 1e3, 1),
    Column("tpot_spread_s", "TPOT std over repeats (ms)", 1e3, 2),
)
HOST_KV_BYTES = Column("host_kv_bytes", "KV in host memory (MiB)", 1 / MIB, 1)
OF_LINK = (
    Column("link_utilisation", "link busy (%)", 100, 1),
    Column("hit_rate", "hit rate (%)", 100, 1),
)
OF_DISK = (
    Column("disk_read_bytes", "read from disk (GiB)", 1 / GIB, 3),
    Column("read_amplification", "bytes read / bytes of rows", 1, 2),
    Column("disk_kv_bytes", "KV on disk (MiB)", 1 / MIB, 1),
)
OF_SERVING = (*OF_DECODING, *OF_SPREAD, HOST_KV_BYTES, *OF_LINK)
NEWER_OF_LATENCY = (*OF_SERVING, *OF_DISK)
"""The columns of a latency table that an older one lacks."""
LATENCY = (
    EXPERIMENT, PLATFORM, SOURCE, MODEL, METHOD, LABEL, SETTINGS,
    BATCH_SIZE, PROMPT_LEN,
    GEN_LEN,
    Column("ttft_s", "TTFT (ms)", 1e3, 1),
    Column("decode_s", "decode (ms)", 1e3, 1),
    Column("total_s", "total (ms)", 1e3, 1),
    Column("tokens_per_s", "tokens/s", 1, 2),
    *OF_DECODING,
    Column("tpot_p50_s", "TPOT p50 (ms)", 1e3, 2),
    Column("tpot_p95_s", "TPOT p95 (ms)", 1e3, 2),
    *OF_SPREAD,
    Column("h2d_bytes", "to device (GiB)", 1 / GIB, 3),
    Column("d2h_bytes", "to host (GiB)", 1 / GIB, 3),
    *OF_DISK,
    Column("weights_on_device", "weights on the device (%)", 100, 1),
    Column("weight_bytes", "weights to device (GiB)", 1 / GIB, 3),
    Column("device_read_bytes", "read on device (GiB)", 1 / GIB, 3),
    HOST_KV_BYTES,
    Column("device_kv_bytes", "KV on device (MiB)", 1 / MIB, 1),
    *OF_LINK,
    Column("exposed_transfer_s", "exposed transfer (ms)", 1e3, 1),
    LINK_BYTES_PER_S,
    Column("peak_device_bytes", "device peak (GiB)", 1 / GIB, 3),
    SIZE, UNMET_SIZE, DEVICE_FRAC, TOKENS_EVICTED, SHIPPED, RUN_ID, *SEGMENTS,
)  # fmt: skip
"""`harness.results.step_stats` and `harness.speed.timed_run` define the columns."""
RENAMED = {"prefill_s": "ttft_s", "step_p50_s": "tpot_p50_s", "step_p95_s": "tpot_p95_s"}
"""Columns of latency tables and records by their former names, under which they are still read."""
CAPACITY = (
    EXPERIMENT, PLATFORM, SOURCE, MODEL, METHOD, LABEL, SETTINGS,
    BATCH_SIZE, PROMPT_LEN, GEN_LEN,
    Column("context", "context", 1, 0, "{:,.0f} tokens each"),
    Column("memory_bytes", "device memory (GiB)", 1 / GIB, 2, ""),
    Column("largest_batch", "sequences that fit", 1, 0),
    Column("kv_tokens", "KV tokens", 1, 0),
    Column("wall"),
    Column("decode_tokens_per_s", "tokens/s", 1, 2),
    Column("sequence_tokens_per_s", "tokens/s of a sequence", 1, 2),
    Column("tpot_p50_s", "TPOT p50 (ms)", 1e3, 2),
    Column("num_timed_steps", "timed steps", 1, 0),
    Column("equal_batch", "equal batch", 1, 0),
    Column("equal_tokens_per_s", "tokens/s at the equal batch", 1, 2),
    Column("model_bytes", "weights (GiB)", 1 / GIB, 3),
    Column("row_bytes", "rows on device (MiB)", 1 / MIB, 1),
    Column("buffer_bytes", "buffers (MiB)", 1 / MIB, 1),
    Column("state_bytes", "state (MiB)", 1 / MIB, 1),
    Column("workspace_bytes", "activations (MiB)", 1 / MIB, 1),
    Column("device_kv_bytes", "KV on device (MiB)", 1 / MIB, 1),
    Column("host_kv_bytes", "KV on host (GiB)", 1 / GIB, 3),
    SIZE, UNMET_SIZE, SHIPPED, RUN_ID,
)  # fmt: skip
"""A batch of a method on a device of `memory_bytes`. `largest_batch` fits; `wall` is the bound that
one sequence more breaks. `equal_batch` is the largest of the full cache on the device; its rate
stands in the row of the largest batch. Bytes are of the row's batch; of one sequence where none
fits (`batch_size` 0)."""
ANALYSIS = (
    EXPERIMENT, MODEL, Column("series"), LAYER, X_NAME, Column("x", "x", 1, 3),
    METRIC, VALUE, STDERR, NUM_SAMPLES, SOURCE, SHIPPED, RUN_ID,
)  # fmt: skip
"""`value` of `series` at `x`, in the unit of `metric`."""
ASKED_SIZE = Column("asked_size", "asked size (%)", 100, 0)
EXEMPT_LAYERS = Column("exempt_layers", "exempt layers", 1, 0)
EXEMPT_CHOICE = Column("exempt_choice")
NUM_WINDOWS = Column("num_windows", "windows", 1, 0)
STEP = Column("step_s", "decode step (ms)", 1e3, 1)
STEP_SOURCE = Column("step_source")
FRONT = Column("front", "not beaten in")
PARTS: Mapping[str, Mapping[str, str]] = {
    "size": {},
    "text": {"stderr": "standard error"},
    "task": {
        "difference": "minus full cache",
        "stderr": "standard error of that",
        "detectable": "smallest detectable difference",
        "size": "size",
        NUM_CONTEXTS.name: "contexts",
    },
    "step": {},
}
"""Further columns of a metric of the leaderboard, by its origin: the end of the name, in words."""


class BoardMetric(NamedTuple):
    """A metric of the leaderboard: its column, and where it is shown and compared.

    origin: "size" and "text": an entry of that name of a run on a text, "text" with its standard
        error; "task": accuracy on the task of that name; "step": of a timed decode step.
    is_cost: an x axis of the report's explorer, else a y axis.
    more_is_better: the larger value is in bold, and better than a reference.
    on_page: a column of `leaderboard.md` and of the report's overview.
    compared: with the two reference methods (column `outside`), and between models in the report.
    logarithmic: the explorer's axis.
    front: the name of the cost's Pareto front; "" for none.
    is_new: the shipped tables were made without it, so a table may lack its columns.
    """

    column: Column
    origin: str
    is_cost: bool = False
    more_is_better: bool = False
    on_page: bool = False
    compared: bool = False
    logarithmic: bool = False
    front: str = ""
    is_new: bool = False

    @property
    def columns(self) -> tuple[Column, ...]:
        """Its columns in the table, the value first."""
        found = [self.column]
        for name, words in PARTS[self.origin].items():
            like = NUM_CONTEXTS if name == NUM_CONTEXTS.name else self.column
            heading = f"{self.column.words}, {words}"
            part = Column(f"{self.column.name}_{name}", heading, like.factor, like.digits)
            found.append(part)
        return tuple(found)


NLL = Column("nll_difference", "NLL minus full cache (nats)", 1, 4)
KV_RECALL = Column("kv_recall", "kv_recall (%)", 100, 1)
PASSKEY = Column("passkey", "passkey (%)", 100, 1)
BOARD_METRICS = (
    BoardMetric(SIZE, "size", is_cost=True, on_page=True, logarithmic=True, front="size"),
    BoardMetric(DEVICE_FRAC, "size", is_cost=True),
    BoardMetric(RESIDENT_FRAC, "size", is_cost=True),
    BoardMetric(KL, "text", on_page=True, compared=True, logarithmic=True),
    BoardMetric(TOP1, "text", more_is_better=True, compared=True),
    BoardMetric(ATTENTION_ERROR, "text", logarithmic=True, is_new=True),
    BoardMetric(NLL, "text"),
    BoardMetric(KV_RECALL, "task", more_is_better=True, on_page=True, compared=True),
    BoardMetric(PASSKEY, "task", more_is_better=True, on_page=True, compared=True),
    BoardMetric(STEP, "step", is_cost=True, on_page=True, logarithmic=True, front="step time"),
)
"""The metrics of the leaderboard, in the order of its columns. KL also sorts the pages."""


def board_metrics(*origins: str) -> list[BoardMetric]:
    """The metrics of the leaderboard with these origins."""
    return [metric for metric in BOARD_METRICS if metric.origin in origins]


def board_columns(*origins: str) -> Iterator[Column]:
    """All columns of the metrics with these origins."""
    for metric in board_metrics(*origins):
        yield from metric.columns


BOARD = (
    EXPERIMENT, MODEL, METHOD, Column("codec"), Column("family"), LABEL, SETTINGS,
    ASKED_SIZE, EXEMPT_LAYERS, EXEMPT_CHOICE,
    *board_columns("size", "text"), NUM_WINDOWS, *board_columns("task"),
    PLATFORM, BATCH_SIZE, PROMPT_LEN,
    Column("compute_s", "compute (ms)", 1e3, 1),
    Column("link_bytes", "link per step (MiB)", 1 / MIB, 2),
    Column("late_bytes", "of which not hidden (MiB)", 1 / MIB, 2),
    LINK_BYTES_PER_S, *board_columns("step"), STEP_SOURCE,
    FRONT, Column("outside", "outside the reference methods"), SOURCE, SHIPPED,
)  # fmt: skip
"""A method at a size. `exempt_choice`: whether the number of exempt layers is the best at this
size, the paper's, or both. Seconds and bytes are of a decode step. `step_source`: whether `step_s`
was timed at this size or modelled from the step at another size (`results/step_time.py`)."""
TEXT, WINDOW = Column("text"), Column("window", "window", 1, 0)
PLACE = Column("place", "place in the text (%)", 100, 1)
"""Share of a text before a window: equal places of a text are about the same words on every
model."""
CONTEXT_ID = Column("context_id", "context", 1, 0)
RIGHT, ASKED = Column("right", "right answers", 1, 1), Column("asked", "questions", 1, 0)
_OF_A_RUN = (
    EXPERIMENT, MODEL, METHOD, Column("codec"), LABEL, SETTINGS, ASKED_SIZE, EXEMPT_LAYERS,
)  # fmt: skip
_READ = (SIZE, DEVICE_FRAC, RESIDENT_FRAC, SOURCE, SHIPPED, RUN_ID)
EVIDENCE_TEXTS = (*_OF_A_RUN, SEQ_LEN, TEXT, WINDOW, PLACE, KL, *_READ)
"""A window of a text under a method. The sizes on the device are of all windows of its run."""
EVIDENCE_ANSWERS = (*_OF_A_RUN, Column("task"), CONTEXT_ID, RIGHT, ASKED, PROMPT_LEN, *_READ)
"""The questions on one context of a task under a method. `prompt_len`: of the longest."""
RATIO = Column("ratio", "KL / oracle's", 1, 2)
ANSWERS = Column("answers", "right answers (%)", 100, 1)
ANSWERS_DIFFERENCE = Column("answers_difference", "answers minus full cache (points)", 100, 1)
NUM_QUESTIONS = Column("num_questions", "questions", 1, 0)
NUM_MODELS, NUM_PLACES = Column("num_models", "models", 1, 0), Column("num_places", "places", 1, 0)
APART = Column("apart", "why it is not compared")
DOMAIN, MEASURE = Column("domain", "domain"), Column("measure")
DEGREES = Column("degrees", "degrees of freedom", 1, 0)
OTHER = Column("other", "other method")
P, P_HOLM = Column("p", "p", 1, 4), Column("p_holm", "p after Holm's correction", 1, 4)
CLAIM, VERDICT = Column("claim", "claim"), Column("verdict")
VERSUS = Column("versus", "ratio to the oracle, or minus the full cache", 1, 3)
COUNT = Column("count", "windows or questions", 1, 0)
BOUND = Column("bound", "bound", 1, 3)
RANK = Column("rank", "rank", 1, 0)


def _interval(column: Column) -> tuple[Column, Column]:
    """The ends of the 95 % interval of a column."""
    ends = []
    for end, words in (("low", "from"), ("high", "to")):
        heading = f"{column.words}, {words}"
        ends.append(Column(f"{column.name}_{end}", heading, column.factor, column.digits))
    return ends[0], ends[1]


ACROSS = (
    MODEL, METHOD, LABEL, ASKED_SIZE, SEQ_LEN, RANK, *_interval(RANK),
    Column("num_compared", "methods compared", 1, 0),
    KL, RATIO, *_interval(RATIO), DEGREES, NUM_MODELS, NUM_WINDOWS, NUM_PLACES,
    ANSWERS, ANSWERS_DIFFERENCE, *_interval(ANSWERS_DIFFERENCE), NUM_QUESTIONS, NUM_CONTEXTS,
    Column("answers_note"),
    *_interval(SIZE), *_interval(DEVICE_FRAC), *_interval(RESIDENT_FRAC),
    Column("exempt_numbers", "exempt layers"), APART, SOURCE, SHIPPED,
)  # fmt: skip
"""A method at a size and a length, over `model`, the names of all models. `kl_nats` is the
geometric mean over its windows, `ratio` that of its KL to the oracle's. `rank_low` and `rank_high`
are the places that it may have. `_low` and `_high` of `ratio` and `answers_difference` are 95 %
intervals, of sizes the least and the largest of the models. `apart` says why a method has no
rank."""
ACROSS_PAIRS = (
    MODEL, ASKED_SIZE, SEQ_LEN, LABEL, OTHER, RATIO, *_interval(RATIO), DEGREES, P, P_HOLM,
    Column("closer"), SOURCE,
)  # fmt: skip
"""Two methods: `ratio` is that of the KL of `label` to that of `other`. `closer` is the label of
the one that is certainly closer to the full cache; empty where they are not told apart."""
ACROSS_MODELS = (
    MODEL, METHOD, LABEL, ASKED_SIZE, SEQ_LEN, DOMAIN, MEASURE, VALUE,
    VERSUS, *_interval(VERSUS), COUNT, NUM_CONTEXTS, SOURCE,
)  # fmt: skip
"""A method on a model (or all models) and a domain, which is a text, a task, or all of them.
`value`: mean KL in nats, or the share of right answers. `versus`: the ratio to the oracle's KL,
or the difference to the full cache's answers, with its interval. `count`: windows or questions;
`num_contexts`: places or contexts."""
ACROSS_CLAIMS = (
    MODEL, CLAIM, MEASURE, LABEL, OTHER, ASKED_SIZE, SEQ_LEN,
    BOUND, VALUE, *_interval(VALUE), COUNT, VERDICT, SOURCE,
)  # fmt: skip
"""A claim on a model, or on all of them together. `value`: the ratio of the two methods' KL, or the
difference of their answers; `bound`: the largest ratio or the least difference that the claim
allows."""
TABLES: Mapping[str, Sequence[Column]] = {
    "accuracy": ACCURACY, "latency": LATENCY, "analysis": ANALYSIS, "board": BOARD,
    "capacity": CAPACITY, "evidence_texts": EVIDENCE_TEXTS, "evidence_answers": EVIDENCE_ANSWERS,
    "across": ACROSS, "across_pairs": ACROSS_PAIRS, "across_models": ACROSS_MODELS,
    "across_claims": ACROSS_CLAIMS,
}  # fmt: skip
"""The shapes of table. The field `table` of a record names its own."""
NEEDED = {
    "accuracy": ("model", "label", "task", "metric"),
    "latency": ("model", "label", "batch_size", "prompt_len", "gen_len"),
    "analysis": ("model", "series", "metric"),
    "board": ("model", "label"),
    "capacity": ("model", "label", "batch_size", "prompt_len", "gen_len"),
    "evidence_texts": ("model", "label", "seq_len", "text", "window", "place", "kl_nats", "size"),
    "evidence_answers": ("model", "label", "task", "context_id", "right", "asked", "size"),
    "across": ("model", "label", "asked_size", "seq_len"),
    "across_pairs": ("model", "label", "other", "asked_size", "seq_len", "ratio"),
    "across_models": ("model", "label", "domain", "measure", "value"),
    "across_claims": ("model", "claim", "measure", "asked_size", "verdict"),
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
    "board": ("model", "method", "codec", "label", "asked_size", "exempt_layers"),
    "evidence_texts": (
        "model", "method", "codec", "label", "asked_size", "exempt_layers", "seq_len", "text",
    ),
    "evidence_answers": (
        "model", "method", "codec", "label", "asked_size", "exempt_layers", "task",
    ),
}  # fmt: skip
"""Columns that identify what was measured, by shape of table. A chunk or a depth has the identity
of its task."""

ONCE = {
    "board": (*IDENTITY["board"], "settings", "size", "exempt_choice"),
    "evidence_texts": (*IDENTITY["evidence_texts"], "window"),
    "evidence_answers": (*IDENTITY["evidence_answers"], "context_id"),
}
"""By shape of table, the columns in which no two rows are equal."""
ROUNDING = 1e-6
"""By so much a share or a KL may lie outside of its range."""
SHARES = {
    "asked_size", "unmet_size", "hit_frac", "window_frac", "hit_rate", "link_utilisation", "place",
    "top1_agreement", "answers", "acc", "acc_norm", "kv_recall", "passkey", "p", "p_holm",
    "mcnemar_p",
}  # fmt: skip
"""Columns and metrics from 0 to 1."""
SIZES = {"size", "device_frac", "resident_frac", "kv_recall_size", "passkey_size"}
"""Columns from 0 on, and at most 1 beside an asked size. Elsewhere a codec of more than 16 bits has
more."""
NOT_NEGATIVE = re.compile(
    r"kl_nats|perplexity.*|.*stderr|.*detectable|(.*_)?num_.*|count|degrees|.*_s|.*_bytes|.*_per_s"
    r"|right|window|context_id|seq_len|context|(largest_|equal_)?batch(_size)?|kv_tokens|prompt_len"
    r"|gen_len|exempt_layers|attention_error.*|tokens_evicted|gained|lost|read_amplification"
    r"|(ratio|rank|size|device_frac|resident_frac)(_low|_high|_artifact)?"
)
"""Columns and metrics from 0 on."""
DIFFERENCES = {f"{name}_difference" for name in ("answers", "kv_recall", "passkey")}
"""Differences of two shares: from -1 to 1."""


def _optional() -> Iterator[str]:
    for column in (*OF_SOME_RUNS, REPEATS_STDERR, UNMET_SIZE, NUM_CONTEXTS, NUM_WINDOWS):
        yield column.name
    yield from names(NEWER_OF_LATENCY)
    for metric in BOARD_METRICS:
        if metric.origin == "task":
            yield f"{metric.column.name}_{NUM_CONTEXTS.name}"
        if metric.is_new:
            yield from names(metric.columns)


def names(columns: Iterable[Column]) -> tuple[str, ...]:
    """The header of a CSV of these columns."""
    return tuple(column.name for column in columns)


OPTIONAL = tuple(_optional())
"""Columns that a table may lack; an older table lacks the numbers of contexts, and what serving
engineers read beyond percentiles of a step."""

_QUANTITIES = (
    Column("acc", "acc (%)", 100, 1),
    Column("acc_norm", "acc_norm (%)", 100, 1),
    Column("exact_match", "exact_match (%)", 100, 1),
    Column("known_size", "size where the question is known (%)", 100, 1),
    Column("generated_tokens", "generated (tokens)", 1, 1),
    Column("at_limit", "answers at the limit of tokens (%)", 100, 1),
    Column("perplexity", "perplexity", 1, 3),
    Column("perplexity_full", "full cache's perplexity", 1, 3),
    KL,
    TOP1,
    Column("attention_recall", "attention recall (%)", 100, 1),
    ATTENTION_ERROR,
    ATTENTION_ERROR_P95,
    Column("text_perplexity", "text perplexity under the full cache", 1, 3),
    Column("text_perplexity_full", "full cache's text perplexity under itself", 1, 3),
    Column("text_nll_difference", "text NLL minus that of the full cache's text (nats)", 1, 4),
    Column("first_divergence", "equal tokens before the texts differ", 1, 1),
    Column("never_diverged", "texts that never differ", 1, 0),
    Column("repetition", "repeated 4-grams (%)", 100, 1),
    Column("repetition_full", "full cache's repeated 4-grams (%)", 100, 1),
    Column("repetition_difference", "repeated 4-grams minus full cache (points)", 100, 1),
    Column("bytes", "GiB", 1 / GIB, 2),
    Column("cosine_similarity", "cosine similarity", 1, 3),
    Column("key_tokens_for_0.9", "key tokens for 0.9 of the attention weight", 1, 1),
    Column("share_of_queries", "queries (%)", 100, 1),
    Column("share_of_sparse_queries", "queries that attend to < 1 % of the keys (%)", 100, 1),
    Column("attention_weight", "attention weight (%)", 100, 3),
    Column("query_magnitude", "mean magnitude of a column of Q", 1, 3),
    Column("key_magnitude", "mean magnitude of a column of K", 1, 3),
)
METRICS = {metric.name: metric for metric in _QUANTITIES}
"""The quantities of `value` by `metric`, in the order of the pages."""


WAYS = {
    "unknown": "question unknown",
    "known": "question known",
    "unknown_less_known": "unknown less known",
}
"""What stands before a metric of `kind=turns`, as in `known,acc`, in words."""


def quantity(metric: str) -> Column:
    """The column for a metric's values.

    A filter, as in `exact_match,strict-match`, is added to the heading, and so are pass@k and one
    of `WAYS`. RULER's metrics are lengths in tokens. An unknown metric is its own heading.
    """
    name, _, filtered = metric.partition(",")
    if name in WAYS:
        of_way = quantity(filtered)
        heading = of_way.heading.replace(of_way.words, f"{of_way.words}, {WAYS[name]}")
        return of_way._replace(name=metric, heading=heading)
    name, _, num_answers = name.partition("_pass@")
    if name.isdecimal():
        known = Column(name, f"right at {int(name):,} tokens (%)", 100, 1)
    elif name in METRICS:
        known = METRICS[name]
    else:
        known = Column(name, name, 1, 3)
    words = known.words
    if num_answers:
        words += f", pass@{num_answers}"
    if filtered:
        words += f", {filtered}"
    return known._replace(name=metric, heading=known.heading.replace(known.words, words))


def rank(metric: str) -> tuple[int, int, str]:
    """Sort key of metrics: as in `METRICS`, then RULER's by length, then the others by name."""
    way, _, of_way = metric.partition(",")
    if way in WAYS:
        place, length, name = rank(of_way)
        return place, length, f"{name} {[*WAYS].index(way)}"
    known = [*METRICS, way]
    length = int(metric) if metric.isdecimal() else sys.maxsize
    return known.index(way), length, metric


def renamed(row: Mapping[str, T]) -> dict[str, T]:
    """The values under the present names of columns."""
    return {RENAMED.get(name, name): value for name, value in row.items()}


def picked(row: Mapping[str, Any], names: Iterable[str]) -> TableRow:
    """The values of these columns; None for a column that the row lacks."""
    return {name: row.get(name) for name in names}


def values(rows: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """The values of one column."""
    return [row[name] for row in rows]


def headings(columns: Iterable[Column]) -> list[str]:
    """The headings of columns, for people."""
    return [column.heading for column in columns]


def texts(columns: Iterable[Column], row: TableRow) -> list[str]:
    """A row's numbers of these columns as text."""
    return [column.show(row.get(column.name)) for column in columns]


def having(rows: Iterable[R], *names: str) -> list[R]:
    """The rows that have a value in each of these columns."""
    found = []
    for row in rows:
        if all(row.get(name) is not None for name in names):
            found.append(row)
    return found


def with_values(columns: Iterable[Column], rows: Sequence[TableRow]) -> list[Column]:
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


def column(name: str) -> Column:
    """The column of this name in any table; a user's own column has only a name."""
    return _EVERY.get(name, Column(name))


def shape_of(header: Sequence[str]) -> str | None:
    """The key of `TABLES` with this header; None for another file."""
    known = {*header, *OPTIONAL}
    for shape, columns in TABLES.items():
        if known.issuperset(names(columns)):
            return shape
    return None


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
        shape = shape_of(lines.fieldnames or ())
        if shape is not None and not any(map(_has_other_length, rows)):
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


def check(columns: Sequence[Column], rows: Iterable[TableRow]) -> None:
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
                name = row["metric"] if column is VALUE and "metric" in row else column.name
                _check_range(name, value, has_asked_size="asked_size" in row)
        if (row.get("right") or 0) > row.get("asked", math.inf):
            raise ValueError(f"right={row['right']} of asked={row['asked']}")


def _check_range(name: str, value: float, *, has_asked_size: bool) -> None:
    """Raise ValueError for a number that the column or metric `name` cannot have."""
    least, most = -math.inf, math.inf
    if name == "asked":
        least = 1
    elif name in DIFFERENCES:
        least, most = -1, 1
    elif name in SHARES or name in SIZES or NOT_NEGATIVE.fullmatch(name):
        least = 0
    if name in SHARES or (name in SIZES and has_asked_size):
        most = 1
    if not least - ROUNDING <= value <= most + ROUNDING:
        raise ValueError(f"{name}={value:g}: must be from {least:g} to {most:g}")


def render_csv(columns: Sequence[Column], rows: Sequence[TableRow]) -> str:
    """The rows under `columns` as CSV. Other keys, and columns of `OPTIONAL` without any value, are
    left out."""
    shown = [name for name in names(columns) if name not in OPTIONAL or having(rows, name)]
    text = io.StringIO()
    writer = csv.DictWriter(text, shown, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = {}
        for name in shown:
            value = row.get(name)
            cells[name] = as_cell(value) if isinstance(value, str) else value
        writer.writerow(cells)
    return text.getvalue()


def published_rows() -> list[dict[str, str]]:
    """The numbers that the paper gives."""
    with PUBLISHED_CSV.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


_EVERY = {column.name: column for columns in TABLES.values() for column in columns}

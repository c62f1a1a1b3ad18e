"""What is measured: each number once, with its unit, digits and heading.

Tables, pages, figures and the report read it here. A new number of a kind of run is one entry of
`SCORES`, `SERVING` or `ANALYSES` and the number under this name where the kind measures it. One
that is not here stands in tables too, under its own name with three digits. Imports neither torch
nor pandas.
"""

import math
import sys
from typing import NamedTuple

MISSING = "-"
EQUAL = 0.01
"""Budgets that differ by at most this count as equal."""
KIB, MIB, GIB = 2**10, 2**20, 2**30


class Unit(NamedTuple):
    """A unit of headings.

    name: within brackets behind a heading; "" for none. factor: from a table's number to this unit.
    """

    name: str = ""
    factor: float = 1


PERCENT, POINTS = Unit("%", 100), Unit("points", 100)
"""Shares, and differences of shares."""
NATS, TOKENS, MS, GIB_PER_S = Unit("nats"), Unit("tokens"), Unit("ms", 1e3), Unit("GiB/s", 1 / GIB)
IN_GIB, IN_MIB, IN_KIB = Unit("GiB", 1 / GIB), Unit("MiB", 1 / MIB), Unit("KiB", 1 / KIB)
NUMBER = Unit()


class Metric(NamedTuple):
    """A number that is measured, or another column of a table.

    words: the heading without its unit. digits: after the point; None for a column of words.
    phrase: a value within a sentence; "" to leave it out.
    """

    name: str
    words: str = ""
    unit: Unit = NUMBER
    digits: int | None = None
    phrase: str = "{}"

    @property
    def heading(self) -> str:
        """With the unit."""
        return f"{self.words} ({self.unit.name})" if self.unit.name else self.words

    @property
    def factor(self) -> float:
        """From the table's number to the heading's unit."""
        return self.unit.factor

    def show(self, value: float | None, stderr: float | None = None) -> str:
        """The number in the heading's unit, never as -0, and its standard error if given."""
        if value is None or math.isnan(value):
            return MISSING
        text = f"{self.factor * value:z.{self.digits}f}"
        if stderr is None or math.isnan(stderr):
            return text
        return f"{text} ± {self.factor * stderr:.{self.digits}f}"


# Read, kept and moved: `harness/model/budgets.py`

BUDGET = Metric("budget", "budget", PERCENT, 1)
"""Share of the full cache that a decode step reads. Under offloading it crosses the link."""
UNMET_BUDGET = Metric("unmet_budget", "budget asked for", PERCENT, 1)
"""The budget that was asked for, where the run's own differs from it by more than a tenth."""
DEVICE_FRAC = Metric("device_frac", "read on device", PERCENT, 1)
RESIDENT_FRAC = Metric("resident_frac", "resident", PERCENT, 1)
TOKENS_EVICTED = Metric("tokens_evicted", "tokens evicted", NUMBER, 1)
"""Cached tokens that a KV head no longer holds at a decode row, of a method that evicts. 0: its
budget never bites."""
OF_SOME_RUNS = (
    TOKENS_EVICTED,
    Metric("link_frac", "over the link", PERCENT, 1),
    Metric("hit_frac", "found on device", PERCENT, 1),
    Metric("window_frac", "whole cache in local windows", PERCENT, 1),
    Metric("recurrent_bytes", "recurrent state", IN_MIB, 2),
    Metric("latent_bytes", "latent per token", IN_KIB, 2),
)
"""Columns of tables with runs of a method that evicts, or with a GPU cache, or whose
models have local layers, recurrent layers or latents."""

# Scores of texts and tasks: `harness/scoring`, by the name in a table's column `metric`

KL = Metric("kl_nats", "KL", NATS, 4)
ATTENTION_ERROR = Metric("attention_error", "attention error", PERCENT, 1)
ATTENTION_ERROR_P95 = Metric("attention_error_p95", "attention error, p95", PERCENT, 1)
SCORES = (
    Metric("acc", "acc", PERCENT, 1),
    Metric("acc_norm", "acc_norm", PERCENT, 1),
    Metric("exact_match", "exact_match", PERCENT, 1),
    Metric("known_budget", "budget where the question is known", PERCENT, 1),
    Metric("generated_tokens", "generated", TOKENS, 1),
    Metric("at_limit", "answers at the limit of tokens", PERCENT, 1),
    Metric("answer_bytes", "read by an answer's steps", IN_MIB, 1),
    Metric("perplexity", "perplexity", NUMBER, 3),
    Metric("perplexity_full", "full cache's perplexity", NUMBER, 3),
    KL,
    Metric("top1_agreement", "top-1 agreement", PERCENT, 1),
    Metric("attention_recall", "attention recall", PERCENT, 1),
    ATTENTION_ERROR,
    ATTENTION_ERROR_P95,
    Metric("text_perplexity", "text perplexity under the full cache", NUMBER, 3),
    Metric("text_perplexity_full", "full cache's text perplexity under itself", NUMBER, 3),
    Metric("text_nll_difference", "text NLL minus that of the full cache's text", NATS, 4),
    Metric("first_divergence", "equal tokens before the texts differ", NUMBER, 1),
    Metric("never_diverged", "texts that never differ", NUMBER, 0),
    Metric("repetition", "repeated 4-grams", PERCENT, 1),
    Metric("repetition_full", "full cache's repeated 4-grams", PERCENT, 1),
    Metric("repetition_difference", "repeated 4-grams minus full cache", POINTS, 1),
)

# Analyses: `harness/paper/analysis.py`

ANALYSES = (
    Metric("bytes", "GiB", Unit("", 1 / GIB), 2),
    Metric("cosine_similarity", "cosine similarity", NUMBER, 3),
    Metric("key_tokens_for_0.9", "key tokens for 0.9 of the attention weight", NUMBER, 1),
    Metric("share_of_queries", "queries", PERCENT, 1),
    Metric("share_of_sparse_queries", "queries that attend to < 1 % of the keys", PERCENT, 1),
    Metric("attention_weight", "attention weight", PERCENT, 3),
    Metric("query_magnitude", "mean magnitude of a column of Q", NUMBER, 3),
    Metric("key_magnitude", "mean magnitude of a column of K", NUMBER, 3),
)
METRICS = {metric.name: metric for metric in (*SCORES, *ANALYSES)}
"""The quantities of `value` by `metric`, in the order of the pages."""
LENGTHS = ("generated_tokens", "at_limit", "answer_bytes")
"""Those that say how long answers are: a sheet of their own beside several tasks."""
WAYS = {
    "unknown": "question unknown",
    "known": "question known",
    "unknown_less_known": "unknown less known",
}
"""What stands before a metric of `prefill=both`, as in `known,acc`, in words."""


def quantity(metric: str) -> Metric:
    """What a metric's values are.

    A filter, as in `exact_match,strict-match`, is added to the heading, and so is one of `WAYS`.
    RULER's metrics are lengths in tokens. An unknown metric is its own heading.
    """
    name, _, filtered = metric.partition(",")
    if name in WAYS:
        of_way = quantity(filtered)
        return of_way._replace(name=metric, words=f"{of_way.words}, {WAYS[name]}")
    if name.isdecimal():
        known = Metric(name, f"right at {int(name):,} tokens", PERCENT, 1)
    else:
        known = METRICS.get(name, Metric(name, name, NUMBER, 3))
    words = known.words
    if filtered:
        words += f", {filtered}"
    return known._replace(name=metric, words=words)


def rank(metric: str) -> tuple[int, int, str]:
    """Sort key of metrics: as in `METRICS`, then RULER's by length, then the others by name."""
    way, _, of_way = metric.partition(",")
    if way in WAYS:
        place, length, name = rank(of_way)
        return place, length, f"{name} {[*WAYS].index(way)}"
    known = [*METRICS, way]
    length = int(metric) if metric.isdecimal() else sys.maxsize
    return known.index(way), length, metric


# Time, bytes and memory: `harness/results/step_stats.py`, `harness/speed/timed_run.py`

SEGMENTS = (
    Metric("attention_s", "attention", MS, 3),
    Metric("ffn_s", "FFN", MS, 3),
    Metric("prediction_s", "prediction", MS, 3),
    Metric("transfer_s", "transfer", MS, 3),
    Metric("other_s", "other", MS, 3),
)
"""Seconds of one block in one decode step (Fig 18); transfer is the time that no compute hides."""
TPOT = Metric("tpot_p50_s", "TPOT p50", MS, 2)
OF_DISK = (
    Metric("disk_read_bytes", "read from disk", IN_GIB, 3),
    Metric("read_amplification", "bytes read / bytes of rows", NUMBER, 2),
    Metric("disk_kv_bytes", "KV on disk", IN_MIB, 1),
)
SERVING = (
    Metric("ttft_s", "TTFT", MS, 1),
    Metric("decode_s", "decode", MS, 1),
    Metric("total_s", "total", MS, 1),
    Metric("tokens_per_s", "tokens/s", NUMBER, 2),
    Metric("decode_tokens_per_s", "decode tokens/s", NUMBER, 2),
    Metric("sequence_tokens_per_s", "tokens/s of a sequence", NUMBER, 2),
    TPOT,
    Metric("tpot_p95_s", "TPOT p95", MS, 2),
    Metric("tpot_p99_s", "TPOT p99", MS, 2),
    Metric("tpot_std_s", "TPOT std", MS, 2),
    Metric("ttft_spread_s", "TTFT std over repeats", MS, 1),
    Metric("tpot_spread_s", "TPOT std over repeats", MS, 2),
    Metric("h2d_bytes", "to device", IN_GIB, 3),
    Metric("d2h_bytes", "to host", IN_GIB, 3),
    *OF_DISK,
    Metric("weights_on_device", "weights on the device", PERCENT, 1),
    Metric("weight_bytes", "weights to device", IN_GIB, 3),
    Metric("device_read_bytes", "read on device", IN_GIB, 3),
    Metric("host_kv_bytes", "KV in host memory", IN_MIB, 1),
    Metric("device_kv_bytes", "KV on device", IN_MIB, 1),
    Metric("link_utilisation", "link busy", PERCENT, 1),
    Metric("hit_rate", "hit rate", PERCENT, 1),
    Metric("exposed_transfer_s", "exposed transfer", MS, 1),
    Metric("link_bytes_per_s", "link", GIB_PER_S, 2),
    Metric("peak_device_bytes", "device peak", IN_GIB, 3),
)
"""`harness.results.step_stats` and `harness.speed.timed_run` define them."""

# The board: `harness/results/board.py`

ASKED_BUDGET = Metric("asked_budget", "asked budget", PERCENT, 0)
STEP = Metric("step_s", "decode step", MS, 1)
RATIO = Metric("ratio", "KL / oracle's", NUMBER, 2)
ANSWERS = Metric("answers", "right answers", PERCENT, 1)
ANSWERS_DIFFERENCE = Metric("answers_difference", "answers minus full cache", POINTS, 1)

# Other columns that pages and figures show

LABEL, SETTINGS = Metric("label", "label"), Metric("settings", "settings")
LAYER = Metric("layer", "layer", NUMBER, 0, phrase="layer {:.0f}")
SEQ_LEN = Metric("seq_len", "length", TOKENS, 0, phrase="{:,.0f} tokens")
DENSE_LAYERS = Metric("dense_layers", "dense layers", NUMBER, 0)
NUM_DEPTHS = 5
"""Parts of a prompt by whose depth needles are told apart."""
APART = Metric("apart", "why it is not compared")
CLAIM = Metric("claim", "claim")
SHAPE = (
    Metric("batch_size", "batch", NUMBER, 0, phrase="batch {:.0f}"),
    Metric("prompt_len", "prompt", NUMBER, 0, phrase="prompt {:,.0f}"),
    Metric("gen_len", "generated", NUMBER, 0, phrase="{:,.0f} generated"),
)
LARGEST = (
    Metric("largest_batch", "sequences that fit", NUMBER, 0),
    Metric("kv_tokens", "KV tokens", NUMBER, 0),
    Metric("wall", "wall"),
    Metric("equal_batch", "equal batch", NUMBER, 0),
    Metric("equal_tokens_per_s", "tokens/s at the equal batch", NUMBER, 2),
)
"""What a run with batch_size=largest finds."""
_SHOWN = (
    LABEL, SETTINGS, LAYER, SEQ_LEN, DENSE_LAYERS, APART, CLAIM, *SHAPE, *LARGEST,
    BUDGET, UNMET_BUDGET, DEVICE_FRAC, RESIDENT_FRAC, *OF_SOME_RUNS, KL, *SEGMENTS, *SERVING,
    ASKED_BUDGET, STEP, RATIO, ANSWERS, ANSWERS_DIFFERENCE,
    Metric("num_samples", "samples", NUMBER, 0, phrase="n = {:,.0f}"),
    Metric("num_fewshot", "shots", NUMBER, 0, phrase="{:.0f}-shot"),
    Metric("source", phrase="source: {}"),
    Metric("run_id", phrase="run {}"),
    Metric("metric", phrase=""),
    Metric("x_name", phrase=""),
    Metric("context", "context", NUMBER, 0, phrase="{:,.0f} tokens each"),
    Metric("memory_bytes", "device memory", IN_GIB, 2, phrase=""),
    Metric("rank", "rank", NUMBER, 0),
    Metric("num_questions", "questions", NUMBER, 0),
    Metric("num_windows", "windows", NUMBER, 0),
    Metric("dense_numbers", "dense layers"),  # of several models
)  # fmt: skip
COLUMNS = {column.name: column for column in _SHOWN}
"""The columns with a heading or a phrase, by name. `harness/results/columns.py` has all."""

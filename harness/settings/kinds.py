"""The kinds of run, such as perplexity: what decides their numbers, what their settings must be
together, and where the numbers go. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from harness.errors import UserError, nearest
from harness.settings.codecs import CODEC_WORDS
from harness.settings.config import RunConfig, Statistic

OF_CODECS = (*CODEC_WORDS, "own_codec", "group_size")
COMMON = (
    "experiment", "kind", "model", "method", "method_name",
    *OF_CODECS, "budget", "budget_rule", "gpu_cache",
)  # fmt: skip
"""Settings that decide the numbers of every kind of run."""
RECORDING_STEPS = 4
"""Decode steps until all later ones are replayed: of two kinds, by which buffer is free, one that
runs as it is, and one that is recorded."""
Rules = Iterator[tuple[str, object, str]]
"""A setting, whether it is wrong, and why, for each rule."""


@dataclass(frozen=True)
class Outcome:
    """What a run measured.

    metrics: by task or corpus: acc, perplexity, kl_nats, budget, ...; an absent measurement is
    None. samples: raw values behind the metrics, by task.
    methods: the settings of the method that ran, by task, `budget` resolved.
    chunks: metrics by range of tokens: {"first", "stop", "num_tokens", "metrics"}, of the only
        text; "windows" where each window has its {"nll", "nll_full"}.
    """

    metrics: dict[str, Any]
    samples: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, Any] = field(default_factory=dict)
    chunks: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """What the runs of one kind have in common; `harness.run.kinds` measures them.

    depends_on: the settings that decide its numbers besides `COMMON`; a change of any other makes
    no other run. unread: those of them that a run does not read. rules: what its settings must be
    together. needs_weights: whether a model is loaded; without, its shape is all that is looked at.
    reads: what it reads besides its model and method. lengths: the settings that add up to the
    tokens of its longest sequence. sizes: those on which its memory depends most. table: the shape
    of its rows in tables. code: the folders and modules of `harness` that make its numbers, besides
    the core that all kinds share. live: it decodes through two memories, so that its label may name
    a system (`harness.settings.systems`). timed: its runs go in a process of their own. modelled:
    the cost model does it for a machine that is not here. keeps_record: its outcome is recorded,
    and the run is skipped the next time; else it only prints.
    """

    depends_on: tuple[str, ...] = ()
    unread: Callable[[RunConfig], set[str]] = lambda config: set()
    rules: Callable[[RunConfig], Rules] = lambda config: iter(())
    needs_weights: Callable[[RunConfig], bool] = lambda config: True
    reads: tuple[Literal["corpus", "tasks", "prompt", "calibration"], ...] = ()
    lengths: Callable[[RunConfig], list[str]] = lambda config: []
    sizes: Callable[[RunConfig], list[str]] = lambda config: []
    table: Literal["accuracy", "latency", "analysis"] = "accuracy"
    code: tuple[str, ...] = ()
    live: bool = False
    timed: bool = False
    modelled: bool = False
    keeps_record: bool = True


BOARD = "board"
"""The experiment that methods are compared by: its runs are of texts, of tasks, and timed steps, so
their rows go to several tables."""


def _of_perplexity(config: RunConfig) -> Rules:
    prefill, new = config.prefill_len, config.max_new_tokens
    if new is not None:
        # The dense pass of a prompt gives the first token; a method decodes from the second on.
        yield "prefill_len", prefill < 1, "must be at least 1 where texts are decoded"
        yield "max_new_tokens", new < 2, "must be at least 2 in kind=perplexity"
        yield from _of_one_text(config)
        return
    needed = max(1, prefill) + 2
    least = f"must be at least {needed} with prefill_len={prefill}, for a row that predicts a token"
    yield "seq_len", config.seq_len < needed, least
    no_prompt = prefill < 1 and not config.method.reads_all
    yield "prefill_len", no_prompt, "must be at least 1 under a method"


def _unread_by_perplexity(config: RunConfig) -> set[str]:
    return {"sampling", "seed"} if config.max_new_tokens is None else {"seq_len"}


def _unread_by_latency(config: RunConfig) -> set[str]:
    """A host decides how large the largest batch is; else only whether a run is refused."""
    return set() if config.latency.largest else {"capacity", "platform.host_gib"}


def _of_one_text(config: RunConfig) -> Rules:
    config.sampling.rule()
    one_text = f"kind={config.kind} writes one text a prompt; leave it out"
    yield "repeats", config.sampling.repeats > 1, one_text


def _of_tasks(config: RunConfig) -> Rules:
    is_cut = config.prefill == "both" and config.task.too_long == "truncate"
    yield "too_long", is_cut, "prefill=both would cut a context differently for each question"


def _of_generate(config: RunConfig) -> Rules:
    yield "prompt", not config.prompt, "experiment=generate needs a text to go on from"
    yield from _of_one_text(config)


def _of_latency(config: RunConfig) -> Rules:
    unrecorded = config.platform.graphs != "off" and config.latency.warmup_steps < RECORDING_STEPS
    recorded = f"must be at least {RECORDING_STEPS} with platform.graphs=auto, which records them"
    yield "warmup_steps", unrecorded, recorded
    if not config.latency.largest:
        return
    platform, method = config.platform, config.method
    placed = config.placement in ("device", "host")
    yield "placement", not placed, "allowed with batch_size=largest: device, host"
    of_inputs = "needs the inputs of the layers, for which each prompt runs in one pass"
    yield "method", method.needs_inputs, f"{of_inputs}; batch_size=largest does not size it"
    again = "reads each prompt again and holds the states of all layers meanwhile"
    yield "method", method.rereads_prompt, f"{again}; batch_size=largest does not size it"
    hides = "batch_size=largest is about transfers beside the computation, of pinned memory"
    yield "platform.overlap", not platform.overlap, hides
    yield "platform.pinned", not platform.pinned, hides
    all_there = "batch_size=largest has all weights on the device; leave it out"
    yield "platform.weights_on_device", platform.weights_on_device < 1, all_there
    unsized = platform.name == "cpu" and platform.device_gib is None
    of_emulated = "batch_size=largest needs the memory of the emulated device, in GiB"
    yield "platform.device_gib", unsized, of_emulated


def _of_advise(config: RunConfig) -> Rules:
    needs = "kind=advise needs a modelled machine of conf/platform"
    yield "platform", config.platform.sheet is None, needs


def _of_analysis(config: RunConfig) -> Rules:
    statistic, method = config.analysis.statistic, config.method
    allowed = ", ".join(get_args(Statistic))
    yield "analysis.statistic", statistic is None, f"kind=analysis needs one of {allowed}"
    one_part = "kind=analysis reads one part of the text; leave it out"
    yield "corpus.spread", config.corpus.spread, one_part
    chooses = method.reads_all or method.when != "kept"
    compares = "analysis.statistic=similarity compares h2o or streaming"
    yield "method", statistic == "similarity" and chooses, compares


def _lengths_of_perplexity(config: RunConfig) -> list[str]:
    return ["seq_len"] if config.max_new_tokens is None else ["prefill_len", "max_new_tokens"]


def _sizes_of_latency(config: RunConfig) -> list[str]:
    lengths = ["prompt_len", "gen_len"]
    largest = config.latency.largest
    return [*lengths, "capacity.max_batch"] if largest else ["batch_size", *lengths]


TEXTS = ("corpus", "data", "calibration")
KINDS = {
    "perplexity": Kind(
        depends_on=(
            *TEXTS, "seq_len", "prefill_len", "num_windows", "max_new_tokens", "sampling", "seed",
        ),
        unread=_unread_by_perplexity,
        rules=_of_perplexity,
        reads=("corpus", "calibration"),
        lengths=_lengths_of_perplexity,
        sizes=lambda config: [*_lengths_of_perplexity(config), "num_windows"],
        code=("scoring", "results/samples.py"),
    ),
    "tasks": Kind(
        depends_on=(
            "tasks", "task", "num_samples", "num_fewshot", "sampling", "seed", "data",
            "calibration", "prefill",
        ),
        rules=_of_tasks,
        reads=("tasks", "calibration"),
        sizes=lambda config: ["num_fewshot"],
        code=("scoring", "results/samples.py"),
    ),
    "latency": Kind(
        depends_on=("platform", "placement", "latency", "capacity", "seed", "calibration"),
        unread=_unread_by_latency,
        rules=_of_latency,
        reads=("prompt", "calibration"),
        lengths=lambda config: ["prompt_len", "gen_len"],
        sizes=_sizes_of_latency,
        table="latency",
        code=("speed", "results/step_stats.py"),
        live=True,
        timed=True,
    ),
    "generate": Kind(
        rules=_of_generate,
        sizes=lambda config: ["max_new_tokens"],
        live=True,
        keeps_record=False,
    ),
    "analysis": Kind(
        depends_on=(*TEXTS, "analysis"),
        rules=_of_analysis,
        needs_weights=lambda config: config.analysis.statistic != "memory",
        reads=("corpus", "calibration"),
        lengths=lambda config: ["analysis.num_tokens"],
        sizes=lambda config: ["analysis.num_tokens"],
        table="analysis",
        code=("paper/analysis.py",),
    ),
    "contract": Kind(needs_weights=lambda config: config.thorough, keeps_record=False),
    "advise": Kind(
        rules=_of_advise,
        needs_weights=lambda config: False,
        modelled=True,
        keeps_record=False,
    ),
}  # fmt: skip


def find(kind: str) -> Kind:
    """The kind of run of that name. Raises UserError where there is none."""
    if not isinstance(kind, str) or kind not in KINDS:  # composed YAML, not checked yet
        raise UserError(f"kind={kind}: {nearest(kind, sorted(KINDS))}")
    return KINDS[kind]


def foreign_settings(kind: str) -> set[str]:
    """Settings that play no part in a run of this kind."""
    all_settings = {field.name for field in fields(RunConfig)}
    return all_settings.difference(COMMON, find(kind).depends_on)

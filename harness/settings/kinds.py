"""The kinds of run, such as perplexity: what decides their numbers, and where these go.

`harness.run.kinds` says how a run of each kind is checked and made. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from harness.errors import UserError, nearest
from harness.settings.codecs import CODEC_WORDS
from harness.settings.config import RunConfig

OF_CODECS = (*CODEC_WORDS, "own_codec", "group_size")
COMMON = (
    "experiment", "kind", "model", "method", "method_name",
    *OF_CODECS, "budget", "budget_rule", "gpu_cache",
)  # fmt: skip
"""Settings that decide the numbers of every kind of run."""


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
    """What the runs of one kind have in common.

    keeps_record: its outcome is recorded, and the run is skipped the next time. Otherwise it only
    prints, and has no `depends_on`, `table` or `code`. depends_on: the settings that decide its
    numbers besides `COMMON`; a change of any other makes no other run. table: the shape of its rows
    in tables. code: the folders and modules of `harness` that make its numbers, besides the core
    that all kinds share. live: it decodes through two memories, so that its label may name a system
    (`harness.settings.systems`). modelled: the cost model can do it for a machine that is not here.
    """

    depends_on: tuple[str, ...] = ()
    table: Literal["accuracy", "latency", "analysis", "capacity"] = "accuracy"
    code: tuple[str, ...] = ()
    live: bool = False
    modelled: bool = False
    keeps_record: bool = True


BOARD = "board"
"""The experiment that methods are compared by: its runs are of texts, of tasks, and timed steps, so
their rows go to several tables."""
TEXTS = ("corpus", "data", "calibration")
ABOUT_TASKS = (
    "tasks", "task", "num_samples", "num_fewshot", "sampling", "seed", "data",
    "calibration",
)  # fmt: skip
KINDS = {
    "perplexity": Kind(
        depends_on=(*TEXTS, "seq_len", "prefill_len", "num_windows"),
        code=("scoring", "results/samples.py"),
    ),
    "tasks": Kind(
        depends_on=(*ABOUT_TASKS, "prefill"),
        code=("scoring", "results/samples.py"),
    ),
    "turns": Kind(
        depends_on=ABOUT_TASKS,
        code=("scoring", "results/samples.py"),
    ),
    "long_decode": Kind(
        depends_on=(*TEXTS, "prefill_len", "max_new_tokens", "num_windows", "sampling", "seed"),
        code=("scoring", "results/samples.py"),
    ),
    "latency": Kind(
        depends_on=("platform", "placement", "latency", "seed", "calibration"),
        table="latency",
        code=("speed", "results/step_stats.py"),
        live=True,
    ),
    "capacity": Kind(
        depends_on=("platform", "placement", "latency", "capacity", "seed", "calibration"),
        table="capacity",
        code=("speed", "paper/costmodel", "results/step_stats.py"),
        live=True,
        modelled=True,
    ),
    "advise": Kind(modelled=True, keeps_record=False),
    "generate": Kind(live=True, keeps_record=False),
    "contract": Kind(keeps_record=False),
    "trust": Kind(keeps_record=False),
    "analysis": Kind(
        depends_on=(*TEXTS, "analysis"),
        table="analysis",
        code=("paper/analysis.py", "paper/observed.py"),
    ),
}


def find(kind: str) -> Kind:
    """The kind of run of that name. Raises UserError where there is none."""
    if not isinstance(kind, str) or kind not in KINDS:  # composed YAML, not checked yet
        raise UserError(f"kind={kind}: {nearest(kind, sorted(KINDS))}")
    return KINDS[kind]


def foreign_settings(kind: str) -> set[str]:
    """Settings that play no part in a run of this kind."""
    all_settings = {field.name for field in fields(RunConfig)}
    return all_settings.difference(COMMON, find(kind).depends_on)

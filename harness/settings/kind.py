"""A kind of run, such as perplexity: which settings it depends on, what it reads, what it measures.

The kinds are in `harness/run/kinds.py`, which is imported by name since it lies above. Imports no torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar, Literal

from harness.errors import UserError, nearest
from harness.settings.config import CODEC_WORDS, RunConfig

OF_CODECS = (*CODEC_WORDS, "own_codec", "group_size")
COMMON = (
    "experiment", "kind", "model", "method", "method_name", *OF_CODECS, "size", "sizing", "device_rows", "prefetch",
)  # fmt: skip
"""Settings that decide the numbers of every kind of run."""


@dataclass(frozen=True)
class Outcome:
    """What a run measured.

    metrics: by task or corpus: acc, perplexity, kl_nats, size, ...; an absent measurement is None.
    samples: raw values behind the metrics, by task.
    methods: the settings of the method that ran, by task, `size` resolved.
    chunks: metrics by range of tokens: {"first", "stop", "num_tokens", "metrics"}, of the only text; "windows" where
        each window has its {"nll", "nll_full"}.
    """

    metrics: dict[str, Any]
    samples: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, Any] = field(default_factory=dict)
    chunks: list[dict[str, Any]] = field(default_factory=list)


class Experiment:
    """A kind of run. Holds no state: what outlives a run is in `harness.model.resources.Resources`.

    depends_on: the settings that decide its numbers besides `COMMON`; any other makes no other run of it.
    table: the shape of its rows in tables.
    code: the folders and modules of `harness` that make its numbers, besides the core that all kinds share.
    live: it decodes through two memories, so that its label may name a system (`harness.settings.systems`).
    keeps_record: its outcome is recorded, and the run is skipped the next time. Otherwise it only prints.
    memory_settings: the settings on which its memory depends most.
    """

    depends_on: ClassVar[tuple[str, ...]] = ()
    table: ClassVar[Literal["accuracy", "latency", "analysis"]] = "accuracy"
    code: ClassVar[tuple[str, ...]] = ()
    live: ClassVar[bool] = False
    keeps_record: ClassVar[bool] = True
    memory_settings: ClassVar[tuple[str, ...]] = ()

    def check(self, config: RunConfig) -> None:
        """Raise UserError for settings that make no sense in this kind of run."""

    def needs_weights(self, config: RunConfig) -> bool:
        """Whether a model is loaded; without, its shape is all that is looked at."""
        return True

    def inputs(self, config: RunConfig) -> dict[str, str]:
        """sha256 by name of what the run reads besides the model; UserError where it is missing."""
        return {}

    def run(self, config: RunConfig, resources: Any) -> Outcome:
        """Measure. resources: the process's `harness.model.resources.Resources`."""
        raise NotImplementedError

    def memory_hints(self, config: RunConfig) -> dict[str, Any]:
        """`memory_settings` as the user writes them, with their values."""
        return {name.removeprefix("latency."): attrgetter(name)(config) for name in self.memory_settings}

    def process(self, config: RunConfig) -> Any:
        """What runs must have in common to share a process of their own; None where a run needs none."""
        return None

    def shape(self, config: RunConfig) -> str:
        """A word for a progress line that tells runs of one label apart."""
        return ""


def kinds() -> dict[str, Experiment]:
    """All kinds of run, by name."""
    return importlib.import_module("harness.run.kinds").KINDS


def find(kind: str) -> Experiment:
    """The kind of run of that name. Raises UserError where there is none."""
    if not isinstance(kind, str) or kind not in kinds():  # composed YAML, not checked yet
        raise UserError(f"kind={kind}: {nearest(kind, sorted(kinds()))}")
    return kinds()[kind]


def foreign_settings(kind: str) -> set[str]:
    """Settings that play no part in a run of this kind."""
    return {field.name for field in fields(RunConfig)}.difference(COMMON, find(kind).depends_on)

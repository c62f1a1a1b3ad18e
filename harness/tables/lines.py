"""What tells the lines of a table apart: the settings of a method, and of its runs where those on one task differ."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from harness.records.record import flat
from harness.settings.config import CODEC_WORDS
from harness.settings.experiment import foreign_settings
from harness.tables.columns import TableRow

Record = Mapping[str, Any]
Pairs = Sequence[tuple[Record, list[TableRow]]]
"""Records, each with its rows."""

COMMON = 3 / 4
"""Share of runs from which a setting is common and hence left out."""
TOLD_ELSEWHERE = (
    "experiment", "kind", "label", "method", "method_name", *CODEC_WORDS, "size", "sizing",
    "model", "tasks", "corpus.name",
    "platform.name", "latency.batch_size", "latency.prompt_len", "latency.gen_len", "results_dir", "data.root",
    "include_path",
)  # fmt: skip
"""Settings of a run that its row has a column for, or that play no part: where files lie."""


def tell_apart(pairs: Pairs, *, weights: bool = True) -> None:
    """Write `settings` into the rows: the same words for the same method and settings, others for others.

    A setting of the method is compared with the other runs of that method, any other setting of a run with those on
    the same task. Where speed is timed, both are compared with the runs of the same label, which names a system.

    weights: those of the model count as a setting.
    """
    methods = [_method_settings(record["config"]) for record, _ in pairs]
    runs = [_run_settings(record["config"]) | (_weights(record) if weights else {}) for record, _ in pairs]
    of_methods = _distinctive(methods, [set(map(_method, rows)) for _, rows in pairs])
    of_runs = _distinctive(runs, [set(map(_setup, rows)) for _, rows in pairs])
    for (_, rows), *words in zip(pairs, of_methods, of_runs, strict=True):
        for row in rows:
            row["settings"] = ", ".join(filter(None, words))


def _method(row: TableRow) -> tuple[Any, ...]:
    return (row["model"], row["method"]) if "task" in row else _setup(row)


def _setup(row: TableRow) -> tuple[Any, ...]:
    """What runs are compared under: without regard to the chunk of a text, or the shape of a timed run."""
    on = row["task"].partition("[")[0] if "task" in row else row["label"]
    return (row["model"], row["source"], row.get("platform"), on)


def _distinctive(settings: Sequence[Mapping[str, Any]], groups: Sequence[Collection[Any]]) -> list[str]:
    """For each run the settings that are not common in its groups, as `alpha=4, columns=sum`. One that is set in some
    runs of a group only is told wherever it is set, so that no two runs have the same words and different settings."""
    counts: dict[Any, Counter[str]] = defaultdict(Counter)
    for own, of_groups in zip(settings, groups, strict=True):
        for name, value in own.items():
            for group in of_groups:
                counts[group, name][str(value)] += 1

    def is_common(count: Counter[str], value: Any) -> bool:
        return str(None) not in count and count[str(value)] >= COMMON * count.total()

    return [
        ", ".join(
            f"{name}={value}"
            for name, value in own.items()
            if value is not None and not all(is_common(counts[group, name], value) for group in of_groups)
        )
        for own, of_groups in zip(settings, groups, strict=True)
    ]


def _method_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    others = (*CODEC_WORDS, "size")
    return {**config["method"], **{name: config.get(name) for name in others}}


def _run_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    left_out = {*TOLD_ELSEWHERE, *foreign_settings(config["kind"])}
    settings = flat({name: value for name, value in config.items() if name not in left_out})
    told = {name.removeprefix("task."): value for name, value in settings.items()}  # as the user writes it
    return {name: value for name, value in told.items() if name not in left_out}


def _weights(record: Record) -> dict[str, Any]:
    """The revision or digest of the model under its name, which may be replaced on the hub or on the disk."""
    digest = record.get("inputs", {}).get("model")
    return {} if digest is None else {"weights": digest[:8]}

"""Which run of the full cache a run is compared with: the newest on the same questions, whatever code made it."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.records.record import CODE, LOCATIONS, current, read_all
from harness.records.samples import Difference, Measured, paired, perplexity
from harness.settings.experiment import COMMON, find

Record = Mapping[str, Any]

NAME = "full"
"""The method that is the full cache, where no codec changes it."""
OF_METHODS = {"calibration", "method"}
"""Inputs that a method may read, and the full cache does not."""
ELSEWHERE = {*COMMON, *OF_METHODS, "tasks"} - {"kind", "model"}
"""Settings in which a run and the full cache's may differ: the method's own, and which tasks ran beside this one."""


def is_full(record: Record) -> bool:
    """Whether a run is of the full cache."""
    config = record.get("config", {})
    return config.get("method_name") == NAME and config.get("codec") is None and config.get("value_codec") is None


def full_runs(*results_dirs: str | Path) -> list[Record]:
    """The full cache's finished runs in results folders, of all experiments."""
    return [record for folder in results_dirs for record in current(filter(is_full, read_all(folder)))]


class Baselines:
    """The full cache's runs: those among finished records, then those elsewhere; a run's own experiment comes first.

    elsewhere: gives further records; asked once, and only where a run finds none among `records`.
    """

    def __init__(self, records: Iterable[Record], elsewhere: Callable[[], Iterable[Record]] = tuple) -> None:
        self._here = _newest_first(records)
        self._elsewhere = elsewhere

    @cached_property
    def _further(self) -> list[Record]:
        return _newest_first(self._elsewhere())

    def difference(self, record: Record, task: str, metric: str) -> Difference | None:
        """How far `metric` on a task, or on a text, is from the full cache's.

        None for the full cache itself, where it did not run on the same questions, or where the metric is no mean of
        numbers that the samples hold. A text's own run has the full cache's scores of its windows.
        """
        if metric == "perplexity":
            return of_windows(record, record.get("samples", {}).get("windows", ()))
        own = _measured(record, task, metric)
        if is_full(record) or not any(metric in sample for sample in own.samples):
            return None
        for full in self._candidates(record):
            if _alike(record, full) and (found := paired(own, _measured(full, task, metric), metric)) is not None:
                return found
        return None

    def _candidates(self, record: Record) -> Iterator[Record]:
        def is_foreign(full: Record) -> bool:
            return bool(full["experiment"] != record["experiment"])

        yield from sorted(self._here, key=is_foreign)
        yield from sorted(self._further, key=is_foreign)


def _newest_first(records: Iterable[Record]) -> list[Record]:
    return sorted(filter(is_full, records), key=lambda record: str(record.get("started") or ""), reverse=True)


def of_windows(record: Record, windows: Sequence[Mapping[str, Any]]) -> Difference | None:
    """Perplexity over windows of a text that the run scored under the full cache too; None for the full cache itself,
    or where an older record does not keep them."""
    scored = all({"nll", "nll_full"} <= window.keys() for window in windows)
    return perplexity(windows) if windows and scored and not is_full(record) else None


def _measured(record: Record, task: str, metric: str) -> Measured:
    value = record["metrics"].get(task, {}).get(metric, math.nan)
    return Measured(value, record.get("samples", {}).get(task, ()))


def _alike(record: Record, full: Record) -> bool:
    """Whether two runs were asked the same questions of the same model."""
    heeded = {"kind", "model", *find(record["kind"]).heeds} - ELSEWHERE
    own, other = (_settings(each["config"], heeded) for each in (record, full))
    return _agree(own, other) and _agree(_read(record), _read(full))


def _settings(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The settings of these names, but for where things lie."""
    settings = {name: value for name, value in config.items() if name in names}
    for group in LOCATIONS.keys() & settings:
        settings[group] = {name: value for name, value in settings[group].items() if name not in LOCATIONS[group]}
    return settings


def _read(record: Record) -> dict[str, Any]:
    read = record.get("inputs", {})
    return {name: digest for name, digest in read.items() if not name.startswith(CODE) and name not in OF_METHODS}


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether all that both have is the same: an older record lacks a setting, another run reads further tasks."""
    return all(
        _agree(one[name], other[name])
        if isinstance(one[name], Mapping) and isinstance(other[name], Mapping)
        else one[name] == other[name]
        for name in one.keys() & other.keys()
    )

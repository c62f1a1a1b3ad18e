"""What tests of texts share: random letters in a file, a tokenizer of bytes, and settings for a tiny model."""

import math
import random
import statistics
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from harness.settings.config import CalibrationConfig, CorpusConfig, RunConfig
from harness.settings.experiment import Outcome
from methods.base import Method
from tests.composed import load


class ByteTokenizer:
    """A token a byte."""

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        assert options["add_special_tokens"] is False
        return {"input_ids": list(text.encode())}


def letters(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, alphabet: str = "") -> Path:
    """A file of random letters; no cache outside the test's folder."""
    monkeypatch.setenv("KV_HARNESS_CACHE", str(folder / "cache"))
    file = folder / "text.txt"
    alphabet = alphabet or "abcdefghijklmnopqrstuvwxyz \n"
    file.write_text("".join(random.Random(0).choices(alphabet, k=count)))
    return file


@cache
def defaults(kind: str) -> RunConfig:
    return load([f"experiment={kind}"])


def on_text(kind: str, text: str, method: Method, **changes: object) -> RunConfig:
    """Settings of a run of three windows on the text."""
    about = {"method": method, "method_name": type(method).__name__.lower()}
    files = {"corpus": CorpusConfig("offline", path=text), "calibration": CalibrationConfig(path=text, num_tokens=64)}
    return replace(defaults(kind), **(about | files | {"num_windows": 3} | changes))


def metrics_of(outcome: Outcome) -> dict:
    (metrics,) = outcome.metrics.values()
    return metrics


def absent_of(metrics: dict) -> set[str]:
    return {name for name, value in metrics.items() if value is None}


def stderr_of(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def calls_of(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[tuple]:
    """The arguments of every call of a function from now on."""
    calls: list[tuple] = []
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: calls.append(args) or function(*args))
    return calls

"""What tests of runs share: a model that costs nothing and experiments that return at once."""

import importlib.metadata
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harness.data import rows
from harness.model import load as models
from harness.model import source
from harness.model.load import LoadedModel, Resources
from harness.results.columns import read_frame
from harness.run.compose import load
from harness.run.runner import Run, run
from harness.settings.config import RunConfig
from harness.settings.kinds import Outcome
from harness.settings.schema import CONF_DIR
from tests.tiny_models import tiny_model
from tests.tokens import byte_tokenizer

Row = dict[str, Any]
"""A row of a table by column."""


def outcome(config: RunConfig) -> Outcome:
    """A plausible measurement."""
    if config.kind == "tasks":
        metrics = {"acc": 0.75, "acc_stderr": 0.05, "budget": 0.2, "num_samples": 4, "num_fewshot": 0}
        return Outcome(dict.fromkeys(config.tasks, metrics), {task: [{"acc": 1.0}] for task in config.tasks})
    values = {"perplexity": 12.5, "perplexity_stderr": None}
    metrics = values | {"kl_nats": 0.25, "budget": 0.2, "num_samples": 2}
    chunk = {"first": 256, "stop": 512, "num_tokens": 10, "metrics": values}
    return Outcome({config.corpus.name: metrics}, {"windows": [{"nll": 2.5}]}, chunks=[chunk])


def rows_at(path: str | Path) -> list[Row]:
    """The rows of a table; None where a number is missing, "" where words are."""
    table = read_frame(Path(path))
    return table.astype(object).where(table.notna(), None).to_dict("records")


@dataclass
class Runs:
    """What ran. `measure` may be replaced, to fail for one."""

    configs: list[RunConfig] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    measure: Callable[[RunConfig], Outcome] = outcome

    def __call__(self, config: RunConfig, *resources: object) -> Outcome:
        self.configs.append(config)
        return self.measure(config)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Put `Runs` in place of the model loader, of the experiments of accuracy, and of the hub."""
    runs = Runs()

    def load_model(config):
        runs.loads.append(config.name)
        return SimpleNamespace(model=SimpleNamespace(device="cpu"), prompts=SimpleNamespace(run=0))

    monkeypatch.setattr(models, "load_model", load_model)
    monkeypatch.setattr(source, "snapshot", lambda hub_id, with_code=False: Path("snapshots/1"))
    monkeypatch.setattr(rows, "revision", lambda config, fetch: "1")
    for name, kinds in (("evaluation", "tasks turns"), ("perplexity", "perplexity")):
        module = ModuleType(f"harness.scoring.{name}")
        for kind in kinds.split():
            setattr(module, f"run_{kind}", runs)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return runs


def tiny_loaded() -> LoadedModel:
    """A tiny Llama that reads bytes."""
    model = tiny_model("llama", num_key_value_heads=2, max_position_embeddings=2048)
    return LoadedModel(model, byte_tokenizer(), "tiny", 2048)


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: ModuleType | type, name: str) -> list[tuple]:
    """The arguments of every call of a function or method from now on."""
    calls: list[tuple] = []
    function = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **named: calls.append(args) or function(*args, **named))
    return calls


def letters(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, others: str = " \n") -> Path:
    """A file of random letters and `others`; no cache outside the test's folder."""
    monkeypatch.setenv("KV_HARNESS_CACHE", str(folder / "cache"))
    file = folder / "text.txt"
    file.write_text("".join(random.Random(0).choices(f"abcdefghijklmnopqrstuvwxyz{others}", k=count)))
    return file


def reading(monkeypatch: pytest.MonkeyPatch, folder: Path, loaded: LoadedModel) -> list[str]:
    """Settings to read random letters, in `folder`; `loaded` in place of any other model, and a cache of its own."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(models, "load_model", lambda config: loaded)
    file = letters(folder, monkeypatch, 1000)
    return [f"corpus.path={file}", f"calibration.path={file}", "calibration.num_tokens=80"]


def own_experiments(monkeypatch: pytest.MonkeyPatch, conf: Path) -> Callable[[str, str], object]:
    """Put a copy in place of `conf/`; what is returned adds an experiment to it, by name and the text of its sweep."""
    shutil.copytree(CONF_DIR, conf)
    monkeypatch.setattr("harness.settings.schema.CONF_DIR", conf)

    def add(name: str, text: str) -> None:
        (conf / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\nsweep:\n{indent(text, '  ')}\n")

    return add


def start(overrides: Sequence[str], resources: Resources | None = None) -> Path:
    """A run as the command line starts it."""
    return run(Run.of(load(overrides)), resources or Resources())


def refusal_of(command: Callable[[list[str]], int], words: list[str], capture: pytest.CaptureFixture) -> str:
    """What a command that is refused says: one line on stderr, and nothing on stdout."""
    assert command(words) == 2
    captured = capture.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").removesuffix("\n")


def without(package: str) -> Callable[[str], str]:
    """`importlib.metadata.version` where a package is not installed."""
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    return version

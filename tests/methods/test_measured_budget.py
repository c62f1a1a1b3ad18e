"""A method of the user's own whose reads depend on the data: its budget is met by a search on the calibration text."""

import json
from pathlib import Path

import pytest

from harness.run.cli import main
from tests.runs import reading, tiny_loaded

pytestmark = pytest.mark.usefixtures("own_folder")

MINE = """
from dataclasses import dataclass, replace
from methods.infinigen import InfiniGen

@dataclass(frozen=True)
class Mine(InfiniGen):
    dense_layers: int = 0
    alpha: float = 4.0
    budget: float = 1.0
"""
WITH_BUDGET = """
    def with_budget(self, frac):
        return replace(self, alpha=4 * frac)
"""
LENGTHS = ["seq_len=160", "prefill_len=80", "num_windows=2", "platform.link_gbps=1"]


def records(experiment: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in Path("outputs").glob(f"runs/{experiment}/*/record.json")]


@pytest.fixture
def texts(own_folder, monkeypatch) -> list[str]:
    """Settings to run a tiny model, on the text that calibrates it."""
    Path("mine.py").write_text(MINE + WITH_BUDGET)
    words = reading(monkeypatch, own_folder, tiny_loaded())
    copy = Path("copy.txt").resolve()  # a file of its own, so that windows begin at its first token
    copy.write_bytes(Path(words[0].partition("=")[2]).read_bytes())
    return [words[0], f"calibration.path={copy}", "calibration.num_tokens=160", *LENGTHS]


@pytest.mark.parametrize("budget", [0.2, 0.4])
def test_the_budget_is_met_on_the_text_that_was_searched_and_marked(budget, texts, capsys):
    assert main(["method=./mine.py", f"budget={budget}", *texts, "num_windows=1"]) == 0
    (record,) = records("perplexity")
    (metrics,) = record["metrics"].values()
    assert metrics["budget"] == pytest.approx(budget, abs=0.01), "the first window is the calibration text"
    (method,) = record["methods"].values()
    assert 0 < method["alpha"] < 4 and method["alpha"] != pytest.approx(4 * budget), "searched, not set"
    assert record["settings"]["budget met on"] == "calibration text"
    assert "budget met on=calibration text" in Path("outputs/tables/perplexity.csv").read_text()
    assert main(["experiment=latency", "method=./mine.py", f"budget={budget}", *texts, "batch_size=1", "prompt_len=80",
                 "gen_len=12", "timed_steps=2"]) == 0  # fmt: skip


def test_what_no_setting_reaches_is_refused_with_what_was_measured(texts, capsys):
    Path("mine.py").write_text((MINE + WITH_BUDGET).replace("4 * frac", "2 + frac"))
    assert main(["method=./mine.py", "budget=0.001", *texts]) == 2
    said = capsys.readouterr().err
    assert "budget=0.001: method=mine: the nearest budget measured on the calibration text is 0." in said
    assert "budget=nearest:0.001 takes it" in said and said.count("\n") == 1
    assert main(["method=./mine.py", "budget=nearest:0.001", *texts]) == 0

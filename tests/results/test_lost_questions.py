"""Which questions were lost: recorded and listed."""
# ruff: noqa: F811, the fixture `loaded` is imported

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.data.generated import MARKER, questions
from harness.results.lost import main
from harness.scoring.evaluation import run_tasks
from methods.streaming import Streaming
from tests.data.test_tasks import loaded, settings  # noqa: F401, a fixture
from tests.results.test_tables import TASK_METRICS, save, shares
from tests.runs import refusal_of

# Tasks: what a record keeps


def test_a_record_says_what_was_asked(loaded):
    config = settings("kv_recall", method=Streaming(dense_layers=1, budget=0.3, num_sinks=0), num_samples=12)
    samples = run_tasks(config, loaded).samples["kv_recall"]
    for sample, question in zip(samples, questions("kv_recall", 12, 0), strict=True):
        asked = question.prompt.split(MARKER)[1]
        assert sample["question_text"] == " ".join(f"Question:{asked}".split())
        item = re.search(r"of the (\w+)\?", asked)[1]
        needle = f"The code of the {item} is {sample['gold_text']}."
        assert needle in sample["context_text"] and len(sample["context_text"]) < 200
        assert sample["predicted_text"] == question.choices[sample["predicted"]].strip()
        assert sample["gold_text"] == question.choices[question.gold].strip()
        assert len(json.dumps(sample, indent=1)) < 1200, "a record stays small"


# Lists


def sample_of(number: int, right: bool) -> dict[str, Any]:
    return {
        "question": number, "context": 0, "acc": float(right), "predicted": 1 - right, "gold": 0,
        "predicted_text": "1111" if right else "2222", "gold_text": "1111",
        "question_text": f"Question: what is item {number}?", "context_text": f"… item {number} is 1111. …",
    }  # fmt: skip


FULL_RIGHT = (True, True, False, True)
OWN_RIGHT = (True, False, True, False)


def save_pair(folder: Path) -> tuple[str, str]:
    """A run of the full cache and one of H2O; their run_ids."""
    runs = []
    for method, right in (("full", FULL_RIGHT), ("h2o", OWN_RIGHT)):
        samples = [sample_of(at, is_right) for at, is_right in enumerate(right)]
        metrics = {"passkey": TASK_METRICS | shares(1.0 if method == "full" else 0.16)}
        record = save(folder, ["experiment=fig11", f"method={method}"], metrics, samples={"passkey": samples})
        runs.append(record["run_id"])
    return runs[0], runs[1]


def test_the_command_lists_lost_questions(tmp_path, capsys):
    _, own = save_pair(tmp_path)
    assert main([own[:8], "--results-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "passkey, acc: of 4 questions the full cache has 3 right, this run 2; lost 2, gained 1\n" in text
    assert re.findall(r"^question (\d)$", text, re.MULTILINE) == ["1", "3"]
    assert re.search(r"question 1\n  predicted_text: 2222\n  gold_text: 1111\n  question_text: Question: what is", text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["zzz"], r"RUN=zzz: 0 finished runs in .* begin so; allowed: "),
        (["FULL"], r"run .*: no answers of right and wrong that a run of the full cache gave"),
        (["OWN", "--task", "paskey"], r"run .*: no answers of right and wrong"),
        (["OTHER QUESTIONS"], r"run .*: no answers of right and wrong"),
        (["RIGHT IN PART"], r"run .*: no answers of right and wrong"),
    ],
)
def test_refused_in_one_line(words, said, tmp_path, capsys):
    full, own = save_pair(tmp_path)
    others = [sample_of(at + 1, True) for at in range(4)]
    in_part = [sample_of(at, True) | {"acc": 0.5} for at in range(4)]
    names = {"FULL": full, "OWN": own}
    for name, method, samples in (("OTHER QUESTIONS", "streaming", others), ("RIGHT IN PART", "tova", in_part)):
        chosen, metrics = ["experiment=fig11", f"method={method}"], {"passkey": TASK_METRICS | shares(0.16)}
        names[name] = save(tmp_path, [*chosen, f"label={method}"], metrics, samples={"passkey": samples})["run_id"]
    words = [*(names.get(word, word) for word in words), "--results-dir", str(tmp_path)]
    assert re.match(said, refusal_of(main, words, capsys))

"""Which questions were lost: recorded and listed."""
# ruff: noqa: F811, the fixture `loaded` is imported

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.data.generated import MARKER, questions
from harness.results import record as records
from harness.results.lost import compared, main
from harness.scoring.evaluation import run_tasks
from methods.streaming import Streaming
from tests.conftest import refused
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


def save_pair(folder: Path, **fields: Any) -> tuple[str, str]:
    """A run of the full cache and one of H2O; their run_ids."""
    runs = []
    for method, right in (("full", FULL_RIGHT), ("h2o", OWN_RIGHT)):
        samples = [sample_of(at, is_right) for at, is_right in enumerate(right)]
        metrics = {"passkey": TASK_METRICS | shares(1.0 if method == "full" else 0.16)}
        about = {"samples": {"passkey": samples}} | fields
        runs.append(save(folder, ["experiment=fig11", f"method={method}"], metrics, **about)["run_id"])
    return runs[0], runs[1]


def test_runs_with_other_questions_are_not_compared(tmp_path):
    save_pair(tmp_path)
    others = [sample_of(at + 1, True) for at in range(4)]
    metrics = {"passkey": TASK_METRICS | shares(0.16)}
    save(tmp_path, ["experiment=fig11", "method=streaming"], metrics, samples={"passkey": others})
    found = {record["config"]["method_name"]: record for record in records.read_all(tmp_path)}
    uneven = [sample | {"acc": 0.5} for sample in found["h2o"]["samples"]["passkey"]]
    for record in (found["streaming"], found["h2o"] | {"samples": {"passkey": uneven}}):
        with refused("no answers of right and wrong that a run of the full cache gave"):
            compared(record, [*found.values()])


def test_the_command_lists_lost_questions(tmp_path, capsys):
    _, own = save_pair(tmp_path)
    assert main([own[:8], "--results-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    said = "acc: of 4 questions the full cache has 3 right, this run 2; lost 2, gained 1\n"
    assert said in text
    assert re.findall(r"^question (\d) \(acc\)$", text, re.MULTILINE) == ["1", "3"]
    assert re.search(r"question 1 \(acc\)\n  context   … item 1 is 1111\. …\n  question  Question: what is", text)
    assert "  right     1111\n  full      1111\n  method    2222\n" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["zzz"], r"RUN=zzz: 0 finished runs in .* begin so; allowed: "),
        ([""], r"RUN=: 3 finished runs in .* begin so; allowed: "),
        (["FULL"], r"run .*: no answers of right and wrong that a run of the full cache gave"),
        (["OWN", "--task", "paskey"], r"--task=paskey: did you mean 'passkey'\?"),
        (["TEXT"], r"run .*: no answers of right and wrong"),
    ],
)
def test_refused_in_one_line(words, said, tmp_path, capsys):
    full, own = save_pair(tmp_path)
    text = save(tmp_path, ["experiment=perplexity", "method=h2o"], {"offline": {"perplexity": 2.0} | shares(0.16)})
    names = {"FULL": full, "OWN": own, "TEXT": text["run_id"]}
    words = [*(names.get(word, word) for word in words), "--results-dir", str(tmp_path)]
    assert re.match(said, refusal_of(main, words, capsys))

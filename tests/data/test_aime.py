"""AIME 2024 to 2026 without a network: the package's rows under lm-eval's prompts and scores."""

import importlib.metadata
import importlib.util
import socket

import pytest

from harness.data import aime
from harness.data.tasks import load_suite
from harness.errors import UserError
from harness.results.inputs import tasks as identity
from harness.run.compose import load
from harness.settings.task_config import AIME_TASKS
from tests.runs import without

FIRST_ANSWERS = {"aime24": "73", "aime25": "70", "aime26": "277"}
"""As the American Invitational Mathematics Examination published them, in the package's order."""


@pytest.mark.skipif(importlib.util.find_spec("sgl_eval") is None, reason=f"needs {aime.INSTALL}")
@pytest.mark.parametrize("task", AIME_TASKS)
def test_a_year_has_thirty_problems_under_lm_evals_prompt(task, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a network was asked"))
    made = load_suite(load(["experiment=tasks", f"tasks=[{task}]"]), None).tasks[task]
    docs = list(made.eval_docs)
    assert len(docs) == 30 and docs[0]["answer"] == FIRST_ANSWERS[task]
    assert all(0 <= int(doc["answer"]) <= 999 for doc in docs)
    made.build_all_requests(limit=1)
    prompt, options = made.instances[0].args
    assert prompt == f"Question: {docs[0]['problem']}\nAnswer:" and options["max_gen_toks"] == 32768
    boxed = rf"So $x = 5$, and the sum is \boxed{{{docs[0]['answer']}}}."
    assert made.process_results(docs[0], [boxed]) == {"exact_match": 1}
    assert made.process_results(docs[0], [r"\boxed{1000}"]) == {"exact_match": 0}
    shorter = ["experiment=tasks", f"tasks=[{task}]", "num_samples=2", "metadata.max_gen_toks=9"]
    few = load_suite(load(shorter), None).tasks[task]
    few.build_all_requests()
    assert list(few.eval_docs) == docs[:2] and few.instances[1].args[1]["max_gen_toks"] == 9


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", without("sgl-eval"))
    with pytest.raises(UserError) as refusal:
        identity(load(["experiment=tasks", "tasks=[aime26]"]))
    lacking = "tasks=aime26: needs the Python package sgl-eval, which is not installed"
    assert str(refusal.value) == f"{lacking}: {aime.INSTALL}"

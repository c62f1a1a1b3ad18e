"""`Model.ask`: several questions to one context, each as if it were the only one."""

from __future__ import annotations

import importlib.util
import re

import pandas as pd
import pytest

import harness
from harness.model.attached import Attached
from tests.conftest import refused
from tests.runs import calls_of
from tests.tokens import byte_tokenizer

CONTEXT = "The cat sat on the mat, and the dog ate the hat. " * 2
QUESTIONS = ["Who sat?", "Who ate?"]  # of one length, so that T is the same alone
NEW = 7
SHORT = {"calibration.num_tokens": 64, "platform.link_gbps": 1, "max_new_tokens": NEW, "quiet": True}
METHODS = {
    "infinigen": {"budget": 0.6},
    "full": {},
    "h2o": {"budget": 0.6},
    "snapkv": {"budget": "nearest:0.6", "method.window": 8},
    "int4": {},
    "shadowkv": {"budget": "nearest:0.6"},
}
if importlib.util.find_spec("kvpress") is not None:
    METHODS["kvpress:KnormPress"] = {"budget": "nearest:0.6"}


@pytest.fixture(scope="module")
def model(network):
    return harness.load(network, byte_tokenizer())


PLACED = [(method, ("host", "device")[number % 2]) for number, method in enumerate(METHODS)]


@pytest.mark.parametrize(("method", "placement"), PLACED)
def test_each_question_is_answered_as_if_it_were_the_only_one(model, method, placement):
    words = METHODS[method] | {"method": method, "placement": placement}
    together = model.ask(CONTEXT, QUESTIONS, **words, **SHORT)
    alone = [model.ask(CONTEXT, [question], **words, **SHORT) for question in QUESTIONS]
    shared = ["method", "asked_budget", "question", "answer", "num_tokens", "budget"]
    pd.testing.assert_frame_equal(together[shared], pd.concat(alone, ignore_index=True)[shared], check_exact=True)
    assert list(together.question) == QUESTIONS and set(together.num_tokens) == {NEW}
    assert (together[["ttft_s", "decode_s", "kv_bytes"]] > 0).all(axis=None) and together.attrs["context_s"] > 0


def test_the_full_cache_does_not_mind_when_it_knows_a_question(model):
    questions = ["Who?", "And why did the dog eat it?", "Who?"]
    asked = model.ask(CONTEXT, questions, method="full", **SHORT)
    assert [*asked.answer] == [model.generate(CONTEXT + text, method="full", **SHORT).text for text in questions]


def test_the_context_runs_once_and_its_cache_is_shared(model, monkeypatch):
    """No row of it is copied for a question where a method evicts nothing more."""
    passes = calls_of(monkeypatch, Attached, "forward")
    asked = model.ask(CONTEXT, QUESTIONS, method="snapkv", budget="nearest:0.6", **SHORT, **{"method.window": 8})
    assert [ids.shape[1] >= len(CONTEXT) for _, ids, *_ in passes].count(True) == 1
    full = model.ask(CONTEXT, QUESTIONS, method="full", **SHORT)
    assert asked.kv_bytes.max() < 0.9 * full.kv_bytes.min(), "memory is that of what is kept"


def test_an_answer_ends_with_the_model_and_the_next_one_sees_nothing_of_it(network, model, monkeypatch):
    free = model.ask(CONTEXT, QUESTIONS, method="h2o", **SHORT)
    token = byte_tokenizer()(free.answer[1][2], add_special_tokens=False)["input_ids"][0]
    monkeypatch.setattr(network.generation_config, "eos_token_id", token)
    ended = model.ask(CONTEXT, QUESTIONS, method="h2o", **SHORT)
    for text, whole in zip(ended.answer, free.answer, strict=True):
        assert whole.startswith(text)
    assert len(ended.answer[1]) < NEW


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"questions": "Who?"}, "questions='Who?': must be a list, such as questions=['Who?']"),
        ({"questions": ["Who?", ""]}, "questions: '' makes no tokens; give a text"),
        ({"context": 3}, "context=3: must be text"),
        ({"context": ""}, "context='': must be text, and not empty"),
        ({"max_new_tokens": 5000}, "context and question of 106 tokens and max_new_tokens=5000: must be at least 1"),
        (
            {"placement": "disk", "platform.link_gbps": None},
            "placement=disk: questions cannot go on from one cache there",
        ),
    ],
)
def test_wrong_questions_are_refused_in_one_line(model, words, message):
    given = {"context": CONTEXT, "questions": QUESTIONS, "method": "full"} | SHORT | words
    with refused(re.escape(message)):
        model.ask(**given)

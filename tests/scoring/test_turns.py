"""Several questions to one cache, each as if it were the only one, and asked both ways: known, or not."""
# ruff: noqa: F811, the fixture `loaded` is imported

import random
import statistics

import pytest

from harness.errors import UserError
from harness.model.attach import attach
from harness.results.samples import clustered_stderr
from harness.run.compose import load
from harness.scoring.answers import Request, generate
from harness.scoring.evaluation import KNOWN, LESS, UNKNOWN, run_turns
from harness.settings.config import SamplingConfig
from methods.full import Full
from methods.h2o import H2O
from tests.cases import CASES
from tests.data.test_tasks import ANSWERED, loaded, settings, write_rows, write_yaml  # noqa: F401, a fixture
from tests.living import setup_of, tiny
from tests.tokens import byte_tokenizer


@pytest.fixture(autouse=True)
def without_end(monkeypatch):
    monkeypatch.setattr(tiny("gqa").generation_config, "eos_token_id", None)


# One cache, several questions


def turns_of(contexts: int = 2, questions: int = 4, seed: int = 0) -> list[Request]:
    """Questions of different lengths to random contexts, all of one context with one T."""
    rng = random.Random(seed)
    made = []
    for number in range(contexts):
        context = [rng.randrange(3, 250) for _ in range(30 + 7 * number)]
        for turn in range(questions):
            ids = (*context, *(rng.randrange(3, 250) for _ in range(3 + 2 * turn)))
            longest = len(context) + 3 + 2 * (questions - 1)
            made.append(Request(ids, len(ids), len(context), longest + 8, ("task", len(made)), 8))
    return made


def answers_of(requests: list[Request], name: str) -> list[list[int]]:
    with attach(tiny("gqa")) as attached:
        setup = setup_of(attached, CASES[name])
        answers, _ = generate(requests, attached, setup, lambda count: None, tokenizer=byte_tokenizer())
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("name", ["h2o", "infinigen", "quest", "kivi", "shadowkv", "snapkv"])
def test_no_question_leaves_a_trace_in_another(name):
    asked = turns_of()
    expected = [answers_of([request], name)[0] for request in asked]
    assert answers_of(asked, name) == expected
    order = list(range(len(asked)))
    random.Random(0).shuffle(order)
    assert answers_of([asked[at] for at in order], name) == [expected[at] for at in order]


# The experiment


def turns(*tasks: str, **changes):
    return settings(*tasks, **({"prefill": "both", "experiment": "turns", "num_samples": 12} | changes))


@pytest.mark.parametrize("method", [Full(), H2O(heavy_frac=0.1, recent_frac=0.1)], ids=["full", "h2o"])
def test_both_ways_of_a_task_of_choices(method, loaded):
    """12 questions to two contexts, against each question alone: its own dense prompt, or the context and one T."""
    config = turns("kv_recall", method=method)
    outcome = run_turns(config, loaded)
    metrics, samples = outcome.metrics["kv_recall"], outcome.samples["kv_recall"]
    assert (metrics["num_samples"], metrics["num_contexts"]) == (12, 2)
    assert [sample["context"] for sample in samples] == [0] * 8 + [1] * 4
    contexts = [0] * 8 + [1] * 4
    values = {way: [sample[f"{way},acc"] for sample in samples] for way in (UNKNOWN, KNOWN, LESS)}
    for way, each in values.items():
        assert metrics[f"{way},acc"] == pytest.approx(statistics.mean(each))
        assert metrics[f"{way},acc_stderr"] == pytest.approx(clustered_stderr(each, contexts))
    assert values[LESS] == [one - other for one, other in zip(values[UNKNOWN], values[KNOWN], strict=True)]
    for way in (UNKNOWN, KNOWN):
        assert [sample[way]["predicted"] == sample[way]["gold"] for sample in samples] == [v == 1 for v in values[way]]
    lengths = [(sample[UNKNOWN]["prefill_len"], sample[KNOWN]["prefill_len"]) for sample in samples]
    assert [known for _, known in lengths] == [sample[KNOWN]["context_tokens"] - 1 for sample in samples]
    assert len({unknown for unknown, _ in lengths}) <= 2
    likely = {way: [sample[way]["log_likelihoods"] for sample in samples] for way in (UNKNOWN, KNOWN)}
    if isinstance(method, Full):
        for one, other in zip(likely[UNKNOWN], likely[KNOWN], strict=True):
            assert one == pytest.approx(other, abs=1e-3)
        assert set(values[LESS]) == {0} and metrics["budget"] == metrics["known_budget"] == 1
    else:
        assert likely[UNKNOWN] != likely[KNOWN] and metrics["budget"] < 0.8 and metrics["known_budget"] < 0.8


TOLD = ANSWERED | {"task": "toy_told", "dataset_path": "org/told", "doc_to_text": "{{story}}\n\nQ: {{question}}\nA:"}


ROLLING = {"output_type": "loglikelihood_rolling", "metric_list": [{"metric": "word_perplexity"}]}


@pytest.fixture
def told(tmp_path):
    """A task of one's own: five questions to two stories."""
    rows = [
        {"story": f"Story {n // 3}: {'abcdefgh'[n // 3 :]}.", "question": "?" * (n + 1), "answer": "x"}
        for n in range(5)
    ]
    write_rows(tmp_path / "data/toy_told/test.jsonl", rows)
    return {"folder": write_yaml(tmp_path / "own", TOLD), "root": tmp_path / "data"}


def test_a_task_of_lm_eval_whose_documents_share_a_context(told, loaded):
    outcome = run_turns(turns("toy_told", **told), loaded)
    metrics, samples = outcome.metrics["toy_told"], outcome.samples["toy_told"]
    assert (metrics["num_samples"], metrics["num_contexts"]) == (5, 2)
    assert [sample["context"] for sample in samples] == [0, 0, 0, 1, 1]
    assert [sample[UNKNOWN]["text"] for sample in samples] == [sample[KNOWN]["text"] for sample in samples]
    assert {f"{way},exact_match" for way in (UNKNOWN, KNOWN, LESS)} <= {*metrics}
    assert {f"{way},generated_tokens" for way in (UNKNOWN, KNOWN, LESS)} <= {*metrics}
    sampled = turns("toy_told", **told, sampling=SamplingConfig(temperature=1.0, repeats=2))
    repeats = run_turns(sampled, loaded).samples["toy_told"]
    texts = [[each["text"] for each in sample[way]["repeats"]] for sample in repeats for way in (UNKNOWN, KNOWN)]
    assert texts[::2] == texts[1::2] and all(len(set(each)) == 2 for each in texts), "the same random numbers both ways"


@pytest.mark.parametrize(
    ("changes", "of_task", "said"),
    [
        ({"task": {"question_marker": "Now:"}}, {}, "task toy_told, question 0: prefill=both finds no .* not there"),
        ({}, ROLLING, "task toy_told: scores whole texts, so prefill=both"),
        ({"sampling": SamplingConfig(top_p=0.5)}, {}, "top_p=0.5: the most likely token is taken"),
    ],
)
def test_what_cannot_be_asked_in_turns(changes, of_task, said, told, loaded):
    write_yaml(told["folder"], TOLD | of_task)
    with pytest.raises(UserError, match=f"^{said}"):
        run_turns(turns("toy_told", **told, **changes), loaded)
    with pytest.raises(UserError, match="^too_long=truncate: prefill=both would cut a context"):
        load(["experiment=turns", "too_long=truncate"])

"""Log-likelihoods through replay: HFLM's numbers for the full cache, and no trace of how work was shared."""

from dataclasses import replace

import pytest
import torch
from cases import CASES, Case
from living import setup_of
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokens import byte_tokenizer

from harness.accuracy.answers import Request, Score, score
from harness.accuracy.evaluation import decode_rows
from harness.accuracy.lm import Prefill, ReplayLM
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.load import LoadedModel
from harness.replay import ReplaySession
from harness.sizes import ReadStats

MAX_LENGTH = 512
TOKENIZER = byte_tokenizer()
EXAMPLES = "Q: one?\nA: two.\n\nQ: three?\nA: four.\n\n"
QUESTIONS = [
    [(EXAMPLES + "Q: what is it?\nA:", choice) for choice in (" red", " reddish brown", " blue", " x")],
    [(EXAMPLES + "Q: and now, for something longer?\nA:", choice) for choice in (" yes", " no")],
    [("Other.\n\nQ: who?\nA: ", choice) for choice in ("me", "you")],  # its space moves to the continuation
    [("Other.\n\nThe " + name + " is", " the one.") for name in ("tall man", "cat")],  # choices in the context
]
UNSHARED = [
    [("", "Once upon"), ("", "Once more")],
    [("", "ab"), ("", "cd")],  # nothing is equal after the prompt
    [("A single", " continuation of one context")],
]
TEXTS = ["ab", "The quick brown fox jumps over the lazy dog. " * 3, EXAMPLES * 2]
DENSE, QUESTION = Prefill("dense"), Prefill("question")


def instances(questions, kind="loglikelihood") -> list[Instance]:
    """Each question is a list of the arguments of its choices."""
    return [
        Instance(kind, {}, arguments, index, metadata=("task", number, 1))
        for number, choices in enumerate(questions)
        for index, arguments in enumerate(choices)
    ]


def work_of(monkeypatch) -> list[tuple[str, int, int]]:
    """Each prefill and decode of a session from now on: its name, real tokens, and tokens with the padding."""
    calls = []

    def counted(name, function):
        def count(self, ids, valid, multiplicity=None):
            calls.append((name, int(valid.sum()), ids.numel()))
            return function(self, ids, valid, multiplicity)

        return count

    for name in ("prefill", "decode"):
        monkeypatch.setattr(ReplaySession, name, counted(name, getattr(ReplaySession, name)))
    return calls


def run(model, requests, case: Case = CASES["full"]) -> tuple[list[Score], ReadStats]:
    with attach(model) as attached:
        return score(requests, attached, setup_of(attached, case), lambda count: None)


def language_model(prefill, *, model=None, max_length=MAX_LENGTH, tokenizer=TOKENIZER, **options) -> ReplayLM:
    """Without a scorer or generator in `options`, a request for a score or a text fails the test."""
    workers = {"scorer": pytest.fail, "generator": pytest.fail}
    lm = ReplayLM(LoadedModel(model, tokenizer, "tiny", max_length, "f" * 64), prefill, **(workers | options))
    lm.cache_hook.dbdict = {}
    return lm


def scoring(prefill, model, **options) -> ReplayLM:
    """Scores by the full cache."""
    return language_model(prefill, scorer=lambda requests: run(model, requests)[0], **options)


def hflm(model, max_length=MAX_LENGTH, batch_size=2) -> HFLM:
    return HFLM(pretrained=model, tokenizer=TOKENIZER, batch_size=batch_size, max_length=max_length)


def planned(questions, prefill, **options) -> list[Request]:
    lm = language_model(prefill, **({"scorer": lambda requests: [Score(0.0, False)] * len(requests)} | options))
    lm.loglikelihood(instances(questions))
    return lm.requests


def furthest(scores, others) -> float:
    return max(abs(one.log_likelihood - other.log_likelihood) for one, other in zip(scores, others, strict=True))


@pytest.mark.parametrize("prefill", [DENSE, QUESTION, Prefill("artifact", budget=0.3)])
@pytest.mark.parametrize("family", ["gqa", "opt"])
def test_full_cache_equals_hflm(family, prefill, request):
    model = request.getfixturevalue(f"tiny_{family}")
    questions = QUESTIONS if prefill.mode == "question" else QUESTIONS + UNSHARED
    expected = hflm(model).loglikelihood(instances(questions), disable_tqdm=True)
    lm = scoring(prefill, model)
    found = lm.loglikelihood(instances(questions))
    difference = max(abs(own[0] - stock[0]) for own, stock in zip(found, expected, strict=True))
    assert difference < 1e-3, f"largest difference {difference:.1e} nats"
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert sorted(lm.cache_hook.dbdict.values()) == sorted(found)
    lengths = [len(choice) for _, choice in QUESTIONS[0]]
    means = scoring(prefill, model, mean=True).loglikelihood(instances(QUESTIONS[:1]))
    assert [mean for mean, _ in means] == pytest.approx([found[at][0] / n for at, n in enumerate(lengths)], abs=1e-4)


def test_a_greedy_continuation_is_recognised(tiny_gqa):
    context = TOKENIZER("Q: what?")["input_ids"]
    for _ in range(3):
        context.append(int(tiny_gqa(torch.tensor([context])).logits[0, -1].argmax()))
    likely = Request(tuple(context), len(context) - 3, len(context) - 4, len(context), ("task", 0))
    other = likely._replace(ids=(*likely.ids[:-1], (likely.ids[-1] + 1) % 256))
    assert [each.is_greedy for each in run(tiny_gqa, [likely, other])[0]] == [True, False]


@pytest.mark.parametrize("mode", ["dense", "question", "artifact"])
@pytest.mark.parametrize("name", ["full", "h2o", "infinigen", "streaming", "int4"])
def test_sharing_and_batches_leave_no_trace(name, mode, tiny_gqa, monkeypatch):
    """Scored together, with everything shared and padded, as scored one request at a time or in small batches."""
    case = CASES[name]
    requests = planned(QUESTIONS, Prefill(mode, budget=0.0 if case.codec else case.method.artifact_budget()))
    together, reads = run(tiny_gqa, requests, case)
    alone = [run(tiny_gqa, [request], case) for request in requests]
    assert furthest(together, [scores[0] for scores, _ in alone]) < 1e-3
    summed = sum((each for _, each in alone), ReadStats(code_bits=reads.code_bits))
    assert (reads.rows, reads.fired_rows) == (summed.rows, summed.fired_rows)
    assert reads.rows == len(decode_rows(requests))
    for sums in ("frac_sum", "index_sum", "resident_sum", "pairs_read", "pairs"):
        assert getattr(reads, sums) == pytest.approx(getattr(summed, sums), rel=1e-6), sums
    if name != "full":
        assert reads.size < 0.9, "the method must have dropped something for this test to mean anything"
    for constant, size in (("PROMPT_TOKENS", 1), ("CACHE_TOKENS", 100), ("HEAD_ROWS", 3)) * (mode == "artifact"):
        monkeypatch.setattr(f"harness.accuracy.answers.{constant}", size)
        found, again = run(tiny_gqa, requests, case)
        assert furthest(found, together) < 1e-3, constant
        assert again.frac_sum == pytest.approx(reads.frac_sum, rel=1e-6)


def test_each_piece_of_work_is_done_once_and_little_is_padded(tiny_gqa, monkeypatch):
    calls = work_of(monkeypatch)
    choices = (" red", " reddish", " blue")
    requests = planned([[("Q: a rather long question?\nA:", choice) for choice in choices]], DENSE)
    run(tiny_gqa, requests)
    done = {kind: sum(real for name, real, _ in calls if name == kind) for kind in ("prefill", "decode")}
    # Equal in all choices: the context's last token and the space. Then "re", "reddis" and "blu" are run for each.
    assert done == {"prefill": requests[0].context_len - 1, "decode": 2 + 2 + 6 + 3}
    calls.clear()
    run(tiny_gqa, planned([[("Q:", " a"), ("Q:", "-" * 60), ("Q:", "_" * 59)]], DENSE))
    assert max(padded / real for _, real, padded in calls) < 2


@pytest.mark.parametrize(
    ("prefill", "expected"),
    [
        (DENSE, [17, 17]),
        (QUESTION, [7, 7]),  # "Some ex" and not the token of ".\n\n", which holds the marker
        (Prefill("question", marker="\nA"), [15, 15]),
        (Prefill("artifact", budget=0.25), [5, 5]),  # T = 18 + 5
        (Prefill("artifact", budget=0.0), [1, 1]),
        (Prefill("artifact", budget=1.0), [17, 17]),
    ],
)
def test_where_the_prompt_ends(prefill, expected):
    context = "Some ex.\n\nQ: who?\nA:"
    assert len(TOKENIZER(context)["input_ids"]) == 18
    requests = planned([[(context, " you"), (context, " them")]], prefill)
    assert [request.prefill_len for request in requests] == expected
    assert [request.final_length for request in requests] == [18 + 5] * 2
    assert {request.document for request in requests} == {("task", 0)}


def test_the_last_marker_counts_and_choices_in_the_context_have_one_final_length():
    (request,) = planned([[("a\n\nb\n\ncd", " e")]], QUESTION)
    assert TOKENIZER.decode(request.prompt) == "a\n\nb"
    short, long = planned([QUESTIONS[3][::-1]], Prefill("artifact", budget=0.5))
    assert short.context_len < long.context_len
    assert short.final_length == long.final_length == len(long.ids)
    assert short.prefill_len == long.prefill_len == long.final_length // 2


LONG_QUESTION = ("a\n\nQ: a rather long question?\nA:", " yes")


@pytest.mark.parametrize(
    ("question", "options", "message"),
    [
        (("no separator", " x"), {"prefill": QUESTION}, "task task, question 0: prefill=question needs '\\\\n\\\\n'"),
        (("\n\nat the start", " x"), {"prefill": QUESTION}, "prefill=question needs"),
        (("", "x" * 9), {"prefill": QUESTION}, "prefill=question needs"),
        (("c" * 510, " xyz"), {}, "context and answer have 513 tokens, the model takes 512; lower"),
        (("", "x"), {}, "2 tokens leave no decode row"),
        (("a", "x" * 513), {"too_long": "truncate"}, "have .* tokens, the model takes 512; lower num_fewshot, choose"),
        (LONG_QUESTION, {"prefill": QUESTION, "too_long": "truncate", "max_length": 20}, "prefill=question needs"),
        (("a", " b"), {"tokenizer": None}, "model tiny has no tokenizer"),
    ],
)
def test_refused(question, options, message):
    with pytest.raises(UserError, match=message):
        planned([[question]], **({"prefill": DENSE, "scorer": pytest.fail} | options))


def test_what_fits_is_taken(tiny_gqa):
    assert len(run(tiny_gqa, planned([[("c" * 510, " xy")]], DENSE))[0]) == 1
    question = ("a long beginning\n\nQ: who?\nA:", " you.")
    (request,) = planned([[question]], QUESTION, max_length=30, too_long="truncate")
    assert TOKENIZER.decode(request.prompt) == " long beginning"


def test_a_method_that_did_not_run_is_an_error(tiny_gqa, monkeypatch):
    decode = ReplaySession.decode

    def idle(self, *arguments):
        hidden = decode(self, *arguments)
        self.reads = replace(self.reads, fired_rows=0.0)
        return hidden

    monkeypatch.setattr(ReplaySession, "decode", idle)
    with pytest.raises(UserError, match="the method ran on 0 of"):
        run(tiny_gqa, planned([QUESTIONS[0]], DENSE), CASES["h2o"])


def test_a_text_that_brings_its_own_prefix_token_gets_no_second_one():
    class Tokenizer:
        bos_token_id, eos_token_id, is_fast = 1, 2, True

        def decode(self, token):
            return "<s>"

        def __call__(self, text, add_special_tokens=True, **options):
            return {"input_ids": [1] * add_special_tokens + list(text.encode())}

    lm = language_model(DENSE, tokenizer=Tokenizer())
    assert lm.tok_encode("ab") == [1, 97, 98]
    assert lm.tok_encode("<s>ab")[0] == ord("<")
    assert lm.tok_encode("ab", add_special_tokens=False) == [97, 98]
    assert (lm.prefix_token_id, lm.eot_token_id) == (1, 2)


@pytest.mark.parametrize("max_length", [50, 512])
@pytest.mark.parametrize("prefill", [DENSE, Prefill("artifact", budget=0.3)])
def test_whole_texts_are_scored_as_hflm_scores_them(prefill, max_length, tiny_gqa):
    texts = instances([[(text,)] for text in TEXTS], "loglikelihood_rolling")
    expected = hflm(tiny_gqa, max_length).loglikelihood_rolling(texts, disable_tqdm=True)
    lm = scoring(prefill, tiny_gqa, max_length=max_length)
    found = lm.loglikelihood_rolling(texts)
    assert found == pytest.approx(expected, abs=1e-3)
    assert sorted(lm.cache_hook.dbdict.values()) == sorted(found)
    windows = [-(-len(TOKENIZER(text)["input_ids"]) // max_length) for text in TEXTS]
    documents = [number for number, count in enumerate(windows) for _ in range(count)]
    assert [request.document[1] for request in lm.requests] == documents
    dense = [request.prefill_len for request in lm.requests if request.context_len == 1]
    assert len(dense) >= len(TEXTS) and set(dense) == {1}, "every row past the first is a decode row"
    assert all(request.final_length == len(request.ids) <= max_length + 1 for request in lm.requests)
    with pytest.raises(UserError, match="task task: scores whole texts, in which prefill=question finds no question"):
        language_model(QUESTION).loglikelihood_rolling(texts)


def test_contexts_are_cut_on_the_left_as_hflm_does(tiny_gqa):
    questions = [QUESTIONS[0][:2], QUESTIONS[2]]
    expected = hflm(tiny_gqa, 40).loglikelihood(instances(questions), disable_tqdm=True)
    lm = scoring(DENSE, tiny_gqa, max_length=40, too_long="truncate")
    found = lm.loglikelihood(instances(questions))
    assert [each for each, _ in found] == pytest.approx([each for each, _ in expected], abs=1e-3)
    assert [len(request.ids) for request in lm.requests][:2] == [41, 41]
    assert lm.truncated == {("task", 0)}
    assert {request.final_length for request in lm.requests if request.document[1] == 0} == {41}

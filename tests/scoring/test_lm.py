"""Log-likelihoods and texts through replay: HFLM's for the full cache, live decoding's tokens for every method, and no
trace of how work was shared."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from harness.checks.families import tiny_family
from harness.decode.session import generate as live_texts
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.budgets import SHARES, ReadStats
from harness.model.load import LoadedModel
from harness.replay.session import ReplaySession
from harness.replay.setup import Setup
from harness.run.compose import load
from harness.scoring.answers import Request, Score, Written, generate, score
from harness.scoring.lm import ReplayLM, decode_rows
from harness.scoring.planning import Prefill, QuestionFinder
from harness.settings.config import GREEDY, LOWEST_TEMPERATURE, SamplingConfig
from methods.full import Full
from tests.cases import CASES
from tests.living import endless, open_live, setup_of, tiny
from tests.tokens import byte_tokenizer, framing_tokenizer, starting_tokenizer

MAX_LENGTH = 512
NEW = 12
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
CONTEXT = "Some example.\n\nAnother one, somewhat longer.\n\n"
LONGER = CONTEXT + "Q: what is it now, and what was it then?\nA:"
CONTEXTS = [CONTEXT + "Q: who?\nA:", LONGER, "A shorter one.\n\nQ: why?\nA:"]
DENSE = Prefill("dense")
QUESTION = Prefill("question", QuestionFinder("\n\n"))


@pytest.fixture(autouse=True)
def without_end(monkeypatch):
    """Tiny models end at no token of their own accord."""
    monkeypatch.setattr(tiny("gqa").generation_config, "eos_token_id", None)


def choices(*questions: list[tuple[str, ...]], kind: str = "loglikelihood") -> list[Instance]:
    """What lm-eval asks; each question is a list of the arguments of its choices."""
    return [
        Instance(kind, {}, arguments, index, metadata=("task", number, 1))
        for number, of_question in enumerate(questions)
        for index, arguments in enumerate(of_question)
    ]


def texts(*contexts: str, **settings) -> list[Instance]:
    """Answers to these contexts, which lm-eval asks for."""
    return choices(*([(context, settings)] for context in contexts), kind="generate_until")


def scored(requests: list[Request], name: str = "full", family: str = "gqa") -> tuple[list[Score], ReadStats]:
    with attach(tiny(family)) as attached:
        return score(requests, attached, setup_of(attached, CASES[name]), lambda count: None)


def generated(requests: list[Request], name: str = "full") -> tuple[list[Written], ReadStats]:
    with attach(tiny("gqa")) as attached:
        return generate(requests, attached, setup_of(attached, CASES[name]), lambda count: None, tokenizer=TOKENIZER)


def written(requests: list[Request], name: str = "full") -> tuple[list[list[int]], ReadStats]:
    """The tokens of the answers alone."""
    found, reads = generated(requests, name)
    return [each.tokens for each in found], reads


defaults = cache(lambda: load(["experiment=tasks"]))


def language_model(
    prefill=DENSE, *, name="full", family="gqa", max_length=MAX_LENGTH, tokenizer=TOKENIZER, about=None, **settings
) -> ReplayLM:
    """Scores and texts of a case. about: changes of how it is prompted; settings: of the run."""
    config = replace(defaults(), task=replace(defaults().task, **(about or {})), **settings)
    lm = ReplayLM(config, LoadedModel(tiny(family), tokenizer, "tiny", max_length), "task", prefill)
    lm.score = lambda asked: scored(asked, name, family)[0]
    lm.generate = lambda asked: generated(asked, name)[0]
    return lm


def hflm(family: str = "gqa", max_length: int = MAX_LENGTH, batch_size: int = 2) -> HFLM:
    return HFLM(pretrained=tiny(family), tokenizer=TOKENIZER, batch_size=batch_size, max_length=max_length)


def planned(asked: list[Instance], prefill=DENSE, **options) -> list[Request]:
    """What is asked of the model, which does not answer."""
    lm = language_model(prefill, **options)
    lm.score = lambda each: [Score(0.0, False)] * len(each)
    lm.generate = lambda each: [Written([5], False)] * len(each)
    getattr(lm, asked[0].request_type)(asked)
    return lm.requests


def run_of(*settings: str) -> ReplayLM:
    """A run of a task on the tiny model."""
    loaded = LoadedModel(tiny("gqa"), TOKENIZER, "tiny", MAX_LENGTH)
    return ReplayLM(load(["experiment=tasks", *settings]), loaded, "task", DENSE)


def furthest(scores: list[Score], others: list[Score]) -> float:
    return max(abs(one.log_likelihood - other.log_likelihood) for one, other in zip(scores, others, strict=True))


def require_same_sums(reads: ReadStats, others: list[ReadStats]) -> None:
    """The reads of all requests together are the sum of those of each alone."""
    summed = sum(others, ReadStats())
    for name in ("rows", "fired_rows", "frac_sum", "index_sum", "resident_sum", "pairs_read", "pairs"):
        assert getattr(reads, name) == pytest.approx(getattr(summed, name), rel=1e-6), name


# Requests


@pytest.mark.parametrize(
    ("prefill", "expected"),
    [
        (DENSE, 17),
        (QUESTION, 7),  # "Some ex" and not the token of ".\n\n", which holds the marker
        (Prefill("artifact", budget=0.25), 5),  # T = 18 + 5
        (Prefill("artifact", budget=0.0), 1),
        (Prefill("artifact", budget=1.0), 17),
    ],
)
def test_where_the_prompt_of_choices_ends(prefill, expected):
    context = "Some ex.\n\nQ: who?\nA:"
    assert len(TOKENIZER(context)["input_ids"]) == 18
    requests = planned(choices([(context, " you"), (context, " them")]), prefill)
    assert [request.prefill_len for request in requests] == [expected] * 2
    assert [request.final_length for request in requests] == [18 + 5] * 2
    assert {request.document for request in requests} == {("task", 0)}


def test_the_last_marker_counts_and_choices_in_the_context_have_one_final_length():
    (request,) = planned(choices([("a\n\nb\n\ncd", " e")]), QUESTION)
    assert TOKENIZER.decode(request.prompt) == "a\n\nb"
    short, long = planned(choices(QUESTIONS[3][::-1]), Prefill("artifact", budget=0.5))
    assert short.context_len < long.context_len
    assert short.final_length == long.final_length == len(long.ids)
    assert short.prefill_len == long.prefill_len == long.final_length // 2


def test_questions_to_one_cache_have_one_final_length():
    asked = choices(*QUESTIONS[:2])
    finals = {request.final_length for request in planned(asked, QUESTION)}
    in_turns = planned(asked, QUESTION._replace(in_turns=True))
    assert len({request.prompt for request in in_turns}) == 1 and len(finals) == 2
    assert {request.final_length for request in in_turns} == {max(finals)}


def test_what_is_asked_for_a_text():
    def request(context, prefill=DENSE, **settings) -> Request:
        return planned(texts(context, **({"until": []} | settings)), prefill)[0]

    found = request(CONTEXTS[2], until=["\n"], max_tokens=40)
    assert TOKENIZER.decode(found.ids) == CONTEXTS[2] and found.document == ("task", 0)
    assert found.prefill_len == found.context_len == len(found.ids) == found.final_length - 40
    assert found.stops == ("\n", "</s>")
    assert request("", max_tokens=40).ids == (TOKENIZER.bos_token_id,)
    assert request("a").max_new_tokens == 256, "lm-eval's default"
    found = request(CONTEXTS[2], QUESTION, max_gen_toks=9)
    assert TOKENIZER.decode(found.prompt) == "A shorter one"  # the token of ".\n\n" holds the marker
    found = request(CONTEXTS[2] + "  ", Prefill("question", QuestionFinder("A:")), max_gen_toks=9)
    assert TOKENIZER.decode(found.rows) == "A:  ", "a context is taken as it is"
    found = request(CONTEXTS[2], Prefill("artifact", budget=0.5), max_gen_toks=9)
    assert found.prefill_len == (found.context_len + 9) // 2


CUT = {"about": {"too_long": "truncate"}}
ROLLING = choices([(TEXTS[1],)], kind="loglikelihood_rolling")
REFUSED = {
    "question 0: prefill=question finds no .* not there": (choices([("no separator", " x")]), {"prefill": QUESTION}),
    "context and answer have 513 tokens, the model takes 512; lower": (choices([("c" * 510, " xyz")]), {}),
    r"question 0: the continuation '\\n' has no token of its own after the context 'It is.'; let": (
        choices([("It is.", " x"), ("It is.", "\n")]),
        {},
    ),
    "this model has no tokenizer": (choices([("a", " b")]), {"tokenizer": None}),
    "task task: scores whole texts, in which prefill=question finds no question": (ROLLING, {"prefill": QUESTION}),
    "task task: generation_kwargs num_return_sequences=2 is not offered": (texts("a", num_return_sequences=2), {}),
    "top_k=3: the most likely token is taken; set": (texts("a"), {"sampling": SamplingConfig(top_k=3)}),
    "the model takes 64; .* or too_long=truncate": (texts(LONGER, max_gen_toks=20), {"max_length": 64}),
}
"""Requests that are not taken, and the settings, by what is said of them."""


@pytest.mark.parametrize("message", REFUSED)
def test_refused_before_the_model_runs(message):
    asked, options = REFUSED[message]
    with pytest.raises(UserError, match=message):
        lm = language_model(**options)
        lm.score = lm.generate = pytest.fail
        getattr(lm, asked[0].request_type)(asked)


def test_a_model_that_takes_no_padding_answers_in_batches_of_one_length():
    """Prompts and shared rows of unequal lengths: scores and texts are those of each question alone."""
    model = tiny_family("llama4_text", max_position_embeddings=MAX_LENGTH)
    model.generation_config.eos_token_id = None
    asked = planned(choices(*QUESTIONS), QUESTION)
    to_write = planned(texts(*CONTEXTS, max_gen_toks=NEW), QUESTION)
    with attach(model) as attached:
        assert attached.decoder.no_padding
        setup = Setup(Full(), None, None)
        work = attached, setup, lambda count: None
        together, _ = score(asked, *work)
        assert len({len(request.prompt) for request in asked}) > 1 < len({request.num_rows for request in asked})
        for request, found in zip(asked, together, strict=True):
            (alone,), _ = score([request], *work)
            assert found.log_likelihood == pytest.approx(alone.log_likelihood, abs=1e-4)
        written_together, _ = generate(to_write, *work, tokenizer=TOKENIZER)
        for request, found in zip(to_write, written_together, strict=True):
            assert generate([request], *work, tokenizer=TOKENIZER)[0] == [found]


def test_chat_templates(monkeypatch):
    lm, turns = language_model(), [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    for call in (lambda: lm.apply_chat_template(turns), lambda: lm.chat_template(True)):
        with pytest.raises(UserError, match="apply_chat_template=true: model tiny has no chat template"):
            call()
    template = "{% if messages|length > 1 %}{{ raise_exception('no system') }}{% endif %}[{{ messages[0].content }}]"
    monkeypatch.setattr(TOKENIZER, "chat_template", template, raising=False)
    assert lm.apply_chat_template(turns) == hflm().apply_chat_template(turns) == "[hello]"
    assert lm.chat_template(True) == template
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ strftime_now('%d %b %Y %H:%M') }}", raising=False)
    assert lm.apply_chat_template(turns) == "26 Jul 2024 00:00", "the same day every day"


def test_answers_begin_after_the_thinking_as_hflms(monkeypatch):
    template = "[{{ enable_thinking | default('unset') }}] {{ messages[0].content }}"
    monkeypatch.setattr(TOKENIZER, "chat_template", template, raising=False)
    options = {"pretrained": tiny("gqa"), "tokenizer": TOKENIZER, "batch_size": 1, "max_length": MAX_LENGTH}
    asked = texts(*CONTEXTS, max_gen_toks=40, until=["x"])
    whole = language_model().generate_until(asked)
    for thinks in (None, False, True):
        about = {"enable_thinking": thinks, "think_end_token": "^J"}
        stock = HFLM(**options, **about)
        lm = language_model(about=about)
        turn = [{"role": "user", "content": "hello"}]
        assert lm.apply_chat_template(turn) == stock.apply_chat_template(turn)
        answers = lm.generate_until(asked)
        assert answers == stock.generate_until(asked, disable_tqdm=True)
        assert answers != whole


# The full cache as HFLM


@pytest.mark.parametrize("prefill", [DENSE, QUESTION, Prefill("artifact", budget=0.3)])
@pytest.mark.parametrize("family", ["gqa", "opt"])
def test_scores_are_hflms(family, prefill):
    asked = choices(*QUESTIONS, *(UNSHARED if prefill.mode != "question" else ()))
    expected = hflm(family).loglikelihood(asked, disable_tqdm=True)
    lm = language_model(prefill, family=family)
    found = lm.loglikelihood(asked)
    assert [each for each, _ in found] == pytest.approx([each for each, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("max_length", [50, 512])
@pytest.mark.parametrize("prefill", [DENSE, Prefill("artifact", budget=0.3)])
def test_scores_of_whole_texts_are_hflms(prefill, max_length):
    asked = choices(*([(text,)] for text in TEXTS), kind="loglikelihood_rolling")
    expected = hflm(max_length=max_length).loglikelihood_rolling(asked, disable_tqdm=True)
    lm = language_model(prefill, max_length=max_length)
    found = lm.loglikelihood_rolling(asked)
    assert found == pytest.approx(expected, abs=1e-3)
    windows = [-(-len(TOKENIZER(text)["input_ids"]) // max_length) for text in TEXTS]
    documents = [number for number, count in enumerate(windows) for _ in range(count)]
    assert [request.document[1] for request in lm.requests] == documents
    dense = [request.prefill_len for request in lm.requests if request.context_len == 1]
    assert len(dense) >= len(TEXTS) and set(dense) == {1}, "every row past the first is a decode row"
    assert all(request.final_length == len(request.ids) <= max_length + 1 for request in lm.requests)


@pytest.mark.parametrize("prefill", [DENSE, QUESTION, Prefill("artifact", budget=0.2)])
@pytest.mark.parametrize("settings", [{"until": "e", "max_gen_toks": 30}, {"until": ["x", "e"], "max_new_tokens": 9}])
def test_texts_are_hflms(prefill, settings):
    lm, asked = language_model(prefill), texts(*CONTEXTS, **settings)
    expected = hflm(batch_size=3).generate_until(asked, disable_tqdm=True)
    assert lm.generate_until(asked) == expected


def test_contexts_beyond_the_limit_are_cut_on_the_left_as_hflms():
    asked = choices(QUESTIONS[0][:2], QUESTIONS[2])
    expected = hflm(max_length=40).loglikelihood(asked, disable_tqdm=True)
    lm = language_model(max_length=40, **CUT)
    found = lm.loglikelihood(asked)
    assert [each for each, _ in found] == pytest.approx([each for each, _ in expected], abs=1e-3)
    assert [len(request.ids) for request in lm.requests][:2] == [41, 41]
    assert lm.truncated == {("task", 0)}
    assert {request.final_length for request in lm.requests if request.document[1] == 0} == {41}
    asked = texts(*CONTEXTS, max_gen_toks=20, until=["e"])
    for max_length in (64, 70):
        lm = language_model(max_length=max_length, **CUT)
        assert lm.generate_until(asked) == hflm("gqa", max_length, 1).generate_until(asked, disable_tqdm=True)
        assert [request.context_len for request in lm.requests] == [max_length - 20, max_length - 20, 24]
        assert len(lm.truncated) == 2


@pytest.mark.parametrize("made", [starting_tokenizer, framing_tokenizer])
def test_what_is_left_of_a_text_stands_behind_the_start_token(made):
    def split(request: Request) -> tuple[list[int], list[int]]:
        ids = list(request.ids)
        return ids[: request.context_len], ids[request.context_len :]

    start, tokens = [made().bos_token_id], {text: TOKENIZER(text)["input_ids"] for text in (*TEXTS, LONGER)}
    (question,) = planned(choices([(LONGER, " yes")]), tokenizer=made(), max_length=40, **CUT)
    assert split(question) == (start + tokens[LONGER][-36:], TOKENIZER(" yes")["input_ids"])
    (question,) = planned(texts(LONGER, max_gen_toks=20), tokenizer=made(), max_length=60, **CUT)
    assert split(question) == (start + tokens[LONGER][-39:], [])
    (question,) = planned(texts(LONGER, max_gen_toks=20), QUESTION, tokenizer=made(), max_length=80, **CUT)
    assert TOKENIZER.decode(question.prompt) == "<s>somewhat longer"
    whole = choices(*([(text,)] for text in TEXTS), kind="loglikelihood_rolling")
    windows = planned(whole, tokenizer=made(), max_length=50)
    for number, text in enumerate(TEXTS):
        of_text = [split(request) for request in windows if request.document[1] == number]
        assert sum((continuation for _, continuation in of_text), []) == tokens[text]
        assert of_text[0][0] == start and all(len(context) + len(new) <= 51 for context, new in of_text)
        done = len(of_text[0][1])
        for context, continuation in of_text[1:]:
            assert context == start + tokens[text][done - len(context) + 1 : done]
            done += len(continuation)
    assert len(windows) > len(TEXTS)


@pytest.mark.parametrize(
    ("of_task", "differs"),
    [
        ({"num_return_sequences": 1, "num_beams": 1, "length_penalty": 1.0}, False),
        ({"repetition_penalty": 1.0}, True),  # holds before the model's own
        ({"repetition_penalty": 2.5, "no_repeat_ngram_size": 2, "min_p": 0.1}, True),
    ],
)
def test_generation_kwargs_of_a_task_are_hflms(of_task, differs, monkeypatch):
    monkeypatch.setattr(tiny("gqa").generation_config, "repetition_penalty", 1.3)
    plain = {"max_gen_toks": NEW, "until": ["e"]}
    asked = texts(*CONTEXTS, **plain, **of_task)
    found = language_model().generate_until(asked)
    assert found == hflm(batch_size=1).generate_until(asked, disable_tqdm=True)
    assert (found != language_model().generate_until(texts(*CONTEXTS, **plain))) == differs


def test_what_has_no_decode_row_is_scored_densely_as_hflms():
    """Choices of one token without a context, texts of one token and of none, and answers of one token."""
    stock = hflm()
    asked = choices([("", "x"), ("", "y")], QUESTIONS[0], [("", "xy")])
    of_texts = choices([("a",)], [(TEXTS[1],)], [("",)], kind="loglikelihood_rolling")
    of_one_token = texts(*CONTEXTS, until=[], max_gen_toks=1)
    for name in ("full", "h2o"):
        lm = language_model(name=name)
        found = lm.loglikelihood(asked[:2]) + lm.loglikelihood(asked)[-1:]
        expected = stock.loglikelihood([*asked[:2], asked[-1]], disable_tqdm=True)
        assert [each for each, _ in found] == pytest.approx([each for each, _ in expected], abs=1e-3)
        assert (lm.num_dense, len(lm.requests)) == (4, 2 + len(asked))
        lm = language_model(name=name, tokenizer=starting_tokenizer())
        found = lm.loglikelihood_rolling(of_texts)
        expected = stock.loglikelihood_rolling(of_texts[:1], disable_tqdm=True)  # which predicts no start token
        assert [found[0], found[2]] == pytest.approx([*expected, 0], abs=1e-3) and lm.num_dense == 1
    lm = language_model()
    assert lm.generate_until(of_one_token) == stock.generate_until(of_one_token, disable_tqdm=True)
    assert lm.num_dense == 3


def test_a_task_without_any_decode_row_is_the_full_caches_alone():
    requests = planned(choices([("", "x"), ("", "y")]))
    with pytest.raises(UserError, match="^task task: no request leaves a decode row"):
        run_of("method=h2o").score(requests)


# Scores under a method


def test_a_greedy_continuation_is_recognised():
    context = TOKENIZER("Q: what?")["input_ids"]
    for _ in range(3):
        context.append(int(tiny("gqa")(torch.tensor([context])).logits[0, -1].argmax()))
    likely = Request(tuple(context), len(context) - 3, len(context) - 4, len(context), ("task", 0))
    other = likely._replace(ids=(*likely.ids[:-1], (likely.ids[-1] + 1) % 256))
    assert [each.is_greedy for each in scored([likely, other])[0]] == [True, False]


@pytest.mark.parametrize("mode", ["dense", "question", "artifact"])
@pytest.mark.parametrize("name", ["full", "h2o", "infinigen", "streaming", "int4"])
def test_scores_show_no_trace_of_sharing_and_batches(name, mode, monkeypatch):
    """Scored together, with everything shared and padded, as scored one request at a time or in small batches."""
    case = CASES[name]
    prefill = Prefill(mode, QuestionFinder("\n\n"), 0.0 if case.codec else case.method.artifact_budget())
    requests = planned(choices(*QUESTIONS), prefill)
    together, reads = scored(requests, name)
    alone = [scored([request], name) for request in requests]
    assert furthest(together, [scores[0] for scores, _ in alone]) < 1e-3
    require_same_sums(reads, [each for _, each in alone])
    assert reads.rows == len(decode_rows(requests))
    assert name == "full" or reads.budget < 0.9, "the method must have dropped something for this to mean anything"
    for constant, size in (("PROMPT_TOKENS", 1), ("CACHE_TOKENS", 100), ("HEAD_ROWS", 3)) * (mode == "artifact"):
        monkeypatch.setattr(f"harness.scoring.answers.{constant}", size)
        found, again = scored(requests, name)
        assert furthest(found, together) < 1e-3, constant
        assert again.frac_sum == pytest.approx(reads.frac_sum, rel=1e-6)


def test_a_method_that_did_not_run_is_an_error(monkeypatch):
    decode = ReplaySession.decode

    def idle(self, *arguments):
        hidden = decode(self, *arguments)
        self.reads = replace(self.reads, fired_rows=0.0)
        return hidden

    monkeypatch.setattr(ReplaySession, "decode", idle)
    with pytest.raises(UserError, match="the method ran on 0 of"):
        scored(planned(choices(QUESTIONS[0])), "h2o")


# Texts under a method


def to_write(contexts, prefill_len=None, max_new_tokens=NEW, stops=()) -> list[Request]:
    """Requests whose prompt is the context, or ends at a given token, or that many tokens before the end (negative)."""
    requests = []
    for number, context in enumerate(contexts):
        ids = tuple(TOKENIZER(context)["input_ids"])
        prompt = len(ids) if prefill_len is None else prefill_len % len(ids)
        lengths = (len(ids), prompt, len(ids) + max_new_tokens)
        requests.append(Request(ids, *lengths, ("task", number), max_new_tokens, tuple(stops)))
    return requests


def answer(request: Request, name: str = "full", **changes) -> list[int]:
    return written([request._replace(**changes)], name)[0][0]


def live(request: Request, name: str) -> list[int]:
    """The tokens that live decoding gives after the request's prompt; the rest of its context is fed."""
    forced = list(request.rows)
    with attach(tiny("gqa")) as attached:
        session = open_live(attached, CASES[name], len(forced) + request.max_new_tokens)
        ids = torch.tensor([request.prompt])
        logits = session.prefill(ids, torch.ones_like(ids, dtype=torch.bool))
        for token in forced:
            logits = session.decode_step(torch.tensor([token]))
        tokens = [int(logits.argmax())]
        while len(tokens) < request.max_new_tokens:
            logits = session.decode_step(torch.tensor(tokens[-1:]))
            tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize("prefill_len", [None, -9], ids=["dense", "question"])
@pytest.mark.parametrize("name", ["full", "int4", "h2o", "infinigen", "kivi", "freekv", "shadowkv", "pool-lru"])
def test_tokens_are_those_of_live_decoding(name, prefill_len, monkeypatch):
    """In one padded batch or in several, whatever else is in it; T is the context and `max_new_tokens`."""
    requests = to_write(CONTEXTS, prefill_len)
    answers, reads = written(requests, name)
    assert answers == [live(request, name) for request in requests]
    assert reads.rows == reads.fired_rows == sum(request.num_rows for request in requests)
    assert name == "full" or reads.budget < 0.97
    monkeypatch.setattr("harness.scoring.answers.CACHE_TOKENS", 100)
    again, others = written(requests, name)
    assert again == answers
    assert (others.rows, others.frac_sum) == (reads.rows, pytest.approx(reads.frac_sum, rel=1e-6))


def test_what_ends_an_answer(monkeypatch):
    (request,) = to_write([CONTEXTS[0]])

    def ended(**changes) -> tuple[list[int], bool]:
        """The tokens, and whether the limit ended them."""
        (made,), _ = generated([request._replace(**changes)])
        return made[:2]

    free, at_limit = ended()
    text = TOKENIZER.decode(free)
    assert len(free) == NEW and len(set(free)) > 4 and at_limit
    token = free[5]
    first = free.index(token)
    stop = TOKENIZER.decode([token])
    assert ended(max_new_tokens=3) == (free[:3], True)
    assert ended(stops=("A:",)) == (free, True), "a context does not hold its own stop"
    assert ended(stops=(stop,)) == (free[: first + 1], False)
    assert ended(stops=(stop,), max_new_tokens=first + 1) == (free[: first + 1], False), "the last that it may have"
    assert ended(stops=("not there", text[2:5])) == (free[:5], False), "a stop of several tokens"
    monkeypatch.setattr(tiny("gqa").generation_config, "eos_token_id", [1, token])
    assert ended() == (free[: first + 1], False)


# Sampled texts

WARM = SamplingConfig(0.9, top_p=0.95, top_k=50).rule()


def sampled(contexts, repeats: int = 1, seed: int = 3, **changes) -> list[Request]:
    asked = to_write(contexts, **changes)
    return [
        each._replace(settings=json.dumps(WARM), seed=seed, repeat=repeat)
        for repeat in range(repeats)
        for each in asked
    ]


def test_a_sampled_text_is_that_of_live_decoding():
    """By the definition: the prediction of each live step, and the next random number of the key."""
    for request in sampled(CONTEXTS, repeats=2):
        key = f"3/{request.document[1]}/{request.repeat}"
        draft = endless(request.ids, request.max_new_tokens, sampling=WARM, key=key)
        with attach(tiny("gqa")) as attached:
            session = open_live(attached, CASES["h2o"], request.max_new_tokens)
            ids = torch.tensor([request.prompt])
            for _ in live_texts(session, session.prefill(ids, torch.ones_like(ids, dtype=torch.bool)), [draft]):
                pass
        assert written([request], "h2o")[0] == [draft.tokens]


def test_what_decides_a_sampled_text():
    (request,) = sampled(CONTEXTS[:1])
    base = answer(request)
    assert base == answer(request) == answer(request, document=("another task", 0))
    changed = [{"seed": 4}, {"repeat": 1}, {"document": ("task", 1)}, {"settings": json.dumps(GREEDY)}]
    assert all(answer(request, **change) != base for change in changed)
    greedy = answer(request, settings=json.dumps(GREEDY))
    for certain in (SamplingConfig(LOWEST_TEMPERATURE), SamplingConfig(1.0, top_k=1), SamplingConfig(5.0, top_p=1e-9)):
        assert answer(request, settings=json.dumps(certain.rule())) == greedy, certain


NARROW = {"temperature": 0.7, "top_p": 0.8, "min_p": 0.1}


@pytest.mark.parametrize(
    ("of_task", "given", "expected"),
    [
        ({}, {}, GREEDY),
        ({"do_sample": True}, {}, {"temperature": 1}),
        (NARROW | {"do_sample": True}, {}, NARROW),
        (
            {"do_sample": True, "top_p": 0.8, "top_k": 9},
            {"temperature": 0.3, "top_k": 5},
            {"temperature": 0.3, "top_p": 0.8, "top_k": 5},
        ),
        ({"do_sample": False, "min_p": 0.1}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
    ],
)
def test_the_projects_settings_of_sampling_come_before_the_tasks(of_task, given, expected):
    (request,) = planned(texts("a", **of_task), sampling=SamplingConfig(**given), seed=7)
    is_greedy = expected == GREEDY
    assert json.loads(request.settings) == expected | {"do_sample": not is_greedy}
    assert request.seed == (0 if is_greedy else 7)


def test_every_answer_that_is_asked_for_has_its_own_number():
    """lm-eval asks n times for the same instance where a task's YAML says `repeats: n`."""
    asked = texts(*CONTEXTS[:2], do_sample=True, max_gen_toks=9)
    assert [request.repeat for request in planned([each for each in asked for _ in range(3)])] == [0, 1, 2] * 2
    lm = language_model(sampling=SamplingConfig(repeats=3))
    lm.generate_until(asked)
    lm.repeat = 1
    with pytest.raises(UserError, match="^repeats=3: task task makes other prompts each time"):
        lm.generate_until(asked[::-1])


def test_where_nothing_is_decoded_nothing_is_measured(monkeypatch):
    (request,) = to_write([CONTEXTS[0]])
    monkeypatch.setattr(tiny("gqa").generation_config, "eos_token_id", answer(request)[0])
    answers, reads = written([request])
    assert len(answers[0]) == 1
    assert [getattr(reads, share) for share in SHARES] == [1, 1, 1, 0], "the full cache's, whatever is decoded"
    for name in ("h2o", "int4"):
        with pytest.raises(UserError, match="every answer ended with its first token, .* use prefill=question"):
            written([request], name)


def test_a_run_generates_at_the_budget_that_it_is_set_to():
    """`budget` is met on answers of full length."""
    run, requests = run_of("method=h2o", "budget=0.7"), to_write(CONTEXTS, max_new_tokens=40)
    assert [len(each.tokens) for each in run.generate(requests)] == [40] * 3
    assert run.reads.budget == pytest.approx(0.7, abs=0.01)
    assert len(decode_rows(requests)) == 3 * 20, "as many as say it"

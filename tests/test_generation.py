"""Generated answers through replay: HFLM's texts for the full cache, live decoding's tokens for every method."""

import io

import pytest
import torch
from cases import CASES, Case
from living import open_live, setup_of, tiny
from lm_eval.api.instance import Instance
from test_lm import DENSE, QUESTION, TOKENIZER, hflm, instances, language_model, work_of

from harness.accuracy.answers import Request, generate
from harness.accuracy.evaluation import ReplayEngine, decode_rows
from harness.accuracy.lm import Prefill, ReplayLM
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.load import LoadedModel
from harness.sizes import SHARES, ReadStats
from tests.composed import load

MAX_LENGTH = 256
NEW = 12
CONTEXT = "Some example.\n\nAnother one, somewhat longer.\n\n"
LONGER = CONTEXT + "Q: what is it now, and what was it then?\nA:"
CONTEXTS = [CONTEXT + "Q: who?\nA:", LONGER, "A shorter one.\n\nQ: why?\nA:"]
FULL = CASES["full"]


def asked(contexts, prefill_len=None, max_new_tokens=NEW, stops=()) -> list[Request]:
    """Requests whose prompt is the context, or ends at a given token, or that many tokens before the end (negative)."""
    requests = []
    for number, context in enumerate(contexts):
        ids = tuple(TOKENIZER(context)["input_ids"])
        prompt = len(ids) if prefill_len is None else prefill_len % len(ids)
        lengths = (len(ids), prompt, len(ids) + max_new_tokens)
        requests.append(Request(ids, *lengths, ("task", number), max_new_tokens, tuple(stops)))
    return requests


def run(requests, case: Case = FULL) -> tuple[list[list[int]], ReadStats]:
    with attach(tiny("gqa")) as attached:
        return generate(requests, attached, setup_of(attached, case), lambda count: None, tokenizer=TOKENIZER)


def live(request: Request, case: Case) -> list[int]:
    """The tokens that live decoding gives after the request's prompt; the rest of its context is fed."""
    forced = list(request.rows)
    with attach(tiny("gqa")) as attached:
        session = open_live(attached, case, len(forced) + request.max_new_tokens)
        ids = torch.tensor([request.prompt])
        logits = session.prefill(ids, torch.ones_like(ids, dtype=torch.bool))
        for token in forced:
            logits = session.decode_step(torch.tensor([token]))
        tokens = [int(logits.argmax())]
        while len(tokens) < request.max_new_tokens:
            logits = session.decode_step(torch.tensor(tokens[-1:]))
            tokens.append(int(logits.argmax()))
    return tokens


@pytest.fixture(autouse=True)
def without_end(monkeypatch):
    """Tiny models end at no token of their own accord."""
    monkeypatch.setattr(tiny("gqa").generation_config, "eos_token_id", None)


LIVE = ["full", "int4", "h2o", "infinigen", "kivi", "freekv", "shadowkv", "pool-lru"]


@pytest.mark.parametrize("prefill_len", [None, -9], ids=["dense", "question"])
@pytest.mark.parametrize("name", LIVE)
def test_tokens_are_those_of_live_decoding(name, prefill_len):
    """In one padded batch, whatever else is in it; T is the context and `max_new_tokens`."""
    requests = asked(CONTEXTS, prefill_len)
    answers, reads = run(requests, CASES[name])
    assert answers == [live(request, CASES[name]) for request in requests]
    assert reads.rows == reads.fired_rows == sum(request.num_rows for request in requests)
    if name != "full":
        assert reads.size < 0.97


@pytest.mark.parametrize("prefill_len", [None, 20], ids=["dense", "question"])
@pytest.mark.parametrize("name", ["h2o", "infinigen", "kivi"])
def test_sharing_and_batches_leave_no_trace(name, prefill_len, monkeypatch):
    requests = asked([*CONTEXTS, CONTEXTS[0]], prefill_len, stops=["e"])
    requests += asked(CONTEXTS[:2], prefill_len, 5, stops=["e"])
    together, reads = run(requests, CASES[name])
    alone = [run([request], CASES[name]) for request in requests]
    assert together == [answers[0] for answers, _ in alone]
    assert len({len(answer) for answer in together}) > 1, "some must end before others"
    summed = sum((each for _, each in alone), ReadStats(code_bits=reads.code_bits))
    for sums in ("rows", "fired_rows", "frac_sum", "index_sum", "pairs_read", "pairs"):
        assert getattr(reads, sums) == pytest.approx(getattr(summed, sums), rel=1e-6), sums
    monkeypatch.setattr("harness.accuracy.answers.CACHE_TOKENS", 100)
    assert run(requests, CASES[name])[0] == together


def test_each_piece_of_work_is_done_once(monkeypatch):
    calls = work_of(monkeypatch)
    first = asked([CONTEXTS[0]], 30)[0]
    other = first._replace(ids=(*first.ids[:-2], 50, 51), document=("task", 1))
    answers, reads = run([first, other, first, first])
    assert answers[0] == answers[2] == answers[3]
    shared = 2 * len(first.rows)
    assert calls == [("prefill", 30, 30), ("decode", shared, shared), *[("decode", 2, 2)] * (NEW - 1)]
    assert reads.rows == 4 * first.num_rows


def answer(request: Request, **changes) -> list[int]:
    return run([request._replace(**changes)])[0][0]


def test_what_ends_an_answer(monkeypatch):
    (request,) = asked([CONTEXTS[0]])
    free = answer(request)
    text = TOKENIZER.decode(free)
    assert len(free) == NEW and len(set(free)) > 4
    token = free[5]
    first = free.index(token)
    assert answer(request, max_new_tokens=3) == free[:3]
    assert answer(request, stops=("A:",)) == free, "a context does not hold its own stop"
    assert answer(request, stops=(TOKENIZER.decode([token]),)) == free[: first + 1]
    assert answer(request, stops=("not there", text[2:5])) == free[:5], "a stop of several tokens"
    monkeypatch.setattr(tiny("gqa").generation_config, "eos_token_id", [1, token])
    assert answer(request) == free[: first + 1]


def test_a_repetition_penalty_is_hflms(monkeypatch):
    monkeypatch.setattr(tiny("gqa").generation_config, "repetition_penalty", 1.3)
    (request,) = asked([CONTEXTS[0]])
    found = answer(request)
    expected = tiny("gqa").generate(torch.tensor([request.ids]), max_new_tokens=NEW, do_sample=False)
    assert found == expected[0, len(request.ids) :].tolist()
    monkeypatch.undo()
    assert found != answer(request)


def test_where_nothing_is_decoded_nothing_is_measured(monkeypatch):
    (request,) = asked([CONTEXTS[0]])
    monkeypatch.setattr(tiny("gqa").generation_config, "eos_token_id", answer(request)[0])
    answers, reads = run([request])
    assert len(answers[0]) == 1
    assert [getattr(reads, share) for share in SHARES] == [1, 1, 1, 0], "the full cache's, whatever is decoded"
    for name in ("h2o", "int4"):
        with pytest.raises(UserError, match="every answer ended with its first token, .* use prefill=question"):
            run([request], CASES[name])


def writing(prefill=DENSE, generator=lambda requests: run(requests)[0], max_length=MAX_LENGTH, **options) -> ReplayLM:
    return language_model(prefill, model=tiny("gqa"), generator=generator, max_length=max_length, **options)


def asks(contexts, **settings) -> list[Instance]:
    return instances([[(context, settings)] for context in contexts], "generate_until")


@pytest.mark.parametrize("prefill", [DENSE, QUESTION, Prefill("artifact", budget=0.2)])
@pytest.mark.parametrize("settings", [{"until": "e", "max_gen_toks": 30}, {"until": ["x", "e"], "max_new_tokens": 9}])
def test_texts_are_hflms(prefill, settings):
    stock, lm = hflm(tiny("gqa"), MAX_LENGTH, 3), writing(prefill)
    expected = stock.generate_until(asks(CONTEXTS, **settings), disable_tqdm=True)
    assert lm.generate_until(asks(CONTEXTS, **settings)) == expected == list(lm.cache_hook.dbdict.values())


def planned(context, prefill=DENSE, max_length=MAX_LENGTH, **settings) -> Request:
    lm = writing(prefill, lambda requests: [[5]] * len(requests), max_length)
    lm.generate_until(asks([context], **({"until": []} | settings)))
    return lm.requests[0]


def test_what_is_asked_of_the_model():
    request = planned(CONTEXTS[2], until=["\n"], max_tokens=40)
    assert TOKENIZER.decode(request.ids) == CONTEXTS[2] and request.document == ("task", 0)
    assert request.prefill_len == request.context_len == len(request.ids) == request.final_length - 40
    assert request.stops == ("\n", "</s>")
    assert planned("", max_tokens=40).ids == (TOKENIZER.bos_token_id,)
    assert planned("a", max_length=1000).max_new_tokens == 256, "lm-eval's default"
    planned("a", do_sample=False, top_p=0.9, temperature=0.0, num_beams=1, max_gen_toks=9)
    request = planned(CONTEXTS[2], QUESTION, max_gen_toks=9)
    assert TOKENIZER.decode(request.prompt) == "A shorter one"  # the token of ".\n\n" holds the marker
    request = planned(CONTEXTS[2] + "  ", Prefill("question", marker="A:"), max_gen_toks=9)
    assert TOKENIZER.decode(request.rows) == "A:  ", "a context is taken as it is"
    request = planned(CONTEXTS[2], Prefill("artifact", budget=0.5), max_gen_toks=9)
    assert request.prefill_len == (request.context_len + 9) // 2


SHORT = {"max_length": 40, "too_long": "truncate"}


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"do_sample": True, "temperature": 0.7}, {}, "task task: samples its answers .temperature=0.7."),
        ({"temperature": 0.2}, {}, "task task: samples its answers"),
        ({"num_beams": 10}, {}, "task task: generation_kwargs num_beams=10 is not offered"),
        ({"max_gen_toks": 1}, {}, "task task, question 0: max_gen_toks=1 leaves no decode row"),
        ({"max_gen_toks": 300}, {}, "question 0: context and answer have 352 tokens, the model takes 256"),
        ({"max_gen_toks": 20}, {"max_length": 64}, "the model takes 64; .* or too_long=truncate"),
        ({"max_gen_toks": 9}, {"prefill": QUESTION, **SHORT}, "question 1: prefill=question needs"),
    ],
)
def test_refused(settings, options, message):
    with pytest.raises(UserError, match=message):
        writing(generator=pytest.fail, **options).generate_until(asks(CONTEXTS, **settings))


@pytest.mark.parametrize("max_length", [64, 70])
def test_contexts_beyond_the_limit_are_cut_as_hflm_cuts_them(max_length):
    settings = {"max_gen_toks": 20, "until": ["e"]}
    lm = writing(max_length=max_length, too_long="truncate")
    expected = hflm(tiny("gqa"), max_length, 1).generate_until(asks(CONTEXTS, **settings), disable_tqdm=True)
    assert lm.generate_until(asks(CONTEXTS, **settings)) == expected
    assert [request.context_len for request in lm.requests] == [max_length - 20, max_length - 20, 24]
    assert len(lm.truncated) == 2


def test_chat_templates(monkeypatch):
    lm, turns = writing(), [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    for call in (lambda: lm.apply_chat_template(turns), lambda: lm.chat_template(True)):
        with pytest.raises(UserError, match="apply_chat_template=true: model tiny has no chat template"):
            call()
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}"
        "[{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    monkeypatch.setattr(TOKENIZER, "chat_template", template, raising=False)
    monkeypatch.setattr(TOKENIZER, "name_or_path", "a/b")
    stock = hflm(tiny("gqa"))
    assert lm.apply_chat_template(turns) == stock.apply_chat_template(turns) == "[user] hello[assistant]"
    assert lm.chat_template(True) == template
    assert lm.tokenizer_name == stock.tokenizer_name == "a__b"


def test_a_run_generates_at_the_size_that_it_is_set_to():
    """Through the engine: `size` is met on answers of full length."""
    config = load(["experiment=tasks", "method=h2o", "size=0.7"])
    loaded = LoadedModel(tiny("gqa"), TOKENIZER, "tiny", MAX_LENGTH, "f" * 64)
    engine = ReplayEngine(config, loaded, "task", io.StringIO())
    requests = asked(CONTEXTS, max_new_tokens=40)
    assert [len(answer) for answer in engine.generate(requests)] == [40] * 3
    assert engine.method != config.method
    assert engine.reads.size == pytest.approx(0.7, abs=0.01)
    assert len(decode_rows(requests)) == 3 * 20, "as many as say it"

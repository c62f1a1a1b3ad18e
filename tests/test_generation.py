"""Generated answers through replay: HFLM's texts for the full cache, live decoding's tokens for every method."""

import io

import pytest
import torch
from cases import CASES, Case
from living import open_live, setup_of, tiny
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokens import byte_tokenizer

from harness.accuracy.answers import Request, generate
from harness.accuracy.evaluation import ReplayEngine, decode_rows
from harness.accuracy.lm import Prefill, ReplayLM
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.load import LoadedModel
from harness.replay import ReplaySession
from harness.sizes import SHARES, ReadStats
from tests.composed import load

MAX_LENGTH = 256
NEW = 12
TOKENIZER = byte_tokenizer()
CONTEXT = "Some example.\n\nAnother one, somewhat longer.\n\n"
LONGER = CONTEXT + "Q: what is it now, and what was it then?\nA:"
CONTEXTS = [CONTEXT + "Q: who?\nA:", LONGER, "A shorter one.\n\nQ: why?\nA:"]
FULL, DENSE = CASES["full"], Prefill("dense")


def request_of(ids, prefill_len, number, max_new_tokens, stops=()) -> Request:
    final_length = len(ids) + max_new_tokens
    return Request(ids, len(ids), prefill_len, final_length, ("task", number), max_new_tokens, stops)


def asked(contexts, prefill_len=None, max_new_tokens=NEW, stops=()) -> list[Request]:
    """Requests whose prompt is the context, or ends at a given token, or that many tokens before the end (negative)."""
    ids = [TOKENIZER(context)["input_ids"] for context in contexts]
    lengths = [len(each) if prefill_len is None else prefill_len % len(each) for each in ids]
    return [
        request_of(tuple(each), length, number, max_new_tokens, tuple(stops))
        for number, (each, length) in enumerate(zip(ids, lengths, strict=True))
    ]


def run(requests, case: Case = FULL, model=None) -> tuple[list[list[int]], ReadStats]:
    with attach(model or tiny("gqa")) as attached:
        return generate(requests, attached, setup_of(attached, case), lambda count: None, tokenizer=TOKENIZER)


def live(request: Request, case: Case, model=None) -> list[int]:
    """The tokens that live decoding gives after the request's prompt; the rest of its context is fed."""
    forced = list(request.rows)
    with attach(model or tiny("gqa")) as attached:
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
    calls = []
    prefill, decode = ReplaySession.prefill, ReplaySession.decode

    def count(kind, function):
        def counted(self, ids, valid, multiplicity=None):
            calls.append((kind, int(valid.sum()), ids.numel()))
            return function(self, ids, valid, multiplicity)

        return counted

    monkeypatch.setattr(ReplaySession, "prefill", count("prompt", prefill))
    monkeypatch.setattr(ReplaySession, "decode", count("rows", decode))
    first = asked([CONTEXTS[0]], 30)[0]
    other = first._replace(ids=(*first.ids[:-2], 50, 51), document=("task", 1))
    answers, reads = run([first, other, first, first])
    assert answers[0] == answers[2] == answers[3]
    assert [rows for kind, rows, _ in calls if kind == "prompt"] == [30]
    assert calls[1] == ("rows", 2 * len(first.rows), 2 * len(first.rows))
    assert calls[2:] == [("rows", 2, 2)] * (NEW - 1)
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


def never(requests):
    raise AssertionError("nothing should have run")


def loaded_model(max_length=MAX_LENGTH) -> LoadedModel:
    return LoadedModel(tiny("gqa"), TOKENIZER, "tiny", max_length, "f" * 64)


def language_model(prefill=DENSE, generator=lambda requests: run(requests)[0], loaded=None, **options) -> ReplayLM:
    return ReplayLM(loaded or loaded_model(), prefill, never, generator=generator, **options)


def instances(contexts, **settings) -> list[Instance]:
    return [
        Instance("generate_until", {}, (context, dict(settings)), 0, metadata=("task", number, 1))
        for number, context in enumerate(contexts)
    ]


def hflm(batch_size=3, max_length=MAX_LENGTH) -> HFLM:
    return HFLM(pretrained=tiny("gqa"), tokenizer=TOKENIZER, batch_size=batch_size, max_length=max_length)


@pytest.mark.parametrize("prefill", [Prefill("dense"), Prefill("question"), Prefill("artifact", budget=0.2)])
@pytest.mark.parametrize("settings", [{"until": "e", "max_gen_toks": 30}, {"until": ["x", "e"], "max_new_tokens": 9}])
def test_texts_are_hflms(prefill, settings):
    expected = hflm().generate_until(instances(CONTEXTS, **settings), disable_tqdm=True)
    lm, kept = language_model(prefill), {}
    lm.cache_hook.dbdict = kept
    assert lm.generate_until(instances(CONTEXTS, **settings)) == expected == list(kept.values())


def planned(contexts, prefill=DENSE, settings=None, **options) -> ReplayLM:
    lm = language_model(prefill, lambda requests: [[5]] * len(requests), **options)
    lm.generate_until(instances(contexts, **{"until": []} | (settings or {})))
    return lm


def test_what_is_asked_of_the_model():
    lm = planned([CONTEXTS[2], ""], settings={"until": ["\n"], "max_tokens": 40})
    request, empty = lm.requests
    assert TOKENIZER.decode(request.ids) == CONTEXTS[2] and request.document == ("task", 0)
    assert request.prefill_len == request.context_len == len(request.ids)
    assert request.final_length == len(request.ids) + 40
    assert request.stops == ("\n", "</s>")
    assert empty.ids == (TOKENIZER.bos_token_id,)
    (request,) = planned(["a"], loaded=loaded_model(max_length=1000)).requests
    assert request.max_new_tokens == 256, "lm-eval's default"
    planned(["a"], settings={"do_sample": False, "top_p": 0.9, "temperature": 0.0, "num_beams": 1, "max_gen_toks": 9})


def test_where_a_question_begins():
    (request,) = planned([CONTEXTS[2]], Prefill("question"), {"max_gen_toks": 9}).requests
    assert TOKENIZER.decode(request.prompt) == "A shorter one"  # the token of ".\n\n" holds the marker
    (request,) = planned([CONTEXTS[2] + "  "], Prefill("question", marker="A:"), {"max_gen_toks": 9}).requests
    assert TOKENIZER.decode(request.rows) == "A:  ", "a context is taken as it is"
    (request,) = planned([CONTEXTS[2]], Prefill("artifact", budget=0.5), {"max_gen_toks": 9}).requests
    assert request.prefill_len == (request.context_len + 9) // 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True, "temperature": 0.7}, "task task: samples its answers .temperature=0.7."),
        ({"temperature": 0.2}, "task task: samples its answers"),
        ({"num_beams": 10}, "task task: generation_kwargs num_beams=10 is not offered"),
        ({"max_gen_toks": 1}, "task task, question 0: max_gen_toks=1 leaves no decode row"),
        ({"max_gen_toks": 300}, "question 0: context and answer have 352 tokens, the model takes 256"),
    ],
)
def test_refused(settings, message):
    lm = language_model(generator=never)
    with pytest.raises(UserError, match=message):
        lm.generate_until(instances(CONTEXTS, **settings))


@pytest.mark.parametrize("max_length", [64, 70])
def test_contexts_beyond_the_limit(max_length):
    """Refused, or cut on the left as HFLM does; the rest is answered as it is."""
    loaded, settings = loaded_model(max_length=max_length), {"max_gen_toks": 20, "until": ["e"]}
    with pytest.raises(UserError, match=f"the model takes {max_length}; .* or too_long=truncate"):
        language_model(generator=never, loaded=loaded).generate_until(instances(CONTEXTS, **settings))
    lm = language_model(loaded=loaded, too_long="truncate")
    expected = hflm(1, max_length).generate_until(instances(CONTEXTS, **settings), disable_tqdm=True)
    assert lm.generate_until(instances(CONTEXTS, **settings)) == expected
    assert [request.context_len for request in lm.requests] == [max_length - 20, max_length - 20, 24]
    assert len(lm.truncated) == 2
    lm = language_model(Prefill("question"), never, loaded=loaded_model(max_length=40), too_long="truncate")
    with pytest.raises(UserError, match="question 0: prefill=question needs"):
        lm.generate_until(instances([CONTEXTS[1]], max_gen_toks=9))


def test_chat_templates(monkeypatch):
    lm, turns = language_model(), [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    for call in (lambda: lm.apply_chat_template(turns), lambda: lm.chat_template(True)):
        with pytest.raises(UserError, match="apply_chat_template=true: model tiny has no chat template"):
            call()
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}"
        "[{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    monkeypatch.setattr(TOKENIZER, "chat_template", template, raising=False)
    monkeypatch.setattr(TOKENIZER, "name_or_path", "a/b")
    stock = hflm()
    assert lm.apply_chat_template(turns) == stock.apply_chat_template(turns) == "[user] hello[assistant]"
    assert lm.chat_template(True) == template
    assert lm.tokenizer_name == stock.tokenizer_name == "a__b"


def test_a_run_generates_at_the_size_that_it_is_set_to():
    """Through the engine: `size` is met on answers of full length."""
    config = load(["experiment=tasks", "method=h2o", "size=0.7"])
    engine = ReplayEngine(config, loaded_model(), "task", io.StringIO())
    requests = asked(CONTEXTS, max_new_tokens=40)
    assert [len(answer) for answer in engine.generate(requests)] == [40] * 3
    assert engine.method != config.method
    assert engine.reads.size == pytest.approx(0.7, abs=0.01)
    assert len(decode_rows(requests)) == 3 * 20, "as many as say it"

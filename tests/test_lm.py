"""Log-likelihoods through replay: HFLM's numbers for the full cache, and no trace of how work was shared."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokens import byte_tokenizer

from harness.accuracy.evaluation import decode_rows
from harness.accuracy.lm import Prefill, ReplayLM
from harness.accuracy.requests import Request, share
from harness.accuracy.scoring import Score, score
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.calibration import calibrate
from harness.model.load import LoadedModel
from harness.model.tiny import tiny_model
from harness.replay import ReplaySession
from harness.sizes import ReadStats
from methods.codec import Codec
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.streaming import Streaming

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
METHODS = {
    "full": Full(),
    "h2o": H2O(heavy_frac=0.15, recent_frac=0.15),
    "infinigen": InfiniGen(max_fetch_frac=0.3),
    "streaming": Streaming(kept_frac=0.3),
    "int4": Full(),
}
CODECS = {"int4": Codec("int4")}


def loaded_model(model) -> LoadedModel:
    return LoadedModel(model, TOKENIZER, "tiny", MAX_LENGTH, "f" * 64)


def instances(questions) -> list[Instance]:
    return [
        Instance("loglikelihood", {}, arguments, index, metadata=("task", number, 1))
        for number, choices in enumerate(questions)
        for index, arguments in enumerate(choices)
    ]


def never(requests):
    raise AssertionError("nothing should have been scored")


def planned(questions, prefill: Prefill) -> list[Request]:
    lm = ReplayLM(loaded_model(None), prefill, lambda requests: [Score(0.0, False)] * len(requests), generator=never)
    lm.loglikelihood(instances(questions))
    return lm.requests


def run(model, requests, method, codec=None) -> tuple[list[Score], ReadStats]:
    with attach(model) as attached:
        calibration = calibrate(attached, method, list(range(3, 99))) if method.needs_calibration else None

        def open_session(final_lengths, num_columns):
            return ReplaySession(
                attached,
                method,
                codec=codec,
                calibration=calibration,
                final_lengths=final_lengths,
                num_columns=num_columns,
            )

        return score(requests, attached, open_session, lambda count: None)


def answers(model, questions, prefill: Prefill, method=METHODS["full"], **options) -> list[tuple[float, bool]]:
    lm = ReplayLM(
        loaded_model(model), prefill, lambda requests: run(model, requests, method)[0], generator=never, **options
    )
    return lm.loglikelihood(instances(questions))


@pytest.mark.parametrize("prefill", [Prefill("dense"), Prefill("question"), Prefill("artifact", budget=0.3)])
@pytest.mark.parametrize("family", ["gqa", "opt"])
def test_full_cache_equals_hflm(family, prefill, request):
    model = request.getfixturevalue(f"tiny_{family}")
    questions = QUESTIONS if prefill.mode == "question" else QUESTIONS + UNSHARED
    stock = HFLM(pretrained=model, tokenizer=TOKENIZER, batch_size=2, max_length=MAX_LENGTH)
    expected = stock.loglikelihood(instances(questions), disable_tqdm=True)
    found = answers(model, questions, prefill)
    difference = max(abs(own[0] - hflm[0]) for own, hflm in zip(found, expected, strict=True))
    assert difference < 1e-3, f"largest difference {difference:.1e} nats"
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_a_greedy_continuation_is_recognised(tiny_gqa):
    context = TOKENIZER("Q: what?")["input_ids"]
    for _ in range(3):
        context.append(int(tiny_gqa(torch.tensor([context])).logits[0, -1].argmax()))
    likely = Request(tuple(context), len(context) - 3, len(context) - 4, len(context), ("task", 0))
    other = replace_last(likely)
    scores, _ = run(tiny_gqa, [likely, other], Full())
    assert [each.is_greedy for each in scores] == [True, False]


def replace_last(request: Request) -> Request:
    return request._replace(ids=(*request.ids[:-1], (request.ids[-1] + 1) % 256))


@pytest.mark.parametrize("mode", ["dense", "question", "artifact"])
@pytest.mark.parametrize("name", METHODS)
def test_sharing_leaves_no_trace(name, mode, tiny_gqa):
    """Scored together, with everything shared and padded, as scored one request at a time."""
    method = METHODS[name]
    requests = planned(QUESTIONS, Prefill(mode, budget=0.0 if name in CODECS else method.artifact_budget()))
    together, reads = run(tiny_gqa, requests, method, CODECS.get(name))
    alone = [run(tiny_gqa, [request], method, CODECS.get(name)) for request in requests]
    difference = max(
        abs(one.log_likelihood - each[0].log_likelihood) for one, (each, _) in zip(together, alone, strict=True)
    )
    assert difference < 1e-3, f"largest difference {difference:.1e} nats"
    summed = sum((each for _, each in alone), ReadStats(code_bits=reads.code_bits))
    assert (reads.rows, reads.fired_rows) == (summed.rows, summed.fired_rows)
    assert reads.rows == len(decode_rows(requests))
    for sums in ("frac_sum", "index_sum", "resident_sum", "pairs_read", "pairs"):
        assert getattr(reads, sums) == pytest.approx(getattr(summed, sums), rel=1e-6), sums
    if name != "full":
        assert reads.size < 0.9, "the method must have dropped something for this test to mean anything"


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"streaming"}))  # refuses lengths as short as these
def test_batches_leave_no_trace(name, tiny_gqa, monkeypatch):
    requests = planned(QUESTIONS + UNSHARED, Prefill("artifact", budget=0.2))
    method = METHODS[name]
    expected, reads = run(tiny_gqa, requests, method, CODECS.get(name))
    for constant, size in (("scoring.PROMPT_TOKENS", 1), ("requests.CACHE_TOKENS", 100), ("scoring.HEAD_ROWS", 3)):
        monkeypatch.setattr(f"harness.accuracy.{constant}", size)
        found, again = run(tiny_gqa, requests, method, CODECS.get(name))
        difference = max(abs(a.log_likelihood - b.log_likelihood) for a, b in zip(found, expected, strict=True))
        assert difference < 1e-3, f"{constant}: largest difference {difference:.1e} nats"
        assert again.frac_sum == pytest.approx(reads.frac_sum, rel=1e-6)


def test_each_piece_of_work_is_done_once(tiny_gqa, monkeypatch):
    calls = []
    prefill, decode = ReplaySession.prefill, ReplaySession.decode

    def count(kind, function):
        def counted(self, ids, valid, multiplicity=None):
            calls.append((kind, int(valid.sum())))
            return function(self, ids, valid, multiplicity)

        return counted

    monkeypatch.setattr(ReplaySession, "prefill", count("prompt", prefill))
    monkeypatch.setattr(ReplaySession, "decode", count("rows", decode))
    question = [("Q: a rather long question?\nA:", choice) for choice in (" red", " reddish", " blue")]
    requests = planned([question], Prefill("dense"))
    run(tiny_gqa, requests, Full())
    done = {kind: sum(rows for name, rows in calls if name == kind) for kind in ("prompt", "rows")}
    # Equal in all choices: the context's last token and the space. Then "re", "reddis" and "blu" are run for each.
    assert done == {"prompt": requests[0].context_len - 1, "rows": 2 + 2 + 6 + 3}


def test_sequences_of_unequal_length_are_not_decoded_in_one_padded_batch(tiny_gqa, monkeypatch):
    widths = []
    decode = ReplaySession.decode

    def spy(self, ids, valid, multiplicity=None):
        widths.append(ids.numel() / int(valid.sum()))
        return decode(self, ids, valid, multiplicity)

    monkeypatch.setattr(ReplaySession, "decode", spy)
    run(tiny_gqa, planned([[("Q:", " a"), ("Q:", "-" * 60), ("Q:", "_" * 59)]], Prefill("dense")), Full())
    assert max(widths) < 2


@pytest.mark.parametrize(
    ("prefill", "expected"),
    [
        (Prefill("dense"), [17, 17]),
        (Prefill("question"), [7, 7]),  # "Some ex" and not the token of ".\n\n", which holds the marker
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


def test_choices_in_the_context_have_one_final_length():
    short, long = planned([QUESTIONS[3][::-1]], Prefill("artifact", budget=0.5))
    assert short.context_len < long.context_len
    assert short.final_length == long.final_length == len(long.ids)
    assert short.prefill_len == long.prefill_len == long.final_length // 2


def test_the_last_marker_counts():
    (request,) = planned([[("a\n\nb\n\ncd", " e")]], Prefill("question"))
    assert TOKENIZER.decode(request.prompt) == "a\n\nb"


@pytest.mark.parametrize(
    ("question", "prefill", "message"),
    [
        (("no separator", " x"), Prefill("question"), "task task, question 0: prefill=question needs '\\\\n\\\\n'"),
        (("\n\nat the start", " x"), Prefill("question"), "prefill=question needs"),
        (("", "x" * 9), Prefill("question"), "prefill=question needs"),
        (("c" * 510, " xyz"), Prefill("dense"), "context and answer have 513 tokens, the model takes 512; lower"),
        (("", "x"), Prefill("dense"), "2 tokens leave no decode row"),
    ],
)
def test_refused(question, prefill, message):
    lm = ReplayLM(loaded_model(None), prefill, never, generator=never)
    with pytest.raises(UserError, match=message):
        lm.loglikelihood(instances([[question]]))


def test_the_longest_sequence_that_fits(tiny_gqa):
    assert len(answers(tiny_gqa, [[("c" * 510, " xy")]], Prefill("dense"))) == 1


def test_a_model_without_a_tokenizer():
    with pytest.raises(UserError, match="model tiny has no tokenizer"):
        ReplayLM(replace(loaded_model(None), tokenizer=None), Prefill("dense"), never, generator=never)


def test_a_method_that_did_not_run_is_an_error(tiny_gqa, monkeypatch):
    decode = ReplaySession.decode

    def idle(self, *arguments):
        hidden = decode(self, *arguments)
        self.reads = replace(self.reads, fired_rows=0.0)
        return hidden

    monkeypatch.setattr(ReplaySession, "decode", idle)
    with pytest.raises(UserError, match="the method ran on 0 of"):
        run(tiny_gqa, planned([QUESTIONS[0]], Prefill("dense")), METHODS["h2o"])


def test_mean_scoring_divides_by_the_continuation(tiny_gqa):
    sums = answers(tiny_gqa, QUESTIONS[:1], Prefill("dense"))
    means = answers(tiny_gqa, QUESTIONS[:1], Prefill("dense"), mean=True)
    lengths = [len(choice) for _, choice in QUESTIONS[0]]
    assert [total / n for (total, _), n in zip(sums, lengths, strict=True)] == pytest.approx([m for m, _ in means])


def test_answers_reach_the_response_cache(tiny_gqa):
    lm = ReplayLM(
        loaded_model(tiny_gqa), Prefill("dense"), lambda requests: run(tiny_gqa, requests, Full())[0], generator=never
    )
    kept = {}
    lm.cache_hook.dbdict = kept
    found = lm.loglikelihood(instances(QUESTIONS))
    assert sorted(kept.values()) == sorted(found)


def test_a_text_that_brings_its_own_prefix_token_gets_no_second_one():
    class Tokenizer:
        bos_token_id, eos_token_id, is_fast = 1, 2, True

        def decode(self, token):
            return "<s>"

        def __call__(self, text, add_special_tokens=True, **options):
            return {"input_ids": [1] * add_special_tokens + list(text.encode())}

    lm = ReplayLM(replace(loaded_model(None), tokenizer=Tokenizer()), Prefill("dense"), never, generator=never)
    assert lm.tok_encode("ab") == [1, 97, 98]
    assert lm.tok_encode("<s>ab")[0] == ord("<")
    assert lm.tok_encode("ab", add_special_tokens=False) == [97, 98]
    assert (lm.prefix_token_id, lm.eot_token_id) == (1, 2)


tokens = st.integers(0, 2)


@given(st.lists(st.tuples(st.lists(tokens, min_size=3, max_size=8), st.integers(0, 2)), min_size=1, max_size=12))
def test_the_tree_holds_every_request_once(drawn):
    requests = [
        Request(tuple(ids), 2, 1 + document % 2, 9 + document // 2, ("task", document)) for ids, document in drawn
    ]
    prompts = share(requests, lambda request: request.document)
    held = [index for prompt in prompts for branch in prompt.branches for index in branch.requests]
    assert sorted(held) == list(range(len(requests)))
    assert len({(prompt.ids, prompt.final_length) for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        for branch in prompt.branches:
            group = [requests[index] for index in branch.requests]
            assert {request.final_length for request in group} == {prompt.final_length}
            assert {request.document for request in group} == {group[0].document}
            width = len(branch.shared)
            for request in group:
                assert request.prompt == prompt.ids and request.rows[:width] == branch.shared
            nexts = {request.rows[width : width + 1] for request in group}
            assert len(group) == 1 or len(nexts) > 1 or () in nexts, "shared as far as possible"


def test_grouped_heads_and_a_larger_vocabulary_on_one_model():
    model = tiny_model("llama", num_key_value_heads=1, vocab_size=300)
    scores, _ = run(model, planned(QUESTIONS, Prefill("dense")), Full())
    ids = torch.tensor([TOKENIZER("".join(QUESTIONS[0][0]))["input_ids"]])
    log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    assert scores[0].log_likelihood == pytest.approx(float(log_probs[-4:].sum()), abs=1e-4)


# Whole texts.

TEXTS = ["ab", "The quick brown fox jumps over the lazy dog. " * 3, EXAMPLES * 2]


def rolling(texts) -> list[Instance]:
    return [
        Instance("loglikelihood_rolling", {}, (text,), 0, metadata=("task", number, 1))
        for number, text in enumerate(texts)
    ]


@pytest.mark.parametrize("max_length", [50, 512])
@pytest.mark.parametrize("prefill", [Prefill("dense"), Prefill("artifact", budget=0.3)])
def test_whole_texts_are_scored_as_hflm_scores_them(prefill, max_length, tiny_gqa):
    stock = HFLM(pretrained=tiny_gqa, tokenizer=TOKENIZER, batch_size=2, max_length=max_length)
    expected = stock.loglikelihood_rolling(rolling(TEXTS), disable_tqdm=True)
    loaded, reads = replace(loaded_model(tiny_gqa), max_length=max_length), []

    def scorer(requests):
        scores, read = run(tiny_gqa, requests, Full())
        reads.append(read)
        return scores

    lm = ReplayLM(loaded, prefill, scorer, generator=never)
    lm.cache_hook.dbdict = {}
    found = lm.loglikelihood_rolling(rolling(TEXTS))
    assert found == pytest.approx(expected, abs=1e-3)
    assert sorted(lm.cache_hook.dbdict.values()) == sorted(found)
    lengths = [len(TOKENIZER(text)["input_ids"]) for text in TEXTS]
    windows = [-(-length // max_length) for length in lengths]
    assert [request.document[1] for request in lm.requests] == [
        n for n, count in enumerate(windows) for _ in range(count)
    ]
    dense = [request for request in lm.requests if request.context_len == 1]
    assert len(dense) >= len(TEXTS)
    assert {request.prefill_len for request in dense} == {1}, "every row past the first is a decode row"
    assert all(request.final_length == len(request.ids) <= max_length + 1 for request in lm.requests)
    assert reads[0].rows == len(decode_rows(lm.requests))


def test_a_whole_text_has_no_question():
    lm = ReplayLM(loaded_model(None), Prefill("question"), never, generator=never)
    with pytest.raises(UserError, match="task task: scores whole texts, in which prefill=question finds no question"):
        lm.loglikelihood_rolling(rolling(TEXTS))


# Contexts beyond the limit.


def test_contexts_are_cut_on_the_left_as_hflm_does(tiny_gqa):
    questions = [[(EXAMPLES + "Q: what is it?\nA:", choice) for choice in (" red", " reddish brown")], QUESTIONS[2]]
    stock = HFLM(pretrained=tiny_gqa, tokenizer=TOKENIZER, batch_size=1, max_length=40)
    expected = stock.loglikelihood(instances(questions), disable_tqdm=True)
    loaded = replace(loaded_model(tiny_gqa), max_length=40)
    lm = ReplayLM(
        loaded,
        Prefill("dense"),
        lambda requests: run(tiny_gqa, requests, Full())[0],
        generator=never,
        too_long="truncate",
    )
    found = lm.loglikelihood(instances(questions))
    assert [each for each, _ in found] == pytest.approx([each for each, _ in expected], abs=1e-3)
    assert [len(request.ids) for request in lm.requests][:2] == [41, 41]
    assert lm.num_truncated == 1
    assert {request.final_length for request in lm.requests if request.document[1] == 0} == {41}


def test_an_answer_beyond_the_limit_is_refused_even_then():
    lm = ReplayLM(loaded_model(None), Prefill("dense"), never, generator=never, too_long="truncate")
    with pytest.raises(
        UserError, match="context and answer have .* tokens, the model takes 512; lower num_fewshot, choose"
    ):
        lm.loglikelihood(instances([[("a", "x" * 513)]]))


def test_a_question_that_was_cut_off_is_refused():
    lm = ReplayLM(
        replace(loaded_model(None), max_length=20), Prefill("question"), never, generator=never, too_long="truncate"
    )
    with pytest.raises(UserError, match="question 0: prefill=question needs"):
        lm.loglikelihood(instances([[("a\n\nQ: a rather long question?\nA:", " yes")]]))
    lm = ReplayLM(
        replace(loaded_model(None), max_length=30),
        Prefill("question"),
        lambda requests: [Score(0.0, False)] * len(requests),
        generator=never,
        too_long="truncate",
    )
    lm.loglikelihood(instances([[("a long beginning\n\nQ: who?\nA:", " you.")]]))
    assert TOKENIZER.decode(lm.requests[0].prompt) == " long beginning"

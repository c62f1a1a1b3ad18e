"""The choice of the next token: how it is drawn, the loop of a text, and what is one run."""

import random

import pytest
import torch

from harness.errors import UserError
from harness.model.generation import Draft, GenerationRule, drawn, write
from harness.results.record import changed_settings, settings_id
from harness.run.compose import load
from harness.settings.config import GREEDY, LOWEST_TEMPERATURE, SamplingConfig
from tests.living import endless, tiny

Sampling = dict[str, float | bool]


def sampling_of(*settings: float | None) -> Sampling:
    return SamplingConfig(*settings).rule()


def sample(logits: torch.Tensor, sampling: Sampling, number: float) -> torch.Tensor:
    """The token at a number, of the first token after a prompt."""
    prompt = [5, 6]
    rule = GenerationRule(tiny("gqa"), prompt, max_new_tokens=1, **sampling)
    scores = rule.scores(torch.tensor(prompt), logits)
    return drawn(scores, number) if rule.is_drawn else scores.argmax()


def test_a_token_is_drawn_as_often_as_its_probability_says():
    """Every token of the vocabulary has that width on the line from 0 to 1; one that is left out has none."""
    scores = 2 * torch.randn(200, generator=torch.Generator().manual_seed(0))
    scores[7] = -torch.inf
    expected = scores.double().softmax(-1)
    ends = expected.cumsum(-1)
    for token in (token for token in range(200) if token != 7):
        begin, end = float(ends[token] - expected[token]), float(ends[token])
        assert [int(drawn(scores, number)) for number in (begin + 1e-9, end - 1e-9)] == [token] * 2
    assert int(drawn(scores, 0.0)) == 0 and int(drawn(scores, 1 - 2**-53)) == 199


def test_ties_and_the_most_likely_token():
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0])
    assert int(sample(logits, GREEDY, 0.99)) == int(logits.argmax())
    assert {int(sample(logits, sampling_of(1.0, None, 1), number / 10)) for number in range(10)} == {1, 2}
    lowest = sampling_of(LOWEST_TEMPERATURE)
    assert {int(sample(logits, lowest, number / 10)) for number in range(10)} == {1, 2}


def ending(count: int) -> Draft:
    """A text of `count` tokens that token 3 ends."""
    return Draft([0], GenerationRule(tiny("gqa"), [0], max_new_tokens=count, do_sample=False, eos_token_id=3))


def test_the_loop_feeds_what_goes_on_and_ends_with_the_last_draft():
    fed = []

    def feed(drafts):
        fed.append([draft.tokens[-1] for draft in drafts])
        going = [draft for draft in drafts if not draft.ended]
        return going, torch.stack([torch.eye(9)[draft.tokens[-1] + 1] for draft in going])

    drafts = [ending(4), ending(2), ending(9)]
    steps = sum(1 for _ in write(drafts, torch.eye(9)[[0, 5, 1]], feed))
    assert [draft.tokens for draft in drafts] == [[0, 1, 2, 3], [5, 6], [1, 2, 3]]
    assert steps == 4 and fed == [[0, 5, 1], [1, 6, 2], [2, 3]]


def test_a_draft_draws_by_the_random_numbers_of_its_key_alone():
    logits, sampling = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)), sampling_of(1.0)
    numbers = random.Random("0/4/1")
    expected = [int(sample(row, sampling, numbers.random())) for row in logits]
    draft = endless([5], 3, sampling=sampling, key="0/4/1")
    others = [endless([5], 3), endless([5], 1, sampling=sampling, key="0/5/1")]
    rows = iter(logits[1:].unsqueeze(1).expand(-1, 3, -1))
    for _ in write([others[0], draft, others[1]], logits[:1].expand(3, -1), lambda each: (each, next(rows))):
        pass
    assert draft.tokens == expected
    assert others[0].tokens == logits.argmax(-1).tolist() and len(others[1].tokens) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("temperature=-1", "temperature=-1: allowed: 0, which takes the most likely token, or 1e-06 and more"),
        ("top_p=0", "top_p=0: must be above 0 and at most 1"),
        ("temperature=0 top_p=0.5", "top_p=0.5: temperature=0 takes the most likely token; set temperature above 0"),
        ("experiment=generate top_k=5", "top_k=5: the most likely token is taken; set temperature above 0"),
        ("experiment=generate temperature=1 repeats=2", "repeats=2: kind=generate writes one text a prompt"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(words, said):
    with pytest.raises(UserError) as error:
        load(words.split() if "experiment" in words else ["experiment=tasks", *words.split()])
    assert str(error.value).startswith(said)


def test_what_decides_a_sampled_answer_is_in_the_identity_of_its_run():
    def identity(kind: str, *words: str) -> str:
        return settings_id(load([f"experiment={kind}", *words]), {})

    warm = "temperature=0.5"
    for kind in ("tasks", "turns", "long_decode"):
        changed = [[], [warm], [warm, "top_p=0.9"], [warm, "top_k=9"], [warm, "seed=1"], ["temperature=0.6"]]
        changed += [[warm, "repeats=2"]] if kind != "long_decode" else []
        assert len({identity(kind, *words) for words in changed}) == len(changed)
    assert identity("perplexity", warm) == identity("perplexity"), "nothing is generated"
    assert identity("perplexity", "seed=1") == identity("perplexity")
    assert identity("long_decode", "seq_len=2000") == identity("long_decode"), "no window of a text is scored"
    assert identity("latency", "capacity.max_batch=3") == identity("latency"), "the batch is given"
    config = load(["experiment=tasks", warm, "top_k=9", "repeats=2"])
    assert changed_settings(config) == {"temperature": 0.5, "top_k": 9, "repeats": 2}

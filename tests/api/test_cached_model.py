"""transformers' `generate` over a live cache: replay's tokens, and turns, whose prompts are decoded row by row."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, pipeline

from harness.api.cached_model import CachedModel
from harness.checks.families import tiny_family
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.tiny import tiny_model
from harness.replay.session import Setup
from methods.full import Full
from tests.cases import CASES, Case
from tests.conftest import refused
from tests.living import PROMPT, PROMPTS, attached_with_link, open_live, replay_ids, setup_of, tiny, token_batch
from tests.tokens import byte_tokenizer

NEW = 5
ROOM = 40
TURNS = (20, 6, 4)
"""New tokens of each prompt."""


@pytest.fixture(autouse=True)
def no_end(monkeypatch):
    monkeypatch.setattr(tiny("gqa").generation_config, "eos_token_id", None)


def prompts_of(batch: int) -> list[torch.Tensor]:
    """The new tokens of each turn, [batch, tokens]."""
    return [torch.randint(3, 250, (batch, count), generator=torch.Generator().manual_seed(count)) for count in TURNS]


@contextmanager
def cached_of(name: str, placement: str = "host", budget: float | None = None) -> Iterator[CachedModel]:
    """The tiny model on the live cache of a case."""
    case = CASES[name]
    with attached_with_link() as (attached, link):
        options = {"placement": placement, "link": link}
        with CachedModel(attached, setup_of(attached, case), options, budget, max_length=256) as cached:
            yield cached


@pytest.mark.parametrize(("name", "budget"), [("quest", None), ("infinigen", 0.7), ("h2o", 0.75)])
def test_a_methods_tokens_are_those_of_replay_at_the_budget_asked_for(name, budget):
    case, (ids, real) = CASES[name], token_batch(PROMPTS["padded"], 0)
    asked = {"attention_mask": real.long(), "max_new_tokens": 20, "do_sample": False, "output_logits": True}
    with cached_of(name, budget=budget) as cached:
        made = cached.generate(ids, return_dict_in_generate=True, **asked)
        if budget is not None:
            assert cached.usage.budget == pytest.approx(budget, abs=0.02)
            case = Case(cached.setup_at([(prompt, prompt + 20) for prompt in PROMPTS["padded"]]).method)
    with attach(tiny("gqa")) as attached:
        logits, reads = replay_ids(attached, case, made.sequences, real.bool())
    torch.testing.assert_close(torch.stack(made.logits, 1), logits, atol=1e-4, rtol=0)
    assert torch.equal(made.sequences[:, PROMPT:], logits.argmax(-1))
    assert cached.usage.budget == pytest.approx(reads.budget)


@pytest.mark.parametrize("name", ["infinigen", "h2o", "kivi"])
@pytest.mark.parametrize(("opening", "decoding"), [(True, False), (False, True)])
def test_inference_mode_around_any_part_of_a_session_changes_nothing(name, opening, decoding):
    ids, real = token_batch(PROMPTS["padded"])

    def decoded(opening: bool, decoding: bool) -> torch.Tensor:
        with torch.inference_mode(opening), attached_with_link() as (attached, link):
            session = open_live(attached, CASES[name], placement="host", link=link)
            logits = [session.prefill(ids[:, :PROMPT], real[:, :PROMPT])]
            with torch.inference_mode(decoding):
                logits += [session.decode_step(ids[:, PROMPT + step]) for step in range(5)]
            session.close()
        return torch.stack(logits)

    assert torch.equal(decoded(opening, decoding), decoded(False, False))


# Several turns


def generated(generate: Any, ids: torch.Tensor, cache: Any, **settings: Any) -> torch.Tensor:
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    return generate(ids, past_key_values=cache, **(asked | settings))


def talked(generate: Any, cache: Any, batch: int = 1) -> list[torch.Tensor]:
    """The sequences after each turn, all turns on one cache."""
    turns = [torch.empty(batch, 0, dtype=torch.long)]
    for prompt in prompts_of(batch):
        turns.append(generated(generate, torch.cat([turns[-1], prompt], 1), cache))
    return turns[1:]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["full", "infinigen", "h2o", "quest", "kivi", "snapkv"])
def test_a_further_turn_is_its_tokens_decoded_one_by_one(name, batch):
    with cached_of(name) as cached:
        cache = cached.new_cache(ROOM)
        turns = talked(cached.generate, cache, batch)
        final, usage = turns[-1], cache.usage
        assert usage.steps == final.shape[1] - TURNS[0] - 1 == cached.usage.steps

        one_by_one = cached.new_cache(ROOM)
        logits = [cached(final[:, : TURNS[0]], past_key_values=one_by_one).logits[:, -1]]
        for column in final[:, TURNS[0] : -1].unbind(1):
            logits.append(cached(column[:, None], past_key_values=one_by_one).logits[:, -1])
        assert one_by_one.usage.budget == usage.budget and one_by_one.usage.h2d_bytes == usage.h2d_bytes > 0
    found = torch.stack(logits, 1).argmax(-1)
    for sequences in turns:
        new = slice(sequences.shape[1] - NEW, sequences.shape[1])
        assert torch.equal(sequences[:, new], found[:, new.start - TURNS[0] : new.stop - TURNS[0]])


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "deepseek_v3"])
def test_windows_and_recurrent_states_go_on(family):
    network = tiny_family(family)
    network.generation_config.eos_token_id = None
    expected = talked(network.generate, DynamicCache(config=network.config))
    with attach(network) as attached, CachedModel(attached, Setup(Full(dense_layers=0), None, None)) as cached:
        assert torch.equal(talked(cached.generate, cached.new_cache(ROOM))[-1], expected[-1])


def test_a_prompts_cache_of_the_models_call_goes_on():
    first, second, _ = prompts_of(1)
    ids = torch.cat([first, second], 1)
    with cached_of("infinigen", "device") as cached:
        cached.max_new_tokens = ROOM
        made = generated(cached.generate, ids, cached(first, use_cache=True).past_key_values)
        rows = cached(second, past_key_values=cached(first, use_cache=True).past_key_values)
    assert int(made[0, ids.shape[1]]) == int(rows.logits[0, -1].argmax())


def test_padding_of_the_first_prompt_stays_padding():
    """Also columns that are padding in every sequence, as `pad_to_multiple_of` makes them."""
    ids, real = token_batch((20, 14), 0)
    ids = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(2, 4), real], 1).long()

    def two_turns(generate: Any, cache: Any) -> torch.Tensor:
        made = generated(generate, ids, cache, attention_mask=mask)
        longer = torch.cat([made, prompts_of(2)[1]], 1)
        seen = torch.cat([mask, torch.ones_like(longer[:, mask.shape[1] :])], 1)
        return generated(generate, longer, cache, attention_mask=seen)

    expected = two_turns(tiny("gqa").generate, DynamicCache())
    with cached_of("full") as cached:
        assert torch.equal(two_turns(cached.generate, cached.new_cache(ROOM)), expected)


def test_the_times_of_a_turn_are_its_own():
    first, second, _ = prompts_of(1)
    with cached_of("full") as cached:
        cache = cached.new_cache(ROOM)
        made = generated(cached.generate, first, cache)
        assert len(cache.session.clock.step_s) == NEW - 1
        generated(cached.generate, torch.cat([made, second], 1), cache)
        intervals = cache.session.clock._intervals()
        num_rows = TURNS[1] + 1  # the last token of the turn before has not run
        assert len(intervals) == num_rows + NEW - 1
        assert cached.usage.ttft_s == pytest.approx(sum(intervals[:num_rows]))
        assert cached.usage.decode_s == pytest.approx(sum(intervals[num_rows:]))


def continued(cached: CachedModel, change: Any, room: int = ROOM, **settings: Any) -> Any:
    """A second turn whose ids are changed."""
    first, second, _ = prompts_of(1)
    cache = cached.new_cache(room)
    made = generated(cached.generate, first, cache)
    ids = change(torch.cat([made, second], 1))
    return cached.generate(ids, **{"past_key_values": cache, "max_new_tokens": NEW, "do_sample": False} | settings)


def same(ids: torch.Tensor) -> torch.Tensor:
    return ids


REFUSED = {
    r"input_ids: of shape \(1, 20\); allowed: the 24": lambda cached: continued(cached, lambda ids: ids[:, :20]),
    r"input_ids: of shape \(2, 31\)": lambda cached: continued(cached, lambda ids: ids.repeat(2, 1)),
    "column 9 is not": lambda cached: continued(cached, lambda ids: ids.index_fill(1, torch.tensor([9]), 7)),
    "attention_mask: behind": lambda cached: continued(cached, same, attention_mask=torch.ones(1, 6)),
    "max_new_tokens=12: .*with these there are 16": lambda cached: continued(cached, same, room=12),
    "2 sequences, and": lambda cached: continued(cached, same, num_return_sequences=2, do_sample=True),
    r"room for 3; cached.new_cache\(max_new_tokens=N": lambda cached: continued(cached, same, room=3),
    "max_new_tokens=40: .*new_cache": lambda cached: continued(cached, lambda ids: ids.repeat(1, 9)[:, :250]),
    "max_new_tokens=0: allowed: a number of tokens": lambda cached: cached.new_cache(0),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_does_not_go_on_is_one_line(said):
    with cached_of("full") as cached, refused(said):
        REFUSED[said](cached)


def test_a_refused_turn_leaves_the_cache():
    first, second, _ = prompts_of(1)
    with cached_of("h2o") as cached:
        expected = talked(cached.generate, cached.new_cache(ROOM))[1]
        cache = cached.new_cache(ROOM)
        made = generated(cached.generate, first, cache)
        for wrong in (made[:, :3], torch.cat([made + 1, second], 1)):
            with pytest.raises(UserError):
                generated(cached.generate, wrong, cache)
        assert torch.equal(generated(cached.generate, torch.cat([made, second], 1), cache), expected)


def test_a_pipelines_chat_runs_the_whole_conversation_unless_it_is_given_a_cache():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    network = tiny_model("llama", num_key_value_heads=2, vocab_size=len(tokenizer))
    network.generation_config.update(eos_token_id=None, pad_token_id=0)
    with attach(network) as attached, CachedModel(attached, Setup(Full(), None, None), max_length=512) as cached:
        pipe = pipeline("text-generation", model=network, tokenizer=tokenizer)

        def chat(**settings: Any) -> tuple[list[str], list[int]]:
            """The answers, and the steps of each."""
            messages, steps = [], []
            for words in ("What is it?", "And then?"):
                asked = [*messages, {"role": "user", "content": words}]
                with warnings.catch_warnings(action="ignore"):
                    (made,) = pipe(asked, max_new_tokens=NEW, do_sample=False, **settings)
                messages = made["generated_text"]
                steps.append(cached.usage.steps)
            return [message["content"] for message in messages[1::2]], steps

        whole, steps = chat()
        gone_on, other_steps = chat(past_key_values=cached.new_cache(60))
    assert gone_on == whole and steps == [NEW - 1, NEW - 1]
    assert other_steps[1] > 2 * NEW, "the second prompt was decoded"

"""transformers' `generate` over a live cache: its own tokens, replay's tokens, refusals, and the model afterwards."""

import pytest
import torch

from harness.api.cached_model import CachedModel
from methods.full import Full
from tests.cases import CASES, Case
from tests.living import (
    FAMILIES,
    PROMPT,
    PROMPTS,
    attached_with_link,
    calibration_of,
    open_live,
    replay_ids,
    tiny,
    token_batch,
)

NEW = 20


@pytest.fixture(autouse=True)
def no_end(monkeypatch):
    """A tiny model would come to its end token early."""
    for family in FAMILIES:
        monkeypatch.setattr(tiny(family).generation_config, "eos_token_id", None)


def prompts_of(padding):
    ids, real = token_batch(PROMPTS[padding], 0)
    return ids, {"attention_mask": real.long(), "max_new_tokens": NEW}


@pytest.mark.parametrize(
    ("family", "padding", "placement"),
    [*((family, "padded", "host") for family in FAMILIES), ("gqa", "even", "device")],
)
def test_full_generates_what_transformers_generates(family, padding, placement):
    ids, asked = prompts_of(padding)
    expected = tiny(family).generate(ids, do_sample=False, **asked)
    with (
        attached_with_link(family) as (attached, link),
        CachedModel(attached, Full(), placement=placement, link=link) as cached,
    ):
        assert torch.equal(cached.generate(ids, do_sample=False, **asked), expected)
    assert cached.usage.steps == NEW - 1 and cached.usage.budget == 1
    assert (cached.usage.h2d_bytes > 0) == (cached.usage.d2h_bytes > 0) == (placement == "host")


@pytest.mark.parametrize(("name", "budget"), [("quest", None), ("infinigen", 0.7), ("h2o", 0.75)])
def test_a_methods_tokens_are_those_of_replay_at_the_budget_asked_for(name, budget):
    ids, asked = prompts_of("padded")
    case = CASES[name]
    with attached_with_link() as (attached, link):
        cached = CachedModel(
            attached, case.method, budget, calibration=calibration_of(attached), placement="host", link=link
        )
        with cached:
            made = cached.generate(ids, do_sample=False, return_dict_in_generate=True, output_logits=True, **asked)
        if budget is not None:
            assert cached.usage.budget == pytest.approx(budget, abs=0.02)
            real = asked["attention_mask"].bool()
            case = Case(cached.open_session(real, NEW).method)
        logits, reads = replay_ids(attached, case, made.sequences, asked["attention_mask"].bool())
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

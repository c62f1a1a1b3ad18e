"""transformers' `generate` over a live cache: replay's tokens, inside of inference mode too."""

import pytest
import torch

from harness.api.cached_model import CachedModel
from tests.cases import CASES, Case
from tests.living import (
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
    monkeypatch.setattr(tiny("gqa").generation_config, "eos_token_id", None)


@pytest.mark.parametrize(("name", "budget"), [("quest", None), ("infinigen", 0.7), ("h2o", 0.75)])
def test_a_methods_tokens_are_those_of_replay_at_the_budget_asked_for(name, budget):
    case, (ids, real) = CASES[name], token_batch(PROMPTS["padded"], 0)
    asked = {"attention_mask": real.long(), "max_new_tokens": NEW, "do_sample": False, "output_logits": True}
    with attached_with_link() as (attached, link):
        options = {"calibration": calibration_of(attached), "placement": "host", "link": link}
        with CachedModel(attached, case.method, budget, **options) as cached:
            made = cached.generate(ids, return_dict_in_generate=True, **asked)
        if budget is not None:
            assert cached.usage.budget == pytest.approx(budget, abs=0.02)
            case = Case(cached.open_session(real.bool(), NEW).method)
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

"""Several texts that go on from one cache: each is what it is on a cache of its own."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest
import torch
from torch import Tensor

from harness.decode.session import LiveSession
from harness.model.attach import attach
from tests.cases import CASES, WIDE
from tests.conftest import tiny
from tests.living import PROMPTS, LatestLink, open_live, token_batch
from tests.tiny_models import mixed

ROOM = 14
TEXTS = ((3, 9, 20, 4, 8), (11, 2), (9, 7, 7, 40, 1, 12))
"""Tokens that are decoded, of unequal numbers: some leave rows behind that the next one must not see."""


def decoded(session: LiveSession, text: tuple[int, ...]) -> Tensor:
    """Logits [tokens, batch, vocab] after each token of a text, the same in every sequence."""
    batch = len(session.batch.prompts)
    return torch.stack([session.decode_step(torch.tensor([token] * batch)) for token in text])


def require_same_as_alone(model, case, batch: str, placement: str, **options) -> None:
    ids, real = token_batch(PROMPTS[batch], 0)
    with attach(model) as attached, ExitStack() as stack:
        if placement == "host":
            options |= {"placement": "host", "link": stack.enter_context(LatestLink())}
        alone = []
        for text in TEXTS:
            with closing(open_live(attached, case, ROOM, **options)) as session:
                session.prefill(ids, real)
                alone.append((decoded(session, text), session.reads.budget, int(session.traffic.loaded.num_bytes)))
        with closing(open_live(attached, case, ROOM, **options)) as session:
            session.prefill(ids, real)
            for text, (logits, budget, num_bytes) in zip(TEXTS, alone, strict=True):
                with closing(session.fork()) as fork:
                    assert torch.equal(decoded(fork, text), logits)
                    assert (fork.reads.budget, int(fork.traffic.loaded.num_bytes)) == (budget, num_bytes)
            assert session.steps == 0 and not session.reads.rows
            assert placement == "device" or not session.link_use._transfers, "a fork's transfers are its own"


@pytest.mark.parametrize(
    ("name", "batch", "placement"),
    [
        *((name, "padded", "device") for name in WIDE),
        *((name, "even", "host") for name in WIDE if CASES[name].method.when != "true_scores"),
    ],
)
def test_forks_of_a_session_are_what_sessions_of_their_own_are(name, batch, placement):
    """Tokens, budgets and bytes."""
    require_same_as_alone(tiny("gqa"), CASES[name], batch, placement)


def test_forks_begin_without_rows_on_the_device():
    require_same_as_alone(tiny("gqa"), CASES["quest"], "even", "host", gpu_cache=1.5)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_next", "deepseek_v3"])
def test_forks_have_windows_recurrent_states_and_rings_of_their_own(family):
    for name in "h2o", "infinigen", "kivi":
        require_same_as_alone(mixed(family), CASES[name], "even", "device")

"""Live decoding: prompts that are handed over, segments of a step."""

from contextlib import closing

import pytest
import torch

from harness.decode import links as emulated
from harness.decode import needs
from harness.decode import timeline as timelines
from harness.decode.timeline import SEGMENTS, Timeline
from harness.model.prompts import run_prompt
from methods.codecs.integers import PairCodec
from tests.cases import CASES
from tests.living import (
    PROMPT,
    PROMPTS,
    STEPS,
    attached_with_link,
    force,
    live,
    open_live,
    token_batch,
)

KV_HEADS, HEAD_DIM = 2, 16  # of `gqa`
HEADS = 2 * KV_HEADS  # of the batch
FP32_ROW = 2 * HEAD_DIM * 4  # K and V
EVEN = (PROMPT, PROMPT)


# Sessions


@pytest.mark.parametrize(
    "name", ["full", "int4", "h2o", "infinigen", "oracle", "kivi", "shadowkv", "snapkv-both", "kvzip", "projected"]
)
def test_a_prompt_that_is_handed_over_is_as_good_as_ones_own(name):
    placement = "device" if CASES[name].method.when == "true_scores" else "host"
    ids, real = token_batch(PROMPTS["padded"])
    with attached_with_link() as (attached, link):
        prompt = run_prompt(attached, ids[:, :PROMPT], real[:, :PROMPT])
        expected = live(attached, CASES[name], PROMPTS["padded"], placement=placement, link=link).logits
        for steps in (STEPS, 1):  # a prompt serves many sessions
            session = open_live(attached, CASES[name], placement=placement, link=link)
            logits = [session.start(prompt)]
            logits += [session.decode_step(ids[:, PROMPT + step]) for step in range(steps)]
            session.close()
            assert torch.equal(torch.stack(logits, 1), expected[:, : 1 + steps])


@pytest.mark.skipif(torch.cuda.is_available(), reason="rows are packed on the device")
@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("name", ["int4", "kivi", "infinigen+int4"])
def test_int4_reads_back_from_pairs_bit_for_bit(name, placement, monkeypatch):
    logits = []
    with attached_with_link() as (attached, link):
        for has_call in (True, False):
            monkeypatch.setattr(needs, "unpacks_pairs", lambda *_, answer=has_call: answer)
            with closing(open_live(attached, CASES[name], placement=placement, link=link)) as session:
                logits.append(force(session, PROMPTS["padded"]))
                assert any(isinstance(store.codec.values, PairCodec) for store in session.stores) == has_call
    assert torch.equal(*logits)


class Clock:
    """A clock that goes on by a microsecond where it is read, and by what is slept: none of the machine's load."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        self.sleep(1e-6)
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_the_segments_of_a_step_sum_to_it(monkeypatch):
    rate, clock = 2e5, Clock()
    for module in (emulated, timelines):
        monkeypatch.setattr(module, "time", clock)
    with attached_with_link(bytes_per_s=rate) as (attached, link):
        timeline = Timeline(attached.device)
        session = open_live(attached, CASES["infinigen"], placement="host", link=link, timeline=timeline)
        ids, real = token_batch(EVEN)
        session.prefill(ids[:, :PROMPT], real[:, :PROMPT])
        began = clock.perf_counter()
        for step in range(3):
            timeline.begin_step()
            session.decode_step(ids[:, PROMPT + step])
        steps = timeline.take()
        seconds = clock.perf_counter() - began
        session.close()
    assert [set(step) for step in steps] == [set(SEGMENTS)] * 3
    assert sum(sum(step.values()) for step in steps) == pytest.approx(seconds, abs=1e-5)
    assert all(value > 0 for step in steps for value in step.values())
    one_layer = HEADS * FP32_ROW * PROMPT / rate  # seconds of one layer's transfer, of which a step has more than two
    assert all(step["transfer"] > one_layer for step in steps)

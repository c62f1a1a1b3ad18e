"""On a GPU: live decoding is replay, host placement is device placement bit for bit, no step synchronises.

What CUDA asks of a step that can be seen without a GPU is in `test_fake_cuda`, `test_races` and `test_memory`.
"""

from copy import deepcopy

import pytest
import torch

from harness.checks.two_ways import Trial
from harness.decode.graphs import LEAST_TOKENS
from harness.decode.links import open_link
from harness.decode.session import LiveSession
from harness.decode.timeline import now, seconds
from harness.model.attach import attach
from harness.replay.setup import Setup
from tests.cases import CASES, Case
from tests.living import (
    PROMPT,
    PROMPTS,
    STEPS,
    TOLERANCE,
    calibration_of,
    largest_difference,
    of_codec,
    tiny,
    token_batch,
)

PROMPT_LENGTHS = PROMPTS["padded"]

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def attached():
    """The grouped-query model on the GPU, with exact fp32 products."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with attach(deepcopy(tiny("gqa")).cuda()) as attached:
        yield attached


@pytest.fixture
def link(attached):
    with open_link(attached.device) as link:
        yield link


def calibration_on(attached):
    return {name: tensor.to(attached.device) for name, tensor in calibration_of(attached).items()}


def decode(attached, case: Case, *, may_wait: bool = False, **options) -> tuple[torch.Tensor, LiveSession]:
    """Logits of teacher-forced steps; any synchronisation after the first step raises, unless it may wait."""
    ids, real = (tensor.to(attached.device) for tensor in token_batch(PROMPT_LENGTHS))
    session = LiveSession(
        attached, case.method, max_new_tokens=STEPS, codec=case.codec, calibration=calibration_on(attached), **options
    )
    logits = [session.prefill(ids[:, :PROMPT], real[:, :PROMPT])]
    logits.append(session.decode_step(ids[:, PROMPT]))  # kernels are compiled and loaded
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("default" if may_wait else "error")
    try:
        logits += [session.decode_step(ids[:, PROMPT + step]) for step in range(1, STEPS)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return torch.stack(logits, 1), session


@gpu
@pytest.mark.parametrize("name", CASES)
def test_live_is_replay_on_a_gpu(attached, link, name):
    case = CASES[name]
    replayed = Trial(attached, None, Setup(case.method, case.codec, calibration_on(attached)), PROMPT_LENGTHS).replay()
    expected = replayed.logits
    flips = of_codec(case.codec) > TOLERANCE
    tolerance = 3e-2 if flips else 1e-3
    device, session = decode(attached, case)
    assert largest_difference(device, expected) <= tolerance
    assert session.reads.budget == pytest.approx(replayed.budget)
    if case.method.when == "true_scores":
        return
    host, session = decode(attached, case, placement="host", link=link)
    assert torch.equal(host, device)
    session.close()
    if case.method.names_rows:
        reused, session = decode(attached, case, placement="host", link=link, gpu_cache=1)
        assert largest_difference(reused, device) <= tolerance
        session.close()


@gpu
@pytest.mark.parametrize("name", ["full", "int4", "h2o", "infinigen"])
def test_a_managed_and_a_pageable_cache_give_what_one_on_the_device_gives(attached, name):
    """Padded prompts make rows of unequal number, so all ways to read a store are taken."""
    expected, _ = decode(attached, CASES[name])
    managed, session = decode(attached, CASES[name], placement="managed")
    session.close()
    with open_link(attached.device, overlap=False) as link:
        pageable, session = decode(attached, CASES[name], may_wait=True, placement="host", link=link, pinned=False)
        session.close()
    assert torch.equal(managed, expected) and torch.equal(pageable, expected)


@gpu
@pytest.mark.parametrize("gpu_cache", [0, 1])
@pytest.mark.parametrize(
    "name", ["full", "int4", "h2o", "snapkv", "infinigen", "infinigen-sampled", "quest", "pool-lru"]
)
def test_replayed_steps_are_those_of_python_on_a_gpu(attached, link, name, gpu_cache):
    case, found = CASES[name], []
    options = {"placement": "host", "link": link, "gpu_cache": gpu_cache * case.method.names_rows, "bucket": STEPS}
    for graphs in (False, True):
        logits, session = decode(attached, case, may_wait=True, graphs=graphs, **options)
        rows = [int(count.num_rows) for count in session.traffic.counts]
        found.append((logits, rows, session.reads.budget))
        assert not graphs or (session.graphs.recorded and session.graphs.failure is None)
        session.close()
    (expected, *others), (replayed, *of_replay) = found
    assert torch.equal(replayed, expected) and of_replay == others


@gpu
def test_the_parts_of_a_replayed_step_sum_to_it_on_a_gpu(attached, link):
    """Events within a graph tell the times of its last replay."""
    ids, real = (tensor.to(attached.device) for tensor in token_batch(PROMPT_LENGTHS))
    options = {"placement": "host", "link": link, "calibration": calibration_on(attached), "graphs": True}
    session = LiveSession(attached, CASES["infinigen"].method, max_new_tokens=LEAST_TOKENS, **options)
    session.prefill(ids[:, :PROMPT], real[:, :PROMPT])
    for _ in range(6):
        session.decode_step(ids[:, PROMPT])
    began = now(attached.device)
    marked = session.graphs.marked_step(ids[:, PROMPT])
    took_s = seconds(began, now(attached.device))
    assert session.graphs.recorded and marked is not None and session.steps == 7
    assert marked.segments["attention"] > 0 and sum(marked.segments.values()) < took_s
    assert 0 < marked.busy_s <= marked.span_s < took_s
    session.close()

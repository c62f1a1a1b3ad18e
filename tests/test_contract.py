"""The contract: live decoding gives the logits of replay, for every method, family, padding and placement."""

from functools import cache

import pytest
import torch
from cases import CASES
from living import (
    FAMILIES,
    PROMPT,
    PROMPTS,
    STEPS,
    TOLERANCE,
    Result,
    attached_with_link,
    largest_difference,
    live,
    replay,
)

FLIPS = {"int8": 2e-3, "int4": 3e-2}
"""A value at the border of two codes may fall to either side, since live and replay round differently; one code off
moves it by (max - min) / (2^bits - 1), which on these models moves a logit by a fifth of this at most. Without steps
(`smooth`), the codec's path is held to the contract's tolerance."""
PROMPT_LEAVES_NO_TRACE = ("full", "h2o-fills", "streaming-fills")
"""Nothing is dropped or coded while the prompt ends: a row is the same whether it is the prompt's or a step's."""

every_case = pytest.mark.parametrize("name", CASES)
every_family = pytest.mark.parametrize("family", FAMILIES)
every_padding = pytest.mark.parametrize("padding", PROMPTS)
offloaded = pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.method.selects != "scores"])
CHOOSING = [name for name, case in CASES.items() if case.method.selects in ("rehearsed", "query")]
choosing = pytest.mark.parametrize("name", CHOOSING)


def tolerance(name: str) -> float:
    codec = CASES[name].codec
    return TOLERANCE if codec is None else FLIPS.get(codec.name, TOLERANCE)


@cache
def replayed(family: str, name: str, padding: str, prefill_len: int | None = None) -> Result:
    with attached_with_link(family) as (attached, _):
        return replay(attached, CASES[name], PROMPTS[padding], prefill_len)


@cache
def decoded(family: str, name: str, padding: str, placement: str = "device", reuse: bool = False) -> Result:
    with attached_with_link(family) as (attached, link):
        return live(attached, CASES[name], PROMPTS[padding], placement=placement, link=link, reuse=reuse)


@every_padding
@every_family
@every_case
def test_live_is_replay(name, family, padding):
    expected, got = replayed(family, name, padding), decoded(family, name, padding)
    assert got.logits.shape[1] == 1 + STEPS
    assert largest_difference(got.logits, expected.logits) <= tolerance(name)
    assert got.kv_frac == pytest.approx(expected.kv_frac, abs=1e-9)


@every_padding
@every_family
@offloaded
def test_host_is_device_bit_for_bit(name, family, padding):
    device, host = (decoded(family, name, padding, placement) for placement in ("device", "host"))
    assert torch.equal(host.logits, device.logits)
    assert host.kv_frac == device.kv_frac


@every_family
@choosing
def test_reuse_changes_the_order_of_rows_only(name, family):
    plain, reused = (decoded(family, name, "padded", "host", reuse) for reuse in (False, True))
    assert largest_difference(reused.logits, plain.logits) <= tolerance(name)
    assert reused.kv_frac == plain.kv_frac


@every_family
@pytest.mark.parametrize("name", [name for name in CASES if name not in FLIPS])  # of those, `smooth` speaks
def test_an_off_by_one_prefill_len_shows(name, family):
    right = decoded(family, name, "padded").logits[:, 2:]
    wrong = replayed(family, name, "padded", PROMPT + 1).logits[:, 1:]
    difference = largest_difference(wrong, right)
    if name in PROMPT_LEAVES_NO_TRACE:
        assert difference <= TOLERANCE
    else:
        assert difference > 5 * tolerance(name)

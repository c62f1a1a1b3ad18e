"""The contract: live decoding gives the logits of replay, for every method, family, padding and placement, and what
crosses the link is what the method selects and the exempt layers, not a row more."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from typing import NamedTuple

import pytest
import torch
from cases import CASES, SHIPPED, WIDE, shipped
from living import (
    FAMILIES,
    PROMPT,
    PROMPTS,
    STEPS,
    TOLERANCE,
    Result,
    attached_with_link,
    force,
    largest_difference,
    of_codec,
    open_live,
    replay,
)
from living import live as live_session
from transformers import PreTrainedModel

from harness.contract import CHECKS, MODELS, Trial, judge, result_of
from harness.model.attach import attach
from harness.model.calibration import calibrate
from harness.model.tiny import tiny_model
from harness.offload.cache import LayerCache
from harness.offload.links import EmulatedLink
from harness.setup import Setup
from harness.sizes import expected_size
from methods.base import Geometry, Row

PROMPT_LEAVES_NO_TRACE = ("full", "h2o-fills", "streaming-fills", "residual-fills")
"""Nothing is dropped or coded while the prompt ends: a row is the same whether it is the prompt's or a step's."""


def in_families(names) -> pytest.MarkDecorator:
    pairs = [(name, family) for name in names for family in (FAMILIES if name in WIDE else ["gqa"])]
    return pytest.mark.parametrize(("name", "family"), pairs)


every_case = in_families(CASES)
every_padding = pytest.mark.parametrize("padding", PROMPTS)
OFFLOADED = [name for name, case in CASES.items() if case.method.when != "true_scores"]
offloaded = in_families(OFFLOADED)
CHOOSING = [name for name, case in CASES.items() if case.method.names_rows]
choosing = in_families(CHOOSING)


def tolerance(name: str) -> float:
    return of_codec(CASES[name].codec)


@cache
def replayed(family: str, name: str, padding: str, prefill_len: int | None = None) -> Result:
    with attached_with_link(family) as (attached, _):
        return replay(attached, CASES[name], PROMPTS[padding], prefill_len)


class Decoded(NamedTuple):
    """Live decoding, and what crossed the link: `selected`, the rows that the layers' selections name, whatever was
    asked for; `crossed`, bytes by the count of the stores and by that of the fetches; `slot_bytes`, of an exempt layer
    and of any other."""

    result: Result
    geometry: Geometry
    selected: int
    crossed: tuple[int, int]
    slot_bytes: tuple[int, int]


@cache
def decoded(family: str, name: str, padding: str, placement: str, reuse: bool) -> Decoded:
    with (
        attached_with_link(family) as (attached, link),
        selected_rows() as selected,
        closing(open_live(attached, CASES[name], placement=placement, link=link, reuse=reuse)) as session,
    ):
        result = result_of(session, force(session, PROMPTS[padding]))
        crossed = (session.h2d_bytes, int(session.loaded_bytes))
        slot_bytes = (session.stores[0].slot_bytes, session.stores[-1].slot_bytes)
        return Decoded(result, attached.geometry, sum(selected), crossed, slot_bytes)


def live(family: str, name: str, padding: str, placement: str = "device", reuse: bool = False) -> Result:
    return decoded(family, name, padding, placement, reuse).result


@contextmanager
def selected_rows() -> Iterator[list[int]]:
    """Numbers of rows that selections name while this is open."""
    numbers: list[int] = []
    select = LayerCache.select

    def counting(cache, query, true_scores):
        selection = select(cache, query, true_scores)
        heads = cache.store.slots.shape[1] // selection.mask.shape[1]
        numbers.append(int(selection.mask[..., :-1].sum()) * heads)  # the own slot is the last
        return selection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerCache, "select", counting)
        yield numbers


@every_padding
@every_case
def test_live_is_replay(name, family, padding):
    expected, got = replayed(family, name, padding), live(family, name, padding)
    assert got.logits.shape[1] == 1 + STEPS
    assert largest_difference(got.logits, expected.logits) <= tolerance(name)
    assert got[1:] == pytest.approx(expected[1:], abs=1e-9)


@every_padding
@offloaded
def test_host_is_device_bit_for_bit(name, family, padding):
    device, host = (live(family, name, padding, placement) for placement in ("device", "host"))
    assert torch.equal(host.logits, device.logits)
    assert host[1:] == device[1:]


@choosing
def test_reuse_changes_the_order_of_rows_only(name, family):
    plain, reused = (live(family, name, "padded", "host", reuse) for reuse in (False, True))
    assert largest_difference(reused.logits, plain.logits) <= tolerance(name)
    assert reused.size == plain.size


WITHOUT_STEPS = [name for name in CASES if tolerance(name) == TOLERANCE]


@in_families(WITHOUT_STEPS)  # of the others, `smooth` speaks
def test_an_off_by_one_prefill_len_shows(name, family):
    right = live(family, name, "padded").logits[:, 2:]
    wrong = replayed(family, name, "padded", PROMPT + 1).logits[:, 1:]
    difference = largest_difference(wrong, right)
    if name in PROMPT_LEAVES_NO_TRACE:
        assert difference <= TOLERANCE
    else:
        assert difference > 5 * tolerance(name)


# Every method in conf/method, with its defaults: a new file there is a new test here

LONG = {"even": (200,), "padded": (200, 180)}
every_method = pytest.mark.parametrize("name", SHIPPED)


@cache
def of_shipped(name: str, padding: str, how: str, prefill_len: int | None = None) -> Result:
    case = shipped(name)
    with attached_with_link("gqa") as (attached, link):
        if how == "replay":
            return replay(attached, case, LONG[padding], prefill_len)
        return live_session(attached, case, LONG[padding], placement=how, link=link)


@every_padding
@every_method
def test_a_shipped_methods_live_is_its_replay(name, padding):
    case = shipped(name)
    allowed = of_codec(case.codec)
    expected, got = of_shipped(name, padding, "replay"), of_shipped(name, padding, "device")
    assert largest_difference(got.logits, expected.logits) <= allowed
    assert got[1:] == pytest.approx(expected[1:], abs=1e-9)
    if case.method.when != "true_scores":
        assert torch.equal(of_shipped(name, padding, "host").logits, got.logits)


@every_method
def test_a_shipped_methods_size_is_its_closed_form(name):
    case = shipped(name)
    row = Row(cached=200, prompt=200, final=210)
    read, bound = (getattr(case.method, ask)(row, 3) for ask in ("tokens_read", "max_tokens_read"))
    assert read is None or read <= bound <= 200
    if read is not None and case.codec is None:
        rows = {Row(200 + step, 200, 200 + STEPS): 1 for step in range(STEPS)}
        expected = expected_size(case.method, rows, 4, 0.5 if case.method.holds_keys else 1.0)
        assert of_shipped(name, "even", "replay").size == pytest.approx(expected, abs=1e-9)


@every_method
def test_a_shipped_method_names_itself(name):
    assert shipped(name).method.title


@cache
def contract_model(name: str) -> PreTrainedModel:
    model_type, shape = MODELS[name]
    return tiny_model(model_type, **shape)


@pytest.mark.parametrize("name", [name for name in SHIPPED if shipped(name).codec is None])
def test_a_shipped_method_passes_every_check_between_windows(name):
    """As `experiment=contract` asks it, on its model with windows and a softcap."""
    method = shipped(name).method
    with attach(contract_model("Gemma 2")) as attached, EmulatedLink(1e12) as link:
        measured = calibrate(attached, method, list(range(3, 253))) if method.needs_calibration else None
        trial = Trial(attached, link, Setup(method, None, measured), LONG["padded"])
        found = [judge(check, trial) for check in CHECKS.values()]
    assert len(found) == 6 and "FAILED" not in {finding.verdict for finding in found}, found
    assert found[-1].verdict == "ok"


# Bytes


@every_padding
@pytest.mark.parametrize("name", OFFLOADED)
def test_over_the_link_go_the_selected_rows_and_the_exempt_layers(name, padding):
    case, prompts = CASES[name], PROMPTS[padding]
    _, geometry, selected, crossed, (exact, coded) = decoded("gqa", name, padding, "host", False)
    exempt = case.method.num_exempt_layers
    columns = len(prompts) * geometry.num_kv_heads * sum(PROMPT + step for step in range(STEPS))
    whole = geometry.num_layers - exempt if case.method.reads_all else 0
    stored = columns
    if case.codec is not None and case.codec.residual:  # by token: the longest sequence says how many
        of_head = sum(case.codec.stored(PROMPT + step) for step in range(STEPS))
        stored = len(prompts) * geometry.num_kv_heads * of_head
    expected = columns * exempt * exact + stored * whole * coded + selected * coded
    assert exempt == 0 or exact == 2 * geometry.head_dim * 4
    assert crossed == (expected, expected)


SLOT, HEADS = 2 * 16 * 4, 2
BY_HAND = {
    # 24 tokens are cached, then 25, ... : of 4 layers 2 are exempt, and 2 read, at each of the 10 steps, so many tokens
    "h2o": [5 + 3] * 10,  # floor(.15 * 34) + floor(.1 * 34)
    "streaming": [10] * 10,  # floor(.3 * 34)
    "snapkv": [12 + step for step in range(10)],  # half of the prompt, and what was generated
    "quest": [6, 7, 8, 6, 7, 8, 9, 10, 11, 9],  # 2 pages of 3, from 30 tokens on 3, and the unfinished one
    "infinigen-query": [7, 7, 7, 8, 8, 8, 9, 9, 9, 9],  # floor(.3 * cached)
    "infinigen-fixed": [6] * 10,
    "pool-tie": [1] * 10,  # max(1, floor(.2 * 4))
}


@pytest.mark.parametrize("name", BY_HAND)
def test_bytes_by_hand(name):
    with (
        attached_with_link("gqa") as (attached, link),
        closing(open_live(attached, CASES[name], placement="host", link=link)) as session,
    ):
        force(session, PROMPTS["even"])
        exempt_rows = 2 * HEADS * sum(range(24, 34))
        assert session.h2d_bytes == SLOT * (exempt_rows + 2 * HEADS * sum(BY_HAND[name]))

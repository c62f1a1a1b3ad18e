"""The contract: live decoding gives the logits of replay, for every method, family, padding and placement, and only the
selected rows and the exempt layers cross the link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from types import SimpleNamespace
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
    setup_of,
)
from living import live as live_session

from harness.contract import CHECKS, MODELS, Trial, judge, result_of
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.calibration import calibrate
from harness.model.policies import select
from harness.model.tiny import tiny_model
from harness.offload.cache import LayerCache
from harness.offload.links import EmulatedLink
from harness.setup import Setup
from methods.base import Geometry, Rest, Rows, Selection

PROMPT_LEAVES_NO_TRACE = ("full", "h2o-fills", "streaming-fills", "residual-fills")
"""Nothing is dropped or coded while the prompt ends: a row is the same whether it is the prompt's or a step's."""


RUNS = [(name, "gqa") for name in CASES] + [(name, family) for name in WIDE for family in FAMILIES if family != "gqa"]
OFFLOADED = [name for name, case in CASES.items() if case.method.when != "true_scores"]
CHOOSING = [name for name, case in CASES.items() if case.method.names_rows]


def tolerance(name: str) -> float:
    return of_codec(CASES[name].codec)


@cache
def replayed(family: str, name: str, padding: str, prefill_len: int | None = None) -> Result:
    with attached_with_link(family) as (attached, _):
        return replay(attached, CASES[name], PROMPTS[padding], prefill_len)


class Decoded(NamedTuple):
    """selected: rows that the layers' selections name. crossed: bytes over the link by the count of the stores and by
    that of the fetches. slot_bytes: of an exempt layer and of any other."""

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

    def counting(cache, *given):
        selection = select(cache, *given)
        heads = cache.store.slots.shape[1] // selection.mask.shape[1]
        numbers.append(int(selection.mask[..., :-1].sum()) * heads)  # the own slot is the last
        return selection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerCache, "select", counting)
        yield numbers


@pytest.mark.parametrize(("name", "family"), RUNS)
def test_live_is_replay_and_host_is_device_bit_for_bit(name, family):
    expected, got = replayed(family, name, "padded"), live(family, name, "padded")
    assert got.logits.shape[1] == 1 + STEPS
    assert largest_difference(got.logits, expected.logits) <= tolerance(name)
    assert got[1:] == pytest.approx(expected[1:], abs=1e-9)
    if name in OFFLOADED:
        host = live(family, name, "padded", "host")
        assert torch.equal(host.logits, got.logits) and host[1:] == got[1:]


@pytest.mark.parametrize("name", CHOOSING)
def test_reuse_changes_the_order_of_rows_only(name):
    plain, reused = (live("gqa", name, "padded", "host", reuse) for reuse in (False, True))
    assert largest_difference(reused.logits, plain.logits) <= tolerance(name)
    assert reused.size == plain.size


@pytest.mark.parametrize("name", [name for name in CASES if tolerance(name) == TOLERANCE])  # `smooth` speaks for others
def test_an_off_by_one_prefill_len_shows(name):
    right = live("gqa", name, "padded").logits[:, 2:]
    wrong = replayed("gqa", name, "padded", PROMPT + 1).logits[:, 1:]
    difference = largest_difference(wrong, right)
    if name in PROMPT_LEAVES_NO_TRACE:
        assert difference <= TOLERANCE
    else:
        assert difference > 5 * tolerance(name)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.codec is None])
def test_the_size_is_its_closed_form(name):
    with attached_with_link() as (attached, link):
        trial = Trial(attached, link, setup_of(attached, CASES[name]), PROMPTS["padded"])
        trial.replayed = replayed("gqa", name, "padded")
        CHECKS["the size is its closed form"](trial)


# Every method in conf/method, with its defaults: a new file there is a new test here

LONG = (200, 180)


@pytest.mark.parametrize("name", [name for name in SHIPPED if shipped(name).codec is not None])
def test_a_shipped_codecs_live_is_its_replay(name):
    case = shipped(name)
    with attached_with_link("gqa") as (attached, link):
        expected, got = replay(attached, case, LONG), live_session(attached, case, LONG, placement="device", link=link)
        assert largest_difference(got.logits, expected.logits) <= of_codec(case.codec)
        assert got[1:] == pytest.approx(expected[1:], abs=1e-9)
        host = live_session(attached, case, LONG, placement="host", link=link)
        assert torch.equal(host.logits, got.logits)


@pytest.mark.parametrize("name", [name for name in SHIPPED if shipped(name).codec is None])
def test_a_shipped_method_passes_every_check_between_windows(name):
    """As `experiment=contract` asks it, on its model with windows and a softcap."""
    method = shipped(name).method
    model_type, shape = MODELS["Gemma 2"]
    with attach(tiny_model(model_type, **shape)) as attached, EmulatedLink(1e12) as link:
        measured = calibrate(attached, method, list(range(3, 253))) if method.needs_calibration else None
        trial = Trial(attached, link, Setup(method, None, measured), LONG)
        found = [judge(check, trial) for check in CHECKS.values()]
    assert len(found) == 6 and "FAILED" not in {finding.verdict for finding in found}, found
    assert found[-1].verdict == "ok"


# Bytes


@pytest.mark.parametrize("name", OFFLOADED)
def test_over_the_link_go_the_selected_rows_and_the_exempt_layers(name):
    case, prompts = CASES[name], PROMPTS["padded"]
    _, geometry, selected, crossed, (exact, coded) = decoded("gqa", name, "padded", "host", False)
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


# A selection that is none

GOOD = Selection(torch.ones(2, 1, 3, 8, dtype=torch.bool), torch.ones(2, 3).double())
WRONG = {
    "nothing": (None, "NoneType; allowed: a Selection"),
    "a shape": (GOOD._replace(num_read=torch.ones(2, 1)), r"num_read torch.float32 \[2, 1\]; allowed: .*\[2, 3\]"),
    "heads": (GOOD._replace(mask=GOOD.mask.expand(-1, 4, -1, -1)), r"mask .*; allowed: .*\[2, 1 or 2, 3, 8\]"),
    "side": (GOOD._replace(side=torch.ones(2, 3, 1)), r"side .*; allowed"),
    "bias": (GOOD._replace(bias=torch.ones(2, 3, 8)), r"bias .*; allowed"),
    "rest": (GOOD._replace(rest=Rest(torch.ones(2, 3), torch.ones(1))), r"rest.share .*; allowed"),
}  # fmt: skip


class Odd:
    """A state of a user's own method."""

    geometry = Geometry(1, 4, 2, 8, 1.0, "llama")
    method = SimpleNamespace()

    def __init__(self, result):
        self.result = result

    def select(self, layer, rows):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def selected_by(result) -> Selection:
    positions = torch.ones(2, 3, dtype=torch.int32)
    return select(Odd(result), 0, Rows(None, positions, positions > 0, torch.zeros(2, 1, 8).int(), None, None))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_selection_is_one_line_with_its_place(name):
    result, message = WRONG[name]
    with pytest.raises(UserError, match=rf"{__file__}:\d+: select returned {message}") as refusal:
        selected_by(result)
    assert "\n" not in str(refusal.value) and selected_by(GOOD) is GOOD


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("two\nlines")])
def test_an_error_of_an_own_method_is_one_line_with_its_place(error):
    with pytest.raises(UserError, match=rf"{__file__}:\d+: select raised {type(error).__name__}") as refusal:
        selected_by(error)
    assert "\n" not in str(refusal.value)
    with pytest.raises(torch.OutOfMemoryError):
        selected_by(torch.OutOfMemoryError())

"""The contract: live decoding gives the logits of replay, for every method, family, padding and placement, and only the
selected rows and the dense layers cross the link."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from functools import cache
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from harness.checks.contract import CHECKS, MODELS, BrokenError, _refusal, judge
from harness.checks.two_ways import HostRun, Trial, tiny_family
from harness.decode.links import EmulatedLink
from harness.model.attach import attach
from harness.model.policies import check_selection
from harness.model.prompts import calibrate
from harness.replay.setup import Setup
from methods.base import Geometry, QueryRows, Rest, Selection, ShapeError
from tests.cases import CASES, SHIPPED, WIDE, Case, shipped
from tests.living import (
    PROMPT,
    PROMPTS,
    STEPS,
    TOLERANCE,
    Result,
    attached_with_link,
    largest_difference,
    of_codec,
    replay,
    setup_of,
)
from tests.living import live as live_session

RUNS = [
    *((name, "gqa") for name in CASES),
    *((name, "opt") for name in WIDE),
    *(
        (name, family)
        for name in ("full", "h2o", "infinigen", "quest", "snapkv")
        for family in ("llama", "phi3", "gpt_neox")
    ),
]
OFFLOADED = [name for name, case in CASES.items() if case.method.when != "true_scores"]
PADDED = PROMPTS["padded"]
CHOOSING = [name for name, case in CASES.items() if case.method.names_rows]
PLAINLY = ("infinigen", "quest", "pool-lru")
"""Cases without a codec whose rows stay on the device."""


def tolerance(name: str) -> float:
    return of_codec(CASES[name].codec)


@cache
def replayed(family: str, name: str, prefill_len: int | None = None) -> Result:
    with attached_with_link(family) as (attached, _):
        return replay(attached, CASES[name], PADDED, prefill_len)


@cache
def live(family: str, name: str) -> Result:
    with attached_with_link(family) as (attached, _):
        return live_session(attached, CASES[name], PADDED)


@cache
def on_host(family: str, name: str) -> HostRun:
    with attached_with_link(family) as (attached, link):
        return Trial(attached, link, setup_of(attached, CASES[name]), PADDED).on_host


@pytest.mark.parametrize(("name", "family"), RUNS)
def test_live_is_replay_and_host_is_device_bit_for_bit(name, family):
    expected, got = replayed(family, name), live(family, name)
    assert got.logits.shape[1] == 1 + STEPS
    assert largest_difference(got.logits, expected.logits) <= tolerance(name)
    assert got[1:] == pytest.approx(expected[1:], abs=1e-9)
    if name in OFFLOADED:
        host = on_host(family, name).result
        assert torch.equal(host.logits, got.logits) and host[1:] == got[1:]


# Without a codec the logits and the size of this are checked with those of replay, below.
@pytest.mark.parametrize("name", [name for name in CHOOSING if CASES[name].codec is not None or name in PLAINLY])
def test_rows_that_stay_change_the_order_of_rows_only(name):
    plain = on_host("gqa", name).result
    with attached_with_link() as (attached, link):
        reused = live_session(attached, CASES[name], PADDED, placement="host", link=link, gpu_cache=1)
    assert largest_difference(reused.logits, plain.logits) <= tolerance(name)
    assert reused.budget == plain.budget


@pytest.mark.parametrize("name", [name for name in WIDE if tolerance(name) == TOLERANCE])  # `smooth` speaks for others
def test_an_off_by_one_prefill_len_shows(name):
    right = live("gqa", name).logits[:, 2:]
    wrong = replayed("gqa", name, PROMPT + 1).logits[:, 1:]
    difference = largest_difference(wrong, right)
    if name == "full":  # nothing is dropped or coded: a row is the same whether it is the prompt's or a step's
        assert difference <= TOLERANCE
    else:
        assert difference > 5 * tolerance(name)


@pytest.mark.parametrize("name", CASES)
def test_over_the_link_goes_the_selection_and_the_budget_is_its_closed_form(name):
    case, expected, on_device = CASES[name], replayed("gqa", name), live("gqa", name)
    is_counted = name in OFFLOADED and not (case.codec and case.codec.residual)  # other bytes are counted by hand
    host = on_host("gqa", name) if is_counted else None
    with attached_with_link() as (attached, link):
        trial = Trial(attached, link, setup_of(attached, case), PADDED)
        trial.replayed, trial.on_device = expected, on_device
        if case.codec is None:
            CHECKS["the budget is its closed form"](trial)
        if is_counted:
            trial.on_host = host
            CHECKS["the link carries what is selected"](trial)
            if case.codec is None and case.method.names_rows:
                CHECKS["rows of the GPU cache are counted"](trial)


@pytest.mark.parametrize("number", [0, 5])
def test_a_count_that_is_no_number_shows_whenever_it_comes(number, monkeypatch):
    with attached_with_link() as (attached, link):
        setup, calls = setup_of(attached, CASES["quest"]), count()
        select = setup.method.state.select

        def miscounted(*args):
            selection = select(*args)
            return selection._replace(num_read=selection.num_read * (math.nan if next(calls) == number else 1))

        monkeypatch.setattr(setup.method.state, "select", miscounted)
        trial = Trial(attached, link, setup, PADDED)
        with pytest.raises(BrokenError, match="num_read is nan tokens off"):
            CHECKS["the link carries what is selected"](trial)


# Every method in conf/method, with its defaults: a new file there is a new test here

LONG = (200, 180)
WINDOWS = ("full_attention", "sliding_attention", "full_attention", "full_attention")


LATENTS = "deepseek_v3"


@pytest.mark.parametrize("name", SHIPPED)
def test_live_is_replay_on_latents(name):
    """Every method and codec in `conf/method`, on the contract's model whose keys hold the values."""
    case = shipped(name)
    with attach(tiny_family(LATENTS, **MODELS[LATENTS])) as attached:
        assert attached.geometry.values_in_keys
        measured = calibrate(attached, case.method, list(range(3, 253))) if case.method.needs_calibration else None
        trial = Trial(attached, None, Setup(case.method, case.codec, measured), LONG)
        found = _refusal(trial) or judge(CHECKS["live decoding is replay"], trial).verdict
    keeps_keys = case.method.keeps_keys
    assert found == "ok" or (keeps_keys and "keeps the keys: in this model they hold the values as well" in found)


@pytest.mark.parametrize("name", [name for name in SHIPPED if shipped(name).codec is None])
def test_a_shipped_method_passes_every_check_between_windows(name):
    """As `experiment=contract` asks it, on its model with windows and a softcap, of four layers in place of six."""
    method = shipped(name).method
    few_layers = MODELS["gemma2"] | {"num_hidden_layers": len(WINDOWS), "layer_types": [*WINDOWS]}
    with attach(tiny_family("gemma2", **few_layers)) as attached, EmulatedLink(1e12) as link:
        measured = calibrate(attached, method, list(range(3, 253))) if method.needs_calibration else None
        trial = Trial(attached, link, Setup(method, None, measured), LONG)
        found = [judge(check, trial) for check in CHECKS.values()]
    assert len(found) == len(CHECKS) == 7 and "FAILED" not in {finding.verdict for finding in found}, found
    assert found[-1].verdict == "ok"


# A selection that is none

GOOD = Selection(torch.ones(2, 1, 3, 8, dtype=torch.bool), torch.ones(2, 3).double())
WRONG = {
    "a shape": (GOOD._replace(num_read=torch.ones(2, 1)), "[2, 1]; must be [num_read: batch, rows] = [2, 3]"),
    "heads": (GOOD._replace(mask=GOOD.mask.expand(-1, 4, -1, -1)), "[2, 4, 3, 8]; must be [mask: batch, KV heads,"),
    "numbers": (GOOD._replace(mask=GOOD.mask.float()), "a mask of torch.float32; must be bool"),
    "side": (GOOD._replace(side=torch.ones(2, 3, 1)), "[2, 3, 1]; must be [side: batch, rows]"),
    "bias": (GOOD._replace(bias=torch.ones(2, 3, 8)), "[2, 3, 8]; must be [bias: batch, KV heads, group, rows, slots]"),
    "rest": (GOOD._replace(rest=Rest(torch.ones(2, 3), torch.ones(1))), "[2, 3]; must be [rest: batch"),
    "no rest": (GOOD._replace(rest=Rest(None, torch.ones(2, 2, 1, 3, 8))), "NoneType; must be [rest: batch"),
    "rest's value": (
        GOOD._replace(rest=Rest(torch.ones(2, 2, 2, 3), torch.ones(2, 2, 3, 8))),
        "[2, 2, 3, 8]; must be [rest.value: batch, KV heads, group, rows, value_dim] = [2, 2, 1 or 2, 3, 8]",
    ),
    "log_mass": (
        GOOD._replace(rest=Rest(None, torch.ones(2, 2, 1, 3, 8), torch.ones(2, 2, 2, 3))),
        "NoneType; must be [rest: batch, KV heads, group, rows] = [2, 2, 2, 3]",  # the method weighs no rest
    ),
}  # fmt: skip


class Odd:
    """A state of a user's own method."""

    geometry = Geometry(1, 4, 2, 8, 1.0, "llama")
    method = SimpleNamespace(weighs_rest=False)

    def select(self, layer, rows):
        raise NotImplementedError


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_selection_is_named_with_its_place(name):
    wrong, message = WRONG[name]
    positions = torch.ones(2, 3, dtype=torch.int32)
    rows = QueryRows(None, positions, positions > 0, torch.zeros(2, 1, 8).int(), None, None)
    check_selection(GOOD, Odd(), rows)
    with pytest.raises(ShapeError, match=re.escape(f"select returned {message}")) as refusal:
        check_selection(wrong, Odd(), rows)
    assert re.fullmatch(rf"{__file__}:\d+", refusal.value.where)


# A hook of an easy base that returns another shape


HOOKS = {
    "mean over heads": ("snapkv", "prompt_score", lambda made: made[0].mean(1), "[2, 24]; must be [batch, KV heads,"),
    "mean of equals": ("snapkv", "prompt_score", lambda made: (made[0], made[1].mean(1, True)), "[2, 1, 24]; must be"),
    "second of all": ("criticalkv", "second_score", lambda made: made[0], "[2, 24]; must be"),
    "stays": ("snapkv", "stay", lambda made: made[..., 0], "[2]; must be [batch, KV heads or 1] = [2, 2 or 1]"),
    "received": ("h2o", "prompt_score", lambda made: made[:, :1], "[2, 1, 24]; must be"),
    "periodic": ("rkv", "score", lambda made: made[0], "[2, 24]; must be [batch, KV heads, n] = [2, 2, 24]"),
    "groupless": ("quest", "scores", lambda made: made[:, :, :1], "[2, 2, 1, 10, 12]; must be [batch,"),
    "index of sequences": ("quest", "index_read", lambda made: made[:, :1], "[2, 1]; must be [batch, rows] = [2, 10]"),
    "sideless": ("infinigen", "project", lambda made: made[:, 0], "[2, 2, 16, 5]; must be"),
    "streams": ("duo", "streams", lambda made: made[:, 0], "[2, 1]; must be [KV heads or 1, 1, 1] = [2 or 1, 1, 1]"),
    "rebuilt": ("shadowkv", "rebuild", lambda made: made[:, :1], "[2, 1, 24, 16]; must be"),
    "resident": ("shadowkv", "resident", lambda made: made[0], "[2, 24]; must be"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hooks_wrong_shape_is_one_line_with_its_place(kind):
    """torch would broadcast it."""
    name, hook, spoil, said = HOOKS[kind]
    case, message = CASES[name], f"{hook} returned {said}"
    base = case.method.state

    def wrong(self, *args):
        return spoil(getattr(base, hook)(self, *args))

    wrong.__name__ = hook
    cls = type("Odd", (type(case.method),), {"state": type("OddState", (base,), {hook: wrong})})
    method = cls(**{field.name: getattr(case.method, field.name) for field in fields(case.method)})
    with attached_with_link() as (attached, _), pytest.raises(ValueError, match=re.escape(message)) as refusal:
        replay(attached, Case(method), PADDED)
    place = getattr(refusal.value, "where", str(refusal.value))
    assert re.search(rf"{__file__}:\d+", place)

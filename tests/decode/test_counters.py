"""What crosses the link, is read on the device and is kept there: twelve methods by hand, in replay and live decoding.

The model has 4 layers, of which 2 are dense, 2 KV heads of 16 columns, and computes in fp32. A sequence has 24 or 15
prompt tokens and decodes 10, so T is 34 or 25; a prompt of 15 is padded by 9 columns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from statistics import mean
from typing import NamedTuple

import pytest

from methods.codecs.integers import IntegerCodec
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.infinigen2 import InfiniGen2Sampled
from methods.pariskv import ParisKV
from methods.quest import Quest
from methods.rocketkv import RocketKV
from methods.socket import Socket
from methods.twilight import Twilight
from methods.vattention import VAttention
from tests.cases import Case, preset
from tests.living import PROMPTS, attached_with_link, force, live, open_live, replay

HEADS = 2
EXACT, INT4 = 2 * 16 * 4, 2 * (4 + 8)
"""Bytes of a token and KV head: 16 elements of K and of V in fp32; or lo, step and 16 half bytes, twice."""
WIDTH = (4 + 32 / 16) / 16
"""Of an int4 element, lo and step included, / 16 bits."""
LENGTHS = 2 * 8
"""A state knows its sequence's prompt and T, int64 each."""
LIMITS = 2 * 8 / HEADS
"""And one that evicts by score, in each layer, its budget and recent tokens: a head's part."""


class Hand(NamedTuple):
    """A method in numbers, of one layer under the method.

    read, index: tokens that a row with t tokens cached of a sequence of T reads, and reads of the index in their stead.
    kept: bytes that a KV head keeps of a sequence of T, floats 16 bits wide. state, shared: bytes that a KV head's
    state takes live, where the batch's longest T is 34, and those of the state as a whole. row: bytes of a stored
    token. width: of an element / 16 bits. buffer: rows of each of the two buffers that take turns. ahead: the dense
    layers' rows have buffers of their own, since the others read less.
    """

    case: Case
    read: Callable[[int, int], float]
    buffer: int
    index: Callable[[int, int], float] = lambda t, final: 0
    kept: Callable[[int], float] = lambda final: 0
    state: float = 0
    shared: int = 0
    row: int = EXACT
    width: float = 1
    ahead: bool = True
    has_state: bool = True


ROCKET = {34: (24, 15, 2, 12), 25: (15, 11, 1, 8)}
"""Of a budget of 6 tokens: the prompt, floor(24 / 4^0.32) and floor(15 / 2.5^0.2793) tokens that stay, 2.5 and 1.83
times the budget: tokens of a chunk, and channels, 16 * 2 / 2.5 and 16 / 1.83."""
COLUMNS = 5
"""ceil(0.3 * 16)"""
BUDGET = {34: 5 + 3, 25: 3 + 2}
"""floor(0.15 * T) + floor(0.1 * T)"""
QUEST_READ = {
    # 2 pages of 3, with 30 tokens or more 3, and the unfinished one
    34: dict(zip(range(24, 34), [6, 7, 8, 6, 7, 8, 9, 10, 11, 9], strict=True)),
    25: dict(zip(range(15, 25), [6, 7, 8, 6, 7, 8, 6, 7, 8, 6], strict=True)),
}
INFINIGEN = Hand(
    Case(InfiniGen(fixed_fetch=6)),
    read=lambda t, final: 6,
    buffer=6,
    index=lambda t, final: (t + 16) * COLUMNS / (2 * 16),  # and what makes them
    kept=lambda final: final * COLUMNS * 2 + 16 * COLUMNS * 2,  # partial keys, and what makes them
    state=34 * COLUMNS * 4 + 16 * COLUMNS * 4,
)
PAIR = 2 * 16 * (4 + 8 // 2)
"""Bytes of two projections to 8 columns in 4 bits: of each of 16 elements lo, step and 8 half bytes."""
PARTIAL_KEY = 4 + 8 // 2
"""Bytes of 8 numbers of a key in 4 bits."""
BALANCED = Hand(
    Case(preset("infinigen-balanced", fixed_fetch=6, partial_weight_ratio=0.5, index_bits=4, projection_bits=4)),
    read=lambda t, final: 6,
    buffer=6,
    index=lambda t, final: (t * PARTIAL_KEY / 2 + PAIR / 2 + 8) / (2 * 16),  # a number has two bytes; and the mean
    kept=lambda final: final * PARTIAL_KEY + PAIR + 8 * 2,  # and the keys' mean
    state=34 * PARTIAL_KEY + PAIR + 8 * 4,
)
FULL = Hand(Case(Full(dense_layers=2)), read=lambda t, final: t, buffer=34, ahead=False, has_state=False)


def rocketkv_index(t: int, prompt: int, kept: int, chunk: int, channels: int) -> float:
    """The channels of one bound of each full chunk, in tokens."""
    return (kept + t - prompt) // chunk * channels / (2 * 16)


HANDS = {
    "full": FULL,
    "int4": FULL._replace(case=Case(Full(dense_layers=2), IntegerCodec("int4")), row=INT4, width=WIDTH, ahead=True),
    "h2o": Hand(
        Case(H2O(heavy_frac=0.15, recent_frac=0.1, dense_layers=2)),
        read=lambda t, final: BUDGET[final],
        buffer=8,
        kept=lambda final: BUDGET[final] * (4 + 2) + LIMITS,  # which token it is, int32, and its score
        state=(8 + 2) * (4 + 4) + LIMITS,  # a slot for the current token, and one for what is not to be written
    ),
    "quest": Hand(
        Case(Quest(budget=0.4, page_size=3)),
        read=lambda t, final: QUEST_READ[final][t],
        buffer=11,
        index=lambda t, final: t // 3,
        kept=lambda final: 2 * 13 * 16 * 2,  # the bounds of 12 pages, as many as 34 tokens fill, and of padding
        state=2 * 13 * 16 * 4,
        shared=35 * 8,  # pages read with 0 to 34 tokens cached
    ),
    "twilight": Hand(
        Case(Twilight(p=1.0, budget=0.3, candidate_frac=0.4, page_size=3)),
        read=lambda t, final: min(int(0.3 * t), QUEST_READ[final][t]),
        buffer=10,
        index=lambda t, final: t // 3 + QUEST_READ[final][t] * WIDTH / 2,  # Quest's, and the keys of its pages
        kept=lambda final: final * INT4 / 2 + 2 * 13 * 16 * 2,
        state=34 * INT4 / 2 + 2 * 13 * 16 * 4,
        shared=35 * 8,
    ),
    "vattention": Hand(
        Case(VAttention(num_sinks=1, dense_layers=2).with_budget(0.3)),
        read=lambda t, final: int(0.3 * t),
        buffer=10,
        index=lambda t, final: t * WIDTH / 2,
        kept=lambda final: final * INT4 / 2,
        state=34 * INT4 / 2,
    ),
    "pariskv": Hand(
        Case(ParisKV(read_tokens=8, num_sinks=2, recent_frac=0.5, dense_layers=2)),
        read=lambda t, final: 8,
        buffer=8,
        # of all but 2 first and 4 recent tokens a byte for each 8 signs; of half of them 6 bytes and two weights
        index=lambda t, final: ((t - 6) * 2 + -(-(t - 6) // 2) * (6 + 4)) / (2 * 32),
        kept=lambda final: final * (2 + 6 + 4),
        state=34 * (2 + 6 + 4),
        shared=35 * (1 + 8) * 8 + (16 + 8 + 7) * 4,  # by tokens cached, 1 and 8 numbers; signs, levels and boundaries
    ),
    "socket": Hand(
        Case(Socket(read_tokens=6, num_sinks=1, tables=5, planes=3, dense_layers=2)),
        read=lambda t, final: 6,
        buffer=6,
        # 15 bits in two bytes, and the length of the value; the planes, which all heads share
        index=lambda t, final: t * (2 + 2) / (2 * 32) + 15 * 16 / (32 * HEADS),
        kept=lambda final: final * (2 + 2) + 15 * 16 * 2 / (2 * HEADS),  # the sequence's planes, which its layers share
        state=34 * (2 + 2) + 15 * 16 * 4 / (2 * HEADS),
        shared=35 * 8,
    ),
    "rocketkv": Hand(
        Case(RocketKV(budget_tokens=6, window=2, dense_layers=2)),
        read=lambda t, final: 3,
        buffer=3,
        index=lambda t, final: rocketkv_index(t, *ROCKET[final]),
        # the tokens in the slots, int32; the bounds of 21 chunks and one for what is in none; four numbers
        kept=lambda final: (ROCKET[final][1] + 10) * 4 + 2 * 22 * 16 * 2 + 4 * 8 / (2 * HEADS),
        state=(25 + 2) * 4 + 2 * 22 * 16 * 4 + 4 * 8 / (2 * HEADS),
        shared=2 * 2 * 8,  # of both layers and sequences, the tokens that stay beside the window
    ),
    "infinigen": INFINIGEN,
    "infinigen, balanced": BALANCED,
    "infinigen, sampled": BALANCED._replace(
        case=Case(InfiniGen2Sampled(fixed_fetch=6, when="previous_layer", dense_layers=2)),
        # a byte for the value's distance, and the mean value
        index=lambda t, final: (t * (PARTIAL_KEY + 1) / 2 + PAIR / 2 + 8 + 16) / (2 * 16),
        kept=lambda final: final * (PARTIAL_KEY + 1) + PAIR + 8 * 2 + 16 * 2,  # and the mean value
        state=34 * (PARTIAL_KEY + 1) + PAIR + 8 * 4 + 16 * 4,
    ),
    "infinigen+int4": INFINIGEN._replace(
        case=Case(InfiniGen(fixed_fetch=6), IntegerCodec("int4")), row=INT4, width=WIDTH
    ),
}

ROWS = [(t, 34) for t in range(24, 34)] + [(t, 25) for t in range(15, 25)]
"""(t, T) of the decode rows of the batch."""
PADDED = PROMPTS["padded"]

every_hand = pytest.mark.parametrize("name", HANDS)


def test_rows_under_way_for_a_step_that_never_comes_are_in_no_count():
    """A text may end before its session is full."""
    with (
        attached_with_link() as (attached, link),
        closing(open_live(attached, FULL.case, placement="host", link=link)) as session,
    ):
        force(session, (24,), 3)
        traffic = session.traffic
        assert traffic.loaded.num_bytes == 4 * HEADS * EXACT * (24 + 25 + 26)
        assert traffic.written.num_bytes == 4 * HEADS * EXACT * 3


@every_hand
@pytest.mark.parametrize("run", [replay, live])
def test_shares_by_hand(name, run):
    hand, rows = HANDS[name], ROWS
    kv = [(2 + 2 * hand.width * hand.read(t, final) / t) / 4 for t, final in rows]
    index = [2 * hand.index(t, final) / (4 * t) for t, final in rows]
    resident = [2 * HEADS * hand.kept(final) / (4 * HEADS * 2 * 16 * 2 * final) for _, final in rows]
    with attached_with_link() as (attached, _):
        found = run(attached, hand.case, PADDED)
    assert found.budget == pytest.approx(mean(kv), rel=1e-12)
    assert found.device_frac == pytest.approx(mean(kv) + mean(index), rel=1e-12)
    assert found.resident_frac == pytest.approx(mean(resident), rel=1e-12)


@every_hand
@pytest.mark.parametrize("placement", ["host", "device"])
def test_bytes_by_hand(name, placement):
    hand, rows, batch = HANDS[name], ROWS, len(PADDED)
    with (
        attached_with_link() as (attached, link),
        closing(open_live(attached, hand.case, placement=placement, link=link)) as session,
    ):
        force(session, PADDED)
        traffic, read, kept = session.traffic, float(session.reads.num_bytes), session.device_bytes
        crossed, written, late = (int(part.num_bytes) for part in (traffic.loaded, traffic.written, traffic.late))
    selected = [hand.read(t, final) for t, final in rows]
    index = [hand.index(t, final) for t, final in rows]
    cached, own = [t for t, _ in rows], 4 * len(rows)
    assert read == HEADS * (EXACT * (2 * sum(cached) + 2 * sum(index) + own) + hand.row * 2 * sum(selected))

    columns = batch * sum(range(24, 34))  # padding crosses the link, and is not read
    over_link = 2 * columns * EXACT + 2 * hand.row * (sum(selected) if hand.has_state else columns)
    assert crossed == (HEADS * over_link if placement == "host" else 0)
    chosen_late = placement == "host" and hand.case.method.when == "own_query"
    assert late == (HEADS * 2 * hand.row * sum(selected) if chosen_late else 0)
    columns = 0 if name == "h2o" else 10  # H2O writes some of its own rows; the prompt's are not counted
    own_rows = written - HEADS * batch * 2 * (10 * EXACT + columns * hand.row) * (placement == "host")
    most = 2 * HEADS * len(rows) * EXACT if (name, placement) == ("h2o", "host") else 0
    assert bool(most) <= own_rows <= most

    state = batch * (LENGTHS + 2 * HEADS * hand.state) + hand.shared if hand.has_state else 0
    slots = {"h2o": 8, "rocketkv": 25}.get(name, 34)
    stores = batch * HEADS * (2 * 34 * EXACT + 2 * slots * hand.row)
    own_too = 1  # behind the fetched rows of a head
    buffers = 2 * (hand.buffer + own_too) * hand.row + (2 * (34 + own_too) * EXACT if hand.ahead else 0)
    assert kept == state + (stores if placement == "device" else batch * HEADS * buffers)

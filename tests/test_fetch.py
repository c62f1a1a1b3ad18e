"""Which rows are asked for and when: slot arithmetic against plain Python, and buffers under links at their slowest."""

from collections.abc import Callable, Sequence

import pytest
import torch
from cases import CASES
from hypothesis import given
from hypothesis import strategies as st
from living import PROMPTS, STEPS, attached_with_link, force, live, loaded, make_store, open_live
from torch import Tensor

from harness.offload.fetch import Fetcher, indices, missing_rows
from harness.offload.links import EmulatedLink, Link, Ticket, Transfer
from harness.offload.store import Chosen, KVStore, SlotRequest

CPU = torch.device("cpu")


@st.composite
def masks(draw, min_slots=0):
    """bool [batch, heads, slots]: ragged, empty and full heads."""
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    slots = draw(st.integers(min_slots, 9))
    head = st.one_of(
        st.just([False] * slots), st.just([True] * slots), st.lists(st.booleans(), min_size=slots, max_size=slots)
    )
    rows = [draw(head) for _ in range(batch * heads)]
    return torch.tensor(rows, dtype=torch.bool).view(batch, heads, slots)


def selected(head: Tensor) -> list[int]:
    return [slot for slot, wanted in enumerate(head.tolist()) if wanted]


@given(masks(), st.integers(0, 4))
def test_indices_are_the_slots_in_order_and_minus_one_behind(mask, spare):
    cap = int(mask.sum(-1).max()) + spare
    got = indices(mask, cap)
    assert got.dtype == torch.int64 and got.shape == (*mask.shape[:2], cap)
    for head, row in zip(mask.flatten(0, 1), got.flatten(0, 1), strict=True):
        wanted = selected(head)
        assert row.tolist() == wanted + [-1] * (cap - len(wanted))


@given(masks(min_slots=1), st.data())
def test_places_keep_what_is_there_and_fetches_the_rest_into_free_places(mask, data):
    slots = mask.shape[-1]
    most = int(mask.sum(-1).max())
    room = data.draw(st.integers(max(1, most), max(1, most) + 3))
    resident = []
    for _ in range(mask.shape[0] * mask.shape[1]):
        there = data.draw(st.lists(st.integers(0, slots - 1), unique=True, max_size=room))
        resident.append(data.draw(st.permutations(there + [-1] * (room - len(there)))))
    resident = torch.tensor(resident).view(*mask.shape[:2], room)
    before = resident.clone()
    request, after = missing_rows(mask, resident)
    fetch = request.by_target()
    assert request.num_rows == (fetch >= 0).sum()
    assert (request.slots >= 0).int().diff(dim=-1).le(0).all(), "a row to fetch behind none"
    assert torch.equal(resident, before), "what is resident was changed in place"
    for head, old, fetched, new in zip(*(x.flatten(0, 1) for x in (mask, before, fetch, after)), strict=True):
        wanted, old, fetched, new = set(selected(head)), old.tolist(), fetched.tolist(), new.tolist()
        assert sorted(slot for slot in new if slot >= 0) == sorted(wanted)
        for was, asked, now in zip(old, fetched, new, strict=True):
            if was in wanted:
                assert (asked, now) == (-1, was), "a row that was there moved, or is fetched again"
            else:
                assert now == asked


def test_a_kept_row_is_fetched_again_once_its_slot_holds_another_token():
    store = small_store()
    write(store, 0, torch.arange(4.0))
    with EmulatedLink(1e12) as link:
        fetcher = Fetcher(link, reuse=True)
        fetcher.plan({0: store}, 3)
        fetcher.open()
        mask = torch.tensor([[[True, True, False, True]]])
        assert fetched(fetcher, store, mask) == [0.0, 1.0, 3.0]
        fetcher.write_back(0, rows_of(store, torch.tensor([9.0])), torch.tensor([[[1]]]))
        moved = store.h2d_bytes
        assert fetched(fetcher, store, mask) == [0.0, 3.0, 9.0]
        assert store.h2d_bytes - moved == store.slot_bytes
        assert fetched(fetcher, store, mask) == [0.0, 3.0, 9.0]
        assert store.h2d_bytes - moved == store.slot_bytes
        fetcher.write_back(0, rows_of(store, torch.tensor([7.0])), torch.tensor([[[-1]]]))  # evicted at once
        assert fetched(fetcher, store, mask) == [0.0, 3.0, 9.0]
        assert store.h2d_bytes - moved == store.slot_bytes


def small_store(batch: int = 1, heads: int = 1, capacity: int = 4) -> KVStore:
    return make_store(2, batch=batch, num_kv_heads=heads, capacity=capacity)


def rows_of(store: KVStore, values: Tensor) -> Tensor:
    rows = values.view(1, 1, -1, 1).expand(-1, -1, -1, 2)
    return store.format.pack(rows, rows)


def write(store: KVStore, at: int, values: Tensor) -> None:
    store.write(rows_of(store, values), at)


def fetched(fetcher: Fetcher, store: KVStore, mask: Tensor) -> list[float]:
    """First elements of the present rows' values; keys and values must agree, and absent ones be numbers."""
    fetcher.request_selected(0, mask, 3)
    fetcher.wait(0)
    rows, present, bias = fetcher.take(0)
    keys, values = store.format.unpack(rows)
    assert bias is None
    assert torch.equal(keys[present], values[present])
    assert values.isfinite().all()
    return sorted(values[present][:, 0].tolist())


@pytest.mark.parametrize("reuse", [False, True])
def test_a_selection_of_nothing_has_no_row(reuse):
    store = small_store()
    write(store, 0, torch.arange(4.0))
    with EmulatedLink(1e12) as link:
        fetcher = Fetcher(link, reuse)
        fetcher.plan({0: store}, 3)
        fetcher.open()
        assert fetched(fetcher, store, torch.zeros(1, 1, 4, dtype=torch.bool)) == []
        assert store.h2d_bytes == 0


# Links that could not be later, or sooner, than they are


class LatestLink(Link):
    """Moves nothing before it is waited for, and spoils a buffer as soon as it is promised to a transfer.

    A row that is read too early is not a number, and so is one whose buffer was given away too early.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Callable[[], object]] = []

    def prefetch(self, store: KVStore, request: SlotRequest, rows: Tensor) -> Ticket:
        rows[request.by_target() >= 0 if isinstance(request, Chosen) else slice(None)] = 0xFF
        return super().prefetch(store, request, rows)

    def copy(self, source: Tensor, target: Tensor) -> Ticket:
        return super().copy(source, target.fill_(0xFF))

    def start(self, direction: str, move: Callable[[], object], used: Sequence[Tensor]) -> Callable[[], object]:
        self.queue.append(move)
        return move

    def finish(self, started: Callable[[], object]) -> None:
        while started in self.queue:  # what was submitted before comes first
            self.queue.pop(0)()

    @torch.inference_mode()
    def drain(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def take_transfers(self) -> list[Transfer]:
        return []

    def close(self) -> None:
        self.drain()


@pytest.mark.parametrize(
    ("name", "reuse"),
    [
        *((name, False) for name in ("full", "int4", "h2o-heavy", "h2o-fills", "infinigen", "pool-lru")),
        *((name, True) for name in ("infinigen", "infinigen-union", "infinigen+int4", "pool-lru", "pool-tie")),
    ],
)
def test_rows_are_neither_read_too_early_nor_overwritten_too_early(name, reuse):
    prompts = PROMPTS["padded"]
    with attached_with_link() as (attached, link):
        expected = live(attached, CASES[name], prompts, placement="host", link=link, reuse=reuse)
        late = live(attached, CASES[name], prompts, placement="host", link=LatestLink(), reuse=reuse)
    assert torch.equal(late.logits, expected.logits)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["full", "h2o", "infinigen", "pool-lru"])
def test_a_slow_link_gives_the_same_logits(name, overlap):
    prompts = PROMPTS["padded"]
    with attached_with_link() as (attached, fast), EmulatedLink(2e7, overlap=overlap) as slow:
        expected = live(attached, CASES[name], prompts, placement="host", link=fast)
        assert torch.equal(live(attached, CASES[name], prompts, placement="host", link=slow).logits, expected.logits)


def test_at_most_two_layers_share_the_buffers_that_take_turns():
    """The one computing and the next: more would need more buffers. Exempt layers ahead have their own."""
    most = 0
    original = Fetcher._request

    def counting(fetcher, *arguments, **options):
        nonlocal most
        original(fetcher, *arguments, **options)
        most = max(most, sum(layer not in fetcher.ahead for layer in fetcher._pending))

    with attached_with_link() as (attached, link), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fetcher, "_request", counting)
        for name in ("full", "infinigen", "h2o-heavy"):
            session = open_live(attached, CASES[name], placement="host", link=link)
            force(session, PROMPTS["even"])
            assert session.steps == STEPS
            session.close()
    assert most == 2


@given(st.integers(1, 3), st.integers(1, 7), st.integers(0, 2), st.integers(1, 9))
def test_parts_ahead_are_every_row_once(layers, count, spare, parts):
    stores = [small_store(batch=2, heads=3, capacity=count + spare) for _ in range(layers + 1)]
    for number, store in enumerate(stores):
        store.slots.view(torch.float32).copy_(torch.arange(store.slots.numel() // 4).view(*store.slots.shape[:3], -1))
        store.slots.view(torch.float32).add_(1000 * number)
    with EmulatedLink(1e12) as link:
        fetcher = Fetcher(link, reuse=False)
        fetcher.plan(dict(enumerate(stores)), 1, num_ahead=layers)
        fetcher.open()
        for part in range(parts):
            fetcher.request_ahead(count, part, parts)
        for layer in range(layers):
            got, moved = fetcher.take(layer), stores[layer].h2d_bytes
            assert got.present is None and moved == 2 * 3 * count * stores[layer].slot_bytes
            expected = loaded(stores[layer], count)
            keys, values = stores[layer].format.unpack(got.rows)
            assert torch.equal(keys, expected.keys) and torch.equal(values, expected.values)
        assert not fetcher.is_pending(layers)


def test_the_parts_ahead_are_spread_over_the_layers_that_read_less():
    """No layer of a step asks for more of them than its share, rounded up: what one layer's work can hide."""
    shares = []
    original = Fetcher._prefetch

    def noting(fetcher, layer, request, rows):
        if isinstance(request, slice) and request.stop - request.start < fetcher._pending[layer].request:
            shares.append(request.stop - request.start)
        original(fetcher, layer, request, rows)

    with attached_with_link() as (attached, link), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fetcher, "_prefetch", noting)
        session = open_live(attached, CASES["infinigen-union"], placement="host", link=link)
        force(session, PROMPTS["even"])
        layers, ahead = attached.geometry.num_layers, len(next(iter(session.stages.values())).fetcher.ahead)
        columns = ahead * session.batch.columns
        assert shares and max(shares) <= -(-columns // (layers - ahead))
        session.close()

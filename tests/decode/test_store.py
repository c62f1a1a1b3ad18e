"""Slots, buffers and what moves between them, against plain Python: row kernels, copies, fetches."""

from itertools import count, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.decode import store as rows_module
from harness.decode.gpu_cache import GpuCache, rooms
from harness.decode.links import EmulatedLink
from harness.decode.store import chosen
from harness.model.policies import policies_of
from methods.infinigen import InfiniGen
from tests.cases import CASES
from tests.fake_cuda import fake_runtime
from tests.living import CPU, PROMPTS, LatestLink, attached_with_link, live, make_store

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_no_row_of_the_next_head_is_read_or_written():
    store = make_store(8, batch=2, num_kv_heads=3, capacity=12)
    rows = torch.zeros(2, 3, 13, store.slot_bytes, dtype=torch.uint8)
    beyond = chosen(torch.tensor([[[12], [0], [0]]] * 2))
    for refused, error, message in (
        (lambda: store.write(rows[:, :, :2], at=11), ValueError, "column 13 is beyond the capacity of 12"),
        (lambda: store.load(13, rows), ValueError, "column 13 is beyond the capacity of 12"),
        (lambda: store.load(beyond, rows[:, :, :1]), IndexError, "slot index 12 is beyond the capacity of 12"),
        (lambda: store.write(rows[:, :, :1], beyond), IndexError, "slot index 12 is beyond the capacity of 12"),
    ):
        with pytest.raises(error, match=message):
            refused()


# Rows by index, on the CPU and as the Triton kernel, against a loop


def backend(name):
    if name == "cpu":
        return rows_module, CPU
    pytest.importorskip("triton")
    from harness.decode.kernels import rows as kernels

    return kernels, DEVICE


shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(0, 40))


@pytest.mark.parametrize("name", ["cpu", "triton"])
@settings(max_examples=25)
@given(
    shape=shapes,
    slot_bytes=st.sampled_from([4, 8, 20, 32, 72, 136, 256]),
    ragged=st.booleans(),
    placed=st.booleans(),
    spare=st.integers(0, 2),
    programs=st.sampled_from([1, 2, 9]),
    tile_bytes=st.sampled_from([64, 512, 2**12]),
    seed=st.integers(0, 2**31),
)
def test_gather_and_scatter_against_a_loop(name, shape, slot_bytes, ragged, placed, spare, programs, tile_bytes, seed):
    module, device = backend(name)
    generator = torch.Generator().manual_seed(seed)
    batch, heads, capacity, num_rows = shape
    num_rows = min(num_rows, capacity)  # scatter needs distinct slots
    slots, rows = (
        torch.randint(256, (batch, heads, each, slot_bytes), dtype=torch.uint8, generator=generator)
        for each in (capacity, num_rows)
    )
    slots = slots.pin_memory() if DEVICE.type == "cuda" else slots
    index = torch.rand(batch, heads, capacity, generator=generator).argsort(-1)[..., :num_rows]
    if ragged:
        counts = torch.randint(0, num_rows + 1, (batch, heads, 1), generator=generator)
        index = index.masked_fill(torch.arange(num_rows) >= counts, -1)
    targets = torch.rand(index.shape, generator=generator).argsort(-1) if placed else None
    gathered, scattered = rows.clone(), slots.clone()
    for b, h, row in (index >= 0).nonzero().tolist():
        gathered[b, h, row if targets is None else targets[b, h, row]] = slots[b, h, index[b, h, row]]
        scattered[b, h, index[b, h, row]] = rows[b, h, row]

    buffer = torch.nn.functional.pad(rows, (0, 0, 0, spare), value=7).to(device)
    places = None if targets is None else targets.to(device)
    with pytest.MonkeyPatch.context() as patch:
        if name == "triton":
            patch.setattr(module, "NUM_PROGRAMS", programs)
            patch.setattr(module, "TILE_BYTES", tile_bytes)
        module.gather_rows(slots, index.to(device), buffer[:, :, :num_rows], places)
        assert torch.equal(buffer[:, :, :num_rows].cpu(), gathered)
        assert (buffer[:, :, num_rows:] == 7).all(), "what lies behind a head's rows has changed"
        module.scatter_rows(slots, index.to(device), rows.to(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(slots, scattered)


# Columns of every head as one strided copy, against a loop

STREAM, TO_HOST = 1234, 2


def random_bytes(*shape):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def test_columns_cross_by_one_copy_that_is_a_loop_over_their_rows():
    """Into the rows of a buffer with room for one more behind each head's, and back."""
    slots, rows = random_bytes(2, 2, 7, 8), random_bytes(2, 2, 4, 8)
    written = torch.zeros_like(slots)
    expected = rows.clone()
    for batch, head, row in product(range(2), range(2), range(3)):
        expected[batch, head, row] = slots[batch, head, 2 + row]
    with fake_runtime() as runtime:
        for source, target in ((slots[:, :, 2:5], rows[:, :, :3]), (rows[:, :, :3], written[:, :, 2:5])):
            rows_module._memcpy_2d(*(each.flatten(2).flatten(0, 1) for each in (source, target)))
        (_, _, pitch, _, slots_pitch, *size, _, stream), (*_, kind, _) = runtime.calls
        assert (pitch, slots_pitch, *size, stream, kind) == (3 * 8 + 8, 7 * 8, 3 * 8, 4, STREAM, TO_HOST)
        runtime.fails = "cudaMemcpy2DAsync"
        with pytest.raises(RuntimeError, match="^cudaMemcpy2DAsync: out of memory$"):
            rows_module._memcpy_2d(lines := random_bytes(3, 4), lines.clone())
    assert torch.equal(rows, expected)
    assert torch.equal(written[:, :, 2:5], slots[:, :, 2:5]) and written.sum() == rows[:, :, :3].sum()


# Rows that stay on the device


@given(st.data())
def test_rows_leave_by_least_recent_use(data):
    """Against lists of tokens in the order of their use, each sequence with room of its own."""
    slots, steps = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))
    rooms = data.draw(st.lists(st.integers(1, slots), min_size=1, max_size=2))
    gpu_cache, recent = GpuCache(rooms, 2, torch.device("cpu")), [[[], []] for _ in rooms]
    for step in range(steps):
        choices = [st.sets(st.integers(0, slots - 1), max_size=room) for room in rooms for _ in range(2)]
        wanted = [data.draw(each) for each in choices]
        mask = torch.zeros(len(rooms), 2, slots, dtype=torch.bool)
        expected = []
        for number, asked in enumerate(wanted):
            sequence, head = divmod(number, 2)
            mask[sequence, head, sorted(asked)] = True
            there = recent[sequence][head]
            expected.append(len(asked - {*there}))
            there[:] = ([slot for slot in there if slot not in asked] + sorted(asked))[-rooms[sequence] :]
        most = max(1, *map(len, wanted))
        tokens = torch.arange(slots).expand(len(rooms), 1, -1).int()
        fetch, present = gpu_cache.request(mask, tokens, torch.tensor([slots + step]), most)
        assert (fetch.slots >= 0).sum(-1).flatten().tolist() == expected
        for number, kept in enumerate(gpu_cache.slots.flatten(0, 1).tolist()):
            sequence, head = divmod(number, 2)
            there = recent[sequence][head]
            assert sorted(slot for slot in kept if slot >= 0) == sorted(slot for slot in there if slot is not None)
        assert present.sum(-1).flatten().tolist() == [*map(len, wanted)]
        if data.draw(st.booleans()):  # a slot is written anew
            written = data.draw(st.integers(0, slots - 1))
            gpu_cache.forget(torch.full((len(rooms), 2, 1), written))
            for there in (head for sequence in recent for head in sequence):
                there[:] = [None if slot == written else slot for slot in there]  # its row leaves in its turn


def test_room_is_rounded_up_and_never_more_than_the_sequence():
    """The method reads 5 tokens at most."""
    method = InfiniGen(fixed_fetch=5)
    with attached_with_link() as (attached, _):
        policies = policies_of(attached, method)
    assert rooms(method, policies, 1.5, [(20, 30), (3, 6)]) == [8, 6]
    assert rooms(method, policies, 0, [(20, 30)]) is None


def test_a_fork_keeps_the_rows_and_ages_of_its_own_sequences():
    def ask(rows: GpuCache, *slots: int) -> list[bool]:
        """Whether each sequence's slot must be fetched."""
        mask = torch.zeros(len(slots), 1, 4, dtype=torch.bool)
        mask[range(len(slots)), 0, slots] = True
        tokens = torch.arange(4).expand(len(slots), 1, -1).int()
        fetch, _ = rows.request(mask, tokens, torch.tensor([next(columns)]), 1)
        return (fetch.slots >= 0).flatten().tolist()

    columns, trunk = count(4), GpuCache([2, 2], 1, torch.device("cpu"))
    for slots in ((0, 0), (1, 1), (1, 0)):  # slot 0 is the older one in the first sequence, slot 1 in the second
        ask(trunk, *slots)
    child = trunk.fork(torch.tensor([1, 0]))
    assert ask(child, 2, 2) == [True, True]
    assert ask(child, 0, 1) == [False, False], "the younger one stays"
    assert ask(trunk, 0, 1) == [False, False], "the trunk is as it was"


# Fetches


@pytest.mark.parametrize(
    ("name", "gpu_cache"),
    [("int4", 0), ("h2o-fills", 0), ("infinigen", 0), ("infinigen-union", 1), ("pool-lru", 2)],
)
def test_rows_are_neither_read_too_early_nor_overwritten_too_early(name, gpu_cache):
    """Under a link at its latest, one without overlap, and one that is slow."""
    prompts = PROMPTS["padded"]
    with attached_with_link() as (attached, link), EmulatedLink(2e7, overlap=bool(gpu_cache)) as slow:
        expected = live(attached, CASES[name], prompts, placement="host", link=link, gpu_cache=gpu_cache)
        for other in (LatestLink(), slow):
            got = live(attached, CASES[name], prompts, placement="host", link=other, gpu_cache=gpu_cache)
            assert torch.equal(got.logits, expected.logits)

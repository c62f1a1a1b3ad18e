"""What goes wrong inside a live decode ends it at once; what is closed leaves nothing behind."""

import gc
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from harness.decode.links import EmulatedLink
from harness.decode.session import generate
from harness.decode.store import KVStore
from harness.model.attach import attach
from tests.cases import CASES
from tests.living import PROMPT, PROMPTS, STEPS, attached_with_link, endless, force, live, open_live, tiny, token_batch

EVEN = PROMPTS["even"]


@pytest.fixture(autouse=True)
def no_link_is_left():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-link")]


class CopyError(Exception):
    pass


@pytest.mark.parametrize(
    ("after", "name", "direction", "overlap"),
    [
        (0, "full", "write", True),
        (0, "infinigen", "write", False),
        (0, "full", "load", False),
        (25, "full", "write", False),
        (25, "infinigen", "write", True),
        (25, "infinigen", "load", True),
    ],
)
def test_a_copy_that_fails_ends_the_decode_with_its_error(after, name, direction, overlap, monkeypatch):
    """In the prompt (writes only), and later."""
    calls = 0
    original = getattr(KVStore, direction)

    def failing(store, *arguments):
        nonlocal calls
        calls += 1
        if calls > after:
            raise CopyError
        return original(store, *arguments)

    monkeypatch.setattr(KVStore, direction, failing)
    with attach(tiny("gqa")) as attached, EmulatedLink(1e12, overlap=overlap) as link:
        session = open_live(attached, CASES[name], placement="host", link=link)
        with pytest.raises(CopyError):
            force(session, EVEN)
        if overlap:  # the worker died with it: whatever follows says so too
            with pytest.raises(CopyError):
                session.close()
            with pytest.raises(CopyError):
                live(attached, CASES[name], EVEN, placement="host", link=link)
        assert not any(store.slots.nbytes for store in session.stores) or not overlap


@pytest.mark.parametrize("name", ["full", "infinigen", "pool-lru"])
def test_closing_in_the_middle_leaves_the_link_usable(name):
    with attached_with_link(bytes_per_s=2e7) as (attached, link):
        expected = live(attached, CASES[name], EVEN, placement="host", link=link).logits
        session = open_live(attached, CASES[name], placement="host", link=link)
        ids, real = token_batch(EVEN)
        logits = session.prefill(ids[:, :PROMPT], real[:, :PROMPT])
        steps = generate(session, logits, [endless(prompt, STEPS) for prompt in ids[:, :PROMPT].tolist()])
        for _ in range(3):
            next(steps)
        session.close()  # the next step's first layer is under way
        assert not any(store.slots.nbytes for store in session.stores)
        assert not session.share.buffers
        session.close()
        assert torch.equal(live(attached, CASES[name], EVEN, placement="host", link=link).logits, expected)


# No leak


def tensor_bytes() -> int:
    gc.collect()
    storages = {
        storage.data_ptr(): storage.nbytes()
        for thing in gc.get_objects()
        if isinstance(thing, torch.Tensor) and not isinstance(thing, FakeTensor)  # another test's, without memory
        for storage in [thing.untyped_storage()]
    }
    return sum(storages.values())


def test_a_long_decode_keeps_nothing_but_its_cache():
    """What a step needs goes with the step: packed rows, indices, tickets."""
    gc.collect()
    gc.freeze()  # of earlier tests there are so many objects that going through them takes seconds
    steps = 60
    with attached_with_link() as (attached, link):
        ids, real = token_batch(EVEN, steps)
        for name, gpu_cache in (("full", 0), ("infinigen", 1), ("h2o", 0)):
            session = open_live(attached, CASES[name], steps, placement="host", link=link, gpu_cache=gpu_cache)
            session.prefill(ids[:, :PROMPT], real[:, :PROMPT])
            sizes = []
            for step in range(steps):
                session.decode_step(ids[:, PROMPT + step])
                session.drain()
                if step in (5, steps - 2):
                    sizes.append(tensor_bytes())
            session.close()
            assert sizes[1] - sizes[0] < 4096, name

"""Weights partly in host memory: same logits, bytes and their time, what stays where, a model made whole."""

import time
from copy import deepcopy

import pytest
import torch

from harness.decode.links import EmulatedLink, open_link
from harness.decode.timeline import Timeline
from harness.decode.weights import StreamedWeights, streamed_weights
from harness.errors import UserError
from harness.model.attach import attach
from tests.cases import CASES
from tests.fake_cuda import fake_runtime
from tests.living import FAMILIES, PROMPTS, STEPS, LatestLink, live, tiny
from tests.tiny_models import tiny_model

FAST = 1e12  # bytes/s: costs nothing
PADDED = PROMPTS["padded"]
MATRIX = 64 * 64 * 4
"""Bytes of a square matrix of the tiny models."""


@pytest.fixture(scope="module")
def attached():
    """The grouped-query model."""
    with attach(tiny("gqa")) as attached:
        yield attached


@pytest.fixture
def link():
    with EmulatedLink(FAST) as link:
        yield link


@pytest.fixture(autouse=True)
def every_model_is_whole_again():
    """Whatever happens: the parameters have their values and memory of their own, and no hook is left."""
    models = {family: tiny(family) for family in FAMILIES}
    before = {family: deepcopy(model.state_dict()) for family, model in models.items()}
    yield
    for family, model in models.items():
        for name, each in model.state_dict().items():
            assert torch.equal(each, before[family][name]), (family, name)
            assert each.untyped_storage().nbytes() == each.nbytes, (family, name)
            assert not each.is_inference(), (family, name)
        assert not any(layer._forward_pre_hooks for layer in model.get_decoder().layers)


# The same model


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("gqa", name) for name in ("full", "int4")), *((family, "infinigen") for family in FAMILIES)],
)
def test_logits_are_those_of_the_whole_model(family, name, link):
    with attach(tiny(family)) as attached:
        expected = live(attached, CASES[name], PADDED, placement="host", link=link).logits
        for share in (0.9, 0.5):
            with streamed_weights(attached, link, share) as weights:
                got = live(attached, CASES[name], PADDED, placement="host", link=link).logits
            assert weights.num_bytes == (1 + STEPS) * weights.host_bytes > 0
            assert torch.equal(got, expected), share


@pytest.mark.parametrize("name", ["full", "infinigen"])
def test_weights_are_neither_read_too_early_nor_overwritten_too_early(attached, name):
    link = LatestLink()
    with streamed_weights(attached, link, 0.5):
        late = live(attached, CASES[name], PADDED, placement="host", link=link).logits
    assert torch.equal(late, live(attached, CASES[name], PADDED).logits)


# What stays, and what crosses


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox"])
def test_the_share_is_met_within_a_matrix(family, link):
    with attach(tiny(family)) as attached:
        whole = sum(each.nbytes for layer in attached.decoder.blocks for each in layer.parameters())
        for share in (0.95, 0.6, 0.42):
            with streamed_weights(attached, link, share) as weights:
                assert share - 1e-9 <= weights.on_device < share + 2 * MATRIX / whole
                assert weights.host_bytes == round((1 - weights.on_device) * whole)


@pytest.mark.parametrize(("family", "least"), [("llama", 0.11), ("opt", 0.15), ("phi3", 0.23), ("gpt_neox", 0.39)])
def test_what_a_prediction_reads_must_stay(family, least, link):
    with attach(tiny(family)) as attached:
        message = rf"platform.weights_on_device=0.05: must be at least {least:.2f} for this {family} model"
        with pytest.raises(UserError, match=message), streamed_weights(attached, link, 0.05):
            pass
        with streamed_weights(attached, link, least) as weights:
            assert weights.on_device == pytest.approx(least, abs=0.03)


def test_pinned_weights_are_one_slab_as_large_as_they_are(attached, link):
    expected = live(attached, CASES["full"], PADDED).logits
    weights = StreamedWeights(attached, link, 0.5, Timeline(attached.device), pinned=True)
    assert not weights.pinned, "there is nothing to lock on a CPU"
    weights.pinned = True
    with fake_runtime() as runtime:
        weights.open()
        assert list(runtime.locked.values()) == [weights.host_bytes]
        assert torch.equal(live(attached, CASES["full"], PADDED).logits, expected)
        weights.close()
        assert not runtime.locked


# Time


def test_a_segment_within_another_gives_the_time_back():
    timeline = Timeline(torch.device("cpu"))
    with timeline.within("transfer"):
        pass  # outside a step nothing is marked
    timeline.begin_step()
    timeline.switch("ffn")
    with timeline.within("transfer"):
        time.sleep(0.02)
    time.sleep(0.01)
    (step,) = timeline.take()
    assert step["transfer"] >= 0.02 and step["ffn"] >= 0.01 and step["other"] < 0.01


# Made whole again, whatever happens: the fixture looks


def test_an_error_in_a_pass_leaves_the_model_whole_and_the_next_pass_right(attached, link):
    case, layer = CASES["full"], attached.decoder.blocks[2]
    expected = live(attached, case, PADDED).logits

    def fail(*_):
        raise RuntimeError("in layer 2")

    with pytest.raises(KeyboardInterrupt), streamed_weights(attached, link, 0.5):
        hook = layer.mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in layer 2"):
            live(attached, case, PADDED)
        hook.remove()
        assert torch.equal(live(attached, case, PADDED).logits, expected)
        raise KeyboardInterrupt


# On a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("overlap", "pinned"), [(True, True), (False, True), (False, False)])
def test_a_gpu_computes_the_same_and_holds_less(overlap, pinned):
    shape = {"hidden_size": 1024, "intermediate_size": 4096}  # 58 MiB a layer: allocations are rounded up
    model = tiny_model("llama", num_key_value_heads=2, **shape).cuda()
    with attach(model) as attached, open_link(attached.device, overlap=overlap) as link:
        expected = live(attached, CASES["full"], PADDED, placement="host", link=link).logits
        before = torch.cuda.memory_allocated()
        with streamed_weights(attached, link, 0.5, pinned=pinned) as weights:
            away = weights.host_bytes - weights.device_bytes
            assert torch.cuda.memory_allocated() <= before - 0.95 * away < before
            got = live(attached, CASES["full"], PADDED, placement="host", link=link).logits
        again = live(attached, CASES["full"], PADDED, placement="host", link=link).logits
        assert torch.equal(got, expected) and torch.equal(again, expected)

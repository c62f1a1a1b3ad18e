"""The memory of a session and the largest batch, known by arithmetic, against sessions that are opened and loops."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.decode.needs import Plan, largest_batch, sizes_of
from harness.decode.share import BatchLengths
from harness.decode.state_sizes import state_sizes
from harness.errors import UserError
from harness.model.prompts import prompt_bytes
from methods.base import Geometry
from methods.full import Full
from methods.quest import Quest
from tests.cases import CASES, Case, shipped
from tests.living import PROMPT, attached_with_link, calibration_of, open_live

ALL_AT_ONCE = 10**9
"""More prompt tokens than any batch here has: one pass, as in a session that runs its prompt itself."""
BATCHES = {"padded": (PROMPT, 15), "three": (PROMPT,) * 3}
NAMES = (
    "full", "h2o", "int4", "infinigen", "infinigen2", "quest", "retroinfer", "shadowkv", "kivi", "streaming", "rkv",
    "snapkv", "pool-lru", "shadowkv+smooth", "infinigen+int4", "sparq", "knorm", "criticalkv", "defensivekv", "capkv",
    "layers", "layers-residual", "infinigen+layers", "infinigen2-sampled",
)  # fmt: skip


def case_of(name: str) -> Case:
    return CASES[name] if name in CASES else shipped(name)


def prompts_of(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Ids and mask of left-padded prompts."""
    real = torch.zeros(len(lengths), max(lengths), dtype=torch.bool)
    for sequence, length in enumerate(lengths):
        real[sequence, -length:] = True
    return torch.arange(real.numel()).view(real.shape) % 250 + 3, real


PLACED = [
    *((name, placement, 0) for name in NAMES for placement in ("device", "host")),
    *((name, "host", 2) for name in ("infinigen", "infinigen2", "quest", "shadowkv", "pool-lru", "infinigen+layers")),
]
"""Name, placement and rows that stay on the device. Batches alternate by name, the other way on the host."""


@pytest.mark.parametrize(
    ("name", "placement", "gpu_cache", "batch"),
    [(*placed, list(BATCHES)[(NAMES.index(placed[0]) + (placed[1] == "host")) % 2]) for placed in PLACED],
)
def test_the_bytes_of_a_session_are_known_before_it_is_opened(name, placement, gpu_cache, batch):
    case, prompts = case_of(name), BATCHES[batch]
    options = {"placement": placement, "gpu_cache": gpu_cache}
    with attached_with_link() as (attached, link):
        with closing(open_live(attached, case, 3, link=link, **options)) as session:
            session.prefill(*prompts_of(prompts))
            made, asked = session.device_bytes, session.bytes_needed
            activations = prompt_bytes(attached, len(prompts) * max(prompts))
            method, lengths = session.method, BatchLengths(prompts, session.max_new_tokens)
        plan = Plan(sizes_of(attached, method), method, case.codec, calibration=calibration_of(attached), **options)
        needs = plan.needs(lengths, ALL_AT_ONCE)
    assert needs.session == made
    assert (needs.host, needs.asked + activations) == (asked.host, asked.device)
    assert needs.workspace == activations
    assert needs.weights == sum(weight.nbytes for weight in attached.model.parameters())


def test_bytes_by_hand():
    """Full and int4 on 4 layers of 2 KV heads of 16 elements in fp32: 2 sequences of 24 + 8 tokens."""
    with attached_with_link() as (attached, _):
        lengths = BatchLengths((24, 24), 8)
        sizes = sizes_of(attached, Full())
        on_device = Plan(sizes, Full(), None, "device").needs(lengths)
        row = 2 * 16 * 4  # key and value
        assert on_device.session == on_device.asked == 4 * 2 * 2 * 32 * row
        on_host = Plan(sizes, Full(), None, "host").needs(lengths)
        assert on_host.host == on_device.session
        assert on_host.session == 2 * (2 * 2 * (32 + 1) * row)  # two buffers, with the own row
        # 16 bytes of codes and, a group being the 16 elements, fp16 scale and minimum, for key and value; two layers
        # are dense, and each has a buffer of its own under a link.
        quantized = case_of("int4")
        coded = 2 * (16 // 2 + 4)
        slots = 2 * (2 * 2 * 32 * row) + 2 * (2 * 2 * 32 * coded)
        method = replace(quantized.method, dense_layers=2)
        sizes = sizes_of(attached, method)
        plan = Plan(sizes, method, quantized.codec, "device")
        assert plan.needs(lengths).session == slots
        plan = Plan(sizes, method, quantized.codec, "host")
        assert plan.needs(lengths).session == 2 * (2 * 2 * 33 * row) + 2 * (2 * 2 * 33 * coded)


def test_a_state_whose_size_depends_on_the_text_is_refused():
    """Its own numbers decide how large a tensor is."""

    class State(Quest.state):
        def prompt(self, layer, query, key, value, rows):
            super().prompt(layer, query, key, value, rows)
            self.some = {layer: key[:, :, : int(key.abs().sum() > 0)]}

    class Reading(Quest):
        state = State

    with attached_with_link() as (attached, _):
        method = Reading(budget=0.4, page_size=3)
        plan = Plan(sizes_of(attached, method), method, None, "device")
        with pytest.raises(UserError, match=r"^method Quest: what it keeps depends on the text") as refusal:
            plan.needs(BatchLengths((PROMPT,), 8))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["full", "h2o", "infinigen2", "kivi"])
@pytest.mark.parametrize("placement", ["device", "host"])
def test_the_largest_batch_is_the_last_that_fits(name, placement):
    """A plain loop over batches, with a limit that about nine sequences meet."""
    case = case_of(name)
    with attached_with_link() as (attached, _):
        model = sizes_of(attached, case.method)
        plan = Plan(model, case.method, case.codec, placement, calibration=calibration_of(attached))

        def needed(batch: int) -> int:
            return plan.needs(BatchLengths((PROMPT,) * batch, 8)).device

        limit = needed(9) + 1
        found = largest_batch(lambda batch: needed(batch) <= limit, 40)
        by_loop = 0
        while by_loop < 40 and needed(by_loop + 1) <= limit:
            by_loop += 1
        assert found == by_loop >= 9
        growing = [needed(batch) for batch in range(1, 20)]
        assert growing == sorted(growing)


SHAPES = {
    # layers, query heads, KV heads, head_dim; bytes of a partial key, and of the projections and the keys' mean; shares
    "smollm2-135m": ((30, 9, 3, 64), 32 // 2 + 4, 2 * 64 * (32 // 2 + 4) + 32 * 2, {1024: 0.0881, 4096: 0.0806}),
    "qwen2.5-coder-1.5b": (
        (28, 12, 2, 128),
        64 // 2 + 4,
        2 * 128 * (64 // 2 + 4) + 64 * 2,
        {1024: 0.0881, 4096: 0.0748},
    ),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [1024, 4096])
def test_what_infinigen2_keeps_by_hand(name, tokens):
    """Of each token a partial key, and of each sequence two projections, in 4 bits with scales of two bytes; in half
    precision. No calibration stays."""
    (num_layers, num_heads, num_kv_heads, head_dim), of_token, of_sequence, shares = SHAPES[name]
    method, heads = shipped("infinigen2").method, num_layers * num_kv_heads
    geometry = Geometry(num_layers, num_heads, num_kv_heads, head_dim, head_dim**-0.5, "llama")
    kept = {}
    for batch in (1, 2):
        prompts = (tokens - 16,) * batch
        sizes = state_sizes(method, geometry, prompts, 16, torch.bfloat16, lambda number: tokens)
        assert sum(sizes.by_layer.values()) == batch * heads * (tokens * of_token + of_sequence)
        kept[batch] = sizes.whole
    assert kept[1] == heads * (tokens * of_token + of_sequence) + 2 * 8, "beside its prompt's length and T"
    assert kept[2] == 2 * kept[1]
    assert kept[1] / (heads * tokens * 2 * head_dim * 2) == pytest.approx(shares[tokens], abs=5e-5)

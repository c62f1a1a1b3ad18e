"""The memory of a session and the largest batch, known by arithmetic, against sessions that are opened and loops."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.decode.needs import LayerSizes, ModelSizes, Plan, sizes_of
from harness.decode.share import BatchLengths
from harness.model.policies import method_policy
from harness.model.prompts import PassSizes, prompt_bytes
from methods.attention import Softmax
from methods.base import Geometry
from methods.quest import Quest
from tests.cases import CASES, Case, shipped
from tests.conftest import refused
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
            made, asked = session.device_bytes, session.needs
            activations = prompt_bytes(attached, len(prompts) * max(prompts))
            method, lengths = session.method, BatchLengths(prompts, session.max_new_tokens)
        plan = Plan(sizes_of(attached, method), method, case.codec, calibration=calibration_of(attached), **options)
        needs = plan.needs(lengths, ALL_AT_ONCE)
    assert needs.session == made
    assert needs._replace(state=0) == asked
    assert needs.workspace == activations
    assert needs.weights == sum(weight.nbytes for weight in attached.model.parameters())


def test_a_state_whose_size_depends_on_the_text_is_refused():
    """Its own numbers decide how large a tensor is."""

    class State(Quest.state):
        def prompt(self, layer, query, key, value, rows):
            super().prompt(layer, query, key, value, rows)
            self.some = {layer: key[:, :, : int(key.abs().sum() > 0)]}

    class Reading(Quest):
        state = State

    method = Reading(budget=0.4, page_size=3)
    with attached_with_link() as (attached, _), refused("^method Quest: what it keeps depends on the text"):
        Plan(sizes_of(attached, method), method, None, "device").needs(BatchLengths((PROMPT,), 8))


def plan_of(method, geometry: Geometry, dtype: torch.dtype) -> Plan:
    """A session on the device of a model of this geometry whose passes and weights take nothing."""
    layers = []
    for number in range(geometry.num_layers):
        policy = method_policy(method, number, Softmax(geometry.scale), is_first=number == 0)
        layers.append(LayerSizes(policy, geometry.num_kv_heads, geometry.head_dim, geometry.head_dim))
    return Plan(ModelSizes(layers, geometry, dtype, PassSizes(0, 0, 0, 0, None), 0), method, None, "device")


def test_what_a_step_reads_of_an_index_by_hand():
    """In each of two KV heads, at 1,016 cached tokens. The linear rest reads its coded keys twice, and once its slopes
    (64 x 128, in 4 bits), intercepts and mean key; Quest two bounds of each of 63 full pages; what evicts has no index.
    vAttention's sample looks at numbers, so all that it keeps counts."""
    geometry = Geometry(2, 12, 2, 128, 128**-0.5, "llama")

    def sizes_of_method(name, **settings):
        method = replace(shipped(name).method, dense_layers=0, **settings)
        return plan_of(method, geometry, torch.float16).state(BatchLengths((1008,), 16))

    keys, projections, mean = 1016 * (64 // 2 + 4), 2 * 128 * (64 // 2 + 4), 64 * 2
    fit = 64 * (128 // 2 + 4) + 2 * (128 + 128)
    once = 2 * (keys + projections + mean)
    assert sizes_of_method("infinigen2").read == {0: once, 1: once}
    assert sizes_of_method("infinigen2-linear").read[1] == 2 * (2 * keys + projections + mean + fit)
    quest = sizes_of_method("quest")
    assert set(quest.read.values()) == {2 * 63 * 2 * 128 * 2}
    assert set(sizes_of_method("h2o").read.values()) == {0}
    assert sizes_of_method("kascade", anchors=(0,)).read == {0: 0, 1: 0}, "layer 1 takes what layer 0 chose"
    sampled = sizes_of_method("vattention")
    assert sum(sampled.read.values()) == sampled.kept

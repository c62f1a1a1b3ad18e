"""What a session says it needs, against what it makes: slots and buffers to the byte, a prompt's pass from above."""

from contextlib import closing
from itertools import product

import pytest
import torch
from cases import CASES
from conftest import HALF_ROTARY
from held import Held
from living import PROMPT, PROMPTS, attached_with_link, force, open_live, tiny, token_batch

from harness.errors import UserError
from harness.model.attach import attach
from harness.model.prompt import prompt_bytes, run_prompt
from harness.model.tiny import tiny_model
from harness.offload import memory
from harness.offload.cache import LayerCache
from harness.offload.memory import (
    LayerSlots,
    SessionBytes,
    aligned,
    layer_bytes,
    require_session,
    session_bytes,
)
from harness.speed import latency as run

GIB = 2**30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")

HOST = [
    (name, reuse)
    for (name, case), reuse in product(CASES.items(), (False, True))
    if case.method.when != "true_scores" and (case.method.names_rows or not reuse)
]


@pytest.mark.parametrize(("name", "reuse"), HOST)
def test_a_session_on_the_host_needs_its_slots_there_and_its_buffers_on_the_device(name, reuse):
    prompts = PROMPTS["padded"]
    with attached_with_link() as (attached, link):
        options = {"placement": "host", "link": link, "reuse": reuse}
        with closing(open_live(attached, CASES[name], **options)) as session:
            force(session, prompts)
            activations = prompt_bytes(attached, len(prompts) * PROMPT)
            slots = sum(aligned(store.nbytes) for store in session.stores)
            needed = session.fetcher.device_bytes + activations + state_bytes(session)
            assert session.bytes_needed == SessionBytes(slots, needed)


@pytest.mark.parametrize("name", ["full", "int4", "h2o", "infinigen", "oracle"])
def test_a_session_on_the_device_needs_its_slots_there(name):
    with attached_with_link() as (attached, _), closing(open_live(attached, CASES[name])) as session:
        force(session, PROMPTS["even"])
        slots = sum(aligned(store.nbytes) for store in session.stores)
        assert session.bytes_needed == SessionBytes(0, slots + prompt_bytes(attached, PROMPT) + state_bytes(session))


def state_bytes(session) -> int:
    """What the method keeps beside the rows; its layers are alike."""
    return sum(layer_bytes(cache.state, cache.policy.number) for cache in session.caches if cache.state is not None)


def test_what_a_method_keeps_is_refused_once_its_first_layer_shows_it(monkeypatch):
    kept, keep_prompt = [], LayerCache.keep_prompt
    monkeypatch.setattr(LayerCache, "keep_prompt", lambda cache, *states: keep_prompt(cache, *states) or kept.append(1))
    first = CASES["infinigen"].method.num_exempt_layers
    monkeypatch.setattr(memory, "available_bytes", lambda home: 100 if len(kept) > first else 2**40)
    with attached_with_link() as (attached, _), closing(open_live(attached, CASES["infinigen"])) as session:
        message = r"^what the method keeps of the prompt needs 0\.0 GiB of cpu memory and .* lower batch_size"
        with pytest.raises(UserError, match=message) as refusal:
            force(session, PROMPTS["even"])
        assert "\n" not in str(refusal.value) and len(kept) == first + 1 < len(session.caches)


def test_bytes_by_hand():
    """OPT-13B, fp16, batch 20, 1,920 + 128 tokens, a fifth of them selected, in GiB."""
    layers = [LayerSlots(20 * 40, 2048, 2 * 128 * 2)] * 40
    layer, selected, own = 800 * 2048 * 512, 800 * 409 * 512, 800 * 512  # own: a buffer's place for the step's row
    exempt, in_turn = 2 * (layer + own), 2 * (selected + own)
    plan = {"ahead": 2, "selected": 409, "activations": 3}
    assert session_bytes(layers, "host", reuse=False, **plan) == SessionBytes(40 * layer, exempt + in_turn + 3)
    assert session_bytes(layers, "host", reuse=True, **plan) == SessionBytes(
        40 * layer, exempt + in_turn + 38 * (selected + own) + 3
    )
    assert session_bytes(layers, "device", reuse=False, **plan) == SessionBytes(0, 40 * layer + 3)
    whole = {"ahead": 0, "selected": 2048, "activations": 0}
    assert session_bytes(layers, "host", reuse=False, **whole) == SessionBytes(40 * layer, 2 * (layer + own))
    assert f"{40 * layer / GIB:.2f}" == "31.25"


WIDE = {"hidden_size": 256, "num_attention_heads": 16}
MODELS = {
    "opt": ("opt", {"ffn_dim": 1024, "word_embed_proj_dim": 256}),
    "llama": ("llama", {"intermediate_size": 704, "num_key_value_heads": 16}),
    "gqa": ("llama", {"intermediate_size": 896, "num_key_value_heads": 4}),
    "small ffn": ("qwen2", {"intermediate_size": 256, "num_key_value_heads": 16}),
    "phi3": ("phi3", {"intermediate_size": 704, "num_key_value_heads": 16, "rope_parameters": HALF_ROTARY}),
    "gpt_neox": ("gpt_neox", {"intermediate_size": 1024}),
}


@pytest.mark.parametrize("codec", ["full", "int4"])
@pytest.mark.parametrize("family", MODELS)
def test_a_prompts_pass_stays_within_what_is_asked_for(family, codec):
    model_type, shape = MODELS[family]
    ids, real = token_batch((256, 256), 0)
    with attach(tiny_model(model_type, **WIDE, **shape)) as attached, torch.inference_mode():
        with Held("cpu") as held, closing(open_live(attached, CASES[codec], 4)) as session:
            session.prefill(ids, real)
        asked = session.bytes_needed.device
    assert 0.7 * asked < held.peak <= asked


@pytest.mark.parametrize("family", MODELS)
def test_a_shared_prompt_stays_within_what_is_asked_for(family, monkeypatch):
    """Beside a cache of 260 tokens, which is asked for with it."""
    model_type, shape = MODELS[family]
    asked = []
    monkeypatch.setattr(run, "require_memory", lambda num_bytes, *_: asked.append(num_bytes))
    ids, real = token_batch((256, 256), 0)
    with attach(tiny_model(model_type, **WIDE, **shape)) as attached, torch.inference_mode():
        geometry = attached.geometry
        run.require_shared_prompt(attached, 2, 256, 4)
        cache = geometry.num_layers * 2 * 260 * 2 * geometry.num_kv_heads * geometry.head_dim * 4
        with Held("cpu") as held:
            run_prompt(attached, ids, real)
    assert 0.7 * (asked[0] - cache) < held.peak <= asked[0] - cache


@pytest.mark.parametrize("name", ["full", "int4", "infinigen"])
def test_a_step_takes_less_than_a_prompt_so_it_needs_no_term_of_its_own(name):
    ids, real = token_batch((256, 256), 2)
    model = tiny_model("llama", intermediate_size=704, num_key_value_heads=4, **WIDE)
    with attach(model) as attached, closing(open_live(attached, CASES[name], 4)) as session:
        session.prefill(ids[:, :256], real[:, :256])
        with Held("cpu") as held:
            session.decode_step(ids[:, 256])
        assert held.peak < prompt_bytes(attached, 512)


def given(monkeypatch, cpu, cuda):
    monkeypatch.setattr(memory, "available_bytes", lambda home: {"cpu": cpu, "cuda": cuda}[home.type])


def test_each_memory_of_a_gpu_is_asked_by_itself(monkeypatch):
    given(monkeypatch, 4 * GIB, 2 * GIB)
    require_session(SessionBytes(4 * GIB, 2 * GIB), CUDA)
    with pytest.raises(UserError, match=r"live decoding needs 5\.0 GiB of cpu memory and 4\.0 GiB are available"):
        require_session(SessionBytes(5 * GIB, 2 * GIB), CUDA)
    with pytest.raises(UserError, match=r"needs 3\.0 GiB of cuda memory and 2\.0 .* lower batch_size, prompt_len or"):
        require_session(SessionBytes(4 * GIB, 3 * GIB), CUDA)


def test_a_cpu_has_one_memory_for_both(monkeypatch):
    given(monkeypatch, 4 * GIB, None)
    require_session(SessionBytes(3 * GIB, GIB), CPU)
    with pytest.raises(UserError, match=r"live decoding needs 5\.0 GiB of cpu memory and 4\.0 GiB are available"):
        require_session(SessionBytes(3 * GIB, 2 * GIB), CPU)


def test_a_session_that_does_not_fit_makes_nothing(monkeypatch):
    given(monkeypatch, 1000, None)
    with attach(tiny("gqa")) as attached:
        session = open_live(attached, CASES["full"])
        ids, real = token_batch(PROMPTS["even"])
        with pytest.raises(UserError, match="live decoding needs"):
            session.prefill(ids[:, :PROMPT], real[:, :PROMPT])
        assert session.caches == [] and session.fetcher.device_bytes == 0

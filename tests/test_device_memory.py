"""What live decoding takes of a device's memory, at the shape of OPT-13B, batch 20, 1,920 + 128 tokens.

Fake tensors have sizes and are freed as real ones are, so the peak of what is held at once is seen without a GPU. Not
in it: what the allocator rounds up, or frees later because another stream still reads it. Four layers stand for forty:
a further one adds its store, and under reuse its buffer, to what is computed and to what is found alike.
"""

from __future__ import annotations

import pytest
from fake_cuda import LIBC10, fake_gpu, fake_model
from held import Held
from test_fake_cuda import opened, system_of

from harness.model.decoder import read_decoder
from harness.offload import memory
from harness.offload.memory import tensor_bytes
from methods.codec import Codec

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not LIBC10.exists(), reason="torch's library of devices has another name here")

BATCH, PROMPT_LEN, LAYERS = 20, 1920, 4
PARTIAL_KEYS = 800 * 39 * 2 * (PROMPT_LEN + 128 + 128)
"""Of 800 heads and a layer: 39 of 128 columns of every key, and the projection to them."""
KEEPS = "what the method keeps of the prompt"
KEPT = {
    "offload+h2o": [800 * (204 + 204 + 2) * (4 + 4) + 20 * 2 * 8],
    "infinigen": [PARTIAL_KEYS],
    "infinigen+reuse": [PARTIAL_KEYS],
}
"""What a layer's state takes: of H2O a number and a worth of each token that is kept, and of two slots, and limits."""


@pytest.mark.parametrize("label", ["ideal", "offload", "offload+int4", "offload+h2o", "infinigen", "infinigen+reuse"])
def test_the_refusal_knows_what_decoding_takes(label, monkeypatch):
    asked = []
    monkeypatch.setattr(
        memory, "require_memory", lambda num_bytes, _, what="": what == KEEPS and asked.append(num_bytes)
    )
    method, system = system_of(label)
    codec = Codec(system.codec) if system.codec else None
    options = {"placement": system.placement, "reuse": system.reuse, "codec": codec, "steps": 128}
    with fake_gpu() as trace:
        model = fake_model("opt-13b", num_hidden_layers=LAYERS)  # its weights are not counted
        read_decoder(model)
        with Held("cuda") as held, opened(trace, model, (PROMPT_LEN,) * BATCH, method, **options) as (session, token):
            needed, prompt, state = session.bytes_needed.device, held.peak, session.caches[-1].state
            made_before = tensor_bytes(vars(state)["measured"]) if method.needs_calibration else 0
            held.restart()
            for _ in range(2):
                token = session.decode_step(token).argmax(-1)
            assert session.device_bytes - made_before <= needed
            assert held.peak <= needed
            assert 0.8 * needed <= prompt <= needed
            assert asked == KEPT.get(label, []), "of the one layer behind the first that has a state"

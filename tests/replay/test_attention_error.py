"""Errors of attention outputs in replay, against plain loops over what the model's attention was given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.prompts import PromptPass
from harness.replay.decode_pass import DecodePass
from methods.attention import Softmax
from tests.cases import CASES, Case
from tests.living import tiny
from tests.replaying import PROMPT, RAGGED, RAGGED_IDS, open_session, pad, run, token_ids, watched
from tests.tiny_models import mixed

NEEDS_PROMPT = 12
MEASURED = (
    "full", "full+smooth", "kivi", "residual-groups", "residual-tiles", "layers-residual", "kvarn", "h2o", "infinigen",
    "infinigen+int4", "quest-union", "oracle+smooth", "vattention-true", "biased", "sparq", "infinigen-linear",
    "shadowkv",
)  # fmt: skip
"""Cases of every kind of selection and of codec."""
BATCH = ((PROMPT, 44), (NEEDS_PROMPT, 30), (15, 24))
"""(prompt, length) of a padded batch whose prompts no method refuses."""


def plain_output(softmax: Softmax, head: int, query, keys, values) -> np.ndarray:
    """The full cache's output of one query head in one row, in double precision. query: [head_dim]; keys, values:
    lists of a token's."""
    scores = np.array([softmax.scale * float(query @ key) for key in keys])
    if softmax.softcap is not None:
        scores = softmax.softcap * np.tanh(scores / softmax.softcap)
    sink = [] if softmax.sinks is None else [float(softmax.sinks[head])]
    powers = np.exp(np.concatenate([scores, sink]) - max([*scores, *sink]))
    weights = (powers / powers.sum())[: len(keys)]
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def both(model, case: Case, batch=BATCH, calls=(4,), with_recall: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """What the session measured, and plain loops over what its own passes gave and got of every layer under the method:
    [layers, real rows, heads], dense layers 0."""
    seen: dict[int, list[tuple]] = {}

    def note(layer, *states):
        seen.setdefault(layer, []).append(tuple(state.double().numpy().copy() for state in states))

    widest = max(prompt for prompt, _ in batch)
    with attach(model) as attached, watched(note, (PromptPass, DecodePass)):
        measured = measured_by(attached, case, batch, calls, with_recall)
    geometry = attached.geometry
    rows_of = [range(prompt, length) for prompt, length in batch]
    expected = np.zeros((geometry.num_layers, sum(map(len, rows_of)), geometry.num_heads))
    for layer, number in enumerate(attached.numbers):
        if number is None or number < case.method.dense_layers or case == CASES["full"]:
            continue
        prompt_pass, decode_passes = seen[layer][0], seen[layer][-len(calls) - 1 :]
        query, key, value = (np.concatenate([part[at] for part in (prompt_pass, *decode_passes)], 2) for at in range(3))
        output = np.concatenate([part[3] for part in decode_passes], 1)  # [batch, rows, heads, value_dim]
        at = 0
        # The session measures call by call, and within a call sequence by sequence.
        edges = [0, *calls, key.shape[2]]
        for begin, end in zip(edges, edges[1:], strict=False):
            for b, (prompt, length) in enumerate(batch):
                for row in range(begin, min(end, length - prompt)):
                    column, first = widest + row, widest - prompt
                    for head in range(geometry.num_heads):
                        kv_head = head // geometry.group
                        keys, values = (list(of[b, kv_head, first : column + 1]) for of in (key, value))
                        softmax = attached.layers[layer].softmax
                        full = plain_output(softmax, head, query[b, head, column], keys, values)
                        off = np.linalg.norm(output[b, row, head] - full)
                        expected[number, at, head] = off / np.linalg.norm(full)
                    at += 1
    return measured, expected


def measured_by(attached: Attached, case: Case, batch=BATCH, calls=(4,), with_recall: bool = False) -> np.ndarray:
    """What the session measured."""
    sequences = [token_ids(length, seed) for seed, (_, length) in enumerate(batch)]
    prompts = [prompt for prompt, _ in batch]
    about = {"calls": calls, "measure_errors": True, "measure_recall": with_recall}
    return run(attached, case, sequences, prompts, **about).errors.numpy()


@pytest.mark.parametrize("name", MEASURED)
def test_errors_are_those_of_plain_loops(name):
    """In a padded batch and two calls; dense layers and the full cache have exactly 0."""
    case = CASES[name]
    measured, expected = both(tiny("gqa"), case)
    assert measured.shape == expected.shape
    if case.codec is None:  # the recall's scores give the full cache's output as well
        with attach(tiny("gqa")) as attached:
            beside = measured_by(attached, case, with_recall=True)
        np.testing.assert_allclose(beside, measured, rtol=1e-3, atol=2e-5)
    np.testing.assert_allclose(measured, expected, rtol=1e-3, atol=2e-5)
    dense_layers = case.method.dense_layers
    assert not measured[:dense_layers].any()
    assert measured.any() == (name != "full")


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "deepseek_v3", "llama4_text", "qwen3_next"])
@pytest.mark.parametrize("name", ["infinigen", "h2o+smooth", "kivi"])
def test_with_sinks_softcaps_latents_and_layers_of_other_kinds(family, name):
    measured, expected = both(mixed(family), CASES[name], with_recall=name == "infinigen")
    np.testing.assert_allclose(measured, expected, rtol=1e-3, atol=2e-5)
    assert expected[2:].any()


def test_a_fork_begins_to_count_anew_and_blocks_change_nothing():
    case = CASES["infinigen+int4"]
    prompts = [prompt for prompt, _ in RAGGED][:1]
    with attach(tiny("gqa")) as attached:
        whole = run(attached, case, RAGGED_IDS[:1], prompts, measure_errors=True)
        plain = run(attached, case, RAGGED_IDS[:1], prompts)
        assert torch.equal(whole.logits[0], plain.logits[0]), "measuring changes no logit"
        by_rows = run(attached, case, RAGGED_IDS[:1], prompts, measure_errors=True, rows_per_block=3)
        assert torch.allclose(whole.errors, by_rows.errors, atol=1e-5)
        session = open_session(attached, case, [56], 56, measure_errors=True)
        session.prefill(*pad([RAGGED_IDS[0][:PROMPT]], left=True))
        session.decode(*pad([RAGGED_IDS[0][PROMPT:30]], left=False))
        fork = session.fork(torch.tensor([0]), 56)
        fork.decode(*pad([RAGGED_IDS[0][30:]], left=False))
    together = torch.cat([session.attention_errors, fork.attention_errors], 1)
    assert session.attention_errors.shape[1] == 30 - PROMPT
    assert torch.allclose(together, whole.errors, atol=1e-5)

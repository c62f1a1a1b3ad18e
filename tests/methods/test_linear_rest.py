"""An estimated rest against a plain rule: a fit in numpy, and the attention of each head of each row in one sum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from methods.base import Geometry, Lengths, PromptRows, QueryRows
from methods.infinigen2 import balanced, moments
from methods.linear_rest import RIDGE, InfiniGen2Linear
from tests.cases import Case
from tests.living import tiny
from tests.methods.test_rules import BATCH, balanced_product, replayed

FLOATS = {"statistics": "prompt", "index_bits": None, "projection_bits": None}
TOKENS, PROMPT, HEAD_DIM = 60, 48, 8


def plain_fit(partial: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """M and b of one head's prompt: ridge regression as least squares over more rows."""
    inputs, outputs = partial - partial.mean(0), value - value.mean(0)
    ridge = math.sqrt(RIDGE * np.square(inputs).sum() / inputs.shape[1])
    inputs = np.concatenate([inputs, ridge * np.eye(inputs.shape[1])])
    outputs = np.concatenate([outputs, np.zeros((len(inputs) - len(outputs), outputs.shape[1]))])
    slope = np.linalg.lstsq(inputs, outputs, rcond=None)[0]
    return slope, value.mean(0) - partial.mean(0) @ slope


@pytest.mark.parametrize("model", ["gqa", "opt"])
def test_every_row_of_a_padded_batch_attends_as_the_plain_rule(model):
    method = InfiniGen2Linear(budget=0.3, **FLOATS)
    geometry, found = replayed(tiny(model), Case(method))
    for layer, sequences in found.items():
        for (prompt, length), sequence in zip(BATCH, sequences, strict=True):
            for kv, (key, value) in enumerate(zip(sequence.key, sequence.value, strict=True)):
                heads = slice(kv * geometry.group, (kv + 1) * geometry.group)
                query = sequence.query[heads]
                rows = query[:, :prompt].reshape(-1, geometry.head_dim) / geometry.scale
                of_key = np.cov(key[:prompt].T, bias=True)
                rank = method.num_columns(geometry.head_dim)
                product = balanced_product(rows.T @ rows / len(rows), of_key, rank)
                # The ridge depends on the basis of the index: this is the method's own.
                known = moments(
                    torch.from_numpy(query[None, :, :prompt] / geometry.scale),
                    torch.from_numpy(key[None, None, :prompt]),
                    torch.ones(1, prompt, dtype=torch.bool),
                )
                partial = key @ balanced([known], rank)[0, 1, 0].numpy()
                slope, intercept = plain_fit(partial[:prompt], value[:prompt])
                centred, mean = key - key[:prompt].mean(0), key[:prompt].mean(0)
                for t in range(prompt, length):
                    read = sequence.read[kv][t - prompt]
                    for head, own in enumerate(query[:, t]):
                        total, whole = np.zeros(value.shape[1]), 0.0
                        for token in range(t + 1):
                            if token in read or token == t:
                                weight, of_token = np.exp(own @ key[token]), value[token]
                            else:
                                weight = np.exp(own @ mean + own @ product @ centred[token])
                                of_token = partial[token] @ slope + intercept
                            total, whole = total + weight * of_token, whole + weight
                        difference = np.abs(sequence.output[heads][head, t] - total / whole).max()
                        assert difference < 1e-5, f"layer {layer}, prompt {prompt}, row {t}"


def one_row(method: InfiniGen2Linear, key: torch.Tensor, value: torch.Tensor):
    """State and selection of a row after `TOKENS` tokens of one KV head with two query heads."""
    geometry = Geometry(1, 2, 1, HEAD_DIM, 0.35, "llama")
    lengths = Lengths(torch.tensor([PROMPT]), torch.tensor([TOKENS + 1]))
    state = method.new_state(geometry, lengths)
    queries = torch.randn(1, 2, PROMPT, HEAD_DIM, generator=torch.Generator().manual_seed(5))
    real = torch.ones(1, PROMPT, dtype=torch.bool)
    state.prompt(0, queries, key[:, :, :PROMPT], value[:, :, :PROMPT], PromptRows(real, TOKENS + 1))
    tokens = torch.arange(TOKENS)[None]
    later = slice(PROMPT, TOKENS)
    state.append(0, key[:, :, later], value[:, :, later], tokens[:, later], later)
    at = torch.tensor([[TOKENS]])
    slots = torch.arange(TOKENS).view(1, 1, -1)
    rows = QueryRows(queries[:, :, :1], at, at >= 0, slots, at[:, None], torch.empty)
    return state, rows, state.select(0, rows)


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys far from 0, and values that are linear in them."""
    generator = torch.Generator().manual_seed(seed)
    key = 3.0 + torch.randn(1, 1, TOKENS, HEAD_DIM, generator=generator)
    return key, key @ torch.randn(HEAD_DIM, HEAD_DIM, generator=generator) - 2.0


@pytest.mark.parametrize(("bits", "allowed"), [(None, 0.05), (8, 0.05), (4, 0.25)])
def test_linear_values_on_a_whole_index_are_nearly_all_attention(bits, allowed):
    """With and without codes. What is left is the ridge and the codes; a rest that is dropped errs far more."""
    key, value = drawn(1)
    settings = {"index_bits": bits, "projection_bits": bits, "statistics": "prompt", "partial_weight_ratio": 1.0}
    state, rows, selection = one_row(InfiniGen2Linear(budget=0.1, **settings), key, value)
    scores = 0.35 * rows.query[0, :, 0] @ key[0, 0].T
    everything = scores.softmax(-1) @ value[0, 0]
    read = scores.masked_fill(~selection.mask[0, 0, 0], -math.inf)
    dropped = read.softmax(-1) @ value[0, 0]
    rest = selection.rest.beside(read.logsumexp(-1).view(1, 1, 2, 1))
    share = rest.share.view(2, 1)
    estimated = (1 - share) * dropped + share * rest.value.view(2, -1)
    error = float((estimated - everything).norm() / (dropped - everything).norm())
    assert error < allowed


def test_slots_that_no_row_sees_may_hold_anything():
    key, value = drawn(2)
    method = InfiniGen2Linear(statistics="prompt")
    state, rows, clean = one_row(method, key, value)
    tokens = rows.slot_positions.clone()
    tokens[..., 30] = torch.iinfo(torch.int32).max
    state.partial_keys[0][:, :, 30] = 0  # the scale of zeros is 0
    rows.slot_positions = tokens
    wanted = state.select(0, rows).rest
    state.partial_keys[0][:, :, 30] = 255  # a scale that is not a number
    got = state.select(0, rows).rest
    assert torch.equal(got.value, wanted.value) and torch.equal(got.log_mass, wanted.log_mass)
    assert not torch.equal(got.log_mass, clean.rest.log_mass)


def test_nothing_is_estimated_where_every_token_is_read():
    state, rows, selection = one_row(InfiniGen2Linear(statistics="prompt", budget=1.0), *drawn(3))
    assert bool((selection.rest.log_mass == -math.inf).all()) and bool(selection.rest.value.isfinite().all())


def test_the_fit_is_counted():
    """M in 4 bits with two scales a row, intercept and mean key; the codes of the index are read twice."""
    state, rows, selection = one_row(InfiniGen2Linear(statistics="prompt", partial_weight_ratio=0.5), *drawn(4))
    columns, elements = 4, 2 * HEAD_DIM
    row_bits = HEAD_DIM * 4 + 32
    slope = columns * row_bits / 16 / elements
    means = 2 * HEAD_DIM / elements
    key_bits = columns * 4 + 32
    index = key_bits / 16 / elements
    projections = 2 * HEAD_DIM * (columns * 4 + 32) / 16 / elements
    centre = columns / elements
    expected = 2 * TOKENS * index + slope + means + projections + centre
    assert float(selection.side) == pytest.approx(expected)

"""Replay against the token-by-token reference: logits, selections, sizes."""

from __future__ import annotations

import pytest
import reference as plain
import torch
from cases import CASES, Case
from replaying import (
    LENGTH,
    PROMPT,
    RAGGED,
    RAGGED_IDS,
    SELECTING,
    WELL_APART,
    assert_close,
    every_model,
    every_referenced_case,
    open_session,
    pad,
    run_one,
    run_ragged,
    token_ids,
    trace,
)

from harness import replay as passes
from harness.errors import UserError
from harness.model.attach import attach
from harness.sizes import ReadStats
from methods.codec import Codec
from methods.full import Full

# Against the reference


@every_model
@every_referenced_case
def test_replay_is_the_reference(model, name):
    expected = trace(model, name)
    assert expected.margin > WELL_APART, "these ids make a choice that rounding decides"
    assert_close(run_one(model, CASES[name]).logits[0], expected.logits)


@pytest.mark.parametrize("fixture", ["tiny_qwen2", "tiny_qwen3", "tiny_mistral", "tiny_phi3", "tiny_gpt_neox"])
@pytest.mark.parametrize("name", ["full", "infinigen"])
def test_replay_is_the_reference_in_other_families(fixture, name, request):
    model = request.getfixturevalue(fixture)
    assert_close(run_one(model, CASES[name]).logits[0], trace(model, name).logits)


@every_model
def test_the_reference_of_full_is_the_model_itself(model):
    ids = token_ids(LENGTH)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, PROMPT:]
    assert_close(trace(model, "full").logits, expected)


@pytest.mark.parametrize("name", ["oracle", "infinigen", "infinigen-union"])
def test_the_counts_of_the_cases_are_neither_all_nor_the_cap(tiny_gqa, name):
    """Otherwise alpha would be tested by nothing."""
    method = CASES[name].method
    caps = [int(method.max_fetch_frac * cached) for cached in range(PROMPT, LENGTH)]
    counts = trace(tiny_gqa, name).counts
    below = sum(count < cap for count, cap in zip(counts, caps, strict=True))
    assert len(caps) / 5 < below
    assert len(set(counts)) > 3


@every_model
@pytest.mark.parametrize("name", SELECTING)
def test_selections_are_the_references(model, name, monkeypatch):
    selected = spy_on_selections(monkeypatch)
    run_one(model, CASES[name])
    expected = trace(model, name)
    exempt = CASES[name].method.num_exempt_layers
    assert sorted(selected) == list(range(exempt, 4))
    for layer, heads in selected.items():
        for head, rows in enumerate(heads):
            assert rows == expected.reads[layer][head], f"layer {layer}, KV head {head}"


def spy_on_selections(monkeypatch) -> dict[int, list[list[set[int]]]]:
    """Fills with the tokens selected by the first sequence: [layer][KV head][decode row]."""
    selected: dict[int, list[list[set[int]]]] = {}
    original = passes._Block._select

    def select(block, exact):
        selection = original(block, exact)
        kv_heads = block.key.shape[1]
        heads = selected.setdefault(block.layer, [[] for _ in range(kv_heads)])
        mask = selection.mask[0].expand(kv_heads, -1, -1)
        tokens = block.tokens[0, : block.stop]
        for head, rows in enumerate(mask):
            heads[head] += [set(tokens[row].tolist()) for row in rows]
        counted = mask.sum(-1).double().mean(0)
        assert torch.equal(counted, selection.num_read[0].expand_as(counted))
        return selection

    monkeypatch.setattr(passes._Block, "_select", select)
    return selected


@pytest.mark.parametrize("bits, group_size", [(4, 8), (2, 64), (1, 5)])
def test_quantized_reads_are_the_references(tiny_gqa, bits, group_size):
    """An element on the edge of two codes may fall either way, so means are compared, not the largest difference."""
    ids = token_ids(LENGTH)
    case = Case(Full(), Codec(f"int{bits}", group_size))

    def codec(row):
        return plain.quantized(row, bits, group_size)

    with torch.inference_mode():
        reference = plain.Reference(tiny_gqa, case.method, final_length=LENGTH, prefill_len=PROMPT, codec=codec)
        expected = reference.run(ids).logits
    got = run_one(tiny_gqa, case)
    error = float((got.logits[0] - expected).abs().mean())
    effect = float((trace(tiny_gqa, "full").logits - expected).abs().mean())
    assert error < effect / 20, f"mean difference {error:.3g}, effect of {bits} bits {effect:.3g}"
    num_groups = -(-16 // group_size)
    assert got.reads.size == pytest.approx((2 + 2 * (bits + 32 * num_groups / 16) / 16) / 4)


# Sizes


@pytest.mark.parametrize("multiplicity", [None, [2, 1, 3]])
@every_referenced_case
def test_sizes_and_recall_are_the_plain_ones(tiny_gqa, name, multiplicity):
    case = CASES[name]
    counted = None if multiplicity is None else torch.tensor(multiplicity)
    reads = run_ragged(tiny_gqa, case, multiplicity=counted, measure_recall=True).reads
    traces = [
        trace(tiny_gqa, name, ids, prompt)
        for ids, (prompt, _), times in zip(RAGGED_IDS, RAGGED, multiplicity or [1] * 3, strict=True)
        for _ in range(times)
    ]
    bits = 16 if case.codec is None else 4 + 32 / 16  # head_dim 16
    assert reads.rows == sum(len(each.rows) for each in traces)
    assert reads.size == pytest.approx(plain.size(traces, bits), abs=1e-9)
    code_bits = 16 if case.codec is None else 4
    # Below the root, rounding of the sums counts by its square root.
    assert reads.size_artifact == pytest.approx(plain.size_artifact(traces, code_bits), abs=1e-7)
    if case.codec is None:
        assert reads.attention_recall == pytest.approx(plain.attention_recall(traces), abs=1e-5)
    else:
        assert reads.attention_recall is None
    reads.check_fired()


def test_recall_is_measured_on_demand(tiny_gqa):
    assert run_one(tiny_gqa, CASES["h2o"]).reads.attention_recall is None
    assert run_one(tiny_gqa, CASES["full"], measure_recall=True).reads.attention_recall == 1


@every_referenced_case
def test_merged_reads_are_those_of_the_batch(tiny_gqa, name):
    batch = run_ragged(tiny_gqa, CASES[name], measure_recall=True).reads
    parts = [
        run_one(tiny_gqa, CASES[name], ids, prompt, measure_recall=True).reads
        for ids, (prompt, _) in zip(RAGGED_IDS, RAGGED, strict=True)
    ]
    merged = parts[0] + parts[1] + parts[2]
    for field in ("rows", "size", "size_artifact", "attention_recall"):
        assert getattr(merged, field) == pytest.approx(getattr(batch, field), abs=1e-5), field


def test_a_method_that_never_ran_is_an_error(tiny_gqa):
    with attach(tiny_gqa) as attached:
        session = open_session(attached, CASES["h2o"], [PROMPT], PROMPT)
        session.prefill(*pad([token_ids(PROMPT)], left=True))
    with pytest.raises(UserError, match="ran on 0 of 0 decode rows"):
        session.reads.check_fired()
    with pytest.raises(UserError, match="ran on 4 of 5 decode rows"):
        (ReadStats(rows=3, fired_rows=3) + ReadStats(rows=2, fired_rows=1)).check_fired()


def test_a_layer_in_which_the_method_did_not_run_is_an_error(tiny_gqa, monkeypatch):
    attend = passes.DecodePass.attention

    def skip_last(self, layer, query, key, value):
        return query.transpose(1, 2) if layer == 3 else attend(self, layer, query, key, value)

    monkeypatch.setattr(passes.DecodePass, "attention", skip_last)
    with pytest.raises(UserError, match="ran on 0 of 37 decode rows"):
        run_one(tiny_gqa, CASES["streaming"]).reads.check_fired()

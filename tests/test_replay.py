"""Replay: against the token-by-token reference, against itself in other batches and calls, and at its limits."""

from __future__ import annotations

from math import inf

import pytest
import reference as plain
import torch
from cases import CASES, WIDE, Case
from living import of_codec
from replaying import (
    BATCHED,
    LENGTH,
    PROMPT,
    RAGGED,
    RAGGED_IDS,
    SELECTING,
    TOO_SHORT,
    WELL_APART,
    assert_close,
    every_case,
    every_case_in_a_model,
    every_model,
    every_referenced_case,
    open_session,
    pad,
    run,
    run_one,
    run_ragged,
    token_ids,
    trace,
)  # fmt: skip

from harness import replay as passes
from harness.errors import UserError
from harness.model.attach import attach
from harness.sizes import ReadStats
from methods import attention
from methods.codec import Codec
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen, Oracle
from methods.prompt_evicting import SnapKV
from methods.quest import Quest
from methods.shadowkv import ShadowKV
from methods.streaming import Streaming

# Against the reference


@every_model
@every_referenced_case
def test_replay_and_its_selections_are_the_references(model, name, monkeypatch):
    selected = spy_on_selections(monkeypatch) if name in SELECTING else {}
    expected = trace(model, name)
    assert expected.margin > WELL_APART, "these ids make a choice that rounding decides"
    assert_close(run_one(model, CASES[name]).logits[0], expected.logits)
    assert sorted(selected) == (list(range(CASES[name].method.num_exempt_layers, 4)) if name in SELECTING else [])
    for layer, heads in selected.items():
        for head, rows in enumerate(heads):
            assert rows == expected.reads[layer][head], f"layer {layer}, KV head {head}"


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


# Padding, chunks, calls


@every_case_in_a_model
def test_a_padded_batch_is_its_sequences_alone(model, name):
    together = run_ragged(model, CASES[name]).logits
    for ids, (prompt, _), got in zip(RAGGED_IDS, RAGGED, together, strict=True):
        assert_close(got, run_one(model, CASES[name], ids, prompt).logits[0])


@every_model
def test_a_padded_prompt_is_what_the_model_makes_of_it(model):
    """Left padding in the prefill's own hidden states, against the model with an attention mask."""
    ids, valid = pad([token_ids(20), token_ids(9, 1)], left=True)
    with torch.inference_mode():
        positions = (valid.cumsum(-1) - 1).clamp(min=0)
        expected = model(ids, attention_mask=valid.long(), position_ids=positions).logits
    with attach(model) as attached:
        session = open_session(attached, CASES["full"], [20, 9], 20)
        got = attached.logits(session.prefill(ids, valid))
    assert_close(got[valid], expected[valid])


@every_case
def test_chunks_change_nothing(tiny_gqa, name, monkeypatch):
    expected = run_ragged(tiny_gqa, CASES[name], measure_recall=True)
    blocks = []
    original = passes._Block.__init__

    def count_block(block, *arguments):
        blocks.append(block)
        original(block, *arguments)

    monkeypatch.setattr(passes._Block, "__init__", count_block)
    monkeypatch.setattr(attention, "PROMPT_CHUNK", 7)
    for limit in ({"MAX_CHUNK": 16}, {"SCORES_PER_CHUNK": 1}):
        with monkeypatch.context() as patch:
            for constant, value in limit.items():
                patch.setattr(passes, constant, value)
            got = run_ragged(tiny_gqa, CASES[name], measure_recall=True)
        assert len(blocks) > 4, "one chunk a layer tests nothing"
        blocks.clear()
        for rows, wanted in zip(got.logits, expected.logits, strict=True):
            assert_close(rows, wanted)
        assert got.reads.size == pytest.approx(expected.reads.size)
        assert got.reads.attention_recall == pytest.approx(expected.reads.attention_recall, abs=1e-5)


CALLS = {"four": (1, 2, 20), "one-row": tuple(range(1, 37))}


@pytest.mark.parametrize(
    ("name", "calls"), [(name, call) for name in BATCHED for call in CALLS if call == "four" or name in WIDE]
)
def test_several_calls_are_one(tiny_gqa, name, calls):
    """One row a call is live decoding's rhythm; the last calls hold sequences that are padding alone."""
    expected = run_ragged(tiny_gqa, CASES[name])
    got = run_ragged(tiny_gqa, CASES[name], calls=CALLS[calls])
    for rows, wanted in zip(got.logits, expected.logits, strict=True):
        assert_close(rows, wanted)
    assert got.reads.size == pytest.approx(expected.reads.size)


SMALLEST = {
    "h2o-one": Case(H2O(heavy_frac=0.01, recent_frac=0.0)),
    "h2o-last": Case(H2O(heavy_frac=0.0, recent_frac=0.05)),
    "streaming-one": Case(Streaming(kept_frac=0.05, num_sinks=0)),
    "oracle-one": Case(Oracle(fixed_fetch=1)),
    "infinigen-one": Case(InfiniGen(fixed_fetch=1)),
    "snapkv-two": Case(SnapKV(kept_tokens=2, window=1)),
}
ALONE_OR_PADDED = {name: case for name, case in (CASES | SMALLEST).items() if case.method not in TOO_SHORT}


@pytest.mark.parametrize("case", ALONE_OR_PADDED.values(), ids=ALONE_OR_PADDED)
def test_rows_after_padding_know_nothing_of_it(tiny_gqa, case):
    """Where a single token is kept, a padding row may find nothing to read: its softmax must reach no real row."""
    sequences, prompts = [token_ids(24), token_ids(24, 1), token_ids(22, 2)], [6, 6, 1]
    batch = [ids[:p] for ids, p in zip(sequences, prompts, strict=True)]
    with attach(tiny_gqa) as attached:
        session = open_session(attached, case, [24, 24, 22], 6 + 10 + 21)
        session.prefill(*pad(batch, left=True))
        firsts = [ids[p:end] for ids, p, end in zip(sequences, prompts, (16, 9, 1), strict=True)]
        session.decode(*pad(firsts, left=False))
        rest, valid = pad([ids[end:] for ids, end in zip(sequences, (16, 9, 1), strict=True)], left=False)
        got = attached.logits(session.decode(rest, valid))
        assert 0 < session.reads.size <= 1
    for row, (ids, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        alone = run_one(tiny_gqa, case, ids, prompt).logits[0]
        assert_close(got[row][valid[row]], alone[-int(valid[row].sum()) :], of_codec(case.codec))


# Forks


@every_case_in_a_model
def test_a_fork_is_each_continuation_alone(model, name):
    """Contexts of two lengths; the first has three choices, of which two share rows, the second two."""
    contexts = [token_ids(20), token_ids(13, 1)]
    longest = token_ids(9, 2)
    choices = [(0, longest), (0, longest[:4] + token_ids(3, 3)), (1, token_ids(6, 4)), (1, token_ids(2, 5))]
    final = [32, 25]
    case = CASES[name]
    with attach(model) as attached:
        root = open_session(attached, case, final, 20)
        root.prefill(*pad(contexts, left=True), torch.tensor([2, 2]))
        shared = [choices[0][1][:4], []]
        trunk = root.fork(torch.tensor([0, 1]), 20 + 4)
        trunk.decode(*pad(shared, left=False), torch.tensor([2, 1]))
        stems = torch.tensor([parent for parent, _ in choices])
        own = [tokens[len(shared[parent]) :] for parent, tokens in choices]
        tips = trunk.fork(stems, 24 + max(map(len, own)))
        ids, valid = pad(own, left=False)
        got = attached.logits(tips.decode(ids, valid))
        again = trunk.fork(stems, 24 + max(map(len, own)))
        assert torch.equal(got[valid], attached.logits(again.decode(ids, valid))[valid]), "a sibling left something"
        alone = []
        for row, (parent, tokens) in enumerate(choices):
            session = open_session(attached, case, [final[parent]], 32)
            session.prefill(*pad([contexts[parent]], left=True))
            wanted = attached.logits(session.decode(*pad([tokens], left=False)))[0]
            assert_close(got[row][valid[row]], wanted[-len(own[row]) :])
            alone.append(session.reads)
    together = root.reads + trunk.reads + tips.reads
    separate = sum(alone[1:], alone[0])
    assert together.rows == separate.rows
    assert together.size == pytest.approx(separate.size)
    assert together.device_frac == pytest.approx(separate.device_frac)
    if not isinstance(case.method, Quest | ShadowKV):  # what they keep of a sequence is as long as a batch's longest
        assert together.resident_frac == pytest.approx(separate.resident_frac)
    assert together.size_artifact == pytest.approx(separate.size_artifact)


# The contract's edges


LIMITS = {
    "h2o-halves": H2O(heavy_frac=0.5, recent_frac=0.5),
    "h2o-heavy": H2O(heavy_frac=1.0, recent_frac=0.0),
    "h2o-recent": H2O(heavy_frac=0.0, recent_frac=1.0),
    "streaming": Streaming(kept_frac=1.0),
    "oracle": Oracle(alpha=inf, max_fetch_frac=1.0),
    "oracle-fixed": Oracle(fixed_fetch=LENGTH),
    "infinigen-skew": InfiniGen(alpha=inf, max_fetch_frac=1.0),
    "infinigen": InfiniGen(alpha=inf, max_fetch_frac=1.0, skew=False),
    "infinigen-alpha": InfiniGen(alpha=1e6, max_fetch_frac=1.0),
    "infinigen-fixed": InfiniGen(fixed_fetch=10 * LENGTH),
    "infinigen-final": InfiniGen(alpha=inf, max_fetch_frac=1.0, cap_of="final"),
    "infinigen-pool": InfiniGen(alpha=inf, max_fetch_frac=1.0, pool_frac=1.0),
    "quest": Quest(read_frac=1.0, page_size=5),
    "quest-token": Quest(read_frac=1.0, page_size=1),
    "snapkv": SnapKV(kept_frac=1.0),
    "snapkv-tokens": SnapKV(kept_tokens=LENGTH, window=4),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limit_cases_are_the_full_cache(tiny_gqa, name):
    full = run_ragged(tiny_gqa, CASES["full"]).logits
    limit = run_ragged(tiny_gqa, Case(LIMITS[name]), measure_recall=True)
    for got, expected in zip(limit.logits, full, strict=True):
        assert_close(got, expected, 2e-5)
    assert limit.reads.size == limit.reads.size_artifact == 1
    assert limit.reads.attention_recall == pytest.approx(1, abs=1e-6)


def test_an_exact_codec_is_no_codec(tiny_gqa):
    for method in (Full(), CASES["h2o"].method):
        got = run_ragged(tiny_gqa, Case(method, Codec("fp32")))
        expected = run_ragged(tiny_gqa, Case(method))
        for rows, wanted in zip(got.logits, expected.logits, strict=True):
            assert_close(rows, wanted, 2e-5)
        assert got.reads.size == pytest.approx(expected.reads.size)


@pytest.mark.parametrize("name", [name for name in BATCHED if name in WIDE])
def test_a_second_batch_is_as_if_it_were_the_first(tiny_gqa, name):
    second = [token_ids(LENGTH, 8), token_ids(40, 9)]
    with attach(tiny_gqa) as attached:
        alone = run(attached, CASES[name], second, [PROMPT, 5])
        run(attached, CASES[name], [token_ids(LENGTH)], [PROMPT])
        again = run(attached, CASES[name], second, [PROMPT, 5])
    assert again.reads == alone.reads
    for got, expected in zip(again.logits, alone.logits, strict=True):
        assert torch.equal(got, expected)

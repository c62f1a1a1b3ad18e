"""Replay against the token-by-token reference, and against itself: padding, chunks, calls, forks, batches in a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import inf
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import reference as plain
import torch
from conftest import tiny_model
from transformers import AttentionInterface, AttentionMaskInterface

from harness import replay
from harness.attach import attach
from harness.errors import UserError
from harness.memory.codec import Codec
from harness.reads import ReadStats
from harness.replay import ReplaySession
from methods import h2o
from methods.base import Method
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.oracle import Oracle
from methods.quantization import Quantized
from methods.streaming import Streaming

LENGTH, PROMPT = 56, 19
RAGGED = ((PROMPT, LENGTH), (1, 30), (11, 24))
"""(prompt, length) of the sequences of a padded batch."""
TOLERANCE = 1e-4
WELL_APART = 1e-6
"""The least `Reference.margin` at which fp32 and fp64 must choose alike."""


@dataclass(frozen=True)
class Smooth:
    """Distorts a row as much as 4 bits do, but without steps: no code that rounding could flip."""

    bits = 4
    is_float = False

    def bits_per_element(self, head_dim: int) -> float:
        return 4 + 32 / head_dim

    def roundtrip(self, rows: torch.Tensor) -> torch.Tensor:
        return 0.8 * rows + 0.2 * torch.sin(3 * rows)


def smooth(row: np.ndarray) -> np.ndarray:
    return 0.8 * row + 0.2 * np.sin(3 * row)


class Case(NamedTuple):
    method: Method
    codec: Codec | Smooth | None = None


CASES = {
    "full": Case(Full()),
    "h2o": Case(H2O(heavy_frac=0.15, recent_frac=0.1)),
    "h2o-heavy": Case(H2O(heavy_frac=0.2, recent_frac=0.0, num_exempt_layers=0)),
    "h2o-recent": Case(H2O(heavy_frac=0.0, recent_frac=0.2, num_exempt_layers=1)),
    "streaming": Case(Streaming(kv_frac=0.25, num_sinks=2)),
    "oracle": Case(Oracle(alpha=0.7, max_fetch_frac=0.5)),
    "infinigen": Case(InfiniGen(alpha=0.3, max_fetch_frac=0.4)),
    "infinigen-query": Case(InfiniGen(columns="query", skew=False, alpha=inf, max_fetch_frac=0.3)),
    "infinigen-union": Case(InfiniGen(columns="union", alpha=0.6, max_fetch_frac=0.6, num_exempt_layers=1)),
    "infinigen-fixed": Case(InfiniGen(fixed_fetch=6, skew=False)),
    "quantized": Case(Quantized(), Smooth()),
    "h2o+codec": Case(H2O(heavy_frac=0.15, recent_frac=0.1), Smooth()),
    "streaming+codec": Case(Streaming(kv_frac=0.25, num_sinks=2), Smooth()),
    "oracle+codec": Case(Oracle(alpha=inf, max_fetch_frac=0.3), Smooth()),
    "infinigen+codec": Case(InfiniGen(alpha=0.3, max_fetch_frac=0.4), Smooth()),
}
MODELS = ("tiny_llama", "tiny_gqa", "tiny_opt")
SELECTING = [name for name, case in CASES.items() if not case.method.reads_all]

every_case = pytest.mark.parametrize("name", CASES)
every_model = pytest.mark.parametrize("model", MODELS, indirect=True)


@pytest.fixture
def model(request):
    return request.getfixturevalue(request.param)


def token_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (length,), generator=generator).tolist()


RAGGED_IDS = [token_ids(length, seed) for seed, (_, length) in enumerate(RAGGED)]


@cache
def rotation(num_kv_heads: int, head_dim: int) -> torch.Tensor:
    """A random rotation per layer and KV head: no symmetry that could hide a transposed one."""
    generator = torch.Generator().manual_seed(5)
    return torch.linalg.qr(torch.randn(4, num_kv_heads, head_dim, head_dim, generator=generator)).Q


def open_session(attached, case: Case, final_lengths, num_columns: int, **options) -> ReplaySession:
    geometry = attached.geometry
    return ReplaySession(
        attached,
        case.method,
        codec=case.codec,
        calibration=SimpleNamespace(rotation=rotation(geometry.num_kv_heads, geometry.head_dim)),
        final_lengths=torch.tensor(final_lengths),
        num_columns=num_columns,
        **options,
    )


def pad(rows: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), 7)
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        place = slice(width - len(tokens), width) if left else slice(0, len(tokens))
        ids[row, place] = torch.tensor(tokens, dtype=torch.long)
        valid[row, place] = True
    return ids, valid


class Run(NamedTuple):
    logits: list[torch.Tensor]
    """Of each sequence's decode rows."""
    reads: ReadStats


def run(attached, case: Case, sequences, prompts, *, calls=(), multiplicity=None, **options) -> Run:
    """Replay a padded batch; `calls`: columns at which the decode rows are cut into several calls."""
    batch_prompt, valid = pad([ids[:p] for ids, p in zip(sequences, prompts, strict=True)], left=True)
    rest, real = pad([ids[p:] for ids, p in zip(sequences, prompts, strict=True)], left=False)
    lengths = [len(ids) for ids in sequences]
    session = open_session(attached, case, lengths, batch_prompt.shape[1] + rest.shape[1], **options)
    session.prefill(batch_prompt, valid, multiplicity)
    edges = [0, *calls, rest.shape[1]]
    hidden = [
        session.decode(rest[:, start:stop], real[:, start:stop], multiplicity)
        for start, stop in zip(edges, edges[1:], strict=False)
    ]
    logits = attached.logits(torch.cat(hidden, 1))
    return Run([rows[mask] for rows, mask in zip(logits, real, strict=True)], session.reads)


def run_one(model, case: Case, ids=None, prompt: int = PROMPT, **options) -> Run:
    with attach(model) as attached:
        return run(attached, case, [ids or token_ids(LENGTH)], [prompt], **options)


def run_ragged(model, case: Case, **options) -> Run:
    with attach(model) as attached:
        return run(attached, case, RAGGED_IDS, [prompt for prompt, _ in RAGGED], **options)


_traces: dict[tuple, plain.Trace] = {}


def trace(model, name: str, ids=None, prompt: int = PROMPT) -> plain.Trace:
    """The reference's decode of one sequence, computed once."""
    ids = ids or token_ids(LENGTH)
    key = (id(model), name, tuple(ids), prompt)
    if key not in _traces:
        case = CASES[name]
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        with torch.inference_mode():
            reference = plain.Reference(
                model,
                case.method,
                final_length=len(ids),
                prefill_len=prompt,
                rotation=rotation(getattr(config, "num_key_value_heads", 4), head_dim),
                codec=case.codec and smooth,
            )
            _traces[key] = reference.run(ids)
    return _traces[key]


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == expected.shape
    difference = float((got - expected).abs().max())
    assert difference <= tolerance, f"largest difference {difference:.3g}"


def largest_difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max())


# Against the reference


@every_model
@every_case
def test_replay_is_the_reference(model, name):
    expected = trace(model, name)
    assert expected.margin > WELL_APART, "these ids make a choice that rounding decides"
    assert_close(run_one(model, CASES[name]).logits[0], expected.logits)


@pytest.mark.parametrize("model", ["tiny_qwen2", "tiny_qwen3", "tiny_mistral"], indirect=True)
@pytest.mark.parametrize("name", ["full", "infinigen"])
def test_replay_is_the_reference_in_other_families(model, name):
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
    original = replay._Block._select

    def select(block, exact):
        selection = original(block, exact)
        kv_heads = block.key.shape[1]
        heads = selected.setdefault(block.layer, [[] for _ in range(kv_heads)])
        mask = selection.mask[0].expand(kv_heads, -1, -1)
        tokens = block.session.tokens[0, : block.stop]
        for head, rows in enumerate(mask):
            heads[head] += [set(tokens[row].tolist()) for row in rows]
        counted = mask.sum(-1).double().mean(0)
        assert torch.equal(counted, selection.count[0].expand_as(counted))
        return selection

    monkeypatch.setattr(replay._Block, "_select", select)
    return selected


@pytest.mark.parametrize("bits, group_size", [(4, 8), (2, 64), (1, 5)])
def test_quantized_reads_are_the_references(tiny_gqa, bits, group_size):
    """An element on the edge of two codes may fall either way, so means are compared, not the largest difference."""
    ids = token_ids(LENGTH)
    case = Case(Quantized(num_bits=bits, group_size=group_size), Codec(f"int{bits}", group_size))

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
    assert got.reads.kv_frac == pytest.approx((2 + 2 * (bits + 32 * num_groups / 16) / 16) / 4)


# Sizes


@pytest.mark.parametrize("multiplicity", [None, [2, 1, 3]])
@every_case
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
    assert reads.kv_frac == pytest.approx(plain.kv_frac(traces, bits), abs=1e-9)
    code_bits = 16 if case.codec is None else 4
    # Below the root, rounding of the sums counts by its square root.
    assert reads.kv_frac_artifact == pytest.approx(plain.kv_frac_artifact(traces, code_bits), abs=1e-7)
    if case.codec is None:
        assert reads.attention_recall == pytest.approx(plain.attention_recall(traces), abs=1e-5)
    else:
        assert reads.attention_recall is None
    reads.check_fired()


def test_recall_is_measured_on_demand(tiny_gqa):
    assert run_one(tiny_gqa, CASES["h2o"]).reads.attention_recall is None
    assert run_one(tiny_gqa, CASES["full"], measure_recall=True).reads.attention_recall == 1


@every_case
def test_merged_reads_are_those_of_the_batch(tiny_gqa, name):
    batch = run_ragged(tiny_gqa, CASES[name], measure_recall=True).reads
    parts = [
        run_one(tiny_gqa, CASES[name], ids, prompt, measure_recall=True).reads
        for ids, (prompt, _) in zip(RAGGED_IDS, RAGGED, strict=True)
    ]
    merged = parts[0] + parts[1] + parts[2]
    for field in ("rows", "kv_frac", "kv_frac_artifact", "attention_recall"):
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
    attend = replay._DecodePass.attention

    def skip_last(self, layer, query, key, value):
        return query.transpose(1, 2) if layer == 3 else attend(self, layer, query, key, value)

    monkeypatch.setattr(replay._DecodePass, "attention", skip_last)
    with pytest.raises(UserError, match="ran on 0 of 37 decode rows"):
        run_one(tiny_gqa, CASES["streaming"]).reads.check_fired()


# Padding, chunks, calls


@every_model
@every_case
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
    original = replay._Block.__init__

    def count_block(block, *arguments):
        blocks.append(block)
        original(block, *arguments)

    monkeypatch.setattr(replay._Block, "__init__", count_block)
    monkeypatch.setattr(h2o, "PROMPT_CHUNK", 7)
    for limit in ({"MAX_CHUNK": 16}, {"SCORES_PER_CHUNK": 1}):
        with monkeypatch.context() as patch:
            for constant, value in limit.items():
                patch.setattr(replay, constant, value)
            got = run_ragged(tiny_gqa, CASES[name], measure_recall=True)
        assert len(blocks) > 4, "one chunk a layer tests nothing"
        blocks.clear()
        for rows, wanted in zip(got.logits, expected.logits, strict=True):
            assert_close(rows, wanted)
        assert got.reads.kv_frac == pytest.approx(expected.reads.kv_frac)
        assert got.reads.attention_recall == pytest.approx(expected.reads.attention_recall, abs=1e-5)


@pytest.mark.parametrize("calls", [(1, 2, 20), tuple(range(1, 37))], ids=["four", "one-row"])
@every_case
def test_several_calls_are_one(tiny_gqa, name, calls):
    """One row a call is live decoding's rhythm; the last calls hold sequences that are padding alone."""
    expected = run_ragged(tiny_gqa, CASES[name])
    got = run_ragged(tiny_gqa, CASES[name], calls=calls)
    for rows, wanted in zip(got.logits, expected.logits, strict=True):
        assert_close(rows, wanted)
    assert got.reads.kv_frac == pytest.approx(expected.reads.kv_frac)


SMALLEST = {
    "h2o": H2O(heavy_frac=0.01, recent_frac=0.0),
    "h2o-recent": H2O(heavy_frac=0.0, recent_frac=0.05),
    "streaming": Streaming(kv_frac=0.05, num_sinks=0),
    "oracle": Oracle(fixed_fetch=1),
    "infinigen": InfiniGen(fixed_fetch=1),
    "full": Full(),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_padding_poisons_nothing_where_a_single_token_is_kept(tiny_gqa, name):
    """A padding row may then have nothing left to read, and its softmax must not reach real rows."""
    case = Case(SMALLEST[name])
    sequences, prompts = [token_ids(24), token_ids(24, 1), token_ids(22, 2)], [6, 6, 1]
    batch = [ids[:p] for ids, p in zip(sequences, prompts, strict=True)]
    with attach(tiny_gqa) as attached:
        session = open_session(attached, case, [24, 24, 22], 6 + 10 + 21)
        session.prefill(*pad(batch, left=True))
        firsts = [ids[p:end] for ids, p, end in zip(sequences, prompts, (16, 9, 1), strict=True)]
        session.decode(*pad(firsts, left=False))
        rest, valid = pad([ids[end:] for ids, end in zip(sequences, (16, 9, 1), strict=True)], left=False)
        got = attached.logits(session.decode(rest, valid))
        assert 0 < session.reads.kv_frac <= 1
    for row, (ids, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        alone = run_one(tiny_gqa, case, ids, prompt).logits[0]
        assert_close(got[row][valid[row]], alone[-int(valid[row].sum()) :])


# Forks


@every_case
@pytest.mark.parametrize("model", ["tiny_gqa", "tiny_opt"], indirect=True)
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
        trunk = root.fork(torch.tensor([0, 1]), torch.tensor(final), 20 + 4)
        trunk.decode(*pad(shared, left=False), torch.tensor([2, 1]))
        stems = torch.tensor([parent for parent, _ in choices])
        own = [tokens[len(shared[parent]) :] for parent, tokens in choices]
        tips = trunk.fork(stems, torch.tensor(final)[stems], 24 + max(map(len, own)))
        ids, valid = pad(own, left=False)
        got = attached.logits(tips.decode(ids, valid))
        again = trunk.fork(stems, torch.tensor(final)[stems], 24 + max(map(len, own)))
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
    assert together.kv_frac == pytest.approx(separate.kv_frac)
    assert together.kv_frac_artifact == pytest.approx(separate.kv_frac_artifact)


# The contract's edges


# Not h2o-heavy: it may evict every new token at once, so that nothing later depends on how a row ran.
@every_model
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("full", "h2o-heavy")])
def test_an_off_by_one_prefill_len_shows(model, name):
    right = run_one(model, CASES[name]).logits[0][1:]
    wrong = run_one(model, CASES[name], prompt=PROMPT + 1).logits[0]
    assert largest_difference(right, wrong) > 10 * TOLERANCE


LIMITS = {
    "h2o-halves": H2O(heavy_frac=0.5, recent_frac=0.5),
    "h2o-heavy": H2O(heavy_frac=1.0, recent_frac=0.0),
    "h2o-recent": H2O(heavy_frac=0.0, recent_frac=1.0),
    "streaming": Streaming(kv_frac=1.0),
    "oracle": Oracle(alpha=inf, max_fetch_frac=1.0),
    "oracle-fixed": Oracle(fixed_fetch=LENGTH),
    "infinigen-skew": InfiniGen(alpha=inf, max_fetch_frac=1.0),
    "infinigen": InfiniGen(alpha=inf, max_fetch_frac=1.0, skew=False),
    "infinigen-alpha": InfiniGen(alpha=1e6, max_fetch_frac=1.0),
    "infinigen-fixed": InfiniGen(fixed_fetch=10 * LENGTH),
}


@every_model
@pytest.mark.parametrize("name", LIMITS)
def test_limit_cases_are_the_full_cache(model, name):
    full = run_ragged(model, CASES["full"]).logits
    limit = run_ragged(model, Case(LIMITS[name]), measure_recall=True)
    for got, expected in zip(limit.logits, full, strict=True):
        assert_close(got, expected, 2e-5)
    assert limit.reads.kv_frac == limit.reads.kv_frac_artifact == 1
    assert limit.reads.attention_recall == pytest.approx(1, abs=1e-6)


def test_an_exact_codec_is_no_codec(tiny_gqa):
    for method in (Full(), CASES["h2o"].method):
        got = run_ragged(tiny_gqa, Case(method, Codec("fp32")))
        expected = run_ragged(tiny_gqa, Case(method))
        for rows, wanted in zip(got.logits, expected.logits, strict=True):
            assert_close(rows, wanted, 2e-5)
        assert got.reads.kv_frac == pytest.approx(expected.reads.kv_frac)


@every_case
def test_a_second_batch_is_as_if_it_were_the_first(tiny_gqa, name):
    second = [token_ids(LENGTH, 8), token_ids(40, 9)]
    with attach(tiny_gqa) as attached:
        alone = run(attached, CASES[name], second, [PROMPT, 5])
        run(attached, CASES[name], [token_ids(LENGTH)], [PROMPT])
        again = run(attached, CASES[name], second, [PROMPT, 5])
    assert again.reads == alone.reads
    for got, expected in zip(again.logits, alone.logits, strict=True):
        assert torch.equal(got, expected)


# Order of calls, refusals


def test_decode_before_prefill_and_a_second_prefill_raise(tiny_gqa):
    ids, valid = pad([token_ids(5)], left=True)
    with attach(tiny_gqa) as attached:
        session = open_session(attached, CASES["full"], [20], 20)
        with pytest.raises(RuntimeError, match="prefill first"):
            session.decode(ids, valid)
        session.prefill(ids, valid)
        with pytest.raises(RuntimeError, match="once"):
            session.prefill(ids, valid)


@pytest.mark.parametrize("name", [name for name in CASES if name != "full"])
def test_a_method_that_leaves_no_layer_is_refused(tiny_gqa, name):
    method = replace(CASES[name].method, num_exempt_layers=4)
    message = r"num_exempt_layers=4: must be .*4 layers"
    with attach(tiny_gqa) as attached, pytest.raises(ValueError, match=message):
        open_session(attached, Case(method, CASES[name].codec), [20], 20)


def test_a_window_shorter_than_the_sequence_is_refused():
    model = tiny_model("mistral", num_key_value_heads=2, sliding_window=16)
    with attach(model) as attached:
        session = open_session(attached, CASES["full"], [16], 16)
        ids = torch.tensor([token_ids(16)])
        got = attached.logits(session.prefill(ids, torch.ones_like(ids, dtype=torch.bool)))
        with pytest.raises(UserError, match="17.*sliding window.*16"):
            open_session(attached, CASES["full"], [17], 17)
        with pytest.raises(UserError, match="17.*sliding window.*16"):  # the rows come by a fork
            open_session(attached, CASES["full"], [17], 10)
        # Padding is no token: sequences that fit may be padded beyond the window.
        run(attached, CASES["full"], [token_ids(16), token_ids(16, 1)], [12, 2])
    with torch.inference_mode():
        assert_close(got, model(ids).logits)


def test_the_window_of_a_model_that_does_not_use_it_is_none():
    model = tiny_model("qwen2", num_key_value_heads=2, use_sliding_window=False, sliding_window=16)
    assert_close(run_one(model, CASES["full"]).logits[0], trace(model, "full").logits)


def test_an_unsupported_family_is_refused_with_the_supported_ones():
    model = tiny_model("gpt2")
    message = r"gpt2.*not supported.*llama, mistral, qwen2, qwen3, opt"
    with pytest.raises(UserError, match=message), attach(model):
        pass


# Nothing is left behind


def fingerprint(model) -> dict:
    return {
        "config": model.config.to_dict(),
        "implementation": model.config._attn_implementation,
        "hooks": [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()],
        "methods": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "attention": set(AttentionInterface()._global_mapping),
        "mask": set(AttentionMaskInterface()._global_mapping),
        "logits": model(torch.tensor([token_ids(12)])).logits.tolist(),
    }


@every_model
def test_attaching_leaves_nothing_behind(model):
    before = fingerprint(model)
    run_ragged(model, CASES["infinigen"])
    assert fingerprint(model) == before


@every_model
def test_attaching_leaves_nothing_behind_after_an_error(model, monkeypatch):
    before = fingerprint(model)

    def fail(*arguments):
        raise ArithmeticError

    monkeypatch.setattr(replay._DecodePass, "attention", fail)
    with attach(model) as attached, pytest.raises(ArithmeticError):
        run(attached, CASES["infinigen"], [token_ids(LENGTH)], [PROMPT])
    assert fingerprint(model) == before
    with pytest.raises(ArithmeticError), attach(model) as attached:
        run(attached, CASES["infinigen"], [token_ids(LENGTH)], [PROMPT])
    assert fingerprint(model) == before
    monkeypatch.undo()
    run_ragged(model, CASES["infinigen"])


@every_model
def test_a_forward_outside_a_session_raises(model):
    with attach(model), pytest.raises(RuntimeError, match=r"Attached\.forward"), torch.inference_mode():
        model(torch.tensor([token_ids(12)]))


def test_two_models_are_attached_at_once(tiny_gqa, tiny_opt):
    alone = [run_one(model, CASES["h2o"]).logits[0] for model in (tiny_gqa, tiny_opt)]
    with attach(tiny_gqa) as one, attach(tiny_opt) as other:
        for attached, expected in zip((one, other), alone, strict=True):
            got = run(attached, CASES["h2o"], [token_ids(LENGTH)], [PROMPT]).logits[0]
            assert torch.equal(got, expected)

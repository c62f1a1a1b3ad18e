"""Replay: against the model, against itself in other batches and calls, and at its limits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.passes import DensePrompts
from harness.model.prompts import kept_bytes, shared_prompt
from harness.model.rereading import run_prompts
from harness.replay import decode_pass as passes
from methods import attention
from methods.codecs.integers import IntegerCodec
from methods.codecs.kvarn import KvarnCodec
from methods.codecs.split import every_codec
from methods.prompt_evicting import PromptEvicting
from methods.quest import Quest
from methods.retroinfer import RetroInfer
from methods.rocketkv import RocketKV
from methods.shadowkv import ShadowKV
from methods.twilight import Twilight
from tests.cases import CASES, WIDE, Case
from tests.living import PROMPTS, replay, tiny, token_batch
from tests.replaying import (
    RAGGED,
    RAGGED_IDS,
    assert_close,
    open_session,
    pad,
    run,
    run_one,
    run_ragged,
    token_ids,
)
from tests.tiny_models import mixed


def has_steps(case: Case) -> bool:
    """True if the values of a layer are coded as integers."""
    codecs = [] if case.codec is None else every_codec(case.codec)
    return any(isinstance(codec.values, IntegerCodec | KvarnCodec) for codec in codecs)


WITHOUT_STEPS = [name for name, case in CASES.items() if not has_steps(case)]
"""Cases of which no value lies at the border of two codes, where rounding decides."""
EVICTING_ONCE = [case.method for case in CASES.values() if isinstance(case.method, PromptEvicting)]
TOO_SHORT = [method for method in EVICTING_ONCE if method.kept_tokens is None]
TOO_SHORT += [case.method for case in CASES.values() if isinstance(case.method, RetroInfer)]
"""Methods that refuse a prompt of one token, as the batch of `RAGGED` has."""
BATCHED = [name for name in WITHOUT_STEPS if CASES[name].method not in TOO_SHORT]

OF_OTHER_SHAPES = (
    "residual-groups",
    "layers-residual",
    "quest-union",
    "oracle+smooth",
    "vattention-true",
)
"""Cases beside one of each method whose masks are of a union, or whose last tokens are exact."""


# Padding, chunks, calls


# Without a codec every shipped method has this check in test_contract.py.
@pytest.mark.parametrize("name", [name for name in BATCHED if CASES[name].codec is not None])
def test_a_padded_batch_is_its_sequences_alone(tiny_gqa, name):
    together = run_ragged(tiny_gqa, CASES[name]).logits
    for ids, (prompt, _), got in zip(RAGGED_IDS, RAGGED, together, strict=True):
        assert_close(got, run_one(tiny_gqa, CASES[name], ids, prompt).logits[0])


def test_the_model_runs_over_no_padding(tiny_gqa):
    num_rows = []

    def count(_, args):
        num_rows.append(args[0].shape[:2].numel())

    with attach(tiny_gqa) as attached:
        hook = tiny_gqa.model.layers[0].mlp.register_forward_pre_hook(count)
        run(attached, CASES["full"], RAGGED_IDS, [prompt for prompt, _ in RAGGED])
    hook.remove()
    assert sum(num_rows) == sum(length for _, length in RAGGED)


@pytest.mark.parametrize("name", [name for name in BATCHED if name in WIDE])
def test_chunks_change_nothing(tiny_gqa, name, monkeypatch):
    expected = run_ragged(tiny_gqa, CASES[name], measure_recall=True)
    monkeypatch.setattr(attention, "PROMPT_CHUNK", 7)
    monkeypatch.setattr(passes, "SCORES_PER_CHUNK", 1)  # 16 rows, the least
    got = run_ragged(tiny_gqa, CASES[name], measure_recall=True)
    for rows, wanted in zip(got.logits, expected.logits, strict=True):
        assert_close(rows, wanted)
    assert got.reads.budget == pytest.approx(expected.reads.budget)
    assert got.reads.attention_recall == pytest.approx(expected.reads.attention_recall, abs=1e-5)


@pytest.mark.parametrize("name", [name for name in BATCHED if name in WIDE or name in OF_OTHER_SHAPES])
def test_gathered_columns_give_what_a_mask_over_all_gives(tiny_gqa, name, monkeypatch):
    """The mask is the plain path. What it hides has a weight of 0, so only the order of sums may differ."""
    case = CASES[name]
    monkeypatch.setattr(passes, "GATHERED_SHARE", -1.0)
    expected = run_ragged(tiny_gqa, case, measure_recall=True)
    monkeypatch.setattr(passes, "GATHERED_SHARE", 1.0)
    monkeypatch.setattr(passes, "GATHERED_SCORES", 0)
    attend_to_masked = passes._Block._attend_to_masked

    def noted(block, selection, visible, exact):
        has_log_mass = selection.rest is not None and selection.rest.log_mass is not None
        needs_all = selection.bias is not None or has_log_mass or block.exact is not None
        assert visible is None or needs_all, "a selection was masked"
        return attend_to_masked(block, selection, visible, exact)

    monkeypatch.setattr(passes._Block, "_attend_to_masked", noted)
    with_recall = run_ragged(tiny_gqa, case, measure_recall=True)
    for got in with_recall, run_ragged(tiny_gqa, case):
        for rows, wanted in zip(got.logits, expected.logits, strict=True):
            assert_close(rows, wanted, 1e-5)
    assert with_recall.reads.attention_recall == pytest.approx(expected.reads.attention_recall, abs=1e-6)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "deepseek_v3"])
def test_columns_are_gathered_with_sinks_softcaps_and_latents(family, monkeypatch):
    expected = run_ragged(mixed(family), CASES["infinigen"]).logits
    monkeypatch.setattr(passes, "GATHERED_SHARE", 1.0)
    monkeypatch.setattr(passes, "GATHERED_SCORES", 0)
    for rows, wanted in zip(run_ragged(mixed(family), CASES["infinigen"]).logits, expected, strict=True):
        assert_close(rows, wanted, 1e-5)


def test_one_causal_pass_over_all_columns_is_the_rows_alone(tiny_gqa, monkeypatch):
    causal = run_one(tiny_gqa, CASES["full"], calls=[9]).logits[0]
    monkeypatch.setattr(passes.DecodePass, "_is_causal", lambda *_: False)
    assert_close(causal, run_one(tiny_gqa, CASES["full"]).logits[0], 1e-5)


# Forks


@pytest.mark.parametrize("name", [name for name in BATCHED if name in (*WIDE, "residual-groups")])
def test_a_fork_is_each_continuation_alone(tiny_gqa, name):
    """Contexts of two lengths; the first has three choices, of which two share rows, the second two."""
    contexts = [token_ids(20), token_ids(13, 1)]
    longest = token_ids(9, 2)
    choices = [(0, longest), (0, longest[:4] + token_ids(3, 3)), (1, token_ids(6, 4)), (1, token_ids(2, 5))]
    final = [32, 25]
    case = CASES[name]
    with attach(tiny_gqa) as attached:
        root = open_session(attached, case, final, 20, measure_recall=True)
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
            session = open_session(attached, case, [final[parent]], 32, measure_recall=True)
            session.prefill(*pad([contexts[parent]], left=True))
            wanted = attached.logits(session.decode(*pad([tokens], left=False)))[0]
            assert_close(got[row][valid[row]], wanted[-len(own[row]) :])
            alone.append(session.reads)
    together = root.reads + trunk.reads + tips.reads
    separate = sum(alone[1:], alone[0])
    assert together.rows == separate.rows
    assert together.budget == pytest.approx(separate.budget)
    assert together.device_frac == pytest.approx(separate.device_frac)
    # These keep as much of a sequence as a batch's longest needs.
    if not isinstance(case.method, Quest | Twilight | ShadowKV | RetroInfer | RocketKV):
        assert together.resident_frac == pytest.approx(separate.resident_frac)
    assert together.budget_artifact == pytest.approx(separate.budget_artifact)
    assert together.attention_recall == pytest.approx(separate.attention_recall, abs=1e-5)


# The contract's edges


# Prompts that runs share


def test_methods_that_share_a_prompt_run_it_once_and_get_what_they_get_alone(monkeypatch):
    """In one process, one method after another: none changes what the next one starts from."""
    prompts, model, passes = DensePrompts(), tiny("gqa"), []
    forward = Attached.forward

    def counted(self, ids, *args, **kwargs):
        passes.append(ids.shape)
        return forward(self, ids, *args, **kwargs)

    monkeypatch.setattr(Attached, "forward", counted)

    def replayed(case: Case, shared: DensePrompts | None) -> torch.Tensor:
        with attach(model, shared) as attached:
            return replay(attached, case, PROMPTS["padded"]).logits

    alone = {name: replayed(CASES[name], None) for name in (*WIDE, "kvzip-plus")}
    del passes[:]
    for name, expected in alone.items():
        assert torch.equal(replayed(CASES[name], prompts), expected), name
    dense = sum(shape == (2, max(PROMPTS["padded"])) for shape in passes)
    assert dense == 2, "once more for the inputs of layers"


def test_a_prompt_is_kept_in_half_of_what_the_disk_has_free_then(monkeypatch):
    """Another process may have filled it since the first."""
    ids, disk = torch.tensor([[3, 5, 7, 9]]), SimpleNamespace(free=2**20)
    monkeypatch.setattr("harness.model.passes.disk_usage", lambda _: disk)
    real = torch.ones_like(ids, dtype=torch.bool)
    with attach(tiny("gqa"), DensePrompts()) as attached:
        assert shared_prompt(attached, ids, real) is not None
        num_bytes = kept_bytes(attached, ids.numel())
        for disk.free, is_kept in ((2 * num_bytes - 1, False), (2 * num_bytes, True)):
            assert (shared_prompt(attached, ids + 1, real) is not None) == is_kept
            assert shared_prompt(attached, ids, real) is not None, "what is kept takes no more"


def test_a_kept_prompt_leaves_the_models_cache_as_a_pass_does():
    """Some models count positions from it."""
    ids, real = token_batch(PROMPTS["even"])
    with attach(tiny("gqa"), DensePrompts()) as attached:
        for _ in "run", "kept":
            model_cache = attached.new_cache()
            run_prompts(attached, CASES["full"].method, None, ids, real, lambda *_: None, model_cache)
            assert model_cache.num_columns == ids.shape[1]

"""Models with sparse attention of their own: what their indexers choose is read, live, in replay and in the prompt."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import cache, wraps

import pytest
import torch
from cases import CASES, Case, Smooth, shipped
from living import PROMPTS, STEPS, force, live, open_live, replay, token_batch

from harness.api.cached_model import CachedModel
from harness.checks import contract
from harness.checks.families import tiny_family
from harness.decode.links import EmulatedLink
from harness.decode.needs import Plan, sizes_of
from harness.decode.share import BatchLengths
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.calls import Call
from harness.model.dense_prompts import DensePrompts
from harness.model.indexer import own_indexer
from harness.model.policies import fitted
from harness.model.prompts import prompt_bytes
from harness.settings.config import LatencyConfig
from harness.speed.timed_run import TimedRun, time_run
from methods.base import IndexShape, TokenCounts
from methods.codecs.channel import ChannelCodec
from methods.codecs.integers import IntegerCodec
from methods.codecs.split import SplitCodec
from methods.dsa import Dsa, DsaState, FittedDsa, mask_of
from methods.full import Full

TOP_K, HEAD_DIM = 20, 16
"""Of the tiny models' indexers."""
OWN = {
    "axk2": (True, True, True, True),
    "deepseek_v32": (True, True, True, True),
    "glm_moe_dsa": (True, False, True, False),
    "hy_v4": (True, True, False, True),
}
"""The layers that have an indexer. The others reuse what the one before chose."""
LATENT = 24 + 8
"""Elements of a cached token: its latent and its rotary key."""
NEW = 12
PADDED, LONG = (24, 15), (34, 25)

families = pytest.mark.parametrize("name", OWN)


@cache
def model_of(name: str):
    """A tiny random model, one for all tests, whose texts do not end by themselves."""
    model = tiny_family(name)
    model.generation_config.eos_token_id = None
    return model


def read_by_rows(selections: list, num_layers: int) -> list[dict]:
    """By layer, the tokens that each (sequence, row) reads: a set of positions, the own one among them if it is."""
    read: list[dict] = [{} for _ in range(num_layers)]
    for layer, rows, selection in selections:
        for sequence, positions in enumerate(rows.positions.tolist()):
            for row, position in enumerate(positions):
                if bool(rows.real[sequence, row]):
                    tokens = rows.slot_positions[sequence, 0][selection.mask[sequence, 0, row]].tolist()
                    own = [position] if bool(selection.own[sequence, row]) else []
                    read[layer][sequence, position] = {*tokens, *own}
                    assert int(selection.num_read[sequence, row]) == len(tokens)
    return read


@pytest.fixture
def selections(monkeypatch):
    """What every `select` of the method was asked and gave."""
    seen, select = [], DsaState.select

    def note(state, layer, rows):
        selection = select(state, layer, rows)
        seen.append((layer, rows, selection))
        return selection

    monkeypatch.setattr(DsaState, "select", note)
    return seen


def chosen_by(model, ids: torch.Tensor) -> list[torch.Tensor]:
    """What transformers' own pass over one text gives each layer to attend to, as masks [rows, tokens]."""
    found = []

    def note(module, args, kwargs, output):
        found.append(mask_of(output, ids.shape[1])[0])

    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    hooks = [indexer.register_forward_hook(note, with_kwargs=True) for indexer in indexers]
    with torch.inference_mode():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [mask.tril() for mask in found]


# What is read


@pytest.mark.parametrize("way", ["replay", "blocks", "live"])
@families
def test_rows_read_the_tokens_that_the_models_own_indexers_choose(name, way, selections):
    """Row by row and layer by layer, against the indices in transformers' pass over each sequence alone."""
    model, own = model_of(name), OWN[name]
    ids, real = token_batch(LONG)
    with attach(model) as attached:
        assert attached.geometry.index == IndexShape(HEAD_DIM, TOP_K, own)
        if way == "live":
            live(attached, Case(Dsa()), LONG)
        else:
            replay(attached, Case(Dsa()), LONG, rows_per_block=3 if way == "blocks" else None)
        read = read_by_rows(selections, len(own))
    without_own = 0
    for sequence, prompt in enumerate(LONG):
        of_layers = chosen_by(model, ids[sequence, real[sequence]][None])
        assert len(of_layers) == sum(own)
        for layer in range(len(own)):
            chosen = of_layers[sum(own[: layer + 1]) - 1]
            for position in range(prompt, prompt + STEPS):
                expected = {*chosen[position].nonzero().flatten().tolist()}
                assert read[layer][sequence, position] == expected, (layer, sequence, position)
                assert len(expected) == TOP_K
                without_own += position not in expected
    assert without_own > 10, "the current token competes, and often loses"


@pytest.mark.parametrize(("placement", "method"), [("device", Full()), ("host", Dsa())])
@families
def test_generate_gives_the_tokens_and_logits_of_transformers(name, placement, method):
    """A padded batch, greedily, before and beyond `index_topk` tokens; within float noise, since attention is to
    latents and not to what they expand to."""
    model = model_of(name)
    ids, real = token_batch(PADDED, 0)
    asked = {"attention_mask": real.long(), "max_new_tokens": NEW, "do_sample": False}
    asked |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, **asked)
    with (
        attach(model) as attached,
        EmulatedLink(1e12) as link,
        CachedModel(attached, method, placement=placement, link=link) as cached,
    ):
        got = cached.generate(ids, **asked)
    assert torch.equal(got.sequences, expected.sequences)
    logits = torch.stack(expected.logits, 1)
    assert float((torch.stack(got.logits, 1) - logits).abs().max() / logits.abs().max()) < 1e-5
    assert cached.usage.budget < 1 and (cached.usage.h2d_bytes > 0) == (placement == "host")


@families
def test_full_is_dsa(name):
    with attach(model_of(name)) as attached:
        full, dsa = (replay(attached, Case(method), PADDED) for method in (Full(), Dsa()))
        assert torch.equal(full.logits, dsa.logits) and full[1:] == dsa[1:]


@pytest.mark.parametrize("codec", [None, Smooth()], ids=["exact", "coded"])
def test_the_contract_holds(codec):
    """All checks of `experiment=contract`, on indexers in all layers and in some."""
    verdicts = []
    for where, trial in contract._trials(Dsa(), codec, torch.device("cpu")):
        assert contract._refusal(trial) is None
        for name, check in contract.CHECKS.items():
            verdicts.append((where, name, contract.judge(check, trial)))
    assert len(verdicts) == 2 * 2 * len(contract.CHECKS)
    assert {finding.verdict for _, _, finding in verdicts} == {"ok"}, verdicts


def test_the_contract_can_fail(monkeypatch):
    """A state that forgets the first token where it is asked for many rows."""
    right = DsaState.select

    def forgetful(state, layer, rows):
        selection = right(state, layer, rows)
        if rows.positions.shape[1] > 1:
            selection.mask[..., 0] = False
        return selection._replace(num_read=selection.mask[:, 0].sum(-1))

    monkeypatch.setattr(DsaState, "select", forgetful)
    where, trial = next(contract._trials(Dsa(), None, torch.device("cpu")))
    assert contract.judge(contract.live_is_replay, trial).verdict == "FAILED"


# Layers that reuse indices


@pytest.mark.parametrize(
    ("method", "choosing"),
    [
        (Dsa(), (True, True, True, True)),
        (Dsa(every=2), (True, False, True, False)),
        (Dsa(every=3), (True, False, False, True)),
        (Dsa(layers=(2,)), (True, False, True, False)),
        (Dsa(layers=()), (True, False, False, False)),
    ],
)
def test_layers_that_do_not_choose_reuse_what_was_chosen_last(method, choosing):
    index = IndexShape(HEAD_DIM, TOP_K, (True,) * 4)
    bound = FittedDsa(every=method.every, layers=method.layers, index=index)
    assert tuple(map(bound.chooses, range(4))) == choosing
    assert [bound.when_of(layer) == "own_query" for layer in range(4)] == [*choosing]


def test_every_counts_the_layers_that_have_an_indexer():
    bound = FittedDsa(every=2, index=IndexShape(HEAD_DIM, TOP_K, (True, False, True, False, True)))
    assert [layer for layer in range(5) if bound.chooses(layer)] == [0, 4]


@pytest.mark.parametrize("way", [replay, live])
def test_index_cache_is_a_model_whose_layers_share_indices(way):
    """`every=2` on a model with an indexer in every layer, against transformers' own model of the same weights whose
    layers 1 and 3 are `shared`. The prompt has fewer than `index_topk` tokens, so both attend to all of it."""
    whole = tiny_family("glm_moe_dsa", indexer_types=["full"] * 4)
    shared = tiny_family("glm_moe_dsa", indexer_types=["full", "shared"] * 2)
    kept = {name: weight for name, weight in whole.state_dict().items() if name in shared.state_dict()}
    shared.load_state_dict(kept)
    prompts, steps = (TOP_K - 2, 9), 16
    ids, real = token_batch(prompts, steps)
    with attach(whole) as attached:
        got = way(attached, Case(Dsa(every=2)), prompts, steps=steps)
        otherwise = way(attached, Case(Dsa()), prompts, steps=steps)
    for sequence in range(2):
        with torch.inference_mode():
            expected = shared(ids[sequence, real[sequence]][None], use_cache=False).logits[0, -steps - 1 :]
        off = (got.logits[sequence] - expected).abs().max() / expected.abs().max()
        assert float(off) < 1e-5
    assert float((otherwise.logits - got.logits).abs().max()) > 1e-2, "it is another method"


# Bytes and hits


@pytest.mark.parametrize(
    ("name", "method", "choosing"),
    [
        ("deepseek_v32", Full(), 4),
        ("deepseek_v32", Dsa(every=2), 2),
        ("glm_moe_dsa", Dsa(), 2),
        ("hy_v4", Dsa(), 3),
    ],
)
def test_bytes_on_the_device_and_over_the_link_are_exact(name, method, choosing, selections):
    """On the device: index keys of the layers that choose, with room for all tokens, and two buffers. Over the link:
    the rows that were chosen, but for the own one."""
    with (
        attach(model_of(name)) as attached,
        EmulatedLink(1e12) as link,
        closing(open_live(attached, Case(method), placement="host", link=link)) as session,
    ):
        force(session, LONG)
        batch, columns, slot_bytes = len(LONG), max(LONG) + STEPS, LATENT * 4
        keys = [tensor for state in session.states for tensor in state.keys.values()]
        assert len(keys) == choosing
        assert sum(tensor.nbytes for tensor in keys) == choosing * batch * columns * HEAD_DIM * 4
        assert session.host_bytes == 4 * batch * columns * slot_bytes
        buffers = sum(buffer.nbytes for share in session.shares.values() for buffer in share.buffers)
        assert buffers == 2 * batch * (TOP_K + 1) * slot_bytes, "for what a layer chooses, and the own row"
        assert session.device_bytes >= buffers + sum(tensor.nbytes for tensor in keys)
        # Over the link
        by_layer = [0] * 4
        for layer, _, selection in selections:
            by_layer[layer] += int(selection.num_read.sum())
        assert len(selections) == 4 * STEPS
        assert session.h2d_bytes == sum(by_layer) * slot_bytes
        assert session.d2h_bytes == 4 * batch * STEPS * slot_bytes
        # Asked for by a layer's own query
        waiting = [cache.policy.number for cache in session.caches if cache.policy.when == "own_query"]
        assert len(waiting) == choosing
        assert int(session.late_bytes) == sum(by_layer[layer] for layer in waiting) * slot_bytes
        # Read on the device: what was chosen, the own row of every layer, and the index keys
        index_read = choosing * HEAD_DIM * 4 * sum(prompt + step for prompt in LONG for step in range(STEPS))
        own = 4 * batch * STEPS * slot_bytes
        assert float(session.reads.num_bytes) == pytest.approx(sum(by_layer) * slot_bytes + own + index_read)


@families
def test_shares_are_those_of_the_rows_that_are_read(name, selections):
    """`budget`, `device_frac` and `resident_frac` by hand, of a sequence whose prompt is shorter than `index_topk`."""
    prompt, choosing = TOP_K - 4, sum(OWN[name])
    with attach(model_of(name)) as attached:
        found = replay(attached, Case(Full()), (prompt,))
    rows = range(prompt, prompt + STEPS)
    read = [0.0] * STEPS
    for _, _, selection in selections:
        for step, number in enumerate(selection.num_read[0].tolist()):
            read[step] += number / 4
    assert read[: TOP_K - prompt] == [*range(prompt, TOP_K)], "all of it, as long as that is few"
    assert all(TOP_K - 1 <= number <= TOP_K for number in read[TOP_K - prompt :])
    budget = sum(number / cached for number, cached in zip(read, rows, strict=True)) / STEPS
    index = choosing * HEAD_DIM / (4 * LATENT)
    assert found.budget == pytest.approx(budget) and found.budget < 1
    assert found.device_frac == pytest.approx(budget + index)
    assert found.resident_frac == pytest.approx(index)


@pytest.mark.parametrize("gpu_cache", [1, 1.5])
@pytest.mark.parametrize(("name", "method"), [("glm_moe_dsa", Dsa()), ("deepseek_v32", Dsa(every=2))])
def test_as_many_rows_are_found_on_the_device_as_replay_counts(name, method, gpu_cache):
    with attach(model_of(name)) as attached, EmulatedLink(1e12) as link:
        ids, real = token_batch(LONG)
        counted = contract.open_replay(attached, contract.Setup(method, None, None), real, gpu_cache=gpu_cache)
        columns = max(LONG)
        counted.prefill(ids[:, :columns], real[:, :columns])
        counted.decode(ids[:, columns:], real[:, columns:])
        options = {"placement": "host", "link": link, "gpu_cache": gpu_cache}
        with closing(open_live(attached, Case(method), **options)) as session:
            force(session, LONG)
            assert session.h2d_bytes == counted.reads.rows_loaded.total() * LATENT * 4
            found, read = float(session.rows_found), float(session.rows_read)
            assert session.rows_loaded == read - found and 0.3 < found / read < 1
            # A share of each row in replay, one of all rows here; a row reads 19 or 20 tokens.
            assert counted.reads.hit_frac == pytest.approx(found / read, abs=0.01)


@pytest.mark.parametrize(
    ("name", "method", "gpu_cache"),
    [("glm_moe_dsa", Dsa(), 0), ("glm_moe_dsa", Dsa(), 1.5), ("deepseek_v32", Full(), 0)],
)
def test_the_bytes_of_a_session_are_known_before_it_is_opened(name, method, gpu_cache):
    options = {"placement": "host", "gpu_cache": gpu_cache}
    prompts = (24, 15)
    ids, real = token_batch(prompts, 0)
    with attach(model_of(name)) as attached, EmulatedLink(1e12) as link:
        with closing(open_live(attached, Case(method), 3, link=link, **options)) as session:
            session.prefill(ids, real)
            made, asked = session.device_bytes, session.bytes_needed
            activations = prompt_bytes(attached, real.numel())
        bound = fitted(attached, method)
        needs = Plan(sizes_of(attached, bound), bound, None, **options).needs(BatchLengths(prompts, 3), 10**9)
        assert needs.session == made and needs.asked == asked.device - activations


@pytest.mark.parametrize("method", [Full(), Dsa(every=2)])
def test_a_timed_run_is_of_the_models_own_method(method):
    """The full cache of such a model selects, so that its steps have a time for it, and rows on the device."""
    shape = LatencyConfig(prompt_len=24, gen_len=6, batch_size=2, warmup_steps=1, timed_steps=3, repeats=1)
    ids = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    with attach(model_of("deepseek_v32")) as attached, EmulatedLink(1e12) as link:
        timing = time_run(attached, ids, TimedRun(method, shape, "host"), link=link)
    metrics = timing.metrics
    assert metrics["prediction_s"] > 0 and 0 < metrics["budget"] < 1 and metrics["device_frac"] > metrics["budget"]
    chosen = metrics["h2d_bytes"] / (LATENT * 4)
    assert 4 * 2 * 5 * (TOP_K - 1) <= chosen <= 4 * 2 * 5 * TOP_K


# The prompt


@families
def test_a_kept_prompt_is_the_prompt(name):
    """Runs that share a pass start from its index keys."""
    with attach(model_of(name)) as attached:
        expected = replay(attached, Case(Dsa()), PADDED)
        alone = live(attached, Case(Dsa()), PADDED)
    with attach(model_of(name), DensePrompts(2**24)) as attached:
        for _ in range(2):
            assert torch.equal(replay(attached, Case(Dsa()), PADDED).logits, expected.logits)
        assert torch.equal(live(attached, Case(Dsa()), PADDED).logits, alone.logits)


def test_a_long_prompt_runs_in_parts(monkeypatch):
    with attach(model_of("glm_moe_dsa")) as attached:
        expected = replay(attached, Case(Full()), (60, 45))
        monkeypatch.setattr("harness.model.indexer.PAIRS_AT_ONCE", 1)
        monkeypatch.setattr("harness.model.attention.ROWS", 7)
        found = replay(attached, Case(Full()), (60, 45))
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=0)


# Other methods, and refusals


@pytest.mark.parametrize("case", ["quest", "h2o", "infinigen", "snapkv", "oracle"])
def test_other_methods_replace_the_indexers_in_decode_rows(case):
    """No index key is kept, and no indexer chooses: the rows are the method's."""
    free = Case(replace(CASES[case].method, dense_layers=0))
    with attach(model_of("deepseek_v32")) as attached:
        expected = replay(attached, free, PADDED)
        got = live(attached, free, PADDED)
        full = replay(attached, Case(Full()), PADDED)
    assert float((got.logits - expected.logits).abs().max()) <= contract.TOLERANCE
    assert float((got.logits - full.logits).abs().max()) > 1e-3
    assert torch.equal(expected.logits[:, 0], full.logits[:, 0]), "the prompt is the model's own"


SPLIT = SplitCodec(ChannelCodec("int4", 4), IntegerCodec("int4", 4), residual=8)


@pytest.mark.parametrize(
    ("name", "case", "error", "message"),
    [
        ("gqa", Case(Dsa()), UserError, "method=dsa: model family 'llama' has no indexer of its own; allowed: "),
        (
            "glm_moe_dsa",
            CASES["quest"],
            UserError,
            "dense_layers=2: model family 'glm_moe_dsa' reads .*allowed: 0",
        ),
        (
            "glm_moe_dsa",
            Case(Full(dense_layers=2), IntegerCodec("int4")),
            UserError,
            "dense_layers=2: .*allowed: 0",
        ),
        ("glm_moe_dsa", CASES["kvzip-plus"], UserError, "KVzip.* reads the prompt again"),
        ("glm_moe_dsa", Case(Full(dense_layers=0), SPLIT), UserError, "residual=8: .*allowed: 0"),
        ("glm_moe_dsa", Case(Dsa(layers=(0, 1))), UserError, r"layers=\[0, 1\]: must be layers .*\[0, 2\]"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(name, case, error, message):
    from conftest import tiny

    model = tiny(name) if name == "gqa" else model_of(name)
    with attach(model) as attached:
        for way in (replay, live):
            with pytest.raises(error, match=message) as caught:
                way(attached, case, PROMPTS["padded"])
            assert "\n" not in str(caught.value)


def test_settings_and_budgets():
    with pytest.raises(ValueError, match="every=2: must be 1 with method.layers"):
        Dsa(every=2, layers=(0,))
    with pytest.raises(ValueError, match="every=0: must be an integer >= 1"):
        Dsa(every=0)
    with pytest.raises(ValueError, match="no budget to set.*budget=nearest:0.1"):
        Dsa().with_budget(0.1)
    bound = FittedDsa(index=IndexShape(HEAD_DIM, TOP_K, (True,)))
    rows = [TokenCounts(cached, 5, 40) for cached in (TOP_K - 1, TOP_K, 30)]
    assert [bound.max_tokens_read(row, 0) for row in rows] == [TOP_K - 1, TOP_K, TOP_K]
    assert [bound.tokens_read(row, 0) for row in rows] == [TOP_K - 1, None, None]
    assert shipped("dsa").method == Dsa()


def test_a_model_that_does_not_hand_on_its_choice_is_refused(monkeypatch):
    """The traces of models whose code is other than expected."""
    model = tiny_family("deepseek_v32")
    monkeypatch.setattr("harness.model.indexer.MASK", "no_such_mask")
    with pytest.raises(UserError, match="its indexer takes no no_such_mask"), attach(model):
        pass
    model = tiny_family("deepseek_v32", index_topk=2**21)
    monkeypatch.setattr("harness.model.indexer.MASK", "attention_mask")
    monkeypatch.setattr("harness.model.indexer.MOST_KEYS", 64)
    with pytest.raises(UserError, match="its indexer does not choose a number of tokens"), attach(model):
        pass


SPOILED = {
    "numbers": lambda slots: slots.float(),
    "below 0": lambda slots: slots - 1,
    "one a row": lambda slots: slots[..., 0],
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_an_indexer_that_returns_something_else_is_refused(spoil):
    model = tiny_family("deepseek_v32")
    kind = type(model.model.layers[0].self_attn.indexer)
    forward = kind.forward

    @wraps(forward)
    def spoiled(module, *given, **more):
        return spoil(forward(module, *given, **more))

    message = "its indexer does not choose a number of tokens"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=message):
        patch.setattr(kind, "forward", spoiled)
        with attach(model):
            pass


@pytest.mark.parametrize(
    ("mask", "keys", "message"),
    [
        ((1, 2, 2), (1, 2, 8), None),
        ((1, 2), (1, 2, 8), "takes a mask that does not say what each row sees"),
        ((1, 1, 2, 2), (1, 2, 8), "takes a mask that does not say what each row sees"),
        ((1, 2, 2), (1, 1, 8), "has not one key for each token"),
        ((1, 2, 2), (1, 1, 2, 8), "has not one key for each token"),
    ],
)
def test_an_indexer_is_given_a_mask_of_its_rows_and_makes_a_key_for_each(mask, keys, message):
    class Indexer(torch.nn.Module):
        def forward(self, hidden_states, attention_mask, past_key_values=None):
            pass

    call = Call((torch.zeros(1, 2, 4), torch.ones(mask, dtype=torch.bool)), {})
    if message is None:
        assert own_indexer(Indexer(), call, torch.zeros(keys), "a family").head_dim == 8
        return
    with pytest.raises(UserError, match=f"model family 'a family' is not supported: its indexer {message}"):
        own_indexer(Indexer(), call, torch.zeros(keys), "a family")

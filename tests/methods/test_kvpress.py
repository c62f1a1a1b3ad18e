"""Presses of kvpress as methods: the tokens that stay are those of our own files and of the presses' own code; what a
press needs is handed to it in replay and live, for any batch; what cannot be a method is refused in one line."""

import dataclasses
import importlib.util
import pickle
import sys

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.checks.contract import budget_is_its_closed_form, live_is_replay, padded_is_alone
from harness.checks.two_ways import Trial
from harness.model import prompts as prompt_pass
from harness.model.attach import attach
from harness.model.prompts import run_prompt
from harness.replay.setup import Setup
from harness.run.cli import main
from harness.run.compose import load
from harness.run.runner import Run
from methods import kvpress
from methods.base import EMPTY
from methods.capkv import CapKV
from methods.criticalkv import CriticalKV
from methods.prompt_evicting import ExpectedAttention, KeyDiff, Knorm, SnapKV
from methods.streaming import Streaming
from methods.tova import TOVA
from tests.cases import Case
from tests.conftest import tiny
from tests.living import replay, token_batch
from tests.replaying import watched
from tests.runs import refusal_of
from tests.tiny_models import tiny_model

needs_kvpress = pytest.mark.skipif(
    importlib.util.find_spec("kvpress") is None, reason=f"kvpress is not installed: {kvpress.INSTALL}"
)
PROMPT = (200, 180)
KEPT = 48
"""Tokens of the longer prompt that stay."""
SHORT = {
    "SnapKVPress": {"window_size": 16},
    "PyramidKVPress": {"window_size": 2},  # the press is SnapKV's where a layer would keep less than the window
    "LagKVPress": {"lag_size": 32},
    "ChunkPress": {"chunk_length": 50},
    "BlockPress": {"block_size": 40},
}
"""Settings for prompts of `PROMPT` tokens."""
TIES = {"LagKVPress"}
"""Presses whose scores are ranks, so that many are equal."""
INNER = {"BlockPress": "KeyDiffPress"}
"""The press that another one wraps, where it is not SnapKV's."""


def make(choice, **settings):
    """The method of a choice, with settings for short prompts."""
    for name in choice.split(":"):
        settings = SHORT.get(name, {}) | settings
    return kvpress.press_class(choice)(**settings)


def choices():
    """Every press that can be a method, one that wraps another with it."""
    if importlib.util.find_spec("kvpress") is None:
        return []
    presses = kvpress.presses_installed()
    return [f"{name}:{INNER.get(name, 'SnapKVPress')}" if kvpress.wraps_another(presses[name]) else name
            for name in kvpress.allowed()]  # fmt: skip


def prompted(model, method, prompts=PROMPT, steps=0):
    """The state of a method after a batch of prompts, and each layer's query, key and value."""
    ids, real = token_batch(prompts, steps)
    seen = []
    with attach(model) as attached, watched(lambda _, *states: seen.append(states[:3]), (prompt_pass.PromptPass,)):
        session = Setup(method, None, None).replay(attached, real.sum(-1), real.shape[1])
        columns = max(prompts)
        session.prefill(ids[:, :columns], real[:, :columns])
        state = session.state
    return state, seen


def kept(model, method, prompts=PROMPT, steps=0):
    """The tokens that stay, bool [layers, batch, num_kv_heads, columns]."""
    state, _ = prompted(model, method, prompts, steps)
    return torch.stack([tokens[..., : max(prompts)] != EMPTY for tokens in state.tokens.values()])


# The tokens that stay

OWN = {
    "KnormPress": Knorm(0, kept_tokens=KEPT),
    "KeyDiffPress": KeyDiff(0, kept_tokens=KEPT),
    "ExpectedAttentionPress": ExpectedAttention(0, kept_tokens=KEPT),
    "SnapKVPress": SnapKV(0, kept_tokens=KEPT, window=16, kernel=5, pooling="avg"),
    "TOVAPress": TOVA(0, kept_tokens=KEPT, protect_last=True),
    "StreamingLLMPress": Streaming(0, budget=KEPT / 200),
    "CapPress": CapKV(0, kept_tokens=KEPT),
    # The press counts the window's 16 tokens among the first half: 24 of 48 are 8 of the 32 that compete.
    # Its smoothing is our default.
    "CriticalKVPress:SnapKVPress": CriticalKV(0, kept_tokens=KEPT, window=16, first_share=0.25),
}


@needs_kvpress
@pytest.mark.parametrize("name", OWN)
def test_a_press_keeps_the_tokens_of_our_own_file(name):
    prompts = (200, 200) if name == "StreamingLLMPress" else PROMPT  # the window of ours is a share of each sequence
    ours = kept(tiny("gqa"), OWN[name], prompts)
    theirs = kept(tiny("gqa"), make(name, kept_tokens=KEPT), prompts)
    assert ours.shape == (4, 2, 2, 200) and ours.sum(-1).unique().tolist() == [KEPT]
    assert torch.equal(theirs, ours)


@needs_kvpress
@pytest.mark.parametrize("choice", choices())
def test_the_tokens_are_those_that_the_press_compresses_to(choice):
    """By the press's own `compress`, as its hook calls it: on the module, its input, and keys and values."""
    model, method = tiny("gqa"), make(choice, kept_tokens=KEPT)
    state, seen = prompted(model, method)
    layers = [block.self_attn for block in model.model.layers]
    assert not any({"rotary_emb", "masked_key_indices"} & vars(module).keys() for module in layers)  # left as they were
    inputs = []
    with attach(model) as attached:  # its own pass, so that hidden states come from another hook than ours
        hooks = [module.register_forward_pre_hook(lambda _, __, kwargs: inputs.append(kwargs), with_kwargs=True)
                 for module in layers]  # fmt: skip
        ids, real = token_batch(PROMPT, 0)
        run_prompt(attached, ids, real)
    for hook in hooks:
        hook.remove()
    for layer, module in enumerate(layers):
        query, key, value = seen[layer]
        for at, length in enumerate(PROMPT):
            first = 200 - length
            before = sum(PROMPT[:at])  # the model runs over the real rows of all sequences
            own = slice(before, before + length)
            hidden = inputs[layer]["hidden_states"][:, own]
            cos, sin = (part[:, own] for part in inputs[layer]["position_embeddings"])
            keys, values = key[at : at + 1, :, first:].contiguous(), value[at : at + 1, :, first:].contiguous()
            weights = (query[at, :, first:].double() @ keys[0].double().repeat_interleave(2, 0).mT) * module.scaling
            weights = weights.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)[None]
            press = method.press()
            press.compression_ratio = method.ratio(length)
            module.rotary_emb = model.model.rotary_emb
            try:
                torch.manual_seed(layer)
                attentions = weights.float() if choice == "ObservedAttentionPress" else None
                kwargs = {"hidden_states": hidden, "position_embeddings": (cos, sin)}
                arguments = module, hidden, keys, values, attentions, kwargs
                got, _ = press.compress(*arguments)
                scores = press.score(*arguments) if choice in TIES else None
                expected = torch.zeros(2, length, dtype=torch.bool)
                marked = vars(module).get("masked_key_indices")
                if marked is not None:
                    expected[:] = True
                    expected[marked[1], marked[2]] = False
                else:  # a returned key is one of the keys, which are all different
                    for head in range(2):
                        expected[head, torch.cdist(got[0, head], keys[0, head]).argmin(-1)] = True
            finally:
                del module.rotary_emb
                vars(module).pop("masked_key_indices", None)
            stays = state.tokens[layer][at, :, first:200] != EMPTY
            if choice in TIES:  # topk takes any of equal scores
                stays, expected = (scores[0, mask].sort().values for mask in (stays, expected))
            assert torch.equal(stays, expected), (choice, layer, at)


# In replay and live


@needs_kvpress
@pytest.mark.parametrize("choice", choices())
def test_live_is_replay_and_budgets_have_their_closed_form(choice):
    with attach(tiny("gqa")) as attached:
        trial = Trial(attached, None, Setup(make(choice), None, None), PROMPT)
        for check in (live_is_replay, budget_is_its_closed_form, padded_is_alone):
            check(trial)


# What it does not take

FAMILIES = {
    "opt": ({"word_embed_proj_dim": 64}, "SnapKVPress", "makes no queries from OPTAttention"),
    "cohere": ({}, "SnapKVPress", "makes other queries than CohereAttention"),
    "opt, W_O": ({"word_embed_proj_dim": 64}, "CriticalKVPress:KnormPress", "failed on a prompt of "),
    "deepseek_v3": (
        {"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
         "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 4, "num_attention_heads": 4},
        "KnormPress", "presses know no latent attention",
    ),
}  # fmt: skip


@needs_kvpress
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_a_press_does_not_know_is_refused_in_one_line(family):
    shape, choice, expected = FAMILIES[family]
    model = tiny_model(family.partition(",")[0], **shape)
    with attach(model) as attached, pytest.raises(ValueError) as refused:
        replay(attached, Case(make(choice)), PROMPT)
    said = str(refused.value)
    assert said.startswith(f"method.name=kvpress:{choice}: {expected}") and "\n" not in said


REFUSED = [
    ("NoSuchPress", "", "{choice}: kvpress 0.5.5 has no press NoSuchPress; allowed: AdaKVPress, "),
    ("KVzipPress", "", "{choice}: KVzipPress gives no scores of a layer's tokens, or needs more than the model"),
    ("MergingPress:KnormPress", "", "{choice}: MergingPress changes the values of tokens that stay"),
    ("AdaKVPress", "", "{choice}: AdaKVPress wraps another press; name it, as in kvpress:AdaKVPress:SnapKVPress"),
    ("SnapKVPress:KnormPress", "", "{choice}: SnapKVPress wraps no other press; allowed before `:`: "),
    ("AdaKVPress:AdaKVPress:KnormPress", "",
     "method.name=kvpress:AdaKVPress:AdaKVPress:KnormPress: AdaKVPress requires a ScorerPress as input"),
    ("SnapKVPress", "method.window_size=0", "method.window_size=0: must be an integer >= 1"),
    ("SnapKVPress", "+method.pooling=max", "unknown setting method.pooling: "),
    ("SnapKVPress", "method.version=0.1.0", "method.version=0.1.0: must be 0.5.5, which is installed"),
    ("AdaKVPress:KnormPress", "method.alpha_safeguard=2",
     "method.name=kvpress:AdaKVPress:KnormPress: alpha_safeguard should be in [0, 1]"),
]  # fmt: skip


@needs_kvpress
@pytest.mark.parametrize(("choice", "setting", "expected"), REFUSED)
def test_what_is_no_method_and_a_wrong_setting_are_one_line(choice, setting, expected, runs, capsys):
    word = f"method=kvpress:{choice}"
    assert refusal_of(main, [word, *setting.split()], capsys).startswith(expected.format(choice=word))


def test_without_kvpress_a_line_says_how_to_install_it(runs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    for cached in (kvpress.presses_installed, kvpress.press_class):
        monkeypatch.setattr(kvpress, cached.__name__, cached.__wrapped__)
    said = refusal_of(main, ["method=kvpress:SnapKVPress"], capsys)
    lacking = "method=kvpress:SnapKVPress: needs the Python package kvpress, which is not installed"
    assert said == f"{lacking}: {kvpress.INSTALL}"


@needs_kvpress
@pytest.mark.parametrize("name", ["MergingPress", "ChunkKVPress"])
def test_a_press_that_changes_what_stays_or_keeps_another_number_is_refused(name, monkeypatch):
    """Also one that the list of refused presses does not know."""
    monkeypatch.delitem(kvpress.REFUSED, name)
    kvpress.press_class.cache_clear()
    reason = "kept .* rows of 2 heads" if name == "ChunkKVPress" else "changes keys or values that stay"
    with pytest.raises(ValueError, match=reason):
        prompted(tiny("gqa"), make(f"{name}:SnapKVPress", kept_tokens=KEPT))
    kvpress.press_class.cache_clear()


@needs_kvpress
def test_importing_it_changes_nothing_in_transformers():
    kvpress.press_class("KnormPress")
    assert "kvpress" in sys.modules
    assert not any(function.__module__.startswith("kvpress") for function in ALL_ATTENTION_FUNCTIONS.values())


# Chosen and recorded


@needs_kvpress
def test_its_settings_are_those_of_the_press():
    config = load(["method=kvpress:SnapKVPress", "method.window_size=32", "budget=0.2"])
    names = {each.name for each in dataclasses.fields(config.method)}
    assert names == {"dense_layers", "budget", "kept_tokens", "version", "window_size", "kernel_size"}
    assert (config.method_name, config.label) == ("kvpress:SnapKVPress", "kvpress: SnapKV")
    assert config.method.press().window_size == 32 and config.method.dense_layers == 0
    nested = kvpress.press_class("CriticalKVPress:ExpectedAttentionPress")(press_epsilon=0.5, use_vnorm=False)
    assert (nested.press().epsilon, nested.press().press.epsilon) == (1e-4, 0.5)
    assert nested.title == "kvpress: CriticalKV of ExpectedAttention"
    assert pickle.loads(pickle.dumps(nested)) == nested and nested.with_budget(0.5).press_epsilon == 0.5


@needs_kvpress
def test_press_and_version_belong_to_a_run(monkeypatch):
    def run_id(*words):
        return Run.of(load([*words, "seq_len=300"])).path.parent.name

    snapkv = run_id("method=kvpress:SnapKVPress")
    assert run_id("method=kvpress:SnapKVPress") == snapkv != run_id("method=kvpress:TOVAPress")
    monkeypatch.setattr(kvpress, "version_installed", lambda: "0.6.0")
    kvpress.press_class.cache_clear()
    try:
        assert run_id("method=kvpress:SnapKVPress") != snapkv
    finally:
        kvpress.press_class.cache_clear()

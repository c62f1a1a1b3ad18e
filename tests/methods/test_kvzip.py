"""KVzip against a plain reading of the official code: prompt and repetition in one pass, one probability at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.errors import UserError
from harness.model.attach import attach
from harness.model.load import LoadedModel
from harness.model.prompts import PromptPass
from harness.replay.setup import tokenized
from methods.base import Geometry, Lengths
from methods.kvzip import KVzip
from tests.cases import ASKED, Case
from tests.living import tiny
from tests.reference import softmax
from tests.replaying import PROMPT, attention_of, open_session, pad, token_ids
from tests.tiny_models import tiny_ids
from tests.tokens import byte_tokenizer

PROMPTS = (PROMPT, 11, 14)
METHODS = {
    "whole": KVzip(budget=0.5, chunk_size=30, **ASKED),
    "chunks": KVzip(kept_tokens=7, num_sinks=2, chunk_size=5, **ASKED),
    "plus": KVzip(budget=0.5, num_sinks=1, chunk_size=6, value_weighted=True, dense_layers=0, **ASKED),
    "no-sinks": KVzip(budget=0.4, num_sinks=0, window=3, chunk_size=4, dense_layers=1, **ASKED),
    "uniform": KVzip(budget=0.6, layers="uniform", heads="uniform", chunk_size=7, **ASKED),
}


def prompts() -> list[list[int]]:
    return [token_ids(length, seed) for seed, length in enumerate(PROMPTS)]


def states_of(attached, ids: list[int]) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Query, key and value of every layer, [heads, tokens, head_dim], and its attention input [1, tokens, hidden]."""
    seen, inputs = [], []

    def note(_, args, kwargs):
        inputs.append(args[0] if args else kwargs["hidden_states"])

    modules = [attention_of(attached.model, layer) for layer in range(attached.geometry.num_layers)]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    keep = PromptPass(attached, keep=lambda _, prompt: seen.append([each[0].double() for each in prompt[:3]]))
    attached.forward(torch.tensor([ids]), torch.arange(len(ids))[None], keep)
    for hook in hooks:
        hook.remove()
    return seen, inputs


def plain_score(model, method: KVzip, ids: list[int]) -> np.ndarray:
    """Score of each token, [layers, num_kv_heads, prompt]: the repetition runs behind the prompt in one dense pass."""
    with attach(model) as attached:
        geometry = attached.geometry
        score = np.zeros((geometry.num_layers, geometry.num_kv_heads, len(ids)))
        for begin in range(method.num_sinks, len(ids), method.chunk_size):
            chunk = range(begin, min(begin + method.chunk_size, len(ids)))
            leading = ids[max(begin - 8, method.num_sinks) : begin]
            asked = [*ASKED["continuation"], *leading] if leading else [*ASKED["instruction"]]
            whole = [*ids, *asked, *ASKED["suffix"], *(ids[token] for token in chunk)]
            states, inputs = states_of(attached, whole)
            for layer, (query, key, value) in enumerate(states):
                of_module = attention_of(model, layer)
                output = of_module.o_proj if hasattr(of_module, "o_proj") else of_module.out_proj
                matrix = output.weight.double().numpy()  # [hidden, heads * head_dim]
                for head in range(geometry.num_heads):
                    kv = head // geometry.group
                    columns = slice(head * geometry.head_dim, (head + 1) * geometry.head_dim)
                    for row in range(len(ids), len(whole)):
                        among = [*range(method.num_sinks), *chunk, *range(len(ids), row + 1)]
                        probs = softmax((key[kv, among] @ query[head, row]).numpy() * geometry.scale)
                        for token, prob in zip(among, probs, strict=True):
                            if token not in chunk:
                                continue
                            if method.value_weighted:
                                added = matrix[:, columns] @ value[kv, token].numpy()
                                prob *= np.linalg.norm(added) / np.linalg.norm(inputs[layer][0, row].double().numpy())
                            score[layer, kv, token] = max(score[layer, kv, token], prob)
    return score


def plain_kept(method: KVzip, score: np.ndarray) -> dict[tuple[int, int], set[int]]:
    """The tokens that stay, by layer and KV head."""
    prompt = score.shape[2]
    budget = method.kept_tokens or int(method.budget * prompt)
    competing = range(method.num_sinks, prompt - method.window)
    share = budget - method.num_sinks - method.window
    heads = [(layer, kv) for layer in range(method.dense_layers, len(score)) for kv in range(score.shape[1])]
    ranked = sorted(((score[layer, kv, token], layer, kv, token) for layer, kv in heads for token in competing))
    kept = {each: set(range(prompt)) - set(competing) for each in heads}
    for _, layer, kv, token in reversed(ranked):
        if method.layers == "uniform" and len(kept[layer, kv]) == budget:
            continue
        if method.layers == "adaptive" and sum(map(len, kept.values())) == len(heads) * budget:
            break
        kept[layer, kv].add(token)
    assert share > 0 and sum(map(len, kept.values())) == len(heads) * budget
    return kept


@pytest.mark.parametrize("family", ["gqa", "opt"])
@pytest.mark.parametrize("name", METHODS)
def test_score_and_what_stays_are_the_plain_ones_of_each_sequence_of_a_padded_batch(name, family, monkeypatch):
    method, model, taken = METHODS[name], tiny(family), []
    take = KVzip.state.take_scores
    monkeypatch.setattr(KVzip.state, "take_scores", lambda *given: taken.append(given[1]) or take(*given))
    with attach(model) as attached:
        session = open_session(attached, Case(method), [length + 1 for length in PROMPTS], PROMPT + 1)
        session.prefill(*pad(prompts(), left=True))
        state = session.state
    for at, ids in enumerate(prompts()):
        wanted, first = plain_score(model, method, ids), PROMPT - len(ids)
        for layer, found in taken[0].items():
            assert np.abs(found[at, :, first:].numpy() - wanted[layer]).max() < 2e-5
            assert not found[at, :, :first].any()
        for (layer, kv), tokens in plain_kept(method, wanted).items():
            held = state.tokens[layer][at, kv].tolist()
            assert {token for token in held if token < len(ids)} == tokens, f"layer {layer}, head {kv}, prompt {at}"


def test_instructions_are_tokenized_with_the_models_tokenizer_or_given_as_ids():
    asked = KVzip()
    with_tokenizer = LoadedModel(None, byte_tokenizer(), "m", 512)
    found = tokenized(asked, with_tokenizer)
    texts = {name: getattr(asked, name) for name in ASKED}
    assert all(getattr(found, name) == tuple(byte_tokenizer()(text)["input_ids"]) for name, text in texts.items())
    without = LoadedModel(None, None, "m", 512)
    assert tokenized(KVzip(**ASKED), without) == KVzip(**ASKED)
    with pytest.raises(UserError, match="method KVzip: its instructions are text, and m has no tokenizer; .* ids"):
        tokenized(asked, without)
    lengths = Lengths(torch.tensor([40]), torch.tensor([50]))
    with pytest.raises(ValueError, match="method.continuation='.*': must be token ids"):
        replace(asked, instruction=(5,)).new_state(Geometry(4, 4, 2, 16, 0.25, "llama"), lengths)


def test_a_repetition_beyond_the_models_positions_is_refused():
    method = KVzip(chunk_size=300).tokenized(tiny_ids)
    with attach(tiny("gqa")) as attached:
        session = open_session(attached, Case(method), [301], 301)
        wanted = r"a prompt of 300 tokens and the \d+ in which .* positions, and the model has 512; lower .*chunk_size"
        with pytest.raises(UserError, match=wanted):
            session.prefill(torch.tensor([token_ids(300)]), torch.ones(1, 300, dtype=torch.bool))

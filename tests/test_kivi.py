"""KIVI against its rule, a token at a time; its bytes by hand, and its limit cases."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch
from cases import CASES, Case
from living import attached_with_link, force, largest_difference, open_live, tiny, token_batch
from replaying import open_session

from harness.model.attach import attach
from harness.model.prompt import PromptPass
from harness.offload.step import DecodeStep
from harness.replay import DecodePass
from methods.codec import ChannelCodec, Codec, SplitCodec
from methods.full import Full

GROUP, RESIDUAL, PROMPT, STEPS = 4, 8, 21, 20
BATCHES = {"even": (PROMPT,), "padded": (PROMPT, 13, 5)}
"""Real prompt tokens; that of 5 is shorter than what stays exact."""


def kivi(bits: int, residual: int = RESIDUAL, exempt: int = 2) -> Case:
    keys, values = ChannelCodec(f"int{bits}", GROUP), Codec(f"int{bits}", GROUP)
    return Case(Full(num_exempt_layers=exempt), SplitCodec(keys, values, residual))


def coded(group: np.ndarray, bits: int) -> np.ndarray:
    """float32 numbers that share a minimum and a step, as they read back."""
    low = group.min()
    step = np.float32(np.float16((group.max() - low) / np.float32(2**bits - 1)))
    low = np.float32(np.float16(low))
    codes = np.clip(np.round((group - low) / (step or np.float32(1))), 0, 2**bits - 1)
    return codes * step + low


def per_token(row: np.ndarray, bits: int) -> np.ndarray:
    return np.concatenate([coded(row[at : at + GROUP], bits) for at in range(0, len(row), GROUP)])


def per_channel(rows: list[np.ndarray], bits: int) -> list[np.ndarray]:
    """Whole groups of rows."""
    columns = np.stack(rows).T.copy()
    return list(np.stack([per_token(column, bits) for column in columns]).T)


class Plain:
    """The cache of one KV head as the rule tells it: what is coded, and a tail that is not."""

    def __init__(self, bits: int, residual: int, keys: np.ndarray, values: np.ndarray) -> None:
        self.bits, self.residual = bits, residual
        cut = len(keys) - len(keys) % residual
        self.keys = per_channel(list(keys[:cut]), bits) if cut else []
        self.key_tail = list(keys[cut:])
        cut = max(0, len(values) - residual)
        self.values = [per_token(row, bits) for row in values[:cut]]
        self.value_tail = list(values[cut:])

    def attend(self, queries: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float) -> np.ndarray:
        """A step of the group's queries [group, head_dim]; its own token enters exactly, then what is due is coded."""
        self.key_tail.append(key)
        self.value_tail.append(value)
        scores = queries.astype(np.float64) @ np.stack(self.keys + self.key_tail).T * scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        output = weights / weights.sum(-1, keepdims=True) @ np.stack(self.values + self.value_tail)
        if len(self.key_tail) == self.residual:
            self.keys += per_channel(self.key_tail, self.bits)
            self.key_tail = []
        if len(self.value_tail) > self.residual:
            self.values.append(per_token(self.value_tail.pop(0), self.bits))
        return output


class Watch:
    """By layer, what the attention of a run was given and gave: query, key, value, output, of all tokens."""

    def __init__(self, monkeypatch, *handlers) -> None:
        self.seen: dict[int, list[tuple]] = {}
        for handler in handlers:
            monkeypatch.setattr(handler, "attention", self.watching(handler.attention))

    def watching(self, attention):
        def watched(handler, layer, query, key, value):
            output = attention(handler, layer, query, key, value)
            self.seen.setdefault(layer, []).append(tuple(part.clone() for part in (query, key, value, output)))
            return output

        return watched

    def layer(self, layer: int) -> tuple[np.ndarray, ...]:
        """Query, key, value [batch, heads, tokens, head_dim] and output [batch, tokens, heads, head_dim]."""
        *inputs, output = zip(*self.seen[layer], strict=True)
        return (*(torch.cat(parts, 2).numpy() for parts in inputs), torch.cat(output, 1).numpy())


def check(watch: Watch, prompts: tuple[int, ...], geometry, case: Case) -> None:
    """Every decode row of every coded layer and head is what the rule gives."""
    longest, bits = max(prompts), case.codec.keys.bits
    for layer in range(case.method.num_exempt_layers, geometry.num_layers):
        query, key, value, output = watch.layer(layer)
        for b, prompt in enumerate(prompts):
            first = longest - prompt
            for head in range(geometry.num_kv_heads):
                group = slice(head * geometry.group, (head + 1) * geometry.group)
                of_prompt = slice(first, longest)
                plain = Plain(bits, case.codec.residual, key[b, head, of_prompt], value[b, head, of_prompt])
                for at in range(longest, key.shape[2]):
                    expected = plain.attend(query[b, group, at], key[b, head, at], value[b, head, at], geometry.scale)
                    assert np.abs(output[b, at, group] - expected).max() < 1e-5, (layer, b, head, at)


every_batch = pytest.mark.parametrize("prompts", BATCHES.values(), ids=BATCHES)
every_family = pytest.mark.parametrize("family", ["gqa", "opt"])


@pytest.mark.parametrize("case", [kivi(4), kivi(2, residual=16, exempt=0)], ids=["int4", "int2"])
@every_batch
@every_family
@pytest.mark.parametrize("forks", [False, True])
def test_replay_is_the_rule(family, prompts, case, forks, monkeypatch):
    """In several calls, whose edges lie within groups; in a fork too."""
    watch = Watch(monkeypatch, PromptPass, DecodePass)
    ids, real = token_batch(prompts, STEPS)
    with attach(tiny(family)) as attached:
        session = open_session(attached, case, real.sum(-1).tolist(), ids.shape[1])
        session.prefill(ids[:, :PROMPT], real[:, :PROMPT])
        for begin, end in ((0, 7), (7, 8), (8, STEPS)):
            columns = slice(PROMPT + begin, PROMPT + end)
            session.decode(ids[:, columns], real[:, columns])
            if forks:
                session = session.fork(torch.arange(len(prompts)), ids.shape[1])
        check(watch, prompts, attached.geometry, case)


@pytest.mark.parametrize("case", [kivi(4), kivi(2, residual=16, exempt=0)], ids=["int4", "int2"])
@every_batch
@every_family
@pytest.mark.parametrize("placement", ["device", "host"])
def test_live_is_the_rule(family, prompts, case, placement, monkeypatch):
    watch = Watch(monkeypatch, PromptPass, DecodeStep)
    with (
        attached_with_link(family) as (attached, link),
        closing(open_live(attached, case, STEPS, placement=placement, link=link)) as session,
    ):
        force(session, prompts, STEPS)
        check(watch, prompts, attached.geometry, case)


def decoded(case: Case, prompts: tuple[int, ...]) -> torch.Tensor:
    with attached_with_link("gqa") as (attached, link):
        session = open_live(attached, case, STEPS, placement="host", link=link)
        with closing(session):
            return force(session, prompts, STEPS)


@every_batch
def test_with_all_tokens_in_the_residual_it_is_the_full_cache(prompts):
    full = decoded(Case(Full()), prompts)
    assert largest_difference(decoded(kivi(1, residual=PROMPT + STEPS + 3), prompts), full) < 1e-5


def test_eight_bits_are_nearly_exact():
    full = decoded(Case(Full()), BATCHES["padded"])
    errors = {bits: largest_difference(decoded(kivi(bits), BATCHES["padded"]), full) for bits in (8, 4, 2)}
    assert errors[8] < 5e-3 < errors[4] < errors[2]


def test_bytes_and_sizes_by_hand():
    """Of 24 to 33 cached tokens, 8 or more stay on the device; groups of 4 leave it as a whole."""
    stored = [16, 16, 16, 16, 20, 20, 20, 20, 24, 24]
    heads, exact_slot, coded_slot = 2, 2 * 16 * 4, 2 * (16 * 4 // 8 + 16)  # codes, and 4 groups of 4 bytes
    with (
        attached_with_link("gqa") as (attached, link),
        closing(open_live(attached, CASES["kivi"], placement="host", link=link)) as session,
    ):
        force(session, (24,), 10)
        cached = range(24, 34)
        assert session.h2d_bytes == heads * 2 * (exact_slot * sum(cached) + coded_slot * sum(stored))
        assert session.d2h_bytes == heads * 2 * (exact_slot * 34 + coded_slot * 24)
        width = (4 + 32 / 4) / 16
        of_link = [(2 + 2 * width * s / n) / 4 for s, n in zip(stored, cached, strict=True)]
        on_device = [2 * (n - s) / n / 4 for s, n in zip(stored, cached, strict=True)]
        assert session.reads.size == pytest.approx(np.mean(of_link))
        assert session.reads.device_frac - session.reads.size == pytest.approx(np.mean(on_device))
        ring = heads * (RESIDUAL + GROUP + 1) * (exact_slot + coded_slot)
        assert [cache.device_bytes for cache in session.caches] == [0, 0, ring, ring]


def test_a_residual_that_no_groups_fill_is_refused():
    for residual in (0, 6):
        with pytest.raises(ValueError, match=rf"residual={residual}: must be a multiple of the 4 tokens of a group"):
            SplitCodec(ChannelCodec("int4", 4), Codec("int4"), residual)
    with pytest.raises(ValueError, match="key_groups=channel: needs an integer codec, not fp16"):
        ChannelCodec("fp16")

"""The methods of the tests: every one in `conf/method`, as its YAML has it, and special settings at tiny lengths."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from harness.replay.setup import codec_of
from harness.run.compose import load
from harness.settings import schema
from harness.settings.schema import options
from methods.base import Method, Selection
from methods.capkv import CapKV
from methods.codecs.floats import FloatCodec
from methods.codecs.integers import ChannelCodec, IntegerCodec
from methods.codecs.kvarn import KvarnCodec
from methods.codecs.split import LayerCodecs, NamedLayers, SplitCodec
from methods.criticalkv import CriticalKV
from methods.defensivekv import DefensiveKV
from methods.doublesparsity import DoubleSparsity
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.infinigen2 import InfiniGen2Sampled
from methods.infinigen_pool import InfiniGenPool
from methods.kascade import Kascade
from methods.kvzip import KVzip
from methods.linear_rest import InfiniGen2Linear, OracleLinear
from methods.loki import Loki
from methods.oracle import Oracle, OracleSampled
from methods.pariskv import ParisKV
from methods.pqcache import PQCache
from methods.prompt_evicting import (
    ExpectedAttention,
    KeyDiff,
    Knorm,
    PromptEvicting,
    PromptEvictingState,
    SnapKV,
)
from methods.quest import Quest, QuestState
from methods.random_attention import RandomAttention
from methods.retroinfer import RetroInfer
from methods.rkv import RKV
from methods.rocketkv import RocketKV
from methods.shadowkv import ShadowKV
from methods.socket import Socket
from methods.sparq import SparQ
from methods.streaming import DuoAttention, Streaming
from methods.tova import TOVA
from methods.triattention import TriAttention
from methods.twilight import Twilight
from methods.vattention import VAttention
from methods.yakv import YAKV
from tests.tiny_models import tiny_ids


def preset(name: str, **changes: object) -> Method:
    """`conf/method/<name>.yaml` with other settings."""
    cls, settings = schema.shipped(name)
    own = {field.name: settings[field.name] for field in fields(cls)}
    return cls(**own | changes)


@dataclass(frozen=True)
class Smooth:
    """Distorts a row as an integer codec does, but without steps: no code that rounding could flip.

    width: rows take so many times the bytes, and are distorted otherwise.
    """

    width: int = 1

    name = "smooth"
    bits = 4
    residual = 0
    span = 1

    def stored(self, cached):
        return cached

    @property
    def keys(self) -> Smooth:
        return self

    values = keys

    def bits_per_element(self, head_dim: int) -> float:
        return self.width * (4 + 32 / head_dim)

    def row_bytes(self, head_dim: int) -> int:
        return 4 * self.width * head_dim

    def roundtrip(self, rows: Tensor) -> Tensor:
        return 0.8 * rows + 0.2 * torch.sin(3 * self.width * rows)

    def encode(self, rows: Tensor) -> Tensor:
        return torch.cat([self.roundtrip(rows)] * self.width, -1).view(torch.uint8)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        return packed.contiguous().view(torch.float32)[..., -head_dim:]


@dataclass(frozen=True)
class SmoothGroups(Smooth):
    """Distorts keys as a codec of groups of tokens does: by what the others of the group are."""

    span: int = 4

    def roundtrip(self, rows: Tensor) -> Tensor:
        missing = -rows.shape[-2] % self.span
        padded = torch.cat([rows, rows[..., -1:, :].expand(*rows.shape[:-2], missing, -1)], -2)
        groups = padded.unflatten(-2, (padded.shape[-2] // self.span, self.span))
        blended = 0.7 * groups + 0.3 * torch.sin(3 * groups.sum(-2, keepdim=True))
        return blended.flatten(-3, -2)[..., : rows.shape[-2], :]


ROUGH = Smooth(width=2)


class Case(NamedTuple):
    method: Method
    codec: IntegerCodec | Smooth | LayerCodecs | None = None


class BiasedState(QuestState):
    """Weighs tokens by their position: a method that edits scores."""

    def select(self, layer, rows):
        bias = -0.3 * (rows.slot_positions % 5).float()[:, :, None, None]
        return super().select(layer, rows)._replace(bias=bias.expand(-1, -1, -1, rows.positions.shape[1], -1))


@dataclass(frozen=True)
class Biased(Quest):
    state = BiasedState


class FollowingState(QuestState):
    """Keeps what was chosen by the slot of the row's own token, until a later row takes it."""

    def start(self, calibration):
        super().start(calibration)
        self.chosen = {}

    def select(self, layer, rows):
        assert rows.query.device == self.lengths.final.device
        last = rows.slot_positions.shape[-1]
        own = range(last - rows.positions.shape[1], last)
        if layer in self.method.anchors:
            mask = super().select(layer, rows).mask
            self.chosen |= dict(zip(own, mask.unbind(2), strict=True))
        mask = torch.stack([self.chosen[slot] for slot in own], 2)
        return Selection(mask, mask.sum(-1).double().mean(1))

    def fork(self, index, num_slots):
        child = super().fork(index, num_slots)
        child.chosen = {}
        return child


@dataclass(frozen=True)
class Following(Quest):
    """Layers behind an anchor read what it selected by its own query."""

    anchors: tuple[int, ...] = (1,)
    dense_layers: int = 1

    state = FollowingState

    def when_of(self, layer):
        return "own_query" if layer in self.anchors else "earlier_layer"


class ProjectedState(PromptEvictingState):
    """Score: what the module's output projection and its input say of a token."""

    def prompt_score(self, layer, query, key, value, rows):
        module, hidden, *_ = rows.inputs
        if not key.is_cuda:  # there it would wait
            again = module.v_proj(hidden).unflatten(-1, (key.shape[1], -1)).transpose(1, 2)
            off = (again - value).abs().amax((1, 3))  # of each token
            assert off[rows.real].max() < 1e-5, "another layer's input"
        output = module.o_proj if hasattr(module, "o_proj") else module.out_proj
        made = value.repeat_interleave(self.geometry.group, 1).transpose(1, 2).flatten(2) @ output.weight.mT
        return (made + hidden).norm(dim=-1)[:, None].expand(key.shape[:3])


@dataclass(frozen=True)
class Projected(PromptEvicting):
    """Keeps tokens by a rule that uses W_O."""

    needs_inputs = True

    dense_layers: int = 1
    budget: float = 0.5

    title = "Projected"
    state = ProjectedState


ASKED = {"instruction": (5, 6, 7), "continuation": (8, 9), "suffix": (4,)}
"""KVzip's instructions as token ids."""

CASES = {
    "full": Case(Full(dense_layers=2)),
    "full+smooth": Case(Full(dense_layers=2), Smooth()),
    "int4": Case(Full(dense_layers=2), IntegerCodec("int4")),
    "residual-groups": Case(Full(dense_layers=2), SplitCodec(SmoothGroups(), Smooth(), residual=8)),
    "residual-fills": Case(Full(dense_layers=1), SplitCodec(SmoothGroups(span=6), Smooth(), residual=30)),
    "kivi": Case(Full(dense_layers=2), SplitCodec(ChannelCodec("int4", 4), IntegerCodec("int4", 4), residual=8)),
    "residual-tiles": Case(Full(dense_layers=1), SplitCodec(SmoothGroups(span=6), SmoothGroups(span=6), residual=12)),
    "kvarn": Case(Full(dense_layers=2), SplitCodec(KvarnCodec("kvarn4", 4), KvarnCodec("kvarn4", 4).values, 8)),
    "layers": Case(
        Full(dense_layers=1),
        LayerCodecs(Smooth(), (NamedLayers(1, 1, FloatCodec("fp32")), NamedLayers(3, None, ROUGH))),
    ),
    "layers-residual": Case(
        Full(dense_layers=0),
        LayerCodecs(
            SplitCodec(SmoothGroups(), Smooth(), residual=8),
            (NamedLayers(0, 0, FloatCodec("fp32")), NamedLayers(2, 2, SplitCodec(ROUGH, Smooth(), residual=8))),
        ),
    ),
    "h2o": Case(H2O(heavy_frac=0.15, recent_frac=0.1, dense_layers=2)),
    "h2o-recent": Case(H2O(heavy_frac=0.0, recent_frac=0.3, dense_layers=1)),
    "h2o-fills": Case(
        H2O(heavy_frac=0.45, recent_frac=0.45, dense_layers=2)
    ),  # the prompt leaves room: full only after some steps
    "h2o-tokens": Case(H2O(kept_tokens=9, dense_layers=2)),
    "h2o+smooth": Case(H2O(heavy_frac=0.15, recent_frac=0.1, dense_layers=2), Smooth()),
    "streaming": Case(Streaming(budget=0.3, num_sinks=2, dense_layers=2)),
    "snapkv": Case(SnapKV(budget=0.5, window=4, kernel=3, dense_layers=2)),
    "snapkv-both": Case(
        SnapKV(kept_tokens=11, num_sinks=1, window=2, layers="pyramid", heads="adaptive", dense_layers=2)
    ),
    "criticalkv": Case(CriticalKV(budget=0.5, window=4, kernel=3, dense_layers=2)),
    "defensivekv": Case(DefensiveKV(budget=0.5, window=4, kernel=3, first_mass=0.5, dense_layers=2)),
    "capkv": Case(CapKV(budget=0.5, dense_layers=2)),
    "tova": Case(TOVA(budget=0.3, dense_layers=2)),
    "kvzip": Case(KVzip(budget=0.5, num_sinks=2, chunk_size=9, **ASKED, dense_layers=2)),
    "kvzip-plus": Case(KVzip(kept_tokens=10, chunk_size=30, value_weighted=True, dense_layers=0, **ASKED)),
    "knorm": Case(Knorm(budget=0.4)),
    "keydiff": Case(KeyDiff(budget=0.4, dense_layers=2)),
    "expected": Case(ExpectedAttention(budget=0.5, dense_layers=2)),
    "rkv": Case(RKV(kept_tokens=8, divide_length=3, window=2, kernel=3, dense_layers=2)),
    "rkv-prompt": Case(RKV(budget=0.85, divide_length=3, window=2, protect_prompt=True, dense_layers=2)),
    "random-all": Case(
        RandomAttention(kept_tokens=9, divide_length=4, window=2, protect_prompt=False, seed=3, dense_layers=2)
    ),
    "triattention-all": Case(
        TriAttention(kept_tokens=10, divide_length=4, window=1, protect_prompt=False, dense_layers=0)
    ),
    "duo": Case(DuoAttention(num_sinks=2, num_recent=4, dense_layers=2)),
    "quest-deviation": Case(Quest(budget=0.4, page_size=3, page_score="deviation", dense_layers=1)),
    "quest": Case(Quest(budget=0.4, page_size=3)),
    "quest-union": Case(Quest(budget=0.4, page_size=3, group="union", num_sinks=1, dense_layers=0)),
    "pqcache": Case(PQCache(budget=0.5, num_sinks=1, recent_frac=0.3, bits=2, iterations=3, dense_layers=2)),
    "pariskv": Case(ParisKV(budget=0.4, num_sinks=1, candidate_frac=0.6, dense_layers=2)),
    "yakv": Case(YAKV(budget=0.4, num_sinks=1, recent_frac=0.3, dense_layers=2)),
    "socket": Case(Socket(budget=0.4, num_sinks=1, recent_frac=0.3, tables=7, planes=3, dense_layers=2)),
    "rocketkv": Case(RocketKV(budget=0.5, window=4, kernel=3, dense_layers=2)),
    "rocketkv-step": Case(RocketKV(budget_tokens=4, window=2, num_sinks=1, when="previous_step", dense_layers=1)),
    "freekv": Case(
        Quest(budget=0.7, page_size=3, when="previous_step", group="sum_probs", num_sinks=3, recent_frac=0.25)
    ),
    "shadowkv": Case(
        ShadowKV(budget=0.3, page_size=2, local_chunks=1, rank_frac=0.3, outlier_frac=0.2, dense_layers=2)
    ),
    "shadowkv+smooth": Case(ShadowKV(budget=0.3, page_size=2, local_chunks=1, rank_frac=0.3, dense_layers=2), Smooth()),
    "retroinfer": Case(
        RetroInfer(
            retrieval_frac=0.3,
            estimation_frac=0.4,
            num_sinks=1,
            recent_frac=0.15,
            cluster_size=2,
            update_frac=0.25,
            dense_layers=2,
        )
    ),
    "retroinfer-share": Case(
        RetroInfer(
            budget=0.5,
            estimation_frac=0.3,
            num_sinks=2,
            recent_frac=0.2,
            cluster_size=3,
            update_frac=0.3,
            segment=6,
            dense_layers=2,
        )
    ),
    "retroinfer+smooth": Case(
        RetroInfer(retrieval_frac=0.4, num_sinks=0, recent_frac=0.1, update_frac=1.0, cluster_size=3, dense_layers=0),
        Smooth(),
    ),
    "doublesparsity": Case(DoubleSparsity(budget=0.4, rank=0.25)),
    "loki": Case(Loki(budget=0.4, rank=0.3, dense_layers=2)),
    "sparq": Case(SparQ(read_tokens=None, budget=0.4, dense_layers=2)),
    "twilight": Case(Twilight(p=0.7, page_size=3)),
    "twilight-pages": Case(Twilight(p=0.5, candidate_frac=0.6, page_size=2, group="union")),
    "vattention": Case(VAttention(epsilon=0.4, delta=0.2, fixed_frac=0.2, num_sinks=1, dense_layers=2)),
    "vattention-cap": Case(VAttention(dense_layers=0, group="best", num_sinks=0).with_budget(0.4)),
    "vattention-true": Case(
        VAttention(epsilon=0.3, delta=0.3, fixed_frac=0.2, num_sinks=1, when="true_scores", dense_layers=2)
    ),
    "kascade": Case(Kascade(budget=0.3, min_tokens=2, anchors=(2,))),
    "biased": Case(Biased(budget=0.5, page_size=2)),
    "following": Case(Following(budget=0.3, page_size=4)),
    "projected": Case(Projected()),
    "oracle": Case(Oracle(alpha=0.7, budget=0.5, dense_layers=2)),
    "oracle+smooth": Case(Oracle(alpha=inf, budget=0.3, dense_layers=2), Smooth()),
    "oracle-sampled": Case(OracleSampled(budget=0.3, dense_layers=2)),
    "infinigen": Case(InfiniGen(alpha=0.3, budget=0.4)),
    "infinigen-query": Case(InfiniGen(columns="query", skew=False, alpha=inf, budget=0.3)),
    "infinigen-union": Case(InfiniGen(columns="union", alpha=0.6, budget=0.6, dense_layers=1, num_sinks=1)),
    "infinigen-step": Case(InfiniGen(alpha=inf, budget=0.4, when="previous_step", num_sinks=1, recent_frac=0.3)),
    "infinigen-own": Case(InfiniGen(alpha=inf, budget=0.3, when="own_query", group="max_probs", dense_layers=0)),
    "infinigen-fixed": Case(InfiniGen(fixed_fetch=6, skew=False)),
    "infinigen-final": Case(InfiniGen(alpha=0.6, budget=0.3, cap_of="final", round_columns="down")),
    "infinigen-coded": Case(InfiniGen(alpha=inf, budget=0.4, partial_weight_ratio=1.0, index_bits=4)),
    "infinigen-balanced": Case(preset("infinigen-balanced", alpha=inf, budget=0.4)),
    "infinigen-sampled": Case(
        InfiniGen2Sampled(budget=0.4, partial_weight_ratio=0.3, index_bits=None, projection_bits=None)
    ),
    "infinigen-linear": Case(InfiniGen2Linear(budget=0.4)),
    "oracle-linear": Case(OracleLinear(budget=0.3)),
    "infinigen+smooth": Case(InfiniGen(alpha=0.3, budget=0.4), Smooth()),
    "infinigen+int4": Case(InfiniGen(alpha=0.3, budget=0.4), IntegerCodec("int4")),
    "infinigen+layers": Case(InfiniGen(alpha=0.3, budget=0.4), LayerCodecs(Smooth(), (NamedLayers(3, None, ROUGH),))),
    "pool-fifo": Case(InfiniGenPool(alpha=inf, budget=0.3, pool_frac=0.6, pool_policy="fifo")),
    "pool-lru": Case(InfiniGenPool(alpha=inf, budget=0.3, pool_frac=0.6, pool_policy="lru", protect_recent=0.2)),
    "pool-counter": Case(InfiniGenPool(alpha=inf, budget=0.3, pool_frac=0.6, protect_recent=0.2)),
    "pool-fills": Case(InfiniGenPool(alpha=inf, budget=0.3, pool_frac=0.85)),
    # One token is read, and the best of each of the group's heads ties at r = 0: the lowest position wins.
    "pool-tie": Case(InfiniGenPool(alpha=inf, budget=0.2, pool_frac=0.15, protect_recent=0.0)),
}


WIDE = (*{type(CASES[name].method): name for name in reversed(CASES)}.values(), "full+smooth", "kivi", "pool-lru")
"""A case of each method: these run in two model families, the others in one."""


@cache
def shipped(name: str) -> Case:
    """`conf/method/<name>.yaml` with its defaults, its texts as ids of a tiny model."""
    config = load([f"method={name}"])
    return Case(config.method.tokenized(tiny_ids), codec_of(config))


SHIPPED = options("method")
"""Every method there is: a new file in `conf/method`, or format, is a new test."""

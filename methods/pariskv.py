"""ParisKV (Qi et al., ICML 2026): sign patterns vote for candidates, 4-bit keys rank them.

The magnitudes of a 4-bit key are the levels of the least squared error (Lloyd-Max) for an element
of a random direction in 8 dimensions, whose square is distributed as Beta(1/2, 7/2). A weight for
each sub-vector has the key's length, and makes up for the rounding, so that its product with the
key's own direction is exact.

Official code: github.com/amy-77/ParisKV, `cache_hub/polar_cache.py` and `cache_hub/rerank`.

The rule, and where it differs (made into docs/methods.md):

**pariskv** reads the `num_sinks` (4) first tokens, the most recent ones (`recent_frac`, 0.38), and
of the others, the zone, the best. Keys are rotated by a Hadamard matrix after random signs
(`seed`) and cut into sub-vectors of 8. The mean query of a group ranks the 256 sign patterns of
each. The keys of the best patterns get votes, pattern by pattern, until a share of the zone has
some: six votes for the first 5 % of these keys, five up to 15 %, and four, three, two and
one up to 30, 50, 75 and 100 %. `candidate_frac` of the zone, the keys with the most votes, are
ranked by their keys in 4 bits (a sign, 8 magnitudes), with a 16-bit weight for each sub-vector.
Both shares follow from the zone's length as in the official code: 0.5 and 0.5 (of candidates, of
keys with votes) below 5,000 tokens, 0.25 and 0.3 below 10,000, 0.2 and 0.25 below
30,000, then 0.1 and 0.2.

- The official code ranks for a group by its mean query, which is `group=sum_logits`. It reads 100
  tokens, 64 recent and 4 first ones, which are shares here, and up to 512 generated ones, which
  then are coded together. Here every token is coded as it comes.
- Below 2,000 tokens it attends to all of them (`full_attention_threshold`). Rows of this method at
  1,024 tokens are of a length at which the official code does not select.
- It stores a sign twice, in the pattern and in the 4 bits; here once.
- Votes tie often. Here the earlier token is the candidate, there any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from methods.attention import product
from methods.base import Calibration, Geometry, Lengths, PromptRows, QueryRows
from methods.codecs.base import hadamard
from methods.packing import code_bytes, pack_codes, unpack_codes
from methods.selection import Retrieving, RetrievingState, ascending, at_least, largest
from methods.settings import least, setting, share

PART = 8
"""Elements of a sub-vector: their signs are a byte."""
MAGNITUDE_BITS = 3
LEVELS = (
    0.04253015,
    0.12810336,
    0.21528818,
    0.30542606,
    0.40037704,
    0.5031213,
    0.6194305,
    0.7648876,
)
"""Magnitudes of an element of a direction: the levels of the least expected squared error
(Lloyd-Max) for the density (1 - x^2)^(5/2) on [0, 1], by a grid of 2^17 points."""
TIERS = (0.05, 0.15, 0.3, 0.5, 0.75, 1.0)
"""Shares of the keys with votes of a sub-vector that get one more vote each."""
SHARES = ((5_000, 0.5, 0.5), (10_000, 0.25, 0.3), (30_000, 0.2, 0.25), (math.inf, 0.1, 0.2))
"""Below a zone of so many tokens, the shares of candidates and of keys with votes."""


class ParisKVState(RetrievingState):
    """Tensors by layer and slot, [batch, num_kv_heads, slots, ...]: patterns: uint8 [parts], the
    signs of each sub-vector. magnitudes: uint8 [bytes], 3 bits an element. weights: fp16 [parts].

    signs: fp32 [head_dim], the changes of sign before the Hadamard matrix. levels: fp32 [8], the
    magnitudes of an element of a direction, ascending; boundaries: fp32 [7], those between them.
    plans: int64 [T + 1, 2 + tiers], `ParisKV.plan` by the number of cached tokens.
    """

    slot_tensors = {"patterns": 0, "magnitudes": 0, "weights": 0}
    selects_without_own = True
    replayable = True
    patterns: dict[int, Tensor]
    magnitudes: dict[int, Tensor]
    weights: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        device, head_dim = self.lengths.final.device, self.geometry.head_dim
        self.signs = random_signs(head_dim, self.method.seed).to(device)
        self.levels = torch.tensor(LEVELS, dtype=torch.float32, device=device)
        self.boundaries = (self.levels[1:] + self.levels[:-1]) / 2
        plans = [self.method.plan(cached) for cached in range(self.num_tokens + 1)]
        self.plans = torch.tensor(plans, device=device)

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        head_dim = key.shape[-1]
        slots = (*key.shape[:2], rows.num_slots)
        parts = head_dim // PART
        width = code_bytes(head_dim, MAGNITUDE_BITS)
        self.patterns[layer] = torch.zeros((*slots, parts), dtype=torch.uint8, device=key.device)
        self.magnitudes[layer] = torch.zeros((*slots, width), dtype=torch.uint8, device=key.device)
        self.weights[layer] = torch.zeros((*slots, parts), dtype=torch.float16, device=key.device)
        super().prompt(layer, query, key, value, rows)

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice | Tensor
    ) -> None:
        """Code the keys: patterns, magnitudes and weights."""
        parts = self._rotated(key)
        length = parts.norm(dim=-1)
        direction = parts.abs() / length.clamp(min=torch.finfo(length.dtype).tiny).unsqueeze(-1)
        codes = torch.bucketize(direction.contiguous(), self.boundaries, out_int32=True)
        along = (self.levels[codes] * direction).sum(-1)  # of the coded direction and the true one
        bit = 2 ** torch.arange(PART, device=key.device)
        self.patterns[layer][:, :, slots] = ((parts >= 0) * bit).sum(-1).to(torch.uint8)
        self.magnitudes[layer][:, :, slots] = pack_codes(codes.flatten(-2), MAGNITUDE_BITS)
        self.weights[layer][:, :, slots] = torch.where(length > 0, length / along, 0.0).half()

    def scores(self, layer: int, rows: QueryRows) -> Tensor:
        """Estimated scores of first and recent tokens and of the candidates, -inf elsewhere."""
        tokens, positions = rows.slot_positions, rows.positions
        competing = rows.visible()
        forced = self.method.forced(tokens, tokens, positions, self.pages_read[positions])
        if forced is not None:
            competing = competing & ~forced
        plan = self.plans[positions]
        candidates = largest(self._votes(layer, rows, competing, plan[..., 2:]), plan[..., 1])
        query = rows.query.unflatten(1, (self.geometry.num_kv_heads, -1))
        rotated = self._rotated(query).flatten(-2)
        keys = self._coded_keys(layer, tokens.shape[-1])
        scores = product(rotated.flatten(2, 3), keys.mT, self.geometry.scale)
        scores = scores.unflatten(2, query.shape[2:4])
        return scores.masked_fill((competing & ~candidates).unsqueeze(2), -math.inf)

    def _votes(self, layer: int, rows: QueryRows, competing: Tensor, targets: Tensor) -> Tensor:
        """Votes of each token, fp32 [batch, num_kv_heads, rows, slots], -inf where not `competing`.

        targets: int [batch, rows, tiers]. In a tier are the keys of the best patterns, pattern by
        pattern while fewer keys than the target are in it: all keys whose pattern scores no less
        than that of the key at the target's rank.
        """
        num_slots = rows.slot_positions.shape[-1]
        query = rows.query.float().unflatten(1, (self.geometry.num_kv_heads, -1)).mean(2)
        tables = self._rotated(query) @ all_patterns(query.device).mT
        patterns = self.patterns[layer][:, :, :num_slots].long().unsqueeze(2)
        rank = (num_slots - targets).clamp(0, num_slots - 1).unsqueeze(1)
        rank = rank.expand(-1, tables.shape[1], -1, -1)
        shape = (*tables.shape[:3], num_slots)
        votes = tables.new_zeros(shape)
        for table, pattern in zip(tables.unbind(3), patterns.unbind(4), strict=True):
            scores = table.gather(-1, pattern.expand(shape)).masked_fill_(~competing, -math.inf)
            least_of_tiers = ascending(scores).gather(-1, rank)
            for least_of_tier in least_of_tiers.split(1, -1):
                votes += at_least(scores, least_of_tier)
        return votes.masked_fill_(~competing, -math.inf)

    def _rotated(self, vectors: Tensor) -> Tensor:
        """Vectors [..., head_dim], rotated, as sub-vectors fp32 [..., parts, 8]."""
        return hadamard(vectors.float() * self.signs).unflatten(-1, (-1, PART))

    def _coded_keys(self, layer: int, num_slots: int) -> Tensor:
        """The rotated keys as they read back: fp32 [batch, num_kv_heads, slots, head_dim]."""
        packed = self.magnitudes[layer][:, :, :num_slots]
        codes = unpack_codes(packed, MAGNITUDE_BITS, self.geometry.head_dim)
        patterns = self.patterns[layer][:, :, :num_slots].long()
        signs = all_patterns(self.signs.device)[patterns]
        weights = self.weights[layer][:, :, :num_slots].float().unsqueeze(-1)
        magnitudes = self.levels[codes].unflatten(-1, (-1, PART))
        return (magnitudes * signs * weights).flatten(-2)

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """The patterns of the zone, and magnitudes and weights of the candidates."""
        head_dim = self.geometry.head_dim
        parts = head_dim // PART
        candidate_bits = 8 * code_bytes(head_dim, MAGNITUDE_BITS) + 16 * parts
        plan = self.plans[positions].double()
        bits = 8 * parts * plan[..., 0] + candidate_bits * plan[..., 1]
        return bits / (16 * self.geometry.elements)


@dataclass(frozen=True)
class ParisKV(Retrieving):
    """Reads first and recent tokens, and of the candidates by votes the best by keys in 4 bits.

    Source: ParisKV (ICML 2026)
    Keeps: every token; its key in 4 bits
    Reads: first and recent tokens, and the best by these bits of the candidates that sign patterns
        vote for
    """

    candidate_frac: float | None = setting(
        None,
        "share of the zone that is ranked, at least as many as are read; null: by its length",
        share(null=True),
    )
    seed: int = setting(0, "of the changes of sign before the rotation", least(0))

    budget: float = 0.1
    num_sinks: int = 4
    recent_frac: float = 0.38
    group: str = "sum_logits"

    title = "ParisKV"
    state = ParisKVState

    def check(self, geometry: Geometry, lengths: Lengths) -> None:
        if geometry.head_dim % PART:
            found = f"a key of {geometry.head_dim} elements cannot be cut into sub-vectors"
            raise ValueError(f"method {self.title}: {found}; allowed: a multiple of {PART}")
        super().check(geometry, lengths)

    def plan(self, cached: int) -> list[int]:
        """Numbers of tokens in the zone, of candidates, and for each tier of keys that get its
        vote, with `cached` tokens."""
        read = self.pages_read(cached)
        zone = max(0, cached - self.num_sinks - int(self.recent_frac * read))
        candidate_frac, collision_frac = shares_of(zone)
        if self.candidate_frac is not None:
            candidate_frac = self.candidate_frac
        to_read = read - (cached - zone)
        candidates = min(zone, max(math.ceil(zone * candidate_frac), to_read))
        with_votes = [math.ceil(zone * collision_frac * tier) for tier in TIERS]
        return [zone, candidates, *with_votes]


def shares_of(zone: int) -> tuple[float, float]:
    """The official code's shares of candidates and of keys with votes, by the zone's length."""
    for below, candidate_frac, collision_frac in SHARES:
        if zone < below:
            return candidate_frac, collision_frac
    raise AssertionError("the last zone has no limit")


def random_signs(head_dim: int, seed: int) -> Tensor:
    """1 or -1 for each element, fp32 [head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (head_dim,), generator=generator) * 2.0 - 1.0


@cache
def all_patterns(device: torch.device) -> Tensor:
    """The signs of each of the 256 patterns, fp32 [256, 8]: bit j of a pattern is element j."""
    numbers = torch.arange(2**PART, device=device).unsqueeze(-1)
    bits = numbers >> torch.arange(PART, device=device) & 1
    return bits * 2.0 - 1.0

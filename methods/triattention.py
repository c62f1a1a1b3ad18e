"""TriAttention (Mao et al., ICML 2026): score keys by the mean query, at the distances to come.

Before their positions, the queries of a head lie around a fixed centre. So the scores that a key
will get are those of the centre, which depend on the distance alone. Rotary positions turn planes
of two elements of a head; in a plane f with angle w_f, written as complex numbers,

    m_f = E[q_f], a_f = E|q_f|                               measured once, on a text
    score(k, D) = sum_f |m_f| |k_f| cos(w_f D + phi_f)       phi_f = arg(m_f conj(k_f))
                + sum_f (a_f - |m_f|) |k_f|                  the queries' spread around the centre

are of a key k at distance D. The first sum is the product of the key as it is cached with the
centre at the position D ahead of it, so that no position has to be taken off. Of the distances
D + 1, D + 2, D + 4, ... that are averaged, the centre is the mean of the centres there, one vector
for all keys. No query is looked at while a text is generated.

The rule, and where it differs (made into docs/methods.md):

**triattention**: after the prompt and after every `divide_length` (128) generated tokens, each KV
head goes back to `kept_tokens` (2,048), or with null to floor(`budget` · T) tokens, those of the
best score. A score is that of the mean query, at the distances D + 1, D + 2, D + 4, ..., D +
`offset_max_length` (65,536) from the next token, and of the queries' spread
(`methods/triattention.py` has the formula). Scores of a query head are brought to mean 0 and
variance 1 over the tokens that compete; of a group the best counts.
`protect_prompt` (true) keeps the prompt, which counts in the budget. Centres are measured on the
calibration text. An element of a head that has no rotary position has an angle of 0 and is a plane
by itself. A model without any rotary position (OPT) is refused.

- The official code has three modes. This is `per_layer_perhead_pruning`, the only one in which a
  layer does not wait for the others. Its experiments use `per_head_pruning`: a KV head keeps the
  same tokens in all layers, by the mean over the layers of the best score of its group.
- Its experiments compress when prompt and answer are `divide_length` tokens longer than the budget
  (`slack_budget_trigger`), so first at a length that follows from the budget, and not from the
  prompt. They keep the prompt, and of the answer the budget less the prompt.
- Its vLLM plug-in lets the prompt's tokens leave (`protect_prompt=false`) and keeps the last 128
  (`window=128`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.base import Calibration, Geometry
from methods.periodic import Held, KeyedState, Periodic
from methods.settings import least, require, setting

LEAST_DEVIATION = 1e-6
"""Least deviation of a head's scores, by which they are divided; as in the official code."""


class TriAttentionState(KeyedState):
    """partner: int64 [num_layers, head_dim], the other element of each element's plane, or itself
    where it has none. turn: fp64 [num_layers, head_dim], see `planes`. spread: fp32 [num_layers,
    heads, head_dim], a_f - |m_f| at the first element of each plane, 0 at the second. ahead: fp64
    [num_layers, heads, head_dim], the mean of the centres at the positions 1, 2, 4, ...
    """

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        assert calibration is not None, "new_state asks for it"
        device = self.lengths.final.device
        turn = calibration["turn"]
        if turn.device.type != "meta":
            family = f"model family {self.geometry.family!r} has none in layers that see all tokens"
            needed = f"used with rotary positions, which turn the centres: {family}"
            value = self.method.offset_max_length
            require(bool(turn.any()), "offset_max_length", value, needed)
        self.partner, self.turn = calibration["partner"].to(device), turn.to(device)
        self.spread = calibration["spread"].to(device).float()
        centre = calibration["centre"].to(device)
        partner = self.partner.unsqueeze(1).expand_as(centre)
        angle = self.turn.unsqueeze(1)
        self.ahead = torch.zeros_like(centre)
        offsets = self.method.offsets
        for offset in offsets:
            self.ahead += turned(centre, centre.gather(-1, partner), angle * offset)
        self.ahead /= len(offsets)

    def score(self, layer: int, held: Held) -> Tensor:
        keys = self.keys_of(layer, held).float()
        grouped = self._coming(layer, held.cached).unflatten(1, (keys.shape[1], -1))
        magnitudes = magnitude(keys, self.partner[layer])
        spread = self.spread[layer].unflatten(0, (keys.shape[1], -1))
        scores = grouped @ keys.mT + spread @ magnitudes.mT  # [batch, num_kv_heads, group, n]
        return standardized(scores, held.competes.unsqueeze(2)).amax(2)

    def _coming(self, layer: int, cached: Tensor) -> Tensor:
        """The mean of the centres at the positions that follow, fp32 [batch, heads, head_dim]."""
        ahead, partner = self.ahead[layer], self.partner[layer]
        angle = cached[:, None, None] * self.turn[layer]
        return turned(ahead, ahead[:, partner], angle).float()


@dataclass(frozen=True)
class TriAttention(Periodic):
    """The prompt stays, and the default budget is the official one.

    Source: TriAttention (ICML 2026)
    Keeps: the prompt, and the generated tokens that the mean query will score best
    """

    kept_tokens: int | None = 2048
    protect_prompt: bool = True
    offset_max_length: int = setting(
        65536, "scores are means over the distances 1, 2, 4, ... up to this one ahead", least(1)
    )

    title = "TriAttention"
    state = TriAttentionState

    @property
    def offsets(self) -> list[int]:
        """1, 2, 4, ... up to `offset_max_length`."""
        found = [1]
        while 2 * found[-1] <= self.offset_max_length:
            found.append(2 * found[-1])
        return found

    def calibrate(
        self, query: Tensor, key: Tensor, geometry: Geometry, earlier: Sequence[Calibration]
    ) -> Calibration:
        """centre, spread: fp64 [heads, head_dim], m_f as two elements, and a_f - |m_f| at the first
        of both. partner, turn: [head_dim], see `planes`."""
        layer = len(earlier)
        positions = torch.arange(query.shape[1], device=query.device)[None]
        bare = geometry.rotate(query[None], positions, inverse=True, layer=layer)[0].double()
        partner, turn = planes(geometry, layer, query)
        centre = bare.mean(1)
        spread = magnitude(bare, partner).mean(1) - magnitude(centre, partner)
        is_first = torch.arange(len(partner), device=query.device) <= partner
        return {"centre": centre, "spread": spread * is_first, "partner": partner, "turn": turn}


def planes(geometry: Geometry, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """partner int64 and turn fp64, [head_dim]: how a layer's rotary positions turn a head, read off
    unit vectors at position 1. like: a tensor of the layer's device.

    One position later, an element is cos(turn) times itself and sin(turn) times its partner.
    """
    units = torch.eye(geometry.head_dim, device=like.device)[None, :, None]
    one = torch.ones(1, 1, dtype=torch.long, device=like.device)
    made = geometry.rotate(units, one, layer=layer)[0, :, 0].double()  # [from, to]
    cosine = made.diagonal()
    crossing = made - torch.diag(cosine)
    partner = crossing.abs().argmax(0)
    sine = crossing.gather(0, partner[None])[0]
    itself = torch.arange(geometry.head_dim, device=like.device)
    return torch.where(sine == 0, itself, partner), torch.atan2(sine, cosine)


def turned(states: Tensor, partners: Tensor, angle: Tensor) -> Tensor:
    """States after their planes have turned by `angle`. partners: the states of the other element
    of each plane."""
    return states * angle.cos() + partners * angle.sin()


def magnitude(states: Tensor, partner: Tensor) -> Tensor:
    """The length of each element's plane, [..., head_dim]."""
    squares = states.square()
    itself = torch.arange(len(partner), device=partner.device)
    return torch.where(partner == itself, squares, squares + squares[..., partner]).sqrt()


def standardized(scores: Tensor, counts: Tensor) -> Tensor:
    """Scores [..., n] with mean 0 and variance 1 over those that count, bool [..., n]."""
    number = counts.sum(-1, keepdim=True).clamp(min=1)
    mean = (scores * counts).sum(-1, keepdim=True) / number
    off = scores - mean
    variance = (off.square() * counts).sum(-1, keepdim=True) / number
    return off / variance.sqrt().clamp(min=LEAST_DEVIATION)

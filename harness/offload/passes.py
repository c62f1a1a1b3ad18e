"""The forward passes of live decoding, seen from the layers: a prompt's, and a step's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness.model.attach import Attached, Handler
from harness.model.attention import dense_attention, heads_last, visible_to_prompt
from methods.base import attention_scores

if TYPE_CHECKING:
    from harness.offload.session import LiveSession


@dataclass
class Prompt:
    """A prefilled prompt that several methods can start from.

    real: bool [batch, prompt]; layers: (query, key, value) of each layer, [batch, heads, prompt, head_dim];
    hidden: final hidden states of the last column [batch, hidden_size].
    """

    real: Tensor
    layers: list[tuple[Tensor, Tensor, Tensor]]
    hidden: Tensor


def positions_of(real: Tensor) -> Tensor:
    """Positions of left-padded prompts, int [batch, prompt]; 0 in the padding."""
    return (real.cumsum(-1) - 1).clamp(min=0)


class PromptKeeper(Handler):
    """A dense pass that keeps every layer's query, key and value."""

    def __init__(self, scale: float, real: Tensor) -> None:
        self.scale = scale
        self.visible = visible_to_prompt(real)
        self.layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.layers.append((query, key, value))
        return dense_attention(query, key, value, self.scale, self.visible)


def run_prompt(attached: Attached, ids: Tensor, real: Tensor) -> Prompt:
    """One dense pass over left-padded prompts, ids and real [batch, prompt]."""
    keeper = PromptKeeper(attached.geometry.scale, real)
    hidden = attached.forward(ids, positions_of(real), keeper)
    return Prompt(real, keeper.layers, hidden[:, -1])


class PromptPass(Handler):
    """A dense pass that hands every layer to the session as it comes."""

    def __init__(self, session: LiveSession, real: Tensor) -> None:
        self.session = session
        self.visible = visible_to_prompt(real)

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.session.keep_prompt(layer, query, key, value)
        return dense_attention(query, key, value, self.session.attached.geometry.scale, self.visible)


class StepPass(Handler):
    """One token: each layer asks for the next one's rows, waits for its own, attends, and writes its row back."""

    def __init__(self, session: LiveSession) -> None:
        self.session = session
        self.read = torch.zeros(len(session.positions), dtype=torch.float64, device=session.positions.device)
        self.timeline = session.timeline

    def layer_begins(self, layer: int) -> None:
        """The rehearsal comes first, the next layer's query projection included."""
        following = layer + 1
        is_last = following == self.session.attached.geometry.num_layers
        self.timeline.switch("prediction" if not is_last and self.rehearses(following) else "attention")

    def layer_ends(self, layer: int) -> None:
        self.timeline.switch("ffn")

    def rehearses(self, layer: int) -> bool:
        return self.session.method.rehearses and self.session.selecting(layer) is not None

    def rehearse(self, layer: int, query: Tensor) -> None:
        state = self.session.selecting(layer)
        assert state is not None, "only layers that select are rehearsed"
        selection = state.select(layer, self.session.rows(query, self.session.slots_of(layer), _no_scores))
        self.read += selection.num_read[:, 0]
        assert selection.mask is not None
        self.session.request_selected(layer, selection.mask[:, :, 0])
        self.timeline.switch("attention")

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._request_next(layer)
        self.timeline.switch("transfer")
        self.session.fetcher.wait(layer)
        self.timeline.switch("attention")
        keys, values, present = self.session.fetcher.take(layer)
        scale = self.session.attached.geometry.scale
        scores = attention_scores(query, keys, scale)  # [batch, kv, group, 1, n]
        own = attention_scores(query, key, scale)
        hidden = ~present[:, :, None] if present is not None else self._hidden(layer)
        if hidden is not None:
            scores.masked_fill_(hidden.unsqueeze(2), float("-inf"))
        scores = torch.cat([scores, own], -1)
        self._select(layer, query, scores)
        probs = scores.softmax(-1).to(value.dtype)
        output = probs[..., 0, :-1] @ values + probs[..., 0, -1:] * value  # [batch, kv, group, head_dim]
        self.session.keep_own(layer, key, value)
        return heads_last(output.unsqueeze(3))

    def _request_next(self, layer: int) -> None:
        """Ask for the next layer's rows where they are known, and for the next step's first ones."""
        session = self.session
        following, num_layers = layer + 1, session.attached.geometry.num_layers
        is_known = not self.rehearses(following)
        if session.ahead <= following < num_layers and is_known:
            session.request(following, session.columns)
        if session.last_step:
            return
        if layer >= session.ahead > 0:
            session.request_ahead(layer, session.columns + 1)
        elif following == num_layers:
            session.request(0, session.columns + 1)

    def _hidden(self, layer: int) -> Tensor | None:
        """Fetched slots that hold no token this row may see, bool [batch, 1 or kv, 1, n]; None where all do."""
        slots = self.session.slots_of(layer)
        if not self.session.padded and slots.shape[1] == 1:
            return None
        return slots[:, :, None, :-1] >= self.session.positions[:, None, None, None]

    def _select(self, layer: int, query: Tensor, scores: Tensor) -> None:
        """Let a method that looks at the fetched rows choose among them; `scores` has the own row last."""
        session = self.session
        state = session.selecting(layer)
        if state is None:
            if layer >= session.method.num_exempt_layers:
                self.read += session.positions
        elif not self.rehearses(layer):
            selection = state.select(layer, session.rows(query, session.slots_of(layer), lambda: scores))
            self.read += selection.num_read[:, 0]
            if selection.mask is not None:
                scores[..., :-1].masked_fill_(~selection.mask[..., :-1].unsqueeze(2), float("-inf"))


def _no_scores() -> Tensor:
    raise AssertionError("a rehearsal selects before the true scores are known")

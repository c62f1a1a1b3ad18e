"""Prompts that the model reads twice: the second reading tells a method which tokens to keep.

After the dense pass of a method that `rereads_prompt` the model runs over the rows that the method
lists (`repetitions`). They follow the prompt: each sees all of it and the rows
before it in its own pass, and none is kept. Sequences run one by one, so that each is what it is
alone. Every layer's prompt is held until then, since a method may share a budget between layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.errors import UserError
from harness.model.attached import Attached
from harness.model.attention import dense_attention, seen_by_last
from harness.model.decoder import output_factor
from harness.model.model_cache import ModelCache
from harness.model.passes import Handler, Keep, PrefilledPrompt
from harness.model.prompts import dense_pass, held_prompt, kept_bytes, prompt_bytes, shared_prompt
from methods.base import LayerInputs, Method, PromptRows, Repetition, RereadRows, State, checked


@torch.inference_mode()
def run_prompts(
    attached: Attached,
    method: Method,
    state: State | None,
    ids: Tensor,
    real: Tensor,
    keep: Keep,
    model_cache: ModelCache,
) -> Tensor:
    """Run left-padded prompts densely, or take a kept pass. Reread them if the method asks for it.

    ids, real: [batch, prompt]. keep: takes every layer, as they come or after the second reading,
    with the layer's inputs where the method needs them, which no kept pass has. Returns final
    hidden states of the dense pass [batch, prompt, hidden_size].
    """
    if method.needs_inputs:
        return dense_pass(attached, ids, real, model_cache, keep, needs_inputs=True)
    passes = planned(attached, method, ids, real) if method.rereads_prompt else []
    shared = shared_prompt(attached, ids, real)
    if shared is not None:
        prompt, hidden = shared
        model_cache.num_columns = ids.shape[1]  # as after a pass
    elif method.rereads_prompt:
        prompt, hidden = held_prompt(attached, ids, real, model_cache)
    else:
        return dense_pass(attached, ids, real, model_cache, keep)
    if method.rereads_prompt:
        read_again(attached, method, state, prompt, passes)
    prompt.hand_to(keep)
    return hidden


class Pass(NamedTuple):
    """A repetition by one sequence of a batch. at: the sequence; first: its first column; ids,
    positions: int [1, rows]."""

    at: int
    first: int
    ids: Tensor
    positions: Tensor
    repetition: Repetition


def planned(attached: Attached, method: Method, ids: Tensor, real: Tensor) -> list[Pass]:
    """The passes that a method asks for after prompts ids, real [batch, prompt].

    They are made before the dense pass, while a GPU has nothing to do. Raises UserError where they
    take more positions than the model has.
    """
    passes = []
    for at, length in enumerate(real.sum(-1).tolist()):
        first = ids.shape[1] - length
        for repetition in method.repetitions(length):
            parts = []
            for part in repetition.parts:
                if isinstance(part, slice):
                    parts.append(ids[at, first:][part])
                else:
                    parts.append(ids.new_tensor(part))
            rows = torch.cat(parts)[None]
            _require_positions(attached, method, length, rows.shape[1])
            positions = torch.arange(length, length + rows.shape[1], device=ids.device)[None]
            passes.append(Pass(at, first, rows, positions, repetition))
    return passes


@torch.inference_mode()
def read_again(
    attached: Attached,
    method: Method,
    state: State | None,
    prompt: PrefilledPrompt,
    passes: Sequence[Pass],
) -> None:
    """Run the `planned` passes after a prompt, and give the state the score of each token by layer
    under the method, fp32 [batch, num_kv_heads, prompt]. Raises UserError where the method needs an
    output projection that cannot be read."""
    if state is None:
        return
    batch, num_columns = prompt.real.shape
    shape = batch, attached.geometry.num_kv_heads, num_columns
    score = {}
    for number in range(method.dense_layers, attached.geometry.num_layers):
        score[number] = torch.zeros(shape, device=attached.device)
    for at, first, ids, positions, repetition in passes:
        own = slice(at, at + 1), slice(None), slice(first, None)
        alone = []
        for states in prompt.layers:
            alone.append((states.query[own], states.key[own], states.value[own]))
        handler = _RereadPass(attached, method, alone, repetition)
        cache = prompt.model_cache.fork(torch.arange(at, at + 1, device=ids.device))
        attached.forward(ids, positions, handler, cache)
        chunk = slice(first + repetition.chunk.start, first + repetition.chunk.stop)
        for number, found in handler.score.items():
            score[number][at, :, chunk] = found
    state.take_scores(score, PromptRows(prompt.real, num_columns))


def held_bytes(attached: Attached, num_tokens: int) -> int:
    """Bytes of all layers' queries, keys and values of so many tokens, and of a pass over them."""
    return kept_bytes(attached, num_tokens) + prompt_bytes(attached, num_tokens)


def _require_positions(attached: Attached, method: Method, prompt: int, rows: int) -> None:
    attached.require_length(prompt + rows)
    most = getattr(attached.decoder.stack.config, "max_position_embeddings", None)
    if most and prompt + rows > most:
        raise UserError(
            f"method {method.title}: a prompt of {prompt} tokens and the {rows} in which a "
            f"part of it is repeated take {prompt + rows} positions, and the model has {most}; "
            "lower the prompt's length or method.chunk_size"
        )


class _RereadPass(Handler):
    """A pass over rows behind the prompt of one sequence.

    prompt: (query, key, value) of every layer, [1, heads, prompt, size]. score: what the method
    makes of each layer.
    """

    def __init__(
        self,
        attached: Attached,
        method: Method,
        prompt: Sequence[tuple[Tensor, Tensor, Tensor]],
        repetition: Repetition,
    ) -> None:
        self.attached = attached
        self.method = method
        self.prompt = prompt
        self.repetition = repetition
        self.score: dict[int, Tensor] = {}
        self.needs_inputs = method.needs_norms
        self.input_norms: Tensor | None = None

    def take_inputs(self, layer: int, inputs: LayerInputs) -> None:
        self.input_norms = inputs.hidden[0].float().norm(dim=-1)

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        _, prompt_key, prompt_value = self.prompt[layer]
        softmax, number = self.attached.layers[layer].softmax, self.attached.numbers[layer]
        if number is not None and number >= self.method.dense_layers:
            value_norms = self._value_norms(layer, prompt_value) if self.needs_inputs else None
            chunk = self.repetition.chunk
            rows = RereadRows(query, key, prompt_key, chunk, self.input_norms, value_norms)
            reread = self.method.reread
            sizes = key.shape[1], chunk.stop - chunk.start
            score = checked(reread, reread(rows, softmax), "KV heads, chunk", *sizes)
            self.score[number] = score
        keys = torch.cat([prompt_key, key], 2)
        values = torch.cat([prompt_value, value], 2)
        tokens = torch.arange(keys.shape[2], device=keys.device)
        visible = seen_by_last(tokens, query.shape[2], self.attached.layers[layer].window)
        return dense_attention(query, keys, values, softmax, visible[None, None])

    def _value_norms(self, layer: int, prompt_value: Tensor) -> Tensor:
        """Lengths of the chunk's values behind the output projection, fp32 [heads, chunk]."""
        values = prompt_value[0, :, self.repetition.chunk].float()
        factor = output_factor(self.attached.decoder, self.attached.layers[layer])
        of_heads = values.repeat_interleave(len(factor) // len(values), 0)
        return (of_heads @ factor.mT).norm(dim=-1)

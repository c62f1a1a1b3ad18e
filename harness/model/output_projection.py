"""The output projection of an attention layer by query head, found by running the layer's code."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.model.calls import (
    attention_function,
    first_tensor,
    refusal,
    reraise_out_of_memory,
    tolerance,
)
from harness.model.decoder import Decoder
from harness.model.model_cache import ModelCache
from harness.model.trace import Layer


def output_factor(decoder: Decoder, layer: Layer) -> Tensor:
    """Matrices R, fp32 [heads, value_dim, value_dim], with |R v| = |W_O v| for what a head's part
    of the layer's output projection makes of a value v.

    Made once for a layer. Raises UserError as `output_matrix`.
    """
    if layer.output_factor is None:
        matrix = output_matrix(decoder, layer)
        layer.output_factor = torch.linalg.qr(matrix.mT).R
    return layer.output_factor


def output_matrix(decoder: Decoder, layer: Layer) -> Tensor:
    """The output projection by query head, fp32 [heads, value_dim, hidden_size]: for a value v a
    head adds v @ matrix[head] to the layer's output. That of latent values takes the latent.

    The projection is found by the module's own code: it is given unit vectors for the output of its
    attention. It is made anew in each call, since the matrices of all layers in fp32 may be larger
    than a prompt's cache. Raises UserError where the module does not multiply that by a matrix
    alone, as one with an output gate.
    """
    heads = layer.num_heads
    value_dim = layer.value_dim if layer.latent is None else layer.latent.to_value.shape[2]
    size, like = heads * value_dim, layer.call.hidden
    # Any numbers do, if they are made where the layer computes.
    places = torch.arange(like.numel(), dtype=torch.float32, device=like.device)
    inputs = places.sin().view(like.shape).to(like)
    unit = torch.eye(size, dtype=like.dtype, device=like.device)
    any_row = torch.arange(size, dtype=torch.float32, device=like.device).cos()[None].to(like)
    given = torch.cat([torch.zeros_like(any_row), any_row, unit])
    attended = given.view(-1, 1, heads, value_dim).expand(-1, like.shape[1], -1, -1)

    def output(part: Tensor) -> Tensor:
        """What the module makes of `part` [n, rows, heads, value_dim]: [n, rows, hidden_size]."""
        cache = ModelCache(decoder.stack.config)
        call = layer.rerun(inputs.repeat(len(part), 1, 1), cache)
        with attention_function(decoder.stack, lambda *_, **__: (part.contiguous(), None)):
            made = first_tensor(layer.module.forward(*call.args, **call.kwargs))
        assert made is not None
        return made.float()

    try:
        nothing, of_any, *units = torch.cat([output(part) for part in attended.split(256)])
    except RuntimeError as error:
        reraise_out_of_memory(error)
        why = "its output projection cannot be run alone, which this method needs"
        raise refusal(decoder.family, why) from error
    by_row = torch.stack(units) - nothing  # [size, rows, hidden_size]
    matrix = by_row[:, 0]
    if not layer.is_output_plain:
        _require_plain(decoder, any_row.float() @ matrix, of_any - nothing, tolerance(like.dtype))
        layer.is_output_plain = True
    matrix = matrix.view(heads, value_dim, -1)
    return matrix if layer.latent is None else layer.latent.to_value.float() @ matrix


def _require_plain(decoder: Decoder, expected: Tensor, got: Tensor, largest: float) -> None:
    """Raises UserError where an output `got` [rows, hidden_size] of a layer is not `expected`
    [1, hidden_size], what its projection alone gives. Waits for the device."""
    close = largest * float(expected.abs().max())
    if not torch.allclose(got, expected.expand_as(got), atol=close):
        raise refusal(
            decoder.family,
            "its attention's output passes more than a projection, such as a gate, of which this "
            "method does not know",
        )

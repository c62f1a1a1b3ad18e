"""Modules that a pass runs over some of its rows at a time.

Recurrent modules must not see padding, and some take only one row after a state. Feed-forward
networks make much more on the way than they return, so a long prompt's rows go in parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from harness.model.calls import Call
from harness.model.decoder import Decoder
from harness.model.model_cache import ModelCache


def in_parts(decoder: Decoder, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The output of a module that computes each row by itself, some rows at a time.

    Its input is [batch, rows, ...]. What else it is given row by row is split alike.
    """
    hidden = Call(args, kwargs).hidden
    batch, num_rows = shape = hidden.shape[:2]
    most = decoder.rows_at_once // batch or 1
    if hidden.dim() != 3 or num_rows <= most:
        return forward(*args, **kwargs)

    outputs = []
    for rows in torch.arange(num_rows).split(most):
        part = _part_of(Call(args, kwargs), shape, slice(None), rows)
        outputs.append(forward(*part.args, **part.kwargs))

    def joined(*parts: Tensor) -> Tensor:
        if parts[0].dim() > 2:
            return torch.cat(parts, 1)
        # The rows of all sequences lie in the first axis.
        by_sequence = [part.unflatten(0, (batch, -1)) for part in parts]
        return torch.cat(by_sequence, 1).flatten(0, 1)

    return tree_map(joined, *outputs)


class RecurrentRows:
    """Runs recurrent modules during one pass.

    cache: of the batch. real: bool [batch, rows], False for padding. is_padded: some of `real` are
    False. In a padded batch each sequence's own rows run alone, with its own state. Rows run one by
    one where the module takes only one row after a state.
    """

    def __init__(
        self, cache: ModelCache, real: Tensor, *, is_padded: bool, takes_rows: bool
    ) -> None:
        self.cache = cache
        self.real = real
        self.is_padded = is_padded
        self.one_by_one = not takes_rows and cache.num_columns > 0 and real.shape[1] > 1

    def run(self, module: nn.Module, forward: Callable[..., Any], call: Call) -> Any:
        """The output of a recurrent module, whose code is `forward`."""
        if not self.is_padded and not self.one_by_one:
            return forward(*call.args, **call.kwargs)
        if not self.is_padded:
            rows = torch.arange(self.real.shape[1])
            return self._run_rows(forward, call, self.cache, slice(None), rows)
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        forks, outputs = [], []
        for at, real in enumerate(self.real):
            fork = self.cache.fork_layer(layer, torch.tensor([at]))
            forks.append(fork)
            if real.any():  # else these are rows after the sequence's end
                rows = real.nonzero().flatten()
                outputs.append(self._run_rows(forward, call, fork, slice(at, at + 1), rows))
        self.cache.join_layer(layer, forks)
        return tree_map(self._padded, *outputs)

    def _run_rows(
        self,
        forward: Callable[..., Any],
        call: Call,
        cache: ModelCache,
        sequences: slice,
        rows: Tensor,
    ) -> Any:
        """The module's output for the rows int [n] of some sequences, whose states `cache` has."""
        outputs = []
        for some_rows in rows.split(1) if self.one_by_one else [rows]:
            part = _part_of(call, self.real.shape, sequences, some_rows)
            args = [cache if value is self.cache else value for value in part.args]
            kwargs = {}
            for name, value in part.kwargs.items():
                if name != "attention_mask":
                    kwargs[name] = cache if value is self.cache else value
            outputs.append(forward(*args, **kwargs))
        if not self.one_by_one:
            return outputs[0]
        return tree_map(lambda *parts: torch.cat(parts, 1), *outputs)

    def _padded(self, *parts: Tensor) -> Tensor:
        """The outputs [1, n, ...] of all sequences as [batch, rows, ...], zeros in the padding."""
        joined = parts[0].new_zeros(*self.real.shape, *parts[0].shape[2:])
        joined[self.real] = torch.cat([part[0] for part in parts])
        return joined


def _part_of(call: Call, shape: torch.Size, sequences: slice, rows: Tensor) -> Call:
    """The call of some sequences' rows, int [n]. Arguments that have all rows are of shape [batch,
    rows] first; others stay as they are."""

    def part(value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape[:2] == shape:
            return value[sequences, rows.to(value.device)]
        return value

    args = tuple(part(value) for value in call.args)
    return Call(args, {name: part(value) for name, value in call.kwargs.items()})

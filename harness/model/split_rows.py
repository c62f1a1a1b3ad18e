"""Modules that a pass runs over some of its rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from harness.model.calls import Call
from harness.model.decoder import Decoder


def in_parts(decoder: Decoder, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The output of a module that computes each row by itself, `decoder.rows_at_once` rows at a
    time.

    Its input is [batch, rows, ...]. What else it is given row by row is split alike.
    """
    hidden = Call(args, kwargs).hidden
    batch, num_rows = shape = hidden.shape[:2]
    most = decoder.rows_at_once // batch or 1
    if hidden.dim() != 3 or num_rows <= most:
        return forward(*args, **kwargs)

    def run(rows: Tensor) -> Any:
        """The module's output for rows [n] of each sequence."""
        part = partial(rows_of, shape=shape, at=slice(None), rows=rows)
        return forward(*map(part, args), **{name: part(each) for name, each in kwargs.items()})

    def joined(*parts: Tensor) -> Tensor:
        if parts[0].dim() > 2:
            return torch.cat(parts, 1)
        return torch.cat([each.unflatten(0, (batch, -1)) for each in parts], 1).flatten(
            0, 1
        )  # rows of all sequences

    return tree_map(joined, *map(run, torch.arange(num_rows).split(most)))


def rows_of(each: Any, shape: torch.Size, at: slice, rows: Tensor) -> Any:
    """Some sequences' rows, int [n], of an argument that has all of them, of shape [batch, rows]
    first; else itself."""
    has_rows = isinstance(each, Tensor) and each.shape[:2] == shape
    return each[at, rows.to(each.device)] if has_rows else each

"""Arguments of an attached model's calls: found by name, and refused where they are not heeded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.errors import UserError
from harness.model.generation import short

HARMLESS = {"cache_position", "num_items_in_batch", "tokenizer"}
"""Further arguments of a model's `forward`. `cache_position` follows from the cache. The
`tokenizer` is that of stop strings, which transformers' `generate` hands on."""


def by_name(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by their names."""
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def checked_ids(ids: Any) -> Tensor:
    """Token ids, int [batch, tokens]; UserError for anything else."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() != 2 or not ids.numel():
        found = short(ids)
        if isinstance(ids, Tensor):
            found = f"{str(ids.dtype).removeprefix('torch.')} of shape {tuple(ids.shape)}"
        raise UserError(f"input_ids: {found}; allowed: a tensor of token ids, int [batch, tokens]")
    return ids


def require_harmless(others: Mapping[str, Any]) -> None:
    """Raise UserError for an argument that would change the result and is not taken."""
    for name, value in others.items():
        if name in HARMLESS:
            continue
        changes = value.any() if isinstance(value, Tensor) else value not in (None, False)
        if changes:
            why = "an attached model does not take it; leave it out"
            raise UserError(f"{name}={short(value)}: {why}")


def real_tokens(ids: Tensor, mask: Tensor | None) -> Tensor:
    """bool [batch, rows], False for padding. Raises UserError for a mask of another shape."""
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    if mask.shape != ids.shape or not bool(mask.any(-1).all()):
        raise UserError(
            f"attention_mask: of shape {tuple(mask.shape)}; allowed: that of input_ids, "
            f"{tuple(ids.shape)}, with at least one 1 in each row"
        )
    return mask.to(ids.device).bool()


def require_continued(mask: Tensor | None, real: Tensor, num_columns: int) -> None:
    """Raise UserError for the mask of a continuation that hides other tokens than the prompt's
    padding did. real: bool [batch, prompt]; num_columns: of the cache and the new rows."""
    if mask is None:
        return
    seen = pad(real, (0, num_columns - real.shape[1]), value=True)
    if mask.shape != seen.shape or not torch.equal(mask.to(seen.device).bool(), seen):
        raise UserError(
            "attention_mask: behind this cache it is the prompt's with ones for all later tokens, "
            f"of shape {tuple(seen.shape)}; or leave it out"
        )


def require_positions(given: Tensor | None, expected: Tensor, real: Tensor | bool = True) -> None:
    """Raise UserError for positions that are not those of the tokens."""
    if given is None:
        return
    batch, num_rows = expected.shape
    fits = given.shape in ((1, num_rows), (batch, num_rows))
    if not fits or bool(((given.to(expected.device) != expected) & real).any()):
        raise UserError(
            "position_ids: an attached model counts a sequence's tokens from 0; leave position_ids "
            "out"
        )

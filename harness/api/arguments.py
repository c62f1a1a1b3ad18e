"""Arguments of an attached model's calls: found by name, and refused where they are not taken."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.errors import UserError
from harness.model.attached import Attached
from harness.model.generation import short

ONLY: dict[str, tuple[Any, ...]] = {
    "inputs_embeds": (),
    "assistant_model": (),
    "assistant_tokenizer": (),
    "custom_generate": (),
    "negative_prompt_ids": (),
    "negative_prompt_attention_mask": (),
    "synced_gpus": (False,),
}
"""Arguments of transformers' `generate`, besides those of its `GenerationConfig`, that an attached
model does not take, and the values besides None that it does."""
HANDLED = {
    "input_ids", "attention_mask", "position_ids", "past_key_values", "labels", "use_cache",
    "logits_to_keep", "num_logits_to_keep", "return_dict", "cache_position", "num_items_in_batch",
    "tokenizer",
}  # fmt: skip
"""Arguments of a model's `forward` that an attached model takes. `cache_position` follows from the
cache. The `tokenizer` is that of stop strings, which transformers' `generate` hands on."""
TRANSFORMERS_NEW_TOKENS = 20
"""What transformers' `generate` makes where nothing says how many tokens."""


def first_given(*values: Any) -> Any:
    """The first value that is not None; None where all are."""
    for value in values:
        if value is not None:
            return value
    return None


def by_name(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by their names."""
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def checked_ids(name: str, ids: Any, attached: Attached) -> Tensor:
    """Token ids [batch, tokens]; UserError for anything else."""
    allowed = "allowed: a tensor of token ids, int [batch, tokens]"
    if ids is None:
        raise UserError(f"{name}: missing; {allowed}")
    if not isinstance(ids, Tensor):
        raise UserError(f"{name}: a {type(ids).__name__}; {allowed}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise UserError(f"{name}: a tensor of {str(ids.dtype).removeprefix('torch.')}; {allowed}")
    if ids.dim() != 2 or not ids.numel():
        raise UserError(f"{name}: of shape {tuple(ids.shape)}; {allowed}, none of them 0")
    num_tokens = attached.decoder.stack.get_input_embeddings().weight.shape[0]
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= num_tokens:
        outside = lowest if lowest < 0 else highest
        known = f"the model knows the tokens 0 to {num_tokens - 1}"
        raise UserError(f"{name}: token {outside}; {known}")
    return ids


# Arguments of generate


def require_taken(asked: Mapping[str, Any]) -> None:
    """Raise UserError for an argument of `generate` that an attached model does not take."""
    for name, allowed in ONLY.items():
        value = asked.get(name)
        if value is not None and value not in allowed:
            choices = " or ".join(map(repr, allowed or (None,)))
            raise UserError(
                f"{name}={short(value)}: an attached model does not take it; allowed: {choices}"
            )


# Arguments of forward


def require_handled(given: Mapping[str, Any]) -> None:
    """Raise UserError for an argument that would change the result and is not taken."""
    for name, value in given.items():
        if name in HANDLED:
            continue
        changes = value.any() if isinstance(value, Tensor) else value not in (None, False)
        if changes:
            why = "an attached model does not take it; leave it out"
            raise UserError(f"{name}={short(value)}: {why}")


def real_tokens(ids: Tensor, mask: Tensor | None) -> Tensor:
    """bool [batch, rows], False for padding. Raises UserError for a mask of another shape."""
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    if mask.shape != ids.shape:
        raise UserError(
            f"attention_mask: of shape {tuple(mask.shape)}, and input_ids {tuple(ids.shape)}; "
            "allowed: the same"
        )
    real = mask.to(ids.device).bool()
    if not bool(real.any(-1).all()):
        raise UserError(
            "attention_mask: a sequence without tokens; allowed: at least one 1 in each row"
        )
    return real


def require_continued(mask: Tensor | None, real: Tensor, num_columns: int, num_rows: int) -> None:
    """Raise UserError for the mask of a continuation that hides other tokens than the prompt's
    padding did. real: bool [batch, prompt]; num_columns: of the cache; num_rows: new ones."""
    if mask is None:
        return
    seen = pad(real, (0, num_columns + num_rows - real.shape[1]), value=True)
    if mask.shape != seen.shape or not torch.equal(mask.to(seen.device).bool(), seen):
        raise UserError(
            "attention_mask: behind this cache it is the prompt's with ones for all later tokens, "
            f"of shape {tuple(seen.shape)}; or leave it out"
        )


def require_positions(given: Tensor | None, expected: Tensor, real: Tensor) -> None:
    """Raise UserError for positions that are not those of the tokens."""
    if given is None:
        return
    positions = given.to(expected.device)
    batch, num_rows = expected.shape
    fits = positions.shape in ((1, num_rows), (batch, num_rows))
    if not fits or bool(((positions != expected) & real).any()):
        raise UserError(
            "position_ids: an attached model counts a sequence's tokens from 0; leave position_ids "
            "out"
        )

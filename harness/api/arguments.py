"""Arguments of an attached model's calls: by their names, and refused where they cannot be taken."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.errors import UserError
from harness.live.session import LiveSession
from harness.model.attached import Attached

ONLY: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "use_cache": (True,),
    "guidance_scale": (1,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "use_mtp": (False,),
    "assistant_model": (),
    "assistant_early_exit": (),
    "speculation_type": (),
    "prompt_lookup_num_tokens": (),
    "prefill_chunk_size": (),
    "cache_implementation": (),
    "past_key_values": (),
    "inputs_embeds": (),
    "custom_generate": (),
    "penalty_alpha": (),
    "dola_layers": (),
}
"""Settings of transformers' `generate` that a live cache does not take, and the values besides None
that it does."""
HANDLED = {
    "input_ids", "attention_mask", "position_ids", "past_key_values", "labels", "use_cache", "logits_to_keep",
    "num_logits_to_keep", "return_dict", "cache_position", "num_items_in_batch",
}  # fmt: skip
"""Arguments of a model's `forward` that an attached model takes. `cache_position` follows from the
cache."""
TRANSFORMERS_NEW_TOKENS = 20
"""What transformers' `generate` makes where nothing says how many tokens."""


def first_given(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def by_name(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by their names."""
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def settings_of(config: Any) -> Mapping[str, Any]:
    return {} if config is None else vars(config)


def short(value: Any) -> str:
    """A value in an error's line."""
    return (
        repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    )


def checked_ids(name: str, ids: Any, attached: Attached) -> Tensor:
    """Token ids [batch, tokens]; UserError for anything else."""
    allowed = "allowed: a tensor of token ids, int [batch, tokens]"
    if not isinstance(ids, Tensor):
        raise UserError(
            f"{name}: {'missing' if ids is None else f'a {type(ids).__name__}'}; {allowed}"
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise UserError(f"{name}: a tensor of {str(ids.dtype).removeprefix('torch.')}; {allowed}")
    if ids.dim() != 2 or not ids.numel():
        raise UserError(f"{name}: of shape {tuple(ids.shape)}; {allowed}, none of them 0")
    num_tokens = attached.decoder.stack.get_input_embeddings().weight.shape[0]
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= num_tokens:
        outside = lowest if lowest < 0 else highest
        raise UserError(
            f"{name}: token {outside}; the model knows the tokens 0 to {num_tokens - 1}"
        )
    return ids


def require_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name}={short(value)}: allowed: a number of tokens, 1 or more")


def new_tokens(configs: list[Mapping[str, Any]], num_prompt: int) -> int:
    """The largest number of new tokens of a `generate`, as transformers resolves it.

    configs: settings by name, those that win first. num_prompt: columns of the prompt.
    """
    num_new = first_given(*(config.get("max_new_tokens") for config in configs))
    if num_new is not None:
        require_count("max_new_tokens", num_new)
        return int(num_new)
    most = first_given(*(config.get("max_length") for config in configs))
    if most is None:
        return TRANSFORMERS_NEW_TOKENS
    require_count("max_length", most)
    if most <= num_prompt:
        raise UserError(
            f"max_length={most}: the prompt has {num_prompt} tokens; raise it, or give max_new_tokens"
        )
    return int(most) - num_prompt


def require_handled(given: Mapping[str, Any]) -> None:
    """Raise UserError for an argument that would change the result and is not taken."""
    for name, value in given.items():
        if name in HANDLED:
            continue
        changes = bool(value.any()) if isinstance(value, Tensor) else value not in (None, False)
        if changes:
            raise UserError(
                f"{name}={short(value)}: an attached model does not take it; leave it out"
            )


def real_tokens(ids: Tensor, mask: Tensor | None) -> Tensor:
    """bool [batch, rows], False for padding. Raises UserError for a mask of another shape."""
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    if mask.shape != ids.shape:
        raise UserError(
            f"attention_mask: of shape {tuple(mask.shape)}, and input_ids {tuple(ids.shape)}; allowed: the same"
        )
    real = mask.to(ids.device).bool()
    if not bool(real.any(-1).all()):
        raise UserError(
            "attention_mask: a sequence without tokens; allowed: at least one 1 in each row"
        )
    return real


def require_continued(mask: Tensor | None, session: LiveSession, num_rows: int) -> None:
    """Raise UserError for the mask of a continuation that hides other tokens than the prompt's
    padding did."""
    if mask is None:
        return
    real = session.batch.real
    seen = pad(real, (0, session.steps + num_rows), value=True)
    if mask.shape != seen.shape or not torch.equal(mask.to(seen.device).bool(), seen):
        raise UserError(
            f"attention_mask: behind this cache it is the prompt's with ones for all later tokens, of shape "
            f"{tuple(seen.shape)}; or leave it out"
        )


def require_positions(given: Tensor | None, expected: Tensor, real: Tensor) -> None:
    """Raise UserError for positions that are not those of the tokens."""
    if given is None:
        return
    positions = given.to(expected.device)
    fits = (
        positions.dim() == 2
        and positions.shape[1] == expected.shape[1]
        and positions.shape[0] in (1, len(expected))
    )
    if not fits or bool(((positions != expected) & real).any()):
        raise UserError(
            "position_ids: an attached model counts a sequence's tokens from 0; leave position_ids out"
        )

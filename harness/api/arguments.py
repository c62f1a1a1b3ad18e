"""Arguments of an attached model's calls: found by name, and refused where they are not taken."""

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
    "input_ids", "attention_mask", "position_ids", "past_key_values", "labels", "use_cache",
    "logits_to_keep", "num_logits_to_keep", "return_dict", "cache_position", "num_items_in_batch",
}  # fmt: skip
"""Arguments of a model's `forward` that an attached model takes. `cache_position` follows from the
cache."""
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


def short(value: Any) -> str:
    """A value in an error's line."""
    if isinstance(value, str | int | float | None):
        return repr(value)
    return f"a {type(value).__name__}"


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


# Settings of generate


class GenerateSettings:
    """Settings of a call of transformers' `generate`: the call's own, else those of the
    `generation_config` that it was given, else those of the model's."""

    def __init__(self, asked: Mapping[str, Any], own_config: Any) -> None:
        self.asked = asked
        self.configs = [asked]
        for config in (asked.get("generation_config"), own_config):
            if config is not None:
                self.configs.append(vars(config))

    def get(self, name: str) -> Any:
        """The value of a setting; None where nothing says it."""
        return first_given(*[config.get(name) for config in self.configs])

    def require_supported(self) -> None:
        """Raise UserError for a setting that a live cache does not take."""
        for name, allowed in ONLY.items():
            value = self.get(name)
            if value is not None and value not in allowed:
                choices = " or ".join(map(repr, (*allowed, None)))
                raise UserError(
                    f"{name}={short(value)}: a method's live cache does not take it; "
                    f"allowed: {choices}"
                )

    def num_new_tokens(self, num_prompt: int) -> int:
        """The largest number of new tokens, as transformers resolves it; num_prompt: columns."""
        if "max_new_tokens" in self.asked:
            _require_count("max_new_tokens", self.asked["max_new_tokens"])
        num_new = self.get("max_new_tokens")
        if num_new is not None:
            return _require_count("max_new_tokens", num_new)
        most = self.get("max_length")
        if most is None:
            return TRANSFORMERS_NEW_TOKENS
        _require_count("max_length", most)
        if most <= num_prompt:
            raise UserError(
                f"max_length={most}: the prompt has {num_prompt} tokens; raise it, or give "
                "max_new_tokens"
            )
        return most - num_prompt


def _require_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name}={short(value)}: allowed: a number of tokens, 1 or more")
    return value


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


def require_continued(mask: Tensor | None, session: LiveSession, num_rows: int) -> None:
    """Raise UserError for the mask of a continuation that hides other tokens than the prompt's
    padding did."""
    if mask is None:
        return
    real = session.batch.real
    seen = pad(real, (0, session.steps + num_rows), value=True)
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

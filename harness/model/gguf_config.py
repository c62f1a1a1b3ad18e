"""The transformers configuration of a GGUF file, compared with the file's metadata key by key.

transformers takes the keys that it knows for a family and leaves out the others, such as the
scaling of rotary positions. Here each key of the family (`llama.rope.scaling.type`) is one of four
kinds:

1. It says what a field of the configuration says (`FIELDS`). Where the two differ the file counts.
2. It belongs to the rotary positions, which `_with_rope` sets as llama.cpp computes them.
3. The shapes of the weights prove it, or it plays no part in a pass (`NO_PART`).
4. Anything else is refused in one line, since the model would compute something else.

`require_all_weights` compares the tensors in the same way.
"""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FIELDS = {
    "context_length": ("max_position_embeddings", "seq_length"),
    "block_count": ("num_hidden_layers",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": (
        "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps",
    ),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
    "use_parallel_residual": ("use_parallel_residual",),
    "full_attention_interval": ("full_attention_interval",),
    "attention.sliding_window_pattern": ("layer_types",),
}  # fmt: skip
"""Keys of a family, and the configuration's field of the same meaning: the first that it has."""
WINDOW, WINDOW_PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
WITHOUT_FIELD = ("context_length",)
"""Those that need no field: ALiBi has no longest context."""
NO_PART = (
    "vocab_size", "embedding_length", "feed_forward_length", "expert_count",
    "expert_feed_forward_length", "expert_shared_feed_forward_length", "attention.value_length",
    "shortconv.l_cache", "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size",
    "ssm.time_step_rank", "ssm.group_count", "rope.scaling.finetuned", "rope.dimension_sections",
    "nextn_predict_layers", "tensor_data_layout",
)  # fmt: skip
"""Keys that the shapes of the weights prove, and those without a part in a pass over text."""
NEUTRAL = {
    "expert_weights_scale": 1.0,
    "expert_shared_count": 0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
"""Keys that are allowed with this value alone, which changes nothing."""
ROPE = (
    "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)  # fmt: skip
"""Keys of the rotary positions, which `_with_rope` reads."""
FREQ_FACTORS = "rope_freqs.weight"
"""Tensor with a divisor of each rotary frequency. Llama 3.1 to 3.3 store their scaling in it."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors with such divisors for sequences beyond the original length, and for shorter ones."""
ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
CANNOT_SAY = "which transformers' configuration of it cannot say"
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of the tokens that end an answer: of a text, a turn and a message."""


class Metadata(NamedTuple):
    """What a GGUF file says of its model.

    family: the value of `general.architecture`. of_family, of_tokenizer: the values of the keys
    that begin with it and with `tokenizer.ggml`, without that beginning; lists of the tokenizer are
    left out. rope_tensors: those with factors of rotary frequencies, as lists. num_weights:
    elements of all other tensors, by name.
    """

    path: Path
    family: str
    of_family: dict[str, Any]
    of_tokenizer: dict[str, Any]
    rope_tensors: dict[str, list[float]]
    num_weights: dict[str, int]

    @property
    def ends(self) -> list[int]:
        """Ids of the tokens that end an answer."""
        found = [self.of_tokenizer[name] for name in ENDS if name in self.of_tokenizer]
        return list(dict.fromkeys(found))

    def refusal(self, key: str, value: object, why: str, of: str | None = None) -> UserError:
        """The error for a key of the family, or `of` another group, that cannot be followed."""
        return UserError(
            f"{self.path}: its metadata say {of or self.family}.{key}={value}, {why}; choose the "
            "model's safetensors, or a GGUF without it"
        )


def read_metadata(gguf_file: Path) -> Metadata:
    """Read the metadata and the small tensors of a GGUF file. Raises UserError for a part of a
    model, and whatever `gguf` raises."""
    from gguf import GGUFReader, GGUFValueType

    reader = GGUFReader(gguf_file)
    num_parts = reader.fields.get("split.count")
    if num_parts is not None and num_parts.contents() > 1:
        raise UserError(
            f"{gguf_file}: is one of {num_parts.contents()} parts of a split GGUF, which are not "
            "read; join them with llama.cpp's `llama-gguf-split --merge`"
        )
    family = str(reader.fields["general.architecture"].contents())
    of_family, of_tokenizer = {}, {}
    for key, field in reader.fields.items():
        if key.startswith(f"{family}."):
            of_family[key.removeprefix(f"{family}.")] = field.contents()
        elif key.startswith("tokenizer.ggml.") and field.types[0] != GGUFValueType.ARRAY:
            of_tokenizer[key.removeprefix("tokenizer.ggml.")] = field.contents()
    rope_tensors, num_weights = {}, {}
    for tensor in reader.tensors:
        if tensor.name in (FREQ_FACTORS, LONG_FACTORS, SHORT_FACTORS):
            rope_tensors[tensor.name] = [float(factor) for factor in tensor.data]
        else:
            num_weights[tensor.name] = int(tensor.n_elements)
    return Metadata(gguf_file, family, of_family, of_tokenizer, rope_tensors, num_weights)


def with_metadata(described: PreTrainedConfig, metadata: Metadata) -> PreTrainedConfig:
    """The configuration with all that the metadata say.

    described: what transformers made of the file. Raises UserError for a key that it cannot follow.
    """
    changes = _changed_fields(described, metadata)
    rope = _with_rope(described, metadata)
    if rope is not None:
        changes["rope_parameters"] = rope
        original = _whole(rope).get(ORIGINAL)
        if original and hasattr(described, ORIGINAL):  # it counts more than the one of `rope`
            changes[ORIGINAL] = original
    changed = type(described)(**(described.to_dict() | changes))
    for field, value in _changed_fields(changed, metadata).items():
        raise metadata.refusal(field, value, CANNOT_SAY)
    if rope is not None:
        taken = _whole(changed.rope_parameters)
        for name, value in _whole(rope).items():
            if taken.get(name) != value:
                raise metadata.refusal(f"rope: {name}", value, CANNOT_SAY)
    return changed


def require_all_weights(model: PreTrainedModel, metadata: Metadata) -> None:
    """Raise UserError where the model has more or fewer weights than the file: transformers leaves
    out tensors that it does not know, and draws weights at random that the file lacks."""
    tied = model.config.tie_word_embeddings
    num_layers = model.config.num_hidden_layers
    in_file = 0
    for name, count in metadata.num_weights.items():
        is_tied_head = tied and name == "output.weight"
        parts = name.split(".")
        is_beyond = parts[0] == "blk" and int(parts[1]) >= num_layers  # predicts further tokens
        if not is_tied_head and not is_beyond:
            in_file += count
    by_place = {weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}
    in_model = sum(by_place.values())
    if in_file != in_model:
        family = model.config.model_type
        raise UserError(
            f"{metadata.path}: its tensors hold {in_file:,} weights, and the {family} that "
            f"transformers makes of it has {in_model:,}; choose the model's safetensors"
        )


def _changed_fields(described: PreTrainedConfig, metadata: Metadata) -> dict[str, Any]:
    """Fields of the configuration that contradict the file, with the file's values. Raises
    UserError for a key that no configuration can follow."""
    changes: dict[str, Any] = {}
    for key, value in metadata.of_family.items():
        if key in FIELDS:
            field, says = _field(described, FIELDS[key])
            wanted = _as_field(key, value, described, metadata)
            if field is None and key not in WITHOUT_FIELD and says != wanted:
                raise metadata.refusal(key, value, CANNOT_SAY)
            if field is not None and not _equal(says, wanted):
                changes[field] = wanted
        elif key in NEUTRAL:
            if value != NEUTRAL[key]:
                raise metadata.refusal(key, value, "which is not supported")
        elif key not in NO_PART and key not in ROPE:
            raise metadata.refusal(key, value, "a key that is not known here")
    is_windowed = getattr(described, "sliding_window", None)
    if metadata.family == "llama" and is_windowed and WINDOW not in metadata.of_family:
        changes["sliding_window"] = None  # transformers takes a Mistral's default
    return changes


def _field(described: PreTrainedConfig, names: tuple[str, ...]) -> tuple[str | None, Any]:
    """The first of these fields that a configuration has, and its value. (None, None) where it has
    none, or one value for each layer."""
    for name in names:
        try:
            return name, getattr(described, name)
        except (AttributeError, RuntimeError):  # none, or AmbiguousGlobalPerLayerAttributeError
            continue
    return None, None


def _as_field(key: str, value: Any, described: PreTrainedConfig, metadata: Metadata) -> Any:
    """The value of a key as a configuration says it."""
    if key == "block_count":
        return value - metadata.of_family.get("nextn_predict_layers", 0)
    if key == "attention.head_count_kv" and isinstance(value, list):
        return max(value)  # 0 in layers without attention
    if key == WINDOW and value == 0:
        return None
    if key == WINDOW_PATTERN:
        if isinstance(value, int):  # the last of every so many layers has none
            num_layers = described.num_hidden_layers
            value = [layer % value < value - 1 for layer in range(num_layers)]
        return ["sliding_attention" if windowed else "full_attention" for windowed in value]
    return value


def _equal(says: Any, wanted: Any) -> bool:
    """Whether two values are the same. A GGUF stores numbers in fp32."""
    if isinstance(says, float) and isinstance(wanted, float):
        return math.isclose(says, wanted, rel_tol=1e-6)
    return bool(says == wanted)


# Rotary positions


def _whole(rope: dict[str, Any]) -> dict[str, Any]:
    """The rope of the layers without a window."""
    return rope.get("full_attention", rope)


def _with_rope(described: PreTrainedConfig, metadata: Metadata) -> dict[str, Any] | None:
    """The configuration's `rope_parameters` as the file says them. None where the model has none.

    As in llama.cpp, scaling holds for the layers without a window.
    """
    says = metadata.of_family
    rope: dict[str, Any] = deepcopy(getattr(described, "rope_parameters", None) or {})
    if not rope:
        for key in ROPE:
            if key in says:
                raise metadata.refusal(key, says[key], "but the model has no rotary positions")
        return None
    whole = _whole(rope)
    whole["rope_theta"] = says.get("rope.freq_base", whole["rope_theta"])
    windowed = rope.get("sliding_attention", whole)
    of_windowed = says.get("rope.freq_base_swa", windowed["rope_theta"])
    if windowed is whole and of_windowed != whole["rope_theta"]:
        raise metadata.refusal("rope.freq_base_swa", of_windowed, CANNOT_SAY)
    windowed["rope_theta"] = of_windowed
    _, head_dim = _field(described, FIELDS["attention.key_length"])
    head_dim = head_dim or described.hidden_size // described.num_attention_heads
    rotary_dim = says.get("rope.dimension_count", int(head_dim * whole.get(PARTIAL, 1.0)))
    if rotary_dim != int(head_dim * whole.get(PARTIAL, 1.0)):
        if PARTIAL not in whole:
            raise metadata.refusal("rope.dimension_count", rotary_dim, CANNOT_SAY)
        whole[PARTIAL] = rotary_dim / head_dim
    for name, factors in metadata.rope_tensors.items():
        if len(factors) != rotary_dim // 2:
            why = f"factors, but {rotary_dim // 2} frequencies"
            raise metadata.refusal(name, len(factors), why)
    whole |= _scaling(metadata)
    return rope


def _scaling(metadata: Metadata) -> dict[str, Any]:
    """The scaling of rotary positions in transformers' terms, empty where there is none.

    Source: `llama_model_base::load_hparams`, `llama_context` and `ggml_rope_yarn` of llama.cpp.
    """
    says, tensors = metadata.of_family, metadata.rope_tensors
    kind = says.get("rope.scaling.type", "linear")
    factor = says.get("rope.scaling.factor") or says.get("rope.scale_linear") or 1.0
    attention_factor = says.get("rope.scaling.attn_factor", 1.0)
    context_length = says.get("context_length")
    original = says.get("rope.scaling.original_context_length") or context_length
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise metadata.refusal("rope.scaling.type", kind, "which is not supported")
    if kind == "none":
        factor = 1.0
    if factor != 1 and (tensors or kind == "longrope"):
        raise metadata.refusal("rope.scaling.factor", factor, "beside factors of each frequency")
    if LONG_FACTORS in tensors or SHORT_FACTORS in tensors or kind == "longrope":
        if not {LONG_FACTORS, SHORT_FACTORS} <= set(tensors):
            without = f"without {LONG_FACTORS} and {SHORT_FACTORS}"
            raise metadata.refusal("rope.scaling.type", kind, without)
        return {
            "rope_type": "longrope",
            "long_factor": tensors[LONG_FACTORS],
            "short_factor": tensors[SHORT_FACTORS],
            "attention_factor": attention_factor,
            ORIGINAL: original,
        }
    if kind == "yarn" and factor != 1:
        return {
            "rope_type": "yarn",
            "factor": factor,
            "attention_factor": attention_factor * (1 + 0.1 * math.log(factor)),
            "beta_fast": says.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": says.get("rope.scaling.yarn_beta_slow", 1.0),
            ORIGINAL: original,
        }
    if attention_factor != 1:
        raise metadata.refusal("rope.scaling.attn_factor", attention_factor, "without yarn")
    if FREQ_FACTORS in tensors:
        # Each frequency by its own divisor, at every length: transformers' name for it is longrope.
        factors = tensors[FREQ_FACTORS]
        return {
            "rope_type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "attention_factor": 1.0,
            ORIGINAL: context_length,
        }
    if factor != 1:
        return {"rope_type": "linear", "factor": factor}
    return {}

"""What the metadata of a GGUF file say of its model and its tokenizer, where transformers leaves it
out.

transformers takes the keys that it knows for a family and ignores the others, such as the scaling
of rotary positions. So each key of the family (`llama.rope.scaling.type`) must be one of three
kinds:

1. transformers follows it, the shapes of the weights prove it, or it plays no part (`FOLLOWED`).
2. It says what a field of the configuration says (`FIELDS`): the file counts.
3. It belongs to the rotary positions, which `_with_rope` sets as llama.cpp computes them.

Anything else is refused in one line, since the model would compute something else.

A byte-level BPE vocabulary (`tokenizer.ggml.model=gpt2`) was learned on pieces of text, and gives
the model's tokens on the same pieces alone. `tokenizer.ggml.pre` names how a text is split into
them. transformers takes GPT-2's split for a name that it does not know.
"""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
"""Families whose files are read, as `general.architecture` names them, and transformers' names. It
takes a file of the family llama whose whole name is "mistral" as one with windows, which it has
not."""
FOLLOWED = (
    "context_length", "block_count", "vocab_size", "embedding_length", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.freq_base",
    "rope.scaling.finetuned",
)  # fmt: skip
FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Keys of a family, and the configuration's field of the same meaning."""
ROPE = (
    "rope.freq_base_swa", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.attn_factor", "rope.scaling.original_context_length",
)  # fmt: skip
FREQ_FACTORS = "rope_freqs.weight"
"""Tensor with a divisor of each rotary frequency. Llama 3.1 to 3.3 store their scaling in it."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors with such divisors for sequences beyond the original length, and for shorter ones."""
ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
CANNOT_SAY = "which transformers' configuration of it cannot say"
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of the tokens that end an answer: of a text, a turn and a message."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS = {"gpt-2": (GPT2,), "smollm": (r"\p{N}", GPT2)}
"""How texts are split where transformers does not know the value of `tokenizer.ggml.pre`: each
expression splits the pieces of the one before. Source: `llm_tokenizer_bpe` of llama.cpp."""
WHOLE_PIECES = {
    "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "tekken",
}  # fmt: skip
"""Where a piece that is a token is that token, whatever the merges, and texts start with the BOS
token where the file does not say. Source: `llama_vocab::impl::load` of llama.cpp."""
NORMALIZED = "qwen2"
"""Where texts are normalized (NFC), as in Qwen's own tokenizers."""
WORD_MARK = "\u2581"
"""What stands for a space in a SentencePiece vocabulary."""


class Metadata(NamedTuple):
    """What a GGUF file says of its model.

    family: the value of `general.architecture`. of_family, of_tokenizer: the values of the keys
    that begin with it and with `tokenizer.ggml`, without that beginning; lists of the tokenizer are
    left out. rope_tensors: those with factors of rotary frequencies, as lists. num_weights:
    elements of all other tensors together.
    """

    path: Path
    family: str
    of_family: dict[str, Any]
    of_tokenizer: dict[str, Any]
    rope_tensors: dict[str, list[float]]
    num_weights: int

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
    """Read the metadata and the small tensors of a GGUF file. Raises whatever `gguf` raises."""
    from gguf import GGUFReader, GGUFValueType

    reader = GGUFReader(gguf_file)
    family = str(reader.fields["general.architecture"].contents())
    of_family, of_tokenizer = {}, {}
    for key, field in reader.fields.items():
        if key.startswith(f"{family}."):
            of_family[key.removeprefix(f"{family}.")] = field.contents()
        elif key.startswith("tokenizer.ggml.") and field.types[0] != GGUFValueType.ARRAY:
            of_tokenizer[key.removeprefix("tokenizer.ggml.")] = field.contents()
    rope_tensors = {}
    num_weights = 0
    for tensor in reader.tensors:
        if tensor.name in (FREQ_FACTORS, LONG_FACTORS, SHORT_FACTORS):
            rope_tensors[tensor.name] = [float(factor) for factor in tensor.data]
        else:
            num_weights += int(tensor.n_elements)
    return Metadata(gguf_file, family, of_family, of_tokenizer, rope_tensors, num_weights)


# The configuration


def with_metadata(described: PreTrainedConfig, metadata: Metadata) -> PreTrainedConfig:
    """The configuration with all that the metadata say.

    described: what transformers made of the file. Raises UserError for a family that is not read,
    and for a key that cannot be followed.
    """
    if FAMILIES.get(metadata.family) != described.model_type:
        raise UserError(
            f"{metadata.path}: a GGUF of {metadata.family}, which transformers takes as "
            f"{described.model_type}; read are those of {', '.join(FAMILIES)}; choose the model's "
            "safetensors"
        )
    changes: dict[str, Any] = {}
    for key, value in metadata.of_family.items():
        if key in FIELDS:
            changes[FIELDS[key]] = value or None  # 0: none
        elif key not in FOLLOWED and key not in ROPE:
            raise metadata.refusal(key, value, "a key that is not known here")
    changes["rope_parameters"] = rope = _with_rope(described, metadata)
    if ORIGINAL in rope and hasattr(described, ORIGINAL):  # it counts more than the one of `rope`
        changes[ORIGINAL] = rope[ORIGINAL]
    changed = type(described)(**(described.to_dict() | changes))
    for key, field in FIELDS.items():
        taken = getattr(changed, field) if hasattr(described, field) else None
        if field in changes and taken != changes[field]:
            raise metadata.refusal(key, metadata.of_family[key], CANNOT_SAY)
    return changed


def require_all_weights(model: PreTrainedModel, metadata: Metadata) -> None:
    """Raise UserError where the model has more or fewer weights than the file: transformers leaves
    out tensors that it does not know, and draws weights at random that the file lacks."""
    by_place = {weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}
    in_model = sum(by_place.values())
    if metadata.num_weights != in_model:
        raise UserError(
            f"{metadata.path}: its tensors hold {metadata.num_weights:,} weights, and the "
            f"{model.config.model_type} that transformers makes of it has {in_model:,}; choose the "
            "model's safetensors"
        )


def _with_rope(described: PreTrainedConfig, metadata: Metadata) -> dict[str, Any]:
    """The configuration's `rope_parameters` as the file says them. As in llama.cpp, scaling holds
    for the layers without a window."""
    says = metadata.of_family
    rope: dict[str, Any] = deepcopy(described.rope_parameters)
    whole = rope.get("full_attention", rope)
    windowed = rope.get("sliding_attention", whole)
    of_windowed = says.get("rope.freq_base_swa", windowed["rope_theta"])
    if windowed is whole and of_windowed != whole["rope_theta"]:
        raise metadata.refusal("rope.freq_base_swa", of_windowed, CANNOT_SAY)
    windowed["rope_theta"] = of_windowed
    head_dim = getattr(described, "head_dim", None)
    head_dim = head_dim or described.hidden_size // described.num_attention_heads
    rotary_dim = says.get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        if PARTIAL not in whole:
            raise metadata.refusal("rope.dimension_count", rotary_dim, CANNOT_SAY)
        whole[PARTIAL] = rotary_dim / head_dim
    whole |= _scaling(metadata)
    return rope


def _scaling(metadata: Metadata) -> dict[str, Any]:
    """The scaling of rotary positions in transformers' terms, empty where there is none.

    Source: `llama_model_base::load_hparams`, `llama_context` and `ggml_rope_yarn` of llama.cpp.
    """
    says, tensors = metadata.of_family, metadata.rope_tensors
    kind = says.get("rope.scaling.type", "linear")
    factor = 1.0 if kind == "none" else says.get("rope.scaling.factor", 1.0)
    attention_factor = says.get("rope.scaling.attn_factor", 1.0)
    context_length = says.get("context_length")
    original = says.get("rope.scaling.original_context_length", context_length)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise metadata.refusal("rope.scaling.type", kind, "which is not supported")
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
    if attention_factor != 1:
        raise metadata.refusal("rope.scaling.attn_factor", attention_factor, "without longrope")
    if FREQ_FACTORS in tensors:
        # Each frequency by its own divisor, at every length: transformers' name for it is longrope.
        return {
            "rope_type": "longrope",
            "long_factor": tensors[FREQ_FACTORS],
            "short_factor": tensors[FREQ_FACTORS],
            "attention_factor": 1.0,
            ORIGINAL: context_length,
        }
    if factor == 1:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": 1 + 0.1 * math.log(factor),
        ORIGINAL: original,
    }


# The tokenizer


def follow_metadata(tokenizer: PreTrainedTokenizerBase, metadata: Metadata) -> None:
    """Let a GGUF's tokenizer, as transformers made it, split and start texts as the file says.

    Raises UserError for a split that is not known, and for a space before texts that transformers'
    tokenizer does not put there, or does.
    """
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    says, backend = metadata.of_tokenizer, tokenizer.backend_tokenizer
    if says.get("model") == "llama":
        wanted = says.get("add_space_prefix", True)
        if backend.encode("a", add_special_tokens=False).tokens[0].startswith(WORD_MARK) != wanted:
            why = "which transformers' tokenizer of it does not follow"
            raise metadata.refusal("add_space_prefix", wanted, why, of="tokenizer.ggml")
    if says.get("model") != "gpt2":
        return
    pre = says.get("pre", "")
    if pre in SPLITS:
        pieces = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in SPLITS[pre]]
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*pieces, in_bytes])
    elif pre not in GGUF_PRE_TOKENIZER_SPLITS:
        said = f"tokenizer.ggml.pre={pre}" if pre else "no tokenizer.ggml.pre"
        raise UserError(
            f"{metadata.path}: its metadata say {said}, so how its tokenizer splits a text is not "
            "known here; choose the model's safetensors"
        )
    if pre == NORMALIZED:
        backend.normalizer = normalizers.NFC()
    if pre in WHOLE_PIECES:
        backend.model.ignore_merges = True
        if "add_bos_token" not in says:
            tokenizer.add_bos_token = True

"""The copy of a GGUF in fp32 safetensors: it loads many times faster and computes the very same
logits.

transformers reads the file. It takes the keys that it knows for a family and ignores the others,
such as the scaling of rotary positions, and splits texts as GPT-2 does where it does not know the
tokenizer. What it would leave out is refused in one line, since the model would compute something
else: a key that is not known here, weights that the file has and the model has not, or the other
way around, a tokenizer that splits texts in an unknown way.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.errors import UserError, refused
from harness.files import cache_dir, file_sha256, writing_cache
from harness.model.shape import require_room

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

COPY_FORMAT = 3  # raise it when the content of a copy changes
FOLLOWED = (
    "context_length", "block_count", "vocab_size", "embedding_length", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.freq_base",
    "rope.scaling.finetuned", "rope.scaling.original_context_length",
)  # fmt: skip
"""Keys of a family (`llama.context_length`) that transformers follows, that the shapes of the
weights prove, or that play no part without scaling."""
FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Keys of a family, and the configuration's field of the same meaning, which takes the value."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of the tokens that end an answer: of a text, a turn and a message."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS = ("gpt-2", "smollm", "qwen2")
"""Ways to split a text into the pieces on which a byte-level vocabulary was learned, which
`tokenizer.ggml.pre` names. Source: `llm_tokenizer_bpe` of llama.cpp."""
WORD_MARK = "\u2581"
"""What stands for a space in a SentencePiece vocabulary."""


def copies_dir() -> Path:
    """The folder of all GGUFs' fp32 copies."""
    return cache_dir() / "gguf"


def converted(gguf: Path) -> Path:
    """The folder with a GGUF's fp32 copy (config, safetensors, tokenizer), made where missing.

    It lies in `copies_dir()` under the GGUF's sha256, moved there whole, and may be deleted at any
    time. Raises UserError where the GGUF is damaged, truncated or refused, or the cache cannot be
    written.
    """
    from filelock import FileLock

    copies = copies_dir()
    directory = copies / f"{file_sha256(gguf)[:32]}-{COPY_FORMAT}"
    scratch = copies / "converting"
    if directory.is_dir():
        return directory
    with writing_cache():
        copies.mkdir(parents=True, exist_ok=True)
        with FileLock(copies.with_suffix(".lock")):
            shutil.rmtree(scratch, ignore_errors=True)  # of a killed process
            if not directory.is_dir():  # another process may have been faster
                doing = f"converting once to float32 safetensors in {directory}"
                print(f"{gguf.name}: {doing}", file=sys.stderr)
                _convert(gguf, scratch)
                scratch.rename(directory)
    return directory


def _convert(gguf: Path, target: Path) -> None:
    """Write config, fp32 weights and tokenizer of `gguf` to the new folder `target`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    origin = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    why = "damaged or truncated GGUF, or one that transformers cannot read; fetch the file again"
    with refused(f"{gguf}: {why}"):
        metadata = _read_metadata(gguf)
        described = with_metadata(AutoConfig.from_pretrained(**origin), metadata)
        tokenizer = AutoTokenizer.from_pretrained(**origin)
        follow_metadata(tokenizer, metadata)
        require_room(f"{gguf}, converted", described, torch.float32, torch.device("cpu"))
        model = AutoModelForCausalLM.from_pretrained(
            **origin, config=described, dtype=torch.float32
        )
    _require_all_weights(model, metadata)
    ends = {metadata.of_tokenizer[name]: None for name in ENDS if name in metadata.of_tokenizer}
    if len(ends) > 1:
        model.generation_config.eos_token_id = [*ends]
    model.hf_quantizer = None  # the weights are plain ones now, which save_pretrained would refuse
    del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


class Metadata(NamedTuple):
    """What a GGUF file says of its model.

    family: the value of `general.architecture`. of_family, of_tokenizer: the values of the keys
    that begin with it and with `tokenizer.ggml`, without that beginning; lists of the tokenizer are
    left out. num_weights: elements of all tensors together.
    """

    path: Path
    family: str
    of_family: dict[str, Any]
    of_tokenizer: dict[str, Any]
    num_weights: int

    def refusal(self, said: str, why: str) -> UserError:
        """The error for a file whose metadata say something that cannot be followed."""
        return UserError(
            f"{self.path}: its metadata say {said}, {why}; choose the model's safetensors"
        )


def _read_metadata(gguf: Path) -> Metadata:
    """Read the metadata of a GGUF file. Raises whatever `gguf` raises."""
    from gguf import GGUFReader, GGUFValueType

    reader = GGUFReader(gguf)
    family = str(reader.fields["general.architecture"].contents())
    of_family, of_tokenizer = {}, {}
    for key, field in reader.fields.items():
        if key.startswith(f"{family}."):
            of_family[key.removeprefix(f"{family}.")] = field.contents()
        elif key.startswith("tokenizer.ggml.") and field.types[0] != GGUFValueType.ARRAY:
            of_tokenizer[key.removeprefix("tokenizer.ggml.")] = field.contents()
    num_weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
    return Metadata(gguf, family, of_family, of_tokenizer, num_weights)


def with_metadata(described: PreTrainedConfig, metadata: Metadata) -> PreTrainedConfig:
    """The configuration with the windows and softcaps that the metadata say.

    described: what transformers made of the file. Raises UserError where that is of another family,
    and for a key that would be left out.
    """
    family = metadata.family
    if described.model_type not in (family, f"{family}_text"):
        # A Llama whose whole name is "mistral" would get windows.
        why = f"and transformers takes it as {described.model_type}"
        raise metadata.refusal(f"general.architecture={family}", why)
    head_dim = getattr(described, "head_dim", None)
    rope: dict[str, Any] = described.rope_parameters
    changes_nothing = {
        "rope.dimension_count": head_dim or described.hidden_size // described.num_attention_heads,
        "rope.freq_base_swa": rope.get("sliding_attention", rope).get("rope_theta"),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
    }
    changes = {}
    for key, value in metadata.of_family.items():
        if key in FIELDS:
            changes[FIELDS[key]] = value or None  # 0: none
        elif key not in FOLLOWED and value != changes_nothing.get(key):
            raise metadata.refusal(f"{family}.{key}={value}", "which transformers leaves out")
    changed = type(described)(**(described.to_dict() | changes))
    for field, value in changes.items():
        taken = getattr(changed, field) if hasattr(described, field) else None
        if taken != value:
            why = f"which transformers' configuration of {family} cannot say"
            raise metadata.refusal(f"{field}={value}", why)
    return changed


def _require_all_weights(model: PreTrainedModel, metadata: Metadata) -> None:
    """Raise UserError where the model has more or fewer weights than the file: transformers leaves
    out tensors that it does not know, and draws weights at random that the file lacks."""
    by_place = {weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}
    in_model = sum(by_place.values())
    if metadata.num_weights != in_model:
        raise UserError(
            f"{metadata.path}: its tensors hold {metadata.num_weights:,} numbers, such as weights "
            f"and factors of rotary frequencies, and the {model.config.model_type} that "
            f"transformers makes of it has {in_model:,}; choose the model's safetensors"
        )


def follow_metadata(tokenizer: PreTrainedTokenizerBase, metadata: Metadata) -> None:
    """Let a GGUF's tokenizer, as transformers made it, split texts as the file says.

    Raises UserError for a split that is not known, and for a space before texts that transformers'
    tokenizer does not put there, or does.
    """
    from tokenizers import Regex, normalizers, pre_tokenizers

    says, backend = metadata.of_tokenizer, tokenizer.backend_tokenizer
    if says.get("model") == "llama":
        wanted = says.get("add_space_prefix", True)
        if backend.encode("a", add_special_tokens=False).tokens[0].startswith(WORD_MARK) != wanted:
            why = "which transformers' tokenizer of it does not follow"
            raise metadata.refusal(f"tokenizer.ggml.add_space_prefix={wanted}", why)
    if says.get("model") != "gpt2":
        return
    split = says.get("pre")
    if split not in SPLITS:
        why = f"and a text is split as by {', '.join(SPLITS)} alone"
        raise metadata.refusal(f"tokenizer.ggml.pre={split}", why)
    if split == "smollm":  # transformers does not know it
        pieces = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in (r"\p{N}", GPT2)]
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*pieces, in_bytes])
    if split == "qwen2":  # texts are normalized, as in Qwen's own tokenizers
        backend.normalizer = normalizers.NFC()

"""How the tokenizer of a GGUF file splits and starts a text, as llama.cpp does by the metadata.

A byte-level BPE vocabulary (`tokenizer.ggml.model=gpt2`) was learned on pieces of text, and gives
the model's tokens on the same pieces alone. `tokenizer.ggml.pre` names how a text is split into
them. transformers knows most of the names, and takes GPT-2's split for the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from harness.model.gguf_config import Metadata

WORD_MARK = "\u2581"
"""What stands for a space in a SentencePiece vocabulary."""

# Regular expressions as in the models' own tokenizer.json.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT, LINE_END = r"\p{N}", r"[\r\n]"
CJK_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
OTHER_SPLITS = {
    "gpt-2 a.x-4.0 mellum trillion granite-docling": (GPT2,),
    "smollm starcoder minerva-7b mellum2": (DIGIT, GPT2),
    "deepseek-coder": (LINE_END, r"\s?\p{L}+", r"\s?\p{P}+", CJK_HANGUL, DIGIT),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""Those that transformers does not know, by the values of `tokenizer.ggml.pre`: each expression
splits the pieces of the one before. Source: `llm_tokenizer_bpe` of llama.cpp."""
OTHER_NAMES = {"stablelm2": "qwen2"}
"""Names of a split that transformers knows by another."""
WHOLE_PIECES = {
    "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "tekken",
}  # fmt: skip
"""Where a piece that is a token is that token, whatever the merges, and texts start with the BOS
token where the file does not say. Source: `llama_vocab::impl::load` of llama.cpp."""
NORMALIZED = {"qwen2", "qwen35"}
"""Where texts are normalized (NFC), as in Qwen's own tokenizers."""


def split_of(pre: str) -> tuple[str, ...] | None:
    """The regular expressions by which `tokenizer.ggml.pre` splits a text, one after another; None
    where they are not known."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    for names, regexes in OTHER_SPLITS.items():
        if pre in names.split():
            return regexes
    known = GGUF_PRE_TOKENIZER_SPLITS.get(OTHER_NAMES.get(pre, pre))
    return None if known is None else (known,)


def follow_metadata(tokenizer: PreTrainedTokenizerBase, metadata: Metadata) -> None:
    """Let a GGUF's tokenizer, as transformers made it, split and start texts as the file says.

    Raises UserError for a split that is not known here, and for a space before texts that
    transformers' tokenizer does not put there, or does.
    """
    from tokenizers import Regex, normalizers, pre_tokenizers

    says, backend = metadata.of_tokenizer, tokenizer.backend_tokenizer
    if says.get("model") == "llama":
        wanted = says.get("add_space_prefix", True)
        if backend.encode("a", add_special_tokens=False).tokens[0].startswith(WORD_MARK) != wanted:
            why = "which transformers' tokenizer of it does not follow"
            raise metadata.refusal("add_space_prefix", wanted, why, of="tokenizer.ggml")
    if says.get("model") != "gpt2":
        return
    pre = says.get("pre", "")
    regexes = split_of(pre)
    if regexes is None:
        said = f"tokenizer.ggml.pre={pre}" if pre else "no tokenizer.ggml.pre"
        raise UserError(
            f"{metadata.path}: its metadata say {said}, so how its tokenizer splits a text is not "
            "known here; choose the model's safetensors"
        )
    pieces = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*pieces, in_bytes])
    backend.normalizer = normalizers.NFC() if pre in NORMALIZED else None
    backend.model.ignore_merges = pre in WHOLE_PIECES
    if pre in WHOLE_PIECES and "add_bos_token" not in says:
        tokenizer.add_bos_token = True

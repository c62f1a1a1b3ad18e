"""How the tokenizer of a GGUF file splits and starts a text, as llama.cpp does by the metadata.

A byte-level BPE vocabulary (`tokenizer.ggml.model=gpt2`) was learned on pieces of text, and gives
the model's tokens on the same pieces alone. `tokenizer.ggml.pre` names how a text is split into
them. transformers knows some of the names, and takes GPT-2's split for the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from harness.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from harness.model.gguf_config import Metadata

WORD_MARK = "\u2581"
"""What stands for a space in a SentencePiece vocabulary."""

# Regular expressions as in the models' own tokenizer.json.
DIGIT, THREE_DIGITS, THREE_ASCII_DIGITS = r"\p{N}", r"\p{N}{1,3}", "[0-9][0-9][0-9]"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LINE_END, CJK = r"[\r\n]", "[\u4e00-\u9fa5\u3040-\u30ff]+"
CJK_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MARKS = r"[\p{P}\$\+<=>\^~\|]+"
FALCON_MARKS = r"[\p{P}\$\+<=>\^~\|`]+"
QWEN35 = (
    rf"{ENDINGS}|{BEFORE_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
SEED = rf"{ENDINGS}|{BEFORE_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _words(numbers: str) -> str:
    """Words with the character before them, `numbers`, signs with the line ends after them."""
    return rf"{ENDINGS}|{BEFORE_WORD}\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"


def _cased_words(endings: str, numbers: str) -> str:
    """As `_words`, where a word also ends before a capital letter."""
    upper_first = f"{BEFORE_WORD}{UPPER}*{LOWER}+{endings}|{BEFORE_WORD}{UPPER}+{LOWER}*{endings}"
    return rf"{upper_first}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"


class Split(NamedTuple):
    """How texts become the pieces in which merges are made.

    regexes: each splits the pieces of the one before; what it matches is a piece, and what is left
    between. ignore_merges: a piece that is a token is that token, whatever the merges.
    add_bos: texts start with the BOS token where the file does not say. nfc: texts are normalized.
    """

    regexes: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_SPLITS = {
    "gpt-2 phi-2 mpt olmo jais gigachat exaone4 a.x-4.0 mellum trillion granite-docling": (
        Split((GPT2,))
    ),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Split((DIGIT, GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": (
        Split((_words(THREE_DIGITS),), ignore_merges=True, add_bos=True)
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": Split((_words(THREE_DIGITS),)),
    "qwen2": Split((_words(DIGIT),), nfc=True),
    "stablelm2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2": (
        Split((_words(DIGIT),))
    ),
    "qwen35": Split((QWEN35,), nfc=True),
    "tekken": Split((_cased_words("", DIGIT),), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": (
        Split((_cased_words(f"{ENDINGS}?", THREE_DIGITS),))
    ),
    "deepseek-coder": Split((LINE_END, r"\s?\p{L}+", r"\s?\p{P}+", CJK_HANGUL, DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm": Split((THREE_DIGITS, CJK, DEEPSEEK3)),
    "seed-coder": Split((SEED,)),
    "bailingmoe bailingmoe2 llada-moe": Split((BAILING,)),
    "bloom poro-chat gpt3-finnish": Split((BLOOM,)),
    "viking": Split((BLOOM, DIGIT)),
    "falcon": Split((FALCON_MARKS, GPT2, THREE_ASCII_DIGITS)),
    "default": Split((MARKS, GPT2, r"\p{N}+", THREE_ASCII_DIGITS)),
}
SPLITS = {name: split for names, split in _SPLITS.items() for name in names.split()}
"""By the values of `tokenizer.ggml.pre`. Source: `llm_tokenizer_bpe` and `llama_vocab::impl::load`
of llama.cpp."""


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
    split = SPLITS.get(says.get("pre", ""))
    if split is None:
        said = f"tokenizer.ggml.pre={says['pre']}" if "pre" in says else "no tokenizer.ggml.pre"
        raise UserError(
            f"{metadata.path}: its metadata say {said}, so how its tokenizer splits a text is not "
            "known here; choose the model's safetensors"
        )
    pieces = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in split.regexes]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*pieces, in_bytes])
    backend.normalizer = normalizers.NFC() if split.nfc else None
    backend.model.ignore_merges = split.ignore_merges
    if split.add_bos and "add_bos_token" not in says:
        tokenizer.add_bos_token = True

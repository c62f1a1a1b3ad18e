"""A real fast tokenizer with one token a character, but for two merges that cross a line's end."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

NEWLINE, SPACE = "Ċ", "Ġ"  # as byte-level tokenizers write them
CHARACTERS = [SPACE, NEWLINE, *(chr(code) for code in range(33, 127))]
MERGES = [(NEWLINE, NEWLINE), (".", NEWLINE + NEWLINE), (".", NEWLINE)]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Vocabulary of ASCII below 128; "." and the line ends after it are one token. `<s>` is 1, `</s>` 2."""
    words = ["<pad>", "<s>", "</s>", *CHARACTERS, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def starting_tokenizer() -> PreTrainedTokenizerFast:
    """As `byte_tokenizer`, but every text starts with `<s>`, as for Llama and Gemma."""
    tokenizer = byte_tokenizer()
    start = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = start
    return tokenizer


def framing_tokenizer() -> PreTrainedTokenizerFast:
    """As `starting_tokenizer`, and every text ends with `</s>`, as `add_eos_token` asks for."""
    tokenizer = byte_tokenizer()
    ends = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    frame = processors.TemplateProcessing(single="<s> $A </s>", pair=None, special_tokens=ends)
    tokenizer.backend_tokenizer.post_processor = frame
    return tokenizer


class ByteTokenizer:
    """A token a byte; it knows no special tokens."""

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Every word between spaces is one token, and all are the same: it only counts."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")

"""What tests of texts share: random letters in a file, and a tokenizer of bytes."""

import random
from pathlib import Path
from types import ModuleType

import pytest


class ByteTokenizer:
    """A token a byte."""

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        assert options["add_special_tokens"] is False
        return {"input_ids": list(text.encode())}


def letters(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, alphabet: str = "") -> Path:
    """A file of random letters; no cache outside the test's folder."""
    monkeypatch.setenv("KV_HARNESS_CACHE", str(folder / "cache"))
    file = folder / "text.txt"
    alphabet = alphabet or "abcdefghijklmnopqrstuvwxyz \n"
    file.write_text("".join(random.Random(0).choices(alphabet, k=count)))
    return file


def calls_of(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[tuple]:
    """The arguments of every call of a function from now on."""
    calls: list[tuple] = []
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: calls.append(args) or function(*args))
    return calls

"""A folder with a model: which of its files are loaded, and so make up its identity.

Weights are safetensors, as transformers chooses them: what `transformers_weights` of config.json names, else
model.safetensors, else the shards of model.safetensors.index.json. Pickled weights could run code, and are never read.
An index whose shards are not all here is a copy cut short, whatever lies beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from harness.errors import UserError, refused

CONFIG = "config.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = f"model{INDEX_SUFFIX}"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TEXT_SUFFIXES = (".json", ".model", ".txt", ".jinja")
"""Of the configuration and of the tokenizer."""


def read_config(directory: Path) -> dict[str, Any]:
    """The config.json of a model folder; UserError where it cannot be read."""
    with refused(f"{directory}: its {CONFIG} cannot be read"):
        return dict(json.loads((directory / CONFIG).read_text(encoding="utf-8")))


def has_tokenizer(directory: Path) -> bool:
    """Whether a model folder holds a tokenizer, of any kind."""
    return any((directory / name).is_file() for name in TOKENIZERS)


def loaded_files(directory: Path, weights: bool, *, with_code: bool) -> list[Path]:
    """The files that a model is loaded from, and its index.

    Args:
        directory: the model's.
        weights: these too, not only its configuration and tokenizer.
        with_code: Python files too, which `trust_remote_code` runs.

    Raises:
        UserError: as `weight_files`, where the weights are asked for.
    """
    suffixes = (*TEXT_SUFFIXES, ".py") if with_code else TEXT_SUFFIXES
    beside = sorted(file for file in directory.iterdir() if file.suffix in suffixes and file.is_file())
    return beside + (weight_files(directory) if weights else [])


def weight_files(directory: Path) -> list[Path]:
    """The safetensors that hold a model's weights.

    Raises:
        UserError: there are none, or not all, or they are said to lie in anything else.
    """
    named = read_config(directory).get("transformers_weights")
    entries = [str(named)] if named else [INDEX, SINGLE]
    entry = next((name for name in entries if (directory / name).is_file()), None)
    if entry is None:
        raise UserError(_without_weights(directory))
    names = _shards(directory / entry) if entry.endswith(INDEX_SUFFIX) else [entry]
    for name in names:
        path = PurePosixPath(name)
        if path.suffix != SUFFIX or path.is_absolute() or ".." in path.parts:
            raise UserError(f"{directory}: says that weights lie in {name}; allowed: {SUFFIX} files of that folder")
    absent = [name for name in names if not (directory / name).is_file()]
    if absent or not names:
        what = ", ".join(absent) or f"{entry} names none"
        raise UserError(f"{directory}: not all of its safetensors are here: {what}")
    if not named and (directory / SINGLE).is_file():
        return [directory / SINGLE]
    return [directory / name for name in names]


def _shards(index: Path) -> list[str]:
    with refused(f"{index}: damaged index of weights"):
        return sorted(set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())))


def _without_weights(directory: Path) -> str:
    """What is missing, and the way out where there are pickled weights."""
    if not any(file for pattern in PICKLED for file in directory.glob(pattern)):
        return f"{directory}: no safetensors in it, so there are no weights to load"
    convert = "m.AutoModelForCausalLM.from_pretrained('FROM').save_pretrained('TO')"
    return (
        f"{directory}: pickled weights are not loaded, as they can run code; convert them once where you trust them: "
        f'python -c "import transformers as m; {convert}"'
    )


def num_elements(files: Iterable[Path]) -> int:
    """Elements of all tensors in safetensors files, by their headers; UserError where one is damaged."""
    from safetensors import safe_open

    total = 0
    for file in files:
        with refused(f"{file}: cannot be loaded, damaged or truncated"), safe_open(file, framework="numpy") as tensors:
            total += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.offset_keys())
    return total

"""The settings of codecs: their names, the formats of single layers, and the shipped codecs.

Each of these is a file `methods/codecs/NAME.yaml`, with its class and settings. They do not lie in
`conf/`, whose folders are groups of Hydra's. `codec=int4` is a setting, which may name a file of
the user's as well, and which presets of methods have.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from harness.errors import UserError, nearest
from harness.settings.paths import PACKAGES_DIR

if TYPE_CHECKING:
    from methods.codecs.base import RowCodec


FOLDER = PACKAGES_DIR / "methods" / "codecs"
LAYER_FORMAT = re.compile(
    r"(?P<first>\d+)(?P<range>-(?P<last>\d+)?)?:(?P<keys>[^/]+)(?:/(?P<values>[^/]+))?"
)
"""An entry of `codec_layers`."""
CODEC_WORDS = ("codec", "value_codec", "codec_layers", "rotation", "key_groups", "residual")
"""The settings that a codec's name says."""
GROUP_SIZE = 64


@cache
def codec_names() -> list[str]:
    """What `codec=` may name, beside a file of the user's."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def shipped_codec(name: str) -> tuple[Any, dict[str, Any]]:
    """The class of a shipped codec, and the fields that its file sets."""
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    module, _, cls_name = values.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), cls_name), values


def takes(name: str | None, setting: str) -> bool:
    """True if a shipped codec has a setting, such as `group_size`."""
    if name not in codec_names():
        return False
    cls, _ = shipped_codec(name)
    return any(field.name == setting for field in fields(cls))


def is_float(name: str | None) -> bool:
    """True if a shipped codec stores floats without any scale."""
    from methods.codecs.floats import FloatCodec

    return name in codec_names() and issubclass(shipped_codec(name)[0], FloatCodec)


def is_integer(name: str | None) -> bool:
    """True if a shipped codec stores integers, whose groups may lie along channels as well."""
    from methods.codecs.integers import IntegerCodec

    return name in codec_names() and issubclass(shipped_codec(name)[0], IntegerCodec)


def codec_named(name: str, **settings: Any) -> RowCodec:
    """The shipped codec of that name; it gets those of the settings that it has."""
    cls, values = shipped_codec(name)
    known = {key: value for key, value in settings.items() if takes(name, key)}
    return cls(**values | known)


class LayerFormats(NamedTuple):
    """An entry of `codec_layers`, `words`: the formats of the keys and values of layers `first` to
    `last`, None for all that follow."""

    first: int
    last: int | None
    keys: str
    values: str
    words: str


def layer_formats(entries: Sequence[str]) -> list[LayerFormats]:
    """The entries of `codec_layers`, such as `0-1:int8`, `5:fp16` or `28-:int8/int4`.

    Raises UserError for one that is written otherwise, names no codec or no layer, or a layer that
    another one names.
    """
    found: list[LayerFormats] = []
    for words in entries:
        setting = f"codec_layers=[{words}]"
        parts = LAYER_FORMAT.fullmatch(words)
        if parts is None:
            forms = "must be LAYERS:CODEC, such as 0-1:int8, 5:fp16, 28-:int8 or 0:int8/int4"
            raise UserError(f"{setting}: {forms}")
        keys, values = parts["keys"], parts["values"] or parts["keys"]
        for name in (keys, values):
            if name not in codec_names():
                raise UserError(f"{setting}: {name}: {nearest(name, codec_names())}")
        first = int(parts["first"])
        last: int | None = first
        if parts["range"]:
            last = int(parts["last"]) if parts["last"] else None
        if last is not None and last < first:
            raise UserError(f"{setting}: layer {last} lies before layer {first}")
        for other in found:
            later = max(first, other.first)
            if (last is None or later <= last) and (other.last is None or later <= other.last):
                raise UserError(f"{setting}: layer {later} is in {other.words} too; name it once")
        found.append(LayerFormats(first, last, keys, values, words))
    return found


def codec_words(
    codec: str | None,
    value_codec: str | None = None,
    codec_layers: Sequence[str] | None = None,
    rotation: str | None = None,
    key_groups: str = "token",
    residual: int = 0,
) -> str | None:
    """A codec's name in tables and labels, such as `hadamard-int4`, `channel-int2/int2-r128` or
    `int4[0-1:int8]`; None for none."""
    if codec is None:
        return None
    keys = codec if key_groups == "token" else f"{key_groups}-{codec}"
    values = value_codec or codec
    words = keys if keys == values else f"{keys}/{values}"
    if rotation:
        words = f"{rotation}-{words}"
    if residual:
        words += f"-r{residual}"
    if codec_layers:
        words += f"[{','.join(codec_layers)}]"
    return words

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
    from harness.settings.config import RunConfig
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


def check_codecs(config: RunConfig) -> None:
    """Raise UserError for settings of rows that contradict one another or have no effect."""
    keys, values = config.codec, config.value_codec or config.codec
    for setting in ("value_codec", "codec_layers"):
        value = getattr(config, setting)
        if value is not None and keys is None:
            listed = f"[{','.join(value)}]" if isinstance(value, tuple) else value
            of_others = "the keys" if setting == "value_codec" else "other layers"
            needed = f"needs codec=, the format of {of_others}; fp32 is exact"
            raise UserError(f"{setting}={listed}: {needed}")
    own = config.codec if config.own_codec is not None else None
    for setting, name in (("codec", keys), ("value_codec", config.value_codec)):
        is_own = setting == "codec" and own is not None
        if name is not None and not is_own and name not in codec_names():
            raise UserError(f"{setting}={name}: {nearest(name, codec_names())}")
    layers = layer_formats(config.codec_layers or ())
    dense_layers = config.method.dense_layers
    for entry in layers:
        if entry.last is not None and entry.last < dense_layers:
            are_dense = f"method.dense_layers={dense_layers} leaves these layers as they are"
            later = "name later ones, or set it to 0"
            raise UserError(f"codec_layers=[{entry.words}]: {are_dense}; {later}")
    formats = {keys, values, *(entry.keys for entry in layers), *(entry.values for entry in layers)}
    words = f"codec={'/'.join(dict.fromkeys((str(keys), str(values))))}"
    has_groups = any(takes(name, "group_size") for name in formats)
    are_turned = takes(keys, "rotation") and takes(values, "rotation")
    are_floats = all(name is None or is_float(name) for name in (keys, values))
    by_channel, size, residual = config.key_groups == "channel", config.group_size, config.residual
    is_tiled = any(_span(name, size) > 1 for name in formats)
    grouped = "key_groups=channel" if by_channel else words
    not_whole = residual == 0 or residual % size != 0
    integer = "choose an integer codec"
    rules = [
        ("group_size", size != GROUP_SIZE and not has_groups, f"{words} has no groups; {integer}"),
        ("rotation", config.rotation and not are_turned, f"{words} is not turned; {integer}"),
        ("residual", residual and are_floats, f"{words} leaves no token behind; {integer}"),
        (
            "key_groups",
            by_channel and not is_integer(keys),
            f"codec={keys} has no groups; {integer}",
        ),
        (
            "residual",
            (by_channel or is_tiled) and not_whole,
            f"must be a multiple of group_size={size}, above 0, with {grouped}",
        ),
        (
            "residual",
            residual and not config.method.reads_all,
            f"method={config.method_name} does not read all that is cached",
        ),
    ]
    for setting, is_wrong, why in rules:
        if is_wrong:
            raise UserError(f"{setting}={getattr(config, setting)}: {why}")


def _span(name: str | None, group_size: int) -> int:
    """Tokens that a shipped codec codes together."""
    return codec_named(name, group_size=group_size).span if name in codec_names() else 1

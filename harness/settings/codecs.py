"""The shipped codecs: a file `methods/codecs/NAME.yaml` for each, with its class and settings.

They do not lie in `conf/`, whose folders are groups of Hydra's. `codec=int4` is a setting, which
may name a file of the user's as well, and which presets of methods have.
"""

from __future__ import annotations

import importlib
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

import yaml

from harness.settings.paths import PACKAGES_DIR

if TYPE_CHECKING:
    from methods.codecs.base import RowCodec


FOLDER = PACKAGES_DIR / "methods" / "codecs"


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

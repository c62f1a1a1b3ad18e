"""The method of a run: one of `conf/method`, or a user's own (`harness.settings.own_method`)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from harness.errors import UserError, nearest
from harness.settings import own_method
from harness.settings.choices import CONF_DIR, group, options
from harness.settings.schema import build

OF_THE_CODEC = ("codec", "rotation", "key_groups")
CODEC_DEFAULTS = ("group_size", "residual")
OF_THE_FILE = ("_target_", "title", *OF_THE_CODEC, *CODEC_DEFAULTS)
"""What makes a method's YAML that method: not to be changed under its name."""


def file_of(name: str) -> dict[str, Any]:
    """The YAML of a shipped method, as it is written."""
    node = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "method" / f"{name}.yaml"))
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def take(settings: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Put the method, its name and the codec of a preset (`method=int4`) in their places.

    given: names of the settings on the command line. Returns the method's YAML; of a user's own, what it would say.
    """
    node = group(settings, "method")
    name = node.pop("name", None)
    if own_method.is_target(node.get("_target_")) and not given & {"method._target_", "method.name"}:
        method = _own(name, node)
        _take_codec(settings, {})
        settings |= {"method_name": name, "method": method}
        return {} if vars(type(method)).keys() & {"title", "label"} else {"title": name}  # not what it derives from
    if name not in options("method"):
        raise UserError(f"method.name={name}: {nearest(name, options('method'))}")
    file = file_of(name)
    for key in OF_THE_FILE:
        value, own = node.pop(key, None), file.get(key)
        if value != own:
            raise UserError(f"method.{key}={value}: method={name} has {own}; choose another by method=NAME")
    _take_codec(settings, file)
    module, _, cls = str(file["_target_"]).rpartition(".")
    method = build(getattr(importlib.import_module(module), cls), node, "method")
    settings |= {"method_name": name, "method": method}
    return file


def _take_codec(settings: dict[str, Any], file: Mapping[str, Any]) -> None:
    """Put a preset's codec in its place, with those of its numbers that the user did not give."""
    for key in OF_THE_CODEC:
        if key in file and settings.get(key) not in (None, file[key]):
            given = f"{key}={settings[key]}"
            raise UserError(f"{given} contradicts method={file['name']}: leave it out, or method=full")
    for key in (*OF_THE_CODEC, *CODEC_DEFAULTS):
        if settings.get(key) is None:
            settings.pop(key, None)
            settings |= {key: file[key]} if key in file else {}


def _own(name: str, node: dict[str, Any]) -> Any:
    """A user's own method, found again by its target: what composed the node may be another process."""
    target = node.pop("_target_")
    if name in options("method"):
        raise UserError(f"method={target}: {name} is a method of conf/method; rename the file")
    return build(own_method.find(target).cls, node, "method")


def plain(name: str, file: Mapping[str, Any]) -> str:
    """The method behind a preset: the one of the same class without a codec of its own."""
    if "codec" not in file:
        return name
    others = ((other, file_of(other)) for other in options("method"))
    alike = (other for other, node in others if node["_target_"] == file["_target_"] and "codec" not in node)
    return next(alike, name)

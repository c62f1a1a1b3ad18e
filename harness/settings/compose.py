"""From a command line to the settings of a run: Hydra composes `conf/`, `parse` checks and freezes.

The only heavy module that `parse` imports is the chosen method's, so a wrong setting is refused before a model
library loads.

    config = load(["method=h2o", "method.heavy_frac=0.05", "experiment=tasks"])
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from harness.errors import UserError, nearest
from harness.settings import systems
from harness.settings.experiment import Experiment, find
from harness.settings.run import CODEC_WORDS, GENERATED_TASKS, PAPER_TASKS, RunConfig, codec_words
from harness.settings.schema import build
from harness.settings.sources import CPU_DTYPE, ModelConfig, check_dtype
from harness.settings.speed import Device, LatencyConfig, PlatformConfig, group_latency, refuse_modelled

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
OF_THE_CODEC = ("codec", "rotation", "key_groups")
CODEC_DEFAULTS = ("group_size", "residual")
OF_THE_FILE = ("_target_", "title", *OF_THE_CODEC, *CODEC_DEFAULTS)
"""What makes a method's YAML that method: not to be changed under its name."""


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose `conf/config.yaml` with Hydra's override syntax, checked no further than Hydra does."""
    if GlobalHydra.instance().is_initialized():  # inside hydra.main
        return hydra.compose("config", list(overrides))
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return hydra.compose("config", list(overrides))


def load(overrides: Sequence[str] = ()) -> RunConfig:
    """The checked settings behind a command line."""
    return parse(compose(overrides), overrides)


def parse(config: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """Check a composed configuration and freeze it.

    Args:
        config: what Hydra composed.
        overrides: the user's own; they tell a given `model.hub_id` from that of the chosen entry.

    Raises:
        UserError: a setting that is unknown, of a wrong type, out of range or contradicts another.
    """
    composed = OmegaConf.to_container(config, resolve=True)
    assert isinstance(composed, dict)
    settings: dict[str, Any] = {str(key): value for key, value in composed.items() if key != "grid"}
    given = {override.split("=", 1)[0].lstrip("+") for override in overrides}
    experiment = find(settings["kind"]) if "kind" in settings else Experiment()  # `build` says that it is missing
    settings["latency"] = build(LatencyConfig, group_latency(settings))
    if experiment.live:
        systems.apply(settings, given, method_file)
    settings["platform"] = _platform(_group(settings, "platform"))
    settings["model"] = _model(_group(settings, "model"), settings["platform"].name, given)
    file = _take_method(settings)
    if settings.get("tasks") is None:
        offline = _group(settings, "data").get("name") == "offline"
        settings["tasks"] = GENERATED_TASKS if offline else PAPER_TASKS
    label = settings.get("label")
    settings |= {"label": "" if label is None else label, "label_given": bool(label)}
    checked = build(RunConfig, settings)
    if checked.experiment not in options("experiment"):
        raise UserError(f"experiment={checked.experiment}: {nearest(checked.experiment, options('experiment'))}")
    experiment.check(checked)
    return checked if checked.label else replace(checked, label=_label(checked, experiment, file))


def options(group: str) -> list[str]:
    """The choices of a group: the files under `conf/<group>`."""
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def method_file(name: str) -> dict[str, Any]:
    """The YAML of a method, as it is written."""
    node = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "method" / f"{name}.yaml"))
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def _group(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    node = settings.get(name)
    if not isinstance(node, dict):
        raise UserError(f"{name}={node}: {nearest(node, options(name))}")
    return dict(node)


def _platform(node: dict[str, Any]) -> PlatformConfig:
    refuse_modelled(node)
    return build(PlatformConfig, node, "platform")


def _model(node: dict[str, Any], platform: Device, given: set[str]) -> ModelConfig:
    """The model where the platform says, in the precision of its entry, or in that of a CPU."""
    model = build(ModelConfig, _with_source(node, given), "model")
    if model.device not in ("auto", platform):
        raise UserError(f"model.device={model.device}: contradicts platform={platform}; leave one of them out")
    if "model.dtype" in given:
        check_dtype(model.dtype, platform)
    return replace(model, device=platform, dtype=CPU_DTYPE if platform == "cpu" else model.dtype)


def _with_source(model: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """A source the user gave replaces the chosen entry's: the name follows it, the shape is dropped."""
    sources = [key for key in ("path", "hub_id") if f"model.{key}" in given and model.get(key) is not None]
    if len(sources) == 2:
        raise UserError(f"model.path={model['path']} and model.hub_id={model['hub_id']}: give one of them")
    if not sources:
        return model
    source = str(model[sources[0]])
    model |= {"path": None, "hub_id": None, "shape": None, sources[0]: source}
    if "model.name" not in given:
        model["name"] = Path(source).resolve().name.removesuffix(".gguf")
    return model


def _take_method(settings: dict[str, Any]) -> dict[str, Any]:
    """Put the method, its name and the codec of a preset (`method=int4`) in their places; returns its YAML."""
    node = _group(settings, "method")
    name = node.pop("name", None)
    if name not in options("method"):
        raise UserError(f"method.name={name}: {nearest(name, options('method'))}")
    file = method_file(name)
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


def _label(config: RunConfig, experiment: Experiment, file: Mapping[str, Any]) -> str:
    """The name of a run that the user gave none: the system that it is, or the method and its codec."""
    if experiment.live:
        return systems.name_of(_plain_method(config.method_name, file), config)
    title = file.get("title") or config.method.label
    own = codec_words(**{name: file[name] for name in CODEC_WORDS if name in file}) if "codec" in file else None
    return title if config.codec_name in (None, own) else f"{title} + {config.codec_name}"


def _plain_method(name: str, file: Mapping[str, Any]) -> str:
    """The method behind a preset: the one of the same class without a codec of its own."""
    if "codec" not in file:
        return name
    others = ((other, method_file(other)) for other in options("method"))
    alike = (other for other, node in others if node["_target_"] == file["_target_"] and "codec" not in node)
    return next(alike, name)

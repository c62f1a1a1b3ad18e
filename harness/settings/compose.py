"""From a command line to the settings of a run: Hydra composes `conf/`, `parse` checks and freezes.

The only heavy module that `parse` imports is the chosen method's, so a wrong setting is refused before a model
library loads.

    config = load(["method=h2o", "method.heavy_frac=0.05", "experiment=tasks"])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from harness.errors import UserError, nearest
from harness.settings import method, systems
from harness.settings.choices import CONF_DIR, group, options
from harness.settings.experiment import Experiment, find
from harness.settings.run import CODEC_WORDS, GENERATED_TASKS, PAPER_TASKS, RunConfig, codec_words
from harness.settings.schema import build
from harness.settings.sources import CPU_DTYPE, ModelConfig, check_dtype
from harness.settings.speed import Device, LatencyConfig, PlatformConfig, group_latency, refuse_modelled
from harness.settings.tasks import TaskConfig, group_tasks


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
    if settings.pop("export", None) is not None:
        raise UserError(f"export={composed['export']}: runs nothing, so it is no setting of a run")
    if settings.pop("cluster", None) is not None:
        raise UserError(f"cluster={composed['cluster']}: says where a command runs, so it is no setting of a run")
    given = {override.split("=", 1)[0].lstrip("+") for override in overrides}
    experiment = find(settings["kind"]) if "kind" in settings else Experiment()  # `build` says that it is missing
    settings["latency"] = build(LatencyConfig, group_latency(settings))
    settings["task"] = build(TaskConfig, group_tasks(settings))
    if experiment.live:
        systems.apply(settings, given, method.file_of)
    settings["platform"] = _platform(group(settings, "platform"))
    if settings["platform"].weights_on_device < 1 and not experiment.live:
        share = f"platform.weights_on_device={settings['platform'].weights_on_device}"
        raise UserError(f"{share}: experiment={settings.get('experiment')} decodes through no link; leave it out")
    settings["model"] = _model(group(settings, "model"), settings["platform"].name, given)
    file = method.take(settings, given)
    if settings.get("sizing") == "nearest" and not _has_size(settings["method"]):
        settings["target_kv_frac"] = None  # the same run at every target
    if settings.get("tasks") is None:
        offline = group(settings, "data").get("name") == "offline"
        settings["tasks"] = GENERATED_TASKS if offline else PAPER_TASKS
    label = settings.get("label")
    settings |= {"label": "" if label is None else label, "label_given": bool(label)}
    checked = build(RunConfig, settings)
    if checked.experiment not in options("experiment"):
        raise UserError(f"experiment={checked.experiment}: {nearest(checked.experiment, options('experiment'))}")
    experiment.check(checked)
    return checked if checked.label else replace(checked, label=_label(checked, experiment, file))


def choices(group: str, *without: str) -> list[str]:
    """`${choices:method,full}` in a grid: the choices of a group but those named."""
    return [name for name in options(group) if name not in without]


OmegaConf.register_new_resolver("choices", choices, replace=True)


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
    """A source the user gave replaces the chosen entry's: the name follows it, the shape is dropped.

    A copy of the very file that the entry names is the entry's model still.
    """
    sources = [key for key in ("path", "hub_id") if f"model.{key}" in given and model.get(key) is not None]
    if len(sources) == 2:
        raise UserError(f"model.path={model['path']} and model.hub_id={model['hub_id']}: give one of them")
    if not sources:
        return model
    source = str(model[sources[0]])
    model |= {"path": None, "hub_id": None, sources[0]: source}
    if sources == ["path"] and model.get("gguf_file") == Path(source).name:
        return model | {"gguf_file": None}
    model["shape"] = None
    if "model.gguf_file" not in given:
        model["gguf_file"] = None
    if "model.name" not in given:
        model["name"] = Path(source).resolve().name.removesuffix(".gguf")
    return model


def _has_size(method: Any) -> bool:
    try:
        method.with_size(1.0)
    except ValueError:
        return False
    return True


def _label(config: RunConfig, experiment: Experiment, file: Mapping[str, Any]) -> str:
    """The name of a run that the user gave none: the system that it is, or the method and its codec."""
    if experiment.live:
        return systems.name_of(method.plain(config.method_name, file), config)
    title = file.get("title") or config.method.label
    own = codec_words(**{name: file[name] for name in CODEC_WORDS if name in file}) if "codec" in file else None
    return title if config.codec_name in (None, own) else f"{title} + {config.codec_name}"

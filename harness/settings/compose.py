"""From a command line to the settings of a run: Hydra composes `conf/`, `parse` checks and freezes.

The only heavy module that `parse` imports is the chosen method's, so a wrong setting is refused before a model
library loads.

    config = load(["method=h2o", "method.heavy_frac=0.05", "experiment=tasks"])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from harness.errors import UserError, nearest
from harness.settings import method, systems
from harness.settings.choices import CONF_DIR, group, kind_of, options, setting_of
from harness.settings.experiment import Experiment, find
from harness.settings.run import CODEC_WORDS, GENERATED_TASKS, PAPER_TASKS, RunConfig, codec_words
from harness.settings.schema import build, path_text
from harness.settings.sources import CPU_DTYPE, ModelConfig
from harness.settings.speed import Device, LatencyConfig, PlatformConfig, group_latency, refuse_modelled
from harness.settings.tasks import TaskConfig, group_tasks


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose `conf/config.yaml` with Hydra's override syntax, checked no further than Hydra does."""
    if GlobalHydra.instance().is_initialized():  # inside hydra.main
        return hydra.compose("config", list(overrides))
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return hydra.compose("config", list(overrides))


def load(overrides: Sequence[str] = (), composed: Callable[[Sequence[str]], DictConfig] = compose) -> RunConfig:
    """The checked settings behind a command line."""
    return parse(composed(overrides), overrides)


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
    asks_status(settings.pop("status", False))
    if settings.pop("export", None) is not None:
        raise UserError(f"export={composed['export']}: runs nothing, so it is no setting of a run")
    if settings.pop("cluster", None) is not None:
        raise UserError(f"cluster={composed['cluster']}: says where a command runs, so it is no setting of a run")
    given = set(map(setting_of, overrides))
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
        settings["size"] = None  # the same run at every target
    if settings.get("tasks") is None:
        offline = group(settings, "data").get("name") == "offline"
        settings["tasks"] = GENERATED_TASKS if offline else PAPER_TASKS
    label = settings.get("label")
    settings |= {"label": "" if label is None else label, "label_given": bool(label)}
    checked = build(RunConfig, settings)
    if checked.experiment not in options("experiment"):
        raise UserError(f"experiment={checked.experiment}: {nearest(checked.experiment, options('experiment'))}")
    _refuse_other_table(checked, experiment)
    experiment.check(checked)
    if checked.tracker != "none" and not experiment.keeps_record:
        raise UserError(f"tracker={checked.tracker}: experiment={checked.experiment} keeps no record to send")
    return checked if checked.label else replace(checked, label=_label(checked, experiment, file))


def chosen_model(config: DictConfig, overrides: Sequence[str]) -> ModelConfig:
    """The model of a composed configuration, from the user's own source where the command line gives one."""
    node = OmegaConf.to_container(config.model, resolve=True)
    assert isinstance(node, dict)
    settings = {str(key): value for key, value in node.items()}
    return build(ModelConfig, _with_source(settings, set(map(setting_of, overrides))), "model")


def choices(group: str, *without: str) -> list[str]:
    """`${choices:method,full}` in a grid: the choices of a group but those named."""
    return [name for name in options(group) if name not in without]


def asks_status(given: object) -> bool:
    """Whether a command only looks how far its runs are; UserError where `status` is neither true nor false."""
    if not isinstance(given, bool):
        raise UserError(f"status={given}: must be true or false")
    return given


OmegaConf.register_new_resolver("choices", choices, replace=True)
OmegaConf.register_new_resolver("results_dir", lambda given: path_text(given, "results_dir"), replace=True)


def _refuse_other_table(config: RunConfig, experiment: Experiment) -> None:
    """Raise UserError for a kind whose rows have no place in the table of the experiment's name."""
    own = kind_of(config.experiment)
    if own is not None and find(own).table != experiment.table:
        at_home = [name for name in options("experiment") if kind_of(name) == config.kind]
        raise UserError(
            f"kind={config.kind}: its rows are none of experiment={config.experiment}'s table; "
            f"choose an experiment of that kind: {', '.join(at_home) or 'none here is'}"
        )


def _platform(node: dict[str, Any]) -> PlatformConfig:
    refuse_modelled(node)
    return build(PlatformConfig, node, "platform")


def _model(node: dict[str, Any], platform: Device, given: set[str]) -> ModelConfig:
    """The model where the platform says, in the precision that the user gave, else its entry's, or a CPU's."""
    model = build(ModelConfig, _with_source(node, given), "model")
    if model.device == "map" and platform != "cuda":
        raise UserError(f"model.device=map: needs platform=cuda; allowed on {platform}: auto, {platform}")
    if model.device not in ("auto", "map", platform):
        raise UserError(f"model.device={model.device}: contradicts platform={platform}; leave one of them out")
    in_entry = "model.dtype" not in given
    device = platform if model.device == "auto" else model.device
    return replace(model, device=device, dtype=CPU_DTYPE if in_entry and platform == "cpu" else model.dtype)


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
        model["name"] = Path(os.path.realpath(source)).name.removesuffix(".gguf")
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

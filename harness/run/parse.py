"""From a composed configuration to the checked and frozen settings of a run.

`parse` is a sequence of steps. Each takes what it reads and returns what it makes. The only heavy
module that it imports is the chosen method's, so that a wrong setting is refused before a model
library loads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from omegaconf import DictConfig, OmegaConf

from harness.errors import UserError, nearest
from harness.run.kinds import measurement_of
from harness.settings import config as configs
from harness.settings import own_method, systems
from harness.settings.codecs import CODEC_WORDS, codec_names, codec_words
from harness.settings.config import CPU_DTYPE, RunConfig
from harness.settings.kinds import BOARD, Kind, find
from harness.settings.schema import build, group, kind_of, options, setting_of
from harness.settings.task_config import GENERATED_TASKS, PAPER_TASKS, SamplingConfig, TaskConfig

if TYPE_CHECKING:
    from methods.base import Method

T = TypeVar("T")

OF_THE_CODEC = ("codec", "value_codec", "codec_layers", "rotation", "key_groups")
DEFAULTS = ("group_size", "residual", "gpu_cache")
"""Keys of a method's YAML for which a setting of the same name may be given."""
OF_THE_FILE = ("_target_", "title", *OF_THE_CODEC, *DEFAULTS)
"""Keys of a method's YAML that make it that method. They cannot be changed under its name."""

AT_TOP = (configs.LatencyConfig, SamplingConfig, TaskConfig)
"""Classes whose settings stand at the top of `conf/config.yaml`, not in a group."""


def method_file(name: object) -> dict[str, Any]:
    """The settings of a shipped method. Raises OSError if there is none."""
    _, settings = own_method.shipped(str(name))
    return dict(settings)


def _plain(config: Any) -> dict[str, Any]:
    return {str(key): value for key, value in OmegaConf.to_container(config, resolve=True).items()}  # type: ignore


@own_method.faults()
def parse(config: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """Check a composed configuration and freeze it.

    Args:
        config: what Hydra composed; `sweep` is not looked at.
        overrides: the user's own. They tell a given `model.hub_id` from that of the chosen entry.

    Raises:
        UserError: a setting that is unknown, of a wrong type, out of range or contradicts another.
    """
    if config.get("sweep") is not None:
        config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "sweep"])
    settings = _plain(config)
    settings.pop("sweep", None)
    given = set(map(setting_of, overrides))
    _refuse_no_settings(settings)
    chosen_file = next((word for word in overrides if word.startswith("experiment=")), None)
    if chosen_file and "kind" not in settings and "experiment" not in settings:
        raise UserError(f"{chosen_file}: its runs are of other experiments; it is none by itself")
    # `build` says that the kind is missing.
    kind = find(settings["kind"]) if "kind" in settings else Kind()
    times_steps = kind.table in ("latency", "capacity")
    latency = _repeated(configs.LatencyConfig, settings, counts=times_steps)
    sampling = _repeated(SamplingConfig, settings, counts=not times_steps)
    task = _task(settings)
    platform = _platform(settings, kind)
    model = _model(group(settings, "model"), platform.name, given)
    data = build(configs.DataConfig, group(settings, "data"), "data")
    corpus = _text("corpus", configs.CorpusConfig, settings, model)
    calibration = _text("calibration", configs.CalibrationConfig, settings, model)
    analysis = build(configs.AnalysisConfig, group(settings, "analysis"), "analysis")
    capacity = build(configs.CapacityConfig, group(settings, "capacity"), "capacity")
    advise = build(configs.AdviseConfig, group(settings, "advise"), "advise")
    chosen = _method(group(settings, "method"), given)
    cache_settings = _cache_settings(settings, chosen)
    tasks = settings.get("tasks")
    if tasks is None:
        tasks = GENERATED_TASKS if data.name == "offline" else PAPER_TASKS
    label = settings.get("label")
    made = {
        "latency": latency,
        "sampling": sampling,
        "task": task,
        "platform": platform,
        "model": model,
        "data": data,
        "corpus": corpus,
        "calibration": calibration,
        "analysis": analysis,
        "capacity": capacity,
        "advise": advise,
        "method": chosen.method,
        "method_name": chosen.name,
        "tasks": tasks,
        "label": "" if label is None else label,
        "label_given": bool(label),
    }
    if settings.get("prefill_len") is None:
        seq_len = settings.get("seq_len")
        # `build` refuses what is no number
        made["prefill_len"] = configs.prompt_of_window(seq_len) if isinstance(seq_len, int) else 0
    with_it = _budget(settings.get("budget"), chosen.method, cache_settings.get("codec"))
    checked = build(RunConfig, _taken_as_written(settings) | made | cache_settings | with_it)
    _check_together(checked, kind, given)
    made_label = _label(checked, kind, chosen.file)
    if kind.live:
        systems.check_label(checked.label, made_label)
    return checked if checked.label else replace(checked, label=made_label)


def asks_status(given: object) -> bool:
    """True if a command only asks how far its runs are. Raises UserError unless `status` is true or
    false."""
    if not isinstance(given, bool):
        raise UserError(f"status={given}: must be true or false")
    return given


def chosen_model(config: DictConfig, overrides: Sequence[str]) -> configs.ModelConfig:
    """The model of a composed configuration, from the user's own source where one is given."""
    node = _with_source(_plain(config.model), set(map(setting_of, overrides)))
    return build(configs.ModelConfig, node, "model")


def _refuse_no_settings(settings: Mapping[str, Any]) -> None:
    asks_status(settings.get("status", False))
    export = settings.get("export")
    if export is not None:
        raise UserError(f"export={export}: runs nothing, so it is no setting of a run")


def _taken_as_written(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `RunConfig` has under the same name, and unknown ones, for `build` to
    refuse."""
    read = {"sweep", "status", "export", "codec_settings", *OF_THE_CODEC, *DEFAULTS}
    for cls in AT_TOP:
        read.update(field.name for field in fields(cls))
    return {name: value for name, value in settings.items() if name not in read}


def _at_top(cls: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a class of `AT_TOP`."""
    names = [field.name for field in fields(cls)]
    return {name: settings[name] for name in names if name in settings}


def _repeated(cls: type[T], settings: Mapping[str, Any], *, counts: bool) -> T:
    """`LatencyConfig` or `SamplingConfig`. Both have `repeats`: of the timed steps of a run, or
    answers to each question. counts: it is meant here."""
    own = _at_top(cls, settings)
    repeats = own.pop("repeats", None)
    if counts and repeats is not None:
        own["repeats"] = repeats
    return build(cls, own)


def _task(settings: Mapping[str, Any]) -> TaskConfig:
    own = _at_top(TaskConfig, settings)
    metadata = own.get("metadata")
    if isinstance(metadata, Mapping):
        own["metadata"] = {name: value for name, value in metadata.items() if value is not None}
    return build(TaskConfig, own)


def _platform(settings: Mapping[str, Any], kind: Kind) -> configs.PlatformConfig:
    node = group(settings, "platform")
    if node.get("kind") == "modelled":
        if not kind.modelled:
            refusal = "is modelled, nothing runs there; allowed here: cpu, cuda"
            raise UserError(f"platform={node['name']}: {refusal}")
        # What a system says of its transfers holds there too.
        machine: dict[str, Any] = {"name": node["name"], "sheet": node}
        for name in ("overlap", "pinned"):
            if name in node:
                machine[name] = node.pop(name)
        return build(configs.PlatformConfig, machine, "platform")
    platform = build(configs.PlatformConfig, node, "platform")
    if platform.device_gib is not None and not kind.live:
        memory = f"platform.device_gib={platform.device_gib:g}"
        no_memory = f"experiment={settings.get('experiment')} decodes through no device memory"
        raise UserError(f"{memory}: {no_memory}; leave it out")
    if platform.weights_on_device < 1 and not kind.live:
        share = f"platform.weights_on_device={platform.weights_on_device}"
        no_link = f"experiment={settings.get('experiment')} decodes through no link; leave it out"
        raise UserError(f"{share}: {no_link}")
    return platform


def _model(node: dict[str, Any], platform: str, given: set[str]) -> configs.ModelConfig:
    """The model on the platform's device, in the precision that the user gave, else its entry's, or
    a CPU's. Of a modelled machine the model's shape alone is looked at."""
    if platform not in configs.RUNNING:
        platform = "cpu"
        given = {*given, "model.dtype"}
    model = build(configs.ModelConfig, _with_source(node, given), "model")
    setting = f"model.device={model.device}"
    if model.device == "map" and platform != "cuda":
        raise UserError(f"{setting}: needs platform=cuda; allowed on {platform}: auto, {platform}")
    if model.device not in ("auto", "map", platform):
        raise UserError(f"{setting}: contradicts platform={platform}; leave one of them out")
    if model.device == "auto":
        model = replace(model, device=platform)  # type: ignore[arg-type]  # one of RUNNING
    if platform == "cpu" and "model.dtype" not in given:
        model = replace(model, dtype=CPU_DTYPE)
    return model


def _with_source(model: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """A source that the user gave replaces the chosen entry's: the name follows it, the shape is
    dropped.

    A copy of the very file that the entry names is still the entry's model.
    """
    sources = [
        key for key in ("path", "hub_id") if f"model.{key}" in given and model.get(key) is not None
    ]
    if len(sources) == 2:
        both = f"model.path={model['path']} and model.hub_id={model['hub_id']}"
        raise UserError(f"{both}: give one of them")
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


def _text(name: str, cls: Any, settings: Mapping[str, Any], model: configs.ModelConfig) -> Any:
    """The corpus or the calibration text. For random weights it is random token ids, which need no
    tokenizer."""
    text = build(cls, group(settings, name), name)
    is_random = model.weights == "random"
    if is_random and text.path is not None:
        reads = "model.weights=random reads random token ids"
        raise UserError(
            f"{name}.path={text.path}: {reads}; leave it out, or model.weights=pretrained"
        )
    if not is_random and text.name == "random":
        raise UserError(f"{name}.name=random: needs model.weights=random; allowed: offline")
    return replace(text, name="random") if is_random else text


class ChosenMethod(NamedTuple):
    """file: the method's YAML; of a user's own method, its title if any."""

    name: str
    method: Method
    file: dict[str, Any]


def _method(node: dict[str, Any], given: set[str]) -> ChosenMethod:
    """Make the method of its group of settings: `method.alpha` is a field of the class that
    `_target_` names, as `methods.infinigen.InfiniGen` in `conf/method/infinigen.yaml`.

    given: names of the settings on the command line.
    """
    name, target = node.pop("name", None), str(node.get("_target_"))
    file: dict[str, Any] = {}
    if ":" in target and not given & {"method._target_", "method.name"}:
        del node["_target_"]
        if name in options("method"):
            raise UserError(f"method={target}: {name} is a method of conf/method; rename the file")
        cls, _ = own_method.find(target)  # another process may have composed it
        own_names = vars(cls)  # without those of the class from which it derives
        if "title" not in own_names:
            file = {"title": name}
    else:
        if name not in options("method"):
            raise UserError(f"method.name={name}: {nearest(name, options('method'))}")
        file = method_file(name)
        for key in OF_THE_FILE:
            value, own = node.pop(key, None), file.get(key)
            if value != own:
                has = f"method={name} has {own}; choose another by method=NAME"
                raise UserError(f"method.{key}={value}: {has}")
        cls, _ = own_method.shipped(str(name))
    return ChosenMethod(str(name), build(cls, node, "method"), file)


def _cache_settings(settings: Mapping[str, Any], chosen: ChosenMethod) -> dict[str, Any]:
    """How rows are stored: as given, else as the method's YAML says. What neither says has the
    default of `RunConfig`."""
    found: dict[str, Any] = {}
    on_host = settings.get("placement", "host") == "host"
    for key in (*OF_THE_CODEC, *DEFAULTS):
        value = settings.get(key)
        in_file = key in chosen.file
        if key in OF_THE_CODEC and in_file and value not in (None, chosen.file[key]):
            contradicts = f"contradicts method={chosen.name}: leave it out, or method=full"
            raise UserError(f"{key}={value} {contradicts}")
        if value is not None:
            found[key] = value
        elif in_file and (on_host or key != "gpu_cache"):
            found[key] = chosen.file[key]
    return found | _own_codec(found.get("codec"), settings.get("codec_settings") or {})


def _own_codec(codec: Any, given: Any) -> dict[str, Any]:
    """The codec of the user's own that `codec` names, of its settings. Empty for a shipped one."""
    if not isinstance(codec, str) or not own_method.is_own(codec):
        if given:
            has_none = f"are those of a codec of your own; codec={codec} has none"
            raise UserError(f"codec_settings={given}: {has_none}")
        return {}
    cls, name = own_method.find_codec(codec)
    if name in codec_names():
        raise UserError(f"codec={codec}: {name} is a codec of this project; rename the file")
    return {"codec": name, "own_codec": build(cls, given, "codec_settings")}


def _budget(given: Any, method: Method, codec: Any) -> dict[str, Any]:
    """`budget` and `budget_rule` of what the user gave: a share of the full cache such as 0.16 or
    16%, or the nearest possible one, `nearest:0.16`. Empty where nothing is given.

    The full cache has no budget to set and runs as it is, so that a sweep may name it. Under
    `nearest` so does every method without a budget, such as a codec's preset.
    """
    if given is None:
        return {}
    budget_rule, share = "exact", given
    if isinstance(given, str):
        rule, _, words = given.rpartition(":")
        share = _share_in(words) if rule in ("", "nearest") else None
        budget_rule = rule or budget_rule
    if share is None or isinstance(share, int | float) and not 0 < share <= 1:
        allowed = "a share of the full cache such as 0.16 or 16%, or nearest:0.16"
        raise UserError(f"budget={given}: must be {allowed}")
    if method.reads_all and codec is None:
        return {
            "budget": None,
            "budget_rule": "exact",
        }  # the full cache: the same run at every budget
    if budget_rule == "nearest" and not _has_budget(method):
        share = None
    return {"budget": share, "budget_rule": budget_rule}


def _share_in(words: str) -> float | None:
    """The number in `0.16` or `16%`; None where there is none."""
    is_percent = words.endswith("%")
    try:
        number = float(words.removesuffix("%"))
    except ValueError:
        return None
    return number / 100 if is_percent else number


def _has_budget(method: Method) -> bool:
    """Whether a method can be set to a budget."""
    try:
        method.with_budget(1.0)
    except ValueError:
        return False
    return True


def _tables_of(experiment: str, usual_kind: str) -> set[str]:
    """The shapes of the tables that an experiment's rows go to."""
    table = find(usual_kind).table
    return {table, "latency"} if experiment == BOARD else {table}


def _check_together(config: RunConfig, kind: Kind, given: set[str]) -> None:
    """Raise UserError for settings that contradict one another, or make no sense in this
    experiment."""
    if config.budget is not None:
        _check_given_beside_budget(config.method, config.budget, given)
    if config.prompt is not None and config.kind != "generate":
        raise UserError(f"prompt={config.prompt}: needs experiment=generate")
    usual_kind = kind_of(config.experiment)
    if usual_kind is not None and kind.table not in _tables_of(config.experiment, usual_kind):
        others = [name for name in options("experiment") if kind_of(name) == config.kind]
        raise UserError(
            f"kind={config.kind}: its rows are none of experiment={config.experiment}'s table; "
            f"choose an experiment of that kind: {', '.join(others) or 'none here is'}"
        )
    systems.check_gpu_cache(config.method, config.gpu_cache)
    measurement_of(config.kind).check(config)


def _check_given_beside_budget(method: Method, budget: float, given: set[str]) -> None:
    """Raise UserError for a given setting of the method that `budget` sets to another value."""
    with_it = method.with_budget(budget)
    for field in fields(method):
        setting = f"method.{field.name}"
        value = getattr(method, field.name)
        if setting not in given or value is None:
            continue
        if getattr(with_it, field.name) != value:
            raise UserError(f"{setting}={value}: budget={budget:g} sets it; leave one of them out")


def _label(config: RunConfig, kind: Kind, file: Mapping[str, Any]) -> str:
    """The name of a run that the user gave none: its system, or its method and codec."""
    codec_of_file = None
    if "codec" in file:
        codec_of_file = codec_words(**{name: file[name] for name in CODEC_WORDS if name in file})
    if kind.live:
        behind_preset = str(file["_target_"]).split(".")[1] if codec_of_file else config.method_name
        return systems.name_of(behind_preset, config, is_own="_target_" not in file)
    title = file.get("title") or config.method.title
    if not isinstance(title, str) or not title.isprintable():
        refusal = f"its label is {title!r}; must be text in one line"
        raise UserError(f"method={config.method_name}: {refusal}")
    parts: list[str | None] = [title]
    if config.codec_name != codec_of_file:
        parts.append(config.codec_name)
    if config.gpu_cache != file.get("gpu_cache", 0):
        parts.append(f"{config.gpu_cache:g}x GPU cache")
    return " + ".join(filter(None, parts))

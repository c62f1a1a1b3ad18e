"""From a command line to the settings of a run: Hydra composes `conf/`, `parse` checks and freezes.

The only heavy module that `parse` imports is the chosen method's, so that a wrong setting is
refused before a model library loads.

    config = load(["method=h2o", "method.heavy_frac=0.05", "experiment=tasks"])
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from functools import cache
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.errors import UserError, nearest, printable
from harness.run.kinds import measurement_of
from harness.settings import config as configs
from harness.settings import own_method, schema, systems
from harness.settings.config import (
    CODEC_WORDS,
    CPU_DTYPE,
    GENERATED_TASKS,
    PAPER_TASKS,
    RunConfig,
    codec_words,
)
from harness.settings.kinds import Kind, find
from harness.settings.paths import PROGRAM
from harness.settings.schema import build, group, is_group, kind_of, options, path_text, setting_of

if TYPE_CHECKING:
    from methods.base import Method

OF_THE_CODEC = ("codec", "value_codec", "rotation", "key_groups")
DEFAULTS = ("group_size", "residual", "device_rows", "prefetch")
"""Keys of a method's YAML for which a setting of the same name may be given."""
OF_THE_FILE = ("_target_", "title", *OF_THE_CODEC, *DEFAULTS)
"""Keys of a method's YAML that make it that method. They cannot be changed under its name."""

ON_HOST = ("device_rows", "prefetch")
"""Those that need rows behind a link."""

# Hydra composes


def choices(group: str, *without: str) -> list[str]:
    """`${choices:method,full}` in a grid: the choices of a group but those named."""
    return [name for name in options(group) if name not in without]


OmegaConf.register_new_resolver("choices", choices, replace=True)
OmegaConf.register_new_resolver("program", lambda: PROGRAM, replace=True)
OmegaConf.register_new_resolver("systems", lambda: ", ".join(systems.LABELS), replace=True)
OmegaConf.register_new_resolver(
    "results_dir", lambda given: path_text(given, "results_dir"), replace=True
)


@cache
def read_override(text: str) -> Override:
    """A word of a command line, as Hydra reads it. Raises HydraException where it cannot."""
    return OverridesParser.create().parse_override(text)


def override(name: str, value: Any) -> str:
    """`name=value` as Hydra reads it on a command line. Raises UserError for a value that no
    setting can have."""
    try:
        word = f"{name}={_as_word(value)}"
        word.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{printable(name)}: is not UTF-8 text") from None
    except RecursionError:
        raise UserError(f"{name}: contains itself, or is nested too deeply") from None
    except TypeError as error:
        raise UserError(
            f"{name}: {error}; must be a number, text, a path, a list or a mapping of these"
        ) from None
    return word


def _as_word(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_as_word, value))}]"
    if isinstance(value, Mapping):
        items = [f"{key}:{_as_word(item)}" for key, item in value.items()]
        return f"{{{','.join(items)}}}"
    if isinstance(value, str | Path):  # quoted, as it may hold what Hydra reads as syntax
        return QuotedString(str(value), Quote.single).with_quotes()
    if isinstance(value, Number) and not isinstance(value, complex):
        return str(value)
    raise TypeError(f"is of type {type(value).__name__}")


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose `conf/config.yaml` with Hydra's override syntax. Checks no more than Hydra does."""
    if GlobalHydra.instance().is_initialized():  # inside hydra.main
        return hydra.compose("config", list(overrides))
    with hydra.initialize_config_dir(str(schema.CONF_DIR), version_base="1.3"):
        return hydra.compose("config", list(overrides))


class Composer:
    """`compose` for the cells of a grid, six times as fast.

    Hydra composes each choice of files once, without the method's. The method's file and the values
    then go into a copy. Whatever is not that plain, or is refused, Hydra composes itself.
    """

    def __init__(self) -> None:
        self._bases: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """The same as `compose(overrides)`."""
        try:
            given = [read_override(each) for each in overrides]
            files = {each.key_or_group: each for each in given if is_group(each.key_or_group)}
            method = files.pop("method", None)
            if not all(map(_is_plain, given)) or (
                method and own_method.is_own(str(method.value()))
            ):
                return compose(overrides)
            chosen = tuple(str(each.input_line) for each in files.values())
            if chosen not in self._bases:
                self._bases[chosen] = compose(chosen)
            config = deepcopy(self._bases[chosen])
            if method is not None:
                config.method = method_file(method.value())
            for each in given:
                if not is_group(each.key_or_group):
                    OmegaConf.update(config, each.key_or_group, each.value())
        except (HydraException, OmegaConfBaseException, OSError):
            return compose(overrides)  # refused in Hydra's words
        return config


def _is_plain(given: Override) -> bool:
    """True if it chooses one file or sets one value, not of Hydra's own settings."""
    of_hydra = given.key_or_group.startswith(("hydra.", "hydra/"))
    changes = given.type == OverrideType.CHANGE and given.package is None
    return changes and not of_hydra and not given.is_sweep_override()


def method_file(name: object) -> dict[str, Any]:
    """The YAML of a shipped method. Raises OSError if there is none."""
    return _plain(_read(schema.CONF_DIR / "method" / f"{name}.yaml"))


_read = cache(OmegaConf.load)


def _plain(config: Any) -> dict[str, Any]:
    return {str(key): value for key, value in OmegaConf.to_container(config, resolve=True).items()}  # type: ignore


# Settings are checked and frozen


def load(
    overrides: Sequence[str] = (), composed: Callable[[Sequence[str]], DictConfig] = compose
) -> RunConfig:
    """The checked settings behind a command line."""
    return parse(composed(overrides), overrides)


@own_method.faults()
def parse(config: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """Check a composed configuration and freeze it.

    Args:
        config: what Hydra composed.
        overrides: the user's own. They tell a given `model.hub_id` from that of the chosen entry.

    Raises:
        UserError: a setting that is unknown, of a wrong type, out of range or contradicts another.
    """
    settings = _plain(config)
    settings.pop("grid", None)
    asks_status(settings.pop("status", False))
    for name, does in (("export", "runs nothing"), ("cluster", "says where a command runs")):
        if (value := settings.pop(name, None)) is not None:
            raise UserError(f"{name}={value}: {does}, so it is no setting of a run")
    given = set(map(setting_of, overrides))
    kind = (
        find(settings["kind"]) if "kind" in settings else Kind()
    )  # `build` says that it is missing
    repeats = settings.pop(
        "repeats", None
    )  # of the timed steps of a cell, or answers to each question
    timed, sampled = (
        _taken(settings, configs.LatencyConfig),
        _taken(settings, configs.SamplingConfig),
    )
    if repeats is not None:
        (timed if kind.table == "latency" else sampled)["repeats"] = repeats
    settings["latency"] = build(configs.LatencyConfig, timed)
    settings["sampling"] = build(configs.SamplingConfig, sampled)
    task = _taken(settings, configs.TaskConfig)
    if isinstance(task.get("metadata"), Mapping):
        task["metadata"] = {
            name: value for name, value in task["metadata"].items() if value is not None
        }
    settings["task"] = build(configs.TaskConfig, task)
    if kind.live:
        systems.apply(settings, given, method_file)
    machine = group(settings, "platform")
    if machine.get("kind") == "modelled":
        raise UserError(
            f"platform={machine['name']}: is modelled, nothing runs there; allowed here: cpu, cuda"
        )
    settings["platform"] = platform = build(configs.PlatformConfig, machine, "platform")
    if platform.weights_on_device < 1 and not kind.live:
        share = f"platform.weights_on_device={platform.weights_on_device}"
        raise UserError(
            f"{share}: experiment={settings.get('experiment')} decodes through no link; leave it out"
        )
    settings["model"] = _model(group(settings, "model"), platform.name, given)
    settings["data"] = data = build(configs.DataConfig, group(settings, "data"), "data")
    settings["corpus"] = build(configs.CorpusConfig, group(settings, "corpus"), "corpus")
    settings["calibration"] = build(
        configs.CalibrationConfig, group(settings, "calibration"), "calibration"
    )
    _take_random_ids(settings)
    settings["analysis"] = build(configs.AnalysisConfig, group(settings, "analysis"), "analysis")
    file = _take_method(settings, given)
    _take_codec(settings)
    _take_size(settings)
    if settings.get("tasks") is None:
        settings["tasks"] = GENERATED_TASKS if data.name == "offline" else PAPER_TASKS
    label = settings.get("label")
    settings |= {"label": "" if label is None else label, "label_given": bool(label)}
    checked = build(RunConfig, settings)
    _check_experiment(checked, kind, given)
    return checked if checked.label else replace(checked, label=_label(checked, kind, file))


def asks_status(given: object) -> bool:
    """True if a command only asks how far its runs are. Raises UserError unless `status` is true or
    false."""
    if not isinstance(given, bool):
        raise UserError(f"status={given}: must be true or false")
    return given


def chosen_model(config: DictConfig, overrides: Sequence[str]) -> configs.ModelConfig:
    """The model of a composed configuration, from the user's own source where the command line
    gives one."""
    return build(
        configs.ModelConfig,
        _with_source(_plain(config.model), set(map(setting_of, overrides))),
        "model",
    )


def _taken(settings: dict[str, Any], cls: Any) -> dict[str, Any]:
    """Remove the settings of a class, which stand at the top, from `settings`, and return them."""
    return {field.name: settings.pop(field.name) for field in fields(cls) if field.name in settings}


def _model(node: dict[str, Any], platform: Any, given: set[str]) -> configs.ModelConfig:
    """The model on the platform's device, in the precision that the user gave, else its entry's, or
    a CPU's."""
    model = build(configs.ModelConfig, _with_source(node, given), "model")
    if model.device == "map" and platform != "cuda":
        raise UserError(
            f"model.device=map: needs platform=cuda; allowed on {platform}: auto, {platform}"
        )
    if model.device not in ("auto", "map", platform):
        raise UserError(
            f"model.device={model.device}: contradicts platform={platform}; leave one of them out"
        )
    in_entry = "model.dtype" not in given
    device = platform if model.device == "auto" else model.device
    return replace(
        model, device=device, dtype=CPU_DTYPE if in_entry and platform == "cpu" else model.dtype
    )


def _with_source(model: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """A source that the user gave replaces the chosen entry's: the name follows it, the shape is
    dropped.

    A copy of the very file that the entry names is still the entry's model.
    """
    sources = [
        key for key in ("path", "hub_id") if f"model.{key}" in given and model.get(key) is not None
    ]
    if len(sources) == 2:
        raise UserError(
            f"model.path={model['path']} and model.hub_id={model['hub_id']}: give one of them"
        )
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


def _take_random_ids(settings: dict[str, Any]) -> None:
    """With random weights, put random token ids in the place of the texts. They need no
    tokenizer."""
    is_random = settings["model"].weights == "random"
    for name in ("corpus", "calibration"):
        text = settings[name]
        if is_random and text.path is not None:
            reads = "model.weights=random reads random token ids"
            raise UserError(
                f"{name}.path={text.path}: {reads}; leave it out, or model.weights=pretrained"
            )
        if not is_random and text.name == "random":
            raise UserError(f"{name}.name=random: needs model.weights=random; allowed: offline")
        settings[name] = replace(text, name="random") if is_random else text


def _take_method(settings: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Put the method, its name and the codec of a preset (`method=int4`) in their places.

    given: names of the settings on the command line. Returns the method's YAML; of a user's own,
    its title if any.
    """
    node = group(settings, "method")
    name, target = node.pop("name", None), str(node.get("_target_"))
    file: dict[str, Any] = {}
    if ":" in target and not given & {"method._target_", "method.name"}:
        del node["_target_"]
        if name in options("method"):
            raise UserError(f"method={target}: {name} is a method of conf/method; rename the file")
        cls, _ = own_method.find(target)  # another process may have composed it
        if not vars(cls).keys() & {
            "title",
            "label",
        }:  # not those of the class from which it derives
            file = {"title": name}
    else:
        if name not in options("method"):
            raise UserError(f"method.name={name}: {nearest(name, options('method'))}")
        file = method_file(name)
        for key in OF_THE_FILE:
            value, own = node.pop(key, None), file.get(key)
            if value != own:
                raise UserError(
                    f"method.{key}={value}: method={name} has {own}; choose another by method=NAME"
                )
        module, _, cls_name = str(file["_target_"]).rpartition(".")
        cls = getattr(importlib.import_module(module), cls_name)
    for key in OF_THE_CODEC:
        if key in file and settings.get(key) not in (None, file[key]):
            raise UserError(
                f"{key}={settings[key]} contradicts method={name}: leave it out, or method=full"
            )
    unused = ON_HOST if settings.get("placement", "host") != "host" else ()
    for key in (*OF_THE_CODEC, *DEFAULTS):
        if settings.get(key) is None:
            settings.pop(key, None)
            settings |= {key: file[key]} if key in file and key not in unused else {}
    settings |= {"method_name": name, "method": build(cls, node, "method")}
    return file


def _take_codec(settings: dict[str, Any]) -> None:
    """Make the codec of the user's own that `codec` names, of its `codec_settings`."""
    codec, given = settings.get("codec"), settings.pop("codec_settings", None) or {}
    if not isinstance(codec, str) or not own_method.is_own(codec):
        if given:
            raise UserError(
                f"codec_settings={given}: are those of a codec of your own; codec={codec} has none"
            )
        return
    cls, name = own_method.find_codec(codec)
    if name in get_args(configs.CodecName):
        raise UserError(f"codec={codec}: {name} is a codec of this project; rename the file")
    settings |= {"codec": name, "own_codec": build(cls, given, "codec_settings")}


def _take_size(settings: dict[str, Any]) -> None:
    """Read `size`: a share of the full cache such as 0.16 or 16%, or the nearest possible one,
    `nearest:0.16`.

    The full cache has no size to set and runs as it is, so that a sweep may name it. Under
    `nearest` so does every method without a size, such as a codec's preset.
    """
    given = settings.get("size")
    if given is None:
        return
    sizing, share = "exact", given
    if isinstance(given, str):
        rule, _, words = given.rpartition(":")
        share = _share_in(words)
        if share is None or rule not in ("", "nearest"):
            raise UserError(
                f"size={given}: must be a share of the full cache such as 0.16 or 16%, or nearest:0.16"
            )
        sizing = rule or sizing
    if (
        isinstance(share, int | float) and not 0 < share <= 1
    ):  # of the full cache, too, which has no size
        raise UserError(f"size={share}: must be above 0 and at most 1")
    method = settings["method"]
    is_full_cache = method.reads_all and settings.get("codec") is None
    if is_full_cache:
        share, sizing = None, "exact"  # the same run at every size
    elif sizing == "nearest" and not _has_size(method):
        share = None
    settings |= {"size": share, "sizing": sizing}


def _share_in(words: str) -> float | None:
    """The number in `0.16` or `16%`; None where there is none."""
    is_percent = words.endswith("%")
    try:
        number = float(words.removesuffix("%"))
    except ValueError:
        return None
    return number / 100 if is_percent else number


def _has_size(method: Method) -> bool:
    """Whether a method can be set to a size."""
    try:
        method.with_size(1.0)
    except ValueError:
        return False
    return True


def _check_experiment(config: RunConfig, kind: Kind, given: set[str]) -> None:
    """Raise UserError for settings that contradict one another, or make no sense in this
    experiment."""
    if config.size is not None:
        sized = config.method.with_size(config.size)
        for each in fields(config.method):
            value = getattr(config.method, each.name)
            if (
                f"method.{each.name}" in given
                and value is not None
                and getattr(sized, each.name) != value
            ):
                raise UserError(
                    f"method.{each.name}={value}: size={config.size:g} sets it; leave one of them out"
                )
    usual_kind = kind_of(config.experiment)
    if usual_kind is not None and find(usual_kind).table != kind.table:
        others = [name for name in options("experiment") if kind_of(name) == config.kind]
        raise UserError(
            f"kind={config.kind}: its rows are none of experiment={config.experiment}'s table; "
            f"choose an experiment of that kind: {', '.join(others) or 'none here is'}"
        )
    systems.check_hot_rows(config.method, config.device_rows, config.prefetch)
    measurement_of(config.kind).check(config)
    if config.tracker != "none" and not kind.keeps_record:
        raise UserError(
            f"tracker={config.tracker}: experiment={config.experiment} keeps no record to send"
        )


def _label(config: RunConfig, kind: Kind, file: Mapping[str, Any]) -> str:
    """The name of a run that the user gave none: its system, or its method and codec."""
    own_codec = (
        codec_words(**{name: file[name] for name in CODEC_WORDS if name in file})
        if "codec" in file
        else None
    )
    if kind.live:
        behind_preset = str(file["_target_"]).split(".")[1] if own_codec else config.method_name
        return systems.name_of(behind_preset, config, is_own="_target_" not in file)
    title = file.get("title") or config.method.label
    if not isinstance(title, str) or not title.isprintable():
        raise UserError(
            f"method={config.method_name}: its label is {title!r}; must be text in one line"
        )
    parts = [title, None if config.codec_name == own_codec else config.codec_name]
    if config.device_rows != file.get("device_rows", 0):
        parts.append(f"{config.device_rows:g}x rows on the device")
    return " + ".join(filter(None, parts))

"""From settings to a run: Hydra composes `conf/`, the given values go in, and all is checked.

config = load(["method=h2o", "method.heavy_frac=0.05", "experiment=tasks"])
config = load({"method": "h2o", "method.heavy_frac": 0.05, "experiment": "tasks"})

`parse` fills in what follows from other settings, has pydantic check the rest, and asks the rules.
The only heavy module that it imports is the chosen method's, so that a wrong setting is refused
before a model library loads.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from harness.errors import UserError, nearest, one_line
from harness.run.words import Values, source_of_model, values_of
from harness.settings import kinds, schema, systems
from harness.settings.codecs import CODEC_WORDS, codec_names, codec_words
from harness.settings.config import (
    CPU_DTYPE,
    GENERATED_TASKS,
    GROUPS,
    PAPER_TASKS,
    RUNNING,
    ModelConfig,
    RunConfig,
    prompt_of_window,
)
from harness.settings.schema import AT_TOP, FULL, build, formats, is_own, options

if TYPE_CHECKING:
    from methods.base import Method

OF_FILES = ("model", "data", "corpus", "platform", "experiment", "system")
"""Settings that choose a file of `conf/`. `method` names one too, or a file of the user's, which
`parse` reads."""
OF_CLASSES = ("method", "codec_settings")
"""Groups whose settings are the fields of the chosen class."""


def choices(group: str, *without: str) -> list[str]:
    """`${choices:method,full}` in a sweep: the choices of a group but those named."""
    return [name for name in options(group) if name not in without]


OmegaConf.register_new_resolver("choices", choices, replace=True)


def load(given: Iterable[str] | Values = ()) -> RunConfig:
    """The checked settings of one run. given: words of a command line, or values by name. Raises
    UserError for what is wrong."""
    values = values_of(given) | {"sweep": None}
    return parse(resolved(compose(values)), values)


def compose(given: Iterable[str] | Values = ()) -> DictConfig:
    """`conf/` with the given choices and values. Raises UserError for an unknown choice or setting;
    no value is looked at."""
    values = values_of(given)
    chosen = []
    for name in OF_FILES:
        if name in values:
            _require_choice(name, values[name])
            if values[name] is not None:
                chosen.append(f"{name}={values[name]}")
    has_sweep = values.get("sweep", {}) is not None
    config = pickle.loads(_composed(schema.CONF_DIR, tuple(chosen), has_sweep))
    for name, value in values.items():
        if name == "method":
            _require_choice(name, value)
            name = "method.name"
        if name not in OF_FILES:
            of_task = value if name == "metadata" and isinstance(value, Mapping) else ()
            for setting in (name, *(f"{name}.{key}" for key in of_task)):
                _require_known(config, setting)
            OmegaConf.update(config, name.lstrip("+"), _literal(value), force_add=True)
    return config


@cache
def _composed(conf: Path, chosen: tuple[str, ...], has_sweep: bool) -> bytes:
    """What Hydra composes of a choice of files, once a process; pickled, which is copied seven
    times as fast. Without its sweep a run is composed in half the time."""
    with hydra.initialize_config_dir(str(conf), version_base="1.3"):
        config = hydra.compose("config", list(chosen))
    OmegaConf.set_struct(config, False)
    if not has_sweep:
        config.sweep = None
    return pickle.dumps(config)


def resolved(config: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain values."""
    try:
        return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]
    except InterpolationKeyError as error:  # as of sweep.part=fig41
        _require_known(config, str(error).split("'")[1])
        raise
    except OmegaConfBaseException as error:
        cause = error.__context__ if isinstance(error.__context__, UserError) else error
        raise UserError(one_line(cause)) from error


PARTS = {
    **{name: f"speedup sweep.part={name}" for name in ("fig14", "fig15", "fig16a", "fig18")},
    "fig16b": "speedup sweep.scale=paper 'sweep.shapes=[[4,1920]]' model=NAME",
    "confirm": "board sweep.part=confirm",
    "trust": "contract thorough=true",
}
"""Words that the paper and these documents have for a part of an experiment, and what to type."""


def _require_choice(name: str, choice: Any) -> None:
    """Raise UserError for a choice that is none of a group; a method may be the user's own."""
    if name == "system" and choice is None:
        return
    if not isinstance(choice, str):
        raise UserError(f"{name}={choice}: must be one name; {nearest('', options(name))}")
    if choice in options(name) or name == "method" and is_own(choice):
        return
    if name == "model" and "/" in choice:
        source = source_of_model(choice)
        missing = "" if source else ", and there is no such folder or file"
        instead = "=".join(source or ("model.path", "DIR"))
        raise UserError(f"model={choice}: chooses a file of conf/model{missing}; type {instead}")
    if name == "experiment" and choice in PARTS:
        raise UserError(f"experiment={choice}: type experiment={PARTS[choice]}")
    raise UserError(f"{name}={choice}: {nearest(choice, options(name))}")


def _require_known(config: DictConfig, name: str) -> None:
    """Raise UserError for a setting that the composed files do not have, unless a `+` before it
    says that it is new. Names of a class's fields are checked with their values."""
    group, *_ = name.lstrip("+").split(".")
    if name.startswith("+") or group in OF_CLASSES:
        return
    node: Any = OmegaConf.to_container(config)
    in_groups = []
    for group_name, settings in node.items():
        if isinstance(settings, dict) and name in settings:
            in_groups.append(f"{group_name}.{name}")
    for part in name.split("."):
        if not isinstance(node, dict) or part not in node:
            known = [*in_groups, *map(str, node)] if isinstance(node, dict) else []
            raise UserError(f"unknown setting {name}: {nearest(part, known)}")
        node = node[part]


def _literal(value: Any) -> Any:
    """A value whose texts OmegaConf takes as they are: `${` in them is no other setting."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", value)
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _literal(item) for name, item in value.items()}
    return value


# From plain values to frozen settings

OF_THE_CODEC = ("codec", "value_codec", "codec_layers", "rotation", "key_groups")
"""Keys of a method's file for which no other value may be given."""
OF_ROWS = (*OF_THE_CODEC, "group_size", "residual", "gpu_cache")
"""Settings of how rows are stored, which a method's file may have."""
OF_THE_FILE = ("_target_", "title", *OF_ROWS)
"""Keys of a method's file that are no fields of its class."""
NO_SETTINGS = ("sweep", "codec_settings", "budget", "method")
"""What stands in `conf/config.yaml` and is no plain setting of `RunConfig`."""


def parse(composed: Mapping[str, Any], given: Collection[str] = ()) -> RunConfig:
    """Check composed settings and freeze them.

    Args:
        composed: what Hydra composed, as plain values; `sweep` is not looked at.
        given: names of the settings that the user gave. They tell a given `model.hub_id` from that
        of the chosen entry.

    Raises:
        UserError: a setting that is unknown, of a wrong type, out of range or contradicts another.
    """
    if "kind" not in composed:
        made_of = "its runs are of other experiments; it is none by itself"
        name = given["experiment"] if isinstance(given, Mapping) else "null"
        raise UserError(f"experiment={name}: {made_of}")
    kind = kinds.find(composed["kind"])
    settings = {name: value for name, value in composed.items() if name not in NO_SETTINGS}
    settings |= _grouped(settings, composed["kind"])
    settings["platform"] = _platform(settings["platform"])
    settings["model"] = _model(settings["model"], settings["platform"], given)
    if settings["model"]["weights"] == "random":  # whose texts are random token ids
        for name in ("corpus", "calibration"):
            settings[name] = {**settings[name], "name": "random"}
    method_name, method, file = _method(composed["method"])
    rows = _rows(settings, method_name, file)
    codec, own_codec = _own_codec(rows.get("codec"), composed.get("codec_settings") or {})
    settings = {name: value for name, value in settings.items() if name not in OF_ROWS} | rows
    if own_codec is not None:
        settings["codec"] = codec
    settings |= _budget(composed.get("budget"), method, codec)
    if settings["tasks"] is None:
        is_offline = settings["data"].get("name") == "offline"
        settings["tasks"] = GENERATED_TASKS if is_offline else PAPER_TASKS
    if settings["prefill_len"] is None:
        seq_len = settings["seq_len"]
        # Pydantic refuses what is no number.
        settings["prefill_len"] = prompt_of_window(seq_len) if isinstance(seq_len, int) else 0
    label = settings["label"]
    settings |= {
        "label": "" if label is None else label,
        "label_given": bool(label),
        "method_name": method_name,
        "method": None,
        "own_codec": None,
    }
    checked = build(RunConfig, settings)
    config = replace(checked, method=method, own_codec=own_codec)
    kinds.check(config, given)
    made_label = _label(config, file)
    if kind.live and config.label in systems.LABELS and config.label != made_label:
        chosen = f"a system is chosen by system=NAME, and this run is {made_label}"
        raise UserError(f"label={config.label}: names a system; {chosen}")
    if method_name == FULL and made_label not in systems.LABELS:
        for name, of_format in formats().items():  # with its codec, a run has its name
            if codec_words(**_codec_of(of_format)) == config.codec_name:
                config = replace(config, method_name=name)
                made_label = _label(config, of_format)
                break
    return config if config.label else replace(config, label=made_label)


def _codec_of(file: Mapping[str, Any]) -> dict[str, Any]:
    """What a method's file says of its codec, as `codec_words` takes it."""
    return {"codec": None} | {name: file[name] for name in CODEC_WORDS if name in file}


def chosen_model(composed: Mapping[str, Any], given: Collection[str]) -> ModelConfig:
    """The model of composed settings, from the user's own source where one is given."""
    return build(ModelConfig, _with_source(composed["model"], given), "model")


def _grouped(settings: dict[str, Any], kind: str) -> dict[str, Any]:
    """The settings of `AT_TOP` in their groups, taken out of `settings`.

    `repeats` is of the timed steps of a run, or answers to each question.
    """
    repeats, times_steps = settings.pop("repeats"), kind == "latency"
    largest = times_steps and settings["batch_size"] == "largest"
    if largest:
        settings["batch_size"] = 1  # where the search begins
    groups = {}
    for group in AT_TOP:
        names = [field.name for field in fields(GROUPS[group]) if field.name in settings]
        groups[group] = {name: settings.pop(name) for name in names}
    groups["latency"]["largest"] = largest
    if repeats is not None:
        groups["latency" if times_steps else "sampling"]["repeats"] = repeats
    metadata = groups["task"]["metadata"]
    if isinstance(metadata, Mapping):
        said = {name: value for name, value in metadata.items() if value is not None}
        groups["task"]["metadata"] = said
    return groups


def _platform(node: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a platform; a modelled one is its sheet."""
    if node.get("kind") != "modelled":
        return dict(node)
    # What a system says of its transfers holds there too.
    own = {name: node[name] for name in ("overlap", "pinned") if name in node}
    sheet = {name: value for name, value in node.items() if name not in own}
    return {"name": node["name"], "sheet": sheet, **own}


def _model(
    node: Mapping[str, Any], platform: Mapping[str, Any], given: Collection[str]
) -> dict[str, Any]:
    """The model on the platform's device, in the precision that the user gave, else its entry's, or
    a CPU's. Of a modelled machine the model's shape alone is looked at."""
    model = _with_source(node, given)
    runs_on = platform.get("name") if platform.get("name") in RUNNING else "cpu"
    if model["device"] == "auto":
        model["device"] = runs_on
    if platform.get("name") == "cpu" and "model.dtype" not in given:
        model["dtype"] = CPU_DTYPE
    return model


def _with_source(node: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """A source that the user gave replaces the chosen entry's: the name follows it, the shape is
    dropped.

    A copy of the very file that the entry names is still the entry's model.
    """
    model = dict(node)
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


def _method(node: Any) -> tuple[str, Method, dict[str, Any]]:
    """The name and the method that `method.name` names, made of the other settings of the group,
    and what its file in `conf/method` says; of a user's own method, its title if any."""
    if not isinstance(node, Mapping):
        raise UserError(f"method={node}: {nearest(node, options('method'))}")
    given = {name: value for name, value in node.items() if name != "name"}
    cls, name, file = schema.chosen(str(node.get("name")))
    changes = {key: value for key, value in file.items() if key not in ("name", *OF_THE_FILE)}
    return name, build(cls, changes | given, "method"), file


def _rows(settings: Mapping[str, Any], method: str, file: Mapping[str, Any]) -> dict[str, Any]:
    """How rows are stored: as given, else as the method's file says. What neither says has the
    default of `RunConfig`."""
    found: dict[str, Any] = {}
    on_host = settings["placement"] == "host"
    for key in OF_ROWS:
        value = settings[key]
        in_file = key in file
        if key in OF_THE_CODEC and in_file and value not in (None, file[key]):
            contradicts = f"contradicts method={method}: leave it out, or method=full"
            raise UserError(f"{key}={value} {contradicts}")
        if value is not None:
            found[key] = value
        elif in_file and (on_host or key != "gpu_cache"):
            found[key] = file[key]
    return found


def _own_codec(codec: Any, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """The name of a codec in tables, and one of the user's own itself, made of its settings."""
    if not isinstance(codec, str) or not is_own(codec):
        if given:
            has_none = f"are those of a codec of your own; codec={codec} has none"
            raise UserError(f"codec_settings={given}: {has_none}")
        return codec, None
    cls, name = schema.chosen_codec(codec)
    if name in codec_names():
        raise UserError(f"codec={codec}: {name} is a codec of this project; rename the file")
    return name, build(cls, given, "codec_settings")


def _budget(given: Any, method: Method, codec: Any) -> dict[str, Any]:
    """`budget` and `budget_rule` of what the user gave: a share of the full cache such as 0.16 or
    16%, or the nearest possible one, `nearest:0.16`. Empty where nothing is given.

    The full cache has no budget to set and runs as it is, so that a sweep may name it. Under
    `nearest` so does every method without a budget, such as a codec's preset.
    """
    if given is None:
        return {}
    rule, _, words = str(given).rpartition(":")
    try:
        share = float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1 or rule not in ("", "nearest"):
        allowed = "a share of the full cache such as 0.16 or 16%, or nearest:0.16"
        raise UserError(f"budget={given}: must be {allowed}")
    if method.reads_all and codec is None:
        return {}  # the full cache: the same run at every budget
    if rule == "nearest":
        try:
            method.with_budget(1.0)
        except ValueError:
            return {"budget_rule": rule}
    return {"budget": share, "budget_rule": rule or "exact"}


def _label(config: RunConfig, file: Mapping[str, Any]) -> str:
    """The name of a run that the user gave none: its system, or its method and codec. file: of the
    method."""
    codec_of_file = codec_words(**_codec_of(file))
    if kinds.find(config.kind).live:
        method = FULL if codec_of_file else config.method_name
        return systems.name_of(method, config, is_own="_target_" not in file)
    parts: list[str | None] = [file.get("title") or config.method.title]
    if config.codec_name != codec_of_file:
        parts.append(config.codec_name)
    if config.gpu_cache != file.get("gpu_cache", 0):
        parts.append(f"{config.gpu_cache:g}x GPU cache")
    return " + ".join(filter(None, parts))

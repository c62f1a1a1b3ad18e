"""From settings to a run: Hydra composes `conf/`, the given values go in, `parse` checks.

config = load(["method=h2o", "method.heavy_frac=0.05", "experiment=tasks"])
config = load({"method": "h2o", "method.heavy_frac": 0.05, "experiment": "tasks"})
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from yaml import YAMLError

from harness.errors import UserError, nearest, one_line
from harness.run.parse import parse
from harness.run.words import Values, meant, source_of_model, values_of
from harness.settings import schema
from harness.settings.config import RunConfig
from harness.settings.own_method import is_own
from harness.settings.schema import options

GROUPS = ("model", "data", "corpus", "platform", "experiment", "system")
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
    own = _own_experiment(values.get("experiment"))
    chosen = [] if own is None else ["~experiment"]
    for name in GROUPS:
        if name in values and (own is None or name != "experiment"):
            _require_choice(name, values[name])
            if values[name] is not None:
                chosen.append(f"{name}={values[name]}")
    has_sweep = values.get("sweep", {}) is not None
    config = pickle.loads(_composed(schema.CONF_DIR, tuple(chosen), has_sweep))
    if own is not None:
        system = values.get("system")  # wins over an experiment, as among the files of `conf/`
        over = [] if system is None else [schema.conf_file("system", system)]
        config = OmegaConf.merge(config, own, *over)
    for name, value in values.items():
        if name == "method":
            _require_choice(name, value)
            name = "method.name"
        if name not in GROUPS:
            of_task = value if name == "metadata" and isinstance(value, Mapping) else ()
            for setting in (name, *(f"{name}.{key}" for key in of_task)):
                _require_known(config, setting)
            OmegaConf.update(config, name.lstrip("+"), _literal(value), force_add=True)
    return config


@cache
def _composed(conf: Path, chosen: tuple[str, ...], has_sweep: bool) -> bytes:
    """What Hydra composes of a choice of files, once a process; pickled, which is copied seven
    times as fast. Without its sweep, which may be most of it."""
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


def _own_experiment(choice: Any) -> DictConfig | None:
    """The settings in the file that `experiment=DIR/mine.yaml` names; None for one of `conf/`."""
    if not isinstance(choice, str) or not choice.endswith(".yaml"):
        return None
    file = Path(choice).expanduser()
    if not file.is_file():
        near = nearest(choice, options("experiment"))
        raise UserError(f"experiment={choice}: there is no file {choice}; {near}")
    try:
        own = OmegaConf.load(file)
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"experiment={file}: cannot be read ({one_line(error)})") from error
    if not isinstance(own, DictConfig):
        raise UserError(f"experiment={file}: must be settings, such as kind: perplexity")
    return own


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
    for part in name.split("."):
        if not isinstance(node, dict) or part not in node:
            known = list(map(str, node)) if isinstance(node, dict) else []
            hint = meant(name)
            instead = f"type {hint}" if hint else nearest(part, known)
            raise UserError(f"unknown setting {name}: {instead}")
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

"""From the words of a command line to settings: Hydra composes `conf/`, `parse` checks and freezes.

config = load(["method=h2o", "method.heavy_frac=0.05", "experiment=tasks"])
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import cache
from numbers import Number
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.errors import UserError, printable
from harness.run.parse import method_file, parse
from harness.settings import own_method, schema
from harness.settings.config import RunConfig
from harness.settings.explain import method_help, run_help
from harness.settings.paths import PROGRAM
from harness.settings.schema import is_group, literal, options, path_text


def choices(group: str, *without: str) -> list[str]:
    """`${choices:method,full}` in a sweep: the choices of a group but those named."""
    return [name for name in options(group) if name not in without]


OmegaConf.register_new_resolver("choices", choices, replace=True)
OmegaConf.register_new_resolver("method_help", method_help, replace=True)
OmegaConf.register_new_resolver("run_help", lambda *, _root_: run_help(_root_), replace=True)
OmegaConf.register_new_resolver("program", lambda: PROGRAM, replace=True)
OmegaConf.register_new_resolver(
    "results_dir", lambda given: path_text(given, "results_dir"), replace=True
)


@cache
def read_override(text: str) -> Override:
    """A word of a command line, as Hydra reads it. Raises HydraException where it cannot."""
    return OverridesParser.create().parse_override(text)


def override(name: str, value: Any) -> str:
    """`name=value` as Hydra reads it on a command line. Text is text: `${` in it is no other
    setting. Raises UserError for a value that no setting can have."""
    return as_sweep(name, [value])


def as_sweep(name: str, values: Sequence[Any]) -> str:
    """`name=value,value` as `override` writes one."""
    try:
        word = f"{name}={','.join(map(_as_word, values))}"
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
        return QuotedString(literal(str(value)), Quote.single).with_quotes()
    if isinstance(value, Number) and not isinstance(value, complex):
        return str(value)
    raise TypeError(f"is of type {type(value).__name__}")


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose `conf/config.yaml` with Hydra's override syntax. Checks no more than Hydra does."""
    if GlobalHydra.instance().is_initialized():  # inside hydra.main
        return hydra.compose("config", list(overrides))
    with hydra.initialize_config_dir(str(schema.CONF_DIR), version_base="1.3"):
        return hydra.compose("config", list(overrides))


def composed(overrides: Sequence[str] = ()) -> DictConfig:
    """The same as `compose(overrides)`, for the runs of a sweep and the calls of Python many times
    as fast.

    Hydra composes each choice of files once a process, without the method's, and again where a
    file has changed. The method's file and the values then go into a copy. Whatever is not that
    plain, such as an experiment with settings of a method, or is refused, Hydra composes itself.
    """
    try:
        given = [read_override(word) for word in overrides]
        if all(map(_is_plain, given)):
            return _composed_plain(given)
    except (HydraException, OmegaConfBaseException, OSError):
        pass  # `compose` refuses it in Hydra's words
    return compose(overrides)


# Some without their sweep, which may be most of them; pickled, as deepcopy is seven times slower.
_Key = tuple[Path, int, tuple[str, ...], bool]
_bases: dict[_Key, bytes] = {}
_sets_method: dict[_Key, bool] = {}
"""Whether the chosen files set something of the method, whichever it is."""


def _composed_plain(given: Sequence[Override]) -> DictConfig:
    files: dict[str, Override] = {}
    values: list[Override] = []
    for override in given:
        if is_group(override.key_or_group):
            files[override.key_or_group] = override
        else:
            values.append(override)
    method = files.pop("method", None)
    chosen = tuple(str(override.input_line) for override in files.values())
    has_sweep = not any(value.input_line == "sweep=null" for value in values)
    last_change = max(file.stat().st_mtime_ns for file in schema.CONF_DIR.rglob("*.yaml"))
    key = (schema.CONF_DIR, last_change, chosen, has_sweep)
    if key not in _bases:
        base = compose(chosen)
        if not has_sweep:
            base.sweep = None
        _bases[key] = pickle.dumps(base)
    config = pickle.loads(_bases[key])
    if method is not None:
        if key not in _sets_method:
            _sets_method[key] = _differs_from_file(config, chosen)
        if _sets_method[key]:
            return compose([str(override.input_line) for override in given])
        config.method = method_file(method.value())
    for override in values:
        OmegaConf.update(config, override.key_or_group, override.value())
    return config


def _differs_from_file(base: DictConfig, chosen: Sequence[str]) -> bool:
    """Whether what was composed has other settings of a method than the method's own file. It is
    asked of two methods, as a setting may be as in the file of one."""
    other = next(name for name in options("method") if name != base.method.name)
    methods = [base.method, compose([*chosen, f"method={other}"]).method]
    return any(method != method_file(method.name) for method in methods)


def _is_plain(given: Override) -> bool:
    """True if it chooses one file of `conf/` or sets one value, not of Hydra's own settings."""
    name = given.key_or_group
    if name.startswith(("hydra.", "hydra/")) or given.is_sweep_override():
        return False
    if name == "method" and own_method.is_own(str(given.value())):
        return False
    return given.type == OverrideType.CHANGE and given.package is None


def load(overrides: Sequence[str] = ()) -> RunConfig:
    """The checked settings behind a command line."""
    return parse(composed(overrides), overrides)

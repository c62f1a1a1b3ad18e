"""A method of the user's own: a class in a file, or in a package, outside this project.

    python run.py method=./my_method.py method.kept_frac=0.3
    python run.py method=my_package.my_module.MyMethod

Its settings are the fields of its dataclass. Its name is the file's; where the class is named, `file.Class` or the
dotted path. Hydra asks `OwnMethods` for what `conf/method` does not have, so such a choice goes wherever the name of a
shipped method goes: sweeps, grids, `--cfg job`. The file is run only where it is named. Hydra asks for
`grid=DIR/my_grid.yaml` in the same way.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import UnsupportedValueType

from harness.errors import UserError, nearest

GROUP, GRIDS = "method/", "grid/"
SUFFIX = ".py"


@dataclass(frozen=True)
class OwnMethod:
    """name: what records and tables call it. target: the file or module and the class, `/path/file.py:Class`."""

    name: str
    target: str
    cls: type

    def node(self) -> dict[str, Any]:
        """What its file in `conf/method` would say, had it one."""
        return {"_target_": self.target, "name": self.name, **_defaults(self.cls)}


def is_target(target: object) -> bool:
    """Whether a `_target_` is that of a user's own method."""
    return ":" in str(target)


def is_own(choice: str) -> bool:
    """Whether `method=<choice>` names a file or module of the user's, not one in `conf/method`."""
    return any(mark in choice for mark in "./:")


def find(choice: str) -> OwnMethod:
    """The method that `method=<choice>` names, its file run.

    Raises:
        UserError: no such file, or what is wrong with it, by line; no method in it, or several; half a method.
    """
    where, _, name = choice.partition(":")
    is_file = where.endswith(SUFFIX)
    if not is_file and not name:
        where, _, name = where.rpartition(".")
    module = _run_file(Path(where).expanduser(), choice) if is_file else _import(where, choice)
    cls = _class(module, name, choice)
    _check(cls, choice)
    source = str(Path(str(module.__file__)).resolve()) if is_file else where
    return OwnMethod(f"{module.__name__}.{name}" if name else module.__name__, f"{source}:{cls.__name__}", cls)


def _run_file(path: Path, choice: str) -> ModuleType:
    """Run a file as a module of its own name, so that what lies beside it can be imported, here and in a child."""
    if not path.is_file():
        raise UserError(f"method={choice}: there is no file {path}")
    if not path.stem.isidentifier():
        raise UserError(f"method={choice}: the file's name must be a Python name, as my_method.py is")
    module = _import(path.stem, choice, path.resolve().parent)
    found = getattr(module, "__file__", None)  # none in what is built into Python
    if found is None or not path.samefile(found):
        taken = found or "Python itself"
        raise UserError(f"method={choice}: {path.stem} is a module of {taken} already; rename the file")
    return module


def _import(name: str, choice: str, folder: Path | None = None) -> ModuleType:
    """Import module `name`, of `folder` or the current one where it is found nowhere else."""
    where = str(folder or Path.cwd())
    if where not in sys.path:
        sys.path.append(where)  # last: nothing of the user's takes the place of a library
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserError(f"method={choice}: {_line_of(error, where)}{type(error).__name__}: {_said(error)}") from error


def _line_of(error: BaseException, folder: str) -> str:
    """`file:line: ` where code of that folder went wrong; nothing where it was not found."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: "
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is our own
    theirs = [frame for frame in frames if Path(frame.filename).is_relative_to(folder)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}: " if theirs else ""


def _said(error: BaseException) -> str:
    return str(error.msg if isinstance(error, SyntaxError) else error)


def _class(module: ModuleType, name: str, choice: str) -> type:
    """The class called `name`, or the only method that the module defines."""
    from methods.base import Method  # with torch, which a wrong path need not wait for

    every = [each for each in vars(module).values() if inspect.isclass(each) and issubclass(each, Method)]
    own = {each.__name__: each for each in every if each.__module__ == module.__name__}
    if name and name not in own:
        allowed = nearest(name, own) if own else f"{module.__file__} defines no method"
        raise UserError(f"method={choice}: {allowed}")
    if not own:
        raise UserError(f"method={choice}: no class in it derives from methods.base.Method, directly or not")
    if not name and len(own) > 1:
        raise UserError(f"method={choice}: defines {', '.join(own)}; choose one, as method={choice}:{next(iter(own))}")
    return own[name] if name else next(iter(own.values()))


def _check(cls: type, choice: str) -> None:
    """Raise UserError for a class that says too little to be run."""
    from methods.base import Method

    if "__dataclass_fields__" not in vars(cls):
        raise UserError(f"method={choice}: {cls.__name__} must be a @dataclass(frozen=True), its fields the settings")
    for each in fields(cls):
        if each.default is MISSING and each.default_factory is MISSING:
            raise UserError(f"method={choice}: {cls.__name__}.{each.name} needs a default")
    if cls.reads_all:  # type: ignore[attr-defined]
        return
    lacks = ["state"] * (not hasattr(cls, "state") and cls.new_state is Method.new_state)  # type: ignore[attr-defined]
    lacks += ["tokens_read"] * (cls.tokens_read is Method.tokens_read)  # type: ignore[attr-defined]
    if lacks:
        raise UserError(f"method={choice}: {cls.__name__} lacks {lacks[0]}; methods/base.py says what it is")


def _defaults(cls: type) -> dict[str, Any]:
    """The settings of a method as YAML holds them."""
    values = {}
    for each in fields(cls):
        value = each.default if each.default_factory is MISSING else each.default_factory()
        values[each.name] = list(value) if isinstance(value, tuple) else value
    return values


def _grid_file(config_path: str) -> Path:
    return Path(config_path.removeprefix(GRIDS)).expanduser()


class OwnMethods(ConfigSource):
    """To Hydra, a folder of configurations that has a file for every method and grid of the user's."""

    @staticmethod
    def scheme() -> str:
        return "own-method"

    def load_config(self, config_path: str) -> ConfigResult:
        if config_path.startswith(GRIDS):
            config = OmegaConf.load(_grid_file(config_path))
            return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header={"package": None})
        choice = config_path.removeprefix(GROUP)
        method = find(choice)
        try:
            node = OmegaConf.create(method.node())
        except UnsupportedValueType as error:
            raise UserError(f"method={choice}: a setting's default is no number, text or list: {error}") from error
        return ConfigResult(provider=self.provider, path=self.full_path(), config=node, header={"package": None})

    def is_config(self, config_path: str) -> bool:
        if config_path.startswith(GRIDS):
            return _grid_file(config_path).suffix == ".yaml" and _grid_file(config_path).is_file()
        choice = config_path.removeprefix(GROUP)
        return choice != config_path and is_own(choice)

    def is_group(self, config_path: str) -> bool:
        return False

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class OwnMethodsPath(SearchPathPlugin):
    """Has Hydra ask `OwnMethods` after `conf/`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("harness", f"{OwnMethods.scheme()}://")


for plugin in (OwnMethods, OwnMethodsPath):
    Plugins.instance().register(plugin)

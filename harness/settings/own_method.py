"""The settings of every method that `method=NAME` can name.

A shipped one is a file of `conf/method`, which holds what it changes of its class's defaults. Any
other is a class in a file or a package of the user's, or a press of kvpress; so is a codec.

    python run.py method=./my_method.py method.budget=0.3
    python run.py method=my_package.my_module.MyMethod
    python run.py codec=./my_codec.py +codec_settings.levels=5
    python run.py method=kvpress:SnapKVPress method.window_size=32

The settings are the fields of the dataclass. The name of an own method is the file's; if the class
is named, `file.Class` or the dotted path. Hydra asks `MethodSource` for every `method=NAME`, so
each choice goes everywhere: sweeps, `--cfg job`. A file of the user's is run only if it is
named. Hydra asks for `experiment=DIR/mine.yaml` in the same way. A codec is no group of Hydra's:
`harness.run.parse` asks `find_codec`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import UnsupportedValueType

from harness.errors import UserError, line_in, nearest, reason
from harness.settings.paths import CONF_DIR
from harness.settings.schema import as_typed, literal, options

GROUP, EXPERIMENTS = "method/", "experiment/"
PRESS = "kvpress:"
"""Before the name of a press of kvpress (`methods.kvpress`)."""
FILE = re.compile(r"(?P<path>.*\.py)(:(?P<name>\w+))?", re.DOTALL)
"""A file, perhaps with a class: `./FILE.py:Class`. A folder's name may hold a colon too."""
_IMPORTED: dict[Path, str] = {}
"""The folder of each file of the user's own that this process has imported, with the choice that
named it."""


def is_own(choice: str) -> bool:
    """True if `method=<choice>` or `codec=<choice>` names a file or module of the user's, not one
    of this project."""
    return any(mark in choice for mark in "./:")


@cache
def shipped(name: str) -> tuple[type, dict[str, Any]]:
    """The class of a method of `conf/method` and its whole settings: the defaults of the class, and
    what its file changes. Raises OSError if there is no such file."""
    file = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "method" / f"{name}.yaml"))
    assert isinstance(file, dict), "a mapping, as tests check"
    changes = {str(key): value for key, value in file.items()}
    module, _, cls_name = str(changes["_target_"]).rpartition(".")
    cls = getattr(importlib.import_module(module), cls_name)
    return cls, _defaults(cls, f"method={name}") | changes


def find(choice: str) -> tuple[type, dict[str, Any]]:
    """The class that `method=<choice>` names, its file run, and the settings that its YAML in
    `conf/method` would have.

    Their `_target_` is `/path/file.py:Class`, `package.module:Class` or `kvpress:Press`. Raises
    UserError if there is no such file or press, for an error in a file, with its line, and unless
    it holds one whole method.
    """
    # Loads torch, which a wrong path need not wait for.
    from methods.base import Method, State, When

    setting = f"method={choice}"
    if choice.startswith(PRESS):
        press = _press(choice.removeprefix(PRESS), setting)
        return press, {"_target_": choice, "name": choice} | _defaults(press, setting)
    module, where, name = _module(choice, setting)
    cls = _class(module, name, Method, setting)
    _require_text(cls, "title", setting)
    _require_extras(cls, setting)
    file = _constant(cls, "file", None) if hasattr(cls, "file") else None
    if file is not None and not isinstance(file, str):
        raise UserError(f"{setting}: {cls.__name__}.file={file!r}: must be a path or None")
    names = [field.name for field in fields(cls)]
    for needed in getattr(cls, "calibration_settings", ()):
        if needed not in names:
            listed = f"{cls.__name__}.calibration_settings={needed!r}"
            raise UserError(f"{setting}: {listed}: {nearest(needed, names)}")
    when = _constant(cls, "when", "kept")
    if when not in get_args(When):
        raise UserError(f"{setting}: {cls.__name__}.when={when!r}: {nearest(when, get_args(When))}")
    has_state = hasattr(cls, "state")
    has_budget = has_state and (cls.state is None or cls.tokens_read is not Method.tokens_read)
    if not has_budget:
        lacks = "tokens_read" if has_state else "state"
        raise UserError(f"{setting}: {cls.__name__} lacks {lacks}; methods/base.py says what it is")
    state = _constant(cls, "state", State)
    if state is not None and not (inspect.isclass(state) and issubclass(state, State)):
        derives = "must be a class that derives from State"
        raise UserError(f"{setting}: {cls.__name__}.state={state!r}: {derives}")
    target = {"_target_": f"{where}:{cls.__name__}", "name": _name(module, name)}
    return cls, target | _defaults(cls, setting)


def _press(choice: str, setting: str) -> type:
    """The method of a press of kvpress."""
    from methods.kvpress import press_class  # loads torch, and kvpress loads transformers

    try:
        return press_class(choice)
    except ValueError as error:
        raise UserError(f"{setting}: {error}") from error


def find_codec(choice: str) -> tuple[type, str]:
    """The class that `codec=<choice>` names, and its name in tables. Raises UserError as `find`."""
    from methods.codecs.base import RowCodec

    setting = f"codec={choice}"
    module, _, name = _module(choice, setting)
    cls = _class(module, name, RowCodec, setting)
    for part in ("bits", "row_bytes", "encode", "decode"):
        if getattr(cls, part) is getattr(RowCodec, part):
            raise UserError(
                f"{setting}: {cls.__name__} lacks {part}; methods/codecs/base.py says what it is"
            )
    _require_text(cls, "name", setting)
    _defaults(cls, setting)
    return cls, _name(module, name)


def _module(choice: str, setting: str) -> tuple[ModuleType, str, str]:
    """The module that `choice` names, where it lies (a file's path or a module's name), and the
    class's name if any.

    setting: the choice as the user wrote it, for errors.
    """
    of_file = FILE.fullmatch(choice)
    if of_file is not None:
        where, name = of_file["path"], of_file["name"] or ""
        module = _run_file(Path(where).expanduser(), setting)
        return module, str(Path(str(module.__file__)).resolve()), name
    where, _, name = choice.partition(":")
    if not name:
        where, _, name = where.rpartition(".")
    return _import(where, setting, Path.cwd()), where, name


def _name(module: ModuleType, name: str) -> str:
    return ".".join(filter(None, (module.__name__, name)))


def _run_file(path: Path, setting: str) -> ModuleType:
    """Run a file as a module of its own name, so that it can import what lies beside it, here and
    in a child."""
    if not path.is_file():
        raise UserError(f"{setting}: there is no file {path}")
    if not path.stem.isidentifier():
        kind = setting.partition("=")[0]
        raise UserError(f"{setting}: the file's name must be a Python name, as my_{kind}.py is")
    module = _import(path.stem, setting, path.resolve().parent)
    found = getattr(module, "__file__", None)  # none in what is built into Python
    if found is None or not path.samefile(found):
        taken = found or "Python itself"
        raise UserError(f"{setting}: {path.stem} is a module of {taken} already; rename the file")
    return module


def _import(name: str, setting: str, folder: Path) -> ModuleType:
    """Import module `name`, from `folder` if no other place has it."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last: nothing of the user's takes the place of a library
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is our own
        line = ""
        for frame in frames:
            if Path(frame.filename).is_relative_to(folder):
                line = f"{frame.filename}:{frame.lineno}: "  # the innermost
        words = reason(error)
        if isinstance(error, SyntaxError):
            line = f"{error.filename}:{error.lineno}: "
            words = f"{type(error).__name__}: {error.msg}"
        raise UserError(f"{setting}: {line}{words}") from error
    if file := getattr(module, "__file__", None):
        _IMPORTED.setdefault(Path(file).parent, setting)
    return module


@contextmanager
def faults() -> Iterator[None]:
    """Raise an error in the block that comes out of a file of the user's own as a UserError that
    names its line.

    What a method or codec says of itself, such as `title` and `with_budget`, is asked while
    settings are checked.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        files: dict[str, str] = {}
        for folder, setting in _IMPORTED.items():
            files |= {str(file): setting for file in folder.glob("*.py")}
        # The innermost of them, whichever method was imported before.
        line = line_in(error, set(files))
        if not line:
            raise
        setting = files[line.rpartition(":")[0]]
        raise UserError(f"{setting}: {line}: {reason(error)}") from error


def _class(module: ModuleType, name: str, base: type, setting: str) -> Any:
    """The class called `name`, or the only one derived from `base` that the module defines."""
    own: dict[str, Any] = {}
    for value in vars(module).values():
        is_derived = inspect.isclass(value) and issubclass(value, base)
        if is_derived and value.__module__ == module.__name__:
            own[value.__name__] = value
    if name and name not in own:
        kind = setting.partition("=")[0]
        allowed = nearest(name, own) if own else f"{module.__file__} defines no {kind}"
        raise UserError(f"{setting}: {allowed}")
    if not own:
        derives = f"derives from {base.__module__}.{base.__name__}, directly or not"
        raise UserError(f"{setting}: no class in it {derives}")
    if not name and len(own) > 1:
        raise UserError(
            f"{setting}: defines {', '.join(own)}; choose one, as {setting}:{next(iter(own))}"
        )
    cls = own[name] if name else next(iter(own.values()))
    if "__dataclass_fields__" not in vars(cls):
        raise UserError(
            f"{setting}: {cls.__name__} must be a @dataclass(frozen=True), its fields the settings"
        )
    return cls


def _constant(cls: type, name: str, computed: Any) -> Any:
    """The attribute of a class; `computed` where it is a property, whose value only an object
    has."""
    value = getattr(cls, name)
    return computed if isinstance(value, property | cached_property) else value


def _require_text(cls: type, name: str, setting: str) -> None:
    value = _constant(cls, name, "")
    if not isinstance(value, str) or not value.isprintable():
        raise UserError(f"{setting}: {cls.__name__}.{name}={value!r}: must be text in one line")


def _require_extras(cls: type, setting: str) -> None:
    """Raise UserError for a hook of `methods.extras` on a class without the base that it belongs
    to, since nothing would ask for it."""
    from methods import extras
    from methods.base import Method

    for extra in vars(extras).values():
        if not inspect.isclass(extra) or not issubclass(extra, Method) or issubclass(cls, extra):
            continue
        for name in vars(extra):
            if not name.startswith("_") and hasattr(cls, name):
                lacks = f"derive from {extra.__name__} of methods/extras.py as well"
                raise UserError(f"{setting}: {cls.__name__}.{name}: {lacks}")


def _defaults(cls: Any, setting: str) -> dict[str, Any]:
    """The settings of a class as YAML holds them. Raises UserError for a field without a
    default."""
    values = {}
    for field in fields(cls):
        if field.default_factory is not MISSING:
            value = field.default_factory()
        elif field.default is not MISSING:
            value = field.default
        else:
            raise UserError(f"{setting}: {cls.__name__}.{field.name} needs a default")
        values[field.name] = list(value) if isinstance(value, tuple) else value
    return values


def _literal(value: Any) -> Any:
    """The settings of a method with `schema.literal` texts: a default is no interpolation."""
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if isinstance(value, dict):
        return {name: _literal(item) for name, item in value.items()}
    return value


class MethodSource(ConfigSource):
    """To Hydra, a folder of configurations that has a whole file for every method, and the
    experiments of the user's."""

    @staticmethod
    def scheme() -> str:
        return "method"

    def load_config(self, config_path: str) -> ConfigResult:
        config_path = as_typed(config_path)
        if config_path.startswith(EXPERIMENTS):
            node = OmegaConf.load(Path(config_path.removeprefix(EXPERIMENTS)).expanduser())
            package = "_global_"
        else:
            choice, package = config_path.removeprefix(GROUP), None
            try:
                _, settings = find(choice) if is_own(choice) else shipped(choice)
                node = OmegaConf.create(_literal(settings))
            except UnsupportedValueType as error:
                raise UserError(
                    f"method={choice}: a setting's default is no number, text or list: {error}"
                ) from error
        return ConfigResult(
            provider=self.provider, path=self.full_path(), config=node, header={"package": package}
        )

    def is_config(self, config_path: str) -> bool:
        config_path = as_typed(config_path)
        if config_path.startswith(EXPERIMENTS):
            file = Path(config_path.removeprefix(EXPERIMENTS)).expanduser()
            return file.suffix == ".yaml" and file.is_file()
        if not config_path.startswith(GROUP):
            return False
        choice = config_path.removeprefix(GROUP)
        return is_own(choice) or choice.removesuffix(".yaml") in options("method")

    def is_group(self, config_path: str) -> bool:
        return False

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class MethodSourcePath(SearchPathPlugin):
    """Has Hydra ask `MethodSource` before `conf/`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.prepend("harness", f"{MethodSource.scheme()}://")


for plugin in (MethodSource, MethodSourcePath):
    Plugins.instance().register(plugin)

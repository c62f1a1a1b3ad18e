"""What `method=NAME` and `codec=NAME` can name: the shipped methods, and classes of the user's own.

A shipped method is a file of `conf/method`, which holds what it changes of its class's defaults.
Any other is a class in a file or a package of the user's, or a press of kvpress; so is a codec.

    python run.py method=./my_method.py method.budget=0.3
    python run.py method=my_package.my_module.MyMethod
    python run.py codec=./my_codec.py codec_settings.levels=5
    python run.py method=kvpress:SnapKVPress method.window_size=32

The settings are the fields of the dataclass. The name of an own method is the file's; if the class
is named, `file.Class` or the dotted path. A file of the user's is run only if it is named.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from harness.errors import UserError, nearest, reason
from harness.settings.schema import conf_file, options

PRESS = "kvpress:"
"""Before the name of a press of kvpress (`methods.kvpress`)."""
FILE = re.compile(r"(?P<path>.*\.py)(:(?P<name>\w+))?", re.DOTALL)
"""A file, perhaps with a class: `./FILE.py:Class`. A folder's name may hold a colon too."""


def is_own(choice: str) -> bool:
    """True if `method=<choice>` or `codec=<choice>` names a file or module of the user's, not one
    of this project."""
    return any(mark in choice for mark in "./:")


@cache
def preset(name: str) -> tuple[type, dict[str, Any]]:
    """The class of a method of `conf/method`, and what its file says: the settings that it changes,
    its title, and how rows are stored. Raises OSError if there is no such file."""
    said = conf_file("method", name)
    module, _, cls_name = said["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), cls_name), said


def shipped(name: str) -> tuple[type, dict[str, Any]]:
    """The class of a method of `conf/method` and its whole settings: the defaults of the class, and
    what its file says. Raises OSError if there is no such file."""
    from methods.settings import settings_of  # loads torch

    cls, said = preset(name)
    return cls, {setting.name: setting.default for setting in settings_of(cls)} | said


def chosen(choice: str) -> tuple[type, str, dict[str, Any]]:
    """The class that `method=<choice>` names, the method's name, and what its file in `conf/method`
    says, or would say.

    Raises UserError if there is no such method, file or press, and unless a file holds one method.
    """
    if choice in options("method"):
        cls, said = preset(choice)
        return cls, choice, said
    if not is_own(choice):
        raise UserError(f"method={choice}: {nearest(choice, options('method'))}")
    cls, name = _own(choice, f"method={choice}")
    own_names = vars(cls)  # without those of the class from which it derives
    return cls, name, {} if "title" in own_names else {"title": name}


def _own(choice: str, setting: str) -> tuple[type, str]:
    if choice.startswith(PRESS):
        from methods.kvpress import press_class  # kvpress loads transformers

        try:
            return press_class(choice.removeprefix(PRESS)), choice
        except ValueError as error:
            raise UserError(f"{setting}: {error}") from error
    from methods.base import Method, When  # loads torch, which a wrong name need not wait for

    cls, name = _class(choice, Method, setting)
    if name in options("method"):
        raise UserError(f"{setting}: {name} is a method of conf/method; rename the file")
    when = getattr(cls, "when", None)  # a property is asked of the object
    if not isinstance(when, property) and when not in get_args(When):
        raise UserError(f"{setting}: {cls.__name__}.when={when!r}: {nearest(when, get_args(When))}")
    return cls, name


def chosen_codec(choice: str) -> tuple[type, str]:
    """The class of the user's that `codec=<choice>` names, and its name in tables. Raises UserError
    as `chosen`."""
    from methods.codecs.base import RowCodec

    return _class(choice, RowCodec, f"codec={choice}")


def _class(choice: str, base: type, setting: str) -> tuple[Any, str]:
    """The class derived from `base` that `choice` names, or the only one that its module defines,
    and its name in tables. setting: the choice as the user wrote it, for errors."""
    of_file = FILE.fullmatch(choice)
    if of_file is not None:
        name = of_file["name"] or ""
        module = _run_file(Path(of_file["path"]).expanduser(), setting)
    else:
        where, _, name = choice.replace(":", ".").rpartition(".")
        module = _import(where, setting, Path.cwd())
    own: dict[str, Any] = {}
    for value in vars(module).values():
        is_derived = inspect.isclass(value) and issubclass(value, base)
        if is_derived and value.__module__ == module.__name__:
            own[value.__name__] = value
    if not own:
        derives = f"derives from {base.__module__}.{base.__name__}, directly or not"
        raise UserError(f"{setting}: no class in it {derives}")
    if name and name not in own:
        raise UserError(f"{setting}: {nearest(name, own)}")
    if not name and len(own) > 1:
        one = f"choose one, as {setting}:{next(iter(own))}"
        raise UserError(f"{setting}: defines {', '.join(own)}; {one}")
    cls = own[name or next(iter(own))]
    if "__dataclass_fields__" not in vars(cls):
        needed = "must be a @dataclass(frozen=True), its fields the settings"
        raise UserError(f"{setting}: {cls.__name__} {needed}")
    return cls, ".".join(filter(None, (module.__name__, name)))


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
        return importlib.import_module(name)
    except (ImportError, SyntaxError) as error:
        raise UserError(f"{setting}: {reason(error)}") from error

"""Types and ranges of settings, and what a setting can choose: files of `conf/`, and for `method=`
and `codec=` a class in a file or package of the user's, or a press of kvpress.

    python run.py method=./my_method.py method.budget=0.3
    python run.py method=my_package.my_module.MyMethod
    python run.py codec=./my_codec.py codec_settings.levels=5
    python run.py method=kvpress:SnapKVPress method.window_size=32

The settings of such a class are the fields of its dataclass. The name of an own method is the
file's; if the class is named, `file.Class` or the dotted path. A file of the user's is run only if
it is named.

`build` makes a frozen dataclass of plain values: pydantic checks them strictly against its
annotations. A wrong setting is refused by a `UserError` of one line: the setting as the user writes
it, its value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from harness.errors import UserError, nearest, reason
from harness.settings.paths import CONF_DIR

T = TypeVar("T")

MOST = 2**31 - 1
"""The largest whole number of any setting."""
WORDS = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "tuple_type": "a list such as [a,b]",
    "dict_type": "a group of settings such as {name}.<name>=<value>",
    "dataclass_type": "a group of settings such as {name}.<name>=<value>",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:.10g}",
}
"""What is allowed, by pydantic's type of error."""
FULL = "full"
"""The method that reads the whole cache."""
AT_TOP = ("latency", "sampling", "task")
"""Groups of a run whose settings are written without the group."""


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _items(value: Any) -> Any:
    if isinstance(value, str):
        value = [item.strip() for item in value.split(",")]
    return tuple(value) if isinstance(value, list) else value


def _path(text: str) -> str:
    if not text:
        raise ValueError("is empty; must be a path, such as . for the present folder")
    return os.path.expanduser(text)


def only(holds: Callable[[Any], bool], otherwise: str) -> AfterValidator:
    """A range that a function checks. otherwise: what a refusal says."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(otherwise)
        return value

    return AfterValidator(check)


DISTINCT = only(
    lambda values: len(values) > 0 and len(set(values)) == len(values),
    "must name at least one, and none twice",
)
Text = Annotated[str, BeforeValidator(_text)]
"""Text, for which a number may be given: `label=4`."""
PathText = Annotated[Text, AfterValidator(_path)]
"""The name of a file or folder: not empty, its `~` expanded."""
ExistingText = Annotated[PathText, only(os.path.exists, "no such file or folder")]
FileText = Annotated[PathText, only(os.path.isfile, "no such file")]
FolderText = Annotated[PathText, only(os.path.isdir, "no such folder")]
Names = Annotated[tuple[Text, ...], BeforeValidator(_items), DISTINCT]
"""Different texts, written `[a,b]`, `'a,b'` or, for one item, `a`."""
Natural = Annotated[int, Field(ge=0, le=MOST)]
Naturals = Annotated[tuple[Natural, ...], DISTINCT]
Count = Annotated[int, Field(ge=1, le=MOST)]
Share = Annotated[float, only(lambda value: 0 < value <= 1, "must be above 0 and at most 1")]
Positive = Annotated[float, Field(gt=0, le=MOST)]
FAR = 0.1
"""A run whose budget differs from the one that was asked for by more than this share of it is said
to have another."""


def is_unmet(asked: float | None, ran: float | None) -> bool:
    """Whether a run has another budget than was asked for, by more than `FAR` of that; False where
    either is None."""
    return asked is not None and ran is not None and abs(ran - asked) > FAR * asked


@cache
def formats() -> dict[str, dict[str, Any]]:
    """The formats of the whole cache that have a name, as methods with what their files would
    say."""
    named = yaml.safe_load((CONF_DIR / "formats.yaml").read_text(encoding="utf-8"))
    full = conf_file("method", FULL)
    return {name: full | {"name": name} | said for name, said in named.items()}


def options(group: str) -> list[str]:
    """The choices of a group of settings: the files under `conf/<group>`; among methods, the named
    formats too."""
    names = [path.stem for path in (CONF_DIR / group).glob("*.yaml")]
    return sorted([*names, *formats()] if group == "method" else names)


def conf_file(group: str, name: str) -> dict[str, Any]:
    """What a file of `conf/` says, or would say of a named format. Raises OSError if there is no
    such file."""
    if group == "method" and name != FULL and name in formats():
        return formats()[name]
    text = (CONF_DIR / group / f"{name}.yaml").read_text(encoding="utf-8")
    said: dict[str, Any] = yaml.safe_load(text)
    return said


@cache
def kind_of(experiment: str) -> str | None:
    """The kind of run of an experiment of `conf/`; None for many runs of others, and for a file of
    the user's."""
    if experiment not in options("experiment"):
        return None
    return conf_file("experiment", experiment).get("kind")


def build(cls: type[T], settings: Mapping[str, Any], where: str = "") -> T:
    """Make a `cls` from `settings`.

    Only lossless readings are taken: 1 for a float, a list for a tuple.

    Args:
        cls: a dataclass, whose fields may be dataclasses.
        settings: field name to plain value. A field left out keeps its default.
        where: the group of settings, "" at the top.

    Raises:
        UserError: unknown or missing name, wrong type, out of range, or a `ValueError` of the
        dataclass itself, whose message names the setting.
    """
    try:
        # As JSON, of which pydantic takes a mapping for a dataclass and a list for a tuple.
        text = json.dumps(settings)
        return _adapter(cls).validate_json(text, strict=True, extra="forbid")  # type: ignore[arg-type]
    except ValidationError as error:
        raise UserError(_in_words(error, cls, where)) from error


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _in_words(error: ValidationError, cls: Any, where: str) -> str:
    """The first refusal of pydantic in one line."""
    first = error.errors()[0]
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    value = list(value) if isinstance(value, tuple) else value
    names = [part for part in first["loc"] if isinstance(part, str)]
    name, group, owner = where, cls, cls
    for part in names:
        if not dataclasses.is_dataclass(owner):
            break  # the rest names a type of a union
        name = part if not name or name in AT_TOP else f"{name}.{part}"  # as the user writes it
        group, owner = owner, get_type_hints(owner).get(part)
    if kind == "unexpected_keyword_argument":
        known = [field.name for field in dataclasses.fields(group)]
        return f"unknown setting {name}: {nearest(names[-1], known)}"
    if kind == "missing":
        return f"setting {name} is missing"
    if kind == "value_error":
        said = context["error"]
        of_a_class = not names or isinstance(said, UserError)
        return str(said) if of_a_class else f"{name}={value}: {said}"
    if kind == "literal_error":
        refusal = nearest(value, re.findall("'(.*?)'", first["msg"]))
    elif kind in WORDS:
        refusal = f"must be {WORDS[kind].format(name=name, **context)}"
    else:
        refusal = first["msg"]
    return f"{name}={value}: {refusal}"


# Methods and codecs

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

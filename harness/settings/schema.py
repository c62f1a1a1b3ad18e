"""Types and ranges of settings, and the choices of `conf/`.

Hydra composes untyped YAML. `build` checks it with pydantic against the annotations of a frozen
dataclass. It refuses a wrong setting by a `UserError` of one line: the setting as the user writes
it, its value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import re
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    ValidationInfo,
    create_model,
)
from pydantic.errors import PydanticUserError

from harness.errors import UserError, nearest, one_line
from harness.files import expanded
from harness.settings.paths import CONF_DIR

T = TypeVar("T")

MOST = 2**31 - 1
"""The largest whole number of any setting."""
LARGEST = 3e38
"""The largest finite number of any setting: what float32 holds."""

WORDS = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "tuple_type": "a list such as [a,b]",
    "list_type": "a list such as [a,b]",
    "mapping_type": "a group of settings such as {name}.<name>=<value>",
    "dict_type": "a group of settings such as {name}.<name>=<value>",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:.10g}",
}
"""What is allowed, by pydantic's type of error."""


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _items(value: Any) -> Any:
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value


def _path(value: Any, info: ValidationInfo) -> str:
    return path_text(value, _join(str(info.context), str(info.field_name)))


def _file(path: str) -> str:
    if not os.path.isfile(path):  # False as well for a name that is too long for the file system
        raise ValueError("no such file")
    return path


def _folder(path: str) -> str:
    if not os.path.isdir(path):
        raise ValueError("no such folder")
    return path


def _day(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError("must be a day such as 2024-07-26") from None


def _share(value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError("must be above 0 and at most 1")
    return value


def _distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values or len(set(values)) < len(values):
        raise ValueError("must name at least one, and none twice")
    return values


Text = Annotated[str, BeforeValidator(_text)]
"""Text, for which a number may be given: `label=4`."""
PathText = Annotated[str, BeforeValidator(_path)]
"""The name of a file or folder: not empty, its `~` expanded."""
FileText = Annotated[PathText, AfterValidator(_file)]
FolderText = Annotated[PathText, AfterValidator(_folder)]
DayText = Annotated[Text, AfterValidator(_day)]
Names = Annotated[
    tuple[Text, ...], Strict(False), BeforeValidator(_items), AfterValidator(_distinct)
]
"""Different texts, written `[a,b]`, `'a,b'` or, for one item, `a`."""
Natural = Annotated[int, Field(ge=0, le=MOST)]
Naturals = Annotated[tuple[Natural, ...], Strict(False), AfterValidator(_distinct)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Share = Annotated[float, AfterValidator(_share)]
Positive = Annotated[float, Field(gt=0, le=MOST)]
FAR = 0.1
"""A run whose budget differs from the one that was asked for by more than this share of it is said
to have another."""


def is_unmet(asked: float | None, ran: float | None) -> bool:
    """Whether a run has another budget than was asked for, by more than `FAR` of that; False where
    either is None."""
    return asked is not None and ran is not None and abs(ran - asked) > FAR * asked


def options(group: str) -> list[str]:
    """The choices of a group of settings: the files under `conf/<group>`."""
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def is_group(name: str) -> bool:
    """True if a setting chooses a file of `conf/`."""
    return os.path.isdir(CONF_DIR / name)


@cache
def kind_of(experiment: str) -> str | None:
    """The kind of run in the YAML of an experiment; None if the YAML has none, or there is no such
    file."""
    path = CONF_DIR / "experiment" / f"{experiment}.yaml"
    kind = yaml.safe_load(path.read_text(encoding="utf-8")).get("kind") if path.is_file() else None
    return None if kind is None else str(kind)


def setting_of(override: str) -> str:
    """The setting that an override sets, or removes (`~`)."""
    return override.partition("=")[0].lstrip("+~")


def literal(text: str) -> str:
    """Text in which OmegaConf reads `${` as these letters, and not as another setting's value."""
    return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", text)


def as_typed(text: str) -> str:
    """The text of which `literal` made this one."""
    escaped = re.compile(r"((?:\\\\)*)\\\$\{")
    return escaped.sub(lambda found: found[1][: len(found[1]) // 2] + "${", text)


def group(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings of a group in a composed run. Raises UserError where a plain value stands in its
    place."""
    node = settings.get(name)
    if not isinstance(node, dict):
        raise UserError(f"{name}={node}: {nearest(node, options(name))}")
    return dict(node)


def path_text(value: Any, where: str) -> str:
    """A path with its `~` expanded. Raises UserError where it is empty, no text, in an unknown home
    folder, or what no file system can hold."""
    text = _text(value)
    if not isinstance(text, str):
        raise UserError(f"{where}={value}: must be text")
    if not text:
        raise UserError(f"{where}=: is empty; must be a path, such as . for the present folder")
    if "\0" in text:
        raise UserError(f"{where}={text}: no file can have such a name")
    return str(expanded(text, where))


def build(cls: type[T], settings: Mapping[str, Any], where: str = "") -> T:
    """Make a `cls` from `settings`.

    Only lossless readings are taken: 1 for a float, a list for a tuple.

    Args:
        cls: a dataclass.
        settings: field name to plain value. A field left out keeps its default.
        where: the group of settings, "" at the top.

    Raises:
        UserError: unknown or missing name, wrong type, out of range, or a `ValueError` of the
        dataclass itself.
    """
    for name, value in settings.items():
        if isinstance(value, float) and (math.isnan(value) or LARGEST <= abs(value) < math.inf):
            raise UserError(f"{_join(where, name)}={value}: must be a number")
        if isinstance(value, int) and abs(value) > MOST:
            raise UserError(f"{_join(where, name)}={value}: must be at most {MOST}")
    try:
        checked = _model(cls).model_validate(dict(settings), context=where)  # type: ignore[arg-type]
        return cls(**{name: getattr(checked, name) for name in settings})
    except ValidationError as error:
        raise UserError(_in_words(error, cls, where)) from error
    except ValueError as error:  # `methods` knows no UserError; its messages name the setting
        raise UserError(one_line(error)) from error


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _from_yaml(hint: Any) -> Any:
    """The annotation of a tuple, which takes a list as well: YAML has lists only. Others as they
    are."""
    return Annotated[hint, Strict(False)] if get_origin(hint) is tuple else hint


@cache
def _model(cls: Any) -> type[BaseModel]:
    """A pydantic model with the fields of a dataclass. A field without a default is required,
    others are not."""
    fields: dict[str, Any] = {}
    try:
        hints = get_type_hints(cls, include_extras=True)
        for field in filter(lambda field: field.init, dataclasses.fields(cls)):
            hint = hints[field.name]
            if get_origin(hint) is UnionType:
                hint = Union[tuple(map(_from_yaml, get_args(hint)))]  # noqa: UP007 - members known at run time
            hint = _from_yaml(hint)
            required = field.default is field.default_factory  # both are MISSING
            fields[field.name] = (hint, ... if required else None)
        own = cls.__module__.startswith("harness.")
        config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=own)
        return create_model(cls.__name__, __config__=config, **fields)
    except (PydanticUserError, NameError) as error:
        refusal = str(error).splitlines()[0]
        wrong = f"a type is none that a setting can have ({refusal})"
        raise UserError(f"{cls.__name__}: {wrong}") from error


def _in_words(error: ValidationError, cls: Any, where: str) -> str:
    """The first refusal of pydantic in one line."""
    first = error.errors()[0]
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    name = _join(where, str(first["loc"][0]))
    if kind == "extra_forbidden":
        return f"unknown setting {name}: {nearest(first['loc'][0], _model(cls).model_fields)}"
    if kind == "missing":
        return f"setting {name} is missing"
    if isinstance(context.get("error"), UserError):
        return str(context["error"])
    if kind == "literal_error":
        refusal = nearest(value, re.findall("'(.*?)'", first["msg"]))
    elif kind == "value_error":
        refusal = str(context["error"])
    elif kind in WORDS:
        refusal = f"must be {WORDS[kind].format(name=name, **context)}"
    else:
        refusal = first["msg"]
    return f"{name}={value}: {refusal}"

"""Types and ranges of settings, and the choices of `conf/`.

`build` makes a frozen dataclass of plain values: pydantic checks them strictly against its
annotations. A wrong setting is refused by a `UserError` of one line: the setting as the user writes
it, its value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from harness.errors import UserError, nearest
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
    if "\0" in text:
        raise ValueError("no file can have such a name")
    return os.path.expanduser(text)


def _day(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError("must be a day such as 2024-07-26") from None


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
DayText = Annotated[Text, AfterValidator(_day)]
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


def path_text(value: Any, where: str) -> str:
    """A path with its `~` expanded. Raises UserError where it is empty, no text, or what no file
    system can hold; where: the setting that is named then."""
    if not isinstance(value, str):
        raise UserError(f"{where}={value}: must be text")
    try:
        return _path(value)
    except ValueError as error:
        raise UserError(f"{where}={value}: {error}") from error


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
    _require_values(settings, where)
    try:
        # As JSON, of which pydantic takes a mapping for a dataclass and a list for a tuple.
        text = json.dumps(settings)
        return _adapter(cls).validate_json(text, strict=True, extra="forbid")  # type: ignore[arg-type]
    except ValidationError as error:
        raise UserError(_in_words(error, cls, where)) from error


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(cls)
    except (PydanticUserError, NameError) as error:
        refusal = str(error).splitlines()[0]
        wrong = f"a type is none that a setting can have ({refusal})"
        raise UserError(f"{cls.__name__}: {wrong}") from error


def joined(where: str, name: str) -> str:
    """A setting as the user writes it."""
    return name if not where or where in AT_TOP else f"{where}.{name}"


def _require_values(value: Any, name: str) -> None:
    """Raise UserError for a number that is none, or larger than any setting may be."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _require_values(item, joined(name, str(key)))
    elif isinstance(value, list | tuple):
        for item in value:
            _require_values(item, name)
    elif isinstance(value, float) and (math.isnan(value) or LARGEST <= abs(value) < math.inf):
        raise UserError(f"{name}={value}: must be a number")
    elif isinstance(value, int) and abs(value) > MOST:
        raise UserError(f"{name}={value}: must be at most {MOST}")


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
        name, group, owner = joined(name, part), owner, get_type_hints(owner).get(part)
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

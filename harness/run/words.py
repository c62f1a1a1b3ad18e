"""The words of a command line, read by Hydra's grammar: `NAME=VALUE`, and a value that is a sweep
with `-m`; and what to type in place of a word that is none."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Sweep
from hydra.errors import HydraException
from pydantic_core import to_jsonable_python

from harness.errors import UserError, one_line
from harness.settings.config import TASKS
from harness.settings.paths import CONF_DIR
from harness.settings.schema import options

FREE_TEXT = (
    "prompt", "system_instruction", "question_marker", "think_end_token", "label", "results_dir",
    "corpus.path", "calibration.path", "model.path", "data.root", "include_path",
    "platform.disk_dir",
)  # fmt: skip
"""Settings that are any text, which Hydra's grammar would read as lists, sweeps or numbers."""
MULTIRUN = ("-m", "--multirun")
PRINTED = ("--cfg", "-c", "job")
"""Words that print the settings of a run."""

Values = Mapping[str, Any]
"""Settings by the names that a command line gives them; `+` before the name of a new one."""


def values_of(given: Iterable[str] | Values) -> dict[str, Any]:
    """Settings, from words or from Python, as JSON holds them. Raises UserError for a word that is
    none."""
    if not isinstance(given, Mapping):
        given = dict(read(word) for word in given)
    plain = {}
    for name, value in given.items():
        plain[name] = to_jsonable_python(value, fallback=lambda number: number.item())  # of NumPy
    return plain


def read(word: str) -> tuple[str, Any]:
    """The setting and the value of a word that is no sweep. Raises UserError for any other."""
    name, _, typed = word.partition("=")
    if name in FREE_TEXT and typed not in ("", "null") and typed[0] not in "'\"":
        return name, typed
    given = parsed(word)
    if given.is_sweep_override():
        instead = f" before it: -m {word}"
        if name == "tasks":
            instead = f"; as a list: {name}=[{typed}]"
        raise UserError(f"{word}: is a sweep, which needs -m{instead}")
    return _name(given), given.value()


class Command(NamedTuple):
    """A command line. jobs: the settings of each. prints: what is printed in place of a run."""

    jobs: list[dict[str, Any]]
    prints: Literal["help", "settings"] | None


def command_of(argv: Sequence[str]) -> Command:
    """A command line as it is meant. Raises UserError for a word that is none, with what to type in
    its place."""
    words: list[str] = []
    prints: Literal["help", "settings"] | None = None
    for number, word in enumerate(argv):
        if word in ("--help", "-h"):
            prints = "help"
        elif word in PRINTED:
            prints = prints or "settings"
        elif word in MULTIRUN:
            continue
        elif "=" not in word or word.startswith("-"):
            raise UserError(f"{word}: must be NAME=VALUE; type {instead_of(argv, number)}")
        else:
            words.append(word)
    is_sweep = not {*MULTIRUN}.isdisjoint(argv)
    return Command(_jobs(words) if is_sweep else [values_of(words)], prints)


def _jobs(words: Iterable[str]) -> list[dict[str, Any]]:
    """The settings of each combination of the sweeps among the words."""
    axes = []
    for word in words:
        given = parsed(word)
        name = _name(given)
        if not isinstance(given.value(), Sweep):
            axes.append([(name, given.value())])
            continue
        axes.append([read(f"{name}={value}") for value in given.sweep_string_iterator()])
    return [values_of(dict(combination)) for combination in itertools.product(*axes)]


@cache
def parsed(word: str) -> Override:
    """A word as Hydra reads it. Raises UserError where it cannot."""
    try:
        given = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise UserError(f"{word}: Hydra cannot read it ({one_line(error)})") from None
    if given.is_delete() or given.package is not None:
        raise UserError(f"{word}: must be NAME=VALUE")
    return given


def _name(given: Override) -> str:
    """The setting of a word; a `+` stays before it."""
    name = str(given.key_or_group)
    return f"+{name}" if given.is_add() else name


# What to type in place of a word

MAX_HUB_ID = 96
"""Letters of an id that the hub allows."""


def source_of_model(model: str) -> tuple[str, str] | None:
    """The setting that chooses a model by one text, and its value; None where it is no source."""
    if model in options("model"):
        return "model", model
    if os.path.exists(os.path.expanduser(model)):  # False, too, where no file can have such a name
        return "model.path", model
    if len(model) <= MAX_HUB_ID and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model, re.ASCII):
        return "model.hub_id", model
    return None


def settings_with(value: str) -> list[str]:
    """The settings, as typed, for which a bare value is a choice: `method=h2o` of `h2o`."""
    groups = sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir())
    found = [f"{group}={value}" for group in groups if value in options(group)]
    if not found and value in TASKS:
        found = [f"experiment=tasks tasks=[{value}]"]
    source = None if found else source_of_model(value)
    return found if source is None else ["=".join(source)]


def instead_of(argv: Sequence[str], number: int) -> str:
    """What to type in place of the word `number` of a command, which sets nothing."""
    word, before = argv[number], argv[:number]
    flag = re.fullmatch(r"--?([a-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)
    if flag is not None:
        name, value = flag[1].replace("-", "_"), flag[2]
        return shlex.quote(f"{name}={value or next(iter(argv[number + 1 :]), 'VALUE')}")
    last = next((at for at in reversed(range(number)) if "=" in before[at]), None)
    if last is not None and before[last].partition("=")[0] in FREE_TEXT:
        end = next((at for at in range(number, len(argv)) if "=" in argv[at]), len(argv))
        return shlex.quote(" ".join(argv[last:end]))
    return " or ".join(settings_with(word)) or "NAME=VALUE"

"""The words of a command line, read by Hydra's grammar: `NAME=VALUE`, and a value that is a sweep
with `-m`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Sweep
from hydra.errors import HydraException

from harness.errors import UserError, one_line
from harness.run import hints
from harness.settings.schema import options

FREE_TEXT = (
    "prompt", "system_instruction", "question_marker", "think_end_token", "label", "results_dir",
    "corpus.path", "calibration.path", "model.path", "data.root", "include_path", "export",
    "platform.disk_dir",
)  # fmt: skip
"""Settings that are any text, which Hydra's grammar would read as lists, sweeps or numbers."""
MULTIRUN = ("-m", "--multirun")
PRINTED = ("--cfg", "-c", "job")
"""Words that print the settings of a run."""
OF_LAUNCHERS = ("hydra/launcher", "hydra.launcher", "hydra.verbose")
"""The settings of Hydra that a command may give."""

Values = Mapping[str, Any]
"""Settings by the names that a command line gives them; `+` before the name of a new one."""


def values_of(given: Iterable[str] | Values) -> dict[str, Any]:
    """Settings, from words or from Python, as plain values. Raises UserError for a word that is
    none, or a value that no setting can have."""
    if not isinstance(given, Mapping):
        given = dict(read(word) for word in given)
    return {name: plain(value, name) for name, value in given.items()}


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
    """A command line. jobs: the settings of each. prints: what is printed in place of a run.
    of_launcher: words of the launcher of Hydra's that starts the jobs; none starts them here."""

    jobs: list[dict[str, Any]]
    prints: Literal["help", "settings"] | None
    of_launcher: list[str]


def command_of(argv: Sequence[str]) -> Command:
    """A command line as it is meant. Raises UserError for a word that is none, with what to type in
    its place."""
    words: list[str] = []
    of_launcher: list[str] = []
    prints: Literal["help", "settings"] | None = None
    for number, word in enumerate(argv):
        if word in ("--help", "-h"):
            prints = "help"
        elif word in PRINTED:
            prints = prints or "settings"
        elif word.lstrip("+").startswith("hydra"):
            of_launcher.append(word)
        elif word not in MULTIRUN and ("=" not in word or word.startswith("-")):
            instead = hints.instead_of(argv, number, FREE_TEXT)
            raise UserError(f"{word}: must be NAME=VALUE; type {instead}")
        elif word not in MULTIRUN:
            words.append(word)
    is_sweep = not {*MULTIRUN}.isdisjoint(argv)
    for word in of_launcher:
        if not word.lstrip("+").startswith(OF_LAUNCHERS):
            allowed = f"results go to results_dir=; allowed of Hydra's: {', '.join(OF_LAUNCHERS)}"
            raise UserError(f"{word}: is no setting of a run; {allowed}")
        if not is_sweep:
            raise UserError(f"{word}: starts the jobs of a sweep, which needs -m")
    return Command(_jobs(words) if is_sweep else [values_of(words)], prints, of_launcher)


def _jobs(words: Iterable[str]) -> list[dict[str, Any]]:
    """The settings of each combination of the sweeps among the words."""
    axes = []
    for word in words:
        given = parsed(word)
        name = _name(given)
        if given.is_sweep_override() and name == "label":
            again = "names the same run several times; a sweep over systems is system="
            raise UserError(f"{word}: {again}")
        axes.append([(name, value) for value in _alternatives(given, word)])
    return [values_of(dict(combination)) for combination in itertools.product(*axes)]


def _alternatives(given: Override, word: str) -> list[Any]:
    """The values of a word of a sweep."""
    value = given.value()
    if isinstance(value, Glob):
        return value.filter(options(_name(given)))
    if not isinstance(value, Sweep):
        return [value]
    try:
        return [read(f"{_name(given)}={one}")[1] for one in given.sweep_string_iterator()]
    except ValueError as error:  # as of range(1,2,0)
        raise UserError(f"{word}: Hydra cannot read it ({one_line(error)})") from None


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


def plain(value: Any, name: str) -> Any:
    """A value as JSON holds it. Raises UserError where no setting can have it."""
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, name) for item in value]
    if isinstance(value, str | Path):
        return str(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    allowed = "must be a number, text, a path, a list or a mapping of these"
    raise UserError(f"{name}: is of type {type(value).__name__}; {allowed}")


def _name(given: Override) -> str:
    """The setting of a word; a `+` stays before it."""
    name = str(given.key_or_group)
    return f"+{name}" if given.is_add() else name

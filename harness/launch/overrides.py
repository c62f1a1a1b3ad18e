"""What the user typed, looked at before Hydra does: Hydra's grammar, in words that say what to type instead.

Hydra reads `NAME=VALUE` by a grammar of its own, in which quotes, brackets, `~` and letters beyond ASCII need quotes
inside those of the shell; takes a list where one file of `conf/` is to be chosen; and a comma for a sweep.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Quote, QuotedString, Sweep
from hydra.errors import HydraException

from harness.errors import UserError, nearest
from harness.settings.compose import read_override
from harness.settings.schema import is_group, options
from harness.settings.systems import LABELS

SWEEPS = {"-m", "--multirun"}


def check(argv: Sequence[str]) -> None:
    """Raise UserError for the first word of a command line that Hydra would refuse, or misread."""
    for word in argv:
        if "=" in word and not word.startswith("-"):
            _check(word, is_sweep=not SWEEPS.isdisjoint(argv))


def _check(word: str, is_sweep: bool) -> None:
    override = _read(word)
    name, value = override.key_or_group, override.value()
    if isinstance(value, ChoiceSweep) and not is_sweep:
        raise UserError(f"{word}: is a sweep, which needs -m{_or_quoted(word)}")
    values = [_text(each) for each in value.list] if isinstance(value, ChoiceSweep) else [value]
    chooses = not override.is_delete() and not isinstance(value, Sweep | Glob)
    if is_group(name) and (chooses or isinstance(value, ChoiceSweep)) and not all(isinstance(v, str) for v in values):
        raise UserError(f"{word}: must be one name; {nearest('', options(name))}")
    if name == "label" and isinstance(value, ChoiceSweep) and not {*values} <= {*LABELS}:
        raise UserError(f"{word}: names the same run several times; a sweep takes systems alone: {', '.join(LABELS)}")


def _read(word: str) -> Override:
    """What Hydra makes of a word; UserError says what to type instead."""
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{word}: is not UTF-8 text") from None
    try:
        return read_override(word)
    except HydraException as error:
        how = _or_quoted(word) or f" ({' '.join(str(error).split())})"
        raise UserError(f"{word}: Hydra cannot read it{how}") from None


def _or_quoted(word: str) -> str:
    """The word that a shell hands over as this very text, where quotes are what it lacks."""
    name, _, value = word.partition("=")
    quoted = f"{name}={QuotedString(value, Quote.double).with_quotes()}"
    try:
        override = read_override(quoted)
    except HydraException:
        return ""
    return f"; as text: {shlex.quote(quoted)}" if override.value() == value else ""


def _text(value: object) -> object:
    return value.text if isinstance(value, QuotedString) else value

"""The words of a command line, looked at before Hydra reads them."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence

from hydra.core.override_parser.types import ChoiceSweep, Glob, Quote, QuotedString, Sweep
from hydra.errors import HydraException

from harness import errors
from harness.errors import UserError, nearest, one_line
from harness.run import hints
from harness.run.compose import as_sweep, override, read_override
from harness.settings.schema import is_group, options, setting_of

FREE_TEXT = ("prompt", "system_instruction", "question_marker", "think_end_token")
"""Settings that are any text, which Hydra's grammar would read as lists, sweeps or numbers."""
SHOWN = 200
"""Letters of a command that a refusal repeats at most."""
CONFIG_FLAGS = ("--config", "-cp", "-cn", "-cd", "--experimental-rerun")
"""Flags of Hydra that read settings from another folder than `conf/`, which a run would follow in
part."""
TAKE_A_WORD = ("--cfg", "-c", "--info", "-i", "--package", "-p")
"""Flags of Hydra that a word without `=` may follow."""
LAUNCHER = "hydra/launcher"
HYDRA_SETTINGS = (
    LAUNCHER,
    "hydra.launcher",
    "hydra/sweeper",
    "hydra.sweeper",
    "hydra.verbose",
)
"""The settings of Hydra that a command may give; the others name folders, which are those of
`results_dir`."""


def read_words(argv: Sequence[str]) -> list[str]:
    """A command line for Hydra, the settings of `FREE_TEXT` quoted.

    Hydra reads `NAME=VALUE` by a grammar of its own, in which quotes, brackets, `~` and letters
    beyond ASCII need quotes inside those of the shell; takes a list where one file of `conf/` is to
    be chosen; and a comma for a sweep. Raises UserError for the first word that Hydra would refuse,
    or misread, with what to type instead.
    """
    is_sweep = not {"-m", "--multirun"}.isdisjoint(argv)
    words = []
    for number, word in enumerate(argv):
        if word.startswith(CONFIG_FLAGS):
            own = "your own files are chosen by path, method=./FILE.py or experiment=./FILE.yaml"
            raise UserError(f"{word}: settings are read from the project's conf/ alone; {own}")
        is_setting = "=" in word and not word.startswith("-")
        is_hydras = word.startswith("~") or number > 0 and argv[number - 1] in TAKE_A_WORD
        if not is_setting and not is_hydras:
            typed = hints.without_equals(argv, number, FREE_TEXT)
            if typed is not None:
                raise UserError(f"{word}: must be NAME=VALUE; type {typed}")
        words.append(_checked(word, is_sweep) if is_setting else word)
    return _with_each_file(words) if is_sweep else words


def swept_settings(words: Sequence[str]) -> frozenset[str]:
    """The settings that a command line sweeps over."""
    names = set()
    for word in words:
        if "=" not in word or word.startswith("-"):
            continue
        value = read_override(word).value()
        is_one = isinstance(value, ChoiceSweep) and len(value.list) == 1
        if isinstance(value, Sweep | Glob) and not is_one:
            names.add(setting_of(word))
    return frozenset(names)


def _with_each_file(words: Sequence[str]) -> list[str]:
    """The words of a sweep. Of `method=quest,freekv method.page_size=8` Hydra would ask the default
    method for the page size, since it composes what is not swept first. As a sweep over one value
    the setting is read with each of the two files."""
    swept = set()
    for word in words:
        name, is_setting, _ = word.partition("=")
        if is_setting and is_group(name) and isinstance(read_override(word).value(), ChoiceSweep):
            swept.add(name)
    found = []
    for word in words:
        name, _, typed = word.partition("=")
        is_of_file = typed != "" and name.partition(".")[0] in swept - {name}
        if is_of_file and not isinstance(read_override(word).value(), Sweep | Glob):
            word = f"{name}=choice({typed})"
        found.append(word)
    return found


def _checked(word: str, is_sweep: bool) -> str:
    name, _, typed = word.partition("=")
    if name in FREE_TEXT and not is_sweep and typed not in ("", "null") and typed[0] not in "'\"":
        word = f"{name}={QuotedString(typed, Quote.double).with_quotes()}"
    try:
        word.encode("utf-8")
        given = read_override(word)
    except UnicodeEncodeError:
        raise UserError(f"{word}: is not UTF-8 text") from None
    except HydraException as error:
        hint = _as_text(word) or f" ({one_line(error)})"
        raise UserError(f"{word}: Hydra cannot read it{hint}") from None
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        shown = errors.shortened(word, SHOWN)
        raise UserError(f"{shown}: cannot be read ({errors.reason(error)})") from None
    sets, value = name, given.value()
    name = given.key_or_group
    if name.startswith("hydra") and not name.startswith(HYDRA_SETTINGS):
        allowed = f"results go to results_dir=; allowed of Hydra's: {', '.join(HYDRA_SETTINGS)}"
        raise UserError(f"{word}: is no setting of a run; {allowed}")
    if name == LAUNCHER and not is_sweep:
        raise UserError(f"{word}: starts the jobs of a sweep, which needs -m")
    if isinstance(value, ChoiceSweep) and not is_sweep:
        meant = f"; as a list: {name}=[{typed}]" if name == "tasks" else _as_text(word)
        meant = f" before it: -m {word}" if is_group(name) else meant
        raise UserError(f"{word}: is a sweep, which needs -m{meant}")
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    choices = [item.text if isinstance(item, QuotedString) else item for item in values]
    is_other = given.is_delete() or isinstance(value, Sweep | Glob)
    chooses = isinstance(value, ChoiceSweep) or not is_other
    if is_group(name) and chooses and not all(isinstance(choice, str) for choice in choices):
        raise UserError(f"{word}: must be one name; {nearest('', options(name))}")
    for choice in choices:
        if name != "model" or not isinstance(choice, str) or "/" not in choice:
            continue
        source = hints.source_of_model(choice)
        missing = "" if source else ", and there is no such folder or file"
        instead = "=".join(source or ("model.path", "DIR"))
        raise UserError(f"{word}: chooses a file of conf/model{missing}; type {instead}")
    if name == "label" and isinstance(value, ChoiceSweep):
        raise UserError(
            f"{word}: names the same run several times; a sweep over systems is system="
        )
    if "${" in typed and isinstance(value, ChoiceSweep):
        return as_sweep(sets, choices)
    if "${" in typed and not is_other:
        return override(sets, value)
    return word


def _as_text(word: str) -> str:
    """What to type in a shell for a word that is meant as text; nothing where it is no word in
    quotes either."""
    name, _, typed = word.partition("=")
    quoted = f"{name}={QuotedString(typed, Quote.double).with_quotes()}"
    with contextlib.suppress(HydraException):
        if read_override(quoted).value() == typed:
            return f"; as text: {shlex.quote(quoted)}"
    return ""

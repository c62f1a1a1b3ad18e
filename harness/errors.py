"""What a user got wrong, said in one line.

Every refusal of the project is a `UserError` whose message names the setting, its value and what is allowed;
`harness.launch.cli` prints it without a traceback and exits with code `USERS`.
"""

import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

MAX_LISTED = 16
A_DEFECT = " (a defect)"
DEFECT, USERS, UNFINISHED = 1, 2, 75
"""Exit codes: a defect of ours, what a user can put right, and EX_TEMPFAIL of sysexits.h: invited to try again."""


class UserError(ValueError):
    """Something the user can put right: a setting, a file, the machine's memory. One line, no traceback."""


class UnfinishedError(UserError):
    """Nothing is wrong, and the same command goes on: a grid's time allotment is spent."""


class DefectError(RuntimeError):
    """A defect of ours, as another process or a grid of many cells tells it: what `told` says, or some of it."""


def is_users(error: BaseException) -> bool:
    """Whether it is something that the user can put right; what the system refuses counts as such."""
    return isinstance(error, UserError | OSError)


def told(error: Exception) -> str:
    """What ended a run, in one line that says whether it is a defect."""
    said = one_line(error)
    return said if is_users(error) or isinstance(error, DefectError) else f"{said} ({type(error).__name__}, a defect)"


def recorded(error: Exception) -> str:
    """What the record of a run says that an error ended: its type too, and whether it is a defect."""
    return f"{type(error).__name__}: {error}{'' if is_users(error) else A_DEFECT}"


def again(where: str, said: str) -> Exception:
    """The error of which a record says `said`, to be raised once more: `where` and that."""
    return (DefectError if said.endswith(A_DEFECT) else UserError)(f"{where}{said}")


def one_line(error: BaseException) -> str:
    """What an error says, or its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def nearest(name: object, allowed: Iterable[str]) -> str:
    """Point from an unknown name to the known ones.

    Args:
        name: what the user wrote.
        allowed: the known names, at least one, in the order in which they are shown.

    Returns:
        "did you mean 'h2o'? allowed: full, h2o, ..."; without the question where nothing is close, and the
        list cut after `MAX_LISTED` names.
    """
    names = list(allowed)
    more = ", ..." if len(names) > MAX_LISTED else ""
    return f"{question(name, names)}allowed: {', '.join(names[:MAX_LISTED])}{more}"


def question(name: object, allowed: Iterable[str]) -> str:
    """Ask for up to three known names that are close to what the user wrote; empty where none is."""
    folded = {candidate.lower(): candidate for candidate in allowed}
    close = [folded[match] for match in difflib.get_close_matches(str(name).lower(), folded, n=3, cutoff=0.5)]
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""


def reason(error: BaseException) -> str:
    """What an error of foreign code says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def line_in(error: BaseException, files: Collection[str]) -> str:
    """`file:line` of the last line in one of `files` that an error came through; empty if it came through none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


@contextmanager
def refused(said: str) -> Iterator[None]:
    """Raise whatever foreign code raises in the block as a `UserError`: `said`, and its own words in brackets."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{said} ({reason(error)})") from error


def missing(error: ImportError) -> str:
    """Which package foreign code needs, in words."""
    package = (error.name or "").partition(".")[0]
    if package and importlib.util.find_spec(package) is None:
        return f"needs the Python package {package}, which is not installed"
    return f"needs Python code that is not here ({reason(error)})"


def printable(text: str) -> str:
    """The text in one line that a terminal, a table or a figure can show: line breaks and control characters as the
    escapes that Python writes."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def shortened(text: str, length: int) -> str:
    """The text, or its beginning and its end where it has more than `length` letters."""
    head = (length - 1) // 2
    return text if len(text) <= length else f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def exit_code(command: Callable[[], None]) -> int:
    """Run a command: 0, or `USERS` after a line on stderr for what a user can put right."""
    try:
        command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USERS
    return 0

"""Refusals in one line, and exit codes.

A refusal is a `UserError` whose message names the setting, its value and what is allowed.
`harness.run.cli` prints it without a traceback and exits with code `USERS`. Any other error is a
bug and shows its traceback. Imports nothing that takes time.
"""

import difflib
import importlib.metadata
import importlib.util
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

MAX_LISTED = 16
MAX_MESSAGE = 2000
"""Letters of a refusal that are shown."""
BUG, USERS, STOPPED = 1, 2, 130
"""Exit codes: a bug of ours, what a user can put right, and Ctrl-C or SIGTERM."""


class UserError(ValueError):
    """Something the user can put right: a setting, a file, the machine's memory. Its message is one
    line, whatever the names in it hold, and without its middle where it is too long to read."""

    def __init__(self, message: object = "") -> None:
        super().__init__(shortened(printable(str(message)), MAX_MESSAGE))


def is_users(error: BaseException) -> bool:
    """True if the user can put it right. A refusal of the operating system counts as such."""
    return isinstance(error, UserError | OSError)


def describe(error: BaseException) -> str:
    """An error in one line, which begins with its type where it is a bug."""
    return one_line(error) if is_users(error) else reason(error)


def one_line(error: BaseException) -> str:
    """The message of an error in one line, or its type where it has none. That of the operating
    system begins with the file that it is about."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return printable(f"{error.filename}: {error.strerror}")
    return printable(" ".join(str(error).split())) or type(error).__name__


def nearest(name: object, allowed: Iterable[str]) -> str:
    """The allowed names, at most `MAX_LISTED`, after those close to the user's `name`.

    Such as "did you mean 'h2o'? allowed: full, h2o, ...".
    """
    names = list(allowed)
    more = ", ..." if len(names) > MAX_LISTED else ""
    return f"{question(name, names)}allowed: {', '.join(names[:MAX_LISTED])}{more}"


def question(name: object, allowed: Iterable[str]) -> str:
    """Ask for up to three known names that are close to the user's `name`; empty if none is."""
    known = {word.lower(): word for word in allowed}
    matches = difflib.get_close_matches(str(name).lower(), known, n=3, cutoff=0.5)
    if not matches:
        return ""
    return f"did you mean {' or '.join(repr(known[match]) for match in matches)}? "


def reason(error: BaseException) -> str:
    """The type and message of an error of foreign code, in one line."""
    kind, words = type(error).__name__, " ".join(str(error).split())
    return printable(f"{kind}: {words}"[:300] if words else kind)


def line_in(error: BaseException, files: Collection[str]) -> str:
    """`file:line` that an error is about (`where`), if it is in one of `files`; else of the last
    line in one of them that it came through, or ""."""
    where = str(getattr(error, "where", ""))
    if where.rpartition(":")[0] in files:
        return where
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in files:
            return f"{frame.filename}:{frame.lineno}"
    return ""


def line_of(cls: type, name: str) -> str:
    """`file:line` where a method or property is defined, or else the module's file."""
    member = getattr(cls, name)
    function = getattr(member, "fget", member)
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    if code is None:
        return str(getattr(sys.modules[cls.__module__], "__file__", cls.__module__))
    return f"{code.co_filename}:{code.co_firstlineno}"


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Raise an error of foreign code as a `UserError`: `what` is wrong, its words in brackets."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UserError(f"{what} ({reason(error)})") from error


def missing(error: ImportError) -> str:
    """Which package foreign code needs."""
    package = (error.name or "").partition(".")[0]
    if package and importlib.util.find_spec(package) is None:
        return f"needs the Python package {package}, which is not installed"
    return f"needs Python code that is not here ({reason(error)})"


def release(package: str, needed_by: str, install: str) -> str:
    """A package and its version. UserError where it is not installed: what needs it, and the
    command that installs it."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError as error:
        lacking = f"needs the Python package {package}, which is not installed"
        raise UserError(f"{needed_by}: {lacking}: {install}") from error


def printable(text: str) -> str:
    """The text in one line: line breaks and control characters as Python's escapes."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def shortened(text: str, length: int) -> str:
    """The text, or its beginning and its end if it has more than `length` letters."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    tail = length - 1 - head
    return f"{text[:head]}…{text[len(text) - tail :]}"


def exit_code(command: Callable[[], None]) -> int:
    """Run a command. Returns 0, or `USERS` after a refusal, its own or the operating system's,
    which is printed on stderr."""
    try:
        command()
    except (UserError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return USERS
    return 0

"""A file for a method of one's own, which works as it is: `my_method.py` of this folder under
another name.

python -m harness.run.new_method my_method
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError, exit_code
from harness.settings.paths import COMMAND
from harness.settings.schema import options

SKELETON = Path(__file__).with_name("my_method.py")


def main(argv: Sequence[str]) -> int:
    """Write the file and say what comes next; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.run.new_method", description=__doc__.splitlines()[0]
    )
    parser.add_argument("name", help="the method's name, or a path that ends in it")
    name = parser.parse_args(argv).name.removesuffix(".py")
    return exit_code(lambda: write(Path(f"{name}.py").expanduser()))


def write(path: Path) -> None:
    """Write the skeleton to `path`; UserError for a name that is none, or taken, and where there is
    such a file."""
    name = path.stem
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(f"NAME={name}: must be a Python name such as my_method")
    if name in options("method") or importlib.util.find_spec(name) is not None:
        raise UserError(f"NAME={name}: is the name of a method or a module already; choose another")
    words = name.strip("_").split("_")
    text = SKELETON.read_text(encoding="utf-8")
    text = text.replace("MyMethod", "".join(word[:1].upper() + word[1:] for word in words))
    text = text.replace("My method", " ".join(words).capitalize())
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(re.sub(r"\bmy_method\b", name, text))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    shown = path if path.is_absolute() else f"./{path}"
    print(f"""wrote {shown}; next:
  {COMMAND} method={shown} experiment=contract    # does it keep the contract?
  {COMMAND} method={shown} experiment=perplexity  # how close is it to the full cache?
  {COMMAND} method={shown} experiment=latency     # what does a decode step cost?""")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

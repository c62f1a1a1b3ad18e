"""The command line: `kv-harness method=infinigen`, `python -m harness`, and in a checkout `python
run.py`.

`kv-harness lm-eval ...` is lm-eval's own command line, with the model `kv`. `kv-harness samples
RUN` lists the questions that a run lost. `kv-harness advise` is short for `experiment=advise`.

It lies above all other modules: it hands the figures of `plots` to `harness`, which knows none.
"""

import signal
import sys

from harness.errors import USERS, missing

OWN = ("harness", "methods", "plots")
"""The packages of this project."""


def command() -> int:
    """Run the words of this process; returns the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does
    try:
        from harness.run.cli import main
        from plots import draw_figures
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in OWN:
            raise
        installs = "`make setup` installs all into .venv, `pip install .` into this Python"
        print(f"error: {sys.executable}: {missing(error)}; {installs}", file=sys.stderr)
        return USERS
    words = sys.argv[1:]
    if words[:1] == ["lm-eval"]:
        from harness.api import method_lm  # lm-eval takes seconds to import

        return method_lm.main(words[1:])
    if words[:1] == ["samples"] or "--help" in words:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # its reader may leave, as `| head` does
    if words[:1] == ["samples"]:
        from harness.results import lost

        return lost.main(words[1:])
    if words[:1] == ["advise"]:
        words[0] = "experiment=advise"
    return main(words, draw=draw_figures)


if __name__ == "__main__":
    sys.exit(command())

"""The command line: `kv-harness method=infinigen`, `python -m harness`, and in a checkout `python run.py`.

It lies above all other modules: it hands the figures of `plots` to `harness`, which knows none.
"""

import sys

from harness.errors import interruptible


def main() -> int:
    """The command line; imported when it is called, so that Ctrl-C meanwhile is no traceback."""
    from harness.launch.cli import main
    from plots import draw_figures

    return main(sys.argv[1:], draw=draw_figures)


def command() -> int:
    """Run the words of this process; returns the exit code."""
    return interruptible(main)


if __name__ == "__main__":
    sys.exit(command())

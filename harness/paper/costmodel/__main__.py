"""`python -m harness.paper.costmodel --calibrate`, or `--write`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from harness.errors import exit_code
from harness.paper.costmodel import published
from harness.settings.paths import RESULTS


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write what is asked for; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.paper.costmodel", description="Predict speed from counts."
    )
    wanted = parser.add_mutually_exclusive_group(required=True)
    for flag, does in {
        "--calibrate": "compare with every published number",
        "--write": "write DIR/tables/<figure>-modelled.csv",
    }.items():
        wanted.add_argument(flag, action="store_true", help=does)
    parser.add_argument(
        "--results-dir", default=RESULTS, metavar="DIR", help="with --write (default %(default)s)"
    )
    args = parser.parse_args(argv)

    def act() -> None:
        if args.write:
            print(*published.write_tables(args.results_dir), sep="\n")
        else:
            print(published.render(published.calibrate()), published.render_errors(), sep="\n\n")

    return exit_code(act)


if __name__ == "__main__":
    sys.exit(main())

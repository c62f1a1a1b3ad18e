"""`python -m harness.paper.costmodel`, or with `--write`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from harness.errors import exit_code
from harness.paper.costmodel import published
from harness.settings.paths import RESULTS


def main(argv: Sequence[str] | None = None) -> int:
    """Compare with every published number, or write the tables; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.paper.costmodel",
        description="Compare the cost model with every published number, and fit it again.",
    )
    writes = "write DIR/tables/<figure>-modelled.csv instead"
    parser.add_argument("--write", action="store_true", help=writes)
    parser.add_argument("--results-dir", default=RESULTS, metavar="DIR")
    args = parser.parse_args(argv)
    if args.write:
        return exit_code(lambda: print(*published.write_tables(args.results_dir), sep="\n"))
    print(published.render(published.calibrate()), published.render_errors(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

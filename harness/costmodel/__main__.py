"""`python -m harness.costmodel --calibrate`, or `--figure fig15 --platform h100-pcie5`: a table on stdout."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence

from harness.costmodel.published import PAPER_PLATFORM, calibrate, figure_rows, render
from harness.errors import UserError
from harness.tables import BLOCK_COLUMNS


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is asked for; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m harness.costmodel", description="Predict speed from counts.")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--calibrate", action="store_true", help="compare with every published number")
    wanted.add_argument("--figure", help="print a figure's rows as CSV, in the columns of the latency table")
    parser.add_argument("--platform", default=PAPER_PLATFORM, help=f"with --figure (default {PAPER_PLATFORM})")
    args = parser.parse_args(argv)
    try:
        if args.calibrate:
            print(render(calibrate()))
        else:
            writer = csv.DictWriter(sys.stdout, BLOCK_COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(figure_rows(args.figure, args.platform))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m harness.paper.costmodel --calibrate`, `--figure fig15 --platform h100-pcie5`, or `--write`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from harness.errors import exit_code
from harness.paper.costmodel.published import (
    PAPER_PLATFORM,
    calibrate,
    figure_rows,
    render,
    render_errors,
    write_tables,
)
from harness.tables.columns import LATENCY
from harness.tables.write import render_csv


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write what is asked for; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m harness.paper.costmodel", description="Predict speed from counts.")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--calibrate", action="store_true", help="compare with every published number")
    wanted.add_argument("--figure", help="print a figure's rows as CSV, in the columns of the latency table")
    wanted.add_argument("--write", action="store_true", help="write DIR/tables/<figure>-modelled.csv")
    parser.add_argument("--platform", default=PAPER_PLATFORM, help=f"not with --calibrate (default {PAPER_PLATFORM})")
    parser.add_argument("--results-dir", default="results", metavar="DIR", help="with --write (default results)")
    args = parser.parse_args(argv)
    return exit_code(lambda: print(_asked_for(args)))


def _asked_for(args: argparse.Namespace) -> str:
    if args.calibrate:
        return f"{render(calibrate())}\n\n{render_errors()}"
    if args.write:
        return "\n".join(map(str, write_tables(args.results_dir, args.platform)))
    return render_csv(LATENCY, figure_rows(args.figure, args.platform)).removesuffix("\n")


if __name__ == "__main__":
    sys.exit(main())

"""The board: each method's KL beside the oracle's, its rank, answers, memory and decode step.

    python -m harness.results.board results

It is made of the tables of `experiment=board` alone, of the named results and of the folders within
them. A method or a model of one's own needs no more than its own run of `experiment=board`. Of two
runs of one method on one model the results' own counts, then that of the first folder.

`board_rows.py` makes the frames and `board_page.py` the pages.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import exit_code
from harness.files import holding, write_atomic
from harness.results import board_page
from harness.results.board_evidence import read
from harness.results.board_rows import board_of
from harness.results.columns import csv_of, read_frame
from harness.results.sheet import markdown, note

METHODS, PAIRS = "board-methods", "board-pairs"


def write(results: Path) -> Path:
    """Write the page and the tables into a results folder; returns the page's path.

    Raises UserError: see `read`; or the folder cannot be written.
    """
    methods, pairs, left_out = board_of(*read(results))
    folder, page = results / "tables", results / "board.md"
    with holding(folder, wait=True):
        write_atomic(folder / f"{METHODS}.csv", csv_of(methods, "board"))
        write_atomic(folder / f"{PAIRS}.csv", csv_of(pairs, "board_pairs"))
        by_model = markdown(METHODS, note("board"), board_page.boards(methods))
        write_atomic(folder / f"{METHODS}.md", by_model)
        write_atomic(page, board_page.page(methods, left_out))
    return page


def shown(results: Path) -> str:
    """What is printed once the board is written: its table, and the page's path. Raises as
    `write`."""
    page = write(results)
    methods = read_frame(results / "tables" / f"{METHODS}.csv")
    return f"{board_page.printed(methods)}\n\n{page}".strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Write the board, print its table and its path; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.board", description="Write the board."
    )
    parser.add_argument(
        "results", type=Path, metavar="RESULTS", help="a results folder; folders within it count"
    )
    args = parser.parse_args(argv)
    return exit_code(lambda: print(shown(args.results)))


if __name__ == "__main__":
    sys.exit(main())

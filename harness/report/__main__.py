"""`python -m harness.report --results-dir DIR`."""

import argparse
import sys
from collections.abc import Sequence

from harness.errors import exit_code
from harness.report.page import write_report
from harness.settings.paths import RESULTS


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and print its path; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.report", description="Write the report of results."
    )
    where = "results to report (default %(default)s)"
    parser.add_argument("--results-dir", default=RESULTS, metavar="DIR", help=where)
    return exit_code(lambda: print(write_report(parser.parse_args(argv).results_dir)))


if __name__ == "__main__":
    sys.exit(main())

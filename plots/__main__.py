"""`python -m plots [--results-dir DIR]`: draw all figures whose table exists, print their paths."""

import argparse
import sys

from harness.errors import exit_code
from harness.settings.paths import RESULTS
from plots import main

parser = argparse.ArgumentParser(
    prog="python -m plots", description="Draw the figures from DIR/tables."
)
words = "figures go to DIR/figures (default %(default)s)"
parser.add_argument("--results-dir", default=RESULTS, metavar="DIR", help=words)
args = parser.parse_args()
sys.exit(exit_code(lambda: print(*main(args.results_dir), sep="\n")))

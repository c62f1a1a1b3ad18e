"""`python -m plots [--results-dir DIR]`: draw all figures whose table exists, print their paths."""

import argparse
import sys

from harness.errors import UserError
from plots import main

parser = argparse.ArgumentParser(prog="python -m plots", description="Draw the figures from DIR/tables.")
parser.add_argument("--results-dir", default="results", metavar="DIR", help="figures go to DIR/figures")
try:
    print(*main(parser.parse_args().results_dir), sep="\n")
except UserError as error:
    sys.exit(f"error: {error}")

"""`python -m harness.paper.report`."""

import sys

from harness.paper.report.page import main

if __name__ == "__main__":
    sys.exit(main())

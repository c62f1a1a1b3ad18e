"""Entry point of a checkout. `--help` lists the settings.

    python run.py method=infinigen model=llama2-7b
    python run.py -m method=full,h2o,int4,infinigen
    python run.py experiment=accuracy

`harness.run.cli.main` does the work.
"""

import sys

from harness.__main__ import command

if __name__ == "__main__":
    sys.exit(command())

"""Entry point of a checkout: `python run.py method=infinigen`. `--help` lists the settings; the
work is in `harness`.

python run.py method=infinigen model=llama2-7b
python run.py -m method=full,h2o,int4,infinigen
python run.py grid=accuracy
"""

import sys

from harness.__main__ import command

if __name__ == "__main__":
    sys.exit(command())

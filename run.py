"""Entry point: `python run.py method=infinigen`. `--help` lists the settings; the work is in `harness`.

python run.py method=infinigen model=llama2-7b
python run.py -m method=full,h2o,int4,infinigen
python run.py grid=accuracy
"""

import sys

from harness.errors import interruptible


def main() -> int:
    """The command line; imported when it is called, so that Ctrl-C meanwhile is no traceback."""
    from harness.launch.cli import main
    from plots import draw_figures

    return main(sys.argv[1:], draw=draw_figures)


if __name__ == "__main__":
    sys.exit(interruptible(main))

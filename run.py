"""Entry point: `python run.py method=infinigen`. `--help` lists the settings; the work is in `harness`.

python run.py method=infinigen model=llama2-7b
python run.py -m method=full,h2o,int4,infinigen
python run.py grid=accuracy
"""

import sys
from pathlib import Path

from harness.launch.cli import main


def draw(results: Path) -> list[Path]:
    """The figures of a results folder; what draws them is imported when there is something to draw."""
    from plots import draw_figures

    return draw_figures(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], draw))

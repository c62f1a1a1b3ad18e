"""Dense layers of each method that are best for a budget on a model: `conf/tuned.yaml`.

    python -m harness.results.tuned results results/qwen2.5-coder-0.5b

writes the numbers of the models of these results folders into the file. They come from
`experiment=tune`, which scores every method with 0, 1 and 2 dense layers on `offline`, the
calibration text. Of the numbers with which a method has the budget, that with the least KL counts.
No other text is looked at, and sweeps read the file alone. So the texts of `experiment=board`
are scored with settings that were chosen without them.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from harness.errors import UserError, exit_code
from harness.files import write_atomic
from harness.results.columns import TableRow, read_table, where
from harness.results.metrics import EQUAL, KL
from harness.settings.own_method import shipped
from harness.settings.paths import CONF_DIR
from harness.settings.schema import options

FILE = CONF_DIR / "tuned.yaml"
HEADER = """\
# Dense layers of each method at a budget, by model: of 0, 1 and 2 layers with which it has the
# budget, the number with the least KL on `offline`, the calibration text. Written by `python -m
# harness.results.tuned RESULTS...` after `python run.py experiment=tune model=MODEL`.
# A method or model that is not here has none.
"""
ASKED = re.compile(r"(?:^|, )budget=([\d.]+)")
DENSE = re.compile(r"(?:^|, )dense_layers=(\d+)")
CODEC = re.compile(r"(?:^|, )codec=")
DenseLayers = dict[str, dict[str, dict[float, int]]]
"""The number by model, method and budget."""


def read() -> DenseLayers:
    """The numbers in `conf/tuned.yaml`."""
    return yaml.safe_load(FILE.read_text(encoding="utf-8")) or {}


def as_tuned(methods: Sequence[str], budgets: Sequence[float], model: str) -> list[list[Any]]:
    """`${as_tuned:${sweep.methods},[0.05,0.10],${model.name}}` in a sweep: [method, budget, dense
    layers] of each method at each budget."""
    of_model = read().get(model, {})
    found = []
    for method in methods:
        for budget in budgets:
            number = of_model.get(method, {}).get(budget, 0)
            found.append([method, f"nearest:{budget}", number])
    return found


def best_of(rows: Iterable[TableRow]) -> DenseLayers:
    """The numbers with the least KL of the rows of `experiment=tune`.

    Rows over a codec, rows without a budget, and methods at another budget than asked do not count.
    """
    found: DenseLayers = {}
    by_kl = sorted(where(rows, "metric", KL.name), key=itemgetter("value"))
    for row in by_kl:
        settings = row["settings"] or ""
        asked, given = ASKED.search(settings), DENSE.search(settings)
        if asked is None or CODEC.search(settings):
            continue
        if abs(row["budget"] - float(asked[1])) > EQUAL:
            continue
        if given is None and row["method"] not in options("method"):
            continue  # a method of one's own, whose file is not here
        number = given[1] if given else shipped(row["method"])[1]["dense_layers"]
        of_method = found.setdefault(row["model"], {}).setdefault(row["method"], {})
        of_method.setdefault(float(asked[1]), int(number))
    return found


def write(sources: Sequence[Path]) -> Path:
    """Write the numbers of the models in these results folders into `conf/tuned.yaml`.

    A method of the file that the folders lack keeps its numbers. Raises UserError for a folder
    without `tables/tune.csv`.
    """
    numbers = read() if FILE.exists() else {}
    for results in sources:
        table = results / "tables" / "tune.csv"
        if not table.is_file():
            raise UserError(f"{results}: has no tables/tune.csv; run experiment=tune first")
        for model, methods in best_of(read_table(table)).items():
            of_model = numbers.setdefault(model, {})
            for method, of_budgets in methods.items():
                of_model[method] = of_model.get(method, {}) | of_budgets
    write_atomic(FILE, HEADER + yaml.safe_dump(numbers, default_flow_style=None, width=200))
    return FILE


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and print its path; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.tuned", description="Write conf/tuned.yaml."
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS")
    args = parser.parse_args(argv)
    return exit_code(lambda: print(write(args.results)))


if __name__ == "__main__":
    sys.exit(main())

"""Dense layers of each method that are best for a size on a model: `conf/tuned.yaml`.

    python -m harness.results.tuned results results/qwen2.5-coder-0.5b

writes the numbers of the models of these results folders into the file. They come from
`experiment=tune`, which scores every method with 0, 1 and 2 dense layers on `offline`, the
calibration text. Of the numbers with which a method has the size, that with the least KL counts.
No other text is looked at, and sweeps read the file alone. So the texts of `experiment=board`
are scored with settings that were chosen without them.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.errors import UserError, exit_code
from harness.files import write_atomic
from harness.results.columns import TableRow, read_table
from harness.results.metrics import EQUAL, KL
from harness.settings.own_method import shipped
from harness.settings.paths import CONF_DIR
from harness.settings.schema import options

FILE = CONF_DIR / "tuned.yaml"
HEADER = """\
# Dense layers of each method at a size, by model: of 0, 1 and 2 layers with which it has the
# size, the number with the least KL on `offline`, the calibration text. Written by `python -m
# harness.results.tuned RESULTS...` after `python run.py experiment=tune model=MODEL`.
# A method or model that is not here has none.
"""
ASKED = re.compile(r"(?:^|, )size=([\d.]+)")
DENSE = re.compile(r"(?:^|, )num_exempt_layers=(\d+)")
CODEC = re.compile(r"(?:^|, )codec=")
DenseLayers = dict[str, dict[str, dict[float, int]]]
"""The number by model, method and size."""


def read() -> DenseLayers:
    """The numbers in `conf/tuned.yaml`."""
    return yaml.safe_load(FILE.read_text(encoding="utf-8")) or {}


def as_tuned(methods: Sequence[str], sizes: Sequence[float], model: str) -> list[list[Any]]:
    """`${as_tuned:${sweep.methods},[0.05,0.10],${model.name}}` in a sweep: [method, size, dense
    layers] of each method at each size."""
    of_model = read().get(model, {})
    cells = []
    for method in methods:
        for size in sizes:
            number = of_model.get(method, {}).get(size, 0)
            cells.append([method, f"nearest:{size}", number])
    return cells


def best_of(rows: Iterable[TableRow]) -> DenseLayers:
    """The numbers with the least KL of the rows of `experiment=tune`.

    Rows over a codec, rows without a size, and methods at another size than asked do not count.
    """
    least: dict[tuple[str, str, float], float] = {}
    found: DenseLayers = {}
    for row in rows:
        asked, number = _asked_size(row), _dense_layers(row)
        if row["metric"] != KL.name or asked is None or number is None:
            continue
        if abs(row["size"] - asked) > EQUAL:
            continue
        key = row["model"], row["method"], asked
        if row["value"] >= least.get(key, math.inf):
            continue
        least[key] = row["value"]
        of_method = found.setdefault(row["model"], {}).setdefault(row["method"], {})
        of_method[asked] = number
    return found


def _asked_size(row: TableRow) -> float | None:
    """The size in the words of the settings; None without one, and for rows over a codec."""
    settings = row["settings"] or ""
    asked = ASKED.search(settings)
    return float(asked[1]) if asked and not CODEC.search(settings) else None


def _dense_layers(row: TableRow) -> int | None:
    """The number in the words of the settings, else that of the method's file; None of a method of
    one's own."""
    given = DENSE.search(row["settings"] or "")
    if given:
        return int(given[1])
    if row["method"] not in options("method"):
        return None
    return int(shipped(row["method"])[1]["num_exempt_layers"])


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
            for method, of_sizes in methods.items():
                of_model[method] = of_model.get(method, {}) | of_sizes
    write_atomic(FILE, HEADER + _rendered(numbers))
    return FILE


def _rendered(numbers: Mapping[str, Mapping[str, Mapping[float, int]]]) -> str:
    """A line a method, sorted."""
    lines = []
    for model in sorted(numbers):
        lines.append(f"{model}:")
        for method in sorted(numbers[model]):
            of_sizes = numbers[model][method]
            shown = ", ".join(f"{size}: {of_sizes[size]}" for size in sorted(of_sizes))
            lines.append(f"  {method}: {{{shown}}}")
    return "\n".join(lines) + "\n"


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

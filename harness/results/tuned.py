"""Dense layers of each method that are best for a budget on a model: `conf/tuned.yaml`.

    python -m harness.results.tuned results results/qwen2.5-coder-0.5b

writes the numbers of the models of these results folders into the file. They come from
`experiment=tune`, which scores every method with 0, 1 and 2 dense layers on `offline`, the
calibration text. Of the numbers with which a method has the budget, that with the least KL counts.
No other text is looked at, and sweeps read the file alone. So the texts of `experiment=board`
are scored with settings that were chosen without them.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.errors import UserError, exit_code
from harness.files import write_atomic
from harness.results.columns import read_frame
from harness.results.metrics import EQUAL, KL
from harness.settings.own_method import shipped
from harness.settings.paths import CONF_DIR
from harness.settings.schema import options

FILE = CONF_DIR / "tuned.yaml"
HEADER = """\
# Dense layers of each method at a budget, by model: of 0, 1 and 2 layers with which it has the
# budget, the number with the least KL on `offline`, the calibration text. What is not here has 0.
# Written by `python -m harness.results.tuned RESULTS...` after `python run.py experiment=tune
# model=MODEL`.
"""


def read() -> dict[str, dict[str, dict[float, int]]]:
    """The numbers in `conf/tuned.yaml` by model, method and budget."""
    return yaml.safe_load(FILE.read_text(encoding="utf-8")) or {}


def as_tuned(methods: Sequence[str], budgets: Sequence[float], model: str) -> list[list[Any]]:
    """`${as_tuned:${sweep.methods},[0.05,0.10],${model.name}}` in a sweep: [method, budget, dense
    layers] of each method at each budget."""
    of_model = read().get(model, {})
    found = []
    for method in methods:
        for budget in budgets:
            found.append([method, f"nearest:{budget}", of_model.get(method, {}).get(budget, 0)])
    return found


def best_of(table: Path) -> Iterator[tuple[str, str, float, int]]:
    """Model, method, budget and the number with the least KL, of a table of `experiment=tune`.

    Rows over a codec, rows without a budget, and methods at another budget than asked do not count.
    """
    frame = read_frame(table)
    frame = frame[frame["metric"] == KL.name]
    settings = frame["settings"].str
    frame["asked"] = settings.extract(r"(?:^|, )budget=([\d.]+)", expand=False).astype(float)
    given = settings.extract(r"(?:^|, )dense_layers=(\d+)", expand=False).astype(float)
    frame["dense"] = given.fillna(frame["method"].map(_default))
    has_budget = (frame["budget"] - frame["asked"]).abs() <= EQUAL
    counts = has_budget & ~settings.contains(r"(?:^|, )codec=") & frame["dense"].notna()
    by_kl = frame[counts].sort_values("value").drop_duplicates(["model", "method", "asked"])
    columns = ["model", "method", "asked", "dense"]
    for model, method, asked, dense in by_kl[columns].to_numpy().tolist():
        yield model, method, asked, int(dense)


def _default(method: str) -> int | None:
    """Dense layers of a shipped method; None of one's own, whose file is not here."""
    return shipped(method)[1]["dense_layers"] if method in options("method") else None


def write(sources: Sequence[Path]) -> Path:
    """Write the numbers of the models in these results folders into `conf/tuned.yaml`.

    What the folders lack keeps its number. Raises UserError for a folder without `tables/tune.csv`.
    """
    numbers = read()
    for results in sources:
        table = results / "tables" / "tune.csv"
        if not table.is_file():
            raise UserError(f"{results}: has no tables/tune.csv; run experiment=tune first")
        for model, method, budget, number in best_of(table):
            of_method = numbers.setdefault(model, {}).setdefault(method, {})
            of_method[budget] = number
    write_atomic(FILE, HEADER + yaml.safe_dump(_without_zeros(numbers), default_flow_style=None))
    return FILE


def _without_zeros(numbers: Any) -> Any:
    """The nested mappings without zeros, and without what is empty then."""
    if not isinstance(numbers, dict):
        return numbers
    kept = {name: _without_zeros(value) for name, value in numbers.items()}
    return {name: value for name, value in kept.items() if value}


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

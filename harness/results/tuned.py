"""Dense layers of each method that are best for a budget on a model: `conf/tuned.yaml`.

They come from `experiment=tune`, which scores every method with 0, 1 and 2 dense layers on
`offline`, the calibration text. No other text is looked at, and sweeps read the file alone. So the
texts of `experiment=board` are scored with settings that were chosen without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from harness.results.columns import read_frame
from harness.results.metrics import EQUAL, KL
from harness.settings.own_method import shipped
from harness.settings.paths import CONF_DIR
from harness.settings.schema import options

if TYPE_CHECKING:
    import pandas as pd

FILE = CONF_DIR / "tuned.yaml"


def as_tuned(methods: Sequence[str], budgets: Sequence[float], model: str) -> list[list[Any]]:
    """`${as_tuned:${sweep.methods},[0.05,0.10],${model.name}}` in a sweep: [method, budget, dense
    layers] of each method at each budget."""
    of_model = yaml.safe_load(FILE.read_text(encoding="utf-8")).get(model, {})
    found = []
    for method in methods:
        for budget in budgets:
            found.append([method, f"nearest:{budget}", of_model.get(method, {}).get(budget, 0)])
    return found


def best_of(table: Path) -> pd.DataFrame:
    """Model, shipped method, asked budget and the number of dense layers with the least KL, of a
    table of `experiment=tune`: what is not 0 stands in the file.

    Rows over a codec, rows without a budget, and methods at another budget than asked do not count.
    """
    frame = read_frame(table)
    frame = frame[frame["metric"].eq(KL.name) & frame["method"].isin(options("method"))]
    settings = frame["settings"].str
    frame["asked"] = settings.extract(r"(?:^|, )budget=([\d.]+)", expand=False).astype(float)
    given = settings.extract(r"(?:^|, )dense_layers=(\d+)", expand=False).astype(float)
    of_file = frame["method"].map(lambda method: shipped(method)[1]["dense_layers"])
    frame["dense_layers"] = given.fillna(of_file)
    has_budget = (frame["budget"] - frame["asked"]).abs() <= EQUAL
    counts = has_budget & ~settings.contains(r"(?:^|, )codec=")
    best = frame[counts].sort_values("value").drop_duplicates(["model", "method", "asked"])
    return best[["model", "method", "asked", "dense_layers"]]

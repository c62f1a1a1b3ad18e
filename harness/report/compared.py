"""Published numbers of a figure or table, with ours beside them where a run has that setup."""

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import pandas as pd

from harness.paper.costmodel.published import FIGURES as TIMED_FIGURES
from harness.paper.costmodel.published import PaperBar, quantity
from harness.results.columns import published
from harness.results.metrics import MISSING, SEGMENTS

POINT = ["model", "series", "x_name", "x", "metric"]
"""What names a published number, and a row of an analysis table."""
BAR = list(PaperBar._fields)


def compared(figure: str, tables: Collection[pd.DataFrame]) -> pd.DataFrame:
    """The published numbers of a figure or table as words; empty columns are left out.

    tables: our own. Ours is missing where a row that it needs is absent, emulated, or there twice.
    """
    numbers = published()
    numbers = numbers[numbers["figure"] == figure].reset_index(drop=True)
    if numbers.empty or not tables:
        return pd.DataFrame()
    rows = pd.concat(tables, ignore_index=True)
    ours = (_of_runs if figure in TIMED_FIGURES else _of_points)(numbers, rows)
    ratio = ours / numbers["value"].astype(float)
    words = numbers[POINT].replace("_", " ", regex=True)
    setup = words["x_name"] + " " + words["x"]
    value = numbers["value"] + " " + numbers["unit"]
    frame = words[["model", "series"]].assign(
        setup=setup.str.strip().replace("", "all"),
        metric=words["metric"],
        published=value.str.strip(),
        kind=numbers["kind"],
        ours=ours.map("{:.4g}".format, na_action="ignore").fillna(MISSING),
        **{"ours / published": ratio.map("{:.2f}".format, na_action="ignore").fillna(MISSING)},
        note=numbers["note"],
    )
    return frame.loc[:, ~frame.isin(["", MISSING]).all()]


def _of_runs(numbers: pd.DataFrame, rows: pd.DataFrame) -> pd.Series:
    """The published quantities of timed runs, by the same arithmetic as the cost model's
    calibration."""
    timed = rows[rows["source"] != "emulated"].fillna({segment.name: 0 for segment in SEGMENTS})
    timed = timed.assign(total_len=timed["prompt_len"] + timed["gen_len"])
    once = timed.drop_duplicates(BAR, keep=False)
    by_bar: dict[Any, Any] = once.set_index(BAR).to_dict("index")

    def value(number: Any) -> Any:
        with suppress(KeyError):
            return quantity(number, by_bar.__getitem__)
        return None

    return numbers.apply(value, axis=1).astype(float)


def _of_points(numbers: pd.DataFrame, rows: pd.DataFrame) -> pd.Series:
    """The values of analysis rows at the points of published numbers."""
    if "series" not in rows:
        return pd.Series(float("nan"), numbers.index)
    points = numbers[POINT].assign(x=pd.to_numeric(numbers["x"], errors="coerce"))
    once = rows[[*POINT, "value"]].drop_duplicates(POINT, keep=False)
    return points.merge(once, on=POINT, how="left")["value"]

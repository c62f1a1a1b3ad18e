"""Published numbers of a figure or table, with ours beside them where a run has that setup."""

from collections.abc import Collection, Mapping
from typing import Any

import pandas as pd

from harness.paper.costmodel.published import FIGURES as TIMED_FIGURES
from harness.paper.costmodel.published import PaperBar, quantity
from harness.results.columns import PUBLISHED_CSV
from harness.results.metrics import MISSING, SEGMENTS

OURS = ["ours", "ours / published"]
POINT = ["model", "series", "x_name", "x", "metric"]
"""What names a published number, and a row of an analysis table."""


def compared(figure: str, tables: Collection[pd.DataFrame]) -> pd.DataFrame:
    """The published numbers of a figure or table as words; empty columns are left out.

    tables: our own. Ours is missing where a row that it needs is absent, emulated, or there twice.
    """
    numbers = pd.read_csv(PUBLISHED_CSV, dtype=str, keep_default_na=False)
    numbers = numbers[numbers["figure"] == figure].reset_index(drop=True)
    if numbers.empty or not tables:
        return pd.DataFrame()
    rows = pd.concat(tables, ignore_index=True)
    if figure in TIMED_FIGURES:
        ours = numbers.apply(_timed, axis=1, args=(rows,)).astype(float)
    else:
        ours = _of_points(numbers, rows)
    ratio = ours / numbers["value"].astype(float)
    words = numbers[POINT].replace("_", " ", regex=True)
    setup = words["x_name"] + " " + words["x"]
    value = numbers["value"] + " " + numbers["unit"]
    frame = pd.DataFrame({
        "model": words["model"],
        "series": words["series"],
        "setup": setup.str.strip().replace("", "all"),
        "metric": words["metric"],
        "published": value.str.strip(),
        "kind": numbers["kind"],
        "ours": ours.map("{:.4g}".format, na_action="ignore"),
        "ours / published": ratio.map("{:.2f}".format, na_action="ignore"),
        "note": numbers["note"],
    })  # fmt: skip
    frame[OURS] = frame[OURS].fillna(MISSING)
    return frame.loc[:, ~frame.isin(["", MISSING]).all()]


def _timed(number: Mapping[str, str], rows: pd.DataFrame) -> float | None:
    """The published quantity of timed runs, by the same arithmetic as the cost model's calibration;
    None where a run of it is missing."""

    def timed_row(bar: PaperBar) -> dict[str, Any]:
        is_bar = (
            rows["source"].ne("emulated")
            & rows["model"].eq(bar.model)
            & rows["label"].eq(bar.label)
            & rows["batch_size"].eq(bar.batch_size)
            & (rows["prompt_len"] + rows["gen_len"]).eq(bar.total_len)
        )
        (row,) = rows[is_bar].fillna({segment.name: 0 for segment in SEGMENTS}).to_dict("records")
        return row

    try:
        return quantity(number, timed_row)
    except ValueError:  # no row or several
        return None


def _of_points(numbers: pd.DataFrame, rows: pd.DataFrame) -> pd.Series:
    """The values of analysis rows at the points of published numbers; NaN for none or several."""
    if "series" not in rows:
        return pd.Series(float("nan"), numbers.index)
    points = numbers[POINT].assign(x=pd.to_numeric(numbers["x"], errors="coerce"))
    once = rows[[*POINT, "value"]].drop_duplicates(POINT, keep=False)
    return points.merge(once, on=POINT, how="left")["value"]

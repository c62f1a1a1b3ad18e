"""Figure 13: a method with and without skewing, as pairs of bars, from `fig13.csv`.

Accuracy by task, then KL to the full cache on texts. A pair is a run whose label ends in "without skewing"
and the skewed run of the same model and task nearest in size; the sizes stand below the bars, as two sizes
where they differ. The full cache, a dashed line over its group, comes from the same table or from
`fig11.csv`.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.tables import columns
from plots import bars, data, style

UNSKEWED = columns.WITHOUT_SKEWING
CONDITIONS = ("num_samples", "num_fewshot", "seq_len")
SETUP = ("model", "metric", "source")
AXES = {"acc": "accuracy (%)", "kl_nats": "KL(full || method) (nats)"}


def draw(tables: data.Tables, name: str) -> Figure | None:
    """The figure; None without `fig13.csv`, or where it has no run without skewing."""
    own, full = tables.accuracy(name), tables.accuracy("fig11")
    rows = data.of_metrics([own, full[full.label == style.FULL]], AXES)
    unskewed = rows.label.str.endswith(UNSKEWED)
    rows = rows[unskewed.groupby([rows[name] for name in SETUP]).transform("any").astype(bool)]
    return style.draw_rows(rows, SETUP, _draw_panel, note=style.error_note(rows))


def _draw_panel(axes: Axes, panel: pd.DataFrame) -> None:
    metric = panel.metric.iloc[0]
    factor = columns.METRICS[metric].factor
    pairs = _pairs(panel)
    values, errors = (factor * data.pivot(pairs, "pair", column) for column in ("value", "stderr"))
    bars.grouped(axes, values, errors=errors, groups=_names(pairs))
    for index, (_, pair) in enumerate(pairs.groupby("pair")):
        full = _alike(panel[panel.label == style.FULL], pair.iloc[0])
        for value in full.value[full.metric == "acc"].unique():  # its divergence from itself is 0
            ends = [index - 0.45, index + 0.45]
            axes.plot(ends, 2 * [factor * value], "--", color=style.BLACK, linewidth=1, label=style.FULL)
    axes.set(ylabel=AXES[metric])


def _pairs(panel: pd.DataFrame) -> pd.DataFrame:
    """The rows that form pairs, numbered in `pair`; an unskewed run without partner is a pair of one."""
    chosen = []
    unskewed = panel[panel.label.str.endswith(UNSKEWED)]
    for number, (_, row) in enumerate(unskewed.iterrows()):
        skewed = _alike(panel[panel.label == row.label.removesuffix(UNSKEWED)], row)
        nearest = (skewed["size"] - row["size"]).abs().sort_values(kind="stable").index[:1]
        chosen.append(pd.concat([row.to_frame().T.infer_objects(), skewed.loc[nearest]]).assign(pair=number))
    return pd.concat(chosen)


def _alike(rows: pd.DataFrame, row: pd.Series) -> pd.DataFrame:
    """The rows on the same task under the same conditions as `row`."""
    same = rows.task == row.task
    for name in CONDITIONS:
        same &= (rows[name] == row[name]) | (rows[name].isna() & pd.isna(row[name]))
    return rows[same]


def _names(pairs: pd.DataFrame) -> list[str]:
    names = []
    for _, pair in pairs.groupby("pair"):
        sizes = sorted({f"{100 * size:.0f}" for size in pair["size"]}, key=int)
        samples = data.describe(pair.iloc[0], ["num_samples"])
        names.append(f"{pair.task.iloc[0]}\nKV {' / '.join(sizes)} %\n{samples}")
    return names

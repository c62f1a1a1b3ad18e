"""The tables as frames that figures draw, their split into panels that never mix setups, and the
paper's numbers."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from harness.errors import UserError
from harness.results import columns
from harness.results.metrics import quantity
from harness.settings.paths import table_to_read

PAPER_PLATFORM = "a6000-pcie3"
"""The modelled platform that stands for the paper's machine."""
TIMED_SETUP = ("model", "platform", "source", "batch_size", "prompt_len", "gen_len")
"""The setup of a timed run."""
SHAPE = ("model", "batch_size", "prompt_len", "gen_len")
PREFILL, PREFILL_LEN = "prefill_len", r"(?:^|, )prefill_len=(\d+)"
"""A column of figures, and the setting that it is read off."""
PHRASES = {"kept": "{} tokens kept", PREFILL: "the first {} dense", "prefill": "prefill={}"}
"""How a value reads that no table has as a column."""


def read(results: Path, name: str) -> pd.DataFrame | None:
    """A table of a results folder, or the shipped one beside it; None where there is none.

    It has all columns of its shape: words are "" and numbers NaN where there is nothing. `value`
    and `stderr` are in the unit of the metric's heading. Further columns are `own`, whether a row
    is one's own among shipped ones, and of accuracy `prefill_len`, "" where it was not set. Raises
    UserError for a file that is no table of results.
    """
    path = table_to_read(results, f"{name}.csv")
    if path is None:
        return None
    table = columns.read_frame(path)
    shape = columns.shape_of(table.columns)
    table = table.reindex(columns=columns.TABLES[shape])
    if shape == "accuracy":
        prefill = table.settings.str.extract(PREFILL_LEN, expand=False).fillna("")
        table = table.assign(stderr=_paired_stderr(table), prefill_len=prefill)
    if "metric" in table:
        factor = table.metric.map(lambda metric: quantity(metric).factor).astype(float)
        table = table.assign(value=factor * table.value, stderr=factor * table.stderr)
    is_shipped = table.shipped != ""
    return table.assign(own=~is_shipped & bool(is_shipped.any()))


def _paired_stderr(table: pd.DataFrame) -> pd.Series:
    """The standard error of the difference to the full cache where the table has differences.

    The full cache itself, from which they are taken, then has none.
    """
    paired = table.difference.notna()
    measured = table.metric.replace("perplexity_full", "perplexity")
    of_same = paired.groupby([table.model, table.task, measured])
    compared = of_same.transform("any") & ~paired
    is_full = (table.method == "full") | (table.metric == "perplexity_full")
    stderr = table.stderr.where(~paired, table.difference_stderr)
    return stderr.mask(compared & is_full)


def split(frame: pd.DataFrame, setup: Sequence[str]) -> tuple[str, list[tuple[str, pd.DataFrame]]]:
    """Part the rows by the columns of `setup`, so that no panel mixes setups or sources.

    Returns words for what all setups share; title and rows of each setup in the order of the table.
    A title says what tells its setup from the others.
    """
    if frame.empty:
        return "", []
    varying = [name for name in setup if frame[name].nunique(dropna=False) > 1]
    shared = describe(frame.iloc[0], [name for name in setup if name not in varying])
    groups = frame.groupby(list(setup), sort=False, dropna=False)
    return shared, [(describe(group.iloc[0], varying), group) for _, group in groups]


def describe(row: pd.Series, names: Iterable[str]) -> str:
    """Words for the row's values in these columns, such as "opt-13b, batch 20", without empty
    ones."""
    known = [name for name in names if row[name] != "" and not pd.isna(row[name])]
    phrases = {name: PHRASES.get(name, columns.column(name).phrase) for name in known}
    return ", ".join(filter(None, (phrases[name].format(row[name]) for name in known)))


def of_metrics(rows: pd.DataFrame, metrics: Iterable[str]) -> pd.DataFrame:
    """The rows of these metrics, in the order of the metrics."""
    return pd.concat([rows[rows.metric == metric] for metric in metrics], ignore_index=True)


def budget_range(rows: pd.DataFrame) -> str:
    """The least and the largest budget in percent, once where they are equal."""
    least, most = f"{100 * rows['budget'].min():.0f}", f"{100 * rows['budget'].max():.0f}"
    return least if least == most else f"{least} to {most}"


def refuse_repeats(frame: pd.DataFrame, key: Sequence[str]) -> None:
    """Refuse two rows for one mark of a figure, since neither is better than the other."""
    for _, row in frame[frame.duplicated(list(key), keep=False)].head(1).iterrows():
        shape = describe(row, [name for name in SHAPE if name in row])
        raise UserError(
            f"{row.experiment}: several rows with label={row.label} at {shape}: "
            "give each setting a label of its own"
        )


def of_paper(figure: str) -> pd.DataFrame:
    """The paper's numbers for a figure or table; `value` is a number, all else is words."""
    numbers = columns.published()
    return numbers[numbers.figure == figure].astype({"value": float})


def published(
    figure: str, metric: str, panel: pd.DataFrame, setup: Mapping[str, object]
) -> pd.DataFrame:
    """The paper's numbers for a panel in the paper's `setup` (column: value), else no rows.

    They are `value` of the label `series` at `x`, a number or a model. Only a panel measured, or
    modelled for the paper's machine, has them; an emulated panel never has.
    """
    of_paper_machine = (panel.source == "modelled") & (panel.get("platform") == PAPER_PLATFORM)
    is_known = ((panel.source == "measured") | of_paper_machine).all()
    for name, value in setup.items():
        is_known = is_known and (panel[name] == value).all()
    rows = of_paper(figure)
    models = list(panel.model) if is_known else []
    rows = rows[(rows.metric == metric) & rows.model.isin(models)]
    numbers = pd.to_numeric(rows.x, errors="coerce").astype(object)
    return rows.assign(x=numbers.fillna(rows.x))

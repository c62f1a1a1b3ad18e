"""The tables as data frames, their split into panels that never mix setups, and the paper's
numbers."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import UserError, printable, shortened
from harness.results import columns

PAPER_PLATFORM = "a6000-pcie3"
"""The modelled platform that stands for the paper's machine."""
NAMES = (columns.LABEL.name, columns.MODEL.name, "series", "task")
"""Columns of words that figures show."""
MAX_LETTERS = 44
NARROW_SPACE = "\u2009"
TIMED_SETUP = ("model", "platform", "source", "batch_size", "prompt_len", "gen_len")
"""The setup of a timed run."""
SHAPE = ("model", "batch_size", "prompt_len", "gen_len")
PHRASES = {"kept": "{} tokens kept"}
"""How a value reads that no table has as a column."""


class Tables:
    """The CSV files of one folder. An absent table reads as a table without rows; extra columns are
    kept.

    Raises:
        UserError: on reading, a file that lacks a needed column or is no table of results.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._shown: dict[str, str] = {}
        """The name in figures, by the name in the tables."""

    def accuracy(self, name: str) -> pd.DataFrame:
        """Rows of (model, label, task, metric). Numbers are floats; an empty cell is NaN.

        `stderr` is that of the difference to the full cache where the table has differences. The
        full cache itself, from which they are taken, then has none.
        """
        rows = self.read(name, columns.ACCURACY)
        paired = rows.difference.notna()
        measured = rows.metric.replace("perplexity_full", "perplexity")
        compared = paired.groupby([rows.model, rows.task, measured], dropna=False).transform("any")
        full = compared & ~paired & ((rows.method == "full") | (rows.metric == "perplexity_full"))
        return rows.assign(stderr=rows.stderr.where(~paired, rows.difference_stderr).mask(full))

    def read(self, name: str, expected: Sequence[columns.Column]) -> pd.DataFrame:
        """The rows of a table, with all of the `expected` columns."""
        path = self.folder / f"{name}.csv"
        rows = columns.read_table(path) if path.exists() else []
        needed = columns.names(expected)
        for column in set(needed).difference(rows[0], columns.OPTIONAL) if rows else ():
            raise UserError(f"{path}: no column {column}; make the table anew")
        frame = pd.DataFrame(
            rows, columns=list(dict.fromkeys([*needed, *(rows[0] if rows else ())]))
        )
        numbers = {column.name: float for column in expected if column.digits is not None}
        frame = frame.where(frame != "").astype(numbers)
        names = [name for name in NAMES if name in needed]
        return frame.assign(
            **{name: frame[name].map(self._legible, na_action="ignore") for name in names}
        )

    def _legible(self, name: str) -> str:
        """The name as a legend can show it: one line of at most `MAX_LETTERS`, unlike any other
        name, and not beginning with an underscore, since matplotlib leaves such names out."""
        if name not in self._shown:
            shown = shortened(printable(name), MAX_LETTERS)
            shown = f"{NARROW_SPACE}{shown}" if shown.startswith("_") else shown
            while shown in self._shown.values():
                shown += "'"
            self._shown[name] = shown
        return self._shown[name]


def split(frame: pd.DataFrame, setup: Sequence[str]) -> tuple[str, list[tuple[str, pd.DataFrame]]]:
    """Part the rows by the columns of `setup`, so that different setups or sources never share a
    panel unmarked.

    Returns:
        Words for what all setups share; title and rows of each setup in the order of the table. A
        title says what tells its setup from the others.
    """
    varying = [name for name in setup if frame[name].nunique(dropna=False) > 1]
    shared = describe(frame.iloc[0], [name for name in setup if name not in varying])
    frames = [group for _, group in frame.groupby(list(setup), sort=False, dropna=False)]
    return shared, [(describe(group.iloc[0], varying), group) for group in frames]


def describe(row: Mapping[Any, Any] | pd.Series, names: Sequence[str]) -> str:
    """Words for the row's values in the columns `names`, such as "opt-13b, batch 20"; empty cells
    are left out."""
    phrases = {name: PHRASES.get(name, columns.column(name).phrase) for name in names}
    texts = (phrase.format(row[name]) for name, phrase in phrases.items() if not pd.isna(row[name]))
    return ", ".join(text for text in texts if text)


def of_metrics(rows: pd.DataFrame, metrics: Iterable[str]) -> pd.DataFrame:
    """The rows of these metrics, in the order of the metrics."""
    return pd.concat([rows[rows.metric == metric] for metric in metrics], ignore_index=True)


def whole_texts(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of an accuracy table that are not of a chunk of their text."""
    return table[~table.task.str.endswith("]")]


def pivot(frame: pd.DataFrame, index: str, value: str) -> pd.DataFrame:
    """A row per value of `index`, a column per label; NaN where the table has no row.

    Raises:
        UserError: two rows for one cell.
    """
    refuse_repeats(frame, [index, "label"])
    return frame.pivot(index=index, columns="label", values=value)


def refuse_repeats(frame: pd.DataFrame, key: Sequence[str]) -> None:
    """Refuse two rows for one mark of a figure, since neither is better than the other."""
    repeated = frame[frame.duplicated(list(key), keep=False)]
    if len(repeated):
        row = repeated.iloc[0]
        shape = [name for name in SHAPE if name in row]
        raise UserError(
            f"{row.experiment}: several rows with label={row.label} at {describe(row, shape)}: "
            "give each setting a label of its own"
        )


def of_paper(figure: str) -> pd.DataFrame:
    """All rows of the paper's numbers for a figure or table; `value` is a number, all else is
    words."""
    rows = pd.DataFrame(columns.published_rows())
    return rows[rows.figure == figure].astype({"value": float})


def published(
    figure: str, metric: str, panel: pd.DataFrame, setup: Mapping[str, object]
) -> pd.DataFrame:
    """The paper's numbers for a panel in the paper's `setup` (column: value), else no rows: `value`
    of the label `series` at `x`, a number or a model.

    Only a panel measured, or modelled for the paper's machine, has them; an emulated panel never
    has.
    """
    on_gpu = (panel.source == "measured") | (
        (panel.source == "modelled") & (panel.get("platform") == PAPER_PLATFORM)
    )
    known = bool(on_gpu.all()) and all(
        (panel[name] == value).all() for name, value in setup.items()
    )
    rows = of_paper(figure)
    rows = rows[(rows.metric == metric) & rows.model.isin(panel.model if known else [])]
    return rows.assign(x=pd.to_numeric(rows.x, errors="coerce").astype(object).fillna(rows.x))

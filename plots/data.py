"""The tables as data frames, their split into panels that never mix setups, and the paper's
numbers."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import UserError, printable, shortened
from harness.results import columns
from harness.results.metrics import Metric
from harness.settings.paths import table_to_read

PAPER_PLATFORM = "a6000-pcie3"
"""The modelled platform that stands for the paper's machine."""
NAMES = ("label", "model", "series", "task")
"""Columns of words that figures show."""
OWN, SHIPPED = "own", "shipped"
"""Columns: whether a row is one's own among shipped ones, and whether it is shipped."""
MAX_LETTERS = 44
NARROW_SPACE = "\u2009"
TIMED_SETUP = ("model", "platform", "source", "batch_size", "prompt_len", "gen_len")
"""The setup of a timed run."""
SHAPE = ("model", "batch_size", "prompt_len", "gen_len")
Parts = list[tuple[str, pd.DataFrame]]
"""Rows of a table, with a title."""
PREFILL, PREFILL_LEN = "prefill_len", r"(?:^|, )prefill_len=(\d+)"
"""A column of accuracy's rows, and the setting that it is read off."""
PHRASES = {"kept": "{} tokens kept", PREFILL: "the first {} dense"}
"""How a value reads that no table has as a column."""


class Tables:
    """The CSV files of one folder, and the shipped ones beside it. An absent table reads as a table
    without rows; extra columns are kept.

    Raises:
        UserError: on reading, a file that lacks a needed column or is no table of results.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._shown: dict[str, str] = {}
        """The name in figures, by the name in the tables."""

    def accuracy(self, name: str) -> pd.DataFrame:
        """Rows of (model, label, task, metric). Numbers are floats, NaN where there is none.

        `stderr` is that of the difference to the full cache where the table has differences. The
        full cache itself, from which they are taken, then has none. `prefill_len` is that of the
        run's settings, NaN where they have none.
        """
        rows = self.read(name, columns.ACCURACY)
        rows[PREFILL] = rows.settings.astype("object").str.extract(PREFILL_LEN, expand=False)
        paired = rows.difference.notna()
        measured = rows.metric.replace("perplexity_full", "perplexity")
        groups = paired.groupby([rows.model, rows.task, measured], dropna=False)
        compared = groups.transform("any") & ~paired
        is_full = (rows.method == "full") | (rows.metric == "perplexity_full")
        stderr = rows.stderr.where(~paired, rows.difference_stderr)
        return rows.assign(stderr=stderr.mask(compared & is_full))

    def read(self, name: str, expected: Sequence[Metric]) -> pd.DataFrame:
        """The rows of a table, with all of the `expected` columns.

        `own` is true of one's own runs in a table that has shipped rows, too.
        """
        path = table_to_read(self.folder.parent, f"{name}.csv")
        rows = [] if path is None else columns.read_table(path)
        needed = columns.names(expected)
        header = list(rows[0]) if rows else list(needed)
        for column in needed:
            if column not in header and column not in columns.OPTIONAL:
                raise UserError(f"{path}: no column {column}; make the table anew")
        frame = pd.DataFrame(rows, columns=list(dict.fromkeys([*needed, *header])))
        numbers = {column.name: float for column in expected if column.digits is not None}
        frame = frame.where(frame != "").astype(numbers)
        if SHIPPED in frame:
            frame[OWN] = frame[SHIPPED].isna() & bool(frame[SHIPPED].notna().any())
        for name in NAMES:
            if name in needed:
                frame[name] = frame[name].map(self._legible, na_action="ignore")
        return frame

    def _legible(self, name: str) -> str:
        """The name as a legend can show it: one line of at most `MAX_LETTERS`, unlike any other.

        It does not begin with an underscore, since matplotlib leaves such names out.
        """
        if name not in self._shown:
            shown = shortened(printable(name), MAX_LETTERS)
            shown = f"{NARROW_SPACE}{shown}" if shown.startswith("_") else shown
            while shown in self._shown.values():
                shown += "'"
            self._shown[name] = shown
        return self._shown[name]


def split(frame: pd.DataFrame, setup: Sequence[str]) -> tuple[str, Parts]:
    """Part the rows by the columns of `setup`, so that no panel mixes setups or sources.

    Returns:
        Words for what all setups share; title and rows of each setup in the order of the table. A
        title says what tells its setup from the others.
    """
    varying = [name for name in setup if frame[name].nunique(dropna=False) > 1]
    shared = describe(frame.iloc[0], [name for name in setup if name not in varying])
    panels = []
    for _, group in frame.groupby(list(setup), sort=False, dropna=False):
        panels.append((describe(group.iloc[0], varying), group))
    return shared, panels


def describe(row: Mapping[Any, Any] | pd.Series, names: Sequence[str]) -> str:
    """Words for the row's values in these columns, such as "opt-13b, batch 20", without empty
    ones."""
    words = []
    for name in names:
        if not pd.isna(row[name]):
            phrase = PHRASES.get(name, columns.column(name).phrase)
            words.append(phrase.format(row[name]))
    return ", ".join(filter(None, words))


def of_metrics(rows: pd.DataFrame, metrics: Iterable[str]) -> pd.DataFrame:
    """The rows of these metrics, in the order of the metrics."""
    parts = [rows[rows.metric == metric] for metric in metrics]
    return pd.concat(parts, ignore_index=True)


def stderr_of_mean(errors: pd.Series) -> float:
    """The standard error of a mean of independent values with these."""
    return float((errors**2).sum() ** 0.5 / len(errors))


def budget_range(rows: pd.DataFrame) -> str:
    """The least and the largest budget in percent, once where they are equal."""
    least, most = f"{100 * rows['budget'].min():.0f}", f"{100 * rows['budget'].max():.0f}"
    return least if least == most else f"{least} to {most}"


def whole_texts(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of an accuracy table that are not of a chunk of their text."""
    return table[~table.task.str.endswith("]")]


def pivot(frame: pd.DataFrame, index: str, value: str) -> pd.DataFrame:
    """A row per value of `index`, a column per label; NaN where the table has no row.

    Raises:
        UserError: two rows for one value and label.
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
    """The paper's numbers for a figure or table; `value` is a number, all else is words."""
    rows = pd.DataFrame(columns.published_rows())
    return rows[rows.figure == figure].astype({"value": float})


def published(
    figure: str, metric: str, panel: pd.DataFrame, setup: Mapping[str, object]
) -> pd.DataFrame:
    """The paper's numbers for a panel in the paper's `setup` (column: value), else no rows.

    They are `value` of the label `series` at `x`, a number or a model. Only a panel measured, or
    modelled for the paper's machine, has them; an emulated panel never has.
    """
    modelled = panel.source == "modelled"
    of_paper_machine = modelled & (panel.get("platform") == PAPER_PLATFORM)
    is_known = ((panel.source == "measured") | of_paper_machine).all()
    for name, value in setup.items():
        is_known = is_known and (panel[name] == value).all()
    rows = of_paper(figure)
    models = list(panel.model) if is_known else []
    rows = rows[(rows.metric == metric) & rows.model.isin(models)]
    numbers = pd.to_numeric(rows.x, errors="coerce").astype(object)
    return rows.assign(x=numbers.fillna(rows.x))

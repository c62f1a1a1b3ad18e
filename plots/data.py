"""The tables as data frames, and their split into panels that never mix setups."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from harness.errors import UserError

ACCURACY_COLUMNS = (
    "experiment", "model", "method", "label", "task", "metric", "value", "stderr", "num_samples",
    "num_fewshot", "seq_len", "kv_frac", "source",
)  # fmt: skip
LATENCY_COLUMNS = (
    "experiment", "platform", "source", "model", "label", "batch_size", "prompt_len", "gen_len", "prefill_s",
    "decode_s", "total_s",
)  # fmt: skip
SEGMENT_COLUMNS = ("attention_s", "ffn_s", "prediction_s", "transfer_s", "other_s")
WORDS = ("platform", "source", "model", "method", "label", "task", "metric", "experiment", "run_id")

SHAPE = ("model", "batch_size", "prompt_len", "gen_len")

PUBLISHED = Path(__file__).parent / "reference" / "published.csv"

NAMES = {
    "num_samples": "n = {:,.0f}",
    "num_fewshot": "{:.0f}-shot",
    "seq_len": "{:,.0f} tokens",
    "batch_size": "batch {:.0f}",
    "prompt_len": "prompt {:,.0f}",
    "gen_len": "{:,.0f} generated",
    "source": "source: {}",
    "metric": "",  # said by the axis
}


class Tables:
    """The CSV files of one folder. A table that is absent reads as one without rows; extra columns are kept.

    Raises:
        UserError: on reading, a file that lacks a needed column or is no table of results.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def accuracy(self, name: str) -> pd.DataFrame:
        """Rows of (model, label, task, metric); numbers are floats, an empty cell is NaN."""
        return self._read(name, ACCURACY_COLUMNS)

    def latency(self, name: str, segments: bool = False) -> pd.DataFrame:
        """Rows of (source, model, shape, label) in seconds, with the segments of a block where asked."""
        return self._read(name, LATENCY_COLUMNS + (SEGMENT_COLUMNS if segments else ()))

    def _read(self, name: str, columns: Sequence[str]) -> pd.DataFrame:
        path = self.folder / f"{name}.csv"
        types = {column: str if column in WORDS else float for column in (*WORDS, *columns)}
        if not path.exists():
            return pd.DataFrame({column: pd.Series(dtype=types[column]) for column in columns})
        try:
            frame = pd.read_csv(path, dtype=types)
        except (ValueError, OSError) as error:
            raise UserError(f"{path}: not a table of results ({str(error).splitlines()[0]})") from error
        missing = [column for column in columns if column not in frame]
        if missing:
            raise UserError(f"{path}: no column {missing[0]}; make the table anew")
        return frame


class Panels(NamedTuple):
    """One data frame per setup, its title naming what tells it from the others; `shared` names the rest."""

    shared: str
    titles: list[str]
    frames: list[pd.DataFrame]


def split(frame: pd.DataFrame, setup: Sequence[str]) -> Panels:
    """Part the rows by the columns of `setup`, in the order in which the table has them.

    Values measured under different setups, sources among them, thus never share a panel unmarked.
    """
    varying = [name for name in setup if frame[name].nunique(dropna=False) > 1]
    shared = describe(frame.iloc[0], [name for name in setup if name not in varying])
    frames = [group for _, group in frame.groupby(list(setup), sort=False, dropna=False)]
    return Panels(shared, [describe(group.iloc[0], varying) for group in frames], frames)


def describe(row: Mapping[Any, Any] | pd.Series, columns: Sequence[str]) -> str:
    """Words for the row's values in `columns`, such as "opt-13b, batch 20"; an empty cell is left out."""
    texts = (NAMES.get(name, "{}").format(row[name]) for name in columns if not pd.isna(row[name]))
    return ", ".join(text for text in texts if text)


def sweep(frame: pd.DataFrame, axis: str, setup: Sequence[str]) -> pd.DataFrame:
    """The rows of the widest sweep over `axis`: those setups that have the most values of it, by model and source."""
    machine = [name for name in ("model", "platform", "source") if name in setup]
    points = frame.groupby(list(setup), dropna=False)[axis].transform("nunique")
    return frame[points == points.groupby([frame[name] for name in machine]).transform("max")]


def pivot(frame: pd.DataFrame, index: str, value: str) -> pd.DataFrame:
    """A row per value of `index`, a column per label; NaN where the table has no row.

    Raises:
        UserError: two rows for one cell.
    """
    refuse_repeats(frame, [index, "label"])
    return frame.pivot(index=index, columns="label", values=value)


def refuse_repeats(frame: pd.DataFrame, key: Sequence[str]) -> None:
    """Refuse two rows for one bar: none of them is better than the other.

    Raises:
        UserError: names the label and the shape.
    """
    repeated = frame[frame.duplicated(list(key), keep=False)]
    if len(repeated):
        row = repeated.iloc[0]
        raise UserError(
            f"{row.experiment}: several rows with label={row.label} at {describe(row, SHAPE)}: "
            "give each setting a label of its own"
        )


class Point(NamedTuple):
    """A number the paper gives for a label at `x`, in the unit of `reference/published.csv`."""

    label: str
    x: float
    value: float


def published(figure: str, metric: str, panel: pd.DataFrame, setup: Mapping[str, object]) -> list[Point]:
    """The paper's numbers for a panel that was measured in the paper's `setup` (column: value), else none.

    An emulated or modelled panel never has them, nor does another model or shape.
    """
    wanted = {"source": "measured", **setup}
    if not all((panel[name] == value).all() for name, value in wanted.items()):
        return []
    table = pd.read_csv(PUBLISHED)
    rows = table[(table.figure == figure) & (table.metric == metric) & table.model.isin(panel.model)]
    return [Point(*cells) for cells in zip(rows.series, rows.x.astype(float), rows.value, strict=True)]

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
ANALYSIS_COLUMNS = (
    "experiment", "model", "series", "layer", "x_name", "x", "metric", "value", "stderr", "source", "run_id",
)  # fmt: skip
SEGMENT_COLUMNS = ("attention_s", "ffn_s", "prediction_s", "transfer_s", "other_s")
PAPER_PLATFORM = "a6000-pcie3"
"""The modelled platform that stands for the paper's machine."""
WORDS = (
    "platform", "source", "model", "method", "label", "task", "metric", "experiment", "run_id", "series", "x_name",
)  # fmt: skip

FAR = 2
SHAPE = ("model", "batch_size", "prompt_len", "gen_len")

PUBLISHED = Path(__file__).resolve().parents[1] / "harness" / "tables" / "published.csv"

NAMES = {
    "num_samples": "n = {:,.0f}",
    "num_fewshot": "{:.0f}-shot",
    "seq_len": "{:,.0f} tokens",
    "batch_size": "batch {:.0f}",
    "prompt_len": "prompt {:,.0f}",
    "gen_len": "{:,.0f} generated",
    "source": "source: {}",
    "layer": "layer {:.0f}",
    "kept": "{} tokens kept",
    "run_id": "run {}",
    "metric": "",  # said by the axis, as is x_name
    "x_name": "",
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

    def latency(self, name: str) -> pd.DataFrame:
        """Rows of (source, model, shape, label) in seconds, the segments of a block among them."""
        return self._read(name, LATENCY_COLUMNS + SEGMENT_COLUMNS)

    def analysis(self, name: str) -> pd.DataFrame:
        """Rows of (model, run_id, metric, series, layer, x); numbers are floats, an empty cell is NaN."""
        return self._read(name, ANALYSIS_COLUMNS)

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


def with_close_ups(panels: Panels) -> Panels:
    """The panels; beside one where a label takes over `FAR` times as long as offload, another of offload and what is
    never slower, whose bars the first shows too small."""
    titles, frames = [], []
    for title, frame in zip(panels.titles, panels.frames, strict=True):
        longest = frame.groupby("label").total_s.max()
        offload = longest.get("offload", float("nan"))
        titles.append(title)
        frames.append(frame)
        if longest.max() > FAR * offload:
            titles.append(", ".join(filter(None, [title, "offload and faster"])))
            frames.append(frame[frame.label.map(longest) <= offload])
    return Panels(panels.shared, titles, frames)


def describe(row: Mapping[Any, Any] | pd.Series, columns: Sequence[str]) -> str:
    """Words for the row's values in `columns`, such as "opt-13b, batch 20"; an empty cell is left out."""
    texts = (NAMES.get(name, "{}").format(row[name]) for name in columns if not pd.isna(row[name]))
    return ", ".join(text for text in texts if text)


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
    """A number the paper gives for a label at `x` (a number, or a model), in the unit of `published.csv`.

    kind: `quoted`, `derived` by arithmetic, or `approximate`.
    """

    label: str
    x: float | str
    value: float
    kind: str


def published(figure: str, metric: str, panel: pd.DataFrame, setup: Mapping[str, object]) -> list[Point]:
    """The paper's numbers for a panel in the paper's `setup` (column: value), else none.

    The panel is measured, or modelled for the paper's machine; an emulated one never has them, nor does another model
    or shape.
    """
    on_gpu = (panel.source == "measured") | ((panel.source == "modelled") & (panel.get("platform") == PAPER_PLATFORM))
    if not on_gpu.all() or not all((panel[name] == value).all() for name, value in setup.items()):
        return []
    table = pd.read_csv(PUBLISHED)
    rows = table[(table.figure == figure) & (table.metric == metric) & table.model.isin(panel.model)]
    numbers = pd.to_numeric(rows.x, errors="coerce").astype(object)
    return [Point(*cells) for cells in zip(rows.series, numbers.fillna(rows.x), rows.value, rows.kind, strict=True)]

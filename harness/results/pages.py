"""The sheets that a table is shown as: on its page, in the report, and in a terminal, which has the
most important columns alone.

Frames of records and of a CSV give the same texts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import partial

import numpy as np
import pandas as pd

from harness.results import board, columns, metrics
from harness.results.columns import shape_of
from harness.results.metrics import (
    BUDGET,
    DEVICE_FRAC,
    LABEL,
    MISSING,
    NUM_DEPTHS,
    RESIDENT_FRAC,
    SETTINGS,
    Metric,
    quantity,
)
from harness.results.sheet import (
    NOTES,
    OF_WINDOWS,
    Sheet,
    mark_own,
    markdown,
    note,
    show_cell,
    show_range,
    terminal,
    texts_of,
    with_intervals,
    wrapped,
)
from harness.settings.config import SamplingConfig, TaskConfig
from harness.settings.kinds import KINDS

KEY = ["task", "metric"]
"""Of a column of accuracy."""
BRIEF = (
    "kl_nats", "perplexity", "acc", "exact_match", "text_perplexity", "first_divergence",
    "repetition", *metrics.LENGTHS,
)  # fmt: skip
"""Metrics of `METRICS` that a terminal shows, beside those that lm-eval alone knows."""
BRIEF_SPEED = (
    "batch_size", "prompt_len", "gen_len", "budget", "unmet_budget",
    "ttft_s", "tokens_per_s", "tpot_p50_s", "h2d_bytes", "peak_device_bytes",
)  # fmt: skip
"""Numbers of a timed run that a terminal shows."""
MAX_COLUMNS = 6
"""Values of x that a page shows of an analysis."""
PUBLISHED_HEADER = ["model", "series", "x_name", "x", "metric", "value", "kind"]


def sheets_of(frame: pd.DataFrame) -> Iterator[Sheet]:
    """The sheets of a table: one per model and source; none for the plain tables behind the board.

    Chunks of texts stand below whole ones, each quantity of an analysis apart. One's own runs among
    shipped ones are marked.
    """
    shape = shape_of(frame.columns)
    if shape == "board":
        yield from board.sheets_of_boards(frame)
    if frame.empty or shape.startswith("board"):
        return
    for title, of_title in frame.groupby(_titles(frame), sort=False):
        marked, notes = mark_own(of_title, "series" if shape == "analysis" else "label")
        for sheet in SHEETS[shape](str(title), marked):
            yield sheet._replace(notes=[*sheet.notes, *notes])


def _titles(frame: pd.DataFrame) -> pd.Series:
    """The model of each row, and of timed runs where their numbers are from."""
    if "platform" not in frame:
        return frame["model"]
    modelled = frame["model"] + " on " + frame["platform"] + ", modelled"
    timed = frame["model"] + ", " + frame["source"]
    return timed.mask(frame["source"].eq("modelled"), modelled)


def sheets_of_page(name: str, frame: pd.DataFrame) -> list[Sheet]:
    """The sheets of a table, then the numbers that papers give for the figure of its name."""
    sheets = list(sheets_of(frame))
    published = columns.published().query("figure == @name")[PUBLISHED_HEADER]
    if len(published):
        sheets.append(Sheet("published numbers", published.replace("", MISSING)))
    return sheets


def render_markdown(name: str, frame: pd.DataFrame) -> str:
    """The whole `.md` file of a table."""
    special = (words for words in ("capacity", "modelled") if name.endswith(words))
    words = next(special, shape_of(frame.columns))
    return markdown(name, note(words, max_columns=MAX_COLUMNS), sheets_of_page(name, frame))


def render_terminal(frame: pd.DataFrame) -> str:
    """A table for a terminal, a sheet for each experiment, with the most important columns; ""
    without rows."""
    is_accuracy = shape_of(frame.columns) == "accuracy"
    shown = _brief_accuracy(frame) if is_accuracy else frame
    if is_accuracy or frame.get("largest_batch", pd.Series()).isna().all():
        shown = shown.drop(columns=NOT_BRIEF, errors="ignore")
    texts = []
    for experiment, rows in shown.groupby("experiment", sort=False):
        for sheet in sheets_of(rows):
            table = sheet.table.replace(MISSING, None).dropna(axis=1, how="all").fillna(MISSING)
            title = f"{experiment}, {sheet.title}"
            texts.append(terminal(sheet._replace(title=title, table=table)))
    if is_accuracy and texts:
        texts.append(wrapped(NOTES["terminal"]))
    return "\n\n".join(texts)


def _brief_accuracy(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of whole texts and tasks and of the most important metrics, if there are any."""
    whole = columns.whole_tasks(frame)
    metric = _unfiltered(whole)
    brief = whole[metric.isin(BRIEF) | ~metric.isin(metrics.METRICS)]
    return brief if len(brief) else whole


# Settings

SIZES = {*KINDS["perplexity"].depends_on} ^ {*KINDS["tasks"].depends_on} | {"seed"}
"""Settings of texts and tasks alone, such as `num_windows`: no part of a method."""
SIZES |= {field.name for group in (TaskConfig, SamplingConfig) for field in fields(group)}


def _parts(settings: pd.Series) -> pd.Series:
    """The settings of each row, `a=[1, 2], b=3`, a row for each of them."""
    parts = settings.str.split(r", (?=[\w.]+=)", regex=True).explode()
    return parts[parts.ne("")]


def _joined(parts: pd.Series, index: pd.Index) -> pd.Series:
    """`_parts` as settings of the rows of `index`, "" for a row without any."""
    return parts.groupby(level=0).agg(", ".join).reindex(index, fill_value="")


def varied(settings: pd.Series, by: pd.Series, *, only_sizes: bool = False) -> pd.Series:
    """Settings without the parts that all of a group share. only_sizes: other parts stay."""
    parts = _parts(settings)
    num_rows = by.groupby(by).transform("size")
    num_with = parts.groupby([by.reindex(parts.index), parts]).transform("size")
    is_shared = num_with.eq(num_rows.reindex(parts.index))
    if only_sizes:
        is_shared &= parts.str.extract(r"([^.=]*)", expand=False).isin(SIZES)
    return _joined(parts[~is_shared], settings.index)


def _told_apart(rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The rows with the settings `own` of their line that not all lines share, and a note on those
    that no line shows."""
    own = rows["own"]
    if rows["line"].nunique() > 1:
        own = varied(own, pd.Series(0, own.index))
    shown = {*_parts(own)}
    shared = [part for part in _parts(rows["settings"]).unique() if part not in shown]
    notes = [f"Settings of all runs: {', '.join(shared)}."] if shared else []
    return rows.assign(settings=own), notes


def _with_values(shown: Iterable[Metric], frame: pd.DataFrame) -> list[Metric]:
    """The columns in which any row has a number."""
    return [column for column in shown if column.name in frame and frame[column.name].notna().any()]


# Accuracy: a line per method and settings, a column per task and metric


def lines_of(frame: pd.DataFrame) -> pd.DataFrame:
    """Accuracy rows in the order of the lines that they make, the full cache first, the others by
    label, budget, length and settings. Runs of a method on texts and on tasks share a line.

    Adds the number of the `line`, and `own`: its settings, which are the method's, and those in
    which the runs of a column differ. Two runs on one task with the same settings have a line each.
    """
    column = frame.groupby(KEY).ngroup()
    rows = with_intervals(frame)
    rows["own"] = varied(rows["settings"], column, only_sizes=True)
    repeat = rows.groupby(["label", "method", "own", *KEY]).cumcount()
    rows["line"] = rows.groupby(["label", "method", "own", repeat], sort=False).ngroup()
    order = rows[["label", "own", "line"]].assign(
        read=rows["budget"].fillna(0).groupby(rows["line"]).transform("min"),
        length=rows["seq_len"].fillna(0).groupby(rows["line"]).transform("max"),
    )
    order["is_other"] = order["read"] < 1
    by = ["is_other", "label", "read", "length", "own", "line"]
    rows = rows.loc[order.sort_values(by, kind="stable").index]
    return rows.assign(line=pd.factorize(rows["line"])[0])


def _accuracy(title: str, frame: pd.DataFrame) -> Iterator[Sheet]:
    """Whole tasks and texts, then ranges of texts, then each task with needles by their depth."""
    whole, ranges = columns.whole_tasks(frame), frame[frame["first"].notna()]
    is_length = _unfiltered(whole).isin(metrics.LENGTHS) & (whole["task"].nunique() > 1)
    for words, rows in (("", whole[~is_length]), (", length of the answers", whole[is_length])):
        if len(rows):
            sheet = _accuracy_sheet(title + words, rows)
            yield sheet._replace(notes=[*sheet.notes, f"{'; '.join(_sizes(rows))}."])
    places = zip(ranges["task"], ranges["first"], ranges["stop"], strict=True)
    names = [f"{task}[{first:.0f}:{stop:.0f}]" for task, first, stop in places]
    if names:
        yield _accuracy_sheet(f"{title}, by range of tokens", ranges.assign(task=names))
    needles, names = frame[frame["depth"].notna()], []
    for length, depth in zip(needles["metric"], 100 * needles["depth"], strict=True):
        names.append(f"{int(length):,} tokens, {depth:.0f}-{depth + 100 / NUM_DEPTHS:.0f} %")
    for task, rows in needles.assign(task=names).groupby(needles["task"], sort=False):
        words = "right answers (%) by length and depth of the needle"
        sheet = _accuracy_sheet(f"{title}, {task}: {words}", rows.assign(metric="acc"))
        table = sheet.table.rename(columns=lambda heading: heading.removesuffix(" acc (%)"))
        yield sheet._replace(table=table)


def _sizes(rows: pd.DataFrame) -> Iterator[str]:
    """How many windows or questions each text or task has, such as "3 or 8 windows"."""
    for task, of_task in rows.groupby("task", sort=False):
        first = of_task[of_task["metric"].eq(of_task["metric"].iloc[0])].fillna({"num_samples": 0})
        samples, lengths, shots = (
            " or ".join(f"{value:,.0f}" for value in sorted(first[name].dropna().unique()))
            for name in ("num_samples", "seq_len", "num_fewshot")
        )
        plural = "s" * (samples != "1")
        if first["metric"].iloc[0] in OF_WINDOWS:
            yield f"{task}: {samples} window{plural} of {lengths} tokens"
        else:
            few = f", {shots}-shot" if shots not in ("", "0") else ""
            yield f"{task}: {samples} question{plural}{few}"


def _accuracy_sheet(title: str, frame: pd.DataFrame) -> Sheet:
    """The shares and scores of each line, the scores in the order of `METRICS`, lengths last."""
    rows, notes = _told_apart(lines_of(frame))
    of_lines = rows.groupby("line", sort=False)
    table = texts_of(of_lines[[LABEL.name, SETTINGS.name]].first(), [LABEL, SETTINGS])
    beside = _with_values((metrics.UNMET_BUDGET, *metrics.OF_SOME_RUNS), frame)
    for column in (BUDGET, *beside, *_with_values((DEVICE_FRAC, RESIDENT_FRAC), frame)):
        table[column.heading] = of_lines[column.name].agg(partial(show_range, column, between="-"))
    cells = rows.assign(cell=rows.apply(show_cell, axis=1))
    scores = cells.pivot(index="line", columns=KEY, values="cell").fillna(MISSING)
    keys = dict.fromkeys(zip(frame["task"], frame["metric"], strict=True))
    for task, metric in sorted(
        keys, key=lambda key: (key[1] in metrics.LENGTHS, metrics.rank(key[1]))
    ):
        table[f"{task} {quantity(metric).heading}"] = scores[task, metric]
    return Sheet(title, table, notes)


def _unfiltered(rows: pd.DataFrame) -> pd.Series:
    """The metric of each row without the filter of lm-eval."""
    return rows["metric"].str.split(",").str[0]


# Speed: a line per timed run

NUMBERS_OF_SPEED = (
    metrics.UNMET_BUDGET, DEVICE_FRAC, *metrics.SHAPE, *metrics.SERVING, metrics.TOKENS_EVICTED,
    *metrics.SEGMENTS,
)  # fmt: skip
NOT_BRIEF = {column.name for column in (*NUMBERS_OF_SPEED, *metrics.OF_SOME_RUNS)}
NOT_BRIEF -= {*BRIEF_SPEED, DEVICE_FRAC.name}
OF_LARGEST = (
    "largest_batch kv_tokens decode_tokens_per_s sequence_tokens_per_s equal_batch "
    "equal_tokens_per_s device_kv_bytes host_kv_bytes budget wall"
)
"""What is shown of largest batches: no time of a step, as each method has another batch."""


def _latency(title: str, frame: pd.DataFrame) -> Iterator[Sheet]:
    """The full cache first, then by label and shape; each context and memory of largest batches by
    itself. A column needs a number, `budget` does not."""
    is_shown = frame["largest_batch"].isna() | frame["batch_size"].eq(frame["largest_batch"])
    for _, rows in frame[is_shown].groupby(["context", "memory_bytes"], dropna=False):
        rows, notes = _told_apart(rows.assign(line=range(len(rows)), own=rows["settings"]))
        rows["read"] = rows["budget"].fillna(0)
        rows["is_other"] = rows["read"] < 1
        order = ["is_other", "label", "batch_size", "prompt_len", "gen_len", "read", "settings"]
        rows = rows.sort_values(order, kind="stable")
        words = [LABEL, SETTINGS] if rows["settings"].any() else [LABEL]
        heading, (context, memory) = title, rows[["context", "memory_bytes"]].iloc[0]
        shown = [BUDGET, *_with_values(NUMBERS_OF_SPEED, rows)]
        if memory > 0:
            heading = f"{title}: {context:,.0f} tokens a sequence, {memory / metrics.GIB:.4g} GiB"
            shown = [metrics.COLUMNS[name] for name in OF_LARGEST.split()]
        yield Sheet(heading, texts_of(rows, [*words, *shown]), notes)


# Analyses: a table per quantity, a line per series


def _analysis(title: str, frame: pd.DataFrame) -> Iterator[Sheet]:
    """Series that several runs have stand in a table for each."""
    of_series = frame.groupby(["metric", "x_name", "series"])["run_id"]
    repeat = of_series.transform(lambda runs: pd.factorize(runs)[0])
    for _, rows in frame.groupby(["metric", "x_name", repeat], sort=False):
        metric, x_name = rows[["metric", "x_name"]].iloc[0]
        shown = quantity(metric)
        by = f", by {x_name.replace('_', ' ')}" if x_name else ""
        yield Sheet(f"{title}: {shown.heading}{by}", _by_series(rows, shown))


def _by_series(rows: pd.DataFrame, shown: Metric) -> pd.DataFrame:
    """A line for each series, a column for each x; a series of several layers is one of each
    layer."""
    layers = rows.groupby("series")["layer"].nunique(dropna=False)
    if layers.max() > 1 and rows["x_name"].iloc[0] != metrics.LAYER.name:
        of_layer = rows["layer"].map(f", {metrics.LAYER.phrase}".format, na_action="ignore")
        rows = rows.assign(series=rows["series"] + of_layer.fillna(""))
    values = np.sort(rows["x"].dropna().unique())
    places = np.linspace(0, len(values) - 1, min(MAX_COLUMNS, len(values)), dtype=int)
    headings = {x: f"{x:,g}" for x in values[places]}  # the first and the last among them
    if not headings:  # a number of the whole series
        rows, headings = rows.assign(x=0.0), {0.0: shown.heading}
    numbers = zip(rows["value"], rows["stderr"], strict=True)
    cells = rows.assign(cell=[shown.show(*number) for number in numbers])
    cells = cells.drop_duplicates(["series", "x"], keep="last")
    table = cells.pivot(index="series", columns="x", values="cell")
    table = table.reindex(index=rows["series"].unique(), columns=[*headings]).fillna(MISSING)
    return table.rename(columns=headings).rename_axis(LABEL.heading).reset_index()


SHEETS = {"latency": _latency, "accuracy": _accuracy, "analysis": _analysis}

"""Pages of tables, and what finished runs show in a terminal: the sheets that a frame makes.

A page has all lines. A terminal has a small table for each figure and what it says in sentences,
which are made of the numbers of the table; all numbers are in the CSV. Frames of records and of a
CSV give the same texts.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial

import pandas as pd

from harness.errors import printable
from harness.results import board, columns, metrics
from harness.results.columns import named, shape_of
from harness.results.metrics import (
    BUDGET,
    DEVICE_FRAC,
    MISSING,
    NUM_DEPTHS,
    RESIDENT_FRAC,
    Metric,
    quantity,
)
from harness.results.samples import FULL
from harness.results.sheet import (
    FEWEST_CONTEXTS,
    MAX_ROWS,
    METHOD,
    NOTES,
    OF_WINDOWS,
    RIGHT_OR_WRONG,
    SHARES,
    Sheet,
    alike_in_title,
    fits,
    mark_own,
    markdown,
    note,
    show_interval,
    show_kl,
    show_range,
    show_score,
    show_value,
    terminal,
    texts_of,
    with_intervals,
    wrapped,
)
from harness.settings.kinds import KINDS
from harness.settings.task_config import SamplingConfig, TaskConfig

Key = tuple[str, str]
"""Task and metric of a column of accuracy."""
KEY = ["task", "metric"]
LENGTHS = ("generated_tokens", "at_limit")
"""Metrics of `METRICS` that say how long answers are: a sheet of their own beside several tasks."""
BRIEF_SPEED = (
    "batch_size", "prompt_len", "gen_len", "budget", "unmet_budget",
    "ttft_s", "tokens_per_s", "tpot_p50_s", "h2d_bytes", "peak_device_bytes",
)  # fmt: skip
"""Numbers of a timed run that a terminal shows."""
SHOWN_OF_CAPACITY = (
    "label", "settings",
    "largest_batch", "kv_tokens", "decode_tokens_per_s", "sequence_tokens_per_s", "equal_batch",
    "equal_tokens_per_s", "device_kv_bytes", "host_kv_bytes", "budget",
)  # fmt: skip
"""Columns of a method's largest batch that a page shows."""
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
        yield from board.boards(frame)
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


def render_markdown(name: str, frame: pd.DataFrame) -> str:
    """The whole `.md` file of a table, with published numbers at its end."""
    sheets = list(sheets_of(frame))
    published = columns.published().query("figure == @name")[PUBLISHED_HEADER]
    if len(published):
        sheets.append(Sheet("published numbers", published.replace("", MISSING)))
    words = note(shape_of(frame.columns), max_columns=MAX_COLUMNS)
    return markdown(name, words, sheets)


def render_modelled(figure: str, frame: pd.DataFrame) -> str:
    """The whole `.md` file of the cost model's predictions of a figure."""
    return markdown(f"{figure}, modelled", note("modelled"), sheets_of(frame))


def render_terminal(frame: pd.DataFrame) -> str:
    """A table for a terminal, with the most important columns; "" without rows."""
    shape = shape_of(frame.columns)
    if shape == "accuracy":
        return "\n\n".join(_figures(frame))
    brief = frame.drop(columns=NOT_BRIEF) if shape == "latency" else frame
    return "\n\n".join(map(_timed, sheets_of(brief)))


# Settings

SIZES = {*KINDS["perplexity"].depends_on} ^ {*KINDS["tasks"].depends_on} | {"seed"}
"""Settings of texts and tasks alone, such as `num_windows`: no part of a method."""
SIZES |= {field.name for group in (TaskConfig, SamplingConfig) for field in fields(group)}


def pairs_of(settings: str) -> list[str]:
    """The settings of a row, `a=[1, 2], b=3`, as its parts."""
    return list(filter(None, re.split(r", (?=[\w.]+=)", settings)))


def is_size(pair: str) -> bool:
    """Whether a setting such as `num_windows=8` or `corpus.spread=True` is of `SIZES`."""
    return re.split(r"[.=]", pair, maxsplit=1)[0] in SIZES


def without(settings: pd.Series, is_out: Callable[[str], bool]) -> pd.Series:
    """Settings without some of their parts."""
    return settings.map(lambda words: ", ".join(p for p in pairs_of(words) if not is_out(p)))


def varied(settings: pd.Series, by: pd.Series, *, only_sizes: bool = False) -> pd.Series:
    """Settings without the parts that all of a group share. only_sizes: other parts stay."""
    found = []
    for _, group in settings.groupby(by):
        shared = set.intersection(*map(set, group.map(pairs_of)))
        if only_sizes:
            shared = {pair for pair in shared if is_size(pair)}
        found.append(without(group, shared.__contains__))
    return pd.concat(found).reindex(settings.index)


def _told_apart(rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The rows with the settings `own` of their line that not all lines share, and a note on those
    that no line shows."""
    own = rows["own"]
    if rows["line"].nunique() > 1:
        own = varied(own, pd.Series(0, own.index))
    unsaid: dict[str, None] = {}
    for settings, shown in zip(rows["settings"], own, strict=True):
        unsaid |= dict.fromkeys(p for p in pairs_of(settings) if p not in pairs_of(shown))
    notes = [f"Settings of all runs: {', '.join(unsaid)}."] if unsaid else []
    return rows.assign(settings=own), notes


def _with_values(shown: Iterable[Metric], frame: pd.DataFrame) -> list[Metric]:
    """The columns, each once, in which any row has a number."""
    filled = set(frame.columns[frame.notna().any()])
    return [column for column in dict.fromkeys(shown) if column.name in filled]


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


def _wide(
    rows: pd.DataFrame, shares: dict[str, Metric], headings: dict[Key, str], cells: Sequence[str]
) -> pd.DataFrame:
    """The shares and scores of each line. cells: the score of each row, as a text."""
    by_line = rows.groupby("line")
    of_shares = {}
    for heading, column in shares.items():
        of_shares[heading] = by_line[column.name].agg(partial(show_range, column))
    scores = rows.assign(cell=cells).pivot(index="line", columns=KEY, values="cell")
    scores = scores.reindex(columns=pd.MultiIndex.from_tuples(headings)).fillna(MISSING)
    return pd.concat(
        [pd.DataFrame(of_shares), scores.set_axis([*headings.values()], axis=1)], axis=1
    )


def _accuracy(title: str, frame: pd.DataFrame) -> Iterator[Sheet]:
    """Whole tasks and texts, then ranges of texts, then each task with needles by their depth."""
    whole, ranges = columns.whole_tasks(frame), frame[frame["first"].notna()]
    is_length = _unfiltered(whole).isin(LENGTHS) & (whole["task"].nunique() > 1)
    places = zip(ranges["task"], ranges["first"], ranges["stop"], strict=True)
    names = [f"{task}[{first:.0f}:{stop:.0f}]" for task, first, stop in places]
    for words, rows in (
        ("", whole[~is_length]),
        (", length of the answers", whole[is_length]),
        (", by range of tokens", ranges.assign(task=names)),
    ):
        if len(rows):
            yield _accuracy_sheet(title + words, rows)
    needles, show = frame[frame["depth"].notna()], metrics.DEPTH.show
    names = [f"{show(depth)}-{show(depth + 1 / NUM_DEPTHS)} %" for depth in needles["depth"]]
    for task, rows in needles.assign(task=names).groupby(needles["task"], sort=False):
        words = "right answers (%) by length and depth of the needle"
        yield _accuracy_sheet(f"{title}, {task}: {words}", rows)


def _accuracy_sheet(title: str, frame: pd.DataFrame) -> Sheet:
    rows, notes = _told_apart(lines_of(frame))
    beside = _with_values((metrics.UNMET_BUDGET, *metrics.OF_SOME_RUNS), frame)
    shown = (BUDGET, *beside, *_with_values((DEVICE_FRAC, RESIDENT_FRAC), frame))
    shares = {column.heading: column for column in shown}
    words = texts_of(rows.drop_duplicates("line").set_index("line"), named("label settings"))
    cells = [show_score(row) for _, row in rows.iterrows()]
    return Sheet(title, words.join(_wide(rows, shares, _headings(frame), cells)), notes)


def _unfiltered(rows: pd.DataFrame) -> pd.Series:
    """The metric of each row without the filter of lm-eval."""
    return rows["metric"].str.split(",").str[0]


def _headings(frame: pd.DataFrame) -> dict[Key, str]:
    """The heading of each column, in the order of the page.

    If columns differ in number of samples, shots or length, a heading has what all rows of its
    column share.
    """
    keys = dict.fromkeys(zip(frame["task"], frame["metric"], strict=True))
    found = {key: _heading(*key) for key in sorted(keys, key=lambda key: metrics.rank(key[1]))}
    for condition in (metrics.NUM_SAMPLES, metrics.NUM_FEWSHOT, metrics.SEQ_LEN):
        of_column = frame.groupby(KEY)[condition.name].agg(["min", "max", "count", "size"])
        is_shared = of_column["min"].eq(of_column["max"]) & of_column["count"].eq(of_column["size"])
        shared = of_column["min"][is_shared]
        for key in found if shared.nunique() > 1 else ():
            if key in shared.index:
                found[key] += f", {condition.phrase.format(shared[key])}"
    return found


def _heading(task: str, metric: str) -> str:
    if task.endswith(" %") and metric.isdecimal():
        return f"{int(metric):,} tokens, {task}"
    return f"{task} {quantity(metric).heading}"


# Speed: a line per timed run

NUMBERS_OF_SPEED = [column for column in columns.LATENCY if column.digits is not None]
NOT_BRIEF = {column.name for column in NUMBERS_OF_SPEED}.difference(BRIEF_SPEED)


def _latency(title: str, frame: pd.DataFrame) -> Iterator[Sheet]:
    """The full cache first, then by label and shape. A column needs a number, `budget` does not."""
    rows, notes = _told_apart(frame.assign(line=range(len(frame)), own=frame["settings"]))
    rows["read"] = rows["budget"].fillna(0)
    rows["is_other"] = rows["read"] < 1
    order = ["is_other", "label", "batch_size", "prompt_len", "gen_len", "read", "settings"]
    words = named("label settings" if rows["settings"].any() else "label")
    numbers = (metrics.UNMET_BUDGET, DEVICE_FRAC, *NUMBERS_OF_SPEED)
    shown = dict.fromkeys((*words, BUDGET, *_with_values(numbers, rows)))
    yield Sheet(title, texts_of(rows.sort_values(order, kind="stable"), shown), notes)


def _capacity(title: str, frame: pd.DataFrame) -> Iterator[Sheet]:
    shown = [column for column in columns.CAPACITY if column.name in SHOWN_OF_CAPACITY]
    largest = frame[frame["batch_size"].eq(frame["largest_batch"])]
    for _, group in largest.groupby(["context", "memory_bytes"]):
        context, memory = group[["context", "memory_bytes"]].iloc[0]
        rows, notes = _told_apart(group.assign(line=range(len(group)), own=group["settings"]))
        words = f"{title}: {context:,.0f} tokens a sequence, {memory / metrics.GIB:.4g} GiB"
        yield Sheet(words, texts_of(rows, shown).assign(wall=rows["wall"]), notes)


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
    headings = {x: f"{x:,g}" for x in _spread(sorted(rows["x"].dropna().unique()))}
    if not headings:  # a number of the whole series
        rows, headings = rows.assign(x=0.0), {0.0: shown.heading}
    numbers = zip(rows["value"], rows["stderr"], strict=True)
    cells = rows.assign(cell=[shown.show(*number) for number in numbers])
    cells = cells.drop_duplicates(["series", "x"], keep="last")
    table = cells.pivot(index="series", columns="x", values="cell")
    table = table.reindex(index=rows["series"].unique(), columns=[*headings]).fillna(MISSING)
    table = table.set_axis([*headings.values()], axis=1)
    return table.rename_axis(metrics.LABEL.heading).reset_index()


def _spread(values: Sequence[float]) -> list[float]:
    """At most `MAX_COLUMNS` of the values, the first and the last among them."""
    count = min(MAX_COLUMNS, len(values))
    last, gaps = len(values) - 1, max(1, count - 1)
    return [values[index * last // gaps] for index in range(count)]


SHEETS = {"capacity": _capacity, "latency": _latency, "accuracy": _accuracy, "analysis": _analysis}


# A terminal: a table of each figure, and what it says

KL, PERPLEXITY, TOP1 = "kl_nats", "perplexity", "top1_agreement"
PLACES = {
    KL: 0, PERPLEXITY: 1, "acc": 2, "exact_match": 2, "text_perplexity": 3, "first_divergence": 4,
    "repetition": 5, "generated_tokens": 6, "at_limit": 7,
}  # fmt: skip
"""Metrics of `METRICS` that a terminal shows, and their order. The others, which lm-eval measured,
stand with `acc`."""
SAME_BUDGET = 0.1
"""Budgets that differ by at most this share are compared in a sentence."""
MAX_NAMES, MAX_TASKS = 4, 2
"""Methods and tasks that a sentence names."""


def _figures(frame: pd.DataFrame) -> Iterator[str]:
    """Accuracy rows as tables with their sentences; ranges and depths are left to the CSV. A note
    stands below the first table alone."""
    explained: set[str] = set()
    for title, rows in figures_of(frame):
        if rows["line"].nunique() == 1:
            yield terminal(_accuracy_sheet(title, rows))
            continue
        sheet = _figure_sheet(title, rows)
        notes = [words for words in sheet.notes if words not in explained]
        explained.update(notes)
        yield "\n\n".join(filter(None, [terminal(sheet._replace(notes=notes)), _said(rows)]))


def said(frame: pd.DataFrame) -> str:
    """What accuracy rows show in sentences, a paragraph for each table of theirs."""
    return "\n\n".join(filter(None, (_said(rows) for _, rows in figures_of(frame))))


def figures_of(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The table of each model and experiment, with its title."""
    whole = columns.whole_tasks(frame)
    for (model, experiment), found in whole.groupby(["model", "experiment"], sort=False):
        rows = _rows_of_figure(found)
        yield f"{experiment}, {model} ({'; '.join(_sizes(rows))})", rows


def _rows_of_figure(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `lines_of` that a terminal shows, one column of the table after the other, each
    with the `name` of its line, and `said`, as sentences name it."""
    rows = lines_of(frame)
    has_several = rows["line"].nunique() > 1
    places = PLACES if has_several else PLACES | {TOP1: len(PLACES)}
    short = _unfiltered(rows)
    rows["place"] = short.map(places).mask(~short.isin(metrics.METRICS), PLACES["acc"])
    if rows["place"].notna().any():
        rows = rows.dropna(subset="place")
    if has_several:
        rows = pd.concat([_full_cache(rows), rows])
    return _with_names(rows.sort_values("place", kind="stable"))


def _full_cache(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the full cache where it has no run here: what the others were compared with."""
    of_itself = rows["metric"].eq(KL)
    full = rows.assign(value=(rows["value"] - rows["difference"]).mask(of_itself, 0.0))
    full = full.dropna(subset="value")
    values = full.groupby(KEY)["value"]
    spread = values.transform("max") - values.transform("min")
    full = full[spread <= 1e-9 * full["value"].abs()].drop_duplicates(KEY)
    if _is_full(rows).any() or full["metric"].eq(KL).all():
        return rows.head(0)
    return full.assign(
        label="Full cache", method=FULL, own="", line=-1, stderr=math.nan, low=math.nan,
        budget=1.0, device_frac=1.0, resident_frac=0.0,
    )  # fmt: skip


def _is_answer(rows: pd.DataFrame) -> pd.Series:
    return _unfiltered(rows).isin(RIGHT_OR_WRONG)


def _is_full(rows: pd.DataFrame) -> pd.Series:
    """Whether each row is of the full cache."""
    is_full = rows["method"].eq(FULL) & rows["budget"].eq(1)
    return is_full.groupby(rows["line"]).transform("all")


def _with_names(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the `name` of their line: its label, with the settings that tell it from others
    of that label. The asked budget stands among them where the one that was read does not tell them
    apart.

    `said`: the name as a sentence has it, with the budget where several lines have this name.
    """
    lines = rows.drop_duplicates("line").set_index("line").sort_index()
    label = lines["label"]
    own = varied(lines["own"], label)
    brief = without(own, lambda pair: pair.startswith("budget="))
    whole, brief = (label.str.cat(words, sep=", ").str.removesuffix(", ") for words in (own, brief))
    share = rows.groupby("line")["budget"].agg(partial(show_range, BUDGET))
    is_alone = ~pd.DataFrame({"name": brief, "share": share}).duplicated(keep=False)
    name = brief.where(is_alone, whole).map(printable)
    said = name.where(~name.duplicated(keep=False), name + " at " + share + " %")
    return rows.assign(name=rows["line"].map(name), said=rows["line"].map(said))


def _sizes(rows: pd.DataFrame) -> Iterator[str]:
    """How many windows or questions each text or task has."""
    for task, of_task in rows.groupby("task", sort=False):
        metric = of_task["metric"].iloc[0]
        first = of_task[of_task["metric"].eq(metric)]
        samples, lengths = _each(first["num_samples"]), _each(first["seq_len"])
        plural = "s" * (samples != "1")
        if metric in OF_WINDOWS:
            yield f"{task}: {samples} window{plural} of {lengths} tokens"
        else:
            yield f"{task}: {samples} question{plural}"


def _each(values: pd.Series) -> str:
    """The values of a column, "512 or 2,048"."""
    return " or ".join(f"{value:,.0f}" for value in sorted(values.fillna(0).unique()))


# The table


def _figure_sheet(title: str, rows: pd.DataFrame) -> Sheet:
    """The table with intervals, or with marks where these are too wide."""
    shown = _closest(rows)
    table = _figure_table(rows, has_intervals=True).loc[shown]
    has_intervals = fits(table)
    if not has_intervals:
        table = _figure_table(rows, has_intervals=False).loc[shown]
    is_said = {
        "shares": True,
        "answers": _is_answer(rows).any(),
        "kl": rows["metric"].eq(KL).any(),
        "intervals" if has_intervals else "marks": rows["low"].notna().any(),
    }
    notes = [NOTES["terminal"][name] for name in is_said if is_said[name]]
    fewest = rows["num_contexts"].min()
    if fewest < FEWEST_CONTEXTS:
        notes.append(f"{fewest:.0f} windows or contexts: no interval.")
    num_lines = rows["line"].nunique()
    if len(table) < num_lines:
        notes.append(f"{len(table)} of {num_lines} lines, the closest to the full cache.")
    return Sheet(title, table, notes)


def _closest(rows: pd.DataFrame) -> pd.Index:
    """The lines to show: all, or the closest to the full cache in the first column."""
    lines = rows.assign(is_full=_is_full(rows)).groupby("line")[["is_full"]].first()
    if len(lines) > MAX_ROWS:
        task, metric = rows[KEY].iloc[0]
        first = rows[rows["task"].eq(task) & rows["metric"].eq(metric)].set_index("line")["value"]
        lines["distance"] = first if metric in (KL, PERPLEXITY) else -first
        lines = lines.sort_values(["is_full", "distance"], ascending=[False, True], kind="stable")
    return lines.index[:MAX_ROWS]


def _figure_table(rows: pd.DataFrame, *, has_intervals: bool) -> pd.DataFrame:
    cells = [_cell(row, has_intervals) for _, row in rows.iterrows()]
    names = rows.drop_duplicates("line").set_index("line")["name"].rename(METHOD)
    return names.to_frame().join(_wide(rows, SHARES, _brief_headings(rows), cells))


def _brief_headings(rows: pd.DataFrame) -> dict[Key, str]:
    """The heading of each column: of a task its name where that is enough, and no text's name where
    there is one."""
    keys = rows.drop_duplicates(KEY)
    found = {}
    for task, metric in keys[KEY].itertuples(index=False):
        heading = quantity(metric).heading
        if metric.partition(",")[0] in RIGHT_OR_WRONG and keys["task"].eq(task).sum() == 1:
            heading = task
        elif metric not in (KL, PERPLEXITY) or keys["metric"].eq(metric).sum() > 1:
            heading = f"{task} {heading}"
        found[task, metric] = heading
    return found


def _cell(row: pd.Series, has_intervals: bool) -> str:
    if row["metric"] == KL:
        return show_kl(row["value"], row["stderr"])
    text, low, high = show_value(row), row["low"], row["high"]
    if math.isnan(low):
        return text
    if not has_intervals:
        return f"{text}*" if low > 0 or high < 0 else text
    return f"{text} (same)" if low == high == 0 else f"{text} ({show_interval(low, high)})"


# What the table says


def _said(rows: pd.DataFrame) -> str:
    """What the rows of a figure show: by KL on the first text, at one budget, in perplexity and in
    answers. "" where nothing is compared."""
    sentences: list[str] = []
    others = rows[rows["metric"].eq(KL) & ~_is_full(rows)]
    for _, of_text in others.groupby("task", sort=False):
        if len(of_text) > 1:
            in_order = of_text.sort_values("value", kind="stable")
            sentences = [_nearest(in_order), _at_one_budget(in_order)]
            break
    for words, compared in (
        ("Perplexity", _compared(rows[rows["metric"].eq(PERPLEXITY)])),
        ("Answers", _compared(rows[_is_answer(rows)])),
    ):
        if compared:
            sentences.append(f"{words}: {compared}.")
    return wrapped(" ".join(sentences))


def _nearest(rows: pd.DataFrame) -> str:
    """Which method is closest to the full cache, and which farthest. rows: the closest first."""
    near, far = rows.iloc[0], rows.iloc[-1]
    return (
        f"By KL {near['said']} is closest to the full cache ({show_kl(near['value'])} nats; it "
        f"reads {BUDGET.show(near['budget'])} % of it), {far['said']} farthest "
        f"({show_kl(far['value'])}; {BUDGET.show(far['budget'])} %)."
    )


def _at_one_budget(rows: pd.DataFrame) -> str:
    """The KL of the largest group of methods that read about the same, or that none do. rows: the
    closest first."""
    groups = []
    for budget in rows.sort_values("line")["budget"]:
        near = rows[(rows["budget"] - budget).abs() <= SAME_BUDGET * budget]
        groups.append(near.drop_duplicates("label"))
    chosen = max(groups, key=len)
    if len(chosen) < 2:
        read = show_range(BUDGET, rows["budget"], " to ")
        at_one = "budget=0.2 compares at one budget what can have it"
        return f"They read different shares, {read} % of the cache; {at_one}."
    read = show_range(BUDGET, chosen["budget"], " to ")
    listed = " / ".join(chosen["label"] + " " + chosen["value"].map(show_kl))
    return f"At about the same budget ({read} %): {listed} nats."


def _compared(rows: pd.DataFrame) -> str:
    """For each column the full cache's value, and which lines certainly differ from it."""
    parts = []
    for (task, _), column in rows.dropna(subset="low").groupby(KEY, sort=False):
        of_full = column.assign(value=column["value"] - column["difference"]).iloc[0]
        full = show_value(of_full)
        if _is_answer(column).all():
            full += f" % of {task}"
        parts.append(f"the full cache has {full}; {_certain(column)}")
    if len(parts) > MAX_TASKS:
        parts[MAX_TASKS:] = [f"{len(parts) - MAX_TASKS} further tasks are in the table"]
    return "; ".join(parts)


def _certain(rows: pd.DataFrame) -> str:
    is_certain = rows["low"].gt(0) | rows["high"].lt(0)
    is_worse = rows["difference"].gt(0) == rows["metric"].eq(PERPLEXITY)
    sides = {
        "worse for certain (95 %)": is_certain & is_worse,
        "better for certain": is_certain & ~is_worse,
        "not told apart": ~is_certain,
    }
    words = []
    for side, is_there in sides.items():
        names = rows["said"][is_there]
        listed = " / ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} of {len(rows)}"
        if len(names):
            words.append(f"{side}: {listed}")
    return ", ".join(words)


def _timed(sheet: Sheet) -> str:
    """A sheet of timed runs, with the shortest and the longest decode step in a sentence."""
    text, heading = terminal(alike_in_title(sheet)), metrics.TPOT.heading
    if heading not in sheet.table:
        return text
    timed = sheet.table[sheet.table[heading].ne(MISSING)]
    if len(timed) < 2:
        return text
    in_order = timed.loc[timed[heading].astype(float).sort_values(kind="stable").index]
    near, far = in_order.iloc[0], in_order.iloc[-1]
    return (
        f"{text}\n\nA decode step is shortest with {near.iloc[0]} ({near[heading]} ms) and longest "
        f"with {far.iloc[0]} ({far[heading]} ms)."
    )

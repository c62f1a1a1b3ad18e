"""How all figures look: one colour, marker, line and hatch per label.

Black-and-white print tells them apart. The colours in `registry.yaml` are safe for the common kinds
of colour blindness.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
import yaml
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from plots.data import refuse_repeats, split

REGISTRY = yaml.safe_load(Path(__file__).with_name("registry.yaml").read_text(encoding="utf-8"))
BUDGET_AXIS = "budget: share of the cache read (%)"
KL_AXIS = "KL(full || method) (nats)"
PANEL_INCHES = (3.4, 2.5)  # one column of a two-column page
LEGEND_INCHES = 1.7
MARK_INCHES, LETTER_INCHES = 0.5, 0.05
"""Of an entry of a legend: what it takes without its name, and for each letter of it."""
ROOM_ROWS, ROW_INCHES = 4, 0.15
"""Rows of a legend that a figure has room for; what each further one adds to its height."""
WIDE = 10
NOTE_LETTERS_PER_INCH, TICK_LETTERS = 22, 24
FILLED = 0.84
"""Share of a group's width that its bars cover."""

DrawPanel = Callable[[Axes, pd.DataFrame], None]
Panel = tuple[str, pd.DataFrame, DrawPanel]
"""The title of a panel, its rows, and what draws them."""


class Look(NamedTuple):
    """A label's appearance."""

    color: str
    marker: str
    line: str
    hatch: str = ""

    @property
    def of_line(self) -> dict[str, Any]:
        """Settings of a line with markers."""
        return {"color": self.color, "marker": self.marker, "linestyle": self.line}

    @property
    def of_bar(self) -> dict[str, Any]:
        """Settings of a bar."""
        look = {"color": self.color, "hatch": self.hatch}
        return look | {"edgecolor": "white", "linewidth": 0.4}


COLORS = REGISTRY["colors"]
BLACK, BLUE, GREEN, ORANGE = (COLORS[name] for name in ("black", "blue", "green", "orange"))
VERMILION, GREY, LIGHT_GREY = (COLORS[name] for name in ("vermilion", "grey", "light_grey"))

FULL, CHANCE, PREFILL = "Full cache", "chance", "prefill (light)"
OF_PAPER = "published (RTX A6000)"
QUANTIZED = "INT8/4/2/1"
WIDTH, WIDTHS = re.compile(r"INT[1248]"), re.compile(r"INT[1248](/[1248])*")
ASKED, NOT_ASKED = r"(?:^|, )budget=", "budget not set"
"""In the settings of a run that was asked for a budget, and the words for a run that was not."""
LOOKS = {label: Look(*look) for label, look in REGISTRY["looks"].items()}
SEQUENCE, OTHERS = ([Look(*look) for look in REGISTRY[name]] for name in ("sequence", "others"))
_given: dict[str, Look] = {}
"""The looks of `OTHERS` that labels have, while the figures of one folder are drawn."""

PREFILL_BAR: Any = {
    "color": "#F2F2F2", "edgecolor": GREY, "linewidth": 0.5, "hatch": "", "label": PREFILL
}  # fmt: skip
HOLLOW: Any = {"linestyle": "", "markerfacecolor": "none", "markeredgecolor": BLACK}
PUBLISHED_MARKERS = {"quoted": "o", "derived": "D", "approximate": "s"}


def look(label: str) -> Look:
    """The label's appearance, the same in all figures that are drawn together; of one that is not
    listed the next of `OTHERS`."""
    return LOOKS.get(label) or _given.setdefault(label, OTHERS[len(_given) % len(OTHERS)])


def ordered(labels: Iterable[str]) -> list[str]:
    """Distinct labels in the order of legends: listed ones, the others as they come, markers.

    The part after a comma, a budget for example, does not count.
    """
    known = [*LOOKS, "", PREFILL, CHANCE, OF_PAPER]

    def rank(label: str) -> int:
        name = label.partition(",")[0]
        like = QUANTIZED if WIDTHS.fullmatch(name) else ""
        return next(known.index(each) for each in (name, like, "") if each in known)

    return sorted(dict.fromkeys(labels), key=rank)


def in_sequence(series: Iterable[str]) -> dict[str, Look]:
    """A look for each series of a figure, the same in all its panels.

    A method has its own, another series the next of `SEQUENCE` in a colour that none of these
    methods has.
    """
    names = dict.fromkeys(series)
    taken = {LOOKS[name].color for name in names if name in LOOKS}
    free = cycle(look for look in SEQUENCE if look.color not in taken)
    return {name: LOOKS[name] if name in LOOKS else next(free) for name in names}


def applied() -> AbstractContextManager[None]:
    """The registry's matplotlib settings, while the figures of one folder are drawn and saved."""
    _given.clear()
    return mpl.rc_context(REGISTRY["rc"])


# Panels


def draw_rows(
    rows: pd.DataFrame, setup: Sequence[str], *draws: DrawPanel, note: str = ""
) -> Figure | None:
    """A figure with a titled panel per setup and function; None without rows.

    Below the panels stands what they share, then `note`.
    """
    if rows.empty:
        return None
    shared, parts = split(rows, setup)
    panels = [(title, frame, draw) for title, frame in parts for draw in draws]
    return draw_panels(panels, "; ".join(filter(None, [shared, note])))


def draw_panels(
    panels: Sequence[Panel], note: str, *, panel_inches: tuple[float, float] = PANEL_INCHES
) -> Figure | None:
    """A figure of these panels, at most three a row, one legend of all above them and the note
    below; None without any. One panel is as wide as two."""
    if not panels:
        return None
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = -(-len(panels) // columns)
    width, height = panel_inches
    if len(panels) == 1 and panel_inches == PANEL_INCHES:
        width *= 2
    figure = Figure(figsize=(columns * width, rows * height + 0.6), layout="constrained")
    for place, (title, frame, draw) in enumerate(panels):
        draw(figure.add_subplot(rows, columns, place + 1, title=title), frame)
    own = own_note((title, frame) for title, frame, _ in panels)
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        artists, texts = axes.get_legend_handles_labels()
        handles |= dict(zip(texts, artists, strict=True))
    names = ordered(handles)
    if names:
        width, longest = figure.get_figwidth(), MARK_INCHES + LETTER_INCHES * max(map(len, names))
        fitting = max(1, min(round(width / LEGEND_INCHES), int(width / longest)))
        rows = -(-len(names) // fitting)
        shown = [handles[name] for name in names]
        figure.legend(shown, names, loc="outside upper center", ncols=-(-len(names) // rows))
        figure.set_figheight(figure.get_figheight() + max(0, rows - ROOM_ROWS) * ROW_INCHES)
    letters = int(figure.get_figwidth() * NOTE_LETTERS_PER_INCH)
    paragraphs = filter(None, [*note.split("\n"), own])
    text = "\n".join(textwrap.fill(paragraph, letters) for paragraph in paragraphs)
    figure.supxlabel(text, x=0.01, ha="left", fontsize=6, color="#444444")
    return figure


def own_note(panels: Iterable[tuple[str, pd.DataFrame]]) -> str:
    """Which names of which panels (title, rows) are of one's own runs; empty without any."""
    titles: dict[str, dict[str, None]] = {}
    for title, rows in panels:
        names = rows["label" if "label" in rows else "series"]
        titles.setdefault(", ".join(ordered(names[rows.own])), {})[title] = None
    titles.pop("", None)
    words = []
    for own, shown in titles.items():
        where = "; ".join(filter(None, shown))
        words.append(f"{own} ({where})" if where else own)
    return f"of one's own runs: {'; '.join(words)}; all others are shipped" if words else ""


def error_note(rows: pd.DataFrame) -> str:
    """What the error bars of `rows` are. KL and agreement compare with the full cache by
    themselves."""
    by_themselves = rows.metric.isin(["perplexity_full", "kl_nats", "top1_agreement"])
    paired = rows[(rows.label != FULL) & ~by_themselves].difference.notna()
    if not paired.any():
        return "bars: one standard error"
    note = "bars: standard error of the difference to the full cache"
    return note if paired.all() else f"{note}, else of the value"


# Lines


def draw_lines(
    axes: Axes,
    points: pd.DataFrame,
    looks: Mapping[str, Look] | None = None,
    *,
    at: list[float] | None = None,
    **other: Any,
) -> None:
    """A line with markers and error bars for each `name` of the points.

    points: columns name, label, x, y and stderr, one standard error. looks: of the names, else that
    of the label. at: every x, of which a line breaks where it has no point. other: settings that
    change a line's look.
    """
    for name in ordered(points.name):
        line = points[points.name == name].sort_values("x").set_index("x")
        of_name = looks[name] if looks else look(line.label.iloc[0])
        line = line if at is None else line.reindex(at)
        stderr = line.stderr if line.stderr.notna().any() else None
        words: Any = of_name.of_line | {"label": name, "capsize": 2, "elinewidth": 0.8}
        axes.errorbar(line.index, line.y, stderr, **words | other)


def joined(labels: Iterable[str]) -> str:
    """The name of the line through the codecs of a figure: INT8/4 where it has these bit widths."""
    widths = {label.removeprefix("INT") for label in labels if WIDTH.fullmatch(label)}
    return "INT" + "/".join(sorted(widths, reverse=True))


def budget_lines(axes: Axes, rows: pd.DataFrame, *, codecs: str) -> None:
    """A line per method, the value by budget, without the full cache.

    codecs: the name of the line through all bit widths. A line joins runs of one kind: where only
    some of a method's runs were asked for a budget, the others, whose budget follows from a
    setting, are a second line of hollow markers.
    """
    methods = rows[rows.label != FULL]
    is_codec = methods.label.str.fullmatch(WIDTH)
    like = methods.label.mask(is_codec, codecs if codecs in LOOKS else QUANTIZED)
    names = methods.label.mask(is_codec, codecs)
    points = methods.assign(label=like, name=names, x=100 * methods["budget"], y=methods.value)
    asked = methods.settings.str.contains(ASKED)
    is_second = ~asked & asked.groupby(names).transform("any")
    draw_lines(axes, points[~is_second])
    second = points[is_second]
    second = second.assign(name=second["name"] + f", {NOT_ASKED}")
    draw_lines(axes, second, markerfacecolor="white", linestyle=":")
    axes.set_xlim(0, 1.06 * points.x.max())  # a marker on the last budget is clear of the edge


def log(axes: Axes, of: Literal["x", "y"], values: pd.Series | None = None) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5.

    Given `values`, only where the largest is over `WIDE` times the smallest.
    """
    if values is None or values.max() > WIDE * values.min():
        axes.set(**{f"{of}scale": "log"})
        axis: Axis = {"x": axes.xaxis, "y": axes.yaxis}[of]
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def log2_x(axes: Axes, values: Iterable[float]) -> None:
    """A logarithmic x axis with a tick at each of the values."""
    ticks = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])


def full_lines(axes: Axes, rows: pd.DataFrame) -> None:
    """The full cache: for each distinct value of `rows` a dashed line over the whole width.

    It has a band of one standard error where that is known.
    """
    color, _, line, _ = LOOKS[FULL]
    for value, stderr in rows[["value", "stderr"]].drop_duplicates().to_numpy():
        axes.axhline(value, color=color, linestyle=line, linewidth=1, label=FULL)
        if not pd.isna(stderr):
            axes.axhspan(value - stderr, value + stderr, color=color, alpha=0.08, linewidth=0)


def chance_line(axes: Axes, value: float) -> None:
    """What guessing scores: a dotted line over the whole width."""
    axes.axhline(value, color=GREY, linestyle=":", linewidth=1, label=CHANCE)


# Names on the y axis

NAME_INCHES = 0.14
SHIFT = 0.18
"""Of the lines between a method's markers of two lengths."""
APART = "x"
"""The marker of a method that is not compared."""
FACES: Any = [
    {},
    {"markerfacecolor": "white"},
    {"fillstyle": "left", "markerfacecoloralt": "white"},
    {"fillstyle": "bottom", "markerfacecoloralt": "white"},
]
"""Of the shortest texts, the next longer, and so on."""
UNLISTED = Look(GREY, "o", "-")
"""Of methods without a colour of their own: more than there are colours, and named on the axis."""


def draw_names(
    axes: Axes, points: pd.DataFrame, names: Sequence[str], lengths: list[float]
) -> None:
    """A marker with a horizontal bar for each point, on the line of its label.

    points: columns label, x, length of the text, bar_low and bar_high, NaN for no bar, and
    is_apart. names: the labels, from below. lengths: of all texts, the shortest first.
    """
    for _, point in points.iterrows():
        place = lengths.index(point.length)
        y = names.index(point.label) + SHIFT * ((len(lengths) - 1) / 2 - place)
        of_method = LOOKS.get(point.label.partition(" + ")[0], UNLISTED)  # without its codec
        bar = None if pd.isna(point.bar_low) else [[point.bar_low], [point.bar_high]]
        shape: Any = {"color": of_method.color, "marker": of_method.marker or "o"} | _face(place)
        if point.is_apart:
            shape["marker"] = APART
        axes.errorbar(point.x, y, xerr=bar, elinewidth=0.8, markersize=4, **shape)
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.set_ylim(-0.7, len(names) - 0.3)
    grey: Any = {"color": GREY, "markersize": 4, "linestyle": ""}
    for place, length in enumerate(lengths):
        words = f"texts of {length:,.0f} tokens"
        axes.plot([], [], marker="o", label=words, **grey | _face(place))
    if points.is_apart.any():
        axes.plot([], [], marker=APART, label="not compared", **grey)


def _face(place: int) -> dict[str, Any]:
    return dict(FACES[place % len(FACES)])


# Bars


def bars(
    axes: Axes, rows: pd.DataFrame, *, tick: Callable[[Any], str] = str, **other: Any
) -> pd.DataFrame:
    """A bar for each row, those of a group beside one another in the order of legends.

    rows: columns group, label and value; where there are errors or stacks, stderr and bottom. tick:
    the words below a group. other: settings that change a bar's look. Returns the centres of the
    bars, a row per group and a column per label. Raises UserError for two rows for one bar.
    """
    refuse_repeats(rows, ["group", "label"])
    labels, groups = ordered(rows.label), list(dict.fromkeys(rows.group))
    places, width = np.arange(len(groups)), FILLED / len(labels)
    centres = pd.DataFrame(index=groups)
    for number, label in enumerate(labels):
        centres[label] = places + (number - (len(labels) - 1) / 2) * width
        own = rows[rows.label == label].set_index("group").reindex(groups)
        words: Any = {"label": label, "capsize": 2, "error_kw": {"elinewidth": 0.8}}
        words |= {"yerr": own.get("stderr"), "bottom": own.get("bottom")}
        axes.bar(centres[label], own.value, width, **words | look(label).of_bar | other)
        is_bare = own.value.eq(0)  # with an error bar it is seen
        if "stderr" in own:
            is_bare &= ~own.stderr.gt(0)
        if "bottom" not in rows:  # else a part of a stack
            for centre in centres[label][is_bare]:
                axes.text(centre, 0, "0", ha="center", va="bottom", fontsize=6)
    axes.set_xticks(places, [tick(group) for group in groups])
    axes.grid(visible=False, axis="x")
    return centres


def name_bars(axes: Axes, x: Iterable[float], labels: Iterable[str]) -> None:
    """Slanted labels below single bars, long ones in several lines."""
    names = [textwrap.fill(label, TICK_LETTERS) for label in labels]
    axes.set_xticks([*x], names, rotation=35, ha="right")


def mark_published(axes: Axes, centres: pd.DataFrame, points: pd.DataFrame) -> None:
    """The paper's numbers as hollow markers on the bars of their series and group, by kind."""
    for _, point in points.iterrows():
        if point.series in centres and point.x in centres.index:
            at: Any = centres.at[point.x, point.series]
            words, marker = f"{OF_PAPER}, {point.kind}", PUBLISHED_MARKERS[point.kind]
            axes.plot(at, point.value, label=words, marker=marker, **HOLLOW)

"""Tables for people: rounded, with units and standard errors, a line per method and setting.

Accuracy is wide over tasks, so runs of the same method and settings join in one line, and the column
`settings` says what tells the lines of a method apart. Seconds become ms and bytes GiB here, and only here.
"""

import csv
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from harness.records.record import foreign_settings

Record = Mapping[str, Any]
Row = dict[str, Any]
Pairs = Sequence[tuple[Record, list[Row]]]

PUBLISHED = Path(__file__).parent / "published.csv"
MISSING = "-"
NOTE = (
    "± is one standard error. KV read is the share of the full cache that a decode row reads; two numbers "
    "are its range over a line's columns. Settings are those that three quarters of a method's runs do not "
    "share."
)
MODELLED_NOTE = (
    "Predicted by the cost model (`harness/paper/costmodel`), not measured. KV read is the share of the full cache that "
    "a decode row reads. The segments (attention to other) are those of one block in the last decode step."
)
WORDS = ("label", "settings")
HEADING_LETTERS = 13
COMMON = 3 / 4
"""Share of runs from which a setting is common and hence left out."""
GIB = 2**30
NOT_OF_RUNS = (
    "experiment", "kind", "label", "method", "method_name", "codec", "target_kv_frac", "model", "tasks",
    "results_dir", "data.root",
)  # fmt: skip
"""Settings that a table says elsewhere than among those of a run, or that play no part: where files lie."""
BRIEF = ("acc", "perplexity", "kl_nats", "top1_agreement")
"""Metrics shown in a terminal."""


class Quantity(NamedTuple):
    """How a column reads: its heading with the unit, the factor to that unit, digits after the point."""

    heading: str
    factor: float
    digits: int

    def show(self, value: float | None, stderr: float | None = None) -> str:
        """The number in this unit, without the sign of -0, with its standard error where there is one."""
        if value is None:
            return MISSING
        spread = "" if stderr is None else f" ± {self.factor * stderr:.{self.digits}f}"
        return f"{self.factor * value:z.{self.digits}f}{spread}"


METRICS = {
    "acc": Quantity("acc (%)", 100, 1),
    "acc_norm": Quantity("acc_norm (%)", 100, 1),
    "perplexity": Quantity("perplexity", 1, 3),
    "perplexity_full": Quantity("full cache's perplexity", 1, 3),
    "kl_nats": Quantity("KL (nats)", 1, 4),
    "top1_agreement": Quantity("top-1 agreement (%)", 100, 1),
    "attention_recall": Quantity("attention recall (%)", 100, 1),
}
LATENCY = {
    "batch_size": Quantity("batch", 1, 0),
    "prompt_len": Quantity("prompt", 1, 0),
    "gen_len": Quantity("generated", 1, 0),
    "prefill_s": Quantity("prefill (ms)", 1e3, 1),
    "decode_s": Quantity("decode (ms)", 1e3, 1),
    "total_s": Quantity("total (ms)", 1e3, 1),
    "tokens_per_s": Quantity("tokens/s", 1, 2),
    "step_p50_s": Quantity("step p50 (ms)", 1e3, 2),
    "step_p95_s": Quantity("step p95 (ms)", 1e3, 2),
    "exposed_transfer_s": Quantity("exposed transfer (ms)", 1e3, 1),
    "h2d_bytes": Quantity("to device (GiB)", 1 / GIB, 3),
    "d2h_bytes": Quantity("to host (GiB)", 1 / GIB, 3),
    "link_bytes_per_s": Quantity("link (GiB/s)", 1 / GIB, 2),
    "peak_device_bytes": Quantity("device peak (GiB)", 1 / GIB, 3),
    "attention_s": Quantity("attention (ms)", 1e3, 3),
    "ffn_s": Quantity("FFN (ms)", 1e3, 3),
    "prediction_s": Quantity("prediction (ms)", 1e3, 3),
    "transfer_s": Quantity("transfer (ms)", 1e3, 3),
    "other_s": Quantity("other (ms)", 1e3, 3),
}
KV_READ = Quantity("KV read (%)", 100, 1)


class Sheet(NamedTuple):
    """One table: what holds for all of it, the column headings, and the cells as text."""

    title: str
    header: list[str]
    lines: list[list[str]]


def render_markdown(experiment: str, pairs: Pairs) -> str:
    """The whole `.md` file: a table per model, accuracy and latency apart, chunks of perplexity below; what the paper
    gives stands at its end."""
    return markdown(experiment, NOTE, [*_sheets(pairs), *published(experiment)])


def render_modelled(figure: str, rows: Sequence[Row]) -> str:
    """The whole `.md` file of what the cost model predicts of a figure: a table per platform and model."""
    keys = dict.fromkeys((row["model"], row["platform"]) for row in rows)
    sheets = []
    for model, platform in keys:
        own = [row for row in rows if (row["model"], row["platform"]) == (model, platform)]
        sheets.append(_latency_sheet(f"{model} on {platform}, modelled", own))
    return markdown(f"{figure}, modelled", MODELLED_NOTE, sheets)


def published_rows() -> list[dict[str, str]]:
    """All that the paper is known to say, in the columns of `PUBLISHED`."""
    with PUBLISHED.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def published(experiment: str) -> Iterator[Sheet]:
    """What is known of the paper's figure or table of this name, as it stands in `PUBLISHED`."""
    rows = [row for row in published_rows() if row["figure"] == experiment]
    if rows:
        header = ["model", "series", "x_name", "x", "metric", "value", "kind"]
        yield Sheet("published", header, [[row[name] or MISSING for name in header] for row in rows])


def markdown(title: str, note: str, sheets: Iterable[Sheet]) -> str:
    """A whole `.md` file: heading, note, tables."""
    parts = [f"# {title}", note]
    for sheet in sheets:
        table = [sheet.header, ["---"] * len(sheet.header), *sheet.lines]
        lines = (" | ".join(cell.replace("|", "\\|") for cell in cells) for cells in table)
        parts += [f"## {sheet.title}", "\n".join(f"| {line} |" for line in lines)]
    return "\n\n".join(parts) + "\n"


def render_terminal(pairs: Pairs) -> str:
    """The same tables, the `BRIEF` metrics alone and no chunks, in columns aligned by blanks."""
    brief = [(record, [row for row in rows if _is_brief(row)]) for record, rows in pairs]
    return "\n\n".join(aligned(sheet) for sheet in _sheets([pair for pair in brief if pair[1]]))


def aligned(sheet: Sheet) -> str:
    """A table for a terminal. Headings wrap to as many lines as the longest needs; words stand left, numbers right."""
    wrapped = [textwrap.wrap(heading, HEADING_LETTERS) for heading in sheet.header]
    rows = [list(cells) for cells in zip_longest(*wrapped, fillvalue="")] + sheet.lines
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for cells in rows:
        aligned = [
            cell.ljust(width) if heading in WORDS else cell.rjust(width)
            for heading, cell, width in zip(sheet.header, cells, widths, strict=True)
        ]
        lines.append("  ".join(aligned))
    return "\n".join([sheet.title, "-" * len(lines[0]), *lines])


def _is_brief(row: Row) -> bool:
    return "metric" not in row or (row["metric"] in BRIEF and not _is_chunk(row))


def _sheets(pairs: Pairs) -> Iterator[Sheet]:
    sources = dict.fromkeys((rows[0]["model"], rows[0]["source"]) for _, rows in pairs)
    for model, source in sources:
        own = [pair for pair in pairs if (pair[1][0]["model"], pair[1][0]["source"]) == (model, source)]
        accuracy = [pair for pair in own if "metric" in pair[1][0]]
        latency = [pair for pair in own if "metric" not in pair[1][0]]
        title = f"{model}, {source}"
        if latency:
            yield _latency_sheet(title, [row for _, (row,) in latency])
        if accuracy:
            yield _accuracy_sheet(title, accuracy, lambda row: not _is_chunk(row))
        if any(_is_chunk(row) for _, rows in accuracy for row in rows):
            yield _accuracy_sheet(f"{title}, by tokens in the cache", accuracy, _is_chunk)


def _is_chunk(row: Row) -> bool:
    return row["task"].endswith("]")


def _latency_sheet(title: str, rows: Sequence[Row]) -> Sheet:
    shown = {name: quantity for name, quantity in LATENCY.items() if any(row.get(name) is not None for row in rows)}
    cells = [
        [row["label"], KV_READ.show(row.get("kv_frac")), *(shown[name].show(row.get(name)) for name in shown)]
        for row in rows
    ]
    return Sheet(title, ["label", KV_READ.heading, *(quantity.heading for quantity in shown.values())], cells)


class _Line(NamedTuple):
    """A line in the making. `runs` says, by kind of run, under which conditions the cells were measured."""

    label: str
    settings: str
    runs: dict[str, str]
    cells: dict[tuple[str, str], Row]

    def takes(self, label: str, settings: str, kind: str, run: str, cells: Mapping[tuple[str, str], Row]) -> bool:
        """Whether a run belongs here: the same method and conditions, and none of its cells taken."""
        same = (self.label, self.settings, self.runs.get(kind, run)) == (label, settings, run)
        return same and self.cells.keys().isdisjoint(cells)


def _accuracy_sheet(title: str, pairs: Pairs, wanted: Callable[[Row], bool]) -> Sheet:
    lines: list[_Line] = []
    of_methods = _distinctive(pairs, _method_settings, by="method_name")
    of_runs = _distinctive(pairs, _run_settings, by="kind")
    for (record, rows), settings, run in zip(pairs, of_methods, of_runs, strict=True):
        cells = {(row["task"], row["metric"]): row for row in rows if wanted(row)}
        label, kind = rows[0]["label"], record["config"]["kind"]
        line = next((line for line in lines if line.takes(label, settings, kind, run, cells)), None)
        if line is None:
            lines.append(line := _Line(label, settings, {}, {}))
        line.runs[kind] = run
        line.cells.update(cells)
    filled = [line for line in lines if line.cells]
    columns = sorted(dict.fromkeys(key for line in filled for key in line.cells), key=lambda key: rank(key[1]))
    headings = [f"{task} {_quantity(metric).heading}" for task, metric in columns]
    return Sheet(title, [*WORDS, KV_READ.heading, *headings], [_texts(line, columns) for line in filled])


def _texts(line: _Line, columns: Sequence[tuple[str, str]]) -> list[str]:
    settings = ", ".join(filter(None, [line.settings, *line.runs.values()]))
    rows = [line.cells.get(key) for key in columns]
    sizes = [row["kv_frac"] for row in rows if row is not None and row["kv_frac"] is not None]
    ends = dict.fromkeys(KV_READ.show(size) for size in (min(sizes), max(sizes))) if sizes else [MISSING]
    cells = [MISSING if row is None else _quantity(row["metric"]).show(row["value"], row["stderr"]) for row in rows]
    return [line.label, settings or MISSING, "-".join(ends), *cells]


def rank(metric: str) -> tuple[int, str]:
    """The order of metrics: as `METRICS` lists them, then the others by name."""
    known = list(METRICS)
    return (known.index(metric) if metric in known else len(known), metric)


def _quantity(metric: str) -> Quantity:
    return METRICS.get(metric, Quantity(metric, 1, 3))


def _distinctive(pairs: Pairs, settings: Callable[[Record], dict[str, Any]], *, by: str) -> list[str]:
    """For each run the settings that are not common to the runs alike in `by`, as `alpha=4, columns=sum`."""
    configs = [record["config"] for record, _ in pairs]
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for config in configs:
        for key, value in settings(config).items():
            counts[config[by], key][str(value)] += 1

    def is_shown(config: Record, key: str, value: Any) -> bool:
        count = counts[config[by], key]
        return value is not None and count[str(value)] < COMMON * count.total()

    return [
        ", ".join(f"{key}={value}" for key, value in settings(config).items() if is_shown(config, key, value))
        for config in configs
    ]


def _method_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config["method"], "codec": config["codec"], "target_kv_frac": config["target_kv_frac"]}


def _run_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    foreign = foreign_settings(config["kind"])
    flat = _flatten({key: value for key, value in config.items() if key not in (*NOT_OF_RUNS, *foreign)})
    return {key: value for key, value in flat.items() if key not in NOT_OF_RUNS}


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat

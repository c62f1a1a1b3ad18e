"""The leaderboard: a row for every method at every size, made of the records of two experiments,
and its Pareto fronts.

Every method runs with 0, 1 and 2 exempt layers. At each size two of them are shown: its paper's
number, and the best, which is the closest to the full cache on the text. `exempt_choice` says which
a row is.

Fidelity and tasks come from `leaderboard-scores`, the decode step from `leaderboard-times`, which
times a method at one size. A step at another size, or over another link, is modelled: seconds of
compute as timed, bytes over the link in proportion to the size. As in live decoding, tokens that
are selected a layer ahead are transferred during compute; `late_bytes`, selected by a layer's own
query, are waited for.
"""

import itertools
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.errors import UserError
from harness.results.columns import (
    BOARD,
    BOARD_TASKS,
    KL,
    NLL,
    NUM_CONTEXTS,
    NUM_WINDOWS,
    SIZE,
    STEP,
    TOP1,
    Column,
    TableRow,
    check,
    grouped,
    read_table,
    shape_of,
)
from harness.results.record import BAD_VALUE_ERRORS, Record, current, read_records
from harness.results.samples import Baselines, nll_difference, num_contexts
from harness.results.student import ONE_SIGMA, critical_value
from harness.settings.kinds import OF_CODECS
from harness.settings.paths import COMMAND, CONF_DIR, table_to_read
from harness.settings.schema import options

log = logging.getLogger(__name__)

NAME, FRONTIER = "leaderboard", "frontier"
"""Tables made here."""
SCORES, TIMES = "leaderboard-scores", "leaderboard-times"
"""Experiments they are made of."""
GRID = CONF_DIR / "grid" / "leaderboard.yaml"
_WRITTEN: Mapping[str, Any] = yaml.safe_load(GRID.read_text(encoding="utf-8"))
REFERENCES: Mapping[str, str] = _WRITTEN["references"]
"""Methods that every other should lie between at equal size: `upper`, `lower`."""
PAPERS_EXEMPT_LAYERS: Mapping[str, int] = {
    method: number
    for number, methods in _WRITTEN["papers_exempt_layers"].items()
    for method in methods
}
"""First layers that a method's own paper or code leaves to the full cache."""
BEST, PAPERS, BOTH = "best", "paper's", "both"
"""What `exempt_choice` says; empty for another number."""
EQUAL = 0.01
"""Sizes that differ by at most this count as equal, as when a method is sized."""
TASKS = {column.name for column in BOARD_TASKS}
HIGHER = {TOP1.name, *TASKS}
"""Columns in which more is better."""
READS_ALL = "reads all"
"""The family of the full cache."""
COSTS = {"size": SIZE.name, "step time": STEP.name}
"""Columns of the costs, by the front's name."""
SAME_SIZE, SAME_STEP = 0.001, 0.01
"""Differences of size, absolute, and of step time, relative, that put no method before another."""


def board_rows(results_dir: str | Path) -> list[TableRow]:
    """The leaderboard's rows of the records in a results folder. Of two runs for one cell the newer
    counts."""
    scores, times = (
        sorted(current(read_records(results_dir, name)), key=lambda record: record["started"])
        for name in (SCORES, TIMES)
    )
    full = Baselines(scores)
    timed = {_method(record): record for record in times}
    rows = []
    for (method, _), runs in grouped(
        scores, lambda record: (_method(record), record["config"]["size"])
    ).items():
        try:
            row = _row(runs, full)
            row |= _step(row, timed.get(method))
            check(BOARD, [row])
            rows.append(row)
        except BAD_VALUE_ERRORS as error:
            used = (*runs, *filter(None, [timed.get(method)]))
            named = ", ".join(f"{record['experiment']}/{record['run_id']}" for record in used)
            log.warning("%s: damaged record (%r); left out of the leaderboard", named, error)
    return rows


def complete(rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows by model, size and label, with what depends on other rows: `exempt_choice`, `front`
    and `outside`.

    The upper reference, which no link allows, is on no front. A method at another size than asked
    has neither front nor outside, and so has one with another number of exempt layers than its
    best.
    """
    rows = sorted(
        rows, key=lambda row: (row["model"], row["asked_size"] or 1, row["label"], row["settings"])
    )
    of_method = grouped(
        rows,
        lambda row: tuple(
            row[name] for name in ("model", "method", "codec", "label", "asked_size")
        ),
    )
    best = {id(min(own, key=_distance)) for own in of_method.values()}
    rows = [row | {"exempt_choice": _choice(row, id(row) in best)} for row in rows]
    compared = [row for row in rows if is_best(row) and has_its_size(row)]
    candidates = [row for row in compared if row["method"] != REFERENCES["upper"]]
    front = dict(zip(map(id, candidates), fronts(candidates), strict=True))
    outside = {id(row): "; ".join(_outside(row, compared)) for row in compared}
    return [
        row | {"front": front.get(id(row), ""), "outside": outside.get(id(row), "")} for row in rows
    ]


def _distance(row: TableRow) -> tuple[bool, float]:
    """Sort key of a method's rows of one size, the best first: those that have the size on the
    text, by KL there."""
    return not has_its_size(row, [KL]), math.inf if row.get(KL.name) is None else row[KL.name]


def _choice(row: TableRow, best: bool) -> str:
    papers = (
        row["exempt_layers"] is not None
        and PAPERS_EXEMPT_LAYERS.get(row["method"]) == row["exempt_layers"]
    )
    return BOTH if papers and best else BEST if best else PAPERS if papers else ""


def is_best(row: TableRow) -> bool:
    """Whether a completed row has its method's best number of exempt layers."""
    return row["exempt_choice"] in (BEST, BOTH)


def cells_of_tasks(results_dir: str, size: float | None = None) -> list[list[Any]]:
    """`${on_the_leaderboard:${results_dir}}` in a grid: [method, size, exempt layers] of each row
    that a page shows.

    size: takes the place of every asked size. A number of exempt layers that is not a method's
    best, and with which it cannot have its size, is left out. UserError for a damaged table.
    """
    path = table_to_read(results_dir, f"{NAME}.csv")
    rows = read_table(path) if path else []
    shown = {
        (
            row["method"],
            row["asked_size"] and f"nearest:{size or row['asked_size']}",
            row["exempt_layers"],
        ): None
        for row in rows
        if row["exempt_layers"] is not None
        and row["method"] in options("method")
        and (
            row["asked_size"] is None or not row["codec"]
        )  # of a preset, no codec that was put on a method
        and (is_best(row) or (row["exempt_choice"] and has_its_size(row, [KL])))
    }
    return [list(cell) for cell in shown]


def frontier(rows: Sequence[TableRow]) -> list[TableRow]:
    """Rows of the frontier table: the completed rows that are on a front, by KL."""
    chosen = [{**row, "experiment": FRONTIER} for row in rows if row["front"]]
    return sorted(chosen, key=lambda row: row[KL.name])


def has_its_size(row: TableRow, where: Sequence[Column] = (KL, *BOARD_TASKS)) -> bool:
    """Whether a method reads its asked size on the text and on every task, or only `where`; True if
    none was asked."""
    sizes = [size_of(row, column) for column in where]
    return row["asked_size"] is None or not any(
        abs(size - row["asked_size"]) > EQUAL for size in sizes
    )


def size_of(row: TableRow, column: Column) -> float:
    """The size at which `column` was measured; NaN if it was not."""
    size = row.get(f"{column.name}_size" if column in BOARD_TASKS else "size")
    return math.nan if size is None else size


def fronts(rows: Sequence[TableRow]) -> list[str]:
    """For each row the costs for which it is on the front of its model, as in "size, step time"."""
    found: dict[str, set[int]] = {words: set() for words in COSTS}
    for of_model in grouped(rows, lambda row: row["model"]).values():
        for words, cost in COSTS.items():
            found[words] |= {id(row) for row in _front(of_model, cost)}
    return [", ".join(words for words, front in found.items() if id(row) in front) for row in rows]


def _front(rows: Sequence[TableRow], cost: str) -> list[TableRow]:
    """The rows that are worth their cost, found from the cheapest on.

    A row is on the front if it is certainly closer to the full cache than the closest cheaper row
    of the front, and no row of the same cost is certainly closer. A row whose own error is large
    thus excludes no other.
    """
    points = [row for row in rows if row.get(cost) is not None and row.get(KL.name) is not None]
    front: list[TableRow] = []
    for row in sorted(points, key=lambda row: row[cost]):
        tolerance = SAME_SIZE if cost == SIZE.name else SAME_STEP * row[cost]
        cheaper = [other for other in front if row[cost] - other[cost] > tolerance]
        alike = [other for other in points if abs(row[cost] - other[cost]) <= tolerance]
        closest_cheaper = min(cheaper, key=lambda other: other[KL.name], default=None)
        closest_alike = min(alike, key=lambda other: other[KL.name])
        gains = closest_cheaper is None or _certainly_closer(row, closest_cheaper)
        if gains and not _certainly_closer(closest_alike, row):
            front.append(row)
    return front


def _certainly_closer(one: TableRow, other: TableRow) -> bool:
    """Whether the KL of `one` is lower by more than half the width of the interval of the
    difference that has the confidence of one standard error (68 %). Of a single window no error is
    known, and the numbers decide."""
    stderr = math.hypot(*(row.get(f"{KL.name}_stderr") or 0 for row in (one, other)))
    lead = other[KL.name] - one[KL.name]
    return lead > (
        critical_value(_fewest((one, other), NUM_WINDOWS.name), ONE_SIGMA) * stderr
        if stderr
        else 0.0
    )


def _fewest(rows: Iterable[TableRow], column: str) -> float | None:
    """The least number of windows or contexts of `rows`; None if no row says."""
    return min((row[column] for row in rows if row.get(column) is not None), default=None)


def _outside(row: TableRow, rows: Sequence[TableRow]) -> Iterator[str]:
    """In words, each score beyond a reference of `rows` at the same size whose difference has a 95
    % interval without zero."""
    for column, (side, method) in itertools.product((KL, TOP1, *BOARD_TASKS), REFERENCES.items()):
        for reference in rows:
            pair = (row, reference)
            errors: list[Any] = [each.get(f"{column.name}_stderr") for each in pair]
            if (
                reference["method"] != method
                or reference is row
                or reference["model"] != row["model"]
                or None in (*errors, *(each.get(column.name) for each in pair))
                or not abs(size_of(row, column) - size_of(reference, column)) <= EQUAL
            ):
                continue
            lead = (row[column.name] - reference[column.name]) * (
                1 if column.name in HIGHER else -1
            )
            error = math.hypot(*errors)
            count = (
                f"{column.name}_{NUM_CONTEXTS.name}" if column in BOARD_TASKS else NUM_WINDOWS.name
            )
            if (lead if side == "upper" else -lead) > critical_value(_fewest(pair, count)) * error:
                gap = column._replace(heading="").show(abs(lead), error)
                yield f"{column.words} {'better' if lead > 0 else 'worse'} than {reference['label']} by {gap}"


def step_seconds(row: Mapping[str, float], bytes_per_s: float) -> float:
    """Seconds of a decode step of `row` over a link of that rate."""
    late_s = row["late_bytes"] / bytes_per_s
    return max(row["compute_s"], row["link_bytes"] / bytes_per_s - late_s) + late_s


def fastest(rows: Sequence[TableRow], bytes_per_s: float, max_kl: float) -> TableRow:
    """The row with the shortest step among those within `max_kl`. Raises UserError if none is,
    naming the closest."""
    closest = min(rows, key=lambda row: row[KL.name])
    if closest[KL.name] > max_kl:
        named = (
            f"{closest['label']} at size {closest[SIZE.name]:.1%}, has {KL.show(closest[KL.name])}"
        )
        raise UserError(f"max_kl={max_kl:g}: no method has it; the closest, {named} nats")
    within = (row for row in rows if row[KL.name] <= max_kl)
    return min(within, key=lambda row: step_seconds(row, bytes_per_s))


def answer(results_dir: str | Path, model: str, link_gbps: float, max_kl: float) -> str:
    """A model's fastest setting within `max_kl`, in words that part what was measured from what was
    modelled.

    It is one of the rows of `tables/leaderboard.csv` that were decoded over a link. Raises
    UserError if there is none.
    """
    path = table_to_read(results_dir, f"{NAME}.csv")
    if path is None:
        missing = Path(results_dir) / "tables" / f"{NAME}.csv"
        raise UserError(f"{missing}: there is none yet; `{COMMAND} grid=leaderboard` makes it")
    rows = read_table(path)
    if shape_of(tuple(rows[0]) if rows else ()) not in ("board", None):
        raise UserError(f"{path}: not a leaderboard; `{COMMAND} grid=leaderboard` makes it anew")
    own = [row for row in rows if row["model"] == model and row["method"] != REFERENCES["upper"]]
    needed = (KL.name, "compute_s", "link_bytes", "late_bytes")
    timed = [row for row in own if all(row[name] is not None for name in needed)]
    if not timed:
        raise UserError(
            f"{path}: no timed method of {model} in it; `{COMMAND} grid=leaderboard` adds them"
        )
    row = fastest(timed, link_gbps * 1e9, max_kl)
    settings = f"method={row['method']}" + (f" codec={row['codec']}" if row["codec"] else "")
    settings += "" if row["asked_size"] is None else f" size={row['asked_size']:g}"
    settings += (
        ""
        if row["exempt_layers"] is None
        else f" method.num_exempt_layers={row['exempt_layers']:g}"
    )
    shape = f"{row['model']} on {row['platform']}, batch {row['batch_size']:.0f}, prompt {row['prompt_len']:,.0f}"
    step = STEP.show(step_seconds(row, link_gbps * 1e9))
    return (
        f"{row['label']} ({settings}): {step} ms a step over {link_gbps:g} GB/s, modelled from "
        f"measured compute ({STEP.show(row['compute_s'])} ms) and bytes ({row['link_bytes'] / 2**20:.2f} MiB); "
        f"KL {KL.show(row[KL.name], row[f'{KL.name}_stderr'])} nats, measured; {shape}"
    )


def _method(record: Record) -> str:
    """Model, method and codec, whatever the size, as words that compare."""
    config = record["config"]
    names = ("method_name", "method", *OF_CODECS)
    return json.dumps(
        [config["model"]["name"], *(config.get(name) for name in names)], sort_keys=True
    )


def _row(runs: Sequence[Record], full: Baselines) -> TableRow:
    """Fidelity and tasks. settings: all of the method's as it ran, and the codec."""
    config = runs[0]["config"]
    scored = next((record for record in runs if record["kind"] != "tasks"), runs[0])
    resolved = next(iter(scored["methods"].values()), scored["config"]["method"])
    settings = {
        **resolved,
        **{name: scored["config"][name] for name in ("codec", "value_codec", "size")},
    }
    family = _family(runs[0])
    row: TableRow = {
        "experiment": NAME,
        "model": config["model"]["name"],
        "method": config["method_name"],
        "family": family,
        "label": config["label"],
        "codec": config["codec"],
        "settings": ", ".join(
            f"{name}={value}" for name, value in settings.items() if value is not None
        ),
        "asked_size": config["size"],
        "exempt_layers": None if family == READS_ALL else config["method"]["num_exempt_layers"],
        "source": "measured",
    }
    for record in runs:
        for name, entries in record["metrics"].items():
            if record["kind"] != "tasks":
                row |= _text(record, entries)
            elif name in TASKS:
                row |= _task(record, name, entries, full)
    return row


def _family(record: Record) -> str:
    """In a word, how a method reads less than the full cache."""
    if record["when"] != "kept":
        return "oracle" if record["when"] == "true_scores" else "retrieves"
    if record["config"]["size"] is not None:
        return "evicts"
    return (
        READS_ALL
        if all(entries["size"] == 1 for entries in record["metrics"].values())
        else "codes"
    )


def _text(record: Record, entries: Mapping[str, Any]) -> TableRow:
    shown = (
        "size",
        "device_frac",
        "resident_frac",
        *(f"{each.name}{end}" for each in (KL, TOP1) for end in ("", "_stderr")),
    )
    nll = nll_difference(record["samples"]["windows"])
    differences = {
        NLL.name: nll.value,
        f"{NLL.name}_stderr": nll.stderr,
        NUM_WINDOWS.name: nll.num_contexts,
    }
    return {name: entries.get(name) for name in shown} | differences


def _task(record: Record, name: str, entries: Mapping[str, Any], full: Baselines) -> TableRow:
    """A task's cells. The standard error is that of the difference to the full cache, or else that
    of the value."""
    cells: TableRow = {"stderr": entries.get("acc_stderr"), "size": entries["size"]}
    cells[NUM_CONTEXTS.name] = num_contexts(record["samples"].get(name, ()), "acc")
    found = full.difference(record, name, "acc")
    if found is not None:
        cells |= {"difference": found.value, "stderr": found.stderr, "detectable": found.detectable}
        cells[NUM_CONTEXTS.name] = found.num_contexts
    return {name: entries["acc"]} | {f"{name}_{cell}": value for cell, value in cells.items()}


def _step(row: TableRow, timed: Record | None) -> TableRow:
    """The decode step: as timed, or modelled at the row's own size from a step that was timed at
    another size.

    The bytes of the exempt layers, where there are any the only ones that a late method transfers
    ahead, are the same at any size. {} if no step was timed or no transfer was counted.
    """
    if timed is None or timed["metrics"]["h2d_bytes"] is None:
        return {}
    metrics, steps = timed["metrics"], timed["metrics"]["gen_len"] - 1
    step = {
        name: metrics[name] for name in ("platform", "batch_size", "prompt_len", "link_bytes_per_s")
    } | {
        "compute_s": (metrics["decode_s"] - metrics["exposed_transfer_s"]) / steps,
        "link_bytes": metrics["h2d_bytes"] / steps,
        "late_bytes": metrics["late_bytes"] / steps,
        "step_s": metrics["decode_s"] / steps,
        "step_source": metrics["source"],
    }
    if row["asked_size"] == timed["config"]["size"]:
        return step
    step["step_source"] = "modelled"
    bytes_per_s = step["link_bytes_per_s"]
    if row.get("size") is None or not bytes_per_s:
        return step | {"step_s": None}
    ratio = row["size"] / metrics["size"]
    link_bytes, late_bytes = step["link_bytes"] * ratio, step["late_bytes"] * ratio
    if row["exempt_layers"] and late_bytes:
        late_bytes = max(0.0, link_bytes - (step["link_bytes"] - step["late_bytes"]))
    scaled = step | {"link_bytes": link_bytes, "late_bytes": late_bytes}
    change = step_seconds(scaled, bytes_per_s) - step_seconds(step, bytes_per_s)
    return scaled | {"step_s": step["step_s"] + change}

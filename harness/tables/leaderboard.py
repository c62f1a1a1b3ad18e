"""The leaderboard: a row for every method at every size, made of the records of two experiments, and its Pareto fronts.

Fidelity and tasks come from `leaderboard-scores`, the decode step from `leaderboard-times`, which times a method at one
size. A step at another size, or over another link, is modelled: seconds of compute as timed, bytes over the link in
proportion to the size. As in live decoding, tokens that are selected a layer ahead are transferred during compute;
`late_bytes`, selected by a layer's own query, are waited for.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.errors import UserError
from harness.records.record import ODD, current, read_records
from harness.records.samples import Baselines, nll_difference
from harness.tables.columns import (
    BOARD,
    BOARD_TASKS,
    DEVICE_FRAC,
    KL,
    NLL,
    RESIDENT_FRAC,
    SIZE,
    STEP,
    TOP1,
    Column,
    TableRow,
    check,
)

log = logging.getLogger(__name__)

Record = Mapping[str, Any]

NAME, FRONTIER = "leaderboard", "frontier"
"""Tables made here."""
SCORES, TIMES = "leaderboard-scores", "leaderboard-times"
"""Experiments they are made of."""
GRID = Path(__file__).resolve().parents[2] / "conf" / "grid" / "leaderboard.yaml"
REFERENCES: Mapping[str, str] = yaml.safe_load(GRID.read_text(encoding="utf-8"))["references"]
"""Methods that every other should lie between at equal size: `upper`, `lower`."""
EQUAL = 0.01
"""Sizes that differ by at most this count as equal, as when a method is sized."""
CERTAIN = 2
"""Standard errors by which a method must be outside the references to be marked."""
TASKS = {column.name for column in BOARD_TASKS}
HIGHER = {TOP1.name, *TASKS}
"""Columns in which more is better."""
COSTS = {"size": SIZE.name, "step time": STEP.name}
"""Columns of the costs, by the front's name."""
SAME_SIZE, SAME_STEP = 0.001, 0.01
"""Differences of size, absolute, and of step time, relative, that put no method before another."""


def board_rows(results_dir: str | Path) -> list[TableRow]:
    """The leaderboard's rows of the records in a results folder."""
    scores, times = (_by_age(current(read_records(results_dir, name))) for name in (SCORES, TIMES))
    runs: dict[tuple[Any, ...], list[Record]] = {}
    for record in scores:
        runs.setdefault((_method(record["config"]), record["config"]["size"]), []).append(record)
    full = Baselines(scores)
    timed = {_method(record["config"]): record for record in times}
    made = (_made(own, timed.get(method), full) for (method, _), own in runs.items())
    return [row for row in made if row is not None]


def complete(rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows by model, size and label, with what depends on other rows: `front` and `outside`.

    The upper reference, which no link allows, is on no front. A method at another size than asked has neither.
    """
    rows = sorted(rows, key=lambda row: (row["model"], row["asked_size"] or 1, row["label"], row["settings"]))
    candidates = [row for row in rows if row["method"] != REFERENCES["upper"] and has_its_size(row)]
    found = {id(row): front for row, front in zip(candidates, fronts(candidates), strict=True)}
    outside = [_outside(row, rows) if has_its_size(row) else () for row in rows]
    return [
        row | {"front": found.get(id(row), ""), "outside": "; ".join(words)}
        for row, words in zip(rows, outside, strict=True)
    ]


def frontier(rows: Sequence[TableRow]) -> list[TableRow]:
    """Rows of the frontier table: the completed rows that are on a front, by KL."""
    chosen = [{**row, "experiment": FRONTIER} for row in rows if row["front"]]
    return sorted(chosen, key=lambda row: row[KL.name])


def has_its_size(row: TableRow) -> bool:
    """Whether a method reads its asked size on the text and on every task; True if none was asked."""
    sizes = [size_of(row, column) for column in (KL, *BOARD_TASKS)]
    return row["asked_size"] is None or not any(abs(size - row["asked_size"]) > EQUAL for size in sizes)


def size_of(row: TableRow, column: Column) -> float:
    """The size at which `column` was measured; NaN if it was not."""
    name = f"{column.name}_{SIZE.name}" if column.name in TASKS else SIZE.name
    return row[name] if row.get(name) is not None else math.nan


def fronts(rows: Sequence[TableRow]) -> list[str]:
    """For each row the costs for which no other row of its model beats it, as in "size, step time"."""
    of_rows: list[list[str]] = [[] for _ in rows]
    for words, cost in COSTS.items():
        known = [row.get(cost) is not None and row.get(KL.name) is not None for row in rows]
        points = [row for row, is_known in zip(rows, known, strict=True) if is_known]
        for found, row, is_known in zip(of_rows, rows, known, strict=True):
            if is_known and not any(_beats(other, row, cost) for other in points):
                found.append(words)
    return [", ".join(found) for found in of_rows]


def _beats(one: TableRow, other: TableRow, cost: str) -> bool:
    """Whether `one` is better in cost or KL and not worse in the other, beyond the tolerance: one standard error of the
    difference in KL, and `SAME_SIZE` or `SAME_STEP`."""
    if one["model"] != other["model"]:
        return False
    cheaper = other[cost] - one[cost]
    closer = other[KL.name] - one[KL.name]
    same_cost = SAME_SIZE if cost == SIZE.name else SAME_STEP * other[cost]
    same_kl = math.hypot(*(row.get(f"{KL.name}_stderr") or 0 for row in (one, other)))
    return cheaper >= -same_cost and closer >= -same_kl and (cheaper > same_cost or closer > same_kl)


def _outside(row: TableRow, rows: Sequence[TableRow]) -> Iterator[str]:
    """In words, each score beyond a reference at the same size by more than two standard errors."""
    for column in (KL, TOP1, *BOARD_TASKS):
        for side, method in REFERENCES.items():
            for reference in rows:
                if reference["method"] != method or reference is row or not _comparable(row, reference, column):
                    continue
                lead = (row[column.name] - reference[column.name]) * (1 if column.name in HIGHER else -1)
                errors = [each.get(f"{column.name}_stderr") for each in (row, reference)]
                if None in errors:
                    continue
                error = math.hypot(*(each or 0 for each in errors))
                if (lead if side == "upper" else -lead) > CERTAIN * error:
                    gap = column._replace(heading="").show(abs(lead), error)
                    yield f"{column.words} {'better' if lead > 0 else 'worse'} than {reference['label']} by {gap}"


def _comparable(row: TableRow, reference: TableRow, column: Column) -> bool:
    known = row.get(column.name) is not None and reference.get(column.name) is not None
    same_model = row["model"] == reference["model"]
    return known and same_model and abs(size_of(row, column) - size_of(reference, column)) <= EQUAL


def step_seconds(row: Mapping[str, float], bytes_per_s: float) -> float:
    """Seconds of a decode step of `row` over a link of that rate."""
    late_s = row["late_bytes"] / bytes_per_s
    return max(row["compute_s"], row["link_bytes"] / bytes_per_s - late_s) + late_s


def fastest(rows: Sequence[TableRow], bytes_per_s: float, max_kl: float) -> TableRow:
    """The row with the shortest step among those within `max_kl`. Raises UserError if none is, naming the closest."""
    closest = min(rows, key=lambda row: row[KL.name])
    if closest[KL.name] > max_kl:
        named = f"{closest['label']} at size {closest[SIZE.name]:.1%}, has {KL.show(closest[KL.name])}"
        raise UserError(f"max_kl={max_kl:g}: no method has it; the closest, {named} nats")
    within = (row for row in rows if row[KL.name] <= max_kl)
    return min(within, key=lambda row: step_seconds(row, bytes_per_s))


def _made(runs: Sequence[Record], timed: Record | None, full: Baselines) -> TableRow | None:
    try:
        row = _row(runs, full) | _step(runs[0], timed)
        row |= _scaled(row)
        check(BOARD, [row])
        return row
    except ODD as error:
        named = ", ".join(f"{record['experiment']}/{record['run_id']}" for record in (*runs, *filter(None, [timed])))
        log.warning("%s: damaged record (%r); left out of the leaderboard", named, error)
        return None


def _by_age(records: Sequence[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record["started"])


def _method(config: Mapping[str, Any]) -> str:
    """Model, method and codec, whatever the size, as words that compare."""
    names = ("method_name", "method", "codec", "value_codec", "group_size")
    return json.dumps([config["model"]["name"], *(config.get(name) for name in names)], sort_keys=True)


def _row(runs: Sequence[Record], full: Baselines) -> TableRow:
    """Fidelity and tasks; of two runs for one cell the newer counts."""
    config = runs[0]["config"]
    row: TableRow = {
        "experiment": NAME,
        "model": config["model"]["name"],
        "method": config["method_name"],
        "family": _family(runs[0]),
        "label": config["label"],
        "codec": config["codec"],
        "settings": _settings(next((record for record in runs if record["kind"] != "tasks"), runs[0])),
        "asked_size": config["size"],
        "source": "measured",
    }
    for record in runs:
        for name, entries in record["metrics"].items():
            row |= _task(record, name, entries, full) if record["kind"] == "tasks" else _text(record, entries)
    return row


def _family(record: Record) -> str:
    """In a word, how a method reads less than the full cache."""
    if record["when"] != "kept":
        return "oracle" if record["when"] == "true_scores" else "retrieves"
    if record["config"]["size"] is not None:
        return "evicts"
    return "reads all" if all(entries["size"] == 1 for entries in record["metrics"].values()) else "codes"


def _text(record: Record, entries: Mapping[str, Any]) -> TableRow:
    shown = [column.name for column in (SIZE, DEVICE_FRAC, RESIDENT_FRAC, KL, TOP1)]
    nll = nll_difference(record["samples"]["windows"])
    return {name: entries.get(name) for name in (*shown, f"{KL.name}_stderr", f"{TOP1.name}_stderr")} | {
        NLL.name: nll.value,
        f"{NLL.name}_stderr": nll.stderr,
    }


def _task(record: Record, name: str, entries: Mapping[str, Any], full: Baselines) -> TableRow:
    """A task's cells. The standard error is that of the difference to the full cache, or else that of the value."""
    if name not in TASKS:
        return {}
    cells: TableRow = {"stderr": entries.get("acc_stderr"), "size": entries["size"]}
    found = full.difference(record, name, "acc")
    if found is not None:
        cells |= {"difference": found.value, "stderr": found.stderr, "detectable": found.detectable}
    return {name: entries["acc"]} | {f"{name}_{cell}": value for cell, value in cells.items()}


def _step(scored: Record, timed: Record | None) -> TableRow:
    """The timed decode step and its size; {} if none was timed or no transfer was counted."""
    if timed is None or timed["metrics"]["h2d_bytes"] is None:
        return {}
    metrics, steps = timed["metrics"], timed["metrics"]["gen_len"] - 1
    same_size = scored["config"]["size"] == timed["config"]["size"]
    return {
        **{name: metrics[name] for name in ("platform", "batch_size", "prompt_len", "link_bytes_per_s")},
        "compute_s": (metrics["decode_s"] - metrics["exposed_transfer_s"]) / steps,
        "link_bytes": metrics["h2d_bytes"] / steps,
        "late_bytes": metrics["late_frac"] * metrics["h2d_bytes"] / steps,
        "timed_step_s": metrics["decode_s"] / steps,
        "step_s": metrics["decode_s"] / steps if same_size else None,
        "step_source": metrics["source"] if same_size else "modelled",
        "timed_size": metrics["size"],
    }


def _scaled(row: TableRow) -> TableRow:
    """Bytes and seconds at the row's own size, from a step that was timed at another size.

    The bytes of the exempt layers, the only ones that a late method transfers ahead, are the same at any size.
    """
    if row.get("step_source") != "modelled" or row.get("size") is None or not row["link_bytes_per_s"]:
        return {}
    link_bytes = row["link_bytes"] * row["size"] / row["timed_size"]
    hidden = row["link_bytes"] - row["late_bytes"]
    late_bytes = max(0.0, link_bytes - hidden) if row["late_bytes"] else 0.0
    scaled = {"compute_s": row["compute_s"], "link_bytes": link_bytes, "late_bytes": late_bytes}
    change = step_seconds(scaled, row["link_bytes_per_s"]) - step_seconds(row, row["link_bytes_per_s"])
    return scaled | {"step_s": row["timed_step_s"] + change}


def _settings(record: Record) -> str:
    """All settings of the method as it ran, and the codec."""
    config = record["config"]
    resolved = next(iter(record["methods"].values()), config["method"])
    others = {name: config[name] for name in ("codec", "value_codec", "size")}
    return ", ".join(f"{name}={value}" for name, value in {**resolved, **others}.items() if value is not None)

"""The leaderboard: every method at every size, a row each, made of two experiments' records.

Fidelity and tasks come from `leaderboard-scores`, a decode step from `leaderboard-times`, which times a method at one
size. Differences to the full cache are of the same windows and questions (`harness.records.baseline`).
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.records.baseline import Baselines
from harness.records.form import ODD
from harness.records.record import current, read_records
from harness.records.samples import surprise
from harness.tables.columns import (
    BOARD,
    BOARD_TASKS,
    DEVICE_FRAC,
    KL,
    NLL,
    RESIDENT_FRAC,
    SIZE,
    TOP1,
    TableRow,
    check,
)
from harness.tables.frontier import fronts, step_seconds

log = logging.getLogger(__name__)

Record = Mapping[str, Any]

NAME, FRONTIER = "leaderboard", "frontier"
"""The tables that are made here."""
SCORES, TIMES = "leaderboard-scores", "leaderboard-times"
"""The experiments behind them."""
GRID = Path(__file__).resolve().parents[2] / "conf" / "grid" / "leaderboard.yaml"
BOUNDS: Mapping[str, str] = yaml.safe_load(GRID.read_text(encoding="utf-8"))["bounds"]
"""The methods between which every other lies at equal bytes: `upper`, `lower`."""
ERRORS = tuple(f"{column.name}_stderr" for column in (KL, TOP1))


def tables(results_dir: str | Path) -> dict[str, list[TableRow]]:
    """The rows of both tables. The upper bound, which no link allows, is on no front."""
    rows = list(_rows(current(read_records(results_dir, SCORES)), current(read_records(results_dir, TIMES))))
    real = [row for row in rows if row["method"] != BOUNDS["upper"]]
    for row, front in zip(real, fronts(real), strict=True):
        row["front"] = front
    chosen = [{**row, "experiment": FRONTIER} for row in real if row["front"]]
    return {NAME: rows, FRONTIER: sorted(chosen, key=lambda row: row[KL.name])}


def _rows(scores: Sequence[Record], times: Sequence[Record]) -> Iterator[TableRow]:
    """By model, size and label; of two runs for one cell the newer counts."""
    runs: dict[tuple[Any, ...], list[Record]] = {}
    for record in _by_age(scores):
        runs.setdefault((_method(record["config"]), record["config"]["size"]), []).append(record)
    full = Baselines(scores)
    timed = {_method(record["config"]): record for record in _by_age(times)}
    made = (_made(own, timed.get(method), full) for (method, _), own in runs.items())
    rows = [row for row in made if row is not None]
    yield from sorted(rows, key=lambda row: (row["model"], row["asked_size"] or 1, row["label"], row["settings"]))


def _made(runs: Sequence[Record], timed: Record | None, full: Baselines) -> TableRow | None:
    """The row of a method at a size; None, with a warning, where a record does not have what a row is made of."""
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
    """What runs of one method have in common whatever its size, as words that compare."""
    names = ("method_name", "method", "codec", "value_codec", "group_size")
    return json.dumps([config["model"]["name"], *(config.get(name) for name in names)], sort_keys=True)


def _reads_all(record: Record) -> bool:
    return all(entries["size"] == 1 for entries in record["metrics"].values())


def _row(runs: Sequence[Record], full: Baselines) -> TableRow:
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
            if record["kind"] == "tasks":
                row |= _task(record, name, entries, full)
            else:
                row |= _text(record, entries)
    return row


def _family(record: Record) -> str:
    """How a method reads less, in a word, by when it learns what it reads."""
    if record["when"] != "kept":
        return "bound" if record["when"] == "true_scores" else "retrieves"
    if record["config"]["size"] is not None:
        return "evicts"
    return "reads all" if _reads_all(record) else "codes"


def _text(record: Record, entries: Mapping[str, Any]) -> TableRow:
    shown = (*(column.name for column in (SIZE, DEVICE_FRAC, RESIDENT_FRAC, KL, TOP1)), *ERRORS)
    nll = surprise(record["samples"]["windows"])
    return {name: entries.get(name) for name in shown} | {NLL.name: nll.value, f"{NLL.name}_stderr": nll.stderr}


def _task(record: Record, name: str, entries: Mapping[str, Any], full: Baselines) -> TableRow:
    """A task's cells; the error is that of the difference to the full cache, without one that of the value."""
    if name not in {task.name for task in BOARD_TASKS}:
        return {}
    less = full.difference(record, name, "acc")
    compared: TableRow = {f"{name}_stderr": entries.get("acc_stderr")}
    if less is not None:
        compared = {"difference": less.value, "stderr": less.stderr, "detectable": less.detectable}
        compared = {f"{name}_{cell}": value for cell, value in compared.items()}
    return {name: entries["acc"], f"{name}_size": entries["size"]} | compared


def _step(scored: Record, timed: Record | None) -> TableRow:
    """What was timed of the method, and at which share of the cache; nothing where no transfer was counted."""
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
    """Bytes and seconds at the row's own size, where another was timed: that step, and what other bytes change.

    The exempt layers' rows, which are all that a late method hides, are the same at any size.
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
    resolved = next(iter(record.get("methods", {}).values()), config["method"])
    others = {name: config[name] for name in ("codec", "value_codec", "size")}
    return ", ".join(f"{name}={value}" for name, value in {**resolved, **others}.items() if value is not None)

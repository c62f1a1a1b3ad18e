"""The evidence of the board: a row for each window of a text, each context of a task and each timed
decode step.

`experiment=board` writes them as three tables. The board is made of these alone, so results without
their records can be shipped, joined and extended. `evidence_of` makes the tables of records, `read`
reads those of a results folder.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.errors import UserError
from harness.results.columns import IDENTITY, TABLES, read_frame, with_columns
from harness.results.record import Record, in_words
from harness.results.samples import is_full
from harness.settings.kinds import OF_CODECS
from harness.settings.paths import COMMAND, models_beside, table_to_read

TEXTS, ANSWERS, STEPS = "board-texts", "board-answers", "board-steps"
SHAPES = {TEXTS: "board_texts", ANSWERS: "board_answers", STEPS: "board_steps"}
"""The tables."""


def evidence_of(records: Iterable[Record]) -> dict[str, pd.DataFrame]:
    """The tables of finished records, by name; of two runs of one identity the newer counts."""
    labels: dict[str, str] = {}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SHAPES}
    by_age = sorted(records, key=itemgetter("started"))
    for record in by_age:
        if record["kind"] != "latency":
            labels[_method_in_words(record)] = record["config"]["label"]
    for record in by_age:
        if record["kind"] == "tasks":
            rows[ANSWERS] += _answers(record)
        elif record["kind"] == "latency":
            rows[STEPS] += _step(record, labels)
        else:
            rows[TEXTS] += _windows(record)
    found = {}
    for name, shape in SHAPES.items():
        frame = pd.DataFrame(rows[name], columns=TABLES[shape])
        runs = frame.groupby(list(IDENTITY[shape]), dropna=False)["run_id"]
        found[name] = frame[frame["run_id"] == runs.transform("last")]
    return found


def _run(record: Record) -> dict[str, Any]:
    """The columns that say what a run is of."""
    config = record["config"]
    return {
        "experiment": record["experiment"],
        "model": config["model"]["name"],
        "method": config["method_name"],
        "codec": "/".join(filter(None, (config["codec"], config.get("value_codec")))),
        "label": config["label"],
        "settings": in_words(record["settings"]),
        "asked_budget": config["budget"],
        "dense_layers": None if is_full(record) else config["method"].get("dense_layers"),
        "source": "measured",
        "run_id": record["run_id"],
    }


def _windows(record: Record) -> Iterator[dict[str, Any]]:
    """The windows of a run on a text. A window without a place is its number among them."""
    ((text, entries),) = record["metrics"].items()
    windows = record["samples"]["windows"]
    common = _run(record) | _picked(entries, ("device_frac", "resident_frac"))
    common |= {"text": Path(text).name, "seq_len": record["config"]["seq_len"]}
    common["family"] = _family(record, entries["budget"])
    for number, window in enumerate(windows):
        place = window.get("place", number / len(windows))
        yield common | _picked(window, ("kl_nats", "budget")) | {"window": number, "place": place}


def _family(record: Record, budget: float) -> str:
    """In a word, how the method of a run reads less than the full cache."""
    if record["when"] != "kept":
        return "oracle" if record["when"] == "true_scores" else "retrieves"
    if record["config"]["budget"] is not None:
        return "evicts"
    return "reads all" if budget == 1 else "codes"


def _answers(record: Record) -> Iterator[dict[str, Any]]:
    """The contexts of the tasks that are scored by `acc`."""
    for task, entries in record["metrics"].items():
        shares = _picked(entries, ("budget", "device_frac", "resident_frac"))
        samples = pd.DataFrame(record["samples"].get(task, ()))
        answered = samples.reindex(columns=["acc", "context", "context_tokens"]).dropna(
            subset="acc"
        )
        for context, questions in answered.groupby("context"):
            measured = {
                "task": task,
                "context_id": context,
                "right": questions["acc"].sum(),
                "asked": len(questions),
                "prompt_len": questions["context_tokens"].max(),
            }
            yield _run(record) | shares | measured


def _step(record: Record, labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The step of a timed run, under the label of the same method's run on texts and tasks: timed
    runs are labelled by their system."""
    step = timed_step(record["metrics"])
    if step:
        run = _run(record)
        run["label"] = labels.get(_method_in_words(record), run["label"])
        yield run | step | _picked(record["metrics"], ("gen_len", "budget", "source"))


def _picked(entries: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The entries of these names; None for one that is not there."""
    return {name: entries.get(name) for name in names}


def _method_in_words(record: Record) -> str:
    config = record["config"]
    codecs = _picked(config, OF_CODECS).values()
    settings = [config["model"]["name"], config["method_name"], config.get("method"), *codecs]
    return json.dumps(settings, sort_keys=True)


# Seconds of a decode step: of a timed run, and a model of them at another budget. Seconds of
# compute stay as timed, bytes over the link grow with the budget. As in live decoding, tokens that
# are selected a layer ahead are transferred during compute; `late_bytes`, selected by a layer's own
# query, are waited for.


def step_seconds(step: Any) -> Any:
    """Seconds of a decode step over its link, or of a frame of them."""
    rate, late_s = step["link_bytes_per_s"], step["late_bytes"] / step["link_bytes_per_s"]
    return np.maximum(step["compute_s"], step["link_bytes"] / rate - late_s) + late_s


def timed_step(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The decode step of a timed run, the mean over its steps; {} if no transfer was counted."""
    if metrics["h2d_bytes"] is None:
        return {}
    steps = metrics["gen_len"] - 1
    step = _picked(metrics, ("platform", "batch_size", "prompt_len", "link_bytes_per_s"))
    step["compute_s"] = (metrics["decode_s"] - metrics["exposed_transfer_s"]) / steps
    step["link_bytes"] = metrics["h2d_bytes"] / steps
    step["late_bytes"] = metrics["late_bytes"] / steps
    step["step_s"] = metrics["decode_s"] / steps
    return step


def step_at(step: Any, ratio: Any, dense_layers: Any) -> Any:
    """Seconds of a timed step, or of a frame of them, where it reads `ratio` times as much; NaN
    where the rate of the link is not known.

    The bytes of the dense layers, where there are any the only ones that a late method transfers
    ahead, are the same at any budget.
    """
    ahead, link_bytes = step["link_bytes"] - step["late_bytes"], step["link_bytes"] * ratio
    is_fixed = (dense_layers > 0) & (step["late_bytes"] > 0)
    late_bytes = np.maximum(0, link_bytes - ahead * np.where(is_fixed, 1, ratio))
    scaled = {**step, "link_bytes": link_bytes, "late_bytes": late_bytes}
    return step["step_s"] + step_seconds(scaled) - step_seconds(step)


# Reading them


def read(results: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Windows, answers and steps of a results folder, and of the folders within it.

    `own_budget` is the asked one, `part` a text or task, `place` that of a window or the number of
    a context. `label` says the number of dense layers where a model has a method with several;
    `run_label` does not. Of two runs of one identity that of the earlier folder counts. Raises
    UserError where there are no windows, for a damaged table, and for two methods with one label.
    """
    folders = [results, *(results / name for name in models_beside(results))]
    windows, answers, steps = (_read(folders, name) for name in SHAPES)
    if windows.empty:
        none = f"no tables/{TEXTS}.csv in it or in a folder within it"
        raise UserError(f"{results}: {none}; `{COMMAND} experiment=board` makes one")
    windows = windows.rename(columns={"text": "part"})
    answers = answers.rename(columns={"task": "part", "context_id": "place"})
    rows = pd.concat([windows, answers], ignore_index=True)
    methods = (rows["method"] + " " + rows["codec"]).str.strip()
    for label, found in methods.groupby(rows["label"]):
        if found.nunique() > 1:
            two = f"two methods have it ({', '.join(sorted(found.unique()))})"
            raise UserError(f"label={label}: {two}; give each its own")
    same = ["label", "model", "own_budget", "seq_len", "part"]
    numbers = rows.groupby(same, dropna=False)["dense_layers"].transform("nunique", dropna=False)
    has_several = rows["label"].isin(rows.loc[numbers > 1, "label"])
    layers = rows["dense_layers"].fillna(0).astype(int).astype(str)
    whole = rows["label"] + ", " + layers + " dense layers"
    rows = rows.assign(run_label=rows["label"], label=rows["label"].mask(has_several, whole))
    is_window = rows["kl_nats"].notna()
    return rows[is_window], rows[~is_window], steps


def _read(folders: Sequence[Path], name: str) -> pd.DataFrame:
    """A table of all folders, its `asked_budget` as `own_budget`."""
    shape = SHAPES[name]
    identity = list(IDENTITY[shape])
    frames = [with_columns(pd.DataFrame(), shape).assign(folder=0)]
    for number, folder in enumerate(folders):
        path = table_to_read(folder, f"{name}.csv")
        if path is not None:
            frames.append(read_frame(path).assign(folder=number))
    rows = pd.concat(frames, ignore_index=True)
    first = rows.groupby(identity, dropna=False)["folder"].transform("min")
    return rows[rows["folder"] == first].rename(columns={"asked_budget": "own_budget"})

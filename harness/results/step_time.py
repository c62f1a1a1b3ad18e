"""Seconds of a decode step: of a timed run, and a model of them at another size.

Each method is timed at one size. Seconds of compute stay as timed, bytes over the link grow with
the size. As in live decoding, tokens that are selected a layer ahead are transferred during
compute; `late_bytes`, selected by a layer's own query, are waited for.

`BoardSteps` finds the step of a method for a row of the board.
"""

import re
from collections.abc import Container, Iterable, Mapping
from operator import itemgetter
from typing import Any

from harness.results.columns import TableRow, grouped, picked, values, where

AS_TIMED = ("platform", "batch_size", "prompt_len", "link_bytes_per_s")
MODELLED = "modelled"
"""`step_source` of a step that was timed at another size, or over other codes."""
GROUP_SIZE = re.compile(r"\bgroup_size=\w+")


def step_seconds(row: Mapping[str, float], bytes_per_s: float) -> float:
    """Seconds of a decode step of `row` over a link of that rate."""
    late_s = row["late_bytes"] / bytes_per_s
    return max(row["compute_s"], row["link_bytes"] / bytes_per_s - late_s) + late_s


def timed_step(metrics: Mapping[str, Any]) -> TableRow:
    """The decode step of a timed run, the mean over its steps; {} if no transfer was counted."""
    if metrics["h2d_bytes"] is None:
        return {}
    steps = metrics["gen_len"] - 1
    step = picked(metrics, AS_TIMED)
    step["compute_s"] = (metrics["decode_s"] - metrics["exposed_transfer_s"]) / steps
    step["link_bytes"] = metrics["h2d_bytes"] / steps
    step["late_bytes"] = metrics["late_bytes"] / steps
    step["step_s"] = metrics["decode_s"] / steps
    return step


def step_at(
    step: TableRow, timed_size: float, size: float | None, exempt_layers: int | None
) -> TableRow:
    """A timed step at another size; its `step_s` is None if the size or the link is not known.

    The bytes of the exempt layers, where there are any the only ones that a late method transfers
    ahead, are the same at any size.
    """
    bytes_per_s = step["link_bytes_per_s"]
    if size is None or not bytes_per_s:
        return step | {"step_s": None}
    ratio = size / timed_size
    link_bytes, late_bytes = step["link_bytes"] * ratio, step["late_bytes"] * ratio
    if exempt_layers and late_bytes:
        of_exempt_layers = step["link_bytes"] - step["late_bytes"]
        late_bytes = max(0.0, link_bytes - of_exempt_layers)
    scaled = step | {"link_bytes": link_bytes, "late_bytes": late_bytes}
    change = step_seconds(scaled, bytes_per_s) - step_seconds(step, bytes_per_s)
    return scaled | {"step_s": step["step_s"] + change}


class BoardSteps:
    """The timed steps of the table: all of one model, machine, batch and prompt length, so that
    they compare.

    That is where most steps were timed, of the models of the table. timed: rows of
    `columns.BOARD_STEPS`.
    """

    def __init__(self, timed: Iterable[TableRow], models: Container[str]) -> None:
        by_setup = grouped(timed, itemgetter("model", "platform", "batch_size", "prompt_len"))
        setups = {setup: rows for setup, rows in by_setup.items() if setup[0] in models}
        setup: tuple[Any, ...] = max(setups, key=lambda setup: len(setups[setup]), default=())
        self.rows = grouped(setups.get(setup, ()), _METHOD)
        """By method, codec, label and exempt layers."""
        self.model, self.prompt_len, self.timed_on = "", 0, ""
        if setup:
            self.model, platform, batch_size, self.prompt_len = setup
            prompts = f"prompts of {self.prompt_len:,.0f} tokens"
            self.timed_on = f"{self.model} ({platform}), batch {batch_size:.0f}, {prompts}"

    def step_of(self, windows: Iterable[TableRow]) -> TableRow:
        """`step_s`, `step_source` and `step_on` of a method at a size, at windows of one length.

        windows: its rows of `columns.BOARD_TEXTS`, of any models. {} where no step of it was
        timed, and for windows that are not as long as the timed prompts.
        """
        of_model = where(windows, "model", self.model)
        here = where(of_model, "seq_len", self.prompt_len)
        timed = self.rows.get(_METHOD(here[0]), []) if here else []
        if not timed:
            return {}
        row = here[0]
        as_timed = where(timed, "asked_size", row["asked_size"])
        if as_timed:
            seconds, source = as_timed[0]["step_s"], as_timed[0]["source"]
            if _group_size(as_timed[0]) != _group_size(row):  # as many bytes, of other tokens
                source = MODELLED
        else:
            size = sum(values(here, "size")) / len(here)
            step = step_at(timed[0], timed[0]["size"], size, row["exempt_layers"])
            seconds, source = step["step_s"], MODELLED
        if seconds is None:
            return {}
        return {"step_s": seconds, "step_source": source, "step_on": self.timed_on}


_METHOD = itemgetter("method", "codec", "label", "exempt_layers")


def _group_size(row: TableRow) -> str:
    """The length of a codec's groups in the words of the settings; "" for the default."""
    found = GROUP_SIZE.search(row["settings"] or "")
    return found[0] if found else ""

"""A model of step time: seconds of a decode step at another size.

Each method is timed at one size. Seconds of compute stay as timed, bytes over the link grow with
the size. As in live decoding, tokens that are selected a layer ahead are transferred during
compute; `late_bytes`, selected by a layer's own query, are waited for.
"""

from collections.abc import Mapping

from harness.results.columns import TableRow, picked
from harness.results.record import Record

AS_TIMED = ("platform", "batch_size", "prompt_len", "link_bytes_per_s")


def step_seconds(row: Mapping[str, float], bytes_per_s: float) -> float:
    """Seconds of a decode step of `row` over a link of that rate."""
    late_s = row["late_bytes"] / bytes_per_s
    return max(row["compute_s"], row["link_bytes"] / bytes_per_s - late_s) + late_s


def step_of(row: TableRow, timed: Record) -> TableRow:
    """The decode step of a row of the leaderboard, as timed or modelled at the row's own size.

    timed: the method's timed run, at this or another size. The bytes of the exempt layers, where
    there are any the only ones that a late method transfers ahead, are the same at any size. {} if
    no transfer was counted.
    """
    metrics = timed["metrics"]
    if metrics["h2d_bytes"] is None:
        return {}
    steps = metrics["gen_len"] - 1
    step = picked(metrics, AS_TIMED)
    step["compute_s"] = (metrics["decode_s"] - metrics["exposed_transfer_s"]) / steps
    step["link_bytes"] = metrics["h2d_bytes"] / steps
    step["late_bytes"] = metrics["late_bytes"] / steps
    step["step_s"] = metrics["decode_s"] / steps
    step["step_source"] = metrics["source"]
    if row["asked_size"] == timed["config"]["size"]:
        return step
    step["step_source"] = "modelled"
    bytes_per_s = step["link_bytes_per_s"]
    if row.get("size") is None or not bytes_per_s:
        return step | {"step_s": None}
    ratio = row["size"] / metrics["size"]
    link_bytes, late_bytes = step["link_bytes"] * ratio, step["late_bytes"] * ratio
    if row["exempt_layers"] and late_bytes:
        of_exempt_layers = step["link_bytes"] - step["late_bytes"]
        late_bytes = max(0.0, link_bytes - of_exempt_layers)
    scaled = step | {"link_bytes": link_bytes, "late_bytes": late_bytes}
    change = step_seconds(scaled, bytes_per_s) - step_seconds(step, bytes_per_s)
    return scaled | {"step_s": step["step_s"] + change}

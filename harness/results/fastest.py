"""`experiment=frontier`: the leaderboard's fastest setting over a link, within a limit of KL."""

from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError
from harness.results.columns import KL, SIZE, STEP, TableRow, read_table, shape_of
from harness.results.fronts import REFERENCES
from harness.results.leaderboard import NAME
from harness.results.step_time import step_seconds
from harness.settings.paths import COMMAND, table_to_read

NEEDED = (KL.name, "compute_s", "link_bytes", "late_bytes")


def answer(results_dir: str | Path, model: str, link_gbps: float, max_kl: float) -> str:
    """A model's fastest setting within `max_kl`, in words that part measured from modelled numbers.

    It is one of the rows of `tables/leaderboard.csv` that were decoded over a link. Raises
    UserError if there is none.
    """
    timed = _timed_rows(results_dir, model)
    row = fastest(timed, link_gbps * 1e9, max_kl)
    seconds = step_seconds(row, link_gbps * 1e9)
    compute, mib = STEP.show(row["compute_s"]), row["link_bytes"] / 2**20
    kl = KL.show(row[KL.name], row[f"{KL.name}_stderr"])
    return (
        f"{row['label']} ({_command_of(row)}): {STEP.show(seconds)} ms a step over {link_gbps:g} "
        f"GB/s, modelled from measured compute ({compute} ms) and bytes ({mib:.2f} MiB); "
        f"KL {kl} nats, measured; {row['model']} on {row['platform']}, "
        f"batch {row['batch_size']:.0f}, prompt {row['prompt_len']:,.0f}"
    )


def fastest(rows: Sequence[TableRow], bytes_per_s: float, max_kl: float) -> TableRow:
    """The row with the shortest step among those within `max_kl`.

    Raises UserError if none is, naming the closest.
    """
    closest = min(rows, key=lambda row: row[KL.name])
    if closest[KL.name] > max_kl:
        named = f"{closest['label']} at size {closest[SIZE.name]:.1%}"
        kl = KL.show(closest[KL.name])
        raise UserError(f"max_kl={max_kl:g}: no method has it; the closest, {named}, has {kl} nats")
    within = [row for row in rows if row[KL.name] <= max_kl]
    return min(within, key=lambda row: step_seconds(row, bytes_per_s))


def _timed_rows(results_dir: str | Path, model: str) -> list[TableRow]:
    """The model's rows with a KL and a timed step, without the upper reference."""
    path = table_to_read(results_dir, f"{NAME}.csv")
    if path is None:
        missing = Path(results_dir) / "tables" / f"{NAME}.csv"
        raise UserError(f"{missing}: none yet; `{COMMAND} experiment=leaderboard` makes it")
    rows = read_table(path)
    if rows and shape_of(tuple(rows[0])) not in ("board", None):
        raise UserError(f"{path}: no leaderboard; `{COMMAND} experiment=leaderboard` makes it anew")
    timed = []
    for row in rows:
        is_timed = all(row[name] is not None for name in NEEDED)
        if is_timed and row["model"] == model and row["method"] != REFERENCES["upper"]:
            timed.append(row)
    if not timed:
        none = f"{path}: no timed method of {model} in it"
        raise UserError(f"{none}; `{COMMAND} experiment=leaderboard` adds them")
    return timed


def _command_of(row: TableRow) -> str:
    """The settings that give a row, as on the command line."""
    settings = [f"method={row['method']}"]
    if row["codec"]:
        settings.append(f"codec={row['codec']}")
    if row["asked_size"] is not None:
        settings.append(f"size={row['asked_size']:g}")
    if row["exempt_layers"] is not None:
        settings.append(f"method.num_exempt_layers={row['exempt_layers']:g}")
    return " ".join(settings)

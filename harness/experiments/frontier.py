"""`kind=frontier`: the leaderboard's fastest setting over a link, within a bound of KL. Runs no method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.settings.config import RunConfig
from harness.settings.experiment import Experiment, Outcome
from harness.tables.columns import KL, STEP, TableRow, read_table, shape_of
from harness.tables.leaderboard import NAME, REFERENCES, fastest, step_seconds

GIGA, MIB = 1e9, 2**20
NEEDED = {KL.name, "compute_s", "link_bytes", "late_bytes"}
"""What a row must have to be an answer."""


class Frontier(Experiment):
    """An answer in one line, from `tables/leaderboard.csv`."""

    heeds = ("link_gbps", "max_kl")
    keeps_record = False

    def check(self, config: RunConfig) -> None:
        """A link and a bound are given."""
        for name, unit in (("link_gbps", "10^9 bytes/s"), ("max_kl", "nats")):
            if getattr(config, name) is None:
                raise UserError(f"{name}=null: must be above 0, in {unit}")

    def needs_weights(self, config: RunConfig) -> bool:
        """Nothing is run."""
        return False

    def run(self, config: RunConfig, resources: Any) -> Outcome:
        """Print the answer. UserError without a table of this model, or where nothing holds the bound."""
        assert config.link_gbps is not None and config.max_kl is not None
        print(answer(_candidates(config), config.link_gbps, config.max_kl))
        return Outcome({})


def answer(rows: list[TableRow], link_gbps: float, max_kl: float) -> str:
    """The fastest of `rows` that holds the bound, in words that part what was measured from what was modelled."""
    row = fastest(rows, link_gbps * GIGA, max_kl)
    settings = f"method={row['method']}" + (f" codec={row['codec']}" if row["codec"] else "")
    settings += "" if row["asked_size"] is None else f" size={row['asked_size']:g}"
    shape = f"{row['model']} on {row['platform']}, batch {row['batch_size']:.0f}, prompt {row['prompt_len']:,.0f}"
    step = STEP.show(step_seconds(row, link_gbps * GIGA))
    return (
        f"{row['label']} ({settings}): {step} ms a step over {link_gbps:g} GB/s, modelled from "
        f"measured compute ({STEP.show(row['compute_s'])} ms) and bytes ({row['link_bytes'] / MIB:.2f} MiB); "
        f"KL {KL.show(row[KL.name], row[f'{KL.name}_stderr'])} nats, measured; {shape}"
    )


def _candidates(config: RunConfig) -> list[TableRow]:
    """What the table knows of this model, and could be decoded over a link."""
    path = Path(config.results_dir) / "tables" / f"{NAME}.csv"
    if not path.is_file():
        raise UserError(f"{path}: there is none yet; make leaderboard makes it")
    rows = read_table(path)
    if shape_of(tuple(rows[0]) if rows else ()) not in ("board", None):
        raise UserError(f"{path}: not a leaderboard; make leaderboard makes it anew")
    own = [row for row in rows if row["model"] == config.model.name and row["method"] != REFERENCES["upper"]]
    timed = [row for row in own if all(row[name] is not None for name in NEEDED)]
    if not timed:
        raise UserError(f"{path}: no timed method of {config.model.name} in it; make leaderboard adds them")
    return timed


EXPERIMENT = Frontier()

"""The worked questions of `results/advise.md`, beside speeds that others saw.

python -m harness.run.worked
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from harness.errors import UserError
from harness.files import write_atomic
from harness.results.metrics import LABEL
from harness.results.sheet import Sheet, pipes
from harness.run.advise import (
    KNOWN,
    beside,
    first_lines,
    launch_us,
    options_of,
    recommendation,
    sheets,
    timed,
)
from harness.run.compose import load
from harness.settings.paths import COMMAND, SHIPPED


def page() -> str:
    """The worked questions, as Markdown."""
    lines = [
        "# Advice",
        "",
        f"What `advise` answers to {len(KNOWN['worked'])} questions, and how far it lies from "
        "speeds that others saw. `python -m harness.run.worked` writes this page.",
        "",
        " ".join([*KNOWN["on_page"], timed()]).format(**launch_us()),
    ]
    for number, asked in enumerate(KNOWN["worked"], 1):
        words = ["experiment=advise", *asked["settings"]]
        lines += ["", f"## {number}. {asked['asks']}", "", "```bash"]
        lines += [f"{COMMAND} advise {' '.join(asked['settings'])}", "```", ""]
        config = load(words)
        try:
            options, _ = options_of(config)
        except UserError as error:
            lines += [f"Refused: {error}.", "", asked["refused"]]
            continue
        fits, pays = first_lines(options)
        first, *changes = recommendation(options)
        lines += [f"{fits} {pays}", "", first, "", *changes]
        for sheet in sheets(options):
            lines += ["", sheet.title + ":", "", pipes(sheet)]
        if "published" in asked:
            lines += ["", "Beside speeds that were seen:", "", pipes(beside_seen(asked))]
    return "\n".join(lines) + "\n"


def beside_seen(asked: Mapping[str, Any]) -> Sheet:
    """Modelled and seen speeds of a worked question."""
    lines = []
    for known in asked["published"]:
        found = beside(asked["settings"], known)
        error = f"{100 * (found.modelled / found.seen - 1):+.0f}"
        lines.append([found.what, f"{found.modelled:.3g}", f"{found.seen:g}", error, found.source])
    header = [LABEL.heading, "modelled", "seen", "error (%)", "source"]
    return Sheet("", pd.DataFrame(lines, columns=header))


if __name__ == "__main__":
    write_atomic(SHIPPED / "advise.md", page())

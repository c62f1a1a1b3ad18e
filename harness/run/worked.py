"""The worked questions of `results/advise.md`, beside speeds that others saw, and README's lines.

python -m harness.run.worked
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from harness.errors import UserError
from harness.files import write_atomic
from harness.results.metrics import LABEL
from harness.results.sheet import Sheet, pipes, sheet_of
from harness.run.advise import (
    COLUMNS,
    KNOWN,
    Option,
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

MARK = "<!--advise-->"
"""Before and after the lines of README that are written here."""


def pages(readme: str) -> tuple[str, str]:
    """The worked questions, as Markdown, and README with its lines of the first."""
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
        if number == 1:
            before, _, after = readme.split(MARK)
            readme = f"{before}{MARK}\n{in_readme(options)}\n{MARK}{after}"
        fits, pays = first_lines(options)
        first, *changes = recommendation(options)
        lines += [f"{fits} {pays}", "", first, "", *changes]
        for sheet in sheets(options):
            lines += ["", sheet.title + ":", "", pipes(sheet)]
        if "published" in asked:
            lines += ["", "Beside speeds that were seen:", "", pipes(beside_seen(asked))]
    return "\n".join(lines) + "\n", readme


def in_readme(options: Sequence[Option]) -> str:
    """README's rows of the answer, and what was measured beside them."""
    known = KNOWN["in_readme"]
    best = []
    for key, place in known["rows"]:
        best.append(next(one for one in options if (one.key, one.place) == (key, place)))
    shown = {heading: COLUMNS[name] for name, heading in known["columns"].items()}
    return "\n\n".join([pipes(sheet_of("", best, shown)), timed()])


def beside_seen(asked: Mapping[str, Any]) -> Sheet:
    """Modelled and seen speeds of a worked question."""
    lines = []
    for known in asked["published"]:
        found = beside(asked["settings"], known)
        error = f"{100 * (found.modelled / found.seen - 1):+.0f}"
        lines.append([found.what, f"{found.modelled:.3g}", f"{found.seen:g}", error, found.source])
    header = [LABEL.heading, "modelled", "seen", "error (%)", "source"]
    return Sheet("", pd.DataFrame(lines, columns=header))


def main() -> None:
    """Write `results/advise.md`, and README's lines."""
    paths = SHIPPED / "advise.md", SHIPPED.parent / "README.md"
    for path, text in zip(paths, pages(paths[1].read_text(encoding="utf-8")), strict=True):
        write_atomic(path, text)
        print(path)


if __name__ == "__main__":
    main()

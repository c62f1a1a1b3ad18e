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
    first_lines,
    modelled,
    options_of,
    recommendation,
    sheets,
    timed,
)
from harness.run.compose import load
from harness.settings.paths import COMMAND, SHIPPED

MARK = "<!--advise-->"
"""Before and after the lines of README that are written here."""
OF_RUN = ("method", "budget", "placement", "gpu_cache")
"""How the settings of a run begin, beside those of the question."""


def pages(readme: str) -> tuple[str, str]:
    """The worked questions, as Markdown, and README with its lines of the first."""
    from harness.paper.costmodel.step import LAUNCH_S

    lines = [
        "# Advice",
        "",
        f"What `advise` answers to {len(KNOWN['worked'])} questions, and how far it lies from "
        "speeds that others saw. `python -m harness.run.worked` writes this page.",
        "",
        " ".join([*KNOWN["on_page"], timed()]).format(launch_us=1e6 * LAUNCH_S),
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
            lines += ["", "Beside speeds that were seen:", "", pipes(beside(asked, words))]
    return "\n".join(lines) + "\n", readme


def in_readme(options: Sequence[Option]) -> str:
    """README's rows of the answer, and what was measured beside them."""
    known = KNOWN["in_readme"]
    best = []
    for key, place in known["rows"]:
        best.append(next(one for one in options if (one.key, one.place) == (key, place)))
    shown = {heading: COLUMNS[name] for name, heading in known["columns"].items()}
    return "\n\n".join([pipes(sheet_of("", best, shown)), timed()])


def beside(asked: Mapping[str, Any], words: Sequence[str]) -> Sheet:
    """Predicted and published speeds of a worked question."""
    lines = []
    for seen in asked["published"]:
        predicted = _rate(words, seen["words"], seen["at"])
        if "over" in seen:
            predicted /= _rate(words, seen["over"], seen["over_at"])
        error = f"{100 * (predicted / seen['value'] - 1):+.0f}"
        source = "; ".join([seen["source"], *([seen["because"]] if "because" in seen else [])])
        lines.append([seen["what"], f"{predicted:.3g}", f"{seen['value']:g}", error, source])
    header = [LABEL.heading, "modelled", "seen", "error (%)", "source"]
    return Sheet("", pd.DataFrame(lines, columns=header))


def _rate(asked: Sequence[str], own: Sequence[str], users: int) -> float:
    """Tokens/s of all users in a run of the worked question's machine and model. own: the run's
    settings, and others of the question."""
    from harness.paper.costmodel.step import modelled_step

    question = [word for word in asked if not word.startswith("advise")]
    run: list[str] = []
    for word in own:
        (run if word.startswith(OF_RUN) else question).append(word)
    question = list({word.partition("=")[0]: word for word in question}.values())
    return users / modelled_step(modelled(load(question), run)).seconds(users)


def main() -> None:
    """Write `results/advise.md`, and README's lines."""
    paths = SHIPPED / "advise.md", SHIPPED.parent / "README.md"
    for path, text in zip(paths, pages(paths[1].read_text(encoding="utf-8")), strict=True):
        write_atomic(path, text)
        print(path)


if __name__ == "__main__":
    main()

"""The worked questions of `results/advise.md`, beside speeds that others saw.

python -m harness.run.worked
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.errors import UserError
from harness.files import write_atomic
from harness.results.metrics import LABEL
from harness.results.sheet import Sheet, pipes
from harness.run.advise import KNOWN, options_of, recommendation, sheets
from harness.run.compose import load
from harness.settings.paths import COMMAND, SHIPPED


def page() -> str:
    """The worked questions, as Markdown."""
    lines = [
        "# Advice",
        "",
        "What `advise` answers to five questions, and how far it lies from speeds that others saw. "
        "`python -m harness.run.worked` writes this page.",
        "",
        " ".join(KNOWN["on_page"]),
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
        first, *changes = recommendation(options)
        lines += [first, "", *changes]
        for sheet in sheets(options):
            lines += ["", sheet.title + ":", "", pipes(sheet)]
        if "published" in asked:
            lines += ["", "Beside speeds that were seen:", "", pipes(beside(asked, words))]
    return "\n".join(lines) + "\n"


def beside(asked: Mapping[str, Any], words: Sequence[str]) -> Sheet:
    """Predicted and published speeds of a worked question."""
    lines = []
    for seen in asked["published"]:
        predicted = _rate(words, seen["words"], seen["at"])
        if "over" in seen:
            predicted /= _rate(words, seen["over"], seen["over_at"])
        error = 100 * (predicted / seen["value"] - 1)
        value = f"{seen['value']:g}"
        lines.append([seen["what"], f"{predicted:.3g}", value, f"{error:+.0f}", seen["source"]])
    header = [LABEL.heading, "predicted, CUDA graphs", "seen", "error (%)", "source"]
    return Sheet("", header, lines)


def _rate(asked: Sequence[str], own: Sequence[str], users: int) -> float:
    """Tokens/s of all users in a run of the worked question's machine and model."""
    from harness.paper.costmodel.capacity import modelled_step

    shared = [word for word in asked if not word.startswith(("advise", "batch_size", "experiment"))]
    words = ["experiment=capacity", "gen_len=128", *shared, *own]
    words = list({word.partition("=")[0]: word for word in words}.values())
    return users / modelled_step(load(words)).seconds(users)


def main() -> None:
    """Write `results/advise.md`."""
    path = SHIPPED / "advise.md"
    write_atomic(path, page())
    print(path)


if __name__ == "__main__":
    main()

"""Names that break what shows them: labels that look like markup or like no value, in a folder like a pattern."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from harness.results import record as records
from harness.results import write as tables
from harness.results.columns import read_frame
from tests.results.test_tables import TASK_METRICS, save, shares

LABELS = (
    "NA", "nan", "null", "None", "-", " ", "a\nb", "a\r\nb", "$\\foo$", "$x", "a|b", "a\\|b", "x" * 300,
    "x" * 150 + "y" + "x" * 149, "_hidden", "x]", "a[b]", "*", "**", "`x`", "<b>", "%s", "{0}", "\x1b[2J", "a,b", '"q"',
    "1.0", "True", "\\", "ü", "=1+1", "\tx", "''", "[a](b://c.de)", "www.a.de", "x@y.de",
)  # fmt: skip
SHARES = shares(0.16)


@pytest.fixture
def results(tmp_path) -> Path:
    """A finished record for each of `LABELS`, and their table."""
    folder = tmp_path / "a*[b]?"
    record = save(folder, ["experiment=fig11"], {"passkey": TASK_METRICS | SHARES})
    for number, label in enumerate(LABELS):
        run = {"run_id": f"{number}", "settings_id": f"{number}", "config": record["config"] | {"label": label}}
        records.write_record(records.record_path(folder, "fig11", f"{number}"), record | run)
    shutil.rmtree(records.record_path(folder, "fig11", record["run_id"]).parent)
    tables.update(folder, "fig11")
    return folder


def markdown_cells(line: str) -> list[str]:
    """The cells of a line of a Markdown table as a reader sees them."""
    assert line.startswith("| ") and line.endswith(" |")
    cells = [cell.strip() for cell in re.split(r" \| ", line[2:-2])]
    return [re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", cell) for cell in cells]


def test_a_table_has_every_label_as_it_is(results):
    path = results / "tables" / "fig11.csv"
    assert set(read_frame(path)["label"]) == set(LABELS)
    lines = [line for line in path.with_suffix(".md").read_text().splitlines() if line.startswith("| ")]
    header, *body = lines
    assert len(body) == len(LABELS)
    assert {len(markdown_cells(line)) for line in lines} == {len(markdown_cells(header))}
    shown = {markdown_cells(line)[0] for line in body}
    assert {"NA", "$\\foo$", "a|b", "a\\|b", "a\\nb", "a\\r\\nb", "\\x1b[2J", "<b>", "`x`", "*"} <= shown
    assert not any("\x1b" in line for line in lines)
    assert not any(re.search(r"[^\\]\]\(|[^\\]:/|www\.|\w@\w", line) for line in body), "no links"

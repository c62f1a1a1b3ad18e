"""Names that break what shows them: labels, texts and folders that look like markup, like no value, or like a part."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.results import record as records
from harness.results import write as tables
from harness.results.columns import read_frame, whole_tasks
from plots import data, style
from plots.drawing import figure_of
from tests.results.test_tables import LATENCY_METRICS, TASK_METRICS, TEXT_METRICS, save, shares

LABELS = (
    "NA", "nan", "null", "None", "-", " ", "a\nb", "a\r\nb", "$\\foo$", "$x", "a|b", "a\\|b", "x" * 300,
    "x" * 150 + "y" + "x" * 149, "_hidden", "x]", "a[b]", "*", "**", "`x`", "<b>", "%s", "{0}", "\x1b[2J", "a,b", '"q"',
    "1.0", "True", "\\", "ü", "=1+1", "\tx", "''", "[a](b://c.de)", "www.a.de", "x@y.de",
)  # fmt: skip
SHARES = shares(0.16)
CHUNK = {"first": 256, "stop": 512, "num_tokens": 10, "metrics": {"perplexity": 12.5, "perplexity_stderr": None}}


def save_labelled(results: Path, experiment: str, metrics: dict[str, Any], **fields: Any) -> None:
    """A finished record for each of `LABELS`."""
    record = save(results, [f"experiment={experiment}"], metrics, **fields)
    for number, label in enumerate(LABELS):
        run = {"run_id": f"{number}", "settings_id": f"{number}", "config": record["config"] | {"label": label}}
        records.write_record(records.record_path(results, experiment, f"{number}"), record | run)
    shutil.rmtree(records.record_path(results, experiment, record["run_id"]).parent)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("a*[b]?")
    save_labelled(folder, "fig11", {"passkey": TASK_METRICS | SHARES})
    save_labelled(folder, "fig12", {"offline": TEXT_METRICS | SHARES}, chunks=[CHUNK])
    save_labelled(folder, "latency", LATENCY_METRICS)
    for experiment in ("fig11", "fig12", "latency"):
        tables.update(folder, experiment)
    return folder


def markdown_cells(line: str) -> list[str]:
    """The cells of a line of a Markdown table as a reader sees them."""
    assert line.startswith("| ") and line.endswith(" |")
    cells = [cell.strip() for cell in re.split(r" \| ", line[2:-2])]
    return [re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", cell) for cell in cells]


@pytest.mark.parametrize("name", ["fig11", "latency"])
def test_a_table_has_every_label_as_it_is(name, results):
    path = results / "tables" / f"{name}.csv"
    assert set(read_frame(path)["label"]) == set(LABELS)
    lines = [line for line in path.with_suffix(".md").read_text().splitlines() if line.startswith("| ")]
    header, *body = lines
    assert len(body) == len(LABELS)
    assert {len(markdown_cells(line)) for line in lines} == {len(markdown_cells(header))}
    shown = {markdown_cells(line)[0] for line in body}
    assert {"NA", "$\\foo$", "a|b", "a\\|b", "a\\nb", "a\\r\\nb", "\\x1b[2J", "<b>", "`x`", "*"} <= shown
    assert not any("\x1b" in line for line in lines)
    assert not any(re.search(r"[^\\]\]\(|[^\\]:/|www\.|\w@\w", line) for line in body), "no links"


@pytest.mark.parametrize("text", ("a [5, 0-20 %]", "offline[256:512]", "NA", "a\nb"))
def test_a_text_of_any_name_has_its_rows_and_its_figure(text, tmp_path):
    for method in ("full", "h2o"):
        metrics = {text: TEXT_METRICS | SHARES}
        save(tmp_path, ["experiment=fig12", f"method={method}"], metrics, chunks=[CHUNK])
    path = tables.update(tmp_path, "fig12")
    with path.open(newline="") as stream:
        tasks = {row["task"] for row in csv.DictReader(stream)}
    assert tasks == {text}
    assert "12.50" in tables.summary(records.read_records(tmp_path, "fig12"))
    frame = data.read(tmp_path, "fig12")
    assert len(whole_tasks(frame)) == len(frame) - 2
    with style.applied():
        figure = figure_of(tmp_path, "fig12")
        figure.draw_without_rendering()
    assert len(figure.axes) == 1

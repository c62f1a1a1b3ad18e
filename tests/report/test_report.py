"""The report: one file with everything in it, nothing from elsewhere, and nothing that its inputs could inject."""

import json
import re
import shutil
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

import plots
from harness import report
from harness.paper.costmodel import published
from harness.report.__main__ import main as report_main
from harness.report.page import MODELLED, registered
from harness.results import write as tables
from plots import drawing
from plots.drawing import DRAWINGS
from tests.plots.test_plots import write
from tests.results.test_tables import LATENCY_METRICS, save, save_task, save_text
from tests.runs import Row, refusal_of

WHERE = {"python": "3.11.7", "cpu": "a processor", "memory_bytes": 2**34, "device_name": None, "dirty": True}
RAN = {"seconds": 90.0, "error": None, "environment": WHERE | {"commit": "abc", "packages": {"torch": "2.13.0"}}}
INJECTED = '<img src="http://example.org/x.png">&'
HOSTILE = "</script><svg onload='alert(1)'><!-- \u2028 \" datum['x'] ${alert(1)} {{7*7}} \\u003c a.b[0] \n'];alert(1)//"
SHOWN = HOSTILE.replace("\n", r"\n")  # as pandas shows a line's end within a cell
FINDING = "H2O reads less & loses <more>."
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'


def place(label: str, **fields: Any) -> Row:
    """A row of the board."""
    common = {
        "over": "tiny", "model": "tiny", "method": label.lower(), "family": "evicts", "asked_budget": 0.16,
        "seq_len": 1024,
        "kl_nats": 0.5, "ratio": 2.0, "ratio_low": 1.5, "ratio_high": 3.0, "rank": 1, "rank_low": 1, "rank_high": 1,
        "num_compared": 2, "budget_low": 0.16, "budget_high": 0.16, "device_frac_low": 0.3, "device_frac_high": 0.4,
        "resident_frac_low": 0.1, "resident_frac_high": 0.2, "dense_numbers": "2", "apart": "", "source": "measured",
        "answers_difference": -0.05, "step_s": 0.25, "step_source": "emulated", "step_on": "tiny",
        "num_models": 1, "num_windows": 8, "num_places": 4,
    }  # fmt: skip
    return common | {"label": label} | fields


def score(label: str, budget: float, value: float, **fields: Any) -> Row:
    """A row of an accuracy table."""
    common = {"model": "tiny", "task": "passkey", "metric": "acc", "stderr": 0.05, "source": "measured"}
    return common | {"label": label, "budget": budget, "value": value} | fields


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Records of three experiments, one run failed and one not begun; their tables and figures, a board, and
    the report."""
    folder = tmp_path_factory.mktemp("results")
    save_task(folder, "method=full", budget=1.0, **RAN)
    save_task(folder, "method=h2o", **RAN)
    save_task(folder, "method=streaming", f"label='{INJECTED}'", **RAN)
    save_task(folder, "method=infinigen", **RAN | {"status": "failed", "error": "UserError: out of memory"})
    save_text(folder, "method=h2o", **RAN | {"environment": RAN["environment"] | {"commit": "def", "dirty": False}})
    for label in ("offload", "infinigen"):
        save(folder, ["experiment=latency", f"system={label}"], LATENCY_METRICS, text=label, **RAN)
    for experiment in ("fig11", "perplexity", "latency"):
        tables.update(folder, experiment)
    write(folder, "board-methods", [place("A"), place(HOSTILE, asked_budget=0.2)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "FIGURES", {name: published.FIGURES[name] for name in ("fig14", "fig15")})
        published.write_tables(folder)
        patch.setattr(drawing, "DRAWINGS", {name: DRAWINGS[name] for name in ("fig11", "fig14-modelled")})
        patch.setattr(drawing, "FORMATS", {"svg": drawing.FORMATS["svg"]})
        plots.main(folder)
    (folder / "findings.yaml").write_text(json.dumps({"fig11": FINDING}))
    report.write_report(folder)
    return folder


class Page(HTMLParser):
    """What a test asks of a page: tags with their attributes, ids, the text of each section, and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = defaultdict(list)
        self.scripts: list[str] = []
        self._section = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.texts[self._section] += data.split()

    def all(self, attribute: str) -> list[str]:
        return [attrs[attribute] or "" for _, attrs in self.tags if attribute in attrs]

    def text(self, section: str) -> str:
        return " ".join(self.texts[section])


@pytest.fixture(scope="module")
def page(results) -> Page:
    return Page((results / "report.html").read_text())


def test_nothing_comes_from_elsewhere(page):
    assert all(link.startswith("#") and link[1:] in page.all("id") for link in page.all("href"))
    assert not {"link", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    assert "DataTables" in page.scripts[0] and "<!--" not in page.scripts[0], "after which no script ends"
    assert len(page.all("id")) == len(set(page.all("id")))


def test_figures_are_the_drawings_of_matplotlib(page, results):
    images = page.all("src")
    assert len(images) == 2 == len(page.all("alt"))
    for image, name in zip(images, ("fig11", "fig14-modelled"), strict=True):
        kind, _, text = image.partition(",")
        drawn = (results / "figures" / f"{name}.svg").read_text()
        assert kind == "data:image/svg+xml" and unquote(text) == " ".join(drawn.split())
        assert ElementTree.fromstring(unquote(text)).tag.endswith("svg")


def test_the_catalogue_has_every_figure_once():
    found = [section.name for section in registered()]
    assert len(found) == len(set(found)) and list(DRAWINGS) == [name for name in found if name in DRAWINGS]
    modelled = {f"{name}{MODELLED}" for name in published.FIGURES}
    assert {name for name in found if name.endswith(MODELLED)} == modelled


def test_a_section_says_what_there_is(page):
    assert "A 1 (1 to 1) 2.00 (1.50 to 3.00) -5.0" in page.text("board")
    text = page.text("fig11")
    assert text.startswith("fig11: Accuracy against budget make accuracy measured H2O reads")
    assert "smollm2-135m" in text and "75.0 ± 6.2" in text
    text = page.text("fig15-modelled")
    assert "python -m harness.paper.costmodel --write modelled" in text and "opt-13b on a6000-pcie3, modelled" in text
    assert "published numbers" in page.text(
        "fig15"
    ) and "opt-13b infinigen batch_size 20 tokens_per_s 41.99" in page.text("fig15")
    text = page.text("environment")
    assert "finished runs 6, 9 minutes in total" in text and "python 3.11.7" in text
    assert "commit abc; def" in text and "dirty True; False" in text and "packages.torch 2.13.0" in text
    assert "device name" not in text


def test_what_comes_from_outside_is_text(page, results):
    assert INJECTED in page.text("fig11") and FINDING in page.text("fig11")
    source = (results / "report.html").read_text()
    assert INJECTED not in source and "<more>" not in source and HOSTILE not in source
    assert " ".join(SHOWN.split()) in page.text("board")


def test_what_is_missing_comes_last_and_folded(page):
    text = page.text("missing")
    assert re.search(r"fig11 InfiniGen \([0-9a-f-]{16,}\): failed, UserError: out of memory", text)
    assert "fig2: Bytes of KV cache and weights (python run.py experiment=fig2 && make plots)" in text
    assert "fig11:" not in text and "fig14-modelled:" not in text
    assert page.all("id").index("environment") < page.all("id").index("missing")


def test_tables_alone_and_tables_of_the_user_are_reported(tmp_path):
    save_task(tmp_path, "experiment=fig11", "method=h2o", **RAN)
    tables.update(tmp_path, "fig11")
    shutil.copy(tmp_path / "tables" / "fig11.csv", tmp_path / "tables" / "mine.csv")
    shutil.rmtree(tmp_path / "runs")
    page = Page(report.write_report(tmp_path).read_text())
    assert not page.all("src") and {"fig11", "page-further-runs", "mine"} <= {*page.all("id")}
    assert "there are no records" in page.text("environment")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tables/fig11.csv", "no table", "fig11.csv: not a table of results"),
        ("findings.yaml", "fig111: a", "findings.yaml: fig111: did you mean 'fig11'"),
        ("none", "", "neither table nor figure; `python run.py experiment=accuracy` makes some"),
    ],
)
def test_what_cannot_be_reported_is_one_line(file, text, message, tmp_path, capsys):
    (tmp_path / "tables").mkdir()
    (tmp_path / file).write_text(text)
    assert message in refusal_of(report_main, ["--results-dir", str(tmp_path)], capsys)


def test_the_command_prints_the_path(results, capsys):
    before = (results / "report.html").read_bytes()
    assert report_main(["--results-dir", str(results)]) == 0
    assert capsys.readouterr().out == f"{results / 'report.html'}\n"
    assert (results / "report.html").read_bytes() == before, "the same results give the same bytes"


def test_another_models_results_within_the_folder_stand_beside(results, tmp_path):
    rows = [score("A", 0.1, 0.5), score("B", 0.1, 0.5, task="copa"), score("B", 0.1, 0.5)]
    for inner, model, source in ((tmp_path, "first", "measured"), (tmp_path / "second", "second", "emulated")):
        write(inner, "fig11", rows, model=model, source=source)
        (inner / "figures").mkdir()
        (inner / "figures" / "fig11.svg").write_text(SVG)
    (tmp_path / "findings.yaml").write_text((results / "findings.yaml").read_text())
    page = Page(report.write_report(tmp_path).read_text())
    own, inner = page.text("fig11").split("In second")
    assert len(page.all("src")) == 2
    assert "measured" in own and "emulated" not in own and "emulated" in inner and "measured" not in inner
    assert "without numbers: none." in page.text("missing")
    alone = report.write_report(tmp_path / "second").read_text()
    assert ">second</" in alone and ">first</" not in alone and "reads less" not in alone

"""The report: one file with everything in it, nothing from elsewhere, and nothing that its inputs could inject."""

import base64
import gzip
import hashlib
import io
import json
import re
import shutil
from collections import defaultdict
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from test_tables import LATENCY_METRICS, save, save_task, save_text

import plots
from harness.errors import UserError
from harness.paper import report
from harness.paper.catalogue import ENTRIES, PAGES
from harness.paper.costmodel import published
from harness.paper.report import page as report_page
from harness.paper.report import sections
from harness.paper.report.__main__ import main as report_main
from harness.paper.report.charts import CHARTS
from harness.paper.report.data import gaps, read_rows, sheets
from harness.paper.report.published import published_sheet
from harness.tables import write as tables
from harness.tables.columns import ACCURACY, MISSING, names, published_rows
from harness.tables.text import Sheet
from plots import registry
from plots.registry import DRAWINGS

WHERE = {"python": "3.11.7", "cpu": "a processor", "memory_bytes": 2**34, "device_name": None, "dirty": True}
RAN = {"seconds": 90.0, "error": None, "environment": WHERE | {"commit": "abc", "packages": {"torch": "2.13.0"}}}
INJECTED = '<img src="http://example.org/x.png">&'
HEADER = ",".join(names(ACCURACY))
FINDING = "H2O reads less & loses <more>."


def save_latency(results: Path, label: str, **metrics: float) -> None:
    save(results, ["experiment=latency", f"label={label}"], LATENCY_METRICS | metrics, text=str(metrics), **RAN)


@pytest.fixture(scope="module", autouse=True)
def no_library():
    """Bundling it takes seconds, and it has no part in what is told here; `test_report_browser` runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_page, "library", lambda: "window.vegaEmbed = undefined;")
        yield


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Records of three experiments, one run failed and one cell not run; their tables and figures, and the report."""
    folder = tmp_path_factory.mktemp("results")
    save_task(folder, "method=full", size=1.0, **RAN)
    save_task(folder, "method=h2o", **RAN)
    save_task(folder, "method=streaming", f"label='{INJECTED}'", **RAN)
    failed = RAN | {"status": "failed", "error": "UserError: out of memory"}
    save_task(folder, "method=infinigen", **failed)
    elsewhere = RAN | {"environment": RAN["environment"] | {"commit": "def", "dirty": False}}
    save_text(folder, "method=h2o", **elsewhere)
    for label, sizes in (("offload", (512, 1024)), ("infinigen", (512,))):
        for prompt_len in sizes:
            save_latency(folder, label, prompt_len=prompt_len)
    for experiment in ("fig11", "perplexity", "latency"):
        tables.update(folder, experiment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "FIGURES", {name: published.FIGURES[name] for name in ("fig14", "fig15")})
        published.write_tables(folder)
        patch.setattr(registry, "DRAWINGS", {name: DRAWINGS[name] for name in ("fig11", "fig14", "fig14-modelled")})
        plots.main(folder)
    (folder / "findings.yaml").write_text(json.dumps({"fig11": FINDING}))
    report.write_report(folder)
    return folder


def digest(script: str) -> str:
    """As a page's policy names a script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


class Page(HTMLParser):
    """What a test asks of a page: tags with their attributes, ids, the text of each section, scripts that run, and what
    these unpack."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = defaultdict(list)
        self.scripts: list[str] = []
        self.packed: dict[str, str] = {}
        self._section = ""
        self._script: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = dict(attrs)["id"] or ""

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            self._script.append(data)
        else:
            self.texts[self._section] += data.split()

    def handle_endtag(self, tag):
        if tag == "script":
            attributes, text = self.tags[-1][1], "".join(self._script)
            if attributes.get("type") == "application/gzip":
                self.packed[attributes["data-packed"] or ""] = gzip.decompress(base64.b64decode(text)).decode()
            else:
                self.scripts.append(text)
            self._script.clear()
            self.tags.append(("/script", {}))

    @property
    def specs(self) -> list[dict]:
        return json.loads(self.packed["charts"])

    def all(self, attribute: str) -> list[str]:
        return [attrs[attribute] or "" for _, attrs in self.tags if attribute in attrs]

    def text(self, section: str) -> str:
        return " ".join(self.texts[section])


@pytest.fixture(scope="module")
def page(results) -> Page:
    return Page((results / "report.html").read_text())


def test_nothing_comes_from_elsewhere(page):
    assert all(source.startswith("data:image/png;base64,") for source in page.all("src"))
    assert all(link.startswith("#") and link[1:] in page.all("id") for link in page.all("href"))
    assert not {"link", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    (policy,) = (attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'; img-src data:;") and "http" not in policy
    allowed = policy.partition("; script-src ")[2]
    own = [*page.scripts, page.packed["library"]]
    assert allowed.split() == [f"'sha256-{digest(script)}'" for script in own], "no script but these"
    assert len(page.all("id")) == len(set(page.all("id")))


def test_a_specification_stands_in_the_place_of_its_drawing(page, results):
    """The page has them apart, together by nothing but their order."""
    panes = re.split('<div class="pane">', (results / "report.html").read_text())[1:]
    drawn = [
        f"{re.search('<h3>(.*?)</h3>', pane)[1]}, {title}"
        for pane in panes
        for title in re.findall("<figcaption>(.*?)</figcaption>", pane)
    ]
    assert len(drawn) > 5 and [spec["description"] for spec in page.specs] == list(map(unescape, drawn))


def test_every_figure_is_in_it_and_decodes(page, results):
    names = {path.stem for path in (results / "figures").glob("*.png")}
    assert names == {"fig11", "fig14", "fig14-modelled"} <= set(page.all("id"))
    images = page.all("src")
    assert len(images) == len(names) == len(page.all("alt"))
    for image in images:
        with Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2], validate=True))) as picture:
            picture.load()
            assert 300 < picture.width <= sections.MAX_WIDTH and len(picture.getcolors(2**24)) > 5


def test_the_catalogue_knows_every_figure_once():
    names = [entry.name for entry in ENTRIES]
    assert len(names) == len(set(names)) and set(DRAWINGS) <= set(names)
    assert {entry.page for entry in ENTRIES} == set(PAGES)
    assert {entry.chart for entry in ENTRIES} - {None} == set(CHARTS)


def test_a_section_has_source_command_finding_and_table(page):
    text = page.text("fig11")
    assert text.startswith(
        "fig11: Accuracy against the share of the cache that is read measured make accuracy H2O reads"
    )
    assert "smollm2-135m, measured" in text and "75.0 ± 6.2" in text and "Also from table perplexity" in text
    assert "emulated make speedup" in page.text("fig14") and "to device (GiB)" in page.text("fig14")
    assert "modelled make modelled" in page.text("fig15-modelled")
    assert "opt-13b on a6000-pcie3, modelled" in page.text("fig15-modelled")


def test_what_comes_from_outside_is_text(page, results):
    assert INJECTED in page.text("fig11") and FINDING in page.text("fig11")
    source = (results / "report.html").read_text()
    assert INJECTED not in source and "<more>" not in source


def test_what_is_missing_is_listed(page):
    text = page.text("missing")
    assert "smollm2-135m, emulated: infinigen: batch 4, prompt 1024, generated 8" in text
    assert re.search(r"fig11 InfiniGen \([0-9a-f-]{16,}\): failed, UserError: out of memory", text)
    assert "fig2: Bytes of KV cache and weights ( python run.py experiment=fig2 && make plots )" in text
    assert "fig11:" not in text and "fig14:" not in text


def test_the_environment_says_what_differs(page):
    text = page.text("environment")
    assert "finished runs 7, 10 minutes in total" in text and "python 3.11.7" in text and "memory 16 GiB" in text
    assert "commit abc and changes (6 of 7 runs); def (1 of 7 runs)" in text and "torch 2.13.0" in text
    assert "device name" not in text


def test_published_numbers_stand_beside_ours(page, results):
    assert "opt-13b infinigen batch size 20 tokens per s 41.99 1/s quoted 42.91 1.02" in page.text("fig15-modelled")
    assert "41.99 1/s quoted" in page.text("fig15") and "42.91" not in page.text("fig15")
    entries = {entry.name: entry for entry in ENTRIES}
    compared = {(row.figure, row.series, row.x, row.metric): row for row in published.calibrate()}
    for figure in published.FIGURES:
        rows = [{key: str(value) for key, value in row.items()} for row in published.figure_rows(figure, "a6000-pcie3")]
        sheet = published_sheet(entries[f"{figure}-modelled"], rows)
        ours = [line[sheet.header.index("ours")] for line in sheet.lines]
        expected = [row.predicted for key, row in compared.items() if key[0] == figure]
        assert [value for value in ours if value != MISSING] == [f"{value:.4g}" for value in expected]
        emulated = published_sheet(entries[figure], [row | {"source": "emulated"} for row in rows])
        assert "ours" not in emulated.header and len(emulated.lines) == len(sheet.lines)
        twice = published_sheet(entries[figure], rows * 2)
        assert "ours" not in twice.header, "no one of two rows is ours"


def test_a_point_of_an_analysis_stands_beside_the_published_one_of_its_name():
    (fig5,) = (entry for entry in ENTRIES if entry.name == "fig5")
    line = next(row for row in published_rows() if row["figure"] == "fig5")
    sheet = published_sheet(fig5, [line | {"value": "120"}, line | {"model": "other"}])
    assert sheet.lines[0][sheet.header.index("ours")] == "120" and sheet.lines[1][sheet.header.index("ours")] == MISSING
    assert sheet.lines[0][sheet.header.index("ours / published")] == "1.50"


def test_gaps_are_scores_and_shapes_not_quantities_that_a_line_lacks():
    header = ["label", "settings", "KV read (%)", "a acc (%)", "b acc (%)", "text KL (nats)"]
    scores = Sheet(
        "tiny",
        header,
        [["H2O", "-", "20.0", "50.0", "-", "-"], ["InfiniGen", "alpha=4", "-", "-", "1", "1"]],
        scores=["a acc (%)", "b acc (%)"],
    )
    assert gaps([scores]) == ["tiny: H2O: b acc (%)", "tiny: InfiniGen, alpha=4: a acc (%)"]
    header = ["label", "batch", "prompt", "generated", "prediction (ms)"]
    shapes = Sheet("tiny", header, [["x", "1", "8", "4", "-"], ["x", "2", "8", "4", "-"], ["y", "2", "8", "4", "1"]])
    assert gaps([shapes]) == ["tiny: y: batch 1, prompt 8, generated 4"]


def test_tables_alone_and_tables_of_the_user_are_reported(tmp_path):
    save_task(tmp_path, "experiment=fig11", "method=h2o", **RAN)
    tables.update(tmp_path, "fig11")
    shutil.copy(tmp_path / "tables" / "fig11.csv", tmp_path / "tables" / "mine.csv")
    shutil.rmtree(tmp_path / "runs")
    page = Page(report.write_report(tmp_path).read_text())
    assert not page.all("src") and page.all("id") == [
        "page-overview", "page-accuracy", "fig11", "page-further-runs", "mine", "page-runs", "missing", "environment",
    ]  # fmt: skip
    assert "there are no records" in page.text("environment")


def test_a_table_of_an_older_version_has_a_line_a_run(tmp_path):
    """It says no settings, so nothing tells which runs belong together."""
    save_task(tmp_path, "method=h2o", **RAN)
    save_text(tmp_path, "experiment=fig11", "kind=perplexity", "method=h2o", **RAN)
    path = tables.update(tmp_path, "fig11")
    (sheet,) = sheets(path, read_rows(path))
    assert [line[:2] for line in sheet.lines] == [["H2O", MISSING]]
    lines = [line.split(",") for line in path.read_text().splitlines()]
    settings = lines[0].index("settings")
    path.write_text("\n".join(",".join(line[:settings] + line[settings + 1 :]) for line in lines))
    (sheet,) = sheets(path, read_rows(path))
    assert [line[:2] for line in sheet.lines] == 2 * [["H2O", MISSING]]


def refusal(results: Path) -> str:
    with pytest.raises(UserError) as refused:
        report.write_report(results)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("figures/fig11.png", "no image", "fig11.png: not an image; `make plots`"),
        ("tables/fig11.csv", "no table", "fig11.csv: not a table of results"),
        ("tables/fig11.csv", f"{HEADER}\na,b\n", "fig11.csv: not a table of results"),
        ("tables/fig11.csv", f"{HEADER}\n{'x,' * HEADER.count(',')}x\n", "fig11.csv: not a table of results"),
        ("tables/fig11.csv", b"\xff", "fig11.csv: not a table of results"),
        ("findings.yaml", "fig111: a", "findings.yaml: fig111: did you mean 'fig11'"),
        ("findings.yaml", "fig11: 3", "findings.yaml: must map names of figures to sentences"),
        ("findings.yaml", "a: b: c", "findings.yaml: not YAML"),
    ],
)
def test_damaged_input_is_named(file, text, message, tmp_path):
    for folder in ("figures", "tables"):
        (tmp_path / folder).mkdir()
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message in refusal(tmp_path)


def test_the_command_prints_the_path_or_one_line(tmp_path, results, capsys):
    before = (results / "report.html").read_bytes()
    assert report_main(["--results-dir", str(results)]) == 0
    assert capsys.readouterr().out == f"{results / 'report.html'}\n"
    assert (results / "report.html").read_bytes() == before, "the same results give the same bytes"
    assert len(before) < 2**19
    assert report_main(["--results-dir", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: results_dir={tmp_path}: neither table nor figure; `make accuracy` makes some\n"
    )
    (tmp_path / "tables").mkdir()
    shutil.copy(results / "tables" / "fig11.csv", tmp_path / "tables")
    (tmp_path / "report.html").mkdir()
    assert "cannot be written" in refusal(tmp_path)


def test_another_models_tables_within_the_results_are_a_report_of_their_own(results, tmp_path):
    inner = tmp_path / "another-model"
    (inner / "tables").mkdir(parents=True)
    shutil.copy(results / "tables" / "fig11.csv", inner / "tables")
    (tmp_path / "findings.yaml").write_text((results / "findings.yaml").read_text())
    assert plots.main(inner)
    page = report.write_report(inner).read_text()
    assert "H2O" in page and "reads less" not in page and not (tmp_path / "figures").exists()
    assert "reads less" in (results / "report.html").read_text()

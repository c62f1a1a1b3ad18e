"""The report in headless Chromium: pages, charts that answer a hover, both schemes, a phone, and no JavaScript at all.

The report is of two models, with labels that would break out of a page that took them for anything but words.
"""

import csv
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from PIL import Image
from test_charts import HOSTILE, score
from test_report import Page, digest

from harness.paper.report import write_report
from harness.tables.columns import ACCURACY, names

CHROMIUM = shutil.which("chromium")
BLUE = (0, 114, 178)
"""Of the first series of a chart."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """The report of two models with two tasks each, and a figure."""
    folder = tmp_path_factory.mktemp("results")
    for model, inner in (("first", folder), ("second", folder / "second")):
        (inner / "tables").mkdir(parents=True)
        with (inner / "tables" / "fig11.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names(ACCURACY))
            writer.writeheader()
            for task in ("kv_recall", "passkey"):
                writer.writerow(score("Full", 1.0, 0.875, model=model, method="full", task=task))
                for label, share, value in (
                    ("A", 0.1, 0.5),
                    ("A", 0.2, 0.75),
                    (HOSTILE, 0.1, 0.25),
                    (HOSTILE, 0.3, 0.125),
                ):
                    writer.writerow(score(label, share, value, model=model, task=task, settings=HOSTILE))
    (folder / "figures").mkdir()
    Image.new("RGB", (1600, 900), "white").save(folder / "figures" / "fig11.png")
    return write_report(folder)


WATCH = """
const troubles = [];
console.error = (...words) => troubles.push(words.join(" "));
console.warn = console.error;
addEventListener("error", event => troubles.push(event.message));
addEventListener("unhandledrejection", event => troubles.push(String(event.reason)));
document.addEventListener("securitypolicyviolation", event => troubles.push(event.violatedDirective));
window.alert = () => troubles.push("an alert");
"""
PROBE = """
const hover = chart => {
  const point = [...chart.querySelectorAll(".live .mark-symbol.role-mark path")].at(-1);
  const { x, y, width, height } = point.getBoundingClientRect();
  const at = { bubbles: true, clientX: x + width / 2, clientY: y + height / 2 };
  point.dispatchEvent(new PointerEvent("pointermove", at));
  const shown = document.querySelector("#vg-tooltip-element");
  return [...(shown?.querySelectorAll("tr") ?? [])].map(row => [...row.cells].map(cell => cell.textContent));
};
const column = table => [...table.tBodies[0].rows].map(row => row.cells[2].textContent);
const visible = selector => [...document.querySelectorAll(selector)].filter(each => each.checkVisibility()).length;
setTimeout(() => {
  const section = document.querySelector("#fig11");
  const table = section.querySelector(":scope > details > .wide table");
  const before = column(table);
  table.querySelectorAll("th button")[2].click();
  const charts = [...section.querySelectorAll(".alive")];
  const panes = visible("#fig11 .pane");
  const titles = charts.map(chart => chart.querySelector("figcaption").textContent);
  const shown = hover(charts[0]);
  section.querySelectorAll("input")[1].click();
  document.title = JSON.stringify({
    before, after: column(table), panes, titles, shown, troubles,
    chosen: visible("#fig11 .pane:nth-of-type(2)"), pages: visible(".page"), alive: charts.length,
    scripts: document.scripts.length, elements: document.querySelectorAll("[onload], [onerror]").length,
    images: document.images.length,
    broken: [...document.images].filter(image => !(image.complete && image.naturalWidth)).length,
    wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  });
}, 4000);
"""


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> Path:
    """Made by the first run, which takes a second."""
    return tmp_path_factory.mktemp("profile")


def chromium(profile: Path, *arguments: str) -> str:
    """Run headless Chromium, as root and without a network; returns its output."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        "--virtual-time-budget=8000", f"--user-data-dir={profile}", *arguments,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def probed(report: Path, target: Path) -> str:
    """The report with the scripts above, which its policy is told of; the address of its Figure 11."""
    text = report.read_text()
    allowed = " ".join(f"'sha256-{digest(script)}'" for script in (WATCH, PROBE))
    text = text.replace("script-src ", f"script-src {allowed} ", 1).replace(
        "<title>", f"<script>{WATCH}</script><title>", 1
    )
    target.write_text(text.removesuffix("</body>\n</html>\n") + f"<script>{PROBE}</script></body></html>")
    return f"{target.as_uri()}#fig11"


def test_charts_answer_a_hover_and_nothing_else_happens(report, profile, tmp_path):
    page = Page(report.read_text())
    assert len(report.read_bytes()) < 2**20, "with the library"
    shown = chromium(profile, "--window-size=500,2500", "--dump-dom", probed(report, tmp_path / "report.html"))
    seen = json.loads(unescape(re.search("<title>(.*?)</title>", shown, re.DOTALL).group(1)))
    assert seen["troubles"] == []
    assert seen["titles"] == ["first, measured, n = 48", "second, measured, n = 48"], "side by side"
    answer = dict(seen["shown"])
    assert answer["label"] == answer["settings"] == HOSTILE and answer["KV read (%)"] == "30.0"
    assert answer["acc (%)"] == "12.5 ± 5.0" and answer["source"] == "measured"
    assert (seen["pages"], seen["panes"], seen["chosen"]) == (1, 1, 1), "of a page or pane each, no other is seen"
    assert (seen["images"], seen["broken"]) == (len(page.all("src")), 0)
    assert seen["scripts"] == len(page.scripts) + len(page.packed) + 3 and seen["elements"] == 0
    assert seen["wider"] <= 0, "the page scrolls sideways on a phone"
    assert sorted(seen["before"], key=lambda cell: float(cell.split()[0])) == seen["after"] != seen["before"]


@pytest.mark.parametrize(
    ("scheme", "background", "policy"),
    [(0, (20, 24, 28), "script-src"), (1, (255, 255, 255), "script-src"), (1, (255, 255, 255), "script-src 'none'")],
    ids=["dark", "light", "without scripts"],
)
def test_a_screenshot_has_the_colours_of_its_scheme_and_a_chart(scheme, background, policy, report, profile, tmp_path):
    shot, page = tmp_path / "shot.png", tmp_path / "report.html"
    page.write_text(re.sub(r"script-src[^\"]*", policy, report.read_text()) if "none" in policy else report.read_text())
    settings = (f"--blink-settings=preferredColorScheme={scheme}", "--window-size=500,1400", f"--screenshot={shot}")
    chromium(profile, *settings, f"{page.as_uri()}#fig11")
    with Image.open(shot) as picture:
        colors = {color: count for count, color in picture.convert("RGB").getcolors(2**24)}
    assert max(colors, key=colors.get) == background and len(colors) > 50
    assert sum(count for color, count in colors.items() if near(color, BLUE)) > 100, "the points of a chart"


def near(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(abs(a - b) < 30 for a, b in zip(one, other, strict=True))

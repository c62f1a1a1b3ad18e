"""The report in a browser: its tables sort and are searched on a phone's width, and nothing else happens.

The report is of two models, with labels that would break out of a page that took them for anything but words.
"""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from harness.report import write_report
from tests.plots.test_plots import write
from tests.report.test_report import HOSTILE, SHOWN, SVG, Page, digest, place, score

CHROMIUM = shutil.which("chromium")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """The report of two models: a board, a task and a figure."""
    folder = tmp_path_factory.mktemp("results")
    rows = [place(f"Method {ratio:,}", ratio=ratio) for ratio in (3.0, 0.5, 1200.0, 20.0, *range(30, 40))]
    rows.append(place(HOSTILE, ratio=None, kl_nats=None))
    write(folder, "board-methods", rows)
    for inner in (folder, folder / "second"):
        write(inner, "fig11", [score("A", 0.1, value, task=task) for task in "ab" for value in (0.75, 0.5)])
        (inner / "figures").mkdir()
        (inner / "figures" / "fig11.svg").write_text(SVG.replace('"9"', '"900"'))
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
const wait = seconds => new Promise(done => setTimeout(done, 1000 * seconds));
(async () => {
  await wait(1);
  const seen = {}, table = document.querySelector("#board table");
  const column = at => [...table.tBodies[0].rows].map(row => row.cells[at].textContent);
  const ratio = [...table.tHead.rows[0].cells].findIndex(cell => cell.textContent.startsWith("KL"));
  for (const name of ["up", "down"]) {
    table.tHead.rows[0].cells[ratio].querySelector("[role=button]").click();
    await wait(0.1);
    seen[name] = column(ratio);
  }
  const search = document.querySelector("#board input");
  search.value = "onload";
  search.dispatchEvent(new Event("input", { bubbles: true }));
  await wait(1);
  seen.found = column(0);
  document.title = JSON.stringify({
    ...seen, troubles,
    pages: [...document.querySelectorAll(".page")].filter(each => each.checkVisibility()).length,
    scripts: document.scripts.length, elements: document.querySelectorAll("[onload], [onerror]").length,
    broken: [...document.images].filter(image => !(image.complete && image.naturalWidth)).length,
    wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  });
})().catch(error => document.title = JSON.stringify(String(error.stack)));
"""


def test_tables_sort_and_are_searched_and_nothing_else_happens(report, tmp_path):
    text = report.read_text()
    allowed = " ".join(f"'sha256-{digest(script)}'" for script in (WATCH, PROBE))
    text = text.replace("script-src ", f"script-src {allowed} ", 1)
    text = text.replace("<title>", f"<script>{WATCH}</script><title>", 1)
    target = tmp_path / "report.html"
    target.write_text(text.removesuffix("</body>\n</html>\n") + f"<script>{PROBE}</script></body></html>")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        "--virtual-time-budget=20000", f"--user-data-dir={tmp_path}", "--window-size=500,2500", "--dump-dom",
        f"{target.as_uri()}#page-board",
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    seen = json.loads(unescape(re.search("<title>(.*?)</title>", shown, re.DOTALL).group(1)))
    assert isinstance(seen, dict), seen
    assert seen["troubles"] == []
    ratios = [float(cell.split()[0].replace(",", "")) for cell in seen["up"][:-1]]
    assert ratios == sorted(ratios) and {0.5, 3.0, 1200.0} < {*ratios}, "numbers, not letters"
    assert seen["down"][:-1] == seen["up"][-2::-1] and seen["up"][-1] == seen["down"][-1] == "-"
    assert seen["found"] == [SHOWN]
    assert (seen["pages"], seen["broken"], seen["elements"]) == (1, 0, 0)
    assert seen["scripts"] == len(Page(text).scripts) + 1
    assert seen["wider"] <= 0, "the page scrolls sideways on a phone"

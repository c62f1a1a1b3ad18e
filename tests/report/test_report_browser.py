"""The report in a browser: the explorer answers a choice, a hover and a click; both schemes, a phone, no scripts.

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
from tests.report.test_report import HOSTILE, SVG, Page, digest, place, score

CHROMIUM = shutil.which("chromium")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """The report of two models: a board, a task and a figure."""
    folder = tmp_path_factory.mktemp("results")
    boards = []
    for over in ("all models", "first"):
        common = {"over": over, "step_on": HOSTILE}
        boards.append(
            place("Full", **common, method="full", kl_nats=None, ratio=None, apart="itself", family="reads all")
        )
        for budget, kl in ((0.1, 0.5), (0.25, 0.25)):
            at_budget = common | {"asked_budget": budget, "budget_low": budget, "budget_high": budget}
            boards.append(place(HOSTILE, **at_budget, kl_nats=kl, ratio=10 * kl, family="retrieves", front="link"))
            boards.append(place("B", **at_budget, kl_nats=2 * kl, step_source="modelled"))
    boards.append(place("long", over="first", seq_len=4096))
    boards.append(place("unanswered", over="first", answers_difference=None))
    write(folder, "board-methods", boards)
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
PROBE = """{
const explorer = document.querySelector("#explorer");
const wait = seconds => new Promise(done => setTimeout(done, 1000 * seconds));
// Virtual time passes at once, and does not wait for the thread that unpacks: keep busy for real time.
const busy = () => { for (let count = 0; count < 5e7; count++); };
const until = async ready => { for (let tries = 0; tries < 100 && !ready(); tries++) { busy(); await wait(0.1); } };
const points = () => [...explorer.querySelectorAll(".chart .mark-symbol.role-mark path")];
const at = point => {
  const { x, y, width, height } = point.getBoundingClientRect();
  return { bubbles: true, clientX: x + width / 2, clientY: y + height / 2 };
};
const hover = point => {
  point.dispatchEvent(new PointerEvent("pointermove", at(point)));
  const rows = document.querySelector("#vg-tooltip-element")?.querySelectorAll("tr") ?? [];
  return [...rows].map(row => [...row.cells].map(cell => cell.textContent));
};
const choose = async (name, value) => {
  const select = explorer.querySelector(`select[name=${name}]`);
  select.value = value;
  select.dispatchEvent(new Event("change"));
  await wait(1);
  return points().length;
};
const column = table => [...table.tBodies[0].rows].map(row => row.cells[3].textContent);
(async () => {
  await until(() => points().length);
  await wait(1);
  const named = () => [...explorer.querySelectorAll(".mark-text.role-mark text")].map(text => text.textContent);
  const seen = { first: points().length, labels: named(), shown: hover(points().at(-2)) };
  const click = point => {
    for (const kind of ["pointerdown", "mousedown", "pointerup", "mouseup", "click"])
      point.dispatchEvent(new MouseEvent(kind, at(point)));
  };
  click(points().at(-2));
  await wait(1);
  seen.pale = points().filter(point => point.getAttribute("opacity") < 0.5).length;
  seen.named = named();
  seen.at_budget = await choose("budget", "10 %");
  seen.all = await choose("budget", "");
  seen.answers = await choose("y", "answers_difference");
  seen.axes = [...explorer.querySelectorAll(".role-axis-title text")].map(text => text.textContent);
  seen.step = await choose("x", "step_s");
  seen.model = await choose("over", "first");
  seen.windows = await choose("windows", "4,096 tokens");
  const table = document.querySelector("#board table");
  seen.before = column(table);
  table.querySelectorAll("th button")[3].click();
  seen.after = column(table);
  document.title = JSON.stringify({
    ...seen, troubles,
    pages: [...document.querySelectorAll(".page")].filter(each => each.checkVisibility()).length,
    scripts: document.scripts.length, elements: document.querySelectorAll("[onload], [onerror]").length,
    broken: [...document.images].filter(image => !(image.complete && image.naturalWidth)).length,
    wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  });
})().catch(error => document.title = JSON.stringify(String(error.stack)));
}"""


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> Path:
    """Made by the first run, which takes a second."""
    return tmp_path_factory.mktemp("profile")


def chromium(profile: Path, *arguments: str) -> str:
    """Run headless Chromium, as root and without a network; returns its output."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        "--virtual-time-budget=40000", f"--user-data-dir={profile}", *arguments,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_explorer_answers_and_nothing_else_happens(report, profile, tmp_path):
    text = report.read_text()
    page = Page(text)
    assert len(text) < 2**20, "with the library"
    allowed = " ".join(f"'sha256-{digest(script)}'" for script in (WATCH, PROBE))
    text = text.replace("script-src ", f"script-src {allowed} ", 1)
    text = text.replace("<title>", f"<script>{WATCH}</script><title>", 1)
    target = tmp_path / "report.html"
    target.write_text(text.removesuffix("</body>\n</html>\n") + f"<script>{PROBE}</script></body></html>")
    shown = chromium(profile, "--window-size=500,2500", "--dump-dom", f"{target.as_uri()}#page-board")
    seen = json.loads(unescape(re.search("<title>(.*?)</title>", shown, re.DOTALL).group(1)))
    assert isinstance(seen, dict), seen
    assert seen["troubles"] == []
    assert (seen["first"], seen["at_budget"], seen["all"]) == (4, 2, 4), "without the full cache, whose KL is 0"
    assert (seen["answers"], seen["step"], seen["model"], seen["windows"]) == (4, 4, 4, 1)
    assert set(seen["labels"]) >= {"B 10 %", "B 25 %"}, "names that have room"
    answer = dict(seen["shown"])
    assert answer["method"] == answer["step timed on"] == HOSTILE and answer["asked budget"] == "25 %"
    assert answer["KL (nats)"] == "0.2500" and answer["family"] == "retrieves"
    assert seen["pale"] == 2 and seen["named"] == [f"{HOSTILE} 10 %", f"{HOSTILE} 25 %"], "the chosen method's budgets"
    assert "answers minus full cache (points)" in seen["axes"]
    assert (seen["pages"], seen["broken"], seen["elements"]) == (1, 0, 0)
    assert seen["scripts"] == len(page.scripts) + len(page.packed) + 3
    assert seen["wider"] <= 0, "the page scrolls sideways on a phone"
    assert seen["after"] == sorted(seen["before"], key=lambda cell: float(cell.split()[0]))

"""One's own results beside the shipped ones: what is written where, what is shown of both, and how it is marked."""

import re
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

import plots
from harness.report import write_report
from harness.results.columns import csv_of, read_frame
from harness.results.write import joined
from harness.run.cli import main
from plots import drawing, style
from plots.drawing import figure_of
from tests.runs import outcome

ROOT = Path(__file__).resolve().parents[2]
README_COMMAND = ["-m", "method=full,h2o,int4,infinigen", "num_windows=2"]
WRITING = ("accuracy", "speedup", "run", "board", "paper", "plots", "report")
"""Targets of make that read or write results."""


def contents(folder: Path) -> dict[str, str]:
    return {str(path): sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def checkout(runs, shipped_beside, monkeypatch) -> Path:
    """The current folder, with some of the shipped results in `results`."""
    for name in ("perplexity", "attention_error", "fig11", "fig4"):
        for file in (f"tables/{name}.csv", f"figures/{name}.svg"):
            if (ROOT / "results" / file).exists():
                Path("results", file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / "results" / file, Path("results", file))
    (Path("results") / "findings.yaml").write_text("fig4: What is shipped is said.\n")
    monkeypatch.setattr("harness.settings.paths.SHIPPED", Path("results").resolve())
    return Path.cwd()


@pytest.mark.parametrize("target", WRITING)
def test_no_target_of_make_touches_the_shipped_results(target):
    command = ["make", "-n", "--no-print-directory", "-C", str(ROOT), target]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.replace("\\\n", " ").splitlines()
    commands = [line for line in lines if "run.py" in line or "-m harness" in line or "-m plots" in line]
    assert done.returncode == 0 and commands
    words = " ".join(commands).replace("=", " ").replace("'", " ").replace('"', " ").split()
    assert "results" not in words
    assert "outputs" in words or target in ("accuracy", "speedup"), "these take the default of results_dir"


def test_runs_figures_and_the_report_leave_the_shipped_results_as_they_are(checkout, monkeypatch):
    monkeypatch.setattr(drawing, "FORMATS", {"svg": drawing.FORMATS["svg"]})
    before = contents(Path("results"))
    report = write_report().read_text()
    assert "What is shipped is said." in report and report.count("data:image/svg+xml") >= 3, "before any run"
    assert main(README_COMMAND) == 0
    plots.main()
    report = write_report().read_text()
    assert contents(Path("results")) == before
    assert {path.name for path in checkout.iterdir()} == {"outputs", "results"}
    rows = read_frame(Path("outputs/tables/perplexity.csv"))
    own = set(rows.loc[rows["shipped"] == "", "label"])
    assert own == {"Full cache", "H2O", "INT4", "InfiniGen"} < set(rows["label"])
    page = Path("outputs/tables/perplexity.md").read_text()
    assert "H2O \\*" in page and "One's own run; the other rows are shipped" in page
    assert "One&#39;s own run" in report and "data:image/svg+xml" in report
    drawn = {path.stem for path in Path("outputs/figures").iterdir()}
    assert drawn == {"fig11", "attention_error"}, "figures without a table of one's own are the shipped ones"


def test_the_figure_of_budgets_has_no_panel_of_single_points(checkout, runs, capsys):
    def measure(config):
        found = outcome(config)
        found.metrics[config.corpus.name]["budget"] = config.budget or 0.3
        return found

    runs.measure = measure
    assert main(README_COMMAND) == 0
    with style.applied():
        figures = [figure_of(Path(folder), "fig11") for folder in ("results", "outputs")]
        for budget in (0.1, 0.2):
            assert main(["method=h2o", f"budget={budget}", "num_windows=2"]) == 0
        figures.append(figure_of(Path("outputs"), "fig11"))
    shipped, same, figure = figures
    assert len(same.axes) == len(shipped.axes) < len(figure.axes)
    note = figure.get_supxlabel().replace("\n", " ")
    assert re.search(r"of one's own runs: .*H2O, INT4 \(.*n = 2.*\); all others are shipped$", note)
    assert "own" not in shipped.get_supxlabel()


def test_errors_by_layer_keep_every_shipped_curve_beside_ones_own(checkout):
    shipped = read_frame(Path("results/tables/attention_error.csv"))
    own = shipped[shipped["series"].str.startswith(("INT4,", "H2O, 10 %"))].assign(num_samples=2, shipped="")
    own["series"] = own["series"].str.replace("H2O, 10 %", "H2O, 41 %")
    path = Path("outputs/tables/attention_error.csv")
    path.parent.mkdir(parents=True)
    path.write_text(csv_of(joined(path, "analysis", own), "analysis"))
    with style.applied():
        before = figure_of(Path("results"), "attention_error")
        after = figure_of(Path("outputs"), "attention_error")
    curves = [set(axes.get_legend_handles_labels()[1]) for axes in after.axes]
    assert [set(axes.get_legend_handles_labels()[1]) for axes in before.axes] == curves[:2]
    assert curves[2:] == 2 * [{"H2O, 41 %", "INT4, 33 %"}], "the budgets of one's own windows nearest to 10 %"


def test_a_table_that_was_written_before_follows_the_shipped_rows(checkout, capsys):
    """Of an update of the project: what is shipped anew is shown at the next run."""
    assert main(["method=h2o", "num_windows=2"]) == 0
    path = Path("results/tables/perplexity.csv")
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if ",int1," not in line))
    own = Path("outputs/tables/perplexity.csv")
    assert "int1" in set(read_frame(own)["method"])
    assert main(["method=int4", "num_windows=2"]) == 0
    rows = read_frame(own)
    assert set(rows.loc[rows["shipped"] == "", "method"]) == {"h2o", "int4"} and "int1" not in set(rows["method"])

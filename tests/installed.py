"""The project as its users install it: builds the wheel, installs it, and runs README's lines from another folder.

python -m tests.installed

The fresh environment sees the packages of the one that runs this, but not its editable installation of the project:
a path file adds that folder, and path files inside of such a folder are not read.
"""

from __future__ import annotations

import csv
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
MODULE = "benchmarks/gpu.py"
"""A module of the wheel in none of these folders."""
ALWAYS = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "run.py")
PLACES = {"harness": "harness", "methods": "methods", "plots": "plots", "conf": "harness/conf"}
"""Folders of the repository, and where the wheel has their files."""
LEFT_OUT = shutil.ignore_patterns("__pycache__", "runs", "jobs", "figures", "*.html", "*.json")
"""Of `results` what is made from the tables, and what is a machine's own."""
SHORT = """\
import functools, harness
harness.load = functools.partial(harness.load, num_windows=1)
"""
"""Before README's lines, so that they take seconds."""
README_COMMAND = ("kv-harness", "-m", "method=full,h2o,int4,infinigen", "num_windows=8")
"""The command whose table README shows first, as an installation calls it."""
METRICS = {"kl_nats": "offline KL (nats)", "perplexity": "offline perplexity"}
"""The columns of that table that are compared, by metric."""
BETWEEN_PROCESSORS = 0.01
"""Share by which a number may differ."""
CODED = {"INT4": 3}
"""Rows that are one draw of rounding noise, and the standard errors by which their numbers may differ: a decode step
reads the coded rows of the steps before it, so that a code which falls to the other side changes all later ones."""
FROM_THE_WHEEL = """
import sys
import harness, methods, plots
for package in (harness, methods, plots):
    assert package.__file__.startswith(sys.prefix), package.__file__
"""


def check_first_table(printed: str, table: Path) -> None:
    """README's first table repeats, on whatever processor this is, with the Python whose text it is of."""
    print(printed)
    readme = (ROOT / "README.md").read_text()
    if f"({platform.python_version()} here)" not in readme:
        print(f"README's table is of the text inside another Python than {platform.python_version()}: not compared")
        return
    assert f"python run.py {' '.join(README_COMMAND[1:])}\n" in readme
    lines = readme[readme.index("| label ") :].split("\n\n")[0].splitlines()
    cells_of = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if "|" in line]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert header == cells_of[0], "heading for heading"
    assert [cells[0] for cells in rows] == [cells[0] for cells in cells_of[2:]]
    with table.open() as file:
        found = {(row["label"], row["metric"]): row for row in csv.DictReader(file) if not row["shipped"]}
    for cells in rows:
        row = dict(zip(header, cells, strict=True))
        for metric, heading in METRICS.items():
            measured = found[row["label"], metric]
            value, shown = float(measured["value"]), float(row[heading].split()[0])
            tolerance = max(BETWEEN_PROCESSORS * shown, 0.0005 if shown else 0.0001)  # of the printed digits
            if errors := CODED.get(row["label"]):
                tolerance = errors * float(measured["difference_stderr"] or measured["stderr"])
            assert abs(value - shown) <= tolerance, f"{row['label']}, {heading}: {value}, README has {shown}"


def build(hook: str, source: Path, to: Path) -> Path:
    """What a hook of setuptools makes of a source tree, without network."""
    to.mkdir()
    done = subprocess.run([sys.executable, "-c", BUILD, hook, str(to)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "importable" not in done.stderr, "setuptools takes a folder of data for a package"
    (made,) = to.iterdir()
    return made


def build_wheel(folder: Path) -> Path:
    """The wheel, made in an empty folder from the source distribution."""
    source = folder / "source"
    source.mkdir()
    for name in ALWAYS:
        shutil.copy(ROOT / name, source)
    for name in (*PLACES, "results"):
        shutil.copytree(ROOT / name, source / name, ignore=LEFT_OUT)
    (source / MODULE).parent.mkdir()
    shutil.copy(ROOT / MODULE, source / MODULE)
    with tarfile.open(build("build_sdist", source, folder / "sdist")) as sdist:
        by_data = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on
        sdist.extractall(folder / "unpacked", **by_data)
    (unpacked,) = (folder / "unpacked").iterdir()
    return build("build_wheel", unpacked, folder / "wheel")


def unpacked_wheel(folder: Path) -> Path:
    """The content of the wheel, in a folder that can be put on Python's path."""
    with zipfile.ZipFile(build_wheel(folder)) as wheel:
        wheel.extractall(folder / "site-packages")
    return folder / "site-packages"


def install(folder: Path) -> Path:
    """A fresh environment with the wheel; returns the folder of its programs."""
    wheel = build_wheel(folder)
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    programs = environment / "bin"
    python = str(programs / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True)
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    (Path(purelib) / "locked.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


def main() -> None:
    """Install, and run README's lines of Python and commands; ends with an error where one fails."""
    with tempfile.TemporaryDirectory() as name:
        programs = install(Path(name))
        work = Path(name) / "work"
        work.mkdir()
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

        def run(*command: str) -> str:
            print("+", *command[:1], *command[1:] if "\n" not in command[-1] else ["(README)"], flush=True)
            program = str(programs / command[0])
            done = subprocess.run(
                [program, *command[1:]], cwd=work, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            return done.stdout

        run("python", "-c", FROM_THE_WHEEL)
        for block in re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL):
            print(run("python", "-c", SHORT + block))
        check_first_table(run(*README_COMMAND), work / "outputs" / "tables" / "perplexity.csv")
        assert "infinigen2" in run("kv-harness", "--help")
        words = ["--parts", "steps", "--shapes", "1x24", "--labels", "ideal", "--out", "gpu"]
        assert "1 x 24      ideal" in run("python", "-m", "benchmarks.gpu", "--platform", "cpu", *words)
        assert "lm-eval validate" in run("kv-harness", "lm-eval", "--help")


if __name__ == "__main__":
    main()

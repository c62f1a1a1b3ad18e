"""The project as its users install it: builds the wheel, installs it, and runs README's lines from another folder.

python -m tests.installed

The fresh environment sees the packages of the one that runs this, but not its editable installation of the project:
a path file adds that folder, and path files inside of such a folder are not read.
"""

from __future__ import annotations

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
TOLERANCE = {"INT4": 0.35}
"""Share by which a number of a row may differ from processor to processor, else a hundredth. Under a codec a code that
falls to the other side changes all later ones."""
FROM_THE_WHEEL = """
import sys
import harness, methods, plots
for package in (harness, methods, plots):
    assert package.__file__.startswith(sys.prefix), package.__file__
"""


def check_first_table(printed: str) -> None:
    """README's first table repeats, on whatever processor this is, with the Python whose text it is of."""
    print(printed)
    readme = (ROOT / "README.md").read_text()
    if f"({platform.python_version()} here)" not in readme:
        print(f"README's table is of the text inside another Python than {platform.python_version()}: not compared")
        return
    assert f"python run.py {' '.join(README_COMMAND[1:])}\n" in readme
    shown = readme[readme.index("| label ") :].split("\n\n")[0].splitlines()
    made = [line for line in printed.splitlines() if line.startswith("|")]
    for line, other in zip(shown, made, strict=True):
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        others = [cell.strip() for cell in other.strip("|").split("|")]
        assert others[0] == label
        for cell, found in zip(cells, others[1:], strict=True):
            number = re.match(r"[\d.]+", cell)
            if number is None:
                assert found == cell or set(cell) <= set("-:"), "heading for heading"
                continue
            difference = abs(float(re.match(r"[\d.]+", found)[0]) - float(number[0]))
            assert difference <= TOLERANCE.get(label, 0.01) * float(number[0]) + 0.0005, (label, cell, found)


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
        check_first_table(run(*README_COMMAND))
        assert "infinigen2" in run("kv-harness", "--help")
        words = ["--parts", "steps", "--shapes", "1x24", "--labels", "ideal", "--out", "gpu"]
        assert "1 x 24      ideal" in run("python", "-m", "benchmarks.gpu", "--platform", "cpu", *words)
        assert "lm-eval validate" in run("kv-harness", "lm-eval", "--help")


if __name__ == "__main__":
    main()

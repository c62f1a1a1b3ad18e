"""The house around the code: make, the environment it builds, the lock, and what import-linter cannot check."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.settings.codecs import codec_names
from harness.settings.schema import options

ROOT = Path(__file__).resolve().parents[2]

# make


CHOSEN = {
    "accuracy DATA=offline": "experiment=accuracy sweep.scale=small model=smollm2-135m platform=cpu data=offline",
    "accuracy DATA=hub RESULTS=r ARGS=seed=3": "experiment=accuracy sweep.scale=paper model=smollm2-135m platform=cpu "
    "data=hub results_dir=r seed=3",
    "speedup RESULTS=r": "experiment=speedup sweep.scale=small platform=cpu model=smollm2-135m "
    "model.weights=pretrained results_dir=r",
    "paper MODEL=opt-13b DATA_ROOT=texts RESULTS=r": "experiment=paper sweep.scale=paper model=opt-13b platform=cpu "
    "data=local data.root=texts sweep.data_root=texts results_dir=r",
    "paper MODEL=opt-13b DATA=hub PLATFORM=cuda ARGS=seed=3": "experiment=paper sweep.scale=paper model=opt-13b "
    "platform=cuda data=hub data.root=null sweep.data_root=hub results_dir=outputs seed=3",
}


@pytest.mark.parametrize("command", CHOSEN)
def test_the_data_and_the_model_choose_the_grid(command):
    planned = ["make", "-n", "--no-print-directory", "-C", str(ROOT), f"PYTHON={sys.executable}", *command.split()]
    commands = subprocess.run(planned, capture_output=True, text=True, check=True).stdout
    assert f"run.py {CHOSEN[command]}" in " ".join(commands.replace("\\\n", " ").split())


# dependencies


def locked(name: str = "requirements.lock") -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    pins = [line.partition(" ; ")[0] for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin) for pin in pins), pins
    return dict(pin.split("==") for pin in pins)


def test_the_lock_pins_every_dependency_within_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = locked()
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["dev"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


# imports, beyond `make lint`

METHODS = {*options("method")}
METHODS -= {"full", "oracle", "oracle-infinigen", "oracle-sampled", "oracle-linear", "random", *codec_names()}
"""Names that stand for a method alone: tables compare with the oracles, weights and texts may be `random`, and codecs
are settings."""
LISTS_OF_METHODS = ("api/", "settings/systems.py", "checks/families.py", "paper/", "report/")
"""Defaults of the Python interface, systems of speed runs, the check of families, and the paper's analyses."""


def test_the_harness_names_no_method():
    """It asks a method for its properties."""
    for path in (ROOT / "harness").rglob("*.py"):
        if not str(path.relative_to(ROOT / "harness")).startswith(LISTS_OF_METHODS):
            strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not strings & METHODS, path


SLOW = ("torch", "transformers", "lm_eval", "datasets")
LIGHT = {
    "import harness.run.cli": (*SLOW, "numpy", "pandas"),
    "import harness.settings.config, harness.results.record, harness.results.write, plots": SLOW,
    "from harness.run.compose import load": SLOW,
    "from harness.run.compose import load; load(['method=infinigen'])": SLOW[1:],
}
"""What begins a command, settings that are refused and tables, and packages that take seconds to import."""


@pytest.mark.parametrize("code", LIGHT)
def test_start_up_loads_no_heavy_package(code):
    code = f"import sys; {code}; print([name for name in {LIGHT[code]} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr

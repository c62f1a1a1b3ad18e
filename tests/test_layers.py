"""Rules that import-linter (`make lint`) cannot check: what start-up loads, and names of methods in the harness."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from methods.codec import CODEC_NAMES

ROOT = Path(__file__).resolve().parent.parent
METHODS = {path.stem for path in (ROOT / "conf" / "method").glob("*.yaml")} - {"full", "oracle", *CODEC_NAMES}
"""Names that stand for a method alone: `oracle` is a family in tables, and codecs are settings."""
LISTS_OF_METHODS = ("interface.py", "settings/systems.py", "model/families.py", "paper/")
"""Defaults of the Python interface, systems of speed runs, the check of families, and the paper's analyses."""


def test_the_harness_names_no_method():
    """It asks a method for its properties."""
    for path in (ROOT / "harness").rglob("*.py"):
        if not str(path.relative_to(ROOT / "harness")).startswith(LISTS_OF_METHODS):
            strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not strings & METHODS, path


SLOW = ("torch", "transformers", "lm_eval", "datasets")
LIGHT = {
    "import harness.launch.cli, harness.experiments": (*SLOW, "numpy", "pandas"),
    "import harness.settings.config, harness.records.record, harness.tables.write, plots": SLOW,
    "from harness.settings.compose import load": SLOW,
    "from harness.settings.compose import load; load(['method=infinigen'])": SLOW[1:],
}
"""What begins a command, settings that are refused and tables, and packages that take seconds to import."""


@pytest.mark.parametrize("code", LIGHT)
def test_start_up_loads_no_heavy_package(code):
    code = f"import sys; {code}; print([name for name in {LIGHT[code]} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr

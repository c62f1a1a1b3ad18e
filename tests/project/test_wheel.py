"""The wheel carries every file that the code reads, and an installation finds them. `make wheel-check` installs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.installed import MODULE, PLACES, ROOT, unpacked_wheel


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory) -> Path:
    """A folder with the content of the wheel."""
    return unpacked_wheel(tmp_path_factory.mktemp("wheel"))


def files(folder: Path) -> set[str]:
    """Paths of all files below a folder, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_has_all_files_of_packages_and_configuration_and_the_shipped_tables(site_packages):
    expected = {MODULE}
    for name, place in PLACES.items():
        own = {path for path in files(ROOT / name) if "__pycache__" not in path}
        expected |= {f"{place}/{path}" for path in own}
    tables = {path for path in files(ROOT / "results") if path.endswith((".csv", ".md", "findings.yaml"))}
    expected |= {f"harness/shipped/{path}" for path in tables if not path.startswith(("runs/", "jobs/"))}
    found = {path for path in files(site_packages) if ".dist-info/" not in path}
    assert found == expected
    (info,) = site_packages.glob("*.dist-info")
    assert "kv-harness = harness.__main__:command" in (info / "entry_points.txt").read_text()


def test_an_installation_finds_its_files_and_ones_own_tables_take_over_the_shipped_rows(site_packages, tmp_path):
    """Python in a working folder, with the project from the wheel's files alone."""
    code = """
import sys
import plots.style
from harness.settings import paths
from harness.data.tasks import own_tasks
from harness.results.columns import read_frame
from harness.results.environment import describe
from harness.results.write import update
from harness.run.compose import load
assert paths.INSTALLED and str(paths.CONF_DIR).startswith(sys.argv[1])
assert load(["method=infinigen"]).results_dir == "outputs" and own_tasks()
assert describe()["commit"] is None
for folder in ("outputs", "outputs/qwen2.5-coder-0.5b", "mine"):
    path = update(folder, "perplexity")
    print(path.exists() and all(read_frame(path)["shipped"] == "yes"))
"""
    environment = os.environ | {"PYTHONPATH": str(site_packages), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", code, str(site_packages)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True", "False"], done.stderr
    assert (tmp_path / "outputs" / "tables" / "perplexity.md").is_file()

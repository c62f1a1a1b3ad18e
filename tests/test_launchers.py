"""A grid in shares through Hydra's launchers with processes of their own, on a tiny model; what several processes
write at the same time."""

import csv
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokens import byte_tokenizer

from harness import files
from harness.model.tiny import tiny_model
from harness.records import record as records

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> list[str]:
    """Settings for a tiny model in a folder of its own, and a text of random letters."""
    folder = tmp_path_factory.mktemp("toy")
    model = tiny_model("llama", num_key_value_heads=2)
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    text = folder / "text.txt"
    text.write_text("".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz \n", k=1000)))
    texts = [f"corpus.path={text}", f"calibration.path={text}", "calibration.num_tokens=80"]
    return [f"model.path={folder / 'model'}", *texts, "seq_len=200", "prefill_len=100", "num_windows=1"]


def test_shares_of_a_grid_run_as_jobs(toy, tmp_path):
    """One cell of conf/grid/choices.yaml exempts all four layers of the tiny model, which no other job notices."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    launcher = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "grid.share=1/2,2/2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "KV_HARNESS_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(ROOT / "run.py"), *launcher, "grid=choices", "size=null", *toy]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    found = records.read_records(tmp_path / "results", "choices")
    statuses = {record["config"]["label"]: record["status"] for record in found}
    (failed,) = (label for label, status in statuses.items() if status != "finished")
    assert failed == "InfiniGen, num_exempt_layers=4" and len(statuses) == 7
    with (tmp_path / "results/tables/choices.csv").open(newline="") as stream:
        assert {row["label"] for row in csv.DictReader(stream)} == set(statuses) - {failed}, "of both jobs"
    said = f"error: 1 of [34] cells failed; the first, choices {failed}: .*must be < 4 layers"
    assert done.returncode == 2 and re.match(said, done.stderr.splitlines()[-1]), done.stderr


def test_what_is_derived_is_derived_again_when_its_source_changed_meanwhile(tmp_path):
    """Two processes that end together: the one that writes the table last has read the other's record."""
    files.write_atomic(tmp_path / "a" / "record.json", "1")
    others = iter(["2", "3"])
    seen = []

    def derive():
        seen.append(sorted(path.read_text() for path in tmp_path.glob("*/record.json")))
        if other := next(others, None):
            files.write_atomic(tmp_path / ("b" if other == "2" else "a") / "record.json", other)
        return seen[-1]

    assert files.until_settled(tmp_path, "*/record.json", derive) == ["2", "3"]
    assert seen == [["1"], ["1", "2"], ["2", "3"]]

"""Damaged records, tables and YAML by the hundred: refused in one line or read as they are, no crash, no hang."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mutations
import pytest
from test_leaderboard import STEP, save_method
from test_plots import WRITERS
from test_tables import LATENCY_METRICS, save

import plots.drawing
from harness.errors import UserError
from harness.paper.report import contents
from harness.records import record as records
from harness.records.record import read_record, read_records
from harness.tables import write as tables
from plots.drawing import DRAWINGS

SEEDS = range(10)
"""Each takes several: see `PER_SEED`."""
PER_SEED = 5
CHUNK = {"first": 256, "stop": 512, "num_tokens": 10, "metrics": {"perplexity": 12.5, "perplexity_stderr": None}}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Records of every shape of table, those of the leaderboard among them."""
    folder = tmp_path_factory.mktemp("results")
    save_method(folder, "full", None, kl=0.0, hits="1111", **STEP)
    save_method(folder, "streaming", 0.16, kl=0.5, hits="1000", **STEP)
    windows = {"windows": [{"nll": 2.5, "nll_full": 2.4}, {"nll": 2.6, "nll_full": 2.5}]}
    sizes = {"size": 0.2, "device_frac": 0.25, "resident_frac": 0.02}
    text = {"offline": {"perplexity": 12.5, "perplexity_stderr": 0.5, "num_samples": 2} | sizes}
    save(folder, ["experiment=fig12", "method=h2o"], text, chunks=[CHUNK], samples=windows)
    save(folder, ["experiment=latency", "label=offload"], LATENCY_METRICS)
    point = {"series": "a", "metric": "bytes", "value": 2.0**30, "stderr": None, "num_samples": 1}
    point |= {"x_name": "layer", "x": 3.0, "layer": 3}
    save(folder, ["experiment=table1"], {"source": "measured", "points": [point, point | {"x": 4.0, "layer": 4}]})
    return folder


def written(path: Path, damage: Callable[[bytes, int], bytes], seed: int) -> bytes:
    """Damage the file; returns what it was."""
    before = path.read_bytes()
    path.write_bytes(damage(before, seed))
    return before


def use(results: Path, experiment: str) -> None:
    """What reads the records of an experiment."""
    tables.update(results, experiment)
    assert isinstance(tables.summary(read_records(results, experiment)), str)


def with_odd_value(content: bytes, seed: int) -> bytes:
    """A record in which one value is left out or odd, with the digest of that."""
    record = mutations.value_of(json.loads(content), seed)
    if isinstance(record, dict):
        record[records.DIGEST] = records._digest(record)
    return json.dumps(record).encode()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_record_is_refused_or_as_it_was_written(seed, results):
    paths = sorted(results.glob("runs/*/*/record.json"))
    for number in range(seed * PER_SEED, (seed + 1) * PER_SEED):
        path = paths[number % len(paths)]
        expected = read_record(path)
        before = written(path, mutations.bytes_of, number)
        try:
            assert read_record(path) == expected, number
        except UserError as refusal:
            assert str(refusal).startswith(f"{path}: damaged record (") and "\n" not in str(refusal), number
        path.write_bytes(before)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_record_with_an_odd_value_breaks_no_table(seed, results):
    paths = sorted(results.glob("runs/*/*/record.json"))
    for number in range(seed * PER_SEED, (seed + 1) * PER_SEED):
        path = paths[number % len(paths)]
        before = written(path, with_odd_value, number)
        try:
            use(results, path.parts[-3])
        except UserError as refusal:
            assert "\n" not in str(refusal)
        except Exception as error:
            raise AssertionError(f"{path.parts[-3]} seed {number}: {error!r}") from error
        path.write_bytes(before)


TABLES = ("fig11", "fig12", "fig14", "fig16a", "frontier")


def read_sheets(path: Path) -> None:
    """As the report reads a table."""
    contents.sheets(path, contents.read_table(path))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_table_is_refused_or_drawn_and_shown(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(plots.drawing, "rendered", lambda figure: {})  # the slow half, which reads no table
    for number in range(seed * PER_SEED, (seed + 1) * PER_SEED):
        name = TABLES[number % len(TABLES)]
        monkeypatch.setattr(plots.drawing, "DRAWINGS", {name: DRAWINGS[name]})
        WRITERS[name](tmp_path)
        path = tmp_path / "tables" / f"{'leaderboard' if name == 'frontier' else name}.csv"
        written(path, mutations.bytes_of, number)
        for read in (partial(plots.draw_figures, tmp_path), partial(read_sheets, path)):
            try:
                read()
            except UserError as refusal:
                assert "\n" not in str(refusal)
            except Exception as error:
                raise AssertionError(f"{name} seed {number}: {error!r}") from error

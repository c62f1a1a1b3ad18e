"""Damaged records and tables by the hundred: refused in one line or read as they are, no crash, no hang."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import plots.drawing
from harness.errors import UserError
from harness.results import record as records
from harness.results import write as tables
from harness.results.record import read_record, read_records
from plots.drawing import DRAWINGS
from tests.plots.test_plots import write
from tests.report.test_report import place
from tests.results.test_tables import LATENCY_METRICS, answers, save

SEEDS = range(30)
CHUNK = {"first": 256, "stop": 512, "num_tokens": 10, "metrics": {"perplexity": 12.5, "perplexity_stderr": None}}
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 10**400, 1e308, 0.5, "", "x", "nan", "1e999", "a\nb", "$\\foo$", "\x1b[2J", [], {}, [[]],
    [None], {"a": 1}, "full", "offline[0:1]",
)  # fmt: skip
TOKENS = (b"NaN", b"1e999", b"-", b"", b'"', b",", b"\n", b"\r", b"\0", b"\xff", b"{", b"]", b"9" * 400, b"nan", b"'")


def with_damage(data: bytes, seed: int) -> bytes:
    """The file with a byte changed, a piece left out, repeated or moved, its end cut off, or a token put in."""
    draw = random.Random(seed)
    start, stop = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    short = min(stop, start + draw.randrange(1, 12))
    return draw.choice((
        lambda: data[:start] + bytes([draw.randrange(256)]) + data[start + 1 :],
        lambda: data[:start] + data[short:],
        lambda: data[:start] + data[start:short] * 2 + data[short:],
        lambda: data[:start] + draw.choice(TOKENS) + data[short:],
        lambda: data[:start],
        lambda: data[:start] + data[stop:] + data[start:stop],
    ))()  # fmt: skip


def with_odd_value(record: dict[str, Any], seed: int) -> dict[str, Any]:
    """The record with one of its values left out, or an odd one in its place, and the digest of that."""
    draw = random.Random(seed)

    def places(value: Any) -> Any:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            yield value, key
            yield from places(inner)

    container, key = draw.choice(list(places(record)))
    if draw.random() < 0.25:
        del container[key]
    else:
        container[key] = draw.choice(ODD)
    return record | {records.DIGEST: records._digest(record)}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Records of every shape of table, those of the board among them."""
    folder = tmp_path_factory.mktemp("results")
    for method in ("full", "streaming"):
        chosen = ["experiment=board", f"method={method}"]
        read = {"budget": 0.16, "device_frac": 0.3, "resident_frac": 0.1, "num_samples": 4}
        places = [{"place": at / 2, "kl_nats": 0.5, "budget": 0.16, "nll": 2.5, "nll_full": 2.4} for at in (0, 1)]
        save(folder, chosen, {"code": read | {"perplexity": 12.0, "kl_nats": 0.5}}, samples={"windows": places})
        sampled = {"passkey": answers([1.0, 0.0, 1.0, 1.0])}
        save(folder, [*chosen, "kind=tasks"], {"passkey": read | {"acc": 0.75}}, samples=sampled)
        step = {"late_bytes": 0, "link_bytes_per_s": 1e9, "budget": 0.16, "h2d_bytes": 2**20}
        save(folder, [*chosen, "kind=latency"], LATENCY_METRICS | step)
    windows = {"windows": [{"nll": 2.5, "nll_full": 2.4}, {"nll": 2.6, "nll_full": 2.5}]}
    text = {"offline": {"perplexity": 12.5, "perplexity_stderr": 0.5, "num_samples": 2, "budget": 0.2}}
    save(folder, ["experiment=fig12", "method=h2o"], text, chunks=[CHUNK], samples=windows)
    save(folder, ["experiment=latency", "system=offload"], LATENCY_METRICS)
    point = {"series": "a", "metric": "bytes", "value": 2.0**30, "stderr": None, "num_samples": 1}
    point |= {"x_name": "layer", "x": 3.0, "layer": 3}
    save(folder, ["experiment=table1"], {"source": "measured", "points": [point, point | {"x": 4.0, "layer": 4}]})
    return folder


@contextmanager
def at_most_refused(what: str, message: str = "") -> Iterator[None]:
    """The block ends without an error, or with a refusal in one line that begins with `message`."""
    try:
        yield
    except UserError as refusal:
        assert str(refusal).startswith(message) and "\n" not in str(refusal), what
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error


def test_damaged_records_are_refused_or_as_they_were_written_and_break_no_table(results):
    paths = sorted(results.glob("runs/*/*/record.json"))
    for seed in SEEDS:
        path = paths[seed % len(paths)]
        expected, before, experiment = read_record(path), path.read_bytes(), path.parts[-3]
        path.write_bytes(with_damage(before, seed))
        with at_most_refused(f"seed {seed}", f"{path}: damaged record ("):
            assert read_record(path) == expected
        path.write_text(json.dumps(with_odd_value(json.loads(before), seed)))
        with at_most_refused(f"{experiment} seed {seed}"):
            tables.update(results, experiment)
            assert isinstance(tables.summary(read_records(results, experiment)), str)
        path.write_bytes(before)


BOARD = [place("A"), place("B", ratio=3.0, seq_len=4096), place("C", apart="lacks code", rank=None)]
FIGURES = ("fig11", "fig12", "fig14", "fig16a", "board")


def test_a_damaged_table_is_refused_or_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(plots.drawing, "rendered", lambda figure: {})  # the slow half, which reads no table
    for seed in SEEDS:
        name = FIGURES[seed % len(FIGURES)]
        table = "board-methods" if name == "board" else name
        monkeypatch.setattr(plots.drawing, "DRAWINGS", {name: DRAWINGS[name]})
        write(tmp_path, table, BOARD if name == "board" else None)
        path = tmp_path / "tables" / f"{table}.csv"
        path.write_bytes(with_damage(path.read_bytes(), seed))
        with at_most_refused(f"{name} seed {seed}"):
            plots.draw_figures(tmp_path)

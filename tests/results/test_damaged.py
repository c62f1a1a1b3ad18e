"""Damaged tables by the dozen: refused in one line or read as they are, no crash, no hang."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import plots.drawing
from harness.errors import UserError
from harness.report import sections
from harness.results.columns import read_table
from plots.drawing import DRAWINGS
from tests.plots.test_plots import write
from tests.report.test_report import place

SEEDS = range(30)
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


@contextmanager
def at_most_refused(what: str, message: str = "") -> Iterator[None]:
    """The block ends without an error, or with a refusal in one line that begins with `message`."""
    try:
        yield
    except UserError as refusal:
        assert str(refusal).startswith(message) and "\n" not in str(refusal), what
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error


BOARD = [place("A"), place("B", ratio=3.0, seq_len=4096), place("C", apart="lacks code", rank=None)]
FIGURES = ("fig11", "fig12", "fig14", "fig16a", "board")


def test_a_damaged_table_is_refused_or_drawn_and_shown(tmp_path, monkeypatch):
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
        with at_most_refused(f"{name} seed {seed}"):
            sections.sheets(path, read_table(path))

"""Columns of the tables that only some models have: numbers by hand, and no number elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.model.load import LoadedModel
from harness.results.columns import read_frame
from harness.results.metrics import OF_SOME_RUNS
from harness.run.cli import main
from tests.living import tiny
from tests.runs import reading
from tests.tiny_models import WINDOW, mixed
from tests.tokens import byte_tokenizer

SEQ_LEN, PREFILL_LEN = 100, 40
ROWS = range(PREFILL_LEN, SEQ_LEN - 1)
"""Tokens cached at each decode row; the last one of a window predicts nothing."""
HELD = 2 * (WINDOW - 1)
"""Two of six layers hold the last 15 tokens."""
CHANNELS = 2 * 2 * 16 + 4 * 16
"""Of qwen3_next's convolution: queries and keys of two heads, values of four."""


BUDGET = sum((2 * t + 2 * 20) / (4 * t) for t in ROWS) / len(ROWS)
"""Of H2O with 10 + 10 of 100 tokens in two of the four layers that see every token; windows count in none."""
EVICTED = sum(t - 20 for t in ROWS) / len(ROWS)
"""All but 10 + 10 tokens, at each row."""
OF_ALL = {"budget": BUDGET, "tokens_evicted": EVICTED}
EXPECTED: dict[str, dict[str, float]] = {
    "gemma2": OF_ALL | {"window_frac": sum(HELD / (4 * t + HELD) for t in ROWS) / len(ROWS)},
    "qwen3_next": OF_ALL | {"recurrent_bytes": 2 * 4 * (4 * 16 * 16 + CHANNELS * 4)},
    "deepseek_v3": OF_ALL | {"latent_bytes": 4 * 32 * 4},
    "gqa": OF_ALL,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_table_has_the_numbers_of_its_models_and_no_other(name, monkeypatch, tmp_path):
    """Of H2O on random letters, with a tiny model in place of any other."""
    loaded = LoadedModel(tiny(name) if name == "gqa" else mixed(name), byte_tokenizer(), name, 512)
    texts = reading(monkeypatch, tmp_path, loaded)
    lengths = [f"seq_len={SEQ_LEN}", f"prefill_len={PREFILL_LEN}", "num_windows=2"]
    assert main(["experiment=perplexity", "method=h2o", "method.dense_layers=2", *texts, *lengths]) == 0
    table = read_frame(Path("outputs/tables/perplexity.csv"))
    for column in OF_SOME_RUNS:
        assert table[column.name].notna().all() == (column.name in EXPECTED[name]), column
    for column, expected in EXPECTED[name].items():
        assert [*table[column]] == pytest.approx([expected] * len(table)), column
    shown = Path("outputs/tables/perplexity.md").read_text()
    assert all((column.heading in shown) == (column.name in EXPECTED[name]) for column in OF_SOME_RUNS)

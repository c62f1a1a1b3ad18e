"""`python -m benchmarks.peers` on a tiny model: our results are the peers', and a difference is told.

kvpress's pipeline needs an older transformers than this project's: `question` and `sweep` are not run here.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks import peers
from tests.tiny_models import tiny_model
from tests.tokens import byte_tokenizer

SIZES = peers.Sizes(
    rounds=1, windows=1, window=64, contexts=(200,), answer=6, questions=1, texts=3, text_context=60, text_new=5,
    batches=(1, 2), prompt=40, warm_up=1, steps=4,
)  # fmt: skip


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    """The setting of a tiny model in a folder."""
    monkeypatch.setattr(peers, "Sizes", lambda: SIZES)
    monkeypatch.setattr(peers, "measure_copy_rate", lambda: 1e9)
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer()  # every token of the model is a text, so that all differences show
    shape = {"num_key_value_heads": 2, "max_position_embeddings": 4096, "vocab_size": len(tokenizer)}
    tiny_model("llama", **shape).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    return f"model.path={tmp_path / 'model'}"


def rows(printed: str) -> list[list[str]]:
    """The cells of each line of the table."""
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_jobs_whose_peers_are_installed_have_equal_results(model, capsys):
    jobs = ["--jobs", "perplexity", "choices", "texts", "decode", "question"]
    assert peers.main([model, *jobs, "--methods", "h2o"]) == 0
    printed, told = capsys.readouterr()
    found = rows(printed)
    tasks = [("choices", "yes"), ("choices", "-"), ("texts", "yes"), ("texts", "-")]
    equal = [(cells[0], cells[-1]) for cells in found]
    assert equal == [("perplexity", "yes"), *tasks, ("decode", "yes"), ("decode", "yes")]
    assert found[1][1] == "1 questions, full" and found[2][1] == "1 questions, h2o"
    assert found[3][2] in ("HFLM, batch 1", "HFLM, batch 4"), "no batch is much larger than the requests are many"
    assert "question is skipped: give --peers-python PATH" in told


def test_a_window_is_replayed_under_each_method_and_the_full_cache(model, capsys):
    assert peers.main([model, "seq_len=64", "prefill_len=32", "--jobs", "replay", "--methods", "h2o", "full"]) == 0
    printed, told = capsys.readouterr()
    h2o, full = rows(printed)
    assert h2o[1:3] == ["h2o, 64 tokens, prompt 32", "full"] and "peak memory " in told
    assert full[5] == "1.00 (1.00 to 1.00)"


def test_a_job_that_fails_and_a_loss_that_differs_are_told_and_the_others_go_on(model, monkeypatch, capsys):
    def fail(bench):
        raise ValueError("no such luck")

    monkeypatch.setitem(peers.JOBS, "texts", fail)
    monkeypatch.setattr(peers, "cross_entropy", lambda logits, targets: torch.tensor(1.0))
    assert peers.main([model, "--jobs", "texts", "perplexity"]) == 2
    printed, told = capsys.readouterr()
    assert "texts: failed, ValueError: no such luck" in told and rows(printed)[0][0] == "perplexity"
    assert "perplexity, 1 x 64 tokens: not equal to transformers forward" in told

"""`python -m benchmarks.replay` on a tiny model."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks import replay
from harness.model.tiny import tiny_model
from tests.tokens import byte_tokenizer


@pytest.mark.parametrize("cases", [["h2o"], ["h2o", "full"]])
def test_ratios_are_to_a_full_cache_that_is_always_timed(cases, tmp_path, monkeypatch, capsys):
    tokenizer = byte_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    sizes = ["--seq-len", "64", "--prefill-len", "32", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["replay", f"model.path={tmp_path}", *sizes, "--cases", *cases])
    replay.main()
    ratios = dict(re.findall(r"^(\w+) .* ([\d.]+) x full", capsys.readouterr().out, re.MULTILINE))
    assert list(ratios) == ["full", cases[0]] and ratios["full"] == "1.00"

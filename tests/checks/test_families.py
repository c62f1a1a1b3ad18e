"""Families of models: one of each kind is checked whole; `python -m harness.checks.families` checks them all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from harness.checks import families
from harness.checks.contract import BrokenError
from harness.checks.families import TABLE, check_family, methods_agree, own_logits, tiny_family
from harness.checks.two_ways import Trial
from harness.model.attached import Attached

VERDICTS = {  # the verdict, the kinds of layers, and what is said
    "gpt2": ("works", "full", ""),
    "cohere2": ("works", "full, sliding window", ""),
    "mistral": ("works", "sliding window", ""),
    "gpt_oss": ("works", "full, sliding window, sinks", ""),
    "gemma2": ("works", "full, sliding window, softcap", ""),
    "qwen3_next": ("works", "full, recurrent", ""),
    "deepseek_v3": ("works", "latent", ""),
    "kimi_linear": ("works", "latent, recurrent", ""),
    "llama4_text": ("in part", "full, chunked", "no padded batch"),
    "zamba": ("in part", "full, recurrent", "no method that predicts a query"),
    "bloom": ("refused", "", "given no positions"),
    "falcon": ("refused", "", "not transformers' attention function"),
    "roberta": ("refused", "", "logits are off"),
    "deepseek_v32": ("refused", "", "its own indexer chooses the tokens"),
}
CORE = [
    *(Path("harness/model", f"{name}.py") for name in ("attach", "attention", "decoder", "prompts", "policies")),
    *(Path("harness/replay", f"{name}.py") for name in ("session", "decode_pass")),
    *Path("harness/decode").rglob("*.py"),
]


@pytest.mark.parametrize("name", VERDICTS)
def test_a_family_of_each_kind_works_or_is_refused_with_a_reason(name):
    verdict, layers, why = VERDICTS[name]
    found = check_family(name)
    assert found.verdict == verdict and why in found.why and (found.why == "") == (why == "")
    assert verdict == "refused" or found[2] == layers


ZEROS = torch.zeros(2, families.STEPS + 1, 256)


@pytest.mark.parametrize(
    ("check", "place", "name", "spoil", "message"),
    [
        (own_logits, Attached, "logits", lambda got: 1.01 * got, "the full cache: logits differ"),
        (methods_agree, Trial, "live", lambda got: got._replace(logits=ZEROS), "full: logits differ"),
        (methods_agree, Trial, "live", lambda got: got._replace(logits=ZEROS / 0), "full: logits differ by nan"),
    ],
)
def test_the_checks_can_fail(check, place, name, spoil, message, monkeypatch):
    model, right = tiny_family("llama"), getattr(place, name)
    check(model)
    monkeypatch.setattr(place, name, lambda *given, **options: spoil(right(*given, **options)))
    with pytest.raises(BrokenError, match=message):
        check(model)


def test_the_page_names_every_family_once():
    rows = [line.split("|")[1:-1] for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    cells = [name for row in rows for name in (row[:1] if len(row) == 3 else row[1:])]
    named = [name for cell in cells for name in cell.strip().split(", ")]
    assert sorted(name for name in named if name in families.families()) == [*families.families()]


@pytest.mark.parametrize("file", CORE, ids=str)
def test_the_core_knows_no_family_by_its_name(file):
    nodes = ast.walk(ast.parse(file.read_text()))
    assert not {node.value for node in nodes if isinstance(node, ast.Constant)} & {*families.families()}

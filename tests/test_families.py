"""Families of models: one of each kind is checked whole; `python -m harness.model.families` checks them all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from harness.contract import live
from harness.model import families
from harness.model.attach import Attached
from harness.model.families import TABLE, check_family, early_queries, main, methods_agree, own_logits, tiny_family

OF_EACH_KIND = {
    "gpt2": "full",
    "phi": "full",
    "cohere2": "full, sliding window",
    "mistral": "sliding window",
    "gemma3n_text": "full, sliding window",
    "gpt_oss": "full, sliding window, sinks",
    "gemma2": "full, sliding window, softcap",
    "qwen3_next": "full, recurrent",
    "nemotron_h": "full, recurrent",
    "deepseek_v3": "latent",
    "kimi_linear": "latent, recurrent",
}
IN_PART = {
    "llama4_text": ("full, chunked", "no padded batch"),
    "zamba": ("full, recurrent", "no method that rehearses"),
}
REFUSED = {
    "bloom": "given no positions",
    "deepseek_v32": "takes indices",
    "falcon": "not transformers' attention function",
    "roberta": "logits are off",
}
CORE = [
    *(
        Path("harness/model", f"{name}.py")
        for name in ("attach", "attention", "decoder", "calibration", "policies", "prompt")
    ),
    *Path("harness/replay").glob("*.py"),
    *Path("harness/offload").rglob("*.py"),
]


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_a_family_of_each_kind_works(name):
    assert check_family(name)[1:] == ("works", OF_EACH_KIND[name], "")


@pytest.mark.parametrize("name", IN_PART)
def test_what_a_family_cannot_do_is_refused_and_the_rest_works(name):
    layers, why = IN_PART[name]
    found = check_family(name)
    assert found[1:3] == ("in part", layers) and why in found.why


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_with_a_reason(name):
    found = check_family(name)
    assert found.verdict == "refused" and REFUSED[name] in found.why


def zeros_as_logits(*arguments, **options):
    return live(*arguments, **options)._replace(logits=torch.zeros(2, families.STEPS + 1, 256))


def test_the_checks_can_fail(monkeypatch):
    model = tiny_family("llama")
    for check in families.CHECKS:
        assert check(model) == ""
    logits, early = Attached.logits, Attached.early_query
    with monkeypatch.context() as patch:
        patch.setattr(Attached, "logits", lambda self, hidden: 1.01 * logits(self, hidden))
        with pytest.raises(AssertionError, match="the full cache: logits are off"):
            own_logits(model)
    with monkeypatch.context() as patch:
        patch.setattr(Attached, "early_query", lambda *arguments: early(*arguments) + 1e-6)
        with pytest.raises(AssertionError, match="an early query is off"):
            early_queries(model)
    with monkeypatch.context() as patch:
        patch.setattr(families, "live", zeros_as_logits)
        with pytest.raises(AssertionError, match="full, live: logits are off"):
            methods_agree(model)


def test_the_page_names_every_family_once():
    rows = [line.split("|")[1:-1] for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    cells = [name for row in rows for name in (row[:1] if len(row) == 3 else row[1:])]
    named = [name for cell in cells for name in cell.strip().split(", ")]
    assert sorted(name for name in named if name in families.families()) == [*families.families()]
    works = [row for row in rows if len(row) == 2][: len({*OF_EACH_KIND.values()})]
    assert sum(row[1].count(",") + 1 for row in works) >= 95


def test_a_family_that_is_not_in_the_table_is_an_error(capsys):
    assert main(["llama", "lama"]) != 0
    assert capsys.readouterr().err.startswith("error: family lama: must be one of afmoe, ")


@pytest.mark.parametrize("file", CORE, ids=str)
def test_the_core_knows_no_family_by_its_name(file):
    nodes = ast.walk(ast.parse(file.read_text()))
    assert not {node.value for node in nodes if isinstance(node, ast.Constant)} & {*families.families()}

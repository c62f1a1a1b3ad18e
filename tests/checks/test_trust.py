"""The checks of `experiment=contract thorough=true` hold for the code as it is, and fail where the fault is there."""

from __future__ import annotations

import copy
import dataclasses
import re
from math import nan
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.checks import trust
from harness.checks.contract import BrokenError
from harness.checks.two_ways import Trial
from harness.errors import UserError
from harness.results.columns import read_frame
from harness.run import cli
from harness.run.compose import load
from harness.settings.paths import PACKAGES_DIR

HOLDS = re.compile(r"\|\s+holds \|")


@pytest.fixture(scope="module")
def subject(default_model) -> trust.Subject:
    """The default model's first layers: no check depends on how many there are."""
    config = copy.deepcopy(default_model.model.config)
    config.num_hidden_layers = 2
    first = AutoModelForCausalLM.from_config(config)
    first.load_state_dict(default_model.model.state_dict(), strict=False)
    loaded = dataclasses.replace(default_model, model=first.eval().requires_grad_(False))
    return trust.Subject(load(["experiment=contract", "thorough=true"]), loaded, load)


@pytest.fixture
def few(monkeypatch):
    """Less of each check."""
    less = {"budgets": ["infinigen2"], "live": ["full", "h2o"], "window": 256}
    less |= {"prefixed": ["niah_single_1"], "prompt": 600, "questions": 1}
    assert less.keys() == trust.LOOKED_AT.keys()
    for name, value in less.items():
        monkeypatch.setitem(trust.LOOKED_AT, name, value)


def test_every_check_holds_and_the_page_says_what_it_saw(
    subject, few, one_model_of_the_contract, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr("harness.model.load.load_model", lambda config: subject.loaded)
    assert cli.main(["experiment=contract", "thorough=true", f"results_dir={tmp_path}"]) == 0
    page = (tmp_path / "trust.md").read_text(encoding="utf-8")
    assert re.search(r"Checks that ran on \d{4}-\d\d-\d\d, of smollm2-135m and code [0-9a-f]{12}", page)
    assert len(HOLDS.findall(page)) == len(trust.CHECKS) and "FAILS" not in page
    printed = capfd.readouterr().out
    for name in trust.CHECKS:
        assert name in printed and name in page


def test_a_second_start_token_is_seen(subject, few, monkeypatch):
    start = subject.loaded.tokenizer.bos_token_id
    ours, theirs = subject.scored
    for added in (1, 2):
        wrong = ours._replace(ids=[[start] * added + ids for ids in ours.ids])
        monkeypatch.setitem(vars(subject), "scored", (wrong, theirs))
        with pytest.raises(BrokenError, match=f"start tokens: {added}"):
            trust.one_start_token(subject)


@pytest.mark.parametrize(
    ("check", "setting"),
    [(trust.the_budget_bites, "budget="), (trust.generated_tokens_are_quantized, "codec=int4")],
)
def test_a_setting_without_effect_is_seen(check, setting, subject, few, monkeypatch):
    """A budget that is not applied, and generated tokens that stay exact."""
    run = subject.run

    def deaf(self: trust.Subject, *words: str):
        return run(*(word for word in words if not word.startswith(setting)))

    monkeypatch.setattr(trust.Subject, "run", deaf)
    with pytest.raises(BrokenError):
        check(subject)


def test_generated_tokens_that_are_not_in_the_store_are_seen(subject, few, monkeypatch):
    run = subject.run

    def longer(self: trust.Subject, *words: str):
        return run(*words, *(["residual=64"] if "codec=int4" in words else []))

    monkeypatch.setattr(trust.Subject, "run", longer)
    with pytest.raises(BrokenError, match="^7 tokens after the prompt under INT4: 0 of them are codes$"):
        trust.generated_tokens_are_quantized(subject)


@pytest.mark.parametrize("number", [0, 1])
def test_what_is_no_number_is_seen(number, subject, few, monkeypatch):
    """Logits of one method and a log-likelihood that are NaN, first or later."""
    force, scores = Trial.force, [-1.0, -2.0]
    monkeypatch.setattr(Trial, "force", lambda *args: force(*args) * nan)
    monkeypatch.setitem(trust.LOOKED_AT, "live", trust.LOOKED_AT["live"][number:])
    with pytest.raises(BrokenError, match="logits differ by nan"):
        trust.live_is_replay(subject)
    wrong = [-1.0, -2.0]
    wrong[number] = nan
    of_both = [own._replace(scores=given) for own, given in zip(subject.scored, (wrong, scores), strict=True)]
    monkeypatch.setitem(vars(subject), "scored", of_both)
    with pytest.raises(BrokenError, match="within nan"):
        trust.the_full_cache_is_the_models_own(subject)


def test_another_dtype_is_refused(subject):
    """Its rounding alone would fail."""
    coarse = dataclasses.replace(subject.loaded, model=SimpleNamespace(dtype=torch.bfloat16))
    with pytest.raises(UserError, match=r"model.dtype=bfloat16: .*; allowed: float32$"):
        trust.run_trust(subject.config, coarse, load)


SHIPPED = PACKAGES_DIR / "results"


def test_the_shipped_page_has_every_check():
    page = (SHIPPED / "trust.md").read_text(encoding="utf-8")
    assert len(HOLDS.findall(page)) == len(trust.CHECKS)
    assert all(name in page for name in trust.CHECKS)


def test_no_method_of_the_board_beats_the_full_cache():
    """A wrong full cache would show: a method would answer certainly more questions."""
    rows = read_frame(SHIPPED / "tables" / "board-methods.csv").query("over == 'all models'")
    compared = rows[rows["answers_difference"].notna()]
    assert len(compared) > 50
    assert not [*compared["label"][compared["answers_difference_low"] > 0]]


def test_nothing_was_tuned_where_the_board_scores_it():
    texts = {*read_frame(SHIPPED / "tables" / "board-texts.csv")["text"]}
    assert texts and load().calibration.name not in texts

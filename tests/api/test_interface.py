"""`harness.load` and what it returns: the command line's runs from Python, and values of any kind, each refused in one
line that names the argument."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch

import harness
from harness.errors import UserError
from harness.model import prompts
from harness.model.attach import digest_of
from harness.model.passes import DensePrompts
from harness.results.record import read_all
from harness.run.cli import main
from tests.conftest import refused
from tests.runs import calls_of
from tests.tokens import byte_tokenizer

PROMPT = "What is a cache?"
TEXT = "A cache keeps what will be read again. " * 80
SHORT = {"num_windows": 2, "seq_len": 96, "prefill_len": 32, "calibration.num_tokens": 64, "platform.link_gbps": 1}


@pytest.fixture
def model(network, tmp_path):
    return harness.load(network, byte_tokenizer(), results_dir=str(tmp_path / "results"), **SHORT)


def test_methods_of_one_call_share_their_dense_prompts(model, network, tmp_path, monkeypatch):
    """Also of a model in memory: each window's prompt runs once, and every number is that of methods that run alone."""
    kept, asked = calls_of(monkeypatch, prompts, "held_prompt"), calls_of(monkeypatch, DensePrompts, "get")
    methods = ["full", "h2o", "streaming"]
    words = {"budget": "nearest:0.6", "quiet": True}
    together = model.perplexity(methods=methods, **words)
    assert (len(kept), len(asked)) == (SHORT["num_windows"], 3 * SHORT["num_windows"])
    alone = []
    for method in methods:
        one = harness.load(network, byte_tokenizer(), results_dir=str(tmp_path / method), **SHORT)
        alone.append(one.perplexity(methods=[method], **words))
    assert len(asked) == 3 * SHORT["num_windows"], "one method alone keeps nothing"
    shared = ["label", "perplexity", "kl_nats", "budget"]
    pd.testing.assert_frame_equal(together[shared], pd.concat(alone, ignore_index=True)[shared])
    assert model.resources.loaded.prompts is None and not model.resources.shares_prompts


def test_a_sampled_text_follows_its_seed_alone(model):
    settings = {"method": "full", "max_new_tokens": 12, "temperature": 1.0, "top_p": 0.95}
    first, again, other = (model.generate(PROMPT, **settings, seed=seed).text for seed in (1, 1, 2))
    assert first == again != other
    assert model.generate(PROMPT, **settings, seed=1, placement="device").text == first
    greedy = model.generate(PROMPT, method="full", max_new_tokens=12).text
    assert greedy == model.generate(PROMPT, method="full", max_new_tokens=12, temperature=0).text != first


def test_perplexity_is_the_table_with_a_line_for_each_method(model, tmp_path):
    text = tmp_path / "it's, mine.txt"
    text.write_text("The cache of keys and values outgrows the memory. " * 20)
    frame = model.perplexity(text, methods=["full", "int4", "streaming"], budget="nearest:0.7")
    assert list(frame.label) == ["Full cache", "INT4", "Streaming"]
    assert list(frame.method) == ["full", "int4", "streaming"]
    assert frame.asked_budget.fillna(0).tolist() == [0, 0, 0.7], "only the last has one to set"
    assert frame["budget"][0] == 1 and frame["budget"][2] == pytest.approx(0.7, abs=0.02)
    assert frame.kl_nats[0] == pytest.approx(0, abs=1e-6) and frame.kl_nats[1] > 0
    table = pd.read_csv(tmp_path / "results" / "tables" / "perplexity.csv")
    shown = table[(table.metric == "kl_nats") & ~table.task.str.contains("[", regex=False)].set_index("label").value
    assert dict(zip(frame.label, frame.kl_nats, strict=True)) == pytest.approx(shown.to_dict())
    made = {record["inputs"]["model"] for record in read_all(tmp_path / "results")}
    assert made == {digest_of(model.loaded.model)}, "the weights in memory are a run's identity"


def test_a_method_that_a_prompt_excludes_costs_the_others_nothing(model, caplog):
    frame = model.perplexity(methods=["full", "snapkv", "streaming"])  # 32 dense tokens, SnapKV observes 32
    assert list(frame.label) == ["Full cache", "Streaming"]
    (said,) = [message for message in caplog.messages if "no row" in message]
    assert said.startswith("perplexity SnapKV: no row, ") and "window" in said
    frame = model.tasks(
        ["kv_recall", "passkey"], methods=["snapkv", "full"], num_samples=2, too_long="truncate", budget=0.5
    )
    assert "Full cache" in list(frame.label) and "passkey_acc" in frame.columns
    with pytest.raises(UserError, match="window"):
        model.perplexity(methods=["snapkv"])
    with pytest.raises(UserError, match="method=snapkw"):
        model.perplexity(methods=["full", "snapkw"], seed=3)


def test_a_budget_that_was_not_read_is_told_each_time(model, caplog):
    for _ in range(2):  # the second time it is finished before
        caplog.clear()
        frame = model.perplexity(methods=["full", "streaming"], budget="nearest:0.01")
        (said,) = [message for message in caplog.messages if "asked for" in message]
        words = f"perplexity Streaming at 0.01: offline: budget=0.01 was asked for, {frame['budget'][1]:.3f} was read"
        assert said == words and frame.unmet_budget[1] == 0.01


def test_a_run_says_on_stderr_where_it_is_unless_it_is_to_be_quiet(model, capsys):
    about = {"methods": ["full", "streaming"], "budget": 0.7}
    model.perplexity(**about)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["perplexity Full cache: running, 1 of 2", "perplexity Streaming at 0.7: running, 2 of 2"]
    model.perplexity(**about)
    assert capsys.readouterr().err.count("finished before, skipped") == 2
    model.perplexity(**about, seed=1, num_windows=1, quiet=True)
    model.generate(PROMPT, method="full", max_new_tokens=2, quiet=True)
    assert capsys.readouterr() == ("", "")


def test_a_folder_runs_as_on_the_command_line(network, tmp_path, capsys):
    network.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    settings = {"results_dir": str(tmp_path / "results")} | SHORT
    harness.load(tmp_path / "model", **settings).perplexity(methods=["full"])
    words = [f"{name}={value}" for name, value in settings.items()]
    assert main(["method=full", f"model.path={tmp_path / 'model'}", *words]) == 0
    assert "finished before, skipped" in capsys.readouterr().out
    assert len(list(read_all(tmp_path / "results"))) == 1


# Values of any kind: each is refused in one line that names the argument


def refusal(act) -> str:
    with pytest.raises(UserError) as raised:
        act()
    message = str(raised.value)
    assert message and "\n" not in message and len(message) <= 2000
    return message


WRONG = {
    "model": (lambda model, given: harness.load(given), [None, "", Path("/no_folder")]),
    "tokenizer": (lambda model, given: harness.load(model.loaded.model, given), [5]),
    "methods": (lambda model, given: model.perplexity(methods=given), [[], "full"]),
    "method": (lambda model, given: model.perplexity(methods=[given]), [None, "full\n"]),
    "tasks": (lambda model, given: model.tasks(given, methods=["full"]), [None, "full"]),
    "prompt": (lambda model, given: model.generate(given, method="full", max_new_tokens=2), [None, ""]),
    "seq_len": (lambda model, given: model.perplexity(methods=["h2o"], seq_len=given), [{1, 2}]),
    "budget": (
        lambda model, given: model.perplexity(methods=["h2o"], budget=given),
        [0, 2, math.nan, True, [0.5], torch.tensor(0.5), "x", "nearest:", "nearest:2"],
    ),
}
"""Calls with values of an argument, by what is named where they are refused."""


@pytest.mark.parametrize(("name", "given"), [(name, given) for name, (_, values) in WRONG.items() for given in values])
def test_what_an_argument_cannot_be_is_refused(name, given, model):
    act, _ = WRONG[name]
    assert name in refusal(lambda: act(model, given))


@pytest.mark.parametrize("name", ["experiment", "corpus.path"])
def test_what_a_call_sets_itself_is_not_set_twice(name, model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    assert refusal(lambda: model.perplexity(text, methods=["full"], **{name: "x"})).startswith(f"{name}='x': is ")
    assert len(model.perplexity(methods=["full"], **{"corpus.path": text})) == 1
    assert refusal(lambda: harness.lm(model, experiment="perplexity")).startswith("experiment='perplexity': is ")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "opt-13b"}, "model='opt-13b': the model is loaded"),
        ({"model.dtype": "bfloat16"}, "model.dtype='bfloat16': the model is loaded"),
        ({"results_dir": ""}, "results_dir=: is empty; must be a path"),
    ],
)
def test_a_setting_that_a_call_would_not_heed_is_refused(settings, said, model):
    acts = [lambda: model.perplexity(methods=["full"], **settings)]
    if "model" not in settings:  # which Python itself refuses there
        acts.append(lambda: harness.attach(model, method="full", **settings).__enter__())
        acts.append(lambda: harness.lm(model, method="full", **settings))
    for act in acts:
        assert refusal(act).startswith(said)


def test_a_model_is_loaded_with_no_settings_of_a_call(network):
    with refused("budget=0.1: each measurement is given it"):
        harness.load(network, budget=0.1)
    with refused("in memory"):
        harness.load(network, **{"model.dtype": "bfloat16"})

"""RULER's six tasks without texts: rows are lm-eval's, whatever ran before; lengths that a task or model cannot do."""

import contextlib
import importlib.util
import inspect
import random
import re
import socket
import sys
from types import SimpleNamespace

import nltk
import numpy as np
import pytest
from lm_eval.evaluator import simple_evaluate

from harness.data import ruler
from harness.data.ruler import MARKERS, NEEDLES, facts, make, num_tokens, rows_of
from harness.data.tasks import load_suite
from harness.errors import UserError
from harness.run.compose import load
from harness.scoring.evaluation import run_tasks
from tests.runs import tiny_loaded
from tests.tokens import byte_tokenizer, word_tokenizer

LENGTH = 800
DATASETS = {
    "niah_single_1": "niah_utils.niah_single_1",
    "niah_multikey_2": "niah_utils.niah_multikey_2",
    "niah_multikey_3": "niah_utils.niah_multikey_3",
    "ruler_vt": "vt_utils.get_vt_dataset",
    "ruler_cwe": "cwe_utils.get_cw_dataset",
    "ruler_fwe": "fwe_utils.fwe_download",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ruler"


@pytest.fixture(scope="module", autouse=True)
def few_words():
    """In place of six million pairs of words, which take lm-eval ten seconds."""
    modules = [f"lm_eval.tasks.ruler.{name}" for name in ("prepare_niah", "niah_utils")]
    words = [f"word{number}" for number in range(99)]
    made = SimpleNamespace(_categories=dict.fromkeys(("nouns", "adjectives", "verbs"), words))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wonderwords", SimpleNamespace(RandomWord=lambda: made))
        for module in modules:
            patch.delitem(sys.modules, module, raising=False)
        ruler._module("niah_single_1")
    yield
    for module in modules:
        del sys.modules[module]


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def settings(*overrides: str):
    return load(["experiment=tasks", f"metadata.max_seq_lengths=[{LENGTH}]", *overrides])


def model_of(tokenizer, max_length: int = 4096):
    """What `load_suite` needs of a model."""
    return SimpleNamespace(tokenizer=tokenizer, max_length=max_length, name="tiny")


# Rows


@pytest.mark.parametrize("task", DATASETS)
def test_rows_are_the_first_of_lm_evals_own(task, tokenizer, tmp_path):
    """With the seeds of its evaluator, in which it has not drawn before."""
    seeds = inspect.signature(simple_evaluate).parameters
    assert (seeds["random_seed"].default, seeds["numpy_random_seed"].default) == (0, 1234)
    ours = make(task, LENGTH, 3, 0, tokenizer)
    tokenizer.save_pretrained(tmp_path)
    module, _, function = DATASETS[task].partition(".")
    own = importlib.import_module(f"lm_eval.tasks.ruler.{module}")
    random.seed(0), np.random.seed(1234)
    if task == "ruler_cwe":
        fresh = importlib.util.module_from_spec(own.__spec__)
        own.__spec__.loader.exec_module(fresh)
        own = fresh
    with contextlib.redirect_stdout(None):
        theirs = getattr(own, function)(max_seq_lengths=[LENGTH], pretrained=str(tmp_path))["test"]
    assert len(theirs) == 500 and ours == [ruler.as_upstream(task, row) for row in theirs.to_list()[:3]]


def test_prompts_are_written_as_upstream_writes_them(tokenizer):
    """`common_words_extraction.py` gives the example, a line break, and the list; `variable_tracking.py` puts a space
    before the worked example, and the template's last space stays."""
    row = make("ruler_cwe", LENGTH, 1, 0, tokenizer)[0]
    example, _, asked = row["input"].rpartition("\nBelow is a numbered list of words. ")
    assert example.startswith("Below is a numbered list of words. ") and example == row["input_example"]
    answers = re.search(r"list are:((?:\d+\. \w[\w-]*(?: \w[\w-]*)* ?){10})$", example)[1]
    words = re.findall(r"\d+\. ((?:(?!\d+\.).)+?)(?= \d+\.|$)", answers)
    listed = example.rpartition("\nQuestion:")[0]
    counts = [len(re.findall(rf"\d+\. {re.escape(word)}(?= \d+\.|$)", listed)) for word in words]
    assert len(words) == 10 and counts == [3] * 10, "the most common of the example are its answer"
    assert asked.endswith("common words in the above list?") and row["gen_prefix"].startswith("Answer: The top 10")
    assert num_tokens(f"{row['input']} {row['gen_prefix']}", tokenizer) + 120 <= LENGTH
    row = make("ruler_vt", LENGTH, 1, 0, tokenizer)[0]
    assert row["input"].startswith(" Memorize and track") and row["input"].count("Memorize and track") == 2
    assert row["gen_prefix"].startswith("Answer: According to") and row["gen_prefix"].endswith("they are: ")


@pytest.mark.parametrize("task", DATASETS)
def test_rows_depend_on_nothing_that_ran_before(task, tokenizer, capfd):
    first = make(task, LENGTH, 2, 0, tokenizer)
    make("ruler_cwe" if task == "ruler_vt" else "ruler_vt", LENGTH + 100, 1, 7, tokenizer)
    random.random(), np.random.rand()
    state = random.getstate(), np.random.get_state()[1].tolist()
    assert make(task, LENGTH, 4, 0, tokenizer)[:2] == first
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state, "others' draws are not disturbed"
    assert make(task, LENGTH, 2, 1, tokenizer) != first
    assert capfd.readouterr() == ("", "")


def test_importing_lm_evals_modules_asks_no_network(monkeypatch, capfd):
    """nltk would download its rules of sentences, by which essays are split."""

    words = SimpleNamespace(_categories=dict.fromkeys(("nouns", "adjectives", "verbs"), ["a"]))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args: pytest.fail("a network was asked"))
    monkeypatch.setitem(sys.modules, "wonderwords", SimpleNamespace(RandomWord=lambda: words))  # the true one is slow
    for name in ("prepare_niah", "niah_utils"):
        monkeypatch.delitem(sys.modules, f"lm_eval.tasks.ruler.{name}", raising=False)
    download = nltk.download
    with contextlib.redirect_stdout(None):
        assert ruler._module("niah_single_1").generate_samples.__globals__["WORDS"] == ["a-a"]
    assert nltk.download is download


# Tasks


@pytest.mark.parametrize("task", DATASETS)
def test_a_task_prompts_and_scores(task, tokenizer):
    lengths = [LENGTH, LENGTH + 100]
    config = settings(f"tasks=[{task}]", f"metadata.max_seq_lengths={lengths}", "num_samples=2")
    made = load_suite(config, model_of(tokenizer)).tasks[task]
    assert [doc["max_length"] for doc in made.eval_docs] == [LENGTH, LENGTH, LENGTH + 100, LENGTH + 100]
    made.build_all_requests(limit=1)
    prompt, generation = made.instances[0].args
    doc = made.eval_docs[0]
    marker = prompt.rindex(MARKERS[task])
    assert prompt == f"{doc['input'].rstrip()} {doc['gen_prefix']}" and "until" in generation
    assert all(answer not in prompt[marker:] and answer in prompt[:marker] for answer in doc["outputs"])
    right = made.process_results(doc, [" " + ", ".join(doc["outputs"]).upper() + "\x01."])
    assert right == {str(LENGTH): 1.0} and made.process_results(doc, ["no"]) == {str(LENGTH): 0.0}
    some = made.process_results(doc, [doc["outputs"][0]])[str(LENGTH)]
    assert some == 1 / len(doc["outputs"]), "the share of the right answers that the text holds"


def test_depth_and_length(tokenizer):
    assert facts("ruler_vt", *make("ruler_vt", LENGTH, 1, 0, tokenizer)) == {"length": LENGTH, "depth": None}
    depths = set()
    for row in make("niah_single_1", LENGTH, 8, 0, tokenizer):
        found = facts("niah_single_1", row)
        assert found["length"] == LENGTH
        assert row["input"][round(found["depth"] * len(row["input"])) :].startswith(row["outputs"][0])
        depths.add(found["depth"])
    assert len(depths) > 2


def test_a_run_says_the_length_and_the_depth_of_each_question():
    """At 1,400 characters; that texts are HFLM's is tested with tasks of any kind."""
    config = settings("method=full", "tasks=[niah_single_1]", "metadata.max_seq_lengths=[1400]", "num_samples=2")
    outcome = run_tasks(config, tiny_loaded())
    samples = outcome.samples["niah_single_1"]
    assert outcome.metrics["niah_single_1"]["1400"] == sum(each["1400"] for each in samples) / 2
    assert {each["length"] for each in samples} == {1400} and all(0 < each["depth"] < 1 for each in samples)


# Refusals


@pytest.mark.parametrize("length", [1, 150])
@pytest.mark.parametrize("task", DATASETS)
def test_a_length_too_short(task, length, tokenizer):
    with pytest.raises(UserError, match=rf"^metadata.max_seq_lengths: {length} is too short for {task}") as refusal:
        make(task, length, 3, 0, tokenizer)
    if task not in NEEDLES:
        least = int(re.search(r"needs (\d+)", str(refusal.value)).group(1))
        assert len(make(task, least + 1, 20, 0, tokenizer)) == 20


def test_a_length_beyond_the_model(tokenizer):
    limit = r"^metadata.max_seq_lengths: 800 is too long: {} takes {} tokens.*model tiny takes {}$"
    # To its length lm-eval does not count what is generated.
    rows = rows_of("ruler_fwe", LENGTH, 2, 0, tokenizer)
    taken = max(len(f"{row['input']} {row['gen_prefix']}".split()) for row in rows) + 50
    assert taken > LENGTH
    with pytest.raises(UserError, match=limit.format("ruler_fwe", taken, taken - 1)):
        ruler.load("ruler_fwe", settings("num_samples=2"), model_of(tokenizer, taken - 1))
    assert ruler.load("ruler_fwe", settings("num_samples=2"), model_of(tokenizer, taken))
    assert ruler.load("ruler_fwe", settings("num_samples=2", "too_long=truncate"), model_of(tokenizer, 600))
    with pytest.raises(UserError, match="num_fewshot=2: task ruler_vt takes no examples"):
        load_suite(settings("tasks=[ruler_vt]", "num_fewshot=2"), model_of(tokenizer))
    with pytest.raises(UserError, match=r"^tasks=ruler_vt: its worked example takes \d+ tokens with this tokenizer"):
        make("ruler_vt", 10_000, 1, 0, byte_tokenizer())

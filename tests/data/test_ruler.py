"""RULER's thirteen tasks: rows are lm-eval's or, of texts, those of RULER's own `prepare.py` to the byte, whatever ran
before; scores are its metrics; lengths that a task or model cannot do."""

import contextlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lm_eval.evaluator import simple_evaluate

from harness.data import ruler
from harness.data.ruler import (
    INSTALL,
    MARKERS,
    NAMES,
    ONE_NEEDLE,
    QUESTIONS,
    facts,
    num_tokens,
)
from harness.data.tasks import load_suite, plan
from harness.errors import UserError
from harness.run.compose import load
from harness.scoring.evaluation import run_tasks
from harness.settings.config import RULER_TASKS
from tests.runs import tiny_loaded
from tests.tokens import starting_tokenizer, word_tokenizer

make = ruler.make.__wrapped__  # each time anew
LENGTH, OF_TEXTS = 800, 2400
"""Tokens of a question; of those that are made of texts."""
DATASETS = {
    "niah_single_1": "niah_utils.niah_single_1",
    "niah_multikey_2": "niah_utils.niah_multikey_2",
    "niah_multikey_3": "niah_utils.niah_multikey_3",
    "ruler_vt": "vt_utils.get_vt_dataset",
    "ruler_cwe": "cwe_utils.get_cw_dataset",
    "ruler_fwe": "fwe_utils.fwe_download",
}
needs_package = pytest.mark.skipif(importlib.util.find_spec("long_context_eval") is None, reason=f"needs {INSTALL}")
every_task = pytest.mark.parametrize("task", [*DATASETS, *(pytest.param(name, marks=needs_package) for name in NAMES)])
WORDS = {"nounlist.txt": ["apple", "river", "stone"], "adjectivelist.txt": ["calm", "old", "red"]}


def length_of(task: str) -> int:
    return OF_TEXTS if task in NAMES else LENGTH


@pytest.fixture(scope="module", autouse=True)
def few_words():
    """In place of six million pairs of words, which take ten seconds."""
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


@pytest.fixture(autouse=True)
def few_words_of_texts(request, monkeypatch):
    if "task" in request.fixturenames and request.node.callspec.params["task"] in NAMES:
        words = SimpleNamespace(random_word=SimpleNamespace(_get_words_from_text_file=WORDS.get))
        monkeypatch.setitem(sys.modules, "wonderwords", words)


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def settings(*overrides: str, length: int = LENGTH):
    return load(["experiment=tasks", f"metadata.max_seq_lengths=[{length}]", *overrides])


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


def test_prompts_of_words_are_written_as_upstream_writes_them(tokenizer):
    """`common_words_extraction.py` gives the example, a line break, and the list; `variable_tracking.py` puts a space
    before the worked example, and the template's last space stays."""
    row = make("ruler_cwe", LENGTH, 1, 0, tokenizer)[0]
    example, _, asked = row["input"].rpartition("\nBelow is a numbered list of words. ")
    assert example.startswith("Below is a numbered list of words. ") and example == row["input_example"]
    assert asked.endswith("common words in the above list?") and row["gen_prefix"].startswith("Answer: The top 10")
    assert num_tokens(f"{row['input']} {row['gen_prefix']}", tokenizer) + 120 <= LENGTH
    row = make("ruler_vt", LENGTH, 1, 0, tokenizer)[0]
    assert row["input"].startswith(" Memorize and track") and row["input"].count("Memorize and track") == 2
    assert row["gen_prefix"].startswith("Answer: According to") and row["gen_prefix"].endswith("they are: ")


def upstream_rows(task: str, tokenizer, count: int, folder: Path) -> list[dict]:
    """What RULER's own command writes, in a process of its own, with the same few words."""
    stand_ins = folder / "stand_ins"
    stand_ins.mkdir()
    (stand_ins / "tenacity.py").write_text(
        "retry = lambda **_: lambda f: f\nstop_after_attempt = wait_fixed = wait_random = lambda *_: 0\n"
    )
    words = f"class random_word:\n    _get_words_from_text_file = {WORDS!r}.get\n"
    (stand_ins / "wonderwords.py").write_text(words)
    tokenizer.save_pretrained(folder / "tokenizer")
    root = ruler._folder()
    places = [stand_ins, root.parent, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "NLTK_DATA": str(ruler._located("llama_index.core") / "_static/nltk_cache"),
    }
    options = {
        "save_dir": folder,
        "benchmark": "synthetic",
        "task": NAMES[task],
        "tokenizer_path": folder / "tokenizer",
        "tokenizer_type": "hf",
        "max_seq_length": OF_TEXTS,
        "num_samples": count,
    }
    command = [sys.executable, str(root / "data/prepare.py")]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    file = folder / NAMES[task] / "validation.jsonl"
    assert file.is_file(), done.stdout + done.stderr
    return [json.loads(line) for line in file.read_text().splitlines()]


@needs_package
@pytest.mark.parametrize("task", NAMES)
def test_prompts_are_upstreams_byte_for_byte(task, tokenizer, tmp_path):
    """To the answer's beginning, whatever the question ends with: SQuAD's 26th has a space there."""
    count = 27 if task == "ruler_qa_squad" else 3
    theirs = upstream_rows(task, tokenizer, count, tmp_path)
    config = settings(f"tasks=[{task}]", f"num_samples={count}", length=OF_TEXTS)
    made = load_suite(config, model_of(tokenizer, 2 * OF_TEXTS)).tasks[task]
    made.build_all_requests(limit=count)
    prompts = [request.args[0] for request in sorted(made.instances, key=lambda request: request.doc_id)]
    assert prompts == [row["input"] for row in theirs]
    assert [doc["outputs"] for doc in made.eval_docs] == [row["outputs"] for row in theirs]
    assert all(doc["length"] == row["length"] <= OF_TEXTS for doc, row in zip(made.eval_docs, theirs, strict=True))
    for doc, prompt in zip(made.eval_docs, prompts, strict=True):
        assert prompt.endswith(doc["gen_prefix"]) and doc["gen_prefix"].startswith((" Answer:", " The special magic"))
        place = prompt.rindex(MARKERS[task])
        question = prompt[place : len(doc["input"])]
        assert re.match(r"\n(What (is|are all) the special magic|Answer the question based on)", question)
        if task not in QUESTIONS:
            assert all(answer in prompt[:place] and answer not in prompt[place:] for answer in doc["outputs"])


@every_task
def test_rows_depend_on_nothing_that_ran_before(task, tokenizer, capfd):
    length = length_of(task)
    first = make(task, length, 2, 0, tokenizer)
    make("ruler_cwe" if task == "ruler_vt" else "ruler_vt", LENGTH + 100, 1, 7, tokenizer)
    random.random(), np.random.rand()
    state = random.getstate(), np.random.get_state()[1].tolist()
    modules, argv, path = dict(sys.modules), list(sys.argv), list(sys.path)
    assert make(task, length, 4, 0, tokenizer)[:2] == first
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state, "others' draws are not disturbed"
    assert (sys.modules, sys.argv, sys.path) == (modules, argv, path)
    assert make(task, length, 2, 1, tokenizer) != first
    assert capfd.readouterr() == ("", "")


@needs_package
def test_a_start_token_is_not_counted_and_stands_in_no_text():
    """As in RULER."""
    assert "<s>" not in make("ruler_qa_squad", 20_000, 1, 0, starting_tokenizer())[0]["input"]


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


@pytest.mark.parametrize(
    "task", ["niah_single_1", *(pytest.param(name, marks=needs_package) for name in NAMES if name in ONE_NEEDLE)]
)
def test_depth_and_length(task, tokenizer):
    length = length_of(task)
    depths = set()
    for row in make(task, length, 8, 0, tokenizer):
        found = facts(task, row)
        assert found["length"] == length and row["input"].count(row["outputs"][0]) == 1
        assert row["input"][round(found["depth"] * len(row["input"])) :].startswith(row["outputs"][0])
        depths.add(found["depth"])
    assert len(depths) > 2
    assert facts("ruler_vt", *make("ruler_vt", LENGTH, 1, 0, tokenizer)) == {"length": LENGTH, "depth": None}


def test_a_run_says_the_length_and_the_depth_of_each_question():
    """At 1,400 characters; that texts are HFLM's is tested with tasks of any kind."""
    config = settings("method=full", "tasks=[niah_single_1]", "metadata.max_seq_lengths=[1400]", "num_samples=2")
    outcome = run_tasks(config, tiny_loaded())
    samples = outcome.samples["niah_single_1"]
    assert outcome.metrics["niah_single_1"]["1400"] == sum(each["1400"] for each in samples) / 2
    assert {each["length"] for each in samples} == {1400} and all(0 < each["depth"] < 1 for each in samples)


def test_any_wording_of_an_answer_is_right():
    """lm-eval gives a third of a point here; RULER's string_match_part gives all."""
    row = {"outputs": ["France", "the France", "Gaul"], "max_length": 4096}
    assert ruler._score_any(row, [" It is FRANCE.\n"]) == {"4096": 1.0}
    assert ruler._score_any(row, [" Spain"]) == {"4096": 0.0}
    assert ruler._score_all(row, [" It is France."]) == {"4096": 1 / 3}


def test_the_group_of_all_tasks_has_their_mean_at_each_length(monkeypatch):
    found = plan(load(["experiment=ruler13", "metadata.max_seq_lengths=[512,1024]"]))
    assert set(found.tasks) == set(RULER_TASKS)
    scores, group = {}, found.groups["ruler"]
    for number, task in enumerate(RULER_TASKS):
        scores[task] = {"512,none": float(number == 0), "1024,none": 0.5, "sample_len": 1 + number}
    monkeypatch.setattr(group, "get_all_tasks", lambda: [SimpleNamespace(task_name=task) for task in RULER_TASKS])
    means = group.aggregate(scores)
    assert (means["512,none"], means["1024,none"]) == (pytest.approx(1 / 13), 0.5), "each task weighs alike"


# Refusals


@every_task
def test_a_length_too_short(task, tokenizer):
    """Upstream would not return."""
    for length in [300] if task in NAMES else [1, 150]:
        with pytest.raises(UserError, match=rf"^metadata.max_seq_lengths: {length} is too short for {task}"):
            make(task, length, 3, 0, tokenizer)


def test_a_length_beyond_the_model(tokenizer):
    limit = r"^metadata.max_seq_lengths: 800 is too long: {} takes {} tokens.*model tiny takes {}$"
    # To its length lm-eval does not count what is generated.
    rows = ruler.make("ruler_fwe", LENGTH, 2, 0, tokenizer)
    taken = max(len(f"{row['input']} {row['gen_prefix']}".split()) for row in rows) + 50
    assert taken > LENGTH
    with pytest.raises(UserError, match=limit.format("ruler_fwe", taken, taken - 1)):
        ruler.load("ruler_fwe", settings("num_samples=2"), model_of(tokenizer, taken - 1))
    assert ruler.load("ruler_fwe", settings("num_samples=2"), model_of(tokenizer, taken))
    assert ruler.load("ruler_fwe", settings("num_samples=2", "too_long=truncate"), model_of(tokenizer, 600))

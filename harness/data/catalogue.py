"""The names of lm-eval's tasks, groups and tags, and where their YAML lies.

lm-eval finds them by parsing some 14,000 files, which takes ten seconds. What it found is kept in the cache folder,
for this version of lm-eval at this place, and read from there in milliseconds. Imports no torch, and lm-eval only
where files are parsed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from harness.errors import UserError, nearest
from harness.files import cache_dir, replacing, text_sha256
from harness.settings.run import TASKS


class Entry(NamedTuple):
    """What a name stands for.

    kind: TASK, PY_TASK (a task that is a Python class), GROUP or TAG, as lm-eval calls them. path: of its YAML; None of
    a tag. tasks: those that a tag stands for.
    """

    kind: str
    path: str | None
    tasks: list[str]


def check_names(names: Iterable[str], include_path: str | None) -> None:
    """Raise UserError for a name that neither the project, lm-eval nor the folder `include_path` knows."""
    others = [name for name in names if name not in TASKS]
    known = packaged() | of_folder(include_path) if others else {}
    for name in others:
        check_known(name, known)


def check_known(name: str, known: Collection[str]) -> None:
    """Raise UserError for a name that is not among those `known`."""
    if name not in known:
        raise UserError(f"tasks={name}: {nearest(name, dict.fromkeys((*TASKS, *known)))}")


def version() -> str:
    """lm-eval's, which decides every prompt and metric of its tasks."""
    return importlib.metadata.version("lm_eval")


def location() -> Path:
    """The folder of lm-eval's own task YAML, found without importing it."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.origin is not None, "lm-eval is a dependency"
    return Path(spec.origin).parent / "tasks"


def packaged() -> dict[str, Entry]:
    """What lm-eval brings, from the cache folder; a missing or damaged file there is made anew."""
    note = cache_dir() / "tasks" / f"{text_sha256(version(), str(location()))[:32]}.json"
    try:
        if known := _read(note.read_text()):
            return dict(known)
    except (OSError, ValueError, TypeError, AttributeError):
        pass  # no usable file: look again
    print(f"{note}: listing lm-eval's tasks once, which takes a while", file=sys.stderr)
    found = _parse(location())
    with contextlib.suppress(OSError), replacing(note) as scratch:
        scratch.write_text(json.dumps(found))
    return found


@lru_cache(maxsize=1)
def _read(note: str) -> dict[str, Entry]:
    """What `packaged` wrote down: a run asks several times."""
    return {name: Entry(*fields) for name, fields in json.loads(note).items()}


def of_folder(folder: str | None) -> dict[str, Entry]:
    """What the YAML of a user's own folder names; nothing without one.

    Raises:
        UserError: a file there is no YAML.
    """
    if folder is None:
        return {}
    from lm_eval.tasks._yaml_loader import load_yaml

    root = Path(folder).resolve()
    for path in sorted(root.rglob("*.yaml")):
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:  # whatever a user's YAML makes of the loader
            reason = " ".join(str(error).split())
            raise UserError(f"include_path={folder}: {path} cannot be read ({reason})") from error
    return _parse(root)


def _parse(root: Path) -> dict[str, Entry]:
    from lm_eval.tasks._index import Kind, TaskIndex

    return {
        name: Entry(
            each.kind.name,
            None if each.yaml_path is None else str(each.yaml_path),
            sorted(each.tags) if each.kind is Kind.TAG else [],
        )
        for name, each in TaskIndex.build([root]).items()
    }

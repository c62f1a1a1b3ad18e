"""The sha256 of every input of a run, code included: a change makes another run.

They are taken before a model loads. Files of the Hugging Face hub are identified by their revision.
Missing ones are downloaded first. The code is the text of the source files that can change a
number: a changed comment makes another run as well.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from harness.data import rows, ruler
from harness.data.text import WIKITEXT_HUB, calibration_text, corpus_text, offline_text
from harness.errors import UserError, reason
from harness.files import content_sha256, files_sha256, text_sha256
from harness.model import source
from harness.settings.config import (
    MADE_TASKS,
    REASONING_TASKS,
    RULER_TASKS,
    CalibrationConfig,
    CorpusConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
)
from harness.settings.kinds import find
from harness.settings.paths import PACKAGES_DIR

if TYPE_CHECKING:
    from harness.data.tasks import Leaf

CODE = "code:"
"""Prefix of the inputs that are code."""
IMPORTS, WORDS = re.compile(r"^\s*(?:from|import) (.*)", re.MULTILINE), re.compile(r"\w+")
"""The rest of a line of Python that imports, and the names in it."""
METHODS = "methods"
CORE = (
    "harness/data", "harness/decode", "harness/model", "harness/replay", "harness/settings",
    f"{METHODS}/codecs",
)  # fmt: skip
"""Folders of code that all runs share."""


def common(config: RunConfig, *, weights: bool) -> dict[str, str]:
    """sha256 by name of what runs of every kind read: the code, the model and the method's file.

    weights: the run reads the model's weights.

    Raises:
        UserError: a file or folder is missing or cannot be read, or a model cannot be fetched.
    """
    found = {f"{CODE}sources": _code(config)} | model(config.model, weights=weights)
    file = config.method.file
    if file is not None:
        try:
            found["method"] = files_sha256([Path(file)])
        except OSError as error:
            why = f"its file {file} cannot be read ({reason(error)})"
            raise UserError(f"method={config.method_name}: {why}") from error
    return found


def model(config: ModelConfig, *, weights: bool = True) -> dict[str, str]:
    """The files, the revision, or the package of a model; {} if its settings decide everything.

    weights: are read.
    """
    weights = weights and config.weights == "pretrained"
    if config.path is not None:
        return {"model": files_sha256(source.model_files(config, weights=weights))}
    if config.hub_id is not None and (weights or config.shape is None):
        found = source.located(config, weights=weights)
        return {"model": files_sha256([found]) if found.is_file() else found.name}
    if weights and config.name == source.PACKAGED_NAME:
        return {"model": source.PACKAGED_SHA256}
    return {}


def calibration(config: CalibrationConfig) -> dict[str, str]:
    """The calibration text."""
    return {"calibration": text_sha256(calibration_text(config))}


def corpus(config: CorpusConfig, data: DataConfig) -> dict[str, str]:
    """The scored text."""
    read = partial(corpus_text, config, data)
    if config.path is None and config.name == "wikitext2" and data.name == "hub":
        path, part = WIKITEXT_HUB
        return {"corpus": rows.revision({"dataset_path": path, "dataset_name": part}, read)}
    return {"corpus": text_sha256(read())}


def tasks(config: RunConfig) -> dict[str, str]:
    """For each leaf task: lm-eval's version, the resolved YAML and the data; for a generated task
    its source text.

    Data are local or a revision of the hub. Data that a task's own Python fetches is not read: its
    code counts. All files of a user's own folder count.
    """
    found = {name: _generated(name) for name in config.tasks if name in MADE_TASKS}
    folder = config.task.include_path
    if len(found) == len(config.tasks) and folder is None:
        return found  # spares loading lm-eval
    from harness.data.tasks import digest_of, plan

    planned = plan(config)
    for name, leaf in planned.tasks.items():
        if leaf.config:
            found[name] = _leaf(leaf, digest_of(leaf.config), config.data)
        else:
            found[name] = _generated(name)
    for name, group in planned.groups.items():
        found[name] = digest_of(group.to_dict() or {})
    if folder is not None:
        files = filter(Path.is_file, Path(folder).rglob("*"))
        found["include_path"] = files_sha256(path for path in files if path.suffix != ".pyc")
    return found


def _generated(task: str) -> str:
    if task in RULER_TASKS:
        return ruler.digest(task)
    # A reasoning task reads nothing: code makes it, which is part of every run's identity.
    return text_sha256() if task in REASONING_TASKS else text_sha256(offline_text())


def _leaf(leaf: Leaf, digest: str, data: DataConfig) -> str:
    """The identity of a task with its data. digest: of its YAML."""
    task = leaf.config
    if rows.names_files(task):
        own = sorted(rows.own_files(task).items())
        return text_sha256(digest, *(files_sha256(paths) for _, paths in own))
    if leaf.makes_rows or data.name == "offline":
        return digest
    if data.name == "local":
        files = sorted(rows.find_files(str(data.root), leaf.task_name, task).items())
        return text_sha256(digest, *(f"{split} {files_sha256(paths)}" for split, paths in files))
    fetch = partial(rows.hub_rows, leaf.task_name, task)
    return text_sha256(digest, rows.revision(task, fetch))


# Code


def _code(config: RunConfig) -> str:
    """One digest of the sources of all runs, of this kind, and of the method and the codec."""
    own = [f"harness/{name}" for name in find(config.kind).code]
    files = {*_sources([*CORE, *own])}
    for part in filter(None, (config.method, config.own_codec)):
        files |= _imported(type(part).__module__)
    return _digest(files)


def code_digest() -> str:
    """One digest of all code of the project."""
    return _digest(_sources(["harness", METHODS]))


def own_file(module: str) -> Path | None:
    """The file of a user's own method or codec; None for a shipped one, or if it is not loaded."""
    if module.partition(".")[0] == METHODS:
        return None
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file else None


def _sources(names: Sequence[str]) -> Iterator[Path]:
    """The Python and YAML files of folders and modules of the project."""
    for name in names:
        path = PACKAGES_DIR / name
        if path.is_file():
            yield path
        yield from path.rglob("*.py")
        yield from path.rglob("*.yaml")


def _imported(module: str) -> set[Path]:
    """The files of a method's or codec's module: its own, of a user's in a package all of the
    outermost one, and what they import, also indirectly, from beside it and from `methods`."""
    shipped, own = PACKAGES_DIR / METHODS, own_file(module)
    file = own or PACKAGES_DIR.joinpath(*module.split(".")).with_suffix(".py")
    depth = module.count(".") + (file.stem == "__init__")
    todo = {file}
    if own and depth:
        todo = set(file.parents[depth - 1].rglob("*.py"))
    found: set[Path] = set()
    while todo:
        found |= todo
        text = "\n".join(path.read_text(encoding="utf-8") for path in todo)
        imported = set(WORDS.findall("\n".join(IMPORTS.findall(text))))
        todo = set()
        for path in (*file.parent.iterdir(), *shipped.iterdir()):
            if path.stem in imported:
                todo |= {path} if path.suffix == ".py" else {*path.rglob("*.py")}
        todo -= found
    return found


def _digest(files: Iterable[Path]) -> str:
    return text_sha256(*sorted(map(source_line, files)))


@cache
def source_line(file: Path) -> str:
    """A source file's name and sha256, as it was when this process first asked: a process goes on
    with the code that it has loaded."""
    return f"{file.name} {content_sha256(file)}"

"""The sha256 of every input of a run, code included: a change makes another run.

They are taken before a model loads. Files of the Hugging Face hub are identified by their revision.
Missing ones are downloaded first. The code is that of the method and of the harness. It is read,
not imported; comments, docstrings, layout and Python's version do not count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from importlib.util import resolve_name
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.data import aime, rows, ruler
from harness.data.text import WIKITEXT_HUB, calibration_text, corpus_text, offline_text
from harness.errors import UserError, reason
from harness.files import file_sha256, files_sha256, text_sha256
from harness.model import source
from harness.settings.config import (
    CalibrationConfig,
    CorpusConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
)
from harness.settings.kinds import find
from harness.settings.paths import PACKAGES_DIR
from harness.settings.task_config import AIME_TASKS, OFFLINE_TASKS, REASONING_TASKS, RULER_TASKS

if TYPE_CHECKING:
    from harness.data.task_plan import Leaf

CODE = "code:"
"""Prefix of the inputs that are code."""
CORE = ("data", "decode", "model", "replay", "settings")
"""Folders of `harness` that all kinds of run share."""
METHODS = "methods"


def common(config: RunConfig, *, weights: bool) -> dict[str, str]:
    """sha256 by name of what runs of every kind read: the code, the model and the method's file.

    weights: the run reads the model's weights.

    Raises:
        UserError: a file or folder is missing or cannot be read, or a model cannot be fetched.
    """
    found = code(type(config.method).__module__, find(config.kind).code)
    if config.own_codec is not None:
        found[f"{CODE}codec"] = _digest(_module_files(type(config.own_codec).__module__))
    found |= model(config.model, weights=weights)
    from methods.extras import ReadsFile  # loads torch

    if isinstance(config.method, ReadsFile) and config.method.file is not None:
        file = config.method.file
        try:
            found["method"] = files_sha256([Path(file)])
        except OSError as error:
            why = f"its file {file} cannot be read ({reason(error)})"
            raise UserError(f"method={config.method_name}: {why}") from error
    return found


def code_digest() -> str:
    """sha256 of all code of the project."""
    files = [*(PACKAGES_DIR / "harness").rglob("*.py"), *(PACKAGES_DIR / "methods").rglob("*.py")]
    return _digest(files)


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
        return {"corpus": rows.revision(*WIKITEXT_HUB, read)}
    return {"corpus": text_sha256(read())}


def tasks(config: RunConfig) -> dict[str, str]:
    """For each leaf task: lm-eval's version, the resolved YAML and the data; for a generated task
    its source text.

    Data are local or a revision of the hub. Data that a task's own Python fetches is not read: its
    code counts. All files of a user's own folder count.
    """
    found = {name: _generated(name) for name in config.tasks if name in OFFLINE_TASKS}
    folder = config.task.include_path
    if len(found) == len(config.tasks) and folder is None:
        return found  # spares loading lm-eval
    from harness.data.task_plan import digest_of, plan

    planned = plan(config)
    for name, leaf in planned.tasks.items():
        if leaf.config:
            found[name] = _leaf(leaf, digest_of(leaf.config), config.data)
        else:
            found[name] = _generated(name)
    for name, group in planned.groups.items():
        found[name] = digest_of(group.to_dict() or {})
    if folder is not None:
        found["include_path"] = _folder(Path(folder))
    return found


def _generated(task: str) -> str:
    if task in AIME_TASKS:
        return aime.digest(task)
    if task in RULER_TASKS:
        return ruler.digest(task)
    # A reasoning task reads nothing: code makes it, which is part of every run's identity.
    return text_sha256() if task in REASONING_TASKS else text_sha256(offline_text())


def _folder(folder: Path) -> str:
    """One digest of the names and contents of all files of a user's own folder."""
    lines = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            lines.append(f"{path.relative_to(folder)} {file_sha256(path)}")
    return text_sha256(*lines)


def _leaf(leaf: Leaf, digest: str, data: DataConfig) -> str:
    """The identity of a task with its data. digest: of its YAML."""
    task = leaf.config
    own = rows.own_files(task)
    if own:
        return text_sha256(digest, *(files_sha256(paths) for _, paths in sorted(own.items())))
    if leaf.makes_rows or data.name == "offline":
        return digest
    if data.name == "local":
        lines = [digest]
        files = rows.find_files(str(data.root), leaf.task_name, task)
        for split, paths in sorted(files.items()):
            lines.append(f"{split} {files_sha256(paths)}")
        return text_sha256(*lines)
    path, part = str(task.get("dataset_path")), task.get("dataset_name")
    fetch = partial(rows.hub_rows, leaf.task_name, task)
    has_options = bool(rows.hub_options(task))
    return text_sha256(digest, rows.revision(path, part, fetch, has_options=has_options))


# Code


def code(method_module: str, own: Sequence[str]) -> dict[str, str]:
    """Digests of the method's code and of the harness's.

    The method's is its module with all of `methods` that it imports, the harness's is the core with
    the codecs and `own`.

    own: folders and modules of `harness` that only one kind of run uses.
    """
    codecs = PACKAGES_DIR / METHODS / "codecs"
    harness = {*codecs.glob("*.py"), *codecs.glob("*.yaml")}
    for name in (*CORE, *own):
        path = PACKAGES_DIR / "harness" / name
        if path.is_file():
            harness.add(path)
        else:
            harness |= {*path.rglob("*.py"), *path.rglob("*.yaml")}
    return {
        f"{CODE}method": _digest(_module_files(method_module)),
        f"{CODE}harness": _digest(harness),
    }


def _digest(files: Iterable[Path]) -> str:
    return text_sha256(*(f"{file.name} {_read(file)[0]}" for file in sorted(files)))


def own_file(module: str) -> Path | None:
    """The file of a user's own method or codec; None for a shipped one, or if it is not loaded."""
    if _is_shipped(module):
        return None
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file else None


def _is_shipped(module: str) -> bool:
    return module.partition(".")[0] == METHODS


def _module_files(module: str) -> set[Path]:
    """The source of a method's or codec's module and of the modules that it imports, also
    indirectly: those of `methods`, and of a user's own those of its outermost package.

    Nothing for a user's own that is not loaded.
    """
    own = own_file(module)
    home = None
    if own is not None:
        depth = module.count(".") + (1 if own.stem == "__init__" else 0)
        home = own.parents[depth]
    found: dict[str, Path] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        folder = PACKAGES_DIR if _is_shipped(name) else home
        file = None
        if folder is not None and name not in found:
            file = _source_of(folder, name)
        if file is None:
            continue
        found[name] = file
        package = name if file.stem == "__init__" else name.rpartition(".")[0]
        for imported in _read(file)[1]:
            if package or imported[0] != ".":
                todo.append(resolve_name(imported, package))
    return set(found.values())


def _source_of(folder: Path, module: str) -> Path | None:
    path = folder.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def _read(file: Path) -> tuple[str, list[str]]:
    """Digest of the content, and names of the imported modules.

    What is taken from a module counts as one, since it may be.
    """
    stat = file.stat()
    return _read_version(file, stat.st_mtime_ns, stat.st_size)


@cache
def _read_version(file: Path, mtime_ns: int, size: int) -> tuple[str, list[str]]:
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return text_sha256(text), []
    tree = ast.parse(text)
    return text_sha256(_written(tree)), list(_imports(tree))


def _written(node: Any) -> str:
    """A tree without docstrings and without empty fields, as text.

    How many fields are empty depends on the version of Python.
    """
    if isinstance(node, list):
        return f"[{', '.join(_written(item) for item in node if not _is_docstring(item))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name in node._fields:
        value = getattr(node, name, None)
        if value not in (None, []):
            fields.append(f"({name!r}, {_written(value)})")
    return f"({type(node).__name__!r}, [{', '.join(fields)}])"


def _is_docstring(node: Any) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level
            if node.module:
                yield origin + node.module
                origin += f"{node.module}."
            for alias in node.names:
                yield origin + alias.name

"""The sha256 of every input of a run, code included, taken before a model loads: a change makes
another run.

Files of the Hugging Face hub are identified by their revision. Missing ones are downloaded first.
The code is that of the method and of the harness. It is read, not imported; comments, docstrings,
layout and Python's version do not count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from importlib.util import resolve_name
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.data import rows, ruler
from harness.data.text import WIKITEXT_HUB, calibration_text, corpus_text, offline_text
from harness.files import file_sha256, files_sha256, text_sha256
from harness.model import source
from harness.settings.config import (
    OFFLINE_TASKS,
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
CORE = ("data", "live", "model", "replay")
"""Folders of `harness` that all kinds of run share."""
METHODS = "methods"


def common(config: RunConfig, *, weights: bool) -> dict[str, str]:
    """sha256 by name of what runs of every kind read: the code, the model and the method's file.

    weights: the run reads the model's weights.

    Raises:
        UserError: a file or folder is missing or cannot be read, or a model cannot be fetched.
    """
    of_model = model(config.model, weights=weights)
    of_method = (
        {} if config.method.file is None else {"method": files_sha256([Path(config.method.file)])}
    )
    of_code = code(type(config.method).__module__, find(config.kind).code)
    if config.own_codec is not None:
        of_code[f"{CODE}codec"] = _digest(_module_files(type(config.own_codec).__module__))
    return of_code | of_model | of_method


def model(config: ModelConfig, *, weights: bool = True) -> dict[str, str]:
    """The files, the revision, or the package of a model; {} if its settings decide everything.
    weights: are read."""
    weights = weights and config.weights == "pretrained"
    if config.path is not None:
        return {"model": files_sha256(source.model_files(config, weights=weights))}
    if config.hub_id is not None and (weights or config.shape is None):
        found = source.located(config, weights=weights)
        return {"model": files_sha256([found]) if found.is_file() else found.name}
    return (
        {"model": source.PACKAGED_SHA256} if weights and config.name == source.PACKAGED_NAME else {}
    )


def calibration(config: CalibrationConfig) -> dict[str, str]:
    """The calibration text."""
    return {"calibration": text_sha256(calibration_text(config))}


def corpus(config: CorpusConfig, data: DataConfig) -> dict[str, str]:
    """The scored text."""
    read = partial(corpus_text, config, data)
    if config.path is None and config.name != "offline" and data.name == "hub":
        return {"corpus": rows.revision(*WIKITEXT_HUB, read)}
    return {"corpus": text_sha256(read())}


def tasks(config: RunConfig) -> dict[str, str]:
    """For each leaf task: lm-eval's version, the resolved YAML and the data, local or as a revision
    of the hub; for a generated task its source text.

    Data that a task's own Python fetches is not read: its code counts. All files of a user's own
    folder count.
    """

    def generated(name: str) -> str:
        return ruler.digest() if name in RULER_TASKS else text_sha256(offline_text())

    found = {name: generated(name) for name in config.tasks if name in OFFLINE_TASKS}
    folder = config.task.include_path
    if len(found) == len(config.tasks) and folder is None:
        return found  # spares loading lm-eval
    from harness.data.tasks import digest_of, plan

    planned = plan(config)
    for name, leaf in planned.tasks.items():
        found[name] = (
            _leaf(leaf, digest_of(leaf.config), config.data) if leaf.config else generated(name)
        )
    found |= {name: digest_of(group.to_dict() or {}) for name, group in planned.groups.items()}
    if folder is not None:
        own = sorted(
            path
            for path in Path(folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        )
        found["include_path"] = text_sha256(
            *(f"{path.relative_to(folder)} {file_sha256(path)}" for path in own)
        )
    return found


def _leaf(leaf: Leaf, digest: str, data: DataConfig) -> str:
    """The identity of a task with its data. digest: of its YAML."""
    if named := rows.own_files(leaf.config):
        return text_sha256(digest, *(files_sha256(paths) for _, paths in sorted(named.items())))
    if leaf.makes_rows or data.name == "offline":
        return digest
    if data.name == "local":
        files = rows.find_files(str(data.root), leaf.task_name, leaf.config)
        return text_sha256(
            digest, *(f"{split} {files_sha256(paths)}" for split, paths in sorted(files.items()))
        )
    path, part = str(leaf.config.get("dataset_path")), leaf.config.get("dataset_name")
    fetch = partial(rows.hub_rows, leaf.task_name, leaf.config)
    return text_sha256(
        digest, rows.revision(path, part, fetch, has_options=bool(rows.hub_options(leaf.config)))
    )


# Code


def code(method_module: str, own: Sequence[str]) -> dict[str, str]:
    """The method's module with all of `methods` that it imports, and the core with the codecs and
    `own`.

    own: folders and modules of `harness` that only one kind of run uses.
    """
    harness = {PACKAGES_DIR / METHODS / "codec.py"}
    for name in (*CORE, *own):
        path = PACKAGES_DIR / "harness" / name
        found = [path] if path.is_file() else path.rglob("*")
        harness |= {file for file in found if file.suffix in (".py", ".yaml")}
    files = {"method": _module_files(method_module), "harness": harness}
    return {f"{CODE}{name}": _digest(found) for name, found in files.items()}


def _digest(files: Iterable[Path]) -> str:
    return text_sha256(*(f"{file.name} {_read(file)[0]}" for file in sorted(files)))


def own_file(module: str) -> Path | None:
    """The file of a user's own method or codec; None for a shipped one, or if it is not loaded."""
    file = (
        None
        if module.partition(".")[0] == METHODS
        else getattr(sys.modules.get(module), "__file__", None)
    )
    return Path(file) if file else None


def _module_files(module: str) -> set[Path]:
    """The source of a method's or codec's module and of the modules of `methods` that it imports,
    directly or not.

    For a user's own also the imported modules of its outermost package; nothing if it is not
    loaded.
    """
    own = own_file(module)
    home = own.parents[module.count(".") + (own.stem == "__init__")] if own else None
    found: dict[str, Path] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        folder = PACKAGES_DIR if name.partition(".")[0] == METHODS else home
        if folder is None or name in found:
            continue
        path = folder.joinpath(*name.split("."))
        file = next(
            (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()),
            None,
        )
        if file is not None:
            found[name] = file
            package = name if file.stem == "__init__" else name.rpartition(".")[0]
            todo += [
                resolve_name(other, package)
                for other in _read(file)[1]
                if package or other[0] != "."
            ]
    return set(found.values())


def _read(file: Path) -> tuple[str, list[str]]:
    """Digest of the content, and names of the imported modules and of what is taken from them,
    maybe modules too."""
    stat = file.stat()
    return _read_version(file, stat.st_mtime_ns, stat.st_size)


@cache
def _read_version(file: Path, mtime_ns: int, size: int) -> tuple[str, list[str]]:
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return text_sha256(text), []
    tree = ast.parse(text)
    return text_sha256(repr(_plain(tree))), list(_imports(tree))


def _plain(node: Any) -> Any:
    """A tree without docstrings and without empty fields, whose number depends on the version of
    Python."""
    if isinstance(node, list):
        return [_plain(item) for item in node if not _is_docstring(item)]
    if not isinstance(node, ast.AST):
        return node
    values = [(name, getattr(node, name, None)) for name in node._fields]
    return (
        type(node).__name__,
        [(name, _plain(value)) for name, value in values if value not in (None, [])],
    )


def _is_docstring(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            names = [
                f"{origin}.{alias.name}" if node.module else f"{origin}{alias.name}"
                for alias in node.names
            ]
            yield from [origin, *names] if node.module else names

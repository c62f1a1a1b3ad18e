"""The digest of the code that decides a run's numbers: the sources of its method, and those of the harness.

The sources are read, not imported. Comments, docstrings, layout and the version of Python do not count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, NamedTuple

from harness.files import text_sha256

ROOT = Path(__file__).resolve().parents[2]
CORE = (
    "offload", "data", "replay.py", "setup.py", "sizes.py",
    "model/attach.py", "model/attention.py", "model/calibration.py", "model/decoder.py", "model/policies.py",
    "model/prompt.py",
)  # fmt: skip
"""Files and folders of `harness` that all kinds of run share."""
METHODS = "methods"
SUFFIXES = (".py", ".yaml")


def digests(method_module: str, own: Sequence[str]) -> dict[str, str]:
    """sha256 by name: of a method's module with all of `methods` that it imports, and of the core with `own`.

    own: folders and modules of `harness` that only one kind of run uses.
    """
    return {"code:method": _digest(method_files(method_module)), "code:harness": _digest(harness_files(own))}


def method_files(module: str) -> list[Path]:
    """The source of a method's module and of the modules of `methods` that it imports, directly or not.

    For a user's own method also the imported modules beside it; [] if it is not loaded.
    """
    home = _home(module)
    found: dict[str, Path] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        path = None if name in found else _source(name, home)
        if path is not None:
            found[name] = path
            package = name if path.stem == "__init__" else name.rpartition(".")[0]
            todo += [resolve_name(other, package) for other in _read(path).imports if package or other[0] != "."]
    return sorted(set(found.values()))


def own_file(module: str) -> Path | None:
    """The file of a user's own method; None for a shipped one, or if it is not loaded."""
    file = None if module.partition(".")[0] == METHODS else getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file else None


def _home(module: str) -> Path | None:
    """The folder of the outermost package of a user's own method."""
    file = own_file(module)
    return file.parents[module.count(".") + (file.stem == "__init__")] if file else None


def harness_files(own: Sequence[str]) -> list[Path]:
    """The sources of the core, the codecs and `own`."""
    files = {ROOT / METHODS / "codec.py"}
    for name in (*CORE, *own):
        path = ROOT / "harness" / name
        files |= {path} if path.is_file() else {file for file in path.rglob("*") if file.suffix in SUFFIXES}
    return sorted(files)


class _Code(NamedTuple):
    """The digest of a file's content. imports: names of modules, and of what is taken from them, maybe modules too."""

    digest: str
    imports: tuple[str, ...]


def _digest(files: Iterable[Path]) -> str:
    return text_sha256(*(f"{file.name} {_read(file).digest}" for file in files))


def _read(file: Path) -> _Code:
    stat = file.stat()
    return _read_version(file, stat.st_mtime_ns, stat.st_size)


@cache
def _read_version(file: Path, mtime_ns: int, size: int) -> _Code:
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return _Code(text_sha256(text), ())
    tree = ast.parse(text)
    return _Code(text_sha256(repr(_plain(tree))), tuple(_imports(tree)))


def _plain(node: Any) -> Any:
    """A tree without docstrings and without empty fields, whose number depends on the version of Python."""
    if isinstance(node, list):
        return [_plain(item) for item in node if not _is_docstring(item)]
    if not isinstance(node, ast.AST):
        return node
    values = [(name, getattr(node, name, None)) for name in node._fields]
    return (type(node).__name__, [(name, _plain(value)) for name, value in values if value not in (None, [])])


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            names = [f"{origin}.{alias.name}" if node.module else f"{origin}{alias.name}" for alias in node.names]
            yield from [origin, *names] if node.module else names


def _source(module: str, home: Path | None) -> Path | None:
    """The file of a module of `methods` or at `home`; None for any other."""
    folder = ROOT if module.partition(".")[0] == METHODS else home
    if folder is None:
        return None
    path = folder.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)

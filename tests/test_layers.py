"""Who may import whom, read from the sources; lazy imports count where a rule is about what may be used at all."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("run", "harness", "methods", "plots")


def modules_under(name: str) -> list[str]:
    """All modules of a package, or the module itself."""
    folder = ROOT.joinpath(*name.split("."))
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def source(module: str) -> Path | None:
    """The file of one of our modules, None for any other."""
    path = ROOT.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def imports(module: str, *, lazy: bool) -> set[str]:
    """Modules that `module` imports; inside functions only where `lazy`; never under TYPE_CHECKING."""
    file = source(module)
    assert file is not None, f"no module {module}"
    found = set()
    for node in walk(ast.parse(file.read_text()), lazy):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if source(name)} or {node.module}
    return found


def walk(node: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from walk(other, lazy)
            continue
        yield from walk(child, lazy)


def reachable(module: str, *, lazy: bool = False) -> set[str]:
    """All that an import of `module` imports, through modules of ours."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += imports(name, lazy=lazy) if source(name) else []
    return seen - {module}


def packages(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_the_reader_of_imports_sees_what_there_is():
    assert {"torch", "methods.base"} <= imports("methods.h2o", lazy=False)
    assert "harness.errors" in reachable("harness.tables.write")
    assert "torch" in packages(reachable("harness.replay.session"))
    text = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    import c\n"
    for lazy, expected in ((False, {"b"}), (True, {"b", "c"})):
        nodes = [node for node in walk(ast.parse(text), lazy) if isinstance(node, ast.Import)]
        assert {node.names[0].name for node in nodes} == expected


@pytest.mark.parametrize("module", modules_under("methods"))
def test_methods_import_torch_and_one_another_only(module):
    allowed = {"torch", "numpy", "methods", *sys.stdlib_module_names}
    assert packages(imports(module, lazy=True)) <= allowed


@pytest.mark.parametrize("module", modules_under("methods"))
def test_a_method_imports_no_other_method(module):
    """Base and count rule aside; int4 is the full cache, and the pool's limit a part of InfiniGen."""
    shared = {"methods.base", "methods.selection", "methods.full"}
    infinigen = {"methods.infinigen", "methods.pool"}
    others = {name for name in imports(module, lazy=True) if name.startswith("methods.")}
    assert others <= shared | (infinigen if module in infinigen else set())


@pytest.mark.parametrize("module", modules_under("plots"))
def test_plots_read_tables_only(module):
    ours = {name for name in imports(module, lazy=True) if packages({name}) <= set(OURS)}
    allowed = {"harness.errors", "harness.tables.columns"}
    assert all(name.startswith("plots") or name in allowed for name in ours), ours
    loaded = {name for name in reachable(module, lazy=True) if name.startswith("harness")}
    assert loaded <= allowed, "and these import nothing of ours"


@pytest.mark.parametrize("module", modules_under("harness"))
def test_the_harness_knows_neither_plots_nor_the_command(module):
    assert not packages(imports(module, lazy=False)) & {"plots", "run"}


MEASURING = [
    *modules_under("harness.offload"),
    "harness.replay.session",
    *(name for name in ("harness.offload.session", "harness.speed.cell") if source(name)),
]


@pytest.mark.parametrize("module", MEASURING)
def test_what_runs_methods_knows_no_command_line_and_no_tasks(module):
    assert not packages(reachable(module, lazy=True)) & {"hydra", "omegaconf", "lm_eval"}


@pytest.mark.parametrize("module", [*MEASURING, *modules_under("methods")])
def test_what_runs_methods_knows_no_metric(module):
    assert not {name for name in reachable(module, lazy=True) if name.startswith("harness.accuracy")}


LIGHT = (
    "harness.errors",
    "harness.settings.run",
    "harness.records.record",
    "harness.tables.write",
    *modules_under("plots"),
)


def test_light_modules_load_neither_torch_nor_a_model_library():
    """Settings are checked and tables made before what takes seconds to import; asked of the interpreter."""
    names = [name for name in LIGHT if name != "plots.__main__"]
    heavy = ("torch", "transformers", "lm_eval", "datasets")
    code = f"import sys, {', '.join(names)}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr

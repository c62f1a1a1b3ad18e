"""Who may import whom, read from the sources: lazy imports and those for type checking count like any other.

`LAYERS` is the floor plan, from the ground up; a module imports its own layer and what lies below it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from methods.codec import CODEC_NAMES

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


@cache
def imports(module: str, *, lazy: bool = True) -> set[str]:
    """Modules that `module` imports; inside functions and under TYPE_CHECKING only where `lazy`."""
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
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not lazy:
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
    assert {"torch", "methods.evicting"} <= imports("methods.h2o", lazy=False)
    assert "harness.errors" in reachable("harness.tables.write")
    assert "torch" in packages(reachable("harness.replay.replay"))
    text = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    import c\n"
    for lazy, expected in ((False, {"b"}), (True, {"a", "b", "c"})):
        nodes = [node for node in walk(ast.parse(text), lazy) if isinstance(node, ast.Import)]
        assert {node.names[0].name for node in nodes} == expected


LAYERS: tuple[tuple[str, ...], ...] = (
    ("methods", "harness.errors"),
    ("harness.files", "harness.sizes", "harness.settings"),
    ("harness.model", "harness.data"),
    ("harness.offload", "harness.records"),
    ("harness.replay", "harness.setup", "harness.tables", "harness.resources"),
    ("harness.accuracy", "harness.speed", "harness.contract", "harness.paper"),
    ("harness.model.families",),
    ("harness.experiments",),
    ("harness.launch",),
    ("run",),
)
"""From the ground up. `plots` stands beside. The room with the longest name counts: the command that tries all model
families runs them whole, and so stands above what it runs."""
OURS_ALL = [*modules_under("methods"), *modules_under("harness"), *modules_under("plots"), "run"]
FOLDERS = {"harness", "methods", "plots"}


def layer_of(module: str) -> int | None:
    """The floor of a module; None for `plots` and for the bare package `harness`."""
    found = [
        (len(room), floor)
        for floor, rooms in enumerate(LAYERS)
        for room in rooms
        if module == room or module.startswith(f"{room}.")
    ]
    return max(found)[1] if found else None


def test_every_room_has_a_floor():
    homeless = [name for name in OURS_ALL if layer_of(name) is None and name != "harness"]
    assert all(name.split(".")[0] == "plots" for name in homeless), homeless
    empty = [room for rooms in LAYERS for room in rooms if source(room) is None]
    assert not empty, f"no such room: {empty}"


@pytest.mark.parametrize("module", [name for name in OURS_ALL if layer_of(name) is not None])
def test_nothing_imports_upward(module):
    floor = layer_of(module)
    above = {name for name in imports(module) if packages({name}) <= set(OURS) and (layer_of(name) or 0) > floor}
    assert not above, f"{module} (floor {floor}) imports {above}"


def test_there_is_no_import_circle():
    """Tarjan would be faster; a few hundred modules need no more than this."""
    edges = {name: {other for other in imports(name) if source(other) and other != name} for name in OURS_ALL}
    while True:  # a module that imports nothing of what is left is on no circle
        leaves = {name for name, others in edges.items() if not others & edges.keys()}
        if not leaves:
            break
        edges = {name: others for name, others in edges.items() if name not in leaves}
    assert not edges, f"circles among {sorted(edges)}"


@pytest.mark.parametrize("module", modules_under("methods"))
def test_methods_import_torch_and_one_another_only(module):
    allowed = {"torch", "numpy", "methods", *sys.stdlib_module_names}
    allowed |= {"triton"} if module.startswith("methods.kernels.") else set()
    assert packages(imports(module)) <= allowed


BASES = {
    "base", "checks", "codec", "bit_planes", "hadamard", "selection", "evicting", "prompt_evicting",
    "received", "windowed", "retrieving", "projected", "balanced", "products", "kernels", "kernels.selection",
    "kernels.evicting",
}  # fmt: skip
"""What methods derive from and build on; any other file of methods/ is a method, or a folder-mate of one."""
PARTS = {"methods.infinigen": {"methods.pool"}}


@pytest.mark.parametrize("module", modules_under("methods"))
def test_a_method_imports_no_other_method(module):
    others = {name for name in imports(module) if name.startswith("methods.")} - PARTS.get(module, set())
    assert others <= {f"methods.{base}" for base in BASES}


@pytest.mark.parametrize("module", modules_under("plots"))
def test_plots_read_tables_only(module):
    ours = {name for name in imports(module) if packages({name}) <= set(OURS)}
    allowed = {"harness.errors", "harness.tables.columns"}
    assert all(name.startswith("plots") or name in allowed for name in ours), ours


@pytest.mark.parametrize("module", modules_under("harness"))
def test_the_harness_knows_neither_plots_nor_the_command(module):
    assert not packages(imports(module)) & {"plots", "run"}


NAMES = {path.stem for path in (ROOT / "conf" / "method").glob("*.yaml")} - {"full"}


@pytest.mark.parametrize("module", [name for name in modules_under("harness") if "costmodel" not in name])
def test_the_harness_names_no_method(module):
    """It asks a method what it is; systems, the check of families and the paper's own analyses are lists of methods."""
    if module in ("harness.settings.systems", "harness.model.families") or module.startswith("harness.paper"):
        return
    text = source(module).read_text()
    strings = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    assert not strings & (NAMES - set(CODEC_NAMES))


MEASURING = [*modules_under("harness.offload"), *modules_under("harness.replay"), "harness.speed.cell"]


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


def test_the_command_line_loads_no_library_of_numbers():
    """What `--help` and a refusal wait for; asked of the interpreter."""
    heavy = ("torch", "transformers", "lm_eval", "datasets", "numpy", "pandas", "jinja2")
    modules = "harness.launch.cli, harness.experiments.tasks, harness.data.ruler_rows, harness.data.rows"
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_light_modules_load_neither_torch_nor_a_model_library():
    """Settings are checked and tables made before what takes seconds to import; asked of the interpreter."""
    names = [name for name in LIGHT if name != "plots.__main__"]
    heavy = ("torch", "transformers", "lm_eval", "datasets")
    code = f"import sys, {', '.join(names)}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


SIZES = {"h2o": 120, "streaming": 70, "quest": 70, "snapkv": 70, "tova": 70, "infinigen": 200}
"""Lines at most."""


@pytest.mark.parametrize("name", SIZES)
def test_a_method_is_small(name):
    assert (ROOT / "methods" / f"{name}.py").read_text().count("\n") <= SIZES[name]

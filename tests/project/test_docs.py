"""The documents say what is so: every block of code in them is run or checked, every path and name in them exists."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import yaml
from lm_eval._cli import HarnessCLI

import harness
from docs import methods_page
from harness.results import lost
from harness.run.cli import main
from harness.run.compose import compose, load
from harness.run.sweep import is_sweep
from harness.run.words import command_of
from methods.base import Method, State, TokenCounts
from tests.tiny_models import tiny_model
from tests.tokens import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/PARITY.md", *sorted((ROOT / "docs").glob("*.md"))
]  # fmt: skip
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
MAKEFILE = (ROOT / "Makefile").read_text()


class Block(NamedTuple):
    """A fenced block of a document, in words of its fence."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def fenced(document: Path) -> list[Block]:
    text, name = document.read_text(), str(document.relative_to(ROOT))
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(name, text[: each.start()].count("\n") + 1, each[1], each[2]) for each in found]


def prose(document: Path) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def spans(document: Path) -> list[str]:
    """What stands in backticks, on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(document))]


BLOCKS = [block for document in DOCUMENTS for block in fenced(document)]
COMMANDS = sorted(
    {(name, span) for name, document in zip(NAMES, DOCUMENTS, strict=True) for span in spans(document)
     if re.match(r"(make|python) \S", span)}
)  # fmt: skip


# Commands


def check_shell(text: str) -> None:
    """Each command of a block of bash."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for is_word, group in itertools.groupby(words, lambda word: word != "&&"):
            if is_word:
                check_command(tuple(group))


@cache
def check_command(words: tuple[str, ...]) -> None:
    """One command."""
    while "=" in words[0] and words[0].partition("=")[0].isupper():  # an environment variable
        words = words[1:]
    match words:
        case [".", ".venv/bin/activate"]:
            pass
        case ["make", *arguments]:
            check_make(arguments)
        case ["python" | ".venv/bin/python", "run.py", *arguments]:
            check_run(arguments)
        case ["kv-harness", *arguments]:
            check_run(arguments)
        case ["python" | ".venv/bin/python", "-m", module, *arguments]:
            check_module(module, arguments)
        case _:
            pytest.fail(f"no rule for: {' '.join(words)}")


def check_make(arguments: list[str]) -> None:
    """Targets and variables that there are; what would run of it is checked as well."""
    targets = re.search(r"^\.PHONY: (help .*)$", MAKEFILE, re.MULTILINE)[1].split()
    for argument in arguments:
        variable, given, _ = argument.partition("=")
        if given:
            assert re.search(rf"^{variable} \?=", MAKEFILE, re.MULTILINE), f"make knows no variable {variable}"
        else:
            assert argument in targets, f"no target {argument}"
    python = [] if "PYTHON=" in " ".join(arguments) else [f"PYTHON={sys.executable}"]  # it is not looked for each time
    command = ["make", "--no-print-directory", "-n", "-C", str(ROOT), *arguments, *python]
    planned = subprocess.run(command, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ")
    for call in re.findall(r"bin/python ((?:run\.py|-m (?:harness|plots|benchmarks)).*?)(?: \|\||;|$)", planned, re.M):
        check_command(("python", *shlex.split(call)))


QUESTIONS = ROOT / "docs" / "tasks.md"


def own_questions() -> None:
    """Put the files of the recipe for questions of one's own into the current folder."""
    blocks = {
        block.language: block.text for block in reversed(fenced(QUESTIONS)) if block.language in ("jsonl", "yaml")
    }
    Path("my_questions").mkdir(exist_ok=True)
    Path("my_questions/questions.jsonl").write_text(blocks["jsonl"])
    Path("my_questions/my_questions.yaml").write_text(blocks["yaml"])


@cache
def own_file(name: str, base: str) -> str:
    """Path of a file with the first example in a document that derives from `base`."""
    path = Path(tempfile.mkdtemp()) / name
    path.write_text(next(block.text for block in BLOCKS if f"({base})" in block.text))
    return str(path)


def check_run(arguments: list[str]) -> None:
    """The settings of every run are accepted; of a sweep, those that hold for all of its runs, and its own.

    The runs are those of `tests/run/test_sweep.py`.
    """
    arguments = [word for word in arguments if word != "--help"]
    if arguments[:1] == ["lm-eval"]:
        check_lm_eval(arguments[1:])
        return
    if arguments[:1] == ["samples"]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lost, "_print", lambda asked: None)
            assert lost.main(arguments[1:]) == 0
        return
    if arguments[:1] == ["advise"]:
        arguments = ["experiment=advise", *arguments[1:]]
    placed = [re.sub(r"=DIR$", f"={ROOT}", word) for word in arguments]
    for name, base in (("my_method.py", "PromptEvicting"), ("my_codec.py", "RowCodec")):
        placed = [word.replace(f"./{name}", own_file(name, base)) if name in word else word for word in placed]
    if "include_path=my_questions" in placed:
        own_questions()
    accept(tuple(placed))


def check_lm_eval(arguments: list[str]) -> None:
    """lm-eval knows the options, and `kv` the settings."""
    namespace = HarnessCLI()._subparsers.choices["run"].parse_args(arguments)
    settings = dict(namespace.model_args)
    assert namespace.model == "kv" and settings.pop("pretrained")
    accept(tuple(f"{name}={value}" for name, value in settings.items()))


@cache
def accept(words: tuple[str, ...]) -> None:
    """Compose and check each run of a command line, or what a sweep is started with."""
    for given in command_of(words).jobs:
        if is_sweep(compose(given)):
            given = {name: value for name, value in given.items() if not name.startswith(("sweep", "experiment"))}
        load(given)


def check_module(module: str, arguments: list[str]) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"no module {module}"
    file = Path(spec.origin)
    source = (file.with_name("__main__.py") if file.stem == "__init__" else file).read_text()
    for argument in arguments:
        assert not argument.startswith("--") or f'"{argument}"' in source, f"{module} has no {argument}"


# Python and YAML


pytestmark = pytest.mark.usefixtures("one_model_of_the_contract")


@pytest.fixture(autouse=True)
def small_model(request, monkeypatch, tmp_path):
    """`harness.load` gives a tiny model and short texts, so that the Python examples run as they stand. It has four
    layers, and more where two dense ones are to be less than a small budget."""
    block = request.node.callspec.params.get("block") if hasattr(request.node, "callspec") else None
    num_layers = 24 if block and re.search(r"budget=0\.[12]", block.text) else 4
    shape = {"num_key_value_heads": 2, "num_hidden_layers": num_layers, "max_position_embeddings": 2048}
    small = partial(tiny_model, "llama", **shape)
    short = {"num_windows": 1, "seq_len": 256, "prefill_len": 128, "too_long": "truncate", "calibration.num_tokens": 64}
    settings = short | {"results_dir": str(tmp_path / "results"), "platform.link_gbps": 1}
    load = harness.load
    monkeypatch.setattr(harness, "load", lambda name: load(small(), byte_tokenizer(), **settings), raising=False)


def written(block: Block) -> str:
    """Writes a block with a method to a file named after it; returns `method=./FILE.py`."""
    name = re.search(r"class (\w+)", block.text)[1].lower()
    Path(f"{name}.py").write_text(block.text)
    return f"method=./{name}.py"


def check_python(block: Block) -> None:
    """Runs; a method or a codec in it is held to the contract as a user's own file. A method drops
    something, or says by which number its budget is searched."""
    if not re.search(r"^@dataclass\(frozen=True\)$", block.text, re.MULTILINE):
        exec(compile(block.text, str(block), "exec"), {"__name__": "example"})
        return
    choice = written(block)
    if "(RowCodec)" in block.text:
        assert main(["method=full", choice.replace("method=", "codec="), "experiment=contract"]) == 0
        return
    assert main([choice, "experiment=contract"]) == 0
    reads = load([choice]).method.tokens_read(TokenCounts(200, 200, 210), 3)
    if reads is None:  # the data decide it
        assert load([choice, "budget=0.5"]).budget_is_measured
    else:
        assert reads < 200


def check_yaml(block: Block) -> None:
    """Parses; a method's file names its class, and settings that it has."""
    node = yaml.safe_load(block.text)
    if "_target_" in node:
        module, _, cls = node.pop("_target_").rpartition(".")
        source = next(other for other in BLOCKS if other.language == "python" and f"class {cls}(" in other.text)
        method = load([written(source)]).method
        assert (type(method).__name__, f"methods.{node.pop('name')}") == (cls, module)
        assert asdict(method).items() >= node.items()


RULES: dict[str, Callable[[Block], Any]] = {
    "bash": lambda block: check_shell(block.text),
    "python": check_python,
    "yaml": check_yaml,
    "mermaid": lambda block: None,
    "jsonl": lambda block: None,  # the recipe for own questions reads it
}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_true(block, own_folder):
    assert block.language in RULES, f"{block}: no rule for a block of {block.language or 'no language'}"
    RULES[block.language](block)


def test_the_tour_runs(own_folder, monkeypatch):
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    notebook = json.loads((ROOT / "docs" / "tour.ipynb").read_text())
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "tour"}
    for source in sources:
        short = source.replace("prefill_len=960,", "")  # longer than the windows here
        exec(compile(short, "tour.ipynb", "exec"), names)
    assert list(names["compared"].label) == ["H2O", "InfiniGen2", "Oracle"]  # Quest cannot be so small on 256 tokens
    assert 0 < names["cached"].usage.budget < 1 and list(names["frame"].label)[0] == "Long values"


def test_the_recipe_for_own_questions_runs(own_folder):
    own_questions()
    model = harness.load("smollm2-135m")
    frame = model.tasks(
        ["my_questions"], methods=["full", "streaming"], include_path="my_questions", prefill="question"
    )
    assert list(frame.label) == ["Full cache", "Streaming"] and set(frame.acc) <= {0, 0.5, 1}
    assert "acc_difference" in frame.columns and frame["budget"][1] < 1


@pytest.mark.parametrize(("document", "command"), COMMANDS)
def test_a_command_in_a_sentence_is_true(document, command):
    check_shell(command)


# Paths and names

FOLDERS = ("benchmarks", "conf", "docs", "harness", "methods", "plots", "results", "tables", "figures", "tests")
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./<>*-]*|[\w.-]+/?\.(?:py|md|yaml|toml|lock|html)|Makefile")
MADE_BY_RUNS = re.compile(
    r"results/(jobs|runs)|(results/)?(report\.html|board\.md)|"
    r"((tables|figures)/)?"
    r"(index|long|long_decode|board(-\w+)?|attention_error)\."
)


def exists(path: str) -> bool:
    """In the project, or in `results/`; <name> and * stand for any."""
    pattern = re.sub(r"<\w+>", "*", path).rstrip("/")
    return any(any(folder.glob(pattern)) for folder in (ROOT, ROOT / "results"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_paths_exist(document):
    paths = {span for span in spans(document) if PATH.fullmatch(span)}
    paths |= {word for span in spans(document) for word in span.split() if word.startswith("conf/")}
    assert [path for path in sorted(paths) if not MADE_BY_RUNS.match(path) and not exists(path)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(document):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if target.startswith("https://"):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def anchors(file: Path) -> set[str]:
    """The headings as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", prose(file), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_page_of_methods_is_made_of_their_docstrings():
    assert methods_page.render() == methods_page.PAGE.read_text()


def test_contributing_names_every_hook():
    named = set(re.findall(r"`(\w+)`", (ROOT / "CONTRIBUTING.md").read_text()))
    for owner in (Method, State):
        hooks = {name for name in {*vars(owner), *owner.__annotations__} if not name.startswith("_")}
        assert hooks - named == set()


# Numbers


def cells(text: str) -> list[list[str]]:
    """The cells of the first table that the text begins, without the line below its header."""
    lines = itertools.takewhile(lambda line: line.startswith("|"), text.splitlines())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return rows[:1] + rows[2:]


def test_the_readmes_table_is_that_of_the_board():
    confirmed = ROOT / "results" / "confirm"
    readme = (ROOT / "README.md").read_text()
    _, *lines = cells(readme[readme.index("| label | read on device") :])
    assert len(lines) > 5
    rows = pd.read_csv(confirmed / "tables" / "board-methods.csv")
    rows = rows[
        (rows.over == "all models") & (rows.seq_len == 1024) & (rows.asked_budget.isna() | (rows.asked_budget == 0.1))
    ].set_index("label")
    for label, *numbers_shown in lines:
        row = rows.loc[label]
        coded = rows.loc[f"{label} + int8"] if f"{label} + int8" in rows.index else None
        expected = [
            [100 * row.device_frac_low, 100 * row.device_frac_high],
            [100 * row.resident_frac_low, 100 * row.resident_frac_high],
            [row.ratio, row.ratio_low, row.ratio_high],
            [] if coded is None else [coded.ratio, coded.ratio_low, coded.ratio_high],
        ]
        for cell, numbers in zip(numbers_shown, expected, strict=True):
            for number_shown, number in zip(re.findall(r"[-+]?[\d.]+", cell), numbers, strict=False):
                digits = len(number_shown.partition(".")[2])
                assert float(number_shown) == pytest.approx(number, abs=0.51 * 10**-digits), (label, cell)

"""A method of the user's own, in a file or a package outside this project: chosen, refused, recorded, checked."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from harness.results import record as records
from harness.run.cli import main
from harness.run.compose import load
from harness.run.runner import Run
from tests.conftest import forget, refused
from tests.runs import own_file

HEAD = """from dataclasses import dataclass, field
from methods.base import Method
from methods.streaming import Streaming
"""
MINE = """
@dataclass(frozen=True)
class Mine(Streaming):
    budget: float = 0.5
    sizes: tuple[int, ...] = (1, 2)
"""
OTHER = MINE.replace("Mine", "Other")


pytestmark = pytest.mark.usefixtures("own_folder")


def write(text: str = MINE, name: str = "mine.py") -> Path:
    return own_file(HEAD + text, name)


# Chosen


@pytest.mark.parametrize(
    ("choice", "name"),
    [("./mine.py", "mine"), ("{here}/mine.py", "mine"), ("./mine.py:Mine", "mine.Mine"), ("mine.Mine", "mine.Mine"),
     ("package.inner.Mine", "package.inner.Mine"), ("package/inner.py", "inner")],
)  # fmt: skip
def test_a_file_or_a_class_is_chosen_like_any_method(choice, name, own_folder):
    write()
    write(name="package/inner.py")
    config = load([f"method={choice.format(here=own_folder)}", "method.num_sinks=2"])
    assert config.method_name == config.label == name
    assert (type(config.method).__name__, config.method.budget, config.method.num_sinks) == ("Mine", 0.5, 2)
    assert config.method.sizes == (1, 2)


@pytest.mark.parametrize("folder", ["a:b", "a.py:b", "a b", "${seed}"])
def test_a_folder_of_any_name(folder, runs, own_folder):
    path = write(name=f"{folder}/mine.py")
    assert main([f"method='./{folder}/mine.py'", "method.num_sinks=2"]) == 0
    (config,) = runs.configs
    assert config.method_name == "mine" and config.method.num_sinks == 2
    assert type(load({"method": f"{path}:Mine"}).method) is type(config.method)


def test_it_is_one_of_a_sweep(runs, capsys):
    write()
    assert main(["-m", "method=h2o,./mine.py", "seq_len=300"]) == 0
    assert [config.method_name for config in runs.configs] == ["h2o", "mine"]
    assert "mine" in capsys.readouterr().out.splitlines()[-2], "above the line of where the results are"
    assert main(["--cfg", "job", "method=./mine.py"]) == 0
    assert "budget: 0.5" in capsys.readouterr().out


# Refused

REFUSED = [
    ("./none.py", None, "there is no file none.py"),
    ("./mine.py", "\nclass Mine(:\n", "{here}/mine.py:5: SyntaxError: invalid syntax"),
    ("./mine.py", "", "no class in it derives from methods.base.Method"),
    ("./mine.py", MINE + OTHER, "defines Mine, Other; choose one, as method=./mine.py:Mine"),
    ("./mine.py:Mime", MINE + OTHER, "did you mean 'Mine'? allowed: Mine, Other"),
    ("nowhere.Mine", MINE, "ModuleNotFoundError: No module named 'nowhere'"),
    ("./mine.py", "\nclass Mine(Streaming):\n    budget: float = 0.5\n", "Mine must be a @dataclass(frozen=True)"),
    ("./mine.py", MINE + "    late: int = field(kw_only=True)\n", "setting method.late is missing"),
    ("./h2o.py", MINE, "h2o is a method of conf/method; rename the file"),
    ("./my-own.py", MINE, "the file's name must be a Python name"),
]  # fmt: skip


@pytest.mark.parametrize(("choice", "text", "expected"), REFUSED)
def test_what_is_wrong_with_a_file_is_one_line(choice, text, expected, own_folder, capsys):
    if text is not None:
        write(text, choice if choice.endswith(".py") else "mine.py")
    assert main([f"method={choice}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and expected.format(here=own_folder) in line


def test_a_file_is_run_only_where_method_names_it(capsys):
    path = write("\nraise SystemError\n")
    assert main(["method=h2o", f"method._target_={path}:Mine"]) == 2
    assert "unknown setting method._target_" in capsys.readouterr().err
    assert "mine" not in sys.modules


# Identity


def run_id(choice: str = "./mine.py") -> str:
    """Of a run by a process that starts now."""
    forget(Path.cwd(), list(sys.modules))
    return Run.of(load([f"method={choice}"])).path.parent.name


def test_an_edited_file_is_another_run_and_its_place_is_not(own_folder):
    path, first = write(), run_id()
    write(MINE + "    more = 1\n")
    assert Run.of(load(["method=./mine.py"])).path.parent.name == first, "a process goes on with the code it has loaded"
    edited = run_id()
    assert edited != first and records.settings_of(edited) == records.settings_of(first)
    elsewhere = own_folder / "elsewhere"
    elsewhere.mkdir()
    shutil.move(path, elsewhere)
    assert run_id("elsewhere/mine.py") == edited


@pytest.mark.parametrize(
    ("choice", "text", "other"),
    [("./mine.py", "def late():\n    from beside import VALUE\n", "beside.py"),
     ("./mine.py", "import folder.beside\n", "folder/beside.py"),
     ("package.mine.Mine", "from . import beside\n", "package/beside.py"),
     ("package.mine.Mine", "", "package/inner/data.py")],
)  # fmt: skip
def test_what_lies_beside_the_file_and_is_imported_counts_and_all_of_its_package(choice, text, other):
    write(text + MINE, "package/mine.py" if choice.startswith("package") else "mine.py")
    beside, unused = write("VALUE = 1\n", other), write("VALUE = 1\n", "unused.py")
    first = run_id(choice)
    unused.write_text("VALUE = 22\n")
    assert run_id(choice) == first
    beside.write_text("VALUE = 22\n")
    assert run_id(choice) != first


def test_the_file_that_a_method_names_counts():
    file = "    file = str(Path(__file__).with_name('gates.tsv'))\n"
    write("from pathlib import Path\n" + MINE + file)
    data = write("0.1\t0.9\n", "gates.tsv")
    first = run_id()
    assert run_id() == first
    data.write_text("0.2\t0.8\n")
    assert run_id() != first
    data.unlink()
    with refused(rf"method=mine: its file {data} cannot be read \(.*No such file"):
        run_id()


# The contract

RETRIEVING = """
import torch
from methods.base import Selection, State as Base

class State(Base):
    sequence_tensors = ("count", "norms")

    def prompt(self, layer, query, key, value, rows):
        self.count[layer] = torch.zeros(len(key), dtype=torch.long)
        self.norms[layer] = key.norm(dim=-1)

    def append(self, layer, key, value, positions, slots):
        self.norms[layer] = torch.cat([self.norms[layer], key.norm(dim=-1)], 2)

    def select(self, layer, rows):
        {body}
        return Selection(mask, mask.sum(-1).double().mean(1))

@dataclass(frozen=True)
class Mine(Method):
    when = "own_query"

    state = State
    def tokens_read(self, row, layer): return None
"""
MISTAKES = {
    "an error": ("1 / 0", r"ZeroDivisionError: division by zero \({here}/mine.py:19\)"),
    "no budget": (
        "return Selection(rows.visible().expand(-1, 2, -1, -1), rows.positions * float('nan'))",
        "budget is nan: num_read ",
    ),
    "counts padding behind the rows, so that it depends on the batch": (
        "count = self.count[layer][:, None] + torch.arange(rows.positions.shape[1])\n"
        "        self.count[layer] = count[:, -1] + 1\n"
        "        least = (count % 4)[:, None, :, None] * 20\n"
        "        mask = rows.visible() & (rows.slot_positions.unsqueeze(2) >= least)",
        "a padded sequence is itself alone: in replay.*, the sequence with a prompt of .* logits differ by ",
    ),
    "goes on from the first row of the block": (
        "count = self.count[layer][:, None] + torch.arange(rows.positions.shape[1])\n"
        "        self.count[layer] = count[:, 0] + 1\n"
        "        mask = rows.visible() & (rows.slot_positions.unsqueeze(2) >= (count % 5)[:, None, :, None] * 20)",
        "live decoding is replay: what a row reads depends on .*or does not carry its state from block to block: "
        "replay in blocks of 3 rows: logits differ by .*, first in row 4$",
    ),
    "looks at later tokens": (
        "norms = self.norms[layer][:, :, None, : rows.slot_positions.shape[-1]]\n"
        "        mask = rows.visible() & (norms >= norms.mean(-1, keepdim=True))",
        "what a row reads depends on the rows behind it: select uses tokens later than its row",
    ),
    "keeps what it does not declare": (
        "return Selection(rows.visible(), rows.positions)\n\n"
        "    def prompt(self, layer, query, key, value, rows):\n"
        "        self.keys = [key]\n\n"
        "    def unused(self, mask):",
        r"method Mine: {here}/mine.py:21: after prompt, `keys` holds \[2, 2, 200, 16\]; name it in slot_tensors",
    ),
    "shares its state with a fork": (
        "mask = rows.visible()\n"
        "        return Selection(mask, mask.sum(-1).double().mean(1))\n\n"
        "    def fork(self, index, num_slots):\n"
        "        return self\n\n"
        "    def unused(self, mask):",
        "a fork is fresh",
    ),
}


CAUSES = (
    "an error", "goes on from the first row of the block", "looks at later tokens", "keeps what it does not declare",
    "shares its state with a fork",
)  # fmt: skip
"""Mistakes whose cause one line names, without a line for each other check."""


def failed(capsys) -> tuple[list[str], str]:
    """Lines of the checks of `experiment=contract` that failed, and its error."""
    assert main(["method=./mine.py", "experiment=contract"]) == 2
    printed = capsys.readouterr()
    return [line for line in printed.out.splitlines() if line.startswith("FAILED")], printed.err


@pytest.mark.usefixtures("one_model_of_the_contract")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, own_folder, capsys):
    body, expected = MISTAKES[mistake]
    write(RETRIEVING.replace("{body}", body))
    lines, error = failed(capsys)
    names_cause = error == "error: method=mine: the line above says why; no other check was made\n"
    assert names_cause == (len(lines) == 1) and names_cause == (mistake in CAUSES)
    assert any(re.search(expected.replace("{here}", re.escape(str(own_folder))), line) for line in lines), lines


@pytest.mark.usefixtures("one_model_of_the_contract")
def test_a_method_that_misstates_its_budget_fails_that_check_alone(capsys):
    write(MINE + "    def tokens_read(self, row, layer): return super().tokens_read(row, layer) - 1\n")
    lines, error = failed(capsys)
    assert error == "error: method=mine: 2 of 14 checks failed\n"
    assert all(re.search("the budget is its closed form: budget is .*; by tokens_read it is ", line) for line in lines)

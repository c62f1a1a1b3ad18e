"""A method of the user's own, in a file or a package outside this project: chosen, refused, recorded, checked."""

import json
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
from tokens import byte_tokenizer

from harness import contract as checks
from harness.errors import UserError
from harness.launch import new_method
from harness.launch.cli import main
from harness.launch.runner import Run
from harness.model import load as models
from harness.model.load import LoadedModel
from harness.model.tiny import tiny_model
from harness.records import record as records
from tests.composed import load
from tests.runs import stand_in

HEAD = """from dataclasses import dataclass, field
from methods.base import Method
from methods.streaming import Streaming
"""
MINE = """
@dataclass(frozen=True)
class Mine(Streaming):
    kept_frac: float = 0.5
    sizes: tuple[int, ...] = (1, 2)
"""
OTHER = MINE.replace("Mine", "Other")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path) -> Path:
    """The user's current folder, empty; what was imported from it is forgotten in the end."""
    modules, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    forget(set(sys.modules) - modules)


def forget(names) -> None:
    for name in names:
        if (getattr(sys.modules.get(name), "__file__", None) or "").startswith(str(Path.cwd())):
            del sys.modules[name]


def write(text: str = MINE, name: str = "mine.py") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + text)
    return path.resolve()


# Chosen


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ("./mine.py", "mine"),
        ("mine.py", "mine"),
        ("{here}/mine.py", "mine"),
        ("../{folder}/mine.py", "mine"),
        ("./mine.py:Mine", "mine.Mine"),
        ("mine.Mine", "mine.Mine"),
        ("package.inner.Mine", "package.inner.Mine"),
        ("package.inner:Mine", "package.inner.Mine"),
        ("package/inner.py", "inner"),
    ],
)
def test_a_file_or_a_class_is_chosen_like_any_method(choice, name, folder):
    write()
    write(name="package/inner.py")
    config = load([f"method={choice.format(here=folder, folder=folder.name)}", "method.num_sinks=2"])
    assert config.method_name == config.label == name
    assert (type(config.method).__name__, config.method.kept_frac, config.method.num_sinks) == ("Mine", 0.5, 2)
    assert config.method.sizes == (1, 2)


def test_a_title_a_codec_and_a_system_go_with_it():
    write(MINE + '    title = "My own"\n')
    assert load(["method=./mine.py", "codec=int4"]).label == "My own + int4"
    assert load(["method=./mine.py", "experiment=latency"]).label == "mine"
    with pytest.raises(UserError, match="^method=mine: label=offload stands for method=full"):
        load(["method=./mine.py", "experiment=latency", "label=offload"])


def test_it_is_one_of_a_sweep(monkeypatch, capsys):
    runs = stand_in(monkeypatch)
    write()
    assert main(["-m", "method=h2o,./mine.py", "seq_len=300"]) == 0
    assert [config.method_name for config in runs.configs] == ["h2o", "mine"]
    assert "mine" in capsys.readouterr().out.splitlines()[-1]
    assert main(["--cfg", "job", "method=./mine.py"]) == 0
    assert "kept_frac: 0.5" in capsys.readouterr().out


# Refused

REFUSED = {
    "./none.py": ("", "there is no file none.py"),
    "./mine.py": ("\nclass Mine(:\n", "{here}/mine.py:5: SyntaxError: invalid syntax"),
    "mine.py": ("\nimport nothing_of_this_name\n", "{here}/mine.py:5: ModuleNotFoundError: No module named"),
    "././mine.py": ("\n1 / 0\n", "{here}/mine.py:5: ZeroDivisionError: division by zero"),
    "./mine.py ": ("", "no class in it derives from methods.base.Method"),
    "./mine.py  ": (MINE + OTHER, "defines Mine, Other; choose one, as method=./mine.py:Mine"),
    "./mine.py:Mime": (MINE + OTHER, "did you mean 'Mine'? allowed: Mine, Other"),
    "mine.Method": (MINE, "allowed: Mine"),
    "nowhere.Mine": (MINE, "ModuleNotFoundError: No module named 'nowhere'"),
    "./mine.py   ": (
        "\nclass Mine(Streaming):\n    kept_frac: float = 0.5\n",
        "Mine must be a @dataclass(frozen=True)",
    ),
    "./mine.py    ": ("\n@dataclass(frozen=True)\nclass Mine(Method):\n    a: int = 1\n", "Mine lacks state"),
    "./mine.py     ": (
        "\n@dataclass(frozen=True)\nclass Mine(Method):\n    def new_state(self, *_): ...\n",
        "Mine lacks tokens_read; methods/base.py says what it is",
    ),
    "./mine.py      ": (MINE + "    late: int = field(kw_only=True)\n", "Mine.late needs a default"),
    "./mine.py       ": (MINE + "    odd: object = HEAD\n".replace("HEAD", "dataclass"), "a setting's default is no"),
}


@pytest.mark.parametrize("choice", REFUSED)
def test_what_is_wrong_with_a_file_is_one_line(choice, folder, capsys):
    text, expected = REFUSED[choice]
    write(text)
    assert main([f"method={choice.strip()}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: method={choice.strip()}: {expected.format(here=folder)}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h2o.py", "h2o is a method of conf/method; rename the file"),
        ("my-own.py", "the file's name must be a Python name"),
        ("torch.py", "torch is a module of "),
        ("sys.py", "sys is a module of Python itself already; rename the file"),
    ],
)
def test_a_name_that_is_taken_is_refused(name, expected):
    write(name=name)
    with pytest.raises(UserError, match=re.escape(expected)):
        load([f"method=./{name}"])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("method.kept_fra=1", "unknown setting method.kept_fra: did you mean 'kept_frac'?"),
        ("+method.kept_fra=1", "unknown setting method.kept_fra: did you mean 'kept_frac'?"),
        ("method.kept_frac=2", "method.kept_frac=2.0: must be in (0, 1]"),
        ("method.kept_frac=much", "method.kept_frac=much: must be a number"),
        ("method.name=full", "method._target_="),
        ("method.name=better", "method.name=better: allowed: adakv"),
        ("method._target_=methods.h2o.H2O", "method.name=mine: "),
    ],
)
def test_a_wrong_setting_is_refused_by_name(override, expected, capsys):
    write()
    assert main(["method=./mine.py", override]) == 2
    assert capsys.readouterr().err.startswith(f"error: {expected}")


def test_a_file_is_run_only_where_method_names_it(capsys):
    path = write("\nraise SystemError\n")
    assert main(["method=h2o", f"method._target_={path}:Mine"]) == 2
    assert f"method._target_={path}:Mine: method=h2o has methods.h2o.H2O" in capsys.readouterr().err
    assert "mine" not in sys.modules


@pytest.mark.parametrize("annotation", ["'Unknown'", "type(print)"])
def test_a_type_that_no_setting_can_have_is_named(annotation):
    write(f"{MINE}    odd: {annotation} = 3\n")
    with pytest.raises(UserError, match="^Mine: a type is none that a setting can have "):
        load(["method=./mine.py"])


# Identity


def run_id(choice: str = "./mine.py") -> str:
    """Of a run by a process that starts now."""
    forget(list(sys.modules))
    return Run.of(load([f"method={choice}"])).path.parent.name


def test_an_edited_file_is_another_run_and_its_place_is_not(folder):
    path, first = write(), run_id()
    write(MINE + "# a comment\n")
    assert run_id() == first
    write(MINE + "    more = 1\n")
    edited = run_id()
    assert edited != first and records.settings_of(edited) == records.settings_of(first)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    shutil.move(path, elsewhere)
    assert run_id("elsewhere/mine.py") == edited


def test_two_classes_of_a_file_are_two_methods():
    write(MINE + OTHER)
    assert run_id("./mine.py:Mine") != run_id("./mine.py:Other")


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("./mine.py", "import beside\n"),
        ("./mine.py", "def late():\n    from beside import VALUE\n"),
        ("package.mine.Mine", "from . import beside\n"),
        ("package.mine.Mine", "from .beside import VALUE\n"),
        ("package.mine.Mine", "from package import beside\n"),
        ("package.mine.Mine", "from package.beside import VALUE\n"),
    ],
)
def test_what_lies_beside_the_file_and_is_imported_counts(choice, text):
    place = "package/" if choice.startswith("package") else ""
    write(text + MINE, f"{place}mine.py")
    beside = write("VALUE = 1\n", f"{place}beside.py")
    unused = write("VALUE = 1\n", f"{place}unused.py")
    first = run_id(choice)
    unused.write_text("VALUE = 22\n")
    assert run_id(choice) == first
    beside.write_text("VALUE = 22\n")
    assert run_id(choice) != first


# The skeleton, and the contract


@pytest.fixture
def text(monkeypatch, folder) -> str:
    """Random letters to read; a tiny model in place of any other, and no cache outside the test's folder."""
    model = tiny_model("llama", num_key_value_heads=2, max_position_embeddings=2048)
    loaded = LoadedModel(model, byte_tokenizer(), "tiny", 2048, "f" * 64)
    monkeypatch.setenv("KV_HARNESS_CACHE", str(folder / "cache"))
    monkeypatch.setattr(models, "load_model", lambda config: loaded)
    file = folder / "text.txt"
    file.write_text("".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz \n", k=1000)))
    return str(file)


def test_a_new_method_works_as_it_is(text, capsys):
    assert new_method.main(["page_means"]) == 0
    commands = re.findall(r"python run.py (\S+) (\S+)", capsys.readouterr().out)
    assert [kind for _, kind in commands] == ["experiment=contract", "experiment=perplexity", "experiment=latency"]
    files = [f"corpus.path={text}", f"calibration.path={text}", "calibration.num_tokens=80", "method.num_channels=4"]
    small = ["seq_len=400", "prefill_len=150", "num_windows=2", "platform.link_gbps=1"]
    shape = ["batch_size=2", "prompt_len=24", "gen_len=8", "warmup_steps=1", "timed_steps=2"]
    for command in commands:
        assert main([*command, *files, *small, *shape]) == 0
        assert "FAILED" not in capsys.readouterr().out
    found = [json.loads(path.read_text()) for path in sorted(Path("results/runs").rglob("record.json"))]
    assert [(record["experiment"], record["config"]["label"]) for record in found] == [
        ("latency", "page_means"),
        ("perplexity", "Page means"),
    ]
    for record in found:
        assert record["method_file"] == str(Path("page_means.py").resolve())
        assert record["config"]["method"]["num_channels"] == 4
    assert main(["method=./page_means.py", "experiment=generate", "max_new_tokens=3", "platform.link_gbps=1"]) == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a-b", "NAME=a-b: must be a Python name such as my_method"),
        ("class", "NAME=class: must be a Python name"),
        ("h2o", "NAME=h2o: is the name of a method or a module already"),
        ("torch", "NAME=torch: is the name of a method or a module already"),
        ("nowhere/mine", "nowhere/mine.py: No such file or directory"),
        ("./mine", "mine.py: File exists"),
    ],
)
def test_a_name_for_a_new_method_is_refused(name, expected, capsys):
    path = write()
    assert new_method.main([name]) == 2
    assert capsys.readouterr().err.startswith(f"error: {expected}")
    assert path.read_text() == HEAD + MINE and list(Path().iterdir()) == [Path("mine.py")]


def checked(capsys, *overrides: str) -> tuple[int, list[str], str]:
    """Exit code, lines of the checks that failed, and the error of `experiment=contract`."""
    code = main(["method=./mine.py", "experiment=contract", *overrides])
    printed = capsys.readouterr()
    return code, [line for line in printed.out.splitlines() if line.startswith("FAILED")], printed.err


def test_a_method_that_misstates_its_size_fails_that_check_alone(capsys):
    write(MINE + "    def tokens_read(self, row, layer): return super().tokens_read(row, layer) - 1\n")
    code, failed, error = checked(capsys)
    assert code == 2 and error == "error: method=mine: 6 of 36 checks failed\n"
    assert all(re.search("the size is its closed form: size is .*; by tokens_read it is ", line) for line in failed)


BREAKS = {
    "selection = super().select(layer, rows)\n        1 / 0": "{here}/mine.py:8: select raised ZeroDivisionError",
    "return None": "{here}/mine.py:6: select returned NoneType; allowed: a Selection (methods/base.py)",
    "return super().select(layer, rows)._replace(num_read=rows.positions * float('nan'))": "size is nan: num_read ",
    "return super().select(layer, rows)._replace(num_read=rows.positions.double())": "num_read is ",
    "selection = super().select(layer, rows)\n"
    "        return selection._replace(mask=selection.mask & (rows.positions.shape[1] == 1))": "logits differ by ",
}


@pytest.mark.parametrize("body", BREAKS)
def test_a_broken_selection_fails(body, folder, capsys):
    write(
        "from methods.streaming import StreamingState\n"
        f"class State(StreamingState):\n    def select(self, layer, rows):\n        {body}\n"
        f"{MINE}    def new_state(self, geometry, lengths, calibration=None): return State(self, geometry, lengths)\n"
    )
    code, failed, _ = checked(capsys)
    assert code == 2 and any(BREAKS[body].format(here=folder) in line for line in failed)


EVICTING = """
import torch
from methods.prompt_evicting import PromptEvicting, PromptEvictingState

class State(PromptEvictingState):
    def prompt_worth(self, layer, query, key, value, rows):
        {body}

@dataclass(frozen=True)
class Mine(PromptEvicting):
    kept_frac: float = 0.5
    state = State
"""
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

    def new_state(self, geometry, lengths, calibration=None): return State(self, geometry, lengths)
    def tokens_read(self, row, layer): return None
"""
DEPENDS_ON_THE_BATCH = {
    "counts slots": EVICTING.replace("{body}", "return (torch.arange(key.shape[2]) % 7.0).expand(key.shape[:3])"),
    "smooths over padding": EVICTING.replace(
        "{body}", "return torch.nn.functional.avg_pool1d(key.norm(dim=-1), 9, stride=1, padding=4)"
    ),
    "budget of the longest prompt": RETRIEVING.replace(
        "{body}", "mask = rows.visible() & (rows.slot_positions < self.lengths.prompt.max() // 4).unsqueeze(2)"
    ),
    "counts padding behind the rows": RETRIEVING.replace(
        "{body}",
        "count = self.count[layer][:, None] + torch.arange(rows.positions.shape[1])\n"
        "        self.count[layer] = count[:, -1] + 1\n"
        "        least = (count % 4)[:, None, :, None] * 20\n"
        "        mask = rows.visible() & (rows.slot_positions.unsqueeze(2) >= least)",
    ),
}


@pytest.mark.parametrize("mistake", DEPENDS_ON_THE_BATCH)
def test_a_method_that_depends_on_the_rest_of_the_batch_fails(mistake, capsys):
    """Live and replay make the same mistake, so that no other check sees it."""
    write(DEPENDS_ON_THE_BATCH[mistake])
    code, failed, _ = checked(capsys)
    expected = "a padded sequence is itself alone: in replay.*, the sequence with a prompt of .* logits differ by "
    assert code == 2 and failed and all(re.search(expected, line) for line in failed), failed


DEPENDS_ON_THE_BLOCK = {
    "reads an index beyond the block": (
        "worth = self.norms[layer].unsqueeze(2)\n"
        "        mask = rows.visible() & (worth > worth.mean(-1, keepdim=True))",
        ".*RuntimeError: The size of tensor a",
    ),
    "goes on from the first row of the block": (
        "count = self.count[layer][:, None] + torch.arange(rows.positions.shape[1])\n"
        "        self.count[layer] = count[:, 0] + 1\n"
        "        mask = rows.visible() & (rows.slot_positions.unsqueeze(2) >= (count % 5)[:, None, :, None] * 20)",
        "logits differ by .*, first in row 4$",
    ),
}


@pytest.mark.parametrize("mistake", DEPENDS_ON_THE_BLOCK)
def test_a_method_that_depends_on_the_block_of_rows_fails(mistake, capsys):
    """A single block is as good as a step, so that live decoding does not show it."""
    body, expected = DEPENDS_ON_THE_BLOCK[mistake]
    write(RETRIEVING.replace("{body}", body))
    code, failed, _ = checked(capsys)
    assert code == 2
    assert any(re.search(f"live decoding is replay: replay in blocks of 3 rows: {expected}", line) for line in failed)
    assert not any("host placement" in line for line in failed)


def test_scores_that_rounding_decides_are_looked_at_on_other_tokens(monkeypatch, capsys):
    """What differs on one batch only is no mistake of the method."""
    write()
    original = checks.replay

    def replay(*arguments, seed=0, **options):
        found = original(*arguments, seed=seed, **options)
        return found._replace(logits=found.logits + (0.1 if seed == 0 and "rows_per_block" in options else 0.0))

    monkeypatch.setattr(checks, "replay", replay)
    assert main(["method=./mine.py", "experiment=contract"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("on the first, rounding may have decided: replay in blocks of 3 rows: logits differ") == 6


def test_a_model_that_a_method_refuses_is_not_asked(capsys):
    """And a method that refuses all has shown nothing."""
    refuse = "        if {}: raise ValueError('method.odd: not here')\n"
    text = MINE + "    def new_state(self, geometry, lengths, calibration=None):\n{}        return super().new_state("
    write(text.format(refuse.format("geometry.family == 'opt'")) + "geometry, lengths, calibration)\n")
    assert main(["method=./mine.py", "experiment=contract"]) == 0
    skipped = [line for line in capsys.readouterr().out.splitlines() if line.endswith(": method.odd: not here")]
    assert len(skipped) == 12 and all(line.startswith("-      OPT ") for line in skipped)
    forget(["mine"])
    write(text.format(refuse.format("True")) + "geometry, lengths, calibration)\n")
    assert main(["method=./mine.py", "experiment=contract"]) == 2
    assert capsys.readouterr().err == "error: method=mine: nothing was checked: method.odd: not here\n"


def test_a_method_that_shares_its_state_with_a_fork_fails(capsys):
    write(
        "from methods.streaming import StreamingState\n"
        "class State(StreamingState):\n    def fork(self, index, num_slots): return self\n"
        f"{MINE}    def new_state(self, geometry, lengths, calibration=None): return State(self, geometry, lengths)\n"
    )
    code, failed, _ = checked(capsys)
    assert code == 2 and failed and all("a fork is fresh" in line for line in failed)


@pytest.mark.parametrize("setting", ["codec=int4", "size=0.3"])
def test_the_contract_is_of_the_method_alone(setting, capsys):
    write()
    code, _, error = checked(capsys, setting)
    assert code == 2 and error == f"error: {setting}: plays no part in experiment=contract; leave it out\n"

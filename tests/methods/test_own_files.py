"""A method or a codec of the user's own, in a file or a package outside this project: chosen, refused in one line that
names the file and the line, recorded, checked, decoded live."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from harness.replay.setup import codec_of
from harness.results import record as records
from harness.run.cli import main
from harness.run.compose import load
from harness.run.runner import Run
from methods.codecs.integers import IntegerCodec
from methods.codecs.split import SplitCodec
from tests.conftest import forget
from tests.runs import reading, tiny_loaded

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
METHOD, OTHER = HEAD + MINE, MINE.replace("Mine", "Other")
CODEC = """from dataclasses import dataclass

import torch
from methods.codecs.base import RowCodec

@dataclass(frozen=True)
class Mine(RowCodec):
    levels: int = 127
    bits = 8

    def row_bytes(self, head_dim):
        return 2 + head_dim

    def encode(self, x):
        step = (x.float().abs().amax(-1, keepdim=True) / self.levels).half()
        codes = (x.float() / step.float().clamp(min=1e-7)).round().clamp(-127, 127).to(torch.int8)
        return torch.cat([step.view(torch.uint8), codes.view(torch.uint8)], -1)

    def decode(self, packed, head_dim, dtype):
        step = packed[..., :2].view(torch.float16).float()
        return (packed[..., 2:].view(torch.int8) * step).to(dtype)
"""
SHORT = ["seq_len=300", "prefill_len=150", "num_windows=1", "platform.link_gbps=1", "budget=0.7"]
AS_METHOD, AS_CODEC = ("method=./mine.py",), ("method=full", "codec=./mine.py")

pytestmark = pytest.mark.usefixtures("own_folder")


def write(text: str = METHOD, name: str = "mine.py") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path.resolve()


def refusal(words, capsys) -> str:
    """The only line of a command that is refused."""
    assert main([*words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "a bug" not in line
    return line


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


def test_a_file_is_chosen_like_any_codec():
    write(CODEC)
    config = load([*AS_CODEC, "codec_settings.levels=7"])
    codec = codec_of(config)
    assert (config.codec, config.label, codec.codec.levels) == ("mine", "Full cache + mine", 7)
    assert codec.row_bytes(64) == 66 and codec.bits_per_element(64) == 8.25 and codec is codec.keys is codec.values
    both = codec_of(load(["method=h2o", "codec=./mine.py:Mine", "value_codec=int4"]))
    assert isinstance(both, SplitCodec) and both.values == IntegerCodec("int4")
    assert type(both.keys.codec).__name__ == "Mine"
    config = load(["method=full", "codec=mine.Mine", "residual=64", "experiment=latency"])
    assert config.label == "full+mine.Mine-r64 (host)" and codec_of(config).residual == 64


# Refused before anything runs

REFUSED = [
    ("method=./none.py", None, "there is no file none.py"),
    ("method=./mine.py", HEAD, "no class in it derives from methods.base.Method"),
    ("method=./mine.py", METHOD + OTHER, "defines Mine, Other; choose one, as method=./mine.py:Mine"),
    ("method=./mine.py:Mime", METHOD + OTHER, "did you mean 'Mine'? allowed: Mine, Other"),
    ("method=./mine.py", METHOD.replace("@dataclass(frozen=True)", ""), "Mine must be a @dataclass(frozen=True)"),
    ("method=./h2o.py", METHOD, "h2o is a method of conf/method; rename the file"),
    ("method=./mine.py", METHOD + "    when = 'never'\n", "Mine.when='never': allowed: kept, earlier_layer"),
    ("codec=mine", CODEC, "allowed: bf16, fp16, fp32"),
    ("codec=./mine.py codec_settings.level=3", CODEC, "setting codec_settings.level: did you mean 'levels'?"),
]  # fmt: skip


@pytest.mark.parametrize(("choice", "text", "expected"), REFUSED)
def test_what_is_wrong_with_a_file_or_its_settings_is_one_line(choice, text, expected, own_folder, capsys):
    if text is not None:
        named = re.search(r"=\./(\S+\.py)$", choice)
        write(text, named[1] if named else "mine.py")
    words = choice.format(here=own_folder).split()
    if choice.startswith("codec"):
        words.append("method=full")
    assert expected.format(here=own_folder) in refusal(words, capsys)


# What runs of it, and cannot be used


@pytest.fixture
def texts(monkeypatch, own_folder) -> list[str]:
    return [*reading(monkeypatch, own_folder, tiny_loaded()), *SHORT]


LAST = "return (packed[..., 2:].view(torch.int8) * step).to(dtype)"
PACKED = "return torch.cat([step.view(torch.uint8), codes.view(torch.uint8)], -1)"
WRONG = {
    "broadcast elements": (LAST, f"{LAST}[..., :1]", "decode gives torch.float32 [1, 2, 150, 1]; allowed: torch.float"),
    "signed bytes": (PACKED, f"{PACKED}.view(torch.int8)", "encode gives torch.int8 [1, 2, 150, 18]"),
}  # fmt: skip
LIVE = ["experiment=generate", "prompt=a cache", "platform.link_gbps=1"]


@pytest.mark.parametrize(
    ("wrong", "is_live"), [*((each, False) for each in WRONG), ("broadcast elements", True), ("signed bytes", True)]
)
def test_what_a_codec_returns_is_checked_in_replay_and_live(wrong, is_live, own_folder, texts, capsys):
    before, after, expected = WRONG[wrong]
    write(CODEC.replace(before, after))
    line = refusal([*AS_CODEC, *(LIVE + texts[:3] if is_live else texts[:-1])], capsys)
    assert is_live or f"error: codec Mine: {own_folder}/mine.py" in line
    assert (expected.split()[0] if is_live else expected) in line


# Recorded


def run_id(*words: str) -> str:
    """Of a run by a process that starts now."""
    forget(Path.cwd(), list(sys.modules))
    return Run.of(load(words)).path.parent.name


def test_an_edited_codec_and_another_setting_are_other_runs():
    write(CODEC)
    first, other = run_id(*AS_CODEC), run_id(*AS_CODEC, "codec_settings.levels=7")
    write(CODEC.replace("1e-7", "1e-6"))
    edited = run_id(*AS_CODEC)
    assert edited != first and records.settings_of(edited) == records.settings_of(first)
    assert records.settings_of(other) != records.settings_of(first)


def test_an_edited_file_is_another_run_and_its_place_is_not(own_folder):
    path, first = write(), run_id(*AS_METHOD)
    write(METHOD + "    more = 1\n")
    assert Run.of(load(AS_METHOD)).path.parent.name == first, "a process goes on with the code it has loaded"
    edited = run_id(*AS_METHOD)
    assert edited != first and records.settings_of(edited) == records.settings_of(first)
    elsewhere = own_folder / "elsewhere"
    elsewhere.mkdir()
    shutil.move(path, elsewhere)
    assert run_id("method=elsewhere/mine.py") == edited


@pytest.mark.parametrize(
    ("choice", "text", "other"),
    [("./mine.py", "def late():\n    from beside import VALUE\n", "beside.py"),
     ("./mine.py", "import folder.beside\n", "folder/beside.py"),
     ("package.mine.Mine", "from . import beside\n", "package/beside.py"),
     ("package.mine.Mine", "", "package/inner/data.py")],
)  # fmt: skip
def test_what_lies_beside_the_file_and_is_imported_counts_and_all_of_its_package(choice, text, other):
    write(HEAD + text + MINE, "package/mine.py" if choice.startswith("package") else "mine.py")
    beside, unused = write("VALUE = 1\n", other), write("VALUE = 1\n", "unused.py")
    first = run_id(f"method={choice}")
    unused.write_text("VALUE = 22\n")
    assert run_id(f"method={choice}") == first
    beside.write_text("VALUE = 22\n")
    assert run_id(f"method={choice}") != first


def test_the_file_that_a_method_names_counts():
    file = "    file = str(Path(__file__).with_name('gates.tsv'))\n"
    write("from pathlib import Path\n" + METHOD + file)
    data = write("0.1\t0.9\n", "gates.tsv")
    first = run_id(*AS_METHOD)
    assert run_id(*AS_METHOD) == first
    data.write_text("0.2\t0.8\n")
    assert run_id(*AS_METHOD) != first


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
OF_CODECS = {
    "an error": ("step = packed", "1 / 0; step = packed", r"ZeroDivisionError: .* \({here}/mine.py:20"),
    "more bytes than it says": ("return 2 +", "return 4 +", "FAILED .*encode gives torch.uint8"),
    "fewer bits than it stores": (
        "    bits = 8\n", "    bits = 8\n    def bits_per_element(self, head_dim): return 4.0\n",
        "a row of 16 elements has 18 bytes; 8 are counted",
    ),
    "depends on its neighbours": (
        "amax(-1, keepdim=True)", "amax((-1, -2), keepdim=True).expand(*x.shape[:-1], 1)",
        "a row's code depends on the rows beside it",
    ),
    "a round trip of its own": (
        "    bits = 8\n", "    bits = 8\n    def roundtrip(self, x): return x\n",
        "decode of encode is not the round trip of torch.float32",
    ),
}  # fmt: skip


def failed(words, capsys) -> tuple[list[str], str]:
    """Lines of the checks of `experiment=contract` that failed, and its error."""
    assert main([*words, "experiment=contract"]) == 2
    printed = capsys.readouterr()
    return [line for line in printed.out.splitlines() if line.startswith("FAILED")], printed.err


def is_said(expected: str, lines: list[str]) -> bool:
    return any(re.search(expected.replace("{here}", re.escape(str(Path.cwd()))), line) for line in lines)


@pytest.mark.usefixtures("one_model_of_the_contract")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_methods_mistake_is_found(mistake, capsys):
    body, expected = MISTAKES[mistake]
    write(HEAD + RETRIEVING.replace("{body}", body))
    lines, error = failed(AS_METHOD, capsys)
    assert re.fullmatch(r"error: method=mine: \d of 7 checks failed on gemma2 \w+; no other batch .*\n", error)
    assert is_said(expected, lines), lines


@pytest.mark.usefixtures("one_model_of_the_contract")
def test_a_method_that_misstates_its_budget_fails_that_check_alone(capsys):
    write(METHOD + "    def tokens_read(self, row, layer): return super().tokens_read(row, layer) - 1\n")
    lines, error = failed(AS_METHOD, capsys)
    assert error.startswith("error: method=mine: 1 of 7 checks failed on gemma2 even; ")
    assert re.search("the budget is its closed form: budget is .*; by tokens_read it is ", *lines)


@pytest.mark.usefixtures("one_model_of_the_contract")
@pytest.mark.parametrize("mistake", OF_CODECS)
def test_a_codecs_mistake_is_found(mistake, capsys):
    before, after, expected = OF_CODECS[mistake]
    write(CODEC.replace(before, after))
    lines, error = failed(AS_CODEC, capsys)
    assert is_said(expected, lines) and "error: method=full codec=mine: " in error, lines

"""A codec in a file of the user's own: chosen, refused, recorded, checked, decoded live."""

import json
import re
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
from tests.runs import own_file, reading, tiny_loaded

HEAD = """from dataclasses import dataclass

import torch
from methods.codecs.base import RowCodec
"""
MINE = """
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

pytestmark = pytest.mark.usefixtures("own_folder")


def write(text: str = MINE, name: str = "mine.py") -> Path:
    return own_file(HEAD + text, name)


def test_a_file_is_chosen_like_any_codec():
    write()
    config = load(["method=full", "codec=./mine.py", "+codec_settings.levels=7"])
    codec = codec_of(config)
    assert (config.codec, config.label, codec.codec.levels) == ("mine", "Full cache + mine", 7)
    assert codec.row_bytes(64) == 66 and codec.bits_per_element(64) == 8.25 and codec is codec.keys is codec.values
    both = codec_of(load(["method=h2o", "codec=./mine.py:Mine", "value_codec=int4"]))
    assert (
        isinstance(both, SplitCodec)
        and type(both.keys.codec).__name__ == "Mine"
        and both.values == IntegerCodec("int4")
    )
    config = load(["method=full", "codec=mine.Mine", "residual=64", "experiment=latency"])
    assert config.label == "full+mine.Mine-r64 (host)" and codec_of(config).residual == 64


REFUSED = [
    ("./mine.py", "", "no class in it derives from methods.codecs.base.RowCodec"),
    ("./mine.py", MINE.replace("def encode", "def pack"), "Mine lacks encode; methods/codecs/base.py says what it is"),
    ("./int4.py", MINE, "int4 is a codec of this project; rename the file"),
]  # fmt: skip


@pytest.mark.parametrize(("choice", "text", "expected"), REFUSED)
def test_what_is_wrong_with_a_file_is_one_line(choice, text, expected, own_folder, capsys):
    if text is not None:
        write(text, choice if choice.endswith(".py") else "mine.py")
    assert main(["method=full", f"codec={choice}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: codec={choice}: ") and expected.format(here=own_folder) in line


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["codec=mine"], "allowed: bf16, fp16, fp32"),
        (["codec=./mine.py", "+codec_settings.levels=few"], "codec_settings.levels=few: must be a whole number"),
        (["codec=./mine.py", "+codec_settings.level=3"], "setting codec_settings.level: did you mean 'levels'?"),
        (["codec=./mine.py", "group_size=32"], "group_size=32: codec=mine has no groups"),
        (["codec=./mine.py", "rotation=hadamard"], "rotation=hadamard: codec=mine is not turned"),
        (["codec=int4", "value_codec=./mine.py"], "value_codec=./mine.py: "),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(settings, expected, capsys):
    write()
    assert main(["method=full", *settings]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def run_id(*settings: str) -> str:
    """Of a run by a process that starts now."""
    forget(Path.cwd(), list(sys.modules))
    return Run.of(load(["method=full", "codec=./mine.py", *settings])).path.parent.name


def test_an_edited_file_and_another_setting_are_other_runs():
    write()
    first = run_id()
    write(MINE.replace("1e-7", "1e-6"))
    edited = run_id()
    assert edited != first and records.settings_of(edited) == records.settings_of(first)
    other = run_id("+codec_settings.levels=7")
    assert records.settings_of(other) != records.settings_of(first)


def test_accuracy_and_speed_are_measured_and_recorded(own_folder, monkeypatch, capsys):
    write()
    texts = reading(monkeypatch, own_folder, tiny_loaded())
    small = ["seq_len=400", "prefill_len=150", "num_windows=2", "platform.link_gbps=1"]
    shape = ["batch_size=2", "prompt_len=24", "gen_len=8", "warmup_steps=1", "timed_steps=2"]
    for kind in ("perplexity", "latency"):
        command = ["method=full", "codec=./mine.py", "+codec_settings.levels=100", f"experiment={kind}"]
        assert main([*command, *texts, *small, *shape]) == 0
    capsys.readouterr()
    found = {(record := json.loads(path.read_text()))["experiment"]: record for path in Path().rglob("record.json")}
    assert found.keys() == {"latency", "perplexity"}
    for record in found.values():
        assert (record["config"]["codec"], record["config"]["own_codec"]) == ("mine", {"levels": 100})
        assert record["settings"]["codec_settings.levels"] == 100
    (of_text,) = found["perplexity"]["metrics"].values()
    assert of_text["budget"] == pytest.approx(18 / 32)  # 18 bytes for 16 elements


OF_ALL = "amax((-1, -2), keepdim=True).expand(*x.shape[:-1], 1)"
MISTAKES = {
    "an error": (MINE.replace("step = packed", "1 / 0; step = packed"), "ZeroDivisionError: .* \\({here}/mine.py:20"),
    "more bytes than it says": (MINE.replace("return 2 +", "return 4 +"), "FAILED .*encode gives torch.uint8"),
    "fewer bits than it stores": (
        MINE + "    def bits_per_element(self, head_dim): return 4.0\n",
        "a row of 16 elements has 18 bytes; 8 are counted",
    ),
    "depends on its neighbours": (
        MINE.replace("amax(-1, keepdim=True)", OF_ALL), "a row's code depends on the rows beside it",
    ),
    "a round trip of its own": (
        MINE + "    def roundtrip(self, x): return x\n", "decode of encode is not the round trip of torch.float32",
    ),
}  # fmt: skip


def test_a_right_codec_keeps_the_contract(capsys):
    write()
    assert main(["method=full", "codec=./mine.py", "experiment=contract"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok ", "- ")) for line in lines)
    of_codec = [line for line in lines if "a codec's rows are as counted" in line]
    assert len(of_codec) == 8 and all(
        line.endswith(("8.667 to 9 bits an element", "8.5 to 8.667 bits an element")) for line in of_codec
    )


@pytest.mark.usefixtures("one_model_of_the_contract")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, own_folder, capsys):
    text, expected = MISTAKES[mistake]
    write(text)
    assert main(["method=full", "codec=./mine.py", "experiment=contract"]) == 2
    printed = capsys.readouterr()
    assert re.search(expected.replace("{here}", re.escape(str(own_folder))), printed.out), printed.out
    assert "error: method=full codec=mine: " in printed.err

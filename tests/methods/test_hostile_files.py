"""Files of the user's own that raise anything or return anything: each is one line that names the file and the line."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from harness.run.cli import main
from tests.methods.test_own_codec import HEAD as CODEC_HEAD
from tests.methods.test_own_codec import MINE as CODEC
from tests.runs import reading, tiny_loaded

HEAD = """from dataclasses import dataclass
import torch
from methods.prompt_evicting import PromptEvicting, PromptEvictingState

class Base(BaseException): pass
"""
METHOD = """
class State(PromptEvictingState):
    def prompt_score(self, layer, query, key, value, rows):
        return value.float().norm(dim=-1)

@dataclass(frozen=True)
class Mine(PromptEvicting):
    budget: float = 0.5
    title = "Mine"
    state = State
"""
THROWN = {
    "Base('x')": "Base: x",
    "GeneratorExit": "GeneratorExit",
    "KeyError('a')": "KeyError: 'a'",
}
SHORT = ["seq_len=300", "prefill_len=150", "num_windows=1", "platform.link_gbps=1", "budget=0.7"]

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def texts(monkeypatch, own_folder) -> list[str]:
    return [*reading(monkeypatch, own_folder, tiny_loaded()), *SHORT]


def refusal(words: list[str], capsys) -> str:
    """The only line of a command that is refused."""
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "a bug" not in line
    return line


def method(part: str = "", pre: str = "", score: str = "") -> None:
    text = METHOD.replace("return value.float()", f"{score}; return value.float()") if score else METHOD
    Path("mine.py").write_text(f"{HEAD}{pre}\n{text}{part}\n")


def codec(text: str) -> None:
    head = HEAD.replace("from methods.prompt_evicting import PromptEvicting, PromptEvictingState\n", "")
    Path("mine.py").write_text(f"{head}{CODEC_HEAD}{text}")


HOOKS = {
    "import": lambda raising: method(pre=raising),
    "prompt_score": lambda raising: method(score=raising),
    "__post_init__": lambda raising: method(f"    def __post_init__(self): {raising}"),
    "title": lambda raising: method(f"    @property\n    def title(self): {raising}"),
    "when": lambda raising: method(f"    @property\n    def when(self): {raising}"),
    "with_budget": lambda raising: method(f"    def with_budget(self, frac): {raising}"),
    "tokens_read": lambda raising: method(f"    def tokens_read(self, row, layer): {raising}"),
}


def each_hook_and_each_error(hooks: Iterable[str], fullest: str) -> list[tuple[str, str]]:
    """Every hook with one error, the `fullest` with all."""
    one = next(iter(THROWN))
    return [*((hook, one) for hook in hooks), *((fullest, thrown) for thrown in THROWN if thrown != one)]


@pytest.mark.parametrize(("hook", "thrown"), each_hook_and_each_error(HOOKS, "prompt_score"))
def test_what_a_method_raises_is_one_line(hook, thrown, own_folder, texts, capsys):
    HOOKS[hook](f"raise {thrown}")
    line = refusal(["method=./mine.py", *texts], capsys)
    assert f" {own_folder}/mine.py:" in line and line.endswith(THROWN[thrown])


CODEC_HOOKS = {
    "import": "\n{raising}\n" + CODEC,
    "row_bytes": CODEC.replace("return 2 +", "{raising}; return 2 +"),
    "encode": CODEC.replace("codes =", "{raising}; codes ="),
    "decode": CODEC.replace("step = packed", "{raising}; step = packed"),
    "bits": CODEC.replace("bits = 8", "@property\n    def bits(self): {raising}"),
}


@pytest.mark.parametrize(("hook", "thrown"), each_hook_and_each_error(CODEC_HOOKS, "decode"))
def test_what_a_codec_raises_is_one_line(hook, thrown, own_folder, texts, capsys):
    codec(CODEC_HOOKS[hook].replace("{raising}", f"raise {thrown}"))
    line = refusal(["method=full", "codec=./mine.py", *texts[:-1]], capsys)
    assert f" {own_folder}/mine.py:" in line and line.endswith(THROWN[thrown])


@pytest.mark.parametrize(
    ("constant", "expected"),
    [
        ("title = 5", "its label is 5; must be text in one line"),
        ("title = lambda self: 3", "must be text in one line"),
        ("title = '\\ud800'", "must be text in one line"),
        ("when = 'never'", "Mine.when='never': allowed: kept, earlier_layer"),
        ("when = []", "Mine.when=[]: allowed: kept, earlier_layer"),
        ("state = dict", "mine.py:12: returned what cannot be used: TypeError: dict expected at most 1 argument"),
        ("title = property(lambda self: 5)", "its label is 5; must be text in one line"),
    ],
)
def test_what_a_method_says_of_itself_is_checked(constant, expected, texts, capsys):
    method(f"    {constant}")
    assert expected in refusal(["method=./mine.py", *texts], capsys)


LAST = "return (packed[..., 2:].view(torch.int8) * step).to(dtype)"
PACKED = "return torch.cat([step.view(torch.uint8), codes.view(torch.uint8)], -1)"
WRONG = {
    "broadcast elements": (LAST, f"{LAST}[..., :1]", "decode gives torch.float32 [1, 2, 150, 1]; allowed: torch.float"),
    "one token": (LAST, f"{LAST}[..., :1, :]", "decode gives torch.float32 [1, 2, 1, 16]"),
    "another dtype": (LAST, f"{LAST}.double()", "decode gives torch.float64 [1, 2, 150, 16]"),
    "nothing": (LAST, "pass", "decode gives NoneType; allowed: torch.float32 [1, 2, 150, 16]"),
    "one row": (PACKED, f"{PACKED}[..., :1, :]", "encode gives torch.uint8 [1, 2, 1, 18]; allowed: torch.uint8 [1, 2"),
    "signed bytes": (PACKED, f"{PACKED}.view(torch.int8)", "encode gives torch.int8 [1, 2, 150, 18]"),
    "odd rows": ("return 2 +", "return 3 +", "row_bytes gives 19; allowed: an even whole number"),
    "no rows": ("return 2 + head_dim", "return '18'", "row_bytes gives '18'; allowed: an even whole number"),
    "huge rows": ("return 2 +", "return 10**30 +", "; allowed: at most 64 an element"),
    "no bits": ("bits = 8", "bits = float('nan')", "bits gives nan; allowed: a number above 0"),
    "half of a token": ("bits = 8", "bits = 8\n    span = 0.5", "span gives 0.5; allowed: a whole number"),
    "its own round trip": (
        LAST, f"{LAST}\n\n    def roundtrip(self, x): return x[..., :1]", "roundtrip gives torch.float32 [1, 2, 15",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_codec_returns_is_checked(wrong, own_folder, texts, capsys):
    before, after, expected = WRONG[wrong]
    codec(CODEC.replace(before, after))
    line = refusal(["method=full", "codec=./mine.py", *texts[:-1]], capsys)
    assert f"error: codec Mine: {own_folder}/mine.py" in line and expected in line


@pytest.mark.parametrize("wrong", ["broadcast elements", "signed bytes"])
def test_a_codec_is_checked_in_live_decoding_too(wrong, texts, capsys):
    before, after, expected = WRONG[wrong]
    codec(CODEC.replace(before, after))
    words = ["method=full", "codec=./mine.py", "experiment=generate", "prompt=a cache", "platform.link_gbps=1"]
    assert expected.split()[0] in refusal([*words, *texts[:3]], capsys)

"""`python -m benchmarks.parity` with stand-ins for the authors' code, written here from the rules."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import parity
from harness.model.attach import attach
from harness.settings.codecs import codec_names
from harness.settings.schema import options
from tests.conftest import forget
from tests.living import tiny
from tests.replaying import token_ids

SNAPKV = """
import torch

class SnapKVCluster:
    def __init__(self, window, capacity, kernel, pooling):
        self.window, self.capacity, self.kernel, self.pooling = window, capacity, kernel, pooling

    def update_kv(self, keys, queries, values, mask, groups):
        tokens, before = keys.shape[2], keys.shape[2] - self.window
        scores = queries[:, :, before:] @ keys.mT / keys.shape[-1] ** 0.5
        later = torch.arange(tokens) > torch.arange(before, tokens)[:, None]
        score = scores.masked_fill(later, -float("inf")).softmax(-1).sum(2)[..., :before]
        pool = {"avgpool": torch.nn.AvgPool1d, "maxpool": torch.nn.MaxPool1d}[self.pooling]
        score = pool(self.kernel, 1, self.kernel // 2)(score)
        best = SIGN * score.topk(self.capacity - self.window).indices
        chosen = best[..., None].expand(-1, -1, -1, keys.shape[-1])
        return None, torch.cat([values.gather(2, chosen), values[:, :, before:]], 2)
"""


@pytest.fixture(autouse=True)
def nothing_is_imported_for_good(tmp_path):
    before = set(sys.modules)
    yield
    forget(tmp_path, set(sys.modules) - before)


def write(root: Path, name: str, text: str) -> Path:
    path = root / parity.COMPARISONS[name].source.split()[1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return root


def lines(*sources: Path) -> list[str]:
    with attach(tiny("gqa")) as attached:
        layers = parity.layers_of(attached, token_ids(330), 2)
    return list(parity.compare(sources, layers))


def agreement(printed: list[str], name: str) -> float:
    (line,) = (line for line in printed if line.startswith(f"| {name}:"))
    return float(line.split("|")[3].partition(",")[0])


def test_the_same_rule_agrees_and_another_does_not(tmp_path):
    right = write(tmp_path / "right", "snapkv, average", SNAPKV.replace("SIGN * ", ""))
    printed = lines(right)
    assert agreement(printed, "snapkv, average") == 100
    assert 90 < agreement(printed, "snapkv, maximum") <= 100  # neighbours of a peak tie, and topk takes any
    wrong = write(tmp_path / "wrong", "snapkv, average", SNAPKV.replace("SIGN", "297 + -1"))
    assert agreement(lines(wrong), "snapkv, average") < 90


def test_what_cannot_be_compared_is_one_line_each(tmp_path):
    broken = write(tmp_path, "tova", "import nothing_of_this_name\n")
    _, _, *printed = lines(broken)
    assert len(printed) == len(parity.COMPARISONS) and all("skipped: " in line for line in printed)
    of_tova = "| tova | https://github.com/schwartz-lab-NLP/TOVA | skipped: cannot be imported: "
    assert f"{of_tova}ModuleNotFoundError: No module named 'nothing_of_this_name' |" in printed
    of_snapkv = "| snapkv, average | https://github.com/FasterDecoding/SnapKV | skipped: "
    assert f"{of_snapkv}snapkv/monkeypatch/snapkv_utils.py is in no --source |" in printed


def test_the_ledger_names_methods_that_there_are_and_every_comparison():
    """A method that was compared with no code needs no row."""
    text = (Path(__file__).parents[2] / "benchmarks" / "PARITY.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert named <= {*options("method"), *codec_names()}
    for each in parity.COMPARISONS.values():
        repository, file = each.source.split()
        assert repository in text and f"`{file}`" in text, each.source

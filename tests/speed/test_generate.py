"""`experiment=generate`: the text of the dense model, token by token, and what it moved."""

import re
from pathlib import Path

import pytest
import torch

from harness.model import load as models
from harness.model.load import LoadedModel
from harness.run.cli import main


class Letters:
    """A tokenizer of one token a character, the token's number its code point."""

    eos_token_id = 2

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids):
        return "".join(chr(int(token) + 0x100) if token > 127 else chr(int(token)) for token in ids)


PROMPT = "What is a cache?"


@pytest.fixture
def tiny(monkeypatch, tmp_path, tiny_gqa):
    """The tiny model with a tokenizer of letters, in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    loaded = LoadedModel(tiny_gqa, Letters(), "tiny", 512)
    monkeypatch.setattr(models, "load_model", lambda config: loaded)
    return tiny_gqa


def generated(capsys, *settings, max_new_tokens=24) -> tuple[str, str]:
    """The text behind the prompt, and the lines that follow it."""
    line = ["experiment=generate", f"prompt='{PROMPT}'", f"max_new_tokens={max_new_tokens}", "platform.link_gbps=1"]
    assert main([*line, "calibration.num_tokens=64", *settings]) == 0
    text, _, summary = capsys.readouterr().out.partition("\n\nTTFT ")
    assert text.startswith(PROMPT)
    return text.removeprefix(PROMPT), summary


def greedy(model, count=24) -> str:
    ids = torch.tensor([[ord(letter) for letter in PROMPT]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    tokens = out[0, ids.shape[1] :].tolist()
    return Letters().decode(tokens[: tokens.index(2)] if 2 in tokens else tokens)


@pytest.mark.parametrize("settings", [["placement=device"], ["placement=host"], ["platform.overlap=false"]])
def test_full_prints_the_tokens_of_the_dense_model(tiny, capsys, settings):
    text, summary = generated(capsys, "method=full", *settings)
    assert text == greedy(tiny) and len(text) > 4
    assert not Path("outputs/runs").exists(), "no record is written"
    assert f"{len(text)} new tokens" in summary and "read 100.0% of the cache; source: emulated" in summary


def test_a_text_waits_for_no_link_unless_its_rate_is_given(tiny, capsys):
    """The rows move all the same, and are counted."""
    text, summary = generated(capsys, "method=full", "platform.link_gbps=null")
    assert text == greedy(tiny) and "source: measured" in summary and "MiB to the device" in summary
    assert not Path("outputs/link.json").exists(), "nothing was measured for a link"


METHODS = (
    "infinigen gpu_cache=1 codec=int8", "infinigen-pool method.pool_frac=0.7", "h2o", "int4",
    "oracle placement=device",
)  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_any_method_prints_text_and_what_it_moved(tiny, capsys, method):
    text, summary = generated(capsys, *f"method={method}".split())
    times, transfers, memory = summary.splitlines()
    assert text and re.match(
        r"[\d.]+ s \(\d+ tokens\); TPOT p50 [\d.]+ ms, p95 .*, p99 .* \(std .*, [\d.]+ tokens/s$", times
    )
    moved = (
        r"fetched (\d+) rows \(\d+ a step.*?\): [\d.]+ MiB to the device, ([\d.]+) MiB.*; link busy \d+% of the time"
    )
    found = re.match(moved, transfers)
    assert (found is not None) == ("MiB in host memory" in memory) == ("placement=device" not in method)
    assert found is None or int(found.group(1)) > 0
    assert ("hit rate" in transfers) == ("gpu_cache" in method)
    share = float(re.search(r"read ([\d.]+)% of the cache", summary).group(1))
    assert 0 < share < 100


@pytest.mark.parametrize("count", [1, 2, 5])
def test_fetched_rows_are_those_of_the_full_cache_and_none_is_asked_for_in_vain(tiny, capsys, count):
    text, summary = generated(capsys, "method=full", max_new_tokens=count)
    assert len(text) == count
    cached = [len(PROMPT) + step for step in range(count - 1)]  # before each decode step: the last token is not fed
    rows = 2 * 4 * sum(cached)  # KV heads, layers
    written = 2 * 4 * (count - 1)  # of the steps; the prompt's rows are none of a step
    mib = [f"{each * 2 * 16 * 4 / 2**20:.2f} MiB to the {side}" for each, side in ((rows, "device"), (written, "host"))]
    assert f"fetched {rows} rows" in summary and ", ".join(mib) in summary


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["max_new_tokens=512"], "max_new_tokens=512: must be at least 1 and together at most 512"),
        (["max_new_tokens=8", "method=streaming"], "error: method.budget=0.2: must be more: it keeps "),
    ],
)
def test_what_cannot_be_generated_is_one_line(settings, said, tiny, capsys):
    assert main(["experiment=generate", "prompt=a", *settings]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line

"""A model with random weights reads random token ids in place of texts: it needs no tokenizer and no download."""

import json
import random
from hashlib import sha256
from pathlib import Path

import pytest

import harness
from harness.data.text import RANDOM_WORDS, named_text
from harness.errors import UserError
from harness.model.load import RandomIds
from harness.run.cli import main
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.tokens import byte_tokenizer

LENGTHS = ["num_windows=2", "seq_len=96", "prefill_len=32", "calibration.num_tokens=64", "platform.link_gbps=1"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a model's shape alone, beside the current folder, which is empty."""
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    tiny_model("llama", num_key_value_heads=2).config.save_pretrained(tmp_path / "shape")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return tmp_path / "shape"


def settings(folder: Path) -> list[str]:
    return [f"model.path={folder}", "model.weights=random", *LENGTHS]


def record(experiment: str, results: str = "outputs") -> dict:
    (path,) = Path(results).glob(f"runs/{experiment}/*/record.json")
    return json.loads(path.read_text())


def test_ids_follow_from_the_text_alone():
    ids = RandomIds(100, start=1)
    expected = random.Random(sha256(b"one two three").hexdigest()).choices(range(100), k=3)
    assert ids("one two three", add_special_tokens=False)["input_ids"] == expected
    assert ids("one two three")["input_ids"] == [1, *expected]
    assert RandomIds(100)("one two three")["input_ids"] == expected
    assert ids.decode([3, 14]) == "3 14"
    many = ids(named_text("random"), add_special_tokens=False)["input_ids"]
    assert len(many) == RANDOM_WORDS and set(many) == set(range(100))


def test_windows_and_calibration_are_random_ids_and_a_tokenizer_beside_the_shape_changes_nothing(folder):
    assert main(["-m", "method=full,infinigen,kvzip", *settings(folder)]) == 0
    paths = list(Path("outputs").glob("runs/perplexity/*/record.json"))
    found = {each["config"]["method_name"]: each for each in map(json.loads, (path.read_text() for path in paths))}
    assert set(found) == {"full", "infinigen", "kvzip"}
    for each in found.values():
        assert set(each["metrics"]) == {"random"}, "the text's name in tables"
        assert (each["config"]["corpus"]["name"], each["config"]["calibration"]["name"]) == ("random", "random")
    assert found["infinigen"]["metrics"]["random"]["kl_nats"] > 0
    byte_tokenizer().save_pretrained(folder)
    assert main(["method=infinigen", *settings(folder), "results_dir=with"]) == 0
    beside = record("perplexity", "with")
    assert all(beside[part] == found["infinigen"][part] for part in ("metrics", "samples"))


def test_generated_texts_are_ids(folder, capsys):
    assert main(["experiment=generate", "prompt=one two three", "max_new_tokens=5", *settings(folder)]) == 0
    shown = capsys.readouterr().out.partition("\n")[0].split()
    prompt = RandomIds(VOCAB_SIZE, start=1)("one two three")["input_ids"]
    assert shown[:4] == [str(number) for number in prompt]
    assert len(shown) == 4 + 5 and all(0 <= int(number) < VOCAB_SIZE for number in shown)
    assert main(["experiment=long_decode", "sweep=null", "max_new_tokens=4", *settings(folder)]) == 0
    prompt = record("long_decode")["samples"]["prompts"][0]
    assert prompt["text"] == " ".join(map(str, prompt["tokens"]))


REFUSED = {
    "experiment=tasks": "model.weights=random: kind=tasks reads text, and random weights read random token ids",
    "corpus.path={file}": "corpus.path={file}: model.weights=random reads random token ids; leave it out",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_needs_text_is_refused_before_weights_are_made(word, runs, capsys, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("a text")
    assert main(["model=llama2-7b", "model.weights=random", word.format(file=file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {REFUSED[word].format(file=file)}")
    assert runs.loads == []


def test_other_weights_have_no_random_ids():
    model = harness.load(tiny_model("llama", num_key_value_heads=2))
    with pytest.raises(UserError, match="corpus.name=random: needs model.weights=random"):
        model.configured({}, {"corpus.name": "random"})
    with pytest.raises(UserError, match="no tokenizer"):
        model.perplexity(methods=["full"], seq_len=96, prefill_len=32)

"""`python -m benchmarks.peers` on a tiny model: our results are the peers', and a difference is told.

kvpress's pipeline needs an older transformers than this project's, so a stand-in, written here from the rule, takes its
place in the peers' process.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import peers
from benchmarks.peer_process import Peer, PeerError
from benchmarks.timing import Timed, Took, in_turn, ratios
from harness.model.tiny import tiny_model
from tests.tokens import byte_tokenizer

SIZES = peers.Sizes(
    rounds=1, windows=1, window=64, contexts=(200,), answer=6, questions=1, texts=3, text_context=60, text_new=5,
    batches=(1, 2), prompt=40, warm_up=1, steps=4,
)  # fmt: skip
KVPRESS = """
import torch
from transformers import DynamicCache

class KnormPress:
    def __init__(self, compression_ratio, sign=1):
        self.kept_share, self.sign = 1 - compression_ratio, sign

class KVPressTextGenerationPipeline:
    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer

    def preprocess(self, context, questions, prefix, limit):
        context, *questions = (torch.tensor([self.tokenizer(text).input_ids]) for text in (context, *questions))
        return {"context_ids": context, "questions_ids": questions}

    def __call__(self, context, question, press, max_new_tokens):
        made = self.preprocess(context, [question], "", 0)
        context, (ids,) = made["context_ids"], made["questions_ids"]
        cache, length, tokens = DynamicCache(), context.shape[1], []
        self.model.model(context, past_key_values=cache)
        for layer in cache.layers:
            shortest = (press.sign * layer.keys.norm(dim=-1)).topk(int(length * press.kept_share), largest=False)
            chosen = shortest.indices.sort().values[..., None].expand(-1, -1, -1, layer.keys.shape[-1])
            layer.keys, layer.values = layer.keys.gather(2, chosen), layer.values.gather(2, chosen)
        while len(tokens) < max_new_tokens and 2 not in tokens:
            places = torch.arange(length, length + ids.shape[1])[None]
            length += ids.shape[1]
            ids = self.model(ids, past_key_values=cache, position_ids=places).logits[:, -1:].argmax(-1)
            tokens.append(int(ids))
        return {"answer": self.tokenizer.decode(tokens, skip_special_tokens=True)}
"""


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    """The setting of a tiny model in a folder."""
    monkeypatch.setattr(peers, "Sizes", lambda: SIZES)
    monkeypatch.setattr(peers, "machine", lambda: "a machine")
    monkeypatch.setattr(peers, "keep_freed_memory", lambda: False)
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer()  # every token of the model is a text, so that all differences show
    shape = {"num_key_value_heads": 2, "max_position_embeddings": 4096, "vocab_size": len(tokenizer)}
    tiny_model("llama", **shape).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    return f"model.path={tmp_path / 'model'}"


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "peers.csv").open() as stream:
        return list(csv.DictReader(stream))


def test_jobs_whose_peers_are_installed_have_equal_results(model, tmp_path, capsys):
    jobs = ["--jobs", "perplexity", "choices", "texts", "decode", "question", "quantized"]
    assert peers.main([*jobs, "--methods", "h2o", "--out", str(tmp_path), model]) == 0
    found = rows(tmp_path)
    asked = [(row["job"], row["equal"]) for row in found]
    tasks = [("choices", "True"), ("choices", ""), ("texts", "True"), ("texts", "")]
    assert asked == [("perplexity", "True"), *tasks, ("decode", "True"), ("decode", "True")]
    assert found[1]["case"] == "1 questions, full" and found[2]["case"] == "1 questions, h2o"
    assert found[3]["peer"] in ("HFLM, batch 1", "HFLM, batch 4"), "no batch is much larger than the requests are many"
    for row in found:
        ratio = float(row["ours_cpu_s"]) / float(row["peer_cpu_s"])
        assert float(row["cpu_s_ratio"]) == pytest.approx(ratio), "of a single round"
    printed = capsys.readouterr().out
    assert (tmp_path / "peers.md").read_text() == printed
    for peer, job in (("kvpress", "question"), ("quanto", "quantized"), ("hqq", "quantized")):
        assert f"{job}: {peer} is skipped, no interpreter: give --peers-python PATH, or --make-peers once" in printed


def test_answers_are_those_of_the_peers_process(model, tmp_path, monkeypatch, capsys):
    (tmp_path / "kvpress.py").write_text(KVPRESS)
    info = tmp_path / "kvpress-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: kvpress\nVersion: 0.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    other = {"__missing__": lambda *_: ("KnormPress", {"sign": -1}, [])}  # no rule of ours, and not of the sweep
    monkeypatch.setattr(peers, "ASKED", ("knorm", "keydiff"))
    monkeypatch.setattr(peers, "PRESSES", type("Presses", (dict,), other)(knorm=peers.PRESSES["knorm"]))
    jobs = ["--jobs", "question", "sweep", "quantized", "--peers-python", sys.executable]
    assert peers.main([*jobs, "--out", str(tmp_path), model]) == 1
    found = [(row["job"], row["equal"]) for row in rows(tmp_path)]
    assert found == [("question", "True"), ("question", "False"), ("sweep", "True")]
    told = capsys.readouterr()
    (line,) = (line for line in told.err.splitlines() if "not equal" in line)
    assert "question, keydiff, 200 tokens: not equal to kvpress" in line
    assert f"quanto is skipped, optimum-quanto is not installed under {sys.executable}" in told.out


def test_a_job_that_fails_and_a_loss_that_differs_are_told_and_the_others_go_on(model, monkeypatch, capsys):
    def fail(bench):
        raise ValueError("no such luck")

    monkeypatch.setitem(peers.JOBS, "texts", fail)
    monkeypatch.setattr(peers, "cross_entropy", lambda logits, targets: torch.tensor(1.0))
    assert peers.main(["--jobs", "texts", "perplexity", model]) == 1
    told = capsys.readouterr()
    assert "texts: failed, ValueError: no such luck" in told.err and "| perplexity |" in told.out
    assert "perplexity, 1 x 64 tokens: not equal to transformers forward" in told.err


def test_a_peer_that_ends_is_told(tmp_path):
    peer = Peer(sys.executable, str(tmp_path / "none"), threads=1, keeps_memory=False)
    with pytest.raises(PeerError, match="ended with code 1; its message is above"):
        peer.call("version", peer="hqq")
    peer.close()


def test_contestants_take_turns_and_may_time_themselves():
    order: list[str] = []
    own = {"one": lambda: order.append("one") or 1, "two": lambda: order.append("two") or Timed(Took(3.0, 2.0), "b")}
    times, results = in_turn(own, 3)
    assert order == ["one", "two", "two", "one", "one", "two"] and results == {"one": 1, "two": "b"}
    assert times["two"] == [Took(3.0, 2.0)] * 3
    assert ratios([1.0, 2.0, 6.0], [2.0, 2.0, 2.0]) == (1.0, "0.50 to 3.00")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "perplexities"], "--jobs perplexities: 'perplexities' is none; did you mean 'perplexity'?"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--peers-python", "none"], "--peers-python none: there is no such file; give an interpreter's path"),
    ],
)
def test_refuses_in_a_line(arguments, message, model, capsys):
    assert peers.main([*arguments, model]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]

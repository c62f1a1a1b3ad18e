"""Which questions were lost, and what was read of the sentence with the answer: recorded and listed."""
# ruff: noqa: F811, the fixture `loaded` is imported

from __future__ import annotations

import json
import re
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.data.generated import MARKER, questions
from harness.data.ruler import make, needle_of
from harness.model.attach import attach
from harness.replay import decode_pass as passes
from harness.results import record as records
from harness.results.lost import compared, main
from harness.scoring.answers import NeedleRead, Request, needle_read
from harness.scoring.evaluation import run_tasks, run_turns
from methods.full import Full
from methods.oracle import Oracle
from methods.streaming import Streaming
from tests.cases import CASES, Case
from tests.conftest import refused
from tests.data.test_tasks import loaded, settings  # noqa: F401, a fixture
from tests.living import tiny
from tests.replaying import RAGGED, RAGGED_IDS, open_session, pad
from tests.results.test_tables import TASK_METRICS, save, shares
from tests.runs import refusal_of, tiny_loaded
from tests.tokens import word_tokenizer

# Replay: which of the needle's tokens a row reads

NEEDLES = ((3, 9), (0, 1), (14, 20))
"""Of the sequences of `RAGGED`: within the prompt, its one token, and partly after the prompt."""


def replayed(case: Case, needles=NEEDLES) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """By sequence, shares [layers, rows] as measured and from the masks that rows read, mean over KV heads."""
    prompts = [ids[:prompt] for ids, (prompt, _) in zip(RAGGED_IDS, RAGGED, strict=True)]
    rests = [ids[prompt:] for ids, (prompt, _) in zip(RAGGED_IDS, RAGGED, strict=True)]
    seen: dict[int, list[torch.Tensor]] = {}
    original = passes._Block.attend_to_selection

    def watch(block, key, value):
        def visible(mask):
            found = of_block(mask)
            seen.setdefault(block.policy.number, []).append(found.expand(-1, block.key.shape[1], -1, -1))
            return found

        of_block, block._visible = block._visible, visible
        return original(block, key, value)

    with pytest.MonkeyPatch.context() as patch, attach(tiny("gqa")) as attached:
        patch.setattr(passes._Block, "attend_to_selection", watch)
        session = open_session(attached, case, [length for _, length in RAGGED], 19 + 37)
        session.prefill(*pad(prompts, left=True))
        session.needles = torch.tensor(needles)
        session.decode(*pad(rests, left=False))
        tokens = session.history.tokens
    measured, expected = [], []
    for at, (first, stop) in enumerate(needles):
        count = len(rests[at])
        measured.append(session.needle_read[:, at, :count])
        of_layers = []
        for number in range(case.method.dense_layers, 4):
            if number not in seen:  # before the first anchor of Kascade all is read
                of_layers.append([1.0] * count)
                continue
            shares = []
            for mask in (row for block in seen[number] for row in block[at].unbind(1)):
                columns = tokens[at, : mask.shape[1]]
                reads = [{int(token) for token in columns[head]} & set(range(first, stop)) for head in mask]
                shares.append(sum(map(len, reads)) / len(reads) / max(1, stop - first))
            of_layers.append(shares[:count])
        expected.append(torch.tensor(of_layers))
    return measured, expected


@pytest.mark.parametrize(
    "name", ["streaming", "h2o", "snapkv-both", "duo", "quest", "infinigen", "shadowkv", "kascade"]
)
def test_shares_are_those_of_the_masks(name):
    measured, expected = replayed(CASES[name])
    for found, wanted in zip(measured, expected, strict=True):
        assert found.shape == wanted.shape
        torch.testing.assert_close(found.float(), wanted.float())


def test_a_method_that_keeps_the_recent_alone_reads_no_needle_and_one_that_reads_all_reads_it():
    needles = ((3, 8), (0, 1), (4, 8))
    (early, _, late), _ = replayed(Case(Streaming(budget=0.2, num_sinks=0)), needles)  # 11, 6 and 4 tokens
    assert not early.any()
    # The third sequence's prompt has 11 tokens: row t reads tokens t - 4 to t - 1.
    assert late[0].tolist() == [sum(token in range(4, 8) for token in range(t - 4, t)) / 4 for t in range(11, 24)]
    for case in (CASES["full"], CASES["full+smooth"], Case(Oracle(alpha=inf, budget=1.0))):
        measured, _ = replayed(case, needles)
        assert all(bool((shares == 1).all()) for shares in measured)
    (_, unknown, _), _ = replayed(CASES["streaming"], ((3, 9), (0, 0), (4, 8)))
    assert unknown.isnan().all(), "of a sequence without a needle"


# Tasks: what a record keeps


def test_the_needle_of_a_question():
    (question,) = questions("passkey", 1, 0)
    assert needle_of("passkey", question._asdict()) == question.needle and question.needle in question.prompt
    (row,) = make("niah_multikey_2", 800, 1, 0, word_tokenizer())
    found = needle_of("niah_multikey_2", row)
    assert row["outputs"][0] in found and row["input"].count(found) == 1 and found.startswith("One of the special")
    assert needle_of("ruler_vt", row) is None and needle_of("arc_easy", {}) is None
    assert needle_of("passkey", {"prompt": "of one's own folder"}) is None


def samples_under(method, loaded, *tasks, **changes) -> list[dict[str, Any]]:
    return run_tasks(settings(*tasks, method=method, **changes), loaded).samples[tasks[0]]


def test_a_record_says_what_was_asked_and_what_was_read(loaded):
    small = Streaming(dense_layers=1, budget=0.3, num_sinks=0)
    own = samples_under(small, loaded, "kv_recall", num_samples=12)
    full = samples_under(Full(), loaded, "kv_recall", num_samples=12)
    all_read = samples_under(Oracle(alpha=inf, budget=1.0), loaded, "kv_recall", num_samples=12)
    shares = set()
    for sample, of_full, of_all, question in zip(own, full, all_read, questions("kv_recall", 12, 0), strict=True):
        context, asked = question.prompt.split(MARKER)
        assert sample["question_text"] == " ".join(f"Question:{asked}".split())
        assert question.needle in sample["context_text"] and len(sample["context_text"]) < 200
        assert sample["predicted_text"] == question.choices[sample["predicted"]].strip()
        assert sample["gold_text"] == question.choices[question.gold].strip()
        # One token a letter, but for the last full stop of a line, whose token holds the line's end as well.
        assert sample["needle_tokens"] == of_full["needle_tokens"] == len(question.needle)
        assert of_full["needle_read"] == of_full["needle_read_max"] == of_all["needle_read"] == 1
        # The rows that score an answer of 5 letters: the context's last token, and the 4 after it.
        length = len(loaded.tokenizer(question.prompt)["input_ids"]) + 5
        kept = int(0.3 * length)
        begin = len(loaded.tokenizer(context[: context.index(question.needle)])["input_ids"])
        needle = range(begin, begin + len(question.needle))
        read = [sum(token >= row - kept for token in needle) / len(needle) for row in range(length - 6, length - 1)]
        assert sample["needle_read"] == pytest.approx(sum(read) / 5, abs=1e-3)
        shares.add(sample["needle_read"])
        assert len(json.dumps(sample, indent=1)) < 1200, "a record stays small"
    assert 0 in shares and len(shares) > 1


def test_generated_answers_know_their_needle():
    small, whole = Streaming(budget=0.05, num_sinks=0), Full()
    config = {"task": {"metadata": {"max_seq_lengths": [1400]}}, "num_samples": 2}
    model = tiny_loaded()
    of_dense, of_full = (samples_under(method, model, "niah_single_1", **config) for method in (small, whole))
    half = Oracle(alpha=inf, budget=0.5)
    asked_later = samples_under(half, model, "niah_single_1", prefill="question", **config)
    for sample in of_dense:
        assert sample["needle_read"] == sample["needle_read_max"] == 0 and sample["needle_tokens"] > 40
        assert "special magic number" in sample["context_text"] and sample["question_text"].startswith("What")
    assert {sample["needle_read"] for sample in of_full} == {1}
    for sample in asked_later:
        assert 0 < sample["needle_read"] <= sample["needle_read_max"] < 1


def test_turns_say_it_both_ways(loaded):
    config = settings("kv_recall", method=Streaming(budget=0.1, num_sinks=0), num_samples=8)
    for sample in run_turns(config, loaded).samples["kv_recall"]:
        assert {"needle_read", "question_text"} <= sample["unknown"].keys() & sample["known"].keys()


# Lists


def sample_of(number: int, right: bool, read: float | None = None, **fields: Any) -> dict[str, Any]:
    common = {
        "question": number, "context": 0, "acc": float(right), "predicted": 1 - right, "gold": 0,
        "predicted_text": "1111" if right else "2222", "gold_text": "1111",
        "question_text": f"Question: what is item {number}?", "context_text": f"… item {number} is 1111. …",
    }  # fmt: skip
    known = {} if read is None else {"needle_tokens": 9, "needle_read": read, "needle_read_max": min(1, 2 * read)}
    return common | known | fields


FULL_RIGHT = (True, True, False, True)
OWN_RIGHT = (True, False, True, False)


def save_pair(folder: Path, **fields: Any) -> tuple[str, str]:
    """A run of the full cache and one of H2O; their run_ids."""
    runs = []
    for method, right in (("full", FULL_RIGHT), ("h2o", OWN_RIGHT)):
        samples = [sample_of(at, is_right, 1.0 if method == "full" else at / 8) for at, is_right in enumerate(right)]
        metrics = {"passkey": TASK_METRICS | shares(1.0 if method == "full" else 0.16)}
        about = {"samples": {"passkey": samples}} | fields
        runs.append(save(folder, ["experiment=fig11", f"method={method}"], metrics, **about)["run_id"])
    return runs[0], runs[1]


def test_runs_with_other_questions_are_not_compared(tmp_path):
    save_pair(tmp_path)
    others = [sample_of(at + 1, True) for at in range(4)]
    metrics = {"passkey": TASK_METRICS | shares(0.16)}
    save(tmp_path, ["experiment=fig11", "method=streaming"], metrics, samples={"passkey": others})
    found = {record["config"]["method_name"]: record for record in records.read_all(tmp_path)}
    uneven = [sample | {"acc": 0.5} for sample in found["h2o"]["samples"]["passkey"]]
    for record in (found["streaming"], found["h2o"] | {"samples": {"passkey": uneven}}):
        with refused("no answers of right and wrong that a run of the full cache gave"):
            compared(record, [*found.values()])


def test_the_command_lists_lost_questions(tmp_path, capsys):
    _, own = save_pair(tmp_path)
    assert main([own[:8], "--results-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    said = "acc: of 4 questions the full cache has 3 right, this run 2; lost 2, gained 1\n"
    assert said in text
    assert re.findall(r"^question (\d) \(acc\)$", text, re.MULTILINE) == ["1", "3"]
    assert re.search(r"question 1 \(acc\)\n  context   … item 1 is 1111\. …\n  question  Question: what is", text)
    assert "  right     1111\n  full      1111\n  method    2222\n  needle    12% of 9 tokens read\n" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["zzz"], r"RUN=zzz: 0 finished runs in .* begin so; allowed: "),
        ([""], r"RUN=: 3 finished runs in .* begin so; allowed: "),
        (["FULL"], r"run .*: no answers of right and wrong that a run of the full cache gave"),
        (["OWN", "--task", "paskey"], r"--task=paskey: did you mean 'passkey'\?"),
        (["TEXT"], r"run .*: no answers of right and wrong"),
    ],
)
def test_refused_in_one_line(words, said, tmp_path, capsys):
    full, own = save_pair(tmp_path)
    text = save(tmp_path, ["experiment=perplexity", "method=h2o"], {"offline": {"perplexity": 2.0} | shares(0.16)})
    names = {"FULL": full, "OWN": own, "TEXT": text["run_id"]}
    words = [*(names.get(word, word) for word in words), "--results-dir", str(tmp_path)]
    assert re.match(said, refusal_of(main, words, capsys))


def test_needle_read_is_a_mean_over_rows_then_layers():
    request = Request((1, 2, 3), 3, 1, 5, ("task", 0), needle=(1, 3))
    shares = torch.tensor([[0.0, 0.5], [1.0, 1.0]], dtype=torch.float64)
    assert needle_read(request, shares) == NeedleRead(2, 0.625, 1.0)
    assert needle_read(request._replace(needle=None), shares) is None

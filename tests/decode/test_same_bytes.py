"""The bytes over the link have one meaning: a timed run, `experiment=generate` and `attach` count one decode alike.

The text ends before `max_new_tokens`, so rows are under way for a step that never comes. They are in no count.
"""

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.api.cached_model import CachedModel
from harness.model.load import LoadedModel
from harness.run.compose import load
from harness.settings.config import LatencyConfig
from harness.speed import memories
from harness.speed.generate import run_generate
from harness.speed.timed_run import TimedRun, time_run
from tests.cases import CASES, Case
from tests.living import attached_with_link, open_live, setup_of, tiny
from tests.tokens import byte_tokenizer

PROMPT, NEW = "Keys and values of a prompt.", 20
"""NEW: tokens that the session has room for."""
WITH_ROWS = [
    ("int4", 0), ("kivi", 0), ("h2o", 0), ("infinigen", 1.5), ("quest", 1.5),
]  # fmt: skip


class Ending:
    """The tokenizer of the tests with another end-of-text token, which need not be in its vocabulary."""

    def __init__(self, end: int) -> None:
        self.tokenizer, self.eos_token_id = byte_tokenizer(), end

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.tokenizer(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def first_tokens(case: Case, ids: torch.Tensor, options: dict[str, object]) -> list[int]:
    """The greedy text of a case."""
    with (
        attached_with_link() as (attached, link),
        closing(open_live(attached, case, NEW, placement="host", link=link, **options)) as session,
    ):
        tokens = [session.prefill(ids, torch.ones_like(ids, dtype=torch.bool)).argmax(-1)]
        for _ in range(NEW - 1):
            tokens.append(session.decode_step(tokens[-1]).argmax(-1))
    return [int(token) for token in tokens]


def bytes_of_usage(case: Case, ids: torch.Tensor, end: int, steps: int, options: dict[str, object]) -> tuple[int, int]:
    with attached_with_link() as (attached, link), CachedModel(
        attached, replace(setup_of(attached, case), **options), {"placement": "host", "link": link}
    ) as cached:  # fmt: skip
        made = cached.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=end, pad_token_id=0)
        assert made.shape[1] == ids.shape[1] + steps + 1 and cached.usage.steps == steps
        return cached.usage.h2d_bytes, cached.usage.d2h_bytes


def bytes_of_generate(case: Case, end: int, steps: int, options: dict[str, object], monkeypatch) -> tuple[int, int]:
    monkeypatch.setattr(
        memories, "prepare", lambda config, loaded, attached, rows: replace(setup_of(attached, case), **options)
    )
    config = load(["experiment=generate", f"prompt={PROMPT}", f"max_new_tokens={NEW}", "platform.link_gbps=1"])
    config = replace(config, **options)
    model = tiny("gqa")
    monkeypatch.setattr(model.generation_config, "eos_token_id", end)
    made = run_generate(config, LoadedModel(model, Ending(end), "tiny", 256), lambda piece: None)
    assert made.steps == steps
    return made.h2d_bytes, made.d2h_bytes


def bytes_of_timed_run(case: Case, ids: torch.Tensor, steps: int, options: dict[str, object]) -> tuple[int, int]:
    shape = LatencyConfig(1, ids.shape[1], gen_len=NEW, warmup_steps=0, timed_steps=steps, repeats=1)
    with attached_with_link() as (attached, link):
        timed_run = TimedRun(replace(setup_of(attached, case), **options), shape)
        metrics, samples = time_run(attached, ids, timed_run, link=link)
    assert metrics["h2d_bytes"] == round(samples["timed_h2d_bytes"] * (NEW - 1) / steps)
    return samples["timed_h2d_bytes"], samples["timed_d2h_bytes"]


@pytest.mark.parametrize(("name", "gpu_cache"), WITH_ROWS)
def test_a_timed_run_generate_and_usage_count_alike(name, gpu_cache, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    case, options = CASES[name], {"gpu_cache": gpu_cache}
    ids = torch.tensor([byte_tokenizer()(PROMPT)["input_ids"]])
    tokens = first_tokens(case, ids, options)
    steps = max(step for step, token in enumerate(tokens[: NEW - 2]) if token not in tokens[:step])
    assert steps > 0, "a text that ends in its first token has no step"
    of_timed_run = bytes_of_timed_run(case, ids, steps, options)
    assert min(of_timed_run) > 0
    assert bytes_of_usage(case, ids, tokens[steps], steps, options) == of_timed_run
    assert bytes_of_generate(case, tokens[steps], steps, options, monkeypatch) == of_timed_run

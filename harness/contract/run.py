"""`experiment=contract`: a method held to its contract on tiny random models, a line for each check."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from harness.contract.checks import CHECKS, BrokenError, LogitsDifferError, NotAskedError, Trial
from harness.contract.decode import STEPS
from harness.errors import UserError
from harness.model.attach import Attached, attach
from harness.model.calibration import calibrate
from harness.model.tiny import VOCAB_SIZE, tiny_model
from harness.offload.links import open_link
from harness.settings.run import RunConfig
from harness.setup import Setup
from methods.base import Lengths, Method

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {"num_key_value_heads": 2}),
    "OPT": ("opt", {"word_embed_proj_dim": 64}),
    "Gemma 2": (
        "gemma2",
        {
            "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0,
            "num_hidden_layers": 6, "layer_types": ["sliding_attention", *["full_attention"] * 2] * 2,
            "sliding_window": 32,
        },
    ),
}  # fmt: skip
"""Two query heads a KV head and rotary positions; a KV head each, queries scaled before, learned positions; a softcap
of the scores, and layers of a sliding window between those that the method counts."""
PROMPTS = {"even": (200, 200), "padded": (200, 180)}
"""Prompt tokens of each sequence: enough for the defaults of every shipped method."""
NUM_CALIBRATION_TOKENS = 256
LINK_BYTES_PER_S = 1e12
"""Of the emulated link: costs nothing."""

Verdict = Literal["ok", "-", "FAILED"]


class Finding(NamedTuple):
    """How a check ended; `-` where the method promises nothing."""

    verdict: Verdict
    words: str


def run_contract(config: RunConfig, write: Callable[[str], Any]) -> None:
    """Check a method on every model and batch. write: takes a line. Raises UserError where a check failed, or where the
    method takes none of the models."""
    findings, refusals = [], []
    for where, trial in _trials(config.method, torch.device(config.platform.name)):
        refusals.append(_refusal(trial))
        for name, check in CHECKS.items():
            finding = Finding("-", refusals[-1]) if refusals[-1] else judge(check, trial)
            write(f"{finding.verdict:6} {where:13} {name}: {finding.words}")
            findings.append(finding.verdict)
    failed = findings.count("FAILED")
    if failed:
        raise UserError(f"method={config.method_name}: {failed} of {len(findings)} checks failed")
    if all(refusals):
        raise UserError(f"method={config.method_name}: nothing was checked: {refusals[0]}")


def _trials(method: Method, device: torch.device) -> Iterator[tuple[str, Trial]]:
    rate = LINK_BYTES_PER_S if device.type == "cpu" else None
    for family, (model_type, shape) in MODELS.items():
        model: Any = tiny_model(model_type, **shape)
        with attach(model.to(device)) as attached, open_link(device, bytes_per_s=rate) as link:
            setup = Setup(method, None, _calibration(method, attached))
            for padding, prompts in PROMPTS.items():
                yield f"{family} {padding}", Trial(attached, link, setup, prompts)


def _calibration(method: Method, attached: Attached) -> dict[str, torch.Tensor] | None:
    """On random tokens: of random weights they say as much as a text."""
    if not method.needs_calibration:
        return None
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB_SIZE, (NUM_CALIBRATION_TOKENS,), generator=generator)
    return calibrate(attached, method, ids.tolist())


def _refusal(trial: Trial) -> str | None:
    """Why the method does not take the model, as DuoAttention none without rotary positions; None where it does."""
    method, lengths = trial.setup.method, torch.tensor(PROMPTS["even"], device=trial.attached.device)
    if method.reads_all:
        return None
    try:
        method.new_state(trial.attached.geometry, Lengths(lengths, lengths + STEPS), trial.setup.calibration)
    except ValueError as error:
        return str(error)
    except Exception:
        return None  # the checks tell of it
    return None


def judge(check: Callable[[Trial], str], trial: Trial) -> Finding:
    """An error of the method's is what differed, with its line."""
    try:
        return Finding("ok", _on_other_tokens_as_well(check, trial))
    except NotAskedError as reason:
        return Finding("-", str(reason))
    except BrokenError as what:
        return Finding("FAILED", str(what))
    except Exception as error:
        where = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
        return Finding("FAILED", f"{where}{type(error).__name__}: {error}{_place(error, trial.setup.method)}")


def _on_other_tokens_as_well(check: Callable[[Trial], str], trial: Trial) -> str:
    """The check's words. Logits that differ count where they do on other tokens as well: else two scores were as close
    as rounding."""
    try:
        return check(trial)
    except LogitsDifferError as what:
        words = check(replace(trial, seed=trial.seed + 1))
        return f"{words}, on other tokens; on the first, rounding may have decided: {what}"


def _place(error: Exception, method: Method) -> str:
    """The last line of the method's own file that the error came through."""
    file = sys.modules[type(method).__module__].__file__
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({file}:{lines[-1]})" if lines else ""

"""Which model families run, seen on a tiny random model of each: the table in results/families.md.

    python -m harness.checks.families                    # all, and the table is written anew
    python -m harness.checks.families qwen3_next gemma2  # these alone, nothing is written

No code knows a family by its name; only this table of tiny shapes does, families.yaml.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from harness.checks.contract import (
    BrokenError,
    full_cache_is_the_models_own,
    live_is_replay,
)
from harness.checks.two_ways import Trial, families, setup_of, tiny_family, token_batch
from harness.errors import UserError
from harness.files import write_atomic
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.replay.setup import Setup
from methods.base import Method
from methods.codecs.integers import IntegerCodec
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.prompt_evicting import SnapKV
from methods.quest import Quest

TABLE = Path("results/families.md")
SHORT, LONG = ((8, 3), 6), ((26, 21), 22)
"""Prompt tokens of two sequences and decode steps: within a window of 16 tokens, and beyond it."""
STEPS = 5
"""Decode steps of a method."""
METHODS: dict[str, tuple[Method, IntegerCodec | None]] = {
    "full": (Full(), None),
    "infinigen": (InfiniGen(alpha=0.3, budget=0.4), None),
    "h2o": (H2O(heavy_frac=0.15, recent_frac=0.1), None),
    "quest": (Quest(budget=0.4, page_size=3), None),
    "snapkv": (SnapKV(budget=0.75, window=4, kernel=3), None),
    "int4": (Full(), IntegerCodec("int4")),
}
"""Each leaves one layer dense, where the model has several under it, and each may read all."""


class Finding(NamedTuple):
    """The verdict on a family. layers: its kinds of attention. why: what is refused, or what
    failed."""

    family: str
    verdict: Literal["works", "in part", "refused", "FAILED"]
    layers: str
    why: str


def check_family(name: str) -> Finding:
    """Two checks on a family: its own logits, and methods live and in replay."""
    layers, limits = "", []
    try:
        model = tiny_family(name)
        with attach(model) as attached:
            layers, decoder = kinds_of_layers(attached), attached.decoder
        own_logits(model)
        methods_agree(model)
        if decoder.no_padding:
            limits.append(f"takes no padded batch: {decoder.no_padding}")
        if decoder.no_prediction:
            limits.append(f"takes no method that predicts a query: {decoder.no_prediction}")
    except UserError as error:
        _, _, why = str(error).partition("not supported: ")
        return Finding(name, "refused", layers, why or str(error))
    except Exception as error:
        return Finding(name, "FAILED", layers, f"{type(error).__name__}: {error}")
    return Finding(name, "in part" if limits else "works", layers, "; ".join(limits))


def own_logits(model: Any) -> None:
    """The full cache in replay gives the model's own logits, within and beyond its window, padded
    and not."""
    full = Setup(Full(dense_layers=0), None, None)
    for prompts, steps in (SHORT, LONG):
        ids, real = token_batch(prompts, steps)
        own = []
        with torch.inference_mode():
            for row, kept in zip(ids, real, strict=True):
                own.append(model(row[kept][None], use_cache=False).logits[0])
        with attach(model) as attached:
            if attached.longest is None or ids.shape[1] <= attached.longest:
                for only in _batches(attached, prompts):
                    trial = Trial(attached, None, full, prompts, steps=steps, only=only)
                    full_cache_is_the_models_own(trial, own if only is None else [own[only]])


def methods_agree(model: Any) -> None:
    """Methods run, and live decoding is replay, as in the contract."""
    with attach(model) as attached:
        short = attached.longest is not None and attached.longest < max(LONG[0]) + STEPS
        prompts = (10, 7) if short else LONG[0]
        dense_layers = min(1, attached.geometry.num_layers - 1)
        for name, (method, codec) in METHODS.items():
            if method.when == "previous_layer" and attached.decoder.no_prediction:
                continue
            method = replace(method, dense_layers=dense_layers)
            setup = setup_of(attached, method, codec, 15 if short else 64)
            for only in _batches(attached, prompts):
                try:
                    live_is_replay(Trial(attached, None, setup, prompts, steps=STEPS, only=only))
                except BrokenError as error:
                    raise BrokenError(f"{name}: {error}") from error


def _batches(attached: Attached, prompts: tuple[int, ...]) -> Sequence[int | None]:
    """`only` of `token_batch`: all sequences together, or one by one where the model takes no
    padding."""
    return range(len(prompts)) if attached.decoder.no_padding else (None,)


def kinds_of_layers(attached: Attached) -> str:
    """The kinds of a decoder's layers, in words."""
    found: set[str] = set()
    for layer in attached.layers:
        window, softmax = layer.window, layer.softmax
        kinds = {
            "latent": layer.latent is not None,
            "full": layer.latent is None and window is None,
            "sliding window": window is not None and not window.is_chunk,
            "chunked": window is not None and window.is_chunk,
            "recurrent": bool(attached.decoder.recurrent),
            "sinks": softmax.sinks is not None,
            "softcap": softmax.softcap is not None,
        }
        found |= {kind for kind, is_there in kinds.items() if is_there}
    return ", ".join(kind for kind in kinds if kind in found)


PAGE = """\
# Model families

Any decoder of transformers whose attention goes through its attention interface runs, read off the model:
no family is known by its name. This page, written by `python -m harness.checks.families`, says what was seen
on a tiny random model of each family in transformers {version}:
{num_working} of {num_families} work whole.

- In replay, the full cache gives the model's own logits, shorter and longer than its window, padded or not.
- Live decoding gives the logits of replay; so do infinigen, h2o, quest, snapkv and int4.

Every model is checked anew when it is loaded; what fails is refused in one line.

| layers | families that work |
|---|---|
{working}

| in part | layers | refused |
|---|---|---|
{in_part}

| refused, since | families |
|---|---|
{refused}

Not tried: {not_tried}. Of a multimodal model
the text decoder runs, which is in the table under its own name.
"""  # noqa: E501


def as_markdown(findings: Sequence[Finding]) -> str:
    """The page results/families.md."""
    found = pd.DataFrame(findings)
    found["why"] = found["why"].str.replace(r" by \S+ of the largest$", "", regex=True)
    works, refused = (found[found["verdict"] == verdict] for verdict in ("works", "refused"))
    in_part = found[found["verdict"] == "in part"]
    return PAGE.format(
        version=transformers.__version__,
        num_working=len(works),
        num_families=len(found),
        working=_rows(works.groupby("layers")["family"].agg(", ".join).reset_index()),
        in_part=_rows(in_part[["family", "layers", "why"]]),
        refused=_rows(refused.groupby("why")["family"].agg(", ".join).reset_index()),
        not_tried=", ".join(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*families()})),
    )


def _rows(cells: pd.DataFrame) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in cells.itertuples(index=False))


def main(names: Sequence[str]) -> int:
    """Check the families named, or all; exit code 1 where one gives wrong numbers."""
    logging.set_verbosity_error()
    findings = []
    for name in names or families():
        finding = check_family(name)
        findings.append(finding)
        print(f"{finding.verdict:8}  {name:22}  {finding.layers}  {finding.why}", flush=True)
    if any(finding.verdict == "FAILED" for finding in findings):
        return 1
    if not names:
        write_atomic(TABLE, as_markdown(findings))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Which model families run, seen on a tiny random model of each: the table in results/families.md.

    python -m harness.checks.families                    # all, and the table is written anew
    python -m harness.checks.families qwen3_next gemma2  # these alone, nothing is written

No code knows a family by its name; only this table of tiny shapes does, families.yaml.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from harness.checks.contract import BrokenError, live_is_replay, same_logits
from harness.checks.two_ways import Trial, setup_of, token_batch
from harness.errors import UserError, exit_code
from harness.files import write_atomic
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.shape import read_yaml
from harness.model.tiny import with_no_constants
from harness.replay.setup import Setup
from methods.base import Method
from methods.codecs.integers import IntegerCodec
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.prompt_evicting import SnapKV
from methods.quest import Quest

SHAPES = Path(__file__).with_suffix(".yaml")
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


@cache
def families() -> dict[str, dict[str, Any]]:
    """By family, the sizes of its tiny shape beside the common ones."""
    table = read_yaml(SHAPES)
    sizes = dict.fromkeys(table["families_as_they_are"], {}) | table["families_with_more"]
    return dict(sorted(sizes.items()))


def tiny_family(name: str, **sizes: Any) -> Any:
    """A random model of a family: eager attention, float32, on the CPU. sizes: in place of those in
    the table."""
    config_class = CONFIG_MAPPING[name]
    aliases = getattr(config_class, "attribute_map", None) or {}
    default = config_class()
    known = {*default.to_dict(), *vars(default), *aliases}
    common = {size: value for size, value in read_yaml(SHAPES)["sizes"].items() if size in known}
    shape = {}
    for size, value in common.items():
        if aliases.get(size) not in common:
            shape[size] = value
    if "layer_types" in aliases:
        shape.pop("layer_types", None)
    config = config_class(**(shape | families()[name] | sizes))
    if getattr(config, "is_decoder", True) is False:
        config.is_decoder = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    return with_no_constants(model, bias_std=0.5)


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
        alone = []
        with torch.inference_mode():
            for row, kept in zip(ids, real, strict=True):
                alone.append(model(row[kept][None], use_cache=False).logits[0])
        with attach(model) as attached:
            if attached.longest is not None and ids.shape[1] > attached.longest:
                continue
            for only in _batches(attached, prompts):
                found = Trial(attached, None, full, prompts, steps=steps, only=only).replayed
                expected = alone if only is None else [alone[only]]
                for got, own in zip(found.logits, expected, strict=True):
                    same_logits(got[None], own[None, -1 - steps :], "the full cache: ")
                if found.budget != 1:
                    raise BrokenError(f"the full cache reads {found.budget} of itself")


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
                trial = Trial(attached, None, setup, prompts, steps=STEPS, only=only)
                try:
                    live_is_replay(trial)
                except BrokenError as error:
                    raise BrokenError(f"{name}: {error}") from error


def _batches(attached: Attached, prompts: tuple[int, ...]) -> Sequence[int | None]:
    """`only` of `token_batch`: all sequences together, or one by one where the model takes no
    padding."""
    return range(len(prompts)) if attached.decoder.no_padding else (None,)


KINDS = ("latent", "full", "sliding window", "chunked", "recurrent", "sinks", "softcap")
"""Kinds of layers, in the order in which a verdict names them."""


def kinds_of_layers(attached: Attached) -> str:
    """The kinds of a decoder's layers, in words."""
    kinds: set[str] = set()
    for layer in attached.layers:
        if layer.latent:
            kinds.add("latent")
        elif layer.window is None:
            kinds.add("full")
        if layer.window:
            kinds.add("chunked" if layer.window.is_chunk else "sliding window")
        if layer.softmax.sinks is not None:
            kinds.add("sinks")
        if layer.softmax.softcap is not None:
            kinds.add("softcap")
    if attached.decoder.recurrent:
        kinds.add("recurrent")
    return ", ".join(sorted(kinds, key=KINDS.index))


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


def main(argv: Sequence[str] | None = None) -> int:
    """Check the families named, or all; exit code not 0 where one gives wrong numbers."""
    parser = argparse.ArgumentParser(prog="python -m harness.checks.families", description=__doc__)
    parser.add_argument("family", nargs="*", help=f"names in {SHAPES.name}; all by default")
    names = parser.parse_args(argv).family

    def check_and_write() -> None:
        logging.set_verbosity_error()
        for name in names:
            if name not in families():
                raise UserError(f"family {name}: must be one of {', '.join(families())}")
        findings, failed = [], []
        for name in names or families():
            finding = check_family(name)
            findings.append(finding)
            if finding.verdict == "FAILED":
                failed.append(name)
            print(f"{finding.verdict:8}  {name:22}  {finding.layers}  {finding.why}", flush=True)
        if failed:
            raise UserError(f"{len(failed)} of {len(findings)} families fail: {', '.join(failed)}")
        if not names:
            write_atomic(TABLE, as_markdown(findings))

    return exit_code(check_and_write)


if __name__ == "__main__":
    raise SystemExit(main())

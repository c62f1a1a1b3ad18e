"""What is measured on a GPU, and its small stand-in for a machine without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.settings.systems import COUNTED, LABELS

MIB, GIB = 2**20, 2**30
SYSTEMS = tuple(sorted(COUNTED, key=lambda label: not LABELS[label].pinned))
"""All whose transfers are counted, the slowest, of pageable memory, last, as time may run out."""
LONG = ("ideal", "offload", "infinigen", "infinigen+int4", "offload+int4")


class Model(NamedTuple):
    """A shape under conf/model, and changes to it."""

    shape: str
    changes: Mapping[str, Any]


class Shape(NamedTuple):
    """Cells that share a prompt, `ideal` first, with which the others are compared."""

    model: str
    batch: int
    prompt: int
    labels: tuple[str, ...] = SYSTEMS

    @property
    def title(self) -> str:
        """As in `opt-13b 8 x 1,920`."""
        return f"{self.model} {self.batch} x {self.prompt:,}"


@dataclass(frozen=True)
class Plan:
    """first, then: shapes to be timed before and after the rates of gathers, copies and pinning.

    warmup_steps, timed_steps: of a cell, which times the latter twice; of pageable memory, one each. link_bytes,
    gather_bytes, copy_bytes, pin_bytes: how much at a time; None where nothing is page-locked.
    rate_s, prepare_s: seconds allowed for a part of rates, and for a model or a shape before its first cell.
    pin_bytes_per_s: of page-locking, as supposed before a cell has been timed.
    """

    models: Mapping[str, Model]
    first: tuple[Shape, ...]
    then: tuple[Shape, ...]
    gen_len: int
    warmup_steps: int
    timed_steps: int
    link_bytes: int
    gather_bytes: int
    copy_bytes: int
    pin_bytes: int | None
    rate_s: float
    prepare_s: float
    pin_bytes_per_s: float = 2e9


CUDA = Plan(
    models={"opt-13b": Model("opt-13b", {}), "llama3-8b": Model("llama3-8b-1048k", {})},
    first=tuple(Shape("opt-13b", batch, 1920) for batch in (8, 4)),
    then=(
        *(Shape("opt-13b", batch, 1920) for batch in (20, 16)),
        *(Shape("opt-13b", 8, prompt) for prompt in (1408, 896, 384)),
        *(Shape("llama3-8b", batch, 32 * 1024 - 128, LONG) for batch in (1, 2)),
    ),
    gen_len=128,
    warmup_steps=2,
    timed_steps=5,
    link_bytes=512 * MIB,
    gather_bytes=512 * MIB,
    copy_bytes=64 * MIB,
    pin_bytes=4 * GIB,
    rate_s=15,
    prepare_s=20,
)
TINY = {
    "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CPU = Plan(
    models={
        "opt-tiny": Model("opt-125m", TINY | {"ffn_dim": 128, "word_embed_proj_dim": 64}),
        "llama-tiny": Model("llama3-8b-1048k", TINY | {"intermediate_size": 128, "num_key_value_heads": 2}),
    },
    first=(Shape("opt-tiny", 2, 48), Shape("opt-tiny", 1, 48)),
    then=(Shape("opt-tiny", 2, 24), Shape("llama-tiny", 1, 96, LONG)),
    gen_len=8,
    warmup_steps=1,
    timed_steps=2,
    link_bytes=MIB // 4,
    gather_bytes=MIB,
    copy_bytes=MIB,
    pin_bytes=None,
    rate_s=1,
    prepare_s=1,
)
PLANS = {"cuda": CUDA, "cpu": CPU}

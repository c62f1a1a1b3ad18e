"""Settings that land on a given reported size: methods are compared at equal kv_frac, not at equal settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.errors import UserError
from methods.base import Method

TOLERANCE = 0.01


class DecodeRow(NamedTuple):
    """A decode row: its cached tokens t, its sequence's final length T, and in how many requests it occurs."""

    cached: int
    final_length: int
    multiplicity: int = 1


def kv_frac(method: Method, rows: Sequence[DecodeRow], num_layers: int) -> float:
    """The size that `method` will report over `rows`, from its closed form; rows without cached tokens count nothing.

    Raises ValueError where the method's reads depend on the data.
    """
    exempt = min(method.num_exempt_layers, num_layers)
    total = weight = 0.0
    for row in rows:
        if not row.cached:
            continue
        read = method.tokens_read(row.cached, row.final_length)
        if read is None:
            raise ValueError("the size of this method depends on the data")
        share = (exempt + (num_layers - exempt) * read / row.cached) / num_layers
        total += row.multiplicity * share
        weight += row.multiplicity
    return total / weight


def sized(method: Method, rows: Sequence[DecodeRow], num_layers: int, target: float) -> Method:
    """`method` with the setting whose reported kv_frac over `rows` is nearest to `target`.

    Bisection over the one number that sizes it; the reported size grows with that number in steps.
    Raises UserError where nothing lands within `TOLERANCE`, ValueError where the method has no size to set, or allows
    none at these lengths.
    """
    counted = _merge(rows)
    least = method.min_size(min(row.final_length for row in counted))
    low, high = least, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        if kv_frac(method.with_size(middle), counted, num_layers) < target:
            low = middle
        else:
            high = middle
    candidates = [method.with_size(size) for size in (low, high)]
    best = min(candidates, key=lambda each: abs(kv_frac(each, counted, num_layers) - target))
    reached = kv_frac(best, counted, num_layers)
    if abs(reached - target) > TOLERANCE:
        smallest = kv_frac(method.with_size(least), counted, num_layers)
        raise UserError(
            f"target_kv_frac={target}: the nearest size is {reached:.3f}; allowed here: {smallest:.3f} to 1 "
            f"({method.num_exempt_layers} of {num_layers} layers read the full cache)"
        )
    return best


def _merge(rows: Sequence[DecodeRow]) -> list[DecodeRow]:
    counts: dict[tuple[int, int], int] = {}
    for row in rows:
        key = (row.cached, row.final_length)
        counts[key] = counts.get(key, 0) + row.multiplicity
    return [DecodeRow(*key, multiplicity) for key, multiplicity in counts.items()]

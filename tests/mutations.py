"""Damage to a file, drawn from a seed: the same seed gives the same damage."""

from __future__ import annotations

import json
import random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 10**400, 1e308, 0.5, "", "x", "nan", "1e999", "a\nb", "$\\foo$", "\x1b[2J", [], {}, [[]],
    [None], {"a": 1}, "full", "offline[0:1]",
)  # fmt: skip
TOKENS = (b"NaN", b"1e999", b"-", b"", b'"', b",", b"\n", b"\r", b"\0", b"\xff", b"{", b"]", b"9" * 400, b"nan", b"'")


def bytes_of(data: bytes, seed: int) -> bytes:
    """The file with a byte changed, a piece left out, repeated or moved, its end cut off, or a token put in."""
    draw = random.Random(seed)
    start, stop = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    short = min(stop, start + draw.randrange(1, 12))
    return draw.choice(
        (
            lambda: data[:start] + bytes([draw.randrange(256)]) + data[start + 1 :],
            lambda: data[:start] + data[short:],
            lambda: data[:start] + data[start:short] * 2 + data[short:],
            lambda: data[:start] + draw.choice(TOKENS) + data[short:],
            lambda: data[:start],
            lambda: data[:start] + data[stop:] + data[start:stop],
        )
    )()


def value_of(value: Any, seed: int) -> Any:
    """The value of a JSON file with one of what it holds left out, or something odd in its place."""
    draw = random.Random(seed)
    changed = json.loads(json.dumps(value))
    places = list(_places(changed))
    container, key = draw.choice(places)
    if draw.random() < 0.25:
        del container[key]
    else:
        container[key] = draw.choice(ODD)
    return changed


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)

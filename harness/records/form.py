"""What a record has, and of which type: nothing that reads one needs to look for itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

NUMBER, NOTHING = (int, float), type(None)
MISSING = object()
ODD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What code raises of a record that holds what no run writes."""


class Each(NamedTuple):
    """Of a list or a mapping: what every item is."""

    container: type
    item: Any


FORM: Mapping[str, Any] = {
    "run_id": str, "settings_id": str, "experiment": str, "kind": str,
    "table": frozenset({"accuracy", "latency", "analysis"}),
    "status": frozenset({"finished", "failed", "interrupted"}),
    "started": str,
    "config": {
        "kind": str, "label": str, "method_name": str, "method": dict, "model": {"name": str},
        "codec": (str, NOTHING), "size": (*NUMBER, NOTHING),
    },
    "method_module": str, "method_file": (str, NOTHING), "when": str,
    "inputs": Each(dict, str),
    "environment": dict, "metrics": dict, "samples": dict, "methods": Each(dict, dict), "chunks": Each(list, dict),
    "seconds": (*NUMBER, NOTHING), "error": (str, NOTHING),
}  # fmt: skip
"""A type, several, the words that are allowed, a mapping of names to forms, or `Each`."""
FINISHED: Mapping[str, Any] = {
    "accuracy": {"metrics": Each(dict, dict), "samples": Each(dict, Each(list, dict))},
    "latency": {
        "metrics": {
            "platform": str, "source": str, "batch_size": int, "prompt_len": int, "gen_len": int,
            **dict.fromkeys(("prefill_s", "decode_s", "total_s"), NUMBER),
        }
    },
    "analysis": {
        "metrics": {
            "source": str, "points": Each(list, {"series": str, "metric": str, "value": (*NUMBER, NOTHING)}),
        }
    },
}  # fmt: skip
"""What a finished run's has besides, by its shape of table."""


def flaw(record: Mapping[str, Any]) -> str | None:
    """What a record lacks or has of another type, in words; None where it has all that one has."""
    found = _flaw(record, FORM, "")
    if found is None and record["status"] == "finished":
        found = _flaw(record, FINISHED[record["table"]], "")
    return found


def _flaw(value: Any, form: Any, name: str) -> str | None:
    if value is MISSING:
        return f"no {name}"
    if isinstance(form, frozenset):
        return None if isinstance(value, str) and value in form else f"{name}={value!r}"[:60]
    container = form.container if isinstance(form, Each) else dict if isinstance(form, Mapping) else form
    if not isinstance(value, container):
        return f"{name} is of type {type(value).__name__}"
    parts = (_flaw(*part) for part in _parts(value, form, name))
    return next((found for found in parts if found is not None), None)


def _parts(value: Any, form: Any, name: str) -> Iterator[tuple[Any, Any, str]]:
    """What a value holds, with the form of each part and its name; one that is missing is of no form."""
    if isinstance(form, Each):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((item, form.item, f"{name}[{key!r}]") for key, item in items)
    elif isinstance(form, Mapping):
        for key, each in form.items():
            yield value.get(key, MISSING), each, f"{name}.{key}".removeprefix(".")

"""Text2JSON: which rows count, and how an answer is scored (arXiv 2604.08426).

An answer is one list in JSON. Its entries have a name and two more values, all of them texts, and
are found by their names. An entry is worth 1, less 1/2 for each missing value and 1/4 for each
wrong one. The score is their sum / the number of names that the answer or the truth has; 0 where no
list can be read. Curly apostrophes count as straight ones, integers as their digits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import datasets

MISSING, WRONG = 1 / 2, 1 / 4


def usable(rows: datasets.Dataset) -> datasets.Dataset:
    """The rows whose entries have different names; the authors leave out the others."""

    def has_names(row: Mapping[str, Any]) -> bool:
        names = [_straight(entry["name"]) for entry in json.loads(row["answer"])]
        return len({*names}) == len(names)

    return rows.filter(has_names)


def score(row: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """lm-eval's `process_results`."""
    truth = {_straight(entry["name"]): entry for entry in json.loads(row["answer"])}
    return {"score": score_of(_entries(answers[0]), truth)}


def score_of(entries: Sequence[Any], truth: Mapping[str, Mapping[str, str]]) -> float:
    """The score of an answer's entries. truth: the right ones by their names. A second entry of a
    name is one of a wrong name."""
    left, total, num_wrong = dict(truth), 0.0, 0
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        right = left.pop(_straight(name), None) if isinstance(name, str) else None
        if right is None:
            num_wrong += 1
            continue
        total += 1.0
        for key in right.keys() - {"name"}:
            found = entry.get(key)
            if found is None:
                total -= MISSING
            elif _straight(str(found)) != _straight(right[key]):
                total -= WRONG
    return total / (len(truth) + num_wrong)


def _entries(answer: str) -> list[Any]:
    """The only list of an answer; [] where there is none, or it cannot be read."""
    if answer.count("[") != 1 or answer.count("]") != 1:
        return []
    try:
        found = json.loads(answer[answer.index("[") : answer.index("]") + 1])
    except ValueError:
        return []
    return found if isinstance(found, list) else []


def _straight(text: str) -> str:
    return text.replace("\u2019", "'")

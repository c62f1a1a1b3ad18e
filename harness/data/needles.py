"""Where the answer of a question stands in its context: the needle, of tasks that know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.data.ruler import NEEDLE, ONE_NEEDLE
from harness.settings.task_config import GENERATED_TASKS

WITH_NEEDLES = (*GENERATED_TASKS, *ONE_NEEDLE)


def needle_of(task: str | None, doc: Any) -> str | None:
    """The sentence that holds the right answer, as it stands in the prompt; None of a task that
    does not know it."""
    if task not in WITH_NEEDLES or not isinstance(doc, Mapping):
        return None
    if task in GENERATED_TASKS:
        return doc.get("needle")
    for found in NEEDLE.finditer(doc.get("input", "")):
        if found[2] in doc.get("outputs", ()):
            return found[0]
    return None

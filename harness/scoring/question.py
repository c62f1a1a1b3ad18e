"""Where the question of a prompt begins, and so where its context ends.

`prefill=question` and `prefill=both` say that a method reduced the cache before it knew the
question. That holds only if no part of the question is in the dense prompt, so the place is never
guessed: it is found by a marker, or by the task that makes the prompt, or the run is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

FIELDS = ("question", "query", "input")
"""Names of the field of a document that holds its question, in any case; the first that a prompt is
made of counts. lm-eval's tasks use these."""
STAND_IN = "\u2039\u2026\u203a"
"""Put in place of a question to see where its task writes it. A task might change letters and
spaces; this has none."""


class QuestionFinder:
    """Finds the first character of a question in its prompt.

    Args:
        marker: text with which the question begins; its last occurrence in a prompt counts. Without
            one the task says where the question is.
        make_text: the task's `doc_to_text`, which makes the last part of a prompt of a document.
            None where the task is not at hand.
        has_preface: whether examples, a description or a system's turn come before that part.

    With `make_text` the question is the field named as one of `FIELDS`, if the part names it once
    and has text of the document before it. Otherwise the whole part is the question.
    """

    def __init__(
        self,
        marker: str | None = None,
        make_text: Callable[[Any], Any] | None = None,
        *,
        has_preface: bool = False,
    ) -> None:
        self.marker = marker
        self._make_text = make_text
        self._has_preface = has_preface

    def find(self, prompt: str, doc: Any) -> int:
        """The place of the question of `doc` in its prompt.

        Raises ValueError with the reason where no question is found, nothing is before it, or its
        text stands before the place too.
        """
        if self.marker is not None:
            place = prompt.rfind(self.marker)
            if place < 0:
                raise ValueError(f"{self.marker!r}, with which the question begins, is not there")
        elif self._make_text is not None:
            place = self._place_in(prompt, doc, self._make_text)
        else:
            raise ValueError("lm-eval does not say here where a question begins")
        for name in _fields(doc)[:1]:
            said = doc[name].strip()
            # One word stands in a context whatever is asked.
            if len(said.split()) > 1 and said in prompt[:place]:
                raise ValueError(f"the text of its field {name} stands before that place: {said!r}")
        return place

    def split(self, prompt: str, doc: Any) -> tuple[str, str]:
        """Context and question, to be shown; all is the question where none is found."""
        try:
            place = self.find(prompt, doc)
        except ValueError:
            place = 0
        return prompt[:place], prompt[place:]

    def _place_in(self, prompt: str, doc: Any, make_text: Callable[[Any], Any]) -> int:
        own = make_text(doc)
        if not isinstance(own, str):
            raise ValueError("the task asks by its choices and names no question")
        begin = prompt.rfind(own.strip())  # a chat template may strip a turn
        if begin < 0:
            raise ValueError("the task's own text is not in the prompt as it is")
        before = self._before_question(own, doc, make_text)
        if before.strip():
            return begin + len(before.lstrip())
        if not self._has_preface:
            raise ValueError("nothing but the question is in the prompt")
        return begin

    def _before_question(self, own: str, doc: Any, make_text: Callable[[Any], Any]) -> str:
        """The part of the document's own text that is before its question; "" where all of it is
        the question."""
        for name in _fields(doc):
            try:
                marked = make_text({**doc, name: STAND_IN})
            except Exception:  # the task's own Python takes some other text for the field
                continue
            if not isinstance(marked, str) or STAND_IN not in marked:
                continue
            before, *after = marked.split(STAND_IN)
            if len(after) > 1:
                raise ValueError(f"the prompt has its field {name} {len(after)} times")
            others = {key: value for key, value in doc.items() if key != name}
            has_context = any(text in before for text in _texts(others))
            if own.startswith(before) and has_context:
                return before
            return ""
        return ""


def _fields(doc: Any) -> list[str]:
    """The names of the document's fields that may hold its question, likeliest first."""
    if not isinstance(doc, Mapping):
        return []
    names = [name for name in doc if isinstance(name, str) and isinstance(doc[name], str)]
    found = [name for name in names if name.lower() in FIELDS and doc[name].strip()]
    return sorted(found, key=lambda name: FIELDS.index(name.lower()))


def _texts(value: Any) -> Iterator[str]:
    """All texts of several words in a document's values."""
    if isinstance(value, str):
        if len(value.split()) > 1:
            yield value.strip()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)

"""Every row that a task asks or shows as an example, tried before a model answers: its prompt, choices and answer.

lm-eval counts a row whose answer is none of its choices as wrong, and shows the last choice as the answer of -1, with a
warning at best. Here such a row is refused, and so is one on which lm-eval, or the task's own Python, fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import datasets
from lm_eval.api.task import ConfigurableTask, Task

from harness.data.rows import Files, Labels, example_split, label_problem, scored_split
from harness.errors import UserError, reason

HOOKS = ("fewshot_context", "construct_requests", "process_results")
"""Where lm-eval makes requests of a row, and judges what is answered."""
NO_LABEL = -1
"""Of a `ClassLabel` on the hub."""

Rows = Mapping[str, datasets.Dataset]
"""By split, as they were read."""


class Source(NamedTuple):
    """Where a task's rows come from. name: of them all. files: by split, where they are local. labels: what fields may
    hold, see `label_problem`."""

    name: str
    rows: Rows = {}
    files: Files = {}
    labels: Labels = {}

    def place(self, split: str | None, number: int, *, made: bool = False) -> str:
        """Row `number` of a split in words: its file and line, or row from 0. made: Python beside the YAML may leave
        out rows or reorder them."""
        files = self.files.get(str(split), [])
        if not files:
            return f"{self.name}, split {split}, row {number}"
        where = files[0] if len(files) == 1 else files[0].with_name(f"{split}-*{files[0].suffix}")
        if made:
            return f"{where}, row {number} of what process_docs makes of it"
        return f"{where}, row {number}" if where.suffix == ".parquet" else f"{where}, line {number + 1}"

    def bad_row(self, builds: Callable[[Rows], bool]) -> str | None:
        """The place of the last row that keeps `builds` from being true of all rows; None where no row does."""

        def builds_from(split: str, first: int) -> bool:
            table = self.rows[split]
            return builds({**self.rows, split: table.select(range(first, len(table)))})

        for split, table in self.rows.items():
            low, high = 1, len(table) - 1
            if high >= low and builds_from(split, high):
                while low < high:
                    middle = (low + high) // 2
                    low, high = (low, middle) if builds_from(split, middle) else (middle + 1, high)
                return self.place(split, low - 1)
        return None


def check_questions(task: Task, source: Source, limit: int | None) -> None:
    """Try the first `limit` rows that `task` asks (None: all); those that it shows as examples when they are drawn.

    Raises:
        UserError: the first row of which no question can be made, or whose answer is none of its choices. Later,
            where `task` draws an example, makes requests or judges an answer, alike.
    """
    checker = _Checker(task, source)
    for number, doc in task.doc_iterator(limit=limit):
        checker.check(doc, number)
    for hook in HOOKS:
        setattr(task, hook, checker.watched(getattr(task, hook)))
    if hasattr(task, "sampler"):
        task.sampler.sample = checker.checked(task.sampler.sample)


class _Checker:
    """Knows where the rows of a task lie."""

    def __init__(self, task: Task, source: Source) -> None:
        self._task = task
        self._source = source
        self._settings = task.config.to_dict() if isinstance(task, ConfigurableTask) else {}

    def check(self, doc: Any, number: int) -> None:
        """Raise UserError for a row that cannot be asked, or not be judged."""
        problem = _problem(self._task, doc, self._source.labels)
        if problem is not None:
            raise self._refusal(problem, number)

    def checked(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        """`draw` of examples, each of which is tried."""

        def drawn(*args: Any, **kwargs: Any) -> Any:
            found = draw(*args, **kwargs)
            for doc in found:
                problem = _problem(self._task, doc, self._source.labels, self._task.fewshot_cfg)
                if problem is not None:
                    raise self._refusal(problem, _index(self._task.sampler.df, doc), example_split(self._settings))
            return found

        return drawn

    def watched(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """`hook` of a row, whose errors name the row."""

        @functools.wraps(hook)
        def named(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except UserError:
                raise
            except Exception as error:  # of lm-eval, or of the task's own Python
                number = _index(self._task.eval_docs, kwargs.get("doc", args[0] if args else None))
                raise self._refusal(f"lm-eval's {hook.__name__} fails ({reason(error)})", number) from error

        return named

    def _refusal(self, problem: str, number: int, split: str | None = None) -> UserError:
        made = bool(self._settings.get("process_docs"))
        place = self._source.place(split or scored_split(self._settings), number, made=made)
        return UserError(f"{place}: tasks={self._task.task_name}: {problem}")


def _problem(task: Task, doc: Any, labels: Labels, templates: Any = None) -> str | None:
    """What keeps a row from being asked or judged. templates: of examples, where they have their own."""
    try:
        return _unlabelled(task, doc, labels) or _unanswerable(task, doc, templates)
    except Exception as error:  # a template's, or of the task's own Python
        return f"no prompt can be made of it ({reason(error)})"


def _unlabelled(task: Task, doc: Any, labels: Labels) -> str | None:
    features = getattr(task.eval_docs, "features", None) or {}
    if isinstance(features.get("label"), datasets.ClassLabel) and doc["label"] == NO_LABEL:
        return f"has no label ({NO_LABEL}), as the rows of many test splits; choose a split that has"
    return label_problem(doc, labels)


def _unanswerable(task: Task, doc: Any, templates: Any) -> str | None:
    """A row needs a prompt and an answer; one of given choices some of them, and its answer among them."""
    if not isinstance(task, ConfigurableTask):
        made: tuple[Any, ...] = task.doc_to_text(doc), task.doc_to_target(doc)
        return "lacks what its prompt or answer is made of" if None in made else None
    text = task.doc_to_text(doc, templates and templates.doc_to_text)
    target = task.doc_to_target(doc, templates and templates.doc_to_target)
    if text is None or target is None:
        return "lacks what its prompt or answer is made of"
    if task.OUTPUT_TYPE != "multiple_choice":
        kinds = (str,) if task.OUTPUT_TYPE.startswith("loglikelihood") else (str, int, float, list)
        return None if isinstance(text, str) and isinstance(target, kinds) else f"asks {text!r}, answered by {target!r}"
    choices = task.doc_to_choice(doc, templates and templates.doc_to_choice)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        return f"its choices are {choices!r}; must be texts, none of them empty"
    gold = text if task.multiple_input else target
    if task.config.process_results is None and not _is_among(gold, choices):
        return f"its answer {gold!r} is none of its {len(choices)} choices"
    return None


def _is_among(gold: Any, choices: list[str]) -> bool:
    """Whether an answer, or each of several, is a choice or the index of one."""
    if isinstance(gold, list):
        return bool(gold) and all(_is_among(each, choices) for each in gold)
    return gold in choices if isinstance(gold, str) else isinstance(gold, int) and 0 <= gold < len(choices)


def _index(docs: Iterable[Any], doc: Any) -> int:
    return next((number for number, each in enumerate(docs) if each == doc), 0)

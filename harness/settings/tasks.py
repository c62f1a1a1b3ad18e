"""The settings of lm-eval's tasks: how they are prompted, and where a user's own files lie. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from harness.errors import UserError
from harness.settings.schema import MOST, PathText

RULER_TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
"""Those of RULER that lm-eval makes without any data."""
RULER_NUM_SAMPLES = 32
DEFAULT_SEQ_LENGTHS = [4096]
"""lm-eval's lengths of RULER's rows, in tokens."""


@dataclass(frozen=True)
class TaskConfig:
    """Beside the names of the tasks, as lm-eval's command line has it.

    include_path: a folder of task YAML files of the user's own. metadata: what lm-eval hands to a task, such as
    max_seq_lengths of RULER. apply_chat_template: prompts are turns of the tokenizer's chat template;
    fewshot_as_multiturn: and so is each example. system_instruction: what stands before them. question_marker: the text
    with which a question starts, where prefill=question ends the prompt; None: the task's own. too_long: what happens
    to a context beyond the model's limit; `truncate` leaves out its beginning, as lm-eval does.
    """

    include_path: PathText | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = False
    system_instruction: str | None = None
    question_marker: str | None = None
    too_long: Literal["refuse", "truncate"] = "refuse"

    def __post_init__(self) -> None:
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise UserError(f"include_path={self.include_path}: no such folder")
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise UserError("fewshot_as_multiturn=true: needs apply_chat_template=true, whose turns the examples are")
        if self.question_marker is not None and not self.question_marker.strip("\n "):
            raise UserError(f"question_marker={self.question_marker!r}: must hold a character that is no space")
        self._check_lengths(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Of RULER's prompts and answers, in tokens."""
        return self.metadata.get("max_seq_lengths", DEFAULT_SEQ_LENGTHS)

    def _check_lengths(self, lengths: Any) -> None:
        if not isinstance(lengths, list) or not all(type(length) is int and 0 < length <= MOST for length in lengths):
            raise UserError(f"metadata.max_seq_lengths={lengths}: must be a list of lengths in tokens, such as [2048]")
        if not lengths or len(set(lengths)) < len(lengths):
            raise UserError(f"metadata.max_seq_lengths={lengths}: must hold at least one length, and none twice")


def group_tasks(settings: dict[str, Any]) -> dict[str, Any]:
    """Take the settings of `TaskConfig`, which stand at the top, out of `settings`; metadata without what is null."""
    taken = {each.name: settings.pop(each.name) for each in fields(TaskConfig) if each.name in settings}
    if isinstance(taken.get("metadata"), Mapping):
        taken["metadata"] = {name: value for name, value in taken["metadata"].items() if value is not None}
    return taken

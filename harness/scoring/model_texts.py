"""Texts and chats as a model's tokens: those of lm-eval's `HFLM` with default settings, so that the
full cache gives its numbers and its texts.

Two things differ: no text has an end token behind it, and every window of a text that is cut stands
behind the tokenizer's start.
"""

from collections.abc import Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jinja2
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import postprocess_generated_text
from transformers.utils import chat_template_utils

from harness.data.text import prompt_ids, start_ids, token_ids
from harness.errors import UserError
from harness.model.load import LoadedModel
from harness.settings.task_config import TaskConfig

Chat = list[dict[str, str]]
TODAY = datetime(2024, 7, 26)
"""The day that a chat template writes as today's, on every day: the one that Llama 3's knows."""


class ModelTexts(TemplateLM):
    """The part of an lm-eval model that its tokenizer and its chat template decide.

    about: how it is prompted. start: ids with which every text starts. Raises UserError for a model
    without a tokenizer.
    """

    def __init__(self, loaded: LoadedModel, about: TaskConfig) -> None:
        super().__init__()
        self.tokenizer: Any = loaded.tokenizer
        self.start = start_ids(self.tokenizer)
        self.max_length = loaded.max_length
        self._name = loaded.name
        self._template_options: dict[str, Any] = {}
        if about.enable_thinking is not None:
            self._template_options["enable_thinking"] = about.enable_thinking
        # A template cannot be handed a function: transformers' own asks this clock for the day.
        self._clock = SimpleNamespace(now=lambda: TODAY)
        self._think_end_token = about.think_end_token

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The one token of an empty context."""
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """lm-eval's name for prompts of this chat template."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text behind the tokenizer's start, unless that is not wanted or the text itself
        begins with it."""
        ids_of = token_ids if add_special_tokens is False else prompt_ids
        return ids_of(string, self.tokenizer)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where the tokens of `tok_encode` lie in a text: the first character and the one after the
        last; (0, 0) for a start token."""
        of_text = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )["offset_mapping"]
        num_before = len(self.tok_encode(text)) - len(of_text)
        return [(0, 0)] * num_before + of_text

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Raises UserError where the model has none."""
        if chat_template:
            self._require_chat_template()
        return super().chat_template(chat_template)

    def apply_chat_template(self, chat_history: Chat, add_generation_prompt: bool = True) -> str:
        """Turns as one text; a template that knows no system role is tried without that turn.

        Without `add_generation_prompt` the last turn is left open. What a template raises comes as
        it is.
        """
        self._require_chat_template()

        def rendered(turns: Chat) -> str:
            with patch.object(chat_template_utils, "datetime", self._clock):
                text = self.tokenizer.apply_chat_template(
                    turns,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                    **self._template_options,
                )
            return str(text)

        try:
            return rendered(chat_history)
        except jinja2.exceptions.TemplateError:
            return rendered([turn for turn in chat_history if turn["role"] != "system"])

    def _require_chat_template(self) -> None:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise UserError(
                f"apply_chat_template=true: model {self._name} has no chat template; choose one "
                "that was trained to chat, or apply_chat_template=false"
            )

    def answer(self, tokens: Sequence[int], stops: Sequence[str]) -> str:
        """The text of an answer, without the thinking before it and from a stop on."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return postprocess_generated_text(text, list(stops), self._think_end_token)

"""What lm-eval asks, as token requests: texts and chats as tokens, contexts that fit, and where the
dense prompt ends.

Tokens are those of lm-eval's `HFLM` with default settings, so that the full cache gives its numbers
and its texts. Two things differ: no text has an end token behind it, and every window of a text
that is cut stands behind the tokenizer's start.

`prefill=question` and `prefill=both` say that a method reduced the cache before it knew the
question. That holds only if no part of the question is in the dense prompt, so the place is never
guessed: it is found by a marker, or by the task that makes the prompt, or the run is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import jinja2
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers.utils import chat_template_utils

from harness.data.text import prompt_ids, start_ids, token_ids
from harness.errors import UserError
from harness.model.load import LoadedModel
from harness.scoring.answers import Document, Request
from harness.settings.config import TaskConfig

CUT_LETTERS = 60
"""Letters of a context that a refusal shows."""

Chat = list[dict[str, str]]
TODAY = datetime(2024, 7, 26)
"""The day that a chat template writes as today's, on every day: the one that Llama 3's knows."""
Encoded = tuple[tuple[str, str], list[int], list[int]]
"""(context, continuation) as texts, then the tokens of each: lm-eval's form of a choice."""
FIELDS = ("question", "query", "input")
"""Names of the field of a document that holds its question, in any case; the first that a prompt is
made of counts. lm-eval's tasks use these."""
STAND_IN = "\u2039\u2026\u203a"
"""Put in place of a question to see where its task writes it. A task might change letters and
spaces; this has none."""


# Texts as tokens


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


# Where a question begins


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


# Requests


class Prefill(NamedTuple):
    """Which rows of a request attend densely; the rest are decode rows, on which a method acts.

    mode: `dense`: the context but for its last row where a continuation is scored, and all of it
        where text is generated, as when serving.
        `question`: the prompt ends before the token that holds the first character of the question,
        so that the cache is reduced before the question is known.
        `artifact`: the prompt is decoded too, but for its first floor(T * budget) tokens, as in the
        paper's Fig 11.
    finder: finds the question in a prompt.
    budget: share of T that the method keeps.
    in_turns: requests with one prompt are the turns of one cache. So they have one T, that of the
    longest.
    """

    mode: str
    finder: QuestionFinder = QuestionFinder()
    budget: float = 1.0
    in_turns: bool = False


class Planner:
    """Makes the requests of one task.

    texts: the model's, whose `max_length` is the limit. truncate: a context beyond it loses its
    beginning behind the start token; else it is refused. rows: the document of each question.
    truncated: those whose context was cut. first_cut: where the first prompt ends, in words.
    """

    def __init__(self, texts: ModelTexts, prefill: Prefill, *, truncate: bool) -> None:
        self.rows: dict[Document, Any] = {}
        self.truncated: set[Document] = set()
        self.first_cut = ""
        self._texts = texts
        self._prefill = prefill
        self._truncate = truncate

    def choices(self, documents: Sequence[Document], encoded: Sequence[Encoded]) -> list[Request]:
        """Continuations to score; those of one document have one final length."""
        contexts = []
        longest: dict[Document, int] = defaultdict(int)
        for document, (_, context, continuation) in zip(documents, encoded, strict=True):
            most = self._texts.max_length + 1 - len(continuation)
            contexts.append(self._fit(document, context, most))
            length = len(contexts[-1]) + len(continuation)
            longest[document] = max(longest[document], length)
        requests = []
        for document, choice, context in zip(documents, encoded, contexts, strict=True):
            requests.append(self._request(document, choice, context, longest[document]))
        return self.in_turns(requests)

    def windows(self, document: Document, text: str) -> list[Request]:
        """A whole text to score, in disjoint windows of the limit, each a sequence of its own."""
        if self._prefill.mode == "question":
            raise UserError(
                f"task {document[0]}: scores whole texts, in which prefill=question finds no "
                "question; use prefill=dense or artifact"
            )
        texts, start = self._texts, self._texts.start
        of_text = texts.tok_encode(text)[len(start) :]
        room = texts.max_length - len(start)
        requests = []
        windows = get_rolling_token_windows(of_text, texts.prefix_token_id, room, 1)
        for number, window in enumerate(windows):
            context, continuation = make_disjoint_window(window)
            if start:  # in place of the first window's prefix, and before what the others have
                context = [*start, *context] if number else start
            encoded = ("", ""), context, continuation
            final_length = len(context) + len(continuation)
            requests.append(self._request(document, encoded, context, final_length))
        return requests

    def text(self, document: Document, text: str, max_new_tokens: int, own: int | None) -> Request:
        """A context to be continued. own: tokens of the model's generation config, which hold
        before `max_new_tokens`, as in `HFLM`."""
        whole = self._texts.tok_encode(text) or [self._texts.prefix_token_id]
        limit = self._texts.max_length
        context = self._fit(document, whole, limit - max_new_tokens)
        if own is not None:
            max_new_tokens = min(own, limit - len(context))
        final_length, cut = len(context) + max_new_tokens, len(whole) - len(context)
        prefill_len = self._prefill_len(document, text, cut, len(context), final_length)
        return Request(
            tuple(context),
            len(context),
            prefill_len,
            final_length,
            document,
            max_new_tokens,
        )

    def in_turns(self, planned: list[Request]) -> list[Request]:
        """Give the requests that are answered from one cache one T, as a method may keep a share of
        it."""
        if not self._prefill.in_turns:
            return planned
        longest: dict[tuple[int, ...], int] = defaultdict(int)
        for request in planned:
            longest[request.prompt] = max(longest[request.prompt], request.final_length)
        return [request._replace(final_length=longest[request.prompt]) for request in planned]

    def _request(
        self, document: Document, encoded: Encoded, context: list[int], final_length: int
    ) -> Request:
        """A continuation to score after `context`, the start and the last tokens of the encoded
        one."""
        (text, choice), whole, continuation = encoded
        if not whole or not continuation:
            raise UserError(
                f"{_where(document)}: the continuation {choice!r} has no token of its own after "
                f"the context {text[-CUT_LETTERS:]!r}; let it begin with a space or set "
                "target_delimiter in the task's YAML"
            )
        cut = len(whole) - len(context)
        text = text.rstrip()  # as lm-eval encodes a context
        prefill_len = self._prefill_len(document, text, cut, len(context) - 1, final_length)
        ids = (*context, *continuation)
        return Request(ids, len(context), prefill_len, final_length, document)

    def _fit(self, document: Document, context: list[int], most: int) -> list[int]:
        """The last `most` tokens of a context, its start among them, where that is allowed."""
        if len(context) <= most:
            return context
        of_text = most - len(self._texts.start)
        if not self._truncate or of_text < 1:
            ways = "lower num_fewshot, choose a model with a longer context"
            ways += "" if of_text < 1 else ", or too_long=truncate"
            raise UserError(
                f"{_where(document)}: context and answer have "
                f"{len(context) - most + self._texts.max_length} tokens, "
                f"the model takes {self._texts.max_length}; {ways}"
            )
        self.truncated.add(document)
        return [*context[: len(self._texts.start)], *context[-of_text:]]

    def _prefill_len(
        self, document: Document, text: str, cut: int, most: int, final_length: int
    ) -> int:
        """Dense rows of a context, `cut` tokens of which have been left out behind its start: at
        most `most`, and at least 1."""
        end = most
        if self._prefill.mode == "artifact":
            end = int(final_length * self._prefill.budget)
        elif self._prefill.mode == "question":
            end = self._question_token(document, text) - cut
            if end <= len(self._texts.start):
                raise self._no_question(document, "nothing before the question is left")
        return max(1, min(end, most))

    def _question_token(self, document: Document, text: str) -> int:
        """The token that holds the first character of a question, in its whole context."""
        try:
            place = self._prefill.finder.find(text, self.rows[document])
        except ValueError as error:
            raise self._no_question(document, str(error)) from error
        if not self.first_cut:
            begins = " ".join(text[place:].split())[:CUT_LETTERS]
            ends = f"{document[0]}: the dense prompt ends before the question"
            self.first_cut = f"{ends}; in question {document[1]} before {begins!r}"
        return next(
            index for index, (_, stop) in enumerate(self._texts.spans(text)) if stop > place
        )

    def _no_question(self, document: Document, why: str) -> UserError:
        asked, other = "prefill=question", ", or use prefill=dense or artifact"
        if self._prefill.in_turns:
            asked, other = "prefill=both", ""
        return UserError(
            f"{_where(document)}: {asked} finds no end of the context ({why}); set "
            f"question_marker= to the words with which the question begins{other}"
        )


def _where(document: Document) -> str:
    return f"task {document[0]}, question {document[1]}"

"""A generated text: which tokens it may get next, where it ends, and the loop that writes it, live
and in replay.

A model's `generation_config.json` lists its end tokens, penalties, suppressed tokens and lengths.
transformers' `generate` turns that file into logits processors and stopping criteria.
`GenerationRule` takes them from transformers, so that each text here is continued as transformers
continues it.

A text draws its tokens from its own random numbers, made from its own key. So it is the same alone
and in any batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from harness.errors import UserError, reason

ENDLESS: Mapping[str, None] = {"eos_token_id": None, "stop_strings": None, "max_time": None}
"""Settings of a text that `max_new_tokens` alone ends."""
DECIDES_TOKENS: Mapping[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": 0,
    "dola_layers": None,
    "guidance_scale": 1,
    "token_healing": False,
    "is_assistant": False,
    "inputs_embeds": None,
    "assistant_model": None,
    "assistant_tokenizer": None,
    "custom_generate": None,
    "negative_prompt_ids": None,
    "negative_prompt_attention_mask": None,
    "synced_gpus": False,
}
"""Settings of a `GenerationConfig`, and arguments of `generate`, that choose tokens in a way that
is not offered, and the value besides None that is."""
DECIDES_CACHE: Mapping[str, Any] = {
    "use_cache": True,
    "cache_implementation": None,
    "cache_config": None,
    "max_cache_len": None,
    "prefill_chunk_size": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "speculation_type": None,
    "use_mtp": False,
    "output_attentions": False,
    "output_hidden_states": False,
}
"""Settings of a `GenerationConfig` that a method's cache replaces, and the value besides None that
it takes. They change no token, so that a model's own file may say them: they are set aside."""


class Settings:
    """The settings of a call of transformers' `generate`, in its order: the call's own arguments,
    the `generation_config` among them, the model's.

    model: UserError where it has no generation_config. asked: the call's arguments.
    """

    def __init__(self, model: Any, asked: Mapping[str, Any]) -> None:
        own = model.generation_config
        if not isinstance(own, GenerationConfig):
            raise UserError(
                f"model.generation_config={own!r}: transformers' generate reads it; give the model "
                "a GenerationConfig"
            )
        self.asked = asked
        self.own = vars(own)
        config = asked.get("generation_config")
        self.of_call = {} if config is None else vars(config)

    def get(self, name: str) -> Any:
        """The value of a setting; None where nothing says it, or the call says None."""
        if name in self.asked:
            return self.asked[name]
        value = self.of_call.get(name)
        return self.own.get(name) if value is None else value

    def is_of_model(self, name: str) -> bool:
        """Whether the model's own file says the value. A `generation_config` that repeats it, as a
        pipeline's does, asks for nothing else."""
        value = self.get(name)
        return name not in self.asked and value == self.own.get(name)

    def set_aside(self) -> dict[str, Any]:
        """The arguments that set the model's own settings of `DECIDES_CACHE` aside.

        Raises UserError for a value that is not offered: of `DECIDES_TOKENS`, and of
        `DECIDES_CACHE` where the call asks for it.
        """
        for name, neutral in DECIDES_TOKENS.items():
            self._require(name, neutral)
        aside = {}
        for name, neutral in DECIDES_CACHE.items():
            if not self.is_of_model(name):
                self._require(name, neutral)
            elif self.get(name) not in (None, neutral):
                aside[name] = neutral
        return aside

    def num_new_tokens(self, num_prompt: int) -> int | None:
        """The largest number of new tokens; None where nothing says it. num_prompt: columns of the
        prompts."""
        num_new = self.get("max_new_tokens")
        if num_new is not None:
            return require_count("max_new_tokens", num_new)
        most = self.get("max_length")
        if most is None:
            return None
        require_count("max_length", most)
        if most <= num_prompt:
            raise UserError(
                f"max_length={most}: the prompt has {num_prompt} tokens; raise it, or give "
                "max_new_tokens"
            )
        return most - num_prompt

    def _require(self, name: str, neutral: Any) -> None:
        value = self.get(name)
        if value is None or value == neutral:
            return
        if self.is_of_model(name):
            raise UserError(
                f"the model's generation_config.json says {name}={short(value)}, which is not "
                f"offered; set it to {neutral} in the file or in model.generation_config"
            )
        raise UserError(
            f"{name}={short(value)}: a method's live cache does not take it; allowed: {neutral!r}"
        )


class GenerationRule:
    """How transformers' `generate` continues one text of `model` with these settings.

    ids: tokens of the prompt. tokenizer: needed where the model's file has `stop_strings`.
    criteria: what else ends the text. settings: arguments of transformers' `generate`, which hold
    instead of the file's.

    max_new_tokens: of the text at most. ends: token ids that end it. is_drawn: whether its tokens
    are drawn, by the probabilities of `scores`. Raises UserError for a file that asks for a way of
    generation that is not offered.
    """

    def __init__(
        self,
        model: Any,
        ids: Sequence[int],
        *,
        tokenizer: Any = None,
        criteria: Sequence[StoppingCriteria] = (),
        **settings: Any,
    ) -> None:
        chosen = Settings(model, settings)
        settings |= chosen.set_aside()
        # With a `custom_generate` transformers forgets the tokenizer of its own stop strings.
        stop_strings = chosen.get("stop_strings")
        settings["stop_strings"] = None
        ending = StoppingCriteriaList(criteria)
        if stop_strings is not None:
            if tokenizer is None:
                raise UserError(
                    f"the model's generation_config.json says stop_strings={stop_strings}, which "
                    "are found by a tokenizer; the model has none"
                )
            ending.append(StopStringCriteria(tokenizer, stop_strings))
        prompt = torch.tensor([ids], device=model.device)

        def take(
            _: Any,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **__: Any,
        ) -> None:
            self._processors = logits_processor
            self._criteria = stopping_criteria
            self._config = generation_config

        try:
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                stopping_criteria=ending,
                custom_generate=take,
                **settings,
            )
        except (ValueError, TypeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"the model's generation_config.json: {reason(error)}") from error
        self.max_new_tokens: int = self._config.max_length - len(ids)
        self.is_drawn: bool = self._config.do_sample
        ends = self._config.eos_token_id
        self.ends: set[int] = set()
        if ends is not None:
            self.ends = set(ends) if isinstance(ends, list) else {ends}
        # A text's own count of tokens says the same.
        self._criteria = StoppingCriteriaList(
            criterion
            for criterion in self._criteria
            if not isinstance(criterion, MaxLengthCriteria)
        )

    @property
    def is_plain(self) -> bool:
        """Whether the next token is the one with the largest logit, whatever came before."""
        return not self._processors and not self.is_drawn

    def scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """What the next token is chosen by, [vocab]. ids: of prompt and text, int [tokens]; logits:
        fp32 [vocab]."""
        return self._processors(ids[None].to(logits.device), logits[None])[0]

    def has_ended(self, ids: Tensor) -> bool:
        """Whether the last token ends the text, before `max_new_tokens` does; ids: of prompt and
        text, int [tokens]."""
        return bool(self._criteria(ids[None], None))


def require_count(name: str, value: Any) -> int:
    """The value, a number of tokens; UserError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name}={short(value)}: allowed: a number of tokens, 1 or more")
    return value


def short(value: Any) -> str:
    """A value in an error's line."""
    if isinstance(value, str | int | float | None):
        return repr(value)
    return f"a {type(value).__name__}"


# The loop of every generated text, live and in replay


class Draft:
    """A text under way: its tokens, and whether it has ended.

    prompt: the tokens before it. key: what the random numbers are made from, such as
    `seed/question/repeat`.
    """

    def __init__(self, prompt: Sequence[int], rule: GenerationRule, key: str = "") -> None:
        self.rule = rule
        self.tokens: list[int] = []
        self.ended = False
        self.ended_itself = False
        self._random = random.Random(key)
        self._num_prompt = len(prompt)
        self._ids = torch.empty(len(prompt) + rule.max_new_tokens, dtype=torch.long)
        self._ids[: len(prompt)] = torch.tensor(prompt)

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        return self.rule.max_new_tokens - len(self.tokens)

    @property
    def _ids_so_far(self) -> Tensor:
        return self._ids[: self._num_prompt + len(self.tokens)]

    def take(self, token: int) -> None:
        """Append the next token."""
        self._ids[self._num_prompt + len(self.tokens)] = token
        self.tokens.append(token)
        self.ended_itself = self.rule.has_ended(self._ids_so_far)
        self.ended = self.ended_itself or not self.left

    def choose(self, logits: Tensor) -> Tensor:
        """The next token, int64 [], drawn by this text's next random number or the most likely;
        logits: [vocab]."""
        scores = self.rule.scores(self._ids_so_far, logits)
        return drawn(scores, self._random.random()) if self.rule.is_drawn else scores.argmax(-1)


AnyDraft = TypeVar("AnyDraft", bound=Draft)


def write(
    drafts: Sequence[AnyDraft],
    logits: Tensor,
    feed: Callable[[Sequence[AnyDraft]], tuple[Sequence[AnyDraft], Tensor]],
) -> Iterator[None]:
    """Decode until every text has ended; yields after each token.

    drafts: one a row of logits [batch, vocab], which predict the first token. feed: runs the last
    token of each draft and returns the drafts that go on, with their next logits. It may leave out
    those that have ended.
    """
    while True:
        for draft, token in zip(drafts, _next_tokens(drafts, logits), strict=True):
            if not draft.ended:
                draft.take(token)
        yield
        if all(draft.ended for draft in drafts):
            return
        drafts, logits = feed(drafts)


def _next_tokens(drafts: Sequence[Draft], logits: Tensor) -> list[int]:
    """The next token of each text; of one that has ended, any."""
    tokens = logits.argmax(-1)
    choosing, chosen = [], []
    for at, draft in enumerate(drafts):
        if not draft.ended and not draft.rule.is_plain:
            choosing.append(at)
            chosen.append(draft.choose(logits[at]))
    if choosing:
        tokens[choosing] = torch.stack(chosen)
    return tokens.tolist()


def drawn(scores: Tensor, number: float) -> Tensor:
    """The token, int64 [], at `number`, in [0, 1), of the distribution softmax(scores); scores:
    [vocab].

    The tokens lie in the order of the vocabulary on the line from 0 to 1, each as wide as its
    probability. A small change of the scores moves no token far on it, as it would if they were
    sorted.
    """
    reached = scores.double().softmax(-1).cumsum(-1)
    return (reached / reached[-1] <= number).sum(-1)

"""The settings of tasks: their names, how they are prompted, and how answers are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from harness.errors import UserError
from harness.settings.schema import (
    DISTINCT,
    MOST,
    Count,
    FolderText,
    Natural,
    Share,
    Text,
    build,
    only,
)

GENERATED_TASKS = ("kv_recall", "passkey")
RULER_TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "ruler_vt",
    "ruler_cwe",
    "ruler_fwe",
    "ruler_qa_squad",
    "ruler_qa_hotpot",
)
"""RULER's thirteen tasks. Seven need the packages of `harness.data.ruler`."""
PAPER_TASKS = ("copa", "openbookqa", "winogrande", "piqa", "rte")  # Fig 11
REASONING_TASKS = ("graph_search",)
"""Tasks made from a seed whose answers need long working."""
AIME_TASKS = ("aime24", "aime25", "aime26")
"""Their rows need the package of `harness.data.aime`."""
OFFLINE_TASKS = (*GENERATED_TASKS, *RULER_TASKS, *REASONING_TASKS, *AIME_TASKS)
TASKS = (*OFFLINE_TASKS, *PAPER_TASKS, "hellaswag", "arc_easy", "lambada", "boolq")
"""Tasks that are known without lm-eval's index, which has thousands more."""
GENERATED_NUM_SAMPLES = 128
RULER_NUM_SAMPLES = 32
REASONING_NUM_SAMPLES = 32


@dataclass(frozen=True)
class Metadata:
    """What of `metadata` the tasks of this project read; lm-eval hands all of it to a task.

    max_seq_lengths: of RULER's prompts and answers, in tokens. num_sentences: of the offline text,
    in each context of kv_recall and passkey; None: as many as the task has by itself. places: on a
    map of graph_search. max_gen_toks: the most tokens of an answer of AIME, by default lm-eval's.
    """

    max_seq_lengths: Annotated[tuple[Count, ...], DISTINCT] = (4096,)
    num_sentences: Natural | None = None
    places: Annotated[int, Field(ge=6, le=80)] = 9
    max_gen_toks: Count = 32768


@dataclass(frozen=True)
class TaskConfig:
    """How lm-eval's tasks are prompted. These settings stand at the top, under the names of
    lm-eval's command line.

    metadata: passed to a task by lm-eval. think_end_token: an answer is what follows its last
    occurrence. too_long: `truncate` leaves out the context's beginning behind the start token.
    """

    include_path: FolderText | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool | None = None
    enable_thinking: bool | None = None
    think_end_token: Text | None = None
    system_instruction: Text | None = None
    question_marker: (
        Annotated[Text, only(str.strip, "must hold a character that is no space")] | None
    ) = None
    too_long: Literal["refuse", "truncate"] = "refuse"

    def __post_init__(self) -> None:
        _ = self.known

    @cached_property
    def known(self) -> Metadata:
        """The part of `metadata` that the tasks of this project read."""
        names = {field.name for field in fields(Metadata)}
        given = {name: value for name, value in self.metadata.items() if name in names}
        return build(Metadata, given, "metadata")

    @property
    def has_example_turns(self) -> bool:
        """Whether each example is a turn of its own: by default with a chat template, as on
        lm-eval's command line."""
        if self.fewshot_as_multiturn is None:
            return self.apply_chat_template
        return self.fewshot_as_multiturn


class Sampling(NamedTuple):
    """How a token is chosen.

    temperature: divides the logits; 0 takes the most likely token. top_k: only the k most likely
    tokens are drawn from, and all that are as likely as the k-th. top_p: only the smallest set of
    most likely tokens whose probabilities sum to at least this (nucleus sampling, Holtzman et al.
    2020). None: as the model's generation_config.json says, else as transformers' `generate`.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The same as arguments of transformers' `generate`."""
        if not self.temperature:
            return {"do_sample": False}
        asked: dict[str, Any] = {"do_sample": True, "temperature": self.temperature}
        if self.top_p is not None:
            asked["top_p"] = self.top_p
        if self.top_k is not None:
            asked["top_k"] = self.top_k
        return asked


GREEDY = Sampling()
LOWEST_TEMPERATURE = 1e-6
"""Logits that are divided by less leave the range of fp32."""
Temperature = Annotated[
    float,
    Field(le=MOST),
    only(
        lambda value: value == 0 or value >= LOWEST_TEMPERATURE,
        f"allowed: 0, which takes the most likely token, or {LOWEST_TEMPERATURE} and more",
    ),
]
NEW_TOKENS = 64
"""Tokens of a text where neither a setting nor the model's generation_config.json says how many."""


@dataclass(frozen=True)
class SamplingConfig:
    """How the tokens of a generated answer are chosen. These settings stand at the top.

    repeats: answers to each question, each drawn from its own random numbers.
    """

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    repeats: Count = 1

    def __post_init__(self) -> None:
        if self.temperature == 0:
            self._refuse_where_greedy("temperature=0 takes the most likely token")

    def rule(self, of_task: Sampling = GREEDY) -> Sampling:
        """The rule of these settings where they are given, else of the task, else greedy.

        Raises UserError for settings of sampling where the answer is greedy.
        """
        temperature = of_task.temperature if self.temperature is None else self.temperature
        if not temperature:
            self._refuse_where_greedy("the most likely token is taken")
            return GREEDY
        return Sampling(temperature, self.top_p or of_task.top_p, self.top_k or of_task.top_k)

    def _refuse_where_greedy(self, why: str) -> None:
        for name, unset in (("top_p", None), ("top_k", None), ("repeats", 1)):
            value = getattr(self, name)
            if value != unset:
                raise UserError(f"{name}={value}: {why}; set temperature above 0")

"""A method as an `LM` for lm-eval's own evaluation.

    lm_eval.simple_evaluate(model=harness.lm(...), tasks=[...])

lm-eval asks for all requests of one type at once, of all tasks together. They are answered task by
task, as by `experiment=tasks`: the method's budget is met on the task's own requests, and the dense
prompt ends where the task's does. So log-likelihoods and texts are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CacheHook
from transformers import PreTrainedTokenizerBase

from harness.model.attach import digest_of
from harness.model.budgets import ReadStats
from harness.model.load import LoadedModel
from harness.results import inputs
from harness.results.record import run_id
from harness.run.runner import users_faults
from harness.scoring.evaluation import prefill_of
from harness.scoring.lm import ReplayLM
from harness.scoring.model_texts import Chat
from harness.scoring.planning import Prefill
from harness.scoring.progress import say
from harness.settings.config import RunConfig


class MethodLM(LM):
    """Answers lm-eval's requests of all types under one method.

    config: of `kind=tasks`; its tasks, samples and examples play no part, as lm-eval decides them.
    loaded: the model. max_length: of context and answer in tokens; at first the model's. reads: of
    all answers so far, by task. Raises UserError where the model has no tokenizer.
    """

    def __init__(self, config: RunConfig, loaded: LoadedModel) -> None:
        super().__init__()
        self.config = config
        self.loaded = loaded
        self.max_length = loaded.max_length
        self.reads: dict[str, ReadStats] = {}
        self._prompts = self._replay("", Prefill("dense"))

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Keep the answers of this run apart from all others in the file of lm-eval's
        `--use_cache`, whose keys hold the texts alone."""
        super().set_cache_hook(cache_hook)
        if cache_hook.dbdict is not None:
            run = self._identity()
            cache_hook.dbdict.encode_key = lambda key: f"{run} {key}"

    def _identity(self) -> str:
        """What decides an answer besides its texts: model, method, codec, budget, all other
        settings and the code. Sampled answers are never taken from a cache: lm-eval may ask for
        several with one key."""
        if self.config.sampling.temperature:
            return uuid4().hex
        read = inputs.common(self.config, weights=False)
        read |= inputs.calibration(self.config.calibration)
        read["model"] = digest_of(self.loaded.model)
        return f"{run_id(self.config, read)} {self.max_length}"

    # Requests

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether greedy decoding would make it."""
        return self._by_task("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """The log-probability of each text."""
        return self._by_task("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The answer to each context, cut at the first stop string."""
        return self._by_task("generate_until", requests)

    def _by_task(self, request_type: str, requests: Sequence[Instance]) -> list[Any]:
        """The answers in the order of `requests`. Prints the method's budget for each task."""
        by_task: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            by_task[request.task_name or ""].append(number)
        answers: list[Any] = [None] * len(requests)
        for task, numbers in by_task.items():
            prefill = prefill_of(task, self.config, writes=request_type == "generate_until")
            lm = self._replay(task, prefill)
            with users_faults(self.config):
                found = getattr(lm, request_type)([requests[number] for number in numbers])
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer
            ends = lm.where_prompts_end()
            if ends is not None:
                say(ends)
            self.reads[task] = self.reads.get(task, ReadStats()) + lm.reads
            budget = f"{lm.reads.budget:.1%} of the cache"
            say(f"{task}: {self.config.label} read {budget}")
        return answers

    def _replay(self, task: str, prefill: Prefill) -> ReplayLM:
        """What answers the requests of one task."""
        lm = ReplayLM(self.config, self.loaded, task, prefill)
        lm.max_length = self.max_length
        return lm

    # Prompts, and what lm-eval notes about a model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's."""
        return self._prompts.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """lm-eval's name for prompts of this chat template."""
        return self._prompts.tokenizer_name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template as text; UserError where the model has none."""
        return self._prompts.chat_template(chat_template)

    def apply_chat_template(self, chat_history: Chat, add_generation_prompt: bool = True) -> str:
        """Turns as one text."""
        return self._prompts.apply_chat_template(chat_history, add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results: the method, and by task the shares that it read."""
        shares = {task: reads.shares for task, reads in self.reads.items()}
        return {"model_name": self.loaded.name, "method": self.config.label, "shares": shares}

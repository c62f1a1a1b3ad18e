"""lm-eval's view of a method: an `LM` whose log-likelihoods and texts come from replay.

lm-eval makes prompts and choices, and turns answers into scores. Here its texts become token
requests, which a scorer and a generator answer.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from transformers import GenerationConfig

from harness.errors import UserError
from harness.model.attach import attach
from harness.model.budgets import FLOAT_BYTES, ReadStats
from harness.model.generation import Settings
from harness.model.load import LoadedModel
from harness.replay.setup import prepare
from harness.scoring.answers import Document, Request, Score, Written, generate, score
from harness.scoring.planning import Encoded, ModelTexts, Planner, Prefill
from harness.scoring.progress import bar, say
from harness.settings.config import OF_DRAWING, RunConfig
from methods.base import TokenCounts

MAX_GEN_TOKS = 256
"""lm-eval's default length of an answer, in tokens."""
LENGTHS = ("max_length", "max_new_tokens")
"""Those of lengths, of which lm-eval has its own."""
ANSWER_ROWS = 16
"""Decode rows of a generated answer, evenly spaced, on which a budget is met."""


class ReplayLM(ModelTexts):
    """Answers lm-eval's requests of one task, of all three types, under the method of `config`.

    prefill: which rows are dense. With too_long=truncate a context beyond the model's limit loses
    its beginning behind the start token.

    After a run `requests` holds the token requests in the order in which lm-eval asked, one type
    after another; a text that was scored whole has one for each of its windows. `reads` are those
    of all answers, and `method` is that of the last ones, its budget met. `written` holds the
    generated answers of each question, one list for each repeat. `truncated` holds the
    questions whose context was cut. `token_bytes` are those of a token in the full cache.

    With several repeats `evaluate` asks once for each: the first time all answers are generated,
    and `repeat` says which are returned.
    """

    def __init__(self, config: RunConfig, loaded: LoadedModel, task: str, prefill: Prefill) -> None:
        super().__init__(loaded, config.task)
        self.config = config
        self.loaded = loaded
        self.task = task
        self.prefill = prefill
        self.method = config.method
        self.requests: list[Request] = []
        self.reads = ReadStats()
        self.token_bytes = 0
        self.repeat = 0
        self.written: list[dict[Document, list[Written]]] = []
        self._bar_file = sys.stderr  # which is hidden while lm-eval asks
        self._settings = Settings(loaded.model, {})
        self._planned: list[Request] = []
        self._documents: list[Document] = []
        self._planner = Planner(self, prefill, truncate=config.task.too_long == "truncate")
        self.truncated = self._planner.truncated

    # Answers

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Log-likelihoods, in the order of `requests`."""
        return self._answer(score, requests)

    def generate(self, requests: Sequence[Request]) -> list[Written]:
        """Generated answers, in the order of `requests`."""
        return self._answer(partial(generate, tokenizer=self.tokenizer), requests)

    def _answer(
        self, answer: Callable[..., tuple[list[Any], ReadStats]], requests: Sequence[Request]
    ) -> list[Any]:
        is_full = self.config.method.reads_all and self.config.codec is None
        if requests and not is_full and not any(request.num_rows for request in requests):
            raise UserError(
                f"task {self.task}: no request leaves a decode row, so no method could act; use "
                "prefill=question, or leave the task out"
            )
        if requests:
            say(f"{self.task}: answering {len(requests)} requests", self._bar_file)
        if self._planner.first_cut:
            say(self._planner.first_cut, self._bar_file)
        answered = bar(total=len(requests), desc=self.task, unit="answer", file=self._bar_file)
        with attach(self.loaded.model, self.loaded.prompts) as attached, answered:
            geometry = attached.geometry
            heads = geometry.num_layers * geometry.num_kv_heads
            self.token_bytes = FLOAT_BYTES * heads * geometry.elements
            setup = prepare(self.config, self.loaded, attached, lambda: decode_rows(requests))
            self.method = setup.method
            answers, reads = answer(requests, attached, setup, answered.update)
        self.reads += reads
        return answers

    # Requests of each type

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """As lm-eval's, noting which requests are choices of one document."""
        self._documents = [_document(request) for request in requests]
        for request in requests:
            self._planner.rows[_document(request)] = request.doc
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[Encoded], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        planned = self._planner.choices(self._documents, requests)
        self.requests += planned
        return [(scored.log_likelihood, scored.is_greedy) for scored in self.score(planned)]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """The log-likelihood of whole texts, in disjoint windows of the model's limit, each a
        sequence of its own behind the tokenizer's start."""
        of_texts = []
        for request in requests:
            of_texts.append(self._planner.windows(_document(request), request.args[0]))
        planned = [*chain.from_iterable(of_texts)]
        self.requests += planned
        scores = iter(self.score(planned))
        answers = []
        for windows in of_texts:
            answers.append(sum(score.log_likelihood for score in islice(scores, len(windows))))
        return answers

    @property
    def num_dense(self) -> int:
        """Requests without a decode row, on which no method acts: of a context of one token and a
        continuation of one, or of one token that is generated."""
        return sum(request.num_rows == 0 for request in self.requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Answers, cut at the first stop string. A question that is asked n times has n answers of
        its own."""
        self._planner.rows |= {_document(request): request.doc for request in requests}
        planned = self._planner.in_turns([self._generation(request) for request in requests])
        if not self.repeat:
            self._planned = planned
            self._write(planned)
        elif planned != self._planned:
            raise UserError(
                f"repeats={self.config.sampling.repeats}: task {requests[0].task_name} makes other "
                "prompts each time it is asked; leave repeats out"
            )
        remaining = {}
        for document, written in self.written[self.repeat].items():
            remaining[document] = iter(written)
        answers = []
        for asked in planned:
            answers.append(self.answer(next(remaining[asked.document]).tokens, asked.stops))
        return answers

    def _write(self, planned: Sequence[Request]) -> None:
        """Generate every repeat's answers in one go, so that all share the work on a prompt."""
        asked: list[Request] = []
        for repeat in range(self.config.sampling.repeats):
            times: Counter[Document] = Counter()
            for request in planned:
                # Answers that lm-eval asks for several times are repeats too, by numbers that no
                # other has.
                number = repeat + times[request.document] * self.config.sampling.repeats
                is_drawn = json.loads(request.settings)["do_sample"]
                asked.append(request._replace(repeat=number if is_drawn else 0))
                times[request.document] += 1
        self.requests += asked[: len(planned)]
        answers = iter(self.generate(asked))
        self.written = []
        for _ in range(self.config.sampling.repeats):
            of_repeat: dict[Document, list[Written]] = defaultdict(list)
            for request in planned:
                of_repeat[request.document].append(next(answers))
            self.written.append(of_repeat)

    def _settings_of(self, request: Instance, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of transformers' `generate`: a task's `generation_kwargs`, of which the
        project's settings come first. They hold before the model's own, as in `HFLM`. Raises
        UserError for one that is not offered."""
        settings = self.config.sampling.rule(given)
        for name, value in given.items():
            if name in ("do_sample", "temperature", *OF_DRAWING):
                continue
            is_known = name in vars(GenerationConfig()) and name not in LENGTHS
            if not is_known or (name == "num_return_sequences" and value != 1):
                raise UserError(
                    f"task {request.task_name}: generation_kwargs {name}={value} is not offered"
                )
            settings[name] = value
        return settings

    def _generation(self, request: Instance) -> Request:
        text, given = request.args
        settings: dict[str, Any] = dict(normalize_gen_kwargs(given, MAX_GEN_TOKS))
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        stops = handle_stop_sequences(settings.pop("until"), eos)
        max_new_tokens = settings.pop("max_gen_toks")
        chosen = self._settings_of(request, settings)
        return self._planner.text(
            _document(request), text, max_new_tokens, self._settings.get("max_new_tokens")
        )._replace(
            stops=tuple(stops),
            settings=json.dumps(chosen, sort_keys=True),
            seed=self.config.seed if chosen["do_sample"] else 0,
        )


def _document(request: Instance) -> Document:
    return request.task_name, request.doc_id


def decode_rows(requests: Sequence[Request]) -> list[TokenCounts]:
    """The decode rows on which a method will run, from tokens alone; every request is a sequence of
    its own.

    A generated answer counts with its longest length, as its end is not known before, and by some
    of its rows.
    """
    rows = []
    for request in requests:
        stride = max(1, request.num_rows // ANSWER_ROWS) if request.max_new_tokens else 1
        cached = range(request.prefill_len, request.prefill_len + request.num_rows, stride)
        for count in cached:
            rows.append(TokenCounts(count, request.prefill_len, request.final_length))
    return rows

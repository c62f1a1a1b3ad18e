"""lm-eval's view of a method: an `LM` whose log-likelihoods and texts come from replay.

lm-eval makes prompts and choices, and turns answers into scores. Here its texts become token
requests, which a scorer and a generator answer.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import GenerationConfig

from harness.data.needles import needle_of
from harness.errors import UserError
from harness.model.generation import GenerationRule, Settings
from harness.model.load import LoadedModel
from harness.scoring.answers import Document, NeedleRead, Request, Score
from harness.scoring.model_texts import ModelTexts
from harness.scoring.question import QuestionFinder
from harness.scoring.writing import Written
from harness.settings.task_config import GREEDY, Sampling, SamplingConfig, TaskConfig

MAX_GEN_TOKS = 256
"""lm-eval's default length of an answer, in tokens."""
OF_SAMPLING = ("do_sample", "temperature", "top_p", "top_k")
"""Generation settings that are this project's too."""
LENGTHS = ("max_length", "max_new_tokens")
"""Those of lengths, of which lm-eval has its own."""

CUT_LETTERS = 60
"""Letters of a question that a line shows."""

AS_ASKED = TaskConfig()
AS_THE_TASK = SamplingConfig()

Encoded = tuple[tuple[str, str], list[int], list[int]]
"""(context, continuation) as texts, then the tokens of each: lm-eval's form of a choice."""


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


class ReplayLM(ModelTexts):
    """Answers lm-eval's requests of all three types.

    Args:
        loaded: its tokenizer and length limit are used.
        prefill: which rows are dense.
        scorer: token requests to scores, in order; called once for all requests of a type.
        generator: token requests to their answers, in order.
        sampling, seed: of the answers that are generated.
        about: how it is prompted; with too_long="truncate" a context beyond the model's limit loses
        its beginning behind the start token.

    After a run `requests` holds the token requests in the order in which lm-eval asked, one type
    after another; a text that was scored whole has one for each of its windows. `truncated` holds
    the questions whose context was cut. `written` holds the generated answers of each question, one
    list for each repeat. `needles` holds, for each question of a task that knows where its answer
    stands, what the rows of each of its answers read of it.

    With several repeats `evaluate` asks once for each: the first time all answers are generated,
    and `repeat` says which are returned.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prefill: Prefill,
        scorer: Callable[[Sequence[Request]], Sequence[Score]],
        *,
        generator: Callable[[Sequence[Request]], Sequence[Written]],
        sampling: SamplingConfig = AS_THE_TASK,
        seed: int = 0,
        about: TaskConfig = AS_ASKED,
    ) -> None:
        super().__init__(loaded, about)
        self.max_length = loaded.max_length
        self.requests: list[Request] = []
        self.truncated: set[Document] = set()
        self.repeat = 0
        self.written: list[dict[Document, list[Written]]] = []
        self._model = loaded.model
        self._settings = Settings(loaded.model, {})
        self._known_settings: set[str] = set()
        self._prefill = prefill
        self._scorer = scorer
        self._generator = generator
        self._sampling = sampling
        self._seed = seed
        self._planned: list[Request] = []
        self._documents: list[Document] = []
        self._with_prompt: set[Document] = set()
        self.needles: dict[Document, list[NeedleRead]] = defaultdict(list)
        self._sentences: dict[Document, str] = {}
        self._rows: dict[Document, Any] = {}
        self._first_cut = ""

    # Requests of each type

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """As lm-eval's, noting which requests are choices of one document."""
        self._refuse_thinking(requests)
        for request in requests:
            if request.args == ("", ""):
                raise self._cannot_score(_document(request), (request.args, [], []))
        self._documents = [_document(request) for request in requests]
        for request in requests:
            if request.args[0].strip():
                self._with_prompt.add(_document(request))
        self._note_documents(requests)
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[Encoded], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        contexts = []
        longest: dict[Document, int] = defaultdict(int)
        for document, (_, context, continuation) in zip(self._documents, requests, strict=True):
            fitted = self._fit(document, context, self.max_length + 1 - len(continuation))
            contexts.append(fitted)
            longest[document] = max(longest[document], len(fitted) + len(continuation))
        asked = []
        for document, request, context in zip(self._documents, requests, contexts, strict=True):
            asked.append(self._request(document, request, context, longest[document]))
        planned = self._in_turns(asked)
        self.requests += planned
        answers = []
        scores = self._scorer(planned)
        for (texts, _, _), asked_for, scored in zip(requests, planned, scores, strict=True):
            answers.append((scored.log_likelihood, scored.is_greedy))
            self._note_read(asked_for.document, scored.needle)
            self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """The log-likelihood of whole texts, in disjoint windows of the model's limit, each a
        sequence of its own behind the tokenizer's start."""
        self._refuse_thinking(requests)
        windows, planned = [], []
        for instance in requests:
            of_text = self._windows(_document(instance), instance.args[0])
            windows.append(of_text)
            planned += of_text
        self.requests += planned
        scores = iter(self._scorer(planned))
        answers = []
        for request, text in zip(requests, windows, strict=True):
            answers.append(sum(score.log_likelihood for score in islice(scores, len(text))))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers[-1])
        return answers

    def _windows(self, document: Document, text: str) -> list[Request]:
        if self._prefill.mode == "question":
            raise UserError(
                f"task {document[0]}: scores whole texts, in which prefill=question finds no "
                "question; use prefill=dense or artifact"
            )
        start, of_text = self.start, self.tok_encode(text)[len(self.start) :]
        room = self.max_length - len(start)
        requests = []
        windows = get_rolling_token_windows(of_text, self.prefix_token_id, room, 1)
        for number, window in enumerate(windows):
            context, continuation = make_disjoint_window(window)
            if start:  # in place of the first window's prefix, and before what the others have
                context = [*start, *context] if number else start
            encoded = ("", ""), context, continuation
            final_length = len(context) + len(continuation)
            requests.append(self._request(document, encoded, context, final_length))
        return requests

    @property
    def num_dense(self) -> int:
        """Requests without a decode row, on which no method acts: of a context of one token and a
        continuation of one, or of one token that is generated."""
        return sum(request.num_rows == 0 for request in self.requests)

    def notes(self) -> list[str]:
        """Lines that a run says of its prompts."""
        lines = []
        task = self.requests[0].document[0] if self.requests else None
        if self._first_cut:
            cut = [request for request in self.requests if request.context_len > 1]
            dense = [request.prefill_len for request in cut]
            whole = [request.context_len for request in cut]
            lines.append(
                f"{task}: the dense prompt ends before the question, after "
                f"{_span(dense)} of {_span(whole)} tokens; {self._first_cut}"
            )
        if self.num_dense:
            of_all = f"{self.num_dense} of {len(self.requests)} requests leave no decode row"
            lines.append(f"{task}: {of_all}; they are scored densely, as by the full cache")
        return lines

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Answers, cut at the first stop string. A question that is asked n times has n answers of
        its own."""
        self._note_documents(requests)
        planned = self._in_turns([self._generation(request) for request in requests])
        if not self.repeat:
            self._planned = planned
            self._write(planned)
        elif planned != self._planned:
            raise UserError(
                f"repeats={self._sampling.repeats}: task {requests[0].task_name} makes other "
                "prompts each time it is asked; leave repeats out"
            )
        remaining = {
            document: iter(answers) for document, answers in self.written[self.repeat].items()
        }
        answers = []
        for request, asked in zip(requests, planned, strict=True):
            tokens = next(remaining[asked.document]).tokens
            answers.append(self.answer(tokens, asked.stops))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def _refuse_thinking(self, requests: Sequence[Instance]) -> None:
        """Of continuations and whole texts, before which no thinking comes."""
        if requests and self._about.enable_thinking:
            raise UserError(
                f"enable_thinking=true: task {requests[0].task_name} scores texts, before which "
                "no model thinks; leave it out, or choose tasks whose answers are generated"
            )

    def _write(self, planned: Sequence[Request]) -> None:
        """Generate every repeat's answers in one go, so that all share the work on a prompt."""
        asked: list[Request] = []
        for repeat in range(self._sampling.repeats):
            times: Counter[Document] = Counter()
            for request in planned:
                # Answers that lm-eval asks for several times are repeats too, by numbers that no
                # other has.
                number = repeat + times[request.document] * self._sampling.repeats
                asked.append(
                    request if request.sampling == GREEDY else request._replace(repeat=number)
                )
                times[request.document] += 1
        self.requests += asked[: len(planned)]
        answers = iter(self._generator(asked))
        self.written = []
        for _ in range(self._sampling.repeats):
            of_repeat: dict[Document, list[Written]] = defaultdict(list)
            for request in planned:
                answer = next(answers)
                of_repeat[request.document].append(answer)
                self._note_read(request.document, answer.needle)
            self.written.append(of_repeat)

    def _sampling_of(self, request: Instance, given: Mapping[str, Any]) -> Sampling:
        """The project's settings where they are given, else those of the task's
        `generation_kwargs`."""
        of_task = GREEDY
        if given["do_sample"]:
            temperature = float(given.get("temperature", 1.0))
            top_p, top_k = given.get("top_p"), given.get("top_k")
            of_task = Sampling(
                temperature,
                None if top_p is None else float(top_p),
                None if top_k is None else int(top_k),
            )
        try:
            sampling = self._sampling.rule(of_task)
        except UserError as error:
            raise UserError(f"task {request.task_name}: {error}") from error
        return sampling

    def _further(
        self,
        request: Instance,
        given: Mapping[str, Any],
        sampling: Sampling,
        max_new_tokens: int,
    ) -> str:
        """The other `generation_kwargs` of a task, as JSON: settings of transformers' `generate`,
        which hold before the model's own, as in `HFLM`. Raises UserError for one that is not
        offered."""
        further = {}
        for name, value in given.items():
            if name in OF_SAMPLING or (name == "min_p" and sampling == GREEDY):
                continue
            is_known = name in vars(GenerationConfig()) and name not in LENGTHS
            if not is_known or (name == "num_return_sequences" and value != 1):
                raise UserError(
                    f"task {request.task_name}: generation_kwargs {name}={value} is not offered"
                )
            further[name] = value
        settings = json.dumps(further, sort_keys=True)
        if further and settings not in self._known_settings:
            tried = further | sampling.settings | {"max_new_tokens": max_new_tokens}
            try:
                GenerationRule(self._model, [0], tokenizer=self.tokenizer, **tried)
            except UserError as error:
                where = f"task {request.task_name}: generation_kwargs {settings}"
                raise UserError(f"{where} are not offered ({error})") from error
            self._known_settings.add(settings)
        return settings

    def _generation(self, request: Instance) -> Request:
        text, given = request.args
        settings: dict[str, Any] = dict(normalize_gen_kwargs(given, MAX_GEN_TOKS))
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        stops, max_new_tokens = (
            handle_stop_sequences(settings.pop("until"), eos),
            settings.pop("max_gen_toks"),
        )
        sampling = self._sampling_of(request, settings)
        further = self._further(request, settings, sampling, max_new_tokens)
        document = _document(request)
        whole = self.tok_encode(text) or [self.prefix_token_id]
        context = self._fit(document, whole, self.max_length - max_new_tokens)
        of_model = self._settings.get("max_new_tokens")
        if of_model is not None:  # holds before max_gen_toks, as in `HFLM`
            max_new_tokens = min(of_model, self.max_length - len(context))
        final_length, cut = len(context) + max_new_tokens, len(whole) - len(context)
        prefill_len = self._prefill_len(document, text, cut, len(context), final_length)
        asked = Request(
            tuple(context),
            len(context),
            prefill_len,
            final_length,
            document,
            max_new_tokens,
            tuple(stops),
            settings=further,
            needle=self._needle(document, text, cut),
        )
        return asked if sampling == GREEDY else asked._replace(sampling=sampling, seed=self._seed)

    def _request(
        self, document: Document, encoded: Encoded, context: list[int], final_length: int
    ) -> Request:
        """A continuation to score after `context`, the start and the last tokens of the encoded
        one."""
        (text, _), whole, continuation = encoded
        if not whole or not continuation:
            raise self._cannot_score(document, encoded)
        cut = len(whole) - len(context)
        text = text.rstrip()  # as lm-eval encodes a context
        prefill_len = self._prefill_len(document, text, cut, len(context) - 1, final_length)
        needle = self._needle(document, text, cut)
        ids = (*context, *continuation)
        return Request(ids, len(context), prefill_len, final_length, document, needle=needle)

    def _cannot_score(self, document: Document, encoded: Encoded) -> UserError:
        """Of a context or a continuation that has no token of its own, which lm-eval cannot score
        either."""
        (text, continuation), whole, _ = encoded
        if not continuation:
            why = "is empty"
        elif not whole:
            why = f"follows the context {text!r}, which has no token"
        else:
            last = self.tokenizer.decode(self.tok_encode(text + continuation)[-1:])
            why = f"adds no token to its context, whose end is part of the token {last!r}"
        begin = "let it begin with a space or set target_delimiter in the task's YAML"
        return UserError(f"{_where(document)}: the continuation {continuation!r} {why}; {begin}")

    def _note_documents(self, requests: Sequence[Instance]) -> None:
        """The rows of the questions, and the sentences that hold their answers, of tasks that know
        them."""
        for request in requests:
            self._rows[_document(request)] = request.doc
            sentence = needle_of(request.task_name, request.doc)
            if sentence is not None:
                self._sentences[_document(request)] = sentence

    def _note_read(self, document: Document, needle: NeedleRead | None) -> None:
        if needle is not None:
            self.needles[document].append(needle)

    def _needle(self, document: Document, text: str, cut: int) -> tuple[int, int] | None:
        """The tokens of the sentence that holds the answer, of a context, `cut` tokens of which
        have been left out behind its start: the first, and the one after the last; None where they
        are not all there."""
        sentence = self._sentences.get(document, "")
        begin = text.find(sentence)
        if not sentence or begin < 0 or not self.tokenizer.is_fast:
            return None
        end = begin + len(sentence)
        tokens = []
        for index, (start, stop) in enumerate(self.spans(text)):
            if stop > begin and start < end:
                tokens.append(index - cut)
        is_whole = tokens and tokens[0] >= len(self.start)
        return (tokens[0], tokens[-1] + 1) if is_whole else None

    def _in_turns(self, planned: list[Request]) -> list[Request]:
        """Give the requests that are answered from one cache one T, as a method may keep a share of
        it."""
        if not self._prefill.in_turns:
            return planned
        longest: dict[tuple[int, ...], int] = defaultdict(int)
        for request in planned:
            longest[request.prompt] = max(longest[request.prompt], request.final_length)
        return [request._replace(final_length=longest[request.prompt]) for request in planned]

    def _fit(self, document: Document, context: list[int], most: int) -> list[int]:
        """The last `most` tokens of a context, its start among them, where that is allowed."""
        if len(context) <= most:
            return context
        of_text = most - len(self.start)
        if self._about.too_long == "refuse" or of_text < 1:
            ways = "lower num_fewshot, choose a model with a longer context"
            ways += "" if of_text < 1 else ", or too_long=truncate"
            raise UserError(
                f"{_where(document)}: context and answer have "
                f"{len(context) - most + self.max_length} tokens, "
                f"the model takes {self.max_length}; {ways}"
            )
        self.truncated.add(document)
        return [*context[: len(self.start)], *context[-of_text:]]

    def _prefill_len(
        self, document: Document, text: str, cut: int, most: int, final_length: int
    ) -> int:
        """Dense rows of a context, `cut` tokens of which have been left out behind its start: at
        most `most`, and at least 1."""
        end = most
        if self._prefill.mode == "artifact":
            end = int(final_length * self._prefill.budget)
        elif self._prefill.mode == "question" and (text or document not in self._with_prompt):
            # acc_mutual_info asks for the choices alone, too: their prompt has no word to cut at.
            end = self._question_token(document, text) - cut
            if end <= len(self.start):
                raise self._no_question(document, "nothing before the question is left")
        return max(1, min(end, most))

    def _question_token(self, document: Document, text: str) -> int:
        """The token that holds the first character of a question, in its whole context."""
        try:
            place = self._prefill.finder.find(text, self._rows[document])
        except ValueError as error:
            raise self._no_question(document, str(error)) from error
        if not self.tokenizer.is_fast:
            raise UserError(
                "prefill=question needs a fast tokenizer, which knows where in the text tokens lie"
            )
        if not self._first_cut:
            begins = " ".join(text[place:].split())[:CUT_LETTERS]
            self._first_cut = f"in question {document[1]} before {begins!r}"
        return next(index for index, (_, stop) in enumerate(self.spans(text)) if stop > place)

    def _no_question(self, document: Document, why: str) -> UserError:
        asked, other = "prefill=question", ", or use prefill=dense or artifact"
        if self._prefill.in_turns:
            asked, other = "prefill=both", ""
        return UserError(
            f"{_where(document)}: {asked} finds no end of the context ({why}); set "
            f"question_marker= to the words with which the question begins{other}"
        )


def _document(request: Instance) -> Document:
    return request.task_name, request.doc_id


def _where(document: Document) -> str:
    return f"task {document[0]}, question {document[1]}"


def _span(counts: Sequence[int]) -> str:
    """Counts in words, from the least to the most."""
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least} to {most}"

"""lm-eval's view of a method: an `LM` whose log-likelihoods and texts come from replay.

lm-eval makes prompts and choices, and turns answers into scores. Here its texts become token requests
(`harness.accuracy.encoding`), and a scorer and a generator answer them.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal

import jinja2
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from harness.accuracy.encoding import Encoded, Encoder, Prefill
from harness.accuracy.requests import AnyRequest, Document, GenerationRequest, Request
from harness.accuracy.scoring import Score
from harness.errors import UserError
from harness.model.load import LoadedModel

MAX_GEN_TOKS = 256
"""lm-eval's default length of an answer, in tokens."""

OF_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p")
"""Generation settings that change nothing where the most likely token is taken."""

Chat = list[dict[str, str]]


class ReplayLM(TemplateLM):
    """Answers lm-eval's requests of all three types.

    Args:
        loaded: its tokenizer and length limit are used.
        prefill: which rows are dense.
        scorer: token requests to scores, in order; called once for all requests of a type.
        generator: token requests to the tokens of their answers, alike.
        mean: return a continuation's mean token log-probability, as the artifact does, instead of the sum.
        too_long: whether a context beyond the model's limit is an error or loses its beginning.

    After a run `requests` holds the token requests in the order in which lm-eval asked, one type after another; a text
    that was scored whole has one for each of its windows.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prefill: Prefill,
        scorer: Callable[[Sequence[Request]], Sequence[Score]],
        *,
        generator: Callable[[Sequence[GenerationRequest]], Sequence[list[int]]],
        mean: bool = False,
        too_long: Literal["refuse", "truncate"] = "refuse",
    ) -> None:
        super().__init__()
        self.requests: list[AnyRequest] = []
        self._encoder = Encoder(loaded, prefill, too_long)
        self.tokenizer = self._encoder.tokenizer
        self._name = loaded.name
        self._scorer = scorer
        self._generator = generator
        self._mean = mean
        self._documents: list[Document] = []

    @property
    def num_truncated(self) -> int:
        """Questions whose context has lost its beginning."""
        return len(self._encoder.truncated)

    @property
    def eot_token_id(self) -> int:
        """As `HFLM`: the end-of-sequence token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """As `HFLM`: what an empty context consists of."""
        return self._encoder.prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        """As `HFLM`: what lm-eval names prompts of this chat template by."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """As `HFLM`, see `Encoder.encode`."""
        return self._encoder.encode(string, add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """As `HFLM`; UserError where the model has none."""
        if chat_template:
            self._require_chat_template()
        return super().chat_template(chat_template)

    def apply_chat_template(self, chat_history: Chat, add_generation_prompt: bool = True) -> str:
        """As `HFLM`: turns as one text; a template that knows no system role is tried without that turn."""
        self._require_chat_template()

        def rendered(turns: Chat) -> str:
            return self.tokenizer.apply_chat_template(
                turns,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        try:
            return rendered(chat_history)
        except jinja2.exceptions.TemplateError:
            return rendered([turn for turn in chat_history if turn["role"] != "system"])

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """As lm-eval's, noting which requests are choices of one document."""
        self._documents = [_document(request) for request in requests]
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list[Encoded], **kwargs: Any) -> list[tuple[float, bool]]:
        planned = self._encoder.choices(self._documents, requests)
        self.requests += planned
        answers = []
        for (texts, _, continuation), scored in zip(requests, self._scorer(planned), strict=True):
            divisor = len(continuation) if self._mean else 1
            answers.append((scored.log_likelihood / divisor, scored.is_greedy))
            self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """As `HFLM`: the log-likelihood of whole texts, in disjoint windows of the model's limit."""
        windows = [self._encoder.windows(_document(each), list(self._windows(each.args[0]))) for each in requests]
        planned = [window for text in windows for window in text]
        self.requests += planned
        scores = iter(self._scorer(planned))
        answers = []
        for request, text in zip(requests, windows, strict=True):
            answers.append(sum(score.log_likelihood for score in islice(scores, len(text))))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers[-1])
        return answers

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        tokens, longest = self.tok_encode(text), self._encoder.max_length
        yield from map(make_disjoint_window, get_rolling_token_windows(tokens, self.prefix_token_id, longest, 1))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """As `HFLM`: greedy answers, cut at the first stop string."""
        planned = [self._generation(request) for request in requests]
        self.requests += planned
        answers = []
        for request, asked, tokens in zip(requests, planned, self._generator(planned), strict=True):
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            answers.append(postprocess_generated_text(text, list(asked.stops), None))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def _generation(self, request: Instance) -> GenerationRequest:
        context, given = request.args
        settings: dict[str, Any] = dict(normalize_gen_kwargs(given, MAX_GEN_TOKS))
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        stops, max_new_tokens = handle_stop_sequences(settings.pop("until"), eos), settings.pop("max_gen_toks")
        if settings["do_sample"]:
            raise UserError(
                f"task {request.task_name}: samples its answers (temperature={settings.get('temperature', 1)}), only "
                "the most likely token is offered; give a task of your own (include_path) do_sample: false"
            )
        for name, value in settings.items():
            if name not in OF_SAMPLING and (name, value) != ("num_beams", 1):
                raise UserError(f"task {request.task_name}: generation_kwargs {name}={value} is not offered")
        return self._encoder.generation(_document(request), context, max_new_tokens, stops)

    def _require_chat_template(self) -> None:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise UserError(
                f"apply_chat_template=true: model {self._name} has no chat template; choose one that was trained to "
                "chat, or apply_chat_template=false"
            )


def _document(request: Instance) -> Document:
    return request.task_name, request.doc_id

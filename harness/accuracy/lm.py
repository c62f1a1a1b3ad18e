"""lm-eval's view of a method: an `LM` whose log-likelihoods are computed in replay.

lm-eval makes prompts and choices, and turns log-likelihoods into accuracy. Here its texts become token requests, with
the rows that attend densely chosen by `Prefill`, and a scorer computes them. Tokens are those of lm-eval's own `HFLM`
with default settings, so that the full cache gives HFLM's numbers.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix

from harness.accuracy.requests import Document, Request
from harness.accuracy.scoring import Score
from harness.errors import UserError
from harness.model.load import LoadedModel

FEWSHOT_SEPARATOR = "\n\n"  # lm-eval's default between examples

Encoded = tuple[tuple[str, str], list[int], list[int]]
"""(context, continuation) as texts, then the tokens of each: what lm-eval hands over."""


class Prefill(NamedTuple):
    """Which rows of a request attend densely; the rest are decode rows, on which a method acts.

    mode: `dense`: all but the context's last row, as when serving.
        `question`: the prompt ends before the token that holds the first character of `marker`, so that the cache is
        reduced before the question is known.
        `artifact`: the prompt is decoded too, but for its first floor(T * budget) tokens, as in the paper's Fig 11.
    marker: text with which the question starts; its last occurrence in the context counts.
    budget: share of T that the method keeps.
    """

    mode: str
    marker: str = FEWSHOT_SEPARATOR
    budget: float = 1.0


class ReplayLM(TemplateLM):
    """Scores lm-eval's log-likelihood requests; generation is not offered.

    Args:
        loaded: its tokenizer and length limit are used.
        prefill: which rows are dense.
        scorer: token requests to scores, in order; called once for all requests of an evaluation.
        mean: return a continuation's mean token log-probability, as the artifact does, instead of the sum.

    After a run `requests` holds the token requests in the order in which lm-eval asked.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prefill: Prefill,
        scorer: Callable[[Sequence[Request]], Sequence[Score]],
        *,
        mean: bool = False,
    ) -> None:
        super().__init__()
        if loaded.tokenizer is None:
            raise UserError(f"model {loaded.name} has no tokenizer: tasks are text, choose a model that has one")
        self.tokenizer = loaded.tokenizer
        self.requests: list[Request] = []
        self._max_length = loaded.max_length
        self._prefill = prefill
        self._scorer = scorer
        self._mean = mean
        self._documents: list[Document] = []

    @property
    def eot_token_id(self) -> int:
        """As `HFLM`: the end-of-sequence token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """As `HFLM`: what an empty context consists of."""
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """As `HFLM`: special tokens as the tokenizer adds them, unless the text already begins with the
        prefix token."""
        return self.tokenizer(string, **self._special(string, add_special_tokens), verbose=False)["input_ids"]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """As lm-eval's, noting which requests are choices of one document."""
        self._documents = [(request.task_name, request.doc_id) for request in requests]
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list[Encoded], **kwargs: Any) -> list[tuple[float, bool]]:
        longest: dict[Document, int] = defaultdict(int)
        for document, (_, context, continuation) in zip(self._documents, requests, strict=True):
            longest[document] = max(longest[document], len(context) + len(continuation))
        self.requests = [
            self._request(document, encoded, longest[document])
            for document, encoded in zip(self._documents, requests, strict=True)
        ]
        answers = []
        for (texts, _, continuation), scored in zip(requests, self._scorer(self.requests), strict=True):
            divisor = len(continuation) if self._mean else 1
            answers.append((scored.log_likelihood / divisor, scored.is_greedy))
            self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def _request(self, document: Document, encoded: Encoded, final_length: int) -> Request:
        (text, _), context, continuation = encoded
        where = f"task {document[0]}, question {document[1]}"
        num_rows = len(context) + len(continuation) - 1  # the last token is predicted, not run
        if num_rows > self._max_length:
            raise UserError(
                f"{where}: context and answer have {num_rows} tokens, the model takes {self._max_length}; "
                "lower num_fewshot or choose a model with a longer context"
            )
        prompt_end = self._prompt_end(text, len(context), final_length, where)
        prefill_len = max(1, min(prompt_end, len(context) - 1))
        if num_rows <= prefill_len:
            raise UserError(f"{where}: {num_rows + 1} tokens leave no decode row, so no method could act on it")
        return Request((*context, *continuation), len(context), prefill_len, final_length, document)

    def _prompt_end(self, text: str, context_len: int, final_length: int, where: str) -> int:
        """Where `prefill` ends the prompt, in tokens; the caller sees to it that one token is on either side."""
        if self._prefill.mode == "dense":
            return context_len - 1
        if self._prefill.mode == "artifact":
            return int(final_length * self._prefill.budget)
        end = self._token_of(self._prefill.marker, text.rstrip())  # as lm-eval encodes a context
        if end is None or end < 1:
            raise UserError(
                f"{where}: prefill=question needs {self._prefill.marker!r} inside the context, where the question "
                "starts; use prefill=dense or artifact, or num_fewshot above 0"
            )
        return end

    def _token_of(self, marker: str, context: str) -> int | None:
        """Index of the token that holds the first character of the last `marker`; None where there is none."""
        at = context.rfind(marker)
        if at < 0:
            return None
        if not self.tokenizer.is_fast:
            raise UserError("prefill=question needs a fast tokenizer, which knows where in the text its tokens lie")
        encoded = self.tokenizer(context, **self._special(context), return_offsets_mapping=True, verbose=False)
        return next(index for index, (_, stop) in enumerate(encoded["offset_mapping"]) if stop > at)

    def _special(self, text: str, add_special_tokens: bool | None = None) -> dict[str, bool]:
        if add_special_tokens is not None:
            return {"add_special_tokens": add_special_tokens}
        starts = has_bos_prefix(text, self.tokenizer.decode(self.prefix_token_id))
        return {"add_special_tokens": False} if starts else {}

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Not offered: `experiment=perplexity` measures whole texts."""
        raise UserError("tasks that score whole texts are not offered: use experiment=perplexity corpus.path=FILE")

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Not offered: replay scores given text."""
        raise UserError("tasks that generate text are not offered: choose multiple-choice tasks")

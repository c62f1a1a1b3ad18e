"""What answers a task's requests under a method: the model attached, the method sized for these very rows, replay."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from torch import Tensor
from tqdm import tqdm

from harness.accuracy.batches import OpenSession
from harness.accuracy.generation import generate
from harness.accuracy.requests import AnyRequest, GenerationRequest, Request
from harness.accuracy.scoring import Score, score
from harness.model.attach import Attached, attach
from harness.model.load import LoadedModel
from harness.replay import ReplaySession
from harness.settings.config import RunConfig
from harness.setup import prepare
from harness.sizes import ReadStats
from methods.base import Row

ANSWER_ROWS = 16
"""Of a generated answer's decode rows this many, evenly spaced, are enough to size a method."""


def decode_rows(requests: Sequence[AnyRequest]) -> list[Row]:
    """The decode rows on which a method will run, every request a sequence of its own; made from tokens alone.

    An answer that is generated counts as long as it may become, as where it ends is not known before, and by some of
    its rows.
    """
    return [
        Row(cached, request.prefill_len, request.final_length)
        for request in requests
        for cached in range(request.prefill_len, request.prefill_len + request.num_rows, _stride(request))
    ]


def _stride(request: AnyRequest) -> int:
    return max(1, request.num_rows // ANSWER_ROWS) if isinstance(request, GenerationRequest) else 1


class ReplayEngine:
    """Answers the requests of one task; `reads` is what `method`, as it was sized for the last of them, read."""

    def __init__(self, config: RunConfig, loaded: LoadedModel, task: str, bar_file: TextIO) -> None:
        self.config = config
        self.loaded = loaded
        self.task = task
        self.bar_file = bar_file
        self.reads = ReadStats()
        self.method = config.method

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Log-likelihoods, in the order of `requests`."""
        with self._replay(requests) as (attached, open_session, on_answered):
            scores, reads = score(requests, attached, open_session, on_answered)
        self.reads += reads
        return scores

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """Greedy answers as tokens, in the order of `requests`."""
        tokenizer = self.loaded.tokenizer
        assert tokenizer is not None, "the requests' tokens are its own"
        with self._replay(requests) as (attached, open_session, on_answered):
            answers, reads = generate(requests, attached, open_session, tokenizer, on_answered)
        self.reads += reads
        return answers

    @contextmanager
    def _replay(
        self, requests: Sequence[AnyRequest]
    ) -> Iterator[tuple[Attached, OpenSession, Callable[[int], object]]]:
        """The model attached, what opens sessions of the method sized for `requests`, and a progress bar of answers."""
        bar = tqdm(total=len(requests), desc=self.task, unit="answer", leave=False, disable=None, file=self.bar_file)
        with attach(self.loaded.model) as attached, bar:
            setup = prepare(self.config, self.loaded, attached, lambda: decode_rows(requests))
            self.method = setup.method

            def open_session(final_lengths: Tensor, num_columns: int) -> ReplaySession:
                return ReplaySession(
                    attached,
                    setup.method,
                    codec=setup.codec,
                    calibration=setup.calibration,
                    final_lengths=final_lengths,
                    num_columns=num_columns,
                )

            yield attached, open_session, bar.update

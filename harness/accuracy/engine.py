"""What answers a task's requests under a method: the model attached, the method sized for these very rows, replay."""

from collections.abc import Sequence
from typing import Any, TextIO

from tqdm import tqdm

from harness.accuracy.requests import Request
from harness.accuracy.scoring import Score, score
from harness.model.attach import attach
from harness.model.load import LoadedModel
from harness.replay.session import ReplaySession
from harness.settings.run import RunConfig
from harness.setup import prepare
from harness.sizes import ReadStats
from methods.base import Row


def decode_rows(requests: Sequence[Request]) -> list[Row]:
    """The decode rows on which a method will run, every request a sequence of its own; made from tokens alone."""
    return [
        Row(cached, request.prefill_len, request.final_length)
        for request in requests
        for cached in range(request.prefill_len, len(request.ids) - 1)
    ]


class ReplayEngine:
    """Answers the requests of one task; `reads` is what `method`, as it was sized for them, read."""

    def __init__(self, config: RunConfig, loaded: LoadedModel, task: str, bar_file: TextIO) -> None:
        self.config = config
        self.loaded = loaded
        self.task = task
        self.bar_file = bar_file
        self.reads = ReadStats()
        self.method = config.method

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Log-likelihoods, in the order of `requests`; called once."""
        with (
            attach(self.loaded.model) as attached,
            tqdm(
                total=len(requests),
                desc=self.task,
                unit="answer",
                leave=False,
                disable=None,
                file=self.bar_file,
            ) as bar,
        ):
            setup = prepare(self.config, self.loaded, attached, lambda: decode_rows(requests))
            self.method = setup.method

            def open_session(final_lengths: Any, num_columns: int) -> ReplaySession:
                return ReplaySession(
                    attached,
                    setup.method,
                    codec=setup.codec,
                    calibration=setup.calibration,
                    final_lengths=final_lengths,
                    num_columns=num_columns,
                )

            scores, self.reads = score(requests, attached, open_session, bar.update)
        return scores

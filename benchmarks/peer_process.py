"""What a peer does, timed: questions to kvpress's pipeline.

kvpress asks for transformers < 5.3, so it runs under an interpreter of its own: `Peer` starts this file there and
hands it calls. Nothing of this project is imported here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple


class Took(NamedTuple):
    """Seconds by the clock, and CPU seconds of all threads of the process."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Took:
        """Where both clocks stand."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, before: Took) -> Took:
        """The time from `before` to this one."""
        return Took(self.wall_s - before.wall_s, self.cpu_s - before.cpu_s)


class Timed(NamedTuple):
    """A result and the time it took, where a contestant times a part of its call by itself."""

    took: Took
    result: Any


class Worker:
    """The calls that a peer's process answers, on the model in a folder."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)

    def tokens(self, context: str, question: str) -> list[list[int]]:
        """The tokens of a context and of a question, as the pipeline makes them."""
        found = self.pipeline.preprocess(context, [question], "", 10**10)
        return [found["context_ids"][0].tolist(), found["questions_ids"][0][0].tolist()]

    def ask(self, context: str, question: str, presses: list[list[Any]], max_new_tokens: int) -> Timed:
        """The answer under each press: (class, settings). A call of the pipeline each, tokenization included."""
        import kvpress

        answers = []
        began = Took.now()
        for name, settings in presses:
            press = getattr(kvpress, name)(**settings)
            asked = self.pipeline(context, question=question, press=press, max_new_tokens=max_new_tokens)
            answers.append(asked["answer"])
        return Timed(Took.now().since(began), answers)

    @cached_property
    def pipeline(self) -> Any:
        from kvpress import KVPressTextGenerationPipeline

        return KVPressTextGenerationPipeline(model=self.model, tokenizer=self.tokenizer)


def serve(folder: str, threads: int) -> None:
    """Answer calls, a line of JSON each, until stdin ends."""
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer
    torch.set_num_threads(threads)
    worker = Worker(folder)
    for line in sys.stdin:
        name, settings = json.loads(line)
        try:
            answer = {"result": getattr(worker, name)(**settings)}
        except Exception as error:  # told to whoever asked
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


class PeerError(Exception):
    """A call that failed in the peer's process."""


class Peer:
    """A process under the peers' interpreter, until the block ends."""

    def __init__(self, python: str, folder: str, threads: int) -> None:
        self.python = python
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([python, __file__, folder, str(threads)], **pipes)

    def call(self, name: str, **settings: Any) -> Any:
        """A method of `Worker`. Raises PeerError where it fails, with the package's own words."""
        with suppress(BrokenPipeError):
            print(json.dumps([name, settings]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise PeerError(f"{self.python} ended with code {self.process.wait()}; its message is above")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{answer['error']} (under {self.python})")
        return answer["result"]

    def timed(self, name: str, **settings: Any) -> Timed:
        """A method of `Worker` that times itself."""
        took, result = self.call(name, **settings)
        return Timed(Took(*took), result)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # the process ends with its stdin


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))

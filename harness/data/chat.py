"""Turns of a chat as one text, by the tokenizer's chat template.

A template is a program that comes with the model. It may run forever, and may make text that is no
text; either is refused in one line.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from harness.errors import UserError

MOST_SECONDS = 30.0
"""What a template takes at most. It usually takes a thousandth of a second."""


class _TimeIsOverError(Exception):
    """Raised in the thread whose time is over."""


def chat_text(
    tokenizer: Any,
    turns: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    model: str = "",
    **options: Any,
) -> str:
    """The turns as one text; without `add_generation_prompt` the last one is left open.

    model: its name, for errors. options: of the template, such as enable_thinking. Raises UserError
    for a template that takes longer than `MOST_SECONDS`, or that makes no UTF-8 text. What the
    template itself raises comes as it is.
    """
    with _limited(MOST_SECONDS, f"model {model}: its chat template takes more than"):
        text = tokenizer.apply_chat_template(
            turns,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **options,
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        letter = ascii(text[error.start])
        raise UserError(
            f"model {model}: its chat template makes {letter}, which is no UTF-8 text; choose "
            "apply_chat_template=false or another model"
        ) from None
    return str(text)


@contextmanager
def _limited(seconds: float, what: str) -> Iterator[None]:
    """Raise UserError in this thread if the block is not done in time. It ends between two steps of
    Python code, so one long step of C code is waited for."""
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    is_done = is_over = False

    def interrupt() -> None:
        nonlocal is_over
        with lock:
            if not is_done:
                is_over = True
                _raise_in(thread, ctypes.py_object(_TimeIsOverError))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except _TimeIsOverError:
        raise UserError(f"{what} {seconds:g} s") from None
    finally:
        with lock:
            is_done = True
        timer.cancel()
        if is_over:
            _raise_in(thread, None)  # where it has not come yet


def _raise_in(thread: ctypes.c_ulong, error: Any) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)

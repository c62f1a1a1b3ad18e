"""Chat templates: text as transformers makes it, a bound in time, and no letters that are no text."""

import threading
import time

import pytest
from tokens import byte_tokenizer

from harness.data import chat
from harness.data.chat import chat_text
from harness.errors import UserError

TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
PLAIN = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def with_template(template: str):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("opens", [True, False])
def test_text_is_that_of_transformers(opens):
    tokenizer = with_template(PLAIN)
    expected = tokenizer.apply_chat_template(
        TURNS, tokenize=False, add_generation_prompt=opens, continue_final_message=not opens
    )
    assert chat_text(tokenizer, TURNS, add_generation_prompt=opens) == expected
    assert expected.endswith("<assistant>" if opens else "Good day")


@pytest.mark.parametrize("is_main", [True, False])
def test_a_template_that_does_not_end_is_ended(is_main, monkeypatch):
    monkeypatch.setattr(chat, "MOST_SECONDS", 0.2)
    tokenizer = with_template(ENDLESS)
    found = []

    def render():
        with pytest.raises(UserError, match=r"^model tiny: its chat template takes more than 0.2 s$"):
            chat_text(tokenizer, TURNS, model="tiny")
        found.append(sum(range(1000)))  # nothing comes later

    if is_main:
        render()
    else:
        thread = threading.Thread(target=render)
        thread.start()
        thread.join(60)
    assert found == [499500]


def test_a_template_in_time_is_not_interrupted_later(monkeypatch):
    monkeypatch.setattr(chat, "MOST_SECONDS", 0.2)
    with chat._limited(0.2, "it took"):
        pass
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass


def test_letters_that_are_no_text_are_refused():
    with pytest.raises(UserError, match=r"^model tiny: its chat template makes '\\ud800', which is no UTF-8 text"):
        chat_text(with_template("{{ 'a\\ud800' }}"), TURNS, model="tiny")

"""Two retrieval tasks made from a seed, so that accuracy can be measured with nothing downloaded.

The cache is reduced before the question is known (`prefill=question`), which separates methods that
can still reach every token from those that have evicted tokens. Each context carries 8 questions.
The 4 choices of a question are values that all occur in the context, so that only recall can tell
them apart, and chance is 0.25.

    kv_recall  24 lines "The code of the {item} is {4 digits}."
    passkey    8 sentences "The secret code of the {item} is {5 digits}." at random places among 8
               sentences of the offline text

`metadata.num_sentences=N` puts N sentences of the offline text among the facts of either, for a
longer context in which small budgets can be had.

The sizes were tuned once on the default model and are frozen. Its full cache is right on 0.83
(standard error 0.04) of 128 questions of kv_recall and 0.87 (0.03) of passkey, with seed 0 and the
text of Python 3.11; contexts have about 340 and 270 tokens.
"""

import random
import re
from functools import cache
from typing import Any, NamedTuple

from harness.data.text import offline_text
from harness.errors import UserError
from harness.settings.config import RunConfig

MARKER = "\nQuestion:"  # where the question of a prompt starts; contexts do not contain it
QUESTIONS_PER_CONTEXT = 8
NUM_CHOICES = 4

ITEMS = """
    apple bottle bridge bucket button cabin camera candle carpet castle chair church clock cloud
    coat compass cotton cradle desert diamond doctor dragon engine farmer feather fence flower
    forest garden guitar hammer harbor helmet hotel island jacket kettle kitchen ladder lantern
    lemon letter library lizard market mirror mountain needle orange oven painter pencil piano
    pillow planet pocket rabbit ribbon river rocket saddle school shadow silver spider spoon
    station statue stone table temple ticket tiger tower train tunnel turtle valley vessel
    village violin wagon wallet whale window winter zebra
""".split()  # noqa: SIM905 (87 lines as a list)


class Question(NamedTuple):
    """One multiple-choice question. Questions with one `context_id` have prompts that start with
    the same context. needle: its sentence that holds the answer."""

    context_id: int
    prompt: str
    choices: list[str]
    gold: int
    needle: str


SUBJECTS = {"kv_recall": "code", "passkey": "secret code"}
"""What the text of a task calls its values."""


def load(task: str, config: RunConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings of lm-eval's task, and its rows. UserError for more sentences than the offline
    text has."""
    settings = {
        "task": task,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "prompt",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",  # choices bring their space
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    count = config.num_samples_of(task)
    assert count is not None, "generated tasks have no end of their own"
    num_sentences = config.task.known.num_sentences
    if num_sentences is not None and num_sentences > len(offline_sentences()):
        most = f"at most {len(offline_sentences())}, the sentences of the offline text"
        raise UserError(f"metadata.num_sentences={num_sentences}: must be {most}")
    made = questions(task, count, config.seed, num_sentences)
    return settings, [question._asdict() for question in made]


def questions(
    task: str, num_questions: int, seed: int, num_sentences: int | None = None
) -> list[Question]:
    """The first questions of a task: the same on every machine, and for every `num_questions`.
    num_sentences: of the offline text in a context; None: as many as the task has by itself."""
    made: list[Question] = []
    while len(made) < num_questions:
        context_id = len(made) // QUESTIONS_PER_CONTEXT
        rng = random.Random(f"{task}/{seed}/{context_id}")
        text, values = _context(task, rng, num_sentences)
        for item in rng.sample(list(values), QUESTIONS_PER_CONTEXT):
            right = values[item]
            others = [code for other, code in values.items() if other != item]
            choices = [right, *rng.sample(others, NUM_CHOICES - 1)]
            rng.shuffle(choices)
            subject = f"{SUBJECTS[task]} of the {item}"
            prompt = f"{text}{MARKER} What is the {subject}?\nAnswer: The {subject} is"
            texts = [f" {code}" for code in choices]
            needle = f"The {subject} is {right}."
            made.append(Question(context_id, prompt, texts, choices.index(right), needle))
    return made[:num_questions]


def _context(
    task: str, rng: random.Random, num_sentences: int | None
) -> tuple[str, dict[str, str]]:
    """A text, and the digits of each of its items."""
    num_items, num_digits = (24, 4) if task == "kv_recall" else (8, 5)
    items = rng.sample(ITEMS, num_items)
    codes = rng.sample(range(10 ** (num_digits - 1), 10**num_digits), num_items)
    values = dict(zip(items, map(str, codes), strict=True))
    lines = [f"The {SUBJECTS[task]} of the {item} is {code}." for item, code in values.items()]
    if task == "passkey":
        number = 8 if num_sentences is None else num_sentences
        lines = rng.sample(offline_sentences(), number) + lines
        rng.shuffle(lines)
        return " ".join(lines), values
    if num_sentences:
        lines += rng.sample(offline_sentences(), num_sentences)
        rng.shuffle(lines)
    return "\n".join(["Here is a list of items and their codes.", *lines]), values


@cache
def offline_sentences() -> list[str]:
    """Plain sentences of the offline text: 40 to 160 letters and simple punctuation from a capital
    to a full stop."""
    found = []
    for paragraph in offline_text().split("\n\n"):
        for sentence in re.split(r"(?<=\.) (?=[A-Z])", " ".join(paragraph.split())):
            if re.fullmatch(r"[A-Z][A-Za-z ,;'()-]{38,158}\.", sentence):
                found.append(sentence)
    return found

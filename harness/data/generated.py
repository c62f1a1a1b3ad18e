"""Tasks made from a seed, so that accuracy can be measured with nothing downloaded. Settings, model
and Python's version decide their questions.

Two ask for facts. The cache is reduced before the question is known (`prefill=question`), which
separates methods that can still reach every token from those that have evicted tokens. Each context
carries 8 questions. The 4 choices of a question are values that all occur in the context, so that
only recall can tell them apart, and chance is 0.25.

    kv_recall  24 lines "The code of the {item} is {4 digits}."
    passkey    8 sentences "The secret code of the {item} is {5 digits}." at random places among 8
               sentences of the offline text

`metadata.num_sentences=N` puts N sentences of the offline text among the facts of either, for a
longer context in which small budgets can be had.

The sizes were tuned once on the default model and are frozen. Its full cache is right on 0.83
(standard error 0.04) of 128 questions of kv_recall and 0.87 (0.03) of passkey, with seed 0 and the
text of Python 3.11; contexts have about 340 and 270 tokens.

`graph_search` needs long working of the model's own: which prize can be reached on a map of one-way
roads.

    Roads:
    - violin leads nowhere.
    - lemon leads to tower, violin.
    - rabbit leads to prize 4821.
    - tower leads to rabbit.
    ...
    Question: Which prize can be reached from lemon?
    Working: lemon leads to tower, violin. tower leads to rabbit. rabbit leads to prize 4821.
    Prize: 4821

The model writes a depth-first search, as two worked examples in the prompt show it: it follows the
first road that leaves a place, and where there is none it goes back to the next road that it has
left out. The prize that the model names last counts. Only one of four prizes can be reached, so a
guess is right in a quarter of the questions. The search needs the roads, which are in the prompt,
and what the model has written so far. `metadata.places` sets the number of places on the map, and
so the length of the working.
"""

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from harness.data.text import offline_text
from harness.errors import UserError
from harness.settings.config import REASONING_TASKS, RunConfig

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
    the same context."""

    context_id: int
    prompt: str
    choices: list[str]
    gold: int


Rows = list[dict[str, Any]]

SUBJECTS = {"kv_recall": "code", "passkey": "secret code"}
"""What the text of a task calls its values."""


def load(task: str, config: RunConfig) -> tuple[dict[str, Any], Rows]:
    """The settings of lm-eval's task, and its rows. UserError for more sentences than the offline
    text has."""
    settings: dict[str, Any] = {
        "task": task,
        "test_split": "test",
        "doc_to_text": "prompt",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    count, known = config.num_samples_of(task), config.task.known
    assert count is not None, "generated tasks have no end of their own"
    if task in REASONING_TASKS:
        settings |= {
            "output_type": "generate_until",
            "doc_to_target": "prize",
            "process_results": judged,
            "generation_kwargs": {
                "until": ["\n\n"],
                "max_gen_toks": TOKENS_OF_PLACE * known.places,
                "do_sample": False,
            },
        }
        return settings, searches(count, known.places, config.seed)
    settings |= {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",  # choices bring their space
    }
    num_sentences = known.num_sentences
    if num_sentences is not None and num_sentences > len(offline_sentences()):
        most = f"at most {len(offline_sentences())}, the sentences of the offline text"
        raise UserError(f"metadata.num_sentences={num_sentences}: must be {most}")
    made = questions(task, count, config.seed, num_sentences)
    return settings, [question._asdict() for question in made]


# Facts


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
            made.append(Question(context_id, prompt, texts, choices.index(right)))
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


# Searches

NUM_PRIZES = 4
"""One at the end of the road from the start; the others in places that no road leads to."""
NUM_EXAMPLES = 2
EXAMPLE_PLACES = 9
"""Places on an example's map, at most."""
TOKENS_OF_PLACE = 16
"""Tokens that an answer may take for each place on the map: twice what its working needs."""
ANSWER = re.compile(r"Prize: (\d+)")


class Map(NamedTuple):
    """roads: where the roads of each place lead to: places, or a prize. start: the place that is
    asked about. prize: the one that can be reached from there."""

    roads: dict[str, list[str]]
    start: str
    prize: str

    @property
    def question(self) -> str:
        """The map and the question, up to where the working begins."""
        lines = ["Roads:"]
        for place in self.roads:
            lines.append(f"- {_road(self.roads, place)}")
        asked = f"Which prize can be reached from {self.start}?"
        return "\n".join(lines) + f"{MARKER} {asked}\nWorking:"


def searches(count: int, places: int, seed: int) -> Rows:
    """The first questions: the same on every machine, and for every `count`."""
    rows = []
    for number in range(count):
        rng = random.Random(f"graph_search/{seed}/{places}/{number}")
        parts = []
        for _ in range(NUM_EXAMPLES):
            shown = made(rng, min(places, EXAMPLE_PLACES))
            parts.append(shown.question + working(shown))
        asked = made(rng, places)
        parts.append(asked.question)
        rows.append({"prompt": "\n\n".join(parts), "prize": asked.prize})
    return rows


def judged(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm-eval's `process_results`: 1 where the prize that an answer names last can be reached."""
    named = ANSWER.findall(results[0])
    return {"acc": float(named[-1:] == [doc["prize"]])}


def made(rng: random.Random, places: int) -> Map:
    """A map of so many places: a road from the start to a prize, places beside it from which no
    road leads on, and the places of the other prizes."""
    words = rng.sample(ITEMS, places)
    prizes = [str(code) for code in rng.sample(range(1000, 10000), NUM_PRIZES)]
    num_others = NUM_PRIZES - 1
    num_blind = (places - num_others) // 3
    others, blind = words[:num_others], words[num_others : num_others + num_blind]
    way = words[num_others + num_blind :]
    roads: dict[str, list[str]] = {}
    for place, following in zip(way, [*way[1:], f"prize {prizes[0]}"], strict=True):
        roads[place] = [following]
    for before, place in zip(rng.sample(way[:-1], num_blind), blind, strict=True):
        roads[before].insert(rng.randrange(2), place)
        roads[place] = []
    for place, prize in zip(others, prizes[1:], strict=True):
        roads[place] = [f"prize {prize}"]
    order = rng.sample(words, places)
    return Map({place: roads[place] for place in order}, way[0], prizes[0])


def working(asked: Map) -> str:
    """A depth-first search as it is to be written, and the prize."""
    steps = []
    waiting = [asked.start]
    while not waiting[-1].startswith("prize "):
        here = waiting.pop()
        steps.append(_road(asked.roads, here))
        waiting += reversed(asked.roads[here])
    return f" {' '.join(steps)}\nPrize: {waiting[-1].removeprefix('prize ')}"


def _road(roads: Mapping[str, Sequence[str]], place: str) -> str:
    others = roads[place]
    return f"{place} leads to {', '.join(others)}." if others else f"{place} leads nowhere."

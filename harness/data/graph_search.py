"""A task whose answer needs long working of the model's own, made from a seed: which prize can be
reached on a map of one-way roads.

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
and what the model has written so far.

`metadata.places` sets the number of places on the map, and so the length of the working.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from harness.data.generated import ITEMS, MARKER
from harness.settings.config import RunConfig

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


def load(config: RunConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings of lm-eval's task, and its rows."""
    places, count = config.task.known.places, config.num_samples_of("graph_search")
    assert count is not None, "generated tasks have no end of their own"
    settings = {
        "task": "graph_search",
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "prize",
        "process_results": judged,
        "generation_kwargs": {
            "until": ["\n\n"],
            "max_gen_toks": TOKENS_OF_PLACE * places,
            "do_sample": False,
        },
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    return settings, questions(count, places, config.seed)


def questions(count: int, places: int, seed: int) -> list[dict[str, Any]]:
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

"""The task graph_search: its maps, its worked answers, and what its script takes for a right prize."""

from __future__ import annotations

import random
import re

import pytest

from harness.data.generated import judged, made, searches, working
from harness.data.tasks import load_suite
from harness.model.load import LoadedModel
from harness.run.compose import load


def prizes_from(roads: dict[str, list[str]], place: str) -> set[str]:
    """All prizes that can be reached, by following every road."""
    if place.startswith("prize "):
        return {place.removeprefix("prize ")}
    return set().union(*(prizes_from(roads, other) for other in roads[place]))


@pytest.mark.parametrize("places", [6, 9, 30, 80])
def test_one_of_four_prizes_can_be_reached(places):
    for doc in searches(10, places, seed=3):
        own = doc["prompt"].rpartition("\n\n")[2]
        lines = re.findall(r"^- (\w+) leads (?:to (.*)|nowhere)\.$", own, re.MULTILINE)
        roads = {place: others.split(", ") if others else [] for place, others in lines}
        start = re.search(r"Which prize can be reached from (\w+)\?\nWorking:$", own)[1]
        assert prizes_from(roads, start) == {doc["prize"]}
        assert len(roads) == own.count("\n- ") == places and own.count("to prize ") == 4
        assert doc["prompt"].count("Question:") == 3 and doc["prompt"].count("Prize: ") == 2


@pytest.mark.parametrize("places", [6, 9, 30])
def test_a_worked_answer_goes_on_where_a_road_leads_and_back_where_none_does(places):
    went_back = 0
    for seed in range(10):
        asked = made(random.Random(seed), places)
        text, answer = working(asked).split("\n")
        steps = text.removeprefix(" ").removesuffix(".").split(". ")
        visited = [step.split()[0] for step in steps]
        assert visited[0] == asked.start and len({*visited}) == len(visited)
        left_out: list[str] = []
        for place, step, following in zip(visited, steps, [*visited[1:], None], strict=True):
            roads = asked.roads[place]
            assert step == f"{place} leads to {', '.join(roads)}" if roads else f"{place} leads nowhere"
            left_out += reversed(roads)
            assert left_out.pop() == following or following is None
            went_back += not roads
        (prize,) = asked.roads[visited[-1]]
        assert answer == f"Prize: {prize.removeprefix('prize ')}"
    assert went_back > 2


def test_the_prize_that_is_named_last_counts():
    doc = {"prize": "12"}
    for text in ("Prize: 12", "a leads to b, c.\nPrize: 34\nPrize: 12.", "Prize: 12 or so"):
        assert judged(doc, [text]) == {"acc": 1.0}, text
    for text in ("Prize: 34", "Prize: 12\nPrize: 34", "prize 12", "", "Prize: 123", "Prize: c"):
        assert judged(doc, [text]) == {"acc": 0.0}, text


def test_the_task_is_made_offline_from_its_seed_and_answers_come_from_the_model():
    config = load(["experiment=tasks", "tasks=[graph_search]", "metadata.places=6", "num_samples=4", "seed=2"])
    task = load_suite(config, LoadedModel.__new__(LoadedModel)).tasks["graph_search"]
    assert task.OUTPUT_TYPE == "generate_until" and task.config.generation_kwargs["max_gen_toks"] == 96
    docs = list(task.test_docs())
    assert docs == searches(7, places=6, seed=2)[:4] != searches(4, places=6, seed=1)
    assert task.doc_to_text(docs[0]) == docs[0]["prompt"]
    assert task.process_results(docs[0], [f"Prize: {docs[0]['prize']}"]) == {"acc": 1.0}

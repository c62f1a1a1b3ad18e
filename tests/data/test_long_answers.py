"""Tasks with long answers from local files: Text2JSON, whose scores are worked out by hand, and LongProc of lm-eval."""

import json

import pytest

from harness.data.tasks import load_suite
from harness.errors import UserError
from harness.scoring.evaluation import run_tasks
from methods.infinigen2 import InfiniGen2
from tests.data.test_tasks import loaded, root, settings, write_rows  # noqa: F401

FLEET = [
    {"name": "Ann's Joy", "captain": "Bo", "year": "1912"},
    {"name": "Heron", "captain": "Cy", "year": "1934"},
]
PROBLEM = (
    "Ann\u2019s Joy was launched in 1912 and sails under Bo. Cy has had the Heron since it was built in 1934.\n"
    "List every ship with its captain and year as JSON: [{name, captain, year}, ...]"
)
ANSWERS = {
    "right, in another order, with a curly apostrophe and a number": (
        [{"captain": "Cy", "name": "Heron", "year": 1934}, FLEET[0] | {"name": "Ann\u2019s Joy"}],
        1.0,
    ),
    "one wrong value": ([FLEET[0], FLEET[1] | {"year": "1943"}], (1 + 3 / 4) / 2),
    "one missing value, one null": (
        [{"name": "Heron", "captain": "Cy"}, FLEET[0] | {"year": None}],
        (1 / 2 + 1 / 2) / 2,
    ),
    "a ship that is not there, and no entry": ([*FLEET, {"name": "Gull"}, 7], 2 / 4),
    "a ship twice": ([*FLEET, FLEET[1]], 2 / 3),
    "half of the ships": (FLEET[:1], 1 / 2),
}
UNREADABLE = {
    "no list": "I cannot.",
    "two lists": "[] or []",
    "cut off": '[{"name": "Heron", "capt',
    "no JSON": "[Heron]",
}


@pytest.fixture
def text2json(root):  # noqa: F811
    """A row, and one that does not count, as two of its ships have one name."""
    twins = [FLEET[0], FLEET[0] | {"year": "1950"}]
    rows = [{"problem": PROBLEM, "answer": json.dumps(entries)} for entries in (FLEET, twins)]
    write_rows(root / "text2json/test.jsonl", rows)
    return root


def test_answers_of_text2json_have_the_scores_of_its_rule(text2json):
    task = load_suite(settings("text2json", root=text2json), None).tasks["text2json"]
    task.build_all_requests()
    (request,) = task.instances
    assert request.args[0] == PROBLEM and request.args[1]["max_gen_toks"] == 1024
    for entries, expected in ANSWERS.values():
        said = f"Here they are: {json.dumps(entries, ensure_ascii=False)}."
        assert task.process_results(request.doc, [said]) == {"score": pytest.approx(expected)}
    for said in UNREADABLE:
        assert task.process_results(request.doc, [said]) == {"score": 0.0}


def test_text2json_runs_under_a_method(text2json, loaded):  # noqa: F811
    config = settings("text2json", root=text2json, method=InfiniGen2(budget=0.3), prefill="dense", num_samples=1)
    outcome = run_tasks(config, loaded)
    metrics, (sample,) = outcome.metrics["text2json"], outcome.samples["text2json"]
    assert metrics["score"] == 0.0 and metrics["num_samples"] == 1 and 0 < metrics["budget"] < 0.5
    context, steps = sample["context_tokens"], int(metrics["generated_tokens"]) - 1
    cached = sum(context + step for step in range(steps))
    shape = loaded.model.config
    token = 2 * 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    assert steps > 5 and metrics["answer_bytes"] == pytest.approx(metrics["budget"] * cached * token)


LONGPROC = {
    "input_prompt": "<table><tr><td>Ann's Joy</td><td>1912</td></tr></table>\nWrite it as TSV.",
    "reference_output": "Ship\tYear\nAnn's Joy\t1912\nHeron\t1934",
    "metadata": "{}",
}


def test_longproc_is_read_from_a_folder_where_it_executes_nothing(root):  # noqa: F811
    write_rows(root / "PrincetonPli/LongProc/html_to_tsv_0.5k/test.jsonl", [LONGPROC])
    name = "longproc_html_to_tsv_0.5k"
    task = load_suite(settings(name, root=root), None).tasks[name]
    task.build_all_requests()
    (request,) = task.instances
    assert request.args[0] == LONGPROC["input_prompt"]
    half = "```tsv\nShip\tYear\nHeron\t1934\n```"
    assert task.process_results(request.doc, [half])["f1"] == pytest.approx(2 / 3)
    for code in ("longproc_countdown_0.5k", "longproc_pseudo_to_code_0.5k", "longproc"):
        with pytest.raises(UserError, match="executes the code that a model writes"):
            load_suite(settings(code, root=root), None)

"""Tasks: generated ones, local rows under lm-eval's prompts, metrics, and what is refused."""

import hashlib
import json
import re
import socket
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from harness.data import generated
from harness.data.generated import MARKER, questions
from harness.data.tasks import load_suite, location, own_tasks
from harness.errors import UserError
from harness.model.load import LoadedModel
from harness.results.samples import clustered_stderr
from harness.run.compose import load
from harness.scoring.evaluation import prefill_of, run_tasks
from harness.settings.config import OFFLINE_TASKS, PAPER_TASKS, TASKS, DataConfig, RunConfig
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from tests.runs import tiny_loaded

MAX_LENGTH = 2048


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    made = tiny_loaded()
    made.model.generation_config.eos_token_id = None
    return made


def refuse(*arguments):
    raise AssertionError("the network was touched")


defaults = cache(lambda: load(["experiment=tasks"]))


def settings(
    *tasks: str, method=None, root: Path | None = None, folder: Path | None = None, task=None, **changes
) -> RunConfig:
    """folder: a user's own task YAML. task: changes of the settings of `config.task`."""
    method = method or Full()
    about = {"method": method, "method_name": type(method).__name__.lower()}
    data = DataConfig("local", str(root)) if root else DataConfig("offline")
    own = replace(defaults().task, include_path=str(folder) if folder else None, **(task or {}))
    return replace(defaults(), **(about | {"tasks": tasks, "data": data, "task": own, "num_samples": 8} | changes))


# Generated tasks


FROZEN = {
    "kv_recall": "311c755543d825ea5edfddd14569ba9687ab611d9fd7717251064e19ca44fe76",
    "passkey": "6a359548e8f3686aec83767c7c9c8484f491e70cbc8c69db41921bb36350904b",
}


@pytest.mark.parametrize("task", FROZEN)
def test_a_generated_question(task, monkeypatch):
    """The same on every machine and Python; a change makes earlier records incomparable."""
    sentences = [f"Sentence number {number} of a text." for number in range(40)]
    monkeypatch.setattr(generated, "offline_sentences", lambda: sentences)
    made = questions(task, 24, seed=0)
    asked = [question[:4] for question in made[:16]]
    assert hashlib.sha256(json.dumps(asked).encode()).hexdigest() == FROZEN[task]
    assert questions(task, 16, seed=0) == made[:16] and questions(task, 1, seed=1)[0].prompt != made[0].prompt
    for number, question in enumerate(made):
        context, asked = question.prompt.split(MARKER)
        assert question.context_id == number // 8
        assert len(set(question.choices)) == 4
        assert all(f" is{choice}." in context for choice in question.choices), "every choice occurs in the context"
        subject = asked.removeprefix(" What is the ").split("?")[0]
        assert context.count(f"The {subject} is{question.choices[question.gold]}.") == 1
        assert context == made[8 * question.context_id].prompt.split(MARKER)[0], "8 questions share a context"
    assert {question.gold for question in made} == {0, 1, 2, 3}


@pytest.mark.parametrize(("task", "usual"), [("kv_recall", 0), ("passkey", 8)])
def test_a_longer_context_has_the_same_facts_among_so_many_sentences(task, usual, monkeypatch):
    sentences = [f"Sentence {number:02} of a text." for number in range(40)]
    monkeypatch.setattr(generated, "offline_sentences", lambda: sentences)

    def context_of(*num_sentences: int) -> str:
        return questions(task, 8, 0, *num_sentences)[0].prompt.split(MARKER)[0]

    fact = re.compile(r"The (?:secret )?code of the \w+ is \d+\.")
    assert context_of(usual) == context_of(), "as many as the task has by itself"
    for number in (0, 30):
        context = context_of(number)
        assert sum(sentence in context for sentence in sentences) == number
        assert sorted(fact.findall(context)) == sorted(fact.findall(context_of()))
    first, last = context.index("Sentence"), context.rindex("Sentence")
    assert context.index("code of") < last and first < context.rindex("code of"), "facts are among the sentences"
    with pytest.raises(UserError, match="metadata.num_sentences=41: must be at most 40, the sentences of"):
        generated.load(task, settings(task, task={"metadata": {"num_sentences": 41}}))


@pytest.mark.parametrize(("method", "codec"), [(Full(), None), (InfiniGen(budget=0.2), None), (Full(), "int2")])
def test_generated_tasks_without_a_network(method, codec, loaded, monkeypatch, tmp_path):
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    calibration = replace(defaults().calibration, num_tokens=200)
    config = settings("kv_recall", "passkey", method=method, codec=codec, num_samples=12, calibration=calibration)
    outcome = run_tasks(config, loaded)
    assert list(outcome.metrics) == ["kv_recall", "passkey"]
    for task, metrics in outcome.metrics.items():
        samples = outcome.samples[task]
        shares = {"budget", "budget_artifact", "device_frac", "resident_frac"}
        assert set(metrics) == {"acc", "acc_stderr", "num_samples", "num_fewshot"} | shares
        assert (metrics["num_samples"], metrics["num_fewshot"]) == (12, 0)
        hits = [float(sample["predicted"] == sample["gold"]) for sample in samples]
        assert metrics["acc"] == sum(hits) / 12
        assert metrics["acc_stderr"] == clustered_stderr(hits, [0] * 8 + [1] * 4)
        for number, (sample, question) in enumerate(zip(samples, questions(task, 12, 0), strict=True)):
            context = question.prompt.split(MARKER)[0]
            assert sample["question"] == number and sample["gold"] == question.gold
            ids = loaded.tokenizer(question.prompt)["input_ids"]
            assert sample["context_tokens"] == len(ids)
            # ".\n" is one token: it holds the marker's first character, so the context's full stop stays out.
            assert loaded.tokenizer.decode(ids[: sample["prefill_len"]]) == context[:-1]
            scores = sample["log_likelihoods"]
            assert len(scores) == 4 and sample["predicted"] == scores.index(max(scores))
        assert metrics["budget"] == 1 if (method, codec) == (Full(), None) else metrics["budget"] < 0.8


@pytest.mark.parametrize(
    ("overrides", "budget"),
    [(["method=full"], 1.0), (["method=int4"], 0.0), (["codec=int4", "method=full"], 0.0), (["codec=int4"], 0.2)],
)
def test_under_a_codec_every_row_of_the_artifacts_prompt_reads_coded_tokens(overrides, budget):
    config = load(["experiment=tasks", "prefill=artifact", "num_samples=1", *overrides])
    assert prefill_of("kv_recall", config, writes=False).budget == budget


def test_the_artifacts_prompt_and_a_budget_are_refused_together():
    with pytest.raises(UserError, match="^budget=0.5: not with prefill=artifact"):
        prefill_of("kv_recall", settings("kv_recall", method=H2O(), prefill="artifact", budget=0.5), writes=False)


# Local rows

ROWS = {
    "copa": {"premise": "It rained.", "choice1": "We left.", "choice2": "We ran.", "question": "effect", "label": 1},
    "openbookqa": {
        "question_stem": "A bird can", "answerKey": "C",
        "choices": {"text": ["fly", "read", "sue", "code"], "label": ["A", "B", "C", "D"]},
    },
    "winogrande": {"sentence": "Ann met Bea and _ smiled.", "option1": "Ann", "option2": "Bea", "answer": "2"},
    "piqa": {"goal": "To cut", "sol1": "use a knife", "sol2": "use a spoon", "label": 0},
    "rte": {"sentence1": "It rains.", "sentence2": "It is wet.", "label": 0},
    "hellaswag": {
        "activity_label": "Roof", "ctx_a": "A man sits.", "ctx_b": "he", "label": "3",
        "endings": ["sings [x] now.", "runs.", "eats.", "naps."],
    },
    "arc_easy": {
        "question": "Which is hot?", "answerKey": "B",
        "choices": {"text": ["ice", "fire", "snow"], "label": ["A", "B", "C"]},
    },
    "lambada": {"text": "He opened the old door"},
    "boolq": {"question": "is it wet", "passage": "Water is wet.", "label": 1},
}  # fmt: skip
PROMPTS = {  # (context, continuation) of each choice, and the right one
    "copa": ([("It rained therefore", "  we left."), ("It rained therefore", "  we ran.")], 1),
    "openbookqa": ([("A bird can", f" {verb}") for verb in ("fly", "read", "sue", "code")], 2),
    "winogrande": ([(f"Ann met Bea and {name}", " smiled.") for name in ("Ann", "Bea")], 1),
    "piqa": ([("Question: To cut\nAnswer:", f" use a {tool}") for tool in ("knife", "spoon")], 0),
    "rte": ([("It rains.\nQuestion: It is wet. True or False?\nAnswer:", f" {word}") for word in ("True", "False")], 0),
    "hellaswag": ([("Roof: A man sits. He", f" {end}") for end in ("sings now.", "runs.", "eats.", "naps.")], 3),
    "arc_easy": ([("Question: Which is hot?\nAnswer:", f" {word}") for word in ("ice", "fire", "snow")], 1),
    "lambada": ([("He opened the old", " door")], 0),
    "boolq": ([("Water is wet.\nQuestion: is it wet?\nAnswer:", f" {word}") for word in ("no", "yes")], 1),
}
LOCAL_TASKS = tuple(ROWS)
ANSWERED: dict[str, Any] = {
    "output_type": "generate_until", "test_split": "test", "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 6},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
"""What the YAML of tasks of one's own says where answers are written."""
FILES = {task: (f"{task}/train.jsonl", f"{task}/validation.jsonl") for task in LOCAL_TASKS} | {
    "openbookqa": tuple(f"openbookqa/{split}.jsonl" for split in ("train", "validation", "test")),
    "hellaswag": ("hellaswag/validation.jsonl",),
    "arc_easy": ("arc_easy/train.jsonl", "arc_easy/test.jsonl"),
    "lambada": ("lambada_openai/test.jsonl",),
}


def write_yaml(folder: Path, *tasks: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for task in tasks:
        (folder / f"{task.get('group', task['task'])}.yaml").write_text(yaml.safe_dump(task))
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A data root with 8 rows in every file; no cache outside the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for task in LOCAL_TASKS:
        for file in FILES[task]:
            write_rows(tmp_path / "data" / file, [ROWS[task] | {"idx": index} for index in range(8)])
    return tmp_path / "data"


def test_every_task_is_declared():
    assert set(own_tasks()) == {*LOCAL_TASKS, "text2json"} == set(TASKS) - set(OFFLINE_TASKS)
    for task, own in own_tasks().items():
        assert own.get("is_ours") or (location() / own["yaml"]).is_file()
        assert own["num_fewshot"] == (5 if task in PAPER_TASKS else 0)


@pytest.mark.parametrize("name", LOCAL_TASKS)
def test_local_rows_under_lm_evals_prompts(name, root, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", refuse)
    task = load_suite(settings(name, root=root), None).tasks[name]
    task.build_all_requests(limit=2)
    prompts, gold = PROMPTS[name]
    first = [instance for instance in task.instances if instance.doc_id == 0]
    for instance, (context, continuation) in zip(first, prompts, strict=True):
        examples, separator, question = instance.args[0].rpartition("\n\n")
        assert (question, instance.args[1]) == (context, continuation)
        assert (examples + separator).count("\n\n") == (5 if name in PAPER_TASKS else 0)
    for right, wrong, acc in ((-1.0, -9.0, 1), (-9.0, -1.0, 0)):
        answers = [(right if index == gold else wrong, index == gold and acc == 1) for index in range(len(prompts))]
        assert task.process_results(first[0].doc, answers)["acc"] == acc


@pytest.mark.parametrize("name", ["openbookqa", "lambada"])
def test_local_tasks_run(name, root, loaded):
    config = settings(name, method=H2O(dense_layers=2), root=root, num_samples=3, prefill="artifact")
    outcome = run_tasks(config, loaded)
    metrics, samples = outcome.metrics[name], outcome.samples[name]
    assert metrics["num_samples"] == 3 and 0.5 < metrics["budget"] < 1
    assert ("acc_norm" in metrics) == (name == "openbookqa")
    assert [sample["gold"] for sample in samples] == [PROMPTS[name][1]] * 3
    assert name == "lambada" or all(each["acc"] == float(each["predicted"] == each["gold"]) for each in samples)


def test_examples_follow_the_seed(root):
    rows = [ROWS["copa"] | {"premise": f"It rained {number}.", "idx": number} for number in range(8)]
    write_rows(root / FILES["copa"][0], rows)
    tasks = [load_suite(settings("copa", root=root, seed=seed), None).tasks["copa"] for seed in (0, 0, 1)]
    for task in tasks:
        task.build_all_requests(limit=1)
    first, again, other = (task.instances[0].args[0] for task in tasks)
    assert first == again != other


def test_a_missing_file_is_named(root, loaded):
    (root / FILES["copa"][-1]).unlink()
    with pytest.raises(UserError, match=f"^data.root={root}: tasks=copa needs validation.jsonl"):
        load_suite(settings("copa", root=root), loaded)


COPA = ROWS["copa"]
BAD_ROWS = {
    "a label of no choice": ("copa", COPA | {"label": 2}, "field 'label' is 2; allowed: 0, 1"),
    "no label": ("copa", COPA | {"label": None}, "field 'label' is None; allowed: 0, 1"),
    "no UTF-8": ("copa", b'{"premise": "\xff"}', "expected an object of JSON (UnicodeDecodeError"),
    "no field of the prompt": ("piqa", {"sol1": "a knife", "sol2": "a spoon", "label": 0}, "field 'goal' is missing"),
    "arc, an empty choice": (
        "arc_easy",
        ROWS["arc_easy"] | {"choices": {"text": ["ice", ""], "label": ["A", "B"]}},
        "its choices are ['ice', '']; must be texts, none of them empty",
    ),
}  # fmt: skip
"""The fourth row of a file, and what is said of it."""


@pytest.mark.parametrize("case", BAD_ROWS)
def test_an_odd_row_is_named_by_file_and_line(case, root, loaded):
    task, row, message = BAD_ROWS[case]
    path = root / FILES[task][-1]
    lines = path.read_bytes().splitlines()
    lines[3] = row if isinstance(row, bytes) else json.dumps(row).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(UserError) as error:
        run_tasks(settings(task, root=root), loaded)
    said = str(error.value)
    assert re.match(f"{path}, (line|row) 4: ", said) and message in said and "\n" not in said


@pytest.mark.parametrize("labels", [[0, 1, -1], [0, 1, 1]])
def test_a_split_of_the_hub_without_labels_is_named(labels, loaded, monkeypatch):
    features = datasets.Features({name: datasets.Value("string") for name in COPA if name != "label"})
    features["label"] = datasets.ClassLabel(names=["choice1", "choice2"])
    rows = datasets.Dataset.from_list([COPA | {"label": label} for label in labels], features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name: {"train": rows.select([0, 1]), "validation": rows})
    config = settings("copa", data=DataConfig("hub"), num_fewshot=0, num_samples=None)
    if -1 in labels:
        said = r"^data=hub: aps/super_glue, split validation, row 3: tasks=copa: has no label \(-1\)"
        with pytest.raises(UserError, match=said):
            run_tasks(config, loaded)
        return
    assert run_tasks(config, loaded).metrics["copa"]["num_samples"] == 3
    with pytest.raises(UserError, match="^num_fewshot=3: copa has no rows for so many .* split train of data=hub"):
        run_tasks(replace(config, num_fewshot=3), loaded)


@pytest.mark.parametrize("text", ["{lines}", "[{list}]"])
def test_text_of_a_file_stands_in_the_prompt_as_it_is(text, root, loaded, tmp_path):
    """Where `datasets` itself would make a time of a day, and of a number."""
    values = [{"day": "2019-03-04", "code": "007", "count": 12}, {"day": "2021-11-30", "code": "{}", "count": 7}]
    lines = [json.dumps(row) for row in values]
    path = tmp_path / "rows.json"
    path.write_text(text.format(lines="\n".join(lines) + "\n", list=",".join(lines)))
    named = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}}
    task = ANSWERED | {"task": "mine", "doc_to_text": "{{day}} {{code}} {{count}}", "doc_to_target": "day"} | named
    config = settings("mine", folder=write_yaml(tmp_path / "own", task))
    made = load_suite(config, loaded).tasks["mine"]
    made.build_all_requests()
    assert [request.args[0] for request in made.instances] == ["2019-03-04 007 12", "2021-11-30 {} 7"]
    path.write_text('{"day": 1, "code": 2, "count": 3}\n{"day": "a", "code": 2, "count": 3}\n')
    with pytest.raises(UserError, match=r"rows.json: a field has values of several types \(ArrowInvalid"):
        load_suite(config, loaded)

"""lm-eval's own evaluation of a method has the numbers of `experiment=tasks`; its command line."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.tasks import TaskManager

import harness
from harness.api import method_lm
from harness.errors import UserError
from harness.results.record import read_all
from tests.conftest import refused
from tests.tiny_models import tiny_model
from tests.tokens import byte_tokenizer

CHOICE: dict[str, Any] = {
    "output_type": "multiple_choice", "test_split": "test", "doc_to_text": "{{question}}",
    "doc_to_choice": "{{options}}", "doc_to_target": "label", "metric_list": [{"metric": "acc"}],
}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "mine_short": CHOICE,
    "mine_long": CHOICE | {"doc_to_text": "{{question}} Say it. {{question}} Say it again. {{question}}"},
    "mine_text": {
        "output_type": "generate_until", "test_split": "test", "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_target": "it", "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
    "mine_whole": {
        "output_type": "loglikelihood_rolling", "test_split": "test", "doc_to_text": "",
        "doc_to_target": "{{question}}", "metric_list": [{"metric": "bits_per_byte"}],
    },
}  # fmt: skip
"""A short and a long one of choices, so that a budget that both share is the budget of neither."""
SETTINGS: dict[str, Any] = {"method": "streaming", "budget": "nearest:0.6", "prefill": "dense", "temperature": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Task YAML that names its own file of rows."""
    folder = tmp_path_factory.mktemp("tasks")
    options = ["red", "a blue one", "it"]
    rows = [{"question": f"What is number {n}, {'x' * n}?", "options": options, "label": n % 3} for n in range(6)]
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, task in TASKS.items():
        named = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(named | task))
    return folder


@pytest.fixture(scope="module")
def model() -> harness.Model:
    network = tiny_model("llama", num_key_value_heads=2, max_position_embeddings=512)
    network.generation_config.eos_token_id = None
    return harness.load(network, byte_tokenizer())


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory) -> Path:
    """The same model as files."""
    folder = tmp_path_factory.mktemp("model")
    model.loaded.model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """lm-eval's command looks at the tasks of --include_path alone, since reading all takes ten seconds, and writes
    nothing about the machine, for which it lists all packages."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)


def project_samples(model: harness.Model, folder: Path, results: Path, **more: Any) -> dict[str, Any]:
    """By task, what `experiment=tasks` records of each question."""
    settings = {name: value for name, value in SETTINGS.items() if name != "method"} | more
    where = {"include_path": str(folder), "results_dir": str(results)}
    model.tasks(list(TASKS), methods=["streaming"], **where, **settings)
    (record,) = read_all(results)
    return record["samples"] | {"budgets": {name: record["metrics"][name]["budget"] for name in TASKS}}


def test_log_likelihoods_and_texts_are_those_of_experiment_tasks(model, folder, tmp_path, capfd):
    expected = project_samples(model, folder, tmp_path)
    lm = harness.lm(model, **SETTINGS)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(model=lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    for name in ("mine_short", "mine_long"):
        for sample, other in zip(expected[name], found["samples"][name], strict=True):
            assert sample["log_likelihoods"] == [answer[0] for answer in other["filtered_resps"]]
            assert sample["acc"] == other["acc"]
    for sample, other in zip(expected["mine_text"], found["samples"]["mine_text"], strict=True):
        assert sample["text"] == other["resps"][0][0]
    assert any(sample["text"] for sample in expected["mine_text"])
    for sample, other in zip(expected["mine_whole"], found["samples"]["mine_whole"], strict=True):
        assert sample["log_likelihood"] == other["filtered_resps"][0]
    budgets = {name: shares["budget"] for name, shares in found["config"]["shares"].items()}
    assert budgets == expected["budgets"] and set(budgets) == set(TASKS)
    assert f"mine_long: Streaming read {budgets['mine_long']:.1%} of the cache" in capfd.readouterr().err


def test_a_file_of_answers_is_refused(model, folder, tmp_path):
    """lm-eval's key is a request's texts: one method's answers came back as another's."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    lm = harness.lm(model, method="full")
    with refused("use_cache: .*leave it out"):
        lm_eval.simple_evaluate(model=lm, tasks=["mine_short"], task_manager=manager, use_cache=str(tmp_path / "kept"))


# The command line


def evaluate(folder: Path, model_args: str, *options: str) -> int:
    return method_lm.main(["--include_path", str(folder), "--model", "kv", "--model_args", model_args, *options])


def test_the_command_line_has_the_same_numbers_and_lm_evals_options(checkpoint, model, folder, tmp_path, capsys):
    expected = project_samples(model, folder, tmp_path / "results", num_samples=4)
    arguments = ",".join([f"pretrained={checkpoint}", *(f"{name}={value}" for name, value in SETTINGS.items())])
    options = ["--tasks", "mine_short", "--limit", "4", "--log_samples", "--batch_size", "4"]
    assert evaluate(folder, arguments, *options, "--output_path", str(tmp_path / "out")) == 0
    assert "|mine_short|" in capsys.readouterr().out
    (results,) = (tmp_path / "out").rglob("results_*.json")
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    written = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(written) == 4 and json.loads(results.read_text())["config"]["method"] == "Streaming"
    for sample, other in zip(expected["mine_short"], sorted(written, key=lambda line: line["doc_id"]), strict=True):
        assert sample["log_likelihoods"] == [float(answer[0]) for answer in other["filtered_resps"]]


REFUSED = {
    "method=h2o": "missing 1 required positional argument: 'pretrained'",
    "pretrained=smollm2": "model=smollm2: did you mean 'smollm2-135m'",
    "pretrained=MODEL,trust_remote_code=no": "model.trust_remote_code=no: must be true or false",
    "pretrained=MODEL,apply_chat_template=no": "apply_chat_template='no': lm-eval decides it",
    "pretrained=MODEL,tokenizer=gpt2": "tokenizer=gpt2: the model has its own; leave it out",
    "pretrained=MODEL,load_in_8bit=true": "unknown setting load_in_8bit: ",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_wrong_model_args_are_one_line_and_exit_code_2(arguments, checkpoint, folder, capfd):
    arguments, said = arguments.replace("MODEL", str(checkpoint)), REFUSED[arguments]
    assert evaluate(folder, arguments, "--tasks", "mine_short") == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line


def test_model_args_are_those_of_the_command_line(checkpoint):
    words = f"pretrained={checkpoint},platform=cpu,method=full,codec=int8,value_codec=null,seed=3"
    made = method_lm.KVModel.create_from_arg_string(words, {"batch_size": 1, "device": method_lm.DEFAULT_DEVICE})
    assert (made.config.codec_name, made.config.seed, made.config.platform.name) == ("int8", 3, "cpu")
    with pytest.raises(UserError, match="platform=cuda:1: did you mean"):
        method_lm.KVModel.create_from_arg_string(f"pretrained={checkpoint}", {"device": "cuda:1"})


def test_what_lm_eval_refuses_is_one_line(checkpoint, folder, capfd):
    assert evaluate(folder, f"pretrained={checkpoint},method=full,prefill=dense", "--tasks", "nothing") == 2
    assert "error: lm-eval refuses it (ValueError: Tasks not found: nothing" in capfd.readouterr().err

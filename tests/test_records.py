"""Records: identity, atomic writing, damage, and what a run leaves in every way it can end."""

import json
import math
import os

import pytest

from harness.data.text import offline_text, text_sha256
from harness.errors import UserError
from harness.launch import runner
from harness.records import environment, inputs
from harness.records import record as records
from harness.settings.compose import load
from tests.runs import outcome, stand_in


@pytest.fixture
def runs(monkeypatch):
    return stand_in(monkeypatch)


@pytest.fixture
def command(tmp_path):
    return [f"results_dir={tmp_path / 'results'}", "method=h2o"]


def identity(*overrides, digests=None):
    return records.run_id(load(overrides), digests or {})


# identity


@pytest.mark.parametrize(
    "same",
    [["results_dir=/elsewhere"], ["label=mine"], ["num_samples=7"], ["tasks=passkey"], ["scoring=mean"]],
)
def test_run_id_ignores(same):
    assert identity(*same) == identity()


@pytest.mark.parametrize(
    "other",
    [
        ["method=full"],
        ["method.alpha=inf"],
        ["seq_len=512"],
        ["seed=1"],
        ["codec=int4"],
        ["target_kv_frac=0.2"],
        ["experiment=fig12"],
        ["model=opt-125m"],
        ["calibration.num_tokens=512"],
    ],
)
def test_run_id_depends_on(other):
    assert identity(*other) != identity()


def test_run_id_of_tasks_ignores_windows_and_depends_on_questions():
    tasks = "experiment=tasks"
    assert identity(tasks, "seq_len=512", "num_windows=9") == identity(tasks)
    assert identity(tasks, "num_samples=7") != identity(tasks)


def test_run_id_depends_on_contents_not_on_places(tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    for path in (one, two):
        path.write_text("the same text")
    configs = [load([f"corpus.path={path}"]) for path in (one, two)]
    first, second = (records.run_id(config, inputs.digests(config)) for config in configs)
    assert first == second
    two.write_text("another text")
    assert records.run_id(configs[1], inputs.digests(configs[1])) != first


def test_inputs_of_local_data(tmp_path):
    (tmp_path / "copa").mkdir()
    config = load(["experiment=tasks", "data=local", f"data.root={tmp_path}", "tasks=[passkey,copa]"])
    with pytest.raises(UserError, match=f"data.root={tmp_path}: tasks=copa needs"):
        inputs.digests(config)
    (tmp_path / "copa" / "train.jsonl").write_text("{}\n")
    first = inputs.digests(config)
    assert set(first) == {"model", "calibration", "passkey", "copa"}
    assert first["passkey"] == text_sha256(offline_text())
    (tmp_path / "copa" / "train.jsonl").write_text('{"changed": 1}\n')
    assert inputs.digests(config)["copa"] != first["copa"]


def test_inputs_of_a_model_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = load([f"model.path={tmp_path}"])
    first = inputs.digests(config)["model"]
    (tmp_path / "notes.md").write_text("not read by the model")
    assert inputs.digests(config)["model"] == first
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert inputs.digests(config)["model"] != first
    assert "model" not in inputs.digests(load(["model=opt-125m"]))


# files


def test_infinite_settings_are_words_and_infinite_numbers_are_refused(tmp_path):
    assert records.plain(load(["method.alpha=inf"]))["method"]["alpha"] == "inf"
    with pytest.raises(ValueError):
        records.write_record(tmp_path / "record.json", {"metrics": {"perplexity": math.nan}})
    assert list(tmp_path.iterdir()) == []


def test_a_write_cut_short_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    records.write_atomic(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        records.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "runs" / "record.json"
    with pytest.raises(UserError, match=f"results_dir: {path} cannot be written \\(Not a directory\\)"):
        records.write_atomic(path, "")


DAMAGED = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "a list": lambda text: "[1]",
    "another schema": lambda text: text.replace('"schema": 1', '"schema": 0'),
    "an unknown status": lambda text: text.replace('"finished"', '"fine"'),
    "another run's": lambda text: text.replace('"run_id": "', '"run_id": "0'),
    "binary": lambda text: "\x00" + text,
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_is_named_kept_and_run_again(damage, runs, command, capsys, caplog):
    path = runner.run(load(command))
    damaged = damage(path.read_text())
    path.write_text(damaged)

    assert records.read_records(path.parents[3], "perplexity") == []
    assert str(path) in caplog.text
    assert runner.run(load(command)) == path

    assert len(runs.configs) == 2
    assert records.read_record(path)["status"] == "finished"
    assert (path.parent / "record.damaged-1.json").read_text() == damaged
    said = capsys.readouterr().out
    assert said.startswith(f"{path}: damaged record") and "record.damaged-1.json" in said


def test_damaged_records_are_numbered(tmp_path):
    path = tmp_path / "record.json"
    for text in ("first", "second"):
        path.write_text(text)
        records.set_aside(path)
    assert [(tmp_path / f"record.damaged-{n}.json").read_text() for n in (1, 2)] == ["first", "second"]


# how a run may end


def test_a_finished_run_is_recorded_whole_and_skipped_after(runs, command, capsys):
    config = load([*command, "label=mine"])
    path = runner.run(config)
    record = records.read_record(path)
    measured = outcome(config)
    assert (record["metrics"], record["samples"], record["chunks"]) == (
        measured.metrics,
        measured.samples,
        measured.chunks,
    )
    assert record["config"]["method"] == {"num_exempt_layers": 2, "heavy_frac": 0.1, "recent_frac": 0.1}
    assert record["config"]["label"] == "mine" and record["seconds"] > 0 and record["error"] is None
    assert record["inputs"].keys() == {"model", "calibration", "corpus"}
    assert record["environment"]["device"] == "cpu" and record["environment"]["num_threads"] >= 1
    before = path.read_bytes()

    assert runner.run(config) == path
    assert len(runs.configs) == 1 and path.read_bytes() == before
    assert f"finished before, skipped; delete {path.parent} to repeat" in capsys.readouterr().out


def test_a_new_label_renames_a_finished_run(runs, command):
    path = runner.run(load(command))
    assert runner.run(load([*command, "label=mine"])) == path
    assert runner.run(load(command)) == path
    assert len(runs.configs) == 1
    assert records.read_record(path)["config"]["label"] == "mine"


def test_a_failed_run_says_why_and_is_repeated(runs, command, capsys):
    def fail(config):
        raise UserError("the text is too short")

    runs.measure = fail
    with pytest.raises(UserError, match="the text is too short"):
        runner.run(load(command))
    (record,) = records.read_records(load(command).results_dir, "perplexity")
    assert record["status"] == "failed" and record["error"] == "UserError: the text is too short"
    runs.measure = outcome
    runner.run(load(command))
    assert "failed before (UserError: the text is too short), run again" in capsys.readouterr().out
    (record,) = records.read_records(load(command).results_dir, "perplexity")
    assert record["status"] == "finished" and record["error"] is None


def test_a_number_that_is_none_fails_the_run(runs, command):
    runs.measure = lambda config: records.Outcome({"offline": {"perplexity": math.inf}})
    with pytest.raises(ValueError):
        runner.run(load(command))
    (record,) = records.read_records(load(command).results_dir, "perplexity")
    assert record["status"] == "failed" and record["metrics"] == {}


def test_an_interrupted_run_is_recorded_as_such(runs, command, capsys):
    def interrupt(config):
        raise KeyboardInterrupt

    runs.measure = interrupt
    with pytest.raises(KeyboardInterrupt):
        runner.run(load(command))
    (record,) = records.read_records(load(command).results_dir, "perplexity")
    assert record["status"] == "interrupted"
    runs.measure = outcome
    runner.run(load(command))
    assert "interrupted before, run again" in capsys.readouterr().out


class OutOfMemoryError(RuntimeError):
    """torch.OutOfMemoryError by name; the real one has no constructor without CUDA everywhere."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "lower"),
    [("perplexity", "lower seq_len=1024 or num_windows=4"), ("tasks", "lower num_fewshot")],
)
def test_out_of_memory_names_the_setting_to_lower(error, kind, lower, runs, command):
    def exhaust(config):
        raise error

    runs.measure = exhaust
    with pytest.raises(UserError, match=f"out of memory: {lower}, or choose a smaller model"):
        runner.run(load([*command, f"experiment={kind}"]))


def test_torch_says_what_we_listen_for():
    import torch

    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        torch.empty(2**50)
    assert torch.OutOfMemoryError.__name__ == "OutOfMemoryError"


def test_what_a_method_refuses_at_run_time_is_the_users(runs, command):
    def refuse(config):
        raise ValueError("method.kv_frac=0.01: keeps 1 of 100 tokens")

    runs.measure = refuse
    with pytest.raises(UserError, match="^method.kv_frac=0.01: keeps 1 of 100 tokens$"):
        runner.run(load(command))


def test_an_unwritable_results_folder_stops_before_any_work(runs, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="results_dir: .* cannot be written"):
        runner.run(load([f"results_dir={tmp_path / 'file'}"]))
    assert runs.loads == runs.configs == []


def test_a_process_keeps_the_last_model(runs, command):
    for more in (
        ["method=full"],
        ["method=streaming"],
        ["model=opt-125m"],
        ["model=opt-125m", "method=full"],
    ):
        runner.run(load([*command[:1], *more]))
    assert runs.loads == ["smollm2-135m", "opt-125m"]


def test_report_updates_tables_and_returns_one(runs, command):
    path = runner.run(load([*command, "label=mine"]))
    assert "mine" in runner.report([path, path])
    assert (path.parents[3] / "tables" / "perplexity.csv").read_text().count("\n") > 1


# environment


def test_environment_is_json_and_knows_the_packages():
    found = environment.describe("cpu")
    assert json.loads(json.dumps(found)) == found
    assert found["packages"]["torch"] and found["num_cores"] >= 1
    assert environment.describe()["num_threads"] is None


def test_environment_without_git_or_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "_from_proc", lambda *_: None)
    found = environment.describe()
    assert (found["commit"], found["dirty"], found["memory_bytes"]) == (None, None, None)

"""Records: identity, atomic writing, damage, and what a run leaves in every way it can end."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest

from harness import files
from harness.data.text import offline_text
from harness.errors import UserError
from harness.files import text_sha256
from harness.launch import runner
from harness.launch.runner import Run
from harness.model import source
from harness.model.source import PACKAGED_SHA256
from harness.records import code, environment, inputs
from harness.records import record as records
from harness.resources import Resources
from harness.settings.experiment import Outcome
from tests.composed import load
from tests.runs import outcome, stand_in, start

CODE = ("code:method", "code:harness")


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
    [
        ["results_dir=/elsewhere"],
        ["label=mine"],
        ["num_samples=7"],
        ["tasks=passkey"],
        ["scoring=mean"],
        ["seed=1"],
        ["batch_size=2"],
        ["platform.overlap=false"],
        ["model.device=cpu"],
        ["model.dtype=float32"],
    ],
)
def test_run_id_ignores(same):
    assert identity(*same) == identity()


@pytest.mark.parametrize(
    "other",
    [
        ["method=full"],
        ["method.alpha=inf"],
        ["seq_len=512"],
        ["codec=int4"],
        ["method=int4", "group_size=32"],
        ["platform=cuda"],
        ["size=0.2"],
        ["experiment=fig12"],
        ["model=opt-125m"],
        ["calibration.num_tokens=512"],
    ],
)
def test_run_id_depends_on(other):
    assert identity(*other) != identity()


def test_a_cpu_and_a_gpu_make_two_runs_of_every_kind():
    for kind in ("perplexity", "tasks", "latency", "fig5"):
        ids = {identity(f"experiment={kind}", f"platform={name}") for name in ("cpu", "cuda")}
        assert len(ids) == 2, kind


@pytest.mark.parametrize(("kind", "differs"), [("tasks", True), ("latency", True), ("perplexity", False)])
def test_the_seed_counts_where_something_is_drawn(kind, differs):
    assert (identity(f"experiment={kind}") != identity(f"experiment={kind}", "seed=1")) == differs


def test_data_plays_no_part_in_latency():
    assert identity("experiment=latency", "data=hub", "corpus=wikitext2") == identity("experiment=latency")


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
    (tmp_path / "copa" / "validation.jsonl").write_text("{}\n")
    first = inputs.digests(config)
    assert set(first) == {*CODE, "model", "calibration", "passkey", "copa"}
    assert first["passkey"] == text_sha256(offline_text())
    (tmp_path / "copa" / "validation.jsonl").write_text('{"changed": 1}\n')
    assert inputs.digests(config)["copa"] != first["copa"]


def test_inputs_of_a_model_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    config = load([f"model.path={tmp_path}"])
    first = inputs.digests(config)["model"]
    (tmp_path / "notes.md").write_text("not read by the model")
    assert inputs.digests(config)["model"] == first
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert inputs.digests(config)["model"] != first


def test_inputs_of_a_hub_model_are_its_revision(monkeypatch):
    revisions = []
    monkeypatch.setattr(source, "snapshot", lambda hub_id, with_code: Path("x") / revisions[-1])
    ids = []
    for revision in ("1" * 40, "2" * 40):
        revisions.append(revision)
        config = load(["model=opt-125m"])
        found = inputs.digests(config)
        assert found["model"] == revision
        ids.append(records.run_id(config, found))
    assert ids[0] != ids[1]


def test_nothing_is_fetched_for_what_reads_no_weights(monkeypatch):
    monkeypatch.setattr(source, "snapshot", lambda *_, **__: pytest.fail("a download"))
    monkeypatch.setattr(source, "hub_file", lambda *_: Path("snapshots/abc/config.json"))
    for overrides in (["experiment=fig2"], ["experiment=latency", "model.weights=random"]):
        assert "model" not in inputs.digests(load(["model=opt-125m", *overrides]))
    shapeless = ["experiment=latency", "model.hub_id=org/other", "model.weights=random"]
    assert inputs.digests(load(shapeless))["model"] == "abc"
    assert inputs.digests(load([]))["model"] == PACKAGED_SHA256


# files


def test_infinite_settings_are_words_and_infinite_numbers_are_refused(tmp_path):
    assert records.plain(load(["method.alpha=inf"]))["method"]["alpha"] == "inf"
    with pytest.raises(ValueError):
        records.write_record(tmp_path / "record.json", {"metrics": {"perplexity": math.nan}})
    assert list(tmp_path.iterdir()) == []


def test_a_write_cut_short_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_atomic(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        files.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "runs" / "record.json"
    with pytest.raises(UserError, match=f"results_dir: {path} cannot be written \\(Not a directory\\)"):
        files.write_atomic(path, "")


DAMAGED = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "a list": lambda text: "[1]",
    "another schema": lambda text: text.replace('"schema": 3', '"schema": 1'),
    "an unknown status": lambda text: text.replace('"finished"', '"fine"'),
    "another run's": lambda text: text.replace('"run_id": "', '"run_id": "0'),
    "binary": lambda text: "\x00" + text,
    "a number changed": lambda text: text.replace('"nll": 2.5', '"nll": 2.4'),
    "a metric changed": lambda text: text.replace('"perplexity": 12.5', '"perplexity": 11.5', 1),
    "a setting changed": lambda text: text.replace('"heavy_frac": 0.1', '"heavy_frac": 0.2'),
    "without digest": lambda text: text.replace('"digest": "', '"other": "'),
    "a number that is none": lambda text: text.replace('"nll": 2.5', '"nll": NaN'),
    "a number beyond all": lambda text: text.replace('"nll": 2.5', '"nll": 1e999'),
    "deep": lambda text: "[" * 10**5,
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_is_named_kept_and_run_again(damage, runs, command, capsys, caplog):
    path = start(command)
    whole = path.read_text()
    damaged = damage(whole)
    assert damaged != whole
    path.write_text(damaged)

    assert records.read_records(path.parents[3], "perplexity") == []
    assert str(path) in caplog.text
    assert start(command) == path

    assert len(runs.configs) == 2
    assert records.read_record(path)["status"] == "finished"
    assert (path.parent / "record.damaged-1.json").read_text() == damaged
    said = capsys.readouterr().out
    assert said.startswith(f"{path}: damaged record") and "record.damaged-1.json" in said


def as_schema_2(path, **changed):
    """Write the record at `path` as before records had digests; a field given as `...` is left out."""
    record = json.loads(path.read_text()) | {"schema": 2, "digest": ...} | changed
    path.write_text(json.dumps({name: value for name, value in record.items() if value is not ...}))


def test_a_record_of_schema_2_is_read_and_has_a_digest_once_it_is_written_again(runs, command):
    path = start(command)
    as_schema_2(path)
    assert start(command) == path and len(runs.configs) == 1
    start([*command, "label=mine"])
    assert len(runs.configs) == 1
    path.write_text(path.read_text().replace('"mine"', '"yours"'))
    with pytest.raises(UserError, match="changed since it was written"):
        records.read_record(path)


LACKING = {
    "no label": {"config": {"method_name": "h2o"}},
    "no inputs": {"inputs": ...},
    "no error": {"error": ...},
    "a run's method of another type": {"method_module": 3},
    "metrics that are a list": {"metrics": [1]},
    "metrics of a text that are a number": {"metrics": {"offline": 3}},
    "chunks of another type": {"chunks": [[1]]},
    "a status that is a list": {"status": ["finished"]},
    "inputs without digests": {"inputs": {"model": None}},
    "another shape": {"table": "board"},
    "metrics of another shape": {"table": "latency"},
    "points of another shape": {"table": "analysis", "metrics": {"source": "measured", "points": [{"x": 1}]}},
}


@pytest.mark.parametrize("changed", LACKING.values(), ids=LACKING)
def test_a_record_that_lacks_a_part_is_damaged(changed, runs, command, caplog):
    path = start(command)
    as_schema_2(path, **changed)
    assert records.read_records(path.parents[3], "perplexity") == []
    (said,) = caplog.messages
    assert str(path) in said and "\n" not in said and len(said) < len(str(path)) + 120
    assert start(command) == path and len(runs.configs) == 2
    assert "mine" in runner.report([start([*command, "label=mine"])])


def test_damaged_records_take_the_first_free_number(tmp_path):
    path = tmp_path / "record.json"
    (tmp_path / "record.damaged-2.json").write_text("kept")
    for text in ("first", "second"):
        path.write_text(text)
        records.set_aside(path)
    assert [(tmp_path / f"record.damaged-{n}.json").read_text() for n in (1, 2, 3)] == ["first", "kept", "second"]


def test_two_processes_that_set_aside_at_once_keep_both(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    path.write_text("ours")
    free = records.aside
    taken = [True]

    def aside(path):
        place = free(path)
        if taken:
            place.write_text(f"theirs {taken.pop()}")  # between the look and the move
        return place

    monkeypatch.setattr(records, "aside", aside)
    assert records.set_aside(path).name == "record.damaged-2.json"
    assert (tmp_path / "record.damaged-1.json").read_text() == "theirs True"
    assert (tmp_path / "record.damaged-2.json").read_text() == "ours"
    with pytest.raises(FileNotFoundError):
        records.set_aside(path)
    assert len(list(tmp_path.iterdir())) == 2


# how a run may end


def test_a_finished_run_is_recorded_whole_and_skipped_after(runs, command, capsys):
    settings = [*command, "label=mine"]
    config = load(settings)
    path = start(settings)
    record = records.read_record(path)
    measured = outcome(config)
    assert (record["metrics"], record["samples"], record["chunks"]) == (
        measured.metrics,
        measured.samples,
        measured.chunks,
    )
    assert record["config"]["method"] == {"num_exempt_layers": 2, "heavy_frac": 0.1, "recent_frac": 0.1}
    assert record["config"]["label"] == "mine" and record["seconds"] > 0 and record["error"] is None
    assert record["inputs"].keys() == {*CODE, "model", "calibration", "corpus"}
    assert record["environment"]["device"] == "cpu" and record["environment"]["num_threads"] >= 1
    before = path.read_bytes()

    assert start(settings) == path
    assert len(runs.configs) == 1 and path.read_bytes() == before
    assert f"finished before, skipped; delete {path.parent} to repeat" in capsys.readouterr().out


def test_a_new_label_renames_a_finished_run(runs, command):
    path = start(command)
    assert start([*command, "label=mine"]) == path
    assert start(command) == path
    assert len(runs.configs) == 1
    assert records.read_record(path)["config"]["label"] == "mine"


def test_a_failed_run_says_why_and_is_repeated(runs, command, capsys):
    def fail(config):
        raise UserError("the text is too short")

    runs.measure = fail
    with pytest.raises(UserError, match="the text is too short"):
        start(command)
    (record,) = records.read_records(load(command).results_dir, "perplexity")
    assert record["status"] == "failed" and record["error"] == "UserError: the text is too short"
    runs.measure = outcome
    start(command)
    assert "failed before (UserError: the text is too short), run again" in capsys.readouterr().out
    (record,) = records.read_records(load(command).results_dir, "perplexity")
    assert record["status"] == "finished" and record["error"] is None


def test_a_number_that_is_none_fails_the_run(runs, command):
    runs.measure = lambda config: Outcome({"offline": {"perplexity": math.inf}})
    with pytest.raises(ValueError):
        start(command)
    (record,) = records.read_records(load(command).results_dir, "perplexity")
    assert record["status"] == "failed" and record["metrics"] == {}


def test_an_interrupted_run_is_recorded_as_such(runs, command, capsys):
    def interrupt(config):
        raise KeyboardInterrupt

    runs.measure = interrupt
    with pytest.raises(KeyboardInterrupt):
        start(command)
    (record,) = records.read_records(load(command).results_dir, "perplexity")
    assert record["status"] == "interrupted"
    runs.measure = outcome
    start(command)
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
    [
        ("perplexity", "lower seq_len=1024 or num_windows=4"),
        ("tasks", "lower num_fewshot"),
        ("long_decode", "lower max_new_tokens=256 or prefill_len=256"),
    ],
)
def test_out_of_memory_names_the_setting_to_lower(error, kind, lower, runs, command):
    def exhaust(config):
        raise error

    runs.measure = exhaust
    with pytest.raises(UserError, match=f"out of memory: {lower}, or choose a smaller model"):
        start([*command, f"experiment={kind}"])


def test_torch_says_what_we_listen_for():
    import torch

    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        torch.empty(2**50)
    assert torch.OutOfMemoryError.__name__ == "OutOfMemoryError"


def test_what_a_method_refuses_at_run_time_is_the_users(runs, command):
    def refuse(config):
        raise ValueError("method.kept_frac=0.01: keeps 1 of 100 tokens")

    runs.measure = refuse
    with pytest.raises(UserError, match="^method.kept_frac=0.01: keeps 1 of 100 tokens$"):
        start(command)


def test_an_unwritable_results_folder_stops_before_any_work(runs, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="results_dir: .* cannot be written"):
        start([f"results_dir={tmp_path / 'file'}"])
    assert runs.loads == runs.configs == []


def test_a_process_keeps_the_last_model(runs, command):
    resources = Resources()
    for more in (
        ["method=full"],
        ["method=streaming"],
        ["model=opt-125m"],
        ["model=opt-125m", "method=full"],
    ):
        start([*command[:1], *more], resources)
    assert runs.loads == ["smollm2-135m", "opt-125m"]


def test_looking_at_a_run_changes_nothing(runs, command):
    """Neither a damaged record nor a new label is touched before the run begins."""
    path = start(command)
    before = path.read_bytes()
    assert Run.of(load([*command, "label=mine"])).is_finished() and path.read_bytes() == before
    path.write_text("{")
    todo = Run.of(load(command))
    assert not todo.is_finished() and "record.damaged-1.json, run again" in todo.why_again()
    assert [file.name for file in path.parent.iterdir()] == ["record.json"] and path.read_text() == "{"


def test_a_run_is_looked_at_once(runs, command, monkeypatch):
    asked = []
    digests = inputs.digests
    monkeypatch.setattr(inputs, "digests", lambda config: asked.append(config) or digests(config))
    start(command)
    assert len(asked) == 1


# code


@pytest.fixture
def sources(monkeypatch, tmp_path):
    """A copy of the sources whose digests count; the real ones run."""
    for name in ("harness", "methods"):
        shutil.copytree(code.ROOT / name, tmp_path / "sources" / name)
    monkeypatch.setattr(code, "ROOT", tmp_path / "sources")
    return tmp_path / "sources"


def edit(file, text):
    """Append to a source, at another time."""
    file.write_text(file.read_text() + text)
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))


IN_ALL = (
    "methods/base.py", "methods/codec.py", "harness/replay.py", "harness/model/decoder.py",
    "harness/data/text.py",
)  # fmt: skip


@pytest.mark.parametrize("file", ["methods/h2o.py", "harness/accuracy/perplexity.py", *IN_ALL])
def test_a_change_of_the_code_makes_another_run_of_the_same_settings(sources, file):
    config = load(["method=h2o"])
    before = inputs.digests(config)
    edit(sources / file, "\nMORE = 1\n")
    after = inputs.digests(config)
    assert records.run_id(config, before) != records.run_id(config, after)
    assert records.settings_id(config, before) == records.settings_id(config, after)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("methods/h2o.py", '\n# a comment\n"""words"""\n'),
        ("methods/streaming.py", "\nMORE = 1\n"),
        ("harness/speed/cell.py", "\nMORE = 1\n"),
        ("harness/tables/write.py", "\nMORE = 1\n"),
        ("harness/launch/runner.py", "\nMORE = 1\n"),
    ],
)
def test_words_and_the_code_of_others_do_not_count(sources, file, text):
    config = load(["method=h2o"])
    before = inputs.digests(config)
    edit(sources / file, text)
    assert inputs.digests(config) == before


def test_a_method_is_its_module_and_all_of_methods_that_it_imports():
    names = {module: {file.stem for file in code.method_files(f"methods.{module}")} for module in ("h2o", "infinigen")}
    assert {"h2o", "base"} <= names["h2o"] and not {"infinigen", "streaming"} & names["h2o"]
    assert {"infinigen", "selection", "base"} <= names["infinigen"]


def test_the_core_of_the_harness_is_there():
    assert all((code.ROOT / "harness" / name).exists() for name in code.CORE)
    files = {str(file.relative_to(code.ROOT)) for file in code.harness_files(["accuracy"])}
    harness = {f"harness/{name}" for name in ("accuracy/scoring.py", "data/own_tasks.yaml", "offload/links.py")}
    assert harness | {"methods/codec.py"} <= files


def test_a_run_of_other_code_is_named_and_run_again(runs, command, sources, capsys):
    old = start(command)
    edit(sources / "methods/h2o.py", "\nMORE = 1\n")
    new = start(command)
    assert new != old and len(runs.configs) == 2
    said = f"perplexity H2O: made by other code (record {old.parent.name}), run again\n"
    assert said in capsys.readouterr().out
    both = records.read_records(old.parents[3], "perplexity")
    assert {record["settings_id"] for record in both} == {old.parent.name.partition("-")[0]}
    assert [record["run_id"] for record in records.current(both)] == [new.parent.name]


def test_the_record_of_the_present_code_counts_before_a_newer_one(runs, command, sources):
    path = start(command)
    (record,) = records.read_records(path.parents[3], "perplexity")
    later = record | {"run_id": "later", "started": "2999-01-01", "inputs": record["inputs"] | {"code:method": "0"}}
    for order in ([record, later], [later, record]):
        assert records.current(order) == [record]
    edit(sources / "methods/h2o.py", "\nMORE = 1\n")
    assert records.current([record, later]) == [later], "neither is of the present code: the newest"
    assert records.current([record | {"status": "failed"}]) == []
    gone = later | {"method_module": "methods.gone", "kind": "gone"}
    assert records.current([gone]) == [gone], "of a method and a kind that are no more"


def test_report_updates_tables_and_returns_one(runs, command):
    path = start([*command, "label=mine"])
    assert "mine" in runner.report([path, path])
    assert (path.parents[3] / "tables" / "perplexity.csv").read_text().count("\n") > 1


# environment


def test_environment_is_json_and_knows_the_packages():
    found = environment.describe(["cpu"])
    assert json.loads(json.dumps(found)) == found
    assert found["packages"]["torch"] and found["num_cores"] >= 1
    assert environment.describe()["num_threads"] is None


def test_environment_without_git_or_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "_from_proc", lambda *_: None)
    found = environment.describe()
    assert (found["commit"], found["dirty"]) == (None, None) and found["memory_bytes"] > 2**20

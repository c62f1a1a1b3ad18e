"""Records: identity, atomic writing, damage, and the record that a run leaves in every way it can end."""

import json
import math
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from harness.data.text import offline_text
from harness.errors import UserError
from harness.files import text_sha256
from harness.model import source
from harness.model.source import PACKAGED_SHA256
from harness.results import environment, inputs
from harness.results import record as records
from harness.run import runner
from harness.run.cli import main
from harness.run.compose import load
from harness.run.runner import digests_of
from harness.settings.kinds import Outcome
from tests.runs import outcome, start

CODE = ("code:sources",)
H2O = ["method=h2o"]
MORE = "\nMORE = 1\n"


@pytest.fixture
def sources(monkeypatch, tmp_path):
    """A copy of the sources whose digests count; the real ones run."""
    for name in ("harness", "methods"):
        shutil.copytree(inputs.PACKAGES_DIR / name, tmp_path / "sources" / name)
    monkeypatch.setattr(inputs, "PACKAGES_DIR", tmp_path / "sources")
    return tmp_path / "sources"


def edit(file, text):
    """Append to a source; a process that starts now reads it."""
    file.write_text(file.read_text() + text)
    inputs.source_line.cache_clear()


# Identity


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("", "results_dir=/elsewhere", True),
        ("", "label=mine", True),
        ("", "num_samples=7 tasks=passkey batch_size=2 platform.overlap=false", True),
        ("", "model.device=cpu model.dtype=float32", True),
        ("experiment=latency", "data=hub corpus=wikitext2", True),
        ("experiment=tasks", "num_samples=7", False),
        ("experiment=latency", "seed=1", False),
        ("experiment=latency", "platform.host_gib=100", True),
        ("experiment=capacity platform.device_gib=1", "platform.host_gib=100", False),
        ("", "method=full", False),
        ("", "method.alpha=inf", False),
        ("", "codec=int4", False),
        ("method=int4", "group_size=32", False),
        ("experiment=fig5", "seq_len=99", True),
        ("experiment=fig5", "analysis.num_tokens=99", False),
        ("", "budget=0.2", False),
        ("", "model=opt-125m", False),
        ("", "calibration.num_tokens=512", False),
        *((f"experiment={kind}", "platform=cuda", False) for kind in ("perplexity", "tasks", "fig5")),
    ],
)
def test_the_settings_that_make_another_run(one, other, same):
    first, second = (records.run_id(load(settings.split()), {}) for settings in (one, f"{one} {other}"))
    assert (first == second) == same


def test_contents_make_another_run_and_paths_do_not(tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"

    def identity(path: Path) -> str:
        config = load([f"corpus.path={path}"])
        return records.run_id(config, digests_of(config))

    for path in (one, two):
        path.write_text("the same text")
    first = identity(one)
    assert identity(two) == first
    two.write_text("another text")
    assert identity(two) != first


def test_inputs_of_local_data(tmp_path):
    (tmp_path / "copa").mkdir()
    config = load(["experiment=tasks", "data=local", f"data.root={tmp_path}", "tasks=[passkey,copa]"])
    with pytest.raises(UserError, match=f"data.root={tmp_path}: tasks=copa needs"):
        digests_of(config)
    (tmp_path / "copa" / "validation.jsonl").write_text("{}\n")
    first = digests_of(config)
    assert set(first) == {*CODE, "model", "calibration", "passkey", "copa"}
    assert first["passkey"] == text_sha256(offline_text())
    (tmp_path / "copa" / "validation.jsonl").write_text('{"changed": 1}\n')
    assert digests_of(config)["copa"] != first["copa"]


def test_inputs_of_a_model_are_its_files_or_its_revision(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    config = load([f"model.path={tmp_path}"])
    first = digests_of(config)["model"]
    (tmp_path / "notes.md").write_text("not read by the model")
    assert digests_of(config)["model"] == first
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert digests_of(config)["model"] != first
    monkeypatch.setattr(source, "snapshot", lambda hub_id, with_code: Path("x") / ("1" * 40))
    assert digests_of(load(["model=opt-125m"]))["model"] == "1" * 40
    assert digests_of(load([]))["model"] == PACKAGED_SHA256


def test_nothing_is_fetched_for_a_run_that_reads_no_weights(monkeypatch):
    monkeypatch.setattr(source, "snapshot", lambda *_, **__: pytest.fail("a download"))
    monkeypatch.setattr(source, "hub_file", lambda *_: Path("snapshots/abc/config.json"))
    for overrides in (["experiment=fig2"], ["experiment=latency", "model.weights=random"]):
        assert "model" not in digests_of(load(["model=opt-125m", *overrides]))
    shapeless = ["experiment=latency", "model.hub_id=org/other", "model.weights=random"]
    assert digests_of(load(shapeless))["model"] == "abc"


# Code


def test_the_code_that_makes_another_run_of_the_same_settings(sources):
    config = load(["method=h2o"])
    before = digests_of(config)
    for file, text, counts in (
        *((f"methods/{name}.py", MORE, True) for name in ("h2o", "evicting", "codecs/turbo")),
        ("methods/quest.py", MORE, False),
        *((f"harness/{name}.py", MORE, True) for name in ("scoring/perplexity", "replay/session", "data/text")),
        *((f"harness/{name}.py", MORE, True) for name in ("settings/config", "results/samples")),
        ("methods/codecs/int4.yaml", MORE, True),
        ("methods/h2o.py", "\n# a comment\n", True),
        *((f"harness/{name}.py", MORE, False) for name in ("speed/timed_run", "run/runner")),
    ):
        unchanged = (sources / file).read_text()
        edit(sources / file, text)
        after = digests_of(config)
        assert (records.run_id(config, before) != records.run_id(config, after)) == counts == (before != after), file
        assert records.settings_id(config, before) == records.settings_id(config, after)
        (sources / file).write_text(unchanged)


def test_a_run_of_other_code_is_named_and_run_again_and_the_newest_counts(runs, sources, capsys):
    old = start(H2O)
    edit(sources / "methods/h2o.py", MORE)
    new = start(H2O)
    assert new != old and len(runs.configs) == 2
    said = f"perplexity H2O: made by other code (record {old.parent.name}), run again\n"
    assert said in capsys.readouterr().out
    first, second = (records.read_record(path) for path in (old, new))
    assert first["settings_id"] == second["settings_id"] == old.parent.name.partition("-")[0]
    later = first | {"started": "2999-01-01"}
    for order in ([later, second], [second, later]):
        assert records.current(order) == [later]
    assert records.current([second | {"status": "failed"}]) == []


# Values and damage


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_the_users_in_one_line_and_fails_the_run(value, runs):
    runs.measure = lambda config: Outcome({"offline": {"kl_nats": 0.1, "perplexity": value}})
    with pytest.raises(UserError, match="^a metric is NaN or infinite, [^\n]*$"):
        start(H2O)
    (record,) = records.read_records("outputs", "perplexity")
    assert record["status"] == "failed" and record["metrics"] == {} and "bug" not in record["error"]
    runs.measure = lambda config: Outcome({"offline": {"kl_nats": 0.1}}, {"windows": [{"nll": value}]})
    with pytest.raises(UserError, match="^a metric is NaN"):
        start(H2O)
    assert records.plain(load(["method.alpha=inf"]))["method"]["alpha"] == "inf", "a setting may be infinite"


def rewritten(**changed):
    """A record with other fields, `...` for none, and the digest that fits."""

    def damage(text):
        record = {name: value for name, value in (json.loads(text) | changed).items() if value is not ...}
        return json.dumps(record | {"digest": records._digest(record)})

    return damage


DAMAGED = {
    "truncated": lambda text: text[: len(text) // 2],
    "another run's": rewritten(run_id="0"),
    "a number changed": lambda text: text.replace('"nll": 2.5', '"nll": 2.4'),
    "not a number": lambda text: text.replace('"nll": 2.5', '"nll": NaN'),
    "of another version": rewritten(schema=records.SCHEMA - 1),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_is_refused_in_one_line_that_names_it(damage, runs, capsys):
    """By whatever reads it: another run of the folder, which is recorded nonetheless, and its own."""
    path = start(H2O)
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    assert main(["method=int4"]) == 2 and main(H2O) == 2 and len(runs.configs) == 2
    refusals = capsys.readouterr().err.splitlines()
    assert len(refusals) == 2 and path.read_text() == damaged
    for refusal in refusals:
        assert refusal.startswith(f"error: {path}: ") and refusal.endswith("; delete it, and its run is done again")
        assert len(refusal) < len(str(path)) + 180
    path.unlink()
    assert main(H2O) == 0 and records.read_record(path)["status"] == "finished"


# How a run may end


def test_a_finished_run_is_recorded_whole_skipped_after_and_renamed(runs, capsys):
    heavy = [*H2O, "method.heavy_frac=0.05"]
    path = start(heavy)
    config = load(heavy)
    record = records.read_record(path)
    assert record.items() >= asdict(outcome(config)).items()
    assert record["config"]["method"] == {
        "dense_layers": 0, "heavy_frac": 0.05, "recent_frac": 0.1, "kept_tokens": None,
    }  # fmt: skip
    assert record["settings"] == {"heavy_frac": 0.05}
    assert record["config"]["label"] == "H2O" and record["seconds"] > 0 and record["error"] is None
    assert record["inputs"].keys() == {*CODE, "model", "calibration", "corpus"}
    assert record["environment"]["device"] == "cpu" and record["environment"]["num_threads"] >= 1
    before = path.read_bytes()
    assert start(heavy) == path
    assert len(runs.configs) == 1 and path.read_bytes() == before
    assert f"finished before, skipped; delete {path.parent} to repeat" in capsys.readouterr().out
    assert start([*heavy, "label=mine"]) == path and len(runs.configs) == 1
    assert records.read_record(path)["config"]["label"] == "mine"
    assert "mine" in runner.report([path, path])
    assert (path.parents[3] / "tables" / "perplexity.csv").read_text().count("\n") > 1


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("the text is too short"), "failed", "the text is too short"),
        (KeyError("x"), "failed", "KeyError: 'x'"),
        (KeyboardInterrupt(), "interrupted", None),
    ],
)
def test_a_run_that_did_not_finish_says_why_and_is_repeated(error, status, said, runs, capsys):
    runs.measure = Mock(side_effect=error)
    with pytest.raises(type(error)):
        start(H2O)
    (record,) = records.read_records("outputs", "perplexity")
    assert (record["status"], record["error"]) == (status, said)
    runs.measure = outcome
    start(H2O)
    assert f"{status} before{f' ({said})' if said else ''}, run again" in capsys.readouterr().out
    (record,) = records.read_records("outputs", "perplexity")
    assert record["status"] == "finished" and record["error"] is None


class OutOfMemoryError(RuntimeError):
    """torch.OutOfMemoryError by name; the real one has no constructor without CUDA everywhere."""


CPU_FULL = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (MemoryError(), "perplexity", "out of memory: lower seq_len=1024 or num_windows=4, or choose a smaller model"),
        (OutOfMemoryError("CUDA out of memory."), "tasks", "out of memory: lower num_fewshot, or choose a smaller"),
        (RuntimeError(CPU_FULL), "long_decode", "out of memory: lower prefill_len=512 or max_new_tokens=256 or num_"),
    ],
)
def test_what_a_user_can_mend_is_one_line_that_names_the_setting(error, kind, message, runs, capsys):
    runs.measure = Mock(side_effect=error)
    assert main([*H2O, f"experiment={kind}", "sweep=null"]) == 2
    refusals = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(refusals) == 1 and re.match(message, refusals[0].removeprefix("error: "))


# Environment


def test_environment_is_json_and_knows_the_packages(monkeypatch, tmp_path):
    found = environment.describe(["cpu"])
    assert json.loads(json.dumps(found)) == found
    assert found["packages"]["torch"] and found["num_cores"] >= 1 and found["gpus"] is None
    monkeypatch.setattr(environment, "PACKAGES_DIR", tmp_path)  # no git
    found = environment.describe()
    assert (found["commit"], found["dirty"], found["num_threads"]) == (None, None, None)


def test_the_environment_of_a_gpu_is_what_nvidia_smi_says(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert environment.describe(["cuda:0"])["gpus"] is None, "it is not there"
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "$1" | grep -q =name,driver_version,pcie && echo "GPU, 580.65, 5"\n')
    smi.chmod(0o755)
    found = environment.describe(["cuda:0"])
    assert (found["device_name"], found["gpus"]) == ("a GPU", "GPU, 580.65, 5")


WHOLE = "every decode row read the whole cache: the budget is never reached, so these are the full cache's numbers"


@pytest.mark.parametrize(
    ("words", "measured", "said"),
    [
        ("method=h2o", {"tokens_evicted": 0.0}, "no token was evicted: the budget is never reached, so these are the"),
        ("method=h2o", {"tokens_evicted": 1.0}, None),
        ("method=quest", {"budget": 1, "device_frac": 1.2}, WHOLE),
        ("method=quest", {"budget": 0.999, "device_frac": 1.2}, None),
        ("method=quest codec=bf16", {"budget": 1.0, "device_frac": 1.2}, "the full cache's numbers under codec=bf16"),
        ("method=kivi", {"budget": 0.0, "device_frac": 1.0}, "residual=128: no group of tokens was coded whole, so"),
        ("method=kivi", {"budget": 0.1, "device_frac": 0.9}, None),
        ("method=full codec=bf16", {"budget": 1.0, "device_frac": 1.0}, None),
    ],
)
def test_what_read_the_whole_cache_says_so(words, measured, said, runs, caplog):
    """Of each task where it is so, whatever the method does with tokens; of the other tasks nothing."""

    def measure(config):
        found = outcome(config)
        found.metrics["passkey"] |= {"tokens_evicted": 3.5} if "tokens_evicted" in measured else {}
        found.metrics["kv_recall"] = found.metrics["kv_recall"] | measured
        return found

    runs.measure = measure
    assert main(["experiment=tasks", *words.split()]) == 0
    if said is None:
        assert not caplog.messages
    else:
        (line,) = caplog.messages
        assert "kv_recall: " in line and said in line

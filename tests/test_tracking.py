"""Trackers: what is sent of a record, when, and that none is ever in the way of one. MLflow's own stores where it is
installed (`make mlflow`), Weights & Biases by a stand-in."""

import json
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.results import record as records
from harness.run import cli, tracking
from harness.run.tracking import PROJECT, TRACKERS, Entry
from tests.runs import outcome

ONE = ("method=h2o", "experiment=fig12", "num_windows=2")


@dataclass
class Client:
    """A tracker that keeps what it is sent, or fails."""

    entries: list[Entry] = field(default_factory=list)
    checks: int = 0
    down: bool = False

    def reach(self):
        if self.down:
            raise ConnectionError("no server\nat that address")

    def check(self):
        self.checks += 1
        self.reach()

    def send(self, entry):
        self.reach()
        self.entries.append(entry)


@pytest.fixture
def client(monkeypatch) -> Client:
    client = Client()
    monkeypatch.setitem(TRACKERS, "mlflow", lambda: client)
    return client


def main(*argv, draw=None):
    return cli.main([*argv, "tracker=mlflow"], draw=draw)


def record_here() -> tuple[dict, Path]:
    (path,) = Path("outputs/runs").rglob("record.json")
    return records.read_record(path), path


def test_a_run_is_one_entry_that_says_what_the_record_says(runs, client):
    assert main(*ONE, "label=mine") == 0
    (entry,), (record, path) = client.entries, record_here()
    assert entry.key == entry.tags["run_id"] == record["run_id"]
    assert (entry.status, entry.seconds, entry.title) == ("finished", record["seconds"], "fig12 mine")
    numbers = {"offline/perplexity": 12.5, "offline/kl_nats": 0.25, "offline/size": 0.2, "offline/num_samples": 2}
    assert entry.metrics == {**numbers, "seconds": record["seconds"]}, "no perplexity_stderr, which is None"
    assert {"method.heavy_frac", "model.shape.hidden_size", "num_windows"} <= entry.parameters.keys()
    assert entry.parameters["num_windows"] == "2" and entry.parameters["method_name"] == "h2o"
    assert not {"batch_size", "tracker", "results_dir", "label", "model.path"} & entry.parameters.keys()
    assert entry.tags["code"] == record["run_id"].partition("-")[2]
    named = {"experiment": "fig12", "method": "h2o", "model": "smollm2-135m", "platform": "cpu", "label": "mine"}
    assert entry.tags.items() >= named.items() and "error" not in entry.tags
    assert entry.files == {"": [path]}
    assert all(isinstance(text, str) for text in (*entry.parameters.values(), *entry.tags.values()))


def test_a_failed_run_is_sent_with_its_error_and_a_skipped_one_not_at_all(runs, client):
    runs.measure = lambda config: 1 / 0
    assert main(*ONE) == 1
    runs.measure = outcome
    assert [main(*ONE), main(*ONE)] == [0, 0] and cli.main(ONE) == 0
    assert len(list(Path("outputs/runs").rglob("record.json"))) == 1, "a tracker is no part of a run's identity"
    assert [entry.status for entry in client.entries] == ["failed", "finished"] and client.checks == 2
    failed, finished = client.entries
    assert failed.tags["error"].startswith("ZeroDivisionError") and list(failed.metrics) == ["seconds"]
    assert failed.parameters == finished.parameters


def test_one_that_cannot_be_used_is_refused_before_any_work(runs, client, small, capsys):
    client.down = True
    for command in (ONE, ("experiment=accuracy",)):
        assert main(*command) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said == "error: tracker=mlflow: cannot be used (ConnectionError: no server at that address)"
    assert not runs.configs and not Path("outputs").exists()


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_one_that_is_not_installed_is_refused(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(tracking.UserError, match=f"^tracker={name}: needs the Python package {name}, which is not"):
        tracking.require([name, tracking.NONE])


def test_an_outage_costs_a_line_and_what_it_missed_can_be_sent(runs, client, capsys):
    def measure(config):
        client.down = True
        return outcome(config)

    runs.measure = measure
    assert main(*ONE) == 0
    record, path = record_here()
    line = f"warning: tracker=mlflow: {path} was not sent (ConnectionError: no server at that address)\n"
    assert record["status"] == "finished" and capsys.readouterr().err == line
    assert tracking.main(["mlflow"]) == 2
    assert capsys.readouterr().err.startswith("error: tracker=mlflow: cannot be used (ConnectionError")
    client.down = False
    assert tracking.main(["mlflow"]) == 0
    assert capsys.readouterr().out == "mlflow has all 1 finished runs of outputs\n"
    assert [entry.key for entry in client.entries] == [record["run_id"]]


def drawn(folder: Path) -> list[Path]:
    paths = [folder / "fig12.png", folder / "fig12.pdf"]
    for path in paths:
        path.write_bytes(b"drawn")
    return paths


def test_a_grid_is_an_entry_a_cell_and_one_of_its_figures(runs, client, small):
    assert main("experiment=accuracy", draw=drawn) == 0
    *cells, figures = client.entries
    assert [entry.tags["method"] for entry in cells] == ["full", "h2o", "int4"] and client.checks == 1
    assert figures.files == {"figures": [Path("outputs/fig12.png")]} and figures.status == "finished"
    assert main("experiment=accuracy", draw=drawn) == 0
    assert [entry.key for entry in client.entries[4:]] == [figures.key], "the tracker knows that it has them"
    assert client.checks == 1


# MLflow's own stores

ENTRY = Entry(
    "0123-4567", "fig12 a", 1e9, 2.5, "finished", {"notes[draft].txt/perplexity": 12.5, "seconds": 2.5},
    {"method.alpha": "4", "long": "x" * 9000, **{f"shape.{i}": "1" for i in range(150)}},
    {"run_id": "0123-4567", "experiment": "fig12"}, {},
)  # fmt: skip


@pytest.fixture(params=["{}/files", "sqlite:///{}/mlflow.db"], ids=["files", "database"])
def mlflow(request, tmp_path, monkeypatch):
    """MLflow's client on a store of this test."""
    package = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", request.param.format(tmp_path))
    return package.MlflowClient()


def stored(mlflow) -> list:
    return mlflow.search_runs([mlflow.get_experiment_by_name(PROJECT).experiment_id])


def test_mlflow_has_one_run_of_a_record(mlflow, tmp_path):
    file = tmp_path / "record.json"
    file.write_text('{"schema": 2}')
    tracker = TRACKERS["mlflow"]()
    tracker.check()
    failed = replace(ENTRY, status="failed", metrics={"seconds": 1.0}, files={"": [file]})
    for entry in (failed, replace(ENTRY, files={"": [file], "figures": [file]}), replace(ENTRY, seconds=9.0)):
        tracker.send(entry)
    (run,) = stored(mlflow)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "fig12 a")
    assert (run.info.start_time, run.info.end_time) == (10**12, 10**12 + 2500), "not those of the third, sent in vain"
    assert run.data.metrics == {"notes_draft_.txt/perplexity": 12.5, "seconds": 2.5}
    assert len(run.data.params) == 152 and run.data.params["method.alpha"] == "4"
    assert run.data.tags.items() >= {**ENTRY.tags, "status": "finished"}.items()
    copy = mlflow.download_artifacts(run.info.run_id, "figures/record.json", str(tmp_path))
    assert json.loads(Path(copy).read_text()) == {"schema": 2}
    tracker.send(replace(ENTRY, key="other", tags={"run_id": "other"}))
    assert len(stored(mlflow)) == 2


# Weights & Biases, by a stand-in


class FakeWandB(SimpleNamespace):
    """The calls of a run, in order."""

    def __init__(self):
        of_run = {name: partial(self.note, name) for name in ("log", "save", "finish", "teardown")}
        offline = SimpleNamespace(settings=SimpleNamespace(mode="offline"))
        super().__init__(calls=[], summary={}, setup=lambda: offline, Settings=dict, Image="image {}".format, **of_run)

    def note(self, name, *args, **kwargs):
        self.calls.append((name, *args, *kwargs.values()))

    def init(self, **run):
        self.calls.append(("init", run))
        return self


def test_wandb_gets_a_run_named_by_the_record(monkeypatch, tmp_path):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    files = {"": [tmp_path / "record.json"], "figures": [tmp_path / "fig11.png"]}
    tracker = TRACKERS["wandb"]()
    tracker.check()
    tracker.send(replace(ENTRY, status="failed", files=files))
    (_, run), *rest = fake.calls
    assert (run["project"], run["id"], run["resume"], run["group"]) == (PROJECT, "0123-4567", "allow", "fig12")
    assert run["config"].items() >= {**ENTRY.parameters, **ENTRY.tags, "status": "failed"}.items()
    assert fake.summary == ENTRY.metrics
    assert rest == [
        ("save", str(tmp_path / "record.json"), str(tmp_path), "now"),
        ("log", {"fig11": f"image {tmp_path / 'fig11.png'}"}),
        ("finish", 1),
        ("teardown",),
    ]

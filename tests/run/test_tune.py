"""`experiment=tune` and the sweep of `experiment=board` that reads its numbers; one's own rows on the board."""

import re
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from harness.errors import UserError
from harness.results import board
from harness.results.board import ORACLES
from harness.results.columns import read_frame
from harness.results.metrics import EQUAL
from harness.run import cli, sweep
from harness.run.compose import choices
from harness.run.sweep import read_plan
from harness.settings.config import RunConfig
from harness.settings.schema import options, shipped
from tests.methods.test_own_files import CODEC
from tests.runs import letters, rows_at
from tests.tiny_models import tiny_model
from tests.tokens import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]

# The sweep


@contextmanager
def choosing(*few: str):
    """Sweeps over all methods with a few of them, as composing all takes a while."""
    OmegaConf.register_new_resolver("choices", lambda _, *without: [x for x in few if x not in without], replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("choices", choices, replace=True)


def test_every_method_is_in_the_sweep():
    assert choices("method") == options("method") and set(ORACLES) <= set(options("method"))
    assert choices("method", "full", "h2o") == [name for name in options("method") if name not in ("full", "h2o")]


def test_a_method_without_a_budget_runs_once_a_number_of_dense_layers():
    with choosing("full", "int4", "oracle", "quest"):
        plan = read_plan(["experiment=tune"])
    configs = [(config.method_name, config.budget, config.method.dense_layers) for config in plan.runs]
    with_budget = product(("oracle", "quest"), (0.05, 0.1, 0.16), range(3))
    assert configs == [("full", None, 0), *product(["int4"], [None], range(3)), *with_budget]
    assert {config.kind for config in plan.runs} == {"perplexity"}


def test_a_model_that_the_file_lacks_has_no_dense_layers(monkeypatch, tmp_path):
    tuned(monkeypatch, tmp_path, "smollm2-135m: {h2o: {0.1: 2}, quest: {0.05: 2, 0.1: 1}}")
    small, large = "nearest:0.05", "nearest:0.1"
    assert sweep.as_tuned(["quest"], [0.05, 0.1], "smollm2-135m") == [["quest", small, 2], ["quest", large, 1]]
    assert sweep.as_tuned(["quest", "sparq"], [0.1], "smollm2-135m") == [["quest", large, 1], ["sparq", large, 0]]
    assert sweep.as_tuned(["h2o"], [0.1], "unknown") == [["h2o", large, 0]]


def tuned(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Sweeps read these numbers."""
    (folder / "tuned.yaml").write_text(text)
    monkeypatch.setattr(sweep, "TUNED", folder / "tuned.yaml")


def test_the_board_runs_each_model_with_its_own_numbers(monkeypatch, tmp_path):
    tuned(monkeypatch, tmp_path, "qwen2.5-coder-0.5b: {quest: {0.05: 2, 0.1: 1}}\nsmollm2-135m: {sparq: {0.1: 2}}\n")
    asked = ["experiment=board", "model=qwen2.5-coder-0.5b", "sweep.data_root=.", "sweep.methods=[quest]"]
    asked += ["sweep.long.methods=[quest]", "sweep.over_int8=[oracle,quest]", "sweep.long_over_int8=[quest]"]
    asked += ["sweep.tasks_over_int8=[oracle]"]
    with choosing("full", "quest", "int4", "sparq"):
        configs = read_plan(asked).runs
    found = {what_runs(config)[2:] for config in configs}
    quest, sparq = {("quest", 0.05, 2), ("quest", 0.1, 1)}, {("sparq", 0.05, 0), ("sparq", 0.1, 0)}
    assert found == quest | sparq | {("oracle", 0.05, 0), ("oracle", 0.1, 0), ("full", None, 0), ("int4", None, 0)}
    coded = {what_runs(config) for config in configs if config.codec == "int8"}
    assert {config[2:] for config in coded if config[2] == "quest"} == quest, "the number of the plain row"
    texts = {what_runs(config)[:2] for config in configs if config.kind == "perplexity"}
    assert texts == set(product(("code", "book", "wikitext2"), (1024, 4096)))
    assert {config.group_size for config in configs if config.codec == "int8"} == {16}
    assert {config.task.known.num_sentences for config in configs} == {40}, "as long as the shorter windows"
    timed = [config.latency for config in configs if config.kind == "latency"]
    assert {(config.batch_size, config.prompt_len, config.gen_len) for config in timed} == {(4, 1024, 24)}
    assert all(config.corpus.spread for config in configs)
    assert {config.seq_len - config.prefill_len for config in configs} == {64}


def best_of(table: Path) -> set[tuple[str, str, float, int]]:
    """Model, method, budget and the number of dense layers with the least KL in a table of `experiment=tune`.

    Where that is not 0. Rows over a codec, and methods at another budget than asked, do not count.
    """
    frame = read_frame(table)
    frame = frame[frame["metric"].eq("kl_nats")]
    settings = frame["settings"].str
    frame["asked"] = settings.extract(r"(?:^|, )budget=([\d.]+)", expand=False).astype(float)
    given = settings.extract(r"(?:^|, )dense_layers=(\d+)", expand=False).astype(float)
    frame["dense"] = given.fillna(frame["method"].map(lambda method: shipped(method)[1]["dense_layers"]))
    has_budget = (frame["budget"] - frame["asked"]).abs() <= EQUAL
    counts = has_budget & ~settings.contains(r"(?:^|, )codec=")
    best = frame[counts].sort_values("value").drop_duplicates(["model", "method", "asked"]).query("dense > 0")
    return set(best[["model", "method", "asked", "dense"]].itertuples(index=False, name=None))


def test_the_shipped_numbers_are_those_of_the_shipped_scores():
    best = set()
    for folder in ("results", "results/qwen2.5-coder-0.5b"):
        best |= best_of(ROOT / folder / "tables" / "tune.csv")
    listed = set()
    for model, methods in yaml.safe_load(sweep.TUNED.read_text()).items():
        for method, numbers in methods.items():
            listed |= {(model, method, budget, number) for budget, number in numbers.items()}
    assert best == listed and len(best) == 16


def test_without_data_and_longer_windows_a_board_remains():
    """As `make board` starts it. A method of one's own has its class's number of dense layers."""
    asked = ["experiment=board", "model=qwen2.5-coder-0.5b", "sweep.longer=null"]
    asked += ["sweep.over_int8=[quest]", "sweep.tasks_over_int8=[quest]", "sweep.methods=[quest,infinigen]"]
    with choosing("full", "quest", "infinigen"):
        configs = read_plan(asked).runs
        own = ["method=kvzip", *asked[1:]]  # takes the place of a method of one's own
        of_own = read_plan([asked[0], *own]).runs
    assert {what_runs(config)[:2] for config in configs} == {("code", 1024), ("tasks", 1024), ("latency", 1024)}
    numbers = {config.method.dense_layers for config in configs}
    assert len(numbers) > 1 and {config.method.dense_layers for config in of_own} == {0}
    found = [(config.kind, config.budget, config.codec) for config in of_own]
    assert len(found) == len(set(found)) == 13


def what_runs(config: RunConfig) -> tuple[Any, ...]:
    text = config.corpus.name if config.kind == "perplexity" else config.kind
    return text, config.seq_len, config.method_name, config.budget, config.method.dense_layers


def test_an_entry_is_lenient_only_where_it_says_so():
    entry = {"method": ["full", "oracle"], "experiment": "latency"}
    with pytest.raises(UserError, match="Oracle selects by the true scores"):
        read_plan({"sweep": {"runs": [entry]}})
    unknown = entry | {"method": "full", "method.none": 1}
    lenient = read_plan({"sweep": {"runs": [each | {"where_allowed": True} for each in (entry, unknown)]}})
    assert [each.method_name for each in lenient.runs] == ["full"] and len(lenient.left_out) == 2


# One's own method or codec beside the shipped ones

SMALL = [
    "seq_len=200", "prefill_len=150", "num_windows=1", "num_samples=2", "tasks=[passkey]", "too_long=truncate",
    "calibration.num_tokens=64", "batch_size=1", "prompt_len=24", "gen_len=6", "warmup_steps=1", "timed_steps=1",
    "platform.link_gbps=1",
]  # fmt: skip


def test_an_own_method_and_codec_stand_beside_the_shipped_rows(own_folder, shipped_beside, monkeypatch, capsys):
    """As `make board METHOD= CODEC=` starts them, on a toy that has the shipped rows' model's name."""
    file = letters(own_folder, monkeypatch, 1000)
    tiny_model("llama", num_key_value_heads=2, max_position_embeddings=2048).save_pretrained("smollm2-135m")
    byte_tokenizer().save_pretrained("smollm2-135m")
    *_, example = (ROOT / "README.md").read_text().split("```python\n")
    Path("long_value.py").write_text(example.partition("```")[0])
    Path("mine.py").write_text(CODEC)
    settings = ["model.path=smollm2-135m", f"corpus.path={file}", f"calibration.path={file}", *SMALL]
    own = ["method=./long_value.py", "codec=./mine.py", "sweep.longer=null"]
    assert cli.main(["experiment=board", *settings, *own]) == 0, capsys.readouterr().err
    board.write(Path("outputs"))
    rows = [row for row in rows_at("outputs/tables/board-methods.csv") if row["over"] == "smollm2-135m"]
    label = "Long values + mine"
    mine = [row for row in rows if row["shipped"] != "yes"]
    assert {row["label"] for row in mine} == {label} and len({row["label"] for row in rows}) > 30
    steps = [row for row in rows_at("outputs/tables/board-steps.csv") if not row["shipped"]]
    assert {row["label"] for row in steps} == {label} and {row["asked_budget"] for row in steps} == {None, 0.1}
    assert all(row["step_s"] > 0 and row["codec"] == "mine" for row in steps)
    answered = [row for row in rows_at("outputs/tables/board-answers.csv") if row["label"] == label]
    assert {row["asked_budget"] for row in answered} == {None, 0.05, 0.1}
    page = Path("outputs/board.md").read_text()
    assert "One's own run; the other rows are shipped" in page and "InfiniGen, coded index" in page
    assert len([line for line in page.splitlines() if re.match(r"\| \W*Long values \+ mine \W*\*", line)]) >= 2

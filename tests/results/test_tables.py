"""Records to tables: rows, their order and columns, pages, and shipped rows beside one's own."""

import csv
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.results import record as records
from harness.results import write as tables
from harness.results.columns import TABLES, csv_of, read_frame, shape_of
from harness.results.metrics import METRICS, MISSING, quantity
from harness.results.pages import render_markdown, sheets_of
from harness.results.samples import frames_of
from harness.run.compose import load

TASK_METRICS = {
    "acc": 0.75, "acc_stderr": 0.0625, "num_samples": 48, "num_fewshot": 0, "num_truncated": 1, "prefill": "question",
}  # fmt: skip
TEXT_METRICS = {
    "num_samples": 3,
    "perplexity": 12.5, "perplexity_stderr": 0.25, "perplexity_full": 11.0, "perplexity_full_stderr": 0.2,
    "kl_nats": 0.0625, "kl_nats_stderr": 0.01, "top1_agreement": 0.875, "top1_agreement_stderr": 0.01,
    "attention_recall": None, "attention_recall_stderr": None,
}  # fmt: skip
LATENCY_METRICS = {
    "platform": "cpu", "source": "emulated", "batch_size": 4, "prompt_len": 1024, "gen_len": 8,
    "ttft_s": 2.0, "decode_s": 0.5, "total_s": 2.5, "tokens_per_s": 12.8, "tpot_p50_s": 0.0625, "tpot_p95_s": 0.07,
    "h2d_bytes": 2**31, "d2h_bytes": 2**20, "device_read_bytes": 2**29, "device_kv_bytes": 2**22,
    "exposed_transfer_s": 0.25, "link_bytes_per_s": None, "peak_device_bytes": 2**30, "budget": 0.2,
}  # fmt: skip
TITLES = {"full": "Full cache", "h2o": "H2O", "infinigen": "InfiniGen", "streaming": "Streaming", "int4": "INT4"}
SHAPES = {"latency": "latency", "analysis": "analysis", "table1": "analysis"}


def save(results: Path, overrides: list[str], metrics: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Write a finished record of these settings; returns it."""
    config = load(overrides)
    run = records.run_id(config, {"text": str(fields.pop("text", ""))})
    settings = records.plain(config)
    settings["label"] = settings["label"] or TITLES[config.method_name]
    record = {
        "schema": records.SCHEMA, "run_id": run, "settings_id": run, "experiment": config.experiment,
        "kind": config.kind, "status": "finished", "started": "2026-01-01T00:00:00+00:00", "config": settings,
        "settings": records.changed_settings(config), "method_module": "methods.h2o", "method_file": None,
        "when": "kept", "inputs": {}, "environment": {}, "metrics": metrics, "samples": {}, "methods": {},
        "chunks": [], "seconds": 1.0, "error": None,
    } | fields  # fmt: skip
    record.setdefault("table", SHAPES.get(record["kind"], "accuracy"))
    records.write_record(records.record_path(results, config.experiment, run), record)
    return record


def answers(values: Sequence[Any], metric: str = "acc", per_context: int = 2, first: int = 0) -> list[dict[str, Any]]:
    """The samples of a task, by default two questions a context."""
    return [{"question": first + at, "context": at // per_context, metric: value} for at, value in enumerate(values)]


def shares(budget: float) -> dict[str, float]:
    return {"budget": budget, "budget_artifact": 0.1, "device_frac": budget + 0.05, "resident_frac": 0.02}


def save_task(results: Path, *overrides: str, budget: float = 0.16, **fields: Any) -> dict[str, Any]:
    return save(results, ["experiment=fig11", *overrides], {"passkey": TASK_METRICS | shares(budget)}, **fields)


def save_text(results: Path, *overrides: str, budget: float = 0.16, **fields: Any) -> dict[str, Any]:
    metrics = TEXT_METRICS | shares(budget) | {"budget_stderr": 0.001}
    return save(results, ["experiment=perplexity", *overrides], {"offline": metrics}, **fields)


def update(results: Path, experiment: str) -> list[dict[str, str]]:
    """Write the table; returns its lines as they are in the CSV."""
    with tables.update(results, experiment).open(newline="") as stream:
        return list(csv.DictReader(stream))


def page(results: Path, experiment: str) -> str:
    return (results / "tables" / f"{experiment}.md").read_text()


def sheet(path: Path) -> list[dict[str, str]]:
    """The lines of the first table of a page, by heading."""
    return lines_of(path.with_suffix(".md").read_text().split("\n## ")[1])


# Rows


def test_runs_on_a_text_have_a_table_by_layer(tmp_path):
    """A run's layers are a series, named by its settings too."""
    chosen = {"method=h2o": 0.1, "method=infinigen method.alpha=4": 0.2, "method=infinigen budget=0.16": 0.4}
    for overrides, scale in chosen.items():
        layers = [
            {"layer": at, "attention_error": scale * at, "attention_error_stderr": 0.01, "attention_error_p95": 0.5,
             "attention_error_p95_stderr": None} for at in range(3)
        ]  # fmt: skip
        windows = {"windows": [{"nll": 2.5}], "layers": layers}
        record = save_text(tmp_path, *overrides.split(), samples=windows, text=overrides)
    update(tmp_path, "perplexity")
    found = read_frame(tmp_path / "tables" / "attention_error.csv")
    assert dict(found["series"].value_counts(sort=False)) == {
        "H2O, 16 %": 6, "InfiniGen, 16 %": 6, "InfiniGen, 16 %, alpha=4.0": 6,
    }  # fmt: skip
    (row,) = found[(found["x"] == 2) & (found["run_id"] == record["run_id"])].query("stderr > 0").to_dict("records")
    expected = {"series": "InfiniGen, 16 %", "x_name": "layer, offline", "metric": "attention_error", "value": 0.8}
    assert (expected | {"stderr": 0.01, "source": "measured"}).items() <= row.items()
    assert "attention error (%), by layer, offline" in page(tmp_path, "attention_error")


def test_a_text_and_its_chunks_have_a_row_per_measured_metric(tmp_path):
    chunk = {"kl_nats": 0.5, "kl_nats_stderr": 0.1, "perplexity": 2.0, "repetition": None}
    chunks = [{"first": 256 * at, "stop": 256 * (at + 1), "metrics": chunk} for at in (4, 1)]
    record = save_text(tmp_path, "seq_len=512", chunks=chunks)
    found = update(tmp_path, "perplexity")
    assert [(row["first"], row["metric"], row["value"], row["stderr"]) for row in found] == [
        ("", "perplexity", "12.5", "0.25"), ("", "perplexity_full", "11.0", "0.2"),
        ("", "kl_nats", "0.0625", "0.01"), ("", "top1_agreement", "0.875", "0.01"),
        ("256", "perplexity", "2.0", ""), ("256", "kl_nats", "0.5", "0.1"),
        ("1024", "perplexity", "2.0", ""), ("1024", "kl_nats", "0.5", "0.1"),
    ]  # fmt: skip
    assert {(row["seq_len"], row["num_samples"], row["num_fewshot"]) for row in found} == {("512", "3", "")}
    text = page(tmp_path, "perplexity")
    assert "by range of tokens" in text and "offline[256:512] perplexity" in text
    file = record | {"metrics": {"/home/someone/book[1].txt": record["metrics"]["offline"]}, "chunks": []}
    assert set(frames_of([file])["accuracy"]["task"]) == {"book[1].txt"}


def test_a_needle_has_a_row_per_length_and_fifth_of_the_prompt(tmp_path):
    samples = [{"length": 512, "512": float(depth < 0.5), "depth": depth} for depth in (0.0, 0.1, 0.45, 0.55, 1.0)]
    metrics = {"niah_single_1": {"512": 0.6, "num_samples": 5, "budget": 0.2}}
    save(tmp_path, ["experiment=fig11"], metrics, samples={"niah_single_1": samples})
    found = {row["depth"]: (row["metric"], row["value"], row["num_samples"]) for row in update(tmp_path, "fig11")}
    assert found == {
        "": ("512", "0.6", "5"), "0.0": ("512", "1.0", "2"), "0.4": ("512", "0.5", "2"), "0.8": ("512", "0.0", "1"),
    }  # fmt: skip
    assert "512 tokens, 40-60 %" in page(tmp_path, "fig11")


def test_a_timed_run_is_in_seconds_and_bytes_and_its_page_in_ms_and_gib(tmp_path):
    segments = {"attention_s": 1, "ffn_s": 2, "prediction_s": None, "transfer_s": 4, "other_s": 0}
    save(tmp_path, ["experiment=latency", "system=offload"], LATENCY_METRICS | segments)
    (row,) = update(tmp_path, "latency")
    assert tuple(row) == TABLES["latency"]
    shown = ("label", "ttft_s", "h2d_bytes", "link_bytes_per_s", "source", "attention_s", "prediction_s", "budget")
    assert [row[name] for name in shown] == ["offload", "2", str(2**31), "", "emulated", "1", "", "0.2"]
    (line,) = sheet(tmp_path / "tables" / "latency.csv")
    expected = {"TTFT (ms)": "2000.0", "TPOT p50 (ms)": "62.50", "to device (GiB)": "2.000", "tokens/s": "12.80"}
    assert expected.items() <= line.items() and line["budget (%)"] == "20.0"
    assert "link (GiB/s)" not in line, "a column without a number"


def test_a_budget_that_was_not_met_has_a_column(tmp_path):
    asked = "budget=nearest:0.1"
    save_text(tmp_path, "method=h2o", asked, budget=0.12)
    save_text(tmp_path, "method=quest", asked, budget=0.109)
    rows = update(tmp_path, "perplexity")
    assert {(row["method"], row["unmet_budget"]) for row in rows} == {("h2o", "0.1"), ("quest", "")}
    assert "budget asked for (%)" in page(tmp_path, "perplexity")


def test_settings_are_those_that_differ_from_the_defaults(tmp_path):
    told = {
        "method=infinigen": "",
        "method=infinigen method.alpha=4 method.skew=true": "alpha=4.0",
        "method=quest method.budget=0.3": "method.budget=0.3",  # `budget` is a setting of the run as well
        "method=quest budget=0.3": "budget=0.3",
        "method=h2o prefill_len=960": "",  # as it follows from the length
        "method=h2o prefill_len=256": "prefill_len=256",
        f"method=h2o codec=int4 corpus.path={__file__}": "codec=int4",
        "method=int4": "",
        "method=h2o model.dtype=bfloat16": "model.dtype=bfloat16",  # not the model's own
    }
    for overrides, expected in told.items():
        rows = frames_of([save_text(tmp_path, *overrides.split(), text=overrides)])["accuracy"]
        assert set(rows["settings"]) == {expected}, overrides
    local = save_task(tmp_path, "num_samples=9", "seq_len=512", "data=local", f"data.root={tmp_path}")
    assert set(frames_of([local])["accuracy"]["settings"]) == {"num_samples=9"}, "a task has no windows"


# Shipped rows


@pytest.fixture
def shipped(tmp_path) -> Path:
    """Results with a table of H2O at two budgets and the full cache, shipped without its records."""
    for overrides, budget in (("method=full", 1.0), ("method=h2o budget=0.1", 0.1), ("method=h2o budget=0.2", 0.2)):
        save_task(tmp_path, *overrides.split(), budget=budget)
    tables.update(tmp_path, "fig11")
    tables.ship(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    return tmp_path


def values(results: Path) -> list[tuple[str, str, str, str]]:
    return [(row["label"], row["settings"], row["value"], row["shipped"]) for row in update(results, "fig11")]


SHIPPED = [
    ("Full cache", "", "0.75", "yes"), ("H2O", "budget=0.1", "0.75", "yes"), ("H2O", "budget=0.2", "0.75", "yes"),
]  # fmt: skip


def test_a_run_of_ones_own_stands_beside_the_shipped_rows_and_replaces_the_one_it_repeats(shipped, caplog):
    path = shipped / "tables" / "fig11.csv"
    before = path.read_bytes()
    assert values(shipped) == SHIPPED and path.read_bytes() == before
    assert "own run" not in page(shipped, "fig11")
    metrics = {"passkey": TASK_METRICS | {"acc": 0.5, "budget": 0.2}}
    for overrides in ("method=h2o budget=0.2", "method=infinigen", "method=h2o budget=0.1 label=Mine"):
        save(shipped, ["experiment=fig11", *overrides.split()], metrics)
    own = [("H2O", "budget=0.2", "0.5", ""), ("InfiniGen", "", "0.5", ""), ("Mine", "budget=0.1", "0.5", "")]
    assert values(shipped) == [*SHIPPED[:2], *own]
    assert [line["label"] for line in sheet(path)] == ["Full cache", "H2O", "H2O \\*", "InfiniGen \\*", "Mine \\*"]
    assert "\\* One's own run; the other rows are shipped with the project." in page(shipped, "fig11")
    assert caplog.messages == []
    shutil.rmtree(shipped / "runs")
    assert values(shipped) == SHIPPED[:2], "no row of a record that is gone"


def test_a_run_replaces_all_metrics_and_chunks_of_a_shipped_one_and_a_series_whole(tmp_path):
    def save_both(first: int, value: float, *series: tuple[str, float]) -> None:
        save_text(tmp_path, "method=h2o", chunks=[{"first": first, "stop": 512, "metrics": {"perplexity": 2.0}}])
        same = {"metric": "bytes", "value": value, "stderr": None, "num_samples": 1, "x_name": "layer", "layer": 1}
        points = [same | {"series": name, "x": x} for name, x in series]
        save(tmp_path, ["experiment=fig2"], {"source": "measured", "points": points}, kind="analysis")

    save_both(256, 1.0, ("a", 1.0), ("a", 2.0), ("b", 1.0))
    for experiment in ("perplexity", "fig2"):
        tables.update(tmp_path, experiment)
    tables.ship(tmp_path)
    save_both(128, 5.0, ("a", 3.0), ("c", 1.0))
    found = update(tmp_path, "perplexity")
    assert [(row["first"], row["stop"]) for row in found] == [("", "")] * 4 + [("128", "512")]
    assert {row["shipped"] for row in found} == {""}
    assert [(row["series"], row["x"], row["value"]) for row in update(tmp_path, "fig2")] == [
        ("b", "1", "1"), ("a", "3", "5"), ("c", "1", "5"),
    ]  # fmt: skip


def test_a_run_of_the_largest_batch_replaces_every_batch_of_a_shipped_one(tmp_path):
    def save_batches(*batches: int) -> None:
        holds = {"largest_batch": batches[-1], "memory_bytes": 2**30, "context": 1032}
        points = [LATENCY_METRICS | holds | {"batch_size": batch} for batch in batches]
        given = ["experiment=capacity", "system=offload", "platform.device_gib=1"]
        save(tmp_path, given, {"points": points}, table="capacity", text=batches)

    save_batches(1, 2, 4)
    tables.update(tmp_path, "latency")
    tables.ship(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    save_batches(1, 3)
    assert [row["batch_size"] for row in update(tmp_path, "latency")] == ["1", "3"]


# Pages


def test_a_page_has_units_and_errors(tmp_path):
    save_text(tmp_path, "method=h2o")
    assert sheet(tables.update(tmp_path, "perplexity")) == [{
        "label": "H2O", "settings": MISSING, "budget (%)": "16.0", "read on device (%)": "21.0",
        "resident (%)": "2.0", "offline perplexity": "12.50 ± 0.25",
        "offline full cache's perplexity": "11.00 ± 0.20",
        "offline KL (nats)": "0.0625 ± 0.0100", "offline top-1 agreement (%)": "87.5 ± 1.0",
    }]  # fmt: skip
    assert "## smollm2-135m\n" in page(tmp_path, "perplexity")
    assert METRICS["kl_nats"].show(-1e-9, 1e-9) == "0.0000 ± 0.0000"


def test_a_line_joins_runs_of_a_method_and_settings_on_texts_and_tasks(tmp_path):
    """Settings that all runs on a task share stand below the table."""
    for skew in ("true", "false"):
        method = ["experiment=fig13", "method=infinigen", f"method.skew={skew}", "method.alpha=9", f"label=skew {skew}"]
        local = ["data=local", f"data.root={tmp_path}", "num_samples=100"]
        save(tmp_path, [*method, "tasks=[copa]", *local], {"copa": TASK_METRICS | {"budget": 0.2, "num_samples": 100}})
        save(tmp_path, [*method, "tasks=[passkey]"], {"passkey": TASK_METRICS | {"budget": 0.2}})
        save(tmp_path, [*method, "kind=perplexity"], {"offline": TEXT_METRICS | {"budget": 0.2}})
    first, second = sheet(tables.update(tmp_path, "fig13"))
    assert [(line["label"], line["settings"]) for line in (first, second)] == [
        ("skew false", "skew=False"), ("skew true", MISSING),
    ]  # fmt: skip
    assert {"copa acc (%)", "passkey acc (%)", "offline perplexity"} <= set(first)
    assert MISSING not in [*first.values(), *(second | {"settings": ""}).values()]
    assert "Settings of all runs: alpha=9.0, num_samples=100, prefill_len=256." in page(tmp_path, "fig13")
    assert "copa: 100 questions; offline: 3 windows of 1,024 tokens; passkey: 48 questions." in page(tmp_path, "fig13")


def lines_of(text: str) -> list[dict[str, str]]:
    """The lines of the tables of a terminal, by heading."""
    header, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return [dict(zip(header, line, strict=True)) for line in lines]


def test_a_terminal_has_the_most_important_columns_of_the_page_and_says_what_does_not_fit(tmp_path):
    chosen = []
    for alpha, budget in ((4, 0.12), (6, 0.2)):
        chosen.append(save_task(tmp_path, "method=infinigen", f"method.alpha={alpha}", budget=budget))
    of_text = ["experiment=fig11", "kind=perplexity", "method=infinigen", "method.alpha=4", "prefill_len=256"]
    chosen.append(save_text(tmp_path, *of_text))
    text = tables.summary(chosen)
    assert text.startswith("## fig11, smollm2-135m\n") and "offline: 3 windows of 1,024 tokens; passkey: 48" in text
    assert lines_of(text) == [
        {"label": "InfiniGen", "settings": "alpha=4.0", "budget (%)": "12.0-16.0", "read on device (%)": "17.0-21.0",
         "passkey acc (%)": "75.0 ± 6.2", "offline perplexity": "12.50 ± 0.25", "offline KL (nats)": "0.0625 ± 0.0100"},
        {"label": "InfiniGen", "settings": "alpha=6.0", "budget (%)": "20.0", "read on device (%)": "25.0",
         "passkey acc (%)": "75.0 ± 6.2", "offline perplexity": MISSING, "offline KL (nats)": MISSING},
    ]  # fmt: skip
    assert "Not shown: resident (%)." in " ".join(text.split())


def save_group(folder: Path, *answers: list[list[int]], metric: str = "acc", mean: float | None = None) -> None:
    """The full cache, which answers all, and H2O on tasks of one group; answers: H2O's, by task."""
    for method, right in (("full", [[1] * len(task) for task in answers]), ("h2o", answers)):
        samples = {}
        metrics = {}
        for number, task in enumerate(right):
            samples[f"t{number}"] = [{"question": at, "context": at, metric: one} for at, one in enumerate(task)]
            metrics[f"t{number}"] = {metric: sum(task) / len(task), "num_samples": len(task)} | shares(0.2)
        own = sum(entries[metric] for entries in metrics.values()) / len(answers)
        group = {metric: own if mean is None or method == "full" else mean, "tasks": [*metrics], "num_samples": 9}
        metrics["group"] = group | shares(0.2)
        save(folder, ["experiment=fig11", f"method={method}"], metrics, samples=samples)


def of_group(folder: Path) -> dict[str, Any]:
    rows = read_frame(tables.update(folder, "fig11"))
    (row,) = rows.query("task == 'group' and method == 'h2o'").to_dict("records")
    return row


def test_a_groups_difference_is_the_mean_of_its_tasks_as_strata(tmp_path):
    save_group(tmp_path / "two", [1, 0, 1, 1], [0, 0, 1, 0])
    row = of_group(tmp_path / "two")
    stderrs = [np.std(task, ddof=1) / 2 for task in ([0, -1, 0, 0], [-1, -1, 0, -1])]
    assert row["difference"] == -0.5 and row["difference_stderr"] == pytest.approx(np.hypot(*stderrs) / 2)
    assert row["num_contexts"] == 4 + 4 - 2 + 1, "six degrees of freedom"
    save_group(tmp_path / "one", [1], [0], [0])  # where tasks stand for one another
    row = of_group(tmp_path / "one")
    assert row["difference"] == pytest.approx(-2 / 3) and row["num_contexts"] == 3
    assert row["difference_stderr"] == pytest.approx(np.std([0, -1, -1], ddof=1) / 3**0.5)
    save_group(tmp_path / "unequal", [1, 0, 1], [0])
    save_group(tmp_path / "weighted", [1, 0], [0, 0], mean=0.4)
    assert all(math.isnan(of_group(tmp_path / name)["difference"]) for name in ("unequal", "weighted"))


def test_answers_of_several_repeats_have_their_own_error(tmp_path):
    name = "exact_match,strict-match"
    of_filter = {name: 0.5, f"{name}_stderr": 0.1, f"{name}_repeats_stderr": 0.02}
    lengths = {"generated_tokens": 120.5, "generated_tokens_stderr": 3.0, "at_limit": 0.25}
    of_task = of_filter | lengths | shares(0.2)
    save(tmp_path, ["experiment=tasks", "temperature=0.6", "repeats=2"], {"gsm8k": of_task, "triviaqa": of_task})
    rows = read_frame(tables.update(tmp_path, "tasks"))
    rows = rows[rows["task"] == "gsm8k"].set_index("metric")
    assert [*rows.index] == [name, "generated_tokens", "at_limit"]
    assert (rows["stderr"][name], rows["repeats_stderr"][name]) == (0.1, 0.02)
    assert set(rows["settings"]) == {"temperature=0.6, repeats=2"}
    scores, of_length = page(tmp_path, "tasks").split("length of the answers")  # of several tasks they stand apart
    assert "exact_match, strict-match (%)" in scores and "50.0 ± 10.0" in scores
    assert "generated (tokens)" in of_length and "120.5 ± 3.0" in of_length and "25.0" in of_length
    assert quantity("known,1024").heading == "right at 1,024 tokens, question known (%)"
    assert quantity("unknown_less_known,f1,none").heading == "f1, none, unknown less known"


def test_a_csv_gives_the_page_and_the_csv_that_its_records_gave(tmp_path):
    save_task(tmp_path, "method=h2o")
    save_text(tmp_path, "experiment=fig11", "kind=perplexity", "method=h2o")
    save(tmp_path, ["experiment=latency", "system=offload"], LATENCY_METRICS)
    point = {"series": "a", "metric": "bytes", "value": 2.0**30, "stderr": None, "num_samples": 1}
    places = ({"x_name": "layer", "x": 3.0, "layer": 3}, {"x_name": None, "x": None, "layer": None})
    save(tmp_path, ["experiment=table1"], {"source": "measured", "points": [point | place for place in places]})
    for name in ("fig11", "latency", "table1"):
        path = tables.update(tmp_path, name)
        shape = SHAPES.get(name, "accuracy")
        assert shape_of(path.read_text().splitlines()[0].split(",")) == shape
        assert render_markdown(name, read_frame(path)) == page(tmp_path, name)
        assert csv_of(read_frame(path), shape) == path.read_text()
    titles = [sheet.title for sheet in sheets_of(read_frame(path))]
    assert titles == ["smollm2-135m: GiB, by layer", "smollm2-135m: GiB"]


# Figures of speed


def test_each_figure_of_speed_has_its_rows_of_the_timed_runs(tmp_path):
    def save_timed(*shapes: tuple[int, int], model: str = "smollm2-135m", **fields: str) -> None:
        for batch, prompt in shapes:
            for label in ("ideal", "offload"):
                given = [f"system={label}", f"batch_size={batch}", f"prompt_len={prompt}", f"model={model}"]
                metrics = LATENCY_METRICS | fields | {"batch_size": batch, "prompt_len": prompt}
                save(tmp_path, ["experiment=latency", *given], metrics, text=str(fields))

    def shapes(figure: str) -> list[tuple[str, int, int]]:
        rows = read_frame(tmp_path / "tables" / f"{figure}.csv").query("label == 'ideal'")
        assert page(tmp_path, figure).startswith(f"# {figure}\n") and set(rows["experiment"]) == {figure}
        return [*rows[["source", "batch_size", "prompt_len"]].itertuples(index=False, name=None)]

    save_timed((1, 1024), (4, 1024), (8, 1024), (4, 512), (4, 2048))
    save_timed((2, 64), platform="cuda", source="measured")
    assert len(update(tmp_path, "latency")) == 12
    expected = {
        "fig15": [(1, 1024), (4, 1024), (8, 1024)], "fig14": [(8, 1024)],  # its largest batch
        "fig16a": [(4, 512), (4, 1024), (4, 2048)], "fig18": [(4, 2048)],  # its longest prompt
    }  # fmt: skip
    for figure, found in expected.items():
        assert sorted(shapes(figure)) == sorted([*(("emulated", *shape) for shape in found), ("measured", 2, 64)])
    assert not (tmp_path / "tables" / "fig16b.csv").exists(), "one model is no comparison"
    save_timed((4, 1024), model="opt-125m")
    tables.update(tmp_path, "latency")
    assert shapes("fig16b") == [("emulated", 4, 1024)] * 2
    for path in tmp_path.glob("runs/latency/*/record.json"):
        if json.loads(path.read_text())["config"]["model"]["name"] == "opt-125m":
            path.unlink()
    tables.update(tmp_path, "latency")
    assert not list((tmp_path / "tables").glob("fig16b.*")), "a table without rows"

"""Records to tables: which rows, in which order, under which columns, and what people read."""

import copy
import csv
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.records import record as records
from harness.records.baseline import Baselines
from harness.tables import write as tables
from harness.tables.columns import COMPARED, LATENCY, METRICS, MISSING, SEGMENTS, TABLES, names, shape_of, typed
from harness.tables.sheets import render_markdown, sheets_of
from harness.tables.text import MAX_WIDTH
from tests.composed import load

TASK_METRICS = {
    "acc": 0.75,
    "acc_stderr": 0.0625,
    "num_samples": 48,
    "num_fewshot": 0,
    "num_truncated": 1,
    "prefill": "question",
}
TEXT_METRICS = {
    "num_samples": 3,
    "perplexity": 12.5,
    "perplexity_stderr": 0.25,
    "perplexity_full": 11.0,
    "perplexity_full_stderr": 0.2,
    "kl_nats": 0.0625,
    "kl_nats_stderr": 0.01,
    "top1_agreement": 0.875,
    "top1_agreement_stderr": 0.01,
    "attention_recall": None,
    "attention_recall_stderr": None,
}
LATENCY_METRICS = {
    "platform": "cpu",
    "source": "emulated",
    "batch_size": 4,
    "prompt_len": 1024,
    "gen_len": 8,
    "prefill_s": 2.0,
    "decode_s": 0.5,
    "total_s": 2.5,
    "tokens_per_s": 12.8,
    "step_p50_s": 0.0625,
    "step_p95_s": 0.07,
    "h2d_bytes": 2**31,
    "d2h_bytes": 2**20,
    "device_read_bytes": 2**29,
    "device_kv_bytes": 2**22,
    "exposed_transfer_s": 0.25,
    "link_bytes_per_s": None,
    "peak_device_bytes": 2**30,
    "size": 0.2,
}


TITLES = {"full": "Full cache", "h2o": "H2O", "infinigen": "InfiniGen", "streaming": "Streaming", "int4": "INT4"}
SHAPES = {"latency": "latency", "analysis": "analysis", "table1": "analysis"}


def save(results: Path, overrides: list[str], metrics: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Write a finished record of these settings; returns it."""
    config = load(overrides)
    run = records.run_id(config, {"text": str(fields.pop("text", ""))})
    settings = records.plain(config)
    settings["label"] = settings["label"] or TITLES[config.method_name]
    record = {
        "schema": records.SCHEMA,
        "run_id": run,
        "settings_id": run,
        "experiment": config.experiment,
        "kind": config.kind,
        "status": "finished",
        "started": "2026-01-01T00:00:00+00:00",
        "config": settings,
        "method_module": "methods.h2o",
        "method_file": None,
        "when": "kept",
        "inputs": {},
        "environment": {},
        "metrics": metrics,
        "samples": {},
        "methods": {},
        "chunks": [],
        "seconds": 1.0,
        "error": None,
    }
    record |= fields
    record.setdefault("table", SHAPES.get(record["kind"], "accuracy"))
    records.write_record(records.record_path(results, config.experiment, run), record)
    return record


def save_task(results: Path, *overrides: str, size: float = 0.16, **fields: Any) -> dict[str, Any]:
    sizes = {"size": size, "size_artifact": 0.1, "device_frac": size + 0.05, "resident_frac": 0.02}
    return save(results, ["experiment=fig11", *overrides], {"passkey": TASK_METRICS | sizes}, **fields)


def save_text(results: Path, *overrides: str, size: float = 0.16, **fields: Any) -> dict[str, Any]:
    sizes = {
        "size": size,
        "size_stderr": 0.001,
        "size_artifact": 0.1,
        "device_frac": size + 0.05,
        "resident_frac": 0.02,
        "size_artifact_stderr": 0.001,
    }
    return save(results, ["experiment=perplexity", *overrides], {"offline": TEXT_METRICS | sizes}, **fields)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_columns_are_the_fixed_ones(tmp_path: Path) -> None:
    save_task(tmp_path)
    header = tables.update(tmp_path, "fig11").read_text().splitlines()[0]
    assert header == (
        "experiment,model,method,label,settings,task,metric,value,stderr,difference,difference_stderr,mcnemar_p,"
        "gained,lost,detectable,num_samples,num_fewshot,seq_len,size,"
        "size_artifact,device_frac,resident_frac,source,run_id"
    )
    save(tmp_path, ["experiment=tasks"], LATENCY_METRICS, kind="latency")
    header = tables.update(tmp_path, "tasks").read_text().splitlines()[0]
    assert header == (
        "experiment,platform,source,model,method,label,settings,batch_size,prompt_len,gen_len,prefill_s,decode_s,"
        "total_s,tokens_per_s,step_p50_s,step_p95_s,h2d_bytes,d2h_bytes,weights_on_device,weight_bytes,device_read_bytes,"
        "device_kv_bytes,exposed_transfer_s,link_bytes_per_s,peak_device_bytes,size,device_frac,run_id,attention_s,ffn_s,prediction_s,transfer_s,other_s"
    )


def test_a_task_row_is_exact(tmp_path: Path) -> None:
    record = save_task(tmp_path, "method=h2o", size=0.1 + 0.2)
    (row,) = rows(tables.update(tmp_path, "fig11"))
    assert row == {
        "experiment": "fig11",
        "model": "smollm2-135m",
        "method": "h2o",
        "label": "H2O",
        "settings": "",
        "task": "passkey",
        "metric": "acc",
        "value": "0.75",
        "stderr": "0.0625",
        **dict.fromkeys(names(COMPARED), ""),
        "num_samples": "48",
        "num_fewshot": "0",
        "seq_len": "",
        "size": "0.30000000000000004",
        "size_artifact": "0.1",
        "device_frac": "0.35000000000000003",
        "resident_frac": "0.02",
        "source": "measured",
        "run_id": record["run_id"],
    }


def test_a_text_has_a_row_per_measured_metric(tmp_path: Path) -> None:
    save_text(tmp_path, "seq_len=512")
    found = rows(tables.update(tmp_path, "perplexity"))
    metrics = {row["metric"]: (row["value"], row["stderr"]) for row in found}
    assert metrics == {
        "perplexity": ("12.5", "0.25"),
        "perplexity_full": ("11.0", "0.2"),
        "kl_nats": ("0.0625", "0.01"),
        "top1_agreement": ("0.875", "0.01"),
    }
    assert {(row["task"], row["seq_len"], row["num_samples"], row["num_fewshot"]) for row in found} == {
        ("offline", "512", "3", "")
    }


def test_chunks_stand_in_the_task_in_order(tmp_path: Path) -> None:
    chunks = [
        {"first": 256 * index, "stop": 256 * (index + 1), "num_tokens": 256, "metrics": {"perplexity": 10.0 + index}}
        for index in (4, 1, 3, 2)
    ]
    save_text(tmp_path, chunks=chunks)
    path = tables.update(tmp_path, "perplexity")
    found = [(row["task"], row["value"]) for row in rows(path) if "[" in row["task"]]
    assert found == [
        ("offline[256:512]", "11.0"),
        ("offline[512:768]", "12.0"),
        ("offline[768:1024]", "13.0"),
        ("offline[1024:1280]", "14.0"),
    ]
    text = path.with_suffix(".md").read_text()
    assert "by range of tokens" in text and "offline[256:512] perplexity" in text


def test_a_range_has_a_row_for_each_metric_and_texts_say_their_length(tmp_path: Path) -> None:
    metrics = {"kl_nats": 0.5, "kl_nats_stderr": 0.1, "text_perplexity": None, "repetition": 0.25}
    chunk = {"first": 16, "stop": 32, "num_tokens": 48, "metrics": metrics | {"text_perplexity": 2.0}}
    whole = {"offline": metrics | {"seq_len": 512, "num_samples": 3, "size": 0.16}}
    save(tmp_path, ["experiment=long_decode"], whole, chunks=[chunk])
    path = tables.update(tmp_path, "long_decode")
    found = [(row["task"], row["metric"], row["value"], row["stderr"]) for row in rows(path)]
    assert found == [
        ("offline", "kl_nats", "0.5", "0.1"),
        ("offline", "repetition", "0.25", ""),
        ("offline[16:32]", "kl_nats", "0.5", "0.1"),
        ("offline[16:32]", "text_perplexity", "2.0", ""),
        ("offline[16:32]", "repetition", "0.25", ""),
    ]
    assert {row["seq_len"] for row in rows(path)} == {"512"}
    assert "offline repeated 4-grams (%)" in path.with_suffix(".md").read_text()


def test_a_text_file_is_named_without_its_folder(tmp_path: Path) -> None:
    record = save_text(tmp_path)
    record["metrics"] = {"/home/someone/book.txt": record["metrics"]["offline"]}
    assert {row["task"] for row in tables.rows_of(record, Baselines(()))} == {"book.txt"}


def test_order_depends_on_the_records_alone(tmp_path: Path) -> None:
    settings = ["method=h2o", "method=full", "method=infinigen", "method=infinigen method.alpha=4"]
    orders = (settings, settings[::-1])
    texts = []
    for number, order in enumerate(orders):
        for overrides in order:
            save_task(tmp_path / str(number), *overrides.split())
        path = tables.update(tmp_path / str(number), "fig11")
        texts.append((path.read_bytes(), path.with_suffix(".md").read_bytes()))
    assert texts[0] == texts[1]
    lines = texts[0][1].decode().splitlines()
    labels = [line.split(" | ")[0].strip("| ") for line in lines if line.startswith("|")][2:]
    assert labels == ["Full cache", "H2O", "InfiniGen", "InfiniGen"]


def test_update_replaces_the_table_and_leaves_no_scratch(tmp_path: Path) -> None:
    record = save_task(tmp_path)
    tables.update(tmp_path, "fig11")
    path = records.record_path(tmp_path, "fig11", record["run_id"])
    path.unlink()
    assert rows(tables.update(tmp_path, "fig11")) == []
    assert sorted(file.name for file in (tmp_path / "tables").iterdir()) == ["fig11.csv", "fig11.md"]


def test_runs_without_numbers_have_no_row(tmp_path: Path) -> None:
    save_task(tmp_path, "method=full", status="failed")
    save_task(tmp_path, "method=h2o", status="interrupted")
    assert rows(tables.update(tmp_path, "fig11")) == []


def test_damaged_records_are_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = save_task(tmp_path, "method=full")
    cut = save_task(tmp_path, "method=h2o")
    hollow = save_task(tmp_path, "method=int4")
    records.record_path(tmp_path, "fig11", cut["run_id"]).write_text(json.dumps(cut)[:-40])
    del hollow["config"]["model"]
    records.write_record(records.record_path(tmp_path, "fig11", hollow["run_id"]), hollow)
    with caplog.at_level(logging.WARNING):
        (row,) = rows(tables.update(tmp_path, "fig11"))
    assert row["run_id"] == good["run_id"]
    assert len(caplog.messages) == 2
    for run in (cut["run_id"], hollow["run_id"]):
        (said,) = [message for message in caplog.messages if run in message]
        assert "damaged record" in said and "\n" not in said


def test_records_of_another_shape_do_not_empty_a_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of the experiment's own kind count, however many others an older version left under its name."""
    kept = save_text(tmp_path, "method=h2o")
    for batch in (1, 2):
        save(tmp_path, ["experiment=perplexity"], LATENCY_METRICS, kind="latency", text=batch)
    assert {row["run_id"] for row in rows(tables.update(tmp_path, "perplexity"))} == {kept["run_id"]}
    assert "runs/perplexity: 2 records of another shape of table, latency" in caplog.text
    save(tmp_path, ["experiment=latency"], LATENCY_METRICS)
    for text in (1, 2):
        save_text(tmp_path, "experiment=latency", kind="perplexity", text=text)
    assert "tokens_per_s" in rows(tables.update(tmp_path, "latency"))[0]


def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    save_task(tmp_path)
    (tmp_path / "tables").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="tables"):
        tables.update(tmp_path, "fig11")


def cells(text: str, start: str) -> list[str]:
    """The cells of the Markdown line that begins so."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_markdown_has_units_and_errors(tmp_path: Path) -> None:
    save_text(tmp_path, "method=h2o")
    text = tables.update(tmp_path, "perplexity").with_suffix(".md").read_text()
    assert "## smollm2-135m, measured" in text
    expected = {
        "label": "H2O",
        "settings": "-",
        "KV read (%)": "16.0",
        "device read (%)": "21.0",
        "on device (%)": "2.0",
        "offline perplexity": "12.500 ± 0.250",
        "offline full cache's perplexity": "11.000 ± 0.200",
        "offline KL (nats)": "0.0625 ± 0.0100",
        "offline top-1 agreement (%)": "87.5 ± 1.0",
    }
    assert dict(zip(cells(text, "label"), cells(text, "H2O"), strict=True)) == expected


def test_rounding_noise_below_zero_has_no_sign() -> None:
    shown = METRICS["kl_nats"]
    assert shown.show(-1e-9, 1e-9) == "0.0000 ± 0.0000" and shown.show(-0.5) == "-0.5000"


def test_summary_joins_runs_of_the_same_method_and_settings(tmp_path: Path) -> None:
    chosen = [save_task(tmp_path, "method=infinigen", f"method.alpha={alpha}") for alpha in (4, 6)]
    chosen += [save_text(tmp_path, "method=infinigen", "method.alpha=4", size=0.12)]
    text = tables.summary(chosen)
    lines = text.splitlines()
    first, second = lines[-2:]
    assert first.split("  ")[0] == second.split("  ")[0] == "InfiniGen"
    assert first.split("  ")[-1].strip() == "87.5 ± 1.0" and "alpha=4" in first and "12.0-16.0" in first
    assert "alpha=6" in second and second.endswith("-")
    assert "full cache's" not in text and len({len(line) for line in lines[2:]}) == 1


def test_summary_hides_no_run(tmp_path: Path) -> None:
    """The same settings on another input are another run, and stand in a line of their own."""
    first = save_task(tmp_path, "method=h2o")
    second = copy.deepcopy(first)
    second["run_id"] = second["settings_id"] = "0" * 16
    second["metrics"]["passkey"]["acc"] = 0.5
    text = tables.summary([first, second])
    assert "75.0 ± 6.2" in text and "50.0 ± 6.2" in text


def test_settings_are_those_that_set_runs_of_a_method_apart(tmp_path: Path) -> None:
    chosen = [save_task(tmp_path, "method=h2o", f"method.heavy_frac={frac}") for frac in (0.1, 0.2, 0.3)]
    chosen += [save_task(tmp_path, "method=h2o", "method.recent_frac=0.3")]  # 0.1 is common to the others
    settings = [line.split("  ")[1:] for line in tables.summary(chosen).splitlines()[-4:]]
    texts = sorted(next(cell.strip() for cell in cells if cell.strip()) for cells in settings)
    tenth = "heavy_frac=0.1"  # in two of four runs, hence not common
    assert texts == [tenth, f"{tenth}, recent_frac=0.3", "heavy_frac=0.2", "heavy_frac=0.3"]


def test_a_table_of_an_older_version_is_read_without_the_sizes_that_it_lacks(tmp_path: Path) -> None:
    save_task(tmp_path, "method=h2o")
    path = tables.update(tmp_path, "fig11")
    lacking = ("device_frac", "resident_frac")
    older = [{name: cell for name, cell in row.items() if name not in lacking} for row in rows(path)]
    assert shape_of(tuple(older[0])) == "accuracy"
    (old,) = sheets_of([typed(row) for row in older])
    (new,) = sheets_of([typed(row) for row in rows(path)])
    assert [heading for heading in new.header if heading not in old.header] == ["device read (%)", "on device (%)"]


def test_an_older_versions_bytes_on_the_device_stand_under_todays_name(tmp_path: Path) -> None:
    metrics = dict(LATENCY_METRICS)
    save(tmp_path, ["experiment=latency"], metrics | {"device_bytes": metrics.pop("device_kv_bytes")})
    (row,) = rows(tables.update(tmp_path, "latency"))
    assert row["device_kv_bytes"] == str(2**22)
    older = {"device_bytes" if name == "device_kv_bytes" else name: cell for name, cell in row.items()}
    assert shape_of(tuple(older)) == "latency"
    for sheet in (*sheets_of([typed(older)]), *sheets_of([typed(row)])):
        assert dict(zip(sheet.header, sheet.lines[0], strict=True))["KV on device (MiB)"] == "4.0"


def test_a_share_that_only_an_older_version_recorded_is_no_metric(tmp_path: Path) -> None:
    save(tmp_path, ["experiment=fig11"], {"passkey": TASK_METRICS | {"size": 0.2, "index_frac": 0.1}})
    assert [row["metric"] for row in rows(tables.update(tmp_path, "fig11"))] == ["acc"]


def test_summary_parts_lengths(tmp_path: Path) -> None:
    chosen = [save_text(tmp_path, "method=h2o", f"seq_len={length}") for length in (512, 1024)]
    assert [f"seq_len={length}" in tables.summary(chosen) for length in (512, 1024)] == [True, True]
    assert "seq_len" not in tables.summary(chosen[:1])


def sheet(text: str) -> list[dict[str, str]]:
    """The lines of the first table of a Markdown file, by heading."""
    lines = [line for line in text.split("\n## ")[1].splitlines() if line.startswith("|")]
    header, _, *body = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [dict(zip(header, cells, strict=True)) for cells in body]


def test_a_line_is_a_method_and_its_settings_not_where_its_data_come_from(tmp_path: Path) -> None:
    """Tasks from local files, generated ones and texts share a line; none of them claims what holds for another."""
    local = ["data=local", f"data.root={tmp_path}", "num_samples=100"]
    for skew in ("true", "false"):
        method = ["experiment=fig13", "method=infinigen", f"method.skew={skew}", f"label=skew {skew}"]
        sizes = {"size": 0.2, "size_artifact": None}
        save(tmp_path, [*method, "tasks=[copa]", *local], {"copa": TASK_METRICS | sizes | {"num_samples": 100}})
        save(tmp_path, [*method, "tasks=[passkey]", "num_samples=48"], {"passkey": TASK_METRICS | sizes})
        save(tmp_path, [*method, "kind=perplexity", *local[:2]], {"offline": TEXT_METRICS | sizes})
    path = tables.update(tmp_path, "fig13")
    found = sheet(path.with_suffix(".md").read_text())
    assert [(line["label"], line["settings"]) for line in found] == [
        ("skew false", "skew=False"), ("skew true", "skew=True"),
    ]  # fmt: skip
    assert all(MISSING not in line.values() for line in found)
    assert {"copa acc (%), n = 100", "passkey acc (%), n = 48", "offline perplexity, n = 3"} <= set(found[0])
    assert {row["settings"] for row in rows(path)} == {"skew=False", "skew=True"}


def test_runs_on_one_task_that_differ_in_their_conditions_have_a_line_each(tmp_path: Path) -> None:
    save_text(tmp_path, "method=h2o", "seq_len=512")
    save_text(tmp_path, "method=h2o", "seq_len=1024")
    save(tmp_path, ["experiment=perplexity", "kind=tasks", "method=h2o"], {"passkey": TASK_METRICS | {"size": 0.1}})
    path = tables.update(tmp_path, "perplexity")
    assert {row["settings"]: (row["task"], row["seq_len"]) for row in rows(path)} == {
        "seq_len=512": ("offline", "512"), "seq_len=1024": ("offline", "1024"), "": ("passkey", ""),
    }  # fmt: skip
    found = sheet(path.with_suffix(".md").read_text())
    assert [line["settings"] for line in found] == [MISSING, "seq_len=512", "seq_len=1024"]


def test_no_two_settings_have_the_same_words(tmp_path: Path) -> None:
    """What most runs set is told of each where another leaves it out."""
    for alpha in (3, 4, 6):
        save_task(tmp_path, "method=infinigen", f"method.alpha={alpha}", "size=0.2")
    save_text(tmp_path, "experiment=fig11", "kind=perplexity", "method=infinigen", "method.alpha=4")
    found = {row["task"]: row["settings"] for row in rows(tables.update(tmp_path, "fig11")) if "4.0" in row["settings"]}
    assert found == {"passkey": "alpha=4.0, size=0.2", "offline": "alpha=4.0"}


def test_timed_runs_of_one_label_are_told_apart(tmp_path: Path) -> None:
    for label, given in (("infinigen", []), ("infinigen", ["method.alpha=3"]), ("offload+int4", [])):
        save(tmp_path, ["experiment=latency", f"label={label}", *given], LATENCY_METRICS, text=str(given))
    path = tables.update(tmp_path, "latency")
    assert sorted((row["label"], row["settings"]) for row in rows(path)) == [
        ("infinigen", ""), ("infinigen", "alpha=3.0"), ("offload+int4", ""),
    ]  # fmt: skip
    assert [line["settings"] for line in sheet(path.with_suffix(".md").read_text())] == [MISSING, "alpha=3.0", MISSING]


def test_a_csv_gives_the_tables_that_its_records_gave(tmp_path: Path) -> None:
    save_task(tmp_path, "method=h2o")
    save_text(tmp_path, "experiment=fig11", "kind=perplexity", "method=h2o")
    save(tmp_path, ["experiment=latency", "label=offload"], LATENCY_METRICS)
    point = {"series": "a", "metric": "bytes", "value": 2.0**30, "stderr": None, "num_samples": 1}
    places = ({"x_name": "layer", "x": 3.0, "layer": 3}, {"x_name": None, "x": None, "layer": None})
    metrics = {"source": "measured", "points": [point | place for place in places]}
    save(tmp_path, ["experiment=table1"], metrics)
    for name in ("fig11", "latency", "table1"):
        path = tables.update(tmp_path, name)
        assert shape_of(path.read_text().splitlines()[0].split(",")) == SHAPES.get(name, "accuracy")
        read = list(map(typed, rows(path)))
        assert render_markdown(name, read) == path.with_suffix(".md").read_text(), name


def test_a_column_has_one_line() -> None:
    every = {column for columns in TABLES.values() for column in columns}
    assert len({column.name for column in every}) == len(every)
    assert all(column.heading for column in every if column.digits is not None)
    assert shape_of(["a", "b"]) is None and typed({"mine": "1", "value": ""}) == {"mine": "1", "value": None}


def test_summary_of_nothing_is_empty(tmp_path: Path) -> None:
    assert tables.summary([save_task(tmp_path, status="failed")]) == ""


def test_latency_is_in_seconds_and_bytes_inside_and_in_ms_and_gib_for_people(tmp_path: Path) -> None:
    save(tmp_path, ["experiment=tasks", "label=offload"], LATENCY_METRICS, kind="latency")
    path = tables.update(tmp_path, "tasks")
    (row,) = rows(path)
    assert {key: row[key] for key in ("label", "prefill_s", "h2d_bytes", "link_bytes_per_s", "source")} == {
        "label": "offload",
        "prefill_s": "2.0",
        "h2d_bytes": str(2**31),
        "link_bytes_per_s": "",
        "source": "emulated",
    }
    text = path.with_suffix(".md").read_text()
    shown = dict(zip(cells(text, "label"), cells(text, "offload"), strict=True))
    assert shown["prefill (ms)"] == "2000.0" and shown["step p50 (ms)"] == "62.50"
    assert shown["to device (GiB)"] == "2.000" and shown["tokens/s"] == "12.80"
    assert "link (GiB/s)" not in shown, "what no run measured has no column"
    assert "## smollm2-135m, emulated" in text


def test_latency_has_the_segments_of_a_block(tmp_path: Path) -> None:
    segments = {
        "attention_s": 0.001,
        "ffn_s": 0.002,
        "prediction_s": None,
        "transfer_s": 0.004,
        "other_s": 0.0,
    }
    save(tmp_path, ["experiment=latency"], LATENCY_METRICS | segments)
    (row,) = rows(tables.update(tmp_path, "latency"))
    assert tuple(row) == names(LATENCY)
    assert [row[name] for name in names(SEGMENTS)] == ["0.001", "0.002", "", "0.004", "0.0"]


def save_cells(results: Path, shapes: list[dict[str, Any]], **fields: Any) -> None:
    for shape in shapes:
        for label in ("ideal", "offload"):
            given = [f"label={label}", *(f"{name}={value}" for name, value in shape.items())]
            save(results, ["experiment=latency", *given], LATENCY_METRICS | fields | shape, text=str(fields))


def test_each_figure_of_speed_has_its_rows_of_the_timed_cells(tmp_path: Path) -> None:
    shapes = [(1, 1024), (4, 1024), (8, 1024), (4, 512), (4, 2048)]
    save_cells(tmp_path, [{"batch_size": batch, "prompt_len": prompt} for batch, prompt in shapes])
    save_cells(tmp_path, [{"batch_size": 2, "prompt_len": 64}], platform="cuda", source="measured")
    assert len(rows(tables.update(tmp_path, "latency"))) == 12
    found = {}
    for figure in ("fig14", "fig15", "fig16a", "fig18"):
        path = tmp_path / "tables" / f"{figure}.csv"
        assert path.with_suffix(".md").read_text().startswith(f"# {figure}\n")
        read = rows(path)
        assert {row["experiment"] for row in read} == {figure}
        assert [row["label"] for row in read if row["source"] == "measured"] == ["ideal", "offload"]
        emulated = [row for row in read if row["source"] == "emulated"]
        found[figure] = sorted({(int(row["batch_size"]), int(row["prompt_len"])) for row in emulated})
        assert len(emulated) == 2 * len(found[figure])
    assert found["fig15"] == [(1, 1024), (4, 1024), (8, 1024)] and found["fig14"] == [(8, 1024)], "its largest batch"
    assert found["fig16a"] == [(4, 512), (4, 1024), (4, 2048)] and found["fig18"] == [(4, 2048)], "its longest"
    assert not (tmp_path / "tables" / "fig16b.csv").exists(), "one model is no comparison"


def test_fig16b_is_of_the_shapes_that_several_models_were_timed_at(tmp_path: Path) -> None:
    save_cells(tmp_path, [{"batch_size": 1}, {"batch_size": 4}])
    save_cells(tmp_path, [{"batch_size": 4, "model": "opt-125m"}])
    tables.update(tmp_path, "latency")
    read = rows(tmp_path / "tables" / "fig16b.csv")
    assert sorted((row["model"], row["batch_size"]) for row in read) == 2 * [("opt-125m", "4")] + 2 * [
        ("smollm2-135m", "4")
    ]
    for path in (tmp_path / "runs" / "latency").glob("*"):
        if json.loads((path / "record.json").read_text())["config"]["model"]["name"] == "opt-125m":
            (path / "record.json").unlink()
    tables.update(tmp_path, "latency")
    assert not list((tmp_path / "tables").glob("fig16b.*")), "a table that has no rows any more"


def test_tables_import_no_torch() -> None:
    program = "import sys, harness.tables.write; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


GENERATED = {"exact_match,strict-match": 0.5, "exact_match,strict-match_stderr": 0.1, "num_samples": 8, "size": 0.2}
GROUP = {"acc": 0.75, "acc_stderr": None, "num_samples": 16, "tasks": ["a", "b"], "size": 0.2}
LENGTHS = {"512": 0.25, "2048": 0.5, "2048_stderr": None, "num_samples": 8, "size": 0.2}


def test_a_terminal_shows_whatever_lm_eval_measured(tmp_path: Path) -> None:
    metrics = {"gsm8k": GENERATED, "mmlu": GROUP, "ruler_vt": LENGTHS, "qa": {"f1": 0.5, "acc_norm": 0.5}}
    record = save(tmp_path, ["experiment=tasks"], metrics)
    rows = tables.rows_of(record, Baselines(()))
    (sheet,) = sheets_of([row | {"settings": ""} for row in rows])
    headings = ["mmlu acc (%)", "gsm8k exact_match, strict-match (%)", "ruler_vt right at 512 tokens (%)"]
    assert [heading for heading in sheet.header if heading.partition(", n = ")[0] in headings]
    shown = " ".join(tables.summary([record]).split())
    assert all(word in shown for word in ("strict-match", "512", "2,048", "f1")) and "norm" not in shown
    assert "50.0 ± 10.0" in shown


def test_a_wide_table_folds_in_a_terminal(tmp_path: Path) -> None:
    record = save(tmp_path, ["experiment=tasks"], {f"task_{number}": TASK_METRICS for number in range(40)})
    parts = tables.summary([record]).split("\n\n")
    assert len(parts) > 1 and all(len(line) <= MAX_WIDTH for part in parts for line in part.splitlines())
    assert all(part.splitlines()[2].startswith("label") and "InfiniGen" in part for part in parts)
    assert " ".join(parts).count("75.0 ± 6.2") == 40 and "continued" in parts[1] and "continued" not in parts[0]

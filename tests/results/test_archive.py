"""Results as one archive: its members, damage that is refused, and what a comparison of two results finds."""

from __future__ import annotations

import json
import math
import re
import shutil
import stat
import statistics
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness import report
from harness.report.__main__ import main as report_main
from harness.results import archive
from harness.results import compare as comparing
from harness.results import record as records
from harness.results import write as tables
from harness.run.cli import main
from tests.results.test_tables import LATENCY_METRICS, TEXT_METRICS, answers, save, shares
from tests.runs import refusal_of

RAN = {
    "environment": {"python": "3.11.7", "cpu": "a processor", "packages": {"torch": "2.13.0"}, "commit": "abc"},
    "inputs": {"code:sources": "a" * 64, "model": "c" * 64, "corpus": "d" * 64},
}
SHARES = shares(0.2)
HITS = (1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)
OTHER_HITS = (0.0, *HITS[1:])
NLLS = (2.0, 2.5, 3.0)
TIMED_RUN = ["experiment=latency", "system=offload"]
CAPACITY_RUN = ["experiment=capacity", "system=offload", "platform.device_gib=1"]


def save_task(results: Path, method: str, hits: tuple[float, ...] = HITS, **fields: Any) -> dict[str, Any]:
    metrics = {"acc": sum(hits) / len(hits), "acc_stderr": 0.2, "num_samples": len(hits), "num_fewshot": 0}
    ran = RAN | {"samples": {"passkey": answers(hits)}} | fields
    return save(results, ["experiment=fig11", f"method={method}"], {"passkey": metrics | SHARES}, **ran)


def save_text(results: Path, method: str, nlls: tuple[float, ...] = NLLS) -> None:
    metrics = TEXT_METRICS | SHARES | {"perplexity": math.exp(sum(nlls) / len(nlls)), "perplexity_stderr": 2.0}
    ran = RAN | {"samples": {"windows": [{"nll": nll} for nll in nlls]}}
    save(results, ["experiment=perplexity", f"method={method}"], {"offline": metrics}, **ran)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Two methods on a task, one on a text, a timed run, and a run that failed; tables and a figure."""
    folder = tmp_path_factory.mktemp("results")
    save_task(folder, "full")
    save_task(folder, "h2o", HITS[::-1])
    save_text(folder, "h2o")
    save(folder, TIMED_RUN, LATENCY_METRICS, **RAN)
    save_task(folder, "streaming", status="failed", error="UserError: out of memory")
    for experiment in ("fig11", "perplexity", "latency"):
        tables.update(folder, experiment)
    (folder / "figures").mkdir()
    (folder / "figures" / "fig11.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (folder / "figures" / "fig11.png").touch()
    (folder / "figures" / "fig11.pdf").touch()
    (folder / "findings.yaml").write_text(json.dumps({"fig11": "H2O reads less."}))
    return folder


@pytest.fixture
def other(results, tmp_path) -> Path:
    """A copy of the results, to be changed."""
    return Path(shutil.copytree(results, tmp_path / "other"))


@pytest.fixture(scope="module")
def packed(results, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("shared") / "a.zip"
    archive.export(results, str(target))
    return target


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as opened:
        return {info.filename: opened.read(info) for info in opened.infolist()}


# Writing


def test_the_members_are_the_results(results, packed):
    found = members(packed)
    assert all((results / name).read_bytes() == data for name, data in found.items())
    kept = {str(path.relative_to(results)) for path in results.rglob("*") if path.is_file() and path.suffix != ".pdf"}
    assert set(found) == kept and sum(name.startswith("runs/") for name in found) == 5


def test_other_models_are_packed_and_interrupted_runs_and_an_old_report_are_left_out(other, tmp_path):
    save_task(other, "tova", status="interrupted")
    (other / "report.html").touch()
    outputs = tmp_path / "outputs"
    shutil.copytree(other, outputs / "opt-125m")
    said = archive.export(outputs, str(target := tmp_path / "a.zip"))
    assert said.startswith(f"{target}: 5 records, ") and "opt-125m/report.html" not in members(target)
    with archive.opened(target) as folder:
        assert report.write_report(folder).exists()
        assert len(list(records.read_all(folder / "opt-125m"))) == 5


def test_the_command_exports_to_a_file_or_a_folder(results, packed, tmp_path, capsys):
    assert main([f"export={tmp_path}/new/mine.zip", f"results_dir={results}"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"mine\.zip: 5 records, \d+ tables, figures and pages, 0\.\d MiB\n", said)
    assert main([f"export={tmp_path}", f"results_dir={results}"]) == 0
    for path in (tmp_path / f"{results.name}.zip", tmp_path / "new" / "mine.zip"):
        assert members(path) == members(packed)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (main, ["export=a.zip", "results_dir=none"], "results_dir=none: nothing to share, neither finished run nor"),
        (main, ["export=a.zip", "results_dir=empty"], "results_dir=empty: nothing to share, neither finished run nor"),
        (main, ["export=a.zip", "results_dir=full", "seed=3"], "seed=3: export=a.zip runs nothing; beside it only res"),
        (main, ["export=file/a.zip", "results_dir=full"], "export=file/a.zip: file: "),
        (main, ["export=''", "results_dir=full"], "export=: must be a folder, or a file whose name ends with .zip"),
        (comparing.main, ["full", "none.zip"], "none.zip: no such results folder or archive"),
        (comparing.main, ["tables", "full"], "tables: no finished run in it, and tables alone do not say what was run"),
    ],
)
def test_a_wrong_export_or_comparison_is_one_line_and_leaves_nothing(
    command, arguments, message, results, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    shutil.copytree(results, "full")
    shutil.copytree(results / "tables", "tables/tables")
    assert refusal_of(command, arguments, capsys).startswith(message)
    assert not list(tmp_path.rglob("*.zip*"))


# Reading


def test_a_report_of_an_archive_is_that_of_its_folder(results, packed, tmp_path, capsys):
    shutil.copytree(results, tmp_path / "folder")
    expected = report.write_report(tmp_path / "folder").read_bytes()
    shutil.copy(packed, tmp_path / "a.zip")
    assert report_main(["--results-dir", str(tmp_path / "a.zip")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").read_bytes() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "folder", "report.html"]


def rewrite(path: Path, changed: dict[str, bytes], infos: tuple[zipfile.ZipInfo, ...] = ()) -> Path:
    """The archive with other or further members; `infos` are added, each with one byte."""
    target = path.with_name("changed.zip")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as written:
        for name, data in (members(path) | changed).items():
            written.writestr(name, data)
        for info in infos:
            written.writestr(info, b"x")
    return target


def with_a_record_of_nothing(packed: Path) -> bytes:
    chosen = next(name for name in members(packed) if name.startswith("runs/"))
    return rewrite(packed, {chosen: b"{}"}).read_bytes()


CSV, NO_ARCHIVE = "tables/fig11.csv", "no archive of results, or damaged"
DAMAGED: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "a record of nothing": (with_a_record_of_nothing, "no record of this"),
    "no table": (lambda packed: rewrite(packed, {CSV: b"no"}).read_bytes(), f"/{CSV}: not a table of results"),
    "no zip": (lambda packed: b"no zip", NO_ARCHIVE),
    "half": (lambda packed: packed.read_bytes()[: packed.stat().st_size // 2], NO_ARCHIVE),
}


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch) -> Callable[[Path], str]:
    """Asks for a report, which is refused in one line and leaves nothing; returns the line."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(archive.tempfile, "tempdir", str(temporary))

    def refuse(path: Path) -> str:
        line = refusal_of(report_main, ["--results-dir", str(path)], capsys)
        assert not (path.parent / "report.html").exists() and not list(temporary.iterdir())
        return line

    return refuse


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_archive_is_refused_by_name(name, packed, refused, tmp_path):
    damage, message = DAMAGED[name]
    (tmp_path / "a.zip").write_bytes(damage(packed))
    line = refused(tmp_path / "a.zip")
    assert message in line and str(tmp_path / "a.zip") in line
    assert "no such results folder or archive" in refused(tmp_path / "none.zip")


def test_no_member_is_written_outside_of_the_folder(packed, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(archive.tempfile, "tempdir", str(temporary))
    link = zipfile.ZipInfo("tables/link.csv")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    changed = rewrite(packed, {"../x": b""}, (link,))
    with archive.opened(changed) as folder:
        assert [path.name for path in temporary.iterdir()] == [folder.name] and (folder / "x").is_file()
        written = folder / "tables" / "link.csv"
        assert written.read_bytes() == b"x" and not written.is_symlink()
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]


# Comparing


def moved(one: Path, two: Path) -> dict[tuple[str, str], Any]:
    """The changes of what is not equal, by label and metric."""
    frame = comparing.compare(one, two)
    return {(each["label"], each["metric"]): each for each in frame[frame.moved].to_dict("records")}


def printed(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    assert comparing.main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_number_on_the_same_questions_is_compared_by_pairs(results, packed, other, capsys):
    said = re.match(r"(\d+) numbers in both: 0 moved; 0 only in A, 0 only in B\n$", printed(capsys, packed, results))
    assert int(said[1]) > 20
    save_task(other, "full", OTHER_HITS)
    ((key, change),) = moved(results, other).items()
    assert key == ("Full cache", "acc") and change["pairs"] == 8
    contexts = [-0.5, 0, 0, 0]  # mean difference of each
    assert change["difference"] == pytest.approx(statistics.mean(contexts))
    assert change["stderr"] == pytest.approx(statistics.stdev(contexts) / 2)
    assert abs(change["z"]) == pytest.approx(1.0)


def test_texts_are_compared_by_windows_or_prompts(tmp_path, results, other):
    save_text(other, "h2o", tuple(nll + 1e-4 * (1 + index) for index, nll in enumerate(NLLS)))
    ((key, change),) = moved(results, other).items()
    assert key == ("H2O", "perplexity") and change["pairs"] == 3
    assert change["difference"] == pytest.approx(2e-4 * math.exp(2.5), rel=1e-3)
    assert change["stderr"] < 1e-3 * math.exp(2.5) * 0.5 / math.sqrt(3), "what the two share does not count"
    for name, shift in (("one", 0.0), ("two", 0.5)):
        prompts = [{"nll": nll + shift, "kl_nats": nll} for nll in NLLS]
        metrics = {"text_perplexity": math.exp(2.5 + shift), "kl_nats": 2.5, "num_samples": 3} | SHARES
        command = ["experiment=long_decode", "method=h2o"]
        save(tmp_path / name, command, {"offline": metrics}, **RAN | {"samples": {"prompts": prompts}})
    ((key, change),) = moved(tmp_path / "one", tmp_path / "two").items()
    assert key == ("H2O", "text_perplexity") and change["pairs"] == 3
    assert change["difference"] == pytest.approx(math.exp(3) - math.exp(2.5))


@pytest.mark.parametrize(
    "fields", [{"text": "other", "started": "2027"}, {"samples": {"passkey": answers(OTHER_HITS, first=1)}}]
)
def test_numbers_of_other_questions_are_compared_as_independent(fields, results, other):
    save_task(other, "full", OTHER_HITS, **fields)
    ((_, change),) = moved(results, other).items()
    assert pd.isna(change["pairs"]) and change["stderr"] == pytest.approx(math.hypot(0.2, 0.2))


def test_the_largest_comes_first(results, other, capsys):
    inputs = {"code:sources": "b" * 64, "model": "f" * 64, "corpus": "d" * 64}
    save_task(other, "full", OTHER_HITS, inputs=inputs)
    save_task(other, "h2o", (0.0,) * 8, inputs=inputs)
    said = printed(capsys, results, other)
    assert said.startswith(f"{len(comparing.compare(results, other))} numbers in both: 2 moved")
    header, _, first, second = [re.split("  +", line.strip()) for line in said.splitlines()[2:6]]
    first, second = (dict(zip(header, cells, strict=True)) for cells in (first, second))
    assert (first["label"], second["label"]) == ("H2O", "Full cache")
    assert (first["metric"], first["task"], first["A"], first["B"]) == ("acc", "passkey", "0.625", "0")
    assert abs(float(first["z"])) > abs(float(second["z"])) > 0


def test_results_without_a_common_run_are_refused_in_one_line(tmp_path, results, capsys):
    metrics = {"passkey": {"acc": 0.5, "acc_stderr": 0.2, **SHARES}}
    for seed in (4, 5):
        save(tmp_path / str(seed), ["experiment=fig11", "method=h2o", f"seed={seed}"], metrics, **RAN)
    line = refusal_of(comparing.main, [str(tmp_path / "4"), str(tmp_path / "5")], capsys)
    assert line == f"no run is both in A={tmp_path / '4'} and in B={tmp_path / '5'}"


def test_speed_is_compared(results, other, capsys):
    shutil.rmtree(other / "runs" / "latency")
    save(other, TIMED_RUN, LATENCY_METRICS | {"decode_s": 1.0, "tokens_per_s": 6.4}, **RAN)
    save_task(other, "quest")
    said = printed(capsys, results, other)
    assert "2 moved; 0 only in A, 4 only in B\n" in said
    assert re.search(r"0\.5 +1 +0\.5 +decode_s +latency .* offload +4 +1024 +8\n", said)
    assert re.search(r"12\.8 +6\.4 +-6\.4 +tokens_per_s +latency", said)


def test_what_a_device_holds_is_compared(tmp_path):
    batch = {name: LATENCY_METRICS[name] for name in ("platform", "source", "prompt_len", "gen_len", "budget")}
    for name, largest in (("one", 16), ("two", 8)):
        points = [batch | {"batch_size": 4, "memory_bytes": memory, "largest_batch": fits}
                  for memory, fits in ((2**30, 16), (2**31, largest))]  # fmt: skip
        save(tmp_path / name, CAPACITY_RUN, {"points": points}, table="capacity", **RAN)
    frame = comparing.compare(tmp_path / "one", tmp_path / "two")
    (found,) = frame[frame.moved].to_dict("records")
    assert (found["metric"], found["memory_bytes"], found["difference"]) == ("largest_batch", 2**31, -8)


def test_a_strangers_names_fit_a_terminal(tmp_path, capsys):
    for name, hits in (("one", HITS), ("two", OTHER_HITS)):
        label = "label='\x1b[2J" + "x" * 200 + "'"
        metrics = {"passkey": {"acc": sum(hits) / 8, **SHARES}}
        save(tmp_path / name, ["experiment=fig11", "method=h2o", label], metrics, **RAN)
    said = printed(capsys, tmp_path / "one", tmp_path / "two")
    assert "\x1b" not in said and "\\x1b[2Jxxx" in said

"""Results as one archive: what is in it, that it is believed only as it was written, and what a comparison finds."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_tables import LATENCY_METRICS, TEXT_METRICS, save

from harness.errors import UserError
from harness.launch.cli import main
from harness.paper import report
from harness.paper.report.__main__ import main as report_main
from harness.records import archive, unpack
from harness.records import record as records
from harness.tables import compare as comparing
from harness.tables import write as tables

ROOT = Path(__file__).resolve().parent.parent
RAN = {
    "seconds": 90.0, "error": None, "started": "2026-01-01T00:00:00+00:00", "when": "kept", "samples": {},
    "environment": {"python": "3.11.7", "cpu": "a processor", "packages": {"torch": "2.13.0"}, "commit": "abc"},
    "inputs": {"code:method": "a" * 64, "code:harness": "b" * 64, "model": "c" * 64, "corpus": "d" * 64},
}  # fmt: skip
SIZES = {"size": 0.2, "size_artifact": 0.1, "device_frac": 0.25, "resident_frac": 0.02}
HITS = (1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)
NLLS = (2.0, 2.5, 3.0)


def questions(hits: tuple[float, ...]) -> list[dict[str, Any]]:
    """Two questions a context."""
    return [{"question": index, "context": index // 2, "acc": hit} for index, hit in enumerate(hits)]


def save_task(results: Path, method: str, hits: tuple[float, ...] = HITS, **fields: Any) -> dict[str, Any]:
    metrics = {"acc": sum(hits) / len(hits), "acc_stderr": 0.2, "num_samples": len(hits), "num_fewshot": 0}
    ran = RAN | {"samples": {"passkey": questions(hits)}} | fields
    return save(results, ["experiment=fig11", f"method={method}"], {"passkey": metrics | SIZES}, **ran)


def save_text(results: Path, method: str, nlls: tuple[float, ...] = NLLS, **fields: Any) -> dict[str, Any]:
    metrics = TEXT_METRICS | SIZES | {"perplexity": math.exp(sum(nlls) / len(nlls)), "perplexity_stderr": 2.0}
    ran = RAN | {"samples": {"windows": [{"nll": nll} for nll in nlls]}} | fields
    return save(results, ["experiment=perplexity", f"method={method}"], {"offline": metrics}, **ran)


def save_cell(results: Path, **metrics: float) -> dict[str, Any]:
    return save(results, ["experiment=latency", "label=offload"], LATENCY_METRICS | metrics, **RAN)


def fill(results: Path) -> Path:
    """Two methods on a task, one on a text, a timed cell, and a run that failed; tables and a figure."""
    save_task(results, "full")
    save_task(results, "h2o", HITS[::-1])
    save_text(results, "h2o")
    save_cell(results)
    save_task(results, "streaming", status="failed", error="UserError: out of memory")
    for experiment in ("fig11", "perplexity", "latency"):
        tables.update(results, experiment)
    (results / "figures").mkdir()
    Image.new("RGB", (400, 8)).save(results / "figures" / "fig11.png")
    (results / "figures" / "fig11.pdf").touch()
    (results / "findings.yaml").write_text(json.dumps({"fig11": "H2O reads less."}))
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    return fill(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def packed(results, tmp_path_factory) -> Path:
    return archive.pack(results, tmp_path_factory.mktemp("shared") / "a.zip").path


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as opened:
        return {info.filename: opened.read(info) for info in opened.infolist()}


# writing


def test_the_members_are_the_results_and_the_manifest_describes_them(results, packed):
    found = members(packed)
    manifest = json.loads(found.pop(archive.MANIFEST))
    assert manifest["schema"] == archive.SCHEMA
    assert manifest["members"] == {name: archive.digest(data) for name, data in found.items()}
    where = json.loads(found.pop(archive.ENVIRONMENT))
    assert where["export"]["python"] and [each["environment"] for each in where["runs"]] == [RAN["environment"]]
    assert all((results / name).read_bytes() == data for name, data in found.items())
    kept = {str(path.relative_to(results)) for path in results.rglob("*") if path.is_file() and path.suffix != ".pdf"}
    assert set(found) == kept
    runs = sorted(name.removeprefix("runs/").removesuffix("/record.json") for name in found if name.startswith("runs/"))
    assert len(runs) == 5
    assert manifest["inputs"] == {name: {digest: runs} for name, digest in RAN["inputs"].items()}


def test_interrupted_and_damaged_records_and_old_reports_are_left_out(results, tmp_path, caplog):
    copy = Path(shutil.copytree(results, tmp_path / "copy"))
    save_task(copy, "tova", status="interrupted")
    record = save_task(copy, "quest")
    del record["inputs"]
    records.write_record(records.record_path(copy, "fig11", record["run_id"]), record)
    (copy / "report.html").touch()
    packed = archive.pack(copy, tmp_path / "a.zip")
    assert (packed.num_records, packed.left_out) == (5, 2)
    assert "damaged record (no inputs); left out of the archive" in caplog.text
    assert "report.html" not in members(packed.path)


def test_the_same_results_give_the_same_bytes(results, packed, tmp_path):
    copy = Path(shutil.copytree(results, tmp_path / "copy"))
    for path in copy.rglob("*"):
        os.utime(path, (0, 0))
    again = archive.pack(copy, tmp_path / "b.zip")
    assert again.path.read_bytes() == packed.read_bytes()
    assert again.path.stat().st_mode & 0o777 == 0o644
    with zipfile.ZipFile(packed) as opened:
        assert {(info.date_time, stat.S_IMODE(info.external_attr >> 16)) for info in opened.infolist()} == {
            (archive.EPOCH, 0o644)
        }


def test_the_command_exports_to_a_file_or_a_folder(results, tmp_path, capsys):
    assert main([f"export={tmp_path}/new/mine.zip", f"results_dir={results}"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"mine\.zip: 5 records, \d+ tables, figures and pages, 0\.\d MiB, sha256 [0-9a-f]{64}\n", said)
    assert main([f"export={tmp_path}", f"results_dir={results}"]) == 0
    assert (tmp_path / f"{results.name}.zip").read_bytes() == (tmp_path / "new" / "mine.zip").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export=a.zip", "results_dir=none"], "results_dir=none: no such folder"),
        (["export=a.zip", "results_dir=empty"], "results_dir=empty: nothing to share, neither finished run nor table"),
        (["export=a.zip", "results_dir=full", "seed=3"], "seed=3: export=a.zip runs nothing; beside it only results"),
        (["export=full/a.zip", "results_dir=full"], "export=full/a.zip: lies inside results_dir=full"),
        (["export=full", "results_dir=full"], "export=full: lies inside results_dir=full"),
        (["export=file/a.zip", "results_dir=full"], "export=file/a.zip: file: "),
        (["export=''", "results_dir=full"], "export=: must be a folder, or a file whose name ends with .zip"),
        (["export=[a]", "results_dir=full"], "export=['a']: must be a folder, or a file whose name ends with .zip"),
        (["export=3", "results_dir=full"], "export=3: must be a folder, or a file whose name ends with .zip"),
    ],
)
def test_a_wrong_export_is_one_line_and_leaves_nothing(arguments, message, results, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    shutil.copytree(results, "full")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"error: {message}") and captured.err.count("\n") == 1
    assert not list(tmp_path.rglob("*.zip*"))


def test_export_and_compare_load_no_model_library():
    code = (
        "import sys, harness.launch.export, harness.tables.compare, harness.launch.cli;"
        "print([name for name in ('torch', 'transformers', 'lm_eval', 'pandas') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


# reading


def test_a_report_of_an_archive_is_that_of_its_folder(results, packed, tmp_path, capsys):
    expected = report.write_report(results, tmp_path / "folder.html").read_bytes()
    shutil.copy(packed, tmp_path / "a.zip")
    assert report_main(["--results-dir", str(tmp_path / "a.zip")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").read_bytes() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "folder.html", "report.html"]


def rewrite(path: Path, change: Callable[[dict[str, bytes]], object], infos: tuple[zipfile.ZipInfo, ...] = ()) -> Path:
    """The archive with other members; `infos` are added, each with one byte."""
    found = members(path)
    change(found)
    target = path.with_name("changed.zip")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as written:
        for name, data in found.items():
            written.writestr(name, data)
        for info in infos:
            written.writestr(info, b"x")
    return target


def edit(found: dict[str, bytes], change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest."""
    manifest = json.loads(found[archive.MANIFEST])
    change(manifest)
    found[archive.MANIFEST] = json.dumps(manifest).encode()


def put(found: dict[str, bytes], name: str, data: bytes) -> None:
    """Add or replace a member, and say so in the manifest: the work of one who knows the format."""
    found[name] = data
    edit(found, lambda manifest: manifest["members"].update({name: archive.digest(data)}))


def first(found: dict[str, bytes], pattern: str) -> str:
    return next(name for name in found if re.fullmatch(pattern, name))


RECORD = r"runs/fig11/.*"
CSV = "tables/fig11.csv"
TAMPERED: dict[str, tuple[Callable[[dict[str, bytes]], object], str]] = {
    "changed": (lambda found: found.update({CSV: found[CSV][:-2] + b"9\n"}), f"{CSV} is not what the manifest says"),
    "shorter": (lambda found: found.update({CSV: b""}), f"{CSV} is not what the manifest says"),
    "longer": (lambda found: found.update({CSV: found[CSV] + b"x"}), f"{CSV} is larger than the"),
    "missing": (lambda found: found.pop(CSV), f"{CSV} is missing"),
    "added": (lambda found: found.update({"tables/x.csv": b""}), "tables/x.csv is not in the manifest"),
    "no manifest": (lambda found: found.pop(archive.MANIFEST), "it has no MANIFEST.json"),
    "no JSON": (lambda found: found.update({archive.MANIFEST: b"{"}), "MANIFEST.json is damaged"),
    "deep JSON": (lambda found: found.update({archive.MANIFEST: b"[" * 10**5}), "MANIFEST.json is damaged"),
    "a list": (lambda found: found.update({archive.MANIFEST: b"[]"}), "MANIFEST.json is damaged"),
    "no inputs": (lambda found: edit(found, lambda manifest: manifest.pop("inputs")), "MANIFEST.json is damaged"),
    "a size below 0": (
        lambda found: edit(found, lambda manifest: manifest["members"][CSV].update(size=-1)),
        "MANIFEST.json is damaged",
    ),
    "another schema": (lambda found: edit(found, lambda manifest: manifest.update(schema=2)), "of schema 2; this"),
    "other inputs": (
        lambda found: edit(found, lambda manifest: manifest["inputs"].pop("model")),
        "the inputs in MANIFEST.json are not those of the records",
    ),
    "too large": (
        lambda found: edit(found, lambda manifest: manifest["members"][CSV].update(size=2**40)),
        "bytes unpacked, more than the",
    ),
    "a record of nothing": (lambda found: put(found, first(found, RECORD), b"{}"), "damaged record"),
    "a record of deep JSON": (lambda found: put(found, first(found, RECORD), b"[" * 10**5), "damaged record"),
    "absolute": (lambda found: put(found, "/tmp/x", b""), "unsafe name of a member, '/tmp/x'"),
    "upward": (lambda found: put(found, "tables/../../x", b""), "unsafe name of a member, 'tables/../../x'"),
    "a drive": (lambda found: put(found, "tables\\x", b""), "unsafe name of a member, 'tables\\\\x'"),
    "a folder": (lambda found: put(found, "tables/", b""), "unsafe name of a member, 'tables/'"),
    "not to be shown": (lambda found: put(found, "tables/\x1b[2J", b""), "unsafe name of a member, 'tables/\\x1b[2J'"),
    "a file as a folder": (lambda found: put(found, f"{CSV}/x", b""), "cannot be unpacked"),
    "a long name": (lambda found: put(found, "x" * 300, b""), "cannot be unpacked"),
}  # fmt: skip


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch) -> Callable[[Path], str]:
    """Asks for a report, which is refused in one line and leaves nothing; returns the line."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(unpack.tempfile, "tempdir", str(temporary))

    def refuse(path: Path) -> str:
        assert report_main(["--results-dir", str(path), "--output", str(tmp_path / "report.html")]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
        assert not (tmp_path / "report.html").exists() and not list(temporary.iterdir())
        return captured.err

    return refuse


@pytest.mark.parametrize("name", TAMPERED)
def test_a_changed_archive_is_refused_by_name(name, packed, refused):
    change, message = TAMPERED[name]
    line = refused(rewrite(packed, change))
    assert message in line and str(packed.with_name("changed.zip")) in line


def test_links_and_members_that_stand_twice_are_refused(packed, refused):
    link = zipfile.ZipInfo("tables/link.csv")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    changed = rewrite(
        packed, lambda found: put(found, "tables/link.csv", b"x") or found.pop("tables/link.csv"), (link,)
    )
    assert "tables/link.csv is a link" in refused(changed)
    with pytest.warns(UserWarning, match="Duplicate"):
        changed = rewrite(packed, lambda found: None, (zipfile.ZipInfo(CSV),))
    assert f"{CSV} is in it twice" in refused(changed)


def test_a_bomb_is_not_unpacked(packed, refused, monkeypatch):
    """Whatever the manifest says of a member of many zeros, no more than what it says is read of it."""
    bomb = bytes(2**24)
    changed = rewrite(packed, lambda found: put(found, "tables/x.csv", b"x") or found.update({"tables/x.csv": bomb}))
    assert "tables/x.csv is larger than the 1 bytes that are allowed" in refused(changed)
    monkeypatch.setattr(unpack, "MAX_BYTES", 2**20)
    changed = rewrite(packed, lambda found: put(found, "tables/x.csv", bomb))
    assert "bytes unpacked, more than the 1,048,576 that are read" in refused(changed)


def test_what_is_no_archive_is_refused(tmp_path, packed, refused):
    assert "no such results folder or archive" in refused(tmp_path / "none.zip")
    (tmp_path / "text.zip").write_text("no zip")
    assert "text.zip: not an archive of results, or damaged" in refused(tmp_path / "text.zip")
    data = packed.read_bytes()
    for end in (len(data) // 2, len(data) - 5):
        (tmp_path / "half.zip").write_bytes(data[:end])
        assert "half.zip: not an archive of results, or damaged" in refused(tmp_path / "half.zip")


@pytest.mark.parametrize("seed", range(40))
def test_an_archive_with_one_other_byte_gives_the_same_report_or_is_refused(seed, packed, tmp_path):
    data = bytearray(packed.read_bytes())
    place = seed * 7919 * 31 % len(data) if seed % 2 else len(data) - 1 - 37 * seed  # the directory is at the end
    data[place] ^= 1 << seed % 8
    path = tmp_path / "other.zip"
    path.write_bytes(data)
    try:
        with unpack.opened(path) as folder:
            found = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    except UserError as error:
        assert "\n" not in str(error)
    else:
        expected = members(packed)
        del expected[archive.MANIFEST]
        assert found == expected


@pytest.mark.parametrize("part", ["seconds", "error"])
def test_a_record_that_no_run_writes_is_one_line(part, packed, refused):
    def change(found: dict[str, bytes]) -> None:
        for name in [name for name in found if name.startswith("runs/")]:
            record = json.loads(found[name])
            del record[part]
            put(found, name, json.dumps(record).encode())

    line = refused(rewrite(packed, change))
    assert "changed.zip/runs/" in line and "damaged record (changed since it was written)" in line


def test_a_mistake_in_what_is_read_names_the_archive(packed, refused):
    changed = rewrite(packed, lambda found: put(found, CSV, b"no table"))
    assert f"{changed}/{CSV}: not a table of results" in refused(changed)


# comparing


def moved(one: Path, two: Path) -> dict[tuple[str, str], comparing.Change]:
    """What is not equal, by label and metric."""
    changes = comparing.compare(one, two).changes
    return {(each.before.row["label"], each.before.metric): each for each in changes if not each.is_equal}


def test_equal_results_have_not_moved(results, packed, capsys):
    assert comparing.main([str(packed), str(results)]) == 0
    said = capsys.readouterr().out
    count = int(re.match(r"(\d+) numbers in both: \1 equal, 0 moved\n$", said)[1])
    assert count > 20


def test_a_number_on_the_same_questions_is_compared_by_pairs(tmp_path, results):
    other = fill(tmp_path / "other")
    hits = (0.0, *HITS[1:])
    save_task(other, "full", hits)
    ((key, change),) = moved(results, other).items()
    assert key == ("Full cache", "acc") and change.num_pairs == 8
    differences = [-0.5, 0, 0, 0]  # of the four contexts
    mean = sum(differences) / 4
    assert change.difference == pytest.approx(mean)
    spread = math.sqrt(sum((each - mean) ** 2 for each in differences) / 3 / 4)
    assert change.stderr == pytest.approx(spread)
    assert change.sigmas == pytest.approx(1.0)


def test_perplexities_of_the_same_windows_are_compared_by_pairs(tmp_path, results):
    other = fill(tmp_path / "other")
    shift = 1e-4
    save_text(other, "h2o", tuple(nll + shift * (1 + index) for index, nll in enumerate(NLLS)))
    ((key, change),) = moved(results, other).items()
    assert key == ("H2O", "perplexity") and change.num_pairs == 3
    perplexity = math.exp(2.5)
    assert change.difference == pytest.approx(2 * shift * perplexity, rel=1e-3)
    alone = perplexity * 0.5 / math.sqrt(3)
    assert change.stderr < 1e-3 * alone, "what the two share does not count"


def test_texts_decoded_freely_are_compared_prompt_by_prompt(tmp_path):
    for name, shift in (("one", 0.0), ("two", 0.5)):
        prompts = [{"nll": nll + shift, "kl_nats": nll} for nll in NLLS]
        metrics = {"text_perplexity": math.exp(2.5 + shift), "kl_nats": 2.5, "num_samples": 3}
        ran = RAN | {"samples": {"prompts": prompts}}
        save(tmp_path / name, ["experiment=long_decode", "method=h2o"], {"offline": metrics | SIZES}, **ran)
    ((key, change),) = moved(tmp_path / "one", tmp_path / "two").items()
    assert key == ("H2O", "text_perplexity") and change.num_pairs == 3
    assert change.difference == pytest.approx(math.exp(3) - math.exp(2.5))


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"inputs": RAN["inputs"] | {"corpus": "e" * 64}}, "data"),
        ({"samples": {"passkey": [{**each, "question": each["question"] + 1} for each in questions(HITS)]}}, None),
        ({"samples": {}}, None),
    ],
)
def test_numbers_of_other_questions_are_compared_as_independent(fields, cause, tmp_path, results):
    other = fill(tmp_path / "other")
    save_task(other, "full", (0.0, *HITS[1:]), **fields)
    ((_, change),) = moved(results, other).items()
    assert change.num_pairs == 0 and change.stderr == pytest.approx(math.hypot(0.2, 0.2))
    assert change.causes == ([cause] if cause else [])


def test_what_else_differs_is_said(tmp_path, results, capsys):
    other = fill(tmp_path / "other")
    inputs = RAN["inputs"] | {"code:harness": "e" * 64, "model": "f" * 64}
    save_task(other, "full", (0.0, *HITS[1:]), inputs=inputs, environment=RAN["environment"] | {"python": "3.12"})
    save_task(other, "h2o", (0.0,) * 8, inputs=inputs)
    changes = moved(results, other)
    assert changes["Full cache", "acc"].causes == ["code", "weights", "environment"]
    assert comparing.main([str(results), str(other)]) == 0
    said = capsys.readouterr().out
    assert "2 moved\nmoved by more than 2 standard errors: 1 (" in said
    assert "of what moved differ: code (2), weights (2), environment (1)" in said
    assert "acc (%) [environment]: Full cache, passkey, fig11" in said


def test_rows_of_one_alone_are_counted_and_named(tmp_path, results, capsys):
    other = tmp_path / "other"
    save_task(other, "full")
    save_task(other, "quest")
    assert comparing.main([str(results), str(other)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"only in A: \d+ numbers, of\n  H2O, passkey, fig11\n", said)
    assert re.search(r"only in B: 4 numbers, of\n  Quest, passkey, fig11\n", said)


def test_other_settings_are_another_row(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    save_task(one, "h2o")
    metrics = {"passkey": {"acc": 0.5, "acc_stderr": 0.2, **SIZES}}
    save(two, ["experiment=fig11", "method=h2o", "seed=3"], metrics, **RAN)
    found = comparing.compare(one, two)
    assert not found.changes and len(found.only["A"]) == len(found.only["B"]) == 4


def test_speed_is_compared_by_ratio(tmp_path, results, capsys):
    other = fill(tmp_path / "other")
    shutil.rmtree(other / "runs" / "latency")
    save_cell(other, decode_s=1.0, tokens_per_s=6.4)
    assert comparing.main([str(results), str(other)]) == 0
    said = capsys.readouterr().out.partition("of speed, by ratio\n")[2]
    assert re.search(r" 2 +500 +1000  decode \(ms\): offload, batch 4, prompt 1,024, 8 generated, latency\n", said)
    assert re.search(r"0\.5 +12\.8 +6\.4  tokens/s: offload", said)


def test_the_largest_comes_first_and_all_of_it_is_in_the_csv(tmp_path, results, capsys):
    other = fill(tmp_path / "other")
    save_task(other, "full", (0.0, *HITS[1:]))
    save_task(other, "h2o", (0.0,) * 8)
    path = tmp_path / "moved.csv"
    assert comparing.main([str(results), str(other), "--csv", str(path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert max(map(len, said)) <= 120
    assert [line.rpartition(": ")[2].partition(",")[0] for line in said if "acc (%)" in line] == ["H2O", "Full cache"]
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert rows[0]["label"] == "H2O" and float(rows[0]["standard_errors"]) > float(rows[1]["standard_errors"])
    assert len(rows) == len(comparing.compare(results, other).changes)


def test_many_names_and_what_a_stranger_wrote_fit_a_terminal(tmp_path, capsys):
    for name, hits in (("one", HITS), ("two", (0.0, *HITS[1:]))):
        save(tmp_path / name, ["experiment=fig11", "method=h2o", "label='\x1b[2J" + "x" * 200 + "'"],
             {"passkey": {"acc": sum(hits) / 8, **SIZES}}, **RAN)  # fmt: skip
    assert comparing.main([str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\\x1b[2Jxxx" in said and max(map(len, said.splitlines())) <= 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "full"], "A=: name a results folder or an archive"),
        (["full", ""], "B=: name a results folder or an archive"),
        (["full", "none.zip"], "none.zip: no such results folder or archive"),
        (["tables", "full"], "tables: no finished run in it, and tables alone do not say what was run"),
        (["full", "full", "--csv", "file/x.csv"], "--csv file/x.csv: cannot be written"),
    ],
)
def test_a_wrong_comparison_is_one_line(arguments, message, results, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(results, "full")
    shutil.copytree(results / "tables", "tables/tables")
    (tmp_path / "file").touch()
    assert comparing.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"error: {message}") and captured.err.count("\n") == 1

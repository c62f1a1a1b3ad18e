"""Files and memory: digests, the cache folder, replacing in one step."""

import os
import time
from pathlib import Path

import pytest

from harness import files


def test_memory_is_in_bytes():
    assert 2**20 < files.available_memory() <= files.total_memory()


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"KV_HARNESS_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/kv-harness"),
        ({"HOME": "/c"}, "/c/.cache/kv-harness"),
    ],
)
def test_the_cache_folder(variables, folder, monkeypatch):
    for name in ("KV_HARNESS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert files.cache_dir() == Path(folder)


def test_a_digest_of_files_depends_on_names_and_contents_not_on_their_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    for folder, names in (("x", "ab"), ("y", "ab"), ("z", "ac")):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text("content")
    digests = [files.files_sha256((tmp_path / folder).iterdir()) for folder in "xyz"]
    assert digests[0] == digests[1] != digests[2]


def test_a_cache_that_cannot_be_written_only_costs_the_shortcut(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("one")
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "file"))
    assert files.file_sha256(tmp_path / "file") == files.content_sha256(tmp_path / "file")


def test_a_block_that_fails_replaces_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), files.replacing(path) as scratch:
        scratch.write_text("new")
        raise ZeroDivisionError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_scratch_files_of_killed_writers_go_and_those_of_living_ones_stay(tmp_path):
    path = tmp_path / "notes[1].json"
    left = {
        name: tmp_path / name
        for name in (".notes[1].json.abcd_f12", ".notes[1].json.zzzzzzzz", ".notes1.json.abcd_f12")
    }
    for each in left.values():
        each.touch()
    old = time.time() - files.ABANDONED_S - 60
    for name in (".notes[1].json.abcd_f12", ".notes1.json.abcd_f12"):
        os.utime(left[name], (old, old))
    files.write_atomic(path, "new")
    assert {each.name for each in tmp_path.iterdir()} == {path.name, ".notes[1].json.zzzzzzzz", ".notes1.json.abcd_f12"}

"""Files and memory: digests, the cache folder, replacing in one step."""

import os
import time
from pathlib import Path

import pytest

from harness import files


def test_memory_is_in_bytes():
    assert 2**20 < files.available_memory() <= files.total_memory()


V2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/memory.max": "6000\n",
    "sys/fs/cgroup/job/memory.current": "5000\n",
    "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 700\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.current": "10\n",
    "sys/fs/cgroup/job/step/memory.stat": "inactive_file 5\n",
}
V1 = {
    "proc/self/cgroup": "9:name=systemd:/\n4:memory:/of/the/host\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "8000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000\n",
    "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 400\n",
}


@pytest.mark.parametrize(
    ("tree", "limits"),
    [(V2, [(6000, 4300)]), (V1, [(8000, 2600)]), ({"proc/self/cgroup": "0::/\n"}, []), ({}, [])],
    ids=["v2", "v1", "unlimited", "no Linux"],
)
def test_limits_of_the_control_groups_around_a_process(tree, limits, tmp_path):
    for name, text in tree.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(files.memory_limits(tmp_path)) == limits


def test_memory_ends_at_the_tightest_limit(monkeypatch):
    monkeypatch.setattr(files, "memory_limits", lambda: [(6000, 4300), (8000, 7500), (2**62, 0)])
    assert (files.available_memory(), files.total_memory()) == (500, 6000)
    monkeypatch.setattr(files, "memory_limits", lambda: [(6000, 6100)])
    assert files.available_memory() == 0


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

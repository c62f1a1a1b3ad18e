"""Files and memory: limits, and replacing a file in one step."""

import os
from unittest.mock import Mock

import pytest

from harness import files
from harness.errors import UserError


def test_limits_of_the_control_groups_around_a_process(tmp_path):
    assert list(files.memory_limits(tmp_path)) == [], "no Linux"
    group = tmp_path / "sys/fs/cgroup/job"
    tree = {
        tmp_path / "proc/self/cgroup": "0::/job/step\n",
        group / "memory.max": "6000\n",
        group / "memory.current": "5000\n",
        group / "memory.stat": "anon 1\ninactive_file 700\n",
        group / "step/memory.max": "max\n",
    }
    for path, text in tree.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(files.memory_limits(tmp_path)) == [(6000, 4300)]


def test_memory_ends_at_the_tightest_limit(monkeypatch):
    monkeypatch.setattr(files, "memory_limits", lambda: [(6000, 4300), (8000, 7500), (2**62, 0)])
    assert (files.available_memory(), files.total_memory()) == (500, 6000)
    monkeypatch.setattr(files, "memory_limits", lambda: [(6000, 6100)])
    assert files.available_memory() == 0


def test_the_settings_say_how_much_memory_there_is(monkeypatch):
    """A machine that shows 4 GiB, of which 3 are used: by this process's control group 2."""
    shown = Mock(total=4 * 2**30, available=2**30)
    monkeypatch.setattr(files.psutil, "virtual_memory", lambda: shown)
    monkeypatch.setattr(files, "memory_limits", list)
    assert files.available_memory() == 2**30
    with files.stated_memory(112):
        assert files.available_memory() == 109 * 2**30
        shown.total, shown.available = 40 * 2**30, 2**30  # it has grown, and is used
        with files.stated_memory(None):
            assert files.available_memory() == 73 * 2**30
        monkeypatch.setattr(files, "memory_limits", lambda: [(4 * 2**30, 2 * 2**30)])
        assert files.available_memory() == 110 * 2**30
    assert files.available_memory() == 2**30


def test_a_write_that_fails_or_is_cut_short_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_atomic(path, "old")
    with pytest.raises(ZeroDivisionError), files.replacing(path) as scratch:
        scratch.write_text("new")
        raise ZeroDivisionError
    monkeypatch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        files.write_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(UserError, match=f"results_dir: {path}/x/y cannot be written \\(Not a directory\\)"):
        files.write_atomic(path / "x" / "y", "")

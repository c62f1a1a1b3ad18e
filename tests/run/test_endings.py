"""How a command ends where a method ends the process, or a disk is full."""

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from harness import errors
from harness.errors import UserError
from harness.model import prompts
from harness.results.record import read_all
from harness.run.cli import main
from tests.methods.test_own_files import EVICTING, SHORT
from tests.run.test_processes import forked
from tests.runs import reading, tiny_loaded

ROOT = Path(__file__).resolve().parents[2]


def test_a_method_that_ends_the_process_leaves_an_interrupted_run(own_folder, monkeypatch):
    texts = reading(monkeypatch, own_folder, tiny_loaded())
    Path("mine.py").write_text(EVICTING.replace("return value", "import os; os._exit(0); return value"))
    copy = forked(lambda: main(["method=./mine.py", *texts, *SHORT]))
    assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 0
    assert [record["status"] for record in read_all("outputs")] == ["interrupted"]


# Full disks


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left")])
def test_a_full_cache_names_its_folder_and_what_moves_it(error, own_folder, monkeypatch, capsys):
    def full(*_):
        raise error

    texts = reading(monkeypatch, own_folder, tiny_loaded())
    monkeypatch.setattr(prompts, "save_file", full)
    assert main(["method=infinigen", *texts, *SHORT]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the cache {own_folder}/cache cannot be written" in line
    assert "No space left" in line and "KV_HARNESS_CACHE" in line


def test_refused_takes_whatever_foreign_code_raises():
    for error in (GeneratorExit(), BaseException("x"), SystemExit(3)):
        with pytest.raises(UserError, match=f"^a thing \\({type(error).__name__}"), errors.refused("a thing"):
            raise error
    with pytest.raises(KeyboardInterrupt), errors.refused("a thing"):
        raise KeyboardInterrupt

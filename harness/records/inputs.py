"""The sha256 of every input of a run, code included, taken before a model loads: a change makes another run.

Files of the Hugging Face hub are identified by their revision. Missing ones are downloaded first.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from harness.data import hub as data_hub
from harness.data import ruler
from harness.data.rows import find_files, hub_options
from harness.data.text import WIKITEXT_HUB, calibration_text, corpus_text, offline_text
from harness.files import file_sha256, files_sha256, text_sha256
from harness.model import source
from harness.records import code
from harness.settings.config import (
    OFFLINE_TASKS,
    RULER_TASKS,
    CalibrationConfig,
    CorpusConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
)
from harness.settings.experiment import find

if TYPE_CHECKING:
    from harness.data.lm_tasks import Leaf


def digests(config: RunConfig) -> dict[str, str]:
    """sha256 by name: the code, the model, the method's file, and what its kind of run reads.

    Raises:
        UserError: a file or folder is missing or cannot be read, or a model cannot be fetched.
    """
    experiment = find(config.kind)
    of_model = model(config.model, weights=experiment.needs_weights(config))
    of_method = {} if config.method.file is None else {"method": files_sha256([Path(config.method.file)])}
    of_code = code.digests(type(config.method).__module__, experiment.code)
    return of_code | of_model | of_method | experiment.inputs(config)


def model(config: ModelConfig, *, weights: bool = True) -> dict[str, str]:
    """The files, the revision, or the package of a model; {} if its settings decide everything. weights: are read."""
    weights = weights and config.weights == "pretrained"
    if config.path is not None:
        return {"model": files_sha256(source.model_files(config, weights=weights))}
    if config.hub_id is not None and (weights or config.shape is None):
        found = source.located(config, weights=weights)
        return {"model": files_sha256([found]) if found.is_file() else found.name}
    return {"model": source.PACKAGED_SHA256} if weights and config.name == source.PACKAGED_NAME else {}


def calibration(config: CalibrationConfig) -> dict[str, str]:
    """The calibration text."""
    return {"calibration": text_sha256(calibration_text(config))}


def corpus(config: CorpusConfig, data: DataConfig) -> dict[str, str]:
    """The scored text."""
    read = partial(corpus_text, config, data)
    if config.path is None and config.name != "offline" and data.name == "hub":
        return {"corpus": data_hub.revision(*WIKITEXT_HUB, read)}
    return {"corpus": text_sha256(read())}


def tasks(config: RunConfig) -> dict[str, str]:
    """For each leaf task: lm-eval's version, the resolved YAML and the data, local or as a revision of the hub; for a
    generated task its source text.

    Data that a task's own Python fetches is not read: its code counts. All files of a user's own folder count.
    """
    made = {name: _source(name) for name in config.tasks if name in OFFLINE_TASKS}
    if len(made) == len(config.tasks) and config.task.include_path is None:
        return made  # spares loading lm-eval
    from harness.data.lm_tasks import digest_of, plan

    planned = plan(config)
    read = {name: _task(leaf, config.data) if leaf.config else _source(name) for name, leaf in planned.leaves.items()}
    groups = {name: digest_of(group.to_dict() or {}) for name, group in planned.groups.items()}
    return made | read | groups | _folder(config.task.include_path)


def _source(task: str) -> str:
    return ruler.digest() if task in RULER_TASKS else text_sha256(offline_text())


def _task(leaf: Leaf, data: DataConfig) -> str:
    if leaf.makes_rows or data.name == "offline":
        return leaf.digest
    if data.name == "hub":
        return text_sha256(leaf.digest, _revision(leaf))
    files = find_files(str(data.root), leaf.task_name, leaf.config)
    return text_sha256(leaf.digest, *(f"{split} {files_sha256(paths)}" for split, paths in sorted(files.items())))


def _revision(leaf: Leaf) -> str:
    def fetch() -> None:
        from harness.data.suite import hub_rows

        hub_rows(leaf.task_name, leaf.config)

    path, part = str(leaf.config.get("dataset_path")), leaf.config.get("dataset_name")
    return data_hub.revision(path, part, fetch, has_options=bool(hub_options(leaf.config)))


def _folder(include_path: str | None) -> dict[str, str]:
    if include_path is None:
        return {}
    root = Path(include_path)
    files = sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {"include_path": text_sha256(*(f"{path.relative_to(root)} {file_sha256(path)}" for path in files))}

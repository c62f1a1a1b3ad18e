"""The sha256 of everything a run reads, its code included, taken before a model loads: a change makes another run.

What the Hugging Face hub serves is known by its revision (models) or its name (data sets); a model that is not on this
machine yet is fetched first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.data import ruler_rows
from harness.data.text import calibration_text, corpus_text, offline_text
from harness.errors import UserError
from harness.files import files_sha256, text_sha256
from harness.model import hub
from harness.model.source import PACKAGED_NAME, PACKAGED_SHA256
from harness.records import code
from harness.settings.experiment import find
from harness.settings.run import GENERATED_TASKS, RunConfig
from harness.settings.sources import CalibrationConfig, CorpusConfig, DataConfig, ModelConfig
from harness.settings.tasks import RULER_TASKS

TASK_FOLDERS = {"lambada": "lambada_openai"}
"""Sub-folders of data.root that are not named like their task."""
MODEL_SUFFIXES = (".json", ".safetensors", ".gguf", ".model", ".txt")


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
    """The files, the revision, or the package of a model; {} where its settings say all. weights: they are read."""
    weights = weights and config.weights == "pretrained"
    if config.path is not None:
        path = Path(config.path).expanduser()
        inside = [path] if path.is_file() else path.iterdir()
        return {"model": files_sha256(file for file in inside if file.suffix in MODEL_SUFFIXES)}
    if config.hub_id is not None and config.gguf_file is not None and (weights or config.shape is None):
        return {"model": files_sha256([hub.gguf(config.hub_id, config.gguf_file)])}
    if config.hub_id is not None and weights:
        return {"model": hub.snapshot(config.hub_id, with_code=config.trust_remote_code).revision}
    if config.hub_id is not None and config.shape is None:
        return {"model": hub.config_directory(config.hub_id).name}
    return {"model": PACKAGED_SHA256} if weights and config.name == PACKAGED_NAME else {}


def calibration(config: CalibrationConfig) -> dict[str, str]:
    """The text that calibrates."""
    return {"calibration": text_sha256(calibration_text(config))}


def corpus(config: CorpusConfig, data: DataConfig) -> dict[str, str]:
    """The text that is scored; {} where the hub serves it."""
    served = config.path is None and config.name != "offline" and data.name == "hub"
    return {} if served else {"corpus": text_sha256(corpus_text(config, data))}


def tasks(names: Sequence[str], data: DataConfig) -> dict[str, str]:
    """Each task's rows, or the text that they are made from; those that the hub serves are left out."""
    made = {name: text_sha256(offline_text()) for name in names if name in GENERATED_TASKS}
    made |= {name: ruler_rows.digest() for name in names if name in RULER_TASKS}
    if data.name == "hub":
        return made
    return made | {name: files_sha256(_rows(name, data)) for name in names if name not in made}


def _rows(task: str, data: DataConfig) -> list[Path]:
    assert data.root is not None, "DataConfig asks for it"
    folder = Path(data.root).expanduser() / TASK_FOLDERS.get(task, task)
    files = list(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"data.root={data.root}: tasks={task} needs *.jsonl in {folder}, there are none")
    return files

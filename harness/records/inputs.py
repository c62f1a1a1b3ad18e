"""The sha256 of everything a run reads, taken before a model loads: a changed file makes another run."""

import hashlib
from pathlib import Path

from harness.data.text import calibration_text, corpus_text, offline_text, text_sha256
from harness.errors import UserError
from harness.model.gguf import file_sha256
from harness.model.load import PACKAGED_NAME, PACKAGED_SHA256
from harness.settings.run import GENERATED_TASKS, ModelConfig, RunConfig

TASK_FOLDERS = {"lambada": "lambada_openai"}
"""Sub-folders of data.root that are not named like their task."""
MODEL_SUFFIXES = (".json", ".safetensors", ".gguf", ".model", ".txt")


def digests(config: RunConfig) -> dict[str, str]:
    """sha256 by input: model, calibration, and the corpus, each task's data, or the text of the prompts.

    What the Hugging Face hub serves has a name and no file here, so it is left out.

    Raises:
        UserError: a file or folder is missing or cannot be read.
    """
    found = _model(config.model) | {"calibration": text_sha256(calibration_text(config.calibration))}
    if config.kind == "tasks":
        return found | {task: digest for task in config.tasks if (digest := _task(task, config))}
    if config.kind == "latency":
        return found | {"prompt": text_sha256(offline_text())}
    if config.corpus.path or config.corpus.name == "offline" or config.data.name != "hub":
        found["corpus"] = text_sha256(corpus_text(config.corpus, config.data))
    return found


def _model(model: ModelConfig) -> dict[str, str]:
    if model.path is not None:
        path = Path(model.path).expanduser()
        inside = [path] if path.is_file() else path.iterdir()
        return {"model": _of_files([file for file in inside if file.suffix in MODEL_SUFFIXES])}
    packaged = model.name == PACKAGED_NAME and model.hub_id is None and model.weights == "pretrained"
    return {"model": PACKAGED_SHA256} if packaged else {}


def _task(task: str, config: RunConfig) -> str | None:
    if task in GENERATED_TASKS:
        return text_sha256(offline_text())  # from which its contexts are made
    if config.data.name == "hub":
        return None
    assert config.data.root is not None, "parse() asks for it"
    folder = Path(config.data.root).expanduser() / TASK_FOLDERS.get(task, task)
    files = list(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"data.root={config.data.root}: tasks={task} needs *.jsonl in {folder}, there are none")
    return _of_files(files)


def _of_files(files: list[Path]) -> str:
    lines = [f"{file.name} {file_sha256(file)}" for file in sorted(files)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

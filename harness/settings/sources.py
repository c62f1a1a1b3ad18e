"""The settings that say where things come from: the model, the data sets, the texts. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from harness.errors import UserError
from harness.settings.schema import PathText, check_range

CPU_DTYPE: Final = "float32"
"""Of a CPU's run, unless the user says otherwise: what an entry of `conf/model` names is a GPU's."""


@dataclass(frozen=True)
class ModelConfig:
    """Which model, from where, in which precision.

    `path` and `hub_id` are both None where the model comes from a package or has random weights; `gguf_file` names
    the file among those of either that holds the weights, as transformers calls it; `shape` is a transformers config as
    a plain mapping (with `model_type`), used where `weights` is random. `device`: `map` spreads the layers over all
    CUDA devices, whole layers each (accelerate's device map); `auto` is the platform's.
    """

    name: str
    path: PathText | None = None
    hub_id: str | None = None
    gguf_file: str | None = None
    weights: Literal["pretrained", "random"] = "pretrained"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda", "map"] = "auto"
    trust_remote_code: bool = False
    seed: int = 0
    shape: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_range("model.seed", self.seed, 0)
        if self.path is not None and not Path(self.path).exists():
            raise UserError(f"model.path={self.path}: no such file or folder")
        if self.gguf_file is not None and not self.gguf_file.endswith(".gguf"):
            raise UserError(f"model.gguf_file={self.gguf_file}: must be the name of a .gguf file")
        if self.gguf_file is not None and self.hub_id is None and self.path is None:
            raise UserError(f"model.gguf_file={self.gguf_file}: needs model.hub_id=, or model.path= of its folder")


@dataclass(frozen=True)
class DataConfig:
    """Where tasks and texts come from; `root` is the folder of `local`."""

    name: Literal["offline", "local", "hub"]
    root: PathText | None = None

    def __post_init__(self) -> None:
        if self.name == "local" and self.root is None:
            raise UserError("data=local needs data.root=DIR, the folder with one sub-folder a data set")
        if self.name != "local" and self.root is not None:
            raise UserError(f"data.root={self.root} is read by data=local only, not by data={self.name}")
        if self.root is not None and not Path(self.root).is_dir():
            raise UserError(f"data.root={self.root}: no such folder")


@dataclass(frozen=True)
class CorpusConfig:
    """The text of the windows: a named one, or the file `path`.

    `offset_tokens` is where the first window begins; None: after the calibration text where both are the
    offline text, else 0.
    """

    name: Literal["offline", "wikitext2"]
    path: PathText | None = None
    offset_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_file("corpus.path", self.path)
        check_range("corpus.offset_tokens", self.offset_tokens, 0)

    @property
    def title(self) -> str:
        """What the text is called in records and tables."""
        return Path(self.path).name if self.path else self.name


@dataclass(frozen=True)
class CalibrationConfig:
    """The first `num_tokens` tokens of the calibration text: the file `path`, or the offline text."""

    path: PathText | None = None
    num_tokens: int = 1024

    def __post_init__(self) -> None:
        _check_file("calibration.path", self.path)
        check_range("calibration.num_tokens", self.num_tokens, 1)


def _check_file(setting: str, path: str | None) -> None:
    if path is not None and not Path(path).is_file():
        raise UserError(f"{setting}={path}: no such file")

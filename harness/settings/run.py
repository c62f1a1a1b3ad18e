"""The settings of a run: composed by Hydra from `conf/`, checked once, frozen.

`compose` reads the YAML, `parse` turns it into a `RunConfig`. The only heavy module that `parse` imports is
the chosen method's, so a wrong setting is refused before a model library loads.

    config = load(["method=h2o", "method.heavy_frac=0.05", "experiment=tasks"])
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from harness.errors import UserError, nearest
from harness.settings import systems as labels
from harness.settings.analysis import AnalysisConfig, check_analysis
from harness.settings.schema import build
from harness.settings.sources import CalibrationConfig, CorpusConfig, DataConfig, ModelConfig, check_range
from harness.settings.speed import LatencyConfig, PlatformConfig, check_live, group_latency, running

if TYPE_CHECKING:
    from methods.base import Method
else:
    Method = Any  # importing it here would import torch

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"

GENERATED_TASKS = ("kv_recall", "passkey")
PAPER_TASKS = ("copa", "openbookqa", "winogrande", "piqa", "rte")  # Fig 11
TASKS = (*GENERATED_TASKS, *PAPER_TASKS, "hellaswag", "arc_easy", "lambada", "boolq")
QUANTIZED_CODECS = ("int8", "int4", "int2", "int1")
GENERATED_NUM_SAMPLES = 128
LIVE_KINDS = ("latency", "generate")
LOWEST = {
    "seed": 0, "seq_len": 2, "prefill_len": 0, "num_windows": 1, "num_samples": 1, "num_fewshot": 0,
    "max_new_tokens": 1,
}  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """One run, which writes one record. Tokens are counted by the model's tokenizer; fractions lie in (0, 1].

    Raises:
        UserError: a value out of range, or settings that contradict one another.
    """

    experiment: str
    kind: Literal["tasks", "perplexity", "latency", "generate", "analysis"]
    model: ModelConfig
    method: Method
    method_name: str
    data: DataConfig
    corpus: CorpusConfig
    calibration: CalibrationConfig
    platform: PlatformConfig
    tasks: tuple[str, ...]
    label: str | None = None
    codec: Literal["fp32", "fp16", "bf16", "int8", "int4", "int2", "int1"] | None = None
    target_kv_frac: float | None = None
    num_samples: int | None = None
    num_fewshot: int | None = None
    prefill: Literal["auto", "dense", "question", "artifact"] = "auto"
    scoring: Literal["sum", "mean"] = "sum"
    seed: int = 0
    seq_len: int = 1024
    prefill_len: int = 256
    num_windows: int = 4
    placement: Literal["device", "host"] = "host"
    reuse: bool = False
    latency: LatencyConfig = LatencyConfig()
    analysis: AnalysisConfig = AnalysisConfig()
    prompt: str | None = None
    max_new_tokens: int = 64
    results_dir: str = "results"

    def __post_init__(self) -> None:
        known = options("experiment")
        if self.experiment not in known:
            raise UserError(f"experiment={self.experiment}: {nearest(self.experiment, known)}")
        for setting, low in LOWEST.items():
            check_range(setting, getattr(self, setting), low)
        self._check_size()
        self._check_codec()
        self._check_tasks()
        if self.kind == "perplexity":
            self._check_windows()
        if self.kind in LIVE_KINDS:
            check_live(self)
        if self.kind == "analysis":
            check_analysis(self)

    def _check_size(self) -> None:
        if self.target_kv_frac is None:
            return
        if not 0 < self.target_kv_frac <= 1:
            raise UserError(f"target_kv_frac={self.target_kv_frac}: must be above 0 and at most 1")
        try:
            self.method.with_size(self.target_kv_frac)
        except ValueError as error:
            raise UserError(f"target_kv_frac={self.target_kv_frac}: {error}") from error

    def _check_codec(self) -> None:
        if self.method_name not in QUANTIZED_CODECS:
            return
        made = f"int{self.method.num_bits}"  # type: ignore[attr-defined]
        if made != self.method_name:
            raise UserError(f"method.num_bits={made[3:]} contradicts method={self.method_name}: choose method={made}")
        if self.codec not in (None, self.method_name):
            raise UserError(f"codec={self.codec} contradicts method={self.method_name}: leave it out, or method=full")

    def _check_tasks(self) -> None:
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise UserError(f"tasks=[{','.join(self.tasks)}]: must name at least one task, and none twice")
        for task in self.tasks:
            if task not in TASKS:
                raise UserError(f"tasks={task}: {nearest(task, TASKS)}")
            if task not in GENERATED_TASKS and self.data.name == "offline" and self.kind == "tasks":
                here = ", ".join(GENERATED_TASKS)
                raise UserError(f"tasks={task}: needs data=local data.root=DIR or data=hub; data=offline has {here}")

    def _check_windows(self) -> None:
        if self.seq_len < max(1, self.prefill_len) + 2:
            raise UserError(
                f"prefill_len={self.prefill_len}, seq_len={self.seq_len}: seq_len must be at least "
                f"{max(1, self.prefill_len) + 2}, so that a decode row predicts a token of the window"
            )
        if self.method.needs_prompt and self.prefill_len < 1:
            raise UserError(f"prefill_len=0: must be at least 1, {self.method_name} learns columns from the prompt")

    def prefill_of(self, task: str) -> str:
        """Which rows of `task` are decode rows: dense, question or artifact.

        `auto`: a generated task ends its prompt before the question, where methods differ; any other is
        scored as the artifact does.
        """
        if self.prefill != "auto":
            return self.prefill
        return "question" if task in GENERATED_TASKS else "artifact"

    def num_samples_of(self, task: str) -> int | None:
        """Questions of `task`; None is all of them."""
        if self.num_samples is None and task in GENERATED_TASKS:
            return GENERATED_NUM_SAMPLES
        return self.num_samples


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose `conf/config.yaml` with Hydra's override syntax, checked no further than Hydra does."""
    if GlobalHydra.instance().is_initialized():  # inside hydra.main
        return hydra.compose("config", list(overrides))
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return hydra.compose("config", list(overrides))


def load(overrides: Sequence[str] = ()) -> RunConfig:
    """The checked settings behind a command line."""
    return parse(compose(overrides), overrides)


def parse(config: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """Check a composed configuration and freeze it.

    Args:
        config: what Hydra composed.
        overrides: the user's own; they tell a given `model.hub_id` from that of the chosen entry.

    Raises:
        UserError: a setting that is unknown, of a wrong type, out of range or contradicts another.
    """
    composed = OmegaConf.to_container(config, resolve=True)
    assert isinstance(composed, dict)
    settings: dict[str, Any] = {str(key): value for key, value in composed.items() if key != "grid"}
    given = {override.split("=", 1)[0].lstrip("+") for override in overrides}
    settings["model"] = _with_source(_group(settings, "model"), given)
    settings["latency"] = build(LatencyConfig, group_latency(settings))
    settings["platform"] = _group(settings, "platform")
    if settings.get("kind") in LIVE_KINDS:
        labels.settle(settings, given, _method_node)
    settings["platform"] = running(settings["platform"])
    settings["method_name"], settings["method"] = _method(_group(settings, "method"))
    if settings.get("tasks") is None:
        offline = _group(settings, "data").get("name") == "offline"
        settings["tasks"] = GENERATED_TASKS if offline else PAPER_TASKS
    return build(RunConfig, settings)


def options(group: str) -> list[str]:
    """The choices of a group: the files under `conf/<group>`."""
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def _group(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    node = settings.get(name)
    if not isinstance(node, dict):
        raise UserError(f"{name}={node}: {nearest(node, options(name))}")
    return dict(node)


def _method_node(name: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(CONF_DIR / "method" / f"{name}.yaml"))


def _method(node: dict[str, Any]) -> tuple[str, Any]:
    name, target = str(node.pop("name")), str(node.pop("_target_"))
    module, _, cls = target.rpartition(".")
    return name, build(getattr(importlib.import_module(module), cls), node, "method")


def _with_source(model: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """A source the user gave replaces the chosen entry's: the name follows it, the shape is dropped."""
    sources = [key for key in ("path", "hub_id") if f"model.{key}" in given and model.get(key) is not None]
    if len(sources) == 2:
        raise UserError(f"model.path={model['path']} and model.hub_id={model['hub_id']}: give one of them")
    if not sources:
        return model
    source = str(model[sources[0]])
    model |= {"path": None, "hub_id": None, "shape": None, sources[0]: source}
    if "model.name" not in given:
        model["name"] = Path(source).resolve().name.removesuffix(".gguf")
    return model

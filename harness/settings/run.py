"""The settings of a run: checked once, frozen. `harness.settings.compose` makes them from a command line.

What only one kind of run refuses is in `harness.experiments`. Imports neither Hydra nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from harness.errors import UserError, nearest
from harness.settings.analysis import AnalysisConfig
from harness.settings.sources import CalibrationConfig, CorpusConfig, DataConfig, ModelConfig, check_range
from harness.settings.speed import LatencyConfig, PlatformConfig

if TYPE_CHECKING:
    from methods.base import Method
else:
    Method = Any  # importing it here would import torch

GENERATED_TASKS = ("kv_recall", "passkey")
PAPER_TASKS = ("copa", "openbookqa", "winogrande", "piqa", "rte")  # Fig 11
TASKS = (*GENERATED_TASKS, *PAPER_TASKS, "hellaswag", "arc_easy", "lambada", "boolq")
GENERATED_NUM_SAMPLES = 128
GROUP_SIZE = 64
LOWEST = {
    "seed": 0, "seq_len": 2, "prefill_len": 0, "num_windows": 1, "num_samples": 1, "num_fewshot": 0,
    "max_new_tokens": 1, "group_size": 1,
}  # fmt: skip


CodecName = Literal["fp32", "fp16", "bf16", "int8", "int4", "int2", "int1"]


@dataclass(frozen=True)
class RunConfig:
    """One run, which writes one record. Tokens are counted by the model's tokenizer; fractions lie in (0, 1].

    kind: a module of `harness.experiments`. label: the run's name in tables and figures; label_given: the user chose
    it. value_codec: of the values, where it is not the keys'. group_size: elements along head_dim that share lo and
    step of an integer codec. sizing: what happens where `target_kv_frac` cannot be met. link_gbps, max_kl: what is
    asked of a frontier, in 10^9 bytes/s and nats.

    Raises:
        UserError: a value out of range, or settings that contradict one another.
    """

    experiment: str
    kind: str
    model: ModelConfig
    method: Method
    method_name: str
    data: DataConfig
    corpus: CorpusConfig
    calibration: CalibrationConfig
    platform: PlatformConfig
    tasks: tuple[str, ...]
    label: str
    label_given: bool = False
    codec: CodecName | None = None
    value_codec: CodecName | None = None
    group_size: int = GROUP_SIZE
    target_kv_frac: float | None = None
    sizing: Literal["exact", "nearest"] = "exact"
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
    link_gbps: float | None = None
    max_kl: float | None = None
    results_dir: str = "results"

    def __post_init__(self) -> None:
        for setting, low in LOWEST.items():
            check_range(setting, getattr(self, setting), low)
        self._check_size()
        self._check_codecs()
        self._check_tasks()

    def _check_size(self) -> None:
        if self.target_kv_frac is None:
            return
        if not 0 < self.target_kv_frac <= 1:
            raise UserError(f"target_kv_frac={self.target_kv_frac}: must be above 0 and at most 1")
        try:
            self.method.with_size(self.target_kv_frac)
        except ValueError as error:
            raise UserError(f"target_kv_frac={self.target_kv_frac}: {error}") from error

    @property
    def codec_name(self) -> str | None:
        """The codec in words, `int4/int8` where keys and values have different ones; None stores rows exactly."""
        return self.codec if self.value_codec in (None, self.codec) else f"{self.codec}/{self.value_codec}"

    def _check_codecs(self) -> None:
        if self.value_codec is not None and self.codec is None:
            raise UserError(f"value_codec={self.value_codec}: needs codec=, the format of the keys; fp32 is exact")
        if self.group_size != GROUP_SIZE and "int" not in (self.codec_name or ""):
            raise UserError(f"group_size={self.group_size}: codec={self.codec} has no groups; choose an integer codec")

    def _check_tasks(self) -> None:
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise UserError(f"tasks=[{','.join(self.tasks)}]: must name at least one task, and none twice")
        for task in self.tasks:
            if task not in TASKS:
                raise UserError(f"tasks={task}: {nearest(task, TASKS)}")

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

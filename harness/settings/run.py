"""The settings of a run: checked once, frozen. `harness.settings.compose` makes them from a command line.

What only one kind of run refuses is in `harness.experiments`. Imports neither Hydra nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from harness.errors import UserError
from harness.settings.analysis import AnalysisConfig
from harness.settings.schema import MOST, PathText, check_range
from harness.settings.sources import CalibrationConfig, CorpusConfig, DataConfig, ModelConfig
from harness.settings.speed import LatencyConfig, Placement, PlatformConfig
from harness.settings.tasks import RULER_NUM_SAMPLES, RULER_TASKS, TaskConfig

if TYPE_CHECKING:
    from methods.base import Method
else:
    Method = Any  # importing it here would import torch

GENERATED_TASKS = ("kv_recall", "passkey")
PAPER_TASKS = ("copa", "openbookqa", "winogrande", "piqa", "rte")  # Fig 11
OFFLINE_TASKS = (*GENERATED_TASKS, *RULER_TASKS)
TASKS = (*OFFLINE_TASKS, *PAPER_TASKS, "hellaswag", "arc_easy", "lambada", "boolq")
"""Known without lm-eval's index, which has thousands more."""
GENERATED_NUM_SAMPLES = 128
GROUP_SIZE = 64
LOWEST = {
    "seed": 0, "seq_len": 2, "prefill_len": 0, "num_windows": 1, "num_samples": 1, "num_fewshot": 0,
    "max_new_tokens": 1, "group_size": 1, "residual": 0,
}  # fmt: skip
MOST_SAMPLES = 1_000_000
"""Questions a task: more than any of lm-eval's has, and what those that are generated may be asked for."""


CodecName = Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4", "int2", "int1"]
INTEGER_CODECS = ("int8", "int4", "int2", "int1")
CODEC_WORDS = ("codec", "value_codec", "rotation", "key_groups", "residual")
"""The settings that `codec_words` tells apart."""


def codec_words(
    codec: str | None,
    value_codec: str | None = None,
    rotation: str | None = None,
    key_groups: str = "token",
    residual: int = 0,
) -> str | None:
    """A codec's name in tables and labels, such as `hadamard-int4` or `channel-int2/int2-r128`; None for none."""
    if codec is None:
        return None
    keys, values = codec if key_groups == "token" else f"{key_groups}-{codec}", value_codec or codec
    words = keys if keys == values else f"{keys}/{values}"
    return (f"{rotation}-" if rotation else "") + words + (f"-r{residual}" if residual else "")


@dataclass(frozen=True)
class RunConfig:
    """One run, which writes one record. Tokens are counted by the model's tokenizer; fractions lie in (0, 1].

    kind: a module of `harness.experiments`. label: the run's name in tables and figures; label_given: the user chose
    it. value_codec: of the values, where it is not the keys'. group_size: elements along head_dim that share lo and
    step of an integer codec; with key_groups=channel, of keys, consecutive tokens of one channel. rotation: what a row
    goes through before an integer codec. residual: tokens that stay exact, and on the device. sizing: what happens
    where `size` cannot be met. link_gbps, max_kl: what is asked of a frontier, in 10^9 bytes/s and nats.
    tracker: what the record is sent to as well.

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
    rotation: Literal["hadamard"] | None = None
    key_groups: Literal["token", "channel"] = "token"
    residual: int = 0
    size: float | None = None
    sizing: Literal["exact", "nearest"] = "exact"
    num_samples: int | None = None
    num_fewshot: int | None = None
    prefill: Literal["auto", "dense", "question", "artifact"] = "auto"
    scoring: Literal["sum", "mean"] = "sum"
    task: TaskConfig = TaskConfig()
    seed: int = 0
    seq_len: int = 1024
    prefill_len: int = 256
    num_windows: int = 4
    placement: Placement = "host"
    reuse: bool = False
    latency: LatencyConfig = LatencyConfig()
    analysis: AnalysisConfig = AnalysisConfig()
    prompt: str | None = None
    max_new_tokens: int = 64
    link_gbps: float | None = None
    max_kl: float | None = None
    results_dir: PathText = "results"
    tracker: Literal["none", "mlflow", "wandb"] = "none"

    def __post_init__(self) -> None:
        for setting, low in LOWEST.items():
            check_range(setting, getattr(self, setting), low, most=MOST_SAMPLES if setting == "num_samples" else MOST)
        for setting in ("link_gbps", "max_kl"):
            check_range(setting, getattr(self, setting), 0, above=True)
        self._check_size()
        self._check_codecs()
        self._check_tasks()

    def _check_size(self) -> None:
        if self.size is None:
            return
        if not 0 < self.size <= 1:
            raise UserError(f"size={self.size}: must be above 0 and at most 1")
        try:
            self.method.with_size(self.size)
        except ValueError as error:
            raise UserError(f"size={self.size}: {error}") from error

    @property
    def codec_name(self) -> str | None:
        """The codec in words, such as `hadamard-int4`, or `int4/int8` of keys and values; None stores rows exactly."""
        return codec_words(**{name: getattr(self, name) for name in CODEC_WORDS})

    def _check_codecs(self) -> None:
        if self.value_codec is not None and self.codec is None:
            raise UserError(f"value_codec={self.value_codec}: needs codec=, the format of the keys; fp32 is exact")
        keys, values = self.codec, self.value_codec or self.codec
        words = f"codec={'/'.join(dict.fromkeys((str(keys), str(values))))}"
        integers = {keys, values} & {*INTEGER_CODECS}
        if self.group_size != GROUP_SIZE and not integers:
            raise UserError(f"group_size={self.group_size}: {words} has no groups; choose an integer codec")
        if self.rotation is not None and integers != {keys, values}:
            raise UserError(f"rotation={self.rotation}: {words} is not turned; choose an integer codec")
        if self.residual and not integers:
            raise UserError(f"residual={self.residual}: {words} leaves no token behind; choose an integer codec")
        if self.key_groups == "channel":
            self._check_channels()
        if self.residual and not self.method.reads_all:
            raise UserError(f"residual={self.residual}: method={self.method_name} does not read all that is cached")

    def _check_channels(self) -> None:
        if self.codec not in INTEGER_CODECS:
            raise UserError(f"key_groups=channel: codec={self.codec} has no groups; choose an integer codec")
        if not self.residual or self.residual % self.group_size:
            allowed = f"a multiple of group_size={self.group_size}, above 0, with key_groups=channel"
            raise UserError(f"residual={self.residual}: must be {allowed}")

    def _check_tasks(self) -> None:
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise UserError(f"tasks=[{','.join(self.tasks)}]: must name at least one task, and none twice")

    def prefill_of(self, task: str, *, writes: bool = False) -> str:
        """Which rows of `task` are decode rows: dense, question or artifact.

        `auto`: a generated task ends its prompt before the question, where methods differ; one whose answers the model
        writes decodes from the prompt's end, as when serving; any other is scored as the artifact does.
        """
        if self.prefill != "auto":
            return self.prefill
        if task in GENERATED_TASKS:
            return "question"
        return "dense" if writes else "artifact"

    def num_samples_of(self, task: str) -> int | None:
        """Questions of `task`; None is all of them. RULER's have num_samples at each of their lengths."""
        if self.num_samples is None and task in GENERATED_TASKS:
            return GENERATED_NUM_SAMPLES
        if task in RULER_TASKS:
            return (self.num_samples or RULER_NUM_SAMPLES) * len(self.task.lengths)
        return self.num_samples

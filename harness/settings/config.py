"""The settings of a run: frozen dataclasses. `harness.run.compose` makes them of a command line.

What a setting means is its comment in `conf/config.yaml`, or in a file of its group. Types and
ranges are the annotations, which `harness.settings.schema` checks; what settings must be together
is in `harness.settings.kinds`. Imports neither Hydra nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_type_hints

from pydantic import Field

from harness.errors import UserError
from harness.settings.codecs import CODEC_WORDS, GROUP_SIZE, codec_words
from harness.settings.paths import RESULTS
from harness.settings.schema import (
    DISTINCT,
    MOST,
    Count,
    ExistingText,
    FileText,
    FolderText,
    Names,
    Natural,
    Naturals,
    PathText,
    Positive,
    Share,
    Text,
    build,
    only,
)

if TYPE_CHECKING:
    from methods.base import Method
    from methods.codecs.base import RowCodec
else:
    Method = RowCodec = Any  # importing them here would import torch

CPU_DTYPE: Final = "float32"
"""Precision of a run on a CPU unless the user gives one. `conf/model` names a GPU's."""
DECODED = 64
"""Tokens of a window that are decoded, where `prefill_len` is not given."""
PAPER_NUM_LAYERS = 32
"""Layers of OPT-6.7B (Figs 4, 5, 7) and of Llama-3-8B (Fig 20)."""

RUNNING = ("cpu", "cuda")
"""Platforms on which runs compute; others are modelled."""

Placement = Literal["device", "host", "disk", "managed"]
"""Where the cache lies: device memory, host memory, a local disk, or managed memory, which CUDA's
driver pages."""
BEHIND_LINK = ("host", "disk")
"""Placements whose rows cross a link."""
Statistic = Literal["memory", "similarity", "key_tokens", "columns", "layer_inputs", "sparsity"]


def _is_gguf(name: str) -> bool:
    return name.endswith(".gguf")


@dataclass(frozen=True)
class ModelConfig:
    """Which model, from where, in which precision.

    path, hub_id: both None for a model from a package or with random weights. shape: a transformers
    config as a plain mapping with `model_type`.
    """

    name: Text
    path: ExistingText | None = None
    hub_id: Text | None = None
    gguf_file: Annotated[Text, only(_is_gguf, "must be the name of a .gguf file")] | None = None
    weights: Literal["pretrained", "random"] = "pretrained"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    trust_remote_code: bool = False
    seed: Natural = 0
    shape: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class DataConfig:
    """Where tasks and texts come from."""

    name: Literal["offline", "local", "hub"]
    root: FolderText | None = None


@dataclass(frozen=True)
class CorpusConfig:
    """The text of the windows: a named one, or the file `path`. `random` stands for random token
    ids.

    The first window begins after the calibration text where both are the same text, else at token
    0; spread ones are spread from there on.
    """

    name: Literal["offline", "code", "headers", "book", "wikitext2", "random"]
    path: FileText | None = None
    spread: bool = False
    seed: Natural | None = None

    @property
    def title(self) -> str:
        """The name of the text in records and tables."""
        return Path(self.path).name if self.path else self.name


@dataclass(frozen=True)
class CalibrationConfig:
    """The first `num_tokens` tokens of the calibration text: the file `path`, or a named one."""

    path: FileText | None = None
    num_tokens: Count = 1024
    name: Literal["offline", "random"] = "offline"


# Tasks, and how answers are chosen

GENERATED_TASKS = ("kv_recall", "passkey")
RULER_TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "ruler_vt",
    "ruler_cwe",
    "ruler_fwe",
    "ruler_qa_squad",
    "ruler_qa_hotpot",
)
"""RULER's thirteen tasks. Seven need the packages of `harness.data.ruler`."""
PAPER_TASKS = ("copa", "openbookqa", "winogrande", "piqa", "rte")  # Fig 11
REASONING_TASKS = ("graph_search",)
"""Tasks made from a seed whose answers need long working."""
AIME_TASKS = ("aime24", "aime25", "aime26")
"""The problems of AIME 2024, 2025 and 2026. Their rows need a package (`harness.data.tasks`)."""
MADE_TASKS = (*GENERATED_TASKS, *RULER_TASKS, *REASONING_TASKS)
"""Tasks whose rows this project makes."""
OFFLINE_TASKS = (*MADE_TASKS, *AIME_TASKS)
TASKS = (*OFFLINE_TASKS, *PAPER_TASKS, "hellaswag", "arc_easy", "lambada", "boolq", "text2json")
"""Tasks that are known without lm-eval's index, which has thousands more."""
GENERATED_NUM_SAMPLES = 128
RULER_NUM_SAMPLES = 32
REASONING_NUM_SAMPLES = 32


@dataclass(frozen=True)
class Metadata:
    """What of `metadata` the tasks of this project read; lm-eval hands all of it to a task.

    max_seq_lengths: of RULER's prompts and answers, in tokens. num_sentences: of the offline text,
    in each context of kv_recall and passkey; None: as many as the task has by itself. places: on a
    map of graph_search. max_gen_toks: the most tokens of an answer of AIME, by default lm-eval's.
    """

    max_seq_lengths: Annotated[tuple[Count, ...], DISTINCT] = (4096,)
    num_sentences: Natural | None = None
    places: Annotated[int, Field(ge=6, le=80)] = 9
    max_gen_toks: Count = 32768


@dataclass(frozen=True)
class TaskConfig:
    """How lm-eval's tasks are prompted. These settings stand at the top, under the names of
    lm-eval's command line.

    metadata: passed to a task by lm-eval. think_end_token: an answer is what follows its last
    occurrence. too_long: `truncate` leaves out the context's beginning behind the start token.
    """

    include_path: FolderText | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool | None = None
    enable_thinking: bool | None = None
    think_end_token: Text | None = None
    system_instruction: Text | None = None
    question_marker: (
        Annotated[Text, only(str.strip, "must hold a character that is no space")] | None
    ) = None
    too_long: Literal["refuse", "truncate"] = "refuse"

    def __post_init__(self) -> None:
        _ = self.known

    @cached_property
    def known(self) -> Metadata:
        """The part of `metadata` that the tasks of this project read."""
        names = {field.name for field in fields(Metadata)}
        given = {name: value for name, value in self.metadata.items() if name in names}
        return build(Metadata, given, "metadata")

    @property
    def has_example_turns(self) -> bool:
        """Whether each example is a turn of its own: by default with a chat template, as on
        lm-eval's command line."""
        if self.fewshot_as_multiturn is None:
            return self.apply_chat_template
        return self.fewshot_as_multiturn


GREEDY: Mapping[str, Any] = {"do_sample": False}
"""The arguments of transformers' `generate` that take the most likely token."""
OF_DRAWING = ("top_p", "top_k", "min_p")
"""Those that leave out unlikely tokens. A `top_p` leaves the smallest set of the most likely tokens
whose probabilities sum to at least this (nucleus sampling, Holtzman et al. 2020)."""
LOWEST_TEMPERATURE = 1e-6
"""Logits that are divided by less leave the range of fp32."""
Temperature = Annotated[
    float,
    Field(le=MOST),
    only(
        lambda value: value == 0 or value >= LOWEST_TEMPERATURE,
        f"allowed: 0, which takes the most likely token, or {LOWEST_TEMPERATURE} and more",
    ),
]
NEW_TOKENS = 64
"""Tokens of a text where neither a setting nor the model's generation_config.json says how many."""


@dataclass(frozen=True)
class SamplingConfig:
    """How the tokens of a generated answer are chosen. These settings stand at the top.

    repeats: answers to each question, each drawn from its own random numbers.
    """

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    repeats: Count = 1

    def __post_init__(self) -> None:
        if self.temperature == 0:
            self._refuse_where_greedy("temperature=0 takes the most likely token")

    def rule(self, of_task: Mapping[str, Any] = GREEDY) -> dict[str, Any]:
        """Arguments of transformers' `generate`: these settings where they are given, else those
        of a task, else greedy. What is left out is as the model's generation_config.json says.

        Raises UserError for settings of sampling where the answer is greedy.
        """
        drawn = of_task if of_task["do_sample"] else {"temperature": 0}
        temperature = self.temperature
        if temperature is None:
            temperature = float(drawn.get("temperature", 1.0))
        if not temperature:
            self._refuse_where_greedy("the most likely token is taken")
            return dict(GREEDY)
        asked = {"do_sample": True, "temperature": temperature}
        for name in OF_DRAWING:
            value = getattr(self, name, None) or drawn.get(name)
            if value is not None:
                asked[name] = value
        return asked

    def _refuse_where_greedy(self, why: str) -> None:
        for name, unset in (("top_p", None), ("top_k", None), ("repeats", 1)):
            value = getattr(self, name)
            if value != unset:
                raise UserError(f"{name}={value}: {why}; set temperature above 0")


# Machines and lengths


@dataclass(frozen=True)
class PlatformConfig:
    """The machine on which a run computes: `cpu`, `cuda`, or one that is modelled.

    device_gib: of an emulated device on a CPU, or of a smaller CUDA card. graphs: whether decode
    steps are replayed as CUDA graphs, where the method allows it. sheet: of a machine
    that is modelled, its file in `conf/platform`, for the cost model; None for one that runs.
    """

    name: Text
    # At a megabyte a second a step of the smallest model takes a minute.
    link_gbps: Annotated[float, Field(gt=1e-3, le=MOST)] | None = None
    overlap: bool = True
    pinned: bool = True
    weights_on_device: Share = 1.0
    device_gib: Positive | None = None
    host_gib: Positive | None = None
    disk_dir: FolderText | None = None
    graphs: Literal["off", "auto"] = "off"
    sheet: Mapping[str, Any] | None = None

    @property
    def replays_steps(self) -> bool:
        """Whether decode steps are to be replayed. Those of streamed weights are not."""
        return self.graphs == "auto" and self.weights_on_device == 1


@dataclass(frozen=True)
class LatencyConfig:
    """The shape of a timed run, and how often it is timed. These settings stand at the top.

    largest: for `batch_size=largest`. Of the gen_len - 1 decode steps, the first `warmup_steps` are
    not timed; then `timed_steps` are. Each repeat begins at the prompt with a cache of its own.
    `time_limit_s` counts all repeats together; a repeat that has begun times one step.
    """

    batch_size: Count = 4
    largest: bool = False
    prompt_len: Count = 1024
    gen_len: Annotated[int, Field(ge=2, le=MOST)] = 32
    warmup_steps: Natural = 2
    timed_steps: Count | None = 8
    repeats: Count = 2
    time_limit_s: Annotated[float, Field(ge=1, le=MOST)] | None = None

    @property
    def steps_per_repeat(self) -> int:
        """Timed steps of a repeat."""
        return self.timed_steps or self.gen_len - 1 - self.warmup_steps


@dataclass(frozen=True)
class CapacityConfig:
    """The bounds of `batch_size=largest`."""

    max_batch: Count = 1024
    curve: bool = True


@dataclass(frozen=True)
class AdviseConfig:
    """What `kind=advise` is asked for, besides the machine, the model and the lengths."""

    weight_bits: Annotated[float, Field(ge=2, le=16)] = 16
    tokens_per_s: Positive | None = None
    ttft_s: Positive | None = None
    answers_lost: Annotated[float, Field(ge=0, le=1)] = 0.02
    hit_frac: Annotated[float, Field(ge=0, lt=1)] | None = None
    format: Literal["text", "json"] = "text"


@dataclass(frozen=True)
class AnalysisConfig:
    """One dense pass over a text, and what is measured in it; statistic: None where the run is no
    analysis."""

    statistic: Statistic | None = None
    num_tokens: Annotated[int, Field(ge=2, le=MOST)] = 2048
    layers: Naturals | None = None
    budget: Share = 0.1

    def layers_of(
        self, num_layers: int, paper_layers: tuple[int, ...], name: str
    ) -> tuple[int, ...]:
        """The layers to look at in model `name`: by default those as deep as `paper_layers` of the
        paper's 32.

        Raises UserError for a layer that the model does not have.
        """
        if self.layers is None:
            return tuple(sorted({layer * num_layers // PAPER_NUM_LAYERS for layer in paper_layers}))
        if max(self.layers) >= num_layers:
            listed = ",".join(map(str, self.layers))
            raise UserError(f"analysis.layers=[{listed}]: {name} has layers 0 to {num_layers - 1}")
        return self.layers


def prompt_of_window(seq_len: int) -> int:
    """Tokens of the prompt of a window of `seq_len` tokens, where `prefill_len` is not given: all
    but its last `DECODED`, and at least half of it.

    A method that keeps all that is generated could read no small share after a short prompt.
    """
    return max(seq_len - DECODED, seq_len // 2)


@dataclass(frozen=True)
class RunConfig:
    """One run, which writes one record. Tokens are counted by the model's tokenizer; fractions lie
    in (0, 1].

    label_given: the user chose the label. own_codec: the codec behind a `codec` of the user's own,
    its fields the `codec_settings`; None for a shipped one. group_size: elements along head_dim;
    with key_groups=channel, of keys, consecutive tokens of one channel; of codecs that have tiles,
    tokens of a tile. budget_rule: `nearest` for `budget=nearest:SHARE`.
    """

    experiment: Text
    kind: Text
    model: ModelConfig
    method: Method
    method_name: Text
    data: DataConfig
    corpus: CorpusConfig
    calibration: CalibrationConfig
    platform: PlatformConfig
    tasks: Names
    label: Text
    label_given: bool = False
    codec: Text | None = None
    own_codec: RowCodec | None = None
    value_codec: Text | None = None
    codec_layers: Names | None = None
    group_size: Count = GROUP_SIZE
    rotation: Literal["hadamard"] | None = None
    key_groups: Literal["token", "channel"] = "token"
    residual: Natural = 0
    budget: Share | None = None
    budget_rule: Literal["exact", "nearest"] = "exact"
    num_samples: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    num_fewshot: Natural | None = None
    prefill: Literal["auto", "dense", "question", "artifact", "both"] = "auto"
    task: TaskConfig = TaskConfig()
    seed: Natural = 0
    seq_len: Annotated[int, Field(ge=2, le=MOST)] = 1024
    prefill_len: Natural = field(kw_only=True)
    num_windows: Count = 4
    placement: Placement = "host"
    gpu_cache: Annotated[float, Field(ge=0, le=MOST)] = 0
    latency: LatencyConfig = LatencyConfig()
    capacity: CapacityConfig = CapacityConfig()
    advise: AdviseConfig = AdviseConfig()
    sampling: SamplingConfig = SamplingConfig()
    analysis: AnalysisConfig = AnalysisConfig()
    thorough: bool = False
    prompt: Text | None = None
    max_new_tokens: Count | None = None
    results_dir: PathText = RESULTS

    def value(self, setting: str) -> Any:
        """The value of a setting by the name that a command line gives it."""
        if setting == "method":
            return self.method_name
        if setting in ("data", "platform"):
            setting += ".name"
        for group in (self.task, self.sampling, self.latency):  # whose settings stand at the top
            if hasattr(group, setting):
                return getattr(group, setting)
        return attrgetter(setting)(self)

    def typed(self, setting: str) -> str:
        """A setting and its value as a command line has them."""
        value = self.value(setting)
        if value is None or isinstance(value, bool):
            words = "null" if value is None else str(value).lower()
        elif isinstance(value, tuple):
            words = f"[{','.join(map(str, value))}]"
        else:
            words = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{setting}={words}"

    @property
    def budget_is_measured(self) -> bool:
        """Whether `budget` is met by a search on the calibration text, as the method's reads depend
        on the data."""
        if self.budget is None:
            return False
        from methods.base import TokenCounts  # loaded with the method

        with_it = self.method.with_budget(self.budget)
        any_counts = TokenCounts(cached=1000, prompt=900, final=1100)
        return with_it.tokens_read(any_counts, with_it.dense_layers) is None

    @property
    def codec_name(self) -> str | None:
        """The codec in words, such as `hadamard-int4`, or `int4/int8` of keys and values; None
        stores rows exactly."""
        return codec_words(**{name: getattr(self, name) for name in CODEC_WORDS})

    def prefill_of(self, task: str, *, writes: bool = False) -> str:
        """Which rows of `task` are decode rows: dense, question or artifact.

        `auto`: the prompt of a generated task ends before the question, where methods differ. A
        task whose answers the model writes decodes from the prompt's end, as in serving. Any other
        is scored as in the artifact; with `budget` it is dense too, since the artifact's decode
        rows depend on the budget itself.
        """
        if self.prefill != "auto":
            return self.prefill
        if task in GENERATED_TASKS:
            return "question"
        has_budget = self.budget is not None or self.budget_rule == "nearest"
        return "dense" if writes or has_budget else "artifact"

    def num_samples_of(self, task: str) -> int | None:
        """Questions of `task`; None is all of them. RULER's have num_samples at each of their
        lengths."""
        if self.num_samples is None and task in GENERATED_TASKS:
            return GENERATED_NUM_SAMPLES
        if self.num_samples is None and task in REASONING_TASKS:
            return REASONING_NUM_SAMPLES
        if task in RULER_TASKS:
            return (self.num_samples or RULER_NUM_SAMPLES) * len(self.task.known.max_seq_lengths)
        return self.num_samples


GROUPS: dict[str, Any] = {
    name: kind for name, kind in get_type_hints(RunConfig).items() if is_dataclass(kind)
}
"""The groups of settings of a run; those of `AT_TOP` are named without their group."""

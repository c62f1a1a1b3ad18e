"""Models, loaded the same way wherever they come from: for evaluation, in `model.dtype`.

    load_model(ModelConfig(name="tiny", weights="random", shape={...})).model(input_ids).logits
    from_memory(model, tokenizer)  # a model that transformers has loaded

What is wrong with a model is said before it runs, in one line: weights that are missing, not
finite, quantized or too large for the memory, a tokenizer of another model, a device that is not
there. Imports no torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from harness.errors import UserError, refused
from harness.files import text_sha256
from harness.model import source
from harness.model.gguf_copy import copies_dir
from harness.model.shape import NESTED, SIZES, as_config, require_room, size
from harness.settings.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from harness.model.passes import DensePrompts

TEXT_WEIGHTS = {
    r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)": "model.",
    r"^language_model\.lm_head": "lm_head",
}
"""Names of the text decoder's weights in a multimodal checkpoint, and the decoder's own names."""
T = TypeVar("T")
UNLIMITED = 2**31 - 1
"""The longest sequence of a model that names no limit, as with ALiBi or recurrent layers."""


class RandomIds:
    """Stands in for the tokenizer of a model with random weights, to which every text is as good as
    another: a text has one random id for each of its words.

    The ids are uniform over the vocabulary and follow from the text alone, so they are the same in
    every run and on every machine. A text in which special tokens are asked for begins with
    `start`, if that is not None.
    """

    eos_token_id = None
    """No text ends before its limit."""

    def __init__(self, vocab_size: int, start: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.start = start

    def __call__(
        self, text: str, add_special_tokens: bool = True, verbose: bool = True
    ) -> dict[str, list[int]]:
        """Ids of the whole text, as of a transformers tokenizer; verbose plays no part."""
        generator = random.Random(text_sha256(text))
        ids = generator.choices(range(self.vocab_size), k=len(text.split()))
        has_start = add_special_tokens and self.start is not None
        return {"input_ids": [self.start, *ids] if has_start else ids}  # type: ignore[list-item]

    def decode(self, ids: Iterable[int] | Sequence[int]) -> str:
        """The ids as decimal numbers: they stand for no words."""
        return " ".join(str(int(number)) for number in ids)


@dataclass
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: in evaluation mode, without gradients, with torch's fused attention ("sdpa") where it
        has one. tokenizer: None where the source has none.
        name: its name in tables and records.
        max_length: the longest sequence it takes, in tokens.
        as_loaded: the digest of the model as its source holds it (`harness.model.attach`), where it
            is known; None for a model from memory.
        prompts: passes over prompts that runs share; None: each runs its own.
        random_ids: of random weights, what makes token ids of texts.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    max_length: int
    prompts: DensePrompts | None = None
    random_ids: RandomIds | None = None
    as_loaded: str | None = None

    @property
    def reader(self) -> Any:
        """What makes token ids of texts: the tokenizer, or of random weights `random_ids`."""
        return self.random_ids or self.tokenizer


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the model that `config` describes.

    Raises:
        UserError: the source is missing, damaged, unreachable or without safetensors, it is no
            decoder of transformers, or the device does not exist.
    """
    from transformers.utils import logging

    device, dtype = _placement(config)
    if config.weights == "random":
        return _random(config, device, dtype)
    directory = source.folder(config)
    logging.disable_progress_bar()
    try:
        model = _pretrained(config, directory, device, dtype)
    finally:
        logging.enable_progress_bar()
    tokenizer = _tokenizer(directory, config, _num_embeddings(model))
    model = model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, config.name, max_length_of(model.config))


def from_memory(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> LoadedModel:
    """A model that the caller has loaded, as of `load_model`. It is put into evaluation mode.

    Its name is the last part of `model.name_or_path`, else its family. Raises UserError for a
    tokenizer with more tokens than the model has embeddings.
    """
    name = Path(model.name_or_path or model.config.model_type).name
    if tokenizer is not None:
        if not hasattr(tokenizer, "vocab_size"):
            raise UserError(f"tokenizer={tokenizer!r}: must be a tokenizer of transformers")
        _require_embeddings(f"model {name}: its tokenizer", tokenizer, _num_embeddings(model))
    return LoadedModel(model.eval(), tokenizer, name, max_length_of(model.config))


def max_length_of(described: PreTrainedConfig) -> int:
    """The longest sequence that a model takes, in tokens."""
    return size(described, "max_position_embeddings") or UNLIMITED


# Shapes


def model_config(config: ModelConfig) -> PreTrainedConfig:
    """The model's shape as a transformers config, without reading its weights.

    It comes from `path`, else from `shape`, else from the hub.

    Raises:
        UserError: there is no such source, or it describes no causal language model of
        transformers.
    """
    if config.shape and not config.path:
        return as_config(config.name, config.shape)
    directory = source.folder(config, weights=False)
    return as_config(config.name, source.read_config(directory))


def shape_mapping(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model's text decoder, as a mapping; UserError where there is none."""
    return model_config(config).to_dict()


# Devices


def _placement(config: ModelConfig) -> tuple[torch.device, torch.dtype]:
    """The device of the weights, and their dtype."""
    import torch

    dtype, has_cuda = getattr(torch, config.dtype), torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise UserError("model.device=cuda: torch finds no CUDA device here; allowed: auto, cpu")
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu"), dtype
    require_kernels()
    return torch.device("cuda"), dtype


def require_kernels() -> None:
    """Raise UserError where Triton cannot launch kernels on the GPU. It builds its launcher with a
    C compiler, which a machine that only runs programs may lack, and would say so minutes later."""
    why = "Triton cannot build its launcher, for which it needs a C compiler, Python's headers"
    with refused(f"model.device=cuda: {why} (python3-dev) and libcuda.so; allowed: cpu"):
        from triton.runtime import driver

        _ = driver.active.utils


# Weights


def _random(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A model that has the shape of `config`, and reads random token ids."""
    import torch
    from transformers import AutoModelForCausalLM

    described = model_config(config)
    require_room(f"model {config.name}", described, dtype, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(config.seed)
        model = AutoModelForCausalLM.from_config(
            described, dtype=dtype, attn_implementation=_attention(described)
        )
    start = described.bos_token_id
    has_start = isinstance(start, int) and 0 <= start < described.vocab_size
    random_ids = RandomIds(described.vocab_size, start if has_start else None)
    model = model.eval().requires_grad_(False)
    return LoadedModel(model, None, config.name, max_length_of(described), random_ids=random_ids)


def _attention(described: PreTrainedConfig) -> str:
    """torch's fused attention; a few families, such as Gemma 2 and gpt-oss, have none.

    It knows no softcap, and transformers up to 5.20 would choose it for Gemma 2 and leave the
    softcap out.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(described, "attn_logit_softcapping", None) is not None:
        return "eager"
    return "sdpa" if MODEL_FOR_CAUSAL_LM_MAPPING[type(described)]._supports_sdpa else "eager"


def _pretrained(
    config: ModelConfig, directory: Path, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    mapping = source.read_config(directory)
    described = as_config(config.name, mapping)
    _require_as_described(config, described)
    _require_plain_weights(config.name, mapping)
    source.weight_files(directory)
    require_room(f"model {config.name}", described, dtype, device)
    options: dict[str, Any] = {}
    if described.model_type != mapping["model_type"]:  # of several modalities the text decoder
        options = {"config": described, "key_mapping": TEXT_WEIGHTS}
    with refused(f"model {config.name}: {directory} cannot be loaded"):
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            device_map=device,
            attn_implementation=_attention(described),
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            ignore_mismatched_sizes=True,  # reported below, with the missing ones
            output_loading_info=True,
            **options,
        )
    mismatched = [name for name, *_ in report["mismatched_keys"]]
    lacking = sorted([*report["missing_keys"], *mismatched])
    if lacking:
        raise UserError(
            f"model {config.name}: {directory} lacks {len(lacking)} weights of the shape in its "
            f"config.json, such as {lacking[0]}"
        )
    return model


def _require_plain_weights(name: str, mapping: Mapping[str, Any]) -> None:
    """Raise UserError where the config.json of a model says that its weights are quantized."""
    quantized = mapping.get("quantization_config")
    quantized = quantized or mapping.get(NESTED, {}).get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise UserError(
            f"model {name}: its weights are quantized ({method}), which is not supported; choose "
            "its checkpoint in float16 or bfloat16, or a GGUF"
        )


def _require_as_described(config: ModelConfig, found: PreTrainedConfig) -> None:
    """Raise UserError where the decoder beside the weights is of another family or size than
    `config.shape`, by which sweeps and estimates go."""
    expected = config.shape or {}
    expected = expected.get(NESTED, expected)
    sizes = {"model_type": found.model_type} | {name: size(found, name) for name in SIZES}
    holds, says = [], []
    for key, value in sizes.items():
        if value is not None and key in expected and value != expected[key]:
            holds.append(f"{key}={value}")
            says.append(f"{key}={expected[key]}")
    if holds:
        where = config.path or config.hub_id or source.PACKAGE
        raise UserError(
            f"model={config.name}: {where} holds a model of {', '.join(holds)}, and conf/model "
            f"says {', '.join(says)}; model.shape=null takes it as it is"
        )


# The tokenizer


def _tokenizer(
    directory: Path, config: ModelConfig, num_embeddings: int
) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the weights; None where there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not source.has_tokenizer(directory):
        return None  # asked anyway, transformers would make up an empty one
    # A family's own class would split texts its own way, whatever the file says.
    is_copy = directory.parent == copies_dir()
    reader = PreTrainedTokenizerFast if is_copy else AutoTokenizer
    what = f"model {config.name}: the tokenizer in {directory}"
    with refused(f"{what} cannot be loaded"):
        tokenizer = reader.from_pretrained(directory, trust_remote_code=config.trust_remote_code)
    _require_embeddings(what, tokenizer, num_embeddings)
    return tokenizer


def _num_embeddings(model: PreTrainedModel) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _require_embeddings(what: str, tokenizer: Any, num_embeddings: int) -> None:
    """Raise UserError where texts are made of more tokens than the model has embeddings.

    Added tokens may lie beyond, as one that transformers adds to a GGUF's tokenizer: a text with
    such a token is refused when it is run.
    """
    last_special = max(tokenizer.bos_token_id or 0, tokenizer.eos_token_id or 0)
    tokens = max(tokenizer.vocab_size, 1 + last_special)
    if tokens > num_embeddings:
        raise UserError(
            f"{what} has {tokens} tokens, more than the model's embedding "
            f"(vocab_size={num_embeddings}); give it its own tokenizer"
        )


# What the runs of one process share. It is made once and handed to each run, whose numbers do not
# depend on what is there.


class Memo(Generic[T]):
    """Values by key. limit: how many, the oldest leaving first; None keeps all."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._values: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `key`. If there is none it is made, after the oldest has left."""
        if key not in self._values:
            if self.limit is not None and len(self._values) >= self.limit:
                del self._values[next(iter(self._values))]
            self._values[key] = make()
        return self._values[key]


class Resources:
    """The last model, with what depends on it.

    loaded: a model in memory, which then is the model of every run. references: dense passes of
    windows, and texts decoded under the full cache, with which every method of a sweep is compared.
    prompts: the dense pass of the last timed shape. shares_prompts: several runs follow, as in a
    sweep, so that the passes over prompts are kept; `end_sharing` drops them.
    """

    def __init__(self, loaded: LoadedModel | None = None) -> None:
        self.loaded = loaded
        self._last: tuple[ModelConfig, LoadedModel] | None = None
        self.references: Memo = Memo()
        self.prompts: Memo = Memo(limit=1)
        self.shares_prompts = False

    def model(self, config: ModelConfig) -> LoadedModel:
        """The model of `config`; runs with equal settings that follow one another share it."""
        loaded = self.loaded or self._loaded_by(config)
        if self.shares_prompts and config.device == "cpu" and loaded.prompts is None:
            from harness.model.passes import DensePrompts

            loaded.prompts = DensePrompts()
        return loaded

    def has_model(self, config: ModelConfig) -> bool:
        """Whether the model of `config` is in memory."""
        return self.loaded is not None or self._last is not None and self._last[0] == config

    def _loaded_by(self, config: ModelConfig) -> LoadedModel:
        if self._last is None or self._last[0] != config:
            # Free memory for the next model.
            self._last = None
            self.references = Memo()
            self.prompts = Memo(limit=1)
            self._last = (config, load_model(config))
        return self._last[1]

    def digest_in_memory(self) -> str | None:
        """The digest of the model as it is now; None where it is as its source holds it, or not
        loaded. Raises UserError for a model that is refused."""
        loaded = self._in_memory()
        if loaded is None:
            return None
        from harness.model.attach import digest_of

        now = digest_of(loaded.model)
        return None if now == loaded.as_loaded else now

    def end_sharing(self) -> None:
        """Keep neither passes over prompts nor references: a user has the model, and may change its
        weights before the next run."""
        self.shares_prompts = False
        self.references = Memo()
        loaded = self._in_memory()
        if loaded is not None:
            loaded.prompts = None

    def _in_memory(self) -> LoadedModel | None:
        return self.loaded or (self._last[1] if self._last else None)

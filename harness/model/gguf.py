"""GGUF files as fp32 safetensors, converted once.

Reading a GGUF takes transformers many times as long as reading safetensors, so the first start writes a copy
that computes the very same logits and later starts load that. The copy is keyed by the GGUF's sha256 and lies
in `cache_dir()`/gguf; it may be deleted at any time. A copy that is damaged is made again.
"""

import copy
import json
import shutil
import sys
import tempfile
from pathlib import Path

from harness.errors import UserError
from harness.files import cache_dir, content_sha256, file_sha256

COPY_FORMAT = 1  # raise it when what `_convert` writes changes
MANIFEST = "manifest.json"


def converted(gguf: Path) -> Path:
    """The directory with the fp32 copy of a GGUF (config, safetensors, tokenizer), made where it is missing.

    Raises:
        UserError: the GGUF is damaged or truncated, or the cache cannot be written.
    """
    digest = file_sha256(gguf)
    directory = cache_dir() / "gguf" / f"{digest[:32]}-{COPY_FORMAT}"
    if _is_intact(directory, digest):
        return directory
    print(f"{gguf.name}: converting once to float32 safetensors in {directory}", file=sys.stderr)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix="converting-") as scratch:
            target = Path(scratch) / "model"
            _convert(gguf, target)
            _seal(target, digest)
            if not _is_intact(directory, digest):  # else another process was faster, and may be reading it
                shutil.rmtree(directory, ignore_errors=True)  # a damaged copy
                target.rename(directory)
    except OSError as error:
        if _is_intact(directory, digest):  # another process was faster
            return directory
        raise UserError(
            f"the cache {cache_dir()} cannot be written ({error.strerror or error}); "
            "point KV_HARNESS_CACHE to a folder with room"
        ) from error
    return directory


def _convert(gguf: Path, target: Path) -> None:
    """Write config, fp32 weights and tokenizer of `gguf` to the new directory `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    origin = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    _check_gguf(gguf)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(**origin, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**origin)
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"{gguf}: transformers cannot read this GGUF ({_first_line(error)})") from error
    # save_pretrained refuses a model that came from a GGUF, so an equal one is built without that memory.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _check_gguf(gguf: Path) -> None:
    """Refuse a file that is no GGUF, or whose tensors do not all lie within it."""
    from gguf import GGUFReader

    try:
        tensors = GGUFReader(gguf).tensors
    except Exception as error:  # the reader indexes a memory map unchecked: what it raises depends on where it is cut
        raise UserError(f"{gguf}: damaged or truncated GGUF ({_first_line(error)}); fetch the file again") from error
    if not tensors:
        raise UserError(f"{gguf}: damaged or truncated GGUF (it holds no tensors); fetch the file again")


def _seal(directory: Path, source: str) -> None:
    """Write the manifest by which a later start tells that the copy is whole."""
    files = {path.name: content_sha256(path) for path in sorted(directory.iterdir())}
    (directory / MANIFEST).write_text(json.dumps({"source": source, "files": files}, indent=1))


def _is_intact(directory: Path, source: str) -> bool:
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        return manifest["source"] == source and all(
            file_sha256(directory / name) == digest for name, digest in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

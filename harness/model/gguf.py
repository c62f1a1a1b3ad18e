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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from harness.errors import UserError, refused
from harness.files import cache_dir, content_sha256, file_sha256, lock_file

COPY_FORMAT = 1  # raise it when what `_convert` writes changes
MANIFEST = "manifest.json"
SCRATCH = "converting-"


def converted(gguf: Path) -> Path:
    """The directory with the fp32 copy of a GGUF (config, safetensors, tokenizer), made where it is missing.

    Raises:
        UserError: the GGUF is damaged or truncated, or the cache cannot be written.
    """
    digest = file_sha256(gguf)
    directory = cache_dir() / "gguf" / f"{digest[:32]}-{COPY_FORMAT}"
    if _is_intact(directory, digest):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _alone(directory.parent):
            if not _is_intact(directory, digest):  # else another process was faster, and may be reading it
                _make(gguf, digest, directory)
    except (OSError, SafetensorError) as error:
        if _is_intact(directory, digest):  # another process was faster
            return directory
        raise UserError(
            f"the cache {cache_dir()} cannot be written ({getattr(error, 'strerror', None) or error}); "
            "point KV_HARNESS_CACHE to a folder with room"
        ) from error
    return directory


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time convert, and remove what is left of those that were killed. Without locks, on some
    network file systems, nothing is removed, and the first copy to be whole stays."""
    lock = lock_file(folder.with_suffix(".lock"), wait=True)
    if lock is None:
        yield
        return
    try:
        for scratch in folder.glob(f"{SCRATCH}*"):
            shutil.rmtree(scratch, ignore_errors=True)
        yield
    finally:
        lock.release()


def _make(gguf: Path, digest: str, directory: Path) -> None:
    """Convert, and put the whole copy in its place in one step."""
    print(f"{gguf.name}: converting once to float32 safetensors in {directory}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=SCRATCH) as scratch:
        target = Path(scratch) / "model"
        _convert(gguf, target)
        _seal(target, digest)
        shutil.rmtree(directory, ignore_errors=True)  # a damaged copy
        target.rename(directory)


def _convert(gguf: Path, target: Path) -> None:
    """Write config, fp32 weights and tokenizer of `gguf` to the new directory `target`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from harness.model import checks, room

    origin = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    num_weights = _num_elements(gguf)
    room.require_room(f"{gguf}, converted", 2 * num_weights, torch.float32, [torch.device("cpu")])  # once more below
    with refused(f"{gguf}: transformers cannot read this GGUF"):
        checks.require_filled(str(gguf), AutoConfig.from_pretrained(**origin), num_weights)
        loaded = AutoModelForCausalLM.from_pretrained(**origin, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**origin)
    # save_pretrained refuses a model that came from a GGUF, so an equal one is built without that memory.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _num_elements(gguf: Path) -> int:
    """Elements of all tensors; UserError for a file that is no GGUF, or whose tensors do not all lie within it."""
    from gguf import GGUFReader

    # The reader indexes a memory map unchecked: what it raises depends on where it is cut.
    with refused(f"{gguf}: damaged or truncated GGUF; fetch the file again"):
        tensors = GGUFReader(gguf).tensors
    if not tensors:
        raise UserError(f"{gguf}: damaged or truncated GGUF (it holds no tensors); fetch the file again")
    return sum(int(tensor.n_elements) for tensor in tensors)


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

"""GGUF files as fp32 safetensors, converted once.

Reading a GGUF takes transformers many times as long as reading safetensors. The first start therefore writes a copy,
which computes the very same logits, and later starts load that. The copy lies in `cache_dir()`/gguf under the GGUF's
sha256, moved there whole. It may be deleted at any time.
"""

import contextlib
import copy
import shutil
import sys
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from harness.errors import UserError, refused
from harness.files import cache_dir, file_sha256, lock_file
from harness.model.shape import require_filled, require_room

COPY_FORMAT = 1  # raise it when the content of a copy changes
SCRATCH = "converting-"


def converted(gguf: Path) -> Path:
    """The folder with the fp32 copy of a GGUF (config, safetensors, tokenizer), made where it is missing.

    Raises:
        UserError: the GGUF is damaged or truncated, or the cache cannot be written.
    """
    directory = cache_dir() / "gguf" / f"{file_sha256(gguf)[:32]}-{COPY_FORMAT}"
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            lock = lock_file(directory.parent.with_suffix(".lock"), wait=True)
            if lock is not None:  # without locks, on some network file systems, the first whole copy stays
                stack.callback(lock.release)
                for scratch in directory.parent.glob(f"{SCRATCH}*"):  # left by killed processes
                    shutil.rmtree(scratch, ignore_errors=True)
            if not directory.is_dir():  # else another process was faster, and may be reading it
                _make(gguf, directory)
    except (OSError, SafetensorError) as error:
        if directory.is_dir():  # another process was faster
            return directory
        raise UserError(
            f"the cache {cache_dir()} cannot be written ({getattr(error, 'strerror', None) or error}); "
            "point KV_HARNESS_CACHE to a folder with room"
        ) from error
    return directory


def _make(gguf: Path, directory: Path) -> None:
    """Convert, and move the whole copy to its place in one step."""
    print(f"{gguf.name}: converting once to float32 safetensors in {directory}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=SCRATCH) as scratch:
        target = Path(scratch) / "model"
        _convert(gguf, target)
        target.rename(directory)


def _convert(gguf: Path, target: Path) -> None:
    """Write config, fp32 weights and tokenizer of `gguf` to the new folder `target`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    origin = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    num_weights = _num_elements(gguf)
    # Twice: save_pretrained refuses a model that came from a GGUF, so an equal one is built.
    require_room(f"{gguf}, converted", 2 * num_weights, torch.float32, [torch.device("cpu")])
    with refused(f"{gguf}: transformers cannot read this GGUF"):
        require_filled(str(gguf), AutoConfig.from_pretrained(**origin), num_weights)
        loaded = AutoModelForCausalLM.from_pretrained(**origin, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**origin)
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

    # The reader indexes a memory map unchecked: the error depends on where the file is cut.
    with refused(f"{gguf}: damaged or truncated GGUF; fetch the file again"):
        tensors = GGUFReader(gguf).tensors
    if not tensors:
        raise UserError(f"{gguf}: damaged or truncated GGUF (it holds no tensors); fetch the file again")
    return sum(int(tensor.n_elements) for tensor in tensors)

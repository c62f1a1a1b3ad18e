"""Offline calibration: what a method measures of a model on a text, made once and kept on disk.

One dense forward over the calibration text hands each layer's queries and keys to
`Method.calibrate`. It runs on one thread.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.errors import UserError
from harness.files import replacing, text_sha256
from harness.model.attached import Attached
from harness.model.gguf_copy import writing_cache
from harness.model.passes import LayerPrompt, one_thread
from harness.model.prompts import PromptPass
from methods.base import Calibration, Method

FORMAT = 4
"""Part of the cache key: raise it when the computation around `Method.calibrate`, or the file,
changes."""


def calibrate(attached: Attached, method: Method, ids: Sequence[int]) -> dict[str, Tensor]:
    """The tensors that `method` measures on one sequence of token ids, by name, [num_layers, ...].

    Raises UserError where a number is not finite, as with damaged weights.
    """
    attached.require_length(len(ids))
    tokens = torch.tensor([ids], device=attached.device)
    layers: list[Calibration] = []

    def measure(layer: int, prompt: LayerPrompt) -> None:
        if attached.numbers[layer] is not None:
            query, key = prompt.query[0], prompt.key[0]
            layers.append(method.calibrate(query, key, attached.geometry, layers))

    positions = torch.arange(len(ids), device=attached.device)[None]
    with one_thread():
        attached.forward(tokens, positions, PromptPass(attached, keep=measure))
    measured = {}
    for name in layers[0]:
        tensor = torch.stack([layer[name] for layer in layers]).to(attached.device)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(
                f"calibration: {name} of {method.title} is not finite; are the model's weights "
                "whole?"
            )
        measured[name] = tensor
    return measured


def cached_calibration(
    attached: Attached, method: Method, ids: Sequence[int], cache_dir: Path
) -> Calibration:
    """`calibrate`, or its earlier result for the same model as it is now, ids, method and settings.

    It lies in host memory: a state takes to its device what it needs.
    """
    settings = [getattr(method, name) for name in method.calibration_settings]
    module = sys.modules[type(method).__module__]
    code = [inspect.getsource(type(method).calibrate), inspect.getsource(module)]
    name = type(method).__name__
    identity = FORMAT, attached.decoder.digest, list(ids), name, settings, code
    path = cache_dir / f"{text_sha256(repr(identity))[:32]}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError):  # not there, or damaged
        measured = calibrate(attached, method, ids)
    found = {name: tensor.cpu().contiguous() for name, tensor in measured.items()}
    with writing_cache(), replacing(path) as scratch:
        save_file(found, scratch)
    return found

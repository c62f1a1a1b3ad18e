"""Presses of the installed kvpress: which there are, which are no method here and why, and what a
press is given.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from methods.base import LayerInputs

PACKAGE = "kvpress"
INSTALL = "pip install --no-deps kvpress==0.5.5 cachetools fire termcolor"
"""kvpress asks for transformers < 5.3, and works as it is used here with later versions."""
KEYS_AND_VALUES = {
    "CURPress",
    "KeyDiffPress",
    "KnormPress",
    "LagKVPress",
    "RandomPress",
    "StreamingLLMPress",
}
"""Presses that score by keys and values alone, so that they go with any model."""
ATTENTIONS = {"ObservedAttentionPress"}
"""Presses that need the attention weights of all rows of the prompt, but no module."""
SHARING = {"AdaKVPress", "CriticalAdaKVPress"}
"""Presses that let the KV heads of a layer share its budget, and name the evicted tokens on the
module."""
MOVING = {"BlockPress", "ChunkPress", "EntropyGatedChunkKVPress"}
"""Presses that choose by another press's scores in a way of their own, and return the keys that
stay."""
USING_OUTPUT = {"CriticalKVPress", "CriticalAdaKVPress"}
"""Presses that read the weights of the module's output projection."""
REFUSED = {
    **dict.fromkeys(("BasePress", "ScorerPress"), "is the base of other presses"),
    "CAMPress": "merges values of tokens during decoding, and here a press evicts after the prompt",
    "ChunkKVPress": "keeps whole chunks of unequal lengths, so its data decide how many tokens it "
    "keeps; kvpress:EntropyGatedChunkKVPress:... keeps a fixed number",
    "ComposedPress": "runs several presses one after another; choose one of them",
    "CompressionRatioDecodingPress": "evicts during decoding, and here a press evicts after the "
    "prompt",
    "DMSPress": "keeps what is above a threshold, so its data decide how many tokens it keeps",
    "DecodingPress": "evicts during decoding, and here a press evicts after the prompt",
    "DuoAttentionPress": "needs patterns of heads from the network; method=duo measures them",
    "ExpectedAttentionStatsPress": "needs statistics of the model's queries from the hub",
    "FastKVzipPress": "needs trained gates from the hub",
    "FinchPress": "needs a mark between context and question in the prompt",
    "KVComposePress": "runs the model over the prompt again by itself",
    "KVgradPress": "runs the model over the prompt again by itself, with gradients",
    "KVzapPress": "needs a trained model from the hub",
    "KVzipPress": "runs the model over the prompt again by itself; method=kvzip does so here",
    "KeyRerotationPress": "changes the keys of tokens that stay",
    "LUKVPress": "needs curves of budgets from the network",
    "MergingPress": "changes the values of tokens that stay",
    "PerLayerCompressionPress": "has a ratio for each layer instead of one size",
    "PrefillDecodingPress": "evicts during decoding, and here a press evicts after the prompt",
    "QFilterPress": "needs trained filters from the hub",
    "RestoreKVPress": "needs trained weights from the hub",
    "SimLayerKVPress": "keeps all tokens of some layers, so its data decide how many tokens it "
    "keeps",
    "ThinKPress": "removes channels of keys, and no token",
}  # fmt: skip
"""Presses that are no method here, and why."""


def allowed() -> list[str]:
    """The names of presses that can be methods, those that wrap another one included."""
    presses = presses_installed()
    scoring = [name for name, cls in presses.items() if gives_scores(cls) and not loads_more(cls)]
    return sorted({*scoring, *wrapping()} - REFUSED.keys())


class Part(NamedTuple):
    """A press of a choice. settings: its parameters, each with the method's setting for it."""

    cls: type
    settings: tuple[tuple[str, str], ...]


@cache
def presses_installed() -> dict[str, type]:
    """The presses of the installed kvpress by name. Raises ValueError where it cannot be
    imported."""
    try:
        package = _imported()
        version_installed()
    except ImportError as error:
        missing = error.name or PACKAGE
        raise ValueError(
            f"needs the Python package {missing}, which is not installed: {INSTALL}"
        ) from error
    classes = {name: cls for name, cls in vars(package).items() if inspect.isclass(cls)}
    return {name: cls for name, cls in classes.items() if issubclass(cls, package.BasePress)}


def _imported() -> ModuleType:
    """kvpress, without what its import does to transformers: it wraps every attention function, so
    that keys are masked which a press has marked on a module. Nothing here attends by them, and a
    wrapped one writes to every module."""
    if PACKAGE in sys.modules:  # the user's own import stays as it is
        return importlib.import_module(PACKAGE)
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    before = dict(functions.items())
    package = importlib.import_module(PACKAGE)
    for name, function in before.items():
        if functions[name] is not function:
            del functions[name]  # the wrapper, which hides the registered function
        if functions.get(name) is not function:
            functions[name] = function
    return package


@cache
def version_installed() -> str:
    return metadata.version(PACKAGE)


def gives_scores(cls: type) -> bool:
    return issubclass(cls, presses_installed()["ScorerPress"])


def loads_more(cls: type) -> bool:
    """True if the press takes more from a model than its layers, such as weights of its own from
    the hub."""
    return cls.post_init_from_model is not presses_installed()["BasePress"].post_init_from_model  # type: ignore[attr-defined]


def wraps_another(cls: type) -> bool:
    return cls.__name__ in SHARING | MOVING | USING_OUTPUT


def wrapping() -> list[str]:
    return [name for name, cls in presses_installed().items() if wraps_another(cls)]


def parameters_of(cls: type) -> dict[str, tuple[Any, Any]]:
    """The settings of a press: type and default by name. Its ratio and the press that it wraps are
    none of them."""
    found = {}
    for name, parameter in inspect.signature(cls, eval_str=True).parameters.items():
        if name not in ("compression_ratio", "press") and not name.startswith("_"):
            found[name] = parameter.annotation, parameter.default
    return found


def query_of(inputs: LayerInputs) -> Tensor:
    """The queries that presses make of a module's input, after positions, fp32."""
    utils = importlib.import_module(f"{PACKAGE}.utils")
    query = utils.get_prerope_query_states(inputs.module, inputs.hidden).float()
    if inputs.position_embeddings is None:
        raise ValueError("it is given no position embeddings")
    cos, sin = (part.float().unsqueeze(1) for part in inputs.position_embeddings)
    half = query.shape[-1] // 2
    turned = torch.cat((-query[..., half:], query[..., :half]), -1)
    return query * cos + turned * sin


class PressedSequence(NamedTuple):
    """One sequence of a batch in a layer, without its padding: what a press is asked about.

    at: the sequence; first: the column of its first token. inputs: of the layer's module; None
    where it is not needed. keys, values: [1, num_kv_heads, tokens, head_dim]. attentions: [1,
    heads, tokens, tokens]; None likewise.
    """

    layer: int
    at: int
    first: int
    inputs: LayerInputs | None
    keys: Tensor
    values: Tensor
    attentions: Tensor | None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of a press's `score` and `compress`."""
        if self.inputs is None:
            return None, None, self.keys, self.values, self.attentions, {}
        module, hidden, embeddings, _ = self.inputs
        kwargs = {"hidden_states": hidden, "position_embeddings": embeddings}
        return module, hidden, self.keys, self.values, self.attentions, kwargs


class ByNumber:
    """A press that is given the numbers of tokens in the place of their keys and values."""

    def __init__(self, press: Any, keys: Tensor, values: Tensor) -> None:
        self.press, self.keys, self.values = press, keys, values

    @property
    def compression_ratio(self) -> float:
        return self.press.compression_ratio

    def score(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor,
        kwargs: Any,
    ) -> Tensor:
        """The scores that the press gives to the tokens of these numbers."""
        index = keys[..., :1].long()
        own = [
            part.gather(2, index.expand(-1, -1, -1, part.shape[-1]))
            for part in (self.keys, self.values)
        ]
        return self.press.score(module, hidden_states, *own, attentions, kwargs)


def sequence_inputs(inputs: LayerInputs, at: int, first: int, device: torch.device) -> LayerInputs:
    """The inputs of one sequence of a batch without its padding."""
    hidden = inputs.hidden[at : at + 1, first:].to(device)
    embeddings = inputs.position_embeddings
    if embeddings is not None:
        cos, sin = (part[-1:] if len(part) == 1 else part[at : at + 1] for part in embeddings)
        embeddings = cos[:, first:].to(device), sin[:, first:].to(device)
    return inputs._replace(hidden=hidden, position_embeddings=embeddings)


@contextmanager
def lent(inputs: LayerInputs | None) -> Iterator[None]:
    """The module as kvpress's own hook prepares it, inside the `with` block; it is left as it
    was."""
    if inputs is None:
        yield
        return
    names = "rotary_emb", "masked_key_indices"
    own = vars(inputs.module)
    before = {name: own[name] for name in names if name in own}
    if not hasattr(inputs.module, "rotary_emb") and inputs.rotary is not None:
        own["rotary_emb"] = inputs.rotary
    try:
        yield
    finally:
        for name in names:
            own.pop(name, None)
        own.update(before)


@contextmanager
def repeatable(layer: int, device: torch.device) -> Iterator[None]:
    """Random numbers inside the `with` block that depend on the layer alone; torch's generators
    are left as they were."""
    gpus = range(torch.cuda.device_count()) if device.type == "cuda" else ()
    with torch.random.fork_rng(devices=[*gpus]):
        torch.manual_seed(layer)
        yield

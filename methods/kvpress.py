"""Presses of NVIDIA's kvpress as methods: `method=kvpress:SnapKVPress`,
`method=kvpress:AdaKVPress:SnapKVPress`.

kvpress (https://github.com/NVIDIA/kvpress, Apache-2.0) is an optional package; none of its code is
here. A press evicts once, after the prompt. Its own hook reads and writes transformers' cache, so
it is not used. A press is asked here as that hook asks it: with the layer's attention module, the
module's input, and the layer's keys and values, one sequence at a time.

- A press that gives each token a score is asked for the scores (`ScoringState`). The number of
  tokens that stay is that of `PromptEvicting`; PyramidKV's press says it for each layer. Of two
  tokens with equal scores the later stays, where kvpress leaves the choice to `topk`.
- Any other press wraps one that gives scores. It is asked to compress the layer's cache
  (`ChoosingState`); the tokens stay whose keys and values it returns and has not marked on the
  module as masked. A press that changes what stays is refused, since its rows are not in the cache.

What a press draws at random is drawn from a generator that the layer's number seeds, so that a run
can be repeated.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from fractions import Fraction
from functools import cache
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from methods.base import (
    EMPTY,
    Calibration,
    Geometry,
    LayerInputs,
    Lengths,
    PromptRows,
    TokenCounts,
    require,
)
from methods.prompt_evicting import EvictingOnce, PromptEvictingState

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
"""Presses that let the KV heads of a layer share its budget."""
REFUSED = {
    "ChunkKVPress": "keeps whole chunks of unequal lengths, so its data decide how many tokens it "
    "keeps; kvpress:EntropyGatedChunkKVPress:... keeps a fixed number",
    "KeyRerotationPress": "changes the keys of tokens that stay",
    "LUKVPress": "needs curves of budgets from the network",
    "MergingPress": "changes the values of tokens that stay",
}
"""Presses that wrap another one and are no method here, and why."""
FROM_ZERO = ("sink", "seed")
"""Words in the names of whole numbers that may be 0."""
SAME_QUERY = 0.999
"""Least cosine between a query as kvpress makes it from the module and the model's own."""


# The presses that there are


class Part(NamedTuple):
    """A press of a choice. settings: its parameters, each with the method's setting for it."""

    cls: type
    settings: tuple[tuple[str, str], ...]


def allowed() -> list[str]:
    """The names of presses that can be methods, those that wrap another one included."""
    presses = presses_installed()
    fit = {name for name, cls in presses.items() if gives_scores(cls) or wraps_another(cls)}
    return sorted(fit - REFUSED.keys())


@cache
def presses_installed() -> dict[str, type]:
    """The presses of the installed kvpress by name. Raises ValueError where it cannot be
    imported."""
    try:
        package = _imported()
        version_installed()
    except ImportError as error:
        missing = f"the Python package {error.name or PACKAGE}, which is not installed"
        raise ValueError(f"needs {missing}: {INSTALL}") from error
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


def gives_scores(cls: Any) -> bool:
    """True if the press scores tokens with a model's layers alone. Others take more in
    `post_init_from_model`, such as weights of their own from the hub."""
    presses = presses_installed()
    scorer: Any = presses["ScorerPress"]
    if not issubclass(cls, scorer) or cls.score is scorer.score:
        return False
    return wraps_another(cls) or cls.post_init_from_model is scorer.post_init_from_model


def wraps_another(cls: Any) -> bool:
    """True if the press compresses one layer by the scores of another press."""
    base: Any = presses_installed()["BasePress"]
    has_own_pass = cls.forward_hook is not base.forward_hook or cls.__call__ is not base.__call__
    return "press" in inspect.signature(cls).parameters and not has_own_pass


def parameters_of(cls: type) -> dict[str, tuple[Any, Any]]:
    """The settings of a press: type and default by name. Its ratio and the press that it wraps are
    none of them."""
    found = {}
    for name, parameter in inspect.signature(cls, eval_str=True).parameters.items():
        if name not in ("compression_ratio", "press") and not name.startswith("_"):
            found[name] = parameter.annotation, parameter.default
    return found


# From a choice to a method


@cache
def press_class(choice: str) -> type[KvPress]:
    """The method `kvpress:<choice>`: a dataclass whose fields are the settings of the press.

    choice: the name of a press, or names joined by `:`, each of a press that wraps the next. Raises
    ValueError for a press that does not exist, that cannot be a method, or that lacks a press to
    wrap, and without kvpress.
    """
    presses, names = presses_installed(), choice.split(":")
    names_allowed = ", ".join(allowed())
    for name in names:
        if name in REFUSED:
            raise ValueError(f"{name} {REFUSED[name]}")
        if name not in presses:
            version = version_installed()
            raise ValueError(f"kvpress {version} has no press {name}; allowed: {names_allowed}")
    *wrappers, last = names
    for name in wrappers:
        if not wraps_another(presses[name]):
            wrapping = ", ".join(each for each in allowed() if wraps_another(presses[each]))
            raise ValueError(f"{name} wraps no other press; allowed before `:`: {wrapping}")
    if wraps_another(presses[last]):
        raise ValueError(f"{last} wraps another press; name it, as in kvpress:{choice}:SnapKVPress")
    if not gives_scores(presses[last]):
        needs = "gives no scores of a layer's tokens, or needs more than the model"
        raise ValueError(f"{last} {needs}; allowed: {names_allowed}")

    parts: list[Part] = []
    settings: dict[str, tuple[Any, Any]] = {}
    for name in names:
        own = []
        for parameter, (hint, default) in parameters_of(presses[name]).items():
            setting = parameter
            while setting in settings:  # a press and the one that it wraps may name one alike
                setting = f"press_{setting}"
            settings[setting] = hint, default
            own.append((parameter, setting))
        parts.append(Part(presses[name], tuple(own)))
    titles = [name.removesuffix("Press") for name in names]
    namespace = {
        "__module__": __name__,
        "__doc__": f"The press {choice} of kvpress.",
        "name": f"{PACKAGE}:{choice}",
        "title": f"{PACKAGE}: {' of '.join(titles)}",
        "parts": tuple(parts),
        "needs_inputs": len(parts) > 1 or last not in KEYS_AND_VALUES | ATTENTIONS,
        "state": ScoringState if gives_scores(presses[names[0]]) else ChoosingState,
    }
    made = [("version", str, field(default=version_installed()))]
    made += [(name, hint, field(default=default)) for name, (hint, default) in settings.items()]
    cls = make_dataclass(choice, made, bases=(KvPress,), namespace=namespace, frozen=True)
    cls.__qualname__ = choice
    return cls


def __getattr__(name: str) -> type[KvPress]:
    """The class of a press by its choice, so that its instances can be pickled."""
    if "Press" not in name:
        raise AttributeError(name)
    return press_class(name)


# The method


@dataclass(frozen=True)
class KvPress(EvictingOnce):
    """A press of kvpress; `press_class` makes a class of each, with the press's settings as fields.

    version: of the installed kvpress. It is a setting so that it belongs to a run's identity.
    name: as the user writes it. parts: the press, and those that it wraps, the outermost first.
    """

    name: ClassVar[str]
    parts: ClassVar[tuple[Part, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        version: str = self.version  # type: ignore[attr-defined]
        installed = version_installed()
        require(version == installed, "version", version, f"{installed}, which is installed")
        for part in self.parts:
            for parameter, setting in part.settings:
                self._check_range(parameter, setting)
        self.press()

    def _check_range(self, parameter: str, setting: str) -> None:
        """Ranges that hold for all presses; what a press asserts itself is asked when it is
        made."""
        value = getattr(self, setting)
        if isinstance(value, int) and not isinstance(value, bool):
            least = 0 if any(word in parameter for word in FROM_ZERO) else 1
            require(value >= least, setting, value, f"an integer >= {least}")
        elif isinstance(value, float):
            require(0 <= value < float("inf"), setting, value, "a number >= 0")

    def press(self) -> Any:
        """A fresh press with the settings of this method, the innermost part made first."""
        press = None
        for part in reversed(self.parts):
            given = {parameter: getattr(self, setting) for parameter, setting in part.settings}
            try:
                press = part.cls(**given) if press is None else part.cls(press=press, **given)
            except AssertionError as error:
                raise self.refuse(str(error)) from error
        return press

    @property
    def inner(self) -> str:
        """Name of the innermost press."""
        return self.parts[-1].cls.__name__

    def refuse(self, why: str) -> ValueError:
        """The error of a press that cannot be used."""
        return ValueError(f"method.name={self.name}: {why}")

    # Where it works

    def check(self, geometry: Geometry, lengths: Lengths) -> None:
        super().check(geometry, lengths)
        if geometry.values_in_keys:
            why = "presses know no latent attention, whose keys hold the values as well"
            raise self.refuse(why)

    def check_inputs(self, inputs: LayerInputs, query: Tensor) -> None:
        """ValueError where the press would make other queries from the module than the model
        does."""
        if self.inner in KEYS_AND_VALUES | ATTENTIONS:
            return
        try:
            made = query_of(inputs)
            cosine = 0.0
            if made.shape == query.shape:
                cosine = float(cosine_similarity(made, query.float(), dim=-1).min())
        except Exception as error:
            module = type(inputs.module).__name__
            raise self.refuse(f"makes no queries from {module} ({_reason(error)})") from error
        if not cosine >= SAME_QUERY:
            module = type(inputs.module).__name__
            raise self.refuse(f"makes other queries than {module}, which kvpress does not know")

    # Sizes

    def ratio(self, prompt: int) -> float:
        """The press's `compression_ratio` with which it keeps `budget` tokens, however it rounds
        down."""
        return 1 - (super().budget_in_tokens(prompt) + 1e-4) / prompt

    def shares(self, prompt: int, num_layers: int) -> list[int]:
        """Number of tokens in each layer, of PyramidKV's press by its own formula in exact
        fractions: their mean is exact."""
        press = self.press()
        if not hasattr(press, "get_layer_budget") or num_layers == 1:
            return super().shares(prompt, num_layers)
        press.compression_ratio = Fraction(prompt - self.budget_in_tokens(prompt), prompt)
        config = SimpleNamespace(num_hidden_layers=num_layers)
        layers = [SimpleNamespace(config=config, layer_idx=layer) for layer in range(num_layers)]
        return [press.get_layer_budget(layer, prompt) for layer in layers]

    def _most(self, prompt: int) -> int:
        return max(self.shares(prompt, 2))

    def budget_in_tokens(self, prompt: int) -> int:
        budget = super().budget_in_tokens(prompt)
        if self.parts[0].cls.__name__ != "ChunkPress" or budget == prompt:
            return budget
        # Each chunk keeps the share, rounded down, and at least one token.
        length: int = self.chunk_length  # type: ignore[attr-defined]
        chunks = [min(length, prompt - begin) for begin in range(0, prompt, length)]
        return sum(max(1, int(chunk * (budget + 1e-4) / prompt)) for chunk in chunks)

    def tokens_kept(self, counts: TokenCounts, layer: int) -> int:
        if self.parts[0].cls.__name__ in SHARING:  # one head may keep all that the others evict
            return counts.cached
        return super().tokens_kept(counts, layer)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


# What a press is given


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
    own.pop("masked_key_indices", None)  # of a press that the user ran
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


# The states


class PressState(PromptEvictingState):
    """A state that asks a press, one sequence at a time."""

    method: KvPress

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        self.press = self.method.press()

    def sequences(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> Iterator[PressedSequence]:
        """Each sequence of the batch that loses tokens. The press has its ratio then."""
        columns = key.shape[2]
        for at, length in enumerate(rows.lengths.tolist()):
            if self.method.budget_in_tokens(length) >= length:
                continue
            first = columns - length
            keys, values = (part[at : at + 1, :, first:].contiguous() for part in (key, value))
            attentions = None
            if self.method.inner in ATTENTIONS:
                attentions = self._attentions(layer, query[at : at + 1, :, first:], keys)
            self.press.compression_ratio = self.method.ratio(length)
            inputs = rows.inputs
            if inputs is not None:
                inputs = sequence_inputs(inputs, at, first, key.device)
            yield PressedSequence(layer, at, first, inputs, keys, values, attentions)

    def _attentions(self, layer: int, query: Tensor, key: Tensor) -> Tensor:
        """The attention weights of a prompt, [1, heads, prompt, prompt]."""
        softmax = self.geometry.softmax(layer)
        scores = softmax.scores(query, key)
        later = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool, device=key.device).triu(1)
        weights = softmax.weights(scores.masked_fill_(later, -float("inf")))
        return weights.flatten(1, 2).to(query.dtype)

    def asked(self, ask: Callable[..., Any], sequence: PressedSequence) -> tuple[Any, Any]:
        """Result of the press, and the `masked_key_indices` that it has marked on the module, None
        for none. Raises ValueError in one line where it fails."""
        try:
            with lent(sequence.inputs), repeatable(sequence.layer, sequence.keys.device):
                returned = ask(*sequence.arguments)
                if sequence.inputs is None:
                    return returned, None
                return returned, vars(sequence.inputs.module).get("masked_key_indices")
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if "DefaultCPUAllocator" in str(error):  # out of memory on a CPU
                raise
            length = sequence.keys.shape[2]
            why = f"failed on a prompt of {length} tokens ({_reason(error)})"
            raise self.method.refuse(why) from error


class ScoringState(PressState):
    """Score: the press's score."""

    def prompt_score(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> Tensor:
        score = torch.zeros(key.shape[:3], device=key.device)
        for sequence in self.sequences(layer, query, key, value, rows):
            given, _ = self.asked(self.press.score, sequence)
            allowed = sequence.keys.shape[:3]
            if given.shape != allowed:
                raise self.method.refuse(f"gave scores {[*given.shape]}; allowed: {[*allowed]}")
            score[sequence.at, :, sequence.first :] = given[0]
        return score


class ChoosingState(PressState):
    """The press itself chooses the tokens that stay."""

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        self.enter_prompt(layer, rows)
        for sequence in self.sequences(layer, query, key, value, rows):
            stays = self.chosen(sequence)
            num_heads, length = stays.shape
            kept, budget = int(stays.sum()), self.method.budget_in_tokens(length)
            if kept != num_heads * budget:
                why = f"kept {kept} rows of {num_heads} heads, not {budget} of each on average"
                raise self.method.refuse(why)
            tokens = self.tokens[layer][sequence.at, :, sequence.first : key.shape[2]]
            tokens.masked_fill_(~stays, EMPTY)

    def chosen(self, sequence: PressedSequence) -> Tensor:
        """The tokens that the press leaves in the cache unmarked, bool [num_kv_heads, prompt]."""
        (keys, values), marked = self.asked(self.press.compress, sequence)
        stays = torch.zeros(sequence.keys.shape[1:3], dtype=torch.bool)
        for head in range(len(stays)):
            places: dict[bytes, list[int]] = {}
            for place, row in enumerate(as_bytes(sequence.keys[0, head], sequence.values[0, head])):
                places.setdefault(row, []).append(place)
            for row in as_bytes(keys[0, head], values[0, head]):
                if not places.get(row):
                    raise self.method.refuse("changes keys or values that stay")
                stays[head, places[row].pop()] = True
        if marked is not None:
            _, heads, tokens = marked
            stays[heads.cpu(), tokens.cpu()] = False
        return stays.to(sequence.keys.device)


def as_bytes(keys: Tensor, values: Tensor) -> list[bytes]:
    """The bytes of each token's key and value, [tokens, size] each."""
    rows = torch.cat([keys, values], -1).float().cpu().numpy()  # numpy has no bf16
    return [row.tobytes() for row in rows]

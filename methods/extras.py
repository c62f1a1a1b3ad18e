"""What only some methods need, each a class to derive from beside a base of methods or of states:

    class KVzip(RereadsPrompt, PromptEvicting): ...

The harness asks `isinstance(method, RereadsPrompt)`, and for the state that belongs to it likewise.
None of these classes has settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from methods.attention import Softmax
from methods.base import (
    Calibration,
    Geometry,
    LayerInputs,
    Method,
    PromptRows,
    State,
    TokenCounts,
    checked,
    each_tensor,
)


class Extra(Method):
    """Base of what a method derives from as well, before or behind the base of its settings."""

    # `dataclass` reads the fields of every base in turn. Those that this class would inherit from
    # `Method` would undo other defaults, such as 2 for `dense_layers`.
    __dataclass_fields__: ClassVar[dict[str, Any]] = {}


# A second reading of the prompt


class Repetition(NamedTuple):
    """A pass of the model after a prompt, over rows that see the whole prompt and one another
    causally.

    parts: their tokens, in order: ids, or tokens of the prompt. chunk: the prompt's tokens that the
    pass is about.
    """

    parts: list[tuple[int, ...] | slice]
    chunk: slice


class RereadRows(NamedTuple):
    """The rows of a `Repetition` in one layer, for one sequence without its padding.

    query: [1, heads, rows, head_dim], key: [1, num_kv_heads, rows, head_dim], post-position.
    prompt_key: [1, num_kv_heads, prompt, head_dim]. chunk: of the prompt's tokens. input_norms:
    length of each row's attention input, fp32 [rows]. value_norms: length of what the layer's
    output projection makes of each of the chunk's values alone, fp32 [heads, chunk]. Both are None
    unless the method `needs_norms`.
    """

    query: Tensor
    key: Tensor
    prompt_key: Tensor
    chunk: slice
    input_norms: Tensor | None = None
    value_norms: Tensor | None = None


class RereadsPrompt(Extra):
    """The model reads the prompt again after its dense pass: it runs over the rows that
    `repetitions` lists, and `reread` makes a score of each prompt token from them. Its states are
    `RereadingState`."""

    @property
    def needs_norms(self) -> bool:
        """True if `reread` is to get the norms of `RereadRows`."""
        return False

    def tokenized(self, encode: Callable[[str], Sequence[int]]) -> Self:
        """This method with its texts as token ids of the model, made by `encode`."""
        return self

    def repetitions(self, prompt: int) -> list[Repetition]:
        """The passes of the model that follow a prompt of so many tokens."""
        raise NotImplementedError

    def reread(self, rows: RereadRows, softmax: Softmax) -> Tensor:
        """What a pass says of the tokens of its chunk in one layer: scores, fp32 [num_kv_heads,
        chunk]."""
        raise NotImplementedError


class RereadingState(State):
    """State of a method that `RereadsPrompt`."""

    def take_scores(self, score: Mapping[int, Tensor], rows: PromptRows) -> None:
        """Take what `reread` said of each prompt token, before the `prompt` of any layer.

        score: of every layer under the method, on the layer's device, fp32 [batch, num_kv_heads,
        prompt]; 0 for a token of no chunk.
        """
        raise NotImplementedError


def tokenized(method: Method, encode: Callable[[str], Sequence[int]]) -> Method:
    """The method with its texts, if it has any, as token ids that `encode` makes of them."""
    return method.tokenized(encode) if isinstance(method, RereadsPrompt) else method


# The module and the input of a layer


class NeedsInputs(Extra):
    """`State.prompt` gets the layer's attention module and its input (`PromptRows.inputs`), for a
    rule that uses the module's weights. Not together with `RereadsPrompt`."""

    def check_inputs(self, inputs: LayerInputs, query: Tensor) -> None:
        """Raise ValueError where the method cannot work with such an attention module.

        inputs: of the first layer under the method, for a few tokens of one sequence. query: what
        the model makes of them, [1, heads, tokens, head_dim], post-position.
        """


# Keys on the device


class KeysOnDevice(Extra):
    """The state gives keys back. The cache then holds values only, and only they cross the link.
    Some tokens of the prompt and all generated ones stay exact on the device. Its states are
    `KeysOnDeviceState`."""

    def tokens_resident(self, counts: TokenCounts, layer: int) -> int:
        """Cached tokens that stay exact on the device."""
        return 0


class KeysOnDeviceState(State):
    """State of a method with `KeysOnDevice`."""

    def resident(self, layer: int) -> Tensor:
        """Prompt tokens that stay on the device, bool [batch, num_kv_heads, prompt].

        Every row reads them beside its selection, which names none of them. Called once, after
        `prompt`.
        """
        raise NotImplementedError

    def rebuild(self, layer: int, slots: Tensor) -> Tensor:
        """Keys of prompt tokens as they are read, [batch, num_kv_heads, n, head_dim].

        slots: int [batch, num_kv_heads, n]; the result for a negative one may be anything.
        """
        raise NotImplementedError


def resident_of(state: KeysOnDeviceState, layer: int, key: Tensor) -> Tensor:
    """What is `resident` of a prompt of this `key`, of the right shape."""
    found = state.resident(layer)
    return checked(state.resident, found, "batch, KV heads, tokens", *key.shape[:3])


def rebuilt(state: KeysOnDeviceState, layer: int, slots: Tensor) -> Tensor:
    """The keys that `rebuild` gives, of the right shape."""
    found, sizes = state.rebuild(layer, slots), (*slots.shape, state.geometry.head_dim)
    return checked(state.rebuild, found, "batch, KV heads, n, head_dim", *sizes)


# Selections of which a layer takes those of an earlier one


class HandsOn(State):
    """State of a method whose layers take over what earlier layers chose.

    handed_on: names of attributes that the `select` of one layer leaves to later layers, tensors or
        dicts of them. A model over several devices has a state on each; these attributes are handed
        from device to device.
    """

    handed_on: ClassVar[tuple[str, ...]] = ()

    def take_over(self, earlier: State) -> None:
        """Copy the `handed_on` attributes from the state of another device."""
        device = self.lengths.final.device
        for name in self.handed_on:
            held = getattr(earlier, name)
            setattr(self, name, each_tensor(held, lambda tensor: tensor.to(device)))


# What is measured once of a model


class Calibrates(Extra):
    """Measures each layer of the model on the calibration text, before the first batch.

    calibration_settings: names of the settings that change what `calibrate` measures.
    """

    calibration_settings: ClassVar[tuple[str, ...]] = ()

    @property
    def needs_calibration(self) -> bool:
        """True if `calibrate` must run, as settings may do without."""
        return True

    def calibrate(
        self, query: Tensor, key: Tensor, geometry: Geometry, earlier: Sequence[Calibration]
    ) -> Calibration:
        """Measure one layer. The result is kept on disk for the same method and settings.

        query: [heads, tokens, head_dim], key: [num_kv_heads, tokens, head_dim], post-position, from
        position 0 on. earlier: results of the layers before this one, so `len(earlier)` is the
        layer's number.
        """
        raise NotImplementedError

    def settled(self, calibration: Calibration) -> Self:
        """This method with the settings that its calibration decides, such as which layers choose
        for others. It reads as many tokens as before."""
        return self

    def _needed(self, calibration: Calibration | None) -> Calibration | None:
        if not self.needs_calibration:
            return None
        if calibration is None:
            raise ValueError(f"method {self.title}: needs a calibration; calibrate first")
        return calibration


def to_calibrate(method: Method) -> Calibrates | None:
    """The method, if it is to be calibrated before the first batch; else None."""
    return method if isinstance(method, Calibrates) and method.needs_calibration else None


# Other


class ReplayOnly(Extra):
    """In some settings the method can be scored but not decoded live."""

    @property
    def replay_only(self) -> str | None:
        """Why, in words for the user; None where it can be decoded."""
        return None


def why_replay_only(method: Method) -> str | None:
    """Why a method cannot be decoded live; None where it can."""
    return method.replay_only if isinstance(method, ReplayOnly) else None


class ReadsFile(Extra):
    """The method opens a data file. Its contents belong to a run's identity."""

    @property
    def file(self) -> str | None:
        """Its path; None where the method opens none with these settings."""
        return None


class WeighsRest(Extra):
    """The `Rest` of its selections has a log-mass. Attention then computes scores, which a fused
    call hides."""

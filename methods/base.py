"""What a KV-cache method is, read from top to bottom.

A **method** is a frozen dataclass of settings (`Method`) without tensors. A **state** (`State`)
holds everything that changes while a batch of sequences runs. Its `select` says for any number of
query rows which cached tokens each row reads. Live decoding calls it with one row and fetches the
tokens it names. Replay calls it with many rows and masks all other tokens. Both therefore read the
same tokens.

Cached tokens lie in **slots**. In replay a slot is a column of the padded batch. In live decoding
it is a row of the KV store, and a freed slot is used again. `QueryRows.slot_positions` says which
token a slot holds.

Most methods start from an easier base: `methods.selection` scores tokens or pages and reads the
best ones, `methods.prompt_evicting` and `methods.evicting` give each token a score and keep the
best ones.

Shapes: batch, heads (query heads), num_kv_heads, group = heads / num_kv_heads, rows, slots,
head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self, final

import torch
from torch import Tensor

from methods.attention import Softmax, Window
from methods.settings import least, require, setting, settings_of

EMPTY = torch.iinfo(torch.int32).max
"""Position of an empty slot and of padding: later than every query, hence never visible."""

When = Literal[
    "kept", "earlier_layer", "previous_step", "previous_layer", "own_query", "true_scores"
]
"""When a method chooses the tokens that a layer reads, earliest first.

`kept`            no choice: the layer reads all that it keeps. `select` sees the true scores and
                  may evict
`earlier_layer`   when an earlier layer of the same step has selected; `select` gets no query
`previous_step`   one layer ahead, by the layer's query of the previous step
`previous_layer`  one layer ahead, by a query computed from the attention input of the previous
                  layer ("predicted")
`own_query`       in the layer itself, by its own query; the layer waits while the rows cross the
                  link
`true_scores`     in the layer itself, by the true scores of all keys, which therefore cannot lie
                  behind a link
"""
NAMES_ROWS: frozenset[When] = frozenset(
    ("earlier_layer", "previous_step", "previous_layer", "own_query")
)
"""Here `select` runs before the fetch and decides which rows are fetched."""

Calibration = Mapping[str, Tensor]
"""Tensors that `Method.calibrate` measured, by name; of all layers: [num_layers, ...]."""


@dataclass(frozen=True)
class Method:
    """A KV-cache method: its fields are its settings (`methods.settings`)."""

    dense_layers: int = setting(
        0, "first layers that read the full cache; every budget counts them", least(0)
    )
    """The default is the number of the method's own code, else of its paper. A class says it where
    it is not 0; a file of `conf/method` says it where it is not its class's."""

    state: ClassVar[type[State] | None]
    """Class of the states that `new_state` makes; None: every cached token is read."""

    def __post_init__(self) -> None:
        """Check each setting's range. Subclasses check what their settings must be together."""
        for field in settings_of(type(self)):
            value = getattr(self, field.name)
            if field.allowed is not None:
                require(field.allowed.holds(value), field.name, value, field.allowed.words)

    @property
    def title(self) -> str:
        """The name in tables and legends. Settings that make it another method are part of it."""
        return ""

    @property
    def when(self) -> When:
        """When it chooses tokens in all layers but those of which `when_of` says another time."""
        return "kept"

    def when_of(self, layer: int) -> When:
        """When the tokens of a `layer` under the method are chosen."""
        return self.when

    @final
    @property
    def reads_all(self) -> bool:
        """True if every cached token is read: the method has no state."""
        return self.state is None

    @final
    @property
    def names_rows(self) -> bool:
        """True if `select` decides which rows are fetched."""
        return self.when in NAMES_ROWS

    # A batch

    def check(self, geometry: Geometry, lengths: Lengths) -> None:
        """Raise ValueError where the method cannot work on this model or at these lengths."""

    @final
    def new_state(
        self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None
    ) -> State:
        """A fresh state for a batch. Raises ValueError as `check`, and without a calibration that
        is needed."""
        assert self.state is not None, "a method that reads everything has no state"
        self.check(geometry, lengths)
        if self.needs_calibration and calibration is None:
            raise ValueError(f"method {self.title}: needs a calibration; calibrate first")
        return self.state(self, geometry, lengths, calibration if self.needs_calibration else None)

    # Budgets

    def tokens_read(self, counts: TokenCounts, layer: int) -> float | None:
        """Cached tokens that a decode row reads in a layer under the method; None where the data
        decides.

        The mean over the layer's KV heads, and over the layers where they share a budget.
        """
        raise NotImplementedError

    def max_tokens_read(self, counts: TokenCounts, layer: int) -> int:
        """Upper bound of `tokens_read`, known without the data: the size of a fetch buffer."""
        return counts.cached

    def tokens_kept(self, counts: TokenCounts, layer: int) -> int:
        """Upper bound of the tokens that a KV head holds before this row; fewer than `cached` if
        the method evicts."""
        return counts.cached

    def with_budget(self, frac: float) -> Self:
        """This method with the budget of one number in (0, 1]. Raises ValueError where the method
        has no such number.

        The budget that is read must grow with the number, but need not be equal to it: dense layers
        and codecs come on top. The harness looks for the number, by `tokens_read` where it says the
        budget, else by measuring it.
        """
        raise ValueError(
            "it has no budget to set, as it reads the same share always; in a method of your own "
            "with_budget gives it one (CONTRIBUTING.md)"
        )

    def min_budget(self, counts: TokenCounts) -> float:
        """Least number for `with_budget` that a sequence with this prompt and T allows. Raises
        ValueError if none."""
        return 2**-24

    def artifact_budget(self) -> float:
        """Share of a sequence that `prefill=artifact` takes as its dense prompt (the artifact's
        `budget`)."""
        return 1.0

    # What is measured once of a model

    calibration_settings: ClassVar[tuple[str, ...]] = ()
    """Names of the settings that change what `calibrate` measures."""

    @property
    def needs_calibration(self) -> bool:
        """True if `calibrate` must run on the calibration text before the first batch. A setting
        may do without."""
        return type(self).calibrate is not Method.calibrate

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

    # A second reading of the prompt

    @final
    @property
    def rereads_prompt(self) -> bool:
        """True if the model reads the prompt again after its dense pass, by `repetitions`."""
        return type(self).repetitions is not Method.repetitions

    def repetitions(self, prompt: int) -> list[Repetition]:
        """The passes of the model that follow a prompt of so many tokens."""
        raise NotImplementedError

    def reread(self, rows: RereadRows, softmax: Softmax) -> Tensor:
        """Scores of the tokens of a pass's chunk in one layer, fp32 [num_kv_heads, chunk]."""
        raise NotImplementedError

    @property
    def needs_norms(self) -> bool:
        """True if `reread` is to get the norms of `RereadRows`."""
        return False

    def tokenized(self, encode: Callable[[str], Sequence[int]]) -> Self:
        """This method with its texts as token ids of the model, made by `encode`."""
        return self

    # What few methods need

    needs_inputs: ClassVar[bool] = False
    """True if `State.prompt` gets the layer's attention module and its input
    (`PromptRows.inputs`), for a rule that uses the module's weights. Not where it rereads."""
    weighs_rest: ClassVar[bool] = False
    """True if the `Rest` of its selections has a log-mass. Attention then computes scores, which a
    fused call hides."""

    def check_inputs(self, inputs: LayerInputs, query: Tensor) -> None:
        """Raise ValueError where the method cannot work with such an attention module.

        inputs: of the first layer under the method, for a few tokens of one sequence. query: what
        the model makes of them, [1, heads, tokens, head_dim], post-position.
        """

    @final
    @property
    def keeps_keys(self) -> bool:
        """True if the state keeps the keys and gives them back (`State.rebuild`). The cache then
        holds values only, and only they cross the link."""
        return type(self).tokens_resident is not Method.tokens_resident

    def tokens_resident(self, counts: TokenCounts, layer: int) -> int:
        """Cached tokens that stay exact on the device where the state keeps the keys: some of the
        prompt, and all that are generated."""
        raise NotImplementedError

    @property
    def replay_only(self) -> str | None:
        """Why it can be scored but not decoded live, in words for the user; None where it can."""
        return None

    @property
    def file(self) -> str | None:
        """Path of the data file that it opens, whose contents belong to a run's identity; None for
        none."""
        return None


class State:
    """Everything of a method that changes while a batch of sequences runs. Dropped with the batch.

    sequence_tensors: names of attributes with the batch first, tensors or dicts of them by layer.
        `fork` copies them, and they count as resident.
    slot_tensors: names of attributes kept per slot, dicts by layer of [batch, num_kv_heads, slots,
        ...], with the value of an empty slot. They are copied and counted too, and `fork` makes
        room in them.
    selects_without_own: True if `select` needs nothing that `append` keeps of the row's current
    token. Live decoding then appends the current token while the selected rows cross the link.
    replayable: True if a live step may be recorded once and replayed: `append` and `select` queue
        the same operations on the same memory in each step that sees as many slots. They decide
        nothing by the length of a step, keep what they know in place, and `append` takes its slot
        also as int64 [1]. Not inherited: each class says it of itself.
    """

    sequence_tensors: ClassVar[tuple[str, ...]] = ()
    slot_tensors: ClassVar[Mapping[str, float]] = {}
    selects_without_own: ClassVar[bool] = False
    replayable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "replayable" not in vars(cls):
            cls.replayable = False

    def __init__(
        self,
        method: Any,
        geometry: Geometry,
        lengths: Lengths,
        calibration: Calibration | None = None,
    ) -> None:
        self.method = method
        self.geometry = geometry
        self.lengths = lengths
        for name in (*self.sequence_tensors, *self.slot_tensors):
            setattr(self, name, {})
        self.start(calibration)

    def start(self, calibration: Calibration | None) -> None:
        """Set up what does not depend on the prompt. calibration: None where the method needs
        none."""

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        """Take in a layer's prompt after its dense pass.

        query: [batch, heads, prompt, head_dim]; key, value: [batch, num_kv_heads, prompt,
        head_dim], post-position.
        """

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice | Tensor
    ) -> None:
        """Take in decode rows that enter `slots`: exact key and value [batch, num_kv_heads, n,
        head_dim]. A state that is not `replayable` gets a slice.

        positions: int [batch, n], `EMPTY` for padding. Called before the `select` of these rows.
        Three cases differ: replay appends later rows too, a predicted query selects before its own
        row is known, and so does a state that `selects_without_own`. So `select` may look at
        visible slots only.
        """

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """Choose the tokens that each of `rows` reads in `layer`, and carry the state past these
        rows.

        Live decoding calls it once per step and layer, in the order of the layers. A layer that
        selects ahead (`previous_step`, `previous_layer`) may come before the layer in front of it.
        Replay gives a layer all its blocks of rows, in order, before the next layer begins. So a
        selection may depend on earlier rows of its own layer. Only an `earlier_layer` may depend on
        other layers: it reads what an earlier layer chose for the same rows, which the state keeps
        by `rows.own_slots`. The size of a block must not change the result.
        """
        raise NotImplementedError

    def take_scores(self, score: Mapping[int, Tensor], rows: PromptRows) -> None:
        """Take what `Method.reread` said of each prompt token, before the `prompt` of any layer.

        score: of every layer under the method, on the layer's device, fp32 [batch, num_kv_heads,
        prompt]; 0 for a token of no chunk.
        """
        raise NotImplementedError

    def resident(self, layer: int) -> Tensor:
        """Prompt tokens that stay on the device where the state keeps the keys, bool [batch,
        num_kv_heads, prompt].

        Every row reads them beside its selection, which names none of them. Called once, after
        `prompt`.
        """
        raise NotImplementedError

    def rebuild(self, layer: int, slots: Tensor) -> Tensor:
        """Keys of prompt tokens as they are read, [batch, num_kv_heads, n, head_dim].

        slots: int [batch, num_kv_heads, n]; the result for a negative one may be anything.
        """
        raise NotImplementedError

    def fork(self, index: Tensor, num_slots: int) -> State:
        """A copy for sequences `index` [new_batch] of this batch, with room for `num_slots`
        slots."""
        child = copy(self)
        child.lengths = Lengths(*(part.index_select(0, index) for part in self.lengths))
        for name in self.sequence_tensors:
            held = getattr(self, name)
            if isinstance(held, Tensor):
                setattr(child, name, held.index_select(0, index))
            else:
                chosen = {layer: each.index_select(0, index) for layer, each in held.items()}
                setattr(child, name, chosen)
        for name, empty in self.slot_tensors.items():
            by_layer = {}
            for layer, old in getattr(self, name).items():
                shape = (len(index), old.shape[1], num_slots, *old.shape[3:])
                order = sorted(range(old.dim()), key=old.stride, reverse=True)  # as it is in memory
                by_layer[layer] = torch.empty_permuted(
                    shape, order, dtype=old.dtype, device=old.device
                ).fill_(empty)
                by_layer[layer][:, :, : old.shape[2]] = old.index_select(0, index)
            setattr(child, name, by_layer)
        return child


# What a state is given


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


class LayerInputs(NamedTuple):
    """Arguments of an attention layer, for a method that `needs_inputs`.

    module: the model's own attention module, with its weights; it must be left as it is. hidden:
    the module's input [batch, tokens, hidden_size], zeros in the padding. position_embeddings: the
    cosines and sines that the module is given, each [batch or 1, tokens, rotary dim]; None where it
    is given none. rotary: makes them, rotary(states, position_ids); None likewise.
    """

    module: Any
    hidden: Tensor
    position_embeddings: tuple[Tensor, Tensor] | None = None
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


class PromptRows(NamedTuple):
    """The prompt's layout: real bool [batch, prompt] (left padded); num_slots that the batch will
    ever use.

    inputs: what the layer's module is called with; None unless the method `needs_inputs`.
    """

    real: Tensor
    num_slots: int
    inputs: LayerInputs | None = None

    @property
    def lengths(self) -> Tensor:
        """Real prompt tokens of each sequence, int [batch]."""
        return self.real.sum(-1)

    @property
    def positions(self) -> Tensor:
        """The token of each column, int [batch, prompt], `EMPTY` in the padding."""
        return (self.real.cumsum(-1) - 1).masked_fill(~self.real, EMPTY)


@dataclass
class QueryRows:
    """A block of query rows of one layer and the slots they look at.

    query: [batch, heads, rows, head_dim], after positions, before the softmax scale: the query that
        `when` says, and not meaningful for `earlier_layer`.
    positions: int [batch, rows], t = the row's position = its number of cached tokens.
    real: bool [batch, rows], False for padding.
    slot_positions: int [batch, 1 or num_kv_heads, slots], the token in each slot, `EMPTY` where
    there is none. own_slots: int [batch, 1 or num_kv_heads, rows], the slot of each row's own
    token.
    true_scores: makes the scaled scores of the true query over the visible slots and the own one,
        -inf elsewhere, fp32 [batch, num_kv_heads, group, rows, slots]; read-only, valid until the
        block's attention is computed. Only where `when` is `kept` or `true_scores`.
    padded: True if any row is padding; known without asking the device.
    """

    query: Tensor
    positions: Tensor
    real: Tensor
    slot_positions: Tensor
    own_slots: Tensor
    true_scores: Callable[[], Tensor]
    padded: bool = False

    def visible(self) -> Tensor:
        """Cached tokens that each row may read, without its own: bool [batch, 1 or num_kv_heads,
        rows, slots]."""
        return self.slot_positions.unsqueeze(2) < self.positions[:, None, :, None]


class Selection(NamedTuple):
    """The tokens that a block of query rows reads, besides each row's current token.

    mask: bool [batch, num_kv_heads or 1, rows, slots]; None reads every visible slot. Live decoding
        ignores it for a method that evicts, which reads all that it keeps.
    num_read: tokens read, mean over the KV heads, fp64, or int where all heads read the same
    number, [batch, rows]. side: part of an index that was read to find them, in tokens
    (`Geometry.elements`), fp64 [batch, rows]; None for no index.
    bias: added to the scaled scores of cached tokens, such as the log-weights of samples; finite,
        fp32 [batch, num_kv_heads or 1, group or 1, rows, slots].
    rest: replacement for the tokens that are not read; None for no replacement.
    """

    mask: Tensor | None
    num_read: Tensor
    side: Tensor | None = None
    bias: Tensor | None = None
    rest: Rest | None = None


class Rest(NamedTuple):
    """Replacement for tokens that are not read: output = (1 - share) * attention + share * value.

    share: [batch, num_kv_heads, group, rows]. value: [batch, num_kv_heads, 1 or group, rows,
    value_dim]; finite. log_mass: instead of a share, for a method that `weighs_rest`: logarithm of
    the sum of exp(score) that these tokens would have, fp32 like `share`; -inf for none. The share
        then follows from the scores of the tokens read.
    """

    share: Tensor | None
    value: Tensor
    log_mass: Tensor | None = None

    def beside(self, log_total: Tensor) -> Rest:
        """This rest with a share: that of its log-mass beside `log_total`, the log-mass of all that
        is read, of the same shape."""
        assert self.log_mass is not None
        return Rest(torch.sigmoid(self.log_mass - log_total), self.value)


class Lengths(NamedTuple):
    """Real tokens of each sequence, int [batch]: of its prompt, and T, its final number."""

    prompt: Tensor
    final: Tensor


class TokenCounts(NamedTuple):
    """A decode row in the arithmetic of budgets: tokens cached before it, tokens of its prompt, T
    of its sequence."""

    cached: int
    prompt: int
    final: int


def _no_weights(layer: int) -> Tensor:
    raise ValueError("the output projections are not known without the model's weights")


@dataclass(frozen=True)
class Geometry:
    """The shape of a model, as far as methods need it.

    num_layers: attention layers that see every token. A method numbers only these; local and
        recurrent layers are not among them. scale: their softmax scale. value_dim: elements of a
        value; None: head_dim. values_in_keys: a value is the first `value_dim` elements of its key
        and takes no memory (multi-head latent attention). softmaxes: one for each layer; empty: all
        are plain. windows: those of the local layers.
    rotate: rotate(states, positions, inverse=False, layer=0) applies the positions int [batch, n]
        of a layer to keys or queries [batch, heads, n, head_dim], or takes them off (`inverse`);
        the identity without rotary positions. Raises ValueError where the model applies its
        positions in another way.
    output_matrix: output_matrix(layer) makes the output projection W_O by query head, fp32 [heads,
        value_dim, hidden_size]: a value v adds v @ matrix[head] to the layer's output. Made anew in
        each call. Raises ValueError where the model has none that is a matrix alone.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    family: str
    rotate: Callable[..., Tensor] = lambda states, positions, inverse=False, layer=0: states
    output_matrix: Callable[[int], Tensor] = _no_weights
    value_dim: int | None = None
    values_in_keys: bool = False
    softmaxes: tuple[Softmax, ...] = ()
    windows: tuple[Window, ...] = ()

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def elements(self) -> int:
        """Elements of one token in a KV head's cache, key and value."""
        if self.values_in_keys:
            return self.head_dim
        return self.head_dim + (self.value_dim or self.head_dim)

    def every_key(self, positions: Tensor) -> Tensor:
        """The keys of `positions` tokens, in tokens (`elements`), fp64: what true scores read."""
        return (positions * (self.head_dim / self.elements)).double()

    def softmax(self, layer: int) -> Softmax:
        return self.softmaxes[layer] if self.softmaxes else Softmax(self.scale)


# What a hook returns


class ShapeError(ValueError):
    """A hook of a method returned something of another shape than it must. where: `file:line` of
    the hook."""

    def __init__(self, words: str, where: str) -> None:
        super().__init__(words)
        self.where = where


def checked(hook: Any, found: Any, axes: str, *sizes: int | tuple[int, ...] | None) -> Tensor:
    """`found`, the tensor that a `hook`, a bound method, returned. Raises ShapeError for another
    shape, since torch would broadcast it to wrong numbers. No number is read, so no GPU waits.

    axes: their names. sizes: of each axis its size, or those allowed; None: any.
    """
    shape = found.shape if isinstance(found, Tensor) else ()
    fits = len(shape) == len(sizes)
    for length, size in zip(shape, sizes, strict=False):
        fits = fits and (size is None or length in _listed(size))
    if fits:
        return found
    code = hook.__func__.__code__
    returned = [*shape] if isinstance(found, Tensor) else type(found).__name__
    allowed = ", ".join(" or ".join(map(str, _listed(size))) for size in sizes)
    words = f"{hook.__name__} returned {returned}; must be [{axes}] = [{allowed}]"
    raise ShapeError(words, f"{code.co_filename}:{code.co_firstlineno}")


def _listed(size: int | tuple[int, ...] | None) -> tuple[int | str, ...]:
    if isinstance(size, tuple):
        return tuple(dict.fromkeys(size))
    return ("any" if size is None else size,)


def resident_of(state: State, layer: int, key: Tensor) -> Tensor:
    """`State.resident` of a prompt of this `key`, of the right shape."""
    found = state.resident(layer)
    return checked(state.resident, found, "batch, KV heads, tokens", *key.shape[:3])


def rebuilt(state: State, layer: int, slots: Tensor) -> Tensor:
    """The keys that `rebuild` gives, of the right shape."""
    found, sizes = state.rebuild(layer, slots), (*slots.shape, state.geometry.head_dim)
    return checked(state.rebuild, found, "batch, KV heads, n, head_dim", *sizes)


# Helpers of methods


def share_above(count: int, whole: int) -> float:
    """The least share whose floor of `whole` is more than `count`, at most 1."""
    return min(1.0, math.nextafter((count + 1) / whole, 1))


def least_number(is_enough: Callable[[float], bool]) -> float:
    """The least number in (0, 1] that is enough, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def floor_frac(frac: float, count: Tensor) -> Tensor:
    """floor(frac * count) in double precision, equal to Python's `int(frac * count)`."""
    return (count.double() * frac).floor().long()

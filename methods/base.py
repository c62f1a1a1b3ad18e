"""The contract of a KV-cache method: what it is, what it may read, and when it is asked.

A **method** is a frozen dataclass of hyper-parameters. It holds no tensors: what changes while a batch of
sequences runs lives in a **sequence state** that the method makes per batch (`Method.new_state`). The state has
one selection function, `select`, over any number of query rows. Live decoding calls it with one row and fetches
what it names; replay calls it with many rows and masks the rest. Both therefore read the same tokens.

Cached tokens lie in **slots**. In replay a slot is a column of the padded batch; in live decoding it is a row of
the KV store, where a freed slot is used again. `Rows.slot_positions` says which token a slot holds, so a state
needs not know which of the two it serves.

Most methods need not start here: `methods.retrieving` scores tokens or pages and reads the best, `methods.evicting`
gives each token a worth and keeps the best. Half of this page is docstrings: it is what an author of a method reads.

Shapes: batch, heads (query heads), num_kv_heads, group = heads / num_kv_heads, rows, slots, head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from methods.checks import require
from methods.products import product

EMPTY = torch.iinfo(torch.int32).max
"""Position of a slot without a token, and of padding: later than every query, hence never visible."""

Selects = Literal["ahead", "previous", "rehearsed", "query", "scores"]
Calibration = Mapping[str, Tensor]
"""What `Method.calibrate` measured, by name, the layers stacked first: [num_layers, ...]."""


@dataclass(frozen=True)
class Geometry:
    """The part of a model's shape that a method needs; `scale` is the model's softmax scale.

    rotate: applies the model's positions to keys or queries [batch, heads, n, head_dim] at positions int [batch, n], or
    takes them off again (`inverse=True`); the identity in families without rotary positions.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    family: str
    rotate: Callable[..., Tensor] = lambda states, positions, inverse=False: states

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


class Row(NamedTuple):
    """A decode row in the arithmetic of sizes: tokens cached before it, its prompt's tokens, T of its sequence."""

    cached: int
    prompt: int
    final: int


class Lengths(NamedTuple):
    """Real tokens of each sequence, int [batch]: of its prompt, and T, its own final number."""

    prompt: Tensor
    final: Tensor


class Rest(NamedTuple):
    """What stands for the tokens that are not read: output = (1 - share) * attention + share * value.

    share: fp32 [batch, num_kv_heads, group, rows]; value: [batch, num_kv_heads, rows, head_dim].
    """

    share: Tensor
    value: Tensor


class Selection(NamedTuple):
    """What a block of query rows may read besides each row's own token.

    mask: bool [batch, num_kv_heads or 1, rows, slots]; None reads every visible slot. Not asked for in live decoding of
        a method that evicts, which reads all that it keeps.
    num_read: tokens read, mean over the KV heads, fp64, or int where heads read alike, [batch, rows].
    side: what was read of an index to find them, in tokens (2 * head_dim elements), alike; None reads no index.
    bias: added to the scaled scores of cached tokens, such as the log-weights of samples; finite, fp32 [batch,
        num_kv_heads or 1, group or 1, rows, slots].
    rest: what stands for the tokens not read; None for nothing.
    """

    mask: Tensor | None
    num_read: Tensor
    side: Tensor | None = None
    bias: Tensor | None = None
    rest: Rest | None = None


@dataclass
class Rows:
    """A block of query rows of one layer and the slots they look at.

    query: [batch, heads, rows, head_dim], after positions, before the softmax scale: the one that `selects` says.
    positions: int [batch, rows], t = the row's position = its number of cached tokens.
    real: bool [batch, rows], False for padding.
    slot_positions: int [batch, 1 or num_kv_heads, slots], `EMPTY` where there is no token.
    own_slots: int [batch, 1 or num_kv_heads, rows], where each row's own token lies.
    true_scores: makes the scaled scores of the true query over the visible slots and the own one, -inf elsewhere,
        fp32 [batch, num_kv_heads, group, rows, slots]; valid until the block's attention is computed. Not to be
        written to. Only where `selects` is `ahead` or `scores`.
    padded: whether any row is padding, known without asking the device.
    """

    query: Tensor
    positions: Tensor
    real: Tensor
    slot_positions: Tensor
    own_slots: Tensor
    true_scores: Callable[[], Tensor]
    padded: bool = False

    def visible(self) -> Tensor:
        """Cached tokens each row could read (its own is not among them): bool [batch, 1 or kv, rows, slots]."""
        return self.slot_positions.unsqueeze(2) < self.positions[:, None, :, None]


class PromptRows(NamedTuple):
    """The prompt's layout: real bool [batch, prompt] (left padded); num_slots that the batch will ever use."""

    real: Tensor
    num_slots: int

    @property
    def lengths(self) -> Tensor:
        """Real prompt tokens of each sequence, int [batch]."""
        return self.real.sum(-1)

    @property
    def positions(self) -> Tensor:
        """The token of each column, int [batch, prompt], `EMPTY` in the padding."""
        return (self.real.cumsum(-1) - 1).masked_fill(~self.real, EMPTY)


class State:
    """Everything of a method that changes while a batch of sequences runs. Dropped with the batch.

    sequence_tensors: attributes with the batch first, tensors or dicts of them by layer: what `fork` copies, and what
        is counted as kept on the device.
    slot_tensors: attributes kept per slot, dicts by layer of [batch, num_kv_heads, slots, ...], and the value of an
        empty slot; copied as well, and given room.
    spare_slots: slots that they have beyond those of the batch.
    """

    sequence_tensors: ClassVar[tuple[str, ...]] = ()
    slot_tensors: ClassVar[Mapping[str, float]] = {}
    spare_slots: ClassVar[int] = 0

    def __init__(self, method: Any, geometry: Geometry, lengths: Lengths) -> None:
        self.method = method
        self.geometry = geometry
        self.lengths = lengths
        for name in (*self.sequence_tensors, *self.slot_tensors):
            setattr(self, name, {})

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> None:
        """Take in a layer's prompt after its dense pass.

        query: [batch, heads, prompt, head_dim]; key, value: [batch, num_kv_heads, prompt, head_dim], post-position.
        """

    def append(self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice) -> None:
        """Take in decode rows that enter `slots`: exact key and value [batch, num_kv_heads, n, head_dim].

        positions: int [batch, n], `EMPTY` for padding. Called before the `select` of these rows, in replay with later
        rows too, except that a rehearsal selects before its own row is known: `select` looks at visible slots only.
        """

    def select(self, layer: int, rows: Rows) -> Selection:
        """What each of `rows` reads in `layer`; carries the state past these rows. The only selection function."""
        raise NotImplementedError

    def resident(self, layer: int) -> Tensor:
        """Of a method that `holds_keys`: the prompt's tokens that stay on the device.

        Every row reads them beside its selection, which names none of them. Asked once, after `prompt`. Returns bool
        [batch, num_kv_heads, prompt].
        """
        raise NotImplementedError

    def rebuild(self, layer: int, slots: Tensor) -> Tensor:
        """Of a method that `holds_keys`: the keys of prompt tokens as they are read.

        slots: int [batch, num_kv_heads, n]; a negative one may give anything. Returns [batch, num_kv_heads, n,
        head_dim].
        """
        raise NotImplementedError

    def fork(self, index: Tensor, num_slots: int) -> State:
        """A copy for sequences `index` [new_batch] of this batch, with room for `num_slots` slots."""
        child = copy(self)
        child.lengths = Lengths(*(part.index_select(0, index) for part in self.lengths))
        for name in (*self.sequence_tensors, *self.slot_tensors):
            setattr(child, name, _take(getattr(self, name), index))
        for name, empty in self.slot_tensors.items():
            by_layer = getattr(child, name)
            for layer, old in by_layer.items():
                # A spare slot holds nothing, so it becomes one like the new ones.
                new = old.new_full((*old.shape[:2], num_slots + self.spare_slots, *old.shape[3:]), empty)
                new[:, :, : old.shape[2]] = old
                by_layer[layer] = new
        return child


def _take(value: Any, index: Tensor) -> Any:
    if isinstance(value, dict):
        return {key: item.index_select(0, index) for key, item in value.items()}
    return value.index_select(0, index)


@dataclass(frozen=True)
class Method:
    """A KV-cache method's hyper-parameters.

    num_exempt_layers: the first layers, which read the full cache and count as such in every size.

    selects: when live decoding calls `select`, which fetches just what its mask names:
        `ahead`      what is read is all that is kept, known a layer ahead; `select` sees its true scores and may evict
        `previous`   a layer ahead, by the layer's query of the step before
        `rehearsed`  a layer ahead, by a query made from the attention input of the layer before
        `query`      in the layer, by its true query, before any row is fetched
        `scores`     by the true scores of all keys, which therefore cannot lie behind a link
    """

    num_exempt_layers: int = 2

    title: ClassVar[str] = ""
    """What tables and legends call it."""
    reads_all: ClassVar[bool] = False
    """Every cached token is read: there is nothing to select, and no state."""
    holds_keys: ClassVar[bool] = False
    """The state gives keys back, so that the cache holds values only, and these alone cross the link (`State.rebuild`).
    Some of the prompt's tokens, and all that is generated, stay exact on the device (`State.resident`)."""
    needs_prompt: ClassVar[bool] = False
    """Learns from the prompt's rows, so there must be one."""
    calibration_settings: ClassVar[tuple[str, ...]] = ()
    """Fields that `calibrate` heeds."""
    size_setting: ClassVar[str | None] = None
    """The field that is the share of the cache, where one number sizes the method."""

    def __post_init__(self) -> None:
        require(self.num_exempt_layers >= 0, "num_exempt_layers", self.num_exempt_layers, "an integer >= 0")

    @property
    def label(self) -> str:
        """The title, and what of the settings makes it another method."""
        return self.title

    @property
    def selects(self) -> Selects:
        """When `select` is called."""
        return "ahead"

    @property
    def names_rows(self) -> bool:
        """Whether `select` says which rows are fetched, before they are."""
        return self.selects in ("previous", "rehearsed", "query")

    @property
    def needs_calibration(self) -> bool:
        """Whether `calibrate` is wanted."""
        return False

    @property
    def file(self) -> str | None:
        """A file that its settings name, whose contents belong to a run's identity; None where there is none."""
        return None

    @property
    def replay_only(self) -> str | None:
        """Why it can be scored and not decoded live, in words for the user; None where it can."""
        return None

    def calibrate(self, query: Tensor, key: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        """What is measured of a layer on the calibration text, by name; kept on disk for the same method and settings.

        query: [heads, tokens, head_dim], key: [num_kv_heads, tokens, head_dim], post-position, from position 0 on.
        """
        raise NotImplementedError

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> State:
        """A fresh sequence state for a batch; ValueError where the method cannot work at these lengths."""
        raise NotImplementedError

    def tokens_read(self, row: Row, layer: int) -> float | None:
        """Cached tokens that a decode row reads in a non-exempt layer; None where that depends on the data.

        The mean over the layer's KV heads, and over the layers where they share a budget: sizes sum over all of them.
        """
        raise NotImplementedError

    def max_tokens_read(self, row: Row, layer: int) -> int:
        """Upper bound of `tokens_read`, known without looking at the data: the size of a fetch buffer."""
        return row.cached

    def tokens_kept(self, row: Row, layer: int) -> int:
        """Tokens that a KV head holds before this row, at most; fewer than are cached where a method evicts."""
        return row.cached

    def tokens_resident(self, row: Row, layer: int) -> int:
        """Tokens of those that stay exact on the device, where the method `holds_keys`; else none."""
        return 0

    def with_size(self, frac: float) -> Self:
        """This method with the one number in (0, 1] that sizes it set; ValueError where it has none."""
        if self.size_setting is None:
            raise ValueError(f"method {type(self).__name__} has no size to set: it reads the same share always")
        sizes: dict[str, Any] = {self.size_setting: frac}
        return replace(self, **sizes)

    def min_size(self, row: Row) -> float:
        """The least number for `with_size` that a sequence of this prompt and T allows; ValueError where none is."""
        return 2**-24

    def artifact_budget(self) -> float:
        """Share of a sequence that `prefill=artifact` takes as its dense prompt (the artifact's `budget`)."""
        return 1.0 if self.size_setting is None else getattr(self, self.size_setting)


def attention_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Scaled scores of grouped queries in fp32, rounded nowhere else.

    query: [batch, heads, rows, head_dim]; key: [batch, num_kv_heads, slots, head_dim];
    returns [batch, num_kv_heads, group, rows, slots].
    """
    batch, num_kv_heads, slots, head_dim = key.shape
    heads, rows = query.shape[1:3]
    stacked = query.reshape(batch, num_kv_heads, -1, head_dim)
    if stacked.dtype != torch.float32 or key.dtype != torch.float32:
        scores = product(stacked, key.mT, scale)
    elif rows == 1:  # a thin product takes half the time on a CPU with the keys first, where K and V lie side by side
        scores = (key @ (stacked * scale).mT).mT
    else:
        scores = (stacked * scale) @ key.mT
    return scores.reshape(batch, num_kv_heads, heads // num_kv_heads, rows, slots)


def share_above(count: int, whole: int) -> float:
    """The least share whose floor of `whole` is more than `count`, at most 1; rounded up so that it is."""
    return min(1.0, math.nextafter((count + 1) / whole, 1))


def floor_frac(frac: float, count: Tensor) -> Tensor:
    """floor(frac * count) in double precision, as Python's `int(frac * count)` gives it."""
    return (count.double() * frac).floor().long()

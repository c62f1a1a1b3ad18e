"""What a KV-cache method is, and how its selections are asked for.

A **method** is a frozen dataclass of hyper-parameters. It holds no tensors: what changes while a batch of
sequences runs lives in a **sequence state** that the method makes per batch (`Method.new_state`). The state has
one selection function, `select`, over any number of query rows. Live decoding calls it with one row and gathers
what it names; replay calls it with many rows and masks the rest. Both therefore read the same tokens.

Cached tokens lie in **slots**. In replay a slot is a column of the padded batch; in live decoding it is a row of
the KV store, where a freed slot is used again. `Rows.slot_positions` says which token a slot holds, so a state
needs not know which of the two it serves.

Shapes: batch, heads (query heads), num_kv_heads, group = heads / num_kv_heads, rows, slots, head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

EMPTY = torch.iinfo(torch.int32).max
"""`slot_positions` of a slot without a token: later than every query, hence never visible."""


@dataclass(frozen=True)
class Geometry:
    """The part of a model's shape that a method needs; `scale` is the model's softmax scale."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    family: str

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


class Selection(NamedTuple):
    """What a block of query rows may read besides each row's own token.

    mask: bool [batch, num_kv_heads or 1, rows, slots]; None reads every visible slot.
    num_read: tokens read, mean over the KV heads, fp64 [batch, rows].
    """

    mask: Tensor | None
    num_read: Tensor


@dataclass
class Rows:
    """A block of query rows of one layer and the slots they look at.

    query: [batch, heads, rows, head_dim], after positions, before the softmax scale; rehearsed or true.
    positions: int [batch, rows], t = the row's position = its number of cached tokens.
    real: bool [batch, rows], False for padding.
    slot_positions: int [batch, 1 or num_kv_heads, slots], `EMPTY` where there is no token.
    own_slots: int [batch, 1 or num_kv_heads, rows], where each row's own token lies.
    true_scores: makes the scaled scores of the true query over the visible slots and the own one, -inf elsewhere,
        fp32 [batch, num_kv_heads, group, rows, slots]; valid until the block's attention is computed. Not to be
        written to.
    """

    query: Tensor
    positions: Tensor
    real: Tensor
    slot_positions: Tensor
    own_slots: Tensor
    true_scores: Callable[[], Tensor]

    def visible(self) -> Tensor:
        """Cached tokens each row could read (its own is not among them): bool [batch, 1 or kv, rows, slots]."""
        return self.slot_positions.unsqueeze(2) < self.positions[:, None, :, None]


class State:
    """Everything of a method that changes while a batch of sequences runs. Dropped with the batch.

    final_lengths: int [batch], T of each sequence, its own final number of real tokens.
    """

    spare_slots: ClassVar[int] = 0
    """Slots that `slot_data` has beyond those of the batch."""

    def __init__(self, geometry: Geometry, final_lengths: Tensor) -> None:
        self.geometry = geometry
        self.final_lengths = final_lengths

    def prompt(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> None:
        """Take in a layer's prompt after its dense pass.

        query: [batch, heads, prompt, head_dim]; key: [batch, num_kv_heads, prompt, head_dim], both post-position.
        """

    def append(self, layer: int, key: Tensor, slots: slice) -> None:
        """Take in the exact keys [batch, num_kv_heads, n, head_dim] of decode rows that enter `slots`."""

    def select(self, layer: int, rows: Rows) -> Selection:
        """What each of `rows` reads in `layer`; carries the state past these rows. The only selection function."""
        raise NotImplementedError

    def fork(self, index: Tensor, final_lengths: Tensor, num_slots: int) -> State:
        """A copy for sequences `index` [new_batch] of this batch, with final lengths and room of its own.

        Every tensor attribute, and every tensor in a dict, has the batch first.
        """
        child = object.__new__(type(self))
        for name, value in vars(self).items():
            setattr(child, name, _take(value, index))
        child.final_lengths = final_lengths
        child.grow(num_slots)
        return child

    def slot_data(self) -> list[tuple[dict[int, Tensor], float]]:
        """What is kept per slot: (by layer [batch, num_kv_heads, slots, ...], the value of an empty slot)."""
        return []

    def grow(self, num_slots: int) -> None:
        """Make room for slots up to `num_slots`. A spare slot holds nothing, so it becomes one like the new ones."""
        for by_layer, empty in self.slot_data():
            for layer, old in by_layer.items():
                new = old.new_full((*old.shape[:2], num_slots + self.spare_slots, *old.shape[3:]), empty)
                new[:, :, : old.shape[2]] = old
                by_layer[layer] = new


class EvictingState(State):
    """A state whose tokens leave the cache for good, so that live decoding uses their slots again.

    tokens[layer]: int32 [batch, num_kv_heads, slots], the token in each slot, `EMPTY` where there is none; as many
    slots as the prompt was given, and one more at the end, a dump for what is not to be written.
    In live decoding the slot behind all those in use is the own token's, for the length of one step.
    """

    def __init__(self, geometry: Geometry, final_lengths: Tensor) -> None:
        super().__init__(geometry, final_lengths)
        self.tokens: dict[int, Tensor] = {}

    @property
    def capacity(self) -> int:
        """Tokens that are kept at most, over the batch: the slots a live store needs."""
        raise NotImplementedError

    spare_slots = 1

    def slot_data(self) -> list[tuple[dict[int, Tensor], float]]:
        """The tokens."""
        return [*super().slot_data(), (self.tokens, EMPTY)]

    def enter_prompt(self, layer: int, rows: PromptRows, num_kv_heads: int) -> None:
        """Give the prompt's columns their tokens."""
        real = rows.real
        positions = (real.cumsum(-1) - 1).masked_fill(~real, EMPTY).int()
        tokens = positions.new_full((len(real), num_kv_heads, rows.num_slots + 1), EMPTY)
        tokens[:, :, : real.shape[1]] = positions[:, None]
        self.tokens[layer] = tokens

    def enter(self, layer: int, rows: Rows) -> None:
        """Put each row's own token into its slot."""
        tokens = self.tokens[layer]
        own = rows.own_slots.expand(-1, tokens.shape[1], -1)
        tokens.scatter_(-1, own, torch.where(rows.real, rows.positions, EMPTY).int()[:, None].expand_as(own))

    def compact(self, layer: int) -> Tensor:
        """Live, after the prompt: move what is kept to the first `capacity` slots, oldest first.

        Returns the prompt column of each slot, int64 [batch, num_kv_heads, capacity], -1 where there is none.
        """
        tokens = self.tokens[layer][..., :-1]
        kept = tokens.argsort(dim=-1, stable=True)[..., : self.capacity]
        columns = kept.masked_fill(tokens.gather(-1, kept) == EMPTY, -1)
        for by_layer, empty in self.slot_data():
            old = by_layer[layer]
            new = by_layer[layer] = old.new_full((*old.shape[:2], self.capacity + 2, *old.shape[3:]), empty)
            new[:, :, : kept.shape[-1]] = old.gather(2, _like(kept, old))
        return torch.nn.functional.pad(columns, (0, self.capacity - columns.shape[-1]), value=-1)

    def place_own(self, layer: int, own: int) -> Tensor:
        """Live, after a step's selection: move the own token from slot `own`, behind all in use, to the first free one.

        Returns that slot, int64 [batch, num_kv_heads, 1]; -1 where the own token itself was evicted.
        """
        tokens = self.tokens[layer]
        gone = tokens[..., own : own + 1] == EMPTY
        free = torch.nn.functional.pad((tokens[..., :own] != EMPTY).int(), (0, 1)).argmin(-1, keepdim=True)
        target = free.masked_fill(gone, tokens.shape[-1] - 1)  # the dump
        for by_layer, empty in self.slot_data():
            data = by_layer[layer]
            entering = data[:, :, own : own + 1].clone()
            data[:, :, own] = empty
            data.scatter_(2, _like(target, data), entering)
        return free.masked_fill(gone, -1)


def _like(index: Tensor, data: Tensor) -> Tensor:
    """`index` [batch, kv, n] shaped to gather or scatter along the slots of `data` [batch, kv, slots, ...]."""
    return index.view(*index.shape, *([1] * (data.dim() - 3))).expand(*index.shape, *data.shape[3:])


class PromptRows(NamedTuple):
    """The prompt's layout: real bool [batch, prompt] (left padded); num_slots that the batch will ever use."""

    real: Tensor
    num_slots: int

    @property
    def lengths(self) -> Tensor:
        """Real prompt tokens of each sequence, int [batch]."""
        return self.real.sum(-1)


def _take(value: Any, index: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value.index_select(0, index)
    if isinstance(value, dict):
        return {key: _take(item, index) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class Method:
    """A KV-cache method's hyper-parameters.

    num_exempt_layers: the first layers, which read the full cache and count as such in every size.
    """

    num_exempt_layers: int = 2

    rehearses: ClassVar[bool] = False
    """Selects for layer l from the attention input of layer l - 1."""
    needs_calibration: ClassVar[bool] = False
    reads_all: ClassVar[bool] = False
    """Every cached token is read: there is nothing to select."""
    needs_all_keys: ClassVar[bool] = False
    """Selects by true scores of keys that it does not read: they cannot lie behind a link."""

    def __post_init__(self) -> None:
        require(self.num_exempt_layers >= 0, "num_exempt_layers", self.num_exempt_layers, "an integer >= 0")

    @property
    def title(self) -> str:
        """What tables and legends call it."""
        return {"full": "Full cache", "h2o": "H2O", "infinigen": "InfiniGen"}.get(self.name, type(self).__name__)

    @property
    def label(self) -> str:
        """The title, and what of the settings makes it another method."""
        return self.title if getattr(self, "skew", True) else f"{self.title} without skewing"

    @property
    def selects(self) -> str:
        """When live decoding calls `select`."""
        return "scores" if self.needs_all_keys else "rehearsed" if self.rehearses else "ahead"

    @property
    def needs_prompt(self) -> bool:
        """Learns from the prompt's rows, so there must be one."""
        return self.rehearses

    @property
    def replay_only(self) -> str | None:
        """Why it can be scored and not decoded live, in words for the user; None where it can."""
        artifact = getattr(self, "eviction", None) == "artifact"
        said = "method.eviction=artifact: frees nothing, so it can only be scored (replay), not decoded live"
        return said if artifact else None

    @property
    def name(self) -> str:
        """What `method=` calls it."""
        return type(self).__name__.lower()

    def new_state(self, geometry: Geometry, final_lengths: Tensor, calibration: Any = None) -> State:
        """A fresh sequence state for a batch whose sequences end with `final_lengths` [batch] tokens."""
        raise NotImplementedError

    def tokens_read(self, cached: int, final_length: int) -> float | None:
        """Cached tokens a decode row reads in a non-exempt layer; None where that depends on the data."""
        raise NotImplementedError

    def max_tokens_read(self, cached: int, final_length: int) -> int:
        """Upper bound of `tokens_read`, known without looking at the data: the size of a fetch buffer."""
        return cached

    def with_size(self, frac: float) -> Method:
        """This method with the one number in (0, 1] that sizes it set; ValueError where it has none."""
        raise ValueError(f"method {type(self).__name__} has no size to set: it reads the same share always")

    def min_size(self, final_length: int) -> float:
        """The least number for `with_size` that sequences of this length allow; ValueError where none is."""
        return 2**-24

    def artifact_budget(self) -> float:
        """Share of a sequence that `prefill=artifact` takes as its dense prompt (the artifact's `budget`)."""
        raise NotImplementedError


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise ValueError naming the setting, its value and what is allowed, unless `condition`."""
    if not condition:
        raise ValueError(f"method.{field}={value}: must be {allowed}")


def require_fraction(field: str, value: float, *, zero: bool = False) -> None:
    """Raise ValueError unless 0 < value <= 1 (0 too where `zero`)."""
    low = "[0, 1]" if zero else "(0, 1]"
    require(math.isfinite(value) and (0 <= value <= 1 if zero else 0 < value <= 1), field, value, f"in {low}")


def attention_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Scaled scores of grouped queries in fp32.

    query: [batch, heads, rows, head_dim]; key: [batch, num_kv_heads, slots, head_dim];
    returns [batch, num_kv_heads, group, rows, slots].
    """
    batch, num_kv_heads, slots, head_dim = key.shape
    rows = query.shape[2]
    stacked = (query * scale).reshape(batch, num_kv_heads, -1, head_dim)
    # A thin product takes half the time on a CPU with the keys first, where slots hold K and V side by side.
    keys_first = rows == 1
    scores = (key @ stacked.mT).mT if keys_first else stacked @ key.mT
    return scores.reshape(batch, num_kv_heads, -1, rows, slots).float()


def floor_frac(frac: float, count: Tensor) -> Tensor:
    """floor(frac * count) in double precision, as Python's `int(frac * count)` gives it."""
    return (count.double() * frac).floor().long()

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
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from methods.checks import require

EMPTY = torch.iinfo(torch.int32).max
"""Position of a slot without a token, and of padding: later than every query, hence never visible."""

When = Literal["kept", "earlier_layer", "previous_step", "previous_layer", "own_query", "true_scores"]
"""When live decoding knows which rows a layer reads, earliest first; one word from the YAML to the fetch:

`kept`            always: the layer reads all that it keeps. `select` sees the true scores and may evict
`earlier_layer`   since an earlier layer of the same step selected; `select` looks at no query
`previous_step`   one layer ahead, by the layer's query of the previous step
`previous_layer`  one layer ahead, by a query rehearsed from the attention input of the previous layer
`own_query`       in the layer itself, by its own query; the rows cross the link while the layer waits
`true_scores`     in the layer itself, by the true scores of all keys, which therefore cannot lie behind a link
"""
NAMES_ROWS: frozenset[When] = frozenset(("earlier_layer", "previous_step", "previous_layer", "own_query"))
"""Here `select` runs before the fetch and names the rows that are fetched."""

Calibration = Mapping[str, Tensor]
"""What `Method.calibrate` measured, by name, the layers stacked first: [num_layers, ...]."""


class Softmax(NamedTuple):
    """How a layer turns products of queries and keys into attention weights.

    scale: factor of the products. softcap: scores become softcap * tanh(score / softcap) (Gemma 2). sinks: fp32
    [heads], one more score a query head, whose weight goes to no token (gpt-oss).
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused attention computes it."""
        return self.softcap is None and self.sinks is None

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Scaled and capped scores in fp32; shapes as in `attention_scores`."""
        return self.capped(attention_scores(query, key, self.scale))

    def capped(self, scores: Tensor) -> Tensor:
        """Scaled scores below the softcap. Overwrites them."""
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def weights(self, scores: Tensor) -> Tensor:
        """Attention weights from scores [batch, num_kv_heads, group, rows, slots]. Overwrites the scores."""
        if self.sinks is None:
            return torch.softmax(scores, -1, out=scores)
        sinks = self.sinks.view(*scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


class Window(NamedTuple):
    """The tokens that a local layer sees: the last `size`, the row's own included; or, if `is_chunk`, those of the
    row's own chunk of `size` positions. weight: bytes of a token in this layer / bytes in a layer under the method."""

    size: int
    is_chunk: bool = False
    weight: float = 1.0

    def first_visible(self, positions: Tensor) -> Tensor:
        """The first position that each row sees, int like `positions`."""
        if self.is_chunk:
            return positions - positions % self.size
        return (positions - (self.size - 1)).clamp(min=0)

    def num_cached(self, cached: Tensor) -> Tensor:
        """Of `cached` tokens, how many a row sees beside its own."""
        return cached % self.size if self.is_chunk else cached.clamp(max=self.size - 1)


@dataclass(frozen=True)
class Geometry:
    """What a method needs to know of a model's shape.

    num_layers: attention layers that see every token, which is how a method counts layers: local and recurrent layers
        are not among them. scale: the softmax scale, the same in all of them. value_dim: elements of a value; None: as
        many as of a key. values_in_keys: a value is the first `value_dim` elements of its key, and takes no memory of
        its own (multi-head latent attention). softmaxes: one for each layer; none: all are plain. windows: those of the
        local layers.
    rotate: applies the positions of layer `layer` to keys or queries [batch, heads, n, head_dim] at positions int
        [batch, n], or takes them off again (`inverse=True`); the identity where it has no rotary positions. Raises
        ValueError where the model applies its positions in another way.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    family: str
    rotate: Callable[..., Tensor] = lambda states, positions, inverse=False, layer=0: states
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
        """Elements that a token takes in a KV head's cache, key and value."""
        return self.head_dim if self.values_in_keys else self.head_dim + (self.value_dim or self.head_dim)

    def softmax(self, layer: int) -> Softmax:
        """The softmax of a layer."""
        return self.softmaxes[layer] if self.softmaxes else Softmax(self.scale)


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
    side: what was read of an index to find them, in tokens (`Geometry.elements`), alike; None reads no index.
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

    query: [batch, heads, rows, head_dim], after positions, before the softmax scale: the one that `when` says. Of no
        meaning where the layer's `when` is `earlier_layer`.
    positions: int [batch, rows], t = the row's position = its number of cached tokens.
    real: bool [batch, rows], False for padding.
    slot_positions: int [batch, 1 or num_kv_heads, slots], `EMPTY` where there is no token.
    own_slots: int [batch, 1 or num_kv_heads, rows], where each row's own token lies.
    true_scores: makes the scaled scores of the true query over the visible slots and the own one, -inf elsewhere,
        fp32 [batch, num_kv_heads, group, rows, slots]; valid until the block's attention is computed. Not to be
        written to. Only where `when` is `kept` or `true_scores`.
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

    def hide(self, scores: Tensor) -> None:
        """Set `scores` [batch, num_kv_heads, group, rows, slots] to -inf where a slot is not visible, in place."""
        first = 0
        if scores.device.type == "cpu":  # the first slots, which all rows see, are most of them in replay
            hidden = (self.slot_positions >= self.positions.min()).flatten(0, 1).any(0)
            first = int(hidden.int().argmax())
        scores[..., first:].masked_fill_(~self.visible()[..., first:].unsqueeze(2), float("-inf"))


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
    handed_on: attributes that an earlier layer's `select` leaves to later ones, tensors or dicts of them. A model over
        several devices has a state on each, with its layers' tensors; these attributes follow from device to device.
    """

    sequence_tensors: ClassVar[tuple[str, ...]] = ()
    slot_tensors: ClassVar[Mapping[str, float]] = {}
    spare_slots: ClassVar[int] = 0
    handed_on: ClassVar[tuple[str, ...]] = ()

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
        """What each of `rows` reads in `layer`; carries the state past these rows. The only selection function.

        Live decoding calls it once for each step and layer, in the order of the layers, except that a layer which
        selects ahead (`previous_step`, `previous_layer`) may come before the layer in front of it. Replay calls it with
        many rows at once: a layer gets one block of rows after another, in the order of the rows, and only then the
        next layer begins. So a selection may depend on earlier rows of its own layer. Only an `earlier_layer` may
        depend on other layers: it reads what a layer before it chose for the same rows, which the method keeps by row
        (`rows.own_slots`, one slot for each row, padding included). The size of a block changes nothing.
        """
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

    def take_over(self, earlier: State) -> None:
        """Take what the layers of another device, whose state is `earlier`, have handed on."""
        device = self.lengths.final.device
        for name in self.handed_on:
            value = getattr(earlier, name)
            by_key = isinstance(value, dict)
            setattr(self, name, {key: item.to(device) for key, item in value.items()} if by_key else value.to(device))

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

    when: when live decoding knows which rows a layer reads (`When`); `when_of` says it of each layer.
    """

    num_exempt_layers: int = 2
    when: ClassVar[When] = "kept"

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
    """Fields that `calibrate` depends on."""
    size_setting: ClassVar[str | None] = None
    """The field that is the share of the cache, where one number sizes the method."""

    def __post_init__(self) -> None:
        require(self.num_exempt_layers >= 0, "num_exempt_layers", self.num_exempt_layers, "an integer >= 0")

    @property
    def label(self) -> str:
        """The title, and what of the settings makes it another method."""
        return self.title

    def when_of(self, layer: int) -> When:
        """When it is known which rows `layer`, which is not exempt, reads."""
        return self.when

    @property
    def names_rows(self) -> bool:
        """True if `select` runs before the fetch and names the rows that are fetched."""
        return self.when in NAMES_ROWS

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

    def calibrate_layer(
        self, query: Tensor, key: Tensor, geometry: Geometry, earlier: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """`calibrate` for a method that compares layers. earlier: what this function returned for the layers before, so
        that `len(earlier)` is the layer's number."""
        return self.calibrate(query, key, geometry)

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


MANY_ROWS = 64
"""Rows of a matrix that all threads of a CPU share; fewer, as of a live step, are not worth a call of their own."""


def by_matrix(left: Tensor, right: Tensor) -> Tensor:
    """`left` [..., rows, n] @ `right` [..., n, columns], one matrix after another where a CPU multiplies many rows.

    All threads then share each matrix. A batched product gives every thread whole matrices: of 3 KV heads on 2 threads
    the last keeps one thread waiting.
    """
    rows, columns = left.shape[-2], right.shape[-1]
    if left.device.type != "cpu" or rows < MANY_ROWS:
        return left @ right
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    lefts, rights = (part.expand(*batch, *part.shape[-2:]).flatten(0, -3) for part in (left, right))
    out = left.new_empty(*batch, rows, columns)
    for one, other, into in zip(lefts, rights, out.flatten(0, -3), strict=True):
        torch.mm(one, other, out=into)
    return out


def mask_bias(visible: Tensor) -> Tensor:
    """0 where `visible`, -inf elsewhere, fp32. A CPU makes and adds it in vectors. `masked_fill` and `where` branch at
    every number, which takes six times as long where the mask has no order."""
    return visible.float().reciprocal_().neg_().add_(1)  # 1 - 1/1 = 0; 1 - 1/0 = -inf


def hide(scores: Tensor, visible: Tensor) -> None:
    """Set `scores`, which are finite or -inf, to -inf where not `visible` (bool, broadcast), in place."""
    if scores.device.type == "cpu":
        scores += mask_bias(visible)
    else:
        scores.masked_fill_(~visible, float("-inf"))


def product(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """`left` [..., rows, n] times `right` [..., n, columns] times `scale`: fp32 [..., rows, columns].

    The sum of half precision factors is not rounded to half precision again: in bf16 a score of 60 would be rounded to
    a quarter, and other tokens would score best. CUDA multiplies half precision factors as they are; on a CPU they are
    converted first.
    """
    if left.dtype == right.dtype == torch.float32:
        return by_matrix(left, right if scale == 1 else right * scale)
    if left.device.type != "cuda" or left.dtype != right.dtype:
        return left.float() @ right.float() * scale
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left, right = (part.expand(*batch, *part.shape[-2:]).flatten(0, -3) for part in (left, right))
    found = torch.bmm(left, right, out_dtype=torch.float32).unflatten(0, batch)
    return found if scale == 1 else found.mul_(scale)


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
        scores = by_matrix(stacked * scale, key.mT)
    return scores.reshape(batch, num_kv_heads, heads // num_kv_heads, rows, slots)


def calibration_on(calibration: Calibration | None, device: torch.device) -> Calibration | None:
    """A calibration on a device."""
    return None if calibration is None else {name: tensor.to(device) for name, tensor in calibration.items()}


def share_above(count: int, whole: int) -> float:
    """The least share whose floor of `whole` is more than `count`, at most 1; rounded up so that it is."""
    return min(1.0, math.nextafter((count + 1) / whole, 1))


def floor_frac(frac: float, count: Tensor) -> Tensor:
    """floor(frac * count) in double precision, as Python's `int(frac * count)` gives it."""
    return (count.double() * frac).floor().long()

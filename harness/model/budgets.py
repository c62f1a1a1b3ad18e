"""What a method reads and keeps, once for replay, live decoding and the cost model; and how a
method is set to a budget.

The shares are defined in docs/design.md, "Budgets". A floating-point element counts 16 bits, an
element under a codec its bits, an integer of a method's own its width. A local layer (sliding
window, chunk) holds and reads min(t, window - 1) of t cached tokens on the device, whatever the
method: it counts in `window_frac` alone.

Methods are compared at equal budget, not at equal settings: `with_budget_as_stored` finds the
setting that gives a budget.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from harness.errors import UserError
from harness.settings.schema import is_unmet
from methods.base import NAMES_ROWS, Geometry, Method, State, TokenCounts
from methods.codecs.split import AnyCodec, CacheCodec, codec_at, of_keys_alone, without_keys

log = logging.getLogger(__name__)

TOLERANCE = 0.01
FLOAT_BYTES = 2
"""Of a floating-point element in every share, whatever the machine computes in."""


def window_share(cached: Tensor, geometry: Geometry) -> Tensor:
    """Bytes that local layers hold / bytes that all layers hold, per row: fp64, shaped like
    `cached`.

    cached: tokens t of each row, at least 1.
    """
    of_all = geometry.num_layers * cached.double()
    in_windows = torch.zeros_like(of_all)
    for window in geometry.windows:
        in_windows += window.weight * window.num_cached(cached)
    return in_windows / (of_all + in_windows)


def codec_of_cache(
    codec: CacheCodec | None, method: Method, geometry: Geometry
) -> CacheCodec | None:
    """The codec of what the cache holds: of values alone where the method keeps the keys, of keys
    alone where they hold the values."""
    if method.keeps_keys:
        return without_keys(codec)
    if codec is not None and geometry.values_in_keys:
        return of_keys_alone(codec)
    return codec


def code_width(codec: AnyCodec | None, geometry: Geometry) -> float:
    """Bits of a stored element / 16, mean over a token's key and value, the groups' scales
    included."""
    if codec is None:
        return 1.0
    of_key = codec.keys.bits_per_element(geometry.head_dim) * geometry.head_dim
    if geometry.values_in_keys:
        return of_key / geometry.elements / 16
    value_dim = geometry.value_dim or geometry.head_dim
    return (of_key + codec.values.bits_per_element(value_dim) * value_dim) / geometry.elements / 16


def code_widths(codec: CacheCodec | None, geometry: Geometry) -> list[float]:
    """`code_width` of each layer under a method, as methods count, were none dense."""
    if codec is None:
        return [1.0] * geometry.num_layers
    layers = range(geometry.num_layers)
    return [code_width(codec_at(codec, layer), geometry) for layer in layers]


def share_of_cache(cached: Tensor, stored: Tensor, dense_layers: int, num_layers: int) -> Tensor:
    """Elements read / elements of the full cache, per row, in the layers that see every token.

    cached: tokens t of each row; stored: tokens read, each times its layer's `code_width`, summed
    over the layers under the method (mean over KV heads), of the same shape.
    """
    return (dense_layers * cached.double() + stored) / (num_layers * cached.double())


def resident_share(
    state: State | None,
    codec: CacheCodec | None,
    final: Tensor,
    dense_layers: int,
    geometry: Geometry,
    rooms: Sequence[int] | None = None,
) -> Tensor:
    """Share of the full cache at T that a method and its codec hold resident of each sequence,
    fp64 [batch].

    state: the method's; None: it reads all, and its codec may leave the last tokens exact. final:
    int [batch], T. rooms: of each sequence the fetched rows that a KV head keeps in each layer that
    names its rows; None: none stay. A state's tensors of a sequence count as they are, in a batch
    as long as the longest sequence needs them; those of slots count as many slots as tokens are
    kept, of however many there is room for. A method that selects by the true scores needs every
    token there.
    """
    final = final.cpu()
    if state is not None and state.method.when == "true_scores":
        return torch.ones(len(final), dtype=torch.float64)
    token = geometry.num_kv_heads * geometry.elements * FLOAT_BYTES
    layers = range(dense_layers, geometry.num_layers)
    kept = torch.zeros(len(final), dtype=torch.float64)
    if state is None:
        if codec is not None:
            for layer in layers:
                exact = final - codec_at(codec, layer).stored(final)
                kept += token * exact.double()
        return kept / (token * geometry.num_layers * final.double())
    method = state.method
    kept += _bytes_of_state(state)
    if method.keeps_keys:
        resident = []
        for row in _last_rows(state):
            resident.append(sum(method.tokens_resident(row, layer) for layer in layers))
        kept += token * torch.tensor(resident, dtype=torch.float64)
    if rooms is not None:
        widths = code_widths(codec, geometry)
        naming = sum(widths[layer] for layer in layers if method.when_of(layer) in NAMES_ROWS)
        in_rooms = torch.tensor(rooms, dtype=torch.float64)
        kept += token * naming * in_rooms
    return kept / (token * geometry.num_layers * final.double())


def _bytes_of_state(state: State) -> Tensor:
    """Bytes that a state keeps of each sequence, fp64 [batch]."""
    rows = _last_rows(state)
    total = torch.zeros(len(rows), dtype=torch.float64)
    for name in state.sequence_tensors:
        value = getattr(state, name)
        tensors = value.values() if isinstance(value, Mapping) else (value,)
        total += sum(_bytes(tensor[0]) for tensor in tensors)
    for name in state.slot_tensors:
        for layer, tensor in getattr(state, name).items():
            tokens = [state.method.tokens_kept(row, layer) for row in rows]
            total += _bytes(tensor[0, :, 0]) * torch.tensor(tokens, dtype=torch.float64)
    return total


def _last_rows(state: State) -> list[TokenCounts]:
    """Of each sequence the row at T."""
    prompts, finals = state.lengths.prompt.tolist(), state.lengths.final.tolist()
    rows = []
    for prompt, final in zip(prompts, finals, strict=True):
        rows.append(TokenCounts(cached=final, prompt=prompt, final=final))
    return rows


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * (FLOAT_BYTES if tensor.is_floating_point() else tensor.itemsize)


SHARES = ("budget", "budget_artifact", "device_frac", "resident_frac")
"""Properties of `ReadStats` beside every score of accuracy."""
OF_SOME_METHODS = ("tokens_evicted", "link_frac", "hit_frac")
"""Further ones, of a method that evicts, and with a GPU cache; None elsewhere."""
OF_SOME_MODELS = ("window_frac", "recurrent_bytes", "latent_bytes")
"""Further ones, where the model has such layers; 0 elsewhere."""
CONSTANTS = ("code_bits", "recurrent_bytes", "latent_bytes")
"""Fields of `ReadStats` that are no sums."""


@dataclass(frozen=True)
class ReadStats:
    """Sums over decode rows; add two to merge them.

    rows: decode rows, counted once per sequence. fired_rows: rows on which the method's selection
    (or quantized read) ran in every layer under the method. *_sum: of the properties below; None
    where it was not measured. pairs_read, pairs: (query, key) pairs, own token and prompt rows
    included, mean over the layers under the method. rows_loaded: with a GPU cache, rows of a KV
    head that crossed the link, by layer, as methods count.
    Of the session, no sums: code_bits: of a stored element, without the groups' scales; 0 where
    nothing ran. recurrent_bytes: of a sequence's states in recurrent layers. latent_bytes: of a
    token in all layers that store latents. Both are 0 where the model has none.
    """

    rows: float = 0.0
    fired_rows: float = 0.0
    frac_sum: float = 0.0
    index_sum: float = 0.0
    resident_sum: float = 0.0
    window_sum: float = 0.0
    pairs_read: float = 0.0
    pairs: float = 0.0
    recall_sum: float | None = None
    evicted_sum: float | None = None
    link_sum: float | None = None
    hit_sum: float | None = None
    rows_loaded: Counter[int] = field(default_factory=Counter)
    code_bits: float = 0.0
    recurrent_bytes: float = 0.0
    latent_bytes: float = 0.0

    def __add__(self, other: ReadStats) -> ReadStats:
        sums: dict[str, Any] = {}
        for attribute in fields(self):
            ours, theirs = getattr(self, attribute.name), getattr(other, attribute.name)
            if attribute.name in CONSTANTS:
                sums[attribute.name] = max(ours, theirs)
            elif ours is None or theirs is None:  # one of them has not measured it
                sums[attribute.name] = theirs if ours is None else ours
            else:
                sums[attribute.name] = ours + theirs
        return ReadStats(**sums)

    @property
    def shares(self) -> dict[str, float]:
        """`SHARES`, and of the others those that this run has."""
        found = {name: getattr(self, name) for name in (*SHARES, *OF_SOME_METHODS)}
        found |= {name: getattr(self, name) or None for name in OF_SOME_MODELS}
        return {name: share for name, share in found.items() if share is not None}

    def _mean(self, total: float) -> float:
        return total / self.rows if self.rows else 0.0

    @property
    def budget(self) -> float:
        """Share of the full cache that is read; 1 without rows: then only the full cache ran."""
        return self._mean(self.frac_sum) if self.rows else 1.0

    @property
    def device_frac(self) -> float:
        """Share that is read in device memory: rows and index."""
        return self.budget + self._mean(self.index_sum)

    @property
    def resident_frac(self) -> float:
        """Share that is resident on the device for the method, of the full cache at T."""
        return self._mean(self.resident_sum)

    @property
    def tokens_evicted(self) -> float | None:
        """Cached tokens that a KV head no longer holds at a decode row."""
        return None if self.evicted_sum is None else self._mean(self.evicted_sum)

    @property
    def link_frac(self) -> float | None:
        """Share of the full cache that crosses the link, with what is fetched in vain. Without a
        GPU cache it is what is read behind the link."""
        return None if self.link_sum is None else self._mean(self.link_sum)

    @property
    def hit_frac(self) -> float | None:
        """Share of the selected rows that were on the device when their layer selected them."""
        return None if self.hit_sum is None else self._mean(self.hit_sum)

    @property
    def window_frac(self) -> float:
        """Share of the whole cache that local layers hold."""
        return self._mean(self.window_sum)

    @property
    def budget_artifact(self) -> float:
        """The artifact's relative KV cache size."""
        density = min(1.0, self.pairs_read / self.pairs)
        return (1 - math.sqrt(1 - density)) * (self.code_bits or 16) / 16

    @property
    def attention_recall(self) -> float | None:
        """Share of the attention on what was read and the current token."""
        return None if self.recall_sum is None else self.recall_sum / self.rows

    def check_fired(self) -> None:
        """Raise UserError unless the method ran on every decode row (else the score is the full
        cache's), and where a method's `num_read` or `side` is no number."""
        if not math.isfinite(self.frac_sum + self.index_sum):
            raise UserError(
                "the method's select gave a num_read or side that is NaN or infinite; "
                "allowed: tokens >= 0"
            )
        if self.rows == 0 or self.fired_rows < self.rows:
            raise UserError(
                f"the method ran on {self.fired_rows:g} of {self.rows:g} decode rows: "
                "nothing was measured; check prefill, prefill_len and method.dense_layers"
            )


def expected_budget(
    method: Method,
    rows: Mapping[TokenCounts, int],
    num_layers: int,
    widths: Sequence[float] | None = None,
) -> float:
    """The budget that `method` will report over `rows`, from its closed form; rows without cached
    tokens count nothing.

    rows: how many requests each row occurs in. widths: `code_width` of each layer; None: all 1.
    Raises ValueError where the method's reads depend on the data.
    """
    dense_layers = min(method.dense_layers, num_layers)
    total = weight = 0.0
    for row, multiplicity in rows.items():
        if not row.cached:
            continue
        read = 0.0
        for layer in range(dense_layers, num_layers):
            of_layer = method.tokens_read(row, layer)
            if of_layer is None:
                raise ValueError("the budget of this method depends on the data")
            read += of_layer if widths is None else widths[layer] * of_layer
        whole = num_layers * row.cached
        total += multiplicity * (dense_layers * row.cached + read) / whole
        weight += multiplicity
    return total / weight


def with_budget_as_stored(
    method: Method,
    codec: CacheCodec | None,
    geometry: Geometry,
    rows: Sequence[TokenCounts],
    target: float,
    *,
    nearest: bool,
    preset: str | None = None,
    warns: bool = True,
) -> Method:
    """`method` with the setting whose reported budget over `rows`, as `codec` stores them, is
    nearest to `target`.

    Bisection over the one number that sets it; the reported budget grows with that number in steps.
    nearest: take it however far it is, with a warning beyond a tenth of the target. preset: by
    which the user chose the method; messages name it, or else the method's title. warns:
    False where the caller says that a budget is not met. Raises UserError where, otherwise, nothing
    lands within `TOLERANCE`, and where the method has no budget to set, or allows none at these
    lengths.
    """
    called = f"method {method.title}" if preset is None else f"method={preset}"
    counted, num_layers = Counter(rows), geometry.num_layers
    widths = code_widths(codec_of_cache(codec, method, geometry), geometry)

    def size_of(number: float) -> float:
        return expected_budget(method.with_budget(number), counted, num_layers, widths)

    try:
        least = max(method.min_budget(row) for row in counted)
        low, high = least, 1.0
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if size_of(middle) < target else (low, middle)
    except ValueError as error:
        refusal = f"budget={target:g}: {called} cannot have it: {error}"
        raise UserError(refusal) from error
    best = min((low, high), key=lambda number: abs(size_of(number) - target))
    taken = size_of(best)
    if abs(taken - target) > TOLERANCE and not nearest:
        allowed = f"{size_of(least):.3f} to {size_of(1.0):.3g}"
        raise UserError(
            f"budget={target}: the nearest budget of {called} is {taken:.3f}; "
            f"allowed here: {allowed} (method.dense_layers={method.dense_layers} of "
            f"{num_layers} layers read the full cache); fewer dense layers or a prompt of another "
            f"length may allow it, budget=nearest:{target} takes the nearest"
        )
    if warns and is_unmet(target, taken):
        warn_once(f"{called}: asked for budget {target:g}, the nearest budget here is {taken:.3f}")
    return method.with_budget(best)


@cache
def warn_once(message: str) -> None:
    """Log a warning, the first time that it is given."""
    log.warning(message)

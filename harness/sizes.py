"""What a method's size is, once, for replay, live decoding and the cost model; and how a method is set to a size.

Shares of the full cache, means over decode rows. A floating-point element counts 16 bits, one under a codec its bits,
an integer of a method's own its width:
size        what a row read of the cache over all layers, the exempt ones included / the full cache at that row. Its
               own token is not counted. Under offloading this is what crosses the link, but for local layers
device_frac    what attention and the method read in device memory: size, and what was read of an index to choose
               (partial keys, page bounds) or of rows that stay on the device, in the same unit
resident_frac  what the method's state, the codec and the local layers keep on the device / the full cache at T
window_frac    what local layers read of it, whatever the method. It is a part of size, and bounds it from below

A local layer (sliding window, chunk) holds and reads the tokens that it sees, of t cached ones min(t, window - 1). They
count in what is read and in the full cache, so that reading everything is 1. With G layers that see every token and the
local layers l: size = (tokens read in the G layers + sum_l min(t, w_l - 1)) / (G t + sum_l min(t, w_l - 1)).
Recurrent layers hold no tokens; their states are told in bytes.

`size_artifact` is the x axis of the paper's Fig 11: 1 - sqrt(1 - density), density = (query, key) pairs read over
all causal pairs, prompt rows dense, mean over the non-exempt layers; times bits / 16.

Methods are compared at equal size, not at equal settings: `sized` finds the settings that land on a given one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.errors import UserError
from methods.base import Geometry, Method, Row, State, Window
from methods.codec import AnyCodec

TOLERANCE = 0.01
FLOAT_BYTES = 2
"""Of a floating-point element in every share, whatever the machine computes in."""


def in_windows(cached: Tensor, windows: Sequence[Window]) -> Tensor:
    """Tokens that local layers hold of so many cached ones, in tokens of a layer that sees all: fp64, like `cached`."""
    held = [window.weight * window.num_cached(cached).double() for window in windows]
    return torch.stack(held).sum(0) if held else torch.zeros_like(cached, dtype=torch.float64)


def code_width(codec: AnyCodec | None, geometry: Geometry) -> float:
    """Bits of a stored element / 16, mean over a token's key and value, the groups' scales included."""
    if codec is None:
        return 1.0
    of_key = codec.keys.bits_per_element(geometry.head_dim) * geometry.head_dim
    if geometry.values_in_keys:
        return of_key / geometry.elements / 16
    value_dim = geometry.value_dim or geometry.head_dim
    return (of_key + codec.values.bits_per_element(value_dim) * value_dim) / geometry.elements / 16


def share_of_cache(
    cached: Tensor,
    read: Tensor,
    width: float,
    num_exempt: int,
    num_layers: int,
    windows: Sequence[Window] = (),
) -> Tensor:
    """Elements read / elements of the full cache, per row.

    cached: tokens t of each row; read: tokens read, summed over the non-exempt layers (mean over KV heads), both of
    one shape; width: bits of a stored element / 16; windows: those of the local layers.
    """
    local = in_windows(cached, windows)
    return (num_exempt * cached.double() + width * read + local) / (num_layers * cached.double() + local)


def share_beside(cached: Tensor, read: Tensor, num_layers: int, windows: Sequence[Window] = ()) -> Tensor:
    """Elements read of something else than the cache / elements of the full cache, per row. read: in tokens."""
    return read.double() / (num_layers * cached.double() + in_windows(cached, windows))


def resident_share(
    states: Sequence[State], codec: AnyCodec | None, final: Tensor, num_exempt: int, geometry: Geometry
) -> Tensor:
    """What a method, its codec and the local layers keep on the device of each sequence / the full cache at T, fp64
    [batch].

    states: the method's, one on each device; none: it reads all, and its codec may leave the last tokens exact.
    final: int [batch], T.
    """
    final = final.cpu()
    token = geometry.num_kv_heads * geometry.elements * FLOAT_BYTES
    local = in_windows(final, geometry.windows)
    kept = token * local
    if not states:
        exact = final - codec.stored(final) if codec else torch.zeros_like(final)
        kept += token * (geometry.num_layers - num_exempt) * exact.double()
    for state in states:
        kept += _bytes_of_state(state)
    if states:
        method, layers = states[0].method, range(num_exempt, geometry.num_layers)
        rows = _last_rows(states[0])
        kept += token * torch.tensor(
            [sum(method.tokens_resident(row, layer) for layer in layers) for row in rows], dtype=torch.float64
        )
    return kept / (token * (geometry.num_layers * final.double() + local))


def _last_rows(state: State) -> list[Row]:
    """Of each sequence the row at T."""
    prompts, finals = (part.tolist() for part in state.lengths)
    return [Row(cached=final, prompt=prompt, final=final) for prompt, final in zip(prompts, finals, strict=True)]


def _bytes_of_state(state: State) -> Tensor:
    """Bytes that a state keeps for each sequence at its end, fp64 [batch].

    Tensors of a sequence count as they are, in a batch as long as the longest sequence needs them; those of slots count
    as many slots as tokens are kept, of however many there is room for.
    """
    rows = _last_rows(state)
    kept = torch.zeros(len(rows), dtype=torch.float64)
    for name in state.sequence_tensors:
        value = getattr(state, name)
        kept += sum(_bytes(tensor[0]) for tensor in (value.values() if isinstance(value, Mapping) else (value,)))
    for name in state.slot_tensors:
        for layer, tensor in getattr(state, name).items():
            tokens = [state.method.tokens_kept(row, layer) for row in rows]
            kept += _bytes(tensor[0, :, 0]) * torch.tensor(tokens, dtype=torch.float64)
    return kept


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * (FLOAT_BYTES if tensor.is_floating_point() else tensor.itemsize)


SHARES = ("size", "size_artifact", "device_frac", "resident_frac")
"""Properties of `ReadStats` that every score of accuracy has beside it."""
OF_SOME_MODELS = ("window_frac", "recurrent_bytes", "latent_bytes")
"""Those that it has where the model has such layers."""


@dataclass(frozen=True)
class ReadStats:
    """Sums over decode rows; add two to merge them.

    rows: decode rows, each counted once per sequence it belongs to. fired_rows: those on which the method's selection
    (or quantized read) ran in every non-exempt layer. frac_sum, index_sum, resident_sum, window_sum: sums over rows of
    the shares of the cache that were read, read in device memory on top (an index), kept there, and read in local
    layers. pairs_read, pairs: (query, key) pairs, own token included, mean over the non-exempt layers; prompt rows too.
    code_bits: bits of one stored element, groups' scales not counted. recall_sum: sum over rows of attention_recall.
    recurrent_bytes: of a sequence's states in recurrent layers, whatever its length. latent_bytes: that a token takes
    in all layers, where latents are stored in place of keys and values. Both as the model computes them, and 0 where it
    has none.
    """

    rows: float = 0.0
    fired_rows: float = 0.0
    frac_sum: float = 0.0
    index_sum: float = 0.0
    resident_sum: float = 0.0
    window_sum: float = 0.0
    pairs_read: float = 0.0
    pairs: float = 0.0
    code_bits: float = 16
    recall_sum: float | None = None
    recurrent_bytes: float = 0.0
    latent_bytes: float = 0.0

    def __add__(self, other: ReadStats) -> ReadStats:
        recalls = [stats.recall_sum for stats in (self, other) if stats.recall_sum is not None]
        return ReadStats(
            rows=self.rows + other.rows,
            fired_rows=self.fired_rows + other.fired_rows,
            frac_sum=self.frac_sum + other.frac_sum,
            index_sum=self.index_sum + other.index_sum,
            resident_sum=self.resident_sum + other.resident_sum,
            window_sum=self.window_sum + other.window_sum,
            pairs_read=self.pairs_read + other.pairs_read,
            pairs=self.pairs + other.pairs,
            code_bits=min(self.code_bits, other.code_bits),
            recall_sum=sum(recalls) if recalls else None,
            recurrent_bytes=max(self.recurrent_bytes, other.recurrent_bytes),
            latent_bytes=max(self.latent_bytes, other.latent_bytes),
        )

    @property
    def sizes(self) -> dict[str, float]:
        """`SHARES` and those of `OF_SOME_MODELS` that this model has."""
        sizes = {name: getattr(self, name) for name in (*SHARES, *OF_SOME_MODELS)}
        return {name: size for name, size in sizes.items() if size or name in SHARES}

    @property
    def size(self) -> float:
        """What is read / the full cache, mean over decode rows; 1 without any, which is the full cache's alone."""
        return self.frac_sum / self.rows if self.rows else 1.0

    @property
    def index_frac(self) -> float:
        """What is read of an index / the full cache, alike."""
        return self.index_sum / self.rows if self.rows else 0.0

    @property
    def device_frac(self) -> float:
        """What is read in device memory / the full cache, alike: the rows and the index."""
        return self.size + self.index_frac

    @property
    def resident_frac(self) -> float:
        """What the method keeps on the device / the full cache at T, alike."""
        return self.resident_sum / self.rows if self.rows else 0.0

    @property
    def window_frac(self) -> float:
        """What local layers read / the full cache, alike."""
        return self.window_sum / self.rows if self.rows else 0.0

    @property
    def size_artifact(self) -> float:
        """The artifact's relative KV cache size."""
        density = min(1.0, self.pairs_read / self.pairs)
        return (1 - math.sqrt(1 - density)) * self.code_bits / 16

    @property
    def attention_recall(self) -> float | None:
        """Share of the attention on what was read and the own token; None where it was not measured."""
        return None if self.recall_sum is None else self.recall_sum / self.rows

    def check_fired(self) -> None:
        """UserError where the method ran on no decode row, or not on all: such a score is the full cache's. UserError
        where a size is no number, as a method's own `num_read` may be."""
        if not math.isfinite(self.frac_sum + self.index_sum):
            raise UserError("the method's select gave a num_read or side that is NaN or infinite; allowed: tokens >= 0")
        if self.rows == 0 or self.fired_rows < self.rows:
            raise UserError(
                f"the method ran on {self.fired_rows:g} of {self.rows:g} decode rows: nothing was measured; "
                "check prefill, prefill_len and method.num_exempt_layers"
            )


class StepReads:
    """What live decoding reads on the device, summed over steps and sequences without asking the device for a number.

    codec: of the rows in the layers under the method, which take `slot_bytes` a token and KV head. element_bytes: of
    the dtype that is computed in. num_bytes: fp64, 0-d: the rows that attention read as they are stored, what was read
    of an index in the dtype that is computed in, the windows, and the own token of every layer; of real tokens only,
    padding is not counted.
    """

    def __init__(
        self,
        geometry: Geometry,
        num_exempt: int,
        codec: AnyCodec,
        *,
        slot_bytes: int,
        element_bytes: int,
        device: torch.device,
    ) -> None:
        self.geometry, self.num_exempt = geometry, num_exempt
        self.width = code_width(codec, geometry)
        self.token_bytes = geometry.elements * element_bytes  # exact, of a KV head
        self.slot_bytes = slot_bytes
        self.rows = 0
        self.frac_sum, self.index_sum, self.num_bytes = torch.zeros(3, dtype=torch.float64, device=device)

    def count(self, cached: Tensor, reads: Sequence[Tensor], index_reads: Sequence[Tensor]) -> None:
        """Add a step: int [batch] tokens cached before it; of each layer under the method [batch] tokens read, and read
        of an index, mean over KV heads."""
        geometry, num_layers = self.geometry, self.geometry.num_layers
        read, index_read = (_sum(cached, each) for each in (reads, index_reads))
        self.rows += len(cached)
        share = share_of_cache(cached, read, self.width, self.num_exempt, num_layers, geometry.windows)
        index_share = share_beside(cached, index_read, num_layers, geometry.windows)
        exact = self.num_exempt * cached + index_read + num_layers
        for window in geometry.windows:
            exact = exact + window.weight * (window.num_cached(cached) + 1)
        num_bytes = geometry.num_kv_heads * (exact * self.token_bytes + read * self.slot_bytes)
        self.frac_sum = self.frac_sum + share.sum()
        self.index_sum = self.index_sum + index_share.sum()
        self.num_bytes = self.num_bytes + num_bytes.sum()

    @property
    def size(self) -> float:
        """What was read of the cache / the full cache, mean over the steps and sequences so far."""
        return float(self.frac_sum) / self.rows

    @property
    def device_frac(self) -> float:
        """What was read in device memory / the full cache, alike."""
        return float(self.frac_sum + self.index_sum) / self.rows


def _sum(cached: Tensor, layers: Sequence[Tensor]) -> Tensor:
    """Over the layers, one launch for all of a device: fp64, shaped like `cached`, zeros of none."""
    if not layers:
        return torch.zeros_like(cached, dtype=torch.float64)
    by_device: dict[torch.device, list[Tensor]] = {}
    for layer in layers:
        by_device.setdefault(layer.device, []).append(layer)
    sums = [torch.stack(each).sum(0, dtype=torch.float64).to(cached.device) for each in by_device.values()]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def expected_size(
    method: Method, rows: Mapping[Row, int], num_layers: int, width: float = 1.0, windows: Sequence[Window] = ()
) -> float:
    """The size that `method` will report over `rows`, from its closed form; rows without cached tokens count nothing.

    rows: how many requests each row occurs in. width: bits of a stored element / 16. windows: of the local layers.
    Raises ValueError where the method's reads depend on the data.
    """
    exempt = min(method.num_exempt_layers, num_layers)
    total = weight = 0.0
    for row, multiplicity in rows.items():
        if not row.cached:
            continue
        reads = [method.tokens_read(row, layer) for layer in range(exempt, num_layers)]
        if None in reads:
            raise ValueError("the size of this method depends on the data")
        read = sum(each for each in reads if each is not None)
        local = float(in_windows(torch.tensor(row.cached), windows))
        whole = num_layers * row.cached + local
        total += multiplicity * (exempt * row.cached + width * read + local) / whole
        weight += multiplicity
    return total / weight


def sized(
    method: Method,
    rows: Sequence[Row],
    num_layers: int,
    target: float,
    width: float = 1.0,
    *,
    windows: Sequence[Window] = (),
    nearest: bool = False,
) -> Method:
    """`method` with the setting whose reported size over `rows` is nearest to `target`.

    Bisection over the one number that sizes it; the reported size grows with that number in steps.
    nearest: take it however far it is. Raises UserError where, otherwise, nothing lands within `TOLERANCE`; ValueError
    where the method has no size to set, or allows none at these lengths.
    """
    counted = Counter(rows)

    def size_of(number: float) -> float:
        return expected_size(method.with_size(number), counted, num_layers, width, windows)

    least = max(method.min_size(row) for row in counted)
    low, high = least, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if size_of(middle) < target else (low, middle)
    best = min((low, high), key=lambda number: abs(size_of(number) - target))
    if abs(size_of(best) - target) > TOLERANCE and not nearest:
        raise UserError(
            f"size={target}: the nearest size is {size_of(best):.3f}; allowed here: {size_of(least):.3f} to "
            f"{size_of(1.0):.3g} ({method.num_exempt_layers} of {num_layers} layers read the full cache"
            f"{f', {len(windows)} more a window' if windows else ''})"
        )
    return method.with_size(best)

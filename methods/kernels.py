"""Triton kernels of methods, imported only when a tensor lies on a GPU
(`methods.compiled.kernels_for`).

Rows of integer codes: one launch instead of about twenty. One program packs a row.

Scores on coded keys: one launch instead of about fifteen. One program serves some slots of one
head, and multiplies their codes in registers with all its query rows.

Products with coded projections: one launch instead of about twelve. One program serves a row of one
head, and multiplies it with all codes of the head's projection.

Selection: two launches instead of about thirty. One program serves a query row of one set. The
first kernel reduces the scores of a set's query heads to one. The second finds the least score that
is taken, eight bits at a time, since fp32 numbers order as integers do, and takes all above it. A
sample takes two launches more: one before the second kernel, which divides by the tokens' numbers,
and one after it, which weighs what was drawn.

Eviction: one launch each instead of about ten and twenty. One program serves a head. The kernels
choose the token that leaves and the slot of the current token.

Slots are read in tiles, so no kernel is compiled for a number of slots, which grows with every
step. Equal to the torch code bit for bit; products and exponentials up to rounding. With
TRITON_INTERPRET=1 set before Triton is imported they run on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.base import QueryRows
from methods.codecs.base import plane_width
from methods.codecs.integers import IntegerCodec
from methods.sampling import LASTING_BITS, mixed

ELEMENTS = 1024
"""Slots or scores that a program holds in registers at a time."""
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Smaller values are hidden."""
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
TO_WHOLE = tl.constexpr(1.5 * 2**23)
"""Adding this rounds a number below 2^22 to a whole one, halves to the even neighbour."""
MOST_ROWS = 64
"""Query rows of a KV head that `coded_scores` takes."""
EMPTY = tl.constexpr(torch.iinfo(torch.int32).max)
"""As `methods.base.EMPTY`."""
SATURATED = tl.constexpr(255)
"""As `methods.infinigen_pool.SATURATED`."""
NEVER = tl.constexpr(torch.iinfo(torch.int64).max)


# Coded rows

width_of = triton.constexpr_function(plane_width)


@triton.jit
def pack_row(states, packed, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr):
    groups: tl.constexpr = (HEAD_DIM + GROUP_SIZE - 1) // GROUP_SIZE
    width: tl.constexpr = width_of(HEAD_DIM, BITS)
    group = tl.arange(0, triton.next_power_of_2(groups))
    member = tl.arange(0, triton.next_power_of_2(GROUP_SIZE))
    element = group[:, None] * GROUP_SIZE + member[None, :]
    held = (member[None, :] < GROUP_SIZE) & (element < HEAD_DIM)
    least = tl.min(tl.load(states + element, mask=held, other=float("inf")).to(tl.float32), 1)
    most = tl.max(tl.load(states + element, mask=held, other=float("-inf")).to(tl.float32), 1)
    lo, step = least.to(tl.float16), tl.div_rn(most - least, 2.0**BITS - 1).to(tl.float16)
    meta = packed.to(tl.pointer_type(tl.float16)) + group * 2
    tl.store(meta, lo, mask=group < groups)
    tl.store(meta + 1, step, mask=group < groups)
    lo = lo.to(tl.float32)
    divisor = tl.where(step == 0, 1.0, step.to(tl.float32))  # code * 0 + lo is lo

    at = tl.arange(0, triton.next_power_of_2(width))
    codes = tl.zeros((triton.next_power_of_2(width),), tl.int32)
    for plane in tl.static_range(8 // BITS):
        element = plane * width + at
        held = (at < width) & (element < HEAD_DIM)
        of_group = tl.where(held, element // GROUP_SIZE, 0)
        above = tl.load(states + element, mask=held, other=0).to(tl.float32) - tl.gather(
            lo, of_group, 0
        )
        level = tl.div_rn(above, tl.gather(divisor, of_group, 0))
        level = tl.minimum(tl.maximum(level, 0.0), 2.0**BITS - 1) + TO_WHOLE - TO_WHOLE
        codes |= tl.where(held, level, 0.0).to(tl.int32) << plane * BITS
    tl.store(packed + 4 * groups + at, codes.to(tl.uint8), mask=at < width)


@triton.jit
def _pack(
    states,
    packed,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pack_row(states + row * HEAD_DIM, packed + row * ROW_BYTES, HEAD_DIM, BITS, GROUP_SIZE)


def encode(x: Tensor, codec: IntegerCodec) -> Tensor:
    """As `IntegerCodec.encode` without a rotation: rows [..., head_dim] as uint8 [..., row
    bytes]."""
    head_dim = x.shape[-1]
    packed = x.new_empty((*x.shape[:-1], codec.row_bytes(head_dim)), dtype=torch.uint8)
    if packed.numel():
        _pack[(x.shape[:-1].numel(),)](
            x.contiguous(),
            packed,
            HEAD_DIM=head_dim,
            BITS=codec.bits,
            GROUP_SIZE=codec.group_size,
            ROW_BYTES=packed.shape[-1],
            num_warps=1,
        )
    return packed


# Scores on coded keys


@triton.jit(
    do_not_specialize=["slots", "rows", "heads", "batch_stride", "head_stride", "byte_stride"]
)
def _coded_scores(
    query,
    keys,  # packed as `methods.codecs` says
    scores, slots, rows, heads,
    batch_stride, head_stride, slot_stride, byte_stride,  # of `keys`
    COLUMNS: tl.constexpr, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # `rows` rounded up
    TILE: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = width_of(COLUMNS, BITS)
    groups: tl.constexpr = (COLUMNS + GROUP_SIZE - 1) // GROUP_SIZE
    tiles = tl.cdiv(slots, TILE)  # one axis for all: a GPU takes 65,535 programs of the others
    head = (tl.program_id(0) // tiles).to(tl.int64)
    slot = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    held = slot < slots
    keys += head // heads * batch_stride + head % heads * head_stride
    keys += slot.to(tl.int64) * slot_stride
    row = tl.arange(0, ROWS)
    query += (head * rows + row) * COLUMNS
    total = tl.zeros((ROWS, TILE), tl.float32)
    for group in tl.static_range(groups):
        sums = tl.zeros((ROWS,), tl.float32)
        products = tl.zeros((ROWS, TILE), tl.float32)
        for column in range(group * GROUP_SIZE, min(COLUMNS, (group + 1) * GROUP_SIZE)):
            of_query = tl.load(query + column, mask=row < rows, other=0).to(tl.float32)
            byte = 4 * groups + column % width
            code = tl.load(keys + byte * byte_stride, mask=held, other=0).to(tl.int32)
            code = (code >> column // width * BITS) & ((1 << BITS) - 1)
            sums += of_query
            products += of_query[:, None] * code.to(tl.float32)[None, :]
        lo = _half(keys + 4 * group * byte_stride, byte_stride, held)
        step = _half(keys + (4 * group + 2) * byte_stride, byte_stride, held)
        total += products * step[None, :] + sums[:, None] * lo[None, :]
    found = scores + (head * rows + row)[:, None] * slots + slot[None, :]
    tl.store(found, total, mask=(row < rows)[:, None] & held[None, :])


@triton.jit
def _half(low, byte_stride, held):
    """The fp16 number whose low byte lies at `low`, in fp32."""
    word = tl.load(low, mask=held, other=0).to(tl.uint16)
    word |= tl.load(low + byte_stride, mask=held, other=0).to(tl.uint16) << 8
    return word.to(tl.float16, bitcast=True).to(tl.float32)


def coded_scores(query: Tensor, keys: Tensor, codec: IntegerCodec) -> Tensor:
    """As `methods.coded_keys.coded_scores`, for at most `MOST_ROWS` rows."""
    batch, heads, rows, columns = query.shape
    slots = keys.shape[2]
    scores = query.new_empty((batch, heads, rows, slots), dtype=torch.float32)
    padded = triton.next_power_of_2(rows)
    tile = max(1, ELEMENTS // padded)
    in_memory = keys if keys.stride(-1) == 1 else keys.mT  # the kernel is told all strides
    _coded_scores[(batch * heads * triton.cdiv(slots, tile),)](
        query.contiguous(),
        in_memory,
        scores,
        slots,
        rows,
        heads,
        *keys.stride(),
        COLUMNS=columns,
        BITS=codec.bits,
        GROUP_SIZE=codec.group_size,
        ROWS=padded,
        TILE=tile,
    )
    return scores


# Products with coded projections


@triton.jit(do_not_specialize=["rows", "heads", "row_stride", "batch_stride", "head_stride"])
def _coded_product(
    states,
    side,  # packed as `methods.codecs` says, one group a row
    products, rows, heads, row_stride,
    batch_stride, head_stride, element_stride,  # of `side`
    HEAD_DIM: tl.constexpr, ELEMENTS_OF_HEAD: tl.constexpr,  # HEAD_DIM rounded up
    COLUMNS: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr,  # bytes of codes, rounded up
):  # fmt: skip
    width: tl.constexpr = width_of(COLUMNS, BITS)
    head, row = (tl.program_id(0) // rows).to(tl.int64), tl.program_id(0) % rows
    element = tl.arange(0, ELEMENTS_OF_HEAD)
    held = element < HEAD_DIM
    side += head // heads * batch_stride + head % heads * head_stride + element * element_stride
    number = tl.load(states + (head * rows + row) * row_stride + element, mask=held, other=0)
    number = number.to(tl.float32)
    base = tl.sum(number * _half(side, 1, held), 0)
    scaled = number * _half(side + 2, 1, held)
    byte = tl.arange(0, WIDTH)
    codes = tl.load(
        side[:, None] + 4 + byte[None, :],
        mask=held[:, None] & (byte < width)[None, :],
        other=0,
    ).to(tl.int32)
    products += (head * rows + row) * COLUMNS
    for plane in tl.static_range(8 // BITS):
        code = (codes >> plane * BITS) & ((1 << BITS) - 1)
        of_plane = tl.sum(scaled[:, None] * code.to(tl.float32), 0) + base
        column = plane * width + byte
        tl.store(products + column, of_plane, mask=(byte < width) & (column < COLUMNS))


def coded_product(states: Tensor, side: Tensor, codec: IntegerCodec) -> Tensor:
    """As `methods.infinigen2.coded_product`."""
    batch, heads, rows, head_dim = states.shape
    columns = codec.group_size
    products = states.new_empty((batch, heads, rows, columns), dtype=torch.float32)
    _coded_product[(batch * heads * rows,)](
        states.contiguous(),
        side,
        products,
        rows,
        heads,
        head_dim,
        *side.stride()[:3],
        HEAD_DIM=head_dim,
        ELEMENTS_OF_HEAD=triton.next_power_of_2(head_dim),
        COLUMNS=columns,
        BITS=codec.bits,
        WIDTH=triton.next_power_of_2(plane_width(columns, codec.bits)),
    )
    return products


# Selection


@triton.jit(do_not_specialize=["slots", "alpha"])
def _relative(
    scores,
    tokens,  # the position of each slot's token
    positions, relative, within, alpha, slots, sets, rows, group,
    batch_stride, set_stride,  # of `tokens`
    HEADS: tl.constexpr,  # `group` rounded up
    TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, of_all = program % rows, program // rows
    batch = of_all // sets
    tokens += batch.to(tl.int64) * batch_stride + of_all % sets * set_stride
    position = tl.load(positions + batch * rows + row)
    head = tl.arange(0, HEADS)[:, None]
    of_head = scores + ((of_all.to(tl.int64) * group + head) * rows + row) * slots
    relative += program.to(tl.int64) * slots
    best = tl.full((HEADS, TILE), float("-inf"), tl.float32)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        visible = (slot < slots) & (tl.load(tokens + slot, mask=slot < slots, other=0) < position)
        seen = tl.load(of_head + slot, mask=visible & (head < group), other=float("-inf"))
        best = tl.maximum(best, seen)
    best = tl.max(best, 1)
    best = tl.where(best == float("-inf"), 0.0, best)[:, None]
    count = tl.zeros((TILE,), tl.int32)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        visible = (slot < slots) & (tl.load(tokens + slot, mask=slot < slots, other=0) < position)
        seen = tl.load(of_head + slot, mask=visible & (head < group), other=float("-inf"))
        nearest = tl.max(seen - best, 0)
        tl.store(relative + slot, nearest, mask=slot < slots)
        count += (nearest >= -alpha).to(tl.int32)
    tl.store(within + program, tl.sum(count, 0))


@triton.jit(do_not_specialize=["slots"])
def _summed_probs(
    scores,
    tokens,  # the position of each slot's token
    positions, summed, slots, sets, rows, group,
    batch_stride, set_stride,  # of `tokens`
    HEADS: tl.constexpr,  # `group` rounded up
    TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, of_all = program % rows, program // rows
    batch = of_all // sets
    tokens += batch.to(tl.int64) * batch_stride + of_all % sets * set_stride
    position = tl.load(positions + batch * rows + row)
    head = tl.arange(0, HEADS)[:, None]
    of_head = scores + ((of_all.to(tl.int64) * group + head) * rows + row) * slots
    summed += program.to(tl.int64) * slots
    best = tl.full((HEADS, TILE), LOWEST, tl.float32)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        visible = (slot < slots) & (tl.load(tokens + slot, mask=slot < slots, other=0) < position)
        seen = tl.load(of_head + slot, mask=visible & (head < group), other=float("-inf"))
        best = tl.maximum(best, seen)
    best = tl.max(best, 1)[:, None]
    total = tl.zeros((HEADS, TILE), tl.float32)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        visible = (slot < slots) & (tl.load(tokens + slot, mask=slot < slots, other=0) < position)
        seen = tl.load(of_head + slot, mask=visible & (head < group), other=float("-inf"))
        total += tl.exp(seen - best)
    total = tl.sum(total, 1)[:, None]
    total = tl.where(total > 0, total, 1.0)  # of no visible token, and of no head
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        visible = (slot < slots) & (tl.load(tokens + slot, mask=slot < slots, other=0) < position)
        seen = tl.load(of_head + slot, mask=visible & (head < group), other=float("-inf"))
        of_slots = tl.maximum(tl.sum(tl.exp(seen - best) / total, 0), TINY)
        tl.store(summed + slot, tl.where(visible, of_slots, float("-inf")), mask=slot < slots)


@triton.jit
def _mixed(numbers):
    """As `methods.sampling.mixed`, of int64."""
    for _ in tl.static_range(2):
        numbers = ((numbers ^ (numbers >> 16)) & 0xFFFFFFFF) * 0x45D9F3B & 0xFFFFFFFF
    return numbers ^ (numbers >> 16)


@triton.jit(do_not_specialize=["slots", "salt", "layer"])
def _ranked(
    score,
    tokens,  # the position of each slot's token
    ranked,
    salt,  # a hash of the seed
    layer, slots, sets, rows,
    batch_stride, set_stride,  # of `tokens`
    NUMBERS: tl.constexpr,  # of which a token has one
    TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    of_all = program // rows
    batch, of_set = of_all // sets, of_all % sets
    tokens += batch.to(tl.int64) * batch_stride + of_set * set_stride
    turn = _mixed(of_set.to(tl.int64) + layer.to(tl.int64) * 65536)
    score += program.to(tl.int64) * slots
    ranked += program.to(tl.int64) * slots
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        token = tl.load(tokens + slot, mask=slot < slots, other=0).to(tl.int64)
        turned = (_mixed(token + salt) + turn) & (NUMBERS - 1)
        number = (turned.to(tl.float32) + 0.5) / NUMBERS
        of_slots = tl.load(score + slot, mask=slot < slots, other=0)
        tl.store(ranked + slot, of_slots / number, mask=slot < slots)


@triton.jit(do_not_specialize=["slots"])
def _log_weights(score, ranked, mask, found, slots, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64) * slots
    left_out = tl.zeros((TILE,), tl.float32)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        taken = tl.load(mask + program + slot, mask=slot < slots, other=1) != 0
        of_slots = tl.load(ranked + program + slot, mask=~taken, other=0)
        left_out = tl.maximum(left_out, of_slots)  # hidden tokens are below 0
    border = tl.max(left_out, 0)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        taken = tl.load(mask + program + slot, mask=slot < slots, other=0) != 0
        of_slots = tl.load(score + program + slot, mask=taken, other=1.0)
        weight = tl.maximum(border / of_slots, 1.0)
        tl.store(found + program + slot, tl.log(tl.where(taken, weight, 1.0)), mask=slot < slots)


@triton.jit
def _ordered(values):
    """fp32 as unsigned integers of the same order, 0 for hidden values."""
    bits = tl.where(values == 0, 0.0, values).to(
        tl.uint32, bitcast=True
    )  # zeros of either sign are equal
    ordered = bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000)
    return tl.where(values >= LOWEST, ordered, 0)


@triton.jit(do_not_specialize=["slots"])
def _take_largest(
    values, within, whole, cached,
    order,  # None: slots are taken as they lie
    mask, taken, slots, sets, rows,
    FRAC: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr,
    MEAN_OF: tl.constexpr,  # sets whose mean `within`, rounded up, limits the count; 0: no limit
):  # fmt: skip
    program = tl.program_id(0)
    row, batch = program % rows, program // rows // sets
    count = (tl.load(whole + batch * rows + row).to(tl.float64) * tl.full((), FRAC, tl.float64)).to(
        tl.int64
    )
    count = tl.minimum(tl.maximum(count, LEAST), tl.load(cached + batch * rows + row).to(tl.int64))
    if MEAN_OF > 0:
        one = tl.arange(0, MEAN_OF)
        counts = tl.load(within + (batch * sets + one) * rows + row, mask=one < sets, other=0)
        count = tl.minimum(count, tl.maximum(tl.sum(counts.to(tl.int64), 0) // sets, 1))
    if program // rows % sets == 0:
        tl.store(taken + batch * rows + row, count.to(tl.float64))

    values += program.to(tl.int64) * slots
    mask += program.to(tl.int64) * slots
    wanted = count.to(tl.int32)  # of those that begin as `least` does, the largest so many
    least = tl.zeros((), tl.uint32)
    digit = tl.arange(0, 256)
    for place in range(24, -1, -8):
        number = tl.zeros((256,), tl.int32)
        for start in range(0, slots, TILE):
            slot = start + tl.arange(0, TILE)
            ordered = _ordered(tl.load(values + slot, mask=slot < slots, other=float("-inf")))
            alike = (ordered > 0) & ((ordered ^ least) >> place < 256)
            number += tl.histogram((ordered >> place & 255).to(tl.int32), 256, mask=alike)
        alike_in_all = tl.sum(number, 0)
        wanted = tl.minimum(wanted, alike_in_all)
        above = alike_in_all - tl.cumsum(number, 0)  # with a larger digit
        found = (above < wanted) & (above + number >= wanted)
        least |= tl.sum(tl.where(found, digit, 0), 0).to(tl.uint32) << place
        wanted -= tl.sum(tl.where(found, above, 0), 0)

    equal_before = 0
    if order is not None:
        order += (program // rows).to(tl.int64) * slots
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        within_row = slot < slots
        if order is not None:
            slot = tl.load(order + slot, mask=within_row, other=0)
        ordered = _ordered(tl.load(values + slot, mask=within_row, other=float("-inf")))
        equal = ((ordered == least) & (ordered > 0)).to(tl.int32)
        rank = equal_before + tl.cumsum(equal, 0)
        chosen = (ordered > least) | ((equal > 0) & (rank <= wanted))
        tl.store(mask + slot, chosen & (count > 0), mask=within_row)
        equal_before += tl.sum(equal, 0)


def relative(scores: Tensor, rows: QueryRows, alpha: float) -> tuple[Tensor, Tensor]:
    """Each set's r (see `Selecting.reduced`), -inf where a row sees no token, fp32 [batch, sets,
    rows, slots], and how many tokens have r >= -alpha, int32 [batch, sets, rows].

    scores: [batch, sets, heads of a set, rows, slots]; those of slots that are not visible may be
    anything.
    """
    batch, sets, group, num_rows, slots = scores.shape
    tokens = rows.slot_positions
    found = scores.new_empty((batch, sets, num_rows, slots), dtype=torch.float32)
    within = scores.new_empty((batch, sets, num_rows), dtype=torch.int32)
    heads = triton.next_power_of_2(group)
    shape = (slots, sets, num_rows, group)
    strides = (tokens.stride(0), tokens.stride(1) if tokens.shape[1] > 1 else 0)
    data = (scores.contiguous(), tokens, rows.positions.contiguous(), found, within, alpha)
    tile = max(1, ELEMENTS // heads)
    _relative[(batch * sets * num_rows,)](*data, *shape, *strides, HEADS=heads, TILE=tile)
    return found, within


def summed_probs(scores: Tensor, rows: QueryRows) -> Tensor:
    """The probabilities of each set's heads, summed (`group=sum_probs`, see `Selecting.reduced`):
    fp32 [batch, sets, rows, slots]. scores: as in `relative`."""
    batch, sets, group, num_rows, slots = scores.shape
    tokens = rows.slot_positions
    summed = scores.new_empty((batch, sets, num_rows, slots), dtype=torch.float32)
    heads = triton.next_power_of_2(group)
    shape = (slots, sets, num_rows, group)
    strides = (tokens.stride(0), tokens.stride(1) if tokens.shape[1] > 1 else 0)
    data = (scores.contiguous(), tokens, rows.positions.contiguous(), summed)
    tile = max(1, ELEMENTS // heads)
    _summed_probs[(batch * sets * num_rows,)](*data, *shape, *strides, HEADS=heads, TILE=tile)
    return summed


def ranked(score: Tensor, rows: QueryRows, seed: int, layer: int) -> Tensor:
    """Score / number of each token, by which a sample is drawn (`methods.sampling`): fp32 [batch,
    sets, rows, slots], like `score`."""
    batch, sets, num_rows, slots = score.shape
    tokens = rows.slot_positions
    found = torch.empty_like(score)
    strides = (tokens.stride(0), tokens.stride(1) if tokens.shape[1] > 1 else 0)
    shape = (slots, sets, num_rows)
    _ranked[(batch * sets * num_rows,)](
        score,
        tokens,
        found,
        mixed(seed),
        layer,
        *shape,
        *strides,
        NUMBERS=2**LASTING_BITS,
        TILE=ELEMENTS,
    )
    return found


def log_weights(score: Tensor, ranked: Tensor, mask: Tensor) -> Tensor:
    """As `methods.sampling.log_weights`."""
    score, ranked, mask = score.contiguous(), ranked.contiguous(), mask.contiguous()
    found = torch.empty_like(score)
    grid = (score.numel() // max(1, score.shape[-1]),)
    _log_weights[grid](score, ranked, mask, found, score.shape[-1], TILE=ELEMENTS)
    return found


def largest(
    values: Tensor, within: Tensor | None = None, order: Tensor | None = None,
    *, frac: float, least: int, whole: Tensor, cached: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mask of each row's largest values, and their number, fp64 [batch, rows]. Equal values: the
    lowest slots first.

    values: fp32 [batch, sets, rows, slots], -inf where hidden. within: [batch, sets, rows]; its
    mean over the sets, at least 1, bounds the number. The cap also does: floor(frac * whole), at
    least `least`, at most `cached`. whole, cached: int [batch, rows]. order: int64 [batch, sets,
    slots], the order of equal values; None: by slot.
    """
    batch, sets, num_rows, slots = values.shape
    values = values.contiguous()
    mask = torch.empty_like(values, dtype=torch.bool)
    taken = values.new_empty((batch, num_rows), dtype=torch.float64)
    order = None if order is None else order.contiguous()
    mean_of = 0 if within is None else triton.next_power_of_2(sets)
    given = (
        values,
        values if within is None else within,
        whole.contiguous(),
        cached.contiguous(),
        order,
    )
    cap = {"FRAC": frac, "LEAST": least, "MEAN_OF": mean_of}
    grid = (batch * sets * num_rows,)
    _take_largest[grid](
        *given, mask, taken, slots, sets, num_rows, **cap, TILE=ELEMENTS, num_warps=8
    )
    return mask, taken


# Eviction


@triton.jit
def _move(slots, source, target, WIDTH: tl.constexpr, EMPTY: tl.constexpr):
    """Move one slot of a head and leave `EMPTY` behind."""
    element = tl.arange(0, triton.next_power_of_2(WIDTH))
    held = element < WIDTH
    moved = tl.load(slots + source * WIDTH + element, mask=held)
    tl.store(slots + target * WIDTH + element, moved, mask=held)
    tl.store(
        slots + source * WIDTH + element,
        tl.full(moved.shape, EMPTY, moved.dtype),
        mask=held & (target != source),
    )


@triton.jit(do_not_specialize=["own", "num_slots"])
def _place_own(
    tokens,
    data,  # of every slot tensor
    free, own, num_slots,
    WIDTHS: tl.constexpr,  # elements of a slot
    EMPTIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    tokens += head * num_slots
    gone = tl.load(tokens + own) == EMPTY
    first = own
    for start in range(0, own, TILE):
        slot = start + tl.arange(0, TILE)
        token = tl.load(tokens + slot, mask=slot < own, other=0)
        first = tl.minimum(first, tl.min(tl.where(token == EMPTY, slot, own), 0))
    target = tl.where(gone, num_slots - 1, first)
    tl.store(free + head, tl.where(gone, -1, first).to(tl.int64))
    for part in tl.static_range(len(WIDTHS)):
        of_head = data[part] + head * num_slots * WIDTHS[part]
        _move(of_head, own, target, WIDTHS[part], EMPTIES[part])


@triton.jit(do_not_specialize=["slots", "num_slots", "position_stride"])
def _evict_least(
    score, tokens, positions, limits, slots, num_slots, heads, position_stride,
    TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + head // heads * position_stride).to(tl.int64)
    limits += head // heads * 2
    budget, recent = tl.load(limits), tl.load(limits + 1)
    score += head * num_slots
    tokens += head * num_slots
    least, victim = float("inf"), 0
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        token = tl.load(tokens + slot, mask=slot < slots, other=EMPTY)
        old = (slot < slots) & (token <= position - recent)
        of_slots = tl.where(old, tl.load(score + slot, mask=old, other=0), float("inf"))
        lowest = tl.min(of_slots, 0)
        first = tl.min(tl.where(of_slots == lowest, slot, slots), 0)
        victim = tl.where(lowest < least, first, victim)
        least = tl.minimum(least, lowest)
    tl.store(tokens + victim, EMPTY, mask=position >= budget)


@triton.jit(do_not_specialize=["slots", "num_slots", "position_stride"])
def _use(
    chosen,
    ascending,  # the tokens in the slots, sorted
    tokens, fetches, last_fetch, positions, capacities, unprotected,
    slots, num_slots, heads, position_stride,
    POLICY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + head // heads * position_stride)
    chosen += head * slots
    tokens += head * num_slots
    fetches += head * num_slots
    last_fetch += head * num_slots
    most = 0
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        count = tl.load(fetches + slot, mask=slot < slots, other=0)
        count += tl.load(chosen + slot, mask=slot < slots, other=0).to(tl.int32)
        count = tl.where(
            tl.load(tokens + slot, mask=slot < slots, other=EMPTY) == position, 0, count
        )
        most = tl.maximum(most, tl.max(count, 0))
    saturated = (most >= SATURATED).to(tl.int32)
    rank = tl.minimum(tl.load(unprotected + head // heads), slots) - 1
    newest = tl.load(ascending + head * slots + rank)
    least = tl.full((), NEVER, tl.int64)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        token = tl.load(tokens + slot, mask=slot < slots, other=EMPTY)
        own, fetched = token == position, tl.load(chosen + slot, mask=slot < slots, other=0) != 0
        count = tl.load(fetches + slot, mask=slot < slots, other=0) + fetched.to(tl.int32)
        count = tl.where(own, 0, count) >> saturated
        last = tl.where(
            own | fetched, position, tl.load(last_fetch + slot, mask=slot < slots, other=0)
        )
        tl.store(fetches + slot, count, mask=slot < slots)
        tl.store(last_fetch + slot, last, mask=slot < slots)
        score = count if POLICY == "counter" else last if POLICY == "lru" else tl.zeros_like(count)
        order = (score.to(tl.int64) << 31) + token
        least = tl.minimum(least, tl.min(tl.where(token <= newest, order, NEVER), 0))
    victim = (least & EMPTY).to(tl.int32)  # the token
    leaves = position >= tl.load(capacities + head // heads)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        token = tl.load(tokens + slot, mask=slot < slots, other=EMPTY)
        tl.store(
            tokens + slot,
            tl.full((TILE,), EMPTY, tl.int32),
            mask=leaves & (slot < slots) & (token == victim),
        )


def place_own(data: Mapping[str, Tensor], empties: Mapping[str, float], own: int) -> Tensor:
    """As `EvictingState.place_own`. data: a layer's slot tensors, `tokens` among them; empties: see
    `slot_tensors`."""
    tokens = data["tokens"]
    assert all(tensor.is_contiguous() for tensor in data.values())
    free = torch.empty((*tokens.shape[:2], 1), dtype=torch.int64, device=tokens.device)
    widths = tuple(tensor[0, 0, 0].numel() for tensor in data.values())
    values = tuple(empties[name] for name in data)
    given = (tokens, tuple(data.values()), free, own, tokens.shape[2])
    _place_own[(free.numel(),)](*given, WIDTHS=widths, EMPTIES=values, TILE=ELEMENTS)
    return free


def evict_least(
    score: Tensor, tokens: Tensor, slots: int, positions: Tensor, limits: Tensor
) -> None:
    """Free each head's token of the lowest score that is not recent, where more tokens than the
    budget are held.

    positions: int [batch], -1 for padding, which evicts nothing; limits: budget and recent tokens,
    int [batch, 2].
    """
    heads = tokens.shape[1]
    sizes = (slots, tokens.shape[2], heads, positions.stride(0))
    _evict_least[(len(tokens) * heads,)](score, tokens, positions, limits, *sizes, TILE=ELEMENTS)


def use(
    chosen: Tensor, ascending: Tensor, data: tuple[Tensor, Tensor, Tensor], positions: Tensor,
    limits: tuple[Tensor, Tensor], policy: str,
) -> None:  # fmt: skip
    """As `PooledState.use`. positions: int [batch], -1 for padding; data: tokens, fetches and last
    fetches; limits: capacities and numbers of unprotected tokens, int64 [batch]."""
    tokens, heads = data[0], chosen.shape[1]
    sizes = (chosen.shape[2], tokens.shape[2], heads, positions.stride(0))
    grid = (len(tokens) * heads,)
    _use[grid](
        chosen.contiguous(),
        ascending,
        *data,
        positions,
        *limits,
        *sizes,
        POLICY=policy,
        TILE=ELEMENTS,
    )

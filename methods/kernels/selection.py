"""Selection: two launches instead of about thirty. One program serves a query row of one set; where
rows are few and long, several programs take a part of a row each, and then a kernel's steps are
launches of their own (`steps_of`). A step begins with what the parts found in the one before.

The first kernel reduces the scores of a set's query heads to one. The second finds the least score
that is taken, eight bits at a time, since fp32 numbers order as integers do, and takes all above
it. A sample takes two launches more: one before the second kernel, which divides by the tokens'
numbers, and one after it, which weighs what was drawn. Distances of values, by which it weighs
tokens, are decoded in the first kernel, and coded by one of their own in place of eleven launches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.base import QueryRows
from methods.kernels import coded
from methods.kernels.coded import TO_WHOLE

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Smaller values are hidden."""
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
STEPS = tl.constexpr(8)
"""As `methods.infinigen2.STEPS_OF_TWO`."""
LONG = 8192
"""Slots from which rows are split: what a program saves is more than what launches add."""
MOST_PARTS = 16
PROGRAMS = 256
"""Programs that are enough for a GPU, of 60 to 140 multiprocessors."""


@triton.jit
def _seen(head_scores, tokens, position, slot, slots, is_head):
    """Mask of a tile's slots that a row sees, and their scores [heads, slots], -inf elsewhere."""
    held = slot < slots
    visible = held & (tl.load(tokens + slot, mask=held, other=0) < position)
    return visible, tl.load(head_scores + slot, mask=visible & is_head, other=float("-inf"))


@triton.jit
def _best(least, head_scores, tokens, position, first, end, is_head, TILE: tl.constexpr):
    """The best score of each head in a part, where it is above the `least`, [heads, TILE]."""
    for start in range(first, end, TILE):
        slot = start + tl.arange(0, TILE)
        _, seen = _seen(head_scores, tokens, position, slot, end, is_head)
        least = tl.maximum(least, seen)
    return tl.max(least, 1)


@triton.jit
def _of_parts(found, parts, HEADS: tl.constexpr, PARTS: tl.constexpr):
    """Where each part of a row has what it found of each head, [PARTS, HEADS]; which parts there
    are."""
    part = tl.arange(0, PARTS)[:, None]
    return found + part * HEADS + tl.arange(0, HEADS)[None, :], part < parts


@triton.jit(do_not_specialize=["slots", "alpha", "parts", "part_slots"])
def _relative(
    scores,
    tokens,  # the position of each slot's token
    positions, relative, within, alpha, slots, sets, rows, group,
    batch_stride, set_stride,  # of `tokens`
    bests,  # of each part, fp32 [program, parts, HEADS]
    parts, part_slots,
    HEADS: tl.constexpr,  # `group` rounded up
    TILE: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, PARTS: tl.constexpr,  # see `steps_of`
):  # fmt: skip
    program, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    row, set_index = program % rows, program // rows
    batch = set_index // sets
    tokens += batch.to(tl.int64) * batch_stride + set_index % sets * set_stride
    position = tl.load(positions + batch * rows + row)
    head = tl.arange(0, HEADS)[:, None]
    head_scores = scores + ((set_index.to(tl.int64) * group + head) * rows + row) * slots
    relative += program.to(tl.int64) * slots
    bests += program * parts * HEADS
    first = part * part_slots
    end = tl.minimum(first + part_slots, slots)
    if FIRST == 0:
        least = tl.full((HEADS, TILE), float("-inf"), tl.float32)
        best = _best(least, head_scores, tokens, position, first, end, head < group, TILE)
        if PARTS > 1:
            tl.store(bests + part * HEADS + tl.arange(0, HEADS), best)
    if LAST == 1:
        if PARTS > 1:
            of_parts, is_part = _of_parts(bests, parts, HEADS, PARTS)
            best = tl.max(tl.load(of_parts, mask=is_part, other=float("-inf")), 0)
        best = tl.where(best == float("-inf"), 0.0, best)[:, None]
        count = tl.zeros((TILE,), tl.int32)
        for start in range(first, end, TILE):
            slot = start + tl.arange(0, TILE)
            _, seen = _seen(head_scores, tokens, position, slot, end, head < group)
            nearest = tl.max(seen - best, 0)
            tl.store(relative + slot, nearest, mask=slot < end)
            count += (nearest >= -alpha).to(tl.int32)
        tl.store(within + program * parts + part, tl.sum(count, 0))


@triton.jit(
    do_not_specialize=[
        "slots", "distance_batch_stride", "distance_head_stride", "parts", "part_slots",
    ]
)  # fmt: skip
def _summed_probs(
    scores,
    tokens,  # the position of each slot's token
    positions, summed, slots, sets, rows, group,
    batch_stride, set_stride,  # of `tokens`
    distances,  # of the tokens' values, coded; None: all are 1
    distance_batch_stride, distance_head_stride,
    bests, totals,  # of each part, fp32 [program, parts, HEADS]
    parts, part_slots,
    HEADS: tl.constexpr,  # `group` rounded up
    TILE: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, PARTS: tl.constexpr,  # see `steps_of`
):  # fmt: skip
    program, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    row, set_index = program % rows, program // rows
    batch = set_index // sets
    tokens += batch.to(tl.int64) * batch_stride + set_index % sets * set_stride
    position = tl.load(positions + batch * rows + row)
    head = tl.arange(0, HEADS)[:, None]
    head_scores = scores + ((set_index.to(tl.int64) * group + head) * rows + row) * slots
    summed += program.to(tl.int64) * slots
    bests += program * parts * HEADS
    totals += program * parts * HEADS
    own = part * HEADS + tl.arange(0, HEADS)
    first = part * part_slots
    end = tl.minimum(first + part_slots, slots)
    if FIRST == 0:
        least = tl.full((HEADS, TILE), LOWEST, tl.float32)
        best = _best(least, head_scores, tokens, position, first, end, head < group, TILE)
        if PARTS > 1:
            tl.store(bests + own, best)
    if LAST > 0:
        if PARTS > 1:
            of_parts, is_part = _of_parts(bests, parts, HEADS, PARTS)
            best = tl.max(tl.load(of_parts, mask=is_part, other=LOWEST), 0)
        best = best[:, None]
    if (FIRST <= 1) & (LAST >= 1):
        total = tl.zeros((HEADS, TILE), tl.float32)
        for start in range(first, end, TILE):
            slot = start + tl.arange(0, TILE)
            _, seen = _seen(head_scores, tokens, position, slot, end, head < group)
            total += tl.exp(seen - best)
        total = tl.sum(total, 1)
        if PARTS > 1:
            tl.store(totals + own, total)
    if LAST == 2:
        if PARTS > 1:
            of_parts, is_part = _of_parts(totals, parts, HEADS, PARTS)
            total = tl.sum(tl.load(of_parts, mask=is_part, other=0), 0)
        total = total[:, None]
        total = tl.where(total > 0, total, 1.0)  # of no visible token, and of no head
        for start in range(first, end, TILE):
            slot = start + tl.arange(0, TILE)
            visible, seen = _seen(head_scores, tokens, position, slot, end, head < group)
            slot_scores = tl.maximum(tl.sum(tl.exp(seen - best) / total, 0), TINY)
            if distances is not None:
                at = distances + batch.to(tl.int64) * distance_batch_stride
                at += (set_index % sets).to(tl.int64) * distance_head_stride
                code = tl.load(at + slot, mask=slot < end, other=0).to(tl.float32)
                slot_scores *= tl.exp2(code / STEPS)
            slot_scores = tl.where(visible, slot_scores, float("-inf"))
            tl.store(summed + slot, slot_scores, mask=slot < end)


@triton.jit(do_not_specialize_on_alignment=["codes"])  # the slot moves from step to step
def _code_distances(
    values, means, codes, heads, rows,
    value_batch_stride, value_head_stride, value_row_stride,
    code_batch_stride, code_head_stride,
    VALUE_DIM: tl.constexpr, ELEMENTS_OF_VALUE: tl.constexpr,  # VALUE_DIM rounded up
):  # fmt: skip
    row, set_index = tl.program_id(0) % rows, (tl.program_id(0) // rows).to(tl.int64)
    batch, head = set_index // heads, set_index % heads
    element = tl.arange(0, ELEMENTS_OF_VALUE)
    held = element < VALUE_DIM
    values += batch * value_batch_stride + head * value_head_stride + row * value_row_stride
    value = tl.load(values + element, mask=held, other=0).to(tl.float32)
    mean = tl.load(means + set_index * VALUE_DIM + element, mask=held, other=0).to(tl.float32)
    distance = tl.sqrt(tl.sum((value - mean) * (value - mean), 0))
    steps = tl.log2(tl.maximum(distance, 2.0**-16)) * STEPS + TO_WHOLE - TO_WHOLE
    code = tl.minimum(steps + 128, 255)
    tl.store(codes + batch * code_batch_stride + head * code_head_stride + row, code.to(tl.uint8))


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
    program, slot = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    set_index = program // rows
    batch, set_number = set_index // sets, set_index % sets
    tokens += batch.to(tl.int64) * batch_stride + set_number * set_stride
    turn = _mixed(set_number.to(tl.int64) + layer.to(tl.int64) * 65536)
    token = tl.load(tokens + slot, mask=slot < slots, other=0).to(tl.int64)
    turned = (_mixed(token + salt) + turn) & (NUMBERS - 1)
    number = (turned.to(tl.float32) + 0.5) / NUMBERS
    at = program.to(tl.int64) * slots + slot
    tl.store(
        ranked + at, tl.load(score + at, mask=slot < slots, other=0) / number, mask=slot < slots
    )


@triton.jit(do_not_specialize=["slots", "salt", "seed"])
def _random_numbers(
    tokens,  # the position of each slot's token
    positions, found, salt, seed, slots, sets, rows,
    batch_stride, set_stride,  # of `tokens`
    TILE: tl.constexpr,
):  # fmt: skip
    program, slot = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    row, set_index = program % rows, program // rows
    batch, set_number = set_index // sets, set_index % sets
    tokens += batch.to(tl.int64) * batch_stride + set_number * set_stride
    position = tl.load(positions + batch * rows + row).to(tl.int64)
    row_hash = _mixed(_mixed(_mixed(set_number.to(tl.int64) + salt) + seed) + position)
    token = tl.load(tokens + slot, mask=slot < slots, other=0).to(tl.int64)
    number = (_mixed(row_hash + token) >> 8).to(tl.float32)
    tl.store(found + program.to(tl.int64) * slots + slot, number, mask=slot < slots)


@triton.jit(do_not_specialize=["slots"])
def _log_weights(score, ranked, mask, found, slots, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64) * slots
    left_out = tl.zeros((TILE,), tl.float32)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        taken = tl.load(mask + program + slot, mask=slot < slots, other=1) != 0
        slot_scores = tl.load(ranked + program + slot, mask=~taken, other=0)
        left_out = tl.maximum(left_out, slot_scores)  # hidden tokens are below 0
    border = tl.max(left_out, 0)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        taken = tl.load(mask + program + slot, mask=slot < slots, other=0) != 0
        slot_scores = tl.load(score + program + slot, mask=taken, other=1.0)
        weight = tl.maximum(border / slot_scores, 1.0)
        tl.store(found + program + slot, tl.log(tl.where(taken, weight, 1.0)), mask=slot < slots)


@triton.jit
def _ordered(values):
    """fp32 as unsigned integers of the same order, 0 for hidden values."""
    bits = tl.where(values == 0, 0.0, values).to(
        tl.uint32, bitcast=True
    )  # zeros of either sign are equal
    ordered = bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000)
    return tl.where(values >= LOWEST, ordered, 0)


@triton.jit(do_not_specialize=["slots", "parts", "part_slots"])
def _take_largest(
    values, within, whole, cached,
    order,  # None: slots are taken as they lie
    mask, taken, slots, sets, rows,
    numbers,  # of each digit in each part, int32 [program, 4, parts, 256]
    reached,  # `least` and `wanted` after each digit, int32 [program, 4, 2]
    parts, part_slots,
    FRAC: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr,
    MEAN_OF: tl.constexpr,  # sets whose mean `within`, rounded up, limits the count; 0: no limit
    FIRST: tl.constexpr, LAST: tl.constexpr, PARTS: tl.constexpr,  # see `steps_of`
):  # fmt: skip
    program, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    row, batch = program % rows, program // rows // sets
    count = (tl.load(whole + batch * rows + row).to(tl.float64) * tl.full((), FRAC, tl.float64)).to(
        tl.int64
    )
    count = tl.minimum(tl.maximum(count, LEAST), tl.load(cached + batch * rows + row).to(tl.int64))
    if MEAN_OF > 0:
        one = tl.arange(0, MEAN_OF)
        counts = tl.load(within + (batch * sets + one) * rows + row, mask=one < sets, other=0)
        count = tl.minimum(count, tl.maximum(tl.sum(counts.to(tl.int64), 0) // sets, 1))
    if (program // rows % sets == 0) & (part == 0):
        tl.store(taken + batch * rows + row, count.to(tl.float64))

    values += program.to(tl.int64) * slots
    mask += program.to(tl.int64) * slots
    numbers += program * 4 * parts * 256
    reached += program * 8
    first = part * part_slots
    end = tl.minimum(first + part_slots, slots)
    wanted = count.to(tl.int32)  # of those that begin as `least` does, the largest so many
    least = tl.zeros((), tl.uint32)
    digit = tl.arange(0, 256)
    equal_before = 0
    for step in tl.static_range(FIRST, LAST + 1):
        if step > 0:
            if PARTS > 1:
                if step > 1:
                    least = tl.load(reached + step * 2 - 4).to(tl.uint32, bitcast=True)
                    wanted = tl.load(reached + step * 2 - 3)
                each = tl.arange(0, PARTS)[:, None]
                of_parts = numbers + ((step - 1) * parts + each) * 256 + digit[None, :]
                of_parts = tl.load(of_parts, mask=each < parts, other=0)
                number = tl.sum(of_parts, 0)
            alike_in_all = tl.sum(number, 0)
            wanted = tl.minimum(wanted, alike_in_all)
            above = alike_in_all - tl.cumsum(number, 0)  # with a larger digit
            found = (above < wanted) & (above + number >= wanted)
            digit_found = tl.sum(tl.where(found, digit, 0), 0)
            least |= digit_found.to(tl.uint32) << (32 - 8 * step)
            wanted -= tl.sum(tl.where(found, above, 0), 0)
            if PARTS > 1:
                if part == 0:
                    tl.store(reached + step * 2 - 2, least.to(tl.int32, bitcast=True))
                    tl.store(reached + step * 2 - 1, wanted)
                if step == 4:
                    is_before = (each < part) & (digit[None, :] == digit_found)
                    equal_before = tl.sum(tl.where(is_before, of_parts, 0))
        if step < 4:
            number = tl.zeros((256,), tl.int32)
            for start in range(first, end, TILE):
                slot = start + tl.arange(0, TILE)
                ordered = _ordered(tl.load(values + slot, mask=slot < end, other=float("-inf")))
                alike = (ordered > 0) & ((ordered ^ least) >> (24 - 8 * step) < 256)
                own_digit = (ordered >> (24 - 8 * step) & 255).to(tl.int32)
                number += tl.histogram(own_digit, 256, mask=alike)
            if PARTS > 1:
                tl.store(numbers + (step * parts + part) * 256 + digit, number)

    if LAST == 4:
        if order is not None:
            order += (program // rows).to(tl.int64) * slots
        for start in range(first, end, TILE):
            slot = start + tl.arange(0, TILE)
            within_row = slot < end
            if order is not None:
                slot = tl.load(order + slot, mask=within_row, other=0)
            ordered = _ordered(tl.load(values + slot, mask=within_row, other=float("-inf")))
            equal = ((ordered == least) & (ordered > 0)).to(tl.int32)
            rank = equal_before + tl.cumsum(equal, 0)
            chosen = (ordered > least) | ((equal > 0) & (rank <= wanted))
            tl.store(mask + slot, chosen & (count > 0), mask=within_row)
            equal_before += tl.sum(equal, 0)


def parts_of(slots: int, programs: int) -> int:
    """Parts into which each of `programs` rows is split."""
    return max(1, min(MOST_PARTS, PROGRAMS // programs)) if slots >= LONG and programs else 1


def steps_of(parts: int, slots: int, steps: int) -> Iterator[dict[str, int]]:
    """The launches of a kernel of so many steps: a launch a step, or one for all of a row's only
    part, which needs no memory for what parts find."""
    split = {"parts": parts, "part_slots": triton.cdiv(slots, parts)}
    if parts == 1:
        yield {**split, "FIRST": 0, "LAST": steps - 1, "PARTS": 1}
        return
    for step in range(steps):
        yield {**split, "FIRST": step, "LAST": step, "PARTS": MOST_PARTS}


def set_strides(tokens: Tensor) -> tuple[int, int]:
    """Strides of the batch and of the sets in [batch, 1 or sets, slots], 0 along what is shared."""
    return tokens.stride(0), tokens.stride(1) if tokens.shape[1] > 1 else 0


def relative(scores: Tensor, rows: QueryRows, alpha: float) -> tuple[Tensor, Tensor]:
    """Each set's r (see `Selecting.reduced`), -inf where a row sees no token, fp32 [batch, sets,
    rows, slots], and how many tokens have r >= -alpha, int32 [batch, sets, rows].

    scores: [batch, sets, heads of a set, rows, slots]; those of slots that are not visible may be
    anything.
    """
    batch, sets, group, num_rows, slots = scores.shape
    tokens = rows.slot_positions
    parts = parts_of(slots, batch * sets * num_rows)
    found = scores.new_empty((batch, sets, num_rows, slots), dtype=torch.float32)
    within = scores.new_empty((batch, sets, num_rows, parts), dtype=torch.int32)
    heads = triton.next_power_of_2(group)
    bests = found if parts == 1 else found.new_empty((*within.shape, heads))
    data = (scores.contiguous(), tokens, rows.positions.contiguous(), found, within, alpha)
    tile = max(1, coded.ELEMENTS // heads)
    shape = (slots, sets, num_rows, group, *set_strides(tokens), bests)
    for step in steps_of(parts, slots, 2):
        _relative[(within.numel(),)](*data, *shape, **step, HEADS=heads, TILE=tile)
    return found, within.squeeze(-1) if parts == 1 else within.sum(-1, dtype=torch.int32)


def summed_probs(scores: Tensor, rows: QueryRows, distances: Tensor | None = None) -> Tensor:
    """The probabilities of each set's heads, summed (`group=sum_probs`, see `Selecting.reduced`):
    fp32 [batch, sets, rows, slots]. scores: as in `relative`. distances: their factors, coded as by
    `methods.infinigen2.coded_distances`, uint8 [batch, sets, slots]."""
    batch, sets, group, num_rows, slots = scores.shape
    tokens = rows.slot_positions
    summed = scores.new_empty((batch, sets, num_rows, slots), dtype=torch.float32)
    heads = triton.next_power_of_2(group)
    shape = (slots, sets, num_rows, group)
    data = (scores.contiguous(), tokens, rows.positions.contiguous(), summed)
    factors = (distances, *(distances.stride()[:2] if distances is not None else (0, 0)))
    parts = parts_of(slots, batch * sets * num_rows)
    programs = batch * sets * num_rows * parts
    bests, totals = (summed, summed) if parts == 1 else summed.new_empty((2, programs, heads))
    sizes = (*shape, *set_strides(tokens), *factors, bests, totals)
    tile = max(1, coded.ELEMENTS // heads)
    for step in steps_of(parts, slots, 3):
        _summed_probs[(programs,)](*data, *sizes, **step, HEADS=heads, TILE=tile)
    return summed


def code_distances(values: Tensor, means: Tensor, codes: Tensor) -> None:
    """Write how far values lie from their head's mean, as `methods.infinigen2.coded_distances`.

    values: [batch, num_kv_heads, rows, value_dim]; means: [batch, num_kv_heads, 1, value_dim];
    codes: uint8 [batch, num_kv_heads, rows], overwritten.
    """
    batch, heads, num_rows, value_dim = values.shape
    values = values if values.stride(-1) == 1 else values.contiguous()
    _code_distances[(batch * heads * num_rows,)](
        values,
        means.contiguous(),
        codes,
        heads,
        num_rows,
        *values.stride()[:3],
        *codes.stride()[:2],
        VALUE_DIM=value_dim,
        ELEMENTS_OF_VALUE=triton.next_power_of_2(value_dim),
    )


def ranked(score: Tensor, rows: QueryRows, salt: int, layer: int, number_bits: int) -> Tensor:
    """As `methods.sampling.ranked`. salt: a hash of the seed. number_bits: of a token's number."""
    batch, sets, num_rows, slots = score.shape
    tokens = rows.slot_positions
    found = torch.empty_like(score)
    shape = (slots, sets, num_rows, *set_strides(tokens))
    sizes = {"NUMBERS": 2**number_bits, "TILE": coded.ELEMENTS}
    grid = batch * sets * num_rows, triton.cdiv(slots, coded.ELEMENTS)
    _ranked[grid](score, tokens, found, salt, layer, *shape, **sizes)
    return found


def random_numbers(salt: int, seed: int, rows: QueryRows, sets: int) -> Tensor:
    """As `methods.sampling.random_numbers`. salt: of the layer and the sample."""
    tokens = rows.slot_positions
    batch, num_rows = rows.positions.shape
    found_shape = (batch, sets, num_rows, tokens.shape[-1])
    found = torch.empty(found_shape, dtype=torch.float32, device=tokens.device)
    data = (tokens, rows.positions.contiguous(), found, salt, seed)
    shape = (tokens.shape[-1], sets, num_rows, *set_strides(tokens))
    grid = batch * sets * num_rows, triton.cdiv(tokens.shape[-1], coded.ELEMENTS)
    _random_numbers[grid](*data, *shape, TILE=coded.ELEMENTS)
    return found


def log_weights(score: Tensor, ranked: Tensor, mask: Tensor) -> Tensor:
    """As `methods.sampling.log_weights`."""
    score, ranked, mask = score.contiguous(), ranked.contiguous(), mask.contiguous()
    found = torch.empty_like(score)
    grid = (score.numel() // max(1, score.shape[-1]),)
    _log_weights[grid](score, ranked, mask, found, score.shape[-1], TILE=coded.ELEMENTS)
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
    counts = values if within is None else within
    given = (values, counts, whole.contiguous(), cached.contiguous(), order)
    cap = {"FRAC": frac, "LEAST": least, "MEAN_OF": mean_of}
    programs = batch * sets * num_rows
    parts = parts_of(slots, programs) if order is None else 1
    numbers = reached = taken
    if parts > 1:
        numbers = values.new_empty((programs, 4, parts, 256), dtype=torch.int32)
        reached = numbers.new_empty((programs, 4, 2))
    data = (*given, mask, taken, slots, sets, num_rows, numbers, reached)
    for step in steps_of(parts, slots, 5):
        _take_largest[(programs * parts,)](*data, **step, **cap, TILE=coded.ELEMENTS, num_warps=8)
    return mask, taken

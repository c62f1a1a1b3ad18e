"""Keys of an index in few bits, and scores on them.

A key is packed as `methods.codecs` does it: lo and step of each group of columns, then the codes.
In memory each byte of a key lies beside the same byte of the next token's (`room_for_keys`). A
query is multiplied with the codes themselves, and lo and step are applied to the products:

    query . key = sum over the groups of  lo * sum(query) + step * (query . codes)

with the sums over a group's columns. So no key is decoded, and a byte is read of many tokens at a
time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from methods.attention import MANY_ROWS, by_matrix, product
from methods.codecs.integers import GROUP_META_BYTES, IntegerCodec
from methods.compiled import kernels_for
from methods.packing import plane_width

BLOCK_BYTES = 2**19
"""Codes that a CPU holds as floats at a time, a part of a second-level cache."""


def room_for_keys(like: Tensor, num_slots: int) -> Tensor:
    """Memory for the packed keys of `num_slots` tokens, uint8 [batch, num_kv_heads, num_slots, row
    bytes]; like: a packed key of every head, [batch, num_kv_heads, 1, row bytes]."""
    batch, num_kv_heads, _, row_bytes = like.shape
    return like.new_empty((batch, num_kv_heads, row_bytes, num_slots)).mT


def coded_scores(query: Tensor, keys: Tensor, codec: IntegerCodec) -> Tensor:
    """Products of queries and coded keys: fp32 [batch, num_kv_heads, rows, slots].

    query: [batch, num_kv_heads, rows, columns]. keys: uint8 [batch, num_kv_heads, slots, row
    bytes], packed by an integer codec without rotation.
    """
    rows, columns = query.shape[2:]
    kernels = kernels_for(query)
    if kernels is not None and rows <= kernels.MOST_ROWS:
        return kernels.coded_scores(query, keys, codec.bits, codec.group_size)
    if query.device.type == "cpu":
        query = query.float()
        if rows >= MANY_ROWS:
            # To scale so many products takes longer than to decode the keys.
            decoded = codec.decode(keys.contiguous(), columns, torch.float32)
            return by_matrix(query, decoded.mT)
        products = _products_by_blocks(_by_group(query, codec), keys, columns, codec)
    else:
        codes = _codes_of(keys, columns, codec)
        num_codes = codes.shape[2] * 8 // codec.bits
        numbers = query.new_empty((*codes.shape[:2], num_codes, codes.shape[3]))
        unpack_to(codes, codec.bits, numbers)
        products = product(_by_group(query, codec), numbers)
    return _scaled(products, query, keys, codec)


def _codes_of(keys: Tensor, columns: int, codec: IntegerCodec) -> Tensor:
    """The bytes of the codes, uint8 [batch, num_kv_heads, bytes, slots]."""
    first = GROUP_META_BYTES * codec.num_groups(columns)
    return keys.mT[:, :, first : first + plane_width(columns, codec.bits)]


def _by_group(query: Tensor, codec: IntegerCodec) -> Tensor:
    """Queries [..., rows, columns] once for each group, with zeros in the other groups' columns:
    [..., groups * rows, columns], as many columns as the packed codes have."""
    columns = query.shape[-1]
    num_codes = plane_width(columns, codec.bits) * 8 // codec.bits
    padded = pad(query, (0, num_codes - columns)) if num_codes > columns else query
    num_groups = codec.num_groups(columns)
    if num_groups == 1:
        return padded
    group = torch.arange(num_codes, device=query.device) // codec.group_size
    is_own = group == torch.arange(num_groups, device=query.device)[:, None, None]
    return (padded.unsqueeze(-3) * is_own).flatten(-3, -2)


def _products_by_blocks(query: Tensor, keys: Tensor, columns: int, codec: IntegerCodec) -> Tensor:
    """Products of fp32 queries [batch, num_kv_heads, n, codes] with the codes, a few heads at a
    time, so that their codes stay in the cache between unpacking and product."""
    codes = _codes_of(keys, columns, codec).flatten(0, 1)
    heads, _, slots = codes.shape
    flat = query.flatten(0, 1)
    products = query.new_empty((heads, query.shape[2], slots))
    head_bytes = query.shape[3] * slots * query.element_size()
    at_once = min(heads, max(1, BLOCK_BYTES // max(1, head_bytes)))
    numbers = query.new_empty((at_once, query.shape[3], slots))
    for first in range(0, heads, at_once):
        block = slice(first, min(first + at_once, heads))
        block_numbers = numbers[: block.stop - first]
        unpack_to(codes[block], codec.bits, block_numbers)
        torch.bmm(flat[block], block_numbers, out=products[block])
    return products.unflatten(0, query.shape[:2])


def unpack_to(codes: Tensor, bits: int, numbers: Tensor) -> None:
    """Write the codes in packed bytes [..., bytes, slots] to `numbers`, of a float dtype, [..., 8 /
    bits * bytes, slots], plane by plane (`methods.codecs.base`)."""
    width = codes.shape[-2]
    for shift in range(0, 8, bits):
        shifted = codes >> shift if shift else codes
        if shift + bits < 8:  # else nothing lies above these bits
            shifted = shifted & (2**bits - 1)
        first = shift // bits * width
        numbers[..., first : first + width, :] = shifted


def _scaled(products: Tensor, query: Tensor, keys: Tensor, codec: IntegerCodec) -> Tensor:
    """Scores [batch, num_kv_heads, rows, slots] from products with codes [batch, num_kv_heads,
    groups * rows, slots], which are overwritten."""
    rows, columns = query.shape[2:]
    num_groups = codec.num_groups(columns)
    scale_bytes = keys.mT[:, :, : GROUP_META_BYTES * num_groups]
    words = scale_bytes[:, :, 1::2].short() << 8 | scale_bytes[:, :, ::2]  # low bytes come first
    scales = words.view(torch.float16).float()
    group_queries = query.float().split(codec.group_size, -1)
    scores = products[:, :, :rows]
    for group, group_query in enumerate(group_queries):
        lo, step = scales[:, :, 2 * group, None], scales[:, :, 2 * group + 1, None]
        part = products[:, :, group * rows : (group + 1) * rows]
        part.mul_(step).addcmul_(group_query.sum(-1, keepdim=True), lo)
        if group:
            scores += part
    return scores

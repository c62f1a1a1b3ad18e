"""What `aot` compiles: launches of the kernels as a session makes them, on CPU tensors that nothing is read from.

Apart from the tests, since a process of its own imports this module, and nothing more of them.
"""

import torch

from harness.offload.memory import Tuning
from methods.base import Rows
from methods.codec import Codec

COUNTS = ((384, 2048), (385, 2047), (1, 17))
"""Rows of a head and its capacity, which change from step to step."""
NUM_ROWS = (401, 416)
SLOTS = (2033, 2048)
"""Of two steps."""


def launch_moves(slot_bytes: int) -> None:
    """What a session launches when it opens, and then in its steps."""
    from harness.offload.kernels.rows import gather_rows, scatter_rows, warm

    def rows(count: int) -> torch.Tensor:
        return torch.empty(1, 2, count, slot_bytes, dtype=torch.uint8)

    warm(rows(7), torch.device("cpu"), Tuning())
    for num_rows, capacity in COUNTS:
        index = torch.empty(2 * num_rows + 1, dtype=torch.int64)[1:].view(1, 2, num_rows)  # aligned to 8 bytes only
        gather_rows(rows(capacity), index, rows(num_rows), None, Tuning())
        gather_rows(rows(capacity), index, rows(num_rows), index, Tuning())
        scatter_rows(rows(capacity), index, rows(num_rows), Tuning())


def launch_wide_moves() -> None:
    launch_moves(144)  # int4 rows of head_dim 128


def launch_narrow_moves() -> None:
    launch_moves(136)  # int8 rows of head_dim 64
    launch_moves(68)


def launch_lists() -> None:
    from harness.offload.kernels.rows import indices, missing_rows

    masks = [torch.empty(2, 1, num_slots, dtype=torch.bool).expand(-1, 3, -1) for _, num_slots in COUNTS]
    for mask, (num_rows, _) in zip(masks, COUNTS, strict=True):
        indices(mask, num_rows)
    for mask, (num_rows, _) in zip(masks, COUNTS, strict=True):
        missing_rows(mask, torch.empty(2, 3, num_rows, dtype=torch.int64))


def launch(codec: Codec, dtype: torch.dtype, heads: int, num_kv_heads: int, head_dim: int) -> None:
    from harness.offload.kernels.codes import attend, pack
    from harness.offload.store import RowFormat

    states, width = torch.empty(4, num_kv_heads, 1, head_dim, dtype=dtype), RowFormat(codec, head_dim, dtype).slot_bytes
    pack(states, states, codec, width)
    for num_rows in NUM_ROWS:
        rows = torch.empty(4, num_kv_heads, num_rows + 1, width, dtype=torch.uint8)[:, :, :num_rows]
        visible = torch.empty(4, num_kv_heads, 1, 1, num_rows, dtype=torch.bool)
        attend(states.new_empty(4, heads, 1, head_dim), rows, (states, states), visible, None, 0.1, codec)


def launch_attention() -> None:
    """A layer of OPT-13B."""
    launch(Codec("int4"), torch.float16, 40, 40, 128)


def launch_selections() -> None:
    """A layer of OPT-13B, and the scores of one with grouped queries."""
    from methods.kernels.selection import largest, relative

    for slots in SLOTS:
        tokens, positions = torch.empty(2, 1, 2048, dtype=torch.int32), torch.empty(2, 1, dtype=torch.int32)
        rows = Rows(tokens, positions, positions >= 0, tokens[..., :slots], positions, torch.Tensor)
        relative(torch.empty(2, 8, 4, 1, slots), rows, 4.0)
        found, within = relative(torch.empty(2, 40, 1, 1, slots), rows, 4.0)
        largest(found, within, frac=0.2, least=1, whole=positions, cached=positions)


def launch_evictions() -> None:
    """A layer of H2O and one of a pool, of OPT-13B."""
    from methods.kernels.evicting import evict_least, place_own, use

    positions, lengths = torch.empty(2, dtype=torch.int32), torch.empty(2, dtype=torch.int64)
    for slots in SLOTS:
        tokens = torch.empty(2, 40, slots + 1, dtype=torch.int32)
        worth, chosen = tokens.to(torch.float32), torch.empty(2, 40, slots, dtype=torch.bool)
        evict_least(worth, tokens, slots, positions, torch.empty(2, 2, dtype=torch.float64))
        place_own({"tokens": tokens, "worth": worth}, {"tokens": 1, "worth": 0}, slots - 1)
        use(chosen, tokens[..., :-1], (tokens, tokens, tokens), positions, (lengths, lengths), "counter")
        partial_keys = torch.empty(2, 40, slots + 1, 39, dtype=torch.float16)
        data = {"partial_keys": partial_keys, "tokens": tokens, "fetches": tokens, "last_fetch": tokens}
        place_own(data, dict.fromkeys(data, 0), slots - 1)


def launch_methods() -> None:
    """All kernels of methods, in one process."""
    launch_selections()
    launch_evictions()

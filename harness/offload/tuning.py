"""How rows cross the link fastest: what a device is asked for, and how its timings decide that.

Rows that are chosen one by one are moved by a kernel, which needs enough bytes under way at any time to cover the
link's latency, and only so many multiprocessors. Long pieces are faster by a copy engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CLOSE = 1.03
"""What takes up to so many times the least time is as good."""


@dataclass(frozen=True)
class Tuning:
    """Of one device and its link.

    num_programs: of the kernel that moves rows. bytes_in_flight: of rows, under way in all of them together.
    min_copy_bytes: of a contiguous piece, from which on a copy engine is faster than the kernel.
    The defaults cover the latency of PCIe 5 (some 1.5 us at 55 GB/s are 80 KiB) three times over.
    """

    num_programs: int = 64
    bytes_in_flight: int = 256 * 1024
    min_copy_bytes: int = 28 * 1024

    @property
    def tile_bytes(self) -> int:
        """Under way in one program."""
        return self.bytes_in_flight // self.num_programs


DEFAULT_TUNING = Tuning()
"""Where nothing was measured."""


def choose_gather(seconds: Mapping[tuple[int, int], float]) -> tuple[int, int]:
    """The number of programs and the bytes in flight, from what the same gather takes with each pair of them.

    The fewest programs that are close to the fastest pair, since each takes a multiprocessor from the computation, and
    with those the fewest bytes that are.
    """
    enough = CLOSE * min(seconds.values())
    return min(pair for pair, took in seconds.items() if took <= enough)


def choose_min_copy(kernel_s: Mapping[int, float], copy_s: Mapping[int, float]) -> int:
    """The bytes of a piece from which on copying is faster, from what either takes by the bytes of a piece.

    The smallest size timed above which the kernel is never faster again; twice the largest where it still is there.
    """
    sizes = sorted(kernel_s)
    kernel_wins = [size for size in sizes if kernel_s[size] < copy_s[size]]
    slower = [size for size in sizes if not kernel_wins or size > kernel_wins[-1]]
    return slower[0] if slower else 2 * sizes[-1]

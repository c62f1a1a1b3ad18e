"""Triton kernels of methods, imported only when a tensor lies on a GPU
(`methods.compiled.kernels_for`).

Slots are read in tiles, so no kernel is compiled for a number of slots, which grows with every
step. Equal to the torch code bit for bit; products and exponentials up to rounding. With
TRITON_INTERPRET=1 set before Triton is imported they run on CPU tensors.
"""

from methods.kernels.coded import MOST_ROWS, coded_product, coded_scores, encode
from methods.kernels.eigen import eigenvectors
from methods.kernels.eviction import evict_least, place_own
from methods.kernels.rest import index_of_rest
from methods.kernels.selection import (
    code_distances,
    largest,
    log_weights,
    random_numbers,
    ranked,
    relative,
    summed_probs,
)

__all__ = [
    "MOST_ROWS",
    "code_distances",
    "coded_product",
    "coded_scores",
    "eigenvectors",
    "encode",
    "evict_least",
    "index_of_rest",
    "largest",
    "log_weights",
    "place_own",
    "random_numbers",
    "ranked",
    "relative",
    "summed_probs",
]

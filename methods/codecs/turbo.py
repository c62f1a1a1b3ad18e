"""TurboQuant's quantiser (Zandieh et al., ICLR 2026) as vLLM has it: the coordinates of a rotated
row's direction, each as the nearest Lloyd-Max centroid of a normal distribution, and the row's
length.

The rule, and where it differs (made into docs/methods.md):

**turboquant4** and **turboquant3** are vLLM's `turboquant_4bit_nc` and `turboquant_k3v4_nc`
(`vllm/model_executor/layers/quantization/turboquant`); **turboquant2** goes on in the same way. A
key, after its position, is rotated by the Hadamard matrix and divided by its length; a coordinate,
times sqrt(head_dim), is nearly N(0, 1), and is coded as the nearest of its 2^bits Lloyd-Max
centroids (Max 1960). One number in fp16 gives a row its own length back (`norm_correction` there,
when it reads). A value has an integer code, one group a row. Bytes at head_dim 64: a key 2 + 32, 24
or 16, a value 4 + 32 (4 + 16 with `turboquant2`). The paper's second stage (QJL, 1 bit) is left
out, as in vLLM, which leaves the first two and the last two layers alone; here `dense_layers=2` is
the default, and `codec_layers=[28-:fp16]` names last layers. `codec=turbo4`, `turbo3` and `turbo2`
are the key's format for any method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from methods.codecs.base import Family, hadamard, in_range, to_half, total
from methods.packing import code_bytes, pack_codes, unpack_codes

TURBO_BITS = {"turbo4": 4, "turbo3": 3, "turbo2": 2}


@dataclass(frozen=True)
class TurboCodec(Family):
    """TurboQuant's quantiser of the squared error: a direction by Lloyd-Max centroids, and a
    length.

    With u the row's direction after the Hadamard rotation, sqrt(head_dim) * u_j is nearly N(0, 1):
    code_j is the number of the nearest of that distribution's 2^bits centroids c (Max 1960). A
    packed row is `[scale (fp16) | codes]`, with scale = |row| / |c_codes|: a row reads back with
    its own length, as vLLM's `norm_correction` does when it reads. Codes of 3 bits are packed as
    their two low bits and then their high bit.
    """

    name: str
    names = TURBO_BITS

    def bits_per_element(self, head_dim: int) -> float:
        """`bits`, and 16 for the row's scale."""
        return self.bits + 16 / head_dim

    def row_bytes(self, head_dim: int) -> int:
        return 2 + code_bytes(head_dim, self.bits)

    def encode(self, x: Tensor) -> Tensor:
        rows = hadamard(in_range(x))
        centroids, boundaries = normal_levels(self.bits, x.device)
        length = total(rows.square()).sqrt_()
        normal = rows * (rows.shape[-1] ** 0.5 / length.masked_fill(length == 0, 1.0))
        codes = torch.bucketize(normal.contiguous(), boundaries, out_int32=True)
        scale = to_half(length.div_(total(centroids[codes].square()).sqrt_()))
        return torch.cat([scale.view(torch.uint8), pack_codes(codes, self.bits)], dim=-1)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        scale = packed[..., :2].view(torch.float16).float()
        codes = unpack_codes(packed[..., 2:], self.bits, head_dim)
        centroids, _ = normal_levels(self.bits, packed.device)
        return hadamard(centroids[codes].mul_(scale)).to(dtype)


@cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The 2^bits centroids of N(0, 1) with the least expected squared error (Lloyd 1982; Max 1960),
    ascending.

    A boundary lies midway between two centroids; a centroid is the mean of its interval, (pdf(a) -
    pdf(b)) / (cdf(b) - cdf(a)). Both are repeated until nothing moves by more than 1e-12.
    """

    def pdf(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def cdf(x: float) -> float:
        return math.erf(x / math.sqrt(2)) / 2

    half = 2 ** (bits - 1)  # the others mirror it
    positive, moved = [4 * (number + 0.5) / half for number in range(half)], math.inf
    while moved > 1e-12:
        midways = [(low + high) / 2 for low, high in zip(positive, positive[1:], strict=False)]
        edges = [0.0, *midways, math.inf]
        means = [
            (pdf(a) - pdf(b)) / (cdf(b) - cdf(a)) for a, b in zip(edges, edges[1:], strict=False)
        ]
        moved = max(abs(after - before) for after, before in zip(means, positive, strict=True))
        positive = means
    return (*(-level for level in reversed(positive)), *positive)


@cache
def normal_levels(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Centroids and the boundaries between them, fp32 on a device, to which they are copied
    once."""
    centroids = torch.tensor(lloyd_max(bits), dtype=torch.float32, device=device)
    return centroids, (centroids[1:] + centroids[:-1]) / 2

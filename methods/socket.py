"""SOCKET (Joshi et al., 2026): soft collisions of hashes, with no key read to choose.

Official code: github.com/skylight-org/sparse-attention-hub, `socket_top_k.py` and
`utils/socket_utils.py` under `sparse_attention_hub/sparse_attention/research_attention/maskers/
fixed/implementations`; github.com/amarka8/SOCKET has the paper's settings.

The rule, and where it differs (made into docs/methods.md):

**socket** hashes a key by `tables` · `planes` (60 · 10) random planes w through the origin: a bit
says on which side of a plane the key lies, and the bits of a table are its bucket. A query's
probability of a bucket with corner c (c_p = ±1) is the softmax over the corners of
tanh(w · q) · c / (`tau` √head_dim), `tau` 0.4. A token's score is the sum over the tables of its
bucket's probability, times |v| (`value_weighted`). It reads the `num_sinks` (4) first tokens,
the most recent ones (`recent_frac`, 0.08 of those that are read), and the best. The index takes 76
bytes and a number of 16 bits a token. All layers and heads share the planes, which follow from
`seed`.

- The softmax over 2^`planes` corners is a product over the planes, σ(2 c_p tanh(w_p · q) /
  (`tau` √head_dim)). So no corner is listed here, and the scores are the same.
- `method=socket` has `value_weighted=false tau=0.8`, the class the paper's settings (below).
- √head_dim is in all official code and missing in the rule that its page states.
- The official code has a set for each query head (`group=union`); here a group's scores are added.
  Its 128 first and 128 recent of 32,768 tokens are shares here. It stores 16 bits a table, the
  bits alone are stored here.
- In the official code first and recent tokens compete for the places of the best, too. Those that
  win some leave them empty, so that it reads fewer tokens, and how many depends on the data. Here
  the places go to the next best.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from methods.base import Calibration, PromptRows, QueryRows
from methods.packing import code_bytes, pack_codes
from methods.projection import room_for_keys, tokens_of, unpack_to
from methods.selection import Retrieving, RetrievingState
from methods.settings import Allowed, least, setting

PRODUCT_BYTES = 2**24
"""Memory for the products of queries and hashes of some tables; one table always is."""


class SocketState(RetrievingState):
    """hashes[layer]: the side of each plane, packed bits, uint8 [batch, num_kv_heads, slots,
    bytes]. value_norms[layer]: fp16 [batch, num_kv_heads, slots]; none if not `value_weighted`.

    normals: of the planes, fp32 [batch, tables * planes, head_dim]; the same for all sequences.
    """

    sequence_tensors = ("normals",)
    slot_tensors = {"hashes": 0, "value_norms": 0}
    selects_without_own = True
    replayable = True
    normals: Tensor
    hashes: dict[int, Tensor]
    value_norms: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        method, device = self.method, self.lengths.final.device
        normals = plane_normals(method.num_bits, self.geometry.head_dim, method.seed)
        self.normals = normals.to(device).expand(len(self.lengths.final), -1, -1)

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        self.hashes[layer] = room_for_keys(self._hashed(key[:, :, :1]), rows.num_slots).zero_()
        if self.method.value_weighted:
            shape = (*key.shape[:2], rows.num_slots)
            self.value_norms[layer] = torch.zeros(shape, dtype=torch.float16, device=key.device)
        super().prompt(layer, query, key, value, rows)

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice | Tensor
    ) -> None:
        self.hashes[layer][:, :, slots] = self._hashed(key)
        if self.method.value_weighted:
            self.value_norms[layer][:, :, slots] = value.float().norm(dim=-1).half()

    def _hashed(self, key: Tensor) -> Tensor:
        """The sides of the planes on which keys [..., head_dim] lie: packed bits, uint8 [...,
        bytes]."""
        is_above = key.float() @ self.normals[0].mT >= 0
        return pack_codes(is_above.int(), 1)

    def scores(self, layer: int, rows: QueryRows) -> Tensor:
        """Collisions times the length of the value.

        A bit b of 0 or 1 has the probability sigmoid(2 a (2 b - 1)), with a the query's part of the
        plane's logit. Its logarithm is 2 a b + log sigmoid(-2 a), so that the logarithm of a
        bucket's probability is a product with its bits, and a sum that all buckets share.
        """
        method, num_slots = self.method, rows.slot_positions.shape[-1]
        query = rows.query.float().unflatten(1, (self.geometry.num_kv_heads, -1)).flatten(2, 3)
        sharpness = 1 / (method.tau * math.sqrt(self.geometry.head_dim))
        logits = 2 * sharpness * torch.tanh(query @ self.normals[0].mT)
        table_logits = logits.unflatten(-1, (method.tables, method.planes)).transpose(2, 3)
        if_all_zero = logsigmoid(-table_logits).sum(
            -1, keepdim=True
        )  # [batch, kv, tables, rows, 1]
        packed = self.hashes[layer][:, :, :num_slots].mT  # a byte of all tokens lies in one piece
        bits = query.new_empty((*packed.shape[:2], 8 * packed.shape[2], num_slots))
        unpack_to(packed, 1, bits)
        bits = bits[:, :, : method.num_bits].unflatten(2, (method.tables, method.planes))
        shape = (*query.shape[:3], num_slots)
        collisions = query.new_zeros(shape)
        at_once = max(1, PRODUCT_BYTES // max(1, 4 * collisions.numel()))
        for first in range(0, method.tables, at_once):
            part = slice(first, first + at_once)
            log_probs = table_logits[:, :, part] @ bits[:, :, part] + if_all_zero[:, :, part]
            collisions += log_probs.exp_().sum(2)
        if method.value_weighted:
            collisions *= self.value_norms[layer][:, :, None, :num_slots].float()
        return collisions.unflatten(2, (self.geometry.group, -1))

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """The bits of every token, and the length of its value; once a row, the planes, which the
        KV heads share: every query meets all of them."""
        method, geometry = self.method, self.geometry
        bits = 8 * code_bytes(method.num_bits, 1) + 16 * method.value_weighted
        token_size = positions.double() * (bits / (16 * geometry.elements))
        return token_size + tokens_of(self.normals[0], geometry) / geometry.num_kv_heads


@dataclass(frozen=True)
class Socket(Retrieving):
    """Reads first and recent tokens, and the best by soft collisions. Defaults are the paper's for
    RULER at a twentieth of the tokens.

    Source: SOCKET (2026)
    Keeps: every token; hashes of its key, the length of its value
    Reads: first and recent tokens, and the best by soft collisions of hashes
    """

    tables: int = setting(60, "hashes of a key, L", least(1))
    planes: int = setting(
        10,
        "bits of a hash, P",
        Allowed("an integer from 1 to 16", lambda value: 1 <= value <= 16),
    )
    tau: float = setting(
        0.4,
        "temperature of the softmax over a hash's corners",
        Allowed("a number > 0", lambda value: value > 0),
    )
    value_weighted: bool = setting(True, "a token's score counts the length of its value")
    seed: int = setting(0, "of the planes", least(0))

    budget: float = 0.05
    num_sinks: int = 4
    recent_frac: float = 0.08
    group: str = "sum_logits"

    title = "SOCKET"
    state = SocketState

    @property
    def num_bits(self) -> int:
        """Bits of all hashes of a key."""
        return self.tables * self.planes


def plane_normals(count: int, head_dim: int, seed: int) -> Tensor:
    """Independent standard normal vectors, fp32 [count, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, head_dim, generator=generator)

"""One layer's cache where the method holds the keys: the store has values only, and some tokens stay on the device.

What stays of the prompt is the state's to say; all that is generated follows. These rows are exact, and a step reads
them beside those it fetches, whose keys the state gives back while their values cross the link.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.offload.cache import LayerCache
from harness.offload.compact import indices
from harness.offload.fetch import Fetched
from harness.offload.store import KeyValue
from methods.base import Selection


@dataclass
class ValuesCache(LayerCache):
    """See `LayerCache`."""

    def keep_prompt(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        super().keep_prompt(query, key, value)
        assert self.state is not None
        mask = self.state.resident(self.layer)
        slots = indices(mask, max(self.method.tokens_resident(row, self.layer) for row in self.batch.rows(0)))
        index = slots.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, key.shape[-1])
        room = (0, 0, 0, self.batch.max_new_tokens)
        self.keys, self.values = (pad(part.gather(2, index), room) for part in (key, value))
        self.present = slots >= 0
        self.num_prompt = slots.shape[-1]

    def parts(self, fetched: Fetched) -> list[KeyValue]:
        rows = self.num_prompt + self.batch.steps
        rebuilt = KeyValue(self.fetched_keys, self.store.unpack(fetched.rows).values)
        return [rebuilt, KeyValue(self.keys[:, :, :rows], self.values[:, :, :rows])]

    def visible(self, fetched: Fetched) -> Tensor:
        assert fetched.present is not None
        generated = self.present.new_ones(*self.present.shape[:2], self.batch.steps)
        return torch.cat([fetched.present, self.present, generated], -1).unsqueeze(2)

    @property
    def device_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.present.nbytes

    def request_selected(self, selection: Selection) -> Tensor:
        slots = super().request_selected(selection)
        assert self.state is not None
        self.fetched_keys = self.state.rebuild(self.layer, slots)  # beside the transfer
        return slots

    def keep_own(self, key: Tensor, value: Tensor) -> None:
        own = self.num_prompt + self.batch.steps
        self.keys[:, :, own : own + 1], self.values[:, :, own : own + 1] = key, value

"""DuoAttention (Xiao et al., ICLR 2025): some KV heads stream, the others, which retrieve, keep everything.

A head's gate says how much it looks far back; the heads of the smallest gates keep the first and the most recent tokens
only. Gates come from a file such as the authors trained, or are measured on a text without training (as in kvpress):
the mean query attends to the mean key at 500 positions, and the more of it falls on the early ones, the larger the
gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from methods.base import Calibration, Geometry, Lengths, Method, Row
from methods.checks import require, require_fraction
from methods.windowed import WindowState


@dataclass(frozen=True)
class DuoAttention(Method):
    """Of the KV heads of the layers that are not exempt, round(sparsity * their number) stream.

    num_sinks, num_recent: tokens that these keep; the defaults are those that the authors deploy.
    pattern: a file of gates, a line a layer and a column a KV head, apart by tabs; None measures them.
    """

    sparsity: float = 0.5
    num_sinks: int = 64
    num_recent: int = 256
    pattern: str | None = None

    title = "DuoAttention"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("sparsity", self.sparsity, zero=True)
        require(self.num_sinks >= 0, "num_sinks", self.num_sinks, "an integer >= 0")
        require(self.num_recent >= 1, "num_recent", self.num_recent, "an integer >= 1")
        require(self.file is None or Path(self.file).is_file(), "pattern", self.pattern, "a file that exists, or null")

    @property
    def file(self) -> str | None:
        """The pattern."""
        return None if self.pattern is None else str(Path(self.pattern).expanduser())

    @property
    def needs_calibration(self) -> bool:
        """Without a pattern."""
        return self.pattern is None

    def calibrate_layer(
        self, query: Tensor, key: Tensor, geometry: Geometry, earlier: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """gates: fp32 [num_kv_heads], the group's mean."""
        layer = len(earlier)
        text, ahead = (torch.arange(n, device=query.device)[None] for n in (query.shape[1], 500))
        plain = (geometry.rotate(states[None], text, inverse=True, layer=layer).float() for states in (query, key))
        means = (states.mean(2, keepdim=True).expand(-1, -1, ahead.shape[1], -1) for states in plain)
        mean_query, mean_key = (geometry.rotate(states, ahead, layer=layer) for states in means)
        softmax = geometry.softmax(layer)
        probs = softmax.weights(softmax.scores(mean_query[:, :, -1:], mean_key))
        return {"gates": probs[0, :, :, 0].cumsum(-1).mean((1, 2))}

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> DuoState:
        """ValueError where there are no gates, or none of this shape, or they tell no head from another."""
        return DuoState(self, geometry, lengths, self._gates(geometry, calibration).to(lengths.final.device))

    def tokens_read(self, row: Row, layer: int) -> float:
        """As if `sparsity` times the number of heads were whole: half a head's tokens off, at most."""
        window = min(row.cached, self.num_sinks + self.num_recent)
        return (1 - self.sparsity) * row.cached + self.sparsity * window

    def with_size(self, frac: float) -> Self:
        """The share of heads that retrieve: the size grows with it, from that of the windows alone."""
        return replace(self, sparsity=1 - frac)

    def _gates(self, geometry: Geometry, calibration: Calibration | None) -> Tensor:
        """fp32 [num_layers, num_kv_heads]."""
        if self.file is None:
            require(calibration is not None, "pattern", None, "a file where nothing is calibrated; calibrate first")
            assert calibration is not None
            gates = calibration["gates"]
            differ = bool((gates != gates[0, 0]).any())
            require(differ, "pattern", None, f"a file: {geometry.family} has no rotary positions to measure gates by")
            return gates
        shape = (geometry.num_layers, geometry.num_kv_heads)
        try:
            gates = torch.from_numpy(np.loadtxt(self.file, delimiter="\t", ndmin=2)).float()
        except (OSError, ValueError) as error:
            raise ValueError(f"method.pattern={self.pattern}: must be numbers apart by tabs ({error})") from error
        fits = tuple(gates.shape) == shape and bool(gates.isfinite().all())
        require(fits, "pattern", self.pattern, f"{shape[0]} lines of {shape[1]} finite numbers, a KV head each")
        return gates


class DuoState(WindowState):
    """heads: bool [num_layers, num_kv_heads], which of them stream."""

    def __init__(self, method: DuoAttention, geometry: Geometry, lengths: Lengths, gates: Tensor) -> None:
        super().__init__(method, geometry, lengths)
        selecting = gates[method.num_exempt_layers :].flatten()
        first = selecting.argsort(stable=True)[: round(method.sparsity * len(selecting))]
        self.heads = torch.zeros_like(gates, dtype=torch.bool)
        self.heads.view(-1)[first + gates.shape[1] * method.num_exempt_layers] = True

    @property
    def recent(self) -> Tensor:
        """As many of every sequence, int [batch]."""
        return torch.full_like(self.lengths.final, self.method.num_recent)

    def streams(self, layer: int) -> Tensor:
        """Where the gate is small."""
        return self.heads[layer, :, None, None]

"""SnapKV (Li et al., NeurIPS 2024): after the prompt, keep what its last rows attended to, and these rows.

The attention of the last `window` rows over all keys, summed over them and the group, is smoothed along the tokens;
the tokens of the largest values stay, and everything generated. The original chooses a set per query head and so holds
a group's tokens several times; here a set is shared by a KV head's group. `layers=pyramid` is PyramidKV (Cai et al.,
2024), `heads=adaptive` Ada-KV (Feng et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from methods.base import PromptRows
from methods.checks import require, require_one_of
from methods.prompt_evicting import PromptEvicting, PromptEvictingState
from methods.received import received_attention


class SnapKVState(PromptEvictingState):
    """A prompt token's worth is the smoothed attention that it received from the window."""

    def prompt_worth(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> Tensor:
        """The window's own tokens neither give nor take in the smoothing."""
        before = max(0, key.shape[2] - self.method.window)
        worth = received_attention(query, key, rows.real, self.geometry.softmax(layer), first=before)
        pool = max_pool1d if self.method.pooling == "max" else avg_pool1d
        if before:
            width = self.method.kernel
            worth[..., :before] = pool(worth[..., :before], width, stride=1, padding=width // 2)
        return worth


@dataclass(frozen=True)
class SnapKV(PromptEvicting):
    """kernel, pooling: width (odd) and kind (max, avg) of the smoothing. Defaults: the paper's LongBench runs."""

    window: int = 32
    kernel: int = 7
    pooling: str = "max"

    title = "SnapKV"
    state = SnapKVState

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.window >= 1, "window", self.window, "an integer >= 1")
        require(self.kernel >= 1 and self.kernel % 2 == 1, "kernel", self.kernel, "an odd integer >= 1")
        require_one_of("pooling", self.pooling, ("max", "avg"))

    @property
    def label(self) -> str:
        """Shared budgets have names of their own."""
        pyramid, adaptive = self.layers == "pyramid", self.heads == "adaptive"
        if pyramid and adaptive:
            return "Ada-PyramidKV"
        return "PyramidKV" if pyramid else "Ada-KV" if adaptive else self.title

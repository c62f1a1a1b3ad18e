"""Figure 2: bytes of the KV cache beside those of the weights, in fp16, from the model's configuration alone.

(a) against the sequence length at batch 16, (b) against the batch size at 2,048 tokens, as in the paper. No weights are
read: the model is built without memory to count them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from harness.errors import refused
from harness.model.described import model_config
from harness.model.shape import WEIGHT_BYTES
from harness.paper.analysis.points import Point
from harness.settings.experiment import Outcome
from harness.settings.run import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BATCH_SIZE, SEQ_LEN = 16, 2048
SEQ_LENS = (256, 512, 1024, 2048, 4096, 8192)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


def run_memory(config: RunConfig) -> Outcome:
    """The points of `config.model`; UserError where its shape is not known."""
    from harness.model import checks

    name, described = f"model {config.model.name}", model_config(config.model)
    weights = WEIGHT_BYTES * checks.count(name, described)
    with refused(f"{name}: its configuration does not tell the size of its KV cache"):
        points = list(_points(described, weights))
    return Outcome({"source": "modelled", "points": [asdict(point) for point in points]})


def kv_bytes(described: PreTrainedConfig, batch_size: int, seq_len: int) -> int:
    """Bytes of the full KV cache of `batch_size` sequences of `seq_len` tokens.

    A sliding layer caches its window only; multi-head latent attention caches one latent and one rotary key for all
    heads. A recurrent layer (linear attention, state space) caches no tokens, and its state is not counted.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    elements = 0
    for layer, cached in zip(described.per_layer_config, DynamicCache(config=described).layers, strict=True):
        if not isinstance(cached, DynamicLayer):
            continue
        heads = layer.num_attention_heads
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        of_token = 2 * (getattr(layer, "num_key_value_heads", None) or heads) * head_dim
        if latent := getattr(layer, "kv_lora_rank", None):
            of_token = latent + layer.qk_rope_head_dim
        elements += of_token * min(seq_len, getattr(cached, "sliding_window", None) or seq_len)
    return batch_size * elements * WEIGHT_BYTES


def _points(described: PreTrainedConfig, weights: int) -> Iterator[Point]:
    cells = [("seq_len", seq_len, BATCH_SIZE, seq_len) for seq_len in SEQ_LENS]
    cells += [("batch_size", batch_size, batch_size, SEQ_LEN) for batch_size in BATCH_SIZES]
    for x_name, x, batch_size, seq_len in cells:
        yield Point("KV cache", "bytes", kv_bytes(described, batch_size, seq_len), x_name, x)
        yield Point("weights", "bytes", weights, x_name, x)

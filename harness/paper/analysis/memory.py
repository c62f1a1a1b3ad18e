"""Figure 2: bytes of the KV cache beside those of the weights, in fp16, from the model's shape alone.

(a) against the sequence length at batch 16, (b) against the batch size at 2,048 tokens, as in the paper. Nothing is
loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from harness.model.described import model_config
from harness.model.shape import ModelShape
from harness.paper.analysis.points import Point
from harness.settings.experiment import Outcome
from harness.settings.run import RunConfig

BATCH_SIZE, SEQ_LEN = 16, 2048
SEQ_LENS = (256, 512, 1024, 2048, 4096, 8192)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


def run_memory(config: RunConfig) -> Outcome:
    """The points of `config.model`; UserError where its shape is not known."""
    shape = ModelShape.from_config(config.model.name, model_config(config.model).to_dict())
    return Outcome({"source": "modelled", "points": [asdict(point) for point in _points(shape)]})


def kv_bytes(shape: ModelShape, batch_size: int, seq_len: int) -> int:
    """Bytes of the full KV cache of `batch_size` sequences of `seq_len` tokens."""
    return batch_size * seq_len * shape.num_layers * shape.token_bytes


def _points(shape: ModelShape) -> Iterator[Point]:
    cells = [("seq_len", seq_len, BATCH_SIZE, seq_len) for seq_len in SEQ_LENS]
    cells += [("batch_size", batch_size, batch_size, SEQ_LEN) for batch_size in BATCH_SIZES]
    for x_name, x, batch_size, seq_len in cells:
        yield Point("KV cache", "bytes", kv_bytes(shape, batch_size, seq_len), x_name, x)
        yield Point("weights", "bytes", shape.weight_bytes, x_name, x)

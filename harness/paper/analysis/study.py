"""One analysis as a run: of a loaded model's text and layers, or of its configuration alone (Figure 2).

python run.py experiment=fig5 analysis.num_tokens=4096 analysis.layers=[0,10,20]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from harness.data.text import corpus_ids, first_window_offset
from harness.errors import UserError, refused
from harness.model.attach import attach
from harness.model.load import LoadedModel, model_config
from harness.model.shape import WEIGHT_BYTES, count_weights
from harness.paper.analysis import attention, states
from harness.paper.analysis.dense import Point, Subject
from harness.settings.config import RunConfig
from harness.settings.experiment import Outcome

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STATISTICS: dict[str, Callable[[Subject], Sequence[Point]]] = {
    "similarity": attention.similarity,
    "key_tokens": attention.key_tokens,
    "columns": states.columns,
    "layer_inputs": states.layer_inputs,
    "sparsity": attention.sparsity,
}
"""By `analysis.statistic`; `memory` is `run_memory`, which needs no weights."""
BATCH_SIZE, SEQ_LEN = 16, 2048
SEQ_LENS = (256, 512, 1024, 2048, 4096, 8192)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


def run_analysis(config: RunConfig, loaded: LoadedModel) -> Outcome:
    """The statistic of `config`, as points.

    Raises UserError for a text or a model shorter than `analysis.num_tokens`, a layer that the model does not have, or
    a model that the statistic is not defined for.
    """
    num_tokens = config.analysis.num_tokens
    if num_tokens > loaded.max_length:
        raise UserError(f"analysis.num_tokens={num_tokens}: {loaded.name} takes at most {loaded.max_length} tokens")
    offset = first_window_offset(config.corpus, config.calibration)
    ids = corpus_ids(config.corpus, config.data, loaded.tokenizer)[offset:]
    if len(ids) < num_tokens:
        raise UserError(
            f"analysis.num_tokens={num_tokens}: the text has {len(ids)} tokens from token {offset} on; choose a "
            "longer one"
        )
    assert config.analysis.statistic is not None, "RunConfig checks it"
    with attach(loaded.model) as attached:
        attached.require_length(num_tokens)
        tokens = torch.tensor([ids[:num_tokens]], device=attached.device)
        points = STATISTICS[config.analysis.statistic](Subject(config, loaded, attached, tokens))
    return Outcome({"source": "measured", "points": [asdict(point) for point in points]})


def run_memory(config: RunConfig) -> Outcome:
    """Figure 2: bytes of the KV cache beside those of the weights, in fp16: (a) against the sequence length at batch
    16, (b) against the batch size at 2,048 tokens, as in the paper.

    No weights are read: the model is built without memory to count them. UserError where its shape is not known.
    """
    name, described = f"model {config.model.name}", model_config(config.model)
    weights = WEIGHT_BYTES * count_weights(name, described)
    cells = [("seq_len", seq_len, BATCH_SIZE, seq_len) for seq_len in SEQ_LENS]
    cells += [("batch_size", batch_size, batch_size, SEQ_LEN) for batch_size in BATCH_SIZES]
    points = []
    with refused(f"{name}: its configuration does not tell the size of its KV cache"):
        for x_name, x, batch_size, seq_len in cells:
            points.append(Point("KV cache", "bytes", kv_bytes(described, batch_size, seq_len), x_name, x))
            points.append(Point("weights", "bytes", weights, x_name, x))
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

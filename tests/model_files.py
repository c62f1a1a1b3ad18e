"""Model files in the formats that users have, tiny and random."""

from pathlib import Path

import gguf
import numpy as np

from harness.model.tiny import VOCAB_SIZE

TINY_SHAPE = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}


def write_gguf(path: Path) -> Path:
    """A two-layer Llama in float16 with a byte-level tokenizer, as llama.cpp's converter would write it."""
    shape = TINY_SHAPE
    hidden, ffn, head_dim = shape["hidden_size"], shape["intermediate_size"], 16
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "block_count": shape["num_hidden_layers"], "context_length": shape["max_position_embeddings"],
        "embedding_length": hidden, "feed_forward_length": ffn, "head_count": shape["num_attention_heads"],
        "head_count_kv": shape["num_key_value_heads"], "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0,
        "vocab_size": VOCAB_SIZE, "tokenizer_model": "gpt2", "bos_token_id": 1, "eos_token_id": 2,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    alphabet = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    alphabet += [chr(256 + i) for i in range(VOCAB_SIZE - len(alphabet))]
    alphabet[-1] = "ab"
    writer.add_token_list(alphabet)
    writer.add_token_merges(["a b"])
    draw = np.random.default_rng(0)

    of_layer = {
        "attn_q": (hidden, hidden), "attn_k": (head_dim, hidden), "attn_v": (head_dim, hidden),
        "attn_output": (hidden, hidden), "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn),
        "attn_norm": (hidden,), "ffn_norm": (hidden,),
    }  # fmt: skip
    tensors: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB_SIZE, hidden), "output": (VOCAB_SIZE, hidden)}
    tensors["output_norm"] = (hidden,)
    for layer in range(shape["num_hidden_layers"]):
        tensors |= {f"blk.{layer}.{name}": size for name, size in of_layer.items()}
    for name, size in tensors.items():
        writer.add_tensor(f"{name}.weight", draw.normal(0, 0.1, size).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

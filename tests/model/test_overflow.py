"""A model whose activations overflow in float16 is refused at its first pass, in replay and in live decoding."""

import random

import pytest

from harness.run.cli import main
from harness.scoring import perplexity
from tests.tiny_models import tiny_model
from tests.tokens import byte_tokenizer

LENGTHS = "prefill_len=32 seq_len=64 num_windows=2 max_new_tokens=4"
KINDS = {
    "perplexity": f"experiment=perplexity {LENGTHS}",
    "generate": "experiment=generate prompt=hello max_new_tokens=4 placement=device",
}
SAID = "error: model.dtype=float16: the model's activations overflow in it (beyond 65504); choose bfloat16 or float32"


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> list[str]:
    """A tiny model whose third layer writes beyond the range of float16, and a text."""
    folder = tmp_path_factory.mktemp("large")
    model = tiny_model("llama", num_key_value_heads=2, max_position_embeddings=2048)
    model.model.layers[2].mlp.down_proj.weight.data.fill_(6e4)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    text = folder / "text.txt"
    text.write_text("".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz \n", k=2000)))
    texts = [f"corpus.path={text}", f"calibration.path={text}", "calibration.num_tokens=80"]
    return [f"model.path={folder}", *texts]


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_is_one_line(kind, settings, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(perplexity, "score_rows", lambda *_: pytest.fail("the first window's pass is refused"))
    assert main([*KINDS[kind].split(), "method=h2o", "model.dtype=float16", *settings]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == SAID


@pytest.fixture(scope="module")
def large_keys(tmp_path_factory):
    """A tiny model whose third layer has a key channel beyond fp16, below 0: integer codecs store a minimum."""
    folder = tmp_path_factory.mktemp("keys")
    model = tiny_model("qwen2", num_key_value_heads=2, max_position_embeddings=2048)
    model.model.layers[2].self_attn.k_proj.bias.data[3] = -2e5
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return f"model.path={folder}"


@pytest.mark.parametrize(("kind", "codec"), [("perplexity", "int4"), ("generate", "fp16")])
def test_keys_that_a_codec_cannot_hold_name_codec_and_layer(
    kind, codec, large_keys, settings, tmp_path, monkeypatch, capsys
):
    """Replay blamed the model's weights, and live decoding went on with NaN."""
    monkeypatch.chdir(tmp_path)
    line = [*KINDS[kind].split(), "method=full", *settings[1:], large_keys]
    assert main([*line, f"codec={codec}"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert (
        said.startswith(f"error: codec={codec}: the keys of layer 2 reach ")
        and "up to 65504; choose codec=bf16" in said
    )
    if codec == "int4":
        assert main([*line, "codec=int4", "codec_layers=[2:bf16]"]) == 0

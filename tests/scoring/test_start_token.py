"""A tokenizer that starts every text with a token: each kind of run gives the model that token once, at the front. One
that also ends every text with a token: no run gives the model that token."""

import pytest

import harness
from harness.data.text import offline_text, token_ids
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.scoring.evaluation import run_tasks, run_turns
from harness.scoring.perplexity import run_perplexity
from harness.speed.latency import run_latency
from tests.tiny_models import tiny_model
from tests.tokens import framing_tokenizer, starting_tokenizer

SHORT = {"seq_len": 96, "prefill_len": 32, "calibration.num_tokens": 64, "platform.link_gbps": 1, "num_windows": 2}
MIXED = {
    "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 32, "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 24, "max_position_embeddings": 2048,
}  # fmt: skip
START, END = starting_tokenizer().bos_token_id, starting_tokenizer().eos_token_id


@pytest.fixture(scope="module")
def network():
    """Layers with windows between layers that see every token, as Gemma has."""
    model = tiny_model("gemma2", **MIXED)
    with attach(model):
        pass  # the check at the first use, whose ids are numbers in a row
    return model


@pytest.fixture
def model(request, network, tmp_path, monkeypatch):
    """With a tokenizer that starts and ends every text, where a test asks for no other."""
    make_tokenizer = getattr(request, "param", framing_tokenizer)
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))  # so that it calibrates
    return harness.load(network, make_tokenizer(), results_dir=str(tmp_path / "results"), **SHORT)


both_tokenizers = pytest.mark.parametrize("model", [starting_tokenizer, framing_tokenizer], indirect=True)


@pytest.fixture
def prompts(monkeypatch):
    """The real tokens of every sequence that a pass began, in order: of passes over the first rows alone."""
    seen = []
    forward = Attached.forward

    def watched(self, ids, positions, handler, cache=None, real=None):
        if cache is None or cache.num_columns == 0:
            for row, is_real in zip(ids.tolist(), (real if real is not None else ids >= 0).tolist(), strict=True):
                seen.append([token for token, keep in zip(row, is_real, strict=True) if keep])
        return forward(self, ids, positions, handler, cache, real)

    monkeypatch.setattr(Attached, "forward", watched)
    return seen


def assert_started(prompts):
    assert prompts
    for prompt in prompts:
        assert prompt[0] == START and prompt.count(START) == 1 and END not in prompt, prompt


def text_from(offset, count):
    return token_ids(offline_text(), starting_tokenizer())[offset : offset + count]


@both_tokenizers
def test_windows_and_calibration(model, prompts):
    for method in ("full", "infinigen"):  # in one call they would share the windows' prompts
        model.perplexity(methods=[method])
    assert_started(prompts)
    lengths = [len(prompt) for prompt in prompts]
    assert 64 in lengths and {*lengths} <= {32, 64}, "the token counts as one of the prompt's and of the calibration's"
    assert [START, *text_from(0, 63)] in prompts, "calibration"
    assert [START, *text_from(64, 31)] in prompts and [START, *text_from(64 + 95, 31)] in prompts, "windows"


@both_tokenizers
def test_generate(model, prompts):
    made = model.generate("A cache", method="infinigen", budget=0.7, max_new_tokens=4)
    assert_started(prompts)
    assert made.num_prompt_tokens == 1 + len("A cache") and str(made).startswith(f"A cache{made.text}")
    assert model.generate("<s>A cache", method="full", max_new_tokens=4).num_prompt_tokens == made.num_prompt_tokens


def test_tasks_and_turns(model, prompts):
    asked = {"tasks": ["kv_recall"], "method": "keydiff", "num_samples": 2}
    for experiment, run in (("tasks", run_tasks), ("turns", run_turns)):
        prompts.clear()
        run(model.configured({}, {"experiment": experiment, **asked}), model.loaded)
        assert_started(prompts)


def test_long_decoding(model, prompts):
    config = model.configured({}, {"experiment": "long_decode", "method": "keydiff", "max_new_tokens": 4})
    run_perplexity(config, model.loaded)
    assert_started(prompts)
    assert {tuple(prompt[:32]) for prompt in prompts} == {(START, *text_from(at, 31)) for at in (64, 64 + 31)}


def test_a_timed_run(model, prompts):
    about = {"experiment": "latency", "method": "keydiff", "prompt_len": 24, "gen_len": 20, "batch_size": 2}
    run_latency(model.configured({}, about), model.loaded)
    assert_started(prompts)
    whole = {tuple(prompt) for prompt in prompts if len(prompt) > 1}  # a pass of one token warms up
    assert whole == {(START, *text_from(at, 23)) for at in (64, 64 + 23)}

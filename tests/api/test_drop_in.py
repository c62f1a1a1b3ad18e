"""A model inside `harness.attach` is a drop-in: whoever calls it runs on the method's cache, and it is left as it was.

With the full cache all results are the bare model's. With a method they are those of `generate`, and of replay.
"""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, pipeline

import harness
from harness.api.cached_model import CachedModel
from harness.checks.families import tiny_family
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.prompts import run_prompt
from harness.replay.session import Setup
from methods.full import Full
from tests.cases import CASES, Case
from tests.conftest import refused, tiny
from tests.living import PROMPT, PROMPTS, attached_with_link, replay_ids, setup_of, token_batch
from tests.replaying import open_session
from tests.tiny_models import tiny_model
from tests.tokens import byte_tokenizer

NEW = 6
PLAIN = {"calibration.num_tokens": 64, "platform.link_gbps": 1}
METHODS = {"full": None, "infinigen": "nearest:0.6", "h2o": "nearest:0.7", "int4": None}
TEXTS = ["What is a cache?", "A cache of keys and values", "Keys"]


@pytest.fixture
def model(network):
    return network


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def attached(model, tokenizer, tmp_path):
    """`harness.attach` of the tiny model; it fails where the model is not as it was afterwards."""

    @contextmanager
    def attach_tiny(method="full", budget=None, **settings) -> Iterator[CachedModel]:
        before = looks_of(model)
        budget = METHODS.get(method) if budget is None else budget
        options = {"results_dir": str(tmp_path)} | PLAIN | settings
        try:
            with harness.attach(model, tokenizer, method=method, budget=budget, **options) as cached:
                yield cached
        finally:
            assert looks_of(model) == before

    return attach_tiny


def looks_of(model) -> dict:
    return {
        "methods": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "training": [module.training for module in model.modules()],
        "hooks": [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()],
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "generation_config": model.generation_config.to_dict(),
    }


def run_in_threads(*uses: Callable[[], None]) -> None:
    """All at the same time, until the last has ended."""
    threads = [threading.Thread(target=use) for use in uses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def prompts(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded ids and their mask."""
    ids, real = token_batch(lengths, 0)
    return ids, real.long()


IDS, MASK = prompts(24)


def generated(model, ids=IDS, mask=None, **settings) -> torch.Tensor:
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **settings)


def written_by_hand(model, ids, mask) -> tuple[torch.Tensor, object]:
    """The greedy loop of a user, token by token."""
    out = model(ids, attention_mask=mask, use_cache=True)
    tokens = [ids, out.logits[:, -1].argmax(-1)[:, None]]
    for _ in range(NEW - 1):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        out = model(tokens[-1], attention_mask=mask, past_key_values=out.past_key_values)
        tokens.append(out.logits[:, -1].argmax(-1)[:, None])
    return torch.cat(tokens, 1), out.past_key_values


# The ways to run it


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [(24,), (24, 15)])
def test_generate_a_loop_and_several_rows_at_once_are_one(model, attached, method, lengths):
    ids, mask = prompts(*lengths)
    bare = generated(model, ids, mask)
    with attached(method, max_new_tokens=NEW) as cached:
        made = generated(model, ids, mask)
        usage = cached.usage
        assert torch.equal(generated(model, ids, mask), made)
        with torch.inference_mode():
            assert torch.equal(generated(cached, ids, mask), made)
            opened = model(ids, attention_mask=mask, use_cache=True)
        model(made[:, ids.shape[1] : -1], past_key_values=opened.past_key_values)
        by_hand, cache = written_by_hand(model, ids, mask)
        assert torch.equal(by_hand, made)
        assert cache.usage.budget == usage.budget
        assert cache.usage.steps == usage.steps == NEW - 1 and cache.get_seq_length() == ids.shape[1] + NEW - 1
        assert cache.usage.h2d_bytes == usage.h2d_bytes > 0
        out = model(ids, attention_mask=mask, use_cache=True)
        rows = model(made[:, ids.shape[1] : -1], past_key_values=out.past_key_values, return_dict=False)[0]
        assert torch.equal(rows.argmax(-1), made[:, ids.shape[1] + 1 :]) and not rows.is_inference()
    if method == "full":
        assert torch.equal(made, bare)


def test_the_full_cache_gives_the_bare_models_logits_and_loss(model, attached):
    with torch.inference_mode():
        whole = model(IDS, labels=IDS)
    close = {"atol": 1e-4, "rtol": 0}
    with attached(prefill_len=1) as cached:
        found = model(IDS, attention_mask=MASK)
        torch.testing.assert_close(found.logits, whole.logits, **close)
        assert type(found.logits) is torch.Tensor
        assert (cached.usage.steps, cached.usage.budget) == (IDS.shape[1] - 1, 1.0)
        torch.testing.assert_close(model(IDS, labels=IDS).loss, whole.loss, **close)
        assert model(IDS, use_cache=False).past_key_values is None
        last = model(IDS, logits_to_keep=2).logits
        torch.testing.assert_close(last, whole.logits[:, -2:], **close)
        prompt = model(IDS, use_cache=True)
        torch.testing.assert_close(prompt.logits[:, -1], whole.logits[:, -1], **close)
        rows = model(IDS[:, :3], past_key_values=prompt.past_key_values)
    expected = model(torch.cat([IDS, IDS[:, :3]], 1)).logits[:, -3:]
    torch.testing.assert_close(rows.logits, expected.detach(), **close)


@pytest.mark.parametrize("name", ["infinigen", "h2o", "streaming", "int4"])
@pytest.mark.parametrize("prefill_len", [1, 5])
def test_a_whole_text_is_scored_by_the_methods_selections(name, prefill_len):
    """Its rows are those of replay at T = the text's tokens + 1."""
    case = CASES[name]
    with attach(tiny("gqa")) as under:
        with CachedModel(under, setup_of(under, case), prefill_len=prefill_len) as cached:
            logits = tiny("gqa")(IDS).logits[0]
        session = open_session(under, case, [IDS.shape[1] + 1], IDS.shape[1])
        last = session.prefill(IDS[:, :prefill_len], torch.ones(1, prefill_len, dtype=torch.bool))[:, -1:]
        rest = IDS[:, prefill_len:]
        rows = session.decode(rest, torch.ones_like(rest, dtype=torch.bool))
        expected = under.logits(torch.cat([last, rows], 1))[0]
    torch.testing.assert_close(logits[prefill_len - 1 :], expected, atol=1e-4, rtol=0)
    assert cached.usage.budget == session.reads.budget and (session.reads.budget < 0.95 or name == "int4")


def test_a_texts_budget_is_met_at_its_own_length(model, attached):
    with attached("infinigen", 0.6, prefill_len=4) as cached:
        for length in (24, 60):
            ids, _ = prompts(length)
            labels = ids.clone()
            labels[:, :4] = -100
            loss = model(ids, labels=labels).loss
            assert cached.usage.budget == pytest.approx(0.6, abs=0.02) and loss.isfinite()


def test_pipelines(model, tokenizer, attached):
    def texts() -> list[str]:
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        settings = {"max_new_tokens": NEW, "do_sample": False}
        one = pipe(TEXTS[0], **settings)
        batch = pipe(TEXTS, batch_size=3, **settings)
        return [made["generated_text"] for made in (*one, *(made[0] for made in batch))]

    bare = texts()
    with attached():
        assert texts() == bare
    with attached("h2o"):
        found = texts()
        ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
        assert found[0] == found[1] == TEXTS[0] + tokenizer.decode(generated(model, ids, None)[0, ids.shape[1] :])


@pytest.mark.parametrize("method", ["full", "infinigen"])
def test_lm_evals_own_model_runs_on_it(method, model, tokenizer, attached, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    def asked(*arguments) -> list:
        return [SimpleNamespace(args=each) for each in arguments]

    monkeypatch.setattr(model.config, "max_position_embeddings", 64)
    choices = asked(("What is a cache?", " A memory"), ("What is a cache?", " No"), ("Keys", " and values"))
    whole = asked(("The cache of keys and values outgrows the memory of the device that computes. " * 2,))
    until = {"until": ["zzz"], "max_gen_toks": NEW, "do_sample": False}
    open_ended = asked(("What is a cache?", until), ("Keys and values of", until))

    def run(network) -> tuple:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lm = HFLM(pretrained=network, tokenizer=tokenizer, batch_size=1)
        scores = [score for score, _ in lm.loglikelihood(choices, disable_tqdm=True)]
        lm.batch_size_per_gpu = 2
        texts = lm.generate_until(open_ended, disable_tqdm=True)
        lm.batch_size_per_gpu = 1
        return scores + lm.loglikelihood_rolling(whole, disable_tqdm=True), texts

    bare, bare_texts = run(model)
    with attached(method, prefill_len=1):
        scores, texts = run(model)
        if method == "full":
            assert scores == pytest.approx(bare, abs=1e-3) and texts == bare_texts
        else:
            assert all(one != other for one, other in zip(scores, bare, strict=True))
            ids = torch.tensor([tokenizer("What is a cache?")["input_ids"] + tokenizer(" A memory")["input_ids"]])
            rows = model(ids[:, :-1]).logits[0].log_softmax(-1)[-len(" A memory") :]
            assert scores[0] == pytest.approx(float(rows.gather(1, ids[0, -len(" A memory") :, None]).sum()), abs=1e-4)
            lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
            with pytest.raises(UserError, match=r"a batch of 2 texts.* .lm-eval's HFLM: batch_size=1"):
                lm.loglikelihood(choices, disable_tqdm=True)


@pytest.mark.parametrize(("name", "budget"), [("quest", None), ("infinigen", 0.7), ("h2o", 0.75)])
def test_a_methods_tokens_are_those_of_replay_at_the_budget_asked_for(name, budget, monkeypatch):
    case, (ids, real), network = CASES[name], token_batch(PROMPTS["padded"], 0), tiny("gqa")
    monkeypatch.setattr(network.generation_config, "eos_token_id", None)
    asked = {"attention_mask": real.long(), "max_new_tokens": 20, "do_sample": False, "output_logits": True}
    with attached_with_link() as (under, link):
        options = {"placement": "host", "link": link}
        with CachedModel(under, setup_of(under, case), options, budget) as cached:
            made = network.generate(ids, return_dict_in_generate=True, **asked)
        if budget is not None:
            assert cached.usage.budget == pytest.approx(budget, abs=0.02)
            case = Case(cached.setup_at([(prompt, prompt + 20) for prompt in PROMPTS["padded"]]).method)
        logits, reads = replay_ids(under, case, made.sequences, real.bool())
    torch.testing.assert_close(torch.stack(made.logits, 1), logits, atol=1e-4, rtol=0)
    assert torch.equal(made.sequences[:, PROMPT:], logits.argmax(-1))
    assert cached.usage.budget == pytest.approx(reads.budget)


# Logits of rows that ran densely


def test_no_row_that_ran_densely_has_logits(model, attached):
    """Else a program would score the bare model unawares."""
    bare = model(IDS).logits.detach()
    with attached("infinigen", prefill_len=5):
        prompt, text = model(IDS, use_cache=True).logits, model(IDS).logits
    assert prompt.shape == (1, 1, bare.shape[-1]) and text.shape == bare.shape
    torch.testing.assert_close(prompt, bare[:, -1:], atol=1e-4, rtol=0)
    assert text[:, :4].isnan().all() and text[:, 4:].isfinite().all()
    torch.testing.assert_close(text[:, 4], bare[:, 4], atol=1e-4, rtol=0)  # it sees the prompt alone


# Refusals


def goes_on(model, ids, rows=2, batch=1, **settings):
    return model(ids[:, :rows].repeat(batch, 1), past_key_values=model(ids, use_cache=True).past_key_values, **settings)


REFUSED = {
    r"its prompt is not known.*prefill_len=N.*harness\.lm\(model": lambda model, ids: model(ids, use_cache=False),
    "past_key_values=a DynamicCache: .*its own": lambda model, ids: model(ids, past_key_values=DynamicCache()),
    "inputs_embeds=a Tensor: .*leave it out": lambda model, ids: model(inputs_embeds=torch.ones(1, 3, 64)),
    "position_ids=a Tensor: .*leave it out": lambda model, ids: model(ids, position_ids=ids, use_cache=True),
    r"attention_mask: of shape \(1, 20\)": lambda model, ids: model(ids, attention_mask=MASK[:, :20], use_cache=True),
    "padding_side": lambda model, ids: model(ids, attention_mask=MASK * 0, use_cache=True),
    "training mode": lambda model, ids: model.train()(ids),
    "its decoder cannot be called by itself": lambda model, ids: model.model(ids),
    "max_new_tokens=6: .*with these there are 9": lambda model, ids: goes_on(model, ids, rows=9),
    "2 sequences, and past_key_values of 1": lambda model, ids: goes_on(model, ids, batch=2),
    r"of shape \(1, 26\)": lambda model, ids: goes_on(model, ids, attention_mask=torch.ones(1, 2)),
    "labels=a Tensor: .*leave it out": lambda model, ids: goes_on(model, ids, labels=ids[:, :2]),
    "not cropped, copied": lambda model, ids: copy.deepcopy(model(ids, use_cache=True).past_key_values),
    "max_new_tokens=0: .*1 or more": lambda model, ids: model.generate(ids, max_new_tokens=0),
}
"""Calls that are refused, by what is said."""
REFUSED_TEXTS = {
    "a text of 5 tokens; allowed: 6 .prefill_len=5. to 512": lambda model, ids: model(ids[:, :5]),
    "or one with padding": lambda model, ids: model(ids, attention_mask=ids % 2),
}
"""Those of a model that scores texts with `prefill_len=5`."""


@pytest.mark.parametrize("said", [*REFUSED, *REFUSED_TEXTS])
def test_what_it_cannot_is_one_line_and_leaves_the_model(said, model, attached):
    act, scores = (REFUSED | REFUSED_TEXTS)[said], said in REFUSED_TEXTS
    with attached(max_new_tokens=NEW, prefill_len=5 if scores else None), refused(said):
        try:
            act(model, IDS)
        finally:
            model.eval()
    assert generated(model).shape == (1, 24 + NEW)


CHANGES = {
    "attention implementation 'eager': ": lambda model: model.set_attn_implementation("eager"),
    "^torch.compile: ": lambda model: model.model.layers[1].self_attn.compile(backend="eager"),
}


@pytest.mark.parametrize("said", CHANGES)
def test_a_model_that_is_changed_inside_the_block_is_refused_at_the_next_call(said):
    network = tiny_model("llama", num_key_value_heads=2)
    own = network.config._attn_implementation
    with attach(network) as attached, CachedModel(attached, Setup(Full(), None, None)):
        CHANGES[said](network)
        for call in (generated, lambda model: model(IDS, use_cache=True)):
            with refused(said):
                call(network)
    assert network.config._attn_implementation == own


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "jamba", "gpt_oss", "deepseek_v3"])
def test_windows_recurrent_layers_and_latents_run_as_the_bare_model(family):
    network = tiny_family(family)
    network.generation_config.eos_token_id = None
    ids, _ = prompts(26)
    with torch.no_grad():
        bare, logits = generated(network, ids), network(ids).logits
    with harness.attach(network, method="full", prefill_len=1, **PLAIN, **{"method.dense_layers": 0}):
        assert torch.equal(generated(network, ids), bare)
        torch.testing.assert_close(network(ids).logits, logits, atol=1e-4, rtol=0)
        prompt = network(ids[:, :20], use_cache=True)
        rows = network(ids[:, 20:], past_key_values=prompt.past_key_values).logits
        torch.testing.assert_close(rows, logits[:, 20:], atol=1e-4, rtol=0)


def test_nothing_works_after_the_block(model, attached):
    with attached() as cached:
        cache = model(IDS, use_cache=True).past_key_values
        done = generated(model, return_dict_in_generate=True).past_key_values
        with refused("or the generate that made this cache"):
            model(IDS[:, :1], past_key_values=done)
        with refused("past_key_values=a MethodCache: an attached model makes its own cache"):
            generated(model, past_key_values=cache)
    for act in (lambda: generated(cached), lambda: cached.forward(IDS), lambda: cache.usage):
        with refused(r"the block of harness\.attach has ended"):
            act()


def test_a_cache_of_another_attached_model_is_refused(model, attached):
    """Else the other one would answer."""
    other = tiny_model("llama", num_key_value_heads=2)
    with attached(), attach(other) as elsewhere, CachedModel(elsewhere, Setup(Full(), None, None)):
        cache = other(IDS, use_cache=True).past_key_values
        with refused("past_key_values=a MethodCache: an attached model makes its own cache"):
            model(IDS[:, :1], past_key_values=cache)


def test_caches_are_freed_with_their_last_reference_and_at_the_end(model, attached):
    with attached():
        out = model(IDS, use_cache=True)
        first = out.past_key_values.session
        out = model(IDS, use_cache=True)
        second = out.past_key_values.session
        assert second.caches and not first.caches
    assert not second.caches and out.past_key_values.session is None


# Threads


def test_threads_inside_one_block_take_turns(model, attached):
    batches = [prompts(24), prompts(20), prompts(24, 15)]
    with attached("infinigen", max_new_tokens=NEW):
        expected = [generated(model, *batch) for batch in batches]
        found: dict[int, torch.Tensor] = {}

        def use(at: int) -> None:
            found[at] = generated(model, *batches[at]) if at % 2 else written_by_hand(model, *batches[at])[0]

        run_in_threads(partial(use, 0), partial(use, 1), partial(use, 2))
    assert all(torch.equal(found[at], ids) for at, ids in enumerate(expected))


def test_a_bare_call_in_the_middle_of_anothers_pass_is_refused(model):
    """It would go through that pass's attention and write to its cache."""
    said: list[str] = []

    def use() -> None:
        try:
            model(IDS[:, :9])
        except UserError as error:
            said.append(str(error))

    with attach(model) as under:
        expected = run_prompt(under, IDS, MASK.bool()).hidden
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: run_in_threads(use))
        try:
            assert torch.equal(run_prompt(under, IDS, MASK.bool()).hidden, expected)
        finally:
            hook.remove()
    assert len(said) == 1 and "wait until the run that attached it has ended" in said[0]


def test_flags_of_single_modules_are_restored(model):
    model.model.layers[1].train()
    before = [module.training for module in model.modules()]
    with pytest.raises(ZeroDivisionError), attach(model):
        assert not model.model.layers[1].training
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == before and any(before)
    model.eval()

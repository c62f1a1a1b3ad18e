"""`harness.attach` and `harness.lm`: a method under a transformers model that is already loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from harness.api.cached_model import CachedModel
from harness.api.interface import (
    Model,
    require_model,
    require_no_tokenizer,
    tokenizer_of,
    with_given,
)
from harness.decode.weights import streamed_weights
from harness.errors import UserError
from harness.files import stated_memory
from harness.model.attach import attach as attach_decoder
from harness.model.generation import Settings
from harness.model.load import from_memory
from harness.model.resources import Resources
from harness.replay.setup import Setup, calibrated, codec_of, tokenized, with_budget_on_text
from harness.settings.task_config import NEW_TOKENS
from harness.speed.latency import compute_threads, two_memories
from methods.base import TokenCounts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from harness.api.method_lm import MethodLM


@contextmanager
def attach(
    model: PreTrainedModel | Model,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    method: str = "infinigen",
    budget: float | str | None = None,
    max_new_tokens: int | None = None,
    prefill_len: int | None = None,
    **settings: Any,
) -> Iterator[CachedModel]:
    """Run a loaded transformers model on a method's live cache, whoever calls it.

    Inside the `with` block the model's own `generate` and forward pass use the method's cache, also
    where a pipeline, a streamer in another thread, or lm-eval's `HFLM` calls them.
    `cached.generate` is the same. `cached.usage` has TTFT, TPOT and bytes. `model(prompt)` runs a
    prompt densely, and only its last row's logits can be read. Calls with the `past_key_values`
    that it returned decode a step for each row. A whole text is scored with `prefill_len`, by
    replay, and refused without it: `HFLM`, which does not say where a context ends, needs
    `prefill_len=1` and batches of one. Not taken: beams, assistants, prompts in chunks,
    `inputs_embeds`, attentions and hidden states, gradients. The model is left as it was. It takes
    one `attach` or run at a time, of all threads.

    Args:
        model: a loaded transformers model, or a `Model`.
        tokenizer: needed by methods that read a text; by default the one at the model's
        `name_or_path`. method, budget, settings: as of `Model.generate`. A budget is met for each
        call's lengths.
        max_new_tokens: tokens for which the cache of `model(prompt)` has room. T, on which a
            method's budget depends, is the prompt and these; `generate` knows its own. None: the
            model's `generation_config`, else 64.
        prefill_len: how many first tokens of a whole text, `model(input_ids)` or with `labels`, are
            its prompt; the method decodes all others. A prompt to go on from is then
            `model(input_ids, use_cache=True)`.

    Raises:
        UserError: the model is refused or attached already, a setting is wrong, or there is no
            tokenizer to calibrate with.
    """
    _require_count("max_new_tokens", max_new_tokens)
    _require_count("prefill_len", prefill_len)
    with ExitStack() as stack:
        if isinstance(model, Model):
            require_no_tokenizer(tokenizer)
            attached = stack.enter_context(attach_decoder(model.loaded.model))
        else:
            require_model(model)
            attached = stack.enter_context(attach_decoder(model))
            model = Model(Resources(loaded=from_memory(model, tokenizer)), {})
        settings = with_given({"experiment": "generate", "prompt": "-"}, settings)
        config = model.configured(method=method, budget=budget, **settings)
        loaded, platform = model.loaded, config.platform
        needs_tokenizer = (
            config.method.needs_calibration
            or config.method.rereads_prompt
            or config.budget_is_measured
        )
        if needs_tokenizer and loaded.reader is None:
            loaded.tokenizer = tokenizer_of(loaded, method)
        stack.enter_context(stated_memory(platform.host_gib))
        stack.enter_context(compute_threads(attached.device))
        chosen, budget = config.method, config.budget
        if config.budget_is_measured:
            # Once, on a text of which half is the prompt, instead of in each call.
            chosen = with_budget_on_text(config, loaded, attached, [TokenCounts(1, 1, 2)])
            budget = None
        if max_new_tokens is None:
            of_model = Settings(attached.model, {}).get("max_new_tokens")
            max_new_tokens = of_model or NEW_TOKENS
        calibration = calibrated(config, chosen, loaded, attached)
        setup = Setup(tokenized(chosen, loaded), codec_of(config), calibration)
        _, link = stack.enter_context(two_memories(config, attached))
        stack.enter_context(
            streamed_weights(attached, link, platform.weights_on_device, pinned=platform.pinned)
        )
        cached = CachedModel(
            attached,
            setup.method,
            budget=budget,
            nearest=config.budget_rule == "nearest",
            codec=setup.codec,
            calibration=setup.calibration,
            placement=config.placement,
            link=link,
            gpu_cache=config.gpu_cache,
            pinned=platform.pinned,
            max_new_tokens=max_new_tokens,
            prefill_len=prefill_len,
            max_length=loaded.max_length,
            tokenizer=loaded.tokenizer,
        )
        yield stack.enter_context(cached)


def _require_count(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name}={value!r}: allowed: a number of tokens, 1 or more, or None")


OF_LM_EVAL = {
    "tasks": "tasks",
    "num_samples": "limit",
    "num_fewshot": "num_fewshot",
    "apply_chat_template": "apply_chat_template",
    "fewshot_as_multiturn": "fewshot_as_multiturn",
    "system_instruction": "system_instruction",
    "include_path": "include_path",
    "metadata": "metadata",
    "data": "a task's YAML, dataset_path and dataset_kwargs",
    "repeats": "repeats in a task's YAML",
}
"""Settings of `Model.tasks` that lm-eval decides where it evaluates, and what it has instead."""


def lm(
    model: PreTrainedModel | Model,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    method: str = "infinigen",
    budget: float | str | None = None,
    **settings: Any,
) -> MethodLM:
    """A model under a method for lm-eval: `lm_eval.simple_evaluate(model=lm(...), tasks=[...])`.

    Log-likelihoods and texts are those of `Model.tasks` with the same settings. lm-eval chooses
    tasks and examples.

    Args:
        model: a loaded transformers model, which is put into evaluation mode, or a `Model`.
        tokenizer: of a loaded transformers model; by default the one at its `name_or_path`.
        method, budget: as of `Model.tasks`; the budget is met for each task by itself.
        settings: such as prefill="question", too_long="truncate", temperature=0.6,
        `**{"method.alpha": 4}`.

    Raises:
        UserError: the model is refused, it has no tokenizer, or a setting is wrong or one of
        lm-eval's own.
    """
    from harness.api.method_lm import MethodLM  # lm-eval takes seconds to import

    for name, value in settings.items():
        theirs = OF_LM_EVAL.get(name.partition(".")[0])
        if theirs is not None:
            raise UserError(f"{name}={value}: lm-eval decides it, by {theirs}; leave it out")
    if isinstance(model, Model):
        require_no_tokenizer(tokenizer)
    else:
        model = Model(Resources(loaded=from_memory(model, tokenizer)), {})
    settings = with_given({"experiment": "tasks"}, settings)
    config = model.configured(method=method, budget=budget, **settings)
    loaded = model.loaded
    if loaded.tokenizer is None:
        loaded.tokenizer = tokenizer_of(loaded, method)
    return MethodLM(config, loaded)

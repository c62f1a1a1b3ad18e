"""`harness.attach` and `harness.lm`: a method under a transformers model that is already loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.api.cached_model import CachedModel
from harness.api.interface import Model, in_memory, network_of, tokenizer_of, with_given
from harness.decode.weights import streamed_weights
from harness.errors import UserError
from harness.files import stated_memory
from harness.model.attach import attach as attach_decoder
from harness.model.generation import Settings, require_count
from harness.replay.setup import prepare
from harness.settings.task_config import NEW_TOKENS
from harness.speed.memories import compute_threads, two_memories
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
    `cached.generate` is the same. `cached.usage` has TTFT, TPOT and bytes. `model(ids,
    use_cache=True)` runs a prompt densely, and returns its last row's logits. Calls with the
    `past_key_values` that it returned decode a step for each row. Without `use_cache=True`,
    `model(ids)` is a whole text, which is scored with `prefill_len`, by replay, and refused without
    it: `HFLM`, which does not say where a context ends, needs `prefill_len=1` and batches of one.
    Not taken: beams, assistants, prompts in chunks, `inputs_embeds`, attentions and hidden states,
    gradients. The model is left as it was. It takes one `attach` or run at a time, of all threads.

    Args:
        model: a loaded transformers model, or a `Model`.
        tokenizer: needed by methods that read a text; by default the one at the model's
        `name_or_path`. method, budget, settings: as of `Model.generate`. A budget is met for each
        call's lengths.
        max_new_tokens: tokens for which the cache of such a prompt has room. T, on which a
            method's budget depends, is the prompt and these; `generate` knows its own. None: the
            model's `generation_config`, else 64.
        prefill_len: how many first tokens of a whole text, `model(input_ids)` or with `labels`, are
            its prompt; the method decodes all others. Logits before that are NaN.

    Raises:
        UserError: the model is refused or attached already, a setting is wrong, or there is no
            tokenizer to calibrate with.
    """
    for name, value in {"max_new_tokens": max_new_tokens, "prefill_len": prefill_len}.items():
        if value is not None:
            require_count(name, value)
    with ExitStack() as stack:
        attached = stack.enter_context(attach_decoder(network_of(model)))
        held = in_memory(model, tokenizer)
        settings = with_given({"experiment": "generate", "prompt": "-"}, settings)
        config = held.configured(method=method, budget=budget, **settings)
        loaded, platform = held.loaded, config.platform
        reads_text = (
            config.method.needs_calibration
            or config.method.rereads_prompt
            or config.budget_is_measured
        )
        if reads_text and loaded.reader is None:
            loaded.tokenizer = tokenizer_of(loaded, method)
        stack.enter_context(stated_memory(platform.host_gib))
        stack.enter_context(compute_threads(attached.device))
        asked = None
        if not config.budget_is_measured:  # else once, on a text of which half is the prompt
            asked, config = config.budget, replace(config, budget=None)
        setup = prepare(config, loaded, attached, lambda: [TokenCounts(1, 1, 2)])
        if max_new_tokens is None:
            max_new_tokens = Settings(attached.model, {}).get("max_new_tokens") or NEW_TOKENS
        _, link = stack.enter_context(two_memories(config, attached))
        stack.enter_context(
            streamed_weights(attached, link, platform.weights_on_device, pinned=platform.pinned)
        )
        cached = CachedModel(
            attached,
            setup.method,
            asked,
            nearest=config.budget_rule == "nearest",
            codec=setup.codec,
            calibration=setup.calibration,
            gpu_cache=config.gpu_cache,
            max_new_tokens=max_new_tokens,
            prefill_len=prefill_len,
            max_length=loaded.max_length,
            tokenizer=loaded.tokenizer,
            placement=config.placement,
            link=link,
            pinned=platform.pinned,
        )
        yield stack.enter_context(cached)


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
    held = in_memory(model, tokenizer)
    settings = with_given({"experiment": "tasks"}, settings)
    config = held.configured(method=method, budget=budget, **settings)
    loaded = held.loaded
    if loaded.tokenizer is None:
        loaded.tokenizer = tokenizer_of(loaded, method)
    return MethodLM(config, loaded)

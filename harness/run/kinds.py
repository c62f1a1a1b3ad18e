"""How a run of each kind is measured, beside `harness.settings.kinds`, and what is asked before.

Light to import: torch and pandas come when a run begins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

from harness.data.text import named_text
from harness.errors import UserError
from harness.files import text_sha256
from harness.model.load import Resources, max_length_of, model_config
from harness.results import inputs
from harness.scoring.progress import say
from harness.settings.config import RunConfig
from harness.settings.kinds import Outcome, find
from harness.settings.task_config import OFFLINE_TASKS, TASKS


def measure(config: RunConfig, resources: Resources) -> Outcome:
    """What a run measures, or prints. resources: what the runs of this process share."""
    return MEASURED[config.kind](config, resources)


def _perplexity(config: RunConfig, resources: Resources) -> Outcome:
    from harness.scoring.perplexity import run_perplexity

    return run_perplexity(config, resources.model(config.model), resources.references)


def _tasks(config: RunConfig, resources: Resources) -> Outcome:
    from harness.scoring.evaluation import run_tasks, run_turns

    if not resources.has_model(config.model):
        say(f"{config.experiment} {config.label}: loading model {config.model.name}")
    score = run_turns if config.prefill == "both" else run_tasks
    return score(config, resources.model(config.model))


def _latency(config: RunConfig, resources: Resources) -> Outcome:
    from harness.speed.latency import run_latency

    return run_latency(config, resources.model(config.model), resources.prompts)


def _generate(config: RunConfig, resources: Resources) -> Outcome:
    from harness.speed.generate import run_generate

    write = partial(print, end="", flush=True)
    made = run_generate(config, resources.model(config.model), write)
    print(f"\n\n{made.summary()}")
    return Outcome({})


def _analysis(config: RunConfig, resources: Resources) -> Outcome:
    from harness.paper.analysis import run_analysis, run_memory

    if config.analysis.statistic == "memory":
        return run_memory(config)
    return run_analysis(config, resources.model(config.model))


def _contract(config: RunConfig, resources: Resources) -> Outcome:
    from harness.checks.contract import run_contract
    from harness.checks.trust import run_trust
    from harness.run.compose import load

    run_contract(config)
    if config.thorough:
        run_trust(config, resources.model(config.model), load)
    return Outcome({})


def _advise(config: RunConfig, resources: Resources) -> Outcome:
    from harness.run.advise import advise

    print(advise(config))
    return Outcome({})


MEASURED: dict[str, Callable[[RunConfig, Resources], Outcome]] = {
    "perplexity": _perplexity,
    "tasks": _tasks,
    "latency": _latency,
    "generate": _generate,
    "analysis": _analysis,
    "contract": _contract,
    "advise": _advise,
}


def check(config: RunConfig) -> None:
    """Raise UserError for what `harness.settings.rules` cannot see: tasks, and a card's memory."""
    if config.kind == "latency" and config.placement == "managed":
        _check_managed(config)
    if config.kind != "tasks":
        return
    if config.model.weights == "random":
        ids = "random weights read random token ids, as in kind=perplexity and others"
        raise UserError(f"model.weights=random: kind=tasks reads text, and {ids}")
    is_offline = config.data.name == "offline"
    known = OFFLINE_TASKS if is_offline else TASKS
    if set(config.tasks).issubset(known):
        return  # spares loading lm-eval
    from harness.data.tasks import check_names, plan

    check_names(config.tasks, config.task.include_path)
    if is_offline:
        plan(config)


def digests_of(config: RunConfig) -> dict[str, str]:
    """sha256 by name of every input of a run, taken before a model loads.

    Raises:
        UserError: a file or folder is missing or cannot be read, or a model cannot be fetched.
    """
    kind = find(config.kind)
    needs_weights = kind.needs_weights(config)
    reads = kind.reads if needs_weights else ()
    found = inputs.common(config, weights=needs_weights)
    if "corpus" in reads:
        found |= inputs.corpus(config.corpus, config.data)
    if "tasks" in reads:
        found |= inputs.tasks(config)
    if "prompt" in reads:
        found["prompt"] = text_sha256(named_text(config.calibration.name))
    if "calibration" in reads:
        found |= inputs.calibration(config.calibration)
    return found


def shape(config: RunConfig) -> str:
    """A word for a progress line that tells timed runs of one label apart."""
    if not find(config.kind).timed:
        return ""
    batch = "largest " if config.latency.largest else config.latency.batch_size
    return f"{batch}x{config.latency.prompt_len}"


def process(config: RunConfig) -> Hashable:
    """What runs must have in common to share a process of their own; None where a run needs none:
    only those that are timed do."""
    if not find(config.kind).timed:
        return None
    return repr(config.model), config.platform.name, shape(config)


def to_lower(config: RunConfig) -> str:
    """The settings on which a run's memory depends most, with their values."""
    words = []
    for name in find(config.kind).sizes(config):
        words.append(name if config.value(name) is None else config.typed(name))
    return " or ".join(words)


def require_length(config: RunConfig) -> None:
    """Raise UserError where a sequence is longer than the model takes, as its configuration says:
    before its weights are read."""
    names = find(config.kind).lengths(config)
    if not names:
        return
    limit = max_length_of(model_config(config.model))
    if sum(map(config.value, names)) > limit:
        given = " and ".join(map(config.typed, names))
        raise UserError(f"{given}: {config.model.name} takes at most {limit} tokens")


def _check_managed(config: RunConfig) -> None:
    """Raise UserError where the weights and a managed cache are more than the run's card has, as
    far as the model's shape tells: before the weights are loaded, and before a sweep begins. The
    session asks again, for all that it needs (`harness.decode.memory.require_managed`)."""
    import torch

    from harness.decode.memory import GIB, MEMORY_HINTS
    from harness.decode.share import BatchLengths
    from harness.model.shape import FFN_MATRICES, WEIGHT_BYTES, ModelShape
    from harness.paper.costmodel.step import plan_of_shape

    gib, model, lengths = config.platform.device_gib, config.model, config.latency
    card_bytes = None if gib is None else int(gib * GIB)
    if torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        if card_bytes is not None and card_bytes > whole:
            smaller = f"this card has {whole / GIB:.1f} GiB; null takes the card as it is"
            raise UserError(f"platform.device_gib={gib:g}: {smaller}")
        card_bytes = card_bytes or whole
    if card_bytes is None or model.shape is None or model.shape["model_type"] not in FFN_MATRICES:
        return
    shape = ModelShape.from_config(model.name, model.shape)
    dtype = getattr(torch, model.dtype)
    weight_bytes = shape.weight_bytes * dtype.itemsize // WEIGHT_BYTES
    plan = plan_of_shape(config, shape, weight_bytes, dtype)
    batch = BatchLengths((lengths.prompt_len,) * lengths.batch_size, lengths.gen_len)
    needs = plan.needs(batch, lengths.batch_size * lengths.prompt_len, with_state=False)
    needed = needs.weights + needs.managed + needs.workspace
    if needed > card_bytes:
        raise UserError(
            f"placement=managed: weights, the KV cache and the prompts' pass need "
            f"{needed / GIB:.1f} GiB, and the card has {card_bytes / GIB:.1f}; {MEMORY_HINTS}"
        )

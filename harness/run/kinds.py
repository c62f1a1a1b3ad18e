"""How a run of each kind is made.

`harness.settings.kinds` has the other half of each kind: its settings, and what decides its
numbers. Light to import: torch and pandas come when a run begins.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from harness.data.text import named_text
from harness.errors import UserError
from harness.files import text_sha256
from harness.model.load import max_length_of, model_config
from harness.model.resources import Resources
from harness.results import inputs
from harness.scoring.progress import say
from harness.settings.config import RunConfig
from harness.settings.kinds import Outcome, find
from harness.settings.task_config import OFFLINE_TASKS, TASKS


class Measurement:
    """How a run of one kind is made.

    Holds no state: what outlives a run is in `harness.model.resources.Resources`.
    """

    def check(self, config: RunConfig) -> None:
        """Raise UserError for what `harness.settings.rules` cannot see: tasks, and memory."""

    def needs_weights(self, config: RunConfig) -> bool:
        """Whether a model is loaded; without, its shape is all that is looked at."""
        return True

    def inputs(self, config: RunConfig) -> dict[str, str]:
        """sha256 by name of what the run reads besides the model; UserError where it is missing."""
        return {}

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        """Measure. resources: what the runs of this process share."""
        raise NotImplementedError

    def lengths(self, config: RunConfig) -> dict[str, int]:
        """The settings that add up to the tokens of the run's longest sequence."""
        return {}

    def memory_hints(self, config: RunConfig) -> dict[str, Any]:
        """The settings on which the run's memory depends most."""
        return self.lengths(config)

    def process(self, config: RunConfig) -> Any:
        """What runs must have in common to share a process of their own; None where a run needs
        none."""
        return None

    def shape(self, config: RunConfig) -> str:
        """A word for a progress line that tells runs of one label apart."""
        return ""


class Perplexity(Measurement):
    """`kind=perplexity`: windows of a text, and fidelity to the full cache (Figs 12, 19, Table 2).

    With `max_new_tokens`: texts under a method and under the full cache, and how they part.
    """

    def inputs(self, config: RunConfig) -> dict[str, str]:
        return _texts(config)

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        from harness.scoring.perplexity import run_perplexity

        return run_perplexity(config, resources.model(config.model), resources.references)

    def lengths(self, config: RunConfig) -> dict[str, int]:
        if config.max_new_tokens is None:
            return {"seq_len": config.seq_len}
        return {"prefill_len": config.prefill_len, "max_new_tokens": config.max_new_tokens}

    def memory_hints(self, config: RunConfig) -> dict[str, Any]:
        return self.lengths(config) | {"num_windows": config.num_windows}


class Tasks(Measurement):
    """`kind=tasks`: accuracy on any of lm-eval's tasks (Figs 11, 13, 17).

    With `prefill=both`: several questions to one cache, known and unknown when it was reduced.
    """

    def check(self, config: RunConfig) -> None:
        if config.model.weights == "random":
            ids = "random weights read random token ids, as in kind=perplexity and others"
            raise UserError(f"model.weights=random: kind=tasks reads text, and {ids}")
        is_offline = config.data.name == "offline"
        known = OFFLINE_TASKS if is_offline else TASKS
        if set(config.tasks).issubset(known):
            return  # spares loading lm-eval
        from harness.data.task_plan import check_names, plan

        check_names(config.tasks, config.task.include_path)
        if is_offline:
            plan(config)

    def inputs(self, config: RunConfig) -> dict[str, str]:
        return inputs.calibration(config.calibration) | inputs.tasks(config)

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        from harness.scoring.evaluation import run_tasks, run_turns

        if not resources.has_model(config.model):
            say(f"{config.experiment} {config.label}: loading model {config.model.name}")
        measure = run_turns if config.prefill == "both" else run_tasks
        return measure(config, resources.model(config.model))

    def memory_hints(self, config: RunConfig) -> dict[str, Any]:
        return {"num_fewshot": config.num_fewshot}


class Latency(Measurement):
    """`kind=latency`: the timed decode steps of one shape (Figs 14 to 18), or with
    `batch_size=largest` of the largest batch that a device's memory holds, and of those below."""

    def check(self, config: RunConfig) -> None:
        if config.placement == "managed":
            _check_managed(config)

    def inputs(self, config: RunConfig) -> dict[str, str]:
        prompt = named_text(config.calibration.name)
        return inputs.calibration(config.calibration) | {"prompt": text_sha256(prompt)}

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        from harness.speed.latency import run_latency

        return run_latency(config, resources.model(config.model), resources.prompts)

    def lengths(self, config: RunConfig) -> dict[str, int]:
        return {"prompt_len": config.latency.prompt_len, "gen_len": config.latency.gen_len}

    def memory_hints(self, config: RunConfig) -> dict[str, Any]:
        if config.latency.largest:
            return self.lengths(config) | {"capacity.max_batch": config.capacity.max_batch}
        return {"batch_size": config.latency.batch_size} | self.lengths(config)

    def process(self, config: RunConfig) -> Any:
        lengths = config.latency
        batch = "largest" if lengths.largest else lengths.batch_size
        return repr(config.model), config.platform.name, batch, lengths.prompt_len

    def shape(self, config: RunConfig) -> str:
        batch = "largest " if config.latency.largest else config.latency.batch_size
        return f"{batch}x{config.latency.prompt_len}"


class Generate(Measurement):
    """`kind=generate`: text, printed token by token, and what its cache moved."""

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        from harness.speed.generate import run_generate

        made = run_generate(
            config, resources.model(config.model), partial(print, end="", flush=True)
        )
        print(f"\n\n{made.summary()}")
        return Outcome({})

    def memory_hints(self, config: RunConfig) -> dict[str, Any]:
        return {"max_new_tokens": config.max_new_tokens}


class Analysis(Measurement):
    """`kind=analysis`: statistics of one dense pass over a text, or of a shape (Figs 2, 4, 5, 7,
    20, Table 1)."""

    def needs_weights(self, config: RunConfig) -> bool:
        return config.analysis.statistic != "memory"  # which follows from the shape

    def inputs(self, config: RunConfig) -> dict[str, str]:
        return _texts(config) if self.needs_weights(config) else {}

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        from harness.paper.analysis import run_analysis, run_memory

        if not self.needs_weights(config):
            return run_memory(config)
        return run_analysis(config, resources.model(config.model))

    def lengths(self, config: RunConfig) -> dict[str, int]:
        return {"analysis.num_tokens": config.analysis.num_tokens}


class Contract(Measurement):
    """`kind=contract`: whether a method, or a codec, keeps what every one must
    (`harness.checks.contract`). With `thorough`, what users of such comparisons found wrong
    elsewhere is looked for too, with the model at hand (`harness.run.trust`)."""

    def needs_weights(self, config: RunConfig) -> bool:
        return config.thorough

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        from harness.checks.contract import run_contract
        from harness.run.trust import run_trust

        run_contract(config, partial(print, flush=True))
        if config.thorough:
            run_trust(config, resources)
        return Outcome({})


class Advise(Measurement):
    """`kind=advise`: which method, for a machine, a model and its users."""

    def needs_weights(self, config: RunConfig) -> bool:
        return False

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        from harness.run.advise import advise

        print(advise(config))
        return Outcome({})


MEASUREMENTS: dict[str, Measurement] = {
    "perplexity": Perplexity(),
    "tasks": Tasks(),
    "latency": Latency(),
    "generate": Generate(),
    "analysis": Analysis(),
    "contract": Contract(),
    "advise": Advise(),
}


def measurement_of(kind: str) -> Measurement:
    """How runs of the kind of that name are made. Raises UserError where there is none."""
    find(kind)
    return MEASUREMENTS[kind]


def require_length(config: RunConfig) -> None:
    """Raise UserError where a sequence is longer than the model takes, as its configuration says:
    before its weights are read."""
    lengths = measurement_of(config.kind).lengths(config)
    if not lengths:
        return
    limit = max_length_of(model_config(config.model))
    if sum(lengths.values()) > limit:
        given = " and ".join(f"{name}={value}" for name, value in lengths.items())
        raise UserError(f"{given}: {config.model.name} takes at most {limit} tokens")


def digests_of(config: RunConfig) -> dict[str, str]:
    """sha256 by name of every input of a run, taken before a model loads.

    Raises:
        UserError: a file or folder is missing or cannot be read, or a model cannot be fetched.
    """
    measurement = measurement_of(config.kind)
    weights = measurement.needs_weights(config)
    return inputs.common(config, weights=weights) | measurement.inputs(config)


def _texts(config: RunConfig) -> dict[str, str]:
    return inputs.calibration(config.calibration) | inputs.corpus(config.corpus, config.data)


def _check_managed(config: RunConfig) -> None:
    """Raise UserError where the weights and a managed cache are more than the run's card has, as
    far as the model's shape tells: before the weights are loaded, and before a sweep begins. The
    session asks again, for all that it needs (`harness.decode.memory.require_managed`)."""
    import torch

    from harness.decode.memory import GIB, MEMORY_HINTS
    from harness.decode.share import BatchLengths
    from harness.model.shape import FFN_MATRICES, WEIGHT_BYTES, ModelShape
    from harness.paper.costmodel.capacity import plan_of_shape

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
    cache_bytes = sum(store.nbytes for store in plan.stores(batch).values())
    pass_bytes = plan.workspace(batch, lengths.batch_size * lengths.prompt_len)
    needed = weight_bytes + cache_bytes + pass_bytes
    if needed > card_bytes:
        raise UserError(
            f"placement=managed: weights, the KV cache and the prompts' pass need "
            f"{needed / GIB:.1f} GiB, and the card has {card_bytes / GIB:.1f}; {MEMORY_HINTS}"
        )

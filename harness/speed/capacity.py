"""`experiment=capacity platform=cpu`: the largest batch that an emulated device holds, and tokens/s
at that batch and below it.

The device is emulated, and its memory (`platform.device_gib`) is limited for real: a session that
does not fit beside the weights is refused. The largest batch is found by arithmetic
(`harness.live.capacity`), opened, and timed as in `experiment=latency`; the session of a batch of
one more must be refused. On a CPU host and device are one RAM; the limit counts what would lie on
the device.

All sequences of a batch are one text, whose dense pass runs once: bytes and time depend on lengths,
not on words.

    python run.py experiment=capacity method=h2o placement=device platform.device_gib=0.75
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from harness.errors import UserError
from harness.live.capacity import Capacity, points
from harness.live.memory import GIB
from harness.live.needs import Plan, sizes_of
from harness.live.session import LiveSession
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.dense_prompts import LayerPrompt
from harness.model.load import LoadedModel
from harness.model.policies import fitted
from harness.model.resources import Memo
from harness.replay.setup import Setup, prepare
from harness.settings.config import LatencyConfig, RunConfig
from harness.settings.kinds import Outcome
from harness.speed.latency import (
    Prompts,
    compute_threads,
    decode_rows,
    prompt_ids,
    require_length,
    require_shared_prompt,
    source_of,
    two_memories,
)
from harness.speed.timed_run import SharedPrompt, TimedRun, run_shared_prompt, time_run


def run_capacity(config: RunConfig, loaded: LoadedModel, prompts: Prompts | None = None) -> Outcome:
    """The largest batch of the run that `config` describes, and its speed. prompts: kept prompts of
    this model.

    Raises UserError for sequences longer than the model's limit, weights that the device does not
    hold, and a batch that does not fit into this machine's memory.
    """
    shape, platform = config.latency, config.platform
    require_length(shape, loaded)
    with attach(loaded.model) as attached, compute_threads(attached.device) as num_threads:
        setup = _setup(config, loaded, attached)
        capacity = _capacity(config, setup, attached)
        batches = capacity.batches(config.capacity.curve)
        key = loaded.fingerprint, 1, shape.prompt_len, config.seed, config.calibration
        one = replace(config, latency=replace(shape, batch_size=1))

        def run_densely() -> SharedPrompt:
            require_shared_prompt(attached, 1, shape.prompt_len, shape.gen_len)
            return run_shared_prompt(attached, prompt_ids(one, loaded))

        shared = (Memo() if prompts is None else prompts).get(key, run_densely) if batches else None
        speeds: dict[int, dict[str, Any]] = {}
        samples: dict[str, Any] = {"num_compute_threads": num_threads}
        with two_memories(config, attached) as (rate, link):
            samples["copy_bytes_per_s"] = rate.copy_bytes_per_s
            for batch in batches:
                assert shared is not None, "there is a batch"
                metrics, raw = time_run(
                    attached,
                    _repeated(shared, batch, shape.repeats),
                    _timed_run(config, setup, replace(shape, batch_size=batch)),
                    link=link,
                    calibration=setup.calibration,
                )
                speeds[batch] = {name: metrics[name] for name in TIMED}
                samples[f"batch_{batch}"] = raw
            if shared is not None and capacity.wall_of(capacity.largest + 1) == "device memory":
                session = _session(config, setup, attached, link)
                _check_refused(session, _repeated(shared, capacity.largest + 1, 1))
    marks = {"platform": platform.name, "source": source_of(config)}
    rows = points(capacity, speeds, marks)
    metrics = {"source": marks["source"], "points": rows}
    return Outcome(metrics, samples, {"capacity": asdict(setup.method)})


def _setup(config: RunConfig, loaded: LoadedModel, attached: Attached) -> Setup:
    if attached.decoder.recurrent:
        raise UserError(
            f"model={loaded.name}: it has recurrent layers, whose states experiment=capacity does "
            "not size; choose a model with attention layers alone"
        )
    return prepare(config, loaded, attached, lambda: decode_rows(config.latency))


def _capacity(config: RunConfig, setup: Setup, attached: Attached) -> Capacity:
    device_gib, host_gib = config.platform.device_gib, config.capacity.host_gib
    assert device_gib is not None, "asked for when the settings were checked"
    method = fitted(attached, setup.method, setup.codec)
    plan = Plan(
        sizes_of(attached, method, prefetch=config.prefetch),
        method,
        setup.codec,
        config.placement,
        config.device_rows,
        setup.calibration,
    )
    return Capacity(
        f"platform.device_gib={device_gib:g}",
        plan,
        config.latency.prompt_len,
        config.latency.gen_len,
        int(device_gib * GIB),
        None if host_gib is None else int(host_gib * GIB),
        config.capacity.max_batch,
    )


def _timed_run(config: RunConfig, setup: Setup, shape: LatencyConfig) -> TimedRun:
    return TimedRun(
        setup.method, shape, config.placement, setup.codec, config.device_rows, config.prefetch
    )


TIMED = ("tpot_p50_s", "sequence_tokens_per_s", "decode_tokens_per_s", "num_timed_steps", "size")
"""Columns of a batch that are timed, as in `experiment=latency`."""


def _repeated(shared: SharedPrompt, batch: int, repeats: int) -> SharedPrompt:
    """The prompt of one sequence as that of `batch` equal ones, without copies of its states. Its
    own time, which is that of one sequence, stands for each of the repeats and is not reported."""
    prompt = shared.prompt
    layers = []
    for layer in prompt.layers:
        of_batch = [tensor.expand(batch, *tensor.shape[1:]) for tensor in layer.tensors()]
        layers.append(LayerPrompt.of(of_batch))
    repeated = replace(
        prompt,
        ids=prompt.ids.expand(batch, -1),
        real=prompt.real.expand(batch, -1),
        layers=layers,
        hidden=prompt.hidden.expand(batch, -1),
    )
    return SharedPrompt(repeated, [shared.dense_s[0]] * repeats)


def _session(config: RunConfig, setup: Setup, attached: Attached, link: Any) -> LiveSession:
    return LiveSession(
        attached,
        setup.method,
        max_new_tokens=config.latency.gen_len,
        codec=setup.codec,
        placement=config.placement,
        link=link if config.placement == "host" else None,
        calibration=setup.calibration,
        device_rows=config.device_rows,
        prefetch=config.prefetch,
    )


def _check_refused(session: LiveSession, shared: SharedPrompt) -> None:
    """Raise RuntimeError unless the emulated device refuses the session."""
    with closing(session):
        try:
            session.start(shared.prompt)
        except UserError as refusal:
            if str(refusal).startswith("platform.device_gib="):
                return
            raise
    raise RuntimeError(f"a batch of {len(shared.prompt.real)} fits, and was sized not to")

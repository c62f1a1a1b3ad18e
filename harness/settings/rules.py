"""What the settings of a run must be together: `check` raises a `UserError` for the first rule that
is broken. Each setting's own type and range is in `harness.settings.config`.

A rule stands in a table: the setting that is named, whether it is wrong, and why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any, get_args

from harness.errors import UserError, nearest
from harness.settings import systems
from harness.settings.codecs import (
    GROUP_SIZE,
    codec_named,
    codec_names,
    is_float,
    is_integer,
    layer_formats,
    takes,
)
from harness.settings.config import BEHIND_LINK, RUNNING, RunConfig, Statistic
from harness.settings.kinds import BOARD, find
from harness.settings.schema import kind_of, options

Rule = tuple[str, object, str]
"""A setting, whether it is wrong, and why."""


def check(config: RunConfig, given: Collection[str]) -> None:
    """Raise UserError for settings that contradict one another or play no part in this kind of run.

    given: the names of those that the user gave.
    """
    _check_budget(config, given)
    _check_codecs(config)
    systems.check_gpu_cache(config.method, config.gpu_cache)
    if find(config.kind).live:
        systems.check_combination(config.method, config.placement, config.gpu_cache)
    for rules in (_of_sources, _of_machines, _of_kinds):
        for setting, is_wrong, why in rules(config):
            if is_wrong:
                raise UserError(f"{setting}={_as_typed(_value(config, setting))}: {why}")


def _value(config: RunConfig, setting: str) -> Any:
    """The value of a setting as the user names it."""
    if setting == "method":
        return config.method_name
    if setting in ("data", "platform"):
        setting += ".name"
    for group in (config, config.latency, config.sampling, config.task):
        if hasattr(group, setting.partition(".")[0]):
            return attrgetter(setting)(group)
    raise KeyError(setting)


def _as_typed(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _of_sources(config: RunConfig) -> Iterator[Rule]:
    """Model, tasks and texts."""
    model, data, corpus = config.model, config.data, config.corpus
    is_random, is_local = model.weights == "random", data.name == "local"
    has_source = model.hub_id is not None or model.path is not None
    reads_ids = "model.weights=random reads random token ids; leave it out, or pretrained"
    needs_ids = "needs model.weights=random; allowed: offline"
    yield "data", is_local and data.root is None, "needs data.root=DIR, with a folder a data set"
    yield "data.root", not is_local and data.root, f"is read by data=local only, not by {data.name}"
    yield "corpus.seed", corpus.seed is not None and not corpus.spread, "needs corpus.spread=true"
    for name, text in (("corpus", corpus), ("calibration", config.calibration)):
        yield f"{name}.path", is_random and text.path, reads_ids
        yield f"{name}.name", not is_random and text.name == "random", needs_ids
    of_folder = "needs model.hub_id=, or model.path= of its folder"
    yield "model.gguf_file", model.gguf_file and not has_source, of_folder


def _of_machines(config: RunConfig) -> Iterator[Rule]:
    """Platform, device, link and where the cache lies."""
    kind, platform, placement = find(config.kind), config.platform, config.placement
    name, is_cpu, is_cuda = platform.name, platform.name == "cpu", platform.name == "cuda"
    is_modelled, capacity = platform.sheet is not None, config.kind == "capacity"
    streams, gib = platform.weights_on_device < 1, platform.device_gib
    no_link = f"experiment={config.experiment} decodes through no"
    yield (
        "platform",
        is_modelled and not kind.modelled,
        ("is modelled, nothing runs there; allowed here: cpu, cuda"),
    )
    yield "platform.name", not is_modelled and name not in RUNNING, nearest(name, RUNNING)
    yield (
        "platform.link_gbps",
        platform.link_gbps is not None and not is_cpu,
        ("sets the emulated link of platform=cpu; leave it null"),
    )
    yield "platform.device_gib", gib and not kind.live, f"{no_link} device memory; leave it out"
    yield "platform.weights_on_device", streams and not kind.live, f"{no_link} link; leave it out"
    yield (
        "platform.device_gib",
        gib and is_cpu and streams,
        (
            f"an emulated device holds all weights, and platform.weights_on_device is "
            f"{platform.weights_on_device}; leave one of them out"
        ),
    )
    device = config.model.device
    yield (
        "model.device",
        device == "map" and not is_cuda,
        (f"needs platform=cuda; allowed on {name}: auto, {name}"),
    )
    runs_on = "cpu" if is_modelled else name
    yield (
        "model.device",
        device not in ("map", runs_on),
        (f"contradicts platform={name}; leave one of them out"),
    )
    if not kind.live:
        return
    yield (
        "placement",
        placement == "managed" and not is_cuda,
        (f"needs platform=cuda; allowed on {name}: device, host"),
    )
    yield (
        "placement",
        placement == "disk" and not is_cpu,
        ("needs platform=cpu; allowed on cuda: device, host, managed"),
    )
    yield (
        "platform.overlap",
        placement not in BEHIND_LINK and not platform.overlap,
        (f"placement={placement} uses no link; use placement=host"),
    )
    yield (
        "platform.weights_on_device",
        streams and placement != "host",
        (f"no weights cross to placement={placement}; use placement=host"),
    )
    yield (
        "platform.link_gbps",
        platform.link_gbps is not None and placement == "disk",
        ("placement=disk has the disk's own rate; leave it null"),
    )
    yield (
        "platform.disk_dir",
        platform.disk_dir is not None and placement != "disk",
        ("is for placement=disk alone"),
    )
    yield (
        "platform.device_gib",
        is_cuda and gib and placement != "managed" and not capacity,
        ("is for placement=managed and kind=capacity; leave it null"),
    )


def _of_kinds(config: RunConfig) -> Iterator[Rule]:
    """What plays no part in a kind of run, and what it cannot do without."""
    kind = config.kind
    no_part = f"plays no part in kind={kind}; leave it out"
    without_budget = ("advise", "contract", "trust", "analysis")
    yield "budget", config.budget is not None and kind in without_budget, no_part
    yield "codec", config.codec is not None and kind in ("advise", "trust", "analysis"), no_part
    yield "prompt", config.prompt is not None and kind != "generate", "needs experiment=generate"
    yield "kind", *_of_another_table(config)
    yield from _OF_KIND.get(kind, lambda config: ())(config)


def _of_another_table(config: RunConfig) -> tuple[bool, str]:
    """Whether the rows of a run would be none of its experiment's table, and what to choose."""
    usual = kind_of(config.experiment)
    if usual is None:
        return False, ""
    tables = {find(usual).table, *(("latency",) if config.experiment == BOARD else ())}
    others = [name for name in options("experiment") if kind_of(name) == config.kind]
    return find(config.kind).table not in tables, (
        f"its rows are none of experiment={config.experiment}'s table; choose an experiment of "
        f"that kind: {', '.join(others) or 'none here is'}"
    )


def _of_perplexity(config: RunConfig) -> Iterator[Rule]:
    needed = max(1, config.prefill_len) + 2
    yield (
        "seq_len",
        config.seq_len < needed,
        (
            f"must be at least {needed} with prefill_len={config.prefill_len}, so that a decode row "
            "predicts a token of the window"
        ),
    )
    under_method = config.prefill_len < 1 and not config.method.reads_all
    yield "prefill_len", under_method, "must be at least 1 under a method"


def _of_turns(config: RunConfig) -> Iterator[Rule]:
    both = "kind=turns asks each question both ways; leave it out"
    yield "prefill", config.prefill != "auto", both
    cuts = "kind=turns would cut a context differently for each question"
    yield "too_long", config.task.too_long == "truncate", cuts


def _of_one_text(config: RunConfig) -> Iterator[Rule]:
    config.sampling.rule()
    one_text = f"kind={config.kind} writes one text a prompt; leave it out"
    yield "repeats", config.sampling.repeats > 1, one_text


def _of_long_decode(config: RunConfig) -> Iterator[Rule]:
    # The dense pass of a prompt gives the first token; a method decodes from the second on.
    new = config.max_new_tokens
    yield "prefill_len", config.prefill_len < 1, "must be at least 1 in kind=long_decode"
    yield "max_new_tokens", new is None or new < 2, "must be at least 2 in kind=long_decode"
    yield from _of_one_text(config)


def _of_generate(config: RunConfig) -> Iterator[Rule]:
    yield "prompt", not config.prompt, "experiment=generate needs a text to go on from"
    yield from _of_one_text(config)


def _of_capacity(config: RunConfig) -> Iterator[Rule]:
    from methods.extras import NeedsInputs, RereadsPrompt  # loaded with the method

    platform, hits = config.platform, config.capacity.hit_frac
    placed = config.placement in ("device", "host")
    yield "placement", not placed, "allowed in kind=capacity: device, host"
    yield (
        "method",
        isinstance(config.method, NeedsInputs),
        (
            "needs the inputs of the layers, for which each prompt runs in one pass; kind=capacity "
            "does not size it"
        ),
    )
    yield (
        "method",
        isinstance(config.method, RereadsPrompt),
        (
            "reads each prompt again and holds the states of all layers meanwhile; kind=capacity does "
            "not size it"
        ),
    )
    hides = "kind=capacity is about transfers beside the computation, of pinned memory"
    yield "platform.overlap", not platform.overlap, hides
    yield "platform.pinned", not platform.pinned, hides
    one = "kind=capacity is about one device; allowed: auto, cpu, cuda"
    yield "model.device", config.model.device == "map", one
    all_there = "kind=capacity has all weights on the device; leave it out"
    yield "platform.weights_on_device", platform.weights_on_device < 1, all_there
    of_emulated = "kind=capacity needs the memory of the emulated device, in GiB"
    is_unsized = platform.name == "cpu" and platform.device_gib is None
    yield "platform.device_gib", is_unsized, of_emulated
    needs_hits = platform.sheet is not None and config.gpu_cache > 0
    yield (
        "capacity.hit_frac",
        needs_hits and hits is None,
        (
            "on a modelled machine nobody knows which rows are asked for again; give the share that "
            "was measured (`found on device`), from 0 to below 1"
        ),
    )
    no_rows = "is for gpu_cache on a modelled machine; leave it null"
    yield "capacity.hit_frac", hits is not None and not needs_hits, no_rows


def _of_advise(config: RunConfig) -> Iterator[Rule]:
    needs = "kind=advise needs a modelled machine of conf/platform"
    yield "platform", config.platform.sheet is None, needs


def _of_analysis(config: RunConfig) -> Iterator[Rule]:
    statistic, method = config.analysis.statistic, config.method
    allowed = ", ".join(get_args(Statistic))
    yield "analysis.statistic", statistic is None, f"kind=analysis needs one of {allowed}"
    one = "kind=analysis compares layers on one device; allowed: auto, cpu, cuda"
    yield "model.device", config.model.device == "map", one
    one_part = "kind=analysis reads one part of the text; leave it out"
    yield "corpus.spread", config.corpus.spread, one_part
    chooses = method.reads_all or method.when != "kept"
    compares = "analysis.statistic=similarity compares h2o or streaming"
    yield "method", statistic == "similarity" and chooses, compares


_OF_KIND = {
    "perplexity": _of_perplexity,
    "turns": _of_turns,
    "long_decode": _of_long_decode,
    "capacity": _of_capacity,
    "advise": _of_advise,
    "generate": _of_generate,
    "analysis": _of_analysis,
}


def _check_budget(config: RunConfig, given: Collection[str]) -> None:
    """Raise UserError for a budget that the method cannot have, or sets beside a given setting."""
    budget, method = config.budget, config.method
    if budget is None:
        return
    where = f"budget={budget:g}"
    try:
        with_it: object = method.with_budget(budget)
    except ValueError as error:
        near = f"budget=nearest:{budget:g} takes the nearest that it allows"
        raise UserError(f"{where}: method={config.method_name}: {error}; {near}") from error
    from methods.base import Method  # loaded with the method

    if not isinstance(with_it, Method):
        wrong = f"with_budget returned {with_it!r}; allowed: the method with this budget"
        raise UserError(f"method={config.method_name}: {wrong}")
    for field in fields(method):
        setting, value = f"method.{field.name}", getattr(method, field.name)
        if setting not in given or value is None:
            continue
        if getattr(with_it, field.name) != value:
            raise UserError(f"{setting}={value}: {where} sets it; leave one of them out")


def _check_codecs(config: RunConfig) -> None:
    """Raise UserError for settings of rows that contradict one another or have no effect."""
    keys, values = config.codec, config.value_codec or config.codec
    for setting in ("value_codec", "codec_layers"):
        value = getattr(config, setting)
        if value is not None and keys is None:
            listed = f"[{','.join(value)}]" if isinstance(value, tuple) else value
            of_others = "the keys" if setting == "value_codec" else "other layers"
            needed = f"needs codec=, the format of {of_others}; fp32 is exact"
            raise UserError(f"{setting}={listed}: {needed}")
    own = config.codec if config.own_codec is not None else None
    for setting, name in (("codec", keys), ("value_codec", config.value_codec)):
        is_own = setting == "codec" and own is not None
        if name is not None and not is_own and name not in codec_names():
            raise UserError(f"{setting}={name}: {nearest(name, codec_names())}")
    layers = layer_formats(config.codec_layers or ())
    dense_layers = config.method.dense_layers
    for entry in layers:
        if entry.last is not None and entry.last < dense_layers:
            are_dense = f"method.dense_layers={dense_layers} leaves these layers as they are"
            later = "name later ones, or set it to 0"
            raise UserError(f"codec_layers=[{entry.words}]: {are_dense}; {later}")
    formats = {keys, values, *(entry.keys for entry in layers), *(entry.values for entry in layers)}
    words = f"codec={'/'.join(dict.fromkeys((str(keys), str(values))))}"
    has_groups = any(takes(name, "group_size") for name in formats)
    are_turned = takes(keys, "rotation") and takes(values, "rotation")
    are_floats = all(name is None or is_float(name) for name in (keys, values))
    by_channel, size, residual = config.key_groups == "channel", config.group_size, config.residual
    is_tiled = any(_span(name, size) > 1 for name in formats)
    grouped = "key_groups=channel" if by_channel else words
    not_whole = residual == 0 or residual % size != 0
    integer = "choose an integer codec"
    rules = [
        ("group_size", size != GROUP_SIZE and not has_groups, f"{words} has no groups; {integer}"),
        ("rotation", config.rotation and not are_turned, f"{words} is not turned; {integer}"),
        ("residual", residual and are_floats, f"{words} leaves no token behind; {integer}"),
        (
            "key_groups",
            by_channel and not is_integer(keys),
            f"codec={keys} has no groups; {integer}",
        ),
        (
            "residual",
            (by_channel or is_tiled) and not_whole,
            f"must be a multiple of group_size={size}, above 0, with {grouped}",
        ),
        (
            "residual",
            residual and not config.method.reads_all,
            f"method={config.method_name} does not read all that is cached",
        ),
    ]
    for setting, is_wrong, why in rules:
        if is_wrong:
            raise UserError(f"{setting}={getattr(config, setting)}: {why}")


def _span(name: str | None, group_size: int) -> int:
    """Tokens that a shipped codec codes together."""
    return codec_named(name, group_size=group_size).span if name in codec_names() else 1

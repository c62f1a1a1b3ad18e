"""What the settings of a run must be together: `check` raises a `UserError` for the first rule that
is broken. Each setting's own type and range is in `harness.settings.config`, the rules of one kind
of run in `harness.settings.kinds`.

A rule names a setting, says whether it is wrong, and why.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from harness.errors import UserError, nearest
from harness.settings import codecs, systems
from harness.settings.codecs import GROUP_SIZE, is_float, takes
from harness.settings.config import BEHIND_LINK, RUNNING, RunConfig
from harness.settings.kinds import BOARD, Rules, find
from harness.settings.schema import kind_of, options


def check(config: RunConfig, given: Collection[str]) -> None:
    """Raise UserError for settings that contradict one another or play no part in this kind of run.

    given: the names of those that the user gave.
    """
    _check_budget(config, given)
    systems.check_gpu_cache(config.method, config.gpu_cache)
    kind = find(config.kind)
    if kind.live:
        systems.check_combination(config.method, config.placement, config.gpu_cache)
    for rules in (_of_rows, _of_sources, _of_machines, _of_links, _of_kinds, kind.rules):
        for setting, is_wrong, why in rules(config):
            if is_wrong:
                raise UserError(f"{config.typed(setting)}: {why}")


def _check_budget(config: RunConfig, given: Collection[str]) -> None:
    """Raise UserError for a budget that the method cannot have, or sets beside a given setting."""
    budget, method = config.budget, config.method
    if budget is None:
        return
    where = f"budget={budget:g}"
    try:
        with_it = method.with_budget(budget)
    except ValueError as error:
        near = f"budget=nearest:{budget:g} takes the nearest that it allows"
        raise UserError(f"{where}: method={config.method_name}: {error}; {near}") from error
    for field in fields(method):
        setting, value = f"method.{field.name}", getattr(method, field.name)
        is_given = setting in given and value is not None
        if is_given and getattr(with_it, field.name) != value:
            raise UserError(f"{setting}={value}: {where} sets it; leave one of them out")


def _of_rows(config: RunConfig) -> Rules:
    """How rows are stored."""
    keys, values, size = config.codec, config.value_codec or config.codec, config.group_size
    needs = "needs codec=, the format of {}; fp32 is exact"
    yield "value_codec", config.value_codec and not keys, needs.format("the keys")
    yield "codec_layers", config.codec_layers and not keys, needs.format("other layers")
    known, shipped_keys = codecs.codec_names(), None if config.own_codec else keys
    for setting, codec in (("codec", shipped_keys), ("value_codec", config.value_codec)):
        if codec is not None and codec not in known:
            yield setting, True, nearest(codec, known)
    formats, dense = {keys, values}, config.method.dense_layers
    for layers in codecs.layer_formats(config.codec_layers or ()):
        formats |= {layers.keys, layers.values}
        if layers.last is not None and layers.last < dense:
            are_dense = f"method.dense_layers={dense} leaves these layers as they are"
            named = f"codec_layers=[{layers.words}]"
            raise UserError(f"{named}: {are_dense}; name later ones, or set it to 0")
    words = f"codec={'/'.join(dict.fromkeys((str(keys), str(values))))}"
    instead = "choose an integer codec"
    has_groups = any(takes(name, "group_size") for name in formats)
    yield "group_size", size != GROUP_SIZE and not has_groups, f"{words} has no groups; {instead}"
    is_turned = takes(keys, "rotation") and takes(values, "rotation")
    yield "rotation", config.rotation and not is_turned, f"{words} is not turned; {instead}"
    residual, by_channel = config.residual, config.key_groups == "channel"
    are_exact = all(name is None or is_float(name) for name in (keys, values))
    yield "residual", residual and are_exact, f"{words} leaves no token behind; {instead}"
    no_channels = by_channel and not codecs.is_integer(keys)
    yield "key_groups", no_channels, f"codec={keys} has no groups; {instead}"
    shipped = formats.intersection(known)
    is_tiled = any(codecs.codec_named(name, group_size=size).span > 1 for name in shipped if name)
    is_ragged = residual == 0 or residual % size != 0
    whole = f"must be a multiple of group_size={size}, above 0, with "
    whole += "key_groups=channel" if by_channel else words
    yield "residual", (by_channel or is_tiled) and is_ragged, whole
    reads_few = f"method={config.method_name} does not read all that is cached"
    yield "residual", residual and not config.method.reads_all, reads_few


def _of_sources(config: RunConfig) -> Rules:
    """Model, tasks and texts."""
    model, data, corpus = config.model, config.data, config.corpus
    is_random, is_local = model.weights == "random", data.name == "local"
    yield "data", is_local and data.root is None, "needs data.root=DIR, with a folder a data set"
    yield "data.root", not is_local and data.root, f"is read by data=local only, not by {data.name}"
    yield "corpus.seed", corpus.seed is not None and not corpus.spread, "needs corpus.spread=true"
    reads_ids = "model.weights=random reads random token ids; leave it out, or pretrained"
    needs_ids = "needs model.weights=random; allowed: offline"
    for name, text in (("corpus", corpus), ("calibration", config.calibration)):
        yield f"{name}.path", is_random and text.path, reads_ids
        yield f"{name}.name", not is_random and text.name == "random", needs_ids
    no_source = model.gguf_file and not (model.hub_id or model.path)
    yield "model.gguf_file", no_source, "needs model.hub_id=, or model.path= of its folder"


def _of_machines(config: RunConfig) -> Rules:
    """Platform and device."""
    kind, platform, device = find(config.kind), config.platform, config.model.device
    name, is_sheet, gib = platform.name, platform.sheet is not None, platform.device_gib
    streams = platform.weights_on_device < 1
    no_run = "is modelled, nothing runs there but experiment=advise; allowed here: cpu, cuda"
    yield "platform", is_sheet and not kind.modelled, no_run
    yield "platform.name", not is_sheet and name not in RUNNING, nearest(name, RUNNING)
    of_cpu = "sets the emulated link of platform=cpu; leave it null"
    yield "platform.link_gbps", platform.link_gbps and name != "cpu", of_cpu
    none = f"experiment={config.experiment} decodes through no"
    yield "platform.device_gib", gib and not kind.live, f"{none} device memory; leave it out"
    yield "platform.weights_on_device", streams and not kind.live, f"{none} link; leave it out"
    all_there = "an emulated device holds all weights; leave out platform.device_gib"
    yield "platform.weights_on_device", streams and gib and name == "cpu", all_there
    other = device != ("cpu" if is_sheet else name)
    yield "model.device", other, f"contradicts platform={name}; leave one of them out"


def _of_links(config: RunConfig) -> Rules:
    """Where the cache lies in live decoding, and what crosses a link."""
    platform, placement = config.platform, config.placement
    if not find(config.kind).live:
        return
    on_disk, managed = placement == "disk", placement == "managed"
    name, streams = platform.name, platform.weights_on_device < 1
    here = f"needs platform=cuda; allowed on {name}: device, host"
    yield "placement", managed and name != "cuda", here
    there = "needs platform=cpu; allowed on cuda: device, host, managed"
    yield "placement", on_disk and name != "cpu", there
    no_link = f"placement={placement} uses no link; use placement=host"
    yield "platform.overlap", placement not in BEHIND_LINK and not platform.overlap, no_link
    no_weights = f"no weights cross to placement={placement}; use placement=host"
    yield "platform.weights_on_device", streams and placement != "host", no_weights
    own_rate = "placement=disk has the disk's own rate; leave it null"
    yield "platform.link_gbps", platform.link_gbps and on_disk, own_rate
    graphs = platform.graphs != "off" and (name != "cuda" or config.kind != "latency")
    yield "platform.graphs", graphs, "is for timed runs on platform=cuda; leave it off"
    yield "platform.disk_dir", platform.disk_dir and not on_disk, "is for placement=disk alone"
    of_card = platform.device_gib and name == "cuda" and not managed and not config.latency.largest
    smaller = "is for placement=managed and batch_size=largest; leave it null"
    yield "platform.device_gib", of_card, smaller


def _of_kinds(config: RunConfig) -> Rules:
    """What plays no part in a kind of run."""
    kind, no_part = config.kind, f"plays no part in kind={config.kind}; leave it out"
    no_codec = kind in ("advise", "analysis")
    yield "budget", config.budget is not None and (no_codec or kind == "contract"), no_part
    yield "codec", config.codec is not None and no_codec, no_part
    yield "prompt", config.prompt is not None and kind != "generate", "needs experiment=generate"
    usual = kind_of(config.experiment)
    if usual is not None:
        tables = {find(usual).table, *(("latency",) if config.experiment == BOARD else ())}
        if find(kind).table not in tables:
            others = [name for name in options("experiment") if kind_of(name) == kind]
            no_row = f"its rows are none of experiment={config.experiment}'s table; choose an "
            no_row += f"experiment of that kind: {', '.join(others) or 'none here is'}"
            yield "kind", True, no_row

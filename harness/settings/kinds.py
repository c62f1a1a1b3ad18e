"""The kinds of run, such as perplexity: what decides their numbers, and where the numbers go; and
what the settings of a run must be together (`check`). Imports no torch.

A rule names a setting, says whether it is wrong, and why. Each setting's own type and range is in
`harness.settings.config`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from harness.errors import UserError, nearest
from harness.settings import codecs
from harness.settings.codecs import CODEC_WORDS, GROUP_SIZE, is_float, takes
from harness.settings.config import BEHIND_LINK, RUNNING, RunConfig, Statistic
from harness.settings.schema import kind_of, options

OF_CODECS = (*CODEC_WORDS, "own_codec", "group_size")
COMMON = (
    "experiment", "kind", "model", "method", "method_name",
    *OF_CODECS, "budget", "budget_rule", "gpu_cache",
)  # fmt: skip
"""Settings that decide the numbers of every kind of run."""
RECORDING_STEPS = 4
"""Decode steps until all later ones are replayed: of two kinds, by which buffer is free, one that
runs as it is, and one that is recorded."""
Rules = Iterator[tuple[str, object, str]]
"""A setting, whether it is wrong, and why, for each rule."""


@dataclass(frozen=True)
class Outcome:
    """What a run measured.

    metrics: by task or corpus: acc, perplexity, kl_nats, budget, ...; an absent measurement is
    None. samples: raw values behind the metrics, by task.
    methods: the settings of the method that ran, by task, `budget` resolved.
    chunks: metrics by range of tokens: {"first", "stop", "num_tokens", "metrics"}, of the only
        text; "windows" where each window has its {"nll", "nll_full"}.
    """

    metrics: dict[str, Any]
    samples: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, Any] = field(default_factory=dict)
    chunks: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """What the runs of one kind have in common; `harness.run.runner` measures them.

    depends_on: the settings that decide its numbers besides `COMMON`; a change of any other makes
    no other run. unread: those of them that a run does not read. needs_weights: whether a model is
    loaded; without, its shape is all that is looked at. reads: what it reads besides its model and
    method. sizes: the settings on which its memory depends most. table: the shape of its rows in
    tables. code: the folders and modules of `harness` that make its numbers, besides the core that
    all kinds share. live: it decodes through two memories, so that its label may name a system
    (`harness.settings.systems`). timed: its runs go in a process of their own. keeps_record: its
    outcome is recorded, and the run is skipped the next time; else it only prints.
    """

    depends_on: tuple[str, ...] = ()
    unread: Callable[[RunConfig], set[str]] = lambda config: set()
    needs_weights: Callable[[RunConfig], bool] = lambda config: True
    reads: tuple[Literal["corpus", "tasks", "prompt", "calibration"], ...] = ()
    sizes: Callable[[RunConfig], list[str]] = lambda config: []
    table: Literal["accuracy", "latency", "analysis"] = "accuracy"
    code: tuple[str, ...] = ()
    live: bool = False
    timed: bool = False
    keeps_record: bool = True


BOARD = "board"
"""The experiment that methods are compared by: its runs are of texts, of tasks, and timed steps, so
their rows go to several tables."""


def _unread_by_perplexity(config: RunConfig) -> set[str]:
    return {"sampling", "seed"} if config.max_new_tokens is None else {"seq_len"}


def _unread_by_latency(config: RunConfig) -> set[str]:
    """A host decides how large the largest batch is; else only whether a run is refused."""
    return set() if config.latency.largest else {"capacity", "platform.host_gib"}


def _sizes_of_perplexity(config: RunConfig) -> list[str]:
    is_written = config.max_new_tokens is not None
    return [*(("prefill_len", "max_new_tokens") if is_written else ("seq_len",)), "num_windows"]


def _sizes_of_latency(config: RunConfig) -> list[str]:
    lengths = ["prompt_len", "gen_len"]
    largest = config.latency.largest
    return [*lengths, "capacity.max_batch"] if largest else ["batch_size", *lengths]


TEXTS = ("corpus", "data", "calibration")
KINDS = {
    "perplexity": Kind(
        depends_on=(
            *TEXTS, "seq_len", "prefill_len", "num_windows", "max_new_tokens", "sampling", "seed",
        ),
        unread=_unread_by_perplexity,
        reads=("corpus", "calibration"),
        sizes=_sizes_of_perplexity,
        code=("scoring", "results/samples.py"),
    ),
    "tasks": Kind(
        depends_on=(
            "tasks", "task", "num_samples", "num_fewshot", "sampling", "seed", "data",
            "calibration", "prefill",
        ),
        reads=("tasks", "calibration"),
        sizes=lambda config: ["num_fewshot"],
        code=("scoring", "results/samples.py"),
    ),
    "latency": Kind(
        depends_on=("platform", "placement", "latency", "capacity", "seed", "calibration"),
        unread=_unread_by_latency,
        reads=("prompt", "calibration"),
        sizes=_sizes_of_latency,
        table="latency",
        code=("speed", "results/step_stats.py"),
        live=True,
        timed=True,
    ),
    "generate": Kind(
        sizes=lambda config: ["max_new_tokens"],
        live=True,
        keeps_record=False,
    ),
    "analysis": Kind(
        depends_on=(*TEXTS, "analysis"),
        needs_weights=lambda config: config.analysis.statistic != "memory",
        reads=("corpus", "calibration"),
        sizes=lambda config: ["analysis.num_tokens"],
        table="analysis",
        code=("paper/analysis.py",),
    ),
    "contract": Kind(needs_weights=lambda config: config.thorough, keeps_record=False),
    "advise": Kind(
        needs_weights=lambda config: False,
        keeps_record=False,
    ),
}  # fmt: skip


def find(kind: str) -> Kind:
    """The kind of run of that name. Raises UserError where there is none."""
    if not isinstance(kind, str) or kind not in KINDS:  # composed YAML, not checked yet
        raise UserError(f"kind={kind}: {nearest(kind, sorted(KINDS))}")
    return KINDS[kind]


def foreign_settings(kind: str) -> set[str]:
    """Settings that play no part in a run of this kind."""
    all_settings = {field.name for field in fields(RunConfig)}
    return all_settings.difference(COMMON, find(kind).depends_on)


# What settings must be together


def check(config: RunConfig, given: Collection[str]) -> None:
    """Raise UserError for settings that contradict one another or play no part in this kind of run.

    given: the names of those that the user gave.
    """
    _check_budget(config, given)
    for rules in (_of_rows, _of_sources, _of_machines, _of_links, _of_kinds):
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
    for name, value in vars(method).items():
        setting = f"method.{name}"
        is_given = setting in given and value is not None
        if is_given and getattr(with_it, name) != value:
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
    gpu_cache, method = config.gpu_cache, config.method
    whole_times = "must be 0, or 1 and more, times the rows that a step reads"
    yield "gpu_cache", 0 < gpu_cache < 1, whole_times
    no_rows = f"{method.title} selects no rows; needs a method that retrieves"
    yield "gpu_cache", gpu_cache and not method.names_rows, no_rows


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
    task = config.task
    turns = "needs apply_chat_template=true, whose turns the examples are"
    yield "fewshot_as_multiturn", task.fewshot_as_multiturn and not task.apply_chat_template, turns
    ends = "needs think_end_token, which ends the thinking, such as </think>"
    yield "enable_thinking", task.enable_thinking and task.think_end_token is None, ends
    no_source = model.gguf_file and not (model.hub_id or model.path)
    yield "model.gguf_file", no_source, "needs model.hub_id=, or model.path= of its folder"


def _of_machines(config: RunConfig) -> Rules:
    """Platform and device."""
    kind, platform, device = find(config.kind), config.platform, config.model.device
    name, is_sheet, gib = platform.name, platform.sheet is not None, platform.device_gib
    streams = platform.weights_on_device < 1
    no_run = "is modelled, nothing runs there but experiment=advise; allowed here: cpu, cuda"
    yield "platform", is_sheet and config.kind != "advise", no_run
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
    platform, placement, method = config.platform, config.placement, config.method
    if not find(config.kind).live:
        return
    if method.replay_only is not None:
        raise UserError(method.replay_only)
    crosses = placement in BEHIND_LINK
    scores = f"{method.title} selects by the true scores of all keys; use placement=device"
    yield "placement", crosses and method.when == "true_scores", scores
    no_rows = f"placement={placement} fetches no rows; needs placement=host or disk"
    yield "gpu_cache", config.gpu_cache and not crosses, no_rows
    on_disk, managed = placement == "disk", placement == "managed"
    name, streams = platform.name, platform.weights_on_device < 1
    here = f"needs platform=cuda; allowed on {name}: device, host"
    yield "placement", managed and name != "cuda", here
    there = "needs platform=cpu; allowed on cuda: device, host, managed"
    yield "placement", on_disk and name != "cpu", there
    no_link = f"placement={placement} uses no link; use placement=host"
    yield "platform.overlap", not crosses and not platform.overlap, no_link
    no_weights = f"no weights cross to placement={placement}; use placement=host"
    yield "platform.weights_on_device", streams and placement != "host", no_weights
    own_rate = "placement=disk has the disk's own rate; leave it null"
    yield "platform.link_gbps", platform.link_gbps and on_disk, own_rate
    decodes = name == "cuda" and config.kind in ("latency", "generate")
    graphs = "is for experiment=latency and generate on platform=cuda; leave it off"
    yield "platform.graphs", platform.graphs != "off" and not decodes, graphs
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
    method, statistic = config.method, config.analysis.statistic
    if kind == "perplexity":
        yield from _of_perplexity(config)
    if kind == "latency":
        yield from _of_latency(config)
    if kind == "generate" or (kind == "perplexity" and config.max_new_tokens is not None):
        config.sampling.rule()
        one_text = f"kind={kind} writes one text a prompt; leave it out"
        yield "repeats", config.sampling.repeats > 1, one_text
    if kind == "generate":
        yield "prompt", not config.prompt, "experiment=generate needs a text to go on from"
    if kind == "tasks":
        no_text = "kind=tasks reads text, and random weights read random token ids"
        yield "model.weights", config.model.weights == "random", no_text
        is_cut = config.prefill == "both" and config.task.too_long == "truncate"
        yield "too_long", is_cut, "prefill=both would cut a context differently for each question"
    if kind == "advise":
        needs = "kind=advise needs a modelled machine of conf/platform"
        yield "platform", config.platform.sheet is None, needs
    if kind == "analysis":
        allowed = ", ".join(get_args(Statistic))
        yield "analysis.statistic", statistic is None, f"kind=analysis needs one of {allowed}"
        one_part = "kind=analysis reads one part of the text; leave it out"
        yield "corpus.spread", config.corpus.spread, one_part
        chooses = method.reads_all or method.when != "kept"
        compares = "analysis.statistic=similarity compares h2o or streaming"
        yield "method", statistic == "similarity" and chooses, compares


def _of_perplexity(config: RunConfig) -> Rules:
    prefill, new = config.prefill_len, config.max_new_tokens
    if new is not None:
        # The dense pass of a prompt gives the first token; a method decodes from the second on.
        yield "prefill_len", prefill < 1, "must be at least 1 where texts are decoded"
        yield "max_new_tokens", new < 2, "must be at least 2 in kind=perplexity"
        return
    needed = max(1, prefill) + 2
    least = f"must be at least {needed} with prefill_len={prefill}, for a row that predicts a token"
    yield "seq_len", config.seq_len < needed, least
    no_prompt = prefill < 1 and not config.method.reads_all
    yield "prefill_len", no_prompt, "must be at least 1 under a method"


def _of_latency(config: RunConfig) -> Rules:
    decoded, warmup_steps = config.latency.gen_len - 1, config.latency.warmup_steps
    needed = warmup_steps + (config.latency.timed_steps or 1)
    sums = f"has {decoded} decode steps; warmup_steps + timed_steps are {needed}"
    yield "gen_len", needed > decoded, sums
    unrecorded = config.platform.graphs != "off" and warmup_steps < RECORDING_STEPS
    recorded = f"must be at least {RECORDING_STEPS} with platform.graphs=auto, which records them"
    yield "warmup_steps", unrecorded, recorded
    if not config.latency.largest:
        return
    platform, method = config.platform, config.method
    placed = config.placement in ("device", "host")
    yield "placement", not placed, "allowed with batch_size=largest: device, host"
    of_inputs = "needs the inputs of the layers, for which each prompt runs in one pass"
    yield "method", method.needs_inputs, f"{of_inputs}; batch_size=largest does not size it"
    again = "reads each prompt again and holds the states of all layers meanwhile"
    yield "method", method.rereads_prompt, f"{again}; batch_size=largest does not size it"
    hides = "batch_size=largest is about transfers beside the computation, of pinned memory"
    yield "platform.overlap", not platform.overlap, hides
    yield "platform.pinned", not platform.pinned, hides
    all_there = "batch_size=largest has all weights on the device; leave it out"
    yield "platform.weights_on_device", platform.weights_on_device < 1, all_there
    unsized = platform.name == "cpu" and platform.device_gib is None
    of_emulated = "batch_size=largest needs the memory of the emulated device, in GiB"
    yield "platform.device_gib", unsized, of_emulated

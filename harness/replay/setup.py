"""Prepares a method for its first forward: its budget, its codec and its calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from harness.data.text import calibration_ids, token_ids
from harness.errors import UserError, line_of
from harness.files import cache_dir
from harness.model.attached import Attached
from harness.model.budgets import TOLERANCE, with_budget_as_stored
from harness.model.load import LoadedModel
from harness.model.prompts import cached_calibration
from harness.replay.session import Setup
from harness.settings.codecs import codec_named, is_float, is_integer, layer_formats
from harness.settings.config import RunConfig
from harness.settings.kinds import find
from methods.base import Calibration, Method, TokenCounts
from methods.codecs.base import RowCodec
from methods.codecs.integers import ChannelCodec
from methods.codecs.split import AnyCodec, CacheCodec, LayerCodecs, NamedLayers, SplitCodec

MEASUREMENTS = 14
"""Passes over the calibration text that look for a budget, at most."""


def prepare(
    config: RunConfig,
    loaded: LoadedModel,
    attached: Attached,
    decode_rows: Callable[[], Sequence[TokenCounts]],
) -> Setup:
    """Resolve a run's method on a loaded model.

    decode_rows: lists the rows that `budget` is to be met on; called only where it is set.
    """
    if config.budget is None:
        method = config.method
    elif config.budget_is_measured:
        method = with_budget_on_text(config, loaded, attached, decode_rows())
    else:
        method = with_budget_as_stored(
            config.method,
            codec_of(config),
            attached.geometry,
            decode_rows(),
            config.budget,
            nearest=config.budget_rule == "nearest",
            preset=config.method_name,
            warns=not find(config.kind).keeps_record,  # the runner does, of what was read
        )
    return _setup(config, method, loaded, attached)


def _setup(config: RunConfig, method: Method, loaded: LoadedModel, attached: Attached) -> Setup:
    calibration = calibrated(config, method, loaded, attached)
    return Setup(
        tokenized(method, loaded),
        codec_of(config),
        calibration,
        config.gpu_cache,
    )


def with_budget_on_text(
    config: RunConfig, loaded: LoadedModel, attached: Attached, rows: Sequence[TokenCounts]
) -> Method:
    """The method of `config`, whose reads depend on the data, with the setting whose budget is
    nearest to `config.budget` on the calibration text.

    Bisection over the number that `with_budget` takes: each step replays the text and takes the
    budget that was read. Its prompt has the same share of it as the prompts of `rows` have of their
    sequences. Raises UserError where nothing lands within `TOLERANCE` and `nearest` was not asked
    for, and where the method allows no budget.
    """
    target = config.budget
    assert target is not None, "asked for by the caller"
    ids = calibration_ids(config.calibration, loaded.reader)[: loaded.max_length]
    share_of_prompt = fmean(row.prompt / row.final for row in rows)
    prompt = min(max(1, round(share_of_prompt * len(ids))), len(ids) - 2)

    def size_of(number: float) -> float:
        setup = _setup(config, config.method.with_budget(number), loaded, attached)
        return _budget_on(ids, prompt, setup, attached)

    whole = TokenCounts(prompt, prompt, len(ids))
    what = f"budget={target:g}: method={config.method_name}"
    try:
        low, high = config.method.min_budget(whole), 1.0
        measured = {low: size_of(low), high: size_of(high)}
        for _ in range(MEASUREMENTS - 2):
            best = min(measured, key=lambda number: abs(measured[number] - target))
            if abs(measured[best] - target) < TOLERANCE / 4:
                break
            middle = (low + high) / 2
            measured[middle] = size_of(middle)
            low, high = (middle, high) if measured[middle] < target else (low, middle)
    except ValueError as error:
        raise UserError(f"{what} cannot have it: {error}") from error
    best = min(measured, key=lambda number: abs(measured[number] - target))
    if abs(measured[best] - target) > TOLERANCE and config.budget_rule != "nearest":
        least, most = min(measured.values()), max(measured.values())
        found = f"the nearest budget measured on the calibration text is {measured[best]:.3f}"
        raise UserError(
            f"{what}: {found}, of {least:.3f} to {most:.3f}; budget=nearest:{target:g} takes it"
        )
    return config.method.with_budget(best)


@torch.inference_mode()
def _budget_on(ids: Sequence[int], prompt: int, setup: Setup, attached: Attached) -> float:
    """The budget that a method reads in the rows of one sequence after its prompt."""
    tokens = torch.tensor([ids], device=attached.device)
    real = torch.ones_like(tokens, dtype=torch.bool)
    session = setup.replay(attached, torch.tensor([len(ids)], device=attached.device), len(ids))
    session.prefill(tokens[:, :prompt], real[:, :prompt])
    session.decode(tokens[:, prompt:-1], real[:, prompt:-1])
    return session.reads.budget


def tokenized(method: Method, loaded: LoadedModel) -> Method:
    """The method with its texts as token ids of the model; UserError where it has texts and the
    model no tokenizer."""

    def encode(text: str) -> list[int]:
        if loaded.reader is None:
            raise UserError(
                f"method {method.title}: its instructions are text, and {loaded.name} has no "
                "tokenizer; choose a model that has one, or give token ids, "
                "such as method.instruction=[5,6]"
            )
        return token_ids(text, loaded.reader)

    return method.tokenized(encode)


def calibrated(
    config: RunConfig, method: Method, loaded: LoadedModel, attached: Attached
) -> Calibration | None:
    """The calibration of a method on a loaded model; None where it needs none."""
    if not method.needs_calibration:
        return None
    num_tokens = config.calibration.num_tokens
    if num_tokens > loaded.max_length:
        limit = f"{loaded.name} takes at most {loaded.max_length} tokens"
        raise UserError(f"calibration.num_tokens={num_tokens}: {limit}")
    ids = calibration_ids(config.calibration, loaded.reader)
    folder = cache_dir() / "calibration"
    return cached_calibration(attached, method, ids, folder)


def codec_of(config: RunConfig) -> CacheCodec | None:
    """The codec of a run; None stores rows exactly."""
    if config.codec is None:
        return None
    if config.own_codec is not None:
        keys: RowCodec = CheckedCodec(config.own_codec)
        values = keys
    else:
        keys, values = _keys_codec(config, config.codec), _values_codec(config, config.codec)
    if config.value_codec:
        values = _values_codec(config, config.value_codec)
    others = _of_layer(keys, values, config.residual)
    if not config.codec_layers:
        return others
    named = []
    for layers in layer_formats(config.codec_layers):
        all_floats = is_float(layers.keys) and is_float(layers.values)
        codec = _of_layer(
            _keys_codec(config, layers.keys),
            _values_codec(config, layers.values),
            0 if all_floats else config.residual,  # floats leave no token behind
        )
        named.append(NamedLayers(layers.first, layers.last, codec, layers.words))
    return LayerCodecs(others, tuple(named))


def _of_layer(keys: RowCodec, values: RowCodec, residual: int) -> AnyCodec:
    if keys == values and not residual and keys.span == 1:
        return keys
    return SplitCodec(keys.keys, values.values, residual)


def _keys_codec(config: RunConfig, name: str) -> RowCodec:
    """The shipped codec of that name, with the run's settings, for keys."""
    if config.key_groups == "channel" and is_integer(name):
        return ChannelCodec(name, config.group_size, config.rotation)
    return _values_codec(config, name)


def _values_codec(config: RunConfig, name: str) -> RowCodec:
    """The shipped codec of that name, with the run's settings, for values."""
    return codec_named(name, group_size=config.group_size, rotation=config.rotation)


@dataclass(frozen=True)
class CheckedCodec(RowCodec):
    """A codec of the user's own, the types, dtypes and shapes of whose results are checked at every
    call.

    A tensor of a wrong shape could be broadcast, and the run would go on with wrong numbers. No
    number of a tensor is read, so no GPU waits. Raises UserError, which names the line of the
    user's file.
    """

    codec: RowCodec

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.codec.name)

    @property
    def bits(self) -> float:
        return self.codec.bits

    @property
    def span(self) -> int:
        return self.codec.span

    def bits_per_element(self, head_dim: int) -> float:
        return self.codec.bits_per_element(head_dim)

    def row_bytes(self, head_dim: int) -> int:
        return self.codec.row_bytes(head_dim)

    def encode(self, x: Tensor) -> Tensor:
        packed = self.codec.encode(x)
        self._require("encode", packed, torch.uint8, [*x.shape[:-1], self.row_bytes(x.shape[-1])])
        return packed

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        rows = self.codec.decode(packed, head_dim, dtype)
        self._require("decode", rows, dtype, [*packed.shape[:-1], head_dim])
        return rows

    def roundtrip(self, x: Tensor) -> Tensor:
        if type(self.codec).roundtrip is RowCodec.roundtrip:
            return super().roundtrip(x)
        rows = self.codec.roundtrip(x)
        self._require("roundtrip", rows, x.dtype, [*x.shape])
        return rows

    def _require(self, name: str, made: object, dtype: torch.dtype, shape: list[int]) -> None:
        if isinstance(made, Tensor):
            if made.dtype == dtype and [*made.shape] == shape:
                return
            found = f"{made.dtype} {[*made.shape]}"
        else:
            found = type(made).__name__
        cls = type(self.codec)
        raise UserError(
            f"codec {cls.__name__}: {line_of(cls, name)}: {name} gives {found}; "
            f"allowed: {dtype} {shape}"
        )

"""What every run of a method needs before its first forward: the sized method, its codec, its calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from harness.data.text import calibration_ids, token_ids
from harness.errors import UserError
from harness.files import cache_dir
from harness.model.attach import Attached
from harness.model.calibration import cached_calibration
from harness.model.load import LoadedModel
from harness.replay import ReplaySession
from harness.settings.config import RunConfig
from harness.sizes import sized_as_stored
from methods.base import Calibration, Method, Row
from methods.codec import TURBO_BITS, AnyCodec, ChannelCodec, Codec, RowCodec, SplitCodec, TurboCodec


@dataclass(frozen=True)
class Setup:
    """method: `size` resolved, and settled by its calibration. codec: None stores rows exactly. calibration: None where
    none is needed. device_rows, prefetch: as in `LiveSession`."""

    method: Method
    codec: AnyCodec | None
    calibration: Calibration | None
    device_rows: float = 0
    prefetch: bool = False

    def __post_init__(self) -> None:
        if self.method.needs_calibration and self.calibration is not None:
            object.__setattr__(self, "method", self.method.settled(self.calibration))

    def replay(
        self, attached: Attached, final_lengths: Tensor, num_columns: int, *, measure_recall: bool = False
    ) -> ReplaySession:
        """A fresh replay session; see there."""
        return ReplaySession(
            attached,
            self.method,
            codec=self.codec,
            calibration=self.calibration,
            final_lengths=final_lengths,
            num_columns=num_columns,
            measure_recall=measure_recall,
            device_rows=self.device_rows,
            prefetch=self.prefetch,
        )


def prepare(
    config: RunConfig, loaded: LoadedModel, attached: Attached, decode_rows: Callable[[], Sequence[Row]]
) -> Setup:
    """Resolve a run's method on a loaded model.

    decode_rows: lists the rows that `size` is to be met on; called only where it is set.
    """
    method, codec = config.method, codec_of(config)
    if config.size is not None:
        nearest = config.sizing == "nearest"
        method = sized_as_stored(method, codec, attached.geometry, decode_rows(), config.size, nearest=nearest)
    calibration = calibrated(config, method, loaded, attached)
    return Setup(tokenized(method, loaded), codec, calibration, config.device_rows, config.prefetch)


def tokenized(method: Method, loaded: LoadedModel) -> Method:
    """The method with its texts as token ids of the model; UserError where it has texts and the model no tokenizer."""

    def encode(text: str) -> list[int]:
        if loaded.tokenizer is None:
            raise UserError(
                f"method {method.label}: its instructions are text, and {loaded.name} has no tokenizer; choose a model "
                "that has one, or give token ids, such as method.instruction=[5,6]"
            )
        return token_ids(text, loaded.tokenizer)

    return method.tokenized(encode)


def calibrated(config: RunConfig, method: Method, loaded: LoadedModel, attached: Attached) -> Calibration | None:
    """The calibration of a method on a loaded model; None where it needs none."""
    if not method.needs_calibration:
        return None
    num_tokens = config.calibration.num_tokens
    if num_tokens > loaded.max_length:
        limit = f"{loaded.name} takes at most {loaded.max_length} tokens"
        raise UserError(f"calibration.num_tokens={num_tokens}: {limit}")
    ids = calibration_ids(config.calibration, loaded.tokenizer)
    return cached_calibration(attached, method, ids, loaded.fingerprint, cache_dir() / "calibration")


def codec_of(config: RunConfig) -> AnyCodec | None:
    """The codec of a run; None stores rows exactly."""
    if config.codec is None:
        return None

    def shipped(name: str, of_integers: type[Codec] = Codec) -> RowCodec:
        if name in TURBO_BITS:
            return TurboCodec(name)
        return of_integers(name, config.group_size, config.rotation)

    keys = config.own_codec or shipped(config.codec, ChannelCodec if config.key_groups == "channel" else Codec)
    values = shipped(config.value_codec) if config.value_codec else config.own_codec or shipped(config.codec)
    return keys if keys == values and not config.residual else SplitCodec(keys, values, config.residual)

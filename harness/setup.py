"""What every accuracy run needs before its first forward: the sized method, its codec, its calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.data.text import calibration_ids
from harness.model.attach import Attached
from harness.model.calibration import Calibration, cached_calibration
from harness.model.gguf import cache_dir
from harness.model.load import LoadedModel
from harness.offload.codec import Codec
from harness.settings.run import RunConfig
from harness.sizing import DecodeRow, sized
from methods.base import Method


@dataclass(frozen=True)
class Setup:
    """method: `target_kv_frac` resolved. codec: None stores rows exactly. calibration: None where none is needed."""

    method: Method
    codec: Codec | None
    calibration: Calibration | None


def prepare(
    config: RunConfig, loaded: LoadedModel, attached: Attached, decode_rows: Callable[[], Sequence[DecodeRow]]
) -> Setup:
    """Resolve a run's method on a loaded model.

    decode_rows: lists the rows that `target_kv_frac` is to be met on; called only where it is set.
    """
    method = config.method
    if config.target_kv_frac is not None:
        method = sized(method, decode_rows(), attached.geometry.num_layers, config.target_kv_frac)
    calibration = None
    if method.needs_calibration:
        ids = calibration_ids(config.calibration, loaded.tokenizer)
        calibration = cached_calibration(attached, ids, loaded.fingerprint, cache_dir() / "calibration")
    return Setup(method, codec_of(config), calibration)


def codec_of(config: RunConfig) -> Codec | None:
    """The codec of a run; None stores rows exactly."""
    return None if config.codec is None else Codec(config.codec, config.group_size)

"""Two ways to compute the same decode step must agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

from harness.checks.two_ways import TOLERANCE, Trial, largest_difference, setup_of
from harness.decode.links import open_link
from harness.model.attach import attach
from harness.model.tiny import tiny_model
from harness.replay.setup import codec_of
from harness.run.compose import load
from harness.speed.link_rate import LinkRate
from methods import compiled

PROMPTS = (200, 180)
CODED_TOLERANCE = 3e-2
"""Of logits under int4, where rounding moves a number to the next code."""


def equalities(device: torch.device, labels: Sequence[str], rate: LinkRate) -> Iterator[tuple[str, bool]]:
    """Words for each comparison of two ways to decode a tiny model, and whether they agree: cache on the host or on
    the device; under CUDA kernels or torch's code."""
    model: Any = tiny_model("llama", num_key_value_heads=2)
    emulated = rate.bytes_per_s if device.type == "cpu" else None
    with attach(model.to(device)) as attached, open_link(device, bytes_per_s=emulated, tuning=rate.tuning) as link:
        for label in labels:
            config = load(["experiment=latency", f"system={label}"])
            setup = setup_of(attached, config.method, codec_of(config))
            decode = Trial(attached, link, setup, PROMPTS).live
            on_device = decode(placement="device").logits
            options = {"pinned": config.platform.pinned, "gpu_cache": config.gpu_cache}
            on_host = decode(placement="host", link=link, **options).logits
            # Rows of the GPU cache are summed in another order.
            others = [("host and device", on_host, TOLERANCE if config.gpu_cache else 0)]
            if device.type == "cuda":
                with patch.object(compiled, "COMPILED", set()):
                    plain = decode(placement="device").logits
                others.append(("kernels and torch", plain, TOLERANCE if setup.codec is None else CODED_TOLERANCE))
            for ways, logits, allowed in others:
                difference = largest_difference(logits, on_device)
                words = f"{label:18} {ways}: logits differ by {difference:g} (at most {allowed:g})"
                yield words, difference <= allowed

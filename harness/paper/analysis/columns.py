"""Figure 7: magnitude of the columns of Q and K before and after skewing.

A column's magnitude is the mean over tokens of its absolute values; Q's is the mean over the group's heads. The columns
of a KV head are ordered by |q| + |k|, as InfiniGen chooses partial columns, which are therefore the leftmost.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.data.text import calibration_ids
from harness.model.calibration import cached_calibration
from harness.model.gguf import cache_dir
from harness.model.prompt import PromptPass
from harness.paper.analysis.points import Point, mean_point
from harness.paper.analysis.subject import Subject
from methods.infinigen import InfiniGen

PAPER_LAYERS = (0, 18)
BEFORE, AFTER = "before skewing", "after skewing"


def measure(subject: Subject) -> list[Point]:
    """Each layer's columns, in the model's own basis and in that of the calibrated rotation."""
    config, loaded, attached = subject.config, subject.loaded, subject.attached
    ids = calibration_ids(config.calibration, loaded.tokenizer)
    calibration = cached_calibration(attached, InfiniGen(), ids, loaded.fingerprint, cache_dir() / "calibration")
    layers = subject.layers(PAPER_LAYERS)
    points: list[Point] = []

    def keep_magnitudes(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        number = attached.numbers[layer]
        if number is None or number not in layers:
            return
        rotation = calibration["rotation"][number].to(query.device)
        own_basis = torch.eye(query.shape[-1], device=query.device).expand_as(rotation)
        for series, basis in ((BEFORE, own_basis), (AFTER, rotation)):
            points.extend(_points(number, series, magnitudes(query[0], key[0], basis)))

    positions = torch.arange(subject.num_tokens, device=attached.device)[None]
    attached.forward(subject.ids, positions, PromptPass(attached, keep=keep_magnitudes))
    return points


def magnitudes(query: Tensor, key: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Mean absolute value of each column of Q and of K in `basis`, most important column first.

    query: [heads, tokens, head_dim]; key: [num_kv_heads, tokens, head_dim]; basis: [num_kv_heads, head_dim, head_dim].
    Returns two tensors [num_kv_heads, head_dim].
    """
    stacked = query.reshape(len(key), -1, query.shape[-1])
    of_query, of_key = ((part.float() @ basis).abs().mean(1) for part in (stacked, key))
    order = (of_query + of_key).argsort(-1, descending=True)
    return of_query.gather(-1, order), of_key.gather(-1, order)


def _points(layer: int, series: str, found: tuple[Tensor, Tensor]) -> Iterator[Point]:
    for metric, columns in zip(("query_magnitude", "key_magnitude"), found, strict=True):
        for rank, heads in enumerate(columns.unbind(-1)):
            yield mean_point(heads, series=series, metric=metric, x_name="column_rank", x=rank, layer=layer)

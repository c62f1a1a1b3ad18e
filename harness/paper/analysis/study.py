"""One analysis of a loaded model: its text, its layers, its statistic.

python run.py experiment=fig5 analysis.num_tokens=4096 analysis.layers=[0,10,20]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from harness.data.text import corpus_ids, first_window_offset
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.load import LoadedModel
from harness.paper.analysis import columns, key_tokens, layer_inputs, similarity, sparsity
from harness.paper.analysis.points import Point
from harness.paper.analysis.subject import Subject
from harness.settings.experiment import Outcome
from harness.settings.run import RunConfig

STATISTICS: dict[str, Callable[[Subject], Sequence[Point]]] = {
    "similarity": similarity.measure,
    "key_tokens": key_tokens.measure,
    "columns": columns.measure,
    "layer_inputs": layer_inputs.measure,
    "sparsity": sparsity.measure,
}
"""By `analysis.statistic`; `memory` is harness.paper.analysis.memory's, which needs no weights."""


def run_analysis(config: RunConfig, loaded: LoadedModel) -> Outcome:
    """The statistic of `config`, as points.

    Raises UserError for a text or a model shorter than `analysis.num_tokens`, a layer that the model does not have, or
    a model that the statistic is not defined for.
    """
    ids = _ids(config, loaded)
    assert config.analysis.statistic is not None, "RunConfig checks it"
    with attach(loaded.model) as attached:
        attached.require_length(len(ids))
        tokens = torch.tensor([ids], device=attached.device)
        points = STATISTICS[config.analysis.statistic](Subject(config, loaded, attached, tokens))
    return Outcome({"source": "measured", "points": [asdict(point) for point in points]})


def _ids(config: RunConfig, loaded: LoadedModel) -> list[int]:
    wanted = f"analysis.num_tokens={config.analysis.num_tokens}"
    if config.analysis.num_tokens > loaded.max_length:
        raise UserError(f"{wanted}: {loaded.name} takes at most {loaded.max_length} tokens")
    offset = first_window_offset(config.corpus, config.calibration)
    ids = corpus_ids(config.corpus, config.data, loaded.tokenizer)[offset:]
    if len(ids) < config.analysis.num_tokens:
        raise UserError(f"{wanted}: the text has {len(ids)} tokens from token {offset} on; choose a longer one")
    return ids[: config.analysis.num_tokens]

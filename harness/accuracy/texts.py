"""What two texts decoded from one prompt say of a method: how far its predictions lie from the full cache's, when the
texts part, how much they repeat themselves, and how likely the full cache finds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from harness.records.samples import EXPONENTIAL, clustered_stderr

GRAM = 4
"""Tokens of what counts as repeated."""
NUM_CHUNKS = 16
"""Ranges of steps that make a curve, at most."""

AS_PERPLEXITY = {of: name for name, of in EXPONENTIAL.items() if name.startswith("text_")}
"""What of a prompt's numbers is exp of its mean over prompts, and its name then."""

Entries = dict[str, Any]


class Text(NamedTuple):
    """Tokens decoded from one prompt; nll: fp64 [tokens - 1], under the full cache, of those after the first."""

    tokens: list[int]
    nll: Tensor


class Pair(NamedTuple):
    """A method's text beside the full cache's. kl, agrees: fp64 [tokens - 1], as `RowScores` has them, of the steps
    after the first along the method's own text."""

    own: Text
    full: Text
    kl: Tensor
    agrees: Tensor


def first_divergence(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two texts of one length begin with alike: all of them where they never differ."""
    differing = (index for index, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1])
    return next(differing, len(tokens))


def repetition(tokens: Sequence[int]) -> float | None:
    """Share of a text's 4-grams that occurred in it before; None where it is too short to have one."""
    grams = list(zip(*(tokens[shift:] for shift in range(GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else None


def measures(pair: Pair) -> Entries:
    """One prompt's numbers: means over the steps after the first; differences are to the full cache's text."""
    own, full = repetition(pair.own.tokens), repetition(pair.full.tokens)
    nll, nll_full = float(pair.own.nll.mean()), float(pair.full.nll.mean())
    return {
        "kl_nats": float(pair.kl.mean()),
        "top1_agreement": float(pair.agrees.mean()),
        "first_divergence": first_divergence(pair.own.tokens, pair.full.tokens),
        "nll": nll,
        "nll_full": nll_full,
        "text_nll_difference": nll - nll_full,
        "repetition": own,
        "repetition_full": full,
        "repetition_difference": None if own is None or full is None else own - full,
    }


def summarize(pairs: Sequence[Pair]) -> Entries:
    """Means over prompts and their standard errors (None with one prompt)."""
    prompts = [measures(pair) for pair in pairs]
    entries: Entries = {"num_samples": len(pairs)}
    for name in prompts[0]:
        mean_name, of = AS_PERPLEXITY.get(name, name), math.exp if name in AS_PERPLEXITY else float
        _add(entries, mean_name, [each[name] for each in prompts], of)
    entries["never_diverged"] = sum(pair.own.tokens == pair.full.tokens for pair in pairs)
    return entries


def curve(pairs: Sequence[Pair], num_tokens: int) -> Iterator[dict[str, Any]]:
    """The chunks of a record, over the tokens decoded: the first of all is not scored, a chunk of it alone left out."""
    width = math.ceil(num_tokens / NUM_CHUNKS)
    for first in range(0, num_tokens, width):
        stop = min(first + width, num_tokens)
        scored = range(max(first, 1), stop)
        if scored:
            rows = slice(scored.start - 1, scored.stop - 1)
            metrics: Entries = {}
            _add(metrics, "kl_nats", [float(pair.kl[rows].mean()) for pair in pairs])
            _add(metrics, "text_perplexity", [float(pair.own.nll[rows].mean()) for pair in pairs], math.exp)
            yield {"first": first, "stop": stop, "num_tokens": len(scored) * len(pairs), "metrics": metrics}


def _add(entries: Entries, name: str, values: Sequence[float | None], of: Callable[[float], float] = float) -> None:
    """`of` the mean of `values`, one a prompt, and its standard error; None where nothing was measured."""
    known = [value for value in values if value is not None]
    entries[name] = of(sum(known) / len(known)) if known else None
    entries[f"{name}_stderr"] = clustered_stderr([*map(of, known)], range(len(known))) if known else None

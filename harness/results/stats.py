"""Statistics of tables: Student's t, means whose errors are clustered by place of a text, and
Holm's correction. The formulas are in `docs/results.md`.

A standard error that was estimated from n independent values is itself uncertain. The interval of
95 % is 12.7 standard errors wide to each side with two values, 4.3 with three, 3.2 with four, and
1.96 with many.
"""

import math

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

CONFIDENCE_95 = 0.95
OF_INTERVAL = (1 + CONFIDENCE_95) / 2
"""The probability of a value below the upper end of an interval."""
LEVEL = 1 - CONFIDENCE_95
"""Of the tests, after Holm's correction over all pairs."""
ROUNDING = 1e-12
"""A standard error that is smaller, in units of the largest value, is rounding."""


def critical_value(num_contexts: float | None) -> float:
    """Standard errors to either side of an interval of 95 %, by Student's t.

    num_contexts: independent values, which are windows, prompts, or contexts whose questions are
    one cluster: one more than the degrees of freedom. Infinite with fewer than two. None where a
    table does not say: the normal distribution's value, 1.96.
    """
    if num_contexts is None:
        return float(stdtrit(math.inf, OF_INTERVAL))
    return float(stdtrit(int(num_contexts) - 1, OF_INTERVAL)) if num_contexts >= 2 else math.inf


def two_sided_p(value: float, stderr: float | None, degrees: float | None) -> float | None:
    """The probability that a mean of 0 is found at least as far from 0 as `value`, by Student's t.

    Without a standard error None. With one of 0, where all values are alike: 1 if they are 0, else
    None, as t has no value then.
    """
    if stderr is None or degrees is None:
        return None
    if stderr == 0:
        return 1.0 if value == 0 else None
    return float(2 * stdtr(degrees, -abs(value / stderr)))


def unseen_rate(num_contexts: int) -> float:
    """The largest rate of contexts in which something happens that happened in none of so many,
    with 95 % confidence (Clopper and Pearson 1934); about 3 / num_contexts with many."""
    return float(1 - LEVEL ** (1 / num_contexts))


def holm(p_values: pd.Series) -> pd.Series:
    """Holm's corrected p-values (1979): the k-th smallest of m times m - k + 1, at least the one
    before it, at most 1.

    NaN, of a pair that cannot be tested, stays NaN and counts in m.
    """
    in_order = p_values.sort_values()
    factors = np.arange(len(in_order), 0, -1)
    return (in_order * factors).clip(upper=1).cummax().reindex(p_values.index)


def estimates(
    values: pd.DataFrame, weights: float | pd.Series = 1, *, over_models: bool = False
) -> pd.DataFrame:
    """The mean of each column of `values` with its error, a line each.

    All models weigh alike, in a model all parts, in a part of a model the values by `weights`.
    Models and parts are fixed: a mean speaks of those that ran. The places of a part are the
    sample. The same place on several models is one cluster, since what is hard there is hard for
    all models.

    values: by `model`, `part` (a text or a task) and `place` (in a text, or the number of a context
    of questions). NaN: a column has no value there. weights: of its rows.
    over_models: of several models the error that models drawn from many would have, their standard
    deviation / sqrt(models). Where their means are equal but not 0, the error of the places stands.

    Columns: `mean`, `stderr`, `degrees` of freedom, `low` and `high` of the 95 % interval, `p` of
    a mean of 0, `num_places`. NaN without values; but for the mean and the number of places, also
    where a model has a single place of some part.
    """
    stratum, place = ["model", "part"], ["part", "place"]
    is_there = values.notna()
    here = is_there.mul(weights, axis=0)
    share = here / here.groupby(stratum).transform("sum")
    num_parts = is_there.groupby(stratum).any().groupby("model").sum()
    num_models = (num_parts > 0).sum()
    weight = share / num_parts.reindex(values.index, level="model") / num_models
    of_models = (weight * values).groupby("model").sum()
    mean = of_models.sum()

    num_values = is_there.groupby(stratum).transform("sum").where(is_there)
    scale = np.sqrt(num_values / (num_values - 1).where(num_values > 1))
    residual = weight * scale * (values - (share * values).groupby(stratum).transform("sum"))
    variances = residual.groupby(place).sum().pow(2).groupby("part").sum()
    # Kish's effective number of places: some may have fewer models than others.
    of_place = weight.groupby(place).sum()
    effective = of_place.groupby("part").sum() ** 2 / of_place.pow(2).groupby("part").sum()
    stderr = np.sqrt(variances.sum())
    degrees = variances.sum() ** 2 / (variances**2 / (effective - 1)).sum()
    # Rounding leaves residuals of equal values that are not quite 0.
    largest = values.abs().max()
    is_alike = stderr <= ROUNDING * largest
    stderr = stderr.mask(is_alike, 0.0)
    degrees = np.floor(degrees.mask(is_alike, (effective - 1).sum()) + 1e-9).clip(lower=1)
    has_error = num_values.min() > 1
    stderr, degrees = stderr.where(has_error), degrees.where(has_error)

    if over_models:
        spread = (of_models * num_models).where(num_parts > 0).sem()
        is_sample = (num_models > 1) & ((spread > 0) | (largest == 0))
        stderr = spread.where(is_sample, stderr)
        degrees = (num_models - 1).where(is_sample, degrees)

    half = stdtrit(degrees, OF_INTERVAL) * stderr
    found = {"mean": mean, "stderr": stderr, "degrees": degrees}
    found |= {"low": mean - half, "high": mean + half}
    tested = zip(mean, stderr, degrees, strict=True)
    found["p"] = pd.Series([two_sided_p(*each) for each in tested], values.columns, dtype=float)
    num_places = is_there.groupby(place).any().sum()
    return pd.DataFrame(found).where(num_places > 0).assign(num_places=num_places)

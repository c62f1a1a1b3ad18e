"""Statistics of tables: Student's t, means whose errors are clustered by place of a text, and
Holm's correction. The formulas are in `docs/results.md`.

A standard error that was estimated from n independent values is itself uncertain. The interval of
95 % is 12.7 standard errors wide to each side with two values, 4.3 with three, 3.2 with four, and
1.96 with many.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pandas as pd

CONFIDENCE_95 = 0.95
OF_INTERVAL = (1 + CONFIDENCE_95) / 2
"""The probability of a value below the upper end of an interval."""
LEVEL = 1 - CONFIDENCE_95
"""Of the tests, after Holm's correction over all pairs."""
ROUNDING = 1e-12
"""A standard error that is smaller, in units of the largest value, is rounding."""


def critical_value(num_contexts: float | None, probability: float = OF_INTERVAL) -> float:
    """Standard errors to either side of an interval of 95 %.

    num_contexts: independent values, which are windows, prompts, or contexts whose questions are
    one cluster: one more than the degrees of freedom. Infinite with fewer than two. None where a
    table does not say: the normal distribution's value, 1.96.
    """
    if num_contexts is None:
        return quantile(math.inf, probability)
    return quantile(int(num_contexts) - 1, probability) if num_contexts >= 2 else math.inf


def detectable(num_contexts: float | None, power: float = 0.8) -> float:
    """Standard errors of the smallest difference that a test at 5 % detects with `power`.

    It is the sum of both quantiles, 2.8 with many contexts.
    """
    return critical_value(num_contexts) + critical_value(num_contexts, power)


@cache
def quantile(degrees: float, probability: float) -> float:
    """The value that Student's t stays below with `probability`. degrees: of freedom, at least 1;
    infinite for the normal distribution."""
    from scipy.special import stdtrit  # here, as a command's help needs no statistics

    return float(stdtrit(degrees, probability))


def two_sided_p(value: float, stderr: float | None, degrees: float | None) -> float | None:
    """The probability that a mean of 0 is found at least as far from 0 as `value`, by Student's t.

    Without a standard error None. With one of 0, where all values are alike: 1 if they are 0, else
    None, as t has no value then.
    """
    from scipy.special import stdtr

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
    values: pd.DataFrame, by: Sequence[str], *, over_models: bool = False
) -> pd.DataFrame:
    """Means of groups of values, each with its error: the groups in order, a line each.

    All models weigh alike, in a model all parts, in a part of a model the values by `weight`.
    Models and parts are fixed: a mean speaks of those that ran. The places of a part are the
    sample. The same place on several models is one cluster, since what is hard there is hard for
    all models.

    values: columns `by`, `model`, `part` (a text or a task), `place` (in a text, or the number of a
    context of questions; at most one value each), `value` and `weight`.
    over_models: of several models the error that models drawn from many would have, their standard
    deviation / sqrt(models). Where their means are equal but not 0, the error of the places stands.

    Columns: `mean`, `stderr`, `degrees` of freedom, `low` and `high` of the 95 % interval, `p` of
    a mean of 0, `num_places`. NaN where a value is missing; but for the mean and the number of
    places, also where a model has a single place of some part.
    """
    from scipy.special import stdtrit

    names = [*by, "model", "part"]

    def numbered(*columns: str) -> pd.Series:
        """The number of each value's group."""
        return values.groupby(list(columns), sort=False, dropna=False).ngroup()

    group, model, stratum = numbered(*by), numbered(*by, "model"), numbered(*names)
    part, place = numbered(*by, "part"), numbered(*by, "part", "place")
    group_of_model, group_of_part = (group.groupby(inner).first() for inner in (model, part))
    part_of_place = part.groupby(place).first()

    num_models = values["model"].groupby(group).transform("nunique")
    num_parts = values["part"].groupby(model).transform("nunique")
    share = values["weight"] / values["weight"].groupby(stratum).transform("sum")
    weight = share / (num_models * num_parts)
    weighted = weight * values["value"]
    found = pd.DataFrame({"mean": weighted.groupby(group).sum()})

    num_values = stratum.groupby(stratum).transform("size")
    mean_of_stratum = (share * values["value"]).groupby(stratum).transform("sum")
    scale = np.sqrt(num_values / (num_values - 1).where(num_values > 1))
    residual = weight * scale * (values["value"] - mean_of_stratum)
    variance_of_part = residual.groupby(place).sum().pow(2).groupby(part_of_place).sum()
    variance = variance_of_part.groupby(group_of_part).sum()
    # Kish's effective number of places: some may have fewer models than others.
    weights = weight.groupby(place).sum()
    effective = weights.groupby(part_of_place).sum() ** 2
    effective /= (weights**2).groupby(part_of_place).sum()
    degrees_of_part = effective - 1
    of_part = (variance_of_part**2 / degrees_of_part).groupby(group_of_part).sum()
    found["stderr"] = np.sqrt(variance)
    found["degrees"] = variance**2 / of_part
    largest = values["value"].abs().groupby(group).max()
    # Rounding leaves residuals of equal values that are not quite 0.
    is_alike = found["stderr"] <= ROUNDING * largest
    found.loc[is_alike, "stderr"] = 0.0
    found.loc[is_alike, "degrees"] = degrees_of_part.groupby(group_of_part).sum()
    found["degrees"] = np.floor(found["degrees"] + 1e-9).clip(lower=1)
    has_error = num_values.groupby(group).min() > 1
    found[["stderr", "degrees"]] = found[["stderr", "degrees"]].where(has_error, axis=0)

    if over_models:
        means = weighted.groupby(model).sum() / weight.groupby(model).sum()
        of_models = means.groupby(group_of_model)
        count, stderr = of_models.size(), of_models.sem()
        is_sample = (count > 1) & ((stderr > 0) | (largest == 0))
        found["stderr"] = stderr.where(is_sample, found["stderr"])
        found["degrees"] = (count - 1).where(is_sample, found["degrees"])

    half = stdtrit(found["degrees"], OF_INTERVAL) * found["stderr"]
    found["low"], found["high"] = found["mean"] - half, found["mean"] + half
    tested = zip(found["mean"], found["stderr"], found["degrees"], strict=True)
    found["p"] = np.array([two_sided_p(*each) for each in tested], dtype=float)
    is_known = values["value"].notna().groupby(group).all()
    found = found.where(is_known, axis=0)
    found["num_places"] = place.groupby(group).nunique()
    keys = values[list(by)].groupby(group).first()
    return keys.join(found).set_index(list(by))

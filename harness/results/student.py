"""Student's t: by how many standard errors a mean of a few windows, contexts or prompts may miss.

A standard error that was estimated from n independent values is itself uncertain. The interval of
95 % is 12.7 standard errors wide to each side with two values, 4.3 with three, 3.2 with four, and
1.96 with many.
"""

import math
from functools import cache

CONFIDENCE_95 = 0.95
OF_INTERVAL = (1 + CONFIDENCE_95) / 2
"""The probability of a value below the upper end of an interval."""


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


def two_sided_p(t: float, degrees: float) -> float:
    """The probability that Student's t is at least as far from 0 as `t`."""
    from scipy.special import stdtr

    return float(2 * stdtr(degrees, -abs(t)))

"""Student's t: by how many standard errors a mean of a few windows, contexts or prompts may miss.

A standard error that was estimated from n independent values is itself uncertain. The interval of
95 % is 12.7 standard errors wide to each side with two values, 4.3 with three, 3.2 with four, and
1.96 with many.
"""

import math
from functools import cache

CONFIDENCE_95 = 0.95
ONE_SIGMA = math.erf(math.sqrt(0.5))
"""Confidence of one standard error, where it is known exactly: 68 %."""
MANY = 100_000
"""Values from which on the normal distribution's quantiles are as good, to 2e-5."""
_BISECTIONS = 60


def critical_value(num_contexts: float | None, confidence: float = CONFIDENCE_95) -> float:
    """Standard errors to either side of an interval: Student's t, `num_contexts` - 1 degrees of
    freedom.

    num_contexts: independent values, which are windows, prompts, or contexts whose questions are
    one cluster. Infinite with fewer than two. None where a table does not say: the normal
    distribution's value, 1.96.
    """
    return _of_contexts(num_contexts, (1 + confidence) / 2)


def detectable(
    num_contexts: float | None, confidence: float = CONFIDENCE_95, power: float = 0.8
) -> float:
    """Standard errors of the smallest difference that a test at `confidence` detects with `power`.

    It is the sum of both quantiles, 2.8 with many contexts.
    """
    return critical_value(num_contexts, confidence) + _of_contexts(num_contexts, power)


def _of_contexts(num_contexts: float | None, probability: float) -> float:
    if num_contexts is None or num_contexts > MANY:
        return t_quantile(None, probability)
    return t_quantile(int(num_contexts) - 1, probability) if num_contexts >= 2 else math.inf


def two_sided_p(t: float, degrees: int) -> float:
    """The probability that Student's t with `degrees` of freedom is at least as far from 0 as `t`.

    Below 1e-15 or so it is 0.
    """
    if degrees < 1:
        raise ValueError(f"two_sided_p({t}, {degrees}): degrees from 1 on")
    angle = math.atan(abs(t) / math.sqrt(degrees))
    return max(0.0, 2 * (1 - _probability_below(angle, degrees)))


@cache
def t_quantile(degrees: int | None, probability: float) -> float:
    """The value that Student's t stays below with `probability`, which is at least 1/2.

    degrees: degrees of freedom, at least 1; None for the normal distribution. It is found by
    bisection of the angle atan(t / sqrt(degrees)), to 1e-12 or better for the probabilities used
    here.
    """
    if not 0.5 <= probability < 1 or (degrees is not None and degrees < 1):
        allowed = "degrees from 1 on, probability from 0.5 to 1"
        raise ValueError(f"t_quantile({degrees}, {probability}): {allowed}")
    low, high = 0.0, math.pi / 2
    for _ in range(_BISECTIONS):
        angle = (low + high) / 2
        if _probability_below(angle, degrees) < probability:
            low = angle
        else:
            high = angle
    return math.tan(low) * math.sqrt(degrees or 1)


def _probability_below(angle: float, degrees: int | None) -> float:
    """P(T <= t), t = tan(angle) * sqrt(degrees): Abramowitz and Stegun 26.7.3 and 26.7.4."""
    if degrees is None:
        return (1 + math.erf(math.tan(angle) / math.sqrt(2))) / 2
    cosine = math.cos(angle)
    # Odd degrees take odd powers of the cosine, from cos(angle) on; even ones even powers, from 1.
    power = 1 if degrees % 2 else 0
    term = cosine if power else 1.0
    total = 0.0
    while power <= degrees - 2:
        total += term
        power += 2
        term *= cosine * cosine * (power - 1) / power
    within = math.sin(angle) * total
    if degrees % 2:
        within = (angle + within) * 2 / math.pi
    return (1 + within) / 2

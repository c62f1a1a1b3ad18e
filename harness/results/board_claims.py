"""Claims about methods, looked at on each model by itself and on all of them together.

`board.yaml` lists them. A claim holds on a model if the whole 95 % interval of its number is on
the claimed side.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from harness.errors import UserError
from harness.results.board_rows import (
    ALL_MODELS,
    OF_ANSWERS,
    OF_KL,
    Models,
    Setting,
    by_model,
    exponential,
    gap_of,
    has_size,
    in_both,
    log_ratio,
    rows_at,
    same_contexts,
)
from harness.results.board_sources import Series
from harness.results.columns import TableRow

HOLDS, UNSURE, FAILS = "holds", "not told apart", "does not hold"
VERDICTS = (HOLDS, UNSURE, FAILS)
NOT_MEASURED, OTHER_SIZE = "not measured", "another size"


class Claim(NamedTuple):
    """A claim of `board.yaml`. bound: the largest ratio of KL, or the least difference of
    answers."""

    claim: str
    of: str
    label: str
    other: str
    sizes: Sequence[float]
    bound: float


def claims_of(entries: Any) -> list[Claim]:
    """The claims of the YAML. Raises UserError, which names the entry, for another form."""
    if not isinstance(entries, list):
        raise UserError("claims: must be a list")
    found = []
    for entry in entries:
        try:
            fields = dict(entry)
            sizes = list(map(float, fields.pop("sizes")))
            of = fields.pop("of")
            if of == OF_ANSWERS:
                bound = -float(fields.pop("less", 0))
            else:
                bound = float(fields.pop("at_most", 1))
            if of not in (OF_KL, OF_ANSWERS) or (of == OF_KL and bound <= 0):
                raise ValueError(entry)
            found.append(Claim(of=of, sizes=sizes, bound=bound, **fields))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            allowed = (
                "a claim has claim, of (KL or answers), label, other, sizes, and at_most > 0 of KL "
                "or less of answers"
            )
            raise UserError(f"claims: {str(entry)[:80]}: {allowed}") from error
    return found


def claim_rows(
    entries: Any, settings: Sequence[Setting], series: Sequence[Series], models: Models
) -> Iterator[TableRow]:
    """The rows of all claims: for each size and length each model, then all of them together.

    A claim about a method that did not run has one row, which says so.
    """
    for claim in claims_of(entries):
        for size in claim.sizes:
            common = {
                "claim": claim.claim,
                "measure": claim.of,
                "label": claim.label,
                "other": claim.other,
                "asked_size": size,
                "bound": claim.bound,
            }
            if claim.of == OF_KL:
                rows = list(_of_kl(claim, size, settings, models))
            else:
                rows = list(_of_answers(claim, size, series, models))
            for row in rows or [{"model": ALL_MODELS, "verdict": NOT_MEASURED}]:
                yield common | row


def _of_kl(
    claim: Claim, size: float, settings: Iterable[Setting], models: Models
) -> Iterator[TableRow]:
    """A claim about KL at each length: on each model, then on all."""
    for setting in settings:
        of_labels = {measured.series.label: measured for measured in setting.found}
        own, other = of_labels.get(claim.label), of_labels.get(claim.other)
        if setting.asked_size != size or own is None or other is None:
            continue
        for model, windows in by_model(in_both(own.rows, other.rows), models):
            row: TableRow = {"model": model, "seq_len": setting.seq_len, "count": len(windows)}
            estimate = log_ratio(own, other, windows)
            rows = rows_at(own.rows, windows) + rows_at(other.rows, windows)
            if estimate is None:
                row["verdict"] = NOT_MEASURED
            elif not has_size(rows, size):
                row["verdict"] = OTHER_SIZE
            else:
                row |= exponential("value", estimate)
                row["verdict"] = _verdict(row["value_low"], row["value_high"], claim.bound)
            yield row


def _verdict(low: float | None, high: float | None, bound: float) -> str:
    """Whether a number is at most `bound`; without an interval nothing is told apart."""
    if low is None or high is None:
        return UNSURE
    if high <= bound:
        return HOLDS
    return FAILS if low > bound else UNSURE


def _of_answers(
    claim: Claim, size: float, series: Iterable[Series], models: Models
) -> Iterator[TableRow]:
    """A claim about answers: on each model, then on all."""
    of_labels = {one.label: one for one in series if one.asked_size in (size, None)}
    if claim.label not in of_labels or claim.other not in of_labels:
        return
    own, other = of_labels[claim.label], of_labels[claim.other]
    for model, contexts in by_model(same_contexts(own.answers, other.answers), models):
        found = gap_of(own.answers, other.answers, contexts)
        assert found is not None, "parts are not empty"
        row: TableRow = {"model": model, "count": found.num_questions}
        sized = []
        for one in (own, other):
            sized.append(has_size(rows_at(one.answers, contexts), one.asked_size))
        if all(sized):
            row |= {"value": found.difference, "value_low": found.low, "value_high": found.high}
            row["verdict"] = UNSURE
            if found.low is not None and found.high is not None:  # at least the bound
                row["verdict"] = _verdict(-found.high, -found.low, -claim.bound)
        else:
            row["verdict"] = OTHER_SIZE
        yield row

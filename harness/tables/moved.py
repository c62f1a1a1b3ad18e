"""What moved between two results, in the lines of a terminal; `harness.tables.compare` finds it."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.errors import printable
from harness.tables.columns import LABEL, MISSING, Column, column, quantity
from harness.tables.pairing import NAMES, Change, Key
from harness.tables.text import Sheet, aligned

WORDS = ("label", "task", "series", "batch_size", "prompt_len", "gen_len", "layer", "x", "experiment", "settings")
"""Of `NAMES` those by which people know a number; the model where there are several."""
MAX_SHOWN, MAX_NAMED, MAX_WIDTH = 40, 3, 120
FAR = 2
"""Standard errors beyond which one number of twenty lies by chance."""


def text_of(changes: Sequence[Change], only: Mapping[str, Sequence[Key]]) -> str:
    """What a reader looks for first: the most significant of what moved, and what is in one of the two alone.

    changes: of numbers in both. only: the keys of numbers in one alone, by its name.
    """
    moved = [each for each in changes if not each.is_equal]
    far = [each for each in moved if each.sigmas is not None and each.sigmas > FAR]
    names = _Names.of(changes)
    lines = [
        f"{len(changes)} numbers in both: {len(changes) - len(moved)} equal, {len(moved)} moved",
        *(f"only in {name}: {names.listed(keys)}" for name, keys in only.items() if keys),
    ]
    if moved:
        lines.append(f"moved by more than {FAR} standard errors: {len(far)} (of many pairs 1 in 20 does by chance)")
    causes = Counter(cause for each in moved for cause in each.causes)
    if causes:
        lines.append(f"of what moved differ: {', '.join(f'{cause} ({count})' for cause, count in causes.items())}")
    kinds = {
        "moved, by standard errors": [each for each in moved if each.sigmas is not None],
        "moved, without a standard error": [each for each in moved if each.sigmas is None and not each.is_of_speed],
        "of speed, by ratio": [each for each in moved if each.is_of_speed],
    }
    for title, own in kinds.items():
        lines += ["", *_table(title, sorted(own, key=distance, reverse=True), names)] if own else []
    return "\n".join(lines)


def distance(each: Change) -> float:
    """How much a number moved, to sort by: in standard errors, else as a ratio; below 0 where it did not."""
    if each.is_equal:
        return -1
    if each.sigmas is not None:
        return each.sigmas
    return math.inf if each.ratio is None else abs(math.log(each.ratio))


@dataclass(frozen=True)
class _Names:
    """How numbers are called: by what is not the same for all of them.

    words: of `NAMES`. causes: what differs between the two results whatever moved.
    """

    words: Sequence[str]
    causes: Sequence[str]

    @classmethod
    def of(cls, changes: Sequence[Change]) -> "_Names":
        models = {each.before.row["model"] for each in changes}
        causes = [each.causes for each in changes if not each.is_equal]
        shared = [cause for cause in causes[0] if all(cause in others for others in causes)] if causes else []
        return cls((*WORDS, "model") if len(models) > 1 else WORDS, shared)

    def owner(self, key: Key) -> str:
        """What a number is of, as one line that a terminal takes as text, whoever wrote it."""
        named = dict(zip(NAMES, key, strict=False))
        said = [column(name).phrase.format(named[name]) for name in self.words if named[name] not in (None, "")]
        return printable(", ".join(said))

    def listed(self, keys: Sequence[Key]) -> str:
        """How many numbers, and the first of what they are of."""
        owners = list(dict.fromkeys(self.owner(key) for key in keys if "[" not in str(key[NAMES.index("task")])))
        more = "; ..." if len(owners) > MAX_NAMED else ""
        return "\n  ".join([f"{len(keys)} numbers, of", *(_cut(owner) for owner in owners[:MAX_NAMED])]) + more

    def name(self, each: Change) -> str:
        """The number, what differs beside what does everywhere, and what the number is of."""
        own = [cause for cause in each.causes if cause not in self.causes]
        causes = f" [{', '.join(own)}]" if own else ""
        return f"{_column(each).heading}{causes}: {self.owner(each.before.key)}"


def _table(title: str, changes: Sequence[Change], names: _Names) -> Iterator[str]:
    """The first of the changes, a line each."""
    of_speed = changes[0].is_of_speed
    header = ["B / A", "A", "B"] if of_speed else ["standard errors", "A", "B", "B less A", "pairs"]
    lines = [[*(_ratio if of_speed else _difference)(each), names.name(each)] for each in changes[:MAX_SHOWN]]
    yield from map(_cut, aligned(Sheet(title, [*header, LABEL.heading], lines)).splitlines())
    if len(changes) > MAX_SHOWN:
        yield f"and {len(changes) - MAX_SHOWN} that moved less; --csv FILE has all"


def _cut(line: str) -> str:
    """A line that a terminal shows as one; what is left out of words is marked."""
    line = line.rstrip()
    return line if len(line) <= MAX_WIDTH else f"{line[: MAX_WIDTH - 3]}{'---' if set(line) == {'-'} else '...'}"


def _ratio(each: Change) -> list[str]:
    return [MISSING if each.ratio is None else f"{each.ratio:.3g}", *_values(each)]


def _difference(each: Change) -> list[str]:
    factor = _column(each).factor
    spread = "" if each.stderr is None else f" ± {factor * each.stderr:.2g}"
    sigmas = MISSING if each.sigmas is None else f"{each.sigmas:.1f}"
    return [sigmas, *_values(each), f"{factor * each.difference:+.3g}{spread}", str(each.num_pairs or MISSING)]


def _values(each: Change) -> list[str]:
    return [f"{_column(each).factor * number.value:.5g}" for number in (each.before, each.after)]


def _column(each: Change) -> Column:
    """How people read the number."""
    number = each.before
    return quantity(number.metric) if number.metric == number.row.get("metric") else column(number.metric)

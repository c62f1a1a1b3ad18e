"""`kv-harness advise`: which method, for a machine, a model and its users.

    python run.py advise model=llama3.1-8b platform=rtx4090-pcie4 batch_size=8 prompt_len=32640

A row is a method of the board at one of its budgets, with its rows on the device, in host memory,
or in host memory behind a GPU cache. How many users fit is the arithmetic of a live session. Speed
is the step of an engine by the cost model (`harness.paper.costmodel.step`), alike for every
method; that of this code, whose host launches kernel by kernel, stands beside it. What a method
loses was measured on the board's models. `advise.yaml` has the launches of each method here, the
formats of a cache that engines ship, and the engines that have a method.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.decode.memory import GIB
from harness.decode.needs import Needs, largest_batch
from harness.errors import UserError
from harness.model.shape import read_yaml
from harness.results.columns import read_frame
from harness.results.metrics import BUDGET, LABEL, MISSING, RATIO
from harness.results.sheet import Sheet, sheet_of, terminal
from harness.run.compose import load
from harness.scoring.progress import bar
from harness.settings.config import RunConfig
from harness.settings.paths import COMMAND, CONF_DIR, SHIPPED
from harness.settings.schema import shipped

if TYPE_CHECKING:
    import pandas as pd

    from harness.paper.costmodel.step import Step

KNOWN = read_yaml(Path(__file__).with_name("advise.yaml"))
BOARD = SHIPPED / "tables" / "board-methods.csv"
OVER = "all models"
OWN_BUDGET = ("reads all", "codes")
"""Families of the full cache and of codecs, which have no budget to set."""
TIMED = SHIPPED / "gpu-nvidia-h100-80gb-hbm3" / "tables" / "latency.csv"
ROWS = 2
"""Rows of a GPU cache, as a multiple of what a step reads."""
HIT_FRAC = 0.89
"""Share of the selected rows that such a cache had, where none is given: InfiniGen2 at 10 % on
SmolLM2, 1,024 tokens (docs/results.md)."""
HIT_RANGE = (0.60, 0.95)
OF_RUN = ("method", "budget", "placement", "gpu_cache")
"""How the settings of a run begin, beside those of a question."""
DEVICE, CACHED = "device", "host, GPU cache"
PLACES: dict[str, dict[str, Any]] = {
    DEVICE: {"placement": "device", "gpu_cache": 0},
    "host": {"placement": "host", "gpu_cache": 0},
    CACHED: {"placement": "host", "gpu_cache": ROWS},
}
OFF = 1.6
"""Times by which a modelled speed is off from one that others saw where an answer says so."""
LIGHT_BITS = 4
"""Of a stored weight, where all else is as asked: what then fits without offloading."""


@dataclass(frozen=True, eq=False)
class Option:
    """A method of the board at a budget, in a place of `PLACES`, under the question's settings.

    board: its row of `board_rows`. words: its settings on a command line. asked: the question.
    step: of the cost model, with its capacity.
    """

    board: pd.Series
    place: str
    words: Sequence[str]
    asked: RunConfig
    step: Step

    @property
    def label(self) -> str:
        """The method in words."""
        return str(self.board["label"])

    @property
    def key(self) -> str:
        """Method and codec, as advise.yaml names them."""
        return str(self.board["key"])

    @property
    def lost(self) -> float:
        """Share of the full cache's right answers that are lost."""
        return float(self.board["answers_lost"])

    @property
    def users(self) -> int:
        """Users that fit, of more than were asked for as well."""
        return self.step.capacity.largest

    @property
    def served(self) -> int:
        """Users of the speed columns: those asked for, or as many as fit."""
        return min(self.users, self.asked.latency.batch_size)

    @cached_property
    def tpot_s(self) -> float:
        """Seconds of an engine's step: fused kernels in one CUDA graph."""
        return self.step.seconds(self.served) if self.served else math.inf

    @property
    def each(self) -> float:
        """Tokens/s of a user."""
        return 1 / self.tpot_s

    @property
    def total(self) -> float:
        """Tokens/s of all users."""
        return self.served / self.tpot_s

    @property
    def needs(self) -> Needs:
        """The bytes of the users of the speed columns, of one at least."""
        return self.step.capacity.needs(max(1, self.served))

    @property
    def ratio(self) -> float:
        """KL to the full cache over the oracle's."""
        return 0.0 if self.key == "full" else float(self.board["ratio"])

    @property
    def own_total(self) -> float | None:
        """Tokens/s of all users by this code; None where its launches were not counted."""
        launches = KNOWN["launches"].get(self.key)
        if launches is None or not self.served:
            return None
        host_s = self.step.host_seconds(launches[0 if self.place == DEVICE else 1])
        return self.served / max(self.tpot_s, host_s)

    def total_at(self, users: int) -> float:
        """Tokens/s of as many of these users as fit at a time."""
        served = min(users, self.users)
        return served / self.step.seconds(served) if served else 0.0

    def total_at_hit_rate(self, hit_frac: float) -> float:
        """Tokens/s of all users where the GPU cache has this share of the selected rows."""
        return replace(self, step=replace(self.step, hit_frac=hit_frac)).total

    def with_weights(self, bits: float) -> Option:
        """The same with weights of other bits."""
        step = self.step
        plan = step.capacity.plan
        weight_bytes = round(plan.model.weight_bytes * bits / step.weight_bits)
        plan = replace(plan, model=replace(plan.model, weight_bytes=weight_bytes))
        capacity = replace(step.capacity, plan=plan)
        return replace(self, step=replace(step, capacity=capacity, weight_bits=bits))

    @cached_property
    def ttft_s(self) -> tuple[float, float]:
        """Seconds of one prompt alone, from the least to the most."""
        from harness.paper.costmodel.step import PREFILL_SHARES

        least, most = sorted(map(self.step.prefill_seconds, PREFILL_SHARES))
        return least, most

    @property
    def was_asked_all(self) -> bool:
        """Whether it was asked all questions of the board: some rows are of one model alone."""
        return bool(self.board["num_questions"] == self.board["most_questions"])

    @property
    def loses_little(self) -> bool:
        """Whether it is known to lose no more answers than allowed."""
        return self.lost <= self.asked.advise.answers_lost and self.was_asked_all

    @property
    def why_not(self) -> str:
        """What of the question it does not meet; empty where it meets all."""
        asked, wanted = self.asked.advise, self.asked.latency.batch_size
        if self.users < wanted:
            return f"holds {self.users} users"
        if asked.tokens_per_s is not None and self.each < asked.tokens_per_s:
            return f"{self.each:.1f} tokens/s for a user"
        if asked.ttft_s is not None and self.ttft_s[0] > asked.ttft_s:
            return f"a prompt takes {self.ttft_s[0]:.1f} s"
        if self.lost > asked.answers_lost:
            return f"loses {_points(self)}"
        if not self.was_asked_all:
            number, most = self.board["num_questions"], self.board["most_questions"]
            return f"was asked {number:.0f} of {most:.0f} questions"
        return ""


# The question


def advise(config: RunConfig) -> str:
    """The answer as text for a terminal: what fits without offloading, a recommendation, what
    would change it, tables, and where the numbers come from; or all of it as JSON.

    Raises UserError for a model that the cost model does not know, or that the machine does not
    hold.
    """
    options, left = options_of(config)
    if config.advise.format == "json":
        return json.dumps(as_data(options, left), indent=1)
    lines = [*first_lines(options), "", *recommendation(options), ""]
    brief = KNOWN["in_terminal"]
    for sheet in sheets(options):
        table = sheet.table.rename(columns=brief)
        shown = [heading for heading in brief.values() if heading in table]
        lines += [terminal(sheet._replace(table=table[shown])), ""]
    return "\n".join([*lines, *sources(config, options, left)])


def options_of(config: RunConfig) -> tuple[list[Option], dict[str, str]]:
    """Every option, the best first, and why a method has none, by label. Raises UserError where the
    full cache cannot be modelled, and so nothing can."""
    found: list[Option] = []
    left: dict[str, str] = {}
    rows = board_rows(config.latency.prompt_len + config.latency.gen_len)
    for row in bar([row for _, row in rows.iterrows()], desc="advice", unit="row"):
        if math.isnan(row["answers_lost"]):
            left[row["label"]] = "nobody measured the answers that it loses"
            continue
        try:
            found += _options(config, row)
        except UserError as error:
            if row["method"] == "full":
                raise
            left[row["label"]] = str(error)
    for option in found:
        left.pop(option.label, None)
    found.sort(key=lambda option: (option.why_not != "", -option.total))
    return found, left


def board_rows(context: int) -> pd.DataFrame:
    """The board's rows over all models that a live session can have, each at its longest windows
    that are no longer than the context; the full cache first.

    Further columns: `answers_lost`, the share of the full cache's right answers that a row loses,
    NaN where nobody measured it; `most_questions`, of any row; `added_codec`, "" where it is the
    method's own; `key`, the method with it; `own_budget`, of the full cache and of codecs, which
    have none to set.
    """
    board = read_frame(BOARD)
    board["own_budget"] = board["family"].isin(OWN_BUDGET)
    can_have = board["own_budget"] | (board["apart"] == "")  # it cannot have this budget, else
    board = board[(board["over"] == OVER) & (board["family"] != "oracle") & can_have]
    is_full = (board["method"] == "full") & (board["codec"] == "")
    board = board.assign(answers_lost=(-board["answers_difference"]).mask(is_full, 0))
    budget = board["asked_budget"].mask(board["own_budget"])
    length = board["seq_len"]
    fitting = length.where(length <= context, -length)  # else the shortest
    same = fitting.groupby([board["label"], budget], sort=False, dropna=False)
    rows = board.loc[same.idxmax()]
    rows = rows.sort_values("method", key=lambda methods: methods != "full", kind="stable")
    has_own_codec = rows["method"].map(lambda method: "codec" in shipped(method)[1])
    added = rows["codec"].mask(has_own_codec, "")
    key = rows["method"] + ("+" + added).where(added != "", "")
    return rows.assign(added_codec=added, key=key, most_questions=rows["num_questions"].max())


def _options(config: RunConfig, row: pd.Series) -> Iterator[Option]:
    """A row of the board in each place that its method has. Raises UserError for what cannot be
    known."""
    from harness.paper.costmodel.step import modelled_step

    words = [f"method={row['method']}"]
    if not row["own_budget"]:
        words.append(f"budget={row['asked_budget']}")
    if row["added_codec"]:
        words += [f"codec={row['codec']}", f"group_size={group_size()}"]
    dense = (row["dense_numbers"] or "0").split(" or ")[-1]
    words.append(f"method.dense_layers={dense}")
    made = modelled(config, ["gpu_cache=0", *words])
    step = modelled_step(made, weight_bits=config.advise.weight_bits)
    for place, settings in PLACES.items():
        has_cache = settings["gpu_cache"] > 0
        if row["family"] == "evicts" and place != DEVICE:
            continue  # what it keeps is small
        if has_cache and not made.method.names_rows:
            continue
        plan = replace(step.capacity.plan, **settings)  # which knows the sizes of its state
        capacity = replace(step.capacity, plan=plan)
        here = replace(step, capacity=capacity, hit_frac=_hit_frac(config) if has_cache else 0.0)
        placed = [*words, *(f"{name}={value}" for name, value in settings.items())]
        yield Option(row, place, placed, config, here)


def modelled(asked: RunConfig, words: Sequence[str]) -> RunConfig:
    """A run with these settings, of as many users as fit, on the machine and model that are asked
    about. Raises UserError for a method that the arithmetic does not size."""
    run = load(["experiment=latency", "batch_size=largest", "platform.device_gib=1", *words])
    endless = replace(asked.capacity, max_batch=sys.maxsize)
    parts = {name: getattr(asked, name) for name in ("model", "platform", "latency", "advise")}
    return replace(run, **parts, capacity=endless)


@cache
def group_size() -> int:
    """`group_size` of the board's runs with a codec that is not the method's own."""
    runs = read_yaml(CONF_DIR / "experiment" / "board.yaml")["sweep"]["runs_of"]["board"]
    (found,) = {run["group_size"] for run in runs if "codec" in run}
    return int(found)


def _hit_frac(config: RunConfig) -> float:
    given = config.advise.hit_frac
    return HIT_FRAC if given is None else given


# The answer


def first_lines(options: Sequence[Option]) -> list[str]:
    """Whether the cache fits, how long it may be, and how many users it takes until offloading
    pays."""
    full = full_on_device(options)
    wanted, context = full.asked.latency.batch_size, fitting_context(full)
    needs = full.step.capacity.needs(wanted)
    cache_gib, weights_gib = needs.slots / GIB, needs.weights / GIB
    room_gib = full.step.capacity.device_bytes / GIB
    memory = f"{cache_gib:.1f} GiB beside {weights_gib:.1f} of weights, in {room_gib:.1f}"
    longest = f"the device holds {wanted} x {context:,} tokens"
    if full.users >= wanted:
        fits = f"Your cache fits: {memory}; {longest}. Expect nothing from offloading."
    else:
        fits = f"Your cache does not fit: {memory}. {full.users} of {wanted} users do; {longest}."
    pays = pays_from(options)
    if pays is None:
        never = "Offloading pays at no number of users: it holds more of them, with fewer tokens/s"
        return [fits, f"{never} in all than those whom the device holds (modelled)."]
    number, other = pays
    return [fits, f"Offloading pays from {number} users on, by {_named(other)} (modelled)."]


def full_on_device(options: Sequence[Option]) -> Option:
    """The full cache, nothing offloaded."""
    return next(option for option in options if option.key == "full" and option.place == DEVICE)


def fitting_context(full: Option) -> int:
    """The most tokens of a sequence at which the users who are asked for fit on the device; 0:
    none. The model's limit is not exceeded."""
    asked, capacity = full.asked, full.step.capacity
    assert asked.model.shape is not None, "modelled by it"
    limit = asked.model.shape.get("max_position_embeddings", capacity.context)

    def fits(context: int) -> bool:
        shorter = replace(capacity, prompt_len=context - 1, gen_len=1)
        return shorter.wall_of(asked.latency.batch_size) is None

    return largest_batch(fits, limit)


def pays_from(options: Sequence[Option]) -> tuple[int, Option] | None:
    """The fewest users whose tokens/s in all are more with rows in host memory than with all rows
    on the device, as many of them as fit there at a time, and the option by which; None: never.
    Options count that lose no more answers than allowed."""
    allowed = [option for option in options if option.loses_little]
    here = [option for option in allowed if option.place == DEVICE]
    there = [option for option in allowed if option.place != DEVICE]
    most = max((option.users for option in there), default=0)

    def best(places: Sequence[Option], users: int) -> Option:
        return max(places, key=lambda option: option.total_at(users))

    def is_slower(users: int) -> bool:
        return best(there, users).total_at(users) <= best(here, users).total_at(users)

    number = largest_batch(is_slower, most) + 1
    return None if number > most else (number, best(there, number))


def recommendation(options: Sequence[Option]) -> list[str]:
    """One sentence, the command, and what would change it."""
    meeting = [option for option in options if not option.why_not]
    if not meeting:
        # Serves the most of the users, then loses no more answers than allowed, then is fastest.
        nearest = max(options, key=lambda one: (one.served, one.loses_little, -one.tpot_s))
        none = "Recommendation: none. No method that was measured meets all that is asked."
        return [none, f"The nearest is {_named(nearest)}: {nearest.why_not}."]
    best = meeting[0]
    first = (
        f"Recommendation: {_named(best)}, of which {best.users} users fit, with {best.each:.1f} "
        f"tokens/s for each of {best.served} and {best.total:.0f} in all (modelled), "
        f"and {_points(best)} of the answers lost (measured on the board's models)."
    )
    changes = [f"- {line}" for line in _changes(best, options, meeting)]
    run = f"As a command: {command(best)}"
    if best.step.platform.cards > 1:
        run = "As a command: none, since a run takes one GPU."
    return [first, run, "What would change it:", *changes]


def command(option: Option) -> str:
    """The run of an option on a machine with one such GPU, with weights of 16 bits."""
    sizes = [f"{name}={value}" for name, value in _sizes(option.asked).items()]
    run = ["experiment=latency", "platform=cuda", f"model={option.asked.model.name}"]
    return f"{COMMAND} {' '.join([*run, *sizes, *option.words])}"


def _sizes(asked: RunConfig) -> dict[str, int]:
    """The users that are asked for and their tokens, by setting."""
    sizes = asdict(asked.latency)
    return {name: sizes[name] for name in ("batch_size", "prompt_len", "gen_len")}


def _changes(best: Option, options: Sequence[Option], meeting: Sequence[Option]) -> Iterator[str]:
    def in_all(option: Option) -> str:
        return f"{_named(option)}, {option.total:.0f} tokens/s in all"

    stricter = [option for option in meeting if option.lost <= best.lost / 2]
    if best.lost > 0 and stricter:
        yield f"A limit of {_points(stricter[0])}: {in_all(stricter[0])}."
    if best.step.weight_bits > LIGHT_BITS:
        light = []
        for option in options:
            if option.place == DEVICE and option.loses_little and option.users:
                light.append(option.with_weights(LIGHT_BITS))
        light = [option for option in light if option.served >= best.served]
        other = max(light, key=lambda option: option.total, default=best)
        if other.total > best.total:
            yield f"Weights in {LIGHT_BITS} bits, whose loss was not measured: {in_all(other)}."
    own = max(meeting, key=lambda option: option.own_total or 0.0)
    if own.own_total is not None:
        yield f"This code's own launches: {_named(own)}, {_own(own)} tokens/s in all."
    yield from map(str, off_by_far(options))
    if best.place == CACHED:
        low, high = map(best.total_at_hit_rate, HIT_RANGE)
        shares = " to ".join(f"{100 * hit_frac:.0f} %" for hit_frac in HIT_RANGE)
        found = f"with {shares} of the rows found there {low:.0f} to {high:.0f} tokens/s in all"
        yield f"The GPU cache: {found}."


def _is_plain(option: Option) -> bool:
    """Whether it is the full cache or a codec on the device: nothing offloaded or left out."""
    return option.place == DEVICE and bool(option.board["own_budget"])


def _points(option: Option) -> str:
    return f"{round(100 * option.lost, 1) + 0.0:.1f} points"  # not -0.0


def _named(option: Option) -> str:
    if option.board["own_budget"]:
        return f"{option.label} ({option.place})"
    where = option.place
    if option.board["added_codec"]:
        where += f"; group_size={group_size()}"
    return f"{option.label} at {BUDGET.show(option.step.budget)} % ({where})"


def _own(option: Option) -> str:
    """Tokens/s of all users by this code."""
    return MISSING if option.own_total is None else f"{option.own_total:.0f}"


def _lost(option: Option) -> str:
    """Points of the answers that are lost, and of how many questions where others had more."""
    points = _points(option).removesuffix(" points")
    number = option.board["num_questions"]
    return points if option.was_asked_all else f"{points} ({number:.0f} questions)"


COLUMNS: dict[str, Callable[[Option], str]] = {
    LABEL.heading: lambda option: option.label,
    "rows lie": lambda option: option.place,
    "budget (%)": lambda option: BUDGET.show(option.step.budget),
    "users that fit": lambda option: str(option.users),
    "tokens/s of a user, engine": lambda option: f"{option.each:.1f}",
    "of all, engine": lambda option: f"{option.total:.0f}",
    "of all, this code": _own,
    "device (GiB)": lambda option: f"{option.needs.device / GIB:.1f}",
    "host (GiB)": lambda option: f"{option.needs.host / GIB:.1f}",
    RATIO.heading: lambda option: RATIO.show(option.ratio),
    "answers lost (points)": _lost,
}
WHY_NOT = {"why not": lambda option: option.why_not}


def sheets(options: Sequence[Option]) -> list[Sheet]:
    """What there is without offloading; what meets the question, at its fastest budget; and of each
    other method what is nearest to it."""
    whole = [option for option in options if _is_plain(option)]
    meeting: dict[tuple[str, str], Option] = {}
    others: dict[str, Option] = {}

    def serves(option: Option) -> tuple[int, float]:
        return option.served, -option.lost

    for option in options:
        if not option.why_not:
            meeting.setdefault((option.label, option.place), option)
        nearest = others.setdefault(option.label, option)
        others[option.label] = max(nearest, option, key=serves)
    shown = {option.label for option in (*whole, *meeting.values())}
    missing = [option for option in others.values() if option.label not in shown]
    title = "On the device, nothing offloaded (speeds modelled)"
    found = [sheet_of(title, whole, COLUMNS)]
    if meeting:
        title = "Meets all that is asked (speeds modelled)"
        found.append(sheet_of(title, meeting.values(), COLUMNS))
    if missing:
        found.append(sheet_of("Does not (speeds modelled)", missing, COLUMNS | WHY_NOT))
    return found


# Beside speeds that others saw


class Seen(NamedTuple):
    """A speed that others saw beside the model's, in tokens/s of all users or as a ratio of two."""

    what: str
    modelled: float
    seen: float
    source: str

    @property
    def times(self) -> float:
        """How far the model is off, in either direction."""
        return max(self.modelled / self.seen, self.seen / self.modelled)

    def __str__(self) -> str:
        off = f"The cost model is {self.times:.1f} times off for {self.what}"
        return f"{off}: {self.modelled:.0f}, seen {self.seen:g} ({self.source})."


def beside(settings: Sequence[str], known: Mapping[str, Any]) -> Seen:
    """A published speed of a worked question beside the model's. settings: the question's."""
    predicted = _rate(settings, known["words"], known["at"])
    if "over" in known:
        predicted /= _rate(settings, known["over"], known["over_at"])
    source = "; ".join(known[name] for name in ("source", "because") if name in known)
    return Seen(known["what"], predicted, known["value"], source)


def off_by_far(options: Sequence[Option]) -> Iterator[Seen]:
    """The speeds from which the model is off by more than `OFF` times, of what is recommended or
    fits without offloading."""
    looked_at = {f"method={option.key}" for option in options if _is_plain(option)}
    looked_at |= {f"method={option.key}" for option in options if not option.why_not}
    for asked in KNOWN["worked"]:
        for known in asked.get("published", ()):
            if "because" in known and looked_at & {*known["words"]}:
                seen = beside(asked["settings"], known)
                if seen.times > OFF:
                    yield seen


def _rate(asked: Sequence[str], own: Sequence[str], users: int) -> float:
    """Tokens/s of all users in a run of the worked question's machine and model. own: the run's
    settings, and others of the question."""
    from harness.paper.costmodel.step import modelled_step

    question = ["experiment=advise", *asked]
    run: list[str] = []
    for word in own:
        (run if word.startswith(OF_RUN) else question).append(word)
    question = list({word.partition("=")[0]: word for word in question}.values())
    return users / modelled_step(modelled(load(question), run)).seconds(users)


# The answer for programs


def as_data(options: Sequence[Option], left: Mapping[str, str]) -> dict[str, Any]:
    """The answer as JSON has it. Speeds are modelled, answers measured. left: why a method has no
    option, by label."""
    asked, full = options[0].asked, full_on_device(options)
    best = options[0] if not options[0].why_not else None
    pays = pays_from(options)
    return {
        "source": "modelled",
        "model": asked.model.name,
        "platform": dict(asked.platform.sheet or {}),
        "asked": asdict(asked.advise) | _sizes(asked),
        "fits_without_offloading": full.users >= asked.latency.batch_size,
        "users_that_fit_without_offloading": full.users,
        "context_that_fits_without_offloading": fitting_context(full),
        "offloading_pays_from_users": pays[0] if pays else None,
        "offloading_pays_by": pays and _data(pays[1]),
        "recommendation": best and _data(best),
        "model_is_off": [seen._asdict() | {"times": seen.times} for seen in off_by_far(options)],
        "options": [_data(option) for option in options],
        "left_out": dict(left),
    }


def _data(option: Option) -> dict[str, Any]:
    return {
        "label": option.label,
        "settings": list(option.words),
        "place": option.place,
        "budget": option.step.budget,
        "weight_bits": option.step.weight_bits,
        "users_that_fit": option.users,
        "users_served": option.served,
        "tokens_per_s_of_a_user": option.each,
        "tokens_per_s": option.total,
        "tokens_per_s_by_this_code": option.own_total,
        "ttft_s": option.ttft_s,
        "device_bytes": option.needs.device,
        "host_bytes": option.needs.host,
        "kl_over_the_oracles": option.ratio,
        "answers_lost": option.lost,
        "num_questions": int(option.board["num_questions"]),
        "why_not": option.why_not,
    }


def sources(config: RunConfig, options: Sequence[Option], left: Mapping[str, str]) -> list[str]:
    """Where each number comes from, and what was not measured."""
    least, most = options[0].ttft_s
    platform = options[0].step.platform
    fields = {
        "platform": platform,
        "memory": platform.device_bytes / GIB,
        "rates": [platform.memory_bytes_per_s / 1e9, platform.link_bytes_per_s / 1e9],
        "tflops": platform.flops_per_s / 1e12,
        "model": config.model.name,
        "weight_bits": config.advise.weight_bits,
        "prompt_len": config.latency.prompt_len,
        "gen_len": config.latency.gen_len,
        **launch_us(),
        "ttft_least": least,
        "ttft_most": most,
        "rows": ROWS,
        "hit": 100 * _hit_frac(config),
        "hit_source": "as given" if config.advise.hit_frac is not None else KNOWN["hit_measured"],
    }
    lines = [sentence.format(**fields) for sentence in KNOWN["sources"]]
    for why in dict.fromkeys(left.values()):
        labels = [label for label, of_label in left.items() if of_label == why]
        lines.append(f"Left out, as {why}: {', '.join(labels)}.")
    shown = {option.board["method"]: option.label for option in options}
    known = KNOWN["engines"]
    having = "; ".join(f"{label}: {known[at]}" for at, label in shown.items() if at in known)
    return [*lines, timed(), f"Serving engines: {having}; of the others none is known here."]


def launch_us() -> dict[str, float]:
    """The microseconds and launches of the sentences about speed."""
    from harness.paper.costmodel import step

    launches = {"full": step.FULL_LAUNCHES, "fused": step.FUSED_LAUNCHES}
    return launches | {"node_us": 1e6 * step.NODE_S, "launch_us": 1e6 * step.LAUNCH_S}


def timed() -> str:
    """What an H100 took, as far as it was measured."""
    known = KNOWN["timed"]
    rows = read_frame(TIMED)
    rows = rows[rows["batch_size"] == known["batch_size"]].set_index("label")
    speeds = []
    for label, words in known["labels"].items():
        speeds.append(f"{words} {rows.at[label, 'tokens_per_s']:.0f}")
    return known["sentence"].format(speeds=", ".join(speeds), **rows.iloc[0])

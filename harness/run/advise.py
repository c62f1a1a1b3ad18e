"""`kv-harness advise`: which method, for a machine, a model and its users.

    python run.py advise model=llama3.1-8b platform=rtx4090-pcie4 batch_size=8 prompt_len=32640

A row is a method of the board at one of its budgets, with its rows on the device, in host memory,
or in host memory behind a GPU cache. How many users fit is the arithmetic of a live session. Speed
is the step of an engine by the cost model (`harness.paper.costmodel.capacity`), alike for every
method; that of this code, whose host launches kernel by kernel, stands beside it. What a method
loses was measured on the board's models. `advise.yaml` has the launches of each method here, the
formats of a cache that engines ship, and the engines that have a method.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.decode.memory import GIB
from harness.decode.needs import largest_batch
from harness.errors import UserError
from harness.files import write_atomic
from harness.model.shape import read_yaml
from harness.results.columns import read_frame
from harness.results.metrics import BUDGET, LABEL, MISSING, RATIO
from harness.results.sheet import Sheet, sheet_of, terminal
from harness.run.compose import load
from harness.scoring.progress import bar
from harness.settings.config import RunConfig
from harness.settings.own_method import shipped
from harness.settings.paths import COMMAND, CONF_DIR, SHIPPED

if TYPE_CHECKING:
    import pandas as pd

    from harness.paper.costmodel.capacity import Step

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
DEVICE, CACHED = "device", "host, GPU cache"
PLACES: dict[str, dict[str, Any]] = {
    DEVICE: {"placement": "device", "gpu_cache": 0},
    "host": {"placement": "host", "gpu_cache": 0},
    CACHED: {"placement": "host", "gpu_cache": ROWS},
}
LINK_LAUNCHES = 3
"""Launches on the link's stream, a layer (benchmarks/NOTES.md)."""
LIGHT_BITS = 4
"""Of a stored weight, where all else is as asked: what then fits without offloading."""
NOT_MEASURED = "not measured"


@dataclass(frozen=True, eq=False)
class Option:
    """A method of the board at a budget, in a place of `PLACES`, under the question's settings.

    board: its row of `board_rows`. words: its settings on a command line. asked: the question.
    step: of the cost model, with its capacity. most_questions: of any row of the board.
    """

    board: pd.Series
    place: str
    words: Sequence[str]
    asked: RunConfig
    step: Step
    most_questions: int

    @property
    def label(self) -> str:
        """The method in words."""
        label: str = self.board["label"]
        return label

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
        """Seconds of an engine's step, whose kernels are launched at once (CUDA graphs)."""
        return self.step.seconds(self.served) if self.served else math.inf

    @property
    def own_tpot_s(self) -> float | None:
        """Seconds of a step of this code; None where its launches were not counted."""
        launches = KNOWN["launches"].get(self.key)
        if launches is None or not self.served:
            return None
        full_layer, on_device = KNOWN["launches"]["full"][0], self.place == DEVICE
        link = 0 if on_device else LINK_LAUNCHES
        host_s = self.step.host_seconds(full_layer, launches[0 if on_device else 1], link)
        return max(self.tpot_s, host_s)

    @property
    def key(self) -> str:
        """Method and codec, as advise.yaml names them."""
        return _key(self.board)

    def total_at(self, users: int) -> float:
        """Tokens/s of as many of these users as fit at a time."""
        served = min(users, self.users)
        return served / self.step.seconds(served) if served else 0.0

    @property
    def total(self) -> float:
        """Tokens/s of all users."""
        return self.served / self.tpot_s

    def at_hit_rate(self, hit_frac: float) -> float:
        """Tokens/s of all users if the GPU cache has this share of the selected rows."""
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
        from harness.paper.costmodel.capacity import PREFILL_SHARES

        least, most = sorted(map(self.step.prefill_seconds, PREFILL_SHARES))
        return least, most

    @property
    def lost(self) -> float | None:
        """Share of the full cache's right answers that are lost; None: not measured."""
        return number_in(self.board, "answers_lost")

    @property
    def ratio(self) -> float | None:
        """KL over the oracle's; None: not measured."""
        return number_in(self.board, "ratio")

    @property
    def num_questions(self) -> int | None:
        """Questions of the board that it was asked; None for none."""
        number = number_in(self.board, "num_questions")
        return None if number is None else int(number)

    @property
    def was_asked_all(self) -> bool:
        """Whether it was asked all questions of the board: some rows are of one model alone."""
        return self.num_questions == self.most_questions

    @property
    def loses_little(self) -> bool:
        """Whether it is known to lose no more answers than allowed."""
        limit = self.asked.advise.answers_lost
        return self.lost is not None and self.lost <= limit and self.was_asked_all

    @property
    def why_not(self) -> str:
        """What of the question it does not meet; empty where it meets all. What was not measured
        comes last."""
        asked, wanted = self.asked.advise, self.asked.latency.batch_size
        if self.users < wanted:
            return f"holds {self.users} users"
        if asked.tokens_per_s is not None and 1 / self.tpot_s < asked.tokens_per_s:
            return f"{1 / self.tpot_s:.1f} tokens/s for a user"
        if asked.ttft_s is not None and self.ttft_s[0] > asked.ttft_s:
            return f"a prompt takes {self.ttft_s[0]:.1f} s"
        if self.lost is None:
            return NOT_MEASURED
        if self.lost > asked.answers_lost:
            return f"loses {_points(self)}"
        if not self.was_asked_all:
            return f"was asked {self.num_questions} of {self.most_questions} questions"
        return ""


# The question


def advise(config: RunConfig) -> str:
    """The answer as text for a terminal: what fits without offloading, a recommendation, what
    would change it, tables, and where the numbers come from. Writes `advise.json` beside.

    Raises UserError for a model that the cost model does not know, or that the machine does not
    hold.
    """
    options, left = options_of(config)
    lines = [*first_lines(options), "", *recommendation(options), ""]
    brief = KNOWN["in_terminal"]
    for sheet in sheets(options):
        table = sheet.table.rename(columns=brief)
        shown = [heading for heading in brief.values() if heading in table]
        lines += [terminal(sheet._replace(table=table[shown])), ""]
    path = Path(config.results_dir) / "advise.json"
    write_atomic(path, json.dumps(as_data(options), indent=1) + "\n")
    return "\n".join([*lines, *sources(config, options, left), f"All options: {path}"])


def options_of(config: RunConfig) -> tuple[list[Option], dict[str, str]]:
    """Every option, the best first, and why a method has none, by label. Raises UserError where the
    full cache cannot be modelled, and so nothing can."""
    found: list[Option] = []
    left: dict[str, str] = {}
    rows = board_rows(config.latency.prompt_len + config.latency.gen_len)
    most_questions = int(rows["num_questions"].max())
    for row in bar([row for _, row in rows.iterrows()], desc="advice", unit="row"):
        if number_in(row, "answers_lost") is None and row["family"] != "codes":
            left[row["label"]] = "nobody measured the answers that it loses"
            continue
        try:
            found += _options(config, row, most_questions)
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

    `answers_lost` is the share of the full cache's right answers that a row loses, NaN where nobody
    measured it. A format of the cache that the board lacks has a row without measurements.
    """
    import pandas as pd  # here, as a command's help needs no pandas

    board = read_frame(BOARD)
    has_own_budget = board["family"].isin(OWN_BUDGET)
    can_have = has_own_budget | (board["apart"] == "")  # it cannot have this budget, else
    board = board[(board["over"] == OVER) & (board["family"] != "oracle") & can_have]
    is_full = (board["method"] == "full") & (board["codec"] == "")
    board = board.assign(answers_lost=(-board["answers_difference"]).mask(is_full, 0))
    budget = board["asked_budget"].mask(has_own_budget)
    length = board["seq_len"]
    fitting = length.where(length <= context, -length)  # else the shortest
    same = fitting.groupby([board["label"], budget], sort=False, dropna=False)
    rows = board.loc[same.idxmax()]
    rows = rows.sort_values("method", key=lambda methods: methods != "full", kind="stable")
    formats = []
    for name in KNOWN["codecs"]:
        if name not in set(rows["method"]):
            _, file = shipped(name)
            row = {"label": file["title"], "method": name, "codec": file["codec"]}
            formats.append(row | {"family": "codes", "dense_numbers": ""})
    return pd.concat([rows, pd.DataFrame(formats)], ignore_index=True)


def number_in(row: pd.Series, name: str) -> float | None:
    """A number of a row of the board; None where it has none."""
    return None if math.isnan(row[name]) else float(row[name])


def reads_own_budget(row: pd.Series) -> bool:
    """True for the full cache and for codecs, which have no budget to set."""
    return row["family"] in OWN_BUDGET


def _options(config: RunConfig, row: pd.Series, most_questions: int) -> Iterator[Option]:
    """A row of the board in each place that its method has. Raises UserError for what cannot be
    known."""
    from harness.paper.costmodel.capacity import modelled_step

    words = [f"method={row['method']}"]
    if not reads_own_budget(row):
        words.append(f"budget={row['asked_budget']}")
    if _has_added_codec(row):
        words += [f"codec={row['codec']}", f"group_size={group_size()}"]
    dense = (row["dense_numbers"] or "0").split(" or ")[-1]
    words.append(f"method.dense_layers={dense}")
    made = modelled(config, ["gpu_cache=0", *words])
    given = config.advise.hit_frac
    hit_frac = HIT_FRAC if given is None else given
    step = modelled_step(made, weight_bits=config.advise.weight_bits)
    for place, settings in PLACES.items():
        has_cache = settings["gpu_cache"] > 0
        if row["family"] == "evicts" and place != DEVICE:
            continue  # what it keeps is small
        if has_cache and not made.method.names_rows:
            continue
        plan = replace(step.capacity.plan, **settings)  # which knows the sizes of its state
        capacity = replace(step.capacity, plan=plan)
        here = replace(step, capacity=capacity, hit_frac=hit_frac if has_cache else 0.0)
        placed = [*words, *(f"{name}={value}" for name, value in settings.items())]
        yield Option(row, place, placed, config, here, most_questions)


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
    runs = read_yaml(CONF_DIR / "experiment" / "board.yaml")["sweep"]["runs"]
    (found,) = {run["group_size"] for run in runs if "codec" in run}
    return int(found)


def _has_added_codec(row: pd.Series) -> bool:
    return bool(row["codec"]) and "codec" not in shipped(row["method"])[1]


def _key(row: pd.Series) -> str:
    method: str = row["method"]
    return f"{method}+{row['codec']}" if _has_added_codec(row) else method


# The answer


def first_lines(options: Sequence[Option]) -> list[str]:
    """Whether the cache fits, and how many users it takes until offloading pays."""
    full = next(option for option in options if option.key == "full" and option.place == DEVICE)
    wanted = full.asked.latency.batch_size
    needs = full.step.capacity.needs(wanted)
    cache_gib, weights_gib = needs.slots / GIB, needs.weights / GIB
    room_gib = full.step.capacity.device_bytes / GIB
    memory = f"{cache_gib:.1f} GiB beside {weights_gib:.1f} of weights, in {room_gib:.1f}"
    if full.users >= wanted:
        fits = f"Your cache fits: {memory}. Expect nothing from offloading."
    else:
        fits = f"Your cache does not fit: {memory}. {full.users} of {wanted} users do."
    pays = pays_from(options)
    if pays is None:
        return [fits, "Offloading pays at no number of users, in tokens/s of all (modelled)."]
    number, other = pays
    return [fits, f"Offloading pays from {number} users on, by {_named(other)} (modelled)."]


def pays_from(options: Sequence[Option]) -> tuple[int, Option] | None:
    """The fewest users whose tokens/s in all are more with rows in host memory than with all rows
    on the device, as many of them as fit there at a time, and the option by which; None: never.
    Options count that lose no more answers than allowed."""
    allowed = [option for option in options if option.loses_little]
    here = [option for option in allowed if option.place == DEVICE]
    there = [option for option in allowed if option.place != DEVICE]
    most = max((option.users for option in there), default=0)

    def is_slower(users: int) -> bool:
        return _best(there, users).total_at(users) <= _best(here, users).total_at(users)

    number = largest_batch(is_slower, most) + 1
    return None if number > most else (number, _best(there, number))


def _best(options: Sequence[Option], users: int) -> Option:
    return max(options, key=lambda option: option.total_at(users))


def recommendation(options: Sequence[Option]) -> list[str]:
    """One sentence, the command, and what would change it."""
    meeting = [option for option in options if not option.why_not]
    if not meeting:
        lines = ["Recommendation: none. No method that was measured meets all that is asked."]
        unmeasured = [option for option in options if option.why_not == NOT_MEASURED]
        for other in unmeasured[:1]:
            speed = f"{_each(other)} tokens/s for each of {other.served} (modelled)"
            lines.append(f"But for its answers, which were not measured, {_named(other)}: {speed}.")
        nearest = max(options, key=_nearness)
        return [*lines, f"The nearest is {_named(nearest)}: {nearest.why_not}."]
    best = meeting[0]
    speed = f"{_each(best)} tokens/s for each of {best.served} and {_all(best)} in all (modelled)"
    first = (
        f"Recommendation: {_named(best)}, of which {best.users} users fit, with {speed}, "
        f"and {_points(best)} of the answers lost (measured on the board's models)."
    )
    changes = [f"- {line}" for line in _changes(best, options, meeting)]
    return [first, f"As a command: {command(best)}", "What would change it:", *changes]


def command(option: Option) -> str:
    """The run of an option on a machine with such a GPU, with weights of 16 bits."""
    sizes = [f"{name}={value}" for name, value in _sizes(option.asked).items()]
    run = ["experiment=latency", "platform=cuda", f"model={option.asked.model.name}"]
    if option.step.platform.cards > 1:
        run.append("model.device=map")
    return f"{COMMAND} {' '.join([*run, *sizes, *option.words])}"


def _sizes(asked: RunConfig) -> dict[str, int]:
    """The users that are asked for and their tokens, by setting."""
    sizes = asdict(asked.latency)
    return {name: sizes[name] for name in ("batch_size", "prompt_len", "gen_len")}


def _nearness(option: Option) -> tuple[Any, ...]:
    """Larger for what serves more of the users, then for what loses no more answers than allowed
    (as far as it was asked), then for the faster."""
    return option.served, option.loses_little, -option.tpot_s


def _changes(best: Option, options: Sequence[Option], meeting: Sequence[Option]) -> Iterator[str]:
    limit = best.asked.advise.answers_lost
    on_device = [
        option
        for option in options
        if option.place == DEVICE and option.loses_little and option.users
    ]
    most = max(on_device, key=lambda option: option.users, default=best)
    full = [option for option in on_device if option.key == "full" and option is not most]
    for other in (*full, most):
        if other.users < best.served:
            yield f"Fewer users: {_named(other)} holds {other.users}, {_each(other)} tokens/s each."
    lost = best.lost or 0.0
    stricter = [option for option in meeting if (option.lost or 0.0) <= lost / 2]
    if lost > 0 and stricter:
        other = stricter[0]
        yield f"A limit of {_points(other)}: {_named(other)}, {_all(other)} tokens/s in all."
    looser = [
        option
        for option in options
        if option.lost is not None
        and option.lost > limit
        and option.served >= best.served
        and option.tpot_s < best.tpot_s
    ]
    if looser:
        other = min(looser, key=lambda option: option.lost or 0.0)
        yield f"A limit of {_points(other)}: {_named(other)}, {_all(other)} tokens/s in all."
    unmeasured = [option for option in options if option.why_not == NOT_MEASURED]
    if unmeasured and unmeasured[0].tpot_s < best.tpot_s:
        other = unmeasured[0]
        yield f"If its answers were measured: {_named(other)}, {_all(other)} tokens/s in all."
    if best.step.weight_bits > LIGHT_BITS:
        light = [one.with_weights(LIGHT_BITS) for one in on_device]
        light = [one for one in light if one.served >= best.served]
        other = max(light, key=lambda option: option.total, default=best)
        if other.total > best.total:
            speed = f"{_named(other)}, {_all(other)} tokens/s in all"
            yield f"Weights in {LIGHT_BITS} bits, whose loss was not measured: {speed}."
    own = [option for option in meeting if option.own_tpot_s is not None]
    if own:
        other = max(own, key=_own_total)
        yield f"This code's own launches: {_named(other)}, {_own(other)} tokens/s in all."
    if best.place == CACHED:
        low, high = map(best.at_hit_rate, HIT_RANGE)
        shares = " to ".join(f"{100 * hit_frac:.0f} %" for hit_frac in HIT_RANGE)
        found = f"with {shares} of the rows found there {low:.0f} to {high:.0f} tokens/s in all"
        yield f"The GPU cache: {found}."
        other = max(meeting, key=_at_low_end)
        if _at_low_end(other) > low:
            yield f"At the low end {_named(other)} is faster, with {_at_low_end(other):.0f}."


def _own_total(option: Option) -> float:
    """Tokens/s of all users by this code; 0 where they are not known."""
    return option.served / option.own_tpot_s if option.own_tpot_s is not None else 0.0


def _at_low_end(option: Option) -> float:
    """Tokens/s of all users, where GPU caches have the least of `HIT_RANGE`."""
    return option.at_hit_rate(HIT_RANGE[0]) if option.place == CACHED else option.total


def _points(option: Option) -> str:
    if option.lost is None:
        return NOT_MEASURED
    return f"{round(100 * option.lost, 1) + 0.0:.1f} points"  # not -0.0


def _named(option: Option) -> str:
    if reads_own_budget(option.board):
        return f"{option.label} ({option.place})"
    where = option.place
    if _has_added_codec(option.board):
        where += f"; group_size={group_size()}"
    return f"{option.label} at {BUDGET.show(option.step.budget)} % ({where})"


Column = Callable[[Option], str]


def _all(option: Option) -> str:
    """Tokens/s of all users."""
    return f"{option.total:.0f}" if option.served else MISSING


def _own(option: Option) -> str:
    """Tokens/s of all users by this code."""
    return MISSING if option.own_tpot_s is None else f"{_own_total(option):.0f}"


def _each(option: Option) -> str:
    """Tokens/s of a user."""
    return f"{1 / option.tpot_s:.1f}" if option.served else MISSING


def _gib(option: Option, memory: str) -> str:
    needs = option.step.capacity.needs(max(1, option.served))
    return f"{getattr(needs, memory) / GIB:.1f}"


def _ratio(option: Option) -> str:
    return RATIO.show(0.0 if option.key == "full" else option.ratio)


def _lost(option: Option) -> str:
    """Points of the answers that are lost, and of how many questions where others had more."""
    points, number = _points(option).removesuffix(" points"), option.num_questions
    return f"{points} ({number} questions)" if number and not option.was_asked_all else points


SPEEDS: dict[str, Column] = {
    "users that fit": lambda option: str(option.users),
    "tokens/s of a user": _each,
    "tokens/s of all": _all,
}
LOST: dict[str, Column] = {
    "answers lost (points)": _lost,
}
COLUMNS: dict[str, Column] = {
    LABEL.heading: lambda option: option.label,
    "rows lie": lambda option: option.place,
    "budget (%)": lambda option: BUDGET.show(option.step.budget),
    **SPEEDS,
    "of all, this code": _own,
    "device (GiB)": lambda option: _gib(option, "device"),
    "host (GiB)": lambda option: _gib(option, "host"),
    RATIO.heading: _ratio,
    **LOST,
    "questions": lambda option: str(option.num_questions or MISSING),
}


def sheets(options: Sequence[Option]) -> list[Sheet]:
    """What there is without offloading; what meets the question, at its fastest budget; and of each
    other method what is nearest to it."""
    whole = [one for one in options if one.place == DEVICE and reads_own_budget(one.board)]
    meeting: dict[tuple[str, str], Option] = {}
    others: dict[str, Option] = {}
    for option in options:
        if not option.why_not:
            meeting.setdefault((option.label, option.place), option)
        nearest = others.setdefault(option.label, option)
        if (option.served, -(option.lost or 0)) > (nearest.served, -(nearest.lost or 0)):
            others[option.label] = option
    shown = {option.label for option in (*whole, *meeting.values())}
    missing = [option for option in others.values() if option.label not in shown]
    because: dict[str, Column] = {"why not": lambda option: option.why_not}
    found = [sheet_of("On the device, nothing offloaded (speeds modelled)", whole, _light(whole))]
    if meeting:
        title = "Meets all that is asked (speeds modelled)"
        found.append(sheet_of(title, meeting.values(), COLUMNS))
    if missing:
        found.append(sheet_of("Does not (speeds modelled)", missing, COLUMNS | because))
    return found


def _light(options: Sequence[Option]) -> dict[str, Column]:
    """Columns of options, and of the same with weights in few bits where more are asked for."""
    columns = {name: COLUMNS[name] for name in (LABEL.heading, "budget (%)", *SPEEDS)}
    if options[0].step.weight_bits > LIGHT_BITS:
        light = {option.label: option.with_weights(LIGHT_BITS) for option in options}
        for name, column in SPEEDS.items():
            columns[f"{name}, weights of {LIGHT_BITS} bits"] = partial(_light_cell, column, light)
    return columns | LOST


def _light_cell(column: Column, light: Mapping[str, Option], option: Option) -> str:
    return column(light[option.label])


def as_data(options: Sequence[Option]) -> dict[str, Any]:
    """The answer for programs, as `advise.json` holds it. Speeds are modelled, answers measured."""
    asked = options[0].asked
    best = options[0] if not options[0].why_not else None
    pays = pays_from(options)
    return {
        "source": "modelled",
        "model": asked.model.name,
        "platform": dict(asked.platform.sheet or {}),
        "asked": asdict(asked.advise) | _sizes(asked),
        "offloading_pays_from_users": pays[0] if pays else None,
        "recommendation": best and _data(best),
        "options": [_data(option) for option in options],
    }


def _data(option: Option) -> dict[str, Any]:
    needs = option.step.capacity.needs(max(1, option.served))
    own = option.own_tpot_s
    return {
        "label": option.label,
        "settings": list(option.words),
        "place": option.place,
        "budget": option.step.budget,
        "weight_bits": option.step.weight_bits,
        "users_that_fit": option.users,
        "users_served": option.served,
        "tokens_per_s_of_a_user": 1 / option.tpot_s,
        "tokens_per_s": option.total,
        "tokens_per_s_by_this_code": None if own is None else option.served / own,
        "ttft_s": option.ttft_s,
        "device_bytes": needs.device,
        "host_bytes": needs.host,
        "kl_over_the_oracles": option.ratio,
        "answers_lost": option.lost,
        "num_questions": option.num_questions,
        "why_not": option.why_not,
    }


def sources(config: RunConfig, options: Sequence[Option], left: Mapping[str, str]) -> list[str]:
    """Where each number comes from, and what was not measured."""
    from harness.paper.costmodel.capacity import LAUNCH_S

    given = config.advise.hit_frac
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
        "launch_us": 1e6 * LAUNCH_S,
        "ttft_least": least,
        "ttft_most": most,
        "rows": ROWS,
        "hit": 100 * (HIT_FRAC if given is None else given),
        "hit_source": KNOWN["hit_measured"] if given is None else "as given",
    }
    lines = [sentence.format(**fields) for sentence in KNOWN["sources"]]
    for why in dict.fromkeys(left.values()):
        labels = [label for label, of_label in left.items() if of_label == why]
        lines.append(f"Left out, as {why}: {', '.join(labels)}.")
    engines = "; ".join(_engines(options))
    return [*lines, timed(), f"Serving engines: {engines}; of the others none is known here."]


def timed() -> str:
    """What an H100 took, as far as it was measured."""
    known = KNOWN["timed"]
    rows = read_frame(TIMED)
    rows = rows[rows["batch_size"] == known["batch_size"]].set_index("label")
    speeds = []
    for label, words in known["labels"].items():
        speeds.append(f"{words} {rows.at[label, 'tokens_per_s']:.0f}")
    return known["sentence"].format(speeds=", ".join(speeds), **rows.iloc[0])


def _engines(options: Iterable[Option]) -> Iterator[str]:
    known = KNOWN["engines"]
    labels = {option.board["method"]: option.label for option in options}
    for method, label in labels.items():
        if method in known:
            yield f"{label}: {known[method]}"

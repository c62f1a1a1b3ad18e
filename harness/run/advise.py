"""`kv-harness advise`: which method, for a machine, a model and its users.

    python run.py advise model=llama3.1-8b platform=rtx4090-pcie4 batch_size=8 prompt_len=32640

A row is a method of the board at one of its budgets, with its rows on the device, in host memory,
or in host memory behind a GPU cache. How many users fit is the arithmetic of a live session, speed
is the cost model's (`harness.paper.costmodel.capacity`), what a method loses was measured on the
board's models. `advise.yaml` has the launches of each method, and the serving engines that have
one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.decode.memory import GIB
from harness.errors import UserError
from harness.model.shape import read_yaml
from harness.results.columns import TableRow, grouped, read_table, where
from harness.results.metrics import BUDGET, LABEL, MISSING, RATIO
from harness.results.sheet import Sheet, sheet_of, terminal
from harness.run.compose import load
from harness.run.parse import method_file
from harness.scoring.progress import bar
from harness.settings.config import RunConfig
from harness.settings.paths import CONF_DIR, SHIPPED

if TYPE_CHECKING:
    from harness.paper.costmodel.capacity import Step

KNOWN = read_yaml(Path(__file__).with_name("advise.yaml"))
BOARD = SHIPPED / "tables" / "board-methods.csv"
OVER = "all models"
ROWS = 2
"""Rows of a GPU cache, as a multiple of what a step reads."""
HIT_FRAC = 0.89
"""Share of the selected rows that such a cache had, where none is given: InfiniGen2 at 10 % on
SmolLM2, 1,024 tokens (docs/results.md)."""
HIT_RANGE = (0.60, 0.95)
PLACES: dict[str, dict[str, Any]] = {
    "device": {"placement": "device", "gpu_cache": 0},
    "host": {"placement": "host", "gpu_cache": 0},
    "host, GPU cache": {"placement": "host", "gpu_cache": ROWS},
}
LINK_LAUNCHES = 3
"""Launches on the link's stream, a layer (benchmarks/NOTES.md)."""


@dataclass(frozen=True)
class Option:
    """A method of the board at a budget, in a place of `PLACES`, under the question's settings.

    board: its row there. asked: the question. step: of the cost model, with its capacity.
    most_questions: of any row of the board.
    """

    board: TableRow
    place: str
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
    def graph_tpot_s(self) -> float:
        """Seconds of a step by an engine whose host launches a step at once (CUDA graphs)."""
        return self.step.seconds(self.served) if self.served else math.inf

    @cached_property
    def tpot_s(self) -> float:
        """Seconds of a step of this project, whose host launches kernel by kernel."""
        return max(self.graph_tpot_s, self.host_s)

    @property
    def host_s(self) -> float:
        """Seconds in which the host launches a step."""
        on_device, on_host = KNOWN["launches"][self.key]
        full_layer = KNOWN["launches"]["full"][0]
        if self.place == "device":
            return self.step.host_seconds(full_layer, on_device, 0)
        return self.step.host_seconds(full_layer, on_host, LINK_LAUNCHES)

    @property
    def key(self) -> str:
        """Method and codec, as `launches` of advise.yaml names them."""
        return _key(self.board)

    @property
    def has_added_codec(self) -> bool:
        """Whether its rows have a codec that is not the method's own."""
        return _has_added_codec(self.board)

    def total(self, tpot_s: float) -> float:
        """Tokens/s of all users."""
        return self.served / tpot_s

    def at_hit_rate(self, hit_frac: float, *, by_host: bool = True) -> float:
        """Tokens/s of all users if the GPU cache has this share of the selected rows."""
        step = replace(self.step, hit_frac=hit_frac)
        return self.total(max(step.seconds(self.served), self.host_s if by_host else 0))

    @cached_property
    def ttft_s(self) -> tuple[float, float]:
        """Seconds of one prompt alone, from the least to the most."""
        from harness.paper.costmodel.capacity import PREFILL_SHARES

        least, most = sorted(map(self.step.prefill_seconds, PREFILL_SHARES))
        return least, most

    @property
    def lost(self) -> float:
        """Share of the full cache's right answers that are lost."""
        lost = lost_by(self.board)
        assert lost is not None, "looked at before"
        return lost

    @property
    def num_questions(self) -> int:
        """Questions that it was asked, of all models of the board."""
        count: int = self.board["num_questions"]
        return count

    @property
    def was_asked_all(self) -> bool:
        """Whether it was asked all questions of the board: some rows are of one model alone."""
        return self.num_questions == self.most_questions

    @property
    def why_not(self) -> str:
        """What of the question it does not meet; empty where it meets all."""
        return self.why_not_at(self.tpot_s)

    def why_not_at(self, tpot_s: float) -> str:
        """The same with steps of these seconds."""
        asked, wanted = self.asked.advise, self.asked.latency.batch_size
        if self.users < wanted:
            return f"holds {self.users} users"
        if self.lost > asked.answers_lost:
            return f"loses {100 * self.lost:.1f} points"
        if not self.was_asked_all:
            return f"was asked {self.num_questions} of {self.most_questions} questions"
        if asked.tokens_per_s is not None and 1 / tpot_s < asked.tokens_per_s:
            return f"{1 / tpot_s:.1f} tokens/s for a user"
        if asked.ttft_s is not None and self.ttft_s[0] > asked.ttft_s:
            return f"a prompt takes {self.ttft_s[0]:.1f} s"
        return ""


# The question


def advise(config: RunConfig) -> str:
    """The answer as text for a terminal: a recommendation, what would change it, tables, and where
    the numbers come from.

    Raises UserError for a model that the cost model does not know, or that the machine does not
    hold.
    """
    options, left = options_of(config)
    lines = [*recommendation(options), ""]
    for sheet in sheets(options):
        lines += [terminal(sheet), ""]
    return "\n".join([*lines, *sources(config, options, left)])


def options_of(config: RunConfig) -> tuple[list[Option], dict[str, str]]:
    """Every option, the best first, and why a method has none, by label. Raises UserError where the
    full cache cannot be modelled, and so nothing can."""
    found: list[Option] = []
    left: dict[str, str] = {}
    rows = board_rows(config.latency.prompt_len + config.latency.gen_len)
    most_questions = max(row["num_questions"] or 0 for row in rows)
    for row in bar(rows, desc="advice", unit="row"):
        if lost_by(row) is None:
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
    found.sort(key=lambda option: (option.why_not != "", -option.total(option.tpot_s)))
    return found, left


def board_rows(context: int) -> list[TableRow]:
    """The board's rows over all models that a live session can have, each at its longest windows
    that are no longer than the context; the full cache first."""
    longest: dict[tuple[Any, ...], TableRow] = {}
    for row in where(read_table(BOARD), "over", OVER):
        is_apart = row.get("apart") and not reads_own_budget(row)
        if row["family"] == "oracle" or is_apart:  # it cannot have this budget
            continue
        identity = (row["label"], None if reads_own_budget(row) else row["asked_budget"])
        before = longest.get(identity)
        if before is None or before["seq_len"] < row["seq_len"] <= context:
            longest[identity] = row
    return sorted(longest.values(), key=lambda row: row["method"] != "full")


def lost_by(row: TableRow) -> float | None:
    """Share of the full cache's right answers that a row of the board loses; None: not measured."""
    if row["method"] == "full" and not row.get("codec"):
        return 0.0
    difference = row.get("answers_difference")
    return None if difference is None else -difference


def reads_own_budget(row: TableRow) -> bool:
    """True for the full cache and for codecs, which have no budget to set."""
    return row["family"] in ("reads all", "codes")


def _options(config: RunConfig, row: TableRow, most_questions: int) -> Iterator[Option]:
    """A row of the board in each place that its method has. Raises UserError for what cannot be
    known."""
    from harness.paper.costmodel.capacity import modelled_step

    if _key(row) not in KNOWN["launches"]:
        raise UserError("its launches were not counted")
    words = ["experiment=capacity", "platform=h100-pcie5", f"method={row['method']}", "gpu_cache=0"]
    if not reads_own_budget(row):
        words.append(f"budget={row['asked_budget']}")
    if _has_added_codec(row):
        words += [f"codec={row['codec']}", f"group_size={group_size()}"]
    dense = (row.get("dense_numbers") or "0").split(" or ")[-1]
    words.append(f"method.dense_layers={dense}")
    made = load(words)
    made = replace(made, model=config.model, platform=config.platform, latency=config.latency)
    given = config.capacity.hit_frac
    hit_frac = HIT_FRAC if given is None else given
    for place, settings in PLACES.items():
        has_cache = settings["gpu_cache"] > 0
        if row["family"] == "evicts" and place != "device":
            continue  # what it keeps is small
        if has_cache and not made.method.names_rows:
            continue
        own_hit_frac = hit_frac if has_cache else None
        capacity = replace(config.capacity, hit_frac=own_hit_frac, max_batch=sys.maxsize)
        here = replace(made, **settings, capacity=capacity)
        step = modelled_step(here, weight_bits=config.advise.weight_bits)
        yield Option(row, place, config, step, most_questions)


@cache
def group_size() -> int:
    """`group_size` of the board's runs with a codec that is not the method's own."""
    runs = read_yaml(CONF_DIR / "experiment" / "board.yaml")["sweep"]["runs"]
    (found,) = {run["group_size"] for run in runs if "codec" in run}
    return int(found)


def _has_added_codec(row: TableRow) -> bool:
    return bool(row.get("codec")) and "codec" not in method_file(row["method"])


def _key(row: TableRow) -> str:
    method: str = row["method"]
    return f"{method}+{row['codec']}" if _has_added_codec(row) else method


# The answer


def recommendation(options: Sequence[Option]) -> list[str]:
    """One sentence, and what would change it."""
    meeting = [option for option in options if not option.why_not]
    if not meeting:
        lines = ["Recommendation: none. No method that was measured meets all that is asked."]
        by_graphs = [option for option in options if not option.why_not_at(option.graph_tpot_s)]
        if by_graphs:
            other = min(by_graphs, key=lambda option: option.graph_tpot_s)
            speed = f"{1 / other.graph_tpot_s:.1f} tokens/s each"
            lines.append(f"By an engine with CUDA graphs: {_named(other)}, {speed}.")
        nearest = max(options, key=_nearness)
        return [*lines, f"The nearest is {_named(nearest)}: {nearest.why_not}."]
    best = meeting[0]
    speed = f"{_each(best)} tokens/s for each of {best.served} and {_speed(best)} in all (modelled)"
    first = (
        f"Recommendation: {_named(best)}, of which {best.users} users fit, with {speed}, "
        f"and {_points(best)} of the answers lost (measured on the board's models)."
    )
    changes = [f"- {line}" for line in _changes(best, options, meeting)]
    return [first, "What would change it:", *changes]


def _nearness(option: Option) -> tuple[Any, ...]:
    """Larger for what serves more of the users, then for what loses no more answers than allowed
    (as far as it was asked), then for the faster."""
    is_allowed = option.was_asked_all and option.lost <= option.asked.advise.answers_lost
    return option.served, is_allowed, -option.tpot_s


def _changes(best: Option, options: Sequence[Option], meeting: Sequence[Option]) -> Iterator[str]:
    asked = best.asked.advise.answers_lost
    on_device = [
        option
        for option in options
        if option.place == "device" and option.lost <= asked and option.users
    ]
    most = max(on_device, key=lambda option: option.users, default=best)
    full = [option for option in on_device if _is_full(option) and option is not most]
    for other in (*full, most):
        if other.users < best.served:
            yield f"Fewer users: {_named(other)} holds {other.users}, {_each(other)} tokens/s each."
    stricter = [option for option in meeting if option.lost <= best.lost / 2]
    if best.lost > 0 and stricter:
        other = stricter[0]
        yield f"A limit of {_points(other)}: {_named(other)}, {_speed(other)} tokens/s in all."
    looser = [
        option
        for option in options
        if option.served >= best.served
        and option.lost > best.asked.advise.answers_lost
        and option.tpot_s < best.tpot_s
    ]
    if looser:
        other = min(looser, key=lambda option: option.lost)
        yield f"A limit of {_points(other)}: {_named(other)}, {_speed(other)} tokens/s in all."
    graphs = min(meeting, key=lambda option: option.graph_tpot_s)
    if graphs.graph_tpot_s < best.tpot_s:
        speed = _speed(graphs, graphs.graph_tpot_s)
        yield f"An engine with CUDA graphs: {_named(graphs)}, {speed} tokens/s in all."
    if best.place == "host, GPU cache":
        low, high = (best.at_hit_rate(hit_frac) for hit_frac in HIT_RANGE)
        graph_low, graph_high = (best.at_hit_rate(hit, by_host=False) for hit in HIT_RANGE)
        shares = " to ".join(f"{100 * hit_frac:.0f} %" for hit_frac in HIT_RANGE)
        speeds = f"{low:.0f} to {high:.0f} tokens/s in all"
        graphs_too = f"{graph_low:.0f} to {graph_high:.0f} with CUDA graphs"
        yield f"The GPU cache: with {shares} of the rows found there {speeds}, {graphs_too}."
        other = max(meeting, key=_at_low_end)
        if _at_low_end(other) > low:
            yield f"At the low end {_named(other)} is faster, with {_at_low_end(other):.0f}."


def _at_low_end(option: Option) -> float:
    """Tokens/s of all users, where GPU caches have the least of `HIT_RANGE`."""
    if option.place == "host, GPU cache":
        return option.at_hit_rate(HIT_RANGE[0])
    return option.total(option.tpot_s)


def _points(option: Option) -> str:
    return f"{round(100 * option.lost, 1) + 0.0:.1f} points"  # not -0.0


def _is_full(option: Option) -> bool:
    return option.key == "full"


def _named(option: Option) -> str:
    if _is_full(option):
        return f"{option.label} ({option.place})"
    share = BUDGET.show(option.step.budget)
    where = option.place
    if option.has_added_codec:
        where += f"; group_size={group_size()}"
    return f"{option.label} at {share} % ({where})"


Column = Callable[[Option], str]


def _speed(option: Option, tpot_s: float | None = None) -> str:
    """Tokens/s of all users."""
    return f"{option.total(tpot_s or option.tpot_s):.0f}" if option.served else MISSING


def _each(option: Option) -> str:
    """Tokens/s of a user."""
    return f"{1 / option.tpot_s:.1f}" if option.served else MISSING


def _gib(option: Option, memory: str) -> str:
    needs = option.step.capacity.needs(max(1, option.served))
    return f"{getattr(needs, memory) / GIB:.1f}"


COLUMNS: dict[str, Column] = {
    LABEL.heading: lambda option: option.label,
    "rows lie": lambda option: option.place,
    "budget (%)": lambda option: BUDGET.show(option.step.budget),
    "users that fit": lambda option: str(option.users),
    "tokens/s of a user": _each,
    "tokens/s of all": _speed,
    "of all, CUDA graphs": lambda option: _speed(option, option.graph_tpot_s),
    "device (GiB)": lambda option: _gib(option, "device"),
    "host (GiB)": lambda option: _gib(option, "host"),
    RATIO.heading: lambda option: RATIO.show(option.board.get("ratio")),
    "answers lost (points)": lambda option: _points(option).removesuffix(" points"),
    "questions": lambda option: str(option.num_questions),
}


def sheets(options: Sequence[Option]) -> list[Sheet]:
    """What meets the question; and of each method of which nothing does, what is nearest to it."""
    meeting = [option for option in options if not option.why_not]
    others: dict[str, Option] = {}
    for option in options:
        nearest = others.get(option.label)
        if nearest is None or (option.served, -option.lost) > (nearest.served, -nearest.lost):
            others[option.label] = option
    missing = [each for each in others.values() if each.label not in {one.label for one in meeting}]
    because: dict[str, Column] = {"why not": lambda option: option.why_not}
    found = []
    if meeting:
        found.append(sheet_of("Meets all that is asked", meeting, COLUMNS))
    if missing:
        found.append(sheet_of("Does not", missing, COLUMNS | because))
    return found


def sources(config: RunConfig, options: Sequence[Option], left: Mapping[str, str]) -> list[str]:
    """Where each number comes from, and what was not measured."""
    from harness.paper.costmodel.capacity import LAUNCH_S

    given = config.capacity.hit_frac
    least, most = options[0].ttft_s
    fields = {
        "platform": config.platform.name,
        "sheet": (config.platform.sheet or {})["source"],
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
    for why, labels in grouped(left, left.__getitem__).items():
        lines.append(f"Left out, as {why}: {', '.join(labels)}.")
    engines = "; ".join(_engines(options))
    return [*lines, f"Serving engines: {engines}; of the others none is known here."]


def _engines(options: Iterable[Option]) -> Iterator[str]:
    known = KNOWN["engines"]
    labels = {option.board["method"]: option.label for option in options}
    for method, label in labels.items():
        if method in known:
            yield f"{label}: {known[method]}"

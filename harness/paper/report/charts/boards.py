"""Charts of the leaderboard: quality against bytes over the link, and closeness against what a step costs."""

from collections.abc import Iterator

from harness.paper.report.charts.chart import ERRORS, LEAST, Axis, Chart, Level, Point, details, grouped, setup
from harness.tables.columns import (
    ASKED_SIZE,
    BATCH_SIZE,
    BOARD_TASKS,
    DEVICE_FRAC,
    FAMILY,
    FRONT,
    KL,
    LABEL,
    LINK_BYTES,
    NLL,
    PLATFORM,
    PROMPT_LEN,
    RESIDENT_FRAC,
    SETTINGS,
    SIZE,
    STEP,
    STEP_SOURCE,
    TOP1,
    Column,
    TableRow,
)  # fmt: skip
from harness.tables.frontier import COSTS
from harness.tables.leaderboard import FRONTIER

LINK = "link (% of the full cache's bytes)"
SAID = (LINK_BYTES, DEVICE_FRAC, RESIDENT_FRAC, STEP, STEP_SOURCE, FAMILY, ASKED_SIZE, SETTINGS)
FRONT_LINE = "front"
HOLLOW = "Hollow: modelled from a step timed at another size. Of KL less than 0.000001 nats a line shows the cost."


def leaderboard(rows: list[TableRow]) -> Iterator[Chart]:
    """Every quality by bytes over the link; a point per method and size, its look by how the method reads less."""
    for shown in (KL, TOP1, NLL, *BOARD_TASKS):
        size = f"{shown.name}_size" if shown in BOARD_TASKS else SIZE.name
        known = [row for row in rows if None not in (row.get(shown.name), row.get(size))]
        for panel in grouped(known, "model", "source"):
            log = shown is KL
            points = [_point(row, size, shown) for row in panel if not log or row[KL.name] > LEAST]
            note = f"{ERRORS} A task's are those of the difference to the full cache."
            y = Axis(shown.heading, log=log)
            yield Chart(shown.heading, setup(panel[0]), Axis(LINK, zero=True), y, points, note=note)


def frontier(rows: list[TableRow]) -> Iterator[Chart]:
    """KL by each cost, and the front through the points that none beats, with their names; of a table of fronts beside
    the whole leaderboard the latter is drawn."""
    whole = [row for row in rows if row["experiment"] != FRONTIER] or rows
    for words, cost in COSTS.items():
        known = [row for row in whole if None not in (row.get(KL.name), row.get(cost))]
        of_step = cost == STEP.name
        for panel in grouped(known, "model", "source"):
            near = [row for row in panel if row[KL.name] <= LEAST] if of_step else []
            levels = [Level("x", STEP.factor * row[cost], row["label"]) for row in near]
            points = [_priced(row, words, cost) for row in panel if row[KL.name] > LEAST]
            timed = [row for row in panel if row.get(STEP_SOURCE.name) == "emulated"] if of_step else []
            title = setup((timed or panel)[0], *((PLATFORM, BATCH_SIZE, PROMPT_LEN) if of_step else ()))
            x = Axis(_step_title(panel) if of_step else LINK, zero=True)
            y = Axis(KL.heading, log=True)
            yield Chart(f"{KL.words} by {words}", title, x, y, points, levels, HOLLOW if of_step else ERRORS)


def _step_title(panel: list[TableRow]) -> str:
    sources = sorted({row[STEP_SOURCE.name] for row in panel if row.get(STEP_SOURCE.name)} - {"modelled"})
    return ", ".join([STEP.heading, " and ".join(sources) or "modelled"])


def _point(row: TableRow, size: str, shown: Column) -> Point:
    stderr = row.get(f"{shown.name}_stderr")
    said = {LABEL.heading: row["label"], shown.heading: shown.show(row[shown.name], stderr)}
    said |= {LINK: SIZE.show(row[size])} | details(row, *SAID)
    error = None if stderr is None else shown.factor * stderr
    return Point(row[FAMILY.name], SIZE.factor * row[size], shown.factor * row[shown.name], said, error)


def _priced(row: TableRow, words: str, cost: str) -> Point:
    of_step = cost == STEP.name
    point = _point(row, SIZE.name, KL)
    if of_step:
        point = point._replace(x=STEP.factor * row[cost])
    hollow = of_step and row.get(STEP_SOURCE.name) == "modelled"
    if words not in (row.get(FRONT.name) or "").split(", "):
        return point._replace(hollow=hollow)
    size = "" if row["asked_size"] is None else f" {row[SIZE.name]:.0%}"
    return point._replace(hollow=hollow, line=FRONT_LINE, name=row["label"] + size)

"""The shapes of tables: the columns of each, what identifies a row, and their CSV files.

`harness/results/metrics.py` has their headings. The numbers that the paper gives are a table as
well. Imports neither torch nor pandas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UserError, reason
from harness.results.metrics import COLUMNS, LARGEST, OF_SOME_RUNS, SEGMENTS, SERVING, Metric

if TYPE_CHECKING:
    import pandas as pd

PUBLISHED_CSV = Path(__file__).parent / "published.csv"
WORDS = {
    "experiment", "platform", "source", "model", "method", "codec", "label", "settings", "task",
    "metric", "series", "x_name", "wall", "shipped", "run_id", "family", "text", "over",
    "answers_note", "dense_numbers", "step_source", "step_on", "apart", "other", "closer",
}  # fmt: skip
"""Columns of words. All other columns are of numbers."""


def _tables(shapes: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {shape: tuple(names.split()) for shape, names in shapes.items()}


def _names(columns: Sequence[Metric]) -> str:
    return " ".join(column.name for column in columns)


_RUN = "experiment model method codec label settings asked_budget dense_layers"
TABLES = _tables({
    # `difference` to `lost` are to the full cache on the same questions or windows. `first`,
    # `stop`, `depth`: of a range of a text's tokens, or of needles from some depth of the prompt
    # on; empty for a whole text or task. `repeats_stderr`: of a mean over several answers to each
    # question, over repeats of the same questions. `num_contexts`: windows, prompts, or contexts of
    # questions, whose errors are independent: one more than the degrees of freedom. `shipped`:
    # `yes` for a row that came with the project (`results/write.py`).
    "accuracy": "experiment model method label settings task first stop depth metric value stderr "
    "difference difference_stderr p gained lost num_samples num_contexts num_fewshot "
    "seq_len budget unmet_budget budget_artifact device_frac resident_frac "
    f"{_names(OF_SOME_RUNS)} repeats_stderr source shipped run_id",
    # With batch_size=largest on a device of `memory_bytes`: `largest_batch` sequences of `context`
    # tokens fit; `wall` is the bound that one more breaks. `equal_batch` is the largest of the full
    # cache on the device; its rate stands in the row of the largest batch. Bytes are of the row's
    # batch; of one sequence where none fits (`batch_size` 0).
    "latency": "experiment platform source model method label settings batch_size prompt_len "
    f"gen_len context memory_bytes {_names(LARGEST)} {_names(SERVING)} budget unmet_budget "
    f"device_frac tokens_evicted shipped run_id {_names(SEGMENTS)}",
    # `value` of `series` at `x`, in the unit of `metric`.
    "analysis": "experiment model series layer x_name x metric value stderr num_samples source "
    "shipped run_id",
    # A window of a text under a method. `family`: in a word, how the method reads less than the
    # full cache. `place`: the share of the text before the window; equal places are about the same
    # words on every model. The shares on the device are of all windows of its run.
    "board_texts": f"{_RUN} family seq_len text window place kl_nats budget device_frac "
    "resident_frac source shipped run_id",
    # The questions on one context of a task under a method. `prompt_len`: of the longest.
    "board_answers": f"{_RUN} task context_id right asked prompt_len budget device_frac "
    "resident_frac source shipped run_id",
    # The seconds of a decode step of a method, the mean of a timed run. `label`: that of the same
    # method's run on a text.
    "board_steps": f"{_RUN} platform batch_size prompt_len gen_len step_s budget source shipped "
    "run_id",
    # A method at a budget and a length, over `model`, the names of the models that have it.
    # `over`: the board it is compared on, over all models or of one of them. `kl_nats` is the
    # geometric mean over its windows, `ratio` that of its KL to the oracle's. `rank_low` and
    # `rank_high` are the places that it may have. `_low` and `_high` of `ratio` and
    # `answers_difference` are 95 % intervals, of budgets and shares the least and the largest of
    # the models. `step_s` is of the one model in `step_on`, `step_source` how it was timed. `apart`
    # says why a method has no rank.
    "board": "over model method codec family label asked_budget seq_len rank rank_low rank_high "
    "num_compared kl_nats ratio ratio_low ratio_high degrees num_models num_windows num_places "
    "answers answers_difference answers_difference_low answers_difference_high num_questions "
    "num_contexts answers_note budget_low budget_high device_frac_low device_frac_high "
    "resident_frac_low resident_frac_high dense_numbers step_s step_source step_on apart "
    "source shipped",
    # Two methods: `ratio` is that of the KL of `label` to that of `other`. `closer` is the label of
    # the one that is certainly closer to the full cache; empty where they are not told apart.
    "board_pairs": "model asked_budget seq_len label other ratio ratio_low ratio_high degrees p "
    "p_holm closer source",
})  # fmt: skip
"""The columns of each shape of table. The field `table` of a record names its own."""
_OF_BOARD = "model method codec label asked_budget dense_layers"
IDENTITY = _tables({
    "accuracy": "model method label settings task",
    "latency": "model platform source method label settings memory_bytes fixed_batch prompt_len "
    "gen_len",
    "analysis": "model source metric series x_name num_samples",
    "board_texts": f"{_OF_BOARD} seq_len text",
    "board_answers": f"{_OF_BOARD} task",
    "board_steps": f"{_OF_BOARD} platform batch_size prompt_len",
})  # fmt: skip
"""Columns that identify what was measured, by shape of table. `fixed_batch`: the batch size of a
run that did not look for the largest."""
NO_TABLE = "not a table of results"


def whole_tasks(rows: pd.DataFrame) -> pd.DataFrame:
    """The accuracy rows that are of no range of tokens and no depth."""
    return rows[rows["first"].isna() & rows["depth"].isna()]


def column(name: str) -> Metric:
    """The column of this name; one that no page shows has only a name."""
    return COLUMNS.get(name) or Metric(name)


def shape_of(header: Collection[str]) -> str:
    """The shape of a table with these columns: the one that has the most of them."""
    return max(TABLES, key=lambda shape: len({*TABLES[shape]}.intersection(header)))


def read_frame(path: Path) -> pd.DataFrame:
    """A table's CSV as a frame: "" where words are missing, NaN where a number is.

    An older table may lack columns of its shape, which are empty then. Raises UserError for a file
    that is no table of results: it cannot be parsed, lacks what identifies a row, or has words
    among numbers.
    """
    import pandas as pd  # here, as a command's help needs no pandas

    try:
        frame = pd.read_csv(
            path,
            encoding="utf-8-sig",
            dtype=dict.fromkeys(WORDS, str),
            keep_default_na=False,
            na_values=[""],
        )
        shape = shape_of(frame.columns)
        missing = {*IDENTITY.get(shape, ("model",))} & WORDS - {*frame}
        if missing:
            raise ValueError(f"lacks {', '.join(sorted(missing))}")
        frame = with_columns(frame, shape)
    except (OSError, ValueError) as error:
        anew = "delete it, and repeat a run of its experiment, which writes it anew"
        raise UserError(f"{path}: {NO_TABLE} ({reason(error)}); {anew}") from error
    return frame


def with_columns(frame: pd.DataFrame, shape: str) -> pd.DataFrame:
    """The frame with the columns of a shape first: "" where words are missing, NaN where a number
    is. Raises ValueError for words among numbers."""
    table = frame.reindex(columns=list(dict.fromkeys([*TABLES[shape], *frame])))
    numbers = {*TABLES[shape]} - WORDS
    words = [name for name in table if name in WORDS]
    table = table.astype(dict.fromkeys(words, object) | dict.fromkeys(numbers, float))
    return table.fillna(dict.fromkeys(words, ""))


def csv_of(frame: pd.DataFrame, shape: str) -> str:
    """A frame of a shape as CSV: all columns of the shape, and no other. Numbers of a column that
    are all whole have no point."""
    table = with_columns(frame, shape)[list(TABLES[shape])]
    for name in table:
        if name not in WORDS and table[name].dropna().mod(1).eq(0).all():
            table[name] = table[name].astype("Int64")
    return table.to_csv(index=False, lineterminator="\n")


def published() -> pd.DataFrame:
    """Numbers that papers and other projects give, all as words."""
    import pandas as pd  # here, as a command's help needs no pandas

    return pd.read_csv(PUBLISHED_CSV, dtype=str, keep_default_na=False)

"""RULER's six tasks that need no data (Hsieh et al., COLM 2024), as lm-eval has them.

docs/tasks.md says what they ask, how they are scored, and where lm-eval differs from RULER.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.data.ruler_rows import NEEDLES, Row, num_tokens, rows_of
from harness.errors import UserError
from harness.settings.run import RunConfig
from harness.settings.tasks import RULER_TASKS

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

    from harness.model.load import LoadedModel

MARKERS = {task: "\nWhat" if task in NEEDLES else "\nQuestion:" for task in RULER_TASKS}
"""Text with which the question of a prompt starts, at its last occurrence."""


def load(task: str, config: RunConfig, loaded: LoadedModel) -> ConfigurableTask:
    """lm-eval's task, as many rows for each of `metadata.max_seq_lengths`, in that order.

    A metric is named by its length in tokens, as lm-eval's are; a row has that of its own length alone.

    Raises:
        UserError: a length that is too short for the task or too long for the model; examples were asked for.
    """
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    if config.num_fewshot:
        raise UserError(f"num_fewshot={config.num_fewshot}: task {task} takes no examples; allowed: 0")
    count = config.num_samples_of(task)
    assert count is not None, "lm-eval makes as many as it is asked for"
    lengths = config.task.lengths
    settings = _settings(task)
    rows = [row for length in lengths for row in _rows_that_fit(task, length, count // len(lengths), config, loaded)]
    settings |= {
        "task": task,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "process_results": _score,
        "metric_list": [{"metric": str(each), "aggregation": "mean", "higher_is_better": True} for each in lengths],
        "num_fewshot": 0,
    }
    return ConfigurableTask(config=settings)


def facts(task: str, row: Row) -> dict[str, float | int | None]:
    """What a figure needs to know of a row of one of the six: `length` in tokens; `depth`, where in the prompt the
    needle's value begins, 0 to 1, None in a task that hides none. Of any other task nothing."""
    if task not in RULER_TASKS:
        return {}
    depth = row["input"].index(row["outputs"][0]) / len(row["input"]) if task in NEEDLES else None
    return {"length": row["max_length"], "depth": depth}


def _rows_that_fit(task: str, length: int, count: int, config: RunConfig, loaded: LoadedModel) -> list[Row]:
    """The rows of one length; UserError where one exceeds the model's limit and is not to be truncated.

    lm-eval counts the tokens to generate into a length. Yet its needles do without the beginning of the answer, and
    ruler_fwe without what is generated, so that rows can be longer.
    """
    refuse = config.task.too_long == "refuse"
    if refuse:
        _check_limit(task, length, length, loaded)
    rows = rows_of(task, length, count, config.seed, loaded.tokenizer)
    if refuse:
        longest = max(num_tokens(f"{row['input']} {row['gen_prefix']}", loaded.tokenizer) for row in rows)
        _check_limit(task, length, longest + _settings(task)["generation_kwargs"]["max_gen_toks"], loaded)
    return rows


def _check_limit(task: str, length: int, tokens: int, loaded: LoadedModel) -> None:
    if tokens > loaded.max_length:
        raise UserError(
            f"metadata.max_seq_lengths: {length} is too long: {task} takes {tokens} tokens, generated ones included; "
            f"model {loaded.name} takes {loaded.max_length}"
        )


def _score(row: Row, answers: Sequence[str]) -> dict[str, float]:
    """The share of the right answers that the text holds, as lm-eval and RULER have it, under the row's length."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    return {str(row["max_length"]): string_match_all(postprocess_pred(list(answers)), [row["outputs"]])}


def _settings(task: str) -> dict[str, Any]:
    """lm-eval's YAML, its functions as words: they would be imported with all that they need."""
    from lm_eval import tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    folder = Path(tasks.__file__).parent / "ruler"
    return load_yaml(folder / f"{task.removeprefix('ruler_')}.yaml", resolve_func=False)

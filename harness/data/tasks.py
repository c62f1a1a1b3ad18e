"""lm-eval task objects from the generator, from local JSON lines, or from the hub.

A file in `task_yaml/` is an lm-eval task that takes prompts, choices and metrics from lm-eval's own YAML
(`include`, below lm_eval/tasks) and says where local rows lie. `data=hub` uses lm-eval's YAML alone. Tasks
are built without lm-eval's TaskManager, which would index thousands of files.
"""

import json
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset
from lm_eval import tasks as lm_eval_tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from harness.data.generated import CONTEXTS, questions
from harness.data.hub import from_hub, no_network
from harness.errors import UserError
from harness.settings.run import RunConfig

TASK_YAML = Path(__file__).parent / "task_yaml"
LM_EVAL_TASKS = Path(lm_eval_tasks.__file__).parent
FEWSHOT_SEED = 1234
"""lm-eval's default: with seed=0 the examples are those that lm-eval draws."""


def load_task(name: str, config: RunConfig) -> ConfigurableTask:
    """The task `name`, its rows and few-shot settings as `config` says.

    Raises:
        UserError: a file is missing, empty or malformed (file and line number), there are too few examples, or the
            hub cannot be reached.
    """
    if name in CONTEXTS:
        task = _generated(name, config)
    elif config.data.name == "local":
        task = _local(name, config)
    else:
        task = _hub(name, config)
    task.set_fewshot_seed(FEWSHOT_SEED + config.seed)
    return task


def check_rows(path: Path, fields: list[str]) -> int:
    """Read a file of JSON lines through and return its number of rows.

    Raises:
        UserError: the file is missing, empty, or a line (named by number) is no JSON object with all of `fields`.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not lines[-1]:
        lines.pop()  # the end of the last line
    if not lines:
        raise UserError(f"{path}: the file is empty")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            reason = "empty line" if not line.strip() else f"not JSON, {error}"
            raise UserError(f"{path}, line {number}: {reason}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: expected an object with {', '.join(fields)}")
        for field in fields:
            if row.get(field) is None:
                raise UserError(f"{path}, line {number}: field {field!r} is missing")
    return len(lines)


def _generated(name: str, config: RunConfig) -> ConfigurableTask:
    if config.num_fewshot:
        raise UserError(f"num_fewshot={config.num_fewshot}: task {name} takes no examples; allowed: 0")
    count = config.num_samples_of(name)
    assert count is not None, "generated tasks have no end of their own"
    rows = [question._asdict() for question in questions(name, count, config.seed)]
    settings = {
        "task": name,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "prompt",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",  # choices bring their space
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    return ConfigurableTask(config=settings)


def _local(name: str, config: RunConfig) -> ConfigurableTask:
    own = _declaration(name, config)
    root = Path(str(config.data.root)).expanduser().resolve()
    files = {split: root / file for split, file in own["dataset_kwargs"]["data_files"].items()}
    counts = {split: check_rows(path, own["metadata"]["fields"]) for split, path in files.items()}
    examples = counts.get("train", 0)
    if own["num_fewshot"] and own["num_fewshot"] >= examples:
        raise UserError(
            f"num_fewshot={own['num_fewshot']}: {name} has {examples} training rows in data=local; allowed: fewer"
        )
    own["dataset_kwargs"]["data_files"] = {split: str(path) for split, path in files.items()}
    with no_network():
        return ConfigurableTask(config=load_yaml(LM_EVAL_TASKS / own.pop("include")) | own)


def _hub(name: str, config: RunConfig) -> ConfigurableTask:
    own = _declaration(name, config)
    settings = load_yaml(LM_EVAL_TASKS / own["include"]) | {"task": name, "num_fewshot": own["num_fewshot"]}
    return from_hub(settings["dataset_path"], lambda: ConfigurableTask(config=dict(settings)))


def _declaration(name: str, config: RunConfig) -> dict[str, Any]:
    """The task's YAML with `num_fewshot` as the user wants it."""
    own = yaml.safe_load((TASK_YAML / f"{name}.yaml").read_text())
    return own if config.num_fewshot is None else own | {"num_fewshot": config.num_fewshot}

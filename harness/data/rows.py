"""The files of a task's data set below `data.root`, named as on the hub.

A split is one file, `SPLIT.jsonl`, `SPLIT.json` or `SPLIT.parquet` (JSON lines or parquet), or several,
`SPLIT-*.parquet`, in the first of these folders, or in its `data`, that has the split which is scored:

    ROOT/<dataset_path>/<dataset_name>    such as cais/mmlu/abstract_algebra
    ROOT/<last part of dataset_path>/<dataset_name>    mmlu/abstract_algebra
    ROOT/<dataset_name>    abstract_algebra
    ROOT/<task>    mmlu_abstract_algebra

Where a data set has one part only (no name, `main` or `default`) the folder may lack it: `gsm8k/test.jsonl`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import UserError

ONLY_PART = (None, "", "main", "default")
"""Names of a data set's part that the hub uses where there is one."""
SUFFIXES = (".jsonl", ".json", ".parquet")
ROLES = ("test_split", "validation_split", "training_split", "fewshot_split")

Files = dict[str, list[Path]]
"""The files of each split."""


def scored_split(config: Mapping[str, Any]) -> str | None:
    """The split whose rows are asked, as lm-eval chooses it."""
    return config.get("test_split") or config.get("validation_split")


def example_split(config: Mapping[str, Any]) -> str | None:
    """The split from which lm-eval draws examples; None where none is left but the one that is scored."""
    if config.get("fewshot_split"):
        return config["fewshot_split"]
    others = (config.get(role) for role in ("training_split", "validation_split"))
    return next((split for split in others if split and split != scored_split(config)), None)


def find_files(root: str | Path, task: str, config: Mapping[str, Any]) -> Files:
    """The files of all splits that there are; that which is scored is among them.

    Raises:
        UserError: it is in none of the folders; says where it may lie.
    """
    root = Path(root).expanduser().resolve()
    scored = scored_split(config)
    folders = list(_folders(task, config))
    for folder in folders if scored else []:
        for place in (root / folder, root / folder / "data"):
            files = {config[role]: _of_split(place, config[role]) for role in ROLES if config.get(role)}
            if files[str(scored)]:
                return {split: found for split, found in files.items() if found}
    raise UserError(f"data.root={root}: tasks={task} needs {layout(task, config)}; there are none")


def layout(task: str, config: Mapping[str, Any]) -> str:
    """Where the files of a task may lie, in words."""
    scored = scored_split(config)
    *others, last = dict.fromkeys(f"{folder}/" for folder in _folders(task, config))
    where = f"{last} (or {', '.join(others)})" if others else last
    return f"{scored}.jsonl, {scored}.parquet or {scored}-*.parquet in {where}"


def check_rows(path: Path, fields: Sequence[str]) -> int:
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
            raise UserError(f"{path}, line {number}: expected an object with {', '.join(fields) or 'fields'}")
        for field in fields:
            if row.get(field) is None:
                raise UserError(f"{path}, line {number}: field {field!r} is missing")
    return len(lines)


def template_fields(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that the templates of a task put into every prompt; none where Python makes or changes the rows."""
    if config.get("process_docs"):
        return ()
    texts = [config.get(name) for name in ("doc_to_text", "doc_to_target", "doc_to_choice")]
    found = {field for text in texts if isinstance(text, str) for field in _variables(text)}
    return tuple(sorted(found))


def _variables(template: str) -> set[str]:
    """What a template without conditions and defaults names."""
    if re.search(r"{%|\bif\b|\bdefault\b", template):
        return set()
    from jinja2 import Environment, TemplateSyntaxError, meta

    try:
        return meta.find_undeclared_variables(Environment().parse(template))
    except TemplateSyntaxError:
        return set()


def _folders(task: str, config: Mapping[str, Any]) -> Iterator[str]:
    path, part = str(config.get("dataset_path") or ""), config.get("dataset_name")
    for whole in filter(None, dict.fromkeys((path, path.rpartition("/")[2]))):
        if part:
            yield f"{whole}/{part}"
        if part in ONLY_PART:
            yield whole
    if part not in ONLY_PART:
        yield str(part)
    yield task


def _of_split(folder: Path, split: str) -> list[Path]:
    whole = [path for suffix in SUFFIXES if (path := folder / f"{split}{suffix}").is_file()]
    return whole[:1] or sorted(folder.glob(f"{split}-*.parquet"))

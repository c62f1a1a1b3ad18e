"""The files of a task's data set below `data.root`, named as on the hub.

A split is one file, `SPLIT.jsonl`, `SPLIT.json` or `SPLIT.parquet` (JSON lines or parquet), or several,
`SPLIT-*.parquet`, in the first of these folders, or in its `data`, that has the split which is scored:

    ROOT/<dataset_path>/<dataset_name>    such as cais/mmlu/abstract_algebra
    ROOT/<last part of dataset_path>/<dataset_name>    mmlu/abstract_algebra
    ROOT/<dataset_name>    abstract_algebra
    ROOT/<task>    mmlu_abstract_algebra

Where a data set has one part only (no name, `main` or `default`) the folder may lack it: `gsm8k/test.jsonl`.
"""

import codecs
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

MAX_FIELDS = 1000
"""Fields of a row, or of an object in it: with 100,000 a table takes minutes."""
KINDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
"""Types of JSON values but null, in words."""

Files = dict[str, list[Path]]
"""The files of each split."""
Labels = Mapping[str, Sequence[Any]]
"""Allowed values by field."""


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
    root = Path(root).resolve()
    scored = scored_split(config)
    folders = list(_folders(task, config))
    for folder in folders if scored else []:
        for place in (root / folder, root / folder / "data"):
            files = {config[role]: _of_split(place, config[role]) for role in ROLES if config.get(role)}
            if files[str(scored)]:
                return {split: found for split, found in files.items() if found}
    raise UserError(f"data.root={root}: tasks={task} needs {layout(task, config)}; there are none")


def hub_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which a task loads its data set from the hub; code in a data set is never run."""
    return {key: value for key, value in (config.get("dataset_kwargs") or {}).items() if key != "trust_remote_code"}


def layout(task: str, config: Mapping[str, Any]) -> str:
    """Where the files of a task may lie, in words."""
    scored = scored_split(config)
    *others, last = dict.fromkeys(f"{folder}/" for folder in _folders(task, config))
    where = f"{last} (or {', '.join(others)})" if others else last
    return f"{scored}.jsonl, {scored}.parquet or {scored}-*.parquet in {where}"


def read_rows(path: Path, fields: Sequence[str], labels: Labels | None = None) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines. labels: see `label_problem`.

    Raises:
        UserError: the file is missing, empty, or a line (named by number) is no JSON object with all of `fields`, has
            an object of more than `MAX_FIELDS`, or holds something else in a field than the lines before it.
    """
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not lines[-1]:
        lines.pop()  # the end of the last line
    if not lines:
        raise UserError(f"{path}: the file is empty")
    rows = []
    kinds: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = _row(line, fields)
            if problem := label_problem(row, labels or {}):
                raise ValueError(problem)
            for field, kind in ((field, KINDS[type(value)]) for field, value in row.items() if value is not None):
                first, at = kinds.setdefault(field, (kind, number))
                if kind != first:
                    raise ValueError(f"field {field!r} holds {kind}, but {first} in line {at}")
            if len(kinds) > MAX_FIELDS:
                raise ValueError(f"with it the rows have more than {MAX_FIELDS} fields")
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        rows.append(row)
    return rows


def label_problem(row: Mapping[str, Any], labels: Labels) -> str | None:
    """The wrong label of a row in words; None where there is none. Some tasks' Python would take any label."""
    for field, allowed in labels.items():
        value = row.get(field)
        if not any(type(value) is type(each) and value == each for each in allowed):
            return f"field {field!r} is {value!r}; allowed: {', '.join(map(repr, allowed))}"
    return None


def _row(line: bytes, fields: Sequence[str]) -> dict[str, Any]:
    """The object of a line; ValueError names its fault."""
    if not line.strip():
        raise ValueError("empty line")
    try:
        text = line.decode("utf-8")
        row = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON, {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with {', '.join(fields) or 'fields'}")
    for field in fields:
        if row.get(field) is None:
            raise ValueError(f"field {field!r} is missing")
    return row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are given once each."""
    row = dict(pairs)
    if len(pairs) > MAX_FIELDS:
        raise ValueError(f"an object has {len(pairs)} fields; allowed: up to {MAX_FIELDS}")
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"not JSON, it gives {twice!r} twice")
    return row


def _refuse_constant(word: str) -> None:
    raise ValueError(f"not JSON, which has no {word}")


def template_fields(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that the templates of a task put into every prompt; none where Python makes or changes the rows."""
    if config.get("process_docs"):
        return ()
    texts = [config.get(name) for name in ("doc_to_text", "doc_to_target", "doc_to_choice")]
    found = {field for text in texts if isinstance(text, str) for field in _variables(text)}
    return tuple(sorted(found))


def _variables(template: str) -> set[str]:
    """The variables of a template; none where it has conditions or defaults."""
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

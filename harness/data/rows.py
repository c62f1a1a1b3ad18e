"""Where the rows of a task come from: files below `data.root`, named as on the hub, data sets of
the hub, or files that a task's YAML names itself; "Where data come from" in docs/tasks.md.

Rows of the hub in its local cache are used without asking the hub: a repeated run is the same and
needs no network. If rows are missing and the hub is out of reach, the error is one line within
seconds.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from harness.errors import UserError, refused
from harness.model.source import refusal
from harness.settings.config import RunConfig

if TYPE_CHECKING:
    from datasets import Dataset

ONLY_PART = (None, "", "main", "default")
"""Names of a data set's part that the hub uses where there is one."""
SUFFIXES = (".jsonl", ".json", ".parquet")
LOADERS = ("arrow", "csv", "json", "parquet", "text")
"""What `dataset_path` says of a data set that is made of `data_files`."""
ROLES = ("test_split", "validation_split", "training_split", "fewshot_split")
TIMEOUT_S = 5.0
"""An unreachable hub is given up after this; `datasets` itself would retry for half a minute."""

Files = Mapping[str, Sequence[Path]]
"""The files of each split."""
TaskRows = Mapping[str, "Dataset"]
"""The rows of each split, as they were read."""
T = TypeVar("T")


def scored_split(config: Mapping[str, Any]) -> str | None:
    """The split whose rows are asked, as lm-eval chooses it."""
    return config.get("test_split") or config.get("validation_split")


def example_split(config: Mapping[str, Any]) -> str | None:
    """The split from which lm-eval draws examples; None where none is left but the one that is
    scored."""
    if config.get("fewshot_split"):
        return config["fewshot_split"]
    others = (config.get(role) for role in ("training_split", "validation_split"))
    return next((split for split in others if split and split != scored_split(config)), None)


class Source(NamedTuple):
    """Where a task's rows come from. name: of them all. files: by split, where they are local."""

    name: str
    rows: TaskRows = {}
    files: Files = {}

    def row(self, split: str | None, number: int) -> str:
        """Row `number` of a split, from 0, in words that count from 1, as lines do."""
        files = self.files.get(str(split), [])
        place = f"{files[0]}" if files else f"{self.name}, split {split}"
        return f"{place}, row {number + 1}"


def source_of(task: str, own: Mapping[str, Any], config: RunConfig) -> Source:
    """The rows of a task that does not make its own, and where they lie. own: the task's YAML,
    resolved.

    Raises UserError for a file that is missing or malformed, a hub that cannot be reached, and
    examples without rows of their own: lm-eval would show rows that it asks.
    """
    if names_files(own):
        files = own_files(own)
        source = Source(f"task {task}", _named_rows(own, files), files)
    elif config.data.name == "local":
        files = find_files(str(config.data.root), task, own)
        rows = {split: _read(split, paths, template_fields(own)) for split, paths in files.items()}
        source = Source(f"data.root={config.data.root}", rows, files)
    else:
        source = Source(f"data=hub: {own.get('dataset_path')}", hub_rows(task, own))
    in_yaml = (own.get("fewshot_config") or {}).get("samples")
    needs_rows = in_yaml is None or (own.get("fewshot_split") and not callable(in_yaml))
    split = example_split(own) or "train"
    most = len(source.rows.get(split, ()))
    if most and split == scored_split(own):
        most -= 1  # the question itself is no example
    if needs_rows and own["num_fewshot"] > most:
        raise UserError(
            f"num_fewshot={own['num_fewshot']}: {task} has no rows for so many examples in split "
            f"{split} of {source.name}; at most {most}"
        )
    return source


def names_files(config: Mapping[str, Any]) -> bool:
    """Whether a task's YAML names files or a folder of this machine."""
    path = str(config.get("dataset_path") or "")
    named = (config.get("dataset_kwargs") or {}).get("data_files")
    is_folder = path.startswith(("/", "./", "../"))
    return is_folder or (path in LOADERS and bool(named) and "://" not in str(named))


def own_files(config: Mapping[str, Any]) -> Files:
    """The files of this machine that a task's YAML names, by split, as `datasets` finds them. As in
    lm-eval, relative paths begin in the working folder. Raises UserError for a missing one."""
    by_split = _builder(config).config.data_files.items()
    return {str(split): [Path(path) for path in paths] for split, paths in by_split}


@contextmanager
def _reading(config: Mapping[str, Any]) -> Iterator[None]:
    what = f"tasks={config.get('task')}: the files that its YAML names cannot be read"
    with no_network(), refused(what):
        yield


def _builder(config: Mapping[str, Any]) -> Any:
    import datasets

    with _reading(config):
        return datasets.load_dataset_builder(*_named(config), **hub_options(config))


def _named_rows(config: Mapping[str, Any], files: Files) -> Any:
    """The rows of the files that a task's YAML names. Raises UserError for a damaged one."""
    import datasets

    builder = _builder(config)
    if builder.name == "json" and builder.config.field is None:
        fields = template_fields(config)
        return {split: read_json(paths, fields) for split, paths in files.items()}
    with _reading(config):
        return datasets.load_dataset(*_named(config), **hub_options(config))


def _read(split: str, paths: Sequence[Path], fields: Sequence[str]) -> Dataset:
    import datasets

    if paths[0].suffix != ".parquet":
        return read_json(paths, fields)
    files = {split: [str(path) for path in paths]}
    with no_network(), refused(f"{paths[0]}: cannot be read"):
        return datasets.load_dataset("parquet", data_files=files, split=split)


def read_json(paths: Sequence[Path], fields: Sequence[str] = ()) -> Dataset:
    """The rows of JSON lines, or of lists of objects. Text stays text, whatever it looks like:
    `datasets` itself would make times of days.

    fields: that no row may lack, since a prompt would say None. Raises UserError, with the file and
    the line or row, for no JSON, a row that lacks a field, and a column of several types.
    """
    import datasets

    rows: list[dict[str, Any]] = []
    for path in paths:
        for number, row in enumerate(_parsed(path), 1):
            lacking = [field for field in fields if row.get(field) is None]
            if lacking:
                raise UserError(f"{path}, row {number}: field {lacking[0]!r} is missing")
            rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    with refused(f"{paths[0]}: a field has values of several types"):
        return datasets.Dataset.from_dict(columns)


def _parsed(path: Path) -> list[dict[str, Any]]:
    with refused(f"{path}: cannot be read as a list of objects"):
        text = path.read_bytes().strip()
        if text.startswith(b"["):
            return [dict(row) for row in json.loads(text)]
    rows = []
    for number, line in enumerate(text.split(b"\n"), 1):
        with refused(f"{path}, line {number}: expected an object of JSON"):
            rows.append(dict(json.loads(line)))
    return rows


# Files


def find_files(root: str | Path, task: str, config: Mapping[str, Any]) -> Files:
    """The files of all splits that there are; that which is scored is among them. UserError, which
    says where it may lie, where it is in none of the folders."""
    root = Path(root).resolve()
    scored = scored_split(config)
    for folder in _folders(task, config) if scored else ():
        for place in (root / folder, root / folder / "data"):
            files: dict[str, list[Path]] = {}
            for split in filter(None, map(config.get, ROLES)):
                whole = [place / f"{split}{suffix}" for suffix in SUFFIXES]
                found = [path for path in whole if path.is_file()][:1]
                if found := found or sorted(place.glob(f"{split}-*.parquet")):
                    files[split] = found
            if scored in files:
                return files
    raise UserError(f"data.root={root}: tasks={task} needs {layout(task, config)}; there are none")


def layout(task: str, config: Mapping[str, Any]) -> str:
    """Where the files of a task may lie, in words."""
    scored = scored_split(config)
    *others, last = dict.fromkeys(f"{folder}/" for folder in _folders(task, config))
    where = f"{last} (or {', '.join(others)})" if others else last
    return f"{scored}.jsonl, {scored}.parquet or {scored}-*.parquet in {where}"


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


def template_fields(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that a task's templates put into every prompt, whatever is in them: none where
    Python makes or changes the rows, and none of a template that has conditions or defaults."""
    from jinja2 import Environment, meta

    if config.get("process_docs"):
        return ()
    found: set[str] = set()
    for template in map(config.get, ("doc_to_text", "doc_to_target", "doc_to_choice")):
        if isinstance(template, str) and not re.search(r"{%|\bif\b|\bdefault\b", template):
            found |= meta.find_undeclared_variables(Environment().parse(template))
    return tuple(sorted(found))


# The hub


def _named(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The name of a task's data set, and of its part."""
    return config.get("dataset_path"), config.get("dataset_name")


def hub_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which a task loads its data set; code in a data set is never run."""
    options = dict(config.get("dataset_kwargs") or {})
    options.pop("trust_remote_code", None)
    return options


def hub_rows(task: str, config: Mapping[str, Any]) -> Any:
    """The rows of a task's data set on the hub, from the cache if they are there; raises as
    `from_hub`."""
    import datasets

    def load() -> Any:
        return datasets.load_dataset(*_named(config), **hub_options(config))

    return from_hub(str(config.get("dataset_path")), load, f"{layout(task, config)} below it")


@contextmanager
def no_network() -> Iterator[None]:
    """Inside, `datasets` and the hub's client use the local cache alone, and do not warn that they
    do."""
    from datasets import config, logging
    from huggingface_hub import constants

    before, verbosity = (config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE), logging.get_verbosity()
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    logging.set_verbosity(logging.CRITICAL)  # the log of a bad file is in its error
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
        logging.set_verbosity(verbosity)


def from_hub(name: str, load: Callable[[], T], files: str | None = None) -> T:
    """Call `load`, which reads the hub's data set `name`, without the network; where that fails,
    with it.

    files: the files that `data=local` would need below its root, for the error. Raises UserError,
    which says what remains, where it is not cached and the hub is unreachable or refuses, or it
    cannot be read; ImportError where a package that reads it is not installed.
    """
    from huggingface_hub import constants, get_session

    # `datasets` has many errors for rows that are not cached, or not whole; online it says what is
    # wrong.
    with suppress(Exception), no_network():
        return load()
    why = "not cached, and "
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
        print(f"{name}: fetching from {constants.ENDPOINT}", file=sys.stderr)
        why = ""
        return load()
    except ImportError:
        raise
    except Exception as error:
        local = "data=local data.root=DIR" + (f" with {files}" if files else "")
        raise UserError(
            f"data=hub: {name} cannot be loaded ({why}{refusal(error)}); what remains: {local}, or "
            "data=offline (no download)"
        ) from error


def revision(config: Mapping[str, Any], fetch: Callable[[], object]) -> str:
    """The commit on the hub of the rows that `datasets` has in its cache for a task's settings;
    `fetch` puts rows there where there are none. "" where it leaves none there. Raises as
    `from_hub`."""
    import datasets

    def cached() -> str:
        with no_network(), suppress(Exception):  # of which `datasets` has many for missing rows
            return str(datasets.load_dataset_builder(*_named(config), **hub_options(config)).hash)
        return ""

    found = cached()
    if not found:
        fetch()
    return found or cached()

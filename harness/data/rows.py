"""Where the rows of a task come from: files below `data.root`, named as on the hub, or data sets of
the hub.

A task of one's own may name its files itself (`dataset_path: json`, `dataset_kwargs: {data_files:
...}`, or a folder as `dataset_path: ./DIR`). These are read whatever `data` is. Else a split is one
file, `SPLIT.jsonl`, `SPLIT.json` or `SPLIT.parquet` (JSON lines or parquet), or several,
`SPLIT-*.parquet`, in the first of these folders, or in its `data`, that has the split which is
scored:

    ROOT/<dataset_path>/<dataset_name>    such as cais/mmlu/abstract_algebra
    ROOT/<last part of dataset_path>/<dataset_name>    mmlu/abstract_algebra
    ROOT/<dataset_name>    abstract_algebra
    ROOT/<task>    mmlu_abstract_algebra

Where a data set has one part only (no name, `main` or `default`) the folder may lack it:
`gsm8k/test.jsonl`.

Rows of the hub in its local cache are used without asking the hub: a repeated run is the same and
needs no network. If rows are missing and the hub is out of reach, the error is one line within
seconds.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from harness.data.row_files import read_csv, read_json
from harness.errors import UserError, reason, refused
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

    def place(self, split: str | None) -> str:
        """Where a split lies, in words."""
        files = self.files.get(str(split), [])
        if not files:
            return f"{self.name}, split {split}"
        return str(
            files[0] if len(files) == 1 else files[0].with_name(f"{split}-*{files[0].suffix}")
        )

    def row(self, split: str | None, number: int, *, made: bool) -> str:
        """Row `number` of a split in words: its file and line, or row from 0. made: Python beside
        the YAML may leave out rows or reorder them."""
        place = self.place(split)
        if made:
            return f"{place}, row {number} of those that process_docs makes"
        is_lines = place.endswith((".json", ".jsonl")) and split in self.files
        return f"{place}, line {number + 1}" if is_lines else f"{place}, row {number}"


def source_of(task: str, own: Mapping[str, Any], config: RunConfig) -> Source:
    """The rows of a task that does not make its own, and where they lie. own: the task's YAML,
    resolved.

    Raises:
        UserError: a file that is missing, empty or malformed, a hub that cannot be reached, or too
        few examples.
    """
    if own_files(own) is not None:
        source = _named_source(task, own)
    elif config.data.name == "local":
        files = find_files(str(config.data.root), task, own)
        with no_network():
            rows = {
                split: _read(split, paths, template_fields(own)) for split, paths in files.items()
            }
        source = Source("data=local", rows, files)
    else:
        source = Source(f"data=hub: {own.get('dataset_path')}", hub_rows(task, own))
    _require_examples(task, own, source)
    return source


def _require_examples(task: str, own: Mapping[str, Any], source: Source) -> None:
    """Raise UserError where a split has fewer rows than lm-eval draws of it as examples."""
    shots, split = own["num_fewshot"], example_split(own)
    in_yaml = (own.get("fewshot_config") or {}).get("samples") is not None
    if not shots or (in_yaml and not own.get("fewshot_split")):
        return
    count = len(source.rows.get(str(split), ()))
    # lm-eval draws one more, lest the row that is asked be among them, where both are equal.
    needed = shots + (own.get("fewshot_split") == own.get("test_split"))
    if count < needed:
        raise UserError(
            f"num_fewshot={shots}: {task} has {count} rows of its split {split or 'train'} in "
            f"{source.name}, from which {needed} are drawn; allowed: fewer"
        )


def own_files(config: Mapping[str, Any]) -> Files | None:
    """The files of this machine that a task's YAML names itself, by split; None where it names
    none.

    As in lm-eval, relative paths begin in the working folder. Those of a folder have no split: "".
    """
    path = str(config.get("dataset_path") or "")
    if path.startswith(("/", "./", "../")):
        return {"": [file for file in sorted(Path(path).rglob("*")) if file.is_file()]}
    options = config.get("dataset_kwargs") or {}
    named = options.get("data_files")
    if path not in LOADERS or not named:
        return None
    files: dict[str, list[Path]] = {}
    for split, given in (named if isinstance(named, Mapping) else {"train": named}).items():
        patterns = [given] if isinstance(given, str) else list(given)
        if any("://" in pattern for pattern in patterns):
            return None
        whole = [str(Path(options.get("data_dir") or "") / pattern) for pattern in patterns]
        files[str(split)] = [
            Path(found) for pattern in whole for found in sorted(glob(pattern)) or [pattern]
        ]
    return files


def _named_source(task: str, config: Mapping[str, Any]) -> Source:
    """The rows of the files that a task's YAML names. Raises UserError for a missing or damaged
    one."""
    import datasets

    files = own_files(config) or {}
    missing = [path for paths in files.values() for path in paths if not path.is_file()]
    if missing or not any(files.values()):
        where = missing[0] if missing else config.get("dataset_path")
        raise UserError(
            f"tasks={task}: its YAML names {where}, but there is no such file in {Path.cwd()}"
        )
    logging.getLogger("datasets").setLevel(
        logging.CRITICAL
    )  # its log of a bad file is in the error
    given = (config["dataset_path"], config.get("dataset_name"))
    with no_network(), refused(f"tasks={task}: the files that its YAML names cannot be read"):
        builder = datasets.load_dataset_builder(*given, **hub_options(config))
        of_splits = {
            str(split): [Path(path) for path in paths]
            for split, paths in builder.config.data_files.items()
        }
        if builder.name == "json":
            about = (template_fields(config), builder.config.field)
            rows = {split: read_json(paths, *about) for split, paths in of_splits.items()}
        elif builder.name == "csv":
            options = builder.config.pd_read_csv_kwargs
            rows = {split: read_csv(paths, options) for split, paths in of_splits.items()}
        else:
            rows = datasets.load_dataset(*given, **hub_options(config))
    lines = {
        split: paths
        for split, paths in of_splits.items()
        if [path.suffix for path in paths] == [".jsonl"]
    }
    return Source(f"task {task}", rows, lines)


def _read(split: str, paths: Sequence[Path], fields: Sequence[str]) -> Dataset:
    import datasets

    if paths[0].suffix != ".parquet":
        return read_json(paths, fields)
    logging.getLogger("datasets").setLevel(
        logging.CRITICAL
    )  # its log of a bad file is in the error
    try:
        return datasets.load_dataset(
            "parquet", data_files={split: [str(path) for path in paths]}, split=split
        )
    except Exception as error:  # of Arrow
        said = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise UserError(f"{paths[0]}: cannot be read ({reason(said)})") from error


# Files


def find_files(root: str | Path, task: str, config: Mapping[str, Any]) -> Files:
    """The files of all splits that there are; that which is scored is among them.

    Raises:
        UserError: it is in none of the folders; says where it may lie.
    """
    root = Path(root).resolve()
    scored = scored_split(config)
    for folder in _folders(task, config) if scored else ():
        for place in (root / folder, root / folder / "data"):
            files: dict[str, list[Path]] = {}
            for split in filter(None, map(config.get, ROLES)):
                whole = [
                    path for suffix in SUFFIXES if (path := place / f"{split}{suffix}").is_file()
                ]
                files[split] = whole[:1] or sorted(place.glob(f"{split}-*.parquet"))
            if files[str(scored)]:
                return {split: found for split, found in files.items() if found}
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
    """The fields that the templates of a task put into every prompt, whatever is in them.

    None where Python makes or changes the rows, and none of a template that has conditions or
    defaults.
    """
    from jinja2 import Environment, meta

    found: set[str] = set()
    for name in (
        ("doc_to_text", "doc_to_target", "doc_to_choice") if not config.get("process_docs") else ()
    ):
        template = config.get(name)
        if isinstance(template, str) and not re.search(r"{%|\bif\b|\bdefault\b", template):
            found |= meta.find_undeclared_variables(Environment().parse(template))
    return tuple(sorted(found))


# The hub


def hub_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which a task loads its data set from the hub; code in a data set is never
    run."""
    return {
        key: value
        for key, value in (config.get("dataset_kwargs") or {}).items()
        if key != "trust_remote_code"
    }


def hub_rows(task: str, config: Mapping[str, Any]) -> Any:
    """The rows of a task's data set on the hub, from the cache if they are there; raises as
    `from_hub`."""
    import datasets

    path, part = config.get("dataset_path"), config.get("dataset_name")

    def load() -> Any:
        return datasets.load_dataset(path=path, name=part, **hub_options(config))

    return from_hub(str(path), load, f"{layout(task, config)} below it")


@contextmanager
def no_network() -> Iterator[None]:
    """Inside, `datasets` and the hub's client use the local cache alone, and do not warn that they
    do."""
    from datasets import config, logging
    from huggingface_hub import constants

    before, verbosity = (config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE), logging.get_verbosity()
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    logging.set_verbosity_error()
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
        logging.set_verbosity(verbosity)


def from_hub(name: str, load: Callable[[], T], files: str | None = None) -> T:
    """Call `load`, which reads the hub's data set `name`, without the network; where that fails,
    with it.

    files: the files that `data=local` would need below its root, for the error.

    Raises:
        UserError: it is not cached and the hub is unreachable or refuses, or it cannot be read;
        says what remains. ImportError: a package that reads it is not installed.
    """
    from huggingface_hub import constants, get_session

    try:
        with no_network():
            return load()
    except ImportError:
        raise
    except Exception:
        # `datasets` has many for rows that are not cached, or not whole; online it says what is
        # wrong.
        pass
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


def revision(
    path: str, part: str | None, fetch: Callable[[], object], *, has_options: bool = False
) -> str:
    """The commit on the hub of a data set's cached rows; `fetch` puts rows into the cache where
    there are none. "" where it leaves none there.

    part: its configuration, None for the only one. has_options: it is loaded with other settings as
    well. Raises as `from_hub`.
    """
    found = _cached_revision(path, part, has_options)
    if found is None:
        fetch()
        found = _cached_revision(path, part, has_options)
    return found or ""


def _cached_revision(path: str, part: str | None, has_options: bool) -> str | None:
    """The commit of the newest rows, which `datasets` takes offline; importing it would take a
    second.

    Rows lie in OWNER___NAME/PART/VERSION/COMMIT, names in snake case, a dash and a digest after a
    part with options.
    """
    from huggingface_hub import constants

    def letters(name: str) -> str:
        return name.replace("/", "").replace("_", "").lower()

    cache = Path(
        os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    ).expanduser()
    configuration = (
        f"{escape(part or 'default')}-*" if has_options else escape(part) if part else "*"
    )
    made = [
        rows
        for folder in cache.glob("*")
        if letters(folder.name) == letters(path)
        for rows in folder.glob(f"{configuration}/*/*/dataset_info.json")
        if "." not in rows.parent.name  # .incomplete: on its way, or cut short
    ]
    return max(made, key=lambda rows: rows.parent.stat().st_mtime_ns).parent.name if made else None

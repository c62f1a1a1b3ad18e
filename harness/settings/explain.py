"""What `--help` says of every setting of a run and of the chosen method: default, range, meaning.

The meaning of a run's setting is its comment in `conf/config.yaml`, or in a file of its group. The
range is that of its type, which refuses any other value.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from harness.settings import own_method, schema
from harness.settings.codecs import codec_names
from harness.settings.config import GROUPS, RunConfig
from harness.settings.paths import COMMAND
from harness.settings.schema import AT_TOP, CONF_DIR, MOST, options
from harness.settings.task_config import LEAST_PLACES, MOST_PLACES

WIDTH = 100
BY_TYPE = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
"""Range of a setting whose type says all."""
NAMED = {
    schema.Text: "text",
    schema.PathText: "a path",
    schema.ExistingText: "a file or folder",
    schema.FileText: "a file",
    schema.FolderText: "a folder",
    schema.Names: "a list of different names",
    schema.Naturals: "a list of different whole numbers",
    schema.Share: "above 0, at most 1",
}
"""Ranges of the types of `harness.settings.schema` that a function checks."""
OR_NULL = "; or null"
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
WITH_COMMENTS = {
    "model": "smollm2-135m",
    "data": "offline",
    "corpus": "offline",
    "platform": "cpu",
}
"""By group, the file of `conf/` whose comments say what its settings mean."""
OTHER_RANGES = {
    "method": "a name, a file, a class or a press",
    "codec": f"{', '.join(codec_names())}, or ./FILE.py{OR_NULL}",
    "value_codec": f"as codec, but no file{OR_NULL}",
    "codec_settings": "the fields of the codec",
    "budget": f"above 0, at most 1, a percentage, or nearest:SHARE{OR_NULL}",
    "prefill_len": f"a whole number, at least 0{OR_NULL}",
    "metadata.max_seq_lengths": f"a list of different whole numbers{OR_NULL}",
    "metadata.num_sentences": f"a whole number, at least 0{OR_NULL}",
    "metadata.max_gen_toks": f"a whole number above 0{OR_NULL}",
    "metadata.places": f"{LEAST_PLACES} to {MOST_PLACES}{OR_NULL}",
    "sweep.share": f"K/N{OR_NULL}",
    "status": "true or false",
    "export": f"a file that ends with .zip, or a folder{OR_NULL}",
    "model.shape": "settings of transformers",
}
"""Ranges of what no field of a class holds as it is typed."""
SETTING = re.compile(r"(?P<indent> *)(?P<name>\w+):(?P<value>[^#]*)(?:#\s*(?P<meaning>.*))?")


class Meaning(NamedTuple):
    """A setting as a file of `conf/` explains it. section: the comment line above it."""

    name: str
    words: str
    section: str


def help_text(config: Mapping[str, Any]) -> str:
    """What `--help` prints: the files of `conf/`, and tables of the settings of a run and of the
    chosen method. config: composed settings, whose values are shown as defaults."""
    groups = []
    for folder in sorted(path for path in CONF_DIR.iterdir() if path.is_dir()):
        groups.append(f"{folder.name}: {', '.join(options(folder.name))}")
    return "\n".join(
        [
            "Accuracy and speed of KV-cache methods on any Hugging Face decoder, on one "
            "implementation of each.",
            "",
            f"{COMMAND} SETTING=VALUE ...",
            "    -m          before settings with several values, method=full,h2o: a run for each",
            "    --cfg job   print the settings and run nothing",
            "    --help      this text, for the settings beside it, such as method=h2o --help",
            "",
            "Files of conf/ to choose from: GROUP=NAME",
            "",
            *groups,
            "",
            run_help(config),
            "",
            method_help(config["method"]["name"]),
        ]
    )


def run_help(config: Mapping[str, Any]) -> str:
    """A table of the settings of a run; a default is that of the composed `config`."""
    parts = []
    for section, meanings in _sections().items():
        rows = []
        for meaning in meanings:
            default: Any = config
            for part in meaning.name.split("."):
                default = default.get(part) if isinstance(default, Mapping) else None
            if meaning.name == "method":
                default = default["name"]
            shown = "{...}" if isinstance(default, Mapping) and default else _as_yaml(default)
            allowed = _range_of(meaning.name)
            if default is None and "null" not in allowed:  # what another file says then holds
                allowed += OR_NULL
            rows.append((meaning.name, shown, allowed, meaning.words))
        parts += ["", section, *_aligned(rows)]
    return "\n".join(["Settings of a run: SETTING=VALUE, default, meaning", *parts])


def _sections() -> dict[str, list[Meaning]]:
    """The settings of a run by the lines that head them: those of groups, then those at the top."""
    found: dict[str, list[Meaning]] = {}
    for group, name in WITH_COMMENTS.items():
        for meaning in _meanings(CONF_DIR / group / f"{name}.yaml", f"{group}."):
            if not meaning.name.startswith("model.shape."):
                found.setdefault(f"{group}=NAME, and its settings", []).append(meaning)
    for meaning in _meanings(CONF_DIR / "config.yaml"):
        found.setdefault(meaning.section or "All runs", []).append(meaning)
    return found


def _meanings(path: Path, prefix: str = "") -> Iterator[Meaning]:
    """The settings of a YAML file that have a value, in its order, without those of Hydra."""
    section, group = "", ""
    for line in path.read_text(encoding="utf-8").splitlines():
        found = SETTING.fullmatch(line)
        if line.startswith("#"):
            section = line.removeprefix("# ")
        elif not line.strip():
            section = ""
        if found is None or not found["name"] or group == "defaults" and found["indent"]:
            continue
        if not found["indent"]:
            group = found["name"]
            if group == "hydra":
                return
            name = group
        else:
            name = f"{group}.{found['name']}"
        if found["value"].strip() or name == "shape":
            yield Meaning(prefix + name, found["meaning"] or "", section)


def _range_of(name: str) -> str:
    """What a setting of a run may be, in words."""
    if name in OTHER_RANGES:
        return OTHER_RANGES[name]
    group, _, field = name.rpartition(".")
    hints: dict[str, Any] = {}
    for cls in [GROUPS[group]] if group else [RunConfig, *(GROUPS[name] for name in AT_TOP)]:
        hints |= get_type_hints(cls, include_extras=True)
    return _in_words(hints[field])


def _in_words(hint: Any) -> str:
    """A type of `harness.settings.config` as what it allows."""
    if hint in NAMED:
        return NAMED[hint]
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(map(str, parts))
    if origin in (Union, UnionType):
        kinds = [_in_words(part) for part in parts if part is not type(None)]
        return " or ".join(kinds) + (OR_NULL if type(None) in parts else "")
    if origin is Annotated:
        bounds = []
        for field in parts[1:]:
            for bound in getattr(field, "metadata", ()):
                for sign, words in BOUNDS.items():
                    limit = getattr(bound, sign, None)
                    if limit is not None and limit != MOST:
                        bounds.append(f"{words} {limit:,.10g}")
        kind = {int: "a whole number", str: "text"}.get(parts[0], "a number")
        return ", ".join([kind, *bounds])
    if origin is not None and issubclass(origin, Mapping):
        return "settings of its own"
    return BY_TYPE[hint]


def method_help(choice: str) -> str:
    """A table of the settings of a method. A default is that of the preset."""
    from methods.settings import settings_of  # loads torch

    cls, name, said = own_method.chosen(choice)
    defaults = own_method.defaults_of(cls) | said
    types = get_type_hints(cls)
    rows = []
    for setting in settings_of(cls):
        default = _as_yaml(defaults[setting.name])
        allowed = _by_type(types[setting.name])
        if setting.allowed is not None:
            allowed = setting.allowed.words
        rows.append((f"method.{setting.name}", default, allowed, setting.meaning))
    header = f"Settings of method={name}: method.SETTING=VALUE, default, meaning"
    return "\n".join([header, *_aligned(rows)])


def _by_type(kind: Any) -> str:
    return BY_TYPE.get(kind, str(kind).replace("None", "null").replace(" | ", " or "))


def _as_yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) and not value.isprintable() else str(value)


def _aligned(rows: list[tuple[str, str, str, str]]) -> list[str]:
    """A line or more for each row, its meaning and range wrapped."""
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    widths[1] = min(widths[1], 20)  # a text may be long
    indent = " " * (sum(widths) + 4)
    lines = []
    for name, default, allowed, meaning in rows:
        start = f"{name:{widths[0]}}  {default:{widths[1]}}  "
        words = f"{meaning}. Allowed: {allowed}" if meaning else f"Allowed: {allowed}"
        lines += textwrap.wrap(words, WIDTH, initial_indent=start, subsequent_indent=indent)
    return lines

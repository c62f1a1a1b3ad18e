"""What `--help` prints: the commented files of `conf/`, and the settings of the chosen method.

A value out of range is refused with what is allowed, so the ranges are not listed here.
"""

from __future__ import annotations

import textwrap
from dataclasses import MISSING
from typing import Any

from harness.settings import own_method
from harness.settings.paths import COMMAND
from harness.settings.schema import CONF_DIR, options

WIDTH = 100
EXPLAINED = ("model/smollm2-135m", "data/offline", "corpus/offline", "platform/cpu")
"""Files whose comments say what the settings of their group mean."""


def help_text(method: str) -> str:
    """The help of a command. method: as `method=` names it."""
    lines = [
        "Accuracy and speed of KV-cache methods on any Hugging Face decoder, on one "
        "implementation of each.",
        "",
        f"{COMMAND} SETTING=VALUE ...",
        "    -m          before settings with several values, method=full,h2o: a run for each",
        "    --cfg job   print the settings and run nothing",
        "    --help      this text, for the method beside it, such as method=h2o --help",
        "",
        "Files of conf/ to choose from: GROUP=NAME",
        "",
    ]
    for folder in sorted(path for path in CONF_DIR.iterdir() if path.is_dir()):
        lines.append(f"{folder.name}: {', '.join(options(folder.name))}")
    for file in EXPLAINED:
        group = file.partition("/")[0]
        text = (CONF_DIR / f"{file}.yaml").read_text(encoding="utf-8")
        lines += ["", f"Settings of {group}=NAME: {group}.SETTING=VALUE", "", text.rstrip()]
    text = (CONF_DIR / "config.yaml").read_text(encoding="utf-8")
    of_runs = text[text.index("# What is read") :]
    lines += ["", "Settings of a run: SETTING=VALUE, default, meaning", "", of_runs.rstrip()]
    return "\n".join([*lines, "", *method_help(method)])


def method_help(choice: str) -> list[str]:
    """The settings of a method in lines: default, meaning and range. A default is the preset's."""
    from methods.settings import settings_of  # loads torch

    cls, name, said = own_method.chosen(choice)
    lines = [f"Settings of method={name}: method.SETTING=VALUE, default, meaning", ""]
    for setting in settings_of(cls):
        words = setting.meaning
        if setting.allowed is not None:
            words = f"{words}. Allowed: {setting.allowed.words}"
        start = f"{setting.name}: {_as_yaml(said.get(setting.name, setting.default))}"
        lines += textwrap.wrap(f"{start:28}  # {words}", WIDTH, subsequent_indent=30 * " " + "# ")
    return lines


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return "???" if value is MISSING else str(value)

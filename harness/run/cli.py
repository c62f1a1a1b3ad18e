"""The command line: settings are composed, a run or a sweep is made, and a refusal is one line.

Exit codes: 0; 2 for what a user can put right; 1 for a bug of ours, with its traceback; 130 after
Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from harness.errors import BUG, STOPPED, USERS, UserError, one_line
from harness.files import holding
from harness.model.load import Resources
from harness.results.record import jsonable
from harness.run import runner
from harness.run.all_runs import run_all
from harness.run.compose import compose, load, resolved
from harness.run.sweep import is_sweep, read_plan
from harness.run.words import Command, command_of
from harness.settings.kinds import find
from harness.settings.paths import COMMAND
from harness.settings.schema import CONF_DIR, chosen, options

Draw = Callable[[Path], Sequence[Path]]
"""Draws the figures of a results folder; returns their paths."""


def main(argv: Sequence[str], resources: Resources | None = None, draw: Draw | None = None) -> int:
    """Run a command line as a shell would; returns the exit code.

    resources: shared by its runs, for a caller that starts several. draw: makes the figures of a
    results folder once a sweep has run, and returns their paths.
    """
    jobs = Jobs(resources or Resources())
    try:
        with jobs.told():
            _do(jobs, command_of(argv))
    except KeyboardInterrupt:
        print("interrupted; the same command repeats only what is not finished", file=sys.stderr)
        jobs.exit_code = STOPPED
        draw = None  # whoever stops a process may kill it soon
    with jobs.told():
        jobs.report(draw)
    return jobs.exit_code


def _do(jobs: Jobs, command: Command) -> None:
    given = command.jobs[0]
    if command.prints == "help":
        print(help_text(compose(given).method.name))
    elif command.prints == "settings":
        method = load(given).method
        composed = resolved(compose({**given, "sweep": None}))
        composed["method"] |= {field.name: getattr(method, field.name) for field in fields(method)}
        print(yaml.safe_dump(jsonable(composed), sort_keys=False), end="")
    else:
        jobs.run_all(command.jobs)


@dataclass
class Jobs:
    """The jobs of a command: one, or with `-m` several, each a run or a sweep. One that
    fails does not stop the others.

    resources: shared by them. paths: records of the finished runs. gaps: what a sweep left out, in
    lines. exit_code: a bug's, else that of a refusal, else 0. has_sweep: a sweep ran.
    """

    resources: Resources
    paths: list[Path] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    exit_code: int = 0
    has_sweep: bool = False

    def run_all(self, jobs: Sequence[Mapping[str, Any]]) -> None:
        """Do jobs one after another, each by its settings; the error of each is printed. Raises
        UserError before the first for an unknown name in any."""
        for given in jobs:
            compose(given)
        # They most often ask for the same prompts.
        self.resources.shares_prompts |= len(jobs) > 1
        for given in jobs:
            words = []
            for name, value in given.items():
                if any(name not in other or other[name] != value for other in jobs):
                    words.append(f"{name}={value}")
            with self.told(" ".join(words)):
                self._run(given)

    def _run(self, given: Mapping[str, Any]) -> None:
        """Do one job. Raises as its run, or as the first of its runs that failed."""
        if is_sweep(compose(given)):
            # It takes seconds.
            begins = f"experiment={given['experiment']}: composing its runs"
            print(begins, file=sys.stderr, flush=True)
            plan = read_plan(given)
            self.has_sweep = True
            self.gaps += plan.gaps()
            print(*plan.gaps(), sep="\n", end="\n" if plan.left_out else "")
            for path in run_all(plan.runs, self.resources):
                self.paths.append(path)
            return
        for name in given:
            if name.startswith("sweep."):
                raise UserError(f"{name}={given[name]}: needs an experiment that is many runs")
        config = load(given)
        runner.require_devices([config])
        if find(config.kind).keeps_record:
            self.paths.append(runner.run(runner.Run.of(config), self.resources))
            return
        with runner.users_faults(config):
            runner.measure(config, self.resources)

    @contextmanager
    def told(self, job: str = "") -> Iterator[None]:
        """An error in the block is printed on stderr: what a user can put right in one line. job:
        what tells it from the others."""
        try:
            yield
        except (UserError, OSError) as error:
            said = one_line(error)
            where = f"{job}: " if job and job not in said else ""
            print(f"error: {where}{said}", file=sys.stderr)
            self.exit_code = self.exit_code or USERS
        except Exception:
            print(f"error, a bug{f' of {job}' if job else ''}:", file=sys.stderr)
            traceback.print_exc()
            self.exit_code = BUG

    def report(self, draw: Draw | None) -> None:
        """Write the tables of what has run, print its table, and name the figures and what was left
        out. draw: makes the figures of a sweep; None for no figures."""
        if self.paths:
            print(runner.report(self.paths))
        if self.paths and self.has_sweep and draw is not None:
            results = self.paths[0].parents[3]
            with holding(results / "tables", wait=True):  # another process may write them
                figures = draw(results)
            names = [path.name for path in figures if path.suffix == ".png"]
            if names:
                print(f"figures are in {figures[0].parent}: {', '.join(names)}")
        for line in self.gaps:
            print(line)


# What `--help` prints

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

    cls, name, said = chosen(choice)
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

"""The Python interface: `harness.load`, and the measurements of a loaded model. Its runs are the
command line's, with their records.

    model = harness.load("smollm2-135m")
    print(model.generate(open("my.txt").read(), method="infinigen", budget=0.1))
    frame = model.ask(open("my.txt").read(), [" Who?", " Why?"], method="snapkv", budget=0.1)
    frame = model.perplexity("my.txt", methods=["full", "h2o", "infinigen"], budget=0.16)

Settings are those of the command line, as keywords: `num_windows=2`, `**{"method.alpha": 4}`,
`results_dir="mine"`. `budget` is the share of the full cache that a decode step reads, as on the
command line: 0.16 or "16%", which is refused where method and lengths do not allow it, or
"nearest:0.16", the nearest that they do. None keeps the method's own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from harness.errors import UserError
from harness.files import stated_memory
from harness.model.attach import digest_of, unchanged
from harness.model.load import LoadedModel, Resources, from_memory
from harness.results.columns import whole_tasks
from harness.results.record import read_record
from harness.results.samples import frames_of, full_runs
from harness.run.compose import load as load_settings
from harness.run.runner import Run, report, require_devices, users_faults
from harness.run.runner import run as start
from harness.run.words import source_of_model
from harness.scoring.progress import bar, quietly, say
from harness.settings.config import ModelConfig, RunConfig
from harness.speed.generate import Generated, ask_all, run_generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

OF_A_CALL = ("method", "budget", "experiment", "prompt", "tasks")
"""Settings that each measurement is given anew."""


def load(
    model: str | Path | PreTrainedModel | Model,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **settings: Any,
) -> Model:
    """Load a model for every measurement of this interface.

    Args:
        model: an entry of `conf/model`, a folder, a GGUF file, an id of the hub, or a loaded
        transformers model; what this returned stays as it is. tokenizer: of a transformers model.
        settings: as on the command line, such as platform="cuda", `**{"model.dtype": "bfloat16"}`.
            They hold for every measurement of this model.

    Raises:
        UserError: the model is missing, damaged or no decoder of transformers, or a setting is
        wrong.
    """
    from transformers import PreTrainedModel  # here, as it takes seconds

    if isinstance(model, PreTrainedModel):
        return Model(Resources(loaded=from_memory(model, tokenizer)), settings)
    if tokenizer is not None:
        raise UserError(f"tokenizer={tokenizer}: the model has its own; leave it out")
    if isinstance(model, Model) and not settings:
        return model
    name, value = source_of_model(str(model)) or ("model", str(model))
    chosen = Model(Resources(), with_given({name: value}, settings))
    config = chosen.configured({}, {})
    require_devices([config])
    with stated_memory(config.platform.host_gib):
        loaded = chosen.resources.model(config.model)
        loaded.as_loaded = digest_of(loaded.model)
    return chosen


def refuse(settings: Mapping[str, Any], groups: Collection[str], why: str) -> None:
    """Raise UserError for a setting of these names or groups."""
    for name, value in settings.items():
        if name.partition(".")[0] in groups:
            raise UserError(f"{name}={value!r}: {why}; leave it out")


def with_given(sets: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A function's own settings, but None, and those it was given; UserError where both name
    one."""
    own = {name: value for name, value in sets.items() if value is not None}
    for name, value in own.items():
        if name in given:
            raise UserError(f"{name}={given[name]!r}: is {value!r} here; leave it out")
    return {**own, **given}


def _listed(setting: str, values: object, example: str) -> list[Any]:
    """A list that is not empty; UserError for anything else, as for the text of one value."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise UserError(f"{setting}={values!r}: must be a list, such as {setting}=[{example!r}]")
    return list(values)


class Model:
    """A loaded model. `harness.load` makes it."""

    def __init__(self, resources: Resources, settings: Mapping[str, Any]) -> None:
        refuse(settings, OF_A_CALL, "each measurement is given it")
        if resources.loaded is not None:
            refuse(settings, ("model",), "the model is the one in memory")
        self.resources = resources
        self.settings = dict(settings)

    @property
    def loaded(self) -> LoadedModel:
        """The transformers model, its tokenizer and its name."""
        return self.resources.model(self.configured({}, {}).model)

    def configured(self, own: Mapping[str, Any], given: Mapping[str, Any]) -> RunConfig:
        """The checked settings of a run: a call's own, and those that it was given. A model in
        memory decides model and platform. Raises UserError for a setting that is wrong, or that
        both have."""
        refuse(given, ("model",), "the model is loaded; harness.load takes it")
        refuse(given, ("sweep",), "a call is one run; run.py has sweeps")
        settings = self.settings | with_given(own, given)
        settings = {name: value for name, value in settings.items() if value is not None}
        loaded = self.resources.loaded
        if loaded is None:
            return load_settings(settings)
        device: Any = loaded.model.device.type
        dtype: Any = str(loaded.model.dtype).removeprefix("torch.")
        config = load_settings({"platform": device, **settings})
        return replace(config, model=ModelConfig(loaded.name, dtype=dtype, device=device))

    def generate(
        self,
        prompt: str,
        method: str = "infinigen",
        budget: float | str | None = None,
        quiet: bool = False,
        **settings: Any,
    ) -> Generated:
        """Continue a prompt with a method's live cache, greedily unless a temperature is set.

        prompt: text. method: a name of `conf/method` or a file. quiet: show no
            progress bar. settings: such as max_new_tokens=64, placement="device", temperature=0.7,
            top_p=0.9, seed=1.

        Returns:
            Text, TTFT, TPOT, tokens/s and bytes over the link, which `print` shows.
        """
        if not isinstance(prompt, str):
            raise UserError(f"prompt={prompt!r}: must be text")
        own = {"experiment": "generate", "prompt": prompt, "method": method, "budget": budget}
        config = self.configured(own, settings)
        with users_faults(config), quietly(quiet), bar(desc="generate", unit="step") as shown:
            loaded = self.resources.model(config.model)
            return run_generate(config, loaded, lambda piece: shown.update())

    def ask(
        self,
        context: str,
        questions: Sequence[str],
        method: str = "infinigen",
        budget: float | str | None = None,
        quiet: bool = False,
        **settings: Any,
    ) -> pd.DataFrame:
        """Ask several questions of one context, each by itself: none sees another.

        The context runs once, the method reduces its cache once, before a question is known, and
        every question goes on from there; between questions only what decode steps change is put
        back. Texts are taken as they are: a chat template is the caller's. `generate` of context
        and question as one prompt answers a question that the method knows.

        Args:
            context: text. questions: texts that follow it, such as "\\nQuestion: Who?\\nAnswer:".
            method, budget, settings: as of `generate`, such as max_new_tokens=32,
                placement="device".
            quiet: show no progress bar.

        Returns:
            A frame with a line for each question: method, asked_budget (NaN where none was asked
            for), question, answer, num_tokens (of the answer), budget (share of the full cache that
            a decode step read, as measured; NaN without a step), ttft_s (seconds of the question's
            rows, to the first token of the answer), decode_s (seconds of the other tokens) and
            kv_bytes (of cache, method and buffers, on the device and in host memory).
            `frame.attrs["context_s"]`: seconds of the context's pass.

        Raises:
            UserError: a setting is wrong, a text has no tokens, or the model takes fewer tokens.
        """
        if not isinstance(context, str) or not context:
            raise UserError(f"context={context!r}: must be text, and not empty")
        questions = _listed("questions", questions, "Who?")
        own = {"experiment": "generate", "prompt": context, "method": method, "budget": budget}
        config = self.configured(own, settings)
        with users_faults(config), quietly(quiet):
            loaded = self.resources.model(config.model)
            with bar(total=None, desc="ask", unit="step") as shown:
                answers, context_s = ask_all(
                    config, loaded, questions, begin=shown.reset, on_step=shown.update
                )
        answered = pd.DataFrame(answers)
        answered.insert(0, "question", questions)
        answered.insert(0, "asked_budget", config.budget or math.nan)
        answered.insert(0, "method", config.method_name)
        answered.attrs["context_s"] = context_s
        return answered

    def perplexity(
        self,
        text: str | Path | None = None,
        methods: Sequence[str] = ("full", "infinigen"),
        budget: float | str | None = None,
        quiet: bool = False,
        **settings: Any,
    ) -> pd.DataFrame:
        """Perplexity of a text, and the KL to the full cache, under each method.

        text: a UTF-8 file; None takes the offline text. quiet: print no lines and no progress bars
            on stderr. settings: such as num_windows=2, seq_len=1024.
        Returns a frame with a line for each method; see `frame`.
        """
        own = {"experiment": "perplexity", "corpus.path": text, "budget": budget}
        return self._measured(methods, own, settings, quiet)

    def tasks(
        self,
        tasks: Sequence[str],
        methods: Sequence[str] = ("full", "infinigen"),
        budget: float | str | None = None,
        quiet: bool = False,
        **settings: Any,
    ) -> pd.DataFrame:
        """lm-eval's tasks under each method.

        tasks: names of tasks and groups. quiet: as of `perplexity`. settings: such as data="hub",
            num_samples=50, num_fewshot=5, temperature=0.6, repeats=4.
        Returns a frame with a line for each method; see `frame`.
        """
        tasks = _listed("tasks", tasks, "kv_recall")
        own = {"experiment": "tasks", "tasks": tasks, "budget": budget}
        return self._measured(methods, own, settings, quiet)

    def _measured(
        self,
        methods: Sequence[str],
        own: Mapping[str, Any],
        settings: Mapping[str, Any],
        quiet: bool,
    ) -> pd.DataFrame:
        """The frame of a run under each method, which nobody changes the model meanwhile."""
        with unchanged(self.loaded.model):
            runs = []
            for method in _listed("methods", methods, "full"):
                config = self.configured({"method": str(method), **own}, settings)
                runs.append(Run.of(config, self.resources))
            self.resources.shares_prompts = sum(not todo.is_finished() for todo in runs) > 1
            try:
                with quietly(quiet):
                    return frame(self._records(runs))
            finally:
                self.resources.end_sharing()

    def _records(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        """The records of runs. One that is refused, as for a prompt that is too short for its
        method, costs the others nothing."""
        records = []
        refusals: list[UserError] = []
        for number, todo in enumerate(runs, 1):
            if not todo.is_finished():
                say(f"{todo.title}: running, {number} of {len(runs)}")
            try:
                path = start(todo, self.resources, tell=say)
            except UserError as error:
                log.warning("%s: no row, %s", todo.title, error)
                refusals.append(error)
                continue
            report([path])
            records.append(read_record(path))
        if not records:
            raise refusals[0]
        return records


def frame(records: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Records of accuracy as a frame with a line for each.

    Columns, named as in the tables: label, method, settings, asked_budget (NaN where none was asked
    for), budget (the share of the full cache that was read), device_frac and resident_frac (the
    shares that were read and that stay on the device), unmet_budget (asked_budget, where budget
    differs by more than a tenth), and of each metric its value (`kl_nats`), its standard error
    (`kl_nats_stderr`), and its difference to the full cache's run on the same questions or windows
    (`acc_difference`, `acc_difference_stderr`). With more than one task a metric's name follows the
    task's: `kv_recall_acc`.
    """
    folders = dict.fromkeys(record["config"]["results_dir"] for record in records)
    rows = frames_of(records, partial(full_runs, *folders))["accuracy"]
    configs = {record["run_id"]: record["config"] for record in records}
    lines = []
    for run, of_run in whole_tasks(rows).groupby("run_id", sort=False):
        first = of_run.iloc[0]
        line = first[["label", "method", "settings"]].to_dict()
        line["asked_budget"] = configs[run]["budget"] or math.nan
        line |= first[["budget", "device_frac", "resident_frac"]].to_dict()
        unmet = of_run["unmet_budget"].dropna()
        if len(unmet):
            line["unmet_budget"] = unmet.iloc[0]
        several = of_run["task"].nunique() > 1
        for row in of_run.to_dict("records"):
            name = f"{row['task']}_{row['metric']}" if several else row["metric"]
            line[name] = row["value"]
            for column in ("stderr", "repeats_stderr", "difference", "difference_stderr"):
                if not math.isnan(row[column]):
                    line[f"{name}_{column}"] = row[column]
        lines.append(line)
    return pd.DataFrame(lines)

"""A method under lm-eval's own evaluation, from Python and from lm-eval's command line, which knows
the model `kv`.

    lm_eval.simple_evaluate(model=harness.lm(...), tasks=[...])

    kv-harness lm-eval --model kv --tasks gsm8k \\
        --model_args pretrained=smollm2-135m,method=infinigen,budget=0.1

`--model_args` takes `pretrained` (as `harness.load`), `method`, `budget`, and the settings of
`harness.lm`.

lm-eval asks for all requests of one type at once, of all tasks together. They are answered task by
task, as by `experiment=tasks`: the method's budget is met on the task's own requests, and the dense
prompt ends where the task's does. So log-likelihoods and texts are the same.
"""

from __future__ import annotations

import sys
import traceback
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval.models
import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.api.registry import model_registry

from harness.api.interface import Model, load, refuse
from harness.errors import STOPPED, UserError, exit_code, reason
from harness.model.budgets import ReadStats
from harness.model.load import LoadedModel
from harness.run.runner import users_faults
from harness.run.words import read
from harness.scoring.evaluation import prefill_of
from harness.scoring.lm import ReplayLM
from harness.scoring.planning import Prefill
from harness.scoring.progress import say
from harness.settings.config import RunConfig
from harness.settings.paths import PROGRAM

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OF_LM_EVAL = (
    "tasks", "num_samples", "num_fewshot", "apply_chat_template", "fewshot_as_multiturn",
    "system_instruction", "include_path", "metadata", "data", "repeats",
)  # fmt: skip
"""Settings of `Model.tasks` that lm-eval decides where it evaluates."""
NAME = "kv"
DEFAULT_DEVICE = "cuda:0"
"""What lm-eval asks for where no device is given."""


class MethodLM(ReplayLM):
    """Answers lm-eval's requests of all types and tasks under one method.

    config: of `kind=tasks`; its tasks, samples and examples play no part, as lm-eval decides them.
    loaded: the model. by_task: what all answers so far have read. Raises UserError where the model
    has no tokenizer.
    """

    def __init__(self, config: RunConfig, loaded: LoadedModel) -> None:
        super().__init__(config, loaded, "", Prefill("dense"))
        self.by_task: dict[str, ReadStats] = {}

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Raise UserError for lm-eval's file of answers: one method's would be another's."""
        if cache_hook.dbdict is not None:
            raise UserError(
                "use_cache: lm-eval finds kept answers by their texts alone, whatever the method; "
                "leave it out (experiment=tasks repeats no finished run)"
            )

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether greedy decoding would make it."""
        return self._by_task("loglikelihood", requests)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """The log-probability of each text."""
        return self._by_task("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """The answer to each context, cut at the first stop string."""
        return self._by_task("generate_until", requests)

    def _by_task(self, request_type: str, requests: Sequence[Instance]) -> list[Any]:
        """The answers in the order of `requests`. Prints the method's budget for each task."""
        by_task: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            by_task[request.task_name or ""].append(number)
        answers: list[Any] = [None] * len(requests)
        for task, numbers in by_task.items():
            prefill = prefill_of(task, self.config, writes=request_type == "generate_until")
            of_task = ReplayLM(self.config, self.loaded, task, prefill)
            with users_faults(self.config):
                found = getattr(of_task, request_type)([requests[number] for number in numbers])
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer
            self.by_task[task] = self.by_task.get(task, ReadStats()) + of_task.reads
            budget = f"{of_task.reads.budget:.1%} of the cache"
            say(f"{task}: {self.config.label} read {budget}")
        return answers

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results: the method, and by task the shares that it read."""
        shares = {task: reads.shares for task, reads in self.by_task.items()}
        return {"model_name": self.loaded.name, "method": self.config.label, "shares": shares}


def lm(
    model: PreTrainedModel | Model | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    method: str = "infinigen",
    budget: float | str | None = None,
    **settings: Any,
) -> MethodLM:
    """A model under a method for lm-eval: `lm_eval.simple_evaluate(model=lm(...), tasks=[...])`.

    Log-likelihoods and texts are those of `Model.tasks` with the same settings. lm-eval chooses
    tasks and examples.

    Args:
        model, tokenizer: as of `load`, or what it returns.
        method, budget: as of `Model.tasks`; the budget is met for each task by itself.
        settings: such as prefill="question", too_long="truncate", temperature=0.6,
        `**{"method.alpha": 4}`.

    Raises:
        UserError: the model is refused, it has no tokenizer, or a setting is wrong or one of
        lm-eval's own.
    """
    refuse(settings, OF_LM_EVAL, "lm-eval decides it, by its own arguments")
    used = load(model, tokenizer)
    own = {"experiment": "tasks", "method": method, "budget": budget}
    return MethodLM(used.configured(own, settings), used.loaded)


class KVModel(MethodLM):
    """`--model kv`: a `MethodLM` made of `--model_args`.

    Args:
        pretrained: an entry of `conf/model`, a folder, a GGUF file or an id of the hub.
        device: lm-eval's `--device`: cpu or cuda, as `platform`. Its default, cuda:0, is the CPU
            where there is no CUDA device.
        dtype: as `model.dtype`; "auto" takes the platform's.
        batch_size, max_batch_size: play no part: replay makes batches that fit.
        trust_remote_code: as `model.trust_remote_code`.
        settings: of `harness.lm` (method, budget, ...), and of the model such as `model.gguf_file`.
            A text is read as on the command line: `codec=null`, `gpu_cache=2`.

    Raises UserError in one line.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        device: str = DEFAULT_DEVICE,
        dtype: str = "auto",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        trust_remote_code: bool | str = False,
        **settings: Any,
    ) -> None:
        on_cpu = device == DEFAULT_DEVICE and not torch.cuda.is_available()
        of_model: dict[str, Any] = {
            "platform": "cpu" if on_cpu else device.removesuffix(":0"),
            "model.dtype": None if dtype == "auto" else dtype,
            "model.trust_remote_code": trust_remote_code,
        }
        of_method: dict[str, Any] = {}
        for name, value in settings.items():
            if isinstance(value, str):  # lm-eval itself has read true, false, none and numbers
                _, value = read(f"{name}={value}")
            is_models = name.startswith(("model.", "platform"))
            (of_model if is_models else of_method)[name] = value
        made = lm(load(str(pretrained), **of_model), **of_method)
        super().__init__(made.config, made.loaded)


def main(argv: Sequence[str]) -> int:
    """Run lm-eval's command line; returns the exit code.

    A refusal is one line and exit code 2, and so is a value that lm-eval refuses, such as a task's
    name. SystemExit is that of argparse: of --help, or of an unknown option.
    """
    model_registry.register(NAME, target=KVModel)
    sys.argv = [f"{PROGRAM} lm-eval", *argv]
    try:
        return exit_code(_evaluate)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return STOPPED


def _evaluate() -> None:
    """lm-eval's command, with what its own code refuses as a UserError."""
    try:
        cli_evaluate()
    except (ValueError, TypeError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if raised_in.is_relative_to(Path(lm_eval.models.__file__).parents[1]):
            raise UserError(f"lm-eval refuses it ({reason(error)})") from error
        raise

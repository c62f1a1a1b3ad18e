"""lm-eval's own command line, which knows the model `kv`: any decoder under a method's cache.

    kv-harness lm-eval --model kv --tasks gsm8k \\
        --model_args pretrained=smollm2-135m,method=infinigen,budget=0.1

`--model_args` takes `pretrained` (as `harness.load`), `method`, `budget`, and the settings of
`harness.lm`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.models
import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry

from harness.api.interface import lm, load
from harness.api.method_lm import MethodLM
from harness.errors import STOPPED, UserError, exit_code, nearest, reason
from harness.run.words import read
from harness.settings.paths import PROGRAM

NAME = "kv"
PLATFORMS = {"cpu": "cpu", "cuda": "cuda", "cuda:0": "cuda"}
"""By lm-eval's `--device`."""
DEFAULT_DEVICE = "cuda:0"
"""What lm-eval asks for where no device is given."""


class KVModel(MethodLM):
    """`--model kv`: a `MethodLM` made of `--model_args`.

    Args:
        pretrained: an entry of `conf/model`, a folder, a GGUF file or an id of the hub.
        device: lm-eval's `--device`: cpu or cuda, as `platform`. Its default, cuda:0, is the CPU
            where there is no CUDA device.
        dtype: as `model.dtype`; "auto" takes the platform's.
        max_length: a limit of context and answer, in tokens, below the model's own.
        batch_size, max_batch_size: play no part: replay makes batches that fit.
        trust_remote_code: as `model.trust_remote_code`.
        settings: of `harness.lm` (method, budget, ...), and of the model such as `model.gguf_file`.
            A text is read as on the command line: `codec=null`, `gpu_cache=2`.

    Raises UserError in one line.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        device: str = DEFAULT_DEVICE,
        dtype: str = "auto",
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        trust_remote_code: bool | str = False,
        **settings: Any,
    ) -> None:
        if pretrained is None:
            allowed = "an entry of conf/model, a folder, a GGUF file or an id of the hub"
            raise UserError(f"pretrained=: is missing from --model_args; must be {allowed}")
        if device not in PLATFORMS:
            raise UserError(f"device={device}: {nearest(device, PLATFORMS)}")
        on_cpu = device == DEFAULT_DEVICE and not torch.cuda.is_available()
        of_model: dict[str, Any] = {
            "platform": "cpu" if on_cpu else PLATFORMS[device],
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
        if max_length is not None:
            if not 2 <= max_length <= self.max_length:
                allowed = f"a number of tokens from 2 to {self.max_length}"
                raise UserError(f"max_length={max_length}: must be {allowed}")
            self.max_length = max_length


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

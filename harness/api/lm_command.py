"""lm-eval's own command line, which knows the model `kv`: any decoder under a method's cache.

    kv-harness lm-eval --model kv --tasks gsm8k \\
        --model_args pretrained=smollm2-135m,method=infinigen,budget=0.1

`--model_args` takes `pretrained` (as `harness.load`), `method`, `budget`, and the settings of
`harness.lm`.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401 - fills the registry, which knows its names alone before
import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry
from lm_eval.utils import simple_parse_args_string

from harness.api.attaching import lm
from harness.api.interface import load
from harness.api.method_lm import MethodLM
from harness.data.task_plan import COMPLAINTS
from harness.errors import (
    BUG,
    TRACEBACKS,
    USERS,
    UserError,
    code_of_stop,
    describe,
    is_users,
    nearest,
    one_line,
    reason,
)
from harness.run.words import FREE_TEXT, read
from harness.settings.paths import HARNESS, PACKAGES_DIR, PROGRAM

NAME = "kv"
PLATFORMS = {"cpu": "cpu", "cuda": "cuda", "cuda:0": "cuda"}
"""By lm-eval's `--device`."""
DEFAULT_DEVICE = "cuda:0"
"""What lm-eval asks for where no device is given."""
NO_PART = ("batch_size", "max_batch_size")
"""lm-eval's own options that play no part here."""


class KVModel(MethodLM):
    """`--model kv`: a `MethodLM` made of `--model_args`.

    Args:
        pretrained: an entry of `conf/model`, a folder, a GGUF file or an id of the hub.
        device: cpu or cuda, as `platform`. lm-eval's default, cuda:0, is the CPU where there is no
            CUDA device.
        dtype: as `model.dtype`; "auto" takes the platform's.
        max_length: a limit of context and answer, in tokens, below the model's own.
        batch_size, max_batch_size: play no part: replay makes batches that fit.
        trust_remote_code: as `model.trust_remote_code`.
        settings: of `harness.lm` (method, budget, ...), and of the model such as `model.gguf_file`.
            A text is read as on the command line: `codec=null`, `gpu_cache=2`.

    Raises UserError in one line.
    """

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> KVModel:
        """The model of `--model_args`. additional_config: lm-eval's options --device, --batch_size
        and --max_batch_size."""
        options = dict(additional_config or {})
        for name in NO_PART:
            if name in arg_dict:
                no_part = "plays no part, as replay makes batches that fit; leave it out"
                raise UserError(f"{name}={arg_dict[name]}: {no_part}")
        if "device" in arg_dict or "platform" in arg_dict:
            device = options.pop("device", None)
            if device not in (None, DEFAULT_DEVICE):
                both = "--model_args names device or platform too; leave one of them out"
                raise UserError(f"device={device}: {both}")
        given = {name: value for name, value in options.items() if value is not None}
        return cls(**arg_dict, **given)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> KVModel:
        """As `create_from_arg_obj`, of `name=value,name=value`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        device: str | None = None,
        dtype: str = "auto",
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        trust_remote_code: bool | str = False,
        tokenizer: object = None,
        **settings: Any,
    ) -> None:
        if pretrained is None:
            allowed = "an entry of conf/model, a folder, a GGUF file or an id of the hub"
            raise UserError(f"pretrained=: is missing from --model_args; must be {allowed}")
        if tokenizer is not None:
            raise UserError(f"tokenizer={tokenizer}: the model's own is used; leave it out")
        of_model: dict[str, Any] = {}
        of_method: dict[str, Any] = {}
        for name, value in settings.items():
            is_models = name.startswith(("model.", "platform"))
            (of_model if is_models else of_method)[name] = _as_on_a_command_line(name, value)
        if device is not None:
            if "platform" in of_model:
                both = f"contradicts platform={of_model['platform']}; leave one of them out"
                raise UserError(f"device={device}: {both}")
            of_model["platform"] = _platform(str(device))
        if dtype != "auto":
            of_model["model.dtype"] = dtype
        if trust_remote_code is not False:
            of_model["model.trust_remote_code"] = trust_remote_code
        model = load(str(pretrained), **of_model)
        made = lm(model, **of_method)
        super().__init__(made.config, made.loaded)
        if max_length is not None:
            is_number = isinstance(max_length, int) and not isinstance(max_length, bool)
            if not is_number or not 2 <= max_length <= self.max_length:
                allowed = f"a number of tokens from 2 to {self.max_length}"
                raise UserError(f"max_length={max_length}: must be {allowed}")
            self.max_length = max_length


def _platform(device: str) -> str:
    """The platform of one of torch's devices."""
    if device not in PLATFORMS:
        raise UserError(f"device={device}: {nearest(device, PLATFORMS)}")
    if device == DEFAULT_DEVICE and not torch.cuda.is_available():
        return "cpu"
    return PLATFORMS[device]


def _as_on_a_command_line(name: str, value: Any) -> Any:
    """The value that `name=value` has on this project's command line: `null` is none, `2` a number.
    lm-eval itself reads true, false, none and numbers."""
    if not isinstance(value, str) or name in FREE_TEXT:
        return value
    try:
        return read(f"{name}={value}")[1]
    except UserError:
        return value


def main(argv: Sequence[str]) -> int:
    """Run lm-eval's command line; returns the exit code.

    A refusal is one line and exit code 2, and so is an error that no code of this project raised:
    of a task's name, its data, or a value of lm-eval's. SystemExit is that of argparse: of --help,
    or of an unknown option.
    """
    model_registry.register(NAME, target=KVModel)
    log = logging.getLogger("lm_eval")
    before, handlers, level = sys.argv, log.handlers, log.level
    # lm-eval's command shows its log.
    log.handlers = [handler for handler in handlers if handler is not COMPLAINTS]
    sys.argv = [f"{PROGRAM} lm-eval", *argv]
    try:
        cli_evaluate()
    except KeyboardInterrupt as stop:
        print("interrupted", file=sys.stderr)
        return code_of_stop(stop)
    except Exception as error:
        if os.environ.get(TRACEBACKS) not in (None, "", "0"):
            traceback.print_exception(error)
        if is_users(error):
            print(f"error: {one_line(error)}", file=sys.stderr)
            return USERS
        if not _is_ours(error):
            print(f"error: lm-eval refuses it ({reason(error)})", file=sys.stderr)
            return USERS
        print(f"error: {describe(error)}; {TRACEBACKS}=1 shows where", file=sys.stderr)
        return BUG
    finally:
        sys.argv, log.handlers = before, handlers
        log.setLevel(level)
    return 0


def _is_ours(error: BaseException) -> bool:
    """True if it came through a module of this project besides this one."""
    frames = traceback.extract_tb(error.__traceback__)
    entry_points = {Path(__file__), HARNESS / "__main__.py"}
    for frame in frames:
        path = Path(frame.filename)
        if path in entry_points:
            continue
        if path.is_relative_to(HARNESS) or path.is_relative_to(PACKAGES_DIR / "methods"):
            return True
    return False

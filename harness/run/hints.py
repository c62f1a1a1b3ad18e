"""What to type in place of words that are no settings here, such as those of other programs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Sequence

from harness.settings.paths import CONF_DIR
from harness.settings.schema import conf_file, options
from harness.settings.task_config import TASKS

MAX_HUB_ID = 96
"""Letters of an id that the hub allows."""
MEANT = {
    "size|ratio|share|density|sparsity|(kv_?|cache_)(size|budget|ratio)|max_capacity.*": (
        "budget=0.1, the share of the full cache that a decode step reads"
    ),
    "compression_?(ratio|rate)?": "budget=0.1, the share that is read, where this one is left out",
    "users|clients|concurrency|batch|bs|num_seqs": (
        "batch_size=4, with experiment=latency or advise"
    ),
    "context|ctx|(context|ctx|max|max_seq|input|sequence)_?(len|length)|length": (
        "seq_len=2048 of a text, or prompt_len=2048 with experiment=latency"
    ),
    "limit|samples|num_questions|n": "num_samples=50, the questions of each task",
    "shots?|(num|few|k)_?shots?": "num_fewshot=5",
    "task": "experiment=tasks tasks=[kv_recall]",
    "dataset|text|file": "corpus.path=FILE, or of tasks data=local data.root=DIR",
    "device|gpu|cuda": "platform=cuda",
    "dtype|precision|torch_dtype": "model.dtype=bfloat16",
    "bits|kv_?(cache_)?dtype|quantization|quant": "codec=int4",
    "model_?(path|dir)|checkpoint": "model.path=DIR",
    "pretrained|model_?(id|name)|hub_?id|repo": "model.hub_id=ORGANISATION/NAME, or model.path=DIR",
    "press|policy|methods|algorithm": "method=h2o",
    "max_(gen_)?tok(en)?s|gen_length": "max_new_tokens=64, or gen_len=64 with experiment=latency",
    "out(put)?(_?(dir|path|folder))?|save_?(dir|path)": "results_dir=DIR",
}
"""What to type in place of an unknown setting, by its name (a regular expression)."""


def meant(name: str) -> str:
    """What to type in place of an unknown setting; "" where nobody knows."""
    found = (hint for names, hint in MEANT.items() if re.fullmatch(names, name, re.IGNORECASE))
    return next(found, "")


def source_of_model(model: str) -> tuple[str, str] | None:
    """The setting that chooses a model by one text, and its value; None where it is no source."""
    if model in options("model"):
        return "model", model
    if os.path.exists(os.path.expanduser(model)):  # False, too, where no file can have such a name
        return "model.path", model
    if len(model) <= MAX_HUB_ID and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model, re.ASCII):
        return "model.hub_id", model
    return None


def settings_with(value: str) -> list[str]:
    """The settings, as typed, for which a bare value is a choice: `method=h2o` of `h2o`."""
    groups = sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir())
    found = [f"{group}={value}" for group in groups if value in options(group)]
    if not found and value in TASKS:
        found = [f"experiment=tasks tasks=[{value}]"]
    source = None if found else source_of_model(value)
    return found if source is None else ["=".join(source)]


def instead_of(argv: Sequence[str], number: int, free_text: Collection[str]) -> str:
    """What to type in place of the word `number` of a command, which sets nothing."""
    word, before = argv[number], argv[:number]
    flag = re.fullmatch(r"--?([a-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)
    if flag is not None:
        name, value = flag[1].replace("-", "_"), flag[2]
        if name not in _at_top():
            return meant(name) or "NAME=VALUE, -m, --cfg job or --help"
        return shlex.quote(f"{name}={value or next(iter(argv[number + 1 :]), 'VALUE')}")
    last = next((at for at in reversed(range(number)) if "=" in before[at]), None)
    if last is not None and before[last].partition("=")[0] in free_text:
        end = next((at for at in range(number, len(argv)) if "=" in argv[at]), len(argv))
        return shlex.quote(" ".join(argv[last:end]))
    return " or ".join(settings_with(word)) or "NAME=VALUE"


def _at_top() -> set[str]:
    """The settings at the top of `conf/config.yaml`, and the groups."""
    groups = {path.name for path in CONF_DIR.iterdir() if path.is_dir()}
    return groups | conf_file("", "config").keys() - {"defaults", "hydra"}

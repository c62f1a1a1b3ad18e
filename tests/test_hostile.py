"""Settings that cannot be, and that somebody has: one line names them."""

import pytest
from hydra.errors import HydraException

from harness.errors import UserError
from harness.launch.cli import in_words
from tests.composed import load

HUGE = 10**30
COUNTS = {
    "seed": -1, "seq_len": 1, "prefill_len": -1, "num_windows": 0, "num_samples": 0, "num_fewshot": -1,
    "max_new_tokens": 0, "batch_size": 0, "prompt_len": 0, "gen_len": 1, "warmup_steps": -1, "timed_steps": 0,
    "repeats": 0, "analysis.num_tokens": 1, "calibration.num_tokens": 0, "corpus.offset_tokens": -1, "model.seed": -1,
}  # fmt: skip
"""Whole numbers, and the first below what is allowed."""
NUMBERS = {
    "size": (0, 1.01, "inf"),
    "link_gbps": (0, -1, "inf", 10**10),
    "max_kl": (0, -1, "inf"),
    "time_limit_s": (0, -1, "inf"),
    "analysis.kept_frac": (0, 1.5, "inf"),
    "platform.link_gbps": (0, -1, 1e-9, "inf"),
    "platform.weights_on_device": (0, 1.5, "inf"),
    "method.alpha": (-1, "1e300", "-inf"),
    "method.max_fetch_frac": (0, 1.5, "inf"),
    "method.partial_weight_ratio": (0, 1.5, "inf"),
}
"""Numbers, and what they cannot be."""
WORDS = (
    "codec", "value_codec", "rotation", "key_groups", "prefill", "scoring", "too_long", "placement",
    "analysis.statistic", "model.weights", "model.dtype", "model.device", "platform.name", "data.name", "corpus.name",
    "kind", "method.name", "method.columns", "method.pool_policy",
)  # fmt: skip
SWITCHES = (
    "reuse", "apply_chat_template", "fewshot_as_multiturn", "model.trust_remote_code", "platform.overlap",
    "platform.pinned", "method.skew",
)  # fmt: skip
PATHS = {"corpus.path": "", "calibration.path": "", "include_path": "", "model.path": "", "data.root": "data=local "}
"""Files and folders that must be there, and the choice that reads them."""

BAD_SETTINGS = [
    *(f"{name}={value}" for name, low in COUNTS.items() for value in (low, HUGE)),
    *(f"{name}={value}" for name, values in NUMBERS.items() for value in (*values, "nan")),
    *(f"{name}={value}" for name in WORDS for value in ("nonsense",)),
    *(f"{name}={value}" for name in SWITCHES for value in ("maybe", 1)),
    *(f"{choice}{name}={value}" for name, choice in PATHS.items() for value in ("", "/nowhere/at/all")),
    *(f"{name}={value}" for name in ("results_dir", "label", "prompt") for value in ("[a,b]",)),
    *(f"results_dir={value}" for value in ("", "null")),
    *(f"{name}={value}" for name in ("metadata", "analysis", "calibration") for value in ("null",)),
    *(f"{name}={value}" for name in ("seq_len", "size", "method.alpha") for value in ("many", "{a:1}")),
    "seq_len=1.5",
    *(f"metadata.max_seq_lengths={value}" for value in (4096, "[]", "[0]", "[1,1]", "[a]", f"[{HUGE}]")),
    *(f"analysis.layers={value}" for value in ("[]", "[-1]", "[1,1]", "[a]", f"[{HUGE}]")),
    *(f"tasks={value}" for value in ("[]", "[passkey,passkey]", "{a:1}", 3)),
    f"num_samples={10**12}",
    "experiment=generate prompt=null",
    "experiment=latency gen_len=4",
    "prefill_len=2000",
    "codec=int4 group_size=0",
    f"codec=int4 method=full residual={HUGE}",
    "seed=???",
]  # fmt: skip


@pytest.mark.parametrize("command", BAD_SETTINGS)
def test_a_setting_that_cannot_be(command):
    name = command.split()[-1].partition("=")[0].partition(".")[0]
    with pytest.raises((UserError, HydraException)) as error:
        load(command.split())
    said = in_words(error.value)
    assert "\n" not in said and (name in said or "experiment" in command), said

"""Settings and rows of data that cannot be, and that somebody has: one line names them."""

import json
import logging
from dataclasses import replace

import datasets
import pytest
from hydra.errors import HydraException
from test_tasks import FILES, ROWS, loaded, root, settings  # noqa: F401, fixtures

from harness.accuracy.evaluation import run_tasks
from harness.errors import UserError
from harness.launch.cli import in_words
from harness.settings.config import DataConfig
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


# Rows

COPA = ROWS["copa"]
BAD_ROWS = {
    "a label in words": ("copa", COPA | {"label": "1"}, "field 'label' holds text, but a number in line 1"),
    "a label of no choice": ("copa", COPA | {"label": 2}, "field 'label' is 2; allowed: 0, 1"),
    "no label": ("copa", COPA | {"label": None}, "field 'label' is None; allowed: 0, 1"),
    "a choice that is empty": ("copa", COPA | {"choice1": ""}, "no prompt can be made of it (IndexError"),
    "a choice that is a number": ("copa", COPA | {"choice1": 3}, "field 'choice1' holds a number, but text in line 1"),
    "a list": ("copa", [1], "expected an object"),
    "too many fields": ("copa", COPA | dict.fromkeys(map(str, range(1000)), 0), "1,006 fields; allowed: up to 1,000"),
    "no UTF-8": ("copa", b'{"premise": "\xff"}', "not JSON, 'utf-8' codec can't decode"),
    "a number that is none": ("copa", b'{"premise": NaN}', "not JSON, which has no NaN"),
    "cut short": ("copa", b'{"premise": "cut', "not JSON, Unterminated string"),
    "winogrande, a third": ("winogrande", ROWS["winogrande"] | {"answer": "3"}, "no prompt can be made of it"),
    "openbookqa, another key": ("openbookqa", ROWS["openbookqa"] | {"answerKey": "Z"}, "no prompt can be made of it"),
    "arc, an empty choice": (
        "arc_easy",
        ROWS["arc_easy"] | {"choices": {"text": ["ice", ""], "label": ["A", "B"]}},
        "its choices are ['ice', '']; must be texts, none of them empty",
    ),
}  # fmt: skip
"""The fourth row of a file, and what is said of it."""


@pytest.mark.parametrize("case", BAD_ROWS)
def test_an_odd_row_is_named_by_file_and_line(case, root, loaded):  # noqa: F811
    task, row, message = BAD_ROWS[case]
    path = root / FILES[task][-1]
    lines = path.read_bytes().splitlines()
    lines[3] = row if isinstance(row, bytes) else json.dumps(row).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(UserError) as error:
        run_tasks(settings(task, root=root), loaded)
    said = str(error.value)
    assert said.startswith(f"{path}, line 4: ") and message in said and "\n" not in said


def test_an_example_that_is_shown_is_checked_too(root, loaded):  # noqa: F811
    path = root / FILES["piqa"][0]
    path.write_text("\n".join(json.dumps(ROWS["piqa"] | {"label": -1, "goal": f"To {n}"}) for n in range(8)))
    with pytest.raises(UserError, match=r"train.jsonl, line \d: tasks=piqa: its answer -1 is none of its 2 choices"):
        run_tasks(settings("piqa", root=root), loaded)
    run_tasks(settings("piqa", root=root, num_fewshot=0, num_samples=1), loaded)


@pytest.mark.parametrize("labels", [[0, 1, -1], [0, 1, 1]])
def test_a_split_of_the_hub_without_labels_is_named(labels, loaded, monkeypatch):  # noqa: F811
    features = datasets.Features({name: datasets.Value("string") for name in COPA if name != "label"})
    features["label"] = datasets.ClassLabel(names=["choice1", "choice2"])
    rows = datasets.Dataset.from_list([COPA | {"label": label} for label in labels], features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name: {"train": rows.select([0, 1]), "validation": rows})
    config = settings("copa", data=DataConfig("hub"), num_fewshot=0, num_samples=None)
    if -1 in labels:
        said = r"^data=hub: aps/super_glue, split validation, row 2: tasks=copa: has no label \(-1\)"
        with pytest.raises(UserError, match=said):
            run_tasks(config, loaded)
    else:
        assert run_tasks(config, loaded).metrics["copa"]["num_samples"] == 3
    with pytest.raises(UserError, match="^num_fewshot=2: copa has 2 rows of its split train in data=hub"):
        run_tasks(replace(config, num_fewshot=2), loaded)


def test_what_lm_eval_warns_of_is_one_line_once(root, loaded, capsys):  # noqa: F811
    logger = logging.getLogger("lm_eval.api.task")
    logger.warning("metric acc is defined, but aggregation is not. using default")
    logger.warning("Using test_docs\nas examples of %s", "this test")
    logger.warning("Using test_docs\nas examples of %s", "this test")
    for _ in range(2):
        run_tasks(settings("kv_recall", num_samples=1), loaded)
    assert capsys.readouterr().err.count("lm-eval: Using test_docs as examples of this test\n") == 1

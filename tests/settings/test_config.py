"""Every file under conf/ composes; every wrong setting is refused in one line that names it."""

import dataclasses
import re

import pytest
from omegaconf import OmegaConf

from harness.errors import UserError
from harness.results.record import flat
from harness.run.compose import OF_THE_FILE, compose, load, parse, resolved
from harness.run.runner import check
from harness.settings.config import PAPER_TASKS, RunConfig
from harness.settings.kinds import COMMON, KINDS, find, foreign_settings
from harness.settings.schema import CONF_DIR, conf_file, options, shipped
from methods.settings import settings_of

NEEDED = {
    "local": ["data.root=."], "capacity": ["platform.device_gib=1"],
    "uvm": ["platform=cuda"], "uvm+h2o": ["platform=cuda"],
}  # fmt: skip
"""What a file of conf/ cannot do without."""


@pytest.mark.parametrize(
    ("group", "choice"),
    [
        (path.parent.name, path.stem)
        for path in sorted(CONF_DIR.glob("*/*.yaml"))
        if path.parent.name != "method"  # each below
        and "kind: modelled" not in path.read_text()
        and (path.parent.name != "experiment" or "\nkind: " in path.read_text())
    ],
)
def test_every_choice_composes(group, choice):
    timed = ["experiment=latency"] if group == "system" else []
    config = load([f"{group}={choice}", *timed, *NEEDED.get(choice, [])])
    chosen = {"experiment": config.experiment, "system": config.label}
    assert chosen.get(group) or getattr(config, group).name == choice
    assert group != "model" or config.model.shape["model_type"]
    said = OmegaConf.load(CONF_DIR / group / f"{choice}.yaml").get("experiment", choice)  # figures of speed share one
    assert chosen.get(group, said) == said


@pytest.mark.parametrize("choice", options("method"))
def test_a_method_file_holds_what_it_changes_of_settings_with_a_meaning_and_a_range(choice):
    file = conf_file("method", choice)
    changes = {key: value for key, value in file.items() if key not in ("name", *OF_THE_FILE)}
    config = load([f"method={choice}"])
    method = config.method
    defaults = {setting.name: setting.default for setting in settings_of(type(method))}
    assert config.method_name == choice
    assert changes.keys() <= defaults.keys()
    assert [name for name, value in changes.items() if value == defaults[name]] == []
    assert shipped(choice)[1].keys() == {"name", *file, *defaults}
    for setting in settings_of(type(method)):
        assert setting.meaning, setting.name
        if setting.allowed is None:
            continue
        outside = "nothing" if setting.allowed.words.startswith("one of") else -7
        refusal = f"method.{setting.name}={outside}: must be {setting.allowed.words}"
        with pytest.raises(ValueError, match=re.escape(refusal)):
            dataclasses.replace(method, **{setting.name: outside})


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        (["method=int4", "codec=int4"], "INT4"),
        (["method=infinigen", "method.skew=false", "codec=fp16"], "InfiniGen without skewing + fp16"),
        (["method=h2o", "label=mine"], "mine"),
        (["method=kivi", "residual=32"], "KIVI + channel-int2/int2-r32"),
        (["method=int4-hadamard"], "INT4 (Hadamard)"),
        (["method=infinigen", "codec=int4", "value_codec=int2", "rotation=hadamard"], "InfiniGen + hadamard-int4/int2"),
    ],
)
def test_a_run_without_a_label_is_named_after_its_method(overrides, label):
    config = load(overrides)
    assert (config.label, config.label_given) == (label, "label=mine" in overrides)


@pytest.mark.parametrize(
    ("words", "name", "label"),
    [
        ("codec=int8", "int8", "INT8"),
        ("codec=int8 group_size=16", "int8", "INT8"),
        ("codec=q4_0", "full", "Full cache + q4_0"),  # as llama.cpp's without its rotation
        ("codec=int4 key_groups=channel residual=128 group_size=32", "kivi4", "KIVI-4"),
        ("codec=int4 experiment=latency", "full", "offload+int4"),
        ("codec=int4 experiment=latency placement=device", "int4", "full+int4 (device)"),
    ],
)
def test_the_full_cache_in_a_named_format_has_its_name(words, name, label):
    """So that its rows are those of `method=NAME`; a system keeps its method."""
    config = load(["method=full", *words.split()])
    assert (config.method_name, config.label) == (name, label)
    if "group_size=16" not in words and name != "full":
        others = [word for word in words.split() if word.startswith(("experiment", "placement"))]
        assert config == load([f"method={name}", *others])


def test_the_platform_decides_device_and_precision():
    chosen = ["model=opt-6.7b"]
    on_cpu, on_cuda = (load([*chosen, f"platform={name}"]).model for name in ("cpu", "cuda"))
    assert (on_cpu.device, on_cpu.dtype) == ("cpu", "float32")
    assert (on_cuda.device, on_cuda.dtype) == ("cuda", "float16")
    assert load([*chosen, "platform=cuda", "model.dtype=bfloat16"]).model.dtype == "bfloat16"
    for dtype in ("float32", "float16", "bfloat16"):  # what the user says is computed in, on a CPU too
        assert load([*chosen, f"model.dtype={dtype}"]).model.dtype == dtype


# kinds of run


def test_a_kind_depends_on_settings_that_exist():
    names = {field.name for field in dataclasses.fields(RunConfig)}
    shown = {"label", "label_given", "results_dir"}
    depends = {kind: {*COMMON, *find(kind).depends_on} for kind in KINDS}
    printed = {"advise", "prompt", "thorough"}  # of kinds that keep no record
    assert set().union(*depends.values()) == names - shown - printed
    for kind, settings in depends.items():
        assert foreign_settings(kind) == names - settings
        assert all((CONF_DIR.parent / "harness" / name).exists() for name in find(kind).code)


def test_yaml_defaults_are_the_dataclass_defaults():
    """The shape is a model's own, and the device the platform's."""
    config = load()
    for node in (config, config.model, config.data, config.corpus, config.calibration):
        for field in dataclasses.fields(node):
            if field.default is not dataclasses.MISSING and field.name not in ("shape", "device"):
                assert getattr(node, field.name) == field.default, f"{type(node).__name__}.{field.name}"


def test_default_tasks_follow_the_data():
    assert load(["tasks='passkey, kv_recall'"]).tasks == ("passkey", "kv_recall")
    assert load(["tasks=passkey"]).tasks == ("passkey",)
    assert load().tasks == ("kv_recall", "passkey")
    assert load(["data=hub"]).tasks == load(["data=local", "data.root=."]).tasks == PAPER_TASKS


@pytest.mark.parametrize(
    ("given", "task", "prefill", "num_samples"),
    [("", "passkey", "question", 128), ("", "rte", "artifact", None), ("budget=0.2", "copa", "dense", None),
     ("prefill=dense num_samples=3", "rte", "dense", 3), ("method=fp8", "copa", "artifact", None),
     ("budget=nearest:0.2", "copa", "dense", None), ("method=fp8 budget=nearest:0.2", "copa", "dense", None),
     ("budget=0.2 prefill=question", "copa", "question", None), ("method=full budget=0.2", "copa", "artifact", None)],
)  # fmt: skip
def test_automatic_settings_of_a_task(given, task, prefill, num_samples):
    """A budget does not move a dense prompt's end; the full cache has none, whose scores do not depend on it."""
    config = load(["experiment=tasks", "method=h2o", *given.split()])
    assert (config.prefill_of(task), config.num_samples_of(task)) == (prefill, num_samples)


def test_a_given_source_replaces_name_and_shape(tmp_path):
    (folder := tmp_path / "My-Model.v2").mkdir()
    model = load(["model=opt-6.7b", f"model.path={folder}"]).model
    assert (model.name, model.path, model.hub_id, model.shape) == ("My-Model.v2", str(folder), None, None)
    model = load(["model=llama2-7b", "model.hub_id=org/other"]).model
    assert (model.name, model.hub_id, model.shape) == ("other", "org/other", None)
    assert load(["model.hub_id=org/other", "model.name=mine"]).model.name == "mine"
    kept = load(["model=llama2-7b", "model.hub_id=null", "model.weights=random"]).model
    assert kept.name == "llama2-7b" and kept.shape is not None


@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m"])
def test_a_copy_of_the_file_that_an_entry_names_is_that_model(name, tmp_path):
    entry = load([f"model={name}"]).model
    path = tmp_path / str(entry.gguf_file)
    path.touch()
    copy = load([f"model={name}", f"model.path={path}"]).model
    assert copy == dataclasses.replace(entry, path=str(path), hub_id=None, gguf_file=None)
    assert load([f"model.path={path}"]).model.name == path.stem


REFUSED = {
    "platform=a6000-pcie3": "platform=a6000-pcie3: is modelled, nothing runs there",
    "experiment=accuracy": "experiment=accuracy: its runs are of other experiments",
    "experiment=contract budget=0.5": "budget=0.5: plays no part in kind=contract; leave it out",
    "method=infingen": "method=infingen: did you mean 'infinigen' or",
    "experiment=tasks tasks=[piqua]": "tasks=piqua: did you mean 'piqa'",
    "experiment=tasks tasks=[piqa]": "tasks=piqa: data=offline has kv_recall, passkey",
    "data=local": "data=local: needs data.root=DIR",
    "data.root=/tmp": "data.root=/tmp: is read by data=local only",
    "method.hevy_frac=1 method=h2o": "unknown setting method.hevy_frac: did you mean 'heavy_frac'",
    "model.dtpe=float32": "unknown setting model.dtpe: did you mean 'dtype'?",
    "model.gguf_file=m.gguf": "model.gguf_file=m.gguf: needs model.hub_id=, or model.path= of its folder",
    "model.hub_id=a/b model.gguf_file=m.bin": "model.gguf_file=m.bin: must be the name of a .gguf file",
    "model.path=/tmp model.hub_id=a/b": "model.path=/tmp and model.hub_id=a/b: give one of them",
    "method.alpha=-1": "method.alpha=-1.0: must be a number >= 0, inf or null",
    "method=full method._target_=methods.h2o.H2O": "unknown setting method._target_: ",
    "group_size=32": "group_size=32: codec=None has no groups; choose an integer codec",
    "value_codec=int8": "value_codec=int8: needs codec=, the format of the keys",
    "codec=fp32 value_codec=int8 group_size=32": None,
    "rotation=hadamard": "rotation=hadamard: codec=None is not turned; choose an integer codec",
    "method=kivi residual=100": "residual=100: must be a multiple of group_size=32, above 0, with key_groups=channel",
    "method=kivi key_groups=token": "key_groups=token contradicts method=kivi: leave it out, or method=full",
    "method=kivi group_size=64 residual=192 value_codec=int4": None,
    "method=full codec=fp8 key_groups=channel": "key_groups=channel: codec=fp8 has no groups",
    "method=h2o codec=int4 key_groups=channel residual=64": "residual=64: method=h2o does not read all that is cached",
    "method=full codec=kvarn4": "residual=0: must be a multiple of group_size=64, above 0, with codec=kvarn4",
    "method=full codec=int4 value_codec=kvarn2 residual=64": None,
    "method=full codec=int4 codec_layers=[3:gtq3] residual=32": "residual=32: must be a multiple of group_size=64,",
    "method=full codec=q4_0 rotation=hadamard": None,
    "method=full codec=kvarn4 residual=64 rotation=hadamard": "rotation=hadamard: codec=kvarn4 is not turned",
    "residual=8": "residual=8: codec=None leaves no token behind; choose an integer codec",
    "codec=int4 codec_layers=[2-3:int8,29-:fp16/int2]": None,
    "codec_layers=[4:int8]": "codec_layers=[4:int8]: needs codec=, the format of other layers; fp32 is exact",
    "codec=int4 codec_layers=[4-2:int8]": "codec_layers=[4-2:int8]: layer 2 lies before layer 4",
    "codec=int4 codec_layers=[4-9:int8,9:fp16]": "codec_layers=[9:fp16]: layer 9 is in 4-9:int8 too; name it once",
    "codec=int4 codec_layers=[4:int3]": "codec_layers=[4:int3]: int3: did you mean ",
    "codec=int4 codec_layers=[4:int8/./mine.py]": "codec_layers=[4:int8/./mine.py]: must be LAYERS:CODEC, such as",
    "codec=int4 codec_layers=[int8]": "codec_layers=[int8]: must be LAYERS:CODEC, such as 0-1:int8, 5:fp16, 28-:int8",
    "codec=int4 codec_layers=[]": "codec_layers=[]: must name at least one, and none twice",
    "codec=int4 codec_layers=[0-1:int8]": "codec_layers=[0-1:int8]: method.dense_layers=2 leaves these layers as",
    "codec=int4 codec_layers=[0-1:int8] method.dense_layers=1": None,
    "model.device=cuda": "model.device=cuda: contradicts platform=cpu",
    "platform=cuda model.device=cpu": "model.device=cpu: contradicts platform=cuda",
    "platform.weights_on_device=0.7": "platform.weights_on_device=0.7: experiment=perplexity decodes through no link",
    "method=full codec=int4 budget=50%": "budget=0.5: ",
    "budget=10%": None,
    "budget=nearest:10%": None,
    "budget=110%": "budget=110%: must be a share of the full cache such as 0.16",
    "prefill_len=1024": "seq_len=1024: must be at least 1026 with prefill_len=1024",
    "prefill_len=0": "prefill_len=0: must be at least 1 under a method",
    "kind=latency": "kind=latency: its rows are none of experiment=perplexity's table; choose an experiment of that",
    "label=true": None,
    "seed=true": "seed=True: must be a whole number",
    "~seed": "~seed: must be NAME=VALUE",
    "+metadata.max_new=3": None,
    "metadata.max_new=3": "unknown setting metadata.max_new: did you mean 'max_gen_toks'",
    "num_windows.more=3": "unknown setting num_windows.more: ",
}


@pytest.mark.parametrize("command", REFUSED)
def test_refuses_that_and_no_more(command):
    if REFUSED[command] is None:
        load(command.split())
        return
    with pytest.raises(UserError) as error:
        config = load(command.split())
        check(config)
    said = str(error.value)
    assert said.startswith(REFUSED[command]) and "\n" not in said


# Values that cannot be

BAD_SETTINGS = [
    "seed=-1", "seq_len=1", "seq_len=1.5", "num_windows=0", "num_samples=0", f"num_samples={10**12}", "gen_len=1",
    *(f"budget={value}" for value in (0, 1.01, "inf", "nan")),
    *(f"platform.link_gbps={value}" for value in (0, -1, 1e-9, "inf", "nan")),
    *(f"platform.weights_on_device={value}" for value in (0, 1.5, "nan")),
    *(f"method.alpha={value}" for value in (-1, "-inf", "nan")),
    *(f"method.budget={value}" for value in (0, 1.5, "inf", "nan")),
    *(f"gpu_cache={value}" for value in ("maybe", -1, "nan", "inf")),
    *(f"{name}={value}" for name in ("corpus.path", "model.path", "include_path") for value in ("", "/nowhere")),
    *(f"results_dir={value}" for value in ("", "null")),
    *(f"{name}=null" for name in ("metadata", "analysis", "calibration")),
    *(f"metadata.max_seq_lengths={value}" for value in (4096, "[]", "[0]", "[1,1]", "[a]")),
    *(f"tasks={value}" for value in ("[]", "[passkey,passkey]", "{a:1}", 3)),
    *(f"metadata.places={value}" for value in (5, 81)),
    "experiment=generate prompt=null",
    "experiment=latency gen_len=4",
    "prefill_len=2000",
    "codec=int4 group_size=0",
    "seed=???",
]  # fmt: skip


@pytest.mark.parametrize("command", BAD_SETTINGS)
def test_a_value_that_cannot_be_is_refused_in_one_line_that_names_its_setting(command):
    name = command.split()[-1].partition("=")[0].partition(".")[0]
    with pytest.raises(UserError) as error:
        load(command.split())
    said = str(error.value)
    assert "\n" not in said and (name in said or "experiment" in command), said


def test_every_setting_refuses_a_wrong_type():
    keys = flat(resolved(compose()))
    others = ("sweep.", "model.shape.", "method.name")
    for key in ("model.shape", *(key for key in keys if not key.startswith(others))):
        config = compose()
        OmegaConf.update(config, key, [["a"], {"b": 1}] if key != "model.shape" else "square", merge=False)
        with pytest.raises(UserError, match=f"^{re.escape(key)}"):
            parse(resolved(config), {"model.dtype"})

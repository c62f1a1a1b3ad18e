"""Every file under conf/ composes; every wrong setting is refused in one line that names it."""

import dataclasses
import math
import re
import subprocess
import sys

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from harness.errors import UserError, nearest
from harness.launch.cli import in_words
from harness.settings.compose import OF_THE_FILE, parse
from harness.settings.config import PAPER_TASKS, RunConfig
from harness.settings.experiment import COMMON, Experiment, find, foreign_settings, kinds
from harness.settings.schema import CONF_DIR, options
from tests.composed import composed, load

QUANTIZED = ("int8", "int4", "int2", "int1")
PRESETS = ("adakv", "freekv", "infinigen-balanced", "infinigen-coded", "pyramidkv")
"""Other settings of a method, worth a name."""
HADAMARD = ("int4-hadamard", "int2-hadamard")
MODELLED = [path.stem for path in sorted(CONF_DIR.glob("platform/*.yaml")) if "kind: modelled" in path.read_text()]


def given(group: str, choice: str, folder) -> list[str]:
    """The overrides that choose one file of conf/, with what it cannot do without."""
    needed = {"local": [f"data.root={folder}"], "frontier": ["link_gbps=25", "max_kl=0.05"]}
    return [f"{group}={choice}", *needed.get(choice, [])]


@pytest.mark.parametrize(
    ("group", "choice"),
    [
        (path.parent.name, path.stem)
        for path in sorted(CONF_DIR.glob("*/*.yaml"))
        if path.parent.name not in ("grid", "cluster") and "kind: modelled" not in path.read_text()
    ],
)
def test_every_choice_composes(group, choice, tmp_path):
    config = load(given(group, choice, tmp_path))
    chosen = {"method": config.method_name, "experiment": config.experiment}
    assert chosen.get(group) or getattr(config, group).name == choice
    said = OmegaConf.load(CONF_DIR / group / f"{choice}.yaml").get("experiment", choice)  # figures of speed share one
    assert chosen.get(group, said) == said


@pytest.mark.parametrize("choice", options("method"))
def test_method_file_lists_every_setting_with_its_default(choice):
    """Each default is written twice, for Hydra and for Python; they must agree, but where a preset has its own."""
    node = OmegaConf.load(CONF_DIR / "method" / f"{choice}.yaml")
    settings = {key: value for key, value in node.items() if key not in ("name", *OF_THE_FILE)}
    defaults = dataclasses.asdict(type(load([f"method={choice}"]).method)())
    assert settings.keys() == defaults.keys()
    assert settings == defaults or choice in PRESETS


@pytest.mark.parametrize("choice", PRESETS)
def test_a_preset_has_a_label_of_its_own(choice):
    config = load([f"method={choice}"])
    assert config.method != type(config.method)()
    assert config.label != type(config.method)().label


@pytest.mark.parametrize("choice", QUANTIZED)
def test_a_preset_is_a_method_with_a_codec_and_a_title(choice):
    config = load([f"method={choice}", "group_size=32"])
    assert (config.method, config.method_name) == (load(["method=full"]).method, choice)
    assert (config.codec, config.group_size, config.label) == (choice, 32, choice.upper())


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        (["method=full"], "Full cache"),
        (["method=full", "codec=int4"], "Full cache + int4"),
        (["method=int4", "codec=int4"], "INT4"),
        (["method=infinigen", "method.skew=false"], "InfiniGen without skewing"),
        (["method=infinigen", "method.skew=false", "codec=fp16"], "InfiniGen without skewing + fp16"),
        (["method=h2o", "label=mine"], "mine"),
        (["method=kivi"], "KIVI"),
        (["method=kivi", "residual=32"], "KIVI + channel-int2/int2-r32"),
        (["method=full", "codec=int8", "residual=5"], "Full cache + int8-r5"),
        (["method=fp8"], "FP8"),
        (["method=int4-hadamard"], "INT4 (Hadamard)"),
        (["method=int4", "rotation=hadamard"], "INT4 + hadamard-int4"),
        (["method=infinigen", "codec=int4", "value_codec=int2", "rotation=hadamard"], "InfiniGen + hadamard-int4/int2"),
    ],
)
def test_a_run_without_a_label_is_named_after_its_method(overrides, label):
    config = load(overrides)
    assert (config.label, config.label_given) == (label, "label=mine" in overrides)


@pytest.mark.parametrize("platform", MODELLED)
@pytest.mark.parametrize("experiment", ["perplexity", "tasks", "long_decode", "latency", "fig5"])
def test_nothing_runs_on_a_modelled_platform(platform, experiment):
    with pytest.raises(UserError, match=f"^platform={platform}: is modelled, nothing runs there"):
        load([f"experiment={experiment}", f"platform={platform}"])


@pytest.mark.parametrize("experiment", ["perplexity", "tasks", "latency", "generate", "fig5"])
def test_the_platform_decides_device_and_precision(experiment):
    chosen = [f"experiment={experiment}", "model=opt-6.7b"]
    on_cpu, on_cuda = (load([*chosen, f"platform={name}"]).model for name in ("cpu", "cuda"))
    assert (on_cpu.device, on_cpu.dtype) == ("cpu", "float32")
    assert (on_cuda.device, on_cuda.dtype) == ("cuda", "float16")
    assert load([*chosen, "platform=cuda", "model.dtype=bfloat16"]).model.dtype == "bfloat16"
    for dtype in ("float32", "float16", "bfloat16"):  # what the user says is computed in, on a CPU too
        assert load([*chosen, f"model.dtype={dtype}"]).model.dtype == dtype


# kinds of run


def test_a_kind_is_a_module_and_heeds_settings_that_there_are():
    names = {field.name for field in dataclasses.fields(RunConfig)}
    shown = {"label", "label_given", "results_dir", "tracker"}
    heeded = {kind: {*COMMON, *find(kind).depends_on} for kind in kinds()}
    assert set().union(*heeded.values()) == names - shown
    for kind, settings in heeded.items():
        assert foreign_settings(kind) == names - settings
        assert all((CONF_DIR.parent / "harness" / name).exists() for name in find(kind).code)


def test_a_new_kind_is_one_class(monkeypatch):
    """It is found by its name in `KINDS`, checks and names what it depends on."""

    class Counting(Experiment):
        depends_on = ("seed",)

        def check(self, config):
            if config.seed == 7:
                raise UserError("seed=7: must not be")

    monkeypatch.setitem(kinds(), "counting", Counting())
    assert load(["kind=counting"]).kind == "counting"
    assert "seq_len" in foreign_settings("counting") and "seed" not in foreign_settings("counting")
    with pytest.raises(UserError, match="seed=7: must not be"):
        load(["kind=counting", "seed=7"])


def test_yaml_defaults_are_the_dataclass_defaults():
    """The shape is a model's own, and the device the platform's."""
    config = load()
    for node in (config, config.model, config.data, config.corpus, config.calibration):
        for field in dataclasses.fields(node):
            if field.default is not dataclasses.MISSING and field.name not in ("shape", "device"):
                assert getattr(node, field.name) == field.default, f"{type(node).__name__}.{field.name}"


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=infinigen", "model=llama2-7b"],
        ["method=infinigen", "method.alpha=inf", "method.skew=false", "method.columns=union"],
        ["method=oracle", "size=0.16"],
        ["method=h2o", "method.heavy_frac=0", "method.recent_frac=1"],
        ["codec=int4", "method=infinigen"],
        ["method=full", "prefill_len=0"],
        ["experiment=fig11", "kind=perplexity"],
    ],
)
def test_accepts(overrides):
    load(overrides)


def test_number_of_infinite_alpha():
    assert load(["method.alpha=inf"]).method.alpha == math.inf


@pytest.mark.parametrize("spelled", ["tasks=[passkey,kv_recall]", "tasks='passkey, kv_recall'"])
def test_task_lists(spelled):
    assert load([spelled]).tasks == ("passkey", "kv_recall")


def test_one_task_needs_no_brackets(tmp_path):
    assert load(["tasks=passkey"]).tasks == ("passkey",)


def test_default_tasks_follow_the_data(tmp_path):
    assert load().tasks == ("kv_recall", "passkey")
    assert load(["data=hub"]).tasks == load(["data=local", f"data.root={tmp_path}"]).tasks == PAPER_TASKS


def test_automatic_settings_of_a_task():
    config = load(["experiment=tasks", "data=hub", "tasks=[passkey,rte]"])
    assert [config.prefill_of(task) for task in config.tasks] == ["question", "artifact"]
    assert [config.num_samples_of(task) for task in config.tasks] == [128, None]
    config = load(["experiment=tasks", "data=hub", "tasks=[passkey,rte]", "prefill=dense", "num_samples=3"])
    assert [config.prefill_of(task) for task in config.tasks] == ["dense", "dense"]
    assert [config.num_samples_of(task) for task in config.tasks] == [3, 3]


def test_codec_names_are_those_of_the_codec():
    from methods.codec import CODEC_NAMES

    with pytest.raises(UserError) as refused:
        load(["codec=int3"])
    assert str(refused.value).endswith("allowed: " + ", ".join(CODEC_NAMES))


def test_a_given_path_replaces_source_name_and_shape(tmp_path):
    folder = tmp_path / "My-Model.v2"
    folder.mkdir()
    model = load(["model=opt-6.7b", f"model.path={folder}"]).model
    assert (model.name, model.path, model.hub_id, model.shape) == ("My-Model.v2", str(folder), None, None)
    gguf = tmp_path / "m.Q4.gguf"
    gguf.touch()
    assert load([f"model.path={gguf}"]).model.name == "m.Q4"


def test_a_copy_of_the_file_that_an_entry_names_is_that_model(tmp_path):
    entry = load(["model=qwen2.5-coder-0.5b"]).model
    path = tmp_path / str(entry.gguf_file)
    path.touch()
    copy = load(["model=qwen2.5-coder-0.5b", f"model.path={path}"]).model
    assert copy == dataclasses.replace(entry, path=str(path), hub_id=None, gguf_file=None)
    assert load([f"model.path={path}"]).model.name == path.stem


def test_a_given_hub_id_replaces_source_name_and_shape():
    model = load(["model=llama2-7b", "model.hub_id=org/other"]).model
    assert (model.name, model.hub_id, model.shape) == ("other", "org/other", None)
    assert load(["model.hub_id=org/other", "model.name=mine"]).model.name == "mine"
    kept = load(["model=llama2-7b", "model.hub_id=null", "model.weights=random"]).model
    assert kept.name == "llama2-7b" and kept.shape is not None


REFUSED = {
    "method=infingen": "method=infingen: did you mean 'infinigen' or",
    "model=lama2-7b": "model=lama2-7b: did you mean 'llama2-7b'",
    "experiment=fig1": "experiment=fig1: did you mean 'fig1",
    "experiment=tasks tasks=[piqua]": "tasks=piqua: did you mean 'piqa'",
    "experiment=tasks tasks=[piqa]": "tasks=piqa: data=offline has kv_recall, passkey",
    "experiment=tasks tasks=[]": "tasks=[]: must name at least one",
    "tasks=[passkey,passkey]": "tasks=[passkey,passkey]: must name at least one task, and none twice",
    "data=locl": "data=locl: did you mean 'local'?",
    "data=local": "data=local needs data.root=DIR",
    "data=local data.root=/nowhere": "data.root=/nowhere: no such folder",
    "data.root=/tmp": "data.root=/tmp is read by data=local only",
    "corpus=wikitext": "corpus=wikitext: did you mean 'wikitext2'?",
    "corpus.path=/nowhere.txt": "corpus.path=/nowhere.txt: no such file",
    "corpus.offset_tokens=-1": "corpus.offset_tokens=-1: must be at least 0",
    "calibration.path=/nowhere.txt": "calibration.path=/nowhere.txt: no such file",
    "calibration.num_tokens=0": "calibration.num_tokens=0: must be at least 1",
    "method.hevy_frac=1 method=h2o": "unknown setting method.hevy_frac: did you mean 'heavy_frac'",
    "+method.hevy_frac=1 method=h2o": "unknown setting method.hevy_frac: did you mean 'heavy_frac'",
    "seq_length=8": "unknown setting seq_length: did you mean 'seq_len' or 'gen_len'?",
    "+seq_length=8": "unknown setting seq_length: did you mean 'seq_len'?",
    "model.dtpe=float32": "unknown setting model.dtpe: did you mean 'dtype'?",
    "model.dtype=float8": "model.dtype=float8: did you mean 'float",
    "model.path=/nowhere": "model.path=/nowhere: no such file or folder",
    "model.gguf_file=m.gguf": "model.gguf_file=m.gguf: needs model.hub_id=, or model.path= of its folder",
    "model.hub_id=a/b model.gguf_file=m.bin": "model.gguf_file=m.bin: must be the name of a .gguf file",
    "model.path=/tmp model.hub_id=a/b": "model.path=/tmp and model.hub_id=a/b: give one of them",
    "method=h2o method.heavy_frac=2": "method.heavy_frac=2.0: must be in [0, 1]",
    "method=h2o method.heavy_frac=nan": "method.heavy_frac=nan: must be a number",
    "method=h2o method.heavy_frac=lots": "method.heavy_frac=lots: must be a number",
    "method=streaming method.kept_frac=0": "method.kept_frac=0.0: must be in (0, 1]",
    "method=streaming method.kept_frac=1.1": "method.kept_frac=1.1: must be in (0, 1]",
    "method.max_fetch_frac=0": "method.max_fetch_frac=0.0: must be in (0, 1]",
    "method.partial_weight_ratio=0": "method.partial_weight_ratio=0.0: must be in (0, 1]",
    "method.columns=sums": "method.columns=sums",
    "method.alpha=-1": "method.alpha=-1.0: must be a number >= 0, inf or null",
    "method.num_exempt_layers=-1": "method.num_exempt_layers=-1: must be an integer >= 0",
    "method=full method.num_exempt_layers=-1": "method.num_exempt_layers=-1: must be",
    "method=h2o": None,
    "method=int4 method.num_bits=3": "unknown setting method.num_bits: ",
    "method=int4 method.codec=int8": "method.codec=int8: method=int4 has int4; choose another by method=NAME",
    "method=int4 method.title=Best": "method.title=Best: method=int4 has INT4",
    "method=full method._target_=methods.h2o.H2O": "method._target_=methods.h2o.H2O: method=full has methods.full.Full",
    "method=h2o method.name=full": "method._target_=methods.h2o.H2O: method=full has methods.full.Full",
    "method.name=h20": "method.name=h20: did you mean 'h2o'?",
    "group_size=0": "group_size=0: must be at least 1",
    "group_size=32": "group_size=32: codec=None has no groups; choose an integer codec",
    "codec=fp16 group_size=32": "group_size=32: codec=fp16 has no groups",
    "codec=int8 group_size=32": None,
    "value_codec=int8": "value_codec=int8: needs codec=, the format of the keys",
    "codec=fp32 value_codec=int8 group_size=32": None,
    "rotation=hadamard": "rotation=hadamard: codec=None is not turned; choose an integer codec",
    "codec=fp8 rotation=hadamard": "rotation=hadamard: codec=fp8 is not turned; choose an integer codec",
    "codec=int4 value_codec=fp16 rotation=hadamard": "rotation=hadamard: codec=int4/fp16 is not turned",
    "codec=int4 rotation=turn": "rotation=turn: allowed: hadamard",
    "method=int4-hadamard method.rotation=null": "method.rotation=None: method=int4-hadamard has hadamard",
    "method=kivi residual=100": "residual=100: must be a multiple of group_size=32, above 0, with key_groups=channel",
    "method=kivi residual=0": "residual=0: must be a multiple of group_size=32, above 0",
    "method=kivi key_groups=token": "key_groups=token contradicts method=kivi: leave it out, or method=full",
    "method=kivi codec=int8": "codec=int8 contradicts method=kivi",
    "method=kivi group_size=64 residual=192 value_codec=int4": None,
    "method=full codec=fp8 key_groups=channel": "key_groups=channel: codec=fp8 has no groups",
    "method=h2o codec=int4 key_groups=channel residual=64": "residual=64: method=h2o does not read all that is cached",
    "method=quest codec=int4 residual=1": "residual=1: method=quest does not read all that is cached",
    "residual=8": "residual=8: codec=None leaves no token behind; choose an integer codec",
    "codec=int4 residual=-1": "residual=-1: must be at least 0",
    "codec=int4 key_groups=row": "key_groups=row: allowed: token, channel",
    "method=fp8 group_size=32": "group_size=32: codec=fp8 has no groups",
    "model.device=cuda": "model.device=cuda: contradicts platform=cpu",
    "platform=cuda model.device=cpu": "model.device=cpu: contradicts platform=cuda",
    "platform.weights_on_device=0.7": "platform.weights_on_device=0.7: experiment=perplexity decodes through no link",
    "experiment=fig12 platform.weights_on_device=0.7": (
        "platform.weights_on_device=0.7: experiment=fig12 decodes through no link; leave it out"
    ),
    "platform=cuda platform.name=gpu": "platform.name=gpu: did you mean 'cpu'?",
    "model.dtype=int8": "model.dtype=int8: allowed: float32, float16, bfloat16",
    "model=opt-6.7b": None,
    "method=int4 codec=int8": "codec=int8 contradicts method=int4",
    "method=int4 codec=int4": None,
    "size=0": "size=0: must be above 0 and at most 1",
    "size=1.01": "size=1.01: must be above 0 and at most 1",
    "method=full size=0.5": "size=0.5: ",
    "seq_len=1": "seq_len=1: must be at least 2",
    "seq_len=1.5": "seq_len=1.5: must be a whole number",
    "prefill_len=1024": "prefill_len=1024, seq_len=1024: seq_len must be at least 1026",
    "prefill_len=-1": "prefill_len=-1: must be at least 0",
    "prefill_len=0": "prefill_len=0: must be at least 1, infinigen",
    "num_windows=0": "num_windows=0: must be at least 1",
    "num_samples=0": "num_samples=0: must be at least 1",
    "num_fewshot=-1": "num_fewshot=-1: must be at least 0",
    "seed=-1": "seed=-1: must be at least 0",
    "prefill=sparse": "prefill=sparse: allowed: auto, dense, question, artifact",
    "scoring=average": "scoring=average: allowed: sum, mean",
    "kind=taks": "kind=taks: did you mean 'tasks'?",
    "kind=latency": "kind=latency: its rows are none of experiment=perplexity's table; choose an experiment of that",
    "experiment=fig5 kind=tasks": "kind=tasks: its rows are none of experiment=fig5's table; choose an experiment of",
    "label=true": "label=True: must be text",
    "label=false": "label=False: must be text",
    "~seed": None,
    "~experiment": "setting experiment is missing",
    "~method": "method=None: allowed: ",
    "data.name=x": "data.name=x: allowed: offline, local, hub",
}


OF_COMPOSING = (
    "method=infingen", "model=lama2-7b", "experiment=fig1", "data=locl", "corpus=wikitext", "seq_length=8",
    "~experiment", "seed=-1",
)  # fmt: skip
"""What is refused while Hydra composes, and one that is not."""


@pytest.mark.parametrize("command", [name for name, said in REFUSED.items() if said and name not in OF_COMPOSING])
def test_refuses(command):
    with pytest.raises((UserError, HydraException)) as error:
        load(command.split())
    said = in_words(error.value) if isinstance(error.value, HydraException) else str(error.value)
    assert said.startswith(REFUSED[command]) and "\n" not in said


@pytest.mark.parametrize("command", OF_COMPOSING)
def test_refuses_as_a_command(command, capsys):
    from harness.launch.cli import main

    assert main(command.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {REFUSED[command]}") and printed.err.count("\n") == 1


@pytest.mark.parametrize("command", [command for command, message in REFUSED.items() if message is None])
def test_does_not_refuse_its_neighbour(command):
    load(command.split())


def leaves(node, where=""):
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{where}{key}.")
        else:
            yield f"{where}{key}"


def refuses_a_wrong_type(key: str, *choice: str) -> None:
    config = composed(choice)
    OmegaConf.set_struct(config, False)
    wrong = [["a"], {"b": 1}] if key != "model.shape" else "square"
    OmegaConf.update(config, key, wrong, merge=False)
    with pytest.raises(UserError, match=f"^{re.escape(key)}"):
        parse(config)


OF_THE_CODE = ("_target_", "method.name")


def test_every_setting_refuses_a_wrong_type():
    keys = set(leaves(OmegaConf.to_container(composed())))
    for key in ("model.shape", *(key for key in keys if not key.startswith(("grid.", "method.", "model.shape.")))):
        if not key.endswith(OF_THE_CODE):
            refuses_a_wrong_type(key)


@pytest.mark.parametrize("method", options("method"))
def test_every_setting_of_a_method_refuses_a_wrong_type(method):
    choice = f"method={method}"
    for key in leaves(OmegaConf.to_container(composed([choice]).method), "method."):
        if not key.endswith(OF_THE_CODE):
            refuses_a_wrong_type(key, choice)


def test_parse_loads_no_model_library():
    """A wrong setting costs no import of transformers or lm-eval, and composing not even torch."""
    code = (
        "import sys; from harness.settings.compose import load; light = 'torch' not in sys.modules;"
        "load(['method=infinigen']);"
        "heavy = [name for name in ('transformers', 'lm_eval', 'datasets') if name in sys.modules];"
        "sys.exit(not light or bool(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=CONF_DIR.parent).returncode == 0


def test_nearest():
    assert nearest("H20", ["full", "h2o"]) == "did you mean 'h2o'? allowed: full, h2o"
    assert nearest("x", ["full", "h2o"]) == "allowed: full, h2o"
    assert nearest("n29", [f"n{i}" for i in range(30)]).endswith("n14, n15, ...")

"""Values of any kind in the Python interface: each is refused in one line that names the argument."""

import math
import pwd
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import harness
from harness.errors import UserError
from harness.files import cache_dir
from tests.tokens import byte_tokenizer

PROMPT = "A cache keeps what will be read again. " * 4
SHORT = {"num_windows": 1, "seq_len": 96, "prefill_len": 32, "platform.link_gbps": 1}


class Anything:
    def __repr__(self) -> str:
        return "Anything()"


NESTED: list = []
NESTED.append(NESTED)


@pytest.fixture
def model(network, tmp_path):
    return harness.load(network, byte_tokenizer(), results_dir=str(tmp_path / "results"), **SHORT)


def refusal(act) -> str:
    with pytest.raises(UserError) as raised:
        act()
    message = str(raised.value)
    assert message and "\n" not in message and len(message) <= 2000
    return message


def named(given: object) -> str:
    """A test's name, the same in every process: no address of an object."""
    return re.sub(r" at 0x\w+", "", ascii(given))[:20]


@pytest.mark.parametrize(
    "given",
    [None, 5, 3.5, True, Anything(), b"x", [], {}, torch.nn.Linear(2, 2), "", "~nobody_of_this_name/x", "x" * 5000,
     "a/" + "x" * 5000, "a\0b", "a/\0", "\ud800", "a/\ud800", "a b/c d", "a//b", "/no_such_folder",
     Path("/no_such_folder"), Path("a/b/c")],
    ids=named,
)  # fmt: skip
def test_what_is_no_model_is_refused(given):
    assert refusal(lambda: harness.load(given)).startswith("model=")


LISTS = [None, [3], [], [None], [b"full"], [["full"]], {"full"}, 5, Anything(), iter(["full"])]
STRANGE = [Anything(), lambda: 3, b"x", {1, 2}, 1 + 2j, torch.ones(2), NESTED, {"a": Anything()}, "\ud800", [[[]]]]
WRONG = {
    "tokenizer": (lambda model, given: harness.load(model.loaded.model, given), [5, Anything()]),
    "methods": (lambda model, given: model.perplexity(methods=given), [*LISTS, "full"]),
    "method": (
        lambda model, given: model.perplexity(methods=[given]),
        ["", "a\0", "\ud800", "x" * 3000, "full\n", "full\r", "a\nb"],
    ),
    "tasks": (lambda model, given: model.tasks(given, methods=["full"]), [*LISTS, "kv_recall"]),
    "prompt": (
        lambda model, given: model.generate(given, method="full", max_new_tokens=2),
        [None, 5, b"x", ["a"], Anything(), "", "\ud800", "a\ud800b"],
    ),
    "": (
        lambda model, given: model.perplexity(methods=["h2o"], **{given: Anything()}),
        ["platform", "method.heavy_frac", "results_dir", "codec", "data", "nothing", ""],
    ),
    "seq_len": (lambda model, given: model.perplexity(methods=["h2o"], seq_len=given), STRANGE),
}
"""Calls with values of an argument, by what is named where they are refused."""


@pytest.mark.parametrize(
    ("name", "given"), [(name, given) for name, (_, values) in WRONG.items() for given in values], ids=named
)
def test_what_an_argument_cannot_be_is_refused(name, given, model):
    act, _ = WRONG[name]
    assert name in refusal(lambda: act(model, given))


def test_a_path_is_a_model(network, tmp_path):
    network.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    assert harness.load(tmp_path / "model").loaded.name == "model"


def calls_with(model, method, budget):
    """The calls that take a budget."""
    return [
        lambda: model.perplexity(methods=[method], budget=budget),
        lambda: model.generate(PROMPT, method=method, budget=budget, max_new_tokens=2),
        lambda: harness.attach(model, method=method, budget=budget).__enter__(),
    ]


BUDGETS = [
    0, -1, math.nan, math.inf, 2, 10**400, True, False, Anything(), [0.5], b"x", torch.tensor(0.5), "x", "", "\ud800",
     "nearest:", "nearest:x", "nearest:nan", "nearest:inf", "nearest:-1", "nearest:0", "nearest:2", "nearest:.5:.5",
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BUDGETS)), ids=lambda number: ascii(BUDGETS[number])[:20])
def test_what_is_no_budget_is_refused(number, model):
    """Each by one call and method in turn: they all read it in one place."""
    method = ("full", "h2o")[number % 2]
    assert "budget" in refusal(calls_with(model, method, BUDGETS[number])[number % 3])


@pytest.mark.parametrize("name", ["experiment", "corpus.path"])
def test_what_a_call_sets_itself_is_not_set_twice(name, model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(PROMPT * 20)
    assert refusal(lambda: model.perplexity(text, methods=["full"], **{name: "x"})).startswith(f"{name}='x': is ")
    assert len(model.perplexity(methods=["full"], **{"corpus.path": text})) == 1
    assert refusal(lambda: harness.lm(model, experiment="perplexity")).startswith("experiment='perplexity': is ")
    assert refusal(lambda: model.generate(PROMPT, prompt="x")).startswith("prompt='x': is ")


def test_a_prompt_may_be_named(model):
    first = model.generate(PROMPT, method="full", max_new_tokens=2)
    assert model.generate(prompt=PROMPT, method="full", max_new_tokens=2).text == first.text


@pytest.mark.parametrize("name", ["KV_HARNESS_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_in_no_home_folder_is_refused(name, monkeypatch, network, tmp_path):
    network.save_pretrained(tmp_path / "model")
    monkeypatch.delenv("KV_HARNESS_CACHE", raising=False)
    monkeypatch.setenv(name, "~nobody_of_this_name/x")
    said = refusal(lambda: harness.load(tmp_path / "model").perplexity(methods=["full"]))
    assert said == f"{name}=~nobody_of_this_name/x: there is no such home folder"


def test_a_user_whose_home_folder_is_not_there_has_no_cache(monkeypatch):
    monkeypatch.setattr(pwd, "getpwnam", lambda name: SimpleNamespace(pw_dir="/no_such_folder"))
    monkeypatch.setenv("KV_HARNESS_CACHE", "~nobody/x")
    assert refusal(cache_dir) == "KV_HARNESS_CACHE=~nobody/x: there is no such home folder"
    monkeypatch.setenv("KV_HARNESS_CACHE", "~/x")
    assert cache_dir() == Path.home() / "x"


def test_a_tokenizer_that_panics_is_one_line(model, monkeypatch):
    class PanicException(BaseException):
        pass

    def panics(*arguments, **options):
        raise PanicException("called `Option::unwrap()`\non a `None` value")

    monkeypatch.setattr(type(model.loaded.tokenizer), "__call__", panics)
    assert "its tokenizer fails (called `Option::unwrap()` on a" in refusal(lambda: model.perplexity(methods=["full"]))
    assert "its tokenizer fails" in refusal(lambda: model.generate(PROMPT, method="full", max_new_tokens=2))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sweep": "paper"}, "sweep='paper': is for the command line alone"),
        ({"status": True}, "status=True: is for the command line alone"),
        ({"model": "opt-13b"}, "model='opt-13b': the model is loaded"),
        ({"model.dtype": "bfloat16"}, "model.dtype='bfloat16': the model is loaded"),
        ({"results_dir": "a\0b"}, "results_dir=a\\x00b: no file can have such a name"),
    ],
)
def test_a_setting_that_a_call_would_not_heed_is_refused(settings, said, model):
    acts = [lambda: model.perplexity(methods=["full"], **settings)]
    if "model" not in settings:  # which Python itself refuses there
        acts.append(lambda: harness.attach(model, method="full", **settings).__enter__())
        acts.append(lambda: harness.lm(model, method="full", **settings))
    for act in acts:
        assert refusal(act).startswith(said)


def test_a_model_is_loaded_with_no_settings_of_a_call(network, tmp_path):
    network.save_pretrained(tmp_path / "model")
    for name, value in {"method": "h2o", "budget": 0.1, "experiment": "tasks", "prompt": "x"}.items():
        expected = f"{name}={value!r}: each measurement is given it"
        assert refusal(lambda: harness.load(tmp_path / "model", **{name: value})).startswith(expected)  # noqa: B023
        assert refusal(lambda: harness.load(network, **{name: value})).startswith(expected)  # noqa: B023
    assert refusal(lambda: harness.load(tmp_path / "model", **{"model.hub_id": "a/b"})).startswith("model.hub_id='a/b'")
    assert "in memory" in refusal(lambda: harness.load(network, **{"model.dtype": "bfloat16"}))


def test_a_text_that_a_model_is_loaded_with_holds_for_its_measurements(network, tmp_path):
    text = tmp_path / "own.txt"
    text.write_text(PROMPT * 20)
    settings = SHORT | {"corpus.path": text, "results_dir": str(tmp_path / "results")}
    model = harness.load(network, byte_tokenizer(), **settings)
    model.perplexity(methods=["full"])
    (table,) = (tmp_path / "results" / "tables").glob("perplexity.csv")
    assert "own.txt" in table.read_text()


def test_one_method_is_not_given_beside_several(model):
    said = refusal(lambda: model.perplexity(methods=["full"], method="h2o"))
    assert said == "method='h2o': is 'full' here; leave it out"


def test_a_label_of_two_lines_is_reported_in_one(model, capsys):
    model.perplexity(methods=["full"], label="a\nb\x1b[31m")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "perplexity a\\nb\\x1b[31m: running, 1 of 1" and "\x1b" not in "".join(lines)

"""What runs share: one model at a time, and nothing of another one."""

from types import SimpleNamespace

from harness.model.resources import Memo, Resources
from harness.settings.config import ModelConfig

ONE, OTHER = ModelConfig("one"), ModelConfig("other")


def test_values_are_made_once_and_the_oldest_leaves_before_the_next_is_made():
    memo, made = Memo(limit=2), []
    for key in "abacba":
        memo.get(key, lambda key=key: made.append((key, list(memo._values))) or key)
    assert made == [("a", []), ("b", ["a"]), ("c", ["b"]), ("a", ["c"])]


def test_a_model_is_loaded_once_for_equal_settings_and_takes_what_depends_on_it_along(monkeypatch):
    loads, resources = [], Resources()
    monkeypatch.setattr(
        "harness.model.load.load_model", lambda config: loads.append(config.name) or SimpleNamespace(name=config.name)
    )
    first = resources.model(ONE)
    resources.references.get("window", lambda: 1)
    assert resources.model(ModelConfig("one")) is first
    assert resources.references.get("window", lambda: 2) == 1
    assert resources.model(OTHER).name == "other" and loads == ["one", "other"]
    assert resources.references.get("window", lambda: 2) == 2

"""What runs share: one model at a time, and nothing of another one."""

from types import SimpleNamespace

from harness.model.load import Resources
from harness.settings.config import ModelConfig

ONE, OTHER = ModelConfig("one"), ModelConfig("other")


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

"""Accuracy and speed of KV-cache methods, on one implementation of each.

    import harness

    model = harness.load("smollm2-135m")
    text = open("my.txt").read()  # some hundred tokens, of which a tenth can be read
    print(model.generate(text, method="infinigen", budget=0.1))

`harness.load`, `harness.attach` and `harness.lm` are the Python interface; `run.py` is the command
line.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.api.cached_model import attach
    from harness.api.interface import Model, load
    from harness.api.method_lm import lm

__all__ = ["Model", "attach", "lm", "load"]
MODULES = {"attach": "cached_model", "lm": "method_lm"}
"""The names that are not in `harness.api.interface`."""


def __getattr__(name: str) -> Any:
    """Import the interface when it is first used: it loads torch and transformers, which the
    command line does late."""
    if name not in __all__:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    module = MODULES.get(name, "interface")
    return getattr(import_module(f"harness.api.{module}"), name)

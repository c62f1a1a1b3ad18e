"""What the runs of one process share: the loaded model, and what is computed from it for more than one run.

Made once a process and handed to each run. Caches, nothing else: a run's numbers do not depend on what is there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from harness.settings.config import ModelConfig

if TYPE_CHECKING:
    from harness.model.load import LoadedModel

T = TypeVar("T")


class Kept(Generic[T]):
    """Values by what they were made of. limit: how many, the oldest leaving first; None keeps all."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `key`, made where it is not there; what has to leave for it leaves first."""
        if key not in self._values:
            while self.limit is not None and len(self._values) >= self.limit:
                self._values.popitem(last=False)
            self._values[key] = make()
        return self._values[key]

    def clear(self) -> None:
        """Keep nothing."""
        self._values.clear()


def load_model(config: ModelConfig) -> LoadedModel:
    """`harness.model.load.load_model`, imported when it is wanted."""
    from harness.model.load import load_model as load

    return load(config)


class Resources:
    """The last model, with what depends on it.

    loaded: a model in memory, which then is the model of every run. references: dense passes of windows, and texts
    decoded under the full cache, with which every method of a sweep is compared. prompts: the dense pass of the last
    timed shape. The values belong to whoever keeps them.
    """

    def __init__(
        self, load: Callable[[ModelConfig], LoadedModel] = load_model, loaded: LoadedModel | None = None
    ) -> None:
        self._load = load
        self.loaded = loaded
        self._loaded: tuple[ModelConfig, LoadedModel] | None = None
        self.references: Kept = Kept()
        self.prompts: Kept = Kept(limit=1)

    def model(self, config: ModelConfig) -> LoadedModel:
        """The model of `config`, loaded once for all runs that follow one another with equal settings."""
        if self.loaded is not None:
            return self.loaded
        if self._loaded is None or self._loaded[0] != config:
            self._loaded = None  # frees the last model, and what came of it, before the next one comes
            self.references.clear()
            self.prompts.clear()
            self._loaded = (config, self._load(config))
        return self._loaded[1]

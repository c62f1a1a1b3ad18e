"""What the runs of one process share: the loaded model, and results that several runs need.

Made once a process and handed to each run. A run's numbers do not depend on what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from harness.settings.config import ModelConfig

if TYPE_CHECKING:
    from harness.model.load import LoadedModel

T = TypeVar("T")


class Memo(Generic[T]):
    """Values by key. limit: how many, the oldest leaving first; None keeps all."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._values: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `key`. If there is none it is made, after the oldest has left."""
        if key not in self._values:
            if self.limit is not None and len(self._values) >= self.limit:
                del self._values[next(iter(self._values))]
            self._values[key] = make()
        return self._values[key]


class Resources:
    """The last model, with what depends on it.

    loaded: a model in memory, which then is the model of every run. references: dense passes of
    windows, and texts decoded under the full cache, with which every method of a sweep is compared.
    prompts: the dense pass of the last timed shape. shares_prompts: several runs follow, as in a
    sweep, so that the passes over prompts are kept; `end_sharing` drops them.
    """

    def __init__(self, loaded: LoadedModel | None = None) -> None:
        self.loaded = loaded
        self._last: tuple[ModelConfig, LoadedModel] | None = None
        self.references: Memo = Memo()
        self.prompts: Memo = Memo(limit=1)
        self.shares_prompts = False

    def model(self, config: ModelConfig) -> LoadedModel:
        """The model of `config`; runs with equal settings that follow one another share it."""
        loaded = self.loaded or self._loaded_by(config)
        if self.shares_prompts and config.device == "cpu" and loaded.prompts is None:
            from harness.model.passes import DensePrompts

            loaded.prompts = DensePrompts()
        return loaded

    def has_model(self, config: ModelConfig) -> bool:
        """Whether the model of `config` is in memory."""
        return self.loaded is not None or self._last is not None and self._last[0] == config

    def _loaded_by(self, config: ModelConfig) -> LoadedModel:
        if self._last is None or self._last[0] != config:
            from harness.model.load import load_model

            # Free memory for the next model.
            self._last = None
            self.references = Memo()
            self.prompts = Memo(limit=1)
            self._last = (config, load_model(config))
        return self._last[1]

    def digest_in_memory(self) -> str | None:
        """The digest of the model as it is now; None where it is as its source holds it, or not
        loaded. Raises UserError for a model that is refused."""
        loaded = self._in_memory()
        if loaded is None:
            return None
        from harness.model.attach import digest_of

        now = digest_of(loaded.model)
        return None if now == loaded.as_loaded else now

    def end_sharing(self) -> None:
        """Keep neither passes over prompts nor references: a user has the model, and may change its
        weights before the next run."""
        self.shares_prompts = False
        self.references = Memo()
        loaded = self._in_memory()
        if loaded is not None:
            loaded.prompts = None

    def _in_memory(self) -> LoadedModel | None:
        return self.loaded or (self._last[1] if self._last else None)

"""Settings as the runs of a sweep get them: what Hydra reads for the same choices of groups, it reads once."""

from collections.abc import Sequence

from harness.run import compose
from harness.run.compose import Composer
from harness.settings.config import RunConfig

composed = Composer()
"""As `compose.compose`, in a copy that may be changed."""


def load(overrides: Sequence[str] = ()) -> RunConfig:
    """As `compose.load`."""
    return compose.load(overrides, composed)

"""Settings as the runs of a sweep get them: what Hydra reads for the same choices of groups, it reads once."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from harness.run import compose
from harness.run.compose import Composer
from harness.settings import schema
from harness.settings.config import RunConfig

_composers: defaultdict[Path, Composer] = defaultdict(Composer)
"""By the folder of settings, which a test may put another in place of."""


def composed(overrides: Sequence[str] = ()) -> DictConfig:
    """As `compose.compose`, in a copy that may be changed."""
    return _composers[schema.CONF_DIR](overrides)


def load(overrides: Sequence[str] = ()) -> RunConfig:
    """As `compose.load`."""
    return compose.load(overrides, composed)

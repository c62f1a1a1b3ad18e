"""Hydra as it is called: which command line it reads, and what it raises of one, in words for who typed it."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from harness.errors import nearest, one_line

TRACEBACKS = "HYDRA_FULL_ERROR"
OF_HYDRA = (HydraException, OmegaConfBaseException)


def in_words(error: BaseException) -> str:
    """What went wrong, with the nearest names where a name was unknown."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return f"{group}={choice}: {nearest(choice, error.options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: must be NAME=VALUE"
    if isinstance(error, InterpolationResolutionError) and error.__context__ is not None:
        return in_words(error.__context__)  # what a resolver says
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        known = [str(key) for key in cause.parent_node if key not in ("hydra", "_target_")]
        if known and str(cause.key) not in known:
            return f"unknown setting {cause.full_key}: {nearest(cause.key, known)}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return one_line(error)


@contextmanager
def as_command_line(argv: Sequence[str]) -> Iterator[None]:
    """Hydra reads `sys.argv`, and hands errors on instead of printing them only when asked for full ones."""
    before, sys.argv = sys.argv, ["run.py", *argv]
    setting = os.environ.get(TRACEBACKS)
    os.environ[TRACEBACKS] = "1"
    try:
        yield
    finally:
        sys.argv = before
        if setting is None:
            del os.environ[TRACEBACKS]
        else:
            os.environ[TRACEBACKS] = setting

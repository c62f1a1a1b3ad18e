"""Data sets of the Hugging Face hub, from its local cache where they are there.

What is cached is used without asking the hub, so that a repeated run is the same and needs no network. What is not,
with a hub out of reach, is an error of one line within seconds.
"""

import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from harness.errors import UserError
from harness.model.refusal import refusal

TIMEOUT_S = 5.0
"""An unreachable hub is given up after this; `datasets` itself would retry for half a minute."""

T = TypeVar("T")


@contextmanager
def no_network() -> Iterator[None]:
    """Inside, `datasets` and the hub's client use what is on this machine, ask nobody, and do not warn that they do."""
    from datasets import config, logging
    from huggingface_hub import constants

    before, verbosity = (config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE), logging.get_verbosity()
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    logging.set_verbosity_error()
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
        logging.set_verbosity(verbosity)


def from_hub(name: str, load: Callable[[], T], files: str | None = None) -> T:
    """What `load` makes of the hub's data set `name`, from the cache if it is there.

    files: what `data=local` would need below its root, for the error.

    Raises:
        UserError: it is not cached and the hub is unreachable or refuses, or it cannot be read; says what remains.
        ImportError: a package that reads it is not installed.
    """
    try:
        with no_network():
            return load()
    except ImportError:
        raise
    except Exception:  # `datasets` has many for what is not cached, or not whole; online it says what is wrong
        pass
    _require_hub(name, files)
    try:
        return load()
    except ImportError:
        raise
    except Exception as error:
        raise _unavailable(name, refusal(error), files) from error


def _require_hub(name: str, files: str | None) -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise _unavailable(name, "not cached, and HF_HUB_OFFLINE is set", files)
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except OSError as error:
        raise _unavailable(name, f"not cached, and {refusal(error)}", files) from error


def _unavailable(name: str, reason: str, files: str | None) -> UserError:
    local = "data=local data.root=DIR" + (f" with {files}" if files else "")
    return UserError(
        f"data=hub: {name} cannot be loaded ({reason}); what remains: {local}, or data=offline (no download)"
    )

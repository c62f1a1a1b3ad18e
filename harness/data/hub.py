"""Data sets of the Hugging Face hub, from its local cache where they are there.

Cached rows are used without asking the hub: a repeated run is the same and needs no network. If rows are missing and
the hub is out of reach, the error is one line within seconds.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TypeVar

from harness.errors import UserError
from harness.model.source import refusal

TIMEOUT_S = 5.0
"""An unreachable hub is given up after this; `datasets` itself would retry for half a minute."""

T = TypeVar("T")


@contextmanager
def no_network() -> Iterator[None]:
    """Inside, `datasets` and the hub's client use the local cache alone, and do not warn that they do."""
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
    """Call `load`, which reads the hub's data set `name`, without the network; where that fails, with it.

    files: the files that `data=local` would need below its root, for the error.

    Raises:
        UserError: it is not cached and the hub is unreachable or refuses, or it cannot be read; says what remains.
        ImportError: a package that reads it is not installed.
    """
    from huggingface_hub import constants, get_session

    try:
        with no_network():
            return load()
    except ImportError:
        raise
    except Exception:  # `datasets` has many for rows that are not cached, or not whole; online it says what is wrong
        pass
    why = "not cached, and "
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
        print(f"{name}: fetching from {constants.ENDPOINT}", file=sys.stderr)
        why = ""
        return load()
    except ImportError:
        raise
    except Exception as error:
        local = "data=local data.root=DIR" + (f" with {files}" if files else "")
        raise UserError(
            f"data=hub: {name} cannot be loaded ({why}{refusal(error)}); what remains: {local}, or data=offline (no "
            "download)"
        ) from error


def revision(path: str, part: str | None, fetch: Callable[[], object], *, has_options: bool = False) -> str:
    """The commit on the hub of a data set's cached rows; `fetch` puts rows into the cache where there are none. ""
    where it leaves none there.

    part: its configuration, None for the only one. has_options: it is loaded with other settings as well. Raises as
    `from_hub`.
    """
    found = _cached_revision(path, part, has_options)
    if found is None:
        fetch()
        found = _cached_revision(path, part, has_options)
    return found or ""


def _cached_revision(path: str, part: str | None, has_options: bool) -> str | None:
    """The commit of the newest rows, which `datasets` takes offline; importing it would take a second.

    Rows lie in OWNER___NAME/PART/VERSION/COMMIT, names in snake case, a dash and a digest after a part with options.
    """
    from huggingface_hub import constants

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets").expanduser()
    configuration = f"{escape(part or 'default')}-*" if has_options else escape(part) if part else "*"
    made = [
        rows
        for folder in cache.glob("*")
        if _letters(folder.name) == _letters(path)
        for rows in folder.glob(f"{configuration}/*/*/dataset_info.json")
        if "." not in rows.parent.name  # .incomplete: on its way, or cut short
    ]
    return max(made, key=lambda rows: rows.parent.stat().st_mtime_ns).parent.name if made else None


def _letters(name: str) -> str:
    """A name that is the same in snake case."""
    return name.replace("/", "").replace("_", "").lower()

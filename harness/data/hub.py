"""Data sets of the Hugging Face hub, from its local cache where they are there.

What is cached is used without asking the hub, so that a repeated run is the same and needs no network. What is not,
with a hub out of reach, is an error of one line within seconds.
"""

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from harness.errors import UserError
from harness.model.download import progress_bars
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
    _announce(name)
    try:
        with progress_bars():
            return load()
    except ImportError:
        raise
    except Exception as error:
        raise _unavailable(name, refusal(error), files) from error


def revision(path: str, part: str | None, fetch: Callable[[], object], *, has_options: bool = False) -> str:
    """The commit on the hub of a data set's cached rows, which `fetch` puts into the cache where there are none; "" of
    what leaves none there.

    part: its configuration, None for the only one. has_options: it is loaded with settings of its own besides. Raises
    as `from_hub`.
    """
    found = _cached_revision(path, part, has_options)
    if found is None:
        fetch()
        found = _cached_revision(path, part, has_options)
    return found or ""


def _cached_revision(path: str, part: str | None, has_options: bool) -> str | None:
    """That of the rows which `datasets` takes offline, the last that were made; its import would take longer than all
    that a skipped run does.

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


def _announce(name: str) -> None:
    """Say that a download begins, and how large all parts of the data set are."""
    from huggingface_hub import HfApi, constants

    with suppress(Exception):  # refused, which loading it will say, or the name of a task that fetches by itself
        files = HfApi().dataset_info(name, files_metadata=True, timeout=TIMEOUT_S).siblings or ()
        amount = tqdm.format_sizeof(sum(file.size or 0 for file in files), "B")
        print(f"{name}: fetching up to {amount} from {constants.ENDPOINT}", file=sys.stderr)


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

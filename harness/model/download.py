"""Downloads from the Hugging Face hub into its cache, by its own client, with its progress bars.

A download leaves the hub's list of the revision's files in the cache, by which a later start knows what lacks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from harness.errors import UserError
from harness.model.refusal import refusal, wait_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

TIMEOUT_S = 5.0
"""An unreachable hub is given up after this."""
LONGEST_WAIT_S = 30.0
TRIES = 3
"""A busy hub is asked so often, and waited for so long each time."""

Wanted = Callable[[str], bool]
"""Whether to fetch a file, by its name in the repository."""
Choose = Callable[["HfApi", str], "ModelInfo"]
"""The revision of a repository to fetch, with its files."""


def fetch(hub_id: str, wanted: Wanted, choose: Choose) -> Path:
    """The snapshot of a repository in the hub's cache, with its `wanted` files; those cached are kept.

    Raises:
        UserError: the hub is unreachable, or refuses, in its words; or what `choose` raises.
    """
    from huggingface_hub.errors import HFValidationError

    tries = TRIES
    while True:
        tries -= 1
        try:
            return _fetch(hub_id, wanted, choose)
        except UserError:
            raise
        except HFValidationError as error:
            raise UserError(f"model.hub_id={hub_id}: not a repository id; expected organisation/name") from error
        except Exception as error:  # of the hub's client, and of all that is below it
            wait = wait_of(error)
            if wait is None or wait > LONGEST_WAIT_S or not tries:
                raise not_had(hub_id, f"not (wholly) cached, and {refusal(error)}") from error
        print(f"{hub_id}: the hub is busy, asking again in {wait:g} s", file=sys.stderr)
        time.sleep(wait)


def info(api: HfApi, hub_id: str, revision: str | None = None) -> ModelInfo:
    """What the hub says of a revision, of the main branch by default: its commit, its files and their sizes."""
    return api.model_info(hub_id, revision=revision, files_metadata=True, timeout=TIMEOUT_S)


def names(found: ModelInfo) -> list[str]:
    """The files of a revision."""
    return [file.rfilename for file in found.siblings or ()]


def not_had(hub_id: str, why: str) -> UserError:
    """Why a model cannot be had, and what remains."""
    return UserError(
        f"model.hub_id={hub_id}: {why}; what remains: model.path=DIR with a local copy, "
        "model=smollm2-135m (no download), and data=local or data=offline for the data"
    )


def _fetch(hub_id: str, wanted: Wanted, choose: Choose) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download

    with progress_bars(), _no_long_waits():
        chosen = choose(HfApi(), hub_id)
        files = {file.rfilename: file.size or 0 for file in chosen.siblings or () if wanted(file.rfilename)}
        amount = tqdm.format_sizeof(sum(files.values()), "B")
        print(f"{hub_id}: fetching {amount} from {constants.ENDPOINT}, revision {chosen.sha}", file=sys.stderr)
        return Path(snapshot_download(hub_id, revision=chosen.sha, allow_patterns=[*map(escape, files)]))


@contextmanager
def progress_bars() -> Iterator[None]:
    """Inside, the hub's client shows its bars on a terminal, although loading a model switches them off."""
    from huggingface_hub import constants
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hidden = are_progress_bars_disabled()
    if hidden and not constants.HF_HUB_DISABLE_PROGRESS_BARS:
        enable_progress_bars()
    try:
        yield
    finally:
        if hidden:
            disable_progress_bars()


@contextmanager
def _no_long_waits() -> Iterator[None]:
    """Inside, no request waits longer than HF_HUB_DOWNLOAD_TIMEOUT seconds; the client itself gives some a minute."""
    from huggingface_hub import constants, get_session

    def cap(request: Any) -> None:
        limit = constants.HF_HUB_DOWNLOAD_TIMEOUT
        waits = request.extensions["timeout"]
        waits.update({step: min(seconds or limit, limit) for step, seconds in waits.items()})

    hooks = get_session().event_hooks["request"]
    hooks.append(cap)
    try:
        yield
    finally:
        hooks.remove(cap)

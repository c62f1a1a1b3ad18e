"""Models from the Hugging Face hub, as directories of its local cache.

What is cached is used as it is, without asking the hub: fast, the same tomorrow, and it works offline. What
is not cached is asked for once, with a short timeout, so that an unreachable hub is an error within seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.errors import UserError, nearest

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TIMEOUT_S = 5.0
WEIGHT_FILES = "model*.safetensors"  # as transformers names them; a repository may hold other formats
TEXT_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
CONVERTED_TITLE = "Adding `safetensors` variant of this model"  # pull requests of the hub's conversion bot
CONVERTED_AUTHOR = "SFconvertbot"


class Snapshot(NamedTuple):
    """One revision of a hub repository on this machine."""

    directory: Path
    revision: str  # commit hash


def has_weights(directory: Path) -> bool:
    """Whether a model directory holds all its weights as safetensors (every shard that its index names)."""
    try:
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        return all((directory / shard).is_file() for shard in set(index["weight_map"].values()))
    except FileNotFoundError:
        return (directory / "model.safetensors").is_file()
    except (ValueError, KeyError, AttributeError, NotADirectoryError):
        return False


def cached_snapshot(hub_id: str) -> Snapshot | None:
    """The newest snapshot in the hub's cache with a config and all weights; None where there is none."""
    whole = [path for path in _snapshots(hub_id) if (path / "config.json").is_file() and has_weights(path)]
    return Snapshot(whole[-1], whole[-1].name) if whole else None


def snapshot(hub_id: str, *, with_code: bool = False) -> Snapshot:
    """A repository's config, safetensors and tokenizer on this machine, downloaded where they are not cached.

    Args:
        hub_id: "organisation/name".
        with_code: fetch the repository's Python files too (only for trust_remote_code).

    Raises:
        UserError: the hub is unreachable, refuses, or has no safetensors of this model.
    """
    code = ["*.py"] if with_code else []
    patterns = [*TEXT_FILES, WEIGHT_FILES, *code]
    return cached_snapshot(hub_id) or _download(hub_id, patterns, _safetensors_revision)


def config_directory(hub_id: str) -> Path:
    """A directory with the repository's config.json, without weights; raises UserError like `snapshot`."""
    return (cached_snapshot(hub_id) or _download(hub_id, ["config.json"], _safetensors_revision)).directory


def gguf(hub_id: str, name: str) -> Path:
    """The GGUF file `name` of a repository on this machine, downloaded where it is not cached.

    Raises:
        UserError: the hub is unreachable, refuses, or has no such file.
    """

    def revision(api: HfApi, hub_id: str) -> str:
        info = api.model_info(hub_id, timeout=TIMEOUT_S)
        files = [sibling.rfilename for sibling in info.siblings or ()]
        if name not in files:
            there = [file for file in files if file.endswith(".gguf")]
            raise UserError(f"model.gguf_file={name}: {nearest(name, there)}; {hub_id} has no other")
        return str(info.sha)

    cached = [path / name for path in _snapshots(hub_id) if (path / name).is_file()]
    return cached[-1] if cached else _download(hub_id, [name], revision).directory / name


def _snapshots(hub_id: str) -> list[Path]:
    """What the hub's cache holds of a repository, the newest last."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    return sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime_ns)


def _download(hub_id: str, patterns: list[str], revision_of: Callable[[HfApi, str], str]) -> Snapshot:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import httpx  # whichever client this version uses

    try:
        api = HfApi()
        revision = revision_of(api, hub_id)
        directory = Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except (GatedRepoError, RepositoryNotFoundError) as error:
        reason = "no such public repository; if it is gated, accept its terms and `hf auth login`"
        raise _refused(hub_id, reason) from error
    except HFValidationError as error:
        raise UserError(f"model.hub_id={hub_id}: not a repository id; expected organisation/name") from error
    except (httpx.HTTPError, OSError) as error:
        raise _refused(hub_id, f"not cached, and the hub is unreachable ({type(error).__name__})") from error
    return Snapshot(directory, directory.name)


def _safetensors_revision(api: HfApi, hub_id: str) -> str:
    """The revision to fetch: the main branch, or the conversion bot's where main has only pickled weights."""
    info = api.model_info(hub_id, timeout=TIMEOUT_S)
    if any(fnmatch(sibling.rfilename, WEIGHT_FILES) for sibling in info.siblings or ()):
        return str(info.sha)
    for request in api.get_repo_discussions(hub_id, author=CONVERTED_AUTHOR, discussion_type="pull_request"):
        if request.title == CONVERTED_TITLE:
            return f"refs/pr/{request.num}"
    raise _refused(hub_id, "it has no safetensors, and pickled weights are not loaded")


def _refused(hub_id: str, reason: str) -> UserError:
    return UserError(
        f"model.hub_id={hub_id}: {reason}; what remains: model.path=DIR with a local copy, "
        "model=smollm2-135m (no download), and data=local or data=offline for the data"
    )

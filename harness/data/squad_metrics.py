"""SQuAD's exact match and F1 of an answer in words (Rajpurkar et al. 2016, `evaluate-v2.0.py`).

lm-eval 0.4.13 imports them for CoQA, XQuAD, ReCoRD, SCROLLS and other tasks from
`transformers.data.metrics.squad_metrics`, which transformers 5.23 no longer has. `provide` puts
this module there.
"""

from __future__ import annotations

import importlib.util
import re
import string
import sys
from collections import Counter
from types import ModuleType

PLACE = "transformers.data.metrics"
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """The text in lower case, without punctuation and English articles, its words one space
    apart."""
    words = ARTICLES.sub(" ", text.lower().translate(PUNCTUATION))
    return " ".join(words.split())


def get_tokens(text: str) -> list[str]:
    """The words of a text after `normalize_answer`."""
    return normalize_answer(text).split()


def compute_exact(a_gold: str, a_pred: str) -> int:
    """1 where two answers are the same after `normalize_answer`, else 0."""
    return int(normalize_answer(a_gold) == normalize_answer(a_pred))


def compute_f1(a_gold: str, a_pred: str) -> float:
    """The harmonic mean of precision and recall of an answer's words. Of an empty answer it is 1
    where both are empty, else 0."""
    gold, predicted = get_tokens(a_gold), get_tokens(a_pred)
    if not gold or not predicted:
        return float(gold == predicted)
    common = (Counter(gold) & Counter(predicted)).total()
    return 2 * common / (len(gold) + len(predicted))


def provide() -> None:
    """Put this module where lm-eval's tasks look for it, unless transformers has one there."""
    if importlib.util.find_spec(PLACE) is not None:
        return
    package = ModuleType(PLACE, "Kept for tasks of lm-eval.")
    package.__path__ = []
    package.__spec__ = importlib.util.spec_from_loader(PLACE, loader=None, is_package=True)
    package.squad_metrics = sys.modules[__name__]  # type: ignore[attr-defined]
    sys.modules[PLACE] = package
    sys.modules[f"{PLACE}.squad_metrics"] = sys.modules[__name__]

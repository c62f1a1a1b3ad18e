"""Many configurations composed with little work: what Hydra reads for the same choices of groups, it reads once."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from harness.settings import choices, own_method
from harness.settings.choices import is_group
from harness.settings.compose import compose


class Composer:
    """`compose` for many runs with few choices of groups: what Hydra reads for the same choices, it reads once.

    Values are set on a copy as Hydra sets them. Whatever is neither a choice nor a value, and all that is refused, is
    left to Hydra.
    """

    def __init__(self) -> None:
        self._chosen: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """As `compose(overrides)`."""
        try:
            given = [read_override(each) for each in overrides]
            values = [each for each in given if not is_group(each.key_or_group)]
            if any(map(_is_special, given)):
                return compose(overrides)
            config = deepcopy(self._of([each for each in given if is_group(each.key_or_group)]))
            for each in values:
                OmegaConf.update(config, each.key_or_group, each.value())
        except (HydraException, OmegaConfBaseException):
            return compose(overrides)  # in Hydra's words
        return config

    def _of(self, chosen: Sequence[Override]) -> DictConfig:
        words = tuple(str(each.input_line) for each in chosen)
        if words not in self._chosen:
            self._chosen[words] = self._around(chosen) or compose(words)
        return self._chosen[words]

    def _around(self, chosen: Sequence[Override]) -> DictConfig | None:
        """What all choices of plain files have around them, composed once, with these files in their places; None where
        there is none such, or the other choices write into those places."""
        files = {each.key_or_group: str(each.value()) for each in chosen if _plain(each) is not None}
        others = [str(each.input_line) for each in chosen if each.key_or_group not in files]
        without = (*others, *(f"~{group}" for group in sorted(files)))
        if not files or len(files) + len(others) < len(chosen):
            return None
        if without not in self._chosen:
            self._chosen[without] = compose(without)
        config = deepcopy(self._chosen[without])
        if not files.keys().isdisjoint(config):
            return None
        with open_dict(config):
            for each in chosen:
                if each.key_or_group in files:
                    config[each.key_or_group] = deepcopy(_plain(each))
        return config


def _plain(choice: Override) -> DictConfig | None:
    """A file of `conf/` that is its group's node and nothing else; None of one that names others, or another place."""
    path = choices.CONF_DIR / choice.key_or_group / f"{choice.value()}.yaml"
    return _read(path, path.stat().st_mtime_ns) if path.is_file() and "/" not in choice.key_or_group else None


@cache
def _read(path: Path, changed: int) -> DictConfig | None:
    node = OmegaConf.load(path)
    if not isinstance(node, DictConfig) or "defaults" in node or "@package" in path.read_text("utf-8"):
        return None
    return node


@cache
def read_override(text: str) -> Override:
    """A word of a command line, as Hydra reads it; HydraException where it cannot."""
    return OverridesParser.create().parse_override(text)


def _is_special(override: Override) -> bool:
    """Whether it does more than choose or set, or chooses code of the user's, which may change."""
    of_hydra = override.key_or_group.partition(".")[0].partition("/")[0] == "hydra"
    changes = override.type == OverrideType.CHANGE and override.package is None
    is_own = override.key_or_group == "method" and own_method.is_own(str(override.value()))
    return of_hydra or not changes or override.is_sweep_override() or is_own

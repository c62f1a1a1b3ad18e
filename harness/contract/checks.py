"""What every method must keep, one function each: a line that says how well it does, or what differed.

All compare two ways to the same rows of a batch of random tokens on a tiny random model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from harness.contract.decode import (
    STEPS,
    Result,
    link_bytes,
    live,
    open_replay,
    replay,
    replay_in_turns,
    token_batch,
)
from harness.model.attach import Attached
from harness.model.policies import policies_of
from harness.offload.links import Link
from harness.setup import Setup
from harness.sizes import code_width, expected_size
from methods.base import Row
from methods.codec import without_keys

TOLERANCE = 1e-4
"""Of logits: live and replay sum the same products in another order."""
SIZE_TOLERANCE = 1e-9
ROWS_PER_BLOCK = 3
"""Of replay in small blocks: several blocks, of several rows each."""


class BrokenError(Exception):
    """The contract is not kept: what differed."""


class LogitsDifferError(BrokenError):
    """Two ways to the same rows give other logits. Where two scores are as close as rounding, it decides between two
    tokens, and this happens to a method that keeps its contract; on other tokens it will not happen again."""


class NotAskedError(Exception):
    """The method promises nothing here: why."""


@dataclass
class Trial:
    """A method on a batch of prompts, so many tokens each, drawn by `seed`; what several checks look at runs once."""

    attached: Attached
    link: Link
    setup: Setup
    prompts: tuple[int, ...]
    seed: int = 0

    @cached_property
    def replayed(self) -> Result:
        return self.replay()

    @cached_property
    def on_device(self) -> Result:
        self.require_live()
        return self.live()

    def replay(self, **options: Any) -> Result:
        """options: of `harness.contract.decode.replay`."""
        return replay(self.attached, self.setup, self.prompts, seed=self.seed, **options)

    def live(self, **options: Any) -> Result:
        """options: of `harness.contract.decode.live`."""
        return live(self.attached, self.setup, self.prompts, seed=self.seed, **options)

    @property
    def rows(self) -> Counter[Row]:
        """The decode rows of all sequences, for the arithmetic of sizes."""
        return Counter(Row(real + step, real, real + STEPS) for real in self.prompts for step in range(STEPS))

    def require_live(self) -> None:
        """Raise NotAskedError where the method is not decoded live."""
        if self.setup.method.replay_only:
            raise NotAskedError(self.setup.method.replay_only)

    def require_host(self) -> None:
        """Raise NotAskedError where its cache cannot lie behind a link."""
        self.require_live()
        policies = policies_of(self.attached, self.setup.method)
        if any(policy.when == "true_scores" for policy in policies):
            raise NotAskedError("selects by the true scores of all keys, which lie behind no link")


def live_is_replay(trial: Trial) -> str:
    """Logits, and the sizes that both report; and replay is the same in small blocks of rows."""
    with _at(f"replay in blocks of {ROWS_PER_BLOCK} rows"):
        in_blocks = trial.replay(rows_per_block=ROWS_PER_BLOCK)
        _same_logits(in_blocks.logits, trial.replayed.logits)
        _same_sizes(in_blocks, trial.replayed, "in one block")
    _same_sizes(trial.on_device, trial.replayed, "in replay")
    return _same_logits(trial.on_device.logits, trial.replayed.logits)


def host_is_device(trial: Trial) -> str:
    """Bit for bit."""
    trial.require_host()
    host = trial.live(placement="host", link=trial.link)
    if not torch.equal(host.logits, trial.on_device.logits):
        raise BrokenError(f"logits differ by {largest_difference(host.logits, trial.on_device.logits):.1e}")
    return "bit for bit"


def link_carries_the_selection(trial: Trial) -> str:
    """The selected rows and the exempt layers, and nothing else."""
    trial.require_host()
    found = link_bytes(trial.attached, trial.setup, trial.prompts, trial.link)
    if found.crossed != found.expected:
        raise BrokenError(f"{found.crossed} bytes crossed; the selected rows and exempt layers are {found.expected}")
    if found.miscounted > SIZE_TOLERANCE * max(trial.prompts):
        raise BrokenError(f"num_read is {found.miscounted:g} tokens off what the mask names")
    return f"{found.crossed} bytes"


def size_is_its_closed_form(trial: Trial) -> str:
    """`tokens_read` where it knows, and its bound."""
    method, num_layers = trial.setup.method, trial.attached.geometry.num_layers
    layers = range(method.num_exempt_layers, num_layers)
    known = True
    for row in trial.rows:
        for layer in layers:
            read, bound = method.tokens_read(row, layer), method.max_tokens_read(row, layer)
            if not (0 if read is None else read) <= bound <= row.cached:
                raise BrokenError(f"tokens_read={read}, max_tokens_read={bound} at {row}: one must not exceed the next")
            known &= read is not None
    found = trial.replayed.size
    if not known:
        return f"reads what the data decides, here {found:.1%} of the cache"
    codec = without_keys(trial.setup.codec) if method.holds_keys else trial.setup.codec
    geometry = trial.attached.geometry
    expected = expected_size(method, trial.rows, num_layers, code_width(codec, geometry), geometry.windows)
    if abs(found - expected) > SIZE_TOLERANCE:
        raise BrokenError(f"size is {found:.6f}; by tokens_read it is {expected:.6f}")
    return f"reads {found:.1%} of the cache"


def a_fork_is_fresh(trial: Trial) -> str:
    """Copies taken halfway go on as the whole does, and leave what they were taken from as it was."""
    ids, real = (each.to(trial.attached.device) for each in token_batch(trial.prompts, seed=trial.seed))
    prompt, half = max(trial.prompts), max(trial.prompts) + STEPS // 2
    trunk = open_replay(trial.attached, trial.setup, real)
    trunk.prefill(ids[:, :prompt], real[:, :prompt])
    trunk.decode(ids[:, prompt:half], real[:, prompt:half])
    index = torch.tensor([*reversed(range(len(ids))), 0], device=ids.device)
    child = trunk.fork(index, ids.shape[1])
    rest = ids[:, half:], real[:, half:]
    forked = trial.attached.logits(child.decode(rest[0][index], rest[1][index]))
    expected = trial.replayed.logits[:, 1 + STEPS // 2 :]
    _same_logits(forked, expected[index])
    return _same_logits(trial.attached.logits(trunk.decode(*rest)), expected)


def padded_is_alone(trial: Trial) -> str:
    """Whatever lies beside it in a batch, and whatever padding before its prompt and behind its rows, a sequence has
    the logits that it has alone, and the batch the mean of the sizes."""
    each = range(len(trial.prompts))
    alone = [trial.replay(only=index) for index in each]
    words = _same_as_alone(trial.replayed, alone, trial, "in replay")
    in_turns = replay_in_turns(trial.attached, trial.setup, trial.prompts, trial.seed)
    _same_as_alone(in_turns, alone, trial, "in replay with padding behind the decode rows")
    if not trial.setup.method.replay_only:
        _same_as_alone(trial.on_device, [trial.live(only=index) for index in each], trial, "live")
    return words


CHECKS: dict[str, Callable[[Trial], str]] = {
    "live decoding is replay": live_is_replay,
    "host placement is device placement": host_is_device,
    "the link carries what is selected": link_carries_the_selection,
    "the size is its closed form": size_is_its_closed_form,
    "a fork is fresh": a_fork_is_fresh,
    "a padded sequence is itself alone": padded_is_alone,
}


def largest_difference(got: Tensor, expected: Tensor) -> float:
    """Of two tensors of one shape; NaN where one of them holds one."""
    assert got.shape == expected.shape
    return float((got - expected).abs().max())


@contextmanager
def _at(where: str) -> Iterator[None]:
    """What goes wrong inside the `with` block went wrong there."""
    try:
        yield
    except BrokenError as what:
        raise type(what)(f"{where}: {what}") from what
    except Exception as error:
        error.add_note(where)
        raise


def _same_as_alone(batch: Result, alone: Sequence[Result], trial: Trial, where: str) -> str:
    """Raise BrokenError where a sequence of a batch differs from its run alone."""
    for logits, own, prompt in zip(batch.logits, alone, trial.prompts, strict=True):
        with _at(f"{where}, the sequence with a prompt of {prompt} tokens is not what it is alone"):
            _same_logits(logits[None], own.logits)
    for name in ("size", "device_frac"):  # what stays on the device may be as long as the longest sequence needs it
        together, mean = getattr(batch, name), sum(getattr(own, name) for own in alone) / len(alone)
        if abs(together - mean) > SIZE_TOLERANCE:
            raise BrokenError(f"{where}: {name} of the batch is {together:.6f}, of its sequences alone {mean:.6f}")
    return f"largest difference {largest_difference(batch.logits, torch.cat([own.logits for own in alone])):.1e}"


def _same_sizes(got: Result, expected: Result, other: str) -> None:
    """Raise BrokenError where a size is another than in the `other` run."""
    for name in ("size", "device_frac", "resident_frac"):
        here, there = getattr(got, name), getattr(expected, name)
        if abs(here - there) > SIZE_TOLERANCE:
            raise BrokenError(f"{name} is {here:.6f}, and {there:.6f} {other}")


def _same_logits(got: Tensor, expected: Tensor) -> str:
    difference = largest_difference(got, expected)
    if not difference <= TOLERANCE:
        by_row = (got - expected).abs().amax((0, 2))
        first = int((~(by_row <= TOLERANCE)).nonzero()[0])
        raise LogitsDifferError(f"logits differ by {difference:.1e} (allowed {TOLERANCE:g}), first in row {first}")
    return f"largest difference {difference:.1e}"

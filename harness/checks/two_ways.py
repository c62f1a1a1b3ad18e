"""Two ways to decode the same rows, which checks compare: `replay`, all rows at once, and `live`,
one step at a time. Batches are random tokens, for tiny random models of the families in
families.yaml.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from harness.decode.links import Link
from harness.decode.session import LiveSession
from harness.model.attached import Attached
from harness.model.budgets import resident_share
from harness.model.policies import policies_of
from harness.model.prompts import calibrate
from harness.model.shape import read_yaml
from harness.replay.session import ReplaySession, Setup
from methods.base import Method, QueryRows, Selection
from methods.codecs.split import CacheCodec
from methods.evicting import EvictingState

SHAPES = Path(__file__).with_name("families.yaml")
VOCAB_SIZE = 256
STEPS = 10
ROWS_PER_BLOCK = 3  # of the second replay: several blocks, of several rows each
ROWS_OF_FIRST_CALL = (8, 3)
"""Rows of even and odd sequences in the first of two calls; the second call has the others."""
NUM_CALIBRATION_TOKENS = 256
GPU_CACHE = 1.5  # times what a step reads
LINK_BYTES_PER_S = 1e12  # of the emulated link: it costs no time
TOLERANCE = 1e-4
"""Allowed difference of logits: live and replay sum the same products in another order."""


class NotAskedError(Exception):
    """The check does not apply to the method: the message says why."""


class Result(NamedTuple):
    """logits [batch, 1 + steps, vocab]: of the prompt's last row and of each step. Shares:
    `harness.model.budgets`."""

    logits: Tensor
    budget: float
    device_frac: float
    resident_frac: float


@cache
def families() -> dict[str, dict[str, Any]]:
    """By family, the sizes of its tiny shape beside the common ones."""
    table = read_yaml(SHAPES)
    sizes = dict.fromkeys(table["families_as_they_are"], {}) | table["families_with_more"]
    return dict(sorted(sizes.items()))


def tiny_family(name: str, **sizes: Any) -> Any:
    """A random model of a family: eager attention, float32, on the CPU. sizes: in place of those in
    the table."""
    config_class = CONFIG_MAPPING[name]
    aliases = getattr(config_class, "attribute_map", None) or {}
    default = config_class()
    known = {*default.to_dict(), *vars(default), *aliases}
    common = {size: value for size, value in read_yaml(SHAPES)["sizes"].items() if size in known}
    shape = {}
    for size, value in common.items():
        if aliases.get(size) not in common:
            shape[size] = value
    if "layer_types" in aliases:
        shape.pop("layer_types", None)
    config = config_class(**(shape | families()[name] | sizes))
    if getattr(config, "is_decoder", True) is False:
        config.is_decoder = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    return with_no_constants(model, bias_std=0.5)


def with_no_constants(model: PreTrainedModel, bias_std: float) -> PreTrainedModel:
    """The model, ready to run, with random numbers for what is initialised to a constant and could
    be forgotten: biases and sinks, which are often 0, and norms, which are 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sink", "sinks")):
                parameter.normal_(std=bias_std)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def tiny_ids(text: str) -> list[int]:
    """Token ids of a text for a tiny model, which has no tokenizer: one for each byte."""
    return [3 + byte % (VOCAB_SIZE - 3) for byte in text.encode()]


def token_batch(
    prompts: tuple[int, ...],
    steps: int = STEPS,
    seed: int = 0,
    *,
    only: int | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Random token ids [batch, longest prompt + steps], prompts padded on the left, and a mask of
    the real tokens.

    only: return this sequence alone, without padding.
    """
    longest = max(prompts)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (len(prompts), longest + steps), generator=generator)
    real = torch.arange(longest + steps) >= longest - torch.tensor(prompts)[:, None]
    if only is not None:
        columns = slice(longest - prompts[only], None)
        ids, real = ids[only : only + 1, columns], real[only : only + 1, columns]
    return ids.to(device), real.to(device)


def setup_of(
    attached: Attached,
    method: Method,
    codec: CacheCodec | None,
    num_tokens: int = NUM_CALIBRATION_TOKENS,
) -> Setup:
    """A method on a tiny model. With random weights, random tokens calibrate as well as a text."""
    measured = None
    if method.needs_calibration:
        tokens, _ = token_batch((num_tokens,), steps=0, seed=1)
        measured = calibrate(attached, method, tokens[0].tolist())
    return Setup(method, codec, measured)


def result_of(session: LiveSession, logits: Tensor) -> Result:
    """Logits and shares of a session that is not yet closed."""
    final, dense_layers = session.batch.lengths.final, session.method.dense_layers
    share = session.share
    resident = resident_share(
        share.state, session.codec, final, dense_layers, session.attached.geometry, share.rooms
    )
    return Result(logits, session.reads.budget, session.reads.device_frac, float(resident.mean()))


class HostRun(NamedTuple):
    """A run in host placement. Bytes that crossed the link in its steps, and those of the selected
    rows and the dense layers. miscounted: largest difference in tokens between a selection's
    `num_read` and its mask; NaN if one is NaN."""

    result: Result
    crossed: int
    expected: int
    miscounted: float


@dataclass
class Trial:
    """A method on a batch of random prompts of these lengths, and `steps` rows after them. seed,
    only: as in `token_batch`. Runs that several checks need are made once."""

    attached: Attached
    link: Link | None
    setup: Setup
    prompts: tuple[int, ...]
    seed: int = 0
    steps: int = STEPS
    only: int | None = None

    @cached_property
    def batch(self) -> tuple[Tensor, Tensor]:
        """Token ids, and a mask of the real tokens; the last `steps` columns are rows."""
        device = self.attached.device
        return token_batch(self.prompts, self.steps, self.seed, only=self.only, device=device)

    @property
    def columns(self) -> int:
        """Columns of the prompt."""
        return self.batch[0].shape[1] - self.steps

    @cached_property
    def replayed(self) -> Result:
        return self.replay()

    @cached_property
    def on_device(self) -> Result:
        self.require_live()
        return self.live()

    def prefilled(
        self, columns: int | None = None, more_columns: int = 0, **options: Any
    ) -> tuple[ReplaySession, Tensor]:
        """A replay session after its prompt of `columns`, and the prompt's hidden states.
        more_columns: room for others than the batch's; options: of `ReplaySession`."""
        ids, real = self.batch
        columns = columns or self.columns
        final, room = real.sum(-1), ids.shape[1] + more_columns
        session = self.setup.replay(self.attached, final, room, **options)
        return session, session.prefill(ids[:, :columns], real[:, :columns])

    def replay(self, prefill_len: int | None = None, **options: Any) -> Result:
        """All rows at once. prefill_len: columns of the prompt; options: of `ReplaySession`."""
        ids, real = self.batch
        columns = prefill_len or self.columns
        session, prompt = self.prefilled(columns, **options)
        rows = session.decode(ids[:, columns:], real[:, columns:])
        return _replayed(session, torch.cat([prompt[:, -1:], rows], 1))

    def replay_in_turns(self) -> Result:
        """`replay` in two calls, in which the sequences have unequal numbers of rows, padded
        behind."""
        ids, _ = self.batch
        is_odd = torch.arange(len(ids), device=ids.device) % 2
        num_first = torch.tensor(ROWS_OF_FIRST_CALL, device=ids.device)[is_odd]
        session, prompt = self.prefilled(more_columns=self.steps)
        hidden = [[own] for own in prompt[:, -1:]]  # by sequence
        calls = ((torch.zeros_like(num_first), num_first), (num_first, self.steps - num_first))
        for begin, count in calls:
            rows = torch.arange(int(count.max()), device=ids.device)
            index = (self.columns + begin[:, None] + rows).clamp(max=ids.shape[1] - 1)
            valid = rows < count[:, None]
            decoded = session.decode(ids.gather(1, index), valid)
            for sequence in range(len(ids)):
                hidden[sequence].append(decoded[sequence][valid[sequence]])
        return _replayed(session, torch.stack([torch.cat(part) for part in hidden]))

    def open_live(self, **options: Any) -> LiveSession:
        """A live session; options: of `LiveSession`."""
        return self.setup.live(self.attached, self.steps, **options)

    def live(self, **options: Any) -> Result:
        """The rows of `replay` one step at a time; options: of `LiveSession`."""
        with closing(self.open_live(**options)) as session:
            return result_of(session, self.force(session))

    def force(
        self, session: LiveSession, after_prompt: Callable[[], object] = lambda: None
    ) -> Tensor:
        """Prefill and teacher-forced steps: logits [batch, 1 + steps, vocab]."""
        (ids, real), columns = self.batch, self.columns
        logits = [session.prefill(ids[:, :columns], real[:, :columns])]
        after_prompt()
        for step in range(self.steps):
            logits.append(session.decode_step(ids[:, columns + step]))
        return torch.stack(logits, 1)

    @cached_property
    def on_host(self) -> HostRun:
        """`live` in host placement, listening to the selections."""
        num_kv_heads = self.attached.geometry.num_kv_heads
        selected: Counter[int] = Counter()  # by layer, rows of one token and KV head each
        miscounted = [0.0]

        with closing(self.open_live(placement="host", link=self.link)) as session:

            def listen_from_here() -> None:
                state = session.share.state
                if state is None:
                    return
                select = state.select
                under_method = range(state.method.dense_layers, state.geometry.num_layers)
                selected.update(dict.fromkeys(under_method, 0))

                def listening(layer: int, rows: QueryRows) -> Selection:
                    selection = select(layer, rows)
                    mask = rows.visible() if selection.mask is None else selection.mask
                    # The own slot is the last. [batch, num_kv_heads or 1, rows]
                    read = mask[..., :-1].sum(-1).double()
                    crosses = int(read.sum())
                    if selection.mask is None and not isinstance(state, EvictingState):
                        crosses = read.numel() * (mask.shape[-1] - 1)  # padding crosses, too
                    selected[layer] += crosses * (num_kv_heads // mask.shape[1])
                    miscounted.append(float((read.mean(1) - selection.num_read).abs().max()))
                    return selection

                state.select = listening  # type: ignore[method-assign]

            decoded = result_of(session, self.force(session, listen_from_here))
            crossed, expected = self.crossed(session, selected)
        return HostRun(decoded, crossed, expected, float(torch.tensor(miscounted).max()))

    def crossed(self, session: LiveSession, rows: Mapping[int, int]) -> tuple[int, int]:
        """Bytes that crossed the link in a session's steps, and those of the rows that were to.

        rows: of one token and KV head each, by layer; every row of a layer that is not there.
        """
        cached = sum(range(self.columns, self.columns + self.steps))
        every_row = len(self.batch[0]) * self.attached.geometry.num_kv_heads * cached
        expected = 0
        for layer, store in enumerate(session.stores):
            expected += store.slot_bytes * rows.get(layer, every_row)
        return int(session.traffic.loaded.num_bytes), expected

    def require_all_coded(self) -> None:
        if self.setup.codec is not None and self.setup.codec.residual:
            raise NotAskedError("the codec leaves the last tokens exact, which cross no link")

    def require_live(self) -> None:
        why = self.setup.method.replay_only
        if why is not None:
            raise NotAskedError(why)

    def require_host(self) -> None:
        self.require_live()
        policies = policies_of(self.attached, self.setup.method)
        if any(policy.when == "true_scores" for policy in policies):
            raise NotAskedError("selects by the true scores of all keys, which lie behind no link")


def _replayed(session: ReplaySession, hidden: Tensor) -> Result:
    """The result of hidden states of all rows, [batch, 1 + steps, hidden]."""
    reads = session.reads
    shares = reads.budget, reads.device_frac, reads.resident_frac
    return Result(session.attached.logits(hidden), *shares)


def largest_difference(got: Tensor, expected: Tensor) -> float:
    """Largest difference of two tensors of one shape; NaN if one of them holds NaN."""
    assert got.shape == expected.shape
    return float((got - expected).abs().max())

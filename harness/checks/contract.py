"""`experiment=contract`: checks that every method and codec must pass, on tiny random models, a
line for each check.

Every check decodes the same rows of a batch of random tokens in two ways and compares them. The two
basic ways are `replay`, all rows at once, and `live`, one step at a time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from harness.checks.two_ways import (
    GPU_CACHE,
    LINK_BYTES_PER_S,
    ROWS_PER_BLOCK,
    STEPS,
    TOLERANCE,
    NotAskedError,
    Result,
    Trial,
    largest_difference,
    result_of,
    setup_of,
)
from harness.decode.links import open_link
from harness.errors import UserError, line_in, reason
from harness.model.attach import attach
from harness.model.budgets import code_widths, codec_of_cache, expected_budget
from harness.model.policies import new_state, policies_of
from harness.model.tiny import tiny_ids, tiny_model
from harness.replay.setup import CheckedCodec, codec_of
from harness.settings.config import RunConfig
from methods.base import Lengths, Method, TokenCounts
from methods.codecs.base import FLOAT_DTYPES, RowCodec
from methods.codecs.floats import FloatCodec
from methods.codecs.split import CacheCodec, every_codec

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {"num_key_value_heads": 2}),
    "OPT": ("opt", {"word_embed_proj_dim": 64}),
    "Gemma 2": (
        "gemma2",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 2.0,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"] * 2,
            "sliding_window": 32,
        },
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 4,
        },
    ),
}
"""Two query heads per KV head and rotary positions; one KV head per query head, queries scaled
before, learned positions; a softcap, and layers with a sliding window between those that the method
counts; a latent for all heads, of which the value is a part."""
PROMPTS = {"even": (200, 200), "padded": (200, 180)}
"""Prompt tokens of each sequence: enough for the defaults of every shipped method."""
BUDGET_TOLERANCE = 1e-9
PADDING_BYTES = 4  # that a packed row may hold beyond what an element counts


class BrokenError(Exception):
    """A check failed: the message says what differed."""


class LogitsDifferError(BrokenError):
    """Logits differ. A correct method may differ too, where two scores are as close as rounding
    errors. On other tokens it does not differ again."""


# The checks: each returns a line that says how well the method does, or raises BrokenError


def live_is_replay(trial: Trial) -> str:
    """Live decoding gives the logits and shares of replay, and so does replay in small blocks of
    rows."""
    in_blocks = trial.replay(rows_per_block=ROWS_PER_BLOCK)
    where = f"replay in blocks of {ROWS_PER_BLOCK} rows: "
    try:
        same_logits(in_blocks.logits, trial.replayed.logits, where)
    except BrokenError as error:
        raise LogitsDifferError(
            "what a row reads depends on the rows behind it: select uses tokens later than its row "
            "(rows.visible() are those it may use), or does not carry its state from block to "
            f"block: {error}"
        ) from error
    _same_shares(in_blocks, trial.replayed, where, "in one block")
    _same_shares(trial.on_device, trial.replayed, "", "in replay")
    return same_logits(trial.on_device.logits, trial.replayed.logits)


def host_is_device(trial: Trial) -> str:
    """Both placements give the same logits bit for bit."""
    trial.require_host()
    on_device, on_host = trial.on_device.logits, trial.on_host.result.logits
    if not torch.equal(on_host, on_device):
        difference = largest_difference(on_host, on_device)
        raise BrokenError(f"logits differ by {difference:.1e}")
    return "bit for bit"


def link_carries_the_selection(trial: Trial) -> str:
    """The selected rows and the dense layers cross the link, and nothing else."""
    trial.require_host()
    trial.require_all_coded()
    host = trial.on_host
    if host.crossed != host.expected:
        raise BrokenError(
            f"{host.crossed} bytes crossed; the selected rows and dense layers are {host.expected}"
        )
    if not host.miscounted <= BUDGET_TOLERANCE * max(trial.prompts):
        raise BrokenError(f"num_read is {host.miscounted:g} tokens off what the mask names")
    return f"{host.crossed} bytes"


def rows_of_the_gpu_cache_are_counted(trial: Trial) -> str:
    """With a GPU cache the logits are the same, and as many rows cross the link as replay
    counts."""
    trial.require_host()
    if not trial.setup.method.names_rows:
        raise NotAskedError("selects no rows that a GPU cache could hold")
    (ids, real), columns = trial.batch, trial.columns
    counted, _ = trial.prefilled(gpu_cache=GPU_CACHE)
    counted.decode(ids[:, columns:], real[:, columns:])
    opened = trial.open_live(placement="host", link=trial.link, gpu_cache=GPU_CACHE)
    with closing(opened) as session:
        logits = trial.force(session)
        reads = counted.reads
        expected_shares = Result(logits, reads.budget, reads.device_frac, reads.resident_frac)
        _same_shares(result_of(session, logits), expected_shares, "", "in replay")
        crossed, expected = int(session.traffic.loaded.num_bytes), 0
        policies = [policy for policy in session.policies if policy.kind != "local"]
        for policy, store in zip(policies, session.stores, strict=True):
            if policy.kind == "method" and policy.names_rows:
                expected += reads.rows_loaded[policy.number] * store.slot_bytes
            else:  # a dense layer, or one that reads all and chooses for others
                expected += trial.every_row * store.slot_bytes
    same_logits(logits, trial.on_device.logits)
    if crossed != expected:
        raise BrokenError(f"{crossed} bytes crossed; replay counts {expected}")
    return f"{crossed} bytes; {reads.hit_frac:.0%} found on the device"


def budget_is_its_closed_form(trial: Trial) -> str:
    """The measured budget is that of `tokens_read`, where it is known, and never above
    `max_tokens_read`."""
    trial.require_all_coded()
    method, geometry, known = trial.setup.method, trial.attached.geometry, True
    rows: Counter[TokenCounts] = Counter()
    for prompt, step in product(trial.prompts, range(STEPS)):
        rows[TokenCounts(prompt + step, prompt, prompt + STEPS)] += 1
    for row, layer in product(rows, range(method.dense_layers, geometry.num_layers)):
        read, most = method.tokens_read(row, layer), method.max_tokens_read(row, layer)
        if not (0 if read is None else read) <= most <= row.cached:
            raise BrokenError(
                f"tokens_read={read}, max_tokens_read={most} at {row}: one must not exceed the next"
            )
        known &= read is not None
    found = trial.replayed.budget
    if not 0 <= found <= 1 + BUDGET_TOLERANCE:
        raise BrokenError(
            f"budget is {found}: num_read must be a number of tokens from 0 to those that are "
            "cached"
        )
    if not known:
        return f"reads what the data decides, here {found:.1%} of the cache"
    codec = codec_of_cache(trial.setup.codec, method, geometry)
    expected = expected_budget(method, rows, geometry.num_layers, code_widths(codec, geometry))
    if abs(found - expected) > BUDGET_TOLERANCE:
        raise BrokenError(f"budget is {found:.6f}; by tokens_read it is {expected:.6f}")
    return f"reads {found:.1%} of the cache"


def a_fork_is_fresh(trial: Trial) -> str:
    """Copies taken halfway go on as the whole batch does, and do not change the batch they were
    taken from."""
    (ids, real), prompt = trial.batch, trial.columns
    half = prompt + STEPS // 2
    trunk, _ = trial.prefilled()
    trunk.decode(ids[:, prompt:half], real[:, prompt:half])
    index = torch.tensor([*reversed(range(len(ids))), 0], device=ids.device)
    child = trunk.fork(index, ids.shape[1])
    rest = ids[:, half:], real[:, half:]
    forked = trial.attached.logits(child.decode(rest[0][index], rest[1][index]))
    expected = trial.replayed.logits[:, 1 + STEPS // 2 :]
    same_logits(forked, expected[index])
    return same_logits(trial.attached.logits(trunk.decode(*rest)), expected)


def padded_is_alone(trial: Trial) -> str:
    """A sequence has the logits that it has alone, whatever lies beside it in the batch and
    whatever padding stands before its prompt and behind its rows. The batch's shares are the mean
    of those of its sequences."""
    trials = [replace(trial, only=sequence) for sequence in range(len(trial.prompts))]
    alone = [own.replayed for own in trials]
    words = _same_as_alone(trial.replayed, alone, trial, "in replay")
    in_turns = trial.replay_in_turns()
    _same_as_alone(in_turns, alone, trial, "in replay with padding behind the decode rows")
    if trial.setup.method.replay_only is None:
        _same_as_alone(trial.on_device, [own.on_device for own in trials], trial, "live")
    return words


def codec_rows_are_as_counted(trial: Trial) -> str:
    """Packed rows have the bytes that are counted, read back as the round trip, and do not depend
    on one another."""
    assert trial.setup.codec is not None
    geometry = trial.attached.geometry
    generator, widths = torch.Generator().manual_seed(trial.seed), []
    for half in _halves(trial.setup.codec):
        for head_dim, dtype in product((geometry.head_dim, 24), FLOAT_DTYPES.values()):
            shape = (2, geometry.num_kv_heads, 3 * half.span, head_dim)
            rows = torch.randn(shape, generator=generator).to(trial.attached.device, dtype)
            packed = half.encode(rows.clone())
            wanted = (*shape[:-1], half.row_bytes(head_dim))
            if packed.dtype != torch.uint8 or packed.shape != wanted or wanted[-1] % 2:
                found = f"{packed.dtype} {list(packed.shape)}"
                raise BrokenError(
                    f"encode gives {found}; it must be torch.uint8 {list(wanted)}, "
                    "an even row_bytes"
                )
            back, again = half.decode(packed, head_dim, dtype), half.roundtrip(rows.clone())
            if back.dtype != dtype or back.shape != shape or not torch.equal(back, again):
                raise BrokenError(
                    f"decode of encode is not the round trip of {dtype} {list(shape)}, bit for bit"
                )
            one = slice(half.span, 2 * half.span)
            if not torch.equal(half.encode(rows[:1, :, one].clone()), packed[:1, :, one]):
                raise BrokenError("a row's code depends on the rows beside it")
            counted = half.bits_per_element(head_dim) * head_dim / 8
            is_float = isinstance(half, FloatCodec)  # it counts 16 bits in any case
            is_counted = counted <= wanted[-1] + BUDGET_TOLERANCE <= counted + PADDING_BYTES
            if not is_float and not is_counted:
                raise BrokenError(
                    f"a row of {head_dim} elements has {wanted[-1]} bytes; {counted:g} are counted"
                )
            widths.append(8 * wanted[-1] / head_dim)
    return f"{min(widths):.4g} to {max(widths):.4g} bits an element"


def _halves(codec: CacheCodec) -> list[RowCodec]:
    """The codecs of keys and of values, in all layers, each once."""
    halves: list[RowCodec] = []
    for of_layer in every_codec(codec):
        for half in (of_layer.keys, of_layer.values):
            if half not in halves:
                halves.append(half)
    return halves


CHECKS: dict[str, Callable[[Trial], str]] = {
    "live decoding is replay": live_is_replay,
    "host placement is device placement": host_is_device,
    "the link carries what is selected": link_carries_the_selection,
    "rows of the GPU cache are counted": rows_of_the_gpu_cache_are_counted,
    "the budget is its closed form": budget_is_its_closed_form,
    "a fork is fresh": a_fork_is_fresh,
    "a padded sequence is itself alone": padded_is_alone,
}
OF_CODECS: dict[str, Callable[[Trial], str]] = {
    "a codec's rows are as counted": codec_rows_are_as_counted
}
"""Checks where there is a codec, before the others, which then are of the method with it."""


def _same_as_alone(batch: Result, alone: Sequence[Result], trial: Trial, where: str) -> str:
    for logits, own, prompt in zip(batch.logits, alone, trial.prompts, strict=True):
        differs = f"the sequence with a prompt of {prompt} tokens is not what it is alone: "
        same_logits(logits[None], own.logits, f"{where}, {differs}")
    # Not resident_frac: a state may be as large as the longest sequence needs.
    for name in ("budget", "device_frac"):
        together = getattr(batch, name)
        mean = sum(getattr(own, name) for own in alone) / len(alone)
        if not abs(together - mean) <= BUDGET_TOLERANCE:
            raise BrokenError(
                f"{where}: {name} of the batch is {together:.6f}, of its sequences alone {mean:.6f}"
            )
    expected = torch.cat([own.logits for own in alone])
    return f"largest difference {largest_difference(batch.logits, expected):.1e}"


def _same_shares(got: Result, expected: Result, where: str, other: str) -> None:
    for name in ("budget", "device_frac", "resident_frac"):
        here, there = getattr(got, name), getattr(expected, name)
        if not abs(here - there) <= BUDGET_TOLERANCE:
            raise BrokenError(f"{where}{name} is {here:.6f}, and {there:.6f} {other}")


def same_logits(got: Tensor, expected: Tensor, where: str = "") -> str:
    """How close logits are, in words. Raises LogitsDifferError where they differ by more than
    `TOLERANCE`, over the largest logit where that is above 1."""
    difference = largest_difference(got, expected)
    allowed = TOLERANCE * max(1, float(expected.abs().max()))
    if not difference <= allowed:
        by_row = (got - expected).abs().amax((0, 2))
        first = int((~(by_row <= allowed)).nonzero()[0])
        raise LogitsDifferError(
            f"{where}logits differ by {difference:.1e} (allowed {allowed:.1g}), first in row "
            f"{first}"
        )
    return f"largest difference {difference:.1e}"


# The run


class Finding(NamedTuple):
    """How a check ended; `-` where it does not apply."""

    verdict: Literal["ok", "-", "FAILED"]
    words: str


def print_finding(where: str, name: str, finding: Finding) -> None:
    """Print how a check ended. where: the model, and the batch."""
    print(f"{finding.verdict:6} {where:13} {name}: {finding.words}", flush=True)


def run_contract(config: RunConfig) -> None:
    """Check a method, and its codec if any, on every model and batch, up to the first on which a
    check fails.

    Raises UserError where a check failed, or where the method takes none of the models.
    """
    codec, words = codec_of(config), f"method={config.method_name}"
    if config.own_codec is not None:
        words += f" codec={config.codec}"
    checks = CHECKS if codec is None else OF_CODECS | CHECKS
    refusals = []
    for where, trial in _trials(config.method, codec, torch.device(config.platform.name)):
        refusal = _refusal(trial)
        refusals.append(refusal)
        failed = []
        for name, check in checks.items():
            finding = Finding("-", refusal) if refusal else judge(check, trial)
            print_finding(where, name, finding)
            if finding.verdict == "FAILED":
                failed.append(name)
        if failed:
            raise UserError(
                f"{words}: {len(failed)} of {len(checks)} checks failed on {where}; no other batch "
                "was looked at"
            )
    if all(refusals):
        raise UserError(f"{words}: nothing was checked: {refusals[0]}")


def _trials(
    method: Method, codec: CacheCodec | None, device: torch.device
) -> Iterator[tuple[str, Trial]]:
    rate, method = LINK_BYTES_PER_S if device.type == "cpu" else None, method.tokenized(tiny_ids)
    for family, (model_type, shape) in MODELS.items():
        model: Any = tiny_model(model_type, **shape)
        with attach(model.to(device)) as attached, open_link(device, bytes_per_s=rate) as link:
            setup = setup_of(attached, method, codec)
            for padding, prompts in PROMPTS.items():
                yield f"{family} {padding}", Trial(attached, link, setup, prompts)


def _refusal(trial: Trial) -> str | None:
    """Why the method does not take the model, as DuoAttention none without rotary positions; None
    where it does."""
    attached, setup = trial.attached, trial.setup
    prompts = torch.tensor(PROMPTS["even"], device=attached.device)
    lengths = Lengths(prompts, prompts + STEPS)
    try:
        policies_of(attached, setup.method, needs_method=False)
        new_state(attached, setup.method, lengths, setup.calibration)
    except ValueError as error:
        return str(error)
    except Exception:
        pass  # the checks report it
    return None


def judge(check: Callable[[Trial], str], trial: Trial) -> Finding:
    """Run a check. An error in the method is a failure that names the line of its file."""
    try:
        try:
            return Finding("ok", check(trial))
        except LogitsDifferError as error:  # it counts where they differ on other tokens as well
            words = check(replace(trial, seed=trial.seed + 1))
            words += f", on other tokens; on the first, rounding may have decided: {error}"
            return Finding("ok", words)
    except NotAskedError as error:
        return Finding("-", str(error))
    except BrokenError as error:
        return Finding("FAILED", str(error))
    except Exception as error:
        said = str(error) if isinstance(error, UserError) else reason(error)
        judged: list[object] = [trial.setup.method]
        if trial.setup.codec is not None:
            for half in _halves(trial.setup.codec):
                judged.append(half.codec if isinstance(half, CheckedCodec) else half)
        files = {str(sys.modules[type(part).__module__].__file__) for part in judged}
        line = line_in(error, files)
        return Finding("FAILED", f"{said} ({line})" if line else said)

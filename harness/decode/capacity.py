"""How many sequences a device's memory holds under a method, and under the full cache on the device
beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from harness.decode.memory import GIB
from harness.decode.needs import DeviceNeeds, Plan, largest_batch
from harness.decode.share import BatchLengths
from harness.errors import UserError
from harness.model.prompts import PASS_TOKENS
from methods.full import Full

Wall = Literal["device memory", "host memory", "max_batch"]
"""Where the search for the largest batch ended."""


@dataclass(frozen=True)
class Capacity:
    """A method on a device of `device_bytes`, for sequences of prompt_len + gen_len tokens.

    device: the setting that gives the device. host_bytes: host memory for the cache; None: any.
    max_batch: the search ends there. in_one_pass: the prompts of a batch pass each layer together;
    else 2,048 of their tokens at a time. ran_out_at: a batch that fits by arithmetic, and for which
    a memory, ran_out_of, did not suffice; None: there is none.
    """

    device: str
    plan: Plan
    prompt_len: int
    gen_len: int
    device_bytes: int
    host_bytes: int | None
    max_batch: int
    in_one_pass: bool = False
    ran_out_at: int | None = None
    ran_out_of: Wall | None = None

    def __post_init__(self) -> None:
        weights = self.plan.model.weight_bytes
        if weights >= self.device_bytes:
            raise UserError(
                f"{self.device}: its {self.device_bytes / GIB:.4g} GiB must be above "
                f"{weights / GIB:.3f} GiB, which the weights take"
            )

    @property
    def context(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt_len + self.gen_len

    def lengths(self, batch: int) -> BatchLengths:
        """A batch of equal sequences."""
        return BatchLengths((self.prompt_len,) * batch, self.gen_len)

    def needs(self, batch: int) -> DeviceNeeds:
        """The bytes of a batch."""
        pass_tokens = batch * self.prompt_len if self.in_one_pass else PASS_TOKENS
        return self.plan.needs(self.lengths(batch), pass_tokens)

    def wall_of(self, batch: int) -> Wall | None:
        """The bound that a batch breaks; None where it fits."""
        needs = self.needs(batch)
        if self.ran_out_at is not None and batch >= self.ran_out_at:
            return self.ran_out_of
        if needs.device > self.device_bytes:
            return "device memory"
        if self.host_bytes is not None and needs.host > self.host_bytes:
            return "host memory"
        return "max_batch" if batch > self.max_batch else None

    @cached_property
    def largest(self) -> int:
        """The largest batch that fits; 0 where one sequence does not."""
        return largest_batch(lambda batch: self.wall_of(batch) is None, self.max_batch)

    @cached_property
    def full(self) -> Capacity:
        """The full cache on the same device."""
        model, layers = self.plan.model, []
        for layer in model.layers:
            layers.append(layer._replace(policy=layer.policy._replace(when="kept")))
        plan = Plan(replace(model, layers=layers), Full(), None, "device")
        return replace(self, plan=plan, host_bytes=None, ran_out_at=None)

    @property
    def equal_batch(self) -> int:
        """The batch at which methods are compared: the largest of the full cache on the device, at
        least 1."""
        return max(1, self.full.largest)

    def batches(self, curve: bool) -> list[int]:
        """The batches to be timed: the equal and the largest one, and the powers of two below."""
        found = {self.equal_batch, self.largest}
        power = 1
        while curve and power < self.largest:
            found.add(power)
            power *= 2
        return sorted(batch for batch in found if 0 < batch <= self.largest)

    def columns(self, batch: int) -> dict[str, Any]:
        """The columns of a table that memory decides, for a batch that fits, or for none (0)."""
        needs = self.needs(max(1, batch))
        return {
            "batch_size": batch,
            "prompt_len": self.prompt_len,
            "gen_len": self.gen_len,
            "context": self.context,
            "memory_bytes": self.device_bytes,
            "largest_batch": self.largest,
            "kv_tokens": self.largest * self.context,
            "wall": self.wall_of(self.largest + 1),
            "equal_batch": self.equal_batch,
            "device_kv_bytes": needs.session,
            "host_kv_bytes": needs.host,
        }


def points(
    capacity: Capacity, speeds: dict[int, dict[str, Any]], marks: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows of a run: one for each batch that was timed; one without numbers where no batch
    fits.

    speeds: the timed columns by batch. marks: columns that all rows have.
    """
    rows = []
    for batch, speed in speeds.items():
        rows.append(marks | capacity.columns(batch) | speed)
    if not rows:
        rows.append(marks | capacity.columns(0))
    equal = speeds.get(capacity.equal_batch, {})
    rows[-1]["equal_tokens_per_s"] = equal.get("decode_tokens_per_s")
    return rows

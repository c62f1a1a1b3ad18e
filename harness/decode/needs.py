"""What a live session takes: its layers' stores and all other memory, and the largest batch that a
device's memory holds, known without opening a session.

`LiveSession` holds the `Plan` by which it is opened (`harness.decode.opening`); the method's state
is sized by its own code (`harness.decode.state_sizes`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import torch

from harness.decode import memory
from harness.decode.disk_store import DiskStore
from harness.decode.gpu_cache import rooms
from harness.decode.memory import DEFAULT_TUNING, Tuning
from harness.decode.plan import num_slots, plan_memory
from harness.decode.resident import LocalCache
from harness.decode.share import BatchLengths
from harness.decode.state_sizes import StateSizes, state_sizes
from harness.decode.store import KVStore, RowFormat
from harness.model.attached import Attached
from harness.model.budgets import codec_of_cache
from harness.model.policies import Policy, policies_of, require_layers
from harness.model.prompts import PASS_TOKENS, PassSizes, pass_sizes
from harness.settings.config import BEHIND_LINK, Placement
from methods.base import Calibration, Geometry, Method
from methods.codecs.base import FLOAT_DTYPES
from methods.codecs.floats import FloatCodec
from methods.codecs.split import AnyCodec, CacheCodec, codec_at, mean_bits

CPU = torch.device("cpu")


class LayerSizes(NamedTuple):
    """An attention layer's cache: its policy, and the sizes of a token there. values_in_keys: as in
    `RowFormat`."""

    policy: Policy
    num_kv_heads: int
    head_dim: int
    value_dim: int
    values_in_keys: bool = False


@dataclass(frozen=True)
class ModelSizes:
    """What the memory of a session depends on in a model.

    weight_bytes: of all weights. sizes: of a pass through a layer.
    """

    layers: Sequence[LayerSizes]
    geometry: Geometry
    dtype: torch.dtype
    sizes: PassSizes
    weight_bytes: int


class DeviceNeeds(NamedTuple):
    """Bytes of a batch. All but `host` lie on the device.

    host: slots in host memory. slots: those on the device. aligned: what the pieces of all slots
    take on the device, each at its own address. windows: of local layers. buffers: of fetched rows.
    under_way: packed rows of a prompt on their way to the host. resident: exact rows, and lists of
    the GPU cache. kept: what the state keeps of the prompt; state: all of the state, calibration
    included. workspace: activations. weights: of the model.
    """

    host: int
    slots: int
    aligned: int
    windows: int
    buffers: int
    under_way: int
    resident: int
    kept: int
    state: int
    workspace: int
    weights: int

    @property
    def session(self) -> int:
        """`LiveSession.device_bytes` after the prompt."""
        return self.slots + self.windows + self.buffers + self.resident + self.state

    @property
    def asked(self) -> int:
        """`LiveSession.bytes_needed.device` after the prompt, without activations."""
        of_rows = self.aligned + self.windows + self.buffers + self.under_way
        return of_rows + self.resident + self.kept

    @property
    def device(self) -> int:
        """Device memory that must be there: weights, session and workspace."""
        return self.weights + max(self.session, self.asked) + self.workspace


@dataclass(frozen=True)
class Plan:
    """A session, and what it will take. codec: of the layers under the method; None stores rows as
    they are. of_state: the sizes of its states that are known. Other fields as in `LiveSession`."""

    model: ModelSizes
    method: Method
    codec: CacheCodec | None
    placement: Placement
    gpu_cache: float = 0
    calibration: Calibration | None = None
    of_state: dict[tuple[tuple[int, ...], int], StateSizes] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        require_layers(self.codec, self.model.geometry.num_layers)

    @cached_property
    def policies(self) -> list[Policy]:
        """What each attention layer does."""
        return [layer.policy for layer in self.model.layers]

    @property
    def coded(self) -> CacheCodec:
        """The codec of the layers under the method."""
        codec = codec_of_cache(self.codec or self.exact, self.method, self.model.geometry)
        return codec or self.exact

    def codec_of(self, policy: Policy) -> AnyCodec:
        """The codec of a layer."""
        return codec_at(self.coded, policy.number) if policy.kind == "method" else self.exact

    @property
    def reads_less(self) -> bool:
        """True if layers under the method read less than dense ones."""
        return not self.method.reads_all or mean_bits(self.coded, self.numbers) < 16

    @property
    def numbers(self) -> list[int]:
        """The layers under the method, as methods count them."""
        return [policy.number for policy in self.policies if policy.kind == "method"]

    @property
    def exact(self) -> FloatCodec:
        """The codec that stores rows as they are."""
        dtype = self.model.dtype
        return FloatCodec(next(name for name, stored in FLOAT_DTYPES.items() if stored == dtype))

    def needs(self, lengths: BatchLengths, pass_tokens: int = PASS_TOKENS) -> DeviceNeeds:
        """The bytes of a batch. pass_tokens: prompt tokens in one pass.

        Raises UserError or ValueError for a method that cannot run so.
        """
        layers = range(len(self.policies))
        windows = sum(self.window_bytes(layer, lengths) for layer in layers)
        stores = self.stores(lengths)
        has_link = self.placement in BEHIND_LINK
        plan = plan_memory(
            stores,
            self.policies,
            self.method,
            self.coded,
            lengths,
            self.rooms(lengths),
            self._pass_tokens(lengths, pass_tokens) if has_link else None,
        )
        slots = sum(store.nbytes for store in stores.values())
        aligned = sum(memory.aligned(store.nbytes) for store in stores.values())
        state = self._state(lengths)
        numbers = self.numbers
        kept = state.by_layer[numbers[0]] * len(numbers) if state.by_layer else 0
        on_device = self.placement == "device"
        return DeviceNeeds(
            host=0 if on_device else aligned,
            slots=slots if on_device else 0,
            aligned=aligned if on_device else 0,
            windows=windows,
            buffers=plan.buffers,
            under_way=plan.under_way,
            resident=plan.resident,
            kept=kept,
            state=state.whole,
            workspace=self.workspace(lengths, pass_tokens),
            weights=self.model.weight_bytes,
        )

    def rooms(self, lengths: BatchLengths) -> list[int] | None:
        """Rows of each sequence that stay on the device, with `gpu_cache`."""
        pairs = [(prompt, prompt + lengths.max_new_tokens) for prompt in lengths.prompts]
        return rooms(self.method, self.policies, self.gpu_cache, pairs)

    def window_bytes(self, layer: int, lengths: BatchLengths) -> int:
        """Bytes of a local layer; 0 for one that sees every token."""
        sizes = self.model.layers[layer]
        if sizes.policy.window is None:
            return 0
        elements = sizes.num_kv_heads * (sizes.head_dim + sizes.value_dim)
        return LocalCache.bytes_of(sizes.policy.window, lengths, elements, self.model.dtype)

    def stores(self, lengths: BatchLengths) -> dict[int, KVStore]:
        """The store of each layer that sees every token, without memory."""
        found = {}
        for layer, policy in enumerate(self.policies):
            if policy.window is None:
                found[layer] = self.store(layer, lengths)
        return found

    def store(
        self,
        layer: int,
        lengths: BatchLengths,
        device: torch.device = CPU,
        tuning: Tuning = DEFAULT_TUNING,
    ) -> KVStore:
        """The store of a layer that sees every token, without memory. device: where the layer
        computes; tuning: of the link to it. Dense layers store rows as they are, here and in
        replay."""
        sizes = self.model.layers[layer]
        codec = self.codec_of(sizes.policy)
        capacity = num_slots(self.method, sizes.policy, codec, lengths)
        row_format = RowFormat(
            codec, sizes.head_dim, self.model.dtype, sizes.value_dim, sizes.values_in_keys
        )
        on_disk = self.placement == "disk"
        new = DiskStore if on_disk else partial(KVStore, placement=self.placement, tuning=tuning)
        return new(
            row_format,
            batch=len(lengths.prompts),
            num_kv_heads=sizes.num_kv_heads,
            capacity=capacity,
            device=device,
        )

    def workspace(self, lengths: BatchLengths, pass_tokens: int = PASS_TOKENS) -> int:
        """Bytes of the activations of one layer: in a pass over `pass_tokens` of the prompts'
        tokens, or in a decode step of the whole batch, whichever are more."""
        rows = self._pass_tokens(lengths, pass_tokens)
        return self.model.sizes.num_elements(rows) * self.model.dtype.itemsize

    def _pass_tokens(self, lengths: BatchLengths, most: int) -> int:
        """Tokens in a pass over `most` of the prompts' tokens, or in a decode step, whichever are
        more."""
        batch = len(lengths.prompts)
        return max(batch, min(most, batch * max(lengths.prompts)))

    def index_bytes(self, lengths: BatchLengths) -> dict[int, int]:
        """By a layer's number, bytes of its index that a step in the middle of the decoding
        reads."""
        return dict(self._state(lengths).read)

    def _state(self, lengths: BatchLengths) -> StateSizes:
        """The sizes of the state. Those of a batch of equal prompts grow by the same number of
        bytes with each sequence."""
        batch = len(lengths.prompts)
        if batch <= 2 or len({*lengths.prompts}) > 1:
            return self._state_of(tuple(lengths.prompts), lengths.max_new_tokens)
        one = self._state_of((lengths.prompts[0],), lengths.max_new_tokens)
        two = self._state_of((lengths.prompts[0],) * 2, lengths.max_new_tokens)

        def grown(of_one: int, of_two: int) -> int:
            return of_one + (batch - 1) * (of_two - of_one)

        by_layer, read = (
            {number: grown(size, of_two[number]) for number, size in of_one.items()}
            for of_one, of_two in ((one.by_layer, two.by_layer), (one.read, two.read))
        )
        return StateSizes(grown(one.whole, two.whole), by_layer, read)

    def _state_of(self, prompts: tuple[int, ...], max_new_tokens: int) -> StateSizes:
        key = prompts, max_new_tokens
        if key not in self.of_state:
            lengths = BatchLengths(prompts, max_new_tokens)
            numbered = {}
            for policy in self.policies:
                if policy.kind == "method":
                    numbered[policy.number] = policy

            def capacity_of(number: int) -> int:
                policy = numbered[number]
                return num_slots(self.method, policy, self.codec_of(policy), lengths)

            self.of_state[key] = state_sizes(
                self.method,
                self.model.geometry,
                prompts,
                max_new_tokens,
                self.model.dtype,
                capacity_of,
                self.calibration,
            )
        return self.of_state[key]


def sizes_of(attached: Attached, method: Method) -> ModelSizes:
    """The sizes of a loaded model under a method."""
    layers = []
    for layer, policy in zip(attached.layers, policies_of(attached, method), strict=True):
        is_latent = layer.latent is not None
        layers.append(
            LayerSizes(policy, layer.num_kv_heads, layer.head_dim, layer.value_dim, is_latent)
        )
    weights = sum(weight.nbytes for weight in attached.model.parameters())
    return ModelSizes(layers, attached.geometry, attached.dtype, pass_sizes(attached), weights)


def largest_batch(fits: Callable[[int], bool], most: int) -> int:
    """The largest batch from 0 to `most` that fits, where every smaller one fits too. None that is
    far above it is asked for."""
    fitting, above = 0, 1
    while above <= most and fits(above):
        fitting, above = above, 2 * above
    between = range(fitting + 1, min(above, most + 1))
    return fitting + bisect_left(between, True, key=lambda batch: not fits(batch))

"""What a live session takes: its layers' stores and all other memory, and the largest batch that a
device's memory holds, by arithmetic alone.

`LiveSession` holds the `Plan` by which it is opened; the method's state is sized by its own code.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from harness.decode import memory
from harness.decode.disk import DiskStore
from harness.decode.gpu_cache import GpuCache, most_read, rooms
from harness.decode.memory import GIB, layer_bytes, tensor_bytes
from harness.decode.resident import LocalCache, ResidualCache, ValuesCache
from harness.decode.share import LAYERS_UNDER_WAY, BatchLengths
from harness.decode.store import KVStore, RowFormat
from harness.errors import UserError
from harness.model.attached import Attached
from harness.model.budgets import FLOAT_BYTES, codec_of_cache
from harness.model.policies import Policy, loses_tokens, policies_of, require_layers
from harness.model.prompts import PASS_TOKENS, PassSizes, pass_sizes
from harness.settings.config import BEHIND_LINK, Placement
from methods.base import Calibration, Geometry, Lengths, Method, PromptRows, QueryRows, State, When
from methods.codecs.base import FLOAT_DTYPES
from methods.codecs.floats import FloatCodec
from methods.codecs.split import AnyCodec, CacheCodec, SplitCodec, codec_at, in_pairs, mean_bits
from methods.compiled import unpacks_pairs
from methods.evicting import EvictingState
from methods.full import Full

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


class Needs(NamedTuple):
    """Bytes that a batch needs; each field says where."""

    host: int
    """Slots in host memory, with what aligns them; of a disk, the blocks of a layer that cross
    together, and those that stay open."""
    managed: int
    """Slots in either memory, with what aligns them."""
    slots: int
    """Slots on the device."""
    aligned: int
    """The same with what aligns them."""
    windows: int
    """Local layers, on the device."""
    buffers: int
    """Fetched rows, on the device."""
    under_way: int
    """A prompt's packed rows, on the device until they have reached the host."""
    resident: int
    """Exact rows and lists of the GPU cache, on the device."""
    workspace: int
    """Activations of the prompt's pass, on the device. Recording a step as a CUDA graph first gives
    them back, and the step's, of far fewer tokens, lie there."""
    weights: int
    """The model, on the device."""
    kept: int = 0
    """What the state keeps of the prompt, on the device."""
    state: int = 0
    """All of the state, calibration included, on the device."""

    @property
    def session(self) -> int:
        """`LiveSession.device_bytes` after the prompt."""
        return self.slots + self.windows + self.buffers + self.resident + self.state

    @property
    def asked(self) -> int:
        """What a session asks the device for, and what its state keeps."""
        rows = self.aligned + self.windows + self.buffers + self.under_way + self.resident
        return rows + self.kept + self.workspace

    @property
    def device(self) -> int:
        """Device memory that must be there: weights, session and workspace."""
        return self.weights + max(self.session + self.workspace, self.asked)


class StateSizes(NamedTuple):
    """Bytes of a state after the prompt.

    whole: all of it, calibration included. kept: of the tensors that it declares to keep. read: of
    a layer's index, by a step in the middle of the decoding (`Selection.side`), by the layer's
    number; where the data decides, all that is kept.
    """

    whole: int
    kept: int
    read: Mapping[int, int]


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
        return not self.method.reads_all or mean_bits(self.coded, [*self.governed]) < 16

    @cached_property
    def governed(self) -> dict[int, Policy]:
        """The policies of the layers under the method, by their numbers."""
        return {policy.number: policy for policy in self.policies if policy.kind == "method"}

    @property
    def exact(self) -> FloatCodec:
        """The codec that stores rows as they are."""
        dtype = self.model.dtype
        return FloatCodec(next(name for name, stored in FLOAT_DTYPES.items() if stored == dtype))

    def needs(
        self, lengths: BatchLengths, pass_tokens: int = PASS_TOKENS, *, with_state: bool = True
    ) -> Needs:
        """The bytes of a batch.

        pass_tokens: prompt tokens that pass a layer together. with_state: size the method's state,
        too. Raises UserError or ValueError for a method that cannot run so.
        """
        stores, rooms = self.stores(lengths), self.rooms(lengths)
        batch = len(lengths.prompts)
        tokens = max(batch, min(pass_tokens, batch * max(lengths.prompts)))  # or a step's
        sizes = [store.nbytes for store in stores.values()]
        aligned = sum(map(memory.aligned, sizes))
        host = {"host": aligned, "disk": 2 * max(sizes, default=0)}
        on_device = self.placement == "device"
        buffers = under_way = resident = 0
        if self.placement in BEHIND_LINK and stores:
            store, num_rows = self.shared_buffer(stores, lengths)
            buffers = 2 * store.buffer_bytes(num_rows)
            for layer, store in stores.items():
                if layer in self.ahead:
                    buffers += store.buffer_bytes(store.capacity)
                if rooms is not None and self.policies[layer].names_rows:
                    buffers += store.buffer_bytes(max(rooms))  # which keeps the rows
                held = store.num_kv_heads * min(tokens, batch * store.capacity) * store.slot_bytes
                under_way = max(under_way, LAYERS_UNDER_WAY * held)
        for layer, store in stores.items():
            resident += self._resident(layer, store, lengths, rooms)
        state = self.state(lengths) if with_state else StateSizes(0, 0, {})
        return Needs(
            host=host.get(self.placement, 0),
            managed=aligned if self.placement == "managed" else 0,
            slots=sum(sizes) if on_device else 0,
            aligned=aligned if on_device else 0,
            windows=sum(self._window(layer, lengths) for layer in self.model.layers),
            buffers=buffers,
            under_way=under_way,
            resident=resident,
            workspace=self.model.sizes.num_elements(tokens) * self.model.dtype.itemsize,
            weights=self.model.weight_bytes,
            kept=state.kept,
            state=state.whole,
        )

    @cached_property
    def ahead(self) -> list[int]:
        """The layers whose rows cross the link during the whole step before, each into a buffer of
        its own: dense ones, where the others read less."""
        if self.placement not in BEHIND_LINK or not self.governed or not self.reads_less:
            return []
        return [layer for layer, policy in enumerate(self.policies) if policy.kind == "full"]

    def shared_buffer(
        self, stores: Mapping[int, KVStore], lengths: BatchLengths
    ) -> tuple[KVStore, int]:
        """The largest buffer of the layers that use two in turns: whose it is, and its rows."""
        selected = 0 if self.governed else lengths.columns
        for prompt in {*lengths.prompts}:
            final = prompt + lengths.max_new_tokens
            selected = max(selected, most_read(self.method, [*self.governed], prompt, final))
        wanted = []
        for layer, store in stores.items():
            if layer not in self.ahead:
                wanted.append((store, min(selected, store.capacity)))
        return max(wanted, key=lambda buffer: buffer[0].buffer_bytes(buffer[1]))

    def _resident(
        self, layer: int, store: KVStore, lengths: BatchLengths, rooms: Sequence[int] | None
    ) -> int:
        """Bytes of a layer that stay on the device beside slots, buffers and state
        (`LayerCache.device_bytes`)."""
        codec, policy, method = store.codec, self.policies[layer], self.method
        if isinstance(codec, SplitCodec) and codec.residual:
            return ResidualCache.bytes_of(store, codec)
        num_bytes = 0
        if rooms is not None and policy.names_rows:
            num_bytes += GpuCache.bytes_of(rooms, store.num_kv_heads)
        if policy.kind == "method" and method.keeps_keys:
            most = max(method.tokens_resident(row, policy.number) for row in lengths.rows(0))
            num_bytes += ValuesCache.bytes_of(store, most, lengths.max_new_tokens)
        return num_bytes

    def rooms(self, lengths: BatchLengths) -> list[int] | None:
        """Rows of each sequence that stay on the device, with `gpu_cache`."""
        pairs = [(prompt, prompt + lengths.max_new_tokens) for prompt in lengths.prompts]
        return rooms(self.method, self.policies, self.gpu_cache, pairs)

    def _window(self, sizes: LayerSizes, lengths: BatchLengths) -> int:
        """Bytes of a local layer; 0 for one that sees every token."""
        if sizes.policy.window is None:
            return 0
        elements = sizes.num_kv_heads * (sizes.head_dim + sizes.value_dim)
        return LocalCache.bytes_of(sizes.policy.window, lengths, elements, self.model.dtype)

    def stores(self, lengths: BatchLengths, device: torch.device = CPU) -> dict[int, KVStore]:
        """The store of each layer that sees every token, without memory. device: where they
        compute. Dense layers store rows as they are, here and in replay."""
        on_disk = self.placement == "disk"
        make = DiskStore if on_disk else partial(KVStore, placement=self.placement)
        stores = {}
        for layer, sizes in enumerate(self.model.layers):
            if sizes.policy.window is not None:
                continue
            codec = self.codec_of(sizes.policy)
            if unpacks_pairs(device, self.model.dtype):
                codec = in_pairs(codec, sizes.head_dim, sizes.value_dim)
            row_format = RowFormat(
                codec, sizes.head_dim, self.model.dtype, sizes.value_dim, sizes.values_in_keys
            )
            stores[layer] = make(
                row_format,
                batch=len(lengths.prompts),
                num_kv_heads=sizes.num_kv_heads,
                capacity=self.num_slots(sizes.policy, lengths),
                device=device,
            )
        return stores

    def num_slots(self, policy: Policy, lengths: BatchLengths) -> int:
        """Slots of a layer's store, of each sequence and KV head. Those of tokens that leave the
        cache for good are used again."""
        codec, rows = self.codec_of(policy), lengths.rows(lengths.max_new_tokens)
        if policy.kind == "method" and loses_tokens(self.method):
            return max(self.method.tokens_kept(row, policy.number) for row in rows)
        if codec.residual:
            return max(codec.stored(row.cached) for row in rows)
        return lengths.columns

    def state(self, lengths: BatchLengths) -> StateSizes:
        """The sizes of the state. Those of a batch of equal prompts grow by the same number of
        bytes with each sequence."""
        prompts = tuple(lengths.prompts)
        batch, key = len(prompts), (prompts, lengths.max_new_tokens)
        if batch > 2 and len({*prompts}) == 1:
            one, two = (self.state(lengths._replace(prompts=prompts[:few])) for few in (1, 2))

            def grown(of_one: int, of_two: int) -> int:
                return of_one + (batch - 1) * (of_two - of_one)

            read = {number: grown(size, two.read[number]) for number, size in one.read.items()}
            return StateSizes(grown(one.whole, two.whole), grown(one.kept, two.kept), read)
        if key not in self.of_state:
            self.of_state[key] = state_sizes(self, lengths)
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

    def needs(self, batch: int) -> Needs:
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

    def rows(
        self, speeds: Mapping[int, dict[str, Any]], marks: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """The rows of a table: one for each batch that was timed; one without numbers where no
        batch fits.

        speeds: the timed columns by batch. marks: columns that all rows have.
        """
        rows = []
        for batch, speed in (speeds or {0: {}}).items():
            needs = self.needs(max(1, batch))
            columns = {
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
            rows.append(marks | columns | speed)
        equal = speeds.get(self.equal_batch, {})
        rows[-1]["equal_tokens_per_s"] = equal.get("decode_tokens_per_s")
        return rows


# The sizes of a state: its own code runs on tensors that have a shape and no numbers. Queries, keys
# and values lie on torch's `meta` device, where an operation makes the shape of its result and
# allocates nothing. The lengths of the sequences are real numbers, since states size their tensors
# by them. So the bytes are those that the state would have, and nothing is stated twice.

META = torch.device("meta")
CALIBRATION_TOKENS = 1024
"""Of a calibration without numbers, as by default of one with numbers."""


class ShapesAlone(TorchDispatchMode):
    """Operations on tensors with and without numbers: a result of any without has none either.

    A tensor with numbers that is written in place from one without keeps its numbers, which then
    mean nothing; its size is right.
    """

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(map(_has_no_numbers, tree_leaves((args, kwargs)))):
            return operation(*args, **kwargs)
        written = _written(operation, args, kwargs)
        without = tree_map(_without_numbers, (args, kwargs))
        out = operation(*without[0], **without[1])
        return out if written is None else written


def _has_no_numbers(value: object) -> bool:
    is_meta_tensor = isinstance(value, Tensor) and value.device == META
    return is_meta_tensor or value == META


def _without_numbers(value: Any) -> Any:
    if isinstance(value, torch.device):
        return META
    if not isinstance(value, Tensor) or value.device == META:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def _written(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that an operation writes and returns; None where it makes a new one."""
    schema = operation._schema
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[place] if place < len(args) else kwargs[argument.name]
    return None


def state_sizes(plan: Plan, lengths: BatchLengths) -> StateSizes:
    """The sizes of the state of a plan's method.

    A calibration that is needed and not given is made without numbers, as if of a text of
    `CALIBRATION_TOKENS` tokens. Raises UserError for a method whose sizes depend on the numbers,
    and ValueError as `Method.new_state`.
    """
    if plan.method.reads_all:
        return StateSizes(0, 0, {})
    # Masks and positions without numbers are faster; some states read how many tokens are real.
    for real_device in (META, torch.device("cpu")):
        try:
            return _sizes(plan, lengths, real_device)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            fault = error
    raise UserError(
        f"method {plan.method.title}: what it keeps depends on the text, so that its memory is "
        "known only after a prompt has run"
    ) from fault


@torch.inference_mode()
def _sizes(plan: Plan, lengths: BatchLengths, real_device: torch.device) -> StateSizes:
    method, geometry, dtype = plan.method, plan.model.geometry, plan.model.dtype
    batch, columns = len(lengths.prompts), max(lengths.prompts)
    heads, kv_heads, head_dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    value_dim = geometry.value_dim or head_dim
    prompt = torch.tensor(lengths.prompts)
    real = (torch.arange(columns) >= columns - prompt[:, None]).to(real_device)
    query = torch.empty(batch, heads, columns, head_dim, dtype=dtype, device=META)
    key = torch.empty(batch, kv_heads, columns, head_dim, dtype=dtype, device=META)
    value = torch.empty(batch, kv_heads, columns, value_dim, dtype=dtype, device=META)
    with ShapesAlone():
        calibration = plan.calibration
        if calibration is None and method.needs_calibration:
            calibration = _calibration(method, geometry, dtype)
        final = prompt + lengths.max_new_tokens
        state = method.new_state(geometry, Lengths(prompt, final), calibration)
        if method.rereads_prompt:
            score = torch.empty(batch, kv_heads, columns, device=META)
            state.take_scores(dict.fromkeys(plan.governed, score), PromptRows(real, columns))
        # Layers of the same slots that choose at the same time keep the same: one of them is run.
        by_layer: dict[int, int] = {}
        of_kind: dict[tuple[int, When], tuple[int, int]] = {}
        before = whole = tensor_bytes(vars(state))
        for number, policy in plan.governed.items():
            capacity = plan.num_slots(policy, lengths)
            kind = capacity, method.when_of(number)
            if kind not in of_kind:
                if isinstance(state, EvictingState):
                    state.prompt(number, query, key, value, PromptRows(real, columns))
                    state.compact(number, capacity)
                else:
                    state.prompt(number, query, key, value, PromptRows(real, capacity))
                if method.keeps_keys:
                    state.resident(number)
                after = tensor_bytes(vars(state))
                of_kind[kind] = layer_bytes(state, number), after - before
                before = after
            by_layer[number], added = of_kind[kind]
            whole += added
        # At the end, since to select may change what the state holds.
        token = batch * kv_heads * geometry.elements * FLOAT_BYTES
        middle = columns + lengths.max_new_tokens // 2
        read: dict[int, int] = {}
        read_of_kept: dict[tuple[int, When], int] = {}
        for number, kept in by_layer.items():
            kind = kept, method.when_of(number)
            if kind not in read_of_kept:
                in_tokens = _index_read(state, number, middle, dtype)
                read_of_kept[kind] = kept if in_tokens is None else round(token * in_tokens)
            read[number] = read_of_kept[kind]
    return StateSizes(whole, sum(by_layer.values()), read)


def _index_read(state: State, layer: int, row: int, dtype: torch.dtype) -> float | None:
    """What a step at this row reads of a layer's index, in tokens, mean over the sequences; None
    where the data decides."""
    when, geometry = state.method.when_of(layer), state.geometry
    if when in ("kept", "earlier_layer"):  # it chooses nothing here
        return 0.0
    batch, kv_heads = len(state.lengths.prompt), geometry.num_kv_heads
    query = torch.empty(batch, geometry.num_heads, 1, geometry.head_dim, dtype=dtype, device=META)
    key, value = query[:, :kv_heads], query[:, :kv_heads, :, : geometry.value_dim]
    scores = torch.empty(batch, kv_heads, geometry.group, 1, row + 1, device=META)
    positions = torch.full((batch, 1), row)
    slots, own = torch.arange(row + 1).expand(batch, 1, -1), positions.unsqueeze(1)
    is_real = torch.ones(batch, 1, dtype=torch.bool)
    rows = QueryRows(query, positions, is_real, slots, own, lambda: scores)
    try:
        state.append(layer, key, value, positions, slice(row, row + 1))
        side = state.select(layer, rows).side
    except (NotImplementedError, RuntimeError):  # it looks at numbers
        return None
    if side is None:
        return 0.0
    return None if side.device == META else float(side.mean())


def _calibration(method: Method, geometry: Geometry, dtype: torch.dtype) -> Calibration:
    """A calibration without numbers, of all layers."""
    size = CALIBRATION_TOKENS, geometry.head_dim
    query = torch.empty(geometry.num_heads, *size, dtype=dtype, device=META)
    key = torch.empty(geometry.num_kv_heads, *size, dtype=dtype, device=META)
    measured: list[Calibration] = []
    for _ in range(geometry.num_layers):
        measured.append(method.calibrate(query, key, geometry, measured))
    stacked = {}
    for name in measured[0]:
        stacked[name] = torch.stack([of_layer[name] for of_layer in measured])
    return stacked

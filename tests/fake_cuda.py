"""A CUDA device that is not there.

Tensors are torch's fake ones of device `cuda`. Streams and events are vector clocks. Triton kernels are not compiled,
only their arguments are checked. A `Trace` counts launches and names what would make the host wait:

    with fake_gpu() as trace, trace.follow(fake_model("opt-13b", num_hidden_layers=4)) as attached:
        assert trace.faults == []  # `with real_tensors()` inside is as if outside
"""

from __future__ import annotations

import ctypes
import inspect
import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as real_tensors
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AutoConfig, AutoModelForCausalLM

from harness import files
from harness.decode import memory, session
from harness.decode import store as copies
from harness.decode.memory import PinnedSlab
from harness.model.attach import attach, checked_decoder
from harness.model.attached import Attached
from harness.model.attention import Rotary
from harness.model.trace import DirectQuery, Layer
from tests.living import calibration, token_batch

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(f"{ROOT / folder}/" for folder in ("harness", "methods"))
CUDA = torch.device("cuda:0")
LIBC10 = Path(torch.__file__).parent / "lib" / "libc10.so"


def place() -> str:
    """Where our code is: file and line of the innermost frame of ours, and of its caller."""
    frames, frame = [], sys._getframe(1)
    while frame is not None and len(frames) < 2:
        if frame.f_code.co_filename.startswith(OURS):
            frames.append(f"{frame.f_code.co_filename.removeprefix(f'{ROOT}/')}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(frames)


# Programs


class Program:
    """What a step queues, in order: of each entry the stream, the operation, its tensors and its numbers.

    A tensor is its storage, offset, shape, strides and dtype. A storage that an earlier program has seen, of the same
    `known`, has a name of its own; others are named by their order of appearance. All are kept, so that no address
    comes again: programs of two steps are equal if the one may be run in place of the other.
    """

    current: Program | None = None

    def __init__(self, known: dict[int, tuple[str, Any]]) -> None:
        self.known = known
        self.entries: list[tuple[Any, ...]] = []
        self._names: dict[int, tuple[str, Any]] = {}

    def __enter__(self) -> Program:
        Program.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Program.current = None
        for key, (_, storage) in self._names.items():
            self.known[key] = f"known {len(self.known)}", storage

    def note(self, operation: str, given: Any) -> None:
        stream = Streams.current().number - Streams.stack[0].number
        words = [self._word(each) for each in tree_leaves(given) if isinstance(each, Tensor | int | float | str)]
        self.entries.append((stream, operation, *words, place()))

    def _word(self, given: Any) -> Any:
        if not isinstance(given, Tensor):
            return given
        storage = given.untyped_storage()
        key = storage._cdata
        if key not in self.known and key not in self._names:
            self._names[key] = f"new {len(self._names)}", storage
        name, _ = self.known.get(key) or self._names[key]
        return name, given.storage_offset(), (*given.shape,), given.stride(), given.dtype


def note(operation: str, given: Any) -> None:
    """Write an operation and all that it is given into the current program, if there is one."""
    if Program.current is not None:
        Program.current.note(operation, given)


# Streams


class Stream:
    """A vector clock: operations of each stream that end before the next one here begins.

    host: the clock that the host has waited for; waits: where it waited.
    """

    numbers = count()
    host: Counter[int] = Counter()
    waits: list[str] = []

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device or CUDA
        self.number = next(Stream.numbers)
        self.clock: Counter[int] = Counter()

    def tick(self) -> int:
        """Queue an operation; its number here."""
        self.clock |= Stream.host
        self.clock[self.number] += 1
        return self.clock[self.number]

    def wait_stream(self, other: Stream) -> None:
        note("wait_stream", [self.number, other.number])
        Capture.waits(self, Capture.current if Capture.holds(other) else None)
        self.clock |= other.clock

    def wait_event(self, event: Event) -> None:
        note("wait_event", [self.number])
        Capture.waits(self, event.capture)
        self.clock |= event.clock

    def synchronize(self) -> None:
        host_reaches(self.clock)


def host_reaches(clock: Counter[int]) -> None:
    """The host waits for these operations. Freed memory that they used is free from now on."""
    Capture.refuse_if(Capture.current is not None, "the host waits within a capture")
    Stream.host |= clock
    Stream.waits.append(place())
    Streams.used = [(storage, used) for storage, used in Streams.used if not used <= Stream.host]


class Event:
    """The clock of a stream when it was recorded."""

    def __init__(self, enable_timing: bool = False, external: bool = False) -> None:
        self.clock: Counter[int] = Counter()
        self.capture: Capture | None = None

    def record(self, stream: Stream | None = None) -> None:
        note("record", [(stream or Streams.current()).number])
        stream = stream or Streams.current()
        self.clock = Counter(stream.clock)
        self.capture = Capture.current if Capture.holds(stream) else None

    def synchronize(self) -> None:
        host_reaches(self.clock)

    def query(self) -> bool:
        return self.clock <= Stream.host

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Capture:
    """torch.cuda.graph: what is queued on the current stream, and on those that wait for it, is captured.

    It refuses what CUDA refuses: waits of the host, of a captured stream for one that is not, and a stream that the
    captured one does not wait for at the end.
    """

    current: Capture | None = None

    def __init__(self, graph: object = None, **_: Any) -> None:
        self.streams: list[Stream] = []

    def __enter__(self) -> Capture:
        self.streams.append(Streams.current())
        Capture.current = self
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        Capture.current = None
        first, *others = self.streams
        unjoined = any(first.clock[each.number] < each.clock[each.number] for each in others)
        Capture.refuse_if(kind is None and unjoined, "a stream is left unjoined")

    @staticmethod
    def holds(stream: Stream) -> bool:
        return Capture.current is not None and stream in Capture.current.streams

    @staticmethod
    def waits(stream: Stream, source: Capture | None) -> None:
        """A stream waits for what was queued within a capture, or outside of any."""
        if Capture.current is None:
            return
        if source is Capture.current and not Capture.holds(stream):
            Capture.current.streams.append(stream)
        Capture.refuse_if(source is not Capture.current and Capture.holds(stream), "a wait for what is outside")

    @staticmethod
    def refuse_if(is_refused: bool, why: str) -> None:
        if is_refused:
            raise RuntimeError(f"operation not permitted when stream is capturing: {why}")


class Streams:
    """torch.cuda's streams while the stand-ins are in place.

    recorded: storages that another stream uses. used: those that may still be in use there, as far as the host knows,
    and by which operations: freed or not, they take memory.
    """

    stack: list[Stream] = []
    recorded: set[int] = set()
    used: list[tuple[torch.UntypedStorage, Counter[int]]] = []

    @staticmethod
    def current(device: Any = None) -> Stream:
        return Streams.stack[-1]

    @staticmethod
    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        Streams.stack.append(stream)
        try:
            yield
        finally:
            Streams.stack.pop()

    @staticmethod
    def record(tensor: Tensor, stream: Stream) -> None:
        Streams.recorded.add(tensor.untyped_storage()._cdata)
        Streams.used.append((tensor.untyped_storage(), Counter(stream.clock)))

    @staticmethod
    def synchronize(device: Any = None) -> None:
        for stream in Streams.stack:
            stream.synchronize()


@contextmanager
def fake_streams() -> Iterator[pytest.MonkeyPatch]:
    """Stand-ins for torch.cuda's streams and events; everything runs on the first one until told otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("Stream", "Event"):
            patch.setattr(torch.cuda, name, globals()[name])
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "stream", Streams.on)
        patch.setattr(torch.cuda, "graph", Capture)
        patch.setattr(torch.cuda, "current_stream", Streams.current)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Capture.holds(Streams.current()))
        patch.setattr(torch.cuda, "synchronize", Streams.synchronize)
        patch.setattr(torch.Tensor, "record_stream", Streams.record)
        Streams.stack, Streams.recorded, Streams.used = [Stream()], set(), []
        Stream.host, Stream.waits, Capture.current = Counter(), [], None
        yield patch
        Streams.used = []


# CUDA's runtime


class Runtime:
    """`cuda.bindings.runtime` without CUDA; `fails` names the function that fails."""

    cudaError_t = SimpleNamespace(cudaSuccess=0)  # noqa: N815
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrConcurrentManagedAccess=89)  # noqa: N815
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)  # noqa: N815
    cudaMemAttachGlobal = 1  # noqa: N815

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.locked: dict[int, int] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.fails, self.concurrent = "", 1

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            return (2,) if name == self.fails else (0, *(getattr(self, f"_{name}", lambda *_: None)(*arguments) or ()))

        return called if name.startswith("cuda") else object.__getattribute__(self, name)

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]

    @property
    def taken(self) -> int:
        """Bytes of `cudaMalloc`, whose blocks are known by their size."""
        return sum(address for address, block in self.blocks.items() if block is None)

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"out of memory"

    def _cudaDeviceGetAttribute(self, attribute: int, index: int) -> tuple[int]:  # noqa: N802
        assert (attribute, index) == (89, 0)
        return (self.concurrent,)

    def _cudaMallocManaged(self, size: int, flags: int) -> tuple[int]:  # noqa: N802
        assert flags == self.cudaMemAttachGlobal
        block = ctypes.create_string_buffer(b"\x7f" * size, size)  # whatever was there before
        self.blocks[ctypes.addressof(block)] = block
        return (ctypes.addressof(block),)

    def _cudaMalloc(self, size: int) -> tuple[int]:  # noqa: N802
        self.blocks[size] = None
        return (size,)

    def _cudaFree(self, pointer: int) -> None:  # noqa: N802
        del self.blocks[pointer]

    def _cudaHostRegister(self, address: int, size: int, flags: int) -> None:  # noqa: N802
        assert flags == 0
        self.locked[address] = size

    def _cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.locked[address]

    def _cudaMemcpy2DAsync(  # noqa: N802
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, *_: Any
    ) -> None:
        assert 0 < width <= min(target_pitch, source_pitch)
        for line in range(height):
            ctypes.memmove(target + line * target_pitch, source + line * source_pitch, width)


def host_tensor(block: Any, device: Any) -> Tensor:
    """A managed block as a tensor of the CPU, which keeps it as one of CUDA does."""
    view = SimpleNamespace(__array_interface__=block.__cuda_array_interface__ | {"version": 3}, block=block)
    return torch.from_numpy(np.asarray(view))


@contextmanager
def fake_runtime(device_gib: float = 40) -> Iterator[Runtime]:
    """CUDA's runtime, with memory to spare."""
    runtime = Runtime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, memory.RUNTIME, runtime)
        patch.setattr(memory, "_as_tensor", host_tensor)
        patch.setattr(memory, "available_bytes", lambda device: int(device_gib * 2**30))
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (int(device_gib * 2**30) - runtime.taken, 2**40))
        patch.setattr(torch.cuda, "synchronize", lambda: runtime.calls.append(("synchronize",)))
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1234))
        yield runtime


# The device


@contextmanager
def device_guard() -> Iterator[None]:
    """Makes a switch to a CUDA device a no-op in a build of torch without CUDA."""
    cuda, meta = 1, 14  # c10::DeviceType
    registry = (ctypes.c_void_p * (meta + 1)).in_dll(
        ctypes.CDLL(str(LIBC10)), "_ZN3c104impl26device_guard_impl_registryE"
    )
    before = registry[cuda]
    registry[cuda] = before or registry[meta]
    try:
        yield
    finally:
        registry[cuda] = before


KERNELS = {torch.ops.aten.scaled_dot_product_attention.default}
"""Made of other operations on the CPU, one kernel on a GPU."""
DEVICE_OF = torch.ops.prim.device.default
LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg"}


class Trace(TorchDispatchMode):
    """What the operations under it would do on a GPU.

    layer: whose attention began last, None before the first.
    launches, link: kernels by (layer, name), on the compute stream and on any other.
    faults: (layer, what and where): waits of the host, work on the CPU, wrong arguments of kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer: int | None = None
        self.launches: Counter[tuple[int | None, str]] = Counter()
        self.link: Counter[tuple[int | None, str]] = Counter()
        self.faults: list[tuple[int | None, str]] = []
        self.pinned: set[int] = set()
        self._known = WeakTensorKeyDictionary()

    def restart(self) -> None:
        """Forget what was counted and found."""
        self.layer = None
        for found in (self.launches, self.link, self.faults):
            found.clear()

    @contextmanager
    def follow(self, model: Any) -> Iterator[Attached]:
        """`attach(model)`; the trace knows which layer is computing, from the input of its attention on."""
        with pytest.MonkeyPatch.context() as patch, ExitStack() as hooks:  # there are no numbers to check
            patch.setattr("harness.model.attach.check_decoder", lambda *_: None)
            patch.setattr("harness.model.attached.require_in_range", lambda *_: None)
            patch.setattr("harness.model.attached.require_embedded", lambda *_: None)
            patch.setattr("harness.model.attached.rotary_of", whole_heads)
            patch.setattr("harness.model.decoder.Decoder._find_unused", without_keys)
            patch.setattr("harness.model.decoder.Decoder._find_direct", without_module)
            for at, layer in enumerate(checked_decoder(model).layers):
                hooks.callback(layer.module.register_forward_pre_hook(partial(self._enter, at)).remove)
            with attach(model) as attached:
                yield attached

    @contextmanager
    def prompted(self, model: Any, prompts: tuple[int, ...]) -> Iterator[tuple[Attached, dict, Tensor, Tensor]]:
        """`follow`, and on the device a calibration, ids of prompts of these lengths, and which of them are real."""
        with self.follow(model) as attached:
            geometry = attached.geometry
            with real_tensors():
                _, real = token_batch(prompts, steps=0)
                measured = calibration(geometry.num_kv_heads, geometry.head_dim)
            known = {name: self.know(each) for name, each in measured.items()}
            yield attached, known, torch.empty(real.shape, dtype=torch.int64, device=CUDA), self.know(real)

    def _enter(self, layer: int, *_: Any) -> None:
        self.layer = layer

    def of_layer(self, layer: int) -> Counter[str]:
        """Launches from where a layer's attention begins to where the next one's does."""
        return Counter({name: number for (where, name), number in self.launches.items() if where == layer})

    def know(self, value: Tensor) -> Tensor:
        """A tensor of the device whose value the host may read, as it may any value computed from such tensors."""
        tensor = torch.empty(value.shape, dtype=value.dtype, device=CUDA)
        self._known[tensor] = value
        return tensor

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked so often that the way through the mode costs a third of a test
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", False)
        if operation.namespace == "aten" and operation not in KERNELS and operation._can_decompose():
            with self:
                out = operation.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        try:
            out = operation(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._value(operation, args)
        if pinned:
            self.pinned.add(_storage(out))
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._look(operation, args, kwargs, inputs, [each for each in tree_leaves(out) if isinstance(each, Tensor)])
        self._conclude(operation, args, kwargs, inputs, out)
        return out

    def _look(self, operation: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        name = operation._schema.name.removeprefix("aten::")
        if operation.namespace != "aten" or "empty" in name or name == "is_pinned":
            return
        if not operation._schema.is_mutable and {*map(_storage, outputs)} <= {*map(_storage, inputs)}:
            return  # a view
        used = [each for each in (*inputs, *outputs) if each.dim() or each.is_cuda]  # numbers go as arguments
        if not used:
            return
        devices = {each.device.type for each in used}
        if devices == {"cpu", "cuda"} and name == "copy_":
            self._copied(*args[:2], asynchronous=kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        elif "cpu" in devices:
            self.fault(f"{name} on {' and '.join(sorted(devices))}")
        elif name in ("index", "index_put", "index_put_") and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        ):
            self.fault(f"{name} by a mask waits for its number")
        elif name in ("where", "_to_copy") and any(not each.is_cuda for each in (*inputs, *outputs)):
            self.fault(f"{name} copies a number between host and device, and waits")
        self.count(name, args, kwargs, outputs)
        if operation in KERNELS:
            self._count_mask(kwargs.get("attn_mask", args[3] if len(args) > 3 else None))

    def _count_mask(self, mask: Tensor | None) -> None:
        """What torch launches before an attention that takes a mask: it needs a bias with aligned lines."""
        if mask is None:
            return
        if mask.dtype == torch.bool:
            for name in ("scalar_tensor", "where"):
                self.count(name)
        if mask.dtype == torch.bool or any(stride % 8 for stride in mask.stride()[:-1]):
            for name in ("fill_", "copy_"):  # of `pad`
                self.count(name)

    def fault(self, what: str) -> None:
        """Take note of it, and of where it is."""
        self.faults.append((self.layer, f"{what}, at {place()}"))

    def count(self, name: str, *given: Any) -> None:
        """Something is launched on the current stream."""
        Capture.refuse_if(
            Capture.current is not None and not Capture.holds(Streams.current()), f"{name} runs beside the capture"
        )
        note(name, given)
        Streams.current().tick()
        launched = self.launches if Streams.current() is Streams.stack[0] else self.link
        launched[self.layer, name] += 1

    def _copied(self, target: Tensor, source: Tensor, asynchronous: bool) -> None:
        if not (asynchronous and self._reachable(source) and self._reachable(target)):
            self.fault(f"copy_ of {'pageable' if asynchronous else 'any'} memory waits")
        elif not (target.is_contiguous() and source.is_contiguous()):
            self.fault("copy_ between host and device is strided: the host stages it")

    def rectangle(self, source: Tensor, target: Tensor) -> None:
        """Instead of `cudaMemcpy2DAsync` of [lines, bytes of a line]."""
        if not (self._reachable(source) and self._reachable(target)):
            self.fault("cudaMemcpy2DAsync of pageable memory waits")
        if source.shape != target.shape or {source.stride(1), target.stride(1)} != {1}:
            self.fault("cudaMemcpy2DAsync of what is no rectangle")
        self.count("cudaMemcpy2DAsync", source, target)

    def _reachable(self, tensor: Tensor) -> bool:
        """Whether the device can address it: its own memory and page-locked one."""
        return tensor.is_cuda or _storage(tensor) in self.pinned

    def _value(self, operation: Any, args: Any) -> Any:
        """Answer the host, where it may ask."""
        self.fault(f"{operation} waits for the device")
        if not isinstance(args[0], Tensor) or args[0] not in self._known:
            raise AssertionError(self.faults[-1][1])
        with real_tensors():
            return self._known[args[0]].item()

    def _conclude(self, operation: Any, args: Any, kwargs: Any, inputs: list[Tensor], out: Any) -> None:
        """What is known of `out`."""
        if not inputs or operation._schema.is_mutable or not all(each in self._known for each in inputs):
            return
        kwargs.pop("device", None)
        with real_tensors():
            args, kwargs = tree_map_only(Tensor, self._known.__getitem__, (args, kwargs))
            values = tree_leaves(operation(*args, **kwargs))
        for tensor, value in zip(tree_leaves(out), values, strict=True):
            if isinstance(tensor, Tensor):
                self._known[tensor] = value

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        """Instead of a Triton kernel's `run`: its arguments fit, its tensors can be addressed, its grid can be."""
        name = kernel.fn.__name__
        options = {key: kwargs.pop(key) for key in LAUNCH_OPTIONS & kwargs.keys()}
        arguments = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
        for key, value in arguments.items():
            if isinstance(value, Tensor) and not self._reachable(value):
                self.fault(f"{name}: {key} is not on the device")
        told = any(word in key for key in arguments for word in ("stride", "per_head"))
        for key, value in arguments.items():
            if isinstance(value, Tensor) and not (value.is_contiguous() or (told and value.stride(-1) == 1)):
                self.fault(f"{name}: {key} has strides that the kernel does not know")
        size = grid(arguments | options) if callable(grid) else grid
        if math.prod(size) < 1 or any(each > 65535 for each in size[1:]):
            self.fault(f"{name}: {size} is no grid")
        if not warmup:
            self.count(name, dict(arguments), size, options)


def without_keys(_: Any, layer: Layer) -> None:
    """What a query does without: by name, instead of by trial."""
    children = dict(layer.module.named_children())
    layer.unused = {name: children[name].out_features for name in ("k_proj", "v_proj") if name in children}
    layer.query_modules = tuple(children.keys() & {"q_proj", "q_norm"})


def without_module(_: Any, layer: Layer) -> DirectQuery | None:
    """The way to a query, by names, instead of by trial."""
    names = [name for name, _ in layer.module.named_children() if name in layer.query_modules]
    if names[:1] != ["q_proj"]:
        return None
    modules = tuple(map(layer.module.get_submodule, names))
    return DirectQuery(modules, 1, layer.num_heads, layer.head_dim, layer.positions is not None)


def whole_heads(_: Any, layer: Layer) -> Rotary:
    """Llama's positions, or none, instead of `rotary_of`, which looks at numbers."""
    size = layer.head_dim if layer.positions else 0
    return Rotary(layer, size=size, planes=slice(size // 2))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class FakeSlab(PinnedSlab):
    """Page-locked memory of the trace's."""

    def __init__(self, num_bytes: int) -> None:
        self.nbytes, self._used = num_bytes, 0
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def close(self) -> None:
        self.nbytes = 0


@cache
def fake_mode() -> FakeTensorMode:
    """One for all: tensors of different modes do not mix."""
    return FakeTensorMode()


@contextmanager
def fake_gpu() -> Iterator[Trace]:
    """Tensors are fake inside; those made with `device=CUDA` are on a GPU."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    with device_guard(), fake_streams() as patch, fake_mode(), Trace() as trace:
        for kind in (JITFunction, InterpretedFunction):
            patch.setattr(kind, "run", lambda kernel, *args, **kwargs: trace.launch(kernel, *args, **kwargs))
        patch.setattr(copies, "_memcpy_2d", trace.rectangle)
        patch.setattr(session, "PinnedSlab", FakeSlab)
        patch.setattr(files, "available_memory", lambda: 2**50)
        patch.setattr("harness.model.attach.model_digest", lambda model: object())  # another each time
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**40, 2**40))
        for name in ("memory_reserved", "memory_allocated"):
            patch.setattr(torch.cuda, name, lambda device=None: 0)
        yield trace


@cache
def fake_model(name: str, **overrides: Any) -> Any:
    """A model of a shape under conf/model, random weights in fp16; call it inside `fake_gpu`."""
    shape = yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text())["shape"] | overrides
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    with CUDA:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)

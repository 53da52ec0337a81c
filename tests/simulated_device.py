"""An accelerator without the hardware: tensors that hold their values on the CPU and say that they lie elsewhere.

Within ``with SimulatedDevice() as device`` torch knows a device ``SIM``. Operations on it compute on the CPU under
CUDA's conditions. Tensors of two devices do not mix. Reading a number on the host is a sync, which is counted with the
line of ours that caused it, and refused while a graph is captured (tests/test_recorded_rounds.py).

The first device of a process registers a backend with torch, after which CUDA's pinned memory and its autograd fail in
that process. Importing this module does not. So `make test-gpu`, which opens none, runs in a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

ROOT = Path(__file__).parents[1]
OURS = (str(ROOT / "fsd_infer"), str(ROOT / "fsd_train"))
STAGED = 2**16  # bytes of ordinary memory that CUDA copies to the device without waiting

aten = torch.ops.aten
WAITS = {  # the size of the result, or a result on the host, depends on numbers
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim,
    aten.unique_consecutive, aten.unique_dim_consecutive, aten.bincount, aten.equal, aten.multinomial,
}  # fmt: skip
BACKWARD_WAITS = {aten.cumprod, aten.prod}  # their gradients look for zeros on the host, but not in subclasses
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return False  # so that nothing chooses it by itself

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device: int) -> bool:
        return False


class _Module:
    """What torch expects of ``torch.sim``."""

    is_initialized = staticmethod(lambda: True)
    is_available = _is_in_bad_fork = staticmethod(lambda: False)
    current_device = device_count = staticmethod(lambda: 0)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


@cache
def _register() -> None:
    _setup_privateuseone_for_python_backend("sim", _Module(), _Hooks())


def is_registered() -> bool:
    """Whether torch knows the device in this process."""
    return bool(_register.cache_info().currsize)


SIM = torch.device("privateuseone", 0)  # called "sim" once it is registered
_Generator, _Event, _stream = torch.Generator, torch.Event, torch.accelerator.current_stream


class SimTensor(Tensor):
    """``value`` is on the CPU, and shared by views as memory is."""

    value: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, value: Tensor) -> SimTensor:
        like = (cls, value.shape, value.stride(), value.storage_offset())
        if value.is_inference() is torch.is_inference_mode_enabled():
            made: Any = Tensor._make_wrapper_subclass(*like, dtype=value.dtype, device=SIM)
        else:  # a view of an ordinary tensor is one in that mode too
            with torch.inference_mode(value.is_inference()):
                made = Tensor._make_wrapper_subclass(*like, dtype=value.dtype, device=SIM)
        made.value = value
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimTensor({self.value})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} on the simulated device, outside of SimulatedDevice")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert sim:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def data_ptr(self) -> int:
        return self.value.data_ptr()

    def __deepcopy__(self, memo: Any) -> Tensor:
        made: Tensor = self.detach().clone()
        memo[id(self)] = made = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:  # what is loaded again is on the CPU
        return self.detach().cpu().__reduce_ex__(protocol)


class SimGenerator(torch.Generator):
    """In place of torch.Generator. Operations get another object of the same generator: their addresses tell."""

    device = property(lambda self: SIM)
    made: ClassVar[dict[int, SimGenerator]] = {}

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls) if torch.device(device).type == SIM.type else _Generator(device)

    def __init__(self, device: Any) -> None:
        self.made[self._cdata] = self  # type: ignore[attr-defined]


class SimEvent:
    """In place of torch.Event: a place in the order of launches, until which transfers to pinned memory arrive."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.until = device, 0

    def record(self, stream: None) -> None:
        self.until = len(self.device.transfers)

    def synchronize(self) -> None:
        self.device.waited("synchronize")
        for place in range(self.until):
            into, value = self.device.transfers[place]
            into.copy_(value)
            self.device.transfers[place] = into, into  # once


class Wait(NamedTuple):
    """A wait of the host for the device: which operation, and which line of ours asked."""

    op: str
    file: str
    line: int
    function: str


class _Traits(NamedTuple):
    """What is asked of an operation at every call: torch's own answers take most of the time otherwise."""

    func: Any
    packet: Any
    decomposes: bool
    is_view: bool
    takes_numbers: bool  # on the host, without dimensions
    indexed: bool
    product: bool
    waits: bool
    waits_backward: bool


_known_traits: dict[int, _Traits] = {}  # by the operation's address: its hash is computed in Python


def _traits_of(func: Any) -> _Traits:
    packet = func.overloadpacket
    takes_numbers = torch.Tag.pointwise in func.tags or packet is aten.fill_
    sets = (packet in group for group in (INDEXED, PRODUCTS, WAITS, BACKWARD_WAITS))
    made = _Traits(func, packet, bool(func._can_decompose()), bool(func.is_view), takes_numbers, *sets)
    return _known_traits.setdefault(id(func), made)


class SimulatedDevice(TorchDispatchMode):
    """The device, while the context is open.

    Attributes:
        waits: of the host for the device, in order.
        launches: operations on the device that no graph holds.
        graph: what is being captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self.launches = 0
        self.graph: Any = None
        self.transfers: list[tuple[Tensor, Tensor]] = []  # to pinned memory: where to, and what
        self._pinned: dict[int, Tensor] = {}  # by address, kept so that none is given twice

    def __enter__(self) -> SimulatedDevice:
        _register()
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes it on the CPU, then copies
        torch.Generator = SimGenerator  # type: ignore[assignment, misc]
        torch.Event = lambda device: SimEvent(self) if device.type == SIM.type else _Event(device)  # type: ignore
        torch.accelerator.current_stream = lambda device: None if device.type == SIM.type else _stream(device)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.Generator, torch.Event = _Generator, _Event  # type: ignore[misc]
        torch.accelerator.current_stream = _stream
        torch._C._set_only_lift_cpu_tensors(self._lifts)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper takes a tenth of the time

    def waited(self, op: Any) -> None:
        """Count a wait, with the innermost line of ours outside of fsd_core/tensors.py."""
        if self.graph is not None:
            raise RuntimeError(f"{op}: operation not permitted when stream is capturing")
        frame: Any = sys._getframe()
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(OURS) and not file.endswith("fsd_core/tensors.py"):
                self.waits.append(Wait(str(op), file[len(str(ROOT)) + 1 :], frame.f_lineno, frame.f_code.co_name))
                return
            frame = frame.f_back
        self.waits.append(Wait(str(op), "", 0, ""))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traits = _known_traits.get(id(func)) or _traits_of(func)
        if traits.decomposes:  # inference mode hands composite operations on whole
            with _entered(self):
                return func.decompose(*args, **kwargs)
        packet = traits.packet
        tensors = tensors_in((*args, *kwargs.values()) if kwargs else args)
        wanted, there = kwargs.get("device"), any(isinstance(x, SimTensor) for x in tensors)
        on_sim = there if wanted is None else wanted.type == SIM.type
        if packet is aten.copy_:
            on_sim = isinstance(args[0], SimTensor)
        if there or on_sim or kwargs:
            self._check(traits, args, kwargs, tensors, on_sim, there)
        if packet is aten.is_pinned and not on_sim:
            return args[0].data_ptr() in self._pinned
        if packet is aten._pin_memory:
            copy = args[0].clone()
            return self._pinned.setdefault(copy.data_ptr(), copy)
        if kwargs.get("pin_memory") and not on_sim:
            memory = func(*args, **{**kwargs, "pin_memory": False})
            return self._pinned.setdefault(memory.data_ptr(), memory)
        if packet is aten.copy_ and not on_sim and isinstance(args[1], SimTensor) and _unblocked(args, kwargs):
            self.transfers.append((args[0], args[1].value.clone()))
            return args[0].fill_(torch.nan if args[0].is_floating_point() else 0)  # until it has arrived
        if not on_sim and not there:
            return func(*args, **kwargs)
        plain_args, plain_kwargs = _mapped(_plain, args), {name: _mapped(_plain, x) for name, x in kwargs.items()}
        out = func(*plain_args, **plain_kwargs)
        if self.graph is not None and on_sim:
            self.graph.add(func, plain_args, plain_kwargs, out)
        elif on_sim and not traits.is_view:
            self.launches += 1
        if traits.is_view and type(out) is Tensor:
            return SimTensor(out) if on_sim else out
        known = {id(_plain(x)): x for x in tensors}
        return _mapped(lambda x: _known(x, known, on_sim), out)

    def _check(self, traits: _Traits, args: Any, kwargs: Any, tensors: list[Tensor], on_sim: bool, there: bool) -> None:
        """Count what waits, refuse what CUDA refuses."""
        func, packet = traits.func, traits.packet
        generator = kwargs.get("generator")
        if generator is not None and (generator._cdata in SimGenerator.made) is not on_sim:
            raise RuntimeError(f"{func}: a generator of another device than {SIM if on_sim else 'cpu'}")
        if generator is not None and self.graph is not None and generator._cdata not in self.graph.generators:
            raise RuntimeError(f"{func}: an unregistered generator while stream is capturing")
        if not on_sim and not there:
            return
        if packet in (aten._to_copy, aten.copy_):
            return self._check_copy(func, args, kwargs, on_sim)
        host = [x for x in tensors if not isinstance(x, SimTensor)]
        if traits.indexed:
            host = self._check_indices(func, args, host)
        if any(x.dim() or not traits.takes_numbers for x in host):
            raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found sim:0 and cpu")
        if traits.product and not tensors[0].is_floating_point():
            raise NotImplementedError(f'"{packet}_cuda" not implemented for {tensors[0].dtype}')
        if traits.waits_backward and torch.is_grad_enabled():
            self.waited(func)
        if traits.waits or packet is aten.repeat_interleave and kwargs.get("output_size") is None:
            self.waited(func)

    def _check_copy(self, func: Any, args: Any, kwargs: Any, on_sim: bool) -> None:
        into = func.overloadpacket is aten.copy_
        source = args[1] if into else args[0]
        if isinstance(source, SimTensor) is on_sim or not source.numel():
            return
        unblocked = _unblocked(args, kwargs) if into else kwargs.get("non_blocking")
        pinned = source.data_ptr() in self._pinned
        if unblocked and not on_sim:
            if into and args[0].data_ptr() in self._pinned:
                return
            raise RuntimeError(f"{func}: nothing here tells when this copy to the host is done")
        if not unblocked or not pinned and source.nbytes > STAGED:
            self.waited(func)
        elif self.graph is not None and not pinned:
            raise RuntimeError(f"{func}: a copy of pageable memory while stream is capturing")

    def _check_indices(self, func: Any, args: Any, host: list[Tensor]) -> list[Tensor]:
        """What is left to be refused."""
        indices = [x for x in args[1] if x is not None]
        filled = len(args) > 2 and not args[2].dim()  # by a number: masked_fill
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices) and not filled:
            self.waited(func)
        elif isinstance(args[0], SimTensor) and any(not isinstance(x, SimTensor) for x in indices):
            self.waited(func)  # indices on the CPU are copied
        return [x for x in host if not any(x is index for index in indices)] if isinstance(args[0], SimTensor) else host


def on(where: torch.device) -> AbstractContextManager[Any]:
    """What runs on the CPU within an open device does not pass through it, which is slow."""
    return nullcontext() if where == SIM else _disable_current_modes()


def _unblocked(args: Any, kwargs: Any) -> bool:
    """Of aten.copy_."""
    return bool(kwargs.get("non_blocking")) or args[2:] == (True,)


@contextmanager
def _entered(mode: TorchDispatchMode) -> Iterator[None]:
    """Without what SimulatedDevice itself does on entry."""
    TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


def _mapped(of: Callable[[Any], Any], x: Any) -> Any:
    """An operation's arguments or results with ``of`` of each; torch's own pytree takes most of the time otherwise."""
    kind = type(x)
    return kind([_mapped(of, y) for y in x]) if kind is tuple or kind is list else of(x)


def tensors_in(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    found: list[Tensor] = []
    if type(x) in (list, tuple):
        for y in x:
            found += tensors_in(y)
    return found


def _plain(x: Any) -> Any:
    if isinstance(x, SimTensor):
        return x.value
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == SIM.type else x


def _known(x: Any, known: dict[int, Tensor], on_sim: bool) -> Any:
    """An operation's result: the argument itself where it was changed in place."""
    if not isinstance(x, Tensor):
        return x
    return known[id(x)] if id(x) in known else SimTensor(x) if on_sim else x

"""An accelerator on the CPU: its own byte budget, and a link of a chosen bandwidth and latency.

Device memory is RAM that is counted as the device's; host memory is RAM that is not. What the device computes runs
on the calling thread; transfers run on a copy thread, really beside it. Every operation's result is counted as
working memory, so the budget runs out as a GPU's does. With `check=True` every tensor that an operation reads must
lie in device memory. Times measured here are never a GPU's.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overspill.errors import LinkDefect
from overspill.machine.arena import ALIGNMENT, Block, map_memory, page_bytes
from overspill.machine.device import Device, Link, LinkTraffic, Transfer
from overspill.machine.memory import MemoryAccount
from overspill.machine.scratch import Scratch

DEFAULT_LINK = Link(bandwidth=4e9, latency_s=10e-6, measured=False)
DEFAULT_MEMORY_BYTES = 4 << 30
_COPY_CHUNK_BYTES = 1 << 20
_SLEEP_FLOOR_S = 200e-6  # a shorter wait is left on the timeline: the next transfer starts later by as much
_memmove = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)  # a foreign call through CFUNCTYPE releases the GIL


class EmulatedDevice(Device):
    """See the module. `check` is the debug mode that tests use."""

    kind = "emulated"
    torch_device = torch.device("cpu")
    unified = False

    def __init__(
        self, memory_bytes: int = DEFAULT_MEMORY_BYTES, link: Link = DEFAULT_LINK, *, check: bool = False
    ) -> None:
        self.account = MemoryAccount(memory_bytes)
        self.link: Link = link
        self.traffic = LinkTraffic()
        self.check = check
        self._timeline = _LinkTimeline(link)
        self._way_back = _LinkTimeline(link)  # a link carries both ways at once
        self._storages: dict[int, tuple[int, str]] = {}  # address -> (bytes, purpose): all of device memory
        self._freed: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._scratch = Scratch()
        self._copies: _Copies = queue.SimpleQueue()
        self._copier: threading.Thread | None = None
        self._counting = threading.Lock()

    @property
    def name(self) -> str:
        return "emulated accelerator on the CPU"

    @property
    def memory_bytes(self) -> int:
        return self.account.budget_bytes

    # -- memory ----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, purpose: str) -> Block:
        data = map_memory(nbytes)
        self._adopt(data, purpose)
        return Block(data, nbytes)

    def allocate_host(self, nbytes: int, *, pinned: bool) -> Block:
        return Block(map_memory(nbytes), page_bytes(nbytes), pinned)

    def reserve(self, purpose: str, nbytes: int) -> None:
        self.account.reserve(purpose, nbytes)

    def held_bytes(self, purpose: str) -> int:
        return self.account.held[purpose]

    def peak_bytes(self) -> int:
        return self.account.peak_bytes

    def reset_peak(self) -> None:
        self.account.reset_peak()

    def label(self, tensors: Iterable[torch.Tensor], purpose: str) -> int:
        total = 0
        for address in {tensor.untyped_storage().data_ptr() for tensor in tensors}:
            if address == 0:
                continue
            nbytes, earlier = self._storages[address]
            if earlier != purpose:
                self.account.move(nbytes, earlier, purpose)
                self._storages[address] = (nbytes, purpose)
            total += nbytes
        return total

    def owns(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return address == 0 or address in self._storages

    def _adopt(self, tensor: torch.Tensor, purpose: str) -> None:
        """Count the tensor's storage as device memory from now until it is freed."""
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address == 0 or address in self._storages:
            return
        self.account.take(purpose, nbytes)
        self._storages[address] = (nbytes, purpose)
        self._freed[address] = weakref.ref(storage, partial(self._release, address))

    def _release(self, address: int, _: object) -> None:
        del self._freed[address]
        nbytes, purpose = self._storages.pop(address)
        self.account.give(purpose, nbytes)

    # -- the link --------------------------------------------------------------------------------------------------

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def transfer(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        with self._counting:
            if self._copier is None:
                arguments = (self._copies, self._timeline)
                self._copier = threading.Thread(target=_copy_loop, args=arguments, name="overspill-link", daemon=True)
                self._copier.start()
                weakref.finalize(self, _end_copies, self._copies, self._copier)
        transfer = _EmulatedTransfer(target, source, self.traffic)
        self._count(source.nbytes)
        self._copies.put(transfer)
        return transfer

    def download(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Done on return: what the device computes is there by now, and the host has nothing to do before it comes."""
        assert target.nbytes == source.nbytes, "a transfer fills its target"
        begun = time.perf_counter()
        _memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        self.traffic.returned_bytes += source.nbytes
        self._way_back.occupy(source.nbytes, begun)
        self.traffic.stall_s += time.perf_counter() - begun
        return _DONE

    @contextmanager
    def host_execution(self) -> Iterator[None]:
        with torch._C._DisableTorchDispatch():
            yield

    def zero_copy(self, host: torch.Tensor) -> torch.Tensor:
        return LinkView.over(host, self)

    def fetch(self, host: torch.Tensor) -> torch.Tensor:
        """A device copy of `host`, same strides and same address modulo 64, at the link's speed.

        Its memory is overwritten by a later fetch once it was given back with `done_with`.
        """
        if host.numel() == 0:
            return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype)
        begun = time.perf_counter()
        span = 1 + sum((size - 1) * stride for size, stride in zip(host.shape, host.stride(), strict=True))
        shift = host.data_ptr() % ALIGNMENT
        scratch = self._scratch.take(span * host.itemsize + 2 * ALIGNMENT)
        shift = (shift - scratch.data_ptr()) % ALIGNMENT
        flat = scratch[shift : shift + span * host.itemsize].view(host.dtype)
        copy = flat.as_strided(host.shape, host.stride(), flat.storage_offset())
        distinct = tuple(slice(1) if stride == 0 else slice(None) for stride in host.stride())
        copy[distinct].copy_(host[distinct])  # what is expanded crosses once
        self.cross(host[distinct].numel() * host.itemsize, begun)
        return copy

    def done_with(self, fetched: Iterable[torch.Tensor], result: Any) -> None:
        """Give the memory of what was fetched to later fetches, but for what `result` lies in."""
        kept = {tensor.untyped_storage().data_ptr() for tensor in _tensors(result)}
        for copy in fetched:
            if copy.untyped_storage().data_ptr() not in kept:
                self._scratch.give(copy)

    def _count(self, nbytes: int) -> None:
        """A transfer was ordered, by the computing thread or by one that reads ahead."""
        with self._counting:
            self.traffic.bytes += nbytes
            self.traffic.transfers += 1

    def cross(self, nbytes: int, begun: float) -> None:
        """Hold the computing thread until the link has carried `nbytes`, the first of them at time `begun`."""
        self._count(nbytes)
        self._timeline.occupy(nbytes, begun)
        self.traffic.stall_s += time.perf_counter() - begun

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():  # inside `execution()` too: the input is foreign until it is copied
            copy = tensor.clone()
        self._adopt(copy, "working")
        return copy

    def synchronize(self) -> None:
        if self._copier is not None:
            fence = _EmulatedTransfer(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8), None)
            self._copies.put(fence)
            fence.done.wait()

    @contextmanager
    def execution(self) -> Iterator[None]:
        with _DeviceMode(self):
            yield


class _LinkTimeline:
    """One transfer at a time: each begins when the one before it has ended."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free_at = 0.0
        self._lock = threading.Lock()

    def occupy(self, nbytes: int, begun: float) -> None:
        """Return when the link has carried `nbytes`, counted from `begun` or, if later, from when it became free."""
        with self._lock:
            end = self._free_at = max(self._free_at, begun) + self._link.seconds(nbytes)
        if (rest := end - time.perf_counter()) > _SLEEP_FLOOR_S:
            time.sleep(rest)


class _EmulatedTransfer(Transfer):
    def __init__(self, target: torch.Tensor, source: torch.Tensor, traffic: LinkTraffic | None) -> None:
        assert target.nbytes == source.nbytes, "a transfer fills its target"
        self.target, self.source, self.traffic = target, source, traffic
        self.done = threading.Event()

    def run(self, timeline: _LinkTimeline) -> None:
        if self.traffic is not None:
            begun = time.perf_counter()
            target, source, nbytes = self.target.data_ptr(), self.source.data_ptr(), self.source.nbytes
            for offset in range(0, nbytes, _COPY_CHUNK_BYTES):
                _memmove(target + offset, source + offset, min(_COPY_CHUNK_BYTES, nbytes - offset))
            timeline.occupy(nbytes, begun)
        self.done.set()

    def wait(self) -> None:
        start = time.perf_counter()
        self.done.wait()
        if self.traffic is not None:
            self.traffic.stall_s += time.perf_counter() - start

    def join(self) -> None:
        self.done.wait()


class _Done(Transfer):
    def wait(self) -> None:
        return

    def join(self) -> None:
        return


_DONE = _Done()

_Copies = queue.SimpleQueue["_EmulatedTransfer | None"]


def _copy_loop(copies: _Copies, timeline: _LinkTimeline) -> None:
    while (transfer := copies.get()) is not None:
        transfer.run(timeline)
        del transfer  # its tensors are not kept until the next one comes


def _end_copies(copies: _Copies, copier: threading.Thread) -> None:
    """Let the copy thread finish; Python must not end while it holds tensors."""
    copies.put(None)
    if copier is not threading.current_thread():
        copier.join()


_VIEWS = frozenset(
    {
        "alias",
        "as_strided",
        "detach",
        "diagonal",
        "expand",
        "narrow",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
        "_unsafe_view",
        "_reshape_alias",
    }
)
_GATHERS = frozenset({"embedding", "index_select", "index", "gather"})


class LinkView(torch.Tensor):
    """A host tensor as the device sees it: each operation that reads it fetches it across the link first.

    A view of it is one again; an operation that gathers rows (embedding, index) fetches only those rows. Written to,
    it writes host memory, as a mapped GPU view does.
    """

    device_of_link: EmulatedDevice
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def over(host: torch.Tensor, device: EmulatedDevice) -> LinkView:
        with torch._C._DisableTorchDispatch():
            view = torch.Tensor._make_subclass(LinkView, host.detach(), require_grad=False)
        view.device_of_link = device
        return view

    @property
    def host(self) -> torch.Tensor:
        """The plain host tensor."""
        return torch.Tensor._make_subclass(torch.Tensor, self, require_grad=False)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LinkView(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        device = next(a.device_of_link for a in _tensors((args, kwargs)) if isinstance(a, LinkView))
        name = func.overloadpacket.__name__
        with torch._C._DisableTorchDispatch():
            if name in _VIEWS:
                plain = _mapped(lambda a: a.host if isinstance(a, LinkView) else a, (args, kwargs))
                return _mapped(lambda view: cls.over(view, device), func(*plain[0], **plain[1]))
            if name in _GATHERS and isinstance(args[0], LinkView):
                begun = time.perf_counter()
                rows: torch.Tensor = func(args[0].host, *args[1:], **kwargs)
                device.cross(rows.numel() * rows.itemsize, begun)
                return rows
            written = _written(func, args, kwargs)
            fetched: dict[int, torch.Tensor] = {}

            def cross(argument: Any) -> Any:
                if not isinstance(argument, LinkView):
                    return argument
                if any(argument is target for target in written):
                    return argument.host
                if id(argument) not in fetched:
                    fetched[id(argument)] = device.fetch(argument.host)
                return fetched[id(argument)]

            plain = _mapped(cross, (args, kwargs))
            result = func(*plain[0], **plain[1])
            device.done_with(fetched.values(), result)
            return written[0] if written and isinstance(written[0], LinkView) else result


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that `func` writes: its target in place, or its `out`."""
    if not func._schema.is_mutable:
        return []
    values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return list(
        _tensors([values.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write])
    )


def _mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """An operation's arguments or results with every tensor changed; several times faster than pytree's walk."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(change, item) for item in value)
    if isinstance(value, list):
        return [_mapped(change, item) for item in value]
    if isinstance(value, dict):
        return {name: _mapped(change, item) for name, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor among an operation's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


class _DeviceMode(TorchDispatchMode):
    """Counts what operations allocate as working memory; with `device.check`, refuses reads of foreign memory."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without torch's guard against compiling this, which costs as much as the work below. Nothing compiles it."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        device = self.device
        if device.check and func is not torch.ops.aten.lift_fresh.default:  # torch.tensor(a Python list): made here
            for argument in _tensors((args, kwargs)):
                if (
                    argument.dim() > 0
                    and not isinstance(argument, LinkView)
                    and argument.device.type == "cpu"
                    and not device.owns(argument)
                ):
                    raise LinkDefect(
                        f"{func} reads {argument.dtype} {tuple(argument.shape)} at {argument.data_ptr():#x}, "
                        "which is not in the emulated device's memory"
                    )
        result = func(*args, **kwargs)
        for tensor in (result,) if isinstance(result, torch.Tensor) else _tensors(result):
            if not isinstance(tensor, LinkView) and tensor.is_cpu:
                device._adopt(tensor, "working")
        return result

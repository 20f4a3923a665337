"""What the host tier asks of the CUDA runtime: pinning, managed memory, and whether work is done.

``torch.cuda.cudart()`` offers registration only. The rest is called in the library that torch is linked with, so that
both see the same context and the same last error.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from . import host_os

_PORTABLE_MAPPED = 0x01 | 0x02
_ATTACH_GLOBAL = 1
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5
_ON_DEVICE, _ON_HOST, _CPU_DEVICE = 1, 2, -1
_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3


class Driver(Protocol):
    """What a pool needs of a device. Calls that can fail return what went wrong, in words, and leave no trace of it."""

    node: int | None
    """The NUMA node of the device; None where that makes no difference."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Pin host memory and map it into the device at the same address."""

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`, by the address given there."""

    def allocate_managed(self, nbytes: int) -> tuple[int, str | None]:
        """Address of pageable host memory that kernels can read, 0 where there is none; and what went wrong."""

    def free_managed(self, address: int) -> None: ...

    def copies_cross_registrations(self) -> bool:
        """Whether one copy may read and write memory that was pinned in more than one piece."""

    def current_stream(self) -> Any: ...

    def record(self, streams: Sequence[Any]) -> list[Any] | None:
        """An event on each stream; None while one of them, or the current one, is being captured into a graph."""

    def done(self, event: Any) -> bool: ...


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


@functools.cache
def _library() -> ctypes.CDLL:
    """The CUDA (or HIP) runtime that torch is linked with: a process may hold others, each with its own last error.

    A library's handle also finds what the libraries that it needs define.
    """
    name = "libc10_hip.so" if torch.version.hip else "libc10_cuda.so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


class CudaDriver:
    """The runtime of one CUDA device. Safe to call from any thread, also while a graph is captured."""

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            raise ValueError("a CUDA device needs an index")
        torch.cuda.init()
        self.device = device
        self._prefix = "hip" if torch.version.hip else "cuda"
        self._crosses: bool | None = None
        self.node = host_os.numa_node(self._pci_address())

    def _call(self, name: str, *arguments: Any) -> int:
        """The status of a call; an error is also cleared, so that torch's next check does not meet it."""
        status = int(getattr(_library(), self._prefix + name)(*arguments))
        if status:
            getattr(_library(), self._prefix + "GetLastError")()
        return status

    def _words(self, status: Any) -> str:
        cudart = torch.cuda.cudart()
        return str(cudart.cudaGetErrorString(cudart.cudaError(int(status))))

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """This device, and calls allowed that a capture in some thread would forbid; neither touches the capture."""
        mode = ctypes.c_int(_RELAXED)
        with torch.cuda.device(self.device):
            self._call("ThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                self._call("ThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def _pci_address(self) -> str:
        text = ctypes.create_string_buffer(32)
        status = self._call("DeviceGetPCIBusId", text, 32, ctypes.c_int(self.device.index))
        return "" if status else text.value.decode()

    def register(self, address: int, nbytes: int) -> str | None:
        with self._on_device():
            status = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE_MAPPED))
            if status:
                self._call("GetLastError")
                return self._words(status)
            seen = ctypes.c_void_p()
            status = self._call(
                "HostGetDevicePointer", ctypes.byref(seen), ctypes.c_void_p(address), 0
            )
            if status == 0 and seen.value == address:
                return None
            self.unregister(address)
            return (
                self._words(status) if status else "the device sees host memory at other addresses"
            )

    def unregister(self, address: int) -> None:
        with self._on_device():
            if int(torch.cuda.cudart().cudaHostUnregister(address)):
                self._call("GetLastError")

    def allocate_managed(self, nbytes: int) -> tuple[int, str | None]:
        with self._on_device():
            found = ctypes.c_void_p()
            status = self._call(
                "MallocManaged", ctypes.byref(found), ctypes.c_size_t(nbytes), _ATTACH_GLOBAL
            )
            if status:
                return 0, self._words(status)
            address = int(found.value or 0)
            # Only advice: without it the memory may move to the device, and back.
            self._advise(address, nbytes, _PREFERRED_LOCATION, _ON_HOST, _CPU_DEVICE)
            self._advise(address, nbytes, _ACCESSED_BY, _ON_DEVICE, self.device.index)
            return address, None

    def _advise(self, address: int, nbytes: int, advice: int, kind: int, device: int) -> None:
        version = torch.version.cuda
        if version is not None and int(version.split(".")[0]) >= 13:
            where: Any = _Location(kind, 0 if kind == _ON_HOST else device)
        else:
            where = ctypes.c_int(device)
        self._call("MemAdvise", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice, where)

    def free_managed(self, address: int) -> None:
        with self._on_device():
            self._call("Free", ctypes.c_void_p(address))

    def copies_cross_registrations(self) -> bool:
        """Tried once: the documentation is silent, and drivers may differ."""
        if self._crosses is None:
            if self._capturing(self.current_stream()):
                return False  # try again later
            self._crosses = self._try_copies()
        return self._crosses

    def _try_copies(self) -> bool:
        """Copies of all kinds, small and large, across the border of two registrations."""
        half = 256 << 10
        pinned = host_os.map_memory(2 * half, huge_pages=False)
        pageable = host_os.map_memory(2 * half, huge_pages=False)
        registered: list[int] = []
        try:
            for at in (pinned, pinned + half):
                if self.register(at, half) is not None:
                    return False
                registered.append(at)
            stream = torch.cuda.Stream(self.device)  # of its own: nothing to wait for
            with self._on_device(), torch.cuda.stream(stream):
                scratch = torch.empty(2 * half, dtype=torch.uint8, device=self.device)
                failed = 0
                for nbytes in (4096, 2 * half):
                    across = pinned + half - nbytes // 2
                    for target, source, kind in (
                        (scratch.data_ptr(), across, _DEVICE_TO_DEVICE),
                        (across, scratch.data_ptr(), _DEVICE_TO_DEVICE),
                        (pageable, across, _DEVICE_TO_HOST),
                        (across, pageable, _HOST_TO_DEVICE),
                    ):
                        failed |= self._call(
                            "MemcpyAsync",
                            ctypes.c_void_p(target),
                            ctypes.c_void_p(source),
                            ctypes.c_size_t(nbytes),
                            kind,
                            ctypes.c_void_p(stream.cuda_stream),
                        )
                stream.synchronize()
                return not failed
        finally:
            for at in registered:
                self.unregister(at)
            host_os.unmap(pinned, 2 * half)
            host_os.unmap(pageable, 2 * half)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def _capturing(self, stream: torch.cuda.Stream) -> bool:
        status = ctypes.c_int(0)
        failed = self._call(
            "StreamIsCapturing", ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status)
        )
        return bool(failed or status.value)

    def record(self, streams: Sequence[torch.cuda.Stream]) -> list[torch.cuda.Event] | None:
        with self._on_device():
            if any(self._capturing(stream) for stream in (self.current_stream(), *streams)):
                return None
            events = []
            for stream in streams:
                event = torch.cuda.Event()
                event.record(stream)
                events.append(event)
            return events

    def done(self, event: torch.cuda.Event) -> bool:
        with self._on_device():
            return not self._capturing(self.current_stream()) and event.query()

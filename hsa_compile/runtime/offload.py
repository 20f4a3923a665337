"""Writes to host memory beside the computation: one stream a device, joined before anybody reads.

A :class:`Writer` runs work on a stream of its own, after all that is queued on the current one. *Joining* makes the
stream that asked for the work wait for it, on the device and not on the host; what is queued there from then on sees
what was written. Tensors that the work reads are held until it is joined: the allocator's own way to free them earlier
(``Tensor.record_stream``) waits until the host sees an event pass, and a host that runs ahead of the device would find
no memory to use again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .host_memory import host_pool


class Writer:
    """Where there is one memory, as on a CPU, work is done when it is asked for, and joined at once."""

    def run(self, work: Callable[[], object], *reads: Tensor) -> None:
        """Do ``work``, which reads ``reads`` and writes to host memory, after all that is queued so far."""
        work()

    def join(self) -> None:
        """Order what is queued next after all work so far."""


@dataclass
class _Queued:
    """Work that was not joined yet: who asked for it, when it is done, and what it reads."""

    asked: torch.cuda.Stream
    done: torch.cuda.Event
    reads: tuple[Tensor, ...]


class StreamWriter(Writer):
    """The writer of a CUDA device. Safe to use from any thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._queued: list[_Queued] = []
        self._lock = threading.Lock()
        host_pool(device).used_on(self.stream)

    def run(self, work: Callable[[], object], *reads: Tensor) -> None:
        asked = torch.cuda.current_stream(self.device)
        host_pool(self.device).used_on(asked)
        with self._lock:
            self.stream.wait_stream(asked)
            try:
                with torch.cuda.stream(self.stream):
                    work()
            finally:  # also of work that broke off: a part of it may be queued
                self._queued.append(_Queued(asked, self.stream.record_event(), reads))

    def join(self) -> None:
        if not self._queued or torch.cuda.is_current_stream_capturing():
            return  # what was queued before a capture cannot be waited for within it
        with self._lock:
            while self._queued:
                first = self._queued[0]
                first.asked.wait_event(first.done)
                current = torch.cuda.current_stream(self.device)
                if current != first.asked:
                    current.wait_event(first.done)
                del self._queued[0], first


_writers: dict[torch.device, Writer] = {}
_writers_lock = threading.Lock()


def writer(device: torch.device) -> Writer:
    """The writer of a device (of which ``device`` has the index), made at the first call."""
    found = _writers.get(device)
    if found is None:
        with _writers_lock:
            made = StreamWriter(device) if device.type == "cuda" else Writer()
            found = _writers.setdefault(device, made)
    return found


def join_all() -> None:
    """Join the work of all devices; costs next to nothing where there is none."""
    for one in tuple(_writers.values()):
        one.join()

"""Host memory that kernels read: exact in size, pinned, reused by later requests, and given back only when unread.

A :class:`HostPool` (one a device) hands out a :class:`HostBlock`, whose memory is seen as tensors *on the device*.
Memory stays in use while the block or any tensor on it lives. Then it waits until the work that may still read it is
done: an event is recorded on every stream that is known to use it (:meth:`HostPool.used_on`), at the next call of the
pool rather than in the destructor, which may run anywhere, also within a CUDA graph capture. A later event only waits
longer. After that it is idle: still pinned, because pinning is slow, and handed out again.

A block that grows (:meth:`HostPool.reserve`) holds the address space of its largest size, so that tensors on it never
move, and pins what is committed.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hsa_compile.errors import HostMemoryError

from . import host_os
from .host_block import HostBlock, HostBytes, expose
from .host_cuda import CudaDriver, Driver
from .host_os import PAGE, in_words, round_up
from .host_region import Memory, Region, RegionError, Span

_PIN_RATE = 4 << 30  # bytes a second; freed memory is waited for no longer than pinning would take
_LAST_PATIENCE_S = 10.0  # how long it is waited for where there is no more
_POLL_S = 2e-4


class HostPool:
    """Host memory for the KV caches of one device. Safe to use from any thread.

    Args:
        device: a CUDA device, or the CPU: there the memory is plain and nothing is pinned.
        keep_idle: how many idle bytes to keep for later requests; None keeps as many as make, with those in use or
            still read, the largest sum of these that ever was.
        pin_chunk: pin at most so many bytes at a time, on several threads; None pins a block at once, after its
            pages were filled on several threads, and in chunks only where that fails.
        threads: how many threads fill and pin memory.
        driver: what to call for pinning; None takes the CUDA runtime.
    """

    def __init__(
        self,
        device: torch.device,
        keep_idle: int | None = None,
        pin_chunk: int | None = None,
        threads: int = min(8, os.cpu_count() or 1),
        driver: Driver | None = None,
    ) -> None:
        if driver is None and device.type == "cuda":
            driver = CudaDriver(device)
        self.device, self.keep_idle = device, keep_idle
        self._driver = driver
        self._memory = Memory(driver, pin_chunk, threads)
        self._lock = threading.RLock()
        self._regions: list[Region] = []
        self._live: set[Span] = set()
        self._freed: deque[Span] = deque()  # appended to by destructors, which take no lock
        self._waiting: list[_Waiting] = []
        self._streams: dict[Any, Any] = {}
        self._peak = 0
        if device.type == "cuda":
            self.used_on(torch.cuda.default_stream(device))

    def allocate(self, nbytes: int) -> HostBlock:
        """A block of ``nbytes``, rounded up to OS pages.

        Raises:
            HostMemoryError: there is not that much; nothing was changed.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes {nbytes} is negative")
        nbytes = max(round_up(nbytes), PAGE)
        with self._lock:
            self._use_current_stream()
            self._poll()
            span = self._reuse(nbytes) or self._reuse_soon(nbytes) or self._make(nbytes)
            return self._block(span)

    def reserve(self, nbytes: int, rows: int = 1) -> HostBlock:
        """A block that grows up to ``nbytes``: address space only, until :meth:`HostBlock.commit`.

        Reading or writing what is not committed is an illegal memory access on a GPU.

        Args:
            nbytes: its largest size.
            rows: of how many equal rows it is made, each of which grows; decides how finely memory is committed.

        Raises:
            HostMemoryError: the address space is refused.
        """
        if nbytes <= 0 or rows <= 0:
            raise ValueError(f"nbytes {nbytes} and rows {rows} must be positive")
        nbytes, grain = round_up(nbytes), _grain(nbytes // rows)
        with self._lock:
            self._use_current_stream()
            self._poll()
            region = self._reserved(nbytes, grain)
            if region is None:
                try:
                    region = self._memory.reserve(nbytes, grain)
                except RegionError as error:
                    raise self._exhausted(nbytes, str(error)) from error
                self._regions.append(region)
            return self._block(region.take(0, nbytes))

    def used_on(self, stream: Any) -> None:
        """Have freed memory wait for this stream too. Known already: the default stream, and the current one of
        every call that allocates."""
        with self._lock:
            self._streams.setdefault(getattr(stream, "cuda_stream", stream), stream)

    def bytes(self) -> HostBytes:
        """What the pool holds at this moment."""
        with self._lock:
            self._poll()
            pinned = sum(span.held for span in self._live if span.region.pinned)
            in_use = sum(span.held for span in self._live)
            return HostBytes(
                in_use=in_use,
                pinned=pinned,
                pageable=in_use - pinned,
                waiting=sum(freed.span.held for freed in self._waiting),
                idle=sum(region.idle for region in self._regions),
                pinned_idle=sum(region.idle for region in self._regions if region.pinned),
            )

    def trim(self) -> int:
        """Unpin and unmap the regions of which nothing is in use; returns how many bytes that were."""
        with self._lock:
            self._poll()
            return self._release_idle(0)

    def commit(self, span: Span, ranges: Iterable[tuple[int, int]]) -> int:
        """What :meth:`HostBlock.commit` does."""
        with self._lock:
            region = span.region
            cells = region.missing(ranges)
            more = sum(nbytes for _, nbytes in region.runs(cells))
            if not cells:
                return 0
            self._poll()
            self._release_idle(self._keep(more))
            if not self._room(more):
                self._release_idle(0)
                if not self._room(more):
                    raise self._exhausted(more)
            try:
                self._memory.commit(region, cells)
            except RegionError as error:
                raise self._exhausted(more, str(error)) from error
            self._peak = max(self._peak, self._busy())
            return more

    # All below: with the lock held.

    def _use_current_stream(self) -> None:
        if self._driver is not None:
            self.used_on(self._driver.current_stream())

    def _poll(self) -> None:
        """Move freed memory on: to those waiting for queued work, and from there to the idle."""
        while self._freed:
            span = self._freed.popleft()
            self._live.remove(span)
            self._waiting.append(_Waiting(span))
        if not self._waiting:
            return
        if self._driver is not None:
            unmarked = [freed for freed in self._waiting if freed.events is None]
            events = self._driver.record(list(self._streams.values())) if unmarked else None
            for freed in unmarked:
                freed.events = events if events is None else list(events)
        still: list[_Waiting] = []
        for freed in self._waiting:
            if self._is_read(freed):
                still.append(freed)
            else:
                freed.span.region.give_back(freed.span)
        self._waiting = still
        self._release_idle(self._keep(0))

    def _is_read(self, freed: _Waiting) -> bool:
        """Whether queued work may still read it."""
        if self._driver is None:
            return False
        if freed.events is None:
            return True
        while freed.events and self._driver.done(freed.events[-1]):
            freed.events.pop()
        return bool(freed.events)

    def _reuse(self, nbytes: int) -> Span | None:
        """The smallest idle memory that is large enough, cut to size."""
        fits = [(best, region) for region in self._regions if (best := region.best(nbytes))]
        if not fits:
            return None
        (_, offset), region = min(fits, key=lambda fit: fit[0])
        return region.take(offset, nbytes)

    def _reuse_soon(self, nbytes: int, patience: float | None = None) -> Span | None:
        """As :meth:`_reuse`, waiting for memory that is still read no longer than pinning other would take."""
        patience = nbytes / _PIN_RATE if patience is None else patience
        until = time.monotonic() + patience
        while any(freed.events for freed in self._waiting) and time.monotonic() < until:
            time.sleep(_POLL_S)
            self._poll()
            span = self._reuse(nbytes)
            if span is not None:
                return span
        return None

    def _reserved(self, nbytes: int, grain: int) -> Region | None:
        """A reservation of an earlier request that is free, or about to be."""
        same = [r for r in self._regions if (r.nbytes, r.grain) == (nbytes, grain)]
        soon = [freed.span for freed in self._waiting if freed.span.region in same and freed.events]
        until = time.monotonic() + max((span.held for span in soon), default=0) / _PIN_RATE
        while True:
            for region in same:
                if region.whole and region in self._regions:
                    return region
            if time.monotonic() >= until:
                return None
            time.sleep(_POLL_S)
            self._poll()

    def _make(self, nbytes: int) -> Span:
        self._release_idle(self._keep(nbytes))
        if not self._room(nbytes):
            span = self._reuse_soon(nbytes, _LAST_PATIENCE_S)
            if span is not None:
                return span
            self._release_idle(0)
            if not self._room(nbytes):
                raise self._exhausted(nbytes)
        try:
            region = self._memory.make(nbytes)
        except RegionError as error:
            raise self._exhausted(nbytes, str(error)) from error
        self._regions.append(region)
        return region.take(0, nbytes)

    def _room(self, nbytes: int) -> bool:
        return nbytes <= host_os.available().nbytes

    def _keep(self, more: int) -> int:
        """How much may stay idle once ``more`` bytes are in use."""
        if self.keep_idle is not None:
            return self.keep_idle
        return max(0, self._peak - self._busy() - more)

    def _busy(self) -> int:
        """Bytes in use, or freed and perhaps still read."""
        waiting = sum(freed.span.held for freed in self._waiting)
        return waiting + sum(span.held for span in self._live)

    def _release_idle(self, keep: int) -> int:
        """Release regions of which nothing is in use until at most ``keep`` bytes are idle; returns their bytes."""
        excess = sum(region.idle for region in self._regions) - keep
        released = 0
        while released < excess:
            whole = [region for region in self._regions if region.whole]
            if not whole:
                break
            enough = [region for region in whole if region.idle >= excess - released]
            region = (
                min(enough, key=lambda r: r.idle) if enough else max(whole, key=lambda r: r.idle)
            )
            self._regions.remove(region)
            released += region.idle
            self._memory.release(region)
        return released

    def _exhausted(self, nbytes: int, why: str = "") -> HostMemoryError:
        held, left = self.bytes(), host_os.available()
        return HostMemoryError(
            f"{in_words(nbytes)} ({nbytes} bytes) of host memory for KV caches cannot be had"
            + (f": {why}. " if why else ". ")
            + f"{in_words(left.nbytes)} can still be taken ({left.bound}, less a margin); caches hold "
            f"{in_words(held.in_use)}, {in_words(held.pinned)} of it pinned, and {in_words(held.idle)} is idle. "
            "Free caches that are done with, use a smaller batch or a shorter context, or give this process more memory"
        )

    def _block(self, span: Span) -> HostBlock:
        try:
            owner, storage = expose(span, self.device)
        except BaseException:
            span.region.give_back(span)
            raise
        self._live.add(span)
        self._peak = max(self._peak, self._busy())
        weakref.finalize(owner, self._freed.append, span).atexit = False
        return HostBlock(self, span, storage)


@dataclass
class _Waiting:
    """Freed memory, and the events that have to pass before it is idle; None where none could be recorded yet."""

    span: Span
    events: list[Any] | None = None


def _grain(row: int) -> int:
    """In cells of which size a row of ``row`` bytes is committed: 2 MiB where that wastes little, else 64 KiB."""
    return host_os.HUGE_PAGE if row >= 16 * host_os.HUGE_PAGE else 64 << 10


_pools: dict[torch.device, HostPool] = {}
_pools_lock = threading.Lock()


def host_pool(device: torch.device | str) -> HostPool:
    """The pool of a device, made at the first call."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _pools_lock:
        if device not in _pools:
            _pools[device] = HostPool(device)
        return _pools[device]


def allocate(nbytes: int, device: torch.device | str) -> HostBlock:
    """``nbytes`` of host memory that ``device`` reads; see :meth:`HostPool.allocate`."""
    return host_pool(device).allocate(nbytes)


def host_bytes() -> HostBytes:
    """Host memory of all pools."""
    return sum((pool.bytes() for pool in list(_pools.values())), HostBytes())


def trim() -> int:
    """Give back what is idle in all pools; returns how many bytes that were."""
    return sum(pool.trim() for pool in list(_pools.values()))

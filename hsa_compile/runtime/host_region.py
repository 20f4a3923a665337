"""Regions of host memory: mapped or reserved address space, pinned whole or chunk by chunk, shared out in spans.

Where pinning fails, smaller chunks are tried, then managed memory that stays on the host, which is pageable and slower
but gives the same results.
"""

from __future__ import annotations

import bisect
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from . import host_os
from .host_cuda import Driver
from .host_os import in_words

PIN_CHUNKS = (64 << 20, 16 << 20, 4 << 20, 1 << 20)
"""Sizes to pin by, where more at once was refused."""


class RegionError(Exception):
    """Memory that cannot be had; the message says why. Nothing is kept of it."""


@dataclass(eq=False)
class Region:
    """Consecutive host memory, ``nbytes`` from ``address``, the free parts of which are known.

    With a ``grain`` it is one span, and only the cells of that size in ``committed`` are backed by memory.
    """

    address: int
    nbytes: int
    pinned: bool
    managed: bool = False
    grain: int | None = None
    registered: list[tuple[int, int]] = field(default_factory=list)
    committed: set[int] = field(default_factory=set)
    free: list[tuple[int, int]] = field(default_factory=list)
    """``(offset, bytes)``, by offset, never adjacent."""

    def __post_init__(self) -> None:
        self.free = [(0, self.nbytes)]

    @property
    def whole(self) -> bool:
        """Nothing of it is in use."""
        return self.free == [(0, self.nbytes)]

    @property
    def idle(self) -> int:
        """Free bytes that are backed by memory."""
        free = sum(size for _, size in self.free)
        return free if self.grain is None or not free else self.held(0, self.nbytes)

    def held(self, offset: int, nbytes: int) -> int:
        """How many bytes of a span are backed by memory."""
        if self.grain is None:
            return nbytes
        cells = -(-self.nbytes // self.grain)
        cut = cells * self.grain - self.nbytes if cells - 1 in self.committed else 0
        return len(self.committed) * self.grain - cut

    def best(self, nbytes: int) -> tuple[int, int] | None:
        """``(bytes, offset)`` of the smallest free part that a span of ``nbytes`` fits into."""
        if self.grain is not None:
            return None
        return min(((size, at) for at, size in self.free if size >= nbytes), default=None)

    def take(self, offset: int, nbytes: int) -> Span:
        """A span at the start of the free part at ``offset``."""
        at = next(i for i, (start, _) in enumerate(self.free) if start == offset)
        _, size = self.free.pop(at)
        if size > nbytes:
            self.free.insert(at, (offset + nbytes, size - nbytes))
        return Span(self, offset, nbytes)

    def give_back(self, span: Span) -> None:
        """Make a span free, joined with its free neighbours."""
        at = bisect.bisect(self.free, (span.offset, 0))
        start, end = span.offset, span.offset + span.nbytes
        if at < len(self.free) and self.free[at][0] == end:
            end += self.free.pop(at)[1]
        if at and sum(self.free[at - 1]) == start:
            at -= 1
            start = self.free.pop(at)[0]
        self.free.insert(at, (start, end - start))

    def missing(self, ranges: Iterable[tuple[int, int]]) -> set[int]:
        """The cells that byte ranges touch and that are not committed.

        Raises:
            ValueError: a range reaches outside.
        """
        if self.grain is None:
            raise ValueError("this block does not grow; reserve() makes one that does")
        cells: set[int] = set()
        for first, end in ranges:
            if not 0 <= first <= end <= self.nbytes:
                raise ValueError(f"bytes {first} to {end} are outside of a block of {self.nbytes}")
            if first < end:
                cells.update(range(first // self.grain, -(-end // self.grain)))
        return cells - self.committed

    def runs(self, cells: Iterable[int]) -> Iterator[tuple[int, int]]:
        """``(offset, bytes)`` of cells, adjacent ones as one; the last cell may be cut off by the region's end."""
        assert self.grain is not None
        start = previous = None
        for cell in [*sorted(cells), None]:
            if start is not None and previous is not None and cell != previous + 1:
                end = min((previous + 1) * self.grain, self.nbytes)
                yield start * self.grain, end - start * self.grain
                start = None
            if start is None:
                start = cell
            previous = cell


@dataclass(frozen=True, eq=False)
class Span:
    """A part of a region that is, or was, in use."""

    region: Region
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        return self.region.address + self.offset

    @property
    def held(self) -> int:
        """Bytes that are backed by memory."""
        return self.region.held(self.offset, self.nbytes)


class Memory:
    """Makes and releases regions for one device. ``driver`` None: plain memory."""

    def __init__(self, driver: Driver | None, pin_chunk: int | None, threads: int) -> None:
        self.driver, self.pin_chunk, self.threads = driver, pin_chunk, threads
        self._warned = False

    def make(self, nbytes: int) -> Region:
        """A region of whole OS pages, all of it backed by memory.

        Raises:
            RegionError: it cannot be had.
        """
        address = self._map(nbytes, huge_pages=True)
        if self.driver is None:
            return Region(address, nbytes, pinned=False)
        region = Region(address, nbytes, pinned=True)
        try:
            self._fill(address, nbytes)
            self._pin(region, address, nbytes)
        except RegionError as error:
            self.release(region)
            return self._managed(nbytes, str(error))
        except BaseException:
            self.release(region)
            raise
        return region

    def reserve(self, nbytes: int, grain: int) -> Region:
        """A region of address space that memory is committed to in cells of ``grain`` bytes.

        Raises:
            RegionError: the address space is refused.
        """
        if self.driver is not None and not self.driver.copies_cross_registrations():
            why = "the driver does not copy across pieces that were pinned one by one"
            return self._managed(nbytes, why, grain)
        address = self._map(nbytes, huge_pages=grain >= host_os.HUGE_PAGE)
        region = Region(address, nbytes, pinned=self.driver is not None, grain=grain)
        if self.driver is not None:
            try:
                self.commit(region, {0})  # the device knows an address by what is pinned there
            except RegionError as error:
                self.release(region)
                return self._managed(nbytes, str(error), grain)
            except BaseException:
                self.release(region)
                raise
        return region

    def commit(self, region: Region, cells: set[int]) -> None:
        """Back cells that are not yet committed with memory.

        Raises:
            RegionError: it cannot be had; no cell was committed.
        """
        if region.pinned:
            known = len(region.registered)
            runs = [(region.address + at, nbytes) for at, nbytes in region.runs(cells)]
            try:
                for address, nbytes in runs:
                    self._fill(address, nbytes)
                    self._pin(region, address, nbytes)
            except BaseException:
                self._unpin(region, known)
                for address, nbytes in runs:
                    host_os.discard(address, nbytes)
                raise
        region.committed |= cells

    def release(self, region: Region) -> None:
        """Unpin and unmap a region that nothing reads any more."""
        self._unpin(region, 0)
        if region.managed:
            assert self.driver is not None
            self.driver.free_managed(region.address)
        else:
            host_os.unmap(region.address, region.nbytes)

    def _map(self, nbytes: int, huge_pages: bool) -> int:
        try:
            address = host_os.map_memory(nbytes, huge_pages)
        except OSError as error:
            raise RegionError(f"mapping {in_words(nbytes)}: {error.strerror}") from error
        if self.driver is not None:
            host_os.keep_from_children(address, nbytes)
            if self.driver.node is not None:
                host_os.bind_to_node(address, nbytes, self.driver.node)
        return address

    def _fill(self, address: int, nbytes: int) -> None:
        assert self.driver is not None
        try:
            host_os.populate(address, nbytes, self.driver.node, self.threads)
        except OSError as error:
            raise RegionError(f"filling {in_words(nbytes)}: {error.strerror}") from error

    def _managed(self, nbytes: int, why: str, grain: int | None = None) -> Region:
        assert self.driver is not None
        address, error = self.driver.allocate_managed(nbytes)
        if error is not None:
            raise RegionError(f"{why}; and managed memory: {error}")
        region = Region(address, nbytes, pinned=False, managed=True, grain=grain)
        try:
            self._warn(f"{in_words(nbytes)} of it is pageable, and slower to read: {why}")
        except BaseException:  # warnings can be errors
            self.release(region)
            raise
        return region

    def _pin(self, region: Region, address: int, nbytes: int) -> None:
        """Pin it in as few chunks as the system grants."""
        first = min(self.pin_chunk or nbytes, nbytes)
        refused = self._register(region, address, nbytes, first)
        if refused is None:
            return
        assert self.driver is not None
        for chunk in PIN_CHUNKS if self.driver.copies_cross_registrations() else ():
            if chunk < first and self._register(region, address, nbytes, chunk) is None:
                limit = f"{in_words(first)} at once was refused ({refused})"
                self._warn(f"it was pinned in chunks of {in_words(chunk)}: {limit}")
                return
        limit = f"the limit on locked memory (ulimit -l) is {host_os.locked_limit()}"
        raise RegionError(f"pinning {in_words(nbytes)} ({nbytes} bytes): {refused}; {limit}")

    def _register(self, region: Region, address: int, nbytes: int, chunk: int) -> str | None:
        """Pin in chunks, on several threads; all of it or nothing. Returns what went wrong."""
        driver, refused = self.driver, threading.Event()
        assert driver is not None
        done: list[tuple[int, int]] = []

        def register(piece: tuple[int, int]) -> str | None:
            if refused.is_set():
                return None
            error = driver.register(*piece)
            if error is None:
                done.append(piece)
            else:
                refused.set()
            return error

        work = list(host_os.pieces(address, nbytes, chunk))
        errors = host_os.in_parallel(register, work, self.threads)
        known = len(region.registered)
        region.registered.extend(done)
        if refused.is_set():
            self._unpin(region, known)
            return str(next(error for error in errors if error is not None))
        return None

    def _unpin(self, region: Region, keep: int) -> None:
        while len(region.registered) > keep:
            assert self.driver is not None
            self.driver.unregister(region.registered.pop()[0])

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"host memory for KV caches: {what}. Results are the same.",
                RuntimeWarning,
                stacklevel=2,
            )

"""What the host tier asks of Linux: address space, huge pages, NUMA nodes, and how much memory may be taken."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import platform
import resource
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
PIECE = 64 << 20  # what one thread takes at a time

_log = logging.getLogger(__name__)
_MAP_NORESERVE = 0x4000
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_POPULATE_WRITE = 4, 10, 23
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 14, 15
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1


def round_up(nbytes: int, unit: int = PAGE) -> int:
    return -(-nbytes // unit) * unit


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    libc.syscall.restype = ctypes.c_long
    return libc


def map_memory(nbytes: int, huge_pages: bool) -> int:
    """Address of ``nbytes`` (whole OS pages) of fresh private memory, of which nothing is resident yet.

    Aligned to 2 MiB where it is that large. With ``huge_pages`` the kernel may fill 2 MiB at a time; without, it never
    makes more resident than was touched.

    Raises:
        OSError: the address space is refused.
    """
    libc = _libc()
    slack = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = libc.mmap(None, nbytes + slack, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if start is None or start == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    address = round_up(start, HUGE_PAGE) if slack else start
    unmap(start, address - start)
    unmap(address + nbytes, start + slack - address)
    libc.madvise(address, nbytes, _MADV_HUGEPAGE if huge_pages else _MADV_NOHUGEPAGE)
    return address


def unmap(address: int, nbytes: int) -> None:
    if nbytes:
        _libc().munmap(address, nbytes)


def discard(address: int, nbytes: int) -> None:
    """Give the memory back and keep the address space."""
    _libc().madvise(address, nbytes, _MADV_DONTNEED)


def keep_from_children(address: int, nbytes: int) -> None:
    """Leave the memory out of forked processes: the kernel would copy pinned pages at every fork."""
    _libc().madvise(address, nbytes, _MADV_DONTFORK)


def pieces(address: int, nbytes: int, size: int) -> Iterator[tuple[int, int]]:
    """``(address, bytes)`` of consecutive pieces of at most ``size`` bytes."""
    for at in range(0, nbytes, size):
        yield address + at, min(size, nbytes - at)


def in_parallel(
    function: Callable[[tuple[int, int]], object], work: Sequence[tuple[int, int]], threads: int
) -> list[object]:
    """The results of ``function`` on every item, on up to ``threads`` threads."""
    if len(work) == 1 or threads <= 1:
        return [function(item) for item in work]
    with ThreadPoolExecutor(min(threads, len(work)), "hsa-host-memory") as pool:
        return list(pool.map(function, work))


def populate(address: int, nbytes: int, node: int | None, threads: int) -> None:
    """Make the memory resident, on the NUMA node ``node`` where it is not None.

    Faulting pages in is most of the cost of pinning them, and the part that threads speed up.

    Raises:
        OSError: there is no memory left to fill it with.
    """
    cpus = node_cpus(node) if node is not None else set()

    def fill(piece: tuple[int, int]) -> None:
        if cpus and parallel:  # first touch decides, should binding be forbidden
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cpus)
        if _libc().madvise(*piece, _MADV_POPULATE_WRITE) == 0:
            return
        error = ctypes.get_errno()
        if error == 22:  # EINVAL: Linux before 5.14
            ctypes.memset(piece[0], 0, piece[1])
        else:
            raise OSError(error, os.strerror(error))

    work = list(pieces(address, nbytes, PIECE))
    parallel = len(work) > 1 and threads > 1
    in_parallel(fill, work, threads)


# NUMA


def numa_node(pci_address: str, sysfs: Path = Path("/sys")) -> int | None:
    """The NUMA node that a PCI device is attached to; None on a machine with one node, or where it is not known."""
    if len(list((sysfs / "devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def node_cpus(node: int, sysfs: Path = Path("/sys")) -> set[int]:
    """The CPUs of a NUMA node that this process may run on; empty where they are not known."""
    try:
        text = (sysfs / f"devices/system/node/node{node}/cpulist").read_text().strip()
    except OSError:
        return set()
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus & os.sched_getaffinity(0)


def bind_to_node(address: int, nbytes: int, node: int) -> None:
    """Have the memory filled from the NUMA node ``node`` while that has room, then from others.

    A strict binding would have the process killed once the node is full, with memory free elsewhere.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << node % 64
    failed = _libc().syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(words * 64 + 1),
        ctypes.c_uint(0),
    )
    if (
        failed
    ):  # many containers forbid it; the threads that fill the memory run on the node instead
        _log.debug("mbind to node %d: %s", node, os.strerror(ctypes.get_errno()))


# How much there is


@dataclass(frozen=True)
class Available:
    """Bytes that may still be taken, and what sets that bound."""

    nbytes: int
    bound: str


def available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Available:
    """The smaller of what the machine has (MemAvailable) and what the process's control groups allow.

    A margin of 5%, at most 2 GiB, is left to others: Linux promises more memory than it has, and whoever takes the last
    of it is killed.
    """
    memory = _meminfo(proc / "meminfo")
    room, total, bound = memory.get("MemAvailable", 0), memory.get("MemTotal", 0), "MemAvailable"
    for limit, used, path in _cgroup_limits(proc / "self/cgroup", cgroups):
        if limit - used < room:
            room, total, bound = limit - used, limit, f"the limit {path}"
    margin = min(total // 20, 2 << 30)
    return Available(max(0, room - margin), bound)


def _meminfo(path: Path) -> dict[str, int]:
    values = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith("kB"):
                values[name] = int(rest.split()[0]) << 10
    return values


def _cgroup_limits(membership: Path, root: Path) -> Iterator[tuple[int, int, Path]]:
    """``(limit, bytes used that cannot be reclaimed, file of the limit)`` of the process's groups and their parents."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            if folder != top and top not in folder.parents:
                break
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None:
                yield (
                    limit,
                    max(0, used - _stat(folder / "memory.stat", names[2])),
                    folder / names[0],
                )


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none ("max", or no file)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def locked_limit() -> str:
    """The limit on locked memory, in words, for messages."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else in_words(soft)


def in_words(nbytes: int) -> str:
    """``"1.50 GiB"``: bytes for messages."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"

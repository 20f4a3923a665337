"""Host memory for KV caches: exact accounting, reuse, lifetimes, and what happens when it cannot be had."""

import gc
import itertools
import random
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hsa_compile.errors import HostMemoryError, HsaError
from hsa_compile.runtime import host_memory, host_os
from hsa_compile.runtime.host_block import HostBytes
from hsa_compile.runtime.host_memory import HostPool
from hsa_compile.runtime.host_os import PAGE, Available

from .fake_driver import FakeDriver

CPU = torch.device("cpu")
MIB = 1 << 20
KIB = 1 << 10


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool(CPU)
    yield made
    gc.collect()
    made.trim()
    assert made.bytes() == HostBytes()


def pinning(driver: FakeDriver, **options) -> HostPool:
    return HostPool(CPU, driver=driver, **options)


# Tensors


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
def test_a_tensor_reads_and_writes_the_block(pool: HostPool, dtype: torch.dtype) -> None:
    block = pool.allocate(3 * 5 * 7 * dtype.itemsize)
    values = torch.randint(0, 2, (3, 5, 7)).to(dtype)
    one, other = block.tensor((3, 5, 7), dtype), block.tensor((3, 5, 7), dtype)
    one.copy_(values)
    assert torch.equal(other, values)
    assert one.is_contiguous() and one.device == CPU and one.data_ptr() == block.address
    assert one._base is None and not one.requires_grad
    assert one.untyped_storage() is other.untyped_storage()


def test_strides_and_offset(pool: HostPool) -> None:
    block = pool.allocate(4096)
    flat = block.tensor((1024,), torch.float32).copy_(torch.arange(1024))
    seen = block.tensor((2, 3, 4), torch.float32, strides=(4, 100, 1), offset=40)
    assert torch.equal(seen, flat.as_strided((2, 3, 4), (4, 100, 1), 10))
    assert block.tensor((0, 5), torch.float32).shape == (0, 5)
    assert block.tensor((), torch.float32, offset=8).item() == 2


@pytest.mark.parametrize(
    "shape, strides, offset, text",
    [
        ((1025,), None, 0, "ends at byte 4100, outside of a block of 4096 bytes"),
        ((2, 2), (1024, 1), 0, "outside of a block"),
        ((1024,), None, 4, "outside of a block"),
        ((1,), None, 2, "offset 2 is not a multiple of 4"),
        ((1,), None, -4, "offset -4"),
        ((2, 2), (1,), 0, "2 sizes but 1 strides"),
        ((2,), (-1,), 4, "outside of a block"),
    ],
)
def test_tensors_stay_inside(pool: HostPool, shape, strides, offset, text) -> None:
    with pytest.raises(ValueError, match=text):
        pool.allocate(4096).tensor(shape, torch.float32, strides, offset)


def test_under_inference_mode_the_tensor_is_an_ordinary_one(pool: HostPool) -> None:
    with torch.inference_mode():
        tensor = pool.allocate(64).tensor((4,), torch.float32)
    assert not tensor.is_inference()
    tensor.fill_(1)
    assert tensor._version > 0


def test_in_a_compiled_function(pool: HostPool) -> None:
    tensor = pool.allocate(4096).tensor((32, 8), torch.float32)
    tensor.copy_(torch.randn(32, 8))

    @torch.compile(fullgraph=True)
    def step(cache, at, row):
        cache.index_copy_(0, at, row)
        return (cache * 2).sum(-1)

    row = torch.randn(1, 8)
    expected = tensor.clone()
    expected[3] = row
    assert torch.allclose(step(tensor, torch.tensor([3]), row), (expected * 2).sum(-1))
    assert torch.equal(tensor, expected)


# Accounting and lifetimes


def test_sizes_are_exact(pool: HostPool) -> None:
    """129.5 MiB cost 129.5 MiB, not 256."""
    odd = 129 * MIB + 512 * KIB
    a, b = pool.allocate(odd), pool.allocate(1)
    assert (a.nbytes, b.nbytes) == (odd, PAGE)
    assert pool.bytes() == HostBytes(in_use=odd + PAGE, pageable=odd + PAGE)
    assert pool.allocate(0).nbytes == PAGE
    with pytest.raises(ValueError, match="negative"):
        pool.allocate(-1)


def test_memory_lives_as_long_as_any_tensor(pool: HostPool) -> None:
    block = pool.allocate(MIB)
    view = block.tensor((256, 1024), torch.float32).fill_(7)[3:5, ::2]
    del block
    assert pool.bytes().in_use == MIB
    other = pool.allocate(MIB)
    other.tensor((256, 1024), torch.float32).fill_(-1)
    assert view.eq(7).all()
    moved = torch.empty(0)
    moved.data = view
    del view, other
    assert pool.bytes().in_use == MIB and moved.eq(7).all()
    storage = moved.untyped_storage()
    del moved
    assert pool.bytes().in_use == MIB
    del storage
    assert pool.bytes() == HostBytes(idle=2 * MIB)


def test_the_block_alone_keeps_it(pool: HostPool) -> None:
    block = pool.allocate(MIB)
    block.tensor((4,), torch.int32).fill_(5)
    gc.collect()
    assert pool.bytes().in_use == MIB
    assert block.tensor((4,), torch.int32).tolist() == [5] * 4


def test_a_cycle_is_collected(pool: HostPool) -> None:
    class Cache:
        pass

    cache = Cache()
    cache.keys, cache.self = pool.allocate(MIB).tensor((8,), torch.float32), cache
    del cache
    gc.collect()
    assert pool.bytes() == HostBytes(idle=MIB)


# Reuse


def test_best_fit_exact_split_and_coalescing(pool: HostPool) -> None:
    blocks = [pool.allocate(size * PAGE) for size in (8, 4, 16)]
    addresses = [block.address for block in blocks]
    del blocks
    assert pool.bytes() == HostBytes(idle=28 * PAGE)
    a = pool.allocate(3 * PAGE)  # from the 4
    b = pool.allocate(PAGE)  # the rest of it
    c = pool.allocate(9 * PAGE)  # from the 16
    d = pool.allocate(7 * PAGE)  # the rest of that, before the 8
    assert a.address == addresses[1] and b.address == addresses[1] + 3 * PAGE
    assert c.address == addresses[2] and d.address == addresses[2] + 9 * PAGE
    assert pool.bytes() == HostBytes(in_use=20 * PAGE, pageable=20 * PAGE, idle=8 * PAGE)
    del d, c  # neighbours join again
    assert pool.allocate(16 * PAGE).address == addresses[2]


def test_a_partly_used_region_is_not_released(pool: HostPool) -> None:
    big = pool.allocate(64 * PAGE)
    del big
    small = pool.allocate(PAGE)
    small.tensor((4,), torch.int32).fill_(9)
    assert pool.trim() == 0
    assert pool.bytes() == HostBytes(in_use=PAGE, pageable=PAGE, idle=63 * PAGE)
    assert small.tensor((4,), torch.int32).eq(9).all()
    del small
    assert pool.trim() == 64 * PAGE
    assert pool.bytes() == HostBytes()


def test_idle_memory_is_bounded_by_the_largest_sum_in_use(pool: HostPool) -> None:
    first = pool.allocate(10 * PAGE)
    del first
    second = pool.allocate(12 * PAGE)  # the 10 do not help: 12 in use is now the largest sum
    assert pool.bytes() == HostBytes(in_use=12 * PAGE, pageable=12 * PAGE)
    third = pool.allocate(4 * PAGE)
    del second
    assert pool.bytes() == HostBytes(in_use=4 * PAGE, pageable=4 * PAGE, idle=12 * PAGE)
    del third


def test_idle_memory_bounded_by_option() -> None:
    pool = HostPool(CPU, keep_idle=0)
    block = pool.allocate(MIB)
    del block
    assert pool.bytes() == HostBytes()


def test_random_lives() -> None:
    """No byte is in two blocks, none is lost, and what is written stays."""
    pool, rng = HostPool(CPU), random.Random(0)
    live: list[tuple[int, object, torch.Tensor]] = []
    for tag in range(400):
        if live and rng.random() < 0.5:
            live.pop(rng.randrange(len(live)))
        size = rng.randrange(1, 40 * PAGE)
        block = pool.allocate(size)
        live.append((tag % 251, block, block.tensor((size,), torch.uint8).fill_(tag % 251)))
        held = pool.bytes()
        assert held.in_use == sum(block.nbytes for _, block, _ in live)
        assert held.in_use + held.idle == sum(region.nbytes for region in pool._regions)
    assert all(tensor.eq(tag).all() for tag, _, tensor in live)
    live.clear()
    del block
    assert pool.bytes().in_use == 0
    pool.trim()
    assert pool.bytes() == HostBytes()


def test_from_several_threads() -> None:
    pool, errors = HostPool(CPU, driver=FakeDriver()), []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            kept = []
            for step in range(150):
                size = rng.randrange(1, 20 * PAGE)
                kept.append(pool.allocate(size).tensor((size,), torch.uint8).fill_(seed))
                if len(kept) > 5:
                    assert kept.pop(rng.randrange(5)).eq(seed).all()
                if step % 20 == 0:
                    pool.bytes()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert pool.bytes().in_use == 0
    pool.trim()
    assert pool.bytes() == HostBytes()


def test_the_pool_of_a_device_is_one() -> None:
    assert host_memory.host_pool("cpu") is host_memory.host_pool(CPU)
    before = host_memory.host_bytes().in_use
    block = host_memory.allocate(5 * PAGE, "cpu")
    assert host_memory.host_bytes().in_use - before == 5 * PAGE
    del block
    host_memory.trim()
    assert host_memory.host_bytes().in_use == before


# Pinning


def test_blocks_are_pinned_and_unpinned() -> None:
    driver = FakeDriver()
    pool = pinning(driver)
    block = pool.allocate(100 * MIB)
    assert driver.pinned == 100 * MIB and driver.attempts == [100 * MIB]
    assert block.pinned and pool.bytes() == HostBytes(in_use=100 * MIB, pinned=100 * MIB)
    del block
    assert pool.bytes() == HostBytes(idle=100 * MIB, pinned_idle=100 * MIB)
    again = pool.allocate(60 * MIB)
    assert driver.attempts == [100 * MIB], "reused, not pinned again"
    del again
    pool.trim()
    assert driver.pinned == 0 and pool.bytes() == HostBytes()


def test_pinning_by_chunks() -> None:
    driver = FakeDriver()
    pool = pinning(driver, pin_chunk=16 * MIB, threads=3)
    block = pool.allocate(40 * MIB + PAGE)
    assert sorted(driver.registered.values()) == [8 * MIB + PAGE, 16 * MIB, 16 * MIB]
    del block
    pool.trim()
    assert driver.pinned == 0


def test_smaller_chunks_where_one_is_refused() -> None:
    driver = FakeDriver(largest=5 * MIB)
    pool = pinning(driver)
    with pytest.warns(RuntimeWarning, match=r"chunks of 4\.00 MiB: 20\.00 MiB at once was refused"):
        block = pool.allocate(20 * MIB)
    assert set(driver.registered.values()) == {4 * MIB} and block.pinned
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        other = pool.allocate(7 * MIB)
    assert driver.pinned == 27 * MIB
    del block, other
    pool.trim()
    assert driver.pinned == 0


@pytest.mark.parametrize("crosses", [True, False])
def test_pageable_memory_where_pinning_is_refused(crosses: bool) -> None:
    driver = FakeDriver(limit=8 * MIB, crosses=crosses)
    pool = pinning(driver)
    small = pool.allocate(4 * MIB)
    with pytest.warns(RuntimeWarning, match="pageable.*limit on locked memory"):
        block = pool.allocate(16 * MIB)
    assert min(driver.attempts) == (1 * MIB if crosses else 4 * MIB)
    tensor = block.tensor((4, MIB), torch.float32)
    tensor.copy_(values := torch.randn(4, MIB))
    assert torch.equal(tensor, values) and not block.pinned
    assert pool.bytes() == HostBytes(in_use=20 * MIB, pinned=4 * MIB, pageable=16 * MIB)
    assert driver.pinned == 4 * MIB, "nothing of the failed attempts is left"
    del small, block, tensor
    pool.trim()
    assert not driver.registered and not driver.managed and pool.bytes() == HostBytes()


def test_nothing_leaks_where_nothing_works() -> None:
    driver = FakeDriver(limit=0)
    driver.managed_works = False
    pool = pinning(driver)
    with pytest.raises(
        HostMemoryError, match=r"16\.00 MiB \(16777216 bytes\).*out of memory.*not supported"
    ) as e:
        pool.allocate(16 * MIB)
    assert isinstance(e.value, HsaError) and "can still be taken" in str(e.value)
    assert not driver.registered and pool.bytes() == HostBytes()


def test_a_warning_made_an_error_leaks_nothing() -> None:
    driver = FakeDriver(limit=0)
    pool = pinning(driver)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            pool.allocate(MIB)
    assert not driver.managed and pool.bytes() == HostBytes()


# Waiting for queued work


def test_freed_memory_waits_for_every_stream() -> None:
    driver = FakeDriver()
    pool = pinning(driver)
    pool.used_on("fetch")
    driver.busy = {"main", "fetch"}
    block = pool.allocate(MIB)
    address = block.address
    del block
    assert pool.bytes() == HostBytes(waiting=MIB)
    other = pool.allocate(MIB)
    assert other.address != address
    driver.busy = {"fetch"}
    assert pool.bytes().waiting == MIB
    driver.busy = set()
    assert pool.bytes() == HostBytes(in_use=MIB, pinned=MIB, idle=MIB, pinned_idle=MIB)
    assert set(driver.recorded) == {"main", "fetch"}
    assert pool.allocate(MIB).address == address


def test_no_event_is_recorded_during_a_capture() -> None:
    driver = FakeDriver()
    pool = pinning(driver)
    block = pool.allocate(MIB)
    driver.capturing = True
    del block
    assert pool.bytes() == HostBytes(waiting=MIB) and not driver.recorded
    began = time.monotonic()
    other = pool.allocate(MIB)  # does not wait for what cannot end
    assert time.monotonic() - began < 5
    driver.capturing = False
    assert pool.bytes() == HostBytes(in_use=MIB, pinned=MIB, idle=MIB, pinned_idle=MIB)
    del other


def test_freeing_calls_nothing() -> None:
    """A destructor may run within a capture, or while this very pool holds its lock."""
    driver = FakeDriver()
    pool = pinning(driver)
    block = pool.allocate(MIB)
    driver.record = driver.done = driver.unregister = None  # type: ignore[assignment]
    held = threading.Event()
    release = threading.Event()

    def hold() -> None:
        with pool._lock:
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    del block  # would hang, or raise
    release.set()
    thread.join()
    assert len(pool._freed) == 1


def test_memory_that_is_read_for_a_moment_is_waited_for() -> None:
    driver = FakeDriver()
    pool = pinning(driver)
    block = pool.allocate(512 * MIB)  # worth an eighth of a second
    address = block.address
    driver.busy = {"main"}
    del block
    timer = threading.Timer(0.03, driver.busy.clear)
    timer.start()
    assert pool.allocate(512 * MIB).address == address
    timer.join()


# Exhaustion


def test_more_than_there_is(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    block = pool.allocate(2 * MIB)
    block.tensor((8,), torch.int32).fill_(3)
    monkeypatch.setattr(host_os, "available", lambda: Available(MIB, "MemAvailable"))
    with pytest.raises(HostMemoryError) as error:
        pool.allocate(4 * MIB)
    for part in (
        "4.00 MiB (4194304 bytes)",
        "1.00 MiB can still be taken (MemAvailable",
        "hold 2.00 MiB",
        "0 B of it pinned",
    ):
        assert part in str(error.value)
    assert pool.bytes() == HostBytes(in_use=2 * MIB, pageable=2 * MIB)
    assert block.tensor((8,), torch.int32).eq(3).all()
    assert pool.allocate(MIB).nbytes == MIB


def test_idle_memory_is_given_up_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(CPU, keep_idle=1 << 40)
    blocks = [pool.allocate(MIB) for _ in range(4)]
    room = 0
    monkeypatch.setattr(
        host_os,
        "available",
        lambda: Available(room + 4 * MIB - sum(r.nbytes for r in pool._regions), "MemAvailable"),
    )
    with pytest.raises(HostMemoryError):
        pool.allocate(3 * MIB)
    del blocks
    block = pool.allocate(3 * MIB)
    assert pool.bytes() == HostBytes(in_use=3 * MIB, pageable=3 * MIB)
    del block


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def meminfo(root: Path, total_gib: int, available_gib: int) -> Path:
    write(
        root / "meminfo",
        f"MemTotal: {total_gib << 20} kB\nMemAvailable: {available_gib << 20} kB\nHugePages_Total: 0\n",
    )
    return root


GIB = 1 << 30


def test_available_leaves_a_margin(tmp_path: Path) -> None:
    assert host_os.available(meminfo(tmp_path, 20, 10), tmp_path) == Available(
        9 * GIB, "MemAvailable"
    )
    assert host_os.available(meminfo(tmp_path, 400, 100), tmp_path).nbytes == 98 * GIB
    assert host_os.available(meminfo(tmp_path, 400, 1), tmp_path).nbytes == 0


def test_available_within_a_control_group(tmp_path: Path) -> None:
    proc, cgroups = meminfo(tmp_path / "proc", 400, 300), tmp_path / "cgroup"
    write(proc / "self/cgroup", "0::/a/b\n")
    write(cgroups / "a/b/memory.max", "max\n")
    write(cgroups / "a/b/memory.current", "5\n")
    write(cgroups / "a/memory.max", str(100 * GIB))
    write(cgroups / "a/memory.current", str(30 * GIB))
    write(cgroups / "a/memory.stat", f"anon 1\ninactive_file {10 * GIB}\n")
    found = host_os.available(proc, cgroups)
    assert found == Available(78 * GIB, f"the limit {cgroups}/a/memory.max")


def test_available_within_an_old_control_group(tmp_path: Path) -> None:
    """Version 1, mounted in a container that does not see its own path."""
    proc, cgroups = meminfo(tmp_path / "proc", 400, 300), tmp_path / "cgroup"
    write(proc / "self/cgroup", "5:cpu:/x\n4:memory,other:/docker/1234\n0::/\n")
    write(cgroups / "memory/memory.limit_in_bytes", str(40 * GIB))
    write(cgroups / "memory/memory.usage_in_bytes", str(12 * GIB))
    write(cgroups / "memory/memory.stat", f"inactive_file 7\ntotal_inactive_file {2 * GIB}\n")
    assert host_os.available(proc, cgroups).nbytes == 28 * GIB


def test_available_here() -> None:
    found = host_os.available()
    assert 0 < found.nbytes < 1 << 50 and found.bound


# NUMA


def sysfs(root: Path, nodes: int, node: str) -> Path:
    for i in range(nodes):
        write(root / f"devices/system/node/node{i}/cpulist", f"{i * 4}-{i * 4 + 1},{i * 4 + 3}\n")
    write(root / "bus/pci/devices/0000:1b:00.0/numa_node", node)
    return root


@pytest.mark.parametrize(
    "nodes, text, expected", [(2, "1\n", 1), (2, "-1\n", None), (1, "0\n", None), (2, "?", None)]
)
def test_the_node_of_a_device(tmp_path: Path, nodes: int, text: str, expected: int | None) -> None:
    root = sysfs(tmp_path, nodes, text)
    assert host_os.numa_node("0000:1B:00.0", root) == expected
    assert host_os.numa_node("0000:99:00.0", root) is None


def test_the_cpus_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = sysfs(tmp_path, 2, "1")
    monkeypatch.setattr(host_os.os, "sched_getaffinity", lambda pid: set(range(6)))
    assert host_os.node_cpus(0, root) == {0, 1, 3}
    assert host_os.node_cpus(1, root) == {4, 5}
    assert host_os.node_cpus(7, root) == set()


def test_binding_to_a_node() -> None:
    """To the only node there is everywhere; binding that is forbidden changes nothing."""
    driver = FakeDriver()
    driver.node = 0
    pool = pinning(driver, threads=2)
    tensor = pool.allocate(130 * MIB).tensor((8,), torch.float32).fill_(1)
    assert tensor.eq(1).all()


# Growing blocks


@pytest.mark.parametrize("pinned", [True, False])
def test_a_block_that_grows(pinned: bool) -> None:
    driver = FakeDriver()
    pool = pinning(driver) if pinned else HostPool(CPU)
    rows, row = 6, 3 * MIB
    block = pool.reserve(rows * row, rows)
    grain = 64 * KIB
    first = grain if pinned else 0  # by which the device knows the address
    assert block.nbytes == rows * row and block.committed == first
    cache = block.tensor((2, 3, row // 8, 4), torch.float16)
    address = cache.data_ptr()
    assert block.commit([(0, 10)]) == grain - first
    assert block.commit([(i * row, i * row + 100) for i in range(rows)]) == (rows - 1) * grain
    assert block.commit([(i * row, i * row + grain) for i in range(rows)]) == 0
    assert block.commit([(row + 5, row + grain + 1), (row, row + 7)]) == grain
    assert block.commit([(5, 5)]) == 0
    assert block.committed == (rows + 1) * grain == pool.bytes().in_use
    assert driver.pinned == (block.committed if pinned else 0)
    cache[:, :, :100] = 3
    assert cache[:, :, :100].eq(3).all() and cache.data_ptr() == address
    assert block.commit([(0, block.nbytes)]) == block.nbytes - (rows + 1) * grain
    assert block.committed == block.nbytes
    assert cache[:, :, :100].eq(3).all()
    del block, cache
    assert pool.bytes().in_use == 0
    pool.trim()
    assert driver.pinned == 0 and pool.bytes() == HostBytes()


def test_the_last_cell_is_cut_off() -> None:
    driver = FakeDriver()
    pool = pinning(driver)
    block = pool.reserve(100 * KIB - 5)
    assert block.nbytes == 100 * KIB
    assert block.commit([(99 * KIB, 100 * KIB)]) == 36 * KIB
    assert block.committed == 100 * KIB == driver.pinned
    big = pool.reserve(64 * MIB + PAGE)  # in cells of 2 MiB
    big.commit([(64 * MIB, 64 * MIB + PAGE)])
    assert big.committed == 2 * MIB + PAGE


def test_address_space_is_not_memory() -> None:
    pool = pinning(FakeDriver())
    block = pool.reserve(1 << 40, rows=8)
    cache = block.tensor((8, 1 << 27, 256), torch.float32)
    block.commit([(i << 37, (i << 37) + 1000) for i in range(8)])
    cache[:, 0] = torch.arange(8.0)[:, None]
    assert cache[:, 0, 0].tolist() == list(range(8))
    assert pool.bytes().in_use == 16 * MIB


def test_reservations_are_reused() -> None:
    driver = FakeDriver()
    pool = pinning(driver)
    block = pool.reserve(8 * MIB, 2)
    block.commit([(0, MIB), (4 * MIB, 5 * MIB)])
    address, attempts = block.address, len(driver.attempts)
    del block
    assert pool.bytes() == HostBytes(idle=2 * MIB, pinned_idle=2 * MIB)
    other = pool.reserve(12 * MIB, 2)
    again = pool.reserve(8 * MIB, 2)
    assert again.address == address != other.address
    assert again.commit([(0, MIB)]) == 0 and again.committed == 2 * MIB
    assert len(driver.attempts) == attempts + 1
    assert pool.allocate(PAGE).committed == PAGE  # takes nothing of a reservation
    del other, again


def test_a_reservation_that_is_read_is_not_reused() -> None:
    driver = FakeDriver()
    pool = pinning(driver)
    block = pool.reserve(8 * MIB)
    address = block.address
    driver.busy = {"main"}
    del block
    other = pool.reserve(8 * MIB)
    assert other.address != address
    driver.busy.clear()
    assert pool.reserve(8 * MIB).address == address


def test_growth_that_cannot_be_pinned_changes_nothing() -> None:
    driver = FakeDriver(limit=MIB)
    pool = pinning(driver)
    block = pool.reserve(8 * MIB)
    block.commit([(0, 512 * KIB)])
    block.tensor((8,), torch.int32).fill_(3)
    with pytest.raises(HostMemoryError, match="out of memory"):
        block.commit([(512 * KIB, 600 * KIB), (4 * MIB, 6 * MIB)])
    assert block.committed == 512 * KIB == driver.pinned
    assert block.tensor((8,), torch.int32).eq(3).all()
    assert block.commit([(512 * KIB, 1024 * KIB)]) == 512 * KIB


def test_growth_beyond_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(CPU)
    block = pool.reserve(8 * MIB)
    monkeypatch.setattr(host_os, "available", lambda: Available(MIB, "MemAvailable"))
    with pytest.raises(HostMemoryError, match=r"2\.00 MiB"):
        block.commit([(0, 2 * MIB)])
    assert block.committed == 0
    assert block.commit([(0, MIB)]) == MIB


@pytest.mark.parametrize("crosses, limit", [(False, 1 << 40), (True, 0)])
def test_growing_blocks_where_they_cannot_be_pinned(crosses: bool, limit: int) -> None:
    driver = FakeDriver(limit=limit, crosses=crosses)
    pool = pinning(driver)
    with pytest.warns(RuntimeWarning, match="pageable"):
        block = pool.reserve(8 * MIB)
    block.commit([(0, MIB)])
    block.tensor((8,), torch.int32).fill_(3)
    assert pool.bytes() == HostBytes(in_use=MIB, pageable=MIB)
    del block
    pool.trim()
    assert not driver.managed and not driver.registered


@pytest.mark.parametrize("bad", [(-1, 5), (5, 4), (0, MIB + 1)])
def test_ranges_outside_are_refused(pool: HostPool, bad: tuple[int, int]) -> None:
    block = pool.reserve(MIB)
    with pytest.raises(ValueError, match="outside of a block of 1048576"):
        block.commit([(0, 10), bad])
    assert block.committed == 0
    with pytest.raises(ValueError, match="does not grow"):
        pool.allocate(MIB).commit([(0, 10)])
    for nbytes, rows in itertools.product((0, 1), (0, 1)):
        if not (nbytes and rows):
            with pytest.raises(ValueError, match="must be positive"):
                pool.reserve(nbytes, rows)

"""Host memory as CUDA tensors: pinned, read by kernels, freed only when unread. Run with -s to see the rates."""

import ctypes
import functools
import gc
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hsa_compile.runtime import host_os
from hsa_compile.runtime.host_block import HostBlock, HostBytes
from hsa_compile.runtime.host_cuda import CudaDriver
from hsa_compile.runtime.host_memory import HostPool, allocate, host_bytes, host_pool
from hsa_compile.runtime.host_os import PAGE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

MIB = 1 << 20
KIB = 1 << 10


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def settle(pool: HostPool) -> None:
    """Until nothing waits: what was freed is marked at the next call, and the marks are passed once the device is."""
    pool.bytes()
    torch.cuda.synchronize()


def emptied(pool: HostPool) -> None:
    """All of it is given back once nothing is queued."""
    gc.collect()
    settle(pool)
    held = pool.bytes()
    assert (held.in_use, held.waiting) == (0, 0), held
    pool.trim()
    assert pool.bytes() == HostBytes()


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool(device())
    yield made
    emptied(made)


def seen_by_cpu(block: HostBlock, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer((ctypes.c_char * block.nbytes).from_address(block.address), dtype=dtype)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_both_sides_see_one_memory(pool: HostPool, dtype: torch.dtype) -> None:
    block = pool.allocate(1000 * 33 * dtype.itemsize)
    tensor, cpu = block.tensor((1000, 33), dtype), seen_by_cpu(block, dtype)[: 33 * 1000]
    assert tensor.device == device() and tensor.dtype == dtype and block.pinned
    assert tensor.data_ptr() == block.address and tensor._base is None
    values = torch.randn(1000, 33).to(dtype)
    cpu.copy_(values.view(-1))  # the CPU writes
    assert torch.equal(tensor.cpu(), values)
    assert torch.equal((tensor * 2).cpu(), values * 2)
    tensor.mul_(3)  # a kernel writes
    tensor[5] = 1
    torch.cuda.synchronize()
    expected = values * 3
    expected[5] = 1
    assert torch.equal(cpu.view(1000, 33), expected)
    tensor.copy_(values.cuda())  # a copy engine writes
    torch.cuda.synchronize()
    assert torch.equal(cpu.view(1000, 33), values)
    assert torch.equal(tensor.clone().cpu(), values)


def test_scattered_and_transposed_pages(pool: HostPool) -> None:
    block = pool.allocate(2 * 4 * 64 * 32 * 4)
    cache = block.tensor((2, 4, 64, 32), torch.float32, strides=(32 * 4, 32, 32 * 4 * 2, 1))
    values = torch.randn(2, 4, 64, 32, device="cuda")
    cache.copy_(values)
    assert torch.equal(cache.clone(), values)
    ids = torch.randperm(64, device="cuda")[:17]
    assert torch.equal(cache.index_select(2, ids), values.index_select(2, ids))
    assert torch.equal(cache[:, :, ids], values[:, :, ids])
    cache[:, :, ids] = -values[:, :, ids]
    values[:, :, ids] *= -1
    assert torch.equal(cache.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous())


def test_sizes_are_exact_and_memory_comes_back() -> None:
    pool, odd = HostPool(device()), 257 * MIB + 4 * KIB
    warm = pool.allocate(MIB)
    before = resident()
    block = pool.allocate(odd)
    assert pool.bytes() == HostBytes(in_use=odd + MIB, pinned=odd + MIB)
    assert abs(resident() - before - odd) < 64 * MIB
    tensor = block.tensor((odd,), torch.uint8)
    del block
    assert pool.bytes().pinned == odd + MIB
    del tensor, warm
    settle(pool)
    assert pool.bytes() == HostBytes(idle=odd + MIB, pinned_idle=odd + MIB)
    address = pool.allocate(odd).address
    assert pool.allocate(odd).address == address, "reused"
    emptied(pool)
    assert resident() - before < 64 * MIB


def test_the_pool_of_the_process() -> None:
    before = host_bytes()
    tensor = allocate(3 * MIB, "cuda").tensor((3 * MIB,), torch.uint8).fill_(1)
    assert host_bytes().pinned - before.pinned == 3 * MIB
    assert tensor.sum().item() == 3 * MIB
    del tensor
    torch.cuda.synchronize()
    assert host_bytes().in_use == before.in_use
    assert host_pool("cuda") is host_pool(device())


def test_compiled_with_cuda_graphs() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    pool = HostPool(device())
    cache = pool.allocate(512 * 64 * 2).tensor((512, 64), torch.bfloat16)
    values = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16)
    cache.copy_(values)
    torch._dynamo.mark_static_address(cache)

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def step(cache: Tensor, at: Tensor, row: Tensor, ids: Tensor) -> Tensor:
        cache.index_copy_(0, at, row)
        return cache.index_select(0, ids).float().sum(-1) + cache[0].float().sum()

    for i in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        at = torch.tensor([i * 7], device="cuda")
        ids = torch.randint(0, 512, (40,), device="cuda")
        ids[0] = i * 7
        row = torch.randn(1, 64, device="cuda", dtype=torch.bfloat16)
        values.index_copy_(0, at, row)
        want = values.index_select(0, ids).float().sum(-1) + values[0].float().sum()
        got = step(cache, at, row, ids).clone()
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        assert torch.equal(cache.clone(), values)
    assert counters["inductor"]["cudagraph_skips"] == 0
    del cache, step
    torch._dynamo.reset()
    gc.collect()
    settle(pool)
    print(f"\nafter a compiled function: {pool.bytes()}")


def test_a_replayed_graph_reads_what_is_there_then(pool: HostPool) -> None:
    block = pool.allocate(256 * 128 * 4)
    cache, cpu = block.tensor((256, 128), torch.float32), seen_by_cpu(block, torch.float32)
    ids = torch.tensor([3, 200, 9], device="cuda")
    cache.zero_()
    cache.index_select(0, ids)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.index_select(0, ids)
    for i in range(3):
        cpu.fill_(float(i + 1))
        graph.replay()
        torch.cuda.synchronize()
        assert out.eq(i + 1).all()
    del graph, out


# Freeing


def test_memory_that_a_slow_stream_reads_is_not_reused(pool: HostPool) -> None:
    stream, nbytes = torch.cuda.Stream(), 16 * MIB
    pool.used_on(stream)
    block = pool.allocate(nbytes)
    tensor = block.tensor((nbytes,), torch.uint8).fill_(1)
    copied = torch.empty_like(tensor).copy_(tensor).zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(4_000_000_000)  # two seconds or so
        copied.copy_(tensor)
    address = block.address
    began = time.monotonic()
    del tensor, block
    held = pool.bytes()
    assert time.monotonic() - began < 0.5, "freeing waited for the device"
    assert (held.in_use, held.waiting) == (0, nbytes)
    other = pool.allocate(nbytes)
    assert other.address != address
    other.tensor((nbytes,), torch.uint8).fill_(2)
    stream.synchronize()
    assert copied.eq(1).all()
    torch.cuda.synchronize()
    held = pool.bytes()
    assert (held.waiting, held.idle) == (0, nbytes)
    assert pool.allocate(nbytes).address == address


def test_rounds_over_two_streams(pool: HostPool) -> None:
    """Written on one stream, read late on another, freed at once, 200 times: never another round's values."""
    side, nbytes = torch.cuda.Stream(), 256 * KIB
    pool.used_on(side)
    read = []
    for i in range(200):
        tensor = pool.allocate(nbytes).tensor((nbytes // 4,), torch.int32)
        tensor.fill_(i)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(300_000)
            read.append(torch.stack([tensor.min(), tensor.max()]))
        del tensor
    torch.cuda.synchronize()
    assert torch.stack(read).tolist() == [[i, i] for i in range(200)]


def test_freed_during_a_capture(pool: HostPool) -> None:
    block = pool.allocate(MIB)
    tensor = block.tensor((MIB // 4,), torch.float32).fill_(1)
    x = torch.ones(8, device="cuda")
    (x + 1).sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        del tensor, block
        held = pool.bytes()
        y = y * 2
    assert held.waiting == MIB
    graph.replay()
    torch.cuda.synchronize()
    assert y.eq(4).all()
    settle(pool)
    assert pool.bytes().waiting == 0
    del graph, y


def test_allocated_during_a_capture(pool: HostPool) -> None:
    x = torch.ones(8, device="cuda")
    (x + 1).sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block = pool.allocate(MIB)
        y = x + 1
    graph.replay()
    torch.cuda.synchronize()
    assert y.eq(2).all() and block.pinned
    assert block.tensor((8,), torch.float32).fill_(3).eq(3).all()
    del graph, y


# Where pinning is refused


class Refusing(CudaDriver):
    """Pins at most ``largest`` bytes at once."""

    largest = 0

    def register(self, address: int, nbytes: int) -> str | None:
        return super().register(address, nbytes) if nbytes <= self.largest else "refused by a test"


def decode(pool: HostPool) -> Tensor:
    """Some kernels and copies over host memory; the same on any kind of it."""
    generator = torch.Generator().manual_seed(0)
    cache = pool.allocate(20 * MIB + 4096).tensor((2560, 1024), torch.float64)
    cache.copy_(torch.randn(2560, 1024, generator=generator, dtype=torch.float64))
    ids = torch.randint(0, 2560, (100,), generator=generator).cuda()
    cache[ids[:10]] *= 2
    rows = cache.index_select(0, ids)
    return torch.cat([rows, cache[:50].clone(), cache.cpu()[-50:].cuda()]).cpu()


@pytest.mark.parametrize("largest", [0, 3 * MIB])
def test_the_output_is_the_same_where_pinning_is_refused(largest: int) -> None:
    driver = Refusing(device())
    driver.largest = largest
    pool, exact = HostPool(device(), driver=driver), HostPool(device())
    with pytest.warns(RuntimeWarning, match="host memory") as caught:
        got = decode(pool)
    said = [str(w.message) for w in caught if "host memory" in str(w.message)]
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="host memory")
        assert torch.equal(got, decode(exact)) and torch.equal(got, decode(pool))
    block = pool.allocate(20 * MIB + 4096)
    crosses = driver.copies_cross_registrations()
    print(f"\ncopies cross registrations: {crosses}; {said[0]}")
    assert block.pinned == (largest > 0 and crosses)
    held = pool.bytes()
    assert held.in_use == block.nbytes and held.pinned == (block.nbytes if block.pinned else 0)
    assert (torch.ones(1 << 20, device="cuda") + 1).sum().item() == 1 << 21, "no error is left"
    del block
    emptied(pool)
    emptied(exact)


def test_a_real_refusal_leaves_no_error_behind(pool: HostPool) -> None:
    """Registering the same memory twice is refused by the runtime itself."""
    block = pool.allocate(MIB)
    driver = CudaDriver(device())
    error = driver.register(block.address, MIB)
    assert error
    print(f"\nregistered twice: {error}")
    assert (torch.ones(1024, device="cuda") * 2).sum().item() == 2048
    torch.cuda.synchronize()
    assert block.tensor((8,), torch.float32).fill_(1).sum().item() == 8


# Growth in place


def test_rows_grow_in_place(pool: HostPool) -> None:
    """A [B, H, capacity, D] cache, every row of which grows; its tensor never moves."""
    batch, heads, capacity, size = 2, 3, 4096, 64
    row = capacity * size * 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        block = pool.reserve(batch * heads * row, rows=batch * heads)
    print(f"\ngrowing memory is pinned: {block.pinned} {[str(w.message) for w in caught]}")
    cache = block.tensor((batch, heads, capacity, size), torch.bfloat16)
    address, reference = cache.data_ptr(), torch.zeros(batch, heads, 0, size)
    reference = reference.to("cuda", torch.bfloat16)
    for new in (1, 700, 3, 900, 2000, 492):
        tokens = reference.shape[2]
        block.commit(
            (i * row + tokens * size * 2, i * row + (tokens + new) * size * 2)
            for i in range(batch * heads)
        )
        added = torch.randn(batch, heads, new, size, device="cuda", dtype=torch.bfloat16)
        cache[:, :, tokens : tokens + new] = added
        reference = torch.cat([reference, added], 2)
        read = cache[:, :, : tokens + new]
        assert torch.equal(read.clone(), reference)
        assert torch.equal(read.cpu(), reference.cpu())
        ids = torch.randint(0, tokens + new, (50,), device="cuda")
        assert torch.equal(read.index_select(2, ids), reference.index_select(2, ids))
    assert cache.data_ptr() == address and reference.shape[2] == capacity
    held = pool.bytes()
    assert block.committed == held.in_use == block.nbytes
    assert held.pinned == (block.nbytes if block.pinned else 0)


def test_contiguous_growth_is_copied_whole(pool: HostPool) -> None:
    """Token-major storage: one copy reads and writes what was committed at different times."""
    capacity, width = 1 << 15, 512
    block = pool.reserve(capacity * width * 4)
    cache = block.tensor((capacity, width), torch.float32)
    tokens = 0
    for end in (10, 1025, 1100, 5000, 20000):
        block.commit([(tokens * width * 4, end * width * 4)])
        tokens = end
        values = torch.randn(tokens, width, device="cuda")
        cache[:tokens].copy_(values)
        assert torch.equal(cache[:tokens].clone(), values)
        assert torch.equal(cache[:tokens].cpu(), values.cpu())
        cache[:tokens].copy_(-values.cpu())
        assert torch.equal(cache[:tokens] * 1, -values)
    assert pool.bytes().in_use == block.committed < block.nbytes


def test_a_reservation_is_reused(pool: HostPool) -> None:
    block = pool.reserve(8 * MIB, rows=2)
    block.commit([(0, MIB), (4 * MIB, 5 * MIB)])
    address, held = block.address, block.committed
    del block
    settle(pool)
    assert pool.bytes().idle == held
    again = pool.reserve(8 * MIB, rows=2)
    assert again.address == address and again.commit([(0, MIB)]) == 0
    assert again.tensor((8,), torch.float32).fill_(2).sum().item() == 16


# Rates: printed, not asserted


def seconds(function: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - began


@pytest.mark.parametrize("pin_chunk", [None, 64 * MIB])
def test_rates(pin_chunk: int | None) -> None:
    nbytes = 1 << 30
    pool = HostPool(device(), pin_chunk=pin_chunk)
    blocks: list[HostBlock] = []
    took = seconds(lambda: blocks.append(pool.allocate(nbytes)))
    print(f"\npinned in chunks of {pin_chunk}: {nbytes / took / 2**30:.2f} GiB/s", end="")
    blocks.pop()
    torch.cuda.synchronize()
    pool.bytes()
    torch.cuda.synchronize()
    took = seconds(lambda: blocks.append(pool.allocate(nbytes)))
    print(f"; reused in {took * 1e6:.0f} us", end="")
    crosses = pin_chunk is None or CudaDriver(device()).copies_cross_registrations()
    read_rates(blocks.pop().tensor((nbytes // 16384, 4096), torch.float32), crosses)
    gc.collect()
    settle(pool)
    held = pool.bytes().idle
    print(f"; unpinned at {held / seconds(pool.trim) / 2**30:.2f} GiB/s")
    emptied(pool)


def read_rates(rows: Tensor, copy: bool) -> None:
    rows.fill_(1)
    if copy:
        target = torch.empty(rows.shape, device="cuda")
        target.copy_(rows)
        print(f"; copy {rows.nbytes / seconds(lambda: target.copy_(rows)) / 1e9:.1f} GB/s", end="")
    ids = torch.randperm(rows.shape[0], device="cuda")[: rows.shape[0] // 4]
    gather = functools.partial(rows.index_select, 0, ids)
    gather()
    print(f"; gather {rows.nbytes / 4 / seconds(gather) / 1e9:.1f} GB/s", end="")
    print(f"; sum {rows.nbytes / seconds(rows.sum) / 1e9:.1f} GB/s", end="")


def test_rates_of_filling_and_of_registering() -> None:
    """What is slow about pinning."""
    driver, nbytes = CudaDriver(device()), 1 << 30
    print(
        f"\nNUMA node {driver.node}; copies cross registrations: {driver.copies_cross_registrations()}"
    )
    for filled, threads in ((False, 1), (True, 1), (True, 8)):
        address = host_os.map_memory(nbytes, huge_pages=True)
        if filled:
            took = seconds(lambda: host_os.populate(address, nbytes, None, threads))  # noqa: B023
            print(f"filled by {threads} threads: {nbytes / took / 2**30:.2f} GiB/s", end="; ")
        took = seconds(lambda: driver.register(address, nbytes))  # noqa: B023
        print(f"registered at once, {filled=}: {nbytes / took / 2**30:.2f} GiB/s")
        driver.unregister(address)
        host_os.unmap(address, nbytes)


def test_rate_of_growth(pool: HostPool) -> None:
    """64 rows of a cache, a chunk of 64 KiB each: what a decode step pays now and then."""
    rows, row = 64, 4 * MIB
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = pool.reserve(rows * row, rows)
    for step in range(3):
        at = step * 64 * KIB
        took = seconds(
            lambda at=at: block.commit((i * row + at, i * row + at + 1) for i in range(rows))
        )
        print(f"\n{rows} commits of 64 KiB: {took * 1e3:.2f} ms", end="")
    print()

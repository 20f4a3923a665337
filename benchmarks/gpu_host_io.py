"""What moves pages between host memory and a pool on a GPU: `fetch`, `fetch_attention`, and `diff`.

`fetch` reads pages of pinned memory from a kernel; what bytes allow is the bandwidth of a pinned copy in the same run.
`fetch_attention` attends meanwhile; beside it stand attention to pages that are all there, and one after the other.
A page and KV head of 32 tokens x 128 in bf16 is 8 KiB of keys and as much of values, 16 KiB together.

    python -m benchmarks.gpu_host_io
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from hsa_compile.lowering import standalone
from hsa_compile.ops.diff import LOADS, MISSING
from hsa_compile.runtime.host_memory import allocate

KV_HEADS, SIZE = 8, 128


def captured(run: Any, times: int) -> Any:
    """``run`` called ``times`` times, as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph.replay


def timed(run: Any, times: int = 10, rounds: int = 20) -> common.Timing:
    replay = captured(run, times)
    replay()
    return common.Timing.of([common.cuda_seconds_of(replay) / times for _ in range(rounds)])


def pinned_copy() -> float:
    """Bytes a second of one large copy from pinned memory."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    times = [
        common.cuda_seconds_of(lambda: device.copy_(host, non_blocking=True)) for _ in range(12)
    ]
    return host.nbytes / common.Timing.of(times[2:]).median


Caches = tuple[int, list[torch.Tensor], list[torch.Tensor]]


def make_caches(batch: int, page_size: int, slots: int) -> Caches:
    """Tokens, a cache of the host of so many a row, and pools."""
    tokens = 65536 if batch == 1 else 16384
    shape = (batch, KV_HEADS, tokens, SIZE)
    nbytes = torch.Size(shape).numel() * 2
    caches = [allocate(nbytes, "cuda").tensor(shape, torch.bfloat16) for _ in range(2)]
    pools = [
        torch.zeros(batch, KV_HEADS, slots, page_size, SIZE, dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    ]
    for cache in caches:
        for row in cache:
            row.copy_(torch.randn(row.shape, device="cuda"))
    return tokens, caches, pools


def fetch_rows(
    bandwidth: float, page_size: int, batch: int, slots: int, made: Caches
) -> list[dict[str, Any]]:
    """Pages to load spread evenly over the rows, at random places of the cache."""
    tokens, caches, pools = made
    found = []
    for pages in (64, 256, 1024, 2048):
        each = pages // (batch * KV_HEADS)
        if not 1 <= each < slots:
            continue
        loads = torch.full((batch, KV_HEADS, slots, 2), -1, dtype=torch.int32)
        for row in loads.view(-1, slots, 2):
            row[:each, 0] = torch.randperm(tokens // page_size)[:each].sort().values
            row[:each, 1] = torch.arange(each)
        loads, counts = loads.cuda(), torch.tensor([0, each, 0], dtype=torch.int32)
        counts = counts.expand(batch, KV_HEADS, 3).contiguous().cuda()
        timing = timed(partial(standalone.fetch, *caches, loads, counts, *pools, page_size))
        page = loads[0, 0, 0]
        begin = int(page[0]) * page_size
        assert torch.equal(pools[1][0, 0, 0], caches[1][0, 0, begin : begin + page_size])
        moved = pages * page_size * SIZE * 2 * 2
        row = {
            "op": "fetch",
            "batch": batch,
            "pages": pages,
            "page_bytes": moved // pages,
            "time": timing.as_dict(),
            "bytes_per_s": moved / timing.median,
            "share_of_copy": moved / timing.median / bandwidth,
        }
        found.append(row)
        print(row, flush=True)
    return found


def attention_rows(
    page_size: int, batch: int, slots: int, selected: int, made: Caches
) -> list[dict[str, Any]]:
    """One layer's attention, of whose selected pages some, at random, are not there."""
    tokens, caches, pools = made
    rows = (batch, KV_HEADS)
    order = torch.rand(*rows, tokens // page_size).argsort(-1)
    ids = order[..., :selected].sort(-1).values.int()
    where = torch.rand(*rows, slots).argsort(-1)[..., :selected].int()
    bits = torch.full((1, 1, tokens // page_size), -1, device="cuda")
    q = torch.randn(batch, 4 * KV_HEADS, 1, SIZE, device="cuda").bfloat16()
    found = []
    for share in (0.0, 0.02, 0.04, 0.08, 0.2, 1.0):
        missing = torch.rand(ids.shape) < share
        count = missing.sum(-1)
        loads = torch.full((*rows, selected, 2), -1, dtype=torch.int32)
        for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(KV_HEADS)).tolist():
            listed = torch.stack((ids[b, h], where[b, h]), -1)[missing[b, h]]
            loads[b, h, : len(listed)] = listed
        counts = torch.zeros(*rows, 5, dtype=torch.int32)
        counts[..., LOADS] = count
        marked = (where + MISSING * missing).int()
        given = [x.cuda() for x in (ids, marked, loads, counts)]
        there = (q, *pools, given[0], where.cuda(), bits, None, SIZE**-0.5, page_size)
        moves = (*caches, given[2], given[3], *pools, page_size)
        together = (q, *caches, *given, bits, None, *pools, SIZE**-0.5, page_size)

        def one_after_the_other(moves: Any = moves, there: Any = there) -> None:
            standalone.fetch(*moves)
            standalone.sparse_attention(*there)

        for pool in pools:
            pool.zero_()
        standalone.fetch(*moves)
        want = standalone.sparse_attention(*there)[0]
        for pool in pools:
            pool.zero_()
        assert torch.equal(standalone.fetch_attention(*together)[0], want)
        times = {
            "fetch_attention": timed(partial(standalone.fetch_attention, *together)),
            "fetch, then attention": timed(one_after_the_other),
            "attention alone": timed(partial(standalone.sparse_attention, *there)),
        }
        pages = int(count.sum())
        row = {
            "op": "fetch_attention",
            "batch": batch,
            "selected": selected,
            "pages": pages,
            "page_bytes": page_size * SIZE * 2 * 2,
            "times": {name: timing.as_dict() for name, timing in times.items()},
            "bytes_per_s": pages * page_size * SIZE * 4 / times["fetch_attention"].median,
        }
        print({**row, "times": {k: round(1e6 * t.median, 1) for k, t in times.items()}}, flush=True)
        found.append(row)
    return found


def diff_row(batch: int, selected: int, slots: int, share: float) -> dict[str, Any]:
    """Selections that change by ``share`` from step to step, as recorded ones do."""
    pages, rows = 2048, (batch, KV_HEADS)
    state = [
        torch.full((*rows, pages), -1, dtype=torch.int32, device="cuda"),
        torch.full((*rows, slots), -1, dtype=torch.int32, device="cuda"),
        torch.zeros((*rows, slots), dtype=torch.int32, device="cuda"),
        torch.zeros(rows, dtype=torch.int32, device="cuda"),
    ]
    order = torch.rand(*rows, pages, device="cuda").argsort(-1)
    position = torch.tensor([65000], device="cuda")
    steps = []
    for number in (0, 1, 2, 3, 4, 5, 4, 3, 2, 1):
        first = int(number * selected * share)
        steps.append(order[..., first : first + selected].sort(-1).values.int().contiguous())

    def run() -> None:
        for ids in steps:
            standalone.diff(ids, position, 32, *state)

    timing = timed(run, times=1)
    row = {"op": "diff", "batch": batch, "selected": selected, "slots": slots, "new": share}
    row["time"] = {k: v / 10 if k != "count" else v for k, v in _scaled(timing.as_dict()).items()}
    print(row, flush=True)
    return row


def _scaled(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if not isinstance(v, list)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/gpu_host_io.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = pinned_copy()
    print(f"pinned copy: {bandwidth / 1e9:.1f} GB/s")
    rows: list[dict[str, Any]] = []
    slots = 130
    for page_size, batch in ((32, 8), (16, 8), (32, 1)):
        made = make_caches(batch, page_size, slots)
        rows += fetch_rows(bandwidth, page_size, batch, slots, made)
        if page_size == 32:
            rows += attention_rows(page_size, batch, slots, 65, made)
    for batch in (1, 8):
        for share in (0.0, 0.05, 0.2):
            rows.append(diff_row(batch, 65, 131, share))
    common.write_json("gpu_host_io", rows, args.json, pinned_copy_bytes_per_s=bandwidth)


if __name__ == "__main__":
    main()

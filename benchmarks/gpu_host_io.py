"""What moves pages between host memory and a pool on a GPU: `fetch` against a pinned copy, and `diff`.

`fetch` reads pages of pinned memory from a kernel; what bytes allow is the bandwidth of a pinned copy in the same run.
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


def fetch_rows(bandwidth: float, page_size: int, batch: int) -> list[dict[str, Any]]:
    """Pages to load spread evenly over the rows, at random places of a cache of 64K tokens a row."""
    tokens, slots = 65536 if batch == 1 else 16384, 130
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
    for page_size, batch in ((32, 8), (16, 8), (32, 1)):
        rows += fetch_rows(bandwidth, page_size, batch)
    for batch in (1, 8):
        for share in (0.0, 0.05, 0.2):
            rows.append(diff_row(batch, 65, 131, share))
    common.write_json("gpu_host_io", rows, args.json, pinned_copy_bytes_per_s=bandwidth)


if __name__ == "__main__":
    main()

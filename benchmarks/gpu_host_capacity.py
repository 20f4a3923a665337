"""What the host tier makes room for on a GPU: a long request, a large batch, and other ways to offload a cache.

A Llama-8B shape with random weights, caches made in host memory by ``HostCache`` and filled with random numbers.

- ``long``: one request of 128K tokens: bytes on the device for pool and summaries, and a step, with the default policy;
  and the same for 64K tokens with a policy that keeps as little as it can on the device.
- ``batch``: how many requests of 64K tokens fit under a limit of device memory, ours as far as host memory goes, and
  tokens a second. The dense peer is plain Inductor with a ``StaticCache``; its honest best reads weights and cache once
  at the measured copy bandwidth.
- ``peers``: a step of one request of 64K tokens, against transformers' offloaded caches.

    python -m benchmarks.gpu_host_capacity [--parts long peers batch] [--limit 40] [--requests 12]
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hsa_compile
from benchmarks import common
from benchmarks.gpu_llama_decode import (
    KV_HEADS,
    SIZE,
    build,
    cache_name,
    copy_bandwidth,
    together,
)
from hsa_compile.runtime.host_memory import host_bytes

SMALLEST = {"algorithm": "mean", "page_size": 64, "budget": 1024, "pool": 1.0}


def kv_bytes(layers: int, tokens: int) -> int:
    """Of one request in half precision."""
    return 2 * layers * KV_HEADS * SIZE * 2 * tokens


def free() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def filled(cache: Any, batch: int, tokens: int) -> Any:
    """A static cache of any kind with ``tokens`` random tokens a row."""
    cache.early_initialization(batch, KV_HEADS, SIZE, torch.bfloat16, torch.device("cuda"))
    with torch.no_grad():
        for layer in cache.layers:
            for part in (layer.keys, layer.values):
                for row in part:
                    row.normal_()
            layer.cumulative_length.fill_(tokens)
    torch.cuda.synchronize()
    return cache


def step_of(model: Any, function: Callable[..., Any], cache: Any, batch: int) -> Callable[[], Any]:
    ids = torch.zeros((batch, 1), dtype=torch.long, device="cuda")
    name = cache_name(model)

    def step() -> Any:
        with torch.no_grad():
            return function(ids, **{name: cache}).logits

    return step


def timed(step: Callable[[], Any], rounds: int = 3, steps: int = 15) -> common.Timing:
    for _ in range(6):
        step()
    torch.cuda.synchronize()
    return common.Timing.of(together(step, rounds, steps))


def ours(model: Any, batch: int, tokens: int, policy: dict[str, Any]) -> dict[str, Any]:
    """A step with ``placement="host"``, and where its bytes are."""
    before = torch.cuda.memory_allocated()
    cache = filled(hsa_compile.HostCache(model.config, tokens + 256), batch, tokens)
    options = {
        "policy": {"placement": "host", **policy},
        "mode": "reduce-overhead",
        "strict": True,
    }
    compiled = torch.compile(model, backend="hsa", options=options)
    timing = timed(step_of(model, compiled, cache, batch))
    layers = hsa_compile.stats(compiled).layers
    rates = [layer.hit_rate for layer in layers if layer.hit_rate is not None]
    dense = batch * kv_bytes(len(layers), tokens)
    kept = hsa_compile.pool_bytes() + hsa_compile.summary_bytes()
    row = {
        "variant": "host",
        "batch": batch,
        "tokens": tokens,
        "policy": policy,
        "step": timing.as_dict(),
        "tokens_per_s": batch / timing.median,
        "kv_bytes_dense": dense,
        "pool_bytes": hsa_compile.pool_bytes(),
        "summary_bytes": hsa_compile.summary_bytes(),
        "dense_over_kept": dense / kept,
        "device_bytes": torch.cuda.memory_allocated() - before,
        "host_bytes": host_bytes().in_use,
        "hit_rate": sum(rates) / len(rates),
    }
    print(row, flush=True)
    del cache, compiled
    free()
    return row


def long(model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    return [ours(model, 1, 131072, {}), ours(model, 1, 65536, SMALLEST), ours(model, 1, 65536, {})]


def dense(model: Any, batch: int, tokens: int) -> dict[str, Any]:
    """Plain Inductor; ``step`` is None where memory does not suffice."""
    from transformers import StaticCache

    row: dict[str, Any] = {"variant": "inductor", "batch": batch, "tokens": tokens, "step": None}
    try:
        cache = filled(StaticCache(config=model.config, max_cache_len=tokens + 256), batch, tokens)
        timing = timed(
            step_of(model, torch.compile(model, mode="reduce-overhead"), cache, batch), steps=5
        )
        row |= {"step": timing.as_dict(), "tokens_per_s": batch / timing.median}
    except torch.OutOfMemoryError as error:
        row["why"] = str(error).split(".")[0]
    cache = None
    print(row, flush=True)
    free()
    return row


def batches(model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    total = torch.cuda.get_device_properties(0).total_memory
    bandwidth = copy_bandwidth()
    free()
    weights = sum(p.nbytes for p in model.parameters())
    torch.cuda.set_per_process_memory_fraction(args.limit * 1e9 / total)
    rows = []
    # The largest batch whose cache could fit, and one more to show that it does not.
    most = int((args.limit * 1e9 - weights) // kv_bytes(args.layers, args.tokens))
    for batch in (most, most + 1):
        row = dense(model, batch, args.tokens)
        row["tokens_per_s_at_best"] = batch / (
            (weights + batch * kv_bytes(args.layers, args.tokens)) / bandwidth
        )
        rows.append(row)
    rows.append(ours(model, args.requests, args.tokens, {}))
    torch.cuda.set_per_process_memory_fraction(1.0)
    fits = [row for row in rows[:-1] if row["step"] is not None]
    if fits:
        best = max(fits, key=lambda row: row["batch"])
        rows[-1] |= {
            "device_limit_bytes": args.limit * 1e9,
            "batch_over_dense": args.requests / best["batch"],
            "throughput_over_dense": rows[-1]["tokens_per_s"] / best["tokens_per_s"],
            "throughput_over_best": rows[-1]["tokens_per_s"] / best["tokens_per_s_at_best"],
        }
        print(rows[-1], flush=True)
    return rows


def peers(model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Eager: torch 2.11 crashes on compiling what these caches do."""
    from transformers import DynamicCache, StaticCache

    rows = [ours(model, 1, args.tokens, {})]
    some = torch.randn(1, KV_HEADS, args.tokens + 256, SIZE).to(torch.bfloat16)
    for kind in ("static", "dynamic"):
        cache: Any = (
            StaticCache(config=model.config, max_cache_len=args.tokens + 256, offloading=True)
            if kind == "static"
            else DynamicCache(config=model.config, offloading=True)
        )
        step = step_of(model, model, cache, 1)
        step()
        torch.cuda.synchronize()
        for layer in cache.layers:
            if kind == "static":
                layer.keys.copy_(some)
                layer.values.copy_(some)
                layer.cumulative_length.fill_(args.tokens)
            else:
                where = layer.keys.device
                layer.keys, layer.values = (some[:, :, : args.tokens].to(where) for _ in range(2))
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        timing = common.Timing.of([common.cuda_seconds_of(step) for _ in range(5)])
        rows.append(
            {
                "variant": f"transformers, offloaded {kind} cache, eager",
                "batch": 1,
                "tokens": args.tokens,
                "step": timing.as_dict(),
                "over_ours": 1e6 * timing.median / rows[0]["step"]["median_us"],
            }
        )
        print(rows[-1], flush=True)
        del cache, step
        free()
    return rows


PARTS = {"long": long, "peers": peers, "batch": batches}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit", type=float, default=40.0, help="of device memory, in GB")
    parser.add_argument("--requests", type=int, default=12, help="of the largest batch")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/...")
    args = parser.parse_args()
    model = build(args.layers, args.tokens)
    rows: dict[str, list[dict[str, Any]]] = {}
    for part in args.parts:
        rows[part] = PARTS[part](model, args)
        flat = [{"part": name, **row} for name, found in rows.items() for row in found]
        common.write_json("gpu_host_capacity", flat, args.json, layers=args.layers)


if __name__ == "__main__":
    main()

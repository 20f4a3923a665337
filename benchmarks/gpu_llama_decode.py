"""Decode steps of a Llama-8B shape on a GPU: this backend against plain Inductor, same model, same run.

Random weights and a random KV cache (the time of a step does not depend on their values), Hugging Face ``StaticCache``,
CUDA graphs (``mode="reduce-overhead"``). Beside the measurements stand the floor, the same model with attention
removed, and the honest dense best, that floor plus the KV cache once at the measured copy bandwidth.

    python -m benchmarks.gpu_llama_decode --out results.json [--layers 32] [--tokens 65536] [--batch 1 8]
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters

import hsa_compile


def environment() -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def median_and_spread(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def write_json(path: str, data: object) -> None:
    with open(path, "w") as file:
        json.dump(data, file, indent=1)


def build(layers: int, tokens: int) -> Any:
    """A Llama-8B shape with random bf16 weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=2 * tokens,
        rope_theta=500000.0,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def filled_cache(model: Any, batch: int, tokens: int, room: int) -> Any:
    """A ``StaticCache`` that holds ``tokens`` random tokens and has room for more."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=tokens + room)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        model(torch.zeros((batch, 1), dtype=torch.long, device="cuda"), **{name: cache})
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                for row in tensor:
                    row.normal_()
            length = getattr(layer, "cumulative_length", None)
            if length is not None:
                length.fill_(tokens)
    return cache, name


def time_steps(step: Callable[[], Any], warmup: int, steps: int) -> list[float]:
    """Milliseconds of each step, by events."""
    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def throughput_steps(step: Callable[[], Any], steps: int) -> float:
    """Milliseconds a step when steps are issued back to back."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / steps


def kernel_times(step: Callable[[], Any], steps: int = 3, most: int = 25) -> dict[str, list[float]]:
    """Microseconds and launches a step of the kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)[:most]
    found = {row.key[:80]: [row.device_time_total / steps, row.count / steps] for row in rows}
    for name, (micros, count) in found.items():
        print(f"  {micros:10.1f} us {count:6.1f} x  {name}", flush=True)
    return found


def without_attention(model: Any) -> None:
    """Replace attention by a view of the query, so that everything else of a step stays."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def nothing(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> tuple[Any, None]:
        return q.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("nothing", nothing)
    model.config._attn_implementation = "nothing"


def measure(model: Any, batch: int, args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Compile one variant and time its steps."""
    torch._dynamo.reset()
    counters.clear()
    gc.collect()
    torch.cuda.empty_cache()
    cache, name = filled_cache(model, batch, args.tokens, 512)
    ids = torch.zeros((batch, 1), dtype=torch.long, device="cuda")
    if variant == "hsa":
        options = {
            "policy": {"budget": args.budget, "page_size": args.page},
            "mode": "reduce-overhead",
            "strict": True,
        }
        compiled = torch.compile(model, backend="hsa", options=options)
    else:
        compiled = torch.compile(model, mode="reduce-overhead")

    def step() -> Any:
        with torch.no_grad():
            return compiled(ids, **{name: cache}).logits

    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - begin
    times = time_steps(step, 8, args.steps)
    held = torch.cuda.memory_allocated()
    back_to_back = throughput_steps(step, args.steps)
    result = {
        "variant": variant,
        "batch": batch,
        "tokens": args.tokens,
        **median_and_spread(times),
        "back_to_back_ms": back_to_back,
        "compile_s": compile_s,
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
        "graphs": counters["stats"]["unique_graphs"],
        "growth_bytes": torch.cuda.memory_allocated() - held,
    }
    if args.profile:
        result["kernels"] = kernel_times(step)
    if variant == "hsa":
        result["tokens_read_a_step"] = [
            layer.tokens_read / layer.steps for layer in hsa_compile.stats(compiled).layers
        ][:2]
    print(
        variant,
        batch,
        {k: v for k, v in result.items() if k not in ("variant", "batch")},
        flush=True,
    )
    return result


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large device-to-device copy."""
    a = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    times = time_steps(lambda: b.copy_(a), 3, 10)
    return 2 * a.nbytes / (sorted(times)[len(times) // 2] * 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--page", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--variants", nargs="+", default=["hsa", "inductor", "no_attention"])
    parser.add_argument("--profile", action="store_true", help="list the kernels that take longest")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    model = build(args.layers, args.tokens)
    rows: list[dict[str, Any]] = []

    def save() -> None:
        write_json(
            args.out, {"environment": environment(), "copy_bytes_per_s": bandwidth, "rows": rows}
        )

    for variant in args.variants:
        if variant == "no_attention":
            without_attention(model)
        for batch in args.batch:
            try:
                rows.append(measure(model, batch, args, variant))
            except torch.cuda.OutOfMemoryError as error:
                rows.append(
                    {"variant": variant, "batch": batch, "error": str(error).splitlines()[0]}
                )
            save()
    kv = 2 * args.layers * 8 * 128 * 2 * args.tokens
    floors = {
        row["batch"]: row["median"]
        for row in rows
        if row["variant"] == "no_attention" and "median" in row
    }
    for batch, floor in floors.items():
        rows.append(
            {
                "variant": "honest dense best",
                "batch": batch,
                "median": floor + 1e3 * batch * kv / bandwidth,
            }
        )
    save()


if __name__ == "__main__":
    main()

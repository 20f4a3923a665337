"""Decode steps of a Llama-8B shape on a GPU: this backend against plain Inductor, same model, same run.

Random weights and a random KV cache, Hugging Face ``StaticCache``, CUDA graphs (``mode="reduce-overhead"``). Beside the
measurements stand the floor, the same model with attention removed, and the honest dense best: that floor plus the KV
cache once at the measured copy bandwidth.

Variants of the host tier: ``host`` waits for every page, ``host_next_rank`` and ``host_cross_layer`` load some ahead,
``host_without_io`` loads none, whose results are wrong and whose time is the floor. What is hidden is the share of the
difference between the first and the last that loading ahead saves. ``host@2.75`` has a pool of 2.75 selections.

``hsa_monitored`` measures what the selection loses, each layer in every 20th step, which is once a round, and
``hsa_top_p`` stops at a share of 0.9 (which random keys, all alike, reach late). ``hsa_dense_below`` looks at every row
and finds none that it does not trust; the others are named for what they select or estimate. Four layers
(``--layers 4``) tell them apart.

Values matter to nothing but the pool of ``--variants host``: to how far selections of successive steps differ. So that
a few percent of the selected pages are misses, as on pretrained models, attention adds little to the residual stream,
and keys are weaker where the rotary embedding turns fast (``--fast``). The hit rate is in the JSON.

A *step* is measured as decoding runs: many are issued without waiting for each. *step_alone* waits for every one, and
so adds the time in which Python launches it.

    python -m benchmarks.gpu_llama_decode [--layers 32] [--tokens 65536] [--batch 1 8]
"""

from __future__ import annotations

import argparse
import gc
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

import hsa_compile
from benchmarks import common
from hsa_compile.runtime.host_memory import host_bytes

HEADS, KV_HEADS, SIZE = 32, 8, 128
EXTRA: dict[str, dict[str, Any]] = {
    "hsa": {},
    "hsa_monitored": {"monitor": 20},
    "hsa_top_p": {"top_p": 0.9},
    "hsa_dense_below": {"dense_below": 0.001},
    "hsa_heavy_hitters": {"algorithm": "heavy_hitters"},
    "hsa_three_level": {"algorithm": "three_level", "recent": 512},
    "hsa_centroids": {"unselected": "centroids"},
    "hsa_two_stage": {"granularity": "two_stage"},
    "hsa_token": {"granularity": "token"},
}
PREFETCH = {"host_next_rank": "next_rank", "host_cross_layer": "cross_layer"}


def build(layers: int, tokens: int) -> Any:
    """A Llama-8B shape with random bf16 weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HEADS * SIZE,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=128256,
        max_position_embeddings=2 * tokens,
        rope_theta=500000.0,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data.mul_(0.01)
    torch.set_default_dtype(torch.float32)
    return model


def cache_name(model: Any) -> str:
    """What the model calls its cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def filled_cache(
    model: Any, batch: int, tokens: int, room: int, fast: float = 1.0
) -> tuple[Any, str]:
    """A ``StaticCache`` of ``tokens`` random tokens with room for more, and what the model calls its cache.

    Channels of the keys that the rotary embedding turns by more than 0.005 a token are ``fast`` times the others.
    """
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=tokens + room)
    name = cache_name(model)
    with torch.no_grad():
        model(torch.zeros((batch, 1), dtype=torch.long, device="cuda"), **{name: cache})
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                for row in tensor:
                    row.normal_()
            turns = 500000.0 ** (-torch.arange(0, SIZE, 2, device="cuda") / SIZE)
            strength = torch.where(turns > 0.005, fast, 1.0).repeat(2).to(torch.bfloat16)
            for row in layer.keys:
                row.mul_(strength)
            layer.cumulative_length.fill_(tokens)
    return cache, name


def together(step: Callable[[], Any], rounds: int, steps: int) -> list[float]:
    """Seconds a step when ``steps`` of them are issued without waiting; one value a round."""

    def several() -> None:
        for _ in range(steps):
            step()

    return [common.cuda_seconds_of(several) / steps for _ in range(rounds)]


def kernel_times(step: Callable[[], Any], steps: int = 3, most: int = 25) -> dict[str, list[float]]:
    """Microseconds and launches a step of the kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)[:most]
    return {
        row.key[:80]: [round(row.device_time_total / steps, 1), row.count / steps] for row in rows
    }


def without_attention(model: Any) -> None:
    """Replace attention by its query, so that everything else of a step stays."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def nothing(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> tuple[Any, None]:
        return q.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("nothing", nothing)
    model.config._attn_implementation = "nothing"


def compiled_variant(model: Any, variant: str, args: argparse.Namespace) -> Any:
    if variant not in EXTRA and not variant.startswith("host"):
        return torch.compile(model, mode="reduce-overhead")
    policy: dict[str, Any] = {"budget": args.budget, "page_size": args.page}
    policy |= EXTRA.get(variant, {})
    name, _, pool = variant.partition("@")
    if name not in EXTRA:
        policy |= {
            "placement": "host",
            "pool": float(pool or args.pool),
            "prefetch": PREFETCH.get(name, "none"),
        }
    options = {"policy": policy, "mode": "reduce-overhead", "strict": True}
    if name == "host_without_io":
        options["benchmark_without_io_wrong_results"] = True
    return torch.compile(model, backend="hsa", options=options)


def measure(
    model: Any, batch: int, args: argparse.Namespace, variant: str
) -> tuple[dict[str, Any], common.Timing]:
    """Compile one variant and time its steps."""
    torch._dynamo.reset()
    counters.clear()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    cache, name = filled_cache(model, batch, args.tokens, 512, args.fast)
    compiled = compiled_variant(model, variant, args)
    ids = torch.zeros((batch, 1), dtype=torch.long, device="cuda")

    def step() -> Any:
        with torch.no_grad():
            return compiled(ids, **{name: cache}).logits

    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - begin
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    before = hsa_compile.stats(compiled).layers
    timing = common.Timing.of(together(step, args.rounds, args.steps))
    alone = common.Timing.of([common.cuda_seconds_of(step) for _ in range(args.steps)])
    result: dict[str, Any] = {
        "variant": variant,
        "batch": batch,
        "tokens": args.tokens,
        "step": timing.as_dict(),
        "step_alone": alone.as_dict(),
        "compile_s": round(compile_s, 1),
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
        "graphs": counters["stats"]["unique_graphs"],
        "growth_bytes": torch.cuda.memory_allocated() - held,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }
    if args.profile:
        result["kernels"] = kernel_times(step)
    if variant in EXTRA:
        layer = hsa_compile.stats(compiled).layers[0]
        result["tokens_read_a_step"] = layer.tokens_read / layer.steps
        result["recall"] = layer.recall
    if variant.startswith("host"):
        result |= tiers(before, hsa_compile.stats(compiled).layers)
    print(result, flush=True)
    return result, timing


def tiers(before: Any, after: Any) -> dict[str, Any]:
    """Where the KV cache is, in bytes, and what moved while steps were timed."""
    moved = {
        name: sum(getattr(layer, name) for layer in after)
        - sum(getattr(layer, name) for layer in before)
        for name in (
            "pages_hit",
            "pages_loaded",
            "bytes_loaded",
            "pages_prefetched",
            "prefetched_used",
        )
    }
    done = after[0].steps - before[0].steps
    return {
        "pool_bytes": hsa_compile.pool_bytes(),
        "summary_bytes": hsa_compile.summary_bytes(),
        "host_bytes": host_bytes().in_use,
        "hit_rate": moved["pages_hit"] / (moved["pages_hit"] + moved["pages_loaded"]),
        "bytes_loaded_a_step": moved["bytes_loaded"] / done,
        "pages_prefetched_a_step": moved["pages_prefetched"] / done,
        "prefetched_used": moved["prefetched_used"] / max(moved["pages_prefetched"], 1),
        "pages_waited_for_a_step": moved["pages_loaded"] / done,
    }


def hidden_share(timings: dict[str, common.Timing]) -> dict[str, float]:
    """(waiting - ahead) / (waiting - without IO), for each way of loading ahead."""
    if not {"host", "host_without_io"} <= timings.keys():
        return {}
    waiting, floor = timings["host"].median, timings["host_without_io"].median
    return {
        name: (waiting - timings[name].median) / (waiting - floor)
        for name in PREFETCH
        if name in timings
    }


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large device-to-device copy."""
    a = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    times = [common.cuda_seconds_of(lambda: b.copy_(a)) for _ in range(12)]
    return 2 * a.nbytes / common.Timing.of(times[2:]).median


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--budget", type=int, default=2048, help="tokens")
    parser.add_argument("--page", type=int, default=32, help="tokens")
    parser.add_argument("--pool", type=float, default=2.0, help="of --variants host")
    parser.add_argument("--fast", type=float, default=0.7, help="see above")
    parser.add_argument("--steps", type=int, default=20, help="a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", default=["hsa", "no_attention", "inductor"])
    parser.add_argument("--profile", action="store_true", help="add the longest kernels")
    parser.add_argument(
        "--json", type=Path, help="default: benchmarks/results/gpu_llama_decode.json"
    )
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    model = build(args.layers, args.tokens)
    attention = model.config._attn_implementation
    rows: list[dict[str, Any]] = []
    timings: dict[int, dict[str, common.Timing]] = {batch: {} for batch in args.batch}
    kv = 2 * args.layers * KV_HEADS * SIZE * 2 * args.tokens
    for variant in args.variants:
        model.config._attn_implementation = attention
        if variant == "no_attention":
            without_attention(model)
        for batch in args.batch:
            row, timings[batch][variant] = measure(model, batch, args, variant)
            rows.append(row)
            floors = {
                b: t["no_attention"].median for b, t in timings.items() if "no_attention" in t
            }
            hidden = {f"batch {b}": hidden_share(t) for b, t in timings.items()}
            best = {f"batch {b}": 1e6 * (t + b * kv / bandwidth) for b, t in floors.items()}
            common.write_json(
                "gpu_llama_decode",
                rows,
                args.json,
                layers=args.layers,
                copy_bytes_per_s=bandwidth,
                honest_dense_best_us=best,
                io_hidden=hidden,
            )
    for batch, mine in timings.items():
        if "hsa" in mine:
            title = f"Llama-8B shape, {args.tokens} tokens, batch {batch}"
            common.show(common.ratio_table(title, mine, ours="hsa"))


if __name__ == "__main__":
    main()

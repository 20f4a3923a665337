"""One layer's decode attention on a GPU: the ops through Inductor, against dense SDPA in the same run.

    python benchmarks/gpu_attention_layer.py --json benchmarks/results/gpu_attention_layer.json

Every figure is the time of one layer inside a CUDA graph that runs through several layers with caches of their own,
as a model does, so that no cache or summary is still in L2 when its turn comes; the median over many replays.
Before anything is timed, results are checked against the eager ops and against the selection's own rule in fp64.
"""

import argparse
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from hsa_compile import algorithms, compat, lowering, ops

ALGORITHM = "cuboid"
SINK, RECENT = 1, 32


@dataclass(frozen=True)
class Case:
    """A shape: 32/8 heads x 128 in bf16 unless said otherwise."""

    batch: int
    tokens: int
    page_size: int
    budget: int
    query_heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    @property
    def pages(self) -> int:
        return self.tokens // self.page_size

    @property
    def slots(self) -> int:
        return self.budget // self.page_size

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.tokens // 1024}K tokens, pages of {self.page_size}, budget {self.budget}"


@dataclass(frozen=True)
class Layer:
    """What one layer of a model holds in a decode step."""

    q: Tensor
    keys: Tensor
    values: Tensor
    summary: Tensor
    covered: Tensor


def make_layer(case: Case) -> Layer:
    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device="cuda")

    return Layer(
        normal(case.batch, case.query_heads, 1, case.dim),
        normal(case.batch, case.kv_heads, case.tokens, case.dim),
        normal(case.batch, case.kv_heads, case.tokens, case.dim),
        torch.zeros(
            (case.batch, case.kv_heads, case.pages, algorithms.summary_width(ALGORITHM, case.dim)),
            dtype=torch.bfloat16,
            device="cuda",
        ),
        torch.full((case.batch, case.kv_heads, case.pages, 2), -1, device="cuda"),
    )


def compiled(function: Callable[..., object], max_autotune: bool) -> Callable[..., object]:
    """``function`` through Inductor with the ops' lowerings, and no compile cache."""
    patches = {"max_autotune": max_autotune, "force_disable_caches": True}

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        lowering.register()
        return compat.compile_with_inductor(
            gm, inputs, patches, ops.DECOMPOSITIONS, f"{__file__} {time.time()}"
        )

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=False, fullgraph=True)


def sparse_step(case: Case, with_summary: bool) -> Callable[..., object]:
    scale = case.dim**-0.5

    def step(layer: Layer, bits: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        if with_summary:
            torch.ops.hsa.summarize(
                layer.keys, bits, position, layer.summary, layer.covered, ALGORITHM, case.page_size
            )
        ids, _ = torch.ops.hsa.select(
            layer.q, layer.summary, bits, scale, ALGORITHM, case.page_size,
            case.slots, case.slots, 0, SINK, RECENT, "softmax_mean",
        )  # fmt: skip
        out, _ = torch.ops.hsa.sparse_attention(
            layer.q, layer.keys, layer.values, ids, bits, None, scale, case.page_size
        )
        return out, ids

    return step


def dense_step(layer: Layer) -> Tensor:
    return F.scaled_dot_product_attention(layer.q, layer.keys, layer.values, enable_gqa=True)


def check(
    case: Case, layer: Layer, bits: Tensor, position: Tensor, step: Callable[..., object]
) -> None:
    """Compare one compiled step with the eager ops, and its selection with the rule in fp64."""
    fresh = Layer(
        layer.q,
        layer.keys,
        layer.values,
        torch.zeros_like(layer.summary),
        torch.full_like(layer.covered, -1),
    )
    torch.ops.hsa.summarize(
        fresh.keys, bits, position, fresh.summary, fresh.covered, ALGORITHM, case.page_size
    )
    out, ids = step(layer, bits, position)
    torch.testing.assert_close(layer.summary, fresh.summary, rtol=1e-2, atol=1e-4)
    assert torch.equal(layer.covered, fresh.covered), "covered differs"

    group = case.query_heads // case.kv_heads
    scale = case.dim**-0.5
    query = (
        algorithms.get(ALGORITHM)
        .expand_query(layer.q[:, :, 0].double())
        .unflatten(1, (case.kv_heads, group))
    )
    logits = scale * torch.matmul(query, layer.summary.double().mT)
    rank = torch.logsumexp(logits - torch.logsumexp(logits, -1, keepdim=True), -2)
    rank[..., 0] = rank[..., -1] = float("inf")
    chosen = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, ids.long(), True)
    assert (ids >= 0).all() and (chosen.sum(-1) == case.slots).all(), "wrong number of pages"
    assert (ids.diff(dim=-1) > 0).all(), "ids are not ascending"
    worst_in = rank.masked_fill(~chosen, float("inf")).amin(-1)
    best_out = rank.masked_fill(chosen, float("-inf")).amax(-1)
    assert (worst_in > best_out - 1e-3).all(), "a better page was left out"

    exact, _ = torch.ops.hsa.sparse_attention(
        *(tensor.float() for tensor in (layer.q, layer.keys, layer.values)),
        ids,
        bits,
        None,
        scale,
        case.page_size,
    )
    error = ((out - exact).norm() / exact.norm()).item()
    assert error < 1e-2, f"attention is off by {error:.1e}"


def graph_times(run: Callable[[], None], layers: int, replays: int) -> list[float]:
    """Microseconds a layer, one number a replay of a CUDA graph of ``run``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / layers)
    graph_times.last = graph  # type: ignore[attr-defined]  # kept alive for the profiler
    return times


def kernel_times(layers: int) -> dict[str, float]:
    """Microseconds a layer of each kernel in the graph timed last."""
    from torch.profiler import ProfilerActivity, profile

    graph = graph_times.last  # type: ignore[attr-defined]
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
    totals: dict[str, float] = defaultdict(float)
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name] += event.device_time / (5 * layers)
    return {name: round(total, 2) for name, total in totals.items() if total > 0.05}


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median_us": round(statistics.median(ordered), 2),
        "p10_us": round(ordered[len(ordered) // 10], 2),
        "p90_us": round(ordered[len(ordered) * 9 // 10], 2),
    }


def measure(case: Case, replays: int, max_autotune: bool) -> dict[str, object]:
    bytes_a_layer = 2 * case.batch * case.kv_heads * case.tokens * case.dim * 2
    count = max(4, min(16, int(20e9 // bytes_a_layer)))
    layers = [make_layer(case) for _ in range(count)]
    word = (1 << case.page_size) - 1 if case.page_size < 64 else -1
    bits = torch.full((1, 1, case.pages), word, device="cuda")
    position = torch.full((1,), case.tokens // 2, device="cuda")
    result: dict[str, object] = {"case": vars(case), "layers": count}

    with_summary = compiled(sparse_step(case, with_summary=True), max_autotune)
    for layer in layers:
        check(case, layer, bits, position, with_summary)
    position.add_(1)

    def run_with_summary() -> None:
        for layer in layers:
            with_summary(layer, bits, position)
        position.add_(1)

    result["summarize_select_attend"] = summary(graph_times(run_with_summary, count, replays))
    result["kernels"] = kernel_times(count)
    select_attend = compiled(sparse_step(case, with_summary=False), max_autotune)

    def run_select_attend() -> None:
        for layer in layers:
            select_attend(layer, bits, position)

    result["select_attend"] = summary(graph_times(run_select_attend, count, replays))

    def run_dense() -> None:
        for layer in layers:
            dense_step(layer)

    result["dense"] = summary(graph_times(run_dense, count, max(10, replays // 5)))

    def run_rebuild() -> None:
        for layer in layers:
            layer.covered.fill_(-1)
            with_summary(layer, bits, position)

    result["rebuild_select_attend"] = summary(
        graph_times(run_rebuild, count, max(10, replays // 5))
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 131072])
    parser.add_argument("--page-size", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument(
        "--max-autotune", action="store_true", help="time the kernels' configurations first"
    )
    parser.add_argument(
        "--quick", action="store_true", help="batch 1 and 8, 64K tokens, pages of 32 only"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    torch.manual_seed(0)
    wanted = [
        Case(batch, tokens, page_size, args.budget)
        for tokens in args.tokens
        for batch in args.batch
        for page_size in args.page_size
        if page_size == 32 or tokens == args.tokens[0]
    ]
    if args.quick:
        wanted = [Case(1, 65536, 32, args.budget), Case(8, 65536, 32, args.budget)]
    results = []
    print(f"{'case':58} {'select+attend':>14} {'+ summarize':>12} {'dense':>9} {'ratio':>7}")
    for case in wanted:
        result = measure(case, args.replays, args.max_autotune)
        results.append(result)
        figures = {
            name: value["median_us"] for name, value in result.items() if "median_us" in str(value)
        }  # type: ignore[index]
        print(
            f"{case!s:58} {figures['select_attend']:14.1f} {figures['summarize_select_attend']:12.1f} "
            f"{figures['dense']:9.1f} {figures['dense'] / figures['summarize_select_attend']:7.1f}"
        )
        for name, micros in sorted(result["kernels"].items(), key=lambda item: -item[1]):  # type: ignore[attr-defined]
            print(f"    {micros:8.2f} us  {name}")
        torch.cuda.empty_cache()
    if args.json:
        machine = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": __import__("triton").__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()

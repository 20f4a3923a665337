"""One layer's decode attention on a GPU: the ops through Inductor, against dense SDPA in the same run.

    python -m benchmarks.gpu_attention_layer

Every figure is the time of one layer inside a CUDA graph that runs through several layers with caches of their own,
as a model does, so that no cache or summary is still in L2 when its turn comes; the median over many replays.
Before anything is timed, results are checked against the eager ops and against the selection's own rule in fp64.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from benchmarks import common
from hsa_compile import algorithms, compat, lowering, ops

ALGORITHM = "cuboid"
SINK, RECENT = 1, 32
Step = Callable[..., Any]
WHOLE, SELECT_ATTEND = "summarize + select + attend", "select + attend"
DENSE, REBUILD = "dense SDPA (enable_gqa)", "the same after a prefill: all pages summarised"


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


def compiled(function: Step, max_autotune: bool) -> Step:
    """``function`` through Inductor with the ops' lowerings, and no compile cache."""
    patches = {"max_autotune": max_autotune, "force_disable_caches": True}

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Step:
        lowering.register()
        return compat.compile_with_inductor(
            gm, inputs, patches, ops.DECOMPOSITIONS, f"{__file__} {time.time()}"
        )

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=False, fullgraph=True)


def sparse_step(case: Case, with_summary: bool) -> Step:
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
            layer.q, layer.keys, layer.values, ids, None, bits, None, scale, case.page_size
        )
        return out, ids

    return step


def dense_step(layer: Layer) -> Tensor:
    return F.scaled_dot_product_attention(layer.q, layer.keys, layer.values, enable_gqa=True)


def check(case: Case, layer: Layer, bits: Tensor, position: Tensor, step: Step) -> None:
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
    recent_pages = max(1, RECENT // case.page_size)
    rank[..., 0] = rank[..., -recent_pages:] = float("inf")
    chosen = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, ids.long(), True)
    assert (ids >= 0).all() and (chosen.sum(-1) == case.slots).all(), "wrong number of pages"
    assert (ids.diff(dim=-1) > 0).all(), "ids are not ascending"
    worst_in = rank.masked_fill(~chosen, float("inf")).amin(-1)
    best_out = rank.masked_fill(chosen, float("-inf")).amax(-1)
    assert (worst_in > best_out - 1e-3).all(), "a better page was left out"

    exact, _ = torch.ops.hsa.sparse_attention(
        *(tensor.float() for tensor in (layer.q, layer.keys, layer.values)),
        ids,
        None,
        bits,
        None,
        scale,
        case.page_size,
    )
    error = ((out - exact).norm() / exact.norm()).item()
    assert error < 1e-2, f"attention is off by {error:.1e}"


@dataclass(frozen=True)
class Measured:
    """Seconds a layer of a CUDA graph, and microseconds a layer of each kernel in it."""

    timing: common.Timing
    kernels: dict[str, float]


def measure_graph(run: Callable[[], None], layers: int, replays: int) -> Measured:
    """Capture ``run``, which goes through ``layers`` layers, and time its replays one by one."""
    from torch.profiler import ProfilerActivity, profile

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
    seconds = [common.cuda_seconds_of(graph.replay) / layers for _ in range(replays)]
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
    kernels: dict[str, float] = defaultdict(float)
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name.split("(")[0]] += event.device_time / (5 * layers)
    return Measured(
        common.Timing.of(seconds),
        {name: round(micros, 2) for name, micros in kernels.items() if micros > 0.2},
    )


def measure(case: Case, replays: int, max_autotune: bool) -> dict[str, Measured]:
    layer_bytes = 2 * case.batch * case.kv_heads * case.tokens * case.dim * 2
    count = max(4, min(16, int(20e9 // layer_bytes)))
    layers = [make_layer(case) for _ in range(count)]
    word = (1 << case.page_size) - 1 if case.page_size < 64 else -1
    bits = torch.full((1, 1, case.pages), word, device="cuda")
    position = torch.full((1,), case.tokens // 2, device="cuda")
    whole = compiled(sparse_step(case, with_summary=True), max_autotune)
    select_attend = compiled(sparse_step(case, with_summary=False), max_autotune)
    check(case, layers[0], bits, position, whole)
    for layer in layers[1:]:
        whole(layer, bits, position)
    position.add_(1)

    def run_whole() -> None:
        for layer in layers:
            whole(layer, bits, position)
        position.add_(1)

    def run_rebuild() -> None:
        for layer in layers:
            layer.covered.fill_(-1)
            whole(layer, bits, position)

    def run_select_attend() -> None:
        for layer in layers:
            select_attend(layer, bits, position)

    def run_dense() -> None:
        for layer in layers:
            dense_step(layer)

    few = max(10, replays // 5)
    return {
        WHOLE: measure_graph(run_whole, count, replays),
        SELECT_ATTEND: measure_graph(run_select_attend, count, replays),
        DENSE: measure_graph(run_dense, count, few),
        REBUILD: measure_graph(run_rebuild, count, few),
    }


def table_of(case: Case, measured: dict[str, Measured]) -> Table:
    table = common.ratio_table(
        str(case), {name: held.timing for name, held in measured.items()}, ours=WHOLE
    )
    table.caption = "\n".join(
        f"{micros:8.2f} us  {name}" for name, micros in measured[WHOLE].kernels.items()
    )
    return table


def cases(arguments: argparse.Namespace) -> list[Case]:
    """The named batches at every page size, and the longer caches with pages of 32."""
    first, *longer = arguments.tokens
    short = [
        Case(batch, first, page, arguments.budget)
        for batch in arguments.batch
        for page in arguments.page_size
    ]
    return short + [
        Case(batch, tokens, 32, arguments.budget) for tokens in longer for batch in arguments.batch
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 131072])
    parser.add_argument("--page-size", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--budget", type=int, default=2048, help="tokens")
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument(
        "--max-autotune", action="store_true", help="time the kernels' configurations"
    )
    parser.add_argument("--quick", action="store_true", help="64K tokens and pages of 32 only")
    parser.add_argument(
        "--json", type=Path, help="default: benchmarks/results/gpu_attention_layer.json"
    )
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    if arguments.quick:
        arguments.tokens, arguments.page_size = [65536], [32]
    torch.manual_seed(0)
    results = []
    for case in cases(arguments):
        measured = measure(case, arguments.replays, arguments.max_autotune)
        common.show(table_of(case, measured))
        results.append(
            {
                "case": asdict(case),
                "timings": {name: held.timing.as_dict() for name, held in measured.items()},
                "kernels_us": {name: held.kernels for name, held in measured.items()},
                "times_faster_than_dense": round(
                    measured[DENSE].timing.median / measured[WHOLE].timing.median, 2
                ),
            }
        )
        torch.cuda.empty_cache()
    path = common.write_json("gpu_attention_layer", results, arguments.json)
    common.show(f"written to {path}")


if __name__ == "__main__":
    main()
